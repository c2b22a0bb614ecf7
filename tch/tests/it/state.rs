//! Checkpoints.

use phalanx::ProcessGroup;
use phalanx::checkpoint::Checkpoints;
use phalanx_tch::{Optimizer, Rule, TrainState};
use tch::{Device, Kind, Tensor, nn};

use crate::common::{Mlp, floats, run, samples};

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

    fn train(&mut self, steps: std::ops::Range<usize>) {
        for step in steps {
            let from = 10 * step + 4 * self.state.ddp.rank().index();
            let (x, y) = samples(from, from + 4);
            let loss = || (self.model.forward(&x).apply_t(&self.norm, true) - &y).square().mean(Kind::Float);
            let loss = self.state.ddp.forward(loss).unwrap();
            self.state.optimizer.zero_grad().unwrap();
            self.state.ddp.backward(&loss).unwrap();
            self.state.step(0.01).unwrap();
        }
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
    other.norm.running_mean.set_data(&Tensor::zeros([3], (Kind::Double, Device::Cpu)));
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
