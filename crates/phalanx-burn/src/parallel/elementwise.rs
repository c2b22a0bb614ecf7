//! Whether an optimizer treats each element by itself.
//!
//! A rank has a piece of a parameter: of a sharded one, or of one of a divided layer. An optimizer that takes a norm, as LAMB and Burn's
//! clipping do, would take the piece's, and train otherwise on each number of ranks. Burn's optimizers say nowhere what they do. So one of the
//! same settings takes steps on the same model with small parameters, and on one with either half of them alone.

use std::collections::HashMap;
use std::ops::Range;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Device, Tensor, TensorData};
use phalanx::{Error, Result};

use super::whole::divided_dimensions;
use crate::names::Names;
use crate::optimizer::{OptimizerState, on_small};
use crate::parameters::{Inventory, Parameter};
use crate::read_back;

/// The two numbers of each half of a parameter. One of a single dimension has the first of each.
type Halves = [[f32; 2]; 2];

/// The elements, and their gradients in two steps. These are so large that any clipping shortens them, and their squares are still finite.
const ELEMENTS: Halves = [[1.0, 0.5], [2.0, -0.25]];
const GRADIENTS: [Halves; 2] = [[[3e15, 2e15], [4e15, -1e15]], [[-5e15, 1e15], [1e15, 6e15]]];
/// So large that a step of a small norm shows, too.
const RATE: f64 = 1.0;
/// Devices round square roots of one element and of several differently.
const TOLERANCE: f32 = 1e-5;

/// An error if `optimizer` does otherwise with the halves of one of `parameters`, of `model`, together than with each by itself. They are halves
/// along the dimension in `dims`, or else along the first. `clips` names what clips by norm instead. So is one that panics with parameters so small:
/// it may look at all of a parameter.
pub(crate) fn check<M: Module>(
    optimizer: &ModuleOptimizer,
    (model, parameters): (&M, &[Parameter]),
    dims: &HashMap<ParamId, usize>,
    clips: &str,
) -> Result<()> {
    let trained = |halves: Range<usize>| trained(optimizer, (model, parameters), dims, halves);
    let all = on_small(|| Ok((trained(0..2)?, [trained(0..1)?, trained(1..2)?])))?;
    let Some((together, apart)) = all else { return Err(unknown(parameters, clips)) };
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
    .with_remedy(remedy(clips)))
}

/// The error of an optimizer that could not be asked.
fn unknown(parameters: &[Parameter], clips: &str) -> Error {
    let name = parameters.first().map_or("", |parameter| parameter.name.as_str());
    Error::invalid_argument(format!(
        "the optimizer has panicked with parameters of a few elements, so that nothing says whether it treats each element by itself; of `{name}`, \
         and others, each rank has a piece"
    ))
    .with_remedy(remedy(clips))
}

fn remedy(clips: &str) -> String {
    format!(
        "take one that treats each element by itself, such as SGD, Adam, AdamW or RMSProp, without Burn's clipping by norm: {clips} clips"
    )
}

/// As [`check`], of those parameters of `model`, which has this `inventory`, of which this rank has a part. If it has all of each, any optimizer
/// will do.
pub(crate) fn check_parts<M: Module>(
    optimizer: &ModuleOptimizer,
    model: &M,
    inventory: &Inventory,
) -> Result<()> {
    if !inventory.is_divided() {
        return Ok(());
    }
    let dims = divided_dimensions(model);
    let parts = inventory.parameters.iter().filter(|parameter| dims.contains_key(&parameter.id));
    let parts: Vec<Parameter> = parts.cloned().collect();
    check(optimizer, (model, &parts), &dims, "phalanx_burn::parallel::clip_grad_norm")
}

/// Numbers that are not finite say nothing.
fn are_near(one: f32, other: f32) -> bool {
    let is_finite = one.is_finite() && other.is_finite();
    !is_finite || (one - other).abs() <= TOLERANCE * one.abs().max(other.abs()).max(1.0)
}

/// What a new optimizer like `optimizer` makes of these halves of the [`ELEMENTS`], half by half, if each parameter has no others.
fn trained<M: Module>(
    optimizer: &ModuleOptimizer,
    (model, parameters): (&M, &[Parameter]),
    dims: &HashMap<ParamId, usize>,
    halves: Range<usize>,
) -> Result<HashMap<ParamId, Vec<f32>>> {
    let dim = |id: &ParamId| dims.get(id).copied().unwrap_or(0);
    let dims: HashMap<ParamId, usize> =
        parameters.iter().map(|parameter| (parameter.id, dim(&parameter.id))).collect();
    let (mut fresh, names) = (OptimizerState::empty().load(optimizer, parameters)?, Names::of(parameters));
    let mut small = model.clone().map(&mut Small { dims: &dims, halves: &ELEMENTS[halves.clone()] });
    for gradients in &GRADIENTS {
        let halves = &gradients[halves.clone()];
        let mut taught = Taught { dims: &dims, halves, gradients: GradientsParams::new() };
        small.visit(&mut taught);
        small = names.step(&mut fresh, RATE, small, taught.gradients);
    }
    let mut values = Values { dims: &dims, read: Ok(HashMap::new()) };
    small.visit(&mut values);
    values.read
}

/// A tensor of these halves along the dimension `dim`. The two numbers of each lie along another one, if there is one.
fn tensor<const D: usize>(halves: &[[f32; 2]], dim: usize, device: &Device) -> Tensor<D> {
    let mut shape = [1; D];
    if let Some(side) = shape.get_mut(dim) {
        *side = halves.len();
    }
    let of = |place: usize| halves.iter().map(move |half| half[place]);
    let values: Vec<f32> = match (0..D).find(|side| *side != dim) {
        None => of(0).collect(),
        Some(other) => {
            shape[other] = 2;
            if other < dim { of(0).chain(of(1)).collect() } else { halves.as_flattened().to_vec() }
        }
    };
    Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
}

/// Gives each of these parameters these elements. All other tensors stay as they are.
struct Small<'a> {
    dims: &'a HashMap<ParamId, usize>,
    halves: &'a [[f32; 2]],
}

impl ModuleMapper for Small<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(&dim) = self.dims.get(&param.id) else { return param };
        param.map(|old| {
            let device = old.device();
            tensor::<D>(self.halves, dim, &device).set_require_grad(device.is_autodiff())
        })
    }
}

/// Gives each of these parameters this gradient.
struct Taught<'a> {
    dims: &'a HashMap<ParamId, usize>,
    halves: &'a [[f32; 2]],
    gradients: GradientsParams,
}

impl ModuleVisitor for Taught<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(&dim) = self.dims.get(&param.id) {
            self.gradients.register(param.id, tensor::<D>(self.halves, dim, &param.device().inner()));
        }
    }
}

/// Reads these parameters, half by half.
struct Values<'a> {
    dims: &'a HashMap<ParamId, usize>,
    read: Result<HashMap<ParamId, Vec<f32>>>,
}

impl ModuleVisitor for Values<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (Ok(read), Some(&dim)) = (&mut self.read, self.dims.get(&param.id)) else { return };
        match read_back::data(param.val().detach()) {
            Ok(data) => {
                let mut values: Vec<f32> = data.iter::<f32>().collect();
                // As `tensor` has laid them.
                if dim > 0 && values.len() == 4 {
                    values.swap(1, 2);
                }
                read.insert(param.id, values);
            }
            Err(error) => self.read = Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::{AdafactorConfig, AdamWConfig, MuonConfig};

    use super::*;

    #[test]
    fn halves_lie_along_the_dimension_in_which_a_parameter_is_divided() {
        let laid = |dim: usize| {
            let tensor = tensor::<3>(&ELEMENTS, dim, &Device::flex());
            (tensor.dims(), tensor.into_data().iter::<f32>().collect::<Vec<_>>())
        };
        assert_eq!(laid(0), ([2, 2, 1], vec![1.0, 0.5, 2.0, -0.25]));
        assert_eq!(laid(1), ([2, 2, 1], vec![1.0, 2.0, 0.5, -0.25]));
        assert_eq!(laid(2), ([2, 1, 2], vec![1.0, 2.0, 0.5, -0.25]));
        assert_eq!(tensor::<2>(&ELEMENTS[1..], 1, &Device::flex()).dims(), [2, 1]);
        assert_eq!(tensor::<1>(&ELEMENTS, 0, &Device::flex()).dims(), [2]);
    }

    #[test]
    fn rows_and_columns_are_halved() {
        let layer: Linear = LinearConfig::new(4, 3).with_bias(false).init(&Device::flex().autodiff());
        let parameters = Inventory::of(&layer).unwrap().parameters;
        for dim in [0, 1] {
            let dims = HashMap::from([(layer.weight.id, dim)]);
            let check = |optimizer| check(&optimizer, (&layer, &parameters), &dims, "nothing");
            check(AdamWConfig::new().init()).unwrap();
            for optimizer in [AdafactorConfig::new().init(), MuonConfig::new().init()] {
                let error = check(optimizer).unwrap_err().to_string();
                assert!(error.contains("of `weight`, of which each rank has a piece"), "{dim}: {error}");
            }
        }
    }
}
