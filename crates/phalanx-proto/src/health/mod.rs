//! Which peers have been silent for too long.

pub mod heartbeat;
pub mod liveness;
mod report;
