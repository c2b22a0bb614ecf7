//! Replay of a step of an elastic job that a death has cut off.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Tensor;
use phalanx::{Error, ProcessGroup, Result};

use super::{Ddp, Engine, check_tracked, delivery, held};
use crate::gradients::{Handover, SyncedGradients, averages};
use crate::packed::Packed;

impl<M: Module> Ddp<M> {
    /// [`backward`](Self::backward) of gradients that can be [averaged again](Self::replay) if a peer's failure cuts it off.
    /// Not if this rank itself has ended the group: because the reducer failed, or because a batch norm did not get its
    /// statistics, without which gradients are NaN.
    pub(crate) fn backward_replayable<const D: usize>(
        &mut self,
        loss: &Tensor<D>,
    ) -> Result<SyncedGradients> {
        let Engine::Together { sink, passes } = &mut self.engine else { return self.backward(loss) };
        check_tracked(loss)?;
        if self.group.running().is_some() {
            return Err(Error::invalid_argument("inside `join` no step of an elastic job can be done again")
                .with_remedy(
                    "use an ElasticSampler, which gives every rank as many batches, and no `join`",
                ));
        }
        self.buffers_stale = true;
        sink.start_replayable(delivery(passes)?)?;
        drop(loss.backward());
        self.average()
    }

    /// Averages the gradients of the last [`backward_replayable`](Self::backward_replayable) in `group`.
    pub(crate) fn replay(&mut self, group: &ProcessGroup) -> Result<SyncedGradients> {
        self.group.rebind(group.clone())?;
        self.average()
    }

    /// Changes to `group`, which has the ranks that are left of this one, between steps; not if gradients are sharded.
    pub(crate) fn follow(&mut self, group: &ProcessGroup) -> Result<bool> {
        if self.sharded {
            return Ok(false);
        }
        self.group.rebind(group.clone())?;
        // Their memory is that of the previous group.
        (self.packed_buffers, self.packed_weights) = (Packed::default(), Packed::default());
        if let Engine::Together { sink, .. } = &self.engine {
            sink.rebind(Arc::new(self.group.clone()))?;
        }
        Ok(true)
    }

    fn average(&self) -> Result<SyncedGradients> {
        let Engine::Together { sink, .. } = &self.engine else {
            return Err(Error::aborted("a world of one keeps no gradients"));
        };
        let handover = Handover { scale: 1.0, view: self.gradient_as_bucket_view };
        let model = held(&self.model);
        let averages = sink.finish_in(Arc::new(self.group.clone()), |reducer| {
            averages(model, reducer, &self.places, handover)
        })?;
        Ok(SyncedGradients::new(averages, &self.token))
    }
}
