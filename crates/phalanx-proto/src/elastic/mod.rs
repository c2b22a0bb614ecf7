//! Whether the step that a failure cut off counts.

pub mod retry;
