//! One rank is slower than the others. The program learns digits synchronously and in each of the ways of `phalanx::asynchronous`, one after
//! the other, for the same time. It shows images a second, and accuracy against time.
//!
//! ```sh
//! cargo run --release -p async_digits -- --slow 4 --plot async.png
//! cargo run --release -p async_digits -- --slow 4 --model encoder --lr 0.25 --seconds 40
//! ```

mod model;
mod plot;
mod ways;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use burn::tensor::Device;
use clap::Parser;
use clap::builder::RangedU64ValueParser;
use digits::{Digits, Flat, Network};
use phalanx::{ProcessGroup, ReduceOp};
use serde::Serialize;

use model::{Encoder, Model};
use ways::{Training, Way};

/// Trains with one slow rank, in several ways, and compares them.
#[derive(Parser)]
struct Options {
    /// Worker processes to start, unless a launcher has started this one
    #[arg(long, default_value_t = 4)]
    ranks: u32,
    /// How many times as long the last rank sleeps in each step; forward and backward take as long there as elsewhere
    #[arg(long, default_value_t = 4.0)]
    slow: f64,
    /// Milliseconds that each step sleeps on the other ranks, as if an accelerator computed: then this machine's processors are
    /// not what limits the ranks
    #[arg(long, default_value_t = 30)]
    compute_ms: u64,
    /// Seconds of training, for each way
    #[arg(long, default_value_t = 12.0)]
    seconds: f64,
    /// The network that is trained
    #[arg(long, value_enum, default_value_t = model::Name::Convolutions)]
    model: model::Name,
    /// The ways to train
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Way::ALL)]
    ways: Vec<Way>,
    /// Images in a step of one rank
    #[arg(long, default_value_t = 32, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    batch_size: usize,
    /// Learning rate of a step with all ranks' gradients; divided by the ranks where each gradient is a step
    #[arg(long, default_value_t = 0.1)]
    lr: f64,
    /// Steps between two meetings of local SGD and DiLoCo
    #[arg(long, default_value_t = 8)]
    every: u64,
    /// Decides the order of the images and the first weights
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Folder with the digits, as gzip-compressed IDX files
    #[arg(long, default_value = digits::FOLDER)]
    data: PathBuf,
    /// Draw the results into this file
    #[arg(long, value_name = "PNG")]
    plot: Option<PathBuf>,
    /// Write a line of JSON for each way into this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What came of one way.
#[derive(Clone, Debug, Serialize)]
struct Outcome {
    way: Way,
    /// Of all ranks.
    images_per_second: f64,
    /// Of the fastest rank and of the slow one.
    steps: [u64; 2],
    /// Of all gradients; None where gradients are not stale.
    mean_staleness: Option<f64>,
    /// The most steps that a rank was ahead of the slowest; None without a server.
    lead: Option<u64>,
    /// Seconds of training, and the share of unseen digits that rank 0's parameters recognise then.
    accuracy: Vec<(f64, f64)>,
    /// Whether some parameter is infinite or not a number at the end: the learning rate was too high for gradients so stale.
    diverged: bool,
}

/// The share of digits whose time is compared.
const GOAL: f64 = 0.9;

fn main() -> Result<()> {
    let options = Options::parse();
    // NaN is in no range.
    ensure!(
        (1.0..=1e6).contains(&options.slow),
        "--slow says how many times as long the last rank sleeps: from 1 to 1000000"
    );
    ensure!(
        (1..=1_000_000).contains(&options.compute_ms),
        "--compute-ms is from 1 to 1000000: 0 leaves no rank that is slower"
    );
    ensure!((1e-3..=1e6).contains(&options.seconds), "--seconds is from 0.001 to 1000000");
    ensure!(options.every > 0, "--every is more than 0");
    ensure!(options.ranks > 1, "--ranks 1 has nobody to wait for: take 2 or more");
    Ok(phalanx::spawn(options.ranks, || match options.model {
        model::Name::Convolutions => compare::<Network>(&options),
        model::Name::Encoder => compare::<Encoder>(&options),
    })?)
}

/// What each rank does.
fn compare<M: Model>(options: &Options) -> Result<()> {
    let group = phalanx::init()?;
    let device = Device::flex().autodiff();
    let digits = Digits::read(&options.data, "train")?;
    let unseen = Digits::read(&options.data, "t10k")?;
    let is_slow = group.rank().get() + 1 == group.world_size().get();
    let factor = if is_slow { options.slow } else { 1.0 };
    let mut outcomes = Vec::new();
    if group.rank().is_main() {
        println!(
            "{:<10} {:>9} {:>12} {:>10} {:>9} {:>9}",
            "", "images/s", "steps", "staleness", "accuracy", "s to 90 %"
        );
    }
    for way in options.ways.iter().copied() {
        device.seed(options.seed);
        let training = Training {
            group: &group,
            network: M::new(&device),
            digits: &digits,
            device: &device,
            compute: Duration::from_millis(options.compute_ms).mul_f64(factor),
            duration: Duration::from_secs_f64(options.seconds),
            batch_size: options.batch_size,
            learning_rate: options.lr,
            every: options.every,
            seed: options.seed,
        };
        group.barrier()?;
        let trained = training.run(way)?;
        // The ranks' steps and staleness, added up, and the steps of the slow rank.
        let [steps, images, staleness] =
            [trained.steps, trained.images, trained.staleness].map(|sum| sum as f64);
        let mut sums = [steps, images, staleness, trained.seconds];
        let mut most = [trained.steps as f64, trained.lead as f64];
        let mut slow = [if is_slow { trained.steps as f64 } else { 0.0 }];
        group.all_reduce(&mut sums, ReduceOp::Sum)?;
        group.all_reduce(&mut most, ReduceOp::Max)?;
        group.all_reduce(&mut slow, ReduceOp::Max)?;
        let [steps, images, staleness, seconds] = sums;
        if !group.rank().is_main() {
            continue;
        }
        let accuracy = trained
            .snapshots
            .iter()
            .map(|(time, flat)| (*time, recognised(&training.network, flat, &unseen)));
        let outcome = Outcome {
            way,
            images_per_second: images * group.world_size().count() as f64 / seconds,
            steps: [most[0] as u64, slow[0] as u64],
            mean_staleness: way.is_stale().then(|| staleness / steps),
            lead: way.is_stale().then_some(most[1] as u64),
            accuracy: accuracy.collect(),
            diverged: trained.snapshots.last().is_some_and(|(_, flat)| !flat.iter().all(|x| x.is_finite())),
        };
        outcome.print();
        outcomes.push(outcome);
    }
    finish(options, &group, &outcomes)
}

/// The share of `digits` that `network` recognises with these parameters.
fn recognised<M: Model>(network: &M, flat: &[f32], digits: &Digits) -> f64 {
    let network = network.clone().with_flat(flat).valid();
    let indices: Vec<usize> = (0..digits.len()).collect();
    let correct: i64 =
        indices.chunks(250).map(|indices| network.correct(digits.batch(indices, &Device::flex()))).sum();
    correct as f64 / digits.len() as f64
}

impl Outcome {
    fn print(&self) {
        let staleness = self.mean_staleness.map_or_else(|| "-".to_owned(), |mean| format!("{mean:.1}"));
        let goal = self.accuracy.iter().find(|(_, accuracy)| *accuracy >= GOAL);
        let goal = goal.map_or_else(|| "-".to_owned(), |(seconds, _)| format!("{seconds:.1}"));
        let steps = format!("{} / {}", self.steps[0], self.steps[1]);
        let last = match self.diverged {
            true => "diverged".to_owned(),
            false => format!("{:.2} %", 100.0 * self.accuracy.last().map_or(0.0, |(_, accuracy)| *accuracy)),
        };
        println!(
            "{:<10} {:>9.0} {steps:>12} {staleness:>10} {last:>9} {goal:>9}",
            self.way.name(),
            self.images_per_second
        );
    }
}

fn finish(options: &Options, group: &ProcessGroup, outcomes: &[Outcome]) -> Result<()> {
    if !group.rank().is_main() {
        return Ok(());
    }
    if let Some(path) = &options.json {
        let lines = outcomes.iter().map(serde_json::to_string).collect::<Result<Vec<_>, _>>()?;
        std::fs::write(path, lines.join("\n") + "\n")?;
    }
    if let Some(path) = &options.plot {
        plot::draw(path, outcomes)?;
    }
    Ok(())
}
