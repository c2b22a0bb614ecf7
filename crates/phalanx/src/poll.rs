//! Waiting for descriptors.

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, Timespec};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

/// Waits until one of `descriptors` is ready or `timeout` has passed, and gives how many are ready: none, too, if a signal has
/// interrupted the wait. Without a time-out, or with one that the system cannot express, it waits as long as it takes.
pub(crate) fn poll(descriptors: &mut [PollFd<'_>], timeout: Option<Duration>) -> io::Result<usize> {
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    match rustix::event::poll(descriptors, timeout.as_ref()) {
        Err(Errno::INTR) => Ok(0),
        polled => Ok(polled?),
    }
}

/// A pipe to end another thread's wait with. Neither end blocks: a pipe that is full of bytes has woken the reader already.
pub(crate) fn wake_pipe() -> io::Result<(PipeReader, PipeWriter)> {
    let (reader, writer) = io::pipe()?;
    for end in [reader.as_fd(), writer.as_fd()] {
        fcntl_setfl(end, fcntl_getfl(end)? | OFlags::NONBLOCK)?;
    }
    Ok((reader, writer))
}
