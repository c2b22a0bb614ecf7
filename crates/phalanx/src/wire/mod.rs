//! x
pub(crate) mod store;
