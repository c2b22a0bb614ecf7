//! Backward passes in which each rank counts by its number of samples.

use burn::module::Module;
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{DType, Tensor};
use phalanx::reducer::{StepWeight, check_weight_sum};
use phalanx::{Communicator, Error, Rank, Result};

use super::engine::{alone, delivery, live, specs, traced};
use super::{Ddp, Engine, held};
use crate::clip;
use crate::gradients::{SyncedGradients, check_hooked};
use crate::parallel::{Sharers, with_links};
use crate::parameters::Parameter;
use crate::sink::Delivery;

impl<M: Module> Ddp<M> {
    /// Runs backward as [`backward`](Self::backward) does, with ranks that have unequal numbers of samples or tokens: `loss` is the
    /// **mean** over those of this rank, and `weight` is their number. The result is `Σ weight·gradient / Σ weight`, with sums over
    /// ranks: the gradient of the mean over the samples of all ranks, as one process with the whole batch has it. All ranks call
    /// it together, in the same steps.
    ///
    /// ```
    /// # use burn::{nn::Linear, optim::ModuleOptimizer, tensor::Tensor};
    /// # fn step(ddp: &mut phalanx_burn::Ddp<Linear>, optimizer: &mut ModuleOptimizer, batch: Tensor<2>) -> phalanx::Result<()> {
    /// let samples = batch.dims()[0] as f64; // another number on each rank
    /// let loss = ddp.forward(|model| model.forward(batch).mean())?;
    /// let gradients = ddp.backward_weighted(&loss, samples)?;
    /// ddp.step(optimizer, 1e-3, gradients)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The weights travel in a bucket of gradients, as one element more; where NCCL averages, through the host's group, and ranks that make other calls
    /// may get an error later, or a wrong average (`Ddp::with_nccl`). Backward begins from `loss × weight`, so collectives inside of
    /// backward, such as those of [`SyncBatchNorm`](crate::SyncBatchNorm) and [`Collectives::all_gather`](crate::Collectives::all_gather),
    /// give the gradients of the same mean.
    ///
    /// **A rank without samples** has the weight 0. It still runs a forward and a backward pass, of any sample or of an empty batch. If the model has
    /// Burn's own `BatchNorm`, take a sample: an empty batch makes its running statistics NaN. The gradients of this rank change nothing. They may be
    /// missing, or NaN, as those of the mean of an empty batch are. If the pass itself has collectives, as above, its loss must be finite, because it
    /// enters their sums.
    ///
    /// Gradients of [`backward_no_sync_weighted`](Self::backward_no_sync_weighted) since the last call are in the result, each with
    /// its own weight. Inside [`join`](Self::join) a rank without batches has the weight 0;
    /// [`divide_by_initial_world_size`](phalanx::join::JoinOptions::divide_by_initial_world_size) has no effect, as the sum of
    /// weights is what is divided by. In a world of one the result is that of [`backward`](Self::backward). A
    /// [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer) takes these gradients too.
    ///
    /// # Errors
    /// As [`backward`](Self::backward). On every rank, and it ends the group:
    ///
    /// - if a rank's weight is negative, infinite or not a number;
    /// - if some ranks call this and others [`backward`](Self::backward), or passes of one step are weighted and others not;
    /// - if a gradient, or the loss, is of 16 bits, or a [hook](Self::register_comm_hook) is registered, other than one that
    ///   [takes weights](phalanx::reducer::hooks::CommHook::accepts_weights). Then sum the weights over ranks with
    ///   [`sum`](Self::sum), and call [`backward`](Self::backward) with `loss × weight × world size / sum`.
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

    /// Runs backward as [`backward_no_sync`](Self::backward_no_sync) does, for the next
    /// [`backward_weighted`](Self::backward_weighted): `loss` is the mean over `weight` samples or tokens. Do not divide the loss by
    /// the number of passes: the step divides by all weights of all passes and ranks, once.
    ///
    /// ```
    /// # use burn::{nn::Linear, optim::ModuleOptimizer, tensor::Tensor};
    /// # fn step(ddp: &mut phalanx_burn::Ddp<Linear>, optimizer: &mut ModuleOptimizer, batches: Vec<Tensor<2>>)
    /// # -> phalanx::Result<()> {
    /// let mut batches = batches.into_iter(); // of any sizes
    /// let last = batches.next_back().expect("at least one batch");
    /// for batch in batches {
    ///     let samples = batch.dims()[0] as f64;
    ///     let loss = ddp.forward(|model| model.forward(batch).mean())?;
    ///     ddp.backward_no_sync_weighted(&loss, samples)?;
    /// }
    /// let samples = last.dims()[0] as f64;
    /// let loss = ddp.forward(|model| model.forward(last).mean())?;
    /// let gradients = ddp.backward_weighted(&loss, samples)?;
    /// ddp.step(optimizer, 1e-3, gradients)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`backward_no_sync`](Self::backward_no_sync) and [`backward_weighted`](Self::backward_weighted).
    pub fn backward_no_sync_weighted<const D: usize>(&mut self, loss: &Tensor<D>, weight: f64) -> Result<()> {
        self.unsynchronised(loss, Some(weight))
    }

    /// Averages the gradients of `loss` and of what was accumulated.
    pub(crate) fn synchronised<const D: usize>(
        &mut self,
        loss: &Tensor<D>,
        weight: Option<f64>,
    ) -> Result<SyncedGradients> {
        self.in_backward(|ddp| ddp.synchronise(loss, weight))
    }

    /// Adds up the gradients of `loss` on this rank.
    pub(super) fn unsynchronised<const D: usize>(
        &mut self,
        loss: &Tensor<D>,
        weight: Option<f64>,
    ) -> Result<()> {
        self.in_backward(|ddp| ddp.hold(loss, weight))
    }

    /// Runs `pass`, which runs backward. Notes whether gradients go over a link; if it panics, ends the groups of the ranks that divide layers with this one.
    fn in_backward<T>(&mut self, pass: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let _end = self.sharers.as_ref().map(Sharers::end_if_panicked);
        let (outcome, is_linked) = with_links(|| pass(self));
        self.is_of_stages |= is_linked;
        outcome
    }

    fn synchronise<const D: usize>(
        &mut self,
        loss: &Tensor<D>,
        weight: Option<f64>,
    ) -> Result<SyncedGradients> {
        self.engine.check_tracked(loss)?;
        let total = self.accumulate(loss, weight)?.sum();
        self.accumulated = StepWeight::Nothing;
        self.buffers_stale = true;
        let model = held(&self.model);
        let gradients = match &mut self.engine {
            Engine::Alone { held } => alone_in_all(&self.group, model, loss, (weight, total), held)?,
            Engine::Together { sink, passes, .. } => {
                let delivery = sink.call(|_| delivery(passes))?;
                sink.start(delivery, weight, total)?;
                let past_hooks = scaled(loss, weight).backward();
                sink.call(|_| check_hooked(model, &past_hooks))?;
                drop(past_hooks);
                let scale = self.group.average_scale(total.is_some());
                let sink = sink.clone();
                sink.finish(|reducer| {
                    let scale = reducer.scale_in_step(scale);
                    self.averages(reducer, scale)
                })?
            }
        };
        Ok(SyncedGradients::new(gradients, &self.token).sharded(self.sharded))
    }

    fn hold<const D: usize>(&mut self, loss: &Tensor<D>, weight: Option<f64>) -> Result<()> {
        self.engine.check_tracked(loss)?;
        self.accumulated = self.accumulate(loss, weight)?;
        let model = held(&self.model);
        match &mut self.engine {
            Engine::Alone { held } => {
                if weight != Some(0.0) {
                    let gradients = alone(&self.group, model, &scaled(loss, weight));
                    held.get_or_insert_with(GradientsAccumulator::new).accumulate(model, gradients);
                }
                Ok(())
            }
            Engine::Together { sink, passes, .. } => {
                sink.call(|_| live(passes))?;
                sink.hold(weight)?;
                let past_hooks = traced(&self.group, &scaled(loss, weight));
                sink.call(|_| check_hooked(model, &past_hooks))?;
                sink.set_delivery(Delivery::Ignore)
            }
        }
    }

    /// An error if gradients are held for the next step, which a saved state, or one in another group, would lack.
    pub(crate) fn check_nothing_held(&self) -> Result<()> {
        match self.accumulated {
            StepWeight::Nothing => Ok(()),
            StepWeight::Unweighted | StepWeight::Weighted(_) => Err(Error::invalid_argument(
                "a state was to be saved, or to change its group, in the middle of a step: gradients of backward_no_sync are held, and would be \
                 missing in it",
            )
            .with_remedy(
                "save, commit, or change the group between a step and the first backward_no_sync of the next; or drop them with \
                 drop_accumulated",
            )),
        }
    }

    /// What is accumulated with one pass more. An error ends the group: the others wait for this rank's gradients.
    fn accumulate<const D: usize>(&self, loss: &Tensor<D>, weight: Option<f64>) -> Result<StepWeight> {
        let (rank, parameters) = (self.group.rank(), &self.inventory.parameters);
        let sum = || one_more(self.accumulated, (loss, weight), rank, parameters);
        match self.engine.sink() {
            Some(sink) => sink.call(|_| sum()),
            None => sum(),
        }
    }
}

/// A step's weight with one pass more of `rank`, from `loss`, in which `parameters` get gradients.
pub(crate) fn one_more<const D: usize>(
    step: StepWeight,
    (loss, weight): (&Tensor<D>, Option<f64>),
    rank: Rank,
    parameters: &[Parameter],
) -> Result<StepWeight> {
    // Types matter to weights alone.
    let specs = weight.map(|_| specs(parameters)).transpose()?.unwrap_or_default();
    let step = step.with(weight, rank, &specs)?;
    weight.map_or(Ok(()), |_| check_wide(loss)).map(|()| step)
}

/// An error if the loss is of 16 bits: its gradient begins as the weight, rounded to that type, while the sum of weights is exact.
fn check_wide<const D: usize>(loss: &Tensor<D>) -> Result<()> {
    let dtype = loss.dtype();
    if !matches!(dtype, DType::F16 | DType::BF16) {
        return Ok(());
    }
    Err(Error::invalid_argument(format!("a loss of type {dtype:?} is too narrow for weights"))
        .with_remedy("compute it in f32: `output.cast(FloatDType::F32)` before the loss"))
}

/// The loss with which backward begins.
pub(crate) fn scaled<const D: usize>(loss: &Tensor<D>, weight: Option<f64>) -> Tensor<D> {
    weight.map_or_else(|| loss.clone(), |weight| loss.clone() * weight)
}

/// The gradients in a world of one, of this pass and of those before, whose sum is `held`.
fn alone_in_all<M: Module, const D: usize>(
    group: &dyn Communicator,
    model: &M,
    loss: &Tensor<D>,
    (weight, total): (Option<f64>, Option<f64>),
    held: &mut Option<GradientsAccumulator<M>>,
) -> Result<GradientsParams> {
    total.map_or(Ok(()), check_weight_sum)?;
    let Some(mut sum) = held.take() else { return Ok(alone(group, model, loss)) };
    if weight != Some(0.0) {
        sum.accumulate(model, alone(group, model, &scaled(loss, weight)));
    }
    let mut gradients = sum.grads();
    if let Some(total) = total {
        clip::multiply(model, &mut gradients, 1.0 / total);
    }
    Ok(gradients)
}
