//! What a store may hold in the place of the launchers' log, for the fuzz target `nodes`.

use super::*;
use crate::fuzzing::pieces;
use crate::key::JobKey;
use crate::world_size::MAX_WORLD_SIZE;

/// For [`fuzzing`](crate::fuzzing): entries as they stand in the store; after a 0 of a job without a key, after a 1 of one with
/// a key of zeros.
///
/// Says whether all of it could be read, and at least one entry was.
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> bool {
    let mac = match bytes.split_first() {
        Some((0, _)) => Mac::none(),
        Some((1, _)) => Mac::new(Some(&JobKey::from_bytes([0; 32])), "job"),
        _ => return false,
    };
    let (mut state, mut any) = (MembershipState::default(), false);
    for (index, piece) in (0..).zip(pieces(&bytes[1..])) {
        let Some(piece) = piece else { return false };
        let Verified::Entry(entry) = mac.verify(index, piece) else { return false };
        assert!(mac.sign(index, entry) == piece);
        let Ok(entry) = Entry::from_bytes(entry) else { return false };
        assert!(
            entry.to_bytes().is_ok_and(|bytes| Entry::from_bytes(&bytes).is_ok_and(|again| again == entry))
        );
        let before = state.round();
        let _ = state.apply(entry);
        assert!(state.round() >= before && state.present().count() >= state.waiting().len());
        if let Some(running) = state.running() {
            assert!(running.world_size() <= MAX_WORLD_SIZE);
            assert!(running.members.iter().all(|member| member.first_rank < running.world_size()));
        }
        any = true;
    }
    any
}
