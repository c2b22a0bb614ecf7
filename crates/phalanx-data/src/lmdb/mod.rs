//! Many items in one file: LMDB, by [heed]. Needs the feature `lmdb`.
//!
//! [`LmdbWriter`] packs items, [`LmdbDataset`] reads them. A file that something else has written is read by its
//! [keys](LmdbDataset::with_keys), also of one of its [named databases](LmdbDataset::database).
//!
//! What goes wrong with LMDB in training loops, and how it does not here:
//!
//! | | |
//! |---|---|
//! | The environment is opened in the constructor, and is of no use in a worker | It is opened by the process that reads, when it first does. The data set can be [sent](serde) to another process and moved to other threads. |
//! | Two data sets, or two workers, open the file twice in one process, which breaks its locks | All data sets of a file share one environment in a process. |
//! | A worker is killed, and its place in the table of readers stays taken | The next process that opens the file clears it, and so does a process that finds the table full. |
//! | A file that was cut off in a copy kills the process with SIGBUS | Its length is compared with what its first pages say, before it is mapped: an error. |
//! | `Readahead` reads what a shuffled pass does not want | It is off by default. |
//! | A packing that was interrupted leaves half a data set | A data set gets its name when it is whole. |
//! | A data set is packed anew while the process still reads the old one | Whoever opens the new one gets an error until the old one is dropped. |

mod environment;
mod meta;
mod writer;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use heed::Database;
use heed::types::Bytes;
use phalanx::{Error, Result};
use serde::{Deserialize, Serialize};

use self::environment::{Environment, Lease, Named, explained};
use self::meta::Meta;
pub use self::writer::LmdbWriter;
use crate::Dataset;
use crate::dataset::outside;
use crate::worker::mix_bytes;

/// LMDB's file in a folder.
const FILE: &str = "data.mdb";
/// The longest key that LMDB takes.
const MAX_KEY: usize = 511;
/// The most memory that the keys of a file may take.
const MAX_KEYS: usize = 1 << 30;

/// The items of an LMDB file, as bytes; [`map`](Dataset::map) decodes them. Read-only, for any number of threads and processes.
///
/// ```
/// use phalanx_data::{DataLoader, Dataset, lmdb::{LmdbDataset, LmdbWriter}};
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("squares");
///
/// let mut writer = LmdbWriter::create(&path)?;
/// for n in 0..1000_u32 {
///     writer.push(&(n * n).to_le_bytes())?;
/// }
/// writer.finish()?;
///
/// let squares = LmdbDataset::open(&path)?.map(|bytes| {
///     bytes.try_into().map(u32::from_le_bytes).map_err(|_| phalanx::Error::other("an item has 4 bytes"))
/// });
/// assert_eq!(squares.get(30)?, 900);
/// let loader = DataLoader::builder(squares).shuffle(true).batch_size(10).num_workers(4).build()?;
/// assert_eq!(loader.iter().map(|batch| batch.unwrap().len()).sum::<usize>(), 1000);
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// While it is read, nothing but LMDB may write to the file; it is mapped into memory. LMDB has no checksums: a file that is damaged
/// inside, or made by somebody who means harm, may end the process. LMDB does not work on network file systems while somebody writes.
#[derive(Serialize, Deserialize)]
pub struct LmdbDataset {
    /// The file.
    path: PathBuf,
    len: usize,
    keys: Option<Vec<Vec<u8>>>,
    readahead: bool,
    /// The database of this name, if it is not the main one.
    database: Option<String>,
    /// Once this process has read.
    #[serde(skip)]
    opened: OnceLock<(Lease, Named)>,
}

impl LmdbDataset {
    /// What an [`LmdbWriter`] has packed at `path`: a folder with a `data.mdb`, or the file itself. Nothing is opened yet but to see
    /// how many items it has, and whether it is whole.
    ///
    /// # Errors
    /// If there is no such file, or it is no whole LMDB file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = file(path.as_ref());
        let len = usize::try_from(Meta::read(&path)?.entries).unwrap_or(usize::MAX);
        Ok(Self { path, len, keys: None, readahead: false, database: None, opened: OnceLock::new() })
    }

    /// The items of these `keys` in any LMDB file, in this order: one that PyTorch's users have made, say. [`keys_of`] lists all.
    ///
    /// ```no_run
    /// # use phalanx_data::lmdb::LmdbDataset;
    /// let images = LmdbDataset::with_keys("train.lmdb", (0..50_000).map(|n| format!("{n:08}")))?;
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`open`](Self::open), and if a key is empty or has more than 511 bytes.
    pub fn with_keys<K: Into<Vec<u8>>>(
        path: impl AsRef<Path>,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Self> {
        let path = file(path.as_ref());
        Meta::read(&path)?;
        let keys: Vec<Vec<u8>> = keys.into_iter().map(Into::into).collect();
        if let Some(index) = keys.iter().position(|key| key.is_empty() || key.len() > MAX_KEY) {
            return Err(Error::invalid_argument(format!(
                "key {index} has {} bytes; LMDB's have 1 to 511",
                keys[index].len()
            ))
            .with_remedy("give the keys that lmdb::keys_of lists, or some of them"));
        }
        let len = keys.len();
        Ok(Self { path, len, keys: Some(keys), readahead: false, database: None, opened: OnceLock::new() })
    }

    /// The items of the database of this name in the file, in place of the main one's. [`keys_of_database`] lists its keys.
    ///
    /// ```no_run
    /// # use phalanx_data::lmdb::{LmdbDataset, keys_of_database};
    /// let keys = keys_of_database("data.lmdb", "train")?; // env.open_db(b"train")
    /// let train = LmdbDataset::with_keys("data.lmdb", keys)?.database("train")?;
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the file has no such database, or its keys may have several values or are integers of the machine.
    pub fn database(self, name: impl Into<String>) -> Result<Self> {
        let name = name.into();
        let found = Lease::open(&self.path, self.readahead)?.environment()?.database(Some(&name))?;
        let len =
            if self.keys.is_some() { self.len } else { usize::try_from(found.entries).unwrap_or(usize::MAX) };
        Ok(Self { len, database: Some(name), opened: OnceLock::new(), ..self })
    }

    /// Whether the system reads ahead. False by default: a shuffled pass would wait for data that it does not use. Set it
    /// for a pass in order.
    pub fn readahead(self, readahead: bool) -> Self {
        Self { readahead, ..self }
    }

    /// Calls `read` with the bytes of the item at `index`, where they are: nothing is copied. `read` may read no other item.
    ///
    /// # Errors
    /// If the file cannot be opened, or has no such item.
    pub fn read<R>(&self, index: usize, read: impl FnOnce(&[u8]) -> R) -> Result<R> {
        if index >= self.len {
            return Err(outside(index, self.len));
        }
        let (environment, database) = self.opened()?;
        let number = (index as u64).to_be_bytes();
        let key = self.keys.as_ref().map_or(&number[..], |keys| &keys[index]);
        let failed = |error| explained(&self.path, error);
        let item = |found: Option<&[u8]>| match found {
            Some(bytes) if bytes.len() as u64 <= environment.meta.file => Ok(read(bytes)),
            Some(_) => Err(explained(&self.path, heed::Error::Mdb(heed::MdbError::Corrupted))),
            None => Err(self.absent(index, key)),
        };
        {
            let transaction = environment.read()?;
            let found = database.get(&transaction, key).map_err(failed)?;
            let may_be_database =
                self.database.is_none() && found.is_some_and(|value| environment.like_database(value));
            if !may_be_database {
                return item(found);
            }
        }
        // LMDB looks for a database in a transaction of its own, of which a thread has one at a time.
        if environment.is_database(key)? {
            let (path, key) = (self.path.display(), key.escape_ascii());
            return Err(Error::invalid_argument(format!("in {path}, {key} is no item but a database"))
                .with_remedy(
                    "read its items with LmdbDataset::database, and leave its name out of the keys",
                ));
        }
        let transaction = environment.read()?;
        item(database.get(&transaction, key).map_err(failed)?)
    }

    /// Clears the places of readers that have died, and says how many there were. Opening does so too.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn clear_stale_readers(&self) -> Result<usize> {
        self.opened()?.0.clear_stale_readers()
    }

    fn opened(&self) -> Result<(&Environment, Database<'static, Bytes, Bytes>)> {
        if let Some((lease, named)) = self.opened.get() {
            return Ok((lease.environment()?, named.database));
        }
        let lease = Lease::open(&self.path, self.readahead)?;
        let named = lease.environment()?.database(self.database.as_deref())?;
        let entries = named.entries;
        if self.keys.is_none() && entries < self.len as u64 {
            return Err(Error::invalid_argument(format!(
                "{} has {entries} items, and had {} when it was opened",
                self.path.display(),
                self.len
            ))
            .with_remedy("was it packed again? Open it again"));
        }
        let (lease, named) = self.opened.get_or_init(|| (lease, named));
        Ok((lease.environment()?, named.database))
    }

    fn absent(&self, index: usize, key: &[u8]) -> Error {
        let path = self.path.display();
        let error =
            Error::invalid_argument(format!("{path} has no item {index}: no key {}", key.escape_ascii()));
        match self.keys {
            Some(_) => error.with_remedy("list the keys with lmdb::keys_of"),
            None => error.with_remedy("no LmdbWriter has packed it: read it with LmdbDataset::with_keys"),
        }
    }
}

/// The keys of the file, or folder, at `path`, in LMDB's order, such as for [`LmdbDataset::with_keys`].
///
/// # Errors
/// As [`LmdbDataset::open`], and if the keys take more than a gibibyte.
pub fn keys_of(path: impl AsRef<Path>) -> Result<Vec<Vec<u8>>> {
    keys(path.as_ref(), None)
}

/// The keys of the database of this name in the file, or folder, at `path`.
///
/// # Errors
/// As [`keys_of`] and [`LmdbDataset::database`].
pub fn keys_of_database(path: impl AsRef<Path>, name: &str) -> Result<Vec<Vec<u8>>> {
    keys(path.as_ref(), Some(name))
}

fn keys(path: &Path, name: Option<&str>) -> Result<Vec<Vec<u8>>> {
    let path = file(path);
    let lease = Lease::open(&path, true)?;
    let environment = lease.environment()?;
    let database = environment.database(name)?.database;
    let transaction = environment.read()?;
    let (mut keys, mut bytes) = (Vec::new(), 0);
    let all = database.iter(&transaction).map_err(|error| explained(&path, error))?;
    for entry in all {
        let (key, _) = entry.map_err(|error| explained(&path, error))?;
        bytes += key.len() + size_of::<Vec<u8>>();
        if bytes > MAX_KEYS {
            return Err(Error::invalid_argument(format!(
                "the keys of {} take more than 1 GiB",
                path.display()
            ))
            .with_remedy("compute them, and give them to LmdbDataset::with_keys in parts"));
        }
        keys.push(key.to_vec());
    }
    Ok(keys)
}

/// LMDB's file at `path`.
fn file(path: &Path) -> PathBuf {
    if path.is_dir() { path.join(FILE) } else { path.to_owned() }
}

impl Dataset for LmdbDataset {
    type Item = Vec<u8>;

    fn len(&self) -> usize {
        self.len
    }

    fn get(&self, index: usize) -> Result<Vec<u8>> {
        self.read(index, <[u8]>::to_vec)
    }

    fn fingerprint(&self) -> u64 {
        let keys = self.keys.iter().flatten().fold(self.len as u64, |all, key| mix_bytes(all, key));
        mix_bytes(keys, self.database.as_deref().unwrap_or_default().as_bytes())
    }
}

impl Clone for LmdbDataset {
    fn clone(&self) -> Self {
        let Self { path, len, keys, readahead, database, .. } = self;
        Self {
            path: path.clone(),
            len: *len,
            keys: keys.clone(),
            readahead: *readahead,
            database: database.clone(),
            opened: OnceLock::new(),
        }
    }
}

impl fmt::Debug for LmdbDataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LmdbDataset({}, {} items)", self.path.display(), self.len)
    }
}
