//! The stores of rounds, which are removed when the rounds are over.
//!
//! ```text
//! keys/<n>        the keys of round n's store, a line each; a line that begins with a tab names a worker's own list
//! keys/<n>/<id>   such a list: the keys that the worker has written since
//! round/<n>/      that store
//! swept           rounds up to this one have been removed
//! ```
//!
//! A worker that removes keys, as when a sub-group stands, gets a list of its own, which it alone shortens: in a long round in which
//! sub-groups come and go, one list of all workers would fill the store, or they would rewrite it in turn.
//!
//! A worker that was stopped may write something when the round has been removed. So the last rounds that were removed are looked at again, and
//! the list of such a round still names the workers' own lists.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Mutex, RwLock};

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::group::keys_of;
use crate::random;
use crate::rank::Rank;
use crate::store::{PrefixStore, SharedStore, Store};

const SWEPT: &str = "swept";
/// How many of the rounds that were removed last are checked again.
const RECHECKED: u64 = 8;
/// How many keys of a round are removed before that is noted: the time may be up before all of them are.
const SWEPT_TOGETHER: usize = 256;
/// How a line of the round's list begins that names a worker's own list.
const OWN: char = '\t';
/// What no list is.
const NO_LIST: &[u8] = b"?";
/// So many bytes are added to a worker's own list before it is written anew, with the keys that are left.
const SHORTENED_AT: usize = 8 << 10;

/// The store of one round. It records each key before it writes the key.
pub(super) struct RoundStore {
    round: PrefixStore,
    all: SharedStore,
    number: u64,
    list: String,
    /// What this worker is about to write. It is recorded with the first key: each that is recorded by itself takes a round trip.
    planned: Vec<String>,
    /// What this worker has recorded, and not removed.
    known: Mutex<BTreeSet<String>>,
    /// This worker's own list, once it has removed a key. Threads that add to it share the lock; a thread that shortens it has the lock alone.
    own: RwLock<Option<OwnList>>,
}

struct OwnList {
    list: String,
    /// What has been added since it was written.
    added: AtomicUsize,
}

impl RoundStore {
    pub(super) fn new(all: &SharedStore, round: u64) -> Self {
        Self {
            round: PrefixStore::new(prefix(round), Arc::clone(all)),
            all: Arc::clone(all),
            number: round,
            list: list(round),
            planned: Vec::new(),
            known: Mutex::default(),
            own: RwLock::default(),
        }
    }

    /// The same for the worker that connects with the others as `rank`.
    pub(super) fn of_rank(self, rank: Rank) -> Self {
        Self { planned: keys_of(rank), ..self }
    }

    /// Records `keys`, if one of them is new, and what is planned: in one request, which takes a round trip.
    fn note(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        let new: Vec<String> = {
            let known = self.known.lock();
            if keys.iter().all(|key| known.contains(*key)) {
                return Ok(());
            }
            let planned = self.planned.iter().map(String::as_str).filter(|key| !keys.contains(key));
            let new = keys.iter().copied().chain(planned).filter(|key| !known.contains(*key));
            new.map(str::to_owned).collect()
        };
        let lines: String = new.iter().map(|key| format!("{key}\n")).collect();
        // The thread that shortens the list waits for the store meanwhile, and may have more time.
        let Some(own) = self.own.try_read_until(deadline.instant()) else {
            return Err(Error::timeout(format!(
                "another thread of this worker writes the list of round {}'s keys anew, and waits for the store",
                self.number
            ))
            .with_remedy("is the store slow? The next call tries it again"));
        };
        let list = own.as_ref().map_or(&self.list, |own| &own.list);
        self.all.append(list, lines.as_bytes(), deadline)?;
        if let Some(own) = &*own {
            own.added.fetch_add(lines.len(), Ordering::Relaxed);
        }
        // Recorded after the append has succeeded: after a failure the next call must record it. A key that is
        // recorded twice does no harm.
        self.known.lock().extend(new);
        Ok(())
    }

    /// What this worker has recorded of `keys`, which are removed, need not be removed with the round. If that cannot be written down, they are
    /// removed once more then, which does no harm.
    fn forget(&self, keys: &[&str], deadline: Deadline) {
        {
            let mut known = self.known.lock();
            // Of each, though one is enough.
            if keys.iter().filter(|key| known.remove(**key)).count() == 0 {
                return;
            }
        }
        // If another thread adds to the list, the next removal comes to it.
        let Some(mut own) = self.own.try_write() else { return };
        match &*own {
            None => *own = self.begin_own(deadline).ok(),
            Some(own) if own.added.load(Ordering::Relaxed) >= SHORTENED_AT => {
                let left: String = self.known.lock().iter().map(|key| format!("{key}\n")).collect();
                if self.all.set(&own.list, left.as_bytes(), deadline).is_ok() {
                    own.added.store(0, Ordering::Relaxed);
                }
            }
            Some(_) => {}
        }
    }

    /// A list of this worker's own, of which the round's list knows.
    fn begin_own(&self, deadline: Deadline) -> Result<OwnList> {
        let id = format!("{:016x}", random::number()?);
        self.all.append(&self.list, format!("{OWN}{id}\n").as_bytes(), deadline)?;
        Ok(OwnList { list: own_list(self.number, &id), added: AtomicUsize::new(0) })
    }
}

impl fmt::Debug for RoundStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RoundStore").field("list", &self.list).finish_non_exhaustive()
    }
}

impl Store for RoundStore {
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        self.note(&[key], deadline)?;
        self.round.set(key, value, deadline)
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        self.round.get(key, deadline)
    }

    fn wait(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        self.round.wait(keys, deadline)
    }

    fn check(&self, keys: &[&str], deadline: Deadline) -> Result<bool> {
        self.round.check(keys, deadline)
    }

    fn add(&self, key: &str, amount: i64, deadline: Deadline) -> Result<i64> {
        self.note(&[key], deadline)?;
        self.round.add(key, amount, deadline)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Deadline) -> Result<Vec<u8>> {
        self.note(&[key], deadline)?;
        self.round.compare_set(key, expected, desired, deadline)
    }

    fn delete_key(&self, key: &str, deadline: Deadline) -> Result<bool> {
        let existed = self.round.delete_key(key, deadline)?;
        self.forget(&[key], deadline);
        Ok(existed)
    }

    fn delete_keys(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        self.round.delete_keys(keys, deadline)?;
        self.forget(keys, deadline);
        Ok(())
    }

    fn num_keys(&self, deadline: Deadline) -> Result<usize> {
        self.round.num_keys(deadline)
    }

    fn append(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        self.note(&[key], deadline)?;
        self.round.append(key, value, deadline)
    }

    fn multi_get(&self, keys: &[&str], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        self.round.multi_get(keys, deadline)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Deadline) -> Result<()> {
        self.note(&pairs.iter().map(|(key, _)| *key).collect::<Vec<_>>(), deadline)?;
        self.round.multi_set(pairs, deadline)
    }

    fn set_and_get(
        &self,
        pairs: &[(&str, &[u8])],
        keys: &[&str],
        deadline: Deadline,
        go_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<Vec<u8>>> {
        self.note(&pairs.iter().map(|(key, _)| *key).collect::<Vec<_>>(), deadline)?;
        self.round.set_and_get(pairs, keys, deadline, go_on)
    }

    fn multi_compare_set(
        &self,
        changes: &[(&str, &[u8], &[u8])],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>> {
        // Others only change what somebody has written, or ask for it.
        let made = changes.iter().filter(|(_, expected, _)| expected.is_empty());
        self.note(&made.map(|(key, ..)| *key).collect::<Vec<_>>(), deadline)?;
        self.round.multi_compare_set(changes, deadline)
    }

    fn compare_set_and_get(
        &self,
        changes: &[(&str, &[u8], &[u8])],
        keys: &[&str],
        deadline: Deadline,
        found: &mut dyn FnMut(&[Vec<u8>]) -> Result<()>,
        go_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<Vec<u8>>> {
        self.note(&changes.iter().map(|(key, ..)| *key).collect::<Vec<_>>(), deadline)?;
        self.round.compare_set_and_get(changes, keys, deadline, found, go_on)
    }
}

/// Removes the keys of the rounds before `now`: no worker uses them. On a slow network, or after a round of many workers, the time may be up
/// before all are removed: what was done is noted, and the next call goes on from there.
pub(super) fn sweep(store: &dyn Store, now: u64, deadline: Deadline) -> Result<()> {
    let swept = u64::try_from(store.add(SWEPT, 0, deadline)?).unwrap_or(0);
    let over = now.saturating_sub(1);
    if over <= swept {
        return Ok(());
    }
    // What is new comes first.
    for round in swept + 1..=over {
        remove(store, round, deadline)?;
        if let Some(last) = round.checked_sub(RECHECKED) {
            store.delete_keys(&[&list(last)], deadline)?;
        }
        let (noted, now) = ((round - 1).to_string(), round.to_string());
        store.compare_set(SWEPT, noted.as_bytes(), now.as_bytes(), deadline)?;
    }
    (swept.saturating_sub(RECHECKED) + 1..=swept).try_for_each(|round| remove(store, round, deadline))
}

/// Removes the keys of one round.
fn remove(store: &dyn Store, round: u64, deadline: Deadline) -> Result<()> {
    let list = list(round);
    if !store.check(&[&list], deadline)? {
        return Ok(());
    }
    let mut left = store.get(&list, deadline)?;
    let mut own_lists = String::new();
    loop {
        let ends = left.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at + 1);
        let end = ends.take(SWEPT_TOGETHER).last().unwrap_or(left.len());
        let (first, rest) = left.split_at(end);
        let first = str::from_utf8(first).map_err(|_| Error::malformed("a round's keys are not text"))?;
        let (own, keys): (Vec<&str>, Vec<&str>) = first.lines().partition(|line| line.starts_with(OWN));
        own.iter().for_each(|line| own_lists.extend([*line, "\n"]));
        remove_own(store, round, own.into_iter().filter_map(|line| line.strip_prefix(OWN)), deadline)?;
        remove_keys(store, round, keys.into_iter(), deadline)?;
        if rest.is_empty() {
            break;
        }
        // What was added meanwhile stays in the list.
        let now = store.compare_set(&list, &left, rest, deadline)?;
        if now == left {
            // Another process has removed the list, and so the keys.
            return Ok(());
        }
        left = now;
    }
    // Written last: if this process dies before, the next one finds this round and removes it.
    if own_lists.is_empty() {
        return store.delete_key(&list, deadline).map(drop);
    }
    if left != own_lists.as_bytes() {
        store.compare_set(&list, &left, own_lists.as_bytes(), deadline)?;
    }
    Ok(())
}

/// Removes the keys of some workers' own lists, and then the lists. They are short.
fn remove_own<'a>(
    store: &dyn Store,
    round: u64,
    ids: impl Iterator<Item = &'a str>,
    deadline: Deadline,
) -> Result<()> {
    let lists: Vec<String> = ids.map(|id| own_list(round, id)).collect();
    if lists.is_empty() {
        return Ok(());
    }
    // This changes nothing, and does not wait for what is not there.
    let asked: Vec<(&str, &[u8], &[u8])> =
        lists.iter().map(|list| (list.as_str(), NO_LIST, NO_LIST)).collect();
    let found = store.multi_compare_set(&asked, deadline)?;
    let mut lists = lists.iter().zip(&found).filter(|(_, text)| *text != NO_LIST).peekable();
    while lists.peek().is_some() {
        // Many together, and not all: each request is a round trip, and the time may be up.
        let (mut keys, mut removed) = (Vec::new(), Vec::new());
        while keys.len() < SWEPT_TOGETHER
            && let Some((list, text)) = lists.next()
        {
            let text = str::from_utf8(text).map_err(|_| Error::malformed("a worker's keys are not text"))?;
            keys.extend(text.lines());
            removed.push(list.as_str());
        }
        remove_keys(store, round, keys.into_iter(), deadline)?;
        store.delete_keys(&removed, deadline)?;
    }
    Ok(())
}

fn remove_keys<'a>(
    store: &dyn Store,
    round: u64,
    keys: impl Iterator<Item = &'a str>,
    deadline: Deadline,
) -> Result<()> {
    let keys: Vec<String> = keys.map(|key| format!("{}/{key}", prefix(round))).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    store.delete_keys(&keys, deadline)
}

fn prefix(round: u64) -> String {
    format!("round/{round}")
}

fn list(round: u64) -> String {
    format!("keys/{round}")
}

fn own_list(round: u64, id: &str) -> String {
    format!("{}/{id}", list(round))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::group::{GroupOptions, ProcessGroup};
    use crate::rank::Generation;
    use crate::rendezvous::{self, Rendezvous};
    use crate::store::{MAX_VALUE, MemoryStore, TcpStore, TcpStoreServer, Watched, far_away};
    use crate::world_size::WorldSize;

    #[test]
    fn all_that_a_worker_writes_to_connect_is_recorded_with_its_first_key() {
        let limit = Deadline::after(Duration::from_secs(60));
        let (all, world): (SharedStore, _) = (Arc::new(MemoryStore::new()), WorldSize::new(2).unwrap());
        std::thread::scope(|scope| {
            for rank in world.ranks() {
                let store: SharedStore = Arc::new(RoundStore::new(&all, 1).of_rank(rank));
                scope.spawn(move || {
                    let met = Rendezvous {
                        store,
                        rank,
                        world_size: world,
                        local_rank: rank.get(),
                        local_world_size: 2,
                        generation: Generation(1),
                        group_number: Some([1; 16]),
                        ..rendezvous::alone()
                    };
                    ProcessGroup::join(met, GroupOptions::default()).unwrap().barrier().unwrap();
                });
            }
        });
        let recorded = String::from_utf8(all.get("keys/1", limit).unwrap()).unwrap();
        // A key that was recorded by itself would be one line more.
        let planned: usize = world.ranks().map(|rank| keys_of(rank).len()).sum();
        assert_eq!(recorded.lines().count(), planned, "{recorded}");
        sweep(&*all, 2, limit).unwrap();
        // How far it went.
        assert_eq!(all.num_keys(limit).unwrap(), 1);
    }

    #[test]
    fn a_sweep_whose_time_is_up_goes_on_where_it_was() {
        let limit = Deadline::after(Duration::from_secs(20));
        // It answers so many more requests, as one at the end of a slow network does until the time is up.
        let left = Arc::new(AtomicUsize::new(usize::MAX));
        let answers = Arc::clone(&left);
        let slow = Arc::new(Watched::new(move |_| {
            let left = answers.load(Ordering::Relaxed);
            answers.store(
                left.checked_sub(1).ok_or_else(|| Error::timeout("the time is up"))?,
                Ordering::Relaxed,
            );
            Ok(())
        }));
        let all: SharedStore = Arc::clone(&slow) as SharedStore;
        // Two rounds, of which none can be removed at once.
        for number in 1..=2 {
            let round = RoundStore::new(&all, number);
            (0..4 * SWEPT_TOGETHER).for_each(|key| round.set(&format!("key/{key}"), b"1", limit).unwrap());
        }
        let mut calls = 0;
        loop {
            left.store(SWEPT_TOGETHER + 20, Ordering::Relaxed);
            match sweep(&*slow, 3, limit) {
                Ok(()) => break,
                Err(error) => assert!(error.is_timeout(), "{error}"),
            }
            calls += 1;
            assert!(calls < 20, "it comes to no end");
        }
        left.store(1, Ordering::Relaxed);
        assert_eq!(slow.num_keys(limit).unwrap(), 1);
    }

    #[test]
    fn what_many_workers_have_listed_is_removed_in_few_round_trips() {
        let limit = Deadline::after(Duration::from_secs(60));
        let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let near: SharedStore = Arc::new(TcpStore::connect(server.local_addr(), limit).unwrap());
        for worker in 0..100 {
            let round = RoundStore::new(&near, 1);
            // As after a sub-group: it has a list of its own from then on.
            round.set(&format!("first/{worker}"), b"1", limit).unwrap();
            round.delete_key(&format!("first/{worker}"), limit).unwrap();
            round.set(&format!("second/{worker}"), b"1", limit).unwrap();
        }
        let (address, _) = far_away(&server, Duration::from_millis(50));
        let far = TcpStore::connect(address, limit).unwrap();
        // A round trip for each would take twice as long.
        sweep(&far, 2, Deadline::after(Duration::from_secs(10))).unwrap();
        // The round's list, and how far it went.
        assert_eq!(near.num_keys(limit).unwrap(), 2);
    }

    #[test]
    fn lists_stay_short_where_keys_come_and_go_and_all_is_removed_with_the_round() {
        let limit = Deadline::after(Duration::from_secs(20));
        let all: SharedStore = Arc::new(MemoryStore::new());
        let rounds = [1, 1].map(|number| RoundStore::new(&all, number));
        let text = |key: &str| String::from_utf8(all.get(key, limit).unwrap()).unwrap();
        for round in &rounds {
            round.set("stays", b"1", limit).unwrap();
            for number in 0..1000 {
                let keys = ["address", "process"].map(|what| format!("group/{number}/mesh/{what}/0"));
                let keys = keys.each_ref().map(String::as_str);
                round.multi_set(&[(keys[0], b"1"), (keys[1], b"1")], limit).unwrap();
                round.delete_keys(&keys, limit).unwrap();
            }
            round.set("stays too", b"1", limit).unwrap();
            assert!(!round.delete_key("another's", limit).unwrap());
        }
        let main = text("keys/1");
        let own: Vec<&str> = main.lines().filter_map(|line| line.strip_prefix(OWN)).collect();
        assert_eq!((own.len(), main.lines().count()), (2, 2 * 4), "{main}");
        for own in own {
            let own = text(&own_list(1, own));
            assert!(own.len() < 2 * SHORTENED_AT && own.lines().any(|key| key == "stays too"), "{own}");
        }
        // The names of the own lists stay for a while: a worker that was stopped may come late.
        let left = || (all.num_keys(limit).unwrap(), text("keys/1").lines().count());
        sweep(&*all, 2, limit).unwrap();
        assert_eq!(left(), (2, 2));
        for (now, late) in [(3, "late"), (4, "later")] {
            rounds[1].set(late, b"1", limit).unwrap();
            sweep(&*all, now, limit).unwrap();
            assert_eq!(left(), (2, 2));
        }
        sweep(&*all, 2 + RECHECKED, limit).unwrap();
        assert_eq!(all.num_keys(limit).unwrap(), 1);
    }

    #[test]
    fn keys_that_are_written_together_are_recorded_together() {
        let limit = Deadline::after(Duration::from_secs(20));
        let requests = Arc::new(AtomicUsize::new(0));
        let counts = Arc::clone(&requests);
        let all: SharedStore = Arc::new(Watched::new(move |_| {
            counts.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }));
        let round = RoundStore::new(&all, 1);
        let of = |call: &dyn Fn()| {
            requests.store(0, Ordering::Relaxed);
            call();
            requests.load(Ordering::Relaxed)
        };
        let pairs: [(&str, &[u8]); 3] = [("a", b"1"), ("b", b"1"), ("c", b"1")];
        assert_eq!(of(&|| round.multi_set(&pairs, limit).unwrap()), 2);
        assert_eq!(of(&|| round.multi_set(&pairs, limit).unwrap()), 1, "they are known");
        // The store itself takes each of these by itself.
        let changes: [(&str, &[u8], &[u8]); 2] = [("d", b"", b"1"), ("e", b"", b"1")];
        assert_eq!(of(&|| drop(round.multi_compare_set(&changes, limit).unwrap())), 1 + 2);
        let question: [(&str, &[u8], &[u8]); 1] = [("f", b"?", b"?")];
        assert_eq!(of(&|| drop(round.multi_compare_set(&question, limit).unwrap())), 1, "it makes no key");
        assert_eq!(all.get("keys/1", limit).unwrap(), b"a\nb\nc\nd\ne\n");
    }

    #[test]
    fn a_key_that_could_not_be_written_down_is_so_the_next_time() {
        let limit = Deadline::after(Duration::from_secs(20));
        let all: SharedStore = Arc::new(MemoryStore::new());
        let round = RoundStore::new(&all, 1);
        // A list to which nothing can be added.
        all.set("keys/1", &vec![b'x'; MAX_VALUE], limit).unwrap();
        assert!(round.set("a", b"1", limit).is_err());
        all.delete_key("keys/1", limit).unwrap();
        round.set("a", b"1", limit).unwrap();
        assert_eq!(all.get("keys/1", limit).unwrap(), b"a\n");
    }

    #[test]
    fn who_notes_a_key_waits_for_another_thread_no_longer_than_it_may() {
        let limit = Deadline::after(Duration::from_secs(20));
        let all: SharedStore = Arc::new(MemoryStore::new());
        let round = RoundStore::new(&all, 1);
        // As another thread, which waits for the store.
        let shortens = round.own.write();
        let error = round.set("a", b"1", Deadline::after(Duration::from_millis(20))).unwrap_err();
        assert!(error.is_timeout() && error.remedy().is_some(), "{error}");
        drop(shortens);
        assert_eq!(all.num_keys(limit).unwrap(), 0);
        round.set("a", b"1", limit).unwrap();
        assert_eq!(all.get("keys/1", limit).unwrap(), b"a\n");
    }

    #[test]
    fn what_rounds_leave_is_removed_also_what_comes_late() {
        let limit = Deadline::after(Duration::from_secs(20));
        let all: SharedStore = Arc::new(MemoryStore::new());
        let rounds: Vec<RoundStore> = (1..=4).map(|round| RoundStore::new(&all, round)).collect();
        for round in &rounds {
            round.set("a", b"1", limit).unwrap();
            round.add("b", 1, limit).unwrap();
            round.compare_set("c", b"", b"1", limit).unwrap();
            // Of a sub-group.
            round.multi_set(&[("d/e", b"1"), ("d/f", b"1")], limit).unwrap();
            round.append("g", b"1", limit).unwrap();
        }
        sweep(&*all, 4, limit).unwrap();
        assert_eq!(rounds[3].get("d/f", limit).unwrap(), b"1");
        assert!(!all.check(&["round/3/a"], limit).unwrap());
        // One round, its list, and how far it went.
        assert_eq!(all.num_keys(limit).unwrap(), 6 + 1 + 1);
        rounds[1].set("late", b"1", limit).unwrap();
        sweep(&*all, 5, limit).unwrap();
        assert_eq!(all.num_keys(limit).unwrap(), 1);
    }
}
