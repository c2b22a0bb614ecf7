//! Groups of some of a group's ranks.
//!
//! A sub-group is a mesh of its own, under a prefix of its parent's store. So nothing in it depends on what its parent
//! does, on any thread.
//!
//! The ranks compare the members in a collective of the parent, so a missing call is found as in any other collective.
//! `local_rank`, which selects a device, is the same in all groups of a process.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use parking_lot::MutexGuard;

use super::connect::keys_of;
use super::{Backend, GroupConfig, Identity, ProcessGroup};
use crate::caller::Caller;
use crate::deadline::Deadline;
use crate::error::{Error, Kind, Result};
use crate::hash::fnv1a;
use crate::interrupt;
use crate::rank::Rank;
use crate::rendezvous;
use crate::store::{PrefixStore, SharedStore};
use crate::trace::Trace;
use crate::transport::tcp;
use crate::world_size::WorldSize;

/// The two numbers with which a rank describes its call to the others.
const RECORD: usize = 2;
/// The color of a rank that joins no group.
const NO_COLOR: i64 = -1;
/// The most ranks of a list that an error shows.
pub(super) const SHOWN: usize = 16;
/// So many groups of two are connected at a time: each takes several round trips.
const PAIRS_AT_ONCE: usize = 8;
/// How long the store may take to remove what was written to connect a sub-group.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(5);
/// Of so many parts, the last that were made, the store keeps what this rank has written. A rank that means another group by the name of one hears
/// that at once, and does not wait for ranks that have come and gone.
const KEPT_PARTS: usize = 16;

/// The error of members who need not be waited for any more, because their group has failed for this cause; None if they may still come.
type IsOver = fn(&Error, &[Rank]) -> Option<Error>;

/// # Groups of some ranks
///
/// A sub-group is a group like any other: it has connections, memory, threads and a failure of its own. It may be used
/// from another thread at the same time as its parent, and after its parent is dropped. Its ranks count from
/// 0; [`global_rank`](Self::global_rank) translates. Each one costs a rank up to three open files for every other member, one
/// thread (two among more than 16 ranks), another one from the first asynchronous collective on, and one more from the first asynchronous message
/// on.
///
/// A sub-group uses the store of the first group: as long as sub-groups are made, the process that
/// serves it (the launcher, or rank 0) must run. When its ranks are connected they remove what they have written there.
impl ProcessGroup {
    /// A group of these `ranks` of this one, in ascending order whatever the order of the list. None on a rank that is
    /// not in the list.
    ///
    /// Every rank of this group must call it, member or not, with the same ranks, and in the same order as its
    /// collectives. The lists are compared first.
    ///
    /// ```
    /// use phalanx::{ProcessGroup, Rank, ReduceOp, WorldSize};
    /// let groups = ProcessGroup::in_process(WorldSize::new(4)?)?;
    /// std::thread::scope(|scope| {
    ///     for group in groups {
    ///         scope.spawn(move || {
    ///             let Some(odd) = group.new_group(&[Rank::new(1), Rank::new(3)])? else { return Ok(()) };
    ///             let mut ranks = [group.rank().get() as i64];
    ///             odd.all_reduce(&mut ranks, ReduceOp::Sum)?;
    ///             assert_eq!(ranks, [4]);
    ///             assert_eq!(odd.global_rank(Rank::new(1))?, Rank::new(3));
    ///             Ok::<(), phalanx::Error>(())
    ///         });
    ///     }
    /// });
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// On every rank if the lists differ: the error shows two of them. Also if the list is empty, or has a rank twice or one that is not in this
    /// group. This group stays usable then. On members, if they cannot be connected. If this group fails.
    #[doc(alias("process_set", "add_process_set"))]
    pub fn new_group(&self, ranks: &[Rank]) -> Result<Option<Self>> {
        let mut ranks = ranks.to_vec();
        ranks.sort_unstable();
        let name = self.agree_on(&ranks)?;
        // All ranks have the same list: where one alone had another, the others would wait for it.
        self.check_list(&ranks)?;
        self.join_subgroup(&name, &ranks, Caller::NewGroup)
    }

    /// A group of all ranks of this one, for an adapter's thread, with its events in `trace`. Calls in it do not count as
    /// the program's. Every rank must call it, in the same order as its collectives.
    ///
    /// # Errors
    /// As [`new_group`](Self::new_group), on every rank.
    pub fn new_group_aside(&self, trace: Trace) -> Result<Self> {
        let members: Vec<Rank> = self.world_size().ranks().collect();
        let name = self.agree_on(&members)?;
        let config = self.inner.config.subgroup(&name, &members).aside();
        self.connect_subgroup(config, (&members, useless), self.rank(), trace, Caller::NewGroup)
    }

    /// A group of these `members` of this one, in this order, which meet in `store`: for adapters of libraries that make groups by their own rules.
    /// Only the members call it, at any time, and beside this group's collectives. The group has one exchange in the store, as its members
    /// know each other. It is a sub-group as those of [`new_group`](Self::new_group) are, and works also when this one has failed.
    ///
    /// The `name` is the same on all members, and no other group has it that is made from this one.
    ///
    /// # Errors
    /// On members that name others, or that are there twice. If not all come within `timeout`: the error names the first that is missing.
    /// At once, if this rank is no member, or if this group is no first group, or one that this has made.
    #[doc(hidden)]
    pub fn part(&self, store: SharedStore, name: &str, members: &[Rank], timeout: Duration) -> Result<Self> {
        let mut sorted = members.to_vec();
        sorted.sort_unstable();
        self.check_list(&sorted)?;
        let rank = self
            .rank_among(members)
            .ok_or_else(|| Error::invalid_argument("this rank is not among the members of the new group"))?;
        let config = self.inner.config.part(store, name, members).ok_or_else(|| {
            Error::invalid_argument("a part can be made only of the processes' first group").with_remedy(
                "make it of the group with which the processes began, such as that of `phalanx::init`",
            )
        })?;
        let world = WorldSize::new(members.len() as u32)?;
        let partition = self.inner.partition.part(members);
        let failed_before = self.watched_failure();
        // A rank that was lost does not come. The other members can go on without it.
        let lost = failed_before.as_ref().filter(|cause| cause.kind() == Kind::PeerFailed);
        if let Some(error) = lost.and_then(|cause| useless(cause, members)) {
            return Err(error);
        }
        let watch = || match self.watched_failure().filter(|_| failed_before.is_none()) {
            Some(cause) => useless(&cause, members).map_or(Ok(()), Err),
            None => Ok(()),
        };
        let connected = config.connect(rank, world, Some(&partition), &watch, Deadline::after(timeout))?;
        let identity = Identity { rank, world, trace: self.trace(), config };
        let group = Self::new(identity, connected)?.with_timeout(timeout);
        let tuning = &self.inner.config.tuning;
        // Their rows have been compared.
        group.inner.queue.run(&group.operation_timeout(), |engine| engine.choose(tuning))?;
        group.clear_earlier_part();
        Ok(group)
    }

    /// Whether these `members` of this group share memory with this rank. Then [`part`](Self::part) waits for them in ways that
    /// [`interruptible`](crate::interruptible) can end.
    #[doc(hidden)]
    pub fn shares_memory_with(&self, members: &[Rank]) -> bool {
        let domain = self.inner.partition.domain_of(self.rank());
        members.iter().all(|member| domain.contains(member))
    }

    /// Splits this group: the ranks with the same `color` form a group, ordered by `key`, and by rank if keys are
    /// equal. None on a rank without a color. As `MPI_Comm_split`.
    ///
    /// Every rank of this group must call it, in the same order as its collectives.
    ///
    /// ```
    /// use phalanx::{ProcessGroup, ReduceOp, WorldSize};
    /// let groups = ProcessGroup::in_process(WorldSize::new(4)?)?;
    /// std::thread::scope(|scope| {
    ///     for group in groups {
    ///         scope.spawn(move || {
    ///             // Two groups of two neighbours, as for two hosts with two ranks each.
    ///             let Some(host) = group.split(Some(group.rank().get() / 2), 0)? else { unreachable!() };
    ///             assert_eq!(host.world_size(), WorldSize::new(2)?);
    ///             assert_eq!(host.rank().get(), group.rank().get() % 2);
    ///             host.barrier()
    ///         });
    ///     }
    /// });
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// On members, if they cannot be connected. If this group fails.
    #[doc(alias("split_group", "MPI_Comm_split"))]
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        let own = color.map_or(NO_COLOR, i64::from);
        let mut number = self.next_child()?;
        self.begin()?;
        let records = self.in_call(Caller::Split).exchange_records([own, key])?;
        *number += 1;
        let name = format!("group/{}/{own}", *number - 1);
        drop(number);
        if color.is_none() {
            return Ok(None);
        }
        let mut members: Vec<(i64, Rank)> = self
            .world_size()
            .ranks()
            .zip(&records)
            .filter(|(_, [color, _])| *color == own)
            .map(|(rank, [_, key])| (*key, rank))
            .collect();
        members.sort_unstable();
        let members: Vec<Rank> = members.into_iter().map(|(_, rank)| rank).collect();
        self.join_subgroup(&name, &members, Caller::Split)
    }

    /// A group of all ranks of this one, for this crate's own threads. Calls in it do not count as the program's, and
    /// have the time-out `timeout`. Every rank must call it, in the same order as its collectives, when all know that
    /// all do.
    #[doc(hidden)]
    pub fn aside(&self, caller: Caller, timeout: Duration) -> Result<Self> {
        let members: Vec<Rank> = self.world_size().ranks().collect();
        let group = self.aside_among(&members, caller, timeout)?;
        group.ok_or_else(|| Error::invalid_argument("a rank is a member of its own group"))
    }

    /// The same of these `members`, in ascending order; None on the others, who must call it too. Members need not know that all do: one
    /// that has not called it when this group fails does not come.
    fn aside_among(&self, members: &[Rank], caller: Caller, timeout: Duration) -> Result<Option<Self>> {
        let mut number = self.next_child()?;
        self.begin()?;
        *number += 1;
        let name = format!("group/{}", *number - 1);
        drop(number);
        let Some(rank) = self.rank_among(members) else { return Ok(None) };
        let config = self.inner.config.subgroup(&name, members).aside();
        let group = self.connect_subgroup(config, (members, refused), rank, self.trace(), caller)?;
        Ok(Some(group.with_timeout(timeout).in_call(caller)))
    }

    /// Groups of two ranks each, for this crate's own threads, as of `aside_among`. Every rank must call it, with the
    /// same `pairs` in the same order, each in ascending order. `connected` gets the other rank and the group of each that this rank is in, or
    /// why that could not be connected. This rank connects some at a time, in the order of the list: both ranks of the first pair that does
    /// not stand yet are connecting it, so that no ranks wait for each other in a circle.
    ///
    /// # Errors
    /// The first one of `connected`. Then no more pairs are connected.
    #[doc(hidden)]
    pub fn pairs_aside(
        &self,
        pairs: impl Iterator<Item = [Rank; 2]>,
        caller: Caller,
        connected: impl Fn(Rank, Result<Self>) -> Result<()> + Sync,
    ) -> Result<()> {
        let mut number = self.next_child()?;
        self.begin()?;
        let mut own = Vec::new();
        for pair in pairs {
            if pair.contains(&self.rank()) {
                own.push((format!("group/{}", *number), pair));
            }
            *number += 1;
        }
        drop(number);
        let next = AtomicUsize::new(0);
        let connect = || -> Result<()> {
            while let Some((name, pair)) = own.get(next.fetch_add(1, Ordering::Relaxed)) {
                let place = usize::from(pair[1] == self.rank());
                let config = self.inner.config.subgroup(name, pair).aside();
                let (members, rank) = ((&pair[..], refused as IsOver), Rank::new(place as u32));
                let made = self.connect_subgroup(config, members, rank, self.trace(), caller);
                let made = made.map(|made| made.with_timeout(self.timeout()).in_call(caller));
                connected(pair[1 - place], made).inspect_err(|_| next.store(own.len(), Ordering::Relaxed))?;
            }
            Ok(())
        };
        // Closed when no thread has a sender any more.
        let (running, ended) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let mut others = Vec::new();
            for _ in 1..own.len().min(PAIRS_AT_ONCE) {
                let thread = std::thread::Builder::new().name("phalanx-pairs".into());
                let running = running.clone();
                let connect_until_end = move || {
                    let outcome = connect();
                    drop(running);
                    outcome
                };
                match thread.spawn_scoped(scope, connect_until_end) {
                    Ok(thread) => others.push(thread),
                    Err(error) => {
                        // With fewer it only takes longer.
                        tracing::debug!(%error, "a thread that connects pairs of ranks could not be started");
                        break;
                    }
                }
            }
            drop(running);
            let mut first = connect();
            // Only this thread has a check, such as for Ctrl-C. The others hear of a failure of this group.
            while ended.recv_timeout(interrupt::INTERRUPT_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                if let Err(error) = interrupt::check() {
                    first = first.and(Err(self.inner.health.fail(error)));
                }
            }
            others.into_iter().fold(first, |outcome, thread| {
                let other = thread.join().unwrap_or_else(|_| {
                    let panicked = Error::panicked("a thread that connects pairs of ranks panicked");
                    Err(self.inner.health.fail(panicked))
                });
                outcome.and(other)
            })
        })
    }

    /// The rank in the first group, from which all others were made, of this group's `rank`.
    ///
    /// # Errors
    /// If `rank` is not a rank of this group.
    #[doc(alias = "get_global_rank")]
    pub fn global_rank(&self, rank: Rank) -> Result<Rank> {
        self.member(rank).map(|rank| self.inner.config.global(rank))
    }

    /// The rank in this group of the rank `global` of the first one; None if it is not a member.
    #[doc(alias = "get_group_rank")]
    pub fn group_rank(&self, global: Rank) -> Option<Rank> {
        self.world_size().ranks().find(|rank| self.inner.config.global(*rank) == global)
    }

    /// This rank's number in a group of these `members`, in this order.
    fn rank_among(&self, members: &[Rank]) -> Option<Rank> {
        members.iter().position(|member| *member == self.rank()).map(|place| Rank::new(place as u32))
    }

    /// The number of the next sub-group. The thread that holds it makes that one, and no other thread makes one meanwhile.
    fn next_child(&self) -> Result<MutexGuard<'_, u64>> {
        let children = &self.inner.children;
        if interrupt::is_checking() {
            // This thread has it, if the check is made in such a call.
            return children.try_lock().ok_or_else(interrupt::refused);
        }
        Ok(children.lock())
    }

    /// An error if a sorted list is not one of members.
    fn check_list(&self, sorted: &[Rank]) -> Result<()> {
        if sorted.is_empty() {
            return Err(Error::invalid_argument("the list of the new group's ranks is empty")
                .with_remedy("name at least one rank"));
        }
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::invalid_argument(format!("rank {} is in the list twice", pair[0]))
                .with_remedy("name each rank once"));
        }
        sorted.iter().try_for_each(|rank| self.member(*rank).map(drop))
    }

    /// The name of a new sub-group of these `ranks`, after a comparison of all ranks' lists.
    fn agree_on(&self, ranks: &[Rank]) -> Result<String> {
        let mut number = self.next_child()?;
        self.begin()?;
        let group = self.in_call(Caller::NewGroup);
        let records = group.exchange_records([ranks.len() as i64, digest(ranks)])?;
        *number += 1;
        if let Some(other) = records.iter().position(|record| *record != records[0]) {
            return Err(group.differing_lists(ranks, Rank::new(other as u32))?);
        }
        Ok(format!("group/{}", *number - 1))
    }

    /// Sends the numbers of this call to every rank, and returns those of all, by rank.
    fn exchange_records(&self, own: [i64; RECORD]) -> Result<Vec<[i64; RECORD]>> {
        let mut all = vec![0i64; RECORD * self.world_size().count()];
        self.all_gather(&own, &mut all)?;
        Ok(all.as_chunks().0.to_vec())
    }

    /// The error if lists differ, the same on every rank. It shows the lists of rank 0 and of `other`.
    fn differing_lists(&self, ranks: &[Rank], other: Rank) -> Result<Error> {
        let list_of = |rank| -> Result<String> {
            // One more than is shown says whether there are more.
            let mut list = [i64::MAX; SHOWN + 1];
            list.iter_mut().zip(ranks).for_each(|(place, rank)| *place = i64::from(rank.get()));
            self.broadcast(&mut list, rank)?;
            let list: Vec<i64> = list.into_iter().filter(|rank| *rank != i64::MAX).collect();
            Ok(shown(&list))
        };
        Ok(differing((Rank::MAIN, list_of(Rank::MAIN)?), (other, list_of(other)?)).with_remedy(
            "every rank must call new_group with the same ranks, also those that are not among them",
        ))
    }

    /// Removes from `store` the keys of a start by [`from_store`](crate::rendezvous::from_store): those of `rank`, and those that all ranks write. Without it,
    /// an adapter of a library that forms groups again and again would fill the store. Call it when all ranks are connected: a rank that came later
    /// would wait until its time-out.
    #[doc(hidden)]
    pub fn clear_meeting(store: SharedStore, rank: Rank) {
        let connected = keys_of(rank).into_iter().chain([tcp::FAILURE.to_owned()]);
        let connected = connected.map(|key| PrefixStore::key_in("group", &key));
        let keys: Vec<String> = rendezvous::keys_of(rank).into_iter().chain(connected).collect();
        let store: SharedStore = Arc::new(PrefixStore::new(rendezvous::FIRST_START, store));
        clear(&store, &keys);
    }

    /// What removes what this rank wrote to connect the last [parts](Self::part) that were made of this group and of its parts, a round trip for
    /// each. A rank that still came to one of them would wait until this group fails.
    #[doc(hidden)]
    pub fn clear_parts(&self) -> impl FnOnce() + Send + use<> {
        let parts = std::mem::take(&mut *self.inner.config.parts.lock());
        move || parts.into_iter().for_each(|(store, rank)| clear(&store, &tcp::keys_of(rank)))
    }

    /// Connects the sub-group `name`, if this rank is a member.
    fn join_subgroup(&self, name: &str, members: &[Rank], caller: Caller) -> Result<Option<Self>> {
        let Some(rank) = self.rank_among(members) else { return Ok(None) };
        let config = self.inner.config.subgroup(name, members);
        self.connect_subgroup(config, (members, useless), rank, self.trace(), caller).map(Some)
    }

    /// Connects this rank, which is the `rank` of them, with the other `members` of this group in a sub-group. If this group fails
    /// meanwhile, `is_over` says why it is useless to wait for them.
    fn connect_subgroup(
        &self,
        config: GroupConfig,
        (members, is_over): (&[Rank], IsOver),
        rank: Rank,
        trace: Trace,
        caller: Caller,
    ) -> Result<Self> {
        let world = WorldSize::new(members.len() as u32)?;
        let watch = || self.watched_failure().and_then(|cause| is_over(&cause, members)).map_or(Ok(()), Err);
        let deadline = self.operation_timeout().deadline();
        // It meets in the store of the first group.
        let connected = config.connect(rank, world, None, &watch, deadline)?;
        let identity = Identity { rank, world, trace, config };
        let group = Self::new(identity, connected)?.with_timeout(self.timeout);
        // A world of another size may use another row of the table, which has not been compared yet.
        let group = group.tuned(&self.inner.config.tuning, caller)?;
        group.clear_store();
        Ok(group)
    }

    /// Removes what this rank has written to the store while this sub-group was connected: a job that makes one in each epoch would fill the
    /// store. The barrier in which the tables were compared shows that all members are connected, and read no more there.
    fn clear_store(&self) {
        let Backend::Mesh { store, .. } = &self.inner.config.backend else { return };
        // Alone, a rank has asked nobody.
        if self.world_size() != WorldSize::ONE {
            clear(store, &keys_of(self.rank()));
        }
    }

    /// The same of one of the [parts](Self::part) before this one. When that was made, all its members had told each other what they found in the
    /// store, and read no more there.
    fn clear_earlier_part(&self) {
        let Backend::Mesh { store, .. } = &self.inner.config.backend else { return };
        if self.world_size() == WorldSize::ONE {
            return;
        }
        let mut parts = self.inner.config.parts.lock();
        parts.push_back((store.clone(), self.rank()));
        let earlier = if parts.len() > KEPT_PARTS { parts.pop_front() } else { None };
        drop(parts);
        if let Some((store, rank)) = earlier {
            clear(&store, &tcp::keys_of(rank));
        }
    }
}

/// Removes these keys from the store.
fn clear(store: &SharedStore, keys: &[String]) {
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    // An error here is nobody's: the program's check is left for a wait whose error it gets.
    let cleared = interrupt::undisturbed(|| store.delete_keys(&keys, Deadline::after(CLEAR_TIMEOUT)));
    if let Err(error) = cleared {
        // No group needs them, or the store, when its ranks are connected.
        tracing::debug!(%error, "the store keeps what the ranks of a sub-group wrote to connect");
    }
}

/// Why it is useless to wait for these `members` of a group that has failed for `cause` meanwhile; None if they may still come.
fn useless(cause: &Error, members: &[Rank]) -> Option<Error> {
    let place = cause.peer().and_then(|peer| members.iter().position(|member| *member == peer));
    match (cause.kind(), place) {
        (Kind::PeerFailed, Some(place)) => {
            let lost = Rank::new(place as u32);
            let said = format!("rank {lost} of the new group was lost before it came: {cause}");
            Some(Error::new(Kind::PeerFailed, said).with_peer(lost))
        }
        (Kind::Aborted, _) => {
            Some(Error::aborted(format!("the group of which this one was to be a part has ended: {cause}")))
        }
        _ => None,
    }
}

/// The same of members that may not have come yet: the group refuses their call.
fn refused(cause: &Error, members: &[Rank]) -> Option<Error> {
    let failed =
        || Error::aborted(format!("the group of which this one was to be a part has failed: {cause}"));
    useless(cause, members).or_else(|| Some(failed()))
}

/// A list as errors show it. One rank more than they show is enough of a long one.
pub(super) fn shown<T: ToString>(list: &[T]) -> String {
    let ranks: Vec<String> = list.iter().take(SHOWN).map(T::to_string).collect();
    format!("[{}{}]", ranks.join(", "), if list.len() > SHOWN { ", .." } else { "" })
}

/// The error of two ranks whose lists differ.
pub(super) fn differing((rank, own): (Rank, String), (other, theirs): (Rank, String)) -> Error {
    Error::mismatch(format!(
        "the ranks disagree on the new group: rank {rank} asks for {own}, rank {other} for {theirs}"
    ))
    .with_peer(other)
}

/// A hash of a list, by which ranks compare theirs.
pub(super) fn digest(ranks: &[Rank]) -> i64 {
    fnv1a(ranks.iter().flat_map(|rank| rank.get().to_le_bytes())) as i64
}

#[cfg(test)]
mod tests;
