//! The decisions of Phalanx, pure.
//!
//! Nothing here reads a clock, a file or the environment, opens a socket, starts a thread or draws a random number. Events and the time
//! go in as values; plans, messages and verdicts come out. The crate `phalanx` does what they say:
//!
//! ```text
//!                    events: a frame, a heartbeat, an exit, the time
//!   ┌──────────────┐ ───────────────────────────────────────────────▶ ┌───────────────┐
//!   │   phalanx    │                                                   │ phalanx-proto │
//!   │  (all I/O)   │ ◀─────────────────────────────────────────────── │    (pure)     │
//!   └──────────────┘   actions: bytes to send, ranks to blame, signals └───────────────┘
//! ```
//!
//! So a test plays any order of events, and the same order always gives the same result. `clippy.toml` names what must not be
//! reached from here; `cargo clippy -p phalanx-proto` fails if something does.
//!
//! | module | decides |
//! |---|---|
//! | [`collective`] | who sends which elements to whom, step by step, and how elements are combined |
//! | [`wire`] | the bytes of each message, and proofs of a job's key |
//! | [`domain`] | which ranks share memory, and a call in sixteen bytes |
//! | [`health`] | which peers have been silent for too long |
//! | [`reducer`] | which gradients share a bucket, and when a bucket is launched |
//! | [`checkpoint`] | what a checkpoint has, which part of a tensor is where, who may write it, and in which order |
//! | [`elastic`] | which workers are in the next round, whose commit all go on from, and whether the step that a failure cut off counts |
//! | [`launch`] | which nodes and hosts take part, which process gets which signal, and whose failure was the first |
//! | [`log`] | which processes that share a log are silent, and whether an entry is a member's |
//! | [`horovod`] | which names are ready on all ranks, and which tensors travel together |
//! | [`mesh`], [`pipeline`], [`sampler`], [`clock`] | grids of ranks, schedules of micro-batches, orders of samples, who waits for whom |
//! | [`rank`], [`world_size`], [`dtype`], [`caller`], [`error`], [`hash`] | the basic types |
//!
//! Programs use the crate `phalanx`, which has the types that they need under names of its own. This interface is for the crates of
//! the project, and any version may change it.
#![forbid(unsafe_code)]
#![deny(clippy::disallowed_macros, clippy::disallowed_methods, clippy::disallowed_types)]

pub mod caller;
#[cfg(feature = "checkpoint")]
pub mod checkpoint;
pub mod clock;
pub mod collective;
pub mod domain;
pub mod dtype;
pub mod elastic;
pub mod elements;
pub mod error;
pub mod hash;
pub mod health;
#[cfg(feature = "horovod")]
pub mod horovod;
pub mod launch;
pub mod log;
pub mod mesh;
pub mod pipeline;
pub mod rank;
pub mod reducer;
pub mod rendezvous;
pub mod sampler;
pub mod store;
pub mod wire;
pub mod world_size;

/// The program on this crate's page must run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// A time from which tests count.
#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "an `Instant` has no constant")]
fn some_time() -> std::time::Instant {
    std::time::Instant::now()
}
