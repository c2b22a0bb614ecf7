//! The members of a job's rounds, as far back as a step in progress needs them: pure.

use std::collections::BTreeSet;

use super::members::WorkerId;
use super::retry::{Decision, Position};
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// The members of the rounds since the last return to a commit, by rank.
#[derive(Debug, Default)]
pub struct Worlds(Vec<(u64, Vec<WorkerId>)>);

impl Worlds {
    /// The group of `round` was connected, and failed before its ranks have decided how they go on.
    pub fn failed(&mut self, round: u64, members: Vec<WorkerId>) {
        // This worker was a member of the round, which matters if others got further in it.
        self.0.push((round, members));
    }

    /// The ranks of `round` have decided how they go on; this worker was cut off at `position`.
    pub fn decided(
        &mut self,
        round: u64,
        members: Vec<WorkerId>,
        decision: Decision,
        position: Option<Position>,
    ) {
        // No rank has data that were distributed in earlier worlds.
        let oldest = match (decision, position) {
            (Decision::GoOn(_), Some(position)) => position.data_round,
            _ => round,
        };
        self.0.retain(|(before, _)| *before >= oldest);
        self.0.push((round, members));
    }

    /// The rank of worker `me` in the world of `round`.
    ///
    /// # Errors
    /// If that round is not known, or it was no member.
    pub fn rank_in(&self, round: u64, me: WorkerId) -> Result<(Rank, WorldSize)> {
        let members = self.members(round)?;
        let rank = members.iter().position(|member| *member == me).ok_or_else(|| unknown(round))?;
        let world = WorldSize::new(u32::try_from(members.len()).unwrap_or(u32::MAX))?;
        Ok((world.rank(u32::try_from(rank).unwrap_or(u32::MAX))?, world))
    }

    /// The ranks of the world of `round` that are not members of `group`, a later round.
    ///
    /// # Errors
    /// If one of the rounds is not known.
    pub fn missing(&self, round: u64, group: u64) -> Result<Vec<Rank>> {
        let (members, there) = (self.members(round)?, self.members(group)?);
        // So it is in each step but those after a failure.
        if round == group {
            return Ok(Vec::new());
        }
        let there: BTreeSet<WorkerId> = there.iter().copied().collect();
        let missing = members.iter().zip(0..).filter(|(member, _)| !there.contains(*member));
        Ok(missing.map(|(_, rank)| Rank::new(rank)).collect())
    }

    fn members(&self, round: u64) -> Result<&[WorkerId]> {
        let world = self.0.iter().find(|(number, _)| *number == round);
        world.map(|(_, members)| members.as_slice()).ok_or_else(|| unknown(round))
    }
}

fn unknown(round: u64) -> Error {
    Error::malformed(format!(
        "other workers are in the middle of a step of round {round}, which this one does not know"
    ))
}

#[cfg(test)]
mod tests {
    use super::super::retry::decide;
    use super::*;

    fn ids(ids: &[u64]) -> Vec<WorkerId> {
        ids.iter().copied().map(WorkerId).collect()
    }

    #[test]
    fn worlds_are_known_as_long_as_a_step_has_their_data() {
        let mut worlds = Worlds::default();
        worlds.decided(1, ids(&[7, 8, 9]), Decision::GoBack, None);
        // A group that failed at once, and one in which the step goes on.
        worlds.failed(2, ids(&[7, 9]));
        let position =
            Position { loop_round: 1, commits: 1, step: 4, data_round: 1, reduced: 0, called: false };
        let decision = decide(&[Some(position)]);
        assert!(matches!(decision, Decision::GoOn(_)));
        worlds.decided(3, ids(&[9]), decision, Some(position));
        assert_eq!(worlds.missing(1, 3).unwrap(), [Rank::new(0), Rank::new(1)]);
        let (rank, world) = worlds.rank_in(1, WorkerId(9)).unwrap();
        assert_eq!((rank.get(), world.get()), (2, 3));
        assert!(worlds.rank_in(3, WorkerId(7)).is_err());
        // All go back to a commit: what came before is forgotten.
        worlds.decided(4, ids(&[9, 10]), Decision::GoBack, Some(position));
        assert!(worlds.missing(1, 4).unwrap_err().to_string().contains("round 1"));
        assert_eq!(worlds.rank_in(4, WorkerId(10)).unwrap().0.get(), 1);
    }

    #[test]
    fn who_is_missing_is_no_work_of_the_square_of_the_ranks() {
        const RANKS: u64 = 400_000;
        let all: Vec<u64> = (0..RANKS).collect();
        let mut worlds = Worlds::default();
        worlds.failed(1, ids(&all));
        worlds.failed(2, ids(&all[..all.len() - 1]));
        let begun = crate::some_time();
        assert!(worlds.missing(1, 1).unwrap().is_empty());
        assert_eq!(worlds.missing(1, 2).unwrap(), [Rank::new(RANKS as u32 - 1)]);
        let lasted = crate::some_time() - begun;
        assert!(lasted.as_secs() < 10, "{lasted:?}");
    }
}
