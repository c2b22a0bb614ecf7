//! Memory that can be owned by an operation in flight.

use std::collections::TryReserveError;
use std::fmt;
use std::hint::black_box;
use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use phalanx_sys::arena::Region;
use phalanx_sys::parts::{Keeper, Part};

use crate::dtype::{DType, Element};
use crate::error::{Error, Result};

/// What to do where there is no memory for what a call needs.
pub(crate) const MEMORY_REMEDY: &str = "make less of it, or start fewer ranks on this host";

fn out_of_memory(what: fmt::Arguments<'_>, error: TryReserveError) -> Error {
    Error::out_of_memory(format!("no memory for {what}")).with_source(error).with_remedy(MEMORY_REMEDY)
}

/// A cache line: the unit in which buffers are allocated, so that every element type is aligned in them.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Bytes that start on a cache line.
#[derive(Clone, Default)]
pub(crate) struct AlignedBytes {
    lines: Vec<Line>,
    len: usize,
}

impl AlignedBytes {
    fn zeroed(len: usize) -> Self {
        Self { lines: vec![Line::zeroed(); len.div_ceil(64)], len }
    }

    /// A copy of `bytes`.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub(crate) fn copy_of(bytes: &[u8]) -> Result<Self> {
        let mut copy = Self::default();
        copy.reserve_len(bytes.len())?;
        copy.as_mut_slice().copy_from_slice(bytes);
        Ok(copy)
    }

    /// The bytes that its memory can hold.
    fn capacity(&self) -> usize {
        self.lines.len() * size_of::<Line>()
    }

    /// Grows to at least `len` bytes; the new ones are zero.
    ///
    /// # Errors
    /// If there is no memory for them. Nothing has changed then.
    pub(crate) fn reserve_len(&mut self, len: usize) -> Result<()> {
        self.grow(len).map_err(|error| out_of_memory(format_args!("{len} bytes"), error))
    }

    fn grow(&mut self, len: usize) -> std::result::Result<(), TryReserveError> {
        if len > self.len {
            let count = len.div_ceil(64);
            self.lines.try_reserve_exact(count.saturating_sub(self.lines.len()))?;
            self.lines.resize(count, Line::zeroed());
            self.len = len;
        }
        Ok(())
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

/// Elements of one type, owned by the program, or by a [`Work`](crate::Work) in flight.
///
/// An asynchronous operation takes the buffer and returns it when it is done. So memory of a running
/// transfer cannot be freed or changed.
///
/// ```
/// use phalanx::{Buffer, DType};
/// let mut gradients = Buffer::zeroed(DType::F32, 3);
/// gradients.as_mut_slice::<f32>()?[1] = 2.5;
/// assert_eq!(gradients.as_slice::<f32>()?, [0.0, 2.5, 0.0]);
/// # Ok::<(), phalanx::Error>(())
/// ```
pub struct Buffer {
    storage: Storage,
    dtype: DType,
}

enum Storage {
    Unregistered(AlignedBytes),
    /// A group's registered memory, which the other ranks of this host reach.
    Registered(Region),
    /// Either, of which others hold a [`BufferKeeper`].
    Kept(Part),
}

/// Whether there is memory for so many bytes. Of a length that a peer announces this is asked first: without memory, to take it would end the process.
pub fn has_room(bytes: usize) -> bool {
    let mut memory = Vec::<u8>::new();
    let has_room = memory.try_reserve_exact(bytes).is_ok();
    // Memory that nobody looks at is none that an optimised program asks for.
    black_box(&memory);
    has_room
}

/// Empty memory for so many elements: for what grows with the parameters or the ranks, and for what others have said the length of.
/// Without memory, to let a `Vec` take it would end the process.
///
/// # Errors
/// If there is none.
pub fn with_room<T>(elements: usize) -> Result<Vec<T>> {
    let mut memory = Vec::new();
    memory.try_reserve_exact(elements).map_err(|error| {
        out_of_memory(format_args!("{elements} elements of {} bytes", size_of::<T>()), error)
    })?;
    Ok(memory)
}

/// A copy of `elements`, as [`with_room`].
///
/// # Errors
/// If there is no memory for it.
pub fn copy_of<T: Copy>(elements: &[T]) -> Result<Vec<T>> {
    let mut copy = with_room(elements.len())?;
    copy.extend_from_slice(elements);
    Ok(copy)
}

impl Buffer {
    /// `elements` zeros. As for a `Vec`, the process ends if there is no memory for them: see [`try_zeroed`](Self::try_zeroed).
    ///
    /// # Panics
    /// As `Vec`, if they are more than the address space holds.
    pub fn zeroed(dtype: DType, elements: usize) -> Self {
        // If it wrapped around, a short buffer would be taken for a long one.
        let bytes = AlignedBytes::zeroed(elements.saturating_mul(dtype.size()));
        Self { storage: Storage::Unregistered(bytes), dtype }
    }

    /// As [`zeroed`](Self::zeroed), for lengths that a peer announces, and for what a call of all ranks needs: without memory
    /// [`zeroed`](Self::zeroed) ends the process.
    ///
    /// # Errors
    /// If there is no memory for so many ([`is_out_of_memory`](Error::is_out_of_memory)).
    pub fn try_zeroed(dtype: DType, elements: usize) -> Result<Self> {
        let mut bytes = AlignedBytes::default();
        // If it wrapped around, a short buffer would be taken for a long one.
        let grown = bytes.grow(elements.saturating_mul(dtype.size()));
        grown.map_err(|error| out_of_memory(format_args!("{elements} x {dtype}"), error))?;
        Ok(Self { storage: Storage::Unregistered(bytes), dtype })
    }

    /// A copy of `elements`. As for a `Vec`, the process ends if there is no memory for it: see [`try_from_slice`](Self::try_from_slice).
    pub fn from_slice<T: Element>(elements: &[T]) -> Self {
        let mut buffer = Self::zeroed(T::DTYPE, elements.len());
        buffer.as_bytes_mut().copy_from_slice(bytemuck::cast_slice(elements));
        buffer
    }

    /// As [`from_slice`](Self::from_slice).
    ///
    /// # Errors
    /// If there is no memory for the copy ([`is_out_of_memory`](Error::is_out_of_memory)).
    pub fn try_from_slice<T: Element>(elements: &[T]) -> Result<Self> {
        let bytes = AlignedBytes::copy_of(bytemuck::cast_slice(elements))?;
        Ok(Self { storage: Storage::Unregistered(bytes), dtype: T::DTYPE })
    }

    /// A buffer of `elements`, in this one's memory if that is long enough; their values are then those of earlier use. For memory that is
    /// written next: new memory is cleared, and comes page by page from the kernel.
    #[doc(hidden)]
    #[must_use]
    pub fn reused(self, elements: usize) -> Self {
        let Self { storage, dtype } = self;
        match (storage, elements.saturating_mul(dtype.size())) {
            (Storage::Unregistered(bytes), len) if len <= bytes.capacity() => {
                Self { storage: Storage::Unregistered(AlignedBytes { len, ..bytes }), dtype }
            }
            _ => Self::zeroed(dtype, elements),
        }
    }

    /// The bytes that it may have after [`reused`](Self::reused) without new memory.
    #[doc(hidden)]
    pub fn capacity(&self) -> usize {
        match &self.storage {
            Storage::Unregistered(bytes) => bytes.capacity(),
            Storage::Registered(_) | Storage::Kept(_) => 0,
        }
    }

    /// All of a region, as elements of `dtype`.
    pub(crate) fn registered(dtype: DType, region: Region) -> Self {
        Self { storage: Storage::Registered(region), dtype }
    }

    /// Whether the other ranks of this host can reach its memory, so that collectives need no copy. If ranks share memory,
    /// [`ProcessGroup::alloc`](crate::ProcessGroup::alloc) returns registered buffers.
    pub fn is_registered(&self) -> bool {
        match &self.storage {
            Storage::Unregistered(_) => false,
            Storage::Registered(_) => true,
            Storage::Kept(part) => part.is_of_region(),
        }
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of its elements.
    pub fn len(&self) -> usize {
        self.as_bytes().len() / self.dtype.size()
    }

    /// Whether the number of elements is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its elements.
    ///
    /// # Errors
    /// If `T` is not its type.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        self.check::<T>()?;
        Ok(bytemuck::cast_slice(self.as_bytes()))
    }

    /// Its elements, for writing.
    ///
    /// # Errors
    /// If `T` is not its type.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        self.check::<T>()?;
        Ok(bytemuck::cast_slice_mut(self.as_bytes_mut()))
    }

    /// Its memory.
    pub fn as_bytes(&self) -> &[u8] {
        match &self.storage {
            Storage::Unregistered(bytes) => bytes.as_slice(),
            Storage::Registered(region) => region.as_slice(),
            Storage::Kept(part) => part.as_slice(),
        }
    }

    /// Its memory, for writing.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.storage {
            Storage::Unregistered(bytes) => bytes.as_mut_slice(),
            Storage::Registered(region) => region.as_mut_slice(),
            Storage::Kept(part) => part.as_mut_slice(),
        }
    }

    /// Keeps its memory, with its content and at its address, when the buffer is dropped: for foreign views of it, such as
    /// another library's tensors, which then never dangle. The keeper gives no access; whoever uses the memory by its
    /// address sees to it that nobody else does at the same time.
    pub fn keeper(&mut self) -> BufferKeeper {
        let bytes = self.as_bytes().len();
        let whole = std::iter::once(0..bytes);
        let storage = std::mem::replace(&mut self.storage, Storage::Unregistered(AlignedBytes::default()));
        let mut parts = match storage {
            // A length of whole cache lines is cut to the elements.
            Storage::Unregistered(bytes) => Part::of_vec(bytes.lines, whole),
            Storage::Registered(region) => Part::of_region(region, whole),
            Storage::Kept(part) => vec![part],
        };
        // There is exactly one.
        let mut part = parts.remove(0);
        let keeper = part.keeper();
        self.storage = Storage::Kept(part);
        BufferKeeper { memory: keeper, dtype: self.dtype }
    }

    /// Splits it into the parts at `places`, counted in bytes. Bytes outside all places are lost.
    ///
    /// # Panics
    /// If places overlap, do not ascend, or lie beyond the end.
    pub fn split(self, places: impl IntoIterator<Item = Range<usize>>) -> Vec<BufferPart> {
        let parts = match self.storage {
            Storage::Unregistered(bytes) => Part::of_vec(bytes.lines, places),
            Storage::Registered(region) => Part::of_region(region, places),
            Storage::Kept(part) => part.divide(places),
        };
        parts.into_iter().map(BufferPart).collect()
    }

    fn check<T: Element>(&self) -> Result<()> {
        if T::DTYPE == self.dtype {
            Ok(())
        } else {
            Err(Error::invalid_argument(format!(
                "a buffer of {} was used as one of {}",
                self.dtype,
                T::DTYPE
            ))
            .with_remedy("use the elements' own type, which Buffer::dtype says"))
        }
    }
}

/// Keeps the memory of a [`Buffer`]: see [`Buffer::keeper`].
#[derive(Clone, Debug)]
pub struct BufferKeeper {
    memory: Keeper,
    dtype: DType,
}

impl BufferKeeper {
    /// The buffer again, if nobody has it, a part of it, or another keeper.
    ///
    /// # Errors
    /// Otherwise the keeper itself.
    pub fn reclaim(self) -> std::result::Result<Buffer, Self> {
        let Self { memory, dtype } = self;
        match memory.reclaim() {
            Ok(part) => Ok(Buffer { storage: Storage::Kept(part), dtype }),
            Err(memory) => Err(Self { memory, dtype }),
        }
    }
}

/// A part of a split [`Buffer`], in the buffer's memory and with its own owner.
///
/// ```
/// use phalanx::{Buffer, BufferPart};
/// let parts: Vec<BufferPart> = Buffer::from_slice(&[1u8, 2, 3]).split([0..1, 1..3]);
/// let [_, mut rest] = parts.try_into().map_err(|_| "two parts")?;
/// rest.as_bytes_mut()[0] = 5;
/// assert_eq!(rest.as_bytes(), [5, 3]);
/// # Ok::<(), &str>(())
/// ```
///
/// Registered memory of many pages is freed with its part; all other memory with the last part.
#[derive(Debug)]
pub struct BufferPart(Part);

impl BufferPart {
    /// Its memory.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_slice()
    }

    /// Its memory, for writing.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.0.as_mut_slice()
    }
}

impl Clone for Buffer {
    /// A copy in unregistered memory, of which groups have no limit as of [`ProcessGroup::alloc`](crate::ProcessGroup::alloc)'s. As for a `Vec`, the
    /// process ends if there is no memory for it: see [`Buffer::try_from_slice`].
    fn clone(&self) -> Self {
        let mut copy = Self::zeroed(self.dtype, self.len());
        copy.as_bytes_mut().copy_from_slice(self.as_bytes());
        copy
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} x {})", self.len(), self.dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_knows_its_type_and_is_aligned() {
        let buffer = Buffer::from_slice(&[1i64, -2, 3]);
        assert_eq!(buffer.len(), 3);
        assert_eq!(buffer.as_slice::<i64>().unwrap(), [1, -2, 3]);
        assert!(buffer.as_slice::<f32>().unwrap_err().is_invalid_argument());
        assert_eq!(buffer.as_bytes().as_ptr() as usize % 64, 0);
        assert!(Buffer::zeroed(DType::U8, 0).is_empty());
    }

    #[test]
    fn a_reused_buffer_has_its_memory_and_the_length_that_was_asked() {
        let buffer = Buffer::from_slice(&[1u8; 1000]);
        let address = buffer.as_bytes().as_ptr();
        assert_eq!(buffer.capacity(), 1024);
        let buffer = buffer.reused(100);
        assert_eq!(
            (buffer.as_bytes().as_ptr(), buffer.as_bytes(), buffer.capacity()),
            (address, &[1; 100][..], 1024)
        );
        let buffer = buffer.reused(1024);
        assert_eq!((buffer.as_bytes().as_ptr(), buffer.len()), (address, 1024));
        assert_eq!(buffer.reused(1025).as_bytes(), [0; 1025]);
        let mut kept = Buffer::zeroed(DType::U8, 64);
        let _keeper = kept.keeper();
        let other = kept.as_bytes().as_ptr();
        assert_eq!(kept.capacity(), 0);
        assert_ne!(kept.reused(64).as_bytes().as_ptr(), other, "whoever keeps its memory may use it");
    }

    #[test]
    fn a_kept_buffer_is_the_same_memory() {
        let mut buffer = Buffer::from_slice(&[1.5f32, 2.5, 3.5]);
        let address = buffer.as_bytes().as_ptr();
        let keeper = buffer.keeper();
        drop(buffer.keeper());
        assert_eq!((buffer.as_bytes().as_ptr(), buffer.len(), buffer.is_registered()), (address, 3, false));
        buffer.as_mut_slice::<f32>().unwrap()[2] = 4.5;
        let parts = buffer.split([0..4, 4..12]);
        assert_eq!(bytemuck::cast_slice::<u8, f32>(parts[1].as_bytes()), [2.5, 4.5]);
        drop((parts, keeper));
    }

    #[test]
    fn a_buffer_for_which_there_is_no_memory_is_an_error() {
        let buffer = Buffer::try_zeroed(DType::F64, 9).unwrap();
        assert_eq!(buffer.as_slice::<f64>().unwrap(), [0.0; 9]);
        // More than processors can address, and more than a `usize` counts.
        for elements in [1 << 58, usize::MAX / 8 + 2] {
            let error = Buffer::try_zeroed(DType::F64, elements).unwrap_err();
            assert!(error.is_out_of_memory() && error.remedy().is_some(), "{error}");
        }
    }

    #[test]
    fn room_that_there_is_not_is_an_error() {
        let error = with_room::<f32>(1 << 60).unwrap_err();
        assert!(error.is_out_of_memory() && error.remedy().is_some(), "{error}");
        assert!(
            error.to_string().contains("no memory for 1152921504606846976 elements of 4 bytes"),
            "{error}"
        );
        assert_eq!(copy_of(&[1u64, 2]).unwrap(), [1, 2]);
    }

    #[test]
    fn memory_that_cannot_grow_is_an_error_and_stays_as_it_is() {
        let mut bytes = AlignedBytes::copy_of(&[7; 65]).unwrap();
        for length in [1 << 60, usize::MAX] {
            let error = bytes.reserve_len(length).unwrap_err();
            assert!(error.is_out_of_memory() && error.remedy().is_some(), "{error}");
        }
        assert_eq!(bytes.as_slice(), [7; 65]);
        bytes.reserve_len(66).unwrap();
        assert_eq!((bytes.as_slice().len(), bytes.as_slice()[64..].to_vec()), (66, vec![7, 0]));
    }

    #[test]
    #[should_panic(expected = "capacity overflow")]
    fn a_buffer_is_never_shorter_than_was_asked() {
        Buffer::zeroed(DType::F64, usize::MAX / 8 + 2);
    }
}
