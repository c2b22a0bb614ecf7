//! What workers tell each other about who takes part.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::rendezvous::membership::log;
use crate::world_size::MAX_WORLD_SIZE;

/// Before each entry, so that a worker of another version is told so instead of being misread.
const VERSION: u8 = 2;

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

impl Entry {
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>> {
        log::encode(VERSION, self)
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        log::decode(VERSION, bytes, "another worker")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_bytes_make_the_decoder_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = Entry::from_bytes(&bytes);
            let _ = Entry::from_bytes(&[&[VERSION], &bytes[..]].concat());
        }
    }

    #[test]
    fn entries_come_back_and_nonsense_does_not() {
        let why = Departure::Silent(Duration::from_millis(5100));
        let entry = Entry::Gone { worker: WorkerId(7), by: WorkerId(8), why };
        let bytes = entry.to_bytes().unwrap();
        assert_eq!(Entry::from_bytes(&bytes).unwrap(), entry);
        for bad in [&b""[..], &[VERSION], &[VERSION + 1, 0], &bytes[..bytes.len() - 1]] {
            assert!(Entry::from_bytes(bad).unwrap_err().to_string().contains("cannot be read"));
        }
    }
}
