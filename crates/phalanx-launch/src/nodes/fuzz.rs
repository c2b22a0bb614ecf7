//! What a store may hold in the place of the launchers' log, for the fuzz target `nodes`.

use super::membership::MembershipState;
use crate::fuzz_input::pieces;
use crate::log::{Mac, read_all};
use crate::world_size::MAX_WORLD_SIZE;

/// For `phalanx::fuzzing`: entries as they stand in the store; after a 0 or 2 of a job without a key, after a 1 or 3 of one with
/// a key of zeros. After a 2 or 3 the first piece is a state, which has taken the place of earlier entries.
///
/// Says whether all of it could be read, and at least one entry was.
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> bool {
    let Some((kind, rest)) = bytes.split_first().filter(|(kind, _)| **kind < 4) else { return false };
    let mac = if kind % 2 == 0 { Mac::none() } else { Mac::new(Some(&[0; 32]), "job") };
    let mut pieces = pieces(rest);
    let state = if *kind < 2 { Some(&[][..]) } else { pieces.next().flatten() };
    let Some(state) = state else { return false };
    read_all(mac, state, pieces, |before: &MembershipState, state| {
        assert!(state.round() >= before.round() && state.present().count() >= state.waiting().len());
        if let Some(running) = state.running() {
            assert!((1..=MAX_WORLD_SIZE).contains(&running.world_size()));
            assert!(running.members.iter().all(|member| member.first_rank < running.world_size()));
        }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::deadline::Deadline;
    use crate::log::{Log, Machine};
    use crate::nodes::membership::{Entry, STATE_VERSION};
    use crate::store::{MemoryStore, SharedStore};

    #[test]
    fn a_last_call_that_came_to_nothing_hides_nobodys_later_one() {
        let store: SharedStore = Arc::new(MemoryStore::new());
        let deadline = Deadline::after(std::time::Duration::from_secs(20));
        // Each launcher looks for its place in the log from the first entry that it does not know.
        let appended = [5, 7].map(|nonce| {
            let log = Log::<MembershipState>::new(Arc::clone(&store), Mac::none());
            log.try_append(&Entry::LastCall { round: 0, nonce }, deadline).unwrap()
        });
        assert_eq!(appended, [Some(0), Some(1)]);
    }

    proptest! {
        #[test]
        fn nonsense_from_others_is_survived(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            fuzz(&[&[0], &bytes[..]].concat());
            // An entry, and then a state, of which the first byte is right.
            fuzz(&[&[0, 40, 0, MembershipState::VERSION], &bytes[..]].concat());
            fuzz(&[&[2], &bytes[..]].concat());
            fuzz(&[&[2, 40, 0, STATE_VERSION], &bytes[..]].concat());
        }
    }
}
