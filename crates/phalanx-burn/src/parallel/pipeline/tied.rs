//! A parameter that two stages share.

use burn::module::{Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use phalanx::{Caller, Error, ProcessGroup, Rank, ReduceOp, Result};

use crate::Collectives;

/// A parameter that several stages use, each with a copy of its own, such as an embedding in the first stage and the decoder that is
/// tied to it in the last: their gradients are added up, so that the copies stay equal.
///
/// ```
/// # use burn::{module::Param, optim::ModuleOptimizer, tensor::Tensor};
/// # use phalanx_burn::{Ddp, parallel::pipeline::{PipelineStep, Stage, TiedParameter}};
/// # fn show<S: Stage<3>>(ddp: &mut Ddp<Vec<S>>, optimizer: &mut ModuleOptimizer, mut step: PipelineStep, tied: &TiedParameter,
/// #     embedding: Option<&Param<Tensor<2>>>) -> phalanx::Result<()> {
/// // Once: let (tied, embedding) = TiedParameter::new(embedding, &pipeline_group)?;
/// if let Some(embedding) = embedding {
///     tied.sum(embedding, &mut step.gradients)?; // after Pipeline::train, on the ranks that have it
/// }
/// ddp.step(optimizer, 1e-3, step.gradients)?;
/// # Ok(())
/// # }
/// ```
///
/// Stages on one rank need none of this: they share a clone of the parameter.
///
/// To clip gradients after that, give the copies to [`parallel::clip_grad_norm`](crate::parallel::clip_grad_norm), so that they count once.
#[derive(Clone, Debug)]
pub struct TiedParameter {
    /// The ranks that have a copy; None on the others.
    group: Option<ProcessGroup>,
}

impl TiedParameter {
    /// Among the ranks of `group`, a pipeline's, that give a parameter. Returns it with the values of the first of these ranks, and with an
    /// id of its own on each, in which [`Pipeline::train`](super::Pipeline::train) sees that the copies are not trained apart: put it into
    /// all its places in this rank's stages, and make groups of an optimizer's parameters that go by ids after that. All ranks of the group call it together.
    ///
    /// # Errors
    /// If the ranks' parameters differ in shape or type, or the exchange fails.
    pub fn new<const D: usize>(
        parameter: Option<Param<Tensor<D>>>,
        group: &ProcessGroup,
    ) -> Result<(Self, Option<Param<Tensor<D>>>)> {
        let group = group.in_call(Caller::PipelineTrain).split(parameter.is_some().then_some(0), 0)?;
        let (Some(group), Some(parameter)) = (&group, parameter) else {
            return Ok((Self { group: None }, None));
        };
        let value = parameter.base().clone().detach().broadcast(group, Rank::MAIN)?;
        let (_, old, mapper) = parameter.consume();
        let copy =
            Param::from_mapped_value(ParamId::new(), value.set_require_grad(old.is_require_grad()), mapper);
        Ok((Self { group: Some(group.clone()) }, Some(copy)))
    }

    /// Whether this rank's copy is the one that counts in a norm.
    pub(in crate::parallel) fn is_first(&self) -> bool {
        self.group.as_ref().is_none_or(|group| group.rank().is_main())
    }

    /// Adds up the gradients of all copies. The ranks that have one call it together, each with its own `parameter` and the gradients
    /// of its stages.
    ///
    /// # Errors
    /// If this rank gave no parameter, or the gradients have none for it; if the exchange fails.
    pub fn sum<const D: usize>(
        &self,
        parameter: &Param<Tensor<D>>,
        gradients: &mut GradientsParams,
    ) -> Result<()> {
        let Some(group) = &self.group else {
            return Err(Error::invalid_argument("this rank has no copy of the tied parameter").with_remedy(
                "call TiedParameter::sum on the ranks that gave TiedParameter::new a parameter",
            ));
        };
        let id: ParamId = parameter.id;
        let Some(gradient) = gradients.remove::<D>(id) else {
            let error = Error::invalid_argument("a copy of a tied parameter has no gradient");
            group.abort_all(error.clone());
            return Err(error);
        };
        gradients.register(id, gradient.all_reduce(group, ReduceOp::Sum)?);
        Ok(())
    }
}
