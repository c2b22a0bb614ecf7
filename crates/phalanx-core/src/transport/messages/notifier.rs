//! Waiting for connections and rings: sockets by `poll`, memory by an event count, or both alternately.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use phalanx_sys::shared::Segment;
use rustix::event::{PollFd, PollFlags};

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::poll::poll;

/// A wait for memory lasts at most this long before it checks the health of its group.
pub(crate) const SLEEP_LIMIT: Duration = Duration::from_millis(10);
/// A wait for memory and sockets checks the memory this often: no system call waits for both.
const MEMORY_POLL_INTERVAL: Duration = Duration::from_micros(200);

/// Wakes the threads of one rank that wait for messages.
pub(crate) struct Notifier(Memory);

enum Memory {
    /// Peers notify it through the memory that they share with this rank.
    Shared(Arc<Segment>),
    /// Notified from this process alone.
    Local { count: Mutex<u64>, changed: Condvar },
}

impl Notifier {
    /// The notifier in this rank's shared memory, if it has any.
    pub(super) fn new(own: Option<Arc<Segment>>) -> Self {
        Self(match own {
            Some(segment) => Memory::Shared(segment),
            None => Memory::Local { count: Mutex::new(0), changed: Condvar::new() },
        })
    }

    /// Wakes all waiting threads.
    pub(crate) fn notify(&self) {
        match &self.0 {
            Memory::Shared(segment) => segment.doorbell().ring(),
            Memory::Local { count, changed } => {
                *count.lock() += 1;
                changed.notify_all();
            }
        }
    }

    /// Waits until a notification comes, one of `sockets` can be used or `deadline` passes, unless `ready` returns true.
    /// `listens`: whether to wait for notifications. May return without a reason.
    pub(crate) fn wait(
        &self,
        sockets: &[(BorrowedFd<'_>, PollFlags)],
        listens: bool,
        deadline: Deadline,
        ready: impl FnOnce() -> bool,
    ) -> Result<()> {
        interrupt::check()?;
        let remaining = interrupt::at_most(deadline.remaining());
        match (sockets, listens) {
            ([], _) => self.sleep_unless(remaining.min(SLEEP_LIMIT), ready),
            _ if ready() => {}
            (_, false) => poll_all(sockets, remaining)?,
            (_, true) => poll_all(sockets, remaining.min(MEMORY_POLL_INTERVAL))?,
        }
        Ok(())
    }

    fn sleep_unless(&self, timeout: Duration, ready: impl FnOnce() -> bool) {
        match &self.0 {
            Memory::Shared(segment) => segment.doorbell().sleep_unless(timeout, ready),
            Memory::Local { count, changed } => {
                let before = *count.lock();
                if ready() {
                    return;
                }
                let mut count = count.lock();
                if *count == before {
                    let _ = changed.wait_for(&mut count, timeout);
                }
            }
        }
    }
}

fn poll_all(sockets: &[(BorrowedFd<'_>, PollFlags)], timeout: Duration) -> Result<()> {
    let mut one;
    let mut many;
    let fds = match sockets {
        [(fd, flags)] => {
            one = [PollFd::from_borrowed_fd(*fd, *flags)];
            &mut one[..]
        }
        _ => {
            many =
                sockets.iter().map(|(fd, flags)| PollFd::from_borrowed_fd(*fd, *flags)).collect::<Vec<_>>();
            &mut many[..]
        }
    };
    poll(fds, Some(timeout)).map(drop).map_err(|error| Error::io("waiting for messages failed", error))
}
