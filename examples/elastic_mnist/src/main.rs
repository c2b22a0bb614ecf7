//! A network learns to read digits, and continues when workers die.
//!
//! ```sh
//! cargo build --release -p elastic_mnist
//! phalanx run --nproc-per-node 4 --min-np 2 --max-restarts 10 -- target/release/elastic_mnist --epochs 30
//! ```
//!
//! Kill a worker while it runs (`kill -9` and one of the process numbers that it shows). The other processes continue, and repeat the
//! interrupted step. A new worker joins at the next commit. With `--checkpoints FOLDER` the job continues from the newest checkpoint when
//! it is started again. Alone (`cargo run --release -p elastic_mnist`) it is a world of one.
//!
//! `cargo run --release -p elastic_mnist -- soak --minutes 30` makes faults by itself for half an hour, and
//! checks that models, memory and processes are as they must be.

mod soak;

use std::path::PathBuf;

use anyhow::Result;
use burn::optim::AdamWConfig;
use burn::tensor::Device;
use clap::builder::RangedU64ValueParser;
use clap::{Args, Parser, Subcommand};
use phalanx::checkpoint::Checkpoints;
use phalanx::elastic::{self, Context};
use phalanx::sampler::{ElasticSampler, Tail};
use phalanx::{ProcessGroup, ReduceOp};
use phalanx_burn::TrainState;
use serde::{Deserialize, Serialize};

use digits::Digits;
use digits::Network;

/// Trains a small convolutional network on handwritten digits, in an elastic job.
#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Command {
    #[command(subcommand)]
    soak: Option<Soak>,
    #[command(flatten)]
    options: Options,
}

#[derive(Subcommand)]
enum Soak {
    /// Starts an elastic job, makes faults, and checks what must hold
    Soak(soak::Options),
}

#[derive(Args)]
struct Options {
    /// Passes over the training images
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: u64,
    /// Images in a step of one rank
    #[arg(long, default_value_t = 64, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    batch_size: usize,
    /// Learning rate of the first step; it falls to zero in a straight line
    #[arg(long, default_value_t = 0.01)]
    lr: f64,
    /// Steps between commits: a failure that cuts off more than a step's averages costs as many at most
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    commit_every: u64,
    /// Folder of checkpoints, written after each epoch: the job goes on from the newest when it is started again
    #[arg(long)]
    checkpoints: Option<PathBuf>,
    /// Decides the order of the images and the first weights
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Folder with the digits, as gzip-compressed IDX files
    #[arg(long, default_value = digits::FOLDER)]
    data: PathBuf,
}

/// All that the next step depends on, and that a worker who comes later is given.
type Training = TrainState<Network, Progress>;

/// What there is of it besides the model and the optimizer.
#[derive(Clone, Serialize, Deserialize)]
struct Progress {
    sampler: ElasticSampler,
    step: u64,
}

/// What does not change.
struct Job {
    options: Options,
    digits: Digits,
    unseen: Digits,
    device: Device,
}

impl Job {
    fn new(options: Options) -> Result<Self> {
        let (digits, unseen) = (Digits::read(&options.data, "train")?, Digits::read(&options.data, "t10k")?);
        Ok(Self { options, digits, unseen, device: Device::flex().autodiff() })
    }

    fn training(&self) -> phalanx::Result<Training> {
        self.device.seed(self.options.seed);
        // Ranks have equal batches, also at the end of an epoch: an average over ranks is one over samples.
        let sampler = ElasticSampler::new(self.digits.len()).seed(self.options.seed).tail(Tail::Repeat);
        let (network, optimizer) = (Network::new(&self.device), AdamWConfig::new().init());
        TrainState::new(network, optimizer, Progress { sampler, step: 0 })
    }

    /// Takes the next step. Returns whether the workers have changed in it; None at the end of an epoch.
    fn step(&self, context: &mut Context<'_, Training>) -> phalanx::Result<Option<bool>> {
        let Options { batch_size, epochs, lr, .. } = self.options;
        // Not those of the group: behind a step that was cut off they change on all ranks together.
        let (rank, world) = (context.rank(), context.world_size());
        let Training { model, progress, .. } = &mut *context.state;
        let sampler = &mut progress.sampler;
        // The soak trains anew after so many epochs.
        let epoch = sampler.epoch() % epochs;
        let done = (epoch as f64 + sampler.consumed() as f64 / self.digits.len() as f64) / epochs as f64;
        let Some(indices) = sampler.next_batch(batch_size, rank, world) else { return Ok(None) };
        let batch = self.digits.batch(&indices, &self.device);
        let loss = model.forward(|network| network.loss(batch))?;
        // If a worker dies meanwhile, the others average again, without its images: those come once more.
        let averaged = TrainState::backward(context, &loss)?;
        let training = &mut *context.state;
        training.progress.sampler.put_back(&averaged.missing);
        training.step(lr * (1.0 - done), averaged.value)?;
        training.progress.step += 1;
        Ok(Some(averaged.changed))
    }

    /// The share of the unseen digits that are recognised; each rank looks at a part of them.
    fn evaluate(&self, context: &mut Context<'_, Training>) -> phalanx::Result<f64> {
        let (group, device) = (context.group().clone(), Device::flex());
        let (rank, world) = (group.rank().index(), group.world_size().count());
        let mine: Vec<usize> = (rank..self.unseen.len()).step_by(world).collect();
        let correct = context.state.model.evaluate(|network| {
            let batches = mine.chunks(250).map(|indices| self.unseen.batch(indices, &device));
            batches.map(|batch| network.correct(batch)).sum::<i64>()
        })?;
        let mut correct = [correct];
        group.all_reduce(&mut correct, ReduceOp::Sum)?;
        Ok(correct[0] as f64 / self.unseen.len() as f64)
    }
}

/// Called anew with another group when workers have come, and when all have gone back to the last commit.
fn train(context: &mut Context<'_, Training>, group: &ProcessGroup, job: &Job) -> phalanx::Result<f64> {
    println!("rank {} of {}, process {}", group.rank(), group.world_size(), std::process::id());
    let mut checkpoints = open(group, job)?;
    // What has been committed is newer than what is on the disk.
    if context.commits() == 0
        && let Some(checkpoints) = &checkpoints
        && let Some(saved) = checkpoints.newest()?
    {
        let own = context.state.progress.sampler.clone();
        context.state.load_from(&saved)?;
        // With another seed or other digits the saved sampler would win without a word.
        own.check_resumes(&context.state.progress.sampler)?;
    }
    while context.state.progress.sampler.epoch() < job.options.epochs {
        if let Some(changed) = job.step(context)? {
            if changed {
                println!("rank {} of {}", context.rank(), context.world_size());
                // They belonged to the group before.
                drop(checkpoints);
                checkpoints = open(context.group(), job)?;
            }
            if context.state.progress.step.is_multiple_of(job.options.commit_every) {
                // From here on, a failure leads back to this step and no further.
                context.commit()?;
            }
            continue;
        }
        let accuracy = job.evaluate(context)?;
        context.state.progress.sampler.next_epoch();
        context.commit()?;
        if context.rank().is_main() {
            let epoch = context.state.progress.sampler.epoch();
            println!("epoch {epoch:>2}  {:.2} % of unseen digits recognised", 100.0 * accuracy);
        }
        if let Some(checkpoints) = &checkpoints {
            let saved =
                checkpoints.save(context.state.progress.step, |snapshot| context.state.save_to(snapshot));
            // A full disk is no reason to end, while the commits are in memory.
            saved.unwrap_or_else(|error| eprintln!("warning: {error}"));
        }
    }
    job.evaluate(context)
}

/// The folder of checkpoints; none if another process has it, such as a rank 0 that is frozen: when that one wakes, there is
/// another group, and it is tried again. All ranks know it alike.
fn open(group: &ProcessGroup, job: &Job) -> phalanx::Result<Option<Checkpoints>> {
    let Some(folder) = &job.options.checkpoints else { return Ok(None) };
    match Checkpoints::open(folder, group) {
        Ok(checkpoints) => Ok(Some(checkpoints)),
        Err(error) if group.failure().is_none() => {
            eprintln!("warning: {error}");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn main() -> Result<()> {
    let command = Command::parse();
    if let Some(Soak::Soak(options)) = command.soak {
        return soak::run(options);
    }
    let job = Job::new(command.options)?;
    if let Some(worker) = soak::Worker::from_env() {
        return worker.work(&job);
    }
    let mut training = job.training()?;
    let accuracy = elastic::run(&mut training, |context, group| train(context, group, &job))?;
    println!("accuracy {:.2} %", 100.0 * accuracy);
    Ok(())
}
