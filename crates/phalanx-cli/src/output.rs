//! This command's own streams, written by a thread: if the reader does not read (a pager, a terminal after Ctrl-S), the
//! workers' output waits, but signals and failures are handled.
//!
//! On a terminal a status line stays below the scrolling output.

use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use phalanx::launch::Stream;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;

use crate::render::{self, Format};

/// How many bytes may wait to be written before the workers' output is left in their pipes.
const ENOUGH: usize = 1 << 20;
/// The columns of a terminal that does not say how many it has.
const USUAL_WIDTH: u16 = 80;
/// The shortest time between two notes of output that is lost.
const NOTE_INTERVAL: Duration = Duration::from_secs(600);
/// To the beginning of the line, and clears it.
const CLEAR: &str = "\r\x1b[K";

/// The commands of the thread.
#[derive(Debug)]
enum Message {
    Lines(Stream, Vec<u8>),
    Status(String),
}

/// The streams' queue. It accepts everything; [`is_full`](Self::is_full) says when to stop.
#[derive(Debug)]
pub(crate) struct Output {
    queue: Sender<Message>,
    state: Arc<OutputState>,
    /// Closed when the thread has written everything.
    done: Receiver<()>,
}

#[derive(Debug, Default)]
struct OutputState {
    waiting: AtomicUsize,
    reader_gone: AtomicBool,
}

impl Output {
    /// Starts the thread, whose own messages have this format.
    pub(crate) fn start(format: Format) -> io::Result<Self> {
        let (queue, lines) = channel();
        let (still_writing, done) = channel();
        let state = Arc::<OutputState>::default();
        let shared = Arc::clone(&state);
        thread::Builder::new().name("phalanx-output".into()).spawn(move || {
            write_all(&lines, &shared, format);
            drop::<Sender<()>>(still_writing);
        })?;
        Ok(Self { queue, state, done })
    }

    /// Queues complete lines; the lines of one call stay together.
    pub(crate) fn push(&self, stream: Stream, bytes: Vec<u8>) {
        self.state.waiting.fetch_add(bytes.len(), Ordering::Relaxed);
        // The thread ends only after this sender.
        let _ = self.queue.send(Message::Lines(stream, bytes));
    }

    /// Sets the status line. Without a terminal it has no effect.
    pub(crate) fn status(&self, text: String) {
        let _ = self.queue.send(Message::Status(text));
    }

    pub(crate) fn is_full(&self) -> bool {
        self.state.waiting.load(Ordering::Relaxed) >= ENOUGH
    }

    /// Whether the reader of standard output has closed it.
    pub(crate) fn reader_is_gone(&self) -> bool {
        self.state.reader_gone.load(Ordering::Relaxed)
    }

    /// Waits until everything is written, but not longer than `limit`.
    pub(crate) fn finish(self, limit: Duration) {
        drop(self.queue);
        let _ = self.done.recv_timeout(limit);
    }
}

/// Prints `text` on standard output. Who has closed the pipe needs no more of it, and no message.
pub(crate) fn print(text: &[u8]) -> Result<(), String> {
    let mut out = io::stdout().lock();
    match write_whole(&mut out, text) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(format!("the output cannot be written: {error}"))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Writes all of it. Processes that share a terminal or pipe also share whether it blocks, and some, such as Node.js, set that it does
/// not: then this waits until there is room.
fn write_whole(stream: &mut (impl Write + AsFd), mut bytes: &[u8]) -> io::Result<()> {
    loop {
        let written = if bytes.is_empty() { stream.flush().map(|()| 0) } else { stream.write(bytes) };
        match written {
            Ok(0) if bytes.is_empty() => return Ok(()),
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                retry_on_intr(|| poll(&mut [PollFd::new(&*stream, PollFlags::OUT)], None))?;
            }
            Err(error) => return Err(error),
        }
    }
}

fn write_all(messages: &Receiver<Message>, state: &OutputState, format: Format) {
    let (mut out, mut err) = (io::stdout(), io::stderr());
    let mut status = StatusLine::new();
    let mut lost = LostOutput::default();
    // A program reads it at once or never: no event follows the last one.
    let is_json = format == Format::Json;
    loop {
        // The line is drawn when nothing else is to be written.
        let message = match messages.try_recv() {
            Ok(message) => message,
            Err(TryRecvError::Disconnected) => break,
            Err(TryRecvError::Empty) => {
                status.draw(&mut err);
                let Ok(message) = messages.recv() else { break };
                message
            }
        };
        let (stream, bytes) = match message {
            Message::Status(text) => {
                status.erase(&mut err);
                status.text = text;
                continue;
            }
            Message::Lines(stream, bytes) => (stream, bytes),
        };
        status.erase(&mut err);
        let written = match stream {
            Stream::Stdout => write_whole(&mut out, &bytes),
            Stream::Stderr => write_whole(&mut err, &bytes),
        };
        state.waiting.fetch_sub(bytes.len(), Ordering::Relaxed);
        match written {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe && stream == Stream::Stdout => {
                state.reader_gone.store(true, Ordering::Relaxed);
            }
            // A full disk must not cost the training.
            written => lost.note(&written),
        }
        lost.tell(Instant::now(), is_json, |text| write_whole(&mut err, &render::note(text, format)));
    }
    status.erase(&mut err);
    if !is_json {
        lost.tell(Instant::now(), true, |text| write_whole(&mut err, &render::note(text, format)));
    }
}

/// Output that could not be written. A person hears of it when there is room for a word about it: standard error may be on the same full
/// disk, and what follows later would hide the gap.
#[derive(Debug, Default)]
struct LostOutput {
    /// Whether the last lines were lost.
    is_failing: bool,
    /// What is to be said.
    untold: Option<String>,
    told_at: Option<Instant>,
}

impl LostOutput {
    /// Lines were written, or not.
    fn note(&mut self, written: &io::Result<()>) {
        match written {
            Ok(()) => self.is_failing = false,
            Err(error) if !self.is_failing => {
                self.is_failing = true;
                self.untold = Some(format!("the workers' output cannot be written and is lost: {error}"));
            }
            Err(_) => {}
        }
    }

    /// Says by `write` what is to be said: at most once in a while, unless it is to be said `at_once`.
    fn tell(&mut self, now: Instant, at_once: bool, write: impl FnOnce(&str) -> io::Result<()>) {
        let is_quiet = self.told_at.is_none_or(|at| now.saturating_duration_since(at) >= NOTE_INTERVAL);
        if let Some(text) = &self.untold
            && (is_quiet || at_once)
            && write(text).is_ok()
        {
            (self.untold, self.told_at) = (None, Some(now));
        }
    }
}

/// The last line of the terminal.
#[derive(Debug)]
struct StatusLine {
    text: String,
    drawn: bool,
    /// Both streams must be terminals: output through a pipe would appear later, in the middle of the line.
    possible: bool,
}

impl StatusLine {
    fn new() -> Self {
        let dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
        let possible = io::stdout().is_terminal() && io::stderr().is_terminal() && !dumb;
        Self { text: String::new(), drawn: false, possible }
    }

    fn draw(&mut self, terminal: &mut io::Stderr) {
        if self.possible && !self.drawn && !self.text.is_empty() {
            // A line that wraps could not be erased.
            let columns = rustix::termios::tcgetwinsize(&*terminal).map_or(0, |size| size.ws_col);
            let text: String = self.text.chars().take(usize::from(width(columns)) - 1).collect();
            self.drawn = write!(terminal, "{CLEAR}\x1b[2m{text}\x1b[0m").is_ok();
        }
    }

    fn erase(&mut self, terminal: &mut io::Stderr) {
        if std::mem::take(&mut self.drawn) {
            let _ = write!(terminal, "{CLEAR}");
        }
    }
}

/// The width of a terminal that says that it has so many columns: none is said by one that does not know, such as a serial line.
fn width(columns: u16) -> u16 {
    if columns == 0 { USUAL_WIDTH } else { columns }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

    use super::*;

    #[test]
    fn a_terminal_that_does_not_know_its_width_has_the_usual_one() {
        assert_eq!([0, 1, 20].map(width), [USUAL_WIDTH, 1, 20]);
    }

    #[test]
    fn of_lost_output_a_person_hears_when_there_is_room_for_it() {
        let (mut lost, start) = (LostOutput::default(), Instant::now());
        let full = || -> io::Result<()> { Err(io::ErrorKind::StorageFull.into()) };
        let is_told = |lost: &mut LostOutput, now: Instant, at_once: bool| {
            let mut is_told = false;
            lost.tell(now, at_once, |text| {
                is_told = text.contains("is lost");
                Ok(())
            });
            is_told
        };
        assert!(!is_told(&mut lost, start, false));
        // Standard error is on the same disk.
        lost.note(&full());
        lost.tell(start, false, |_| full());
        lost.note(&Ok(()));
        assert!(is_told(&mut lost, start, false) && !is_told(&mut lost, start, true));
        // Of a disk that has room now and then a person hears now and then.
        lost.note(&full());
        assert!(!is_told(&mut lost, start, false) && is_told(&mut lost, start + NOTE_INTERVAL, false));
        lost.note(&Ok(()));
        lost.note(&full());
        assert!(is_told(&mut lost, start + NOTE_INTERVAL, true));
    }

    #[test]
    fn nothing_is_lost_on_a_stream_that_does_not_block() {
        let (mut reader, mut writer) = io::pipe().unwrap();
        fcntl_setfl(&writer, fcntl_getfl(&writer).unwrap() | OFlags::NONBLOCK).unwrap();
        // More than a pipe holds.
        let text = b"a line\n".repeat(1 << 19);
        let expected = text.clone();
        let written = thread::spawn(move || write_whole(&mut writer, &text));
        let mut read = Vec::new();
        reader.read_to_end(&mut read).unwrap();
        written.join().unwrap().unwrap();
        assert!(read == expected, "{} bytes of {}", read.len(), expected.len());
    }
}
