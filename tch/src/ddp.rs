//! DistributedDataParallel: every rank has the whole model and its own part of the data.

mod comm_hook;
mod evaluate;
mod nccl;
mod regroup;
mod weights;

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use phalanx::join::JoinGroup;
use phalanx::reducer::hooks::{LoadedHook, Replica};
use phalanx::reducer::{
    LoadedStates, Reducer, ReducerOptions, StepTime, verify_description, verify_state_on,
};
use phalanx::trace::Track;
use phalanx::{Buffer, Caller, Communicator, Error, Rank, ReduceOp, Result, WorldSize, adapter};
use tch::nn::VarStore;
use tch::{Device, Kind, TchError, Tensor};

use self::weights::Accumulated;
use crate::nccl::{Hook, OnDevice};
use crate::shim;
use crate::sink::Sink;
use crate::tensors::{self, Inventory, Named, Shared, torch};

/// The options of [`Ddp::with_options`]. The defaults are PyTorch's.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DdpOptions {
    /// Sizes of buckets, and how gradients are averaged.
    pub reducer: ReducerOptions,
    /// Whether all ranks take over rank 0's buffers, such as the running statistics of batch norm, before a forward pass.
    pub broadcast_buffers: bool,
}

impl Default for DdpOptions {
    fn default() -> Self {
        Self { reducer: ReducerOptions::default(), broadcast_buffers: true }
    }
}

/// The variables of a model of which every rank has a replica, and whose gradients are averaged over all ranks.
///
/// Each rank computes a loss in [`forward`](Self::forward) on its own part of the batch, and runs
/// [`backward`](Self::backward), which averages the gradients while others are still being computed. Then `.grad` of each
/// parameter is the average, for any optimizer over the same `VarStore`. Because all replicas start as rank 0's and take
/// the same steps, they stay equal to the last bit. See the [crate's start page](crate) for a complete program.
///
/// Gradients lie in the buckets in which they were averaged (`gradient_as_bucket_view`), in memory that the ranks of a host
/// share. Gradients on a [CUDA device](crate#on-cuda-devices) are copied to the buckets, and their averages back; or they lie in buckets
/// of the device ([`with_nccl`](Self::with_nccl)).
///
/// As with PyTorch, set gradients to zero between steps: libtorch adds to what is there. Momentum and weight decay change a parameter whose
/// gradient is zero, and do not change one without a gradient. [`Optimizer::zero_grad`](crate::Optimizer::zero_grad) and tch's own optimizers
/// leave no gradients, `Tensor::zero_grad` leaves zeros.
///
/// A tensor that several layers share (tied weights) is one parameter: its gradient is the sum of all uses. The variable that a layer had
/// before gets no gradient any more: freeze it, or set [`find_unused_parameters`](ReducerOptions::find_unused_parameters).
///
/// For an evaluation call [`evaluate`](Self::evaluate).
///
/// All ranks must make the same calls in the same order; if a group detects a difference, it fails on every rank.
///
/// # What ranks compare
///
/// | what | when |
/// |---|---|
/// | names, shapes, types and ties of all variables, which of them are buffers, and the kind of device on which they are; the [options](DdpOptions) and the order of gradients | [`new`](Self::new), and each new group of a [`TrainState`](crate::TrainState) |
/// | communication hooks and their settings | [`register_comm_hook`](Self::register_comm_hook) |
/// | an optimizer's rules and groups, the number of steps, the state that was loaded last, and the model averager | [`TrainState::with_group`](crate::TrainState::with_group) and its relatives |
/// | rules, groups and learning rates of all steps, norms of [`clip_grad_norm`](Self::clip_grad_norm), whether one rank alone has a new optimizer, the steps and runs of the checkpoints that each rank has loaded, and the sampler of [`TrainState::next_batch`](crate::TrainState::next_batch) | after the first [`TrainState::step`](crate::TrainState::step), and every 32 steps; the error comes in a later [`backward`](Self::backward), and they may differ by rounding |
/// | a [model averager](crate::PeriodicModelAverager)'s settings, and its number of steps | each of its averages |
/// | everything that is saved | each commit of an elastic job |
/// | the parameters themselves | [`replicas_identical`](Self::replicas_identical) |
///
/// These are not compared:
///
/// - an optimizer whose `step` the program calls itself, [`Optimizer`](crate::Optimizer) or one of tch's, as in PyTorch. With other settings on one rank
///   the replicas drift apart;
/// - steps whose gradients are not averaged over all ranks, as after [`backward_no_sync`](Self::backward_no_sync) or `loss.backward()` alone;
/// - steps of an elastic job that has continued without a worker that died, until others join;
/// - numbers that are no variables, such as the epsilon of a batch norm or the probability of a dropout. Replicas stay equal, but each rank computes its
///   gradients with its own numbers. If ranks may have built different models, for example from a file of each host, compare a description of your own by
///   [`verify_description`](phalanx::reducer::verify_description).
#[doc(alias("DistributedDataParallel", "DDP"))]
pub struct Ddp {
    variables: Shared,
    inventory: Inventory,
    /// All collectives of this `Ddp` go through it.
    group: JoinGroup,
    /// What averages the gradients of a group that the program has made, if the group does not.
    nccl: Option<phalanx_nccl::Communicator>,
    /// The device on which NCCL averages in each group of an elastic job.
    cuda: Option<phalanx_nccl::Device>,
    /// None in a world of one, which needs neither hooks nor a reducer.
    sink: Option<Arc<Sink>>,
    /// Whether a pass has run in [`forward`](Self::forward).
    has_run: bool,
    /// Whether one has since the last synchronised backward pass: it has begun the step that a `join` asks for.
    has_begun: bool,
    /// Whether rank 0's buffers must replace this rank's before the next forward pass.
    buffers_stale: bool,
    broadcast_buffers: bool,
    /// The state of a communication hook that was loaded before the hook is registered.
    pub(crate) loaded_hook: LoadedHook,
    /// The weights of the passes since the last synchronised one.
    accumulated: Accumulated,
    /// Whether the last backward pass has ended with an error.
    has_torn: bool,
    /// Whether it has been in a round of an elastic job.
    has_entered: bool,
    /// Which states of the variables were loaded from checkpoints since they came into this group, on all ranks together. None in an elastic job, which
    /// may have one rank alone load them, and makes the others' the same then.
    loads: Option<LoadedStates>,
}

impl Ddp {
    /// Checks that the variables of `store` are the same on every rank, and gives every rank rank 0's values.
    ///
    /// If models differ, the error names the variable. Models also differ if variables share memory on one rank and not on another, and if one is on
    /// processors and another on a CUDA device: their kernels round in other ways, and replicas would drift apart. A model without any parameter that
    /// needs a gradient is refused. So is a trainable variable that is computed from another, such as a view of it: it gets no gradient.
    ///
    /// Make all layers, and unfreeze what is to be trained, before this call. With several ranks, a variable that is made or unfrozen later is an error
    /// of the next backward pass. While the `Ddp` lives, its hooks are on the parameters: one `VarStore` has one `Ddp`.
    ///
    /// `group` is a [`ProcessGroup`](phalanx::ProcessGroup), a [`GroupHandle`](phalanx::GroupHandle) or a [`JoinGroup`]. Other parts of the program,
    /// such as synchronised batch norms, may share the [`JoinGroup`].
    ///
    /// # Errors
    /// On every rank, if the ranks' models or options differ, or the model is refused as above; if an exchange fails.
    pub fn new(store: &VarStore, group: impl Into<JoinGroup>) -> Result<Self> {
        Self::with_options(store, group, DdpOptions::default())
    }

    /// Like [`new`](Self::new), with options.
    ///
    /// # Errors
    /// As [`new`](Self::new); if an option is out of its range.
    pub fn with_options(store: &VarStore, group: impl Into<JoinGroup>, options: DdpOptions) -> Result<Self> {
        Self::of(tensors::shared(store), group.into(), None, &options)
    }

    fn of(
        variables: Shared,
        group: JoinGroup,
        nccl: Option<phalanx_nccl::Communicator>,
        options: &DdpOptions,
    ) -> Result<Self> {
        let (inventory, sink) = prepare(&variables, &[], &group, nccl.as_ref(), false, options)?;
        let ddp = Self {
            variables,
            inventory,
            group,
            nccl,
            cuda: None,
            sink,
            has_run: false,
            has_begun: false,
            buffers_stale: false,
            has_torn: false,
            has_entered: false,
            loads: Some(LoadedStates::default()),
            broadcast_buffers: options.broadcast_buffers,
            loaded_hook: LoadedHook::default(),
            accumulated: Accumulated::default(),
        };
        if ddp.sink.is_some() {
            ddp.take_state(Caller::DdpNew, Rank::MAIN).inspect_err(|error| ddp.group.abort(error.clone()))?;
        }
        Ok(ddp)
    }

    /// Runs `pass`, in which the model computes a loss for [`backward`](Self::backward).
    ///
    /// The first pass after a synchronised backward pass takes over rank 0's buffers. For passes without training there is
    /// [`evaluate`](Self::evaluate).
    ///
    /// # Errors
    /// If a collective fails; if the model was loaded with the state of a [communication hook](Self::register_comm_hook) that is not
    /// registered; if the group is a `GroupHandle` that leads to another group than when this `Ddp` was made; or if gradients came after the last `forward` from a backward pass that does not average them, such
    /// as `loss.backward()`, `optimizer.backward_step(&loss)` or only the one of another `Ddp`: the call is `ddp.backward(&loss)`.
    pub fn forward<T>(&mut self, pass: impl FnOnce() -> T) -> Result<T> {
        let begin = Instant::now();
        self.check_world()?;
        self.loaded_hook.check_taken(self.hooked())?;
        self.check_join()?;
        self.group.step()?;
        if let Some(sink) = &self.sink {
            sink.forward()?;
            sink.call(Reducer::check_joined)?;
            if std::mem::take(&mut self.buffers_stale) && self.broadcast_buffers {
                self.take_buffers(Caller::DdpForward)?;
            }
        }
        (self.has_run, self.has_begun) = (true, true);
        self.waited_since(begin);
        let output = pass();
        self.group.trace().complete(Track::Forward, "forward", begin, Instant::now(), &[]);
        Ok(output)
    }

    /// Runs backward from `loss` and leaves in `.grad` of each parameter the average over all ranks.
    ///
    /// Gradients are sent while backward still runs. Those of [`backward_no_sync`](Self::backward_no_sync) since the
    /// last call are in the average, too. A parameter without a gradient on any rank has none afterwards.
    ///
    /// If the loss went through the model of another `Ddp` too, as a generator's goes through the discriminator, the
    /// gradients of that one's parameters are not averaged: set them to zero before its next step, as without ranks. Models that
    /// are trained with one loss belong in one `VarStore`, with one `Ddp`.
    ///
    /// Every rank counts alike. If ranks have unequal numbers of samples, that is not the gradient of the mean over all samples:
    /// see [`backward_weighted`](Self::backward_weighted).
    ///
    /// # Errors
    /// If the loss does not depend on a parameter that needs a gradient; if the model has buffers and [`forward`](Self::forward) was never called, unless
    /// [`broadcast_buffers`](DdpOptions::broadcast_buffers) is false; if a variable was made or unfrozen since the `Ddp` was made; if a parameter has no
    /// gradient and `find_unused_parameters` is not set; if libtorch or an exchange fails. With several ranks each ends the group.
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        self.synchronised(loss, None)
    }

    /// Runs backward from `loss` without any communication: the gradients are added up on this rank, and averaged with
    /// those of the next [`backward`](Self::backward).
    ///
    /// This is PyTorch's `no_sync`: several small batches make the gradient of a large one. Do not set gradients to zero
    /// in between.
    ///
    /// # Errors
    /// As [`backward`](Self::backward). Nothing is exchanged, and a parameter without a gradient is no error.
    #[doc(alias("no_sync", "backward_passes_per_step"))]
    pub fn backward_no_sync(&mut self, loss: &Tensor) -> Result<()> {
        self.unsynchronised(loss, None)
    }

    /// Scales the gradients so that their norm, taken over all elements of all of them as one vector, is at most
    /// `max_norm`; returns the 2-norm before. This is `torch.nn.utils.clip_grad_norm_`. It needs no communication, after
    /// [`backward`](Self::backward) every rank has all averages.
    ///
    /// If an element is infinite or not a number, so is the norm, on every rank alike; the gradients are then left alone.
    ///
    /// # Errors
    /// If `max_norm` is not a positive number; if libtorch or a call of [NCCL](Self::with_nccl)'s has failed. Each ends the group.
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_grad_norm(&self, max_norm: f64) -> Result<f64> {
        self.or_end(self.clipped(max_norm))
    }

    /// As [`clip_grad_norm`](Self::clip_grad_norm). An error may be this rank's alone.
    fn clipped(&self, max_norm: f64) -> Result<f64> {
        adapter::check_max_norm(max_norm)?;
        let _guard = tch::no_grad_guard();
        let gradients = self.inventory.parameters.iter().map(|one| one.tensor.grad()).filter(Tensor::defined);
        let gradients = gradients.collect::<Vec<_>>();
        // A norm of halves has more digits than they have, and in f16 it may be beyond them.
        let norm = norm_of(&gradients, |gradient| match gradient.f_kind()? {
            Kind::Half | Kind::BFloat16 => gradient.f_norm_scalaropt_dtype(2.0, Kind::Float),
            _ => gradient.f_norm(),
        })?;
        // libtorch adds up squares of f32 in f32, and those of elements beyond 1.8e19 are infinite there.
        let norm = match norm.is_infinite() {
            true => norm_of(&gradients, |gradient| gradient.f_norm_scalaropt_dtype(2.0, Kind::Double))?,
            false => norm,
        };
        // What was read is computed.
        self.check_settled()?;
        if let Some(factor) = adapter::clip_factor(norm, max_norm) {
            for mut gradient in tensors::own_gradients(&self.inventory.parameters)? {
                drop(gradient.f_mul_scalar_(factor).map_err(torch)?);
            }
            if let Some(sink) = self.averaged_by_all() {
                sink.with_reducer(|reducer| reducer.clipped(factor));
            }
        }
        Ok(norm)
    }

    /// Replaces the parameters of all replicas by their average, for replicas that drift apart, as with
    /// [`PostLocalSgd`](phalanx::reducer::hooks::PostLocalSgd). All ranks call it together; inside [`join`](Self::join), those that still have data do, and
    /// the average is theirs.
    ///
    /// # Errors
    /// If a collective fails, or one of NCCL's has failed from which this rank's parameters were computed; if the group is a `GroupHandle` that leads to
    /// another group than when this `Ddp` was made; if ranks made other numbers of steps with this one in a `join` of another `Ddp`.
    pub fn average_parameters(&mut self) -> Result<()> {
        self.average_by(None)
    }

    /// As [`average_parameters`](Self::average_parameters). What asks for it may describe itself: the ranks compare that first.
    fn average_by(&mut self, averager: Option<&str>) -> Result<()> {
        let Some(sink) = &self.sink else { return self.check_world() };
        sink.call(Reducer::check_joined)?;
        let begin = Instant::now();
        // In a `join` a rank may be done behind its last step, without this average.
        let (count, group) = (self.group.step()?, self.group.in_call(Caller::DdpAverageParameters));
        let all = count == self.group.world_size().count();
        if let Some(averager) = averager {
            self.or_end(verify_description(&group, "model averager", averager))?;
        }
        let op = if all { ReduceOp::Avg } else { ReduceOp::PreMulSum(1.0 / count as f64) };
        let outcome = tensors::with_elements(&tensors::handles(&self.inventory.parameters), |parts| {
            // What was read is computed: no call of NCCL's that it comes from fails later. One within a smaller group ends only that.
            self.check_settled()?;
            for part in parts {
                let mut buffer: Buffer = group.alloc(part.dtype, part.bytes.len() / part.dtype.size())?;
                buffer.as_bytes_mut().copy_from_slice(part.bytes);
                part.bytes.copy_from_slice(group.all_reduce_async(buffer, op)?.wait()?.as_bytes());
            }
            Ok(())
        });
        self.or_end(outcome)?;
        self.waited_since(begin);
        Ok(())
    }

    /// Whether the parameters of all replicas are the same, bit for bit. All ranks must call it, and get the same answer. Buffers are not
    /// compared: see [`buffers_identical`](Self::buffers_identical).
    ///
    /// # Errors
    /// If the exchange fails.
    pub fn replicas_identical(&self) -> Result<bool> {
        let group = self.group.in_call(Caller::DdpReplicasIdentical);
        let identical = tensors::identical(&group, &tensors::handles(&self.inventory.parameters));
        // What was read is computed.
        self.or_end(identical.and_then(|identical| self.check_settled().map(|()| identical)))
    }

    /// The bytes of all buffers in which gradients were sent, counted once for each operation.
    pub fn communicated_bytes(&self) -> u64 {
        self.sink.as_ref().map_or(0, |sink| sink.communicated_bytes())
    }

    /// The bytes of each bucket, in the order in which they are sent; none in a world of one.
    pub fn bucket_bytes(&self) -> Vec<usize> {
        self.sink.as_ref().map_or_else(Vec::new, |sink| sink.with_reducer(|reducer| reducer.bucket_bytes()))
    }

    /// How long a step takes on each rank, by rank; empty for the first 32 steps. See [`Reducer::step_times`].
    pub fn step_times(&self) -> Vec<StepTime> {
        self.sink
            .as_ref()
            .map_or_else(Vec::new, |sink| sink.with_reducer(|reducer| reducer.step_times().to_vec()))
    }

    /// This process's rank.
    pub fn rank(&self) -> Rank {
        self.group.rank()
    }

    /// The number of replicas.
    pub fn world_size(&self) -> WorldSize {
        self.group.world_size()
    }

    /// What averages the gradients, for people.
    fn averaged_by(&self) -> &'static str {
        match &self.sink {
            None => "nothing",
            Some(sink) if sink.is_on_device() => "NCCL",
            Some(_) => "the group",
        }
    }

    /// `optimizer` has changed the model, with these learning rates. What it does by gradients that are held, or that no average has gone over, is no step
    /// that all ranks have taken.
    pub(crate) fn stepped(&mut self, learning_rates: &[f64], optimizer: &crate::Optimizer) {
        let loaded = self.loads.as_mut().map(LoadedStates::settle);
        if let Some(sink) = self.averaged_by_all() {
            let settings = optimizer.settings().into_iter().chain(loaded);
            sink.with_reducer(|reducer| reducer.stepped(learning_rates.iter().copied(), settings));
        }
    }

    /// What has averaged the gradients, if what they are is the average of all ranks.
    fn averaged_by_all(&self) -> Option<&Arc<Sink>> {
        let is_held = self.accumulated != Accumulated::default();
        self.sink.as_ref().filter(|sink| !is_held && !sink.is_local())
    }

    /// What has gone by since `begin` is no time of this rank's own: it was in a collective.
    fn waited_since(&self, begin: Instant) {
        if let Some(sink) = &self.sink {
            sink.with_reducer(|reducer| reducer.waited(begin.elapsed()));
        }
    }

    /// Runs backward, and records the time; where gradients are averaged, the reducer records it.
    fn traced(&self, loss: &Tensor) -> Result<()> {
        let begin = Instant::now();
        let outcome = loss.f_backward().map_err(torch);
        self.group.trace().complete(Track::Backward, "backward", begin, Instant::now(), &[]);
        outcome
    }

    /// An error if backward cannot run from `loss`, or would leave a parameter to each rank. It ends the group: the others may wait for
    /// this rank's gradients.
    fn check_backward(&self, loss: &Tensor) -> Result<()> {
        let check = || {
            if loss.requires_grad() {
                return Ok(());
            }
            Err(Error::invalid_argument("the loss does not depend on any parameter that needs a gradient")
                .with_remedy("compute it from the model, outside of tch::no_grad"))
        };
        match &self.sink {
            Some(sink) => {
                let complete = || self.inventory.check_complete(&self.variables);
                // A model without buffers may have run outside of `forward`.
                let taken = || self.loaded_hook.check_taken(self.hooked());
                let checks = || check().and_then(|()| self.check_run()).and_then(|()| taken());
                sink.call(|_| checks().and_then(|()| complete()))
            }
            None => self.check_world().and_then(|()| check()),
        }
    }

    /// An error if no pass has run in `forward`, and buffers would become each rank's own.
    fn check_run(&self) -> Result<()> {
        if self.has_run || !self.broadcast_buffers || self.inventory.buffers.is_empty() {
            return Ok(());
        }
        Err(Error::invalid_argument(
            "the loss was computed outside of Ddp::forward, which gives every rank the buffers of rank 0, such as running statistics",
        )
        .with_remedy("let loss = ddp.forward(|| ..)?; or set DdpOptions::broadcast_buffers to false"))
    }

    /// An error if nothing would be averaged because the group was a handle to a world of one when this was made.
    fn check_world(&self) -> Result<()> {
        let world = self.group.world_size();
        if self.sink.is_some() || world == WorldSize::ONE {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "the Ddp was made in a world of one, and its handle leads to a group of {world} ranks by now: nothing would be averaged"
        ))
        .with_remedy("make the Ddp after GroupHandle::rebind, or let a TrainState of these variables change the group"))
    }

    /// Takes over all variables of rank `root`.
    fn take_state(&self, caller: Caller, root: Rank) -> Result<()> {
        tensors::from_rank(&self.group.in_call(caller), root, &tensors::handles(&self.inventory.state))
    }

    /// Takes over rank 0's buffers.
    fn take_buffers(&self, caller: Caller) -> Result<()> {
        if self.inventory.buffers.is_empty() {
            return Ok(());
        }
        self.or_end(tensors::from_rank(&self.group.in_call(caller), Rank::MAIN, &self.inventory.buffers()))
    }

    /// An error ends the group, also if it is this rank's alone: the others wait for what it has not done.
    pub(crate) fn or_end<T>(&self, outcome: Result<T>) -> Result<T> {
        match (&self.sink, outcome) {
            (Some(sink), Err(error)) => sink.call(|_| Err(error)),
            (_, outcome) => outcome,
        }
    }

    fn unhook(&mut self) {
        if self.sink.take().is_some() {
            if self.has_torn {
                self.inventory.parameters.first().into_iter().for_each(|one| settle(one.tensor.device()));
            }
            self.inventory.parameters.iter().for_each(|one| shim::unhook(&one.tensor));
        }
    }
}

impl Replica for Ddp {
    fn average_parameters(&mut self, averager: &str) -> Result<()> {
        self.average_by(Some(averager))
    }
}

impl Drop for Ddp {
    fn drop(&mut self) {
        self.unhook();
    }
}

impl fmt::Debug for Ddp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ddp")
            .field("rank", &self.group.rank())
            .field("world_size", &self.group.world_size())
            .field("parameters", &self.inventory.parameters.len())
            .field("buffers", &self.inventory.buffers.len())
            .field("averaged_by", &self.averaged_by())
            .finish_non_exhaustive()
    }
}

/// The 2-norm of all elements of `gradients`, whose own norms `of` gives.
fn norm_of(
    gradients: &[Tensor],
    of: impl Fn(&Tensor) -> std::result::Result<Tensor, TchError>,
) -> Result<f64> {
    let of = |gradient: &Tensor| of(gradient)?.f_to_kind(Kind::Double);
    // One copy from a device, which waits for it once.
    let norms = gradients.iter().map(of).collect::<std::result::Result<Vec<_>, _>>().map_err(torch)?;
    let norms: Vec<f64> = match norms.is_empty() {
        true => Vec::new(),
        false => Tensor::f_stack(&norms, 0).and_then(Vec::try_from).map_err(torch)?,
    };
    Ok(norms.iter().map(|norm| norm * norm).sum::<f64>().sqrt())
}

/// Waits until the thread that libtorch has for `device` runs no hook any more. A backward pass that ends with an error leaves it behind. The
/// thread does one thing after the other, so it has ended when it has run a backward pass of its own.
fn settle(device: Device) {
    if device == Device::Cpu {
        return;
    }
    let run = || {
        let leaf = Tensor::f_ones([1], (Kind::Float, device))?.set_requires_grad(true);
        tch::with_grad(|| leaf.f_sum(Kind::Float))?.f_backward()
    };
    // A device that is broken runs nothing either.
    let _ignored = run();
}

/// Lists the variables, which the ranks of `group` compare, and hooks the parameters. An error ends the group: the others
/// may be waiting for that. `before`: the parameters of the last round, if there was one. `waits`: the end of backward waits for `nccl`.
fn prepare(
    variables: &Shared,
    before: &[Named],
    group: &JoinGroup,
    nccl: Option<&phalanx_nccl::Communicator>,
    waits: bool,
    options: &DdpOptions,
) -> Result<(Inventory, Option<Arc<Sink>>)> {
    let prepared = || {
        let inventory = Inventory::with_frozen(variables, before)?;
        if group.world_size() == WorldSize::ONE {
            return Ok((inventory, None));
        }
        let (kind, contract) = (inventory.device_kind(), inventory.contract());
        // To give all ranks rank 0's buffers is a call of all of them.
        let broadcast = || ("broadcast_buffers", options.broadcast_buffers.to_string());
        let option = (!inventory.buffers.is_empty()).then(broadcast);
        verify_state_on(&group.in_call(Caller::DdpNew), kind, contract, option.as_slice())?;
        let specs = Inventory::specs(&inventory.parameters);
        let (communicator, reducer) = (Arc::new(group.clone()), options.reducer.clone());
        let sink = match nccl {
            None => Sink::new(Reducer::new(communicator, specs, reducer)?, &inventory.parameters, None),
            Some(nccl) => {
                let on_device = OnDevice::new(nccl, group, &inventory.parameters, waits)?;
                let hook = Box::new(Hook::new(on_device.clone()));
                let reducer = Reducer::elsewhere(communicator, specs, reducer, hook)?;
                // NCCL connects ranks in the first call, and not in the first backward pass.
                nccl.barrier()?;
                Sink::new(reducer, &inventory.parameters, Some(on_device))
            }
        };
        let sink = Arc::new(sink);
        sink.hook(&inventory.parameters)?;
        Ok((inventory, Some(sink)))
    };
    prepared().inspect_err(|error: &Error| {
        if group.world_size() != WorldSize::ONE {
            group.abort(error.clone());
        }
    })
}
