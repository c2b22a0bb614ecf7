//! All ranks are threads of this process: `cargo test -p phalanx-burn --test it -- ddp::` runs one file.
#![allow(missing_docs, clippy::unwrap_used, reason = "helpers of tests are tests")]

#[path = "../common/mod.rs"]
mod common;

mod alike;
mod configurations;
mod contrastive;
mod data;
mod data_parallel;
mod ddp;
mod equivalence;
mod fused;
mod hooks;
mod horovod;
mod parallel;
mod state;
mod sync_batch_norm;
mod tensors;
mod tied;
#[cfg(feature = "train")]
mod train;
mod uneven;
mod unused;
mod weights;
mod zero;
