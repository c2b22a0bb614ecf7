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

mod averages;
mod device_hook;
mod hook;
mod memory;
mod power_sgd;
mod stage;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;

use burn::backend::Cube;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType as BurnDType, Device, FloatDType, Shape, bf16, f16};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use parking_lot::Mutex;
use phalanx::Communicator as _;
use phalanx::adapter::{ComparedCalls, Elsewhere, ElsewhereCall, ElsewhereOp, JoinGroup};
use phalanx::reducer::hooks::{GradBucket, GradientPlace, Pending};
use phalanx::reducer::{ParameterSpec, Reducer, ReducerOptions};
use phalanx::{Caller, DType, Error, ProcessGroup, ReduceOp, Result};
use phalanx_nccl::{CommunicatorHandle, DeviceMemory, DeviceSlice, Element, Work};

pub(crate) use self::averages::averages;
pub use self::device_hook::{DeviceBucket, DeviceHook, DeviceMessage};
pub(crate) use self::hook::{Hook, OwnHook};
use self::memory::lend_all;
pub(crate) use self::memory::{BucketMemory, check, lend_bytes};
use self::power_sgd::LowRank;
use self::stage::{Stage, gone};
use crate::read_back::{Computed, ReadBack};
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
    fn average_by<T: Element>(
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
                let scale = all.group.active_scale();
                let finish = |low_rank: &mut LowRank| {
                    low_rank.finish(matrices, &bucket.gradients, scale, (&first, &second))
                };
                let averages = all.low_rank(finish)?;
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

#[cfg(all(test, feature = "cpu"))]
#[allow(clippy::unwrap_used, reason = "helpers of tests are tests")]
mod tests {
    use burn::tensor::Tensor;

    use super::*;

    fn primitive(tensor: Tensor<2>) -> CubeTensor {
        Cube::computed(tensor.try_into_primitive::<Cube>().unwrap())
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
