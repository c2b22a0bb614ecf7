//! A tensor that stands in several places of a model trains as in one process, or is refused by names.

use phalanx::ProcessGroup;
use phalanx::checkpoint::Checkpoints;
use phalanx::reducer::ReducerOptions;
use phalanx_tch::{Ddp, DdpOptions, Optimizer, Rule, TrainState};
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Kind, Tensor};

use crate::common::{device, distance, elements, floats, load, run, samples};

/// How the second layer has the first one's weight.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Tie {
    Untied,
    /// Its field; the `VarStore` still has the variable that it was made with, which nobody uses.
    Field,
    /// A second name, also among the trainable variables.
    Name,
    /// Another leaf in the same memory.
    Alias,
    /// Another leaf in a part of the memory.
    Part,
}

const TIES: [Tie; 4] = [Tie::Field, Tie::Name, Tie::Alias, Tie::Part];

struct Tied {
    store: nn::VarStore,
    first: nn::Linear,
    second: nn::Linear,
}

impl Tied {
    fn new(tie: Tie) -> Self {
        let store = nn::VarStore::new(device());
        let root = store.root();
        let first = nn::linear(&root / "first", 8, 8, Default::default());
        let second = match tie {
            Tie::Untied | Tie::Field => {
                let mut second = nn::linear(&root / "second", 8, 8, Default::default());
                if tie == Tie::Field {
                    second.ws = first.ws.shallow_clone();
                }
                second
            }
            Tie::Name | Tie::Alias | Tie::Part => {
                let ws = match tie {
                    Tie::Name => first.ws.shallow_clone(),
                    Tie::Alias => first.ws.detach(),
                    _ => first.ws.detach().narrow(0, 2, 4),
                };
                let second = &root / "second";
                let ws = second.add("weight", ws, true);
                let bs = Some(second.zeros("bias", &[ws.size()[0]]));
                nn::Linear { ws, bs }
            }
        };
        Self { store, first, second }
    }

    fn like(tie: Tie, start: &[Vec<f32>]) -> Self {
        let this = Self::new(tie);
        load(&this.store, start);
        this
    }

    fn loss(&self, from: usize, to: usize) -> Tensor {
        let (x, y) = samples(from, to);
        let output = self.second.forward(&self.first.forward(&x).tanh());
        (output.narrow(1, 0, 3) - y).square().mean(Kind::Float)
    }
}

fn options() -> DdpOptions {
    let mut options = DdpOptions::default();
    options.reducer = ReducerOptions::default().find_unused_parameters(true).bucket_cap_mb(0.0001);
    options
}

enum Stepper {
    Ours(Optimizer),
    Theirs(nn::Optimizer),
}

impl Stepper {
    fn new(which: usize, store: &nn::VarStore) -> Self {
        match which {
            0 => Self::Ours(
                Optimizer::new(store, Rule::AdamW { betas: (0.9, 0.999), epsilon: 1e-8, weight_decay: 0.1 })
                    .unwrap(),
            ),
            1 => {
                let rule = Rule::Sgd { momentum: 0.9, weight_decay: 0.1, nesterov: false };
                Self::Ours(Optimizer::new(store, rule).unwrap())
            }
            2 => Self::Theirs(nn::adamw(0.9, 0.999, 0.1).build(store, 0.02).unwrap()),
            _ => Self::Theirs(nn::sgd(0.9, 0.0, 0.1, false).build(store, 0.02).unwrap()),
        }
    }

    fn zero_grad(&mut self) {
        match self {
            Self::Ours(optimizer) => optimizer.zero_grad().unwrap(),
            Self::Theirs(optimizer) => optimizer.zero_grad(),
        }
    }

    fn step(&mut self) {
        match self {
            Self::Ours(optimizer) => optimizer.step(0.02).unwrap(),
            Self::Theirs(optimizer) => optimizer.step(),
        }
    }
}

#[test]
fn a_tensor_in_two_places_trains_as_in_one_process() {
    for tie in TIES {
        let start = floats(&Tied::new(tie).store);
        for which in 0..4 {
            let train = |group: &ProcessGroup, batch: usize| {
                let model = Tied::like(tie, &start);
                let mut ddp = Ddp::with_options(&model.store, group, options()).unwrap();
                let mut optimizer = Stepper::new(which, &model.store);
                let mut norms = Vec::new();
                for step in 0..8 {
                    let from = 8 * step + batch * group.rank().index();
                    let loss = ddp.forward(|| model.loss(from, from + batch)).unwrap();
                    optimizer.zero_grad();
                    ddp.backward(&loss).unwrap();
                    norms.push(ddp.clip_grad_norm(0.1).unwrap() as f32);
                    optimizer.step();
                }
                assert!(ddp.replicas_identical().unwrap());
                (floats(&model.store), norms)
            };
            let (whole, norms) = train(&ProcessGroup::alone().unwrap(), 8);
            assert!(distance(&whole, &start) > 0.01, "{tie:?} {which}: nothing was learned");
            let ends = run(2, |group| train(&group, 4));
            assert_eq!(ends[0], ends[1], "{tie:?} {which}");
            let apart = [distance(&ends[0].0, &whole), distance(&[ends[0].1.clone()], &[norms])];
            assert!(apart.iter().all(|apart| *apart < 1e-4), "{tie:?} {which}: {apart:?}");
        }
    }
}

#[test]
fn parameters_that_share_memory_are_averaged_once() {
    for tie in TIES {
        run(2, |group| {
            let model = Tied::new(tie);
            let mut ddp = Ddp::with_options(&model.store, &group, options()).unwrap();
            let mine = f64::from(group.rank().get()) + 1.0;
            tch::no_grad(|| {
                for mut variable in model.store.trainable_variables() {
                    drop(variable.fill_(mine));
                }
            });
            ddp.average_parameters().unwrap();
            let averages = floats(&model.store);
            assert!(averages.iter().flatten().all(|&value| value == 1.5), "{tie:?}: {averages:?}");
        });
    }
}

#[test]
fn a_training_with_tied_weights_goes_on_from_a_checkpoint() {
    for tie in TIES {
        let folder = tempfile::tempdir().unwrap();
        run(2, |group| {
            let new = || {
                let model = Tied::new(tie);
                let optimizer = Optimizer::new(&model.store, Rule::ADAMW).unwrap();
                let state = TrainState::new(&model.store, optimizer, ()).unwrap();
                let state = state.with_options(options()).unwrap().with_group(&group).unwrap();
                (model, state)
            };
            let train = |(model, state): &mut (Tied, TrainState), steps: std::ops::Range<usize>| {
                for step in steps {
                    let from = 8 * step + 4 * group.rank().index();
                    let loss = state.ddp.forward(|| model.loss(from, from + 4)).unwrap();
                    state.optimizer.zero_grad().unwrap();
                    state.ddp.backward(&loss).unwrap();
                    state.step(0.01).unwrap();
                }
                floats(&model.store)
            };
            let mut training = new();
            train(&mut training, 0..4);
            let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
            training.1.checkpoint(&checkpoints).unwrap();
            checkpoints.finish().unwrap();
            let mut again = new();
            assert!(again.1.resume(&checkpoints).unwrap());
            assert_eq!(train(&mut again, 4..8), train(&mut training, 4..8), "{tie:?}");
        });
    }
}

#[test]
fn a_checkpoint_of_a_model_without_ties_is_refused_by_one_with_ties() {
    for tie in [Tie::Name, Tie::Alias] {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::open(folder.path(), &ProcessGroup::alone().unwrap()).unwrap();
        let train_state = |model: &Tied| {
            TrainState::new(&model.store, Optimizer::new(&model.store, Rule::sgd(0.0)).unwrap(), ()).unwrap()
        };
        train_state(&Tied::new(Tie::Untied)).checkpoint(&checkpoints).unwrap();
        checkpoints.finish().unwrap();
        let model = Tied::new(tie);
        let mut state = train_state(&model);
        let before = floats(&model.store);
        let error = state.resume(&checkpoints).unwrap_err();
        let text = error.to_string();
        // An optimizer has one parameter of them, or two.
        let is_named = text.contains("`second.weight`") || text.contains("`first.weight`");
        assert!(error.is_mismatch() && is_named, "{tie:?}: {text}");
        if tie == Tie::Alias {
            assert!(text.contains("share memory") && text.contains("`first.weight`"), "{text}");
        }
        assert_eq!(floats(&model.store), before, "nothing is changed");
    }
}

#[test]
fn ties_that_cannot_be_trained_are_refused_with_both_names() {
    let alone = ProcessGroup::alone().unwrap();
    // A view of a parameter is no leaf.
    let model = Tied::new(Tie::Untied);
    drop(model.store.root().add("transposed", model.first.ws.tr(), true));
    let error = Ddp::new(&model.store, &alone).unwrap_err().to_string();
    assert!(error.contains("`transposed`") && error.contains("`first.weight`"), "{error}");

    // A variable has another's name, and is still trainable.
    let model = Tied::new(Tie::Untied);
    let shared = model.first.ws.shallow_clone();
    model.store.variables_.lock().unwrap().named_variables.insert("second.weight".to_owned(), shared);
    let error = Ddp::new(&model.store, &alone).unwrap_err().to_string();
    let words = ["`first.weight` and `second.weight` are one tensor", "[8, 8]", "trainable_variables"];
    assert!(words.iter().all(|word| error.contains(word)), "{error}");

    // One rank has tied them.
    let errors = run(2, |group| {
        let tie = if group.rank().is_main() { Tie::Alias } else { Tie::Untied };
        Ddp::new(&Tied::new(tie).store, &group).unwrap_err()
    });
    for error in errors {
        let text = error.to_string();
        assert!(error.is_mismatch() && text.contains("in the memory of first.weight"), "{text}");
        assert!(text.contains("`second.weight`"), "{text}");
    }
}

#[test]
fn what_is_made_or_unfrozen_after_the_ddp_is_refused() {
    for late in ["made", "unfrozen", "made as a buffer"] {
        let errors = run(2, |group| {
            let attempt = || {
                let model = Tied::new(Tie::Untied);
                if late == "unfrozen" {
                    drop(model.second.ws.set_requires_grad(false));
                }
                let mut ddp = Ddp::new(&model.store, &group)?;
                match late {
                    "made" => drop(model.store.root().zeros("late", &[3])),
                    "made as a buffer" => drop(model.store.root().zeros_no_train("late", &[3])),
                    _ => drop(model.second.ws.set_requires_grad(true)),
                }
                let loss = ddp.forward(|| model.loss(0, 4))?;
                ddp.backward(&loss)
            };
            attempt().unwrap_err().to_string()
        });
        let name = if late == "unfrozen" { "`second.weight`" } else { "`late`" };
        assert!(
            errors.iter().all(|text| text.contains(name) && text.contains("after Ddp::new")),
            "{errors:?}"
        );
    }
    // What is frozen, and unfrozen again, is averaged.
    run(2, |group| {
        let model = Tied::new(Tie::Untied);
        let mut ddp = Ddp::with_options(&model.store, &group, options()).unwrap();
        for frozen in [true, false] {
            drop(model.second.ws.set_requires_grad(!frozen));
            let from = 4 * group.rank().index();
            let loss = ddp.forward(|| model.loss(from, from + 4)).unwrap();
            model.store.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
            ddp.backward(&loss).unwrap();
            assert_eq!(model.second.ws.grad().defined(), !frozen);
        }
        let gradient = elements(&model.second.ws.grad());
        let theirs = group.all_gather_object(&gradient).unwrap();
        assert!(theirs.iter().all(|other| *other == gradient));
    });
}
