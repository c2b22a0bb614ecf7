//! Errors of collectives, as Python sees them.

use phalanx::Error;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// Says which class errors of groups have: `class(message, kind, peer)`.
#[pyfunction]
pub fn set_error_class(class: Bound<'_, PyType>) {
    let _ = CLASS.set(class.py(), class.unbind());
}

/// The exception for `error`.
pub fn raised(py: Python<'_>, error: &Error) -> PyErr {
    if error.is_invalid_argument() {
        return PyValueError::new_err(error.to_string());
    }
    let kind = match () {
        () if error.is_timeout() => "timeout",
        () if error.is_peer_failure() => "peer_failed",
        () if error.is_peer_left() => "peer_left",
        () if error.is_mismatch() => "mismatch",
        () if error.is_aborted() => "aborted",
        () => "other",
    };
    let peer = error.peer().map(|peer| peer.get());
    match CLASS.get(py) {
        Some(class) => PyErr::from_type(class.bind(py).clone(), (error.to_string(), kind, peer)),
        None => PyRuntimeError::new_err(error.to_string()),
    }
}
