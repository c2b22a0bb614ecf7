//! Which process gets which signal, and whose failure was the first.

pub mod exit;
pub mod policy;
pub mod root_cause;
