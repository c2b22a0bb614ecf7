//! The end of a process that was killed.
//!
//! One that is stuck in the kernel, on a disk that does not answer for instance, ends later, or never: each wait for it has
//! a limit.

use std::io;
use std::process::{Child, ExitStatus};
use std::thread::sleep;
use std::time::Duration;

use crate::deadline::Deadline;

/// How long a process that was killed may take to end. Only one that is stuck takes long.
pub(super) const KILL_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// How `child` has ended; none if it has not by `deadline`.
pub(super) fn reap(child: &mut Child, deadline: Deadline) -> io::Result<Option<ExitStatus>> {
    loop {
        match child.try_wait() {
            Ok(None) if !deadline.has_passed() => sleep(POLL_INTERVAL),
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_that_does_not_end_is_waited_for_no_longer_than_it_may_take() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        assert_eq!(reap(&mut child, Deadline::after(Duration::from_millis(20))).unwrap(), None);
        child.kill().unwrap();
        assert!(reap(&mut child, Deadline::after(Duration::from_secs(60))).unwrap().is_some());
    }
}
