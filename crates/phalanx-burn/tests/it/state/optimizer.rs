//! What is saved of an optimizer, and optimizers of ranks that differ.

use burn::optim::AdafactorConfig;
use burn::tensor::{DType, Device};

use super::*;
use crate::common::{plain, projecting};

/// `tensor` of another type.
fn cast<const D: usize>(tensor: Tensor<D>, dtype: DType) -> Tensor<D> {
    Tensor::from_data(tensor.into_data().convert_dtype(dtype), (&device(), dtype))
}

#[test]
fn an_optimizer_s_state_keeps_its_type_or_is_refused() {
    let usual = Tensor::<1>::zeros([1], &Device::default()).dtype();
    let is_there = |dtype: &DType| {
        *dtype != usual && plain().supports_dtype(*dtype) && Device::default().supports_dtype(*dtype)
    };
    for dtype in [DType::F64, DType::BF16].into_iter().filter(is_there) {
        let layer = || {
            let mut layer = LinearConfig::new(8, 3).with_bias(false).init(&device());
            layer.weight = layer.weight.map(|weight| cast(weight, dtype).require_grad());
            layer
        };
        let fresh =
            |optimizer: &ModuleOptimizer| TrainState::new(layer(), optimizer.clone(), 0_usize).unwrap();
        let step = |training: &mut TrainState<Linear, usize>| {
            let (x, y) = samples(8 * training.progress, 8 * training.progress + 8);
            let apart = |layer: &Linear| layer.forward(cast(x, dtype)) - cast(y, dtype);
            let loss = training.model.forward(|layer| {
                let apart = apart(layer);
                (apart.clone() * apart).mean()
            });
            let gradients = training.model.backward(&loss.unwrap()).unwrap();
            training.step(0.05, gradients).unwrap();
            training.progress += 1;
        };
        let weight = |training: &TrainState<Linear, usize>| -> Vec<u8> {
            training.model.model().weight.val().into_data().as_bytes().to_vec()
        };
        // The newest checkpoint has the state after three steps.
        let saved = |training: &mut TrainState<Linear, usize>, folder: &Path| {
            (0..3).for_each(|_| step(training));
            let checkpoints = Checkpoints::open(folder, &ProcessGroup::alone().unwrap()).unwrap();
            checkpoints.save(3, |snapshot| training.save_to(snapshot)).unwrap();
            checkpoints.finish().unwrap();
            checkpoints.newest().unwrap().unwrap()
        };
        let momentum = Some(MomentumConfig::new());
        for optimizer in [
            FusedAdamWConfig::new().with_epsilon(1e-3).init(),
            FusedSgdConfig::new().with_momentum(momentum.clone()).init(),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let mut original = fresh(&optimizer);
            let saved = saved(&mut original, folder.path());
            let mut restored = fresh(&optimizer);
            restored.load_from(&saved).unwrap();
            assert_eq!(weight(&restored), weight(&original), "{dtype:?}");
            for training in [&mut original, &mut restored] {
                (0..2).for_each(|_| step(training));
            }
            assert_eq!(weight(&restored), weight(&original), "{dtype:?}");
        }
        let fused = [
            FusedAdamWConfig::new().with_epsilon(1e-3).init(),
            FusedSgdConfig::new().with_momentum(momentum.clone()).init(),
        ];
        let burns = [
            AdamWConfig::new().with_epsilon(1e-3).init(),
            SgdConfig::new().with_momentum(momentum.clone()).init(),
        ];
        let said = format!("of `weight` in the optimizer's state is {dtype:?}");
        for (fused, burns) in fused.iter().zip(&burns) {
            let folder = tempfile::tempdir().unwrap();
            // What was saved with the types kept is not loaded without them.
            let saved = saved(&mut fresh(fused), folder.path());
            let mut restored = fresh(burns);
            let before = weight(&restored);
            let error = restored.load_from(&saved).unwrap_err();
            assert!(error.is_mismatch() && error.to_string().contains(&said), "{error}");
            assert_eq!((restored.progress, weight(&restored)), (0, before));
            // What could not be loaded is not saved.
            let mut original = fresh(burns);
            (0..3).for_each(|_| step(&mut original));
            let folder = tempfile::tempdir().unwrap();
            let checkpoints = Checkpoints::open(folder.path(), &ProcessGroup::alone().unwrap()).unwrap();
            let error = checkpoints.save(3, |snapshot| original.save_to(snapshot)).unwrap_err();
            assert!(error.to_string().contains(&said), "{error}");
        }
    }
}

#[test]
fn another_optimizer_is_refused_by_the_names_of_what_is_missing() {
    let sgd = |momentum: Option<MomentumConfig>| SgdConfig::new().with_momentum(momentum).init();
    let with = || Some(MomentumConfig::new());
    let adamw = AdamWConfig::new().init();
    let amsgrad = AdamWConfig::new().with_amsgrad(true).init();
    let refused = [
        (sgd(None), adamw.clone(), &["lacks", "`first.weight.momentum.moment_1`", "needs"][..]),
        (
            sgd(with()),
            adamw.clone(),
            &["`first.weight.momentum.moment_1`", "`first.weight.momentum.velocity`", "does not take"],
        ),
        (
            adamw.clone(),
            sgd(with()),
            &["lacks `first.weight.momentum.velocity`", "more, which this optimizer does not take"],
        ),
        (sgd(None), sgd(with()), &["lacks `first.weight.momentum.velocity`, "]),
        (sgd(with()), sgd(None), &["it has `first.weight.momentum.velocity`, "]),
        (adamw.clone(), amsgrad.clone(), &["lacks `first.weight.momentum.max_moment_2`"]),
        (amsgrad, adamw.clone(), &["it has `first.weight.momentum.max_moment_2`"]),
        (sgd(with()), FusedAdamWConfig::new().init(), &["moment_1"]),
        (adamw.clone(), AdafactorConfig::new().init(), &["does not take"]),
    ];
    for (saving, loading, said) in refused {
        let folder = tempfile::tempdir().unwrap();
        let mut training = fresh(&saving);
        step(&mut training, 0, 1);
        saved(&training, folder.path());
        let mut other = fresh(&loading);
        let before = bits(&other);
        let error = load(&mut other, folder.path()).unwrap_err();
        let text = error.to_string();
        assert!(error.is_mismatch() && said.iter().all(|said| text.contains(said)), "{text}");
        assert_eq!((other.progress, bits(&other)), (0, before));
        // Before the first step there is nothing that could be missing.
        saved(&fresh(&saving), folder.path());
        load(&mut other, folder.path()).unwrap();
    }
    // Those with the same fields go on from each other's, and an optimizer from its own.
    let accepted = [
        (adamw.clone(), FusedAdamWConfig::new().init()),
        (FusedSgdConfig::new().with_momentum(with()).init(), sgd(with())),
        (AdafactorConfig::new().init(), AdafactorConfig::new().init()),
        (sgd(None), sgd(None)),
    ];
    for (saving, loading) in accepted {
        let folder = tempfile::tempdir().unwrap();
        let mut training = fresh(&saving);
        step(&mut training, 0, 1);
        saved(&training, folder.path());
        load(&mut fresh(&loading), folder.path()).unwrap();
    }
}

#[test]
fn steps_without_an_optimizer_s_state_are_refused_by_one_that_needs_some() {
    let folder = tempfile::tempdir().unwrap();
    // Another optimizer does the steps, such as one that is divided among ranks.
    let mut training = fresh(&AdamWConfig::new().init());
    let mut other = AdamWConfig::new().init();
    std::mem::swap(&mut training.optimizer, &mut other);
    step(&mut training, 0, 1);
    std::mem::swap(&mut training.optimizer, &mut other);
    saved(&training, folder.path());
    let mut resumed = fresh(&AdamWConfig::new().init());
    let error = load(&mut resumed, folder.path()).unwrap_err();
    let said = error.to_string();
    assert!(error.is_mismatch() && said.contains("lacks `first.weight.momentum.moment_1`"), "{said}");
    assert_eq!(resumed.progress, 0);
    // Plain SGD keeps nothing of the kind, and may be followed by another one.
    load(&mut fresh(&SgdConfig::new().init()), folder.path()).unwrap();
}

#[test]
fn a_parameter_that_never_had_a_gradient_has_no_moments_to_miss() {
    let folder = tempfile::tempdir().unwrap();
    let optimizer = AdamWConfig::new().init();
    let mut training = fresh(&optimizer);
    let loss = training.model.forward(|model| model.last.weight.val().powi_scalar(2).mean()).unwrap();
    let gradients = training.model.backward(&loss).unwrap();
    training.step(0.1, gradients).unwrap();
    saved(&training, folder.path());
    let mut other = fresh(&optimizer);
    load(&mut other, folder.path()).unwrap();
    assert_eq!(bits(&other), bits(&training));
}

#[test]
fn ranks_whose_optimizers_differ_are_refused() {
    use burn::grad_clipping::GradientClippingConfig as Clipping;

    let adamw = || AdamWConfig::new().with_epsilon(1e-8);
    let momentum = |decay: f64| MomentumConfig::new().with_momentum(decay);
    let sgd = |decay: f64| SgdConfig::new().with_momentum(Some(momentum(decay))).init();
    let pairs: Vec<(ModuleOptimizer, ModuleOptimizer)> = vec![
        (adamw().init(), sgd(0.9)),
        (sgd(0.9), sgd(0.8)),
        (adamw().init(), adamw().with_beta_1(0.8).init()),
        (adamw().init(), adamw().with_beta_2(0.99).init()),
        (adamw().init(), adamw().with_epsilon(1e-5).init()),
        (adamw().init(), adamw().with_weight_decay(0.01).init()),
        (adamw().init(), adamw().with_grad_clipping(Some(Clipping::Value(1.0))).init()),
        (sgd(0.9), SgdConfig::new().with_gradient_clipping(Some(Clipping::Norm(1.0))).init()),
    ];
    let attempt = |group: &ProcessGroup, optimizer: &ModuleOptimizer| {
        let layer = LinearConfig::new(8, 3).init(&device());
        TrainState::new(layer, optimizer.clone(), ()).unwrap().with_group(group).err()
    };
    for (first, second) in &pairs {
        let errors = run(3, |group| attempt(&group, if group.rank().index() == 2 { second } else { first }));
        for error in errors {
            let error = error.unwrap();
            assert!(error.is_mismatch() && error.to_string().contains("the optimizer of rank 2"), "{error}");
        }
        assert!(run(2, |group| attempt(&group, first)).iter().all(Option::is_none));
    }
    // The first commit in each group of an elastic job compares them, too: the loop may set them.
    let (first, second) = &pairs[5];
    run(2, |group| {
        let mut training = fresh(if group.rank().is_main() { first } else { second });
        training.enter(&group).unwrap();
        let error = training.agree().unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("the optimizer of rank 1"), "{error}");
        training.optimizer = first.clone();
        training.agree().unwrap();
    });
    // So does the first step, in a loop that has not committed yet.
    run(2, |group| {
        let mut training = fresh(if group.rank().is_main() { first } else { second });
        training.enter(&group).unwrap();
        let loss = training.model.forward(|model| model.loss(samples(0, 4))).unwrap();
        let gradients = training.model.backward(&loss).unwrap();
        let error = training.step(0.1, gradients).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("the optimizer of rank 1"), "{error}");
        assert_eq!(training.steps(), 0);
    });
}

#[test]
fn ranks_whose_moments_differ_take_over_those_of_rank_0() {
    for (name, optimizer) in optimizers() {
        let (start, folder) = (Mixed::new(6), tempfile::tempdir().unwrap());
        let states = run(2, |group| {
            let rank = group.rank().index();
            let mut training = TrainState::new(start.of_own(), optimizer.clone(), 0).unwrap();
            // Alone, each with other samples.
            (0..2).for_each(|_| step(&mut training, rank, 2));
            let mut training = training.with_group(&group).unwrap();
            (0..2).for_each(|_| step(&mut training, rank, 2));
            training.agree().unwrap();
            assert!(training.model.replicas_identical().unwrap(), "{name}");
            saved(&training, &folder.path().join(rank.to_string()))
        });
        assert_eq!(states[1], states[0], "{name}");
    }
}

#[test]
fn ranks_that_have_done_other_numbers_of_steps_are_refused() {
    let errors = run(2, |group| {
        let mut training = fresh(&AdamWConfig::new().init());
        // As if it alone had loaded a checkpoint.
        let steps = if group.rank().is_main() { 3 } else { 0 };
        (0..steps).for_each(|_| step(&mut training, 0, 1));
        training.with_group(&group).map(drop).unwrap_err()
    });
    for error in errors {
        let said = "the number of steps of rank 0 is 3, and that of rank 1 is 0";
        assert!(error.is_mismatch() && error.to_string().contains(said), "{error}");
    }
}

#[test]
fn an_optimizer_that_panics_with_small_parameters_trains_and_goes_on_from_a_checkpoint() {
    let optimizer = projecting();
    let folder = tempfile::tempdir().unwrap();
    let mut original = fresh(&optimizer);
    (0..3).for_each(|_| step(&mut original, 0, 1));
    saved(&original, folder.path());
    let mut restored = fresh(&optimizer);
    load(&mut restored, folder.path()).unwrap();
    for training in [&mut original, &mut restored] {
        step(training, 0, 1);
    }
    assert_eq!(bits(&restored), bits(&original));

    // Several ranks take it, unless another one does not panic.
    let attempt = |group: &ProcessGroup, optimizer: &ModuleOptimizer| {
        let layer = LinearConfig::new(8, 3).init(&device());
        TrainState::new(layer, optimizer.clone(), ()).unwrap().with_group(group).err()
    };
    assert!(run(2, |group| attempt(&group, &optimizer)).iter().all(Option::is_none));
    let other = AdamWConfig::new().init();
    for panics in 0..2 {
        let errors =
            run(2, |group| attempt(&group, if group.rank().get() == panics { &optimizer } else { &other }));
        for error in errors {
            let error = error.unwrap();
            assert!(error.is_mismatch() && error.to_string().contains("the optimizer of rank 1"), "{error}");
        }
    }
}
