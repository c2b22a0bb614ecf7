//! Gradient clipping for a model of which each rank has a part.

use std::collections::HashMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use phalanx::{Caller, Error, ProcessGroup, ReduceOp, Result, adapter};

use super::division::{Span, divided};
use super::pipeline::TiedParameter;
use super::tensor::TensorGroup;
use crate::clip;

/// Scales `gradients` of `model`, this rank's part of a larger one, so that the norm of the whole model's gradients is at most
/// `max_norm`; gives the 2-norm from before, with the same bits on every rank. What [`clip_grad_norm`](crate::clip_grad_norm) does
/// for a model that a rank has all of.
///
/// `tensor` is the group among which layers are divided, and `pipeline` the one among which stages are, if there are such. `tied` are
/// the [tied parameters](TiedParameter) of which this rank has a copy, each with the copy's id in `model`: they count on the first rank
/// that has a copy. What
/// the layers of [`tensor`](super::tensor) divide, or [`TensorGroup::shard`], is added up over the ranks; every other parameter counts once.
/// All ranks call it together.
///
/// # Errors
/// If `max_norm` is not a positive number, a gradient is no float, or the exchange fails.
pub fn clip_grad_norm<M: Module>(
    model: &M,
    gradients: &mut GradientsParams,
    max_norm: f64,
    tensor: Option<&TensorGroup>,
    pipeline: Option<&ProcessGroup>,
    tied: &[(&TiedParameter, ParamId)],
) -> Result<f64> {
    adapter::check_max_norm(max_norm)?;
    let divided = divided(model);
    let counts = |id: &ParamId| {
        let is_copy = tied.iter().any(|(tied, copy)| copy == id && !tied.is_first());
        !is_copy && tensor.is_none_or(|group| group.rank() == 0 || divided.contains_key(id))
    };
    let squares = clip::squares_of(model, gradients)?;
    let mut sum: f64 = squares.iter().filter(|(id, _)| counts(id)).map(|(_, squares)| squares).sum();
    if let Some(group) = tensor {
        group.sum(&mut sum)?;
    }
    if let Some(group) = pipeline {
        group.in_call(Caller::PipelineTrain).all_reduce(std::slice::from_mut(&mut sum), ReduceOp::Sum)?;
    }
    Ok(clip::scale(model, gradients, max_norm, std::iter::once(sum)))
}

/// An error if this rank has only a part of a parameter of `model` that is trained: each rank would take its part's norm for the whole one,
/// and scale what all of them have by a factor of its own.
pub(crate) fn refuse_parts<M: Module>(model: &M) -> Result<()> {
    let spans = divided(model);
    if spans.is_empty() {
        return Ok(());
    }
    let mut parts = Parts { spans, path: Vec::new(), found: None };
    model.visit(&mut parts);
    parts.found.map_or(Ok(()), |name| {
        Err(Error::invalid_argument(format!(
            "this rank has a part of `{name}`, which is divided among tensor-parallel ranks: the norm of its gradients is not the model's"
        ))
        .with_remedy("clip with phalanx_burn::parallel::clip_grad_norm, which knows what is divided"))
    })
}

/// Finds a parameter of which others have a part.
struct Parts {
    spans: HashMap<ParamId, Span>,
    path: Vec<String>,
    found: Option<String>,
}

impl ModuleVisitor for Parts {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // Of a group of one rank, the part is the whole.
        if let Some(span) = self.spans.get(&param.id)
            && param.is_require_grad()
            && param.shape().as_slice().get(span.dim) != Some(&span.total)
        {
            self.found.get_or_insert_with(|| self.path.join("."));
        }
    }
}
