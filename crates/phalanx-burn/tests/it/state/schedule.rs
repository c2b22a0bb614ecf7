//! Learning rates, and the order of samples, in checkpoints and commits.

use burn::lr_scheduler::constant::ConstantLr;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::lr_scheduler::sequential::SequentialLrSchedulerConfig;
use phalanx::sampler::{ElasticSampler, Tail};

use super::*;

#[test]
fn a_step_that_is_refused_leaves_the_scheduler_where_it_is() {
    let scheduler = LinearLrSchedulerConfig::new(0.1, 0.01, 10).init().unwrap();
    let mut training = fresh(&SgdConfig::new().init()).with_scheduler(scheduler);
    let gradients = |training: &mut Training| {
        let loss = training.model.forward(|model| model.loss(samples(0, 4))).unwrap();
        training.model.backward(&loss).unwrap()
    };
    let foreign = gradients(&mut fresh(&SgdConfig::new().init()));
    assert!(training.scheduled_step(foreign).unwrap_err().is_invalid_argument());
    assert_eq!(training.steps(), 0);
    let own = gradients(&mut training);
    let first = training.scheduled_step(own).unwrap();
    assert!((first - 0.1).abs() < 1e-9 && training.steps() == 1, "{first}");
}

/// The samples of these indices.
fn samples_of(batch: &[usize]) -> (Tensor<2>, Tensor<2>) {
    let parts = batch.iter().map(|sample| samples(*sample, sample + 1));
    let (x, y): (Vec<_>, Vec<_>) = parts.unzip();
    (Tensor::cat(x, 0), Tensor::cat(y, 0))
}

/// A step of a job that draws its samples from the progress, and its learning rates from the scheduler.
fn scheduled(training: &mut TrainState<Mixed, ElasticSampler>, group: &ProcessGroup) {
    let batch = loop {
        match training.progress.next_batch(4, group.rank(), group.world_size()) {
            Some(batch) => break batch,
            None => training.progress.next_epoch(),
        }
    };
    let loss = training.model.forward(|model| model.loss(samples_of(&batch))).unwrap();
    let gradients = training.model.backward(&loss).unwrap();
    training.scheduled_step(gradients).unwrap();
}

/// Warm-up, and then a decay.
fn rates() -> ModuleLrScheduler {
    let warm_up = LinearLrSchedulerConfig::new(0.01, 0.1, 4);
    let decay = CosineAnnealingLrSchedulerConfig::new(0.1, 20);
    SequentialLrSchedulerConfig::new(vec![warm_up.into(), decay.into()], vec![4]).init().unwrap()
}

#[test]
fn a_job_goes_on_in_the_middle_of_an_epoch_with_the_next_learning_rate() {
    for ranks in [1, 2, 3] {
        let folder = tempfile::tempdir().unwrap();
        let start = Mixed::new(6);
        let new = |group: &ProcessGroup| {
            let sampler = ElasticSampler::new(50).seed(7).tail(Tail::Repeat);
            let optimizer = AdamWConfig::new().init();
            let training = TrainState::new(start.clone(), optimizer, sampler).unwrap();
            training.with_scheduler(rates()).with_group(group).unwrap()
        };
        let whole = run(ranks, |group| {
            let mut training = new(&group);
            (0..9).for_each(|_| scheduled(&mut training, &group));
            training
        });
        let resumed = run(ranks, |group| {
            let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
            let mut training = new(&group);
            assert!(!training.resume(&checkpoints).unwrap());
            (0..5).for_each(|_| scheduled(&mut training, &group));
            training.checkpoint(&checkpoints).unwrap();
            checkpoints.finish().unwrap();

            let mut training = new(&group);
            assert!(training.resume(&checkpoints).unwrap());
            assert_eq!(training.steps(), 5);
            (0..4).for_each(|_| scheduled(&mut training, &group));
            training
        });
        for (resumed, whole) in resumed.iter().zip(&whole) {
            assert_eq!((resumed.steps(), &resumed.progress), (9, &whole.progress));
            assert_eq!(floats(resumed.model.model()), floats(whole.model.model()), "{ranks} ranks");
        }
    }
}

#[test]
fn a_sampler_of_another_order_is_refused_and_changes_nothing() {
    let (folder, group) = (tempfile::tempdir().unwrap(), ProcessGroup::alone().unwrap());
    let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
    let new = |sampler: ElasticSampler| {
        TrainState::new(Mixed::new(6), SgdConfig::new().init(), sampler).unwrap().with_scheduler(rates())
    };
    let mut training = new(ElasticSampler::new(100));
    scheduled(&mut training, &group);
    training.checkpoint(&checkpoints).unwrap();
    checkpoints.finish().unwrap();
    for (sampler, said) in [
        (ElasticSampler::new(150), "`samples` was 100 and is 150"),
        (ElasticSampler::new(100).tail(Tail::Repeat), "`tail` was Split and is Repeat"),
    ] {
        let mut other = new(sampler.clone());
        let before = floats(other.model.model());
        let error = other.resume(&checkpoints).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains(said), "{error}");
        assert_eq!((other.steps(), &other.progress, floats(other.model.model())), (0, &sampler, before));
    }
    // One that is saved in the place of the first is what the next run must have.
    assert!(training.resume(&checkpoints).unwrap());
    training.progress = training.progress.with_samples(150);
    scheduled(&mut training, &group);
    training.checkpoint(&checkpoints).unwrap();
    checkpoints.finish().unwrap();
    let mut larger = new(ElasticSampler::new(150));
    assert!(larger.resume(&checkpoints).unwrap());
    assert_eq!((larger.steps(), &larger.progress), (2, &training.progress));
}

#[test]
fn ranks_with_other_samplers_are_told_before_they_begin() {
    let folder = tempfile::tempdir().unwrap();
    run(2, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let sampler = ElasticSampler::new(50 + group.rank().index());
        let mut training = TrainState::new(Mixed::new(6), SgdConfig::new().init(), sampler).unwrap();
        let error = training.resume(&checkpoints).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("samples 51"), "{error}");
    });
}

#[test]
fn ranks_that_take_other_samples_or_batches_are_told() {
    let start = Mixed::new(6);
    let errors = |samples: [usize; 2], batches: [usize; 2]| {
        run(2, |group| {
            let rank = group.rank().index();
            let sampler = ElasticSampler::new(samples[rank]).tail(Tail::Repeat);
            let training = TrainState::new(start.of_own(), SgdConfig::new().init(), sampler).unwrap();
            let mut training = training.with_group(&group).unwrap();
            let mut step = || {
                let batch = samples_of(&training.next_batch(batches[rank]).unwrap());
                let loss = training.model.forward(|model| model.loss(batch))?;
                let gradients = training.model.backward(&loss)?;
                training.step(0.01, gradients)
            };
            (0..70).find_map(|_| step().err()).map(|error| error.to_string())
        })
    };
    assert!(errors([1000, 1000], [4, 4]).iter().all(Option::is_none));
    for (samples, batches) in [([1000, 1001], [4, 4]), ([1000, 1000], [4, 3])] {
        for error in errors(samples, batches) {
            assert!(
                error.as_ref().is_some_and(|error| error.contains("batches of another size")),
                "{error:?}"
            );
        }
    }
}

#[test]
fn learning_rates_are_part_of_commits_and_another_scheduler_is_refused() {
    let group = ProcessGroup::alone().unwrap();
    let new = |rates: ModuleLrScheduler| {
        let (optimizer, sampler) = (SgdConfig::new().init(), ElasticSampler::new(50));
        TrainState::new(Mixed::new(6), optimizer, sampler).unwrap().with_scheduler(rates)
    };
    let mut training = new(rates());
    (0..6).for_each(|_| scheduled(&mut training, &group));
    let mut parts = Parts::default();
    training.save(&mut parts).unwrap();
    let mut other = new(rates());
    other.load(&parts).unwrap();
    let next =
        |training: &mut TrainState<Mixed, ElasticSampler>| training.scheduler.as_mut().unwrap().step().base();
    assert_eq!(next(&mut other).to_bits(), next(&mut training).to_bits());
    assert_eq!(other.steps(), 6);

    let mut constant = new(ConstantLr::new(0.1).into());
    let error = constant.load(&parts).unwrap_err();
    assert!(error.is_mismatch() && error.to_string().contains("scheduler"), "{error}");
    let mut none = TrainState::new(Mixed::new(6), SgdConfig::new().init(), ElasticSampler::new(50)).unwrap();
    let loss = none.model.forward(|model| model.loss(samples(0, 4))).unwrap();
    let gradients = none.model.backward(&loss).unwrap();
    assert!(none.scheduled_step(gradients).unwrap_err().to_string().contains("with_scheduler"));
}

#[test]
fn a_scheduler_on_one_side_alone_is_refused() {
    let plain = || TrainState::new(Mixed::new(6), SgdConfig::new().init(), ()).unwrap();
    let scheduled = || plain().with_scheduler(rates());
    for (saving, loading, said) in [
        (
            scheduled(),
            plain(),
            "the saved state has a learning-rate scheduler, `scheduler`, and this TrainState has none",
        ),
        (
            plain(),
            scheduled(),
            "this TrainState has a learning-rate scheduler, and the saved state lacks `scheduler`",
        ),
    ] {
        let (mut parts, mut loading) = (Parts::default(), loading);
        saving.save(&mut parts).unwrap();
        let error = loading.load(&parts).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains(said), "{error}");
    }
}
