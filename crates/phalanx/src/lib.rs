//! Distributed data-parallel training: process groups, collectives, a gradient reducer, samplers and a launcher.
//!
//! This crate knows no tensor framework and holds no global state: a [`ProcessGroup`] is a handle, and a second group
//! is just another handle.
#![forbid(unsafe_code)]

mod buffer;
mod deadline;
mod dtype;
mod error;
mod rank;

mod collective;
pub mod env;
pub mod group;
pub mod launch;
pub mod reducer;
pub mod rendezvous;
pub mod sampler;
mod spawn;
pub mod store;
#[cfg(feature = "testing")]
pub mod testing;
pub mod trace;
mod transport;
mod wire;

pub use buffer::Buffer;
pub use collective::ReduceOp;
pub use deadline::Deadline;
pub use dtype::{DType, Element};
pub use error::{Error, Result};
pub use group::{Communicator, ProcessGroup, Work, init};
pub use rank::{Epoch, MAX_WORLD_SIZE, Rank, Sequence, WorldSize};
pub use spawn::spawn;
