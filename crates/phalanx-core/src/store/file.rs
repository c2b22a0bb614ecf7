//! A store in a file that all ranks see: a log to which every change is appended. A log that has become long goes on in a new file
//! ([`compaction`]).

mod compaction;
mod log;

use std::fs::{File, OpenOptions, remove_file};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::slice::from_ref;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;

use self::compaction::is_stale;
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub use self::log::fuzz;
use self::log::{Identity, Log};
use super::Store;
use super::call::Call;
use super::table::{Refusal, Table};
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, Result};
use crate::interrupt;
use crate::random;

/// The pause between two reads of the file grows from the first to the second.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));
/// What NFS says of a file that another has just replaced.
const REPLACED: &str = "has been replaced while it was opened";
/// How long the removal of a store waits for its lock.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(1);

/// A store in a file, for ranks that share a file system.
///
/// One process [`create`](Self::create)s it, replacing any file of that name, and removes it when it is dropped. The
/// others [`open`](Self::open) it. A writer that dies in the middle of a change leaves an incomplete one at the end.
/// Readers ignore it, and the next writer removes it.
///
/// Now and then a writer replaces a long file by a shorter one that says the same. It makes that beside the first. If it may not create files
/// in the folder, the file grows, to 4 GiB at most.
///
/// A file that an earlier job left is a complete store, so `open` alone cannot distinguish it from this job's.
/// A [rendezvous](crate::rendezvous) can, by a greeting that only this job's rank 0 answers.
#[derive(Debug)]
pub struct FileStore {
    path: PathBuf,
    /// As errors name it.
    name: String,
    log: Mutex<Log>,
    remove: bool,
}

impl FileStore {
    /// Creates a new store at `path`, atomically, replacing any existing file. A device or a pipe there is an error.
    ///
    /// # Errors
    /// If the file cannot be made, or is a device or a pipe: the error has the path and the system's reason.
    pub fn create(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let log = create_in_place(&path).map_err(|error| unusable(&path, "create", error))?;
        Ok(Self::new(path, log, true))
    }

    fn new(path: PathBuf, log: Log, remove: bool) -> Self {
        let name = format!("the store file://{}", path.display());
        // A process that changes its folder still finds the file that follows.
        let path = std::path::absolute(&path).unwrap_or(path);
        Self { path, name, log: Mutex::new(log), remove }
    }

    /// Opens the store at `path`; waits until there is one.
    ///
    /// # Errors
    /// If the file cannot be read or written; at `deadline`, if there is no file, or none of a store of this version.
    pub fn open(path: impl Into<PathBuf>, deadline: Deadline) -> Result<Self> {
        let path = path.into();
        let mut backoff = Backoff::new(PAUSES, deadline);
        loop {
            let why = match OpenOptions::new().read(true).write(true).open(&path) {
                Ok(file) => match Log::open(file) {
                    Ok(Some(log)) => return Ok(Self::new(path, log, false)),
                    Ok(None) => "holds no store of this version",
                    Err(error) if is_stale(&error) => REPLACED,
                    Err(error) => return Err(unusable(&path, "read", error)),
                },
                Err(error) if is_stale(&error) => REPLACED,
                Err(error) if error.kind() == io::ErrorKind::NotFound => "does not exist",
                Err(error) => return Err(unusable(&path, "open", error)),
            };
            interrupt::check()?;
            if !backoff.pause() {
                let cause = format!("the file {} {why}", path.display());
                return Err(Error::timeout(cause).in_operation("store open", None).with_remedy(
                    "does rank 0 run, with the same path on a file system that all ranks share? If an earlier job has left the file, remove it",
                ));
            }
        }
    }

    /// The same store, compacted more often.
    #[cfg(test)]
    pub(super) fn compacted_at(mut self, length: u64) -> Self {
        let log = self.log.get_mut();
        (log.compacted_length, log.compact_at) = (length, length);
        self
    }

    /// Opens the store at `path` if it is in use. Every process that has it open writes more often than once in
    /// `silence`. If it does not grow in that time, or there is none, a new one is made. If it has
    /// another content, that is an error. It is not removed on drop, because others may need it.
    #[doc(hidden)]
    pub fn open_or_create(path: impl Into<PathBuf>, silence: Duration, deadline: Deadline) -> Result<Self> {
        let path = path.into();
        loop {
            if let Some(log) = create_beside(&path).map_err(|error| unusable(&path, "create", error))? {
                return Ok(Self::new(path, log, false));
            }
            let store = match Self::open(&path, deadline.at_most(silence)) {
                // A store has its header soon after its name, and only a store is replaced.
                Err(error) if error.is_timeout() && path.exists() => return Err(no_store(&path)),
                // It was removed meanwhile.
                Err(error) if error.is_timeout() && !deadline.has_passed() => continue,
                store => store?,
            };
            let length = match store.unchanged_length(silence, deadline) {
                Ok(None) => return Ok(store),
                Ok(Some(length)) => length,
                // Another file has just taken its place.
                Err(error) if is_stale(&error) => continue,
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                    return Err(in_doubt(&path, silence));
                }
                Err(error) => return Err(unusable(&path, "read", error)),
            };
            let call = Call::new(&store.name, "open", &[], deadline)?;
            let mut backoff = Backoff::new(PAUSES, deadline);
            let log = store.log.lock();
            // Of the processes that find it unused, one replaces it. For the others the path then names another file.
            let is_locked = loop {
                match log.try_lock() {
                    Ok(true) => break true,
                    Ok(false) if backoff.pause() => {}
                    Ok(false) => return Err(call.locked_out()),
                    // On NFS one of them may just have done so.
                    Err(error) if is_stale(&error) && !deadline.has_passed() => break false,
                    Err(error) => return Err(call.failed(error)),
                }
            };
            if !is_locked {
                continue;
            }
            let created = match is_unused(&log, length, &path) {
                Ok(true) => Some(create_in_place(&path)),
                Ok(false) => None,
                Err(error) if is_stale(&error) => None,
                Err(error) => Some(Err(error)),
            };
            if let Some(Ok(_)) = created {
                remove_next(&log, &path);
            }
            log.unlock();
            if let Some(created) = created {
                let log = created.map_err(|error| unusable(&path, "create", error))?;
                return Ok(Self::new(path, log, false));
            }
        }
    }

    /// Its length, if no process writes to it within `silence`.
    ///
    /// # Errors
    /// That the time is up, if `deadline` comes before.
    fn unchanged_length(&self, silence: Duration, deadline: Deadline) -> io::Result<Option<u64>> {
        let length = || self.log.lock().length();
        let first = length()?;
        let until = Deadline::after(silence);
        let mut backoff = Backoff::new(PAUSES, deadline.min(until));
        while backoff.pause() {
            if length()? != first {
                return Ok(None);
            }
        }
        let is_unchanged = length()? == first;
        match until.has_passed() {
            true => Ok(is_unchanged.then_some(first)),
            false if is_unchanged => Err(io::ErrorKind::TimedOut.into()),
            false => Ok(None),
        }
    }

    /// Whether this store is still the one that its path names.
    pub(crate) fn is_current(&self) -> bool {
        let mut log = self.log.lock();
        // If the path names another file, this store may go on in that.
        is_named(&log.file, &self.path)
            || (log.read_on(&self.path).is_ok() && is_named(&log.file, &self.path))
    }

    /// Changes the call's keys under the file's lock. `change` returns its result, and whether it wrote or removed them.
    fn change<T>(
        &self,
        call: &Call<'_>,
        change: impl FnOnce(&mut Table) -> Result<(T, bool), Refusal>,
    ) -> Result<T> {
        let mut backoff = Backoff::new(PAUSES, call.deadline);
        let mut log = loop {
            let mut log = self.log(call)?;
            if log.try_lock_newest(&self.path).map_err(|error| call.failed(error))? {
                break log;
            }
            // Other threads read meanwhile, and so may what the check runs.
            drop(log);
            interrupt::check()?;
            if !backoff.pause() {
                return Err(call.locked_out());
            }
        };
        let outcome = log.change(call.keys, change);
        if matches!(outcome, Ok(Ok(_))) {
            log.compact_if_long(&self.path);
        }
        log.unlock();
        match outcome {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(refusal)) => Err(call.refused(&refusal)),
            Err(error) => Err(call.failed(error)),
        }
    }

    /// Reads when all `keys` exist.
    fn read<T>(&self, call: &Call<'_>, keys: &[&str], read: impl FnOnce(&Table) -> T) -> Result<T> {
        let mut backoff = Backoff::new(PAUSES, call.deadline);
        loop {
            let mut log = self.log(call)?;
            log.read_on(&self.path).map_err(|error| call.failed(error))?;
            if keys.iter().all(|key| log.table.contains(key.as_bytes())) {
                return Ok(read(&log.table));
            }
            drop(log);
            interrupt::check()?;
            if !backoff.pause() {
                return Err(call.timed_out());
            }
        }
    }

    fn log(&self, call: &Call<'_>) -> Result<MutexGuard<'_, Log>> {
        self.log
            .try_lock_until(call.deadline.instant())
            .or_else(|| self.log.try_lock())
            .ok_or_else(|| call.timed_out())
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        if !self.remove {
            return;
        }
        let log = self.log.get_mut();
        // A process that holds the lock may be about to put the next file at the path.
        let mut backoff = Backoff::new(PAUSES, Deadline::after(REMOVE_TIMEOUT));
        while matches!(log.try_lock_newest(&self.path), Ok(false)) && backoff.pause() {}
        if is_named(&log.file, &self.path) {
            // Processes that have read on to this file keep it; others hear that the store is gone. A file that cannot be removed is
            // recognised as stale later.
            let _ = remove_file(&self.path);
            remove_next(log, &self.path);
        }
        log.unlock();
    }
}

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        let call = Call::new(&self.name, "set", from_ref(&key), deadline)?;
        self.change(&call, |table| Ok((table.set(key.as_bytes(), value)?, true)))
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        let call = Call::new(&self.name, "get", from_ref(&key), deadline)?;
        self.read(&call, call.keys, |table| value(table, key))
    }

    fn wait(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        let call = Call::new(&self.name, "wait", keys, deadline)?;
        self.read(&call, call.keys, |_| ())
    }

    fn check(&self, keys: &[&str], deadline: Deadline) -> Result<bool> {
        let call = Call::new(&self.name, "check", keys, deadline)?;
        self.read(&call, &[], |table| keys.iter().all(|key| table.contains(key.as_bytes())))
    }

    fn add(&self, key: &str, amount: i64, deadline: Deadline) -> Result<i64> {
        let call = Call::new(&self.name, "add", from_ref(&key), deadline)?;
        self.change(&call, |table| Ok((table.add(key.as_bytes(), amount)?, true)))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Deadline) -> Result<Vec<u8>> {
        let call = Call::new(&self.name, "compare_set", from_ref(&key), deadline)?;
        self.change(&call, |table| {
            let (value, written) = table.compare_set(key.as_bytes(), expected, desired)?;
            Ok((value.to_vec(), written))
        })
    }

    /// All or, if one is refused, none, under the file's lock, which on a file system at the end of a network takes as long as all else.
    fn multi_compare_set(
        &self,
        changes: &[(&str, &[u8], &[u8])],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>> {
        let keys: Vec<&str> = changes.iter().map(|(key, ..)| *key).collect();
        let call = Call::new(&self.name, "compare_set", &keys, deadline)?;
        // What changes nothing needs no lock: those of a log ask so for what is there.
        if changes.iter().all(|(_, expected, desired)| expected == desired && !expected.is_empty()) {
            return self.read(&call, &[], |table| {
                let value = |(key, expected, _): &(&str, &[u8], &[u8])| match table.get(key.as_bytes()) {
                    Some(value) => value.to_vec(),
                    None => expected.to_vec(),
                };
                changes.iter().map(value).collect()
            });
        }
        self.change(&call, |table| {
            let mut has_changed = false;
            let values = changes.iter().map(|(key, expected, desired)| {
                let (value, written) = table.compare_set(key.as_bytes(), expected, desired)?;
                has_changed |= written;
                Ok(value.to_vec())
            });
            let values = values.collect::<Result<Vec<_>, Refusal>>()?;
            Ok((values, has_changed))
        })
    }

    fn delete_key(&self, key: &str, deadline: Deadline) -> Result<bool> {
        let call = Call::new(&self.name, "delete_key", from_ref(&key), deadline)?;
        self.change(&call, |table| {
            let was_there = table.delete(key.as_bytes());
            Ok((was_there, was_there))
        })
    }

    fn delete_keys(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        // One change for all that are there: each costs the file's lock, and the removal of a key that is not there would be written too.
        let call = Call::new(&self.name, "delete_key", keys, deadline)?;
        let there: Vec<&str> = self.read(&call, &[], |table| {
            keys.iter().copied().filter(|key| table.contains(key.as_bytes())).collect()
        })?;
        if there.is_empty() {
            return Ok(());
        }
        let call = Call::new(&self.name, "delete_key", &there, deadline)?;
        self.change(&call, |table| {
            let removed = there.iter().filter(|key| table.delete(key.as_bytes())).count();
            Ok(((), removed > 0))
        })
    }

    fn num_keys(&self, deadline: Deadline) -> Result<usize> {
        let call = Call::new(&self.name, "num_keys", &[], deadline)?;
        self.read(&call, &[], Table::len)
    }

    fn append(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        let call = Call::new(&self.name, "append", from_ref(&key), deadline)?;
        self.change(&call, |table| Ok((table.append(key.as_bytes(), value)?, true)))
    }

    fn multi_get(&self, keys: &[&str], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let call = Call::new(&self.name, "multi_get", keys, deadline)?;
        self.read(&call, call.keys, |table| keys.iter().map(|key| value(table, key)).collect())
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Deadline) -> Result<()> {
        let keys: Vec<&str> = pairs.iter().map(|(key, _)| *key).collect();
        let call = Call::new(&self.name, "multi_set", &keys, deadline)?;
        self.change(&call, |table| {
            pairs.iter().try_for_each(|(key, value)| table.set(key.as_bytes(), *value))?;
            Ok(((), true))
        })
    }
}

fn value(table: &Table, key: &str) -> Vec<u8> {
    table.get(key.as_bytes()).unwrap_or_default().to_vec()
}

/// Creates an empty store at `path`, replacing any existing file, but no device or pipe: root could replace `/dev/null`, for all programs.
fn create_in_place(path: &Path) -> io::Result<Log> {
    if std::fs::metadata(path).is_ok_and(|about| !about.is_file()) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "what is there is no regular file"));
    }
    create_by(path, |temporary| std::fs::rename(temporary, path))
}

/// Creates an empty store at `path`, unless a file exists there.
fn create_beside(path: &Path) -> io::Result<Option<Log>> {
    // Unlike a file that is created under its final name, a link is never seen half written.
    let created = create_by(path, |temporary| {
        let linked = std::fs::hard_link(temporary, path).map_err(unlinked);
        remove_file(temporary).and(linked)
    });
    match created {
        Ok(log) => Ok(Some(log)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
        Err(error) => Err(error),
    }
}

/// Why a file that this process has just made got no second name.
fn unlinked(error: io::Error) -> io::Error {
    match Errno::from_io_error(&error) {
        Some(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS) => {
            io::Error::new(io::ErrorKind::Unsupported, "its file system has no hard links")
        }
        _ => error,
    }
}

/// Writes an empty store under a temporary name, which `place` then moves to `path`.
fn create_by(path: &Path, place: impl Fn(&Path) -> io::Result<()>) -> io::Result<Log> {
    let store = random::number().map_err(io::Error::other)?;
    let unnamed =
        || io::Error::new(io::ErrorKind::InvalidInput, "the path does not end in the name of a file");
    let mut name = path.file_name().ok_or_else(unnamed)?.to_os_string();
    name.push(format!(".{store:016x}.new"));
    let temporary = path.with_file_name(name);
    let log = Log::create(&temporary, Identity { store, generation: 0 })?;
    if let Err(error) = place(&temporary) {
        let _ = remove_file(&temporary);
        return Err(error);
    }
    Ok(log)
}

/// Removes the next file of a store that is over: a process that compacted the log may have died.
fn remove_next(log: &Log, path: &Path) {
    if let Ok(next) = log.next_path(path) {
        let _ = remove_file(next);
    }
}

/// Whether a store whose lock this process has just taken still has this `length`, and is at `path`. For some seconds a network file system may
/// show a host what it has seen before, but not to who has locked a file, or opens one: by what it had seen, it could replace a store that others
/// use.
fn is_unused(log: &Log, length: u64, path: &Path) -> io::Result<bool> {
    Ok(log.length()? == length && log.is_at(path)?)
}

/// Whether `path` still names `file`.
fn is_named(file: &File, path: &Path) -> bool {
    let identity = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    let (ours, named) = (file.metadata().map(identity), std::fs::metadata(path).map(identity));
    matches!((ours, named), (Ok(ours), Ok(named)) if ours == named)
}

fn no_store(path: &Path) -> Error {
    Error::mismatch(format!("the file {} is no store of this version", path.display()))
        .in_operation("store open", None)
        .with_remedy("name another file, or remove this one if no job uses it")
}

fn in_doubt(path: &Path, silence: Duration) -> Error {
    let seconds = silence.as_secs_f64();
    let cause = format!(
        "the file {} is there, and the time was up before it was known whether others use it",
        path.display()
    );
    Error::timeout(cause).in_operation("store open", None).with_remedy(format!(
        "raise the time-out above the {seconds:.0} s for which others may be silent, or remove the file if no job uses it"
    ))
}

fn unusable(path: &Path, verb: &str, error: io::Error) -> Error {
    let remedy = match error.kind() {
        io::ErrorKind::Unsupported => "name a file on another file system, or meet over TCP",
        io::ErrorKind::InvalidInput => "name another file",
        _ => "is its folder there, and may every rank write in it?",
    };
    Error::io(format!("cannot {verb} the store's file {}", path.display()), error).with_remedy(remedy)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileTypeExt;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::interrupt::interruptible;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(60))
    }

    #[test]
    fn who_meets_in_a_file_finds_those_who_use_it_and_nobody_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        // A thread of a busy machine may be silent for seconds.
        let silence = Duration::from_secs(5);
        let meet = || FileStore::open_or_create(&path, silence, soon()).unwrap();
        meet().set("left", b"behind", soon()).unwrap();
        // No process uses it any more: the next ones get the same new one, as long as one of them writes.
        let there = AtomicU32::new(0);
        std::thread::scope(|scope| {
            let come = || {
                let (store, limit) = (meet(), soon());
                there.fetch_add(1, Ordering::Relaxed);
                let mut beat = 0;
                while there.load(Ordering::Relaxed) < 4 && !limit.has_passed() {
                    beat += 1;
                    store.add("beats", 1, soon()).unwrap();
                    std::thread::sleep(Duration::from_millis(10));
                }
                (store, beat)
            };
            let met: Vec<_> = (0..4).map(|_| scope.spawn(come)).collect();
            let mut beats = 0;
            for thread in met {
                let (store, beat) = thread.join().unwrap();
                assert!(store.is_current() && !store.check(&["left"], soon()).unwrap());
                beats += beat;
            }
            let all = FileStore::open(&path, soon()).unwrap();
            assert_eq!(all.add("beats", 0, soon()).unwrap(), beats);
        });
    }

    /// On a network file system a host may see late what another has written.
    #[test]
    fn a_store_that_is_seen_to_be_used_when_it_is_locked_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        let store = FileStore::create(&path).unwrap();
        let length = || store.log.lock().length().unwrap();
        let is_unused = |length| is_unused(&store.log.lock(), length, &path).unwrap();
        let before = length();
        assert!(is_unused(before));
        store.set("used", b"", soon()).unwrap();
        assert!(!is_unused(before) && is_unused(length()));
        // Another process has replaced it.
        let _other = FileStore::create(&path).unwrap();
        assert!(!is_unused(length()));
    }

    #[test]
    fn who_has_less_time_than_the_others_may_be_silent_does_not_take_their_store_for_an_unused_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        let store = FileStore::create(&path).unwrap();
        let (silence, brief) = (Duration::from_secs(60), Deadline::after(Duration::from_millis(20)));
        let error = FileStore::open_or_create(&path, silence, brief).unwrap_err();
        assert!(error.is_timeout() && error.remedy().is_some(), "{error}");
        assert!(error.to_string().contains("whether others use it"), "{error}");
        assert!(store.is_current());
    }

    #[test]
    fn what_is_no_store_is_neither_waited_for_by_those_who_meet_there_nor_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        std::fs::write(&path, "something else").unwrap();
        let error = FileStore::open_or_create(&path, Duration::from_millis(20), soon()).unwrap_err();
        assert!(!error.is_timeout() && error.to_string().contains("is no store"), "{error}");
        assert!(error.remedy().unwrap().contains("name another file"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "something else");
    }

    #[test]
    fn a_torn_end_is_ignored_and_then_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        let store = FileStore::create(&path).unwrap();
        store.set("a", b"1", soon()).unwrap();
        let whole = std::fs::read(&path).unwrap();
        store.set("torn", b"never finished", soon()).unwrap();
        let full = std::fs::read(&path).unwrap();
        for end in whole.len()..full.len() {
            std::fs::write(&path, &full[..end]).unwrap();
            let other = FileStore::open(&path, soon()).unwrap();
            assert_eq!(other.num_keys(soon()).unwrap(), 1, "cut at {end}");
            other.set("b", b"2", soon()).unwrap();
            let third = FileStore::open(&path, soon()).unwrap();
            assert_eq!(third.multi_get(&["a", "b"], soon()).unwrap(), [b"1", b"2"]);
            assert!(!third.check(&["torn"], soon()).unwrap());
        }
    }

    #[test]
    fn a_store_that_something_else_has_cut_is_named_and_not_taken_for_an_earlier_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        let store = FileStore::create(&path).unwrap();
        store.set("a", b"1", soon()).unwrap();
        let length = std::fs::metadata(&path).unwrap().len();
        store.set("cut off", b"2", soon()).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
        for error in [store.check(&["a"], soon()).unwrap_err(), store.set("b", b"3", soon()).unwrap_err()] {
            assert!(error.to_string().contains("something else than a store has cut it"), "{error}");
        }
        assert_eq!(std::fs::metadata(&path).unwrap().len(), length);
    }

    #[test]
    fn what_is_not_a_store_is_waited_for_and_then_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        let short = || Deadline::after(Duration::from_millis(20));
        let error = FileStore::open(&path, short()).unwrap_err();
        assert!(error.is_timeout() && error.to_string().contains("does not exist"), "{error}");
        std::fs::write(&path, [7; 100]).unwrap();
        let error = FileStore::open(&path, short()).unwrap_err();
        assert!(error.to_string().contains("holds no store"), "{error}");
        let error = FileStore::create(folder.path().join("no/such/folder")).unwrap_err();
        assert!(error.to_string().contains("no/such/folder") && error.remedy().is_some(), "{error}");
        // Creation replaces an existing file.
        let store = FileStore::create(&path).unwrap();
        assert_eq!(FileStore::open(&path, soon()).unwrap().num_keys(soon()).unwrap(), 0);
        drop(store);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_system_without_hard_links_is_named() {
        let refused = |errno: Errno| unlinked(errno.into());
        for errno in [Errno::PERM, Errno::OPNOTSUPP, Errno::NOSYS] {
            let error = unusable(Path::new("/mnt/store"), "create", refused(errno));
            let said = error.to_string();
            assert!(said.contains("no hard links") && said.contains("another file system"), "{said}");
        }
        assert_eq!(refused(Errno::EXIST).kind(), io::ErrorKind::AlreadyExists);
        let error = FileStore::create("/").unwrap_err();
        assert!(error.to_string().contains("regular file") && error.remedy().is_some(), "{error}");
        let error = FileStore::create("no such folder/..").unwrap_err();
        assert!(error.to_string().contains("does not end in the name of a file"), "{error}");
    }

    #[test]
    fn a_pipe_is_no_store_and_holds_nobody_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RWXU).unwrap();
        let error = FileStore::create(&path).unwrap_err().to_string();
        assert!(error.contains("no regular file"), "{error}");
        assert!(std::fs::metadata(&path).unwrap().file_type().is_fifo());
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || tell.send(FileStore::open(&path, Deadline::now()).err()));
        let error = told.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
        assert!(error.is_timeout() && error.to_string().contains("holds no store"), "{error}");
    }

    #[test]
    fn a_store_that_was_replaced_knows_it_and_leaves_the_new_one_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        let old = FileStore::create(&path).unwrap();
        assert!(old.is_current());
        let new = FileStore::create(&path).unwrap();
        assert!(!old.is_current() && new.is_current());
        drop(old);
        assert!(path.exists());
    }

    #[test]
    fn a_lock_that_is_held_costs_no_more_than_the_deadline() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        let store = FileStore::create(&path).unwrap();
        store.set("there", b"before", soon()).unwrap();
        let file = File::open(&path).unwrap();
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
        let error = store.set("a", b"1", Deadline::after(Duration::from_millis(30))).unwrap_err();
        let said = error.to_string();
        assert!(
            error.is_timeout() && said.contains("set(\"a\")") && said.contains("held the lock"),
            "{said}"
        );
        // Whoever only asks what is there does not need it.
        let questions: [(&str, &[u8], &[u8]); 2] = [("there", b"?", b"?"), ("not there", b"?", b"?")];
        assert_eq!(store.multi_compare_set(&questions, soon()).unwrap(), [&b"before"[..], b"?"]);
        let change: [(&str, &[u8], &[u8]); 2] = [questions[0], ("not there", b"", b"")];
        let soon_over = Deadline::after(Duration::from_millis(30));
        assert!(store.multi_compare_set(&change, soon_over).unwrap_err().is_timeout());
        // Whoever waits for it looks up from that.
        let ended = interruptible(|| Err(Error::aborted("enough")), || store.set("a", b"1", soon()));
        assert!(ended.as_ref().is_err_and(Error::is_aborted), "{ended:?}");
        drop(file);
        store.set("a", b"1", soon()).unwrap();
    }
}
