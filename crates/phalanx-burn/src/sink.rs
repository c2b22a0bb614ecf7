//! What hooks deliver to: gradients go on to the reducer, or are held until they should.

use std::sync::Arc;

use burn::tensor::{bf16, f16};
use parking_lot::Mutex;
use phalanx::reducer::Reducer;
use phalanx::reducer::hooks::CommHook;
use phalanx::{Buffer, Communicator, DType, Error, Rank, Result};

use crate::bridge::{self, Lent};
use crate::hook::GradientSink;
use crate::parameters::Parameter;

/// What happens to a gradient that is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// It goes to the reducer at once, with what was held for its parameter.
    Now,
    /// It is added to what is held for its parameter.
    Hold,
    /// It is dropped: it came from another model's backward pass, such as that of a generator whose loss a
    /// discriminator computes.
    Ignore,
}

/// One forward pass. It lives as long as its graph can still run backward.
pub(crate) struct Pass(pub Arc<Sink>);

impl GradientSink for Pass {
    fn ready(&self, index: usize, gradient: Lent<'_>) {
        self.0.ready(index, gradient);
    }
}

/// The reducer, as hooks reach it.
pub(crate) struct Sink {
    group: Arc<dyn Communicator>,
    state: Mutex<SinkState>,
}

struct SinkState {
    reducer: Reducer,
    delivery: Delivery,
    held: Vec<Held>,
    /// The first failure. Backward cannot return it, so it waits here for [`Sink::check`].
    failure: Option<Error>,
}

/// What is held of one parameter.
struct Held {
    dtype: DType,
    elements: usize,
    /// The sum of the gradients that have not gone to the reducer yet. Its memory is taken once.
    sum: Option<Buffer>,
    /// Has any come since the last one went?
    any: bool,
}

impl Sink {
    pub fn new(reducer: Reducer, group: Arc<dyn Communicator>, parameters: &[Parameter]) -> Result<Self> {
        let slot = |parameter: &Parameter| {
            let (dtype, elements) = (bridge::dtype(parameter.dtype)?, parameter.shape.iter().product());
            Ok(Held { dtype, elements, sum: None, any: false })
        };
        let held = parameters.iter().map(slot).collect::<Result<_>>()?;
        Ok(Self {
            group,
            state: Mutex::new(SinkState { reducer, delivery: Delivery::Ignore, held, failure: None }),
        })
    }

    /// The failure of this or an earlier backward pass, if there was one.
    pub fn check(&self) -> Result<()> {
        self.state.lock().failure.clone().map_or(Ok(()), Err)
    }

    /// A backward pass begins of which nothing is to be averaged yet.
    pub fn hold(&self) -> Result<()> {
        self.attempt(|state| {
            state.delivery = Delivery::Hold;
            Ok(())
        })
    }

    /// The backward pass that [`hold`](Self::hold) announced is over.
    pub fn release(&self) -> Result<()> {
        self.attempt(|state| {
            state.delivery = Delivery::Ignore;
            Ok(())
        })
    }

    /// Begins a backward pass that [`finish`](Self::finish) ends.
    pub fn start(&self, delivery: Delivery) -> Result<()> {
        self.attempt(|state| {
            state.delivery = delivery;
            state.reducer.start()
        })
    }

    /// Begins a backward pass whose gradients can be averaged [again](Self::finish_in).
    pub fn start_replayable(&self, delivery: Delivery) -> Result<()> {
        self.attempt(|state| state.reducer.keep_gradients())?;
        self.start(delivery)
    }

    /// Hands over what is still held, waits for all ranks, and shows the reducer with its averages.
    pub fn finish<T>(&self, look: impl FnOnce(&mut Reducer) -> Result<T>) -> Result<T> {
        self.attempt(|state| {
            state.hand_over()?;
            state.reducer.finish()?;
            look(&mut state.reducer)
        })
    }

    /// As [`finish`](Self::finish), and again in another group: a failure of the group does not end the sink.
    pub fn finish_in<T>(
        &self,
        group: Arc<dyn Communicator>,
        look: impl FnOnce(&mut Reducer) -> Result<T>,
    ) -> Result<T> {
        self.attempt(SinkState::hand_over)?;
        let mut state = self.state.lock();
        state.reducer.finish_in(group)?;
        look(&mut state.reducer).inspect_err(|error| self.group.abort(error.clone()))
    }

    /// Changes to another group, between steps.
    pub fn rebind(&self, group: Arc<dyn Communicator>) -> Result<()> {
        self.attempt(|state| state.reducer.rebind(group))
    }

    /// From now on only its owner gets a parameter's average.
    pub fn shard(&self, owners: Vec<Rank>) -> Result<()> {
        self.attempt(|state| state.reducer.shard(owners))
    }

    /// Gives the reducer all ranks' parameters; `give` has those of this one.
    pub fn gather(
        &self,
        give: impl FnOnce(&mut dyn FnMut(usize, &[u8]) -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        self.attempt(|state| state.reducer.gather_parameters(give))
    }

    pub fn with_reducer<T>(&self, look: impl FnOnce(&mut Reducer) -> T) -> T {
        look(&mut self.state.lock().reducer)
    }

    /// Ends the group with `failure`, unless something has failed before.
    pub fn fail(&self, failure: Error) {
        // A failure is kept, and surfaces from the next call that can return one.
        let _kept = self.attempt(|_| Err::<(), _>(failure));
    }

    pub fn register_hook(&self, hook: Box<dyn CommHook>) -> Result<()> {
        self.attempt(|state| state.reducer.register_hook(hook))
    }

    pub fn communicated_bytes(&self) -> u64 {
        self.state.lock().reducer.communicated_bytes()
    }

    /// Takes over where rank `root`'s reducer stands. What was held is gone: it belonged to no finished step.
    pub fn adopt(&self, root: Rank) -> Result<()> {
        self.attempt(|state| {
            state.held.iter_mut().for_each(|held| held.any = false);
            state.reducer.adopt(root)
        })
    }

    /// Runs `step` unless something has failed before. A failure is kept, and ends the group: other ranks must not wait
    /// for what this one cannot do.
    fn attempt<T>(&self, step: impl FnOnce(&mut SinkState) -> Result<T>) -> Result<T> {
        let mut state = self.state.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let outcome = step(&mut state);
        if let Err(failure) = &outcome {
            state.failure = Some(failure.clone());
            self.group.abort(failure.clone());
        }
        outcome
    }

    fn ready(&self, index: usize, gradient: Lent<'_>) {
        // A failure is kept, and surfaces from the call that runs this backward pass.
        let _kept = self.attempt(|state| state.ready(index, gradient));
    }
}

impl SinkState {
    /// Backward is over: what is still held goes to the reducer.
    fn hand_over(&mut self) -> Result<()> {
        self.delivery = Delivery::Ignore;
        for (index, held) in self.held.iter_mut().enumerate() {
            if let Some(sum) = held.take() {
                self.reducer.ready(index, sum.as_bytes())?;
            }
        }
        Ok(())
    }

    fn ready(&mut self, index: usize, gradient: Lent<'_>) -> Result<()> {
        if self.delivery == Delivery::Ignore {
            return Ok(());
        }
        let Self { reducer, delivery, held, .. } = self;
        let Some(held) = held.get_mut(index) else {
            return Err(Error::invalid_argument(format!(
                "a gradient came for the unknown parameter {index}"
            )));
        };
        let (arrived, dtype, elements) = (bridge::dtype(gradient.dtype)?, held.dtype, held.elements);
        if arrived != dtype || gradient.bytes.len() != elements * dtype.size() {
            return Err(Error::invalid_argument(format!(
                "the gradient of parameter {index} has {} bytes of {arrived}, the parameter {elements} x {dtype}",
                gradient.bytes.len()
            )));
        }
        match delivery {
            Delivery::Now if !held.any => reducer.ready(index, gradient.bytes),
            Delivery::Now => {
                held.add(gradient.bytes)?;
                held.take().map_or(Ok(()), |sum| reducer.ready(index, sum.as_bytes()))
            }
            Delivery::Hold => held.add(gradient.bytes),
            Delivery::Ignore => Ok(()),
        }
    }
}

impl Held {
    fn add(&mut self, gradient: &[u8]) -> Result<()> {
        let (dtype, elements) = (self.dtype, self.elements);
        let sum = self.sum.get_or_insert_with(|| Buffer::zeroed(dtype, elements));
        if std::mem::replace(&mut self.any, true) {
            add(sum, gradient)
        } else {
            sum.as_bytes_mut().copy_from_slice(gradient);
            Ok(())
        }
    }

    /// The sum, if there is any; the next gradient begins another.
    fn take(&mut self) -> Option<&Buffer> {
        self.sum.as_ref().filter(|_| std::mem::take(&mut self.any))
    }
}

/// `sum += gradient`, element by element; half precision is added in f32.
fn add(sum: &mut Buffer, gradient: &[u8]) -> Result<()> {
    fn each<T: phalanx::Element>(sum: &mut Buffer, gradient: &[u8], plus: impl Fn(T, T) -> T) -> Result<()> {
        let Ok(gradient) = bytemuck::try_cast_slice::<u8, T>(gradient) else {
            return Err(Error::invalid_argument("a gradient's memory is not aligned to its elements"));
        };
        for (sum, gradient) in sum.as_mut_slice::<T>()?.iter_mut().zip(gradient) {
            *sum = plus(*sum, *gradient);
        }
        Ok(())
    }
    match sum.dtype() {
        DType::F32 => each::<f32>(sum, gradient, |a, b| a + b),
        DType::F64 => each::<f64>(sum, gradient, |a, b| a + b),
        DType::F16 => each::<f16>(sum, gradient, |a, b| f16::from_f32(a.to_f32() + b.to_f32())),
        DType::BF16 => each::<bf16>(sum, gradient, |a, b| bf16::from_f32(a.to_f32() + b.to_f32())),
        other => Err(Error::invalid_argument(format!("gradients of type {other} cannot be accumulated"))),
    }
}
