//! The stop probe finds ranks that a signal has stopped, while the group is formed and there are no heartbeats yet.
//!
//! Each rank publishes in the store which process it is, before it waits for others; ranks of the same host can read the
//! state of that process from the kernel. Every rank waits for one rank at a time, so a stopped rank is soon the one that
//! another rank of its host waits for.
//!
//! Without it a stopped rank would hold up all others until the start's time-out. A process that is stopped and
//! continued repeatedly counts as slow, not as frozen.
//!
//! The same record shows that a process has ended before it published where it listens. Where it cannot be seen, rank 0's store may say that it
//! has left. Later its connections tell.

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

/// What a store writes in place of a rank's record when that rank's connection ends.
pub(crate) const LEFT: &[u8] = b"";

/// What stands at a rank's key.
enum Published {
    Process(ProcessRecord),
    Left,
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
    published: Option<Published>,
    frozen: Frozen,
}

impl Suspect {
    /// Its process, as seen from `own`, this one.
    fn state(&self, own: Option<ProcessId>) -> ProcessState {
        match &self.published {
            Some(Published::Process(ProcessRecord { process, .. })) => process::state(own, *process),
            Some(Published::Left) | None => ProcessState::Unknown,
        }
    }

    /// An error if it has ended before it published where it listens.
    fn check_ended(&self, own: Option<ProcessId>) -> Result<()> {
        let cause = match &self.published {
            Some(Published::Left) => "its connection with the store has closed".to_owned(),
            Some(Published::Process(ProcessRecord { host, process: Some(peer) }))
                if self.state(own) == ProcessState::Gone =>
            {
                format!("its process {} on {host} has ended", peer.pid)
            }
            Some(Published::Process(_)) | None => return Ok(()),
        };
        let rank = self.rank;
        Err(Error::new(Kind::PeerFailed, format!("rank {rank} was lost before it was connected: {cause}"))
            .with_peer(rank)
            .with_remedy(format!("see rank {rank}'s own output for its reason")))
    }

    /// An error if a signal has stopped its process for too long, as seen from `own`, this one.
    fn check_stop(&mut self, own: Option<ProcessId>) -> Result<()> {
        let Some(Published::Process(ProcessRecord { host, process: Some(peer) })) = &self.published else {
            return Ok(());
        };
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
        self.suspect(rank, false, deadline)?.check_stop(own)
    }

    /// The same of a rank that has not published where it listens; also an error if its process has ended. One that has published it may have
    /// all its connections, and end before this rank has looked at them: then they tell.
    pub(super) fn check_alive(&mut self, rank: Rank, deadline: Deadline) -> Result<()> {
        let (own, ignores_stops) = (self.own, self.config.heartbeat.timeout.is_zero());
        let suspect = self.suspect(rank, self.config.marks_left, deadline)?;
        suspect.check_ended(own)?;
        if ignores_stops { Ok(()) } else { suspect.check_stop(own) }
    }

    /// The rank that this one waits for, with what it has published. If it `may_be_marked`, and its process cannot be seen, that is read again.
    fn suspect(&mut self, rank: Rank, may_be_marked: bool, deadline: Deadline) -> Result<&mut Suspect> {
        let suspect = match self.suspect.take().filter(|suspect| suspect.rank == rank) {
            Some(suspect) => suspect,
            None => {
                let limit = STOPPED_LIMIT.max(self.config.heartbeat.timeout);
                Suspect { rank, published: None, frozen: Frozen::new(1, limit) }
            }
        };
        let suspect = self.suspect.insert(suspect);
        let reads =
            suspect.published.is_none() || may_be_marked && suspect.state(self.own) == ProcessState::Unknown;
        if reads && let Some(published) = read_record(self.config.store, rank, deadline)? {
            suspect.published = Some(published);
        }
        Ok(suspect)
    }

    /// A better error for the silence of `rank`, if it is stopped now; else `error`.
    pub(super) fn explain(&self, rank: Rank, error: Error) -> Error {
        match read_record(self.config.store, rank, Deadline::after(ANSWER_TIMEOUT)) {
            Ok(Some(Published::Process(ProcessRecord { host, process: Some(peer) })))
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
fn read_record(store: &dyn Store, rank: Rank, deadline: Deadline) -> Result<Option<Published>> {
    let key = key(rank);
    if !are_set(store, &[&key], deadline)? {
        return Ok(None);
    }
    match store.get(&key, deadline) {
        Err(error) if error.is_aborted() => Err(error),
        Ok(bytes) if bytes == LEFT => Ok(Some(Published::Left)),
        bytes => {
            let record = bytes.ok().and_then(|bytes| postcard::from_bytes(&bytes).ok());
            Ok(record.map(Published::Process))
        }
    }
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
