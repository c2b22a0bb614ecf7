//! A model, its optimizer, and everything else that the next step depends on, as one value: for elastic jobs and for
//! checkpoints.

mod checkpoint;

use std::fmt;

use phalanx::checkpoint::training;
use phalanx::elastic::{Context, Parts, State, Step};
use phalanx::join::{JoinGroup, JoinOptions};
use phalanx::reducer::hooks::PeriodicModelAverager;
use phalanx::sampler::ElasticSampler;
use phalanx::{Communicator as _, Error, ProcessGroup, Result, WorldSize};
use phalanx_nccl::DeviceGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::Tensor;
use tch::nn::VarStore;

use crate::{Ddp, DdpOptions, Optimizer};

/// Everything that the next step of a training depends on: the variables of a `VarStore`, the optimizer with its state, the
/// number of steps taken, a [model averager](Self::with_averager) if there is one, what a [communication hook](Ddp::register_comm_hook)
/// such as PowerSGD keeps from step to step, and the program's own `progress`, of any type that serde can serialize, such as an
/// [`ElasticSampler`], which knows the position in the data.
///
/// # In an elastic job
///
/// It is a [`State`], for [`phalanx::elastic::run`], like Horovod's `TorchState(model, optimizer, epoch=0)`. Inside the
/// loop [`ddp`](Self::ddp) averages gradients over the current group; before and after the loop it is in a world of one.
///
/// ```no_run
/// use phalanx::elastic::{self, Context};
/// use phalanx::sampler::{ElasticSampler, Tail};
/// use phalanx::{ProcessGroup, Result};
/// use phalanx_tch::{Optimizer, Rule, TrainState};
/// use tch::{Device, Kind, Tensor, nn};
///
/// fn main() -> Result<()> {
///     let store = nn::VarStore::new(Device::Cpu);
///     let model = nn::linear(store.root(), 4, 1, Default::default());
///     let xs = Tensor::randn([10_000, 4], (Kind::Float, Device::Cpu)); // read them
///     let optimizer = Optimizer::new(&store, Rule::ADAMW)?;
///     let sampler = ElasticSampler::new(10_000).tail(Tail::Repeat); // batches of a step are equally long, and never empty
///     let mut state = TrainState::new(&store, optimizer, sampler)?;
///     elastic::run(&mut state, |context: &mut Context<'_, TrainState<ElasticSampler>>, _: &ProcessGroup| {
///         while context.state.progress.epoch() < 10 {
///             let (rank, world) = (context.rank(), context.world_size()); // in every step anew
///             let Some(batch) = context.state.progress.next_batch(64, rank, world) else {
///                 context.state.progress.next_epoch();
///                 continue;
///             };
///             let batch: Vec<i64> = batch.into_iter().map(|index| index as i64).collect();
///             let x = xs.index_select(0, &Tensor::from_slice(&batch));
///             let loss = context.state.ddp.forward(|| x.apply(&model).square().mean(Kind::Float))?;
///             context.state.optimizer.zero_grad()?;
///             let averaged = TrainState::backward(context, &loss)?; // again among the survivors, if a worker dies in it
///             context.state.progress.put_back(&averaged.missing); // the dead rank's samples come again
///             context.state.step(1e-3)?;
///             context.commit()?;
///         }
///         Ok::<_, phalanx::Error>(())
///     })
/// }
/// ```
///
/// # In checkpoints
///
/// [`with_group`](Self::with_group), [`resume`](Self::resume) and [`checkpoint`](Self::checkpoint). Tensors are in the
/// safetensors file as `model.conv1.weight` and `optimizer.conv1.weight.exp_avg`. A checkpoint of a model with other
/// variables, shapes or types is refused; the error names the first difference. So is one of an optimizer that keeps something else, or
/// of other parameters, and one that has or lacks an averager or a communication hook that this state lacks or has.
///
/// The optimizer's [rule](crate::Rule), with its betas, decay and momentum, becomes the saved one, with a warning if the program has made it
/// with another, as PyTorch's `load_state_dict` restores `param_groups`. [`Optimizer::set_rule`] changes it afterwards. Learning rates are
/// not saved: each [step](Self::step) gets its own.
///
/// With an [`ElasticSampler`] as `progress`, a checkpoint whose sampler has another number of samples, `shuffle` or tail, or with `shuffle` another seed, is refused.
/// To continue with another sampler, resume with the old one, and set `progress` then. For a sampler that is a field of `progress` call
/// [`check_resumes`](ElasticSampler::check_resumes).
///
/// A communication hook may be registered before a checkpoint is loaded, or after; to train without it is then an error. What each rank
/// has of its own in it, such as PowerSGD's losses, is in checkpoints, and comes back if as many ranks load it, after
/// [`with_group`](Self::with_group); otherwise it begins anew, with a warning. It begins anew without one in the rounds of an elastic job.
///
/// # Limits
///
/// Gradients that [`Ddp::backward_no_sync`] holds are not included: a save, a commit or a change of the group in the middle of a step is an
/// error, and loading drops them. Nor is libtorch's random number generator. A hook is removed wherever the
/// state changes its group ([`with_group`](Self::with_group), [`with_options`](Self::with_options), [`sharing`](Self::sharing), each round of
/// an elastic job): register it again after that, and it goes on. To train without it is an error, except in another round, of a hook that keeps
/// nothing. After an elastic job the state still has what all ranks have of it in common.
///
/// If ranks train by themselves ([`PostLocalSgd`](phalanx::reducer::hooks::PostLocalSgd)), call [`checkpoint`](Self::checkpoint) only after an
/// average of the model; otherwise it is an error. The saved moments are those of rank 0, which averages do not change.
pub struct TrainState<T = ()> {
    /// The model's variables, and their averages.
    pub ddp: Ddp,
    /// The optimizer, with its state.
    pub optimizer: Optimizer,
    /// Averages the model after steps.
    pub averager: Option<PeriodicModelAverager>,
    /// Other state of the program.
    pub progress: T,
    steps: u64,
    /// With what the names of its parts begin.
    name: String,
    options: DdpOptions,
    /// The group outside of the loop.
    alone: ProcessGroup,
}

impl<T> TrainState<T> {
    /// A state of these, in a world of one.
    ///
    /// # Errors
    /// As [`Ddp::new`].
    pub fn new(store: &VarStore, optimizer: Optimizer, progress: T) -> Result<Self> {
        let alone = ProcessGroup::alone()?;
        let ddp = Ddp::new(store, &alone)?;
        let (name, options) = (String::new(), DdpOptions::default());
        Ok(Self { ddp, optimizer, averager: None, progress, steps: 0, name, options, alone })
    }

    /// Saves under names that begin with `name` and a dot, so that other states can be saved beside it, in one checkpoint or in the
    /// [`State`] of one elastic job: as those of a generator and of a discriminator, each with a `VarStore` and an optimizer of its own. Such a
    /// [`State`] passes each of its calls on to both: without [`enter`](State::enter) each rank would train by itself.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        self.name = format!("{name}.");
        self
    }

    /// The name of a part of it.
    fn part(&self, part: &str) -> String {
        format!("{}{part}", self.name)
    }

    /// Averages gradients as `options` say, in each group. If it comes after [`with_group`](Self::with_group), all ranks
    /// call it together.
    ///
    /// # Errors
    /// As [`Ddp::new`].
    pub fn with_options(mut self, options: DdpOptions) -> Result<Self> {
        self.options = options;
        let (group, nccl, ranks) =
            (self.ddp.group().clone(), self.ddp.nccl().cloned(), self.ddp.world_size());
        self.moved(group, nccl, ranks)
    }

    /// Makes the [`ddp`](Self::ddp) change its group through `handle`, a [`GroupHandle`](phalanx::GroupHandle), so that
    /// layers that share it, such as a [`SyncBatchNorm`](crate::SyncBatchNorm), change too.
    ///
    /// # Errors
    /// As [`Ddp::new`]. After [`with_nccl`](Self::with_nccl).
    pub fn sharing(self, handle: impl Into<JoinGroup>) -> Result<Self> {
        if self.ddp.nccl().is_some() {
            return Err(Error::invalid_argument(
                "TrainState::sharing after with_nccl: the handle may lead to another group than NCCL's",
            )
            .with_remedy("call sharing first"));
        }
        let ranks = self.ddp.world_size();
        self.moved(handle.into(), None, ranks)
    }

    /// With another `Ddp`, in a group that had so many `ranks` before. A hook of the old one must be registered again, and continues.
    fn moved(
        mut self,
        handle: JoinGroup,
        nccl: Option<phalanx_nccl::Communicator>,
        ranks: WorldSize,
    ) -> Result<Self> {
        let left = self.ddp.check_nothing_held().and_then(|()| self.ddp.check_left());
        // The other ranks wait in the new group.
        let hooks = left.and_then(|()| Ok((self.ddp.hook_state()?, self.ddp.registered_hook()?)));
        let (hook, registered) = hooks.inspect_err(|error| {
            if handle.world_size() != WorldSize::ONE {
                handle.abort(error.clone());
            }
        })?;
        let (absent, loaded) = (self.ddp.loaded_hook.absent().map(str::to_owned), self.ddp.describe_load());
        let names = self.ddp.owned_names();
        self.ddp = self.ddp.again(handle, nccl, &self.options)?;
        let hook = hook.map(|hook| self.ddp.renumbered(hook, &names));
        let own_remains = self.ddp.world_size() == ranks;
        self.ddp.load_hook(hook.map(|hook| if own_remains { hook } else { hook.without_own() }))?;
        self.ddp.loaded_hook.mark_removed(registered);
        // Replicas would drift apart. In an elastic job all load what one of them has.
        self.ddp.check_alike("number of steps", &self.steps.to_string())?;
        self.ddp.check_alike("loaded state", &loaded)?;
        self.ddp.check_alike("model averager", &format!("{:?}", self.averager))?;
        self.ddp.share(&mut self.optimizer)?;
        if let Some(hook) = absent {
            self.ddp.loaded_hook.mark_absent(hook);
        }
        Ok(self)
    }

    /// Trains in `group` from now on, as [`Ddp::new`] does: every rank takes over rank 0's variables, and the state of its optimizer. For a
    /// program that is not elastic; all ranks call it together, before or after they load the same checkpoint.
    ///
    /// # Errors
    /// As [`Ddp::new`]. On every rank, if the optimizers' rules, parameters or groups differ; or the [averagers](Self::with_averager), or the numbers of
    /// [steps](Self::steps), as after a checkpoint that one rank alone has loaded; or if they have just loaded the states of two runs:
    /// [`progress`](Self::progress) would differ, too.
    pub fn with_group(self, group: &ProcessGroup) -> Result<Self> {
        let shared = self.ddp.group().clone();
        let ranks = self.ddp.world_size();
        shared.rebind(group.clone())?;
        self.moved(shared, None, ranks)
    }

    /// As [`with_group`](Self::with_group), for variables on a CUDA device, whose gradients NCCL averages, as
    /// [`Ddp::with_nccl`] says.
    ///
    /// # Errors
    /// As [`Ddp::with_nccl`].
    pub fn with_nccl(self, group: &DeviceGroup) -> Result<Self> {
        let shared = self.ddp.group().clone();
        let ranks = self.ddp.world_size();
        shared.rebind(group.host().clone())?;
        self.moved(shared, Some(group.device().clone()), ranks)
    }

    /// In each group of an elastic job NCCL averages the gradients of variables on this CUDA device, as [`Ddp::with_nccl`] says: the ranks of a
    /// group make a communicator together. Outside of [`elastic::run`](phalanx::elastic::run) it has no effect.
    ///
    /// At the end of each backward pass in it the thread waits for NCCL. In a [`backward`](Self::backward) that may be done again the device has another
    /// copy of all gradients: if a worker dies in it, the survivors average those copies by a communicator of their own.
    ///
    /// ```no_run
    /// # use phalanx::{Result, sampler::{ElasticSampler, Tail}};
    /// # use phalanx_tch::{Optimizer, TrainState};
    /// # use tch::nn::VarStore;
    /// # fn state(optimizer: impl Fn(&VarStore) -> Optimizer) -> Result<TrainState<ElasticSampler>> {
    /// let cuda = phalanx_nccl::Device::open(0)?; // with one visible device for each worker
    /// let store = VarStore::new(tch::Device::Cuda(cuda.ordinal() as usize));
    /// // the model's layers
    /// let sampler = ElasticSampler::new(10_000).tail(Tail::Repeat);
    /// let state = TrainState::new(&store, optimizer(&store), sampler)?.with_nccl_on(&cuda);
    /// // elastic::run(&mut state, ..), as above
    /// # Ok(state)
    /// # }
    /// ```
    #[must_use]
    pub fn with_nccl_on(mut self, cuda: &phalanx_nccl::Device) -> Self {
        self.ddp.enter_with(cuda.clone());
        self
    }

    /// Lets `averager` average the model after each [step](Self::step) after which it is due. It is saved and loaded with the rest.
    #[must_use]
    pub fn with_averager(mut self, averager: PeriodicModelAverager) -> Self {
        self.averager = Some(averager);
        self
    }

    /// [`Optimizer::step`], counted, and an average of the model if an [averager](Self::with_averager) finds it due.
    ///
    /// The ranks [compare](Ddp#what-ranks-compare) their rules and learning rates.
    ///
    /// # Errors
    /// As [`Optimizer::step`] and [`Ddp::average_parameters`]; if a trainable variable has a gradient, and the optimizer was made without it. With
    /// several ranks each ends the group: the others have made the step.
    pub fn step(&mut self, learning_rate: f64) -> Result<()> {
        self.step_groups(&vec![learning_rate; self.optimizer.rules().len()])
    }

    /// As [`step`](Self::step), by [`Optimizer::step_groups`].
    ///
    /// # Errors
    /// As [`step`](Self::step) and [`Optimizer::step_groups`].
    pub fn step_groups(&mut self, learning_rates: &[f64]) -> Result<()> {
        let known = self.optimizer.check_trains(self.ddp.variables());
        let stepped = known.and_then(|()| self.optimizer.step_groups(learning_rates));
        // It may be this rank's error alone, as that of a schedule: the others go on, and would wait for it.
        self.ddp.or_end(stepped)?;
        self.ddp.stepped(learning_rates, &self.optimizer);
        self.steps += 1;
        if let Some(averager) = &mut self.averager {
            averager.step(&mut self.ddp)?;
        }
        Ok(())
    }

    /// Runs `body`, such as an epoch, whose number of batches may differ between ranks, as [`Ddp::join`] does: all ranks call it together, and
    /// return together.
    ///
    /// Afterwards, if some ranks were done earlier, all ranks have the variables, the optimizer's state, the number of [steps](Self::steps) and
    /// the averager's position of a rank that took part to the end. [`progress`](Self::progress) stays each rank's own: a checkpoint has rank
    /// 0's.
    ///
    /// ```no_run
    /// # use phalanx::{Result, join::JoinOptions};
    /// # use phalanx_tch::TrainState;
    /// # use tch::{Kind, Tensor, nn::Linear};
    /// # fn epoch(state: &mut TrainState, model: &Linear, batches: Vec<Tensor>) -> Result<()> {
    /// state.join(JoinOptions::default(), |state| {
    ///     for batch in batches {
    ///         let loss = state.ddp.forward(|| batch.apply(model).mean(Kind::Float))?;
    ///         state.optimizer.zero_grad()?;
    ///         state.ddp.backward(&loss)?;
    ///         state.step(1e-3)?;
    ///     }
    ///     Ok(())
    /// })
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Ddp::join`].
    pub fn join<R>(&mut self, options: JoinOptions, body: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        let joined = self.ddp.joining().run(options, || body(self))?;
        if joined.uneven {
            self.ddp.adopt(&mut self.optimizer, joined.last)?;
            let averaged = self.averager.as_ref().map_or(0, PeriodicModelAverager::steps);
            let [steps, averaged] = self.ddp.adopt_counts([self.steps, averaged], joined.last)?;
            self.steps = steps;
            if let Some(averager) = &mut self.averager {
                averager.resume_at(averaged);
            }
        }
        Ok(joined.value)
    }

    /// How many steps the model has done, including those before a checkpoint.
    pub fn steps(&self) -> u64 {
        self.steps
    }
}

impl TrainState<ElasticSampler> {
    /// The indices of this rank's samples of the next step, at most `batch`; none at the end of the epoch. In an elastic
    /// job call the sampler itself, with [`Context::rank`] and [`Context::world_size`]. A rank whose sampler is another one, or whose `batch` is of
    /// another size, is an error on every rank after the first step, or within 32 steps.
    ///
    /// Ranks whose batch may be [empty](phalanx::sampler::Tail) must not run backward without data: choose
    /// [`Tail::Repeat`](phalanx::sampler::Tail::Repeat) or [`Tail::Drop`](phalanx::sampler::Tail::Drop).
    ///
    /// # Panics
    /// If `batch` is 0.
    pub fn next_batch(&mut self, batch: usize) -> Option<Vec<usize>> {
        let indices = self.progress.next_batch(batch, self.ddp.rank(), self.ddp.world_size())?;
        self.ddp.note_samples(&self.progress);
        Some(indices)
    }
}

impl<T: Serialize + DeserializeOwned> TrainState<T> {
    /// [`Ddp::backward`] as a [step](Context::step) of an elastic job: if a worker dies in it, the others average their
    /// gradients again, and none goes back to the last commit.
    ///
    /// The average is over the ranks that are not [missing](Step::missing), each with the same weight. It takes memory for
    /// another copy of all gradients, and the time to make it, but only if workers can change.
    ///
    /// # Errors
    /// As [`Ddp::backward`] and [`Context::step`].
    pub fn backward(context: &mut Context<'_, Self>, loss: &Tensor) -> Result<Step<()>> {
        Self::averaged(context, loss, None)
    }

    /// [`Ddp::backward_weighted`] as a step of an elastic job, as [`backward`](Self::backward): the average is over the samples of the ranks that are not
    /// [missing](Step::missing). If none of them has a sample, it is an error. Each has one in every step with a sampler of
    /// [`Tail::Repeat`](phalanx::sampler::Tail::Repeat).
    ///
    /// # Errors
    /// As [`Ddp::backward_weighted`] and [`Context::step`].
    pub fn backward_weighted(
        context: &mut Context<'_, Self>,
        loss: &Tensor,
        weight: f64,
    ) -> Result<Step<()>> {
        Self::averaged(context, loss, Some(weight))
    }

    fn averaged(context: &mut Context<'_, Self>, loss: &Tensor, weight: Option<f64>) -> Result<Step<()>> {
        if !context.is_elastic() {
            return context.step(|state, _| state.ddp.synchronised(loss, weight));
        }
        let (mut is_first, mut has_gradients) = (true, false);
        context.step(|state, group| {
            if has_gradients {
                return state.ddp.replay(group);
            }
            if !std::mem::take(&mut is_first) {
                state.ddp.follow(group)?; // Connecting was cut off.
            }
            state.ddp.connect()?;
            has_gradients = true;
            state.ddp.backward_replayable(loss, weight)
        })
    }
}

impl<T: Serialize + DeserializeOwned> State for TrainState<T> {
    fn save(&self, parts: &mut Parts) -> Result<()> {
        // What each rank has of its own is no part of a state that all have in common.
        training::save_common(self, parts, 0)
    }

    fn load(&mut self, parts: &Parts) -> Result<()> {
        self.read(parts).map(drop)
    }

    fn enter(&mut self, group: &ProcessGroup) -> Result<()> {
        self.ddp.enter(group, &self.options)
    }

    fn follow(&mut self, group: &ProcessGroup) -> Result<bool> {
        self.ddp.follow(group).map(|()| true)
    }

    fn leave(&mut self) {
        self.ddp.leave(&self.alone);
    }

    fn agree(&mut self) -> Result<()> {
        self.ddp.agree()
    }
}

impl<T: fmt::Debug> fmt::Debug for TrainState<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainState")
            .field("ddp", &self.ddp)
            .field("progress", &self.progress)
            .finish_non_exhaustive()
    }
}
