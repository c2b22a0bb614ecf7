//! How a tensor of Burn's is described in a saved state.

use burn::tensor::{Bytes, DType};
use serde::{Deserialize, Serialize};

/// The layout of a tensor: everything but its elements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Layout {
    pub dtype: DType,
    pub shape: Vec<usize>,
}

/// Burn's memory, to be given away.
pub(super) struct Owned(pub Bytes);

impl AsRef<[u8]> for Owned {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}
