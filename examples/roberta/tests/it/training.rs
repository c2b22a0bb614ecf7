//! Training on ranks that are threads.

use std::path::Path;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};
use phalanx::sampler::DistributedSampler;
use phalanx::{ProcessGroup, WorldSize};
use phalanx_burn::parallel::tensor::TensorGroup;
use phalanx_tracking::{Console, RunState, RunStatus};
use rand_mt::Mt64;
use roberta::data::Dataset;
use roberta::loading::Loading;
use roberta::mesh::micro_batches;
use roberta::model::Stages;
use roberta::strategy::{Devices, Strategy};
use roberta::tasks::{Batch, Classification, Evaluation, MaskedLanguage, Part, Task};
use roberta::train::{Epoch, TrainOptions, evaluate, fit};
use roberta::{Classifier, Config, MaskedLm, Text, weights};

use crate::fixtures::{Corpus, Record, Tensors};

fn options(out: &Path) -> TrainOptions {
    TrainOptions {
        epochs: 3,
        batch_size: 4,
        accumulate: 1,
        num_workers: 1,
        lr: 5e-3,
        warmup: 0.1,
        weight_decay: 0.01,
        max_norm: 1.0,
        patience: None,
        save_every: 7,
        seed: 3,
        out: out.to_owned(),
    }
}

fn train<T: Task>(
    task: &Arc<T>,
    model: &T::Model,
    group: &ProcessGroup,
    options: &TrainOptions,
) -> anyhow::Result<Vec<Epoch>> {
    let devices = Devices::new(group.world_size().get(), Strategy::Ddp, 1);
    train_on(devices, task, model, group, options)
}

fn train_on<T: Task>(
    devices: Devices,
    task: &Arc<T>,
    model: &T::Model,
    group: &ProcessGroup,
    options: &TrainOptions,
) -> anyhow::Result<Vec<Epoch>> {
    fit(task, model.clone(), (devices, group), options, &Console::lines(std::io::sink()))
}

fn batches_of(batch_size: usize) -> Loading {
    Loading { batch_size, num_workers: 1 }
}

fn text(corpus: &Corpus) -> Text {
    Text::open(&corpus.path("tokenizer.json"), &corpus.config, 32).unwrap()
}

fn classification(corpus: &Corpus, dropout: f64) -> Arc<Classification> {
    let mut config = corpus.config.clone();
    (config.hidden_dropout_prob, config.attention_probs_dropout_prob) = (dropout, dropout);
    Arc::new(Classification {
        config,
        text: text(corpus),
        data: Dataset::read(corpus.folder.path()).unwrap(),
    })
}

/// The same model in every call, and in every run.
fn classifier(config: &Config) -> Classifier {
    Classifier::new(config, 2, &Device::flex().autodiff()).map(&mut Seeded::new(config))
}

/// As [`classifier`].
fn masked_lm(config: &Config) -> MaskedLm {
    MaskedLm::new(config, &Device::flex().autodiff()).map(&mut Seeded::new(config))
}

/// Draws the weights again, which a new model has from the process's random numbers: other tests draw those, too. How well a model
/// this small learns depends on its first weights.
struct Seeded {
    random: Mt64,
    std: f32,
}

impl Seeded {
    fn new(config: &Config) -> Self {
        Self { random: Mt64::new(5), std: config.initializer_range as f32 }
    }

    /// Normal, by Box and Muller.
    fn draw(&mut self) -> f32 {
        let mut uniform = || (self.random.next_u64() >> 40) as f32 / (1 << 24) as f32;
        let (radius, angle) = ((-2.0 * (1.0 - uniform()).ln()).sqrt(), std::f32::consts::TAU * uniform());
        self.std * radius * angle.cos()
    }
}

impl ModuleMapper for Seeded {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // Biases and norms begin with zeros and ones.
        if D < 2 {
            return param;
        }
        param.map(|old| {
            let weights: Vec<f32> = (0..old.shape().num_elements()).map(|_| self.draw()).collect();
            Tensor::from_data(TensorData::new(weights, old.shape()), &old.device()).require_grad()
        })
    }
}

/// What each of `ranks` ranks gets from `work`.
fn on_ranks<T: Send>(ranks: u32, work: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let groups = ProcessGroup::in_process(WorldSize::new(ranks).unwrap()).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| work(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn two_ranks_learn_to_tell_texts_apart_and_write_the_best_model() {
    let corpus = Corpus::new(60, 21);
    let out = corpus.path("run");
    let task = classification(&corpus, 0.0);
    let model = classifier(&task.config);
    let options = TrainOptions { epochs: 8, ..options(&out) };
    let epochs = on_ranks(2, |group| train(&task, &model, &group, &options).unwrap());
    assert_eq!(epochs[0], epochs[1]);
    let last = epochs[0].last().unwrap();
    assert!(last.held_out.accuracy > 0.8, "{last:?}");
    assert_eq!((last.epoch, last.steps), (8, 8 * 30_u64.div_ceil(4)));

    let record = Record::read(&out);
    let accuracies: Vec<f64> = epochs[0].iter().map(|epoch| epoch.held_out.accuracy).collect();
    assert_eq!(record.values("held_out/accuracy"), accuracies);
    assert_eq!(record.values("train/loss").len(), 64, "one for each step, of all ranks together");
    let mean = record.values("train/loss")[..8].iter().sum::<f64>() / 8.0;
    assert!((mean - epochs[0][0].train_loss).abs() < 0.01, "{mean} {:?}", epochs[0][0]);
    assert!(record.values("held_out/perplexity").is_empty(), "a label is no token");
    assert!(record.values("system/peak_memory_bytes/rank1").len() > 2);
    assert!(record.values("system/bytes_sent/rank1")[0] > 0.0);
    assert_eq!(RunStatus::read(&out).unwrap().unwrap().state(), RunState::Finished);

    let best = epochs[0]
        .iter()
        .map(|epoch| epoch.held_out)
        .reduce(|a, b| if task.is_better(&b, &a) { b } else { a });
    let config = Config::read(&out.join("best/config.json")).unwrap();
    assert_eq!(config.other["id2label"]["1"], "spam");
    let mut again = Classifier::new(&config, 2, &Device::flex().autodiff());
    let loaded = weights::load(&mut again, config.model_type, &out.join("best/model.safetensors")).unwrap();
    assert_eq!(loaded, weights::Loaded::default());
    let text = Text::open(&out.join("best/tokenizer.json"), &config, 32).unwrap();
    let task = Arc::new(Classification { config, text, data: task.data.clone() });
    let found = evaluate(&task, &again, &ProcessGroup::alone().unwrap(), batches_of(4)).unwrap();
    assert_same(&found, &best.unwrap());
}

fn assert_same(one: &Evaluation, other: &Evaluation) {
    assert_eq!(one.accuracy, other.accuracy);
    assert!((one.loss - other.loss).abs() < 1e-5, "{one:?} {other:?}");
}

#[test]
fn every_strategy_takes_the_same_steps_and_goes_on_where_it_was_ended() {
    let corpus = Corpus::new(32, 8);
    let task = classification(&corpus, 0.0);
    let model = classifier(&task.config);
    let run = |strategy| {
        let devices = Devices::new(2, strategy, 1);
        let options = TrainOptions { save_every: 10, ..options(&corpus.path(devices.name())) };
        let epochs = on_ranks(devices.processes(), |group| {
            train_on(devices, &task, &model, &group, &options).unwrap()
        });
        epochs[0].clone()
    };
    let expected = run(Strategy::Ddp);
    assert_eq!(expected.len(), 3);
    for strategy in [Strategy::Zero, Strategy::Dp, Strategy::Towers, Strategy::Single] {
        let found = run(strategy);
        assert_eq!(found.len(), expected.len(), "{strategy:?}");
        for (one, other) in expected.iter().zip(&found) {
            assert_eq!(one.steps, other.steps);
            let apart = [one.train_loss - other.train_loss, one.held_out.loss - other.held_out.loss];
            assert!(apart.iter().all(|apart| apart.abs() < 1e-4), "{strategy:?}: {one:?} {other:?}");
        }
        // It goes on at step 10, in the middle of the third epoch.
        without_the_last_checkpoint(&corpus.path(Devices::new(2, strategy, 1).name()));
        assert_eq!(run(strategy), found, "{strategy:?}");
    }
}

/// As if the run in `out` had ended before it was saved for the last time.
fn without_the_last_checkpoint(out: &Path) {
    let entries = std::fs::read_dir(out.join("checkpoints")).unwrap();
    let checkpoints = entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
    std::fs::remove_dir_all(checkpoints.max().unwrap()).unwrap();
}

/// The losses and the norms of the gradients of all steps, and what came of each epoch, with `devices`: of a run that is ended
/// and goes on, if `ended`.
fn curve<T: Task>(
    devices: Devices,
    task: &Arc<T>,
    model: &T::Model,
    (corpus, name): (&Corpus, &str),
    ended: bool,
) -> ([Vec<f64>; 2], Vec<Epoch>)
where
    T::Model: Sync,
{
    let out = corpus.path(name);
    let options = TrainOptions { batch_size: 2, epochs: 2, save_every: 3, ..options(&out) };
    let run = |options: &TrainOptions| {
        on_ranks(devices.processes(), |group| train_on(devices, task, model, &group, options).unwrap())
    };
    let mut all = run(&options);
    if ended {
        // It goes on at step 6, in the middle of the second epoch.
        without_the_last_checkpoint(&out);
        assert_eq!(run(&options), all, "{name}");
    }
    assert!(all.iter().all(|rank| *rank == all[0]), "{name}: {all:?}");
    let record = Record::read(&out);
    (["train/loss", "train/gradient_norm"].map(|name| record.values(name)), all.remove(0))
}

/// 2 x 2 ranks, data x tensor and data x pipeline, are one process.
fn meshes_are_one_process<T: Task>(corpus: &Corpus, task: &Arc<T>, model: &T::Model, what: &str)
where
    T::Model: Sync,
{
    let single = Devices::new(4, Strategy::Single, 1);
    let ([losses, norms], epochs) = curve(single, task, model, (corpus, &format!("{what} single")), false);
    assert_eq!((losses.len(), norms.len(), epochs.len()), (8, 8, 2));
    let range = |most: fn(f64, f64) -> f64| losses.iter().copied().fold(losses[0], most);
    assert!(range(f64::max) - range(f64::min) > 1e-2, "{what}: more than what is compared: {losses:?}");
    for strategy in [Strategy::Tensor, Strategy::Pipeline] {
        let devices = Devices::new(4, strategy, 2);
        let name = format!("{what} {}", devices.name());
        let ([ours, our_norms], ours_epochs) = curve(devices, task, model, (corpus, &name), true);
        let near = |ours: &[f64], expected: &[f64]| {
            let near = |(one, other): (&f64, &f64)| (one - other).abs() < 1e-4 * one.abs().max(1.0);
            assert!(ours.len() == 8, "{name}: {ours:?}");
            assert!(expected.iter().zip(ours).all(near), "{name}: {ours:?}, one process {expected:?}");
        };
        near(&ours, &losses);
        // Adam takes the same steps whatever a gradient is multiplied by; its norm shows a wrong factor.
        near(&our_norms, &norms);
        // In the first step nothing differs but the order of additions.
        for (ours, expected) in [(ours[0], losses[0]), (our_norms[0], norms[0])] {
            assert!((ours / expected - 1.0).abs() < 1e-5, "{name}: {ours} and not {expected}");
        }
        assert_eq!(ours_epochs.len(), epochs.len(), "{name}");
        for (one, other) in epochs.iter().zip(&ours_epochs) {
            assert_eq!(one.steps, other.steps);
            assert!((one.held_out.loss - other.held_out.loss).abs() < 1e-4, "{name}: {one:?} {other:?}");
        }
        // The best model is whole, as `transformers` reads it.
        let best = |name: &str| Tensors::read(&corpus.path(name).join("best/model.safetensors"));
        let (one, ours) = (best(&format!("{what} single")), best(&name));
        assert!(one.names().eq(ours.names()));
        one.names().for_each(|tensor| assert_near(&name, &ours.floats(tensor), &one.floats(tensor)));
    }
}

/// As near as Adam leaves parameters whose gradients are rounding errors, such as the bias of keys.
fn assert_near(what: &str, ours: &[f32], expected: &[f32]) {
    assert_eq!(ours.len(), expected.len(), "{what}");
    let norm =
        |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let apart = norm(&mut ours.iter().zip(expected).map(|(a, b)| a - b));
    let size = norm(&mut expected.iter().copied()).max((expected.len() as f64).sqrt() * 0.1);
    assert!(apart < 0.05 * size, "{what}: {apart} of {size}");
}

#[test]
fn a_classifier_on_a_mesh_is_one_process() {
    let corpus = Corpus::with_layers(32, 8, 3);
    let task = classification(&corpus, 0.0);
    let model = classifier(&task.config);
    meshes_are_one_process(&corpus, &task, &model, "classifier");
}

#[test]
fn a_masked_language_model_on_a_mesh_is_one_process() {
    let corpus = Corpus::with_layers(32, 4, 2);
    let data = Dataset::read(corpus.folder.path()).unwrap();
    let mut config = corpus.config.clone();
    (config.hidden_dropout_prob, config.attention_probs_dropout_prob) = (0.0, 0.0);
    let task = Arc::new(MaskedLanguage::new(config.clone(), text(&corpus), &data, 60));
    assert_eq!(task.examples(Part::Train).div_ceil(8), 4, "as many steps as the classifier's");
    let model = masked_lm(&config);
    meshes_are_one_process(&corpus, &task, &model, "language");
}

/// Copies the files of a run.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            std::fs::copy(entry.path(), to).unwrap();
        }
    }
}

#[test]
fn a_training_goes_on_with_another_strategy_and_other_numbers_of_ranks_and_parts() {
    let corpus = Corpus::with_layers(32, 8, 3);
    let task = classification(&corpus, 0.0);
    let model = classifier(&task.config);
    let all = [
        (4, Strategy::Ddp, 1),
        (4, Strategy::Single, 1),
        (2, Strategy::Dp, 1),
        (4, Strategy::Tensor, 2),
        (4, Strategy::Tensor, 4),
        (2, Strategy::Tensor, 2),
        (4, Strategy::Pipeline, 2),
        (3, Strategy::Pipeline, 3),
        (2, Strategy::Zero, 1),
    ]
    .map(|(count, strategy, parts)| Devices::new(count, strategy, parts));
    // As many texts in each step.
    let run = |devices: Devices, out: &Path| {
        let batch_size = 12 / devices.count as usize;
        let options = TrainOptions { batch_size, epochs: 2, save_every: 2, ..options(out) };
        on_ranks(devices.processes(), |group| train_on(devices, &task, &model, &group, &options))
    };
    let expected = run(all[1], &corpus.path("expected")).remove(0).unwrap();
    let losses = Record::read(&corpus.path("expected")).values("train/loss");
    assert_eq!(losses.len(), 6);
    // One of each format: of whole models, of divided layers, of stages, and of an optimizer's state that is divided by itself.
    for saved in [all[0], all[3], all[6], all[8]] {
        let out = corpus.path(&format!("{} saves", saved.name()));
        run(saved, &out).into_iter().for_each(|epochs| drop(epochs.unwrap()));
        // It goes on at step 4, in the middle of the second epoch.
        without_the_last_checkpoint(&out);
        for devices in all {
            let what = format!("{saved:?} to {devices:?}");
            let again = corpus.path(&what);
            copy(&out, &again);
            let outcomes = run(devices, &again);
            if (saved.strategy == Strategy::Zero) != (devices.strategy == Strategy::Zero) {
                for outcome in outcomes {
                    let error = format!("{:#}", outcome.unwrap_err());
                    assert!(error.contains("--strategy zero only if it was zero"), "{what}: {error}");
                }
                continue;
            }
            for epochs in outcomes {
                let (ours, expected) = (&epochs.unwrap()[1], &expected[1]);
                assert_eq!(ours.steps, expected.steps, "{what}");
                assert!(
                    (ours.held_out.loss - expected.held_out.loss).abs() < 1e-4,
                    "{what}: {ours:?} {expected:?}"
                );
            }
            let record = Record::read(&again);
            assert_eq!(record.steps("train/loss"), (1..=6).collect::<Vec<_>>(), "{what}: each step once");
            for (ours, expected) in record.values("train/loss").iter().zip(&losses) {
                assert!((ours - expected).abs() < 1e-4, "{what}: {ours} and not {expected}");
            }
        }
    }
}

#[test]
fn a_rank_has_the_vectors_and_the_scores_of_its_tokens() {
    let corpus = Corpus::with_layers(8, 4, 1);
    let model = MaskedLm::new(&corpus.config, &Device::flex().autodiff());
    let whole = corpus.config.vocab_size;
    let tokens = on_ranks(2, |group| {
        let part = model.clone().divided(&TensorGroup::new(&group)).unwrap();
        part.vocabulary().unwrap().weight.dims()[0]
    });
    assert_eq!(tokens, [whole.div_ceil(2), whole / 2]);
}

#[test]
fn what_cannot_be_divided_is_refused() {
    let corpus = Corpus::with_layers(32, 8, 2);
    let task = classification(&corpus, 0.1);
    let model = classifier(&task.config);
    let refused = |count, strategy, parts| {
        let devices = Devices::new(count, strategy, parts);
        let options = options(&corpus.path("refused"));
        let mut errors = on_ranks(count, |group| {
            format!("{:#}", train_on(devices, &task, &model, &group, &options).unwrap_err())
        });
        errors.remove(0)
    };
    let error = refused(2, Strategy::Tensor, 2);
    assert!(error.contains("take --dropout 0"), "{error}");
    let error = refused(3, Strategy::Tensor, 3);
    assert!(error.contains("--parts 3: a model of 2 layers of 4 heads"), "{error}");
    let error = refused(3, Strategy::Pipeline, 3);
    assert!(error.contains("--parts 3: a model of 2 layers of 4 heads"), "{error}");
    let error = refused(3, Strategy::Pipeline, 2);
    assert!(error.contains("3 ranks cannot be divided into replicas of 2"), "{error}");
}

#[test]
fn micro_batches_have_as_many_texts_each_and_something_to_predict() {
    let corpus = Corpus::new(24, 4);
    let data = Dataset::read(corpus.folder.path()).unwrap();
    let task = MaskedLanguage::new(corpus.config.clone(), text(&corpus), &data, 60);
    let items: Vec<_> = (0..6).map(|index| task.item(Part::Train, index, 3).unwrap()).collect();
    let batch = task.collate(&items, &Device::flex()).unwrap();
    for (wanted, expected) in [(1, 1), (2, 2), (3, 3), (4, 3), (5, 3), (6, 6)] {
        let parts = micro_batches(&batch, wanted);
        assert_eq!(parts.len(), expected, "{wanted}");
        let numbers = |tensor: Tensor<1, Int>| tensor.into_data().iter::<i64>().collect::<Vec<_>>();
        let [_, length] = batch.inputs.tokens.dims();
        let (mut places, mut targets) = (Vec::new(), Vec::new());
        for (index, part) in parts.into_iter().enumerate() {
            let [rows, _] = part.inputs.tokens.dims();
            assert_eq!((rows, part.count), (6 / expected, part.targets.dims()[0]));
            let before = (index * rows * length) as i64;
            places.extend(numbers(part.places.unwrap()).into_iter().map(|place| place + before));
            targets.extend(numbers(part.targets));
        }
        assert_eq!(places, numbers(batch.places.clone().unwrap()));
        assert_eq!(targets, numbers(batch.targets.clone()));
    }
    // A text in which nothing was masked is no micro-batch of its own.
    let mut rare = batch.clone();
    rare.places = batch.places.map(|places| places.narrow(0, 0, 1));
    rare.targets = batch.targets.narrow(0, 0, 1);
    assert_eq!(micro_batches(&rare, 4).len(), 1);
}

#[test]
fn gradients_are_not_accumulated_on_replicas_of_one_process() {
    let corpus = Corpus::new(8, 4);
    let task = classification(&corpus, 0.0);
    let model = classifier(&task.config);
    let group = ProcessGroup::alone().unwrap();
    let refused = |strategy, accumulate| {
        let options = TrainOptions { accumulate, ..options(&corpus.path("refused")) };
        let devices = Devices::new(2, strategy, 1);
        train_on(devices, &task, &model, &group, &options).unwrap_err().to_string()
    };
    let error = refused(Strategy::Dp, 2);
    assert!(error.contains("--accumulate 2 with --strategy dp"), "{error}");
    let error = refused(Strategy::Zero, 1);
    assert!(error.contains("--strategy zero with 2 devices takes 2 processes, there are 1"), "{error}");
}

#[test]
fn a_decay_by_which_weights_would_grow_is_refused() {
    let corpus = Corpus::new(8, 4);
    let task = classification(&corpus, 0.0);
    let model = classifier(&task.config);
    let group = ProcessGroup::alone().unwrap();
    for weight_decay in [-0.01, f64::NAN, f64::INFINITY] {
        let options = TrainOptions { weight_decay, ..options(&corpus.path("refused")) };
        let error = train(&task, &model, &group, &options).unwrap_err().to_string();
        assert!(error.contains("--weight-decay is"), "{error}");
    }
}

#[test]
fn a_run_without_an_epoch_is_refused() {
    let corpus = Corpus::new(8, 4);
    let task = classification(&corpus, 0.0);
    let options = TrainOptions { epochs: 0, ..options(&corpus.path("refused")) };
    let group = ProcessGroup::alone().unwrap();
    let error = train(&task, &classifier(&task.config), &group, &options).unwrap_err().to_string();
    assert!(error.contains("--epochs must be at least 1"), "{error}");
    assert!(!corpus.path("refused").exists());
}

#[test]
fn no_held_out_example_counts_twice_and_none_is_lost() {
    for held_out in [1, 2, 7] {
        let corpus = Corpus::new(8, held_out);
        let task = classification(&corpus, 0.1);
        let model = classifier(&task.config);
        let alone = evaluate(&task, &model, &ProcessGroup::alone().unwrap(), batches_of(100)).unwrap();
        // Three ranks: with one or two examples some have none.
        for found in on_ranks(3, |group| evaluate(&task, &model, &group, batches_of(2)).unwrap()) {
            assert_same(&found, &alone);
        }
    }
}

#[test]
fn workers_change_no_bit() {
    let corpus = Corpus::new(22, 7);
    let task = classification(&corpus, 0.0);
    let model = classifier(&task.config);
    let run = |num_workers: usize| {
        let out = corpus.path(&format!("{num_workers} workers"));
        let options = TrainOptions { num_workers, accumulate: 2, ..options(&out) };
        let epochs = on_ranks(2, |group| train(&task, &model, &group, &options).unwrap());
        (epochs, std::fs::read(out.join("best/model.safetensors")).unwrap())
    };
    let none = run(0);
    assert!(none == run(1) && none == run(3));
}

#[test]
fn examples_come_in_the_order_of_the_distributed_sampler_padded_and_masked_anew_in_each_epoch() {
    let corpus = Corpus::new(22, 7);
    let data = Dataset::read(corpus.folder.path()).unwrap();
    let task = Arc::new(MaskedLanguage::new(corpus.config.clone(), text(&corpus), &data, 60));
    let group = ProcessGroup::alone().unwrap();
    let loader = batches_of(5).training(&task, &group, 3, &Device::flex()).unwrap();
    let mut sampler = DistributedSampler::for_group(task.examples(Part::Train), &group).seed(3);
    let mut masks = Vec::new();
    for epoch in 0..2 {
        sampler.set_epoch(epoch);
        for (indices, batch) in sampler.indices().chunks(5).zip(&loader) {
            let batch = batch.unwrap();
            let texts =
                indices.iter().map(|&index| task.item(Part::Train, index, 0).unwrap().text.tokens.len());
            let lengths: Vec<usize> = texts.collect();
            let [rows, columns] = batch.inputs.tokens.dims();
            assert_eq!((rows, columns), (indices.len(), *lengths.iter().max().unwrap()));
            let padding: Vec<f32> = batch.inputs.bias.into_data().iter().collect();
            let seen: Vec<usize> =
                padding.chunks(columns).map(|row| row.iter().filter(|bias| **bias == 0.0).count()).collect();
            assert_eq!(seen, lengths);
        }
        let places = |batch: Batch| batch.places.unwrap().into_data().iter::<i64>().collect::<Vec<_>>();
        loader.set_epoch(epoch);
        masks.push(loader.iter().map(|batch| places(batch.unwrap())).collect::<Vec<_>>());
    }
    assert_ne!(masks[0], masks[1]);
}

#[test]
fn ranks_and_accumulation_take_the_steps_of_one_large_batch() {
    let corpus = Corpus::new(32, 8);
    let task = classification(&corpus, 0.0);
    let model = classifier(&task.config);
    let run = |name: &str, ranks, batch_size, accumulate| {
        let options = TrainOptions { batch_size, accumulate, ..options(&corpus.path(name)) };
        on_ranks(ranks, |group| train(&task, &model, &group, &options).unwrap()).remove(0)
    };
    let one = run("one", 1, 8, 1);
    for (name, epochs) in [("two ranks", run("ranks", 2, 4, 1)), ("accumulated", run("accumulated", 2, 2, 2))]
    {
        assert!(!one.is_empty() && one.len() == epochs.len(), "{name}: {epochs:?}");
        for (a, b) in one.iter().zip(&epochs) {
            assert_eq!(a.steps, b.steps, "{name}");
            assert!(
                (a.train_loss - b.train_loss).abs() < 1e-3
                    && (a.held_out.loss - b.held_out.loss).abs() < 1e-3,
                "{name}: {a:?} {b:?}"
            );
        }
    }
}

/// Else the rate of each step, and how many steps there are, would be another run's.
#[test]
fn a_training_goes_on_only_with_as_many_texts_in_a_step_however_they_are_accumulated() {
    let corpus = Corpus::new(32, 8);
    let task = classification(&corpus, 0.0);
    let model = classifier(&task.config);
    let out = corpus.path("run");
    let run = |ranks, batch_size, accumulate| {
        let options = TrainOptions { batch_size, accumulate, save_every: 10, ..options(&out) };
        on_ranks(ranks, |group| train(&task, &model, &group, &options)).remove(0)
    };
    let whole = run(2, 4, 1).unwrap();
    // It is to go on at step 10, in the middle of the third epoch.
    without_the_last_checkpoint(&out);
    for (ranks, batch_size, accumulate) in [(2, 4, 2), (1, 4, 1), (2, 8, 1)] {
        let error = format!("{:#}", run(ranks, batch_size, accumulate).unwrap_err());
        assert!(error.contains("start it with as many texts in a step"), "{error}");
    }
    let again = run(1, 4, 2).unwrap();
    assert_eq!(again[..2], whole[..2]);
    assert!(again[2].steps == 12 && (again[2].train_loss - whole[2].train_loss).abs() < 1e-3, "{again:?}");
    assert_eq!(Record::read(&out).steps("train/loss"), (1..=12).collect::<Vec<_>>(), "each step once");
}

#[test]
fn a_data_set_shorter_than_the_world_is_an_error_on_every_rank() {
    let corpus = Corpus::new(2, 1);
    let task = classification(&corpus, 0.1);
    let model = classifier(&task.config);
    let options = options(&corpus.path("few"));
    let errors = |task: &Arc<Classification>| {
        on_ranks(3, |group| train(task, &model, &group, &options).unwrap_err().to_string())
    };
    let few = errors(&task);
    assert!(few.iter().all(|error| error.contains("2 items are too few for 3 ranks")), "{few:?}");
    let data = task.data.clone().limited(Some(0), None);
    let none = Arc::new(Classification { config: task.config.clone(), text: text(&corpus), data });
    let none = errors(&none);
    assert!(none.iter().all(|error| error.contains("there must be examples to learn from")), "{none:?}");
}

#[test]
fn a_label_out_of_range_is_an_error_that_names_the_example_and_no_panic() {
    let corpus = Corpus::new(4, 2);
    let config = corpus.config.clone();
    let mut data = Dataset::read(corpus.folder.path()).unwrap();
    data.train[2].label = 2;
    let task = Arc::new(Classification { config, text: text(&corpus), data });
    let error = task.item(Part::HeldOut, 2, 0).unwrap_err().to_string();
    assert!(error.contains("example 2 was asked for, there are 2"), "{error}");
    let model = classifier(&task.config);
    for num_workers in [0, 2] {
        let options = TrainOptions { num_workers, ..options(&corpus.path("range")) };
        let error = train(&task, &model, &ProcessGroup::alone().unwrap(), &options).unwrap_err();
        let error = format!("{error:#}");
        assert!(
            error.contains("item 2 of the data set (epoch 0, worker 0 of rank 0): label 2 is out of range"),
            "{error}"
        );
    }
}

#[test]
fn training_ends_when_nothing_gets_better() {
    let corpus = Corpus::new(8, 4);
    let task = classification(&corpus, 0.1);
    let model = classifier(&task.config);
    // A rate that changes no f32: each epoch is as good as the first.
    let options = TrainOptions { epochs: 9, lr: 1e-30, patience: Some(2), ..options(&corpus.path("early")) };
    let epochs = on_ranks(2, |group| train(&task, &model, &group, &options).unwrap());
    assert_eq!(epochs[0].len(), 3);
    // Started again, it is over.
    let again = on_ranks(2, |group| train(&task, &model, &group, &options).unwrap());
    assert_eq!(again, epochs);
}

#[test]
fn another_number_of_ranks_does_not_go_on_from_a_checkpoint() {
    let corpus = Corpus::new(8, 4);
    let task = classification(&corpus, 0.1);
    let model = classifier(&task.config);
    let options = TrainOptions { epochs: 1, ..options(&corpus.path("run")) };
    on_ranks(2, |group| train(&task, &model, &group, &options).unwrap());
    let error = on_ranks(1, |group| train(&task, &model, &group, &options).unwrap_err().to_string());
    let [there, here] =
        [2, 1].map(|count| format!("(Devices {{ count: {count}, strategy: Ddp, parts: 1 }}, 4, 1, 3, 8)"));
    assert!(error[0].contains(&format!("{there}, this run has {here}")), "{error:?}");
}

#[test]
fn other_texts_of_the_same_number_are_no_part_of_a_training() {
    let corpus = Corpus::new(32, 8);
    let task = classification(&corpus, 0.0);
    let model = classifier(&task.config);
    let changed = |change: &dyn Fn(&mut Dataset)| {
        let mut data = task.data.clone();
        change(&mut data);
        Arc::new(Classification { config: task.config.clone(), text: text(&corpus), data })
    };
    let text_of = changed(&|data: &mut Dataset| data.train[5].text.push('!'));
    let label_of = changed(&|data: &mut Dataset| data.train[5].label = 1 - data.train[5].label);
    let held_out = changed(&|data: &mut Dataset| data.held_out[5].text.push('!'));

    // Hosts with a copy of the files each.
    for (other, said) in [(&text_of, "fingerprint"), (&held_out, "rank 1 has other examples than rank 0")] {
        let options = options(&corpus.path("hosts"));
        let errors = on_ranks(2, |group| {
            let task = if group.rank().is_main() { &task } else { other };
            format!("{:#}", train(task, &model, &group, &options).unwrap_err())
        });
        assert!(errors.iter().all(|error| error.contains(said)), "{errors:?}");
    }

    // Files that were changed before the run goes on at step 10, in the middle of the third epoch.
    let out = corpus.path("run");
    let run = |task: &Arc<Classification>| {
        let options = TrainOptions { save_every: 10, ..options(&out) };
        on_ranks(2, |group| train(task, &model, &group, &options)).remove(0)
    };
    let whole = run(&task).unwrap();
    without_the_last_checkpoint(&out);
    for other in [&text_of, &label_of] {
        let error = format!("{:#}", run(other).unwrap_err());
        assert!(error.contains("within a pass over another data set"), "{error}");
    }
    assert_eq!(run(&task).unwrap(), whole);
}

#[test]
fn another_order_of_labels_does_not_go_on_from_a_checkpoint() {
    let corpus = Corpus::new(8, 4);
    let task = classification(&corpus, 0.1);
    let model = classifier(&task.config);
    let options = TrainOptions { epochs: 1, ..options(&corpus.path("run")) };
    on_ranks(1, |group| train(&task, &model, &group, &options).unwrap());
    std::fs::write(corpus.path("labels.json"), r#"["spam", "ham"]"#).unwrap();
    let task = classification(&corpus, 0.1);
    let error = on_ranks(1, |group| train(&task, &model, &group, &options).unwrap_err().to_string());
    let expected = "is of a model with the labels [ham, spam], in this order, and this run has [spam, ham]";
    assert!(error[0].contains(expected), "{error:?}");
}

#[test]
fn a_masked_language_model_learns_and_its_perplexity_falls() {
    let corpus = Corpus::new(60, 10);
    let data = Dataset::read(corpus.folder.path()).unwrap();
    let task = Arc::new(MaskedLanguage::new(corpus.config.clone(), text(&corpus), &data, 60));
    let items: Vec<_> = (0..3).map(|index| task.item(Part::HeldOut, index, 7).unwrap()).collect();
    let batch = task.collate(&items, &Device::flex()).unwrap();
    assert_eq!(batch.places.unwrap().dims(), batch.targets.dims());
    let model = MaskedLm::new(&corpus.config, &Device::flex().autodiff());
    let before = evaluate(&task, &model, &ProcessGroup::alone().unwrap(), batches_of(4)).unwrap();
    let options = TrainOptions { epochs: 4, ..options(&corpus.path("language")) };
    let epochs = on_ranks(2, |group| train(&task, &model, &group, &options).unwrap()).remove(0);
    assert_eq!(Record::read(&corpus.path("language")).values("held_out/perplexity").len(), 4);
    let perplexities: Vec<f64> = epochs.iter().map(|epoch| epoch.held_out.perplexity()).collect();
    let (first, last) = (before.loss.exp(), perplexities[3]);
    assert!(first > 200.0 && last < first / 2.0, "{first} {perplexities:?}");
    assert!(perplexities[0] < first && last < perplexities[0], "{first} {perplexities:?}");
}

#[test]
fn a_model_whose_loss_is_not_a_number_is_never_the_best() {
    let corpus = Corpus::new(8, 4);
    let data = Dataset::read(corpus.folder.path()).unwrap();
    let language = MaskedLanguage::new(corpus.config.clone(), text(&corpus), &data, 60);
    let labels = classification(&corpus, 0.1);
    let with = |loss| Evaluation { loss, accuracy: 0.5 };
    let [broken, worse, better] = [f64::NAN, 2.0, 1.0].map(with);
    for (new, best, expected) in [
        (better, worse, true),
        (worse, better, false),
        (worse, broken, true),
        (broken, worse, false),
        (broken, broken, false),
    ] {
        assert_eq!(language.is_better(&new, &best), expected, "{new:?} {best:?}");
        assert_eq!(labels.is_better(&new, &best), expected, "{new:?} {best:?}");
    }
    // One step, after which products of weights are infinite: the first model is none, either.
    let out = corpus.path("broken");
    let options = TrainOptions { epochs: 1, batch_size: 8, lr: 1e30, warmup: 0.0, ..options(&out) };
    let model = classifier(&labels.config);
    let epochs = on_ranks(1, |group| train(&labels, &model, &group, &options).unwrap());
    assert!(epochs[0][0].held_out.loss.is_nan(), "{epochs:?}");
    assert!(!out.join("best").exists());
}

#[test]
fn a_full_disk_under_the_best_model_is_everybody_s_error_and_nothing_is_lost() {
    let corpus = Corpus::new(24, 8);
    let task = classification(&corpus, 0.1);
    let model = classifier(&task.config);
    // One after the other: ranks that are threads share the random numbers of dropout, so that only the model before is compared.
    let out = corpus.path("full");
    let one = TrainOptions { epochs: 1, ..options(&out) };
    on_ranks(2, |group| train(&task, &model, &group, &one).unwrap());
    let before = std::fs::read(out.join("best/model.safetensors")).unwrap();

    // Writing there fails as on a disk without room.
    std::fs::create_dir(out.join("best.new")).unwrap();
    std::os::unix::fs::symlink("/dev/full", out.join("best.new/config.json")).unwrap();
    let more = TrainOptions { epochs: 12, save_every: 1, ..options(&out) };
    let errors = on_ranks(2, |group| format!("{:#}", train(&task, &model, &group, &more).unwrap_err()));
    let cause = "best.new/config.json cannot be written: No space left on device";
    assert!(errors.iter().all(|error| error.contains(cause)), "{errors:?}");
    assert!(std::fs::read(out.join("best/model.safetensors")).unwrap() == before, "the best model stays");
    let status = RunStatus::read(&out).unwrap().unwrap();
    assert!(status.state() == RunState::Failed && status.cause().unwrap().contains(cause), "{status:?}");

    // There is room again. Beside it lies what a process left that was killed while it wrote the weights.
    std::fs::remove_file(out.join("best.new/config.json")).unwrap();
    std::fs::write(out.join("best.new/model.safetensors.7-0.tmp"), "half").unwrap();
    let epochs = on_ranks(2, |group| train(&task, &model, &group, &more).unwrap());
    assert_eq!(epochs[0].len(), 12);
    let record = Record::read(&out);
    assert_eq!(record.steps("train/loss"), (1..=36).collect::<Vec<_>>(), "each once");
    assert_eq!(record.steps("held_out/loss"), (1..=12).map(|epoch| 3 * epoch).collect::<Vec<_>>());
    assert!(!out.join("best.new").exists());
    assert_eq!(std::fs::read_dir(out.join("best")).unwrap().count(), 3, "the model's files alone");
}

#[test]
fn a_full_disk_under_the_record_ends_no_training() {
    let corpus = Corpus::new(8, 4);
    let task = classification(&corpus, 0.1);
    let model = classifier(&task.config);
    let out = corpus.path("full");
    std::fs::create_dir(&out).unwrap();
    std::os::unix::fs::symlink("/dev/full", out.join("metrics.jsonl")).unwrap();
    let epochs = on_ranks(2, |group| train(&task, &model, &group, &options(&out)).unwrap());
    assert_eq!(epochs[0].len(), 3);
    let status = RunStatus::read(&out).unwrap().unwrap();
    let sink = &status.attempts()[0].sinks[0];
    assert_eq!((status.state(), sink.name.as_str()), (RunState::Finished, "metrics.jsonl"));
    assert!(sink.lost > 3 && sink.error.contains("No space left on device"), "{sink:?}");
    assert!(out.join("best/model.safetensors").exists());
}
