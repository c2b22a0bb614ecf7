//! Trains the same network with each communication hook, and shows the bytes sent, the loss and the accuracy.
//!
//! ```sh
//! cargo run --release -p comm_hooks
//! ```
//!
//! It fails if replicas differ at the end, if a hook sends more bytes than it should, or if digits are not recognised.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use burn::optim::SgdConfig;
use burn::optim::momentum::MomentumConfig;
use burn::tensor::Device;
use clap::Parser;
use clap::builder::RangedU64ValueParser;
use phalanx::reducer::hooks::{AllReduce, Compressed, PostLocalSgd, PowerSgd, PowerSgdOptions};
use phalanx::sampler::DistributedSampler;
use phalanx::{ProcessGroup, ReduceOp};
use phalanx_burn::{Ddp, PeriodicModelAverager};

use digits::Digits;
use digits::Network;

/// Steps between two averages of the model, in local SGD.
const PERIOD: u64 = 4;

/// How many fewer digits a hook may recognise than plain averages, as a share.
const MARGIN: f64 = 0.1;

/// Compares communication hooks on handwritten digits.
#[derive(Parser)]
struct Options {
    /// Worker processes to start, unless a launcher has started this one
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Passes over the training images
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: u64,
    /// Images in a step of one rank
    #[arg(long, default_value_t = 64, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    batch_size: usize,
    /// Learning rate
    #[arg(long, default_value_t = 0.02)]
    lr: f64,
    /// Steps that are averaged uncompressed before PowerSGD and local SGD begin
    #[arg(long, default_value_t = 40)]
    uncompressed: u64,
    /// Folder with the digits, as gzip-compressed IDX files
    #[arg(long, default_value = digits::FOLDER)]
    data: PathBuf,
}

/// How gradients travel.
#[derive(Clone, Copy, Debug)]
enum Hook {
    None,
    F16,
    Bf16,
    PowerSgd { rank: usize },
    PostLocalSgd,
}

impl Hook {
    const ALL: [Self; 6] = [
        Self::None,
        Self::F16,
        Self::Bf16,
        Self::PowerSgd { rank: 1 },
        Self::PowerSgd { rank: 4 },
        Self::PostLocalSgd,
    ];

    fn name(self) -> String {
        match self {
            Self::None => "none".into(),
            Self::F16 => "f16".into(),
            Self::Bf16 => "bf16".into(),
            Self::PowerSgd { rank } => format!("PowerSGD, rank {rank}"),
            Self::PostLocalSgd => "post-local SGD".into(),
        }
    }

    /// The share of the uncompressed bytes that may at most be sent in `steps` steps.
    fn promise(self, steps: u64, uncompressed: u64) -> f64 {
        let (compressed, begins) = match self {
            Self::None => (1.0, 0),
            Self::F16 | Self::Bf16 => (0.5, 0),
            Self::PowerSgd { rank } => (0.02 + 0.025 * rank as f64, uncompressed),
            Self::PostLocalSgd => (0.0, uncompressed),
        };
        let before = begins.min(steps) as f64 / steps as f64;
        before + (1.0 - before) * compressed + 1e-9
    }

    fn register(self, ddp: &mut Ddp<Network>, uncompressed: u64) -> phalanx::Result<()> {
        match self {
            Self::None => ddp.register_comm_hook(AllReduce),
            Self::F16 => ddp.register_comm_hook(Compressed::f16()),
            Self::Bf16 => ddp.register_comm_hook(Compressed::bf16()),
            Self::PowerSgd { rank } => {
                let options = PowerSgdOptions::default().rank(rank).start_iter(uncompressed);
                ddp.register_comm_hook(PowerSgd::new(options)?)
            }
            Self::PostLocalSgd => ddp.register_comm_hook(PostLocalSgd::new(uncompressed)),
        }
    }
}

/// What one training gave.
struct Outcome {
    bytes: u64,
    steps: u64,
    /// The mean loss of each quarter of the training, over all ranks.
    losses: [f32; 4],
    accuracy: f64,
}

fn main() -> Result<()> {
    let options = Options::parse();
    if options.ranks == 1 {
        return compare(&options);
    }
    Ok(phalanx::spawn(options.ranks, || compare(&options))?)
}

fn compare(options: &Options) -> Result<()> {
    let group = phalanx::init()?;
    let (digits, unseen) = (Digits::read(&options.data, "train")?, Digits::read(&options.data, "t10k")?);
    let device = Device::flex().autodiff();
    device.seed(1);
    let start = Network::new(&device);
    if group.rank().is_main() {
        println!(
            "| hook | bytes a step | of none | loss, by quarters of {} epochs | unseen digits |",
            options.epochs
        );
        println!("|---|---:|---:|---|---:|");
    }
    let (mut none, mut plain) = (None, None);
    for hook in Hook::ALL {
        let outcome = train(options, &group, start.clone(), hook, (&digits, &unseen))?;
        let all = *none.get_or_insert(outcome.bytes);
        let share = if all == 0 { 1.0 } else { outcome.bytes as f64 / all as f64 };
        if group.rank().is_main() {
            let losses: Vec<String> = outcome.losses.iter().map(|loss| format!("{loss:.3}")).collect();
            println!(
                "| {} | {} | {:.1} % | {} | {:.2} % |",
                hook.name(),
                outcome.bytes / outcome.steps,
                100.0 * share,
                losses.join(" "),
                100.0 * outcome.accuracy
            );
        }
        let promise = hook.promise(outcome.steps, options.uncompressed);
        ensure!(all == 0 || share <= promise, "{hook:?} sent {:.1} % of the bytes", 100.0 * share);
        let accuracy = outcome.accuracy;
        ensure!(accuracy > *plain.get_or_insert(accuracy) - MARGIN, "{hook:?} recognises {accuracy:.4}");
        ensure!(accuracy > 0.75, "{hook:?} recognises {accuracy:.4}");
    }
    Ok(())
}

fn train(
    options: &Options,
    group: &ProcessGroup,
    start: Network,
    hook: Hook,
    (digits, unseen): (&Digits, &Digits),
) -> Result<Outcome> {
    let device = Device::flex().autodiff();
    let mut ddp = Ddp::new(start, group)?;
    hook.register(&mut ddp, options.uncompressed)?;
    let mut averager = PeriodicModelAverager::new(PERIOD)?.warmup_steps(options.uncompressed);
    let mut optimizer = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
    let mut sampler = DistributedSampler::new(digits.len(), group.rank(), group.world_size())?;
    let mut losses = Vec::new();
    for epoch in 0..options.epochs {
        sampler.set_epoch(epoch);
        for indices in sampler.indices().chunks(options.batch_size) {
            let batch = digits.batch(indices, &device);
            let loss = ddp.forward(|network| network.loss(batch))?;
            let gradients = ddp.backward(&loss)?;
            ddp.step(&mut optimizer, options.lr, gradients)?;
            if matches!(hook, Hook::PostLocalSgd) {
                averager.step(&mut ddp)?;
            }
            losses.push(loss.into_scalar::<f32>());
        }
    }
    if matches!(hook, Hook::PostLocalSgd) {
        ddp.average_parameters()?;
    }
    ensure!(ddp.replicas_identical()?, "{hook:?}: the replicas differ");
    let quarter = losses.len().div_ceil(4).max(1);
    let mut means = [0.0; 4];
    for (mean, losses) in means.iter_mut().zip(losses.chunks(quarter)) {
        *mean = losses.iter().sum::<f32>() / losses.len() as f32;
    }
    group.all_reduce(&mut means, ReduceOp::Avg)?;
    let (bytes, steps) = (ddp.communicated_bytes(), losses.len() as u64);
    let accuracy = ddp.evaluate(|network| accuracy(network, unseen, group))??;
    Ok(Outcome { bytes, steps, losses: means, accuracy })
}

/// The share of `digits` that are recognised; each rank looks at a part of them.
fn accuracy(network: &Network, digits: &Digits, group: &ProcessGroup) -> Result<f64> {
    let mine: Vec<usize> = (group.rank().index()..digits.len()).step_by(group.world_size().count()).collect();
    let device = Device::flex();
    let of = |indices: &[usize]| network.correct(digits.batch(indices, &device));
    let mut correct = [mine.chunks(250).map(of).sum::<i64>()];
    group.all_reduce(&mut correct, ReduceOp::Sum)?;
    Ok(correct[0] as f64 / digits.len() as f64)
}
