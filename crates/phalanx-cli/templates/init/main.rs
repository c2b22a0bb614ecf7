//! Trains a model in two processes, each on its own half of the data.

use burn::nn::LinearConfig;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Distribution, Tensor};
use phalanx::sampler::DistributedSampler;
use phalanx_burn::Ddp;

const SAMPLES: usize = 10_000;
/// Of one rank.
const BATCH_SIZE: usize = 64;
const EPOCHS: u64 = 5;
const LEARNING_RATE: f64 = 1e-2;

fn main() -> phalanx::Result<()> {
    // Starts two processes of this program. Under `phalanx run`, torchrun or mpirun it starts none: this process is one of the workers.
    phalanx::spawn(2, train)
}

/// What each rank does.
fn train() -> phalanx::Result<()> {
    let group = phalanx::init()?;
    let device = Device::flex().autodiff(); // Burn's kernels for the CPU, with a graph for backward
    device.seed(1); // every rank makes the same data
    let xs = Tensor::<2>::random([SAMPLES, 4], Distribution::Default, &device);
    let ys = xs.clone().sum_dim(1);

    let mut ddp = Ddp::new(LinearConfig::new(4, 1).init(&device), &group)?;
    let mut optimizer = AdamWConfig::new().init();
    let mut sampler = DistributedSampler::for_group(SAMPLES, &group);

    for epoch in 0..EPOCHS {
        sampler.set_epoch(epoch); // another order in each
        for (step, indices) in sampler.indices().chunks(BATCH_SIZE).enumerate() {
            let indices = Tensor::from_data(indices, &device);
            let (x, y) = (xs.clone().select(0, indices.clone()), ys.clone().select(0, indices));

            let loss = ddp.forward(|model| (model.forward(x) - y).powi_scalar(2).mean())?;
            let gradients = ddp.backward(&loss)?; // the average over all ranks
            ddp.step(&mut optimizer, LEARNING_RATE, gradients)?;

            if step % 20 == 0 && group.rank().is_main() {
                println!("epoch {epoch}, step {step}: loss {:.4}", loss.into_scalar::<f32>());
            }
        }
    }
    Ok(())
}
