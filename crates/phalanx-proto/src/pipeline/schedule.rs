//! The order in which each rank computes.

use super::{Action, MAX_ACTIONS, Pass, Plan};
use crate::error::{Error, Result};

/// An order of the forward and backward passes of micro-batches. With p ranks, m micro-batches and v stages on each rank, where a
/// backward pass takes twice as long as a forward pass:
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Schedule {
    /// All forward passes, then all backward passes. A rank waits (p - 1) / (m + p - 1) of the time, and holds m micro-batches.
    /// Huang et al., "GPipe" (2019), arXiv 1811.06965.
    GPipe,
    /// Forward and backward passes in turn as soon as the first micro-batch is back. The same bubble, and at most p micro-batches
    /// are held, on rank 0. Narayanan et al., "PipeDream" (2019), arXiv 1806.03377; with a flush, arXiv 2006.09503.
    OneForwardOneBackward,
    /// As [`OneForwardOneBackward`](Self::OneForwardOneBackward), with several stages on each rank: the bubble is
    /// (p - 1) / (v m + p - 1), for v times as many messages and more activations. The number of micro-batches must be a multiple of
    /// the number of ranks. Narayanan et al., "Efficient large-scale language model training" (2021), arXiv 2104.04473.
    Interleaved {
        /// v, the number of stages on each rank.
        stages_per_rank: usize,
    },
}

impl Schedule {
    /// What each of `ranks` does with `microbatches`.
    ///
    /// # Errors
    /// If there is no rank, micro-batch or stage, if [`Interleaved`](Self::Interleaved) gets a number of micro-batches that is no
    /// multiple of the number of ranks, or if all ranks together would have more than [`MAX_ACTIONS`] actions.
    pub fn plan(self, ranks: usize, microbatches: usize) -> Result<Plan> {
        let each = match self {
            Self::Interleaved { stages_per_rank } => stages_per_rank,
            Self::GPipe | Self::OneForwardOneBackward => 1,
        };
        if ranks == 0 || microbatches == 0 || each == 0 {
            return Err(Error::invalid_argument(format!(
                "a pipeline needs at least one rank, one micro-batch and one stage on each rank; given were {ranks}, {microbatches} and {each}"
            )));
        }
        let actions = ranks
            .checked_mul(microbatches)
            .and_then(|all| all.checked_mul(each))
            .and_then(|all| all.checked_mul(2));
        if actions.is_none_or(|actions| actions > MAX_ACTIONS) {
            return Err(Error::invalid_argument(format!(
                "{ranks} ranks with {each} stages and {microbatches} micro-batches have more than {MAX_ACTIONS} passes"
            ))
            .with_remedy("divide a batch into fewer micro-batches"));
        }
        if each > 1 && !microbatches.is_multiple_of(ranks) {
            return Err(Error::invalid_argument(format!(
                "interleaved stages on {ranks} ranks: {microbatches} micro-batches are no multiple of the ranks"
            ))
            .with_remedy("change the number of micro-batches, or take one stage on each rank"));
        }
        let actions = (0..ranks)
            .map(|rank| match self {
                Self::GPipe => gpipe(rank, microbatches),
                Self::OneForwardOneBackward => interleaved(rank, ranks, microbatches, 1),
                Self::Interleaved { stages_per_rank } => {
                    interleaved(rank, ranks, microbatches, stages_per_rank)
                }
            })
            .collect();
        Ok(Plan { stages: ranks * each, microbatches, actions })
    }
}

fn gpipe(rank: usize, microbatches: usize) -> Vec<Action> {
    let of = |pass| move |microbatch| Action { pass, stage: rank, microbatch };
    (0..microbatches).map(of(Pass::Forward)).chain((0..microbatches).map(of(Pass::Backward))).collect()
}

/// 1F1B. With several stages a rank takes `ranks` micro-batches through one of its stages, then through the next.
fn interleaved(rank: usize, ranks: usize, microbatches: usize, each: usize) -> Vec<Action> {
    let all = microbatches * each;
    // The forward pass number `index` of this rank; a backward pass goes through the stages the other way round.
    let nth = |pass: Pass, index: usize| {
        if each == 1 {
            return Action { pass, stage: rank, microbatch: index };
        }
        let (round, within) = (index / (ranks * each), index % (ranks * each));
        let chunk = within / ranks;
        let chunk = if pass == Pass::Forward { chunk } else { each - 1 - chunk };
        Action { pass, stage: chunk * ranks + rank, microbatch: round * ranks + within % ranks }
    };
    // As many as it takes until the first gradient comes back.
    let behind = ranks - rank - 1;
    let warm_up = if each == 1 { behind } else { 2 * behind + (each - 1) * ranks };
    let warm_up = warm_up.min(all);
    let mut actions: Vec<Action> = (0..warm_up).map(|index| nth(Pass::Forward, index)).collect();
    for index in warm_up..all {
        actions.push(nth(Pass::Forward, index));
        actions.push(nth(Pass::Backward, index - warm_up));
    }
    actions.extend((all - warm_up..all).map(|index| nth(Pass::Backward, index)));
    actions
}
