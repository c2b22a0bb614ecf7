//! Which gradients are averaged: those of one process, whatever they share, weigh, or are sent as.

use phalanx::reducer::ReducerOptions;
use phalanx::reducer::hooks::{Compressed, PowerSgd};
use phalanx::{ProcessGroup, Result};
use phalanx_nccl::DeviceGroup;
use phalanx_tch::Ddp;
use tch::nn::{self, Init, OptimizerConfig, VarStore};
use tch::{Kind, Tensor};

use super::{all, before_an_error, compressing, ddp, ones, options, zero_grad};
use crate::common::{device, elements};

/// The gradients of `flat`, `turned` and `added` are views of one tensor, which backward needs until it comes to `first`: averaged in place,
/// they would change each other, and that of `first`.
pub(super) fn shared(group: &ProcessGroup) -> Result<()> {
    let store = VarStore::new(device());
    let variable = |name: &str, sizes: &[i64]| store.root().var(name, sizes, Init::Const(0.5));
    let (first, flat) = (variable("first", &[4, 6]), variable("flat", &[24]));
    let (turned, added) = (variable("turned", &[6, 4]), variable("added", &[4, 6]));
    let loss = |rank: usize| {
        let x = Tensor::arange(24, (Kind::Float, device())).reshape([4, 6]) * (rank as f64 + 1.0);
        let sum = x * &first + flat.reshape([4, 6]) + turned.tr() + &added;
        (&sum * &sum).sum(Kind::Float)
    };
    let all = [&first, &flat, &turned, &added];
    let expected: Vec<Vec<f32>> = {
        let both = loss(0) + loss(1);
        (both / 2.0).backward();
        all.iter().map(|one| elements(&one.grad())).collect()
    };
    let mut ddp = ddp(&store, group, options())?;
    for _ in 0..4 {
        let loss = ddp.forward(|| loss(group.rank().index()))?;
        zero_grad(&store);
        ddp.backward(&loss)?;
        for (one, expected) in all.iter().zip(&expected) {
            assert_eq!(&elements(&one.grad()), expected);
            assert!(one.grad().is_contiguous());
        }
    }
    Ok(())
}

/// Passes that count nothing bring NaN. What is queued behind backward waits for the division by the sum of weights.
pub(super) fn weighted(group: &ProcessGroup) -> Result<()> {
    let store = VarStore::new(device());
    let layers: Vec<Tensor> =
        (0..12).map(|index| store.root().var(&format!("l{index}"), &[64, 64], Init::Const(0.0))).collect();
    let mut ddp = ddp(&store, group, options())?;
    // Of the two passes of each rank, step by step.
    let steps = [
        [[3.0, 1.0], [4.0, 2.0]],
        [[0.0, 5.0], [1.0, 0.0]],
        [[0.0, 0.0], [2.0, 0.5]],
        [[1.0, 1.0], [1.0, 1.0]],
        [[0.0, 0.0], [0.0, 7.0]],
    ];
    let slope = |rank: usize, pass: usize, index: usize| (1 + rank * 2 + pass + index) as f64;
    let rank = group.rank().index();
    for (step, weights) in steps.into_iter().enumerate() {
        let total: f64 = weights.iter().flatten().sum();
        let loss = |pass: usize| {
            let nothing = if weights[rank][pass] == 0.0 { f64::NAN } else { 1.0 };
            let parts = layers.iter().enumerate();
            let parts = parts.map(|(index, one)| one.sum(Kind::Float) * (slope(rank, pass, index) * nothing));
            parts.reduce(|a, b| a + b).unwrap()
        };
        match step % 2 {
            0 => zero_grad(&store),
            _ => layers.iter().for_each(|one| one.shallow_clone().zero_grad()),
        }
        let first = ddp.forward(|| loss(0))?;
        ddp.backward_no_sync_weighted(&first, weights[rank][0])?;
        let last = ddp.forward(|| loss(1))?;
        ddp.backward_weighted(&last, weights[rank][1])?;
        let seen: Vec<Tensor> = layers.iter().map(|one| one.grad() * 2.0).collect();
        for (index, seen) in seen.iter().enumerate() {
            let of = |rank: usize, pass: usize| weights[rank][pass] * slope(rank, pass, index);
            let mean = (of(0, 0) + of(0, 1) + of(1, 0) + of(1, 1)) / total;
            let found = elements(seen);
            let near = |one: &f32| (f64::from(*one) - 2.0 * mean).abs() < 1e-5 * mean;
            assert!(found.iter().all(near), "step {step}, {index}: {} for {}", found[0], 2.0 * mean);
        }
    }
    zero_grad(&store);
    let loss = ddp.forward(|| layers[0].sum(Kind::Float) * f64::NAN + all(&layers))?;
    let error = ddp.backward_weighted(&loss, 0.0).unwrap_err().to_string();
    assert!(error.contains("weight"), "{error}");
    // It ends nothing.
    zero_grad(&store);
    let loss = ddp.forward(|| all(&layers) * (rank as f64 + 1.0))?;
    ddp.backward(&loss)?;
    assert_eq!(elements(&layers[3].grad())[..2], [1.5; 2]);
    Ok(())
}

/// Rank 1 never uses `idle`, and counts nothing in some steps. Gradients are zeroed where they lie.
pub(super) fn idle(group: &ProcessGroup) -> Result<()> {
    let store = VarStore::new(device());
    let [used, idle] = ["used", "idle"].map(|name| store.root().var(name, &[8], Init::Const(0.0)));
    let mut options = options();
    options.reducer = ReducerOptions::default().static_graph(true);
    let mut ddp = ddp(&store, group, options)?;
    for (step, of_rank_1) in [1.0, 0.0, 0.0, 2.0, 0.0].into_iter().enumerate() {
        let of_rank_0 = step as f64 + 1.0;
        for one in [&used, &idle] {
            one.shallow_clone().zero_grad();
        }
        let (loss, weight) = match group.rank().is_main() {
            // Gradients come in another order than that of the first buckets, which are made anew in the second step.
            true => (ddp.forward(|| (&idle * 4.0 + &used * 2.0).sum(Kind::Float))?, of_rank_0),
            false => {
                let slope = if of_rank_1 == 0.0 { f64::NAN } else { 3.0 };
                (ddp.forward(|| (&used * slope).sum(Kind::Float))?, of_rank_1)
            }
        };
        ddp.backward_weighted(&loss, weight)?;
        let total = of_rank_0 + of_rank_1;
        let expected = [(of_rank_0 * 2.0 + of_rank_1 * 3.0) / total, of_rank_0 * 4.0 / total];
        for (one, expected) in [&used, &idle].into_iter().zip(expected) {
            let near = |found: &f32| (f64::from(*found) - expected).abs() < 1e-5;
            let found = elements(&one.grad());
            assert!(found.iter().all(near), "step {step}: {} for {expected}", found[0]);
        }
    }
    Ok(())
}

/// What is queued behind backward waits for averages that are widened again.
pub(super) fn compressed(group: &ProcessGroup) -> Result<()> {
    for (hook, step_of_one) in [(Compressed::f16(), 2f64.powi(-10)), (Compressed::bf16(), 2f64.powi(-7))] {
        let group = group.split(Some(0), 0)?.unwrap();
        let store = VarStore::new(device());
        let layers: Vec<Tensor> = (0..12)
            .map(|index| store.root().var(&format!("l{index}"), &[64, 64], Init::Const(0.0)))
            .collect();
        let mut ddp = ddp(&store, &group, options())?;
        ddp.register_comm_hook(hook)?;
        let rank = group.rank().index() as f64;
        for step in 1..6 {
            // Halved, that of rank 0 lies between two numbers of the type, and that of rank 1 is one.
            let slope = |rank: f64| if rank == 0.0 { 2.0 + 0.75 * step_of_one } else { step as f64 };
            let loss = ddp.forward(|| all(&layers) * slope(rank))?;
            zero_grad(&store);
            ddp.backward(&loss)?;
            let seen: Vec<Tensor> = layers.iter().map(|one| one.grad() * 2.0).collect();
            for seen in &seen {
                let rounded = 2.0 + step as f64;
                assert_eq!(elements(seen), [rounded as f32; 64 * 64], "step {step}");
            }
        }
        assert_eq!(ddp.communicated_bytes(), 5 * 12 * 64 * 64 * 2);
        zero_grad(&store);
        before_an_error(&group);
        let loss = ddp.forward(|| all(&layers));
        let error = loss.and_then(|loss| ddp.backward_weighted(&loss, 1.0)).unwrap_err().to_string();
        assert!(error.contains("compressed to"), "{error}");
    }
    Ok(())
}

/// tch's own optimizers and `zero_grad` of its tensors, and what changes after the `Ddp` was made.
pub(super) fn own(group: &ProcessGroup) -> Result<()> {
    let mut store = VarStore::new(device());
    let one = store.root().var("one", &[4], Init::Const(1.0));
    let mut optimizer = nn::Sgd::default().build(&store, 0.5).unwrap();
    let mut ddp = ddp(&store, group, options())?;
    for step in 0..4 {
        let number = group.rank().index() as f64 + 1.0;
        let loss = ddp.forward(|| (&one * number).sum(Kind::Float))?;
        match step % 2 {
            0 => optimizer.zero_grad(),
            _ => one.shallow_clone().zero_grad(),
        }
        ddp.backward(&loss)?;
        assert_eq!(elements(&one.grad()), [1.5; 4], "step {step}");
        optimizer.step();
        assert_eq!(elements(&one), [1.0 - 0.75 * (step as f32 + 1.0); 4], "step {step}");
    }
    optimizer.zero_grad();
    assert!(!one.grad().defined(), "tch's optimizers leave no gradients");
    before_an_error(group);
    store.set_kind(Kind::Double);
    let loss = ddp.forward(|| one.sum(Kind::Double));
    let error = loss.and_then(|loss| ddp.backward(&loss)).unwrap_err().to_string();
    assert!(error.contains("type"), "{error}");
    Ok(())
}

pub(super) fn kinds(group: &ProcessGroup) -> Result<()> {
    for kind in [Kind::Half, Kind::BFloat16, Kind::Double] {
        let mut store = VarStore::new(device());
        drop(store.root().var("one", &[5], Init::Const(1.0)));
        drop(store.root().var("none", &[0, 3], Init::Const(1.0)));
        store.set_kind(kind);
        let (one, none) = (&store.variables()["one"], &store.variables()["none"]);
        let group = group.split(Some(0), 0)?.unwrap();
        let mut ddp = ddp(&store, &group, options())?;
        let loss =
            ddp.forward(|| (one * (group.rank().index() as f64 * 2.0 + 1.0)).sum(kind) + none.sum(kind))?;
        ddp.backward(&loss)?;
        assert_eq!(one.grad().kind(), kind);
        assert_eq!(elements(&one.grad()), [2.0; 5]);
        assert_eq!(none.grad().size(), [0, 3]);
    }
    Ok(())
}

/// Memory and streams are those of the model's device, whatever sends the gradients.
pub(super) fn second_device(group: &ProcessGroup) -> Result<()> {
    let (cuda, place) = (phalanx_nccl::Device::open(1)?, tch::Device::Cuda(1));
    type Register = fn(&mut Ddp) -> Result<()>;
    let hooks: [Register; 3] = [
        |_| Ok(()),
        |ddp| ddp.register_comm_hook(Compressed::f16()),
        |ddp| ddp.register_comm_hook(PowerSgd::new(compressing(1).rank(2))?),
    ];
    for register in hooks {
        let group = group.split(Some(0), 0)?.unwrap();
        let rank = group.rank().index() as f64 + 1.0;
        let store = VarStore::new(place);
        let layers: Vec<Tensor> =
            (0..4).map(|index| store.root().var(&format!("l{index}"), &[16, 8], Init::Const(0.0))).collect();
        let mut ddp = Ddp::with_nccl(&store, &DeviceGroup::new(group, &cuda)?, options())?;
        register(&mut ddp)?;
        for step in 1..5 {
            let loss = ddp.forward(|| all(&layers) * (rank * f64::from(step)))?;
            zero_grad(&store);
            ddp.backward(&loss)?;
            for one in &layers {
                let (gradient, average) = (one.grad(), 1.5 * step as f32);
                assert_eq!(gradient.device(), place);
                let found = elements(&gradient);
                assert!(found.iter().all(|one| (one - average).abs() < 1e-4), "step {step}: {}", found[0]);
            }
        }
    }
    // The stand-in would have said so.
    let error = ones(&[2], 1.0).f_sub(&Tensor::ones([2], (Kind::Float, place))).unwrap_err().to_string();
    assert!(error.contains("same device"), "{error}");
    Ok(())
}
