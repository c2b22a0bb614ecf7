//! Gradients that NCCL averages on the device, where backward has left them.
//!
//! 1. A parameter's hook runs when the device has been given the work for its gradient. The gradient is taken out of the graph, in one
//!    piece and in memory that is nobody else's: if the graph still uses it, or a parameter shares it, it is copied on the device.
//! 2. A fence goes into the device's queue. It is waited for [some hooks later](crate::read_back::InFlight), as copies are: CubeCL shows
//!    its streams to nobody, so that NCCL's stream cannot wait for them, and the thread has to.
//! 3. When all gradients of a bucket are computed, one group of NCCL's calls averages them in place. The memory is held until it is done.
//! 4. At the end of backward the thread waits for the calls, each with its time-out, and the tensors become Burn's again.
#![allow(unsafe_code)] // NCCL takes addresses.

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::backend::Cube;
use burn::backend::tensor::FloatTensor;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType as BurnDType, Device, Tensor, bf16, f16};
use burn_cubecl::CubeDevice;
use burn_cubecl::cubecl::cuda::CudaRuntime;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl_runtime::runtime::Runtime;
use parking_lot::Mutex;
use phalanx::reducer::hooks::{CommHook, GradBucket, HookState, Pending};
use phalanx::reducer::{ParameterSpec, Reducer, ReducerOptions};
use phalanx::{Communicator, Error, Rank, ReduceOp, Result};
use phalanx_nccl::{DeviceMemory, Element, Work};

use crate::read_back::{Computed, Lost, ReadBack};
use crate::tensor_bytes::dtype;

/// The most calls that NCCL takes as one are 2048.
const CALLS: usize = 1024;

/// A gradient in a device's memory, in one piece that nothing else uses.
pub(crate) struct Resident(CubeTensor);

impl Resident {
    pub fn of(tensor: FloatTensor<Cube>) -> Self {
        let tensor = into_contiguous(Cube::computed(tensor));
        // Backward may go on with this memory, or have given it to another parameter, too.
        Self(if tensor.can_mut() { tensor } else { tensor.copy() })
    }

    fn elements(&self) -> usize {
        self.0.meta.shape().num_elements()
    }

    fn dtype(&self) -> BurnDType {
        self.0.dtype
    }

    /// Its address, if CubeCL knows one that can be CUDA's, with the number of its bytes, and what keeps it there.
    fn address(&self) -> Result<Option<(u64, u64, Held)>> {
        let (client, handle) = (&self.0.client, self.0.handle.clone());
        let lost = |cause| Lost::by(cause).of("a gradient");
        Ok(Some(match &self.0.device {
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

    /// Its address in the memory of `device`, and what keeps it there.
    fn lend(&self, device: &phalanx_nccl::Device) -> Result<(u64, Held)> {
        let Some((pointer, size, held)) = self.address()? else { return Err(not_on(device)) };
        if size < (self.elements() * self.0.dtype.size()) as u64 {
            return Err(Error::invalid_argument("a gradient has less memory than elements"));
        }
        // An address that is none of the device's would be its end.
        if !device.holds(pointer)? {
            return Err(not_on(device));
        }
        Ok((pointer, held))
    }

    fn into_tensor(self) -> FloatTensor<Cube> {
        Cube::stored(self.0)
    }
}

type Held = Box<dyn Any + Send>;

fn not_on(device: &phalanx_nccl::Device) -> Error {
    Error::invalid_argument(format!("the model is not in the memory of CUDA device {}", device.ordinal()))
        .with_remedy(format!(
            "make it on Device::cuda({0}), or the communicator for the model's device; models that are elsewhere: Ddp::new",
            device.ordinal()
        ))
}

/// The gradients of one model, from their hooks to the optimizer.
pub(crate) struct Shelf {
    nccl: phalanx_nccl::Communicator,
    places: Mutex<Vec<Option<Resident>>>,
    /// The bytes of all gradients that were averaged.
    bytes: AtomicU64,
}

impl Shelf {
    /// A shelf, and the reducer that says when what is averaged.
    pub fn new(
        nccl: &phalanx_nccl::Communicator,
        group: Arc<dyn Communicator>,
        parameters: Vec<ParameterSpec>,
        options: ReducerOptions,
    ) -> Result<(Arc<Self>, Reducer)> {
        let places = parameters.iter().map(|_| None).collect();
        let shelf =
            Arc::new(Self { nccl: nccl.clone(), places: Mutex::new(places), bytes: AtomicU64::new(0) });
        let reducer = Reducer::elsewhere(group, parameters, options, Box::new(InPlace(shelf.clone())))?;
        Ok((shelf, reducer))
    }

    /// Keeps the gradient of a parameter, whose `spec` it must have. What is given is done when the device has computed it.
    pub fn put(&self, index: usize, spec: &ParameterSpec, gradient: Resident) -> Result<ReadBack> {
        let arrived = dtype(gradient.dtype())?;
        if arrived != spec.dtype
            || gradient.elements() != spec.elements()
            || gradient.dtype() == BurnDType::Flex32
        {
            return Err(Error::invalid_argument(format!(
                "the gradient of {spec} has {} x {:?}",
                gradient.elements(),
                gradient.dtype()
            )));
        }
        // Here and not later: the current stream of CubeCL's then waits for the one that computes the gradient, and the fence comes behind both.
        if gradient.elements() > 0 {
            drop(gradient.lend(self.nccl.device())?);
        }
        let fence = ReadBack::fence(&gradient.0);
        match self.places.lock().get_mut(index) {
            Some(place) => *place = Some(gradient),
            None => return Err(Error::invalid_argument(format!("there is no parameter {index}"))),
        }
        Ok(fence)
    }

    /// Drops what a pass has left that did not come to its end.
    pub fn clear(&self) {
        self.places.lock().fill_with(|| None);
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn take(&self, index: usize) -> Result<Resident> {
        let gradient = self.places.lock().get_mut(index).and_then(Option::take);
        gradient.ok_or_else(|| Error::aborted(format!("the gradient of parameter {index} is not there")))
    }

    /// Starts to average the gradients of `parameters`, which are of type `T`.
    fn launch<T: Element>(&self, parameters: &[usize]) -> Result<Vec<Work<Vec<Lent<T>>>>> {
        let mut works = Vec::new();
        // A tensor without elements has no address.
        let is_empty = |index: &usize| matches!(self.places.lock().get(*index), Some(Some(gradient)) if gradient.elements() == 0);
        let parameters: Vec<usize> = parameters.iter().copied().filter(|index| !is_empty(index)).collect();
        for parameters in parameters.chunks(CALLS) {
            let mut calls = self.nccl.group_calls();
            for &parameter in parameters {
                let resident = self.take(parameter)?;
                let (pointer, held) = resident.lend(self.nccl.device())?;
                let (device, len) = (self.nccl.device().clone(), resident.elements());
                self.bytes.fetch_add((len * size_of::<T>()) as u64, Ordering::Relaxed);
                let lent =
                    Lent { parameter, resident, _held: held, device, pointer, len, _elements: PhantomData };
                calls = calls.all_reduce(lent, ReduceOp::Avg);
            }
            works.push(calls.launch()?);
        }
        Ok(works)
    }

    fn average<T: Element>(self: &Arc<Self>, bucket: GradBucket) -> Result<Pending> {
        let parameters: Vec<usize> = bucket.gradients.iter().map(|place| place.parameter).collect();
        let works = Arc::new(Mutex::new(self.launch::<T>(&parameters)?));
        let (shelf, under_way) = (self.clone(), works.clone());
        let is_completed = move || under_way.lock().iter().all(Work::is_completed);
        Ok(Pending::elsewhere(is_completed, move || {
            let works = std::mem::take(&mut *works.lock());
            for work in works {
                for Lent { parameter, resident, .. } in work.wait()? {
                    if let Some(place) = shelf.places.lock().get_mut(parameter) {
                        *place = Some(resident);
                    }
                }
            }
            Ok(bucket.buffer)
        }))
    }
}

/// A gradient while NCCL has it.
struct Lent<T> {
    parameter: usize,
    resident: Resident,
    /// Keeps the memory where it is.
    _held: Held,
    device: phalanx_nccl::Device,
    pointer: u64,
    len: usize,
    _elements: PhantomData<fn() -> T>,
}

// SAFETY: CubeCL neither frees nor moves memory that is held, and knows that it is: `pointer` is its address, which the driver has said to be
// the device's, and it has `len` elements of this type, as `put` has checked. The tensor is the only one with this memory, and is
// here, so nothing uses it until the call is done; the work that computes it is done, because its fence has been waited for.
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

/// Averages a bucket's gradients where they lie.
struct InPlace(Arc<Shelf>);

impl CommHook for InPlace {
    fn describe(&self) -> String {
        "NCCL".into()
    }

    fn start(&mut self, _: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
        match bucket.buffer.dtype() {
            phalanx::DType::F32 => self.0.average::<f32>(bucket),
            phalanx::DType::F64 => self.0.average::<f64>(bucket),
            phalanx::DType::F16 => self.0.average::<f16>(bucket),
            phalanx::DType::BF16 => self.0.average::<bf16>(bucket),
            other => Err(Error::invalid_argument(format!("gradients of type {other} are not averaged"))),
        }
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(()) // It has no state.
    }

    fn state(&self) -> HookState {
        HookState::default()
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        state.nothing()
    }
}

/// An error if the tensors of `device` are not in the memory of the communicator's device.
pub(crate) fn check(device: &Device, nccl: &phalanx_nccl::Communicator) -> Result<()> {
    let probe = Tensor::<1>::zeros([1], &device.clone().inner()).try_into_primitive::<Cube>();
    let probe = probe.map_err(|_| not_on(nccl.device()))?;
    Resident::of(probe).lend(nccl.device()).map(drop)
}

/// The averages on `shelf`, by the ids of `model`'s parameters, whose indices are `indices`.
pub(crate) fn averages<M: Module>(
    model: &M,
    shelf: &Shelf,
    indices: &HashMap<ParamId, usize>,
) -> Result<GradientsParams> {
    let (gradients, seen) = (Ok(GradientsParams::new()), HashSet::new());
    let mut averages = Averages { shelf, indices, seen, gradients };
    model.visit(&mut averages);
    averages.gradients
}

struct Averages<'a> {
    shelf: &'a Shelf,
    indices: &'a HashMap<ParamId, usize>,
    /// A parameter that is used in several places has one gradient.
    seen: HashSet<ParamId>,
    gradients: Result<GradientsParams>,
}

impl ModuleVisitor for Averages<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(&index) = self.indices.get(&param.id) else { return };
        let Ok(gradients) = &mut self.gradients else { return };
        if !self.seen.insert(param.id) {
            return;
        }
        match self.shelf.take(index) {
            Ok(gradient) => {
                gradients.register(param.id, Tensor::<D>::from_primitive::<Cube>(gradient.into_tensor()));
            }
            Err(error) => self.gradients = Err(error),
        }
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;

    fn primitive(tensor: Tensor<2>) -> FloatTensor<Cube> {
        tensor.try_into_primitive::<Cube>().unwrap()
    }

    fn place(resident: &Resident) -> u64 {
        resident.address().unwrap().unwrap().0
    }

    #[test]
    fn memory_of_one_s_own_stays_where_it_is_and_what_others_use_is_copied() {
        let device = Device::cpu();
        let tensor = || Tensor::<2>::from_floats([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], &device);
        let elements = |resident: Resident| -> Vec<f32> {
            let tensor = Tensor::<2>::from_primitive::<Cube>(resident.into_tensor());
            tensor.into_data().try_to_vec().unwrap()
        };
        let own = Resident::of(primitive(tensor()));
        let first = place(&own);
        let again = Resident::of(own.into_tensor());
        assert_eq!(place(&again), first);
        assert_eq!(elements(again), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);

        let shared = tensor();
        let other = Resident(Cube::computed(primitive(shared.clone())));
        let copy = Resident::of(primitive(shared.clone()));
        assert_ne!(place(&copy), place(&other));
        assert_eq!(elements(copy), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);

        // In one piece, row by row.
        assert_eq!(elements(Resident::of(primitive(tensor().transpose()))), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    }
}
