//! Gradients of a step that runs forward and backward itself, averaged over all ranks.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn::train::{LearnerModel, TrainOutput, TrainStep};
use phalanx::{ProcessGroup, Result};

use super::DdpStrategy;
use crate::ddp;
use crate::gradients::{Handover, averages};
use crate::hook::{self, GradientSink};
use crate::memory;
use crate::parameters::Inventory;
use crate::sink::{Delivery, Pass, Sink};

/// Averages the gradients of one model.
pub(super) struct Average {
    /// Nothing in a world of one.
    sink: Option<Arc<Sink>>,
    inventory: Inventory,
    places: HashMap<ParamId, usize>,
    device: Device,
    view: bool,
}

impl Average {
    /// For `model`, which must be the same on every rank.
    pub fn new<M: Module>(model: &M, strategy: &DdpStrategy) -> Result<Self> {
        let DdpStrategy { group, device, options, hook, .. } = strategy;
        let inventory = Inventory::of(model)?;
        let sink = ddp::sink(&inventory, Arc::new(ProcessGroup::clone(group)), options)?;
        if let (Some(sink), Some(hook)) = (&sink, hook) {
            sink.register_hook(hook())?;
        }
        let (places, view) = (ddp::places(&inventory), options.gradient_as_bucket_view);
        Ok(Self { sink, inventory, places, device: device.clone(), view })
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
        sink.start(Delivery::Now)?;
        let hooked = hook::hooked(model, &self.device, Arc::new(Pass(sink.clone())));
        let TrainOutput { item, .. } = TrainStep::step(&hooked, input);
        drop(hooked);
        Ok(TrainOutput { grads: self.finish(sink, model)?, item })
    }

    /// The average of what has been added up.
    pub fn of<M: Module>(&self, model: &M, gradients: GradientsParams) -> Result<GradientsParams> {
        let Some(sink) = &self.sink else { return Ok(gradients) };
        sink.start(Delivery::Now)?;
        let mut feeder =
            Feeder { pass: Pass(sink.clone()), places: &self.places, gradients, outcome: Ok(()) };
        model.visit(&mut feeder);
        feeder.outcome?;
        self.finish(sink, model)
    }

    fn finish<M: Module>(&self, sink: &Sink, model: &M) -> Result<GradientsParams> {
        let handover = Handover { scale: 1.0, view: self.view };
        sink.finish(|reducer| averages(model, reducer, &self.places, handover))
    }
}

/// Hands gradients that are all there to the reducer.
struct Feeder<'a> {
    pass: Pass,
    places: &'a HashMap<ParamId, usize>,
    gradients: GradientsParams,
    outcome: Result<()>,
}

impl ModuleVisitor for Feeder<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(&index) = self.places.get(&param.id) else { return };
        if let (Some(gradient), Ok(())) = (self.gradients.remove::<D>(param.id), &self.outcome) {
            self.outcome = memory::lend(gradient, |lent| self.pass.ready(index, lent));
        }
    }
}
