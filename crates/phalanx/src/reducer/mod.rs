//! The gradient reducer: averages gradients over all ranks while backward is still computing the others.
//!
//! Gradients are copied into a few large buckets. A bucket whose gradients are all there is averaged at once, in the
//! background. Buckets are launched in the same order on every rank, whatever the order of the gradients, because a
//! group's ranks must call the same collectives in the same order.
//!
//! The reducer knows no tensor framework and sees of the group only a [`Communicator`]. An adapter gives it bytes:
//!
//! ```
//! # fn step(group: std::sync::Arc<dyn phalanx::Communicator>) -> phalanx::Result<()> {
//! use phalanx::DType;
//! use phalanx::reducer::{ParameterSpec, Reducer, ReducerOptions};
//!
//! let parameters = vec![
//!     ParameterSpec::new("weight", [4, 2], DType::F32),
//!     ParameterSpec::new("bias", [4], DType::F32),
//! ];
//! let mut reducer = Reducer::new(group, parameters, ReducerOptions::default())?;
//!
//! reducer.start()?; // backward begins
//! reducer.ready(1, &[0; 16])?; // the bias's gradient
//! reducer.ready(0, &[0; 32])?; // the weight's: the bucket is full, its averaging begins
//! reducer.finish()?; // backward is over: wait for what is still under way
//! let averaged: Option<&[u8]> = reducer.gradient(0)?;
//! # Ok(())
//! # }
//! ```

mod bucket;

pub mod hooks;
mod options;
mod plan;
mod replay;
mod sharding;
mod state;
mod sync;
mod unused;
mod verify;

#[cfg(test)]
mod fake;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

pub use options::{ParameterSpec, ReducerOptions};
pub use sync::{StateTensor, broadcast_state, broadcast_state_from};
pub use verify::verify_state;

use self::bucket::Bucket;
use self::hooks::{AllReduce, CommHook, Metered};
use self::plan::{Limits, Plan};
use self::replay::Replay;
use self::state::ReducerState;
use self::verify::Contract;
use crate::buffer::{Buffer, BufferPart};
use crate::caller::Caller;
use crate::collective::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group::{Communicator, Work};
use crate::rank::Rank;
use crate::trace::{Lane, Trace};

/// Averages the gradients of one model over the ranks of a group. See the [module](self).
///
/// A failure is final: the group is aborted, so that every rank gets the cause, and every later call returns it. Only if it
/// [keeps gradients](Self::keep_gradients) can a reducer go on in another group.
pub struct Reducer {
    group: Arc<dyn Communicator>,
    trace: Trace,
    parameters: Vec<ParameterSpec>,
    limits: Limits,
    /// The owner of each parameter's average, if averages are sharded.
    owners: Option<Vec<Rank>>,
    unused_parameters: UnusedParameters,
    hook: Box<dyn CommHook>,
    /// What the hook's communication goes through.
    meter: Metered,
    plan: Plan,
    /// The order of parameters that the plan was made from.
    order: Vec<usize>,
    buckets: Vec<Bucket>,
    state: ReducerState,
    phase: Phase,
    rebuild: Rebuild,
    /// The order in which gradients came in the last step.
    arrival: Vec<usize>,
    /// For each parameter: did any rank have a gradient in the last step?
    used: Vec<bool>,
    /// What this rank had no gradient for in the last step.
    unused: Vec<usize>,
    warnings: unused::Warnings,
    /// If a step can be averaged again.
    replay: Option<Replay>,
    /// Is the buckets' memory another group's?
    stale: bool,
    failure: Option<Error>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No backward pass has been averaged yet.
    New,
    Backward {
        since: Instant,
    },
    Averaged,
    /// The buckets hold parameters.
    Gathered,
}

/// How parameters are treated that get no gradient in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
enum UnusedParameters {
    /// They are an error.
    Refused,
    /// `find_unused_parameters`: their gradients count as zero, and the ranks exchange in every step which these are.
    Find,
    /// `static_graph`, before the end of the first step, which is as with `Find`.
    StaticFirstStep,
    /// `static_graph`, after that: these parameters, by index, are unused on this rank in every step.
    Static(Vec<usize>),
}

/// The buckets are built anew once, when the order of the gradients is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Rebuild {
    AfterFirst,
    AtNextStart,
    Done,
}

/// What a rank that has taken part in every step knows; see [`Reducer::adopt`].
#[derive(Serialize, Deserialize)]
struct Progress {
    order: Vec<usize>,
    arrival: Vec<usize>,
    rebuild: Rebuild,
    used: Vec<bool>,
    learned: bool,
}

impl Reducer {
    /// Plans the buckets for `parameters`, in the order of the model, and takes memory for them.
    ///
    /// All ranks call it together. Names, shapes and types are compared with rank 0's, as are the options and the plan.
    ///
    /// # Errors
    /// On every rank, if the ranks' models or options differ (the error names the first difference, both sides and
    /// both ranks), if there is no parameter, or if a parameter's gradient is no float.
    pub fn new(
        group: Arc<dyn Communicator>,
        parameters: Vec<ParameterSpec>,
        options: ReducerOptions,
    ) -> Result<Self> {
        let usable = options.limits().and_then(|limits| check(&parameters).map(|()| limits));
        let order: Vec<usize> = (0..parameters.len()).rev().collect();
        let plan = usable.clone().map(|limits| Plan::new(&parameters, &order, limits));
        let contract = Contract {
            options: options.describe(),
            plan_hash: plan.as_ref().map_or(0, Plan::hash),
            parameters,
        };
        // A rank whose own model is unusable still takes part, so that the others learn of it.
        verify::verify(&*group.in_call(Caller::DdpNew), &contract)?;
        let (limits, plan) = (usable?, plan?);
        let Contract { parameters, .. } = contract;
        let unused_parameters = match (options.is_static_graph(), options.finds_unused_parameters()) {
            (true, _) => UnusedParameters::StaticFirstStep,
            (false, true) => UnusedParameters::Find,
            (false, false) => UnusedParameters::Refused,
        };
        let alone = group.world_size().get() == 1;
        Ok(Self {
            trace: group.trace(),
            buckets: buckets(&plan, &parameters),
            state: ReducerState::new(&plan),
            used: vec![true; parameters.len()],
            unused: Vec::new(),
            warnings: unused::Warnings::new(parameters.len()),
            rebuild: if alone || unused_parameters == UnusedParameters::Find {
                Rebuild::Done
            } else {
                Rebuild::AfterFirst
            },
            hook: Box::new(AllReduce),
            meter: Metered::new(group.clone()),
            unused_parameters,
            phase: Phase::New,
            replay: None,
            stale: false,
            failure: None,
            group,
            parameters,
            limits,
            owners: None,
            plan,
            order,
            arrival: Vec::new(),
        })
    }

    /// A backward pass begins whose gradients are to be averaged. All ranks call it together.
    ///
    /// The averaged gradients of the step before are gone.
    pub fn start(&mut self) -> Result<()> {
        self.check_failure()?;
        if matches!(self.phase, Phase::Backward { .. }) {
            return Err(self.fail(Error::invalid_argument(format!(
                "rank {} began a backward pass before the last one was finished",
                self.group.rank()
            ))));
        }
        if self.rebuild == Rebuild::AtNextStart
            && let Err(error) = self.rebuild()
        {
            return Err(self.fail(error));
        }
        self.begin_step();
        self.state.reset(&self.plan);
        self.phase = Phase::Backward { since: Instant::now() };
        if let UnusedParameters::Static(unused) = &self.unused_parameters {
            let unused = unused.clone();
            self.zero_unused(&unused).map_err(|error| self.fail(error))?;
        }
        Ok(())
    }

    /// From the next step on `hook` averages the buckets. All ranks call it together.
    ///
    /// # Errors
    /// On every rank, if the ranks' hooks or their settings differ.
    pub fn register_hook(&mut self, hook: Box<dyn CommHook>) -> Result<()> {
        self.check_failure()?;
        if self.replay.is_some() {
            self.check_repeatable(false, hook.is_stateless())?;
        }
        let description = vec![("communication hook".to_owned(), hook.describe())];
        let contract = Contract { parameters: Vec::new(), options: description, plan_hash: 0 };
        verify::verify(&*self.group.in_call(Caller::DdpRegisterCommHook), &contract)
            .map_err(|error| self.fail(error))?;
        self.hook = hook;
        Ok(())
    }

    /// The bytes of all buffers that gradients, and gathered parameters, have travelled in since the beginning, once for
    /// each all_reduce; a ring moves nearly twice as many in each direction. Operations that move half as many, such as a
    /// reduce_scatter, count half.
    pub fn communicated_bytes(&self) -> u64 {
        self.meter.bytes()
    }

    /// Takes the finished gradient of the parameter at `index`; if it was the last that a bucket waited for, the
    /// averaging of that bucket begins.
    ///
    /// # Errors
    /// If `index` or the gradient's length is wrong, or the parameter had a gradient in this backward pass already.
    pub fn ready(&mut self, index: usize, gradient: &[u8]) -> Result<()> {
        self.begin_ready(index)?;
        let parameter = &self.parameters[index];
        if gradient.len() != parameter.bytes() {
            let cause = format!(
                "the gradient of parameter {index}, {parameter}, came with {} B, not {} B",
                gradient.len(),
                parameter.bytes()
            );
            return Err(self.fail(Error::invalid_argument(cause)));
        }
        self.fill(index, |memory| {
            memory.copy_from_slice(gradient);
            Ok(())
        })
    }

    /// Like [`ready`](Self::ready), for gradients that do not lie in one piece: `write` puts the gradient into the
    /// memory that it is given, which holds the values of an earlier step.
    pub fn ready_with(&mut self, index: usize, write: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        self.begin_ready(index)?;
        self.fill(index, write)
    }

    /// The backward pass is over: waits until all buckets are averaged.
    ///
    /// # Errors
    /// On every rank, if a parameter got no gradient on any of them; the error names it. With
    /// [`find_unused_parameters`](ReducerOptions::find_unused_parameters) such a parameter counts as zero, and so it does
    /// with [`static_graph`](ReducerOptions::static_graph) if it got none in the first step. On every rank also if an
    /// averaging failed; then, if gradients are [kept](Self::keep_gradients), they can be averaged again in
    /// [another group](Self::finish_in).
    pub fn finish(&mut self) -> Result<()> {
        self.check_failure()?;
        let Phase::Backward { since } = self.phase else {
            return Err(Error::invalid_argument("no backward pass was begun that could be finished"));
        };
        let backward_end = Instant::now();
        if let Err(error) = self.close().and_then(|used| self.wait(used)) {
            return match self.suspend(error.clone()) {
                Ok(()) => Err(error),
                Err(error) => Err(self.fail(error)),
            };
        }
        self.phase = Phase::Averaged;
        self.arrival.clear();
        self.arrival.extend_from_slice(self.state.order());
        if self.rebuild == Rebuild::AfterFirst {
            self.rebuild = Rebuild::AtNextStart;
        }
        for (index, (bucket, plan)) in self.buckets.iter_mut().zip(&self.plan.buckets).enumerate() {
            bucket.note(&self.trace, index, plan);
        }
        self.trace.complete(Lane::Backward, "backward", since, backward_end, &[]);
        self.trace.complete(Lane::Backward, "wait for gradients", backward_end, Instant::now(), &[]);
        Ok(())
    }

    /// The averaged gradient of the parameter at `index`, from [`finish`](Self::finish) to the next
    /// [`start`](Self::start); `None` if no rank had a gradient for it, or it is another rank's.
    pub fn gradient(&self, index: usize) -> Result<Option<&[u8]>> {
        self.check_failure()?;
        if self.phase != Phase::Averaged {
            return Err(Error::invalid_argument("there is no averaged gradient: call `finish` first"));
        }
        let Some(place) = self.plan.places.get(index) else { return Err(self.no_such_parameter(index)) };
        if !self.used[index] || !self.owns(index) {
            return Ok(None);
        }
        let range = place.bytes(self.plan.buckets[place.bucket].dtype);
        Ok(self.buckets[place.bucket].bytes().and_then(|bytes| bytes.get(range)))
    }

    /// Takes the averaged gradients out of the buckets, without a copy: for each parameter what
    /// [`gradient`](Self::gradient) gives, in the bucket's own memory, for whoever gets it to write to and to free. The
    /// next step takes new memory when it needs it.
    pub fn take_gradients(&mut self) -> Result<Vec<Option<BufferPart>>> {
        let present = (0..self.parameters.len()).map(|index| Ok(self.gradient(index)?.is_some()));
        let present = present.collect::<Result<Vec<_>>>()?;
        self.phase = Phase::New;
        let mut gradients: Vec<Option<BufferPart>> = present.iter().map(|_| None).collect();
        for (bucket, plan) in self.buckets.iter_mut().zip(&self.plan.buckets) {
            let Some(memory) = bucket.take() else { continue };
            let members = || plan.parameters.iter().copied().filter(|&member| present[member]);
            let parts = memory.split(members().map(|member| self.plan.places[member].bytes(plan.dtype)));
            for (member, part) in members().zip(parts) {
                gradients[member] = Some(part);
            }
        }
        Ok(gradients)
    }

    /// Gives the buckets' memory back, with what is in it: the next step takes new memory when it needs it.
    pub fn release(&mut self) {
        self.buckets.iter_mut().for_each(|bucket| drop(bucket.take()));
        if !matches!(self.phase, Phase::Backward { .. }) {
            self.phase = Phase::New;
        }
    }

    /// The parameters, in the order of the model.
    pub fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    /// The bytes of each bucket, in the order in which they are launched.
    pub fn bucket_bytes(&self) -> Vec<usize> {
        self.plan.buckets.iter().map(plan::BucketPlan::bytes).collect()
    }

    fn begin_ready(&mut self, index: usize) -> Result<()> {
        self.check_failure()?;
        if !matches!(self.phase, Phase::Backward { .. }) {
            return Err(Error::invalid_argument("a gradient came before `start` or after `finish`"));
        }
        let Some(parameter) = self.parameters.get(index) else {
            let error = self.no_such_parameter(index);
            return Err(self.fail(error));
        };
        if let UnusedParameters::Static(unused) = &self.unused_parameters
            && unused.contains(&index)
        {
            let cause = format!(
                "on rank {}, parameter {index}, {parameter}, got a gradient, and got none in the first step",
                self.group.rank()
            );
            let remedy =
                "static_graph promises the same graph in every step; set find_unused_parameters instead";
            return Err(self.fail(Error::invalid_argument(cause).with_remedy(remedy)));
        }
        if self.state.has_seen(index) {
            let cause = format!(
                "on rank {}, parameter {index}, {parameter}, got a second gradient in one backward pass",
                self.group.rank()
            );
            let remedy =
                "give the reducer each parameter once; accumulate without synchronisation, then start";
            return Err(self.fail(Error::invalid_argument(cause).with_remedy(remedy)));
        }
        Ok(())
    }

    fn fill(&mut self, index: usize, write: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        let place = self.plan.places[index];
        let range = place.bytes(self.plan.buckets[place.bucket].dtype);
        let filled =
            self.buckets[place.bucket].bytes_mut(&*self.group).and_then(|bytes| write(&mut bytes[range]));
        filled.and_then(|()| self.advance(index)).map_err(|error| self.fail(error))
    }

    /// Tells the state that a gradient is in its place, and launches what follows.
    fn advance(&mut self, index: usize) -> Result<()> {
        let Some(advance) = self.state.ready(&self.plan, index) else { return Ok(()) };
        if let Some(bucket) = advance.filled {
            self.buckets[bucket].mark_ready(&self.trace);
        }
        if self.group.world_size().get() == 1 {
            return Ok(()); // The average over one rank is what it has.
        }
        if self.trace.is_enabled() {
            self.buckets[..advance.launch.start].iter_mut().for_each(Bucket::observe);
        }
        for bucket in advance.launch {
            self.launch(bucket)?;
        }
        Ok(())
    }

    /// Handles the parameters that got no gradient. Returns the exchange of used parameters, if there is one.
    fn close(&mut self) -> Result<Option<Work>> {
        // In a replay for another group all gradients are there.
        let replayed = self.replay.as_ref().is_some_and(|replay| replay.closed);
        let unused = if replayed { self.unused.clone() } else { self.state.unused() };
        if matches!(self.unused_parameters, UnusedParameters::Refused | UnusedParameters::Static(_)) {
            if !unused.is_empty() {
                return Err(unused::error(self.group.rank(), &self.parameters, &unused));
            }
            return self.launch_suspended().map(|()| None);
        }
        let mut used = Buffer::from_slice(&vec![1u8; self.parameters.len()]);
        for &index in &unused {
            used.as_bytes_mut()[index] = 0;
        }
        if !replayed {
            self.zero_unused(&unused)?;
        }
        self.unused = unused;
        if let Some(replay) = &mut self.replay {
            replay.closed = true;
        }
        self.launch_suspended()?;
        if self.group.world_size().get() == 1 {
            return Ok(Some(Work::ready(Ok(used))));
        }
        self.group.in_call(Caller::DdpBackward).all_reduce_async(used, ReduceOp::Max).map(Some)
    }

    /// Sets the gradients of the parameters `unused` to zero.
    fn zero_unused(&mut self, unused: &[usize]) -> Result<()> {
        for &index in unused {
            self.fill(index, |memory| {
                memory.fill(0);
                Ok(())
            })?;
        }
        Ok(())
    }

    fn wait(&mut self, used: Option<Work>) -> Result<()> {
        // Hooks with several operations: the buckets take turns, so that those of one overlap with those of the next.
        let meter = self.meter.in_call(Caller::DdpBackward);
        let mut waiting: Vec<usize> = (0..self.buckets.len()).collect();
        while !waiting.is_empty() {
            let mut left = Vec::new();
            for bucket in waiting {
                if !self.buckets[bucket].advance(&*meter, &self.plan.buckets[bucket])? {
                    left.push(bucket);
                }
            }
            waiting = left;
        }
        if let Some(used) = used {
            let used = used.wait()?;
            self.used = used.as_slice::<u8>()?.iter().map(|&used| used != 0).collect();
            self.warnings.step(self.group.rank(), &self.parameters, &self.unused, &self.used);
            if self.unused_parameters == UnusedParameters::StaticFirstStep {
                self.unused_parameters = UnusedParameters::Static(std::mem::take(&mut self.unused));
                if let Some(replay) = &mut self.replay {
                    replay.learned = true;
                }
            }
        }
        Ok(())
    }

    /// Takes over how far rank `root` has come, after steps that this rank did not take part in: the buckets and what
    /// was learned of unused parameters. All ranks call it together, between steps.
    ///
    /// # Errors
    /// If the exchange fails, or `root` sends no order of these parameters.
    pub fn adopt(&mut self, root: Rank) -> Result<()> {
        self.check_failure()?;
        self.take_over(root).map_err(|error| self.fail(error))
    }

    fn take_over(&mut self, root: Rank) -> Result<()> {
        let mine = Progress {
            order: self.order.clone(),
            arrival: self.arrival.clone(),
            rebuild: self.rebuild,
            used: self.used.clone(),
            learned: matches!(self.unused_parameters, UnusedParameters::Static(_)),
        };
        let group = self.group.in_call(Caller::Join);
        let Progress { order, arrival, rebuild, used, learned } = verify::share(&*group, root, &mine)?;
        let count = self.parameters.len();
        if used.len() != count || !(arrival.is_empty() || is_permutation(&arrival, count)) {
            return Err(Error::protocol(format!("rank {root} sent the progress of another model")));
        }
        (self.arrival, self.rebuild, self.used) = (arrival, rebuild, used);
        if learned && self.unused_parameters == UnusedParameters::StaticFirstStep {
            // This rank has seen no step: it must use the parameters that the others use, or report an error.
            let unused = (0..count).filter(|&index| !self.used[index]).collect();
            self.unused_parameters = UnusedParameters::Static(unused);
        }
        self.hook.adopt(&*group, root)?;
        self.lay_out(order, &*group)
    }

    /// Builds the buckets anew, in the order in which rank 0's gradients came.
    fn rebuild(&mut self) -> Result<()> {
        self.rebuild = Rebuild::Done;
        let group = self.group.in_call(Caller::DdpBackward);
        let order = verify::share(&*group, Rank::MAIN, &self.arrival)?;
        self.lay_out(order, &*group)
    }

    fn lay_out(&mut self, order: Vec<usize>, group: &dyn Communicator) -> Result<()> {
        if !is_permutation(&order, self.parameters.len()) {
            return Err(Error::protocol(
                "a rank sent an order of gradients that is no order of the parameters",
            ));
        }
        let mut plan = Plan::new(&self.parameters, &order, self.limits);
        if let Some(owners) = &self.owners {
            plan = plan.sharded(&self.parameters, owners, self.group.world_size());
        }
        verify::verify_hash(group, "bucket plans", plan.hash())?;
        self.order = order;
        if plan != self.plan {
            tracing::debug!(buckets = plan.buckets.len(), "buckets rebuilt in the order of the gradients");
            self.buckets = buckets(&plan, &self.parameters);
            self.plan = plan;
        }
        Ok(())
    }

    fn no_such_parameter(&self, index: usize) -> Error {
        Error::invalid_argument(format!("there is no parameter {index} among {}", self.parameters.len()))
    }

    fn check_failure(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Keeps `error` as the reducer's end, and ends the group with it: the other ranks must not wait for this one.
    fn fail(&mut self, error: Error) -> Error {
        self.failure = Some(error.clone());
        self.group.abort(error.clone());
        error
    }
}

fn check(parameters: &[ParameterSpec]) -> Result<()> {
    if parameters.is_empty() {
        return Err(Error::invalid_argument("no parameter needs a gradient: there is nothing to average")
            .with_remedy(
                "is the whole model frozen? Train it without data parallelism, or unfreeze a part",
            ));
    }
    let mut total = 0usize;
    for parameter in parameters {
        if !matches!(parameter.dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16) {
            return Err(Error::invalid_argument(format!(
                "the gradient of parameter {parameter} is no float"
            )));
        }
        total = parameter
            .checked_bytes()
            .and_then(|bytes| total.checked_add(bytes))
            .filter(|&total| isize::try_from(total).is_ok())
            .ok_or_else(|| {
                Error::invalid_argument(format!("parameter {parameter} is too large for this machine"))
            })?;
    }
    Ok(())
}

fn buckets(plan: &Plan, parameters: &[ParameterSpec]) -> Vec<Bucket> {
    (0..plan.buckets.len()).map(|index| Bucket::new(index, plan, parameters)).collect()
}

fn is_permutation(order: &[usize], count: usize) -> bool {
    let mut seen = vec![false; count];
    order.len() == count
        && order.iter().all(|&index| seen.get_mut(index).is_some_and(|seen| !std::mem::replace(seen, true)))
}
