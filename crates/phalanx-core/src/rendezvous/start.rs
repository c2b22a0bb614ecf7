//! Which start this is, in a store that outlives starts and does not say so.
//!
//! torchrun keeps its store when it starts workers again. The number of restarts in their environment is each agent's own: it differs
//! between nodes if one agent has seen its worker fail, and another has only heard that the first came to a new rendezvous; and a node that
//! comes later begins at 0. So the ranks of one start cannot take it for the start's name. Rank 0 draws one:
//!
//! ```text
//! start                the current start: a random number that rank 0 has drawn, and rank 0's number of restarts
//! <start>/hello/<r>    a random number of rank r, which has found this start
//! <start>/welcome/<p>  those numbers of 256 ranks, by rank, once all are there: written by rank 0
//! ```
//!
//! A rank that finds its own number in the welcome knows that rank 0 has drawn this start for it. Without, the start is an earlier one, and the
//! rank waits for the next. All processes of an earlier start have then ended, or have a number of their own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::RankConfig;
use super::arrival::{nonce, reserve, while_reported};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::notice::while_waiting;
use crate::rank::{Generation, Rank};
use crate::store::{PrefixStore, SharedStore, Store, are_there};

const START: &str = "start";
/// So many ranks are welcomed at one key: if each read the numbers of all, they would be as many bytes as the square of the ranks.
const PART: usize = 256;
/// How often a rank that has found an earlier start looks for the next one, in a world of few ranks, and of as many as there may be.
const POLL_INTERVALS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// How long rank 0 may take to begin a start after another rank has found an earlier one. Programs that load for long may be so far apart.
const NEXT_START_LIMIT: Duration = Duration::from_secs(120);
/// How long the store may take to answer a question beside a wait.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
const REMEDY: &str = "does rank 0 run, and has it the same MASTER_ADDR and MASTER_PORT? Where nodes join or leave, torchrun may give them the stores of \
                      different rendezvous: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on all nodes";

/// Agrees with rank 0 on the start. Returns `config` with a scope, and a generation, that all its ranks share.
pub(super) fn agree(store: &SharedStore, config: &RankConfig, deadline: Deadline) -> Result<RankConfig> {
    let starts = PrefixStore::new(config.scope.clone(), Arc::clone(store));
    let start = match config.rank.is_main() {
        true => begin(&starts, config, deadline)?,
        false => find(&starts, config, deadline)?,
    };
    Ok(RankConfig {
        scope: format!("{}/{}", config.scope, start.number),
        generation: start.generation,
        ..config.clone()
    })
}

/// What stands at [`START`].
#[derive(Clone, Debug, PartialEq, Eq)]
struct Start {
    number: String,
    generation: Generation,
}

impl Start {
    fn to_text(&self) -> String {
        format!("{} {}", self.number, self.generation.0)
    }

    fn parse(bytes: &[u8]) -> Result<Self> {
        let parse = || {
            let (number, generation) = str::from_utf8(bytes).ok()?.split_once(' ')?;
            let is_number = number.len() == 32 && number.bytes().all(|byte| byte.is_ascii_hexdigit());
            is_number.then_some(())?;
            Some(Self { number: number.to_owned(), generation: Generation(generation.parse().ok()?) })
        };
        parse().ok_or_else(|| {
            Error::protocol(format!(
                "the store has {:?} where rank 0 names the start",
                String::from_utf8_lossy(&bytes[..bytes.len().min(64)])
            ))
            .in_operation("rendezvous", None)
            .with_remedy("use the same version of Phalanx on all ranks")
        })
    }

    fn key(&self, name: &str) -> String {
        format!("{}/{name}", self.number)
    }

    fn hello(&self, rank: Rank) -> String {
        self.key(&format!("hello/{rank}"))
    }

    fn welcome(&self, part: usize) -> String {
        self.key(&format!("welcome/{part}"))
    }
}

/// How often each of so many ranks looks whether there is another start: all ask the same store, which need not be one of ours.
fn look_interval(ranks: u32) -> Duration {
    let (shortest, longest) = POLL_INTERVALS;
    (shortest * (1 + ranks / 256)).min(longest)
}

/// Rank 0: begins a start, and welcomes all who come to it. Where not all come in time, the start itself reports those that are missing.
fn begin(starts: &PrefixStore, config: &RankConfig, deadline: Deadline) -> Result<Start> {
    let start = Start { number: nonce()?, generation: config.generation };
    let text = start.to_text();
    let others: Vec<Rank> = config.world_size.ranks().filter(|rank| !rank.is_main()).collect();
    let hellos: Vec<String> = others.iter().map(|rank| start.hello(*rank)).collect();
    let keys: Vec<&str> = hellos.iter().map(String::as_str).collect();
    let until = Deadline::after(deadline.remaining().saturating_sub(reserve(deadline)));
    let mut is_replaced = false;
    let mut go_on = || {
        is_replaced = has_changed(starts, &text, until)?;
        if is_replaced { Err(Error::aborted("there is another start")) } else { Ok(()) }
    };
    let missing = || missing(starts, &others, &hellos, until.at_most(ANSWER_TIMEOUT));
    let came =
        while_waiting(missing, || starts.set_and_get(&[(START, text.as_bytes())], &keys, until, &mut go_on));
    match came {
        Ok(numbers) => welcome(starts, &start, &numbers, deadline).map(|()| start),
        Err(_) if is_replaced => {
            Err(Error::mismatch("another process has begun a start as rank 0 in this store")
                .in_operation("rendezvous", None)
                .with_remedy("has the launcher started this process again, or are there two with rank 0?"))
        }
        Err(error) if error.is_timeout() => Ok(start),
        Err(error) => Err(error),
    }
}

/// Welcomes the other ranks, which have these numbers.
fn welcome(starts: &PrefixStore, start: &Start, numbers: &[Vec<u8>], deadline: Deadline) -> Result<()> {
    let parts = numbers.chunks(PART).enumerate();
    let parts: Vec<(String, Vec<u8>)> =
        parts.map(|(part, numbers)| (start.welcome(part), numbers.join(&b'\n'))).collect();
    let parts: Vec<(&str, &[u8])> =
        parts.iter().map(|(key, numbers)| (key.as_str(), numbers.as_slice())).collect();
    starts.multi_set(&parts, deadline)
}

/// For whom rank 0 waits: those of `others` whose hello is not there.
fn missing(starts: &PrefixStore, others: &[Rank], hellos: &[String], deadline: Deadline) -> String {
    let has_come = others.iter().zip(are_there(starts, hellos, deadline));
    let missing = has_come.filter(|(_, has_come)| *has_come == Some(false)).map(|(rank, _)| rank.to_string());
    // The first that are missing say it.
    let missing: Vec<String> = missing.take(8).collect();
    let who = match &missing[..] {
        // The store has not answered.
        [] => "not all have".to_owned(),
        [rank] => format!("rank {rank} has not"),
        ranks => format!("ranks {} have not", ranks.join(", ")),
    };
    format!("rank 0 waits for the others: {who} arrived ({REMEDY})")
}

/// Another rank: finds the start that rank 0 has begun for it.
fn find(starts: &PrefixStore, config: &RankConfig, deadline: Deadline) -> Result<Start> {
    let rank = config.rank;
    let is_earlier = AtomicBool::new(false);
    let waits = || match is_earlier.load(Ordering::Relaxed) {
        true => format!("rank {rank} waits for rank 0: the store has an earlier start only ({REMEDY})"),
        false => format!("rank {rank} waits for the others: not all have come to the store"),
    };
    while_reported(config, waits, || {
        let own = nonce()?;
        let mut start = current(starts, deadline)?;
        while !is_welcome(starts, &start, config, &own, deadline)? {
            is_earlier.store(true, Ordering::Relaxed);
            start = next(starts, &start, config, deadline)?;
            is_earlier.store(false, Ordering::Relaxed);
        }
        Ok(start)
    })
}

fn current(starts: &PrefixStore, deadline: Deadline) -> Result<Start> {
    let text = starts.get(START, deadline).map_err(|error| match error.is_timeout() {
        true => has_not_begun("rank 0 has not come to the store"),
        false => error,
    })?;
    Start::parse(&text)
}

/// Whether `start` is this rank's. Returns as soon as rank 0 has welcomed all, or has begun another start.
fn is_welcome(
    starts: &PrefixStore,
    start: &Start,
    config: &RankConfig,
    own: &str,
    deadline: Deadline,
) -> Result<bool> {
    // Rank 0 is not among them.
    let place = config.rank.index().saturating_sub(1);
    let (text, welcome) = (start.to_text(), start.welcome(place / PART));
    let interval = look_interval(config.world_size.get());
    let mut looked: Option<Instant> = None;
    let mut is_over = false;
    let mut go_on = || {
        if looked.is_some_and(|looked| looked.elapsed() < interval) {
            return Ok(());
        }
        looked = Some(Instant::now());
        is_over = has_changed(starts, &text, deadline)?;
        if is_over { Err(Error::aborted("there is another start")) } else { Ok(()) }
    };
    let outcome =
        starts.set_and_get(&[(&start.hello(config.rank), own.as_bytes())], &[&welcome], deadline, &mut go_on);
    let numbers = match outcome {
        Ok(values) => values.into_iter().next().unwrap_or_default(),
        // Rank 0 may have met all here before it has begun the next one.
        Err(_) if is_over && starts.check(&[&welcome], deadline)? => starts.get(&welcome, deadline)?,
        Err(_) if is_over => return Ok(false),
        Err(error) if error.is_timeout() => {
            return Err(has_not_begun("not all ranks have come to the store"));
        }
        Err(error) => return Err(error),
    };
    Ok(numbers.split(|byte| *byte == b'\n').nth(place % PART) == Some(own.as_bytes()))
}

/// Whether another start than `known` stands in the store, as far as that says so.
///
/// # Errors
/// If the program of this rank has ended the wait.
fn has_changed(starts: &PrefixStore, known: &str, deadline: Deadline) -> Result<bool> {
    match starts.get(START, deadline.at_most(ANSWER_TIMEOUT)) {
        Err(error) if error.is_aborted() => Err(error),
        current => Ok(current.is_ok_and(|current| current != known.as_bytes())),
    }
}

/// The start after `earlier`.
fn next(starts: &PrefixStore, earlier: &Start, config: &RankConfig, deadline: Deadline) -> Result<Start> {
    let (rank, interval) = (config.rank, look_interval(config.world_size.get()));
    let until = deadline.at_most(NEXT_START_LIMIT);
    loop {
        let start = current(starts, deadline)?;
        if start != *earlier {
            return Ok(start);
        }
        if until.has_passed() {
            return Err(has_not_begun(&format!(
                "rank {rank} has found an earlier start in the store, and rank 0 has begun no other within {} s",
                NEXT_START_LIMIT.as_secs()
            )));
        }
        interrupt::check()?;
        std::thread::sleep(interval.min(until.remaining()));
    }
}

fn has_not_begun(cause: &str) -> Error {
    Error::timeout(cause).with_peer(Rank::MAIN).in_operation("rendezvous", None).with_remedy(REMEDY)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::interrupt::interruptible;
    use crate::store::{MemoryStore, checking, pressed_beside_a_wait, slow_beside_a_wait};
    use crate::world_size::WorldSize;

    fn config(rank: u32, size: u32, restarts: u64) -> RankConfig {
        let world = WorldSize::new(size).unwrap();
        let config = RankConfig::given("the store", Some(Rank::new(rank)), Some(world)).unwrap();
        RankConfig { generation: Generation(restarts), ..config }
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(20))
    }

    fn agreed(store: &SharedStore, configs: &[RankConfig]) -> Vec<RankConfig> {
        thread::scope(|scope| {
            let agree = |config| scope.spawn(move || agree(store, config, soon()).unwrap());
            let threads: Vec<_> = configs.iter().map(agree).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn ranks_agree_on_each_start_whatever_their_agents_have_counted() {
        let store: SharedStore = Arc::new(MemoryStore::new());
        let mut scopes = Vec::new();
        // A worker fails: one agent counts it, and the other does not. Then a node joins, and one leaves.
        for restarts in [&[0, 0, 0][..], &[1, 1, 0], &[1, 0, 2], &[0, 1, 1, 0], &[0, 2]] {
            let size = u32::try_from(restarts.len()).unwrap();
            let configs: Vec<RankConfig> =
                (0..size).zip(restarts).map(|(rank, restarts)| config(rank, size, *restarts)).collect();
            let agreed = agreed(&store, &configs);
            for config in &agreed {
                assert_eq!((&config.scope, config.generation), (&agreed[0].scope, Generation(restarts[0])));
            }
            scopes.push(agreed[0].scope.clone());
        }
        let starts = scopes.len();
        scopes.sort();
        scopes.dedup();
        assert_eq!(scopes.len(), starts);
    }

    #[test]
    fn a_rank_that_is_sooner_than_rank_0_waits_for_its_start() {
        let store: SharedStore = Arc::new(MemoryStore::new());
        let configs = [config(0, 2, 0), config(1, 2, 0)];
        let first = agreed(&store, &configs);
        // And one that has ended before all had come.
        let gone = Start { number: "0".repeat(32), generation: Generation(0) };
        let starts = PrefixStore::new("phalanx", Arc::clone(&store));
        for earlier in [None, Some(&gone)] {
            if let Some(earlier) = earlier {
                starts.set(START, earlier.to_text().as_bytes(), soon()).unwrap();
            }
            let second = thread::scope(|scope| {
                let sooner = scope.spawn(|| agree(&store, &configs[1], soon()).unwrap());
                thread::sleep(Duration::from_millis(300));
                assert!(!sooner.is_finished());
                let main = agree(&store, &configs[0], soon()).unwrap();
                assert_eq!(main.scope, sooner.join().unwrap().scope);
                main.scope
            });
            assert_ne!(second, first[0].scope);
        }
    }

    #[test]
    fn many_ranks_are_welcomed_in_parts_and_each_looks_less_often_for_the_next_start() {
        const RANKS: u32 = 300;
        let store: SharedStore = Arc::new(MemoryStore::new());
        let configs: Vec<RankConfig> = (0..RANKS).map(|rank| config(rank, RANKS, 0)).collect();
        let scopes: Vec<String> = agreed(&store, &configs).into_iter().map(|config| config.scope).collect();
        assert!(scopes.iter().all(|scope| *scope == scopes[0]));
        let parts = PrefixStore::new(scopes[0].clone(), store);
        let lengths = [0, 1].map(|part| parts.get(&format!("welcome/{part}"), soon()).unwrap().len());
        // 32 bytes for each, and what separates them.
        assert_eq!(lengths, [256 * 33 - 1, 43 * 33 - 1]);
        let intervals = [2, 255, 4096, 65_536].map(|ranks| look_interval(ranks).as_millis());
        assert_eq!(intervals, [50, 50, 850, 1000]);
    }

    #[test]
    fn ranks_of_which_the_store_says_nothing_are_not_said_to_be_missing() {
        let others: Vec<Rank> = (1..5).map(Rank::new).collect();
        let hellos: Vec<String> = others.iter().map(|rank| format!("hello/{rank}")).collect();
        let store: SharedStore = Arc::new(MemoryStore::new());
        let starts = PrefixStore::new("phalanx", store);
        for rank in [2, 4] {
            starts.set(&format!("hello/{rank}"), b"here", soon()).unwrap();
        }
        let said = missing(&starts, &others, &hellos, soon());
        assert!(said.starts_with("rank 0 waits for the others: ranks 1, 3 have not arrived"), "{said}");
        let silent = PrefixStore::new("phalanx", Arc::new(checking()));
        let said = missing(&silent, &others, &hellos, soon());
        assert!(said.starts_with("rank 0 waits for the others: not all have arrived"), "{said}");
    }

    #[test]
    fn a_rank_may_be_interrupted_while_it_asks_whether_there_is_another_start() {
        let store: SharedStore = Arc::new(slow_beside_a_wait());
        let begun = Start { number: "0".repeat(32), generation: Generation(0) };
        let starts = PrefixStore::new("phalanx", Arc::clone(&store));
        starts.set(START, begun.to_text().as_bytes(), soon()).unwrap();
        for rank in [1, 0] {
            let agree =
                || interruptible(pressed_beside_a_wait, || agree(&store, &config(rank, 2, 0), soon()));
            // Each thread is interrupted once.
            let error = thread::scope(|scope| scope.spawn(agree).join().unwrap().unwrap_err());
            assert!(error.is_aborted() && error.to_string().contains("somebody pressed Ctrl-C"), "{error}");
        }
    }

    #[test]
    fn a_second_rank_0_and_a_missing_one_are_named() {
        let store: SharedStore = Arc::new(MemoryStore::new());
        let error = agree(&store, &config(1, 2, 0), Deadline::after(Duration::from_millis(100))).unwrap_err();
        let said = error.to_string();
        assert!(error.is_timeout() && error.peer() == Some(Rank::MAIN), "{said}");
        assert!(
            said.contains("rank 0 has not come") && said.contains("TORCH_DISABLE_SHARE_RDZV_TCP_STORE"),
            "{said}"
        );
        let starts = PrefixStore::new("phalanx", Arc::clone(&store));
        let error = thread::scope(|scope| {
            let first = scope.spawn(|| agree(&store, &config(0, 2, 0), soon()).unwrap_err());
            starts.wait(&[START], soon()).unwrap();
            let other = Start { number: "f".repeat(32), generation: Generation(0) };
            starts.set(START, other.to_text().as_bytes(), soon()).unwrap();
            first.join().unwrap()
        });
        assert!(error.is_mismatch() && error.to_string().contains("as rank 0"), "{error}");
        starts.set(START, b"something else", soon()).unwrap();
        let error = agree(&store, &config(1, 2, 0), soon()).unwrap_err();
        assert!(error.to_string().contains("\"something else\""), "{error}");
    }
}
