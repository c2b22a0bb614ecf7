//! Gradient-ready hooks: they pass gradients to the reducer while the backward pass still runs.
//!
//! Burn has no hook for "this gradient is finished", but its extension API allows operations with a backward pass of
//! one's own. [`hooked`] wraps each parameter of a module in an identity operation. The tape runs that operation's
//! backward once every use of the parameter has added its share, so what it sees is the finished gradient.
//!
//! **Depth.** Burn runs its tape by graph depth, deepest first. A bare identity on a leaf has depth 1: all hooks would
//! run together after the last layer, and nothing would overlap. So the parent of each hook is a *token* that carries
//! no gradient and grows by [`LEVELS`] empty operations for each parameter in module order. That lifts the hook
//! of a late layer to about the depth of the layer itself. Depth decides only when a hook runs, never what it sees,
//! because a parent always runs after its children.
//!
//! **No parameter's leaf.** The parameter itself is no parent: its gradient ends at the hook. Its leaf is the same in all clones of a model, and Burn can lock up all
//! threads of a process where two of them have graphs with one leaf: its `backward` holds the lock of the graph and then takes that of all graphs, and an
//! operation that joins two graphs takes them in the other order. All passes of a model begin at one token instead, so that they are in one graph: in a
//! backward pass of one, Burn frees those that were given up.
//!
//! **No global state.** Arguments that are not tensors pass through the extension macro untouched, so the operation
//! takes a [`Target`], which holds the sink itself, and keeps it as the state of its backward pass.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

#[cfg(feature = "cube")]
use burn::backend::Cube;
#[cfg(feature = "tch")]
use burn::backend::LibTorch;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, DispatchTensor, Flex, backend_extension};
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::Tensor;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_autodiff::{Autodiff, NodeId};

use crate::parameters::Inventory;
use crate::tensor_bytes::{Access, HostAccess};

/// Levels of depth between the hooks of neighbouring parameters: about the operations a layer has per parameter.
const LEVELS: usize = 4;

/// Receives the gradients of one backward pass while it runs.
///
/// Backward cannot return an error, so a sink keeps its error until it is asked for it.
pub(crate) trait GradientSink: Send + Sync {
    /// The gradient of parameter `index` is finished, or a device has all the work that finishes it. Its memory is borrowed
    /// until this returns.
    fn ready(&self, index: usize, gradient: Access<'_>);
}

/// The receiver of a hook's gradients.
#[derive(Clone)]
pub struct Target {
    sink: Arc<dyn GradientSink>,
    index: usize,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({})", self.index)
    }
}

/// A copy of `module` whose parameters that need a gradient, and have a number in the `inventory`, report it to `sink` under that number.
///
/// Tensors are reference counted: the copy shares all memory, running statistics included, with the original.
pub(crate) fn hooked<M: Module>(module: &M, inventory: &Inventory, sink: Arc<dyn GradientSink>) -> M {
    let (token, indices) = (inventory.token.clone(), &inventory.indices);
    module.clone().map(&mut Hooker { sink, token, indices, hooked: HashMap::new() })
}

struct Hooker<'a> {
    sink: Arc<dyn GradientSink>,
    token: Tensor<1>,
    /// Not counted anew: parameters may have been frozen since they were numbered.
    indices: &'a HashMap<ParamId, usize>,
    /// A parameter that is used in several places has one hook, which sees the sum over all of them.
    hooked: HashMap<ParamId, DispatchTensor>,
}

impl ModuleMapper for Hooker<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(&index) = self.indices.get(&param.id).filter(|_| param.is_require_grad()) else {
            return param;
        };
        let (id, tensor, mapper) = param.consume();
        let hooked = self.hooked.entry(id).or_insert_with(|| {
            let mut token = self.token.clone().into_dispatch();
            for _ in 0..LEVELS {
                token = Dispatch::step_down(token);
            }
            self.token = Tensor::from_dispatch(token.clone());
            let target = Target { sink: self.sink.clone(), index };
            Dispatch::gradient_hook(tensor.into_dispatch(), token, target)
        });
        Param::from_mapped_value(id, Tensor::from_dispatch(hooked.clone()), mapper)
    }
}

/// The leaf of the graph that `tensor` is; None on a device without a graph. Clones of a tensor are the same leaf, also if each of them was
/// made to need a gradient.
pub(crate) fn leaf(tensor: DispatchTensor) -> Option<NodeId> {
    let leaf = Leaf::default();
    drop(Dispatch::note_leaf(tensor, leaf.clone()));
    leaf.0.get().copied()
}

/// Where [`GradientHook::note_leaf`] writes.
#[derive(Clone, Debug, Default)]
pub struct Leaf(Arc<OnceLock<NodeId>>);

/// A forward pass, whose output [`GradientHook::visited`] gives. It keeps nothing of the graph.
#[derive(Clone, Debug)]
pub struct Visit {
    pub pass: u64,
    /// The first pass to whose output backward has come.
    pub first: Arc<AtomicU64>,
}

/// The operations, in the form of Burn's extension API. `pub` because the macro implements it for a public type;
/// the module is private.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"), LibTorch: cfg(feature = "tch"))]
pub trait GradientHook: Backend {
    /// Identity on `tensor`, which needs a gradient; its backward reports the finished gradient to `target`, and `tensor` itself gets none. `token`
    /// only carries depth.
    fn gradient_hook(
        tensor: FloatTensor<Self>,
        token: FloatTensor<Self>,
        target: Target,
    ) -> FloatTensor<Self> {
        let _ = (token, target);
        tensor
    }

    /// Identity that notes the leaf of the graph.
    fn note_leaf(tensor: FloatTensor<Self>, into: Leaf) -> FloatTensor<Self> {
        let _ = into;
        tensor
    }

    /// Identity whose backward does nothing: one more level of depth.
    fn step_down(token: FloatTensor<Self>) -> FloatTensor<Self> {
        token
    }

    /// Identity whose backward notes that it has come here, and passes the gradient on.
    fn visited(tensor: FloatTensor<Self>, visit: Visit) -> FloatTensor<Self> {
        let _ = visit;
        tensor
    }
}

impl GradientHook for Flex {}

#[cfg(feature = "cube")]
impl GradientHook for Cube {}

#[cfg(feature = "tch")]
impl GradientHook for LibTorch {}

impl<B: Backend + HostAccess, C: CheckpointStrategy> GradientHook for Autodiff<B, C> {
    fn gradient_hook(
        tensor: FloatTensor<Self>,
        token: FloatTensor<Self>,
        target: Target,
    ) -> FloatTensor<Self> {
        let (primitive, _) = tensor.into_parts();
        let (_, token_node) = token.into_parts();
        match Deliver.prepare::<C>([token_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(target, primitive),
            OpsKind::UnTracked(prep) => prep.finish(primitive),
        }
    }

    fn note_leaf(tensor: FloatTensor<Self>, into: Leaf) -> FloatTensor<Self> {
        into.0.get_or_init(|| tensor.id());
        tensor
    }

    fn step_down(token: FloatTensor<Self>) -> FloatTensor<Self> {
        let (primitive, node) = token.into_parts();
        match StepDown.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((), primitive),
            OpsKind::UnTracked(prep) => prep.finish(primitive),
        }
    }

    fn visited(tensor: FloatTensor<Self>, visit: Visit) -> FloatTensor<Self> {
        let (primitive, node) = tensor.into_parts();
        match Visited.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(visit, primitive),
            OpsKind::UnTracked(prep) => prep.finish(primitive),
        }
    }
}

/// Backward of [`GradientHook::gradient_hook`].
#[derive(Debug)]
struct Deliver;

impl<B: Backend + HostAccess> Backward<B, 1> for Deliver {
    type State = Target;

    fn backward(self, ops: Ops<Target, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        // The gradient is not registered for the parameter: the sink has taken what it needs, so its memory is freed
        // now and not after the last layer.
        let gradient = gradients.consume::<B>(&ops.node);
        let Target { sink, index } = ops.state;
        B::access(gradient, |gradient| sink.ready(index, gradient));
    }
}

/// Backward of [`GradientHook::step_down`].
#[derive(Debug)]
struct StepDown;

impl<B: Backend> Backward<B, 1> for StepDown {
    type State = ();

    fn backward(self, _: Ops<(), 1>, _: &mut Gradients, _: &mut Checkpointer) {}
}

/// Backward of [`GradientHook::visited`].
#[derive(Debug)]
struct Visited;

impl<B: Backend> Backward<B, 1> for Visited {
    type State = Visit;

    fn backward(self, ops: Ops<Visit, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<B>(&ops.node);
        let Visit { pass, first } = ops.state;
        first.fetch_min(pass, Ordering::Relaxed);
        let [parent] = ops.parents;
        if let Some(parent) = parent {
            gradients.register::<B>(parent.id, gradient);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests are tests")]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread::spawn;
    use std::time::Duration;

    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Device;
    use parking_lot::Mutex;

    use super::*;

    /// Notes the order in which gradients were ready.
    #[derive(Default)]
    struct Order(Mutex<Vec<usize>>);

    impl GradientSink for Order {
        fn ready(&self, index: usize, _: Access<'_>) {
            self.0.lock().push(index);
        }
    }

    /// `x` with a hook of its own depth, which is not on the path of its gradient.
    fn beside(x: &Tensor<2>, target: Target) -> Tensor<2> {
        let [x, token] = [x.clone(), x.clone()].map(Tensor::into_dispatch);
        Tensor::from_dispatch(Dispatch::gradient_hook(x, token, target))
    }

    #[test]
    fn a_layer_s_gradients_are_ready_before_backward_reaches_the_layer_below_its_neighbour() {
        const LAYERS: usize = 12;
        /// Added to the number of the layer whose input is marked.
        const MARK: usize = 1000;
        let device = Device::flex().autodiff();
        let model: Vec<Linear> = (0..LAYERS).map(|_| LinearConfig::new(4, 4).init(&device)).collect();
        let inventory = Inventory::of(&model).unwrap();
        let sink = Arc::new(Order::default());
        let mut x = Tensor::<2>::ones([2, 4], &device).require_grad();
        let mut marks = Tensor::<1>::zeros([1], &device);
        for (number, layer) in hooked(&model, &inventory, sink.clone()).iter().enumerate() {
            // Beside the path of the gradient, a hook one level above this: it runs when backward gets here.
            let target = Target { sink: sink.clone(), index: MARK + number };
            marks = marks + beside(&x, target).sum();
            x = layer.forward(x).tanh();
        }
        drop((x.sum() + marks).backward());

        let order = sink.0.lock();
        let place = |index: usize| order.iter().position(|other| *other == index).unwrap();
        assert_eq!(order.len(), 3 * LAYERS);
        for layer in 1..LAYERS {
            for parameter in [2 * layer, 2 * layer + 1] {
                assert!(place(parameter) < place(MARK + layer - 1), "layer {layer}: {order:?}");
            }
        }
    }

    /// Waits in a backward pass until it is let on.
    struct Gate {
        reached: Sender<()>,
        open: Mutex<Receiver<()>>,
    }

    impl GradientSink for Gate {
        fn ready(&self, _: usize, _: Access<'_>) {
            self.reached.send(()).unwrap();
            // The other end is dropped if the test fails.
            let _ = self.open.lock().recv();
        }
    }

    /// As of the ranks of a process that all train clones of one model. If a hook waited for the other thread's backward, both could for ever.
    #[test]
    fn a_parameter_that_is_in_another_thread_s_backward_is_hooked_meanwhile() {
        const LIMIT: Duration = Duration::from_secs(120);
        let device = Device::flex().autodiff();
        let layer: Linear = LinearConfig::new(4, 4).init(&device);
        let inventory = Inventory::of(&layer).unwrap();
        let ((reached, has_reached), (let_on, open)) = (channel(), channel());
        let gate: Arc<dyn GradientSink> = Arc::new(Gate { reached, open: Mutex::new(open) });
        let input = || Tensor::<2>::ones([2, 4], &device);
        let y = layer.forward(input());
        let target = Target { sink: gate, index: 0 };
        let other = spawn(move || drop((beside(&y, target) + y).sum().backward()));
        has_reached.recv_timeout(LIMIT).unwrap();
        let (order, (passed, has_passed)) = (Arc::new(Order::default()), channel());
        let (sink, x) = (order.clone(), input());
        let own = spawn(move || {
            drop(hooked(&layer, &inventory, sink).forward(x).sum().backward());
            passed.send(()).unwrap();
        });
        has_passed.recv_timeout(LIMIT).expect("the hook waits for the backward pass of the other thread");
        drop(let_on);
        own.join().unwrap();
        other.join().unwrap();
        assert_eq!(order.0.lock().len(), 2);
    }
}
