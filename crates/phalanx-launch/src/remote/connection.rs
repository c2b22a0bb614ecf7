//! One launcher on one host, and the threads that exchange messages with it.

use std::io::{self, BufReader, ErrorKind, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use super::frame;
use super::protocol::{FromLauncher, ToLauncher};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::lines::Lines;
use crate::reap::{KILL_TIMEOUT, reap};

/// The interval of heartbeats to a launcher.
pub(super) const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);
/// The longest line of standard error that comes in one piece.
const MAX_LINE: usize = 4096;
/// How long reading the remaining output may take after the process has ended. Other processes may hold its pipes open.
const LAST_MESSAGE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a process may run after its output is closed.
const CLOSED_GRACE: Duration = Duration::from_secs(5);

/// What comes from a host.
#[derive(Debug)]
pub(super) enum Incoming {
    Message(FromLauncher),
    /// A line of standard error: the remote shell's, or the launcher's.
    Line(String),
    /// Standard error is closed.
    StderrClosed,
    /// Standard output is closed, or cannot be decoded.
    StdoutClosed(Option<io::Error>),
}

/// Where the threads report what comes, and for which host.
#[derive(Clone, Debug)]
pub(super) struct IncomingSender {
    pub(super) host: usize,
    pub(super) sender: SyncSender<(usize, Incoming)>,
    pub(super) wake: Arc<PipeWriter>,
    /// How much has come of this host that was not taken yet.
    pub(super) untaken: Arc<AtomicUsize>,
}

impl IncomingSender {
    /// Waits while others wait to be taken.
    fn send(&self, incoming: Incoming) -> bool {
        self.untaken.fetch_add(1, Ordering::Relaxed);
        let sent = self.sender.send((self.host, incoming)).is_ok();
        if sent {
            let _ = (&*self.wake).write_all(&[0]);
        }
        sent
    }
}

/// The process of a launcher, or of the ssh that leads to one.
#[derive(Debug)]
pub(super) struct Connection {
    child: Child,
    outgoing: Option<Sender<ToLauncher>>,
    /// Readable when the process has ended; kernels before 5.3 have none.
    pidfd: Option<OwnedFd>,
    ended: Option<(ExitStatus, Instant)>,
    stdout_is_closed: bool,
    stderr_is_closed: bool,
    untaken: Arc<AtomicUsize>,
    /// When something of it was taken last.
    taken_at: Option<Instant>,
    kill_at: Option<Instant>,
    /// When it was killed first.
    killed_at: Option<Instant>,
}

impl Connection {
    /// `remedy` says what to do where the program is missing.
    pub(super) fn start(mut command: Command, remedy: &str, incoming: IncomingSender) -> Result<Self> {
        // Ctrl-C must reach only this command: otherwise ssh would end before its launcher has ended the workers.
        command.process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| {
            let is_missing = error.kind() == ErrorKind::NotFound;
            let cause = format!("cannot start {}", command.get_program().display());
            let error = Error::not_started(cause, error);
            if is_missing { error.with_remedy(remedy) } else { error }
        })?;
        let (outgoing, inbox) = channel();
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let mut connection = Self {
            pidfd: pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).ok(),
            child,
            outgoing: Some(outgoing),
            ended: None,
            stdout_is_closed: false,
            stderr_is_closed: false,
            untaken: Arc::clone(&incoming.untaken),
            taken_at: None,
            kill_at: None,
            killed_at: None,
        };
        if let (Some(stdin), Some(stdout), Some(stderr)) = pipes {
            let (out, err) = (incoming.clone(), incoming);
            let started = thread("outgoing", move || write(stdin, &inbox))
                .and_then(|()| thread("node-out", move || read(stdout, &out)))
                .and_then(|()| thread("node-err", move || read_lines(stderr, &err)));
            started.inspect_err(|_| connection.kill())?;
        }
        Ok(connection)
    }

    pub(super) fn send(&self, message: ToLauncher) {
        if let Some(outgoing) = &self.outgoing {
            // If the thread is gone, so is the connection.
            let _ = outgoing.send(message);
        }
    }

    /// Closes its standard input: a launcher then ends its workers and itself.
    pub(super) fn close(&mut self) {
        self.outgoing = None;
    }

    /// It may run so much longer, and is then killed.
    pub(super) fn must_end_by(&mut self, at: Instant) {
        self.kill_at = Some(self.kill_at.map_or(at, |earlier| earlier.min(at)));
    }

    #[cfg(test)]
    pub(super) fn limit(&self) -> Option<Instant> {
        self.kill_at
    }

    /// Something that has come of it was taken.
    pub(super) fn was_taken(&mut self) {
        self.untaken.fetch_sub(1, Ordering::Relaxed);
        self.taken_at = Some(Instant::now());
    }

    pub(super) fn stdout_has_closed(&mut self) {
        self.stdout_is_closed = true;
        self.must_end_by(Instant::now() + CLOSED_GRACE);
    }

    pub(super) fn stderr_has_closed(&mut self) {
        self.stderr_is_closed = true;
    }

    /// Becomes readable when it ends.
    pub(super) fn end_notice(&self) -> Option<BorrowedFd<'_>> {
        self.pidfd.as_ref().filter(|_| self.ended.is_none()).map(AsFd::as_fd)
    }

    /// Whether there is a state that only polling can show.
    pub(super) fn must_be_polled(&self) -> bool {
        match self.ended {
            None => self.pidfd.is_none() || self.kill_at.is_some(),
            Some(_) => !self.is_over(),
        }
    }

    /// Checks whether it has ended, and kills it when its time is over.
    pub(super) fn look(&mut self) {
        if self.kill_at.is_some_and(|at| Instant::now() >= at) {
            self.kill();
        }
        if self.ended.is_none()
            && let Ok(Some(status)) = self.child.try_wait()
        {
            self.ended = Some((status, Instant::now()));
        }
    }

    /// Whether it has ended, and all its output has been read. What has come waits as long as others' messages are taken. One that was killed and
    /// does not end is stuck in the kernel, and not waited for.
    pub(super) fn is_over(&self) -> bool {
        let Some((_, ended)) = self.ended else {
            return self.killed_at.is_some_and(|killed| killed.elapsed() >= KILL_TIMEOUT);
        };
        let silent_since = self.taken_at.map_or(ended, |taken| taken.max(ended));
        let is_silent = || silent_since.elapsed() > LAST_MESSAGE_TIMEOUT;
        let all_came = self.stdout_is_closed && self.stderr_is_closed;
        let waits = self.untaken.load(Ordering::Relaxed) > 0;
        all_came || !waits && is_silent()
    }

    /// Its exit code; none if a signal has ended it.
    pub(super) fn code(&self) -> Option<i32> {
        self.ended.and_then(|(status, _)| status.code())
    }

    /// Kills it with all processes that it has started here.
    pub(super) fn kill(&mut self) {
        // The number is valid as long as the process has not been reaped.
        if self.ended.is_none() {
            self.killed_at.get_or_insert_with(Instant::now);
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.ended.is_none() {
            self.kill();
            // Not as long for each of many that were killed at the same time.
            let waited = self.killed_at.map_or(Duration::ZERO, |killed| killed.elapsed());
            let _ = reap(&mut self.child, Deadline::after(KILL_TIMEOUT.saturating_sub(waited)));
        }
    }
}

fn thread(name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    let started = std::thread::Builder::new().name(format!("phalanx-{name}")).spawn(run);
    started.map(drop).map_err(|error| Error::not_started("cannot start a thread for another host", error))
}

/// Until there are no more messages, or the launcher does not read them.
fn write(mut to: ChildStdin, outgoing: &Receiver<ToLauncher>) {
    loop {
        let order = match outgoing.recv_timeout(HEARTBEAT_INTERVAL) {
            Ok(order) => order,
            Err(RecvTimeoutError::Timeout) => ToLauncher::Alive,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        if frame::write(&mut to, &order).is_err() {
            return;
        }
    }
}

fn read(from: ChildStdout, incoming: &IncomingSender) {
    let mut from = BufReader::new(from);
    let mut hear = || -> io::Result<()> {
        if frame::skip_to_greeting(&mut from)? {
            while let Some(said) = frame::read(&mut from)? {
                if !incoming.send(Incoming::Message(said)) {
                    break;
                }
            }
        }
        Ok(())
    };
    let end = hear().err();
    incoming.send(Incoming::StdoutClosed(end));
}

fn read_lines(mut from: impl Read, incoming: &IncomingSender) {
    let tell = |line: &[u8]| {
        let text = String::from_utf8_lossy(line).trim_end().to_owned();
        text.is_empty() || incoming.send(Incoming::Line(text))
    };
    let (mut lines, mut buffer, mut is_heard) = (Lines::new(MAX_LINE), [0; MAX_LINE], true);
    while is_heard {
        match from.read(&mut buffer) {
            Ok(count @ 1..) => lines.push(&buffer[..count], Instant::now(), |line| is_heard &= tell(line)),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => break,
        }
    }
    lines.finish(|line| is_heard &= tell(line));
    if is_heard {
        incoming.send(Incoming::StderrClosed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;
    use crate::poll::wake_pipe;

    #[test]
    fn only_of_a_program_that_is_missing_it_is_said_how_to_get_it() {
        let refused = |program: &str, argument: String| {
            let (sender, _incoming) = sync_channel(1);
            let (_notice, wake) = wake_pipe().unwrap();
            let sender = IncomingSender { host: 0, sender, wake: Arc::new(wake), untaken: Arc::default() };
            let mut command = Command::new(program);
            command.arg(argument);
            Connection::start(command, "install it", sender).unwrap_err()
        };
        assert_eq!(refused("/does/not/exist", String::new()).remedy(), Some("install it"));
        // The system takes no argument of this length.
        let error = refused("true", "x".repeat(1 << 20));
        assert!(error.to_string().starts_with("cannot start true: ") && error.remedy().is_none(), "{error}");
    }

    #[test]
    fn one_that_was_killed_and_does_not_end_is_not_waited_for() {
        let (sender, _incoming) = sync_channel(8);
        let (_notice, wake) = wake_pipe().unwrap();
        let sender = IncomingSender { host: 0, sender, wake: Arc::new(wake), untaken: Arc::default() };
        let mut command = Command::new("sleep");
        command.arg("600");
        let mut connection = Connection::start(command, "", sender).unwrap();
        connection.look();
        assert!(!connection.is_over());
        // As if it was stuck in the kernel since.
        connection.killed_at = Instant::now().checked_sub(KILL_TIMEOUT);
        assert!(connection.is_over());
        // It is reaped.
        connection.killed_at = None;
    }

    #[test]
    fn a_long_line_of_a_host_is_cut_between_characters_and_says_so() {
        let (sender, incoming) = sync_channel(8);
        let (_notice, wake) = wake_pipe().unwrap();
        let sender = IncomingSender { host: 0, sender, wake: Arc::new(wake), untaken: Arc::default() };
        // The last byte that would fit is the first half of a character.
        let long = format!("{}ü ends", "x".repeat(MAX_LINE - 1));
        read_lines(format!("{long}\r\n\nno end").as_bytes(), &sender);
        drop(sender);
        let said: Vec<String> = incoming
            .iter()
            .map(|(_, said)| match said {
                Incoming::Line(line) => line,
                other => format!("{other:?}"),
            })
            .collect();
        let first = format!("{} [the line goes on]", "x".repeat(MAX_LINE - 1));
        assert_eq!(said, [first.as_str(), "ü ends", "no end", "StderrClosed"]);
    }

    #[test]
    fn what_was_not_taken_yet_is_not_lost_with_the_process() {
        let limit = Deadline::after(Duration::from_secs(60));
        let (sender, incoming) = sync_channel(1);
        let (_notice, wake) = wake_pipe().unwrap();
        let sender = IncomingSender { host: 0, sender, wake: Arc::new(wake), untaken: Arc::default() };
        let mut command = Command::new("sh");
        // What it leaves behind holds its output open.
        command.args(["-c", "echo first >&2; echo last >&2; sleep 600 &"]);
        let mut connection = Connection::start(command, "", sender).unwrap();
        while connection.ended.is_none() || connection.untaken.load(Ordering::Relaxed) < 2 {
            assert!(!limit.has_passed(), "it has not ended");
            connection.look();
            std::thread::sleep(Duration::from_millis(1));
        }
        let long_ago = Instant::now().checked_sub(2 * LAST_MESSAGE_TIMEOUT).unwrap();
        connection.ended = connection.ended.map(|(status, _)| (status, long_ago));
        for expected in ["first", "last"] {
            assert!(!connection.is_over());
            let next = incoming.recv_timeout(Duration::from_secs(60)).unwrap();
            assert!(matches!(&next, (0, Incoming::Line(line)) if line == expected), "{next:?}");
            connection.was_taken();
        }
        // What it has left is not waited for.
        connection.taken_at = Some(long_ago);
        assert!(connection.is_over());
        let _ = kill_process_group(Pid::from_child(&connection.child), Signal::KILL);
    }
}
