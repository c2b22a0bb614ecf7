//! Loaders of `phalanx-data` under Burn's trainer: with `DdpStrategy` they are what Burn's own loaders are.

use burn::data::dataloader::{DataLoaderIterator, Progress};
use burn::train::checkpoint::KeepLastNCheckpoints;
use phalanx_burn::data::{BurnLoader, FromBurn, ToBurn};
use phalanx_data::InMemory;

use super::*;

/// The samples as a data set of `phalanx-data`.
fn ours(order: &[usize]) -> InMemory<Sample> {
    let data = data(order);
    (0..data.len()).map(|index| data.get(index).unwrap()).collect()
}

/// The loader of `dataset` in batches of 4, with workers.
fn burn_loader<D>(dataset: D, shuffle: bool, workers: usize) -> Arc<dyn DataLoader<Batch>>
where
    D: phalanx_data::Dataset<Item = Sample> + 'static,
{
    let loader =
        phalanx_data::DataLoader::builder(dataset).batch_size(4).shuffle(shuffle).num_workers(workers);
    BurnLoader::new(&loader.build().unwrap(), Rows, &device()).shared()
}

/// Notes the first input of each sample that is read. They tell samples apart.
fn noting(seen: &Arc<Mutex<Vec<f32>>>) -> impl Fn(Sample) -> phalanx::Result<Sample> + Send + Sync + 'static {
    let seen = Arc::clone(seen);
    move |sample| {
        seen.lock().push(sample.0[0]);
        Ok(sample)
    }
}

#[test]
fn a_strategy_s_samples_through_a_loader_with_workers_train_what_burn_s_loader_trains() {
    const SAMPLES: usize = 25;
    for ranks in [2, 3] {
        let net = Net::new(false);
        let valid: Vec<usize> = (100..100 + VALID).collect();
        let setup = Setup { accumulate: None, stop_after: EPOCHS };
        let everything: Vec<usize> = (0..SAMPLES).collect();
        let trained = run(ranks, |group| {
            let folder = tempfile::tempdir().unwrap();
            let strategy = DdpStrategy::new(&group);
            let sampled = strategy.sampled(data(&everything), 42);
            let loaders = (DataLoaderBuilder::new(Rows).batch_size(4).build(sampled), loader(&valid, 4));
            let theirs = train(net.twin(), loaders, folder.path(), &setup, strategy.into());

            let strategy = DdpStrategy::new(&group);
            let sampled = FromBurn::new(strategy.sampled(ToBurn(ours(&everything)), 42));
            let seen = Arc::default();
            let samples = phalanx_data::Dataset::map(sampled, noting(&seen));
            let folder = tempfile::tempdir().unwrap();
            let loaders = (burn_loader(samples, false, 2), burn_loader(ours(&valid), false, 1));
            let ours = train(net.twin(), loaders, folder.path(), &setup, strategy.into());

            // In each epoch those of the sampler; two workers read them at the same time.
            let mut sampler = DistributedSampler::for_group(SAMPLES, &group).seed(42);
            let seen = seen.lock();
            for (epoch, seen) in (1..).zip(seen.chunks(seen.len() / EPOCHS)) {
                sampler.set_epoch(epoch);
                let (mut seen, mut expected) = (
                    seen.to_vec(),
                    sampler
                        .indices()
                        .into_iter()
                        .map(|i| data(&[i]).get(0).unwrap().0[0])
                        .collect::<Vec<_>>(),
                );
                seen.sort_by(f32::total_cmp);
                expected.sort_by(f32::total_cmp);
                assert_eq!(seen, expected, "epoch {epoch}");
            }
            (theirs, ours)
        });
        for (theirs, ours) in &trained {
            assert!(theirs.weights == ours.weights, "other weights than Burn's loader gives");
            assert_eq!(theirs.losses, ours.losses);
        }
    }
}

#[test]
fn stretches_of_a_shuffled_loader_go_round_and_leave_no_sample_out() {
    let order: Vec<usize> = (0..TRAIN).collect();
    let seen = run(2, |group| {
        let seen = Arc::<Mutex<Vec<f32>>>::default();
        let folder = tempfile::tempdir().unwrap();
        let samples = phalanx_data::Dataset::map(ours(&order), noting(&seen));
        let loaders = (burn_loader(samples, true, 2), loader(&[5, 6], 2));
        let setup = Setup { accumulate: None, stop_after: EPOCHS };
        train(Net::new(false), loaders, folder.path(), &setup, DdpStrategy::new(&group).into());
        seen.lock().clone()
    });
    let mut all: Vec<f32> = ours(&order).items().iter().map(|sample| sample.0[0]).collect();
    all.sort_by(f32::total_cmp);
    let share = TRAIN / 2;
    for epoch in 0..EPOCHS {
        let epoch = epoch * share..(epoch + 1) * share;
        let mut both = [&seen[0][epoch.clone()], &seen[1][epoch.clone()]].concat();
        both.sort_by(f32::total_cmp);
        assert_eq!(both, all, "{epoch:?}");
    }
}

#[test]
fn an_item_that_one_rank_s_worker_cannot_load_is_the_error_of_every_rank() {
    for workers in [0, 2] {
        run(3, |group| {
            let folder = tempfile::tempdir().unwrap();
            let broken = group.rank().index() == 1;
            let count = Arc::new(std::sync::atomic::AtomicUsize::new(0));
            let samples = phalanx_data::Dataset::map(ours(&(0..TRAIN).collect::<Vec<_>>()), move |sample| {
                let read = count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                if broken && read == 5 { Err(phalanx::Error::other("a torn file")) } else { Ok(sample) }
            });
            let training = SupervisedTraining::new(
                folder.path(),
                burn_loader(samples, false, workers),
                loader(&[5, 6], 2),
            )
            .with_application_logger(None)
            .num_epochs(EPOCHS)
            .with_training_strategy(DdpStrategy::new(&group).into());
            let result = training.launch(Learner::new(Net::new(false), SgdConfig::new().init(), 0.1));
            let error = result.error.expect("an error on every rank").to_string();
            assert!(error.contains("a torn file") && error.contains("of the data set"), "{error}");
        });
    }
}

#[test]
fn a_loader_that_is_divided_already_is_refused_on_every_rank_before_a_step() {
    let order: Vec<usize> = (0..TRAIN).collect();
    let builder = || phalanx_data::DataLoader::builder(ours(&order)).batch_size(4);
    for (purpose, by_sampler) in [("training", false), ("training", true), ("validation", false)] {
        run(2, |group| {
            let divided = match by_sampler {
                true => builder().sampler(DistributedSampler::for_group(TRAIN, &group)),
                false => builder().group(&group),
            };
            let divided = BurnLoader::new(&divided.build().unwrap(), Rows, &device()).shared();
            let (noting, seen) = Noting::new(TRAIN);
            let whole = DataLoaderBuilder::new(Rows).batch_size(4).build(noting);
            let loaders = if purpose == "training" { (divided, whole) } else { (whole, divided) };
            let folder = tempfile::tempdir().unwrap();
            let training = SupervisedTraining::new(folder.path(), loaders.0, loaders.1)
                .with_application_logger(None)
                .with_training_strategy(DdpStrategy::new(&group).into());
            let result = training.launch(Learner::new(Net::new(false), SgdConfig::new().init(), 0.1));
            let error = result.error.expect("an error on every rank").to_string();
            let cause = format!("the {purpose} loader is already divided among 2 ranks");
            assert!(error.contains(&cause) && error.contains("leave out"), "{error}");
            assert!(seen.lock().is_empty());
        });
    }
}

#[test]
fn workers_of_different_ranks_draw_differently() {
    let order: Vec<usize> = (0..TRAIN).collect();
    for sampled in [false, true] {
        let noted = run(2, |group| {
            let noted = Arc::<Mutex<Vec<phalanx_data::WorkerInfo>>>::default();
            let notes = Arc::clone(&noted);
            let note = move |sample: Sample| {
                notes.lock().push(phalanx_data::worker_info().unwrap());
                Ok(sample)
            };
            let strategy = DdpStrategy::new(&group);
            let training = if sampled {
                let samples = FromBurn::new(strategy.sampled(ToBurn(ours(&order)), 42));
                burn_loader(phalanx_data::Dataset::map(samples, note), false, 2)
            } else {
                burn_loader(phalanx_data::Dataset::map(ours(&order), note), true, 2)
            };
            let folder = tempfile::tempdir().unwrap();
            let setup = Setup { accumulate: None, stop_after: EPOCHS };
            train(Net::new(false), (training, loader(&[5, 6], 2)), folder.path(), &setup, strategy.into());
            noted.lock().clone()
        });
        let mut seeds = std::collections::BTreeSet::new();
        for (rank, noted) in (0..).zip(&noted) {
            assert!(noted.iter().all(|worker| (worker.rank.get(), worker.world_size.get()) == (rank, 2)));
            seeds.extend(noted.iter().map(|worker| worker.seed));
        }
        // Of each of two ranks, two workers, each with another seed in each epoch.
        assert_eq!(seeds.len(), 2 * 2 * EPOCHS, "sampled: {sampled}");
    }
}

#[test]
fn a_validation_of_sampled_data_is_refused_on_every_rank_before_a_step() {
    let order: Vec<usize> = (0..VALID).collect();
    for is_ours in [false, true] {
        let outcomes = |ranks: u32| {
            run(ranks, |group| {
                let strategy = DdpStrategy::new(&group);
                let valid = if is_ours {
                    let samples = FromBurn::new(strategy.sampled(ToBurn(ours(&order)), 42));
                    burn_loader(phalanx_data::Dataset::map(samples, Ok), false, 0)
                } else {
                    DataLoaderBuilder::new(Rows).batch_size(4).build(strategy.sampled(data(&order), 42))
                };
                let (noting, seen) = Noting::new(TRAIN);
                let training_data = strategy.sampled(noting, 1);
                let training = DataLoaderBuilder::new(Rows).batch_size(4).build(training_data);
                let folder = tempfile::tempdir().unwrap();
                let training = SupervisedTraining::new(folder.path(), training, valid)
                    .with_application_logger(None)
                    .num_epochs(1)
                    .with_training_strategy(strategy.into());
                let result = training.launch(Learner::new(Net::new(false), SgdConfig::new().init(), 0.1));
                (result.error.map(|error| error.to_string()), seen.lock().len())
            })
        };
        for (error, steps) in outcomes(2) {
            let error = error.expect("an error on every rank");
            assert!(error.contains("sampled has already divided among 2 ranks"), "{error}");
            assert!(error.contains("the whole data set"), "{error}");
            assert_eq!(steps, 0);
        }
        // One rank's part is the whole.
        assert_eq!(outcomes(1)[0].0, None);
    }
}

/// A loader that never says that it is at its end.
struct Unending(Arc<dyn DataLoader<Batch>>);

impl DataLoader<Batch> for Unending {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Batch> + 'a> {
        Box::new(Unended(self.0.iter()))
    }

    fn num_items(&self) -> usize {
        self.0.num_items()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<Batch>> {
        Arc::new(Self(self.0.to_device(device)))
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<Batch>> {
        Arc::new(Self(self.0.slice(start, end)))
    }
}

struct Unended<'a>(Box<dyn DataLoaderIterator<Batch> + 'a>);

impl Iterator for Unended<'_> {
    type Item = Result<Batch, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next()
    }
}

impl DataLoaderIterator<Batch> for Unended<'_> {
    fn progress(&self) -> Progress {
        let Progress { items_processed, items_total, unit } = self.0.progress();
        Progress::new(items_processed, items_total + 1, unit)
    }
}

/// Those of a pass that says that it is at its end make its last step.
#[test]
fn batches_too_few_for_a_step_are_no_part_of_the_next_epoch() {
    // Three batches of 4 and one sample for each rank, and two batches a step.
    let valid: Vec<usize> = (100..100 + VALID).collect();
    let (net, setup) = (Net::new(false), Setup { accumulate: Some(2), stop_after: EPOCHS });
    let trained_by = [true, false].map(|is_unending| {
        let dropping = |ranks: usize| -> Arc<dyn DataLoader<Batch>> {
            let order: Vec<usize> = (0..13 * ranks).map(|place| place % 13).collect();
            let loader = phalanx_data::DataLoader::builder(ours(&order)).batch_size(4).drop_last(true);
            let loader = BurnLoader::new(&loader.build().unwrap(), Rows, &device()).shared();
            if is_unending { Arc::new(Unending(loader)) } else { loader }
        };
        let folder = tempfile::tempdir().unwrap();
        let loaders = (dropping(1), loader(&valid, VALID));
        let expected = train(net.twin(), loaders, folder.path(), &setup, TrainingStrategy::default());
        for ranks in [1, 2] {
            let trained = run(ranks as u32, |group| {
                let folder = tempfile::tempdir().unwrap();
                let loaders = (dropping(ranks), loader(&valid, VALID));
                train(net.twin(), loaders, folder.path(), &setup, DdpStrategy::new(&group).into()).weights
            });
            for ours in &trained {
                let apart = distance(ours, &expected.weights);
                assert!(apart < 1e-5, "{ranks} ranks, unending: {is_unending}: {apart:e}");
            }
        }
        expected.weights
    });
    let apart = distance(&trained_by[0], &trained_by[1]);
    assert!(apart > 1e-4, "the last batch has made no step: {apart:e}");
}

#[test]
fn a_strategy_s_sample_has_the_same_seed_on_whatever_rank_and_others_have_others() {
    const SAMPLES: usize = 24;
    let drawn = run(2, |group| {
        let strategy = DdpStrategy::new(&group);
        let seeded = |index: usize| Ok((index, phalanx_data::worker_info().unwrap().item_seed));
        let numbers = || InMemory::new((0..SAMPLES).collect());
        // Drawn before the strategy samples, and after.
        let inside = ToBurn(phalanx_data::Dataset::map(numbers(), seeded));
        let inside = FromBurn::new(strategy.sampled(inside, 42));
        let outside = FromBurn::new(strategy.sampled(ToBurn(numbers()), 42));
        let outside = phalanx_data::Dataset::map(outside, seeded);
        let inside = phalanx_data::DataLoader::builder(inside).num_workers(2).build().unwrap();
        let outside = phalanx_data::DataLoader::builder(outside).build().unwrap();
        let inside: Vec<(usize, u64)> = inside.iter().flat_map(Result::unwrap).collect();
        let outside: Vec<(usize, u64)> = outside.iter().flat_map(Result::unwrap).collect();
        assert_eq!(inside, outside);
        inside
    });
    let seeds: std::collections::BTreeMap<usize, u64> = drawn.iter().flatten().copied().collect();
    let different: std::collections::BTreeSet<u64> = seeds.values().copied().collect();
    assert_eq!((seeds.len(), different.len()), (SAMPLES, SAMPLES));
    assert!(drawn.iter().flatten().all(|(index, seed)| seeds[index] == *seed));
}

/// An item, the epoch that its worker knows, and its seed.
type Draw = (u32, u64, u64);

/// What each of two ranks draws in a training up to the epoch `to`, which goes on from a checkpoint behind the epoch `from`.
fn drawn(sampled: bool, folder: &Path, from: Option<usize>, to: usize) -> Vec<Vec<Draw>> {
    let order: Vec<usize> = (0..TRAIN).collect();
    run(2, |group| {
        let draws = Arc::<Mutex<Vec<Draw>>>::default();
        let noted = Arc::clone(&draws);
        let note = move |sample: Sample| {
            let worker = phalanx_data::worker_info().unwrap();
            noted.lock().push((sample.0[0].to_bits(), worker.epoch, worker.item_seed));
            Ok(sample)
        };
        let strategy = DdpStrategy::new(&group);
        // Without workers, so that items are read in their order.
        let train_loader = if sampled {
            let samples = FromBurn::new(strategy.sampled(ToBurn(ours(&order)), 42));
            burn_loader(phalanx_data::Dataset::map(samples, note), false, 0)
        } else {
            burn_loader(phalanx_data::Dataset::map(ours(&order), note), true, 0)
        };
        let mut training = SupervisedTraining::new(folder, train_loader, loader(&[5, 6], 2))
            .with_metric_logger(InMemoryMetricLogger::default())
            .with_application_logger(None)
            .with_default_checkpointers()
            .with_checkpointing_strategy(KeepLastNCheckpoints::new(2))
            .num_epochs(to)
            .with_training_strategy(strategy.into());
        if let Some(from) = from {
            training = training.checkpoint(from);
        }
        let result = training.launch(Learner::new(Net::new(false), SgdConfig::new().init(), 0.1));
        assert!(result.error.is_none(), "{:?}", result.error);
        draws.lock().clone()
    })
}

#[test]
fn an_item_s_seed_is_another_in_each_epoch_of_the_trainer_also_after_a_resume() {
    for sampled in [false, true] {
        let (whole, cut) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let uninterrupted = drawn(sampled, whole.path(), None, 4);
        for draws in &uninterrupted {
            let epochs: Vec<u64> = draws.iter().map(|(_, epoch, _)| *epoch).collect();
            let expected: Vec<u64> = (1..=4).flat_map(|epoch| [epoch; TRAIN / 2]).collect();
            assert_eq!(epochs, expected, "sampled: {sampled}");
        }
        let all = uninterrupted.iter().flatten();
        let different: std::collections::BTreeSet<_> = all.map(|(item, _, seed)| (item, seed)).collect();
        assert_eq!(different.len(), 4 * TRAIN, "sampled: {sampled}");

        let before = drawn(sampled, cut.path(), None, 2);
        let after = drawn(sampled, cut.path(), Some(2), 4);
        let resumed: Vec<_> = before.into_iter().zip(after).map(|(a, b)| [a, b].concat()).collect();
        assert_eq!(resumed, uninterrupted, "sampled: {sampled}");
    }
}
