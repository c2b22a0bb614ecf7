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
//! | join the group of a launcher | [`init`], [`rendezvous`], [`env`](mod@env) |
//! | start workers from a program | [`spawn`](spawn()), [`launch`] |
//! | move and combine data | [`ProcessGroup`], [`Work`], [`Buffer`] |
//! | make groups of some of the ranks | [`ProcessGroup::new_group`], [`ProcessGroup::split`], [`mesh`] |
//! | write an adapter for a framework of your own | [`adapter`], [`reducer`] |
//! | let ranks end at different times | [`join`] |
//! | continue when workers die or join | [`elastic`] |
//! | call functions on other ranks | [`asynchronous`] |
//! | give each rank its part of the data | [`sampler`] |
//! | continue after a crash | [`checkpoint`] |
//! | save the state of an adapter of your own | [`state`] |
//! | plan the micro-batches of a pipeline | [`pipeline`] |
//! | let processes find each other | [`store`] |
//! | see where the time goes | [`trace`] |
//!
//! Every wait has a deadline. An [`Error`] names the rank, the operation, the peer to blame, and the remedy. All waiting callers of a failed
//! group get the same error.
//!
//! This crate has little code of its own: it re-exports `phalanx-core`, `phalanx-asynchronous`, `phalanx-checkpoint` and `phalanx-launch`. The
//! last three have a feature each, which is on by default. With `default-features = false` the crate has groups, collectives, the reducer,
//! samplers and elastic jobs.
// docs.rs shows which feature an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

pub mod adapter;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;

#[cfg(feature = "asynchronous")]
#[doc(inline)]
pub use phalanx_asynchronous as asynchronous;
#[cfg(feature = "checkpoint")]
#[doc(inline)]
pub use phalanx_checkpoint as checkpoint;
#[cfg(feature = "testing")]
#[doc(inline)]
pub use phalanx_core::testing;
#[doc(inline)]
pub use phalanx_core::{
    batch_statistics, elastic, env, group, join, mesh, reducer, rendezvous, sampler, state, store, trace,
};
#[cfg(feature = "launch")]
#[doc(inline)]
pub use phalanx_launch as launch;
#[doc(inline)]
pub use phalanx_proto::{pipeline, with_element};

// Documented in `adapter`.
#[doc(hidden)]
pub use phalanx_core::host::{id as host_id, name as host_name};
// For `phalanx doctor`.
#[doc(hidden)]
pub use phalanx_core::host::loopback_is_down;
#[doc(hidden)]
pub use phalanx_core::interfaces;
#[doc(hidden)]
pub use phalanx_core::notice::warn;
#[doc(inline)]
pub use phalanx_core::{
    Bool, Buffer, BufferKeeper, BufferPart, Caller, Communicator, Credentials, DType, Deadline, Element,
    EndNotice, Error, Generation, GroupHandle, GroupOptions, Heartbeat, INTERRUPT_INTERVAL, InterruptCheck,
    JobKey, MAX_WORLD_SIZE, P2pOp, ProcessGroup, Rank, ReduceOp, Result, Sequence, Tls, TransportKind,
    Tuning, TuningRow, Work, WorldSize, init, interruptible,
};
#[cfg(feature = "launch")]
#[doc(inline)]
pub use phalanx_launch::spawn;
// For those who run a program's code.
#[doc(hidden)]
pub use phalanx_proto::error::panic_message;
// For stores of other languages.
#[doc(hidden)]
pub use phalanx_proto::store::count_there;

/// The programs of the README and of the guide must compile.
#[cfg(doctest)]
mod guide {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../../../docs/guide/checkpoints.md")]
    struct Checkpoints;
    #[doc = include_str!("../../../docs/guide/collectives.md")]
    struct Collectives;
    #[doc = include_str!("../../../docs/guide/launching.md")]
    struct Launching;
    #[doc = include_str!("../../../docs/guide/synchronous-or-not.md")]
    struct SynchronousOrNot;
}
