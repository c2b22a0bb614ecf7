//! CUDA's driver, as far as communication needs it: devices, streams, events, memory.

mod buffer;
mod device;
mod event;
mod freeing;
mod memory;
mod peer;
mod raw;
mod stream;

pub use self::buffer::DeviceBuffer;
pub(crate) use self::device::describe;
pub use self::device::{Device, MemoryInfo};
pub(crate) use self::event::Event;
pub(crate) use self::memory::Span;
pub use self::memory::{DeviceMemory, DeviceSlice};
pub(crate) use self::raw::{Cuda, Stream as RawStream, UUID_BYTES};
pub(crate) use self::stream::Pause;
pub use self::stream::Stream;
