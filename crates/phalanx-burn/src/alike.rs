//! Whether the optimizers of all ranks have the same settings.
//!
//! Replicas whose optimizers differ drift apart, and no error would say so. Burn's optimizers say nowhere what their settings are. So one of the
//! same settings takes steps on the same model with small parameters, in the processor's memory, and the ranks compare what it makes of them.
//! The gradients are of all sizes: betas show in ordinary ones, epsilon in small ones, and clipping in large ones.

use std::collections::HashSet;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Device, Tensor, TensorData};
use phalanx::reducer::broadcast_bytes;
use phalanx::{Buffer, Communicator, Error, Rank, ReduceOp, Result, WorldSize};

use crate::optimizer::{OptimizerState, on_small};
use crate::parameters::Parameter;
use crate::read_back;

/// The elements of a parameter, and their gradients in each step. A parameter without dimensions has the first alone.
const ELEMENTS: [f32; 2] = [1.0, -0.5];
const GRADIENTS: [[f32; 2]; 5] = [[1.0, 1e-6], [-0.5, 3e-6], [0.1, -2e-6], [1e-2, 1e-6], [1e8, 1e6]];
const RATE: f64 = 1.0;
/// Processors of several kinds may round in other ways.
const TOLERANCE: f32 = 2e-6;
/// The most bytes that a rank accepts from another.
const MAX_BYTES: usize = 1 << 28;

/// An error on every rank unless all ranks' optimizers change `parameters` of `model` alike. The models are the same already, or have the same
/// parameters but for their lengths. All ranks of `group` call it together.
///
/// Optimizers that panic with small parameters, on every rank, are not compared, and a warning says so.
pub(crate) fn check<M: Module>(
    optimizer: &ModuleOptimizer,
    (model, parameters): (&M, &[Parameter]),
    group: &dyn Communicator,
) -> Result<()> {
    if group.world_size() == WorldSize::ONE {
        return Ok(());
    }
    // The others wait for this rank.
    let own =
        made(optimizer, (model, parameters), group.rank()).inspect_err(|error| group.abort(error.clone()))?;
    first_other(&own, TOLERANCE, group)?.map_or(Ok(()), |rank| Err(differs(rank)))
}

/// The first rank that has other numbers than rank 0, on every rank. Those of ranks that are alike differ by `tolerance` at most, of 1 or of what is
/// larger. All ranks of `group` call it together.
pub(crate) fn first_other(own: &[f32], tolerance: f32, group: &dyn Communicator) -> Result<Option<Rank>> {
    if group.world_size() == WorldSize::ONE {
        return Ok(None);
    }
    let main = broadcast_bytes(group, Rank::MAIN, bytemuck::cast_slice(own), MAX_BYTES)
        .inspect_err(|error| group.abort(error.clone()))?;
    let main = main.as_bytes().chunks_exact(size_of::<f32>()).map(bytemuck::pod_read_unaligned::<f32>);
    let main: Vec<f32> = main.collect();
    let mine = if are_near(&main, own, tolerance) { i64::MAX } else { i64::from(group.rank().get()) };
    let first = group.all_reduce_async(Buffer::from_slice(&[mine]), ReduceOp::Min)?.wait()?;
    let first = first.as_slice::<i64>()?.first().copied().and_then(|rank| u32::try_from(rank).ok());
    Ok(first.map(Rank::new))
}

/// The error for the optimizer of `rank`, which makes something else than rank 0's.
pub(crate) fn differs(rank: Rank) -> Error {
    Error::mismatch(format!(
        "the optimizer of rank {rank} changes parameters otherwise than that of rank 0: it is another one, or its settings differ, such as \
         betas, epsilon, decay, momentum or clipping"
    ))
    .with_peer(rank)
    .with_remedy("give every rank the same optimizer with the same settings")
}

/// Whether two ranks' optimizers have [made] the same.
#[cfg(feature = "horovod")]
pub(crate) fn is_same(one: &[f32], other: &[f32]) -> bool {
    are_near(one, other, TOLERANCE)
}

fn are_near(one: &[f32], other: &[f32], tolerance: f32) -> bool {
    let is_near = |(one, other): (&f32, &f32)| match one.is_finite() && other.is_finite() {
        true => (one - other).abs() <= tolerance * one.abs().max(other.abs()).max(1.0),
        false => one.is_finite() == other.is_finite(),
    };
    one.len() == other.len() && one.iter().zip(other).all(is_near)
}

/// What the optimizer of this `rank` makes of small parameters in place of the model's. If it panics with them, a single NaN, as any other one that
/// does.
pub(crate) fn made<M: Module>(
    optimizer: &ModuleOptimizer,
    (model, parameters): (&M, &[Parameter]),
    rank: Rank,
) -> Result<Vec<f32>> {
    let made = on_small(|| trained(optimizer, (model, parameters)))?;
    if made.is_none() && rank.is_main() {
        phalanx::warn(
            "the ranks' optimizers are not compared, because this one has panicked with parameters of two elements; the panic has no other effect. \
             Give every rank the same optimizer with the same settings",
        );
    }
    Ok(made.unwrap_or_else(|| vec![f32::NAN]))
}

/// What a new optimizer like `optimizer` makes of small parameters, after each step.
fn trained<M: Module>(
    optimizer: &ModuleOptimizer,
    (model, parameters): (&M, &[Parameter]),
) -> Result<Vec<f32>> {
    let ids: HashSet<ParamId> = parameters.iter().map(|parameter| parameter.id).collect();
    let mut fresh = OptimizerState::empty().load(optimizer, parameters)?;
    let mut small = model.clone().map(&mut Small(&ids));
    let mut values = Values { ids: &ids, read: Ok(Vec::new()) };
    for gradient in GRADIENTS {
        let mut taught = Taught { ids: &ids, gradient, gradients: GradientsParams::new() };
        small.visit(&mut taught);
        small = fresh.step(RATE, small, taught.gradients);
        small.visit(&mut values);
    }
    values.read
}

/// A tensor of these elements along the last dimension.
fn tensor<const D: usize>(elements: [f32; 2], device: &Device) -> Tensor<D> {
    let mut shape = [1; D];
    if let Some(side) = shape.last_mut() {
        *side = elements.len();
    }
    let values: Vec<f32> = elements.into_iter().take(shape.iter().product()).collect();
    Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
}

/// Gives each of these parameters the [`ELEMENTS`]. All other tensors stay as they are: a model's clones share running state.
struct Small<'a>(&'a HashSet<ParamId>);

impl ModuleMapper for Small<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.0.contains(&param.id) {
            return param;
        }
        param.map(|_| tensor::<D>(ELEMENTS, &Device::flex().autodiff()).set_require_grad(true))
    }
}

/// Gives each of these parameters this gradient.
struct Taught<'a> {
    ids: &'a HashSet<ParamId>,
    gradient: [f32; 2],
    gradients: GradientsParams,
}

impl ModuleVisitor for Taught<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.ids.contains(&param.id) {
            self.gradients.register(param.id, tensor::<D>(self.gradient, &Device::flex()));
        }
    }
}

/// Reads these parameters.
struct Values<'a> {
    ids: &'a HashSet<ParamId>,
    read: Result<Vec<f32>>,
}

impl ModuleVisitor for Values<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Ok(read) = &mut self.read else { return };
        if !self.ids.contains(&param.id) {
            return;
        }
        match read_back::data(param.val().detach()) {
            Ok(data) => read.extend(data.iter::<f32>()),
            Err(error) => self.read = Err(error),
        }
    }
}
