//! This command's own streams, written by a thread: a reader who does not read (a pager, a terminal after Ctrl-S) holds
//! up the workers' output, but neither signals nor the news of a failure.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use phalanx::launch::Stream;

/// How much may wait to be written before the workers' output is left in their pipes.
const ENOUGH: usize = 1 << 20;

/// The streams' queue. It takes whatever it is given; [`is_full`](Self::is_full) says when to stop.
#[derive(Debug)]
pub(crate) struct Output {
    queue: Sender<(Stream, Vec<u8>)>,
    state: Arc<State>,
    /// Closed when the thread has written everything.
    done: Receiver<()>,
}

#[derive(Debug, Default)]
struct State {
    waiting: AtomicUsize,
    reader_gone: AtomicBool,
}

impl Output {
    pub(crate) fn start() -> io::Result<Self> {
        let (queue, lines) = channel();
        let (still_writing, done) = channel();
        let state = Arc::<State>::default();
        let shared = Arc::clone(&state);
        thread::Builder::new().name("phalanx-output".into()).spawn(move || {
            write_all(&lines, &shared);
            drop::<Sender<()>>(still_writing);
        })?;
        Ok(Self { queue, state, done })
    }

    /// Queues whole lines; what one call gives is not torn apart.
    pub(crate) fn push(&self, stream: Stream, bytes: Vec<u8>) {
        self.state.waiting.fetch_add(bytes.len(), Ordering::Relaxed);
        // The thread ends only after this sender.
        let _ = self.queue.send((stream, bytes));
    }

    pub(crate) fn is_full(&self) -> bool {
        self.state.waiting.load(Ordering::Relaxed) >= ENOUGH
    }

    /// Has whoever read our standard output closed it?
    pub(crate) fn reader_is_gone(&self) -> bool {
        self.state.reader_gone.load(Ordering::Relaxed)
    }

    /// Waits until everything is written, but no longer than `limit`.
    pub(crate) fn finish(self, limit: Duration) {
        drop(self.queue);
        let _ = self.done.recv_timeout(limit);
    }
}

fn write_all(lines: &Receiver<(Stream, Vec<u8>)>, state: &State) {
    let (mut out, mut err) = (io::stdout(), io::stderr());
    let mut has_failed = false;
    for (stream, bytes) in lines {
        let written = match stream {
            Stream::Stdout => out.write_all(&bytes).and_then(|()| out.flush()),
            Stream::Stderr => err.write_all(&bytes),
        };
        state.waiting.fetch_sub(bytes.len(), Ordering::Relaxed);
        match written {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe && stream == Stream::Stdout => {
                state.reader_gone.store(true, Ordering::Relaxed);
            }
            // A full disk must not cost the training.
            Err(error) if !has_failed => {
                has_failed = true;
                let _ = writeln!(err, "phalanx: the workers' output cannot be written and is lost: {error}");
            }
            Err(_) => {}
        }
    }
}
