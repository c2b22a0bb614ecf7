//! Calls in flight.

use std::any::Any;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use phalanx::{Deadline, Error, Rank, Result, Sequence};

use super::call::Call;
use super::record::{CallRecord, CallState};
use crate::cuda::{Device, Event};

/// What is said of a call, once and for all: either it was done, and every wait for it succeeds, or it was given up, and the communicator
/// fails. Between the end of a call's time and the failure a second goes by, in which another cause is waited for; a call that ends
/// meanwhile must not be both.
#[derive(Default)]
struct Verdict(AtomicU8);

const DONE: u8 = 1;
const GIVEN_UP: u8 = 2;

impl Verdict {
    fn is(&self, verdict: u8) -> bool {
        self.0.load(Ordering::Acquire) == verdict
    }

    /// Whether it is this now: the first verdict stays.
    fn becomes(&self, verdict: u8) -> bool {
        match self.0.compare_exchange(0, verdict, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => true,
            Err(before) => before == verdict,
        }
    }
}

/// A call from the moment when NCCL gets it until it is done, or the communicator has been aborted. The device frees no memory meanwhile.
pub(super) struct Flight {
    pub name: String,
    pub sequence: Sequence,
    pub deadline: Deadline,
    calls: Vec<Call>,
    device: Device,
    /// When it was made, and when it was seen to be done.
    made: Instant,
    ended: OnceLock<Instant>,
    /// Set when it is queued.
    pub end: OnceLock<Event>,
    verdict: Verdict,
    landed: AtomicBool,
    /// The memory of a call whose handle was dropped.
    kept: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Flight {
    pub(super) fn new(
        name: String,
        sequence: Sequence,
        deadline: Deadline,
        calls: &[Call],
        device: &Device,
    ) -> Self {
        device.launched();
        Self {
            name,
            sequence,
            deadline,
            calls: calls.to_vec(),
            device: device.clone(),
            made: Instant::now(),
            ended: OnceLock::new(),
            end: OnceLock::new(),
            verdict: Verdict::default(),
            landed: AtomicBool::new(false),
            kept: Mutex::new(None),
        }
    }

    /// `error`, as this call reports it.
    pub(super) fn says(&self, error: Error) -> Error {
        if error.operation().is_some() {
            error
        } else {
            error.in_operation(self.name.as_str(), Some(self.sequence))
        }
    }

    /// How far it is.
    pub(super) fn record(&self) -> CallRecord {
        let ended = self.ended.get().map(|ended| ended.duration_since(self.made));
        CallRecord {
            sequence: self.sequence,
            name: self.name.clone(),
            age: self.made.elapsed(),
            state: CallState::new(self.end.get().is_some(), self.verdict.is(GIVEN_UP), ended),
        }
    }

    /// Whether it waits for `rank`.
    pub(super) fn needs(&self, rank: Rank) -> bool {
        self.calls.iter().any(|call| call.needs(rank))
    }

    /// Keeps the memory until the call is done.
    pub(super) fn keep(&self, memory: Box<dyn Any + Send>) {
        *self.kept.lock() = Some(memory);
    }

    /// Drops the memory that was kept. What that does is the memory's own business, and may last: the watchdog never does it.
    pub(super) fn release(&self) {
        let memory = self.kept.lock().take();
        // A panic of it would end the thread that looks after the other calls.
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(memory)));
    }

    /// Whether it is known that it was done before any failure.
    pub(super) fn is_known_done(&self) -> bool {
        self.verdict.is(DONE)
    }

    /// Gives it up: the communicator fails because of it. False if it is known to be done, so that it is no reason for that.
    pub(super) fn give_up(&self) -> bool {
        self.verdict.becomes(GIVEN_UP)
    }

    /// Was it done before any failure? Asks the device only if it is not known.
    pub(super) fn is_done(&self, failed: &AtomicBool) -> Result<bool> {
        if self.is_known_done() {
            return Ok(true);
        }
        let Some(end) = self.end.get() else { return Ok(false) };
        // An abort ends kernels too, whose events are then reached: the failure is there before the abort begins.
        if !end.is_reached()? || failed.load(Ordering::Acquire) {
            return Ok(false);
        }
        if !self.verdict.becomes(DONE) {
            return Ok(false);
        }
        let _ = self.ended.set(Instant::now());
        self.land();
        Ok(true)
    }

    /// It uses no memory any more.
    pub(super) fn land(&self) {
        if !self.landed.swap(true, Ordering::AcqRel) {
            self.device.landed();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_done_or_given_up_and_never_both() {
        let verdict = Verdict::default();
        assert!(!verdict.is(DONE) && !verdict.is(GIVEN_UP));
        assert!(verdict.becomes(GIVEN_UP) && verdict.becomes(GIVEN_UP));
        assert!(!verdict.becomes(DONE) && !verdict.is(DONE));
        let verdict = Verdict::default();
        assert!(verdict.becomes(DONE) && !verdict.becomes(GIVEN_UP) && verdict.is(DONE));
    }
}
