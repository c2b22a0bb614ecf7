//! Polling of descriptors.

use std::io::{self, PipeReader, PipeWriter, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

/// Waits until one of `descriptors` is ready or `timeout` has passed. Returns how many are ready; 0 also if a signal
/// has interrupted the wait. Without a time-out, or with one that the system cannot express, there is no limit.
pub(crate) fn poll(descriptors: &mut [PollFd<'_>], timeout: Option<Duration>) -> io::Result<usize> {
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    match rustix::event::poll(descriptors, timeout.as_ref()) {
        Err(Errno::INTR) => Ok(0),
        polled => Ok(polled?),
    }
}

/// Waits until one of `descriptors` can be read, as `poll` does.
pub fn poll_readable<'a>(
    descriptors: impl Iterator<Item = BorrowedFd<'a>>,
    timeout: Option<Duration>,
) -> io::Result<()> {
    let readable = |descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN);
    poll(&mut descriptors.map(readable).collect::<Vec<_>>(), timeout).map(drop)
}

/// A pipe with which one thread ends another's wait. Neither end blocks: if the pipe is full, the reader is awake
/// already.
pub fn wake_pipe() -> io::Result<(PipeReader, PipeWriter)> {
    let (reader, writer) = io::pipe()?;
    for end in [reader.as_fd(), writer.as_fd()] {
        fcntl_setfl(end, fcntl_getfl(end)? | OFlags::NONBLOCK)?;
    }
    Ok((reader, writer))
}

/// Empties a [`wake_pipe`].
pub fn drain(mut pipe: &PipeReader) {
    while matches!(pipe.read(&mut [0; 64]), Ok(1..)) {}
}
