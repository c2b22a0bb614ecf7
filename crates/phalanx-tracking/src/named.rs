//! Whether a name still leads to the file that was opened by it. A directory may be removed while a run records there, and another run may make it
//! again.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The name of an open file.
pub(crate) struct Named {
    path: PathBuf,
    /// The file's device and inode; none where the file system says others of the name than of the open file.
    identity: Option<(u64, u64)>,
}

impl Named {
    /// Of `file`, which was opened at `path`. As long as it is open, no other file gets its identity.
    pub fn of(path: &Path, file: &File) -> Self {
        let own = file.metadata().ok().map(|about| identity(&about));
        let named = fs::metadata(path).ok().map(|about| identity(&about));
        Self { path: path.to_owned(), identity: own.filter(|_| own == named) }
    }

    /// An error if the name leads to another file now: what is written beside it would be among another run's files.
    pub fn check(&self) -> io::Result<()> {
        match (self.identity, fs::metadata(&self.path)) {
            (Some(own), Ok(now)) if identity(&now) != own => Err(io::Error::other(format!(
                "{} was removed while this run was open, and has been made again: it may be another run's",
                self.path.display()
            ))),
            (Some(_) | None, _) => Ok(()),
        }
    }
}

fn identity(about: &Metadata) -> (u64, u64) {
    (about.dev(), about.ino())
}
