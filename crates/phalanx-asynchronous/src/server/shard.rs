//! The parameters of one server and the operations that change them: a pure state machine. A replica that applies the same
//! operations in the same order has the same state.
//!
//! An operation depends on nothing but the state: on no clock, and on no order of arrival but the log's. A worker
//! numbers its operations, so one that it repeats after a server's death is applied once. Handlers run in any order, so one that
//! comes after a later one is refused, also when the worker has left in between: a step whose time-out has passed must not count
//! in the worker's next life, and a late `Join` must not make a worker of a rank that others would wait for in vain.
//!
//! Each server judges its own workers' clocks. There is no coordinator, and the rule of the consistency model holds for
//! each shard by itself.
//!
//! Under BSP gradients are kept by worker and added in the order of ranks. So the sum has the same bits whoever came
//! first, and the part of a worker that dies in the middle of a step can be left out. A step that it has ended counts: its
//! gradients stay here until the others have ended that step, too.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Staleness;
use super::floats::{Floats, zeros};
use super::layout::Layout;
use crate::buffer::{copy_of, with_room};
use crate::clock::{Clocks, Consistency};
use crate::error::{Error, Result};
use crate::optimizer::UpdateRule;
use crate::rank::Rank;

/// How a gradient is corrected because the parameters have changed since they were pulled. By default it is not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Compensation {
    /// Divides the learning rate by the gradient's staleness, if that is more than 1.
    ///
    /// Source: W. Zhang et al., *Staleness-aware Async-SGD for Distributed Deep Learning*, 2016.
    pub staleness_aware: bool,
    /// Corrects the gradient to first order for the difference between the parameters and those that the worker pulled.
    pub delay: Option<DelayCompensation>,
}

/// DC-ASGD: a stale gradient g becomes g + λ g² (w − w_pulled), element by element. The server keeps what each worker has
/// pulled: a copy of the parameters for each.
///
/// Source: S. Zheng et al., *Asynchronous Stochastic Gradient Descent with Delay Compensation*, 2017.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum DelayCompensation {
    /// The same λ for all.
    Constant(f32),
    /// λ divided by the root of a running mean of g², in which the past has the share `mean`.
    Adaptive {
        /// λ before the division.
        lambda: f32,
        /// The share of the past.
        mean: f32,
    },
}

impl Compensation {
    /// An error if no training goes by it: parameters would become NaN.
    pub(super) fn check(&self) -> Result<()> {
        let is_possible = match self.delay {
            None => true,
            Some(DelayCompensation::Constant(lambda)) => lambda.is_finite(),
            // With more than the whole past a mean of squares would be negative.
            Some(DelayCompensation::Adaptive { lambda, mean }) => {
                lambda.is_finite() && (0.0..=1.0).contains(&mean)
            }
        };
        if is_possible {
            return Ok(());
        }
        Err(Error::invalid_argument(format!("a ParameterServer with {:?}", self.delay))
            .with_remedy("give a lambda that is finite, and a mean from 0 to 1"))
    }
}

/// Added to the mean of g² before its root.
const EPSILON: f32 = 1e-7;

/// An operation on a server, and then on its replica.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Op<'a> {
    /// The worker takes part, and holds the slowest clock until it enters. With its number of this operation.
    Join(Rank, u64),
    Enter {
        worker: Rank,
        number: u64,
        /// It begins after this many steps.
        clock: u64,
        /// It gets the parameters of these keys when it may begin.
        keys: Range<usize>,
    },
    /// With the worker's number of this operation, or none if it is lost.
    Leave(Rank, Option<u64>),
    Step {
        worker: Rank,
        /// The worker's number of this operation. One that comes again is not applied again.
        number: u64,
        push: Option<(Range<usize>, Floats<'a>)>,
        /// The worker has ended a step.
        advance: bool,
        pull: Option<Range<usize>>,
    },
    /// A worker that had to wait gets the parameters of these keys now.
    Pull(Rank, Range<usize>),
}

pub(super) struct Shard {
    layout: Layout,
    rule: Arc<dyn UpdateRule>,
    compensation: Compensation,
    parameters: Vec<f32>,
    states: Vec<Vec<f32>>,
    /// The running mean of g², for [`DelayCompensation::Adaptive`].
    mean_square: Vec<f32>,
    /// Memory for the corrected gradient of a key, for delay compensation.
    corrected: Vec<f32>,
    /// The number of updates of each key.
    versions: Vec<u64>,
    clocks: Clocks,
    workers: BTreeMap<Rank, Worker>,
    /// The last operation of each rank that was carried out. They stay when it leaves.
    last: BTreeMap<Rank, Last>,
    /// What workers have left behind that had ended a step which the others have not ended yet, if gradients are averaged.
    left: BTreeMap<Rank, Left>,
    /// Steps of all workers that have been applied, if gradients are averaged.
    committed: u64,
    record: Staleness,
}

/// What a server knows about a worker.
struct Worker {
    /// The version of each key that it has.
    seen: Vec<u64>,
    /// The parameters that it has, for delay compensation.
    pulled: Vec<f32>,
    /// Its clock when it joined: it takes no part in earlier steps.
    since: u64,
    /// Its gradients of this step, if they are averaged.
    gradients: Gradients,
}

/// By key.
type Gradients = BTreeMap<usize, Vec<f32>>;

/// An operation of a rank, and its outcome.
#[derive(Clone, Copy, Debug, Default)]
struct Last {
    number: u64,
    staleness: u64,
}

/// Ended steps of a worker that has left.
#[derive(Debug, Default)]
struct Left {
    /// How many: it may have come back in the same step, and left again.
    steps: usize,
    gradients: Gradients,
}

impl Shard {
    /// # Errors
    /// If there is no memory for it.
    pub(super) fn new(
        layout: Layout,
        parameters: Vec<f32>,
        rule: Arc<dyn UpdateRule>,
        compensation: Compensation,
        clocks: Clocks,
    ) -> Result<Self> {
        let members: Vec<Rank> = clocks.workers().keys().copied().collect();
        let adaptive = matches!(compensation.delay, Some(DelayCompensation::Adaptive { .. }));
        let longest = if compensation.delay.is_some() { layout.longest() } else { 0 };
        let mut shard = Self {
            states: (0..rule.states()).map(|_| zeros(parameters.len())).collect::<Result<_>>()?,
            mean_square: zeros(if adaptive { parameters.len() } else { 0 })?,
            corrected: with_room(longest)?,
            versions: vec![0; layout.keys()],
            layout,
            rule,
            compensation,
            parameters,
            clocks,
            workers: BTreeMap::new(),
            last: BTreeMap::new(),
            left: BTreeMap::new(),
            committed: 0,
            record: Staleness::default(),
        };
        for worker in members {
            let known = shard.newcomer()?;
            shard.welcome(worker, known);
        }
        Ok(shard)
    }

    /// Carries out `op`. Returns the staleness of its gradients.
    ///
    /// # Errors
    /// If it is not allowed; then nothing has changed.
    pub(super) fn apply(&mut self, op: &Op<'_>) -> Result<u64> {
        match op {
            Op::Join(worker, number) => {
                self.in_order(*worker, *number)?;
                let is_new = self.clocks.lead(*worker).is_none();
                let known = is_new.then(|| self.newcomer()).transpose()?;
                self.note(*worker, *number, 0);
                if let Some(known) = known {
                    self.clocks.join(*worker);
                    self.welcome(*worker, known);
                }
                Ok(0)
            }
            Op::Enter { worker, number, clock, keys } => {
                self.in_order(*worker, *number)?;
                self.layout.place(keys)?;
                let before = self.clocks.workers().get(worker).copied();
                self.clocks.enter(*worker, *clock)?;
                if let Some(known) = self.workers.get_mut(worker)
                    && before != Some(*clock)
                {
                    known.since = *clock;
                }
                self.note(*worker, *number, 0);
                self.commit();
                self.show_if_ready(*worker, true, Some(keys));
                Ok(0)
            }
            Op::Leave(worker, number) => {
                if let Some(number) = number {
                    self.in_order(*worker, *number)?;
                    self.note(*worker, *number, 0);
                }
                self.part_with(*worker);
                self.commit();
                Ok(0)
            }
            Op::Step { worker, number, push, advance, pull } => {
                self.step(*worker, *number, push.as_ref(), *advance, pull.as_ref())
            }
            Op::Pull(worker, keys) => {
                self.layout.place(keys)?;
                self.show(*worker, keys);
                Ok(0)
            }
        }
    }

    /// The parameters of these keys.
    pub(super) fn parameters(&self, keys: &Range<usize>) -> Result<&[f32]> {
        Ok(&self.parameters[self.layout.place(keys)?])
    }

    pub(super) fn clocks(&self) -> &Clocks {
        &self.clocks
    }

    pub(super) fn record(&self) -> &Staleness {
        &self.record
    }

    pub(super) fn keys(&self) -> usize {
        self.layout.keys()
    }

    /// The number of updates of all keys.
    pub(super) fn updates(&self) -> u64 {
        self.versions.iter().sum()
    }

    /// A worker that has all parameters as they are now.
    fn newcomer(&self) -> Result<Worker> {
        let pulled = if self.compensation.delay.is_some() { copy_of(&self.parameters)? } else { Vec::new() };
        Ok(Worker { seen: copy_of(&self.versions)?, pulled, since: 0, gradients: Gradients::new() })
    }

    fn welcome(&mut self, worker: Rank, newcomer: Worker) {
        let since = self.clocks.workers().get(&worker).copied().unwrap_or(0);
        self.workers.insert(worker, Worker { since, ..newcomer });
    }

    /// `worker` takes part no longer. If it has ended a step that the others have not, its gradients stay.
    fn part_with(&mut self, worker: Rank) {
        let clock = self.clocks.workers().get(&worker).copied().unwrap_or(0);
        self.clocks.leave(worker);
        let Some(known) = self.workers.remove(&worker) else { return };
        if self.clocks.consistency() == Consistency::Bsp && clock > self.committed && known.since < clock {
            let left = self.left.entry(worker).or_default();
            left.steps += 1;
            add(&mut left.gradients, known.gradients);
        }
    }

    /// An error if a later operation of `worker` has been carried out.
    fn in_order(&self, worker: Rank, number: u64) -> Result<()> {
        match self.last.get(&worker) {
            Some(last) if number < last.number => Err(Error::protocol(format!(
                "operation {number} of rank {worker} comes after {}",
                last.number
            ))),
            Some(_) | None => Ok(()),
        }
    }

    fn note(&mut self, worker: Rank, number: u64, staleness: u64) {
        self.last.insert(worker, Last { number, staleness });
    }

    fn step(
        &mut self,
        worker: Rank,
        number: u64,
        push: Option<&(Range<usize>, Floats<'_>)>,
        advance: bool,
        pull: Option<&Range<usize>>,
    ) -> Result<u64> {
        if !self.workers.contains_key(&worker) {
            // Any rank may pull.
            pull.map(|keys| self.layout.place(keys)).transpose()?;
            return if push.is_some() || advance { self.clocks.check(worker).map(|()| 0) } else { Ok(0) };
        }
        let last = self.last.get(&worker).copied().unwrap_or_default();
        if number == last.number {
            self.show_if_ready(worker, advance, pull);
            return Ok(last.staleness);
        }
        self.in_order(worker, number)?;
        // All checks come before any change.
        pull.map(|keys| self.layout.place(keys)).transpose()?;
        if push.is_some() || advance {
            self.clocks.check(worker)?;
        }
        let push = match push {
            Some((keys, values)) => {
                let place = self.layout.place(keys)?;
                if place.len() != values.len() {
                    return Err(Error::invalid_argument(format!(
                        "{} gradients were pushed for keys {keys:?}, which have {} elements",
                        values.len(),
                        place.len()
                    )));
                }
                Some((keys, values.read()?, self.first_sums(worker, keys)?))
            }
            None => None,
        };
        let staleness = match push {
            Some((keys, values, sums)) => self.push(worker, keys, &values, sums)?,
            None => 0,
        };
        self.note(worker, number, staleness);
        if advance {
            self.clocks.advance(worker)?;
            self.commit();
        }
        self.show_if_ready(worker, advance, pull);
        Ok(staleness)
    }

    /// The worker gets what it pulls now, unless it has to wait.
    fn show_if_ready(&mut self, worker: Rank, advance: bool, pull: Option<&Range<usize>>) {
        if let Some(keys) = pull
            && (!advance || self.clocks.may_go(worker))
        {
            self.show(worker, keys);
        }
    }

    /// Notes that `worker` has the parameters of these keys as they are now.
    fn show(&mut self, worker: Rank, keys: &Range<usize>) {
        let (Some(known), Ok(place)) = (self.workers.get_mut(&worker), self.layout.place(keys)) else {
            return;
        };
        known.seen[keys.clone()].copy_from_slice(&self.versions[keys.clone()]);
        if !known.pulled.is_empty() {
            known.pulled[place.clone()].copy_from_slice(&self.parameters[place]);
        }
    }

    /// Zeros for the keys of which `worker` has brought no gradient in this step, if gradients are averaged.
    fn first_sums(&self, worker: Rank, keys: &Range<usize>) -> Result<Gradients> {
        let mut sums = Gradients::new();
        if self.clocks.consistency() == Consistency::Bsp
            && let Some(known) = self.workers.get(&worker)
        {
            for key in keys.clone().filter(|key| !known.gradients.contains_key(key)) {
                sums.insert(key, zeros(self.layout.place(&(key..key + 1))?.len())?);
            }
        }
        Ok(sums)
    }

    /// `sums` are [those](Self::first_sums) of these keys.
    fn push(
        &mut self,
        worker: Rank,
        keys: &Range<usize>,
        values: &[f32],
        mut sums: Gradients,
    ) -> Result<u64> {
        let lead = self.clocks.lead(worker).unwrap_or(0);
        let begin = self.layout.place(keys)?.start;
        let mut largest = 0;
        if let Some(known) = self.workers.get_mut(&worker) {
            known.gradients.append(&mut sums);
        }
        for key in keys.clone() {
            let place = self.layout.place(&(key..key + 1))?;
            let gradient = &values[place.start - begin..place.end - begin];
            let Some(known) = self.workers.get_mut(&worker) else { break };
            if self.clocks.consistency() == Consistency::Bsp {
                if let Some(sum) = known.gradients.get_mut(&key) {
                    sum.iter_mut().zip(gradient).for_each(|(sum, gradient)| *sum += gradient);
                }
                continue;
            }
            let staleness = self.versions[key] - known.seen[key];
            largest = largest.max(staleness);
            self.update_stale(worker, key, place, gradient, staleness);
        }
        self.record.add(largest, lead);
        Ok(largest)
    }

    fn update_stale(
        &mut self,
        worker: Rank,
        key: usize,
        place: Range<usize>,
        gradient: &[f32],
        staleness: u64,
    ) {
        let scale = match self.compensation.staleness_aware {
            true => 1.0 / staleness.max(1) as f32,
            false => 1.0,
        };
        let pulled = self.workers.get(&worker).and_then(|known| known.pulled.get(place.clone()));
        let (Some(delay), Some(pulled)) = (self.compensation.delay, pulled) else {
            return self.update(key, place, gradient, scale);
        };
        let now = &self.parameters[place.clone()];
        let drifted = gradient.iter().zip(now.iter().zip(pulled));
        let mut corrected = std::mem::take(&mut self.corrected);
        corrected.clear();
        match delay {
            DelayCompensation::Constant(lambda) => {
                corrected.extend(drifted.map(|(g, (now, pulled))| g + lambda * g * g * (now - pulled)));
            }
            DelayCompensation::Adaptive { lambda, mean } => {
                let squares = &mut self.mean_square[place.clone()];
                corrected.extend(drifted.zip(squares).map(|((g, (now, pulled)), square)| {
                    *square = mean * *square + (1.0 - mean) * g * g;
                    g + lambda / (*square + EPSILON).sqrt() * g * g * (now - pulled)
                }));
            }
        }
        self.update(key, place, &corrected, scale);
        self.corrected = corrected;
    }

    fn update(&mut self, key: usize, place: Range<usize>, gradient: &[f32], scale: f32) {
        self.versions[key] += 1;
        let mut states: Vec<&mut [f32]> =
            self.states.iter_mut().map(|state| &mut state[place.clone()]).collect();
        self.rule.update(self.versions[key], scale, &mut self.parameters[place], gradient, &mut states);
    }

    /// Applies the mean gradients of a step that all workers have ended. Keys without gradients are unchanged.
    fn commit(&mut self) {
        if self.clocks.consistency() != Consistency::Bsp {
            return;
        }
        // Nobody is left who could end the step of those that have left.
        let is_deserted = self.clocks.workers().is_empty() && !self.left.is_empty();
        if self.clocks.slowest() <= self.committed && !is_deserted {
            return;
        }
        self.committed = self.clocks.slowest();
        let mut members = self.workers.values().filter(|worker| worker.since < self.committed).count();
        let mut all = BTreeMap::<Rank, Gradients>::new();
        for (worker, left) in std::mem::take(&mut self.left) {
            members += left.steps;
            all.insert(worker, left.gradients);
        }
        for (worker, known) in &mut self.workers {
            add(all.entry(*worker).or_default(), std::mem::take(&mut known.gradients));
        }
        let share = 1.0 / members.max(1) as f32;
        for key in 0..self.layout.keys() {
            // In the order of ranks, so that the result does not depend on which was first.
            let mut gradients = all.values_mut().filter_map(|gradients| gradients.remove(&key));
            let Some(mut mean) = gradients.next() else { continue };
            for gradient in gradients {
                mean.iter_mut().zip(gradient).for_each(|(sum, gradient)| *sum += gradient);
            }
            mean.iter_mut().for_each(|sum| *sum *= share);
            if let Ok(place) = self.layout.place(&(key..key + 1)) {
                self.update(key, place, &mean, 1.0);
            }
        }
    }
}

/// Adds `more` to `sums`, key by key.
fn add(sums: &mut Gradients, more: Gradients) {
    for (key, gradient) in more {
        match sums.entry(key) {
            Entry::Vacant(place) => {
                place.insert(gradient);
            }
            Entry::Occupied(mut sum) => {
                sum.get_mut().iter_mut().zip(gradient).for_each(|(sum, gradient)| *sum += gradient);
            }
        }
    }
}

#[cfg(test)]
mod tests;
