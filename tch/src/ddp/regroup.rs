//! A `Ddp` that changes from one group to another, and ranks that end at different times.

use phalanx::join::JoinOptions;
use phalanx::reducer::Reducer;
use phalanx::{Caller, Error, ProcessGroup, Result};
use tch::Tensor;

use super::{Ddp, DdpOptions, prepare};
use crate::Optimizer;
use crate::tensors::Named;

impl Ddp {
    /// Runs `body`, such as an epoch, whose number of batches may differ between ranks. A rank that is done answers the
    /// others until the last one is done: it contributes zeros to their averages. All ranks call it together, and
    /// return together.
    ///
    /// Afterwards, if some ranks were done earlier, all ranks have the variables and the optimizer's state of a rank that
    /// took part to the end. All other code that calls collectives inside `body`, such as a synchronised batch norm, must
    /// do so through the same [`JoinGroup`](phalanx::join::JoinGroup).
    ///
    /// # Errors
    /// As [`JoinGroup::join`](phalanx::join::JoinGroup::join).
    pub fn join<T>(
        &mut self,
        optimizer: &mut Optimizer,
        options: JoinOptions,
        body: impl FnOnce(&mut Self, &mut Optimizer) -> Result<T>,
    ) -> Result<T> {
        let group = self.group.clone();
        let joined = group.join(options, || body(self, optimizer))?;
        if joined.uneven {
            if let Some(sink) = &self.sink {
                sink.adopt(joined.last)?;
            }
            self.take_state(Caller::Join, joined.last)?;
            self.buffers_stale = false;
            optimizer.adopt(&self.group.in_call(Caller::Join), joined.last)?;
        }
        Ok(joined.value)
    }

    /// Changes to `group`, on all of whose ranks the variables are equal already; it checks that they are the same.
    /// What belonged to the previous group, such as a communication hook, is removed.
    pub(crate) fn enter(&mut self, group: &ProcessGroup, options: &DdpOptions) -> Result<()> {
        self.unhook();
        // Other users of the handle, such as a synchronised batch norm, change with it.
        self.group.rebind(group.clone())?;
        // Made again: parameters may have been frozen since.
        (self.inventory, self.sink) = prepare(&self.variables, &self.group, options)?;
        (self.buffers_stale, self.broadcast_buffers) = (false, options.broadcast_buffers);
        Ok(())
    }

    /// Leaves its group, for one of this process alone.
    pub(crate) fn leave(&mut self, alone: &ProcessGroup) {
        self.unhook();
        // It fails only inside a `join`, and those have ended with the loop; entering the next group would report it.
        let _free = self.group.rebind(alone.clone());
        self.buffers_stale = false;
    }

    /// [`backward`](Self::backward) with gradients that can be [averaged again](Self::replay) if a peer's failure cuts
    /// it off.
    pub(crate) fn backward_replayable(&mut self, loss: &Tensor) -> Result<()> {
        if let Some(sink) = &self.sink {
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
        self.backward(loss)
    }

    /// Averages the gradients of the last [`backward_replayable`](Self::backward_replayable) in `group`.
    pub(crate) fn replay(&mut self, group: &ProcessGroup) -> Result<()> {
        self.group.rebind(group.clone())?;
        match &self.sink {
            Some(sink) => sink.replay(),
            None => Err(Error::aborted("a world of one keeps no gradients")),
        }
    }

    /// Changes to `group`, which has the remaining ranks of this one, between steps.
    pub(crate) fn follow(&mut self, group: &ProcessGroup) -> Result<()> {
        self.group.rebind(group.clone())?;
        self.sink.as_ref().map_or(Ok(()), |sink| sink.call(Reducer::regrouped))
    }

    /// Gives all ranks rank 0's buffers now, instead of before the next forward pass.
    pub(crate) fn agree(&mut self) -> Result<()> {
        if self.sink.is_none() {
            return Ok(());
        }
        self.buffers_stale = false;
        self.take_buffers(Caller::ElasticCommit)
    }

    /// Every variable, by name.
    pub(crate) fn state(&self) -> &[Named] {
        &self.inventory.state
    }

    /// All its collectives go through this handle, by which it changes its group.
    pub(crate) fn group(&self) -> &phalanx::join::JoinGroup {
        &self.group
    }

    /// The same variables in another group, from rank 0.
    pub(crate) fn again(mut self, group: phalanx::join::JoinGroup, options: &DdpOptions) -> Result<Self> {
        self.unhook();
        Self::of(self.variables.clone(), group, options)
    }
}
