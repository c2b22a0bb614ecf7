//! What hooks keep from step to step, in checkpoints.

use phalanx::state::StateReader;

use super::*;

/// A hook that compresses from the fourth step on.
fn power_sgd() -> PowerSgd {
    PowerSgd::new(PowerSgdOptions::default().start_iter(3).min_compression_rate(1.0)).unwrap()
}

/// A training from `start` with that hook.
fn compressed(start: &[Vec<f32>], group: &ProcessGroup) -> Training {
    let mut training = Training::like(start, group);
    training.state.ddp.register_comm_hook(power_sgd()).unwrap();
    training
}

/// Variables with which no test begins.
fn other(start: &[Vec<f32>]) -> Vec<Vec<f32>> {
    start.iter().map(|values| values.iter().map(|x| x / 2.0 + 0.1).collect()).collect()
}

#[test]
fn power_sgd_goes_on_from_a_checkpoint_bit_for_bit() {
    let start = floats(&Training::new(Rule::sgd(0.9)).model.store);
    let expected = run(2, |group| {
        let mut training = compressed(&start, &group);
        training.train(0..20);
        training.parameters()
    });
    assert_eq!(expected[0], expected[1]);
    for sharded in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        run(2, |group| {
            let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
            let mut training = compressed(&start, &group);
            training.train(0..10);
            match sharded {
                true => training.state.checkpoint_sharded(&checkpoints).unwrap(),
                false => training.state.checkpoint(&checkpoints).unwrap(),
            }
            checkpoints.finish().unwrap();
            // One rank cannot save what the other has lost in compression.
            let error = checkpoints.save(11, |snapshot| training.state.save_to(snapshot));
            if group.rank().is_main() {
                assert!(error.unwrap_err().to_string().contains("keeps tensors for each rank"));
            }
        });
        for hook_first in [true, false] {
            let resumed = run(2, |group| {
                let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
                let mut training = match hook_first {
                    true => compressed(&other(&start), &group),
                    false => Training::like(&other(&start), &group),
                };
                assert!(training.state.resume(&checkpoints).unwrap());
                if !hook_first {
                    let error = training.loss(0).unwrap_err().to_string();
                    assert!(error.contains("none is registered"), "{error}");
                    training.state.ddp.register_comm_hook(power_sgd()).unwrap();
                }
                training.train(10..20);
                training.parameters()
            });
            assert_eq!(resumed, expected, "sharded: {sharded}, hook first: {hook_first}");
        }
        // Of three ranks none has what it lost; the step and the factors remain. So it is if all load before they are a group.
        for alone_first in [false, true] {
            run(3, |group| {
                let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
                let mut training = Training::new(Rule::sgd(0.9));
                if !alone_first {
                    training = training.with_group(&group);
                }
                assert!(training.state.resume(&checkpoints).unwrap());
                if alone_first {
                    training = training.with_group(&group);
                }
                training.state.ddp.register_comm_hook(power_sgd()).unwrap();
                let before = training.state.ddp.communicated_bytes();
                training.train(10..11);
                let sent = training.state.ddp.communicated_bytes() - before;
                let all: usize = training.parameters().iter().map(|values| 4 * values.len()).sum();
                assert!(sent < all as u64 / 2, "{sent} of {all} bytes: the warm-up does not begin anew");
                assert!(training.state.ddp.replicas_identical().unwrap());
            });
        }
    }
}

#[test]
fn a_hook_that_is_registered_again_after_a_change_of_the_group_goes_on() {
    let start = floats(&Training::new(Rule::sgd(0.9)).model.store);
    let train = |is_moved: bool| {
        run(2, |group| {
            let mut training = compressed(&start, &group);
            training.train(0..8);
            if is_moved {
                // As a checkpoint does, it gives all ranks rank 0's running statistics.
                let state = training.state.with_options(DdpOptions::default()).unwrap();
                training = Training { state, ..training };
                let error = training.loss(0).unwrap_err().to_string();
                assert!(error.contains("none is registered"), "{error}");
                training.state.ddp.register_comm_hook(power_sgd()).unwrap();
            }
            training.train(8..16);
            training.parameters()
        })
    };
    assert_eq!(train(true), train(false));
}

#[test]
fn a_hook_goes_on_for_the_same_parameters_when_another_is_frozen() {
    let start = floats(&Training::new(Rule::sgd(0.9)).model.store);
    let factors = |training: &Training| {
        let mut parts = Parts::default();
        training.state.save(&mut parts).unwrap();
        let of = |name: &str| Some(parts.elements(&format!("hook.factors.{name}")).ok()?.into_owned());
        ["0.weight", "1.weight"].map(of)
    };
    run(2, |group| {
        let mut training = compressed(&start, &group);
        training.train(0..8);
        let before = factors(&training);
        assert!(before.iter().all(Option::is_some));
        let _frozen = training.model.layers[0].ws.set_requires_grad(false);
        // The parameters behind it get other numbers.
        let state = training.state.with_options(DdpOptions::default()).unwrap();
        training = Training { state, ..training };
        let [of_frozen, after] = factors(&training);
        assert!(of_frozen.is_none() && after == before[1]);
        training.state.ddp.register_comm_hook(power_sgd()).unwrap();
        training.train(8..12);
        assert!(training.state.ddp.replicas_identical().unwrap());
    });
}

#[test]
fn training_without_a_hook_that_was_registered_before_the_group_changed_is_refused() {
    let start = floats(&Training::new(Rule::sgd(0.9)).model.store);
    let refused = |training: &mut Training| {
        let error = training.loss(0).unwrap_err().to_string();
        assert!(error.contains("compressed to f16 was registered before the group"), "{error}");
    };
    let moved = |training: Training| {
        let state = training.state.with_options(DdpOptions::default()).unwrap();
        Training { state, ..training }
    };
    run(2, |group| {
        // In a world of one it is not used.
        let mut training = Training::new(Rule::sgd(0.9));
        load(&training.model.store, &start);
        training.state.ddp.register_comm_hook(Compressed::f16()).unwrap();
        let mut training = training.with_group(&group);
        refused(&mut training);
        training.state.ddp.register_comm_hook(Compressed::f16()).unwrap();
        training.train(0..2);
        let mut training = moved(training);
        refused(&mut training);
        training.state.ddp.discard_hook_state();
        training.train(2..4);
        // What a `Ddp` does without a hook.
        training.state.ddp.register_comm_hook(AllReduce).unwrap();
        moved(training).train(4..6);
    });
}

#[test]
fn what_a_hook_has_kept_outlives_the_rounds_of_an_elastic_job() {
    let start = floats(&Training::new(Rule::sgd(0.9)).model.store);
    run(2, |group| {
        // `elastic::run` makes these calls.
        let mut training = Training::new(Rule::sgd(0.9));
        load(&training.model.store, &start);
        training.state.enter(&group).unwrap();
        training.state.ddp.register_comm_hook(power_sgd()).unwrap();
        training.train(0..5);
        training.state.agree().unwrap();
        training.state.leave();
        let mut parts = Parts::default();
        training.state.save(&mut parts).unwrap();
        assert!(parts.has_value("hook"));
        // Gradients are compressed at once, and not after three steps more.
        training.state.enter(&group).unwrap();
        training.state.ddp.register_comm_hook(power_sgd()).unwrap();
        training.train(5..6);
        let whole: usize = training.parameters().iter().map(|values| 4 * values.len()).sum();
        assert!(training.state.ddp.communicated_bytes() < whole as u64 / 2);
    });
}

#[test]
fn another_hook_is_refused_unless_the_state_is_discarded() {
    let folder = tempfile::tempdir().unwrap();
    let start = floats(&Training::new(Rule::sgd(0.9)).model.store);
    run(2, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let mut training = compressed(&start, &group);
        training.train(0..5);
        training.state.checkpoint(&checkpoints).unwrap();
        checkpoints.finish().unwrap();
        let mut another = Training::like(&start, &group);
        another.state.ddp.register_comm_hook(PostLocalSgd::new(3)).unwrap();
        let error = another.state.resume(&checkpoints).unwrap_err();
        let said = error.to_string();
        assert!(
            error.is_mismatch() && said.contains("start_iter: 3") && said.contains("local sgd after 3"),
            "{said}"
        );
        assert_eq!((another.state.steps(), floats(&another.model.store)), (0, start.clone()));
    });
    // Registered after the checkpoint is loaded: the error comes then.
    run(2, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let mut another = Training::like(&start, &group);
        assert!(another.state.resume(&checkpoints).unwrap());
        let error = another.state.ddp.register_comm_hook(PostLocalSgd::new(3)).unwrap_err().to_string();
        assert!(error.contains("start_iter: 3") && error.contains("discard_hook_state"), "{error}");
    });
    run(2, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let mut another = Training::like(&start, &group);
        another.state.resume(&checkpoints).unwrap();
        another.state.ddp.discard_hook_state();
        another.train(5..6);
        // And the reverse: the hook is to go on, and the checkpoint has nothing of it.
        another.state.checkpoint(&checkpoints).unwrap();
        checkpoints.finish().unwrap();
        drop(another);
        let mut another = compressed(&start, &group);
        let error = another.state.resume(&checkpoints).unwrap_err().to_string();
        assert!(error.contains("no communication hook"), "{error}");
        drop(another);
        // In the other order too, also after a change of the group, unless the program says so.
        let mut anew = Training::like(&start, &group);
        assert!(anew.state.resume(&checkpoints).unwrap());
        anew.state.ddp.discard_hook_state();
        anew.state.ddp.register_comm_hook(power_sgd()).unwrap();
        anew.train(6..7);
        drop(anew);
        let mut late = Training::like(&start, &group);
        assert!(late.state.resume(&checkpoints).unwrap());
        let state = late.state.with_options(DdpOptions::default()).unwrap();
        late = Training { state, ..late };
        let error = late.state.ddp.register_comm_hook(power_sgd()).unwrap_err();
        assert!(error.to_string().contains("no communication hook"), "{error}");
        assert!(error.remedy().is_some_and(|remedy| remedy.contains("discard_hook_state")), "{error}");
    });
}

#[test]
fn local_sgd_goes_on_from_the_step_of_its_checkpoint() {
    let start = floats(&Training::new(Rule::sgd(0.0)).model.store);
    let new = |group: &ProcessGroup, start: &[Vec<f32>]| {
        let training = Training::new(Rule::sgd(0.0));
        load(&training.model.store, start);
        let averager = PeriodicModelAverager::new(3).unwrap().warmup_steps(4);
        let training = Training { state: training.state.with_averager(averager), ..training };
        let mut training = training.with_group(group);
        training.state.ddp.register_comm_hook(PostLocalSgd::new(4)).unwrap();
        training
    };
    // It averages after the steps 5, 8, 11, 14, 17 and 20.
    let expected = run(2, |group| {
        let mut training = new(&group, &start);
        training.train(0..20);
        training.parameters()
    });
    assert_eq!(expected[0], expected[1]);
    let folder = tempfile::tempdir().unwrap();
    let resumed = run(2, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let mut training = new(&group, &start);
        training.train(0..10);
        let error = training.state.checkpoint(&checkpoints).unwrap_err();
        assert!(error.to_string().contains("models differ since their last average"), "{error}");
        training.train(10..11);
        training.state.checkpoint(&checkpoints).unwrap();
        checkpoints.finish().unwrap();
        drop(training);
        let mut training = new(&group, &other(&start));
        assert!(training.state.resume(&checkpoints).unwrap());
        training.train(11..20);

        let mut none = Training::new(Rule::sgd(0.0)).with_group(&group);
        let error = none.state.resume(&checkpoints).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("a model averager, `averager`"), "{error}");
        training.parameters()
    });
    assert_eq!(resumed, expected);
}

/// Multiplies gradients by the number of the step, which it keeps as a tensor, from its first step on.
#[derive(Default)]
struct Growing(Option<f32>);

impl CommHook for Growing {
    fn describe(&self) -> String {
        "growing".into()
    }

    fn start(&mut self, group: &dyn Communicator, mut bucket: GradBucket) -> Result<Pending> {
        let step = self.0.get_or_insert(0.0);
        *step += f32::from(u8::from(bucket.index == 0));
        bucket.buffer.as_mut_slice::<f32>()?.iter_mut().for_each(|element| *element *= *step);
        AllReduce.start(group, bucket)
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(self.0.iter().fold(HookState::default(), |state, step| state.common("step", 0, vec![*step])))
    }

    fn load(&mut self, mut state: HookState) -> Result<()> {
        self.0 = state.take("step").remove(&0).map(|step| step[0]);
        Ok(())
    }
}

#[test]
fn a_hook_whose_state_comes_with_its_first_step_goes_on_from_it_and_back_to_none() {
    let start = floats(&Training::new(Rule::sgd(0.9)).model.store);
    let new = |group: &ProcessGroup| {
        let mut training = Training::like(&start, group);
        training.state.ddp.register_comm_hook(Growing::default()).unwrap();
        training
    };
    let expected = run(2, |group| {
        let mut training = new(&group);
        training.train(0..6);
        training.parameters()
    });
    for saved_after in [0, 3] {
        let folder = tempfile::tempdir().unwrap();
        let resumed = run(2, |group| {
            let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
            let mut training = new(&group);
            training.train(0..saved_after);
            training.state.checkpoint(&checkpoints).unwrap();
            checkpoints.finish().unwrap();
            // One that has gone further, and one that has not begun.
            training.train(saved_after..saved_after + 2);
            assert!(training.state.resume(&checkpoints).unwrap());
            training.train(saved_after..6);
            let mut again = new(&group);
            assert!(again.state.resume(&checkpoints).unwrap());
            again.train(saved_after..6);
            [training.parameters(), again.parameters()]
        });
        for rank in resumed {
            assert_eq!(rank, [expected[0].clone(), expected[0].clone()], "after {saved_after} steps");
        }
    }
}

#[test]
fn another_hook_is_refused_after_a_load_also_where_the_saved_one_had_kept_nothing_so_far() {
    let folder = tempfile::tempdir().unwrap();
    let start = floats(&Training::new(Rule::sgd(0.9)).model.store);
    run(2, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let mut training = Training::like(&start, &group);
        training.state.ddp.register_comm_hook(Growing::default()).unwrap();
        training.state.checkpoint(&checkpoints).unwrap();
        checkpoints.finish().unwrap();
        drop(training);
        let resumed = || {
            let mut training = Training::like(&start, &group);
            assert!(training.state.resume(&checkpoints).unwrap());
            training
        };
        let mut same = resumed();
        same.state.ddp.register_comm_hook(Growing::default()).unwrap();
        same.train(0..1);
        drop(same);
        // PowerSGD counts its steps from the beginning.
        let error = resumed().state.ddp.register_comm_hook(power_sgd()).unwrap_err().to_string();
        assert!(error.contains("the saved state is that of growing, and"), "{error}");
    });
}

/// Keeps nothing but what each rank has of its own, from the beginning.
struct Residual(f32);

impl CommHook for Residual {
    fn describe(&self) -> String {
        "residual".into()
    }

    fn start(&mut self, group: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
        AllReduce.start(group, bucket)
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default().own("residual", 0, vec![self.0]))
    }

    fn load(&mut self, mut state: HookState) -> Result<()> {
        self.0 = state.take("residual").remove(&0).map_or(0.0, |residual| residual[0]);
        Ok(())
    }
}

#[test]
fn a_hook_that_keeps_something_for_each_rank_alone_begins_anew_among_other_ranks() {
    let folder = tempfile::tempdir().unwrap();
    run(2, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let mut training = Training::new(Rule::sgd(0.9)).with_group(&group);
        training.state.ddp.register_comm_hook(Residual(7.0)).unwrap();
        training.train(0..1);
        training.state.checkpoint(&checkpoints).unwrap();
        checkpoints.finish().unwrap();
    });
    run(3, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        for alone_first in [false, true] {
            let resumed = || {
                let mut training = Training::new(Rule::sgd(0.9));
                if !alone_first {
                    training = training.with_group(&group);
                }
                assert!(training.state.resume(&checkpoints).unwrap());
                if alone_first { training.with_group(&group) } else { training }
            };
            let mut same = resumed();
            same.state.ddp.register_comm_hook(Residual(0.0)).unwrap();
            same.train(1..2);
            drop(same);
            // Its error ends the group.
            if alone_first {
                let error = resumed().state.ddp.register_comm_hook(power_sgd()).unwrap_err().to_string();
                assert!(error.contains("the saved state is that of residual, and"), "{error}");
            }
        }
    });
}

#[test]
fn a_share_of_a_state_is_saved_beside_what_each_rank_has_of_its_own() {
    let start = floats(&Training::new(Rule::sgd(0.9)).model.store);
    let expected = run(2, |group| {
        let mut training = compressed(&start, &group);
        training.train(0..20);
        training.parameters()
    });
    let folder = tempfile::tempdir().unwrap();
    let resumed = run(2, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let rank = group.rank().index();
        let mut training = compressed(&start, &group);
        training.train(0..10);
        let save = |snapshot: &mut Snapshot| {
            training.state.save_shard_to(snapshot, &group)?;
            snapshot.slice("table", &[4], &[2 * rank], &[2], &[rank as f32, 7.0])
        };
        checkpoints.save_sharded(10, save).unwrap();
        checkpoints.finish().unwrap();
        drop(training);
        let mut training = compressed(&other(&start), &group);
        let saved = checkpoints.newest().unwrap().unwrap();
        training.state.load_from(&saved).unwrap();
        let mut table = [0f32; 4];
        saved.tensor("table").unwrap().copy_to(&mut table).unwrap();
        assert_eq!(table, [0.0, 7.0, 1.0, 7.0]);
        training.train(10..20);
        training.parameters()
    });
    assert_eq!(resumed, expected);
}

#[test]
fn a_loaded_hook_that_is_not_registered_is_refused_in_a_backward_pass_without_forward() {
    let folder = tempfile::tempdir().unwrap();
    let all_have_loaded = Barrier::new(2);
    run(2, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let loss = |model: &Mlp| model.loss(samples(0, 4));
        let (model, mut state) = plain(Rule::sgd(0.9), &group).unwrap();
        state.ddp.register_comm_hook(power_sgd()).unwrap();
        for _ in 0..5 {
            state.optimizer.zero_grad().unwrap();
            state.ddp.backward(&loss(&model)).unwrap();
            state.step(0.01).unwrap();
        }
        state.checkpoint(&checkpoints).unwrap();
        checkpoints.finish().unwrap();
        let (model, mut state) = plain(Rule::sgd(0.9), &group).unwrap();
        assert!(state.resume(&checkpoints).unwrap());
        // Its error ends the group, which one rank has left before the other.
        all_have_loaded.wait();
        let error = state.ddp.backward(&loss(&model)).unwrap_err().to_string();
        assert!(error.contains("none is registered"), "{error}");
        assert!(group.failure().is_some());
    });
}
