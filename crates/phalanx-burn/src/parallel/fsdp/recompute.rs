//! The backward pass of a unit whose parameters were freed: they are gathered, and its forward pass is repeated.
//!
//! Burn's graph keeps the weights that it needs, so only a repeated forward pass frees them. A unit's output is
//! computed outside of the graph and attached to it by an operation whose backward gathers, repeats, and runs a graph
//! of its own inside Burn's backward pass. Burn locks a graph while it runs backward, and the inner graph must not
//! share a node with it. So a unit's closure is a function pointer, which cannot capture tensors, and its inputs lose
//! their graphs.

use std::sync::{Arc, Weak};

use burn::backend::Dispatch;
use burn::module::Module;
use burn::tensor::{Gradients, Tensor};
use parking_lot::Mutex;
use phalanx::trace::Track;
use phalanx::{Error, Result};

use super::super::op::{GradientTarget, KnownGradient, ParallelOp, Source};
use super::super::random::OwnNumbers;
use super::collector::Collector;
use super::exchanges::{Place, Shard, WeakExchanges, dropped};
use super::inputs::{FloatMapper, UnitInputs};
use super::unit::{Unit, device_of};
use super::whole::Role;
use crate::read_back;
use crate::tensor_bytes::{self, TensorBytes};

/// The gradients of a unit's inputs, in their order; none of those that need none.
#[derive(Clone, Default)]
pub(super) struct Slots(Arc<Mutex<Vec<Slot>>>);

type Slot = Option<Arc<KnownGradient>>;

impl Slots {
    /// Adds that of the next input.
    pub fn add(&self, is_tracked: bool) -> Slot {
        let slot = is_tracked.then(Arc::default);
        self.0.lock().push(slot.clone());
        slot
    }

    fn all(&self) -> std::vec::IntoIter<Slot> {
        self.0.lock().clone().into_iter()
    }
}

/// What a forward pass leaves for the backward pass.
type Kept<M, I, const D: usize> = (Shard, I, fn(&M, I) -> Tensor<D>);

/// Takes the gradient of a unit's output, and from it computes those of its inputs and parameters.
pub(super) struct Recomputed<M, I, const D: usize> {
    /// Neither it nor the groups are kept by the graph, which may never run backward.
    unit: Weak<Unit<M>>,
    exchanges: WeakExchanges,
    place: Place,
    seed: u64,
    /// None of a frozen unit.
    collector: Option<Arc<Collector>>,
    slots: Slots,
    /// This rank's shard, the inputs, and what is computed with them.
    held: Mutex<Option<Kept<M, I, D>>>,
}

impl<M: Module, I: UnitInputs, const D: usize> Recomputed<M, I, D> {
    pub fn new(
        unit: &Arc<Unit<M>>,
        (place, seed): (Place, u64),
        (collector, slots): (Option<Arc<Collector>>, Slots),
        held: Kept<M, I, D>,
    ) -> Self {
        let (unit, exchanges) = (Arc::downgrade(unit), unit.exchanges.downgrade());
        Self { unit, exchanges, place, seed, collector, slots, held: Mutex::new(Some(held)) }
    }

    fn run(&self, gradient: TensorBytes<'_>, shape: &[usize]) -> Result<()> {
        let unit = self.unit.upgrade().ok_or_else(dropped)?;
        let Unit { exchanges, layout, .. } = &*unit;
        exchanges.check()?;
        let Some((shard, inputs, pass)) = self.held.lock().take() else {
            return Err(Error::aborted("backward runs twice through a unit: this is a defect of phalanx"));
        };
        let gradient = tensor_bytes::tensor_data(gradient.bytes, shape, gradient.dtype);
        let role = self.collector.clone().map_or(Role::Constant, Role::Leaf);
        let device = device_of(&shard);
        let next = exchanges.before(&self.place);
        let module = unit.whole(&shard, Some(&self.place), next, role)?;
        exchanges.traced(Track::Backward, layout, || {
            let leaves = inputs.map_floats(&mut Leaves(self.slots.all()));
            let own_numbers = OwnNumbers::of(&device)?;
            device.seed(self.seed);
            let output = pass(&module, leaves.clone());
            drop((own_numbers, module));
            if output.dims().as_slice() != shape || !output.is_autodiff() || !output.is_tracked() {
                return Err(Error::invalid_argument(format!(
                    "the closure of unit {} gave an output of shape {shape:?}, and when it was repeated for the backward pass, one of \
                     {:?}, {}",
                    layout.unit,
                    output.dims(),
                    if output.is_autodiff() && output.is_tracked() { "with a graph" } else { "without a graph" }
                ))
                .with_remedy("let the closure compute the same from the module and its inputs each time"));
            }
            exchanges.advance()?;
            let source = Source(Arc::new(KnownGradient::new(gradient)));
            let root = Tensor::<1>::from_dispatch(Dispatch::rooted(output.into_dispatch(), source));
            let gradients = root.backward();
            let mut taken = Taken { gradients, slots: self.slots.all(), outcome: Ok(()) };
            drop(leaves.map_floats(&mut taken));
            taken.outcome
        })?;
        // A parameter that had no part in it has no gradient yet.
        self.collector.as_ref().map_or(Ok(()), Collector::send)
    }
}

impl<M: Module, I: UnitInputs, const D: usize> GradientTarget for Recomputed<M, I, D> {
    fn deliver(&self, gradient: TensorBytes<'_>, shape: &[usize]) -> Result<()> {
        self.run(gradient, shape)
    }

    fn fail(&self, error: Error) {
        self.exchanges.fail(error);
    }
}

/// Lets the inputs that need a gradient have one.
struct Leaves(std::vec::IntoIter<Slot>);

impl FloatMapper for Leaves {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        match self.0.next() {
            Some(Some(_)) => tensor.require_grad(),
            _ => tensor,
        }
    }
}

/// Hands over the gradients of inputs.
struct Taken {
    gradients: Gradients,
    slots: std::vec::IntoIter<Slot>,
    outcome: Result<()>,
}

impl FloatMapper for Taken {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        if let Some(Some(slot)) = self.slots.next() {
            let gradient = tensor.grad_remove(&mut self.gradients);
            // An input that has no part in the output.
            let gradient = gradient.unwrap_or_else(|| tensor.clone().inner().zeros_like());
            match read_back::data(gradient) {
                Ok(data) => slot.set(data),
                Err(error) => self.outcome = Err(error),
            }
        }
        tensor
    }
}
