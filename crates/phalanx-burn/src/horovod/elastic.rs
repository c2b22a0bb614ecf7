//! A model and its optimizer in a job whose workers come and go.

use std::fmt;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use phalanx::checkpoint::{Saved, Snapshot, training};
use phalanx::elastic::{Parts, State};
use phalanx::state::{StateReader, StateWriter};
use phalanx::{Caller, Error, ProcessGroup, Rank, Result};
use phalanx_horovod::{Horovod, Op};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{DistributedOptimizer, DistributedOptions};
use crate::alike;
use crate::constants;
use crate::ddp::held;
use crate::lr;
use crate::optimizer::OptimizerState;
use crate::parallel::{refuse_divided, refuse_units};
use crate::parameters::{Inventory, Select};
use crate::replicas;
use crate::state::{Begun, model, moments};

/// A model, its optimizer with its state, and other `progress` of the program, of any type that serde can serialize: what
/// [`phalanx_horovod::elastic`] commits, goes back to, and gives to workers that are new. Horovod's
/// `TorchState(model, optimizer, epoch=0)`.
///
/// ```no_run
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::AdamWConfig;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use phalanx_burn::horovod::{DistributedOptions, ModelState};
/// use phalanx_horovod::Horovod;
/// use phalanx_horovod::elastic::{self, ObjectState, State};
///
/// fn train(state: &mut State<'_, '_, ModelState<Linear, u64>>, hvd: &Horovod) -> phalanx::Result<()> {
///     let mut optimizer = state.distributed_optimizer(hvd, DistributedOptions::default())?;
///     while state.progress < 1000 {
///         let x = Tensor::<2>::random([8, 4], Distribution::Default, &Device::flex().autodiff()); // this rank's part of the batch
///         let loss = optimizer.forward(state.model(), |model| model.forward(x).mean());
///         optimizer.backward(&loss)?; // gradients are submitted while it runs
///         state.step(&mut optimizer, 0.01)?; // waits for their averages
///         state.progress += 1;
///         if state.progress.is_multiple_of(10) {
///             state.commit()?;
///         }
///     }
///     Ok(())
/// }
///
/// fn main() -> phalanx::Result<()> {
///     let model = LinearConfig::new(4, 1).init(&Device::flex().autodiff());
///     elastic::run(&mut ObjectState::new(ModelState::new(model, AdamWConfig::new().init(), 0)?), train)
/// }
/// ```
///
/// Each tensor is a separate part, named by its path in the module: a worker that comes back receives only what has changed.
/// Running statistics, such as those of batch norm, are those of rank 0 from each commit on. Gradients of backward passes that no
/// step has used yet are not included: commit after a step.
#[doc(alias("TorchState", "hvd.elastic.TorchState"))]
pub struct ModelState<M, T = ()> {
    /// Only a panic of the optimizer takes it.
    model: Option<M>,
    optimizer: ModuleOptimizer,
    /// Other state of the program.
    pub progress: T,
    inventory: Inventory,
    /// While the job trains.
    group: Option<ProcessGroup>,
}

impl<M: Module, T> ModelState<M, T> {
    /// A state of these.
    ///
    /// # Errors
    /// If no parameter of the model needs a gradient, or it is on a device without autodiff, or on one that this build does not know; if it
    /// has [units](crate::parallel::fsdp::FullySharded) or [divided](crate::parallel::tensor) layers, of which each rank has a part.
    pub fn new(model: M, optimizer: ModuleOptimizer, progress: T) -> Result<Self> {
        refuse_units(&model, "ModelState")?;
        refuse_divided(&model, "ModelState")?;
        let inventory = Inventory::of(&model)?;
        let model = inventory.ties.retie(model);
        Ok(Self { model: Some(model), optimizer, progress, inventory, group: None })
    }

    /// The model.
    pub fn model(&self) -> &M {
        held(&self.model)
    }

    /// Burn's optimizer, with its state.
    pub fn optimizer(&self) -> &ModuleOptimizer {
        &self.optimizer
    }

    /// What averages the gradients of the [model](Self::model) over the workers of `hvd`, for [`step`](Self::step). Make it anew
    /// for each handle. The optimizer's state stays here.
    ///
    /// # Errors
    /// As [`DistributedOptimizer::with_options`]. With [`Op::Adasum`], where each rank's optimizer has a state of its own, which
    /// would be lost with the rank.
    pub fn distributed_optimizer(
        &self,
        hvd: &Horovod,
        options: DistributedOptions,
    ) -> Result<DistributedOptimizer> {
        if options.op == Op::Adasum {
            return Err(Error::invalid_argument(
                "with Op::Adasum each rank's optimizer has a state of its own, which cannot outlive the rank",
            )
            .with_remedy("train an elastic job with Op::Average"));
        }
        let stateless = OptimizerState::empty().load(&self.optimizer, &self.inventory.state)?;
        DistributedOptimizer::with_options(stateless, self.model(), hvd, options)
    }

    /// Waits for the gradients that `averaging` has submitted, and lets the optimizer change the model by them.
    ///
    /// # Errors
    /// As [`DistributedOptimizer::synchronize`]. Each of these ends the job: if that has given the gradients already, with which [`apply`](Self::apply) is
    /// to be called; if a learning rate is infinite or not a number.
    pub fn step(
        &mut self,
        averaging: &mut DistributedOptimizer,
        learning_rate: impl Into<ModuleLearningRate>,
    ) -> Result<()> {
        let rates: ModuleLearningRate = learning_rate.into();
        let gradients = averaging.synchronize_step(&rates, self.model())?;
        self.apply(rates, gradients)
    }

    /// Lets the optimizer change the model by `gradients`, which [`DistributedOptimizer::synchronize`] gave and which may have been
    /// clipped since.
    ///
    /// # Errors
    /// If a learning rate is infinite or not a number, which ends the job's group.
    pub fn apply(
        &mut self,
        learning_rate: impl Into<ModuleLearningRate>,
        gradients: GradientsParams,
    ) -> Result<()> {
        let rates: ModuleLearningRate = learning_rate.into();
        if let Err(error) = lr::check(&rates, &self.inventory.parameters) {
            // The others step, and wait for this rank in the next one.
            if let Some(group) = &self.group {
                group.abort(error.clone());
            }
            return Err(error);
        }
        let optimizer = &mut self.optimizer;
        let model = self.model.take().map(|model| optimizer.step(rates, model, gradients));
        self.model = model.map(|model| self.inventory.ties.retie(model));
        Ok(())
    }
}

impl<M: Module, T: Serialize + DeserializeOwned> ModelState<M, T> {
    /// Saves all of it in a checkpoint, for [`Checkpoints::save`](phalanx::checkpoint::Checkpoints::save).
    ///
    /// # Errors
    /// If a tensor or the progress cannot be written, or the progress could not be loaded again.
    pub fn save_to(&self, snapshot: &mut Snapshot) -> Result<()> {
        self.write(snapshot)
    }

    /// Loads what [`save_to`](Self::save_to) has saved, on every rank.
    ///
    /// # Errors
    /// If it is of another model or optimizer ([`is_mismatch`](Error::is_mismatch)), or its `progress` is not of this type `T`, or is an
    /// [`ElasticSampler`](phalanx::sampler::ElasticSampler) of another order than this one. Nothing is changed then. A checkpoint after
    /// a step above 0 without anything of an optimizer is that of another one, unless this one keeps nothing.
    pub fn load_from(&mut self, saved: &Saved) -> Result<()>
    where
        T: 'static,
    {
        training::check_progress(&self.progress, saved, "progress")?;
        self.read(saved, Begun::after(saved.step()))
    }

    fn write(&self, writer: &mut impl StateWriter) -> Result<()> {
        training::check_readable(&self.progress, "progress")?;
        self.settle_buffers();
        model::save((self.model(), Select::All), &self.inventory.state, writer, "model")?;
        moments::save(&self.optimizer, &self.inventory.state, writer, ("optimizer", "optimizer"))?;
        writer.value("progress", &self.progress)
    }

    fn read(&mut self, reader: &impl StateReader, begun: Begun) -> Result<()> {
        let progress = reader.value("progress")?;
        let parts = (["optimizer".to_owned()], "optimizer");
        let elements = model::read(&self.inventory.state, reader, "model")?;
        model::check_tied(&self.inventory.state, &self.inventory.parameters, &elements)?;
        let model = (self.model(), self.inventory.state.as_slice());
        let optimizer = moments::load(&self.optimizer, model, reader, begun, parts, |_| true)?;
        self.settle_buffers();
        let model = self.model.take().map(|model| model::loaded(model, Select::All, elements));
        self.model = model.map(|model| self.inventory.ties.retie(model));
        (self.optimizer, self.progress) = (optimizer, progress);
        Ok(())
    }

    /// Burn updates running statistics late; such an update would overwrite what is loaded.
    fn settle_buffers(&self) {
        if !self.inventory.buffers.is_empty() {
            drop(self.model().valid());
        }
    }
}

impl<M: Module, T: Serialize + DeserializeOwned> State for ModelState<M, T> {
    fn save(&self, parts: &mut Parts) -> Result<()> {
        self.write(parts)
    }

    fn load(&mut self, parts: &Parts) -> Result<()> {
        // A commit does not say how many steps were done.
        self.read(parts, Begun::Unknown)
    }

    fn enter(&mut self, group: &ProcessGroup) -> Result<()> {
        self.group = Some(group.clone());
        // The state of the optimizer is the same by now; its settings are the program's.
        let replica = (self.model(), self.inventory.parameters.as_slice());
        let group = group.in_call(Caller::ElasticRun);
        constants::check(&group.all_gather_object(&self.inventory.constants)?)?;
        alike::Watch::default().compare(&self.optimizer, replica, None, &group)
    }

    fn leave(&mut self) {
        self.group = None;
    }

    fn agree(&mut self) -> Result<()> {
        let Some(group) = self.group.as_ref().filter(|_| !self.inventory.buffers.is_empty()) else {
            return Ok(());
        };
        let buffers = Select::Only(&self.inventory.buffers);
        self.model = Some(replicas::from_rank(self.model().clone(), group, Rank::MAIN, buffers)?);
        Ok(())
    }
}

impl<M, T: fmt::Debug> fmt::Debug for ModelState<M, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelState")
            .field("parameters", &self.inventory.parameters.len())
            .field("progress", &self.progress)
            .finish_non_exhaustive()
    }
}
