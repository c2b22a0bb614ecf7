//! Waits that the calling thread may end.
//!
//! The runtimes of some languages handle signals only on one thread, and that one may be the thread that waits for peers. It gives
//! a check, which its waits make from time to time.

use std::cell::Cell;
use std::io;
use std::panic::catch_unwind;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// How often a thread that waits for peers makes its check.
pub const INTERRUPT_INTERVAL: Duration = Duration::from_millis(50);

/// What a thread checks while it waits.
pub type InterruptCheck = fn() -> Result<()>;

thread_local! {
    static CHECK: Cell<Option<InterruptCheck>> = const { Cell::new(None) };
    /// When the next check is due; none before the first wait.
    static DUE: Cell<Option<Instant>> = const { Cell::new(None) };
    /// Whether the check runs now.
    static RUNS: Cell<bool> = const { Cell::new(false) };
}

/// Runs `body`, and makes `check` about every [`INTERRUPT_INTERVAL`] while the calls of this thread in `body` wait for peers in collectives
/// and messages. Its error ends the wait as that of a peer does: the call fails with it, and so does the group, on every rank. A panic of it is
/// such an error.
///
/// Calls that another thread carries out, such as those that return a [`Work`](crate::Work), are not checked. The start of a group is checked
/// where this thread waits for a store or for another rank, and not in all waits.
///
/// The call in which `check` is made goes on when it has returned. So `check` must not wait for anything that comes after that call; a collective of
/// a group that is in another call is refused. It may [abort](crate::ProcessGroup::abort) the group.
pub fn interruptible<R>(check: InterruptCheck, body: impl FnOnce() -> R) -> R {
    checked_by(Some(check), body)
}

/// Runs `body`, which has to be done although this thread's check may have failed: it makes none.
pub(crate) fn undisturbed<R>(body: impl FnOnce() -> R) -> R {
    checked_by(None, body)
}

fn checked_by<R>(check: Option<InterruptCheck>, body: impl FnOnce() -> R) -> R {
    /// Ends the checks, also when `body` panics.
    struct Before(Option<InterruptCheck>);
    impl Drop for Before {
        fn drop(&mut self) {
            CHECK.set(self.0);
            DUE.set(None);
        }
    }
    let _before = Before(CHECK.replace(check));
    DUE.set(None);
    body()
}

/// Makes the check of this thread, if it has one and it is due.
pub(crate) fn check() -> Result<()> {
    let Some(check) = CHECK.get() else { return Ok(()) };
    let now = Instant::now();
    if DUE.get().is_some_and(|due| now < due) {
        return Ok(());
    }
    // A short wait makes none: the first is due an interval after the wait began.
    let is_first = DUE.replace(Some(now + INTERRUPT_INTERVAL)).is_none();
    if is_first {
        return Ok(());
    }
    let ran = RUNS.replace(true);
    // A panic would take this thread out of the order in which calls run.
    let outcome = catch_unwind(check);
    RUNS.set(ran);
    outcome
        .unwrap_or_else(|_| Err(Error::aborted("the check of `interruptible` has panicked on this thread")))
}

/// Whether this thread is in its check, and so in a wait.
pub(crate) fn is_checking() -> bool {
    RUNS.get()
}

/// The error of a call in this thread's check that could wait for the one in which the check is made.
pub(crate) fn refused() -> Error {
    Error::invalid_argument(
        "the check of `interruptible` calls a collective of a group that is in another call",
    )
    .with_remedy("let the check set a flag, and make the call when the other one has returned")
}

/// Makes the check in a wait whose errors are the system's; [`cause`] gives its error back.
pub(crate) fn check_io() -> io::Result<()> {
    check().map_err(as_io)
}

/// The `error` of a check among errors of the system.
pub(crate) fn as_io(error: Error) -> io::Error {
    io::Error::other(Interrupted(error))
}

/// What a check has returned, among errors of the system.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Interrupted(Error);

/// Why the check has ended the wait in which this `error` came, if it has.
pub(crate) fn cause(error: &io::Error) -> Option<Error> {
    error.get_ref()?.downcast_ref::<Interrupted>().map(|interrupted| interrupted.0.clone())
}

/// `timeout`, or as long as this thread may sleep before its next check.
pub(crate) fn at_most(timeout: Duration) -> Duration {
    if CHECK.get().is_some() { timeout.min(INTERRUPT_INTERVAL) } else { timeout }
}

#[cfg(test)]
mod tests {
    use super::*;

    thread_local! {
        static CALLS: Cell<u32> = const { Cell::new(0) };
    }

    fn second_fails() -> Result<()> {
        CALLS.set(CALLS.get() + 1);
        if CALLS.get() < 2 { Ok(()) } else { Err(Error::aborted("enough")) }
    }

    fn fails() -> Result<()> {
        Err(Error::aborted("enough"))
    }

    #[test]
    fn what_has_to_be_done_is_not_disturbed() {
        interruptible(fails, || {
            let until = Instant::now() + 2 * INTERRUPT_INTERVAL;
            undisturbed(|| {
                while Instant::now() < until {
                    assert!(check().is_ok());
                }
                assert_eq!(at_most(Duration::MAX), Duration::MAX);
            });
            let error = loop {
                if let Err(error) = check_io() {
                    break error;
                }
            };
            assert!(cause(&error).is_some_and(|cause| cause.is_aborted()), "{error}");
        });
        assert!(cause(&io::ErrorKind::TimedOut.into()).is_none());
        assert!(cause(&io::Error::other(Error::timeout("another"))).is_none());
    }

    #[test]
    fn a_thread_checks_while_it_waits_and_no_longer() {
        assert!(check().is_ok());
        assert_eq!(at_most(Duration::MAX), Duration::MAX);
        let error = interruptible(second_fails, || {
            assert_eq!(at_most(Duration::MAX), INTERRUPT_INTERVAL);
            loop {
                if let Err(error) = check() {
                    return error;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        assert!(error.to_string().contains("enough"), "{error}");
        assert_eq!(CALLS.get(), 2);
        assert!(check().is_ok() && at_most(Duration::MAX) == Duration::MAX);
        assert_eq!(CALLS.get(), 2);
    }
}
