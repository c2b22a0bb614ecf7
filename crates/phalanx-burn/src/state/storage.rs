//! Where a state is saved and loaded: the memory of an elastic job, or a checkpoint.

use std::borrow::Cow;

use burn::tensor::{Bytes, DType};
use phalanx::checkpoint::{Saved, Snapshot};
use phalanx::elastic::Parts;
use phalanx::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::tensor_bytes;

/// The layout of a tensor: everything but its elements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Layout {
    pub dtype: DType,
    pub shape: Vec<usize>,
}

impl Layout {
    /// The length of its elements; none for unsupported types, or invalid lengths.
    pub fn bytes(&self) -> Option<usize> {
        let size = tensor_bytes::dtype(self.dtype).ok()?.size();
        self.shape.iter().try_fold(size, |bytes, side| bytes.checked_mul(*side))
    }
}

pub(crate) trait StateWriter {
    /// Saves a copy of a tensor's elements.
    fn tensor(&mut self, name: &str, layout: &Layout, elements: &[u8]) -> Result<()>;

    /// Saves elements that can be given away.
    fn owned(&mut self, name: &str, layout: &Layout, elements: Bytes) -> Result<()>;

    fn value<T: Serialize>(&mut self, name: &str, value: &T) -> Result<()>;
}

pub(crate) trait StateReader {
    /// The elements of a tensor, of any alignment.
    fn elements(&self, name: &str) -> Result<Cow<'_, [u8]>>;

    fn value<T: DeserializeOwned>(&self, name: &str) -> Result<T>;

    /// The elements of a tensor with this layout; they may come from outside.
    fn tensor(&self, name: &str, layout: &Layout) -> Result<Cow<'_, [u8]>> {
        let elements = self.elements(name)?;
        if layout.bytes() == Some(elements.len()) {
            return Ok(elements);
        }
        let Layout { dtype, shape } = layout;
        Err(Error::mismatch(format!(
            "{name:?} has {} B, which is not what {dtype:?} {shape:?} takes",
            elements.len()
        )))
    }
}

impl StateWriter for Parts {
    fn tensor(&mut self, name: &str, _: &Layout, elements: &[u8]) -> Result<()> {
        self.put(name, elements)
    }

    fn owned(&mut self, name: &str, _: &Layout, elements: Bytes) -> Result<()> {
        self.put(name, &elements)
    }

    fn value<T: Serialize>(&mut self, name: &str, value: &T) -> Result<()> {
        self.serialize(name, value)
    }
}

impl StateReader for Parts {
    fn elements(&self, name: &str) -> Result<Cow<'_, [u8]>> {
        self.bytes(name).map(Cow::Borrowed)
    }

    fn value<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        self.deserialize(name)
    }
}

impl StateWriter for Snapshot {
    fn tensor(&mut self, name: &str, layout: &Layout, elements: &[u8]) -> Result<()> {
        self.tensor_bytes(name, tensor_bytes::dtype(layout.dtype)?, &layout.shape, elements.to_vec())
    }

    fn owned(&mut self, name: &str, layout: &Layout, elements: Bytes) -> Result<()> {
        self.tensor_bytes(name, tensor_bytes::dtype(layout.dtype)?, &layout.shape, Owned(elements))
    }

    fn value<T: Serialize>(&mut self, name: &str, value: &T) -> Result<()> {
        Self::value(self, name, value)
    }
}

/// Writes one rank's part of a state that all ranks have in common. Rank 0 writes everything except the tensors that
/// can be given away; all ranks write those in turns.
pub(crate) struct ShardWriter<'a> {
    snapshot: &'a mut Snapshot,
    rank: usize,
    world_size: usize,
    /// Tensors that may be written in turns.
    count: usize,
}

impl<'a> ShardWriter<'a> {
    pub fn new(snapshot: &'a mut Snapshot, (rank, world_size): (usize, usize)) -> Self {
        Self { snapshot, rank, world_size, count: 0 }
    }
}

impl StateWriter for ShardWriter<'_> {
    fn tensor(&mut self, name: &str, layout: &Layout, elements: &[u8]) -> Result<()> {
        if self.rank == 0 { StateWriter::tensor(self.snapshot, name, layout, elements) } else { Ok(()) }
    }

    fn owned(&mut self, name: &str, layout: &Layout, elements: Bytes) -> Result<()> {
        self.count += 1;
        // Rank 0 has the model to write, and comes last.
        if self.count % self.world_size == self.rank {
            StateWriter::owned(self.snapshot, name, layout, elements)
        } else {
            Ok(())
        }
    }

    fn value<T: Serialize>(&mut self, name: &str, value: &T) -> Result<()> {
        if self.rank == 0 { StateWriter::value(self.snapshot, name, value) } else { Ok(()) }
    }
}

struct Owned(Bytes);

impl AsRef<[u8]> for Owned {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl StateReader for Saved {
    fn elements(&self, name: &str) -> Result<Cow<'_, [u8]>> {
        self.tensor(name)?.bytes()
    }

    fn value<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        Self::value(self, name)
    }
}
