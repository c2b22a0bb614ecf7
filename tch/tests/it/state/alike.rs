//! What ranks compare of their optimizers.

use super::*;

/// The error with which 70 steps of training end. `rate` is asked for the learning rate of each when there are gradients.
fn error_of_steps(
    training: &mut Training,
    mut rate: impl FnMut(&mut Training, usize) -> Result<f64>,
) -> Option<String> {
    let mut step = |number| {
        let loss = training.loss(number)?;
        training.state.optimizer.zero_grad()?;
        training.state.ddp.backward(&loss)?;
        let rate = rate(training, number)?;
        training.state.step(rate)
    };
    (0..70).find_map(|number| step(number).err()).map(|error| error.to_string())
}

/// AdamW without decay of the parameters of such names. The rules are the same whichever these are.
fn undecayed(store: &nn::VarStore, ending: &str) -> Optimizer {
    let rule = Rule::AdamW { betas: (0.9, 0.999), epsilon: 1e-8, weight_decay: 0.0 };
    let members = store.variables().into_iter().filter(|(name, _)| name.ends_with(ending));
    let optimizer = Optimizer::new(store, Rule::ADAMW).unwrap();
    optimizer.with_group(rule, members.map(|(_, one)| one)).unwrap()
}

#[test]
fn steps_by_gradients_of_a_plain_backward_are_not_compared() {
    run(2, |group| {
        let mut training = Training::new(Rule::sgd(0.9)).with_group(&group);
        for step in 0..70 {
            training.train(step..step + 1);
            // One rank trains on by itself, with a rate of its own.
            if !group.rank().is_main() && step % 2 == 0 {
                training.state.optimizer.zero_grad().unwrap();
                training.model.loss(samples(0, 4)).backward();
                training.state.step(0.001).unwrap();
            }
        }
    });
}

#[test]
fn steps_by_gradients_that_are_not_averaged_are_not_compared() {
    run(2, |group| {
        let mut training = Training::new(Rule::sgd(0.9)).with_group(&group);
        let rank = group.rank().index();
        for step in 0..70 {
            training.train(step..step + 1);
            // Each rank by itself, at a rate of its own and so often as it likes.
            for _ in 0..=rank {
                let loss = training.loss(step).unwrap();
                training.state.optimizer.zero_grad().unwrap();
                training.state.ddp.backward_no_sync(&loss).unwrap();
                training.state.step(0.01 / (1 + rank) as f64).unwrap();
            }
            training.state.ddp.average_parameters().unwrap();
        }
        assert_eq!(training.state.steps(), 70 * (2 + rank as u64));
    });
}

#[test]
fn other_rules_or_learning_rates_on_one_rank_are_an_error_on_every_rank() {
    let other = Rule::AdamW { betas: (0.9, 0.999), epsilon: 1e-8, weight_decay: 0.0 };
    for (rate, rule, said) in [
        (0.01, Rule::ADAMW, None),
        (0.02, Rule::ADAMW, Some("the last one was 0.01 on rank 0, and 0.02 on rank 1")),
        (0.01, other, Some("the optimizer of rank 1 has other settings than that of rank 0")),
    ] {
        let errors = run(2, |group| {
            let mut training = Training::new(Rule::ADAMW).with_group(&group);
            let is_main = group.rank().is_main();
            training.state.optimizer.set_rule(if is_main { Rule::ADAMW } else { rule }).unwrap();
            error_of_steps(&mut training, |_, _| Ok(if is_main { 0.01 } else { rate }))
        });
        for error in errors {
            assert_eq!(error.is_some(), said.is_some(), "{error:?}");
            assert!(error.iter().zip(said).all(|(error, said)| error.contains(said)), "{error:?}");
        }
    }
}

#[test]
fn gradients_that_one_rank_clips_to_another_norm_are_an_error_on_every_rank() {
    for (other, expected) in [(1e-4, false), (2e-4, true)] {
        let errors = run(2, |group| {
            let mut training = Training::new(Rule::sgd(0.0)).with_group(&group);
            let max_norm = if group.rank().is_main() { 1e-4 } else { other };
            error_of_steps(&mut training, |training, _| {
                assert!(training.state.ddp.clip_grad_norm(max_norm)? > 2e-4);
                Ok(0.01)
            })
        });
        for error in errors {
            assert_eq!(error.is_some(), expected, "{error:?}");
            assert!(error.is_none_or(|error| error.contains("clips gradients otherwise")));
        }
    }
}

#[test]
fn an_optimizer_that_one_rank_alone_makes_anew_is_an_error_on_every_rank() {
    // Plain SGD keeps nothing that a new one would lack.
    for (rule, expected) in [(Rule::ADAMW, true), (Rule::sgd(0.9), true), (Rule::sgd(0.0), false)] {
        let errors = run(2, |group| {
            let mut training = Training::new(rule).with_group(&group);
            error_of_steps(&mut training, |training, number| {
                if number == 5 && !group.rank().is_main() {
                    training.state.optimizer = Optimizer::new(&training.model.store, rule).unwrap();
                }
                Ok(0.01)
            })
        });
        for error in errors {
            assert_eq!(error.is_some(), expected, "{error:?}");
            let said = "the optimizer of rank 1 has other settings than that of rank 0";
            assert!(error.is_none_or(|error| error.contains(said)));
        }
    }
}

#[test]
fn other_groups_of_parameters_on_one_rank_are_an_error_on_every_rank() {
    for (other, expected) in [("bias", false), ("weight", true)] {
        let errors = run(2, |group| {
            let mut training = Training::new(Rule::ADAMW).with_group(&group);
            let ending = if group.rank().is_main() { "bias" } else { other };
            training.state.optimizer = undecayed(&training.model.store, ending);
            error_of_steps(&mut training, |_, _| Ok(0.01))
        });
        for error in errors {
            assert_eq!(error.is_some(), expected, "{error:?}");
            let said = "the optimizer of rank 1 has other settings than that of rank 0";
            assert!(error.is_none_or(|error| error.contains(said)));
        }
    }
}

#[test]
fn other_groups_of_parameters_at_the_end_of_a_join_are_an_error_on_every_rank() {
    for (other, expected) in [("bias", false), ("weight", true)] {
        let errors = run(2, |group| {
            let model = Mlp::new(&WIDTHS);
            let mut ddp = Ddp::new(&model.store, &group).unwrap();
            let mut optimizer = undecayed(&model.store, if group.rank().is_main() { "bias" } else { other });
            let batches = 1 + group.rank().index();
            let joined = ddp.join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
                for step in 0..batches {
                    let loss = ddp.forward(|| model.loss(samples(step, step + 4)))?;
                    optimizer.zero_grad()?;
                    ddp.backward(&loss)?;
                    optimizer.step(0.01)?;
                }
                Ok(())
            });
            joined.err().map(|error| error.to_string())
        });
        for error in errors {
            assert_eq!(error.is_some(), expected, "{error:?}");
            assert!(error.is_none_or(|error| error.contains(" (in group 1 of the optimizer)` ")));
        }
    }
}

#[test]
fn ranks_that_load_other_states_are_an_error_on_every_rank() {
    // By rank, which of two states it loads one after the other, and whether that is an error.
    let cases: [([&[usize]; 2], bool); 5] = [
        ([&[0], &[0]], false),
        ([&[0], &[]], true),
        ([&[], &[0]], true),
        ([&[0], &[1]], true),
        // Rank 1 could not read the other one.
        ([&[1, 0], &[0]], false),
    ];
    for (loads, is_error) in cases {
        let folder = tempfile::tempdir().unwrap();
        let errors = run(2, |group| {
            let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
            let mut training = Training::new(Rule::ADAMW).with_group(&group);
            let saved = [0..2, 2..3].map(|steps| {
                training.train(steps);
                training.state.checkpoint(&checkpoints).unwrap();
                checkpoints.finish().unwrap();
                checkpoints.newest().unwrap().unwrap()
            });
            for which in loads[group.rank().index()] {
                training.state.load_from(&saved[*which]).unwrap();
            }
            error_of_steps(&mut training, |_, _| Ok(0.01))
        });
        for error in errors {
            assert_eq!(error.is_some(), is_error, "{loads:?}: {error:?}");
            assert!(error.is_none_or(|error| error.contains("one rank alone has loaded a state")));
        }
    }
}

#[test]
fn ranks_with_disks_of_their_own_load_the_state_of_one_run() {
    for is_one_run in [true, false] {
        let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let errors = run(2, |group| {
            let rank = group.rank().index();
            let mut training = Training::new(Rule::ADAMW).with_group(&group);
            training.train(0..1);
            // As the running statistics are.
            training.state.progress = format!("of rank {rank}");
            let mut other = Training::new(Rule::ADAMW);
            other.train(3..4);
            let own = if is_one_run || rank == 0 { &training } else { &other };
            assert_eq!(own.state.steps(), 1);
            let disk = Checkpoints::open(folders[rank].path(), &ProcessGroup::alone().unwrap()).unwrap();
            disk.save(1, |snapshot| own.state.save_to(snapshot)).unwrap();
            disk.finish().unwrap();
            let mut again = Training::new(Rule::ADAMW).with_group(&group);
            assert!(again.state.resume(&disk).unwrap());
            error_of_steps(&mut again, |_, _| Ok(0.01))
        });
        for error in errors {
            assert_eq!(error.is_none(), is_one_run, "{error:?}");
            assert!(error.is_none_or(|error| error.contains("or that of another step or run")));
        }
        // Also if the state is changed before it comes into the group, or has come from an elastic job.
        for case in ["", "changed", "elastic"] {
            let errors = run(2, |group| {
                let folder = folders[group.rank().index()].path();
                let disk = Checkpoints::open(folder, &ProcessGroup::alone().unwrap()).unwrap();
                let mut again = Training::new(Rule::ADAMW);
                if case == "elastic" {
                    again.state.enter(&group).unwrap();
                    again.state.leave();
                }
                assert!(again.state.resume(&disk).unwrap());
                if case == "changed" {
                    again.state = again.state.with_options(DdpOptions::default()).unwrap();
                }
                again.state.with_group(&group).map(drop).err().map(|error| error.to_string())
            });
            for error in errors {
                assert_eq!(error.is_none(), is_one_run, "{case}: {error:?}");
                let said = "the loaded state of rank 0 is that after step 1";
                assert!(error.is_none_or(|error| error.contains(said)));
            }
        }
    }
}

#[test]
fn ranks_whose_rules_differ_are_refused_with_both() {
    let errors = run(3, |group| {
        let momentum = if group.rank().index() == 2 { 0.8 } else { 0.9 };
        plain(Rule::sgd(momentum), &group).map(drop).unwrap_err().to_string()
    });
    for error in errors {
        assert!(
            error.contains("momentum: 0.9") && error.contains("rank 2 is Sgd { momentum: 0.8"),
            "{error}"
        );
    }
}

#[test]
fn ranks_that_average_their_models_after_other_numbers_of_steps_are_refused() {
    let errors = run(2, |group| {
        let training = Training::new(Rule::ADAMW);
        let period = if group.rank().is_main() { 4 } else { 5 };
        let state = training.state.with_averager(PeriodicModelAverager::new(period).unwrap());
        state.with_group(&group).map(drop).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("period: 4") && error.contains("period: 5"), "{error}");
    }
}

/// What one rank alone does not train would drift apart.
#[test]
fn ranks_whose_optimizers_have_other_parameters_are_refused() {
    let errors = run(2, |group| {
        let model = Mlp::new(&WIDTHS);
        let bias = model.layers[0].bs.as_ref().unwrap();
        drop(bias.set_requires_grad(group.rank().is_main()));
        let optimizer = Optimizer::new(&model.store, Rule::ADAMW).unwrap();
        drop(bias.set_requires_grad(true));
        let state = TrainState::new(&model.store, optimizer, ()).unwrap();
        state.with_group(&group).map(drop).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("`0.bias`") && error.contains("on rank 1"), "{error}");
    }
}

#[test]
fn an_averager_that_is_given_after_the_group_is_compared_by_its_averages() {
    for (other, expected) in [(4, false), (5, true)] {
        let errors = run(2, |group| {
            let mut training = Training::new(Rule::sgd(0.9)).with_group(&group);
            let period = if group.rank().is_main() { 4 } else { other };
            training.state.averager = Some(PeriodicModelAverager::new(period).unwrap());
            error_of_steps(&mut training, |_, _| Ok(0.01))
        });
        for error in errors {
            assert_eq!(error.is_some(), expected, "{error:?}");
            let said = |said: &str| said.contains("period: 4") && said.contains("period: 5");
            assert!(error.is_none_or(|error| said(&error)));
        }
    }
}

#[test]
fn ranks_that_take_other_samples_or_batches_are_told() {
    for (len, batch, is_error) in [(1000, 4, false), (1001, 4, true), (1000, 3, true)] {
        let errors = run(2, |group| {
            let (len, batch) = if group.rank().is_main() { (1000, 4) } else { (len, batch) };
            let model = Mlp::new(&WIDTHS);
            let optimizer = Optimizer::new(&model.store, Rule::sgd(0.9)).unwrap();
            let state = TrainState::new(&model.store, optimizer, ElasticSampler::new(len)).unwrap();
            let mut state = state.with_group(&group).unwrap();
            let mut step = || {
                state.next_batch(batch).unwrap();
                let (x, y) = samples(0, 4);
                let loss = state.ddp.forward(|| (model.forward(&x) - &y).square().mean(Kind::Float))?;
                state.optimizer.zero_grad()?;
                state.ddp.backward(&loss)?;
                state.step(0.01)
            };
            (0..70).find_map(|_| step().err()).map(|error| error.to_string())
        });
        for error in errors {
            assert_eq!(error.is_some(), is_error, "{len} in batches of {batch}: {error:?}");
            assert!(error.is_none_or(|error| error.contains("batches of another size")));
        }
    }
}
