//! Whether the ranks' replicas have drifted apart.
//!
//! Burn's learner does not show its optimizer, so ranks cannot compare it before they train. What it has made of the model shows a difference: the
//! ranks compare the first elements of each parameter, which an optimizer treats as it does the others.

use std::collections::HashMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use phalanx::{Error, ProcessGroup, Result};

use crate::{alike, read_back};

/// The elements of each parameter that are compared.
const COMPARED: usize = 2;

/// An error on every rank if the ranks' models differ after `epoch`, in the parameters that are trained, which are those of `indices`. All
/// ranks call it together.
pub(super) fn check<M: Module>(
    model: &M,
    indices: &HashMap<ParamId, usize>,
    epoch: usize,
    group: &ProcessGroup,
) -> Result<()> {
    let mut heads = Heads { indices, read: Ok(Vec::new()), epsilons: Vec::new() };
    model.visit(&mut heads);
    let Heads { read, epsilons, .. } = heads;
    let are_near = |main: &[f32], own: &[f32]| {
        let mut pairs = main.iter().zip(own).zip(&epsilons);
        main.len() == own.len() && pairs.all(|(pair, epsilon)| alike::has_not_drifted(pair, *epsilon))
    };
    let Some(rank) = alike::first_other(&read?, are_near, group)? else { return Ok(()) };
    Err(Error::mismatch(format!(
        "after epoch {epoch} the parameters of rank {rank} are others than those of rank 0: the ranks' optimizers, learning rates or \
         checkpoints differ, or a communication hook does not give all ranks the same average"
    ))
    .with_peer(rank)
    .with_remedy("give every rank a Learner with the same settings, and let all ranks begin with the same checkpoint"))
}

/// Reads the first elements of each parameter, and the epsilon of each one's type.
struct Heads<'a> {
    indices: &'a HashMap<ParamId, usize>,
    read: Result<Vec<f32>>,
    epsilons: Vec<f32>,
}

impl ModuleVisitor for Heads<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Ok(read) = &mut self.read else { return };
        let elements = param.shape().num_elements();
        if elements == 0 || !self.indices.contains_key(&param.id) {
            return;
        }
        let row: Tensor<1> = param.val().detach().reshape([elements]);
        let epsilon = row.dtype().finfo().map_or(0.0, |info| info.epsilon as f32);
        match read_back::data(row.narrow(0, 0, elements.min(COMPARED))) {
            Ok(data) => {
                read.extend(data.iter::<f32>());
                self.epsilons.resize(read.len(), epsilon);
            }
            Err(error) => self.read = Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::{DType, Device};
    use phalanx::testing::{Fabric, run};

    use super::*;
    use crate::parameters::Inventory;

    /// Whether ranks find that they have drifted apart, if rank 1 has this in place of a parameter of 1.
    fn drifted(dtype: DType, other: f32) -> [bool; 2] {
        let found = run(2, Fabric::InProcess, |group| {
            let element = if group.rank().is_main() { 1.0 } else { other };
            let device = Device::flex().autodiff();
            let weight = Tensor::<2>::full([1, 2], element, (&device, dtype)).require_grad();
            let model = Linear {
                weight: Param::from_tensor(weight),
                ..LinearConfig::new(1, 2).with_bias(false).init(&device)
            };
            let inventory = Inventory::of(&model).unwrap();
            check(&model, &inventory.indices, 1, &group).is_err()
        });
        [found[0], found[1]]
    }

    #[test]
    fn a_rounding_is_no_drift_in_any_type_and_a_tenth_is() {
        let roundings = [
            (DType::F32, 1.0 + f32::EPSILON),
            (DType::F16, 1.0 + 1.0 / 1024.0),
            (DType::BF16, 1.0 + 1.0 / 128.0),
        ];
        for (dtype, rounded) in roundings {
            assert_eq!(drifted(dtype, rounded), [false; 2], "{dtype:?}");
            assert_eq!(drifted(dtype, 1.125), [true; 2], "{dtype:?}");
        }
        assert_eq!(drifted(DType::F32, 1.001), [true; 2]);
    }

    #[test]
    fn parameters_that_are_no_numbers_on_one_rank_have_drifted() {
        assert_eq!(drifted(DType::BF16, f32::NAN), [true; 2]);
        assert_eq!(drifted(DType::BF16, f32::INFINITY), [true; 2]);
    }
}
