//! One step of a pipeline on one rank.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::backend::Dispatch;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor, TensorData};
use phalanx::pipeline::{Action, Pass, Plan};
use phalanx::trace::{Trace, Track};
use phalanx::{Caller, Error, ProcessGroup, Result};

use super::super::mixed;
use super::super::op::{KnownGradient, ParallelOp, Source, Target};
use super::super::random::OwnNumbers;
use super::inbox::Inbox;
use super::outbox::{Outbox, ToStage};
use super::{Pipeline, PipelineStep, Stage, StageOutput, places};
use crate::{Ddp, Scalar, SyncedGradients};

/// A step that is under way.
pub(super) struct Run<'a, S: Stage<D>, const D: usize> {
    pipeline: &'a mut Pipeline<D>,
    ddp: &'a mut Ddp<Vec<S>>,
    batches: &'a [S::Batch],
    plan: Plan,
    group: ProcessGroup,
    trace: Trace,
    device: Device,
    inbox: Inbox,
    outbox: Outbox,
    /// What forward passes have left for their backward passes, by stage and micro-batch.
    held: HashMap<(usize, usize), Held>,
    /// What passes are seeded with, if they are repeated.
    seed: Option<u64>,
    loss: f64,
    busy: Duration,
}

enum Held {
    Graph(Box<Root>),
    /// To be computed again from the stage's input; the first stage has none.
    Input(Option<TensorData>),
}

/// From where backward runs.
struct Root {
    loss: Tensor<1>,
    /// Takes the gradient of the stage's output; none in the last stage.
    gradient: Option<Arc<KnownGradient>>,
}

impl<'a, S: Stage<D>, const D: usize> Run<'a, S, D> {
    pub fn new(
        pipeline: &'a mut Pipeline<D>,
        ddp: &'a mut Ddp<Vec<S>>,
        batches: &'a [S::Batch],
    ) -> Result<Self> {
        let (plan, group) = (pipeline.plan.clone(), pipeline.group.clone());
        pipeline.check(batches.len(), ddp.model().len())?;
        if group.world_size().count() > 1 {
            ddp.note_stages();
        }
        let Some(device) = ddp.model().devices().into_iter().next() else {
            return Err(Error::invalid_argument("the stages of this rank have no parameters"));
        };
        let (inbox, outbox) = (Inbox::new(&group, &plan, D, |_| true), Outbox::new(&group));
        let (trace, held) = (group.trace(), HashMap::new());
        let (seed, loss, busy) = (None, 0.0, Duration::ZERO);
        Ok(Self { pipeline, ddp, batches, plan, group, trace, device, inbox, outbox, held, seed, loss, busy })
    }

    pub fn train(mut self) -> Result<PipelineStep> {
        if self.pipeline.steps == 0 {
            places::check_replicas(self.pipeline, self.ddp.group())?;
            places::check(self.pipeline, self.ddp.parameters())?;
        }
        let start = Instant::now();
        // Once for a step: ranks may run different numbers of passes, and the program draws alike on all of them.
        let own_numbers = match self.pipeline.recomputation {
            Some(seed) => Some((seed, OwnNumbers::of(&self.device)?)),
            None => None,
        };
        // Not of the number of steps, which begins anew in a process that goes on from a checkpoint.
        self.seed = own_numbers.as_ref().map(|(seed, own)| mixed([*seed, own.drawn()]));
        let actions = self.plan.actions(self.group.rank().index()).to_vec();
        let mut gradients = None;
        for (index, action) in actions.iter().enumerate() {
            let next = actions.get(index + 1);
            match action.pass {
                Pass::Forward => self.forward(*action, next)?,
                Pass::Backward => gradients = self.backward(*action, next.is_none())?,
            }
        }
        drop(own_numbers);
        self.outbox.finish()?;
        self.pipeline.steps += 1;
        let (loss, bubble) = self.together(start.elapsed())?;
        match gradients {
            Some(gradients) => Ok(PipelineStep { gradients, loss, busy: self.busy, bubble }),
            None => Err(Error::aborted("a plan ends without a backward pass: this is a defect of phalanx")),
        }
    }

    fn forward(&mut self, action: Action, next: Option<&Action>) -> Result<()> {
        let Action { stage, microbatch, .. } = action;
        let data = match stage.checked_sub(1) {
            Some(before) => Some(self.take(action, before)?),
            None => None,
        };
        let began = Instant::now();
        // If backward follows at once, there is nothing to save.
        let follows = next.is_some_and(|next| (next.stage, next.microbatch) == (stage, microbatch));
        let again = self.pipeline.recomputation.is_some() && !follows;
        let (held, output) = match again {
            true => (Held::Input(data.clone()), self.first_pass(action, data)?),
            false => {
                let (root, hidden) = self.pass(action, data)?;
                let output = hidden.map_or_else(|| StageOutput::Loss(root.loss.clone()), StageOutput::Hidden);
                (Held::Graph(Box::new(root)), output)
            }
        };
        match output {
            StageOutput::Hidden(hidden) => {
                let (inputs, arrived) = (&mut self.pipeline.inputs, &self.inbox.arrived);
                self.outbox.pass_on(action, hidden, &self.plan, inputs, arrived)?;
            }
            StageOutput::Loss(loss) => self.loss += loss.detach().number()?,
        }
        self.held.insert((stage, microbatch), held);
        self.worked("forward", action, began);
        Ok(())
    }

    /// Gives the gradients if this is the `last` backward pass of the step.
    fn backward(&mut self, action: Action, last: bool) -> Result<Option<SyncedGradients>> {
        let Action { stage, microbatch, .. } = action;
        let gradient = match stage + 1 < self.plan.stages() {
            true => Some(self.take(action, stage + 1)?),
            false => None,
        };
        let began = Instant::now();
        let root = match self.held.remove(&(stage, microbatch)) {
            Some(Held::Graph(root)) => *root,
            Some(Held::Input(data)) => self.repeated(action, data)?,
            None => {
                return Err(Error::aborted(format!(
                    "{action:?} has no forward pass: this is a defect of phalanx"
                )));
            }
        };
        if let (Some(slot), Some(gradient)) = (&root.gradient, gradient) {
            slot.set(gradient);
        }
        let gradients = match last {
            true => Some(self.ddp.backward(&root.loss)?),
            false => {
                self.ddp.backward_no_sync(&root.loss)?;
                None
            }
        };
        self.outbox.check(stage, microbatch)?;
        self.worked("backward", action, began);
        Ok(gradients)
    }

    /// Lets a pass draw the same when it is repeated.
    fn seed_device(&self, Action { stage, microbatch, .. }: Action) {
        if let Some(seed) = self.seed {
            self.device.seed(mixed([seed, stage as u64, microbatch as u64]));
        }
    }

    /// The forward pass of a stage that will be repeated. It has no graph: Burn would keep that, with all activations, until the next backward pass
    /// of the stage, although nobody has it any more.
    fn first_pass(&mut self, action: Action, data: Option<TensorData>) -> Result<StageOutput<D>> {
        let Action { stage, microbatch, .. } = action;
        self.seed_device(action);
        let input = data.map(|data| {
            let dtype = data.dtype();
            Tensor::<D>::from_data(data, (&self.device, dtype))
        });
        let (place, batch) = (stage / self.plan.ranks(), &self.batches[microbatch]);
        let output = self.ddp.forward_with(|stages, _, _| {
            Module::map(stages[place].clone(), &mut WithoutGraph).forward(input, batch)
        })?;
        Ok(match output.checked(stage, self.plan.stages())? {
            StageOutput::Loss(loss) => StageOutput::Loss(loss / self.plan.microbatches() as f64),
            hidden @ StageOutput::Hidden(_) => hidden,
        })
    }

    /// The forward pass of a stage, also if it is repeated: from where backward runs, and what the next stage takes.
    fn pass(&mut self, action: Action, data: Option<TensorData>) -> Result<(Root, Option<Tensor<D>>)> {
        let Action { stage, microbatch, .. } = action;
        self.seed_device(action);
        let input = data.map(|data| self.input(stage, microbatch, data));
        let (place, batch) = (stage / self.plan.ranks(), &self.batches[microbatch]);
        let output = self.ddp.forward(|stages| stages[place].forward(input, batch))?;
        Ok(match output.checked(stage, self.plan.stages())? {
            StageOutput::Loss(loss) => {
                (Root { loss: loss / self.plan.microbatches() as f64, gradient: None }, None)
            }
            StageOutput::Hidden(hidden) if !hidden.is_tracked() => {
                // An exchange within the stage that fails may give a result without a graph.
                return Err(self.group.failure().unwrap_or_else(|| {
                    Error::invalid_argument(format!(
                        "stage {stage} computes its output with nothing that is trained, and so has no backward pass"
                    ))
                    .with_remedy("give the first stage a layer that is trained, and let every other stage compute with its input")
                }));
            }
            StageOutput::Hidden(hidden) => {
                let slot = Arc::new(KnownGradient::default());
                let root = Dispatch::rooted(hidden.clone().into_dispatch(), Source(slot.clone()));
                (Root { loss: Tensor::from_dispatch(root), gradient: Some(slot) }, Some(hidden))
            }
        })
    }

    /// The forward pass of a stage that is repeated for its backward pass: an error if its output has another
    /// shape than the first time. The gradient is that of the first output.
    fn repeated(&mut self, action: Action, data: Option<TensorData>) -> Result<Root> {
        let Action { stage, microbatch, .. } = action;
        let (root, hidden) = self.pass(action, data)?;
        let first = self.pipeline.inputs.get(stage + 1).and_then(Option::as_ref);
        match hidden.zip(first) {
            Some((hidden, first)) if hidden.dims().as_slice() != first.shape.as_slice() => {
                Err(Error::invalid_argument(format!(
                    "stage {stage} gave an output of shape {:?} for micro-batch {microbatch}, and when it was repeated for the backward pass, one of {:?}",
                    first.shape,
                    hidden.dims()
                ))
                .with_remedy("let the stage compute the same from its input and its micro-batch each time"))
            }
            Some(_) | None => Ok(root),
        }
    }

    /// A stage's input, whose gradient goes to the stage before.
    fn input(&self, stage: usize, microbatch: usize, data: TensorData) -> Tensor<D> {
        let needed_by = Action { pass: Pass::Backward, stage: stage.saturating_sub(1), microbatch };
        let to = self.plan.rank_of(needed_by.stage);
        let target = Target(Arc::new(ToStage {
            outbox: self.outbox.downgrade(),
            to: (to != self.group.rank().index()).then_some(to),
            needed_by,
            arrived: self.inbox.arrived.clone(),
        }));
        let dtype = data.dtype();
        let leaf = Tensor::<D>::from_data(data, (&self.device, dtype)).require_grad();
        Tensor::from_dispatch(Dispatch::delivered(leaf.into_dispatch(), target))
    }

    /// Waits for what `action` needs from the stage `of`.
    fn take(&mut self, action: Action, of: usize) -> Result<TensorData> {
        let began = Instant::now();
        let data = self.inbox.take(action, self.plan.rank_of(of), &mut self.pipeline.inputs)?;
        self.note("wait", action, began);
        Ok(data)
    }

    fn worked(&mut self, what: &'static str, action: Action, began: Instant) {
        self.busy += began.elapsed();
        self.note(what, action, began);
    }

    fn note(&self, what: &'static str, Action { stage, microbatch, .. }: Action, began: Instant) {
        let of = [("stage", stage.into()), ("microbatch", microbatch.into())];
        self.trace.complete(Track::Pipeline, what, began, Instant::now(), &of);
    }

    /// The loss of the last stage, and the share of `elapsed` in which ranks did not compute.
    fn together(&self, elapsed: Duration) -> Result<(f64, f64)> {
        let own = [self.loss, self.busy.as_secs_f64(), elapsed.as_secs_f64()];
        let mut all = vec![0.0; own.len() * self.plan.ranks()];
        self.group.in_call(Caller::PipelineTrain).all_gather(&own, &mut all)?;
        let sum = |place: usize| all.iter().skip(place).step_by(own.len()).sum::<f64>();
        let longest = all.iter().skip(2).step_by(own.len()).copied().fold(0.0, f64::max);
        Ok((sum(0), 1.0 - sum(1) / (longest * self.plan.ranks() as f64)))
    }
}

/// Takes parameters out of the graph.
struct WithoutGraph;

impl ModuleMapper for WithoutGraph {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor.set_require_grad(false))
    }
}
