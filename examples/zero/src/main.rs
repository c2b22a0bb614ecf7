//! Memory, traffic and time of a step with the optimizer's state on every rank, and spread over the ranks.
//!
//! ```sh
//! cargo run --release -p zero -- --ranks 4
//! ```
//!
//! The two ways take turns step by step, each first in every second round, and times are medians. It fails if they do not
//! lead to the same parameters: bit for bit if ranks share memory, or if there are two ranks.

use std::time::Instant;

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::{Device, Distribution, Tensor};
use clap::Parser;
use clap::builder::RangedU64ValueParser;
use phalanx::{ProcessGroup, TransportKind};
use phalanx_burn::{Ddp, ZeroRedundancyOptimizer};

/// Compares plain data parallelism with a sharded optimizer.
#[derive(Parser)]
struct Options {
    /// Worker processes to start, unless a launcher has started this one
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Width of the eight hidden layers
    #[arg(long, default_value_t = 1024, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    width: usize,
    /// Steps that are timed
    #[arg(long, default_value_t = 10)]
    steps: usize,
}

#[derive(Module, Debug)]
struct Mlp {
    layers: Vec<Linear>,
}

impl Mlp {
    fn new(width: usize, device: &Device) -> Self {
        Self { layers: (0..8).map(|_| LinearConfig::new(width, width).init(device)).collect() }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let y = self.layers.iter().fold(x.clone(), |x, layer| layer.forward(x).tanh());
        (y - x).powi_scalar(2).mean()
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    if options.ranks == 1 {
        return compare(&options);
    }
    Ok(phalanx::spawn(options.ranks, || compare(&options))?)
}

/// Steps before anything is measured: memory is touched, buckets are rebuilt in the order of the gradients.
const WARM_UP: usize = 3;

/// A replica, and what trains it.
struct Trainer {
    name: &'static str,
    ddp: Ddp<Mlp>,
    optimizer: Optimizer,
    times: Vec<f64>,
    sent_before: u64,
}

enum Optimizer {
    Plain(ModuleOptimizer),
    Spread(ZeroRedundancyOptimizer),
}

impl Trainer {
    fn step(&mut self, batch: &Tensor<2>, round: usize) -> Result<()> {
        if round == WARM_UP {
            self.sent_before = self.ddp.communicated_bytes();
        }
        let begin = Instant::now();
        let loss = self.ddp.forward(|model| model.loss(batch.clone()))?;
        let gradients = self.ddp.backward(&loss)?;
        match &mut self.optimizer {
            Optimizer::Plain(optimizer) => self.ddp.step(optimizer, 1e-4, gradients)?,
            Optimizer::Spread(optimizer) => optimizer.step(&mut self.ddp, 1e-4, gradients)?,
        }
        if round >= WARM_UP {
            self.times.push(begin.elapsed().as_secs_f64());
        }
        Ok(())
    }

    fn show(mut self, world: usize) -> Result<()> {
        let state = match &self.optimizer {
            Optimizer::Plain(optimizer) => bytes(optimizer)?,
            Optimizer::Spread(optimizer) => optimizer.state_bytes()?,
        };
        // An all_reduce of n bytes sends 2n(w-1)/w from each rank.
        let reduced = (self.ddp.communicated_bytes() - self.sent_before) as f64 / self.times.len() as f64;
        let sent = reduced * 2.0 * (world - 1) as f64 / world as f64;
        self.times.sort_by(f64::total_cmp);
        let median = self.times[self.times.len() / 2];
        println!(
            "{:8} {:>14.1} MiB {:>14.1} MiB {:>8.1} ms",
            self.name,
            mib(state as f64),
            mib(sent),
            1e3 * median
        );
        Ok(())
    }
}

fn compare(options: &Options) -> Result<()> {
    let group = phalanx::init()?;
    let trainers = train(&group, options)?;
    if group.rank().is_main() {
        println!("a rank    optimizer state   sent in a step       step");
        trainers.into_iter().try_for_each(|trainer| trainer.show(group.world_size().count()))?;
    }
    Ok(())
}

/// Trains both ways, which must lead to the same parameters.
fn train(group: &ProcessGroup, options: &Options) -> Result<[Trainer; 2]> {
    let device = Device::flex().autodiff();
    device.seed(7 + u64::from(group.rank().get()));
    let batch = Tensor::<2>::random([16, options.width], Distribution::Default, &device);
    let start = Mlp::new(options.width, &device);
    let trainer = |name, spread| -> Result<Trainer> {
        let mut ddp = Ddp::new(start.clone(), group)?;
        let adamw = AdamWConfig::new().init();
        let optimizer = match spread {
            true => Optimizer::Spread(ZeroRedundancyOptimizer::new(adamw, &mut ddp)?),
            false => Optimizer::Plain(adamw),
        };
        Ok(Trainer { name, ddp, optimizer, times: Vec::new(), sent_before: 0 })
    };
    let mut trainers = [trainer("plain", false)?, trainer("sharded", true)?];
    for round in 0..WARM_UP + options.steps.max(1) {
        for place in 0..trainers.len() {
            group.barrier()?;
            trainers[(round + place) % 2].step(&batch, round)?;
        }
    }
    for trainer in &trainers {
        ensure!(trainer.ddp.replicas_identical()?, "the replicas differ");
    }
    let [plain, sharded] = trainers.each_ref().map(|trainer| trainer.ddp.model().layers[7].weight.val());
    let apart: f32 = (plain - sharded).abs().max().into_scalar();
    let alike = group.world_size().get() <= 2 || group.transport() == Some(TransportKind::SharedMemory);
    ensure!(
        if alike { apart == 0.0 } else { apart < 1e-5 },
        "the sharded optimizer took other steps: {apart:e}"
    );
    Ok(trainers)
}

fn bytes(optimizer: &ModuleOptimizer) -> Result<usize> {
    Ok(optimizer.into_bytes().map_err(|error| anyhow::anyhow!("{error}"))?.len())
}

fn mib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_behind_the_warm_up_is_timed() {
        let group = ProcessGroup::alone().unwrap();
        for steps in [1, 3, 7] {
            let trainers = train(&group, &Options { ranks: 1, width: 4, steps }).unwrap();
            assert_eq!(trainers.map(|trainer| trainer.times.len()), [steps; 2]);
        }
    }
}
