//! Handles to calls in flight.

use std::fmt;
use std::sync::Arc;

use phalanx::{Deadline, Result};

use super::flight::Flight;
use super::shared::Shared;
use crate::cuda::Stream;

/// A call in flight, with its memory. Dropping it detaches the call: it still runs, and the memory is dropped afterwards.
#[must_use = "the memory is given back by `wait`"]
pub struct Work<M: Send + 'static> {
    shared: Arc<Shared>,
    flight: Arc<Flight>,
    memory: Option<M>,
}

impl<M: Send + 'static> Work<M> {
    pub(super) fn new(shared: Arc<Shared>, flight: Arc<Flight>, memory: M) -> Self {
        Self { shared, flight, memory: Some(memory) }
    }

    /// Waits for the end of the call, on this thread, and returns its memory. The call's time-out limits the wait.
    ///
    /// # Errors
    /// If the communicator fails first: the cause, with this call.
    pub fn wait(self) -> Result<M> {
        loop {
            if let Some(outcome) = self.shared.wait(&self.flight, None) {
                return outcome.and_then(|()| self.into_memory());
            }
        }
    }

    /// Waits until `deadline`. If it passes first, the work itself is returned unchanged. After a failure it waits for the abort, but not
    /// beyond `deadline`.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_until(self, deadline: Deadline) -> Result<Result<M>, Self> {
        match self.shared.wait(&self.flight, Some(deadline)) {
            Some(outcome) => Ok(outcome.and_then(|()| self.into_memory())),
            None => Err(self),
        }
    }

    /// Lets what is queued on `stream` from now on wait for the call, and returns the memory at once: for that stream, and for no
    /// other. No thread waits. The call is still in flight: [`DeviceMemory`](crate::DeviceMemory) says what a drop of the memory must not
    /// do meanwhile. If the call fails, the stream continues with memory whose content is not specified; the next call, or
    /// [`Communicator::failure`](super::Communicator::failure), says so.
    ///
    /// # Errors
    /// If the communicator has failed, the driver refuses, or a graph is captured from the stream; the memory is then dropped when the call is
    /// done.
    pub fn order(self, stream: &Stream) -> Result<M> {
        stream.check_not_captured()?;
        if self.shared.failure().is_some() {
            return self.wait();
        }
        if let Some(end) = self.flight.end.get() {
            stream.wait_for_event(end)?;
        }
        self.into_memory()
    }

    /// Whether it has succeeded or failed.
    pub fn is_completed(&self) -> bool {
        self.shared.is_over(&self.flight)
    }

    fn into_memory(mut self) -> Result<M> {
        self.memory.take().ok_or_else(|| phalanx::Error::invalid_argument("the memory was taken already"))
    }
}

impl<M: Send + 'static> Drop for Work<M> {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        if !self.shared.is_own() {
            return std::mem::forget(memory);
        }
        // Either it is over, or whoever finds that it is drops the memory.
        match self.shared.is_over(&self.flight) && !self.shared.is_aborting() {
            true => drop(memory),
            false => self.flight.keep(Box::new(memory)),
        }
    }
}

impl<M: Send + 'static> fmt::Debug for Work<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.is_completed() { "completed" } else { "in flight" };
        write!(f, "Work({}, {state})", self.flight.name)
    }
}
