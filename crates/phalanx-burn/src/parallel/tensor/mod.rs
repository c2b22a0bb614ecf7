//! Tensor parallelism: each layer divided among ranks, so that each has a part of the weights and computes a part of the outputs.
//!
//! Layers are made from Burn's, of which each rank takes its part, and give them back:
//!
//! | Burn | divided | what each rank has |
//! |---|---|---|
//! | [`Linear`](burn::nn::Linear) | [`ColumnParallelLinear`] | a part of the outputs |
//! | | [`RowParallelLinear`] | a part of the inputs |
//! | [`Embedding`](burn::nn::Embedding) | [`VocabParallelEmbedding`] | the vectors of some tokens; also their scores and the cross entropy |
//! | [`MultiHeadAttention`](burn::nn::attention::MultiHeadAttention) | [`ParallelAttention`] | some heads |
//! | [`PositionWiseFeedForward`](burn::nn::transformer::PositionWiseFeedForward) | [`ParallelFeedForward`] | some hidden units |
//! | [`TransformerEncoder`](burn::nn::transformer::TransformerEncoder) | [`ParallelEncoder`] | all of this |
//!
//! ```
//! use burn::nn::transformer::TransformerEncoderConfig;
//! use burn::tensor::{Device, Tensor};
//! use phalanx::{ProcessGroup, Result};
//! use phalanx_burn::parallel::tensor::{Activations, ParallelEncoder, TensorGroup};
//!
//! # fn show(group: &ProcessGroup) -> Result<()> {
//! let group = TensorGroup::new(group); // or mesh.group("tensor")?
//! let device = Device::flex().autodiff();
//! let encoder = TransformerEncoderConfig::new(16, 64, 4, 2).with_dropout(0.0).init(&device);
//! let encoder = ParallelEncoder::new(encoder, &group, Activations::Replicated)?;
//! let x = encoder.forward(Tensor::ones([2, 5, 16], &device), None, None); // the same on every rank
//! let whole = encoder.gather()?; // to save it, or to use it without a group
//! # assert_eq!(x.dims(), [2, 5, 16]);
//! # Ok(())
//! # }
//! # show(&ProcessGroup::alone()?)?;
//! # Ok::<(), phalanx::Error>(())
//! ```
//!
//! A model of one's own has [`ParallelLinear`] and [`VocabParallelEmbedding`] where it would have Burn's, and a [`TensorPlan`] divides
//! these by their names.
//!
//! Every rank of the group sees the same samples. The ranks compare what comes into a divided layer, but for rounding, in the first pass and in every
//! 1021st pass through such a layer: with other samples on one rank, the groups end with an error. Parameters that are not divided get the same gradient
//! on every rank, to the bit, and so stay equal; they must begin equal ([`TensorGroup::replicate`]). Several replicas of such a model are a
//! [`Ddp`](crate::Ddp) over the group that the mesh has for data: ranks with the same part of the model.
//!
//! Clip with [`parallel::clip_grad_norm`](super::clip_grad_norm). [`Ddp::clip_grad_norm`](crate::Ddp::clip_grad_norm) would take the norm of
//! this rank's part, and scale ranks differently: it refuses divided layers.

mod encoder;
mod group;
mod linear;
mod plan;
mod planned;
mod vocabulary;

pub use encoder::{ParallelAttention, ParallelEncoder, ParallelEncoderLayer, ParallelFeedForward};
pub use group::TensorGroup;
pub(super) use group::part;
pub use linear::{Activations, ColumnParallelLinear, RowParallelLinear};
pub use plan::TensorPlan;
pub use planned::ParallelLinear;
pub use vocabulary::VocabParallelEmbedding;
