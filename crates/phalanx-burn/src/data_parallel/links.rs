//! What goes from the memory of one device to that of another, all of one process: parameters and gradients by NCCL, and inputs, outputs and other
//! tensors by the driver's copies.
//!
//! Tensors travel in buckets, which are new in each step: on the main device copies of the parameters, which go when they were sent; on the others
//! the parameters themselves. A gradient is copied, too, because Burn may have the same memory for several. Each device's call is made by a
//! thread, because the calls wait for each other, when CubeCL has done all that it was told before. The program's thread waits for all of them.
//!
//! A tensor that goes to one device alone is copied by `cuMemcpyPeerAsync`, on the stream of that device's communicator: NCCL's messages would
//! need a call of both, and move no more. The fences of both devices are waited for first, because CubeCL shows its streams to nobody; so
//! no stream has to wait for another. What goes together, such as the parts of a batch, is queued together, and waited for once.
//!
//! If a call fails, its memory is NCCL's until the communicator has ended, and CubeCL does not use it meanwhile. If a copy is not made in time, its
//! memory is kept for good. After either all communicators are aborted.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use burn::backend::Cube;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Bool, DType, Device, Int, Tensor, bf16, f16};
use burn_cubecl::CubeDevice;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use phalanx::{Deadline, Error, Rank, ReduceOp, Result};
use phalanx_nccl::{DeviceGroup, DeviceSlice, Element};

use super::scatter::{Destination, Scatter};
use super::transfers::Transfer;
use crate::nccl::{self, BucketMemory};
use crate::read_back::{Computed, ReadBack};

/// The most bytes of a bucket, unless one tensor has more: so much the main device needs besides.
const BUCKET_LIMIT: usize = 25 << 20;

/// The devices, and what connects them.
pub(super) struct Links {
    groups: Vec<DeviceGroup>,
    devices: Vec<CubeDevice>,
}

/// Where the elements of a bucket go.
#[derive(Clone, Copy)]
enum Movement {
    /// From the main device to all others.
    Broadcast,
    /// Their sums to the main device.
    Reduce,
}

/// What a thread of its own does for a device.
type Call = Box<dyn FnOnce() -> Result<()> + Send>;

/// A copy to another device that is not made yet.
pub(super) struct Copying {
    /// The number of the device to which it goes.
    device: usize,
    /// Where it goes, and where it is from.
    memory: (DeviceSlice<u8>, DeviceSlice<u8>),
    /// When both are free for it.
    fences: [ReadBack; 2],
}

/// A parameter, or a gradient, in the memory of a device.
struct Held {
    id: ParamId,
    tensor: CubeTensor,
}

/// The parameters of one device, in the order in which a module has them.
pub(super) struct Copies(Vec<Held>);

impl Links {
    /// Connects `devices` by `groups`, one for each.
    pub fn new(devices: &[Device], groups: Vec<DeviceGroup>) -> Result<Self> {
        let fits = |(number, group): (usize, &DeviceGroup)| {
            let host = group.host();
            host.rank().index() == number && host.world_size().count() == devices.len()
        };
        if groups.len() != devices.len() || !groups.iter().enumerate().all(fits) {
            return Err(Error::invalid_argument(format!(
                "{} devices need as many groups, those of their ranks in order, and there are {}",
                devices.len(),
                groups.len()
            ))
            .with_remedy("give what DeviceGroup::of_devices makes of the same devices"));
        }
        let check = |(device, group): (&Device, &DeviceGroup)| nccl::check(device, group.device().device());
        let devices = devices.iter().zip(&groups).map(check).collect::<Result<_>>()?;
        let cuda = |group: &DeviceGroup| group.device().device().clone();
        if let Some((main, others)) = groups.split_first() {
            for (main, other) in others.iter().map(|other| (cuda(main), cuda(other))) {
                // Copies are direct then. They work all the same where the machine cannot do that, or the driver has no room for so many peers.
                let _direct = (main.enable_peer_access(&other), other.enable_peer_access(&main));
            }
        }
        Ok(Self { groups, devices })
    }

    /// A copy of `tensor` on the device of number `to`; none if it is not on that of number `from`, or has no elements. It has the elements when
    /// [`finish`](Self::finish) has made it: nobody reads it before.
    pub fn begin(&self, tensor: CubeTensor, from: usize, to: usize) -> Result<Option<(CubeTensor, Copying)>> {
        let is_there = tensor.device == self.devices[from] && tensor.qparams.is_none();
        if !is_there || tensor.meta.shape().num_elements() == 0 {
            return Ok(None);
        }
        let (source, target) = (self.groups[from].device(), self.groups[to].device());
        if let Some(cause) = source.failure().or_else(|| target.failure()) {
            return Err(cause);
        }
        let (tensor, device) = (into_contiguous(tensor), self.devices[to].clone());
        let (shape, dtype) = (tensor.meta.shape().clone(), tensor.dtype);
        let copy = empty_device_contiguous_dtype(device.client(), device, shape, dtype);
        // Lent before the fences: CubeCL's stream of this thread then goes on behind the one, of another thread, that computes the tensor.
        let lent_to = nccl::lend_bytes(&copy, target.device())?;
        let lent_from = nccl::lend_bytes(&tensor, source.device())?;
        let fences = [ReadBack::fence(&tensor), ReadBack::fence(&copy)];
        Ok(Some((copy, Copying { device: to, memory: (lent_to, lent_from), fences })))
    }

    /// Makes copies that have begun: those to each device by a thread, in their order.
    pub fn finish(&self, copies: Vec<Copying>) -> Result<()> {
        let mut of_devices: BTreeMap<usize, Vec<Copying>> = BTreeMap::new();
        for copy in copies {
            of_devices.entry(copy.device).or_default().push(copy);
        }
        let timeout = self.timeout();
        let call = |(device, copies): (usize, Vec<Copying>)| -> Call {
            let nccl = self.groups[device].device().clone();
            Box::new(move || {
                let mut all = Vec::with_capacity(copies.len());
                for Copying { memory, fences, .. } in copies {
                    for fence in fences {
                        fence.wait(|_| ()).map_err(|lost| lost.of("a tensor for another device"))?;
                    }
                    all.push(memory);
                }
                nccl.stream().copy_all(all, Deadline::after(timeout)).map(drop)
            })
        };
        let calls: Vec<Call> = of_devices.into_iter().map(call).collect();
        if calls.is_empty() { Ok(()) } else { self.all(calls) }
    }

    /// The parameters of `model`, which is on the main device, on each of the others, by their number less one. Adds their bytes to `moved`.
    pub fn broadcast<M: Module>(&self, model: &M, moved: &mut Transfer) -> Result<Vec<Copies>> {
        let mut parameters = Parameters(Ok(Vec::new()));
        model.visit(&mut parameters);
        let parameters = parameters.0?;
        let mut copies: Vec<Copies> =
            (1..self.devices.len()).map(|_| Copies(Vec::with_capacity(parameters.len()))).collect();
        let kinds: Vec<_> = parameters.iter().map(|held| (held.tensor.dtype, bytes(&held.tensor))).collect();
        for bucket in buckets(&kinds)? {
            let (dtype, sent) = (kinds[bucket.start].0, &parameters[bucket]);
            let memory = |(number, device): (usize, &CubeDevice)| {
                let own = |held: &Held| {
                    let elements = held.tensor.meta.shape().num_elements();
                    ((number == 0).then(|| held.tensor.clone()), elements)
                };
                BucketMemory::of(sent.iter().map(own).collect(), device, dtype)
            };
            let memories: Vec<_> = self.devices.iter().enumerate().map(memory).collect();
            self.each(&memories, Movement::Broadcast)?;
            for (copies, memory) in copies.iter_mut().zip(&memories[1..]) {
                let part = |(held, range): (&Held, &Range<usize>)| Held {
                    id: held.id,
                    tensor: memory.part(range, held.tensor.meta.shape()),
                };
                copies.0.extend(sent.iter().zip(&memory.places).map(part));
            }
            moved.bytes += copies.len() * sent.iter().map(|held| bytes(&held.tensor)).sum::<usize>();
        }
        Ok(copies)
    }

    /// The sum of `own` and of `parts`, the gradients of the replicas on the first devices. Adds the bytes to `moved`.
    pub fn reduce<M: Module>(
        &self,
        model: &M,
        own: GradientsParams,
        parts: Vec<GradientsParams>,
        moved: &mut Transfer,
    ) -> Result<GradientsParams> {
        let mut gradients = Gradients { parts, found: Ok(Vec::new()) };
        model.visit(&mut gradients);
        let mut found = gradients.found?;
        let kinds: Vec<_> = found
            .iter()
            .map(|gradient| (gradient.dtype, gradient.elements() * gradient.dtype.size()))
            .collect();
        let mut sums = HashMap::with_capacity(found.len());
        for bucket in buckets(&kinds)? {
            let (dtype, summed) = (kinds[bucket.start].0, &mut found[bucket]);
            let mut memory = |(number, device): (usize, &CubeDevice)| {
                let own = |gradient: &mut Gradient| {
                    let elements = gradient.elements();
                    (gradient.of_replicas.get_mut(number).and_then(Option::take), elements)
                };
                BucketMemory::of(summed.iter_mut().map(own).collect(), device, dtype)
            };
            let memories: Vec<_> = self.devices.iter().enumerate().map(&mut memory).collect();
            self.each(&memories, Movement::Reduce)?;
            let Some(main) = memories.first() else { continue };
            for (gradient, range) in summed.iter().zip(&main.places) {
                sums.insert(gradient.id, main.part(range, &gradient.shape));
                moved.bytes += (memories.len() - 1) * gradient.elements() * dtype.size();
            }
        }
        let mut total = Sums { sums, total: own };
        model.visit(&mut total);
        Ok(total.total)
    }

    /// Moves the elements of a bucket, whose memory on each device this is.
    fn each(&self, memories: &[BucketMemory], movement: Movement) -> Result<()> {
        let elements = |memory: &BucketMemory| memory.tensor.meta.shape().num_elements();
        let Some(first) = memories.first() else { return Ok(()) };
        if memories.iter().any(|memory| elements(memory) != elements(first)) {
            return Err(Error::invalid_argument("the devices lay tensors out in different ways")
                .with_remedy("take devices of one model, or go without NCCL"));
        }
        match first.tensor.dtype {
            _ if elements(first) == 0 => Ok(()), // It has no address.
            DType::F32 => self.run::<f32>(memories, movement),
            DType::F64 => self.run::<f64>(memories, movement),
            DType::F16 => self.run::<f16>(memories, movement),
            DType::BF16 => self.run::<bf16>(memories, movement),
            other => Err(refused(other)),
        }
    }

    /// The same for elements of type `T`.
    fn run<T: Element>(&self, memories: &[BucketMemory], movement: Movement) -> Result<()> {
        // Here and not on the other threads: CubeCL's streams belong to threads, and the fences come behind all that this one has queued.
        let call = |(group, memory): (&DeviceGroup, &BucketMemory)| -> Result<Call> {
            let nccl = group.device().clone();
            let lent = memory.lend::<T>(nccl.device())?;
            let fence = ReadBack::fence(&memory.tensor);
            Ok(Box::new(move || {
                fence.wait(|_| ()).map_err(|lost| lost.of("a bucket of parameters or gradients"))?;
                let work = match movement {
                    Movement::Broadcast => nccl.broadcast_async(lent, Rank::MAIN),
                    Movement::Reduce => nccl.reduce_async(lent, Rank::MAIN, ReduceOp::Sum),
                };
                work?.wait().map(drop)
            }))
        };
        self.all(self.groups.iter().zip(memories).map(call).collect::<Result<_>>()?)
    }

    /// How long a transfer may take.
    fn timeout(&self) -> Duration {
        self.groups.iter().map(|group| group.device().timeout()).max().unwrap_or_default()
    }

    /// Has threads make these calls, and waits for all of them.
    fn all(&self, calls: Vec<Call>) -> Result<()> {
        let (count, (done, outcomes)) = (calls.len(), channel());
        let started = calls.into_iter().try_for_each(|call| {
            let done = done.clone();
            let call = move || {
                // What the call has is dropped by then, so that the last handle to a communicator is the waiting thread's. Nobody waits for it
                // after a failure.
                let _told = done.send(call());
            };
            thread::Builder::new().name("phalanx-nccl-calls".into()).spawn(call).map(drop)
        });
        drop(done);
        let outcome = match started {
            Ok(()) => all_of(&outcomes, count, self.timeout()),
            Err(cause) => Err(Error::environment(format!("no thread for a call of NCCL's: {cause}"))),
        };
        // What waits for this device's call must not wait for its time-out.
        outcome.inspect_err(|error| self.groups.iter().for_each(|group| group.device().abort(error.clone())))
    }
}

/// Waits until `count` calls have succeeded, or one has not.
fn all_of(outcomes: &Receiver<Result<()>>, count: usize, timeout: Duration) -> Result<()> {
    let deadline = Deadline::after(timeout);
    (0..count).try_for_each(|_| {
        outcomes.recv_timeout(deadline.remaining()).unwrap_or_else(|cause| {
            Err(match cause {
                RecvTimeoutError::Disconnected => {
                    Error::aborted("a thread that makes NCCL's calls has panicked, as its message on stderr says")
                }
                RecvTimeoutError::Timeout => Error::timeout(format!(
                    "the devices have not computed and moved what goes from one to another within {} s",
                    timeout.as_secs_f64()
                ))
                .with_remedy(
                    "see the devices' own messages; where a step takes longer, give DeviceGroup::of_devices_with_options a longer time-out",
                ),
            })
        })
    })
}

/// Parts of tensors that follow each other, each of one type, and of at most [`BUCKET_LIMIT`] bytes or one tensor. The tensors are given by
/// their types and bytes. An error if one is of a type that cannot be moved.
fn buckets(tensors: &[(DType, usize)]) -> Result<Vec<Range<usize>>> {
    let (mut buckets, mut size): (Vec<Range<usize>>, usize) = (Vec::new(), 0);
    for (index, &(dtype, bytes)) in tensors.iter().enumerate() {
        if !matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16) {
            return Err(refused(dtype));
        }
        match buckets.last_mut() {
            Some(last) if tensors[last.start].0 == dtype && size.saturating_add(bytes) <= BUCKET_LIMIT => {
                last.end = index + 1;
                size += bytes;
            }
            _ => {
                buckets.push(index..index + 1);
                size = bytes;
            }
        }
    }
    Ok(buckets)
}

fn refused(dtype: DType) -> Error {
    Error::invalid_argument(format!("NCCL does not move tensors of type {dtype:?} here"))
        .with_remedy("cast them, or go without NCCL")
}

pub(super) fn bytes(tensor: &CubeTensor) -> usize {
    tensor.meta.shape().num_elements() * tensor.dtype.size()
}

/// The tensor in the device's memory.
fn resident<const D: usize>(tensor: Tensor<D>) -> Result<CubeTensor> {
    let tensor = tensor.try_into_primitive::<Cube>();
    let tensor = tensor
        .map_err(|_| Error::invalid_argument("a tensor of the model is on none of CubeCL's devices"))?;
    Ok(Cube::computed(tensor))
}

fn floats<const D: usize>(tensor: CubeTensor) -> Tensor<D> {
    Tensor::from_primitive::<Cube>(Cube::stored(tensor))
}

/// Finds the parameters of a module.
struct Parameters(Result<Vec<Held>>);

impl ModuleVisitor for Parameters {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Ok(found) = &mut self.0 else { return };
        match resident(param.base().inner()) {
            Ok(tensor) => found.push(Held { id: param.id, tensor }),
            Err(error) => self.0 = Err(error),
        }
    }
}

impl Copies {
    /// `module` with these parameters, as new leaves. Copies of what is not of floats have begun in `to`.
    pub fn place<M: Module>(self, module: M, to: &mut Destination<'_>) -> Result<M> {
        let mut placer = Placer { copies: self.0.into_iter(), to, outcome: Ok(()) };
        let module = module.map(&mut placer);
        let (outcome, left) = (placer.outcome, placer.copies.len());
        outcome?;
        if left > 0 { Err(other_order()) } else { Ok(module) }
    }
}

fn other_order() -> Error {
    Error::invalid_argument("a module shows its parameters in one order, and changes them in another")
        .with_remedy("train it without NCCL, or see its implementation of Module")
}

struct Placer<'a, 'b> {
    copies: std::vec::IntoIter<Held>,
    to: &'a mut Destination<'b>,
    outcome: Result<()>,
}

impl ModuleMapper for Placer<'_, '_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, copy) = (param.id, self.copies.next());
        param.map(|old| {
            let (gradient, shape) = (old.is_require_grad(), old.dims());
            match copy.filter(|copy| copy.id == id && copy.tensor.meta.shape().as_slice() == shape.as_slice())
            {
                Some(copy) => Tensor::from_inner(floats::<D>(copy.tensor)).set_require_grad(gradient),
                None => {
                    self.outcome = Err(other_order());
                    old
                }
            }
        })
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        param.map(|old| self.copy(old))
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        param.map(|old| self.copy(old))
    }
}

impl Placer<'_, '_> {
    /// A copy of a tensor; the tensor itself if there is an error.
    fn copy<T: Scatter + Clone>(&mut self, old: T) -> T {
        old.clone().begin_copy(self.to).unwrap_or_else(|error| {
            self.outcome = Err(error);
            old
        })
    }
}

/// A parameter's gradients of all replicas; None of one that has not used it.
struct Gradient {
    id: ParamId,
    dtype: DType,
    shape: Vec<usize>,
    of_replicas: Vec<Option<CubeTensor>>,
}

impl Gradient {
    fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Finds the gradients of the parameters that a replica has used.
struct Gradients {
    parts: Vec<GradientsParams>,
    found: Result<Vec<Gradient>>,
}

impl Gradients {
    fn take<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Result<Option<Gradient>> {
        let own = |part: &mut GradientsParams| part.remove::<D>(param.id).map(resident).transpose();
        let of_replicas = self.parts.iter_mut().map(own).collect::<Result<Vec<_>>>()?;
        let mut there = of_replicas.iter().flatten();
        let Some(first) = there.next() else { return Ok(None) };
        let (dtype, shape) = (first.dtype, first.meta.shape().to_vec());
        if there.any(|other| other.dtype != dtype || other.meta.shape().as_slice() != shape.as_slice()) {
            return Err(Error::invalid_argument(format!(
                "the replicas have gradients of different types or shapes, such as {shape:?} of {dtype:?}"
            )));
        }
        Ok(Some(Gradient { id: param.id, dtype, shape, of_replicas }))
    }
}

impl ModuleVisitor for Gradients {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // A parameter that is used in several places has one gradient, which the first place takes.
        let taken = self.take(param);
        let Ok(found) = &mut self.found else { return };
        match taken {
            Ok(gradient) => found.extend(gradient),
            Err(error) => self.found = Err(error),
        }
    }
}

/// Adds sums to the gradients that there are.
struct Sums {
    sums: HashMap<ParamId, CubeTensor>,
    total: GradientsParams,
}

impl ModuleVisitor for Sums {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(sum) = self.sums.remove(&param.id).map(floats::<D>) else { return };
        let sum = match self.total.remove::<D>(param.id) {
            Some(own) => own + sum,
            None => sum,
        };
        self.total.register(param.id, sum);
    }
}

/// An error if copies of `model` share tensors with it, as those of a batch norm share the running statistics: a copy on another device would
/// take them along.
pub(super) fn refuse_shared<M: Module>(model: &M) -> Result<()> {
    let shapes = || {
        let mut shapes = Shapes(Vec::new());
        model.visit(&mut shapes);
        shapes.0
    };
    let before = shapes();
    let mut exchange = Exchange(Vec::new());
    let copy = model.clone().map(&mut exchange);
    let after = shapes();
    // What is shared is as it was.
    drop(copy.map(&mut Restore(exchange.0.into_iter())));
    if before == after {
        return Ok(());
    }
    Err(Error::invalid_argument(
        "copies of a part of the model share tensors with it, such as a batch norm's running statistics, which cannot be on several devices",
    )
    .with_remedy("take Ddp, with a process for each device"))
}

struct Shapes(Vec<Vec<usize>>);

impl ModuleVisitor for Shapes {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(param.base().dims().to_vec());
    }
}

/// Puts small tensors of other shapes into a module, and keeps those that were there.
struct Exchange(Vec<Box<dyn Any>>);

impl ModuleMapper for Exchange {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|own| {
            let shape = if own.dims() == [1; D] { [2; D] } else { [1; D] };
            let other = Tensor::zeros(shape, &own.device());
            self.0.push(Box::new(own));
            other
        })
    }
}

/// Puts them back.
struct Restore(std::vec::IntoIter<Box<dyn Any>>);

impl ModuleMapper for Restore {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let own = self.0.next().and_then(|own| own.downcast::<Tensor<D>>().ok());
        param.map(|other| own.map_or(other, |own| *own))
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{BatchNormConfig, LinearConfig};

    use super::*;

    #[test]
    fn what_copies_share_is_refused_and_stays_as_it_was() {
        let device = Device::flex().autodiff();
        let linear = LinearConfig::new(3, 1).init(&device);
        let weight = || -> Vec<f32> { linear.weight.val().into_data().try_to_vec().unwrap() };
        let before = weight();
        refuse_shared(&linear).unwrap();
        assert_eq!(weight(), before);
        // Also one of a single channel.
        for channels in [1, 4] {
            let norm = BatchNormConfig::new(channels).init(&device);
            let error = refuse_shared(&norm).unwrap_err();
            assert!(error.to_string().contains("running statistics"), "{error}");
            let variance: Vec<f32> = norm.running_var.value().into_data().try_to_vec().unwrap();
            assert_eq!(variance, vec![1.0; channels]);
        }
    }

    #[test]
    fn a_bucket_has_one_type_and_few_bytes_or_one_tensor() {
        let (single, half) = (DType::F32, DType::BF16);
        let third = BUCKET_LIMIT / 3;
        let tensors = [
            (single, third),
            (single, third),
            (single, third),
            (single, third), // more than fit
            (half, 8),
            (half, 2 * BUCKET_LIMIT), // more than fits into any
            (half, 0),
            (single, 0),
        ];
        assert_eq!(buckets(&tensors).unwrap(), [0..3, 3..4, 4..5, 5..6, 6..7, 7..8]);
        assert!(buckets(&[]).unwrap().is_empty());
        let error = buckets(&[(single, 4), (DType::I32, 4)]).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("I32"), "{error}");
    }
}
