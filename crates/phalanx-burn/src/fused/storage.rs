//! Tensors as slices: the memory itself if no other tensor shares it.

#[cfg(feature = "tch")]
use burn::backend::DispatchDevice;
use burn::backend::Flex;
#[cfg(feature = "tch")]
use burn::backend::{LibTorch, libtorch::TchTensor};
use burn::tensor::{DType, Device, Element, Tensor, TensorData};
use burn_flex::FlexTensor;
use bytemuck::Pod;

use crate::device;
#[cfg(feature = "tch")]
use crate::libtorch;

/// The type of the elements, if `tensor` lies in this process's memory and kernels are written for its type.
pub(super) fn supported<const D: usize>(tensor: &Tensor<D>) -> Option<DType> {
    let dtype = tensor.dtype();
    let here = !tensor.is_autodiff() && device::is_in_memory(&tensor.device());
    (here && matches!(dtype, DType::F32 | DType::F64)).then_some(dtype)
}

/// Whether there is nothing to compute. On CubeCL's devices Burn 0.22 subtracts one from each length, also from 0, before
/// it overwrites a tensor: a panic in a build with overflow checks.
pub(super) fn is_empty<const D: usize>(tensor: &Tensor<D>) -> bool {
    tensor.shape().num_elements() == 0
}

/// A tensor of a saved state, in the type in which it was saved. Burn 0.22's own states are loaded in the default type of floats.
pub(super) fn loaded<const D: usize>(data: TensorData, device: &Device) -> Tensor<D> {
    let dtype = data.dtype();
    // What the device cannot have, the step's device may not need.
    if device.supports_dtype(dtype) {
        Tensor::from_data(data, (device, dtype))
    } else {
        Tensor::from_data(data, device)
    }
}

/// A tensor's elements, row by row.
pub(super) enum Storage {
    Flex(FlexTensor),
    #[cfg(feature = "tch")]
    LibTorch(TchTensor),
}

impl Storage {
    /// The elements of a tensor that is [`supported`].
    pub fn of<const D: usize>(tensor: Tensor<D>) -> Self {
        match tensor.device().as_dispatch() {
            #[cfg(feature = "tch")]
            DispatchDevice::LibTorch(_) => {
                let Ok(tensor) = tensor.try_into_primitive::<LibTorch>() else {
                    unreachable!("a tensor on a LibTorch device is a LibTorch tensor")
                };
                Self::LibTorch(libtorch::contiguous(tensor))
            }
            _ => {
                let Ok(tensor) = tensor.try_into_primitive::<Flex>() else {
                    unreachable!("a tensor on the Flex device is a Flex tensor")
                };
                let layout = tensor.layout();
                let whole = layout.num_elements() * tensor.dtype().size() == tensor.bytes().len();
                Self::Flex(if layout.is_contiguous() && whole { tensor } else { tensor.to_contiguous() })
            }
        }
    }

    pub fn elements<T: Element + Pod>(&self) -> &[T] {
        match self {
            Self::Flex(tensor) => tensor.storage(),
            #[cfg(feature = "tch")]
            Self::LibTorch(tensor) => bytemuck::cast_slice(libtorch::bytes(tensor)),
        }
    }

    /// Copied first if another tensor shares the memory.
    pub fn elements_mut<T: Element + Pod>(&mut self) -> &mut [T] {
        match self {
            Self::Flex(tensor) => tensor.storage_mut(),
            #[cfg(feature = "tch")]
            Self::LibTorch(tensor) => bytemuck::cast_slice_mut(libtorch::own_bytes(tensor)),
        }
    }

    pub fn into_tensor<const D: usize>(self) -> Tensor<D> {
        match self {
            Self::Flex(tensor) => Tensor::from_primitive::<Flex>(tensor),
            #[cfg(feature = "tch")]
            Self::LibTorch(tensor) => Tensor::from_primitive::<LibTorch>(tensor),
        }
    }
}
