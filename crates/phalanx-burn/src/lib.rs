//! DistributedDataParallel for [Burn](burn) models.
//!
//! Every rank, a separate process, has a replica of the model and its own part of the data. After each backward pass
//! all ranks have the average of their gradients, do the same step, and so stay equal to the last bit.
//!
//! ```no_run
//! use burn::nn::LinearConfig;
//! use burn::optim::AdamWConfig;
//! use burn::tensor::{Device, Distribution, Tensor};
//! use phalanx::sampler::DistributedSampler;
//! use phalanx_burn::Ddp;
//!
//! fn main() -> phalanx::Result<()> {
//!     phalanx::spawn(2, train) // two processes of this program
//! }
//!
//! fn train() -> phalanx::Result<()> {
//!     let group = phalanx::init()?;
//!     let device = Device::flex().autodiff();
//!     device.seed(1); // every rank makes the same data
//!     let xs = Tensor::<2>::random([10_000, 4], Distribution::Default, &device);
//!     let ys = xs.clone().sum_dim(1);
//!
//!     let mut ddp = Ddp::new(LinearConfig::new(4, 1).init(&device), &group)?;
//!     let mut optimizer = AdamWConfig::new().init();
//!     let mut sampler = DistributedSampler::for_group(10_000, &group);
//!
//!     for epoch in 0..10 {
//!         sampler.set_epoch(epoch);
//!         for indices in sampler.indices().chunks(64) {
//!             let indices = Tensor::from_data(indices, &device);
//!             let (x, y) = (xs.clone().select(0, indices.clone()), ys.clone().select(0, indices));
//!
//!             let loss = ddp.forward(|model| (model.forward(x) - y).powi_scalar(2).mean())?;
//!             let gradients = ddp.backward(&loss)?; // the average over all ranks
//!             ddp.step(&mut optimizer, 1e-2, gradients)?;
//!
//!             if group.rank().is_main() {
//!                 println!("epoch {epoch}: loss {:.4}", loss.into_scalar::<f32>());
//!             }
//!         }
//!     }
//!     Ok(())
//! }
//! ```
//!
//! Under `phalanx run --nproc-per-node 2 -- PROGRAM`, torchrun and the like, `phalanx::spawn` starts no processes: it calls `train`, which
//! joins the group that the environment describes. A program that calls `train` itself, without a launcher, is a world of one, in which
//! [`Ddp`] costs nothing.
//!
//! # From a Burn loop to this one
//!
//! | One process | Many |
//! |---|---|
//! | `let mut model = ..` | `let mut ddp = Ddp::new(.., &group)?` |
//! | `model.forward(x)` | `ddp.forward(\|model\| model.forward(x))?` |
//! | `GradientsParams::from_grads(loss.backward(), &model)` | `ddp.backward(&loss)?` |
//! | `model = optimizer.step(lr, model, gradients)` | `ddp.step(&mut optimizer, lr, gradients)?` |
//! | `model.valid().forward(x)` | `ddp.evaluate(\|model\| model.forward(x))?` |
//!
//! # What happens when
//!
//! - **[`Ddp::new`]** compares the names, shapes and types of the parameters with rank 0's, and the error names the first
//!   that differs. Then every rank takes over rank 0's parameters and buffers, so seeds need not agree.
//! - **[`Ddp::forward`]** runs on a copy of the module, which shares its memory, with a hook on each parameter. In the first forward pass
//!   after each averaged backward pass, every rank first takes rank 0's buffers, such as the running statistics of batch norm.
//! - **[`Ddp::evaluate`]** runs on the model without autodiff, with rank 0's buffers on every rank.
//! - **[`Ddp::backward`]** hands each gradient to the [reducer](phalanx::reducer) as soon as it is finished, while the
//!   layers below are still computing theirs. Set `PHALANX_TRACE=trace.json` and open the file in a trace viewer to see it.
//! - **[`Ddp::step`]** is local. The first one waits for the other ranks: they compare their optimizers. Every 31 steps they compare them
//!   again, without a wait.
//!
//! The gradient is the average over ranks: with a mean as the loss and equal batches, it is that of the whole batch. With unequal
//! batches [`Ddp::backward_weighted`] gives that of the whole batch.
//!
//! # Several small batches for one step
//!
//! [`Ddp::backward_no_sync`] adds up gradients without communication until the next [`Ddp::backward`]:
//!
//! ```
//! # use burn::{nn::Linear, optim::ModuleOptimizer, tensor::Tensor};
//! # fn step(ddp: &mut phalanx_burn::Ddp<Linear>, optimizer: &mut ModuleOptimizer, batches: Vec<Tensor<2>>)
//! # -> phalanx::Result<()> {
//! let (count, mut batches) = (batches.len(), batches.into_iter());
//! let last = batches.next_back().expect("at least one batch");
//! for batch in batches {
//!     let loss = ddp.forward(|model| model.forward(batch).mean() / count as f32)?;
//!     ddp.backward_no_sync(&loss)?;
//! }
//! let loss = ddp.forward(|model| model.forward(last).mean() / count as f32)?;
//! let gradients = ddp.backward(&loss)?;
//! ddp.step(optimizer, 1e-3, gradients)?;
//! # Ok(())
//! # }
//! ```
//!
//! [`Ddp::clip_grad_norm`] clips the gradients of [`Ddp::backward`] by the norm of the whole model.
//!
//! # Unused parameters
//!
//! A parameter that gets no gradient on some rank is an error that names it, unless
//! [`find_unused_parameters`](phalanx::reducer::ReducerOptions::find_unused_parameters) or
//! [`static_graph`](phalanx::reducer::ReducerOptions::static_graph) is set in [`DdpOptions`]. With one of them its gradient counts as zero
//! if another rank has one. If no rank has one, the parameter gets none. A warning names it once.
//!
//! Networks that train in turns, such as a generator and a discriminator, have a `Ddp` each. [`Ddp::backward`] gives the gradients of its own
//! model, and drops the gradients that the loss sends into the other one.
//!
//! # Tied weights
//!
//! A clone of a `Param` has the same id. Both are one parameter in two places, such as the weight of an embedding and of a decoder. Its
//! gradient is the sum of both uses, and both places have one value after every step. Burn's own optimizer alone changes the first place
//! only. Places with one id that differ are refused with both names.
//!
//! # Uneven inputs
//!
//! Ranks with unequal numbers of batches train inside [`Ddp::join`]:
//!
//! ```
//! # use burn::{nn::Linear, optim::ModuleOptimizer, tensor::Tensor};
//! # use phalanx::join::JoinOptions;
//! # fn epoch(ddp: &mut phalanx_burn::Ddp<Linear>, optimizer: &mut ModuleOptimizer, batches: Vec<Tensor<2>>)
//! # -> phalanx::Result<()> {
//! ddp.join(optimizer, JoinOptions::default(), |ddp, optimizer| {
//!     for batch in batches {
//!         let loss = ddp.forward(|model| model.forward(batch).mean())?;
//!         let gradients = ddp.backward(&loss)?;
//!         ddp.step(optimizer, 1e-3, gradients)?;
//!     }
//!     Ok(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # Fewer bytes, less memory
//!
//! | | |
//! |---|---|
//! | [`Ddp::register_comm_hook`] | f16, bf16, PowerSGD, local SGD, or [one of your own](phalanx::reducer::hooks) |
//! | [`PeriodicModelAverager`] | the other half of local SGD |
//! | [`ZeroRedundancyOptimizer`] | the optimizer's state spread over the ranks |
//! | [`DdpOptions::gradient_as_bucket_view`] | gradients in the memory of the buckets, which is freed with them |
//! | [`ScaledLrScheduler`], [`cosine_with_warmup`] | the learning rate for a batch as large as all ranks' together; a warm-up and a decay |
//!
//! # Devices
//!
//! A model may be on any device that this build knows. Flex, Burn's kernels for processors, is always there, with or without gradient
//! checkpointing. The features `cuda`, `wgpu` and `cpu` add CubeCL's devices, and `tch` adds PyTorch's kernels for processors.
//! [`device::for_local_rank`] gives each process its own. What has been run on which of them is in `docs/guide/devices.md`.
//! On Flex and LibTorch, gradients are taken from where they lie. From any other device they are copied to this process while the
//! device still computes those of the layers below, averaged, and copied back once. On these devices the fused optimizers are Burn's own.
//! With the feature `nccl`, `Ddp::with_nccl` lets NCCL average gradients in the memory of CUDA devices.
//!
//! # Besides
//!
//! | | |
//! |---|---|
//! | [`SyncBatchNorm`] | batch norm whose statistics are those of all ranks' batches |
//! | [`FusedAdamW`], [`FusedSgd`] | Burn's optimizers in one pass over memory |
//! | [`TrainState`] | model, optimizer, learning-rate scheduler and progress as one value: for elastic jobs and for checkpoints |
//! | [`Collectives`] | `all_gather` of tensors, with gradients, as contrastive losses need it; `all_reduce`, `broadcast`, `reduce` and `reduce_scatter`; [`Ddp::mean`] and [`Ddp::sum`] of a loss or a count |
//! | [`parallel`] | models on several ranks: layers by hand, pipelines, tensor parallelism, fully sharded (FSDP) |
//! | [`DataParallel`], [`TowerGradients`] | several devices in one process, for comparison and where there is no other way |
//! | `data::BurnLoader` | loaders of `phalanx-data`, with workers and positions, as Burn's; needs the feature `data` |
//! | `horovod::DistributedOptimizer` | gradients averaged by name, as Horovod does it; needs the feature `horovod` |
//! | `train::DdpStrategy` | Burn's own trainer in several processes; needs the feature `train` |
//!
//! # Limits
//!
//! - Burn 0.22 has no mixed precision: a model is f32, f64, f16 or bf16 throughout, and is averaged in that type.
//! - A `Ddp` does not notice parameters that are frozen or unfrozen after [`Ddp::new`]: make a new `Ddp` from
//!   [`Ddp::into_model`].
//! - Two losses of one forward pass must be added up: the first backward pass consumes Burn's tape.
// docs.rs shows which feature an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]
// Burn 0.22 says of its LibTorch backend that a later version will not have it.
#![cfg_attr(feature = "tch", allow(deprecated))]

mod alike;
mod averager;
mod clip;
mod collectives;
mod constants;
#[cfg(feature = "data")]
pub mod data;
mod data_parallel;
mod ddp;
pub mod device;
mod fused;
mod gradients;
mod hook;
#[cfg(feature = "horovod")]
pub mod horovod;
#[cfg(feature = "tch")]
mod libtorch;
mod lr;
mod names;
#[cfg(feature = "nccl")]
mod nccl;
mod optimizer;
mod packed;
pub mod parallel;
mod parameters;
mod read_back;
mod replicas;
mod sink;
mod state;
mod sync_batch_norm;
mod tensor_bytes;
mod ties;
#[cfg(feature = "train")]
pub mod train;
mod view;
mod zero;

pub use clip::clip_grad_norm;
pub use collectives::{Collectives, Scalar};
pub use data_parallel::{DataParallel, Destination, Scatter, TowerGradients, Transfer, Transfers};
pub use ddp::{Ddp, DdpOptions};
pub use fused::{
    FusedAdamW, FusedAdamWConfig, FusedAdamWState, FusedSgd, FusedSgdConfig, FusedSgdState, Real,
};
pub use gradients::{Clip, Synced, SyncedGradients};
pub use lr::{LrScaling, ScaledLrScheduler, cosine_with_warmup};
#[cfg(feature = "nccl")]
pub use nccl::{DeviceBucket, DeviceHook, DeviceMessage};
pub use phalanx::reducer::hooks::PeriodicModelAverager;
pub use state::TrainState;
pub use sync_batch_norm::SyncBatchNorm;
pub use zero::ZeroRedundancyOptimizer;

/// The programs of both READMEs and of the guide compile.
#[cfg(doctest)]
mod guide {
    #[doc = include_str!("../../../README.md")]
    struct Readme;
    #[doc = include_str!("../README.md")]
    struct ReadmeOfTheCrate;
    #[doc = include_str!("../../../docs/guide/from-one-process-to-many.md")]
    struct FromOneProcessToMany;
    #[doc = include_str!("../../../docs/guide/unused-parameters.md")]
    struct UnusedParameters;
    #[doc = include_str!("../../../docs/guide/uneven-inputs.md")]
    struct UnevenInputs;
    #[doc = include_str!("../../../docs/guide/contrastive-losses.md")]
    struct ContrastiveLosses;
    #[doc = include_str!("../../../docs/guide/large-batches.md")]
    struct LargeBatches;
    #[doc = include_str!("../../../docs/guide/parallelism.md")]
    struct Parallelism;
    #[doc = include_str!("../../../docs/guide/batch-norm.md")]
    struct BatchNorm;
    #[doc = include_str!("../../../docs/guide/devices.md")]
    struct Devices;
    #[doc = include_str!("../../../docs/guide/elastic.md")]
    struct Elastic;
    #[cfg(feature = "horovod")]
    #[doc = include_str!("../../../docs/guide/horovod.md")]
    struct Horovod;
}
