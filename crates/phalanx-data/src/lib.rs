//! Data sets and loaders for distributed training, for any framework.
//!
//! ```
//! use phalanx::sampler::DistributedSampler;
//! use phalanx_data::{DataLoader, InMemory};
//!
//! let group = phalanx::init()?; // as the launcher says; alone, a world of one
//! let samples: Vec<(Vec<f32>, u8)> = (0..1000).map(|n| (vec![n as f32; 4], (n % 10) as u8)).collect();
//!
//! let sampler = DistributedSampler::for_group(samples.len(), &group).seed(42);
//! let loader = DataLoader::builder(InMemory::new(samples))
//!     .sampler(sampler)
//!     .batch_size(64)
//!     .num_workers(2)
//!     .collate(|samples| Ok(samples.into_iter().unzip::<_, _, Vec<_>, Vec<_>>()))
//!     .build()?;
//!
//! for epoch in 0..2 {
//!     for batch in loader.iter() { // another order in each pass, without `set_epoch`
//!         let (xs, ys) = batch?;
//!         assert_eq!(xs.len(), ys.len());
//!     }
//! }
//! # Ok::<(), phalanx::Error>(())
//! ```
//!
//! | To | see | PyTorch |
//! |---|---|---|
//! | read items by their index | [`Dataset`] | `Dataset` |
//! | read items one after the other, such as from a queue | [`IterableDataset`] | `IterableDataset` |
//! | load batches with worker threads | [`DataLoader`], [`StreamLoader`] | `DataLoader` |
//! | continue in the middle of an epoch, in another world too | [`Position`], [`StreamPosition`] | torchdata's `StatefulDataLoader` |
//! | know the worker, and its seeds | [`worker_info`] | `get_worker_info` |
//! | decide on an order | [`Sampler`] | `Sampler` |
#![cfg_attr(feature = "lmdb", doc = "| keep many items in one file | [`lmdb`] | |")]
//! | read files in common formats | [`folder`] | torchvision's `ImageFolder` |
#![cfg_attr(
    feature = "image",
    doc = "| scale, crop, flip and normalize images | [`transforms`] | torchvision's `transforms.v2` |"
)]
//!
//! Every file format is behind a feature of its own: `lmdb`, `safetensors`, `npy`, `csv`, `json`, `image`.
//!
//! Without the feature `lmdb` the crate has no unsafe code. With it there is one block, which opens an environment: that is
//! unsafe in heed, since a map of a file shows whatever is done to it.
// docs.rs shows which feature an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(feature = "lmdb"), forbid(unsafe_code))]
#![deny(unsafe_code)]

mod dataset;
mod error;
pub mod folder;
#[cfg(feature = "lmdb")]
pub mod lmdb;
pub mod loader;
mod pool;
mod sampler;
mod settings;
pub mod stream;
#[cfg(feature = "image")]
pub mod transforms;
mod worker;

pub use dataset::{Dataset, InMemory, Map, Subset};
pub use error::LoadError;
pub use loader::{Batches, DataLoader, DataLoaderBuilder, Position};
pub use sampler::{Sampler, Sampling, from_fn};
pub use stream::{IterableDataset, Shard, StreamBatches, StreamLoader, StreamLoaderBuilder, StreamPosition};
pub use worker::{WorkerInfo, set_item, worker_info};

/// The programs of the README and of the guide must compile.
#[cfg(all(doctest, feature = "image", feature = "json", feature = "lmdb"))]
mod guide {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../../../docs/guide/loading-data.md")]
    struct LoadingData;
    #[doc = include_str!("../../../docs/guide/lmdb.md")]
    struct Lmdb;
    #[doc = include_str!("../../../docs/guide/seeds.md")]
    struct Seeds;
}
