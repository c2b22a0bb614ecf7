//! The gradients of a unit's parameters, until this rank has the average of its shard.

use std::mem;
use std::sync::Arc;

use burn::backend::Dispatch;
use burn::tensor::{Tensor, TensorData};
use parking_lot::Mutex;
use phalanx::{Buffer, Error, ReduceOp, Result, Work};

use super::super::op::{GradientSource, GradientTarget, ParallelOp, Source, Target};
use super::exchanges::{Call, Exchanges, Held, Place, Use};
use super::layout::FlatLayout;
use super::replicated::Replicated;
use crate::tensor_bytes::{self, TensorBytes};

/// Takes the gradients of a unit's parameters from one forward pass, and gives that of the shard.
pub(super) struct Collector {
    exchanges: Arc<Exchanges>,
    unit: Arc<FlatLayout>,
    /// Who gets the shard's gradient, if there are replicas.
    replicated: Option<Arc<Replicated>>,
    state: Mutex<Collected>,
}

enum Collected {
    /// Some gradients have come, and so many have not.
    Open(Option<Held<Buffer>>, usize),
    /// They are being reduced and scattered.
    Sent(Held<Work>),
    Shard(TensorData),
    /// The shard's gradient was taken, or went to the replicas, or could not be had.
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
        Arc::new(Self { exchanges: exchanges.clone(), unit: unit.clone(), replicated, state })
    }

    /// A tensor of one element, to which backward comes last: then the gradient of the shard `parameter` is had, at the latest.
    pub fn anchor(self: &Arc<Self>, parameter: Tensor<1>) -> Tensor<1> {
        let of_shard = Arc::new(OfShard(self.clone()));
        Tensor::from_dispatch(match self.replicated {
            None => Dispatch::rooted(parameter.into_dispatch(), Source(of_shard)),
            Some(_) => {
                let leaf = Tensor::<1>::zeros([1], &parameter.device()).require_grad();
                Dispatch::delivered(leaf.into_dispatch(), Target(of_shard))
            }
        })
    }

    /// Takes the gradient of a parameter; with the last one, they are on their way.
    fn take(self: &Arc<Self>, index: usize, gradient: TensorBytes<'_>) -> Result<()> {
        let mut state = self.state.lock();
        let Collected::Open(gradients, left) = &mut *state else {
            return Err(Error::aborted("a gradient comes after its unit's: this is a defect of phalanx"));
        };
        if gradients.is_none() {
            *gradients = Some(self.exchanges.alloc(&self.unit, Use::Gradients)?);
        }
        let place = self.unit.place(index).zip(gradients.as_mut());
        let place = place.and_then(|(place, gradients)| gradients.value.as_bytes_mut().get_mut(place));
        match place {
            Some(place) if place.len() == gradient.bytes.len() && gradient.dtype == self.unit.dtype => {
                place.copy_from_slice(gradient.bytes);
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
        let is_last = *left == 0;
        drop(state);
        if is_last { self.send() } else { self.exchanges.advance() }
    }

    /// Sends what has come; what has not is zero.
    pub fn send(self: &Arc<Self>) -> Result<()> {
        let mut state = self.state.lock();
        let Collected::Open(gradients, _) = &mut *state else { return Ok(()) };
        let Held { value, counted } = match gradients.take() {
            Some(gradients) => gradients,
            None => self.exchanges.alloc(&self.unit, Use::Gradients)?,
        };
        self.exchanges.note(Call::Scatter(self.unit.unit as u32), self.unit.bytes());
        let group = &self.exchanges.group;
        let value = group.reduce_scatter_v_async(value, &self.unit.counts(), ReduceOp::Avg)?;
        *state = Collected::Sent(Held { value, counted });
        drop(state);
        self.exchanges.scattering(self)
    }

    /// Has the average arrived, without having been looked at?
    pub fn has_arrived(&self) -> bool {
        matches!(&*self.state.lock(), Collected::Sent(sent) if sent.value.is_completed())
    }

    /// Waits for the average, if it is on its way, gives it to the replicas, and frees the other ranks' part.
    pub fn settle(&self) -> Result<()> {
        let mut state = self.state.lock();
        *state = match mem::replace(&mut *state, Collected::Over) {
            Collected::Sent(Held { value, counted }) => {
                let buffer = value.wait()?;
                let FlatLayout { unit, shard, dtype, .. } = *self.unit;
                let bytes = &buffer.as_bytes()[self.unit.shard_bytes(self.exchanges.rank())];
                let collected = match &self.replicated {
                    None => Collected::Shard(tensor_bytes::tensor_data(bytes, &[shard], dtype)),
                    Some(replicated) => {
                        replicated.take(unit, TensorBytes { dtype, bytes });
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

    fn shard(self: &Arc<Self>) -> Result<TensorData> {
        self.send()?;
        self.settle()?;
        match mem::replace(&mut *self.state.lock(), Collected::Over) {
            Collected::Shard(shard) => Ok(shard),
            Collected::Open(..) | Collected::Sent(_) | Collected::Over => {
                Err(Error::aborted("the gradients of a unit could not be had"))
            }
        }
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

/// What becomes of the gradient of a shard.
struct OfShard(Arc<Collector>);

impl GradientSource for OfShard {
    fn gradient(&self, _shape: &[usize]) -> Option<TensorData> {
        let exchanges = &self.0.exchanges;
        self.0.shard().inspect_err(|error| exchanges.fail(error.clone())).ok()
    }
}

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
