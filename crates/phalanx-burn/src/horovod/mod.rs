//! Horovod's way: gradients are averaged by name, in whatever order each rank's backward pass finishes them.
//!
//! [`Ddp`](crate::Ddp) is the first choice: it averages gradients in an order that is planned, and negotiates nothing. This is for
//! programs that were written for Horovod, and for backward passes that differ between ranks.
//!
//! ```
//! use burn::nn::LinearConfig;
//! use burn::optim::SgdConfig;
//! use burn::tensor::{Device, Distribution, Tensor};
//! use phalanx::Rank;
//! use phalanx_burn::horovod::{self, DistributedOptimizer};
//!
//! let hvd = phalanx_horovod::init()?; // hvd.init()
//! let device = Device::flex().autodiff();
//! let mut model = LinearConfig::new(4, 1).init(&device);
//! model = horovod::broadcast_parameters(&hvd, model, Rank::MAIN)?;
//! let mut optimizer = DistributedOptimizer::new(SgdConfig::new().init(), &model, &hvd)?;
//! for _ in 0..3 {
//!     let x = Tensor::<2>::random([8, 4], Distribution::Default, &device); // this rank's part of the batch
//!     let loss = optimizer.forward(&model, |model| model.forward(x).mean());
//!     optimizer.backward(&loss)?; // gradients are submitted while it runs
//!     model = optimizer.step(0.01 * f64::from(hvd.size()), model)?; // waits for their averages
//!     let loss = hvd.average("loss", loss.into_scalar::<f32>().into())?; // of all ranks
//! #   assert!(loss.is_finite());
//! }
//! # Ok::<(), phalanx::Error>(())
//! ```
//!
//! | Horovod | here |
//! |---|---|
//! | `hvd.DistributedOptimizer(optimizer, named_parameters, ...)` | [`DistributedOptimizer::new`], [`with_options`](DistributedOptimizer::with_options) |
//! | `loss.backward()` | [`DistributedOptimizer::backward`] |
//! | `optimizer.synchronize()`, clipping, `optimizer.step()` | [`DistributedOptimizer::synchronize`], [`clip_grad_norm`](crate::clip_grad_norm), [`DistributedOptimizer::apply`] |
//! | `hvd.broadcast_parameters`, `hvd.broadcast_optimizer_state` | [`broadcast_parameters`], [`broadcast_optimizer_state`] |
//! | `hvd.allreduce(metric)`, `MetricAverageCallback` | [`Horovod::average`](phalanx_horovod::Horovod::average) |
//! | `hvd.elastic.TorchState(model, optimizer, epoch=0)` | [`ModelState`] |
//! | `LearningRateWarmupCallback` | [`ScaledLrScheduler`](crate::ScaledLrScheduler) with [`warmup_steps`](crate::ScaledLrScheduler::warmup_steps) |

mod elastic;
mod memory;
mod optimizer;
mod sink;
mod state;

pub use self::elastic::ModelState;
pub(crate) use self::memory::Recycled;
pub use self::optimizer::{DistributedOptimizer, DistributedOptions, Groups};
pub use self::state::{allreduce, broadcast_optimizer_state, broadcast_parameters};
