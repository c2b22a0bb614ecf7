//! A whole training run in some sixty lines: DDP, a sampler, a warm-up, an evaluation, and checkpoints in `runs/mnist`. Started
//! again, it continues from the newest one. A test counts the lines.
//!
//! ```sh
//! cargo run --release -p mnist_short
//! phalanx run --nproc-per-node 2 --max-restarts 3 -- target/release/mnist_short
//! ```

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Linear, LinearConfig, loss::CrossEntropyLossConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor, activation::relu};
use phalanx::checkpoint::Checkpoints;
use phalanx::sampler::{ElasticSampler, Tail};
use phalanx_burn::{TrainState, cosine_with_warmup};

// What torchvision's `datasets.MNIST` is to a PyTorch user.
use digits::Digits;

#[derive(Module, Debug)]
struct Network {
    conv1: Conv2d,
    conv2: Conv2d,
    dense: Linear,
}

impl Network {
    fn new(device: &Device) -> Self {
        let conv1 = Conv2dConfig::new([1, 16], [5, 5]).with_stride([2, 2]).init(device);
        let conv2 = Conv2dConfig::new([16, 32], [5, 5]).with_stride([2, 2]).init(device);
        Self { conv1, conv2, dense: LinearConfig::new(32 * 4 * 4, 10).init(device) }
    }

    fn forward(&self, images: Tensor<3>) -> Tensor<2> {
        let x = relu(self.conv1.forward(images.unsqueeze_dim(1)));
        self.dense.forward(relu(self.conv2.forward(x)).flatten(1, 3))
    }
}

fn main() -> anyhow::Result<()> {
    Ok(phalanx::spawn(2, train)?)
}

fn train() -> anyhow::Result<()> {
    let (group, device, folder) = (phalanx::init()?, Device::flex().autodiff(), digits::FOLDER.as_ref());
    let (digits, unseen) = (Digits::read(folder, "train")?, Digits::read(folder, "t10k")?);
    let loss_fn = CrossEntropyLossConfig::new().init(&device);

    let sampler = ElasticSampler::new(digits.len()).tail(Tail::Repeat);
    let steps = 6 * sampler.steps_left(64, group.world_size());
    let state = TrainState::new(Network::new(&device), AdamWConfig::new().init(), sampler)?;
    let mut state = state.with_scheduler(cosine_with_warmup(1e-2, 30, steps)?).with_group(&group)?;
    let checkpoints = Checkpoints::open("runs/mnist", &group)?;
    state.resume(&checkpoints)?;

    for epoch in state.progress.epoch() + 1..=6 {
        while let Some(indices) = state.next_batch(64) {
            let batch = digits.batch(&indices, &device);
            let loss = state.model.forward(|net| loss_fn.forward(net.forward(batch.images), batch.labels))?;
            let gradients = state.model.backward(&loss)?;
            state.scheduled_step(gradients)?;
        }
        // At the end of the epoch, not yet in the next: a run that goes on from here evaluates first.
        state.checkpoint(&checkpoints)?;

        let mine: Vec<_> = (group.rank().index()..unseen.len()).step_by(group.world_size().count()).collect();
        let batch = unseen.batch(&mine, &Device::flex());
        let answers = state.model.evaluate(|net| net.forward(batch.images).argmax(1).flatten::<1>(0, 1))?;
        let accuracy = state.model.sum(answers.equal(batch.labels).int().sum())? / unseen.len() as f64;
        if group.rank().is_main() {
            println!("epoch {epoch}: {:.2} % recognised", 100.0 * accuracy);
        }
        state.progress.next_epoch();
    }
    Ok(checkpoints.finish()?)
}
