//! The deciding half of a start: what ranks write to the store when they arrive, what they make of what others have written, and the outcome.
//!
//! Which keys, and in which order they are written and awaited, is the caller's, who reads the store and the clock.

use std::borrow::Cow;
use std::net::IpAddr;

use crate::error::{Error, Kind, Result};
use crate::rank::Rank;
use crate::wire::hello::JobId;
use crate::world_size::WorldSize;

/// How the outcome begins if all have come. The random number of the first group follows.
pub const OK: &[u8] = b"ok ";
/// The outcome of the round after the last one in a store that ends.
pub const OVER: &[u8] = b"over";
/// The version of this protocol. In the first, whose world sizes stand alone, the last rank to come wrote the outcome; in the second,
/// the outcome had no number; in the third, no rank wrote for the others of a large world where the ranks are, or gathered their addresses.
pub const VERSION: u32 = 4;
const VERSION_MARK: &str = "@version-";
/// How many missing ranks an error names.
const NAMED: usize = 8;
/// The most bytes of an entry. Errors show what stands in the place of one, and must fit into the store themselves, as an outcome.
const ENTRY_LIMIT: usize = 64 << 10;

/// Which process on which host this is. Hosts may have equal names, and processes in different containers equal numbers: those are for
/// errors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The host's name.
    pub host: String,
    /// The process's number.
    pub process: String,
    /// What identifies the host.
    pub host_id: String,
    /// What identifies the process.
    pub process_id: String,
}

/// What a rank writes when it arrives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// A number of its own.
    pub nonce: String,
    /// The world size that it expects, and its version, as `expectation` writes them.
    pub world: String,
    /// Who came.
    pub identity: Identity,
    /// The address at which it found the store; none if the store has no address.
    pub store: Option<IpAddr>,
}

impl Entry {
    /// The entry of a rank in a world of this size. `nonce` is a random number, and `store` the address at which it found the store.
    pub fn new(nonce: String, world: WorldSize, identity: Identity, store: Option<IpAddr>) -> Self {
        Self { nonce, world: expectation(world), identity, store }
    }

    /// As it stands in the store.
    pub fn to_text(&self) -> String {
        let Self { nonce, world, identity: Identity { host, process, host_id, process_id }, store } = self;
        let store = store.map_or_else(|| "-".to_owned(), |address| address.to_string());
        format!("{nonce} {world} {process} {host} {store} {host_id} {process_id}")
    }

    /// Reads what stands in the store.
    ///
    /// # Errors
    /// A sentence, if it is no entry.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > ENTRY_LIMIT {
            return Err(format!("the store holds {} bytes instead of a rank's arrival", bytes.len()));
        }
        let text = String::from_utf8_lossy(bytes);
        let words: Vec<String> = text.split(' ').map(str::to_owned).collect();
        let Ok([nonce, world, process, host, store, host_id, process_id]) = <[String; 7]>::try_from(words)
        else {
            return Err(format!("the store holds {text:?} instead of a rank's arrival"));
        };
        let identity = Identity { host, process, host_id, process_id };
        Ok(Self { nonce, world, identity, store: store.parse().ok() })
    }
}

/// What a rank expects of the others: the world size, and the version.
fn expectation(world_size: WorldSize) -> String {
    format!("{world_size}{VERSION_MARK}{VERSION}")
}

/// Why a rank that expects `own` cannot start with `peer`, another one or that of this rank, which expects `other`.
fn difference(rank: Rank, own: &str, peer: &str, other: &str) -> (Kind, String) {
    let ((size, version), (other_size, other_version)) = (size_and_version(own), size_and_version(other));
    if version == other_version {
        return (
            Kind::Mismatch,
            format!("rank {rank} expects a world of {size}, {peer} one of {other_size}"),
        );
    }
    let cause = format!(
        "rank {rank} starts by version {version} of the protocol, {peer} by version {other_version}: they run different \
         builds of Phalanx"
    );
    (Kind::Protocol, cause)
}

/// What stands in the store, as much of it as an error shows.
fn shown(bytes: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(&bytes[..bytes.len().min(ENTRY_LIMIT)])
}

fn size_and_version(expectation: &str) -> (&str, &str) {
    expectation.split_once(VERSION_MARK).unwrap_or((expectation, "1"))
}

/// Why the entry of `peer` cannot be read, for a rank that expects `own`: it may be of another version, whose entries begin as ours do.
fn unreadable(rank: Rank, own: &str, peer: &str, entry: &[u8], cause: String) -> (Kind, String) {
    let text = shown(entry);
    let (size, version) = size_and_version(text.split(' ').nth(1).unwrap_or_default());
    match size.parse::<u32>() {
        Ok(_) if version != size_and_version(own).1 => {
            difference(rank, own, peer, &format!("{size}{VERSION_MARK}{version}"))
        }
        Ok(_) | Err(_) => (Kind::Protocol, cause),
    }
}

/// The number of the first group, with which the outcome says that all is well.
///
/// # Errors
/// The error that the outcome is otherwise.
pub fn number_in(outcome: &[u8]) -> Result<JobId> {
    outcome.strip_prefix(OK).and_then(|number| number.try_into().ok()).ok_or_else(|| read_outcome(outcome))
}

/// An outcome other than [`OK`].
#[derive(Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ArrivalError {
    /// Its kind.
    pub kind: Kind,
    /// The rank that is to blame.
    pub peer: Option<u32>,
    /// What went wrong.
    pub cause: String,
}

impl ArrivalError {
    /// The error that every rank returns.
    pub fn into_error(self) -> Error {
        let error = Error::new(self.kind, self.cause).in_operation("rendezvous", None);
        let error = self.peer.into_iter().fold(error, |error, peer| error.with_peer(Rank::new(peer)));
        error.with_remedy(match self.kind {
            Kind::Timeout => {
                "have all ranks been started, with the same MASTER_ADDR, MASTER_PORT and job? If they are only slow, \
                 raise the time-out"
            }
            Kind::Protocol => {
                "run the same version of Phalanx in all processes of a job, and let nothing else write to its store"
            }
            Kind::Aborted => "see that rank's own output for its reason",
            Kind::InvalidArgument => {
                "end that group on every rank before the next is made (drop it; in Python, destroy_process_group), or make \
                 others of its ranks with new_group"
            }
            _ => {
                "give every process its own rank and the same world size; a launcher does. If one of these processes was of an \
                 earlier job, take a new store: another port, or remove the file of PyTorch's file://"
            }
        })
    }
}

/// The error that an outcome is, unless it begins with [`OK`].
pub fn read_outcome(outcome: &[u8]) -> Error {
    if outcome == OVER {
        // As this rank's time was up.
        return Error::timeout("rank 0 has left the group that was met in this store")
            .with_peer(Rank::MAIN)
            .in_operation("rendezvous", None)
            .with_remedy("let every rank join, and leave, equally often");
    }
    match serde_json::from_slice::<ArrivalError>(outcome) {
        Ok(error) => error.into_error(),
        Err(_) => Error::malformed("the outcome of the start cannot be read from the store")
            .in_operation("rendezvous", None),
    }
}

/// What a rank finds in the round in which it would write its `entry`.
#[derive(Debug, PartialEq, Eq)]
pub enum Place {
    /// Its own entry: it has just been written.
    Taken,
    /// The entry of this process from an earlier start: it goes on to the next round.
    Met,
    /// What ends the start of all.
    Refused(ArrivalError),
}

/// What `rank` makes of the entry that stands at its place, after it has tried to write its own.
pub fn place(rank: Rank, entry: &Entry, there: &[u8]) -> Place {
    if *there == *entry.to_text().as_bytes() {
        return Place::Taken;
    }
    let refused = |(kind, cause)| Place::Refused(ArrivalError { kind, peer: Some(rank.get()), cause });
    let other = match Entry::parse(there) {
        Ok(other) => other.identity,
        Err(cause) => {
            let peer = format!("another rank {rank}");
            return refused(unreadable(rank, &entry.world, &peer, there, cause));
        }
    };
    if other == entry.identity {
        return Place::Met;
    }
    let cause = format!(
        "two processes have rank {rank}: process {} on {} and process {} on {}",
        other.process, other.host, entry.identity.process, entry.identity.host
    );
    refused((Kind::Mismatch, cause))
}

/// Why `rank` cannot start where the first to come expects `expected`; none if it expects the same.
pub fn other_world(rank: Rank, entry: &Entry, expected: &[u8]) -> Option<ArrivalError> {
    (expected != entry.world.as_bytes()).then(|| {
        let expected = shown(expected);
        let (kind, cause) = difference(rank, &entry.world, "another rank", &expected);
        ArrivalError { kind, peer: None, cause }
    })
}

/// What rank 0, which is `rank`, makes of all `entries`, by rank: why this world cannot start, if it cannot.
pub fn judge<'a>(
    rank: Rank,
    world: WorldSize,
    entries: impl IntoIterator<Item = &'a [u8]>,
) -> Result<(), ArrivalError> {
    let own = expectation(world);
    for (other, entry) in world.ranks().zip(entries) {
        let peer = format!("rank {other}");
        let (kind, cause) = match Entry::parse(entry) {
            Ok(entry) if entry.world == own => continue,
            Ok(entry) => difference(rank, &own, &peer, &entry.world),
            Err(cause) => unreadable(rank, &own, &peer, entry, cause),
        };
        let peer = (kind == Kind::Protocol).then_some(other.get());
        return Err(ArrivalError { kind, peer, cause });
    }
    Ok(())
}

/// Who is known to be missing when the time is up.
#[derive(Debug, Default)]
pub struct Missing {
    ranks: Vec<Rank>,
    is_unanswered: bool,
}

impl Missing {
    /// Whether `rank` has arrived, as the store says; none if it has not answered. Returns whether more is worth asking for.
    pub fn note(&mut self, rank: Rank, has_arrived: Option<bool>) -> bool {
        match has_arrived {
            Some(true) => {}
            Some(false) => self.ranks.push(rank),
            None => self.is_unanswered = true,
        }
        self.ranks.len() <= NAMED && !self.is_unanswered
    }

    /// The error of `rank`, which has waited for so many seconds.
    pub fn error(&self, rank: Rank, world: WorldSize, waited: f64) -> ArrivalError {
        let names: Vec<String> = self.ranks.iter().take(NAMED).map(Rank::to_string).collect();
        let more = if self.ranks.len() > NAMED { " and more" } else { "" };
        let mut peer = self.ranks.first().copied();
        let cause = match names.as_slice() {
            [] if self.is_unanswered => {
                format!("the store has not said within {waited:.1} s which of {world} ranks have arrived")
            }
            [] if rank.is_main() => {
                format!("the last of {world} ranks has only arrived after {waited:.1} s")
            }
            [] => {
                peer = Some(Rank::MAIN);
                format!(
                    "all {world} ranks have arrived, but rank 0 has not confirmed it within {waited:.1} s: it has stopped"
                )
            }
            [name] => format!("rank {name} of {world} has not arrived within {waited:.1} s"),
            names => {
                format!("ranks {}{more} of {world} have not arrived within {waited:.1} s", names.join(", "))
            }
        };
        ArrivalError { kind: Kind::Timeout, peer: peer.map(Rank::get), cause }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(world: u32, process: &str) -> Entry {
        let (host, process) = ("here".to_owned(), process.to_owned());
        let identity =
            Identity { host: host.clone(), process: process.clone(), host_id: host, process_id: process };
        Entry::new("1".into(), WorldSize::new(world).unwrap(), identity, None)
    }

    #[test]
    fn a_place_is_free_or_ones_own_or_anothers() {
        let (rank, mine) = (Rank::new(1), entry(2, "7"));
        assert_eq!(place(rank, &mine, mine.to_text().as_bytes()), Place::Taken);
        let earlier = Entry { nonce: "0".into(), ..mine.clone() };
        assert_eq!(place(rank, &mine, earlier.to_text().as_bytes()), Place::Met);
        for (there, kind, text) in [
            (
                entry(2, "8").to_text(),
                Kind::Mismatch,
                "two processes have rank 1: process 8 on here and process 7 on here",
            ),
            ("garbage".to_owned(), Kind::Protocol, "\"garbage\" instead of a rank's arrival"),
            ("1 2 7 there -".to_owned(), Kind::Protocol, "another rank 1 by version 1"),
        ] {
            let Place::Refused(error) = place(rank, &mine, there.as_bytes()) else { panic!("{there}") };
            assert!(error.kind == kind && error.peer == Some(1) && error.cause.contains(text), "{error:?}");
            let says_of_jobs =
                error.into_error().to_string().contains("remove the file of PyTorch's file://");
            assert_eq!(says_of_jobs, kind == Kind::Mismatch, "{text}");
        }
    }

    #[test]
    fn an_error_is_short_whatever_stands_in_the_store() {
        let (rank, world, mine) = (Rank::new(1), WorldSize::new(2).unwrap(), entry(2, "7"));
        let long = "\u{1}".repeat(1 << 20);
        let whole =
            Entry { identity: Identity { host: long.clone(), ..mine.identity.clone() }, ..mine.clone() };
        for there in [long.clone(), format!("1 2{VERSION_MARK}{long}"), whole.to_text()] {
            let bytes = there.as_bytes();
            let Place::Refused(placed) = place(rank, &mine, bytes) else { panic!("it was taken") };
            let (other, judged) = (other_world(rank, &mine, bytes).unwrap(), judge(rank, world, [bytes]));
            for error in [placed, other, judged.unwrap_err()] {
                assert!(serde_json::to_vec(&error).unwrap().len() < 1 << 20, "{} bytes", error.cause.len());
            }
        }
    }

    #[test]
    fn the_page_of_platforms_shows_this_version() {
        let world = WorldSize::new(2).unwrap();
        let earlier = format!("{world}{VERSION_MARK}{}", VERSION - 1);
        let (_, shown) = difference(Rank::new(1), &expectation(world), "rank 0", &earlier);
        assert!(include_str!("../../../docs/platforms.md").contains(&shown), "{shown}");
    }

    #[test]
    fn a_world_starts_if_all_expect_the_same() {
        let world = WorldSize::new(3).unwrap();
        let texts = |sizes: [u32; 3]| sizes.map(|size| entry(size, "7").to_text().into_bytes());
        let judged = |texts: &[Vec<u8>]| judge(Rank::MAIN, world, texts.iter().map(Vec::as_slice));
        assert_eq!(judged(&texts([3, 3, 3])), Ok(()));
        let error = judged(&texts([3, 3, 4])).unwrap_err();
        assert_eq!(error.cause, "rank 0 expects a world of 3, rank 2 one of 4");
        assert_eq!((error.kind, error.peer), (Kind::Mismatch, None));
        let mut earlier = texts([3, 3, 3]);
        earlier[1] = b"1 3 7 there -".to_vec();
        let error = judged(&earlier).unwrap_err();
        assert_eq!((error.kind, error.peer), (Kind::Protocol, Some(1)));
        assert_eq!(other_world(Rank::MAIN, &entry(3, "7"), entry(3, "8").world.as_bytes()), None);
        assert!(other_world(Rank::MAIN, &entry(3, "7"), b"3").unwrap().cause.contains("different builds"));
    }

    #[test]
    fn the_missing_are_named_up_to_a_number() {
        let world = WorldSize::new(20).unwrap();
        let mut missing = Missing::default();
        let asked = world.ranks().take_while(|&rank| missing.note(rank, Some(rank.is_main()))).count();
        let error = missing.error(Rank::MAIN, world, 1.5);
        assert_eq!((asked, error.peer), (9, Some(1)));
        assert_eq!(error.cause, "ranks 1, 2, 3, 4, 5, 6, 7, 8 and more of 20 have not arrived within 1.5 s");
        let mut unanswered = Missing::default();
        assert!(!unanswered.note(Rank::MAIN, None));
        assert!(unanswered.error(Rank::MAIN, world, 1.0).cause.contains("the store has not said"));
        let stopped = Missing::default().error(Rank::new(1), world, 1.0);
        assert!(stopped.peer == Some(0) && stopped.cause.ends_with("it has stopped"), "{stopped:?}");
    }
}
