//! The launcher's side of the files in which a worker leaves its error, in torchrun's format, and the rank that it
//! blames.
//!
//! Unless logs are kept, the file is memory of the launcher, which the worker opens through `/proc`: nothing is left on
//! a disk, however the job ends.

use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use phalanx_sys::memfd::anonymous;
use serde_json::Value;

use super::disk::Disk;
use crate::worker_error::Ended;

/// So much of a message is taken from a worker.
const MAX: usize = 64 * 1024;
/// So much of a file is read: a message in which each byte is escaped, or what Python adds of its calls. Of a file that is cut off
/// nothing could be read.
const MAX_FILE: u64 = 1 << 20;

/// A program that still runs so long after a panic has caught the panic.
const PANIC_EXIT_LIMIT: Duration = Duration::from_secs(5);

/// What a worker says about its failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WorkerError {
    pub(super) message: String,
    /// What has ended it. A panic may have been caught.
    pub(super) ended: Ended,
}

/// The launcher's side of a worker's error file.
#[derive(Debug)]
pub(super) enum ErrorFile {
    /// Memory of this process, so that nothing is left on a disk.
    Memory(File),
    /// A file among the worker's logs, where it stays.
    Kept(PathBuf, Disk),
}

impl ErrorFile {
    /// An empty file; none if the system has no memory files.
    pub(super) fn create() -> Option<Self> {
        Some(Self::Memory(anonymous("phalanx-error").ok()?.into()))
    }

    /// Where the worker finds it.
    pub(super) fn path(&self) -> PathBuf {
        match self {
            Self::Memory(file) => format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into(),
            Self::Kept(path, _) => path.clone(),
        }
    }

    /// What the worker has left.
    pub(super) fn read(&mut self) -> Option<WorkerError> {
        parse(&self.bytes()?)
    }

    /// Whether it reports an error with which the worker is about to end. A panic of some time ago was caught, and a program that has
    /// left a group may go on for long.
    pub(super) fn announces_an_end(&mut self) -> bool {
        self.read().is_some_and(|error| {
            error.ended == Ended::ByError || self.age().is_none_or(|age| age < PANIC_EXIT_LIMIT)
        })
    }

    /// How long ago it was written, if that is known.
    fn age(&self) -> Option<Duration> {
        let modified = match self {
            Self::Memory(file) => file.metadata().and_then(|metadata| metadata.modified()),
            Self::Kept(path, disk) => {
                let path = path.clone();
                disk.answer(move || path.metadata().and_then(|metadata| metadata.modified()))?
            }
        };
        SystemTime::now().duration_since(modified.ok()?).ok()
    }

    /// The rank that the worker has blamed, if this is a file for that.
    pub(super) fn read_rank(&mut self) -> Option<u32> {
        str::from_utf8(&self.bytes()?).ok()?.trim().parse().ok()
    }

    fn bytes(&mut self) -> Option<Vec<u8>> {
        match self {
            Self::Memory(file) => read_all(file),
            Self::Kept(path, disk) => {
                let path = path.clone();
                disk.answer(move || read_all(&open_regular(&path)?))?
            }
        }
    }
}

fn read_all(mut file: &File) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    file.rewind().ok()?;
    file.take(MAX_FILE).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// A worker may have put a pipe in the place of its file. Whoever opens that waits, and here it would be the supervisor.
fn open_regular(path: &Path) -> Option<File> {
    phalanx_sys::open::regular(path, File::options().read(true)).ok()
}

/// `{"message": {"message": ..}}`, or shorter: `{"message": ..}`.
fn parse(bytes: &[u8]) -> Option<WorkerError> {
    let value: Value = serde_json::from_slice(bytes).ok()?;
    let outer = value.get("message")?;
    let message = outer.as_str().or_else(|| outer.get("message")?.as_str())?.trim();
    let message = message[..message.floor_char_boundary(MAX)].trim_end();
    let is = |what| outer.pointer(what).and_then(Value::as_bool).unwrap_or(false);
    let ended = match (is("/extraInfo/panicked"), is("/extraInfo/disagreed")) {
        (true, _) => Ended::ByPanic,
        (false, true) => Ended::InDisagreement,
        (false, false) => Ended::ByError,
    };
    (!message.is_empty()).then(|| WorkerError { message: message.to_owned(), ended })
}

/// For `phalanx::fuzzing`: what a worker has left.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> bool {
    let Some(WorkerError { message, .. }) = parse(bytes) else { return false };
    assert!(!message.is_empty() && message.len() <= bytes.len() && message.trim() == message);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::worker_error::write_to;

    fn error(message: &str, ended: Ended) -> WorkerError {
        WorkerError { message: message.to_owned(), ended }
    }

    #[test]
    fn a_message_comes_through() {
        let mut file = ErrorFile::create().unwrap();
        assert_eq!(file.read(), None);
        write_to(&file.path(), "panicked at a.rs:1:2: loss is \"NaN\"\nat step 3", Ended::ByPanic).unwrap();
        assert_eq!(
            file.read().unwrap(),
            error("panicked at a.rs:1:2: loss is \"NaN\"\nat step 3", Ended::ByPanic)
        );
        write_to(&file.path(), "short", Ended::ByError).unwrap();
        assert_eq!(file.read().unwrap(), error("short", Ended::ByError));
    }

    #[test]
    fn the_beginning_of_a_long_message_comes_through() {
        let mut file = ErrorFile::create().unwrap();
        // Each byte is six in the file.
        write_to(&file.path(), &"\u{1}".repeat(10 << 20), Ended::InDisagreement).unwrap();
        assert_eq!(file.read().unwrap(), error(&"\u{1}".repeat(MAX), Ended::InDisagreement));
        let calls = "a call\n".repeat(MAX);
        let python = serde_json::json!({ "message": { "message": "no data", "extraInfo": { "py_callstack": calls } } });
        std::fs::write(file.path(), python.to_string()).unwrap();
        assert_eq!(file.read().unwrap(), error("no data", Ended::ByError));
        let long = format!("{}é", "x".repeat(MAX - 1));
        std::fs::write(file.path(), serde_json::json!({ "message": long }).to_string()).unwrap();
        assert_eq!(file.read().unwrap(), error(&long[..MAX - 1], Ended::ByError));
    }

    #[test]
    fn a_panic_of_long_ago_announces_no_end_but_an_error_does() {
        let mut file = ErrorFile::create().unwrap();
        assert!(!file.announces_an_end());
        write_to(&file.path(), "panicked at a.rs:1:2", Ended::ByPanic).unwrap();
        assert!(file.announces_an_end());
        let age = |file: &ErrorFile| {
            let ErrorFile::Memory(file) = file else { return };
            file.set_modified(SystemTime::now() - 2 * PANIC_EXIT_LIMIT).unwrap();
        };
        age(&file);
        assert!(!file.announces_an_end());
        write_to(&file.path(), "no data", Ended::ByError).unwrap();
        age(&file);
        assert!(file.announces_an_end());
    }

    #[test]
    fn a_pipe_in_the_place_of_a_kept_file_holds_nobody_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("error.json");
        let mut kept = ErrorFile::Kept(path.clone(), Disk::default());
        write_to(&path, "no data", Ended::ByError).unwrap();
        assert_eq!(kept.read().unwrap(), error("no data", Ended::ByError));
        std::fs::remove_file(&path).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RWXU).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || tell.send(kept.read()));
        assert_eq!(told.recv_timeout(Duration::from_secs(60)).unwrap(), None);
    }

    #[test]
    fn a_rank_comes_through_and_the_last_one_counts() {
        let mut file = ErrorFile::create().unwrap();
        assert_eq!(file.read_rank(), None);
        for rank in ["17", "3"] {
            std::fs::write(file.path(), rank).unwrap();
            assert_eq!(file.read_rank(), rank.parse().ok());
        }
        std::fs::write(file.path(), "-1").unwrap();
        assert_eq!(file.read_rank(), None);
    }

    #[test]
    fn other_writers_are_understood_and_nonsense_is_not() {
        assert_eq!(parse(br#"{"message": "plain"}"#).unwrap(), error("plain", Ended::ByError));
        for nonsense in
            [&b""[..], b"{", b"[]", br#"{"message": 3}"#, br#"{"message": {"message": " "}}"#, b"\xff"]
        {
            assert_eq!(parse(nonsense), None);
        }
    }
}
