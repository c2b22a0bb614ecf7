//! A `Ddp` that changes from one group to another: elastic jobs.
//!
//! Burn's backward runs inside the step of an elastic job, once: buckets are sent while it runs, and a graph can run
//! backward only once. So the first call of the step's closure runs it, and each further call gives the kept gradients
//! to the next group.
//!
//! A layer whose exchange has failed cannot return an error. It ends the group, as does any other failure on one rank.
//! A group records that its own rank has ended it: that rank's gradients are lost (they may be NaN), and all go back to
//! the commit.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Tensor;
use phalanx::adapter::Elsewhere;
use phalanx::join::{JoinGroup, JoinOptions, Joined};
use phalanx::reducer::{LoadedState, LoadedStates, Reducer, StepWeight};
use phalanx::sampler::ElasticSampler;
use phalanx::{Communicator, Error, ProcessGroup, Result, WorldSize};

use super::engine::{Averaging, Engine};
#[cfg(feature = "nccl")]
use super::nccl::check_device;
use super::{Ddp, DdpOptions};
use crate::alike;
use crate::gradients::{ModelToken, SyncedGradients};
use crate::packed::Packed;
use crate::parallel::refuse_units;
use crate::parameters::{Inventory, Parameter};

/// A `join` of the group of a [`Ddp`], which borrows nothing of it.
pub(crate) struct Joining {
    group: JoinGroup,
    /// What makes the others' calls of NCCL, if it averages.
    elsewhere: Option<Arc<dyn Elsewhere>>,
}

impl Joining {
    pub(crate) fn run<T>(self, options: JoinOptions, body: impl FnOnce() -> Result<T>) -> Result<Joined<T>> {
        match self.elsewhere {
            Some(elsewhere) => self.group.join_elsewhere(options, elsewhere, body),
            None => self.group.join(options, body),
        }
    }
}

impl<M: Module> Ddp<M> {
    /// What runs a `join` in which this `Ddp` trains.
    pub(crate) fn joining(&self) -> Joining {
        Joining { group: self.group.clone(), elsewhere: self.engine.elsewhere() }
    }

    /// Changes to `group`, on all of whose ranks the model is equal already; it checks that the models have the same
    /// structure. Objects of the previous group, such as a communication hook, are removed.
    pub(crate) fn enter(&mut self, group: &ProcessGroup, options: &DdpOptions) -> Result<()> {
        self.check_elastic()?;
        // Other users of the handle, such as a synchronised batch norm, change with it.
        self.group.rebind(group.clone())?;
        // Made again: parameters may have been frozen since.
        let averaging = self.averaging_in(group)?;
        let (inventory, engine) = prepare(self.model(), &self.group, options, &averaging, Units::Refused)?;
        self.settle(engine);
        self.inventory = inventory;
        self.broadcast_buffers = options.broadcast_buffers;
        self.gradient_as_bucket_view = options.gradient_as_bucket_view;
        Ok(())
    }

    /// An error, which ends the group, if NCCL averages in a group that the program has made.
    fn check_elastic(&self) -> Result<()> {
        match &self.averaging {
            Averaging::Host => Ok(()),
            #[cfg(feature = "nccl")]
            Averaging::Nccl(_) => Err(self.fail(
                Error::invalid_argument(
                    "an elastic job: NCCL averages this model's gradients in another group",
                )
                .with_remedy("TrainState::with_nccl_on has a communicator for each group"),
            )),
        }
    }

    /// Where gradients are averaged in this group of an elastic job; the ranks connect.
    #[cfg_attr(not(feature = "nccl"), allow(clippy::unused_self, clippy::unnecessary_wraps))]
    fn averaging_in(&self, group: &ProcessGroup) -> Result<Averaging> {
        #[cfg(feature = "nccl")]
        if let Some(cuda) = self.cuda.as_ref().filter(|_| group.world_size() != WorldSize::ONE) {
            let nccl = phalanx_nccl::Communicator::new(group, cuda)?;
            return Ok(Averaging::Nccl(nccl.shrinkable()));
        }
        let _ = group;
        Ok(Averaging::Host)
    }

    /// NCCL connects the ranks of a group that this has followed to. All ranks call it together, before the step in it.
    pub(crate) fn connect(&self) -> Result<()> {
        if self.world_size() == WorldSize::ONE { Ok(()) } else { self.engine.connect() }
    }

    /// All its collectives go through this handle, by which it changes its group.
    pub(crate) fn group(&self) -> &JoinGroup {
        &self.group
    }

    /// Leaves its group, for one of this process alone.
    pub(crate) fn leave(&mut self, alone: &ProcessGroup) {
        self.keep_hook();
        // It fails only inside a `join`, and those have ended with the loop; entering the next group would report it.
        let _free = self.group.rebind(alone.clone());
        self.settle(Engine::Alone { held: None });
        // What is loaded from now on may differ between ranks.
        self.has_common_state = false;
    }

    /// [`backward`](Self::backward), or with a `weight` [`backward_weighted`](Self::backward_weighted), with gradients that can be
    /// [averaged again](Self::replay) if a peer's failure cuts it off. That is not possible if this rank itself has ended the group: because the reducer failed, or because a
    /// batch norm did not get its statistics, without which gradients are NaN.
    pub(crate) fn backward_replayable<const D: usize>(
        &mut self,
        loss: &Tensor<D>,
        weight: Option<f64>,
    ) -> Result<SyncedGradients> {
        self.check_elastic()?;
        if let Some(sink) = self.engine.sink() {
            if self.group.running().is_some() {
                return Err(Error::invalid_argument(
                    "inside `join` no step of an elastic job can be done again",
                )
                .with_remedy(
                    "use an ElasticSampler, which gives every rank as many batches, and no `join`",
                ));
            }
            sink.call(Reducer::keep_gradients)?;
        }
        self.synchronised(loss, weight)
    }

    /// Averages the gradients of the last [`backward_replayable`](Self::backward_replayable) in `group`.
    pub(crate) fn replay(&mut self, group: &ProcessGroup) -> Result<SyncedGradients> {
        self.group.rebind(group.clone())?;
        let Some(sink) = self.engine.sink() else {
            return Err(Error::aborted("a world of one keeps no gradients"));
        };
        self.engine.move_to(group);
        self.optimizers.stop();
        self.connect()?;
        let gradients = sink.replay(|reducer| {
            #[cfg(feature = "nccl")]
            if let Some(on_device) = self.engine.on_device().filter(|_| group.world_size() == WorldSize::ONE)
            {
                on_device.restore();
            }
            self.averages(reducer, 1.0)
        })?;
        Ok(SyncedGradients::new(gradients, &self.token))
    }

    /// Changes to `group`, which has the remaining ranks of this one, between steps; not possible if gradients are
    /// sharded.
    pub(crate) fn follow(&mut self, group: &ProcessGroup) -> Result<bool> {
        self.check_elastic()?;
        if self.sharded {
            return Ok(false);
        }
        self.group.rebind(group.clone())?;
        self.engine.move_to(group);
        self.optimizers.stop();
        // Their memory belongs to the previous group.
        (self.packed_buffers, self.packed_weights) = (Packed::default(), Packed::default());
        if let Some(sink) = self.engine.sink() {
            sink.call(Reducer::regrouped)?;
        }
        Ok(true)
    }

    /// Every tensor of the model, in module order.
    pub(crate) fn state(&self) -> &[Parameter] {
        &self.inventory.state
    }

    /// Replaces the model by the result of `change`. Earlier gradients are then no longer accepted, and those that are held are dropped.
    pub(crate) fn map(&mut self, change: impl FnOnce(M) -> M) {
        self.token = ModelToken::default();
        self.drop_accumulated();
        self.model = self.model.take().map(|model| self.inventory.ties.retie(change(model)));
    }

    /// This state of the model, or the optimizer, was loaded from a checkpoint, as on all ranks of the group. An elastic job may have one rank
    /// alone load it, and makes the others' the same then.
    pub(crate) fn note_load(&mut self, state: LoadedState) {
        if !self.has_common_state {
            self.loads.loaded(state);
        }
    }

    /// The next step takes the last batch of `sampler`, of which each rank has its part. In an elastic job the program asks the sampler itself.
    pub(crate) fn note_samples(&mut self, sampler: &ElasticSampler) {
        if !self.has_common_state {
            self.loads.sampled(sampler);
        }
    }

    /// What was [loaded](Self::note_load).
    pub(crate) fn loads(&self) -> LoadedStates {
        self.loads
    }

    /// Takes the place of a `Ddp` of the same model that has loaded this. In a world of one it is kept: ranks compare it when they come into a group.
    pub(crate) fn keep_loads(&mut self, loads: LoadedStates) {
        if self.world_size() == WorldSize::ONE {
            self.loads = loads;
        }
    }

    /// The training goes on with what was [loaded](Self::note_load). Gives what the ranks compare of that.
    pub(crate) fn settle_loads(&mut self) -> f64 {
        self.loads.settle()
    }

    fn settle(&mut self, engine: Engine<M>) {
        self.engine = engine;
        self.accumulated = StepWeight::Nothing;
        (self.token, self.sharding) = (ModelToken::default(), ModelToken::default());
        (self.buffers_stale, self.sharded, self.optimizers) = (false, false, alike::Watch::default());
        (self.has_common_state, self.loads) = (true, LoadedStates::default());
        // The memory belongs to the previous group.
        (self.packed_buffers, self.packed_weights) = (Packed::default(), Packed::default());
    }
}

/// Whether [units](crate::parallel::fsdp::FullySharded) may be in a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Units {
    /// Each rank has another shard, which rank 0's would overwrite.
    Refused,
    /// The ranks of the group have the same shards.
    Replicated,
}

/// Lists the tensors of `model`, which the ranks of `group` compare. An error ends the group: the others may be waiting
/// for that.
pub(super) fn prepare<M: Module>(
    model: &M,
    group: &JoinGroup,
    options: &DdpOptions,
    averaging: &Averaging,
    units: Units,
) -> Result<(Inventory, Engine<M>)> {
    let allowed = match units {
        Units::Refused => refuse_units(model, "Ddp"),
        Units::Replicated => Ok(()),
    };
    let prepared = allowed.and_then(|()| Inventory::of(model)).and_then(|inventory| {
        #[cfg(feature = "nccl")]
        if matches!(averaging, Averaging::Nccl(_)) && group.world_size() != WorldSize::ONE {
            check_device(model, &inventory)?;
        }
        let engine = Engine::new(&inventory, group, options, averaging)?;
        Ok((inventory, engine))
    });
    prepared.inspect_err(|error| {
        if group.world_size() != WorldSize::ONE {
            group.abort(error.clone());
        }
    })
}
