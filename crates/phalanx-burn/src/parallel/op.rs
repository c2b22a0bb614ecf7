//! The differentiable operations of model parallelism, in the form of Burn's extension API.

use std::fmt;
use std::sync::Arc;

#[cfg(feature = "cube")]
use burn::backend::Cube;
#[cfg(feature = "tch")]
use burn::backend::LibTorch;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex, TensorMetadata, backend_extension};
use burn::tensor::{DType, Shape, TensorData};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use parking_lot::Mutex;
use phalanx::{Error, Result};

use super::exchange::{Exchange, not_a_number};
use crate::tensor_bytes::{HostAccess, TensorBytes};

/// Receives the gradient of a tensor when backward has finished it.
pub(super) trait GradientTarget: Send + Sync {
    /// The gradient's memory is borrowed until this returns.
    fn deliver(&self, gradient: TensorBytes<'_>, shape: &[usize]) -> Result<()>;

    /// Keeps the error of a gradient that was not delivered: backward cannot return it.
    fn fail(&self, error: Error);
}

/// Gives the gradient with which backward begins.
pub(super) trait GradientSource: Send + Sync {
    /// The gradient of a tensor of `shape`; None if it could not be had, and then backward goes on with NaN.
    fn gradient(&self, shape: &[usize]) -> Option<TensorData>;
}

/// A gradient that is known before backward asks for it.
#[derive(Default)]
pub(super) struct KnownGradient(Mutex<Option<TensorData>>);

impl KnownGradient {
    pub fn new(gradient: TensorData) -> Self {
        Self(Mutex::new(Some(gradient)))
    }

    pub fn set(&self, gradient: TensorData) {
        *self.0.lock() = Some(gradient);
    }
}

impl GradientSource for KnownGradient {
    fn gradient(&self, shape: &[usize]) -> Option<TensorData> {
        self.0.lock().take().filter(|gradient| gradient.shape().as_slice() == shape)
    }
}

/// A [`GradientTarget`] as the state of an operation. `pub` because the macro's trait is.
#[derive(Clone)]
pub struct Target(pub(super) Arc<dyn GradientTarget>);

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Target")
    }
}

/// A [`GradientSource`] as the state of an operation.
#[derive(Clone)]
pub struct Source(pub(super) Arc<dyn GradientSource>);

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Source")
    }
}

/// What [`ParallelOp::behind`] gives a tensor as its gradient.
#[derive(Clone, Debug)]
pub enum Supply {
    /// Zero: the tensor's gradient comes from elsewhere.
    Nothing,
    /// The source's.
    Gradient(Source),
}

/// The operations. `pub` because the macro implements it for a public type; the module is private.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"), LibTorch: cfg(feature = "tch"))]
pub trait ParallelOp: Backend {
    /// `tensor` after the exchange's forward step; its gradient goes through the exchange's backward step.
    fn exchanged(tensor: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self>;

    /// Identity whose backward gives the gradient to `target`, and to nothing else.
    fn delivered(tensor: FloatTensor<Self>, target: Target) -> FloatTensor<Self> {
        let _ = target;
        tensor
    }

    /// One zero, of shape `[1]`, from which backward runs as if `source`'s gradient were that of `tensor`.
    fn rooted(tensor: FloatTensor<Self>, source: Source) -> FloatTensor<Self> {
        let _ = source;
        zero::<Self>(&tensor)
    }

    /// `output`, which was computed outside of the graph. Backward gives its gradient to `target`, and zero to `anchor`, a tensor of
    /// one element.
    fn attached(output: FloatTensor<Self>, anchor: FloatTensor<Self>, target: Target) -> FloatTensor<Self> {
        let _ = (anchor, target);
        output
    }

    /// `anchor`, a tensor of one element. Burn's backward pass comes to it before it comes to `tensor`, which then gets the gradient that
    /// `supply` says; `anchor` gets zero.
    fn behind(anchor: FloatTensor<Self>, tensor: FloatTensor<Self>, supply: Supply) -> FloatTensor<Self> {
        let _ = (tensor, supply);
        anchor
    }
}

impl ParallelOp for Flex {
    fn exchanged(tensor: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self> {
        exchange.forward::<Self>(tensor)
    }
}

#[cfg(feature = "cube")]
impl ParallelOp for Cube {
    fn exchanged(tensor: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self> {
        exchange.forward::<Self>(tensor)
    }
}

#[cfg(feature = "tch")]
impl ParallelOp for LibTorch {
    fn exchanged(tensor: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self> {
        exchange.forward::<Self>(tensor)
    }
}

impl<B: Backend + HostAccess, C: CheckpointStrategy> ParallelOp for Autodiff<B, C> {
    fn exchanged(tensor: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self> {
        let (primitive, node) = tensor.into_parts();
        let shape = primitive.shape();
        let output = exchange.forward::<B>(primitive);
        match Exchanged.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((exchange, shape), output),
            OpsKind::UnTracked(prep) => prep.finish(output),
        }
    }

    fn delivered(tensor: FloatTensor<Self>, target: Target) -> FloatTensor<Self> {
        let (primitive, node) = tensor.into_parts();
        match Delivered.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(target, primitive),
            OpsKind::UnTracked(prep) => prep.finish(primitive),
        }
    }

    fn rooted(tensor: FloatTensor<Self>, source: Source) -> FloatTensor<Self> {
        let (primitive, node) = tensor.into_parts();
        let (root, shape) = (zero::<B>(&primitive), primitive.shape());
        match Rooted.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((source, shape), root),
            OpsKind::UnTracked(prep) => prep.finish(root),
        }
    }

    fn attached(output: FloatTensor<Self>, anchor: FloatTensor<Self>, target: Target) -> FloatTensor<Self> {
        let ((primitive, _), (_, node)) = (output.into_parts(), anchor.into_parts());
        match Attached.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(target, primitive),
            OpsKind::UnTracked(prep) => prep.finish(primitive),
        }
    }

    fn behind(anchor: FloatTensor<Self>, tensor: FloatTensor<Self>, supply: Supply) -> FloatTensor<Self> {
        let ((primitive, node), (other, other_node)) = (anchor.into_parts(), tensor.into_parts());
        match Behind.prepare::<C>([node, other_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((supply, other.shape(), other.dtype()), primitive),
            OpsKind::UnTracked(prep) => prep.finish(primitive),
        }
    }
}

fn zero<B: Backend>(like: &FloatTensor<B>) -> FloatTensor<B> {
    B::float_zeros(Shape::new([1]), &like.device(), like.dtype().into())
}

fn deliver<B: HostAccess>(gradient: FloatTensor<B>, Target(target): &Target) {
    let shape = gradient.shape();
    let delivered = B::read(gradient, |gradient| target.deliver(gradient, shape.as_slice()));
    if let Err(error) = delivered.flatten() {
        target.fail(error);
    }
}

/// Backward of [`ParallelOp::exchanged`].
#[derive(Debug)]
struct Exchanged;

impl<B: Backend + HostAccess> Backward<B, 1> for Exchanged {
    type State = (Exchange, Shape);

    fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<B>(&ops.node);
        let (exchange, shape) = ops.state;
        let [parent] = ops.parents;
        let Some(parent) = parent else { return };
        let mut gradient = exchange.backward::<B>(gradient);
        // After a forward step that failed because the shape cannot be divided; Burn would panic.
        if gradient.shape() != shape {
            gradient = not_a_number::<B>(shape, &gradient);
        }
        gradients.register::<B>(parent.id, gradient);
    }
}

/// Backward of [`ParallelOp::delivered`].
#[derive(Debug)]
struct Delivered;

impl<B: Backend + HostAccess> Backward<B, 1> for Delivered {
    type State = Target;

    fn backward(self, ops: Ops<Target, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<B>(&ops.node);
        deliver::<B>(gradient, &ops.state);
    }
}

/// Backward of [`ParallelOp::rooted`].
#[derive(Debug)]
struct Rooted;

impl<B: Backend> Backward<B, 1> for Rooted {
    type State = (Source, Shape);

    fn backward(self, ops: Ops<(Source, Shape), 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let root = gradients.consume::<B>(&ops.node);
        let (source, shape) = ops.state;
        let [parent] = ops.parents;
        let Some(parent) = parent else { return };
        let gradient = match source.0.gradient(shape.as_slice()) {
            Some(data) => B::float_from_data(data, &root.device()),
            None => not_a_number::<B>(shape, &root),
        };
        gradients.register::<B>(parent.id, gradient);
    }
}

/// Backward of [`ParallelOp::attached`].
#[derive(Debug)]
struct Attached;

impl<B: Backend + HostAccess> Backward<B, 1> for Attached {
    type State = Target;

    fn backward(self, ops: Ops<Target, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<B>(&ops.node);
        let [anchor] = ops.parents;
        if let Some(anchor) = anchor {
            gradients.register::<B>(anchor.id, zero::<B>(&gradient));
        }
        deliver::<B>(gradient, &ops.state);
    }
}

/// Backward of [`ParallelOp::behind`].
#[derive(Debug)]
struct Behind;

impl<B: Backend> Backward<B, 2> for Behind {
    type State = (Supply, Shape, DType);

    fn backward(self, ops: Ops<Self::State, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let nothing = gradients.consume::<B>(&ops.node);
        let (supply, shape, dtype) = ops.state;
        let [anchor, tensor] = ops.parents;
        if let Some(tensor) = tensor {
            let device = nothing.device();
            let full = |value: f64| B::float_full(shape.clone(), value.into(), &device, dtype.into());
            let gradient = match supply {
                Supply::Nothing => full(0.0),
                Supply::Gradient(source) => match source.0.gradient(shape.as_slice()) {
                    Some(data) => B::float_from_data(data, &device),
                    None => full(f64::NAN),
                },
            };
            gradients.register::<B>(tensor.id, gradient);
        }
        if let Some(anchor) = anchor {
            gradients.register::<B>(anchor.id, nothing);
        }
    }
}
