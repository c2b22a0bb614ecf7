//! A parameter that two stages share.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use phalanx::reducer::verify_description;
use phalanx::{Caller, Error, ProcessGroup, Rank, ReduceOp, Result};

use super::super::division::{Part, parts};
use crate::{Collectives, alike, read_back};

/// The most elements of a copy that are compared.
const SAMPLE: usize = 4096;

/// A parameter that several stages use, each with a copy of its own, such as an embedding in the first stage and the decoder that is
/// tied to it in the last: their gradients are added up, so that the copies stay equal.
///
/// ```
/// # use burn::{module::Param, optim::ModuleOptimizer, tensor::Tensor};
/// # use phalanx_burn::{Ddp, parallel::pipeline::{PipelineStep, Stage, TiedParameter}};
/// # fn show<S: Stage<3>>(ddp: &mut Ddp<Vec<S>>, optimizer: &mut ModuleOptimizer, mut step: PipelineStep, tied: &TiedParameter,
/// #     embedding: Option<&Param<Tensor<2>>>) -> phalanx::Result<()> {
/// // Once: let (tied, embedding) = TiedParameter::new(embedding, &pipeline_group)?;
/// // In each step `embedding` is this rank's copy in ddp.model(): its stages' Param, as the last step has left it.
/// if let Some(embedding) = embedding {
///     tied.sum(embedding, &mut step.gradients)?; // after Pipeline::train, on the ranks that have it
/// }
/// ddp.step(optimizer, 1e-3, step.gradients)?;
/// # Ok(())
/// # }
/// ```
///
/// Give the ranks that have a copy the same optimizer, with the same settings and learning rates, though other stages may have others. In the first two
/// steps, and every 31 steps, up to 4,096 elements of the copies are compared.
///
/// Stages on one rank need none of this: they share a clone of the parameter.
///
/// To clip gradients after that, give the copies to [`parallel::clip_grad_norm`](crate::parallel::clip_grad_norm), so that they count once.
#[derive(Clone, Debug)]
pub struct TiedParameter {
    /// The ranks that have a copy; None on the others.
    group: Option<ProcessGroup>,
    /// How often gradients were added up; clones have one number.
    calls: Arc<AtomicUsize>,
}

impl TiedParameter {
    /// Among the ranks of `group`, a pipeline's, that give a parameter. Returns it with the values of the first of these ranks, and with an
    /// id of its own on each, in which [`Pipeline::train`](super::Pipeline::train) sees that the copies are not trained apart: put it into
    /// all its places in this rank's stages, and make groups of an optimizer's parameters that go by ids after that. All ranks of the group call it together.
    ///
    /// # Errors
    /// If the ranks' parameters differ in shape or type, or are other parts of a divided layer, or the exchange fails.
    pub fn new<const D: usize>(
        parameter: Option<Param<Tensor<D>>>,
        group: &ProcessGroup,
    ) -> Result<(Self, Option<Param<Tensor<D>>>)> {
        let group = group.in_call(Caller::PipelineTrain).split(parameter.is_some().then_some(0), 0)?;
        let (Some(group), Some(parameter)) = (&group, parameter) else {
            return Ok((Self { group: None, calls: Arc::default() }, None));
        };
        let own = parameter.base().clone().detach();
        let part = parts(&parameter).remove(&parameter.id).map(|Part { span, rank, ranks }| {
            format!(", part {rank} of {ranks} of the {} along dimension {}", span.total, span.dim)
        });
        // The first one's elements would fit a copy of another shape, and another part of a divided layer, too.
        let layout = format!("{:?} {:?}{}", own.dtype(), own.dims(), part.unwrap_or_default());
        verify_description(group, "copy of a tied parameter", &layout).map_err(|error| match error.is_mismatch() {
            true => error.with_remedy(
                "give copies of one shape and type: the weight of an Embedding is [vectors, width], and that of a Linear \
                 [inputs, outputs], so compute with its transpose() in one of the stages; of a divided layer, give the same part on \
                 every rank of the group, as those of a mesh's pipeline group have",
            ),
            false => error,
        })?;
        let value = own.broadcast(group, Rank::MAIN)?;
        let copy = Module::map(parameter, &mut Copier { value: Some(value.into_dispatch()) });
        Ok((Self { group: Some(group.clone()), calls: Arc::default() }, Some(copy)))
    }

    /// Whether this rank's copy is the one that counts in a norm.
    pub(in crate::parallel) fn is_first(&self) -> bool {
        self.group.as_ref().is_none_or(|group| group.rank().is_main())
    }

    /// Adds up the gradients of all copies. The ranks that have one call it together, each with its own `parameter`, as its stages have it in this step,
    /// and the gradients of its stages. The one that [`new`](Self::new) has given keeps its first elements: with it, no copy is seen to drift apart.
    ///
    /// # Errors
    /// If this rank gave no parameter, or the gradients have none for it; if the exchange fails. On every rank that has a copy, if the copies are not the
    /// same by now. Each of these but the first ends the rank's groups.
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
        let sum = self.compare(parameter, group).and_then(|()| {
            let gradient = gradients.remove::<D>(id);
            let missing = || Error::invalid_argument("a copy of a tied parameter has no gradient");
            gradient.ok_or_else(missing)?.all_reduce(group, ReduceOp::Sum)
        });
        // The others wait for this rank's gradient.
        gradients.register(id, sum.inspect_err(|error| group.abort_all(error.clone()))?);
        Ok(())
    }

    /// An error on every rank of `group` if its copies differ by more than rounding, in a call in which they are compared.
    fn compare<const D: usize>(&self, parameter: &Param<Tensor<D>>, group: &ProcessGroup) -> Result<()> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        if call > 1 && !call.is_multiple_of(alike::WINDOW) {
            return Ok(());
        }
        let own = parameter.base().clone().detach();
        let epsilon = own.dtype().finfo().map_or(0.0, |info| info.epsilon as f32);
        let own = read_back::data(own)?;
        let distance = own.num_elements().div_ceil(SAMPLE).max(1);
        let sample: Vec<f32> = own.iter::<f32>().step_by(distance).collect();
        let are_near = |main: &[f32], own: &[f32]| {
            main.iter().zip(own).all(|pair| alike::has_not_drifted(pair, epsilon))
        };
        let Some(rank) = alike::first_other(&sample, are_near, group)? else { return Ok(()) };
        let [first, other] = [Rank::MAIN, rank].map(|rank| group.global_rank(rank));
        let (first, other) = (first?, other?);
        Err(Error::mismatch(format!(
            "the copies of a tied parameter on the ranks {first} and {other} differ: they were changed otherwise than by the same optimizer"
        ))
        .with_peer(other)
        .with_remedy(
            "give the stages that have a copy the same optimizer, settings and learning rates, and load the same checkpoint into all of them",
        ))
    }
}

/// Gives a parameter another value and an id of its own. What is noted at it stays, such as which part of a divided one it is.
struct Copier {
    /// Of the parameter itself, which is mapped first.
    value: Option<DispatchTensor>,
}

impl ModuleMapper for Copier {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(value) = self.value.take() else { return param };
        let (_, old, mapper) = param.consume();
        let value = Tensor::<D>::from_dispatch(value).set_require_grad(old.is_require_grad());
        Param::from_mapped_value(ParamId::new(), value, mapper)
    }
}
