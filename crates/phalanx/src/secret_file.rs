//! Files that hold what only this user may know.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

/// Why a file is not taken.
pub(crate) enum Unfit {
    /// It cannot be read.
    Unreadable(io::Error),
    /// It is something else than a file of this user's alone: why, and what to do about it, if that is always the same.
    Unsafe { why: String, remedy: Option<String> },
}

impl From<io::Error> for Unfit {
    fn from(error: io::Error) -> Self {
        Self::Unreadable(error)
    }
}

/// Reads a regular file that belongs to this user and that nobody else may use; of a longer one `longest` bytes and one
/// more.
pub(crate) fn read(path: &Path, longest: usize) -> Result<Vec<u8>, Unfit> {
    // A pipe that nobody writes to would be waited for.
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
