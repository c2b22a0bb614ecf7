//! Gradients that NCCL averages on the device, in buckets of its memory.
//!
//! 1. A parameter's hook runs when the device has been given the work for its gradient. The gradient is kept as it is. Nobody waits.
//! 2. When all gradients of a bucket are there, the device is told to copy them into one piece of memory, which is new in each step and has zeros
//!    for a parameter that has no gradient on this rank. A fence goes behind that into the device's queue.
//! 3. A thread of its own waits for the fences, one after the other, and makes a call of NCCL's for each bucket: CubeCL shows its streams to
//!    nobody, so that NCCL's stream cannot wait for them.
//! 4. At the end of backward the program's thread waits for the calls. The averages are places in the buckets.
//!
//! In a weighted step the gradients are those of the loss times this rank's weight. The weights are averaged by the host's group meanwhile, and
//! the averages of gradients are divided by theirs. With [`Compressed`](phalanx::reducer::hooks::Compressed) a bucket is rounded before its
//! fence, and widened when it is back; with [`PowerSgd`](phalanx::reducer::hooks::PowerSgd) two messages of its own are sent ([`power_sgd`]); with [`PostLocalSgd`](phalanx::reducer::hooks::PostLocalSgd) nothing is after the
//! first steps, or only among the ranks of a smaller group, which have a communicator of their own; and a hook of the program's says by itself what is ([`device_hook`]).
//!
//! Inside of `join` each call is announced through the host's group before it is made, and a rank that has no data makes it with zeros
//! ([`Elsewhere`]): so these calls have one order on all ranks. It waits for each of them, and so has the memory of one bucket at a time.
//!
//! A step of an elastic job that can be done again keeps its gradients, too, until the next step: the survivors of a death copy them into other
//! buckets, and average these by a communicator of their own.
#![allow(unsafe_code)] // NCCL takes addresses.

mod device_hook;
mod hook;
mod power_sgd;

use std::any::Any;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread;
use std::time::Duration;

use burn::backend::Cube;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType as BurnDType, Device, FloatDType, Shape, Slice, Tensor, bf16, f16};
use burn_cubecl::cubecl::cuda::CudaRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use cubecl_runtime::runtime::Runtime;
use parking_lot::Mutex;
use phalanx::adapter::{ComparedCalls, Comparison, Elsewhere, ElsewhereCall, ElsewhereOp, JoinGroup};
use phalanx::reducer::hooks::{GradBucket, GradientPlace, Pending, PowerSgdOptions};
use phalanx::reducer::{ParameterSpec, Reducer, ReducerOptions};
use phalanx::{Caller, DType, Error, ProcessGroup, ReduceOp, Result, WorldSize};
use phalanx_nccl::{CommunicatorHandle, DeviceMemory, DeviceSlice, Element, Work};

pub use self::device_hook::{DeviceBucket, DeviceHook, DeviceMessage};
pub(crate) use self::hook::Hook;
use self::power_sgd::LowRank;
use crate::read_back::{Computed, Lost, ReadBack};
use crate::tensor_bytes::dtype;

/// A gradient in a device's memory.
pub(crate) struct Resident(CubeTensor);

impl Resident {
    pub fn of(tensor: FloatTensor<Cube>) -> Self {
        Self(Cube::computed(tensor))
    }

    /// An error if it is not the gradient of `spec`.
    fn check(self, spec: &ParameterSpec) -> Result<CubeTensor> {
        let (own, elements) = (self.0.dtype, self.0.meta.shape().num_elements());
        if dtype(own)? == spec.dtype && elements == spec.elements() && own != BurnDType::Flex32 {
            return Ok(self.0);
        }
        Err(Error::invalid_argument(format!("the gradient of {spec} has {elements} x {own:?}")))
    }
}

/// Averages the gradients of one model's parameters.
pub(crate) struct OnDevice {
    nccl: CommunicatorHandle,
    /// Ranks without data hear of calls by it.
    group: JoinGroup,
    device: CubeDevice,
    state: Mutex<State>,
    /// To the thread that makes NCCL's calls.
    calls: Sender<Call>,
    /// What the program's hook has sent of each bucket last.
    compared: ComparedCalls,
    /// The bytes of all gradients that were averaged.
    bytes: AtomicU64,
}

struct State {
    /// The sums of gradients that are to be averaged in a later backward pass, by the index of the parameter.
    held: Vec<Option<CubeTensor>>,
    /// The gradients of this backward pass, and then their averages, by the index of the parameter.
    gradients: Vec<Option<CubeTensor>>,
    /// What launched buckets had before they were averaged, if that may be averaged again, by the number of the bucket: parameters and gradients.
    kept: BTreeMap<usize, Vec<(usize, Option<CubeTensor>)>>,
    /// What PowerSGD keeps, if that averages.
    low_rank: Option<LowRank>,
    /// The smaller group within which `PostLocalSgd` averages, if there is one.
    subgroup: Option<Arc<CommunicatorHandle>>,
}

impl State {
    /// This rank's gradients of the bucket of this number, which are those of these `parameters`. If it is kept, they are the same ones when it
    /// comes again.
    fn own(
        &mut self,
        bucket: usize,
        parameters: impl Iterator<Item = usize>,
        keeps: bool,
    ) -> Vec<Option<CubeTensor>> {
        let Self { gradients, kept, .. } = self;
        let own = parameters.map(|parameter| (parameter, gradients[parameter].take()));
        if !keeps {
            return own.map(|(_, gradient)| gradient).collect();
        }
        let kept = kept.entry(bucket).or_insert_with(|| own.collect());
        kept.iter().map(|(_, gradient)| gradient.clone()).collect()
    }

    fn restore(&mut self) {
        for (parameter, gradient) in self.kept.values().flatten() {
            self.gradients[*parameter] = gradient.clone();
        }
    }
}

/// Waits for a fence, and makes a call of NCCL's.
type Call = Box<dyn FnOnce() + Send>;

impl OnDevice {
    /// For a model on `device`, and ranks that may `join` in `group`. Also gives the reducer that says when what is averaged.
    pub fn new(
        nccl: &phalanx_nccl::Communicator,
        device: &Device,
        group: &JoinGroup,
        parameters: Vec<ParameterSpec>,
        options: ReducerOptions,
    ) -> Result<(Arc<Self>, Reducer)> {
        let device = check(device, nccl.device())?;
        let (calls, queue) = channel::<Call>();
        // It ends when this `OnDevice` is dropped.
        let thread = thread::Builder::new().name("phalanx-nccl-calls".into());
        let started = thread.spawn(move || queue.into_iter().for_each(|call| call()));
        drop(started.map_err(|cause| Error::aborted(format!("no thread for NCCL's calls: {cause}")))?);
        let none = || parameters.iter().map(|_| None).collect();
        let (kept, low_rank, subgroup) = (BTreeMap::new(), None, None);
        let state = Mutex::new(State { held: none(), gradients: none(), kept, low_rank, subgroup });
        let nccl = CommunicatorHandle::new(nccl.clone());
        let in_call = group.in_call(Caller::DdpBackward);
        let (compared, bytes) = (ComparedCalls::default(), AtomicU64::new(0));
        let this = Self { nccl, group: in_call, device, state, calls, compared, bytes };
        let this = Arc::new(this);
        let reducer = Reducer::elsewhere(
            Arc::new(group.clone()),
            parameters,
            options,
            Box::new(Hook::new(this.clone())),
        )?;
        Ok((this, reducer))
    }

    /// Keeps the gradient of a parameter for this backward pass, with what is held for it.
    pub fn put(&self, index: usize, spec: &ParameterSpec, gradient: Resident) -> Result<()> {
        self.hold(index, spec, gradient)?;
        let State { held, gradients, .. } = &mut *self.state.lock();
        gradients[index] = held[index].take();
        Ok(())
    }

    /// What is held for a parameter belongs to this backward pass from now on; false if nothing is.
    pub fn put_held(&self, index: usize) -> bool {
        let State { held, gradients, .. } = &mut *self.state.lock();
        gradients[index] = held[index].take();
        gradients[index].is_some()
    }

    /// Adds a gradient to what is held for its parameter.
    pub fn hold(&self, index: usize, spec: &ParameterSpec, gradient: Resident) -> Result<()> {
        let gradient = gradient.check(spec)?;
        let held = &mut self.state.lock().held[index];
        *held = Some(match held.take() {
            Some(sum) => CubeBackend::float_add(sum, gradient),
            None => gradient,
        });
        Ok(())
    }

    /// What is held belongs to this backward pass from now on: the indices of its parameters.
    pub fn hand_over(&self) -> Vec<usize> {
        let State { held, gradients, .. } = &mut *self.state.lock();
        let mut indices = Vec::new();
        for (index, (held, gradient)) in held.iter_mut().zip(gradients).enumerate() {
            if let Some(sum) = held.take() {
                *gradient = Some(sum);
                indices.push(index);
            }
        }
        indices
    }

    /// Drops what the last pass has left.
    pub fn clear(&self) {
        let mut state = self.state.lock();
        state.gradients.fill_with(|| None);
        state.kept.clear();
    }

    /// By which communicator the calls are made.
    pub fn nccl(&self) -> &CommunicatorHandle {
        &self.nccl
    }

    /// The ranks of `group` average from now on.
    pub fn move_to(&self, group: &ProcessGroup) {
        if self.nccl.rebind(group) {
            self.compared.forget();
        }
    }

    /// Drops what is held.
    pub fn drop_held(&self) {
        self.state.lock().held.fill_with(|| None);
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn take(&self, index: usize) -> Option<CubeTensor> {
        self.state.lock().gradients.get_mut(index).and_then(Option::take)
    }

    /// The communicator of the ranks of `group`, a smaller one, within which buckets are averaged from now on. They make it together, if there is none
    /// yet.
    pub fn within(&self, group: &ProcessGroup) -> Result<phalanx_nccl::Communicator> {
        let subgroup = {
            let subgroup = &mut self.state.lock().subgroup;
            subgroup.get_or_insert_with(|| Arc::new(self.nccl.subgroup(group))).clone()
        };
        subgroup.rebind(group);
        subgroup.connect()
    }

    /// Starts to average a bucket by `nccl`, whose gradients are of type `T`, and of Burn's type `dtype`.
    fn average<T: Element>(
        self: &Arc<Self>,
        nccl: phalanx_nccl::Communicator,
        bucket: GradBucket,
        (dtype, compressed): (BurnDType, Option<FloatDType>),
    ) -> Result<Pending> {
        let own =
            self.own(&bucket).into_iter().zip(bucket.gradients.iter().map(|place| place.elements.len()));
        let mut memory = BucketMemory::of(own.collect(), &self.device, dtype);
        if memory.places.iter().all(Range::is_empty) {
            self.keep(&bucket.gradients, &memory);
            return Ok(Pending::ready(bucket.buffer)); // It has no address.
        }
        let op = match compressed {
            Some(to) => {
                memory.compress(to, nccl.world_size());
                ReduceOp::Sum
            }
            None => ReduceOp::Avg,
        };
        let (timeout, stage) = (nccl.timeout(), self.send::<T>(nccl, &memory, op)?);
        let this = self.clone();
        Ok(stage.then(timeout, None, move || {
            if compressed.is_some() {
                memory.widen(dtype);
            }
            this.keep(&bucket.gradients, &memory);
            Ok(Pending::ready(bucket.buffer))
        }))
    }

    /// Starts to average a bucket of f32 whose matrices are sent as products, in the step after so many others.
    fn average_products(self: &Arc<Self>, bucket: GradBucket, steps: u64) -> Result<Pending> {
        let nccl = self.nccl.connect()?;
        let own = self.own(&bucket);
        let begin = |low_rank: &mut LowRank| low_rank.first(&bucket.gradients, own, &self.device, steps);
        let (mut matrices, first) = self.low_rank(begin)?;
        let (timeout, stage) = (nccl.timeout(), self.send::<f32>(nccl, &first, ReduceOp::Avg)?);
        let this = self.clone();
        Ok(stage.then(timeout, None, move || {
            let nccl = this.nccl.connect()?;
            let second = this.low_rank(|low_rank| low_rank.second(&mut matrices, &first, &this.device))?;
            let stage = this.send::<f32>(nccl, &second, ReduceOp::Avg)?;
            let all = this.clone();
            Ok(stage.then(timeout, None, move || {
                let averages =
                    all.low_rank(|low_rank| low_rank.finish(matrices, &bucket.gradients, (&first, &second)))?;
                let mut state = all.state.lock();
                for (parameter, average) in averages {
                    state.gradients[parameter] = Some(average);
                }
                drop(state);
                Ok(Pending::ready(bucket.buffer))
            }))
        }))
    }

    /// The gradients of a bucket stay as they are. One that is not there has zeros.
    fn leave(&self, bucket: GradBucket) -> Result<Pending> {
        let dtype = element_type(bucket.buffer.dtype())?;
        let own = self.own(&bucket);
        let mut state = self.state.lock();
        for (place, own) in bucket.gradients.iter().zip(own) {
            let zeros = || {
                let shape = Shape::from(place.shape.clone());
                CubeBackend::float_zeros(shape, &self.device, dtype.into())
            };
            state.gradients[place.parameter] = Some(own.unwrap_or_else(zeros));
        }
        drop(state);
        Ok(Pending::ready(bucket.buffer))
    }

    /// What PowerSGD keeps, for `look`.
    fn low_rank<T>(&self, look: impl FnOnce(&mut LowRank) -> Result<T>) -> Result<T> {
        let mut state = self.state.lock();
        let low_rank = state.low_rank.as_mut();
        look(low_rank.ok_or_else(|| Error::aborted("a bucket of PowerSGD, which does not average"))?)
    }

    /// Matrices of f32 are sent as products with these options from now on, or all buckets as they are; and not within a smaller group.
    fn approximate(&self, options: Option<PowerSgdOptions>) {
        let left = {
            let mut state = self.state.lock();
            state.low_rank = options.map(LowRank::new);
            state.subgroup.take()
        };
        drop(left); // The last handle waits for the end of its communicator.
        // Another hook sends something else.
        self.compared.forget();
    }

    /// What this rank's device is called.
    pub fn device_name(&self) -> Result<String> {
        self.nccl.device().name()
    }

    /// Has NCCL combine what `memory` has, when the device has computed it. Inside of `join` ranks without data hear of it.
    fn send<T: Element>(
        &self,
        nccl: phalanx_nccl::Communicator,
        memory: &BucketMemory,
        op: ReduceOp,
    ) -> Result<Stage<DeviceSlice<T>>> {
        let lent = memory.lend::<T>(self.nccl.device())?;
        let elements: usize = memory.places.iter().map(Range::len).sum();
        self.bytes.fetch_add((elements * size_of::<T>()) as u64, Ordering::Relaxed);
        let dtype = dtype(memory.tensor.dtype)?;
        let call = ElsewhereCall { op: ElsewhereOp::AllReduce(op), dtype, elements: lent.len() };
        self.group.announce_elsewhere(self, call)?;
        self.launch(nccl, &memory.tensor, move |nccl| nccl.all_reduce_async(lent, op))
    }

    /// Has NCCL gather what is `sent` in `gathered`, which has room for all ranks' parts. Inside of `join` ranks without data hear of it.
    fn gather<T: Element>(
        &self,
        nccl: phalanx_nccl::Communicator,
        sent: &CubeTensor,
        gathered: &CubeTensor,
    ) -> Result<Stage<(DeviceSlice<T>, DeviceSlice<T>)>> {
        let device = self.nccl.device();
        let (from, to) = (lend_all::<T>(sent, device)?, lend_all::<T>(gathered, device)?);
        // It moves half of what an all_reduce of as many elements does.
        self.bytes.fetch_add((to.len() * size_of::<T>()) as u64 / 2, Ordering::Relaxed);
        let dtype = dtype(sent.dtype)?;
        let call = ElsewhereCall { op: ElsewhereOp::AllGather, dtype, elements: from.len() };
        self.group.announce_elsewhere(self, call)?;
        self.launch(nccl, gathered, move |nccl| nccl.all_gather_async(from, to))
    }

    /// Has `call` be made when the device has computed all that this thread has given it, and `tensor`.
    fn launch<M: Send + 'static>(
        &self,
        nccl: phalanx_nccl::Communicator,
        tensor: &CubeTensor,
        call: impl FnOnce(&phalanx_nccl::Communicator) -> Result<Work<M>> + Send + 'static,
    ) -> Result<Stage<M>> {
        // Here and not on the other thread: CubeCL's streams belong to threads, and the fence comes behind all that this one has queued.
        let fence = ReadBack::fence(tensor);
        let (launched, launching) = channel();
        let call = move || {
            let computed = fence.wait(|_| ()).map_err(|lost| lost.of("a bucket of gradients"));
            let work = computed.and_then(|()| call(&nccl));
            drop(nccl); // So that the last one is the waiting thread's, unless it has gone to another group.
            // Nobody waits for it after a failure.
            let _kept = launched.send(work);
        };
        self.calls.send(Box::new(call)).map_err(|_| gone())?;
        Ok(Stage::Computing(launching))
    }

    /// Makes a call of a rank with data, on this one, which has none, and waits for it.
    fn answer_in<T: Element>(&self, dtype: BurnDType, op: ElsewhereOp, elements: usize) -> Result<()> {
        let (nccl, device) = (self.nccl.connect()?, self.nccl.device());
        let (timeout, ranks) = (nccl.timeout(), nccl.world_size().count());
        let zeros =
            |elements: usize| CubeBackend::float_zeros(Shape::new([elements]), &self.device, dtype.into());
        match op {
            ElsewhereOp::AllReduce(op) => {
                let zeros = zeros(elements);
                let lent = lend_all::<T>(&zeros, device)?;
                self.launch(nccl, &zeros, move |nccl| nccl.all_reduce_async(lent, op))?.wait(timeout)
            }
            ElsewhereOp::AllGather => {
                let (sent, gathered) = (zeros(elements), zeros(elements.saturating_mul(ranks)));
                let (from, to) = (lend_all::<T>(&sent, device)?, lend_all::<T>(&gathered, device)?);
                self.launch(nccl, &gathered, move |nccl| nccl.all_gather_async(from, to))?.wait(timeout)
            }
        }
    }

    /// This rank's gradients of a bucket.
    fn own(&self, bucket: &GradBucket) -> Vec<Option<CubeTensor>> {
        let parameters = bucket.gradients.iter().map(|place| place.parameter);
        self.state.lock().own(bucket.index, parameters, bucket.keeps)
    }

    /// The gradients are what they were before this step averaged them: a world of one averages nothing.
    pub fn restore(&self) {
        self.state.lock().restore();
    }

    /// What lies in a bucket are the gradients from now on.
    fn keep(&self, gradients: &[GradientPlace], memory: &BucketMemory) {
        let mut state = self.state.lock();
        for (place, range) in gradients.iter().zip(&memory.places) {
            state.gradients[place.parameter] = Some(memory.part(range, &place.shape));
        }
    }
}

impl Elsewhere for OnDevice {
    fn answer(&self, ElsewhereCall { op, dtype, elements }: ElsewhereCall) -> Result<()> {
        match dtype {
            DType::F32 => self.answer_in::<f32>(BurnDType::F32, op, elements),
            DType::F64 => self.answer_in::<f64>(BurnDType::F64, op, elements),
            DType::F16 => self.answer_in::<f16>(BurnDType::F16, op, elements),
            DType::BF16 => self.answer_in::<bf16>(BurnDType::BF16, op, elements),
            DType::I64 | DType::I32 | DType::I8 | DType::U8 | DType::Bool => {
                Err(Error::invalid_argument(format!("gradients of type {dtype} are not averaged")))
            }
        }
    }
}

/// How far the averaging of a bucket is, whose call has the memory `M`.
enum Stage<M: Send + 'static> {
    /// The device computes it, or the thread has not come to it.
    Computing(Receiver<Result<Work<M>>>),
    Launched(Result<Work<M>>),
    Over,
}

impl<M: Send + 'static> Stage<M> {
    fn is_completed(&mut self) -> bool {
        if let Self::Computing(launching) = self {
            match launching.try_recv() {
                Ok(work) => *self = Self::Launched(work),
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => return true,
            }
        }
        !matches!(self, Self::Launched(Ok(work)) if !work.is_completed())
    }

    /// What `then` does comes behind it, and behind `comparison`, if there is one.
    fn then(
        self,
        timeout: Duration,
        comparison: Option<Comparison>,
        then: impl FnOnce() -> Result<Pending> + Send + 'static,
    ) -> Pending {
        let stage = Arc::new(Mutex::new(self));
        let under_way = stage.clone();
        Pending::elsewhere_then(
            move || under_way.lock().is_completed(),
            move || {
                comparison.map_or(Ok(()), Comparison::wait).map_err(of_hook)?;
                let stage = std::mem::replace(&mut *stage.lock(), Self::Over);
                stage.wait(timeout)?;
                then()
            },
        )
    }

    /// Waits until it is averaged: for the device as long as `timeout`, and then for NCCL with the call's own.
    fn wait(self, timeout: Duration) -> Result<()> {
        let work = match self {
            Self::Computing(launching) => launching.recv_timeout(timeout).map_err(|cause| match cause {
                RecvTimeoutError::Disconnected => gone(),
                RecvTimeoutError::Timeout => Error::timeout(format!(
                    "the device has not computed a bucket of gradients, or NCCL has not taken its call, within {} s",
                    timeout.as_secs_f64()
                ))
                .with_remedy(
                    "see the device's own messages; where a step takes longer, the group needs a longer time-out",
                ),
            })?,
            Self::Launched(work) => work,
            Self::Over => return Ok(()),
        };
        work?.wait().map(drop)
    }
}

/// A difference between ranks, as one of what their hooks send.
fn of_hook(error: Error) -> Error {
    if !error.is_mismatch() {
        return error;
    }
    error.with_remedy(
        "a DeviceHook sends of each bucket as many elements, of one type, in one way on every rank: see what its `send` depends on",
    )
}

fn gone() -> Error {
    Error::aborted("the thread that makes NCCL's calls has panicked, as its message on stderr says")
}

/// The gradients of a bucket, in one piece of the device's memory.
pub(crate) struct BucketMemory {
    pub tensor: CubeTensor,
    /// The elements of each gradient.
    pub places: Vec<Range<usize>>,
    /// A gradient begins at a multiple of so many elements, where CubeCL's kernels can begin.
    step: usize,
}

impl BucketMemory {
    /// Has `device` copy the gradients, each of so many elements. One that is not there has zeros.
    pub fn of(gradients: Vec<(Option<CubeTensor>, usize)>, device: &CubeDevice, dtype: BurnDType) -> Self {
        let alignment = device.client().properties().memory.alignment as usize;
        let (mut end, step) = (0usize, alignment.div_ceil(dtype.size()).max(1));
        let place = |&(_, elements): &(_, usize)| {
            let from = end;
            end = (from + elements).next_multiple_of(step);
            from..from + elements
        };
        let places: Vec<_> = gradients.iter().map(place).collect();
        let mut tensor = CubeBackend::float_zeros(Shape::new([end]), device, dtype.into());
        for ((gradient, elements), place) in gradients.into_iter().zip(&places) {
            if let Some(gradient) = gradient.filter(|_| elements > 0) {
                let row = CubeBackend::float_reshape(gradient, Shape::new([elements]));
                tensor = CubeBackend::float_slice_assign(tensor, &[Slice::from(place.clone())], row);
            }
        }
        Self { tensor, places, step }
    }

    /// Has the device divide it by the number of `ranks` and round it to `to`: the sum over ranks is the average.
    fn compress(&mut self, to: FloatDType, ranks: WorldSize) {
        let factor = f64::from(1.0 / ranks.get() as f32);
        let scaled = CubeBackend::float_mul_scalar(self.tensor.clone(), factor.into());
        self.tensor = CubeBackend::float_cast(scaled, to);
    }

    /// Has the device widen it to `dtype`.
    fn widen(&mut self, dtype: BurnDType) {
        self.tensor = CubeBackend::float_cast(self.tensor.clone(), dtype.into());
    }

    /// The tensor of this shape whose elements are those in `range`.
    pub fn part(&self, range: &Range<usize>, shape: &[usize]) -> CubeTensor {
        let (whole, shape) = (&self.tensor, Shape::from(shape.to_vec()));
        if range.is_empty() {
            return CubeBackend::float_zeros(shape, &whole.device, whole.dtype.into());
        }
        let end = range.end.next_multiple_of(self.step).min(whole.meta.shape().num_elements());
        let [before, after] = [range.start, whole.meta.shape().num_elements() - end]
            .map(|count| (count * whole.dtype.size()) as u64);
        let handle = whole.handle.clone().offset_start(before).offset_end(after);
        CubeTensor::new_contiguous(whole.client.clone(), whole.device.clone(), shape, handle, whole.dtype)
    }

    /// Its memory for NCCL, which holds it.
    pub fn lend<T: Element>(&self, device: &phalanx_nccl::Device) -> Result<DeviceSlice<T>> {
        lend_all(&self.tensor, device)
    }
}

/// The bytes of a tensor, which lies row by row, for a copy to another device, or from one, which holds them. Nobody else writes them until the copy
/// is made, and nobody reads them that it writes.
pub(crate) fn lend_bytes(tensor: &CubeTensor, device: &phalanx_nccl::Device) -> Result<DeviceSlice<u8>> {
    lend_all(tensor, device)
}

/// All elements of a tensor for NCCL, which holds them. They are of type `T`, or of any type if that is `u8`; they lie row by row, and nobody
/// else uses them until the call is done.
fn lend_all<T: Element>(tensor: &CubeTensor, device: &phalanx_nccl::Device) -> Result<DeviceSlice<T>> {
    let bytes = tensor.meta.shape().num_elements() * tensor.dtype.size();
    let len = bytes / size_of::<T>();
    let (pointer, held) = lend(tensor, device)?;
    // SAFETY: CubeCL neither frees nor moves memory that is held, and knows that it is: `pointer` is its address, which the driver has said
    // to be the device's, and it has so many bytes, as `lend` has checked. Nothing uses them until the call is done: it
    // is made when the device has done all that was queued before, the fence has been waited for; parts of a bucket, and what is gathered, are given out
    // when it is over, zeros never, and what a copy is made to when it is made. What a copy is made of is read meanwhile, by others too, and not written:
    // CubeCL writes in place only to memory of which there is one handle, and the call has another.
    Ok(unsafe { DeviceSlice::from_raw(device, pointer, len) }.keeping((held, tensor.clone())))
}

type Held = Box<dyn Any + Send>;

/// The address of a tensor's memory, with the number of its bytes, and what keeps it there; None if CubeCL knows none that can be CUDA's.
fn address(tensor: &CubeTensor) -> Result<Option<(u64, u64, Held)>> {
    let (client, handle) = (&tensor.client, tensor.handle.clone());
    let lost = |cause| Lost::by(cause).of("a tensor that NCCL moves");
    Ok(Some(match &tensor.device {
        CubeDevice::Cuda(_) => {
            let memory = client.get_resource::<<CudaRuntime as Runtime>::Server>(handle).map_err(lost)?;
            (memory.resource().ptr, memory.resource().size, Box::new(memory))
        }
        #[cfg(feature = "cpu")]
        CubeDevice::Cpu(_) => {
            use burn_cubecl::cubecl::cpu::CpuRuntime;
            let memory = client.get_resource::<<CpuRuntime as Runtime>::Server>(handle).map_err(lost)?;
            let (first, size) = memory.resource().get_write_ptr_and_length();
            (first.expose_provenance() as u64, size as u64, Box::new(memory))
        }
        _ => return Ok(None),
    }))
}

/// The address of a tensor in the memory of `device`, and what keeps it there.
fn lend(tensor: &CubeTensor, device: &phalanx_nccl::Device) -> Result<(u64, Held)> {
    let Some((pointer, size, held)) = address(tensor)? else { return Err(not_on(device)) };
    if size < (tensor.meta.shape().num_elements() * tensor.dtype.size()) as u64 {
        return Err(Error::invalid_argument("a tensor has less memory than elements"));
    }
    // An address that is none of the device's would be its end.
    if !device.holds(pointer)? {
        return Err(not_on(device));
    }
    Ok((pointer, held))
}

fn not_on(device: &phalanx_nccl::Device) -> Error {
    Error::invalid_argument(format!("the model is not in the memory of CUDA device {}", device.ordinal()))
        .with_remedy(format!(
            "make it on Device::cuda({0}), or the communicator for the model's device; models that are elsewhere: Ddp::new",
            device.ordinal()
        ))
}

/// The type of gradients that are averaged.
fn element_type(dtype: DType) -> Result<BurnDType> {
    match dtype {
        DType::F32 => Ok(BurnDType::F32),
        DType::F64 => Ok(BurnDType::F64),
        DType::F16 => Ok(BurnDType::F16),
        DType::BF16 => Ok(BurnDType::BF16),
        DType::I64 | DType::I32 | DType::I8 | DType::U8 | DType::Bool => {
            Err(Error::invalid_argument(format!("gradients of type {dtype} are not averaged")))
        }
    }
}

/// The device of CubeCL's that `device` is; an error if its tensors are not in the memory of the communicator's device.
pub(crate) fn check(device: &Device, cuda: &phalanx_nccl::Device) -> Result<CubeDevice> {
    let probe = Tensor::<1>::zeros([1], &device.clone().inner()).try_into_primitive::<Cube>();
    let probe = Cube::computed(probe.map_err(|_| not_on(cuda))?);
    drop(lend(&probe, cuda)?);
    Ok(probe.device.clone())
}

/// The averages of `model`'s parameters, by the ids of these, whose indices are `indices`, in a world of `ranks`, times `scale`.
pub(crate) fn averages<M: Module>(
    model: &M,
    reducer: &Reducer,
    (on_device, ranks, scale): (&OnDevice, WorldSize, f64),
    indices: &HashMap<ParamId, usize>,
) -> Result<GradientsParams> {
    let (gradients, seen) = (Ok(GradientsParams::new()), HashSet::new());
    let mut averages = Averages { reducer, on_device, ranks, scale, indices, seen, gradients };
    model.visit(&mut averages);
    averages.gradients
}

struct Averages<'a> {
    reducer: &'a Reducer,
    on_device: &'a OnDevice,
    ranks: WorldSize,
    scale: f64,
    indices: &'a HashMap<ParamId, usize>,
    /// A parameter that is used in several places has one gradient.
    seen: HashSet<ParamId>,
    gradients: Result<GradientsParams>,
}

impl Averages<'_> {
    /// None if no rank had a gradient for the parameter, and there are only zeros.
    fn take<const D: usize>(&self, index: usize, param: &Param<Tensor<D>>) -> Result<Option<Tensor<D>>> {
        if !self.reducer.has_average(index)? {
            return Ok(None);
        }
        match self.on_device.take(index) {
            Some(average) => {
                let average = Tensor::from_primitive::<Cube>(Cube::stored(average));
                let (weight, scale) = (self.reducer.average_weight(), self.scale);
                let average = if weight == 1.0 { average } else { average / weight };
                Ok(Some(if scale == 1.0 { average } else { average * scale }))
            }
            // Ranks that are gone used it, and no bucket has zeros for it.
            None if self.ranks == WorldSize::ONE => Ok(Some(param.val().inner().zeros_like())),
            None => {
                let name = self.reducer.parameters().get(index).map_or("", |one| one.name.as_str());
                Err(Error::aborted(format!("the average of parameter `{name}` is not there")))
            }
        }
    }
}

impl ModuleVisitor for Averages<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(&index) = self.indices.get(&param.id) else { return };
        if !self.seen.insert(param.id) {
            return;
        }
        let average = self.take(index, param);
        let Ok(gradients) = &mut self.gradients else { return };
        match average {
            Ok(Some(average)) => gradients.register(param.id, average),
            Ok(None) => {}
            Err(error) => self.gradients = Err(error),
        }
    }
}

#[cfg(all(test, feature = "cpu"))]
#[allow(clippy::unwrap_used, reason = "helpers of tests are tests")]
mod tests {
    use super::*;

    fn primitive(tensor: Tensor<2>) -> CubeTensor {
        Cube::computed(tensor.try_into_primitive::<Cube>().unwrap())
    }

    #[test]
    fn a_bucket_has_copies_row_by_row_and_zeros() {
        let device = Device::cpu();
        let tensor = Tensor::<2>::from_floats([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], &device);
        let cube = primitive(tensor.clone()).device;
        let gradients = vec![
            (Some(primitive(tensor.clone())), 6),
            (None, 2),
            (Some(primitive(tensor.clone().transpose())), 6),
            (Some(primitive(Tensor::zeros([0, 3], &device))), 0),
        ];
        let memory = BucketMemory::of(gradients, &cube, BurnDType::F32);
        let shapes = [[2, 3], [1, 2], [3, 2], [0, 3]];
        let parts = memory.places.iter().zip(&shapes).map(|(range, shape)| memory.part(range, shape));
        let parts: Vec<Tensor<2>> =
            parts.map(|part| Tensor::from_primitive::<Cube>(Cube::stored(part))).collect();
        // Kernels that take several elements at once begin where each part does.
        let sum = parts[0].clone() + parts[2].clone().transpose();
        let elements = |tensor: Tensor<2>| -> Vec<f32> { tensor.into_data().try_to_vec().unwrap() };
        assert_eq!(elements(sum), [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]);
        let parts: Vec<_> = parts.into_iter().map(elements).collect();
        assert_eq!(parts[0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(parts[1], [0.0, 0.0]);
        assert_eq!(parts[2], [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        assert!(parts[3].is_empty());
        // What the gradients were made of is as it was.
        assert_eq!(elements(tensor), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let alignment = cube.client().properties().memory.alignment as usize;
        assert!(memory.places.iter().all(|place| (place.start * 4).is_multiple_of(alignment)));
    }

    #[test]
    fn a_bucket_that_is_kept_has_the_same_gradients_when_it_comes_again() {
        let device = Device::cpu();
        let gradient = |value: f32| primitive(Tensor::<2>::full([1, 2], value, &device));
        let elements = |tensor: &Option<CubeTensor>| -> Option<Vec<f32>> {
            let tensor = Tensor::<2>::from_primitive::<Cube>(Cube::stored(tensor.clone()?));
            Some(tensor.into_data().try_to_vec().unwrap())
        };
        let gradients = vec![Some(gradient(1.0)), None, Some(gradient(3.0))];
        let mut state = State {
            held: vec![None, None, None],
            gradients,
            kept: BTreeMap::new(),
            low_rank: None,
            subgroup: None,
        };
        // The second bucket is not launched before a failure.
        for _ in 0..2 {
            let own = state.own(0, [1, 0].into_iter(), true);
            assert_eq!(own.iter().map(elements).collect::<Vec<_>>(), [None, Some(vec![1.0; 2])]);
            // Averages take the place of all of them.
            (state.gradients[0], state.gradients[1]) = (Some(gradient(7.0)), Some(gradient(8.0)));
        }
        state.restore();
        let restored: Vec<_> = state.gradients.iter().map(elements).collect();
        assert_eq!(restored, [Some(vec![1.0; 2]), None, Some(vec![3.0; 2])]);
    }
}
