//! What hooks keep from step to step, in checkpoints and commits.

use phalanx::state::StateReader;

use super::*;

/// A hook that compresses the larger weights of [`Mixed`] from the fourth step on.
fn power_sgd() -> PowerSgd {
    PowerSgd::new(PowerSgdOptions::default().start_iter(3).min_compression_rate(1.0)).unwrap()
}

/// A training of `start` in `group`, with a hook.
fn compressed(start: &Mixed, group: &ProcessGroup, optimizer: &ModuleOptimizer) -> Training {
    let mut training =
        TrainState::new(start.of_own(), optimizer.clone(), 0).unwrap().with_group(group).unwrap();
    training.model.register_comm_hook(power_sgd()).unwrap();
    training
}

#[test]
fn power_sgd_goes_on_from_a_checkpoint_bit_for_bit() {
    let start = Mixed::new(6);
    let optimizer = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
    let expected = run(2, |group| {
        let mut training = compressed(&start, &group, &optimizer);
        (0..20).for_each(|_| step(&mut training, group.rank().index(), 2));
        training.agree().unwrap();
        bits(&training)
    });
    for sharded in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        run(2, |group| {
            let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
            let mut training = compressed(&start, &group, &optimizer);
            (0..10).for_each(|_| step(&mut training, group.rank().index(), 2));
            match sharded {
                true => training.checkpoint_sharded(&checkpoints).unwrap(),
                false => training.checkpoint(&checkpoints).unwrap(),
            }
            checkpoints.finish().unwrap();
            // One rank cannot save what the other has lost in compression.
            let error = checkpoints.save(11, |snapshot| training.save_to(snapshot));
            if group.rank().is_main() {
                assert!(error.unwrap_err().to_string().contains("keeps tensors for each rank"));
            }
        });
        for hook_first in [true, false] {
            let resumed = run(2, |group| {
                let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
                let mut training = match hook_first {
                    true => compressed(&Mixed::new(6), &group, &optimizer),
                    false => fresh(&optimizer).with_group(&group).unwrap(),
                };
                assert!(training.resume(&checkpoints).unwrap());
                if !hook_first {
                    let error = training.model.forward(|model| model.loss(samples(0, 4))).unwrap_err();
                    assert!(error.to_string().contains("none is registered"), "{error}");
                    training.model.register_comm_hook(power_sgd()).unwrap();
                }
                (0..10).for_each(|_| step(&mut training, group.rank().index(), 2));
                training.agree().unwrap();
                bits(&training)
            });
            assert_eq!(resumed, expected, "sharded: {sharded}, hook first: {hook_first}");
        }
        // Of three ranks none has what it lost; the step and the factors remain.
        run(3, |group| {
            let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
            let mut training = compressed(&Mixed::new(6), &group, &optimizer);
            assert!(training.resume(&checkpoints).unwrap());
            let before = training.model.communicated_bytes();
            step(&mut training, group.rank().index(), 3);
            let sent = training.model.communicated_bytes() - before;
            // 87 numbers need a gradient.
            assert!(sent < 4 * 87, "{sent} bytes: the warm-up does not begin anew");
            assert!(training.model.replicas_identical().unwrap());
        });
    }
}

#[test]
fn gradients_of_a_step_that_is_not_over_are_in_no_state_and_do_not_outlive_a_load() {
    let optimizer = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
    for ranks in [1, 2] {
        run(ranks, |group| {
            let rank = group.rank().index();
            let mut training = fresh(&optimizer).with_group(&group).unwrap();
            step(&mut training, rank, ranks as usize);
            training.agree().unwrap();
            let mut parts = Parts::default();
            training.save(&mut parts).unwrap();
            step(&mut training, rank, ranks as usize);
            let expected = bits(&training);
            let loss = training.model.forward(|model| model.loss(samples(0, 4))).unwrap();
            training.model.backward_no_sync(&loss).unwrap();
            let error = training.save(&mut Parts::default()).unwrap_err();
            assert!(error.to_string().contains("in the middle of a step"), "{error}");
            training.load(&parts).unwrap();
            step(&mut training, rank, ranks as usize);
            assert_eq!(bits(&training), expected, "{ranks} ranks");
            training.save(&mut Parts::default()).unwrap();
            // An epoch whose rest makes no whole step is saved without it.
            let loss = training.model.forward(|model| model.loss(samples(0, 4))).unwrap();
            training.model.backward_no_sync(&loss).unwrap();
            training.model.drop_accumulated();
            let mut parts = Parts::default();
            training.save(&mut parts).unwrap();
            step(&mut training, rank, ranks as usize);
            let expected = bits(&training);
            training.load(&parts).unwrap();
            step(&mut training, rank, ranks as usize);
            assert_eq!(bits(&training), expected, "{ranks} ranks");
        });
    }
}

#[test]
fn a_change_of_the_group_in_the_middle_of_a_step_is_an_error_on_every_rank() {
    let optimizer = SgdConfig::new().init();
    run(2, |group| {
        let mut training = fresh(&optimizer);
        // The other rank waits in the new group.
        if group.rank().is_main() {
            let loss = training.model.forward(|model| model.loss(samples(0, 4))).unwrap();
            training.model.backward_no_sync(&loss).unwrap();
        }
        let error = training.with_group(&group).unwrap_err().to_string();
        assert!(error.contains("in the middle of a step"), "{error}");
    });
    let mut training = fresh(&optimizer);
    let loss = training.model.forward(|model| model.loss(samples(0, 4))).unwrap();
    training.model.backward_no_sync(&loss).unwrap();
    let error = training.with_options(DdpOptions::default()).unwrap_err().to_string();
    assert!(error.contains("in the middle of a step"), "{error}");
}

/// [`power_sgd`], which loses at the beginning of step `at` what each rank has for itself.
struct LosesItsOwn {
    inner: PowerSgd,
    step: usize,
    at: usize,
}

impl CommHook for LosesItsOwn {
    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn start(&mut self, group: &dyn Communicator, bucket: GradBucket) -> phalanx::Result<Pending> {
        if (self.step, bucket.index) == (self.at, 0) {
            let state = self.inner.state()?;
            assert!(
                state
                    .tensors()
                    .iter()
                    .any(|tensor| tensor.is_own && tensor.elements.iter().any(|x| *x != 0.0))
            );
            self.inner.load(state.without_own())?;
        }
        self.step += usize::from(bucket.is_last);
        self.inner.start(group, bucket)
    }

    fn adopt(&mut self, group: &dyn Communicator, root: Rank) -> phalanx::Result<()> {
        self.inner.adopt(group, root)
    }

    fn state(&self) -> phalanx::Result<HookState> {
        self.inner.state()
    }

    fn load(&mut self, state: HookState) -> phalanx::Result<()> {
        self.inner.load(state)
    }
}

/// Whatever a rank has done since the commit, and whether it is new.
#[test]
fn after_a_way_back_to_a_commit_power_sgd_has_the_step_and_factors_of_the_commit_and_no_losses() {
    const COMMIT: usize = 8;
    let start = Mixed::new(6);
    let optimizer = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
    for ranks in [2, 3] {
        let trained = |at: usize| {
            run(ranks, |group| {
                let mut training = TrainState::new(start.of_own(), optimizer.clone(), 0)
                    .unwrap()
                    .with_group(&group)
                    .unwrap();
                let hook = LosesItsOwn { inner: power_sgd(), step: 0, at };
                training.model.register_comm_hook(hook).unwrap();
                for index in 0..16 {
                    if index == COMMIT {
                        training.agree().unwrap();
                    }
                    step(&mut training, group.rank().index(), ranks as usize);
                }
                training.agree().unwrap();
                bits(&training)
            })
        };
        let expected = trained(COMMIT);
        assert_ne!(expected, trained(COMMIT + 1), "losses matter");
        let ours = run(ranks, |group| {
            let rank = group.rank().index();
            let mut training = compressed(&start, &group, &optimizer);
            (0..COMMIT).for_each(|_| step(&mut training, rank, ranks as usize));
            training.agree().unwrap();
            let mut parts = Parts::default();
            training.save(&mut parts).unwrap();
            (0..3).for_each(|_| step(&mut training, rank, ranks as usize));
            // A failure: the rounds of an elastic job make these calls.
            training.leave();
            if rank == 1 {
                training = fresh(&optimizer);
            }
            training.load(&parts).unwrap();
            training.enter(&group).unwrap();
            let error = training.model.forward(|model| model.loss(samples(0, 4))).unwrap_err();
            assert!(error.to_string().contains("none is registered"), "{error}");
            training.model.register_comm_hook(power_sgd()).unwrap();
            (COMMIT..16).for_each(|_| step(&mut training, rank, ranks as usize));
            training.agree().unwrap();
            bits(&training)
        });
        assert_eq!(ours, expected, "{ranks} ranks");
    }
}

#[test]
fn what_a_hook_has_kept_outlives_the_rounds_of_an_elastic_job() {
    let start = Mixed::new(6);
    let optimizer = SgdConfig::new().init();
    run(2, |group| {
        // `elastic::run` makes these calls.
        let mut training = TrainState::new(start.of_own(), optimizer.clone(), 0).unwrap();
        training.enter(&group).unwrap();
        training.model.register_comm_hook(power_sgd()).unwrap();
        (0..5).for_each(|_| step(&mut training, group.rank().index(), 2));
        training.agree().unwrap();
        training.leave();
        let mut parts = Parts::default();
        training.save(&mut parts).unwrap();
        assert!(parts.has_value("hook"));
        // It is to be registered again, and goes on.
        training.enter(&group).unwrap();
        let error = training.model.forward(|model| model.loss(samples(0, 4))).unwrap_err();
        assert!(error.to_string().contains("none is registered"), "{error}");
        training.model.register_comm_hook(power_sgd()).unwrap();
        step(&mut training, group.rank().index(), 2);
    });
}

#[test]
fn training_without_a_hook_that_was_registered_before_the_group_changed_is_refused() {
    let optimizer = SgdConfig::new().init();
    let refused = |training: &mut Training| {
        let error = training.model.forward(|model| model.loss(samples(0, 4))).unwrap_err();
        assert!(error.to_string().contains("compressed to f16 was registered before the group"), "{error}");
    };
    run(2, |group| {
        let part = group.rank().index();
        // In a world of one it is not used.
        let mut training = fresh(&optimizer);
        training.model.register_comm_hook(Compressed::f16()).unwrap();
        step(&mut training, 0, 1);
        let mut training = training.with_group(&group).unwrap();
        refused(&mut training);
        training.model.register_comm_hook(Compressed::f16()).unwrap();
        step(&mut training, part, 2);
        let mut training = training.with_options(DdpOptions::default()).unwrap();
        refused(&mut training);
        // A second change does not make it forget.
        let mut training = training.with_options(DdpOptions::default()).unwrap();
        refused(&mut training);
        training.model.discard_hook_state();
        step(&mut training, part, 2);
        // What a `Ddp` does without a hook.
        training.model.register_comm_hook(AllReduce).unwrap();
        let mut training = training.with_options(DdpOptions::default()).unwrap();
        step(&mut training, part, 2);
    });
}

#[test]
fn another_hook_is_refused_unless_the_state_is_discarded() {
    let folder = tempfile::tempdir().unwrap();
    let optimizer = SgdConfig::new().init();
    run(2, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let mut training = compressed(&Mixed::new(6), &group, &optimizer);
        (0..5).for_each(|_| step(&mut training, group.rank().index(), 2));
        training.checkpoint(&checkpoints).unwrap();
        checkpoints.finish().unwrap();
        let mut other = fresh(&optimizer).with_group(&group).unwrap();
        other.model.register_comm_hook(PostLocalSgd::new(3)).unwrap();
        let error = other.resume(&checkpoints).unwrap_err();
        let said = error.to_string();
        assert!(
            error.is_mismatch() && said.contains("PowerSGD (rank") && said.contains("local sgd after 3"),
            "{said}"
        );
        assert_eq!(other.steps(), 0);
        let mut none = fresh(&optimizer).with_group(&group).unwrap();
        none.resume(&checkpoints).unwrap();
        none.model.discard_hook_state();
        step(&mut none, group.rank().index(), 2);
        // And the reverse: the hook is to go on, and the checkpoint has nothing of it.
        none.checkpoint(&checkpoints).unwrap();
        checkpoints.finish().unwrap();
        let mut other = compressed(&Mixed::new(6), &group, &optimizer);
        let error = other.resume(&checkpoints).unwrap_err().to_string();
        assert!(error.contains("no communication hook"), "{error}");
        // In the other order too, unless the program says so.
        let mut anew = fresh(&optimizer).with_group(&group).unwrap();
        anew.resume(&checkpoints).unwrap();
        anew.model.discard_hook_state();
        anew.model.register_comm_hook(power_sgd()).unwrap();
        step(&mut anew, group.rank().index(), 2);
        let mut late = fresh(&optimizer).with_group(&group).unwrap();
        late.resume(&checkpoints).unwrap();
        let error = late.model.register_comm_hook(power_sgd()).unwrap_err();
        assert!(error.to_string().contains("no communication hook"), "{error}");
        assert!(error.remedy().unwrap().contains("discard_hook_state"), "{error}");
    });
}

#[test]
fn a_hook_s_state_is_saved_beside_a_divided_optimizer() {
    let start = Mixed::new(6);
    let sgd = || SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
    let new = |group: &ProcessGroup, start: &Mixed| {
        let mut training = compressed(start, group, &SgdConfig::new().init());
        let zero = ZeroRedundancyOptimizer::new(sgd(), &mut training.model).unwrap();
        (training, zero)
    };
    let train = |(training, zero): &mut (Training, ZeroRedundancyOptimizer), part: usize, steps: usize| {
        for _ in 0..steps {
            let from = 24 * training.progress + 12 * part;
            let loss = training.model.forward(|model| model.loss(samples(from, from + 12))).unwrap();
            let gradients = training.model.backward(&loss).unwrap();
            zero.step(&mut training.model, 0.05, gradients).unwrap();
            training.progress += 1;
        }
    };
    let expected = run(2, |group| {
        let mut both = new(&group, &start);
        train(&mut both, group.rank().index(), 20);
        both.0.agree().unwrap();
        bits(&both.0)
    });
    let folder = tempfile::tempdir().unwrap();
    let resumed = run(2, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let mut both = new(&group, &start);
        train(&mut both, group.rank().index(), 10);
        let save = |snapshot: &mut Snapshot| {
            both.0.save_shard_to(snapshot, &group)?;
            both.1.save(&both.0.model, snapshot, "zero")
        };
        checkpoints.save_sharded(10, save).unwrap();
        checkpoints.finish().unwrap();
        let mut both = new(&group, &Mixed::new(6));
        let saved = checkpoints.newest().unwrap().unwrap();
        both.0.load_from(&saved).unwrap();
        both.1.load(&both.0.model, &saved, "zero").unwrap();
        train(&mut both, group.rank().index(), 10);
        both.0.agree().unwrap();
        bits(&both.0)
    });
    assert_eq!(resumed, expected);
}

#[test]
fn local_sgd_goes_on_from_the_step_of_its_checkpoint() {
    let start = Mixed::new(6);
    let new = |group: &ProcessGroup, start: &Mixed| {
        let training = TrainState::new(start.of_own(), SgdConfig::new().init(), 0).unwrap();
        let averager = PeriodicModelAverager::new(3).unwrap().warmup_steps(4);
        let mut training = training.with_averager(averager).with_group(group).unwrap();
        training.model.register_comm_hook(PostLocalSgd::new(4)).unwrap();
        training
    };
    // It averages after the steps 5, 8, 11, 14, 17 and 20.
    let expected = run(2, |group| {
        let mut training = new(&group, &start);
        (0..20).for_each(|_| step(&mut training, group.rank().index(), 2));
        training.agree().unwrap();
        bits(&training)
    });
    assert_eq!(expected[0], expected[1]);
    let folder = tempfile::tempdir().unwrap();
    let resumed = run(2, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let rank = group.rank().index();
        let mut training = new(&group, &start);
        (0..10).for_each(|_| step(&mut training, rank, 2));
        let error = training.checkpoint(&checkpoints).unwrap_err();
        assert!(error.to_string().contains("models differ since their last average"), "{error}");
        step(&mut training, rank, 2);
        training.checkpoint(&checkpoints).unwrap();
        checkpoints.finish().unwrap();
        let mut training = new(&group, &Mixed::new(6));
        assert!(training.resume(&checkpoints).unwrap());
        (0..9).for_each(|_| step(&mut training, rank, 2));
        training.agree().unwrap();

        let mut none = fresh(&SgdConfig::new().init()).with_group(&group).unwrap();
        let error = none.resume(&checkpoints).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("a model averager, `averager`"), "{error}");
        bits(&training)
    });
    assert_eq!(resumed, expected);
}
