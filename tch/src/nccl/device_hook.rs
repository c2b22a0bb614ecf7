//! Communication hooks of the program's own, for gradients on a device.
//!
//! A hook of the host's memory makes calls of a group as it likes. One on a device says what is sent, and writes what comes back; the one call
//! between them is ours, because streams have to wait for it, and ranks without data have to make it too, with zeros, inside of `join`.
//!
//! NCCL compares nothing, and ranks whose messages differ would wait for its time-out. So the hosts compare what is sent of each bucket: in the first step
//! and after a change before the call, and else beside it ([`ComparedCalls`](phalanx::adapter::ComparedCalls)).
//!
//! What a hook sends, and what is gathered of it, stays until its bucket is sent again: other streams may use it when the hook is done with it.

use std::fmt;
use std::sync::{Arc, Mutex};

use half::{bf16, f16};
use phalanx::adapter::{Comparison, ElsewhereCall, ElsewhereOp};
use phalanx::reducer::hooks::{GradBucket, GradientPlace, HookState, Pending, Sent};
use phalanx::{Communicator, Error, Rank, ReduceOp, Result, WorldSize};
use phalanx_nccl::Element;
use tch::{Kind, Tensor};

use super::{OnDevice, index_of, lock};
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
/// use phalanx_tch::{DeviceBucket, DeviceHook, DeviceMessage};
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
///     fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
///         Ok(DeviceMessage::all_reduce(bucket.buffer().clamp(-self.0, self.0), ReduceOp::Avg))
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

    /// What is sent of `bucket`, which has this rank's gradients: a [message](DeviceMessage) that NCCL combines or gathers over the ranks. Called while
    /// backward still runs. The hook may change the bucket.
    ///
    /// Every rank sends as many elements of each bucket, of one type and in one way. The hosts compare that: if it differs, every rank gets an error that
    /// names two ranks with what they send. In the first step, and when a rank sends something else of a bucket than before, it waits for the other ranks
    /// here; else at the end of backward.
    ///
    /// # Errors
    /// One of the program's ends the group.
    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage>;

    /// Writes the averages into `bucket`: `combined` has the elements of what [`send`](Self::send) gave, combined, in the same shape; or, gathered, all
    /// ranks' parts, with the ranks as a first dimension more. Called when backward is over, bucket by bucket in the same order.
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

/// What a [`DeviceHook`] sends of a bucket, and what NCCL does with it.
///
/// It is a tensor on the bucket's device, that nothing else uses, or the bucket's [buffer](DeviceBucket::buffer) itself. A rank that is done, inside of
/// [`join`](crate::Ddp::join), brings zeros.
#[derive(Debug)]
pub struct DeviceMessage {
    tensor: Tensor,
    op: ElsewhereOp,
}

impl DeviceMessage {
    /// The ranks' elements of `tensor`, of f32, f64, f16 or bf16, are combined: by [`ReduceOp::Sum`], `Avg` or `PreMulSum`, which zeros do not disturb.
    pub fn all_reduce(tensor: Tensor, op: ReduceOp) -> Self {
        Self { tensor, op: ElsewhereOp::AllReduce(op) }
    }

    /// Each rank gets the tensors of all, in the order of the ranks: for hooks whose messages cannot be added up, such as the largest gradients with
    /// their places. Besides floats it takes integers, but no bools. The device needs memory for all ranks' parts of a bucket.
    ///
    /// All ranks bring as many elements; who has fewer fills up, for example with zeros.
    #[doc(alias("all_gather_into_tensor", "top-k"))]
    pub fn all_gather(tensor: Tensor) -> Self {
        Self { tensor, op: ElsewhereOp::AllGather }
    }
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

/// A bucket that is under way: as the hook sees it, and what is sent.
struct UnderWay {
    of_hook: DeviceBucket,
    message: DeviceMessage,
    /// If what the other ranks send is still to be seen.
    comparison: Option<Comparison>,
}

impl OnDevice {
    /// Sends what `hook` says of a bucket.
    pub(super) fn average_own(self: &Arc<Self>, bucket: GradBucket, hook: Own) -> Result<Pending> {
        // The gradients are in the bucket then, and nothing is sent.
        drop(self.launch::<f32>(&bucket, Sent::Nothing)?);
        let of_bucket = self.bucket_of_hook(&bucket)?;
        let message = {
            let _guard = tch::no_grad_guard();
            let message = lock(&hook).send(&of_bucket)?;
            self.check_message(&message)?;
            let tensor = message.tensor.f_detach().and_then(|tensor| tensor.f_contiguous()).map_err(torch)?;
            DeviceMessage { tensor, ..message }
        };
        let kind = message.tensor.kind();
        let call =
            ElsewhereCall { op: message.op, dtype: shim::dtype(kind)?, elements: message.tensor.numel() };
        let comparison = self.compared.compare(&self.group, bucket.index, call)?;
        let under_way = UnderWay { of_hook: of_bucket, message, comparison };
        match kind {
            Kind::Double => self.send_own::<f64>(bucket, under_way, hook),
            Kind::Half => self.send_own::<f16>(bucket, under_way, hook),
            Kind::BFloat16 => self.send_own::<bf16>(bucket, under_way, hook),
            Kind::Int64 => self.send_own::<i64>(bucket, under_way, hook),
            Kind::Int => self.send_own::<i32>(bucket, under_way, hook),
            Kind::Int8 => self.send_own::<i8>(bucket, under_way, hook),
            Kind::Uint8 => self.send_own::<u8>(bucket, under_way, hook),
            _ => self.send_own::<f32>(bucket, under_way, hook),
        }
    }

    fn send_own<T: Element>(
        self: &Arc<Self>,
        bucket: GradBucket,
        UnderWay { of_hook, message, comparison }: UnderWay,
        hook: Own,
    ) -> Result<Pending> {
        let (nccl, here) = (self.nccl.connect()?, self.stream_of_thread()?);
        let DeviceMessage { tensor: sent, op } = message;
        match op {
            ElsewhereOp::AllReduce(op) => {
                let work = self.call::<T>(&nccl, &here, sent.shallow_clone(), op)?;
                self.hold_own(bucket.index, vec![sent.shallow_clone()]);
                Ok(self.behind(work, comparison, move || received(&hook, &of_hook, &sent, bucket)))
            }
            ElsewhereOp::AllGather => {
                let mut shape = vec![i64::from(nccl.world_size().get())];
                shape.extend(sent.size());
                let gathered =
                    Tensor::f_empty(shape.as_slice(), (sent.kind(), sent.device())).map_err(torch)?;
                let lent = (sent.shallow_clone(), gathered.shallow_clone());
                let work = self.gather::<T>(&nccl, &here, lent)?;
                self.hold_own(bucket.index, vec![sent, gathered.shallow_clone()]);
                Ok(self.behind(work, comparison, move || received(&hook, &of_hook, &gathered, bucket)))
            }
        }
    }

    /// Keeps the memory of a bucket's call.
    fn hold_own(&self, number: usize, memory: Vec<Tensor>) {
        if let Some(held) = lock(&self.state).buckets.get_mut(number).and_then(Option::as_mut) {
            held.own = memory;
        }
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

    /// An error if NCCL cannot combine or gather `message`, or ranks without data could not take part.
    fn check_message(&self, DeviceMessage { tensor: message, op }: &DeviceMessage) -> Result<()> {
        let is_float = |kind| matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16);
        let is_integer = |kind| matches!(kind, Kind::Int64 | Kind::Int | Kind::Int8 | Kind::Uint8);
        let (is_gather, types) = match op {
            ElsewhereOp::AllReduce(ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_)) => {
                (false, "f32, f64, f16 or bf16")
            }
            ElsewhereOp::AllReduce(op) => {
                return Err(Error::invalid_argument(format!("the communication hook combines by {op}"))
                    .with_remedy(
                        "take a sum or an average: in a join the zeros of ranks that are done would count",
                    ));
            }
            ElsewhereOp::AllGather => (true, "f32, f64, f16, bf16, i64, i32, i8 or u8"),
        };
        // An undefined tensor has no type.
        if shim::is_plain(message)
            && (is_float(message.kind()) || is_gather && is_integer(message.kind()))
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
            .with_remedy(format!("send a dense tensor of {types} on Cuda({ordinal})")))
    }
}

/// Has the hook make averages of what has come back of a bucket.
fn received(hook: &Own, of_hook: &DeviceBucket, combined: &Tensor, bucket: GradBucket) -> Result<Pending> {
    let _guard = tch::no_grad_guard();
    lock(hook).receive(of_hook, combined)?;
    Ok(Pending::ready(bucket.buffer))
}
