//! Phalanx's loaders and data sets as Burn's, and the other way round. Needs the feature `data`.
//!
//! A [`DataLoader`] with Burn's [`Batcher`] as its collate function becomes a [`burn` data loader](BurnLoader), for
//! Burn's trainer and other users of such loaders. A plain loop needs no adapter: it collates with a closure and
//! iterates over the loader itself.
//!
//! ```
//! use burn::data::dataloader::{DataLoader as _, batcher::Batcher};
//! use burn::tensor::{Device, Tensor};
//! use phalanx_burn::data::BurnLoader;
//! use phalanx_data::{DataLoader, InMemory};
//!
//! struct Stack;
//!
//! impl Batcher<f32, Tensor<1>> for Stack {
//!     fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<1> {
//!         Tensor::from_floats(items.as_slice(), device)
//!     }
//! }
//!
//! let loader = DataLoader::builder(InMemory::new(vec![0.5f32; 100])).shuffle(true).batch_size(32).num_workers(2).build()?;
//! let loader = BurnLoader::new(&loader, Stack, &Device::flex());
//! assert_eq!(loader.num_items(), 100);
//! assert_eq!(loader.iter().map(|batch| batch.unwrap().dims()[0]).sum::<usize>(), 100);
//! # Ok::<(), phalanx::Error>(())
//! ```
//!
//! With [`DdpStrategy`](crate::train::DdpStrategy) the strategy chooses the samples of each epoch. It refuses a loader
//! that a `group` or a sampler has divided among ranks already.
//!
//! ```
//! # #[cfg(feature = "train")]
//! # fn program<B: burn::data::dataloader::batcher::Batcher<f32, burn::tensor::Tensor<1>> + 'static>(batcher: B) -> phalanx::Result<()> {
//! use phalanx_burn::data::{BurnLoader, FromBurn, ToBurn};
//! # use burn::tensor::Device;
//! # use phalanx_data::{DataLoader, InMemory};
//!
//! let strategy = phalanx_burn::train::DdpStrategy::new(&phalanx::init()?);
//! let samples = FromBurn::new(strategy.sampled(ToBurn(InMemory::new(vec![0.5f32; 100])), 42));
//! let loader = DataLoader::builder(samples).batch_size(32).num_workers(2).build()?; // neither a sampler nor `shuffle`
//! let loader = BurnLoader::new(&loader, batcher, &Device::flex().autodiff()).shared();
//! # drop(loader);
//! # Ok(())
//! # }
//! ```

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{self, DataLoaderIterator, Progress};
use burn::data::dataset::{self, DatasetError};
use burn::tensor::Device;
use phalanx::{Error, Result};
use phalanx_data::{Batches, DataLoader, Dataset};

/// A loader for Burn's trainer: items of `D`, made into batches `O` by a [`Batcher`] on a device, in the worker
/// threads.
pub struct BurnLoader<D: Dataset, O> {
    loader: DataLoader<D, O>,
    batcher: Arc<dyn Batcher<D::Item, O>>,
}

impl<D, O> BurnLoader<D, O>
where
    D: Dataset + 'static,
    D::Item: 'static,
    O: Send + 'static,
{
    /// `loader` with `batcher` instead of its collate function, from its position on. Each pass is the next epoch;
    /// with [`DdpStrategy`](crate::train::DdpStrategy) it is that of the trainer's epoch, from its beginning.
    pub fn new<B: Send + 'static>(
        loader: &DataLoader<D, B>,
        batcher: impl Batcher<D::Item, O> + 'static,
        device: &Device,
    ) -> Self {
        Self::with(loader, Arc::new(batcher), device)
    }

    fn with<B: Send + 'static>(
        loader: &DataLoader<D, B>,
        batcher: Arc<dyn Batcher<D::Item, O>>,
        device: &Device,
    ) -> Self {
        let (batches, device) = (batcher.clone(), device.clone());
        let loader = loader.with_collate(move |items| Ok(batches.batch(items, &device)));
        Self { loader, batcher }
    }

    /// In the form that the trainer takes.
    pub fn shared(self) -> Arc<dyn dataloader::DataLoader<O>> {
        Arc::new(self)
    }

    /// The inner loader, for example to save its position.
    pub fn loader(&self) -> &DataLoader<D, O> {
        &self.loader
    }
}

impl<D, O> dataloader::DataLoader<O> for BurnLoader<D, O>
where
    D: Dataset + 'static,
    D::Item: 'static,
    O: Send + 'static,
{
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        #[cfg(feature = "train")]
        if let Some(begun) = crate::train::loaders::begun() {
            self.loader.set_epoch(begun.epoch);
            self.loader.set_worker_rank(begun.rank, begun.world);
        }
        let (items, batch_size) = (self.num_items(), self.loader.batch_size());
        let batches = self.loader.iter();
        let steps = self.loader.len();
        // Trainers that add up gradients do the last step where the pass says that it is complete. A last batch that is
        // dropped never comes.
        let total = items.min(steps.saturating_mul(batch_size));
        let before = steps.saturating_sub(batches.len());
        let processed = before.saturating_mul(batch_size).min(total);
        Box::new(Pass { batches, processed, total, batch_size })
    }

    fn num_items(&self) -> usize {
        #[cfg(feature = "train")]
        {
            crate::train::loaders::divided_among(self.loader.world_size());
            // It says if the strategy has made it; the loader has asked for its length long ago.
            let _ = self.loader.dataset().len();
        }
        self.loader.items()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn dataloader::DataLoader<O>> {
        Arc::new(Self::with(&self.loader, self.batcher.clone(), device))
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn dataloader::DataLoader<O>> {
        Arc::new(Self { loader: self.loader.slice(start..end), batcher: self.batcher.clone() })
    }
}

struct Pass<D: Dataset, O: Send + 'static> {
    batches: Batches<D, O>,
    processed: usize,
    total: usize,
    batch_size: usize,
}

impl<D: Dataset + 'static, O: Send + 'static> Iterator for Pass<D, O> {
    type Item = std::result::Result<O, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.batches.next()?;
        self.processed = self.processed.saturating_add(self.batch_size).min(self.total);
        Some(batch.map_err(DatasetError::new))
    }
}

impl<D: Dataset + 'static, O: Send + 'static> DataLoaderIterator<O> for Pass<D, O> {
    fn progress(&self) -> Progress {
        Progress::new(self.processed, self.total, Some("items".to_owned()))
    }
}

impl<D: Dataset, O> fmt::Debug for BurnLoader<D, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BurnLoader({:?})", self.loader)
    }
}

/// A data set of Phalanx as one of Burn's.
#[derive(Clone, Debug)]
pub struct ToBurn<D>(pub D);

impl<D: Dataset> dataset::Dataset<D::Item> for ToBurn<D> {
    fn get(&self, index: usize) -> std::result::Result<D::Item, DatasetError> {
        self.0.get(index).map_err(DatasetError::new)
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

/// A data set of Burn's as one of Phalanx.
pub struct FromBurn<D, I> {
    dataset: D,
    _item: PhantomData<fn() -> I>,
}

impl<I, D: dataset::Dataset<I>> FromBurn<D, I> {
    /// The items of `dataset`.
    pub fn new(dataset: D) -> Self {
        Self { dataset, _item: PhantomData }
    }
}

impl<I, D: dataset::Dataset<I>> Dataset for FromBurn<D, I> {
    type Item = I;

    fn len(&self) -> usize {
        self.dataset.len()
    }

    fn get(&self, index: usize) -> Result<I> {
        self.dataset.get(index).map_err(Error::other)
    }
}

impl<D, I> fmt::Debug for FromBurn<D, I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FromBurn")
    }
}
