//! What a store may hold in the place of the workers' log, for the fuzz target `workers`.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::{Clock, MembersState, WorkerId};
use crate::fuzzing::pieces;
use crate::log::{Mac, Machine, read_all};
use crate::world_size::MAX_WORLD_SIZE;

/// For [`fuzzing`](crate::fuzzing): the state at `base`, which is empty in a log that has not been compacted yet, and the
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
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn nonsense_from_others_is_survived(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            fuzz(&bytes);
            fuzz(&[&[0, 0], &bytes[..]].concat());
        }
    }
}
