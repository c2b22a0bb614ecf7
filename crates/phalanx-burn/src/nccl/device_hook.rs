//! Communication hooks of the program's own, for gradients on a device.
//!
//! A hook of the processes' memory makes calls of a group as it likes. One on a device says what is sent, and makes averages of what comes
//! back; the one call between them is ours, because fences have to be waited for, and ranks without data have to make it too, with zeros,
//! inside of `join`.
//!
//! What a hook sends is copied first: NCCL writes to memory, and Burn's tensors are values, of which the hook may have kept one.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::Cube;
use burn::tensor::{DType as BurnDType, Tensor, bf16, f16};
use parking_lot::Mutex;
use phalanx::reducer::hooks::{GradBucket, GradientPlace, HookState, Pending};
use phalanx::{Communicator, Error, Rank, ReduceOp, Result, WorldSize};
use phalanx_nccl::Element;

use super::{BucketMemory, OnDevice, element_type};
use crate::read_back::Computed;

/// A communication hook of the program's own for gradients that NCCL averages on the device, as PyTorch's `register_comm_hook` takes one.
/// [`Ddp::register_device_hook`](crate::Ddp::register_device_hook) registers it; all ranks have the same one, with the same settings.
///
/// For each bucket [`send`](Self::send) says what is sent, NCCL combines it over the ranks, and [`receive`](Self::receive) makes averages of it:
///
/// ```
/// use burn::tensor::Tensor;
/// use phalanx::reducer::hooks::HookState;
/// use phalanx::{Communicator, Rank, ReduceOp, Result};
/// use phalanx_burn::{DeviceBucket, DeviceHook};
///
/// /// Clips the elements of each rank's gradients before they are averaged.
/// struct Clipped(f64);
///
/// impl DeviceHook for Clipped {
///     fn describe(&self) -> String {
///         format!("clipped to {}", self.0)
///     }
///
///     fn send(&mut self, bucket: &DeviceBucket) -> Result<(Tensor<1>, ReduceOp)> {
///         Ok((bucket.buffer().clamp(-self.0, self.0), ReduceOp::Avg))
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

    /// What is sent of `bucket`, which has this rank's gradients, and how NCCL combines it over the ranks: by [`ReduceOp::Sum`], `Avg` or `PreMulSum`,
    /// to which a rank that is done, inside of [`join`](crate::Ddp::join), brings zeros. Called while backward still runs.
    ///
    /// It is a tensor of f32, f64, f16 or bf16 on the bucket's device, with elements, of which there are as many on each rank.
    ///
    /// # Errors
    /// One of the program's ends the group.
    fn send(&mut self, bucket: &DeviceBucket) -> Result<(Tensor<1>, ReduceOp)>;

    /// The averages, in the places and of the type of [`DeviceBucket::buffer`]: `combined` is what [`send`](Self::send) gave, combined. Called when
    /// backward is over, bucket by bucket in the same order.
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
    op: ReduceOp,
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
        let of_hook = DeviceBucket {
            index: bucket.index,
            is_last: bucket.is_last,
            ranks: self.nccl.connect()?.world_size(),
            buffer: Tensor::from_primitive::<Cube>(Cube::stored(memory.tensor.clone())),
            gradients: bucket.gradients.iter().zip(&memory.places).map(place).collect(),
        };
        let (message, op) = hook.lock().send(&of_hook)?;
        if !matches!(op, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_)) {
            return Err(Error::invalid_argument(format!("the communication hook combines by {op}"))
                .with_remedy(
                    "take a sum or an average: in a join the zeros of ranks that are done would count",
                ));
        }
        let (message, dtype) = self.copied(message, "sends")?;
        let under_way = UnderWay { of_hook, memory, message, op };
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
        UnderWay { of_hook, memory, message, op }: UnderWay,
        hook: Own,
    ) -> Result<Pending> {
        let nccl = self.nccl.connect()?;
        let (timeout, stage) = (nccl.timeout(), self.send::<T>(nccl, &message, op)?);
        let this = self.clone();
        Ok(stage.then(timeout, move || {
            let all = message.places.first().cloned().unwrap_or_default();
            let combined = Cube::stored(message.part(&all, &[all.len()]));
            let averages = hook.lock().receive(&of_hook, Tensor::from_primitive::<Cube>(combined))?;
            let (averages, dtype) = this.copied(averages, "receives")?;
            let count = averages.places.iter().map(Range::len).sum::<usize>();
            let (wanted, own) = (memory.tensor.meta.shape().num_elements(), memory.tensor.dtype);
            if (count, dtype) != (wanted, own) {
                return Err(Error::invalid_argument(format!(
                    "the communication hook receives {count} x {dtype:?} for a bucket of {wanted} x {own:?}"
                ))
                .with_remedy("return as many elements as the bucket's buffer has, of its type"));
            }
            this.keep(&bucket.gradients, &BucketMemory { tensor: averages.tensor, ..memory });
            Ok(Pending::ready(bucket.buffer))
        }))
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
