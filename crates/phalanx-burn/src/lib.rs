//! x
#![forbid(unsafe_code)]

mod bridge;
mod ddp;
mod hook;
mod parameters;
mod replicas;
mod sink;

pub use ddp::{Ddp, DdpOptions};
