//! The layers as operations of Burn's extension API.

use std::mem::MaybeUninit;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex, backend_extension};
use burn::tensor::{Bytes, DType, Shape};
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_autodiff::{Autodiff, NodeId};
use burn_flex::{FlexTensor, Layout};

use super::dropout::Mask;
use super::normalisation::Statistics;
use super::{convolution, gelu, memory, normalisation};

/// `pub` because the macro implements it for a public type; the module is private.
#[backend_extension(Autodiff, Flex)]
pub trait LayerOps: Backend {
    /// `conv2d` with square kernels, one group, without dilation and bias.
    fn convolve(
        x: FloatTensor<Self>,
        filters: FloatTensor<Self>,
        stride: usize,
        padding: usize,
    ) -> FloatTensor<Self>;

    /// `batch_norm_train`: the output, the means and the variances.
    fn normalise(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// `gelu`, under a name that Burn's backends do not have.
    fn normal_gelu(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// The values that `mask` keeps.
    fn drop_out(x: FloatTensor<Self>, mask: Mask) -> FloatTensor<Self>;
}

impl LayerOps for Flex {
    fn convolve(x: FlexTensor, filters: FlexTensor, stride: usize, padding: usize) -> FlexTensor {
        let (x, filters) = (x.to_contiguous(), filters.to_contiguous());
        let shape = convolution_shape(&x, &filters, stride, padding);
        let [height, width] = shape.output();
        let output = [dims::<4>(&x)[0], shape.outputs, height, width];
        // SAFETY: it writes every value.
        unsafe { written(output, |y| convolution::forward(&shape, values(&x), values(&filters), y)) }
    }

    fn normalise(
        x: FlexTensor,
        gamma: FlexTensor,
        beta: FlexTensor,
        epsilon: f64,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        let [x, gamma, beta] = [x, gamma, beta].map(|tensor| tensor.to_contiguous());
        let channels = [normalisation_shape(&x).channels];
        assert_eq!([dims(&gamma), dims(&beta)], [channels; 2], "parameters for another number of channels");
        let (shape, parameters) = (normalisation_shape(&x), [values(&gamma), values(&beta)]);
        let mut statistics = Statistics { mean: Vec::new(), variance: Vec::new() };
        let forward = |y: &mut [MaybeUninit<f32>]| {
            statistics = normalisation::forward(&shape, values(&x), parameters, epsilon, y);
        };
        // SAFETY: it writes every value.
        let y = unsafe { written(dims::<4>(&x), forward) };
        (y, tensor(channels, statistics.mean), tensor(channels, statistics.variance))
    }

    fn normal_gelu(x: FlexTensor) -> FlexTensor {
        let x = x.to_contiguous();
        // SAFETY: it writes every value.
        unsafe { like(&x, |y| gelu::forward(values(&x), y)) }
    }

    fn drop_out(x: FlexTensor, mask: Mask) -> FlexTensor {
        let x = x.to_contiguous();
        // SAFETY: it writes every value.
        unsafe { like(&x, |y| mask.apply(values(&x), y)) }
    }
}

impl<C: CheckpointStrategy> LayerOps for Autodiff<Flex, C> {
    fn convolve(
        x: FloatTensor<Self>,
        filters: FloatTensor<Self>,
        stride: usize,
        padding: usize,
    ) -> FloatTensor<Self> {
        let forward = |x, filters| Flex::convolve(x, filters, stride, padding);
        match Convolve.prepare::<C>([x.node(), filters.node()]).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let saved = Convolution {
                    x: prep.checkpoint(&x),
                    filters: prep.checkpoint(&filters),
                    stride,
                    padding,
                };
                prep.finish(saved, forward(x.into_primitive(), filters.into_primitive()))
            }
            OpsKind::UnTracked(prep) => prep.finish(forward(x.into_primitive(), filters.into_primitive())),
        }
    }

    fn normalise(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let forward = |x: FloatTensor<Self>, gamma: FloatTensor<Self>, beta: FloatTensor<Self>| {
            Flex::normalise(x.into_primitive(), gamma.into_primitive(), beta.into_primitive(), epsilon)
        };
        let nodes = [x.node(), gamma.node(), beta.node()];
        let (output, mean, variance) = match Normalise.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let (x_node, gamma_node) = (prep.checkpoint(&x), prep.checkpoint(&gamma));
                let (output, mean, variance) = forward(x, gamma, beta);
                let saved = Normalisation {
                    x: x_node,
                    gamma: gamma_node,
                    mean: mean.clone(),
                    variance: variance.clone(),
                    epsilon,
                };
                (prep.finish(saved, output), mean, variance)
            }
            OpsKind::UnTracked(prep) => {
                let (output, mean, variance) = forward(x, gamma, beta);
                (prep.finish(output), mean, variance)
            }
        };
        (output, FloatTensor::<Self>::new(mean), FloatTensor::<Self>::new(variance))
    }

    fn normal_gelu(x: FloatTensor<Self>) -> FloatTensor<Self> {
        match Gelu.prepare::<C>([x.node()]).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let saved = prep.checkpoint(&x);
                prep.finish(saved, Flex::normal_gelu(x.into_primitive()))
            }
            OpsKind::UnTracked(prep) => prep.finish(Flex::normal_gelu(x.into_primitive())),
        }
    }

    fn drop_out(x: FloatTensor<Self>, mask: Mask) -> FloatTensor<Self> {
        let y = Flex::drop_out(x.primitive().clone(), mask);
        match DropOut.prepare::<C>([x.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(mask, y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

/// Backward of [`LayerOps::drop_out`], which drops what forward has dropped.
#[derive(Debug)]
struct DropOut;

impl Backward<Flex, 1> for DropOut {
    type State = Mask;

    fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let dy = gradients.consume::<Flex>(&ops.node);
        if let [Some(node)] = ops.parents {
            gradients.register::<Flex>(node.id, Flex::drop_out(dy, ops.state));
        }
    }
}

/// Backward of [`LayerOps::normal_gelu`].
#[derive(Debug)]
struct Gelu;

impl Backward<Flex, 1> for Gelu {
    type State = NodeId;

    fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = gradients.consume::<Flex>(&ops.node).to_contiguous();
        let x = checkpointer.retrieve_node_output::<FlexTensor>(ops.state).to_contiguous();
        if let [Some(node)] = ops.parents {
            // SAFETY: it writes every value.
            let dx = unsafe { like(&x, |dx| gelu::backward(values(&x), values(&dy), dx)) };
            gradients.register::<Flex>(node.id, dx);
        }
    }
}

/// Backward of [`LayerOps::convolve`].
#[derive(Debug)]
struct Convolve;

#[derive(Clone, Debug)]
struct Convolution {
    x: NodeId,
    filters: NodeId,
    stride: usize,
    padding: usize,
}

impl Backward<Flex, 2> for Convolve {
    type State = Convolution;

    fn backward(self, ops: Ops<Self::State, 2>, gradients: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = gradients.consume::<Flex>(&ops.node).to_contiguous();
        let Convolution { x, filters, stride, padding } = ops.state;
        let [x, filters] =
            [x, filters].map(|node| checkpointer.retrieve_node_output::<FlexTensor>(node).to_contiguous());
        let shape = convolution_shape(&x, &filters, stride, padding);
        let [x_node, filters_node] = ops.parents;
        if let Some(node) = x_node {
            let (filters, dy) = (values(&filters), values(&dy));
            let dx = match convolution::is_turned(&shape) {
                // SAFETY: it writes every value.
                true => unsafe {
                    written(dims::<4>(&x), |dx| {
                        convolution::backward_input_without_stride(&shape, filters, dy, dx);
                    })
                },
                false => filled(dims::<4>(&x), |dx| convolution::backward_input(&shape, filters, dy, dx)),
            };
            gradients.register::<Flex>(node.id, dx);
        }
        if let Some(node) = filters_node {
            let dw = filled(dims::<4>(&filters), |dw| {
                convolution::backward_filters(&shape, values(&x), values(&dy), dw)
            });
            gradients.register::<Flex>(node.id, dw);
        }
    }
}

/// Backward of [`LayerOps::normalise`].
#[derive(Debug)]
struct Normalise;

#[derive(Clone, Debug)]
struct Normalisation {
    x: NodeId,
    gamma: NodeId,
    mean: FlexTensor,
    variance: FlexTensor,
    epsilon: f64,
}

impl Backward<Flex, 3> for Normalise {
    type State = Normalisation;

    fn backward(self, ops: Ops<Self::State, 3>, gradients: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = gradients.consume::<Flex>(&ops.node).to_contiguous();
        let Normalisation { x, gamma, mean, variance, epsilon } = ops.state;
        let [x, gamma] =
            [x, gamma].map(|node| checkpointer.retrieve_node_output::<FlexTensor>(node).to_contiguous());
        let statistics = Statistics { mean: values(&mean).to_vec(), variance: values(&variance).to_vec() };
        let inputs = [values(&x), values(&dy)];
        let shape = normalisation_shape(&x);
        let mut of = normalisation::Gradients { gamma: Vec::new(), beta: Vec::new() };
        let backward = |dx: &mut [MaybeUninit<f32>]| {
            of = normalisation::backward(&shape, inputs, values(&gamma), &statistics, epsilon, dx);
        };
        // SAFETY: it writes every value.
        let dx = unsafe { written(dims::<4>(&x), backward) };

        let [x_node, gamma_node, beta_node] = ops.parents;
        if let Some(node) = x_node {
            gradients.register::<Flex>(node.id, dx);
        }
        if let Some(node) = gamma_node {
            gradients.register::<Flex>(node.id, tensor([shape.channels], of.gamma));
        }
        if let Some(node) = beta_node {
            gradients.register::<Flex>(node.id, tensor([shape.channels], of.beta));
        }
    }
}

fn convolution_shape(
    x: &FlexTensor,
    filters: &FlexTensor,
    stride: usize,
    padding: usize,
) -> convolution::Shape {
    let ([_, inputs, height, width], [outputs, _, kernel, _]) = (dims(x), dims(filters));
    assert_eq!(dims(filters), [outputs, inputs, kernel, kernel], "filters that do not fit {inputs} channels");
    assert!(kernel <= height.min(width) + 2 * padding, "a kernel that is larger than the image");
    convolution::Shape { inputs, height, width, outputs, kernel, stride, padding }
}

fn normalisation_shape(x: &FlexTensor) -> normalisation::Shape {
    let [_, channels, height, width] = dims(x);
    normalisation::Shape { channels, length: height * width }
}

fn dims<const D: usize>(tensor: &FlexTensor) -> [usize; D] {
    tensor.layout().shape().dims()
}

/// The elements of a contiguous tensor.
fn values(tensor: &FlexTensor) -> &[f32] {
    tensor.as_slice().expect("the layers are made for contiguous tensors of f32")
}

fn filled<const D: usize>(dims: [usize; D], fill: impl FnOnce(&mut [f32])) -> FlexTensor {
    let mut values = vec![0.0; dims.iter().product()];
    fill(&mut values);
    tensor(dims, values)
}

/// A tensor of what `write` writes.
///
/// # Safety
/// `write` has to write every value.
unsafe fn written<const D: usize>(
    dims: [usize; D],
    write: impl FnOnce(&mut [MaybeUninit<f32>]),
) -> FlexTensor {
    // SAFETY: as the caller says.
    tensor(dims, unsafe { memory::written(dims.iter().product(), write) })
}

/// [`written`] with the shape of `x`.
///
/// # Safety
/// `write` has to write every value.
unsafe fn like(x: &FlexTensor, write: impl FnOnce(&mut [MaybeUninit<f32>])) -> FlexTensor {
    // SAFETY: as the caller says.
    let values = unsafe { memory::written(values(x).len(), write) };
    FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(x.layout().shape().clone()), DType::F32)
}

fn tensor<const D: usize>(dims: [usize; D], values: Vec<f32>) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(Shape::new(dims)), DType::F32)
}
