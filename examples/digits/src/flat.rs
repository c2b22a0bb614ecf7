//! Modules as vectors of numbers, for what works on slices.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Gradients, Tensor, TensorData};

/// A module as one vector of numbers.
pub trait Flat: Module {
    /// The number of elements of each parameter, in the order of the module.
    fn lengths(&self) -> Vec<usize> {
        let mut lengths = Lengths(Vec::new());
        self.visit(&mut lengths);
        lengths.0
    }

    /// All parameters, one behind the other.
    fn to_flat(&self) -> Vec<f32> {
        let mut reader = Reader { values: Vec::new(), gradients: None };
        self.visit(&mut reader);
        reader.values
    }

    /// This module with these parameters, in the order of [`to_flat`](Self::to_flat).
    fn with_flat(self, values: &[f32]) -> Self {
        self.map(&mut Writer(values))
    }

    /// The gradients of all parameters, in the order of [`to_flat`](Self::to_flat); zeros where there is none.
    fn flat_gradients(&self, gradients: Gradients) -> Vec<f32> {
        let gradients = Some(GradientsParams::from_grads(gradients, self));
        let mut reader = Reader { values: Vec::new(), gradients };
        self.visit(&mut reader);
        reader.values
    }
}

impl<M: Module> Flat for M {}

struct Lengths(Vec<usize>);

impl ModuleVisitor for Lengths {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(param.shape().num_elements());
    }
}

/// Reads parameters, or their gradients.
struct Reader {
    values: Vec<f32>,
    gradients: Option<GradientsParams>,
}

impl ModuleVisitor for Reader {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = match &self.gradients {
            None => Some(param.val()),
            Some(gradients) => gradients.get::<D>(param.id),
        };
        match tensor {
            Some(tensor) => self.values.extend(tensor.into_data().iter::<f32>()),
            None => self.values.resize(self.values.len() + param.shape().num_elements(), 0.0),
        }
    }
}

/// What is still to be written.
struct Writer<'a>(&'a [f32]);

impl ModuleMapper for Writer<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (own, rest) = self.0.split_at(param.shape().num_elements());
        self.0 = rest;
        param.map(|old| {
            let new = Tensor::from_data(TensorData::new(own.to_vec(), old.shape()), &old.device());
            new.set_require_grad(old.is_require_grad())
        })
    }
}
