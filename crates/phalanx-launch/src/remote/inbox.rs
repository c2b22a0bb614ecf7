//! The inbox of the driver: messages of all hosts, and waiting for them.

use std::io::{PipeReader, PipeWriter};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use super::connection::{Connection, Incoming, IncomingSender};
use crate::attempts::Control;
use crate::error::{Error, Result};
use crate::poll::{drain, poll_readable, wake_pipe};

/// How many messages may wait; further ones stay in the pipes. Who takes so many at a time looks at something else then.
pub(super) const WAITING: usize = 256;
/// How often to poll what has no descriptor.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) struct Inbox {
    sender: SyncSender<(usize, Incoming)>,
    incoming: Receiver<(usize, Incoming)>,
    wake: Arc<PipeWriter>,
    notice: PipeReader,
    /// Whether there may be messages for which no byte is in the pipe.
    left_over: bool,
}

impl Inbox {
    pub(super) fn new() -> Result<Self> {
        let (notice, wake) = wake_pipe()
            .map_err(|error| Error::io("cannot make a pipe for messages of other hosts", error))?;
        let (sender, incoming) = sync_channel(WAITING);
        Ok(Self { sender, incoming, wake: Arc::new(wake), notice, left_over: false })
    }

    /// The sending end for a connection of this number.
    pub(super) fn incoming_sender(&self, host: usize) -> IncomingSender {
        IncomingSender { host, sender: self.sender.clone(), wake: self.waker(), untaken: Arc::default() }
    }

    /// A byte in it ends a wait.
    pub(super) fn waker(&self) -> Arc<PipeWriter> {
        Arc::clone(&self.wake)
    }

    /// Waits for any message, not longer than `timeout`.
    pub(super) fn wait<'a>(
        &mut self,
        control: &Control<'_>,
        connections: impl Iterator<Item = &'a Connection> + Clone,
        mut timeout: Duration,
    ) {
        if self.left_over {
            timeout = Duration::ZERO;
        } else if connections.clone().any(Connection::must_be_polled) {
            timeout = timeout.min(POLL_INTERVAL);
        }
        let mut descriptors: Vec<BorrowedFd<'_>> = connections.filter_map(Connection::end_notice).collect();
        descriptors.push(self.notice.as_fd());
        descriptors.extend(control.signals.as_ref().map(AsFd::as_fd));
        descriptors.extend(control.refused.notice());
        // A wait that fails is followed by the next.
        let _ = poll_readable(descriptors.into_iter(), Some(timeout));
        drain(&self.notice);
    }

    /// The next message, and its host.
    pub(super) fn next(&mut self) -> Option<(usize, Incoming)> {
        let incoming = self.incoming.try_recv().ok();
        // Who takes no more for now comes back without a wait.
        self.left_over = incoming.is_some();
        incoming
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::iter::empty;
    use std::ops::ControlFlow;

    use super::*;
    use crate::event::Event;
    use crate::refusals::Refused;

    #[test]
    fn messages_that_are_left_for_another_turn_end_the_wait_for_it() {
        let mut observer = |_: Event<'_>| ControlFlow::Continue(());
        let refused = Refused::new().unwrap();
        let control = Control { signals: None, observer: &mut observer, refused, stops: false };
        let mut inbox = Inbox::new().unwrap();
        let IncomingSender { host, sender, wake, .. } = inbox.incoming_sender(7);
        for _ in 0..2 {
            sender.send((host, Incoming::StderrClosed)).unwrap();
            (&*wake).write_all(&[0]).unwrap();
        }
        // It empties the pipe.
        inbox.wait(&control, empty(), Duration::from_secs(600));
        for _ in 0..2 {
            assert!(matches!(inbox.next(), Some((7, Incoming::StderrClosed))));
            // As long as the messages may be more, a wait is none.
            inbox.wait(&control, empty(), Duration::from_secs(600));
        }
        assert!(inbox.next().is_none() && !inbox.left_over);
    }
}
