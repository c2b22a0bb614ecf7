#![cfg_attr(docsrs, feature(doc_cfg))]
#![doc = include_str!("../README.md")]

mod convolution;
mod dropout;
mod gelu;
mod memory;
mod normalisation;
mod op;
#[cfg(test)]
mod tests;
mod transformer;

use burn::backend::{Dispatch, DispatchDevice};
use burn::nn::conv::Conv2d;
use burn::nn::{BatchNorm, Dropout, Linear, PaddingConfig2d};
use burn::tensor::{DType, Device, Distribution, Tensor};
use op::LayerOps;

pub use transformer::transformer_encoder;

/// `conv.forward(x)`: a convolution of `[samples, channels, height, width]`.
///
/// It has kernels of its own for tensors and parameters of f32 on Flex, square kernels, the same stride and the same explicit or valid padding in
/// all directions, one group and no dilation. Otherwise Burn's `forward` runs.
///
/// # Panics
/// As Burn's `forward`: if `x` has other channels than the layer, or is smaller than its kernel.
pub fn conv2d(conv: &Conv2d, x: Tensor<4>) -> Tensor<4> {
    let ([kernel, kernel_width], [stride, stride_width]) = (conv.kernel_size, conv.stride);
    let padding = match conv.padding {
        PaddingConfig2d::Valid => Some(0),
        PaddingConfig2d::Explicit(top, left, bottom, right) => {
            [left, bottom, right].iter().all(|side| *side == top).then_some(top)
        }
        PaddingConfig2d::Same => None,
    };
    let is_square = kernel == kernel_width && stride == stride_width;
    // Quantised weights are not.
    let is_single =
        conv.weight.dtype() == DType::F32 && conv.bias.as_ref().is_none_or(|bias| bias.dtype() == DType::F32);
    let is_plain = is_square && is_single && conv.dilation == [1; 2] && conv.groups == 1;
    match padding {
        Some(padding) if is_plain && is_taken(&x) => {
            let filters = conv.weight.val().into_dispatch();
            let y = Tensor::from_dispatch(Dispatch::convolve(x.into_dispatch(), filters, stride, padding));
            match &conv.bias {
                None => y,
                Some(bias) => {
                    let bias = bias.val();
                    let [outputs] = bias.dims();
                    y + bias.reshape([1, outputs, 1, 1])
                }
            }
        }
        _ => conv.forward(x),
    }
}

/// `norm.forward(x)`: batch norm of `[samples, channels, height, width]`, with the statistics of the batch, which also move the running ones.
///
/// It has kernels of its own for tensors and parameters of f32 on Flex. Otherwise Burn's `forward` runs: without autodiff, for a frozen layer, on
/// other devices.
///
/// # Panics
/// As Burn's `forward`: if `x` has other channels than the layer.
pub fn batch_norm(norm: &BatchNorm, x: Tensor<4>) -> Tensor<4> {
    let device = x.device();
    if x.shape().num_elements() == 0 {
        let [mean, variance] =
            [&norm.running_mean, &norm.running_var].map(|state| state.value().to_device(&device));
        return burn::tensor::module::batch_norm(
            x,
            norm.gamma.val(),
            norm.beta.val(),
            mean,
            variance,
            norm.epsilon,
        );
    }
    let is_single = [&norm.gamma, &norm.beta].iter().all(|parameter| parameter.dtype() == DType::F32);
    if !is_single || !is_taken(&x) || !device.is_autodiff() || !norm.training.is_enabled() {
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

/// `linear.forward(x)`, from all vectors of `x` as the rows of one matrix.
///
/// If the length of `[samples, length, width]` is a multiple of 32, Burn 0.22 multiplies each sample by the weights on its own. Backward then makes a
/// gradient of the weights for each sample, and adds them up.
///
/// # Panics
/// As Burn's `forward`: if the last dimension of `x` is not the layer's.
pub fn linear<const D: usize>(linear: &Linear, x: Tensor<D>) -> Tensor<D> {
    let mut dims = x.dims();
    if D < 2 {
        return linear.forward(x);
    }
    // Burn takes a 0 among the dimensions of `reshape` for the one that the tensor has there, and its own `forward` reads memory that is not the
    // tensor's then. So the empty dimension comes first; the result of several has no graph, and none is missed.
    let empty: Vec<usize> = (0..D - 1).filter(|&side| dims[side] == 0).collect();
    match empty[..] {
        [] | [0] => {}
        [side] => return self::linear(linear, x.swap_dims(0, side)).swap_dims(0, side),
        _ => {
            let [width, outputs] = linear.weight.dims();
            assert_eq!(dims[D - 1], width, "a tensor whose last dimension does not fit the layer");
            dims[D - 1] = outputs;
            return Tensor::zeros(dims, (&x.device(), x.dtype()));
        }
    }
    let [rows, width] = [dims[..D - 1].iter().product(), dims[D - 1]];
    let y = linear.forward(x.reshape([rows, width]));
    [_, dims[D - 1]] = y.dims();
    y.reshape(dims)
}

/// `Gelu::new().forward(x)`: `x · Φ(x)` with the distribution function of the normal distribution, not its approximation by tanh.
///
/// It has kernels of its own for tensors of f32 on Flex. Otherwise Burn's runs.
pub fn gelu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    if !is_taken(&x) {
        return burn::tensor::activation::gelu(x);
    }
    Tensor::from_dispatch(Dispatch::normal_gelu(x.into_dispatch()))
}

/// `dropout.forward(x)`: zero in place of each value with the layer's probability, the others larger by as much.
///
/// It has kernels of its own for tensors of f32 on Flex, and drops other values than Burn's for the same seed of the device: as independent of
/// each other, and the same with any number of threads. Burn's generator gives the seed, so `device.seed(..)` decides here, too. Otherwise Burn's
/// `forward` runs.
pub fn dropout<const D: usize>(dropout: &Dropout, x: Tensor<D>) -> Tensor<D> {
    let device = x.device();
    let drops = device.is_autodiff() && dropout.training.is_enabled();
    let is_probability = dropout.prob > 0.0 && dropout.prob < 1.0;
    if !drops || !is_probability || !is_taken(&x) {
        return dropout.forward(x);
    }
    let mask = dropout::Mask { seed: drawn(&device), keep: 1.0 - dropout.prob };
    Tensor::from_dispatch(Dispatch::drop_out(x.into_dispatch(), mask))
}

/// 64 bits from the generator of Burn's device.
fn drawn(device: &Device) -> u64 {
    // f32 has whole numbers below 2^16, whatever type the device gives tensors by default.
    let options = (&device.clone().inner(), DType::F32);
    let parts = Tensor::<1>::random([4], Distribution::Uniform(0.0, 65_536.0), options);
    parts.into_data().iter::<f32>().fold(0, |seed, part| seed << 16 | u64::from(part as u16))
}

/// Whether the kernels take it. Burn knows what becomes of a tensor without elements.
fn is_taken<const D: usize>(x: &Tensor<D>) -> bool {
    x.dtype() == DType::F32 && x.dims().iter().all(|dim| *dim > 0) && is_flex(&x.device())
}

fn is_flex(device: &Device) -> bool {
    matches!(device.clone().inner().as_dispatch(), DispatchDevice::Flex(_))
}
