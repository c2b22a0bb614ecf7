//! Averages the model itself, for replicas that train independently for several steps.

use burn::module::Module;
use phalanx::{Error, Result};

use crate::Ddp;

/// Averages the parameters of all replicas every few steps: PyTorch's `PeriodicModelAverager`.
///
/// It belongs to the hook [`PostLocalSgd`](phalanx::reducer::hooks::PostLocalSgd), whose replicas drift apart:
///
/// ```
/// # use burn::{nn::Linear, optim::ModuleOptimizer, tensor::Tensor};
/// # fn train(mut ddp: phalanx_burn::Ddp<Linear>, mut optimizer: ModuleOptimizer, batches: Vec<Tensor<2>>)
/// # -> phalanx::Result<()> {
/// use phalanx::reducer::hooks::PostLocalSgd;
/// use phalanx_burn::PeriodicModelAverager;
///
/// ddp.register_comm_hook(PostLocalSgd::new(1000))?; // gradients are averaged for 1000 steps,
/// let mut averager = PeriodicModelAverager::new(4)?.warmup_steps(1000); // then the model every 4th step
/// for batch in batches {
///     let loss = ddp.forward(|model| model.forward(batch).mean())?;
///     let gradients = ddp.backward(&loss)?;
///     ddp.step(&mut optimizer, 1e-3, gradients)?;
///     averager.step(&mut ddp)?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// The optimizer's state and buffers are not averaged, as in PyTorch.
///
/// How many steps there have been decides when the next average is due. [`TrainState::with_averager`](crate::TrainState::with_averager)
/// makes that a part of checkpoints.
#[derive(Clone, Debug)]
pub struct PeriodicModelAverager {
    period: u64,
    warmup_steps: u64,
    step: u64,
}

impl PeriodicModelAverager {
    /// Averages every `period` steps.
    ///
    /// # Errors
    /// If `period` is 0.
    pub fn new(period: u64) -> Result<Self> {
        if period == 0 {
            return Err(Error::invalid_argument("the period of a model averager is at least 1 step"));
        }
        Ok(Self { period, warmup_steps: 0, step: 0 })
    }

    /// Leaves out the first `steps` steps, in which gradients are averaged.
    pub fn warmup_steps(mut self, steps: u64) -> Self {
        self.warmup_steps = steps;
        self
    }

    /// How many steps there have been.
    pub(crate) fn steps(&self) -> u64 {
        self.step
    }

    /// Goes on after so many steps.
    pub(crate) fn resume_at(&mut self, steps: u64) {
        self.step = steps;
    }

    /// Call it after a step of the optimizer. Returns whether the model was averaged. All ranks call it together.
    ///
    /// # Errors
    /// As [`Ddp::average_parameters`].
    pub fn step<M: Module>(&mut self, ddp: &mut Ddp<M>) -> Result<bool> {
        let after = self.step.checked_sub(self.warmup_steps);
        self.step += 1;
        let due = after.is_some_and(|after| after.is_multiple_of(self.period));
        if due {
            ddp.average_parameters()?;
        }
        Ok(due)
    }
}
