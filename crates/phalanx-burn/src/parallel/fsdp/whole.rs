//! A unit's module with all its parameters, and without.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

use burn::backend::{Dispatch, DispatchTensor};
use burn::module::{ModuleMapper, Param, ParamId};
use burn::tensor::{Device, Tensor, TensorData};
use phalanx::{Buffer, BufferPart};

use super::super::op::{ParallelOp, Target};
use super::collector::{Collector, OfParameter};
use super::exchanges::Held;
use super::layout::FlatLayout;
use crate::{tensor_bytes, view};

/// What parameters are in the graph.
#[derive(Clone)]
pub(super) enum Role {
    /// Nothing.
    Constant,
    /// Leaves, whose gradients go to the collector.
    Leaf(Arc<Collector>),
    /// Results of the anchor, which comes from the shard; their gradients go to the collector.
    Behind(Box<Tensor<1>>, Arc<Collector>),
    /// Parameters as any others, in memory of their own, and whether they need a gradient.
    Apart(bool),
}

/// Gives a hollow module its parameters.
pub(super) struct Whole<'a> {
    layout: &'a FlatLayout,
    role: Role,
    pub device: Device,
    /// Each parameter's elements; none if they could not be had.
    parts: Vec<Option<BufferPart>>,
    counted: Option<Arc<dyn Any + Send + Sync>>,
    /// A parameter that is used in several places is one tensor.
    made: HashMap<ParamId, DispatchTensor>,
}

impl<'a> Whole<'a> {
    /// With what was gathered, or else with parameters that are not a number.
    pub fn new(layout: &'a FlatLayout, gathered: Option<Held<Buffer>>, role: Role, device: Device) -> Self {
        let (parts, counted): (Vec<_>, Option<Arc<dyn Any + Send + Sync>>) = match gathered {
            Some(Held { value, counted }) => {
                (value.split(layout.places()).into_iter().map(Some).collect(), Some(Arc::new(counted)))
            }
            None => (Vec::new(), None),
        };
        Self { layout, role, device, parts, counted, made: HashMap::new() }
    }

    fn tensor<const D: usize>(&mut self, index: usize) -> Tensor<D> {
        let (shape, dtype) = (self.layout.parameters[index].shape.as_slice(), self.layout.dtype);
        let tensor = match self.parts.get_mut(index).and_then(Option::take) {
            Some(part) => {
                let data: TensorData = match self.role {
                    Role::Apart(_) => tensor_bytes::tensor_data(part.as_bytes(), shape, dtype),
                    Role::Constant | Role::Leaf(_) | Role::Behind(..) => {
                        view::tensor_data((part, self.counted.clone()), shape, dtype)
                    }
                };
                Tensor::<D>::from_data(data, (&self.device, dtype))
            }
            None => Tensor::<D>::full(shape.to_vec(), f64::NAN, (&self.device, dtype)),
        };
        let target = |collector: &Arc<Collector>| {
            Target(Arc::new(OfParameter { collector: collector.clone(), index }))
        };
        match &self.role {
            Role::Constant => tensor,
            Role::Leaf(collector) => {
                let leaf = tensor.require_grad().into_dispatch();
                Tensor::from_dispatch(Dispatch::delivered(leaf, target(collector)))
            }
            Role::Behind(anchor, collector) => {
                let anchor = Tensor::clone(anchor).into_dispatch();
                Tensor::from_dispatch(Dispatch::attached(tensor.into_dispatch(), anchor, target(collector)))
            }
            Role::Apart(is_trained) if *is_trained && self.device.is_autodiff() => tensor.require_grad(),
            Role::Apart(_) => tensor,
        }
    }
}

impl ModuleMapper for Whole<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(&index) = self.layout.indices.get(&param.id) else {
            // Without the graphs in which it was used before.
            return param.map(|frozen| frozen.set_require_grad(false));
        };
        let (id, _, mapper) = param.consume();
        let tensor = match self.made.get(&id) {
            Some(made) => Tensor::from_dispatch(made.clone()),
            None => {
                let tensor = self.tensor::<D>(index);
                self.made.insert(id, tensor.clone().into_dispatch());
                tensor
            }
        };
        let param = Param::from_mapped_value(id, tensor, mapper);
        match self.role {
            // Also what `Module::train` gives back.
            Role::Apart(is_trained) if self.device.is_autodiff() => param.set_require_grad(is_trained),
            Role::Apart(_) | Role::Constant | Role::Leaf(_) | Role::Behind(..) => param,
        }
    }
}

/// Takes a module its parameters, and leaves their places.
pub(super) struct Hollow<'a>(pub &'a FlatLayout);

impl ModuleMapper for Hollow<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.0.indices.contains_key(&param.id) {
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        let nothing = Tensor::empty([0; D], (&tensor.device(), tensor.dtype()));
        Param::from_mapped_value(id, nothing, mapper)
    }
}
