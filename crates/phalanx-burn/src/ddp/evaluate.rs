//! A model for evaluation, the same on every rank.

use std::time::Instant;

use burn::module::Module;
use phalanx::reducer::Reducer;
use phalanx::{Caller, Communicator, Rank, Result, WorldSize};

use super::Ddp;
use crate::parallel::Sharers;
use crate::parameters::Select;
use crate::replicas;

impl<M: Module> Ddp<M> {
    /// Runs `pass` on the model without autodiff, as [`Module::valid`] makes it, with the buffers of rank 0, such as the running
    /// statistics of batch norm: every rank evaluates the same model. All ranks call it together. Inside [`join`](Self::join) those
    /// that still have data do, and the buffers are those of the first of them.
    ///
    /// ```
    /// # use burn::{nn::Linear, tensor::Tensor};
    /// # fn evaluate(ddp: &mut phalanx_burn::Ddp<Linear>, unseen: Tensor<2>, group: &phalanx::ProcessGroup) -> phalanx::Result<f64> {
    /// // Each rank looks at its own part of the data.
    /// let loss = ddp.evaluate(|model| model.forward(unseen).mean())?;
    /// ddp.mean(loss)
    /// # }
    /// ```
    ///
    /// It communicates only if the model has buffers, and changes neither the model nor its training: between two steps each rank
    /// keeps the buffers of its own last batch. [`DdpOptions::broadcast_buffers`](super::DdpOptions::broadcast_buffers) is about
    /// training alone; the model of an evaluation is rank 0's also without it. PyTorch evaluates with each rank's own buffers, which
    /// differ between ranks.
    ///
    /// Parameters are equal on all ranks anyway, unless ranks train by themselves
    /// ([`PostLocalSgd`](phalanx::reducer::hooks::PostLocalSgd)): call [`average_parameters`](Self::average_parameters) before.
    ///
    /// # Errors
    /// If the exchange of buffers fails. If the ranks would not evaluate the same model, because the group is a
    /// [`GroupHandle`](phalanx::GroupHandle) that leads to other ranks than when this `Ddp` was made, or, of a model with buffers, because they made other
    /// numbers of steps in a [`join`](Self::join) of another `Ddp`. A panic of `pass` ends the groups as in [`forward`](Self::forward).
    #[doc(alias("eval", "valid"))]
    pub fn evaluate<T>(&mut self, pass: impl FnOnce(&M) -> T) -> Result<T> {
        self.check_world()?;
        // A rank that is alone by now has its own model to evaluate.
        let sink = self.engine.sink().filter(|_| self.group.world_size() != WorldSize::ONE);
        if let Some(sink) = sink.filter(|_| !self.has_buffers()) {
            // Nobody waits for this rank.
            sink.with_reducer(|reducer| reducer.check_group())?;
        }
        // Running state defers the last forward pass's update; this applies it, and the result shares no running state with the model.
        let mut model = self.model().valid();
        if let Some(sink) = sink.filter(|_| self.has_buffers()) {
            sink.call(Reducer::check_joined)?;
            let (select, begin) = (Select::Only(&self.inventory.buffers), Instant::now());
            let group = self.group.in_call(Caller::DdpEvaluate);
            self.packed_buffers.receive(&model, &group, Rank::MAIN, select)?;
            if self.group.rank() != Rank::MAIN {
                model = self.packed_buffers.unpack(model, select);
            }
            self.waited_since(begin);
        }
        let _end = self.sharers.as_ref().map(Sharers::end_if_panicked);
        Ok(pass(&model))
    }

    /// Whether the buffers of all replicas, such as the running statistics of batch norm, are the same, bit for bit. All ranks must call
    /// it, and get the same answer. After a step they are each rank's own, until the next [`forward`](Self::forward) takes over rank
    /// 0's; [`evaluate`](Self::evaluate) uses rank 0's in any case.
    ///
    /// # Errors
    /// If the exchange fails.
    pub fn buffers_identical(&self) -> Result<bool> {
        self.settle_buffers();
        let group = self.group.in_call(Caller::DdpBuffersIdentical);
        replicas::identical(self.model(), &group, Select::Only(&self.inventory.buffers))
    }

    /// Whether forward passes may change a part of the model.
    fn has_buffers(&self) -> bool {
        !self.inventory.buffers.is_empty()
    }
}
