//! Models on several ranks, each of which has a part of the layers, or a part of each layer.
//!
//! | | what a rank has | |
//! |---|---|---|
//! | [`StageLink`] | some layers | tensors go to another rank and gradients come back, by hand |
//! | [`pipeline`] | some layers | micro-batches follow each other through the ranks, by a schedule |
//! | [`tensor`] | a part of each layer | Megatron-LM's divided layers |
//!
//! Replicas of either are a [`Ddp`](crate::Ddp) over the ranks that have the same part:
//! [`DeviceMesh`](phalanx::mesh::DeviceMesh) makes both groups. [`clip_grad_norm`] knows the norm of the whole model.

mod clip;
mod exchange;
mod link;
mod message;
mod op;
pub mod pipeline;
pub mod tensor;

pub use clip::clip_grad_norm;
pub use link::StageLink;
