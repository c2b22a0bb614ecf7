//! Memory of a device: a bucket's, and what is lent to NCCL.
#![allow(unsafe_code)] // NCCL takes addresses.

use std::any::Any;
use std::ops::Range;

use burn::backend::Cube;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType as BurnDType, Device, FloatDType, Shape, Slice, Tensor};
use burn_cubecl::cubecl::cuda::CudaRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use cubecl_runtime::runtime::Runtime;
use phalanx::{Error, Result, WorldSize};
use phalanx_nccl::{DeviceSlice, Element};

use crate::read_back::{Computed, Lost};

/// The gradients of a bucket, in one piece of the device's memory.
pub(crate) struct BucketMemory {
    pub tensor: CubeTensor,
    /// The elements of each gradient.
    pub places: Vec<Range<usize>>,
    /// A gradient begins at a multiple of so many elements, where CubeCL's kernels can begin.
    step: usize,
}

impl BucketMemory {
    /// Copies the gradients, each with its number of elements, into new memory of `device`. A gradient that is None is zeros.
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

    /// Divides the bucket by the number of `ranks`, and rounds it to `to`, on the device. Then the sum over ranks is the average.
    pub fn compress(&mut self, to: FloatDType, ranks: WorldSize) {
        let factor = f64::from(1.0 / ranks.get() as f32);
        let scaled = CubeBackend::float_mul_scalar(self.tensor.clone(), factor.into());
        self.tensor = CubeBackend::float_cast(scaled, to);
    }

    /// Widens the bucket to `dtype`, on the device.
    pub fn widen(&mut self, dtype: BurnDType) {
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

    /// The bucket's memory for NCCL. The slice keeps it.
    pub fn lend<T: Element>(&self, device: &phalanx_nccl::Device) -> Result<DeviceSlice<T>> {
        lend_all(&self.tensor, device)
    }
}

/// The bytes of a tensor, which lies row by row, for a copy to or from another device. The slice keeps the memory. Until the copy is made, nobody
/// else writes the bytes that it reads, and nobody reads the bytes that it writes.
pub(crate) fn lend_bytes(tensor: &CubeTensor, device: &phalanx_nccl::Device) -> Result<DeviceSlice<u8>> {
    lend_all(tensor, device)
}

/// All elements of a tensor for NCCL. The slice keeps the memory. The elements are of type `T`, or of any type if `T` is `u8`. They lie row by row, and
/// nobody else uses them until the call is done.
pub(super) fn lend_all<T: Element>(
    tensor: &CubeTensor,
    device: &phalanx_nccl::Device,
) -> Result<DeviceSlice<T>> {
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
        return Err(Error::invalid_argument("a tensor has less memory than its elements need"));
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
            "make the model on Device::cuda({0}), or make the communicator for the model's device. A model that is not on CUDA: use Ddp::new",
            device.ordinal()
        ))
}

/// The device of CubeCL's that `device` is; an error if its tensors are not in the memory of the communicator's device.
pub(crate) fn check(device: &Device, cuda: &phalanx_nccl::Device) -> Result<CubeDevice> {
    let probe = Tensor::<1>::zeros([1], &device.clone().inner()).try_into_primitive::<Cube>();
    let probe = Cube::computed(probe.map_err(|_| not_on(cuda))?);
    drop(lend(&probe, cuda)?);
    Ok(probe.device.clone())
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
}
