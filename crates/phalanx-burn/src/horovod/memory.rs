//! The memory of a gradient, from step to step.

use std::sync::Arc;

use parking_lot::Mutex;
use phalanx::{Buffer, DType};
use phalanx_horovod::Memory;

/// Where a gradient's memory is while nobody uses it.
pub(super) type Home = Arc<Mutex<Option<Buffer>>>;

/// A buffer that goes home when it is dropped. In between it is a tensor that is combined, and then Burn's.
pub(crate) struct Recycled {
    buffer: Buffer,
    home: Home,
}

impl Recycled {
    pub fn new(buffer: Buffer, home: Home) -> Self {
        Self { buffer, home }
    }

    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    pub fn buffer_mut(&mut self) -> &mut Buffer {
        &mut self.buffer
    }
}

impl Memory for Recycled {
    fn as_bytes(&self) -> &[u8] {
        self.buffer.as_bytes()
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.buffer.as_bytes_mut()
    }
}

impl Drop for Recycled {
    fn drop(&mut self) {
        let buffer = std::mem::replace(&mut self.buffer, Buffer::zeroed(DType::U8, 0));
        // One of an earlier step that was kept longer takes its place.
        *self.home.lock() = Some(buffer);
    }
}
