//! Pipeline parallelism: a model cut into stages, each on a rank of its own, and batches cut into micro-batches that follow each other
//! through them.
//!
//! [`phalanx::pipeline`] has the schedules; [`Pipeline`] carries them out.

mod evaluate;
mod inbox;
mod outbox;
mod places;
mod run;
mod tied;

use std::fmt;
use std::time::Duration;

use burn::module::Module;
use burn::tensor::Tensor;
use phalanx::pipeline::{Plan, Schedule};
use phalanx::{Caller, Error, ProcessGroup, Rank, Result};

use self::run::Run;
pub use self::tied::TiedParameter;
use super::message::Layout;
use super::panicked::EndIfPanicked;
use crate::{Ddp, SyncedGradients};

/// A part of a model that is cut into stages, one after the other. A rank's model is a list of those that it has.
///
/// `D` is the number of dimensions of what goes from stage to stage.
pub trait Stage<const D: usize>: Module {
    /// A micro-batch, such as tokens and answers. Every rank has it, or what its stages need of it. Nothing compares it over the ranks.
    type Batch;

    /// The stage's output for a micro-batch. `input` is the output of the stage before; the first stage gets none, and begins with
    /// `batch`.
    fn forward(&self, input: Option<Tensor<D>>, batch: &Self::Batch) -> StageOutput<D>;
}

/// What a stage computes.
#[derive(Clone, Debug)]
pub enum StageOutput<const D: usize> {
    /// The input of the next stage. All micro-batches have the same shape.
    Hidden(Tensor<D>),
    /// The mean loss of the micro-batch, from the last stage.
    Loss(Tensor<1>),
}

impl<const D: usize> StageOutput<D> {
    /// An error unless the last of `stages`, and no other, gives a loss.
    fn checked(self, stage: usize, stages: usize) -> Result<Self> {
        let (what, instead) = match (&self, stage + 1 == stages) {
            (Self::Loss(_), true) | (Self::Hidden(_), false) => return Ok(self),
            (Self::Loss(_), false) => ("a loss", "Hidden"),
            (Self::Hidden(_), true) => ("no loss", "Loss"),
        };
        Err(Error::invalid_argument(format!("stage {stage} gives {what}")).with_remedy(format!(
            "the last stage gives StageOutput::Loss, and every other StageOutput::Hidden: {instead} here"
        )))
    }
}

/// Trains a model whose stages are on the ranks of a group, by one of [`phalanx::pipeline`]'s schedules.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::AdamWConfig;
/// use burn::tensor::{Device, Tensor};
/// use phalanx::pipeline::Schedule;
/// use phalanx::{ProcessGroup, Result};
/// use phalanx_burn::Ddp;
/// use phalanx_burn::parallel::pipeline::{Pipeline, Stage, StageOutput};
///
/// #[derive(Module, Debug)]
/// struct Part {
///     layer: Linear,
///     is_last: bool,
/// }
///
/// impl Stage<2> for Part {
///     type Batch = (Tensor<2>, Tensor<2>);
///
///     fn forward(&self, input: Option<Tensor<2>>, (x, y): &Self::Batch) -> StageOutput<2> {
///         let hidden = self.layer.forward(input.unwrap_or_else(|| x.clone()));
///         match self.is_last {
///             false => StageOutput::Hidden(hidden.tanh()),
///             true => StageOutput::Loss((hidden - y.clone()).powi_scalar(2).mean()),
///         }
///     }
/// }
///
/// fn train(pipeline: &ProcessGroup, data: &ProcessGroup, batches: &[(Tensor<2>, Tensor<2>)]) -> Result<f64> {
///     let device = Device::flex().autodiff();
///     let mut pipeline = Pipeline::new(pipeline, Schedule::OneForwardOneBackward, batches.len())?;
///     let part = |stage| Part { layer: LinearConfig::new(4, 4).init(&device), is_last: stage + 1 == pipeline.stages() };
///     let parts: Vec<Part> = pipeline.own_stages().map(part).collect();
///     let mut ddp = Ddp::new(parts, data)?; // replicas of these stages; a group of one, if there are none
///     let mut optimizer = AdamWConfig::new().init();
///     let step = pipeline.train(&mut ddp, batches)?;
///     ddp.step(&mut optimizer, 1e-3, step.gradients)?;
///     Ok(step.loss) // the mean over micro-batches, on every rank
/// }
/// # let device = Device::flex().autodiff();
/// # let batch = (Tensor::ones([2, 4], &device), Tensor::zeros([2, 4], &device));
/// # let alone = ProcessGroup::alone()?;
/// # assert!(train(&alone, &alone, &[batch.clone(), batch])? > 0.0);
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// Loss and gradients are those of one process with the whole model and the mean of the micro-batches' losses. Rank r has the stages
/// r, r + ranks, ...: one each, or `stages_per_rank` with [`Schedule::Interleaved`]. The shapes of what goes between stages are told
/// at the first step, and stay; a micro-batch of another shape is an error that says so.
///
/// The model is in a [`Ddp`] over the ranks that have the same stages, with a mesh `mesh.group("data")?`. Gradients are averaged over
/// them at the end of a step: those of the stage that runs backward last during that pass, and those of this rank's other stages, which
/// it has with [`Schedule::Interleaved`], after it.
///
/// Passes and the waits between them are on the track `pipeline` of a [trace](phalanx::trace); [`PipelineStep::bubble`] has the share
/// of the waits.
///
/// # Errors
/// An error on one rank ends the group with its cause, so that no other waits for a tensor that does not come. A rank that dies is
/// named by all.
#[doc(alias("PipelineStage", "ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"))]
pub struct Pipeline<const D: usize> {
    group: ProcessGroup,
    plan: Plan,
    /// By stage: what it takes, once that is known.
    inputs: Vec<Option<Layout>>,
    recomputation: Option<u64>,
    steps: u64,
    /// Whether a step is under way, or a panic has cut it off.
    is_running: bool,
}

/// What a step gives.
#[derive(Debug)]
pub struct PipelineStep {
    /// The gradients of this rank's stages, for [`Ddp::step`].
    pub gradients: SyncedGradients,
    /// The mean loss of all micro-batches, on every rank.
    pub loss: f64,
    /// How long this rank computed.
    pub busy: Duration,
    /// The share of the step, over all ranks, in which ranks did not compute: they waited for each other, or sent. The same on every
    /// rank. By the formula (p - 1) / (m + p - 1) for p ranks with one stage each, m micro-batches, and stages that take equally long.
    pub bubble: f64,
}

impl<const D: usize> Pipeline<D> {
    /// Stages on the ranks of `group`, in their order, and `microbatches` for each step. All ranks call it together.
    ///
    /// # Errors
    /// On every rank, if ranks ask for different schedules or tensors of different dimensions. As [`Schedule::plan`].
    pub fn new(group: &ProcessGroup, schedule: Schedule, microbatches: usize) -> Result<Self> {
        let own = (format!("{schedule:?}"), microbatches as u64, D as u64);
        // Before what this rank's own argument is found to be: the others wait here.
        let asked = group.in_call(Caller::PipelineTrain).all_gather_object(&own)?;
        if let Some(other) = asked.iter().position(|other| *other != asked[0]) {
            return Err(Error::mismatch(format!(
                "the ranks disagree on the pipeline: rank 0 asks for {} with {} micro-batches and tensors of {} dimensions, rank {other} \
                 for {} with {} and {}",
                asked[0].0, asked[0].1, asked[0].2, asked[other].0, asked[other].1, asked[other].2
            ))
            .with_peer(Rank::new(other as u32))
            .with_remedy("every rank must call Pipeline::<D>::new with the same D, schedule and micro-batches"));
        }
        let plan = schedule.plan(group.world_size().count(), microbatches)?;
        let inputs = vec![None; plan.stages()];
        Ok(Self { group: group.clone(), plan, inputs, recomputation: None, steps: 0, is_running: false })
    }

    /// Keeps only the inputs of stages between a forward pass and its backward pass, and computes the rest again: a third more
    /// work, for memory of one micro-batch's activations in place of all that the schedule holds.
    ///
    /// Before a forward pass, and again before it is repeated, the device is seeded with a number made of `seed`, the stage, the
    /// micro-batch, and a number that is drawn from the program's own at the start of the step, so that dropout drops the same. So it follows
    /// the program's seed: seed the device before each step, and a run that continues from a checkpoint drops what it would have dropped. After
    /// the step the device continues with the program's own random numbers, as if one had been drawn. They belong to the process: another
    /// thread must not draw during a step. Running statistics, as those of batch norm, see each micro-batch twice.
    #[doc(alias("checkpoint", "activation_checkpointing"))]
    #[must_use]
    pub fn with_recomputation(mut self, seed: u64) -> Self {
        self.recomputation = Some(seed);
        self
    }

    /// The number of stages of the model.
    pub fn stages(&self) -> usize {
        self.plan.stages()
    }

    /// The stages that this rank has, in the order in which its model must have them.
    pub fn own_stages(&self) -> impl Iterator<Item = usize> + use<D> {
        (self.group.rank().index()..self.plan.stages()).step_by(self.plan.ranks())
    }

    /// For a path in this rank's list of stages, such as `1.layers.0.weight`, the number of the stage and the path in it. For the names
    /// of a [`ShardedState`](super::ShardedState).
    pub fn stage_path<'p>(&self, path: &'p str) -> Option<(usize, &'p str)> {
        let (place, path) = path.split_once('.')?;
        let stage = self.own_stages().nth(place.parse().ok()?)?;
        Some((stage, path))
    }

    /// What each rank does, and when.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The mean loss of all `batches`, without gradients, on every rank: for an evaluation. `stages` are this rank's: call it in
    /// [`Ddp::evaluate`](crate::Ddp::evaluate), `ddp.evaluate(|stages| pipeline.evaluate(stages, &batches))??`, so that replicas have the
    /// same running statistics. All ranks call it together.
    ///
    /// # Errors
    /// As [`train`](Self::train).
    pub fn evaluate<S: Stage<D>>(&mut self, stages: &[S], batches: &[S::Batch]) -> Result<f64> {
        let _end = EndIfPanicked::of(&self.group, "a stage of a pipeline");
        evaluate::mean_loss(self, stages, batches).inspect_err(|error| self.group.abort_all(error.clone()))
    }

    /// An error unless a step has so many micro-batches, and this rank so many stages.
    fn check(&self, batches: usize, stages: usize) -> Result<()> {
        let plan = &self.plan;
        if batches != plan.microbatches() {
            return Err(Error::invalid_argument(format!(
                "{batches} micro-batches, where the pipeline was made for {}",
                plan.microbatches()
            ))
            .with_remedy("divide each batch into as many, or make another Pipeline"));
        }
        let own = self.own_stages().count();
        if own != stages {
            return Err(Error::invalid_argument(format!(
                "rank {} of the pipeline has {own} of {} stages, and its model {stages}",
                self.group.rank(),
                plan.stages()
            ))
            .with_remedy("make the model of the stages that Pipeline::own_stages gives"));
        }
        Ok(())
    }

    /// Runs forward and backward passes of all `batches`, the micro-batches of a step, through all stages. `ddp` has this rank's
    /// [stages](Self::own_stages). All ranks call it together.
    ///
    /// # Errors
    /// If there are more or fewer micro-batches or stages than the plan has, a stage gives what its place does not, or computes without its
    /// input, so that the stage before gets no gradient, or shapes change. On every rank, in the first step, if a parameter that is trained is on two ranks: they would train copies of it apart, and
    /// a [`TiedParameter`] trains it as one. Copies are known by their [`ParamId`](burn::module::ParamId), which parameters of one record or
    /// of one cloned `Param` have in common. If a rank fails, or an exchange of its tensor group, or with recomputation a device that does not give a
    /// random number. Gradients of passes that were done are then dropped. A panic of a stage ends the groups of several ranks, too.
    pub fn train<S: Stage<D>>(
        &mut self,
        ddp: &mut Ddp<Vec<S>>,
        batches: &[S::Batch],
    ) -> Result<PipelineStep> {
        let _end = EndIfPanicked::of(&self.group, "a stage of a pipeline");
        if std::mem::replace(&mut self.is_running, true) {
            // A pipeline of one rank goes on after a panic, which has left the gradients of the passes before it.
            ddp.drop_accumulated();
        }
        let outcome = Run::new(self, ddp, batches).and_then(Run::train);
        self.is_running = false;
        outcome.inspect_err(|error| {
            ddp.drop_accumulated();
            self.group.abort_all(error.clone());
        })
    }
}

impl<const D: usize> fmt::Debug for Pipeline<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ranks, rank) = (self.plan.ranks(), self.group.rank());
        write!(f, "Pipeline({} stages, rank {rank} of {ranks})", self.plan.stages())
    }
}
