//! The unsafe parts of Phalanx behind a safe interface.
//!
//! - [`arena`]: memory that a rank allocates, and that the other ranks of its host map.
//! - [`control_block`]: where the ranks of one host synchronise a collective and reach each other's memory.
//! - [`folder`]: the wait for the names in a folder to be on the disk, and what its file system is and lacks.
//! - [`guard`]: child processes that cannot outlive the process that started them, nor can their own children.
//! - [`inherited`]: descriptors that a parent process has left open for this one.
//! - [`memfd`]: anonymous files, which are memory of the processes that have them open.
//! - [`open`]: files whose paths come from elsewhere, opened without waiting for the other end of a pipe.
//! - [`parts`]: memory with several owners, each of a part.
//! - [`process`]: what the kernel copies out of other processes, and which processes may copy out of this one.
//! - [`shared`]: rings in memory that several processes map, and a doorbell that wakes sleeping threads.
//! - [`signal`]: signals as bytes in a pipe, with the earlier dispositions restored afterwards.
//! - [`tcp`]: what the kernel knows of a connection's path, and options that have no safe interface.
// Each model uses only what it tests.
#![cfg_attr(loom, allow(dead_code))]

// Nothing else is compiled there, so that this sentence is the only error.
#[cfg(not(target_os = "linux"))]
compile_error!(
    "Phalanx runs on Linux. On macOS and Windows, build and train in a container, a virtual machine or WSL 2 \
     (docs/platforms.md)."
);

#[cfg(all(target_os = "linux", not(loom)))]
pub mod arena;
#[cfg(all(target_os = "linux", loom))]
#[path = "arena/modelled.rs"]
pub mod arena;
#[cfg(target_os = "linux")]
pub mod control_block;
#[cfg(target_os = "linux")]
pub mod copy;
#[cfg(all(target_os = "linux", not(loom)))]
pub mod folder;
#[cfg(target_os = "linux")]
pub mod freed;
#[cfg(all(target_os = "linux", not(loom), any(test, fuzzing)))]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(target_os = "linux")]
pub mod guard;
#[cfg(target_os = "linux")]
mod image;
#[cfg(all(target_os = "linux", not(loom)))]
pub mod inherited;
#[cfg(all(target_os = "linux", not(loom)))]
pub mod interface;
#[cfg(all(target_os = "linux", not(loom)))]
pub mod memfd;
#[cfg(all(target_os = "linux", not(loom)))]
pub mod open;
#[cfg(all(target_os = "linux", not(loom)))]
pub mod parts;
#[cfg(all(target_os = "linux", not(loom)))]
pub mod process;
#[cfg(target_os = "linux")]
pub mod processors;
#[cfg(target_os = "linux")]
pub mod shared;
#[cfg(target_os = "linux")]
pub mod signal;
#[cfg(target_os = "linux")]
mod sync;
#[cfg(all(target_os = "linux", not(loom)))]
pub mod tcp;
#[cfg(target_os = "linux")]
mod worker;

/// The README's program must work.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
