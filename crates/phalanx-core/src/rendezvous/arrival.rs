//! The start of a world: every rank reports its arrival, and rank 0 reports that all are there.
//!
//! Keys, below the job's scope and a round:
//!
//! ```text
//! rank/<r>   who came as rank r: a number of its own, world size, process, host, the address at which it found the store, and what
//!            identifies the host and the process, as their names and numbers do not
//! world      the world size that the first to come expects, and the version of this protocol
//! hosts      the ranks' hosts, if there are many ranks: rank 0 writes them with the verdict
//! asking     in a large world, how many ranks have asked who is missing when their time was up
//! verdict    the outcome: "ok" with the number of the first group, "over", or what went wrong; written once, read by all
//! ```
//!
//! A rank writes the first two, and waits for the third, in one request: one round trip, however far away the store is.
//!
//! A process may meet its world again in a store that still has the first meeting. Then it finds its own entry at
//! `rank/<r>`, and goes on to the next round.
//!
//! If rank 0 serves the store, the next meeting has a store of its own, at the same address. A rank that is sooner there than rank 0 finds
//! the last one. So rank 0, before it ends that, writes that the next round is over: whoever waits there, or still comes, begins again.
//! Without that it would wait in a store that rank 0 has left, and rank 0 for it in another.

use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use phalanx_proto::rendezvous as roll_call;
use phalanx_proto::rendezvous::{
    ArrivalError, Entry, Identity, Missing, OK, OVER, Place, number_in, other_world, place,
};

use super::RankConfig;
use super::hosts::{Host, Hosts};
use crate::deadline::Deadline;
use crate::error::{Error, Kind, Result};
use crate::host;
use crate::interrupt;
use crate::notice::{reports, while_waiting_if};
use crate::random;
use crate::store::{PrefixStore, SharedStore, Store, are_there};
use crate::transport;
use crate::wire::hello::JobId;
use crate::world_size::WorldSize;

/// In a world of at most so many ranks, each reads where the others are. In a larger one rank 0 writes it for all: else the store would look up as
/// many entries as the square of the ranks.
const READ_BY_ALL: usize = 256;
/// Where rank 0 writes it.
pub(super) const HOSTS: &str = "hosts";

/// In a world of at most so many ranks, each checks which ranks are missing. In a larger one only rank 0 does so while it waits, and when time is up
/// the first so many ranks to which that happens.
const ASKED: u32 = 64;

/// Who this process is.
///
/// # Errors
/// If the system has no random numbers.
pub(super) fn of_process() -> Result<Identity> {
    let process = std::process::id().to_string();
    // A child that was forked is another process.
    let process_id = format!("{process}-{:016x}", process_nonce()?);
    Ok(Identity { host: host::name(), process, host_id: host::id(), process_id })
}

/// The number of this process, which no other has, also in another container with the same process number.
fn process_nonce() -> Result<u64> {
    static NONCE: OnceLock<u64> = OnceLock::new();
    match NONCE.get() {
        Some(nonce) => Ok(*nonce),
        None => {
            let nonce = random::number()?;
            Ok(*NONCE.get_or_init(|| nonce))
        }
    }
}

/// How a start has ended for a rank that has met no error.
pub(super) enum Arrival {
    /// All have come.
    Met(Arrived),
    /// The store ends: rank 0 has left the world that was met there.
    Over,
}

impl Arrival {
    /// The world, in a store that only its last user ends.
    ///
    /// # Errors
    /// If something else has written to the store.
    pub fn met(self) -> Result<Arrived> {
        match self {
            Self::Met(arrived) => Ok(arrived),
            Self::Over => {
                Err(Error::malformed("the store says that rank 0 has left it, and rank 0 does not serve it")
                    .in_operation("rendezvous", None))
            }
        }
    }
}

/// A complete world.
pub(super) struct Arrived {
    /// The part of the store that belongs to it.
    pub store: SharedStore,
    /// The number of its first group.
    pub group_number: JobId,
    /// What rank 0 ends if it serves the store.
    pub rounds: Option<Rounds>,
    roll_call: PrefixStore,
    world_size: WorldSize,
}

/// Waits until all ranks have arrived. Returns an error on every rank if one is missing at the deadline, is there
/// twice, or expects another world size. `found` is the address at which this rank found the store, if it has one.
pub(super) fn arrive(
    store: &SharedStore,
    found: Option<IpAddr>,
    config: &RankConfig,
    me: &Identity,
    deadline: Deadline,
) -> Result<Arrival> {
    let started = Instant::now();
    let entry = Entry::new(nonce()?, config.world_size, me.clone(), found);
    // Published here, so that ranks that get further can see if this one is stopped while it waits.
    let (name, process) = transport::process_record(config.rank)?;
    let process = (&*format!("group/{name}"), &*process);
    // Some time is kept to find out which ranks are missing, and to tell the others.
    let waiting = Deadline::after(deadline.remaining().saturating_sub(reserve(deadline)));
    let wait = |roll_call: &PrefixStore, changes: &[Change<'_>], signed_in: &mut SignedInCheck<'_>| {
        let awaited = || awaited(roll_call, config, started, waiting.at_most(ANSWER_TIMEOUT));
        while_reported(config, awaited, || match config.rank.is_main() {
            true => judge(roll_call, config, changes, signed_in, waiting),
            false => {
                let outcome =
                    roll_call.compare_set_and_get(changes, &["verdict"], waiting, signed_in, &mut || Ok(()));
                outcome.map(|outcome| outcome.into_iter().next().unwrap_or_default())
            }
        })
    };
    let Some(SignedIn { roll_call, round, expected, outcome }) =
        sign_in(store, config, &entry, Some(process), deadline, wait)?
    else {
        return Ok(Arrival::Over);
    };
    if let Some(error) = other_world(config.rank, &entry, &expected) {
        return Err(fail(&roll_call, error, deadline));
    }
    let group: SharedStore =
        Arc::new(PrefixStore::new(format!("{}/{round}/group", config.scope), Arc::clone(store)));
    let group_number = match outcome {
        Ok(outcome) if outcome == OVER => return Ok(Arrival::Over),
        Ok(outcome) => number_in(&outcome),
        Err(error) if error.is_timeout() => {
            let asked = asks_of(&roll_call, config, deadline);
            let told = match asked < config.world_size.count() {
                true => told_by_others(&roll_call, config, deadline)?,
                false => None,
            };
            match told {
                Some(outcome) => number_in(&outcome),
                None => {
                    let error = missing(&roll_call, config, asked, started, deadline);
                    report_missing(&roll_call, error, deadline)
                }
            }
        }
        Err(error) => Err(report_aborted(&roll_call, config, error)),
    }?;
    let rounds = Some(Rounds { scope: config.scope.clone(), met: round });
    Ok(Arrival::Met(Arrived { store: group, group_number, rounds, roll_call, world_size: config.world_size }))
}

/// Waits for the other ranks, and reports now and then `what` is waited for, unless others do.
pub(super) fn while_reported<R>(
    config: &RankConfig,
    what: impl Fn() -> String + Send,
    wait: impl FnOnce() -> R,
) -> R {
    while_waiting_if(reports(config.rank, config.world_size), what, wait)
}

/// The rounds of a job in a store.
#[derive(Debug)]
pub(super) struct Rounds {
    scope: String,
    /// The one in which this rank has met the others.
    met: u64,
}

impl Rounds {
    /// Writes that the next round is over. Those in between have ended with an error.
    ///
    /// # Errors
    /// If the store does not answer.
    pub fn end(&self, store: &dyn Store, deadline: Deadline) -> Result<()> {
        let mut round = self.met + 1;
        while store.compare_set(&format!("{}/{round}/verdict", self.scope), b"", OVER, deadline)? != OVER {
            round += 1;
        }
        Ok(())
    }
}

/// Lets the next start in `store` fail on every rank, if this process has met its world there already and still serves it. None if it has not.
pub(super) fn refuse_another(
    store: &SharedStore,
    config: &RankConfig,
    me: &Identity,
    deadline: Deadline,
) -> Result<Option<Error>> {
    let first = PrefixStore::new(format!("{}/0", config.scope), Arc::clone(store));
    let key = format!("rank/{}", config.rank);
    // Another process's store, also one of another version, is another job's.
    if !first.check(&[&key], deadline)?
        || !Entry::parse(&first.get(&key, deadline)?).is_ok_and(|entry| entry.identity == *me)
    {
        return Ok(None);
    }
    let entry = Entry::new(nonce()?, config.world_size, me.clone(), None);
    let only_sign_in =
        |roll_call: &PrefixStore, changes: &[Change<'_>], signed_in: &mut SignedInCheck<'_>| {
            signed_in(&roll_call.multi_compare_set(changes, deadline)?)
        };
    let signed_in = sign_in(store, config, &entry, None, deadline, only_sign_in)?;
    Ok(signed_in.map(|SignedIn { roll_call, .. }| {
        let cause = format!(
            "process {} on {} is rank {} of another group already, whose store it serves at this address",
            me.process, me.host, config.rank
        );
        let error = ArrivalError { kind: Kind::InvalidArgument, peer: Some(config.rank.get()), cause };
        fail(&roll_call, error, deadline)
    }))
}

/// Rank 0: signs in, waits until all have come, and writes the outcome, unless there is one before.
fn judge(
    roll_call: &PrefixStore,
    config: &RankConfig,
    changes: &[Change<'_>],
    signed_in: &mut SignedInCheck<'_>,
    deadline: Deadline,
) -> Result<Vec<u8>> {
    let keys: Vec<String> = config.world_size.ranks().map(|rank| format!("rank/{rank}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let mut is_decided = false;
    let mut go_on = || {
        is_decided = match roll_call.check(&["verdict"], deadline.at_most(ANSWER_TIMEOUT)) {
            // The program makes its check once: in this question as well as in the wait.
            Err(error) if error.is_aborted() => return Err(error),
            answer => answer.unwrap_or(false),
        };
        if is_decided { Err(Error::aborted("another rank has ended the start")) } else { Ok(()) }
    };
    match roll_call.compare_set_and_get(changes, &keys, deadline, signed_in, &mut go_on) {
        Err(_) if is_decided => roll_call.get("verdict", deadline.max(Deadline::after(ANSWER_TIMEOUT))),
        Err(error) => Err(error),
        Ok(entries) => {
            // A rank that expects another world has said so before it reads this, or does so now.
            roll_call::judge(config.rank, config.world_size, entries.iter().map(Vec::as_slice))
                .map_err(|error| fail(roll_call, error, deadline))?;
            let fine = [OK, &random::bytes::<{ size_of::<JobId>() }>()?].concat();
            if entries.len() <= READ_BY_ALL {
                return roll_call.compare_set("verdict", b"", &fine, deadline);
            }
            let hosts = hosts_in(&entries)?.to_bytes()?;
            let changes: [Change<'_>; 2] = [(HOSTS, b"", &hosts), ("verdict", b"", &fine)];
            Ok(roll_call.multi_compare_set(&changes, deadline)?.pop().unwrap_or_default())
        }
    }
}

/// The part of the remaining time that is kept for reporting an error.
pub(super) fn reserve(deadline: Deadline) -> Duration {
    (deadline.remaining() / 5).min(Duration::from_secs(2))
}

/// A random number that cannot be guessed.
pub(super) fn nonce() -> Result<String> {
    Ok(format!("{:032x}", u128::from_le_bytes(random::bytes()?)))
}

/// A change of the store: a key, the value that is expected there, and the new one.
type Change<'a> = (&'a str, &'a [u8], &'a [u8]);

/// Gets what the store has after the changes of a sign-in. An error means that this rank does not wait in that round.
type SignedInCheck<'a> = dyn FnMut(&[Vec<u8>]) -> Result<()> + 'a;

/// The round in which a rank has signed in.
struct SignedIn<T> {
    roll_call: PrefixStore,
    round: u64,
    /// The world size that the first to come expects.
    expected: Vec<u8>,
    /// What came after the sign-in.
    outcome: Result<T>,
}

/// Writes the entry, and the record of this `process` if there is one, into the first round in which this process has no entry yet. `then`
/// makes these changes, and what follows in the same request. None if rank 0 has ended that round.
fn sign_in<T>(
    store: &SharedStore,
    config: &RankConfig,
    entry: &Entry,
    process: Option<(&str, &[u8])>,
    deadline: Deadline,
    then: impl Fn(&PrefixStore, &[Change<'_>], &mut SignedInCheck<'_>) -> Result<T>,
) -> Result<Option<SignedIn<T>>> {
    let mine = entry.to_text().into_bytes();
    let name = format!("rank/{}", config.rank);
    let mut changes: Vec<Change<'_>> = vec![(&name, b"", &mine), ("world", b"", entry.world.as_bytes())];
    changes.extend(process.map(|(key, record)| (key, &b""[..], record)));
    for round in 0.. {
        let roll_call = PrefixStore::new(format!("{}/{round}", config.scope), Arc::clone(store));
        let mut found = None;
        let outcome = then(&roll_call, &changes, &mut |values| {
            let [there, expected, ..] = values else {
                return Err(Error::malformed("the store has not answered all parts of a request"));
            };
            let place = place(config.rank, entry, there);
            let waits = matches!(place, Place::Taken) && other_world(config.rank, entry, expected).is_none();
            found = Some((place, expected.clone()));
            if waits { Ok(()) } else { Err(Error::aborted("this rank does not wait in this round")) }
        });
        match found {
            None => {
                let lost = || Error::malformed("the store has not answered the sign-in");
                return Err(report_aborted(&roll_call, config, outcome.err().unwrap_or_else(lost)));
            }
            Some((Place::Taken, expected)) => {
                return Ok(Some(SignedIn { roll_call, round, expected, outcome }));
            }
            Some((Place::Met, _)) => {}
            Some((Place::Refused(error), _)) => return Err(fail(&roll_call, error, deadline)),
        }
        // The first round of a store has been met, or this process has left it with an error.
        if round > 0
            && roll_call.check(&["verdict"], deadline)?
            && roll_call.get("verdict", deadline)? == OVER
        {
            return Ok(None);
        }
    }
    Err(Error::malformed("the store refuses this rank's arrival in every round"))
}

/// Writes an error of this rank as the outcome, and returns it.
fn fail(roll_call: &PrefixStore, error: ArrivalError, deadline: Deadline) -> Error {
    let _ = write_outcome(roll_call, &error, deadline);
    error.into_error()
}

/// If the program of this rank has ended its wait, tells the others why this rank does not come: in the roll-call, and in the group's store, in which
/// they may wait for it already. With any other error it is the store that is lost.
pub(super) fn report_aborted(roll_call: &PrefixStore, config: &RankConfig, error: Error) -> Error {
    if !error.is_aborted() {
        return error;
    }
    let rank = config.rank;
    let cause = format!("rank {rank} has left the start: {error}");
    let told = ArrivalError { kind: error.kind(), peer: Some(rank.get()), cause };
    interrupt::undisturbed(|| write_outcome(roll_call, &told, Deadline::now()));
    let group = PrefixStore::new("group", Arc::new(roll_call.clone()));
    transport::report_failed_start(&group, rank, &host::name(), error)
}

/// This rank's time is up: reports that to every rank, unless there is an outcome already. An existing outcome holds for
/// this rank as well: the others may have gone on.
fn report_missing(roll_call: &PrefixStore, error: ArrivalError, deadline: Deadline) -> Result<JobId> {
    match write_outcome(roll_call, &error, deadline) {
        Some(outcome) => number_in(&outcome),
        None => Err(error.into_error()),
    }
}

/// Writes an outcome unless there is one; returns the one that is there.
fn write_outcome(roll_call: &PrefixStore, error: &ArrivalError, deadline: Deadline) -> Option<Vec<u8>> {
    let outcome = serde_json::to_vec(error).ok()?;
    // If the store is gone too, the others find out at their own deadlines.
    roll_call.compare_set("verdict", b"", &outcome, deadline.max(Deadline::after(LAST_MESSAGE_TIMEOUT))).ok()
}

/// How long reporting may take after the deadline: a round trip of a slow network, with a packet that is sent again.
const LAST_MESSAGE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the store may take to answer a question beside the wait.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Reports the missing ranks, while there is time.
fn awaited(roll_call: &PrefixStore, config: &RankConfig, started: Instant, deadline: Deadline) -> String {
    let world = config.world_size.get();
    // In a large world, so many queries would keep the store from serving ranks that arrive.
    let cause = match world <= ASKED || config.rank.is_main() {
        true => missing(roll_call, config, config.world_size.count(), started, deadline).cause,
        false => format!("not all of the {world} ranks have arrived"),
    };
    format!("rank {} waits for the others: {cause}", config.rank)
}

/// Of how many ranks this one asks whether they have arrived, when its time is up: of all, or in a large world, in which some do so already, of
/// the first. If each asked of all, the store would look up as many entries as the square of the ranks, in the two seconds that are left.
fn asks_of(roll_call: &PrefixStore, config: &RankConfig, deadline: Deadline) -> usize {
    let asks_of_all = config.world_size.get() <= ASKED
        || roll_call.add("asking", 1, deadline).is_ok_and(|place| place <= i64::from(ASKED));
    if asks_of_all { config.world_size.count() } else { ASKED as usize }
}

/// What another rank says that asks of all, for most of the time that is left. None if none does.
fn told_by_others(
    roll_call: &PrefixStore,
    config: &RankConfig,
    deadline: Deadline,
) -> Result<Option<Vec<u8>>> {
    match roll_call.get("verdict", Deadline::after(deadline.remaining() * 3 / 4)) {
        Ok(outcome) => Ok(Some(outcome)),
        Err(error) if error.is_timeout() => Ok(None),
        Err(error) => Err(report_aborted(roll_call, config, error)),
    }
}

/// Names the missing ones of so many ranks.
fn missing(
    roll_call: &PrefixStore,
    config: &RankConfig,
    asked: usize,
    started: Instant,
    deadline: Deadline,
) -> ArrivalError {
    let (mut missing, mut are_all_there) = (Missing::default(), true);
    let keys: Vec<String> =
        config.world_size.ranks().take(asked).map(|rank| format!("rank/{rank}")).collect();
    for (rank, has_arrived) in config.world_size.ranks().zip(are_there(roll_call, &keys, deadline)) {
        are_all_there &= has_arrived == Some(true);
        if !missing.note(rank, has_arrived) {
            break;
        }
    }
    let (world, waited) = (config.world_size, started.elapsed().as_secs_f64());
    if are_all_there && asked < world.count() {
        let cause = format!("not all of the {world} ranks have arrived within {waited:.1} s");
        return ArrivalError { kind: Kind::Timeout, peer: None, cause };
    }
    missing.error(config.rank, world, waited)
}

impl Arrived {
    /// The hosts of all ranks.
    pub fn hosts(&self, deadline: Deadline) -> Result<Hosts> {
        if self.world_size.count() > READ_BY_ALL {
            return Hosts::from_bytes(&self.roll_call.get(HOSTS, deadline)?, self.world_size.count());
        }
        let keys: Vec<String> = self.world_size.ranks().map(|rank| format!("rank/{rank}")).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        hosts_in(&self.roll_call.multi_get(&keys, deadline)?)
    }
}

/// The hosts in the entries of all ranks.
fn hosts_in(entries: &[Vec<u8>]) -> Result<Hosts> {
    let hosts = entries.iter().map(|entry| {
        let Entry { identity, store, .. } = Entry::parse(entry).map_err(Error::protocol)?;
        Ok(Host { id: identity.host_id.into(), store })
    });
    hosts.collect::<Result<_>>().map(Hosts)
}

/// For `phalanx::fuzzing`: a rank's entry, or an outcome.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub(super) fn fuzz(bytes: &[u8]) -> bool {
    assert_eq!(phalanx_proto::rendezvous::read_outcome(bytes).operation(), Some("rendezvous"));
    if let Ok(hosts) = Hosts::from_bytes(bytes, 3) {
        assert_eq!(hosts.0.len(), 3);
    }
    let Ok(entry) = Entry::parse(bytes) else { return serde_json::from_slice::<ArrivalError>(bytes).is_ok() };
    assert_eq!(Entry::parse(entry.to_text().as_bytes()).ok(), Some(entry));
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_proto::rendezvous::{VERSION, read_outcome};

    use crate::interrupt::interruptible;
    use crate::rank::Rank;
    use crate::store::{MemoryStore, pressed_beside_a_wait, slow_beside_a_wait};

    #[test]
    fn at_the_deadline_the_verdict_that_stands_holds() {
        let late = || ArrivalError { kind: Kind::Timeout, peer: Some(2), cause: "rank 2 is late".into() };
        let soon = Deadline::after(Duration::from_secs(20));
        let settled = |outcome: &[u8]| {
            let roll_call = PrefixStore::new("roll_call", Arc::new(MemoryStore::new()));
            if !outcome.is_empty() {
                roll_call.set("verdict", outcome, soon).unwrap();
            }
            report_missing(&roll_call, late(), soon)
        };
        assert_eq!(settled(b"ok 0123456789abcdef").unwrap(), *b"0123456789abcdef");
        assert!(settled(b"ok 0123456789abcde").unwrap_err().to_string().contains("cannot be read"));
        let error = settled(b"").unwrap_err();
        assert!(error.is_timeout() && error.to_string().contains("rank 2 is late"), "{error}");
        let error = settled(OVER).unwrap_err();
        assert!(error.is_timeout() && error.to_string().contains("rank 0 has left"), "{error}");
        let twice = ArrivalError { kind: Kind::Mismatch, peer: None, cause: "two of them".into() };
        let error = settled(&serde_json::to_vec(&twice).unwrap()).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("two of them"), "{error}");
    }

    fn config(rank: u32) -> RankConfig {
        let world = WorldSize::new(2).unwrap();
        RankConfig::given("the store", Some(Rank::new(rank)), Some(world)).unwrap()
    }

    fn start(store: &SharedStore, rank: u32, seconds: u64) -> Result<Arrival> {
        let (process, process_id) = (rank.to_string(), rank.to_string());
        let me = Identity { host: "here".into(), process, host_id: "here".into(), process_id };
        arrive(store, None, &config(rank), &me, Deadline::after(Duration::from_secs(seconds)))
    }

    /// A store in which these entries stand.
    fn with(entries: &[(&str, &str)]) -> SharedStore {
        let store: SharedStore = Arc::new(MemoryStore::new());
        for (key, value) in entries {
            store
                .set(&format!("phalanx/0/{key}"), value.as_bytes(), Deadline::after(Duration::from_secs(20)))
                .unwrap();
        }
        store
    }

    #[test]
    fn in_a_large_world_each_rank_reads_once_where_all_are() {
        const RANKS: u32 = 260;
        let (store, world): (SharedStore, _) = (Arc::new(MemoryStore::new()), WorldSize::new(RANKS).unwrap());
        let soon = Deadline::after(Duration::from_secs(60));
        let arrived: Vec<Arrived> = std::thread::scope(|scope| {
            let come = |rank: Rank| {
                let (host, process) = (format!("host-{}", rank.get() / 8), rank.to_string());
                let me = Identity {
                    host: host.clone(),
                    process: process.clone(),
                    host_id: host,
                    process_id: process,
                };
                let config = RankConfig::given("the store", Some(rank), Some(world)).unwrap();
                let store = store.clone();
                scope.spawn(move || arrive(&store, None, &config, &me, soon).unwrap().met().unwrap())
            };
            let ranks: Vec<_> = world.ranks().map(come).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        // It is not in the entries of the ranks that they look.
        for rank in world.ranks() {
            assert!(store.delete_key(&format!("phalanx/0/rank/{rank}"), soon).unwrap());
        }
        for (rank, arrived) in world.ranks().zip(&arrived).step_by(100) {
            let hosts = arrived.hosts(soon).unwrap();
            assert_eq!(hosts.local(rank), (rank.get() % 8, if rank.get() < 256 { 8 } else { 4 }));
        }
    }

    #[test]
    fn of_many_ranks_those_whose_time_is_up_first_say_who_is_missing() {
        let (world, soon) = (WorldSize::new(100).unwrap(), Deadline::after(Duration::from_secs(20)));
        let config = |rank| RankConfig::given("the store", Some(Rank::new(rank)), Some(world)).unwrap();
        let roll_call = PrefixStore::new("roll_call", Arc::new(MemoryStore::new()));
        for rank in 0..99 {
            roll_call.set(&format!("rank/{rank}"), b"x", soon).unwrap();
        }
        let asked = [(); 65].map(|()| asks_of(&roll_call, &config(98), soon));
        assert_eq!((&asked[..64], asked[64]), (&[100; 64][..], 64));
        let said = |asked| missing(&roll_call, &config(98), asked, Instant::now(), soon);
        assert!(said(100).cause.contains("rank 99 of 100 has not arrived"), "{:?}", said(100));
        let late = said(64);
        assert!(late.peer.is_none() && late.cause.contains("not all of the 100 ranks"), "{late:?}");
        roll_call.delete_key("rank/5", soon).unwrap();
        assert!(said(64).cause.contains("rank 5 of 100 has not arrived"), "{:?}", said(64));
        // The others wait for what they say.
        let brief = Deadline::after(Duration::from_millis(20));
        assert!(told_by_others(&roll_call, &config(64), brief).unwrap().is_none());
        roll_call.set("verdict", b"who it is", soon).unwrap();
        assert_eq!(told_by_others(&roll_call, &config(64), soon).unwrap().unwrap(), b"who it is");
    }

    #[test]
    fn ranks_of_different_builds_are_told_both_versions_at_once() {
        // Rank 0 of an earlier build has come, and waits for the outcome.
        let store = with(&[("rank/0", "1 2 7 there -"), ("world", "2"), ("arrived", "1")]);
        let error = start(&store, 1, 600).err().unwrap();
        let text = format!("rank 1 starts by version {VERSION} of the protocol, another rank by version 1");
        assert!(error.to_string().contains(&text) && error.to_string().contains("same version"), "{error}");
        let soon = Deadline::after(Duration::from_secs(20));
        let outcome = read_outcome(&store.get("phalanx/0/verdict", soon).unwrap());
        assert!(outcome.to_string().contains(&text), "{outcome}");
        // A rank of an earlier build that comes later compares the world sizes, and ours is another text.
        let store = with(&[("rank/1", "1 2 7 there -")]);
        let error = start(&store, 0, 600).err().unwrap();
        let text = format!("rank 0 starts by version {VERSION} of the protocol, rank 1 by version 1");
        assert!(error.to_string().contains(&text) && error.peer() == Some(Rank::new(1)), "{error}");
        assert_ne!(store.get("phalanx/0/world", soon).unwrap(), b"2");
    }

    #[test]
    fn a_rank_whose_program_ends_its_wait_tells_those_in_the_roll_call_and_after_it() {
        let store = with(&[]);
        let roll_call = PrefixStore::new("phalanx/0", Arc::clone(&store));
        let soon = Deadline::after(Duration::from_secs(20));
        let lost = report_aborted(&roll_call, &config(1), Error::protocol("no answer"));
        assert!(!lost.is_aborted() && store.num_keys(soon).unwrap() == 0, "{lost}");
        let error = report_aborted(&roll_call, &config(1), Error::aborted("somebody pressed Ctrl-C"));
        assert!(error.is_aborted() && error.rank() == Some(Rank::new(1)), "{error}");
        let told = start(&store, 0, 600).err().unwrap();
        assert!(told.is_aborted() && told.peer() == Some(Rank::new(1)), "{told}");
        assert!(told.to_string().contains("Ctrl-C"), "{told}");
        assert!(store.check(&["phalanx/0/group/mesh/failure"], soon).unwrap());
    }

    #[test]
    fn rank_0_may_be_interrupted_while_it_asks_whether_the_start_has_ended() {
        let store: SharedStore = Arc::new(slow_beside_a_wait());
        let error = interruptible(pressed_beside_a_wait, || start(&store, 0, 20)).err().unwrap();
        assert!(error.is_aborted() && error.to_string().contains("somebody pressed Ctrl-C"), "{error}");
    }

    #[test]
    fn an_entry_that_cannot_be_read_ends_the_start_of_all() {
        let store = with(&[("rank/1", "garbage")]);
        let error = start(&store, 0, 600).err().unwrap();
        assert!(error.to_string().contains("\"garbage\" instead of a rank's arrival"), "{error}");
        let outcome = store.get("phalanx/0/verdict", Deadline::after(Duration::from_secs(20))).unwrap();
        assert_eq!(read_outcome(&outcome).peer(), Some(Rank::new(1)));
        assert!(start(&store, 1, 600).err().unwrap().to_string().contains("garbage"));
    }

    #[test]
    fn a_rank_0_that_stops_after_its_arrival_is_named() {
        let world = format!("2@version-{VERSION}");
        let entry = format!("1 {world} 7 there -");
        let store = with(&[("rank/0", entry.as_str()), ("world", world.as_str())]);
        let error = start(&store, 1, 1).err().unwrap();
        assert!(error.is_timeout() && error.peer() == Some(Rank::MAIN), "{error}");
        assert!(error.to_string().contains("all 2 ranks have arrived, but rank 0"), "{error}");
    }
}
