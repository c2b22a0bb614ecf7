//! Packs items into LMDB.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};

use heed::types::Bytes;
use heed::{CommitOrAbort, Database, Env, EnvFlags, PutFlags};
use phalanx::{Error, Result};
use phalanx_sys::folder;
use phalanx_sys::signal::ignore_file_size_signal;

use super::environment::{explained, open};

/// What is collected before it is written.
const PIECE: usize = 16 << 20;
/// The longest item; LMDB could take 4 GiB.
const MAX_ITEM: usize = 1 << 30;

/// Packs items into a new LMDB folder: item n under its number as 8 big-endian bytes, so in this order on the disk too.
///
/// Its process ignores SIGXFSZ from then on, unless the program has a handler of its own, so that `ulimit -f` is an error of
/// [`push`](Self::push), and not the end of the process. Processes that it starts inherit that.
///
/// It writes into a hidden folder beside, which gets its name by [`finish`](Self::finish), when everything is on the disk. If the
/// writer is dropped before, that is removed; if its process is killed, it stays (`.NAME.partial-..`), and may be removed by hand.
pub struct LmdbWriter {
    /// Dropped first.
    env: Option<(Env, Database<'static, Bytes, Bytes>)>,
    partial: PathBuf,
    folder: PathBuf,
    /// Whether the folder has its name.
    is_named: bool,
    len: u64,
    pending: Vec<Vec<u8>>,
    bytes: usize,
}

impl LmdbWriter {
    /// A writer of the new folder `folder`, for up to a tebibyte.
    ///
    /// # Errors
    /// If there is something at `folder`, or beside it nothing can be written.
    pub fn create(folder: impl AsRef<Path>) -> Result<Self> {
        Self::with_max_bytes(folder, 1 << 40)
    }

    /// [`create`](Self::create) for up to `max_bytes`, where address space is limited: as much of it is taken.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn with_max_bytes(folder: impl AsRef<Path>, max_bytes: u64) -> Result<Self> {
        let folder = folder.as_ref().to_owned();
        let failed = |error: io::Error| io_error(&folder, &error);
        if folder.symlink_metadata().is_ok() {
            return Err(Error::invalid_argument(format!("{} is there already", folder.display()))
                .with_remedy("remove it first, if it is to be packed anew"));
        }
        let Some(name) = folder.file_name() else {
            return Err(Error::invalid_argument(format!(
                "{} cannot be the name of a folder",
                folder.display()
            ))
            .with_remedy("let the path end in the name of the new folder"));
        };
        let mut partial = OsString::from(".");
        partial.push(name);
        // A process number is not unique on a shared disk.
        partial.push(format!(".partial-{:016x}", RandomState::new().hash_one(std::process::id())));
        let partial = folder.with_file_name(partial);
        if let Some(parent) = folder.parent() {
            fs::create_dir_all(parent).map_err(failed)?;
        }
        fs::create_dir(&partial).map_err(failed)?;
        let _ = ignore_file_size_signal();
        let mut writer =
            Self { env: None, partial, folder, is_named: false, len: 0, pending: Vec::new(), bytes: 0 };
        let size = max_bytes.clamp(1 << 20, 1 << 46).next_multiple_of(1 << 20);
        writer.env = Some(writer.database(size).map_err(|error| unwritten(&writer.partial, error))?);
        Ok(writer)
    }

    fn database(&self, size: u64) -> heed::Result<(Env, Database<'static, Bytes, Bytes>)> {
        let env = open(&self.partial, EnvFlags::NO_READ_AHEAD, size)?;
        let transaction = env.write_txn()?;
        let created = env.create_databases_and_commit(transaction, |opener, transaction| {
            opener.create_database::<Bytes, Bytes>(transaction, None).map(CommitOrAbort::<_, ()>::Commit)
        })?;
        let database = created.commit().ok_or(heed::Error::Mdb(heed::MdbError::NotFound))?;
        Ok((env, database))
    }

    /// Adds an item, and returns its index. After an error the item is not added: make room on the disk, and push it again.
    ///
    /// # Errors
    /// If the item is longer than a gibibyte, or cannot be written: the disk is full, or there is more than was said. If the packing is
    /// [finished](Self::finish).
    pub fn push(&mut self, item: &[u8]) -> Result<usize> {
        if self.env.is_none() {
            let cause =
                format!("no item can be added to {}: its packing was finished", self.folder.display());
            return Err(Error::invalid_argument(cause).with_remedy("push all items before `finish`"));
        }
        if item.len() > MAX_ITEM {
            return Err(Error::invalid_argument(format!(
                "an item of {} bytes; it may have {MAX_ITEM}",
                item.len()
            ))
            .with_remedy("divide it into several"));
        }
        let (index, bytes) = (self.len as usize + self.pending.len(), item.len() + size_of::<Vec<u8>>());
        self.bytes += bytes;
        self.pending.push(item.to_vec());
        if self.bytes >= PIECE
            && let Err(error) = self.flush()
        {
            // Nothing was written.
            self.pending.pop();
            self.bytes -= bytes;
            return Err(error);
        }
        Ok(index)
    }

    fn flush(&mut self) -> Result<()> {
        let Some((env, database)) = &self.env else { return Ok(()) };
        let write = || {
            let mut transaction = env.write_txn()?;
            for (key, item) in (self.len..).zip(&self.pending) {
                database.put_with_flags(&mut transaction, PutFlags::APPEND, &key.to_be_bytes(), item)?;
            }
            transaction.commit()
        };
        write().map_err(|error| unwritten(&self.partial, error))?;
        self.len += self.pending.len() as u64;
        self.pending.clear();
        self.bytes = 0;
        Ok(())
    }

    /// Writes what is left, and gives the folder its name. Returns the number of items. After an error call it again when there is room, or when
    /// what is in the way is gone: until the writer is dropped, nothing is lost. A call after success gives the number again.
    ///
    /// # Errors
    /// If it cannot be written, or there is something of that name by now.
    pub fn finish(&mut self) -> Result<usize> {
        self.flush()?;
        // Closes it.
        self.env = None;
        let failed = |error: io::Error| io_error(&self.folder, &error);
        if !self.is_named {
            // Only readers' places, of which there are none.
            let _ = fs::remove_file(self.partial.join("lock.mdb"));
            folder::sync(&self.partial).map_err(failed)?;
            fs::rename(&self.partial, &self.folder).map_err(failed)?;
            self.is_named = true;
        }
        folder::sync(self.folder.parent().unwrap_or(Path::new("."))).map_err(failed)?;
        Ok(self.len as usize)
    }
}

/// [`explained`], of a write. LMDB gives EIO if the system has taken only the first bytes of one, as where the room or the limit of a file ends.
fn unwritten(path: &Path, error: heed::Error) -> Error {
    const EIO: i32 = 5;
    let is_short = matches!(&error, heed::Error::Io(error)
        if error.kind() == io::ErrorKind::FileTooLarge || error.raw_os_error() == Some(EIO));
    let error = explained(path, error);
    match is_short {
        true => error.with_remedy(
            "has the disk room, and is the size of files limited, by `ulimit -f`? Else the disk is damaged",
        ),
        false => error,
    }
}

fn io_error(path: &Path, error: &io::Error) -> Error {
    Error::other(io::Error::new(error.kind(), format!("cannot pack {}: {error}", path.display())))
        .with_remedy("may this user write there, and has the disk room?")
}

impl Drop for LmdbWriter {
    fn drop(&mut self) {
        self.env = None;
        if !self.is_named {
            let _ = fs::remove_dir_all(&self.partial);
        }
    }
}

impl fmt::Debug for LmdbWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LmdbWriter({}, {} items)", self.folder.display(), self.len as usize + self.pending.len())
    }
}
