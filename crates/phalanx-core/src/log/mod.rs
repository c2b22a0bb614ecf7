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
//! its turn, and each writes when the one before it has written. That is three or four requests a writer. The line is no reservation. A place is
//! written when the one before it is, whoever wrote that, so no writer that dies leaves a hole. A writer that has waited in vain for a second, or far
//! from the store for three, leaves the line, and tries as if it had just come. A store that a launcher serves makes each write of the line itself,
//! as soon as the one before it is there ([`multi_compare_set_after`](crate::store::Store::multi_compare_set_after)). So a line costs three round
//! trips, however long it is.
//!
//! A reader asks for the next entry, and in the same request for those that are there after it (`AHEAD`). So a reader that is behind
//! needs a few round trips to read what many have written at once, and not one for each entry.
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
use std::time::{Duration, Instant};

pub use phalanx_proto::log::liveness::ENDED;
pub use phalanx_proto::log::mac::Mac;
use phalanx_proto::log::mac::Verified;
pub use phalanx_proto::log::{Machine, decode, encode};

#[cfg(test)]
pub(crate) use self::compaction::STRIDE;
use self::compaction::{BASE, NO_BASE, number};
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub use self::outside::read_all;
pub(crate) use self::participant::from_a_random_one;
pub use self::participant::{AFTER_STANDSTILL, Heartbeats, Participant, awake, stood_still};
pub use self::replica::{Replica, View};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::store::SharedStore;

/// How long a writer waits for the one before it in line: the first near the store, the second far from it. That one has died, or the network is
/// slow; then those that leave the line make a few requests more. Each packet that is lost holds up all behind its writer: of thousands some lose
/// two in turn, and those behind come to their turn only if they stay.
const LINE_TIMEOUTS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(3));
/// So many times as long as the store has taken to answer a writer it waits in the line, within these limits.
const ANSWERS: u32 = 15;

/// A longer line is nonsense in the store.
const LONGEST_LINE: u64 = 1 << 20;

/// What no entry is.
const NO_ENTRY: &[u8] = b"?";

/// How many entries a reader asks for, after the one that it waits for: first so many, and twice as many each time that all were there, up to
/// the second number. So many fit into one packet of requests.
const AHEAD: (u64, u64) = (16, 128);

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
    /// Its bytes, and those of entries that follow it without a gap.
    Entries(Vec<Vec<u8>>),
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
        // The place that this writer has found taken, if it waits in the line there, and for how long.
        let mut line: Option<(u64, Duration)> = None;
        loop {
            let signed = self.mac.sign(index, &entry);
            let waits = line.map(|(_, timeout)| timeout);
            let Some(Written { before, found, base }) = self.write(index, &signed, waits, deadline)? else {
                // It leaves the line.
                let next = line.take().map_or(index, |(taken, _)| taken + 1);
                index = next.max(self.end.load(Ordering::Relaxed));
                continue;
            };
            self.end.fetch_max(base.max(index + 1), Ordering::Relaxed);
            if found == signed {
                if before <= index || index == 0 {
                    return self.confirm(index, base, deadline);
                }
                // It was behind the base when it was written: nobody has read it. This writer has only just come.
                self.store.delete_keys(&[&key(index)], deadline)?;
            }
            let asked = Instant::now();
            // Behind the base there is no line.
            let next = if base > index { base } else { index + self.turn_in_line(index, deadline)? };
            // This process's reader may have come further. Then the place before is known to be taken, as it is for the first in the line.
            let end = self.end.load(Ordering::Relaxed);
            line = (next > end).then(|| (index, line_timeout(asked.elapsed())));
            index = next.max(end);
        }
    }

    /// Writes `signed` at `index`, if nothing is there; if it `waits`, as soon as the place before is taken. None if that is not taken
    /// within this time, and nothing was written.
    fn write(
        &self,
        index: u64,
        signed: &[u8],
        waits: Option<Duration>,
        deadline: Deadline,
    ) -> Result<Option<Written>> {
        let (key, before) = (key(index), key(index.saturating_sub(1)));
        // The first and the last change nothing, and say where the log begins.
        let begin = (BASE, NO_BASE, NO_BASE);
        let changes = [begin, (key.as_str(), &b""[..], signed), begin];
        let changes = if M::COMPACTION.is_some() { &changes[..] } else { &changes[1..2] };
        let found = if let Some(timeout) = waits {
            let until = deadline.at_most(timeout);
            self.store.multi_compare_set_after(&before, changes, until, deadline)?
        } else {
            Some(self.store.multi_compare_set(changes, deadline)?)
        };
        let Some(mut found) = found else { return Ok(None) };
        if M::COMPACTION.is_none() {
            return Ok(Some(Written { before: 0, found: found.pop().unwrap_or_default(), base: 0 }));
        }
        let [before, found, base] = <[Vec<u8>; 3]>::try_from(found).unwrap_or_default();
        Ok(Some(Written { before: number::<M>(&before)?, found, base: number::<M>(&base)? }))
    }

    /// Stands in line with those that have found the place `taken`. Returns this writer's turn, from 1 on: the place that is so far behind
    /// is its to try, when the one before it is taken.
    fn turn_in_line(&self, taken: u64, deadline: Deadline) -> Result<u64> {
        let turn = match self.store.add(&line_key(taken), 1, deadline) {
            // The store's answer is lost, as with the leader of an etcd cluster. A line only saves attempts.
            Err(error) if error.is_timeout() && !deadline.has_passed() => return Ok(1),
            turn => turn?,
        };
        Ok(u64::try_from(turn).ok().filter(|turn| (1..=LONGEST_LINE).contains(turn)).unwrap_or(1))
    }

    /// Reads the entry at `index`, and waits for it. A time-out means that it does not exist yet.
    #[cfg(any(test, fuzzing, feature = "fuzzing"))]
    pub fn read(&self, index: u64, deadline: Deadline) -> Result<Read<M>> {
        match self.fetch(index, 0, deadline, &mut || Ok(Turn::Next))? {
            Fetched::Entries(found) => self.decode(index, found.first().map_or(&[][..], Vec::as_slice)),
            Fetched::Compacted(state, next) => Ok(Read::Compacted(state, next)),
        }
    }

    /// Fetches the entry at `index`, and waits for it; and up to `ahead` entries after it that are there when it asks. While it waits it calls
    /// `go_on` several times a second; an error of that ends the wait. A reader that waits for the next entry also asks whether it has been removed. The
    /// wait itself is one request: on a slow network a wait in parts would never see its answer.
    fn fetch(
        &self,
        index: u64,
        ahead: u64,
        deadline: Deadline,
        go_on: &mut dyn FnMut() -> Result<Turn>,
    ) -> Result<Fetched<M>> {
        let later: Vec<String> = (1..=ahead).map(|more| key(index + more)).collect();
        let fetched = match M::COMPACTION {
            Some(_) => self.fetch_compacted(index, &later, deadline, go_on)?,
            None => {
                let mut followers = Vec::new();
                let mut note = |answers: &[Vec<u8>]| {
                    followers = those_there(answers);
                    Ok(())
                };
                let (asked, mut go_on) = (key(index), || go_on().map(drop));
                let found = self.store.compare_set_and_get(
                    &questions(&later),
                    &[&asked],
                    deadline,
                    &mut note,
                    &mut go_on,
                )?;
                let entry = found.into_iter().next().unwrap_or_default();
                Fetched::Entries(std::iter::once(entry).chain(followers).collect())
            }
        };
        // A writer need not try the places before.
        let next = match &fetched {
            Fetched::Entries(entries) => index + entries.len() as u64,
            Fetched::Compacted(_, next) => *next,
        };
        self.end.fetch_max(next, Ordering::Relaxed);
        Ok(fetched)
    }

    /// Decodes what was fetched for `index`. The error is about that entry alone: the entries before it count.
    fn decode(&self, index: u64, bytes: &[u8]) -> Result<Read<M>> {
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

/// What asks for these entries, whether they are there or not, and changes nothing.
fn questions(keys: &[String]) -> Vec<(&str, &[u8], &[u8])> {
    keys.iter().map(|key| (key.as_str(), NO_ENTRY, NO_ENTRY)).collect()
}

/// The entries before the first that is not there.
fn those_there(answers: &[Vec<u8>]) -> Vec<Vec<u8>> {
    answers.iter().take_while(|answer| *answer != NO_ENTRY).cloned().collect()
}

/// The key of the entry at `index`.
fn key(index: u64) -> String {
    format!("log/{index}")
}

/// How long a writer waits in the line that the store has last answered after so long.
fn line_timeout(answer: Duration) -> Duration {
    (answer * ANSWERS).clamp(LINE_TIMEOUTS.0, LINE_TIMEOUTS.1)
}

/// The counter of those that have found the place `index` taken.
fn line_key(index: u64) -> String {
    format!("line/{index}")
}

#[cfg(test)]
mod tests;
