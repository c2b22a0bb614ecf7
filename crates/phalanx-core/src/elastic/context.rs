//! What a training loop can do in an elastic job.

use std::fmt;

use super::retry::StepProgress;
use super::rounds::Rounds;
use super::snapshot::Snapshot;
use super::{Drift, State, state_sync};
use crate::caller::Caller;
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// The state, and the commits that preserve it when workers change.
pub struct Context<'a, S: State> {
    /// The state. When the loop is called it is the same on every rank.
    pub state: &'a mut S,
    pub(super) snapshot: &'a mut Snapshot,
    pub(super) group: ProcessGroup,
    pub(super) drift: Drift,
    /// None if workers cannot change.
    pub(super) rounds: Option<&'a mut Rounds>,
    /// The round of the group.
    pub(super) round: u64,
    pub(super) progress: StepProgress,
    /// The rank and the world size by which the data of this step are distributed.
    pub(super) data_rank: (Rank, WorldSize),
    pub(super) ended: Option<Ended>,
    /// The number of the group's calls at the end of the last step.
    pub(super) calls: u64,
    /// Whether the state has followed to the current group.
    pub(super) followed: bool,
    /// A copy of the input of `all_reduce`, for a replay.
    pub(super) input: Vec<u8>,
}

/// Why the loop ends without a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// A commit has reported that a new group is to be formed.
    WorkersWait,
    /// There is a new group already, and all go back to the last commit.
    GoneBack,
}

impl Ended {
    pub(super) fn error(self) -> Error {
        Error::regrouping(match self {
            Self::WorkersWait => "workers have come, and all form a new group",
            Self::GoneBack => "a step was cut off, and all go back to the last commit",
        })
    }
}

impl<S: State> fmt::Debug for Context<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let commits = self.snapshot.commits;
        f.debug_struct("Context")
            .field("round", &self.round)
            .field("commits", &commits)
            .finish_non_exhaustive()
    }
}

impl<'a, S: State> Context<'a, S> {
    /// For the loop with `group`, which is that of this round.
    pub(super) fn new(
        state: &'a mut S,
        snapshot: &'a mut Snapshot,
        (round, group): (u64, &ProcessGroup),
        drift: Drift,
        rounds: Option<&'a mut Rounds>,
    ) -> Self {
        Self {
            state,
            snapshot,
            group: group.clone(),
            drift,
            rounds,
            round,
            progress: StepProgress::new(round),
            data_rank: (group.rank(), group.world_size()),
            ended: None,
            calls: 0,
            followed: false,
            input: Vec::new(),
        }
    }
}

impl<S: State> Context<'_, S> {
    /// Keeps a copy of the state in memory: if a worker dies, the others continue from it. Every rank must call it equally
    /// often, at the same point.
    ///
    /// It costs a copy of the state, a hash of it (XXH3, about as much time again) unless drift is
    /// [ignored](Drift::Ignore), and a collective of 32 bytes a rank. Once it has returned on any rank, every rank has
    /// the commit: it is lost only if all ranks die.
    ///
    /// # Errors
    /// Those of every collective, and those of [`State`]. If replicas have drifted apart, the error
    /// [`is_mismatch`](Error::is_mismatch). If workers wait to join, the error [`is_regrouping`](Error::is_regrouping):
    /// the commit is made, and [`run`](super::run()) calls the loop again with a larger group as soon as the loop
    /// returns this error, best by `?`.
    pub fn commit(&mut self) -> Result<()> {
        self.check_ended()?;
        // The last commit may still be needed: it is not overwritten if the new one cannot be made.
        if let Some(cause) = self.group.failure() {
            return Err(cause);
        }
        self.state.agree()?;
        self.snapshot.save(&*self.state)?;
        // Counted before the collective: a rank that completes it knows that all have the commit, and may die before it
        // counts.
        self.snapshot.count(self.round);
        let workers_wait = self.rounds.as_ref().is_some_and(|rounds| rounds.workers_wait());
        let group = self.group.in_call(Caller::ElasticCommit);
        let committed = state_sync::commit(&group, self.snapshot, workers_wait, self.drift)?;
        if committed.repaired {
            self.state.load(&self.snapshot.parts)?;
        }
        if committed.workers_wait {
            self.ended = Some(Ended::WorkersWait);
            return Err(Ended::WorkersWait.error());
        }
        Ok(())
    }

    /// Goes back to the last commit, on this rank alone. Without a commit it goes back to the state with which the job
    /// began.
    ///
    /// # Errors
    /// Those of [`State::load`]. Also the error of a commit that failed while it saved the state: then there is no
    /// commit to go back to.
    pub fn restore(&mut self) -> Result<()> {
        self.snapshot.whole()?;
        self.state.load(&self.snapshot.parts)
    }

    /// Gives every rank the state that rank 0 has now, for example after rank 0 alone has read a checkpoint. Only what
    /// differs is sent. It makes no commit: after a failure all still go back to the last one.
    ///
    /// # Errors
    /// As every collective, and those of [`State`]. If the loop has gone on after a commit or a step that ends it, that one's error.
    pub fn sync(&mut self) -> Result<()> {
        // The group may be the next one, in which the other ranks go back to the commit.
        self.check_ended()?;
        let mut now = Snapshot::of(&*self.state)?;
        if state_sync::take_from(&self.group.in_call(Caller::ElasticSync), &mut now, Rank::MAIN)? {
            self.state.load(&now.parts)?;
        }
        Ok(())
    }

    /// The current group. [`step`](Self::step) may have changed it since the loop was called.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// This worker's rank for the data of the next step. It is the group's rank, except in the step after a failure:
    /// see [`step`](Self::step).
    pub fn rank(&self) -> Rank {
        self.data_rank.0
    }

    /// The number of ranks for the data of the next step.
    pub fn world_size(&self) -> WorldSize {
        self.data_rank.1
    }

    /// How many commits have led to this state, on this worker or others.
    pub fn commits(&self) -> u64 {
        self.snapshot.commits
    }

    /// Whether the job can survive its workers. If not, a [step](Self::step) runs once, and keeps nothing for a replay.
    pub fn is_elastic(&self) -> bool {
        self.rounds.is_some()
    }

    /// The number of this group among the groups of the job, from 1.
    pub fn round(&self) -> u64 {
        self.round
    }

    /// An error if the loop has continued although its group or its step has ended.
    pub(super) fn check_ended(&self) -> Result<()> {
        match self.ended {
            Some(ended) => Err(ended.error()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Plain;
    use super::*;

    /// A loop of a world that does not change.
    fn context<'a>(
        state: &'a mut Plain<u32>,
        snapshot: &'a mut Snapshot,
        group: &ProcessGroup,
    ) -> Context<'a, Plain<u32>> {
        Context::new(state, snapshot, (1, group), Drift::Fail, None)
    }

    #[test]
    fn a_commit_in_a_group_that_has_failed_leaves_the_last_one() {
        let group = ProcessGroup::alone().unwrap();
        let (mut state, mut snapshot) = (Plain(1), Snapshot::default());
        let mut context = context(&mut state, &mut snapshot, &group);
        context.commit().unwrap();
        context.state.0 = 2;
        group.abort(Error::aborted("somebody died"));
        assert!(context.commit().unwrap_err().to_string().contains("somebody died"));
        assert_eq!(context.commits(), 1);
        context.restore().unwrap();
        assert_eq!(context.state.0, 1);
    }

    #[test]
    fn a_loop_that_is_to_end_makes_no_commit_no_step_and_no_sync() {
        let group = ProcessGroup::alone().unwrap();
        let (mut state, mut snapshot) = (Plain(1), Snapshot::default());
        let mut context = context(&mut state, &mut snapshot, &group);
        for ended in [Ended::WorkersWait, Ended::GoneBack] {
            context.ended = Some(ended);
            assert!(context.commit().unwrap_err().is_regrouping());
            assert!(context.step(|_, _| Ok(())).unwrap_err().is_regrouping());
            assert!(context.sync().unwrap_err().is_regrouping());
        }
        assert_eq!(context.commits(), 0);
    }

    #[test]
    fn where_workers_do_not_change_a_step_is_what_it_reduces() {
        let group = ProcessGroup::alone().unwrap();
        let (mut state, mut snapshot) = (Plain(1), Snapshot::default());
        let mut context = context(&mut state, &mut snapshot, &group);
        let mut data = [3.0_f32, 4.0];
        let step = context.all_reduce(&mut data, crate::collective::ReduceOp::Sum).unwrap();
        assert_eq!((data, step.missing.len(), step.changed), ([3.0, 4.0], 0, false));
        assert!(context.step::<()>(|_, _| Err(Error::aborted("its own"))).unwrap_err().is_aborted());
        assert_eq!((context.rank(), context.world_size()), (Rank::MAIN, WorldSize::ONE));
    }
}
