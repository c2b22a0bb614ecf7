//! The gradients of a unit's parameters, until this rank has the average of its shard.

use std::mem;
use std::sync::Arc;

use burn::backend::Dispatch;
use burn::tensor::{Device, Tensor, TensorData};
use parking_lot::Mutex;
use phalanx::{Buffer, Error, ReduceOp, Result, Work};

use super::super::op::{GradientSource, GradientTarget, ParallelOp, Source, Supply, Target};
use super::calls::Call;
use super::exchanges::{Exchanges, Held, Place, Use, WeakExchanges};
use super::layout::FlatLayout;
use super::replicated::Replicated;
use crate::tensor_bytes::TensorBytes;

/// Takes the gradients of a unit's parameters from one forward pass, and gives that of the shard.
pub(super) struct Collector {
    exchanges: WeakExchanges,
    unit: Arc<FlatLayout>,
    /// The replicas, which get the shard's gradient, if there are any.
    replicated: Option<Arc<Replicated>>,
    state: Mutex<Collected>,
}

enum Collected {
    /// Some gradients have come, and so many have not.
    Open(Option<Held<Buffer>>, usize),
    /// They are being reduced and scattered.
    Sent(Held<Work>),
    /// By parameter: the average of this rank's piece, until it is taken.
    Shard(Vec<Option<TensorData>>),
    /// The shard's gradient went to the replicas, or could not be had.
    Over,
}

impl Collector {
    /// For the use of a unit at `place`.
    pub fn new(exchanges: &Arc<Exchanges>, unit: &Arc<FlatLayout>, place: &Place) -> Arc<Self> {
        let state = Mutex::new(Collected::Open(None, unit.parameters.len()));
        let replicated = place.replicated();
        if let Some(replicated) = &replicated {
            replicated.expect(unit.unit);
        }
        Arc::new(Self { exchanges: exchanges.downgrade(), unit: unit.clone(), replicated, state })
    }

    /// A tensor of one element, to which backward comes last: then the gradients of `pieces`, this rank's shard, are had, at the
    /// latest.
    pub fn anchor(self: &Arc<Self>, pieces: Vec<Tensor<1>>, device: &Device) -> Tensor<1> {
        if self.replicated.is_some() {
            let leaf = Tensor::<1>::zeros([1], (device, self.unit.dtype)).require_grad();
            let of_shard = Target(Arc::new(OfShard(self.clone())));
            return Tensor::from_dispatch(Dispatch::delivered(leaf.into_dispatch(), of_shard));
        }
        let root = |(index, piece): (usize, Tensor<1>)| {
            let gradient = Source(Arc::new(OfPiece { collector: self.clone(), index }));
            Dispatch::rooted(piece.into_dispatch(), gradient)
        };
        let mut anchors: Vec<_> = pieces.into_iter().enumerate().map(root).collect();
        // In a tree, and in no row: Burn's tape runs by depth, and all of these must come after what units before this one compute.
        while anchors.len() > 1 {
            let mut pairs = anchors.into_iter();
            anchors = Vec::new();
            while let Some(one) = pairs.next() {
                anchors.push(match pairs.next() {
                    Some(other) => Dispatch::behind(one, other, Supply::Nothing),
                    None => one,
                });
            }
        }
        anchors.pop().map_or_else(|| Tensor::zeros([1], device), Tensor::from_dispatch)
    }

    /// Takes the gradient of a parameter; with the last one, they are on their way. In a pass of weight 0 it stays zero, as if there
    /// were none.
    fn take(self: &Arc<Self>, index: usize, gradient: TensorBytes<'_>) -> Result<()> {
        let exchanges = self.exchanges.upgrade()?;
        let is_void = exchanges.is_void();
        let mut state = self.state.lock();
        let Collected::Open(gradients, left) = &mut *state else {
            return Err(Error::aborted("a gradient comes after its unit's: this is a defect of phalanx"));
        };
        if gradients.is_none() {
            *gradients = Some(exchanges.alloc(&self.unit, Use::Gradients)?);
        }
        let place = self.unit.place(index).zip(gradients.as_mut());
        let place = place.and_then(|(place, gradients)| gradients.value.as_bytes_mut().get_mut(place));
        match place {
            Some(place) if place.len() == gradient.bytes.len() && gradient.dtype == self.unit.dtype => {
                if !is_void {
                    place.copy_from_slice(gradient.bytes);
                }
            }
            _ => {
                let name = self.unit.parameters.get(index).map_or("", |parameter| parameter.name.as_str());
                return Err(Error::invalid_argument(format!(
                    "the gradient of `{name}` in unit {} has another size or type than the parameter",
                    self.unit.unit
                )));
            }
        }
        *left = left.saturating_sub(1);
        if !is_void {
            exchanges.has_gradient(&self.unit, index);
        }
        let is_last = *left == 0;
        drop(state);
        if is_last { self.send() } else { exchanges.advance() }
    }

    /// Sends what has come. In the row, what has not is zero: for other ranks, which may have it.
    pub fn send(self: &Arc<Self>) -> Result<()> {
        let mut state = self.state.lock();
        let Collected::Open(gradients, _) = &mut *state else { return Ok(()) };
        let exchanges = self.exchanges.upgrade()?;
        let Held { value, counted } = match gradients.take() {
            Some(gradients) => gradients,
            None => exchanges.alloc(&self.unit, Use::Gradients)?,
        };
        exchanges.note(Call::Scatter(self.unit.unit as u32), self.unit.bytes());
        let group = &exchanges.group;
        let value = group.reduce_scatter_v_async(value, &self.unit.counts(), ReduceOp::Avg)?;
        *state = Collected::Sent(Held { value, counted });
        drop(state);
        exchanges.scattering(self)
    }

    /// Whether the average has arrived, without waiting for it or taking it.
    pub fn has_arrived(&self) -> bool {
        matches!(&*self.state.lock(), Collected::Sent(sent) if sent.value.is_completed())
    }

    /// Waits for the average, if it is on its way, gives it to the replicas, and frees the other ranks' part.
    pub fn settle(&self) -> Result<()> {
        let mut state = self.state.lock();
        *state = match mem::replace(&mut *state, Collected::Over) {
            Collected::Sent(Held { value, counted }) => {
                let buffer = value.wait()?;
                let rank = self.exchanges.upgrade()?.rank();
                let piece = |index| self.unit.piece_data(index, rank, buffer.as_bytes());
                let pieces = (0..self.unit.parameters.len()).map(piece).collect::<Result<Vec<_>>>()?;
                let collected = match &self.replicated {
                    None => Collected::Shard(pieces.into_iter().map(Some).collect()),
                    Some(replicated) => {
                        replicated.take(&self.unit, &pieces);
                        Collected::Over
                    }
                };
                drop((buffer, counted));
                collected
            }
            other @ (Collected::Open(..) | Collected::Shard(_) | Collected::Over) => other,
        };
        Ok(())
    }

    fn piece(self: &Arc<Self>, index: usize) -> Result<TensorData> {
        self.send()?;
        self.settle()?;
        let piece = match &mut *self.state.lock() {
            Collected::Shard(pieces) => pieces.get_mut(index).and_then(Option::take),
            Collected::Open(..) | Collected::Sent(_) | Collected::Over => None,
        };
        piece.ok_or_else(|| Error::aborted("the gradients of a unit could not be had"))
    }
}

/// Where a parameter's gradient goes.
pub(super) struct OfParameter {
    pub collector: Arc<Collector>,
    pub index: usize,
}

impl GradientTarget for OfParameter {
    fn deliver(&self, gradient: TensorBytes<'_>, _shape: &[usize]) -> Result<()> {
        self.collector.take(self.index, gradient)
    }

    fn fail(&self, error: Error) {
        self.collector.exchanges.fail(error);
    }
}

/// The gradient of this rank's piece of a parameter. It is zero where no rank has one, and is taken out after the backward pass.
struct OfPiece {
    collector: Arc<Collector>,
    index: usize,
}

impl GradientSource for OfPiece {
    fn gradient(&self, _shape: &[usize]) -> Option<TensorData> {
        let exchanges = &self.collector.exchanges;
        self.collector.piece(self.index).inspect_err(|error| exchanges.fail(error.clone())).ok()
    }
}

/// What becomes of the gradients of a shard that go to replicas.
struct OfShard(Arc<Collector>);

impl GradientTarget for OfShard {
    /// The gradient of an anchor has come: all those of the unit's parameters that there are have come before.
    fn deliver(&self, _nothing: TensorBytes<'_>, _shape: &[usize]) -> Result<()> {
        self.0.send()?;
        self.0.settle()
    }

    fn fail(&self, error: Error) {
        self.0.exchanges.fail(error);
    }
}
