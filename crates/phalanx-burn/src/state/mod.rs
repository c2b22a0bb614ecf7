//! A model, its optimizer, and whatever else the next step depends on, as one value: for elastic jobs and for checkpoints.

mod medium;
mod model;
mod moments;

use std::fmt;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use phalanx::checkpoint::{Saved, Snapshot};
use phalanx::elastic::{Parts, State};
use phalanx::{ProcessGroup, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

use self::medium::{Source, Target};
use crate::{Ddp, DdpOptions};

/// All that the next step of a training depends on: the model with its buffers, the optimizer with its state, and the
/// program's own `progress`, anything that serde can write, such as a step, an epoch and an
/// [`ElasticSampler`](phalanx::sampler::ElasticSampler).
///
/// # In an elastic job
///
/// It is a [`State`], for [`phalanx::elastic::run`]: what Horovod calls `TorchState(model, optimizer, epoch=0)`. Inside
/// the loop [`model`](Self::model) averages gradients over the group that the loop was called with; before and after it, it
/// is a world of one.
///
/// ```no_run
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::AdamWConfig;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use phalanx::elastic::{self, Context};
/// use phalanx::sampler::ElasticSampler;
/// use phalanx::{ProcessGroup, Result};
/// use phalanx_burn::TrainState;
///
/// fn train(context: &mut Context<'_, TrainState<Linear, ElasticSampler>>, group: &ProcessGroup) -> Result<()> {
///     let device = Device::flex().autodiff();
///     let xs = Tensor::<2>::random([10_000, 4], Distribution::Default, &device); // read them
///     while context.state.progress.epoch() < 10 {
///         let state = &mut *context.state;
///         let Some(batch) = state.progress.next_batch(64, group.rank(), group.world_size()) else {
///             state.progress.next_epoch();
///             continue;
///         };
///         let x = xs.clone().select(0, Tensor::from_data(batch.as_slice(), &device));
///         let loss = state.model.forward(|model| (model.forward(x.clone()) - x.sum_dim(1)).powi_scalar(2).mean())?;
///         let gradients = state.model.backward(&loss)?;
///         state.step(1e-2, gradients);
///         context.commit()?;
///     }
///     Ok(())
/// }
///
/// fn main() -> Result<()> {
///     let model = LinearConfig::new(4, 1).init(&Device::flex().autodiff());
///     let mut state = TrainState::new(model, AdamWConfig::new().init(), ElasticSampler::new(10_000))?;
///     elastic::run(&mut state, train)
/// }
/// ```
///
/// Each tensor is a part of its own: a worker that comes back is sent what has changed, and an error about replicas that have
/// drifted apart names the parameter. Parameters are known by their path in the module, not by their
/// [`ParamId`](burn::module::ParamId), which each process draws by itself; the optimizer's state finds its parameters
/// again on every rank.
///
/// # In checkpoints
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn::optim::AdamWConfig;
/// # use burn::tensor::Device;
/// use phalanx::checkpoint::Checkpoints;
/// use phalanx_burn::TrainState;
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("runs/digits");
///
/// let group = phalanx::init()?;
/// # let model = LinearConfig::new(4, 1).init(&Device::flex().autodiff());
/// # let optimizer = AdamWConfig::new().init();
/// let mut state = TrainState::new(model, optimizer, 0_u64)?;
/// let checkpoints = Checkpoints::open(&path, &group)?; // path: "runs/digits"
/// if let Some(saved) = checkpoints.newest()? {
///     state.load_from(&saved)?; // on every rank
/// }
/// // ... train ...
/// # state.progress = 100;
/// checkpoints.save(state.progress, |snapshot| state.save_to(snapshot))?;
/// checkpoints.finish()?;
/// # assert_eq!(checkpoints.newest()?.unwrap().step(), 100);
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// Tensors are in the safetensors file as `model.conv1.weight` and `optimizer.conv1.weight.momentum.moment_1`. A model with
/// other tensors, shapes or types is refused, with the first difference named.
///
/// A program that is not elastic trains with [`model`](Self::model) after [`with_group`](Self::with_group).
///
/// # Two networks
///
/// Networks that train in turns have a state each, with [names](Self::named) of their own; a [`State`] of the program
/// calls both in each of its methods.
///
/// # Limits
///
/// - The state of a [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer) is spread over the ranks, and would be lost with
///   one of them: it is none of this.
/// - Gradients that [`Ddp::backward_no_sync`] holds are not part of it: commit after a step.
/// - A [`SyncBatchNorm`](crate::SyncBatchNorm) keeps the group that it was made with, which in an elastic job ends.
/// - Random numbers, such as those of dropout, are each rank's own.
pub struct TrainState<M, T = ()> {
    /// The model.
    pub model: Ddp<M>,
    /// The optimizer, with its state.
    pub optimizer: ModuleOptimizer,
    /// Everything else.
    pub progress: T,
    /// In front of the names of all that is saved.
    name: String,
    options: DdpOptions,
    /// The group outside of the loop.
    alone: ProcessGroup,
}

impl<M: Module, T> TrainState<M, T> {
    /// Of these, in a world of one.
    ///
    /// # Errors
    /// As [`Ddp::new`].
    pub fn new(model: M, optimizer: ModuleOptimizer, progress: T) -> Result<Self> {
        let alone = ProcessGroup::alone()?;
        let (model, options) = (Ddp::new(model, &alone)?, DdpOptions::default());
        Ok(Self { model, optimizer, progress, name: String::new(), options, alone })
    }

    /// Has [`model`](Self::model) average gradients as `options` say, in each group.
    #[must_use]
    pub fn with_options(mut self, options: DdpOptions) -> Self {
        self.options = options;
        self
    }

    /// Is saved under names that begin with `name` and a dot, beside other states.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        self.name = format!("{name}.");
        self
    }

    /// Trains in `group` for good, as [`Ddp::new`] does: every rank takes over rank 0's model. For a program that is not
    /// elastic; all ranks call it together, before or after they load the same checkpoint.
    ///
    /// # Errors
    /// As [`Ddp::new`].
    pub fn with_group(mut self, group: &ProcessGroup) -> Result<Self> {
        self.model = Ddp::with_options(self.model.into_model(), group, self.options.clone())?;
        Ok(self)
    }

    /// [`Ddp::step`] with its optimizer.
    pub fn step(&mut self, learning_rate: impl Into<ModuleLearningRate>, gradients: GradientsParams) {
        self.model.step(&mut self.optimizer, learning_rate, gradients);
    }
}

impl<M: Module, T: Serialize + DeserializeOwned> TrainState<M, T> {
    /// Saves all of it in a checkpoint, for [`Checkpoints::save`](phalanx::checkpoint::Checkpoints::save).
    ///
    /// Running statistics, which each rank has for itself between a step and the next, are those of the rank that writes,
    /// which the others take over anyway.
    ///
    /// # Errors
    /// If a tensor or the progress cannot be written.
    pub fn save_to(&self, snapshot: &mut Snapshot) -> Result<()> {
        self.write(snapshot)
    }

    /// Becomes what [`save_to`](Self::save_to) has saved. Every rank calls it with what
    /// [`Checkpoints::newest`](phalanx::checkpoint::Checkpoints::newest) gives.
    ///
    /// # Errors
    /// If the checkpoint is of another model ([`is_mismatch`](phalanx::Error::is_mismatch)), or has something else than this
    /// `T`. The model is as it was then.
    pub fn load_from(&mut self, saved: &Saved) -> Result<()> {
        self.read(saved)
    }

    fn write(&self, target: &mut impl Target) -> Result<()> {
        model::save(&self.model, target, &format!("{}model", self.name))?;
        moments::save(&self.optimizer, self.model.state(), target, &format!("{}optimizer", self.name))?;
        target.value(&format!("{}progress", self.name), &self.progress)
    }

    fn read(&mut self, source: &impl Source) -> Result<()> {
        let progress = source.value(&format!("{}progress", self.name))?;
        let optimizer =
            moments::load(&self.optimizer, self.model.state(), source, &format!("{}optimizer", self.name))?;
        model::load(&mut self.model, source, &format!("{}model", self.name))?;
        (self.optimizer, self.progress) = (optimizer, progress);
        Ok(())
    }
}

impl<M: Module, T: Serialize + DeserializeOwned> State for TrainState<M, T> {
    fn save(&self, parts: &mut Parts) -> Result<()> {
        self.write(parts)
    }

    fn load(&mut self, parts: &Parts) -> Result<()> {
        self.read(parts)
    }

    fn enter(&mut self, group: &ProcessGroup) -> Result<()> {
        self.model.enter(group, &self.options)
    }

    fn leave(&mut self) {
        self.model.leave(&self.alone);
    }

    fn agree(&mut self) -> Result<()> {
        self.model.agree()
    }
}

impl<M: Module, T: fmt::Debug> fmt::Debug for TrainState<M, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainState")
            .field("model", &self.model)
            .field("progress", &self.progress)
            .finish_non_exhaustive()
    }
}
