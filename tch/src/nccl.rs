//! Gradients that NCCL averages on the device, in buckets of its memory.
//!
//! 1. A parameter's hook notes the stream on which its gradient is computed. Nobody waits.
//! 2. When all gradients of a bucket are queued, they are copied into the bucket, on the device, and each `.grad` is its place there, as in PyTorch
//!    with `gradient_as_bucket_view`: a gradient that backward adds to what is there needs no copy. A parameter without a gradient on this
//!    rank gets zeros, if parameters may be unused. NCCL's stream is told to wait for all that, and averages the bucket by one call.
//!    One call for each gradient, without buckets, took 1.4 to 3.5 times as long as PyTorch's step on a real GPU.
//! 3. At the end of backward the streams, and the one on which the program goes on, are told to wait for NCCL's. No thread waits for the
//!    device: a call that fails later is the error of the next call, and of a save ([`check`](OnDevice::check)).
//!
//! In a weighted step the gradients are those of the loss times this rank's weight. The weights are averaged by the host's group meanwhile, and
//! the device divides the averages by theirs at the end of backward. With [`Compressed`](phalanx::reducer::hooks::Compressed) a bucket is rounded
//! to memory of its own, which is sent and copied back; with [`PowerSgd`](phalanx::reducer::hooks::PowerSgd) two messages of its own are ([`power_sgd`]); with [`PostLocalSgd`](phalanx::reducer::hooks::PostLocalSgd) nothing is
//! after the first steps, or only among the ranks of a smaller group, which have a communicator of their own; and a hook of the program's says by itself what is ([`device_hook`]).
//!
//! Inside of `join` each call is announced through the host's group before it is made, and a rank that has no data makes it with zeros
//! ([`Elsewhere`](phalanx::adapter::Elsewhere)): so these calls have one order on all ranks.
//!
//! In an elastic job the thread waits for the calls at the end of backward, so that a failure is one of this step. A step that can be done again keeps
//! a copy of each bucket before it is averaged; the survivors average the copies by a communicator of their own.
#![allow(unsafe_code)] // NCCL takes addresses.

mod bucket;
mod calls;
mod device_hook;
mod hook;
mod power_sgd;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use phalanx::adapter::{ComparedCalls, JoinGroup};
use phalanx::{Caller, Communicator as _, Deadline, Error, ProcessGroup, Result, WorldSize};
use phalanx_nccl::{Communicator, CommunicatorHandle, Stream};
use tch::Device;

use self::bucket::Bucket;
pub use self::device_hook::{DeviceBucket, DeviceHook, DeviceMessage};
pub(crate) use self::hook::{Hook, OwnHook};
use self::power_sgd::LowRank;
use crate::shim;
use crate::tensors::{Named, torch};

/// Averages the gradients of a model's parameters.
pub(crate) struct OnDevice {
    nccl: CommunicatorHandle,
    /// Ranks without data hear of calls by it.
    group: JoinGroup,
    /// Whether the end of backward waits for the calls.
    waits: bool,
    state: Mutex<State>,
    /// What the program's hook has sent of each bucket last.
    compared: ComparedCalls,
    /// The bytes of all buckets that were averaged.
    bytes: AtomicU64,
}

struct State {
    parameters: Vec<Named>,
    /// By number.
    buckets: Vec<Option<Bucket>>,
    /// The streams, as `CUstream`s, that take part in this backward pass.
    streams: Vec<usize>,
    /// Those of them for which NCCL's stream does not wait yet.
    ahead: Vec<usize>,
    /// Whether the gradients of this step lie in buckets; not in a world of one.
    are_placed: bool,
    /// What PowerSGD keeps, if that averages.
    low_rank: Option<LowRank>,
    /// The smaller group within which `PostLocalSgd` averages, if there is one.
    subgroup: Option<Arc<CommunicatorHandle>>,
}

impl State {
    /// Divides the averages by `weight`, and multiplies them by `scale`.
    fn scale(&mut self, weight: f64, scale: f64) -> Result<()> {
        if weight == 1.0 && scale == 1.0 {
            return Ok(());
        }
        let _guard = tch::no_grad_guard();
        if self.are_placed {
            for bucket in self.buckets.iter_mut().flatten() {
                if weight != 1.0 {
                    drop(bucket.memory.f_div_scalar_(weight).map_err(torch)?);
                }
                if scale != 1.0 {
                    drop(bucket.memory.f_mul_scalar_(scale).map_err(torch)?);
                }
            }
            return Ok(());
        }
        // A world of one. Gradients that backward has made may share memory.
        for one in &self.parameters {
            let gradient = one.tensor.grad();
            if gradient.defined() {
                let average = gradient.f_div_scalar(weight).and_then(|it| it.f_mul_scalar(scale));
                let average = average.map_err(torch)?;
                shim::set_gradient(&one.tensor, Some(&average))?;
            }
        }
        Ok(())
    }

    /// What this thread has queued on its current stream of CUDA device `ordinal` comes before the next calls.
    fn note_stream(&mut self, ordinal: u32) -> Result<()> {
        let stream = shim::current_stream(ordinal)?;
        for list in [&mut self.streams, &mut self.ahead] {
            if !list.contains(&stream) {
                list.push(stream);
            }
        }
        Ok(())
    }
}

impl OnDevice {
    /// For these parameters, which must be on the communicator's device, and ranks that may `join` in `group`. `waits`: no call is left behind at
    /// the end of backward.
    pub fn new(
        nccl: &Communicator,
        group: &JoinGroup,
        parameters: &[Named],
        waits: bool,
    ) -> Result<Arc<Self>> {
        let ordinal = nccl.device().ordinal();
        let Some(elsewhere) = parameters.iter().find(|one| index_of(one.tensor.device()) != Some(ordinal))
        else {
            let (buckets, streams, ahead) = Default::default();
            let (parameters, are_placed) = (parameters.to_vec(), false);
            let (low_rank, subgroup) = (None, None);
            let state = State { parameters, buckets, streams, ahead, are_placed, low_rank, subgroup };
            let (nccl, state) = (CommunicatorHandle::new(nccl.clone()), Mutex::new(state));
            let group = group.in_call(Caller::DdpBackward);
            let (compared, bytes) = (ComparedCalls::default(), AtomicU64::new(0));
            return Ok(Arc::new(Self { nccl, group, waits, state, compared, bytes }));
        };
        let (name, place) = (&elsewhere.spec.name, elsewhere.tensor.device());
        Err(Error::invalid_argument(format!(
            "the variable `{name}` is on {place:?}, and the communicator on CUDA device {ordinal}"
        ))
        .with_remedy(format!(
            "make the VarStore on Device::Cuda({ordinal}); for variables that are elsewhere there is Ddp::with_options"
        )))
    }

    /// The ranks of `group` average from now on.
    pub fn move_to(&self, group: &ProcessGroup) {
        if self.nccl.rebind(group) {
            self.compared.forget();
            // A call of the last group may still write their memory, and holds it.
            lock(&self.state).buckets.iter_mut().flatten().for_each(|bucket| bucket.is_abandoned = true);
        }
    }

    /// The ranks of a group to which they have moved connect. All call it together.
    pub fn connect(&self) -> Result<()> {
        self.nccl.connect().map(drop)
    }

    /// The gradients are what they were before this step averaged them: a world of one averages nothing.
    pub fn restore(&self) -> Result<()> {
        let State { parameters, buckets, are_placed, .. } = &mut *lock(&self.state);
        *are_placed = false;
        for bucket in buckets.iter_mut().flatten().filter(|bucket| bucket.kept.is_some()) {
            bucket.renew(parameters)?;
            bucket.take_back()?;
            bucket.place(parameters)?;
        }
        Ok(())
    }

    /// A step begins: what was kept in the last one is not needed any more.
    pub fn begin(&self) {
        let mut state = lock(&self.state);
        state.are_placed = false;
        if self.group.world_size() == WorldSize::ONE {
            state.buckets.clear(); // A rank that is left alone averages nothing any more.
        }
        state.buckets.iter_mut().flatten().for_each(|bucket| bucket.kept = None);
    }

    /// Backward has queued a gradient on this thread's current stream, and leaves it there for now.
    pub fn held(&self) -> Result<()> {
        lock(&self.state).note_stream(self.ordinal())
    }

    /// The gradient of the parameter at `index` is queued on this thread's current stream; false if there is none.
    pub fn is_queued(&self, index: usize) -> Result<bool> {
        let state = &mut *lock(&self.state);
        self.check_place(&state.parameters[index])?;
        let Named { spec, tensor: leaf } = &state.parameters[index];
        let gradient = leaf.grad();
        if !gradient.defined() {
            return Ok(false);
        }
        if !shim::is_plain(&gradient)
            || gradient.kind() != leaf.kind()
            || gradient.size() != leaf.size()
            || gradient.device() != leaf.device()
        {
            return Err(Error::invalid_argument(format!(
                "the gradient of parameter {spec} is sparse, of another type, or on another device"
            ))
            .with_remedy("dense gradients in the type and on the device of their parameter are averaged"));
        }
        state.note_stream(self.ordinal())?;
        Ok(true)
    }

    /// Backward is over, and all buckets are launched: the averages are divided by `weight` and multiplied by `scale`, and what is queued from now on
    /// waits for them.
    pub fn settle(&self, weight: f64, scale: f64) -> Result<()> {
        // This thread's stream waits for the averages, or they are there.
        let (scaled, streams, writes) = {
            let mut state = lock(&self.state);
            let scaled = state.scale(weight, scale);
            // It is written on this thread's stream when what was sent has come back.
            let is_written = |bucket: &Bucket| {
                bucket.compressed.is_some() || bucket.low_rank.is_some() || !bucket.own.is_empty()
            };
            let is_written = state.buckets.iter().flatten().any(is_written);
            let writes = weight != 1.0 || scale != 1.0 || is_written;
            (scaled, std::mem::take(&mut state.streams), writes)
        };
        // Also if that has failed: NCCL may still write to memory that is freed next.
        let ordered = self.order(streams, writes);
        scaled.and(ordered).and_then(|()| self.check())
    }

    /// A step has failed. What is queued from now on, on this thread's stream and on those of backward, waits for the calls that it has made, and for
    /// what this thread has queued.
    pub fn settle_failed(&self) {
        let mut streams = std::mem::take(&mut lock(&self.state).streams);
        if let Ok(here) = shim::current_stream(self.ordinal())
            && !streams.contains(&here)
        {
            streams.push(here);
        }
        // The step's own error is the one that counts.
        let _ordered = self.order(streams, true);
    }

    /// What is queued on `streams` from now on waits for NCCL's calls; and, if this thread's stream `writes` to buckets, for that.
    fn order(&self, streams: Vec<usize>, writes: bool) -> Result<()> {
        let nccl = if self.waits { Vec::new() } else { self.communicators() };
        let here = self.stream_of_thread()?;
        let wait = |raw: usize| {
            // SAFETY: as in `launch`.
            let stream = unsafe { Stream::from_raw(self.nccl.device(), raw) };
            nccl.iter().try_for_each(|nccl| stream.wait_for(nccl.stream()))?;
            if writes && raw != here.as_raw() { stream.wait_for(&here) } else { Ok(()) }
        };
        // An error of one stream leaves out no other one.
        streams.into_iter().map(wait).fold(Ok(()), Result::and)
    }

    /// The failure of a call that nobody has waited for: what has been computed from its memory is worth nothing then.
    pub fn check(&self) -> Result<()> {
        if self.waits {
            return Ok(());
        }
        let failure = self.communicators().iter().find_map(Communicator::failure);
        failure.map_or(Ok(()), Err)
    }

    /// Waits for the calls that have been made so far, and returns the failure of one.
    pub fn await_calls(&self) -> Result<()> {
        if self.waits {
            return Ok(());
        }
        self.communicators().iter().try_for_each(await_calls)
    }

    /// The communicators by which calls of this step may have been made: that of all ranks, and that of a smaller group.
    fn communicators(&self) -> Vec<Communicator> {
        let subgroup = lock(&self.state).subgroup.clone();
        [self.nccl.current(), subgroup.and_then(|subgroup| subgroup.current())]
            .into_iter()
            .flatten()
            .collect()
    }

    /// The communicator of the ranks of `group`, a smaller one, within which buckets are averaged from now on. They make it together, if there is none
    /// yet.
    pub fn within(&self, group: &ProcessGroup) -> Result<Communicator> {
        let last = lock(&self.state).subgroup.as_ref().and_then(|subgroup| subgroup.current());
        self.await_calls_of_left(last.filter(|last| !last.group().is_same(group)))?;
        let subgroup = {
            let State { subgroup, buckets, .. } = &mut *lock(&self.state);
            let subgroup = subgroup.get_or_insert_with(|| Arc::new(self.nccl.subgroup(group)));
            if subgroup.rebind(group) {
                // As in `move_to`.
                buckets.iter_mut().flatten().for_each(|bucket| bucket.is_abandoned = true);
            }
            subgroup.clone()
        };
        subgroup.connect()
    }

    /// Buckets are no longer averaged within a smaller group.
    fn leave_subgroup(&self) -> Result<()> {
        let left = lock(&self.state).subgroup.take();
        self.await_calls_of_left(left.and_then(|left| left.current()))
    }

    /// Waits for the calls of a smaller group that is `left`: nobody would hear later that one has failed.
    fn await_calls_of_left(&self, left: Option<Communicator>) -> Result<()> {
        left.filter(|_| !self.waits).as_ref().map_or(Ok(()), await_calls)
    }

    /// How many buckets have memory.
    #[cfg(test)]
    pub fn bucket_count(&self) -> usize {
        lock(&self.state).buckets.iter().flatten().count()
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// An error if the parameter is no longer what it was when the `Ddp` was made.
    fn check_place(&self, parameter: &Named) -> Result<()> {
        parameter.check_kind()?;
        let (spec, place) = (&parameter.spec, parameter.tensor.device());
        if index_of(place) == Some(self.ordinal()) {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "parameter {spec} is on {place:?} now, and the communicator on CUDA device {}",
            self.ordinal()
        ))
        .with_remedy("move the VarStore before the Ddp is made"))
    }

    /// What this rank's device is called.
    pub fn device_name(&self) -> Result<String> {
        self.nccl.device().name()
    }

    fn ordinal(&self) -> u32 {
        self.nccl.device().ordinal()
    }

    /// This thread's current stream.
    fn stream_of_thread(&self) -> Result<Stream> {
        let raw = shim::current_stream(self.ordinal())?;
        // SAFETY: it is current, and used before this thread returns to the program.
        Ok(unsafe { Stream::from_raw(self.nccl.device(), raw) })
    }
}

/// Waits for what has been called so far, and returns the failure of a call. That of the group alone is none: what was called is done.
fn await_calls(nccl: &Communicator) -> Result<()> {
    let waited = nccl.stream().synchronize(Deadline::after(nccl.timeout()));
    nccl.failure_of_calls().map_or(waited, Err)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of a CUDA device.
fn index_of(device: Device) -> Option<u32> {
    match device {
        Device::Cuda(index) => u32::try_from(index).ok(),
        _ => None,
    }
}
