//! Burn's own trainer over many processes. Needs the feature `train`.
//!
//! A program that trains with [`SupervisedTraining`] becomes one of several processes through its training strategy:
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
//! let strategy = DdpStrategy::new(&group); // before: `strategy.sampled(dataset, seed)` for the training loader
//! let result = training
//!     .with_training_strategy(strategy.into()) // this line
//!     .launch(learner);
//! # Ok(())
//! # }
//! ```
//!
//! Start it with `phalanx::spawn` or a launcher; alone it is a world of one.
//!
//! [`SupervisedTraining`]: burn::train::SupervisedTraining

mod average;
mod drift;
mod exchange;
pub(crate) mod loaders;
mod outputs;
mod samples;
mod session;

use std::fmt;
use std::sync::{Arc, Weak};

use burn::data::dataset::Dataset;
use burn::tensor::Device;
use burn::train::{
    EventProcessorTraining, InferenceStep, Learner, LearnerModel, LearningResult, SupervisedLearningStrategy,
    SupervisedTrainingEventProcessor, TrainLoader, TrainStep, TrainingComponents, TrainingStrategy,
    ValidLoader,
};
use parking_lot::Mutex;
use phalanx::reducer::hooks::CommHook;
use phalanx::{Caller, ProcessGroup};

pub use self::outputs::{Outputs, concatenated, mean_of, read};
pub use self::samples::Sampled;
use self::samples::Shard;
use self::session::Session;
use crate::DdpOptions;

/// Distributed data-parallel training as a strategy of Burn's trainer.
///
/// Every rank runs the program. The differences to one process:
///
/// - **Data.** [`sampled`](Self::sampled) distributes the training set again in each epoch, as a
///   [`DistributedSampler`](phalanx::sampler::DistributedSampler) does. A loader of any other data set is divided into
///   as many equal ranges as there are ranks, which rotate from epoch to epoch; up to `world_size - 1` samples at the
///   end are left out. The validation set is divided completely. A loader that is divided already, by a `group` or a
///   sampler of its own, is refused. Batch sizes are per rank.
/// - **Model.** Parameters and buffers become rank 0's at the beginning. Gradients are averaged over all ranks, in
///   buckets that are sent while backward runs. With `grads_accumulation` the sums are averaged after the last part.
///   Before each step all ranks take over rank 0's buffers, unless [`broadcast_buffers`](DdpOptions::broadcast_buffers) says
///   otherwise. A validation is always that of rank 0's model.
/// - **Metrics** are those of all ranks' samples: in each step rank 0 alone gets all outputs, merges them, and computes
///   the metrics of the whole. The trait [`Outputs`] does that; Burn's own outputs implement it.
/// - **Metrics' logs and checkpoints** are written by rank 0 alone. All ranks must get the same directory, and be
///   able to read it: to resume from a checkpoint, each rank reads it. Burn's application log, `experiment.log`, has the lines of all ranks:
///   `.with_application_logger(None)` on the others leaves it to rank 0.
/// - **The dashboard** of Burn's feature `tui` needs the terminal's keyboard, which workers do not have: give
///   `.renderer(Box::new(CliMetricsRenderer::new()))` if the program is started by `phalanx::spawn`.
/// - **Early stopping** is decided by rank 0, from the metrics of all. **An interruption** of any rank ends all.
/// - **A failure** of any rank ends the training of all: [`LearningResult::error`] has the cause on every rank, that of
///   the lowest rank if several fail.
///
/// - **Settings.** All ranks give the same: the same optimizer, scheduler, numbers of epochs and samples, and the same checkpoint to resume from.
///   The numbers are compared at the beginning, and learning rates after the first step and every 32 steps. Burn's learner does not show its optimizer, so the
///   ranks compare after each epoch what it has made of the parameters. A difference ends the training of all.
///
/// A model of which each rank has a part, as of [units](crate::parallel::fsdp::FullySharded) and [divided](crate::parallel::tensor) layers, is
/// refused: checkpoints would be rank 0's part alone.
///
/// A model's `step` must run backward once, on the whole model. It sees no gradients, which are on their way to the average then: what
/// clips or changes them belongs into the optimizer, or into [`TrainStep::optimize`], which gets the averages. The number of steps in an
/// epoch is that of the rank with the fewest batches; if others have some left, as with another batch size, a warning of rank 0 says so.
#[derive(Clone)]
pub struct DdpStrategy {
    group: ProcessGroup,
    device: Device,
    options: DdpOptions,
    hook: Option<Arc<MakeHook>>,
    /// The data sets of [`sampled`](Self::sampled), shared by all clones.
    shards: Arc<Mutex<Vec<Weak<Shard>>>>,
}

/// Makes a hook for each training.
type MakeHook = dyn Fn() -> Box<dyn CommHook> + Send + Sync;

impl DdpStrategy {
    /// Trains on the processor, with all ranks of `group`.
    pub fn new(group: &ProcessGroup) -> Self {
        Self {
            group: group.in_call(Caller::DdpStrategy),
            device: Device::flex().autodiff(),
            options: DdpOptions::default(),
            hook: None,
            shards: Arc::default(),
        }
    }

    /// Trains on `device`, such as one with gradient checkpointing.
    #[must_use]
    pub fn on(self, device: &Device) -> Self {
        let device = if device.is_autodiff() { device.clone() } else { device.clone().autodiff() };
        Self { device, ..self }
    }

    /// Averages gradients as `options` say: unused parameters, sizes of buckets, views.
    #[must_use]
    pub fn with_options(self, options: DdpOptions) -> Self {
        Self { options, ..self }
    }

    /// Averages buckets by the hooks that `hook` makes; see [`Ddp::register_comm_hook`](crate::Ddp::register_comm_hook). A hook that does not average over
    /// all ranks, as [`PostLocalSgd`](phalanx::reducer::hooks::PostLocalSgd), is an error of the training: Burn's learner has no step that averages the models.
    ///
    /// ```
    /// use phalanx::reducer::hooks::Compressed;
    /// # let group = phalanx::init()?;
    /// let strategy = phalanx_burn::train::DdpStrategy::new(&group).with_comm_hook(Compressed::bf16);
    /// # drop(strategy);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    #[must_use]
    pub fn with_comm_hook<H: CommHook + 'static>(self, hook: impl Fn() -> H + Send + Sync + 'static) -> Self {
        Self { hook: Some(Arc::new(move || Box::new(hook()))), ..self }
    }

    /// The training set for this rank: in each epoch the samples that a
    /// [`DistributedSampler`](phalanx::sampler::DistributedSampler) with this `seed` gives it, different ones in each
    /// epoch and in a different order. Make the training loader from it, without `shuffle`. Every rank gets equally
    /// many; if the samples cannot be divided evenly, some of the first are repeated.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
    /// # use burn::data::dataset::Dataset;
    /// # fn program<D: Dataset<usize> + 'static, B: Batcher<usize, usize> + 'static>(digits: D, batcher: B)
    /// # -> phalanx::Result<Arc<dyn DataLoader<usize>>> {
    /// # use phalanx_burn::train::DdpStrategy;
    /// let group = phalanx::init()?;
    /// let strategy = DdpStrategy::new(&group);
    /// let digits = strategy.sampled(digits, 42);
    /// let loader = DataLoaderBuilder::new(batcher).batch_size(64).build(digits);
    /// # Ok(loader)
    /// # }
    /// ```
    ///
    /// It may be called for several data sets, for example one more for an evaluation of the program's own: all of them are distributed
    /// again in each epoch. The validation loader reads the whole data set: the strategy divides it, and refuses one of these. While there is
    /// one, the strategy, and each clone of it, assumes that the training loader reads one of them, and refuses a loader with another number
    /// of samples.
    pub fn sampled<I, D: Dataset<I>>(&self, dataset: D, seed: u64) -> Sampled<D> {
        let shard = Arc::new(Shard::new(dataset.len(), &self.group, seed));
        self.shards.lock().push(Arc::downgrade(&shard));
        Sampled::new(dataset, shard)
    }

    /// The data sets of [`sampled`](Self::sampled) that still exist.
    fn living_shards(&self) -> Vec<Arc<Shard>> {
        let mut shards = self.shards.lock();
        shards.retain(|shard| shard.strong_count() > 0);
        shards.iter().filter_map(Weak::upgrade).collect()
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
        Session::new(self, learner, components).run(train, valid, starting_epoch)
    }
}

/// Rank 0's strategy: Burn's actions before and after `fit`, such as the dashboard, are for one observer.
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
        Self::Custom(Arc::new(strategy))
    }
}

impl fmt::Debug for DdpStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DdpStrategy")
            .field("group", &self.group)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
