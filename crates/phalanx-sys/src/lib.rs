//! The unsafe parts of Phalanx behind a safe interface.
//!
//! - [`worker`]: a child process that cannot outlive the one that started it.
//! - [`guard`]: a watchdog process that kills the workers and what they have started if this process is killed.
//! - [`signal`]: signals as bytes in a pipe, with the earlier dispositions put back afterwards.

pub mod guard;
pub mod signal;
pub mod worker;
