//! `run.json`: which process writes the record, and how each attempt has ended.
//!
//! The writing process holds a lock on `run.lock`, which the system releases when the process ends, however it ends. So an
//! attempt that is `running` without a lock has died.
//!
//! So `run.json` needs no sign of life. Rank 0 of the next start goes on in the same files, once it has the lock.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use phalanx::{Error, Result, warn};
use phalanx_sys::signal::ignore_file_size_signal;
use phalanx_sys::{folder, open};
use serde::{Deserialize, Serialize};

use crate::named::Named;
use crate::{Outcome, SinkReport, now};

const FILE: &str = "run.json";
const LOCK: &str = "run.lock";
/// The version of the file's format.
const VERSION: u32 = 1;
/// Longer files are not ours.
const MAX_BYTES: u64 = 4 << 20;
/// So much of a cause is kept, in bytes: with each of them escaped it fits into the file.
const MAX_CAUSE: usize = 64 << 10;
/// Older attempts are forgotten.
const MAX_ATTEMPTS: usize = 1000;
/// How long a writer that is just ending is waited for.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
const RETRY_DELAY: Duration = Duration::from_millis(20);
/// The cause of an attempt that nobody has ended.
const DIED: &str = "the process ended without finishing the record: it was killed, or the machine went down";

/// A run's attempts, of which each is a start of its program.
///
/// ```no_run
/// use phalanx_tracking::{RunState, RunStatus};
/// if let Some(status) = RunStatus::read("runs/digits")?
///     && status.state() == RunState::Failed
/// {
///     println!("{}", status.cause().unwrap_or("no cause is known"));
/// }
/// # Ok::<(), phalanx::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunStatus {
    version: u32,
    attempts: Vec<Attempt>,
}

/// How a run, or one attempt at it, stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunState {
    /// A process writes the record.
    Running,
    /// [`Run::finish`](crate::Run::finish) was called.
    Finished,
    /// It panicked, its group failed, it called [`Run::fail`](crate::Run::fail), or its process died.
    Failed,
    /// It was dropped without either call.
    Dropped,
}

/// One start of the program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Attempt {
    /// How it has ended.
    pub state: RunState,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// The process of rank 0.
    pub pid: u32,
    /// The host of rank 0.
    pub host: String,
    /// Tells that host from others of the same name; empty in records of earlier versions.
    #[serde(default)]
    pub host_id: String,
    /// The number of ranks.
    pub world_size: u32,
    /// How often the launcher had started the workers again.
    pub restart_count: u64,
    /// When it began, in seconds since 1970.
    pub started: f64,
    /// When it ended, in seconds since 1970; of a process that died, when that was noticed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<f64>,
    /// The step from which it superseded what earlier attempts had recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed_at: Option<u64>,
    /// The highest step that it recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_step: Option<u64>,
    /// Records that found no room between the training and the writer.
    #[serde(default)]
    pub dropped: u64,
    /// What each sink could not write.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sinks: Vec<SinkReport>,
}

impl RunStatus {
    /// That of the record in `directory`; `None` if there is none. A run whose process has died counts as failed. On a file system without
    /// locks nobody can tell, and it counts as running.
    ///
    /// # Errors
    /// If the file cannot be read, or is not a run's.
    pub fn read(directory: impl AsRef<Path>) -> Result<Option<Self>> {
        let directory = directory.as_ref();
        let Some(mut status) = load(directory)? else { return Ok(None) };
        if status.state() == RunState::Running && is_locked(directory) == Some(false) {
            // It may have ended between the two looks.
            status = load(directory)?.unwrap_or(status);
            status.bury();
        }
        Ok(Some(status))
    }

    /// All attempts, the last one last.
    pub fn attempts(&self) -> &[Attempt] {
        &self.attempts
    }

    /// That of the last attempt.
    pub fn state(&self) -> RunState {
        self.attempts.last().map_or(RunState::Dropped, |attempt| attempt.state)
    }

    /// Why the last attempt failed.
    pub fn cause(&self) -> Option<&str> {
        self.attempts.last()?.cause.as_deref()
    }

    /// Nobody writes any more: attempts that nobody has ended have failed.
    fn bury(&mut self) {
        for attempt in self.attempts.iter_mut().filter(|attempt| attempt.state == RunState::Running) {
            (attempt.state, attempt.cause, attempt.ended) =
                (RunState::Failed, Some(DIED.to_owned()), Some(now()));
        }
    }
}

/// The record in a directory, held by this process.
pub(crate) struct StateFile {
    directory: PathBuf,
    status: RunStatus,
    /// Held until it is dropped.
    _lock: File,
    /// The lock's.
    named: Named,
}

impl StateFile {
    /// Takes the record in `directory`, which is made if it is not there.
    pub fn take(directory: &Path) -> Result<Self> {
        let cannot = |error| failure(directory, "cannot be opened", error);
        // Then a file that becomes too large is an error of its sink, and not the end of the process. A group that was joined has done
        // this, and that of a process alone has not.
        let _ = ignore_file_size_signal();
        std::fs::create_dir_all(directory).map_err(cannot)?;
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).read(true).write(true);
        let path = directory.join(LOCK);
        let lock = open::regular(&path, &mut options).map_err(cannot)?;
        let named = Named::of(&path, &lock);
        let (began, timeout, mut told) = (Instant::now(), lock_timeout(directory), false);
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                // The state's pid is all that there is.
                Err(TryLockError::Error(error)) if folder::has_no_locks(&error) => {
                    warn(format_args!(
                        "a second run could write the record {} at the same time: its file system has no locks: {error}",
                        directory.display()
                    ));
                    break;
                }
                Err(TryLockError::Error(error)) => return Err(cannot(error)),
                Err(TryLockError::WouldBlock) if began.elapsed() < timeout => {
                    let is_long = timeout > LOCK_TIMEOUT && began.elapsed() >= LOCK_TIMEOUT;
                    if is_long && !std::mem::replace(&mut told, true) {
                        let (directory, who, seconds) =
                            (directory.display(), writer_of(directory), timeout.as_secs());
                        warn(format_args!(
                            "{who} holds the record {directory}: if that host was lost, the file system releases it within {seconds} s, for which \
                             this waits"
                        ));
                    }
                    std::thread::sleep(RETRY_DELAY);
                }
                Err(TryLockError::WouldBlock) => return Err(taken(directory)),
            }
        }
        // It may have been waited for.
        named.check().map_err(cannot)?;
        let mut status = load(directory)?.unwrap_or(RunStatus { version: VERSION, attempts: Vec::new() });
        status.bury();
        Ok(Self { directory: directory.to_owned(), status, _lock: lock, named })
    }

    /// How the attempt before this one has ended, if there was one.
    pub fn earlier(&self) -> Option<RunState> {
        self.status.attempts.last().map(|attempt| attempt.state)
    }

    /// A new attempt begins.
    pub fn begin(&mut self, world_size: u32, restart_count: u64) -> Result<()> {
        let excess = (self.status.attempts.len() + 1).saturating_sub(MAX_ATTEMPTS);
        self.status.attempts.drain(..excess);
        self.status.attempts.push(Attempt {
            state: RunState::Running,
            cause: None,
            pid: std::process::id(),
            host: phalanx::host_name(),
            host_id: phalanx::host_id(),
            world_size,
            restart_count,
            started: now(),
            ended: None,
            resumed_at: None,
            last_step: None,
            dropped: 0,
            sinks: Vec::new(),
        });
        self.write().map_err(|error| failure(&self.directory, "cannot be written", error))
    }

    /// The attempt that this process has begun.
    pub fn attempt(&mut self) -> Option<&mut Attempt> {
        self.status.attempts.last_mut()
    }

    /// The attempt is over.
    pub fn end(&mut self, outcome: &Outcome) -> Result<()> {
        if let Some(attempt) = self.attempt() {
            (attempt.state, attempt.cause) = match outcome {
                Outcome::Finished => (RunState::Finished, None),
                Outcome::Failed(cause) => {
                    (RunState::Failed, Some(cause[..cause.floor_char_boundary(MAX_CAUSE)].to_owned()))
                }
                Outcome::Dropped => (RunState::Dropped, None),
            };
            attempt.ended = Some(now());
        }
        self.write().map_err(|error| failure(&self.directory, "cannot be written", error))
    }

    fn write(&mut self) -> io::Result<()> {
        self.named.check()?;
        let text = loop {
            let text = serde_json::to_vec_pretty(&self.status).map_err(io::Error::other)?;
            let older = self.status.attempts.len() / 2;
            if text.len() as u64 <= MAX_BYTES || older == 0 {
                break text;
            }
            // The next start could not read it.
            self.status.attempts.drain(..older);
        };
        let [path, half_done] = [FILE, "run.json.tmp"].map(|name| self.directory.join(name));
        let mut options = OpenOptions::new();
        let mut file = open::regular(&half_done, options.write(true).create(true).truncate(true))?;
        file.write_all(&text)?;
        file.sync_all()?;
        std::fs::rename(&half_done, &path)?;
        folder::sync(&self.directory)
    }
}

fn load(directory: &Path) -> Result<Option<RunStatus>> {
    let cannot = |error| failure(directory, "cannot be read", error);
    let file = match open::regular(&directory.join(FILE), File::options().read(true)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(cannot(error)),
    };
    let mut text = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut text).map_err(cannot)?;
    let status: RunStatus = serde_json::from_slice(&text).map_err(|error| {
        failure(directory, "is not a run's", error.into())
            .with_remedy(format!("move {FILE} away, or take another directory"))
    })?;
    if status.version != VERSION {
        return Err(Error::aborted(format!(
            "{} has version {}, and this program reads version {VERSION}",
            directory.join(FILE).display(),
            status.version
        ))
        .with_remedy("take another directory"));
    }
    Ok(Some(status))
}

/// Whether a process holds the lock; None if that cannot be found out.
fn is_locked(directory: &Path) -> Option<bool> {
    match open::regular(&directory.join(LOCK), File::options().read(true)) {
        Ok(file) => is_held(file.try_lock_shared()),
        Err(error) => (error.kind() == io::ErrorKind::NotFound).then_some(false),
    }
}

fn is_held(tried: Result<(), TryLockError>) -> Option<bool> {
    match tried {
        Ok(()) => Some(false),
        Err(TryLockError::WouldBlock) => Some(true),
        Err(TryLockError::Error(_)) => None,
    }
}

/// The last attempt at the run in `directory`, as far as it can be read.
fn last_attempt(directory: &Path) -> Option<Attempt> {
    load(directory).ok().flatten()?.attempts.pop()
}

/// Whether the last attempt was on another host. It may have the name of this one, as pods that take each other's place do.
fn is_elsewhere(directory: &Path) -> bool {
    last_attempt(directory).is_some_and(|attempt| attempt.host_id != phalanx::host_id())
}

/// How long the process is waited for that writes the record.
fn lock_timeout(directory: &Path) -> Duration {
    folder::lock_timeout(directory, is_elsewhere(directory), LOCK_TIMEOUT)
}

/// The process that writes the record.
fn writer_of(directory: &Path) -> String {
    last_attempt(directory).map_or("another process".to_owned(), |attempt| {
        format!("process {} on {}", attempt.pid, attempt.host)
    })
}

fn taken(directory: &Path) -> Error {
    let who = writer_of(directory);
    Error::aborted(format!("the record {} is being written by {who}", directory.display()))
        .with_remedy("end that one, or take another directory; is it a rank of this job? Start the run on all ranks with one group")
}

fn failure(directory: &Path, what: &str, error: io::Error) -> Error {
    Error::aborted(format!("the record {} {what}", directory.join(FILE).display()))
        .with_source(error)
        .with_remedy("may this process write files in that directory, and has its disk room? Else take another directory")
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn one_process_at_a_time_has_a_record() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(RunStatus::read(folder.path()).unwrap(), None);
        let mut state = StateFile::take(folder.path()).unwrap();
        state.begin(2, 0).unwrap();
        assert_eq!(RunStatus::read(folder.path()).unwrap().unwrap().state(), RunState::Running);
        assert!(taken(folder.path()).to_string().contains(&std::process::id().to_string()));
        // Dropped without an end, as a process that is killed does.
        drop(state);
        let status = RunStatus::read(folder.path()).unwrap().unwrap();
        assert_eq!((status.state(), status.cause()), (RunState::Failed, Some(DIED)));
        let mut state = StateFile::take(folder.path()).unwrap();
        assert_eq!(state.earlier(), Some(RunState::Failed));
        state.begin(2, 1).unwrap();
        state.end(&Outcome::Finished).unwrap();
        let status = RunStatus::read(folder.path()).unwrap().unwrap();
        let states: Vec<_> = status.attempts().iter().map(|attempt| attempt.state).collect();
        assert_eq!(states, [RunState::Failed, RunState::Finished]);
    }

    #[test]
    fn a_run_whose_directory_was_removed_and_made_again_leaves_the_new_run_s_status() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("run");
        let mut first = StateFile::take(&folder).unwrap();
        first.begin(1, 0).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        let mut second = StateFile::take(&folder).unwrap();
        second.begin(2, 0).unwrap();
        let error = first.end(&Outcome::Finished).unwrap_err().to_string();
        assert!(error.contains("run.lock was removed while this run was open"), "{error}");
        let status = || RunStatus::read(&folder).unwrap().unwrap();
        assert_eq!((status().state(), status().attempts()[0].world_size), (RunState::Running, 2));
        second.end(&Outcome::Finished).unwrap();
        assert_eq!((status().state(), status().attempts().len()), (RunState::Finished, 1));
    }

    #[test]
    fn another_host_may_have_the_name_of_this_one() {
        let folder = tempfile::tempdir().unwrap();
        let mut state = StateFile::take(folder.path()).unwrap();
        assert!(!is_elsewhere(folder.path()), "there is no attempt");
        state.begin(1, 0).unwrap();
        assert!(!is_elsewhere(folder.path()));
        for of_another in [r#""host_id": "other""#, r#""unknown": """#] {
            let own = format!(r#""host_id": "{}""#, phalanx::host_id());
            let text = std::fs::read_to_string(folder.path().join(FILE)).unwrap();
            assert!(text.contains(&own), "{text}");
            std::fs::write(folder.path().join(FILE), text.replace(&own, of_another)).unwrap();
            assert!(is_elsewhere(folder.path()), "{of_another}");
            state.write().unwrap();
        }
    }

    #[test]
    fn a_run_is_not_dead_where_a_file_system_has_no_locks() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(folder.path().join(LOCK)).unwrap();
        assert_eq!(
            (is_locked(folder.path()), is_held(Err(TryLockError::WouldBlock))),
            (Some(false), Some(true))
        );
        file.lock().unwrap();
        assert_eq!(is_locked(folder.path()), Some(true));
        assert_eq!(is_held(Err(TryLockError::Error(io::ErrorKind::Unsupported.into()))), None);
        std::fs::remove_file(folder.path().join(LOCK)).unwrap();
        assert_eq!(is_locked(folder.path()), Some(false));
    }

    #[test]
    fn a_record_with_long_causes_can_be_gone_on_with() {
        let folder = tempfile::tempdir().unwrap();
        // Each byte is six in the file.
        let cause = "\u{1}".repeat(5 << 20);
        for attempt in 0..12 {
            let mut state = StateFile::take(folder.path()).unwrap();
            state.begin(1, attempt).unwrap();
            state.end(&Outcome::Failed(cause.clone())).unwrap();
        }
        let status = RunStatus::read(folder.path()).unwrap().unwrap();
        let last = status.attempts().last().unwrap();
        assert_eq!((last.restart_count, last.cause.as_deref()), (11, Some(&cause[..MAX_CAUSE])));
        assert!((2..12).contains(&status.attempts().len()));
    }

    #[test]
    fn a_pipe_in_the_place_of_a_file_is_refused_and_holds_nobody_up() {
        let (reader, writer) = io::pipe().unwrap();
        drop(writer);
        // Whoever opens it to read would wait for a writer.
        let pipe = format!("/proc/self/fd/{}", reader.as_raw_fd());
        for file in [FILE, LOCK] {
            let folder = tempfile::tempdir().unwrap();
            std::os::unix::fs::symlink(&pipe, folder.path().join(file)).unwrap();
            let (tell, told) = channel();
            let path = folder.path().to_owned();
            std::thread::spawn(move || {
                tell.send((StateFile::take(&path).err(), RunStatus::read(&path).err()))
            });
            let (taken, read) = told.recv_timeout(Duration::from_secs(60)).unwrap();
            for error in taken.iter().chain(&read) {
                let said = error.to_string();
                assert!(said.contains("it is not a regular file") && error.remedy().is_some(), "{said}");
            }
            assert!(taken.is_some() && read.is_some() == (file == FILE), "{taken:?} {read:?}");
        }
    }

    #[test]
    fn a_foreign_file_is_not_written_over() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(FILE), "{\"epochs\": 3}").unwrap();
        let error = StateFile::take(folder.path()).err().unwrap();
        assert!(
            error.to_string().contains("is not a run's") && error.to_string().contains("move run.json away")
        );
        std::fs::write(folder.path().join(FILE), "{\"version\": 2, \"attempts\": []}").unwrap();
        assert!(StateFile::take(folder.path()).err().unwrap().to_string().contains("has version 2"));
    }
}
