//! Optimizers that do one step in one pass over memory.
//!
//! An optimizer made of tensor operations reads and writes every array once for each operation: Burn's AdamW makes some
//! fourteen passes over arrays of the size of the model. Here each parameter, its gradient and its state are read
//! once, and written once where they change, in place if no other tensor shares the memory. The arithmetic is that of Burn's
//! optimizers, operation by operation, so the results are too. Either can load the other's checkpoints, so users can
//! verify that.
//!
//! Over 22.7 M parameters with one thread, in processor time (the machine was shared): AdamW 31 ms, Burn's 133 ms, the
//! same traffic without arithmetic 31 ms; SGD with momentum 25 ms, 52 ms and 22 ms. `cargo bench -p phalanx-burn
//! --bench optimizers` compares them.

mod adamw;
mod real;
mod sgd;
mod storage;

pub use adamw::{FusedAdamW, FusedAdamWConfig, FusedAdamWState};
pub use real::Real;
pub use sgd::{FusedSgd, FusedSgdConfig, FusedSgdState};

/// Elements per task: of four f32 arrays together, as much as a usual second-level cache.
const CHUNK: usize = 1 << 15;
