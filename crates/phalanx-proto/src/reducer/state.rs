//! The reducer's state machine, pure. Input: the events of a step. Output: the buckets to fill, to launch and to rebuild.
//!
//! ```text
//!        begin             finished            begin_gather, gathered
//! Idle ────────▶ Backward ──────────▶ Averaged ──────────────────────▶ Gathered
//!                 │    ▲                  │
//!         cut_off └────┴──────────────────┘ replay, in another group
//! ```
//!
//! `begin` leads from each phase but `Backward` to the next step; `fail` leads from each to `Failed`, for good.
//!
//! The phase is the one place that has the failure of a step. It is not the failure of the group, which the group's
//! health has: a reducer that keeps its gradients outlives its group, and averages that have arrived are read although
//! the group has failed since.

mod layout;

use std::ops::Range;

use serde::{Deserialize, Serialize};

pub use self::layout::Progress;
use super::plan::{Limits, Plan};
use super::{ParameterSpec, ReducerOptions, unused};
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// The buckets of one model on one rank: how they are laid out, and how far the current step has come.
#[derive(Clone, Debug)]
pub struct ReducerState {
    rank: Rank,
    world: WorldSize,
    parameters: Vec<ParameterSpec>,
    limits: Limits,
    /// The owner of each parameter's average, if averages are sharded.
    owners: Option<Vec<Rank>>,
    plan: Plan,
    /// The order of parameters that the plan was made from.
    order: Vec<usize>,
    phase: Phase,
    first_step: FirstStep,
    unused_parameters: UnusedParameters,

    /// Gradients still missing in this step, for each bucket.
    missing: Vec<usize>,
    seen: Vec<bool>,
    /// Parameters in the order in which their gradients came, in this step or the last.
    arrival: Vec<usize>,
    /// The number of buckets launched in this step, in the order of the plan.
    launched: usize,
    /// Parameters that get no gradient from backward in this step, as far as that is known.
    unused: Vec<usize>,
    /// The number of `unused` that have been filled.
    filled: usize,
    /// For each parameter: whether any rank had a gradient in the last step.
    used: Vec<bool>,
    /// This rank's weight in this step; none if all ranks count alike.
    weight: Option<f64>,
    /// Parameters whose gradients in this step are those of samples of weight 0 alone.
    void: Vec<usize>,
    /// Whether backward is over. If so, the step can be replayed, if gradients are kept.
    ended: bool,
    /// Whether the gradients of this step are kept, so that it can be replayed.
    keeps: bool,
    /// Whether the gradients of the next step will be kept.
    keeps_next: bool,
    /// The failure that cut this step off, until it is replayed in another group.
    cut_off: Option<Error>,
}

#[derive(Clone, Debug)]
enum Phase {
    /// The buckets hold nothing that may be read.
    Idle,
    Backward,
    /// The buckets hold averages.
    Averaged,
    /// The buckets hold parameters.
    Gathered,
    /// The reducer's failure, which every call returns from here on. It is not the group's: with kept gradients a group may
    /// fail and the reducer go on in the next, and averages that are there outlive their group.
    Failed(Error),
}

/// When the first step is over, the order of gradients is known, and which parameters a static graph does not use. Both take
/// effect as the next step begins, since the first may have to be replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum FirstStep {
    Ahead,
    Over,
    /// What it has shown is in effect.
    Applied,
}

/// How parameters are treated that get no gradient in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UnusedParameters {
    /// They are an error.
    Refused,
    /// `find_unused_parameters`: their gradients are zero, and the ranks exchange in every step which these are.
    Find,
    /// `static_graph`, in the first step, which is as with `Find`.
    Learn,
    /// `static_graph`, from the second step on: what is unused on this rank is so in every step.
    Known,
}

impl UnusedParameters {
    /// Whether the ranks tell each other at the end of backward which parameters they use.
    fn are_exchanged(self) -> bool {
        matches!(self, Self::Find | Self::Learn)
    }
}

/// What to do without the gradients of a bucket.
pub const LOST_REMEDY: &str =
    "an earlier error says why; make the reducer anew, from a group that has not failed";

impl ReducerState {
    /// Before the first step: the buckets expect gradients in the reverse order of `parameters`.
    pub fn new(
        (rank, world): (Rank, WorldSize),
        parameters: Vec<ParameterSpec>,
        options: &ReducerOptions,
        limits: Limits,
    ) -> Self {
        let order: Vec<usize> = (0..parameters.len()).rev().collect();
        let plan = Plan::new(&parameters, &order, &limits);
        let unused_parameters = match (options.static_graph, options.find_unused_parameters) {
            (true, _) => UnusedParameters::Learn,
            (false, true) => UnusedParameters::Find,
            (false, false) => UnusedParameters::Refused,
        };
        Self {
            rank,
            world,
            limits,
            owners: None,
            phase: Phase::Idle,
            first_step: FirstStep::Ahead,
            unused_parameters,
            missing: Vec::new(),
            seen: Vec::new(),
            arrival: Vec::with_capacity(parameters.len()),
            launched: 0,
            unused: Vec::new(),
            filled: 0,
            used: vec![true; parameters.len()],
            weight: None,
            void: Vec::new(),
            ended: false,
            keeps: false,
            keeps_next: false,
            cut_off: None,
            parameters,
            plan,
            order,
        }
    }

    /// The parameters, in the order of the model.
    pub fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    /// Which parameter lies where in which bucket.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// How many buckets have been launched in this step: the first ones of the plan.
    pub fn launched(&self) -> usize {
        self.launched
    }

    /// The reducer's failure, if there is one.
    pub fn check(&self) -> Result<()> {
        if let Phase::Failed(error) = &self.phase { Err(error.clone()) } else { Ok(()) }
    }

    /// Everything ends here; gives the first failure, and whether it is this one.
    pub fn fail(&mut self, error: Error) -> (Error, bool) {
        match &self.phase {
            Phase::Failed(first) => (first.clone(), false),
            _ => {
                self.phase = Phase::Failed(error.clone());
                (error, true)
            }
        }
    }

    /// The group has failed with `error`, through another rank. Gives whether the step can be replayed: then no bucket is
    /// launched any more, gradients are still taken, and the step's end returns the error.
    pub fn cut_off(&mut self, error: &Error) -> bool {
        if self.keeps {
            self.cut_off = Some(error.clone());
        }
        self.keeps
    }

    /// A step is to begin. Gives the order in which gradients came if the buckets are to be built anew before: once, when the
    /// first step has shown it.
    pub fn rebuild(&self) -> Result<Option<&Vec<usize>>> {
        if self.in_backward() {
            let cause = format!("rank {} began a backward pass before the last one was finished", self.rank);
            return Err(Error::invalid_argument(cause).with_remedy(
                "finish each before the next; to add up the gradients of several, see backward_no_sync",
            ));
        }
        let keeps_order = self.unused_parameters == UnusedParameters::Find || self.world == WorldSize::ONE;
        Ok((self.first_step == FirstStep::Over && !keeps_order).then_some(&self.arrival))
    }

    /// A backward pass begins, in which this rank counts by `weight`, or as all others. What of it is known to be unused is to be
    /// [filled](Self::next_unused).
    pub fn begin(&mut self, weight: Option<f64>) {
        self.weight = weight;
        self.void.clear();
        if self.first_step == FirstStep::Over {
            self.first_step = FirstStep::Applied;
            if self.unused_parameters == UnusedParameters::Learn {
                self.unused_parameters = UnusedParameters::Known;
            }
        }
        if self.unused_parameters != UnusedParameters::Known {
            self.unused.clear();
        }
        self.missing.clear();
        self.missing.extend(self.plan.buckets.iter().map(|bucket| bucket.parameters.len()));
        self.seen.clear();
        self.seen.resize(self.parameters.len(), false);
        self.arrival.clear();
        (self.launched, self.filled, self.ended, self.cut_off) = (0, 0, false, None);
        self.keeps = std::mem::take(&mut self.keeps_next);
        self.phase = Phase::Backward;
    }

    /// This rank's weight in this step, or the last; none if all ranks count alike.
    pub fn weight(&self) -> Option<f64> {
        self.weight
    }

    /// The gradient of the parameter at `index` counts as zero.
    pub fn voided(&mut self, index: usize) {
        self.void.push(index);
    }

    /// Whether a step has begun and is neither averaged nor failed.
    pub fn in_backward(&self) -> bool {
        matches!(self.phase, Phase::Backward)
    }

    /// Fails outside of a backward pass.
    pub fn check_backward(&self, problem: &'static str) -> Result<()> {
        self.check()?;
        if self.in_backward() { Ok(()) } else { Err(Error::invalid_argument(problem)) }
    }

    /// Fails if backward may not give a gradient, of so many bytes, for the parameter at `index` now.
    pub fn admit(&self, index: usize, bytes: Option<usize>) -> Result<()> {
        let parameter = self.parameter(index)?;
        let (cause, remedy) = if let Some(bytes) = bytes.filter(|&bytes| bytes != parameter.bytes()) {
            (
                format!("came with {bytes} B, not {} B", parameter.bytes()),
                "give it in the parameter's type and shape",
            )
        } else if self.unused_parameters == UnusedParameters::Known && self.unused.contains(&index) {
            (
                "came, and none did in the first step".to_owned(),
                "static_graph promises the same graph in every step; set find_unused_parameters instead",
            )
        } else if self.seen[index] {
            (
                "came a second time in one backward pass".to_owned(),
                "give the reducer each parameter once; accumulate without synchronisation, then start",
            )
        } else {
            return Ok(());
        };
        let cause = format!("on rank {}, the gradient of parameter {index}, {parameter}, {cause}", self.rank);
        Err(Error::invalid_argument(cause).with_remedy(remedy))
    }

    /// The gradient of the parameter at `index` is in its bucket; gives the bucket if it is full.
    pub fn arrived(&mut self, index: usize) -> Option<usize> {
        if std::mem::replace(&mut self.seen[index], true) {
            return None;
        }
        self.arrival.push(index);
        let bucket = self.plan.slices[index].bucket;
        self.missing[bucket] -= 1;
        (self.missing[bucket] == 0).then_some(bucket)
    }

    /// The next bucket to launch, if it is full: in the order of the plan, which is the same on every rank whatever the order
    /// of gradients. None in a world of one, whose average is what it has, nor after the step was cut off.
    pub fn next_launch(&mut self) -> Option<usize> {
        let bucket = self.launched;
        let full = self.missing.get(bucket) == Some(&0);
        if !full || self.world == WorldSize::ONE || self.cut_off.is_some() {
            return None;
        }
        self.launched += 1;
        Some(bucket)
    }

    /// Whether a parameter that gets no gradient in this step counts as unused.
    pub fn accepts_unused(&self) -> bool {
        self.unused_parameters.are_exchanged()
    }

    /// The next parameter whose gradient backward does not give.
    pub fn next_unused(&mut self) -> Option<usize> {
        while let Some(&index) = self.unused.get(self.filled) {
            if !self.seen[index] {
                return Some(index);
            }
            self.filled += 1;
        }
        None
    }

    /// Backward is over: what got no gradient is unused, or an error.
    pub fn end(&mut self) -> Result<()> {
        let replayed = std::mem::replace(&mut self.ended, true);
        let seen = &self.seen;
        let mut missing = (0..seen.len()).filter(|&index| !seen[index]).peekable();
        if !self.unused_parameters.are_exchanged() {
            return match missing.peek() {
                None => Ok(()),
                // A rank without samples need not have a gradient for anything: zeros change no average.
                Some(_)
                    if self.weight == Some(0.0) && self.unused_parameters == UnusedParameters::Refused =>
                {
                    self.unused.extend(missing);
                    Ok(())
                }
                Some(_) => Err(unused::error(self.rank, &self.parameters, &missing.collect::<Vec<_>>())),
            };
        }
        if !replayed {
            self.unused.extend(missing);
        }
        Ok(())
    }

    /// Checks that all buckets have been launched. Returns whether the ranks exchange now which parameters they
    /// [use](Self::used_here).
    pub fn closed(&self) -> Result<bool> {
        if let Some(error) = &self.cut_off {
            return Err(error.clone());
        }
        if self.world != WorldSize::ONE && self.launched < self.plan.buckets.len() {
            let cause = format!("the gradients of bucket {} are lost", self.launched);
            return Err(Error::aborted(cause).with_remedy(LOST_REMEDY));
        }
        Ok(self.unused_parameters.are_exchanged())
    }

    /// For each parameter: whether this rank has a gradient in this step.
    pub fn used_here(&self) -> Vec<u8> {
        let mut used = vec![1; self.parameters.len()];
        // What a static graph learns is the graph, whatever the weights are.
        let counts = self.unused_parameters == UnusedParameters::Find;
        if counts && self.weight == Some(0.0) {
            used.fill(0);
        }
        let void = self.void.iter().filter(|_| counts);
        for &index in self.unused.iter().chain(void) {
            if let Some(used) = used.get_mut(index) {
                *used = 0;
            }
        }
        used
    }

    /// For each parameter: whether any rank has a gradient in this step.
    pub fn set_used(&mut self, used: &[u8]) {
        self.used.clear();
        self.used.extend(used.iter().map(|&used| used != 0));
    }

    /// What of this step is unused here, and what any rank uses.
    pub fn usage(&self) -> (&[usize], &[bool]) {
        (&self.unused, &self.used)
    }

    /// All buckets are averaged and back.
    pub fn finished(&mut self) {
        self.phase = Phase::Averaged;
        if self.first_step == FirstStep::Ahead {
            self.first_step = FirstStep::Over;
        }
    }

    /// Where the gradient of the parameter at `index` belongs.
    pub fn slice_of(&self, index: usize) -> (usize, Range<usize>) {
        let place = self.plan.slices[index];
        (place.bucket, place.bytes(self.plan.buckets[place.bucket].dtype))
    }

    /// Where the average of the parameter at `index` is; nothing if no rank had a gradient for it, or it is another rank's.
    pub fn average(&self, index: usize) -> Result<Option<(usize, Range<usize>)>> {
        self.check()?;
        if !matches!(self.phase, Phase::Averaged) {
            return Err(Error::invalid_argument("there is no averaged gradient: call `finish` first"));
        }
        self.parameter(index)?;
        Ok((self.used[index] && self.owns(index)).then(|| self.slice_of(index)))
    }

    /// Where the gathered parameter at `index` is, if it has been gathered.
    pub fn gathered_parameter(&self, index: usize) -> Option<(usize, Range<usize>)> {
        let gathered = matches!(self.phase, Phase::Gathered) && index < self.parameters.len();
        gathered.then(|| self.slice_of(index))
    }

    /// The contents of the buckets are gone.
    pub fn emptied(&mut self) {
        if matches!(self.phase, Phase::Averaged | Phase::Gathered) {
            self.phase = Phase::Idle;
        }
    }

    /// The parameter at `index`.
    ///
    /// # Errors
    /// If there is none.
    pub fn parameter(&self, index: usize) -> Result<&ParameterSpec> {
        self.parameters.get(index).ok_or_else(|| {
            Error::invalid_argument(format!("there is no parameter {index} among {}", self.parameters.len()))
        })
    }

    /// The gradients of the next step are kept.
    pub fn keep(&mut self, hook_is_stateless: bool) -> Result<()> {
        self.check()?;
        if self.in_backward() {
            let cause = "keep_gradients was called within a backward pass";
            return Err(Error::invalid_argument(cause).with_remedy("call it before the pass begins"));
        }
        check_replayable(self.owners.is_some(), hook_is_stateless)?;
        // Those of the last step are no longer wanted.
        (self.keeps_next, self.ended) = (true, false);
        Ok(())
    }

    /// Whether the gradients of this step are kept.
    pub fn keeps(&self) -> bool {
        self.keeps
    }

    /// Fails if the steps from here on could not be replayed, and one is to be kept.
    pub fn check_replayable(&self, sharded: bool, hook_is_stateless: bool) -> Result<()> {
        self.check()?;
        if self.keeps_next || (self.keeps && self.in_backward()) {
            check_replayable(sharded, hook_is_stateless)?;
        }
        Ok(())
    }

    /// Averages the step again as `rank` of another `world`, from the end of backward on. Gives how many buckets hold no
    /// gradients any more: the first ones of the plan, which were launched.
    pub fn replay(&mut self, (rank, world): (Rank, WorldSize)) -> Result<usize> {
        self.check()?;
        if !self.keeps || !self.ended {
            return Err(Error::invalid_argument("the gradients of this step were not kept to its end")
                .with_remedy("call keep_gradients before the step, and finish before replay"));
        }
        (self.rank, self.world, self.cut_off) = (rank, world, None);
        self.phase = Phase::Backward;
        Ok(std::mem::take(&mut self.launched))
    }

    /// Goes on as `rank` of another `world`, between steps.
    pub fn regrouped(&mut self, (rank, world): (Rank, WorldSize)) -> Result<()> {
        self.check()?;
        if self.in_backward() {
            let cause = "the reducer is to go to another group within a step";
            return Err(
                Error::invalid_argument(cause).with_remedy("change the group between steps, or with replay")
            );
        }
        if self.owners.is_some() {
            let error = Error::invalid_argument("sharded averages belong to one group");
            return Err(error.with_remedy("make a new reducer"));
        }
        (self.rank, self.world) = (rank, world);
        Ok(())
    }
}

/// Checks that a step can be averaged again.
fn check_replayable(sharded: bool, hook_is_stateless: bool) -> Result<()> {
    match (sharded, hook_is_stateless) {
        (false, true) => Ok(()),
        (true, _) => Err(Error::invalid_argument("sharded averages cannot be made again")
            .with_remedy("either keep gradients for another group, or shard the averages")),
        (false, false) => Err(Error::invalid_argument(
            "the communication hook keeps something of each step, which cannot be averaged again",
        )
        .with_remedy("use the plain average where gradients are kept for another group")),
    }
}

#[cfg(test)]
mod tests;
