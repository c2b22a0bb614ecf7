//! One process writes to a folder of checkpoints: it holds the lock on a file there.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::deadline::Deadline;
use crate::error::{Error, Result};

const NAME: &str = ".lock";
/// A process that has just been killed may hold it for another moment.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);

/// Holds the lock until it is dropped, or its process ends.
#[derive(Debug)]
pub(super) struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock of `folder`.
    pub fn take(folder: &Path) -> Result<Self> {
        let path = folder.join(NAME);
        let unusable = |error: io::Error| {
            Error::io(format!("cannot lock {}", path.display()), error).with_remedy("may rank 0 write there?")
        };
        let file = File::options().create(true).append(true).open(&path).map_err(unusable)?;
        let deadline = Deadline::after(PATIENCE);
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(Errno::WOULDBLOCK | Errno::INTR) if deadline.has_passed() => {
                    return Err(Error::environment(format!(
                        "another process writes checkpoints to {}",
                        folder.display()
                    ))
                    .with_remedy(
                        "give each job a folder of its own; or does an earlier run of this one still live?",
                    ));
                }
                Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(PAUSE),
                Err(error @ (Errno::NOSYS | Errno::OPNOTSUPP | Errno::NOLCK)) => {
                    tracing::warn!(path = %path.display(), %error, "this file system has no locks: nothing keeps a second job from writing here");
                    break;
                }
                Err(error) => return Err(unusable(error.into())),
            }
        }
        Ok(Self { _file: file })
    }
}
