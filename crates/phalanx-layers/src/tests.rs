use burn::module::{Module, Param};
use burn::nn::conv::Conv2dConfig;
use burn::nn::transformer::{TransformerEncoderConfig, TransformerEncoderInput, TransformerEncoderLayer};
use burn::nn::{BatchNormConfig, DropoutConfig, LinearConfig};
use burn::tensor::quantization::{QuantScheme, QuantStore};
use burn::tensor::{Bool, Distribution, Gradients, TensorData};

use super::*;

const CLOSE: f32 = 1e-5;

/// The largest difference, as a share of the largest value.
fn between<const D: usize>([a, b]: [Tensor<D>; 2]) -> f32 {
    let largest = a.clone().abs().max().into_scalar::<f32>();
    (a - b).abs().max().into_scalar::<f32>() / largest
}

/// The same in every run.
fn numbers<const D: usize>(dims: [usize; D], from: usize, device: &Device) -> Tensor<D> {
    let count = dims.iter().product::<usize>();
    let values: Vec<f32> = (from..from + count).map(|i| (i as f32 * 1.7).sin() + 0.3).collect();
    Tensor::from_data(TensorData::new(values, dims), device)
}

fn weighted_sum<const D: usize>(y: Tensor<D>) -> Tensor<1> {
    let weights = numbers(y.dims(), 5, &y.device());
    (y * weights).sum()
}

fn weighted_gradients<const D: usize>(y: Tensor<D>) -> Gradients {
    weighted_sum(y).backward()
}

/// With one thread, and with several that divide samples and channels unevenly.
fn with_threads(test: impl Fn(usize) + Sync) {
    for threads in [1, 3] {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| test(threads));
    }
}

struct Case {
    channels: [usize; 2],
    size: [usize; 2],
    kernel: usize,
    stride: usize,
    padding: usize,
}

const fn case(channels: [usize; 2], size: [usize; 2], kernel: usize, stride: usize, padding: usize) -> Case {
    Case { channels, size, kernel, stride, padding }
}

/// ResNet's, and others with rests, strides that skip columns, padding as wide as the kernel, and none.
const CASES: [Case; 19] = [
    case([3, 16], [32, 32], 3, 1, 1),
    case([16, 16], [32, 32], 3, 1, 1),
    case([16, 32], [32, 32], 3, 2, 1),
    case([16, 32], [32, 32], 1, 2, 0),
    case([32, 32], [16, 16], 3, 1, 1),
    case([64, 64], [8, 8], 3, 1, 1),
    case([5, 7], [9, 6], 3, 2, 1),
    case([4, 3], [7, 11], 3, 1, 0),
    case([2, 3], [1, 5], 3, 1, 1),
    case([3, 2], [5, 4], 3, 1, 3),
    case([2, 3], [4, 5], 3, 2, 4),
    case([2, 5], [11, 12], 5, 3, 2),
    case([4, 1], [8, 9], 2, 3, 0),
    case([1, 1], [3, 3], 3, 1, 0),
    case([3, 4], [5, 6], 1, 1, 0),
    case([2, 3], [7, 9], 5, 1, 2),
    case([3, 2], [8, 6], 7, 1, 3),
    case([2, 2], [6, 1], 3, 1, 1),
    case([2, 3], [4, 2], 7, 1, 3),
];

#[test]
fn convolutions_and_their_gradients_are_burns() {
    let device = Device::flex().autodiff();
    with_threads(|threads| {
        for Case { channels: [inputs, outputs], size: [height, width], kernel, stride, padding } in CASES {
            let config = Conv2dConfig::new([inputs, outputs], [kernel; 2])
                .with_stride([stride; 2])
                .with_padding(PaddingConfig2d::Explicit(padding, padding, padding, padding))
                .with_bias(outputs % 2 == 0);
            let mut conv = config.init(&device);
            conv.weight = Param::from_tensor(numbers([outputs, inputs, kernel, kernel], 1, &device));
            for samples in [1, 4] {
                let what = format!(
                    "{threads} threads, {samples} samples, {inputs} to {outputs} channels of {height} x {width}, kernel {kernel}, stride {stride}, padding {padding}"
                );
                let x = numbers([samples, inputs, height, width], 3, &device).require_grad();
                let results = [conv.forward(x.clone()), conv2d(&conv, x.clone())];
                let apart = between(results.clone());
                assert!(apart < CLOSE, "{what}: {apart}");

                let gradients = results.map(weighted_gradients);
                let of_x = gradients.each_ref().map(|g| x.grad(g).expect("x has a gradient"));
                let apart = between(of_x);
                assert!(apart < CLOSE, "{what}, gradient of the input: {apart}");
                let weight = conv.weight.val();
                let of_weight =
                    gradients.each_ref().map(|g| weight.grad(g).expect("the weight has a gradient"));
                let apart = between(of_weight);
                assert!(apart < CLOSE, "{what}, gradient of the weight: {apart}");
                if let Some(bias) = &conv.bias {
                    let bias = bias.val();
                    let of_bias =
                        gradients.each_ref().map(|g| bias.grad(g).expect("the bias has a gradient"));
                    let apart = between(of_bias);
                    assert!(apart < CLOSE, "{what}, gradient of the bias: {apart}");
                }
            }
        }
    });
}

/// Kernels that are not square, groups and the like are Burn's own, and give what Burn gives.
#[test]
fn convolutions_that_are_not_taken_are_burns_own() {
    let device = Device::flex();
    let config = |kernel| Conv2dConfig::new([4, 6], kernel);
    let configs = [
        config([3, 1]),
        config([3, 3]).with_groups(2),
        config([3, 3]).with_dilation([2, 2]),
        config([3, 3]).with_stride([1, 2]),
        config([3, 3]).with_padding(PaddingConfig2d::Same),
        config([3, 3]).with_padding(PaddingConfig2d::Explicit(1, 0, 1, 0)),
    ];
    for config in configs {
        let conv = config.init(&device);
        let x = numbers([2, 4, 9, 8], 1, &device);
        let results = [conv.forward(x.clone()), conv2d(&conv, x)];
        assert_eq!(between(results), 0.0, "{config:?}");
    }
}

/// Burn computes with them as with the numbers that they stand for.
#[test]
fn quantised_weights_are_burns_own() {
    let device = Device::flex();
    let scheme = QuantScheme::default().with_store(QuantStore::Native);
    for bias in [false, true] {
        let mut conv = Conv2dConfig::new([4, 6], [3, 3]).with_bias(bias).init(&device);
        conv.weight = conv.weight.map(|weight| weight.quantize_dynamic(&scheme));
        let x = numbers([2, 4, 9, 8], 1, &device);
        let results = [conv.forward(x.clone()), conv2d(&conv, x)];
        assert_eq!(between(results), 0.0, "bias: {bias}");
    }
}

#[test]
fn gradients_are_the_slopes() {
    const STEP: f32 = 1e-2;
    let device = Device::flex().autodiff();
    let dims = [2, 3, 5, 4];
    let conv = Conv2dConfig::new([3, 4], [3, 3])
        .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
        .with_stride([2, 2])
        .init(&device);
    let norm = BatchNormConfig::new(3).init(&device);
    let layers: [&dyn Fn(Tensor<4>) -> Tensor<4>; 2] = [&|x| conv2d(&conv, x), &|x| batch_norm(&norm, x)];
    for (number, layer) in layers.into_iter().enumerate() {
        let x = numbers(dims, 1, &device).require_grad();
        let gradient = x.grad(&weighted_gradients(layer(x.clone()))).expect("x has a gradient");
        let gradient = gradient.into_data().try_to_vec::<f32>().expect("numbers of f32");
        let values = x.into_data().try_to_vec::<f32>().expect("numbers of f32");
        let largest = gradient.iter().fold(0.0f32, |largest, slope| largest.max(slope.abs()));
        for at in (0..values.len()).step_by(7) {
            let loss = |by: f32| {
                let mut moved = values.clone();
                moved[at] += by;
                let x = Tensor::from_data(TensorData::new(moved, dims), &device);
                weighted_sum(layer(x)).into_scalar::<f32>()
            };
            let slope = (loss(STEP) - loss(-STEP)) / (2.0 * STEP);
            let apart = (slope - gradient[at]).abs() / largest;
            assert!(apart < 1e-2, "layer {number}, element {at}: {slope} and {}", gradient[at]);
        }
    }
}

#[test]
fn a_frozen_batch_norm_keeps_its_running_statistics() {
    let device = Device::flex().autodiff();
    let frozen = || BatchNormConfig::new(3).init(&device).freeze();
    let (burns, ours) = (frozen(), frozen());
    let x = numbers([2, 3, 4, 5], 1, &device);
    let apart = between([burns.forward(x.clone()), batch_norm(&ours, x)]);
    assert!(apart < CLOSE, "{apart}");
    let mean = ours.running_mean.value_sync().into_data().try_to_vec::<f32>().expect("numbers of f32");
    assert_eq!(mean, [0.0; 3]);
}

/// A tensor whose elements do not lie row by row is one that operations before have transposed.
#[test]
fn tensors_may_lie_transposed() {
    let device = Device::flex().autodiff();
    let conv = Conv2dConfig::new([4, 6], [3, 3])
        .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
        .with_bias(false)
        .init(&device);
    let norm = BatchNormConfig::new(4).init(&device);
    let x = numbers([2, 5, 7, 4], 2, &device).permute([0, 3, 1, 2]);
    let apart = between([conv.forward(x.clone()), conv2d(&conv, x.clone())]);
    assert!(apart < CLOSE, "a convolution: {apart}");
    let apart = between([norm.forward(x.clone()), batch_norm(&norm, x.clone())]);
    assert!(apart < CLOSE, "batch norm: {apart}");

    // And so may gradients: the next operation transposes.
    let x = x.detach().require_grad();
    let turned = |y: Tensor<4>| weighted_gradients(y.permute([3, 0, 2, 1]));
    let of_x =
        [turned(conv.forward(x.clone())), turned(conv2d(&conv, x.clone()))].map(|g| x.grad(&g).unwrap());
    let apart = between(of_x);
    assert!(apart < CLOSE, "gradient of a convolution's input: {apart}");
    let of_x =
        [turned(norm.forward(x.clone())), turned(batch_norm(&norm, x.clone()))].map(|g| x.grad(&g).unwrap());
    let apart = between(of_x);
    assert!(apart < CLOSE, "gradient of batch norm's input: {apart}");
    let of_x = [turned(burn::tensor::activation::gelu(x.clone())), turned(gelu(x.clone()))]
        .map(|g| x.grad(&g).unwrap());
    let apart = between(of_x);
    assert!(apart < CLOSE, "gradient of GELU's input: {apart}");
}

#[test]
fn a_tensor_without_elements_is_burns_own() {
    let device = Device::flex();
    let empty = Tensor::<4>::zeros([0, 4, 5, 5], &device);
    assert_eq!(gelu(empty.clone()).dims(), [0, 4, 5, 5]);
    let norm = BatchNormConfig::new(4).init(&device);
    assert_eq!(batch_norm(&norm, empty).dims(), [0, 4, 5, 5]);
    let layer = LinearConfig::new(6, 3).init(&device);
    for dims in [[0, 2, 6], [2, 0, 6], [0, 0, 6]] {
        let y = linear(&layer, Tensor::<3>::zeros(dims, &device));
        assert_eq!(y.dims(), [dims[0], dims[1], 3]);
    }
}

#[test]
#[should_panic(expected = "does not fit the layer")]
fn a_tensor_without_elements_of_another_width_is_refused() {
    let device = Device::flex();
    let layer = LinearConfig::new(6, 3).init(&device);
    drop(linear(&layer, Tensor::<3>::zeros([0, 0, 7], &device)));
}

#[test]
fn an_empty_batch_leaves_the_running_statistics() {
    let device = Device::flex().autodiff();
    let norm = BatchNormConfig::new(4).init(&device);
    let statistics = || [&norm.running_mean, &norm.running_var].map(|state| state.value_sync().into_data());
    drop(batch_norm(&norm, numbers([3, 4, 5, 5], 1, &device)));
    let before = statistics();
    let y = batch_norm(&norm, Tensor::<4>::zeros([0, 4, 5, 5], &device));
    assert_eq!(y.dims(), [0, 4, 5, 5]);
    assert_eq!(statistics(), before);
}

#[test]
fn batch_norm_its_gradients_and_its_running_statistics_are_burns() {
    let device = Device::flex().autodiff();
    with_threads(|threads| {
        for dims in [[64, 16, 8, 8], [3, 5, 7, 1], [2, 1, 3, 11], [1, 4, 6, 6]] {
            let layers = [(); 2].map(|()| {
                let mut norm = BatchNormConfig::new(dims[1]).init(&device);
                norm.gamma = Param::from_tensor(numbers([dims[1]], 11, &device));
                norm.beta = Param::from_tensor(numbers([dims[1]], 17, &device));
                norm
            });
            let x = numbers(dims, 1, &device).require_grad();
            let outputs = [layers[0].forward(x.clone()), batch_norm(&layers[1], x.clone())];
            let apart = between(outputs.clone());
            assert!(apart < CLOSE, "{threads} threads, {dims:?}: {apart}");
            for running in
                [|n: &BatchNorm| n.running_mean.value_sync(), |n: &BatchNorm| n.running_var.value_sync()]
            {
                let apart = between(layers.each_ref().map(running));
                assert!(apart < CLOSE, "{threads} threads, {dims:?}, running statistics: {apart}");
            }

            let gradients = outputs.map(weighted_gradients);
            let of_x = gradients.each_ref().map(|g| x.grad(g).expect("x has a gradient"));
            let apart = between(of_x);
            assert!(apart < CLOSE, "{threads} threads, {dims:?}, gradient of the input: {apart}");
            for parameter in [|n: &BatchNorm| n.gamma.val(), |n: &BatchNorm| n.beta.val()] {
                let of_layers = [0, 1]
                    .map(|i| parameter(&layers[i]).grad(&gradients[i]).expect("a parameter has a gradient"));
                let apart = between(of_layers);
                assert!(apart < CLOSE, "{threads} threads, {dims:?}, gradient of a parameter: {apart}");
            }
        }
    });
}

#[test]
fn linear_is_burns_for_tensors_of_any_number_of_dimensions() {
    let device = Device::flex();
    let layer = LinearConfig::new(6, 4).init(&device);
    let x = numbers([5, 32, 6], 1, &device);
    assert!(between([layer.forward(x.clone()), linear(&layer, x)]) < CLOSE);
    let x = numbers([2, 3, 4, 6], 1, &device);
    assert!(between([layer.forward(x.clone()), linear(&layer, x)]) < CLOSE);
    let x = numbers([7, 6], 1, &device);
    assert!(between([layer.forward(x.clone()), linear(&layer, x)]) < CLOSE);
    let x = numbers([6], 1, &device);
    assert!(between([layer.forward(x.clone()), linear(&layer, x)]) < CLOSE);
}

#[test]
fn gelu_and_its_gradient_are_burns() {
    let device = Device::flex().autodiff();
    with_threads(|threads| {
        for dims in [[1, 1], [3, 333], [700, 70]] {
            let x = (numbers(dims, 1, &device) * 4.0).require_grad();
            let results = [burn::nn::Gelu::new().forward(x.clone()), gelu(x.clone())];
            let apart = between(results.clone());
            assert!(apart < CLOSE, "{threads} threads, {dims:?}: {apart}");
            let of_x = results.map(weighted_gradients).map(|g| x.grad(&g).expect("x has a gradient"));
            let apart = between(of_x);
            assert!(apart < CLOSE, "{threads} threads, {dims:?}, gradient: {apart}");
        }
    });
}

#[test]
fn the_gradient_passes_where_the_value_was_kept() {
    let device = Device::flex().autodiff();
    let layer = DropoutConfig::new(0.3).init();
    with_threads(|threads| {
        for dims in [[3, 5], [700, 70]] {
            let x = (numbers(dims, 1, &device) + 2.0).require_grad();
            let y = dropout(&layer, x.clone());
            let factors: Vec<f32> = (y.clone() / x.clone()).into_data().iter().collect();
            let is_kept = |factor: &&f32| (**factor - 1.0 / 0.7).abs() < CLOSE;
            let kept = factors.iter().filter(is_kept).count();
            assert!(factors.iter().all(|factor| *factor == 0.0 || is_kept(&factor)), "{threads} threads");
            let share = kept as f64 / factors.len() as f64;
            assert!(factors.len() < 1000 || (share - 0.7).abs() < 0.02, "{threads} threads: {share}");
            let dx: Vec<f32> =
                x.grad(&y.sum().backward()).expect("x has a gradient").into_data().iter().collect();
            assert!(std::iter::zip(&dx, &factors).all(|(dx, factor)| (dx - factor).abs() < CLOSE));
            // Where value and gradient lie transposed, as between heads.
            let turned = dropout(&layer, x.clone().swap_dims(0, 1));
            let turned_factors = turned.clone() / x.clone().swap_dims(0, 1);
            let expected = numbers([dims[1], dims[0]], 5, &device) * turned_factors;
            let dx = x.grad(&weighted_gradients(turned)).expect("x has a gradient");
            assert!(between([expected.inner().swap_dims(0, 1), dx.inner()]) < CLOSE);
            if factors.len() > 1000 {
                let again: Vec<f32> = (dropout(&layer, x.clone()) / x).into_data().iter().collect();
                assert_ne!(again, factors);
            }
        }
    });
}

#[test]
fn a_dropout_that_drops_nothing_is_burns_own() {
    let device = Device::flex().autodiff();
    let x = || numbers::<2>([30, 40], 1, &device);
    let unchanged = |layer: &Dropout, x: Tensor<2>| {
        assert_eq!(dropout(layer, x.clone()).into_data(), x.into_data());
    };
    unchanged(&DropoutConfig::new(0.0).init(), x());
    let layer = DropoutConfig::new(0.5).init();
    unchanged(&layer, x().inner());
    unchanged(&layer.clone().freeze(), x());
    let empty = Tensor::<2>::empty([0, 4], &device);
    assert_eq!(dropout(&layer, empty).dims(), [0, 4]);
    let double = dropout(&layer, x().cast(DType::F64));
    assert_eq!(double.dtype(), DType::F64);
}

fn linear_layers(layer: &TransformerEncoderLayer) -> [&Linear; 6] {
    let (mha, pwff) = (&layer.mha, &layer.pwff);
    [&mha.query, &mha.key, &mha.value, &mha.output, &pwff.linear_inner, &pwff.linear_outer]
}

/// True for the last third of a sample's tokens; and for those behind a token.
fn masks(samples: usize, length: usize, device: &Device) -> (Tensor<2, Bool>, Tensor<3, Bool>) {
    let pad: Vec<bool> = (0..samples * length).map(|i| i % length >= length - length / 3).collect();
    let attn: Vec<bool> = (0..samples * length * length).map(|i| i % length > i / length % length).collect();
    (
        Tensor::from_data(TensorData::new(pad, [samples, length]), device),
        Tensor::from_data(TensorData::new(attn, [samples, length, length]), device),
    )
}

#[test]
fn one_mask_may_be_for_all_samples() {
    let device = Device::flex();
    let encoder = TransformerEncoderConfig::new(32, 64, 4, 1).with_dropout(0.0).init(&device);
    let x = numbers([3, 8, 32], 1, &device);
    let (pad, attn) = masks(1, 8, &device);
    let input = TransformerEncoderInput::new(x.clone())
        .mask_pad(pad.clone().repeat_dim(0, 3))
        .mask_attn(attn.clone().repeat_dim(0, 3));
    let encoded = transformer_encoder(&encoder, x, Some(pad), Some(attn));
    assert!(between([encoder.forward(input), encoded]) < CLOSE);
}

/// On both sides of the multiples of 32, where Burn takes another way.
#[test]
fn encoders_and_their_gradients_are_burns() {
    let device = Device::flex().autodiff();
    device.seed(7);
    let config = || TransformerEncoderConfig::new(32, 64, 4, 2).with_dropout(0.0);
    let configs = [config(), config().with_norm_first(true), config().with_quiet_softmax(true)];
    for (number, (samples, length)) in [(1, 32), (8, 64), (3, 17), (6, 2), (5, 96)].into_iter().enumerate() {
        for is_masked in [false, true] {
            let encoder = configs[number % configs.len()].init(&device);
            let random =
                || Tensor::<3>::random([samples, length, 32], Distribution::Normal(0.0, 1.0), &device);
            let (x, weights) = (random().require_grad(), random());
            let what = format!("{samples} samples of {length}, masked: {is_masked}");

            let mut input = TransformerEncoderInput::new(x.clone());
            let (pad, attn) = masks(samples, length, &device);
            let masks = is_masked.then_some((pad, attn)).unzip();
            if let (Some(pad), Some(attn)) = masks.clone() {
                input = input.mask_pad(pad).mask_attn(attn);
            }
            let expected = encoder.forward(input);
            let encoded = transformer_encoder(&encoder, x.clone(), masks.0, masks.1);
            let apart = between([expected.clone(), encoded.clone()]);
            assert!(apart < CLOSE, "{what}: {apart}");

            let backward = |y: Tensor<3>| (y * weights.clone()).sum().backward();
            let gradients: [Gradients; 2] = [backward(expected), backward(encoded)];
            let of_x = gradients.each_ref().map(|g| x.grad(g).expect("x has a gradient"));
            let apart = between(of_x);
            assert!(apart < CLOSE, "{what}, gradient of the input: {apart}");
            for linear in encoder.layers.iter().flat_map(linear_layers) {
                let weight = linear.weight.val();
                let apart =
                    between(gradients.each_ref().map(|g| weight.grad(g).expect("a weight has a gradient")));
                assert!(apart < CLOSE, "{what}, gradient of weights: {apart}");
            }
        }
    }
}
