//! A model, its optimizer, and everything else that the next step depends on, as one value: for elastic jobs and for
//! checkpoints.

pub(crate) mod fit;
pub(crate) mod model;
pub(crate) mod moments;
mod schedule;
mod storage;

use std::fmt;

use burn::lr_scheduler::module_lr_scheduler::{ModuleLearningRate, ModuleLrScheduler};
use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::Tensor;
use phalanx::checkpoint::training::{self, TrainingState};
use phalanx::checkpoint::{Checkpoints, Saved, Snapshot};
use phalanx::elastic::{Context, Parts, State, Step};
use phalanx::join::{JoinGroup, JoinOptions};
use phalanx::reducer::hooks::HookState;
use phalanx::reducer::{broadcast_bytes, verify_description};
use phalanx::sampler::ElasticSampler;
use phalanx::state::{StateReader, StateWriter};
use phalanx::{Caller, Communicator, Error, ProcessGroup, Rank, Result, WorldSize};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub(crate) use self::fit::Begun;
pub(crate) use self::storage::Layout;
use crate::ddp::Averaging;
use crate::gradients::{Synced, SyncedGradients};
use crate::parallel::refuse_divided;
use crate::parameters::Select;
use crate::{Ddp, DdpOptions, PeriodicModelAverager, alike, optimizer};

/// The most bytes of a scheduler's position that a rank accepts from another.
const MAX_POSITION_BYTES: usize = 1 << 20;

/// Everything that the next step of a training depends on: the model with its buffers, the optimizer with its state,
/// the number of steps taken, a learning-rate [scheduler](Self::with_scheduler) and a [model averager](Self::with_averager) if there
/// are any, what a [communication hook](Ddp::register_comm_hook) such as PowerSGD keeps from step to step, and the program's own
/// `progress`, of any type that serde can serialize. With an [`ElasticSampler`] as `progress` it includes the position
/// in the data: the epoch, and the samples of it that were distributed. Training can then resume in the middle of an
/// epoch, with any number of ranks, also if the job is not elastic.
///
/// # In an elastic job
///
/// It is a [`State`], for [`phalanx::elastic::run`], like Horovod's `TorchState(model, optimizer, epoch=0)`. Inside the
/// loop [`model`](Self::model) averages gradients over the current group; before and after the loop it is in a world of
/// one.
///
/// ```no_run
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::AdamWConfig;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use phalanx::elastic::{self, Context};
/// use phalanx::sampler::{ElasticSampler, Tail};
/// use phalanx::{Error, ProcessGroup, Result};
/// use phalanx_burn::TrainState;
///
/// fn train(context: &mut Context<'_, TrainState<Linear, ElasticSampler>>, _: &ProcessGroup) -> Result<()> {
///     let device = Device::flex().autodiff();
///     let xs = Tensor::<2>::random([10_000, 4], Distribution::Default, &device); // read them
///     while context.state.progress.epoch() < 10 {
///         let (rank, world) = (context.rank(), context.world_size()); // in every step anew
///         let state = &mut *context.state;
///         let Some(batch) = state.progress.next_batch(64, rank, world) else {
///             state.progress.next_epoch();
///             continue;
///         };
///         let x = xs.clone().select(0, Tensor::from_data(batch.as_slice(), &device));
///         let loss = state.model.forward(|model| (model.forward(x.clone()) - x.sum_dim(1)).powi_scalar(2).mean())?;
///         let averaged = TrainState::backward(context, &loss)?; // again among the survivors, if a worker dies in it
///         context.state.progress.put_back(&averaged.missing);   // the dead rank's samples come again
///         context.state.step(1e-2, averaged.value)?;
///         context.commit()?;
///     }
///     Ok(())
/// }
///
/// fn main() -> Result<()> {
///     let model = LinearConfig::new(4, 1).init(&Device::flex().autodiff());
///     let sampler = ElasticSampler::new(10_000).tail(Tail::Repeat); // batches of a step are equally long, and never empty
///     let mut state = TrainState::new(model, AdamWConfig::new().init(), sampler)?;
///     elastic::run(&mut state, train)
/// }
/// ```
///
/// Each tensor is a separate part: a worker that comes back receives only what has changed, and an error about replicas
/// that have drifted apart names the parameter. Parameters are identified by their path in the module, not by their
/// [`ParamId`](burn::module::ParamId), which is random in each process; so the optimizer's state finds its parameters
/// on every rank.
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
/// let mut state = TrainState::new(model, optimizer, 0_u64)?.with_group(&group)?;
/// let checkpoints = Checkpoints::open(&path, &group)?; // path: "runs/digits"
/// state.resume(&checkpoints)?; // from the newest, if there is any
/// // ... train, with state.model.forward(..), state.model.backward(..), state.step(..) ...
/// state.checkpoint(&checkpoints)?;
/// checkpoints.finish()?;
/// # assert_eq!(checkpoints.newest()?.unwrap().step(), 0);
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// Tensors are in the safetensors file as `model.conv1.weight` and `optimizer.conv1.weight.momentum.moment_1`. A
/// checkpoint of a model with other tensors, shapes or types is refused; the error names the first difference.
///
/// What this state has and the checkpoint lacks is an error with its name, and so is the reverse: a scheduler, an averager, a
/// communication hook, and of the optimizer each tensor, as when AdamW is to continue from what SGD has saved. A parameter that has never had
/// a gradient has no moments, in a checkpoint either. Optimizers with the same fields, such as [`AdamW`](burn::optim::AdamW) and
/// [`FusedAdamW`](crate::FusedAdamW), continue from each other's. Settings such as betas, decay and momentum are the program's, as Burn's records
/// do not have them: all ranks give the optimizer the same, also when they resume.
///
/// With an [`ElasticSampler`] as `progress`, a checkpoint whose sampler has another number of samples, seed, `shuffle` or tail is refused.
/// To continue with another sampler, resume with the old one, and set `progress` then. For a sampler that is a field of `progress` call
/// [`check_resumes`](ElasticSampler::check_resumes).
///
/// A communication hook may be registered before a checkpoint is loaded, or after. What each rank has of its own in it, such as
/// PowerSGD's losses, is in checkpoints, and comes back if as many ranks load it, after [`with_group`](Self::with_group); otherwise it
/// begins anew, with a warning. It begins anew without one in the rounds of an elastic job.
///
/// A program that is not elastic trains with [`model`](Self::model) after [`with_group`](Self::with_group). For other
/// names, or its own step numbers, it uses [`save_to`](Self::save_to) and [`load_from`](Self::load_from).
///
/// # Two networks
///
/// Networks that train in turns have a state each, with their own [names](Self::named); a [`State`] of the program
/// calls both in each of its methods.
///
/// # Limits
///
/// - The state of a [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer) is not included: it is divided among
///   the ranks, and would be lost with one of them. Save it beside, in a [sharded](Self::checkpoint_sharded)
///   checkpoint.
/// - Of ranks that train by themselves ([`PostLocalSgd`](phalanx::reducer::hooks::PostLocalSgd)) the model is saved after an average
///   alone; [`checkpoint`](Self::checkpoint) is an error otherwise. The moments are those of rank 0, which averages do not change.
/// - Gradients that [`Ddp::backward_no_sync`] holds are not included: a save or a commit in the middle of a step is an error, and loading
///   drops them.
/// - A [`SyncBatchNorm`](crate::SyncBatchNorm) changes its group with the model only if both share a
///   [handle](Self::sharing); otherwise it keeps the group that it was made with, which in an elastic job ends.
/// - Random number generators, such as that of dropout, belong to each rank and are not included.
pub struct TrainState<M, T = ()> {
    /// The model.
    pub model: Ddp<M>,
    /// The optimizer, with its state.
    pub optimizer: ModuleOptimizer,
    /// The learning rate of each [scheduled step](Self::scheduled_step).
    pub scheduler: Option<ModuleLrScheduler>,
    /// Averages the model after steps.
    pub averager: Option<PeriodicModelAverager>,
    /// Other state of the program.
    pub progress: T,
    steps: u64,
    /// The prefix of the names of everything that is saved.
    name: String,
    options: DdpOptions,
    /// The group outside of the loop.
    alone: ProcessGroup,
    /// Whether the ranks have compared their optimizers' settings since the state has entered a group of an elastic job.
    is_compared: bool,
}

impl<M: Module, T> TrainState<M, T> {
    /// A state of these, in a world of one.
    ///
    /// # Errors
    /// As [`Ddp::new`]; and if layers are [divided](crate::parallel::tensor) among ranks, which
    /// [`ShardedState`](crate::parallel::ShardedState) saves.
    pub fn new(model: M, optimizer: ModuleOptimizer, progress: T) -> Result<Self> {
        // Rank 0 saves what it has, and all load it.
        refuse_divided(&model, "TrainState")?;
        let alone = ProcessGroup::alone()?;
        let (model, options) = (Ddp::new(model, &alone)?, DdpOptions::default());
        let (name, scheduler, averager) = (String::new(), None, None);
        Ok(Self {
            model,
            optimizer,
            scheduler,
            averager,
            progress,
            steps: 0,
            name,
            options,
            alone,
            is_compared: true,
        })
    }

    /// Makes [`scheduled_step`](Self::scheduled_step) use the learning rates of `scheduler`, which is saved and loaded
    /// with the rest: one of Burn's, or a [`ScaledLrScheduler`](crate::ScaledLrScheduler).
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::AdamWConfig;
    /// # use burn::tensor::Device;
    /// use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
    /// use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
    /// use burn::lr_scheduler::sequential::SequentialLrSchedulerConfig;
    /// use phalanx_burn::TrainState;
    ///
    /// # let model = LinearConfig::new(4, 1).init(&Device::flex().autodiff());
    /// # let optimizer = AdamWConfig::new().init();
    /// let warm_up = LinearLrSchedulerConfig::new(1e-4, 1e-2, 100);
    /// let decay = CosineAnnealingLrSchedulerConfig::new(1e-2, 900);
    /// let rates = SequentialLrSchedulerConfig::new(vec![warm_up.into(), decay.into()], vec![100]);
    /// let state = TrainState::new(model, optimizer, ())?.with_scheduler(rates.init().unwrap());
    /// # drop(state);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    #[must_use]
    pub fn with_scheduler(mut self, scheduler: impl Into<ModuleLrScheduler>) -> Self {
        self.scheduler = Some(scheduler.into());
        self
    }

    /// Lets `averager` average the model after each [step](Self::step) after which it is due. It is saved and loaded with the rest.
    #[must_use]
    pub fn with_averager(mut self, averager: PeriodicModelAverager) -> Self {
        self.averager = Some(averager);
        self
    }

    /// Makes [`model`](Self::model) average gradients as `options` say, in each group. If it comes after
    /// [`with_group`](Self::with_group), all ranks call it together.
    ///
    /// # Errors
    /// As [`Ddp::new`].
    pub fn with_options(mut self, options: DdpOptions) -> Result<Self> {
        self.options = options;
        let (group, ranks) = (self.model.group().clone(), self.model.world_size());
        let averaging = self.model.averaging().clone();
        self.moved(group, averaging, ranks)
    }

    /// Makes the [model](Self::model) change its group through `handle`, a [`GroupHandle`](phalanx::GroupHandle), so
    /// that others that share it change too: layers with their own collectives, such as a
    /// [`SyncBatchNorm`](crate::SyncBatchNorm). Layers that share a [`JoinGroup`] also take part in [`Ddp::join`]. A
    /// layer that fails in such a collective and cannot return the error must end the group
    /// ([`abort`](phalanx::Communicator::abort)); otherwise a step would be done without its result.
    ///
    /// ```
    /// # use burn::nn::BatchNormConfig;
    /// # use burn::optim::AdamWConfig;
    /// # use burn::tensor::Device;
    /// use phalanx::{GroupHandle, ProcessGroup};
    /// use phalanx_burn::{SyncBatchNorm, TrainState};
    ///
    /// # let device = Device::flex().autodiff();
    /// let handle = GroupHandle::new(ProcessGroup::alone()?); // until there is a group
    /// let model = SyncBatchNorm::new(BatchNormConfig::new(8).init(&device), &handle);
    /// let state = TrainState::new(model, AdamWConfig::new().init(), 0_u64)?.sharing(&handle)?;
    /// # drop(state);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Ddp::new`]. After `with_nccl`.
    pub fn sharing(self, handle: impl Into<JoinGroup>) -> Result<Self> {
        if !matches!(self.model.averaging(), Averaging::Host) {
            let cause =
                "TrainState::sharing after with_nccl: the handle may lead to another group than NCCL's";
            return Err(Error::invalid_argument(cause).with_remedy("call sharing first"));
        }
        let ranks = self.model.world_size();
        self.moved(handle.into(), Averaging::Host, ranks)
    }

    /// With another `Ddp`, in a group that had so many `ranks` before. A hook of the old one must be registered again, and continues.
    fn moved(mut self, handle: JoinGroup, averaging: Averaging, ranks: WorldSize) -> Result<Self> {
        let (hook, is_absent) = (self.model.hook_state()?, self.model.loaded_hook.is_absent());
        #[cfg(feature = "nccl")]
        let cuda = self.model.cuda().cloned();
        self.model = Ddp::averaged(self.model.into_model(), handle, self.options.clone(), averaging)?;
        #[cfg(feature = "nccl")]
        self.model.enter_on(cuda);
        let own_remains = self.model.world_size() == ranks;
        self.model.load_hook(hook.map(|hook| if own_remains { hook } else { hook.without_own() }))?;
        // Replicas would drift apart.
        self.share_optimizer()?;
        if is_absent {
            self.model.loaded_hook.mark_absent();
        }
        Ok(self)
    }

    /// Gives all ranks the state of rank 0's optimizer, as [`Ddp::new`] does with the model. An error on every rank if they have done other numbers of
    /// steps, or their optimizers differ.
    fn share_optimizer(&mut self) -> Result<()> {
        let group = self.model.group().in_call(Caller::DdpNew);
        if group.world_size() == WorldSize::ONE {
            return Ok(());
        }
        verify_description(&group, "number of steps", &self.steps.to_string())?;
        self.check_optimizer(&group)?;
        // Of all tensors: one that is frozen by now may have moments.
        self.optimizer = optimizer::from_rank(&self.optimizer, &group, Rank::MAIN, self.model.state())?;
        Ok(())
    }

    /// An error on every rank if the ranks' optimizers do not do the same to parameters.
    fn check_optimizer(&self, group: &dyn Communicator) -> Result<()> {
        alike::check(&self.optimizer, (self.model.model(), self.model.parameters()), group)
    }

    /// Saves under names that begin with `name` and a dot, so that other states can be saved beside it.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        self.name = format!("{name}.");
        self
    }

    /// Trains in `group` from now on, as [`Ddp::new`] does: every rank takes over rank 0's model, and the state of its optimizer. For a program
    /// that is not elastic; all ranks call it together, before or after they load the same checkpoint.
    ///
    /// # Errors
    /// As [`Ddp::new`]. On every rank, if the optimizers do not do the same to parameters: if they are of several kinds,
    /// or their betas, decay, momentum or clipping differ. An optimizer that is exchanged later is not compared before an uneven
    /// [`join`](Self::join) ends, and learning rates are every 32 steps. On every rank, too, if the numbers of [steps](Self::steps) differ, as after a
    /// checkpoint that one rank alone has loaded: [`progress`](Self::progress) would differ, too.
    pub fn with_group(self, group: &ProcessGroup) -> Result<Self> {
        let shared = self.model.group().clone();
        let ranks = self.model.world_size();
        shared.rebind(group.clone())?;
        self.moved(shared, Averaging::Host, ranks)
    }

    /// As [`with_group`](Self::with_group), for a model on a CUDA device, whose gradients NCCL averages, as [`Ddp::with_nccl`] says.
    ///
    /// # Errors
    /// As [`Ddp::with_nccl`].
    #[cfg(feature = "nccl")]
    pub fn with_nccl(self, group: &phalanx_nccl::DeviceGroup) -> Result<Self> {
        let shared = self.model.group().clone();
        let ranks = self.model.world_size();
        shared.rebind(group.host().clone())?;
        self.moved(shared, Averaging::Nccl(group.device().clone()), ranks)
    }

    /// In each group of an elastic job NCCL averages the gradients of a model on this CUDA device, as [`Ddp::with_nccl`] says: the ranks of a
    /// group make a communicator together. Outside of [`elastic::run`](phalanx::elastic::run) it has no effect.
    ///
    /// In a [`backward`](Self::backward) that may be done again this rank's gradients stay in the device's memory until the next step: if a worker
    /// dies in it, the survivors average them again by a communicator of their own.
    #[cfg(feature = "nccl")]
    #[must_use]
    pub fn with_nccl_on(mut self, cuda: &phalanx_nccl::Device) -> Self {
        self.model.enter_on(Some(cuda.clone()));
        self
    }

    /// [`Ddp::step`] with its optimizer, and an average of the model if an [averager](Self::with_averager) finds it due.
    ///
    /// # Errors
    /// As [`Ddp::step`] and [`Ddp::average_parameters`].
    pub fn step(
        &mut self,
        learning_rate: impl Into<ModuleLearningRate>,
        gradients: impl Synced,
    ) -> Result<()> {
        self.model.step(&mut self.optimizer, learning_rate, gradients)?;
        self.steps += 1;
        if let Some(averager) = &mut self.averager {
            averager.step(&mut self.model)?;
        }
        Ok(())
    }

    /// A [step](Self::step) with the scheduler's next learning rate; returns that rate (of all parameters without their
    /// own).
    ///
    /// # Errors
    /// If there is no [scheduler](Self::with_scheduler), and as [`Ddp::step`].
    pub fn scheduled_step(&mut self, gradients: impl Synced) -> Result<f64> {
        let Some(scheduler) = &mut self.scheduler else {
            return Err(Error::invalid_argument("this TrainState has no learning-rate scheduler")
                .with_remedy("give it one by with_scheduler, or a learning rate to `step`"));
        };
        let rate = scheduler.step();
        let base = rate.base();
        self.step(rate, gradients)?;
        Ok(base)
    }

    /// Runs `body`, such as an epoch, whose number of batches may differ between ranks, as [`Ddp::join`] does: all ranks call it together, and
    /// return together.
    ///
    /// Afterwards, if some ranks were done earlier, all ranks have the model, the buffers, the optimizer's state, the number of
    /// [steps](Self::steps), and the positions of the scheduler and the averager of a rank that took part to the end.
    /// [`progress`](Self::progress) stays each rank's own: a checkpoint has rank 0's.
    ///
    /// ```
    /// # use burn::{nn::Linear, tensor::Tensor};
    /// # use phalanx::{Result, join::JoinOptions};
    /// # use phalanx_burn::TrainState;
    /// # fn epoch(state: &mut TrainState<Linear>, batches: Vec<Tensor<2>>) -> Result<()> {
    /// state.join(JoinOptions::default(), |state| {
    ///     for batch in batches {
    ///         let loss = state.model.forward(|model| model.forward(batch).mean())?;
    ///         let gradients = state.model.backward(&loss)?;
    ///         state.step(1e-3, gradients)?;
    ///     }
    ///     Ok(())
    /// })
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Ddp::join`]. On every rank, if some were done earlier, and the optimizers differ by now as in [`with_group`](Self::with_group).
    pub fn join<R>(&mut self, options: JoinOptions, body: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        let joined = self.model.joining().run(options, || body(self))?;
        if joined.uneven {
            self.model.adopt(joined.last, &mut self.optimizer)?;
            // The others wait for this rank's part.
            let adopted = self.adopt_position(joined.last);
            adopted.inspect_err(|error| self.model.group().abort(error.clone()))?;
        }
        Ok(joined.value)
    }

    /// Takes over the number of steps of rank `root`, and what goes by it.
    fn adopt_position(&mut self, root: Rank) -> Result<()> {
        let group = self.model.group().in_call(Caller::Join);
        let (mut own, mut theirs) = (Parts::default(), Parts::default());
        let mut adopt = |own: &Parts, name: &str| {
            let bytes = broadcast_bytes(&group, root, own.bytes(name)?, MAX_POSITION_BYTES)?;
            theirs.put(name, bytes.as_bytes())
        };
        let averaged = self.averager.as_ref().map_or(0, PeriodicModelAverager::steps);
        own.serialize("steps", &(self.steps, averaged))?;
        adopt(&own, "steps")?;
        if let Some(scheduler) = &self.scheduler {
            schedule::save(scheduler, &mut own, "scheduler")?;
            adopt(&own, "scheduler")?;
        }
        let (steps, averaged): (u64, u64) = theirs.deserialize("steps")?;
        if let Some(scheduler) = &mut self.scheduler {
            *scheduler = schedule::load(scheduler, &theirs, "scheduler")?;
        }
        if let Some(averager) = &mut self.averager {
            averager.resume_at(averaged);
        }
        self.steps = steps;
        Ok(())
    }

    /// How many [steps](Self::step) this state has done, including those before a checkpoint. Those that another optimizer does with the
    /// [model](Self::model), such as a [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer), do not count.
    pub fn steps(&self) -> u64 {
        self.steps
    }
}

impl<M: Module> TrainState<M, ElasticSampler> {
    /// The indices of this rank's samples of the next step, at most `batch`; none at the end of the epoch. It is
    /// [`ElasticSampler::next_batch`] for the ranks of the [model](Self::model)'s group.
    ///
    /// In an elastic job call the sampler itself, with [`Context::rank`] and [`Context::world_size`]: there the rank
    /// may change between steps.
    ///
    /// Ranks whose batch may be [empty](phalanx::sampler::Tail) must not run backward without data: choose
    /// [`Tail::Repeat`](phalanx::sampler::Tail::Repeat) or [`Tail::Drop`](phalanx::sampler::Tail::Drop).
    pub fn next_batch(&mut self, batch: usize) -> Option<Vec<usize>> {
        self.progress.next_batch(batch, self.model.rank(), self.model.world_size())
    }
}

impl<M: Module, T: Serialize + DeserializeOwned> TrainState<M, T> {
    /// [`Ddp::backward`] as a [step](Context::step) of an elastic job: if a worker dies in it, the others average their
    /// gradients again, and none goes back to the last commit. `loss` is that of one [`forward`](Ddp::forward) of
    /// `context.state.model`, or of several; distribute its data by [`Context::rank`] and [`Context::world_size`].
    ///
    /// The average is over the ranks that are not [missing](Step::missing), each with the same weight.
    ///
    /// All go back, through the error and `?`, if a survivor's gradients are lost: it was cut off in an exchange of a
    /// [`SyncBatchNorm`](crate::SyncBatchNorm), or while buckets were rebuilt in the second step. Also if a survivor
    /// had taken over rank 0's buffers for the next step already, and as [`Context::step`] says.
    ///
    /// It takes memory for another copy of all gradients, and the time to make it, but only if workers can change.
    ///
    /// # Errors
    /// As [`Ddp::backward`] and [`Context::step`].
    pub fn backward<const D: usize>(
        context: &mut Context<'_, Self>,
        loss: &Tensor<D>,
    ) -> Result<Step<SyncedGradients>> {
        Self::averaged(context, loss, None)
    }

    /// [`Ddp::backward_weighted`] as a step of an elastic job, as [`backward`](Self::backward): the average is over the samples of the
    /// ranks that are not [missing](Step::missing).
    ///
    /// # Errors
    /// As [`Ddp::backward_weighted`] and [`Context::step`].
    pub fn backward_weighted<const D: usize>(
        context: &mut Context<'_, Self>,
        loss: &Tensor<D>,
        weight: f64,
    ) -> Result<Step<SyncedGradients>> {
        Self::averaged(context, loss, Some(weight))
    }

    fn averaged<const D: usize>(
        context: &mut Context<'_, Self>,
        loss: &Tensor<D>,
        weight: Option<f64>,
    ) -> Result<Step<SyncedGradients>> {
        if !context.is_elastic() {
            return context.step(|state, _| state.model.synchronised(loss, weight));
        }
        let (mut is_first, mut has_gradients) = (true, false);
        context.step(|state, group| {
            if has_gradients {
                return state.model.replay(group);
            }
            if !std::mem::take(&mut is_first) {
                state.model.follow(group)?; // Connecting was cut off.
            }
            state.model.connect()?;
            has_gradients = true;
            state.model.backward_replayable(loss, weight)
        })
    }

    /// Resumes from the newest of `checkpoints`; returns whether there was one. All ranks call it together.
    ///
    /// # Errors
    /// As [`Checkpoints::newest`] and [`load_from`](Self::load_from).
    pub fn resume(&mut self, checkpoints: &Checkpoints) -> Result<bool>
    where
        T: 'static,
    {
        let saved = checkpoints.newest()?;
        saved.map_or(Ok(false), |saved| self.load_from(&saved).map(|()| true))
    }

    /// Saves all of it as the checkpoint after [`steps`](Self::steps). All ranks call it together; rank 0 writes, while training
    /// continues.
    ///
    /// Of a hook that keeps something for each rank, as PowerSGD does, rank 0 gets all ranks' parts, each of the size of the gradients:
    /// [`checkpoint_sharded`](Self::checkpoint_sharded) needs no memory for them.
    ///
    /// # Errors
    /// As [`Checkpoints::save`] and [`save_to`](Self::save_to). On every rank, if the ranks train by themselves and their models differ.
    pub fn checkpoint(&self, checkpoints: &Checkpoints) -> Result<()> {
        training::checkpoint(self, checkpoints)
    }

    /// As [`checkpoint`](Self::checkpoint), with the work divided: as a [sharded](Checkpoints::save_sharded) checkpoint, in which
    /// rank 0 writes the model and the progress, and all ranks write the tensors of the optimizer's state in turns, each of them
    /// once. With AdamW these are two thirds of the bytes. [`resume`](Self::resume) reads it on any number of ranks.
    ///
    /// Every rank must see the folder, and goes through the state to find its tensors. If the checkpoint has more in it, call
    /// [`save_shard_to`](Self::save_shard_to).
    ///
    /// # Errors
    /// As [`Checkpoints::save_sharded`] and [`save_shard_to`](Self::save_shard_to).
    #[doc(alias = "torch.distributed.checkpoint")]
    pub fn checkpoint_sharded(&self, checkpoints: &Checkpoints) -> Result<()> {
        let group = checkpoints.group();
        checkpoints.save_sharded(self.steps, |snapshot| self.save_shard_to(snapshot, group))
    }

    /// Saves this rank's share of it in a sharded checkpoint that may have more in it, such as a second state, or the part that each rank
    /// has of a [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer). Every rank calls it, and first, in the closure of
    /// [`save_sharded`](Checkpoints::save_sharded); `group` is that of the checkpoints.
    ///
    /// ```
    /// # use burn::nn::Linear;
    /// # use phalanx::Result;
    /// # use phalanx::checkpoint::Checkpoints;
    /// # use phalanx_burn::{TrainState, ZeroRedundancyOptimizer};
    /// # fn save(checkpoints: &Checkpoints, step: u64, state: &TrainState<Linear>, optimizer: &ZeroRedundancyOptimizer) -> Result<()> {
    /// checkpoints.save_sharded(step, |snapshot| { // `state.steps()` does not count the steps of another optimizer
    ///     state.save_shard_to(snapshot, checkpoints.group())?;
    ///     optimizer.save(&state.model, snapshot, "zero")
    /// })
    /// # }
    /// ```
    ///
    /// # Errors
    /// If a tensor or the progress cannot be written. On every rank, if the ranks train by themselves and their models differ.
    pub fn save_shard_to(&self, snapshot: &mut Snapshot, group: &ProcessGroup) -> Result<()> {
        training::save_shard_to(self, snapshot, group)
    }

    /// Saves all of it in a checkpoint, for [`Checkpoints::save`](phalanx::checkpoint::Checkpoints::save).
    ///
    /// Running statistics, which each rank has for itself between a step and the next, are those of the rank that writes,
    /// which the others take over anyway.
    ///
    /// # Errors
    /// If a tensor or the progress cannot be written. If a communication hook keeps something for each rank, as PowerSGD does: one rank
    /// cannot save that.
    pub fn save_to(&self, snapshot: &mut Snapshot) -> Result<()> {
        training::save_to(self, snapshot)
    }

    /// Loads what [`save_to`](Self::save_to) has saved. Every rank calls it with the result of
    /// [`Checkpoints::newest`](phalanx::checkpoint::Checkpoints::newest).
    ///
    /// # Errors
    /// If the checkpoint is of another model, or has or lacks what this state lacks or has ([`is_mismatch`](phalanx::Error::is_mismatch));
    /// or if its `progress` is not of this type `T`, or is an [`ElasticSampler`] of another order than this one
    /// ([`check_resumes`](ElasticSampler::check_resumes)). Nothing is changed then.
    pub fn load_from(&mut self, saved: &Saved) -> Result<()>
    where
        T: 'static,
    {
        training::check_progress(&self.progress, saved, &format!("{}progress", self.name))?;
        if !self.read(saved)? {
            self.model.loaded_hook.mark_absent();
        }
        Ok(())
    }

    /// Gives whether something that a communication hook keeps was among it.
    fn read(&mut self, reader: &impl StateReader) -> Result<bool> {
        let steps = reader.value(&format!("{}steps", self.name))?;
        let progress = reader.value(&format!("{}progress", self.name))?;
        let name = format!("{}scheduler", self.name);
        let kind = ("a learning-rate scheduler", "scheduler");
        let scheduler = match &self.scheduler {
            Some(scheduler) if reader.is_saved(&name, true, kind)? => {
                Some(schedule::load(scheduler, reader, &name)?)
            }
            here => reader.is_saved(&name, here.is_some(), kind).map(|_| None)?,
        };
        let name = format!("{}averager", self.name);
        let averaged: Option<u64> =
            match reader.is_saved(&name, self.averager.is_some(), ("a model averager", "averager"))? {
                true => Some(reader.value(&name)?),
                false => None,
            };
        let hook = training::load_hook(self, reader)?;
        self.model.check_hook(hook.as_ref())?;
        let has_hook = hook.as_ref().is_some_and(|hook| !hook.is_empty());
        let elements = model::read(self.model.state(), reader, &format!("{}model", self.name))?;
        let name = format!("{}optimizer", self.name);
        let parts = ([name.clone()], name.as_str());
        let model = (self.model.model(), self.model.state());
        let begun = Begun::after(steps);
        let optimizer = moments::load(&self.optimizer, model, reader, begun, parts, |_| true)?;
        self.model.load_hook(hook)?;
        // Deferred updates of forward passes would overwrite the loaded values.
        self.model.settle_buffers();
        self.model.map(|model| model::loaded(model, Select::All, elements));
        (self.optimizer, self.scheduler) = (optimizer, scheduler);
        if let (Some(averager), Some(steps)) = (&mut self.averager, averaged) {
            averager.resume_at(steps);
        }
        (self.steps, self.progress) = (steps, progress);
        Ok(has_hook)
    }
}

impl<M: Module, T: Serialize + DeserializeOwned> TrainingState for TrainState<M, T> {
    const AVERAGE: &'static str = "state.model.average_parameters()";

    fn steps(&self) -> u64 {
        self.steps
    }

    fn place(&self) -> (Rank, WorldSize) {
        (self.model.rank(), self.model.world_size())
    }

    fn hook_state(&self) -> Result<Option<HookState>> {
        self.model.hook_state()
    }

    fn common_hook_state(&self) -> Result<Option<HookState>> {
        self.model.common_hook_state()
    }

    fn hook_name(&self) -> String {
        format!("{}hook", self.name)
    }

    fn parameter_names(&self) -> Vec<&str> {
        self.model.parameters().iter().map(|parameter| parameter.name.as_str()).collect()
    }

    fn replicas_identical(&self) -> Result<bool> {
        self.model.replicas_identical()
    }

    fn check_nothing_held(&self) -> Result<()> {
        self.model.check_nothing_held()
    }

    fn write(&self, writer: &mut impl StateWriter) -> Result<()> {
        self.model.check_nothing_held()?;
        self.model.settle_buffers();
        let model = (self.model.model(), Select::All);
        model::save(model, self.model.state(), writer, &format!("{}model", self.name))?;
        let optimizer = format!("{}optimizer", self.name);
        moments::save(&self.optimizer, self.model.state(), writer, (&optimizer, &optimizer))?;
        if let Some(scheduler) = &self.scheduler {
            schedule::save(scheduler, writer, &format!("{}scheduler", self.name))?;
        }
        if let Some(averager) = &self.averager {
            writer.value(&format!("{}averager", self.name), &averager.steps())?;
        }
        writer.value(&format!("{}steps", self.name), &self.steps)?;
        writer.value(&format!("{}progress", self.name), &self.progress)
    }
}

impl<M: Module, T: Serialize + DeserializeOwned> State for TrainState<M, T> {
    fn save(&self, parts: &mut Parts) -> Result<()> {
        // What each rank has of its own is no part of a state that all have in common.
        training::save_common(self, parts, 0)
    }

    fn load(&mut self, parts: &Parts) -> Result<()> {
        self.read(parts).map(|_| ())
    }

    fn enter(&mut self, group: &ProcessGroup) -> Result<()> {
        // The state of the optimizer is the same by now. Its settings are the program's, which may set them in the loop.
        self.is_compared = false;
        self.model.enter(group, &self.options)
    }

    fn follow(&mut self, group: &ProcessGroup) -> Result<bool> {
        self.model.follow(group)
    }

    fn leave(&mut self) {
        self.model.leave(&self.alone);
    }

    fn agree(&mut self) -> Result<()> {
        if !self.is_compared {
            self.check_optimizer(&self.model.group().in_call(Caller::ElasticCommit))?;
            self.is_compared = true;
        }
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
