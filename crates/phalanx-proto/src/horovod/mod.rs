//! Collectives by name: which names are ready on all ranks, and what travels together. `phalanx-horovod` carries it out.

pub mod controller;
pub mod message;
pub mod reduction;
pub mod request;
