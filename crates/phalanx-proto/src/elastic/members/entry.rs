//! The entries of the workers' log: which workers take part.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::world_size::MAX_WORLD_SIZE;

/// The number of a worker for one stay: a worker that was declared dead and comes back has another number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct WorkerId(pub u64);

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A process that takes part, or wants to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Worker {
    /// Its number.
    pub id: WorkerId,
    /// The name of its host.
    pub host: String,
    /// The slot in which its launcher started it, counted over all hosts. It stays the same when the rank changes.
    pub slot: u32,
    /// Its process on that host.
    pub process: u32,
}

impl Worker {
    /// The key of its heartbeats.
    ///
    /// A slot may be held twice for a while: a worker that was declared dead may not have read that when its successor
    /// comes. So each stay in a slot has its own counter. Otherwise the heartbeats of the old worker would keep a
    /// frozen successor alive. Each slot has a few counters, which are used in turn, so that none has to be removed.
    pub fn heartbeat_key(&self) -> String {
        format!("beat/{}/{}", self.slot, self.id.0 & WorkerId::TURNS)
    }
}

impl WorkerId {
    /// The bits that select one of its slot's counters.
    const TURNS: u64 = 7;

    /// The number of the `turn`-th worker in its slot: no other worker has it.
    pub fn new(random: u64, turn: u64) -> Self {
        Self(random & !Self::TURNS | turn & Self::TURNS)
    }
}

/// Settings that must be equal on all workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// The smallest number of workers of a round.
    pub min: u32,
    /// The largest number of workers of a round.
    pub max: u32,
    /// How often a new round may follow.
    pub reset_limit: Option<u32>,
}

impl Settings {
    /// Whether `min` is at least 1 and at most `max`, and `max` at most [`MAX_WORLD_SIZE`].
    pub(super) fn are_sound(self) -> bool {
        self.min > 0 && self.min <= self.max && self.max <= MAX_WORLD_SIZE
    }
}

/// Why a worker no longer takes part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Departure {
    /// Its connections to another worker, or to the store, broke.
    Died,
    /// It has sent no heartbeat for so long.
    Silent(Duration),
    /// It is alive, but has not left its round for so long.
    Late(Duration),
    /// It has ended by itself.
    Ended,
    /// Its launcher has reported its end.
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

/// An entry of the log. A worker that reads an entry equal to one that it is about to append takes it for its own. So
/// an entry that is true only for a moment carries a random number; for all others a repetition makes no difference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Entry {
    /// A worker asks to take part from the next round on.
    Join {
        /// The worker itself, which appends this.
        worker: Worker,
        /// Its settings. They must be those of the first worker.
        settings: Settings,
    },
    /// A member has left the group of this round, and waits for the next.
    Ready {
        /// The round whose group it has left.
        round: u64,
        /// The member itself, which appends this.
        worker: WorkerId,
        /// Whether it can replay a step that was cut off.
        can_replay: bool,
    },
    /// Enough workers wait for this round, and the time to wait for more has passed.
    LastCall {
        /// The round that begins.
        round: u64,
        /// A random number, so that no other entry is equal.
        nonce: u64,
    },
    /// A worker is gone, as `by` reports.
    Gone {
        /// The worker that is gone.
        worker: WorkerId,
        /// The worker that reports it.
        by: WorkerId,
        /// Why it no longer takes part.
        why: Departure,
    },
    /// All members of this round have finished; one of them reports it.
    Done {
        /// The round whose members have finished.
        round: u64,
        /// The member that reports it.
        worker: WorkerId,
    },
    /// A process has ended, as its launcher reports. The process number may be used again.
    Exited {
        /// The slot in which the launcher had started it.
        slot: u32,
        /// Its process number on its host.
        process: u32,
        /// A random number, so that no other entry is equal.
        nonce: u64,
    },
    /// The launcher's number of workers that run or are being started, and how often that number has changed. While
    /// fewer wait, it is worth waiting for the others.
    Expected {
        /// How often the number has changed.
        change: u64,
        /// The number of workers that run or are being started.
        workers: u32,
    },
}
