//! What a communicator's handles, its calls in flight and its watchdog share.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use phalanx::{Deadline, Error, ProcessGroup, Result, Sequence};

use super::call::{self, Call};
use crate::cuda::{Event, Pause, Stream};
use crate::nccl::{Comm, IN_PROGRESS, Nccl, SUCCESS};

/// How long a call that has failed waits for NCCL to stop its kernels.
const SETTLING: Duration = Duration::from_secs(5);
/// How long a collective waits for a rank that has left the group: what it has sent before may still be under way.
const LEAVING: Duration = Duration::from_secs(2);

/// The handle of NCCL's communicator, while there is one.
pub(super) struct Handle(pub Comm);

// SAFETY: it may be used by any thread, by one at a time; the mutex around it sees to that.
unsafe impl Send for Handle {}

pub(super) struct Shared {
    pub group: ProcessGroup,
    pub nccl: Nccl,
    pub stream: Stream,
    /// None from the abort or the end on.
    pub comm: Mutex<Option<Handle>>,
    /// Has it failed? Set before the abort begins.
    failed: AtomicBool,
    state: Mutex<State>,
    /// Something in flight, a failure, or an end: for the watchdog, and for those who wait for an abort.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    sequence: u64,
    flights: VecDeque<Arc<Flight>>,
    failure: Option<Error>,
    is_aborting: bool,
    closed: bool,
    /// The watchdog has done its work.
    ended: bool,
}

/// A call that is queued on the stream.
pub(super) struct Flight {
    pub name: String,
    sequence: Sequence,
    is_collective: bool,
    deadline: Deadline,
    end: Event,
    /// It was done before any failure.
    done: AtomicBool,
    /// The memory of a call whose handle was dropped.
    kept: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Flight {
    /// `error`, as this call reports it.
    fn says(&self, error: Error) -> Error {
        if error.operation().is_some() {
            error
        } else {
            error.in_operation(self.name.as_str(), Some(self.sequence))
        }
    }

    /// Keeps the memory until the call is done.
    pub(super) fn keep(&self, memory: Box<dyn Any + Send>) {
        *self.kept.lock() = Some(memory);
    }

    pub(super) fn end(&self) -> &Event {
        &self.end
    }

    /// Was it done before any failure? Asks the device only if it is not known.
    fn is_done(&self, shared: &Shared) -> Result<bool> {
        if self.done.load(Ordering::Acquire) {
            return Ok(true);
        }
        // An abort ends kernels too, whose events are then reached: the failure is there before the abort begins.
        if !self.end.is_reached()? || shared.failed.load(Ordering::Acquire) {
            return Ok(false);
        }
        self.done.store(true, Ordering::Release);
        Ok(true)
    }
}

impl Shared {
    pub(super) fn new(group: ProcessGroup, nccl: Nccl, stream: Stream, comm: Comm) -> Arc<Self> {
        Arc::new(Self {
            group,
            nccl,
            stream,
            comm: Mutex::new(Some(Handle(comm))),
            failed: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Queues `calls` as one, after all that was called before.
    ///
    /// # Safety
    /// The memory of the calls stays until the flight is done, or the failed communicator no longer
    /// [aborts](super::Communicator::is_aborting).
    pub(super) unsafe fn launch(self: &Arc<Self>, calls: &[Call], timeout: Duration) -> Result<Arc<Flight>> {
        let world = self.group.world_size();
        calls.iter().try_for_each(|call| call.check(world, self.stream.device().ordinal()))?;
        let (deadline, name) = (Deadline::after(timeout), call::name(calls));
        let Some(comm) = self.comm.try_lock_until(deadline.instant()) else {
            return Err(Error::timeout(format!(
                "{name}: another thread's call to NCCL has not returned in time"
            )));
        };
        let sequence = {
            let mut state = self.state.lock();
            state.sequence += 1;
            Sequence(state.sequence - 1)
        };
        let fails = |error: Error| error.in_operation(name.as_str(), Some(sequence));
        let refused = |error: Error| {
            let remedy = error.remedy().unwrap_or("the group has failed; start a new one").to_owned();
            if error.operation().is_some() { error } else { fails(error).with_remedy(remedy) }
        };
        let Some(Handle(raw)) = *comm else { return Err(refused(self.cause())) };
        if let Some(cause) = self.failure().or_else(|| self.group.failure()) {
            drop(comm);
            self.wake_watchdog();
            return Err(refused(cause));
        }
        // SAFETY: the handle is alive as long as it is locked, and the caller answers for the memory.
        let launched = unsafe { self.queue(raw, calls, world.count()) };
        let launched =
            launched.and_then(|()| self.settle(raw, deadline)).and_then(|()| Event::at_end_of(&self.stream));
        drop(comm);
        let end = match launched {
            Ok(end) => end,
            // What other ranks wait for will not come.
            Err(error) => {
                let cause = self.group.fail_unless_explained(fails(error));
                self.fail(cause.clone());
                self.await_settled();
                return Err(if cause.operation().is_some() { cause } else { fails(cause) });
            }
        };
        let flight = Arc::new(Flight {
            name,
            sequence,
            is_collective: calls.iter().any(Call::is_collective),
            deadline,
            end,
            done: AtomicBool::new(false),
            kept: Mutex::new(None),
        });
        let mut state = self.state.lock();
        state.flights.push_back(flight.clone());
        if state.flights.len() == 1 {
            self.changed.notify_all();
        }
        Ok(flight)
    }

    /// Gives NCCL the calls, between `ncclGroupStart` and `ncclGroupEnd`.
    ///
    /// # Safety
    /// As [`launch`](Self::launch); `raw` is alive, and no other thread uses it.
    unsafe fn queue(&self, raw: Comm, calls: &[Call], world: usize) -> Result<()> {
        let _bound = self.stream.device().bind()?;
        // SAFETY: it has no conditions.
        let code = unsafe { (self.nccl.ncclGroupStart)() };
        if code != SUCCESS {
            return Err(self.nccl.error("ncclGroupStart", code));
        }
        let noted = calls.iter().try_for_each(|call| {
            // SAFETY: the caller says so.
            unsafe { call.launch(&self.nccl, raw, self.stream.raw(), world) }
        });
        // SAFETY: a group has been started on this thread. It is ended whatever a call has returned.
        let code = unsafe { (self.nccl.ncclGroupEnd)() };
        noted?;
        if code == SUCCESS || code == IN_PROGRESS {
            Ok(())
        } else {
            Err(self.nccl.error("ncclGroupEnd", code))
        }
    }

    /// Waits until NCCL has queued what it was given. It returns before when it has to connect ranks first.
    fn settle(&self, raw: Comm, deadline: Deadline) -> Result<()> {
        let mut pause = Pause::default();
        while !self.is_settled(raw)? {
            if let Some(cause) = self.group.failure() {
                return Err(cause);
            }
            if self.failed.load(Ordering::Acquire) {
                return Err(self.cause());
            }
            if deadline.has_passed() {
                return Err(Error::timeout("NCCL has not started it in time"));
            }
            pause.pause();
        }
        Ok(())
    }

    /// Has the communicator nothing left to do on the host? An error if it has failed.
    fn is_settled(&self, raw: Comm) -> Result<bool> {
        let (_bound, mut state) = (self.stream.device().bind()?, SUCCESS);
        // SAFETY: `raw` is alive, and locked.
        let code = unsafe { (self.nccl.ncclCommGetAsyncError)(raw, &mut state) };
        match if code == SUCCESS { state } else { code } {
            SUCCESS => Ok(true),
            IN_PROGRESS => Ok(false),
            code => Err(self.nccl.error("ncclCommGetAsyncError", code)),
        }
    }

    /// Waits for a call until `deadline`, or without one until the call's own. None if `deadline` has passed.
    pub(super) fn wait(&self, flight: &Flight, deadline: Option<Deadline>) -> Option<Result<()>> {
        let mut pause = Pause::default();
        loop {
            match flight.is_done(self) {
                Ok(true) => return Some(Ok(())),
                Ok(false) => {}
                // The device is broken, or a kernel has failed.
                Err(error) => self.fail(self.group.fail_unless_explained(flight.says(error))),
            }
            if let Some(cause) = self.failure() {
                self.await_settled();
                return Some(Err(flight.says(cause)));
            }
            if self.group.failure().is_some() {
                self.wake_watchdog();
            }
            if deadline.is_some_and(Deadline::has_passed) {
                return None;
            }
            pause.pause();
        }
    }

    /// Is it done, or has the communicator failed?
    pub(super) fn is_over(&self, flight: &Flight) -> bool {
        flight.is_done(self).unwrap_or(true) || self.failed.load(Ordering::Acquire)
    }

    pub(super) fn failure(&self) -> Option<Error> {
        if self.failed.load(Ordering::Acquire) { self.state.lock().failure.clone() } else { None }
    }

    fn cause(&self) -> Error {
        let failure = self.failure().or_else(|| self.group.failure());
        failure.unwrap_or_else(|| Error::aborted("the communicator has ended"))
    }

    pub(super) fn is_aborting(&self) -> bool {
        self.state.lock().is_aborting
    }

    /// Notes the failure. The watchdog then aborts.
    pub(super) fn fail(&self, cause: Error) {
        let mut state = self.state.lock();
        if state.failure.is_some() {
            return;
        }
        state.failure = Some(cause);
        state.is_aborting = true;
        self.stream.device().unsettled();
        self.failed.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    /// The abort is over: no kernel uses memory any more.
    pub(super) fn aborted(&self) {
        let mut state = self.state.lock();
        let flights = std::mem::take(&mut state.flights);
        if std::mem::take(&mut state.is_aborting) {
            self.stream.device().settled();
        }
        self.changed.notify_all();
        drop(state);
        flights.iter().for_each(|flight| drop(flight.kept.lock().take()));
    }

    fn await_settled(&self) {
        let deadline = Instant::now() + SETTLING;
        let mut state = self.state.lock();
        while state.is_aborting && !self.changed.wait_until(&mut state, deadline).timed_out() {}
    }

    pub(super) fn wake_watchdog(&self) {
        self.changed.notify_all();
    }

    /// No call will come any more.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    /// Waits for the end of the calls in flight, which have deadlines; after a failure not for ever, because an abort has none. Has the
    /// watchdog done its work?
    pub(super) fn await_end(&self) -> bool {
        let mut state = self.state.lock();
        while !state.ended && state.failure.is_none() {
            self.changed.wait(&mut state);
        }
        let deadline = Instant::now() + SETTLING;
        while !state.ended && !self.changed.wait_until(&mut state, deadline).timed_out() {}
        state.ended
    }

    /// The watchdog has done its work.
    pub(super) fn ended(&self) {
        self.state.lock().ended = true;
        self.changed.notify_all();
    }

    /// For the watchdog: waits for something to do, at most `pause`. False if there is nothing any more.
    pub(super) fn rest(&self, pause: Duration) -> bool {
        let mut state = self.state.lock();
        let over = |state: &State| state.closed && state.flights.is_empty();
        if !over(&state) && state.failure.is_none() {
            self.changed.wait_for(&mut state, pause);
        }
        !over(&state)
    }

    pub(super) fn is_idle(&self) -> bool {
        self.state.lock().flights.is_empty()
    }

    /// Forgets what is done. The error of the first call that can no longer be done in time.
    pub(super) fn look(&self) -> Result<()> {
        let flights: Vec<_> = self.state.lock().flights.iter().cloned().collect();
        let mut finished = 0;
        for flight in &flights {
            if !flight.is_done(self).map_err(|error| flight.says(error))? {
                break;
            }
            finished += 1;
        }
        self.state.lock().flights.drain(..finished);
        let [oldest, ..] = &flights[finished..] else { return Ok(()) };
        // A later call may have the earlier deadline.
        let Some(late) = flights[finished..].iter().find(|flight| flight.deadline.has_passed()) else {
            return Ok(());
        };
        let behind = match late.sequence == oldest.sequence {
            true => String::new(),
            false => format!("; it is behind {} {}", oldest.name, oldest.sequence),
        };
        Err(late.says(
            Error::timeout(format!("the device has not ended it in time{behind}")).with_remedy(
                "has every rank made this call? Errors of the other ranks name the call in which they are; a longer time-out can be \
                 set on the communicator",
            ),
        ))
    }

    /// The error of a collective that waits for a rank that has left. `since` is when that was first seen.
    pub(super) fn look_for_leavers(&self, since: &mut Option<Instant>) -> Result<()> {
        let flight = self.state.lock().flights.iter().find(|flight| flight.is_collective).cloned();
        let (Some(flight), Some(left)) = (flight, self.group.left_by()) else {
            *since = None;
            return Ok(());
        };
        match since.get_or_insert_with(Instant::now).elapsed() {
            lasted if lasted > LEAVING => Err(flight.says(left)),
            _ => Ok(()),
        }
    }

    /// NCCL's own error, if it has one, as the oldest call reports it. While another thread calls NCCL, that one looks.
    pub(super) fn look_at_nccl(&self) -> Result<()> {
        let Some(comm) = self.comm.try_lock() else { return Ok(()) };
        let Some(Handle(raw)) = *comm else { return Ok(()) };
        self.is_settled(raw).map(drop).map_err(|error| {
            let flight = self.state.lock().flights.front().cloned();
            flight.map_or(error.clone(), |flight| flight.says(error))
        })
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        if state.is_aborting {
            // The abort has not ended: the device may still use this memory.
            std::mem::take(&mut state.flights).into_iter().for_each(std::mem::forget);
        }
    }
}
