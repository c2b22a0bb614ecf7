//! Tensors as slices: the memory itself if no other tensor shares it.

use burn::backend::Flex;
use burn::tensor::{DType, Device, Element, Tensor};
use burn_flex::FlexTensor;
use bytemuck::Pod;

/// The type of the elements, if `tensor` lies in this process's memory and kernels are written for its type.
pub(super) fn supported<const D: usize>(tensor: &Tensor<D>) -> Option<DType> {
    let dtype = tensor.dtype();
    let here = !tensor.is_autodiff() && tensor.device() == Device::flex();
    (here && matches!(dtype, DType::F32 | DType::F64)).then_some(dtype)
}

/// A tensor's elements, row by row.
pub(super) struct Storage(FlexTensor);

impl Storage {
    /// The elements of a tensor that is [`supported`].
    pub fn of<const D: usize>(tensor: Tensor<D>) -> Self {
        let Ok(tensor) = tensor.try_into_primitive::<Flex>() else {
            unreachable!("a tensor on the Flex device is a Flex tensor")
        };
        let layout = tensor.layout();
        let whole = layout.num_elements() * tensor.dtype().size() == tensor.bytes().len();
        Self(if layout.is_contiguous() && whole { tensor } else { tensor.to_contiguous() })
    }

    pub fn elements<T: Element + Pod>(&self) -> &[T] {
        self.0.storage()
    }

    /// Copied first if another tensor shares the memory.
    pub fn elements_mut<T: Element + Pod>(&mut self) -> &mut [T] {
        self.0.storage_mut()
    }

    pub fn into_tensor<const D: usize>(self) -> Tensor<D> {
        Tensor::from_primitive::<Flex>(self.0)
    }
}
