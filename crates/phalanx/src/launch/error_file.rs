//! The file in which a worker leaves its error, in torchrun's format.
//!
//! It is memory of the launcher, lent through `/proc`: nothing is left on a disk, however the job ends.

use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::{Value, json};

/// The longest message that is taken from a worker.
const MAX: u64 = 64 * 1024;

/// Leaves `message` in the error file of this process, if its launcher gave it one (`TORCHELASTIC_ERROR_FILE`).
///
/// The launcher shows it as the cause of the failure. A file that is given but cannot be written is not an error: the
/// worker has a worse one to report.
pub fn write(message: &str) {
    if let Some(path) = std::env::var_os("TORCHELASTIC_ERROR_FILE").filter(|path| !path.is_empty()) {
        let _ = write_to(Path::new(&path), message);
    }
}

fn write_to(path: &Path, message: &str) -> io::Result<()> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let extra = json!({ "py_callstack": "", "timestamp": seconds.to_string() });
    fs::write(path, json!({ "message": { "message": message, "extraInfo": extra } }).to_string())
}

/// The launcher's end of a worker's error file.
#[derive(Debug)]
pub(super) struct ErrorFile(File);

impl ErrorFile {
    /// An empty file; none where the system has no such thing.
    pub(super) fn create() -> Option<Self> {
        Some(Self(memfd_create("phalanx-error", MemfdFlags::CLOEXEC).ok()?.into()))
    }

    /// Where the worker finds it.
    pub(super) fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()).into()
    }

    /// The message that the worker has left.
    pub(super) fn message(&mut self) -> Option<String> {
        let mut bytes = Vec::new();
        self.0.rewind().ok()?;
        Read::by_ref(&mut self.0).take(MAX).read_to_end(&mut bytes).ok()?;
        parse(&bytes)
    }
}

/// `{"message": {"message": ..}}`, or shorter: `{"message": ..}`.
fn parse(bytes: &[u8]) -> Option<String> {
    let value: Value = serde_json::from_slice(bytes).ok()?;
    let outer = value.get("message")?;
    let message = outer.as_str().or_else(|| outer.get("message")?.as_str())?.trim();
    (!message.is_empty()).then(|| message.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_comes_through() {
        let mut file = ErrorFile::create().unwrap();
        assert_eq!(file.message(), None);
        write_to(&file.path(), "loss is \"NaN\"\nat step 3").unwrap();
        assert_eq!(file.message().unwrap(), "loss is \"NaN\"\nat step 3");
        write_to(&file.path(), "short").unwrap();
        assert_eq!(file.message().unwrap(), "short");
    }

    #[test]
    fn other_writers_are_understood_and_nonsense_is_not() {
        assert_eq!(parse(br#"{"message": "plain"}"#).unwrap(), "plain");
        for nonsense in
            [&b""[..], b"{", b"[]", br#"{"message": 3}"#, br#"{"message": {"message": " "}}"#, b"\xff"]
        {
            assert_eq!(parse(nonsense), None);
        }
    }
}
