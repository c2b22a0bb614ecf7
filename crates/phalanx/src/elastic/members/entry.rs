//! What workers tell each other about who takes part.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::world_size::MAX_WORLD_SIZE;

/// The number of one worker, in one stay: who was given up and comes back has another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct WorkerId(pub(crate) u64);

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A process that takes part, or wants to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Worker {
    pub(crate) id: WorkerId,
    pub(crate) host: String,
    /// The place in which its launcher started it, among those of all hosts, which it keeps whatever its rank becomes.
    pub(crate) place: u32,
    /// Its process there.
    pub(crate) process: u32,
}

impl Worker {
    /// The key of its heartbeats.
    ///
    /// A place may be held twice for a while: a worker that was given up has perhaps not read that when its successor comes.
    /// So each stay in a place has a counter of its own, or a frozen successor would be kept alive by what the other sends.
    /// There are a few for each place, which are used in turn, so that none has to be removed.
    pub(crate) fn heartbeat_key(&self) -> String {
        format!("beat/{}/{}", self.place, self.id.0 & WorkerId::TURNS)
    }
}

impl WorkerId {
    /// The bits that say which of its place's counters is its own.
    const TURNS: u64 = 7;

    /// The number of a worker that is the `turn`-th to come to its place: no other worker has it.
    pub(crate) fn new(random: u64, turn: u64) -> Self {
        Self(random & !Self::TURNS | turn & Self::TURNS)
    }
}

/// What all workers must have been told alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// The fewest workers with which a round begins, and the most.
    pub(crate) min: u32,
    pub(crate) max: u32,
    /// How often a round may be followed by another.
    pub(crate) reset_limit: Option<u32>,
}

impl Settings {
    pub(crate) fn are_sound(self) -> bool {
        self.min > 0 && self.min <= self.max && self.max <= MAX_WORLD_SIZE
    }
}

/// Why a worker is no longer there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Departure {
    /// Its connections to another worker broke.
    Died,
    /// It has sent no heartbeat for so long.
    Silent(Duration),
    /// It is alive, but has not left its round for so long.
    Late(Duration),
    /// It has ended by itself.
    Ended,
    /// Its launcher says so.
    Exited,
}

impl fmt::Display for Departure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Died => f.write_str("its connections broke"),
            Self::Silent(since) => write!(f, "it has not been heard of for {:.1} s", since.as_secs_f64()),
            Self::Late(since) => {
                write!(f, "it has not left its group {:.0} s after the others", since.as_secs_f64())
            }
            Self::Ended => f.write_str("it has ended"),
            Self::Exited => f.write_str("its process has ended"),
        }
    }
}

/// An entry of the log. Who appends one takes an equal one, wherever it finds it, for its own. So what is true of a moment
/// carries a random number; all else is true however often it is said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Entry {
    /// A worker wants to take part from the next round on.
    Join { worker: Worker, settings: Settings },
    /// A member has left the group of this round, and waits for the next. Does it hold a step that was cut off, and that the
    /// survivors can do again?
    Ready { round: u64, worker: WorkerId, holds: bool },
    /// Enough workers wait for this round, and have waited long enough for more.
    LastCall { round: u64, nonce: u64 },
    /// A worker is gone, as `by` says.
    Gone { worker: WorkerId, by: WorkerId, why: Departure },
    /// All members of this round have done what there was to do: one of them knows.
    Done { round: u64, worker: WorkerId },
    /// A process has ended, as its launcher says. Its number may come again.
    Exited { place: u32, process: u32, nonce: u64 },
    /// So many workers run, or are being started, after so many changes of that number: as long as fewer wait, it is
    /// worth waiting for the others.
    Expected { change: u64, workers: u32 },
}
