//! What a worker leaves for its launcher if it fails: its error, in torchrun's format, and the rank whose failure
//! came first.
//!
//! A program may catch a panic, or the failure of another rank, and go on: it does when it calls something of a group that
//! stands. The earlier report is taken back then, so that a later failure is reported as its own.

use std::fs::{self, File};
use std::io::{self, Write};
use std::panic::{self, PanicHookInfo};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde_json::json;

use crate::error::panic_message;
use crate::notice::warn;
use crate::rank::Rank;

/// torchrun's variable: the file for the error with which this process ends.
pub const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";
/// The file for the rank whose failure this one was told of. It is separate from the error: a program may go on, and
/// fail later for another reason. Only `phalanx run` sets it, because torchrun takes what was written first for the
/// cause.
pub const BLAME_FILE: &str = "PHALANX_BLAME_FILE";

/// So much of a message is written: a launcher reads a file of bounded length, and of one that is cut off it understands nothing.
const LONGEST: usize = 64 * 1024;

/// What this process has left for its launcher.
static LEFT: Left = Left::nothing();

/// What may have to be taken back.
struct Left {
    /// Whether there is anything. Every call of a group reads it, without the lock.
    any: AtomicBool,
    notes: Mutex<Notes>,
}

#[derive(Default)]
struct Notes {
    /// A rank is blamed in this file.
    blame: Option<PathBuf>,
    /// A panic of the main thread with this message is in this file.
    panic: Option<(PathBuf, String)>,
    /// With this error the process has left a group whose ranks have made different calls.
    disagreement: Option<String>,
}

impl Left {
    const fn nothing() -> Self {
        Self {
            any: AtomicBool::new(false),
            notes: Mutex::new(Notes { blame: None, panic: None, disagreement: None }),
        }
    }

    fn blame(&self, path: PathBuf, rank: Rank) {
        let mut notes = self.notes.lock();
        // Without it the launcher uses the order in which workers end.
        let _ = write_file(&path, rank.to_string().as_bytes());
        notes.blame = Some(path);
        self.any.store(true, Ordering::Relaxed);
    }

    fn panic(&self, path: PathBuf, place: &str, message: &str) {
        let mut notes = self.notes.lock();
        let written = write_to(&path, &format!("panicked{place}: {message}"), Ended::ByPanic);
        if written.is_ok() {
            notes.panic = Some((path, message.to_owned()));
            self.any.store(true, Ordering::Relaxed);
        }
        drop(notes);
        tell_of_pipe(written);
    }

    /// `caught`: a panic of the main thread has been.
    fn take_back(&self, caught: bool) {
        let mut notes = self.notes.lock();
        let panic = if caught { notes.panic.take() } else { None };
        for path in notes.blame.take().into_iter().chain(panic.map(|(path, _)| path)) {
            let Ok(about) = fs::metadata(&path) else { continue };
            // torchrun takes any file for an error's. A file that only a launcher holds open cannot be removed. A device stays.
            if about.is_file() && fs::remove_file(&path).is_err() {
                let _ = write_file(&path, b"");
            }
        }
        self.any.store(notes.panic.is_some(), Ordering::Relaxed);
    }
}

/// Writes `message` to the error file of this process, if its launcher has set one (`TORCHELASTIC_ERROR_FILE`).
///
/// The launcher shows it as the cause of the failure. If the file cannot be written, this is ignored: the
/// worker has a worse error to report. A pipe in the place of the file is refused with a warning: to open it could wait for ever.
pub fn write(message: &str) {
    if let Some(path) = path(ERROR_FILE) {
        let mut notes = LEFT.notes.lock();
        let written = write_to(&path, message, Ended::ByError);
        // It is not a panic's any more.
        notes.panic = None;
        drop(notes);
        tell_of_pipe(written);
    }
}

/// This process has left a group whose ranks have made different calls, and no call was left that could return the error `message`.
/// The launcher takes exit code 0 for a failure then.
pub(crate) fn disagreed(message: &str) {
    let mut notes = LEFT.notes.lock();
    if notes.disagreement.is_some() {
        return;
    }
    notes.disagreement = Some(message.to_owned());
    if let Some(path) = path(ERROR_FILE)
        // What the program has written says more.
        && (notes.panic.is_some() || fs::metadata(&path).map_or(true, |file| file.len() == 0))
    {
        notes.panic = None;
        let written = write_to(&path, message, Ended::InDisagreement);
        drop(notes);
        tell_of_pipe(written);
    }
}

/// The error of `disagreed`.
pub fn disagreement() -> Option<String> {
    LEFT.notes.lock().disagreement.clone()
}

/// Notes that `rank`, counted in the first group, failed before this one did. If both fail, that is the job's first failure, unless
/// this one [goes on](goes_on) meanwhile.
pub(crate) fn blame(rank: Rank) {
    if let Some(path) = path(BLAME_FILE) {
        LEFT.blame(path, rank);
    }
}

/// The program calls something of a group that stands: what has failed before, here or elsewhere, has not ended it.
pub(crate) fn goes_on() {
    if LEFT.any.load(Ordering::Relaxed) {
        LEFT.take_back(is_main() && !thread::panicking());
    }
}

/// From now on a panic of the main thread writes its message and source line to the error file, in addition to the
/// program's own panic hook. A panic of another thread need not end the process.
pub fn report_panics() {
    static ONCE: Once = Once::new();
    if path(ERROR_FILE).is_none() {
        return;
    }
    ONCE.call_once(|| {
        let earlier = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            earlier(info);
            if is_main() {
                write_panic(info);
            }
        }));
    });
}

/// Whether a panic with this message has been left in the error file.
pub fn has_reported(message: &str) -> bool {
    LEFT.notes.lock().panic.as_ref().is_some_and(|(_, reported)| reported == message)
}

fn write_panic(info: &PanicHookInfo<'_>) {
    let message = panic_message(info.payload());
    let place = info.location().map_or_else(String::new, |location| format!(" at {location}"));
    if let Some(path) = path(ERROR_FILE) {
        LEFT.panic(path, &place, message);
    }
}

fn is_main() -> bool {
    thread::current().name() == Some("main")
}

fn path(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// What ends a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    ByError,
    /// It counts only if it has ended the process: a panic may be caught.
    ByPanic,
    /// It counts only if the process ends with exit code 0.
    InDisagreement,
}

pub fn write_to(path: &Path, message: &str, ended: Ended) -> io::Result<()> {
    let message = &message[..message.floor_char_boundary(LONGEST)];
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (panicked, disagreed) = (ended == Ended::ByPanic, ended == Ended::InDisagreement);
    let timestamp = seconds.to_string();
    let extra =
        json!({ "py_callstack": "", "timestamp": timestamp, "panicked": panicked, "disagreed": disagreed });
    let text = json!({ "message": { "message": message, "extraInfo": extra } }).to_string();
    write_file(path, text.as_bytes())
}

/// Writes a whole file, as [`fs::write`] does, and never waits for a reader: what is a pipe is an error.
fn write_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let opened =
        phalanx_sys::open::unless_pipe(path, File::options().write(true).create(true).truncate(true));
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    opened.map_err(named)?.write_all(bytes)
}

/// Tells the person who has named a pipe as the error file. Any other error is the disk's.
fn tell_of_pipe(written: io::Result<()>) {
    if let Err(error) = written
        && error.kind() == io::ErrorKind::InvalidInput
    {
        warn(format_args!("the error is not written for the launcher: {error}; set {ERROR_FILE} to a file"));
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    #[test]
    fn what_a_program_has_outlived_is_taken_back() {
        let folder = tempfile::tempdir().unwrap();
        let (blame, error) = (folder.path().join("blame"), folder.path().join("error.json"));
        let left = Left::nothing();
        let is_left = |path: &Path| fs::read(path).is_ok_and(|bytes| !bytes.is_empty());
        left.blame(blame.clone(), Rank::new(3));
        left.panic(error.clone(), " at a.rs:1:2", "no data");
        // Another thread goes on; the main one may be about to end.
        left.take_back(false);
        assert!(!is_left(&blame) && is_left(&error) && left.any.load(Ordering::Relaxed));
        left.take_back(true);
        assert!(!error.exists() && !left.any.load(Ordering::Relaxed));
        // The later blame counts.
        left.blame(blame.clone(), Rank::new(2));
        assert_eq!(fs::read_to_string(&blame).unwrap(), "2");
        // Memory of the launcher stays where it is, and is empty.
        let memory = memfd_create("phalanx-blame", MemfdFlags::CLOEXEC).unwrap();
        let path = PathBuf::from(format!("/proc/self/fd/{}", memory.as_raw_fd()));
        left.blame(path.clone(), Rank::new(1));
        assert!(is_left(&path));
        left.take_back(true);
        assert!(path.exists() && !is_left(&path));
    }

    #[test]
    fn what_is_no_file_stays_where_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let [blame, error] = ["blame", "error.json"].map(|name| folder.path().join(name));
        let left = Left::nothing();
        for path in [&blame, &error] {
            std::os::unix::fs::symlink("/dev/null", path).unwrap();
        }
        left.blame(blame.clone(), Rank::new(3));
        left.panic(error.clone(), " at a.rs:1:2", "no data");
        left.take_back(true);
        assert!([&blame, &error].into_iter().all(|path| path.is_symlink()));
        // What is gone already is not made again.
        let gone = folder.path().join("gone");
        left.blame(gone.clone(), Rank::new(3));
        fs::remove_file(&gone).unwrap();
        left.take_back(true);
        assert!(!gone.exists());
    }

    #[test]
    fn a_pipe_in_the_place_of_what_was_left_holds_nobody_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("blame");
        let left = Left::nothing();
        left.blame(path.clone(), Rank::new(3));
        fs::remove_file(&path).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RWXU).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        thread::spawn(move || {
            left.take_back(true);
            tell.send(())
        });
        told.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
        assert!(path.exists());
    }

    #[test]
    fn a_pipe_that_is_named_as_the_file_is_refused_and_holds_nobody_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("error.json");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RWXU).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let named = path.clone();
        thread::spawn(move || {
            let refused = || write_to(&named, "no data", Ended::ByError).unwrap_err();
            let without_reader = refused();
            // Whoever reads gets nothing either.
            let reader = phalanx_sys::open::at_once(&named, File::options().read(true), 0).unwrap();
            let with_reader = refused();
            drop(reader);
            let left = Left::nothing();
            left.blame(named.clone(), Rank::new(3));
            left.panic(named, " at a.rs:1:2", "no data");
            tell.send((without_reader, with_reader, left.notes.lock().panic.is_some()))
        });
        let (without_reader, with_reader, is_left) =
            told.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
        for error in [without_reader, with_reader] {
            assert!(error.to_string().contains("error.json: it is a pipe or a socket"), "{error}");
        }
        assert!(!is_left);
        // A device takes it.
        write_to(Path::new("/dev/null"), "no data", Ended::ByError).unwrap();
    }
}
