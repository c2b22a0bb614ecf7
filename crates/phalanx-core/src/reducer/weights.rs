//! Ranks with unequal numbers of samples: averages in which each rank counts by its weight.
//!
//! A rank gives the gradients of `loss × weight`. One bucket has one element more, the weight, so that the same all_reduce
//! averages gradients and weights, and the quotient of the two averages is `Σ weight·gradient / Σ weight`. It is formed when all
//! buckets are back: until then no rank knows the sum of weights, and none waits for it. The bucket is the first
//! one of f64, or else the first one: a weight that is rounded to f32 takes their digits from gradients of f64.
//!
//! Where gradients lie elsewhere, no bucket has room for it. There the weights have an all_reduce of their own. It is the first one of the step, so that
//! its place among a program's own collectives does not depend on when gradients are ready. With them travels how many steps the rank has made: a rank that has
//! left one out, by a step without weights, would give the weight of another step. A rank without data inside of `join` gives zeros for all of it.

use bytemuck::AnyBitPattern;
use phalanx_proto::reducer::weight::{SCALE, check_weight, check_weight_sum};

use super::bucket::Bucket;
use super::plan::Plan;
use super::{Reducer, zero};
use crate::buffer::Buffer;
use crate::caller::Caller;
use crate::collective::ReduceOp;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::group::Work;
use crate::world_size::WorldSize;

/// The weights of ranks whose gradients lie elsewhere.
#[derive(Default)]
pub(super) struct Weights {
    /// How many steps this rank has begun since all ranks began to count, with weights or without.
    pub steps: u64,
    sent: Option<Work>,
    /// Of all ranks, when they are back.
    average: Option<f64>,
}

impl Reducer {
    /// Like [`start`](Self::start), for ranks with unequal numbers of samples or tokens: each rank counts by its `weight`, and
    /// [`gradient`](Self::gradient) gives `Σ weight·gradient / Σ weight`, sums over ranks. With a mean over samples as the loss and
    /// their number as the weight, that is the gradient of the mean over all ranks' samples.
    ///
    /// The gradients that come are those of the loss *times* the weight: backward begins from `loss × weight`. So collectives
    /// inside of backward, such as a synchronised batch norm's, see gradients that are weighted already. If gradients of several
    /// passes were added up, `weight` is the sum of theirs.
    ///
    /// A rank without samples has the weight 0. It runs backward all the same, in which collectives may be; its gradients are not
    /// looked at, may be NaN or missing, and count as zero. Its adapter reports them with [`ready_void`](Self::ready_void).
    ///
    /// The weights travel as one element more of the first bucket of f64, or else of the first one; there is no
    /// further collective. That bucket is not scattered if averages are [sharded](Self::shard), since all ranks
    /// need the element. [`finish`](Self::finish) divides all averages where they lie. Equal weights of 1 give the bits of [`start`](Self::start).
    ///
    /// Where gradients lie [elsewhere](Self::elsewhere), the group averages the weights apart, from the beginning of the step on, and the adapter
    /// divides the averages by [`average_weight`](Self::average_weight). There a rank that begins a step without weights gets a wrong average,
    /// and the others get an error, or time out.
    ///
    /// # Errors
    /// As [`start`](Self::start), and as [`check_weight`]; if the [hook](Self::register_hook) does not
    /// [take weights](super::hooks::CommHook::accepts_weights). If some ranks call this and others [`start`](Self::start), every
    /// rank gets an error that shows both calls. If all weights are zero, [`finish`](Self::finish) returns an error on every
    /// rank, and the reducer can begin its next step.
    pub fn start_weighted(&mut self, weight: f64) -> Result<()> {
        self.start_step(Some(weight), &mut |_, memory| zero(memory))
    }

    /// As [`start_weighted`](Self::start_weighted); `unused` is that of [`start_with`](Self::start_with).
    ///
    /// # Errors
    /// As [`start_weighted`](Self::start_weighted), and what `unused` returns, which ends the reducer.
    pub fn start_weighted_with(
        &mut self,
        weight: f64,
        mut unused: impl FnMut(usize, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        self.start_step(Some(weight), &mut unused)
    }

    /// The parameter at `index` has a gradient in a pass of weight 0 alone: it counts as zero, whatever it is. With
    /// [`find_unused_parameters`](super::ReducerOptions::find_unused_parameters) this rank has not used the parameter.
    ///
    /// # Errors
    /// As [`ready`](Self::ready).
    pub fn ready_void(&mut self, index: usize) -> Result<()> {
        if self.elsewhere && !self.hook.makes_zeros() {
            self.check_here("ready_void")?;
        }
        self.state.voided(index);
        let write: fn(&mut [u8]) -> Result<()> = if self.elsewhere { |_| Ok(()) } else { zero };
        self.accept(index, None, write)
    }

    /// The average of all ranks' weights, from [`finish`](Self::finish) to the next step, by which an adapter divides averages that lie
    /// [elsewhere](Self::elsewhere); 1 if the step had no weights.
    pub fn average_weight(&self) -> f64 {
        let Some(own) = self.state.weight() else { return 1.0 };
        match self.group.world_size() {
            WorldSize::ONE => own,
            _ if self.elsewhere => self.weights.average.unwrap_or(f64::NAN),
            _ => self.buckets.iter().find_map(Bucket::carried).unwrap_or(f64::NAN),
        }
    }

    /// By what an adapter multiplies the averages of a step, from [`finish`](Self::finish) to the next one, in which a `join` gives them this
    /// [`scale`](crate::join::JoinGroup::average_scale): 1 if they are not [over all ranks](super::hooks::CommHook::averages_over_all), as a
    /// rank's own gradients are not.
    pub fn scale_in_step(&self, scale: f64) -> f64 {
        if self.hook.averages_over_all() { scale } else { 1.0 }
    }

    /// A step begins, or begins again in another group: where gradients lie elsewhere, this rank's weight goes to the others.
    pub(super) fn send_weight(&mut self) -> Result<()> {
        (self.weights.average, self.weights.sent) = (None, None);
        let Some(own) = self.state.weight().filter(|_| self.elsewhere) else { return Ok(()) };
        if self.group.world_size() != WorldSize::ONE {
            let group = self.group.in_call(Caller::DdpBackwardWeighted);
            // Sums of step numbers are exact, and their averages need not be. Inside `join` a rank without data gives zeros: the last number says
            // how many ranks are in a step.
            let numbers = Buffer::from_slice(&[own, self.weights.steps as f64, 1.0]);
            self.weights.sent = Some(group.all_reduce_async(numbers, ReduceOp::Sum)?);
        }
        Ok(())
    }

    /// Waits for the weights that ranks have [sent](Self::send_weight).
    pub(super) fn receive_weights(&mut self) -> Result<()> {
        let Some(sent) = self.weights.sent.take() else { return Ok(()) };
        let numbers = sent.wait()?;
        let [sum, steps, taking_part] = numbers.as_slice::<f64>()? else {
            return Err(Error::aborted("the weights of a step are not three numbers"));
        };
        let (here, ranks) = (self.weights.steps, f64::from(self.group.world_size().get()));
        if *steps != here as f64 * taking_part {
            return Err(Error::mismatch(format!(
                "the weights are of other steps: rank {} is in step {here}, counted from its first, and the ranks are in step {} in the mean",
                self.group.rank(),
                steps / taking_part
            ))
            .with_remedy("all ranks must give weights in the same steps"));
        }
        self.weights.average = Some(sum / ranks);
        Ok(())
    }

    pub(super) fn check_weighted(&self, weight: f64) -> Result<()> {
        check_weight(self.group.rank(), weight, self.parameters())?;
        if self.hook.accepts_weights() {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "the communication hook `{}` does not average ranks by their weights",
            self.hook.describe()
        ))
        .with_remedy(SCALE))
    }

    /// Divides the averages of weighted gradients by the average of weights.
    ///
    /// Every rank has the same bits, and so the same error: it ends nothing.
    pub(super) fn divide_by_weights(&mut self) -> Result<()> {
        if self.state.weight().is_none() {
            return Ok(());
        }
        let mean = self.average_weight();
        check_weight_sum(mean * f64::from(self.group.world_size().get()))?;
        if mean != 1.0 && !self.elsewhere {
            for bucket in &mut self.buckets {
                bucket.divide(&*self.group, mean)?;
            }
        }
        Ok(())
    }
}

/// The number of the bucket of `plan` that carries the weights.
pub(super) fn carrier(plan: &Plan) -> usize {
    plan.buckets.iter().position(|bucket| bucket.dtype == DType::F64).unwrap_or(0)
}

/// Writes `weight` into the last element of `bytes`.
pub(super) fn write(bytes: &mut [u8], dtype: DType, weight: f64) {
    let place = bytes.len().saturating_sub(dtype.size());
    match dtype {
        DType::F64 => bytes[place..].copy_from_slice(&weight.to_le_bytes()),
        DType::F32 => bytes[place..].copy_from_slice(&(weight as f32).to_le_bytes()),
        // Refused when the step began.
        DType::F16 | DType::BF16 | DType::I32 | DType::I64 | DType::U8 | DType::I8 | DType::Bool => {}
    }
}

/// The last element of `bytes`.
pub(super) fn read(bytes: &[u8], dtype: DType) -> Option<f64> {
    fn last<T: AnyBitPattern>(bytes: &[u8]) -> Option<T> {
        Some(bytemuck::pod_read_unaligned(bytes.get(bytes.len().checked_sub(size_of::<T>())?..)?))
    }
    match dtype {
        DType::F64 => last::<f64>(bytes),
        DType::F32 => last::<f32>(bytes).map(f64::from),
        DType::F16 | DType::BF16 | DType::I32 | DType::I64 | DType::U8 | DType::I8 | DType::Bool => None,
    }
}

/// Divides each element by `divisor`.
pub(super) fn divide(buffer: &mut Buffer, divisor: f64) -> Result<()> {
    fn each<T: Element>(buffer: &mut Buffer, divide: impl Fn(T) -> T) -> Result<()> {
        buffer.as_mut_slice::<T>()?.iter_mut().for_each(|element| *element = divide(*element));
        Ok(())
    }
    match buffer.dtype() {
        DType::F64 => each::<f64>(buffer, |element| element / divisor),
        DType::F32 => {
            // More digits than its elements have are of no use.
            let divisor = divisor as f32;
            each::<f32>(buffer, |element| element / divisor)
        }
        other => {
            Err(Error::invalid_argument(format!("gradients of type {other} have no weights"))
                .with_remedy(SCALE))
        }
    }
}
