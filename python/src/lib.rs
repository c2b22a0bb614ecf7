//! The native part of the Python package `phalanx_torch`: groups on the memory of PyTorch's tensors and NumPy's arrays.
//!
//! What PyTorch asks of a backend is in Python (`phalanx_torch/process_group.py`). This part reads tensors, keeps the order
//! of calls, waits without Python's lock, and turns errors into exceptions.

mod collectives;
mod dtypes;
mod errors;
mod group;
mod lane;
mod memory;
mod messages;
mod store;
mod work;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::errors::set_error_class;
    #[pymodule_export]
    use super::group::Group;
    #[pymodule_export]
    use super::work::{Work, close_callbacks};
}
