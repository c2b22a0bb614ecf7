//! Averages the gradients of steps that run forward and backward themselves.

use std::sync::Arc;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::train::{LearnerModel, TrainOutput, TrainStep};
use phalanx::join::JoinGroup;
use phalanx::reducer::hooks::BuiltInHook;
use phalanx::{Error, Result};

use super::DdpStrategy;
use crate::ddp::{Averaging, Engine};
use crate::gradients::{Handover, averages};
use crate::hook;
use crate::lr;
use crate::parallel::{refuse_divided, refuse_units};
use crate::parameters::Inventory;
use crate::sink::{Delivery, Pass, Sink};

/// Averages the gradients of one model.
pub(super) struct Average<M> {
    engine: Engine<M>,
    pub inventory: Inventory,
    view: bool,
}

impl<M: LearnerModel> Average<M> {
    /// For `model`, which must be equal on every rank.
    pub fn new(model: &M, strategy: &DdpStrategy) -> Result<Self> {
        let DdpStrategy { group, options, hook, .. } = strategy;
        refuse_units(model, "DdpStrategy")?;
        // Rank 0 of each group would write its parts to the one directory, and nothing would look at the failure of a tensor group.
        refuse_divided(model, "DdpStrategy")?;
        let inventory = Inventory::of(model)?;
        let engine = Engine::new(&inventory, &JoinGroup::from(group), options, &Averaging::Host)?;
        if let (Some(sink), Some(hook)) = (engine.sink(), hook) {
            let hook = hook();
            sink.call(|reducer| match hook.built_in() {
                Some(BuiltInHook::PostLocalSgd(_)) => Err(trains_alone(&hook.describe())),
                Some(BuiltInHook::AllReduce | BuiltInHook::Compressed(_) | BuiltInHook::PowerSgd(_))
                | None => reducer.register_hook(hook),
            })?;
        }
        Ok(Self { engine, inventory, view: options.gradient_as_bucket_view })
    }

    /// Warns if a training goes on with a hook that keeps something from step to step: Burn's checkpoints do not have it.
    pub fn warn_of_a_new_hook(&self, starting_epoch: usize) -> Result<()> {
        let Some(sink) = self.engine.sink() else { return Ok(()) };
        let hook = sink.hooked().ask(|reducer| reducer.hook_state())?;
        if !hook.is_empty() {
            phalanx::warn(format_args!(
                "the training goes on in epoch {starting_epoch}, and the communication hook {} begins anew: Burn's checkpoints do not have \
                 what it keeps; phalanx_burn::TrainState's have",
                hook.hook()
            ));
        }
        Ok(())
    }

    /// A step of `model`; gradients are sent while its backward pass still runs.
    pub fn step(
        &self,
        model: &M,
        input: <M as TrainStep>::Input,
    ) -> Result<TrainOutput<<M as TrainStep>::Output>> {
        let Engine::Together { sink, .. } = &self.engine else { return Ok(TrainStep::step(model, input)) };
        sink.start(Delivery::Now, None, None)?;
        let item = self.hooked_step(sink, model, input)?;
        Ok(TrainOutput { grads: self.finish(sink, model)?, item })
    }

    /// A step of `model` whose gradients are added up on this rank, until they are [averaged](Self::sum).
    pub fn add(&mut self, model: &M, input: <M as TrainStep>::Input) -> Result<<M as TrainStep>::Output> {
        match &mut self.engine {
            Engine::Alone { held } => {
                let TrainOutput { grads, item } = TrainStep::step(model, input);
                held.get_or_insert_with(GradientsAccumulator::new).accumulate(model, grads);
                Ok(item)
            }
            Engine::Together { sink, .. } => {
                let sink = sink.clone();
                sink.set_delivery(Delivery::Hold)?;
                let item = self.hooked_step(&sink, model, input)?;
                sink.set_delivery(Delivery::Ignore)?;
                Ok(item)
            }
        }
    }

    /// Forgets what has been added up.
    pub fn drop_held(&mut self) {
        match &mut self.engine {
            Engine::Alone { held } => *held = None,
            Engine::Together { sink, .. } => sink.drop_held(),
        }
    }

    /// The average of what has been added up.
    pub fn sum(&mut self, model: &M) -> Result<GradientsParams> {
        match &mut self.engine {
            Engine::Alone { held } => {
                Ok(held.take().map_or_else(GradientsParams::new, |mut held| held.grads()))
            }
            Engine::Together { sink, .. } => {
                let sink = sink.clone();
                sink.start(Delivery::Ignore, None, None)?;
                self.finish(&sink, model)
            }
        }
    }

    /// The optimizer takes a step with these rates, which the ranks compare. An error for one that is no finite number.
    pub fn stepped(&self, rates: &ModuleLearningRate) -> Result<()> {
        lr::check(rates, &self.inventory.parameters)?;
        if let Some(sink) = self.engine.sink() {
            let rates = lr::of_each(rates, &self.inventory.parameters);
            sink.with_reducer(|reducer| reducer.stepped(rates, []));
        }
        Ok(())
    }

    fn hooked_step(
        &self,
        sink: &Arc<Sink>,
        model: &M,
        input: <M as TrainStep>::Input,
    ) -> Result<<M as TrainStep>::Output> {
        let hooked = hook::hooked(model, &self.inventory, Arc::new(Pass::to(sink)));
        let TrainOutput { grads, item } = TrainStep::step(&hooked, input);
        // Backward has left none of its own.
        if !grads.is_empty() {
            return Err(Error::invalid_argument(
                "TrainStep::step gives gradients that its backward pass through the model has not computed: the averages would lack them",
            )
            .with_remedy("compute all of the loss with the model, and change gradients in TrainStep::optimize, which gets the averages"));
        }
        Ok(item)
    }

    fn finish(&self, sink: &Sink, model: &M) -> Result<GradientsParams> {
        let handover = Handover { scale: 1.0, view: self.view };
        sink.finish(|reducer| match reducer.averages_over_all() {
            true => averages(model, reducer, &self.inventory.indices, handover),
            false => Err(trains_alone("that was given to with_comm_hook")),
        })
    }
}

/// The error for a communication hook that lets replicas drift apart.
fn trains_alone(hook: &str) -> Error {
    Error::invalid_argument(format!(
        "DdpStrategy: the communication hook {hook} does not average over all ranks, and Burn's learner has no step that averages their models"
    ))
    .with_remedy(
        "use another hook, such as Compressed or PowerSgd; local SGD needs a loop of your own, with Ddp and a PeriodicModelAverager",
    )
}
