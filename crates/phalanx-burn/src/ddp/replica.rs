//! How replicas stay equal besides averaged gradients: buffers, and state that one rank gives the others.

use std::collections::HashSet;
use std::time::Instant;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ParamId};
use burn::optim::ModuleOptimizer;
use phalanx::reducer::{Reducer, verify_description};
use phalanx::{Caller, Communicator, Error, Rank, Result};

use super::{Ddp, held};
use crate::gradients::ModelToken;
use crate::parameters::{self, Select};
use crate::{optimizer, replicas};

impl<M: Module> Ddp<M> {
    /// Replaces the parameters of all replicas that need a gradient by their average. Buffers and frozen parameters are left as they are, as by PyTorch's
    /// averagers. All ranks call it together; inside [`join`](Self::join), the ranks that still have data call it, and the average is theirs.
    ///
    /// # Errors
    /// If a collective fails; if the group is a [`GroupHandle`](phalanx::GroupHandle) that leads to another group than when this `Ddp` was made; if ranks
    /// made other numbers of steps with this one in a `join` of another `Ddp`.
    pub fn average_parameters(&mut self) -> Result<()> {
        self.average_by(None)
    }

    /// As [`average_parameters`](Self::average_parameters). What asks for it may describe itself: the ranks compare that first.
    pub(crate) fn average_by(&mut self, averager: Option<&str>) -> Result<()> {
        let Some(sink) = self.engine.sink() else { return self.check_world() };
        sink.call(Reducer::check_joined)?;
        let (group, begin) = (self.group.in_call(Caller::DdpAverageParameters), Instant::now());
        // In a `join` a rank may be done behind its last step, without this average.
        let ranks = self.group.step()?;
        // The average of equal numbers may be another one: a third of three times a number is, for some.
        let weights = Select::Trained(&self.inventory.indices);
        if let Some(averager) = averager {
            verify_description(&group, "model averager", averager)?;
        }
        self.packed_weights.average(held(&self.model), &group, ranks, weights)?;
        self.waited_since(begin);
        // Moved and not cloned, so that parameters are written in place.
        let model = self.model.take().map(|model| self.packed_weights.unpack(model, weights));
        self.model = model.map(|model| self.inventory.ties.retie(model));
        Ok(())
    }

    /// Whether the parameters of all replicas are the same, bit for bit. All ranks must call it, and get the same answer. Of buffers,
    /// such as the running statistics of batch norm, [`buffers_identical`](Self::buffers_identical) says that: between steps each rank
    /// has its own.
    ///
    /// # Errors
    /// If the exchange fails.
    pub fn replicas_identical(&self) -> Result<bool> {
        let group = self.group.in_call(Caller::DdpReplicasIdentical);
        replicas::identical(self.model(), &group, Select::Weights(&self.inventory.buffers))
    }

    /// Before the first forward pass after a synchronised backward pass, takes over rank 0's buffers.
    pub(super) fn refresh_buffers(&mut self) -> Result<()> {
        let wanted = self.broadcast_buffers && !self.inventory.buffers.is_empty();
        if std::mem::take(&mut self.buffers_stale) && wanted && self.engine.sink().is_some() {
            self.take_buffers(Caller::DdpForward)?;
        }
        Ok(())
    }

    /// Takes over rank 0's buffers.
    fn take_buffers(&mut self, caller: Caller) -> Result<()> {
        let select = Select::Only(&self.inventory.buffers);
        // Running state defers the last forward pass's update; this applies it now, for all clones of the state.
        drop(self.model().valid());
        self.packed_buffers.receive(held(&self.model), &self.group.in_call(caller), Rank::MAIN, select)?;
        if self.group.rank() != Rank::MAIN {
            self.model = self.model.take().map(|model| self.packed_buffers.unpack(model, select));
        }
        Ok(())
    }

    /// Gives all ranks rank 0's buffers now, instead of before the next forward pass.
    pub(crate) fn agree(&mut self) -> Result<()> {
        if self.inventory.buffers.is_empty() || self.engine.sink().is_none() {
            return Ok(());
        }
        self.buffers_stale = false;
        self.take_buffers(Caller::ElasticCommit)
    }

    /// Applies the updates of buffers that forward passes have deferred: Burn updates running state late.
    pub(crate) fn settle_buffers(&self) {
        if !self.inventory.buffers.is_empty() {
            drop(held(&self.model).valid());
        }
    }

    /// Takes over all of rank `root`'s state. An error on every rank if the ranks' optimizers differ by now: one may have exchanged its own in the
    /// `join`, and Burn's optimizers say nowhere what their settings are.
    pub(crate) fn adopt(&mut self, root: Rank, optimizer: &mut ModuleOptimizer) -> Result<()> {
        self.accumulated = Default::default(); // As what is held.
        if let Some(sink) = self.engine.sink() {
            sink.adopt(root)?;
        }
        let model = self.model().clone();
        let group = self.group.in_call(Caller::Join);
        let model = replicas::from_rank(model, &group, root, Select::All)?;
        self.model = Some(self.inventory.ties.retie(model));
        (self.buffers_stale, self.loads) = (false, Default::default());
        self.compare_optimizers(optimizer, None, Caller::Join)?;
        // Of all tensors: one that is frozen by now may have moments.
        *optimizer = optimizer::from_rank(optimizer, &group, root, &self.inventory.state)?;
        Ok(())
    }

    /// An error on every rank unless the ranks' optimizers do the same to parameters, with the same `rates` if it is in a step. If they do, the next steps
    /// compare [again](Self::compare_again) now and then; otherwise the next one does so on every rank, also on those that have compared before, while
    /// others had no data in a `join`.
    ///
    /// Survivors of a failure that [follow](Self::follow) each other have compared before, or none of them has.
    pub(crate) fn compare_optimizers(
        &mut self,
        optimizer: &ModuleOptimizer,
        rates: Option<&ModuleLearningRate>,
        caller: Caller,
    ) -> Result<()> {
        let Some(sink) = self.engine.sink() else { return Ok(()) };
        let rates = rates.filter(|_| sink.with_reducer(|reducer| reducer.averages_over_all()));
        let (group, begin) = (self.group.in_call(caller), Instant::now());
        let replica = (held(&self.model), &self.inventory.parameters[..]);
        self.optimizers.compare(optimizer, replica, rates, &group)?;
        self.waited_since(begin);
        Ok(())
    }

    /// The ranks compare what a program may have exchanged, in every 31st of these calls. Steps whose averages are not over all ranks are each rank's own.
    pub(crate) fn compare_again(&mut self, optimizer: &ModuleOptimizer, caller: Caller) -> Result<()> {
        let Some(sink) = self.engine.sink() else { return Ok(()) };
        if !sink.with_reducer(|reducer| reducer.averages_over_all()) {
            return Ok(());
        }
        let replica = (held(&self.model), &self.inventory.parameters[..]);
        self.optimizers.step(optimizer, replica, &self.group.in_call(caller))
    }

    /// An error on every rank if some optimizers have a state that others have not: parameters would drift apart without an error.
    pub(super) fn compare_states(&self, optimizer: &ModuleOptimizer) -> Result<()> {
        if self.has_common_state || self.engine.sink().is_none() {
            return Ok(());
        }
        let group = self.group.in_call(Caller::DdpStep);
        optimizer::check_states(optimizer, &group, &self.inventory.parameters)
    }

    /// Whether the ranks have compared their optimizers in this group.
    pub(crate) fn has_compared(&self) -> bool {
        self.optimizers.is_compared()
    }

    /// Floats that forward passes may change.
    pub(crate) fn buffers(&self) -> &HashSet<ParamId> {
        &self.inventory.buffers
    }

    /// From now on each rank gets the averages of the parameters that it owns; `owners` are in the order of
    /// [`parameters`](Self::parameters), and depend on these and on the number of ranks alone. Each optimizer of these parts keeps what this gives, which
    /// is the same until the group changes: several may step in turns.
    pub(crate) fn shard(&mut self, owners: Vec<Rank>) -> Result<ModelToken> {
        self.check_ranks()?;
        self.check_on_host("ZeroRedundancyOptimizer::new")?;
        if let Some(sink) = self.engine.sink() {
            sink.call(|reducer| reducer.shard(owners))?;
            self.sharded = true;
            // Earlier gradients are those of all parameters.
            self.token = ModelToken::default();
        }
        Ok(self.sharding.clone())
    }

    /// An error unless parameters are divided as when [`shard`](Self::shard) gave `sharding`, among the same ranks: the state of those that
    /// this rank did not own then is on others, or nowhere. Nobody waits for this rank.
    pub(crate) fn check_shards(&self, sharding: &ModelToken) -> Result<()> {
        self.check_ranks()?;
        if self.sharding.is(sharding) {
            return Ok(());
        }
        Err(Error::invalid_argument(
            "the ZeroRedundancyOptimizer has a part of the state for another Ddp, or for this one before it changed its group",
        )
        .with_remedy(
            "use the optimizer that was made for this Ddp; make it anew after the group has changed, with the whole state, such as that of a \
             checkpoint",
        ))
    }

    /// An error, on every rank alike, if the state of the optimizer is in a [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer), also in a world of
    /// one: `call` would leave it out.
    pub(crate) fn check_not_sharded(&self, call: &str) -> Result<()> {
        if !self.sharded && !self.sharding.is_shared() {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "{call}: a ZeroRedundancyOptimizer has the state of the optimizer, which the checkpoint would lack, and its steps are not counted"
        ))
        .with_remedy(
            "in the closure of Checkpoints::save_sharded, with a number of steps of your own, call TrainState::save_shard_to and then \
             ZeroRedundancyOptimizer::save",
        ))
    }

    /// Gives every rank the parameters of their owners.
    pub(crate) fn gather_parameters(&mut self) -> Result<()> {
        let Some(sink) = self.engine.sink() else { return Ok(()) };
        let (model, indices) = (held(&self.model), &self.inventory.indices);
        sink.call(|reducer| {
            reducer.gather_parameters(|give| {
                parameters::each(model, indices, |index, own| give(index, own.bytes))
            })
        })?;
        // Moved and not cloned, so that parameters are written in place.
        let model = self.model.take();
        self.model = sink.with_reducer(|reducer| {
            let others = |index| reducer.parameter(index).ok().filter(|_| !reducer.owns(index));
            let model = model.map(|model| parameters::replaced(model, indices, others));
            let model = model.map(|model| self.inventory.ties.retie(model));
            if self.gradient_as_bucket_view {
                reducer.release();
            }
            model
        });
        Ok(())
    }
}
