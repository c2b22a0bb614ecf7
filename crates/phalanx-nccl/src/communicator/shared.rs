//! What a communicator's handles, its calls in flight, its watchdog and its poller share.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use phalanx::{Deadline, Error, ProcessGroup, Result, Sequence};

use super::flight::Flight;
use super::launch::Refusal;
use super::record::{CallRecord, REMEMBERED};
use super::watchdog::END_TIMEOUT;
use crate::cuda::{Pause, Stream};
use crate::nccl::{Comm, Nccl};

/// How long calls wait for NCCL to stop its kernels, after the communicator has failed; and how long the watchdog waits for a thread that is in a
/// call of NCCL, before it aborts all the same.
pub(super) const SETTLE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a call waits for a rank that has left the group: what it has sent before may still be under way.
const LEAVE_GRACE: Duration = Duration::from_secs(2);
/// How long an error of NCCL waits for the goodbye of a rank that may be its cause, which comes when its communicator has ended.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(END_TIMEOUT.as_secs() + 1);
/// How long the watchdog waits for the poller, which the driver may hold up.
const LOOK_TIMEOUT: Duration = Duration::from_millis(500);

/// The handle of NCCL's communicator.
pub(super) struct Handle(pub Comm);

// SAFETY: it may be used by any thread, by one at a time; `calling` sees to that.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

pub(super) struct Shared {
    pub group: ProcessGroup,
    pub nccl: Nccl,
    pub stream: Stream,
    /// The process that has made it, and not one that was forked from that.
    process: u32,
    /// Alive until the abort or the end, and then no longer used: both come after `failed`, or after the last call.
    handle: Handle,
    /// Held by the thread that is in a call of NCCL.
    pub calling: Mutex<()>,
    /// Has it failed? Set before the abort begins.
    failed: AtomicBool,
    state: Mutex<State>,
    /// Something in flight, a failure, or an end: for the watchdog and the poller, and for those who wait for them.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    sequence: u64,
    flights: VecDeque<Arc<Flight>>,
    /// Those that are over, for the poller to drop.
    over: Vec<Arc<Flight>>,
    /// The last ones that are done, and when they were forgotten.
    remembered: VecDeque<(CallRecord, Instant)>,
    failure: Option<(Error, Instant)>,
    /// Whether all calls were done when it came, which was none of theirs.
    are_done: bool,
    is_aborting: bool,
    closed: bool,
    keeping: Keeping,
    /// Whether the failure is only that calls now go elsewhere.
    retired: bool,
    /// Looks of the poller that the watchdog has asked for, and those that it has got.
    wanted: u64,
    looked: u64,
    /// The watchdog, and the poller, have done their work.
    ended: bool,
    polled: bool,
}

/// What becomes of NCCL's communicator after the failure: whether it can still be shrunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Keeping {
    /// It is aborted at once.
    #[default]
    No,
    /// NCCL is stopped, and the communicator kept, if that can be done.
    Wanted,
    /// It is stopped and kept: no kernel runs, and the watchdog leaves it alone.
    Kept,
}

impl Shared {
    pub(super) fn new(group: ProcessGroup, nccl: Nccl, stream: Stream, comm: Comm) -> Arc<Self> {
        Arc::new(Self {
            group,
            nccl,
            stream,
            process: std::process::id(),
            handle: Handle(comm),
            calling: Mutex::new(()),
            failed: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Whether this process has made it, and is not one that was forked from that: the threads are the parent's, and may have held a lock then.
    pub(super) fn is_own(&self) -> bool {
        self.process == std::process::id()
    }

    /// The communicator, for a call of NCCL. An error if it has failed: then it may be gone.
    pub(super) fn alive(&self) -> Result<Comm> {
        match self.failed.load(Ordering::Acquire) {
            true => Err(self.cause()),
            false => Ok(self.handle.0),
        }
    }

    /// The communicator, for the watchdog, which ends it.
    pub(super) fn raw(&self) -> Comm {
        self.handle.0
    }

    pub(super) fn next_sequence(&self) -> Sequence {
        let mut state = self.state.lock();
        state.sequence += 1;
        Sequence(state.sequence - 1)
    }

    pub(super) fn add(&self, flight: Arc<Flight>) {
        let mut state = self.state.lock();
        state.flights.push_back(flight);
        if state.flights.len() == 1 {
            self.changed.notify_all();
        }
    }

    /// The oldest call in flight, if there are `most`.
    pub(super) fn oldest_of(&self, most: usize) -> Option<Arc<Flight>> {
        let state = self.state.lock();
        if state.flights.len() < most { None } else { state.flights.front().cloned() }
    }

    /// Waits for a call until `deadline`, or without one until the call's own. None if `deadline` has passed.
    pub(super) fn wait(&self, flight: &Flight, deadline: Option<Deadline>) -> Option<Result<()>> {
        let mut pause = Pause::default();
        loop {
            match flight.is_done(&self.failed) {
                Ok(true) => return Some(Ok(())),
                Ok(false) => {}
                // The device is broken, or a kernel has failed.
                Err(error) => self.fail(self.group.fail_unless_explained(flight.says(error))),
            }
            if let Some(cause) = self.failure() {
                self.await_settled(deadline);
                return Some(Err(flight.says(cause)));
            }
            if self.group.watched_failure().is_some() {
                self.wake_watchdog();
            }
            if deadline.is_some_and(Deadline::has_passed) {
                return None;
            }
            pause.pause();
        }
    }

    /// Whether it is done, or the communicator has failed.
    pub(super) fn is_over(&self, flight: &Flight) -> bool {
        flight.is_done(&self.failed).unwrap_or(true) || self.failed.load(Ordering::Acquire)
    }

    pub(super) fn failure(&self) -> Option<Error> {
        match self.failed.load(Ordering::Acquire) {
            true => self.state.lock().failure.as_ref().map(|(cause, _)| cause.clone()),
            false => None,
        }
    }

    fn cause(&self) -> Error {
        let failure = self.failure().or_else(|| self.group.failure());
        failure.unwrap_or_else(|| Error::aborted("the communicator has ended"))
    }

    /// Whether it has failed, and the device may still use the memory of calls.
    pub(super) fn is_aborting(&self) -> bool {
        let state = self.state.lock();
        // The group fails a moment before the watchdog notes that, and aborts.
        let will_fail = || state.failure.is_none() && self.group.watched_failure().is_some();
        state.is_aborting || will_fail() && state.flights.iter().any(|flight| !flight.is_known_done())
    }

    /// The failure, unless all calls were done when it came, which was none of theirs.
    pub(super) fn failure_of_calls(&self) -> Option<Error> {
        let state = self.state.lock();
        state.failure.as_ref().filter(|_| !state.are_done).map(|(cause, _)| cause.clone())
    }

    /// Notes the failure of the group, after a [look](Self::await_look) at the device.
    pub(super) fn fail_with_group(&self, cause: Error) {
        let mut state = self.state.lock();
        if state.failure.is_none() {
            state.are_done = state.flights.iter().all(|flight| flight.is_known_done());
            self.note_failure(&mut state, cause);
        }
    }

    /// Notes the failure. The watchdog then aborts.
    pub(super) fn fail(&self, cause: Error) {
        let mut state = self.state.lock();
        if state.failure.is_none() {
            self.note_failure(&mut state, cause);
        }
    }

    fn note_failure(&self, state: &mut State, cause: Error) {
        state.failure = Some((cause, Instant::now()));
        state.is_aborting = true;
        self.stream.device().unsettled();
        self.failed.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    /// From now on it is kept after a failure, if NCCL can stop it without an abort, until it is released or closed.
    pub(super) fn want_kept(&self) {
        let mut state = self.state.lock();
        if state.keeping == Keeping::No && state.failure.is_none() {
            state.keeping = Keeping::Wanted;
        }
    }

    /// Whether it is to be kept, or is.
    pub(super) fn is_kept_wanted(&self) -> bool {
        let state = self.state.lock();
        state.keeping != Keeping::No && !state.closed
    }

    /// Takes it out of use without a failure of the group, so that it is kept. False if it is not to be kept, has failed, or has calls in flight.
    pub(super) fn retire(&self) -> bool {
        // What the device has done is noted first.
        self.await_look();
        self.forget_done();
        let Some(_calling) = self.calling.try_lock_for(LOOK_TIMEOUT) else { return false };
        let mut state = self.state.lock();
        if state.keeping != Keeping::Wanted
            || state.closed
            || state.failure.is_some()
            || !state.flights.is_empty()
        {
            return false;
        }
        (state.retired, state.are_done) = (true, true);
        self.note_failure(&mut state, Error::aborted("the communicator has gone to another group"));
        true
    }

    /// Whether NCCL has queued all calls in flight. One that it may still be launching has no end.
    pub(super) fn is_all_queued(&self) -> bool {
        self.state.lock().flights.iter().all(|flight| flight.end.get().is_some())
    }

    /// Whether it was taken out of use with nothing in flight.
    pub(super) fn is_retired(&self) -> bool {
        self.state.lock().retired
    }

    /// For the watchdog: it cannot be kept.
    pub(super) fn cannot_keep(&self) {
        self.state.lock().keeping = Keeping::No;
        self.changed.notify_all();
    }

    /// For the watchdog, which has stopped it: keeps it until it is released or closed.
    pub(super) fn keep(&self) {
        let mut state = self.state.lock();
        if state.keeping == Keeping::Wanted && !state.closed {
            state.keeping = Keeping::Kept;
            self.changed.notify_all();
        }
        // No limit is needed: what waits here is a thread that holds nobody up, and the last handle closes it.
        while state.keeping == Keeping::Kept && !state.closed {
            self.changed.wait(&mut state);
        }
    }

    /// It is not kept any longer: the watchdog aborts it.
    pub(super) fn release(&self) {
        self.state.lock().keeping = Keeping::No;
        self.changed.notify_all();
    }

    /// The stopped communicator, if it is still kept. The watchdog aborts it only some seconds later if a thread holds `calling`.
    pub(super) fn kept(&self) -> Option<Comm> {
        let state = self.state.lock();
        (state.keeping == Keeping::Kept && !state.closed).then_some(self.handle.0)
    }

    /// Waits until the watchdog has stopped it, after a failure. Whether it is kept then.
    pub(super) fn await_kept(&self) -> bool {
        let until = Instant::now() + 2 * SETTLE_TIMEOUT;
        let mut state = self.state.lock();
        while state.keeping == Keeping::Wanted
            && !state.ended
            && !self.changed.wait_until(&mut state, until).timed_out()
        {}
        state.keeping == Keeping::Kept && !state.closed
    }

    /// Waits until the watchdog has ended it, at most for `limit`. Whether it has.
    pub(super) fn await_ended(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let mut state = self.state.lock();
        while !state.ended && !self.changed.wait_until(&mut state, until).timed_out() {}
        state.ended
    }

    /// For the watchdog, after the abort: whether the device may still run kernels of calls. It asks the driver, which does not wait.
    pub(super) fn may_run(&self) -> bool {
        let flights: Vec<_> = self.state.lock().flights.iter().cloned().collect();
        // A device that is broken runs nothing.
        flights.iter().any(|flight| flight.end.get().is_some_and(|end| matches!(end.is_reached(), Ok(false))))
    }

    /// The abort is over: no kernel uses memory any more.
    pub(super) fn aborted(&self) {
        let mut state = self.state.lock();
        let flights = std::mem::take(&mut state.flights);
        flights.iter().for_each(|flight| flight.land());
        state.over.extend(flights);
        if std::mem::take(&mut state.is_aborting) {
            self.stream.device().settled();
        }
        self.changed.notify_all();
    }

    /// Waits for the end of the abort: until some seconds after the failure, and not beyond `deadline`.
    pub(super) fn await_settled(&self, deadline: Option<Deadline>) {
        let mut state = self.state.lock();
        let Some((_, failed)) = state.failure else { return };
        let until = failed + SETTLE_TIMEOUT;
        let until = deadline.map_or(until, |deadline| until.min(deadline.instant()));
        while state.is_aborting && !self.changed.wait_until(&mut state, until).timed_out() {}
    }

    pub(super) fn wake_watchdog(&self) {
        self.changed.notify_all();
    }

    /// No call will come any more.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    /// Waits for the end of the calls in flight, until the last of their deadlines and what an abort may take, and not longer: NCCL
    /// has no limit for an abort. Returns whether the watchdog and the poller have done their work.
    pub(super) fn await_end(&self, ending: Duration) -> bool {
        let mut state = self.state.lock();
        let now = Instant::now();
        let last = state.flights.iter().map(|flight| flight.deadline.instant()).max().unwrap_or(now).max(now);
        // For the thread that is in NCCL, and for the abort.
        let mut until = last + ending + 2 * SETTLE_TIMEOUT;
        while !(state.ended && state.polled) {
            if let Some((_, failed)) = state.failure {
                until = until.min(now.max(failed) + 2 * SETTLE_TIMEOUT);
            }
            if self.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        state.ended && state.polled
    }

    /// The watchdog has done its work.
    pub(super) fn ended(&self) {
        self.state.lock().ended = true;
        self.changed.notify_all();
    }

    /// The poller has.
    pub(super) fn polled(&self) {
        self.state.lock().polled = true;
        self.changed.notify_all();
    }

    /// For the watchdog: waits for something to do, at most `pause`. False if there is nothing any more.
    pub(super) fn rest(&self, busy: Duration, idle: Duration) -> bool {
        let mut state = self.state.lock();
        let over = |state: &State| state.closed && state.flights.is_empty() && state.failure.is_none();
        if !over(&state) && state.failure.is_none() {
            let pause = if state.flights.is_empty() { idle } else { busy };
            self.changed.wait_for(&mut state, pause);
        }
        !over(&state)
    }

    /// The same for the poller, which ends after the watchdog.
    pub(super) fn rest_of_poller(&self, busy: Duration, idle: Duration) -> bool {
        let mut state = self.state.lock();
        if !state.ended && state.wanted == state.looked && state.over.is_empty() {
            let pause = if state.flights.is_empty() { idle } else { busy };
            self.changed.wait_for(&mut state, pause);
        }
        !state.ended
    }

    /// For the poller: asks the device which calls are done, and forgets them.
    pub(super) fn look(&self) -> Result<()> {
        let (flights, wanted) = {
            let state = self.state.lock();
            (state.flights.iter().cloned().collect::<Vec<_>>(), state.wanted)
        };
        let looked = flights.iter().try_for_each(|flight| match flight.is_done(&self.failed) {
            // Those behind it are not done either.
            Ok(false) => Err(None),
            Ok(true) => Ok(()),
            Err(error) => Err(Some(flight.says(error))),
        });
        self.forget_done();
        {
            let mut state = self.state.lock();
            state.looked = wanted;
            let over = std::mem::take(&mut state.over);
            self.changed.notify_all();
            drop(state);
            over.iter().for_each(|flight| flight.release());
        }
        match looked {
            Err(Some(error)) => Err(error),
            Ok(()) | Err(None) => Ok(()),
        }
    }

    /// Forgets the calls that are known to be done. The poller drops their memory.
    pub(super) fn forget_done(&self) {
        let mut state = self.state.lock();
        while state.flights.front().is_some_and(|flight| flight.is_known_done()) {
            let done = state.flights.pop_front();
            if let Some(done) = &done {
                if state.remembered.len() == REMEMBERED {
                    state.remembered.pop_front();
                }
                state.remembered.push_back((done.record(), Instant::now()));
            }
            state.over.extend(done);
        }
        if state.closed && state.flights.is_empty() {
            self.changed.notify_all();
        }
    }

    /// The last calls that are done, and those in flight, oldest first.
    pub(super) fn calls(&self) -> Vec<CallRecord> {
        let state = self.state.lock();
        let remembered = state.remembered.iter().map(|(call, noted)| {
            let age = call.age + noted.elapsed();
            CallRecord { age, ..call.clone() }
        });
        remembered.chain(state.flights.iter().map(|flight| flight.record())).collect()
    }

    /// For the watchdog: has the poller ask the device once more, if the driver answers. What is done is done, whatever fails afterwards.
    pub(super) fn await_look(&self) {
        let until = Instant::now() + LOOK_TIMEOUT;
        let mut state = self.state.lock();
        state.wanted += 1;
        let wanted = state.wanted;
        self.changed.notify_all();
        while state.looked < wanted && !self.changed.wait_until(&mut state, until).timed_out() {}
    }

    /// Whether the time of a call has passed that is not known to be done. It asks only the clock.
    pub(super) fn is_late(&self) -> bool {
        let state = self.state.lock();
        state.flights.iter().any(|flight| flight.deadline.has_passed() && !flight.is_known_done())
    }

    /// Gives up the first call that can no longer be done in time, and says so. It asks only the clock.
    pub(super) fn look_at_clock(&self) -> Result<()> {
        let state = self.state.lock();
        // A later call may have the earlier deadline.
        let mut waiting = state.flights.iter().filter(|flight| !flight.is_known_done());
        let late = waiting.clone().find(|flight| flight.deadline.has_passed() && flight.give_up());
        let Some(late) = late else { return Ok(()) };
        let behind = match waiting.next() {
            Some(oldest) if oldest.sequence != late.sequence => {
                format!("; it is behind {} {}", oldest.name, oldest.sequence)
            }
            _ => String::new(),
        };
        Err(late.says(
            Error::timeout(format!("the device has not ended it in time{behind}")).with_remedy(
                "has every rank made this call? Errors of the other ranks name the call in which they are; a longer time-out can be \
                 set on the communicator",
            ),
        ))
    }

    /// Gives up a call that waits for a rank that has left, and says so. `since` is when that was first seen.
    pub(super) fn look_for_leavers(&self, since: &mut Option<Instant>) -> Result<()> {
        let waits = {
            let state = self.state.lock();
            let mut waiting = state.flights.iter().filter(|flight| !flight.is_known_done());
            waiting.find_map(|flight| {
                let left = self.group.left_by(|rank| flight.needs(rank))?;
                Some((flight.clone(), flight.says(left)))
            })
        };
        let Some((flight, error)) = waits else {
            *since = None;
            return Ok(());
        };
        let lasted = since.get_or_insert_with(Instant::now).elapsed();
        if lasted > LEAVE_GRACE && flight.give_up() { Err(error) } else { Ok(()) }
    }

    /// NCCL's own error, if it has one, as the oldest call reports it. While another thread calls NCCL, that one looks.
    pub(super) fn look_at_nccl(&self) -> Result<()> {
        let looked = {
            let Some(_calling) = self.calling.try_lock() else { return Ok(()) };
            let Ok(raw) = self.alive() else { return Ok(()) };
            // SAFETY: only this thread ends it, and no other is in a call of NCCL.
            unsafe { self.is_settled(raw) }
        };
        looked.map(drop).map_err(|refusal| {
            let waiting = self.state.lock().flights.iter().find(|flight| !flight.is_known_done()).cloned();
            match waiting {
                Some(flight) => flight.says(self.unless_left(&flight, refusal)),
                None => refusal.error,
            }
        })
    }

    /// The error that NCCL has for this call, unless a rank has left that the call needs. A rank that leaves closes NCCL's connections too,
    /// and that may be seen before its goodbye.
    pub(super) fn unless_left(&self, flight: &Flight, Refusal { error, is_of_connection }: Refusal) -> Error {
        if !is_of_connection {
            return error;
        }
        let (deadline, mut pause) = (Deadline::after(GOODBYE_TIMEOUT), Pause::default());
        while !deadline.has_passed() && self.group.watched_failure().is_none() {
            if let Some(left) = self.group.left_by(|rank| flight.needs(rank)) {
                return left;
            }
            pause.pause();
        }
        error
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
