//! The names under which an optimizer sees parameters.
//!
//! Burn's optimizers, and learning rates, have groups of parameters, such as biases without weight decay, and tell these by names, which are paths in
//! the model. A piece of a sharded parameter has another path than the whole one: a group that was made for the whole model would not reach it, and
//! no error would say so. So an optimizer takes its steps on a [`Named`] model.

use std::collections::HashMap;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};

use crate::parameters::Parameter;

/// The names of parameters, by their ids.
#[derive(Debug)]
pub(crate) struct Names<'a>(HashMap<ParamId, &'a str>);

impl<'a> Names<'a> {
    /// Those of `parameters`. One that is listed twice has its first name.
    pub fn of(parameters: &'a [Parameter]) -> Self {
        let mut names = HashMap::with_capacity(parameters.len());
        for parameter in parameters {
            names.entry(parameter.id).or_insert(parameter.name.as_str());
        }
        Self(names)
    }

    /// A step of `optimizer`, which sees the parameters of `model` under these names. One without a name must have no gradient.
    pub fn step<M: Module>(
        &self,
        optimizer: &mut ModuleOptimizer,
        rates: impl Into<ModuleLearningRate>,
        model: M,
        gradients: GradientsParams,
    ) -> M {
        optimizer.step(rates, Named { model, names: self }, gradients).model
    }
}

/// A model whose parameters have these names for a mapper.
#[derive(Clone, Debug)]
struct Named<'n, M> {
    model: M,
    names: &'n Names<'n>,
}

impl<M: Module> Module for Named<'_, M> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.model.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        Self { model: self.model.fork(device), names: self.names }
    }

    fn to_device(self, device: &Device) -> Self {
        Self { model: self.model.to_device(device), names: self.names }
    }

    fn train(self) -> Self {
        Self { model: self.model.train(), names: self.names }
    }

    fn valid(&self) -> Self {
        Self { model: self.model.valid(), names: self.names }
    }

    fn materialize(self) -> Self {
        Self { model: self.model.materialize(), names: self.names }
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.model.visit(visitor);
    }

    fn map<T: ModuleMapper>(self, mapper: &mut T) -> Self {
        let model = self.model.map(&mut Naming { names: self.names, mapper });
        Self { model, names: self.names }
    }
}

/// Tells `mapper` the name of each parameter in place of its path.
struct Naming<'a, T> {
    names: &'a Names<'a>,
    mapper: &'a mut T,
}

impl<T: ModuleMapper> ModuleMapper for Naming<'_, T> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(name) = self.names.0.get(&param.id).copied() else { return self.mapper.map_float(param) };
        name.split('.').for_each(|part| self.mapper.enter_module(part, ""));
        let param = self.mapper.map_float(param);
        name.rsplit('.').for_each(|part| self.mapper.exit_module(part, ""));
        param
    }
}
