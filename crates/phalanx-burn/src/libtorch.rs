//! The memory of libtorch's tensors on the processors: borrowed, and written in place.
//!
//! Burn counts the tensors that stand in a piece of memory (`TchTensor::storage`), and changes the memory in place only for the only
//! one. So whoever holds a tensor may read its memory, and whoever holds the only one may write it. libtorch has done its work on the
//! processors when an operation returns.
#![allow(unsafe_code)] // tch has nothing else for memory in place.

use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};

use burn::backend::TensorMetadata;
use burn::backend::libtorch::{LibTorchDevice, TchTensor};

/// `tensor` with its elements row by row, in the same memory if they are.
pub(crate) fn contiguous(tensor: TchTensor) -> TchTensor {
    if tensor.tensor.is_contiguous() {
        return tensor;
    }
    TchTensor::new(tensor.tensor.contiguous())
}

/// The elements of a [`contiguous`] tensor.
pub(crate) fn bytes(tensor: &TchTensor) -> &[u8] {
    let (first, length) = memory(tensor);
    // SAFETY: `memory` says that so many bytes of the process are there, with some value each; the tensor, which is borrowed,
    // keeps them, and while it is there Burn writes them for nobody.
    unsafe { std::slice::from_raw_parts(first, length) }
}

/// The elements of a tensor, if they lie row by row and no other tensor shares the memory.
pub(crate) fn bytes_mut(tensor: &mut TchTensor) -> Option<&mut [u8]> {
    if !tensor.can_mut() || !tensor.tensor.is_contiguous() {
        return None;
    }
    // Burn reads its count without an order. What other threads did in this memory, before they dropped their tensors, comes first.
    fence(Ordering::Acquire);
    let (first, length) = memory(tensor);
    // SAFETY: as in `bytes`; and this tensor, which is borrowed for as long, is the only one in that memory.
    Some(unsafe { std::slice::from_raw_parts_mut(first, length) })
}

/// The elements of a tensor, which is copied first if they do not lie row by row or another tensor shares the memory.
pub(crate) fn own_bytes(tensor: &mut TchTensor) -> &mut [u8] {
    if bytes_mut(tensor).is_none() {
        // tch's `copy` keeps strides. A dimension of length 1 may have stride 0, and Burn takes the tensor for a repeated one then.
        let theirs = &tensor.tensor;
        let mut own = theirs.new_empty(theirs.size(), (theirs.kind(), theirs.device()));
        own.copy_(theirs);
        *tensor = TchTensor::new(own);
    }
    bytes_mut(tensor).unwrap_or_else(|| unreachable!("the copy lies row by row, and in no other tensor"))
}

/// Where the elements of a [`contiguous`] tensor lie, aligned to their type, and how many bytes they are. All of them have a
/// value, also those of a tensor that nobody has written (`Tensor::empty`): some value.
fn memory(tensor: &TchTensor) -> (*mut u8, usize) {
    assert!(tensor.device() == LibTorchDevice::Cpu, "`device::check` refuses libtorch's other devices");
    assert!(tensor.tensor.is_contiguous(), "the elements do not lie in a row");
    match tensor.tensor.numel() * tensor.dtype().size() {
        // libtorch's address is null.
        0 => (NonNull::<u64>::dangling().as_ptr().cast(), 0),
        length => (initialised(tensor.tensor.data_ptr().cast()), length),
    }
}

/// The address, after which the compiler must take the memory there for written.
///
/// libtorch leaves the memory of a new tensor as the C library's allocator gave it. The processor reads some bytes there, and the
/// types of all elements take any. But to the language bytes that nobody has written have no value, and the compiler might
/// make anything of a read of them, if it saw where they come from.
fn initialised(first: *mut u8) -> *mut u8 {
    let mut first = first;
    // SAFETY: there is no instruction. What the compiler must assume is that it has written the memory, whose address it is given;
    // all of that is allocated, and the only Rust code that may write it meanwhile is the caller, who borrows the tensor.
    unsafe { std::arch::asm!("/* {0} */", inout(reg) first, options(nostack, preserves_flags)) };
    first
}

#[cfg(test)]
mod tests {
    use burn::backend::LibTorch;
    use burn::tensor::{Device, Tensor};

    use super::*;

    fn primitive(tensor: Tensor<2>) -> TchTensor {
        tensor.try_into_primitive::<LibTorch>().unwrap()
    }

    fn tensor() -> Tensor<2> {
        Tensor::from_floats([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], &Device::libtorch())
    }

    fn elements(tensor: &TchTensor) -> &[f32] {
        bytemuck::cast_slice(bytes(tensor))
    }

    #[test]
    fn elements_are_read_where_they_lie_and_in_row_order() {
        let whole = primitive(tensor());
        let place = whole.tensor.data_ptr();
        let whole = contiguous(whole);
        assert_eq!((elements(&whole), whole.tensor.data_ptr()), (&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0][..], place));
        let row = contiguous(primitive(tensor().slice([1..2, 0..3])));
        assert_eq!(elements(&row), [4.0, 5.0, 6.0]);
        let turned = contiguous(primitive(tensor().transpose()));
        assert_eq!(elements(&turned), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        let column = contiguous(primitive(tensor().slice([0..2, 1..2])));
        assert_eq!(elements(&column), [2.0, 5.0]);
    }

    #[test]
    fn no_elements_are_a_slice_of_any_type() {
        let mut none = primitive(Tensor::zeros([0, 3], &Device::libtorch()));
        assert_eq!(bytemuck::cast_slice::<u8, f64>(bytes(&none)), [0.0; 0]);
        assert_eq!(bytemuck::cast_slice_mut::<u8, f64>(own_bytes(&mut none)), [0.0; 0]);
    }

    #[test]
    fn a_repeated_tensor_gets_memory_of_its_own() {
        let first = Tensor::<1>::from_floats([1.0, 2.0, 3.0], &Device::libtorch());
        let rows = first.clone().expand([2, 3]);
        // Both rows are the same memory (stride 0). A slice of one row keeps that stride, though with length 1 it does not matter.
        let row = rows.clone().slice([0..1, 0..3]);
        for (repeated, expected) in [(rows, &[9.0, 2.0, 3.0, 1.0, 2.0, 3.0][..]), (row, &[9.0, 2.0, 3.0])] {
            let mut tensor = primitive(repeated);
            assert_eq!(tensor.tensor.stride(), [0, 1]);
            bytemuck::cast_slice_mut::<u8, f32>(own_bytes(&mut tensor))[0] = 9.0;
            assert_eq!(elements(&tensor), expected);
        }
        assert_eq!(first.into_data().try_to_vec::<f32>().unwrap(), [1.0, 2.0, 3.0]);
    }

    #[test]
    fn memory_is_written_by_its_only_tensor_and_no_other() {
        let own = tensor();
        let shared = own.clone();
        assert!(bytes_mut(&mut primitive(shared)).is_none());
        // A part of a tensor that is still there.
        assert!(bytes_mut(&mut primitive(own.clone().slice([1..2, 0..3]))).is_none());
        let mut own = primitive(own);
        bytemuck::cast_slice_mut::<u8, f32>(bytes_mut(&mut own).unwrap())[4] = 9.0;
        let own = Tensor::<2>::from_primitive::<LibTorch>(own);
        assert_eq!(own.into_data().try_to_vec::<f32>().unwrap(), [1.0, 2.0, 3.0, 4.0, 9.0, 6.0]);
        // One element that stands for a whole row.
        let repeated = Tensor::<2>::ones([2, 1], &Device::libtorch()).expand([2, 3]);
        assert!(bytes_mut(&mut primitive(repeated)).is_none());
    }

    /// The memory holds what the allocator left there: two reads give the same, and a write takes effect.
    #[test]
    fn memory_that_nobody_has_written_has_some_value() {
        let mut empty = primitive(Tensor::empty([100, 100], &Device::libtorch()));
        let first = bytes(&empty).to_vec();
        assert_eq!(first, bytes(&empty));
        own_bytes(&mut empty).fill(7);
        assert!(bytes(&empty).iter().all(|byte| *byte == 7));
    }
}
