//! Burn's `Conv2d` and `BatchNorm` with kernels of their own for Flex: the same numbers, but for the order of additions.
//!
//! The guide's page about devices has what Burn's cost on Flex. On other devices Burn's run.

mod convolution;
mod normalisation;
mod op;

use burn::backend::{Dispatch, DispatchDevice};
use burn::nn::conv::Conv2d;
use burn::nn::{BatchNorm, PaddingConfig2d};
use burn::tensor::{Device, Tensor};

use op::LayerOps;

/// `conv.forward(x)` for a square kernel, with the same stride and padding in all directions, and without groups, dilation
/// and bias.
pub fn convolve(conv: &Conv2d, x: Tensor<4>) -> Tensor<4> {
    if !is_flex(&x.device()) {
        return conv.forward(x);
    }
    let ([kernel, _], [stride, _]) = (conv.kernel_size, conv.stride);
    let padding = match conv.padding {
        PaddingConfig2d::Explicit(top, ..) => top,
        _ => 0,
    };
    let takes = (conv.kernel_size, conv.stride, conv.dilation, conv.groups, conv.bias.is_none());
    assert_eq!(takes, ([kernel; 2], [stride; 2], [1; 2], 1, true), "a convolution that is not taken");
    let explicit = PaddingConfig2d::Explicit(padding, padding, padding, padding);
    assert!(conv.padding == explicit, "padding that is not taken: {:?}", conv.padding);

    let filters = conv.weight.val().into_dispatch();
    Tensor::from_dispatch(Dispatch::convolve(x.into_dispatch(), filters, stride, padding))
}

/// `norm.forward(x)`. Burn's runs where it does not train: without autodiff, and for a frozen layer.
pub fn normalise(norm: &BatchNorm, x: Tensor<4>) -> Tensor<4> {
    let device = x.device();
    if !is_flex(&device) || !device.is_autodiff() || !norm.training.is_enabled() {
        return norm.forward(x);
    }
    let (gamma, beta) = (norm.gamma.val().into_dispatch(), norm.beta.val().into_dispatch());
    let (output, mean, variance) = Dispatch::normalise(x.into_dispatch(), gamma, beta, norm.epsilon);
    for (running, of_batch) in [(&norm.running_mean, mean), (&norm.running_var, variance)] {
        let of_batch = Tensor::<1>::from_dispatch(of_batch);
        let old = running.value_sync().to_device(&device);
        let new = old.mul_scalar(1.0 - norm.momentum).add(of_batch.mul_scalar(norm.momentum));
        running.update(new.detach());
    }
    Tensor::from_dispatch(output)
}

fn is_flex(device: &Device) -> bool {
    matches!(device.clone().inner().as_dispatch(), DispatchDevice::Flex(_))
}

#[cfg(test)]
mod tests {
    use burn::module::{Module, Param};
    use burn::nn::BatchNormConfig;
    use burn::nn::conv::Conv2dConfig;
    use burn::tensor::TensorData;

    use super::*;
    use crate::models::tests::between;

    const CLOSE: f32 = 1e-5;

    /// The same in every run.
    fn numbers<const D: usize>(dims: [usize; D], from: usize, device: &Device) -> Tensor<D> {
        let count = dims.iter().product::<usize>();
        let values: Vec<f32> = (from..from + count).map(|i| (i as f32 * 1.7).sin() + 0.3).collect();
        Tensor::from_data(TensorData::new(values, dims), device)
    }

    fn weighted_gradients(y: Tensor<4>) -> burn::tensor::Gradients {
        let weights = numbers(y.dims(), 5, &y.device());
        (y * weights).sum().backward()
    }

    struct Case {
        channels: [usize; 2],
        size: [usize; 2],
        kernel: usize,
        stride: usize,
        padding: usize,
    }

    const fn case(
        channels: [usize; 2],
        size: [usize; 2],
        kernel: usize,
        stride: usize,
        padding: usize,
    ) -> Case {
        Case { channels, size, kernel, stride, padding }
    }

    /// ResNet's, and others with rests, strides that skip columns, padding as wide as the kernel, and none.
    const CASES: [Case; 14] = [
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
    ];

    #[test]
    fn convolutions_and_their_gradients_are_burns() {
        let device = Device::flex().autodiff();
        for Case { channels: [inputs, outputs], size: [height, width], kernel, stride, padding } in CASES {
            let config = Conv2dConfig::new([inputs, outputs], [kernel; 2])
                .with_stride([stride; 2])
                .with_padding(PaddingConfig2d::Explicit(padding, padding, padding, padding))
                .with_bias(false);
            let mut conv = config.init(&device);
            conv.weight = Param::from_tensor(numbers([outputs, inputs, kernel, kernel], 1, &device));
            for samples in [1, 3] {
                let what = format!(
                    "{samples} samples, {inputs} to {outputs} channels of {height} x {width}, kernel {kernel}, stride {stride}, padding {padding}"
                );
                let x = numbers([samples, inputs, height, width], 3, &device).require_grad();
                let outputs = [conv.forward(x.clone()), convolve(&conv, x.clone())];
                let apart = between(outputs.clone());
                assert!(apart < CLOSE, "{what}: {apart}");

                let gradients = outputs.map(weighted_gradients);
                let of_x = gradients.each_ref().map(|g| x.grad(g).expect("x has a gradient"));
                let apart = between(of_x);
                assert!(apart < CLOSE, "{what}, gradient of the input: {apart}");
                let weight = conv.weight.val();
                let of_weight =
                    gradients.each_ref().map(|g| weight.grad(g).expect("the weight has a gradient"));
                let apart = between(of_weight);
                assert!(apart < CLOSE, "{what}, gradient of the weight: {apart}");
            }
        }
    }

    #[test]
    fn a_frozen_batch_norm_keeps_its_running_statistics() {
        let device = Device::flex().autodiff();
        let frozen = || BatchNormConfig::new(3).init(&device).freeze();
        let (burns, ours) = (frozen(), frozen());
        let x = numbers([2, 3, 4, 5], 1, &device);
        let apart = between([burns.forward(x.clone()), normalise(&ours, x)]);
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
        let apart = between([conv.forward(x.clone()), convolve(&conv, x.clone())]);
        assert!(apart < CLOSE, "a convolution: {apart}");
        let apart = between([norm.forward(x.clone()), normalise(&norm, x)]);
        assert!(apart < CLOSE, "batch norm: {apart}");
    }

    #[test]
    fn batch_norm_its_gradients_and_its_running_statistics_are_burns() {
        let device = Device::flex().autodiff();
        for dims in [[64, 16, 8, 8], [3, 5, 7, 1], [2, 1, 3, 11], [1, 4, 6, 6]] {
            let layers = [(); 2].map(|()| {
                let mut norm = BatchNormConfig::new(dims[1]).init(&device);
                norm.gamma = Param::from_tensor(numbers([dims[1]], 11, &device));
                norm.beta = Param::from_tensor(numbers([dims[1]], 17, &device));
                norm
            });
            let x = numbers(dims, 1, &device).require_grad();
            let outputs = [layers[0].forward(x.clone()), normalise(&layers[1], x.clone())];
            let apart = between(outputs.clone());
            assert!(apart < CLOSE, "{dims:?}: {apart}");
            for running in
                [|n: &BatchNorm| n.running_mean.value_sync(), |n: &BatchNorm| n.running_var.value_sync()]
            {
                let apart = between(layers.each_ref().map(running));
                assert!(apart < CLOSE, "{dims:?}, running statistics: {apart}");
            }

            let gradients = outputs.map(weighted_gradients);
            let of_x = gradients.each_ref().map(|g| x.grad(g).expect("x has a gradient"));
            let apart = between(of_x);
            assert!(apart < CLOSE, "{dims:?}, gradient of the input: {apart}");
            for parameter in [|n: &BatchNorm| n.gamma.val(), |n: &BatchNorm| n.beta.val()] {
                let of_layers = [0, 1]
                    .map(|i| parameter(&layers[i]).grad(&gradients[i]).expect("a parameter has a gradient"));
                let apart = between(of_layers);
                assert!(apart < CLOSE, "{dims:?}, gradient of a parameter: {apart}");
            }
        }
    }
}
