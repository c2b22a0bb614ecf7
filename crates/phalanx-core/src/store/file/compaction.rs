//! Compaction: a log that is much longer than what it says goes on in a new file.
//!
//! Each change makes a log longer, also one that only replaces a value. The launchers of a job replace a heartbeat each second, for weeks.
//! The whole store is compacted, and no key is treated apart: a file for each heartbeat would need an operation of its own in every
//! store, and counters and keys that come and go would still fill the log.
//!
//! One process does it, under the file's lock:
//!
//! ```text
//! 1  it writes what the log says into the store's next file, beside the log, and syncs that
//! 2  it appends a mark to the log, and syncs that
//! 3  it renames the next file, so that it takes the log's place
//! ```
//!
//! The mark ends the log. No process writes behind it, and whoever reads it opens the path anew. So all leave the old file at the same
//! place, however long they have slept. The mark must come before the new file takes its place: for some seconds a network file system may
//! show one host the old file and another the new one, and each would take changes.
//!
//! A process may die at any point:
//!
//! * Before step 2 nothing has changed for the others. The next one that compacts replaces the file that was left.
//! * Between steps 2 and 3 whoever reads the mark takes the lock, and does step 3.
//! * After step 3 all is done.
//!
//! A reader needs no lock. What the old file says is right until the path names the next one.
//!
//! The number of the store and the generation tell the next file from one that another job has put at the path. Each generation has a
//! higher number, so a process that has slept through several goes on in the newest. On NFS it may find that its file has been removed
//! (`ESTALE`): then it looks at the path too.

use std::fs::{File, OpenOptions, canonicalize, remove_file, rename};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::log::{ENTRY_HEAD, HEADER, Identity, Log, framed, push_entry};
use crate::notice::Aside;

/// A change of the next file has at least so many bytes, but for the last.
const PART: usize = 1 << 20;
/// How many files a process goes on to in one call. Each took the others long to fill.
const MAX_FOLLOWED: usize = 16;

impl Log {
    /// Reads all changes, also those in the files that follow this one.
    pub fn read_on(&mut self, path: &Path) -> io::Result<()> {
        for _ in 0..MAX_FOLLOWED {
            let stale = match self.catch_up() {
                Ok(()) if self.is_continued => None,
                Err(error) if is_stale(&error) => Some(error),
                outcome => return outcome,
            };
            match open_at(path)? {
                Some(next) if next.identity.follows(self.identity) => self.go_on_in(next),
                Some(same) if same.identity == self.identity && stale.is_none() => {
                    // Whoever has compacted the log has died, or is at it.
                    if !self.try_finish(path)? {
                        return Ok(());
                    }
                }
                _ => return Err(stale.unwrap_or_else(|| gone(path))),
            }
        }
        Ok(())
    }

    /// Takes the lock of the store's newest file, and reads all changes. `false` if that has to be tried again.
    pub fn try_lock_newest(&mut self, path: &Path) -> io::Result<bool> {
        let identity = self.identity;
        let is_locked = match self.try_lock() {
            Err(error) if is_stale(&error) => false,
            outcome => outcome?,
        };
        // Also without the lock: a process that holds that of an old file may be stopped.
        let read = self.read_on(path);
        if is_locked && read.is_ok() && self.identity == identity && !self.is_continued {
            return Ok(true);
        }
        if is_locked {
            self.unlock();
        }
        read.map(|()| false)
    }

    /// Moves the store into its next file, if this one is much longer than what it says. The caller holds the lock, and has read all changes.
    pub fn compact_if_long(&mut self, path: &Path) {
        if self.end < self.compact_at || self.end / 2 < self.snapshot_length() {
            return;
        }
        // However this try ends, the next one comes after as many changes again.
        self.compact_at = self.end + self.compacted_length;
        if let Err(error) = self.compact(path)
            && !std::mem::replace(&mut self.has_told, true)
        {
            // Whoever reads standard error slowly must not keep the lock for all.
            Aside::default().warn(format!(
                "the file {} grows, because no shorter one could be put in its place: {error}. It is tried again. A file of 4 GiB is full, and \
                 the job ends",
                path.display()
            ));
        }
    }

    fn compact(&mut self, path: &Path) -> io::Result<()> {
        // It may have been removed, or replaced by another job's.
        if !self.is_at(path)? {
            return Ok(());
        }
        let next = self.write_next(path)?;
        // Writing has taken its time.
        if !self.is_at(path)? {
            return remove_file(next);
        }
        self.write_mark()?;
        self.place_next(path)
    }

    /// Step 1. Returns the path of the next file.
    pub(super) fn write_next(&self, path: &Path) -> io::Result<PathBuf> {
        let Identity { store, generation } = self.identity;
        let following = generation.checked_add(1).ok_or_else(|| io::Error::other("no generation is left"))?;
        let next = self.next_path(&canonicalize(path)?)?;
        match remove_file(&next) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let log = Self::create(&next, Identity { store, generation: following })?;
        if let Err(error) = self.fill(&log.file) {
            let _ = remove_file(&next);
            return Err(error);
        }
        Ok(next)
    }

    /// Step 3, unless another process has done it. The caller holds the lock, and the log is marked.
    pub(super) fn place_next(&self, path: &Path) -> io::Result<()> {
        if !self.is_at(path)? {
            return Ok(());
        }
        // If the mark were lost, some processes would go on in the old file.
        self.file.sync_data()?;
        let path = canonicalize(path)?;
        let next = self.next_path(&path)?;
        rename(&next, &path).map_err(|error| {
            let why = format!("the store goes on in {}, which cannot be renamed: {error}", next.display());
            io::Error::new(error.kind(), why)
        })
    }

    /// Where the next file is until it takes its place.
    pub fn next_path(&self, path: &Path) -> io::Result<PathBuf> {
        let Identity { store, generation } = self.identity;
        let mut name = path.file_name().ok_or(ErrorKind::InvalidInput)?.to_os_string();
        name.push(format!(".{store:016x}-{generation}.new"));
        Ok(path.with_file_name(name))
    }

    /// Step 3 in place of the process that has written the mark. `false` if another process holds the lock.
    fn try_finish(&self, path: &Path) -> io::Result<bool> {
        if !self.try_lock()? {
            return Ok(false);
        }
        let outcome = self.place_next(path);
        self.unlock();
        outcome.map(|()| true)
    }

    fn go_on_in(&mut self, next: Self) {
        // A process that was forked from this one may have the file open for a while.
        self.unlock();
        let compacted_length = self.compacted_length;
        *self = Self { compacted_length, compact_at: compacted_length, ..next };
    }

    /// Whether the path names this file. Unlike a look at its metadata, opening it asks a network file system's server.
    pub(super) fn is_at(&self, path: &Path) -> io::Result<bool> {
        Ok(open_at(path)?.is_some_and(|named| named.identity == self.identity))
    }

    /// Makes `file`, a log without a change, a copy of this one.
    fn fill(&self, mut file: &File) -> io::Result<()> {
        let (own, new) = (self.file.metadata()?, file.metadata()?);
        if (own.uid(), own.gid()) != (new.uid(), new.gid()) {
            let why = "it is another user's or group's, and a file of this user may be closed to others";
            return Err(io::Error::new(ErrorKind::PermissionDenied, why));
        }
        if own.permissions() != new.permissions() {
            file.set_permissions(own.permissions())?;
        }
        let mut entries = Vec::new();
        for key in self.table.keys() {
            push_entry(&mut entries, key, self.table.get(key).as_deref());
            if entries.len() >= PART {
                file.write_all(&framed(&entries))?;
                entries.clear();
            }
        }
        file.write_all(&framed(&entries))?;
        file.sync_all()
    }

    /// About the bytes of the next file.
    fn snapshot_length(&self) -> u64 {
        HEADER + (self.table.bytes() + self.table.len() * ENTRY_HEAD) as u64
    }
}

impl Identity {
    fn follows(self, earlier: Self) -> bool {
        self.store == earlier.store && self.generation > earlier.generation
    }
}

/// The log at `path`, if there is one.
fn open_at(path: &Path) -> io::Result<Option<Log>> {
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(file) => Log::open(file),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether a network file system says that the file has been removed.
pub(super) fn is_stale(error: &io::Error) -> bool {
    error.kind() == ErrorKind::StaleNetworkFileHandle
}

fn gone(path: &Path) -> io::Error {
    let why = format!(
        "the store goes on in another file, and {} is not that: the process that made it has ended, or another job uses the path",
        path.display()
    );
    io::Error::new(ErrorKind::NotFound, why)
}

#[cfg(test)]
mod tests;
