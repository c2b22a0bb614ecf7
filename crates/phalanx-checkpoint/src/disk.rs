//! The file-system operations that writing a checkpoint needs, one call each, so that tests can stop after any of them.
//!
//! Tests then drop everything that was not synced.

use std::fmt::Debug;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use phalanx_sys::folder;
use phalanx_sys::signal::ignore_file_size_signal;

/// A file system.
pub(super) trait Disk: Debug + Send + Sync + 'static {
    /// Makes a folder that must not exist yet.
    fn create_folder(&self, path: &Path) -> io::Result<()>;

    /// Makes a file that must not exist yet.
    fn create_file(&self, path: &Path) -> io::Result<File>;

    /// Appends `bytes` to a file that was made before.
    fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<()>;

    /// Returns when the contents of `file` survive a loss of power.
    fn sync_file(&self, file: &File) -> io::Result<()>;

    /// Returns when the names in a folder survive a loss of power.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;

    /// Renames `from` to `to`, atomically.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Removes a folder that is empty.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;
}

/// The system's file system.
#[derive(Debug)]
pub(super) struct SystemDisk;

impl Disk for SystemDisk {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<File> {
        // Then a file that becomes too large is an error with a remedy, and not the end of the process.
        let _ = ignore_file_size_signal();
        File::create_new(path)
    }

    fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<()> {
        file.write_all(bytes)
    }

    fn sync_file(&self, file: &File) -> io::Result<()> {
        file.sync_all()
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        folder::sync(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }
}

/// What to do before the first checkpoint: the disk may be full, or something else is wrong.
pub(super) fn room_or(error: &io::Error, otherwise: &'static str) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "make room on its disk",
        _ => otherwise,
    }
}

#[cfg(test)]
mod tests {
    use super::super::writer::unwritten;
    use super::*;
    use crate::rank::Rank;

    #[test]
    fn a_full_disk_and_a_file_system_that_does_not_rename_are_told_apart() {
        let remedy = |kind: io::ErrorKind| room_or(&kind.into(), "may rank 0 write there?");
        assert_eq!(remedy(io::ErrorKind::StorageFull), "make room on its disk");
        assert_eq!(remedy(io::ErrorKind::PermissionDenied), "may rank 0 write there?");
        for kind in [io::ErrorKind::Unsupported, io::ErrorKind::CrossesDevices] {
            let error = unwritten(7, Path::new("runs"), Rank::MAIN, kind.into());
            assert!(error.remedy().unwrap().contains("rename folders"), "{error}");
        }
    }
}
