//! Backward passes in which each rank counts by its number of samples.

use phalanx::reducer::{StepWeight, check_weight_sum};
use phalanx::{Communicator, Error, Result};
use tch::{Kind, Tensor};

use super::Ddp;
use crate::shim;
use crate::tensors::{Inventory, Named, own_gradients, torch};

/// The passes since the last synchronised one.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Accumulated {
    weight: StepWeight,
    /// In a weighted step, how often each parameter's gradient had been written, if there was one.
    versions: Vec<Option<i64>>,
}

impl Ddp {
    /// Runs backward as [`backward`](Self::backward) does, with ranks that have unequal numbers of samples or tokens: `loss` is the
    /// **mean** over those of this rank, and `weight` is their number. `.grad` is then `Σ weight·gradient / Σ weight`, with sums over
    /// ranks: the gradient of the mean over the samples of all ranks, as one process with the whole batch has it. All ranks call
    /// it together, in the same steps.
    ///
    /// ```
    /// # use tch::Tensor;
    /// # fn step(ddp: &mut phalanx_tch::Ddp, optimizer: &mut phalanx_tch::Optimizer, model: &tch::nn::Linear, batch: Tensor) -> phalanx::Result<()> {
    /// let samples = batch.size()[0] as f64; // another number on each rank
    /// let loss = ddp.forward(|| batch.apply(model).mean(tch::Kind::Float))?;
    /// optimizer.zero_grad()?;
    /// ddp.backward_weighted(&loss, samples)?;
    /// optimizer.step(1e-3)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The weights travel in a bucket of gradients, as one element more; where NCCL averages, through the host's group, and ranks that make other calls
    /// may get an error later, or a wrong average ([`with_nccl`](Self::with_nccl)). Backward begins from `loss × weight`, so collectives inside of
    /// backward, such as those of [`SyncBatchNorm`](crate::SyncBatchNorm), give the gradients of the same mean.
    ///
    /// **A rank without samples** has the weight 0. It runs a forward and a backward pass all the same, of any sample or of an empty
    /// batch. What that gives does not matter: gradients may be NaN, as those of the mean of nothing are, or missing. Only where
    /// the pass itself has collectives, as above, must its loss be finite: their sums take in what it brings.
    ///
    /// Gradients of [`backward_no_sync_weighted`](Self::backward_no_sync_weighted) since the last call are in the result, each with
    /// its own weight. Inside [`join`](Self::join) a rank without batches has the weight 0;
    /// [`divide_by_initial_world_size`](phalanx::join::JoinOptions::divide_by_initial_world_size) has no effect, as the sum of
    /// weights is what is divided by. In a world of one the result is that of [`backward`](Self::backward).
    ///
    /// # Errors
    /// As [`backward`](Self::backward). On every rank, and it ends the group:
    ///
    /// - if a rank's weight is negative, infinite or not a number;
    /// - if some ranks call this and others [`backward`](Self::backward), or passes of one step are weighted and others not;
    /// - if gradients were not set to zero before the step's first pass, or were changed between two of its passes: what was there would be
    ///   weighted, too;
    /// - if a gradient, or the loss, is of 16 bits, or a [hook](Self::register_comm_hook) is registered, other than one that
    ///   [takes weights](phalanx::reducer::hooks::CommHook::accepts_weights).
    ///
    /// If all weights are 0, an error on every rank that ends nothing: set gradients to zero, and continue with the next step.
    #[doc(alias("uneven", "num_samples", "num_tokens"))]
    pub fn backward_weighted(&mut self, loss: &Tensor, weight: f64) -> Result<()> {
        self.synchronised(loss, Some(weight))
    }

    /// Runs backward as [`backward_no_sync`](Self::backward_no_sync) does, for the next
    /// [`backward_weighted`](Self::backward_weighted): `loss` is the mean over `weight` samples or tokens. Do not divide the loss by
    /// the number of passes: the step divides by all weights of all passes and ranks, once.
    ///
    /// # Errors
    /// As [`backward_no_sync`](Self::backward_no_sync) and [`backward_weighted`](Self::backward_weighted).
    pub fn backward_no_sync_weighted(&mut self, loss: &Tensor, weight: f64) -> Result<()> {
        self.unsynchronised(loss, Some(weight))
    }

    /// Averages the gradients of `loss` and of what was accumulated.
    pub(crate) fn synchronised(&mut self, loss: &Tensor, weight: Option<f64>) -> Result<()> {
        self.check_backward(loss)?;
        if !std::mem::take(&mut self.has_begun) {
            // A model without buffers may have run outside of `forward`, which says in a `join` how many ranks have data.
            self.group.step()?;
        }
        let accumulated = self.accumulate(loss, weight)?;
        let before = std::mem::take(&mut self.accumulated);
        self.buffers_stale = true;
        let total = accumulated.sum();
        let Some(sink) = &self.sink else {
            self.alone(loss, (weight, total), before.weight)?;
            return self.part_gradients();
        };
        let scale = || self.group.average_scale(total.is_some());
        let outcome =
            sink.average((weight, total), || scaled(loss, weight)?.f_backward().map_err(torch), scale);
        self.has_torn = outcome.is_err();
        outcome
    }

    /// Adds up the gradients of `loss` on this rank.
    pub(super) fn unsynchronised(&mut self, loss: &Tensor, weight: Option<f64>) -> Result<()> {
        self.check_backward(loss)?;
        let accumulated = self.accumulate(loss, weight)?;
        match &self.sink {
            Some(sink) => {
                let outcome = sink.hold(weight, || self.traced(&scaled(loss, weight)?));
                self.has_torn = outcome.is_err();
                outcome?;
            }
            None if weight == Some(0.0) => void(&self.inventory.parameters, || self.traced(loss))?,
            None => self.traced(&scaled(loss, weight)?)?,
        }
        self.part_gradients()?;
        let versions = accumulated.sum().map(|_| versions(&self.inventory.parameters)).transpose()?;
        self.accumulated = Accumulated { weight: accumulated, versions: versions.unwrap_or_default() };
        Ok(())
    }

    /// Gives each gradient memory of its own: the next pass adds to it in place, and would add to others that lie there, too.
    fn part_gradients(&self) -> Result<()> {
        let on_device = self.sink.as_ref().and_then(|sink| sink.on_device());
        let parted = own_gradients(&self.inventory.parameters);
        self.or_end(parted.and_then(|_| on_device.map_or(Ok(()), |on_device| on_device.held())))
    }

    /// A step's last pass in a world of one, with what the passes `before` have left.
    fn alone(
        &self,
        loss: &Tensor,
        (weight, total): (Option<f64>, Option<f64>),
        before: StepWeight,
    ) -> Result<()> {
        let parameters = &self.inventory.parameters;
        let Some(total) = total else { return self.traced(loss) };
        check_weight_sum(total)?;
        if before == StepWeight::Nothing {
            return self.traced(loss);
        }
        match weight {
            Some(0.0) => void(parameters, || self.traced(loss))?,
            weight => self.traced(&scaled(loss, weight)?)?,
        }
        let _guard = tch::no_grad_guard();
        for mut gradient in own_gradients(parameters)? {
            drop(gradient.f_div_scalar_(total).map_err(torch)?);
        }
        Ok(())
    }

    /// An error if gradients are held for the next step, which a saved state, or another group, would lack.
    pub(crate) fn check_nothing_held(&self) -> Result<()> {
        if self.accumulated.weight == StepWeight::Nothing {
            return Ok(());
        }
        if !self.inventory.parameters.iter().any(|one| one.tensor.grad().defined()) {
            return Ok(()); // The program has dropped them.
        }
        Err(Error::invalid_argument(
            "a state was to be saved, or to change its group, in the middle of a step: gradients of backward_no_sync are held, and would be \
             missing in it",
        )
        .with_remedy(
            "save, or commit, between a step and the first backward_no_sync of the next; Ddp::drop_accumulated drops what is held",
        ))
    }

    /// Drops the gradients of [`backward_no_sync`](Self::backward_no_sync) since the last [`backward`](Self::backward), and so the step: the
    /// next pass begins another. All ranks call it together.
    ///
    /// # Errors
    /// Of an earlier call.
    pub fn drop_accumulated(&mut self) -> Result<()> {
        if std::mem::take(&mut self.accumulated).weight == StepWeight::Nothing {
            return Ok(());
        }
        self.sink.as_ref().map_or(Ok(()), |sink| sink.drop_held())?;
        self.inventory.parameters.iter().try_for_each(|one| shim::set_gradient(&one.tensor, None))
    }

    /// What is accumulated with one pass more. An error ends the step, and the group: the others wait for this rank's gradients.
    fn accumulate(&mut self, loss: &Tensor, weight: Option<f64>) -> Result<StepWeight> {
        let with = self.with_one_more(loss, weight);
        with.inspect_err(|_| self.accumulated = Accumulated::default())
    }

    fn with_one_more(&self, loss: &Tensor, weight: Option<f64>) -> Result<StepWeight> {
        let with = || {
            let (parameters, before) = (&self.inventory.parameters, &self.accumulated);
            // Types matter to weights alone.
            let specs = weight.map(|_| Inventory::specs(parameters)).unwrap_or_default();
            let step = before.weight.with(weight, self.group.rank(), &specs)?;
            weight.map_or(Ok(()), |_| check_wide(loss))?;
            match (before.weight, weight) {
                (StepWeight::Nothing, Some(_)) => check_zero(parameters)?,
                (StepWeight::Weighted(_), Some(_)) => check_unchanged(parameters, &before.versions)?,
                (StepWeight::Nothing | StepWeight::Unweighted, None) => {}
                // Refused above.
                (StepWeight::Unweighted, Some(_)) | (StepWeight::Weighted(_), None) => {}
            }
            Ok(step)
        };
        match &self.sink {
            Some(sink) => sink.call(|_| with()),
            None => with(),
        }
    }
}

/// The loss with which backward begins.
fn scaled(loss: &Tensor, weight: Option<f64>) -> Result<Tensor> {
    match weight {
        Some(weight) => loss.f_mul_scalar(weight).map_err(torch),
        None => Ok(loss.shallow_clone()),
    }
}

/// Runs a backward pass whose gradients do not count.
fn void(parameters: &[Named], backward: impl FnOnce() -> Result<()>) -> Result<()> {
    let before: Vec<Tensor> = parameters.iter().map(|one| one.tensor.grad()).collect();
    parameters.iter().try_for_each(|one| shim::set_gradient(&one.tensor, None))?;
    let outcome = backward();
    for (one, before) in parameters.iter().zip(&before) {
        shim::set_gradient(&one.tensor, before.defined().then_some(before))?;
    }
    outcome
}

/// An error if the loss is of 16 bits: its gradient begins as the weight, rounded to that type, while the sum of weights is exact.
fn check_wide(loss: &Tensor) -> Result<()> {
    let kind = loss.f_kind().map_err(torch)?;
    if !matches!(kind, Kind::Half | Kind::BFloat16) {
        return Ok(());
    }
    Err(Error::invalid_argument(format!("a loss of type {kind:?} is too narrow for weights"))
        .with_remedy("compute it in f32: `output.to_kind(Kind::Float)` before the loss"))
}

/// An error if a parameter has a gradient from before the step.
fn check_zero(parameters: &[Named]) -> Result<()> {
    for one in parameters {
        let gradient = one.tensor.grad();
        let any = |gradient: &Tensor| gradient.f_any()?.f_int64_value(&[]);
        if gradient.defined() && tch::no_grad(|| any(&gradient)).map_err(torch)? != 0 {
            return Err(Error::invalid_argument(format!(
                "parameter {} has a gradient from before this weighted step, which would be weighted, too",
                one.spec
            ))
            .with_remedy("call zero_grad before the step's first backward pass"));
        }
    }
    Ok(())
}

/// An error if a gradient was changed since the step's last pass.
fn check_unchanged(parameters: &[Named], versions: &[Option<i64>]) -> Result<()> {
    let now = self::versions(parameters)?;
    let Some(index) = now.iter().zip(versions).position(|(now, then)| now != then) else { return Ok(()) };
    Err(Error::invalid_argument(format!(
        "the gradient of parameter {} was changed between two backward passes of a weighted step",
        parameters[index].spec
    ))
    .with_remedy(
        "call zero_grad before a step's first pass alone, and change gradients after its last; to leave a step out, call Ddp::drop_accumulated",
    ))
}

/// How often each parameter's gradient was written, if there is one.
fn versions(parameters: &[Named]) -> Result<Vec<Option<i64>>> {
    let version = |one: &Named| {
        let gradient = one.tensor.grad();
        gradient.defined().then(|| gradient.f_internal_version().map_err(torch)).transpose()
    };
    parameters.iter().map(version).collect()
}
