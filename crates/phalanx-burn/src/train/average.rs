//! Gradients of a step that runs forward and backward itself, averaged over all ranks.

use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn::train::{LearnerModel, TrainOutput, TrainStep};
use parking_lot::Mutex;
use phalanx::reducer::{ParameterSpec, Reducer, ReducerOptions};
use phalanx::{Error, ProcessGroup, Result, WorldSize};

use crate::bridge::{self, Lent};
use crate::hook::{self, GradientSink};
use crate::parameters::Inventory;

/// Averages the gradients of one model.
pub(super) struct Average {
    /// Nothing in a world of one.
    sink: Option<Arc<Sink>>,
    inventory: Inventory,
    device: Device,
}

struct Sink(Mutex<State>);

struct State {
    reducer: Reducer,
    /// The first failure within backward, which cannot return it.
    failure: Option<Error>,
}

impl GradientSink for Sink {
    fn ready(&self, index: usize, gradient: Lent<'_>) {
        let State { reducer, failure } = &mut *self.0.lock();
        if failure.is_none() {
            *failure = reducer.ready(index, gradient.bytes).err();
        }
    }
}

impl Average {
    /// For `model`, which must be the same on every rank.
    pub fn new<M: Module>(model: &M, device: &Device, group: &ProcessGroup) -> Result<Self> {
        let inventory = Inventory::of(model)?;
        let sink = if group.world_size() == WorldSize::ONE {
            None
        } else {
            let specs = inventory.parameters.iter().map(|parameter| {
                let dtype = bridge::dtype(parameter.dtype)?;
                Ok(ParameterSpec::new(parameter.name.as_str(), parameter.shape.as_slice(), dtype))
            });
            let specs = specs.collect::<Result<_>>()?;
            let reducer = Reducer::new(Arc::new(group.clone()), specs, ReducerOptions::default())?;
            Some(Arc::new(Sink(Mutex::new(State { reducer, failure: None }))))
        };
        Ok(Self { sink, inventory, device: device.clone() })
    }

    pub fn inventory(&self) -> &Inventory {
        &self.inventory
    }

    /// A step of `model`; gradients travel while its backward pass still runs.
    pub fn step<M: LearnerModel>(
        &self,
        model: &M,
        input: <M as TrainStep>::Input,
    ) -> Result<TrainOutput<<M as TrainStep>::Output>> {
        let Some(sink) = &self.sink else { return Ok(TrainStep::step(model, input)) };
        sink.0.lock().reducer.start()?;
        let hooked = hook::hooked(model, &self.device, sink.clone());
        let TrainOutput { item, .. } = TrainStep::step(&hooked, input);
        drop(hooked);
        Ok(TrainOutput { grads: self.finish(model)?, item })
    }

    /// The average of what has been added up.
    pub fn of<M: Module>(&self, model: &M, gradients: GradientsParams) -> Result<GradientsParams> {
        let Some(sink) = &self.sink else { return Ok(gradients) };
        sink.0.lock().reducer.start()?;
        let mut feeder = Feeder { sink, inventory: &self.inventory, gradients };
        model.visit(&mut feeder);
        self.finish(model)
    }

    fn finish<M: Module>(&self, model: &M) -> Result<GradientsParams> {
        let Some(sink) = &self.sink else { return Ok(GradientsParams::new()) };
        let State { reducer, failure } = &mut *sink.0.lock();
        if let Some(failure) = failure {
            return Err(failure.clone());
        }
        reducer.finish()?;
        let mut averages = Averages {
            reducer,
            inventory: &self.inventory,
            gradients: GradientsParams::new(),
            failure: None,
        };
        model.visit(&mut averages);
        averages.failure.map_or(Ok(averages.gradients), Err)
    }
}

/// Hands gradients that are all there to the reducer, the last layer's first, as backward would.
struct Feeder<'a> {
    sink: &'a Sink,
    inventory: &'a Inventory,
    gradients: GradientsParams,
}

impl ModuleVisitor for Feeder<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(index) = self.inventory.parameters.iter().position(|known| known.id == param.id) else {
            return;
        };
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            let data = gradient.into_data();
            self.sink.ready(index, Lent { dtype: data.dtype(), bytes: data.as_bytes() });
        }
    }
}

/// Collects the averages under the ids of the model's parameters.
struct Averages<'a> {
    reducer: &'a Reducer,
    inventory: &'a Inventory,
    gradients: GradientsParams,
    failure: Option<Error>,
}

impl ModuleVisitor for Averages<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(index) = self.inventory.parameters.iter().position(|known| known.id == param.id) else {
            return;
        };
        match self.reducer.gradient(index) {
            Ok(Some(average)) => {
                let dtype = param.dtype();
                let data = bridge::tensor_data(average, param.shape().as_slice(), dtype);
                let average = Tensor::<D>::from_data(data, (&param.device().inner(), dtype));
                self.gradients.register(param.id, average);
            }
            Ok(None) => {}
            Err(failure) => {
                self.failure.get_or_insert(failure);
            }
        }
    }
}
