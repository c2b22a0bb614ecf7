//! An array as it was read.

use std::fmt;

use phalanx::{Buffer, DType, Element, Result};

/// Elements of one type with a shape, in row-major order.
pub struct Array {
    pub(super) shape: Vec<usize>,
    pub(super) data: Buffer,
}

impl Array {
    /// The lengths of its sides; a scalar has none.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.data.dtype()
    }

    /// Its elements.
    ///
    /// # Errors
    /// If `T` is not their type.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        self.data.as_slice()
    }
}

impl fmt::Debug for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Array({} {:?})", self.dtype(), self.shape)
    }
}
