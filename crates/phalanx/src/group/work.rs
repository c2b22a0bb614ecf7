//! Handles to operations in flight.

use std::fmt;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::buffer::Buffer;
use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// An asynchronous operation that owns its buffer until it is done.
///
/// Dropping a `Work` detaches it: the operation still runs, because the other ranks need this rank's part, and its
/// buffer is freed afterwards. A failure of it is not lost, since it ends the whole group.
pub struct Work {
    slot: Arc<Slot>,
}

#[derive(Default)]
struct Slot {
    outcome: Mutex<Option<Result<Buffer>>>,
    done: Condvar,
}

/// The side that completes a [`Work`]. Dropped without an outcome (a panicked worker), it fails the work.
pub(crate) struct Completer {
    slot: Arc<Slot>,
}

impl Work {
    /// A work, and the handle that will complete it.
    pub(crate) fn pending() -> (Self, Completer) {
        let slot = Arc::new(Slot::default());
        (Self { slot: slot.clone() }, Completer { slot })
    }

    /// A work that is already done.
    pub fn ready(outcome: Result<Buffer>) -> Self {
        let (work, completer) = Self::pending();
        completer.complete(outcome);
        work
    }

    /// Has it succeeded or failed?
    pub fn is_completed(&self) -> bool {
        self.slot.outcome.lock().is_some()
    }

    /// Waits for the end, which the deadlines of this operation and of those called before it bound, and gives the
    /// buffer back.
    pub fn wait(self) -> Result<Buffer> {
        let mut outcome = self.slot.outcome.lock();
        loop {
            match outcome.take() {
                Some(outcome) => return outcome,
                None => self.slot.done.wait(&mut outcome),
            }
        }
    }

    /// Waits until `deadline`. If it passes first, the work itself comes back unharmed.
    pub fn wait_until(self, deadline: Deadline) -> Result<Result<Buffer>, Self> {
        let mut outcome = self.slot.outcome.lock();
        while outcome.is_none() {
            if self.slot.done.wait_until(&mut outcome, deadline.instant()).timed_out() && outcome.is_none() {
                drop(outcome);
                return Err(self);
            }
        }
        let taken = outcome.take();
        Ok(taken.unwrap_or_else(|| Err(Error::aborted("the operation has no outcome"))))
    }
}

impl Completer {
    pub(crate) fn complete(self, outcome: Result<Buffer>) {
        self.finish(outcome);
    }

    fn finish(&self, outcome: Result<Buffer>) {
        let mut slot = self.slot.outcome.lock();
        if slot.is_none() {
            *slot = Some(outcome);
        }
        self.slot.done.notify_all();
    }
}

impl Drop for Completer {
    fn drop(&mut self) {
        // After `complete` the outcome may have been taken already; only a waiter that is still there sees this one.
        if Arc::strong_count(&self.slot) > 1 {
            self.finish(Err(Error::aborted(
                "the group's communication worker ended before the operation did",
            )));
        }
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_completed() { "Work(completed)" } else { "Work(in flight)" })
    }
}
