//! The controller: which names are ready on all ranks, and in which order all carry them out. Pure: it takes submissions,
//! the other ranks' words and the time, and returns what to send and what to do.
//!
//! A cycle on every rank:
//!
//! 1. [`Controller::submit`] takes what the program has submitted since the last cycle.
//! 2. [`Controller::vector`] gives bits: which known names this rank has, which it knows otherwise, and what it wants.
//! 3. The vectors of all ranks are combined with a bitwise and; [`Controller::combined`] takes the result. In the steady state
//!    that is all: names that all ranks have are ready.
//! 4. If any rank wants more, each sends a [`Message`] to rank 0, where [`Controller::round`] makes a [`Round`] of them,
//!    which goes to all.
//! 5. [`Controller::finish`] gives what is ready, the same in the same order on every rank, and [`fuse`] makes batches of it.
//!
//! A rank may refuse a call that its program makes ([`Controller::refuse`]). That call counts as one of its name: each other rank's call of
//! the name that would have met it ends with the cause ([`Controller::refused`]), also if it is made later, and the next calls meet.

mod cache;
mod coordinator;
mod fusion;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::rank::Rank;

use self::cache::{Cache, Lookup};
use self::coordinator::Coordinator;
pub use self::coordinator::ranks;
pub use self::fusion::{Batch, Fused, Member, fuse, is_alone};
use crate::horovod::message::{MAX_REFUSALS, Message, Refusal, Refused, Response, Round, Settings};
use crate::horovod::request::{Kind, Request, share};

/// How long tensors wait for ranks that lack them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StallTimes {
    /// Until a warning; none without.
    pub warn: Option<Duration>,
    /// Until everything ends.
    pub end: Duration,
}

/// A rank's share of the negotiation.
#[derive(Debug)]
pub struct Controller {
    rank: Rank,
    size: usize,
    stall: StallTimes,
    cache: Cache,
    /// What this rank has in flight.
    pending: BTreeMap<String, Pending>,
    /// Of these, what waits for the others in a slot of the cache.
    hits: BTreeMap<usize, String>,
    /// Of these, what the coordinator has not heard of, in the order of submission.
    unsent: VecDeque<String>,
    /// What this rank has refused and the coordinator has not heard of.
    refusals: VecDeque<Refusal>,
    /// What it has refused while the name was in flight: the others may be in that call.
    later: Vec<Refusal>,
    /// What others have refused, with which calls of this rank end.
    refused: Vec<Refused>,
    /// Slots whose response no longer fits.
    stale: Vec<usize>,
    joined: bool,
    /// It has joined, and the coordinator has not heard of it.
    joins: bool,
    leaves: bool,
    /// The time of this cycle.
    now: Instant,
    /// On rank 0.
    coordinator: Option<Coordinator>,
    /// On rank 0: what to tell all ranks.
    settings: Option<Settings>,
    /// What this cycle has found in the cache.
    ready: Vec<Response>,
}

#[derive(Debug)]
struct Pending {
    request: Request,
    since: Instant,
}

/// What a cycle has to do after the vectors of all ranks were combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Next {
    /// Some rank has something to tell the coordinator.
    pub negotiate: bool,
    /// Some rank shuts down.
    pub leaving: bool,
    /// The program of some rank does not wait for a handle.
    pub any_computes: bool,
}

/// A property of a cycle that holds if it holds on any rank: the bits travel inverted, because the vectors are combined with
/// an and.
#[derive(Clone, Copy)]
enum Flag {
    Negotiate,
    Leaves,
    /// Has not joined.
    Active,
    /// Its program does not wait for a handle.
    Computes,
}

impl Flag {
    fn bit(self, is_set: bool) -> u64 {
        u64::from(!is_set) << self as u32
    }

    fn is_set(self, word: u64) -> bool {
        word >> self as u32 & 1 == 0
    }
}

impl Controller {
    /// The controller of `rank` in a world of `size`, with a cache of `capacity` responses. Its time begins `now`.
    pub fn new(rank: Rank, size: usize, capacity: usize, stall: StallTimes, now: Instant) -> Self {
        Self {
            rank,
            size,
            stall,
            cache: Cache::new(capacity),
            pending: BTreeMap::new(),
            hits: BTreeMap::new(),
            unsent: VecDeque::new(),
            refusals: VecDeque::new(),
            later: Vec::new(),
            refused: Vec::new(),
            stale: Vec::new(),
            joined: false,
            joins: false,
            leaves: false,
            now,
            coordinator: rank.is_main().then(|| Coordinator::new(size, stall)),
            settings: None,
            ready: Vec::new(),
        }
    }

    /// The program has submitted a name that is not in flight.
    pub fn submit(&mut self, request: Request, now: Instant) {
        let name = request.name.clone();
        match self.cache.lookup(&request) {
            Lookup::Hit(slot) => {
                self.hits.insert(slot, name.clone());
            }
            Lookup::Stale(slot) => {
                self.stale.push(slot);
                self.unsent.push_back(name.clone());
            }
            Lookup::Unknown => self.unsent.push_back(name.clone()),
        }
        self.pending.insert(name, Pending { request, since: now });
    }

    /// The program has made a call that this rank refuses. It counts behind the calls of its name that the program has made before.
    pub fn refuse(&mut self, refusal: Refusal) {
        if self.refusals.len() + self.later.len() >= MAX_REFUSALS {
            return;
        }
        if self.pending.contains_key(&refusal.name) {
            self.later.push(refusal);
        } else {
            self.refusals.push_back(refusal);
        }
    }

    /// What other ranks have refused, with which calls of this rank have ended.
    pub fn refused(&mut self) -> Vec<Refused> {
        std::mem::take(&mut self.refused)
    }

    /// The program has no more data, until all ranks say so.
    pub fn join(&mut self) {
        // The others meet a rank that has joined there.
        self.later.clear();
        self.joined = true;
        self.joins = true;
    }

    /// The program ends.
    pub fn leave(&mut self) {
        self.leaves = true;
    }

    /// On rank 0: all ranks get these settings with the next cycle.
    pub fn set(&mut self, settings: Settings) {
        self.settings = Some(settings);
    }

    /// How many submissions are in flight on this rank.
    #[cfg(test)]
    pub fn in_flight(&self) -> usize {
        self.pending.len()
    }

    /// This rank's bits: flags, then a bit for each slot that this rank has or, because it has joined, does not mind, then
    /// a bit for each slot that still holds. `waits`: the program waits for a handle.
    pub fn vector(&mut self, now: Instant, waits: bool) -> Vec<u64> {
        self.now = now;
        self.give_up_on_stalled(now);
        let mut stale = std::mem::take(&mut self.stale);
        // The others must not carry out what this rank has refused, nor what comes behind it before that.
        stale.extend(self.refusals.iter().filter_map(|refusal| self.cache.slot_of(&refusal.name)));
        if self.joined {
            // A rank that has joined has every bit, so that the bits no longer say whether it has submitted these.
            stale.extend(self.hits.keys());
            // What a rank without data brings to these is not what it brought before.
            let me = self.rank.get();
            stale.extend(self.cache.find(|response| match response.request.kind {
                Kind::Allgather => true,
                Kind::Broadcast { root } => root == me,
                Kind::Allreduce(_) | Kind::Alltoall | Kind::Reducescatter(_) | Kind::Barrier => false,
            }));
        }
        let words = self.cache.slots().div_ceil(64);
        let (mut has, mut holds) = (vec![0u64; words], vec![u64::MAX; words]);
        if self.joined {
            has.fill(u64::MAX);
        }
        for slot in self.hits.keys() {
            has[slot / 64] |= 1 << (slot % 64);
        }
        for slot in &stale {
            holds[slot / 64] &= !(1 << (slot % 64));
        }
        let coordinator = self.coordinator.as_ref();
        let answers = coordinator
            .is_some_and(|coordinator| coordinator.has_due() || coordinator.expired(now).is_some());
        let tells = !self.unsent.is_empty()
            || !self.refusals.is_empty()
            || self.joins
            || answers
            || self.settings.is_some();
        let flags = Flag::Negotiate.bit(tells)
            | Flag::Leaves.bit(self.leaves)
            | Flag::Active.bit(!self.joined)
            | Flag::Computes.bit(!waits);
        let mut vector = vec![flags];
        vector.append(&mut has);
        vector.append(&mut holds);
        vector
    }

    /// What has waited for too long in the cache goes to the coordinator, who knows which ranks lack it.
    fn give_up_on_stalled(&mut self, now: Instant) {
        let after = self.stall.warn.unwrap_or(self.stall.end).min(self.stall.end);
        for (slot, name) in &self.hits {
            let since = self.pending.get(name).map_or(now, |pending| pending.since);
            if now.saturating_duration_since(since) >= after {
                self.stale.push(*slot);
            }
        }
    }

    /// Takes the bits of all ranks, combined.
    ///
    /// # Errors
    /// If they have another length than this rank's.
    pub fn combined(&mut self, vector: &[u64]) -> Result<Next> {
        let words = self.cache.slots().div_ceil(64);
        let [flags, bits @ ..] = vector else { return Err(torn(vector.len())) };
        if bits.len() != 2 * words {
            return Err(torn(vector.len()));
        }
        let (has, holds) = bits.split_at(words);
        let is_active = Flag::Active.is_set(*flags);
        let mut any_stale = false;
        for slot in 0..self.cache.slots() {
            let bit = |words: &[u64]| words[slot / 64] >> (slot % 64) & 1 == 1;
            if !self.cache.is_used(slot) {
                continue;
            }
            if !bit(holds) {
                any_stale = true;
                self.evict(slot);
            } else if is_active && bit(has) {
                self.hits.remove(&slot);
                self.ready.extend(self.cache.take_up(slot));
            }
        }
        if let Some(coordinator) = self.coordinator.as_mut().filter(|_| !self.ready.is_empty()) {
            coordinator.progressed(self.now);
        }
        Ok(Next {
            negotiate: any_stale || Flag::Negotiate.is_set(*flags),
            leaving: Flag::Leaves.is_set(*flags),
            any_computes: Flag::Computes.is_set(*flags),
        })
    }

    /// What the coordinator must know: as much as there is room for in the messages of all ranks together. The rest goes
    /// with the next cycles, and with the last of it the word that this rank has joined.
    pub fn message(&mut self, now: Instant) -> Message {
        let mut room = share(self.size);
        let (mut requests, mut refusals) = (Vec::new(), Vec::new());
        while let Some(refusal) = self.refusals.front() {
            let bytes = refusal.wire_bytes();
            if bytes > room && !refusals.is_empty() {
                break;
            }
            room = room.saturating_sub(bytes);
            refusals.extend(self.refusals.pop_front());
        }
        // Behind the last refusal: the program has submitted them later.
        while self.refusals.is_empty()
            && let Some(name) = self.unsent.front()
        {
            let Some(pending) = self.pending.get(name) else {
                self.unsent.pop_front();
                continue;
            };
            let bytes = pending.request.wire_bytes();
            if bytes > room && !(requests.is_empty() && refusals.is_empty()) {
                break;
            }
            room = room.saturating_sub(bytes);
            let waited = now.saturating_duration_since(pending.since).as_millis();
            requests.push((pending.request.clone(), u64::try_from(waited).unwrap_or(u64::MAX)));
            self.unsent.pop_front();
        }
        let is_last = self.unsent.is_empty() && self.refusals.is_empty();
        let joins = is_last && std::mem::take(&mut self.joins);
        Message { requests, joins, refusals }
    }

    /// On rank 0: the answer to the messages of all ranks, by rank.
    ///
    /// # Errors
    /// If a message cannot be, or this is not rank 0.
    pub fn round(&mut self, messages: Vec<Message>, now: Instant) -> Result<Round> {
        for (rank, message) in messages.iter().enumerate() {
            message.check(Rank::new(rank as u32), self.size)?;
        }
        let Some(coordinator) = &mut self.coordinator else {
            return Err(Error::aborted(format!("rank {} does not coordinate", self.rank)));
        };
        Ok(Round { settings: self.settings.take(), ..coordinator.round(messages, now) })
    }

    /// On rank 0: a warning, if it is time for one.
    pub fn warning(&mut self, now: Instant) -> Option<String> {
        self.coordinator.as_mut()?.warning(now)
    }

    /// Ends the cycle, with the coordinator's answer if there was a negotiation. Returns what is ready, the same in the same
    /// order on every rank.
    ///
    /// # Errors
    /// If the answer cannot be.
    pub fn finish(&mut self, round: Round) -> Result<Vec<Response>> {
        round.check(self.size)?;
        let mut ready = std::mem::take(&mut self.ready);
        for response in &ready {
            self.pending.remove(&response.request.name);
        }
        for refused in round.refused {
            if !refused.told.contains(&self.rank.get()) {
                continue;
            }
            let name = &refused.refusal.name;
            if self.pending.remove(name).is_none() {
                return Err(Error::mismatch(format!(
                    "rank 0 tells that rank {} has refused {name:?}, which rank {} lacks",
                    refused.rank, self.rank
                )));
            }
            self.refused.push(refused);
        }
        for response in round.responses {
            let name = &response.request.name;
            let own = self.pending.remove(name).map(|pending| pending.request);
            if own.is_none() && !self.joined {
                return Err(Error::mismatch(format!(
                    "rank 0 answers for {name:?}, which rank {} lacks",
                    self.rank
                )));
            }
            if !response.is_for(self.rank, own.as_ref()) {
                return Err(Error::mismatch(format!(
                    "rank 0 answers for {name:?} with {}, which rank {} has not asked for",
                    response.request, self.rank
                )));
            }
            if response.error.is_none() && response.absent.is_empty() && response.request.kind.is_cached() {
                let taken = self.cache.insert(response.clone(), own);
                if let Some(name) = taken.and_then(|slot| self.hits.remove(&slot)) {
                    self.unsent.push_back(name);
                }
            }
            ready.push(response);
        }
        if round.all_joined.is_some() {
            self.joined = false;
        }
        for refusal in std::mem::take(&mut self.later) {
            self.refuse(refusal);
        }
        Ok(ready)
    }

    fn evict(&mut self, slot: usize) {
        self.cache.evict(slot);
        if let Some(name) = self.hits.remove(&slot) {
            self.unsent.push_back(name);
        }
    }
}

fn torn(words: usize) -> Error {
    Error::mismatch(format!("the ranks' caches differ: {words} words of bits do not fit this rank's"))
}
