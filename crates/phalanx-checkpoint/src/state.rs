//! A checkpoint as a place of states, for adapters.

use std::borrow::Cow;

use phalanx_core::state::{StateReader, StateWriter};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::dtype::DType;
use crate::error::Result;
use crate::{Saved, Snapshot};

impl StateWriter for Snapshot {
    fn tensor(&mut self, name: &str, dtype: DType, shape: &[usize], elements: &[u8]) -> Result<()> {
        self.tensor_bytes(name, dtype, shape, elements.to_vec())
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
}
