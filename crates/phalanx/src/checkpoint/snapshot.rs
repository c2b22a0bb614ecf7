//! What a checkpoint is made of.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use super::manifest::{MAX_PART_NAME, MAX_PARTS, is_part_name};
use super::tensors::{byte_length, is_tensor_name};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};

/// The state of a job after a step: named tensors, and other parts as bytes.
///
/// It owns what it holds, so that training goes on while it is written.
#[derive(Debug, Default)]
pub struct Snapshot {
    pub(super) tensors: BTreeMap<String, TensorData>,
    pub(super) parts: BTreeMap<String, Vec<u8>>,
}

/// A tensor that waits to be written.
pub(super) struct TensorData {
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub bytes: Box<dyn AsRef<[u8]> + Send>,
}

impl fmt::Debug for TensorData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.shape)
    }
}

impl Snapshot {
    /// Adds a copy of a tensor: `elements` in row-major order. Its name may be any text, such as a path in the module.
    ///
    /// # Errors
    /// If the shape has another number of elements, or there is a tensor of this name.
    pub fn tensor<T: Element>(&mut self, name: &str, shape: &[usize], elements: &[T]) -> Result<()> {
        self.tensor_bytes(name, T::DTYPE, shape, bytemuck::cast_slice::<T, u8>(elements).to_vec())
    }

    /// Adds a tensor whose memory, of whatever owner, can be given away: little-endian elements in row-major order.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor).
    pub fn tensor_bytes(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        bytes: impl AsRef<[u8]> + Send + 'static,
    ) -> Result<()> {
        let length = bytes.as_ref().len();
        if byte_length(dtype, shape) != Some(length) {
            return Err(Error::invalid_argument(format!(
                "the tensor {name:?} has {length} bytes, which is not what {dtype} {shape:?} takes"
            )));
        }
        if !is_tensor_name(name) {
            return Err(Error::invalid_argument(format!(
                "no tensor may have the name {name:?}: the format reserves it, or it is empty or too long"
            )));
        }
        let tensor = TensorData { dtype, shape: shape.to_vec(), bytes: Box::new(bytes) };
        match self.tensors.insert(name.to_owned(), tensor) {
            None => Ok(()),
            Some(_) => Err(Error::invalid_argument(format!("there are two tensors of the name {name:?}"))),
        }
    }

    /// Adds a part in a form of its own. Its name becomes a file's: letters, digits, `_`, `-` and `.`.
    ///
    /// # Errors
    /// If the name can be no file's, there is a part of this name, or there are more than 1,000.
    pub fn part(&mut self, name: &str, bytes: impl Into<Vec<u8>>) -> Result<()> {
        if !is_part_name(name) {
            return Err(Error::invalid_argument(format!("no part may have the name {name:?}")).with_remedy(
                format!("use 1 to {MAX_PART_NAME} letters, digits, `_`, `-` and `.`, and no dot in front"),
            ));
        }
        if self.parts.len() == MAX_PARTS {
            return Err(Error::invalid_argument(format!("a checkpoint may have {MAX_PARTS} parts"))
                .with_remedy("put several values into one part"));
        }
        match self.parts.insert(name.to_owned(), bytes.into()) {
            None => Ok(()),
            Some(_) => Err(Error::invalid_argument(format!("there are two parts of the name {name:?}"))),
        }
    }

    /// Adds a part that holds a value, as postcard writes it: floating-point numbers keep all their bits.
    ///
    /// # Errors
    /// As [`part`](Self::part), and if the value cannot be written.
    pub fn value<T: Serialize + ?Sized>(&mut self, name: &str, value: &T) -> Result<()> {
        let bytes = postcard::to_stdvec(value).map_err(|error| {
            Error::invalid_argument(format!("the part {name:?} could not be written")).with_source(error)
        })?;
        self.part(name, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_saved_is_said_at_once() {
        let mut snapshot = Snapshot::default();
        snapshot.tensor("w", &[2, 2], &[1f32; 4]).unwrap();
        snapshot.tensor("scalar", &[], &[1i64]).unwrap();
        snapshot.tensor::<f32>("none", &[0, 7], &[]).unwrap();
        let wrong = [
            snapshot.tensor("v", &[2, 2], &[1f32; 3]),
            snapshot.tensor("w", &[2, 2], &[1f32; 4]),
            snapshot.tensor("v", &[usize::MAX, 2], &[1f32; 4]),
            snapshot.tensor("", &[1], &[1f32]),
            snapshot.tensor("__metadata__", &[1], &[1f32]),
        ];
        for outcome in wrong {
            assert!(outcome.unwrap_err().is_invalid_argument());
        }
        snapshot.part("optimizer", [1, 2]).unwrap();
        for name in ["optimizer", "", "../optimizer", "a/b", ".hidden", "naïve", &"x".repeat(101)] {
            assert!(snapshot.part(name, []).unwrap_err().is_invalid_argument(), "{name}");
        }
    }
}
