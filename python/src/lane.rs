//! A lane: operations that run one after the other, in the order of their calls.
//!
//! A call that waits for its operation runs it on its own thread, if nothing is before it: a worker would cost two
//! wake-ups. Everything else is for the lane's worker, which is started by the first such operation.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};
use phalanx::Error;

use crate::interrupt;
use crate::work::{Outcome, Pending};

type Job = Box<dyn FnOnce() + Send>;
type Prepare = Box<dyn FnOnce() + Send>;

thread_local! {
    /// Whether this thread runs an operation. While that waits, Python may run a signal's handler.
    static RUNS: Cell<bool> = const { Cell::new(false) };
}

/// Operations in order.
pub struct Lane {
    name: String,
    shared: Arc<Shared>,
    worker: Mutex<Option<JoinHandle<()>>>,
    /// What the worker does first.
    prepare: Mutex<Option<Prepare>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    busy: bool,
    closed: bool,
}

impl Lane {
    pub fn new(name: String, prepare: impl FnOnce() + Send + 'static) -> Self {
        let prepare: Prepare = Box::new(prepare);
        Self { name, shared: Arc::default(), worker: Mutex::new(None), prepare: Mutex::new(Some(prepare)) }
    }

    /// Runs `operation` after all before it, and returns when it has ended.
    pub fn run(&self, operation: impl FnOnce() -> Outcome + Send + 'static) -> Outcome {
        if self.take()? {
            return self.run_here(operation);
        }
        let pending = Arc::new(Pending::default());
        let done = pending.clone();
        self.submit(operation, move |outcome| done.complete(outcome));
        pending.wait(None).unwrap_or_else(|| Err(closed()))
    }

    /// Runs `operation` on this thread if nothing is before it, and else as `submit`. Calls `done` with its outcome.
    pub fn start(
        &self,
        operation: impl FnOnce() -> Outcome + Send + 'static,
        done: impl FnOnce(Outcome) + Send + 'static,
    ) {
        match self.take() {
            Ok(true) => done(self.run_here(operation)),
            Ok(false) => self.submit(operation, done),
            Err(error) => done(Err(error)),
        }
    }

    /// Takes the lane for an operation on this thread, if nothing is before it. Returns whether it has.
    fn take(&self) -> Result<bool, Error> {
        if RUNS.get() {
            return Err(in_handler());
        }
        let mut state = self.shared.state.lock();
        if state.closed {
            return Err(closed());
        }
        if state.busy || !state.jobs.is_empty() {
            return Ok(false);
        }
        state.busy = true;
        Ok(true)
    }

    /// Runs `operation` on this thread, which has taken the lane.
    fn run_here(&self, operation: impl FnOnce() -> Outcome) -> Outcome {
        RUNS.set(true);
        let outcome = guarded(operation);
        RUNS.set(false);
        self.shared.leave();
        outcome
    }

    /// Lets the worker run `operation` after all before it, and calls `done` with its outcome: an error if it cannot run.
    pub fn submit(
        &self,
        operation: impl FnOnce() -> Outcome + Send + 'static,
        done: impl FnOnce(Outcome) + Send + 'static,
    ) {
        let mut state = self.shared.state.lock();
        let ready = if state.closed { Err(closed()) } else { self.employ() };
        if let Err(error) = ready {
            drop(state);
            return done(Err(error));
        }
        state.jobs.push_back(Box::new(move || done(guarded(operation))));
        drop(state);
        self.shared.changed.notify_all();
    }

    /// An error if a signal's handler that runs in a wait of this thread asks, while a call has not ended. It may be the one for which this
    /// thread waits, or after which: neither returns before the handler has, so that a handler that waited behind it could wait for ever.
    pub fn refuse_in_handler(&self) -> Result<(), Error> {
        match interrupt::is_in_handler() && !self.is_idle() {
            true => Err(in_handler()),
            false => Ok(()),
        }
    }

    /// Takes no more calls; the worker ends when it has run those that it has.
    pub fn close_later(&self) {
        self.shared.state.lock().closed = true;
        self.shared.changed.notify_all();
        self.prepare.lock().take();
    }

    /// As `close_later`, and returns when all calls have ended.
    pub fn close(&self) {
        self.close_later();
        // The lock is released before the worker is waited for.
        let worker = self.worker.lock().take();
        if let Some(worker) = worker
            && worker.thread().id() != std::thread::current().id()
        {
            // Panics of operations are caught where they run.
            let _ = worker.join();
        }
        let mut state = self.shared.state.lock();
        while state.busy {
            self.shared.changed.wait(&mut state);
        }
    }

    /// Whether no call runs or waits for its turn.
    pub fn is_idle(&self) -> bool {
        let state = self.shared.state.lock();
        !state.busy && state.jobs.is_empty()
    }

    /// Starts the worker, unless there is one.
    fn employ(&self) -> Result<(), Error> {
        let mut worker = self.worker.lock();
        if worker.is_some() {
            return Ok(());
        }
        let (shared, prepare) = (self.shared.clone(), self.prepare.lock().take());
        let thread = std::thread::Builder::new().name(self.name.clone()).spawn(move || {
            if let Some(prepare) = prepare {
                prepare();
            }
            shared.serve();
        });
        *worker = Some(thread.map_err(Error::other)?);
        Ok(())
    }
}

impl Shared {
    fn serve(&self) {
        let mut state = self.state.lock();
        loop {
            if state.busy {
                self.changed.wait(&mut state);
            } else if let Some(job) = state.jobs.pop_front() {
                state.busy = true;
                drop(state);
                job();
                self.leave();
                state = self.state.lock();
            } else if state.closed {
                return;
            } else {
                self.changed.wait(&mut state);
            }
        }
    }

    fn leave(&self) {
        let mut state = self.state.lock();
        state.busy = false;
        let awaited = state.closed || !state.jobs.is_empty();
        drop(state);
        if awaited {
            self.changed.notify_all();
        }
    }
}

fn guarded(operation: impl FnOnce() -> Outcome) -> Outcome {
    let outcome = catch_unwind(AssertUnwindSafe(operation));
    outcome.unwrap_or_else(|_| Err(Error::panicked("an operation panicked on this rank")))
}

fn in_handler() -> Error {
    Error::aborted("a signal's handler called this while the call that it has interrupted waits")
        .with_remedy("let the handler set a flag, and look at it between two calls")
}

fn closed() -> Error {
    Error::aborted("this process group has been destroyed")
        .with_remedy("make another with init_process_group or new_group")
}
