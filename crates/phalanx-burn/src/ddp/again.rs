//! Steps of an elastic job that a death cuts off.

use std::sync::Arc;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use phalanx::{Error, ProcessGroup, Result, elastic};

use super::{Ddp, Engine, check_tracked, delivery, held};
use crate::gradients::{Handover, averages};
use crate::packed::Packed;

impl<M: Module> Ddp<M> {
    /// [`backward`](Self::backward) of gradients that can be averaged [again](Self::average_again), if a peer's failure cuts it
    /// off and nothing of this rank's is lost; else the error leads back to the last commit.
    pub(crate) fn backward_keeping<const D: usize>(&mut self, loss: &Tensor<D>) -> Result<GradientsParams> {
        let Engine::Together { sink, passes } = &mut self.engine else { return self.backward(loss) };
        check_tracked(loss)?;
        self.buffers_stale = true;
        let delivery = delivery(passes)?;
        let begun = sink.start_keeping(delivery).map(|()| drop(loss.backward()));
        begun.and_then(|()| self.average()).map_err(|error| self.repeatable(error))
    }

    /// Averages the gradients of the last [`backward_keeping`](Self::backward_keeping) in `group`.
    pub(crate) fn average_again(&mut self, group: &ProcessGroup) -> Result<GradientsParams> {
        self.group.rebind(group.clone())?;
        self.average().map_err(|error| self.repeatable(error))
    }

    /// Goes over to `group`, whose ranks are all of this one's who are left, between steps.
    pub(crate) fn rebind(&mut self, group: &ProcessGroup) -> Result<()> {
        self.group.rebind(group.clone())?;
        // Memory of the group before.
        (self.packed_buffers, self.packed_weights) = (Packed::default(), Packed::default());
        match &self.engine {
            Engine::Alone { .. } => Ok(()),
            Engine::Together { sink, .. } => sink.rebind(Arc::new(self.group.clone())),
        }
    }

    fn average(&self) -> Result<GradientsParams> {
        let Engine::Together { sink, .. } = &self.engine else { return Err(lost()) };
        let handover = Handover { scale: 1.0, view: self.gradient_as_bucket_view };
        let model = held(&self.model);
        sink.finish_in(Arc::new(self.group.clone()), |reducer| {
            averages(model, reducer, &self.places, handover)
        })
    }

    /// `error`, if the step can be averaged again. It cannot if this rank has ended the group: for what the reducer cannot do,
    /// or for statistics that a batch norm did not get, without which gradients are no numbers.
    fn repeatable(&self, error: Error) -> Error {
        if self.group.was_aborted() { elastic::go_back(error) } else { error }
    }
}

fn lost() -> Error {
    elastic::go_back(Error::aborted("a world of one keeps no gradients"))
}
