//! Queueing calls.

use std::sync::Arc;
use std::time::Duration;

use phalanx::{Deadline, Error, Result};

use super::call::{self, Call};
use super::flight::Flight;
use super::shared::Shared;
use crate::cuda::{Event, Pause};
use crate::nccl::{Code, Comm, IN_PROGRESS, INTERNAL_ERROR, REMOTE_ERROR, SUCCESS, SYSTEM_ERROR};

/// The most calls in flight. A stream takes about a thousand kernels; the next launch then waits inside the driver, without a time-out.
const MOST: usize = 128;

/// Why NCCL has not done what it was asked for.
pub(super) struct Refusal {
    pub error: Error,
    /// Whether a connection may have ended, as all do whose rank leaves.
    pub is_of_connection: bool,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self { error, is_of_connection: false }
    }
}

impl Shared {
    /// Queues `calls` as one, after all that was called before. The outer error is that of a call that NCCL did not get; the inner one
    /// that of a launch that failed, after which NCCL may still use the memory.
    ///
    /// # Safety
    /// If there is a flight, the memory of the calls stays until it is done, or the failed communicator no longer
    /// [aborts](super::Communicator::is_aborting).
    pub(super) unsafe fn launch(
        &self,
        calls: &[Call],
        timeout: Duration,
    ) -> Result<(Arc<Flight>, Result<()>)> {
        let (world, device) = (self.group.world_size(), self.stream.device());
        calls.iter().try_for_each(|call| call.check(world, self.group.rank(), device.ordinal()))?;
        let (deadline, name) = (Deadline::after(timeout), call::name(calls));
        let rank = self.group.rank();
        let sends =
            calls.iter().filter(|call| matches!(call, Call::Send { peer, .. } if *peer == rank)).count();
        let recvs =
            calls.iter().filter(|call| matches!(call, Call::Recv { peer, .. } if *peer == rank)).count();
        if sends != recvs {
            return Err(Error::invalid_argument(format!(
                "{name}: it has {sends} sends to this rank itself, and {recvs} receives from it"
            ))
            .with_remedy("make both calls as one, with group_calls"));
        }
        // A driver that does not say is broken: what comes next shows that, and ends the group.
        let captured = self.stream.check_not_captured().err().filter(Error::is_invalid_argument);
        captured.map_or(Ok(()), Err)?;
        self.make_room(&name, deadline)?;
        let Some(calling) = self.calling.try_lock_until(deadline.instant()) else {
            return Err(self.failure().unwrap_or_else(|| {
                Error::timeout(format!("{name}: another thread's call to NCCL has not returned in time"))
            }));
        };
        let sequence = self.next_sequence();
        if let Some(cause) = self.failure().or_else(|| self.group.failure()) {
            drop(calling);
            self.wake_watchdog();
            let remedy = cause.remedy().unwrap_or("the group has failed; start a new one").to_owned();
            return Err(match cause.operation() {
                Some(_) => cause,
                None => cause.in_operation(name.as_str(), Some(sequence)).with_remedy(remedy),
            });
        }
        // From here on the watchdog sees it: what follows may hang too.
        let flight = Arc::new(Flight::new(name, sequence, deadline, calls, device));
        self.add(flight.clone());
        // SAFETY: no other thread is in a call of NCCL, and the caller answers for the memory.
        let queued = unsafe { self.queue(calls, world.count()) }.and_then(|()| self.settle(deadline));
        // Before another thread queues its call, which this one's end is not to wait for.
        let queued = queued.and_then(|()| Ok(Event::at_end_of(&self.stream)?)).map(|end| {
            let _ = flight.end.set(end);
        });
        drop(calling);
        let launched = queued.map_err(|refusal| {
            // What other ranks wait for will not come.
            let error = flight.says(self.unless_left(&flight, refusal));
            let cause = self.group.fail_unless_explained(error);
            self.fail(cause.clone());
            self.await_settled(None);
            flight.says(cause)
        });
        Ok((flight, launched))
    }

    /// Waits until there are few enough calls in flight.
    fn make_room(&self, name: &str, deadline: Deadline) -> Result<()> {
        while let Some(oldest) = self.oldest_of(MOST) {
            match self.wait(&oldest, Some(deadline)) {
                Some(outcome) => outcome?,
                None => {
                    return Err(Error::timeout(format!(
                        "{name}: {MOST} calls are in flight, and {} {} has not ended in time",
                        oldest.name, oldest.sequence
                    )));
                }
            }
            self.forget_done();
        }
        Ok(())
    }

    /// Gives NCCL the calls, between `ncclGroupStart` and `ncclGroupEnd`.
    ///
    /// # Safety
    /// As [`launch`](Self::launch); the caller holds `calling`.
    unsafe fn queue(&self, calls: &[Call], world: usize) -> Result<(), Refusal> {
        let raw = self.alive()?;
        let _bound = self.stream.device().bind()?;
        // SAFETY: it has no conditions.
        let code = unsafe { (self.nccl.ncclGroupStart)() };
        if code != SUCCESS {
            return Err(self.refusal("ncclGroupStart", code));
        }
        let noted = calls.iter().try_for_each(|call| {
            // SAFETY: the caller says so.
            unsafe { call.launch(&self.nccl, raw, self.stream.raw(), world, self.group.rank()) }
        });
        // SAFETY: a group has been started on this thread. It is ended whatever a call has returned.
        let code = unsafe { (self.nccl.ncclGroupEnd)() };
        noted?;
        if code == SUCCESS || code == IN_PROGRESS { Ok(()) } else { Err(self.refusal("ncclGroupEnd", code)) }
    }

    /// Waits until NCCL has queued what it was given. It returns before when it has to connect ranks first.
    fn settle(&self, deadline: Deadline) -> Result<(), Refusal> {
        let mut pause = Pause::default();
        loop {
            // Before each look: the watchdog aborts when this thread has been inside NCCL for some seconds after a failure.
            let raw = self.alive()?;
            // SAFETY: it is alive, and the caller holds `calling`.
            if unsafe { self.is_settled(raw) }? {
                return Ok(());
            }
            if let Some(cause) = self.group.failure() {
                return Err(cause.into());
            }
            if deadline.has_passed() {
                return Err(Error::timeout("NCCL has not started it in time").into());
            }
            pause.pause();
        }
    }

    /// Has the communicator nothing left to do on the host? An error if it has failed.
    ///
    /// # Safety
    /// `raw` is alive, and no other thread is in a call of NCCL with it.
    pub(super) unsafe fn is_settled(&self, raw: Comm) -> Result<bool, Refusal> {
        let mut state = SUCCESS;
        // SAFETY: the caller says so.
        let code = unsafe { (self.nccl.ncclCommGetAsyncError)(raw, &mut state) };
        match if code == SUCCESS { state } else { code } {
            SUCCESS => Ok(true),
            IN_PROGRESS => Ok(false),
            code => Err(self.refusal("ncclCommGetAsyncError", code)),
        }
    }

    fn refusal(&self, function: &str, code: Code) -> Refusal {
        let is_of_connection = [SYSTEM_ERROR, INTERNAL_ERROR, REMOTE_ERROR].contains(&code);
        Refusal { error: self.nccl.error(function, code), is_of_connection }
    }
}
