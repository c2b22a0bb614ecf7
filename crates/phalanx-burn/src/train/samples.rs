//! The samples of one rank, chosen again in each epoch.

use std::fmt;
use std::sync::Arc;

use burn::data::dataset::{Dataset, DatasetError};
use parking_lot::RwLock;
use phalanx::ProcessGroup;
use phalanx::sampler::DistributedSampler;

use super::loaders;

/// A data set as one rank sees it: its samples of the current epoch, which a
/// [`DistributedSampler`] gives. [`DdpStrategy::sampled`](super::DdpStrategy::sampled) makes it.
pub struct Sampled<D> {
    dataset: D,
    shard: Arc<Shard>,
}

/// The samples of the current epoch.
pub(super) struct Shard {
    pub seed: u64,
    /// Of all ranks.
    pub samples: usize,
    order: RwLock<(DistributedSampler, Vec<usize>)>,
}

impl Shard {
    pub fn new(samples: usize, group: &ProcessGroup, seed: u64) -> Self {
        let sampler = DistributedSampler::for_group(samples, group).seed(seed);
        let order = sampler.indices();
        Self { seed, samples, order: RwLock::new((sampler, order)) }
    }

    pub fn set_epoch(&self, epoch: u64) {
        let (sampler, order) = &mut *self.order.write();
        sampler.set_epoch(epoch);
        *order = sampler.indices();
    }

    pub fn len(&self) -> usize {
        self.order.read().1.len()
    }
}

impl<D> Sampled<D> {
    pub(super) fn new(dataset: D, shard: Arc<Shard>) -> Self {
        Self { dataset, shard }
    }
}

impl<I, D: Dataset<I>> Dataset<I> for Sampled<D> {
    fn get(&self, index: usize) -> Result<I, DatasetError> {
        let sample = self.shard.order.read().1[index];
        #[cfg(feature = "data")]
        phalanx_data::set_item(sample);
        self.dataset.get(sample)
    }

    fn get_many(&self, indexes: Vec<usize>) -> Result<Vec<I>, DatasetError> {
        let samples = {
            let order = self.shard.order.read();
            indexes.into_iter().map(|index| order.1[index]).collect()
        };
        self.dataset.get_many(samples)
    }

    fn len(&self) -> usize {
        loaders::sampled_among(self.shard.order.read().0.world_size());
        self.shard.len()
    }
}

impl<D> fmt::Debug for Sampled<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sampled({} samples)", self.shard.len())
    }
}
