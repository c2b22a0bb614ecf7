//! Communication hooks of the program's own, for gradients on a device.
//!
//! A hook of the host's memory makes calls of a group as it likes. One on a device says what is sent, and writes what comes back; the one call
//! between them is ours, because streams have to wait for it, and ranks without data have to make it too, with zeros, inside of `join`.
//!
//! What a hook sends stays until its bucket is sent again: other streams may use it when the hook is done with it.

use std::fmt;
use std::sync::{Arc, Mutex};

use half::{bf16, f16};
use phalanx::reducer::hooks::{GradBucket, GradientPlace, HookState, Pending};
use phalanx::{Communicator, Error, Rank, ReduceOp, Result, WorldSize};
use phalanx_nccl::Element;
use tch::{Kind, Tensor};

use super::{OnDevice, Sent, index_of, lock};
use crate::shim;
use crate::tensors::torch;

/// A communication hook of the program's own for gradients that NCCL averages on the device, as PyTorch's `register_comm_hook` takes one.
/// [`Ddp::register_device_hook`](crate::Ddp::register_device_hook) registers it; all ranks have the same one, with the same settings.
///
/// For each bucket [`send`](Self::send) says what is sent, NCCL combines it over the ranks, and [`receive`](Self::receive) makes averages of it:
///
/// ```
/// use phalanx::reducer::hooks::HookState;
/// use phalanx::{Communicator, Rank, ReduceOp, Result};
/// use phalanx_tch::{DeviceBucket, DeviceHook};
/// use tch::Tensor;
///
/// /// Clips the elements of each rank's gradients before they are averaged.
/// struct Clipped(f64);
///
/// impl DeviceHook for Clipped {
///     fn describe(&self) -> String {
///         format!("clipped to {}", self.0)
///     }
///
///     fn send(&mut self, bucket: &DeviceBucket) -> Result<(Tensor, ReduceOp)> {
///         Ok((bucket.buffer().clamp(-self.0, self.0), ReduceOp::Avg))
///     }
///
///     fn receive(&mut self, bucket: &DeviceBucket, combined: &Tensor) -> Result<()> {
///         bucket.buffer().shallow_clone().copy_(combined);
///         Ok(())
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
/// What it computes is queued on the current stream of the thread that calls it, as all operations of libtorch, and without autograd. Nothing
/// waits for the device unless the hook reads an element.
#[doc(alias = "register_comm_hook")]
pub trait DeviceHook: Send {
    /// As [`CommHook::describe`](phalanx::reducer::hooks::CommHook::describe).
    fn describe(&self) -> String;

    /// What is sent of `bucket`, which has this rank's gradients, and how NCCL combines it over the ranks: by [`ReduceOp::Sum`], `Avg` or `PreMulSum`,
    /// to which a rank that is done, inside of [`join`](crate::Ddp::join), brings zeros. Called while backward still runs.
    ///
    /// It is a tensor of f32, f64, f16 or bf16 on the bucket's device, with as many elements on each rank, that nothing else uses, or the bucket's
    /// [buffer](DeviceBucket::buffer) itself. The hook may change the bucket.
    ///
    /// # Errors
    /// One of the program's ends the group.
    fn send(&mut self, bucket: &DeviceBucket) -> Result<(Tensor, ReduceOp)>;

    /// Writes the averages into `bucket`: `combined` has the elements of what [`send`](Self::send) gave, combined. Called when backward is over, bucket by
    /// bucket in the same order.
    ///
    /// All ranks must make the same of the same elements, or replicas drift apart.
    ///
    /// # Errors
    /// One of the program's ends the group.
    fn receive(&mut self, bucket: &DeviceBucket, combined: &Tensor) -> Result<()>;

    /// As [`CommHook::adopt`](phalanx::reducer::hooks::CommHook::adopt). `group` is that of the hosts.
    ///
    /// # Errors
    /// If an exchange fails.
    fn adopt(&mut self, group: &dyn Communicator, root: Rank) -> Result<()>;

    /// As [`CommHook::state`](phalanx::reducer::hooks::CommHook::state): what later averages depend on, in the host's memory.
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
    buffer: Tensor,
    places: Vec<Tensor>,
    gradients: Arc<[GradientPlace]>,
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

    /// All gradients, one after another, as one row. They are of one type. A handle to it, [`shallow_clone`](Tensor::shallow_clone), can be written
    /// by operations in place.
    pub fn buffer(&self) -> &Tensor {
        &self.buffer
    }

    /// Each gradient in its parameter's shape, with the number of that parameter in the order in which trainable variables were made: parts of the
    /// buffer.
    pub fn gradients(&self) -> impl Iterator<Item = (usize, &Tensor)> {
        self.gradients.iter().map(|place| place.parameter).zip(&self.places)
    }
}

impl fmt::Debug for DeviceBucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBucket")
            .field("index", &self.index)
            .field("is_last", &self.is_last)
            .field("kind", &self.buffer.kind())
            .field("gradients", &self.gradients.len())
            .finish_non_exhaustive()
    }
}

/// The hook, which a bucket that is under way has, too.
pub(super) type Own = Arc<Mutex<Box<dyn DeviceHook>>>;

impl OnDevice {
    /// Sends what `hook` says of a bucket.
    pub(super) fn average_own(self: &Arc<Self>, bucket: GradBucket, hook: Own) -> Result<Pending> {
        // The gradients are in the bucket then, and nothing is sent.
        drop(self.launch::<f32>((bucket.index, bucket.keeps), &bucket.gradients, Sent::Nothing)?);
        let of_hook = self.bucket_of_hook(&bucket)?;
        let (message, op) = {
            let _guard = tch::no_grad_guard();
            let (message, op) = lock(&hook).send(&of_hook)?;
            self.check_message(&message, op)?;
            (message.f_detach().and_then(|message| message.f_contiguous()).map_err(torch)?, op)
        };
        let kind = message.kind();
        let of_hook = (of_hook, message, op);
        match kind {
            Kind::Double => self.send_own::<f64>(bucket, of_hook, hook),
            Kind::Half => self.send_own::<f16>(bucket, of_hook, hook),
            Kind::BFloat16 => self.send_own::<bf16>(bucket, of_hook, hook),
            _ => self.send_own::<f32>(bucket, of_hook, hook),
        }
    }

    fn send_own<T: Element>(
        self: &Arc<Self>,
        bucket: GradBucket,
        (of_hook, message, op): (DeviceBucket, Tensor, ReduceOp),
        hook: Own,
    ) -> Result<Pending> {
        let (nccl, here) = (self.nccl.connect()?, self.stream_of_thread()?);
        let work = self.call::<T>(&nccl, &here, message.shallow_clone(), op)?;
        if let Some(held) = lock(&self.state).buckets.get_mut(bucket.index).and_then(Option::as_mut) {
            held.own = Some(message.shallow_clone());
        }
        Ok(self.behind(work, move || {
            let _guard = tch::no_grad_guard();
            lock(&hook).receive(&of_hook, &message)?;
            Ok(Pending::ready(bucket.buffer))
        }))
    }

    fn bucket_of_hook(&self, bucket: &GradBucket) -> Result<DeviceBucket> {
        let ranks = self.nccl.connect()?.world_size();
        let state = lock(&self.state);
        let Some(held) = state.buckets.get(bucket.index).and_then(Option::as_ref) else {
            return Err(Error::aborted(format!("bucket {} has no memory", bucket.index)));
        };
        Ok(DeviceBucket {
            index: bucket.index,
            is_last: bucket.is_last,
            ranks,
            buffer: held.memory.shallow_clone(),
            places: held.places.iter().map(Tensor::shallow_clone).collect(),
            gradients: held.gradients.clone(),
        })
    }

    /// An error if NCCL cannot combine `message` by `op`, or ranks without data could not take part.
    fn check_message(&self, message: &Tensor, op: ReduceOp) -> Result<()> {
        if !matches!(op, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_)) {
            return Err(Error::invalid_argument(format!("the communication hook combines by {op}"))
                .with_remedy(
                    "take a sum or an average: in a join the zeros of ranks that are done would count",
                ));
        }
        let is_float = |kind| matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16);
        if shim::is_plain(message)
            && is_float(message.kind())
            && index_of(message.device()) == Some(self.ordinal())
        {
            return Ok(());
        }
        let what = match message.defined() {
            true => format!("a tensor of {:?} on {:?}", message.kind(), message.device()),
            false => "no tensor".into(),
        };
        let (cause, ordinal) =
            (format!("the communication hook sends {what} where NCCL averages"), self.ordinal());
        Err(Error::invalid_argument(cause)
            .with_remedy(format!("send a dense tensor of f32, f64, f16 or bf16 on Cuda({ordinal})")))
    }
}
