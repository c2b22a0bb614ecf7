//! DistributedDataParallel: every rank has the whole model and its own part of the data.

mod regroup;
mod replay;

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Instant;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ParamId};
use burn::optim::{GradientsAccumulator, GradientsParams, ModuleOptimizer};
use burn::tensor::{Gradients, Tensor};
use phalanx::join::{JoinGroup, JoinOptions};
use phalanx::reducer::hooks::CommHook;
use phalanx::reducer::{ParameterSpec, Reducer, ReducerOptions, verify_state};
use phalanx::trace::Lane;
use phalanx::{Buffer, Caller, Communicator, Error, Rank, ReduceOp, Result, WorldSize};

use crate::bridge;
use crate::clip;
use crate::gradients::{Handover, ModelToken, Synced, SyncedGradients, averages};
use crate::hook;
use crate::memory;
use crate::optimizer;
use crate::packed::Packed;
use crate::parameters::{Inventory, Parameter, Select};
use crate::replicas;
use crate::sink::{Delivery, Pass, Sink};

/// What [`Ddp::with_options`] may be told. The defaults are PyTorch's.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DdpOptions {
    /// Sizes of buckets, and how gradients become averages.
    pub reducer: ReducerOptions,
    /// Before a forward pass, do all ranks take over rank 0's buffers, such as the running statistics of batch norm?
    pub broadcast_buffers: bool,
    /// Do the gradients that [`Ddp::backward`] gives stay in the buckets in which they were averaged, and free their memory
    /// when they are dropped? Buckets then take memory only between the first gradient of a step and the optimizer's
    /// step: a rank's peak is about that of training alone. Taking it anew in each step costs some time. Without this,
    /// gradients are copied out of buckets that stay.
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
/// All ranks must make the same calls in the same order; a group that finds them differ fails on every rank.
#[doc(alias("DistributedDataParallel", "DDP", "DistributedOptimizer"))]
pub struct Ddp<M> {
    /// Always there, except while an optimizer has it.
    model: Option<M>,
    inventory: Inventory,
    /// Where each parameter stands in the inventory.
    places: HashMap<ParamId, usize>,
    /// What all of its collectives go through.
    group: JoinGroup,
    engine: Engine<M>,
    /// When the first forward pass of this step began.
    step_began: Option<Instant>,
    token: ModelToken,
    /// Are this rank's buffers to be replaced by rank 0's before the next forward pass?
    buffers_stale: bool,
    broadcast_buffers: bool,
    gradient_as_bucket_view: bool,
    /// Does each rank get the averages of its own parameters only?
    sharded: bool,
    /// Memory for the buffers, and for averages of the model.
    packed_buffers: Packed,
    packed_weights: Packed,
}

/// A world of one needs neither hooks nor a reducer.
enum Engine<M> {
    Alone { held: Option<GradientsAccumulator<M>> },
    Together { sink: Arc<Sink>, passes: Vec<Weak<Pass>> },
}

impl<M: Module> Ddp<M> {
    /// Checks that `model` is the same on every rank, and gives every rank rank 0's parameters and buffers.
    ///
    /// The error of a mismatch names the parameter. A model without any parameter that needs a gradient is refused.
    /// Parameters that need none when this is called are left out of the averages.
    #[doc(alias = "broadcast_parameters")]
    pub fn new<C: Communicator + Clone + 'static>(model: M, group: &C) -> Result<Self> {
        Self::with_options(model, group, DdpOptions::default())
    }

    /// Like [`new`](Self::new), with options.
    pub fn with_options<C: Communicator + Clone + 'static>(
        model: M,
        group: &C,
        options: DdpOptions,
    ) -> Result<Self> {
        // A `JoinGroup` may have other users, such as synchronised batch norms, whose collectives are joined with ours.
        let group = match (group as &dyn Any).downcast_ref::<JoinGroup>() {
            Some(group) => group.clone(),
            None => JoinGroup::new(group.clone()),
        };
        let ddp = Self::build(model, group.clone(), options);
        if let Err(error) = &ddp
            && group.world_size() != WorldSize::ONE
        {
            // The other ranks may be waiting to compare their model with this one's.
            group.abort(error.clone());
        }
        ddp
    }

    fn build(model: M, group: JoinGroup, options: DdpOptions) -> Result<Self> {
        let inventory = Inventory::of(&model)?;
        let engine = engine(&inventory, &group, &options)?;
        let model = match engine {
            Engine::Alone { .. } => model,
            Engine::Together { .. } => {
                replicas::from_rank(model, &group.in_call(Caller::DdpNew), Rank::MAIN, Select::All)?
            }
        };
        let places = places(&inventory);
        Ok(Self {
            model: Some(model),
            inventory,
            places,
            group,
            engine,
            step_began: None,
            token: ModelToken::default(),
            buffers_stale: false,
            broadcast_buffers: options.broadcast_buffers,
            gradient_as_bucket_view: options.gradient_as_bucket_view,
            sharded: false,
            packed_buffers: Packed::default(),
            packed_weights: Packed::default(),
        })
    }

    /// Runs `pass` on the model, so that a [`backward`](Self::backward) of its result averages gradients.
    ///
    /// Use [`model`](Self::model) for what is not trained on, such as an evaluation.
    pub fn forward<T>(&mut self, pass: impl FnOnce(&M) -> T) -> Result<T> {
        let begin = Instant::now();
        self.step_began.get_or_insert(begin);
        self.group.step()?;
        self.refresh_buffers()?;
        let model = held(&self.model);
        let output = match &mut self.engine {
            Engine::Alone { .. } => pass(model),
            Engine::Together { sink, passes } => {
                sink.check()?;
                let token = Arc::new(Pass(sink.clone()));
                passes.retain(|pass| pass.strong_count() > 0);
                passes.push(Arc::downgrade(&token));
                pass(&hook::hooked(model, &self.inventory.device, token))
            }
        };
        self.group.trace().complete(Lane::Forward, "forward", begin, Instant::now(), &[]);
        Ok(output)
    }

    /// Runs backward from `loss` and gives the gradients averaged over all ranks, for [`step`](Self::step).
    ///
    /// They are this model's. If the loss went through another `Ddp` too, as a generator's goes through the
    /// discriminator, what that one's parameters get is dropped here, and changes nothing there.
    ///
    /// Gradients travel while backward still runs. Those of [`backward_no_sync`](Self::backward_no_sync) since the last
    /// call are added before the average. A parameter that got no gradient on any rank has none here either.
    pub fn backward<const D: usize>(&mut self, loss: &Tensor<D>) -> Result<SyncedGradients> {
        let model = held(&self.model);
        check_tracked(loss)?;
        self.buffers_stale = true;
        let gradients = match &mut self.engine {
            Engine::Alone { held } => {
                let gradients = alone(&self.group, model, loss);
                match held.take() {
                    Some(mut sum) => {
                        sum.accumulate(model, gradients);
                        sum.grads()
                    }
                    None => gradients,
                }
            }
            Engine::Together { sink, passes } => {
                sink.start(delivery(passes)?)?;
                drop(loss.backward());
                let view = self.gradient_as_bucket_view;
                let scale = match self.group.running() {
                    Some(options) if !options.divide_by_initial_world_size => {
                        self.group.world_size().count() as f64 / self.group.active_ranks() as f64
                    }
                    _ => 1.0,
                };
                sink.finish(|reducer| averages(model, reducer, &self.places, Handover { scale, view }))?
            }
        };
        Ok(SyncedGradients::new(gradients, &self.token))
    }

    /// Runs backward from `loss` without any communication: the gradients are added up on this rank, and averaged with
    /// those of the next [`backward`](Self::backward).
    ///
    /// This is PyTorch's `no_sync`: several small batches make the gradient of a large one. The forward passes of such
    /// batches communicate nothing either, but for the first after a synchronised backward pass, which refreshes the
    /// buffers.
    #[doc(alias("no_sync", "backward_passes_per_step"))]
    pub fn backward_no_sync<const D: usize>(&mut self, loss: &Tensor<D>) -> Result<()> {
        let model = held(&self.model);
        check_tracked(loss)?;
        match &mut self.engine {
            Engine::Alone { held } => {
                let gradients = alone(&self.group, model, loss);
                held.get_or_insert_with(GradientsAccumulator::new).accumulate(model, gradients);
                Ok(())
            }
            Engine::Together { sink, passes } => {
                live(passes)?;
                sink.hold()?;
                drop(traced(&self.group, loss));
                sink.release()
            }
        }
    }

    /// Scales `gradients`, which [`backward`](Self::backward) gave, so that their norm, taken over all elements of all of
    /// them as one vector, is at most `max_norm`; gives the 2-norm from before, summed in f64. This is
    /// `torch.nn.utils.clip_grad_norm_`. All ranks call it together.
    ///
    /// ```
    /// # use burn::{nn::Linear, optim::ModuleOptimizer, tensor::Tensor};
    /// # fn step(ddp: &mut phalanx_burn::Ddp<Linear>, optimizer: &mut ModuleOptimizer, loss: Tensor<1>)
    /// # -> phalanx::Result<()> {
    /// let mut gradients = ddp.backward(&loss)?;
    /// let norm = ddp.clip_grad_norm(&mut gradients, 1.0)?;
    /// if norm.is_finite() {
    ///     ddp.step(optimizer, 1e-3, gradients)?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// It needs no communication where every rank has all averages. Where a
    /// [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer) has sharded them, the ranks exchange one number for
    /// each parameter; the norm has the same bits either way.
    ///
    /// If an element is infinite or not a number, so is the norm, on every rank alike; the gradients are then left alone.
    ///
    /// # Errors
    /// If `max_norm` is not a positive number, a gradient is no float, or the exchange fails.
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_grad_norm(&self, gradients: &mut GradientsParams, max_norm: f64) -> Result<f64> {
        if !self.sharded {
            return clip::clip_grad_norm(self.model(), gradients, max_norm);
        }
        clip::check(max_norm)?;
        let mut squares = vec![0.0; self.places.len()];
        for (id, sum) in clip::squares_of(self.model(), gradients)? {
            if let Some(square) = self.places.get(&id).and_then(|&place| squares.get_mut(place)) {
                *square = sum;
            }
        }
        // All but one rank bring a zero for each: the sums are exact, and are added up in the same order everywhere.
        let group = self.group.in_call(Caller::DdpClipGradNorm);
        let squares = group.all_reduce_async(Buffer::from_slice(&squares), ReduceOp::Sum)?.wait()?;
        let squares = squares.as_slice::<f64>()?.iter().copied();
        Ok(clip::scale(self.model(), gradients, max_norm, squares))
    }

    /// Lets `optimizer` change the model by `gradients`, which [`backward`](Self::backward) gave. It communicates nothing.
    ///
    /// # Errors
    /// If the gradients are those of another `Ddp`, such as a generator's, or of this one before its state was loaded or it went
    /// to another group. After a
    /// [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer) was made for this `Ddp`, because no rank has all gradients any
    /// more and only that may step. Either ends the group: replicas would drift apart.
    pub fn step(
        &mut self,
        optimizer: &mut ModuleOptimizer,
        learning_rate: impl Into<ModuleLearningRate>,
        gradients: impl Synced,
    ) -> Result<()> {
        if matches!(self.engine, Engine::Together { .. }) && self.sharded {
            let cause = "Ddp::step was called while gradients are sharded among the ranks: replicas would drift apart";
            let remedy = "step with the ZeroRedundancyOptimizer, or make a new Ddp from Ddp::into_model";
            return Err(self.fail(Error::invalid_argument(cause).with_remedy(remedy)));
        }
        self.apply(optimizer, learning_rate, gradients)
    }

    pub(crate) fn apply(
        &mut self,
        optimizer: &mut ModuleOptimizer,
        learning_rate: impl Into<ModuleLearningRate>,
        gradients: impl Synced,
    ) -> Result<()> {
        let gradients = gradients.synced().of(&self.token).map_err(|error| self.fail(error))?;
        let (trace, begin) = (self.group.trace(), Instant::now());
        // Moved and not cloned, so that the optimizer may change parameters in place.
        self.model = self.model.take().map(|model| optimizer.step(learning_rate, model, gradients));
        let end = Instant::now();
        trace.complete(Lane::Optimizer, "optimizer", begin, end, &[]);
        if let Some(began) = self.step_began.take() {
            trace.complete(Lane::Step, "step", began, end, &[]);
        }
        Ok(())
    }

    /// Ends the group with `error`.
    fn fail(&self, error: Error) -> Error {
        if let Engine::Together { sink, .. } = &self.engine {
            sink.fail(error.clone());
        }
        error
    }

    /// Runs `body`, such as an epoch, whose number of batches may differ between ranks. A rank that is done answers the
    /// others until the last is: it adds zeros to their averages. All ranks call it together, and return together.
    ///
    /// Afterwards all ranks have the model, the buffers and the optimizer's state of one that took part to the end,
    /// if any did not. See [uneven inputs](crate#uneven-inputs) for an example.
    ///
    /// Everything else that calls collectives inside `body`, such as a synchronised batch norm, must do so through
    /// the same [`JoinGroup`], which is then given to [`new`](Self::new) in place of the group.
    ///
    /// # Errors
    /// As [`JoinGroup::join`]. An error of `body` ends the group; one that
    /// [`throw_on_early_termination`](JoinOptions::throw_on_early_termination) causes does not, comes from
    /// [`forward`](Self::forward), on the same step of every rank, and must be returned from `body`.
    pub fn join<T>(
        &mut self,
        optimizer: &mut ModuleOptimizer,
        options: JoinOptions,
        body: impl FnOnce(&mut Self, &mut ModuleOptimizer) -> Result<T>,
    ) -> Result<T> {
        let group = self.group.clone();
        let joined = group.join(options, || body(self, optimizer))?;
        if joined.uneven {
            self.adopt(joined.last, optimizer)?;
        }
        Ok(joined.value)
    }

    /// Takes over all of rank `root`'s state.
    fn adopt(&mut self, root: Rank, optimizer: &mut ModuleOptimizer) -> Result<()> {
        if let Engine::Together { sink, .. } = &self.engine {
            sink.adopt(root)?;
        }
        drop(self.model().valid()); // As in `refresh_buffers`.
        let model = self.model().clone();
        let group = self.group.in_call(Caller::Join);
        self.model = Some(replicas::from_rank(model, &group, root, Select::All)?);
        self.buffers_stale = false;
        *optimizer = optimizer::from_rank(optimizer, &group, root, &self.inventory.parameters)?;
        Ok(())
    }

    /// The model, for evaluation (`ddp.model().valid()`) and for saving.
    pub fn model(&self) -> &M {
        held(&self.model)
    }

    /// The model itself.
    pub fn into_model(self) -> M {
        match self.model {
            Some(model) => model,
            None => missing(),
        }
    }

    /// From the next step on, `hook` averages the buckets; see [the hooks there are](phalanx::reducer::hooks). All ranks
    /// call it together, with the same settings. A world of one has nothing to average and no use for it.
    ///
    /// # Errors
    /// On every rank, if the hooks differ.
    pub fn register_comm_hook(&mut self, hook: impl CommHook + 'static) -> Result<()> {
        match &self.engine {
            Engine::Alone { .. } => Ok(()),
            Engine::Together { sink, .. } => sink.register_hook(Box::new(hook)),
        }
    }

    /// The bytes of all buffers that gradients have travelled in, once for each operation.
    pub fn communicated_bytes(&self) -> u64 {
        match &self.engine {
            Engine::Alone { .. } => 0,
            Engine::Together { sink, .. } => sink.communicated_bytes(),
        }
    }

    /// Makes the parameters of all replicas their average. All ranks call it together; inside [`join`](Self::join), all
    /// that still have data, and the average is theirs.
    ///
    /// # Errors
    /// If an averaging fails.
    pub fn average_parameters(&mut self) -> Result<()> {
        if self.group.world_size() == WorldSize::ONE {
            return Ok(());
        }
        let (ranks, weights) = (self.group.active_ranks(), Select::Weights(&self.inventory.buffers));
        let group = self.group.in_call(Caller::DdpAverageParameters);
        self.packed_weights.average(held(&self.model), &group, ranks, weights)?;
        // Moved and not cloned, so that parameters are written where they are.
        self.model = self.model.take().map(|model| self.packed_weights.unpack(model, weights));
        Ok(())
    }

    /// The parameters that need a gradient.
    pub(crate) fn parameters(&self) -> &[Parameter] {
        &self.inventory.parameters
    }

    /// Inside [`join`](Self::join), the number of ranks that still have data.
    pub(crate) fn active_ranks(&self) -> usize {
        self.group.active_ranks()
    }

    pub(crate) fn communicator(&self, caller: Caller) -> JoinGroup {
        self.group.in_call(caller)
    }

    /// From now on each rank gets the averages of the parameters that it owns; `owners` are in the order of
    /// [`parameters`](Self::parameters).
    pub(crate) fn shard(&mut self, owners: Vec<Rank>) -> Result<()> {
        if let Engine::Together { sink, .. } = &self.engine {
            sink.shard(owners)?;
            self.sharded = true;
            // Gradients from before are those of all parameters.
            self.token = ModelToken::default();
        }
        Ok(())
    }

    /// Takes each rank's own parameters from it.
    pub(crate) fn gather_parameters(&mut self) -> Result<()> {
        let Engine::Together { sink, .. } = &self.engine else { return Ok(()) };
        let places = &self.places;
        sink.gather(|give| memory::each(held(&self.model), places, |place, lent| give(place, lent.bytes)))?;
        // Moved and not cloned, so that parameters are written where they are.
        let model = self.model.take();
        self.model = sink.with_reducer(|reducer| {
            let others = |place| reducer.parameter(place).ok().filter(|_| !reducer.owns(place));
            let model = model.map(|model| memory::replaced(model, places, others));
            if self.gradient_as_bucket_view {
                reducer.release();
            }
            model
        });
        Ok(())
    }

    /// This process's rank.
    pub fn rank(&self) -> Rank {
        self.group.rank()
    }

    /// The number of replicas.
    pub fn world_size(&self) -> WorldSize {
        self.group.world_size()
    }

    /// Are the parameters of all replicas the same, bit for bit? Every rank must ask, and gets the same answer.
    pub fn replicas_identical(&self) -> Result<bool> {
        let group = self.group.in_call(Caller::DdpReplicasIdentical);
        replicas::identical(self.model(), &group, Select::Weights(&self.inventory.buffers))
    }

    /// Before the first forward pass after a synchronised backward pass, takes over rank 0's buffers.
    fn refresh_buffers(&mut self) -> Result<()> {
        let wanted = self.broadcast_buffers && !self.inventory.buffers.is_empty();
        let alone = matches!(self.engine, Engine::Alone { .. });
        if !std::mem::take(&mut self.buffers_stale) || !wanted || alone {
            return Ok(());
        }
        self.take_buffers(Caller::DdpForward)
    }

    /// Takes over rank 0's buffers.
    fn take_buffers(&mut self, caller: Caller) -> Result<()> {
        let select = Select::Only(&self.inventory.buffers);
        // Running state applies the last forward pass's update late; this does it now, for all clones of the state.
        drop(self.model().valid());
        self.packed_buffers.receive(held(&self.model), &self.group.in_call(caller), Rank::MAIN, select)?;
        if self.group.rank() != Rank::MAIN {
            self.model = self.model.take().map(|model| self.packed_buffers.unpack(model, select));
        }
        Ok(())
    }
}

impl<M> fmt::Debug for Ddp<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ddp")
            .field("rank", &self.group.rank())
            .field("world_size", &self.group.world_size())
            .field("parameters", &self.inventory.parameters.len())
            .field("buffers", &self.inventory.buffers.len())
            .finish_non_exhaustive()
    }
}

/// What averages the gradients of a model in `group`, whose ranks have compared it.
fn engine<M>(inventory: &Inventory, group: &JoinGroup, options: &DdpOptions) -> Result<Engine<M>> {
    Ok(match sink(inventory, Arc::new(group.clone()), options)? {
        Some(sink) => Engine::Together { sink, passes: Vec::new() },
        None => Engine::Alone { held: None },
    })
}

/// What hooks deliver the gradients of a model to, if `group` is more than a world of one; its ranks compare the model.
pub(crate) fn sink(
    inventory: &Inventory,
    group: Arc<dyn Communicator>,
    options: &DdpOptions,
) -> Result<Option<Arc<Sink>>> {
    if group.world_size() == WorldSize::ONE {
        return Ok(None);
    }
    verify_state(&*group.in_call(Caller::DdpNew), inventory.state.iter().map(spec).collect::<Result<_>>()?)?;
    let specs = inventory.parameters.iter().map(spec).collect::<Result<_>>()?;
    let reducer = Reducer::new(group.clone(), specs, options.reducer.clone())?;
    Ok(Some(Arc::new(Sink::new(reducer, group, &inventory.parameters)?)))
}

pub(crate) fn places(inventory: &Inventory) -> HashMap<ParamId, usize> {
    inventory.parameters.iter().enumerate().map(|(index, parameter)| (parameter.id, index)).collect()
}

fn spec(parameter: &Parameter) -> Result<ParameterSpec> {
    Ok(ParameterSpec::new(
        parameter.name.as_str(),
        parameter.shape.as_slice(),
        bridge::dtype(parameter.dtype)?,
    ))
}

fn held<M>(model: &Option<M>) -> &M {
    match model {
        Some(model) => model,
        None => missing(),
    }
}

/// Only an optimizer's panic, caught by the program, can leave a `Ddp` without its model.
#[allow(clippy::panic)]
fn missing() -> ! {
    panic!("the optimizer panicked in Ddp::step and took the model with it")
}

fn check_tracked<const D: usize>(loss: &Tensor<D>) -> Result<()> {
    if loss.is_tracked() {
        return Ok(());
    }
    Err(Error::invalid_argument("the loss does not depend on any parameter that needs a gradient")
        .with_remedy("compute it in Ddp::forward, from the model that the closure gets"))
}

/// How gradients go to the reducer: hooks of several passes may report one parameter several times, and only the end of
/// backward tells.
fn delivery(passes: &mut Vec<Weak<Pass>>) -> Result<Delivery> {
    Ok(if live(passes)? > 1 { Delivery::Hold } else { Delivery::Now })
}

/// The number of forward passes that can still run backward.
fn live(passes: &mut Vec<Weak<Pass>>) -> Result<usize> {
    passes.retain(|pass| pass.strong_count() > 0);
    if passes.is_empty() {
        let cause = "the loss was not computed in Ddp::forward, or its forward pass has run backward already";
        return Err(Error::invalid_argument(cause).with_remedy(
            "let loss = ddp.forward(|model| ...)?; the model that Ddp::model gives reports nothing; several losses \
             of one forward pass: add up and run backward once",
        ));
    }
    Ok(passes.len())
}

fn alone<M: Module, const D: usize>(
    group: &dyn Communicator,
    model: &M,
    loss: &Tensor<D>,
) -> GradientsParams {
    GradientsParams::from_grads(traced(group, loss), model)
}

/// Runs backward, and notes when; where gradients are averaged, the reducer does that.
fn traced<const D: usize>(group: &dyn Communicator, loss: &Tensor<D>) -> Gradients {
    let start = Instant::now();
    let gradients = loss.backward();
    group.trace().complete(Lane::Backward, "backward", start, Instant::now(), &[]);
    gradients
}
