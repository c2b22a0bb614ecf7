//! Models on several ranks, each of which has a part of the layers, or a part of each layer.
//!
//! | | what a rank has | |
//! |---|---|---|
//! | [`StageLink`] | some layers | tensors go to another rank and gradients come back, by hand |
//! | [`pipeline`] | some layers | micro-batches follow each other through the ranks, by a schedule |
//! | [`tensor`] | a part of each layer | Megatron-LM's divided layers |
//! | [`fsdp`] | a shard of each layer's parameters | the whole layer is gathered before it is used, and freed after it |
//!
//! Replicas of either are a [`Ddp`](crate::Ddp) over the ranks that have the same part:
//! [`DeviceMesh`](phalanx::mesh::DeviceMesh) makes both groups. [`clip_grad_norm`] knows the norm of the whole model, and
//! [`ShardedState`] saves it in checkpoints that load at another mesh shape.

mod clip;
mod division;
mod elementwise;
mod exchange;
pub mod fsdp;
mod link;
mod message;
mod op;
mod panicked;
pub mod pipeline;
mod random;
mod sharers;
mod state;
pub mod tensor;
mod whole;

pub use clip::clip_grad_norm;
pub(crate) use clip::{of_stages, refuse_parts};
#[cfg(feature = "horovod")]
pub(crate) use division::group_of;
pub(crate) use elementwise::{check as check_elementwise, check_parts};
pub(crate) use exchange::gathered;
pub use link::StageLink;
pub(crate) use link::with_links;
pub(crate) use sharers::Sharers;
pub use state::{ShardedState, StateNames};
pub(crate) use whole::{parts_in_words, refuse_divided, refuse_units};

/// One number of several, each of which changes all its bits (SplitMix64).
fn mixed(numbers: impl IntoIterator<Item = u64>) -> u64 {
    numbers.into_iter().fold(0, |state: u64, number| {
        let mut mixed = (state ^ number).wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    })
}
