//! The bytes of Burn's tensors: borrowed or read back, written in place, and made into tensors. Only this module and
//! [`read_back`](crate::read_back) know where a backend stores them.

#[cfg(feature = "cube")]
use burn::backend::Cube;
#[cfg(any(feature = "cube", feature = "tch"))]
use burn::backend::DispatchDevice;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex};
#[cfg(feature = "tch")]
use burn::backend::{LibTorch, TensorMetadata};
use burn::tensor::{Bytes, DType as BurnDType, Tensor, TensorData, bf16, f16};
use burn_flex::FlexTensor;
use bytemuck::{AnyBitPattern, NoUninit, Pod};
use phalanx::{Buffer, DType, Error, Result};

use crate::device;
#[cfg(feature = "tch")]
use crate::libtorch;
#[cfg(feature = "nccl")]
use crate::nccl::Resident;
use crate::read_back::ReadBack;

/// A tensor's elements, row by row, while they are borrowed.
#[derive(Clone, Copy)]
pub(crate) struct TensorBytes<'a> {
    /// Burn's type; see [`dtype`].
    pub dtype: BurnDType,
    pub bytes: &'a [u8],
}

/// Zeros in this process's memory. An error if there is too little.
pub(crate) fn memory(dtype: DType, elements: usize) -> Result<Buffer> {
    Buffer::try_zeroed(dtype, elements).ok_or_else(|| {
        Error::out_of_memory(format!("there is no memory for a copy of {elements} x {dtype}"))
            .with_remedy("start fewer ranks on this host, or train a smaller model")
    })
}

/// How the elements of a tensor can be had.
pub(crate) enum Access<'a> {
    /// They lie in this process's memory.
    Here(TensorBytes<'a>),
    /// They are in a device's memory.
    #[cfg_attr(not(feature = "cube"), allow(dead_code))] // Flex and LibTorch have no such memory.
    Away(Box<dyn Away + 'a>),
}

/// A tensor in a device's memory.
pub(crate) trait Away {
    /// Has the device copy the elements, after the work that it has been given so far, and does not wait for it.
    fn read(self: Box<Self>) -> ReadBack;

    /// The tensor itself.
    #[cfg(feature = "nccl")]
    fn stay(self: Box<Self>) -> Result<Resident>;
}

#[cfg(feature = "cube")]
struct OnCube(FloatTensor<Cube>);

#[cfg(feature = "cube")]
impl Away for OnCube {
    fn read(self: Box<Self>) -> ReadBack {
        ReadBack::of(self.0)
    }

    #[cfg(feature = "nccl")]
    fn stay(self: Box<Self>) -> Result<Resident> {
        Ok(Resident::of(self.0))
    }
}

/// A backend whose tensors this process can read.
pub trait HostAccess: Backend {
    /// Calls `take` with the elements of `tensor`. Where they lie in this process's memory, they are copied only if they do
    /// not lie in a row.
    fn access<T>(tensor: FloatTensor<Self>, take: impl FnOnce(Access<'_>) -> T) -> T;

    /// Calls `look` with the elements of `tensor`, and waits for them if they are on a device.
    fn read<T>(tensor: FloatTensor<Self>, look: impl FnOnce(TensorBytes<'_>) -> T) -> Result<T> {
        Self::access(tensor, |access| match access {
            Access::Here(bytes) => Ok(look(bytes)),
            Access::Away(tensor) => tensor.read().wait(look).map_err(|lost| lost.of("a tensor")),
        })
    }
}

impl HostAccess for Flex {
    fn access<T>(tensor: FloatTensor<Self>, take: impl FnOnce(Access<'_>) -> T) -> T {
        let size = tensor.dtype().size();
        match tensor.layout().contiguous_offsets() {
            Some((start, end)) => {
                let bytes = &tensor.bytes()[start * size..end * size];
                take(Access::Here(TensorBytes { dtype: tensor.dtype(), bytes }))
            }
            None => {
                let tensor = tensor.to_contiguous();
                let bytes = &tensor.bytes()[..tensor.layout().num_elements() * size];
                take(Access::Here(TensorBytes { dtype: tensor.dtype(), bytes }))
            }
        }
    }
}

#[cfg(feature = "tch")]
impl HostAccess for LibTorch {
    fn access<T>(tensor: FloatTensor<Self>, take: impl FnOnce(Access<'_>) -> T) -> T {
        let tensor = libtorch::contiguous(tensor);
        take(Access::Here(TensorBytes { dtype: tensor.dtype(), bytes: libtorch::bytes(&tensor) }))
    }
}

#[cfg(feature = "cube")]
impl HostAccess for Cube {
    fn access<T>(tensor: FloatTensor<Self>, take: impl FnOnce(Access<'_>) -> T) -> T {
        take(Access::Away(Box::new(OnCube(tensor))))
    }
}

/// The type in which Burn's `dtype` is sent and saved.
pub(crate) fn dtype(dtype: BurnDType) -> Result<DType> {
    sent(dtype).ok_or_else(|| {
        Error::invalid_argument(format!("tensors of type {dtype:?} do not travel between ranks"))
            .with_remedy(INSTEAD)
    })
}

/// The same for the tensor `name`, which an error names.
pub(crate) fn dtype_of(name: &str, dtype: BurnDType) -> Result<DType> {
    sent(dtype).ok_or_else(|| {
        Error::invalid_argument(format!(
            "`{name}` is of type {dtype:?}: tensors of that type are neither sent to other ranks nor saved"
        ))
        .with_remedy(INSTEAD)
    })
}

const INSTEAD: &str = "cast it, or leave it out of the module";

fn sent(dtype: BurnDType) -> Option<DType> {
    match dtype {
        BurnDType::F64 => Some(DType::F64),
        BurnDType::F32 | BurnDType::Flex32 => Some(DType::F32),
        BurnDType::F16 => Some(DType::F16),
        BurnDType::BF16 => Some(DType::BF16),
        BurnDType::I64 | BurnDType::U64 => Some(DType::I64),
        BurnDType::I32 | BurnDType::U32 => Some(DType::I32),
        BurnDType::U8 | BurnDType::I8 => Some(DType::U8),
        BurnDType::Bool(_) if dtype.size() == 1 => Some(DType::U8),
        // As some devices store them.
        BurnDType::Bool(_) if dtype.size() == 4 => Some(DType::I32),
        _ => None,
    }
}

/// Tensor data of a copy of `bytes`, in memory that any element type can be read from.
pub(crate) fn tensor_data(bytes: &[u8], shape: &[usize], dtype: BurnDType) -> TensorData {
    let copy = match dtype.size() {
        8 => Bytes::from_elems(copied::<u64>(bytes)),
        4 => Bytes::from_elems(copied::<u32>(bytes)),
        2 => Bytes::from_elems(copied::<u16>(bytes)),
        _ => Bytes::from_bytes_vec(bytes.to_vec()),
    };
    TensorData::from_bytes(copy, shape.to_vec(), dtype)
}

fn copied<T: AnyBitPattern + NoUninit>(bytes: &[u8]) -> Vec<T> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(elements) => elements.to_vec(),
        Err(_) => bytemuck::pod_collect_to_vec(bytes),
    }
}

/// Calls `look` with the elements of `tensor`, whether or not it is part of a graph. Waits for them if it is on a device.
pub(crate) fn with_bytes<const D: usize, T>(
    tensor: Tensor<D>,
    look: impl FnOnce(TensorBytes<'_>) -> T,
) -> Result<T> {
    let tensor = if tensor.is_autodiff() { tensor.inner() } else { tensor };
    device::check(&tensor.device())?;
    match tensor.device().as_dispatch() {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(_) => {
            Cube::read(tensor.try_into_primitive::<Cube>().map_err(|_| elsewhere())?, look)
        }
        #[cfg(feature = "tch")]
        DispatchDevice::LibTorch(_) => {
            LibTorch::read(tensor.try_into_primitive::<LibTorch>().map_err(|_| elsewhere())?, look)
        }
        _ => Flex::read(tensor.try_into_primitive::<Flex>().map_err(|_| elsewhere())?, look),
    }
}

fn elsewhere() -> Error {
    Error::invalid_argument("a tensor is not on the device that it names")
}

/// `old` with other elements: in its own memory, if no other tensor shares it.
pub(crate) fn overwritten<const D: usize>(old: Tensor<D>, elements: &[u8]) -> Tensor<D> {
    let (shape, dtype, device) = (old.shape(), old.dtype(), old.device());
    let (tracked, needs_gradient) = (old.is_autodiff(), old.is_require_grad());
    let checkpointing = old.gradient_checkpointing_strategy();
    let bare = if tracked { old.inner() } else { old };
    let tensor = match in_place(bare, elements) {
        Some(tensor) => {
            let tensor = if tracked { Tensor::from_inner(tensor) } else { tensor };
            match checkpointing {
                Some(strategy) => tensor.with_gradient_checkpointing_strategy(strategy),
                None => tensor,
            }
        }
        None => Tensor::from_data(tensor_data(elements, shape.as_slice(), dtype), (&device, dtype)),
    };
    if needs_gradient { tensor.require_grad() } else { tensor }
}

/// None if the elements have to stand elsewhere.
fn in_place<const D: usize>(tensor: Tensor<D>, elements: &[u8]) -> Option<Tensor<D>> {
    match tensor.device().as_dispatch() {
        #[cfg(feature = "tch")]
        DispatchDevice::LibTorch(_) => {
            let mut tensor = tensor.try_into_primitive::<LibTorch>().ok()?;
            let memory = libtorch::bytes_mut(&mut tensor).filter(|memory| memory.len() == elements.len());
            memory?.copy_from_slice(elements);
            Some(Tensor::from_primitive::<LibTorch>(tensor))
        }
        _ => {
            let tensor = in_place_on_flex(tensor.try_into_primitive::<Flex>().ok()?, elements)?;
            Some(Tensor::from_primitive::<Flex>(tensor))
        }
    }
}

fn in_place_on_flex(mut tensor: FlexTensor, elements: &[u8]) -> Option<FlexTensor> {
    fn write<T: burn::tensor::Element + Pod>(tensor: &mut FlexTensor, elements: &[u8]) {
        bytemuck::cast_slice_mut(tensor.storage_mut::<T>()).copy_from_slice(elements);
    }
    let whole = tensor.layout().num_elements() * tensor.dtype().size() == tensor.bytes().len();
    let fits = whole && tensor.is_contiguous() && tensor.bytes().len() == elements.len();
    if !fits || !tensor.is_unique() {
        return None;
    }
    match tensor.dtype() {
        BurnDType::F64 => write::<f64>(&mut tensor, elements),
        BurnDType::F32 => write::<f32>(&mut tensor, elements),
        BurnDType::F16 => write::<f16>(&mut tensor, elements),
        BurnDType::BF16 => write::<bf16>(&mut tensor, elements),
        _ => return None,
    }
    Some(tensor)
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    fn elements(tensor: Tensor<2>) -> Vec<f32> {
        with_bytes(tensor, |tensor| bytemuck::cast_slice(tensor.bytes).to_vec()).unwrap()
    }

    #[test]
    fn views_and_transposes_are_read_in_row_order() {
        let tensor = Tensor::<2>::from_floats([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], &Device::flex());
        assert_eq!(elements(tensor.clone()), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(elements(tensor.clone().transpose()), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        assert_eq!(elements(tensor.clone().slice([1..2, 0..3])), [4.0, 5.0, 6.0]);
        assert_eq!(elements(tensor.slice([0..2, 1..2])), [2.0, 5.0]);
    }

    #[test]
    fn bytes_become_tensors() {
        let data = tensor_data(bytemuck::cast_slice(&[1.0f32, 2.0]), &[2, 1], BurnDType::F32);
        let tensor = Tensor::<2>::from_data(data, &Device::flex());
        assert_eq!(elements(tensor), [1.0, 2.0]);
    }

    #[test]
    fn quantized_tensors_are_refused() {
        let quantized = BurnDType::QFloat(Default::default());
        assert!(dtype(quantized).unwrap_err().is_invalid_argument());
        let error = dtype_of("head.weight", quantized).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("`head.weight`"), "{error}");
    }

    fn address<const D: usize>(tensor: &Tensor<D>) -> usize {
        with_bytes(tensor.clone(), |tensor| tensor.bytes.as_ptr() as usize).unwrap()
    }

    #[test]
    fn memory_of_one_s_own_is_written_where_it_is_and_shared_memory_is_left_alone() {
        let device = Device::flex().autodiff();
        let leaf = |values: [f32; 2]| Tensor::<1>::from_floats(values, &device).require_grad();
        let new = bytemuck::cast_slice::<f32, u8>(&[5.0, 6.0]);

        let old = leaf([1.0, 2.0]);
        let place = address(&old);
        let written = overwritten(old, new);
        assert_eq!(address(&written), place);
        assert!(written.is_require_grad());
        assert_eq!(written.to_data().try_to_vec::<f32>().unwrap(), [5.0, 6.0]);

        let old = leaf([1.0, 2.0]);
        let held = old.clone();
        let written = overwritten(old, new);
        assert_eq!(held.to_data().try_to_vec::<f32>().unwrap(), [1.0, 2.0]);
        assert_eq!(written.to_data().try_to_vec::<f32>().unwrap(), [5.0, 6.0]);
        assert!(written.is_require_grad());
    }
}
