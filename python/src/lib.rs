//! The native part of the Python package `phalanx_torch`: groups on the memory of PyTorch's tensors and NumPy's arrays.
//!
//! What PyTorch asks of a backend is in Python (`phalanx_torch/process_group.py`). This part reads tensors, keeps the order
//! of calls, waits without Python's lock, and turns errors into exceptions.
//!
//! The backend is a group written in Python over a class in Rust. One in C++ would have to be built for each version of
//! PyTorch, with its headers and compiler. PyTorch calls a Python group directly, for some microseconds a call. Tensors
//! are lent as slices to blocking calls, on the caller's thread or on a worker of the package's: `phalanx::Work`,
//! which owns its buffers, would cost a copy each way. Each torch group is a group of its own, which meets in the store
//! that PyTorch has made for it.

mod clearing;
mod collectives;
mod dtypes;
mod errors;
mod group;
mod horovod;
mod interrupt;
mod lane;
mod memory;
mod messages;
mod objects;
mod store;
mod work;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
    #[pymodule_export]
    use super::clearing::await_cleared;
    #[pymodule_export]
    use super::errors::set_error_class;
    #[pymodule_export]
    use super::group::Group;
    #[pymodule_export]
    use super::horovod::{Handle, Horovod, Ranks};
    #[pymodule_export]
    use super::work::{Work, close_callbacks};
}
