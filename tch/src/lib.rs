//! PyTorch's DistributedDataParallel for [tch](https://docs.rs/tch): every rank has the whole model, and gradients are
//! averaged over the ranks while libtorch's backward still computes the others.
//!
//! ```no_run
//! use phalanx_tch::Ddp;
//! use tch::nn::{self, OptimizerConfig};
//! use tch::{Device, Kind, Tensor};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let group = phalanx::init()?; // as the launcher says; alone, a world of one
//!     let store = nn::VarStore::new(Device::Cpu);
//!     let model = nn::linear(store.root(), 8, 3, Default::default());
//!     let mut optimizer = nn::Adam::default().build(&store, 1e-3)?; // any optimizer
//!     let mut ddp = Ddp::new(&store, &group)?; // every rank takes over rank 0's variables
//!     for _ in 0..100 {
//!         let x = Tensor::randn([32, 8], (Kind::Float, Device::Cpu)); // this rank's part of the batch
//!         let loss = ddp.forward(|| x.apply(&model).square().mean(Kind::Float))?;
//!         optimizer.zero_grad();
//!         ddp.backward(&loss)?; // `.grad` is the average over all ranks
//!         optimizer.step();
//!     }
//!     Ok(())
//! }
//! ```
//!
//! | PyTorch | here |
//! |---|---|
//! | `DistributedDataParallel(model)` | [`Ddp::new`] over the model's `VarStore` |
//! | `loss.backward()` | [`Ddp::backward`] |
//! | `with model.no_sync():` | [`Ddp::backward_no_sync`] |
//! | ranks with unequal batches: `loss * n * world_size / total` by hand | [`Ddp::backward_weighted`] |
//! | `find_unused_parameters`, `static_graph`, `bucket_cap_mb` | [`DdpOptions`] |
//! | `gradient_as_bucket_view` | always, on processors and over NCCL |
//! | `register_comm_hook` | [`Ddp::register_comm_hook`], [`Ddp::register_device_hook`] |
//! | `PeriodicModelAverager` | [`PeriodicModelAverager`] |
//! | `model.join()` | [`Ddp::join`], [`TrainState::join`] |
//! | `SyncBatchNorm` | [`SyncBatchNorm`] |
//! | `AdamW(fused=True)`, `SGD(fused=True)` | [`Optimizer`] |
//! | `param_groups` | [`Optimizer::with_group`] |
//! | `TorchState` of Horovod, `torch.save` | [`TrainState`] |
//!
//! Launching, data, process groups and elastic jobs are [`phalanx`]'s. It runs on Linux, on processors and on CUDA devices.
//!
//! # On CUDA devices
//!
//! Each rank has a device: `VarStore::new(Device::Cuda(group.local_rank() as usize))`. [`Ddp::with_nccl`] has NCCL average the gradients where
//! they lie. [`Ddp::new`] averages them in the host's memory, as gloo does: each is copied there when it is ready, and its average is copied
//! back. All variables of a `VarStore` are
//! on one device. Ranks that are threads of one process need a device each: libtorch has one thread for a device, in which a rank that waits
//! for another, as [`SyncBatchNorm`] does in backward, would wait for itself.

mod ddp;
mod nccl;
mod optimizer;
mod shim;
mod sink;
mod state;
mod sync_batch_norm;
mod tensors;

pub use ddp::{Ddp, DdpOptions};
pub use nccl::{DeviceBucket, DeviceHook, DeviceMessage};
pub use optimizer::{Optimizer, Rule};
pub use phalanx::reducer::hooks::PeriodicModelAverager;
pub use state::TrainState;
pub use sync_batch_norm::SyncBatchNorm;

/// The programs of the README and of the guide must compile.
#[cfg(doctest)]
mod guide {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../../docs/guide/libtorch.md")]
    struct Libtorch;
}
