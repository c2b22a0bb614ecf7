//! Polling of descriptors.

use std::cell::Cell;
use std::io::{self, PipeReader, PipeWriter, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

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

/// For how long a thread looks for an answer that comes at once, before it sleeps. To wake it takes 50 us, if its processor sleeps, too.
const PROMPT_LIMIT: Duration = Duration::from_micros(150);

thread_local! {
    static IS_PROMPT: Cell<bool> = const { Cell::new(false) };
}

/// Runs `body`, whose waits on this thread are for answers of ranks that have processors of their own and answer at once, if `is_prompt`:
/// then [`look_first`] looks.
pub(crate) fn promptly<R>(is_prompt: bool, body: impl FnOnce() -> R) -> R {
    /// Ends it, also when `body` panics.
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            IS_PROMPT.set(self.0);
        }
    }
    let _before = Before(IS_PROMPT.replace(is_prompt));
    body()
}

/// Whether this thread's waits are for answers that come at once.
pub(crate) fn is_prompt() -> bool {
    IS_PROMPT.get()
}

/// Looks for a while whether one of `descriptors` is ready, if what it waits for comes [at once](promptly). The caller waits for it then, as
/// it does otherwise.
pub(crate) fn look_first(descriptors: &mut [PollFd<'_>]) {
    look_until(|| !poll(descriptors, Some(Duration::ZERO)).is_ok_and(|ready| ready == 0));
}

/// Looks for a while whether something has come, if it comes [at once](promptly). The processor is others' between two looks: a peer may have
/// the same one.
pub(crate) fn look_until(mut has_come: impl FnMut() -> bool) {
    if !is_prompt() {
        return;
    }
    let began = Instant::now();
    while !has_come() && began.elapsed() < PROMPT_LIMIT {
        std::thread::yield_now();
    }
}

/// Waits until one of `descriptors` can be read, as `poll` does. Returns for each whether it can, or its other end is closed.
pub fn poll_readable<'a>(
    descriptors: impl Iterator<Item = BorrowedFd<'a>>,
    timeout: Option<Duration>,
) -> io::Result<Vec<bool>> {
    let readable = |descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN);
    let mut descriptors: Vec<PollFd<'_>> = descriptors.map(readable).collect();
    poll(&mut descriptors, timeout)?;
    Ok(descriptors.iter().map(|descriptor| !descriptor.revents().is_empty()).collect())
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

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn those_that_can_be_read_are_told_from_the_others() {
        let [(written, mut writer), (empty, _held), (closed, end)] = [(); 3].map(|()| io::pipe().unwrap());
        writer.write_all(&[0]).unwrap();
        drop(end);
        let all = || [&written, &empty, &closed].map(AsFd::as_fd).into_iter();
        assert_eq!(poll_readable(all(), Some(Duration::from_secs(60))).unwrap(), [true, false, true]);
        assert_eq!(poll_readable(all().skip(1).take(1), Some(Duration::ZERO)).unwrap(), [false]);
    }
}
