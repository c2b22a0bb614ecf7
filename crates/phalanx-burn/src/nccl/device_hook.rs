//! Communication hooks of the program's own, for gradients on a device.
//!
//! A hook of the processes' memory makes calls of a group as it likes. One on a device says what is sent, and makes averages of what comes
//! back; the one call between them is ours, because fences have to be waited for, and ranks without data have to make it too, with zeros,
//! inside of `join`.
//!
//! NCCL compares nothing, and ranks whose messages differ would wait for its time-out. So the processes compare what is sent of each bucket: in the first
//! step and after a change before the call, and else beside it ([`ComparedCalls`](phalanx::adapter::ComparedCalls)).
//!
//! What a hook sends is copied first: NCCL writes to memory, and Burn's tensors are values, of which the hook may have kept one.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::Cube;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType as BurnDType, Shape, Tensor, bf16, f16};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use parking_lot::Mutex;
use phalanx::adapter::{Comparison, ElsewhereCall, ElsewhereOp};
use phalanx::reducer::hooks::{GradBucket, GradientPlace, HookState, Pending};
use phalanx::{Communicator, Error, Rank, ReduceOp, Result, WorldSize};
use phalanx_nccl::Element;

use super::{BucketMemory, OnDevice, element_type};
use crate::read_back::Computed;
use crate::tensor_bytes;

/// A communication hook of the program's own for gradients that NCCL averages on the device, as PyTorch's `register_comm_hook` takes one.
/// [`Ddp::register_device_hook`](crate::Ddp::register_device_hook) registers it; all ranks have the same one, with the same settings.
///
/// For each bucket [`send`](Self::send) says what is sent, NCCL combines it over the ranks, and [`receive`](Self::receive) makes averages of it:
///
/// ```
/// use burn::tensor::Tensor;
/// use phalanx::reducer::hooks::HookState;
/// use phalanx::{Communicator, Rank, ReduceOp, Result};
/// use phalanx_burn::{DeviceBucket, DeviceHook, DeviceMessage};
///
/// /// Clips the elements of each rank's gradients before they are averaged.
/// struct Clipped(f64);
///
/// impl DeviceHook for Clipped {
///     fn describe(&self) -> String {
///         format!("clipped to {}", self.0)
///     }
///
///     fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
///         Ok(DeviceMessage::all_reduce(bucket.buffer().clamp(-self.0, self.0), ReduceOp::Avg))
///     }
///
///     fn receive(&mut self, _: &DeviceBucket, combined: Tensor<1>) -> Result<Tensor<1>> {
///         Ok(combined)
///     }
///
///     fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
///         Ok(()) // It has no state.
///     }
///
///     fn state(&self) -> Result<HookState> {
///         Ok(HookState::default())
///     }
///
///     fn load(&mut self, state: HookState) -> Result<()> {
///         state.nothing()
///     }
/// }
/// ```
///
/// Nothing waits for the device in it unless the hook reads an element. All tensors are without autodiff.
#[doc(alias = "register_comm_hook")]
pub trait DeviceHook: Send {
    /// As [`CommHook::describe`](phalanx::reducer::hooks::CommHook::describe).
    fn describe(&self) -> String;

    /// What is sent of `bucket`, which has this rank's gradients: a [message](DeviceMessage) that NCCL combines or gathers over the ranks. Called while
    /// backward still runs.
    ///
    /// Every rank sends as many elements of each bucket, of one type and in one way. The processes compare that: if it differs, every rank gets an error
    /// that names two ranks with what they send. In the first step, and when a rank sends something else of a bucket than before, it waits for the other
    /// ranks here; else at the end of backward.
    ///
    /// # Errors
    /// One of the program's ends the group.
    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage>;

    /// The averages, in the places and of the type of [`DeviceBucket::buffer`]: `combined` is what [`send`](Self::send) gave, combined; or, gathered, all
    /// ranks' parts, one behind the other in the order of the ranks. Called when backward is over, bucket by bucket in the same order.
    ///
    /// All ranks must make the same of the same elements, or replicas drift apart.
    ///
    /// # Errors
    /// One of the program's ends the group.
    fn receive(&mut self, bucket: &DeviceBucket, combined: Tensor<1>) -> Result<Tensor<1>>;

    /// As [`CommHook::adopt`](phalanx::reducer::hooks::CommHook::adopt). `group` is that of the processes.
    ///
    /// # Errors
    /// If an exchange fails.
    fn adopt(&mut self, group: &dyn Communicator, root: Rank) -> Result<()>;

    /// As [`CommHook::state`](phalanx::reducer::hooks::CommHook::state): what later averages depend on, in the process's memory.
    ///
    /// # Errors
    /// If it cannot be read.
    fn state(&self) -> Result<HookState>;

    /// As [`CommHook::load`](phalanx::reducer::hooks::CommHook::load).
    ///
    /// # Errors
    /// If it is the state of another kind of hook.
    fn load(&mut self, state: HookState) -> Result<()>;

    /// As [`CommHook::keeps_state`](phalanx::reducer::hooks::CommHook::keeps_state): whether there is anything in its [`state`](Self::state) now. A hook
    /// whose state is on the device answers without reading it. By default it is read.
    ///
    /// # Errors
    /// As [`state`](Self::state), if that is read.
    fn keeps_state(&self) -> Result<bool> {
        Ok(!self.state()?.is_empty())
    }

    /// As [`CommHook::is_stateless`](phalanx::reducer::hooks::CommHook::is_stateless): whether it keeps nothing of a step or a group, always. If so, a step
    /// of an elastic job that a failure has cut off can be done again: [`send`](Self::send) then gets the same gradients once more, among fewer ranks.
    /// Asked when it is registered. False by default.
    fn is_stateless(&self) -> bool {
        false
    }
}

/// What a [`DeviceHook`] sends of a bucket, and what NCCL does with it: a tensor of f32, f64, f16 or bf16 on the bucket's device, with elements. A rank
/// that is done, inside of [`join`](crate::Ddp::join), brings zeros.
#[derive(Debug)]
pub struct DeviceMessage {
    tensor: Tensor<1>,
    op: ElsewhereOp,
}

impl DeviceMessage {
    /// The ranks' elements of `tensor` are combined: by [`ReduceOp::Sum`], `Avg` or `PreMulSum`, which zeros do not disturb.
    pub fn all_reduce(tensor: Tensor<1>, op: ReduceOp) -> Self {
        Self { tensor, op: ElsewhereOp::AllReduce(op) }
    }

    /// Each rank gets the tensors of all, in the order of the ranks: for hooks whose messages cannot be added up, such as the largest gradients with
    /// their places. The device needs memory for all ranks' parts of a bucket.
    ///
    /// All ranks bring as many elements; who has fewer fills up, for example with zeros. A place in a bucket is a number that f64 has, and f32 up to
    /// 2²⁴.
    #[doc(alias("all_gather_into_tensor", "top-k"))]
    pub fn all_gather(tensor: Tensor<1>) -> Self {
        Self { tensor, op: ElsewhereOp::AllGather }
    }
}

/// A bucket of gradients in the memory of a device, for a [`DeviceHook`].
pub struct DeviceBucket {
    index: usize,
    is_last: bool,
    ranks: WorldSize,
    buffer: Tensor<1>,
    gradients: Vec<GradientPlace>,
}

impl DeviceBucket {
    /// Its number in this step, in the order of sending.
    ///
    /// After the first step, buckets may have other gradients: what a hook keeps from step to step is of [gradients](Self::gradients), and not of
    /// this number.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Whether it is the step's last.
    pub fn is_last(&self) -> bool {
        self.is_last
    }

    /// Among how many ranks gradients are averaged.
    pub fn world_size(&self) -> WorldSize {
        self.ranks
    }

    /// All gradients, one after another, of one type. Between two of them there may be zeros, because a device wants its tensors to begin at certain
    /// addresses.
    pub fn buffer(&self) -> Tensor<1> {
        self.buffer.clone()
    }

    /// Where each gradient lies in the [buffer](Self::buffer).
    pub fn gradients(&self) -> &[GradientPlace] {
        &self.gradients
    }
}

impl fmt::Debug for DeviceBucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBucket")
            .field("index", &self.index)
            .field("is_last", &self.is_last)
            .field("gradients", &self.gradients)
            .finish_non_exhaustive()
    }
}

/// The hook, which a bucket that is under way has, too.
pub(super) type Own = Arc<Mutex<Box<dyn DeviceHook>>>;

/// A bucket that is under way: as the hook sees it, its memory, and what is sent.
struct UnderWay {
    of_hook: DeviceBucket,
    memory: BucketMemory,
    message: BucketMemory,
    op: ElsewhereOp,
    /// If what the other ranks send is still to be seen.
    comparison: Option<Comparison>,
}

impl OnDevice {
    /// Sends what `hook` says of a bucket.
    pub(super) fn average_own(self: &Arc<Self>, bucket: GradBucket, hook: Own) -> Result<Pending> {
        let dtype = element_type(bucket.buffer.dtype())?;
        let own =
            self.own(&bucket).into_iter().zip(bucket.gradients.iter().map(|place| place.elements.len()));
        let memory = BucketMemory::of(own.collect(), &self.device, dtype);
        if memory.places.iter().all(Range::is_empty) {
            self.keep(&bucket.gradients, &memory);
            return Ok(Pending::ready(bucket.buffer)); // It has no address.
        }
        let place = |(place, range): (&GradientPlace, &Range<usize>)| {
            let mut place = place.clone();
            place.elements = range.clone();
            place
        };
        let of_bucket = DeviceBucket {
            index: bucket.index,
            is_last: bucket.is_last,
            ranks: self.nccl.connect()?.world_size(),
            buffer: Tensor::from_primitive::<Cube>(Cube::stored(memory.tensor.clone())),
            gradients: bucket.gradients.iter().zip(&memory.places).map(place).collect(),
        };
        let DeviceMessage { tensor, op } = hook.lock().send(&of_bucket)?;
        match op {
            ElsewhereOp::AllReduce(ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_))
            | ElsewhereOp::AllGather => {}
            ElsewhereOp::AllReduce(op) => {
                return Err(Error::invalid_argument(format!("the communication hook combines by {op}"))
                    .with_remedy(
                        "take a sum or an average: in a join the zeros of ranks that are done would count",
                    ));
            }
        }
        let (message, dtype) = self.copied(tensor, "sends")?;
        let elements = message.places.iter().map(Range::len).sum();
        let call = ElsewhereCall { op, dtype: tensor_bytes::dtype(dtype)?, elements };
        let comparison = self.compared.compare(&self.group, bucket.index, call)?;
        let under_way = UnderWay { of_hook: of_bucket, memory, message, op, comparison };
        match dtype {
            BurnDType::F64 => self.send_own::<f64>(bucket, under_way, hook),
            BurnDType::F16 => self.send_own::<f16>(bucket, under_way, hook),
            BurnDType::BF16 => self.send_own::<bf16>(bucket, under_way, hook),
            _ => self.send_own::<f32>(bucket, under_way, hook),
        }
    }

    fn send_own<T: Element>(
        self: &Arc<Self>,
        bucket: GradBucket,
        UnderWay { of_hook, memory, message, op, comparison }: UnderWay,
        hook: Own,
    ) -> Result<Pending> {
        let (nccl, this) = (self.nccl.connect()?, self.clone());
        let timeout = nccl.timeout();
        let all = message.places.first().cloned().unwrap_or_default();
        let sent = message.part(&all, &[all.len()]);
        match op {
            ElsewhereOp::AllReduce(op) => {
                let stage = self.send::<T>(nccl, &message, op)?;
                Ok(stage.then(timeout, comparison, move || {
                    this.received(&hook, (&of_hook, sent), bucket, memory)
                }))
            }
            ElsewhereOp::AllGather => {
                let room = all.len() * nccl.world_size().count();
                let gathered = CubeBackend::float_zeros(Shape::new([room]), &self.device, sent.dtype.into());
                let stage = self.gather::<T>(nccl, &sent, &gathered)?;
                Ok(stage.then(timeout, comparison, move || {
                    this.received(&hook, (&of_hook, gathered), bucket, memory)
                }))
            }
        }
    }

    /// Has the hook make averages of what has come back of a bucket, whose memory that is.
    fn received(
        &self,
        hook: &Own,
        (of_hook, combined): (&DeviceBucket, CubeTensor),
        bucket: GradBucket,
        mut memory: BucketMemory,
    ) -> Result<Pending> {
        let combined = Tensor::from_primitive::<Cube>(Cube::stored(combined));
        let averages = hook.lock().receive(of_hook, combined)?;
        let (averages, dtype) = self.copied(averages, "receives")?;
        let count = averages.places.iter().map(Range::len).sum::<usize>();
        let (wanted, own) = (memory.tensor.meta.shape().num_elements(), memory.tensor.dtype);
        if (count, dtype) != (wanted, own) {
            return Err(Error::invalid_argument(format!(
                "the communication hook receives {count} x {dtype:?} for a bucket of {wanted} x {own:?}"
            ))
            .with_remedy("return as many elements as the bucket's buffer has, of its type"));
        }
        memory.tensor = averages.tensor;
        self.keep(&bucket.gradients, &memory);
        Ok(Pending::ready(bucket.buffer))
    }

    /// A copy of what the hook gives, and its type; an error if that is not on this device, or NCCL does not combine it.
    fn copied(&self, given: Tensor<1>, verb: &str) -> Result<(BucketMemory, BurnDType)> {
        let (dtype, len, place) = (given.dtype(), given.dims()[0], given.device());
        let is_float = matches!(dtype, BurnDType::F32 | BurnDType::F64 | BurnDType::F16 | BurnDType::BF16);
        let resident = given.inner().try_into_primitive::<Cube>().ok().map(Cube::computed);
        match resident.filter(|tensor| is_float && len > 0 && tensor.device == self.device) {
            Some(tensor) => Ok((BucketMemory::of(vec![(Some(tensor), len)], &self.device, dtype), dtype)),
            None => Err(Error::invalid_argument(format!(
                "the communication hook {verb} {len} x {dtype:?} on {place:?} where NCCL averages"
            ))
            .with_remedy("give a tensor of f32, f64, f16 or bf16 on the device of the bucket")),
        }
    }
}
