//! The file in which a worker leaves its error, in torchrun's format.
//!
//! Unless logs are kept, it is memory of the launcher, lent through `/proc`: nothing is left on a disk, however the job
//! ends.

use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::{Value, json};

use crate::rank::Rank;

/// The longest message that is taken from a worker.
const MAX: u64 = 64 * 1024;

/// What a worker says about its failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WorkerError {
    pub(super) message: String,
    /// The rank whose failure it was, in the worker's eyes.
    pub(super) peer: Option<u32>,
}

/// Leaves `message` in the error file of this process, if its launcher gave it one (`TORCHELASTIC_ERROR_FILE`).
///
/// The launcher shows it as the cause of the failure. A file that is given but cannot be written is not an error: the
/// worker has a worse one to report.
pub fn write(message: &str) {
    write_blaming(message, None);
}

/// [`write()`], and says that `peer` failed before: if it did, the launcher shows that as the cause.
pub(crate) fn write_blaming(message: &str, peer: Option<Rank>) {
    if let Some(path) = std::env::var_os("TORCHELASTIC_ERROR_FILE").filter(|path| !path.is_empty()) {
        let _ = write_to(Path::new(&path), message, peer);
    }
}

fn write_to(path: &Path, message: &str, peer: Option<Rank>) -> io::Result<()> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let peer = peer.map(Rank::get);
    let extra = json!({ "py_callstack": "", "timestamp": seconds.to_string(), "peer": peer });
    fs::write(path, json!({ "message": { "message": message, "extraInfo": extra } }).to_string())
}

/// The launcher's end of a worker's error file.
#[derive(Debug)]
pub(super) enum ErrorFile {
    /// Memory of this process, so that nothing is left on a disk.
    Memory(File),
    /// Among the worker's logs, where it stays.
    Kept(PathBuf),
}

impl ErrorFile {
    /// An empty file; none where the system has no such thing.
    pub(super) fn create() -> Option<Self> {
        Some(Self::Memory(memfd_create("phalanx-error", MemfdFlags::CLOEXEC).ok()?.into()))
    }

    /// Where the worker finds it.
    pub(super) fn path(&self) -> PathBuf {
        match self {
            Self::Memory(file) => format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into(),
            Self::Kept(path) => path.clone(),
        }
    }

    /// What the worker has left.
    pub(super) fn read(&mut self) -> Option<WorkerError> {
        let opened;
        let mut file = match self {
            Self::Memory(file) => &*file,
            Self::Kept(path) => {
                opened = File::open(path).ok()?;
                &opened
            }
        };
        let mut bytes = Vec::new();
        file.rewind().ok()?;
        file.take(MAX).read_to_end(&mut bytes).ok()?;
        parse(&bytes)
    }
}

/// `{"message": {"message": ..}}`, or shorter: `{"message": ..}`.
fn parse(bytes: &[u8]) -> Option<WorkerError> {
    let value: Value = serde_json::from_slice(bytes).ok()?;
    let outer = value.get("message")?;
    let message = outer.as_str().or_else(|| outer.get("message")?.as_str())?.trim();
    let peer = outer.pointer("/extraInfo/peer").and_then(Value::as_u64).and_then(|peer| peer.try_into().ok());
    (!message.is_empty()).then(|| WorkerError { message: message.to_owned(), peer })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(message: &str, peer: Option<u32>) -> WorkerError {
        WorkerError { message: message.to_owned(), peer }
    }

    #[test]
    fn a_message_comes_through() {
        let mut file = ErrorFile::create().unwrap();
        assert_eq!(file.read(), None);
        write_to(&file.path(), "loss is \"NaN\"\nat step 3", Some(Rank::new(7))).unwrap();
        assert_eq!(file.read().unwrap(), error("loss is \"NaN\"\nat step 3", Some(7)));
        write_to(&file.path(), "short", None).unwrap();
        assert_eq!(file.read().unwrap(), error("short", None));
    }

    #[test]
    fn other_writers_are_understood_and_nonsense_is_not() {
        assert_eq!(parse(br#"{"message": "plain"}"#).unwrap(), error("plain", None));
        for nonsense in
            [&b""[..], b"{", b"[]", br#"{"message": 3}"#, br#"{"message": {"message": " "}}"#, b"\xff"]
        {
            assert_eq!(parse(nonsense), None);
        }
    }
}
