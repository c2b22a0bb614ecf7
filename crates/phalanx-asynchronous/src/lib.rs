//! Updates that do not wait: calls between ranks, servers of parameters, and local SGD.
//!
//! | To | see | in PyTorch |
//! |---|---|---|
//! | call a function on another rank | [`Rpc`] | `torch.distributed.rpc` |
//! | keep an object there and call functions on it | [`RemoteRef`] | `RRef` |
//! | keep parameters on servers, for workers of different speed | [`ParameterServer`] | – |
//! | average parameters every few steps, and not gradients in every step | [`LocalUpdates`] | `PostLocalSGDOptimizer` |
//!
//! The page `docs/guide/synchronous-or-not.md` in the repository says when to use which of them.

#![forbid(unsafe_code)]

mod local;
mod optimizer;
mod rpc;
mod server;

pub use self::clock::Consistency;
pub use self::local::{LocalMethod, LocalState, LocalUpdates};
pub use self::optimizer::{Adam, Sgd, UpdateRule};
pub use self::rpc::{Answer, Bytes, Context, PendingCall, RemoteRef, Rpc, RpcBuilder, Ticket};
pub use self::server::{
    Compensation, DelayCompensation, ParameterServer, ParameterServerBuilder, ShardStatistics, Staleness,
};
use phalanx_core::{buffer, deadline, group, host, random, sampler};
use phalanx_proto::{caller, clock, collective, dtype, error, hash, rank, wire, world_size};

/// The program on this crate's page must run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
