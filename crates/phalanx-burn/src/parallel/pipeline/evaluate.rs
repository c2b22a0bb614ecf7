//! A pipeline's forward passes alone.

use burn::tensor::Tensor;
use phalanx::pipeline::{Action, Pass};
use phalanx::{Caller, Error, ReduceOp, Result};

use super::inbox::Inbox;
use super::outbox::Outbox;
use super::{Pipeline, Stage, StageOutput};
use crate::Scalar;

/// The mean loss of all micro-batches, on every rank.
pub(super) fn mean_loss<S: Stage<D>, const D: usize>(
    pipeline: &mut Pipeline<D>,
    stages: &[S],
    batches: &[S::Batch],
) -> Result<f64> {
    pipeline.check(batches.len(), stages.len())?;
    let Pipeline { group, plan, inputs, .. } = pipeline;
    let is_forward = |action: &Action| action.pass == Pass::Forward;
    let (mut inbox, outbox) = (Inbox::new(group, plan, D, is_forward), Outbox::new(group));
    let Some(device) = stages.iter().flat_map(|stage| stage.devices()).next() else {
        return Err(Error::invalid_argument("the stages of this rank have no parameters"));
    };
    let mut sum = 0.0;
    for action in plan.actions(group.rank().index()).iter().copied().filter(is_forward) {
        let Action { stage, microbatch, .. } = action;
        let input = match stage.checked_sub(1) {
            Some(before) => {
                let data = inbox.take(action, plan.rank_of(before), inputs)?;
                let dtype = data.dtype();
                Some(Tensor::<D>::from_data(data, (&device, dtype)))
            }
            None => None,
        };
        let output = stages[stage / plan.ranks()].forward(input, &batches[microbatch]);
        match output.checked(stage, plan.stages())? {
            StageOutput::Hidden(hidden) => outbox.pass_on(action, hidden, plan, inputs, &inbox.arrived)?,
            StageOutput::Loss(loss) => sum += loss.detach().number()?,
        }
    }
    outbox.finish()?;
    // The last stage's rank alone has losses.
    group.in_call(Caller::PipelineTrain).all_reduce(std::slice::from_mut(&mut sum), ReduceOp::Sum)?;
    Ok(sum / plan.microbatches() as f64)
}
