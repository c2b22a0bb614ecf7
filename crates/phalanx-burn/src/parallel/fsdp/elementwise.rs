//! Whether an optimizer treats each element by itself.
//!
//! A rank has a piece of each parameter. An optimizer that takes a norm, as LAMB and Burn's clipping do, would take the piece's, and train
//! otherwise on each number of ranks. Burn's optimizers say nowhere what they do. So one of the same settings takes steps on the same
//! model with pieces of two elements, and on one with either of them alone.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Device, Tensor, TensorData};
use phalanx::{Error, Result};

use crate::optimizer::OptimizerState;
use crate::parameters::Parameter;
use crate::read_back;

/// Two elements, and their gradients in two steps. They are so large that any clipping shortens them, and their squares are still finite.
const ELEMENTS: [f32; 2] = [1.0, 2.0];
const GRADIENTS: [[f32; 2]; 2] = [[3e15, 4e15], [-5e15, 1e15]];
/// So large that a step of a small norm shows, too.
const RATE: f64 = 1.0;
/// Devices round square roots of one element and of several differently.
const TOLERANCE: f32 = 1e-5;

/// An error if `optimizer` does otherwise with the elements of one of `parameters`, of `model`, together than with each by itself.
pub(super) fn check<M: Module>(
    optimizer: &ModuleOptimizer,
    model: &M,
    parameters: &[Parameter],
) -> Result<()> {
    let together = trained(optimizer, (model, parameters), 0..2)?;
    let apart =
        [trained(optimizer, (model, parameters), 0..1)?, trained(optimizer, (model, parameters), 1..2)?];
    let is_elementwise = |parameter: &&Parameter| {
        let apart = apart.iter().filter_map(|trained| trained.get(&parameter.id)).flatten();
        together
            .get(&parameter.id)
            .into_iter()
            .flatten()
            .zip(apart)
            .all(|(one, other)| are_near(*one, *other))
    };
    let Some(parameter) = parameters.iter().find(|parameter| !is_elementwise(parameter)) else {
        return Ok(());
    };
    Err(Error::invalid_argument(format!(
        "the optimizer takes a norm, or something else of more than one element, of `{}`, of which each rank has a piece: it would train \
         otherwise than one process",
        parameter.name
    ))
    .with_remedy(
        "take one that treats each element by itself, such as SGD, Adam, AdamW or RMSProp, without Burn's clipping by norm: \
         Fsdp::clip_grad_norm clips",
    ))
}

/// Numbers that are not finite say nothing.
fn are_near(one: f32, other: f32) -> bool {
    let is_finite = one.is_finite() && other.is_finite();
    !is_finite || (one - other).abs() <= TOLERANCE * one.abs().max(other.abs()).max(1.0)
}

/// What a new optimizer like `optimizer` makes of these of the [`ELEMENTS`], if each parameter has no others.
fn trained<M: Module>(
    optimizer: &ModuleOptimizer,
    (model, parameters): (&M, &[Parameter]),
    elements: Range<usize>,
) -> Result<HashMap<ParamId, Vec<f32>>> {
    let ids: HashSet<ParamId> = parameters.iter().map(|parameter| parameter.id).collect();
    let mut fresh = OptimizerState::empty().load(optimizer, parameters)?;
    let mut small = model.clone().map(&mut Small { ids: &ids, values: &ELEMENTS[elements.clone()] });
    for gradients in &GRADIENTS {
        let values = &gradients[elements.clone()];
        let mut taught = Taught { ids: &ids, values, gradients: GradientsParams::new() };
        small.visit(&mut taught);
        small = fresh.step(RATE, small, taught.gradients);
    }
    let mut values = Values { ids: &ids, read: Ok(HashMap::new()) };
    small.visit(&mut values);
    values.read
}

fn tensor<const D: usize>(values: &[f32], device: &Device) -> Tensor<D> {
    let mut shape = [1; D];
    if let Some(first) = shape.first_mut() {
        *first = values.len();
    }
    Tensor::from_data(TensorData::new(values.to_vec(), shape), (device, DType::F32))
}

/// Gives each of these parameters these elements. All other tensors stay as they are.
struct Small<'a> {
    ids: &'a HashSet<ParamId>,
    values: &'a [f32],
}

impl ModuleMapper for Small<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.ids.contains(&param.id) {
            return param;
        }
        param.map(|old| tensor::<D>(self.values, &old.device()).set_require_grad(old.device().is_autodiff()))
    }
}

/// Gives each of these parameters this gradient.
struct Taught<'a> {
    ids: &'a HashSet<ParamId>,
    values: &'a [f32],
    gradients: GradientsParams,
}

impl ModuleVisitor for Taught<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.ids.contains(&param.id) {
            self.gradients.register(param.id, tensor::<D>(self.values, &param.device().inner()));
        }
    }
}

/// Reads these parameters.
struct Values<'a> {
    ids: &'a HashSet<ParamId>,
    read: Result<HashMap<ParamId, Vec<f32>>>,
}

impl ModuleVisitor for Values<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Ok(read) = &mut self.read
            && self.ids.contains(&param.id)
        {
            match read_back::data(param.val().detach()) {
                Ok(data) => drop(read.insert(param.id, data.iter::<f32>().collect())),
                Err(error) => self.read = Err(error),
            }
        }
    }
}
