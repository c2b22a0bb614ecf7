//! Distributed data-parallel training of models of [candle](https://docs.rs/candle-core), on the public interface of
//! [`phalanx`]: an example of an adapter. [`phalanx::adapter`] gives the order of calls that it follows.
//!
//! ```no_run
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{Module, ParamsAdamW, VarBuilder, VarMap, linear};
//! use phalanx::reducer::ReducerOptions;
//! use phalanx_candle::{AdamW, Ddp};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let group = phalanx::init()?; // as the launcher says; alone, a world of one
//!     let map = VarMap::new();
//!     linear(4, 1, VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu))?; // makes the variables
//!     let mut ddp = Ddp::new(&map, &group, ReducerOptions::default())?; // every rank takes over rank 0's
//!     let mut optimizer = AdamW::new(&map, ParamsAdamW::default())?;
//!     for _ in 0..100 {
//!         let x = Tensor::randn(0f32, 1., (32, 4), &Device::Cpu)?; // this rank's part of the batch
//!         let loss = ddp.forward(|vb| linear(4, 1, vb)?.forward(&x)?.sqr()?.mean_all())?;
//!         let gradients = ddp.backward(&loss)?; // averages over all ranks
//!         optimizer.step(&gradients)?;
//!     }
//!     Ok(())
//! }
//! ```

mod ddp;
mod hook;
mod optimizer;
mod sink;
mod variables;

pub use ddp::Ddp;
pub use optimizer::{AdamW, OptimizerState};
