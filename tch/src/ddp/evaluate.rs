//! An evaluation, the same on every rank.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Instant;

use phalanx::reducer::Reducer;
use phalanx::trace::Track;
use phalanx::{Caller, Communicator, Result, WorldSize};

use super::Ddp;
use crate::tensors;

impl Ddp {
    /// Runs `pass`, in which the model is evaluated, without gradients (`tch::no_grad`) and with the buffers of rank 0, such as the
    /// running statistics of batch norm: every rank evaluates the same model. All ranks call it together. Inside [`join`](Self::join)
    /// those that still have data do, and the buffers are those of the first of them.
    ///
    /// The model must be told that it does not train, as in `model.forward_t(&x, false)`.
    ///
    /// It communicates only if the model has buffers, and does not change the training: afterwards, also if `pass` panics, each rank has its
    /// own buffers again.
    /// [`DdpOptions::broadcast_buffers`](super::DdpOptions::broadcast_buffers) is about training alone. PyTorch evaluates with each rank's
    /// own buffers, which differ between ranks.
    ///
    /// Parameters are equal on all ranks anyway, unless ranks train by themselves
    /// ([`PostLocalSgd`](phalanx::reducer::hooks::PostLocalSgd)): call [`average_parameters`](Self::average_parameters) before.
    ///
    /// # Errors
    /// If the exchange of buffers fails; or if a call of [NCCL](Self::with_nccl)'s has failed, for which this waits: the parameters are worth nothing then. If
    /// the ranks would not evaluate the same model, because the group is a `GroupHandle` that leads to other ranks than when this `Ddp` was made, or, of a
    /// model with buffers, because they made other numbers of steps in a [`join`](Self::join) of another `Ddp`.
    #[doc(alias = "eval")]
    pub fn evaluate<T>(&mut self, pass: impl FnOnce() -> T) -> Result<T> {
        let (begin, buffers) = (Instant::now(), self.inventory.buffers());
        self.check_world()?;
        // A rank that is alone by now has its own model to evaluate.
        let sink = self.sink.as_ref().filter(|_| self.group.world_size() != WorldSize::ONE);
        if let Some(sink) = sink.filter(|_| buffers.is_empty()) {
            // Nobody waits for this rank.
            sink.with_reducer(|reducer| reducer.check_group())?;
        }
        self.or_end(self.await_settled())?;
        let mut own = Vec::new();
        if let Some(sink) = sink.filter(|_| !buffers.is_empty()) {
            sink.call(Reducer::check_joined)?;
            own = self.or_end(tensors::copies(&buffers))?;
            self.take_buffers(Caller::DdpEvaluate)?;
        }
        self.waited_since(begin);
        // A program may catch the panic of `pass`, and train on: `tch::no_grad` would leave its thread without gradients.
        let output = catch_unwind(AssertUnwindSafe(|| {
            let _guard = tch::no_grad_guard();
            pass()
        }));
        let mut own = buffers.iter().zip(&own);
        let restored =
            self.or_end(own.try_for_each(|(buffer, elements)| tensors::write_elements(buffer, elements)));
        let output = match output {
            Ok(output) => output,
            Err(panic) => resume_unwind(panic),
        };
        restored?;
        self.group.trace().complete(Track::Forward, "evaluate", begin, Instant::now(), &[]);
        Ok(output)
    }

    /// Whether the buffers of all replicas, such as the running statistics of batch norm, are the same, bit for bit. All ranks must call
    /// it, and get the same answer. After a step they are each rank's own, until the next [`forward`](Self::forward) takes over rank
    /// 0's; [`evaluate`](Self::evaluate) uses rank 0's in any case.
    ///
    /// # Errors
    /// If the exchange fails.
    pub fn buffers_identical(&self) -> Result<bool> {
        let group = self.group.in_call(Caller::DdpBuffersIdentical);
        self.or_end(tensors::identical(&group, &self.inventory.buffers()))
    }
}
