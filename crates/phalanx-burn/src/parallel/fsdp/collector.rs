//! The gradients of a unit's parameters, until this rank has the average of its shard.

use std::mem;
use std::sync::Arc;

use burn::tensor::TensorData;
use parking_lot::Mutex;
use phalanx::{Buffer, Error, ReduceOp, Result, Work};

use super::super::op::{GradientSource, GradientTarget};
use super::exchanges::{Call, Exchanges, Held, Use};
use super::layout::FlatLayout;
use crate::tensor_bytes::{self, TensorBytes};

/// Takes the gradients of a unit's parameters from one forward pass, and gives that of the shard.
pub(super) struct Collector {
    exchanges: Arc<Exchanges>,
    unit: Arc<FlatLayout>,
    state: Mutex<Collected>,
}

enum Collected {
    /// Some gradients have come, and so many have not.
    Open(Option<Held<Buffer>>, usize),
    /// They are being reduced and scattered.
    Sent(Held<Work>),
    Shard(TensorData),
    /// The shard's gradient was taken, or could not be had.
    Over,
}

impl Collector {
    pub fn new(exchanges: &Arc<Exchanges>, unit: &Arc<FlatLayout>) -> Arc<Self> {
        let state = Mutex::new(Collected::Open(None, unit.parameters.len()));
        Arc::new(Self { exchanges: exchanges.clone(), unit: unit.clone(), state })
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
        if is_last { self.send() } else { Ok(()) }
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

    /// Waits for the average, if it is on its way, and frees the other ranks' part.
    pub fn settle(&self) -> Result<()> {
        let mut state = self.state.lock();
        *state = match mem::replace(&mut *state, Collected::Over) {
            Collected::Sent(Held { value, counted }) => {
                let buffer = value.wait()?;
                let own = &buffer.as_bytes()[self.unit.shard_bytes(self.exchanges.rank())];
                let shard = tensor_bytes::tensor_data(own, &[self.unit.shard], self.unit.dtype);
                drop((buffer, counted));
                Collected::Shard(shard)
            }
            other => other,
        };
        Ok(())
    }

    fn shard(self: &Arc<Self>) -> Result<TensorData> {
        self.send()?;
        self.settle()?;
        match mem::replace(&mut *self.state.lock(), Collected::Over) {
            Collected::Shard(shard) => Ok(shard),
            _ => Err(Error::aborted("the gradients of a unit could not be had")),
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

/// Where the gradient of a shard comes from.
pub(super) struct OfShard(pub Arc<Collector>);

impl GradientSource for OfShard {
    fn gradient(&self, _shape: &[usize]) -> Option<TensorData> {
        let exchanges = &self.0.exchanges;
        self.0.shard().inspect_err(|error| exchanges.fail(error.clone())).ok()
    }
}
