//! Memory of one's own on a device.

use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use phalanx::adapter::{copy_of, with_room};
use phalanx::{Deadline, Error, Result};

use super::device::Device;
use super::memory::DeviceMemory;
use super::raw::OUT_OF_MEMORY;
use super::stream::Stream;
use crate::element::Element;

/// Elements in the memory of a device, which are freed with this value, when all is done that was queued before on any [`Stream`]. Other
/// work with them, on a stream for which there is no [`Stream`], is done before they are dropped.
///
/// Copies are queued on a stream, and waited for. What other streams do with the buffer must be ordered before, by
/// [`Stream::wait_for`] or [`Work::wait`](crate::Work::wait).
pub struct DeviceBuffer<T> {
    device: Device,
    pointer: u64,
    len: usize,
    _elements: PhantomData<T>,
}

impl<T: Element> DeviceBuffer<T> {
    /// `len` zeros.
    ///
    /// # Errors
    /// If there is too little memory.
    pub fn zeroed(stream: &Stream, len: usize) -> Result<Self> {
        let buffer = Self::unspecified(stream, len)?;
        if len > 0 {
            let _bound = stream.device().bind()?;
            let cuda = stream.device().cuda();
            // SAFETY: the buffer has as many bytes, and nothing else uses it.
            let code = unsafe { (cuda.cuMemsetD8Async)(buffer.pointer, 0, buffer.bytes(), stream.raw()) };
            cuda.check("cuMemsetD8Async", code)?;
        }
        buffer.when(stream.synchronize(longest()))
    }

    /// A copy of `elements`.
    ///
    /// # Errors
    /// If there is too little memory, or the stream does not get to the copy.
    pub fn from_slice(stream: &Stream, elements: &[T]) -> Result<Self> {
        let mut buffer = Self::unspecified(stream, elements.len())?;
        let written = buffer.write(stream, elements);
        buffer.when(written)
    }

    /// Copies `elements` into the buffer.
    ///
    /// # Errors
    /// If their number is another one, this machine has no memory for a copy of them, a graph is captured from the stream, or the stream does not get to the
    /// copy.
    pub fn write(&mut self, stream: &Stream, elements: &[T]) -> Result<()> {
        self.check(stream, elements.len())?;
        if elements.is_empty() {
            return Ok(());
        }
        // If the stream is stuck, the copy may still come: this memory then stays.
        let staged = copy_of(elements)?;
        let bound = stream.device().bind()?;
        let cuda = stream.device().cuda();
        // SAFETY: both have as many bytes, and live until the copy is done.
        let code = unsafe {
            (cuda.cuMemcpyHtoDAsync_v2)(self.pointer, staged.as_ptr().cast(), self.bytes(), stream.raw())
        };
        drop(bound);
        cuda.check("cuMemcpyHtoDAsync", code)?;
        stream.synchronize(longest()).inspect_err(|_| std::mem::forget(staged))
    }

    /// A copy of the elements, after all that has been queued on `stream`.
    ///
    /// # Errors
    /// If this machine has no memory for it, or the stream does not get to the copy.
    pub fn to_vec(&self, stream: &Stream) -> Result<Vec<T>> {
        self.check(stream, self.len)?;
        let mut elements = with_room(self.len)?;
        elements.resize(self.len, T::zeroed());
        if elements.is_empty() {
            return Ok(elements);
        }
        // The driver waits for the stream before it copies to memory that is not pinned, and without a limit.
        stream.synchronize(longest())?;
        let bound = stream.device().bind()?;
        let cuda = stream.device().cuda();
        // SAFETY: both have as many bytes, and live until the copy is done. Any bytes are a valid `T`.
        let code = unsafe {
            (cuda.cuMemcpyDtoHAsync_v2)(
                elements.as_mut_ptr().cast(),
                self.pointer,
                self.bytes(),
                stream.raw(),
            )
        };
        drop(bound);
        cuda.check("cuMemcpyDtoHAsync", code)?;
        match stream.synchronize(longest()) {
            Ok(()) => Ok(elements),
            Err(error) => {
                // The copy may still come.
                std::mem::forget(elements);
                Err(error)
            }
        }
    }

    /// Queues a copy of the elements of `other`, which is on the same device, into this buffer. Nothing waits for it.
    /// From another device: [`copy_from_peer`](Self::copy_from_peer).
    ///
    /// # Errors
    /// If the numbers of elements differ.
    pub fn copy_from(&mut self, stream: &Stream, other: &Self) -> Result<()> {
        self.check(stream, other.len)?;
        other.check(stream, other.len)?;
        if self.len == 0 {
            return Ok(());
        }
        let _bound = stream.device().bind()?;
        let cuda = stream.device().cuda();
        // SAFETY: both have as many bytes on this device. Neither is freed before what is queued on the stream is done.
        let code =
            unsafe { (cuda.cuMemcpyDtoDAsync_v2)(self.pointer, other.pointer, self.bytes(), stream.raw()) };
        cuda.check("cuMemcpyDtoDAsync", code)
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// For what is queued on `stream` from now on, and for all when that is waited for.
    fn unspecified(stream: &Stream, len: usize) -> Result<Self> {
        stream.check_not_captured()?;
        let device = stream.device();
        let bytes =
            len.checked_mul(size_of::<T>()).ok_or_else(|| Error::out_of_memory(format!("{len} elements")))?;
        let mut pointer = 0;
        if bytes > 0 {
            let _bound = device.bind()?;
            let mut allocate = || {
                if device.has_pools() {
                    // SAFETY: the stream is alive and of this device. It writes one address there.
                    unsafe { (device.cuda().cuMemAllocAsync)(&mut pointer, bytes, stream.raw()) }
                } else {
                    // SAFETY: it writes one address there.
                    unsafe { (device.cuda().cuMemAlloc_v2)(&mut pointer, bytes) }
                }
            };
            let mut code = allocate();
            if code == OUT_OF_MEMORY && device.await_dropped(Deadline::after(FREE_TIMEOUT)) {
                code = allocate();
            }
            let function = if device.has_pools() { "cuMemAllocAsync" } else { "cuMemAlloc" };
            let call = format!("{function} of {bytes} bytes on CUDA device {}", device.ordinal());
            device.cuda().check(&call, code)?;
        }
        Ok(Self { device: device.clone(), pointer, len, _elements: PhantomData })
    }

    /// This buffer, if what fills it is done. If that is late, it may still come, and who frees memory would wait for it: the memory then stays.
    fn when(self, filled: Result<()>) -> Result<Self> {
        match filled {
            Ok(()) => Ok(self),
            Err(error) => {
                if error.is_timeout() {
                    std::mem::forget(self);
                }
                Err(error)
            }
        }
    }

    fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    pub(super) fn check(&self, stream: &Stream, len: usize) -> Result<()> {
        stream.check_not_captured()?;
        if stream.device() != &self.device {
            return Err(Error::invalid_argument(format!("{self:?} is not on the device of {stream:?}")));
        }
        if len != self.len {
            return Err(Error::invalid_argument(format!("{self:?} cannot take {len} elements")));
        }
        Ok(())
    }
}

/// How long an allocation waits for memory that was dropped while calls were in flight.
const FREE_TIMEOUT: Duration = Duration::from_secs(5);

/// The longest wait for a copy. A collective before it on the stream has a deadline of its own.
pub(super) fn longest() -> Deadline {
    Deadline::after(phalanx::group::DEFAULT_TIMEOUT)
}

// SAFETY: the memory is this value's own, at an address that does not change.
unsafe impl<T: Element> DeviceMemory for DeviceBuffer<T> {
    type Element = T;

    fn device(&self) -> &Device {
        &self.device
    }

    fn pointer(&self) -> u64 {
        self.pointer
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl<T> Drop for DeviceBuffer<T> {
    fn drop(&mut self) {
        if self.pointer != 0 && self.device.is_own() {
            self.device.free(self.pointer);
        }
    }
}

impl<T: Element> fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceBuffer({} x {} on {:?})", self.len, T::DTYPE, self.device)
    }
}
