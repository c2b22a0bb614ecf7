//! The bootstrap exchange: data that ranks exchange through the store while they connect.

use std::time::Duration;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};

use super::tcp::MeshConfig;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::health::Health;
use crate::interrupt;
use crate::notice::Reminders;
use crate::rank::Rank;
use crate::store::{MAX_VALUE, are_there};

/// How long the store may take to say which rank's message is missing.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The most ranks of which each reads the messages of all. Among more, the first of each so many gathers theirs, and all read what these
/// ranks have gathered: else the store would look up as many messages as the square of the ranks.
const PART: usize = 256;

/// A message among those that a rank has gathered. It begins and ends with so many bytes of the one before it, and has others between: ranks that
/// follow each other are on one host most times, and every rank reads the messages of all.
#[derive(Serialize, Deserialize)]
struct Alike {
    start: u32,
    end: u32,
    others: Vec<u8>,
}

/// The health of a group that is being connected: data can be exchanged while the connections are made.
#[derive(Default)]
pub(crate) struct Starting {
    /// Once the connections stand.
    health: OnceLock<Arc<Health>>,
    /// Whether this rank could not make its connections.
    has_failed: AtomicBool,
}

impl Starting {
    /// The connections stand.
    pub(crate) fn connected(&self, health: Arc<Health>) {
        // There is one group.
        let _ = self.health.set(health);
    }

    /// The connections could not be made.
    pub(crate) fn fail(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
    }

    fn cause(&self) -> Option<Error> {
        if self.has_failed.load(Ordering::Relaxed) {
            return Some(Error::aborted("the ranks could not be connected"));
        }
        self.health.get().and_then(|health| health.cause())
    }

    fn explain(&self, error: Error) -> Error {
        match self.health.get() {
            Some(health) => health.explain(error),
            None => error,
        }
    }
}

/// Publishes this rank's message on `topic`, and does not wait for any other's. Where this rank would gather those of others, its own stands
/// for them.
pub(crate) fn publish<T: Serialize>(
    config: &MeshConfig<'_>,
    topic: &str,
    message: &T,
    deadline: Deadline,
) -> Result<()> {
    let (own, message) = (key(topic, config.rank), encode(topic, message)?);
    match gathers(config) {
        None => config.store.set(&own, &message, deadline),
        Some(part) => {
            let gathered = part_key(topic, config.rank);
            let part = encode(topic, &pack(&vec![message.clone(); part.len()]))?;
            config.store.multi_set(&[(&own, &message), (&gathered, &part)], deadline)
        }
    }
}

/// Whether some of the ranks gather the messages of others.
pub(crate) fn is_gathered(config: &MeshConfig<'_>) -> bool {
    config.world.count() > PART
}

/// The ranks of which this one gathers the messages in an [`exchange`], beginning with itself.
pub(crate) fn gathers(config: &MeshConfig<'_>) -> Option<Vec<Rank>> {
    let is_first = is_gathered(config) && config.rank.index().is_multiple_of(PART);
    is_first.then(|| part_of(config, config.rank))
}

/// The ranks of which `first` writes the messages on `topic` at `key`; None if it writes something else there.
pub(crate) fn gathered_at(
    config: &MeshConfig<'_>,
    topic: &str,
    (first, key): (Rank, &str),
) -> Option<Vec<Rank>> {
    (is_gathered(config) && key == part_key(topic, first)).then(|| part_of(config, first))
}

fn part_of(config: &MeshConfig<'_>, first: Rank) -> Vec<Rank> {
    config.world.ranks().skip(first.index()).take(PART).collect()
}

fn encode<T: Serialize>(topic: &str, message: &T) -> Result<Vec<u8>> {
    postcard::to_stdvec(message).map_err(|error| malformed(topic, error))
}

/// Publishes this rank's message on `topic` and returns all ranks' messages. If a rank dies meanwhile, the wait ends.
pub(crate) fn exchange<T: Serialize + for<'a> Deserialize<'a>>(
    config: &MeshConfig<'_>,
    starting: &Starting,
    topic: &str,
    message: &T,
    deadline: Deadline,
) -> Result<Vec<T>> {
    let (own, message) = (key(topic, config.rank), encode(topic, message)?);
    let messages = of_all(config, topic, |gathered, keys| {
        let pair = gathered.unwrap_or((own.as_str(), message.as_slice()));
        set_and_get(config, starting, topic, pair, keys, deadline)
    })?;
    messages.iter().map(|bytes| decode(topic, bytes)).collect()
}

/// The messages of all ranks on `topic`, by rank. `swap` writes this rank's own, or what this rank has gathered, if it is given that; and returns
/// the values of keys, each with the rank that writes it.
pub(crate) fn of_all(
    config: &MeshConfig<'_>,
    topic: &str,
    mut swap: impl FnMut(Option<(&str, &[u8])>, &[(Rank, String)]) -> Result<Vec<Vec<u8>>>,
) -> Result<Vec<Vec<u8>>> {
    let ranks: Vec<Rank> = config.world.ranks().collect();
    if !is_gathered(config) {
        return swap(None, &keys_on(topic, &ranks));
    }
    let parts: Vec<(Rank, String)> =
        ranks.iter().step_by(PART).map(|first| (*first, part_key(topic, *first))).collect();
    let parts = match gathers(config) {
        None => swap(None, &parts)?,
        Some(part) => {
            let gathered = encode(topic, &pack(&swap(None, &keys_on(topic, &part))?))?;
            let own = part_key(topic, config.rank);
            swap(Some((own.as_str(), gathered.as_slice())), &parts)?
        }
    };
    let mut messages = Vec::with_capacity(ranks.len());
    for (part, ranks) in parts.iter().zip(ranks.chunks(PART)) {
        let part = unpack(topic, part)?;
        if part.len() != ranks.len() {
            return Err(Error::malformed(format!(
                "the store holds {} messages on {topic} of {} ranks",
                part.len(),
                ranks.len()
            )));
        }
        messages.extend(part);
    }
    Ok(messages)
}

/// The messages as they are written together.
fn pack(messages: &[Vec<u8>]) -> Vec<Alike> {
    let mut before: &[u8] = &[];
    let alike = messages.iter().map(|message| {
        let start = before.iter().zip(message).take_while(|(one, other)| one == other).count();
        let most = before.len().min(message.len()) - start;
        let ends = before.iter().rev().zip(message.iter().rev()).take(most);
        let end = ends.take_while(|(one, other)| one == other).count();
        before = message;
        let others = message[start..message.len() - end].to_vec();
        Alike { start: start as u32, end: end as u32, others }
    });
    alike.collect()
}

/// The reverse of [`pack`] and [`encode`].
fn unpack(topic: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
    let mut messages: Vec<Vec<u8>> = Vec::new();
    let mut total = 0;
    for Alike { start, end, others } in decode::<Vec<Alike>>(topic, bytes)? {
        let before = messages.last().map_or(&[][..], Vec::as_slice);
        let (start, end) = (start as usize, end as usize);
        total += start + end + others.len();
        if start + end > before.len() || total > MAX_VALUE {
            return Err(Error::malformed(format!("the store holds malformed messages on {topic}")));
        }
        let message = [&before[..start], &others, &before[before.len() - end..]].concat();
        messages.push(message);
    }
    Ok(messages)
}

/// [`exchange`] among some of the `ranks`, including this one; returns their messages in that order.
pub(crate) fn exchange_among<T: Serialize + for<'a> Deserialize<'a>>(
    config: &MeshConfig<'_>,
    ranks: &[Rank],
    starting: &Starting,
    topic: &str,
    message: &T,
    deadline: Deadline,
) -> Result<Vec<T>> {
    let (own, message) = (key(topic, config.rank), encode(topic, message)?);
    let keys = keys_on(topic, ranks);
    let messages = set_and_get(config, starting, topic, (&own, &message), &keys, deadline)?;
    messages.iter().map(|bytes| decode(topic, bytes)).collect()
}

/// Writes a pair, and returns the values of `keys`, each with the rank that writes it, when all have been written.
fn set_and_get(
    config: &MeshConfig<'_>,
    starting: &Starting,
    topic: &str,
    pair: (&str, &[u8]),
    keys: &[(Rank, String)],
    deadline: Deadline,
) -> Result<Vec<Vec<u8>>> {
    let names: Vec<&str> = keys.iter().map(|(_, key)| key.as_str()).collect();
    let mut reminders = Reminders::of(config.rank, config.world);
    let mut go_on = || {
        if let Some(cause) = starting.cause() {
            return Err(cause);
        }
        (config.watch)()?;
        reminders.remind(|| {
            let who = missing(config, keys);
            format!("rank {} waits for {who} to publish the message {topic:?}", config.rank)
        });
        Ok(())
    };
    // One request, also where a round trip is long: a wait in short parts would never see its answer.
    let messages = config.store.set_and_get(&[pair], &names, deadline, &mut go_on);
    messages.map_err(|error| match error.is_timeout() {
        true => error,
        // Rank 0 may have died, with the store that it serves.
        false => starting.explain(error),
    })
}

/// Who has not written its message, as far as the store says.
fn missing(config: &MeshConfig<'_>, keys: &[(Rank, String)]) -> String {
    let soon = Deadline::after(ANSWER_TIMEOUT);
    let (ranks, keys): (Vec<Rank>, Vec<String>) = keys.iter().cloned().unzip();
    let mut there = are_there(config.store, &keys, soon);
    // An error here is nobody's: the program's check is left for the wait itself.
    let first = interrupt::undisturbed(|| there.position(|is_there| is_there == Some(false)));
    match first.and_then(|first| ranks.get(first)) {
        Some(rank) => format!("rank {rank}"),
        None => "other ranks".to_owned(),
    }
}

/// The key of the message of `rank` on `topic`.
pub(crate) fn key(topic: &str, rank: Rank) -> String {
    format!("{topic}/{rank}")
}

/// The keys of the messages of these `ranks`.
pub(crate) fn keys_on(topic: &str, ranks: &[Rank]) -> Vec<(Rank, String)> {
    ranks.iter().map(|rank| (*rank, key(topic, *rank))).collect()
}

/// The key of the messages that `first` has gathered.
fn part_key(topic: &str, first: Rank) -> String {
    format!("{topic}/from/{first}")
}

/// The keys that `rank` writes in an [`exchange`] on `topic`.
pub(crate) fn keys_of(topic: &str, rank: Rank) -> Vec<String> {
    let part = rank.index().is_multiple_of(PART).then(|| part_key(topic, rank));
    [key(topic, rank)].into_iter().chain(part).collect()
}

fn decode<T: for<'a> Deserialize<'a>>(topic: &str, bytes: &[u8]) -> Result<T> {
    postcard::from_bytes(bytes).map_err(|error| malformed(topic, error))
}

fn malformed(topic: &str, error: postcard::Error) -> Error {
    Error::malformed(format!("the store holds a malformed message on {topic}")).with_source(error)
}

/// For `phalanx::fuzzing`: decodes what a rank has gathered.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub(super) fn fuzz(bytes: &[u8]) -> bool {
    let Ok(messages) = unpack("gathered", bytes) else { return false };
    let again = encode("gathered", &pack(&messages)).and_then(|packed| unpack("gathered", &packed));
    assert!(again.is_ok_and(|again| again == messages));
    true
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::thread;

    use super::*;
    use crate::store::{MemoryStore, Store, TcpStore, TcpStoreServer, checking, far_away};
    use crate::world_size::WorldSize;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn each_of_many_ranks_has_the_messages_of_all_and_reads_few() {
        for ranks in [3, PART as u32 + 4] {
            let (store, world) = (MemoryStore::new(), WorldSize::new(ranks).unwrap());
            thread::scope(|scope| {
                for rank in world.ranks() {
                    let store = &store;
                    scope.spawn(move || {
                        let (config, own) =
                            (MeshConfig::on_loopback(store, rank, world), format!("of {rank}"));
                        let deadline = Deadline::after(LIMIT);
                        let all = exchange(&config, &Starting::default(), "topic", &own, deadline).unwrap();
                        assert!(all.into_iter().eq(world.ranks().map(|rank| format!("of {rank}"))));
                    });
                }
            });
            let written: Vec<String> = world.ranks().flat_map(|rank| keys_of("topic", rank)).collect();
            let parts = if ranks == 3 { 0 } else { 2 };
            assert_eq!(store.num_keys(Deadline::after(LIMIT)).unwrap(), world.count() + parts);
            let written: Vec<&str> = written.iter().map(String::as_str).collect();
            store.delete_keys(&written, Deadline::after(LIMIT)).unwrap();
            assert_eq!(store.num_keys(Deadline::after(LIMIT)).unwrap(), 0);
        }
    }

    #[test]
    fn messages_that_are_alike_are_short_together_and_read_as_they_were() {
        let of = |rank: usize| {
            format!("10.0.0.{}:{} node{:04}", rank / 8, 30_000 + 7 * rank, rank / 8).into_bytes()
        };
        let addresses: Vec<Vec<u8>> = (0..PART).map(of).collect();
        let packed = encode("topic", &pack(&addresses)).unwrap();
        assert!(packed.len() < 9 * PART && addresses.concat().len() > 20 * PART, "{}", packed.len());
        let others: [&[&str]; 4] =
            [&[], &[""], &["aa", "a", "", "aaa", "aba", "aba"], &["ab", "abab", "ab", "b"]];
        let others =
            others.map(|texts| texts.iter().map(|text| text.as_bytes().to_vec()).collect::<Vec<_>>());
        for messages in others.into_iter().chain([addresses]) {
            let packed = encode("topic", &pack(&messages)).unwrap();
            assert_eq!(unpack("topic", &packed).unwrap(), messages);
            assert!(fuzz(&packed));
        }
        // As the fuzzer's seed of them is written.
        let packed = encode("topic", &pack(&[vec![0; 2], vec![0; 2]])).unwrap();
        assert_eq!(packed, [2, 0, 0, 2, 0, 0, 2, 0, 0]);
    }

    #[test]
    fn messages_that_would_take_more_memory_than_they_may_are_an_error() {
        let alike = |start, end| Alike { start, end, others: vec![0; 2] };
        let unpacked = |alike: Vec<Alike>| unpack("topic", &encode("topic", &alike).unwrap());
        assert_eq!(unpacked(vec![alike(0, 0), alike(1, 1)]).unwrap(), [vec![0; 2], vec![0; 4]]);
        // More than the one before has.
        for malformed in [vec![alike(1, 0)], vec![alike(0, 0), alike(2, 1)], vec![alike(0, u32::MAX)]] {
            assert!(unpacked(malformed).is_err());
        }
        // Each is two bytes longer than the one before.
        let long = (0..4096).map(|index| alike(2 * index, 0)).collect();
        assert!(unpacked(long).is_err());
    }

    #[test]
    fn who_does_not_wait_for_others_keeps_none_waiting() {
        let (store, world, deadline) =
            (MemoryStore::new(), WorldSize::new(PART as u32 + 4).unwrap(), Deadline::after(LIMIT));
        for first in [Rank::MAIN, Rank::new(PART as u32)] {
            publish(&MeshConfig::on_loopback(&store, first, world), "topic", &first.get(), deadline).unwrap();
        }
        let config = MeshConfig::on_loopback(&store, Rank::new(1), world);
        let all = exchange(&config, &Starting::default(), "topic", &1u32, deadline).unwrap();
        assert_eq!(all, [vec![0; PART], vec![PART as u32; 4]].concat());
    }

    #[test]
    fn who_is_missing_is_found_over_a_slow_network() {
        let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
        // For a round trip for each, there would be no time.
        let (address, _) = far_away(&server, Duration::from_millis(100));
        let store = TcpStore::connect(address, Deadline::after(LIMIT)).unwrap();
        let ranks: Vec<Rank> = (0..PART as u32).map(Rank::new).collect();
        let keys = keys_on("topic", &ranks);
        let there: Vec<(&str, &[u8])> =
            keys[..200].iter().map(|(_, key)| (key.as_str(), &b"?"[..])).collect();
        store.multi_set(&there, Deadline::after(LIMIT)).unwrap();
        let world = WorldSize::new(PART as u32).unwrap();
        let config = MeshConfig::on_loopback(&store, Rank::MAIN, world);
        assert_eq!(missing(&config, &keys), "rank 200");
    }

    #[test]
    fn what_ends_a_wait_is_not_lost_while_it_is_asked_who_is_missing() {
        thread_local! {
            static CHECKS: Cell<u32> = const { Cell::new(0) };
        }
        fn ends() -> Result<()> {
            CHECKS.set(CHECKS.get() + 1);
            Err(Error::aborted("enough"))
        }
        let store = checking();
        let config = MeshConfig::on_loopback(&store, Rank::MAIN, WorldSize::new(2).unwrap());
        let after = interrupt::interruptible(ends, || {
            assert_eq!(missing(&config, &[(Rank::new(1), "key".to_owned())]), "other ranks");
            assert_eq!(CHECKS.get(), 0);
            // The next wait gets it.
            config.store.get("key", Deadline::after(LIMIT)).unwrap_err()
        });
        assert!(after.to_string().contains("enough"), "{after}");
    }

    #[test]
    fn messages_of_fewer_ranks_than_a_part_has_are_an_error() {
        let (store, world, deadline) =
            (MemoryStore::new(), WorldSize::new(PART as u32 + 4).unwrap(), Deadline::after(LIMIT));
        publish(&MeshConfig::on_loopback(&store, Rank::MAIN, world), "topic", &0u8, deadline).unwrap();
        let second = encode("topic", &pack(&[(); 3].map(|()| vec![1u8]))).unwrap();
        store.set(&part_key("topic", Rank::new(PART as u32)), &second, deadline).unwrap();
        let config = MeshConfig::on_loopback(&store, Rank::new(1), world);
        let error = exchange(&config, &Starting::default(), "topic", &1u8, deadline).unwrap_err();
        assert!(error.to_string().contains("holds 3 messages on topic of 4 ranks"), "{error}");
    }
}
