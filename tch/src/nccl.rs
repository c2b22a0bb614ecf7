//! Gradients that NCCL averages in `.grad`, where backward has left them.
//!
//! 1. A parameter's hook notes the stream on which its gradient is computed. Nobody waits. A gradient that lies in memory of others, or not row by
//!    row, is copied on that stream first, and the copy is `.grad`.
//! 2. When all gradients of a bucket are queued, NCCL's stream is told to wait for those streams, and one group of NCCL's calls averages them in
//!    place. A parameter without a gradient on this rank gets zeros, if parameters may be unused.
//! 3. At the end of backward all these streams, and the one on which the program goes on, are told to wait for NCCL's. No thread waits for the
//!    device: a call that fails later is the error of the next call, and of a save ([`check`](InPlace::check)).
//!
//! Who frees a gradient meanwhile does not free its memory: a call holds it until it is queued, and libtorch then uses the memory again in the
//! order of the stream on which it was taken, which waits by then.
#![allow(unsafe_code)] // NCCL takes addresses.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use half::{bf16, f16};
use phalanx::reducer::hooks::{CommHook, GradBucket, HookState, Pending};
use phalanx::{DType, Error, Rank, ReduceOp, Result};
use phalanx_nccl::{Communicator, DeviceMemory, Element, Stream, Work};
use tch::{Device, Tensor};

use crate::shim;
use crate::tensors::{Named, torch};

/// The most calls that NCCL takes as one are 2048.
const CALLS: usize = 1024;

/// Averages the gradients of a model's parameters, each in its `.grad`.
pub(crate) struct InPlace {
    nccl: Communicator,
    state: Mutex<State>,
    /// The bytes of all gradients that were averaged.
    bytes: AtomicU64,
}

struct State {
    parameters: Vec<Named>,
    /// The streams, as `CUstream`s, that take part in this backward pass.
    streams: Vec<usize>,
    /// Those of them for which NCCL's stream does not wait yet.
    ahead: Vec<usize>,
}

impl State {
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

impl InPlace {
    /// For these parameters, which must be on the communicator's device.
    pub fn new(nccl: &Communicator, parameters: &[Named]) -> Result<Arc<Self>> {
        let ordinal = nccl.device().ordinal();
        let Some(elsewhere) = parameters.iter().find(|one| index_of(one.tensor.device()) != Some(ordinal))
        else {
            let state = State { parameters: parameters.to_vec(), streams: Vec::new(), ahead: Vec::new() };
            return Ok(Arc::new(Self {
                nccl: nccl.clone(),
                state: Mutex::new(state),
                bytes: AtomicU64::new(0),
            }));
        };
        let (name, place) = (&elsewhere.spec.name, elsewhere.tensor.device());
        Err(Error::invalid_argument(format!(
            "the variable `{name}` is on {place:?}, and the communicator on CUDA device {ordinal}"
        ))
        .with_remedy(format!(
            "make the VarStore on Device::Cuda({ordinal}); for variables that are elsewhere there is Ddp::with_options"
        )))
    }

    /// A backward pass begins.
    pub fn begin(&self) {
        let state = &mut *lock(&self.state);
        state.streams.clear();
        state.ahead.clear();
    }

    /// The gradient of the parameter at `index` is queued on this thread's current stream; false if there is none. From here on NCCL may have
    /// it.
    pub fn prepare(&self, index: usize) -> Result<bool> {
        let state = &mut *lock(&self.state);
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
        // The graph may still need memory that it shares, and ranks must agree on the order of elements.
        if !(gradient.is_contiguous() && shim::may_become(&gradient, leaf)) {
            let copy = tch::no_grad(|| {
                let mut copy = Tensor::f_empty(leaf.size(), (leaf.kind(), leaf.device()))?;
                copy.f_copy_(&gradient).map(|_| copy)
            });
            shim::set_gradient(leaf, Some(&copy.map_err(torch)?))?;
        }
        state.note_stream(self.ordinal())?;
        Ok(true)
    }

    /// Backward is over, and all buckets are launched: what is queued from now on waits for the averages.
    pub fn settle(&self) -> Result<()> {
        for raw in std::mem::take(&mut lock(&self.state).streams) {
            // SAFETY: as in `launch`.
            let stream = unsafe { Stream::from_raw(self.nccl.device(), raw) };
            stream.wait_for(self.nccl.stream())?;
        }
        self.check()
    }

    /// The failure of a call, also of one that nobody has waited for: what has been computed from its memory is worth nothing then.
    pub fn check(&self) -> Result<()> {
        self.nccl.failure().map_or(Ok(()), Err)
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn ordinal(&self) -> u32 {
        self.nccl.device().ordinal()
    }

    /// Queues the averaging of the gradients of `parameters`, which are of type `T`.
    fn launch<T: Element>(&self, parameters: &[usize]) -> Result<Vec<Work<Vec<Lent<T>>>>> {
        let mut lent = Vec::with_capacity(parameters.len());
        let state = &mut *lock(&self.state);
        for &index in parameters {
            let leaf = state.parameters[index].tensor.shallow_clone();
            if leaf.numel() == 0 {
                continue; // It has no address.
            }
            let mut gradient = leaf.grad();
            if !gradient.defined() {
                gradient = tch::no_grad(|| Tensor::f_zeros(leaf.size(), (leaf.kind(), leaf.device())))
                    .map_err(torch)?;
                shim::set_gradient(&leaf, Some(&gradient))?;
                state.note_stream(self.ordinal())?;
            }
            // Since its hook nobody but the program can have changed `.grad`.
            if !(gradient.is_contiguous() && shim::may_become(&gradient, &leaf)) {
                let spec = &state.parameters[index].spec;
                let cause = format!(
                    "in backward, before it was averaged, the gradient of parameter {spec} was replaced, or a view of it was made"
                );
                return Err(Error::invalid_argument(cause).with_remedy("look at gradients after backward"));
            }
            lent.push(Lent::new(gradient, self.nccl.device())?);
        }
        for raw in std::mem::take(&mut state.ahead) {
            // SAFETY: it was a thread's current stream in this backward pass. libtorch never destroys its own; a program that makes
            // another one current keeps it as long as it has work on it, and so until backward is over.
            self.nccl.after(&unsafe { Stream::from_raw(self.nccl.device(), raw) })?;
        }
        let mut works = Vec::new();
        let mut lent = lent.into_iter().peekable();
        while lent.peek().is_some() {
            let mut calls = self.nccl.group_calls();
            for one in lent.by_ref().take(CALLS) {
                self.bytes.fetch_add((one.len * size_of::<T>()) as u64, Ordering::Relaxed);
                calls = calls.all_reduce(one, ReduceOp::Avg);
            }
            works.push(calls.launch()?);
        }
        Ok(works)
    }

    fn average<T: Element>(self: &Arc<Self>, bucket: GradBucket) -> Result<Pending> {
        let parameters: Vec<usize> = bucket.gradients.iter().map(|place| place.parameter).collect();
        let works = Arc::new(Mutex::new(self.launch::<T>(&parameters)?));
        let (this, under_way) = (self.clone(), works.clone());
        let is_completed = move || lock(&under_way).iter().all(Work::is_completed);
        Ok(Pending::elsewhere(is_completed, move || {
            let raw = shim::current_stream(this.ordinal())?;
            // SAFETY: as in `launch`.
            let stream = unsafe { Stream::from_raw(this.nccl.device(), raw) };
            for work in std::mem::take(&mut *lock(&works)) {
                drop(work.order(&stream)?);
            }
            Ok(bucket.buffer)
        }))
    }
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

/// A gradient while NCCL has it.
struct Lent<T> {
    /// Keeps the memory.
    _gradient: Tensor,
    device: phalanx_nccl::Device,
    pointer: u64,
    len: usize,
    _elements: PhantomData<fn() -> T>,
}

impl<T: Element> Lent<T> {
    fn new(gradient: Tensor, device: &phalanx_nccl::Device) -> Result<Self> {
        let (pointer, bytes) = shim::device_memory(&gradient)?;
        let len = bytes / size_of::<T>();
        if len != gradient.numel() {
            return Err(Error::invalid_argument("a gradient has another type than its parameter"));
        }
        Ok(Self { _gradient: gradient, device: device.clone(), pointer, len, _elements: PhantomData })
    }
}

// SAFETY: `shim::device_memory` has the address and the size of a tensor that is held as long as this is, and that lies on the communicator's
// device row by row, as `prepare` and `launch` have checked. What else uses the elements is queued on streams that NCCL's has waited for, or that
// wait for NCCL's at the end of backward (`settle`).
unsafe impl<T: Element> DeviceMemory for Lent<T> {
    type Element = T;

    fn device(&self) -> &phalanx_nccl::Device {
        &self.device
    }

    fn pointer(&self) -> u64 {
        self.pointer
    }

    fn len(&self) -> usize {
        self.len
    }
}

/// The hook of a reducer whose gradients [`InPlace`] averages.
pub(crate) struct Hook(pub Arc<InPlace>);

impl CommHook for Hook {
    fn describe(&self) -> String {
        "NCCL".into()
    }

    fn start(&mut self, _: &dyn phalanx::Communicator, bucket: GradBucket) -> Result<Pending> {
        match bucket.buffer.dtype() {
            DType::F32 => self.0.average::<f32>(bucket),
            DType::F64 => self.0.average::<f64>(bucket),
            DType::F16 => self.0.average::<f16>(bucket),
            DType::BF16 => self.0.average::<bf16>(bucket),
            other => Err(Error::invalid_argument(format!("gradients of type {other} are not averaged"))),
        }
    }

    fn adopt(&mut self, _: &dyn phalanx::Communicator, _: Rank) -> Result<()> {
        Ok(()) // It has no state.
    }

    fn state(&self) -> HookState {
        HookState::default()
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        state.nothing()
    }

    fn makes_zeros(&self) -> bool {
        true
    }
}
