//! DistributedDataParallel: every rank has the whole model and its own part of the data.

mod comm_hook;
mod engine;
mod evaluate;
#[cfg(feature = "nccl")]
mod nccl;
mod regroup;
mod replica;
mod step;
mod weights;

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::Tensor;
use phalanx::join::{JoinGroup, JoinOptions};
use phalanx::reducer::hooks::LoadedHook;
use phalanx::reducer::{LoadedStates, Reducer, ReducerOptions, StepTime, StepWeight};
use phalanx::trace::Track;
use phalanx::{Caller, Communicator, Error, Rank, Result, WorldSize};

pub(crate) use self::engine::{Averaging, Engine};
use self::regroup::{Units, prepare};
pub(crate) use self::weights::{one_more, scaled};
use crate::alike;
use crate::gradients::{Handover, ModelToken, SyncedGradients, averages};
use crate::hook;
use crate::packed::Packed;
use crate::parallel::Sharers;
use crate::parameters::{Inventory, Parameter, Select};
use crate::replicas;
use crate::sink::Pass;

/// The options of [`Ddp::with_options`]. The defaults are PyTorch's.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DdpOptions {
    /// Sizes of buckets, and how gradients are averaged.
    pub reducer: ReducerOptions,
    /// Whether all ranks take over rank 0's buffers, such as the running statistics of batch norm, before a forward pass of a training.
    /// [`Ddp::evaluate`] gives every rank rank 0's in any case.
    pub broadcast_buffers: bool,
    /// Whether gradients free the memory of their buckets when they are dropped. Buckets then take memory only between the
    /// first gradient of a step and the optimizer's step: a rank's peak is about that of training without `Ddp`.
    /// Allocating them in each step costs some time.
    ///
    /// Without this, buckets stay allocated: the gradients of [`Ddp::backward`] stand in their memory too, and lend it.
    /// If gradients are kept for longer than a step, a bucket takes other memory, and the third time copies are made instead.
    pub gradient_as_bucket_view: bool,
}

impl Default for DdpOptions {
    fn default() -> Self {
        Self { reducer: ReducerOptions::default(), broadcast_buffers: true, gradient_as_bucket_view: false }
    }
}

/// A model of which every rank has a replica, and whose gradients are averaged over all ranks.
///
/// Each rank calls [`forward`](Self::forward) on its own part of the batch, [`backward`](Self::backward), which
/// averages the gradients while they are still being computed, and [`step`](Self::step). Because all replicas start as
/// rank 0's and take the same steps, they stay equal to the last bit. See the [crate's start page](crate) for a
/// complete program.
///
/// All ranks must make the same calls in the same order; if a group detects a difference, it fails on every rank.
///
/// | when | call |
/// |---|---|
/// | once, before training | [`new`](Self::new), [`with_options`](Self::with_options); then [`register_comm_hook`](Self::register_comm_hook) |
/// | in each step, in this order | [`forward`](Self::forward), [`backward`](Self::backward), [`clip_grad_norm`](Self::clip_grad_norm) if wanted, [`step`](Self::step) |
/// | several batches for one step | [`backward_no_sync`](Self::backward_no_sync) for all but the last; [`drop_accumulated`](Self::drop_accumulated) |
/// | batches of unequal sizes | [`backward_weighted`](Self::backward_weighted), [`backward_no_sync_weighted`](Self::backward_no_sync_weighted) |
/// | unequal numbers of batches | [`join`](Self::join) around the epoch |
/// | evaluation and its figures | [`evaluate`](Self::evaluate), [`mean`](Self::mean), [`sum`](Self::sum) |
/// | the model, to save it or to keep it | [`model`](Self::model), [`into_model`](Self::into_model) |
/// | to look at ranks | [`replicas_identical`](Self::replicas_identical), [`buffers_identical`](Self::buffers_identical), [`step_times`](Self::step_times) |
#[doc(alias("DistributedDataParallel", "DDP", "DistributedOptimizer"))]
pub struct Ddp<M> {
    /// Always set, except while an optimizer has it.
    model: Option<M>,
    inventory: Inventory,
    /// All collectives of this `Ddp` go through it.
    group: JoinGroup,
    /// Where gradients are averaged in a group that the program has made.
    averaging: Averaging,
    /// The device on which NCCL averages in each group of an elastic job.
    #[cfg(feature = "nccl")]
    cuda: Option<phalanx_nccl::Device>,
    engine: Engine<M>,
    /// The weights of the passes since the last synchronised one.
    accumulated: StepWeight,
    /// When the first forward pass of this step began.
    step_began: Option<Instant>,
    token: ModelToken,
    /// Whether rank 0's buffers must replace this rank's before the next forward pass.
    buffers_stale: bool,
    broadcast_buffers: bool,
    gradient_as_bucket_view: bool,
    /// Whether each rank gets the averages of its own parameters only.
    sharded: bool,
    /// Given to each optimizer for which gradients are sharded; another one after the group has changed.
    sharding: ModelToken,
    /// Whether the model is this rank's stages of a pipeline of several ranks, or its layers of a chain of links.
    is_of_stages: bool,
    /// Whether an optimizer sees parameters under other names than their paths.
    is_renamed: bool,
    /// The ranks that divide layers of the model with this one, if it has parts.
    sharers: Option<Sharers>,
    /// The number of steps until it is checked again that the optimizer treats each element of divided layers by itself.
    elementwise_steps: usize,
    /// Whether the ranks have found their optimizers alike since the model has come into this group.
    optimizers: alike::Watch,
    /// Which states of the model, or the optimizer, were loaded from checkpoints since then, on all ranks together.
    loads: LoadedStates,
    /// Whether an elastic job gives all ranks the same state of the optimizer.
    has_common_state: bool,
    /// The memory for broadcasting buffers, and for averaging the model.
    packed_buffers: Packed,
    packed_weights: Packed,
    /// The state of a communication hook that was loaded before the hook is registered.
    pub(crate) loaded_hook: LoadedHook,
}

impl<M: Module> Ddp<M> {
    /// Checks that `model` is the same on every rank, and gives every rank rank 0's parameters and buffers.
    ///
    /// If models differ, the error names the parameter. A model without any parameter that needs a gradient is refused. Parameters that are frozen when
    /// this is called are not averaged.
    ///
    /// Some settings of Burn's layers are no tensors, such as an epsilon, a probability, a stride, a padding and a kind of activation. They are compared, too,
    /// where the model's `Debug` shows them, as the derived one does. Those of losses and of other modules are not compared: if they differ, replicas
    /// stay equal, but each rank computes its gradients with its own settings. In an elastic job, a rank that joins has the settings with which its program
    /// builds the model. So keep a setting that changes in training, such as a probability that grows, in a module of the program's own. If ranks may have
    /// built different models, for example from a file of each host, compare Burn's description of these modules first:
    ///
    /// ```
    /// # use burn::nn::{Dropout, DropoutConfig};
    /// # use phalanx::ProcessGroup;
    /// # fn compare(model: &Dropout, group: &ProcessGroup) -> phalanx::Result<()> {
    /// phalanx::reducer::verify_description(group, "model", &model.to_string())?; // an error on every rank, with both sides
    /// # Ok(())
    /// # }
    /// # compare(&DropoutConfig::new(0.1).init(), &ProcessGroup::alone()?)?;
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// Every rank of `group` must have the same model. So a model of [units](crate::parallel::fsdp::FullySharded) is refused, and so are ranks that have
    /// different parts of [divided](crate::parallel::tensor) layers. Ranks that have different stages of a
    /// [`Pipeline`](crate::parallel::pipeline::Pipeline) are refused in its first step. In a mesh, `group` is that of the data dimension.
    ///
    /// `group` is a [`ProcessGroup`](phalanx::ProcessGroup), a [`GroupHandle`](phalanx::GroupHandle) or a [`JoinGroup`]. Other parts of the program,
    /// such as synchronised batch norms, may share the [`JoinGroup`]: their collectives then take part in `join`. [`JoinGroup::new`] makes one of a
    /// [`Communicator`] of the program's own.
    ///
    /// # Errors
    /// On every rank, if the ranks' models or options differ, or the model is refused as above; if an exchange fails.
    #[doc(alias = "broadcast_parameters")]
    pub fn new(model: M, group: impl Into<JoinGroup>) -> Result<Self> {
        Self::with_options(model, group, DdpOptions::default())
    }

    /// Like [`new`](Self::new), with options.
    ///
    /// # Errors
    /// As [`new`](Self::new); if an option is out of its range.
    pub fn with_options(model: M, group: impl Into<JoinGroup>, options: DdpOptions) -> Result<Self> {
        Self::averaged(model, group.into(), options, Averaging::Host)
    }

    pub(crate) fn averaged(
        model: M,
        group: JoinGroup,
        options: DdpOptions,
        averaging: Averaging,
    ) -> Result<Self> {
        Self::made(model, group, options, averaging, Units::Refused)
    }

    /// For a model of units, in a `group` whose ranks have the same shards.
    pub(crate) fn of_shards(model: M, group: impl Into<JoinGroup>, options: DdpOptions) -> Result<Self> {
        Self::made(model, group.into(), options, Averaging::Host, Units::Replicated)
    }

    fn made(
        model: M,
        group: JoinGroup,
        options: DdpOptions,
        averaging: Averaging,
        units: Units,
    ) -> Result<Self> {
        let (inventory, engine) = prepare(&model, &group, &options, &averaging, units)?;
        let model = match engine {
            Engine::Alone { .. } => model,
            Engine::Together { .. } => {
                replicas::from_rank(model, &group.in_call(Caller::DdpNew), Rank::MAIN, Select::All)
                    .inspect_err(|error| group.abort(error.clone()))?
            }
        };
        let model = inventory.ties.retie(model);
        let sharers = Sharers::of(&model, &inventory.constants);
        Ok(Self {
            model: Some(model),
            inventory,
            group,
            averaging,
            #[cfg(feature = "nccl")]
            cuda: None,
            engine,
            accumulated: StepWeight::Nothing,
            step_began: None,
            token: ModelToken::default(),
            buffers_stale: false,
            broadcast_buffers: options.broadcast_buffers,
            gradient_as_bucket_view: options.gradient_as_bucket_view,
            sharded: false,
            sharding: ModelToken::default(),
            is_of_stages: false,
            is_renamed: false,
            sharers,
            elementwise_steps: 0,
            optimizers: alike::Watch::default(),
            loads: LoadedStates::default(),
            has_common_state: false,
            packed_buffers: Packed::default(),
            packed_weights: Packed::default(),
            loaded_hook: LoadedHook::default(),
        })
    }

    /// Runs `pass` on the model, so that a [`backward`](Self::backward) of its result averages gradients.
    ///
    /// For an evaluation use [`evaluate`](Self::evaluate), which gives every rank the same model.
    ///
    /// # Errors
    /// If an exchange fails, or the model was loaded with the state of a [communication hook](Self::register_comm_hook) that is not
    /// registered. If the group is a [`GroupHandle`](phalanx::GroupHandle) that leads to another group than when this `Ddp` was made. A panic of `pass` ends
    /// the groups of this rank if layers are [divided](crate::parallel::tensor): the ranks that have the other parts wait for the rest of the pass.
    pub fn forward<T>(&mut self, pass: impl FnOnce(&M) -> T) -> Result<T> {
        self.forward_with(|model, inventory, sink| match sink {
            None => pass(model),
            Some(sink) => pass(&hook::hooked(model, inventory, sink)),
        })
    }

    /// As [`forward`](Self::forward), for a `pass` that reports the model's gradients itself. What it reports them to, if there are
    /// other ranks, must live in the pass's graph: as long as it lives, backward can still come.
    pub(crate) fn forward_with<T>(
        &mut self,
        pass: impl FnOnce(&M, &Inventory, Option<Arc<Pass>>) -> T,
    ) -> Result<T> {
        let begin = Instant::now();
        self.check_world()?;
        self.loaded_hook.check_taken(self.hooked())?;
        #[cfg(feature = "nccl")]
        self.check_join()?;
        self.step_began.get_or_insert(begin);
        self.group.step()?;
        if let Some(sink) = self.engine.sink() {
            sink.call(Reducer::check_joined)?;
        }
        self.refresh_buffers()?;
        self.waited_since(begin);
        let model = held(&self.model);
        let token = match &mut self.engine {
            Engine::Alone { .. } => None,
            Engine::Together { sink, passes, .. } => {
                sink.check()?;
                let token = Arc::new(Pass::to(sink));
                passes.retain(|pass| pass.strong_count() > 0);
                passes.push(Arc::downgrade(&token));
                Some(token)
            }
        };
        let _end = self.sharers.as_ref().map(Sharers::end_if_panicked);
        let output = pass(model, &self.inventory, token);
        self.group.trace().complete(Track::Forward, "forward", begin, Instant::now(), &[]);
        Ok(output)
    }

    /// Runs backward from `loss` and returns the gradients averaged over all ranks, for [`step`](Self::step).
    ///
    /// They are the gradients of this model. If the loss went through another `Ddp` too, as a generator's goes through
    /// the discriminator, the gradients of that one's parameters are dropped, and change nothing there.
    ///
    /// Gradients are sent while backward still runs. Those of [`backward_no_sync`](Self::backward_no_sync) since the
    /// last call are added before the average. A parameter without a gradient on any rank has none here either.
    ///
    /// Every rank counts alike. If ranks have unequal numbers of samples, that is not the gradient of the mean over all samples:
    /// see [`backward_weighted`](Self::backward_weighted).
    ///
    /// # Errors
    /// If the loss was not computed in [`forward`](Self::forward), or has run backward already. If it depends on parameters of
    /// [`model`](Self::model), and not only on the model that the closure of [`forward`](Self::forward) gets: a penalty on parameters belongs into
    /// the closure. If a parameter has no gradient and [`find_unused_parameters`](ReducerOptions::find_unused_parameters) is not set. If an
    /// exchange fails. Each ends the group. So does a panic if layers are [divided](crate::parallel::tensor), as in [`forward`](Self::forward).
    pub fn backward<const D: usize>(&mut self, loss: &Tensor<D>) -> Result<SyncedGradients> {
        self.synchronised(loss, None)
    }

    /// Runs backward from `loss` without any communication: the gradients are added up on this rank, and averaged with
    /// those of the next [`backward`](Self::backward).
    ///
    /// This is PyTorch's `no_sync`: several small batches make the gradient of a large one. The forward passes of such
    /// batches communicate nothing either, except the first after a synchronised backward pass, which refreshes the
    /// buffers.
    ///
    /// # Errors
    /// As [`backward`](Self::backward). Nothing is exchanged, and a parameter without a gradient is no error.
    #[doc(alias("no_sync", "backward_passes_per_step"))]
    pub fn backward_no_sync<const D: usize>(&mut self, loss: &Tensor<D>) -> Result<()> {
        self.unsynchronised(loss, None)
    }

    /// Drops the gradients of [`backward_no_sync`](Self::backward_no_sync) since the last [`backward`](Self::backward), on this rank alone:
    /// all ranks call it in the same place, such as after an epoch whose last batches make no whole step.
    #[doc(alias("zero_grad", "no_sync"))]
    pub fn drop_accumulated(&mut self) {
        self.accumulated = StepWeight::Nothing;
        match &mut self.engine {
            Engine::Alone { held } => *held = None,
            Engine::Together { sink, .. } => sink.drop_held(),
        }
    }

    /// Lets optimizers, and what is said of them, have these names for the parameters that are trained, in their order.
    pub(crate) fn rename(&mut self, names: Vec<String>) {
        self.inventory.parameters.iter_mut().zip(names).for_each(|(parameter, name)| parameter.name = name);
        self.is_renamed = true;
    }

    /// Notes that the model is this rank's stages of a pipeline of several ranks.
    pub(crate) fn note_stages(&mut self) {
        self.is_of_stages = true;
    }

    /// Whether other ranks have other layers of the model.
    pub(crate) fn is_of_stages(&self) -> bool {
        self.is_of_stages
    }

    /// An error if nothing would be averaged because the group was a handle to a world of one when this was made.
    fn check_world(&self) -> Result<()> {
        let world = self.group.world_size();
        match self.engine {
            Engine::Alone { .. } if world != WorldSize::ONE => Err(Error::invalid_argument(format!(
                "the Ddp was made in a world of one, and its handle leads to a group of {world} ranks by now: nothing would be averaged"
            ))
            .with_remedy("make the Ddp after GroupHandle::rebind, or let a TrainState of this model change the group")),
            Engine::Alone { .. } | Engine::Together { .. } => Ok(()),
        }
    }

    /// An error if the group is a handle that leads to other ranks than when this was made. Nobody waits for this rank.
    pub(crate) fn check_ranks(&self) -> Result<()> {
        self.check_world()?;
        self.engine.sink().map_or(Ok(()), |sink| sink.with_reducer(|reducer| reducer.check_group()))
    }

    /// The time since `begin` is not this rank's own: it was in a collective.
    fn waited_since(&self, begin: Instant) {
        if let Some(sink) = self.engine.sink() {
            sink.with_reducer(|reducer| reducer.waited(begin.elapsed()));
        }
    }

    /// An error, which ends the group, if `call` cannot be made because NCCL averages the gradients.
    fn check_on_host(&self, call: &str) -> Result<()> {
        self.engine.check_on_host(call).map_err(|error| self.fail(error))
    }

    /// Ends the group with `error`, and that of the ranks that divide layers with this one, which would wait for it, too.
    pub(crate) fn fail(&self, error: Error) -> Error {
        if let Some(sink) = self.engine.sink() {
            sink.with_reducer(|reducer| reducer.abort(error.clone()));
        } else if self.group.world_size() != WorldSize::ONE {
            // Made in a world of one, whose handle leads to others by now: they would wait.
            self.group.abort(error.clone());
        }
        if let Some(sharers) = &self.sharers {
            sharers.tell(&error);
        }
        error
    }

    /// The averages in the buckets, times `scale`, in the form that Burn's optimizers take.
    fn averages(&self, reducer: &mut Reducer, scale: f64) -> Result<GradientsParams> {
        #[cfg(feature = "nccl")]
        if let Some(on_device) = self.engine.on_device() {
            let averaged = (&**on_device, self.group.world_size(), scale);
            return crate::nccl::averages(held(&self.model), reducer, averaged, &self.inventory.indices);
        }
        let handover = Handover { scale, view: self.gradient_as_bucket_view };
        averages(held(&self.model), reducer, &self.inventory.indices, handover)
    }

    /// Runs `body`, such as an epoch, whose number of batches may differ between ranks. When `body` has returned on a rank, that rank contributes zeros
    /// to the averages of the others, until `body` has returned on all. All ranks call it together, and return together.
    ///
    /// If some ranks were done earlier, all ranks afterwards have the model, the buffers and the optimizer's state of a rank that took part to the end.
    /// Gradients that [`backward_no_sync`](Self::backward_no_sync) holds are then dropped: their step was not made. See
    /// [uneven inputs](crate#uneven-inputs) for an example.
    ///
    /// All other code that calls collectives inside `body`, such as a synchronised batch norm, must do so through the
    /// same [`JoinGroup`], which is then passed to [`new`](Self::new) instead of the group. Another `Ddp` over it must make as many steps on every rank:
    /// nobody takes over what it has, and if its steps were uneven, its next [`forward`](Self::forward) is an error on every rank.
    ///
    /// Where NCCL averages, a rank that is done makes NCCL's calls of the others, too, with zeros on its device. It makes those of this `Ddp`
    /// alone: another one over NCCL cannot train in the same `join`.
    ///
    /// The `Ddp` of a [`TrainState`](crate::TrainState) joins by [`TrainState::join`](crate::TrainState::join), which counts the steps.
    ///
    /// # Errors
    /// As [`JoinGroup::join`]. An error of `body` ends the group; one that
    /// [`throw_on_early_termination`](JoinOptions::throw_on_early_termination) causes does not, comes from
    /// [`forward`](Self::forward), on the same step of every rank, and must be returned from `body`. On every rank, if some were done earlier, and
    /// the ranks' optimizers do not do the same to parameters by now, as when `body` has exchanged `optimizer`; this ends the groups if layers are
    /// [divided](crate::parallel::tensor).
    pub fn join<T>(
        &mut self,
        optimizer: &mut ModuleOptimizer,
        options: JoinOptions,
        body: impl FnOnce(&mut Self, &mut ModuleOptimizer) -> Result<T>,
    ) -> Result<T> {
        let joined = self.joining().run(options, || body(self, optimizer))?;
        if joined.uneven {
            let adopted = self.adopt(joined.last, optimizer);
            adopted.map_err(|error| self.fail_for_sharers(error))?;
        }
        Ok(joined.value)
    }

    /// The model, for saving, and for passes without gradients whose result may differ between ranks: between steps each rank has its own buffers, such
    /// as the running statistics of batch norm. For evaluation use [`evaluate`](Self::evaluate). A loss for [`backward`](Self::backward)
    /// of this `Ddp` may depend on its parameters only by the model that the closure of [`forward`](Self::forward) gets. If it depends on the
    /// parameters of this reference, that is an error.
    pub fn model(&self) -> &M {
        held(&self.model)
    }

    /// Returns the model itself.
    pub fn into_model(self) -> M {
        match self.model {
            Some(model) => model,
            None => missing(),
        }
    }

    /// The bytes of all buffers in which gradients were sent, counted once for each operation.
    pub fn communicated_bytes(&self) -> u64 {
        let by_group =
            self.engine.sink().map_or(0, |sink| sink.with_reducer(|reducer| reducer.communicated_bytes()));
        #[cfg(feature = "nccl")]
        let by_group = by_group + self.engine.on_device().map_or(0, |on_device| on_device.bytes());
        by_group
    }

    /// How long a step takes on each rank, by rank; empty for the first 32 steps. See [`Reducer::step_times`].
    pub fn step_times(&self) -> Vec<StepTime> {
        self.engine
            .sink()
            .map_or_else(Vec::new, |sink| sink.with_reducer(|reducer| reducer.step_times().to_vec()))
    }

    /// Where gradients are averaged in a group that the program has made.
    pub(crate) fn averaging(&self) -> &Averaging {
        &self.averaging
    }

    /// The parameters that need a gradient.
    pub(crate) fn parameters(&self) -> &[Parameter] {
        &self.inventory.parameters
    }

    /// This process's rank.
    pub fn rank(&self) -> Rank {
        self.group.rank()
    }

    /// The number of replicas.
    pub fn world_size(&self) -> WorldSize {
        self.group.world_size()
    }
}

impl<M> fmt::Debug for Ddp<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ddp")
            .field("rank", &self.group.rank())
            .field("world_size", &self.group.world_size())
            .field("parameters", &self.inventory.parameters.len())
            .field("buffers", &self.inventory.buffers.len())
            .field("averaged_by", &self.engine.averaged_by())
            .finish_non_exhaustive()
    }
}

/// The model, which an optimizer takes and gives back.
pub(crate) fn held<M>(model: &Option<M>) -> &M {
    match model {
        Some(model) => model,
        None => missing(),
    }
}

/// Only an optimizer's panic that the program catches can take the model away.
#[allow(clippy::panic, reason = "the program has caught one and goes on")]
fn missing() -> ! {
    panic!("the optimizer panicked in its step and took the model with it")
}
