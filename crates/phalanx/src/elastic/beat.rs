//! The counters by which elastic workers are heard in the store.
//!
//! A place may be held twice for a while: a worker that was given up has perhaps not read that when its successor comes. So
//! each stay in a place has a counter of its own, or a frozen successor would be heard by what the other one says. There are a
//! few for each place, which are used in turn, so that nobody has to remove any.

use super::members::{Worker, WorkerId};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::random;
use crate::store::Store;

/// The bits of a worker's number that say which of its place's counters is its own.
const TURNS: u64 = 7;

/// The number of one who comes to `place` now: nobody else's, and with another counter than those of the last seven.
pub(super) fn next_id(store: &dyn Store, place: u32, deadline: Deadline) -> Result<WorkerId> {
    let turn = u64::from_ne_bytes(store.add(&format!("stays/{place}"), 1, deadline)?.to_ne_bytes());
    Ok(WorkerId(random::number()? & !TURNS | turn & TURNS))
}

/// The key of `worker`'s counter.
pub(super) fn key(worker: &Worker) -> String {
    format!("beat/{}/{}", worker.place, worker.id.0 & TURNS)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use super::*;
    use crate::store::MemoryStore;

    #[test]
    fn whoever_comes_next_is_heard_by_another_counter_and_there_are_never_many() {
        let (store, deadline) = (MemoryStore::new(), Deadline::after(Duration::from_secs(20)));
        let stay = |place| {
            let id = next_id(&store, place, deadline).unwrap();
            key(&Worker { id, host: "here".to_owned(), place, process: 1 })
        };
        let keys: Vec<String> = (0..40).map(|_| stay(3)).collect();
        for turn in keys.windows(8) {
            assert_eq!(turn.iter().collect::<BTreeSet<_>>().len(), 8, "{turn:?}");
        }
        assert_eq!(keys.iter().collect::<BTreeSet<_>>().len(), 8);
        assert!(!keys.contains(&stay(4)));
    }
}
