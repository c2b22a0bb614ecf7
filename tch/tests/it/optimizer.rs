//! Fused optimizers step as libtorch's others do.

use phalanx_tch::{Optimizer, Rule};
use tch::nn::{self, OptimizerConfig};
use tch::{Device, Kind, Tensor};

use crate::common::{Mlp, device, distance, floats, load, on_device, samples};

const WIDTHS: [i64; 3] = [8, 16, 3];

fn check(rule: Rule, mut theirs: impl FnMut(&nn::VarStore) -> nn::Optimizer) {
    let start = floats(&Mlp::new(&WIDTHS).store);
    let (a, b) = (Mlp::like(&WIDTHS, &start), Mlp::like(&WIDTHS, &start));
    let (mut ours, mut theirs) = (Optimizer::new(&a.store, rule).unwrap(), theirs(&b.store));
    for step in 0..20 {
        let (x, y) = (a.loss(samples(step, step + 8)), b.loss(samples(step, step + 8)));
        ours.zero_grad().unwrap();
        x.backward();
        ours.step(0.01).unwrap();
        theirs.backward_step(&y);
    }
    let apart = distance(&floats(&a.store), &floats(&b.store));
    assert!(distance(&floats(&a.store), &start) > 0.01 && apart < 1e-5, "{rule:?}: {apart:e}");
}

#[test]
fn rules_are_libtorch_s() {
    check(Rule::ADAMW, |store| nn::AdamW::default().build(store, 0.01).unwrap());
    check(Rule::sgd(0.0), |store| nn::sgd(0.0, 0.0, 0.0, false).build(store, 0.01).unwrap());
    check(Rule::Sgd { momentum: 0.9, weight_decay: 0.1, nesterov: true }, |store| {
        nn::sgd(0.9, 0.0, 0.1, true).build(store, 0.01).unwrap()
    });
}

/// Two layers, of which the second one is in a group of tch's.
fn grouped() -> Mlp {
    let store = nn::VarStore::new(device());
    let first = nn::linear(store.root() / 0, WIDTHS[0], WIDTHS[1], Default::default());
    let second = nn::linear((store.root() / 1).set_group(1), WIDTHS[1], WIDTHS[2], Default::default());
    Mlp { store, layers: vec![first, second] }
}

/// The parameters of a layer.
fn of_layer(layer: &nn::Linear) -> impl Iterator<Item = &Tensor> {
    [Some(&layer.ws), layer.bs.as_ref()].into_iter().flatten()
}

#[test]
fn groups_have_rules_and_learning_rates_of_their_own_as_tch_s_have() {
    let start = floats(&grouped().store);
    let (a, b) = (grouped(), grouped());
    [&a, &b].into_iter().for_each(|model| load(&model.store, &start));
    let adamw = |weight_decay| Rule::AdamW { betas: (0.9, 0.999), epsilon: 1e-8, weight_decay };
    let ours = Optimizer::new(&a.store, adamw(0.3)).unwrap();
    let mut ours = ours.with_group(adamw(0.0), of_layer(&a.layers[1])).unwrap();
    let mut theirs = nn::adamw(0.9, 0.999, 0.3).build(&b.store, 0.01).unwrap();
    theirs.set_weight_decay_group(1, 0.0);
    theirs.set_lr_group(1, 0.03);
    for step in 0..20 {
        let (x, y) = (a.loss(samples(step, step + 8)), b.loss(samples(step, step + 8)));
        ours.zero_grad().unwrap();
        x.backward();
        ours.step_groups(&[0.01, 0.03]).unwrap();
        theirs.backward_step(&y);
    }
    let apart = distance(&floats(&a.store), &floats(&b.store));
    assert!(distance(&floats(&a.store), &start) > 0.01 && apart < 1e-5, "{apart:e}");
}

#[test]
fn groups_of_two_kinds_step_as_two_optimizers() {
    let start = floats(&Mlp::new(&WIDTHS).store);
    let (a, b) = (Mlp::like(&WIDTHS, &start), Mlp::like(&WIDTHS, &start));
    let ours = Optimizer::new(&a.store, Rule::ADAMW).unwrap();
    let mut ours = ours.with_group(Rule::sgd(0.9), of_layer(&a.layers[1])).unwrap();
    let train = |layer: usize, trains: bool| {
        of_layer(&b.layers[layer]).for_each(|one| drop(one.set_requires_grad(trains)));
    };
    train(1, false);
    let mut first = Optimizer::new(&b.store, Rule::ADAMW).unwrap();
    train(1, true);
    train(0, false);
    let mut second = Optimizer::new(&b.store, Rule::sgd(0.9)).unwrap();
    train(0, true);
    for step in 0..10 {
        let (x, y) = (a.loss(samples(step, step + 8)), b.loss(samples(step, step + 8)));
        ours.zero_grad().unwrap();
        x.backward();
        ours.step(0.01).unwrap();
        first.zero_grad().unwrap();
        second.zero_grad().unwrap();
        y.backward();
        first.step(0.01).unwrap();
        second.step(0.01).unwrap();
    }
    assert_eq!(floats(&a.store), floats(&b.store));
    assert!(distance(&floats(&a.store), &start) > 0.01);
}

#[test]
fn groups_that_are_none_are_refused() {
    let model = Mlp::new(&WIDTHS);
    let new = || Optimizer::new(&model.store, Rule::ADAMW).unwrap();
    let second = || of_layer(&model.layers[1]);
    let refused = |outcome: phalanx::Result<Optimizer>, said: &str| {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    };
    refused(new().with_group(Rule::ADAMW, std::iter::empty::<&Tensor>()), "of no parameter");
    let other = Mlp::new(&WIDTHS);
    refused(new().with_group(Rule::ADAMW, of_layer(&other.layers[0])), "not among the optimizer's");
    let twice = new().with_group(Rule::ADAMW, second()).unwrap().with_group(Rule::ADAMW, second());
    refused(twice, "`1.weight` (f32 [3, 16]) is in two groups");
    let mut stepped = new();
    model.loss(samples(0, 4)).backward();
    stepped.step(0.01).unwrap();
    refused(stepped.with_group(Rule::ADAMW, second()), "was changed by a step already");
    let mut grouped = new().with_group(Rule::ADAMW, second()).unwrap();
    let before = floats(&model.store);
    assert!(grouped.step_groups(&[0.01]).unwrap_err().to_string().contains("there are 2 groups"));
    assert!(grouped.set_group_rule(2, Rule::ADAMW).unwrap_err().to_string().contains("there are 2, from 0"));
    assert_eq!(floats(&model.store), before);
}

/// A device's kernel changes all tensors of a call at once.
#[test]
fn parameters_in_one_memory_are_changed_one_after_the_other() {
    let store = nn::VarStore::new(device());
    let whole = store.root().ones("whole", &[4]);
    let half = store.root().add("half", whole.detach().narrow(0, 2, 2), true);
    let mut optimizer = Optimizer::new(&store, Rule::sgd(0.0)).unwrap();
    (whole.sum(Kind::Float) + half.sum(Kind::Float) * 2.0).backward();
    optimizer.step(0.1).unwrap();
    let expected = [0.9, 0.9, 0.7, 0.7];
    let whole = Vec::<f32>::try_from(whole.detach().to_device(Device::Cpu)).unwrap();
    assert!(distance(std::slice::from_ref(&whole), &[expected.to_vec()]) < 1e-6, "{whole:?}");
}

#[test]
fn parameters_without_a_gradient_stay() {
    let model = Mlp::new(&WIDTHS);
    let mut optimizer = Optimizer::new(&model.store, Rule::ADAMW).unwrap();
    let start = floats(&model.store);
    optimizer.step(0.1).unwrap();
    assert_eq!(floats(&model.store), start);
    samples(0, 4).0.apply(&model.layers[0]).mean(Kind::Float).backward();
    optimizer.step(0.1).unwrap();
    let end = floats(&model.store);
    assert!(end[..2].iter().zip(&start).all(|(a, b)| a != b) && end[2..] == start[2..]);
}

#[test]
fn a_parameter_that_is_not_what_it_was_is_refused() {
    for rule in [Rule::ADAMW, Rule::sgd(0.9), Rule::sgd(0.0)] {
        let model = Mlp::new(&WIDTHS);
        let mut optimizer = Optimizer::new(&model.store, rule).unwrap();
        let mut step = |model: &Mlp| {
            optimizer.zero_grad().unwrap();
            let variables = model.store.trainable_variables();
            let loss = variables.iter().map(|one| one.square().sum(Kind::Float));
            loss.reduce(|a, b| a + b).unwrap().backward();
            optimizer.step(0.1)
        };
        step(&model).unwrap();
        let mut bias = model.layers[0].bs.as_ref().unwrap().shallow_clone();
        let sizes =
            [Tensor::ones([100_000], on_device(Kind::Float)), Tensor::ones([16], on_device(Kind::Double))];
        // Without moments a parameter of any size can be stepped.
        for other in sizes.iter().skip(if rule == Rule::sgd(0.0) { 2 } else { 0 }) {
            bias.set_data(other);
            let before = floats(&model.store);
            let error = step(&model).unwrap_err().to_string();
            assert!(error.contains("`0.bias`") && error.contains("make a new Optimizer"), "{error}");
            assert_eq!(floats(&model.store), before, "nothing is changed");
        }
        bias.set_data(&Tensor::ones([16, 16], on_device(Kind::Float)).select(1, 0));
        assert!(step(&model).unwrap_err().to_string().contains("contiguous"));
        // A gradient of an earlier size.
        bias.set_data(&Tensor::ones([16], on_device(Kind::Float)));
        step(&model).unwrap();
        bias.set_data(&Tensor::ones([8], on_device(Kind::Float)));
        assert!(optimizer.step(0.1).unwrap_err().to_string().contains("Float [8] on"));
    }
}

#[test]
fn a_rule_or_a_learning_rate_by_which_no_training_goes_is_refused() {
    let model = Mlp::new(&WIDTHS);
    let adamw = |betas, epsilon, weight_decay| Rule::AdamW { betas, epsilon, weight_decay };
    let sgd = |momentum, weight_decay, nesterov| Rule::Sgd { momentum, weight_decay, nesterov };
    let rules = [
        (adamw((1.0, 0.999), 1e-8, 0.0), "betas are"),
        (adamw((0.9, f64::NAN), 1e-8, 0.0), "betas are"),
        (adamw((0.9, 0.999), -1e-8, 0.0), "epsilon is"),
        (adamw((0.9, 0.999), 1e-8, f64::INFINITY), "weight_decay is"),
        (sgd(-0.9, 0.0, false), "momentum is"),
        (sgd(0.9, -0.1, false), "weight_decay is"),
        (sgd(0.0, 0.0, true), "nesterov needs"),
    ];
    for (rule, said) in rules {
        let error = Optimizer::new(&model.store, rule).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
    let mut optimizer = Optimizer::new(&model.store, Rule::ADAMW).unwrap();
    assert!(optimizer.set_rule(adamw((0.9, 1.0), 1e-8, 0.0)).is_err());
    assert_eq!(optimizer.rule(), Rule::ADAMW);
    model.loss(samples(0, 4)).backward();
    let start = floats(&model.store);
    for rate in [f64::NAN, f64::INFINITY, -0.1] {
        let error = optimizer.step(rate).unwrap_err().to_string();
        assert!(error.contains("the learning rate"), "{error}");
    }
    assert_eq!(floats(&model.store), start);
}
