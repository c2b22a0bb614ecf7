//! What a store may hold in the place of a compacted_log, for the fuzz target `workers`.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::members::{Clock, Entry, MembersState, WorkerId};
use super::{BASE, Read, STRIDE, VERSION, begin, read, state_key};
use crate::deadline::Deadline;
use crate::fuzzing::pieces;
use crate::rendezvous::membership::log;
use crate::store::{MemoryStore, SharedStore};
use crate::world_size::MAX_WORLD_SIZE;

/// Nothing here waits.
const LIMIT: Duration = Duration::from_secs(20);

/// For [`fuzzing`](crate::fuzzing): the state at `base`, which is empty in a compacted_log that has not been cut off yet, and the
/// entries after it.
///
/// Says whether all of it could be read, and at least one entry was.
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> bool {
    let mut pieces = pieces(bytes);
    let Some(Some(start)) = pieces.next() else { return false };
    let (store, deadline): (SharedStore, _) = (Arc::new(MemoryStore::new()), Deadline::after(LIMIT));
    if !start.is_empty() {
        let written = store
            .set(BASE, STRIDE.to_string().as_bytes(), deadline)
            .and_then(|()| store.set(&state_key(STRIDE), start, deadline));
        assert!(written.is_ok());
    }
    let Ok((mut state, mut index)) = begin(&*store, deadline) else { return false };
    check(&state);
    let mut any = false;
    for piece in pieces {
        let Some(piece) = piece else { return false };
        assert!(store.set(&log::key(index), piece, deadline).is_ok());
        let Ok(Read::Entry(entry)) = read(&*store, index, deadline) else { return false };
        assert!(
            entry.to_bytes().is_ok_and(|bytes| Entry::from_bytes(&bytes).is_ok_and(|again| again == entry))
        );
        let before = state.round();
        let _ = state.apply(entry);
        assert!((before..=before + 1).contains(&state.round()));
        check(&state);
        index += 1;
        any = true;
    }
    any
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
    // A later reader begins at this one.
    let written =
        log::encode(VERSION, state).and_then(|bytes| log::decode::<MembersState>(VERSION, &bytes, "itself"));
    assert!(written.is_ok_and(|again| again == *state));
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
