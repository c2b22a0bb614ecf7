//! The training loop, the same for both tasks.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use burn::module::{Module, ParamGroup};
use burn::optim::ModuleOptimizer;
use burn::tensor::Device;
use phalanx::checkpoint::Checkpoints;
use phalanx::{ProcessGroup, ReduceOp};
use phalanx_burn::{FusedAdamWConfig, TrainState};
use phalanx_data::Position;
use serde::{Deserialize, Serialize};

use crate::loading::Loading;
use crate::schedule::{linear_with_warmup, seed_of};
use crate::tasks::{Batch, Evaluation, Part, Task, loss_sum};

/// How to train.
#[derive(Clone, Debug, clap::Args)]
pub struct TrainOptions {
    /// Passes over the examples
    #[arg(long, default_value_t = 3)]
    pub epochs: u64,
    /// Examples in a batch of one rank
    #[arg(long, default_value_t = 16)]
    pub batch_size: usize,
    /// Batches whose gradients are added up for one step
    #[arg(long, default_value_t = 1)]
    pub accumulate: usize,
    /// Threads of each rank that tokenize and pad batches ahead of the training
    #[arg(long, default_value_t = 1)]
    pub num_workers: usize,
    /// Learning rate at the end of the warm-up; it falls to zero in a straight line
    #[arg(long, default_value_t = 1e-4)]
    pub lr: f64,
    /// The share of all steps in which the learning rate grows
    #[arg(long, default_value_t = 0.1)]
    pub warmup: f64,
    /// Weight decay, which biases and layer norms do not have
    #[arg(long, default_value_t = 0.01)]
    pub weight_decay: f64,
    /// The norm to which gradients are clipped
    #[arg(long, default_value_t = 1.0)]
    pub max_norm: f64,
    /// End if the held-out examples have not got better for as many epochs
    #[arg(long)]
    pub patience: Option<u64>,
    /// Steps between checkpoints; there is one at the end of each epoch, too
    #[arg(long, default_value_t = 100)]
    pub save_every: u64,
    /// Decides the order of the examples, new weights, dropout and masks
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Folder for checkpoints, the best model and epochs.jsonl; a run goes on from what is there
    #[arg(long)]
    pub out: PathBuf,
}

/// What came of an epoch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Epoch {
    /// Its number, from 1 on.
    pub epoch: u64,
    /// Steps of the optimizer up to its end.
    pub steps: u64,
    /// The mean loss of its training batches, in nats.
    pub train_loss: f64,
    /// On held-out examples.
    pub held_out: Evaluation,
    /// e to the power of the held-out loss.
    pub perplexity: f64,
}

/// The place in the training, saved in checkpoints with the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Progress {
    /// How far the loader has come.
    data: Position,
    /// Of what the epoch has behind it, the sum of the losses and the number of predictions.
    loss: f64,
    count: f64,
    epochs: Vec<Epoch>,
    best: Option<Evaluation>,
    /// Epochs since the best.
    waited: u64,
    /// Which batches a step takes, and how many steps there are, depends on these.
    distribution: (usize, usize, u64, usize),
}

/// Trains `model` with all ranks of `group`, and gives all epochs, those before a restart included. The best model is in the folder
/// `best`, for `transformers` and for this example.
///
/// All ranks have the same `task`, `model` and `options`.
///
/// # Errors
/// If an option makes no sense; a batch cannot be made; a gradient is not finite; the folder cannot be written or belongs to
/// another run; a rank fails.
pub fn fit<T: Task>(
    task: &Arc<T>,
    model: T::Model,
    group: &ProcessGroup,
    options: &TrainOptions,
) -> Result<Vec<Epoch>> {
    let device = Device::flex().autodiff();
    let (rank, world) = (group.rank(), group.world_size().count());
    let examples = task.examples(Part::Train);
    options.check()?;
    ensure!(
        examples > 0 && task.examples(Part::HeldOut) > 0,
        "there must be examples to learn from, and others to measure on"
    );
    let loading = Loading { batch_size: options.batch_size, num_workers: options.num_workers };
    let loader = loading.training(task, group, options.seed, &device)?;

    let total = loader.len().div_ceil(options.accumulate) as u64 * options.epochs;
    let warmup = (options.warmup * total as f64).ceil() as u64;
    let distribution = (world, options.batch_size, options.seed, examples);

    let progress = Progress::new(loader.position(), distribution);
    let mut state = TrainState::new(model, optimizer(options)?, progress)?.with_group(group)?;
    let checkpoints = Checkpoints::open(options.out.join("checkpoints"), group)?.keep(2);
    let resumed = state.resume(&checkpoints)?;
    let there = state.progress.distribution;
    ensure!(
        there == distribution,
        "the checkpoint in {} is of (ranks, batch size, seed, examples) {there:?}, this run has {distribution:?}: \
         start it with the same, or with another --out",
        options.out.display()
    );
    loader.resume(&state.progress.data)?;
    let mut console = Console::new(group, T::EXAMPLES);
    if resumed {
        console.say(&format!("goes on after {} of {total} steps", state.steps()));
    }

    while loader.epoch() < options.epochs && !options.is_over(&state.progress) {
        let epoch = loader.epoch();
        let mut batches = loader.iter();
        while batches.len() > 0 {
            // No more than there are: what asks for a batch behind the last one ends the epoch.
            let some = options.accumulate.min(batches.len());
            let step: Vec<Batch> = batches.by_ref().take(some).collect::<Result<_, _>>()?;
            let Some((last, held)) = step.split_last() else { break };
            // Dropout: other numbers for each step and rank, the same after a restart.
            device.seed(seed_of(&[options.seed, state.steps(), rank.index() as u64]));
            // The mean over the predictions of all ranks, which may have unequal numbers of them.
            let count = state.model.sum(step.iter().map(|batch| batch.count).sum::<usize>())?;
            let scale = world as f64 / count;
            let loss_of = |model: &T::Model, batch: &Batch| {
                loss_sum(task.logits(model, batch), batch.targets.clone()) * scale
            };
            let mut loss = 0.0;
            for batch in held {
                let part = state.model.forward(|model| loss_of(model, batch))?;
                state.model.backward_no_sync(&part)?;
                loss += part.into_scalar::<f64>();
            }
            let part = state.model.forward(|model| loss_of(model, last))?;
            let mut gradients = state.model.backward(&part)?;
            loss = state.model.mean(loss + part.into_scalar::<f64>())?;

            let norm = state.model.clip_grad_norm(&mut gradients, options.max_norm)?;
            ensure!(
                norm.is_finite(),
                "the gradient of step {} is not finite: try a smaller --lr",
                state.steps() + 1
            );
            let rate = linear_with_warmup(options.lr, warmup, total, state.steps());
            state.step(rate, gradients)?;

            state.progress.data = loader.position();
            state.progress.loss += loss * count;
            state.progress.count += count;
            console.step(epoch + 1, state.steps(), total, loss, step.len() * options.batch_size * world);
            // The end of an epoch has one of its own, behind the evaluation.
            if state.steps().is_multiple_of(options.save_every) && batches.len() > 0 {
                state.checkpoint(&checkpoints)?;
            }
        }

        loader.set_epoch(epoch + 1);
        state.progress.data = loader.position();
        let held_out = evaluate(task, state.model.model(), group, loading)?;
        let best = state.progress.best.is_none_or(|best| task.is_better(&held_out, &best));
        if best && rank.is_main() {
            let folder = options.out.join("best");
            fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
            task.save(state.model.model(), &folder)?;
        }
        let steps = state.steps();
        state.progress.end_epoch(epoch + 1, steps, held_out, best);
        if let Some(last) = state.progress.epochs.last() {
            console.epoch(last);
        }
        if rank.is_main() {
            write_epochs(&state.progress.epochs, &options.out)?;
        }
        state.checkpoint(&checkpoints)?;
    }
    checkpoints.finish()?;
    ensure!(state.model.replicas_identical()?, "the replicas differ");
    Ok(state.progress.epochs)
}

/// Looks at each held-out example once: ranks have unequal numbers of them rather than repeated ones. Every rank gets the result.
pub fn evaluate<T: Task>(
    task: &Arc<T>,
    model: &T::Model,
    group: &ProcessGroup,
    loading: Loading,
) -> Result<Evaluation> {
    let model = model.valid();
    let mut sums = [0.0_f64; 3];
    for batch in &loading.held_out(task, group, &Device::flex())? {
        let batch = batch?;
        let logits = task.logits(&model, &batch);
        let answers = logits.clone().argmax(1).squeeze_dim::<1>(1);
        sums[0] += answers.equal(batch.targets.clone()).int().sum().into_scalar::<i64>() as f64;
        sums[1] += loss_sum(logits, batch.targets).into_scalar::<f64>();
        sums[2] += batch.count as f64;
    }
    group.all_reduce(&mut sums, ReduceOp::Sum)?;
    let [right, loss, count] = sums;
    Ok(Evaluation { loss: loss / count, accuracy: right / count })
}

impl TrainOptions {
    fn check(&self) -> Result<()> {
        ensure!(self.batch_size > 0, "--batch-size must be at least 1");
        ensure!(self.accumulate > 0, "--accumulate must be at least 1");
        ensure!(self.save_every > 0, "--save-every must be at least 1");
        ensure!((0.0..=1.0).contains(&self.warmup), "--warmup is {}: it must be from 0 to 1", self.warmup);
        ensure!(self.lr.is_finite() && self.lr > 0.0, "--lr is {}: it must be greater than 0", self.lr);
        Ok(())
    }

    fn is_over(&self, progress: &Progress) -> bool {
        self.patience.is_some_and(|patience| progress.waited >= patience.max(1))
    }
}

impl Progress {
    fn new(data: Position, distribution: (usize, usize, u64, usize)) -> Self {
        Self { data, loss: 0.0, count: 0.0, epochs: Vec::new(), best: None, waited: 0, distribution }
    }

    fn end_epoch(&mut self, epoch: u64, steps: u64, held_out: Evaluation, best: bool) {
        let train_loss = self.loss / self.count.max(1.0);
        let perplexity = held_out.loss.exp();
        self.epochs.push(Epoch { epoch, steps, train_loss, held_out, perplexity });
        (self.loss, self.count) = (0.0, 0.0);
        self.waited += 1;
        if best {
            (self.best, self.waited) = (Some(held_out), 0);
        }
    }
}

/// AdamW, with weight decay for matrices alone.
fn optimizer(options: &TrainOptions) -> Result<ModuleOptimizer> {
    let adamw = FusedAdamWConfig::new().with_epsilon(1e-8);
    let plain =
        ParamGroup::from_regex(r"(^|\.)(bias|beta|gamma)$").map_err(|error| anyhow::anyhow!("{error:?}"))?;
    let decayed = adamw.clone().with_weight_decay(options.weight_decay as f32).init();
    Ok(decayed.with_group(plain, adamw.with_weight_decay(0.0).build(), None))
}

/// All epochs, a line for each: whatever was there is replaced, so that a run that goes on repeats none.
fn write_epochs(epochs: &[Epoch], folder: &Path) -> Result<()> {
    let lines =
        epochs.iter().map(|epoch| Ok(serde_json::to_string(epoch)? + "\n")).collect::<Result<String>>()?;
    let (path, new) = (folder.join("epochs.jsonl"), folder.join("epochs.jsonl.new"));
    fs::write(&new, lines)
        .and_then(|()| fs::rename(&new, &path))
        .with_context(|| format!("{} cannot be written", path.display()))
}

/// What a person sees. Rank 0 alone shows anything.
struct Console {
    shown: bool,
    unit: &'static str,
    examples: usize,
    since: Instant,
    last_line: Instant,
}

impl Console {
    fn new(group: &ProcessGroup, unit: &'static str) -> Self {
        let now = Instant::now();
        Self { shown: group.rank().is_main(), unit, examples: 0, since: now, last_line: now }
    }

    fn step(&mut self, epoch: u64, step: u64, total: u64, loss: f64, examples: usize) {
        self.examples += examples;
        if self.last_line.elapsed() > Duration::from_secs(5) {
            self.last_line = Instant::now();
            let rate = self.examples as f64 / self.since.elapsed().as_secs_f64();
            self.say(&format!(
                "epoch {epoch}  step {step} of {total}  loss {loss:.4}  {rate:.1} {}/s",
                self.unit
            ));
        }
    }

    fn epoch(&mut self, epoch: &Epoch) {
        let Epoch { epoch, train_loss, held_out, perplexity, .. } = epoch;
        let Evaluation { loss, accuracy } = held_out;
        if self.shown {
            println!(
                "epoch {epoch}: loss {train_loss:.4}, held out: loss {loss:.4}, perplexity {perplexity:.2}, accuracy {:.2} %",
                100.0 * accuracy
            );
        }
    }

    fn say(&self, line: &str) {
        if self.shown {
            eprintln!("{line}");
        }
    }
}
