//! Files with secrets that only this user may read.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

/// Why a file is refused.
pub(crate) enum Unfit {
    /// It cannot be read.
    Unreadable(io::Error),
    /// It is not a file of this user only: why, and the remedy, if there is a general one.
    Unsafe { why: String, remedy: Option<String> },
}

impl From<io::Error> for Unfit {
    fn from(error: io::Error) -> Self {
        Self::Unreadable(error)
    }
}

/// Reads a regular file that belongs to this user and that no other user may access. Of a longer file it reads
/// `longest` bytes and one more.
pub(crate) fn read(path: &Path, longest: usize) -> Result<Vec<u8>, Unfit> {
    // Without NONBLOCK, opening a pipe without a writer would wait.
    let flags = (OFlags::NONBLOCK | OFlags::CLOEXEC).bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let about = file.metadata()?;
    let user = rustix::process::geteuid().as_raw();
    let (why, remedy) = if !about.is_file() {
        ("it is not a regular file".to_owned(), None)
    } else if about.uid() != user {
        let why = format!("it belongs to user {}, and this process to user {user}", about.uid());
        (why, Some("give each user a copy that only that user can read".to_owned()))
    } else if about.mode() & 0o077 != 0 {
        let why = format!("others may use it (mode {:o})", about.mode() & 0o777);
        (why, Some(format!("chmod 600 {}, and make a new key if others may have read it", path.display())))
    } else {
        let mut bytes = Vec::new();
        file.take(longest as u64 + 1).read_to_end(&mut bytes)?;
        return Ok(bytes);
    };
    Err(Unfit::Unsafe { why, remedy })
}
