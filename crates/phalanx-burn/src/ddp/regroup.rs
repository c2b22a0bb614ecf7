//! One `Ddp` in one group after another.

use burn::module::Module;
use phalanx::join::JoinGroup;
use phalanx::{Caller, ProcessGroup, Result, WorldSize};

use super::{Ddp, DdpOptions, Engine, engine, held, places};
use crate::gradients::ModelToken;
use crate::packed::Packed;
use crate::parameters::{Inventory, Parameter};

impl<M: Module> Ddp<M> {
    /// Goes over to `group`, on all of whose ranks the model is the same already; that it is built alike is checked. What
    /// belonged to the group before, such as a communication hook, is gone.
    pub(crate) fn enter(&mut self, group: &ProcessGroup, options: &DdpOptions) -> Result<()> {
        // What else has the handle, such as a synchronised batch norm, goes over with it.
        self.group.rebind(group.clone())?;
        // Anew: something may have been frozen since.
        let prepared = Inventory::of(self.model())
            .and_then(|inventory| Ok((engine(&inventory, &self.group, options)?, inventory)));
        let (engine, inventory) = prepared.inspect_err(|error| {
            if group.world_size() != WorldSize::ONE {
                // The other ranks may be waiting to compare their model with this one's.
                group.abort(error.clone());
            }
        })?;
        self.settle(engine);
        (self.places, self.inventory) = (places(&inventory), inventory);
        self.broadcast_buffers = options.broadcast_buffers;
        self.gradient_as_bucket_view = options.gradient_as_bucket_view;
        Ok(())
    }

    /// The handle by which it goes from group to group.
    pub(crate) fn handle(&self) -> &JoinGroup {
        &self.group
    }

    /// Lets go of its group, for one of this process alone.
    pub(crate) fn leave(&mut self, alone: &ProcessGroup) {
        // It fails only inside a `join`, and those have ended with the loop; entering the next group would say so.
        let _free = self.group.rebind(alone.clone());
        self.settle(Engine::Alone { held: None });
    }

    /// Makes the buffers of all ranks rank 0's now, and not only before the next forward pass.
    pub(crate) fn agree(&mut self) -> Result<()> {
        if self.inventory.buffers.is_empty() || matches!(self.engine, Engine::Alone { .. }) {
            return Ok(());
        }
        self.buffers_stale = false;
        self.take_buffers(Caller::ElasticCommit)
    }

    /// Every tensor of the model, in module order.
    pub(crate) fn state(&self) -> &[Parameter] {
        &self.inventory.state
    }

    /// Applies to the buffers what forward passes have put off: Burn updates running state late.
    pub(crate) fn settle_buffers(&self) {
        if !self.inventory.buffers.is_empty() {
            drop(held(&self.model).valid());
        }
    }

    /// Replaces the model by what `change` makes of it. Gradients from before are no longer its own.
    pub(crate) fn map(&mut self, change: impl FnOnce(M) -> M) {
        self.token = ModelToken::default();
        self.model = self.model.take().map(change);
    }

    fn settle(&mut self, engine: Engine<M>) {
        self.engine = engine;
        self.token = ModelToken::default();
        (self.buffers_stale, self.sharded) = (false, false);
        // Memory of the group before.
        (self.packed_buffers, self.packed_weights) = (Packed::default(), Packed::default());
    }
}
