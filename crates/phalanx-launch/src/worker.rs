//! One worker process.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, PipeReader, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use phalanx_sys::guard::Guard;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::pipe::fcntl_getpipe_size;
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions, kill_process_group, pidfd_open, waitid};

use super::error_file::{ErrorFile, WorkerError};
use super::event::Stream;
use super::exit::{Exit, Failure, Signal};
use super::job::Job;
use super::job_processes::TAG_VARIABLE;
use super::lines::{Lines, character_end};
use super::logs::{Sink, WorkerLogs};
use super::placement::Placement;
use super::program::Program;
use super::reap::reap;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::host;
use crate::rank::Rank;
use crate::worker_error::{BLAME_FILE, ERROR_FILE, Ended};

/// How much of its standard error is kept for the report.
const TAIL_LINES: usize = 20;
const TAIL_WIDTH: usize = 1024;
/// How much a pipe holds that does not say so.
const USUAL_PIPE: usize = 64 * 1024;

/// A started worker. It is not reaped before the job's end: a zombie keeps its process number, which is its group's.
#[derive(Debug)]
pub(super) struct Worker {
    rank: Rank,
    tag: String,
    pid: Pid,
    child: Child,
    /// Readable when the process has ended; kernels before 5.3 have none.
    pidfd: Option<OwnedFd>,
    started: Instant,
    ended: Option<(Exit, Duration)>,
    /// The signal that has stopped it, if one has; stops are counted.
    stopped: Option<Signal>,
    stops: u64,
    /// Whether it was killed because it was stopped.
    is_given_up: bool,
    /// Its number, which is its group's, may belong to another process by now.
    reaped: bool,
    captures: Vec<Capture>,
    tail: VecDeque<Vec<u8>>,
    error_file: Option<ErrorFile>,
    /// The content of its error file at the worker's end.
    error: Option<WorkerError>,
    /// The file for the rank that it blames.
    blame_file: Option<ErrorFile>,
    blames: Option<u32>,
}

/// One captured output stream.
#[derive(Debug)]
struct Capture {
    stream: Stream,
    sink: Sink,
    pipe: PipeReader,
    lines: Lines,
    open: bool,
}

impl Worker {
    /// Starts the `local_rank`-th worker of this node, watched by `guard`.
    pub(super) fn start(
        job: &Job,
        placement: &Placement,
        local_rank: u32,
        tag: String,
        logs: Option<WorkerLogs>,
        guard: &Guard,
    ) -> Result<Self> {
        let rank = placement.rank(local_rank);
        let mut command = Command::new(&job.program);
        command.arg0(job.argv0()).args(job.arguments_of(local_rank)).stdin(Stdio::null());
        command.envs(job.environment(local_rank, placement));
        let (error_file, stdout, stderr) = match logs {
            Some(logs) => (Some(ErrorFile::Kept(logs.error_file, logs.disk)), logs.stdout, logs.stderr),
            None => (ErrorFile::create(), Sink::shown(), Sink::shown()),
        };
        // A job within a job carries both tags.
        let outer = std::env::var(TAG_VARIABLE).unwrap_or_default();
        command.env(TAG_VARIABLE, format!("{outer}{tag}"));
        let blame_file = ErrorFile::create();
        for (variable, file) in [(ERROR_FILE, &error_file), (BLAME_FILE, &blame_file)] {
            // Empty variables count as not set: the values of this process's own launcher are not this job's.
            command.env(variable, file.as_ref().map(ErrorFile::path).unwrap_or_default());
        }
        let mut captures = Vec::new();
        for (stream, mut sink) in [(Stream::Stdout, stdout), (Stream::Stderr, stderr)] {
            sink.shown &= job.shows(local_rank);
            if !job.captures_output() && sink.log.is_none() {
                continue;
            }
            let (capture, end) = Capture::open(stream, sink).map_err(|error| {
                Error::io(format!("cannot make a pipe for the output of rank {rank}"), error)
            })?;
            match stream {
                Stream::Stdout => command.stdout(end),
                Stream::Stderr => command.stderr(end),
            };
            captures.push(capture);
        }
        let program = Program::of(&command);
        let started = program.start(command, job.argv0(), guard);
        let child = started.map_err(|error| cannot_start(job, &program, rank, error))?;
        let pid = Pid::from_child(&child);
        Ok(Self {
            rank,
            tag,
            pid,
            child,
            pidfd: pidfd_open(pid, PidfdFlags::empty()).ok(),
            started: Instant::now(),
            ended: None,
            stopped: None,
            stops: 0,
            is_given_up: false,
            reaped: false,
            captures,
            tail: VecDeque::with_capacity(TAIL_LINES),
            error_file,
            error: None,
            blame_file,
            blames: None,
        })
    }

    pub(super) fn rank(&self) -> Rank {
        self.rank
    }

    /// The tag in the environment of all its processes.
    pub(super) fn tag(&self) -> &str {
        &self.tag
    }

    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Whether its end can only be seen by polling.
    pub(super) fn must_be_polled(&self) -> bool {
        !self.has_ended() && self.pidfd.is_none()
    }

    /// Becomes readable when it ends.
    pub(super) fn end_notice(&self) -> Option<BorrowedFd<'_>> {
        self.pidfd.as_ref().filter(|_| !self.has_ended()).map(AsFd::as_fd)
    }

    /// Readable when it has written.
    pub(super) fn open_output(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.captures.iter().filter(|capture| capture.open).map(|capture| capture.pipe.as_fd())
    }

    /// How it ended, if it has ended since the last call.
    pub(super) fn poll_end(&mut self) -> Option<Exit> {
        if self.has_ended() {
            return None;
        }
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let exit = match waitid(WaitId::Pid(self.pid), options) {
            Ok(None) | Err(rustix::io::Errno::INTR) => return None,
            Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => Exit::Code(code),
                (None, Some(signal)) => match (Signal::new(signal), self.stopped) {
                    (Signal::KILL, Some(stopped)) if self.is_given_up => Exit::Frozen(stopped),
                    (signal, _) => Exit::Signal(signal),
                },
                (None, None) => return None,
            },
            Err(_) => Exit::Lost,
        };
        self.error = self.error_file.as_mut().and_then(ErrorFile::read);
        let has_disagreed = self.error.as_ref().is_some_and(|error| error.ended == Ended::InDisagreement);
        let exit = if has_disagreed && exit.is_success() { Exit::Disagreed } else { exit };
        self.ended = Some((exit, self.started.elapsed()));
        self.blames = self.blame_file.as_mut().and_then(ErrorFile::read_rank);
        Some(exit)
    }

    /// The number of its current stop, if a signal has stopped it. A debugger halts a process in another way.
    pub(super) fn poll_stop(&mut self) -> Option<u64> {
        // If it has ended, its end is reported elsewhere, and its last stop does not matter.
        let options = WaitIdOptions::STOPPED | WaitIdOptions::CONTINUED | WaitIdOptions::NOHANG;
        while !self.has_ended()
            && let Ok(Some(status)) = waitid(WaitId::Pid(self.pid), options)
        {
            self.stopped = status.stopping_signal().map(Signal::new);
            self.stops += u64::from(self.stopped.is_some());
        }
        self.stopped.map(|_| self.stops)
    }

    /// Kills it while it is stopped.
    pub(super) fn give_up(&mut self) {
        self.is_given_up = true;
        self.signal(rustix::process::Signal::KILL);
    }

    /// The rank that failed before it, according to the worker itself.
    pub(super) fn blames(&self) -> Option<u32> {
        self.blames
    }

    /// Whether it has reported that it is about to fail.
    pub(super) fn is_failing(&mut self) -> bool {
        !self.has_ended() && self.error_file.as_mut().is_some_and(ErrorFile::announces_an_end)
    }

    /// Passes each line that has arrived to `emit`, without waiting. At most one pipe's content is read at a time, so
    /// that a worker that writes without end does not hold up the others.
    pub(super) fn read_output(&mut self, now: Instant, mut emit: impl FnMut(Stream, &[u8])) {
        let Self { captures, tail, .. } = self;
        for capture in captures {
            let (stream, shown) = (capture.stream, capture.sink.shown);
            capture.read(now, |line| {
                keep(tail, stream, line);
                if shown {
                    emit(stream, line);
                }
            });
        }
    }

    /// Passes a last line without an end to `emit`.
    pub(super) fn finish_output(&mut self, mut emit: impl FnMut(Stream, &[u8])) {
        let Self { captures, tail, .. } = self;
        for Capture { stream, lines, sink, .. } in captures {
            lines.finish(|line| {
                keep(tail, *stream, line);
                if sink.shown {
                    emit(*stream, line);
                }
            });
        }
    }

    /// Sends `signal` to the worker's whole process group.
    pub(super) fn signal(&self, signal: rustix::process::Signal) {
        // The number may belong to another process, if the exit status was lost.
        if let Some(group) = self.group() {
            let _ = kill_process_group(group, signal);
        }
    }

    /// Its process group, as long as the number is certainly this worker's.
    pub(super) fn group(&self) -> Option<Pid> {
        let lost = matches!(self.ended, Some((Exit::Lost, _)));
        (!lost && !self.reaped).then_some(self.pid)
    }

    pub(super) fn is_reaped(&self) -> bool {
        self.reaped
    }

    /// Kills the rest of the group, and reaps the worker. A process that is stuck in the kernel is waited for until
    /// `deadline`, not longer.
    pub(super) fn reap(&mut self, deadline: Deadline) {
        self.signal(rustix::process::Signal::KILL);
        self.reaped |= !matches!(reap(&mut self.child, deadline), Ok(None));
    }

    pub(super) fn failure(&self, node: u32) -> Failure {
        let (exit, after) = self.ended.unwrap_or((Exit::Lost, self.started.elapsed()));
        let error = self.error.as_ref().filter(|error| match error.ended {
            Ended::ByError => true,
            Ended::ByPanic => exit.may_be_a_panics(),
            Ended::InDisagreement => exit == Exit::Disagreed,
        });
        Failure {
            rank: self.rank,
            host: host::name(),
            node,
            pid: self.id(),
            exit,
            after,
            message: error.map(|error| error.message.clone()),
            stderr: self.tail.iter().cloned().collect(),
        }
    }
}

impl Capture {
    fn open(stream: Stream, sink: Sink) -> io::Result<(Self, io::PipeWriter)> {
        let (pipe, writer) = io::pipe()?;
        fcntl_setfl(&pipe, fcntl_getfl(&pipe)? | OFlags::NONBLOCK)?;
        Ok((Self { stream, sink, pipe, lines: Lines::new(Job::MAX_LINE), open: true }, writer))
    }

    /// A pipe holds 16 pages, of 4 KiB or 64, or as much as the worker has asked for. A last line that has no end comes when the pipe is closed:
    /// an error that a worker ends with is often one, and other nodes hear of it as soon as the worker has ended.
    fn read(&mut self, now: Instant, mut emit: impl FnMut(&[u8])) {
        let mut buffer = [0; 16 * 1024];
        let mut left = fcntl_getpipe_size(&self.pipe).unwrap_or(USUAL_PIPE);
        while self.open && left > 0 {
            match self.pipe.read(&mut buffer) {
                Ok(0) => self.close(&mut emit),
                Ok(count) => {
                    left = left.saturating_sub(count);
                    if let Some(log) = &self.sink.log {
                        log.push(&buffer[..count]);
                    }
                    self.lines.push(&buffer[..count], now, &mut emit);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => self.close(&mut emit),
            }
        }
    }

    fn close(&mut self, emit: impl FnMut(&[u8])) {
        self.open = false;
        self.lines.finish(emit);
    }
}

fn keep(tail: &mut VecDeque<Vec<u8>>, stream: Stream, line: &[u8]) {
    if stream == Stream::Stderr {
        if tail.len() == TAIL_LINES {
            tail.pop_front();
        }
        let (piece, rest) = line.split_at(line.len().min(TAIL_WIDTH));
        tail.push_back(piece[..character_end(piece, rest)].to_vec());
    }
}

fn cannot_start(job: &Job, program: &Program, rank: Rank, error: io::Error) -> Error {
    let remedy = program.remedy(&error);
    let cause = format!("cannot start {} as rank {rank}", Path::new(&job.program).display());
    remedy.into_iter().fold(Error::not_started(cause, error).with_peer(rank), Error::with_remedy)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use rustix::pipe::fcntl_setpipe_size;

    use super::*;

    #[test]
    fn a_last_line_without_an_end_comes_when_the_pipe_is_closed() {
        let (mut capture, mut end) = Capture::open(Stream::Stderr, Sink::shown()).unwrap();
        let mut lines = Vec::new();
        end.write_all(b"first\nno data").unwrap();
        capture.read(Instant::now(), |line| lines.push(line.to_vec()));
        // What goes on may be the same line.
        assert_eq!(lines, [b"first"]);
        end.write_all(b" left").unwrap();
        drop(end);
        capture.read(Instant::now(), |line| lines.push(line.to_vec()));
        assert_eq!(lines, [&b"first"[..], b"no data left"]);
    }

    #[test]
    fn all_that_a_large_pipe_holds_is_read_at_once() {
        let (mut capture, mut end) = Capture::open(Stream::Stdout, Sink::shown()).unwrap();
        let size = fcntl_setpipe_size(&end, 1 << 20).unwrap();
        let line = [[b'x'; 63].as_slice(), b"\n"].concat();
        end.write_all(&line.repeat(size / line.len())).unwrap();
        drop(end);
        let mut lines = 0;
        capture.read(Instant::now(), |_| lines += 1);
        assert_eq!(lines, size / line.len());
    }
}
