//! Which nodes and hosts take part in a job, which process gets which signal, and whose failure was the first.

pub mod exit;
pub mod host_manager;
pub mod membership;
pub mod open_mpi;
pub mod pmi;
pub mod policy;
mod root_cause;
pub mod slot;
pub mod slurm;
