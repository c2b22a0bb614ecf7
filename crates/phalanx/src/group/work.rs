//! Handles to operations in flight.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::buffer::Buffer;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::transport::health::Health;

/// An asynchronous operation that owns its buffer until it is done.
///
/// Dropping a `Work` detaches it: the operation still runs, because the other ranks need this rank's part, and its
/// buffer is freed afterwards. A failure of it is not lost, since it ends the whole group.
pub struct Work {
    slot: Arc<Slot>,
    /// None if it never was in flight.
    group: Option<Arc<Health>>,
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
        (Self { slot: slot.clone(), group: None }, Completer { slot })
    }

    /// A work of a group, which it can abort.
    pub(crate) fn pending_in(group: Arc<Health>) -> (Self, Completer) {
        let (work, completer) = Self::pending();
        (Self { group: Some(group), ..work }, completer)
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

    /// Why it failed, once it has. [`wait`](Self::wait) gives the same error.
    pub fn error(&self) -> Option<Error> {
        self.slot.outcome.lock().as_ref().and_then(|outcome| outcome.as_ref().err().cloned())
    }

    /// Ends the operation, and with it its group on every rank, as [`ProcessGroup::abort`](crate::ProcessGroup::abort)
    /// does: the peers take part in the operation, so it cannot end here alone. A work that is completed still gives
    /// its outcome.
    pub fn abort(&self, cause: Error) {
        if let Some(group) = &self.group {
            group.fail(cause);
        }
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

    /// As [`wait_until`](Self::wait_until), for `timeout` from now.
    ///
    /// ```
    /// use std::time::Duration;
    /// use phalanx::{Buffer, DType, ProcessGroup, ReduceOp};
    /// let group = ProcessGroup::alone()?;
    /// let mut work = group.all_reduce_async(Buffer::zeroed(DType::F32, 8), ReduceOp::Sum)?;
    /// let buffer = loop {
    ///     match work.wait_timeout(Duration::from_millis(100)) {
    ///         Ok(outcome) => break outcome?,
    ///         Err(unfinished) => work = unfinished, // time to do something else
    ///     }
    /// };
    /// assert_eq!(buffer.len(), 8);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    pub fn wait_timeout(self, timeout: Duration) -> Result<Result<Buffer>, Self> {
        self.wait_until(Deadline::after(timeout))
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
