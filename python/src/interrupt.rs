//! Ctrl-C, and other signals whose handlers in Python raise.
//!
//! Python runs handlers on its main thread, between two steps of the program. A wait in this package is one step, which may
//! take as long as a time-out: on the main thread it looks for signals itself.

use std::cell::{Cell, RefCell};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Instant;

use phalanx::{Error, INTERRUPT_INTERVAL, Result, interruptible};
use pyo3::intern;
use pyo3::prelude::*;

use crate::errors::raised;

thread_local! {
    /// What a handler has raised in a wait of this thread.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    /// The process, and whether this is the thread on which its Python runs handlers.
    static IS_MAIN: Cell<Option<(u32, bool)>> = const { Cell::new(None) };
    /// Whether this thread runs handlers in a wait.
    static HANDLES: Cell<bool> = const { Cell::new(false) };
}

/// Calls `body` without Python's lock. What a handler raises while it waits ends the wait with an error, and is raised here.
pub fn waiting<T: Send>(py: Python<'_>, body: impl FnOnce() -> T + Send) -> PyResult<T> {
    let outcome = py.detach(|| interruptible(look, body));
    RAISED.take().map_or(Ok(outcome), Err)
}

/// As [`waiting`], of a `body` that waits in ways that cannot look for signals: it has a thread of its own. If a handler raises, `give_up`
/// is called, and the body goes on without its caller; what it returns is dropped.
pub fn apart<T: Send + 'static>(
    py: Python<'_>,
    give_up: impl FnOnce() + Send,
    body: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    if !is_main(py) {
        return Ok(py.detach(body));
    }
    let outcome = py.detach(|| {
        let (sender, receiver) = sync_channel(1);
        let thread = std::thread::Builder::new().name("phalanx-wait".into());
        // Nobody receives what comes after a signal.
        thread.spawn(move || drop(sender.send(body()))).map_err(Error::other)?;
        loop {
            match receiver.recv_timeout(INTERRUPT_INTERVAL) {
                Ok(value) => return Ok(value),
                Err(RecvTimeoutError::Timeout) => look()?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::aborted("a wait panicked on this rank"));
                }
            }
        }
    });
    match (RAISED.take(), outcome) {
        (Some(raised), _) => {
            py.detach(give_up);
            Err(raised)
        }
        (None, outcome) => outcome.map_err(|error| raised(py, &error)),
    }
}

/// Lets Python run the handlers of signals that have come. An error if one has raised; what it raised is kept for [`waiting`].
pub fn look() -> Result<()> {
    if known_main() == Some(false) {
        return Ok(());
    }
    Python::attach(|py| {
        if !is_main(py) {
            return Ok(());
        }
        // A handler may wait, too, and run others.
        let before = HANDLES.replace(true);
        let handled = py.check_signals();
        HANDLES.set(before);
        handled.map_err(|error| {
            let cause = cause(py, &error);
            RAISED.set(Some(error));
            Error::aborted(cause)
        })
    })
}

/// Whether a handler that runs in a wait of this thread has called this: the wait goes on when the handler has returned, and not before.
pub fn is_in_handler() -> bool {
    HANDLES.get()
}

/// What the other ranks are told of what a handler has `raised`.
pub fn cause(py: Python<'_>, raised: &PyErr) -> String {
    let name = raised.get_type(py).name().map_or_else(|_| "a signal".to_owned(), |name| name.to_string());
    format!("the program of this rank was interrupted by {name}")
}

/// Looks for signals about every [`INTERRUPT_INTERVAL`].
pub struct Looks(Instant);

impl Looks {
    pub fn new() -> Self {
        Self(Instant::now() + INTERRUPT_INTERVAL)
    }

    pub fn look_if_due(&mut self) -> Result<()> {
        if Instant::now() < self.0 {
            return Ok(());
        }
        self.0 = Instant::now() + INTERRUPT_INTERVAL;
        look()
    }
}

fn known_main() -> Option<bool> {
    IS_MAIN.get().filter(|(process, _)| *process == std::process::id()).map(|(_, is_main)| is_main)
}

/// Whether Python runs handlers on this thread. In a forked process that is the thread that forked.
fn is_main(py: Python<'_>) -> bool {
    known_main().unwrap_or_else(|| {
        let ask = || -> PyResult<bool> {
            let threading = py.import(intern!(py, "threading"))?;
            let main = threading.call_method0(intern!(py, "main_thread"))?.getattr(intern!(py, "ident"))?;
            main.eq(threading.call_method0(intern!(py, "get_ident"))?)
        };
        let is_main = ask().unwrap_or(false);
        IS_MAIN.set(Some((std::process::id(), is_main)));
        is_main
    })
}
