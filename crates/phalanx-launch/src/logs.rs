//! Files that keep what workers write, in torchrun's layout:
//! `<folder>/<run id>_<random>/attempt_<n>/<local rank>/{stdout.log,stderr.log,error.json}`.
//!
//! A thread writes them, so that a slow or full disk delays neither signals nor the handling of failures.
//!
//! Jobs run for weeks, and logs are rotated: renamed, compressed, removed. Before it writes, the thread looks now and then whether the file is
//! still the one at its path, and goes on in a new one if not. Otherwise what follows would go into a file that nobody finds, and that keeps
//! its place on the disk.

use std::cell::Cell;
use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::disk::Disk;
use super::event::Stream;
use super::failures::Failures;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::random;

/// How many bytes may wait to be written before the workers' output is left in their pipes.
const ENOUGH: usize = 8 << 20;
/// How long so many may wait before a person hears of it: workers that write wait, too, and the others for them.
const STALL_LIMIT: Duration = Duration::from_secs(10);
/// How much of a job's name is in its folder's, in bytes.
const NAME_LIMIT: usize = 200;
/// How long the last bytes may take to be written when the job is over.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(10);
/// How often to ask meanwhile whether they are still waited for.
const FLUSH_INTERVAL: Duration = Duration::from_millis(20);
/// How often to look whether a file is still at its path.
const ROTATION_INTERVAL: Duration = Duration::from_secs(1);

/// A selection of a worker's two output streams; torchrun's `Std`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    stdout: bool,
    stderr: bool,
}

impl Streams {
    fn has(self, stream: Stream) -> bool {
        match stream {
            Stream::Stdout => self.stdout,
            Stream::Stderr => self.stderr,
        }
    }
}

impl FromStr for Streams {
    type Err = String;

    /// `0` none, `1` standard output, `2` standard error, `3` both.
    fn from_str(text: &str) -> Result<Self, String> {
        let (stdout, stderr) = match text {
            "0" => (false, false),
            "1" => (true, false),
            "2" => (false, true),
            "3" => (true, true),
            _ => return Err(format!("{text:?} is none of 0 (none), 1 (stdout), 2 (stderr) and 3 (both)")),
        };
        Ok(Self { stdout, stderr })
    }
}

/// Streams of each worker: `3` for all, or `0:3,1:1` by local rank, where the others have none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    /// The same for every worker.
    Every(Streams),
    /// By local rank.
    Each(Vec<(u32, Streams)>),
}

impl Default for Selection {
    fn default() -> Self {
        Self::Every(Streams::default())
    }
}

impl FromStr for Selection {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !text.contains(':') {
            return text.parse().map(Self::Every);
        }
        let each = text.split(',').map(|entry| {
            let (rank, streams) = entry.split_once(':').ok_or_else(|| format!("{entry:?} has no colon"))?;
            let rank = rank.trim().parse().map_err(|_| format!("{rank:?} is no local rank"))?;
            Ok((rank, streams.trim().parse()?))
        });
        each.collect::<Result<_, String>>().map(Self::Each)
    }
}

impl Selection {
    fn has(&self, local_rank: u32, stream: Stream) -> bool {
        match self {
            Self::Every(streams) => streams.has(stream),
            Self::Each(each) => each.iter().any(|(rank, streams)| *rank == local_rank && streams.has(stream)),
        }
    }

    /// Whether nothing is selected.
    pub fn is_empty(&self) -> bool {
        let none = Streams::default();
        match self {
            Self::Every(streams) => *streams == none,
            Self::Each(each) => each.iter().all(|(_, streams)| *streams == none),
        }
    }
}

/// Which of the workers' output and errors is kept, and where.
#[derive(Clone, Debug)]
pub struct Logs {
    folder: PathBuf,
    redirects: Selection,
    tee: Selection,
}

impl Logs {
    /// Logs in `folder`, which is made if it does not exist. Without further calls, only the workers' error files are
    /// kept.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), redirects: Selection::default(), tee: Selection::default() }
    }

    /// Streams that go to files instead of coming as [events](super::Event::Line).
    pub fn redirects(mut self, selection: Selection) -> Self {
        self.redirects = selection;
        self
    }

    /// Streams that go to files and are reported as events too.
    pub fn tee(mut self, selection: Selection) -> Self {
        self.tee = selection;
        self
    }

    /// Makes this job's folder.
    pub(super) fn open(&self, run_id: &str) -> Result<JobLogs> {
        let name = folder_name(run_id, u32::from_le_bytes(random::bytes()?));
        // Workers may have another working directory.
        let folder =
            std::path::absolute(&self.folder).map_err(|error| cannot_make(&self.folder, error))?.join(name);
        make(&self.folder)?;
        // Not a folder that another user has made there: the parent folder may be writable by all.
        DirBuilder::new().mode(0o700).create(&folder).map_err(|error| cannot_make(&folder, error))?;
        Ok(JobLogs {
            logs: self.clone(),
            folder,
            writer: Writer::start()?,
            disk: Disk::default(),
            have_begun: Cell::new(false),
        })
    }
}

/// One job's logs.
#[derive(Debug)]
pub(super) struct JobLogs {
    logs: Logs,
    folder: PathBuf,
    writer: Writer,
    disk: Disk,
    /// Whether all workers have been started: from then on the job does not end for want of a log.
    have_begun: Cell<bool>,
}

/// The files of one worker in one attempt.
#[derive(Debug)]
pub(super) struct WorkerLogs {
    pub(super) error_file: PathBuf,
    /// On which that is.
    pub(super) disk: Disk,
    pub(super) stdout: Sink,
    pub(super) stderr: Sink,
}

/// Where one stream goes.
#[derive(Debug)]
pub(super) struct Sink {
    /// The file that keeps it.
    pub(super) log: Option<Log>,
    /// Whether it is reported as events.
    pub(super) shown: bool,
}

impl Sink {
    /// The stream is not kept.
    pub(super) fn shown() -> Self {
        Self { log: None, shown: true }
    }
}

impl JobLogs {
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// All workers have been started.
    pub(super) fn begin(&self) {
        self.have_begun.set(true);
    }

    pub(super) fn have_begun(&self) -> bool {
        self.have_begun.get()
    }

    /// Makes the files of one worker. If nodes come and go, workers start again within one attempt: their logs are
    /// kept, and the error file is replaced.
    pub(super) fn worker(&self, attempt: u32, local_rank: u32) -> Result<WorkerLogs> {
        let folder = self.folder.join(format!("attempt_{attempt}")).join(local_rank.to_string());
        if self.have_begun() {
            // Nobody waits any more for a disk that does not answer.
            let new = folder.clone();
            let made = self.disk.answer(move || make(&new));
            made.unwrap_or_else(|| Err(cannot_make(&folder, ErrorKind::TimedOut.into())))?;
        } else {
            make(&folder)?;
        }
        let error_file = folder.join("error.json");
        match fs::remove_file(&error_file) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(cannot_make(&error_file, error)),
            Ok(()) | Err(_) => {}
        }
        let sink = |stream, name: &str| -> Result<Sink> {
            let tee = self.logs.tee.has(local_rank, stream);
            let redirected = self.logs.redirects.has(local_rank, stream);
            let log = match tee || redirected {
                true => Some(self.writer.open(&folder.join(name))?),
                false => None,
            };
            Ok(Sink { log, shown: tee || !redirected })
        };
        Ok(WorkerLogs {
            error_file,
            disk: self.disk.clone(),
            stdout: sink(Stream::Stdout, "stdout.log")?,
            stderr: sink(Stream::Stderr, "stderr.log")?,
        })
    }

    /// Whether the queue is short enough to take more output.
    pub(super) fn is_ready(&self) -> bool {
        self.writer.state.lock().waiting < ENOUGH
    }

    /// What a person should hear now. In weeks a disk may fill up more than once.
    pub(super) fn take_failure(&self) -> Option<String> {
        let now = Instant::now();
        let LogState { waiting, full_since, stalls, failures, failure } = &mut *self.writer.state.lock();
        if *waiting < ENOUGH {
            *full_since = None;
            stalls.end();
        } else if now.saturating_duration_since(*full_since.get_or_insert(now)) >= STALL_LIMIT
            && stalls.is_worth_telling(now)
        {
            return Some(format!(
                "{} MiB of output and more have waited for the disk of the logs in {} for {} s: workers that write wait for it",
                ENOUGH >> 20,
                self.folder.display(),
                STALL_LIMIT.as_secs()
            ));
        }
        failure.take_if(|_| failures.is_worth_telling(now))
    }

    /// Waits until everything is written, but not longer than the disk's time limit, and as long as `goes_on` says so. Returns what is
    /// wrong, unless it was taken before.
    pub(super) fn finish(self, mut goes_on: impl FnMut() -> bool) -> Option<String> {
        let Writer { queue, state, done } = self.writer;
        drop(queue);
        let deadline = Deadline::after(FLUSH_TIMEOUT);
        let is_written = loop {
            match done.recv_timeout(FLUSH_INTERVAL) {
                Err(RecvTimeoutError::Timeout) if deadline.has_passed() || !goes_on() => break false,
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => break true,
            }
        };
        let mut state = state.lock();
        let late = (!is_written && !state.failures.is_told()).then(|| {
            let left = state.waiting;
            format!("the workers' logs are incomplete: their disk has not yet taken the last {left} bytes")
        });
        state.failure.take().or(late)
    }
}

/// One log file, on the supervisor's side.
#[derive(Debug)]
pub(super) struct Log {
    file: Arc<LogFile>,
    queue: Sender<(Arc<LogFile>, Vec<u8>)>,
    state: Arc<Mutex<LogState>>,
}

impl Log {
    pub(super) fn push(&self, bytes: &[u8]) {
        self.state.lock().waiting += bytes.len();
        // The thread ends only after the last sender.
        let _ = self.queue.send((Arc::clone(&self.file), bytes.to_vec()));
    }
}

/// One log file, on the side of the thread that writes.
#[derive(Debug)]
struct LogFile {
    path: PathBuf,
    open: Mutex<OpenFile>,
}

#[derive(Debug)]
struct OpenFile {
    file: File,
    looked_at: Instant,
}

impl LogFile {
    fn open(path: &Path) -> io::Result<Self> {
        let open = OpenFile { file: open(path)?, looked_at: Instant::now() };
        Ok(Self { path: path.to_owned(), open: Mutex::new(open) })
    }

    fn write(&self, bytes: &[u8], now: Instant) -> io::Result<()> {
        let mut open_file = self.open.lock();
        let mut made = Ok(());
        if now.saturating_duration_since(open_file.looked_at) >= ROTATION_INTERVAL {
            open_file.looked_at = now;
            if has_been_moved(&open_file.file, &self.path) {
                // If none can be made, as where the folder was removed, the old one still takes it, which perhaps nobody finds.
                made = open(&self.path).map(|file| open_file.file = file);
            }
        }
        (&open_file.file).write_all(bytes)?;
        made
    }
}

/// Opens a file to add to, and makes it if it is not there. What a worker may have put there in its place, such as a pipe, is not waited for.
fn open(path: &Path) -> io::Result<File> {
    phalanx_sys::open::unless_pipe(path, File::options().append(true).create(true))
}

/// Whether another file than `file`, or none, is at `path`.
fn has_been_moved(file: &File, path: &Path) -> bool {
    let id = |about: fs::Metadata| (about.dev(), about.ino());
    is_other(file.metadata().map(id), fs::metadata(path).map(id))
}

/// Whether `own` is not the file that is `there`. One of which nothing can be said takes nothing more: a file server does not know it any more.
fn is_other(own: io::Result<(u64, u64)>, there: io::Result<(u64, u64)>) -> bool {
    match (own, there) {
        (Ok(own), Ok(there)) => own != there,
        (Ok(_), Err(error)) => error.kind() == ErrorKind::NotFound,
        (Err(_), _) => true,
    }
}

#[derive(Debug)]
struct Writer {
    queue: Sender<(Arc<LogFile>, Vec<u8>)>,
    state: Arc<Mutex<LogState>>,
    /// Closed when the thread has written everything.
    done: Receiver<()>,
}

#[derive(Debug, Default)]
struct LogState {
    waiting: usize,
    /// Since when too much waits.
    full_since: Option<Instant>,
    stalls: Failures,
    failures: Failures,
    /// The first failure of a row of which nobody has heard yet.
    failure: Option<String>,
}

impl Writer {
    fn start() -> Result<Self> {
        let (queue, chunks) = channel();
        let (still_writing, done) = channel();
        let state = Arc::<Mutex<LogState>>::default();
        let shared = Arc::clone(&state);
        std::thread::Builder::new()
            .name("phalanx-logs".into())
            .spawn(move || {
                write_all(&chunks, &shared);
                drop::<Sender<()>>(still_writing);
            })
            .map_err(|error| Error::not_started("cannot start a thread for the logs", error))?;
        Ok(Self { queue, state, done })
    }

    fn open(&self, path: &Path) -> Result<Log> {
        let file = LogFile::open(path).map_err(|error| cannot_make(path, error))?;
        Ok(Log { file: Arc::new(file), queue: self.queue.clone(), state: Arc::clone(&self.state) })
    }
}

fn write_all(chunks: &Receiver<(Arc<LogFile>, Vec<u8>)>, state: &Mutex<LogState>) {
    for (file, bytes) in chunks {
        let written = file.write(&bytes, Instant::now());
        let mut state = state.lock();
        state.waiting = state.waiting.saturating_sub(bytes.len());
        match written {
            Ok(()) => state.failures.end(),
            // A full disk must not end the training.
            Err(error) if !state.failures.is_told() => {
                let path = file.path.display();
                state.failure.get_or_insert_with(|| {
                    format!("the workers' logs cannot be written and are incomplete: {path}: {error}")
                });
            }
            Err(_) => {}
        }
    }
}

/// The name of a job's folder. The system takes no longer ones than 255 bytes.
fn folder_name(run_id: &str, random: u32) -> String {
    let mut name = run_id.replace('/', "_");
    name.truncate(name.floor_char_boundary(NAME_LIMIT));
    format!("{name}_{random:08x}")
}

fn make(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(|error| cannot_make(folder, error))
}

fn cannot_make(path: &Path, error: io::Error) -> Error {
    Error::io(format!("cannot make {}", path.display()), error)
        .with_remedy("give --log-dir a folder on a disk that can be written")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selections_are_torchruns() {
        let every: Selection = "1".parse().unwrap();
        assert!(every.has(7, Stream::Stdout) && !every.has(7, Stream::Stderr));
        let each: Selection = "0:3,1:2".parse().unwrap();
        assert!(each.has(0, Stream::Stdout) && each.has(1, Stream::Stderr));
        assert!(!each.has(1, Stream::Stdout) && !each.has(2, Stream::Stderr));
        assert!(
            "0".parse::<Selection>().unwrap().is_empty() && "0:0".parse::<Selection>().unwrap().is_empty()
        );
        for bad in ["", "4", "-1", "0:4", "x:1", "0:1,2", "0:1,", ":"] {
            assert!(bad.parse::<Selection>().is_err(), "{bad}");
        }
    }

    #[test]
    fn files_are_where_torchrun_puts_them() {
        let folder = tempfile::tempdir().unwrap();
        let logs = Logs::new(folder.path().join("new")).redirects("1".parse().unwrap());
        let logs = logs.tee("1:2".parse().unwrap()).open("a/b").unwrap();
        let worker = logs.worker(2, 1).unwrap();
        assert!(worker.stdout.log.is_some() && !worker.stdout.shown);
        assert!(worker.stderr.log.is_some() && worker.stderr.shown);
        worker.stdout.log.as_ref().unwrap().push(b"one\n");
        let path = logs.folder().join("attempt_2/1");
        assert_eq!(worker.error_file, path.join("error.json"));
        drop(worker);
        logs.finish(|| true);
        assert_eq!(fs::read(path.join("stdout.log")).unwrap(), b"one\n");
        assert!(
            path.parent()
                .unwrap()
                .parent()
                .unwrap()
                .file_name()
                .unwrap()
                .to_str()
                .unwrap()
                .starts_with("a_b_")
        );
    }

    #[test]
    fn a_long_name_of_a_job_makes_no_folder_that_cannot_be_made() {
        assert_eq!(folder_name("a/b", 0xabc), "a_b_00000abc");
        let name = folder_name(&"ä".repeat(300), 1);
        assert_eq!(name, format!("{}_00000001", "ä".repeat(100)));
    }

    #[test]
    fn workers_that_start_again_in_one_attempt_inherit_output_but_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let logs = Logs::new(folder.path()).tee("1".parse().unwrap()).open("x").unwrap();
        for text in [&b"one\n"[..], b"two\n"] {
            let worker = logs.worker(0, 0).unwrap();
            assert!(!worker.error_file.exists());
            fs::write(&worker.error_file, r#"{"message": "of this life"}"#).unwrap();
            worker.stdout.log.as_ref().unwrap().push(text);
        }
        let path = logs.folder().join("attempt_0/0/stdout.log");
        logs.finish(|| true);
        assert_eq!(fs::read(path).unwrap(), b"one\ntwo\n");
    }

    #[test]
    fn what_follows_a_rotation_is_in_a_new_file() {
        let folder = tempfile::tempdir().unwrap();
        let [path, rotated] = ["stdout.log", "stdout.log.1"].map(|name| folder.path().join(name));
        let (log, now) = (LogFile::open(&path).unwrap(), Instant::now());
        log.write(b"one\n", now).unwrap();
        fs::rename(&path, &rotated).unwrap();
        log.write(b"two\n", now + ROTATION_INTERVAL).unwrap();
        log.write(b"three\n", now + 2 * ROTATION_INTERVAL).unwrap();
        assert_eq!(fs::read(&rotated).unwrap(), b"one\n");
        assert_eq!(fs::read(&path).unwrap(), b"two\nthree\n");
        // Another one has been made in its place.
        fs::remove_file(&path).unwrap();
        fs::write(&path, "four\n").unwrap();
        log.write(b"five\n", now + 3 * ROTATION_INTERVAL).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"four\nfive\n");
        // One that was made shorter is the same file.
        fs::write(&path, "").unwrap();
        log.write(b"six\n", now + 4 * ROTATION_INTERVAL).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"six\n");
        // Where no file can be made, nothing is lost of what its reader has open, and a person hears of it.
        let open = File::open(&path).unwrap();
        fs::remove_dir_all(folder.path()).unwrap();
        let error = log.write(b"seven\n", now + 5 * ROTATION_INTERVAL).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert_eq!(io::read_to_string(open).unwrap(), "six\nseven\n");
    }

    #[test]
    fn what_a_file_server_has_forgotten_is_made_anew() {
        let stale = || Err(rustix::io::Errno::STALE.into());
        let missing = || Err(ErrorKind::NotFound.into());
        assert!(is_other(stale(), Ok((1, 2))) && is_other(stale(), missing()) && is_other(stale(), stale()));
        assert!(is_other(Ok((1, 2)), Ok((1, 3))) && is_other(Ok((1, 2)), missing()));
        // The folder cannot be looked at for a moment.
        assert!(!is_other(Ok((1, 2)), Ok((1, 2))) && !is_other(Ok((1, 2)), stale()));
    }

    #[test]
    fn a_pipe_in_the_place_of_a_log_holds_nobody_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("stdout.log");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RWXU).unwrap();
        let (tell, told) = channel();
        std::thread::spawn(move || tell.send(LogFile::open(&path).is_err()));
        assert!(told.recv_timeout(Duration::from_secs(60)).unwrap());
    }

    #[test]
    fn a_full_disk_is_reported_once() {
        let folder = tempfile::tempdir().unwrap();
        let logs = Logs::new(folder.path()).open("x").unwrap();
        let full = logs.writer.open(Path::new("/dev/full")).unwrap();
        full.push(b"lost");
        full.push(b"lost");
        while logs.writer.state.lock().waiting > 0 {
            std::thread::yield_now();
        }
        assert!(logs.take_failure().unwrap().contains("incomplete"));
        assert!(logs.take_failure().is_none());
        drop(full);
        assert_eq!(logs.finish(|| true), None);
        // Also if nobody looks any more.
        let logs = Logs::new(folder.path()).open("x").unwrap();
        logs.writer.open(Path::new("/dev/full")).unwrap().push(b"lost");
        assert!(logs.finish(|| true).unwrap().contains("incomplete"));
    }

    #[test]
    fn a_disk_for_which_workers_wait_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let logs = Logs::new(folder.path()).open("x").unwrap();
        let log = logs.writer.open(&folder.path().join("stdout.log")).unwrap();
        // As long as this is held, the thread cannot write.
        let file = Arc::clone(&log.file);
        let held = file.open.lock();
        log.push(&b"x".repeat(ENOUGH));
        assert!(!logs.is_ready() && logs.take_failure().is_none());
        let full_since = logs.writer.state.lock().full_since;
        logs.writer.state.lock().full_since = full_since.and_then(|since| since.checked_sub(STALL_LIMIT));
        assert!(logs.take_failure().unwrap().contains("workers that write wait"));
        assert!(logs.take_failure().is_none());
        drop(held);
        drop(log);
        assert_eq!(logs.finish(|| true), None);
    }

    #[test]
    fn a_disk_that_fills_up_again_is_reported_again() {
        let folder = tempfile::tempdir().unwrap();
        let logs = Logs::new(folder.path()).open("x").unwrap();
        let path = folder.path().join("stdout.log");
        let [full, roomy] =
            [Path::new("/dev/full"), path.as_path()].map(|path| logs.writer.open(path).unwrap());
        let write = |log: &Log| {
            log.push(b"a line");
            while logs.writer.state.lock().waiting > 0 {
                std::thread::yield_now();
            }
        };
        write(&full);
        assert!(logs.take_failure().is_some());
        write(&roomy);
        write(&full);
        // A person has just heard of the first time, and hears of this one later, or at the end.
        assert!(logs.take_failure().is_none());
        drop((full, roomy));
        assert!(logs.finish(|| true).unwrap().contains("incomplete"));
    }

    #[test]
    fn a_disk_that_takes_nothing_holds_nobody_up_who_wants_the_end_and_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let logs = Logs::new(folder.path()).open("x").unwrap();
        let log = logs.writer.open(&folder.path().join("stdout.log")).unwrap();
        // As long as this is held, the thread cannot write.
        let file = Arc::clone(&log.file);
        let held = file.open.lock();
        log.push(b"seven\n");
        drop(log);
        let mut asked = 0;
        let said = logs.finish(|| {
            asked += 1;
            false
        });
        drop(held);
        assert_eq!(asked, 1);
        assert!(said.unwrap().contains("has not yet taken the last 6 bytes"));
    }
}
