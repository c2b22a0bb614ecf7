//! The training loop, the same for both tasks.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use burn::module::{Module, ParamGroup};
use burn::optim::ModuleOptimizer;
use burn::tensor::Device;
use phalanx::checkpoint::Checkpoints;
use phalanx::{Error, ProcessGroup, ReduceOp};
use phalanx_burn::FusedAdamWConfig;
use phalanx_data::Position;
use phalanx_tracking::{Console, Run, RunOptions, Traffic};
use serde::{Deserialize, Serialize};

use crate::labels;
use crate::loading::{Loader, Loading};
use crate::mesh::Mesh;
use crate::schedule::{linear_with_warmup, seed_of};
use crate::strategy::{Devices, Engine, Stepped, Strategy};
use crate::tasks::{Batch, Evaluation, FILES, Part, Task, loss_sum};

/// How to train.
#[derive(Clone, Debug, Serialize, clap::Args)]
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
    /// Folder for the record, checkpoints and the best model; a run goes on from what is there
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
}

/// The name of a [`Progress`] in checkpoints.
const PROGRESS: &str = "progress";
/// Steps between looks at what each rank uses of its machine.
const SYSTEM_EVERY: u64 = 20;

/// The place in the training, saved in checkpoints with the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Progress {
    /// How far the loader has come.
    data: Position,
    /// Steps of the optimizer.
    steps: u64,
    /// Of what the epoch has behind it, the sum of the losses and the number of predictions.
    loss: f64,
    count: f64,
    epochs: Vec<Epoch>,
    best: Option<Evaluation>,
    /// Epochs since the best.
    waited: u64,
    /// Which texts a step takes, and how many steps there are, depends on these.
    distribution: Distribution,
    /// The names of the answers, in the order of the model's scores.
    labels: Vec<String>,
}

/// Devices, batch size, batches of a step, seed and examples.
type Distribution = (Devices, usize, usize, u64, usize);

/// Whether a run with the distribution `here` takes the same texts in each step as one with that of `there`, and can read
/// its checkpoints.
fn goes_on(here: Distribution, there: Distribution) -> bool {
    let texts = |(devices, batch_size, accumulate, seed, examples): Distribution| {
        (devices.count as usize * batch_size * accumulate, seed, examples)
    };
    texts(here) == texts(there) && here.0.go_on_from(there.0)
}

/// Trains `model` on `devices` with all ranks of `group`, and gives all epochs, those before a restart included. The folder `options.out` gets
/// the record of the run; in `best`, the best model, for `transformers` and for this example; and checkpoints. `console` shows
/// how far it is.
///
/// All ranks have the same `task`, `model` and `options`.
///
/// # Errors
/// On every rank, with its cause: if an option makes no sense; a batch cannot be made; a gradient is not finite; the folder cannot
/// be written or belongs to another run; a rank fails. The checkpoints and the best model that were there stay.
pub fn fit<T: Task>(
    task: &Arc<T>,
    model: T::Model,
    (devices, group): (Devices, &ProcessGroup),
    options: &TrainOptions,
    console: &Console,
) -> Result<Vec<Epoch>> {
    Training::start(task, model, (devices, group), options, console).and_then(Training::run).inspect_err(
        |error| {
            // The other ranks would wait for this one, and never hear why it has ended.
            group.abort_all(Error::other(format!("{error:#}")));
        },
    )
}

/// What all steps have in common.
struct Training<'a, T: Task> {
    task: &'a Arc<T>,
    group: &'a ProcessGroup,
    options: &'a TrainOptions,
    console: &'a Console,
    loading: Loading,
    loader: Loader<T>,
    mesh: Mesh,
    engine: Engine<T::Model>,
    progress: Progress,
    checkpoints: Checkpoints,
    record: Run,
    /// How many steps there are.
    total: u64,
}

impl<'a, T: Task> Training<'a, T> {
    fn start(
        task: &'a Arc<T>,
        model: T::Model,
        (devices, group): (Devices, &'a ProcessGroup),
        options: &'a TrainOptions,
        console: &'a Console,
    ) -> Result<Self> {
        let examples = task.examples(Part::Train);
        options.check(devices)?;
        let mesh = Mesh::new(devices, group)?;
        ensure!(
            examples > 0 && task.examples(Part::HeldOut) > 0,
            "there must be examples to learn from, and others to measure on"
        );
        let batch_size = options.batch_size * devices.batches();
        let loading = Loading { batch_size, num_workers: options.num_workers };
        let loader = loading.training(task, &mesh.data, options.seed, &Device::flex().autodiff())?;
        loader.check_ranks(&mesh.data)?;
        check_examples(&**task, group)?;
        let total = loader.len().div_ceil(options.accumulate) as u64 * options.epochs;

        let distribution = (devices, options.batch_size, options.accumulate, options.seed, examples);
        let checkpoints = Checkpoints::open(options.out.join("checkpoints"), group)?.keep(2);
        let saved = checkpoints.newest()?;
        let mut progress = match &saved {
            Some(saved) => saved.value(PROGRESS).with_context(|| {
                format!(
                    "the checkpoint in {} cannot be read; those of earlier versions of this program do not hold all that is needed: start \
                     the run with another --out",
                    options.out.display()
                )
            })?,
            None => Progress::new(loader.position(), distribution, task.labels()),
        };
        ensure!(
            progress.labels == task.labels(),
            "the checkpoint in {} is of a model with the labels {}, in this order, and this run has {}: start it with the same labels, or \
             with another --out",
            options.out.display(),
            labels::list(&progress.labels),
            labels::list(task.labels())
        );
        let there = std::mem::replace(&mut progress.distribution, distribution);
        ensure!(
            goes_on(distribution, there),
            "the checkpoint in {} is of (devices, batch size, accumulate, seed, examples) {there:?}, this run has {distribution:?}: start \
             it with as many texts in a step, the same seed and examples, and --strategy zero only if it was zero, or with another --out",
            options.out.display()
        );
        loader.resume(&progress.data)?;
        let engine = Engine::new(model, options.optimizer()?, (devices, &mesh), saved.as_ref(), None)?;

        let mut record =
            RunOptions::new(&options.out).tensorboard().json_lines().progress(console, Some(total));
        if saved.is_some() {
            record = record.resume_at(progress.steps + 1);
        }
        let record = Run::start(group, record)?;
        match saved {
            Some(_) => say(&record, console, &format!("goes on after {} of {total} steps", progress.steps)),
            None => {
                record.log_hyperparameters(&serde_json::json!({ "train": options, "devices": devices }))?
            }
        }
        Ok(Self {
            task,
            group,
            options,
            console,
            loading,
            loader,
            mesh,
            engine,
            progress,
            checkpoints,
            record,
            total,
        })
    }

    fn run(mut self) -> Result<Vec<Epoch>> {
        match self.epochs() {
            Ok(()) => {
                self.record.finish()?;
                Ok(self.progress.epochs)
            }
            Err(error) => match self.record.fail(format!("{error:#}")) {
                Ok(_) => Err(error),
                Err(unwritten) => Err(error.context(unwritten)),
            },
        }
    }

    fn epochs(&mut self) -> Result<()> {
        while self.loader.epoch() < self.options.epochs && !self.options.is_over(&self.progress) {
            let epoch = self.loader.epoch();
            let mut batches = self.loader.iter();
            while batches.len() > 0 {
                // No more than there are: what asks for a batch behind the last one ends the epoch.
                let some = self.options.accumulate.min(batches.len());
                let step: Vec<Batch> = batches.by_ref().take(some).collect::<Result<_, _>>()?;
                self.step(step)?;
                // The end of an epoch has one of its own, behind the evaluation.
                if self.progress.steps.is_multiple_of(self.options.save_every) && batches.len() > 0 {
                    self.checkpoint()?;
                }
            }
            drop(batches);
            self.loader.set_epoch(epoch + 1);
            self.end_epoch(epoch + 1)?;
        }
        self.checkpoints.finish()?;
        self.engine.check_replicas()
    }

    /// One step of the optimizer with the gradients of these batches, and of as many on each of the other ranks.
    fn step(&mut self, batches: Vec<Batch>) -> Result<()> {
        let Self { task, mesh, options, engine, progress, record, .. } = self;
        options.seed_step(progress.steps, &mesh.all);
        let rate = options.rate(progress.steps, self.total);
        let Stepped { loss, count, norm } = engine.step(&***task, batches, (rate, options.max_norm))?;

        progress.steps += 1;
        let loss = record.log_mean(progress.steps, "train/loss", loss)?;
        record.log(progress.steps, "train/learning_rate", rate);
        record.log(progress.steps, "train/gradient_norm", norm);
        if progress.steps.is_multiple_of(SYSTEM_EVERY) {
            let bytes_sent = Some(engine.bytes_moved());
            record.log_system(progress.steps, Traffic { bytes_sent, hidden: None })?;
        }
        progress.data = self.loader.position();
        progress.loss += loss * count;
        progress.count += count;
        Ok(())
    }

    /// Looks at the held-out examples, and keeps the model if it is the best.
    fn end_epoch(&mut self, epoch: u64) -> Result<()> {
        let Self { task, group, options, console, loading, engine, progress, record, .. } = self;
        let model = engine.model(&***task)?;
        let held_out = evaluate(task, &model, group, *loading)?;
        let best = match &progress.best {
            Some(best) => task.is_better(&held_out, best),
            None => !held_out.loss.is_nan(),
        };
        if best && group.rank().is_main() {
            save_best(task, &model, &options.out)?;
        }
        let steps = progress.steps;
        progress.data = self.loader.position();
        let epoch = progress.end_epoch(epoch, held_out, best);
        for (name, value) in task.measures(&held_out) {
            record.log(steps, &format!("held_out/{name}"), value);
        }
        record.log(steps, "train/epoch_loss", epoch.train_loss);
        let measures = task.measures(&held_out).into_iter().map(|(name, value)| format!("{name} {value:.4}"));
        let measures: Vec<String> = measures.collect();
        let Epoch { epoch, train_loss, .. } = epoch;
        say(
            record,
            console,
            &format!("epoch {epoch}: loss {train_loss:.4}, held out: {}", measures.join(", ")),
        );
        self.checkpoint()
    }

    fn checkpoint(&mut self) -> Result<()> {
        // A run that is killed from here on goes on behind this step: the record must have it.
        self.record.flush();
        self.engine.save(&self.checkpoints, self.progress.steps, (PROGRESS, &self.progress))
    }
}

/// Refuses ranks with other examples: each host may have a copy of the files. Of the held-out ones each rank takes its part by itself, and copies
/// that differ would not be noticed.
fn check_examples<T: Task>(task: &T, group: &ProcessGroup) -> Result<()> {
    let all = group.all_gather_object(&[Part::Train, Part::HeldOut].map(|part| task.fingerprint(part)))?;
    let other = all.iter().position(|one| *one != all[0]);
    ensure!(
        other.is_none(),
        "rank {} has other examples than rank 0: give all hosts the same train.jsonl and held-out.jsonl",
        other.unwrap_or_default()
    );
    Ok(())
}

/// Shows a line, on rank 0 alone.
fn say(record: &Run, console: &Console, line: &str) {
    if record.is_recording() {
        console.println(line);
    }
}

/// Replaces the best model in `out`. Until the new one is whole, on a disk that may be full, the old one stays.
fn save_best<T: Task>(task: &Arc<T>, model: &T::Model, out: &Path) -> Result<()> {
    let [best, new] = ["best", "best.new"].map(|name| out.join(name));
    let cannot = |folder: &Path| format!("{} cannot be written", folder.display());
    for folder in [&best, &new] {
        fs::create_dir_all(folder).with_context(|| cannot(folder))?;
    }
    task.save(model, &new)?;
    for name in FILES {
        let file = new.join(name);
        // Else a loss of power could leave an empty file in the place of a whole one.
        fs::File::open(&file).and_then(|file| file.sync_all()).with_context(|| cannot(&new))?;
        fs::rename(&file, best.join(name)).with_context(|| cannot(&best))?;
    }
    // With the half-written weights of a process that was killed here, if there are any.
    fs::remove_dir_all(&new).with_context(|| cannot(&new))
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
    fn check(&self, devices: Devices) -> Result<()> {
        ensure!(
            self.accumulate == 1 || devices.batches() == 1,
            "--accumulate {} with --strategy {}: gradients are accumulated on ranks; take --strategy ddp, or a larger \
             --batch-size",
            self.accumulate,
            devices.name()
        );
        ensure!(
            self.accumulate == 1 || !matches!(devices.strategy, Strategy::Tensor | Strategy::Pipeline),
            "--accumulate {} with --strategy {}: gradients of divided models are not accumulated; take a larger --batch-size",
            self.accumulate,
            devices.name()
        );
        ensure!(self.epochs > 0, "--epochs must be at least 1");
        ensure!(self.batch_size > 0, "--batch-size must be at least 1");
        ensure!(self.accumulate > 0, "--accumulate must be at least 1");
        ensure!(self.save_every > 0, "--save-every must be at least 1");
        ensure!((0.0..=1.0).contains(&self.warmup), "--warmup is {}: it must be from 0 to 1", self.warmup);
        ensure!(self.lr.is_finite() && self.lr > 0.0, "--lr is {}: it must be greater than 0", self.lr);
        ensure!(
            self.weight_decay.is_finite() && self.weight_decay >= 0.0,
            "--weight-decay is {}: it must be at least 0",
            self.weight_decay
        );
        Ok(())
    }

    /// AdamW, with weight decay for matrices alone.
    ///
    /// # Errors
    /// If the names of parameters cannot be told apart.
    pub fn optimizer(&self) -> Result<ModuleOptimizer> {
        let adamw = FusedAdamWConfig::new().with_epsilon(1e-8);
        let plain = ParamGroup::from_regex(r"(^|\.)(bias|beta|gamma)$")
            .map_err(|error| anyhow::anyhow!("{error:?}"))?;
        let decayed = adamw.clone().with_weight_decay(self.weight_decay as f32).init();
        Ok(decayed.with_group(plain, adamw.with_weight_decay(0.0).build(), None))
    }

    /// The learning rate of a step, counted from 0, of `total`.
    pub fn rate(&self, step: u64, total: u64) -> f64 {
        let warmup = (self.warmup * total as f64).ceil() as u64;
        linear_with_warmup(self.lr, warmup, total, step)
    }

    /// Seeds dropout: other numbers for each step and rank of `group`, the same after a restart.
    pub fn seed_step(&self, step: u64, group: &ProcessGroup) {
        Device::flex().autodiff().seed(seed_of(&[self.seed, step, group.rank().index() as u64]));
    }

    fn is_over(&self, progress: &Progress) -> bool {
        self.patience.is_some_and(|patience| progress.waited >= patience.max(1))
    }
}

impl Progress {
    fn new(data: Position, distribution: Distribution, labels: &[String]) -> Self {
        Self {
            data,
            steps: 0,
            loss: 0.0,
            count: 0.0,
            epochs: Vec::new(),
            best: None,
            waited: 0,
            distribution,
            labels: labels.to_vec(),
        }
    }

    fn end_epoch(&mut self, epoch: u64, held_out: Evaluation, best: bool) -> Epoch {
        let train_loss = self.loss / self.count.max(1.0);
        let epoch = Epoch { epoch, steps: self.steps, train_loss, held_out };
        self.epochs.push(epoch.clone());
        (self.loss, self.count) = (0.0, 0.0);
        self.waited += 1;
        if best {
            (self.best, self.waited) = (Some(held_out), 0);
        }
        epoch
    }
}
