//! Several ranks with a part of the batch each train the model that one rank trains with all of it.

use crate::common::{Mlp, distance, floats, run, samples};
use burn::module::Param;
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, Device, Tensor};
use phalanx::{ProcessGroup, Result};
use phalanx_burn::{Ddp, clip_grad_norm};

const STEPS: usize = 20;
const BATCH: usize = 8;
const WIDTHS: [usize; 4] = [8, 32, 32, 3];
/// Below the norm of most steps' gradients, so that clipping matters.
const MAX_NORM: f64 = 0.05;

fn sgd() -> ModuleOptimizer {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init()
}

/// Plain Burn, with `parts` times the batch.
fn reference(mut model: Mlp, parts: usize, clip: bool) -> Mlp {
    let mut optimizer = sgd();
    for step in 0..STEPS {
        let from = step * parts * BATCH;
        let loss = model.loss(samples(from, from + parts * BATCH));
        let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
        if clip {
            let norm = norm(&model, &gradients);
            assert!((clip_grad_norm(&model, &mut gradients, MAX_NORM).unwrap() / norm - 1.0).abs() < 1e-5);
            assert!(self::norm(&model, &gradients) < MAX_NORM * (1.0 + 1e-5));
        }
        model = optimizer.step(0.05, model, gradients);
    }
    model
}

/// The norm of all gradients, by Burn's own operations.
fn norm(model: &Mlp, gradients: &GradientsParams) -> f64 {
    let square = |square: Tensor<1>| f64::from(square.into_scalar::<f32>());
    let of = |layer: &Linear| {
        let bias = layer.bias.as_ref().unwrap().id;
        square(gradients.get::<2>(layer.weight.id).unwrap().square().sum())
            + square(gradients.get::<1>(bias).unwrap().square().sum())
    };
    model.layers.iter().map(of).sum::<f64>().sqrt()
}

/// Each rank with `micro` batches a step, all but the last without communication.
fn distributed(model: Mlp, group: &ProcessGroup, micro: usize, clip: bool) -> Result<Ddp<Mlp>> {
    let mut ddp = Ddp::new(model, group)?;
    let mut optimizer = sgd();
    let (rank, ranks) = (group.rank().index(), group.world_size().count());
    for step in 0..STEPS {
        for part in 0..micro {
            let from = ((step * ranks + rank) * micro + part) * BATCH;
            let batch = samples(from, from + BATCH);
            let loss = ddp.forward(|model| model.loss(batch) / micro as f32)?;
            if part + 1 < micro {
                ddp.backward_no_sync(&loss)?;
            } else {
                let mut gradients = ddp.backward(&loss)?;
                if clip {
                    ddp.clip_grad_norm(&mut gradients, MAX_NORM)?;
                }
                ddp.step(&mut optimizer, 0.05, gradients)?;
            }
        }
    }
    Ok(ddp)
}

fn check(ranks: u32, micro: usize, clip: bool) {
    let model = Mlp::new(&WIDTHS);
    let expected = floats(&reference(model.clone(), ranks as usize * micro, clip));
    let trained = run(ranks, |group| {
        // Only rank 0 has the model that counts.
        let model = if group.rank().is_main() { model.clone() } else { Mlp::new(&WIDTHS) };
        let ddp = distributed(model, &group, micro, clip).unwrap();
        assert!(ddp.replicas_identical().unwrap());
        floats(ddp.model())
    });
    assert!(distance(&expected, &floats(&model)) > 0.01, "the reference has not moved");
    for (rank, ours) in trained.iter().enumerate() {
        assert_eq!(ours, &trained[0], "rank {rank} has other bits than rank 0");
        let distance = distance(ours, &expected);
        assert!(distance < 1e-5, "{ranks} ranks x {micro}: rank {rank} is {distance:e} away");
    }
}

#[test]
fn one_rank_trains_as_plain_burn() {
    check(1, 1, false);
}

#[test]
fn two_ranks_train_as_one_with_twice_the_batch() {
    check(2, 1, false);
}

#[test]
fn three_ranks_train_as_one_with_three_times_the_batch() {
    check(3, 1, false);
}

#[test]
fn four_ranks_train_as_one_with_four_times_the_batch() {
    check(4, 1, false);
}

#[test]
fn clipped_gradients_train_as_in_one_process() {
    check(1, 1, true);
    check(2, 1, true);
    check(3, 2, true);
    check(4, 1, true);
}

#[test]
fn clipping_leaves_small_gradients_and_refuses_nonsense() {
    let model = Mlp::new(&[8, 3]);
    let mut gradients = GradientsParams::from_grads(model.loss(samples(0, 4)).backward(), &model);
    let before = norm(&model, &gradients);
    clip_grad_norm(&model, &mut gradients, 2.0 * before).unwrap();
    assert_eq!(norm(&model, &gradients), before);
    for nonsense in [0.0, -1.0, f64::NAN] {
        assert!(clip_grad_norm(&model, &mut gradients, nonsense).unwrap_err().is_invalid_argument());
    }
    let weight = model.layers[0].weight.id;
    let infinite = gradients.remove::<2>(weight).unwrap() / 0.0;
    gradients.register(weight, infinite);
    assert!(!clip_grad_norm(&model, &mut gradients, 1.0).unwrap().is_finite());
}

/// The factor is 1e-8, which is zero in f16.
#[test]
fn gradients_of_16_bits_are_scaled_by_a_small_factor() {
    let device = Device::flex().autodiff();
    let layer: Linear = LinearConfig::new(1, 4).with_bias(false).init(&device);
    let weight = Tensor::<2>::ones([1, 4], (&device, DType::F16)).require_grad();
    let model = Linear { weight: Param::from_tensor(weight), ..layer };
    let mut gradients = GradientsParams::new();
    let gradient = Tensor::<2>::full([1, 4], 5e4, (&device.inner(), DType::F16));
    gradients.register(model.weight.id, gradient);
    assert!((clip_grad_norm(&model, &mut gradients, 1e-3).unwrap() / 1e5 - 1.0).abs() < 1e-3);
    let scaled = gradients.get::<2>(model.weight.id).unwrap();
    assert_eq!(scaled.dtype(), DType::F16);
    for element in scaled.into_data().iter::<f32>() {
        assert!((element / 5e-4 - 1.0).abs() < 2e-3, "{element}");
    }
}

#[test]
fn accumulated_batches_train_as_large_ones() {
    check(1, 3, false);
    check(2, 2, false);
    check(3, 3, false);
    check(4, 2, false);
}
