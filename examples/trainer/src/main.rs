//! Burn's own trainer, in one process, and in several processes after a change of a few lines.
//!
//! ```sh
//! cargo run --release -p trainer             # before: one process
//! cargo run --release -p trainer -- --ddp    # after: two
//! cargo run --release -p trainer -- --cost   # the cost of the second rank
//! ```

mod cost;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::{Dataset, InMemDataset};
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, ExecutionStrategy, InferenceStep, Learner, SupervisedTraining, TrainOutput,
    TrainStep, TrainingStrategy,
};
use clap::Parser;
use clap::builder::RangedU64ValueParser;
use phalanx::{ProcessGroup, Rank};
use phalanx_burn::train::DdpStrategy;

use digits::{Batch, Digits, Network};

/// Trains a small convolutional network on handwritten digits with Burn's trainer.
#[derive(Parser)]
struct Options {
    /// Train in several processes
    #[arg(long)]
    ddp: bool,
    /// Time the trainer alone, several that never speak, and as many ranks
    #[arg(long, conflicts_with = "ddp")]
    cost: bool,
    /// In how many
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Passes over the training images
    #[arg(long, default_value_t = 2, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    epochs: usize,
    /// Images in a step of all ranks together
    #[arg(long, default_value_t = 64, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    batch_size: usize,
    /// Where logs and checkpoints go
    #[arg(long, default_value = "runs/trainer")]
    directory: PathBuf,
    /// Folder with the digits, as gzip-compressed IDX files
    #[arg(long, default_value = digits::FOLDER)]
    data: PathBuf,
}

impl Options {
    /// Images in a step of one of so many ranks.
    fn own_batch(&self, ranks: usize) -> Result<usize> {
        let batch_size = self.batch_size;
        ensure!(
            batch_size.is_multiple_of(ranks),
            "--batch-size {batch_size} cannot be divided among {ranks} ranks: take a multiple of {ranks}"
        );
        Ok(batch_size / ranks)
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    match (options.cost, options.ddp) {
        (true, _) => Ok(phalanx::spawn(options.ranks, || cost::measure(&options))?),
        (_, true) => Ok(phalanx::spawn(options.ranks, || train(&options))?),
        _ => train(&options),
    }
}

fn train(options: &Options) -> Result<()> {
    let group = phalanx::init()?;
    let (digits, unseen) = (Reader::new(options, "train")?, Reader::new(options, "t10k")?);
    let indices = InMemDataset::new((0..digits.len()).collect());
    let ranks = group.world_size().count();
    ensure!(options.ddp || ranks == 1, "{ranks} ranks would train a model each: start them with --ddp");
    let batch_size = options.own_batch(ranks)?;
    let (strategy, train): (TrainingStrategy<Classifier>, _) = if options.ddp {
        let strategy = DdpStrategy::new(&group); // the one line,
        let own = strategy.sampled(indices, 1); // and the other: this rank's samples
        (strategy.into(), loader(&digits, own, batch_size))
    } else {
        let builder = DataLoaderBuilder::new(digits).batch_size(batch_size).shuffle(1);
        (ExecutionStrategy::single(Device::flex().autodiff()).into(), builder.build(indices))
    };
    let valid = loader(&unseen, InMemDataset::new((0..unseen.len()).collect()), 250);
    let network = trained(&options.directory, train, valid, options.epochs, strategy)?;
    check(&network, &unseen.0, &group)
}

/// What a training leaves.
fn trained(
    directory: &Path,
    train: Loader,
    valid: Loader,
    epochs: usize,
    strategy: TrainingStrategy<Classifier>,
) -> Result<Network> {
    let device = Device::flex().autodiff();
    device.seed(1);
    let learner =
        Learner::new(Classifier { network: Network::new(&device) }, AdamWConfig::new().init(), 4e-3);
    let result = SupervisedTraining::new(directory, train, valid)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .num_epochs(epochs)
        .with_training_strategy(strategy)
        .launch(learner);
    match result.error {
        Some(error) => bail!("training failed: {error}"),
        None => Ok(result.model.network),
    }
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

impl Reader {
    fn new(options: &Options, half: &str) -> Result<Self> {
        Ok(Self(Arc::new(Digits::read(&options.data, half)?)))
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

type Loader = Arc<dyn DataLoader<Batch>>;

fn loader(reader: &Reader, indices: impl Dataset<usize> + 'static, batch_size: usize) -> Loader {
    DataLoaderBuilder::new(reader.clone()).batch_size(batch_size).build(indices)
}

/// The network, as the trainer calls it.
#[derive(Module, Debug)]
struct Classifier {
    network: Network,
}

impl Classifier {
    fn classify(&self, Batch { images, labels }: Batch) -> ClassificationOutput {
        let output = self.network.forward(images);
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        ClassificationOutput::new(loss.forward(output.clone(), labels.clone()), output, labels)
    }
}

impl TrainStep for Classifier {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Classifier {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        self.classify(batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_training_without_a_pass_is_refused() {
        assert!(Options::try_parse_from(["trainer", "--epochs", "1"]).is_ok());
        assert!(Options::try_parse_from(["trainer", "--epochs", "0"]).is_err());
    }

    #[test]
    fn a_batch_that_ranks_cannot_divide_is_refused() {
        let own =
            |batch_size, ranks| Options::parse_from(["trainer", "--batch-size", batch_size]).own_batch(ranks);
        assert_eq!(own("64", 2).unwrap(), 32);
        for (batch_size, ranks, remedy) in [("1", 2, "a multiple of 2"), ("64", 3, "a multiple of 3")] {
            let error = own(batch_size, ranks).unwrap_err().to_string();
            assert!(error.contains(remedy), "{error}");
        }
    }
}
