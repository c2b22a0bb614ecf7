//! Horovod's example for digits, `pytorch_mnist.py`, with its settings and the network of our other examples. The lines that make it
//! distributed have `hvd` or `DistributedOptimizer` in them.
//!
//! ```sh
//! cargo build --release -p horovod_mnist
//! phalanx horovodrun -np 2 target/release/horovod_mnist --epochs 3
//! ```

use std::path::PathBuf;

use burn::module::Module;
use burn::optim::{SgdConfig, momentum::MomentumConfig};
use burn::tensor::Device;
use clap::Parser;
use clap::builder::RangedU64ValueParser;
use digits::{Digits, Network};
use phalanx::{Rank, WorldSize, sampler::DistributedSampler};
use phalanx_burn::horovod::{
    DistributedOptimizer, DistributedOptions, broadcast_optimizer_state, broadcast_parameters,
};
use phalanx_horovod::{Compression, Op};

/// Learns to read digits, started by horovodrun.
#[derive(Parser)]
struct Args {
    #[arg(long, default_value_t = 64, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    batch_size: usize,
    #[arg(long, default_value_t = 1000, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    test_batch_size: usize,
    #[arg(long, default_value_t = 10)]
    epochs: u64,
    #[arg(long, default_value_t = 0.01)]
    lr: f64,
    #[arg(long, default_value_t = 0.5)]
    momentum: f64,
    #[arg(long, default_value_t = 42)]
    seed: u64,
    #[arg(long, default_value_t = 10, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    log_interval: usize,
    /// Gradients travel in half precision
    #[arg(long)]
    fp16_allreduce: bool,
    /// Gradients are combined with Adasum instead of averaged
    #[arg(long)]
    use_adasum: bool,
    #[arg(long, default_value_t = 1.0)]
    gradient_predivide_factor: f64,
    #[arg(long, default_value = digits::FOLDER)]
    data_dir: PathBuf,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let hvd = phalanx_horovod::init()?;
    let device = Device::flex().autodiff();
    device.seed(args.seed);
    let (train, test) = (Digits::read(&args.data_dir, "train")?, Digits::read(&args.data_dir, "t10k")?);
    let (rank, size) = (hvd.rank(), WorldSize::new(hvd.size())?);
    let mut train_sampler = DistributedSampler::new(train.len(), rank, size)?;
    // A sampler repeats images where ranks would have unequal numbers of them, and those would count twice.
    let mine: Vec<usize> = (rank.index()..test.len()).step_by(size.count()).collect();

    let mut model = Network::new(&device);
    // Adasum needs no larger steps with more ranks.
    let lr = args.lr * if args.use_adasum { 1.0 } else { f64::from(hvd.size()) };
    // PyTorch's dampening. Burn's default is 0.1.
    let momentum = MomentumConfig::new().with_momentum(args.momentum).with_dampening(0.0);
    let optimizer = SgdConfig::new().with_momentum(Some(momentum)).init();

    model = broadcast_parameters(&hvd, model, Rank::MAIN)?;
    let optimizer = broadcast_optimizer_state(&hvd, &optimizer, &model, Rank::MAIN)?;
    let options = DistributedOptions {
        op: if args.use_adasum { Op::Adasum } else { Op::Average },
        compression: if args.fp16_allreduce { Compression::Fp16 } else { Compression::None },
        gradient_predivide_factor: args.gradient_predivide_factor,
        ..DistributedOptions::default()
    };
    let mut optimizer = DistributedOptimizer::with_options(optimizer, &model, &hvd, options)?;

    for epoch in 1..=args.epochs {
        train_sampler.set_epoch(epoch);
        let indices = train_sampler.indices();
        for (step, indices) in indices.chunks(args.batch_size).enumerate() {
            let loss = optimizer.forward(&model, |model| model.loss(train.batch(indices, &device)));
            optimizer.backward(&loss)?;
            model = optimizer.step(lr, model)?;
            if step % args.log_interval == 0 {
                let done = step * args.batch_size;
                println!(
                    "epoch {epoch} [{done}/{}] loss {:.4}",
                    train_sampler.len(),
                    loss.into_scalar::<f32>()
                );
            }
        }

        let (network, batches) = (model.valid(), mine.chunks(args.test_batch_size));
        let correct: i64 = batches.map(|batch| network.correct(test.batch(batch, &Device::flex()))).sum();
        let correct: i64 = hvd.allreduce("correct", correct, Op::Sum)?.item()?;
        if hvd.rank() == Rank::MAIN {
            println!("test set: {:.2} % recognised", 100.0 * correct as f64 / test.len() as f64);
        }
    }
    Ok(hvd.barrier()?) // no rank leaves while another still needs it
}
