//! The deciding half of a replicated log: the machine that reads it, which of its processes are silent, and proofs that an entry is a
//! member's.

pub mod liveness;
pub mod mac;

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use self::liveness::Absence;
use crate::error::{Error, Result};

/// A pure state machine, whose inputs are the entries of a log.
pub trait Machine: Clone + Default + Send + Sync + 'static {
    /// What a process appends.
    type Entry: Serialize + DeserializeOwned + Send;
    /// The number of a process that takes part.
    type Id: Copy + Ord + fmt::Debug + Send;

    /// The first byte of each entry. A reader of another version refuses it instead of misreading it.
    const VERSION: u8;
    /// The kind of process that shares the log, as errors name it, such as "launcher".
    const PROCESS: &'static str;
    /// Another process that shares the log, as errors name it.
    const AUTHOR: &'static str;
    /// How many entries a process waits for at the same time. Entries that follow each other soon then cost one round trip together. Each
    /// of them costs a connection to the store.
    const READERS: u64;
    /// How the log is compacted, unless it is kept whole.
    const COMPACTION: Option<Compaction<Self>>;

    /// Takes the next entry. An error is a refusal, and concerns only the process that wants to join.
    fn apply(&mut self, entry: Self::Entry) -> Result<(), String>;

    /// The process that joins by this entry.
    fn joining(entry: &Self::Entry) -> Option<Self::Id>;

    /// Whether this process has joined, and not left.
    fn is_present(&self, id: Self::Id) -> bool;

    /// The processes whose heartbeats this one watches.
    fn watched_by(&self, id: Self::Id) -> Vec<Self::Id>;

    /// The key of the heartbeats of a process that is present.
    fn heartbeat_key(&self, id: Self::Id) -> Option<String>;

    /// The entry by which `by` says that a process is no longer there.
    fn absent(id: Self::Id, by: Self::Id, absence: Absence) -> Self::Entry;
}

/// The functions that a machine needs for its log to be compacted. If the entries have MACs, a state has one too.
pub struct Compaction<M: Machine> {
    /// The state as bytes.
    pub encode: fn(&M) -> Result<Vec<u8>>,
    /// The state that another process has written; an error if no log leads to such a state.
    pub decode: fn(&[u8]) -> Result<M>,
    /// The process that removes what is not needed any more.
    pub caretaker: fn(&M) -> Option<M::Id>,
    /// The process that an entry says has come or gone, and the key of its heartbeats. The key is removed with the entry, if the process is not
    /// there then. None if other processes use the keys again.
    pub heartbeats_of: Option<HeartbeatsOf<M>>,
}

/// What [`Compaction::heartbeats_of`] is.
pub type HeartbeatsOf<M> = fn(&<M as Machine>::Entry) -> Option<(<M as Machine>::Id, String)>;

/// How much later than the first of those that wait the one at this `place` among them appends what one may append for all. If all did so at the
/// same time, each would read what all have appended. By then what the first has appended is read; and if it cannot, the next do it soon,
/// however many there are.
pub fn turn(place: Option<usize>) -> Duration {
    const INTERVAL: Duration = Duration::from_secs(1);
    let doublings = place.unwrap_or(usize::MAX).checked_ilog2().map_or(0, |doublings| doublings + 1);
    INTERVAL * doublings.min(16)
}

/// An entry or a state as bytes, behind its version.
pub fn encode(version: u8, value: &impl Serialize) -> Result<Vec<u8>> {
    postcard::to_extend(value, vec![version])
        .map_err(|error| Error::protocol(format!("an entry of the log cannot be written: {error}")))
}

/// What `author` has encoded.
pub fn decode<T: DeserializeOwned>(version: u8, bytes: &[u8], author: &str) -> Result<T> {
    let unreadable = |why: String| {
        Error::protocol(format!("an entry of {author} cannot be decoded: {why}"))
            .with_remedy("start everything in a job with the same version of Phalanx")
    };
    match bytes.split_first() {
        Some((found, rest)) if *found == version => {
            postcard::from_bytes(rest).map_err(|error| unreadable(error.to_string()))
        }
        Some((found, _)) => Err(unreadable(format!("it is version {found}, not {version}"))),
        None => Err(unreadable("it is empty".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_goes_at_once_and_the_last_of_thousands_soon() {
        let places = [Some(0), Some(1), Some(2), Some(3), Some(4), Some(8000), None];
        assert_eq!(places.map(|place| turn(place).as_secs()), [0, 1, 2, 2, 3, 13, 16]);
    }
}
