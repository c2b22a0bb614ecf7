//! What a store may hold in the place of the launchers' log, for the fuzz target `nodes`.

use super::MembershipState;
use crate::fuzzing::pieces;
use crate::key::JobKey;
use crate::log::{Mac, read_all};
use crate::world_size::MAX_WORLD_SIZE;

/// For [`fuzzing`](crate::fuzzing): entries as they stand in the store; after a 0 of a job without a key, after a 1 of one with
/// a key of zeros.
///
/// Says whether all of it could be read, and at least one entry was.
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> bool {
    let mac = match bytes.split_first() {
        Some((0, _)) => Mac::none(),
        Some((1, _)) => Mac::new(Some(&[0; 32]), "job"),
        _ => return false,
    };
    read_all(mac, &[], pieces(&bytes[1..]), |before: &MembershipState, state| {
        assert!(state.round() >= before.round() && state.present().count() >= state.waiting().len());
        if let Some(running) = state.running() {
            assert!(running.world_size() <= MAX_WORLD_SIZE);
            assert!(running.members.iter().all(|member| member.first_rank < running.world_size()));
        }
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn nonsense_from_others_is_survived(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            fuzz(&[&[0], &bytes[..]].concat());
            fuzz(&[&[0, 2, 0, 3], &bytes[..]].concat());
        }
    }
}
