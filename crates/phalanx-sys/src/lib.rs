//! The unsafe parts of Phalanx behind a safe interface.
//!
//! - [`worker`]: a child process that cannot outlive the one that started it.
//! - [`guard`]: a watchdog process that kills the workers and what they have started if this process is killed.
//! - [`shared`]: rings in memory that several processes map, and a doorbell for whoever sleeps.
//! - [`signal`]: signals as bytes in a pipe, with the earlier dispositions put back afterwards.

pub mod guard;
pub mod shared;
pub mod signal;
pub mod worker;
