//! PowerSGD on the device.

use phalanx::reducer::hooks::{PowerSgd, PowerSgdOptions};
use phalanx::{ProcessGroup, Result};
use phalanx_tch::{Ddp, DdpOptions, Optimizer, Rule, TrainState};
use tch::nn::{Init, VarStore};
use tch::{Kind, Tensor};

use super::{begin, compressing, ddp, devices, options, train_step, zero_grad};
use crate::common::{Mlp, device, distance, elements, floats, samples};

/// With several matrices of one shape in a bucket, and with a bucket for each.
pub(super) fn low_rank(group: &ProcessGroup) -> Result<()> {
    let cases = [
        compressing(2),
        compressing(0).rank(2).seed(5),
        compressing(1).error_feedback(false),
        compressing(1).rank(3).orthogonalization_epsilon(1e-6),
    ];
    for (case, low_rank) in cases.into_iter().enumerate() {
        for is_one_bucket in [true, false] {
            let train = |over_nccl: bool| {
                let group = &group.split(Some(0), 0)?.unwrap();
                let model = Mlp::new(&[8, 32, 32, 32, 3]);
                begin(&model.store);
                let options = if is_one_bucket { DdpOptions::default() } else { options() };
                let mut ddp = match over_nccl {
                    true => Ddp::with_nccl(&model.store, &devices(group)?, options)?,
                    false => Ddp::with_options(&model.store, group, options)?,
                };
                ddp.register_comm_hook(PowerSgd::new(low_rank)?)?;
                let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
                for step in 0..8 {
                    train_step(&model, &mut ddp, &mut optimizer, step)?;
                }
                assert!(ddp.replicas_identical()?);
                Ok((floats(&model.store), ddp.communicated_bytes()))
            };
            let (host, nccl) = (train(false)?, train(true)?);
            let apart = distance(&nccl.0, &host.0);
            assert!(apart < 1e-4, "case {case}, one bucket: {is_one_bucket}: {apart:e}");
            assert_eq!(nccl.1, host.1, "bytes");
        }
    }
    Ok(())
}

/// The gradient of each matrix has one direction, which a product of two vectors has exactly.
pub(super) fn low_rank_steps(group: &ProcessGroup) -> Result<()> {
    // Without feedback nothing at all is left after a step of zeros. In mixed precision products would have three digits.
    for (feedback, mixed) in [(true, false), (false, false), (true, true)] {
        let group = group.split(Some(0), 0)?.unwrap();
        low_rank_steps_of(&group, compressing(0).rank(2).error_feedback(feedback), mixed)?;
    }
    Ok(())
}

fn low_rank_steps_of(group: &ProcessGroup, low_rank: PowerSgdOptions, mixed: bool) -> Result<()> {
    let store = VarStore::new(device());
    let sizes = [[16, 8], [16, 8], [12, 20]];
    let layers: Vec<Tensor> = sizes
        .iter()
        .enumerate()
        .map(|(index, size)| store.root().var(&format!("l{index}"), size, Init::Const(0.0)))
        .collect();
    let bias = store.root().var("bias", &[5], Init::Const(0.0));
    let slopes: Vec<Tensor> = sizes
        .iter()
        .map(|&[rows, columns]| {
            let wave = |count: i64| (Tensor::arange(count, (Kind::Float, device())) * 0.7 + 0.3).sin();
            wave(rows).unsqueeze(1) * wave(columns).unsqueeze(0)
        })
        .collect();
    let expected: Vec<Vec<f32>> = slopes.iter().map(elements).collect();
    let mut ddp = ddp(&store, group, DdpOptions::default())?;
    ddp.register_comm_hook(PowerSgd::new(low_rank)?)?;
    let rank = group.rank().index() as f64 + 1.0;
    // What rank 0's gradients are multiplied by; those of rank 1 by 1.
    let factors = [1.0, f64::NAN, 1.0, 0.0, 0.0, 1.0, f64::INFINITY, f64::NAN, 2.0, -1.0];
    for (step, factor) in factors.into_iter().enumerate() {
        let factor = if factor == 0.0 || rank == 1.0 { factor } else { 1.0 };
        let loss = ddp.forward(|| {
            let parts = layers.iter().zip(&slopes).map(|(one, slope)| (one * slope).sum(Kind::Float));
            (parts.reduce(|a, b| a + b).unwrap() + bias.sum(Kind::Float)) * (rank * factor)
        })?;
        zero_grad(&store);
        tch::autocast(mixed, || ddp.backward(&loss))?;
        // Queued before anybody has waited for the device.
        let seen: Vec<Tensor> = layers.iter().map(|one| one.grad() * 2.0).collect();
        let of_bias = bias.grad() * 2.0;
        zero_grad(&store);
        // Twice the average.
        let sum = factors[step] + if factors[step] == 0.0 { 0.0 } else { 2.0 };
        for (index, (seen, expected)) in seen.iter().zip(&expected).enumerate() {
            let (found, scaled) = (elements(seen), expected.iter().map(|one| one * sum as f32));
            let is_right = |(found, scaled): (&f32, f32)| match sum.is_finite() {
                true => (found - scaled).abs() < 1e-5,
                false => !found.is_finite(),
            };
            assert!(found.iter().zip(scaled).all(is_right), "step {step}, {index}: {found:?}, {sum} times");
        }
        assert!(elements(&of_bias).iter().all(|one| !sum.is_finite() || *one == sum as f32), "step {step}");
    }
    Ok(())
}

/// Bit for bit over NCCL; from the host's memory to the device, and back, as near as the two are.
pub(super) fn low_rank_state(group: &ProcessGroup) -> Result<()> {
    struct Training {
        model: Mlp,
        state: TrainState<u32>,
    }
    impl Training {
        fn new(group: &ProcessGroup, over_nccl: bool, hook_first: bool) -> Result<Self> {
            let group = &group.split(Some(0), 0)?.unwrap();
            let model = Mlp::new(&[8, 32, 32, 3]);
            begin(&model.store);
            let optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
            let state = TrainState::new(&model.store, optimizer, 0u32)?;
            let state =
                if over_nccl { state.with_nccl(&devices(group)?)? } else { state.with_group(group)? };
            let mut this = Self { model, state: state.with_options(options())? };
            if hook_first {
                this.register()?;
            }
            Ok(this)
        }

        fn register(&mut self) -> Result<()> {
            self.state.ddp.register_comm_hook(PowerSgd::new(compressing(2))?)
        }

        fn train(&mut self, steps: std::ops::Range<usize>) -> Result<Vec<Vec<f32>>> {
            for step in steps {
                let Self { model, state } = self;
                let from = step * 40 + state.ddp.rank().index() * 10;
                let loss = state.ddp.forward(|| model.loss(samples(from, from + 6)))?;
                state.optimizer.zero_grad()?;
                state.ddp.backward(&loss)?;
                state.step(0.05)?;
            }
            Ok(floats(&self.model.store))
        }
    }
    for saved_by_nccl in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = phalanx::checkpoint::Checkpoints::open(folder.path(), group)?;
        let mut training = Training::new(group, saved_by_nccl, true)?;
        training.train(0..5)?;
        training.state.checkpoint(&checkpoints)?;
        checkpoints.finish()?;
        // What is read disturbs nothing.
        let expected = training.train(5..9)?;
        for resumed_by_nccl in [true, false] {
            for hook_first in [true, false] {
                let mut training = Training::new(group, resumed_by_nccl, hook_first)?;
                // Other losses and factors than those of the checkpoint.
                if hook_first {
                    training.train(20..24)?;
                }
                assert!(training.state.resume(&checkpoints)?);
                if !hook_first {
                    training.register()?;
                }
                let before = training.state.ddp.communicated_bytes();
                let resumed = training.train(5..9)?;
                let all: u64 = resumed.iter().map(|one| 4 * one.len() as u64).sum();
                assert!(training.state.ddp.communicated_bytes() - before < 4 * all / 2, "it compresses");
                match saved_by_nccl == resumed_by_nccl {
                    true => assert_eq!(resumed, expected, "over NCCL: {saved_by_nccl}, {hook_first}"),
                    false => {
                        let apart = distance(&resumed, &expected);
                        assert!(apart < 1e-4, "saved over NCCL: {saved_by_nccl}, {hook_first}: {apart:e}");
                    }
                }
            }
        }
    }
    Ok(())
}
