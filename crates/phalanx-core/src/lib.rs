//! The core of Phalanx: process groups, collectives, the gradient reducer, samplers, stores, rendezvous and elastic rounds.
//!
//! Use the crate `phalanx`: it re-exports the items of this crate, the launcher, checkpoints and remote calls.
//!
//! `phalanx-launch`, `phalanx-checkpoint` and `phalanx-asynchronous` use this crate, and this crate uses none of them. Modules that only
//! they need are public and hidden. Any version may change them.
// docs.rs shows which feature an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

#[doc(hidden)]
pub mod buffer;
#[doc(hidden)]
pub mod deadline;
#[doc(hidden)]
pub mod frozen;
#[doc(hidden)]
pub mod health;
#[doc(hidden)]
pub mod host;
#[doc(hidden)]
pub mod interfaces;
mod interrupt;
mod network;
#[doc(hidden)]
pub mod notice;
#[doc(hidden)]
pub mod poll;
#[doc(hidden)]
pub mod proc_stat;
#[doc(hidden)]
pub mod random;

pub mod batch_statistics;
#[doc(hidden)]
pub mod credentials;
#[doc(hidden)]
pub mod domain;
pub mod elastic;
mod end_notice;
pub mod env;
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzz_input;
pub mod group;
pub mod join;
#[doc(hidden)]
pub mod key;
#[doc(hidden)]
pub mod log;
pub mod mesh;
pub mod reducer;
pub mod rendezvous;
pub mod sampler;
mod secret_file;
pub mod state;
pub mod store;
#[cfg(feature = "testing")]
pub mod testing;
#[doc(hidden)]
pub mod tls;
pub mod trace;
#[doc(hidden)]
pub mod transport;
#[doc(hidden)]
pub mod worker_error;

use phalanx_proto::{caller, collective, dtype, error, hash, rank, wire, world_size};

pub use buffer::{Buffer, BufferKeeper, BufferPart};
pub use caller::Caller;
pub use collective::{ReduceOp, Tuning, TuningRow};
pub use credentials::Credentials;
pub use deadline::Deadline;
pub use dtype::{Bool, DType, Element};
pub use end_notice::EndNotice;
pub use error::{Error, Result};
pub use group::{Communicator, GroupHandle, GroupOptions, P2pOp, ProcessGroup, Work, init};
pub use health::Heartbeat;
pub use interrupt::{INTERRUPT_INTERVAL, InterruptCheck, interruptible};
pub use key::JobKey;
pub use rank::{Generation, Rank, Sequence};
pub use tls::Tls;
pub use transport::TransportKind;
pub use world_size::{MAX_WORLD_SIZE, WorldSize};
