//! Which workers are in the next round of an elastic job, from which commit they go on, and whether the step that a failure cut off
//! counts.

pub mod commits;
pub mod members;
pub mod retry;
pub mod waiting;
pub mod worlds;
