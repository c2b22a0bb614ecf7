//! Environments: each file is opened once in a process, by whoever reads it first, and closed behind the last.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use heed::types::Bytes;
use heed::{CommitOrAbort, Database, Env, EnvFlags, EnvOpenOptions, MdbError, RoTxn, WithTls};
use parking_lot::Mutex;
use phalanx::{Error, Result, warn};
use phalanx_sys::folder;

use super::FILE;
use super::meta::{DatabaseRecord, Meta};
use crate::folder::io_error;

/// Threads of all processes that may read a file at once. The first that opens it decides.
const MAX_READERS: u32 = 4096;
/// Named databases of a file that a process may have open. Each costs every read a few bytes.
const MAX_DATABASES: u32 = 32;
/// In which maps are measured.
const SYSTEM_PAGE: u64 = 65536;

/// LMDB may open a file once in a process: the locks of a file that is opened twice go with the first that is closed. So this
/// table is of the process.
static OPEN: Mutex<Option<Opened>> = Mutex::new(None);

/// Each environment, and how often it is in use.
type Opened = HashMap<PathBuf, (Arc<Environment>, usize)>;

pub(super) struct Environment {
    env: Env,
    /// The one without a name.
    main: Named,
    /// The others, once they have been asked for. Behind a lock because LMDB opens one at a time.
    named: Mutex<HashMap<String, Named>>,
    pub(super) path: PathBuf,
    /// The device and the inode of the file, which another file may have replaced since.
    file: (u64, u64),
    pub(super) meta: Meta,
    /// Who has opened it.
    process: u32,
}

/// A database of an environment.
#[derive(Clone, Copy)]
pub(super) struct Named {
    pub database: Database<'static, Bytes, Bytes>,
    pub entries: u64,
}

/// A share in an open environment.
pub(super) struct Lease {
    /// None only while it is dropped.
    environment: Option<Arc<Environment>>,
}

impl Lease {
    /// Opens the file at `path` to read from it, unless this process has it open.
    pub fn open(path: &Path, readahead: bool) -> Result<Self> {
        let path = fs::canonicalize(path).map_err(|error| io_error(path, &error))?;
        // Other threads that want it wait until it is open, or closed.
        let mut table = OPEN.lock();
        let table = table.get_or_insert_default();
        if let Some((environment, shares)) = table.get_mut(&path) {
            environment.of_this_process()?;
            environment.check_place()?;
            *shares += 1;
            return Ok(Self { environment: Some(environment.clone()) });
        }
        let environment = Arc::new(Environment::open(&path, readahead)?);
        table.insert(path, (environment.clone(), 1));
        Ok(Self { environment: Some(environment) })
    }

    pub fn environment(&self) -> Result<&Environment> {
        self.environment.as_deref().ok_or_else(|| Error::aborted("the LMDB environment is closed"))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Until it is closed nobody opens it anew.
        let mut table = OPEN.lock();
        let (Some(table), Some(own)) = (table.as_mut(), self.environment.take()) else { return };
        let Some((_, shares)) = table.get_mut(&own.path) else { return };
        *shares -= 1;
        if *shares == 0 {
            let last = table.remove(&own.path);
            if own.process != std::process::id() {
                // A fork's: its locks are the parent's.
                std::mem::forget(last);
            }
        }
    }
}

impl Environment {
    fn open(path: &Path, readahead: bool) -> Result<Self> {
        let (file, meta) = (file_at(path)?, Meta::read(path)?);
        Self::map(path, readahead, file, meta)
    }

    /// Opens the file that was looked at: the one of these numbers, whose meta pages say this.
    fn map(path: &Path, readahead: bool, file: (u64, u64), meta: Meta) -> Result<Self> {
        let mut flags = EnvFlags::READ_ONLY;
        // The locks of a folder are another file than those of a file, and who writes through the folder looks at that one alone.
        let is_in_folder = path.file_name().is_some_and(|name| name == FILE);
        let place = match path.parent().filter(|_| is_in_folder) {
            Some(folder) => folder,
            None => {
                flags |= EnvFlags::NO_SUB_DIR;
                path
            }
        };
        if !readahead {
            flags |= EnvFlags::NO_READ_AHEAD;
        }
        // No more than there is: address space may be limited too.
        let size = meta.file.next_multiple_of(SYSTEM_PAGE);
        let env = match open(place, flags, size) {
            Err(heed::Error::Io(error)) if is_read_only(&error) => {
                // Nobody may write the lock's file here. Then nobody may change the data either, it is to be hoped.
                open(place, flags | EnvFlags::NO_LOCK, size)
            }
            Err(heed::Error::Io(error)) if folder::has_no_locks(&error) => {
                warn(format_args!(
                    "whoever writes {} would not see that it is read: its file system has no locks: {error}",
                    path.display()
                ));
                open(place, flags | EnvFlags::NO_LOCK, size)
            }
            outcome => outcome,
        };
        let env = env.map_err(|error| explained(path, error))?;
        // LMDB opens by the path. Behind the end of a shorter file that has come there since, a read would end this process.
        if file_at(path)? != file {
            return Err(Error::invalid_argument(format!(
                "{} was replaced while it was opened",
                path.display()
            ))
            .with_remedy(
                "open it again; a data set that is packed anew is better packed under another name",
            ));
        }
        let main = database(&env, None).and_then(|main| main.ok_or(heed::Error::Mdb(MdbError::NotFound)));
        let main = Named { database: main.map_err(|error| explained(path, error))?, entries: meta.entries };
        // Of processes that were killed while they read.
        env.clear_stale_readers().map_err(|error| explained(path, error))?;
        let named = Mutex::default();
        Ok(Self { env, main, named, path: path.to_owned(), file, meta, process: std::process::id() })
    }

    /// The database of this name, or the one without.
    pub fn database(&self, name: Option<&str>) -> Result<Named> {
        let Some(name) = name else { return Ok(self.main) };
        let mut named = self.named.lock();
        if let Some(found) = named.get(name) {
            return Ok(*found);
        }
        let failed = |error| explained(&self.path, error);
        let refused = |cause: &str| {
            Error::invalid_argument(format!("the database {name:?} of {} {cause}", self.path.display()))
        };
        let record = {
            let transaction = self.read()?;
            let found = self.main.database.get(&transaction, name.as_bytes()).map_err(failed)?;
            found.filter(|_| is_name(name)).and_then(|record| DatabaseRecord::read(record, &self.meta))
        };
        let absent = || {
            refused("does not exist").with_remedy("the main database's keys are their names: lmdb::keys_of")
        };
        let record = record.ok_or_else(absent)?;
        record.check().map_err(|cause| {
            refused(cause).with_remedy(
                "copy its items into another database, each under a key of its own that is bytes",
            )
        })?;
        let found = match database(&self.env, Some(name)) {
            Ok(Some(database)) => Named { database, entries: record.entries },
            Ok(None) | Err(heed::Error::Mdb(MdbError::Incompatible)) => return Err(absent()),
            Err(error) => return Err(failed(error)),
        };
        named.insert(name.to_owned(), found);
        Ok(found)
    }

    /// Whether a value of the main database may be the record of another one. Hardly an item looks so.
    pub fn like_database(&self, value: &[u8]) -> bool {
        DatabaseRecord::read(value, &self.meta).is_some()
    }

    /// Whether the value of this key in the main database is not an item but a database. No transaction of this thread may be open.
    pub fn is_database(&self, key: &[u8]) -> Result<bool> {
        let Some(name) = std::str::from_utf8(key).ok().filter(|name| is_name(name)) else { return Ok(false) };
        // LMDB opens one at a time.
        let named = self.named.lock();
        if named.contains_key(name) {
            return Ok(true);
        }
        match database(&self.env, Some(name)) {
            Ok(found) => Ok(found.is_some()),
            Err(heed::Error::Mdb(MdbError::Incompatible)) => Ok(false),
            Err(error) => Err(explained(&self.path, error)),
        }
    }

    fn of_this_process(&self) -> Result<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "{} was opened before this process was forked, and LMDB does not survive that",
            self.path.display()
        ))
        .with_remedy("read the data set only after forking, or start processes with phalanx::spawn"))
    }

    /// An error if another file has taken the place of this one: whoever opens it would read what was there before.
    fn check_place(&self) -> Result<()> {
        if file_at(&self.path)? == self.file {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "{} is another file by now, and this process still reads the one that was there before",
            self.path.display()
        ))
        .with_remedy(
            "drop the data sets and loaders of the old one first, or pack the new one under another name",
        ))
    }

    /// The data as they are now.
    pub fn read(&self) -> Result<RoTxn<'_, WithTls>> {
        self.of_this_process()?;
        let begun = match self.env.read_txn() {
            Err(heed::Error::Mdb(MdbError::ReadersFull)) => {
                self.clear_stale_readers()?;
                self.env.read_txn()
            }
            outcome => outcome,
        };
        begun.map_err(|error| explained(&self.path, error))
    }

    pub fn clear_stale_readers(&self) -> Result<usize> {
        self.env.clear_stale_readers().map_err(|error| explained(&self.path, error))
    }
}

/// Whether a database may have this name. LMDB takes names as C does, up to a byte 0; the numbers of an [`LmdbWriter`](super::LmdbWriter)'s items
/// are none.
fn is_name(name: &str) -> bool {
    !name.contains('\0')
}

/// The device and the inode of the file at `path`.
fn file_at(path: &Path) -> Result<(u64, u64)> {
    let about = fs::metadata(path).map_err(|error| io_error(path, &error))?;
    Ok((about.dev(), about.ino()))
}

/// The database of this name, or the one without.
fn database(env: &Env, name: Option<&str>) -> heed::Result<Option<Database<'static, Bytes, Bytes>>> {
    let transaction = env.read_txn()?;
    let opened = env.open_databases_and_commit(transaction, |opener, transaction| {
        opener.open_database::<Bytes, Bytes>(transaction, name).map(CommitOrAbort::<_, ()>::Commit)
    })?;
    Ok(opened.commit().flatten())
}

/// Opens an environment of `size` bytes, for readers and for the writer.
#[allow(unsafe_code)]
pub(super) fn open(path: &Path, flags: EnvFlags, size: u64) -> heed::Result<Env> {
    let size = usize::try_from(size).unwrap_or(usize::MAX);
    let mut options = EnvOpenOptions::new();
    options.map_size(size).max_readers(MAX_READERS).max_dbs(MAX_DATABASES);
    // SAFETY: a map of a file is sound as long as nobody changes or cuts the file off but LMDB, whose locks keep its writers
    // from pages that readers look at. For readers the file was compared with its meta pages right before (`Meta::read`), nothing is
    // read if another one has taken its place since (`Environment::map`), and it is read-only, so nothing is written to it from
    // here. The writer works on a file that it has just made in a folder that only it knows. Without locks (NO_LOCK) only files
    // are opened beside which this user can write none, or whose file system has no locks. That no program changes a data set with
    // other means than LMDB while it is read is what the documentation of `LmdbDataset` asks for: that cannot be checked, as it
    // cannot for any map of a file.
    // An environment is open once in a process: heed refuses a second time.
    unsafe {
        options.flags(flags);
        options.open(path)
    }
}

fn is_read_only(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
}

/// LMDB's error with the file and what to do.
pub(super) fn explained(path: &Path, error: heed::Error) -> Error {
    let remedy = match &error {
        heed::Error::Mdb(MdbError::ReadersFull) => {
            Some("more threads read it than the first reader has made room for: start fewer workers")
        }
        heed::Error::Mdb(MdbError::DbsFull) => {
            Some("a process may have 32 named databases of a file open: read them in several")
        }
        heed::Error::Mdb(MdbError::VersionMismatch) => Some(
            "another program has it open, whose version of LMDB has other locks: close it there, open it there without locks (lock=False in \
             Python), or read a copy",
        ),
        heed::Error::Mdb(MdbError::MapResized) => Some("it has grown while it was read: open it again"),
        heed::Error::Mdb(MdbError::MapFull) => {
            Some("write it with a larger number in `LmdbWriter::with_max_bytes`")
        }
        heed::Error::Mdb(MdbError::BadRslot) => Some("read one item of a data set at a time on a thread"),
        heed::Error::Mdb(MdbError::Invalid | MdbError::Corrupted | MdbError::PageNotFound) => {
            Some("it is damaged: copy it again, or pack it again")
        }
        heed::Error::EnvAlreadyOpened => {
            Some("this program has it open through heed itself, or writes it: close that first")
        }
        heed::Error::Io(error) if error.kind() == io::ErrorKind::StorageFull => Some("make room on the disk"),
        // A reader locks the byte of the lock's file whose place is the number of its process.
        heed::Error::Io(error) if error.kind() == io::ErrorKind::WouldBlock => Some(
            "does a process of the same number read it, in another container or on another host? Mount its folder read-only: then it is read \
             without locks",
        ),
        heed::Error::Io(error) if error.kind() == io::ErrorKind::OutOfMemory => Some(
            "there is too little address space for the file: raise `ulimit -v`. A writer takes less with \
             `LmdbWriter::with_max_bytes`",
        ),
        _ => None,
    };
    let cause = Error::other(io::Error::other(format!("{}: {error}", path.display())));
    remedy.into_iter().fold(cause, Error::with_remedy)
}

#[cfg(test)]
mod tests {
    use super::super::LmdbWriter;
    use super::*;

    #[test]
    fn a_reader_of_the_same_number_elsewhere_is_named() {
        // What LMDB returns if another process holds the lock of this number (`mdb_reader_pid`).
        let error = explained(Path::new("data.mdb"), heed::Error::Io(io::ErrorKind::WouldBlock.into()));
        assert!(error.remedy().is_some_and(|remedy| remedy.contains("read-only")), "{error}");
    }

    #[test]
    fn a_writer_for_which_the_address_space_is_too_small_is_told_of_the_one_that_takes_less() {
        let error = explained(Path::new("data.mdb"), heed::Error::Io(io::ErrorKind::OutOfMemory.into()));
        let remedy = error.remedy().unwrap();
        assert!(remedy.contains("ulimit -v") && remedy.contains("LmdbWriter::with_max_bytes"), "{error}");
    }

    #[test]
    fn a_file_that_is_replaced_while_it_is_opened_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let pack = |name: &str, items: usize| {
            let mut writer = LmdbWriter::create(folder.path().join(name)).unwrap();
            for index in 0..items {
                assert_eq!(writer.push(&[7; 100_000]).unwrap(), index);
            }
            writer.finish().unwrap();
            folder.path().join(name).join("data.mdb")
        };
        let (path, other) = (pack("long", 20), pack("short", 1));
        let (file, meta) = (file_at(&path).unwrap(), Meta::read(&path).unwrap());
        // As if it had come between the look at the file and the call that opens it.
        fs::rename(&other, &path).unwrap();
        let error = Environment::map(&path, true, file, meta).err().unwrap();
        assert!(
            error.to_string().contains("was replaced while it was opened") && error.remedy().is_some(),
            "{error}"
        );
        assert_eq!(Environment::open(&path, true).unwrap().main.entries, 1);
    }
}
