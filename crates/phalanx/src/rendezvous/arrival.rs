//! The start of a world: every rank reports its arrival, and rank 0 reports that all are there.
//!
//! Keys, below the job's scope and a round:
//!
//! ```text
//! rank/<r>   who came as rank r: a number of its own, world size, process, host, the address at which it found the store, and what
//!            identifies the host and the process, as their names and numbers do not
//! world      the world size that the first to come expects
//! verdict    the outcome: "ok", or what went wrong; written once, read by all
//! ```
//!
//! A rank writes the first two in one request and waits for the third in the next: two round trips, however far away the store is.
//!
//! A process may meet its world again in a store that still has the first meeting. Then it finds its own entry at
//! `rank/<r>`, and goes on to the next round.

use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::RankConfig;
use super::hosts::{Host, Hosts};
use crate::deadline::Deadline;
use crate::error::{Error, Kind, Result};
use crate::host;
use crate::notice::while_waiting;
use crate::random;
use crate::rank::Rank;
use crate::store::{PrefixStore, SharedStore, Store};
use crate::transport;
use crate::world_size::WorldSize;

const OK: &[u8] = b"ok";
/// How many missing ranks an error names.
const NAMED: usize = 8;
/// In a world of at most so many ranks, each checks who is missing; in a larger one only rank 0.
const ASKED: u32 = 64;

/// Which process on which host this is. Hosts may have equal names, and processes in different containers equal numbers: those are for
/// errors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pub host: String,
    pub process: String,
    pub host_id: String,
    pub process_id: String,
}

impl Identity {
    /// # Errors
    /// If the system has no random numbers.
    pub fn of_process() -> Result<Self> {
        let process = std::process::id().to_string();
        // A child that was forked is another process.
        let process_id = format!("{process}-{:016x}", process_nonce()?);
        Ok(Self { host: host::name(), process, host_id: host::id(), process_id })
    }
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

/// A complete world.
pub(super) struct Arrived {
    /// The part of the store that belongs to it.
    pub store: SharedStore,
    roll_call: PrefixStore,
    world_size: WorldSize,
}

/// What a rank writes when it arrives.
#[derive(Debug, PartialEq, Eq)]
struct Entry {
    nonce: String,
    world_size: String,
    identity: Identity,
    /// The address at which it found the store; none if the store has no address.
    store: Option<IpAddr>,
}

impl Entry {
    fn to_text(&self) -> String {
        let Self { nonce, world_size, identity: Identity { host, process, host_id, process_id }, store } =
            self;
        let store = store.map_or_else(|| "-".to_owned(), |address| address.to_string());
        format!("{nonce} {world_size} {process} {host} {store} {host_id} {process_id}")
    }

    fn parse(bytes: &[u8]) -> Result<Self> {
        let text = String::from_utf8_lossy(bytes);
        let words: Vec<String> = text.split(' ').map(str::to_owned).collect();
        let Ok([nonce, world_size, process, host, store, host_id, process_id]) =
            <[String; 7]>::try_from(words)
        else {
            return Err(Error::protocol(format!("the store holds {text:?} instead of a rank's arrival")));
        };
        let identity = Identity { host, process, host_id, process_id };
        Ok(Self { nonce, world_size, identity, store: store.parse().ok() })
    }
}

/// Waits until all ranks have arrived. Returns an error on every rank if one is missing at the deadline, is there
/// twice, or expects another world size. `found` is the address at which this rank found the store, if it has one.
pub(super) fn arrive(
    store: &SharedStore,
    found: Option<IpAddr>,
    config: &RankConfig,
    me: &Identity,
    deadline: Deadline,
) -> Result<Arrived> {
    let started = Instant::now();
    let (world_size, identity) = (config.world_size.to_string(), me.clone());
    let entry = Entry { nonce: nonce()?, world_size, identity, store: found };
    let (roll_call, round, expected) = sign_in(store, config, &entry, deadline)?;
    let group: SharedStore =
        Arc::new(PrefixStore::new(format!("{}/{round}/group", config.scope), Arc::clone(store)));
    if expected != entry.world_size.as_bytes() {
        let cause = format!(
            "rank {} expects a world of {}, another rank one of {}",
            config.rank,
            config.world_size,
            String::from_utf8_lossy(&expected)
        );
        return Err(fail(&roll_call, Kind::Mismatch, None, cause, deadline));
    }
    // Published here, so that ranks that get further can see if this one is stopped while it waits.
    let (name, process) = transport::process_record(config.rank)?;
    let process = [(&*format!("group/{name}"), &*process)];
    // Some time is kept to find out who is missing, and to tell the others.
    let waiting = Deadline::after(deadline.remaining().saturating_sub(reserve(deadline)));
    let awaited = || awaited(&roll_call, config, started);
    let outcome = while_waiting(awaited, || match config.rank.is_main() {
        true => judge(&roll_call, config, &process, waiting),
        false => {
            let outcome = roll_call.exchange(&process, &["verdict"], waiting, &mut || Ok(()));
            outcome.map(|outcome| outcome.into_iter().next().unwrap_or_default())
        }
    });
    match outcome {
        Ok(outcome) if outcome == OK => {}
        Ok(outcome) => return Err(read_outcome(&outcome)),
        Err(error) if error.is_timeout() => {
            report_missing(&roll_call, missing(&roll_call, config, started, deadline), deadline)?
        }
        Err(error) => return Err(error),
    }
    Ok(Arrived { store: group, roll_call, world_size: config.world_size })
}

/// Rank 0: waits until all have come, and writes the outcome, unless there is one before.
fn judge(
    roll_call: &PrefixStore,
    config: &RankConfig,
    process: &[(&str, &[u8])],
    deadline: Deadline,
) -> Result<Vec<u8>> {
    let keys: Vec<String> = config.world_size.ranks().map(|rank| format!("rank/{rank}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let mut is_decided = false;
    let mut go_on = || {
        is_decided = roll_call.check(&["verdict"], Deadline::after(ANSWER_TIMEOUT)).unwrap_or(false);
        if is_decided { Err(Error::aborted("another rank has ended the start")) } else { Ok(()) }
    };
    match roll_call.exchange(process, &keys, deadline, &mut go_on) {
        Err(_) if is_decided => roll_call.get("verdict", deadline.max(Deadline::after(ANSWER_TIMEOUT))),
        Err(error) => Err(error),
        Ok(entries) => {
            // A rank that expects another world has said so before it reads this, or does so now.
            let world_size = config.world_size.to_string();
            for (rank, entry) in config.world_size.ranks().zip(&entries) {
                let other = Entry::parse(entry)?.world_size;
                if other != world_size {
                    let cause = format!(
                        "rank {} expects a world of {world_size}, rank {rank} one of {other}",
                        config.rank
                    );
                    return Err(fail(roll_call, Kind::Mismatch, None, cause, deadline));
                }
            }
            roll_call.compare_set("verdict", b"", OK, deadline)
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

/// Writes the entry into the first round in which this process has no entry yet. Returns also the world size that the first to come
/// expects there.
fn sign_in(
    store: &SharedStore,
    config: &RankConfig,
    entry: &Entry,
    deadline: Deadline,
) -> Result<(PrefixStore, u64, Vec<u8>)> {
    let mine = entry.to_text().into_bytes();
    let name = format!("rank/{}", config.rank);
    for round in 0.. {
        let roll_call = PrefixStore::new(format!("{}/{round}", config.scope), Arc::clone(store));
        let changes =
            [(name.as_str(), &b""[..], mine.as_slice()), ("world", b"", entry.world_size.as_bytes())];
        let found = roll_call.multi_compare_set(&changes, deadline)?;
        let [there, expected] = <[_; 2]>::try_from(found)
            .map_err(|_| Error::protocol("the store has not answered both parts of a request"))?;
        if there == mine {
            return Ok((roll_call, round, expected));
        }
        let other = Entry::parse(&there)?.identity;
        if other != entry.identity {
            let cause = format!(
                "two processes have rank {}: process {} on {} and process {} on {}",
                config.rank, other.process, other.host, entry.identity.process, entry.identity.host
            );
            return Err(fail(&roll_call, Kind::Mismatch, Some(config.rank), cause, deadline));
        }
    }
    Err(Error::protocol("the store refuses this rank's arrival in every round"))
}

/// Writes an error of this rank as the outcome, and returns it.
fn fail(roll_call: &PrefixStore, kind: Kind, peer: Option<Rank>, cause: String, deadline: Deadline) -> Error {
    let error = ArrivalError { kind, peer: peer.map(Rank::get), cause };
    let _ = write_outcome(roll_call, &error, deadline);
    error.into_error()
}

/// This rank's time is up: reports that to every rank, unless there is an outcome already. An existing outcome holds for
/// this rank as well: the others may have gone on.
fn report_missing(roll_call: &PrefixStore, error: ArrivalError, deadline: Deadline) -> Result<()> {
    match write_outcome(roll_call, &error, deadline) {
        Some(outcome) if outcome == OK => Ok(()),
        Some(outcome) => Err(read_outcome(&outcome)),
        None => Err(error.into_error()),
    }
}

/// Writes an outcome unless there is one; returns the one that is there.
fn write_outcome(roll_call: &PrefixStore, error: &ArrivalError, deadline: Deadline) -> Option<Vec<u8>> {
    let outcome = serde_json::to_vec(error).ok()?;
    // If the store is gone too, the others find out at their own deadlines.
    roll_call.compare_set("verdict", b"", &outcome, deadline.max(Deadline::after(LAST_MESSAGE))).ok()
}

/// How long reporting may take after the deadline: a round trip of a slow network, with a packet that is sent again.
const LAST_MESSAGE: Duration = Duration::from_secs(2);
/// How long the store may take to answer a question beside the wait.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// An outcome other than "ok".
#[derive(serde::Serialize, serde::Deserialize)]
struct ArrivalError {
    kind: Kind,
    peer: Option<u32>,
    cause: String,
}

impl ArrivalError {
    fn into_error(self) -> Error {
        let error = Error::new(self.kind, self.cause).in_operation("rendezvous", None);
        let error = self.peer.into_iter().fold(error, |error, peer| error.with_peer(Rank::new(peer)));
        error.with_remedy(match self.kind {
            Kind::Timeout => {
                "have all ranks been started, with the same MASTER_ADDR, MASTER_PORT and job? If they are only slow, \
                 raise the time-out"
            }
            _ => "give every process its own rank and the same world size; a launcher does",
        })
    }
}

fn read_outcome(outcome: &[u8]) -> Error {
    match serde_json::from_slice::<ArrivalError>(outcome) {
        Ok(error) => error.into_error(),
        Err(_) => Error::protocol("the outcome of the start cannot be read from the store")
            .in_operation("rendezvous", None),
    }
}

/// Reports who is waited for, while there is time.
fn awaited(roll_call: &PrefixStore, config: &RankConfig, started: Instant) -> String {
    let world = config.world_size.get();
    // In a large world, so many queries would keep the store from serving ranks that arrive.
    let cause = match world <= ASKED || config.rank.is_main() {
        true => missing(roll_call, config, started, Deadline::after(ANSWER_TIMEOUT)).cause,
        false => format!("not all of the {world} ranks have arrived"),
    };
    format!("rank {} waits for the others: {cause}", config.rank)
}

/// Names the missing ranks.
fn missing(
    roll_call: &PrefixStore,
    config: &RankConfig,
    started: Instant,
    deadline: Deadline,
) -> ArrivalError {
    let mut missing = Vec::new();
    for rank in config.world_size.ranks() {
        match roll_call.check(&[&format!("rank/{rank}")], deadline) {
            Ok(true) => {}
            Ok(false) => missing.push(rank),
            Err(_) => break,
        }
        if missing.len() > NAMED {
            break;
        }
    }
    let names: Vec<String> = missing.iter().take(NAMED).map(Rank::to_string).collect();
    let more = if missing.len() > NAMED { " and more" } else { "" };
    let waited = started.elapsed().as_secs_f64();
    let world = config.world_size;
    let cause = match names.as_slice() {
        [] => format!("not all of the {world} ranks have arrived within {waited:.1} s"),
        [name] => format!("rank {name} of {world} has not arrived within {waited:.1} s"),
        names => format!("ranks {}{more} of {world} have not arrived within {waited:.1} s", names.join(", ")),
    };
    ArrivalError { kind: Kind::Timeout, peer: missing.first().map(|rank| rank.get()), cause }
}

impl Arrived {
    /// The hosts of all ranks.
    pub fn hosts(&self, deadline: Deadline) -> Result<Hosts> {
        let keys: Vec<String> = self.world_size.ranks().map(|rank| format!("rank/{rank}")).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let entries = self.roll_call.multi_get(&keys, deadline)?;
        let hosts = entries.iter().map(|entry| {
            let Entry { identity, store, .. } = Entry::parse(entry)?;
            Ok(Host { id: identity.host_id, store })
        });
        hosts.collect::<Result<_>>().map(Hosts)
    }
}

/// For [`fuzzing`](crate::fuzzing): a rank's entry, or an outcome.
#[cfg(any(test, fuzzing))]
pub(super) fn fuzz(bytes: &[u8]) -> bool {
    assert_eq!(read_outcome(bytes).operation(), Some("rendezvous"));
    let Ok(entry) = Entry::parse(bytes) else { return serde_json::from_slice::<ArrivalError>(bytes).is_ok() };
    assert_eq!(Entry::parse(entry.to_text().as_bytes()).ok(), Some(entry));
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryStore;

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
        settled(OK).unwrap();
        let error = settled(b"").unwrap_err();
        assert!(error.is_timeout() && error.to_string().contains("rank 2 is late"), "{error}");
        let twice = ArrivalError { kind: Kind::Mismatch, peer: None, cause: "two of them".into() };
        let error = settled(&serde_json::to_vec(&twice).unwrap()).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("two of them"), "{error}");
    }
}
