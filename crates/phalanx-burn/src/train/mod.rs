//! Burn's own trainer over many processes. Needs the feature `train`.
//!
//! A program that trains with [`SupervisedTraining`] becomes one of several processes by its training strategy:
//!
//! ```no_run
//! # use burn::train::{SupervisedTraining, Learner, LearnerModel};
//! # use phalanx_burn::train::{DdpStrategy, Outputs};
//! # fn program<M: LearnerModel>(training: SupervisedTraining<M>, learner: Learner<M>) -> phalanx::Result<()>
//! # where
//! #     <M as burn::train::TrainStep>::Output: Outputs,
//! #     <M as burn::train::InferenceStep>::Output: Outputs,
//! # {
//! let group = phalanx::init()?;
//! let result = training
//!     .with_training_strategy(DdpStrategy::new(&group).into()) // this line
//!     .launch(learner);
//! # Ok(())
//! # }
//! ```
//!
//! Start it with [`phalanx::spawn`](phalanx::spawn()) or a launcher; alone it is a world of one.
//!
//! [`SupervisedTraining`]: burn::train::SupervisedTraining

mod average;
mod exchange;
mod outputs;
mod session;

use std::fmt;

use burn::tensor::Device;
use burn::train::{
    EventProcessorTraining, InferenceStep, Learner, LearnerModel, LearningResult, SupervisedLearningStrategy,
    SupervisedTrainingEventProcessor, TrainLoader, TrainStep, TrainingComponents, TrainingStrategy,
    ValidLoader,
};
use phalanx::{Caller, ProcessGroup};

pub use self::outputs::{Outputs, concatenated, mean_of};
use self::session::Session;

/// Distributed data-parallel training as a strategy of Burn's trainer.
///
/// Every rank runs the program; what differs from one process:
///
/// - **Data.** Each rank trains on its own stretch of the training set, all equally long: up to `world_size - 1`
///   samples at the end are left out. Of the validation set nothing is. Batch sizes are per rank.
/// - **Model.** Parameters and buffers become rank 0's at the beginning, and gradients are averaged over all ranks, in
///   buckets that travel while backward runs. With `grads_accumulation` the sums are averaged after the last part.
///   Before each validation all ranks take over rank 0's buffers.
/// - **Metrics** are those of all ranks' samples: in each step rank 0 gets all outputs, puts them together, and
///   computes the metrics from the whole. That is what [`Outputs`] is for; the outputs that come with Burn have it.
/// - **Dashboard, logs and checkpoints** are rank 0's alone. All ranks must be given the same directory where it can be
///   read by all: to continue from a checkpoint, each reads it.
/// - **Early stopping** is decided by rank 0, from the metrics of all, and **an interruption** of any rank ends all.
/// - **A failure** of any rank ends the training of all: [`LearningResult::error`] has the cause.
///
/// A model's `step` must run backward once, on the whole model. The number of steps in an epoch is that of the rank
/// with the fewest batches.
#[derive(Clone)]
pub struct DdpStrategy {
    group: ProcessGroup,
    device: Device,
}

impl DdpStrategy {
    /// Trains on the processor, with all ranks of `group`.
    pub fn new(group: &ProcessGroup) -> Self {
        Self { group: group.in_call(Caller::DdpStrategy), device: Device::flex().autodiff() }
    }

    /// Trains on `device`, such as one with gradient checkpointing.
    #[must_use]
    pub fn on(self, device: &Device) -> Self {
        let device = if device.is_autodiff() { device.clone() } else { device.clone().autodiff() };
        Self { device, ..self }
    }
}

impl<M: LearnerModel> SupervisedLearningStrategy<M> for DdpStrategy
where
    <M as TrainStep>::Output: Outputs,
    <M as InferenceStep>::Output: Outputs,
{
    fn train(
        &self,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        components: TrainingComponents<M>,
    ) -> LearningResult<M> {
        if self.group.rank().is_main() {
            return Shown(self).train(learner, train, valid, components);
        }
        let starting_epoch = components.checkpoint.unwrap_or(0) + 1;
        let interrupter = components.interrupter.clone();
        let (model, processor) = self.fit(components, learner, train, valid, starting_epoch);
        LearningResult {
            model: model.valid(),
            renderer: processor.renderer(),
            interrupted: interrupter.interruption(),
            error: interrupter.error(),
        }
    }

    fn fit(
        &self,
        components: TrainingComponents<M>,
        mut learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        learner.fork(&self.device);
        Session::new(&self.group, &self.device, learner, components).run(train, valid, starting_epoch)
    }
}

/// Rank 0's strategy: what Burn does before and after `fit` is for somebody who looks on.
struct Shown<'a>(&'a DdpStrategy);

impl<M: LearnerModel> SupervisedLearningStrategy<M> for Shown<'_>
where
    <M as TrainStep>::Output: Outputs,
    <M as InferenceStep>::Output: Outputs,
{
    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        self.0.fit(components, learner, train, valid, starting_epoch)
    }
}

impl<M: LearnerModel> From<DdpStrategy> for TrainingStrategy<M>
where
    <M as TrainStep>::Output: Outputs,
    <M as InferenceStep>::Output: Outputs,
{
    fn from(strategy: DdpStrategy) -> Self {
        Self::Custom(std::sync::Arc::new(strategy))
    }
}

impl fmt::Debug for DdpStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DdpStrategy").field("group", &self.group).field("device", &self.device).finish()
    }
}
