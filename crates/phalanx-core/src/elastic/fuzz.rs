//! What a store may hold in the place of the workers' log, for the fuzz target `workers`.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::members::{Clock, MembersState, WorkerId};
use crate::fuzz_input::pieces;
use crate::log::{Mac, Machine, read_all};
use crate::world_size::MAX_WORLD_SIZE;

/// For `phalanx::fuzzing`: the state at `base`, which is empty in a log that has not been compacted yet, and the
/// entries after it.
///
/// Says whether all of it could be read, and at least one entry was.
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> bool {
    let mut pieces = pieces(bytes);
    let Some(Some(start)) = pieces.next() else { return false };
    read_all(Mac::none(), start, pieces, |before: &MembersState, state| {
        assert!((before.round()..=before.round() + 1).contains(&state.round()));
        check(state);
    })
}

/// What holds of every state that is believed, whoever wrote it.
fn check(state: &MembersState) {
    assert!(state.is_sound() && state.members().len() <= MAX_WORLD_SIZE as usize);
    let ids: HashSet<WorkerId> = state.members().chain(state.waiting()).map(|worker| worker.id).collect();
    for id in ids {
        assert!(!state.watched_by(id).contains(&id));
        assert!(state.rank(id).is_none_or(|rank| rank < state.members().len()));
    }
    let second = Duration::from_secs(1);
    let _ = Clock::new(second, second, second).look(state, Instant::now());
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::deadline::Deadline;
    use crate::elastic::members::Entry;
    use crate::log::{Log, Read};
    use crate::store::{MemoryStore, SharedStore};

    #[test]
    fn what_is_said_of_another_moment_is_another_entry() {
        // Each author looks for the end of the log from its start; the process's number comes again.
        let store: SharedStore = Arc::new(MemoryStore::new());
        let deadline = Deadline::after(Duration::from_secs(10));
        let log = || Log::<MembersState>::new(Arc::clone(&store), Mac::none());
        let exited = |nonce| Entry::Exited { slot: 1, process: 4, nonce };
        for nonce in [1, 2] {
            log().append(&exited(nonce), deadline).unwrap();
        }
        assert_eq!(log().read(1, deadline).unwrap(), Read::Entry(exited(2)));
    }

    proptest! {
        #[test]
        fn nonsense_from_others_is_survived(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            fuzz(&bytes);
            fuzz(&[&[0, 0], &bytes[..]].concat());
        }
    }
}
