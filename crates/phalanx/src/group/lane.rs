//! One operation at a time, in the order of the calls, whether the caller waits for it or not.
//!
//! Blocking calls run on the caller's own thread, with the caller's own memory; asynchronous calls run on the group's
//! worker. A ticket decides whose turn it is, so both kinds keep one order.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::engine::Engine;
use crate::error::{Error, Result};
use crate::rank::Rank;

/// Asynchronous operations that may wait; a caller that is further ahead is held back.
const CAPACITY: usize = 1024;

/// What the worker does with the engine.
pub(super) type Job = Box<dyn FnOnce(&mut Engine) + Send>;

/// The queue before a group's engine.
pub(super) struct Lane {
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Absent while somebody runs an operation on it.
    engine: Option<Engine>,
    next_ticket: u64,
    serving: u64,
    jobs: VecDeque<(u64, Job)>,
    closed: bool,
}

impl Lane {
    pub(super) fn new(rank: Rank, engine: Engine) -> Result<Self> {
        let state =
            State { engine: Some(engine), next_ticket: 0, serving: 0, jobs: VecDeque::new(), closed: false };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let served = shared.clone();
        let worker = std::thread::Builder::new()
            .name(format!("phalanx-comm-{rank}"))
            .spawn(move || served.serve())
            .map_err(|error| Error::io("the communication worker could not be started", error))?;
        Ok(Self { shared, worker: Some(worker) })
    }

    /// Runs `operation` here, after all that was called before it.
    pub(super) fn run<R>(&self, operation: impl FnOnce(&mut Engine) -> R) -> Result<R> {
        let mut state = self.shared.state.lock();
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        while state.serving != ticket {
            self.shared.changed.wait(&mut state);
        }
        self.shared.with_engine(state, operation)
    }

    /// Leaves `job` to the worker.
    pub(super) fn submit(&self, job: Job) {
        let mut state = self.shared.state.lock();
        while state.jobs.len() >= CAPACITY {
            self.shared.changed.wait(&mut state);
        }
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        state.jobs.push_back((ticket, job));
        drop(state);
        self.shared.changed.notify_all();
    }
}

impl Drop for Lane {
    /// Lets the worker finish what it has been given: the peers wait for it, and every operation has a deadline.
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.changed.notify_all();
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
            engine.fail(Error::aborted("an operation panicked on this rank"));
        }
        let mut state = self.state.lock();
        state.engine = Some(engine);
        state.serving += 1;
        drop(state);
        self.changed.notify_all();
        outcome.map_err(|_| Error::aborted("an operation panicked on this rank"))
    }

    fn serve(&self) {
        loop {
            let mut state = self.state.lock();
            let job = loop {
                let turn = state.serving;
                match state.jobs.front() {
                    Some((ticket, _)) if *ticket == turn => break state.jobs.pop_front(),
                    None if state.closed => return,
                    _ => self.changed.wait(&mut state),
                }
            };
            if let Some((_, job)) = job {
                // A panic has failed the group; the job's `Work` learns of it because its completer was dropped.
                let _ = self.with_engine(state, job);
            }
        }
    }
}
