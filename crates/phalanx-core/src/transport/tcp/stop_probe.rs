//! The stop probe finds ranks that a signal has stopped, while the group is formed and there are no heartbeats yet.
//!
//! Each rank publishes in the store which process it is, before it waits for others; ranks of the same host can read the
//! state of that process from the kernel. Every rank waits for one rank at a time, so a stopped rank is soon the one that
//! another rank of its host waits for.
//!
//! Without it a stopped rank would hold up all others until the start's time-out. A process that is stopped and
//! continued repeatedly counts as slow, not as frozen.
//!
//! The same record shows that a process has ended before it published where it listens. Later its connections tell.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::MeshConfig;
use super::start_failure::are_set;
use crate::deadline::Deadline;
use crate::error::{Error, Kind, Result};
use crate::frozen::{Frozen, STOPPED_LIMIT};
use crate::health::liveness::ProcessState;
use crate::host;
use crate::rank::Rank;
use crate::store::Store;
use crate::transport::process;
use crate::wire::control::ProcessId;

/// How long the store may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Which process a rank is.
#[derive(Serialize, Deserialize)]
struct ProcessRecord {
    host: String,
    /// None where others could not find the process.
    process: Option<ProcessId>,
}

/// The key and the value with which `rank` says in the store, through which ranks will connect with each other, which process it
/// is, so that ranks of its host can see it if it is stopped before they are connected.
pub(crate) fn process_record(rank: Rank) -> Result<(String, Vec<u8>)> {
    let record = postcard::to_stdvec(&ProcessRecord { host: host::name(), process: process::own() })
        .map_err(|error| Error::protocol("this rank's process cannot be published").with_source(error))?;
    Ok((key(rank), record))
}

pub(super) fn key(rank: Rank) -> String {
    format!("mesh/process/{rank}")
}

/// Checks whether the rank that this one waits for is stopped.
pub(super) struct StopProbe<'a> {
    config: &'a MeshConfig<'a>,
    own: Option<ProcessId>,
    suspect: Option<Suspect>,
}

struct Suspect {
    rank: Rank,
    record: Option<ProcessRecord>,
    frozen: Frozen,
}

impl Suspect {
    /// An error if a signal has stopped its process for too long, as seen from `own`, this one.
    fn check_stop(&mut self, own: Option<ProcessId>) -> Result<()> {
        let Some(ProcessRecord { host, process: Some(peer) }) = &self.record else { return Ok(()) };
        let stop = process::stop(own, *peer);
        match self.frozen.look([stop], Instant::now()).is_empty() {
            true => Ok(()),
            false => Err(stopped(self.rank, host, *peer)),
        }
    }
}

impl<'a> StopProbe<'a> {
    pub(super) fn new(config: &'a MeshConfig<'a>) -> Self {
        Self { config, own: process::own(), suspect: None }
    }

    /// Checks `rank`. An error if a signal has stopped it, at each call during the last seconds. The store is asked until `deadline`.
    pub(super) fn check(&mut self, rank: Rank, deadline: Deadline) -> Result<()> {
        if self.config.heartbeat.timeout.is_zero() {
            return Ok(());
        }
        let own = self.own;
        self.suspect(rank, deadline)?.check_stop(own)
    }

    /// The same of a rank that has not published where it listens; also an error if its process has ended. One that has published it may have
    /// all its connections, and end before this rank has looked at them: then they tell.
    pub(super) fn check_alive(&mut self, rank: Rank, deadline: Deadline) -> Result<()> {
        let (own, ignores_stops) = (self.own, self.config.heartbeat.timeout.is_zero());
        let suspect = self.suspect(rank, deadline)?;
        if let Some(ProcessRecord { host, process: Some(peer) }) = &suspect.record
            && process::state(own, Some(*peer)) == ProcessState::Gone
        {
            return Err(ended(rank, host, *peer));
        }
        if ignores_stops { Ok(()) } else { suspect.check_stop(own) }
    }

    /// The rank that this one waits for, with what it has published.
    fn suspect(&mut self, rank: Rank, deadline: Deadline) -> Result<&mut Suspect> {
        let suspect = match self.suspect.take().filter(|suspect| suspect.rank == rank) {
            Some(suspect) => suspect,
            None => {
                let limit = STOPPED_LIMIT.max(self.config.heartbeat.timeout);
                Suspect { rank, record: None, frozen: Frozen::new(1, limit) }
            }
        };
        let suspect = self.suspect.insert(suspect);
        if suspect.record.is_none() {
            suspect.record = read_record(self.config.store, rank, deadline)?;
        }
        Ok(suspect)
    }

    /// A better error for the silence of `rank`, if it is stopped now; else `error`.
    pub(super) fn explain(&self, rank: Rank, error: Error) -> Error {
        match read_record(self.config.store, rank, Deadline::after(ANSWER_TIMEOUT)) {
            Ok(Some(ProcessRecord { host, process: Some(peer) }))
                if process::stop(self.own, peer).is_some() =>
            {
                stopped(rank, &host, peer)
            }
            _ => error,
        }
    }
}

/// What `rank` has published, if it has. That the store does not answer is reported elsewhere.
///
/// # Errors
/// If the program of this rank has ended the wait.
fn read_record(store: &dyn Store, rank: Rank, deadline: Deadline) -> Result<Option<ProcessRecord>> {
    let key = key(rank);
    if !are_set(store, &[&key], deadline)? {
        return Ok(None);
    }
    match store.get(&key, deadline) {
        Err(error) if error.is_aborted() => Err(error),
        bytes => Ok(bytes.ok().and_then(|bytes| postcard::from_bytes(&bytes).ok())),
    }
}

fn ended(rank: Rank, host: &str, process: ProcessId) -> Error {
    let pid = process.pid;
    let cause =
        format!("rank {rank} ({host}) was lost: its process {pid} has ended, before it was connected");
    Error::new(Kind::PeerFailed, cause)
        .with_peer(rank)
        .with_remedy(format!("see rank {rank}'s own output for its reason"))
}

fn stopped(rank: Rank, host: &str, process: ProcessId) -> Error {
    let pid = process.pid;
    Error::new(Kind::PeerFailed, format!("rank {rank} ({host}) is frozen: its process {pid} is stopped"))
        .with_peer(rank)
        .with_remedy(format!(
            "`kill -CONT {pid}` lets it go on; if it is stopped on purpose, set PHALANX_HEARTBEAT_TIMEOUT=0 for every rank"
        ))
}

/// For `phalanx::fuzzing`: which process a rank is.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub(super) fn fuzz(bytes: &[u8]) -> bool {
    postcard::from_bytes::<ProcessRecord>(bytes).is_ok()
}
