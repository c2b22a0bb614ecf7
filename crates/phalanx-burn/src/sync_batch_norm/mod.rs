//! Batch norm over the batches of all ranks.
//!
//! The statistics travel as sums, by blocking calls in the caller's thread: a layer needs them before it can go on. Of
//! each channel they are the sum and the sum of squares, in f64, from each rank's mean and variance.
//!
//! Backward is an operation of its own (`op`), because the gradient of an input has a part that depends on all ranks.
//! Burn runs equal graphs in equal order, so these calls and the buckets can share a group; if graphs differ between
//! ranks, the layers need another group.

mod op;

use burn::backend::Dispatch;
use burn::module::{Content, DisplaySettings, Flag, Module, ModuleDisplay, Param, RunningState};
use burn::nn::BatchNorm;
use burn::tensor::{DType, Device, Tensor, TensorData};
use phalanx::batch_statistics::{Exchange, Moments, Settings};
use phalanx::{Communicator, Error, Result};

pub(crate) use self::op::computed_in;
use self::op::{Layer, SyncBatchNormOp};
use crate::data_parallel::refuse_several;
use crate::read_back;

/// [`BatchNorm`] whose statistics are those of the whole batch, over all ranks.
///
/// Plain batch norm normalises with the mean and the variance of what its own rank sees. With small batches these are
/// noisy, and `n` ranks with `b` samples each do not train what one process with `n·b` samples trains. This layer
/// does: output, gradients and running statistics are those of the whole batch, also if the ranks' batches are of
/// different sizes. It is PyTorch's `SyncBatchNorm`, on processors too.
///
/// # In a model
///
/// Burn's modules are plain structs, so a layer is replaced where it is declared and made:
///
/// ```
/// use burn::module::Module;
/// use burn::nn::conv::{Conv2d, Conv2dConfig};
/// use burn::nn::BatchNormConfig;
/// use burn::tensor::{Device, Tensor};
/// use phalanx::ProcessGroup;
/// use phalanx_burn::SyncBatchNorm;
///
/// #[derive(Module, Debug)]
/// struct Block {
///     conv: Conv2d,
///     norm: SyncBatchNorm, // was: BatchNorm
/// }
///
/// impl Block {
///     fn new(device: &Device, group: &ProcessGroup) -> Self {
///         Self {
///             conv: Conv2dConfig::new([3, 8], [3, 3]).init(device),
///             norm: SyncBatchNorm::new(BatchNormConfig::new(8).init(device), group), // was: the inner part
///         }
///     }
///
///     fn forward(&self, x: Tensor<4>) -> Tensor<4> {
///         self.norm.forward(self.conv.forward(x))
///     }
/// }
/// # let device = Device::flex().autodiff();
/// # let block = Block::new(&device, &ProcessGroup::alone()?);
/// # block.forward(Tensor::ones([2, 3, 8, 8], &device)).sum().backward();
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// The fields have [`BatchNorm`]'s names, so either can read the other's saved weights; [`into_batch_norm`] gives the
/// plain layer back for a model that is to run without a group.
///
/// # What is exchanged
///
/// One all_reduce in forward (per channel the sum and the sum of squares, and the number of values) and one in
/// backward (per channel the sums of the gradient and of its product with the normalised input): `2·channels` f64
/// values, and ten more in forward, whatever the size of the batch. Nine of these compare the ranks' `epsilon` and `momentum`. Each rank's part is its mean and its variance about
/// that mean, in the precision of the tensors, or in f32 if they are of 16 bits; merging the parts is exact to f64. If a channel's mean is more
/// than 10,000 times its standard deviation, forward has one more all_reduce, of `channels` f64 values. Evaluation (`model.valid()`) uses the running
/// statistics and exchanges nothing, and so does a world of one.
///
/// # Together with [`Ddp`](crate::Ddp)
///
/// All ranks must run the same layers forward and backward. A handle to the group, such as the layer, must live until backward has returned: the graph
/// does not keep it. Burn runs backward in an order that depends on the graph
/// alone, so the exchanges of this layer and the buckets of [`Ddp`](crate::Ddp) follow each other in the same order on
/// every rank as long as every rank's graph is the same, and the two can share a group. Ranks that come to disagree get
/// an error that shows both calls.
///
/// If graphs differ between ranks (that is why `find_unused_parameters` or `static_graph` is set), or if an exchange
/// that backward waits for should not wait for a large bucket, give the layers [a group of their
/// own](Self::with_statistics_group).
///
/// Inside [`Ddp::join`](crate::Ddp::join) pass the same `JoinGroup` to both: the statistics then are those of the ranks
/// that still have data. A separate group of the layers is not joined.
///
/// With this layer the running statistics are the same on every rank anyway:
/// [`DdpOptions::broadcast_buffers`](crate::DdpOptions::broadcast_buffers) may be switched off if nothing else needs
/// it.
///
/// # Within [`DataParallel`](crate::DataParallel) and [`TowerGradients`](crate::TowerGradients)
///
/// Replicas of one process run at once, so their exchanges would have no order that is the same on all ranks. If there are several
/// replicas, and several ranks, a training pass is an error.
///
/// # Errors
///
/// Neither `forward` nor backward can return an error. If an exchange fails, or the ranks' `epsilon` or `momentum` differ, the group is ended with
/// the cause, and the result is NaN: no step is done with wrong statistics, the running ones stay as they were, and the next call on the group, such as
/// [`Ddp::backward`](crate::Ddp::backward), returns the cause. [`failure`](Self::failure) returns it too.
///
/// Source: S. Ioffe and C. Szegedy, *Batch Normalization*, 2015; the merge of parts is T. Chan's, G. Golub's and
/// R. LeVeque's, 1979.
///
/// [`into_batch_norm`]: Self::into_batch_norm
#[doc(alias = "convert_sync_batchnorm")]
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct SyncBatchNorm {
    /// The learnable scale, one for each channel.
    pub gamma: Param<Tensor<1>>,
    /// The learnable shift, one for each channel.
    pub beta: Param<Tensor<1>>,
    /// Whether the layer trains, as in [`BatchNorm`].
    pub training: Param<Flag>,
    /// The running mean of the whole batches.
    pub running_mean: RunningState<Tensor<1>>,
    /// The running (biased) variance of the whole batches.
    pub running_var: RunningState<Tensor<1>>,
    /// The share of the newest batch in the running statistics.
    pub momentum: f64,
    /// Added to the variance, for numerical stability.
    pub epsilon: f64,
    #[module(skip)]
    exchange: Exchange,
}

impl SyncBatchNorm {
    /// `norm` with statistics over all ranks of `group`: a [`ProcessGroup`](phalanx::ProcessGroup), or, for ranks with
    /// unequal numbers of batches, the [`JoinGroup`](phalanx::join::JoinGroup) with which [`Ddp`](crate::Ddp) is made,
    /// too.
    pub fn new<C: Communicator + Clone + 'static>(norm: BatchNorm, group: &C) -> Self {
        let BatchNorm { gamma, beta, training, running_mean, running_var, momentum, epsilon } = norm;
        let exchange = Exchange::new(group);
        Self { gamma, beta, training, running_mean, running_var, momentum, epsilon, exchange }
    }

    /// Exchanges statistics over `statistics`, a group of the same ranks, and nothing over the group of
    /// [`new`](Self::new). If an exchange fails, that other group is ended too, so that [`Ddp`](crate::Ddp) returns the
    /// cause.
    ///
    /// All layers of a model may share one such group.
    #[must_use]
    pub fn with_statistics_group<C: Communicator + Clone + 'static>(mut self, statistics: &C) -> Self {
        self.exchange = self.exchange.over(statistics);
        self
    }

    /// Plain batch norm with these parameters and running statistics.
    pub fn into_batch_norm(self) -> BatchNorm {
        let Self { gamma, beta, training, running_mean, running_var, momentum, epsilon, .. } = self;
        BatchNorm { gamma, beta, training, running_mean, running_var, momentum, epsilon }
    }

    /// The cause, if the group over which statistics are exchanged has failed.
    pub fn failure(&self) -> Option<Error> {
        self.exchange.failure()
    }

    /// Normalises `input`, of shape `[batch, channels, ...]`; the output has the same shape.
    ///
    /// On a device with autodiff this is a training pass, which all ranks must make together; the number of samples
    /// may differ between ranks, and may be zero on some, and so may the dimensions behind the channels.
    /// Elsewhere, or when the layer is frozen, the running statistics are used.
    ///
    /// # Panics
    /// As [`BatchNorm`]: if `input` has fewer than two dimensions, or another number of channels.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let [channels] = self.gamma.shape().dims();
        burn::tensor::assert_shape!(input, [_, channels, ..]);
        if input.device().is_autodiff() && self.training.is_enabled() {
            self.forward_train(input)
        } else {
            self.forward_inference(input)
        }
    }

    fn forward_inference<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let device = input.device();
        let mean = self.running_mean.value().to_device(&device);
        let variance = self.running_var.value().to_device(&device);
        let (gamma, beta) = (self.gamma.val(), self.beta.val());
        burn::tensor::module::batch_norm(input, gamma, beta, mean, variance, self.epsilon)
    }

    fn forward_train<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let channels = input.shape()[1];
        let allowed = match self.exchange.ranks() {
            1 => Ok(()),
            _ => refuse_several("a SyncBatchNorm that trains", "take BatchNorm within the replicas"),
        };
        let own = allowed.and_then(|()| local_moments(input.clone().inner()));
        let settings = Settings { epsilon: self.epsilon, momentum: self.momentum };
        let moments = match own {
            Ok(own) => self.exchange.moments(own, settings),
            Err(cause) => {
                self.exchange.abort(cause);
                Moments::unknown(channels)
            }
        };
        let (device, dtype) = (input.device(), computed_in(input.dtype()));
        let mean = per_channel(&moments.mean, &device, dtype);
        let variance = per_channel(&moments.variance, &device, dtype);
        let exchange = self.exchange.downgrade();
        let layer = Layer { exchange, values: moments.values, epsilon: self.epsilon };
        let output = Dispatch::sync_batch_norm(
            input.into_dispatch(),
            self.gamma.val().into_dispatch(),
            self.beta.val().into_dispatch(),
            mean.clone().into_dispatch(),
            variance.clone().into_dispatch(),
            layer,
        );

        // After a failure they are NaN. A batch of no sample, on any rank, has none, and changes nothing.
        if moments.values > 0.0 && self.exchange.failure().is_none() {
            self.update(&self.running_mean, mean);
            self.update(&self.running_var, variance);
        }
        Tensor::from_dispatch(output)
    }

    fn update(&self, running: &RunningState<Tensor<1>>, batch: Tensor<1>) {
        let old = running.value_sync().to_device(&batch.device());
        let (dtype, old) = (old.dtype(), old.cast(batch.dtype()));
        let new = old.mul_scalar(1.0 - self.momentum).add(batch.mul_scalar(self.momentum));
        running.update(new.cast(dtype).detach());
    }
}

impl ModuleDisplay for SyncBatchNorm {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [num_features] = self.beta.shape().dims();
        content
            .add("num_features", &num_features)
            .add("momentum", &self.momentum)
            .add("epsilon", &self.epsilon)
            .add("ranks", &self.exchange.ranks())
            .optional()
    }
}

/// This rank's statistics of `x`, of shape `[samples, channels, ...]`, without a graph.
fn local_moments<const D: usize>(x: Tensor<D>) -> Result<Moments> {
    let shape = x.shape();
    let (samples, channels) = (shape[0], shape[1]);
    let length: usize = shape.as_slice()[2..].iter().product();
    if samples * length == 0 {
        return Ok(Moments::none(channels));
    }
    let dtype = computed_in(x.dtype());
    let x: Tensor<3> = x.reshape([samples, channels, length]);
    let x = x.cast(dtype);
    // Means of equally long rows: nothing is moved.
    let mean_of = |x: Tensor<3>| x.mean_dim(2).mean_dim(0);
    let mean = mean_of(x.clone());
    let centred = x - mean.clone();
    let variance = mean_of(centred.clone() * centred);
    let read = |tensor: Tensor<3>| -> Result<Vec<f64>> { Ok(read_back::data(tensor)?.iter().collect()) };
    Ok(Moments { values: (samples * length) as f64, mean: read(mean)?, variance: read(variance)? })
}

fn per_channel(values: &[f64], device: &Device, dtype: DType) -> Tensor<1> {
    Tensor::from_data(TensorData::from(values).convert_dtype(dtype), (device, dtype))
}
