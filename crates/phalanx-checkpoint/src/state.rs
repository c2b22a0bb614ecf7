//! A checkpoint as a place of states, for adapters.

use std::borrow::Cow;

use phalanx_core::buffer::copy_of;
use phalanx_core::state::{StateReader, StateWriter};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::{Saved, Snapshot};

impl StateWriter for Snapshot {
    fn tensor(&mut self, name: &str, dtype: DType, shape: &[usize], elements: &[u8]) -> Result<()> {
        self.tensor_bytes(name, dtype, shape, copy_of(elements)?)
    }

    fn owned(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        elements: impl AsRef<[u8]> + Send + 'static,
    ) -> Result<()> {
        self.tensor_bytes(name, dtype, shape, elements)
    }

    fn value<T: Serialize>(&mut self, name: &str, value: &T) -> Result<()> {
        Self::value(self, name, value)
    }
}

impl StateReader for Saved {
    fn elements(&self, name: &str) -> Result<Cow<'_, [u8]>> {
        self.tensor(name)?.bytes()
    }

    fn value<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        Self::value(self, name)
    }

    fn has_value(&self, name: &str) -> bool {
        self.part(name).is_ok()
    }

    /// The length does not tell all: types have equal sizes, and shapes as many elements.
    fn tensor(&self, name: &str, dtype: DType, shape: &[usize]) -> Result<Cow<'_, [u8]>> {
        let saved = Self::tensor(self, name)?;
        if (saved.dtype(), saved.shape()) == (dtype, shape) {
            return saved.bytes();
        }
        let (as_dtype, as_shape) = (saved.dtype(), saved.shape());
        Err(Error::mismatch(format!(
            "{name:?} was saved as {as_dtype} {as_shape:?}, and is to be read as {dtype} {shape:?}"
        ))
        .with_remedy("build the model as it was built when the state was saved"))
    }
}

#[cfg(test)]
mod tests {
    use phalanx_core::group::ProcessGroup;

    use super::*;
    use crate::Checkpoints;

    #[test]
    fn a_tensor_of_another_type_or_shape_with_as_many_bytes_is_refused() {
        let (folder, group) = (tempfile::tempdir().unwrap(), ProcessGroup::alone().unwrap());
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let fill =
            |snapshot: &mut Snapshot| StateWriter::tensor(snapshot, "w", DType::F32, &[2, 3], &[0; 24]);
        checkpoints.save(1, fill).unwrap();
        let saved = checkpoints.newest().unwrap().unwrap();
        let read = |dtype: DType, shape: &[usize]| {
            StateReader::tensor(&saved, "w", dtype, shape).map(|bytes| bytes.len())
        };
        assert_eq!(read(DType::F32, &[2, 3]).unwrap(), 24);
        for error in [read(DType::I32, &[2, 3]).unwrap_err(), read(DType::F32, &[3, 2]).unwrap_err()] {
            assert!(error.is_mismatch() && error.to_string().contains("was saved as f32 [2, 3]"), "{error}");
        }
    }
}
