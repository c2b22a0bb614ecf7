//! Gradient clipping over the whole model.

use std::collections::HashSet;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor, bf16, f16};
use phalanx::{Error, Result, adapter};

use crate::gradients::Clip;
use crate::parallel::refuse_parts;
use crate::tensor_bytes::{self, TensorBytes};

/// Scales `gradients` of `model` so that their norm, taken over all elements of all of them as one vector, is at most
/// `max_norm`; gives the 2-norm from before, summed in f64. This is `torch.nn.utils.clip_grad_norm_`.
///
/// `gradients` must be those of the whole model, as in one process. [`Ddp::clip_grad_norm`](crate::Ddp::clip_grad_norm)
/// also knows gradients that are sharded among the ranks, and [`parallel::clip_grad_norm`](crate::parallel::clip_grad_norm) a model of
/// which each rank has a part. Burn's own `GradientClipping` clips each parameter by itself,
/// which changes the direction of the step.
///
/// If an element is infinite or not a number, so is the norm; the gradients are then left alone.
///
/// # Errors
/// If `max_norm` is not a positive number, a gradient is no float, or no gradient is that of a parameter of `model`; if a
/// [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer) leaves this rank the gradients of some parameters only; if layers of the model are
/// [divided](crate::parallel::tensor) among ranks, or are [units](crate::parallel::fsdp::FullySharded), which
/// [`Fsdp::clip_grad_norm`](crate::parallel::fsdp::Fsdp::clip_grad_norm) clips.
/// It does not see that a model is a stage of a pipeline: take [`parallel::clip_grad_norm`](crate::parallel::clip_grad_norm) there.
pub fn clip_grad_norm<M: Module>(model: &M, gradients: &mut impl Clip, max_norm: f64) -> Result<f64> {
    adapter::check_max_norm(max_norm)?;
    refuse_sharded(gradients)?;
    refuse_parts(model)?;
    let squares = squares_of(model, gradients.parameters())?;
    Ok(scale(model, gradients, max_norm, squares.into_iter().map(|(_, squares)| squares)))
}

/// An error if this rank has the averages of some parameters only: each rank would take the norm of its own for that of the model's, and scale by it.
pub(crate) fn refuse_sharded(gradients: &impl Clip) -> Result<()> {
    if !gradients.is_sharded() {
        return Ok(());
    }
    Err(Error::invalid_argument(
        "a ZeroRedundancyOptimizer leaves each rank the gradients of some parameters only: their norm is not the model's",
    )
    .with_remedy(
        "clip with Ddp::clip_grad_norm, which adds up those of all ranks; if layers are divided, or in a pipeline, do without a \
         ZeroRedundancyOptimizer",
    ))
}

/// For each gradient, in module order, the sum of its elements' squares.
///
/// # Errors
/// If a gradient is no float or cannot be read, or none of them is of a parameter of `model`: their norm would be zero, whatever they are.
pub(crate) fn squares_of<M: Module>(model: &M, gradients: &GradientsParams) -> Result<Vec<(ParamId, f64)>> {
    let mut squares = Squares { gradients, seen: HashSet::new(), sums: Ok(Vec::new()) };
    model.visit(&mut squares);
    let sums = squares.sums?;
    if sums.is_empty() && !gradients.is_empty() {
        return Err(Error::invalid_argument(
            "the gradients to be clipped are those of another model: no parameter of this one is among them",
        )
        .with_remedy("clip by the model, or the Ddp, whose backward pass gave the gradients"));
    }
    Ok(sums)
}

/// Scales `gradients` to a norm of at most `max_norm`; returns the norm before, from the `squares`, added in their
/// order.
pub(crate) fn scale<M: Module>(
    model: &M,
    gradients: &mut impl Clip,
    max_norm: f64,
    squares: impl Iterator<Item = f64>,
) -> f64 {
    let norm = squares.fold(0.0, |sum, squares| sum + squares).sqrt();
    if let Some(factor) = adapter::clip_factor(norm, max_norm) {
        multiply(model, gradients.parameters(), factor);
        gradients.keep(factor);
    }
    norm
}

/// Multiplies `gradients` by `factor`.
pub(crate) fn multiply<M: Module>(model: &M, gradients: &mut GradientsParams, factor: f64) {
    model.visit(&mut Scale { gradients, seen: HashSet::new(), factor });
}

/// `scaled` of `tensor`, by a number. Burn rounds that to the tensor's type: with 16 bits it has few digits, and in f16 a small one is zero, and a
/// large one infinite. So this is computed in f32.
pub(crate) fn wide<const D: usize>(
    tensor: Tensor<D>,
    scaled: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Tensor<D> {
    let dtype = tensor.dtype();
    match dtype {
        DType::F16 | DType::BF16 => scaled(tensor.cast(DType::F32)).cast(dtype),
        _ => scaled(tensor),
    }
}

/// Adds up the squares of each gradient's elements.
struct Squares<'a> {
    gradients: &'a GradientsParams,
    /// A parameter that is used in several places has one gradient.
    seen: HashSet<ParamId>,
    sums: Result<Vec<(ParamId, f64)>>,
}

impl ModuleVisitor for Squares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        let (Some(gradient), Ok(sums)) = (self.gradients.get::<D>(param.id), &mut self.sums) else { return };
        match tensor_bytes::with_bytes(gradient, squares).and_then(|squares| squares) {
            Ok(squares) => sums.push((param.id, squares)),
            Err(error) => self.sums = Err(error),
        }
    }
}

struct Scale<'a> {
    gradients: &'a mut GradientsParams,
    seen: HashSet<ParamId>,
    factor: f64,
}

impl ModuleVisitor for Scale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.seen.insert(param.id)
            && let Some(gradient) = self.gradients.remove::<D>(param.id)
        {
            self.gradients.register(param.id, wide(gradient, |gradient| gradient * self.factor));
        }
    }
}

fn squares(TensorBytes { dtype, bytes }: TensorBytes<'_>) -> Result<f64> {
    match dtype {
        DType::F64 => Ok(sum_of_squares::<f64>(bytes, |x| x)),
        DType::F32 | DType::Flex32 => Ok(sum_of_squares::<f32>(bytes, f64::from)),
        DType::F16 => Ok(sum_of_squares::<f16>(bytes, f16::to_f64)),
        DType::BF16 => Ok(sum_of_squares::<bf16>(bytes, bf16::to_f64)),
        other => Err(Error::invalid_argument(format!("a gradient of type {other:?} has no norm"))),
    }
}

/// Eight independent sums: with one, each addition would wait for the previous one.
fn sum_of_squares<T: bytemuck::AnyBitPattern>(bytes: &[u8], wide: impl Fn(T) -> f64) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0.0; LANES];
    for (place, element) in bytes.chunks_exact(size_of::<T>()).enumerate() {
        let x = wide(bytemuck::pod_read_unaligned(element));
        sums[place % LANES] += x * x;
    }
    sums.iter().sum()
}
