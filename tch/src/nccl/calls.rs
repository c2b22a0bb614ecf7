//! The calls of NCCL on what a bucket sends, and what is made of what comes back.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use half::{bf16, f16};
use phalanx::adapter::{Comparison, Elsewhere, ElsewhereCall, ElsewhereOp};
use phalanx::reducer::hooks::{GradBucket, Pending, Sent};
use phalanx::{Communicator as _, DType, Error, ReduceOp, Result};
use phalanx_nccl::{Communicator, DeviceMemory, DeviceSlice, Element, Stream, Work};
use tch::{Device, Kind, Tensor};

use super::bucket::Bucket;
use super::hook::rounded;
use super::power_sgd::LowRankBucket;
use super::{OnDevice, State, index_of, lock};
use crate::shim;
use crate::tensors::torch;

impl OnDevice {
    /// Copies a bucket's gradients into it, and queues the averaging; none if it has no elements. `T` is their type, or the one to which they are
    /// rounded. If the bucket is to be kept, it can be launched again in the same step, with the same gradients.
    pub(super) fn launch<T: Element>(
        &self,
        of: &GradBucket,
        how: Sent,
    ) -> Result<Option<Work<DeviceSlice<T>>>> {
        let (number, gradients) = (of.index, &of.gradients);
        let nccl = match &how {
            Sent::Within(group) => self.within(group)?,
            Sent::Whole | Sent::Rounded(_) | Sent::LowRank(_) | Sent::Nothing => self.nccl.connect()?,
        };
        let State { parameters, buckets, streams, ahead, are_placed, low_rank, .. } = &mut *lock(&self.state);
        *are_placed = true;
        gradients.iter().try_for_each(|place| self.check_place(&parameters[place.parameter]))?;
        if buckets.len() <= number {
            buckets.resize_with(number + 1, || None);
        }
        if of.is_last {
            // In the order of the gradients there may be fewer than in the first step.
            buckets.truncate(number + 1);
        }
        let bucket = match &mut buckets[number] {
            Some(bucket) if bucket.gradients == *gradients => bucket,
            // The bytes of the same gradients in another order are free by now: memory is used again in the order of the stream.
            place => place.insert(Bucket::new(parameters, gradients.clone()).map_err(torch)?),
        };
        if bucket.is_abandoned {
            bucket.renew(parameters)?;
        }
        let here = self.stream_of_thread()?;
        for raw in std::mem::take(ahead) {
            // SAFETY: it was a thread's current stream in this backward pass. libtorch never destroys its own; a program that makes
            // another one current keeps it as long as it has work on it, and so until backward is over.
            let stream = unsafe { Stream::from_raw(self.nccl.device(), raw) };
            if stream.as_raw() != here.as_raw() {
                here.wait_for(&stream)?;
            }
        }
        if bucket.kept.is_some() {
            bucket.take_back()?;
        } else {
            bucket.fill(parameters)?;
            if of.keeps {
                bucket.kept = Some(tch::no_grad(|| bucket.memory.f_detach_copy()).map_err(torch)?);
            }
        }
        // A gradient that is freed now is used again in the order of the stream on which backward took its memory.
        for raw in streams.iter().filter(|raw| **raw != here.as_raw()) {
            // SAFETY: as above.
            unsafe { Stream::from_raw(self.nccl.device(), *raw) }.wait_for(&here)?;
        }
        bucket.place(parameters)?;
        let (sent, op) = match how {
            Sent::Rounded(to) => {
                bucket.low_rank = None;
                let ranks = f64::from(nccl.world_size().get());
                (bucket.compress(rounded(to), ranks).map_err(torch)?, ReduceOp::Sum)
            }
            Sent::Whole | Sent::Within(_) => {
                (bucket.compressed, bucket.low_rank) = (None, None);
                (bucket.memory.shallow_clone(), ReduceOp::Avg)
            }
            Sent::LowRank(_) => {
                bucket.compressed = None;
                let message = low_rank.as_mut().map(|all| bucket.first_message(all)).transpose()?.flatten();
                (message.unwrap_or_else(|| bucket.memory.shallow_clone()), ReduceOp::Avg)
            }
            Sent::Nothing => {
                (bucket.compressed, bucket.low_rank) = (None, None);
                return Ok(None);
            }
        };
        self.call::<T>(&nccl, &here, sent, op)
    }

    /// Averages what is `sent`, behind what is queued on stream `here`; none if it has no elements.
    pub(super) fn call<T: Element>(
        &self,
        nccl: &Communicator,
        here: &Stream,
        sent: Tensor,
        op: ReduceOp,
    ) -> Result<Option<Work<DeviceSlice<T>>>> {
        let dtype = shim::dtype(sent.kind())?;
        let lent = lend::<T>(sent, self.nccl.device())?;
        if lent.is_empty() {
            return Ok(None); // It has no address.
        }
        self.bytes.fetch_add((lent.len() * size_of::<T>()) as u64, Ordering::Relaxed);
        let call = ElsewhereCall { op: ElsewhereOp::AllReduce(op), dtype, elements: lent.len() };
        self.group.announce_elsewhere(self, call)?;
        nccl.after(here)?.all_reduce_async(lent, op).map(Some)
    }

    /// Gathers what is `sent`, behind what is queued on stream `here`, in `gathered`, which has room for all ranks' parts; none if it has no elements.
    pub(super) fn gather<T: Element>(
        &self,
        nccl: &Communicator,
        here: &Stream,
        (sent, gathered): (Tensor, Tensor),
    ) -> Result<Option<Work<Lent<T>>>> {
        let dtype = shim::dtype(sent.kind())?;
        let (sent, gathered) =
            (lend::<T>(sent, self.nccl.device())?, lend::<T>(gathered, self.nccl.device())?);
        if sent.is_empty() {
            return Ok(None); // It has no address.
        }
        // It moves half of what an all_reduce of as many elements does.
        self.bytes.fetch_add((gathered.len() * size_of::<T>()) as u64 / 2, Ordering::Relaxed);
        let call = ElsewhereCall { op: ElsewhereOp::AllGather, dtype, elements: sent.len() };
        self.group.announce_elsewhere(self, call)?;
        nccl.after(here)?.all_gather_async(sent, gathered).map(Some)
    }

    /// Makes a call of a rank with data, on this one, which has none.
    fn answer_in<T: Element>(&self, kind: Kind, op: ElsewhereOp, elements: usize) -> Result<()> {
        let (nccl, here) = (self.nccl.connect()?, self.stream_of_thread()?);
        let place = (kind, Device::Cuda(self.ordinal() as usize));
        let zeros = |elements: usize| {
            let count = i64::try_from(elements)
                .map_err(|_| Error::invalid_argument(format!("a message of {elements} elements")))?;
            let zeros = tch::no_grad(|| Tensor::f_zeros(count, place)).map_err(torch)?;
            lend::<T>(zeros, self.nccl.device())
        };
        // Their memory is used again in the order of this stream, which waits for the call.
        match op {
            ElsewhereOp::AllReduce(op) => {
                let zeros = zeros(elements)?;
                self.await_answer(nccl.after(&here)?.all_reduce_async(zeros, op)?, &here)
            }
            ElsewhereOp::AllGather => {
                let all = elements.saturating_mul(nccl.world_size().count());
                let (sent, gathered) = (zeros(elements)?, zeros(all)?);
                self.await_answer(nccl.after(&here)?.all_gather_async(sent, gathered)?, &here)
            }
        }
    }

    /// What is queued on stream `here` from now on, or this thread, waits for `work`, whose memory is free then.
    fn await_answer<M: Send + 'static>(&self, work: Work<M>, here: &Stream) -> Result<()> {
        drop(if self.waits { work.wait() } else { work.order(here) }?);
        Ok(())
    }

    pub(super) fn average_by<T: Element>(self: &Arc<Self>, bucket: GradBucket, how: Sent) -> Result<Pending> {
        let number = bucket.index;
        let launched = self.launch::<T>(&bucket, how)?;
        let this = self.clone();
        Ok(self.behind(launched, None, move || match this.second_message(number)? {
            Some(second) => {
                let (all, here) = (this.clone(), this.stream_of_thread()?);
                let work = this.call::<f32>(&this.nccl.connect()?, &here, second, ReduceOp::Avg)?;
                Ok(this.behind(work, None, move || {
                    let scale = all.group.active_scale();
                    let State { buckets, low_rank, .. } = &mut *lock(&all.state);
                    if let (Some(low_rank), Some(of_bucket)) = (low_rank, of(buckets, number)) {
                        low_rank.finish(of_bucket, scale)?;
                    }
                    Ok(Pending::ready(bucket.buffer))
                }))
            }
            None => {
                let state = lock(&this.state);
                state.buckets.get(number).and_then(Option::as_ref).map_or(Ok(()), Bucket::widen)?;
                Ok(Pending::ready(bucket.buffer))
            }
        }))
    }

    /// What PowerSGD sends when the first message of a bucket is averaged, if it has sent one.
    fn second_message(&self, number: usize) -> Result<Option<Tensor>> {
        let State { buckets, low_rank, .. } = &*lock(&self.state);
        let (Some(low_rank), Some(of_bucket)) = (low_rank, of(buckets, number)) else { return Ok(None) };
        low_rank.second(of_bucket).map(Some)
    }

    /// What `then` queues on this thread's stream comes behind `work`, and after `comparison`, if there is one.
    pub(super) fn behind<M: Send + 'static>(
        self: &Arc<Self>,
        work: Option<Work<M>>,
        comparison: Option<Comparison>,
        then: impl FnOnce() -> Result<Pending> + Send + 'static,
    ) -> Pending {
        let work = Arc::new(Mutex::new(work));
        let (this, under_way) = (self.clone(), work.clone());
        let is_completed = move || lock(&under_way).as_ref().is_none_or(Work::is_completed);
        Pending::elsewhere_then(is_completed, move || {
            comparison.map_or(Ok(()), Comparison::wait)?;
            if let Some(work) = lock(&work).take() {
                drop(if this.waits { work.wait() } else { work.order(&this.stream_of_thread()?) }?);
            }
            then()
        })
    }
}

/// What NCCL reads of one rank, and where it writes the parts of all.
type Lent<T> = (DeviceSlice<T>, DeviceSlice<T>);

/// What PowerSGD has of the bucket of this number.
fn of(buckets: &[Option<Bucket>], number: usize) -> Option<&LowRankBucket> {
    buckets.get(number)?.as_ref()?.low_rank.as_ref()
}

impl Elsewhere for OnDevice {
    fn answer(&self, ElsewhereCall { op, dtype, elements }: ElsewhereCall) -> Result<()> {
        let is_gather = op == ElsewhereOp::AllGather;
        match dtype {
            DType::F32 => self.answer_in::<f32>(Kind::Float, op, elements),
            DType::F64 => self.answer_in::<f64>(Kind::Double, op, elements),
            DType::F16 => self.answer_in::<f16>(Kind::Half, op, elements),
            DType::BF16 => self.answer_in::<bf16>(Kind::BFloat16, op, elements),
            DType::I64 if is_gather => self.answer_in::<i64>(Kind::Int64, op, elements),
            DType::I32 if is_gather => self.answer_in::<i32>(Kind::Int, op, elements),
            DType::I8 if is_gather => self.answer_in::<i8>(Kind::Int8, op, elements),
            DType::U8 if is_gather => self.answer_in::<u8>(Kind::Uint8, op, elements),
            DType::I64 | DType::I32 | DType::I8 | DType::U8 | DType::Bool => {
                Err(Error::invalid_argument(format!("gradients of type {dtype} are not averaged")))
            }
        }
    }
}

/// The memory of a bucket, for NCCL. It keeps the tensor.
fn lend<T: Element>(tensor: Tensor, device: &phalanx_nccl::Device) -> Result<DeviceSlice<T>> {
    let (pointer, bytes) = shim::device_memory(&tensor)?;
    let len = bytes / size_of::<T>();
    if len != tensor.numel() || index_of(tensor.device()) != Some(device.ordinal()) {
        return Err(Error::invalid_argument("a bucket has another type or device than its parameters"));
    }
    // SAFETY: `shim::device_memory` has the address and the size of a tensor that is held as long as this is, and that lies on the
    // communicator's device row by row. What else uses the elements is queued on streams that NCCL's has waited for, or that wait for
    // NCCL's at the end of backward (`settle`).
    Ok(unsafe { DeviceSlice::from_raw(device, pointer, len) }.keeping(tensor))
}
