//! Burn's own trainer, before and after: one line makes it train in several processes.
//!
//! ```sh
//! cargo run --release --features train --example trainer             # before: one process
//! cargo run --release --features train --example trainer -- --ddp    # after: two
//! ```

#[path = "../mnist/data.rs"]
mod data;
#[allow(dead_code)] // Its own loss is for its own loop.
#[path = "../mnist/model.rs"]
mod model;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, ExecutionStrategy, InferenceStep, Learner, SupervisedTraining, TrainOutput,
    TrainStep,
};
use clap::Parser;
use phalanx::{ProcessGroup, Rank};
use phalanx_burn::train::DdpStrategy;

use data::{Batch, Digits};
use model::Network;

/// Trains a small convolutional network on handwritten digits with Burn's trainer.
#[derive(Parser)]
struct Options {
    /// Train in several processes
    #[arg(long)]
    ddp: bool,
    /// In how many
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Passes over the training images
    #[arg(long, default_value_t = 2)]
    epochs: usize,
    /// Images in a step of all ranks together
    #[arg(long, default_value_t = 64)]
    batch_size: usize,
    /// Where logs and checkpoints go
    #[arg(long, default_value_os_t = std::env::temp_dir().join("phalanx-trainer"))]
    directory: PathBuf,
    /// Folder with the digits, as gzip-compressed IDX files
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/mnist-10k"))]
    data: PathBuf,
}

fn main() -> Result<()> {
    let options = Options::parse();
    if options.ddp { Ok(phalanx::spawn(options.ranks, || train(&options))?) } else { train(&options) }
}

fn train(options: &Options) -> Result<()> {
    let group = phalanx::init()?;
    let device = Device::flex().autodiff();
    device.seed(1);
    let batch_size = options.batch_size / group.world_size().count();
    let unseen = Arc::new(Digits::read(&options.data, "t10k")?);
    let training = SupervisedTraining::new(
        &options.directory,
        loader(Digits::read(&options.data, "train")?.into(), batch_size, true),
        loader(unseen.clone(), 250, false),
    )
    .metrics((AccuracyMetric::new(), LossMetric::new()))
    .num_epochs(options.epochs);

    let training = if options.ddp {
        training.with_training_strategy(DdpStrategy::new(&group).into()) // the one line
    } else {
        training.with_training_strategy(ExecutionStrategy::single(device.clone()).into())
    };

    let learner = Learner::new(Network::new(&device), AdamWConfig::new().init(), 4e-3);
    let result = training.launch(learner);
    if let Some(error) = result.error {
        bail!("training failed: {error}");
    }
    check(&result.model, &unseen, &group)
}

/// Digits are recognised, and all ranks have the same model.
fn check(network: &Network, unseen: &Digits, group: &ProcessGroup) -> Result<()> {
    let own = weights(network);
    let mut main = own.clone();
    group.broadcast(&mut main, Rank::MAIN)?;
    ensure!(own == main, "rank {} has other weights than rank 0", group.rank());
    if group.rank().is_main() {
        let all: Vec<usize> = (0..unseen.len()).collect();
        let correct = all.chunks(250).map(|part| network.correct(unseen.batch(part, &Device::flex())));
        let accuracy = correct.sum::<i64>() as f64 / unseen.len() as f64;
        println!("accuracy {:.2} %  ranks {}", 100.0 * accuracy, group.world_size());
        ensure!(accuracy > 0.93, "too few digits are recognised");
    }
    Ok(())
}

fn weights(network: &Network) -> Vec<f32> {
    struct Weights(Vec<f32>);
    impl ModuleVisitor for Weights {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.extend(param.val().into_data().iter::<f32>());
        }
    }
    let mut weights = Weights(Vec::new());
    network.visit(&mut weights);
    weights.0
}

/// Makes batches of the digits with some indices.
#[derive(Clone)]
struct Reader(Arc<Digits>);

impl Batcher<usize, Batch> for Reader {
    fn batch(&self, indices: Vec<usize>, device: &Device) -> Batch {
        self.0.batch(&indices, device)
    }
}

fn loader(digits: Arc<Digits>, batch_size: usize, shuffle: bool) -> Arc<dyn DataLoader<Batch>> {
    let indices = InMemDataset::new((0..digits.len()).collect());
    let builder = DataLoaderBuilder::new(Reader(digits)).batch_size(batch_size);
    if shuffle { builder.shuffle(1).build(indices) } else { builder.build(indices) }
}

impl Network {
    fn classify(&self, Batch { images, labels }: Batch) -> ClassificationOutput {
        let output = self.forward(images);
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        ClassificationOutput::new(loss.forward(output.clone(), labels.clone()), output, labels)
    }
}

impl TrainStep for Network {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Network {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        self.classify(batch)
    }
}
