//! Memory and time of a step with the optimizer's state on every rank, and spread over the ranks.
//!
//! ```sh
//! cargo run --release --example zero -- --ranks 4
//! ```
//!
//! It fails if both do not lead to the same parameters, bit for bit.

use std::time::Instant;

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::{Device, Distribution, Tensor};
use clap::Parser;
use phalanx_burn::{Ddp, ZeroRedundancyOptimizer};

/// Compares plain data parallelism with a sharded optimizer.
#[derive(Parser)]
struct Options {
    /// Worker processes to start, unless a launcher has started this one
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Width of the eight hidden layers
    #[arg(long, default_value_t = 1024)]
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

fn compare(options: &Options) -> Result<()> {
    let group = phalanx::init()?;
    let device = Device::flex().autodiff();
    device.seed(7 + u64::from(group.rank().get()));
    let batch = Tensor::<2>::random([16, options.width], Distribution::Default, &device);
    let start = Mlp::new(options.width, &device);
    let mut weights = Vec::new();
    for sharded in [false, true] {
        let mut ddp = Ddp::new(start.clone(), &group)?;
        let mut plain = AdamWConfig::new().init();
        let mut zero = ZeroRedundancyOptimizer::new(AdamWConfig::new().init(), &ddp)?;
        let mut best = f64::INFINITY;
        for _ in 0..options.steps.max(1) {
            let begin = Instant::now();
            let loss = ddp.forward(|model| model.loss(batch.clone()))?;
            let gradients = ddp.backward(&loss)?;
            if sharded {
                zero.step(&mut ddp, 1e-4, gradients)?;
            } else {
                ddp.step(&mut plain, 1e-4, gradients);
            }
            best = best.min(begin.elapsed().as_secs_f64());
        }
        ensure!(ddp.replicas_identical()?, "the replicas differ");
        let state = if sharded { zero.state_bytes()? } else { bytes(&plain)? };
        if group.rank().is_main() {
            let name = if sharded { "sharded" } else { "plain  " };
            println!("{name}  optimizer state {:>7.1} MiB a rank  step {:>6.1} ms", mib(state), 1e3 * best);
        }
        weights.push(ddp.model().layers[7].weight.val().into_data());
    }
    ensure!(weights[0].as_bytes() == weights[1].as_bytes(), "the sharded optimizer took other steps");
    Ok(())
}

fn bytes(optimizer: &ModuleOptimizer) -> Result<usize> {
    Ok(optimizer.into_bytes().map_err(|error| anyhow::anyhow!("{error}"))?.len())
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
