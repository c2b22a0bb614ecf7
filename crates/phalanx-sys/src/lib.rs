//! The unsafe parts of Phalanx behind a safe interface.
//!
//! - [`guard`]: child processes that cannot outlive the one that started them, nor can what they have started.
//! - [`signal`]: signals as bytes in a pipe, with the earlier dispositions put back afterwards.

pub mod guard;
pub mod signal;
mod worker;
