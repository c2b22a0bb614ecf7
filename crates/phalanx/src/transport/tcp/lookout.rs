//! Looks whether the rank that is waited for is frozen, while the group is formed and nobody beats yet.
//!
//! Each rank says in the store which process it is, before it waits for anybody; those of its host see in what state that
//! is. Every rank waits for one at a time, and a frozen one is sooner or later the one that another of its host waits for.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Place;
use crate::deadline::Deadline;
use crate::error::{Error, Kind, Result};
use crate::frozen::{Frozen, PATIENCE};
use crate::rank::Rank;
use crate::store::Store;
use crate::transport::process;
use crate::wire::control::ProcessId;

/// How long the store may take to answer.
const ANSWER: Duration = Duration::from_secs(1);

/// Which process a rank is.
#[derive(Serialize, Deserialize)]
struct Card {
    host: String,
    /// None where others could not find it.
    process: Option<ProcessId>,
}

/// Says in `store` which process `rank` is.
pub(in crate::transport) fn introduce(store: &dyn Store, rank: Rank, deadline: Deadline) -> Result<()> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let card = postcard::to_stdvec(&Card { host, process: process::own() })
        .map_err(|error| Error::protocol("this rank's process cannot be written down").with_source(error))?;
    store.set(&key(rank), &card, deadline)
}

fn key(rank: Rank) -> String {
    format!("mesh/process/{rank}")
}

/// One rank's eye on the one that it waits for.
pub(super) struct Lookout<'a> {
    place: &'a Place<'a>,
    own: Option<ProcessId>,
    suspect: Option<Suspect>,
}

struct Suspect {
    rank: Rank,
    card: Option<Card>,
    frozen: Frozen,
}

impl<'a> Lookout<'a> {
    pub(super) fn new(place: &'a Place<'a>) -> Self {
        Self { place, own: process::own(), suspect: None }
    }

    /// `rank` is waited for. An error if a signal has stopped it, all the time that this was asked for the last seconds.
    pub(super) fn look(&mut self, rank: Rank) -> Result<()> {
        let timeout = self.place.heartbeat.timeout;
        if timeout.is_zero() {
            return Ok(());
        }
        let suspect = match self.suspect.take().filter(|suspect| suspect.rank == rank) {
            Some(suspect) => suspect,
            None => Suspect { rank, card: None, frozen: Frozen::new(1, PATIENCE.max(timeout)) },
        };
        let suspect = self.suspect.insert(suspect);
        if suspect.card.is_none() {
            suspect.card = card(self.place.store, rank);
        }
        let Some(Card { host, process: Some(peer) }) = &suspect.card else { return Ok(()) };
        let stop = process::stop(self.own, *peer);
        match suspect.frozen.look([stop], Instant::now()).is_empty() {
            true => Ok(()),
            false => Err(stopped(rank, host, *peer)),
        }
    }

    /// The better reason for the silence of `rank`, if it is stopped now.
    pub(super) fn explain(&self, rank: Rank, error: Error) -> Error {
        match card(self.place.store, rank) {
            Some(Card { host, process: Some(peer) }) if process::stop(self.own, peer).is_some() => {
                stopped(rank, &host, peer)
            }
            _ => error,
        }
    }
}

/// What `rank` has said, if it has; a store that does not answer is somebody else's affair.
fn card(store: &dyn Store, rank: Rank) -> Option<Card> {
    let (key, deadline) = (key(rank), Deadline::after(ANSWER));
    let is_there = store.check(&[&key], deadline).unwrap_or(false);
    let bytes = if is_there { store.get(&key, deadline).ok() } else { None };
    postcard::from_bytes(&bytes?).ok()
}

fn stopped(rank: Rank, host: &str, process: ProcessId) -> Error {
    let pid = process.pid;
    Error::new(Kind::PeerFailed, format!("rank {rank} ({host}) is frozen: its process {pid} is stopped"))
        .with_peer(rank)
        .with_remedy(format!(
            "`kill -CONT {pid}` lets it go on; if it is to stand still, set PHALANX_HEARTBEAT_TIMEOUT=0 for every rank"
        ))
}

/// For [`fuzzing`](crate::fuzzing): which process a rank is.
#[cfg(any(test, fuzzing))]
pub(super) fn fuzz(bytes: &[u8]) -> bool {
    postcard::from_bytes::<Card>(bytes).is_ok()
}
