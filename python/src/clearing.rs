//! Calls of PyTorch's stores for which nobody waits but the end of the program: no thread may come back to Python after that, which would end the
//! process with an abort. They remove keys that ranks wrote to a store while they met there, or are the last of a start that was given up.
//!
//! PyTorch's stores remove one key a round trip. At 200 ms a program that forms groups again and again would wait for seconds each time. Nobody
//! reads the keys any more, so that is done beside the program.

use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::time::Duration;

use parking_lot::Mutex;
use phalanx::Deadline;
use pyo3::prelude::*;

use crate::interrupt;
use crate::store::GivenUp;

/// How long one call of a store may take after nobody waits for the others: a round trip of a slow network, with a packet that is sent again.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// What goes on.
static CLEARINGS: Mutex<Vec<Clearing>> = Mutex::new(Vec::new());

/// A thread that removes keys, or whose start was given up.
struct Clearing {
    /// A process that is forked from this one has none of its threads.
    process: u32,
    given_up: GivenUp,
    /// Closed when it has ended.
    ended: Receiver<()>,
}

impl Clearing {
    fn is_underway(&self) -> bool {
        self.process == std::process::id() && self.ended.try_recv() == Err(TryRecvError::Empty)
    }
}

/// Begins to call `clear`, whose stores fail when it is `given_up`.
pub fn begin(given_up: GivenUp, clear: impl FnOnce() + Send + 'static) {
    let (end, ended) = mpsc::channel::<()>();
    let run = move || {
        clear();
        drop(end);
    };
    // Without a thread the keys stay: no group needs them.
    if std::thread::Builder::new().name("phalanx-clear".into()).spawn(run).is_ok() {
        remember(given_up, ended);
    }
}

/// As [`interrupt::apart`], of a `body` whose stores fail when it is `given_up`. A call or two of it are left then, and return to Python.
pub fn apart<T: Send + 'static>(
    py: Python<'_>,
    given_up: &GivenUp,
    body: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let (end, ended) = mpsc::channel::<()>();
    let run = move || {
        let made = body();
        drop(end);
        made
    };
    let give_up = || {
        given_up.give_up();
        remember(given_up.clone(), ended);
    };
    interrupt::apart(py, give_up, run)
}

fn remember(given_up: GivenUp, ended: Receiver<()>) {
    let mut clearings = CLEARINGS.lock();
    clearings.retain(Clearing::is_underway);
    clearings.push(Clearing { process: std::process::id(), given_up, ended });
}

/// Waits until all keys are removed whose removal has begun, at most `timeout` seconds. Those that are left then stay. Of what is given up it waits for
/// the last calls alone.
#[pyfunction]
pub fn await_cleared(py: Python<'_>, timeout: f64) {
    let timeout = Duration::try_from_secs_f64(timeout).unwrap_or_default();
    py.detach(|| {
        // A thread of the process from which this one was forked may have held it.
        let Some(mut clearings) = CLEARINGS.try_lock_for(CALL_TIMEOUT) else { return };
        let underway: Vec<Clearing> = clearings.drain(..).filter(Clearing::is_underway).collect();
        drop(clearings);
        await_ended(underway.iter().filter(|clearing| !clearing.given_up.is_given_up()), timeout);
        underway.iter().for_each(|clearing| clearing.given_up.give_up());
        // The last call of each still returns to Python, which may not have ended by then.
        await_ended(&underway, CALL_TIMEOUT);
    });
}

fn await_ended<'a>(clearings: impl IntoIterator<Item = &'a Clearing>, timeout: Duration) {
    let deadline = Deadline::after(timeout);
    for Clearing { ended, .. } in clearings {
        // Nothing is sent: either way nobody waits any longer.
        let _ = ended.recv_timeout(deadline.remaining());
    }
}
