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

mod averages;
mod bucket;
mod elsewhere;
mod hooked;
pub mod hooks;
mod identical;
mod joined;
mod optimizer_steps;
mod registered_hook;
mod replay;
mod sharding;
mod step_times;
mod sync;
mod verify;
mod weights;

#[cfg(test)]
mod fake;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use hooked::{HookedReducer, panicked};
pub use identical::states_identical;
pub use optimizer_steps::{LoadedState, LoadedStates, OptimizerSteps};
pub use phalanx_proto::reducer::{ParameterSpec, ReducerOptions, StepWeight, check_weight, check_weight_sum};
pub use step_times::StepTime;
pub use sync::{StateTensor, broadcast_state};
pub use verify::{broadcast_bytes, verify_description, verify_state, verify_state_on};

use self::bucket::Bucket;
use self::hooks::{AllReduce, CommHook, Metered};
use self::plan::BucketPlan;
use self::state::ReducerState;
use self::step_times::StepTimer;
use self::verify::Contract;
use self::weights::Weights;
use crate::buffer::Buffer;
use crate::caller::Caller;
use crate::collective::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group::{Binding, Communicator, Work};
use crate::notice::warn;
use crate::rank::Rank;
use crate::trace::{Trace, Track};
use phalanx_proto::reducer::{plan, state, unused};

/// Averages the gradients of one model over the ranks of a group. See the [module](self).
///
/// A failure is final: the group is aborted, so that every rank gets the cause, and every later call returns it. Only if it
/// [keeps the gradients](Self::keep_gradients) of the step can a reducer continue in another group.
pub struct Reducer {
    group: Arc<dyn Communicator>,
    /// The group in which all ranks have the same replica.
    binding: Binding,
    /// The group as the hook sees it: its bytes are counted, and errors name the backward pass.
    meters: Meters,
    trace: Trace,
    hook: Box<dyn CommHook>,
    /// Whether it was [registered](Self::register_hook), and does something else than the one with which each reducer begins.
    is_hook_registered: bool,
    /// How far the step has come, and what comes next.
    state: ReducerState,
    /// The memory of the plan's buckets.
    buckets: Vec<Bucket>,
    /// Whether gradients lie [elsewhere](Self::elsewhere), and buckets have no memory for them.
    elsewhere: bool,
    weights: Weights,
    /// The group's [uneven joins](Communicator::uneven_joins) after which all ranks have the same replica.
    joins: u64,
    /// Whether that memory belongs to an earlier group.
    stale: bool,
    /// This rank's gradients in each bucket that was launched in this step, if they are [kept](Self::keep_gradients): averages
    /// take their place in the bucket.
    kept: Vec<Vec<u8>>,
    warnings: unused::Warnings,
    /// When backward began.
    began: Instant,
    timer: StepTimer,
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
        Self::averaged_by(Box::new(AllReduce), false, group, parameters, options)
    }

    fn averaged_by(
        hook: Box<dyn CommHook>,
        elsewhere: bool,
        group: Arc<dyn Communicator>,
        parameters: Vec<ParameterSpec>,
        options: ReducerOptions,
    ) -> Result<Self> {
        let place = (group.rank(), group.world_size());
        let usable = options.limits(parameters.len()).and_then(|limits| check(&parameters).map(|()| limits));
        let state = usable.map(|limits| ReducerState::new(place, parameters.clone(), &options, limits));
        let plan_hash = state.as_ref().map_or(0, |state| state.plan().hash());
        let mut described = options.describe();
        described.push(("averaged by".to_owned(), hook.describe()));
        let contract = Contract { options: described, device: None, plan_hash, parameters };
        // A rank whose own model is unusable still takes part, so that the others learn of it.
        verify::verify(&*group.in_call(Caller::DdpNew), &contract)?;
        let state = state?;
        Ok(Self {
            meters: Meters::new(&*group),
            trace: group.trace(),
            hook,
            is_hook_registered: false,
            buckets: buckets(&state, elsewhere),
            elsewhere,
            weights: Weights::default(),
            joins: group.uneven_joins(),
            stale: false,
            kept: Vec::new(),
            warnings: unused::Warnings::new(state.parameters().len()),
            began: Instant::now(),
            timer: StepTimer::default(),
            binding: Binding::of(&*group),
            group,
            state,
        })
    }

    /// A backward pass begins whose gradients are to be averaged. All ranks call it together.
    ///
    /// The averaged gradients of the step before are gone.
    ///
    /// # Errors
    /// The failure that has ended this reducer, if one has. If the exchange in which ranks agree on a new order of buckets fails, in the second step: that
    /// ends it.
    pub fn start(&mut self) -> Result<()> {
        self.start_with(|_, memory| zero(memory))
    }

    /// Like [`start`](Self::start), for programs that accumulate gradients over several averages: with
    /// [`static_graph`](ReducerOptions::static_graph), from the second step on, `unused` writes what this rank has for a
    /// parameter that backward does not use here, where `start` writes zeros. It gets the parameter's index, and memory that
    /// may hold the values of an earlier step.
    ///
    /// # Errors
    /// As [`start`](Self::start), and what `unused` returns, which ends the reducer.
    pub fn start_with(&mut self, mut unused: impl FnMut(usize, &mut [u8]) -> Result<()>) -> Result<()> {
        self.start_step(None, &mut unused)
    }

    /// A step in which this rank counts by `weight`, or as all others.
    fn start_step(
        &mut self,
        weight: Option<f64>,
        unused: &mut dyn FnMut(usize, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        self.attempt(|reducer| {
            if let Some(weight) = weight {
                reducer.check_weighted(weight)?;
            }
            reducer.compare_joined()?;
            if let Some(arrival) = reducer.state.rebuild()? {
                let group = reducer.group.in_call(Caller::DdpBackward);
                let order = verify::share(&*group, Rank::MAIN, arrival)?;
                reducer.lay_out(order, &*group)?;
            }
            reducer.state.begin(weight);
            if std::mem::take(&mut reducer.stale) {
                reducer.buckets = buckets(&reducer.state, reducer.elsewhere);
            }
            if !reducer.elsewhere
                && let Some(carrier) = reducer.buckets.get_mut(weights::carrier(reducer.state.plan()))
            {
                carrier.carry(weight);
            }
            reducer.weights.steps += 1;
            reducer.send_weight().or_else(|error| reducer.cut_off(error))?;
            reducer.began = Instant::now();
            reducer.fill_unused(unused)
        })
    }

    /// Whether a parameter that gets no gradient in this step counts as unused, and not as an error. True with
    /// [`find_unused_parameters`](ReducerOptions::find_unused_parameters), and in the first step of a
    /// [`static_graph`](ReducerOptions::static_graph).
    pub fn accepts_unused(&self) -> bool {
        self.state.accepts_unused()
    }

    /// The bytes of all buffers that gradients, and gathered parameters, have travelled in since the beginning, once for
    /// each all_reduce; a ring moves nearly twice as many in each direction. Operations that move half as many, such as a
    /// reduce_scatter, count half.
    pub fn communicated_bytes(&self) -> u64 {
        self.meters.plain.bytes()
    }

    /// Takes the finished gradient of the parameter at `index`; if it was the last that a bucket waited for, the
    /// averaging of that bucket begins.
    ///
    /// # Errors
    /// If `index` or the gradient's length is wrong, or the parameter had a gradient in this backward pass already.
    pub fn ready(&mut self, index: usize, gradient: &[u8]) -> Result<()> {
        self.check_here("ready")?;
        self.accept(index, Some(gradient.len()), |memory| {
            memory.copy_from_slice(gradient);
            Ok(())
        })
    }

    /// Like [`ready`](Self::ready), for gradients that do not lie in one piece: `write` puts the gradient into the
    /// memory that it is given, which holds the values of an earlier step.
    ///
    /// # Errors
    /// As [`ready`](Self::ready), and what `write` returns. Each ends the reducer.
    pub fn ready_with(&mut self, index: usize, write: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        self.check_here("ready_with")?;
        self.accept(index, None, write)
    }

    /// The backward pass is over: waits until all buckets are averaged.
    ///
    /// # Errors
    /// On every rank, if a parameter got no gradient on any of them; the error names it. With
    /// [`find_unused_parameters`](ReducerOptions::find_unused_parameters) such a parameter counts as zero, and so it does
    /// with [`static_graph`](ReducerOptions::static_graph) if it got none in the first step. On every rank also if an
    /// averaging failed; then, if gradients are [kept](Self::keep_gradients), they can be averaged [again](Self::replay) in
    /// another group. On every rank, if optimizers have [differed](Self::stepped) in earlier steps. If averages are [sharded](Self::shard), and the hook has
    /// not averaged over all ranks.
    pub fn finish(&mut self) -> Result<()> {
        self.state.check_backward("no backward pass was begun that could be finished")?;
        let backward_end = Instant::now();
        if let Err(error) = self.close().and_then(|used| self.wait(used)) {
            return self.cut_off(error.clone()).and(Err(error));
        }
        self.state.finished();
        for (index, bucket) in self.buckets.iter_mut().enumerate() {
            bucket.note(&self.trace, index);
        }
        self.trace.complete(Track::Backward, "backward", self.began, backward_end, &[]);
        let end = Instant::now();
        self.trace.complete(Track::Backward, "wait for gradients", backward_end, end, &[]);
        let compared = self.timer.step(&*self.group, backward_end, end);
        compared.and_then(|()| self.check_shards()).map_err(|error| self.abort(error))?;
        self.divide_by_weights().inspect_err(|_| self.state.emptied())
    }

    /// How long a step takes on each rank, by rank: the medians of so many steps as the ranks last told each other, every 32
    /// steps. Empty until they have, and in a world of one. A rank that took no part has zeros.
    ///
    /// Empty also after a [replay](Self::replay) or a [change of the group](Self::regrouped), until [`adopt`](Self::adopt) or a
    /// new reducer: ranks may then be a step apart, and exchange no times.
    ///
    /// Rank 0 warns of a rank whose own time is 1.5 times the median of all, if others wait for it a tenth of the step longer
    /// than it does, at most every ten minutes.
    pub fn step_times(&self) -> &[StepTime] {
        self.timer.times()
    }

    /// An optimizer has changed the model by the averages of this step. `rates` has a learning rate for each group of parameters, and `settings` what else
    /// ranks are to compare. They compare these after the first step of a reducer that is new or has [adopted](Self::adopt) another's state, and then
    /// every 32 steps, for all of these steps, together with the [step times](Self::step_times). Nothing waits for that. If they differ by more than rounding, it is an error of a later
    /// [`finish`](Self::finish), or of [`adopt`](Self::adopt), which ends the reducer on every rank. Steps whose averages are not over all ranks
    /// ([`CommHook::averages_over_all`]) are each rank's own, and are not compared.
    pub fn stepped(&mut self, rates: impl IntoIterator<Item = f64>, settings: impl IntoIterator<Item = f64>) {
        if self.hook.averages_over_all() {
            self.timer.optimizer().step(rates, settings);
        }
    }

    /// The adapter has clipped the averages of this step: it has multiplied them by this `factor`, which `clip_factor` gives. The ranks
    /// compare the factors together with [steps](Self::stepped), because ranks with different limits have different factors.
    pub fn clipped(&mut self, factor: f64) {
        if self.hook.averages_over_all() {
            self.timer.optimizer().clipped(factor);
        }
    }

    /// Whether the averages of this step are [over all ranks](CommHook::averages_over_all).
    pub fn averages_over_all(&self) -> bool {
        self.hook.averages_over_all()
    }

    /// Some of the time between two steps went by in a collective outside of the reducer, such as a broadcast of buffers: it
    /// counts as [waiting](StepTime::wait), and not as this rank's own time.
    pub fn waited(&mut self, time: Duration) {
        self.timer.waited(time);
    }

    /// The trace of its group, for what an adapter does with gradients before they are ready.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    /// The parameters, in the order of the model.
    pub fn parameters(&self) -> &[ParameterSpec] {
        self.state.parameters()
    }

    /// The bytes of each bucket, in the order in which they are launched.
    pub fn bucket_bytes(&self) -> Vec<usize> {
        self.state.plan().buckets.iter().map(BucketPlan::bytes).collect()
    }

    /// The failure that has ended this reducer, if one has.
    ///
    /// # Errors
    /// That failure.
    pub fn check(&self) -> Result<()> {
        self.state.check()
    }

    /// Ends the reducer and its group with `cause`: no other rank must wait for this one. Gives the first failure, which may
    /// be an earlier one.
    pub fn abort(&mut self, cause: Error) -> Error {
        let (failure, is_first) = self.state.fail(cause);
        if is_first {
            self.group.abort(failure.clone());
        }
        failure
    }

    /// Runs `step` unless something has failed before. An error of it ends the reducer.
    fn attempt<T>(&mut self, step: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.check()?;
        step(self).map_err(|error| self.abort(error))
    }

    /// The operations of this step have failed with `error`. If another rank has made the group fail, and gradients are kept,
    /// they wait for another group. Every other error ends the reducer.
    fn cut_off(&mut self, error: Error) -> Result<()> {
        let is_a_peers = self.group.failure().is_some_and(|cause| cause.is_a_peers(self.group.rank()));
        if is_a_peers && self.state.cut_off(&error) { Ok(()) } else { Err(self.abort(error)) }
    }

    fn accept(
        &mut self,
        index: usize,
        bytes: Option<usize>,
        write: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        self.state.check_backward("a gradient came before `start` or after `finish`")?;
        self.attempt(|reducer| {
            reducer.state.admit(index, bytes)?;
            reducer.fill(index, write)
        })
    }

    /// Has `write` write the gradient of the parameter at `index`, and launches what follows.
    fn fill(&mut self, index: usize, write: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        let (bucket, range) = self.state.slice_of(index);
        let bytes = self.buckets[bucket].bytes_mut(&*self.group)?;
        write(if self.elsewhere { bytes } else { &mut bytes[range] })?;
        if let Some(bucket) = self.state.arrived(index) {
            self.buckets[bucket].mark_ready(&self.trace);
        }
        if self.trace.is_enabled() {
            self.buckets[..self.state.launched()].iter_mut().for_each(Bucket::observe);
        }
        self.launch()
    }

    /// Launches the buckets that are full and whose turn it is.
    fn launch(&mut self) -> Result<()> {
        while let Some(index) = self.state.next_launch() {
            let (bucket, count) = (&mut self.buckets[index], self.state.plan().buckets.len());
            let keeps = self.state.keeps();
            if let (true, Some(gradients)) = (keeps, bucket.bytes()) {
                replay::keep(&mut self.kept, index, gradients)?;
            }
            bucket
                .launch(&mut *self.hook, self.meters.of(&self.state), (index, count), keeps)
                .or_else(|error| self.cut_off(error))?;
        }
        Ok(())
    }

    /// Has `write` write the gradients that backward does not give.
    fn fill_unused(&mut self, write: &mut dyn FnMut(usize, &mut [u8]) -> Result<()>) -> Result<()> {
        while let Some(index) = self.state.next_unused() {
            self.fill(index, |memory| write(index, memory))?;
        }
        Ok(())
    }

    /// Handles the parameters that got no gradient. Returns the exchange of used parameters, if there is one.
    fn close(&mut self) -> Result<Option<Work>> {
        self.state.end()?;
        self.fill_unused(&mut |_, memory| zero(memory))?;
        self.launch()?; // What a replay has left to the end, which is everything.
        if !self.state.closed()? {
            return Ok(None);
        }
        let used = Buffer::from_slice(&self.state.used_here());
        if self.group.world_size().get() == 1 {
            return Ok(Some(Work::ready(Ok(used))));
        }
        self.group.in_call(Caller::DdpBackward).all_reduce_async(used, ReduceOp::Max).map(Some)
    }

    fn wait(&mut self, used: Option<Work>) -> Result<()> {
        // Hooks with several operations: the buckets take turns, so that those of one overlap with those of the next.
        let mut all = false;
        while !std::mem::replace(&mut all, true) {
            for bucket in &mut self.buckets {
                all &= bucket.advance(self.meters.of(&self.state))?;
            }
        }
        if let Some(used) = used {
            self.state.set_used(used.wait()?.as_slice()?);
            let (unused, used) = self.state.usage();
            say(self.warnings.step(self.group.rank(), self.state.parameters(), unused, used));
        }
        self.receive_weights()
    }

    fn lay_out(&mut self, order: Vec<usize>, group: &dyn Communicator) -> Result<()> {
        let plan = self.state.plan_for(&order)?;
        verify::verify_hash(group, "bucket plans", plan.hash())?;
        if self.state.set_plan(order, plan) {
            self.buckets = buckets(&self.state, self.elsewhere);
            tracing::debug!(buckets = self.buckets.len(), "buckets rebuilt in the order of the gradients");
        }
        Ok(())
    }

    /// What a bucket holds in a range of its bytes, if it holds anything.
    fn bytes(&self, (bucket, range): (usize, Range<usize>)) -> Option<&[u8]> {
        self.buckets.get(bucket)?.bytes()?.get(range)
    }
}

/// The reducer's group as hooks see it, in weighted steps and in others: all ranks must begin the same kind of step, and an error
/// of ranks that do not shows both calls.
struct Meters {
    plain: Metered,
    weighted: Metered,
}

impl Meters {
    fn new(group: &dyn Communicator) -> Self {
        let plain = Metered::new(group.in_call(Caller::DdpBackward));
        Self { weighted: plain.of(group.in_call(Caller::DdpBackwardWeighted)), plain }
    }

    fn of(&self, state: &ReducerState) -> &Metered {
        if state.weight().is_some() { &self.weighted } else { &self.plain }
    }
}

fn zero(memory: &mut [u8]) -> Result<()> {
    memory.fill(0);
    Ok(())
}

/// Says what there is to say of unused parameters.
fn say(remarks: unused::Remarks) {
    remarks.warnings.iter().for_each(warn);
    if remarks.found_none {
        tracing::debug!(
            "find_unused_parameters is set, but some rank used every parameter in the first step; if that is always so, training is \
             faster without it"
        );
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

fn buckets(state: &ReducerState, elsewhere: bool) -> Vec<Bucket> {
    let plan = state.plan();
    let carrier = weights::carrier(plan);
    let bucket = |index| {
        let mut bucket = Bucket::new(index, plan, state.parameters(), elsewhere);
        bucket.carry(state.weight().filter(|_| index == carrier && !elsewhere));
        bucket
    };
    (0..plan.buckets.len()).map(bucket).collect()
}
