//! Which samples each rank of a strategy trains on.

use super::*;
use crate::unused::Log;

#[test]
fn samples_of_another_seed_on_one_rank_are_an_error_on_every_rank() {
    let order: Vec<usize> = (0..TRAIN).collect();
    let errors = |other: u64| {
        run(2, |group| {
            let folder = tempfile::tempdir().unwrap();
            let strategy = DdpStrategy::new(&group);
            // One rank alone still has that of an earlier training.
            let _earlier = group.rank().is_main().then(|| strategy.sampled(data(&order), 7));
            let sampled = strategy.sampled(data(&order), if group.rank().is_main() { 42 } else { other });
            let train_loader = DataLoaderBuilder::new(Rows).batch_size(4).build(sampled);
            let training = SupervisedTraining::new(folder.path(), train_loader, loader(&[5, 6], 2))
                .with_application_logger(None)
                .with_training_strategy(strategy.into());
            let learner = Learner::new(Net::new(false), SgdConfig::new().init(), 0.1);
            training.launch(learner).error.map(|error| error.to_string())
        })
    };
    assert_eq!(errors(42), [None, None]);
    let said = "the seed of the training samples of rank 0 is 42, and that of rank 1 is 43";
    for error in errors(43) {
        assert!(error.as_ref().is_some_and(|error| error.contains(said)), "{error:?}");
    }
}

#[test]
fn a_data_set_of_another_length_on_one_rank_is_an_error_on_every_rank() {
    // Either rank would have 12 samples of its own.
    for (is_sampled, other) in [(true, TRAIN - 1), (false, TRAIN + 1)] {
        let errors = run(2, |group| {
            let samples = if group.rank().is_main() { TRAIN } else { other };
            let data = data(&(0..samples).collect::<Vec<_>>());
            let (folder, strategy) = (tempfile::tempdir().unwrap(), DdpStrategy::new(&group));
            let builder = DataLoaderBuilder::new(Rows).batch_size(4);
            let train_loader = match is_sampled {
                true => builder.build(strategy.sampled(data, 42)),
                false => builder.build(data),
            };
            let training = SupervisedTraining::new(folder.path(), train_loader, loader(&[5, 6], 2))
                .with_application_logger(None)
                .with_training_strategy(strategy.into());
            let learner = Learner::new(Net::new(false), SgdConfig::new().init(), 0.1);
            training.launch(learner).error.expect("an error on every rank").to_string()
        });
        let said = format!("the number of training samples of rank 0 is 24, and that of rank 1 is {other}");
        for error in errors {
            assert!(error.contains(&said), "{error}");
        }
    }
}

#[test]
fn a_warning_says_once_that_ranks_with_smaller_batches_leave_some_out() {
    for (other, expected) in [(4, [0, 0]), (2, [1, 0])] {
        let order: Vec<usize> = (0..TRAIN).collect();
        let warnings = run(2, |group| {
            let (folder, log) = (tempfile::tempdir().unwrap(), Log::default());
            let batch = if group.rank().is_main() { 4 } else { other };
            let setup = Setup { accumulate: None, stop_after: EPOCHS };
            tracing::subscriber::with_default(log.clone(), || {
                let loaders = (loader(&order, batch), loader(&[5, 6], 2));
                train(Net::new(false), loaders, folder.path(), &setup, DdpStrategy::new(&group).into());
            });
            log.0
                .lock()
                .iter()
                .filter(|warning| warning.contains("batches left that were not trained"))
                .count()
        });
        assert_eq!(warnings, expected, "batches of {other}");
    }
}

#[test]
fn fewer_samples_than_ranks_are_refused() {
    for error in run(3, |group| {
        let folder = tempfile::tempdir().unwrap();
        let training = SupervisedTraining::new(folder.path(), loader(&[1, 2], 2), loader(&[5, 6, 7], 2))
            .with_application_logger(None)
            .with_training_strategy(DdpStrategy::new(&group).into());
        let result = training.launch(Learner::new(Net::new(false), SgdConfig::new().init(), 0.1));
        result.error.expect("an error on every rank").to_string()
    }) {
        assert!(error.contains("2 samples for 3 ranks"), "{error}");
    }
}

#[test]
fn a_learning_rate_that_is_no_number_is_refused() {
    for error in run(2, |group| {
        let folder = tempfile::tempdir().unwrap();
        let training = SupervisedTraining::new(folder.path(), loader(&[1, 2], 2), loader(&[5, 6, 7], 2))
            .with_application_logger(None)
            .with_training_strategy(DdpStrategy::new(&group).into());
        let result = training.launch(Learner::new(Net::new(false), SgdConfig::new().init(), f64::NAN));
        result.error.expect("an error on every rank").to_string()
    }) {
        assert!(error.contains("a step with the learning rate NaN"), "{error}");
    }
}

#[test]
fn each_epoch_s_samples_are_those_of_the_distributed_sampler() {
    for ranks in [2, 3] {
        let valid: Vec<usize> = (100..100 + VALID).collect();
        run(ranks, |group| {
            let folder = tempfile::tempdir().unwrap();
            let (noting, seen) = Noting::new(25);
            let strategy = DdpStrategy::new(&group);
            let sampled = strategy.sampled(noting, 42);
            let train_loader = DataLoaderBuilder::new(Rows).batch_size(4).build(sampled);
            let setup = Setup { accumulate: None, stop_after: EPOCHS };
            train(Net::new(false), (train_loader, loader(&valid, 3)), folder.path(), &setup, strategy.into());
            let mut sampler = DistributedSampler::for_group(25, &group).seed(42);
            let expected = (1..=EPOCHS as u64).flat_map(|epoch| {
                sampler.set_epoch(epoch);
                sampler.indices()
            });
            assert_eq!(*seen.lock(), expected.collect::<Vec<_>>());
        });
    }
}

#[test]
fn stretches_of_an_ordinary_loader_go_round() {
    let valid: Vec<usize> = (100..100 + VALID).collect();
    run(2, |group| {
        let folder = tempfile::tempdir().unwrap();
        let (noting, seen) = Noting::new(17);
        let train_loader = DataLoaderBuilder::new(Rows).batch_size(4).build(noting);
        let setup = Setup { accumulate: None, stop_after: EPOCHS };
        let strategy = DdpStrategy::new(&group).into();
        train(Net::new(false), (train_loader, loader(&valid, 3)), folder.path(), &setup, strategy);
        let rank = group.rank().index();
        let stretch = |epoch: usize| (0..8).map(move |sample| (rank + epoch) % 2 * 8 + sample);
        assert_eq!(*seen.lock(), (0..EPOCHS).flat_map(stretch).collect::<Vec<_>>());
    });
}

#[test]
fn a_loader_of_other_data_than_the_strategy_deals_out_is_refused() {
    run(2, |group| {
        let folder = tempfile::tempdir().unwrap();
        let strategy = DdpStrategy::new(&group);
        let _another = strategy.sampled(data(&[1, 2, 3, 4]), 0);
        let training = SupervisedTraining::new(folder.path(), loader(&[1, 2, 3, 4], 2), loader(&[5, 6], 2))
            .with_application_logger(None)
            .with_training_strategy(strategy.into());
        let result = training.launch(Learner::new(Net::new(false), SgdConfig::new().init(), 0.1));
        let error = result.error.unwrap().to_string();
        assert!(error.contains("sampled"), "{error}");
    });
}

#[test]
fn every_sampled_data_set_is_distributed_anew_in_each_epoch() {
    let valid: Vec<usize> = (100..100 + VALID).collect();
    run(2, |group| {
        let folder = tempfile::tempdir().unwrap();
        let (noting, seen) = Noting::new(24);
        let strategy = DdpStrategy::new(&group);
        let sampled = strategy.sampled(noting, 42);
        let _as_long = strategy.sampled(data(&[0; 24]), 7);
        let train_loader = DataLoaderBuilder::new(Rows).batch_size(4).build(sampled);
        let setup = Setup { accumulate: None, stop_after: EPOCHS };
        train(Net::new(false), (train_loader, loader(&valid, 3)), folder.path(), &setup, strategy.into());
        let mut sampler = DistributedSampler::for_group(24, &group).seed(42);
        let expected = (1..=EPOCHS as u64).flat_map(|epoch| {
            sampler.set_epoch(epoch);
            sampler.indices()
        });
        assert_eq!(*seen.lock(), expected.collect::<Vec<_>>());
    });
}

/// Notes the first inputs of each batch.
#[derive(Clone)]
struct NotingRows(Arc<Mutex<Vec<f32>>>);

impl Batcher<Sample, Batch> for NotingRows {
    fn batch(&self, items: Vec<Sample>, device: &Device) -> Batch {
        self.0.lock().extend(items.iter().map(|(x, _)| x[0]));
        Rows.batch(items, device)
    }
}

#[test]
fn a_stretch_that_comes_again_is_shuffled_anew() {
    const SAMPLES: usize = 64;
    run(2, |group| {
        let folder = tempfile::tempdir().unwrap();
        let seen = Arc::<Mutex<Vec<f32>>>::default();
        // One batch for each worker, so that the order of the two is all that time can change.
        let train_loader = DataLoaderBuilder::new(NotingRows(Arc::clone(&seen)))
            .batch_size(SAMPLES / 4)
            .num_workers(2)
            .shuffle(1)
            .build(data(&(0..SAMPLES).collect::<Vec<_>>()));
        let setup = Setup { accumulate: None, stop_after: EPOCHS };
        let strategy = DdpStrategy::new(&group).into();
        train(Net::new(false), (train_loader, loader(&[5, 6], 1)), folder.path(), &setup, strategy);
        let seen = seen.lock();
        // The first and the third epoch are of the same stretch; each worker has the same half of it in both.
        let visits: Vec<_> = seen.chunks(SAMPLES / 2).collect();
        assert_eq!(visits.len(), EPOCHS);
        let sorted = |visit: &[f32]| {
            let mut visit = visit.to_vec();
            visit.sort_by(f32::total_cmp);
            visit
        };
        assert_eq!(sorted(visits[0]), sorted(visits[2]));
        let [a, b] = [&visits[0][..SAMPLES / 4], &visits[0][SAMPLES / 4..]];
        let [c, d] = [&visits[2][..SAMPLES / 4], &visits[2][SAMPLES / 4..]];
        assert!((a, b) != (c, d) && (a, b) != (d, c), "the same order again");
    });
}
