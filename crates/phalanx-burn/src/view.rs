//! Tensors in the memory of buckets, and of Horovod's gradients.
//!
//! Burn also takes foreign memory as [`Bytes::from_shared`], but copies all of it before it writes, and keeps both: an
//! optimizer that works in place would need more memory with views than without.
//!
//! So with views a bucket is split when it is averaged. Each gradient owns its bytes and frees its pages when the
//! optimizer drops it, and the next step allocates memory when its first gradient comes. At the end of forward, where
//! memory peaks, there is then no bucket at all, as in training alone.
#![allow(unsafe_code)] // Burn's interface for memory that is not its own has nothing else.

use std::fmt;
use std::mem::MaybeUninit;

use burn::tensor::{DType, TensorData};
use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};
use phalanx::BufferPart;

/// Memory that a tensor may stand in.
///
/// # Safety
/// Both functions always give the same bytes: at one place, as many, and at least as aligned as the type of the tensor.
pub(crate) unsafe trait Memory: Send + Sync + 'static {
    fn bytes(&self) -> &[u8];
    fn bytes_mut(&mut self) -> &mut [u8];
}

// SAFETY: a part neither moves nor changes its length. A bucket starts on a cache line, and its elements are all of one type.
unsafe impl Memory for BufferPart {
    fn bytes(&self) -> &[u8] {
        self.as_bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.as_bytes_mut()
    }
}

/// A part, and something that is dropped with it.
// SAFETY: as for the part.
unsafe impl<T: Send + Sync + 'static> Memory for (BufferPart, T) {
    fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.as_bytes_mut()
    }
}

// SAFETY: as for a part; its buffer is the same until it is dropped, and starts on a cache line.
#[cfg(feature = "horovod")]
unsafe impl Memory for crate::horovod::Recycled {
    fn bytes(&self) -> &[u8] {
        self.buffer().as_bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.buffer_mut().as_bytes_mut()
    }
}

/// Tensor data in `memory`, which belongs to the tensor from here on and is freed with it.
pub(crate) fn tensor_data(memory: impl Memory, shape: &[usize], dtype: DType) -> TensorData {
    let bytes = memory.bytes().len();
    // SAFETY: the controller has exactly so many bytes, all of them initialised.
    let bytes = unsafe { Bytes::from_controller(Box::new(Lent { memory, dtype }), bytes) };
    TensorData::from_bytes(bytes, shape.to_vec(), dtype)
}

struct Lent<M> {
    memory: M,
    dtype: DType,
}

impl<M: Memory> AllocationController for Lent<M> {
    fn alloc_align(&self) -> usize {
        self.dtype.size()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    // SAFETY: whoever calls this writes initialised bytes only, as the trait demands; the bytes are this memory's alone.
    unsafe fn memory_mut(&mut self, _: AccessPolicy) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        let bytes = self.memory.bytes_mut();
        let (first, count) = (bytes.as_mut_ptr().cast(), bytes.len());
        // SAFETY: the same bytes, borrowed as long; `MaybeUninit<u8>` has the layout of `u8`.
        Ok(unsafe { std::slice::from_raw_parts_mut(first, count) })
    }

    fn memory(&self, _: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        let bytes = self.memory.bytes();
        // SAFETY: as above, and only read.
        Ok(unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len()) })
    }
}

impl<M: Memory> fmt::Debug for Lent<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lent({} bytes)", self.memory.bytes().len())
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor};
    use phalanx::Buffer;

    use super::*;

    fn part(values: &[f32]) -> BufferPart {
        let mut buffer = Buffer::from_slice(&vec![0.0f32; values.len() + 1]);
        buffer.as_mut_slice::<f32>().unwrap()[1..].copy_from_slice(values);
        buffer.split([0..4, 4..4 * values.len() + 4]).remove(1)
    }

    fn tensor(part: BufferPart) -> Tensor<1> {
        let elements = part.as_bytes().len() / 4;
        Tensor::from_data(tensor_data(part, &[elements], DType::F32), (&Device::flex(), DType::F32))
    }

    fn address(tensor: &Tensor<1>) -> usize {
        crate::tensor_bytes::with_bytes(tensor.clone(), |tensor| tensor.bytes.as_ptr() as usize).unwrap()
    }

    #[test]
    fn a_tensor_stands_in_its_part_and_is_changed_there() {
        let part = part(&[1.0, 2.0, 3.0]);
        let place = part.as_bytes().as_ptr() as usize;
        let tensor = tensor(part);
        assert_eq!(address(&tensor), place);
        let tensor = tensor * 2.0;
        assert_eq!(address(&tensor), place);
        assert_eq!(tensor.into_data().try_to_vec::<f32>().unwrap(), [2.0, 4.0, 6.0]);
    }

    #[test]
    fn a_tensor_that_another_shares_is_copied_before_it_is_changed() {
        let tensor = tensor(part(&[1.0, 2.0]));
        let other = tensor.clone();
        let changed = tensor + 1.0;
        assert_eq!(other.into_data().try_to_vec::<f32>().unwrap(), [1.0, 2.0]);
        assert_eq!(changed.into_data().try_to_vec::<f32>().unwrap(), [2.0, 3.0]);
    }

    /// Memory that is copied from a device when it is first looked at, and whose device has failed.
    struct Lost;

    impl AllocationController for Lost {
        fn alloc_align(&self) -> usize {
            4
        }

        fn property(&self) -> AllocationProperty {
            AllocationProperty::Device
        }

        // SAFETY: nothing is given that could be written.
        unsafe fn memory_mut(&mut self, _: AccessPolicy) -> Result<&mut [MaybeUninit<u8>], AccessError> {
            Err(AccessError::Read("the device was lost".to_owned()))
        }

        fn memory(&self, _: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
            Err(AccessError::Read("the device was lost".to_owned()))
        }
    }

    #[test]
    fn what_a_device_cannot_give_is_an_error_with_its_name() {
        // SAFETY: the controller never gives any bytes.
        let bytes = unsafe { Bytes::from_controller(Box::new(Lost), 8) };
        let data = TensorData::from_bytes(bytes, vec![2], DType::F32);
        let error = crate::read_back::arrived(Ok::<_, ()>(data), "`layers.0.bias`").unwrap_err().to_string();
        assert!(error.contains("`layers.0.bias`") && error.contains("the device was lost"), "{error}");
    }

    #[test]
    fn data_leaves_its_part_by_a_copy() {
        let data = tensor_data(part(&[1.0, 2.0]), &[2], DType::F32);
        assert_eq!(data.clone().try_into_vec::<f32>().unwrap(), [1.0, 2.0]);
        assert_eq!(data.as_bytes(), bytemuck::cast_slice::<f32, u8>(&[1.0, 2.0]));
    }
}
