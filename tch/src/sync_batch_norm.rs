//! Batch norm over the batches of all ranks.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use phalanx::batch_statistics::{Exchange, SMALL_VARIANCE, Settings};
use phalanx::reducer::panicked;
use phalanx::{Communicator, Error, Result};
use tch::nn::BatchNorm;
use tch::{Device, Kind, Tensor};

use crate::shim;
use crate::tensors::torch;

/// [`BatchNorm`] whose statistics are those of the whole batch, over all ranks: PyTorch's `SyncBatchNorm`, on processors too.
/// On a CUDA device these sums go through the host's memory.
///
/// Output, gradients and running statistics are those of one process with the whole batch, also if the ranks' batches are
/// of different sizes. Each training pass exchanges `2·channels + 10` numbers in forward, of which nine compare the ranks' settings, and as many in
/// backward, and `channels` more where the values of one are far from zero beside their spread; an evaluation, and a world of one, exchange nothing.
///
/// ```
/// use phalanx_tch::SyncBatchNorm;
/// use tch::{Device, Kind, Tensor, nn};
///
/// let group = phalanx::ProcessGroup::alone()?;
/// let store = nn::VarStore::new(Device::Cpu);
/// let norm = nn::batch_norm2d(store.root(), 8, Default::default());
/// let norm = SyncBatchNorm::new(norm, nn::BatchNormConfig::default(), &group); // after the plain layer
/// let y = norm.forward(&Tensor::randn([4, 8, 3, 3], (Kind::Float, Device::Cpu)), true)?;
/// # assert_eq!(y.size(), [4, 8, 3, 3]);
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// All ranks must run the same layers forward and backward. If graphs differ between ranks, give the layers a group of their
/// own: [`with_statistics_group`](Self::with_statistics_group).
///
/// If an exchange fails in backward, which returns no error, the group is ended with the cause and the result is NaN;
/// [`Ddp::backward`](crate::Ddp::backward) then returns the cause.
#[derive(Debug)]
#[doc(alias = "convert_sync_batchnorm")]
pub struct SyncBatchNorm {
    /// The plain layer.
    pub norm: BatchNorm,
    momentum: f64,
    epsilon: f64,
    exchange: Mutex<Exchange>,
}

impl SyncBatchNorm {
    /// `norm`, which was made with `config`, with statistics over all ranks of `group`.
    pub fn new<C: Communicator + Clone + 'static>(
        norm: BatchNorm,
        config: tch::nn::BatchNormConfig,
        group: &C,
    ) -> Self {
        Self {
            norm,
            momentum: config.momentum,
            epsilon: config.eps,
            exchange: Mutex::new(Exchange::new(group)),
        }
    }

    /// Exchanges statistics over `statistics`, a group of the same ranks. If an exchange fails, the group of
    /// [`new`](Self::new) is ended too.
    #[must_use]
    pub fn with_statistics_group<C: Communicator + Clone + 'static>(self, statistics: &C) -> Self {
        let exchange = self.exchange().over(statistics);
        Self { exchange: Mutex::new(exchange), ..self }
    }

    /// Normalises `input`, of shape `[batch, channels, ...]`; the output has the same shape and type. If `train`, all ranks
    /// call it together.
    ///
    /// # Errors
    /// If an exchange fails, which leaves the running statistics as they were; or if `input` has another number of channels, or of dimensions, than
    /// the plain layer takes, as an image without its batch has, or elements that are no floats. On every rank, if `train`, and the ranks' layers were made with different `eps` or
    /// `momentum`, or all ranks together have one value of each channel, which has no variance. Where ranks exchange statistics, an error of one ends the group: the others wait for its part.
    pub fn forward(&self, input: &Tensor, train: bool) -> Result<Tensor> {
        let (exchange, size) = (self.exchange(), input.size());
        let checked = self.check(&size).and_then(|()| check_kind(input.kind()));
        if !train || exchange.ranks() == 1 {
            checked?;
            // libtorch would make the running variance NaN.
            if train && is_one_value(&size) {
                return Err(one_value(&size));
            }
            let BatchNorm { running_mean, running_var, ws, bs, .. } = &self.norm;
            let (momentum, epsilon) = (self.momentum, self.epsilon);
            let (mean, variance) = (Some(running_mean), Some(running_var));
            return Tensor::f_batch_norm(
                input,
                ws.as_ref(),
                bs.as_ref(),
                mean,
                variance,
                train,
                momentum,
                epsilon,
                false,
            )
            .map_err(torch);
        }
        checked.inspect_err(|error| exchange.abort(error.clone()))?;
        let output = self.normalised(input, &size, exchange.clone()).map_err(torch);
        let output = output.and_then(|output| output.ok_or_else(|| one_value(&size)));
        match exchange.failure() {
            Some(cause) => Err(cause),
            None => output.inspect_err(|error| exchange.abort(error.clone())),
        }
    }

    /// An error if the plain layer takes no input of this size.
    fn check(&self, size: &[i64]) -> Result<()> {
        let (channels, nd) = (self.norm.running_mean.size1().map_err(torch)?, self.norm.nd);
        let is_batch = size.len() == nd + 2 || nd == 1 && size.len() == 2;
        if is_batch && size[1] == channels {
            return Ok(());
        }
        Err(Error::invalid_argument(format!("batch norm of {channels} channels got a tensor of {size:?}")).with_remedy(
            "give it a batch, with as many dimensions as the plain layer takes: batch_norm2d takes [batch, channels, height, width]",
        ))
    }

    /// Nothing if all ranks together have one value of each channel, or their settings differ, which ends the group.
    fn normalised(
        &self,
        input: &Tensor,
        size: &[i64],
        exchange: Exchange,
    ) -> std::result::Result<Option<Tensor>, tch::TchError> {
        let channels = size[1];
        // Half precision loses what statistics are about: the layer computes in f32 then, and rounds the output.
        let kind = input.kind();
        let input = match kind {
            Kind::Half | Kind::BFloat16 => &input.f_to_kind(Kind::Float)?,
            _ => input,
        };
        let others: Vec<i64> = (0..size.len() as i64).filter(|&side| side != 1).collect();
        let count = size.iter().product::<i64>() as f64 / channels as f64;
        // Each rank's part is its mean and the variance about it.
        let (own_mean, own_variance) = if count == 0.0 {
            // Zeros that depend on the input: this rank takes part in backward, too.
            let zeros = input.f_sum_dim_intlist(others.as_slice(), false, Kind::Double)?;
            (zeros.shallow_clone(), zeros)
        } else {
            let mean = input.f_mean_dim(others.as_slice(), true, input.kind())?;
            let variance =
                input.f_sub(&mean)?.f_square()?.f_mean_dim(others.as_slice(), false, input.kind())?;
            (mean.f_reshape([channels])?.f_to_kind(Kind::Double)?, variance.f_to_kind(Kind::Double)?)
        };
        let squares = own_variance.f_add(&own_mean.f_square()?)?;
        let part = Tensor::f_cat(&[&own_mean, &squares], 0)?.f_mul_scalar(count)?;
        let settings = Settings { epsilon: self.epsilon, momentum: self.momentum };
        let counted = [&[count][..], &settings.numbers()].concat();
        let counted = Tensor::f_from_slice(&counted)?.f_to_device(input.device())?;
        let sums = summed(&Tensor::f_cat(&[part, counted], 0)?, &exchange)?;
        let total = sums.f_narrow(0, 2 * channels, 1)?.f_detach()?;
        // NaN after a failure.
        let counted = sums.f_narrow(0, 2 * channels, 1 + Settings::NUMBERS as i64)?.f_detach()?;
        let counted = Vec::<f64>::try_from(counted.f_to_device(Device::Cpu)?)?;
        let (values, compared) = (counted[0], &counted[1..]);
        if let Err(cause) = settings.check(compared) {
            exchange.abort(cause);
            return Ok(None);
        }
        if values == 1.0 {
            return Ok(None);
        }
        // Where no rank has a sample, the statistics are zeros and not 0/0.
        let divisor = total.f_clamp_min(1.0)?;
        let mean = sums.f_narrow(0, 0, channels)?.f_div(&divisor)?;
        // If all values are equal, rounding may give a small negative number; NaN stays NaN.
        let variance = sums
            .f_narrow(0, channels, channels)?
            .f_div(&divisor)?
            .f_sub(&mean.f_square()?)?
            .f_clamp_min(0.0)?;
        // All ranks have the same sums, and find it alike.
        let least = mean.f_detach()?.f_square()?.f_mul_scalar(SMALL_VARIANCE)?;
        // A channel that is NaN is not small, and hides no other that is.
        let is_small = variance.f_detach()?.f_lt_tensor(&least)?.f_any()?.f_int64_value(&[])? != 0;
        let variance = if is_small {
            let squares = own_variance.f_add(&own_mean.f_sub(&mean)?.f_square()?)?;
            summed(&squares.f_mul_scalar(count)?, &exchange)?.f_div(&divisor)?
        } else {
            variance
        };

        // After a failure they are NaN, and the caller gets the cause. A batch of no sample changes nothing.
        if exchange.failure().is_none() && values != 0.0 {
            self.update(&mean, &variance, &total)?;
        }
        let mut wide = vec![1; size.len()];
        wide[1] = channels;
        let per_channel = |values: &Tensor| values.f_to_kind(input.kind())?.f_reshape(wide.as_slice());
        let inverse = variance.f_add_scalar(self.epsilon)?.f_rsqrt()?;
        let scale = match &self.norm.ws {
            Some(weight) => inverse.f_mul(&weight.f_to_kind(Kind::Double)?)?,
            None => inverse,
        };
        let output = input.f_sub(&per_channel(&mean)?)?.f_mul(&per_channel(&scale)?)?;
        let output = match &self.norm.bs {
            Some(bias) => output.f_add(&bias.f_reshape(wide.as_slice())?)?,
            None => output,
        };
        output.f_to_kind(kind).map(Some)
    }

    /// The running statistics take their share of this batch's; the variance is the unbiased one, as PyTorch's.
    fn update(
        &self,
        mean: &Tensor,
        variance: &Tensor,
        total: &Tensor,
    ) -> std::result::Result<(), tch::TchError> {
        let _guard = tch::no_grad_guard();
        let unbiased = variance.f_mul(total)?.f_div(&total.f_sub_scalar(1.0)?.f_clamp_min(1.0)?)?;
        for (running, batch) in [(&self.norm.running_mean, mean), (&self.norm.running_var, &unbiased)] {
            // In f16 a variance may be infinite of which the share is not.
            let old = running.f_to_kind(batch.kind())?.f_mul_scalar(1.0 - self.momentum)?;
            let new = old.f_add(&batch.f_mul_scalar(self.momentum)?)?;
            running.shallow_clone().f_copy_(&new)?;
        }
        Ok(())
    }

    fn exchange(&self) -> Exchange {
        self.exchange.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }
}

/// The sums over all ranks, with a gradient; NaN if an exchange fails. The graph does not keep the group: who keeps a loss for its value may have
/// left meanwhile.
fn summed(part: &Tensor, exchange: &Exchange) -> std::result::Result<Tensor, tch::TchError> {
    let line = exchange.downgrade();
    let sum = move |values: &mut [f64]| {
        // Without it all groups of this rank have ended with the cause.
        let Ok(line) = line.upgrade() else { return values.fill(f64::NAN) };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| line.sum(values))) {
            values.fill(f64::NAN);
            line.abort(panicked(&*panic));
        }
    };
    shim::sum_over_ranks(part, sum).map_err(|error| tch::TchError::Torch(error.to_string()))
}

/// An error if elements of this type have no mean and variance here: sums over ranks are of doubles, which have no imaginary part.
fn check_kind(kind: Kind) -> Result<()> {
    if matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16) {
        return Ok(());
    }
    Err(Error::invalid_argument(format!("batch norm of elements of type {kind:?}")).with_remedy(
        "give it f32, f64, f16 or bf16; of complex numbers normalise the real and the imaginary parts, each by a layer",
    ))
}

/// Whether a tensor of this size has one value of each channel.
fn is_one_value(size: &[i64]) -> bool {
    size.len() >= 2 && size[0] == 1 && size[2..].iter().product::<i64>() == 1
}

/// The error for a batch of one value: the output would be the bias, whatever the input, and the running variance would shrink.
fn one_value(size: &[i64]) -> Error {
    Error::invalid_argument(format!(
        "batch norm: all ranks together have one value of each channel while training, which has no variance; this rank's input is {size:?}"
    ))
    .with_remedy("train on more than one sample in each step (drop the last batch), or pass `train = false`")
}
