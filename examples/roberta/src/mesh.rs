//! A model on a mesh of ranks: replicas, of each of which several ranks have a part.

use std::ops::Range;

use anyhow::{Context, Result, ensure};
use burn::module::{ModuleMapper, Param, ParamId};
use burn::optim::ModuleOptimizer;
use burn::tensor::{Int, Tensor};
use phalanx::checkpoint::Saved;
use phalanx::mesh::DeviceMesh;
use phalanx::pipeline::Schedule;
use phalanx::{ProcessGroup, Rank};
use phalanx_burn::parallel::pipeline::{Pipeline, Stage, StageOutput, TiedParameter};
use phalanx_burn::parallel::tensor::TensorGroup;
use phalanx_burn::parallel::{ShardedState, StateNames, clip_grad_norm};
use phalanx_burn::{Collectives, Ddp, Scatter};

use crate::model::{self, Classifier, MaskedLm, Passed, Stages};
use crate::strategy::{Devices, Stepped, Strategy, finite, with_views};
use crate::tasks::{Batch, loss_sum};

/// Micro-batches of a step, if its texts can be divided so.
const MICROBATCHES: usize = 4;

/// A micro-batch, and the number by which the sum of its losses is multiplied.
pub type Weighed = (Batch, f64);

/// A model that can be on a mesh.
pub trait Part: Stages + Stage<3, Batch = Weighed> {}

impl<M: Stages + Stage<3, Batch = Weighed>> Part for M {}

/// The groups of this rank.
pub struct Mesh {
    /// All ranks.
    pub all: ProcessGroup,
    /// Those with the same part of the model: each takes other texts.
    pub data: ProcessGroup,
    pipeline: ProcessGroup,
    tensor: TensorGroup,
}

impl Mesh {
    /// The mesh of `devices`; all ranks call it together.
    ///
    /// # Errors
    /// If the number of ranks is another one, or they do not agree.
    pub fn new(devices: Devices, group: &ProcessGroup) -> Result<Self> {
        devices.check(group)?;
        let all = group.clone();
        let alone = ProcessGroup::alone()?;
        let inner = match devices.strategy {
            Strategy::Tensor => "tensor",
            Strategy::Pipeline => "pipeline",
            Strategy::Ddp | Strategy::Zero | Strategy::Dp | Strategy::Towers | Strategy::Single => {
                let tensor = TensorGroup::new(&alone);
                return Ok(Self { all, data: group.clone(), pipeline: alone, tensor });
            }
        };
        let sizes = [("data", devices.replicas()), (inner, devices.parts as usize)];
        let mesh = DeviceMesh::new(group, &sizes)?;
        let group_of = |name: &str| if name == inner { mesh.group(name) } else { Ok(&alone) };
        let (pipeline, tensor) = (group_of("pipeline")?.clone(), TensorGroup::new(group_of("tensor")?));
        Ok(Self { all, data: mesh.group("data")?.clone(), pipeline, tensor })
    }
}

/// This rank's part of a model, and its optimizer.
pub struct Parallel<M: Part> {
    /// A stage of the pipeline, with divided layers; replicas are averaged.
    ddp: Ddp<Vec<M>>,
    optimizer: ModuleOptimizer,
    state: ShardedState,
    pipeline: ProcessGroup,
    tensor: TensorGroup,
    /// What the first and the last stage share, on these.
    tied: Option<(TiedParameter, ParamId)>,
}

impl<M: Part> Parallel<M> {
    /// This rank's part of a whole model, and what was `saved` of it under `name`.
    ///
    /// # Errors
    /// If the model cannot be divided so, what was saved is of another one, or an exchange fails.
    pub fn new(
        model: M,
        mut optimizer: ModuleOptimizer,
        Mesh { all, data, pipeline, tensor }: &Mesh,
        (saved, name): (Option<&Saved>, &str),
    ) -> Result<Self> {
        let (stage, stages) = (pipeline.rank().index(), pipeline.world_size().count());
        let (layers, heads) = (model.layers(), model.heads());
        ensure!(
            layers >= stages && heads.is_multiple_of(tensor.ranks()),
            "--parts {}: a model of {layers} layers of {heads} heads is divided among at most {layers} stages, or among \
             ranks that have as many heads each",
            stages.max(tensor.ranks())
        );
        ensure!(
            tensor.ranks() == 1 || !model.has_dropout(),
            "--strategy tensor: ranks would not drop alike what all of them have; take --dropout 0"
        );
        let model = if tensor.ranks() == 1 { model } else { model.divided(tensor)? };
        let mut part = model.stage(stage, stages);
        let shared = part.tied().filter(|_| stages > 1).cloned();
        let (group, shared) = TiedParameter::new(shared, pipeline)?;
        let tied = shared.map(|shared| {
            let id = shared.id;
            part.tied().into_iter().for_each(|tied| *tied = shared.clone());
            (group, id)
        });
        let mut ddp = with_views(vec![part], data)?;
        let first = model::layers_of(layers, stage, stages).start;
        // Behind the place in the list of one stage.
        let names = StateNames::new(|path| {
            model::whole_path(path.split_once('.').map_or(path, |(_, path)| path), first)
        });
        let state = ShardedState::new(&ddp, all, Some(tensor), &names.tied(model::TIED))?;
        if let Some(saved) = saved {
            state.load(&mut ddp, &mut optimizer, saved, name)?;
        }
        Ok(Self { ddp, optimizer, state, pipeline: pipeline.clone(), tensor: tensor.clone(), tied })
    }

    /// As [`Engine::step`](crate::strategy::Engine::step), with this replica's texts.
    ///
    /// # Errors
    /// As there.
    pub fn step(&mut self, batch: &Batch, (rate, max_norm): (f64, f64)) -> Result<Stepped> {
        let Self { ddp, optimizer, pipeline, tensor, tied, .. } = self;
        let count = ddp.sum(batch.count)?;
        let wanted = if pipeline.world_size().count() > 1 { MICROBATCHES } else { 1 };
        let batches = micro_batches(batch, wanted);
        // The mean over micro-batches and replicas is then that over all predictions.
        let scale = (batches.len() * ddp.world_size().count()) as f64 / count;
        let weighed: Vec<Weighed> = batches.into_iter().map(|batch| (batch, scale)).collect();
        // Batches are as long as their longest text, and a pipeline is for one shape.
        let schedule = Schedule::OneForwardOneBackward;
        let done = Pipeline::new(pipeline, schedule, weighed.len())?.train(ddp, &weighed)?;
        let mut gradients = done.gradients;
        let mut copies = Vec::new();
        if let Some((group, id)) = tied {
            let mut part = ddp.model()[0].clone();
            group.sum(part.tied().context("a stage has lost what it shares")?, &mut gradients)?;
            copies.push((&*group, *id));
        }
        let model = ddp.model();
        let norm = clip_grad_norm(model, &mut gradients, max_norm, Some(tensor), Some(pipeline), &copies)?;
        // Before the step, which would make the model NaN.
        let norm = finite(norm)?;
        ddp.step(optimizer, rate, gradients)?;
        Ok(Stepped { loss: done.loss, count, norm })
    }

    /// The whole model, on every rank. `fresh` has its sizes. All ranks call it together.
    ///
    /// # Errors
    /// If an exchange fails.
    pub fn whole(&self, fresh: M) -> Result<M> {
        let Self { ddp, pipeline, tensor, .. } = self;
        let own = tensor.gather_module(ddp.model()[0].clone())?;
        let stages = pipeline.world_size();
        let parts = stages.ranks().map(|rank| {
            let is_own = rank == pipeline.rank();
            let part = if is_own { own.clone() } else { fresh.clone().stage(rank.index(), stages.count()) };
            let mut from = FromRank { group: pipeline, rank, outcome: Ok(()) };
            let part = part.map(&mut from);
            from.outcome.map(|()| part)
        });
        Ok(M::joined(parts.collect::<phalanx::Result<_>>()?))
    }

    /// This rank's replicas of the same part, its optimizer, and where both are saved.
    pub fn parts(&self) -> (&Ddp<Vec<M>>, &ModuleOptimizer, &ShardedState) {
        (&self.ddp, &self.optimizer, &self.state)
    }
}

/// Gives every rank a rank's parameters.
struct FromRank<'a> {
    group: &'a ProcessGroup,
    rank: Rank,
    outcome: phalanx::Result<()>,
}

impl ModuleMapper for FromRank<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.outcome.is_err() {
            return param;
        }
        match param.val().detach().broadcast(self.group, self.rank) {
            Ok(value) => param.map(|old| value.set_require_grad(old.is_require_grad())),
            Err(error) => {
                self.outcome = Err(error);
                param
            }
        }
    }
}

/// At most `wanted` parts of a batch, with as many texts each, and something to predict in each.
pub fn micro_batches(batch: &Batch, wanted: usize) -> Vec<Batch> {
    let [rows, length] = batch.inputs.tokens.dims();
    let places: Option<Vec<i64>> = batch.places.as_ref().map(|places| places.to_data().iter().collect());
    // The predictions of some texts; places are in the order of texts.
    let predictions = |texts: &Range<usize>| match &places {
        Some(places) => {
            let before = |text: usize| places.partition_point(|&place| place < (text * length) as i64);
            before(texts.start)..before(texts.end)
        }
        None => texts.clone(),
    };
    let cut = |count: usize| -> Vec<(Range<usize>, Range<usize>)> {
        let each = rows / count;
        let texts = (0..count).map(|part| part * each..(part + 1) * each);
        texts.map(|texts| (texts.clone(), predictions(&texts))).collect()
    };
    let fits = |parts: &Vec<(Range<usize>, Range<usize>)>| parts.iter().all(|(_, found)| !found.is_empty());
    let counts = (2..=wanted).rev().filter(|count| rows.is_multiple_of(*count));
    let Some(parts) = counts.map(cut).find(fits) else { return vec![batch.clone()] };
    let part = |(texts, found): (Range<usize>, Range<usize>)| Batch {
        places: batch.places.as_ref().map(|places: &Tensor<1, Int>| {
            places.clone().slice([found.clone()]) - (texts.start * length) as i64
        }),
        targets: batch.targets.clone().slice([found.clone()]),
        count: found.len(),
        inputs: batch.inputs.part(texts),
    };
    parts.into_iter().map(part).collect()
}

/// What a stage passes on, or the loss, weighed.
fn output(
    passed: Passed,
    (batch, scale): &Weighed,
    loss: impl FnOnce(Tensor<2>, Tensor<1, Int>) -> Tensor<1>,
) -> StageOutput<3> {
    match passed {
        Passed::Hidden(hidden) => StageOutput::Hidden(hidden),
        Passed::Logits(logits) => StageOutput::Loss(loss(logits, batch.targets.clone()) * *scale),
    }
}

impl Stage<3> for Classifier {
    type Batch = Weighed;

    fn forward(&self, input: Option<Tensor<3>>, weighed: &Weighed) -> StageOutput<3> {
        output(self.pass(input, &weighed.0.inputs), weighed, loss_sum)
    }
}

impl Stage<3> for MaskedLm {
    type Batch = Weighed;

    fn forward(&self, input: Option<Tensor<3>>, weighed: &Weighed) -> StageOutput<3> {
        let (batch, _) = weighed;
        let passed = self.pass(input, &batch.inputs, batch.places());
        output(passed, weighed, |scores, targets| match self.vocabulary() {
            // Of a divided vocabulary each rank has the scores of its tokens.
            Some(vocabulary) => vocabulary.cross_entropy(scores, targets, None) * batch.count as f64,
            None => loss_sum(scores, targets),
        })
    }
}
