//! A replicated log: a list of entries in a store, to which many processes append and which all read in one order.
//!
//! Each process applies every entry to its own copy of a pure state [`Machine`], its [`Replica`]. Two processes that have read
//! equally far are in the same state, and no process leads. An entry that does not apply any more when it is read has no
//! effect.
//!
//! ```text
//! log/<n>       entry n: a version byte and the entry; in front of it a MAC, if the log has a key
//! line/<n>      how many have found place n taken
//! base          the index of the first entry that still counts                   (in a log that is compacted)
//! state/<base>  the state after all entries before that one, with a MAC as well  (the same)
//! state/<base>/<part>  a part of it, if it is long                               (the same)
//! trimmed       entries before this one have been removed, but for the first     (the same)
//! ```
//!
//! Any store will do, since an entry needs no more than [`compare_set`](crate::store::Store::compare_set) on a key that does not exist.
//!
//! A writer tries the first place that it does not know to be taken. If many try that at once, one gets it. If the others all went on to the
//! next place, one of them would get that, and so on: `n` writers would make `n * n / 2` requests. So they stand in line: `line/<n>` gives each
//! its turn, and each waits until the one before it has written. That is four requests a writer. The line is no reservation. A place is
//! written when the one before it is, whoever wrote that, so no writer that dies leaves a hole. Whoever has waited in vain for a second leaves
//! the line, and tries as if it had just come.
//!
//! [`Log`] appends, reads and compacts. A [`Participant`] runs its threads: one or two read the log into the replica, another
//! sends this process's heartbeats, appends the processes that have become silent, and compacts the log if that is this process's task.
//!
//! A store may be one that does not know the job's key, such as etcd or a file; therefore the MACs.

mod compaction;
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
mod outside;
mod participant;
mod replica;
mod standstill;

use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

pub use phalanx_proto::log::liveness::ENDED;
pub use phalanx_proto::log::mac::Mac;
use phalanx_proto::log::mac::Verified;
pub use phalanx_proto::log::{Machine, decode, encode};

#[cfg(test)]
pub(crate) use self::compaction::STRIDE;
use self::compaction::{BASE, NO_BASE, number};
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub use self::outside::read_all;
pub use self::participant::{AFTER_STANDSTILL, Heartbeats, Participant, awake, stood_still};
pub use self::replica::{Replica, View};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::store::SharedStore;

/// How long a writer waits for the one before it in line. That one has died, or the network is slow; then those that leave the line make a
/// few requests more.
const LINE_TIMEOUT: Duration = Duration::from_secs(1);

/// A longer line is nonsense in the store.
const LONGEST_LINE: u64 = 1 << 20;

/// A log in a store. Several threads may append at once: the store gives the entries one order, and no thread waits longer
/// than its own deadline because of another.
pub struct Log<M> {
    store: SharedStore,
    mac: Mac,
    /// All entries before this index are known to exist, or to have existed.
    end: AtomicU64,
    /// Whether the key of the base is known to exist.
    has_base: AtomicBool,
    machine: PhantomData<fn() -> M>,
}

/// What the store has for an entry. Entries may be fetched out of their order, and are decoded in it.
enum Fetched<M> {
    /// Its bytes.
    Entry(Vec<u8>),
    /// The entry has been removed: the state after it, and the index of the next entry.
    Compacted(M, u64),
}

/// Whether a reader waits for the next entry of all, or for a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Next,
    Later,
}

/// What a writer has found.
struct Written {
    /// The base before it wrote.
    before: u64,
    /// What is in the place now.
    found: Vec<u8>,
    /// The base afterwards.
    base: u64,
}

/// A decoded entry.
#[derive(Debug, PartialEq)]
pub enum Read<M: Machine> {
    Entry(M::Entry),
    /// The entry has no valid MAC. All processes skip it, so that all see the same entries.
    Forged,
    /// The entry has been removed: the state after it, and the index of the next entry.
    Compacted(M, u64),
}

impl<M: Machine> Log<M> {
    pub fn new(store: SharedStore, mac: Mac) -> Self {
        let (end, has_base) = (AtomicU64::new(0), AtomicBool::new(false));
        Self { store, mac, end, has_base, machine: PhantomData }
    }

    /// Appends `entry`, and repeats that until it is certainly in the log. The entry may then be in the log twice.
    pub fn append(&self, entry: &M::Entry, deadline: Deadline) -> Result<()> {
        while self.try_append(entry, deadline)?.is_none() {}
        Ok(())
    }

    /// Appends `entry`, and returns its index; `None` if it may have been lost, which only happens in a log that is compacted.
    /// An equal entry that is found at the end of the log is taken for this one.
    pub fn try_append(&self, entry: &M::Entry, deadline: Deadline) -> Result<Option<u64>> {
        let entry = encode(M::VERSION, entry)?;
        if !self.has_base.load(Ordering::Relaxed) {
            self.end.fetch_max(self.base(deadline)?, Ordering::Relaxed);
        }
        let mut index = self.end.load(Ordering::Relaxed);
        loop {
            let signed = self.mac.sign(index, &entry);
            let Written { before, found, base } = self.write(index, &signed, deadline)?;
            self.end.fetch_max(base.max(index + 1), Ordering::Relaxed);
            if found == signed {
                if before <= index || index == 0 {
                    return self.confirm(index, base, deadline);
                }
                // It was behind the base when it was written: nobody has read it. This writer has only just come.
                self.store.delete_keys(&[&key(index)], deadline)?;
            }
            // Behind the base there is no line.
            let next = if base > index { base } else { self.wait_in_line(index, deadline)? };
            // This process's reader may have come further.
            index = next.max(self.end.load(Ordering::Relaxed));
        }
    }

    /// Writes `signed` at `index`, if nothing is there.
    fn write(&self, index: u64, signed: &[u8], deadline: Deadline) -> Result<Written> {
        let key = key(index);
        if M::COMPACTION.is_none() {
            let found = self.store.compare_set(&key, b"", signed, deadline)?;
            return Ok(Written { before: 0, found, base: 0 });
        }
        let mut now = Vec::new();
        let mut found = |values: &[Vec<u8>]| {
            now = values.to_vec();
            Ok(())
        };
        // The first changes nothing, and says what is there.
        let changes = [(BASE, NO_BASE, NO_BASE), (key.as_str(), &b""[..], signed)];
        let values =
            self.store.compare_set_and_get(&changes, &[BASE], deadline, &mut found, &mut || Ok(()))?;
        let base = number::<M>(values.first().map_or(&[][..], Vec::as_slice))?;
        let mut now = now.into_iter();
        let before = number::<M>(&now.next().unwrap_or_default())?;
        Ok(Written { before, found: now.next().unwrap_or_default(), base })
    }

    /// Waits until those that have found the place `taken` before this writer have written. Returns the place to try next.
    fn wait_in_line(&self, taken: u64, deadline: Deadline) -> Result<u64> {
        let turn = match self.store.add(&line_key(taken), 1, deadline) {
            // The store's answer is lost, as with the leader of an etcd cluster. A line only saves attempts.
            Err(error) if error.is_timeout() && !deadline.has_passed() => return Ok(taken + 1),
            turn => turn?,
        };
        // The first need not wait.
        let Ok(turn @ 2..=LONGEST_LINE) = u64::try_from(turn) else { return Ok(taken + 1) };
        let before = taken + turn - 1;
        match self.store.wait(&[&key(before)], deadline.at_most(LINE_TIMEOUT)) {
            // Whoever has written there has found all places before it taken.
            Ok(()) => Ok(before + 1),
            Err(error) if error.is_timeout() && !deadline.has_passed() => Ok(taken + 1),
            Err(error) => Err(error),
        }
    }

    /// Reads the entry at `index`, and waits for it. A time-out means that it does not exist yet.
    #[cfg(any(test, fuzzing, feature = "fuzzing"))]
    pub fn read(&self, index: u64, deadline: Deadline) -> Result<Read<M>> {
        let found = self.fetch(index, deadline, &mut || Ok(Turn::Next))?;
        self.decode(index, found)
    }

    /// Fetches the entry at `index`, and waits for it. While it waits it calls `go_on` several times a second; an error of that ends
    /// the wait. Who waits for the next entry also asks whether it has been removed. The wait itself is one request: on a slow network a
    /// wait in parts would never see its answer.
    fn fetch(
        &self,
        index: u64,
        deadline: Deadline,
        go_on: &mut dyn FnMut() -> Result<Turn>,
    ) -> Result<Fetched<M>> {
        let fetched = match M::COMPACTION {
            Some(_) => self.fetch_compacted(index, deadline, go_on)?,
            None => {
                let mut go_on = || go_on().map(drop);
                let found = self.store.set_and_get(&[], &[&key(index)], deadline, &mut go_on)?;
                Fetched::Entry(found.into_iter().next().unwrap_or_default())
            }
        };
        // A writer need not try the places before.
        let next = if let Fetched::Compacted(_, next) = &fetched { *next } else { index + 1 };
        self.end.fetch_max(next, Ordering::Relaxed);
        Ok(fetched)
    }

    /// Decodes what was fetched for `index`. The error is about that entry alone: the entries before it count.
    fn decode(&self, index: u64, fetched: Fetched<M>) -> Result<Read<M>> {
        match fetched {
            Fetched::Entry(bytes) => self.decode_at(index, &bytes),
            Fetched::Compacted(state, next) => Ok(Read::Compacted(state, next)),
        }
    }

    fn decode_at(&self, index: u64, bytes: &[u8]) -> Result<Read<M>> {
        match self.mac.verify(index, bytes) {
            Verified::Content(entry) => decode(M::VERSION, entry, M::AUTHOR).map(Read::Entry),
            Verified::Forged => Ok(Read::Forged),
            Verified::Keyless => Err(keyless::<M>()),
        }
    }
}

/// Why a process without a key cannot read the log.
fn keyless<M: Machine>() -> Error {
    let cause = format!("the {}s of this job sign their entries with a key", M::PROCESS);
    Error::protocol(cause).with_remedy("give this one the same --job-key-file")
}

/// The key of the entry at `index`.
fn key(index: u64) -> String {
    format!("log/{index}")
}

/// The counter of those that have found the place `index` taken.
fn line_key(index: u64) -> String {
    format!("line/{index}")
}

#[cfg(test)]
mod tests;
