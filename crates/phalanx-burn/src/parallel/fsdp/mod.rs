//! Fully sharded data parallelism: ZeRO-2 and ZeRO-3, PyTorch's FSDP.
//!
//! A model is made of [units](FullySharded), such as its layers. Each rank has a shard of a unit's parameters, of their gradients and of
//! the optimizer's state. A unit's parameters are gathered just before it computes, and freed after it; while it computes, those of the
//! next are on their way. Backward gathers them again, in reverse, and repeats the unit's forward pass, so that neither parameters nor
//! activations inside units are kept. A unit's gradients are reduced and scattered while the unit before it computes its own.
//!
//! [`Fsdp`] has the model, with the calls of a [`Ddp`].
//!
//! Sources: Rajbhandari et al., "ZeRO" (2020), arXiv 1910.02054; Zhao et al., "PyTorch FSDP" (2023), arXiv 2304.11277.

mod calls;
mod checkpoint;
mod collector;
mod exchanges;
mod group;
mod groups;
mod inputs;
mod layout;
mod recompute;
mod replicated;
mod statement;
mod unit;
mod units;
mod whole;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::ModuleOptimizer;
use burn::tensor::Tensor;
use phalanx::reducer::{OptimizerSteps, ReducerOptions, StepWeight, check_weight_sum};
use phalanx::trace::Track;
use phalanx::{Error, Rank, ReduceOp, Result, adapter};

use self::exchanges::{Exchanges, Present};
pub use self::group::{ShardingGroup, ShardingOptions};
pub use self::inputs::{FloatMapper, UnitInputs};
use self::replicated::Replicated;
use self::statement::compare;
pub use self::unit::FullySharded;
pub(super) use self::unit::{UNIT, first_shard};
use self::units::{Units, difference, whole_name};
use super::{check_elementwise, of_stages};
use crate::ddp::{one_more, scaled};
use crate::gradients::{Clip, Synced, SyncedGradients};
use crate::parameters::{Inventory, Parameter, Select};
use crate::{Ddp, DdpOptions, Scalar, alike, clip, optimizer, replicas};

/// A model of whose parameters, gradients and optimizer's state each rank has a shard: PyTorch's `FullyShardedDataParallel`.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::AdamWConfig;
/// use burn::tensor::{Device, Tensor};
/// use phalanx::{ProcessGroup, Result};
/// use phalanx_burn::parallel::fsdp::{Fsdp, FullySharded, ShardingGroup};
///
/// #[derive(Module, Debug)]
/// struct Model {
///     first: FullySharded<Linear>,
///     last: FullySharded<Linear>,
/// }
///
/// impl Model {
///     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         let x = self.first.forward(x, |layer, x| layer.forward(x).tanh());
///         self.last.forward(x, |layer, x| layer.forward(x))
///     }
/// }
///
/// fn train(group: &ProcessGroup, batches: Vec<(Tensor<2>, Tensor<2>)>) -> Result<()> {
///     let device = Device::flex().autodiff();
///     let sharding = ShardingGroup::new(group)?;
///     let first = FullySharded::new(LinearConfig::new(4, 64).init(&device), &sharding)?;
///     let last = FullySharded::new(LinearConfig::new(64, 1).init(&device), &sharding)?;
///     let mut fsdp = Fsdp::new(Model { first, last }, &sharding)?;
///     let mut optimizer = AdamWConfig::new().init();
///     for (x, y) in batches {
///         // This rank's part of the batch.
///         let loss = fsdp.forward(|model| (model.forward(x) - y).powi_scalar(2).mean())?;
///         let mut gradients = fsdp.backward(&loss)?; // of this rank's shards, averaged over all ranks
///         fsdp.clip_grad_norm(&mut gradients, 1.0)?;
///         fsdp.step(&mut optimizer, 1e-3, gradients)?;
///     }
///     let whole: Linear = fsdp.model().first.gather()?; // to save it, or to use it without a group
/// #   assert_eq!(whole.weight.shape().dims(), [4, 64]);
///     Ok(())
/// }
/// # let device = Device::flex().autodiff();
/// # train(&ProcessGroup::alone()?, vec![(Tensor::ones([2, 4], &device), Tensor::zeros([2, 1], &device)); 2])?;
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// Losses, gradients and steps are those of one process with the whole batch, also where a parameter gets no gradient in some steps; an
/// input that a unit takes and does not use gets a gradient of zero. Every parameter that needs a gradient must be in a unit, and in one
/// only. All ranks make the same calls, and use the same units in the same order: a difference is an error on every rank before the
/// optimizer's step.
///
/// An optimizer sees each piece under the name that its parameter has in the model without units, such as `first.weight`: groups of parameters, as
/// those without weight decay, and groups of learning rates, may tell them by names. Ids are those of the pieces:
/// `ParamGroup::ids_from_module(fsdp.model().first.clone())`.
///
/// # Memory
///
/// For P bytes of parameters on n ranks, units of at most U bytes, and AdamW: 4 P / n for shards, their gradients and the optimizer's
/// state; and during a step, with one unit [ahead](ShardingOptions::prefetch), 2 U for whole parameters and 2 U for whole gradients. Without
/// [`reshard_after_forward`](ShardingOptions::reshard_after_forward) whole parameters take P. The buckets in which
/// [replicas](ShardingGroup::hybrid) average take P / n more, and so does the sum that [`backward_no_sync`](Self::backward_no_sync) leaves.
/// What a rank has really taken, [`bytes`](Self::bytes) says.
///
/// # Errors
/// Neither a forward pass nor backward can return one. If an exchange fails, the groups end with the cause, results are NaN, and the
/// call that is under way returns the cause; a step with such gradients is refused on every rank. That is so for the exchanges of this
/// `Fsdp`: if a loss goes through a second one, on other groups, its NaN comes here without a cause, so look at
/// [`ShardingGroup::failure`] of the second before the step.
#[doc(alias("FullyShardedDataParallel", "FSDP", "FSDP2", "ZeRO", "DeepSpeed"))]
pub struct Fsdp<M> {
    /// Over the ranks that have the same shards.
    ddp: Ddp<M>,
    exchanges: Arc<Exchanges>,
    /// While it lives, no other `Fsdp` has the same exchanges.
    _owner: Arc<()>,
    /// The number of the unit of each piece of a shard.
    units: HashMap<ParamId, usize>,
    /// The numbers of the units, in the order of the model, each with the name of its shard.
    order: Vec<(usize, String)>,
    /// By unit that is trained: the number of its first piece among the parameters of the model.
    parameters: Arc<HashMap<usize, usize>>,
    /// The ids that the parameters of the model had before they were sharded, by the number of the piece.
    wholes: Vec<ParamId>,
    /// The weights of the passes since the last step.
    accumulated: StepWeight,
    /// Whether the optimizer is that of all ranks.
    optimizers: alike::Watch,
    /// The learning rates of the steps that the ranks have not compared yet.
    steps: OptimizerSteps,
}

/// The memory and the traffic of a rank: see [`Fsdp::bytes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FsdpBytes {
    /// This rank's shards. Of those of units that are trained, gradients take as much, and AdamW's state twice as much.
    pub shards: usize,
    /// The most that whole parameters have taken at one time. On other devices than Flex it counts the host buffers from which they are copied, and not
    /// the tensors on the device.
    pub parameters_peak: usize,
    /// The most that whole gradients have taken at one time, counted likewise.
    pub gradients_peak: usize,
    /// All buffers that were gathered, reduced and scattered, counted once for each operation, and what replicas have averaged. Of a
    /// buffer of b bytes each of n ranks sends b (n-1) / n.
    pub communicated: u64,
}

impl<M: Module> Fsdp<M> {
    /// The model whose units are sharded by `sharding`. All ranks take rank 0's values of what is in no unit: frozen parameters, buffers,
    /// and tensors that are no floats. All ranks call it together.
    ///
    /// Nothing keeps those equal afterwards: running statistics outside units are each rank's own.
    ///
    /// # Errors
    /// On every rank, if the ranks' models do not have the same units, or what is in none differs in names, shapes or types; if a
    /// parameter that needs a gradient is in none, or in two; if one is [divided](crate::parallel::tensor) among ranks; if a part of a unit was
    /// frozen after the unit was made; if there is another `Fsdp` of this [`ShardingGroup`]. If the exchange fails.
    pub fn new(model: M, sharding: &ShardingGroup) -> Result<Self> {
        let exchanges = sharding.exchanges.clone();
        Self::prepared(model, &exchanges).inspect_err(|error| exchanges.fail(error.clone()))
    }

    fn prepared(model: M, exchanges: &Arc<Exchanges>) -> Result<Self> {
        exchanges.check()?;
        let own = Units::of(&model, exchanges);
        // Before what this rank's own model is found to be: the others wait here.
        let described = own.as_ref().map(Units::described).map_err(Error::to_string);
        let remedy = "make the same model of the same units on every rank";
        compare(&exchanges.gather_from_all(&described)?, "cannot use its model", difference, remedy)?;
        let Units { order, numbers, .. } = own?;
        let owner = exchanges.own()?;
        let shards: HashSet<ParamId> = numbers.keys().copied().collect();
        let rest = Select::Except(&shards);
        let model = replicas::from_rank(model, &exchanges.replicas, Rank::MAIN, rest)?;
        let model = replicas::from_rank(model, &exchanges.group, Rank::MAIN, rest)?;
        exchanges.expect(order.iter().map(|(unit, _)| *unit).collect());
        // A bucket for each unit, which need not wait for others; one that no rank uses in a step gets no gradient.
        let trained = Inventory::of(&model)?.parameters;
        let buckets: Vec<usize> =
            trained.iter().map(|piece| numbers.get(&piece.id).copied().unwrap_or_default()).collect();
        let reducer = ReducerOptions::default().bucket_numbers(buckets).find_unused_parameters(true);
        let options = DdpOptions { reducer, ..DdpOptions::default() };
        let mut ddp = Ddp::of_shards(model, &exchanges.replicas, options)?;
        let mut parameters = HashMap::new();
        for (index, piece) in ddp.parameters().iter().enumerate() {
            if let Some(&unit) = numbers.get(&piece.id) {
                parameters.entry(unit).or_insert(index);
            }
        }
        let whole = |(index, piece): (usize, &Parameter)| {
            let unit = numbers.get(&piece.id)?;
            let (_, shard) = order.iter().find(|(number, _)| number == unit)?;
            let of = exchanges.unit(*unit)?;
            let parameter = of.parameters.get(index.checked_sub(*parameters.get(unit)?)?)?;
            Some((whole_name(shard, parameter), parameter.id))
        };
        let pieces = ddp.parameters().iter().enumerate();
        let (names, wholes): (Vec<String>, Vec<ParamId>) = pieces
            .map(|(index, piece)| whole((index, piece)).unwrap_or_else(|| (piece.name.clone(), piece.id)))
            .unzip();
        ddp.rename(names);
        let parameters = Arc::new(parameters);
        let (exchanges, accumulated) = (exchanges.clone(), StepWeight::Nothing);
        let (optimizers, steps) = (alike::Watch::default(), OptimizerSteps::default());
        Ok(Self {
            ddp,
            exchanges,
            _owner: owner,
            units: numbers,
            order,
            parameters,
            wholes,
            accumulated,
            optimizers,
            steps,
        })
    }

    /// Runs `pass` on the model, so that a [`backward`](Self::backward) of its result computes gradients.
    ///
    /// # Errors
    /// If an exchange fails, in this call or before.
    pub fn forward<T>(&mut self, pass: impl FnOnce(&M) -> T) -> Result<T> {
        let began = Instant::now();
        self.exchanges.check()?;
        let shards = self.shards(self.model());
        let output = self.ddp.forward_with(|model, _, sink| {
            let replicated = sink.map(|sink| Replicated::new(sink, self.parameters.clone()));
            self.exchanges.begin(shards, replicated);
            pass(model)
        });
        self.exchanges.end();
        let output = output.inspect_err(|error| self.exchanges.fail(error.clone()))?;
        self.exchanges.check()?;
        self.exchanges.record(Track::Forward, "forward", began);
        Ok(output)
    }

    /// Runs `pass` on the model without autodiff, as [`Module::valid`] makes it, for an evaluation. All ranks call it together. Buffers
    /// outside of units, such as the running statistics of batch norm, are rank 0's there; of a model without any, the ranks of one
    /// [replica](ShardingGroup::hybrid) may evaluate alone.
    ///
    /// # Errors
    /// If an exchange fails, in this call or before.
    pub fn evaluate<T>(&mut self, pass: impl FnOnce(&M) -> T) -> Result<T> {
        self.exchanges.check()?;
        let mut model = self.model().valid();
        if !self.ddp.buffers().is_empty() {
            let buffers = Select::Only(self.ddp.buffers());
            for group in [&self.exchanges.replicas, &self.exchanges.group] {
                let taken = replicas::from_rank(model, group, Rank::MAIN, buffers);
                model = taken.inspect_err(|error| self.exchanges.fail(error.clone()))?;
            }
        }
        self.exchanges.begin(self.shards(&model), None);
        let output = pass(&model);
        self.exchanges.end();
        self.exchanges.check()?;
        Ok(output)
    }

    /// Runs backward from `loss`, and gives the gradients of this rank's shards, averaged over all ranks. Those of
    /// [`backward_no_sync`](Self::backward_no_sync) since the last call are added.
    ///
    /// Every rank counts alike. If ranks have unequal numbers of samples, that is not the gradient of the mean over all samples:
    /// see [`backward_weighted`](Self::backward_weighted).
    ///
    /// # Errors
    /// If an exchange fails on any rank, or the ranks have used their units differently: then no rank gets gradients.
    pub fn backward<const D: usize>(&mut self, loss: &Tensor<D>) -> Result<SyncedGradients> {
        self.synchronised(loss, None)
    }

    /// Runs backward as [`backward`](Self::backward) does, with ranks that have unequal numbers of samples or tokens, as
    /// [`Ddp::backward_weighted`] does: `loss` is the **mean** over those of this rank, and `weight` is their number. The result is the
    /// gradient of the mean over the samples of all ranks, of every replica, as one process with the whole batch has it.
    ///
    /// ```
    /// # use burn::{module::Module, optim::ModuleOptimizer, tensor::Tensor};
    /// # use phalanx_burn::parallel::fsdp::Fsdp;
    /// # fn step<M: Module>(fsdp: &mut Fsdp<M>, optimizer: &mut ModuleOptimizer, batch: Tensor<2>, pass: fn(&M, Tensor<2>) -> Tensor<2>)
    /// # -> phalanx::Result<()> {
    /// let samples = batch.dims()[0] as f64; // another number on each rank
    /// let loss = fsdp.forward(|model| pass(model, batch).mean())?;
    /// let gradients = fsdp.backward_weighted(&loss, samples)?;
    /// fsdp.step(optimizer, 1e-3, gradients)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// It costs no further collective: the weights travel with what the ranks compare after each backward pass. **A rank without
    /// samples** has the weight 0, and runs the same units forward and backward, of any sample: all ranks gather parameters together. Its
    /// gradients may be NaN, and change nothing.
    ///
    /// # Errors
    /// As [`backward`](Self::backward). On every rank, and it ends the groups: if a rank's weight is negative, infinite or not a number;
    /// if some passes of a step are weighted and others not, on one rank or on several; if a parameter, or the loss, is of 16 bits.
    ///
    /// If all weights are 0, an error on every rank that ends nothing: continue with the next step.
    #[doc(alias("uneven", "num_samples", "num_tokens"))]
    pub fn backward_weighted<const D: usize>(
        &mut self,
        loss: &Tensor<D>,
        weight: f64,
    ) -> Result<SyncedGradients> {
        self.synchronised(loss, Some(weight))
    }

    fn synchronised<const D: usize>(
        &mut self,
        loss: &Tensor<D>,
        weight: Option<f64>,
    ) -> Result<SyncedGradients> {
        let order: Vec<usize> = self.order.iter().map(|(unit, _)| *unit).collect();
        let loss = scaled(loss, weight);
        let (mut gradients, present, sum) =
            self.backward_with((&loss, weight), |ddp| ddp.backward(&loss), Some(&order))?;
        // What no rank has a gradient of has none here either, by which an optimizer's decay or momentum would change it.
        for (unit, present) in present {
            let Some(&first) = self.parameters.get(&unit) else { continue };
            let pieces = self.ddp.parameters().iter().skip(first).zip(present);
            for (piece, _) in pieces.filter(|(_, is_present)| !is_present) {
                drop(gradients.remove::<1>(piece.id));
            }
        }
        if let Some(sum) = sum {
            check_weight_sum(sum)?;
            // They are averages over ranks.
            let ranks = self.exchanges.ranks() * self.exchanges.replicas.world_size().count();
            let mean = sum / ranks as f64;
            if mean != 1.0 {
                clip::multiply(self.model(), &mut gradients, 1.0 / mean);
            }
        }
        Ok(gradients)
    }

    /// Runs backward from `loss`, and adds the gradients of this rank's shards to those of the next [`backward`](Self::backward).
    /// They are reduced and scattered, so that only shards are kept; what is left for the next call is the average over replicas.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    #[doc(alias("no_sync", "set_requires_gradient_sync"))]
    pub fn backward_no_sync<const D: usize>(&mut self, loss: &Tensor<D>) -> Result<()> {
        self.backward_with((loss, None), |ddp| ddp.backward_no_sync(loss), None).map(|_| ())
    }

    /// Runs backward as [`backward_no_sync`](Self::backward_no_sync) does, for the next
    /// [`backward_weighted`](Self::backward_weighted): `loss` is the mean over `weight` samples or tokens. Do not divide the loss by
    /// the number of passes: the step divides by all weights of all passes and ranks, once.
    ///
    /// # Errors
    /// As [`backward_weighted`](Self::backward_weighted).
    pub fn backward_no_sync_weighted<const D: usize>(&mut self, loss: &Tensor<D>, weight: f64) -> Result<()> {
        let loss = scaled(loss, Some(weight));
        self.backward_with((&loss, Some(weight)), |ddp| ddp.backward_no_sync(&loss), None).map(|_| ())
    }

    /// Drops the gradients of [`backward_no_sync`](Self::backward_no_sync) since the last [`backward`](Self::backward), on this rank alone:
    /// all ranks call it in the same place.
    #[doc(alias("zero_grad", "no_sync"))]
    pub fn drop_accumulated(&mut self) {
        self.accumulated = StepWeight::Nothing;
        self.exchanges.drop_held();
        self.ddp.drop_accumulated();
    }

    /// Gives the outcome of `backward`, which is a pass from `loss`, of this `weight`, if the step is weighted; by unit of `order` which of
    /// its parameters have got a gradient on any rank; and the sum of all weights.
    fn backward_with<T, const D: usize>(
        &mut self,
        (loss, weight): (&Tensor<D>, Option<f64>),
        backward: impl FnOnce(&mut Ddp<M>) -> Result<T>,
        order: Option<&[usize]>,
    ) -> Result<(T, Present, Option<f64>)> {
        let began = Instant::now();
        self.exchanges.check()?;
        let accumulated =
            one_more(self.accumulated, (loss, weight), self.exchanges.group.rank(), self.ddp.parameters());
        // The others wait for this rank's gradients.
        let accumulated = accumulated.inspect_err(|error| self.exchanges.fail(error.clone()))?;
        self.accumulated = if order.is_some() { StepWeight::Nothing } else { accumulated };
        self.exchanges.begin_backward(weight);
        let outcome = backward(&mut self.ddp);
        self.exchanges.end_backward();
        // The first failure is the cause of the rest.
        let outcome = self.exchanges.check().and(outcome);
        let outcome = outcome.inspect_err(|error| self.exchanges.fail(error.clone()))?;
        let (present, sum) = self.exchanges.agree(order, accumulated.sum())?;
        self.exchanges.record(Track::Backward, "backward", began);
        Ok((outcome, present, sum))
    }

    /// Scales `gradients` from [`backward`](Self::backward) so that the norm of the whole model's, taken over all elements as one vector,
    /// is at most `max_norm`; gives the 2-norm from before, summed in f64, with the same bits on every rank. All ranks call it together.
    ///
    /// If an element is infinite or not a number, so is the norm, on every rank alike; the gradients are then left alone.
    ///
    /// # Errors
    /// If the model has trained in a chain of [`StageLink`](super::StageLink)s: units there cannot be clipped. These errors end the groups: `max_norm` is
    /// not a positive number, the ranks give a different one (it may differ by rounding), the gradients are those of another model, a gradient cannot be
    /// read from its device, or the exchange fails. If the `max_norm` of [replicas](ShardingGroup::hybrid) differ, a later [`backward`](Self::backward)
    /// returns the error.
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_grad_norm(&self, gradients: &mut impl Clip, max_norm: f64) -> Result<f64> {
        // All ranks of the units have the same layers, and the same error.
        if self.ddp.is_of_stages() {
            return Err(of_stages().with_remedy("train units in a chain of links without clipping"));
        }
        let squares = adapter::check_max_norm(max_norm)
            .and_then(|()| clip::squares_of(self.model(), gradients.parameters()));
        // The others wait for this rank's number.
        let squares = squares.inspect_err(|error| self.exchanges.fail(error.clone()))?;
        let own: f64 = squares.iter().map(|(_, squares)| squares).sum();
        let mut all = vec![0.0; 2 * self.exchanges.ranks()];
        let gathered = self.exchanges.group.all_gather(&[own, max_norm], &mut all);
        gathered.inspect_err(|error| self.exchanges.fail(error.clone()))?;
        let (all, _) = all.as_chunks::<2>();
        // It may be computed, and two that are infinite have no difference.
        let first = all[0][1];
        let is_other = |other: f64| (other - first).abs() > 1e-6 * first.min(other);
        if let Some((rank, [_, other])) = all.iter().enumerate().find(|(_, [_, other])| is_other(*other)) {
            let error = Error::mismatch(format!(
                "Fsdp::clip_grad_norm: rank 0 clips to the norm {first}, and rank {rank} to {other}"
            ))
            .with_remedy("give every rank the same max_norm");
            self.exchanges.fail(error.clone());
            return Err(error);
        }
        // Added in the order of ranks, in the group of every replica alike.
        Ok(clip::scale(self.model(), gradients, max_norm, all.iter().map(|[squares, _]| *squares)))
    }

    /// Lets `optimizer` change this rank's shards by `gradients` from [`backward`](Self::backward). It communicates
    /// only in the first step, every 31 and every 32 steps. In the first step and every 31 steps the ranks compare their optimizers. Every 32 steps they compare
    /// the learning rates of these steps, and which states each rank has [loaded](Self::load).
    ///
    /// # Errors
    /// If an exchange has failed, or the gradients are those of another model. If a group of learning rates goes by the ids that parameters had before they
    /// were sharded. In the first step and every 31 steps, on every rank:
    ///
    /// * if there are several shards, and the optimizer does not treat each element by itself, as LAMB and Burn's clipping by norm do not;
    /// * if a group of the optimizer's parameters goes by such ids;
    /// * in the first step, if only some of the ranks' optimizers have a state;
    /// * if the ranks' optimizers are of several kinds, or their betas, decay or momentum differ;
    /// * every 32 steps instead, if learning rates differ, only some ranks have loaded a state, or ranks have loaded those of different steps or runs.
    ///
    /// Each of these errors ends the groups.
    pub fn step(
        &mut self,
        optimizer: &mut ModuleOptimizer,
        learning_rate: impl Into<ModuleLearningRate>,
        gradients: impl Synced,
    ) -> Result<()> {
        self.exchanges.check()?;
        let stepped = self.stepped(optimizer, learning_rate, gradients);
        // The others would wait for this rank in the next pass.
        stepped.inspect_err(|error| self.exchanges.fail(error.clone()))
    }

    fn stepped(
        &mut self,
        optimizer: &mut ModuleOptimizer,
        learning_rate: impl Into<ModuleLearningRate>,
        gradients: impl Synced,
    ) -> Result<()> {
        let rates: ModuleLearningRate = learning_rate.into();
        let pieces = (self.ddp.model(), self.ddp.parameters());
        let is_first = !self.optimizers.is_compared();
        groups::check_rates(&rates, self.ddp.parameters(), &self.wholes)?;
        if is_first || self.optimizers.is_due() {
            groups::check(optimizer, self.ddp.parameters(), &self.wholes)?;
            // The piece of a single rank is the whole parameter.
            if self.exchanges.ranks() > 1 {
                check_elementwise(optimizer, pieces, &HashMap::new(), "Fsdp::clip_grad_norm")?;
            }
        }
        // Replicas compare in the step of their Ddp.
        if is_first {
            optimizer::check_states(optimizer, &self.exchanges.group, self.ddp.parameters())?;
            self.optimizers.compare(optimizer, pieces, Some(&rates), &self.exchanges.group)?;
        } else {
            self.optimizers.step(optimizer, pieces, &self.exchanges.group)?;
        }
        let began = Instant::now();
        self.ddp.step(optimizer, rates.clone(), gradients)?;
        self.exchanges.record(Track::Optimizer, "optimizer", began);
        let loaded = self.ddp.settle_loads();
        self.steps.step(crate::lr::of_each(&rates, self.ddp.parameters()), [loaded]);
        self.steps.verify(&self.exchanges.group)
    }

    /// The mean of all ranks' `value`, such as a loss, the same on every rank. All ranks call it together.
    ///
    /// # Errors
    /// If a tensor has more than one element, or the exchange fails.
    pub fn mean(&self, value: impl Scalar) -> Result<f64> {
        // A shape is as wrong on the others; a device fails on this rank alone, and the others wait for its number.
        let number = value.number().inspect_err(|error| {
            if !error.is_invalid_argument() {
                self.exchanges.fail(error.clone());
            }
        })?;
        let mut mean = [number];
        let groups = [&self.exchanges.group, &self.exchanges.replicas];
        let averaged = groups.into_iter().try_for_each(|group| group.all_reduce(&mut mean, ReduceOp::Avg));
        // The replicas wait for what this rank has not got.
        averaged.inspect_err(|error| self.exchanges.fail(error.clone()))?;
        Ok(mean[0])
    }

    /// The model, of whose units this rank has shards.
    pub fn model(&self) -> &M {
        self.ddp.model()
    }

    /// Returns the model itself.
    pub fn into_model(self) -> M {
        self.ddp.into_model()
    }

    /// What this rank has taken of its memory and sent, since its [`ShardingGroup`] was made.
    pub fn bytes(&self) -> FsdpBytes {
        let units = self.order.iter().filter_map(|(unit, _)| self.exchanges.unit(*unit));
        let shards = units.map(|unit| unit.shard * unit.dtype.size()).sum();
        let (parameters_peak, gradients_peak, communicated) = self.exchanges.bytes();
        let communicated = communicated + self.ddp.communicated_bytes();
        FsdpBytes { shards, parameters_peak, gradients_peak, communicated }
    }

    /// This rank's shard of each unit of `model`.
    fn shards(&self, model: &M) -> HashMap<usize, Vec<Tensor<1>>> {
        let mut shards = Shards { units: &self.units, seen: HashSet::new(), found: HashMap::new() };
        model.visit(&mut shards);
        shards.found
    }
}

impl<M> fmt::Debug for Fsdp<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rank, ranks) = (self.exchanges.rank(), self.exchanges.ranks());
        write!(f, "Fsdp({} units, rank {rank} of {ranks})", self.units.len())
    }
}

struct Shards<'a> {
    units: &'a HashMap<ParamId, usize>,
    /// A unit may be used in several places of the model.
    seen: HashSet<ParamId>,
    found: HashMap<usize, Vec<Tensor<1>>>,
}

impl ModuleVisitor for Shards<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(&unit) = self.units.get(&param.id)
            && self.seen.insert(param.id)
        {
            let piece = param.base().set_require_grad(false);
            let elements = piece.shape().num_elements();
            self.found.entry(unit).or_default().push(piece.reshape([elements]));
        }
    }
}
