//! Collectives by name, as in Horovod: each rank may submit them in any order.
//!
//! With [`phalanx::ProcessGroup`] all ranks must make the same calls in the same order. Some programs cannot promise this, for example
//! because the order of backward passes differs between ranks. Here collectives have names: the ranks find the names that all of them
//! have submitted, and carry these out. This is how [Horovod](https://github.com/horovod/horovod) works, and its functions are the methods
//! of [`Horovod`]. `phalanx-burn` has its `DistributedOptimizer` for Burn; this crate knows no framework.
//!
//! ```
//! use phalanx_horovod::Op;
//!
//! let hvd = phalanx_horovod::init()?; // as the launcher says; alone, a world of one
//! let weight = hvd.allreduce_async("weight", vec![1.0f32; 1024], Op::Average)?; // in any order,
//! let bias = hvd.allreduce_async("bias", vec![1.0f32; 2], Op::Average)?; // fused into one operation
//! let (bias, weight) = (bias.synchronize()?, weight.synchronize()?);
//! assert_eq!((bias.shape(), weight.len()), (&[2][..], 1024));
//! # Ok::<(), phalanx::Error>(())
//! ```
//!
//! # How it works
//!
//! A thread of each rank works in cycles, which begin when something was submitted, and at least 1 ms ([`Options::cycle_time`]) after
//! the last one, unless the program waits for a handle. In the steady state a cycle costs one small
//! all_reduce: each name that has been negotiated before is a bit, and the bits of all ranks are combined with a bitwise and. New
//! names go to rank 0, which answers with what all ranks have submitted, and compares what they have submitted: another shape,
//! type or option is an error that names both sides. If some ranks have not submitted a name for a minute
//! ([`Options::stall_check_time`]), rank 0 reports it, with the names and the ranks.
//!
//! Allreduces that are ready in the same cycle, with the same type and options, are copied into a fusion buffer of at most
//! 64 MiB ([`Options::fusion_threshold`]) and travel as one. The buffer is registered memory
//! ([`phalanx::ProcessGroup::alloc`]): nothing else is allocated. A tensor that is alone is combined where it is. Horovod 0.28
//! fuses up to 128 MiB, earlier versions and its documentation up to 64; here it is 64, which holds half the memory.
#![forbid(unsafe_code)]

mod adasum;
mod autotune;
mod background;
pub mod elastic;
mod elements;
mod engine;
mod execute;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod handle;
mod horovod;
mod objects;
mod operations;
mod options;
mod tensor;
mod topology;

pub use engine::Stats;
pub use handle::Handle;
pub use horovod::{Horovod, init, init_in};
pub use objects::SparseGradient;
pub use operations::Received;
pub use options::{
    DEFAULT_CACHE_CAPACITY, DEFAULT_CYCLE_TIME, DEFAULT_FUSION_THRESHOLD, DEFAULT_STALL_CHECK_TIME, Options,
};
pub use phalanx_proto::horovod::reduction::{Compression, Op, Reduction};
pub use phalanx_proto::horovod::request::{MAX_DIMENSIONS, MAX_GROUP, MAX_IN_FLIGHT, MAX_NAME_BYTES};
pub use tensor::{Memory, Tensor};

/// The program on this crate's page must run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
