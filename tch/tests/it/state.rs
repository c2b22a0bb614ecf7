//! Checkpoints.

mod alike;
mod hooks;

use std::sync::Barrier;

use phalanx::checkpoint::{Checkpoints, Snapshot};
use phalanx::elastic::{Parts, State};
use phalanx::join::JoinOptions;
use phalanx::reducer::hooks::{
    AllReduce, CommHook, Compressed, GradBucket, HookState, Pending, PostLocalSgd, PowerSgd, PowerSgdOptions,
};
use phalanx::sampler::{ElasticSampler, Tail};
use phalanx::{Communicator, ProcessGroup, Rank, Result};
use phalanx_tch::{Ddp, DdpOptions, Optimizer, PeriodicModelAverager, Rule, TrainState};
use tch::{Kind, Tensor, nn};

use crate::common::{Mlp, elements, floats, load, on_device, run, samples};

const WIDTHS: [i64; 4] = [8, 16, 16, 3];

struct Training {
    model: Mlp,
    norm: nn::BatchNorm,
    state: TrainState<String>,
}

impl Training {
    fn new(rule: Rule) -> Self {
        let model = Mlp::new(&WIDTHS);
        let norm = nn::batch_norm1d(model.store.root() / "norm", 3, Default::default());
        let optimizer = Optimizer::new(&model.store, rule).unwrap();
        let state = TrainState::new(&model.store, optimizer, "fresh".to_owned()).unwrap();
        Self { model, norm, state }
    }

    /// From the variables of another one, in `group`.
    fn like(start: &[Vec<f32>], group: &ProcessGroup) -> Self {
        let training = Self::new(Rule::sgd(0.9));
        load(&training.model.store, start);
        training.with_group(group)
    }

    fn with_group(self, group: &ProcessGroup) -> Self {
        Self { state: self.state.with_group(group).unwrap(), ..self }
    }

    fn loss(&mut self, step: usize) -> Result<Tensor> {
        let from = 10 * step + 4 * self.state.ddp.rank().index();
        let (x, y) = samples(from, from + 4);
        let Self { model, norm, state } = self;
        state.ddp.forward(|| (model.forward(&x).apply_t(norm, true) - &y).square().mean(Kind::Float))
    }

    fn train(&mut self, steps: std::ops::Range<usize>) {
        for step in steps {
            let loss = self.loss(step).unwrap();
            self.state.optimizer.zero_grad().unwrap();
            self.state.ddp.backward(&loss).unwrap();
            self.state.step(0.01).unwrap();
        }
    }

    /// All but the running statistics, which are each rank's own after the last step.
    fn parameters(&self) -> Vec<Vec<f32>> {
        self.model.store.trainable_variables().iter().map(elements).collect()
    }
}

#[test]
fn training_goes_on_from_a_checkpoint_bit_for_bit_on_any_rank() {
    for rule in [Rule::ADAMW, Rule::sgd(0.9)] {
        for sharded in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let ends = run(2, |group| {
                let mut training = Training::new(rule);
                training.state = training.state.with_group(&group).unwrap();
                training.train(0..5);
                training.state.progress = "half".to_owned();
                let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
                match sharded {
                    true => training.state.checkpoint_sharded(&checkpoints).unwrap(),
                    false => training.state.checkpoint(&checkpoints).unwrap(),
                }
                checkpoints.finish().unwrap();
                training.train(5..9);

                let mut again = Training::new(rule);
                again.state = again.state.with_group(&group).unwrap();
                assert!(again.state.resume(&checkpoints).unwrap());
                assert_eq!((again.state.steps(), again.state.progress.as_str()), (5, "half"));
                again.train(5..9);
                (floats(&training.model.store), floats(&again.model.store))
            });
            // Running statistics are each rank's own after the last step.
            assert_eq!(ends[0].0, ends[0].1, "{rule:?}, sharded: {sharded}");
        }
    }
}

#[test]
fn gradients_of_a_step_that_is_not_over_are_in_no_state_and_do_not_outlive_a_load() {
    for (ranks, weight) in [(1, None), (2, None), (2, Some(4.0))] {
        let folder = tempfile::tempdir().unwrap();
        run(ranks, |group| {
            let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
            let mut training = Training::new(Rule::sgd(0.9)).with_group(&group);
            training.train(0..3);
            let mut parts = Parts::default();
            training.state.save(&mut parts).unwrap();
            training.state.checkpoint(&checkpoints).unwrap();
            checkpoints.finish().unwrap();
            training.train(3..6);
            let expected = training.parameters();

            let hold = |training: &mut Training| {
                let loss = training.loss(9).unwrap();
                training.state.optimizer.zero_grad().unwrap();
                match weight {
                    Some(weight) => training.state.ddp.backward_no_sync_weighted(&loss, weight).unwrap(),
                    None => training.state.ddp.backward_no_sync(&loss).unwrap(),
                }
            };
            hold(&mut training);
            let refused = |outcome: Result<()>| {
                let error = outcome.unwrap_err().to_string();
                assert!(error.contains("in the middle of a step"), "{error}");
            };
            // A commit of an elastic job, a checkpoint of one file, one of many, and what a closure of the program's own saves.
            refused(training.state.save(&mut Parts::default()));
            refused(training.state.checkpoint(&checkpoints));
            refused(training.state.checkpoint_sharded(&checkpoints));
            let outcome = checkpoints.save(7, |snapshot| training.state.save_to(snapshot));
            if group.rank().is_main() {
                refused(outcome);
            }
            for from_checkpoint in [false, true] {
                match from_checkpoint {
                    true => assert!(training.state.resume(&checkpoints).unwrap()),
                    false => training.state.load(&parts).unwrap(),
                }
                // The first step adds to what is there, if anything is.
                for step in 3..6 {
                    let loss = training.loss(step).unwrap();
                    training.state.ddp.backward(&loss).unwrap();
                    training.state.step(0.01).unwrap();
                    training.state.optimizer.zero_grad().unwrap();
                }
                assert_eq!(training.parameters(), expected, "{ranks} ranks, {weight:?}, {from_checkpoint}");
                hold(&mut training);
            }
            // Dropped, they are missing nowhere.
            training.state.optimizer.zero_grad().unwrap();
            training.state.save(&mut Parts::default()).unwrap();
            training.state.ddp.drop_accumulated().unwrap();
            hold(&mut training);
            training.state.ddp.drop_accumulated().unwrap();
            assert!(training.model.store.trainable_variables().iter().all(|one| !one.grad().defined()));
            training.state.save(&mut Parts::default()).unwrap();
            hold(&mut training);
            // The error ends the group, also for a rank that has not come so far.
            let _met = group.barrier();
            refused(training.state.with_group(&group).map(drop));
        });
    }
}

#[test]
fn another_model_or_optimizer_is_refused_and_nothing_changes() {
    let (folder, alone) = (tempfile::tempdir().unwrap(), ProcessGroup::alone().unwrap());
    let checkpoints = Checkpoints::open(folder.path(), &alone).unwrap();
    let mut training = Training::new(Rule::ADAMW);
    training.train(0..2);
    training.state.checkpoint(&checkpoints).unwrap();
    checkpoints.finish().unwrap();

    let mut other = Training::new(Rule::sgd(0.9));
    let before = floats(&other.model.store);
    let error = other.state.resume(&checkpoints).unwrap_err();
    let text = error.to_string();
    let words = ["another optimizer", "exp_avg, exp_avg_sq, step", "momentum_buffer"];
    assert!(error.is_mismatch() && words.iter().all(|word| text.contains(word)), "{text}");
    assert_eq!(floats(&other.model.store), before);

    let model = Mlp::new(&[8, 16, 3]);
    let optimizer = Optimizer::new(&model.store, Rule::ADAMW).unwrap();
    let mut other = TrainState::new(&model.store, optimizer, String::new()).unwrap();
    let error = other.resume(&checkpoints).unwrap_err();
    assert!(error.is_mismatch() && error.to_string().contains("`1.bias`"), "{error}");

    // One whose buffer has become another since.
    let mut other = Training::new(Rule::ADAMW);
    let before = floats(&other.model.store);
    other.norm.running_mean.set_data(&Tensor::zeros([3], on_device(Kind::Double)));
    let error = other.state.resume(&checkpoints).unwrap_err().to_string();
    assert!(error.contains("`norm.running_mean`") && error.contains("Double"), "{error}");
    assert_eq!(floats(&other.model.store), before);
}

#[test]
fn an_optimizer_of_more_or_fewer_parameters_than_the_saved_one_is_refused_by_name() {
    let freeze = |training: Training, names: &[&str]| {
        let variables = training.model.store.variables();
        names.iter().for_each(|name| drop(variables[*name].set_requires_grad(false)));
        let optimizer = Optimizer::new(&training.model.store, Rule::ADAMW).unwrap();
        let state = TrainState::new(&training.model.store, optimizer, "fresh".to_owned()).unwrap();
        Training { state, ..training }
    };
    let names = ["1.bias", "1.weight"];
    for (frozen_then, frozen_now) in [(&names[..], &names[..0]), (&names[..0], &names[..])] {
        let (folder, alone) = (tempfile::tempdir().unwrap(), ProcessGroup::alone().unwrap());
        let checkpoints = Checkpoints::open(folder.path(), &alone).unwrap();
        let mut training = freeze(Training::new(Rule::ADAMW), frozen_then);
        training.train(0..2);
        training.state.checkpoint(&checkpoints).unwrap();
        checkpoints.finish().unwrap();
        let mut other = freeze(Training::new(Rule::ADAMW), frozen_now);
        let before = floats(&other.model.store);
        let error = other.state.resume(&checkpoints).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("`1."), "{error}");
        assert_eq!(floats(&other.model.store), before);
        let mut same = freeze(Training::new(Rule::ADAMW), frozen_then);
        assert!(same.state.resume(&checkpoints).unwrap());
    }
}

#[test]
fn a_variable_that_was_made_after_the_state_is_refused_where_it_would_be_missing() {
    let (folder, alone) = (tempfile::tempdir().unwrap(), ProcessGroup::alone().unwrap());
    let checkpoints = Checkpoints::open(folder.path(), &alone).unwrap();
    let mut training = Training::new(Rule::ADAMW);
    training.train(0..2);
    training.state.checkpoint(&checkpoints).unwrap();
    checkpoints.finish().unwrap();
    drop(training.model.store.root().zeros_no_train("late", &[3]));
    let refused = |outcome: Result<()>| {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("`late` was made after"), "{error}");
    };
    refused(training.state.resume(&checkpoints).map(drop));
    refused(training.state.save(&mut Parts::default()));
    refused(training.state.checkpoint(&checkpoints));
}

/// As many bytes as before, so that nobody could tell later.
#[test]
fn a_variable_of_another_type_or_shape_by_now_is_not_saved_as_what_it_was() {
    for other in [Tensor::ones([3], on_device(Kind::Int)), Tensor::ones([3, 1], on_device(Kind::Float))] {
        let mut training = Training::new(Rule::ADAMW);
        training.norm.running_mean.set_data(&other);
        let error = training.state.save(&mut Parts::default()).unwrap_err().to_string();
        assert!(error.contains("`norm.running_mean`") && error.contains("changed since Ddp::new"), "{error}");
    }
}

#[test]
fn an_optimizer_that_lacks_a_trained_variable_is_refused_by_its_name() {
    let model = Mlp::new(&WIDTHS);
    let optimizer = Optimizer::new(&model.store, Rule::ADAMW).unwrap();
    let late = model.store.root().ones("late", &[3]);
    let mut state = TrainState::new(&model.store, optimizer, ()).unwrap();
    let (x, y) = samples(0, 4);
    let loss = state.ddp.forward(|| (model.forward(&x) * &late - &y).square().mean(Kind::Float)).unwrap();
    state.ddp.backward(&loss).unwrap();
    let before = floats(&model.store);
    let error = state.step(0.1).unwrap_err().to_string();
    assert!(error.contains("`late` has a gradient") && error.contains("before Optimizer::new"), "{error}");
    assert_eq!((state.steps(), floats(&model.store)), (0, before));
    // A frozen one is not to be trained.
    drop(late.set_requires_grad(false));
    state.step(0.1).unwrap();
}

#[test]
fn a_sampler_of_another_order_is_refused_and_changes_nothing() {
    let (folder, alone) = (tempfile::tempdir().unwrap(), ProcessGroup::alone().unwrap());
    let checkpoints = Checkpoints::open(folder.path(), &alone).unwrap();
    let new = |sampler: ElasticSampler| {
        let model = Mlp::new(&WIDTHS);
        let optimizer = Optimizer::new(&model.store, Rule::ADAMW).unwrap();
        let state = TrainState::new(&model.store, optimizer, sampler).unwrap();
        (model, state)
    };
    let (_model, mut training) = new(ElasticSampler::new(100));
    training.next_batch(4).unwrap();
    training.checkpoint(&checkpoints).unwrap();
    checkpoints.finish().unwrap();
    for (sampler, said) in [
        (ElasticSampler::new(150), "`samples` was 100 and is 150"),
        (ElasticSampler::new(100).tail(Tail::Repeat), "`tail` was Split and is Repeat"),
    ] {
        let (model, mut other) = new(sampler.clone());
        let before = floats(&model.store);
        let error = other.resume(&checkpoints).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains(said), "{error}");
        assert_eq!((other.steps(), &other.progress, floats(&model.store)), (0, &sampler, before));
    }
    let (_model, mut same) = new(ElasticSampler::new(100));
    assert!(same.resume(&checkpoints).unwrap());
    assert_eq!(same.progress.consumed(), 4);
}

#[test]
fn ranks_with_other_samplers_are_told_before_they_begin() {
    let folder = tempfile::tempdir().unwrap();
    run(2, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let (model, sampler) = (Mlp::new(&WIDTHS), ElasticSampler::new(50 + group.rank().index()));
        let optimizer = Optimizer::new(&model.store, Rule::ADAMW).unwrap();
        let mut state = TrainState::new(&model.store, optimizer, sampler).unwrap();
        let error = state.resume(&checkpoints).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("samples 51"), "{error}");
    });
}

/// A model without buffers in `group`.
fn plain(rule: Rule, group: &ProcessGroup) -> Result<(Mlp, TrainState)> {
    let model = Mlp::new(&WIDTHS);
    let state = TrainState::new(&model.store, Optimizer::new(&model.store, rule)?, ())?;
    let averager = PeriodicModelAverager::new(2)?;
    Ok((model, state.with_averager(averager).with_group(group)?))
}

#[test]
fn steps_in_a_join_are_counted_and_all_ranks_go_on_from_the_same_count() {
    let folder = tempfile::tempdir().unwrap();
    run(2, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let (model, mut state) = plain(Rule::sgd(0.9), &group).unwrap();
        let rank = group.rank().index();
        let done = state.join(JoinOptions::default(), |state| {
            for step in 0..1 + 2 * rank {
                let loss = state.ddp.forward(|| model.loss(samples(4 * step, 4 * step + 4)))?;
                state.optimizer.zero_grad()?;
                state.ddp.backward(&loss)?;
                state.step(0.01)?;
            }
            Ok(state.steps())
        });
        assert_eq!(done.unwrap(), 1 + 2 * rank as u64);
        let averaged = state.averager.as_ref().map(PeriodicModelAverager::steps);
        assert_eq!((state.steps(), averaged), (3, Some(3)));
        assert!(state.ddp.replicas_identical().unwrap());
        state.checkpoint(&checkpoints).unwrap();
        checkpoints.finish().unwrap();
        assert_eq!(checkpoints.newest().unwrap().unwrap().step(), 3);
    });
}

#[test]
fn the_rule_of_a_checkpoint_is_gone_on_by_until_the_program_sets_another() {
    let rule = |weight_decay| Rule::AdamW { betas: (0.8, 0.9), epsilon: 1e-6, weight_decay };
    let (folder, alone) = (tempfile::tempdir().unwrap(), ProcessGroup::alone().unwrap());
    let checkpoints = Checkpoints::open(folder.path(), &alone).unwrap();
    let mut training = Training::new(rule(0.3));
    training.train(0..3);
    training.state.checkpoint(&checkpoints).unwrap();
    checkpoints.finish().unwrap();
    let mut parts = Parts::default();
    training.state.save(&mut parts).unwrap();
    training.train(3..6);
    for from_checkpoint in [true, false] {
        let mut again = Training::new(Rule::ADAMW);
        match from_checkpoint {
            true => assert!(again.state.resume(&checkpoints).unwrap()),
            false => again.state.load(&parts).unwrap(),
        }
        assert_eq!(again.state.optimizer.rule(), rule(0.3));
        again.train(3..6);
        assert_eq!(floats(&again.model.store), floats(&training.model.store));
        again.state.optimizer.set_rule(rule(0.0)).unwrap();
        assert_eq!(again.state.optimizer.rule(), rule(0.0));
        let error = again.state.optimizer.set_rule(Rule::sgd(0.9)).unwrap_err().to_string();
        assert!(error.contains("momentum_buffer") && error.contains("make a new Optimizer"), "{error}");
    }
}

#[test]
fn two_states_are_saved_beside_each_other() {
    let (folder, alone) = (tempfile::tempdir().unwrap(), ProcessGroup::alone().unwrap());
    let names = ["generator", "discriminator"];
    let named = |name: &str| {
        let training = Training::new(Rule::ADAMW);
        Training { state: training.state.named(name), ..training }
    };
    let mut both = names.map(named);
    for (step, training) in both.iter_mut().enumerate() {
        training.train(0..step + 1);
    }
    let mut parts = Parts::default();
    both.iter().for_each(|training| training.state.save(&mut parts).unwrap());
    let checkpoints = Checkpoints::open(folder.path(), &alone).unwrap();
    let save =
        |snapshot: &mut Snapshot| both.iter().try_for_each(|training| training.state.save_to(snapshot));
    checkpoints.save(1, save).unwrap();
    checkpoints.finish().unwrap();
    let saved = checkpoints.newest().unwrap().unwrap();
    for (name, training) in names.into_iter().zip(&both) {
        for from_checkpoint in [false, true] {
            let mut again = named(name);
            match from_checkpoint {
                true => again.state.load_from(&saved).unwrap(),
                false => again.state.load(&parts).unwrap(),
            }
            assert_eq!(again.state.steps(), training.state.steps());
            assert_eq!(floats(&again.model.store), floats(&training.model.store));
        }
    }
    assert!(Training::new(Rule::ADAMW).state.load(&parts).unwrap_err().is_mismatch());
}

/// A training whose variables of such names are a group of their own.
fn grouped(ending: &str) -> Training {
    let training = Training::new(Rule::ADAMW);
    let is_member = |name: &str| name.ends_with(ending);
    let members = training.model.store.variables().into_iter().filter(|(name, _)| is_member(name));
    let optimizer = Optimizer::new(&training.model.store, Rule::ADAMW).unwrap();
    let optimizer = optimizer.with_group(Rule::sgd(0.9), members.map(|(_, one)| one)).unwrap();
    let state = TrainState::new(&training.model.store, optimizer, "fresh".to_owned()).unwrap();
    Training { state, ..training }
}

#[test]
fn groups_of_an_optimizer_go_on_from_a_checkpoint_and_others_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    run(2, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let mut training = grouped("bias").with_group(&group);
        training.train(0..3);
        training.state.checkpoint(&checkpoints).unwrap();
        checkpoints.finish().unwrap();
        training.train(3..6);
        let mut again = grouped("bias").with_group(&group);
        assert!(again.state.resume(&checkpoints).unwrap());
        assert_eq!(again.state.optimizer.rules(), [Rule::ADAMW, Rule::sgd(0.9)]);
        again.train(3..6);
        assert_eq!(again.parameters(), training.parameters());
        for (mut other, said) in [
            (grouped("weight"), "` is in group"),
            (Training::new(Rule::ADAMW), "with 2 groups of parameters, and this one has 1"),
        ] {
            let before = other.parameters();
            let error = other.state.resume(&checkpoints).unwrap_err();
            assert!(error.is_mismatch() && error.to_string().contains(said), "{error}");
            assert_eq!(other.parameters(), before);
        }
        // Each group has a rate of its own.
        let before = floats(&again.model.store);
        again.state.step_groups(&[0.0, 0.1]).unwrap();
        let mut names: Vec<String> = again.model.store.variables().into_keys().collect();
        names.sort_unstable();
        for ((name, before), after) in names.iter().zip(&before).zip(floats(&again.model.store)) {
            // A bias before a batch norm has nearly no gradient.
            assert!(name == "2.bias" || (*before != after) == name.ends_with("bias"), "{name}");
        }
        assert_eq!(again.state.steps(), 7);
    });
    let errors = run(2, |group| {
        let training = grouped(if group.rank().is_main() { "bias" } else { "weight" });
        training.state.with_group(&group).map(drop).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|text| text.contains(" (in group 1 of the optimizer)`")), "{errors:?}");
}

/// A rank that is done earlier does not set it.
#[test]
fn a_rule_that_is_set_in_a_join_is_that_of_all_ranks_afterwards() {
    let adamw = Rule::AdamW { betas: (0.8, 0.99), epsilon: 1e-6, weight_decay: 0.1 };
    let sgd = Rule::Sgd { momentum: 0.9, weight_decay: 0.1, nesterov: true };
    for (before, after) in [(Rule::ADAMW, adamw), (Rule::sgd(0.5), sgd)] {
        let rules = run(2, |group| {
            let (model, mut state) = plain(before, &group).unwrap();
            let batches = 1 + 2 * group.rank().index();
            let done = state.join(JoinOptions::default(), |state| {
                for step in 0..batches {
                    if step == 2 {
                        state.optimizer.set_rule(after)?;
                    }
                    let loss = state.ddp.forward(|| model.loss(samples(4 * step, 4 * step + 4)))?;
                    state.optimizer.zero_grad()?;
                    state.ddp.backward(&loss)?;
                    state.step(0.01)?;
                }
                Ok(())
            });
            done.unwrap();
            state.optimizer.rule()
        });
        assert_eq!(rules, [after; 2]);
    }
}

/// As by a schedule that divides by zero on one rank.
#[test]
fn a_step_that_one_rank_alone_cannot_make_is_an_error_on_every_rank() {
    let all_are_here = Barrier::new(2);
    run(2, |group| {
        let mut training = Training::new(Rule::ADAMW).with_group(&group);
        training.train(0..2);
        let loss = training.loss(2).unwrap();
        training.state.optimizer.zero_grad().unwrap();
        training.state.ddp.backward(&loss).unwrap();
        // The error ends the group, in which the other rank may still wait for the average.
        all_are_here.wait();
        let error = if group.rank().is_main() {
            training.state.step(f64::NAN).unwrap_err()
        } else {
            training.state.step(0.01).unwrap();
            training.loss(3).and_then(|loss| training.state.ddp.backward(&loss)).unwrap_err()
        };
        assert!(error.to_string().contains("the learning rate NaN"), "{error}");
        assert!(group.rank().is_main() || error.to_string().contains("rank 0"), "{error}");
        assert_eq!(training.state.steps(), if group.rank().is_main() { 2 } else { 3 });
    });
}

#[test]
fn ranks_come_to_a_group_with_rank_0_s_optimizer_and_the_same_number_of_steps() {
    let ends = run(2, |group| {
        let mut training = Training::new(Rule::ADAMW);
        // Alone, each with samples of its own.
        let first = 10 * group.rank().index();
        training.train(first..first + 3);
        let mut training = training.with_group(&group);
        training.train(3..6);
        training.parameters()
    });
    assert_eq!(ends[0], ends[1]);
    let errors = run(2, |group| {
        let mut training = Training::new(Rule::ADAMW);
        training.train(0..1 + group.rank().index());
        training.state.with_group(&group).map(drop).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("number of steps of rank 0 is 1") && error.contains("rank 1 is 2"), "{error}");
    }
}
