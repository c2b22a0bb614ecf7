//! Whether the ranks' replicas have drifted apart.
//!
//! Burn's learner shows neither its optimizer nor its scheduler, so ranks cannot compare them before they train. What these have made of the
//! model shows a difference: the ranks compare the first elements of each parameter, which an optimizer treats as it does the others.

use std::collections::HashMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use phalanx::{Error, ProcessGroup, Result};

use crate::{alike, read_back};

/// The elements of each parameter that are compared.
const COMPARED: usize = 2;
/// More than what processors of several kinds round in other ways in an epoch.
const TOLERANCE: f32 = 1e-4;

/// An error on every rank if the ranks' models differ after `epoch`, in the parameters that are trained, which are those of `indices`. All
/// ranks call it together.
pub(super) fn check<M: Module>(
    model: &M,
    indices: &HashMap<ParamId, usize>,
    epoch: usize,
    group: &ProcessGroup,
) -> Result<()> {
    let mut heads = Heads { indices, read: Ok(Vec::new()) };
    model.visit(&mut heads);
    let Some(rank) = alike::first_other(&heads.read?, TOLERANCE, group)? else { return Ok(()) };
    Err(Error::mismatch(format!(
        "after epoch {epoch} the parameters of rank {rank} are others than those of rank 0: the ranks' optimizers, learning rates or \
         checkpoints differ, or a communication hook does not give all ranks the same average"
    ))
    .with_peer(rank)
    .with_remedy("give every rank a Learner with the same settings, and let all ranks begin with the same checkpoint"))
}

/// Reads the first elements of each parameter.
struct Heads<'a> {
    indices: &'a HashMap<ParamId, usize>,
    read: Result<Vec<f32>>,
}

impl ModuleVisitor for Heads<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Ok(read) = &mut self.read else { return };
        let elements = param.shape().num_elements();
        if elements == 0 || !self.indices.contains_key(&param.id) {
            return;
        }
        let row: Tensor<1> = param.val().detach().reshape([elements]);
        match read_back::data(row.narrow(0, 0, elements.min(COMPARED))) {
            Ok(data) => read.extend(data.iter::<f32>()),
            Err(error) => self.read = Err(error),
        }
    }
}
