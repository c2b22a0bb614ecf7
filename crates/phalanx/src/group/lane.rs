//! One operation at a time, in the order of the calls, whether the caller waits for it or not.
//!
//! Blocking calls run on the caller's own thread, with the caller's own memory; asynchronous calls run on the group's
//! worker. A ticket decides whose turn it is, so both kinds keep one order.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::affinity::{LocalPlace, keep_apart};
use super::engine::Engine;
use crate::deadline::Patience;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::transport::health::Health;

/// Asynchronous operations that may wait; a caller that is further ahead is held back.
const CAPACITY: usize = 1024;

/// What the worker does with the engine.
pub(super) type Job = Box<dyn FnOnce(&mut Engine) + Send>;

/// The queue before a group's engine.
pub(super) struct Lane {
    health: Arc<Health>,
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    /// For callers.
    changed: Condvar,
    /// For the worker. Its own: it must not wake with every blocking call.
    due: Condvar,
}

struct State {
    /// Absent while somebody runs an operation on it.
    engine: Option<Box<Engine>>,
    next_ticket: u64,
    serving: u64,
    jobs: VecDeque<(u64, Job)>,
    closed: bool,
}

impl Lane {
    pub(super) fn new(rank: Rank, engine: Engine, place: LocalPlace) -> Result<Self> {
        let health = engine.health();
        let state = State {
            engine: Some(Box::new(engine)),
            next_ticket: 0,
            serving: 0,
            jobs: VecDeque::new(),
            closed: false,
        };
        let shared =
            Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new(), due: Condvar::new() });
        let served = shared.clone();
        let worker = std::thread::Builder::new()
            .name(format!("phalanx-comm-{rank}"))
            .spawn(move || {
                keep_apart(place);
                served.serve();
            })
            .map_err(|error| Error::not_started("the communication worker could not be started", error))?;
        Ok(Self { health, shared, worker: Some(worker) })
    }

    /// Runs `operation` here, after all that was called before it. If `patience` ends first, the group fails.
    pub(super) fn run<R>(&self, patience: &Patience, operation: impl FnOnce(&mut Engine) -> R) -> Result<R> {
        let mut state = self.shared.state.lock();
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        self.wait(&mut state, patience, |state| state.serving == ticket);
        self.shared.with_engine(state, operation)
    }

    /// Leaves `job` to the worker, as soon as there is room for it. If `patience` ends first, the group fails.
    pub(super) fn submit(&self, patience: &Patience, job: Job) {
        let mut state = self.shared.state.lock();
        self.wait(&mut state, patience, |state| state.jobs.len() < CAPACITY);
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        state.jobs.push_back((ticket, job));
        self.shared.hand_on(state);
    }

    /// Waits until `ready`. An operation before this one may have a later deadline: failing the group ends it at once,
    /// and all others that wait, so that the wait goes on only for as long as that takes.
    fn wait(
        &self,
        state: &mut MutexGuard<'_, State>,
        patience: &Patience,
        mut ready: impl FnMut(&State) -> bool,
    ) {
        while !ready(state) {
            if self.shared.changed.wait_until(state, patience.deadline().instant()).timed_out()
                && !ready(state)
            {
                MutexGuard::unlocked(state, || {
                    self.health.fail(
                        Error::timeout("the operations called before this one have not ended in time")
                            .with_remedy(
                                "is a rank stuck, or far behind? A longer time-out can be set on the group",
                            ),
                    );
                });
                self.shared.changed.wait_while(state, |state| !ready(state));
            }
        }
    }
}

impl Drop for Lane {
    /// Lets the worker finish what it has been given: the peers wait for it, and every operation has a deadline.
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.due.notify_one();
        if let Some(worker) = self.worker.take()
            && worker.thread().id() != std::thread::current().id()
        {
            // Its jobs catch their panics; there is nothing to pass on.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Takes the engine, which is this ticket's by now, and hands the turn on afterwards, also when `f` panics.
    fn with_engine<R>(
        &self,
        mut state: MutexGuard<'_, State>,
        f: impl FnOnce(&mut Engine) -> R,
    ) -> Result<R> {
        let Some(mut engine) = state.engine.take() else {
            return Err(Error::aborted("an earlier operation of this group panicked"));
        };
        drop(state);
        let outcome = catch_unwind(AssertUnwindSafe(|| f(&mut engine)));
        if outcome.is_err() {
            engine.health().fail(Error::aborted("an operation panicked on this rank"));
        }
        let mut state = self.state.lock();
        state.engine = Some(engine);
        state.serving += 1;
        self.hand_on(state);
        outcome.map_err(|_| Error::aborted("an operation panicked on this rank"))
    }

    /// Wakes whose turn it is.
    fn hand_on(&self, state: MutexGuard<'_, State>) {
        let is_workers = state.jobs.front().is_some_and(|(ticket, _)| *ticket == state.serving);
        drop(state);
        if is_workers {
            self.due.notify_one();
        }
        self.changed.notify_all();
    }

    fn serve(&self) {
        loop {
            let mut state = self.state.lock();
            let job = loop {
                let turn = state.serving;
                match state.jobs.front() {
                    Some((ticket, _)) if *ticket == turn => break state.jobs.pop_front(),
                    None if state.closed => return,
                    _ => self.due.wait(&mut state),
                }
            };
            if let Some((_, job)) = job {
                // A panic has failed the group; the job's `Work` learns of it because its completer was dropped.
                let _ = self.with_engine(state, job);
            }
        }
    }
}
