//! Compaction: old entries are replaced by the state after them, as in Raft.
//!
//! A new reader takes the state at `base` and reads on from there. One of the processes, the caretaker, moves `base` forward to the last
//! multiple of [`STRIDE`] that it has passed, where all have the same state, and then removes the entries before it. If it
//! dies meanwhile, the next one finds in `trimmed` what is left to remove. Two that both take themselves for the caretaker do no harm: the
//! state comes before `base`, which moves forward only, and by `compare_set`.
//!
//! The caretaker waits until the state is as old as the silence after which a process is given up. So the entries of that time are kept, and
//! nobody who is still counted is behind `base` for long.
//!
//! A process that was stopped may be behind `base` when it wakes. So a reader asks for `base` with each entry, in one request:
//! an entry before `base` does not count, and one that is missing there is no end of the log. A writer asks for `base` before and afterwards,
//! in the same request. If `base` had passed the entry's index before, the entry was written where another one was removed: nobody has read
//! it, and the writer tries a later place. If `base` has passed it afterwards alone, the writer cannot know whether another process has read it.
//!
//! With the entries go the keys that belong to them:
//!
//! * The lines. A writer that found a place taken, and was slow then, may count itself in the line after that has been removed. So a line is
//!   removed once more, 64 entries later.
//! * The keys of heartbeats of those that have left, if nobody uses them again (`heartbeats_of`). A process that is named by an entry
//!   that is removed, and is not in the state that has taken its place, had left before that state, which is as old as a silence: those who
//!   are still counted have read that, and watch that process no more. One that has not read it finds no key, and takes that for a counter that does
//!   not move (`beat`). A process that comes back has another number. These keys are removed before the entries: a caretaker that takes over
//!   finds what is left to remove in the entries that are left.
//!
//! A store takes values of a limited size: etcd, unless it is told otherwise, requests of 1.5 MiB, which the state of some 10,000 nodes exceeds. So a
//! longer state is in several values, which are there before the key of the state is, and that before `base`.
//!
//! Entry 0 stays. A process of a version that does not know `base` finds it, and is told that the versions differ. If the entry were gone, that
//! process would write its own there, and be alone in a job of its own. And a newcomer that asks for entry 0 without a look at `base` first has
//! its answer at once.
//!
//! So the store of a job that loses nodes or workers for weeks stays small, and whoever comes late reads little.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use phalanx_proto::log::mac::Verified;

use super::{Fetched, Log, Machine, Read, Turn, key, keyless, line_key, questions, those_there};
use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// How many entries lie between two states.
pub(crate) const STRIDE: u64 = 64;

pub(super) const BASE: &str = "base";
/// What the base never is.
pub(super) const NO_BASE: &[u8] = b"?";
/// The longest part of a state.
pub(super) const PART: usize = 1 << 20;
/// The most parts of a state.
const MAX_PARTS: u8 = 32;
/// The first byte of what says how many parts a state has. No state has this version, and no MAC this mark.
pub(super) const IN_PARTS: u8 = 0xfe;
const TRIMMED: &str = "trimmed";
/// How many entries are removed together, after which `trimmed` moves: the time may be up before all of them are.
const MARK: u64 = 16;
/// A process that waits for an entry asks after these pauses whether it has been removed: they double from the first to the second. The first
/// answer is usually enough, and each process of a large job asks for as long as nothing happens.
const LOOK_INTERVALS: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));
/// How long the store may take to answer a request that does not wait.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

impl<M: Machine> Log<M> {
    /// The state to begin with, and the index of the next entry.
    pub(super) fn begin(&self, deadline: Deadline) -> Result<(M, u64)> {
        let Some(compaction) = M::COMPACTION else { return Ok((M::default(), 0)) };
        loop {
            let index = self.base(deadline)?;
            if index == 0 {
                return Ok((M::default(), 0));
            }
            // A writer need not try the places before.
            self.end.fetch_max(index, Ordering::Relaxed);
            // It may just have been removed; then there is a newer one.
            let mut go_on = || match self.base(deadline)? > index {
                true => Err(Error::timeout("the state has been removed")),
                false => Ok(()),
            };
            match self.get_state(index, deadline, &mut go_on) {
                // Removed between the wait for it and the answer: `base` has moved.
                Ok(bytes) if bytes.is_empty() && !deadline.has_passed() => {}
                Ok(bytes) => return Ok(((compaction.decode)(self.verified_state(index, &bytes)?)?, index)),
                Err(error) if error.is_timeout() && !deadline.has_passed() => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The bytes of the state at `index`, from all its parts; none if it has just been removed.
    fn get_state(
        &self,
        index: u64,
        deadline: Deadline,
        go_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<u8>> {
        let mut get = |key: &str| -> Result<Vec<u8>> {
            let found = self.store.set_and_get(&[], &[key], deadline, &mut *go_on)?;
            Ok(found.into_iter().next().unwrap_or_default())
        };
        let first = get(&state_key(index))?;
        if first.first() != Some(&IN_PARTS) {
            return Ok(first);
        }
        let strange =
            || Error::malformed(format!("the parts of the state in the {}s' log are not valid", M::PROCESS));
        let &[_, count @ 1..=MAX_PARTS] = &first[..] else { return Err(strange()) };
        let mut state = Vec::new();
        for part in 0..count {
            let bytes = get(&part_key(index, part))?;
            if bytes.is_empty() {
                return Ok(bytes);
            }
            if bytes.len() > PART {
                return Err(strange());
            }
            state.extend(bytes);
        }
        Ok(state)
    }

    /// Writes the bytes of the state at `index`, in parts if they are many.
    fn put_state(&self, index: u64, bytes: &[u8], deadline: Deadline) -> Result<()> {
        if bytes.len() <= PART {
            return self.store.set(&state_key(index), bytes, deadline);
        }
        let count = u8::try_from(bytes.len().div_ceil(PART)).ok().filter(|count| *count <= MAX_PARTS);
        let Some(count) = count else {
            let most = usize::from(MAX_PARTS) * PART;
            let cause = format!("the state has {} bytes, and may have {most}", bytes.len());
            return Err(Error::protocol(cause));
        };
        for (part, bytes) in (0..count).zip(bytes.chunks(PART)) {
            self.store.set(&part_key(index, part), bytes, deadline)?;
        }
        self.store.set(&state_key(index), &[IN_PARTS, count], deadline)
    }

    /// The state that the caretaker has written. There is no other way to know what the removed entries said.
    fn verified_state<'a>(&self, index: u64, bytes: &'a [u8]) -> Result<&'a [u8]> {
        match self.mac.verify_state(index, bytes) {
            Verified::Content(state) => Ok(state),
            Verified::Keyless => Err(keyless::<M>()),
            Verified::Forged => {
                let cause =
                    format!("the state in the {}s' log is not signed with this job's key", M::PROCESS);
                Err(Error::protocol(cause).with_remedy(
                    "give all the same --job-key-file; or does another program write to the store, or another job with the same --rdzv-id?",
                ))
            }
        }
    }

    /// [`fetch`](Self::fetch) from a log that is compacted.
    pub(super) fn fetch_compacted(
        &self,
        index: u64,
        later: &[String],
        deadline: Deadline,
        go_on: &mut dyn FnMut() -> Result<Turn>,
    ) -> Result<Fetched<M>> {
        let (mut is_removed, mut looks) = (false, Looks::new());
        let mut watch = || {
            // Of several readers, the one for the next entry asks for all.
            if go_on()? == Turn::Later || !looks.is_due(Instant::now()) {
                return Ok(());
            }
            // An entry that has been removed never comes.
            is_removed = answer::<M, _>(|deadline| self.base(deadline))? > index;
            if is_removed { Err(Error::timeout("the entry has been removed")) } else { Ok(()) }
        };
        let asked = key(index);
        let asked = [asked.as_str(), BASE];
        let mut changes = questions(later);
        if !self.has_base.load(Ordering::Relaxed) {
            // The same request makes the base, if the log is new.
            changes.push((BASE, b"", b"0"));
        }
        let mut followers = Vec::new();
        let mut note = |answers: &[Vec<u8>]| {
            self.has_base.store(true, Ordering::Relaxed);
            followers = those_there(answers.get(..later.len()).unwrap_or_default());
            Ok(())
        };
        let found = self.store.compare_set_and_get(&changes, &asked, deadline, &mut note, &mut watch);
        let found = match found {
            Ok(found) => Some(found),
            Err(error) if error.is_timeout() => {
                if !is_removed && answer::<M, _>(|deadline| self.base(deadline))? <= index {
                    return Err(error);
                }
                None
            }
            Err(error) => return Err(error),
        };
        if let Some([entry, base]) = found.and_then(|found| <[Vec<u8>; 2]>::try_from(found).ok())
            && number::<M>(&base)? <= index
        {
            // The base moves forward only: what was there after this entry before that counts as well.
            return Ok(Fetched::Entries(std::iter::once(entry).chain(followers).collect()));
        }
        let (state, next) = answer::<M, _>(|deadline| self.begin(deadline))?;
        if next <= index {
            return Err(Error::protocol(format!("the begin of the {}s' log has moved back", M::PROCESS))
                .with_remedy("does another program write to the store?"));
        }
        Ok(Fetched::Compacted(state, next))
    }

    /// Returns `index` if the entry that was written there is certainly in the log, whose base was `base` afterwards. Removes the entry
    /// otherwise.
    pub(super) fn confirm(&self, index: u64, base: u64, deadline: Deadline) -> Result<Option<u64>> {
        if base <= index {
            return Ok(Some(index));
        }
        // Entry 0 stays, also if this one is equal to it.
        if index > 0 {
            self.store.delete_keys(&[&key(index)], deadline)?;
        }
        Ok(None)
    }

    /// Moves `base` to `index`, a multiple of [`STRIDE`], where the log has led to `state`, unless it is there or further already. Returns
    /// the index before which all can be removed. It is never above `index`, whatever the store says.
    pub(super) fn replace_entries(&self, state: &M, index: u64, deadline: Deadline) -> Result<u64> {
        let Some(compaction) = M::COMPACTION else { return Ok(0) };
        // A writer need not try the places before.
        self.end.fetch_max(index, Ordering::Relaxed);
        let (store, old) = (&self.store, self.base(deadline)?);
        if old >= index {
            return Ok(index);
        }
        let signed = self.mac.sign_state(index, &(compaction.encode)(state)?);
        self.put_state(index, &signed, deadline)?;
        let new = index.to_string();
        let now = store.compare_set(BASE, old.to_string().as_bytes(), new.as_bytes(), deadline)?;
        if now != new.as_bytes() {
            // Another process was faster. If both wanted the same index, it is the same state.
            let now = number::<M>(&now)?;
            if now > index {
                let keys: Vec<String> = state_keys(index).collect();
                store.delete_keys(&keys.iter().map(String::as_str).collect::<Vec<_>>(), deadline)?;
            }
            return Ok(now.min(index));
        }
        Ok(index)
    }

    /// Removes what is before `end`, but for entry 0; the base is there, or further, and the log has led to `state` there, or later. What was
    /// done is noted: if the time is up before, the next call goes on from there. `trimmed` is how far it has come, also if it fails.
    pub(super) fn trim(&self, state: &M, end: u64, deadline: Deadline, trimmed: &mut u64) -> Result<()> {
        let store = &self.store;
        let mut noted = u64::try_from(store.add(TRIMMED, 0, deadline)?).unwrap_or(0);
        *trimmed = noted;
        while noted < end {
            let mark = (noted + 1).next_multiple_of(MARK).min(end);
            let first = noted.max(1);
            let states = (first..mark).filter(|entry| entry.is_multiple_of(STRIDE));
            let again = first.saturating_sub(STRIDE)..mark.saturating_sub(STRIDE);
            let entries = (first..mark).flat_map(|entry| [key(entry), line_key(entry)]);
            let keys: Vec<String> = self
                .heartbeats_of_gone(state, first..mark, deadline)?
                .into_iter()
                .chain(entries)
                .chain(again.map(line_key))
                .chain(states.flat_map(state_keys))
                .collect();
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            store.delete_keys(&keys, deadline)?;
            let (noted_text, mark_text) = (noted.to_string(), mark.to_string());
            store.compare_set(TRIMMED, noted_text.as_bytes(), mark_text.as_bytes(), deadline)?;
            noted = mark;
            *trimmed = noted;
        }
        Ok(())
    }

    /// The keys of heartbeats of those that these entries name, and that are not there in `state`.
    fn heartbeats_of_gone(&self, state: &M, entries: Range<u64>, deadline: Deadline) -> Result<Vec<String>> {
        let heartbeats_of = M::COMPACTION.and_then(|compaction| compaction.heartbeats_of);
        let Some(heartbeats_of) = heartbeats_of else { return Ok(Vec::new()) };
        let keys: Vec<String> = entries.clone().map(key).collect();
        // This does not wait for what has been removed before.
        let found = self.store.multi_compare_set(&questions(&keys), deadline)?;
        let named = entries.zip(found).filter_map(|(index, bytes)| match self.decode(index, &bytes) {
            Ok(Read::Entry(entry)) => heartbeats_of(&entry),
            // It is not there, or nobody of this job has written it.
            Ok(Read::Forged | Read::Compacted(..)) | Err(_) => None,
        });
        Ok(named.filter(|(id, _)| !state.is_present(*id)).map(|(_, key)| key).collect())
    }

    /// Both, as the caretaker does one after the other.
    #[cfg(test)]
    pub(super) fn compact(&self, state: &M, index: u64, deadline: Deadline) -> Result<()> {
        let end = self.replace_entries(state, index, deadline)?;
        self.trim(state, end, deadline, &mut 0)
    }

    /// The index of the first entry that still counts.
    pub(super) fn base(&self, deadline: Deadline) -> Result<u64> {
        if M::COMPACTION.is_none() {
            return Ok(0);
        }
        // To read costs some stores less than to write.
        if self.has_base.load(Ordering::Relaxed) {
            return number::<M>(&self.store.get(BASE, deadline)?);
        }
        // Adding 0 creates the key, so that later requests find it.
        let base = u64::try_from(self.store.add(BASE, 0, deadline)?).unwrap_or(0);
        self.has_base.store(true, Ordering::Relaxed);
        Ok(base)
    }
}

/// When a process that waits for an entry asks whether it has been removed.
pub(super) struct Looks {
    next: Option<Instant>,
    pause: Duration,
}

impl Looks {
    /// At once, and then less and less often.
    pub(super) fn new() -> Self {
        Self { next: None, pause: LOOK_INTERVALS.0 }
    }

    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.next.is_none_or(|next| next <= now);
        if is_due {
            self.next = Some(now + self.pause);
            self.pause = (self.pause * 2).min(LOOK_INTERVALS.1);
        }
        is_due
    }
}

/// Asks a store for what does not have to be waited for. If no answer comes in time, that is an error, but no time-out: a
/// time-out would mean that there is no new entry. It asks twice, as this process may have been stopped in between.
pub(super) fn answer<M: Machine, T>(ask: impl Fn(Deadline) -> Result<T>) -> Result<T> {
    let is_late = |answer: &Result<T>| answer.as_ref().is_err_and(Error::is_timeout);
    let mut answer = ask(Deadline::after(ANSWER_TIMEOUT));
    if is_late(&answer) {
        answer = ask(Deadline::after(ANSWER_TIMEOUT));
    }
    if !is_late(&answer) {
        return answer;
    }
    answer.map_err(|error| {
        if error.is_local_shortage() {
            return error;
        }
        Error::environment(format!("the store of the {}s does not answer", M::PROCESS))
            .with_source(error)
            .with_remedy("is the launcher that serves it still there, and can its host be reached?")
    })
}

/// The base, as the store has it.
pub(super) fn number<M: Machine>(text: &[u8]) -> Result<u64> {
    let number = str::from_utf8(text).ok().and_then(|text| text.parse::<i64>().ok());
    // A store adds in this type. So there is always a next index.
    let number = number.and_then(|number| u64::try_from(number).ok());
    number.ok_or_else(|| Error::malformed(format!("the begin of the {}s' log is no number", M::PROCESS)))
}

pub(super) fn state_key(index: u64) -> String {
    format!("state/{index}")
}

fn part_key(index: u64, part: u8) -> String {
    format!("state/{index}/{part}")
}

/// The key of the state at `index`, and those that its parts may have.
fn state_keys(index: u64) -> impl Iterator<Item = String> {
    std::iter::once(state_key(index)).chain((0..MAX_PARTS).map(move |part| part_key(index, part)))
}
