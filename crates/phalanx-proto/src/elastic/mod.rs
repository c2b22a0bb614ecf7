//! Which workers are in the next round of an elastic job, and whether the step that a failure cut off counts.

pub mod members;
pub mod retry;
