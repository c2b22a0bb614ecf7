//! Memory that a hook needs in every step.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::buffer::Buffer;
use crate::dtype::DType;
use crate::error::Result;
use crate::group::Communicator;

/// A message that a hook sends in place of a bucket: the bucket's number, and the message's.
pub(super) type Message = (usize, u8);

/// The memory of messages, kept from step to step. A group's memory is shared page by page: allocating and freeing it in every step
/// would cost more than sending what is in it.
#[derive(Default)]
pub(super) struct Spares(Arc<Mutex<HashMap<Message, Buffer>>>);

impl Spares {
    /// Another handle to the same memory.
    pub(super) fn share(&self) -> Self {
        Self(self.0.clone())
    }

    /// Memory for `message`, with whatever was in it.
    pub(super) fn take(
        &self,
        group: &dyn Communicator,
        message: Message,
        dtype: DType,
        elements: usize,
    ) -> Result<Buffer> {
        // One of another size is from before the buckets were rebuilt.
        let kept = self.0.lock().remove(&message);
        match kept.filter(|buffer| buffer.dtype() == dtype && buffer.len() == elements) {
            Some(buffer) => Ok(buffer),
            None => group.alloc(dtype, elements),
        }
    }

    /// Keeps `buffer` for the next step.
    pub(super) fn keep(&self, message: Message, buffer: Buffer) {
        self.0.lock().insert(message, buffer);
    }

    /// Gives everything back.
    pub(super) fn clear(&self) {
        self.0.lock().clear();
    }
}
