//! Which peers have been silent for too long, which calls ranks make, and the one failure of a group.

pub mod calls;
pub mod first_failure;
pub mod heartbeat;
pub mod liveness;
mod report;
