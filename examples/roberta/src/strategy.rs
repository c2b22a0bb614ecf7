//! The ways to train one model on several devices.

use anyhow::{Context, Result, ensure};
use burn::module::Module;
use burn::optim::{ModuleOptimizer, SgdConfig};
use burn::tensor::Device;
use phalanx::checkpoint::{Checkpoints, Saved, Snapshot};
use phalanx::{Error, ProcessGroup};
use phalanx_burn::parallel::{ShardedState, StateNames};
use phalanx_burn::{
    DataParallel, Ddp, DdpOptions, Destination, FusedAdamWConfig, Scatter, SyncedGradients, TowerGradients,
    ZeroRedundancyOptimizer, clip_grad_norm,
};
use serde::{Deserialize, Serialize};

use crate::mesh::{Mesh, Parallel, Part};
use crate::tasks::{Batch, Task, loss_sum};

/// The names of model and optimizer, and of a sharded optimizer, in checkpoints.
const MODEL: &str = "trained";
const SHARDED: &str = "sharded-optimizer";

/// How a model is trained on several devices. All ways take the same steps, of the same batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Strategy {
    /// A process for each device, which average gradients during backward: Ddp
    Ddp,
    /// As ddp, with the optimizer's state spread over the ranks: ZeroRedundancyOptimizer
    Zero,
    /// One process; the main replica gathers outputs, computes the loss and has the optimizer: DataParallel
    Dp,
    /// One process; each replica computes its own loss, the main one has the optimizer: TowerGradients
    Towers,
    /// One process and one device, which takes the batches of all
    Single,
    /// Replicas of --parts ranks each, among which every layer is divided: TensorPlan, and Ddp between replicas
    Tensor,
    /// Replicas of --parts ranks each, of which each has some layers: Pipeline, and Ddp between replicas
    Pipeline,
}

impl Strategy {
    /// Those of which each device has the whole model.
    pub const OF_DATA: [Self; 5] = [Self::Ddp, Self::Zero, Self::Dp, Self::Towers, Self::Single];
}

/// On how many devices, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Devices {
    /// Ranks, or replicas of one process.
    pub count: u32,
    /// How.
    pub strategy: Strategy,
    /// With [`Strategy::Tensor`] and [`Strategy::Pipeline`]: the ranks of a replica.
    #[serde(default = "whole")]
    pub parts: u32,
}

fn whole() -> u32 {
    1
}

impl Devices {
    /// `count` devices; `parts` count with strategies that divide a model.
    pub fn new(count: u32, strategy: Strategy, parts: u32) -> Self {
        let is_divided = matches!(strategy, Strategy::Tensor | Strategy::Pipeline);
        Self { count, strategy, parts: if is_divided { parts } else { 1 } }
    }

    /// How many copies of the whole model there are.
    pub fn replicas(self) -> usize {
        (self.count / self.parts.max(1)) as usize
    }

    /// How many processes that are.
    pub fn processes(self) -> u32 {
        match self.strategy {
            Strategy::Ddp | Strategy::Zero | Strategy::Tensor | Strategy::Pipeline => self.count,
            Strategy::Dp | Strategy::Towers | Strategy::Single => 1,
        }
    }

    /// The same way, on as many devices as there are: a launcher decides on the number of ranks.
    #[must_use]
    pub fn of(self, group: &ProcessGroup) -> Self {
        match self.processes() {
            1 => self,
            _ => Self { count: group.world_size().get(), ..self },
        }
    }

    /// How many devices' batches one process takes in a step: with the others of its replica, if it has a part of the model.
    pub fn batches(self) -> usize {
        (self.parts * self.count / self.processes().max(1)) as usize
    }

    /// # Errors
    /// If there are other processes, or they cannot be divided into replicas.
    pub fn check(self, group: &ProcessGroup) -> Result<()> {
        ensure!(
            self.parts > 0 && self.count.is_multiple_of(self.parts),
            "{} ranks cannot be divided into replicas of {}: --ranks must be a multiple of --parts",
            self.count,
            self.parts
        );
        let (wanted, there) = (self.processes(), group.world_size().get());
        ensure!(
            wanted == there,
            "--strategy {} with {} devices takes {wanted} processes, there are {there}: start it with --ranks and without \
             a launcher, or let both say the same",
            self.name(),
            self.count
        );
        Ok(())
    }

    /// Whether a training on these devices can continue from a checkpoint of one on `saved`. A checkpoint has the whole model,
    /// and the optimizer's state of the whole model, whatever the strategy. Only that of [`Strategy::Zero`] is divided otherwise.
    pub fn go_on_from(self, saved: Self) -> bool {
        (self.strategy == Strategy::Zero) == (saved.strategy == Strategy::Zero)
    }

    /// What `--strategy` calls it.
    pub fn name(self) -> &'static str {
        match self.strategy {
            Strategy::Ddp => "ddp",
            Strategy::Zero => "zero",
            Strategy::Dp => "dp",
            Strategy::Towers => "towers",
            Strategy::Single => "single",
            Strategy::Tensor => "tensor",
            Strategy::Pipeline => "pipeline",
        }
    }
}

/// What is called around the work of each replica of a process, in its thread, with its number.
pub type Scope = Box<dyn Fn(usize, &mut dyn FnMut()) + Send + Sync>;

/// A model on its devices, and its optimizer.
pub enum Engine<M: Part> {
    /// Each rank has the optimizer.
    Ddp(Ddp<M>, ModuleOptimizer),
    /// Each rank has a part of its state.
    Zero(Ddp<M>, ZeroRedundancyOptimizer),
    /// The main replica has it.
    DataParallel(DataParallel<M, 2>, ModuleOptimizer),
    /// The main replica has it.
    Towers(TowerGradients<M>, ModuleOptimizer),
    /// Each rank has that of its part.
    Parallel(Box<Parallel<M>>),
}

/// What came of a step.
#[derive(Clone, Copy, Debug)]
pub struct Stepped {
    /// The mean of this over all ranks is the mean loss of all predictions.
    pub loss: f64,
    /// Predictions of all ranks.
    pub count: f64,
    /// The norm of the gradient before it was clipped.
    pub norm: f64,
}

impl<M: Part> Engine<M> {
    /// Spreads a model over `devices`, and goes on with what was `saved` of it.
    ///
    /// # Errors
    /// If the number of processes is another one, what was saved is of another model, or the ranks do not agree.
    pub fn new(
        mut model: M,
        mut optimizer: ModuleOptimizer,
        (devices, mesh): (Devices, &Mesh),
        saved: Option<&Saved>,
        scope: Option<Scope>,
    ) -> Result<Self> {
        let group = &mesh.all;
        devices.check(group)?;
        if matches!(devices.strategy, Strategy::Tensor | Strategy::Pipeline) {
            return Ok(Self::Parallel(Box::new(Parallel::new(model, optimizer, mesh, (saved, MODEL))?)));
        }
        if let Some(saved) = saved {
            let (mut whole, state) = whole_state(model)?;
            match devices.strategy {
                // The state of the optimizer is beside, and is loaded below.
                Strategy::Zero => state.load(&mut whole, &mut SgdConfig::new().init(), saved, MODEL)?,
                _ => state.load(&mut whole, &mut optimizer, saved, MODEL)?,
            }
            model = whole.into_model();
        }
        let replicas = || vec![Device::flex().autodiff(); devices.count as usize];
        let scope = scope.unwrap_or_else(|| Box::new(|_, work| work()));
        Ok(match devices.strategy {
            Strategy::Ddp | Strategy::Single | Strategy::Tensor | Strategy::Pipeline => {
                Self::Ddp(with_views(model, group)?, optimizer)
            }
            Strategy::Zero => {
                let mut model = with_views(model, group)?;
                let mut optimizer = ZeroRedundancyOptimizer::new(optimizer, &mut model)?;
                if let Some(saved) = saved {
                    optimizer.load(&model, saved, SHARDED)?;
                }
                Self::Zero(model, optimizer)
            }
            Strategy::Dp => {
                Self::DataParallel(DataParallel::new(model, replicas())?.with_scope(scope), optimizer)
            }
            Strategy::Towers => {
                Self::Towers(TowerGradients::new(model, replicas())?.with_scope(scope), optimizer)
            }
        })
    }

    /// Lets the optimizer take a step with the gradient of the mean over all predictions of `batches`, and of as many on each of
    /// the other ranks.
    ///
    /// # Errors
    /// If the gradient is not finite, a rank fails, or a process with several replicas gets more than one batch.
    pub fn step<T: Task<Model = M>>(
        &mut self,
        task: &T,
        batches: Vec<Batch>,
        (rate, max_norm): (f64, f64),
    ) -> Result<Stepped> {
        match self {
            Self::Ddp(model, optimizer) => {
                let (loss, count, mut gradients) = averaged(model, task, &batches)?;
                let norm = finite(model.clip_grad_norm(&mut gradients, max_norm)?)?;
                model.step(optimizer, rate, gradients)?;
                Ok(Stepped { loss, count, norm })
            }
            Self::Zero(model, optimizer) => {
                let (loss, count, mut gradients) = averaged(model, task, &batches)?;
                let norm = finite(model.clip_grad_norm(&mut gradients, max_norm)?)?;
                optimizer.step(model, rate, gradients)?;
                Ok(Stepped { loss, count, norm })
            }
            Self::DataParallel(model, optimizer) => {
                let batch = whole_batch(batches)?;
                let (targets, count) = (batch.targets.clone(), batch.count as f64);
                let logits = model.forward(batch, |replica, part| task.logits(replica, &part))?;
                let loss = loss_sum(logits, targets) / count;
                let mut gradients = model.backward(&loss)?;
                let norm = finite(clip_grad_norm(model.model(), &mut gradients, max_norm)?)?;
                model.step(optimizer, rate, gradients)?;
                Ok(Stepped { loss: loss.into_scalar(), count, norm })
            }
            Self::Towers(model, optimizer) => {
                let batch = whole_batch(batches)?;
                let count = batch.count as f64;
                let (loss, mut gradients) = model.backward(batch, |replica, part| {
                    loss_sum(task.logits(replica, &part), part.targets) / part.count as f64
                })?;
                let norm = finite(clip_grad_norm(model.model(), &mut gradients, max_norm)?)?;
                model.step(optimizer, rate, gradients)?;
                Ok(Stepped { loss, count, norm })
            }
            Self::Parallel(parallel) => parallel.step(&whole_batch(batches)?, (rate, max_norm)),
        }
    }

    /// The whole model, on every rank; with several replicas of one process, the main one. All ranks call it together.
    ///
    /// # Errors
    /// If ranks have parts of it, and their exchange fails.
    pub fn model<T: Task<Model = M>>(&self, task: &T) -> Result<M> {
        match self {
            Self::Ddp(model, _) | Self::Zero(model, _) => Ok(model.model().clone()),
            Self::DataParallel(model, _) => Ok(model.model().clone()),
            Self::Towers(model, _) => Ok(model.model().clone()),
            Self::Parallel(parallel) => parallel.whole(task.model(&Device::flex().autodiff())),
        }
    }

    /// The bytes that this rank has given to collectives, or that replicas have sent each other.
    pub fn bytes_moved(&self) -> u64 {
        match self {
            Self::Ddp(model, _) | Self::Zero(model, _) => model.communicated_bytes(),
            Self::DataParallel(model, _) => model.transfers().total().bytes as u64,
            Self::Towers(model, _) => model.transfers().total().bytes as u64,
            Self::Parallel(parallel) => parallel.parts().0.communicated_bytes(),
        }
    }

    /// Saves model, optimizer and a value of the program after `steps`; all ranks call it together.
    ///
    /// # Errors
    /// As [`Checkpoints::save`].
    pub fn save<P: Serialize>(
        &self,
        checkpoints: &Checkpoints,
        steps: u64,
        (name, value): (&str, &P),
    ) -> Result<()> {
        let shared = |snapshot: &mut Snapshot, model: &M, optimizer: &ModuleOptimizer| {
            let (whole, state) = whole_state(model.clone())?;
            state.save(&whole, optimizer, snapshot, MODEL)?;
            snapshot.value(name, value)
        };
        let alone =
            |model: &M, optimizer| checkpoints.save(steps, |snapshot| shared(snapshot, model, optimizer));
        match self {
            Self::Ddp(model, optimizer) => alone(model.model(), optimizer)?,
            Self::DataParallel(model, optimizer) => alone(model.model(), optimizer)?,
            Self::Towers(model, optimizer) => alone(model.model(), optimizer)?,
            Self::Zero(model, sharded) => checkpoints.save_sharded(steps, |snapshot| {
                if model.rank().is_main() {
                    // What each rank has a part of is not in here.
                    shared(snapshot, model.model(), &FusedAdamWConfig::new().init())?;
                }
                sharded.save(model, snapshot, SHARDED)
            })?,
            Self::Parallel(parallel) => checkpoints.save_sharded(steps, |snapshot| {
                if checkpoints.group().rank().is_main() {
                    snapshot.value(name, value)?;
                }
                let (model, optimizer, state) = parallel.parts();
                state.save(model, optimizer, snapshot, MODEL)
            })?,
        }
        Ok(())
    }

    /// # Errors
    /// If the ranks have models with other bits, or one fails.
    pub fn check_replicas(&self) -> Result<()> {
        let identical = match self {
            Self::Ddp(model, _) | Self::Zero(model, _) => model.replicas_identical()?,
            Self::Parallel(parallel) => parallel.parts().0.replicas_identical()?,
            Self::DataParallel(..) | Self::Towers(..) => true,
        };
        ensure!(identical, "the replicas differ");
        Ok(())
    }
}

/// A whole model in this process, in the form in which meshes save and load their parts.
fn whole_state<M: Module>(model: M) -> phalanx::Result<(Ddp<M>, ShardedState)> {
    let alone = ProcessGroup::alone()?;
    let whole = Ddp::new(model, &alone)?;
    let state = ShardedState::new(&whole, &alone, None, &StateNames::same())?;
    Ok((whole, state))
}

/// Gradients stay in their buckets, so that a rank needs about as much memory as a training alone.
pub(crate) fn with_views<M: Module>(model: M, group: &ProcessGroup) -> Result<Ddp<M>> {
    let mut options = DdpOptions::default();
    options.gradient_as_bucket_view = true;
    Ok(Ddp::with_options(model, group, options)?)
}

/// The loss of this rank, the number of all ranks' predictions, and the gradient of the mean over these.
fn averaged<T: Task>(
    model: &mut Ddp<T::Model>,
    task: &T,
    batches: &[Batch],
) -> Result<(f64, f64, SyncedGradients)> {
    let (last, held) = batches.split_last().context("a step needs a batch")?;
    // Ranks may have unequal numbers of predictions.
    let count = model.sum(batches.iter().map(|batch| batch.count).sum::<usize>())?;
    let scale = model.world_size().count() as f64 / count;
    let loss_of =
        |model: &T::Model, batch: &Batch| loss_sum(task.logits(model, batch), batch.targets.clone()) * scale;
    let mut loss = 0.0;
    for batch in held {
        let part = model.forward(|model| loss_of(model, batch))?;
        model.backward_no_sync(&part)?;
        loss += part.into_scalar::<f64>();
    }
    let part = model.forward(|model| loss_of(model, last))?;
    let gradients = model.backward(&part)?;
    Ok((loss + part.into_scalar::<f64>(), count, gradients))
}

fn whole_batch(mut batches: Vec<Batch>) -> Result<Batch> {
    let batch = batches.pop().context("a step needs a batch")?;
    ensure!(batches.is_empty(), "gradients are accumulated on ranks: take --accumulate 1 or --strategy ddp");
    Ok(batch)
}

pub(crate) fn finite(norm: f64) -> Result<f64> {
    ensure!(norm.is_finite(), "the gradient of a step is not finite: try a smaller --lr");
    Ok(norm)
}

impl Scatter for Batch {
    fn samples(&self) -> phalanx::Result<usize> {
        if self.places.is_some() {
            return Err(Error::other(
                "texts with unequal numbers of predictions are not scattered to replicas",
            ));
        }
        self.inputs.tokens.samples()
    }

    fn part(&self, samples: std::ops::Range<usize>) -> Self {
        let (inputs, targets) = (self.inputs.part(samples.clone()), self.targets.part(samples.clone()));
        Self { inputs, places: None, targets, count: samples.len() }
    }

    fn copy_to(self, to: &mut Destination<'_>) -> phalanx::Result<Self> {
        let (inputs, targets) = (self.inputs.copy_to(to)?, self.targets.copy_to(to)?);
        Ok(Self { inputs, targets, ..self })
    }
}

impl Scatter for crate::Inputs {
    fn samples(&self) -> phalanx::Result<usize> {
        self.tokens.samples()
    }

    fn part(&self, samples: std::ops::Range<usize>) -> Self {
        let Self { tokens, types, positions, bias } = self;
        Self {
            tokens: tokens.part(samples.clone()),
            types: types.part(samples.clone()),
            positions: positions.part(samples.clone()),
            bias: bias.part(samples),
        }
    }

    fn copy_to(self, to: &mut Destination<'_>) -> phalanx::Result<Self> {
        Ok(Self {
            tokens: self.tokens.copy_to(to)?,
            types: self.types.copy_to(to)?,
            positions: self.positions.copy_to(to)?,
            bias: self.bias.copy_to(to)?,
        })
    }
}
