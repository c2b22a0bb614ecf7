//! Burn's trainer over several ranks: the model that one rank trains with the whole batch, and what is rank 0's alone.

#[cfg(feature = "data")]
mod loaders;
mod samples;

use std::path::Path;
use std::sync::Arc;

use crate::common::{device, distance, floats, run};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::{Dataset, DatasetError, InMemDataset};
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::optim::momentum::MomentumConfig;
use burn::tensor::{Device, Tensor, TensorData};
use burn::train::logger::InMemoryMetricLogger;
use burn::train::metric::LossMetric;
use burn::train::metric::store::{Aggregate, EventStoreClient, Split};
use burn::train::{
    EarlyStoppingStrategy, InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput,
    TrainStep, TrainingStrategy,
};
use parking_lot::Mutex;
use phalanx::reducer::ReducerOptions;
use phalanx::reducer::hooks::{CommHook, Compressed, GradBucket, HookState, Pending, PostLocalSgd};
use phalanx::sampler::DistributedSampler;
use phalanx::{Communicator, ProcessGroup, Rank};
use phalanx_burn::DdpOptions;
use phalanx_burn::parallel::tensor::{ColumnParallelLinear, RowParallelLinear, TensorGroup};
use phalanx_burn::train::DdpStrategy;

type Sample = ([f32; 4], f32);

#[derive(Clone)]
struct Rows;

#[derive(Clone, Debug)]
struct Batch {
    x: Tensor<2>,
    y: Tensor<2>,
}

impl Batcher<Sample, Batch> for Rows {
    fn batch(&self, items: Vec<Sample>, device: &Device) -> Batch {
        let x: Vec<f32> = items.iter().flat_map(|(x, _)| *x).collect();
        let y: Vec<f32> = items.iter().map(|(_, y)| *y).collect();
        Batch {
            x: Tensor::from_data(TensorData::new(x, [items.len(), 4]), device),
            y: Tensor::from_data(TensorData::new(y, [items.len(), 1]), device),
        }
    }
}

#[derive(Module, Debug)]
struct Net {
    hidden: Linear,
    norm: Option<BatchNorm>,
    head: Linear,
    /// Never used.
    idle: Option<Linear>,
    /// None, or one layer that computes twice: one value of it, or two clones.
    middle: Vec<Linear>,
}

impl Net {
    fn new(norm: bool) -> Self {
        let device = device();
        Self {
            hidden: LinearConfig::new(4, 8).init(&device),
            norm: norm.then(|| BatchNormConfig::new(8).init(&device)),
            head: LinearConfig::new(8, 1).init(&device),
            idle: None,
            middle: Vec::new(),
        }
    }

    fn twin(&self) -> Self {
        let used = Self { idle: None, middle: Vec::new(), ..self.clone() };
        let twin = Self::new(self.norm.is_some()).load_record(used.into_record());
        let middle = self.middle.first().map(|layer| {
            let twin = LinearConfig::new(8, 8).init(&device()).load_record(layer.clone().into_record());
            vec![twin; self.middle.len()]
        });
        Self { idle: self.idle.clone(), middle: middle.unwrap_or_default(), ..twin }
    }

    fn output(&self, Batch { x, y }: Batch) -> RegressionOutput {
        let x = self.hidden.forward(x).tanh();
        let x = self.norm.iter().fold(x, |x, norm| norm.forward(x));
        let twice = self.middle.iter().cycle().take(2);
        let x = twice.fold(x, |x, layer| layer.forward(x).tanh());
        let output = self.head.forward(x);
        RegressionOutput::new((output.clone() - y.clone()).powi_scalar(2).mean(), output, y)
    }
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        let output = self.output(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> RegressionOutput {
        self.output(batch)
    }
}

/// Adds to the gradients by hand.
#[derive(Module, Debug)]
struct ByHand {
    net: Net,
}

impl TrainStep for ByHand {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        let output = self.net.output(batch);
        let mut trained = TrainOutput::new(self, output.loss.backward(), output);
        let bias = self.net.head.bias.as_ref().unwrap();
        trained.grads.register(bias.id, Tensor::<1>::ones([1], &device().inner()));
        trained
    }
}

impl InferenceStep for ByHand {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> RegressionOutput {
        self.net.output(batch)
    }
}

/// Of each layer this rank has a part.
#[derive(Module, Debug)]
struct Divided {
    hidden: ColumnParallelLinear,
    head: RowParallelLinear,
}

impl Divided {
    fn output(&self, Batch { x, y }: Batch) -> RegressionOutput {
        let output = self.head.forward(self.hidden.forward(x).tanh());
        RegressionOutput::new((output.clone() - y.clone()).powi_scalar(2).mean(), output, y)
    }
}

impl TrainStep for Divided {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        let output = self.output(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Divided {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> RegressionOutput {
        self.output(batch)
    }
}

/// `order` says which sample of the data comes where.
fn data(order: &[usize]) -> InMemDataset<Sample> {
    let sample = |i: &usize| {
        let x = [0, 1, 2, 3].map(|j| ((i * i * 7 + j * 13) as f32 * 0.1).sin());
        (x, x[0] - 2.0 * x[1] + x[2] * x[3])
    };
    InMemDataset::new(order.iter().map(sample).collect())
}

fn loader(order: &[usize], batch: usize) -> Arc<dyn DataLoader<Batch>> {
    DataLoaderBuilder::new(Rows).batch_size(batch).build(data(order))
}

/// Notes which samples are read.
struct Noting {
    data: InMemDataset<Sample>,
    seen: Arc<Mutex<Vec<usize>>>,
}

impl Noting {
    fn new(samples: usize) -> (Self, Arc<Mutex<Vec<usize>>>) {
        let seen = Arc::<Mutex<Vec<usize>>>::default();
        (Self { data: data(&(0..samples).collect::<Vec<_>>()), seen: Arc::clone(&seen) }, seen)
    }
}

impl Dataset<Sample> for Noting {
    fn get(&self, index: usize) -> Result<Sample, DatasetError> {
        self.seen.lock().push(index);
        self.data.get(index)
    }

    fn len(&self) -> usize {
        self.data.len()
    }
}

const TRAIN: usize = 24;
const VALID: usize = 11;
const EPOCHS: usize = 3;

/// Rank r's stretch, so that the batches of all ranks are those of one process.
fn distributed(ranks: usize, batch: usize) -> Vec<usize> {
    let part = |rank: usize| (0..TRAIN).filter(move |i| i / batch % ranks == rank);
    (0..ranks).flat_map(part).collect()
}

/// What a training leaves.
struct Trained {
    weights: Vec<Vec<f32>>,
    /// Of each epoch, training and validation.
    losses: Vec<[Option<f64>; 2]>,
}

/// Notes what the metrics are when the decision is due, and stops after some epoch.
#[derive(Clone)]
struct Watch {
    stop_after: usize,
    losses: Arc<Mutex<Vec<[Option<f64>; 2]>>>,
}

impl EarlyStoppingStrategy for Watch {
    fn should_stop(&mut self, epoch: usize, store: &EventStoreClient) -> bool {
        let loss = |split| store.find_metric("Loss", epoch, Aggregate::Mean, &split);
        self.losses.lock().push([loss(Split::Train), loss(Split::Valid)]);
        epoch >= self.stop_after
    }
}

struct Setup {
    accumulate: Option<usize>,
    stop_after: usize,
}

fn train(
    net: Net,
    loaders: (Arc<dyn DataLoader<Batch>>, Arc<dyn DataLoader<Batch>>),
    folder: &Path,
    setup: &Setup,
    strategy: TrainingStrategy<Net>,
) -> Trained {
    let losses = Arc::default();
    let mut training = SupervisedTraining::new(folder, loaders.0, loaders.1)
        .metrics((LossMetric::new(),))
        .with_metric_logger(InMemoryMetricLogger::default())
        .with_application_logger(None)
        .with_default_checkpointers()
        .early_stopping(Watch { stop_after: setup.stop_after, losses: Arc::clone(&losses) })
        .num_epochs(EPOCHS)
        .with_training_strategy(strategy);
    if let Some(parts) = setup.accumulate {
        training = training.grads_accumulation(parts);
    }
    let result = training.launch(Learner::new(net, SgdConfig::new().init(), 0.1));
    assert!(result.error.is_none(), "{:?}", result.error);
    Trained { weights: floats(&result.model), losses: losses.lock().clone() }
}

fn check(ranks: usize, setup: &Setup) {
    let batch = 4;
    let net = Net::new(false);
    let everything: Vec<usize> = (0..TRAIN).collect();
    let valid: Vec<usize> = (100..100 + VALID).collect();
    let folder = tempfile::tempdir().unwrap();
    let expected = train(
        net.twin(),
        (loader(&everything, ranks * batch), loader(&valid, VALID)),
        folder.path(),
        setup,
        TrainingStrategy::default(),
    );
    let folders: Vec<_> = (0..ranks).map(|_| tempfile::tempdir().unwrap()).collect();
    let trained = run(ranks as u32, |group: ProcessGroup| {
        let rank = group.rank().index();
        // Only rank 0 has the model that counts.
        let net = if rank == 0 { net.twin() } else { Net::new(false) };
        let loaders = (loader(&distributed(ranks, batch), batch), loader(&valid, VALID));
        train(net, loaders, folders[rank].path(), setup, DdpStrategy::new(&group).into())
    });
    for ours in &trained {
        assert_eq!(ours.weights, trained[0].weights, "the replicas differ");
        assert!(distance(&ours.weights, &expected.weights) < 1e-5);
    }
    // The metrics are those of all samples.
    let epochs = setup.stop_after.min(EPOCHS);
    assert_eq!(trained[0].losses.len(), epochs);
    for (ours, theirs) in trained[0].losses.iter().zip(&expected.losses) {
        for (ours, theirs) in ours.iter().zip(theirs) {
            let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
            assert!((ours - theirs).abs() < 1e-5 * theirs.abs(), "{ours} {theirs}");
        }
    }
    // Decisions and checkpoints are rank 0's.
    for (rank, folder) in folders.iter().enumerate() {
        let checkpoints = std::fs::read_dir(folder.path().join("checkpoint")).unwrap().count();
        assert_eq!(checkpoints > 0, rank == 0, "rank {rank} has {checkpoints} checkpoints");
        assert!(rank == 0 || trained[rank].losses.is_empty());
    }
}

#[test]
fn ranks_train_what_one_process_trains_with_the_whole_batch() {
    for ranks in 1..=3 {
        check(ranks, &Setup { accumulate: None, stop_after: EPOCHS });
    }
}

#[test]
fn all_ranks_stop_early_when_rank_0_says_so() {
    check(2, &Setup { accumulate: None, stop_after: 2 });
}

#[test]
fn accumulated_gradients_are_averaged_once() {
    check(2, &Setup { accumulate: Some(3), stop_after: EPOCHS });
}

#[test]
fn a_layer_that_stands_in_two_places_trains_as_one_that_computes_twice() {
    let setup = Setup { accumulate: None, stop_after: EPOCHS };
    let valid: Vec<usize> = (100..100 + VALID).collect();
    let layer: Linear = LinearConfig::new(8, 8).init(&device());
    let once = Net { middle: vec![layer.clone()], ..Net::new(false) };
    for ranks in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let everything: Vec<usize> = (0..TRAIN).collect();
        let loaders = (loader(&everything, 4 * ranks), loader(&valid, VALID));
        let expected = train(once.twin(), loaders, folder.path(), &setup, TrainingStrategy::default());
        let tied = Net { middle: vec![layer.clone(); 2], ..once.clone() };
        let trained = run(ranks as u32, |group| {
            let folder = tempfile::tempdir().unwrap();
            let loaders = (loader(&distributed(ranks, 4), 4), loader(&valid, VALID));
            train(tied.twin(), loaders, folder.path(), &setup, DdpStrategy::new(&group).into()).weights
        });
        for ours in &trained {
            assert_eq!(ours[4..6], ours[6..8], "{ranks} ranks: both places have the same values");
            let apart = distance(&ours[..6], &expected.weights);
            assert!(apart < 1e-5, "{ranks} ranks: {apart:e}");
        }
    }
}

#[test]
fn running_statistics_are_rank_0_s_on_every_rank() {
    let valid: Vec<usize> = (100..100 + VALID).collect();
    let statistics = run(2, |group| {
        let folder = tempfile::tempdir().unwrap();
        let loaders = (loader(&distributed(2, 4), 4), loader(&valid, 3));
        let setup = Setup { accumulate: None, stop_after: EPOCHS };
        train(Net::new(true), loaders, folder.path(), &setup, DdpStrategy::new(&group).into()).weights
    });
    assert_eq!(statistics[0], statistics[1]);
}

#[test]
fn models_that_differ_end_the_training_of_every_rank() {
    run(2, |group| {
        let folder = tempfile::tempdir().unwrap();
        let net = Net::new(group.rank().is_main());
        let training = SupervisedTraining::new(folder.path(), loader(&[1, 2, 3, 4], 2), loader(&[5, 6], 2))
            .with_application_logger(None)
            .with_training_strategy(DdpStrategy::new(&group).into());
        let result = training.launch(Learner::new(net, SgdConfig::new().init(), 0.1));
        let error = result.error.unwrap().to_string();
        assert!(error.contains("norm") || error.contains("parameter"), "{error}");
    });
}

#[test]
fn ranks_that_train_otherwise_are_an_error_on_every_rank() {
    let order: Vec<usize> = (0..TRAIN).collect();
    for (what, expected) in [
        ("epochs", "the number of epochs of rank 0 is 3, and that of rank 1 is 4"),
        ("parts", "the number of batches for a step of rank 0 is 1, and that of rank 1 is 2"),
        ("samples", "the number of training samples of rank 0 is 24, and that of rank 1 is 12"),
        ("validation", "the number of validation samples of rank 0 is 2, and that of rank 1 is 3"),
        ("rate", "the last one was 0.1 on rank 0, and 0.2 on rank 1"),
        ("momentum", "after epoch 1 the parameters of rank 1 are others than those of rank 0"),
    ] {
        let errors = run(2, |group| {
            let is_other = |name: &str| name == what && !group.rank().is_main();
            let folder = tempfile::tempdir().unwrap();
            let train_loader = loader(&order[..if is_other("samples") { TRAIN / 2 } else { TRAIN }], 4);
            let valid_loader = loader(&order[..if is_other("validation") { 3 } else { 2 }], 2);
            let mut training = SupervisedTraining::new(folder.path(), train_loader, valid_loader)
                .with_application_logger(None)
                .num_epochs(if is_other("epochs") { EPOCHS + 1 } else { EPOCHS })
                .with_training_strategy(DdpStrategy::new(&group).into());
            if is_other("parts") {
                training = training.grads_accumulation(2);
            }
            let momentum = is_other("momentum").then(MomentumConfig::new);
            let rate: f64 = if is_other("rate") { 0.2 } else { 0.1 };
            let learner =
                Learner::new(Net::new(false), SgdConfig::new().with_momentum(momentum).init(), rate);
            training.launch(learner).error.expect("an error on every rank").to_string()
        });
        for error in errors {
            assert!(error.contains(expected), "{what}: {error}");
        }
    }
}

#[test]
fn gradients_that_a_step_makes_by_hand_are_refused() {
    for parts in [None, Some(2)] {
        for error in run(2, |group| {
            let folder = tempfile::tempdir().unwrap();
            let mut training =
                SupervisedTraining::new(folder.path(), loader(&distributed(2, 4), 4), loader(&[5, 6], 2))
                    .with_application_logger(None)
                    .with_training_strategy(DdpStrategy::new(&group).into());
            if let Some(parts) = parts {
                training = training.grads_accumulation(parts);
            }
            let model = ByHand { net: Net::new(false) };
            let result = training.launch(Learner::new(model, SgdConfig::new().init(), 0.1));
            result.error.expect("an error on every rank").to_string()
        }) {
            assert!(error.contains("has not computed") && error.contains("TrainStep::optimize"), "{error}");
        }
    }
}

/// Each of the ranks that divide layers would be a rank 0 that writes its part to the one directory.
#[test]
fn a_part_of_a_model_is_refused() {
    run(2, |group| {
        let (device, tensor) = (device(), TensorGroup::new(&group));
        let hidden = ColumnParallelLinear::new(LinearConfig::new(4, 8).init(&device), &tensor).unwrap();
        let head = RowParallelLinear::new(LinearConfig::new(8, 1).init(&device), &tensor).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let data = ProcessGroup::alone().unwrap();
        let training = SupervisedTraining::new(folder.path(), loader(&[1, 2, 3, 4], 2), loader(&[5, 6], 2))
            .with_application_logger(None)
            .with_training_strategy(DdpStrategy::new(&data).into());
        let model = Divided { hidden, head };
        let result = training.launch(Learner::new(model, SgdConfig::new().init(), 0.1));
        let error = result.error.expect("an error on every rank").to_string();
        assert!(error.contains("DdpStrategy") && error.contains("hidden.weight"), "{error}");
    });
}

/// Samples of which one cannot be read.
struct Broken(InMemDataset<Sample>);

impl Dataset<Sample> for Broken {
    fn get(&self, index: usize) -> Result<Sample, DatasetError> {
        match index % 8 {
            5 => Err(DatasetError::new(std::io::Error::other("sample 5 is torn"))),
            _ => self.0.get(index),
        }
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

#[test]
fn an_error_of_one_rank_is_the_error_of_every_rank() {
    run(3, |group| {
        let folder = tempfile::tempdir().unwrap();
        let order: Vec<usize> = (0..TRAIN).collect();
        let train_loader = match group.rank().index() {
            1 => DataLoaderBuilder::new(Rows).batch_size(4).build(Broken(data(&order))),
            _ => loader(&order, 4),
        };
        let training = SupervisedTraining::new(folder.path(), train_loader, loader(&[5, 6], 2))
            .with_application_logger(None)
            .num_epochs(EPOCHS)
            .with_training_strategy(DdpStrategy::new(&group).into());
        let result = training.launch(Learner::new(Net::new(false), SgdConfig::new().init(), 0.1));
        let error = result.error.expect("an error on every rank").to_string();
        assert!(error.contains("sample 5 is torn"), "{error}");
        assert!(result.interrupted.is_none());
    });
}

/// The weights after a training of `net` on two ranks, the same on both, or why there was none.
fn configured(
    net: &Net,
    configure: impl Fn(DdpStrategy) -> DdpStrategy + Sync,
) -> Result<Vec<Vec<f32>>, String> {
    let mut trained = run(2, |group| {
        let folder = tempfile::tempdir().unwrap();
        let training =
            SupervisedTraining::new(folder.path(), loader(&distributed(2, 4), 4), loader(&[5, 6], 2))
                .with_application_logger(None)
                .num_epochs(EPOCHS)
                .with_training_strategy(configure(DdpStrategy::new(&group)).into());
        let result = training.launch(Learner::new(net.twin(), SgdConfig::new().init(), 0.1));
        result.error.map_or_else(|| Ok(floats(&result.model)), |error| Err(error.to_string()))
    });
    let last = trained.pop().unwrap();
    let alike = |other: &Result<Vec<Vec<f32>>, String>| other == &last || (other.is_err() && last.is_err());
    trained.iter().for_each(|other| assert!(alike(other), "the replicas differ: {other:?} {last:?}"));
    last
}

/// Local SGD, as a hook of the program's own.
struct OwnLocal(PostLocalSgd);

impl CommHook for OwnLocal {
    fn describe(&self) -> String {
        "own local".to_owned()
    }

    fn start(&mut self, group: &dyn Communicator, bucket: GradBucket) -> phalanx::Result<Pending> {
        self.0.start(group, bucket)
    }

    fn adopt(&mut self, group: &dyn Communicator, root: Rank) -> phalanx::Result<()> {
        self.0.adopt(group, root)
    }

    fn state(&self) -> phalanx::Result<HookState> {
        self.0.state()
    }

    fn load(&mut self, state: HookState) -> phalanx::Result<()> {
        self.0.load(state)
    }

    fn averages_over_all(&self) -> bool {
        self.0.averages_over_all()
    }
}

#[test]
fn hooks_that_do_not_average_over_all_ranks_are_refused() {
    let net = Net::new(false);
    let refused = |outcome: Result<Vec<Vec<f32>>, String>| {
        let error = outcome.unwrap_err();
        assert!(error.contains("does not average over all ranks"), "{error}");
    };
    // At the beginning, also if the first steps are averaged over all.
    for start in [0, 1_000_000] {
        refused(configured(&net, |strategy| strategy.with_comm_hook(move || PostLocalSgd::new(start))));
    }
    // In the first step that is not.
    refused(configured(&net, |strategy| strategy.with_comm_hook(|| OwnLocal(PostLocalSgd::new(1)))));
}

#[test]
fn options_and_hooks_are_those_of_a_ddp() {
    let mut net = Net::new(false);
    let plain = configured(&net, |strategy| strategy).unwrap();
    let viewed = |strategy: DdpStrategy| {
        let mut options = DdpOptions::default();
        options.gradient_as_bucket_view = true;
        options.reducer = ReducerOptions::default().bucket_cap_mb(0.0001);
        strategy.with_options(options)
    };
    assert_eq!(configured(&net, viewed).unwrap(), plain);
    let compressed = configured(&net, |strategy| strategy.with_comm_hook(Compressed::bf16)).unwrap();
    let away = distance(&compressed, &plain);
    assert!(away > 0.0 && away < 0.05, "{away:e}");

    net.idle = Some(LinearConfig::new(2, 2).init(&device()));
    let error = configured(&net, |strategy| strategy).unwrap_err();
    assert!(error.contains("idle.weight"), "{error}");
    let finding = |strategy: DdpStrategy| {
        let mut options = DdpOptions::default();
        options.reducer = ReducerOptions::default().find_unused_parameters(true);
        strategy.with_options(options)
    };
    assert_eq!(configured(&net, finding).unwrap()[..plain.len()], plain);
}
