//! What stands for an operation in flight.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use phalanx::{Deadline, Error, Result};

use crate::engine::Shared;
use crate::tensor::Tensor;

/// An operation in flight, which owns its tensors until it is done. [`synchronize`](Self::synchronize) waits for it.
///
/// Dropping it detaches it: the operation still runs, because the other ranks wait for this rank's part.
#[must_use = "a handle is waited for with `synchronize`"]
pub struct Handle<T> {
    slot: Arc<Slot>,
    take: fn(Outcome) -> Result<T>,
    engine: Arc<Shared>,
}

/// What an operation leaves behind.
#[derive(Default)]
pub(crate) struct Outcome {
    pub tensors: Vec<Tensor>,
    /// Of an alltoall: how many rows came from each rank.
    pub splits: Vec<usize>,
    /// Of a join.
    pub last: u32,
}

#[derive(Default)]
struct Slot {
    outcome: Mutex<Option<Result<Outcome>>>,
    done: Condvar,
}

/// The side that ends an operation. If it is dropped before, the operation fails.
pub(crate) struct Completer(Arc<Slot>);

impl<T> Handle<T> {
    /// A handle, and what ends it.
    pub(crate) fn new(take: fn(Outcome) -> Result<T>, engine: Arc<Shared>) -> (Self, Completer) {
        let slot = Arc::new(Slot::default());
        (Self { slot: slot.clone(), take, engine }, Completer(slot))
    }

    /// Whether it is done, or has failed. If so, [`synchronize`](Self::synchronize) does not wait.
    pub fn poll(&self) -> bool {
        self.slot.outcome.lock().is_some()
    }

    /// Waits until the operation is done, or until `timeout` has passed. Returns whether it is done.
    pub fn wait_for(&self, timeout: Duration) -> bool {
        if self.poll() {
            return true;
        }
        // Also if the clock does not go as far as the time-out.
        let deadline = Deadline::after(timeout).instant();
        let _waits = self.engine.waits();
        let mut outcome = self.slot.outcome.lock();
        while outcome.is_none() {
            if self.slot.done.wait_until(&mut outcome, deadline).timed_out() {
                break;
            }
        }
        outcome.is_some()
    }

    /// Waits for the end of the operation, and returns its result. The wait is limited: tensors that some rank does not
    /// submit within [`stall_shutdown_time`](crate::Options::stall_shutdown_time) end the job with an error.
    ///
    /// # Errors
    /// If the ranks have submitted different things under this name. If the job has failed: with the first cause.
    #[doc(alias = "wait")]
    pub fn synchronize(self) -> Result<T> {
        let _waits = (!self.poll()).then(|| self.engine.waits());
        let mut outcome = self.slot.outcome.lock();
        loop {
            match outcome.take() {
                Some(outcome) => return outcome.and_then(self.take),
                None => self.slot.done.wait(&mut outcome),
            }
        }
    }
}

impl<T> fmt::Debug for Handle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.poll() { "Handle(done)" } else { "Handle(in flight)" })
    }
}

impl Completer {
    pub fn complete(self, outcome: Result<Outcome>) {
        *self.0.outcome.lock() = Some(outcome);
        self.0.done.notify_all();
    }
}

impl Drop for Completer {
    fn drop(&mut self) {
        let mut outcome = self.0.outcome.lock();
        // If the handle has taken an outcome, nobody reads this one.
        if outcome.is_none() {
            *outcome = Some(Err(Error::aborted("Horovod's thread ended before the operation did")));
            self.0.done.notify_all();
        }
    }
}

impl Outcome {
    pub fn of(tensors: Vec<Tensor>) -> Self {
        Self { tensors, ..Self::default() }
    }

    /// The only tensor.
    pub fn single(mut self) -> Result<Tensor> {
        let tensor = self.tensors.pop().filter(|_| self.tensors.is_empty());
        tensor.ok_or_else(|| Error::aborted("an operation on one tensor has another number of results"))
    }
}
