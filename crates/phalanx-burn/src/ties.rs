//! One `Param` in several places of a module: tied weights.
//!
//! Burn knows a parameter by its id, and a clone of a `Param` keeps the id. But the clones share a tensor only until one of them changes:
//! an optimizer gives the gradient of an id to the first place alone, and whatever replaces tensors makes one for each place. Autodiff then
//! takes the places for several tensors, and of several gradients under one id Burn keeps the last.
//!
//! So each change of a module that is trained here ends with [`Ties::retie`]: the tensor of the first place is that of all, in memory
//! and in the graph.

use std::collections::HashMap;

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Tensor};
use burn_autodiff::NodeId;
use phalanx::{Error, Result};

use crate::hook;
use crate::tensor_bytes;

/// Whether a module has tied weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ties(bool);

impl Ties {
    /// Those of `module`, in which every place of a parameter must have the same tensor.
    ///
    /// # Errors
    /// If a parameter that needs a gradient has another shape, type or value in a second place, or needs none there, with the names of
    /// both; or if its elements cannot be read. If two parameters that need a gradient are one tensor.
    pub fn of<M: Module>(module: &M) -> Result<Self> {
        Self::found(module, false)
    }

    /// An error as of [`of`](Self::of), also for parameters that need a gradient nowhere: where a parameter is kept once, its places must
    /// not differ.
    pub fn check_frozen<M: Module>(module: &M) -> Result<()> {
        Self::found(module, true).map(|_| ())
    }

    fn found<M: Module>(module: &M, with_frozen: bool) -> Result<Self> {
        let (path, first, leaves) = (Vec::new(), HashMap::new(), HashMap::new());
        let mut finder = Finder { path, first, leaves, with_frozen, tied: false, outcome: Ok(()) };
        module.visit(&mut finder);
        finder.outcome.map(|()| Self(finder.tied))
    }

    /// `module` with the tensor of its first place in every place of a parameter. It costs nothing without tied weights.
    pub fn retie<M: Module>(self, module: M) -> M {
        if self.0 { module.map(&mut Retie { first: HashMap::new() }) } else { module }
    }

    /// Whether there are any.
    #[cfg(feature = "train")]
    pub fn any(self) -> bool {
        self.0
    }
}

/// The first place of a parameter.
struct Place {
    path: String,
    needs_gradient: bool,
    dtype: DType,
    shape: Vec<usize>,
    tensor: DispatchTensor,
}

struct Finder {
    path: Vec<String>,
    first: HashMap<ParamId, Place>,
    /// Where a leaf of the graph was first a parameter that needs a gradient.
    leaves: HashMap<NodeId, String>,
    /// Whether what is frozen in both places is compared too.
    with_frozen: bool,
    tied: bool,
    outcome: Result<()>,
}

impl Finder {
    fn compare<const D: usize>(&self, first: &Place, tensor: Tensor<D>) -> Result<()> {
        let (here, needs_gradient) = (self.path.join("."), tensor.is_require_grad());
        if first.needs_gradient != needs_gradient {
            let (trained, frozen) = if needs_gradient { (&here, &first.path) } else { (&first.path, &here) };
            return Err(one_id(format!("needs a gradient at `{trained}` and none at `{frozen}`")));
        }
        let (dtype, shape) = (tensor.dtype(), tensor.shape().as_slice().to_vec());
        if (first.dtype, &first.shape) != (dtype, &shape) {
            return Err(one_id(format!(
                "is {:?} {:?} at `{}` and {dtype:?} {shape:?} at `{here}`",
                first.dtype, first.shape, first.path
            )));
        }
        let other = Tensor::<D>::from_dispatch(first.tensor.clone());
        let same = tensor_bytes::with_bytes(other, |other| {
            tensor_bytes::with_bytes(tensor, |tensor| tensor.bytes == other.bytes)
        });
        match same.flatten()? {
            true => Ok(()),
            false => Err(one_id(format!("has other values at `{}` than at `{here}`", first.path))),
        }
    }
}

/// The error for an id whose places differ.
fn one_id(cause: String) -> Error {
    Error::invalid_argument(format!("one parameter {cause}: both places have the same ParamId")).with_remedy(
        "for tied weights, clone the Param when it has its values; for weights that are trained apart, give one of them an id of its own: \
         Param::from_tensor(param.val().detach())",
    )
}

/// The error for two ids of one tensor. Burn's backward gives the gradient of both to the first, and none to the second.
fn one_tensor(first: &str, second: &str) -> Error {
    Error::invalid_argument(format!("the parameters `{first}` and `{second}` are one tensor with two ParamIds"))
        .with_remedy(
            "for tied weights, clone the Param when it has its values; for weights that are trained apart, give the second a tensor of \
             its own: Param::from_tensor(tensor.detach())",
        )
}

impl ModuleVisitor for Finder {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.base();
        let Some(first) = self.first.get(&param.id) else {
            let place = Place {
                path: self.path.join("."),
                needs_gradient: tensor.is_require_grad(),
                dtype: tensor.dtype(),
                shape: tensor.shape().as_slice().to_vec(),
                tensor: tensor.into_dispatch(),
            };
            let leaf = place.needs_gradient.then(|| hook::leaf(place.tensor.clone())).flatten();
            let other = leaf.and_then(|leaf| self.leaves.insert(leaf, place.path.clone()));
            if let Some(other) = other.filter(|_| self.outcome.is_ok()) {
                self.outcome = Err(one_tensor(&other, &place.path));
            }
            self.first.insert(param.id, place);
            return;
        };
        // What is frozen in both places, as running statistics are, does not change by steps.
        let is_trained = first.needs_gradient || tensor.is_require_grad();
        if self.outcome.is_ok() && (is_trained || self.with_frozen) {
            self.outcome = self.compare(first, tensor);
            self.tied |= is_trained;
        }
    }
}

/// Gives each place of a parameter the tensor of the first.
struct Retie {
    first: HashMap<ParamId, DispatchTensor>,
}

impl ModuleMapper for Retie {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !param.is_require_grad() {
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        let tensor = match self.first.get(&id) {
            Some(first) => Tensor::from_dispatch(first.clone()),
            None => {
                self.first.insert(id, tensor.clone().into_dispatch());
                tensor
            }
        };
        Param::from_mapped_value(id, tensor, mapper)
    }
}
