//! A parameter without a gradient on any rank has none, which is not zero: neither decay nor momentum moves it.

use phalanx::ProcessGroup;
use phalanx::reducer::ReducerOptions;
use phalanx_tch::{Ddp, DdpOptions, Optimizer, Rule};
use tch::nn::{self, OptimizerConfig};
use tch::{Device, Kind, Tensor};

use crate::common::{device, distance, elements, floats, load, run, samples};

struct Model {
    store: nn::VarStore,
    stem: nn::Linear,
    sometimes: nn::Linear,
}

impl Model {
    fn new() -> Self {
        let store = nn::VarStore::new(device());
        let root = store.root();
        let stem = nn::linear(&root / "stem", 8, 3, Default::default());
        let sometimes = nn::linear(&root / "sometimes", 8, 3, Default::default());
        // With a value to decay, and never used.
        nn::linear(&root / "never", 3, 3, Default::default());
        Self { store, stem, sometimes }
    }

    fn loss(&self, uses: bool, from: usize) -> Tensor {
        let (x, y) = samples(from, from + 4);
        let stem = x.apply(&self.stem);
        let output = if uses { stem + x.apply(&self.sometimes) } else { stem };
        (output - y).square().mean(Kind::Float)
    }

    fn has_gradient(&self) -> [bool; 2] {
        let never = &self.store.variables()["never.weight"];
        [&self.sometimes.ws, never].map(|one| one.grad().defined())
    }
}

/// Which ranks use the layer in each backward pass of a step; the last pass of a step averages.
const STEPS: [&[[bool; 2]]; 8] = [
    &[[false, false]],
    &[[true, false]],
    &[[false, false]],
    &[[true, false], [false, false]],
    &[[false, false], [false, true]],
    &[[false, false], [false, false]],
    &[[true, true]],
    &[[false, false]],
];

/// The same in each step, as a static graph has it.
const STATIC: [&[[bool; 2]]; 4] = [&[[false, true]]; 4];

#[derive(Clone, Copy, Debug)]
enum Method {
    AdamW,
    Sgd,
    TheirAdamW,
    TheirSgd,
}

enum Stepper {
    Ours(Optimizer),
    Theirs(nn::Optimizer),
}

impl Stepper {
    fn new(method: Method, store: &nn::VarStore) -> Self {
        let ours = |rule| Self::Ours(Optimizer::new(store, rule).unwrap());
        match method {
            Method::AdamW => ours(Rule::AdamW { betas: (0.9, 0.999), epsilon: 1e-8, weight_decay: 0.1 }),
            Method::Sgd => ours(Rule::Sgd { momentum: 0.9, weight_decay: 0.1, nesterov: false }),
            Method::TheirAdamW => Self::Theirs(nn::adamw(0.9, 0.999, 0.1).build(store, 0.05).unwrap()),
            Method::TheirSgd => Self::Theirs(nn::sgd(0.9, 0.0, 0.1, false).build(store, 0.05).unwrap()),
        }
    }

    fn step(&mut self) {
        match self {
            Self::Ours(optimizer) => optimizer.step(0.05).unwrap(),
            Self::Theirs(optimizer) => optimizer.step(),
        }
    }

    /// Both leave no gradients.
    fn zero_grad(&mut self) {
        match self {
            Self::Ours(optimizer) => optimizer.zero_grad().unwrap(),
            Self::Theirs(optimizer) => optimizer.zero_grad(),
        }
    }
}

fn from(step: usize, pass: usize, rank: usize) -> usize {
    4 * ((step * 2 + pass) * 2 + rank)
}

/// One process with the batches of both ranks: the model's end, and whether there were gradients in each step.
fn alone(method: Method, steps: &[&[[bool; 2]]], start: &[Vec<f32>]) -> (Vec<Vec<f32>>, Vec<[bool; 2]>) {
    let model = Model::new();
    load(&model.store, start);
    let mut optimizer = Stepper::new(method, &model.store);
    let mut seen = Vec::new();
    for (step, passes) in steps.iter().enumerate() {
        optimizer.zero_grad();
        for (pass, uses) in passes.iter().enumerate() {
            for (rank, &uses) in uses.iter().enumerate() {
                (model.loss(uses, from(step, pass, rank)) / 2.0).backward();
            }
        }
        seen.push(model.has_gradient());
        optimizer.step();
    }
    (floats(&model.store), seen)
}

fn together(
    group: &ProcessGroup,
    method: Method,
    steps: &[&[[bool; 2]]],
    start: &[Vec<f32>],
    reducer: ReducerOptions,
) -> (Vec<Vec<f32>>, Vec<[bool; 2]>) {
    let model = Model::new();
    load(&model.store, start);
    let mut options = DdpOptions::default();
    options.reducer = reducer;
    let mut ddp = Ddp::with_options(&model.store, group, options).unwrap();
    let mut optimizer = Stepper::new(method, &model.store);
    let mut seen = Vec::new();
    let rank = group.rank().index();
    for (step, passes) in steps.iter().enumerate() {
        optimizer.zero_grad();
        for (pass, uses) in passes.iter().enumerate() {
            let loss = ddp.forward(|| model.loss(uses[rank], from(step, pass, rank))).unwrap();
            match pass + 1 == passes.len() {
                true => ddp.backward(&loss).unwrap(),
                false => ddp.backward_no_sync(&loss).unwrap(),
            }
        }
        seen.push(model.has_gradient());
        optimizer.step();
    }
    assert!(ddp.replicas_identical().unwrap());
    (floats(&model.store), seen)
}

#[test]
fn a_parameter_that_no_rank_uses_has_no_gradient_and_trains_as_in_one_process() {
    let start = floats(&Model::new().store);
    for method in [Method::AdamW, Method::Sgd, Method::TheirAdamW, Method::TheirSgd] {
        let found: &[&[[bool; 2]]] = &STEPS;
        let known: &[&[[bool; 2]]] = &STATIC;
        let options = ReducerOptions::default().bucket_cap_mb(0.0001);
        let cases =
            [(found, options.clone().find_unused_parameters(true)), (known, options.static_graph(true))];
        for (steps, reducer) in cases {
            let (whole, seen) = alone(method, steps, &start);
            for (ours, has) in run(2, |group| together(&group, method, steps, &start, reducer.clone())) {
                assert_eq!(has, seen, "{method:?}");
                let apart = distance(&ours, &whole);
                assert!(apart < 1e-4, "{method:?}: {apart:e}");
                // Those of `never`, which come first by name.
                assert_eq!(ours[..2], start[..2], "{method:?}");
            }
        }
    }
}

#[test]
fn a_gradient_that_a_static_graph_does_not_know_is_an_error_and_is_not_dropped() {
    let errors = run(2, |group| {
        let model = Model::new();
        // The first rank's error ends the group, so the other may get it in an earlier call.
        let attempt = || {
            let mut options = DdpOptions::default();
            options.reducer = ReducerOptions::default().static_graph(true);
            let mut ddp = Ddp::with_options(&model.store, &group, options)?;
            for uses in [false, true] {
                model.store.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
                // The pass that averages uses it in neither step.
                let loss = ddp.forward(|| model.loss(uses, 0))?;
                ddp.backward_no_sync(&loss)?;
                let loss = ddp.forward(|| model.loss(false, 4))?;
                ddp.backward(&loss)?;
            }
            Ok::<_, phalanx::Error>(())
        };
        attempt().unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("`sometimes.") && error.contains("static_graph promises"), "{error}");
    }
}

#[test]
fn the_place_in_a_bucket_is_no_gradient_where_none_came() {
    run(2, |group| {
        let model = Model::new();
        let mut options = DdpOptions::default();
        options.reducer = ReducerOptions::default().find_unused_parameters(true);
        let mut ddp = Ddp::with_options(&model.store, &group, options).unwrap();
        let mut optimizer = Optimizer::new(&model.store, Rule::ADAMW).unwrap();
        let mut kept = None;
        for uses in [true, false, true] {
            let loss = ddp.forward(|| model.loss(uses, 0)).unwrap();
            optimizer.zero_grad().unwrap();
            ddp.backward(&loss).unwrap();
            assert_eq!(model.has_gradient(), [uses, false]);
            kept = kept.or_else(|| uses.then(|| model.sometimes.ws.grad()));
        }
        let kept = kept.unwrap();
        if device() == Device::Cpu {
            // From the first average on it is the same place.
            assert_eq!(kept.data_ptr(), model.sometimes.ws.grad().data_ptr());
        }
        assert!(elements(&kept).iter().any(|&value| value != 0.0));
    });
}
