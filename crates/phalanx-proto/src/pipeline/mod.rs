//! Schedules of pipeline parallelism: which rank computes which micro-batch of which stage, and when. Pure; nothing is sent here.
//!
//! A model is cut into stages, one after the other, and each batch into micro-batches. [`Schedule::plan`] gives each rank's actions
//! in their order. A [`Plan`] says what travels between ranks and how many micro-batches' activations a rank holds at most;
//! [`Plan::timeline`] plays it with given times, and says how long ranks wait: the bubble.
//!
//! `phalanx plan` draws a schedule.
//!
//! ```
//! use phalanx::pipeline::{Costs, Schedule};
//! let plan = Schedule::OneForwardOneBackward.plan(4, 8)?;
//! assert_eq!(plan.peak_activations(0), 4); // GPipe holds all 8
//! let bubble = plan.timeline(&Costs::default())?.bubble();
//! assert!((bubble - 3.0 / 11.0).abs() < 1e-12); // (p - 1) / (m + p - 1)
//! # Ok::<(), phalanx::Error>(())
//! ```

mod schedule;
mod timeline;

use serde::{Deserialize, Serialize};

pub use self::schedule::Schedule;
pub use self::timeline::{Costs, Interval, Timeline};
use crate::error::Result;

/// The most actions of all ranks together: a plan is computed as a whole on each rank.
pub const MAX_ACTIONS: usize = 1 << 22;

/// A computation for a micro-batch in a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Pass {
    /// The stage's output.
    Forward,
    /// The gradients of its input and of its parameters.
    Backward,
}

/// A pass of one micro-batch through one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Action {
    /// The computation.
    pub pass: Pass,
    /// The stage, counted through the model from 0. Rank `stage % ranks` has it.
    pub stage: usize,
    /// The micro-batch, from 0.
    pub microbatch: usize,
}

/// A message from one rank to another after an action: a stage's output, or the gradient of a stage's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Message {
    /// The action that needs it: a forward pass of the next stage, or a backward pass of the one before.
    pub needed_by: Action,
    /// The rank that computes that.
    pub to: usize,
}

/// The actions of all ranks of a pipeline. Each rank computes the plan of all, so that it knows in which order others send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    stages: usize,
    microbatches: usize,
    /// By rank, in the order in which the rank does them.
    actions: Vec<Vec<Action>>,
}

impl Plan {
    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.actions.len()
    }

    /// The number of stages of the model. It is a multiple of the number of ranks: rank r has the stages r, r + ranks, ...
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// The number of micro-batches of a batch.
    pub fn microbatches(&self) -> usize {
        self.microbatches
    }

    /// What `rank` does, in this order. Empty if the plan has no such rank.
    pub fn actions(&self, rank: usize) -> &[Action] {
        self.actions.get(rank).map_or(&[], Vec::as_slice)
    }

    /// What must be sent when `action` is done; None if its result stays: the loss, the gradient of the first stage's input and the
    /// gradients of parameters do, and so does what the same rank needs.
    pub fn message(&self, action: Action) -> Option<Message> {
        let needed_by = self.successor(action)?;
        let to = self.rank_of(needed_by.stage);
        (to != self.rank_of(action.stage)).then_some(Message { needed_by, to })
    }

    /// What `from` sends to `to`, in this order. A receiver that takes messages in it needs no tags and cannot deadlock.
    pub fn messages(&self, from: usize, to: usize) -> impl Iterator<Item = Action> {
        let messages = self.actions(from).iter().filter_map(|action| self.message(*action));
        messages.filter(move |message| message.to == to).map(|message| message.needed_by)
    }

    /// For how many micro-batches, counted for each stage, `rank` holds activations at most: from the forward pass to the end of the
    /// backward pass.
    pub fn peak_activations(&self, rank: usize) -> usize {
        let mut held = 0usize;
        let mut peak = 0;
        for action in self.actions(rank) {
            match action.pass {
                Pass::Forward => held += 1,
                Pass::Backward => held = held.saturating_sub(1),
            }
            peak = peak.max(held);
        }
        peak
    }

    /// When each action begins and ends, if each begins as soon as what it needs is there.
    ///
    /// # Errors
    /// If a cost is negative or no number.
    pub fn timeline(&self, costs: &Costs) -> Result<Timeline> {
        timeline::play(self, costs)
    }

    /// The rank that has a stage.
    pub fn rank_of(&self, stage: usize) -> usize {
        stage % self.actions.len().max(1)
    }

    /// The action, of this rank or another, that needs the result of `action`.
    fn successor(&self, action: Action) -> Option<Action> {
        let Action { pass, stage, microbatch } = action;
        match pass {
            Pass::Forward if stage + 1 < self.stages => {
                Some(Action { pass: Pass::Forward, stage: stage + 1, microbatch })
            }
            // Its own backward pass follows on the same rank.
            Pass::Forward => None,
            Pass::Backward => stage.checked_sub(1).map(|stage| Action { pass, stage, microbatch }),
        }
    }

    /// The action whose result `action` needs, if it needs one.
    fn predecessor(&self, action: Action) -> Option<Action> {
        let Action { pass, stage, microbatch } = action;
        match pass {
            Pass::Forward => stage.checked_sub(1).map(|stage| Action { pass, stage, microbatch }),
            Pass::Backward if stage + 1 < self.stages => Some(Action { pass, stage: stage + 1, microbatch }),
            Pass::Backward => Some(Action { pass: Pass::Forward, stage, microbatch }),
        }
    }
}
