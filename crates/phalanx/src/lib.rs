//! Distributed data-parallel training: process groups, collectives, a gradient reducer, samplers and a launcher.
//!
//! This crate is independent of tensor frameworks; `phalanx-burn` is the adapter for Burn. No state of a group is
//! global: a [`ProcessGroup`] is a handle, and a second group is just another handle.
//!
//! ```
//! use phalanx::{Buffer, ReduceOp};
//!
//! let group = phalanx::init()?; // as the launcher says; alone, a world of one
//! let mut loss = [0.25f32];
//! group.all_reduce(&mut loss, ReduceOp::Avg)?; // in place, on this thread
//!
//! let gradients = Buffer::from_slice(&[1.0f32; 1024]);
//! let work = group.all_reduce_async(gradients, ReduceOp::Sum)?; // owns its buffer while in flight
//! assert_eq!(work.wait()?.as_slice::<f32>()?[0], group.world_size().get() as f32);
//! # Ok::<(), phalanx::Error>(())
//! ```
//!
//! | To | see |
//! |---|---|
//! | join the group that a launcher describes | [`init`], [`rendezvous`], [`env`](mod@env) |
//! | start workers from a program | [`spawn`](spawn()), [`launch`] |
//! | move and combine data | [`ProcessGroup`], [`Work`], [`Buffer`] |
//! | do so among some of the ranks | [`ProcessGroup::new_group`], [`ProcessGroup::split`], [`mesh`] |
//! | write an adapter for a framework of your own | [`adapter`], [`reducer`] |
//! | let ranks end at different times | [`join`] |
//! | go on when workers die or come | [`elastic`] |
//! | call functions on other ranks | [`asynchronous`] |
//! | give each rank its part of the data | [`sampler`] |
//! | go on after a crash | [`checkpoint`] |
//! | save what a framework of your own trains | [`state`] |
//! | plan the micro-batches of a pipeline | [`pipeline`] |
//! | let processes find each other | [`store`] |
//! | see where the time goes | [`trace`] |
//!
//! Every wait has a deadline. An [`Error`] says which rank, in which operation, because of which peer, and the remedy.
//! All waiting callers of a failed group get the same one.
// docs.rs shows which feature an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod buffer;
mod deadline;
mod frozen;
mod health;
mod host;
mod interfaces;
mod interrupt;
mod network;
mod notice;
mod poll;
mod proc_stat;
mod random;

pub mod adapter;
pub mod asynchronous;
pub mod batch_statistics;
pub mod checkpoint;
mod credentials;
mod domain;
pub mod elastic;
mod end_notice;
pub mod env;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
pub mod group;
pub mod join;
mod key;
pub mod launch;
mod log;
pub mod mesh;
pub mod reducer;
pub mod rendezvous;
pub mod sampler;
mod secret_file;
mod spawn;
pub mod state;
pub mod store;
#[cfg(feature = "testing")]
pub mod testing;
mod tls;
pub mod trace;
mod transport;
mod worker_error;

#[doc(inline)]
pub use phalanx_proto::pipeline;
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
// Documented in `adapter`.
#[doc(hidden)]
pub use host::{id as host_id, name as host_name};
#[doc(hidden)]
pub use notice::warn;
pub use rank::{Generation, Rank, Sequence};
pub use spawn::spawn;
pub use tls::Tls;
pub use transport::TransportKind;
pub use world_size::{MAX_WORLD_SIZE, WorldSize};

/// The programs of the README and of the guide must compile.
#[cfg(doctest)]
mod guide {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../../../docs/guide/checkpoints.md")]
    struct Checkpoints;
    #[doc = include_str!("../../../docs/guide/collectives.md")]
    struct Collectives;
    #[doc = include_str!("../../../docs/guide/synchronous-or-not.md")]
    struct SynchronousOrNot;
}
