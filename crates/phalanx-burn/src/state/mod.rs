//! A model, its optimizer, and everything else that the next step depends on, as one value: for elastic jobs and for
//! checkpoints.

mod elastic;
pub(crate) mod fit;
pub(crate) mod model;
pub(crate) mod moments;
mod saved;
mod schedule;
mod storage;

use std::fmt;

use burn::lr_scheduler::module_lr_scheduler::{ModuleLearningRate, ModuleLrScheduler};
use burn::module::Module;
use burn::optim::ModuleOptimizer;
use phalanx::elastic::Parts;
use phalanx::join::{JoinGroup, JoinOptions};
use phalanx::reducer::{broadcast_bytes, verify_description};
use phalanx::sampler::ElasticSampler;
use phalanx::{Caller, Communicator, Error, ProcessGroup, Rank, Result, WorldSize};

pub(crate) use self::fit::Begun;
pub(crate) use self::storage::Layout;
use crate::ddp::Averaging;
use crate::gradients::Synced;
use crate::parallel::refuse_divided;
use crate::{Ddp, DdpOptions, PeriodicModelAverager, optimizer};

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
/// It is a [`State`](phalanx::elastic::State), for [`phalanx::elastic::run`], like Horovod's `TorchState(model, optimizer, epoch=0)`. Inside the
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
/// With an [`ElasticSampler`] as `progress`, a checkpoint whose sampler has another number of samples, `shuffle` or tail, or with `shuffle` another seed, is refused.
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
/// Networks that train in turns have a state each, with their own [names](Self::named); a [`State`](phalanx::elastic::State) of the program
/// calls both in each of its methods.
///
/// # Limits
///
/// - The state of a [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer) is not included: it is divided among
///   the ranks, and would be lost with one of them. Save it beside, in one checkpoint with [`save_shard_to`](Self::save_shard_to):
///   [`checkpoint`](Self::checkpoint) and [`checkpoint_sharded`](Self::checkpoint_sharded), which would lack it, are an error then.
/// - If ranks train by themselves ([`PostLocalSgd`](phalanx::reducer::hooks::PostLocalSgd)), call [`checkpoint`](Self::checkpoint) only after an
///   average of the model; otherwise it is an error. The saved moments are those of rank 0, which averages do not change.
/// - Gradients that [`Ddp::backward_no_sync`] holds are not included: a save, a commit, or a call that changes the group or the options in the middle of
///   a step is an error, and loading drops them.
/// - A communication hook is removed when the state changes its group ([`with_group`](Self::with_group), [`with_options`](Self::with_options),
///   [`sharing`](Self::sharing), each round of an elastic job). Register it again after that: it continues. To train without it is an error, except
///   in another round, of a hook that keeps nothing.
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
        Ok(Self { model, optimizer, scheduler, averager, progress, steps: 0, name, options, alone })
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
        // The other ranks wait in the new group.
        let held = self.model.check_nothing_held();
        let hooks = held.and_then(|()| Ok((self.model.hook_state()?, self.model.registered_hook()?)));
        let (hook, registered) = hooks.inspect_err(|error| {
            if handle.world_size() != WorldSize::ONE {
                handle.abort(error.clone());
            }
        })?;
        let (absent, loads) = (self.model.loaded_hook.absent().map(str::to_owned), self.model.loads());
        #[cfg(feature = "nccl")]
        let cuda = self.model.cuda().cloned();
        self.model = Ddp::averaged(self.model.into_model(), handle, self.options.clone(), averaging)?;
        #[cfg(feature = "nccl")]
        self.model.enter_on(cuda);
        self.model.keep_loads(loads);
        let own_remains = self.model.world_size() == ranks;
        self.model.load_hook(hook.map(|hook| if own_remains { hook } else { hook.without_own() }))?;
        self.model.loaded_hook.mark_removed(registered);
        // Replicas would drift apart.
        self.share_optimizer(&loads.describe())?;
        if let Some(hook) = absent {
            self.model.loaded_hook.mark_absent(hook);
        }
        Ok(self)
    }

    /// Gives all ranks the state of rank 0's optimizer, as [`Ddp::new`] does with the model. An error on every rank if they have done other numbers of
    /// steps, have `loaded` other states, or their optimizers differ.
    fn share_optimizer(&mut self, loaded: &str) -> Result<()> {
        let group = self.model.group().in_call(Caller::DdpNew);
        if group.world_size() == WorldSize::ONE {
            return Ok(());
        }
        verify_description(&group, "number of steps", &self.steps.to_string())?;
        verify_description(&group, "loaded state", loaded)?;
        verify_description(&group, "model averager", &format!("{:?}", self.averager))?;
        self.model.compare_optimizers(&self.optimizer, None, Caller::DdpNew)?;
        // Of all tensors: one that is frozen by now may have moments.
        self.optimizer = optimizer::from_rank(&self.optimizer, &group, Rank::MAIN, self.model.state())?;
        Ok(())
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
    /// or their betas, decay, momentum or clipping differ. An optimizer that replaces it later is compared every 31 steps and when
    /// an uneven [`join`](Self::join) ends. Learning rates are compared after the first step and every 32 steps. On every rank, too, if the [averagers](Self::with_averager) differ, or the numbers of [steps](Self::steps), as after a
    /// checkpoint that one rank alone has loaded, or if they have just loaded the states of two runs: [`progress`](Self::progress) would differ, too.
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
        self.count_step()
    }

    /// Counts a step that the optimizer has done, and averages the model if that is due.
    fn count_step(&mut self) -> Result<()> {
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
    /// If there is no [scheduler](Self::with_scheduler), which ends the group, and as [`step`](Self::step). The scheduler goes on with a step that was done, and with no other.
    pub fn scheduled_step(&mut self, gradients: impl Synced) -> Result<f64> {
        let Some(mut scheduler) = self.scheduler.clone() else {
            let error = Error::invalid_argument("this TrainState has no learning-rate scheduler")
                .with_remedy("give it one by with_scheduler, or a learning rate to `step`");
            // Others may have one, and wait for this rank in the next pass.
            return Err(self.model.fail(error));
        };
        let rate = scheduler.step();
        let base = rate.base();
        self.model.step(&mut self.optimizer, rate, gradients)?;
        self.scheduler = Some(scheduler);
        self.count_step()?;
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
    /// [`ElasticSampler::next_batch`] for the ranks of the [model](Self::model)'s group. A rank whose sampler is another one, or whose `batch` is of
    /// another size, is an error on every rank after the first step, or within 32 steps.
    ///
    /// In an elastic job call the sampler itself, with [`Context::rank`](phalanx::elastic::Context::rank) and
    /// [`Context::world_size`](phalanx::elastic::Context::world_size): there the rank may change between steps.
    ///
    /// Ranks whose batch may be [empty](phalanx::sampler::Tail) must not run backward without data: choose
    /// [`Tail::Repeat`](phalanx::sampler::Tail::Repeat) or [`Tail::Drop`](phalanx::sampler::Tail::Drop).
    ///
    /// # Panics
    /// If `batch` is 0.
    pub fn next_batch(&mut self, batch: usize) -> Option<Vec<usize>> {
        let indices = self.progress.next_batch(batch, self.model.rank(), self.model.world_size())?;
        self.model.note_samples(&self.progress);
        Some(indices)
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
