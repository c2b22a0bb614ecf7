//! Averages where they lie on the device, as Burn's optimizers take gradients.

use std::collections::{HashMap, HashSet};

use burn::backend::Cube;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use phalanx::reducer::Reducer;
use phalanx::{Error, Result, WorldSize};

use super::OnDevice;
use crate::clip;
use crate::read_back::Computed;

/// The averages of `model`'s parameters in a world of `ranks`, multiplied by `scale`. `indices` has each parameter's index in the reducer, by id.
pub(crate) fn averages<M: Module>(
    model: &M,
    reducer: &Reducer,
    (on_device, ranks, scale): (&OnDevice, WorldSize, f64),
    indices: &HashMap<ParamId, usize>,
) -> Result<GradientsParams> {
    let (gradients, seen) = (Ok(GradientsParams::new()), HashSet::new());
    let mut averages = Averages { reducer, on_device, ranks, scale, indices, seen, gradients };
    model.visit(&mut averages);
    averages.gradients
}

struct Averages<'a> {
    reducer: &'a Reducer,
    on_device: &'a OnDevice,
    ranks: WorldSize,
    scale: f64,
    indices: &'a HashMap<ParamId, usize>,
    /// The parameters that were visited: one that is used in several places has one gradient.
    seen: HashSet<ParamId>,
    gradients: Result<GradientsParams>,
}

impl Averages<'_> {
    /// None if no rank had a gradient for the parameter, and there are only zeros.
    fn take<const D: usize>(&self, index: usize, param: &Param<Tensor<D>>) -> Result<Option<Tensor<D>>> {
        if !self.reducer.has_average(index)? {
            return Ok(None);
        }
        match self.on_device.take(index) {
            Some(average) => {
                let average = Tensor::from_primitive::<Cube>(Cube::stored(average));
                let (weight, scale) = (self.reducer.average_weight(), self.scale);
                Ok(Some(match weight == 1.0 && scale == 1.0 {
                    true => average,
                    false => clip::wide(average, |average| average / weight * scale),
                }))
            }
            // Ranks that are gone used it, and no bucket has zeros for it.
            None if self.ranks == WorldSize::ONE => Ok(Some(param.val().inner().zeros_like())),
            None => {
                let name = self.reducer.parameters().get(index).map_or("", |one| one.name.as_str());
                Err(Error::aborted(format!("the average of parameter `{name}` is not there")))
            }
        }
    }
}

impl ModuleVisitor for Averages<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(&index) = self.indices.get(&param.id) else { return };
        if !self.seen.insert(param.id) {
            return;
        }
        let average = self.take(index, param);
        let Ok(gradients) = &mut self.gradients else { return };
        match average {
            Ok(Some(average)) => gradients.register(param.id, average),
            Ok(None) => {}
            Err(error) => self.gradients = Err(error),
        }
    }
}
