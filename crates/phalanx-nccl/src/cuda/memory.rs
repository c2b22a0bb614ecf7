//! Memory on a device, whoever owns it.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;

use super::device::Device;
use crate::element::{DType, Element};

/// Elements in the memory of a device. A framework's adapter implements it for what keeps a tensor alive.
///
/// # Safety
/// [`pointer`](Self::pointer) is the address of [`len`](Self::len) elements in the memory of [`device`](Self::device). It stays
/// so, wherever this value is moved, until it is dropped, or given back by a [`Work`](crate::Work) and then changed. While a
/// collective has this value, nothing else uses the elements, except on a stream that waits for the collective.
///
/// [`Work::order`](crate::Work::order) gives the value back while the collective is in flight: a drop then must not let the memory be
/// used again before the stream that waits for the collective gets to it. [`DeviceBuffer`](crate::DeviceBuffer) is freed only when all is
/// done that was queued before; a caching allocator reuses memory in the order of that stream.
///
/// If [`Work::wait`](crate::Work::wait) returns an error that [`Communicator::is_aborting`](crate::Communicator::is_aborting)
/// follows, the device may still use the memory: then a drop must not free it.
pub unsafe trait DeviceMemory: Send + 'static {
    /// The type of its elements.
    type Element: Element;

    /// The device.
    fn device(&self) -> &Device;

    /// The address, a `CUdeviceptr`.
    fn pointer(&self) -> u64;

    /// The number of elements.
    fn len(&self) -> usize;

    /// Whether it has no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Elements at an address that somebody else owns, such as those of a tensor of PyTorch or Burn.
pub struct DeviceSlice<T> {
    device: Device,
    pointer: u64,
    len: usize,
    _keeper: Option<Box<dyn Any + Send>>,
    _elements: PhantomData<T>,
}

impl<T: Element> DeviceSlice<T> {
    /// `len` elements at `pointer`, the tensor's `data_ptr`.
    ///
    /// # Safety
    /// As [`DeviceMemory`] asks for: as long as this value exists, and until every call that took it is done, the memory stays where it
    /// is. While a call has it, nothing else uses it. If the communicator fails, all this holds until
    /// [`Communicator::is_aborting`](crate::Communicator::is_aborting) is false.
    pub unsafe fn from_raw(device: &Device, pointer: u64, len: usize) -> Self {
        Self { device: device.clone(), pointer, len, _keeper: None, _elements: PhantomData }
    }

    /// The same, and drops `keeper`, such as the tensor that has this memory, when it is dropped itself.
    #[must_use]
    pub fn keeping(self, keeper: impl Send + 'static) -> Self {
        Self { _keeper: Some(Box::new(keeper)), ..self }
    }
}

// SAFETY: whoever has made it promises just this.
unsafe impl<T: Element> DeviceMemory for DeviceSlice<T> {
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

impl<T: Element> fmt::Debug for DeviceSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceSlice({} x {} on {:?})", self.len, T::DTYPE, self.device)
    }
}

/// What a call needs of memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub pointer: u64,
    pub len: usize,
    pub dtype: DType,
    /// The number of its device.
    pub device: u32,
}

impl Span {
    pub(crate) fn of<M: DeviceMemory>(memory: &M) -> Self {
        let device = memory.device().ordinal();
        Self { pointer: memory.pointer(), len: memory.len(), dtype: M::Element::DTYPE, device }
    }

    /// The elements from `start` on, `len` of them.
    pub(crate) fn part(self, start: usize, len: usize) -> Self {
        Self { pointer: self.pointer + (start * self.dtype.size()) as u64, len, ..self }
    }
}
