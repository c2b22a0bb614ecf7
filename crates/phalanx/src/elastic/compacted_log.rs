//! The workers' log, with compaction: its old entries are replaced by the state after them, as in Raft.
//!
//! ```text
//! base          the index of the first entry that counts; the entries before it are in
//! state/<base>  the state after all entries before that one
//! trimmed       entries before this one have been removed
//! ```
//!
//! A new reader takes the state at `base` and reads on from there. One of the workers moves `base` forward to the last
//! multiple of [`STRIDE`] that it has passed, where all have the same state, and then removes the entries before it. If it
//! dies meanwhile, the next one finds in `trimmed` what is left to remove.
//!
//! A process that was stopped may be behind `base` when it wakes. So a reader asks for `base` with each entry, in one request:
//! an entry before `base` does not count. A writer asks for `base` afterwards: if `base` has passed the entry's index, the
//! entry may have been written where another one was removed, and the writer cannot know whether another process has read it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::members::{Entry, MembersState};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::rendezvous::membership::{Log, log};
use crate::store::{SharedStore, Store};

/// How many entries lie between two states.
pub(super) const STRIDE: u64 = 64;

const BASE: &str = "base";
const TRIMMED: &str = "trimmed";
/// After how many removed entries `trimmed` moves: the time may be up before all of them are.
const MARK: u64 = 16;
/// The version byte of a state, as of an entry.
const VERSION: u8 = 1;
/// How long the store may take to answer a request that does not wait.
const ANSWER: Duration = Duration::from_secs(30);
/// How long to wait for a state that may have been removed.
const MOMENT: Duration = Duration::from_millis(200);

/// The end of the log, for appending. Several threads may append at once: the store gives the entries one order, and no
/// thread waits longer than its own deadline because of another.
pub(super) struct CompactedLog {
    store: SharedStore,
    /// All entries before this index are known to exist, or to have existed.
    end: AtomicU64,
}

/// The result of [`read`].
#[derive(Debug, PartialEq)]
pub(super) enum Read {
    Entry(Entry),
    /// It has been removed: the state after it, and the index of the next.
    Behind(MembersState, u64),
}

impl CompactedLog {
    pub(super) fn new(store: SharedStore) -> Self {
        Self { store, end: AtomicU64::new(0) }
    }

    /// Appends `entry`, and repeats that until it is certain; the entry must be one that may be in the log twice.
    pub(super) fn append(&self, entry: &Entry, deadline: Deadline) -> Result<()> {
        while self.try_append(entry, deadline)?.is_none() {}
        Ok(())
    }

    /// Appends `entry`, and returns its index; `None` if it may have been lost.
    pub(super) fn try_append(&self, entry: &Entry, deadline: Deadline) -> Result<Option<u64>> {
        let mut log = Log::new(SharedStore::clone(&self.store));
        log.skip_to(self.end.load(Ordering::Relaxed).max(base(&*self.store, deadline)?));
        let index = log.append(&entry.to_bytes()?, deadline);
        self.end.fetch_max(log.end(), Ordering::Relaxed);
        self.confirm(index?, deadline)
    }

    /// Is the entry written at `index` certainly in the log?
    fn confirm(&self, index: u64, deadline: Deadline) -> Result<Option<u64>> {
        if base(&*self.store, deadline)? <= index {
            return Ok(Some(index));
        }
        self.store.delete_key(&log::key(index), deadline)?;
        Ok(None)
    }
}

/// The state to begin with, and the index of the next entry.
pub(super) fn begin(store: &dyn Store, deadline: Deadline) -> Result<(MembersState, u64)> {
    loop {
        let index = base(store, deadline)?;
        if index == 0 {
            return Ok((MembersState::default(), 0));
        }
        match store.get(&state_key(index), deadline.at_most(MOMENT)) {
            // Removed between the wait for it and the answer: `base` has moved.
            Ok(bytes) if bytes.is_empty() && !deadline.has_passed() => {}
            Ok(bytes) => {
                let state: MembersState = log::decode(VERSION, &bytes, "another worker")?;
                let strange = || Error::protocol("the state of the workers' log makes no sense");
                return state.is_sound().then_some((state, index)).ok_or_else(strange);
            }
            // It has just been removed, and there is a newer one.
            Err(error) if error.is_timeout() && !deadline.has_passed() => {}
            Err(error) => return Err(error),
        }
    }
}

/// Reads the entry at `index`, and waits for it. A time-out means that there is none yet.
pub(super) fn read(store: &dyn Store, index: u64, deadline: Deadline) -> Result<Read> {
    let found = match store.multi_get(&[&log::key(index), BASE], deadline) {
        Ok(found) => Some(found),
        // What has been removed never comes.
        Err(error) if error.is_timeout() && answer(|deadline| base(store, deadline))? > index => None,
        Err(error) => return Err(error),
    };
    match found.as_deref() {
        Some([entry, base]) if number(base)? <= index => Entry::from_bytes(entry).map(Read::Entry),
        _ => answer(|deadline| begin(store, deadline)).map(|(state, next)| Read::Behind(state, next)),
    }
}

/// What a store says that waits for nobody; none in time is no time-out, which would say that nothing is new. It is asked
/// twice, as this process may have been stopped in between.
fn answer<T>(ask: impl Fn(Deadline) -> Result<T>) -> Result<T> {
    let is_late = |answer: &Result<T>| answer.as_ref().is_err_and(Error::is_timeout);
    let mut answer = ask(Deadline::after(ANSWER));
    if is_late(&answer) {
        answer = ask(Deadline::after(ANSWER));
    }
    if !is_late(&answer) {
        return answer;
    }
    answer.map_err(|error| {
        Error::environment("the store in which the workers meet does not answer")
            .with_source(error)
            .with_remedy("is the launcher that serves it still there, and can its host be reached?")
    })
}

/// Moves `base` to `index`, a multiple of [`STRIDE`], where the log has led to `state`, and removes what is before it.
pub(super) fn trim(store: &dyn Store, index: u64, state: &MembersState, deadline: Deadline) -> Result<()> {
    let old = base(store, deadline)?;
    if old >= index {
        return Ok(());
    }
    store.set(&state_key(index), &log::encode(VERSION, state)?, deadline)?;
    let new = index.to_string();
    let now = store.compare_set(BASE, old.to_string().as_bytes(), new.as_bytes(), deadline)?;
    if now != new.as_bytes() {
        // Another process was faster. Where both wanted the same, it is the same state.
        if number(&now)? > index {
            store.delete_key(&state_key(index), deadline)?;
        }
        return Ok(());
    }
    let from = u64::try_from(store.add(TRIMMED, 0, deadline)?).unwrap_or(0);
    let mut noted = from;
    for entry in from..index {
        store.delete_key(&log::key(entry), deadline)?;
        if entry > 0 && entry.is_multiple_of(STRIDE) {
            store.delete_key(&state_key(entry), deadline)?;
        }
        let end = entry + 1;
        if end.is_multiple_of(MARK) || end == index {
            store.compare_set(TRIMMED, noted.to_string().as_bytes(), end.to_string().as_bytes(), deadline)?;
            noted = end;
        }
    }
    Ok(())
}

fn base(store: &dyn Store, deadline: Deadline) -> Result<u64> {
    // Nothing is added: it is there afterwards.
    Ok(u64::try_from(store.add(BASE, 0, deadline)?).unwrap_or(0))
}

fn number(text: &[u8]) -> Result<u64> {
    let number = str::from_utf8(text).ok().and_then(|text| text.parse().ok());
    number.ok_or_else(|| Error::protocol("the begin of the workers' log is no number"))
}

fn state_key(index: u64) -> String {
    format!("state/{index}")
}

#[cfg(any(test, fuzzing))]
mod outside;
#[cfg(test)]
mod tests;

#[cfg(any(test, fuzzing))]
pub use outside::fuzz;
