//! Operations in flight, and the threads that tell Python of their ends.

use std::collections::VecDeque;
use std::io;
use std::mem::forget;
use std::sync::{self, Arc, PoisonError};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use phalanx::{Error, INTERRUPT_INTERVAL};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::raised;
use crate::interrupt;

/// The outcome of an operation: from which rank it received, if it received from any.
pub type Outcome = Result<Option<u32>, Error>;

/// The state of an operation, which whoever carries it out and whoever waits share.
#[derive(Default)]
pub struct Pending {
    state: Mutex<State>,
    done: Condvar,
}

#[derive(Default)]
struct State {
    outcome: Option<Outcome>,
    /// With the threads on which they run.
    callbacks: Vec<(Arc<Callbacks>, Py<PyAny>)>,
}

impl Pending {
    /// Ends the operation, unless it has ended.
    pub fn complete(&self, outcome: Outcome) {
        let mut state = self.state.lock();
        if state.outcome.is_some() {
            return;
        }
        state.outcome = Some(outcome);
        let callbacks = std::mem::take(&mut state.callbacks);
        drop(state);
        self.done.notify_all();
        callbacks.into_iter().for_each(|(threads, callback)| threads.call(callback));
    }

    /// Waits for the end, or until `deadline`, or until a signal's handler raises: with that as the outcome, though the operation goes
    /// on.
    pub fn wait(&self, deadline: Option<Instant>) -> Option<Outcome> {
        let mut state = self.state.lock();
        loop {
            if let Some(outcome) = &state.outcome {
                return Some(outcome.clone());
            }
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return None;
            }
            let look = Instant::now() + INTERRUPT_INTERVAL;
            let until = deadline.map_or(look, |deadline| deadline.min(look));
            if self.done.wait_until(&mut state, until).timed_out()
                && until == look
                && let Err(interrupted) = MutexGuard::unlocked(&mut state, interrupt::look)
            {
                return Some(Err(interrupted));
            }
        }
    }

    fn outcome(&self) -> Option<Outcome> {
        self.state.lock().outcome.clone()
    }
}

/// An operation in flight.
#[pyclass(frozen, module = "phalanx_torch._native")]
pub struct Work {
    pending: Arc<Pending>,
    /// A forked process has none of its parent's threads, and would wait for ever.
    process: u32,
}

impl Work {
    pub fn new(pending: Arc<Pending>) -> Self {
        Self { pending, process: std::process::id() }
    }

    /// An error in a process that was forked from the one of the operation, which has not ended.
    fn check_here(&self) -> PyResult<()> {
        match self.process == std::process::id() {
            true => Ok(()),
            false => Err(PyValueError::new_err(
                "this operation belongs to the process from which this one was forked, and had not ended there: wait for it \
                 in that process, or before the fork",
            )),
        }
    }
}

#[pymethods]
impl Work {
    /// Waits for the end, at most `timeout` seconds. Raises the error of the operation. Returns whether it has ended.
    #[pyo3(signature = (timeout=None))]
    pub fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let timeout = timeout.map(Duration::try_from_secs_f64).transpose();
        let timeout = timeout.map_err(|error| PyValueError::new_err(error.to_string()))?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let outcome = match self.pending.outcome() {
            Some(outcome) => Some(outcome),
            None => {
                self.check_here()?;
                interrupt::waiting(py, || self.pending.wait(deadline))?
            }
        };
        match outcome {
            Some(Ok(_)) => Ok(true),
            Some(Err(error)) => Err(raised(py, &error)),
            None => Ok(false),
        }
    }

    /// Whether it has ended.
    fn is_completed(&self) -> bool {
        self.pending.outcome().is_some()
    }

    /// The error with which it ended, if it did.
    fn error<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        let error = self.pending.outcome()?.err()?;
        Some(raised(py, &error).into_value(py).into_bound(py).into_any())
    }

    /// The rank from which it received; None before the end, or if it received nothing.
    pub fn source(&self) -> Option<u32> {
        self.pending.outcome()?.ok()?
    }

    /// Calls `callback` when the operation has ended, on a thread for callbacks. Returns False, and does not call it,
    /// if it has ended already; with `always` it is called on such a thread then, too. Raises an error, and does not call it, if there is no
    /// such thread and none can be started.
    #[pyo3(signature = (callback, always = false))]
    fn when_done(&self, py: Python<'_>, callback: Py<PyAny>, always: bool) -> PyResult<bool> {
        let has_ended = self.pending.state.lock().outcome.is_some();
        if has_ended && !always {
            return Ok(false);
        }
        if !has_ended {
            self.check_here()?;
        }
        let threads = Callbacks::here(py);
        threads.start_first().map_err(|error| raised(py, &error))?;
        let mut state = self.pending.state.lock();
        if state.outcome.is_none() {
            state.callbacks.push((threads, callback));
            return Ok(true);
        }
        drop(state);
        if always {
            threads.call(callback);
        }
        Ok(always)
    }
}

/// The threads of this process, and its number. It is locked only by who has Python's lock, which the thread that forks has: a forked
/// process never finds it locked by a thread of its parent, which would not unlock it there.
///
/// The standard library's locks, and not `parking_lot`'s: those keep who waits in one table for the process, and a forked one
/// would find its parent's threads there.
static CALLBACKS: sync::Mutex<Option<(u32, Arc<Callbacks>)>> = sync::Mutex::new(None);

/// More callbacks than this that all wait for each other are a mistake of the program.
const MOST_THREADS: usize = 64;

/// The threads on which callbacks run. A callback may wait for another operation's, so a thread is added whenever all
/// wait.
#[derive(Default)]
struct Callbacks {
    queue: sync::Mutex<Queue>,
    arrived: sync::Condvar,
}

#[derive(Default)]
struct Queue {
    due: VecDeque<Py<PyAny>>,
    idle: usize,
    threads: usize,
    closed: bool,
}

impl Callbacks {
    /// Those of this process. One that was forked has the memory of its parent's, and none of the threads.
    fn here(_py: Python<'_>) -> Arc<Self> {
        let process = std::process::id();
        let mut known = locked(&CALLBACKS);
        if let Some((of, callbacks)) = known.as_ref()
            && *of == process
        {
            return callbacks.clone();
        }
        let callbacks = Arc::new(Self::default());
        // What the parent's threads waited for, or had still to call, is not this process's to drop.
        forget(known.replace((process, callbacks.clone())));
        callbacks
    }

    /// Starts the first thread, unless there is one: what a callback is to do must not be left undone because it has none.
    fn start_first(self: &Arc<Self>) -> Result<(), Error> {
        let mut queue = locked(&self.queue);
        if queue.closed || queue.threads > 0 {
            return Ok(());
        }
        let started = self.start(&mut queue);
        started.map_err(|error| {
            Error::not_started("the thread that tells of the ends of operations could not be started", error)
        })
    }

    fn start(self: &Arc<Self>, queue: &mut Queue) -> io::Result<()> {
        let (thread, this) = (std::thread::Builder::new().name("phalanx-callback".into()), self.clone());
        thread.spawn(move || this.serve())?;
        queue.threads += 1;
        Ok(())
    }

    fn call(self: &Arc<Self>, callback: Py<PyAny>) {
        let mut queue = locked(&self.queue);
        if queue.closed {
            // The interpreter ends, and nobody waits. To drop it might need the interpreter.
            forget(callback);
            return;
        }
        queue.due.push_back(callback);
        if queue.idle < queue.due.len() && queue.threads < MOST_THREADS {
            // The first one is there.
            let _ = self.start(&mut queue);
        }
        drop(queue);
        self.arrived.notify_one();
    }

    fn serve(&self) {
        let mut queue = locked(&self.queue);
        loop {
            if let Some(callback) = queue.due.pop_front() {
                drop(queue);
                Python::attach(|py| {
                    if let Err(error) = callback.call0(py) {
                        error.write_unraisable(py, Some(callback.bind(py)));
                    }
                    drop(callback);
                });
                queue = locked(&self.queue);
            } else if queue.closed {
                queue.threads -= 1;
                drop(queue);
                self.arrived.notify_all();
                return;
            } else {
                queue.idle += 1;
                queue = self.arrived.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.idle -= 1;
            }
        }
    }

    /// Ends the threads, waiting for callbacks that run, at most until `deadline`.
    fn close(&self, deadline: Instant) {
        let mut queue = locked(&self.queue);
        queue.closed = true;
        self.arrived.notify_all();
        let limit = deadline.saturating_duration_since(Instant::now());
        drop(self.arrived.wait_timeout_while(queue, limit, |queue| queue.threads > 0));
    }
}

fn locked<T>(mutex: &sync::Mutex<T>) -> sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Before the interpreter ends: ends the threads for callbacks, waiting at most `timeout` seconds.
#[pyfunction]
pub fn close_callbacks(py: Python<'_>, timeout: f64) {
    let timeout = Duration::try_from_secs_f64(timeout).unwrap_or_default();
    let callbacks = Callbacks::here(py);
    py.detach(|| callbacks.close(Instant::now() + timeout));
}
