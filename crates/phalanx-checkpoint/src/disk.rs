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
