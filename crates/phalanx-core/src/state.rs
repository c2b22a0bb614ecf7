//! Where the state of a training is saved and loaded, for adapters: the memory of an elastic job, or a checkpoint.

mod hook;

use std::borrow::Cow;

use serde::Serialize;
use serde::de::DeserializeOwned;

pub use self::hook::{load_hook, save_hook, save_own_of_hook};
use crate::dtype::DType;
use crate::elastic::Parts;
use crate::error::{Error, Result};

/// Takes the parts of a state, by name: [`Parts`], a checkpoint's `Snapshot`, or a [`ShardWriter`].
pub trait StateWriter {
    /// Saves a copy of a tensor's elements, in row-major order.
    ///
    /// # Errors
    /// If the name is taken, or the elements do not fit the shape.
    fn tensor(&mut self, name: &str, dtype: DType, shape: &[usize], elements: &[u8]) -> Result<()>;

    /// Saves elements that can be given away.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor).
    fn owned(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        elements: impl AsRef<[u8]> + Send + 'static,
    ) -> Result<()>;

    /// Saves a value that is no tensor.
    ///
    /// # Errors
    /// If the name is taken, or the value cannot be encoded.
    fn value<T: Serialize>(&mut self, name: &str, value: &T) -> Result<()>;
}

/// Gives the parts of a saved state: [`Parts`], or a checkpoint's `Saved`.
pub trait StateReader {
    /// The elements of a tensor, of any alignment.
    ///
    /// # Errors
    /// If there is none of this name.
    fn elements(&self, name: &str) -> Result<Cow<'_, [u8]>>;

    /// A value that is no tensor.
    ///
    /// # Errors
    /// If there is none of this name and type.
    fn value<T: DeserializeOwned>(&self, name: &str) -> Result<T>;

    /// Whether there is a value of this name.
    fn has_value(&self, name: &str) -> bool;

    /// Whether an optional part of a training, `kind`, was saved, as the value `name`. `is_here` says whether the state that is loaded
    /// has one, in its field `field`.
    ///
    /// # Errors
    /// If only one of them has it.
    fn is_saved(&self, name: &str, is_here: bool, (kind, field): (&str, &str)) -> Result<bool> {
        let cause = match (is_here, self.has_value(name)) {
            (true, true) => return Ok(true),
            (false, false) => return Ok(false),
            (true, false) => format!("this TrainState has {kind}, and the saved state lacks `{name}`"),
            (false, true) => format!("the saved state has {kind}, `{name}`, and this TrainState has none"),
        };
        Err(Error::mismatch(cause).with_remedy(format!(
            "build the state as it was built when it was saved; to begin with another {field}, or none, set TrainState::{field} after \
             loading"
        )))
    }

    /// The elements of a tensor of this type and shape, which may come from outside.
    ///
    /// # Errors
    /// As [`elements`](Self::elements), and if there are fewer or more.
    fn tensor(&self, name: &str, dtype: DType, shape: &[usize]) -> Result<Cow<'_, [u8]>> {
        let elements = self.elements(name)?;
        let bytes = shape.iter().try_fold(dtype.size(), |bytes, side| bytes.checked_mul(*side));
        if bytes == Some(elements.len()) {
            return Ok(elements);
        }
        let found = elements.len();
        Err(Error::mismatch(format!("{name:?} has {found} B, which is not what {dtype} {shape:?} takes"))
            .with_remedy("build the model as it was built when the state was saved"))
    }
}

impl StateWriter for Parts {
    fn tensor(&mut self, name: &str, _: DType, _: &[usize], elements: &[u8]) -> Result<()> {
        self.put(name, elements)
    }

    fn owned(&mut self, name: &str, _: DType, _: &[usize], elements: impl AsRef<[u8]>) -> Result<()> {
        self.put(name, elements.as_ref())
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

    fn has_value(&self, name: &str) -> bool {
        self.bytes(name).is_ok()
    }
}

/// Writes one rank's part of a state that all ranks have in common. Rank 0 writes everything except the tensors that
/// can be given away; all ranks write those in turns.
#[derive(Debug)]
pub struct ShardWriter<'a, W> {
    writer: &'a mut W,
    rank: usize,
    world_size: usize,
    /// Tensors that may be written in turns.
    count: usize,
}

impl<'a, W: StateWriter> ShardWriter<'a, W> {
    /// The part of this rank, of so many.
    pub fn new(writer: &'a mut W, (rank, world_size): (usize, usize)) -> Self {
        Self { writer, rank, world_size, count: 0 }
    }
}

impl<W: StateWriter> StateWriter for ShardWriter<'_, W> {
    fn tensor(&mut self, name: &str, dtype: DType, shape: &[usize], elements: &[u8]) -> Result<()> {
        if self.rank == 0 { self.writer.tensor(name, dtype, shape, elements) } else { Ok(()) }
    }

    fn owned(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        elements: impl AsRef<[u8]> + Send + 'static,
    ) -> Result<()> {
        self.count += 1;
        // Rank 0 has the model to write, and comes last.
        if self.count % self.world_size == self.rank {
            self.writer.owned(name, dtype, shape, elements)
        } else {
            Ok(())
        }
    }

    fn value<T: Serialize>(&mut self, name: &str, value: &T) -> Result<()> {
        if self.rank == 0 { self.writer.value(name, value) } else { Ok(()) }
    }
}
