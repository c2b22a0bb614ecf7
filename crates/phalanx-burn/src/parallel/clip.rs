//! Gradient clipping for a model of which each rank has a part.

use std::collections::HashMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use phalanx::{Caller, Error, ProcessGroup, ReduceOp, Result, adapter};

use super::division::{self, Span, divided, noted};
use super::fsdp::UNIT;
use super::pipeline::TiedParameter;
use super::tensor::TensorGroup;
use crate::clip;
use crate::gradients::Clip;

/// Scales `gradients` of `model`, this rank's part of a larger one, so that the norm of the whole model's gradients is at most
/// `max_norm`; gives the 2-norm from before, with the same bits on every rank. What [`clip_grad_norm`](crate::clip_grad_norm) does
/// for a model that a rank has all of.
///
/// `tensor` is the group among which layers are divided, and `pipeline` the one among which stages are, if there are such. `tied` are
/// the [tied parameters](TiedParameter) of which this rank has a copy, each with the copy's id in `model`: they count on the first rank
/// that has a copy. What
/// the layers of [`tensor`](super::tensor) divide, or [`TensorGroup::shard`], is added up over the ranks; every other parameter counts once.
/// All ranks call it together. Replicas compare in the steps of their [`Ddp`](crate::Ddp) by how much they have scaled.
///
/// # Errors
/// If the exchange fails. These errors end the groups: `max_norm` is not a positive number, the ranks give a different one (it may differ by
/// rounding), a gradient is no float, no gradient is that of a parameter of `model`, a [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer) leaves
/// each replica the gradients of some parameters only, layers are divided and `tensor` is none or another group, or the model has
/// [units](super::fsdp::FullySharded), which [`Fsdp::clip_grad_norm`](super::fsdp::Fsdp::clip_grad_norm) clips.
pub fn clip_grad_norm<M: Module>(
    model: &M,
    gradients: &mut impl Clip,
    max_norm: f64,
    tensor: Option<&TensorGroup>,
    pipeline: Option<&ProcessGroup>,
    tied: &[(&TiedParameter, ParamId)],
) -> Result<f64> {
    let noted = noted(model);
    let divided: HashMap<ParamId, Span> = noted.iter().map(|(id, part)| (*id, part.span)).collect();
    let counts = |id: &ParamId| {
        let is_copy = tied.iter().any(|(tied, copy)| copy == id && !tied.is_first());
        !is_copy && tensor.is_none_or(|group| group.rank() == 0 || divided.contains_key(id))
    };
    let unknown = if tensor.is_some() { HashMap::new() } else { divided.clone() };
    let checked = adapter::check_max_norm(max_norm)
        .and_then(|()| clip::refuse_sharded(gradients))
        .and_then(|()| refuse(model, unknown));
    let squares = checked.and_then(|()| clip::squares_of(model, gradients.parameters()));
    let squares = squares.and_then(|squares| {
        let own = squares.iter().filter_map(|(id, _)| noted.get(id));
        tensor.map_or(Ok(()), |group| check_group(group, own)).map(|()| squares)
    });
    let fail = |error: &Error| {
        tensor.into_iter().for_each(|group| group.abort(error.clone()));
        pipeline.into_iter().for_each(|group| group.abort_all(error.clone()));
    };
    // The others wait for this rank's number.
    let squares = squares.inspect_err(fail)?;
    let own: f64 = squares.iter().filter(|(id, _)| counts(id)).map(|(_, squares)| squares).sum();
    // The squares, the limits, and how many there are of them.
    let mut sums = [own, max_norm, 1.0];
    if let Some(group) = tensor {
        group.sum(&mut sums).inspect_err(fail)?;
    }
    if let Some(group) = pipeline {
        let summed = group.in_call(Caller::PipelineTrain).all_reduce(&mut sums, ReduceOp::Sum);
        summed.inspect_err(fail)?;
    }
    let [sum, limits, ranks] = sums;
    let mean = limits / ranks;
    // If limits differ, some rank's is not the mean. Infinite ones have no difference.
    if (mean - max_norm).abs() > 1e-6 * max_norm.min(mean) {
        let cause = format!(
            "parallel::clip_grad_norm: the max_norm of a rank is {max_norm}, but the mean over all ranks is {mean}"
        );
        let error = Error::mismatch(cause).with_remedy("give every rank the same max_norm");
        fail(&error);
        return Err(error);
    }
    Ok(clip::scale(model, gradients, max_norm, std::iter::once(sum)))
}

/// An error if one of `parts` is another one than that of this rank in `group`: squares would be added up over ranks with the same parts.
fn check_group<'p>(group: &TensorGroup, mut parts: impl Iterator<Item = &'p division::Part>) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.ranks());
    let Some(other) = parts.find(|part| (part.rank, part.ranks) != (rank, ranks)) else { return Ok(()) };
    Err(Error::invalid_argument(format!(
        "parallel::clip_grad_norm: this rank has part {} of {} of a divided layer, and in the tensor group it is number {rank} of {ranks}",
        other.rank, other.ranks
    ))
    .with_remedy("give it the TensorGroup among whose ranks the layers are divided"))
}

/// An error if this rank has only a part of a parameter of `model` that is trained: each rank would take its part's norm for the whole one,
/// and scale what all of them have by a factor of its own.
///
/// A unit counts in a group of one rank, too: nothing at it says how many there are.
pub(crate) fn refuse_parts<M: Module>(model: &M) -> Result<()> {
    refuse(model, divided(model))
}

/// As [`refuse_parts`], with the divided parameters of which a norm does not know.
fn refuse<M: Module>(model: &M, spans: HashMap<ParamId, Span>) -> Result<()> {
    let mut parts = Parts { spans, path: Vec::new(), found: None };
    model.visit(&mut parts);
    let Some((name, part)) = parts.found else { return Ok(()) };
    let (what, remedy) = match part {
        Part::OfLayer => (
            "which is divided among tensor-parallel ranks",
            "clip with phalanx_burn::parallel::clip_grad_norm, which knows what is divided, and give it the tensor group",
        ),
        Part::OfUnit => {
            ("which is the shard of a unit", "clip with phalanx_burn::parallel::fsdp::Fsdp::clip_grad_norm")
        }
    };
    let cause =
        format!("this rank has a part of `{name}`, {what}: the norm of its gradients is not the model's");
    Err(Error::invalid_argument(cause).with_remedy(remedy))
}

/// The error of a norm that knows no other ranks' stages.
pub(crate) fn of_stages() -> Error {
    Error::invalid_argument(
        "this rank has some stages of a pipeline, or some layers of a chain of links: the norm of their gradients is not the model's",
    )
    .with_remedy(
        "clip with phalanx_burn::parallel::clip_grad_norm, and give it the group of the pipeline, or of the links",
    )
}

#[derive(Clone, Copy)]
enum Part {
    OfLayer,
    OfUnit,
}

/// Finds a parameter of which others have a part.
struct Parts {
    spans: HashMap<ParamId, Span>,
    /// The names on the way, and whether each is in a unit.
    path: Vec<(String, bool)>,
    found: Option<(String, Part)>,
}

impl ModuleVisitor for Parts {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.push((name.to_owned(), container_type == UNIT));
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.found.is_some() || !param.is_require_grad() {
            return;
        }
        let is_in_unit = self.path.iter().any(|(_, is_unit)| *is_unit);
        let is_divided = self.spans.get(&param.id).is_some_and(|span| {
            // Of a group of one rank, the part is the whole.
            param.shape().as_slice().get(span.dim) != Some(&span.total)
        });
        if is_in_unit || is_divided {
            let names: Vec<&str> = self.path.iter().map(|(name, _)| name.as_str()).collect();
            self.found = Some((names.join("."), if is_in_unit { Part::OfUnit } else { Part::OfLayer }));
        }
    }
}
