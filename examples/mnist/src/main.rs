//! Two processes learn to read digits, each from its own half of them.
//!
//! ```sh
//! cargo run --release -p mnist                 # two ranks
//! cargo run --release -p mnist -- --ranks 1    # one process, no launcher
//! phalanx run --nproc-per-node 2 -- target/release/mnist
//! ```

mod progress;

use std::path::PathBuf;

use anyhow::{Result, ensure};
use burn::optim::AdamWConfig;
use burn::tensor::Device;
use clap::Parser;
use clap::builder::RangedU64ValueParser;
use phalanx::sampler::DistributedSampler;
use phalanx::{ProcessGroup, ReduceOp};
use phalanx_burn::Ddp;

use digits::Digits;
use digits::Network;
use progress::Progress;

/// Trains a small convolutional network on handwritten digits.
#[derive(Parser)]
struct Options {
    /// Worker processes to start, unless a launcher has started this one
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Passes over the training images
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: u64,
    /// Images in a step of one rank
    #[arg(long, default_value_t = 64, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    batch_size: usize,
    /// Learning rate of the first step; it falls to zero in a straight line
    #[arg(long, default_value_t = 0.01)]
    lr: f64,
    /// Decides the order of the images and the first weights
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Folder with the digits, as gzip-compressed IDX files
    #[arg(long, default_value = digits::FOLDER)]
    data: PathBuf,
}

fn main() -> Result<()> {
    let options = Options::parse();
    if options.ranks == 1 {
        return train(&options);
    }
    Ok(phalanx::spawn(options.ranks, || train(&options))?)
}

/// What each rank does.
fn train(options: &Options) -> Result<()> {
    let group = phalanx::init()?;
    let device = Device::flex().autodiff();
    device.seed(options.seed);

    let digits = Digits::read(&options.data, "train")?;
    let unseen = Digits::read(&options.data, "t10k")?;
    let mut sampler = DistributedSampler::for_group(digits.len(), &group).seed(options.seed);
    sampler.check_ranks(&group)?;
    let steps = sampler.len().div_ceil(options.batch_size) as u64 * options.epochs;

    let mut ddp = Ddp::new(Network::new(&device), &group)?;
    let mut optimizer = AdamWConfig::new().init();
    let mut progress = Progress::new(&group, steps);
    let mut accuracy = 0.0;

    for epoch in 0..options.epochs {
        sampler.set_epoch(epoch);
        for indices in sampler.indices().chunks(options.batch_size) {
            let batch = digits.batch(indices, &device);
            let loss = ddp.forward(|network| network.loss(batch))?;
            let gradients = ddp.backward(&loss)?;
            ddp.step(&mut optimizer, options.lr * progress.left(), gradients)?;
            progress.step(indices.len(), loss);
        }
        accuracy = ddp.evaluate(|network| evaluate(network, &unseen, &group))??;
        progress.epoch(epoch + 1, accuracy);
    }

    ensure!(ddp.replicas_identical()?, "the replicas differ");
    progress.finish(accuracy);
    Ok(())
}

/// The share of `digits` that are recognised; each rank looks at a part of them.
fn evaluate(network: &Network, digits: &Digits, group: &ProcessGroup) -> Result<f64> {
    let mine: Vec<usize> = (group.rank().index()..digits.len()).step_by(group.world_size().count()).collect();
    let device = Device::flex();
    let correct = mine.chunks(250).map(|indices| network.correct(digits.batch(indices, &device)));
    let mut correct = [correct.sum::<i64>()];
    group.all_reduce(&mut correct, ReduceOp::Sum)?;
    Ok(correct[0] as f64 / digits.len() as f64)
}
