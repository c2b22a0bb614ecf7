//! The unsafe parts of Phalanx behind a safe interface.
//!
//! - [`arena`]: memory that a rank allocates, and that the other ranks of its host map.
//! - [`control_block`]: where the ranks of one host synchronise a collective and reach each other's memory.
//! - [`guard`]: child processes that cannot outlive the process that started them, nor can their own children.
//! - [`parts`]: memory with several owners, each of a part.
//! - [`shared`]: rings in memory that several processes map, and a doorbell that wakes sleeping threads.
//! - [`signal`]: signals as bytes in a pipe, with the earlier dispositions restored afterwards.
//! - [`tcp`]: what the kernel knows of a connection's path, and options that have no safe interface.
// Each model uses only what it tests.
#![cfg_attr(loom, allow(dead_code))]

#[cfg(not(target_os = "linux"))]
compile_error!(
    "Phalanx runs on Linux. On macOS and Windows, build and train in a container, a virtual machine or WSL 2 \
     (docs/platforms.md)."
);

#[cfg(not(loom))]
pub mod arena;
#[cfg(loom)]
#[path = "arena/modelled.rs"]
pub mod arena;
pub mod control_block;
#[cfg(not(loom))]
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
pub mod guard;
#[cfg(not(loom))]
mod memfd;
#[cfg(not(loom))]
pub mod parts;
pub mod shared;
pub mod signal;
mod sync;
#[cfg(not(loom))]
pub mod tcp;
mod worker;

/// The README's program must work.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
