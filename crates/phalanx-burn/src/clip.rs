//! Gradient clipping over the whole model.

use std::collections::HashSet;

use burn::backend::Flex;
use burn::backend::tensor::FloatTensor;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor, bf16, f16};
use phalanx::{Error, Result};

use crate::bridge::{Lend, Lent};

/// Added to the norm, so that a gradient of zero divides by something.
const EPSILON: f64 = 1e-6;

/// Scales `gradients` of `model` so that their norm, taken over all elements of all of them as one vector, is at most
/// `max_norm`; gives the 2-norm from before, summed in f64. This is `torch.nn.utils.clip_grad_norm_`.
///
/// Call it between [`Ddp::backward`](crate::Ddp::backward) and [`Ddp::step`](crate::Ddp::step). It needs no
/// communication: averaged gradients are the same bits on every rank, and so are their norm and what is left of them.
/// Burn's own `GradientClipping` clips each parameter by itself, which changes the direction of the step.
///
/// ```
/// # use burn::{nn::Linear, optim::ModuleOptimizer, tensor::Tensor};
/// # fn step(ddp: &mut phalanx_burn::Ddp<Linear>, optimizer: &mut ModuleOptimizer, loss: Tensor<1>)
/// # -> phalanx::Result<()> {
/// let mut gradients = ddp.backward(&loss)?;
/// let norm = phalanx_burn::clip_grad_norm(ddp.model(), &mut gradients, 1.0)?;
/// if norm.is_finite() {
///     ddp.step(optimizer, 1e-3, gradients);
/// }
/// # Ok(())
/// # }
/// ```
///
/// If an element is infinite or not a number, so is the norm, on every rank alike; the gradients are then left alone.
///
/// # Errors
/// If `max_norm` is not a positive number, or a gradient is no float.
pub fn clip_grad_norm<M: Module>(model: &M, gradients: &mut GradientsParams, max_norm: f64) -> Result<f64> {
    if max_norm.is_nan() || max_norm <= 0.0 {
        return Err(Error::invalid_argument(format!("max_norm is {max_norm}: it must be greater than 0")));
    }
    let mut squares = Squares { gradients, seen: HashSet::new(), sum: Ok(0.0) };
    model.visit(&mut squares);
    let norm = squares.sum?.sqrt();
    let factor = max_norm / (norm + EPSILON);
    if factor < 1.0 && norm.is_finite() {
        model.visit(&mut Scale { gradients, seen: HashSet::new(), factor });
    }
    Ok(norm)
}

/// Adds up the squares of all elements.
struct Squares<'a> {
    gradients: &'a GradientsParams,
    /// A parameter that stands in several places has one gradient.
    seen: HashSet<ParamId>,
    sum: Result<f64>,
}

impl ModuleVisitor for Squares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        let (Some(gradient), Ok(sum)) = (self.gradients.get::<D>(param.id), &mut self.sum) else { return };
        match flex(gradient).and_then(|gradient| squares(&gradient)) {
            Ok(squares) => *sum += squares,
            Err(error) => self.sum = Err(error),
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
            self.gradients.register(param.id, gradient * self.factor);
        }
    }
}

fn flex<const D: usize>(tensor: Tensor<D>) -> Result<FloatTensor<Flex>> {
    tensor
        .try_into_primitive::<Flex>()
        .map_err(|_| Error::invalid_argument("a gradient is on no Flex device"))
}

fn squares(tensor: &FloatTensor<Flex>) -> Result<f64> {
    let mut sum = Ok(0.0);
    Flex::lend(tensor, |Lent { dtype, bytes }| {
        sum = match dtype {
            DType::F64 => Ok(sum_of_squares::<f64>(bytes, |x| x)),
            DType::F32 | DType::Flex32 => Ok(sum_of_squares::<f32>(bytes, f64::from)),
            DType::F16 => Ok(sum_of_squares::<f16>(bytes, f16::to_f64)),
            DType::BF16 => Ok(sum_of_squares::<bf16>(bytes, bf16::to_f64)),
            other => Err(Error::invalid_argument(format!("a gradient of type {other:?} has no norm"))),
        };
    });
    sum
}

/// Eight sums side by side: one alone would wait for each addition to end.
fn sum_of_squares<T: bytemuck::AnyBitPattern>(bytes: &[u8], wide: impl Fn(T) -> f64) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0.0; LANES];
    for (place, element) in bytes.chunks_exact(size_of::<T>()).enumerate() {
        let x = wide(bytemuck::pod_read_unaligned(element));
        sums[place % LANES] += x * x;
    }
    sums.iter().sum()
}
