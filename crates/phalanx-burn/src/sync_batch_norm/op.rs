//! Normalising with given statistics, as an operation whose backward knows that they came from all ranks' inputs.

#[cfg(feature = "cube")]
use burn::backend::Cube;
#[cfg(feature = "tch")]
use burn::backend::LibTorch;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex, TensorMetadata, backend_extension};
use burn::tensor::{DType, Shape, TensorData, read_sync};
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_autodiff::{Autodiff, NodeId};
use phalanx::Result;
use phalanx::batch_statistics::WeakExchange;

use crate::read_back;

/// What one forward pass of one layer keeps for its backward pass, besides tensors.
#[derive(Clone, Debug)]
pub struct Layer {
    pub(super) exchange: WeakExchange,
    /// How many values of each channel all ranks have together.
    pub(super) values: f64,
    pub(super) epsilon: f64,
}

/// The operation, as Burn's extension API wants it. `pub` because the macro implements it for a public type; the module
/// is private.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"), LibTorch: cfg(feature = "tch"))]
pub trait SyncBatchNormOp: Backend {
    /// `gamma · (x - mean) / sqrt(variance + epsilon) + beta` for `x` of shape `[samples, channels, ...]`, where
    /// `mean` and `variance`, of shape `[channels]` and of the type that `computed_in` gives, are those of all ranks' `x`.
    fn sync_batch_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        layer: Layer,
    ) -> FloatTensor<Self> {
        normalised::<Self>(x, gamma, beta, (mean, variance), layer.epsilon)
    }
}

impl SyncBatchNormOp for Flex {}

#[cfg(feature = "cube")]
impl SyncBatchNormOp for Cube {}

#[cfg(feature = "tch")]
impl SyncBatchNormOp for LibTorch {}

impl<B: Backend, C: CheckpointStrategy> SyncBatchNormOp for Autodiff<B, C> {
    fn sync_batch_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        layer: Layer,
    ) -> FloatTensor<Self> {
        let (mean, variance) = (mean.into_primitive(), variance.into_primitive());
        let normalise =
            |x, gamma, beta, mean, variance| normalised::<B>(x, gamma, beta, (mean, variance), layer.epsilon);
        let nodes = [x.node(), gamma.node(), beta.node()];
        match Normalise.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let saved = (prep.checkpoint(&x), prep.checkpoint(&gamma));
                let (x, gamma, beta) = (x.into_primitive(), gamma.into_primitive(), beta.into_primitive());
                let output = normalise(x, gamma, beta, mean.clone(), variance.clone());
                prep.finish(Saved { x: saved.0, gamma: saved.1, mean, variance, layer }, output)
            }
            OpsKind::UnTracked(prep) => {
                let (x, gamma, beta) = (x.into_primitive(), gamma.into_primitive(), beta.into_primitive());
                prep.finish(normalise(x, gamma, beta, mean, variance))
            }
        }
    }
}

/// Backward of [`SyncBatchNormOp::sync_batch_norm`].
#[derive(Debug)]
struct Normalise;

#[derive(Clone, Debug)]
struct Saved<T> {
    x: NodeId,
    gamma: NodeId,
    mean: T,
    variance: T,
    layer: Layer,
}

impl<B: Backend> Backward<B, 3> for Normalise {
    type State = Saved<FloatTensor<B>>;

    /// With x̂ the normalised input and N the number of values of a channel, over all ranks:
    ///
    /// ```text
    /// dbeta  = Σ dy        dx = gamma / sqrt(variance + epsilon) · (dy - Σ_all dy / N - x̂ · Σ_all (dy · x̂) / N)
    /// dgamma = Σ dy · x̂
    /// ```
    ///
    /// The parameters' gradients are sums over this rank: they are averaged over ranks with all other gradients.
    fn backward(self, ops: Ops<Self::State, 3>, gradients: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = gradients.consume::<B>(&ops.node);
        let [x_node, gamma_node, beta_node] = ops.parents;
        let Saved { x, gamma, mean, variance, layer } = ops.state;
        let x = checkpointer.retrieve_node_output::<FloatTensor<B>>(x);
        let gamma = checkpointer.retrieve_node_output::<FloatTensor<B>>(gamma);
        let (shape, input_type, parameter_type) = (x.shape(), x.dtype(), gamma.dtype());
        let dtype = computed_in(input_type);
        let [dy, x] = [dy, x].map(flattened::<B>);
        let [dy, x, gamma] = [dy, x, gamma].map(|tensor| cast::<B>(tensor, dtype));

        let channels = x.shape()[1];
        let wide = |tensor| B::float_reshape(tensor, Shape::new([1, channels, 1]));
        let deviation = B::float_sqrt(B::float_add_scalar(variance, layer.epsilon.into()));
        let inverse = wide(B::float_recip(deviation));
        let normalised = B::float_mul(B::float_sub(x, wide(mean)), inverse.clone());

        let own = [dy.clone(), B::float_mul(dy.clone(), normalised.clone())];
        let own = channel_sums::<B>(own).unwrap_or_else(|cause| {
            // This rank's device has failed. No other rank averages the NaN: the group has ended with the cause.
            if let Ok(exchange) = layer.exchange.upgrade() {
                exchange.abort(cause);
            }
            vec![f64::NAN; 2 * channels]
        });
        let vector = |values: &[f64], dtype| {
            let data = TensorData::from(values).convert_dtype(dtype);
            B::float_from_data(data, &gamma.device())
        };
        if let Some(node) = beta_node {
            gradients.register::<B>(node.id, vector(&own[..channels], parameter_type));
        }
        if let Some(node) = gamma_node {
            gradients.register::<B>(node.id, vector(&own[channels..], parameter_type));
        }
        let Some(node) = x_node else { return };

        let mut all = own;
        match layer.exchange.upgrade() {
            Ok(exchange) => exchange.sum(&mut all),
            // All groups of this rank have ended with the cause.
            Err(_) => all.fill(f64::NAN),
        }
        all.iter_mut().for_each(|sum| *sum /= layer.values);
        let centred = B::float_sub(dy, wide(vector(&all[..channels], dtype)));
        let projected = B::float_mul(normalised, wide(vector(&all[channels..], dtype)));
        let scale = B::float_mul(wide(gamma), inverse);
        let dx = B::float_mul(scale, B::float_sub(centred, projected));
        gradients.register::<B>(node.id, B::float_reshape(cast::<B>(dx, input_type), shape));
    }
}

/// The type in which sums of elements of this type are computed, such as statistics of inputs, and what these normalise: f32 for 16 bits, in which
/// squares and sums overflow and have few digits.
pub(crate) fn computed_in(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        dtype => dtype,
    }
}

fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if tensor.dtype() == dtype { tensor } else { B::float_cast(tensor, dtype.into()) }
}

/// `tensor`, of shape `[samples, channels, ...]`, as one of shape `[samples, channels, length]`.
/// `Tensor::reshape` would take a length of 0 for the dimension that the tensor has at that place, and panic.
fn flattened<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let shape = tensor.shape();
    let length: usize = shape.as_slice()[2..].iter().product();
    B::float_reshape(tensor, Shape::new([shape[0], shape[1], length]))
}

/// The output, of the shape and the type of `x`.
fn normalised<B: Backend>(
    x: FloatTensor<B>,
    gamma: FloatTensor<B>,
    beta: FloatTensor<B>,
    (mean, variance): (FloatTensor<B>, FloatTensor<B>),
    epsilon: f64,
) -> FloatTensor<B> {
    let (shape, input_type) = (x.shape(), x.dtype());
    let [x, gamma, beta] =
        [flattened::<B>(x), gamma, beta].map(|tensor| cast::<B>(tensor, computed_in(input_type)));
    let output = cast::<B>(B::batch_norm(x, gamma, beta, mean, variance, epsilon), input_type);
    B::float_reshape(output, shape)
}

/// The sums of each channel of two tensors of the same shape, one tensor's after the other's. Through means, because sums of half precision overflow.
fn channel_sums<B: Backend>(tensors: [FloatTensor<B>; 2]) -> Result<Vec<f64>> {
    let shape = tensors[0].shape();
    let values = (shape[0] * shape[2]) as f64;
    if values == 0.0 {
        return Ok(vec![0.0; 2 * shape[1]]);
    }
    let means = tensors.map(|tensor| B::float_mean_dim(B::float_mean_dim(tensor, 2), 0));
    // As one tensor, so that a device is waited for once.
    let means = B::float_cat(means.into(), 1);
    let means = read_back::arrived(read_sync(B::float_into_data(means)), "a batch norm's sums")?;
    Ok(means.iter::<f64>().map(|mean| mean * values).collect())
}
