//! Fused optimizers give what Burn's give, in place, and continue each other's checkpoints.

use crate::common::{Mlp, distance, floats, has_other_roots, plain, run, samples, steps};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, Optimizer, SgdConfig};
use burn::tensor::{DType, Tensor, TensorData};
use phalanx_burn::{Ddp, FusedAdamW, FusedAdamWConfig, FusedSgdConfig};

const WIDTHS: [usize; 4] = [8, 33, 17, 3];

fn step(model: Mlp, optimizer: &mut ModuleOptimizer, number: usize) -> Mlp {
    let gradients = model.loss(samples(number * 7, number * 7 + 6)).backward();
    let gradients = GradientsParams::from_grads(gradients, &model);
    optimizer.step(0.02, model, gradients)
}

fn train(mut model: Mlp, optimizer: &mut ModuleOptimizer, steps: std::ops::Range<usize>) -> Mlp {
    for number in steps {
        model = step(model, optimizer, number);
    }
    model
}

/// How parameters are compared.
type Compare = fn(&[Vec<f32>], &[Vec<f32>]);

/// The same bits.
fn assert_same(ours: &[Vec<f32>], theirs: &[Vec<f32>]) {
    assert_eq!(ours, theirs);
}

/// The same bits, but on libtorch, whose square roots are not always the nearest: there all but the last bits.
fn assert_same_but_roots(ours: &[Vec<f32>], theirs: &[Vec<f32>]) {
    match has_other_roots() {
        true => assert_near(ours, theirs, 1e-5),
        false => assert_same(ours, theirs),
    }
}

fn assert_near(ours: &[Vec<f32>], theirs: &[Vec<f32>], tolerance: f64) {
    let distance = distance(ours, theirs);
    assert!(distance < tolerance, "{distance:e}");
}

/// The same parameters, over many steps that change everything.
fn check(fused: ModuleOptimizer, composed: ModuleOptimizer, compare: Compare) {
    let model = Mlp::new(&WIDTHS);
    let (mut fused, mut composed) = (fused, composed);
    let (ours, theirs) = (
        train(model.clone(), &mut fused, 0..steps(60, 6)),
        train(model.clone(), &mut composed, 0..steps(60, 6)),
    );
    assert_ne!(floats(&theirs), floats(&model));
    compare(&floats(&ours), &floats(&theirs));
}

#[test]
fn adamw_gives_the_bits_of_burn_s() {
    for decay in [0.0, 1e-4, 0.3] {
        check(
            FusedAdamWConfig::new().with_weight_decay(decay).init(),
            AdamWConfig::new().with_weight_decay(decay).init(),
            assert_same_but_roots,
        );
    }
    check(
        FusedAdamWConfig::new().with_beta_1(0.8).with_beta_2(0.95).with_epsilon(1e-8).init(),
        AdamWConfig::new().with_beta_1(0.8).with_beta_2(0.95).with_epsilon(1e-8).init(),
        assert_same_but_roots,
    );
}

fn momenta() -> Vec<Option<MomentumConfig>> {
    let configs = [(0.9, 0.1, false), (0.9, 0.0, true), (0.5, 0.3, true), (0.99, 0.0, false)];
    let momentum = |(momentum, dampening, nesterov)| {
        MomentumConfig::new().with_momentum(momentum).with_dampening(dampening).with_nesterov(nesterov)
    };
    configs.into_iter().map(|config| Some(momentum(config))).chain([None]).collect()
}

#[test]
fn sgd_gives_the_bits_of_burn_s() {
    for momentum in momenta() {
        for decay in [None, Some(WeightDecayConfig::new(0.01))] {
            check(
                FusedSgdConfig::new().with_momentum(momentum.clone()).with_weight_decay(decay.clone()).init(),
                SgdConfig::new().with_momentum(momentum.clone()).with_weight_decay(decay).init(),
                assert_same,
            );
        }
    }
}

/// Saves one optimizer after some steps, and goes on with the other.
fn check_checkpoint(first: ModuleOptimizer, second: ModuleOptimizer, compare: Compare) {
    let mut first = first;
    let model = train(Mlp::new(&WIDTHS), &mut first, 0..10);
    let bytes = first.into_bytes().unwrap();
    let mut second = second.from_bytes(bytes).unwrap();
    let (ours, theirs) = (train(model.clone(), &mut second, 10..20), train(model, &mut first, 10..20));
    compare(&floats(&ours), &floats(&theirs));
}

#[test]
fn checkpoints_of_either_optimizer_are_continued_by_the_other() {
    let (fused, burn) = (|| FusedAdamWConfig::new().init(), || AdamWConfig::new().init());
    check_checkpoint(fused(), fused(), assert_same_but_roots);
    check_checkpoint(fused(), burn(), assert_same_but_roots);
    check_checkpoint(burn(), fused(), assert_same_but_roots);
    let momentum = || Some(MomentumConfig::new());
    let fused = || FusedSgdConfig::new().with_momentum(momentum()).init();
    let burn = || SgdConfig::new().with_momentum(momentum()).init();
    check_checkpoint(fused(), fused(), assert_same);
    check_checkpoint(fused(), burn(), assert_same);
    check_checkpoint(burn(), fused(), assert_same);
}

/// Where a parameter's elements lie.
#[cfg_attr(feature = "tch", allow(deprecated, reason = "Burn says so of its LibTorch backend"))]
fn address(model: &Mlp) -> usize {
    use burn::backend::Flex;
    let weight = model.layers[0].weight.val().inner();
    #[cfg(feature = "tch")]
    if weight.device() != burn::tensor::Device::flex() {
        let weight = weight.try_into_primitive::<burn::backend::LibTorch>().unwrap();
        return weight.tensor.data_ptr() as usize;
    }
    let weight = weight.try_into_primitive::<Flex>().unwrap();
    weight.bytes().as_ptr() as usize
}

#[test]
fn parameters_are_updated_in_place() {
    let optimizers = [FusedAdamWConfig::new().init(), FusedSgdConfig::new().init()];
    for mut optimizer in optimizers {
        let mut model = train(Mlp::new(&WIDTHS), &mut optimizer, 0..1);
        let before = address(&model);
        model = train(model, &mut optimizer, 1..4);
        assert_eq!(address(&model), before);
    }
    run(2, |group| {
        let mut ddp = Ddp::new(Mlp::new(&WIDTHS), &group).unwrap();
        let mut optimizer = FusedAdamWConfig::new().init();
        let mut addresses = Vec::new();
        for number in 0..4 {
            let loss = ddp.forward(|model| model.loss(samples(number * 7, number * 7 + 6))).unwrap();
            let gradients = ddp.backward(&loss).unwrap();
            ddp.step(&mut optimizer, 0.02, gradients).unwrap();
            addresses.push(address(ddp.model()));
        }
        assert_eq!(addresses[1..], [addresses[0]; 3]);
    });
}

#[test]
fn whoever_shares_a_parameter_keeps_the_old_one() {
    let mut optimizer = FusedAdamWConfig::new().init();
    let model = train(Mlp::new(&WIDTHS), &mut optimizer, 0..1);
    let (kept, before) = (model.clone(), floats(&model));
    let after = floats(&step(model, &mut optimizer, 1));
    assert_eq!(floats(&kept), before);
    assert_ne!(after, before);
}

#[test]
fn a_parameter_without_elements_is_updated_as_any_other() {
    fn check<O: Optimizer>(optimizer: &O) {
        let none = || Tensor::<2>::zeros([0, 3], &plain());
        let (parameter, state) = optimizer.step(0.1, none(), none(), None);
        let (parameter, _) = optimizer.step(0.1, parameter, none(), state);
        assert_eq!(parameter.dims(), [0, 3]);
    }
    check(&FusedAdamWConfig::new().build());
    check(&FusedSgdConfig::new().with_momentum(momenta().remove(0)).build());
}

#[test]
fn other_types_and_views_are_updated_too() {
    fn check<O: Optimizer, P: Optimizer>(fused: &O, composed: &P, dtype: DType) {
        let values = |scale: f32| {
            let values: Vec<f32> = (0..60).map(|i| (i as f32 * scale).sin()).collect();
            let data = TensorData::new(values, [6, 10]).convert_dtype(dtype);
            Tensor::<2>::from_data(data, (&plain(), dtype))
        };
        // A part of a larger tensor, and one whose rows are columns.
        let part = values(0.3).slice([1..4, 2..7]);
        let gradient = values(0.7).slice([0..5, 0..3]).transpose();
        let (mut ours, mut theirs) = ((part.clone(), None), (part, None));
        for _ in 0..3 {
            ours = fused.step(0.1, ours.0, gradient.clone(), ours.1);
            theirs = composed.step(0.1, theirs.0, gradient.clone(), theirs.1);
        }
        let (ours, theirs) = (ours.0.into_data(), theirs.0.into_data());
        if has_other_roots() {
            // When it multiplies a tensor of half precision by a number in place, libtorch rounds the number to half precision, too.
            let is_half = matches!(dtype, DType::F16 | DType::BF16);
            let tolerance = if is_half { 1e-2 } else { 1e-5 };
            assert_near(&[ours.iter().collect()], &[theirs.iter().collect()], tolerance);
        } else {
            assert_eq!(ours, theirs, "{dtype:?}");
        }
    }
    let dtypes = [DType::F32, DType::F64, DType::F16, DType::BF16];
    for dtype in dtypes.into_iter().filter(|dtype| plain().supports_dtype(*dtype)) {
        check(&FusedAdamWConfig::new().build(), &AdamWConfig::new().build(), dtype);
        for momentum in momenta() {
            let fused = FusedSgdConfig::new().with_momentum(momentum.clone()).build();
            check(&fused, &SgdConfig::new().with_momentum(momentum).build(), dtype);
        }
    }
}

#[test]
fn clipping_comes_first() {
    use burn::grad_clipping::GradientClippingConfig;
    let clipping = Some(GradientClippingConfig::Norm(0.01));
    check(
        FusedAdamWConfig::new().with_grad_clipping(clipping.clone()).init(),
        AdamWConfig::new().with_grad_clipping(clipping).init(),
        assert_same_but_roots,
    );
}

#[test]
fn flat_memory_of_several_chunks_is_updated_element_by_element() {
    let optimizer: FusedAdamW = FusedAdamWConfig::new().build();
    let count = 100_003;
    let mut p: Vec<f32> = (0..count).map(|i| (i as f32).sin()).collect();
    let g: Vec<f32> = (0..count).map(|i| (i as f32 * 0.3).cos()).collect();
    let (mut m, mut v) = (vec![0.0; count], vec![0.0; count]);
    let single = |at: usize| {
        let (mut p, g, mut m, mut v) = ([p[at]], [g[at]], [0.0], [0.0]);
        (1..=3).for_each(|time| optimizer.update(0.1, time, &mut p, &g, &mut m, &mut v));
        (p[0], m[0], v[0])
    };
    let places = [0, 1, 32_767, 32_768, 99_999, count - 1];
    let expected = places.map(single);
    (1..=3).for_each(|time| optimizer.update(0.1, time, &mut p, &g, &mut m, &mut v));
    assert_eq!(places.map(|at| (p[at], m[at], v[at])), expected);
}

#[test]
#[should_panic(expected = "the first step has the number 1")]
fn a_step_on_flat_memory_with_the_number_zero_is_refused() {
    let (mut p, mut m, mut v) = ([1.0_f32], [0.0], [0.0]);
    FusedAdamWConfig::new().build().update(0.1, 0, &mut p, &[1.0], &mut m, &mut v);
}
