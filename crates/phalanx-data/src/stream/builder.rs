//! The options of a loader of a stream.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use phalanx::{Error, ProcessGroup, Rank, Result, WorldSize};

use super::{Inner, IterableDataset, StreamLoader, StreamPosition};
use crate::WorkerInfo;
use crate::settings::{Collate, Failure, Progress, Settings, checked, failure_of};

/// A position has a number for each shard.
const MAX_SHARDS: usize = 1 << 20;

/// Makes a [`StreamLoader`].
pub struct StreamLoaderBuilder<D: IterableDataset, B = Vec<<D as IterableDataset>::Item>> {
    dataset: D,
    collate: Collate<D::Item, B>,
    shard: (Rank, WorldSize),
    failure: Option<Failure>,
    shards: Option<usize>,
    settings: Settings,
}

impl<D: IterableDataset + 'static> StreamLoaderBuilder<D> {
    pub(super) fn new(dataset: D) -> Self {
        Self {
            dataset,
            collate: Arc::new(Ok),
            shard: (Rank::MAIN, WorldSize::ONE),
            failure: None,
            shards: None,
            settings: Settings::default(),
        }
    }
}

impl<D: IterableDataset + 'static, B: Send + 'static> StreamLoaderBuilder<D, B> {
    /// How a batch is made of its items, in the worker. By default it is the list of them.
    pub fn collate<C: Send + 'static>(
        self,
        collate: impl Fn(Vec<D::Item>) -> Result<C> + Send + Sync + 'static,
    ) -> StreamLoaderBuilder<D, C> {
        StreamLoaderBuilder {
            dataset: self.dataset,
            collate: Arc::new(collate),
            shard: self.shard,
            failure: self.failure,
            shards: self.shards,
            settings: self.settings,
        }
    }

    /// Items in a batch; 1 by default.
    pub fn batch_size(mut self, batch_size: usize) -> Self {
        self.settings.batch_size = batch_size;
        self
    }

    /// Into how many shards the stream is divided, on all ranks together; the same number on every rank. By default one for each worker of each rank,
    /// so ranks with other numbers of workers, as hosts with other numbers of processors have, need a number of its own: without it they would
    /// divide the stream in different ways, and read some items twice and others not at all. So do positions that are good for another number of ranks or
    /// workers.
    pub fn shards(self, shards: usize) -> Self {
        Self { shards: Some(shards), ..self }
    }

    /// The seed of [what items draw](crate::WorkerInfo::seed), and of [shards](super::Shard::seed); 0 by default. It must be the same on every rank,
    /// which [`check_ranks`](StreamLoader::check_ranks) compares: after a resume another rank may read a shard.
    pub fn seed(mut self, seed: u64) -> Self {
        self.settings.seed = seed;
        self
    }

    /// Loads the part of this rank of `group`. A world of one by default.
    pub fn group(self, group: &ProcessGroup) -> Self {
        let failure = failure_of(group);
        Self { failure, ..self.shard(group.rank(), group.world_size()) }
    }

    /// [`group`](Self::group), for ranks that have none.
    pub fn shard(self, rank: Rank, world_size: WorldSize) -> Self {
        Self { shard: (rank, world_size), failure: None, ..self }
    }

    /// Whether to leave out each worker's last batch if it is not full. False by default. A pass that has no other batch is a warning in the log.
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.settings.drop_last = drop_last;
        self
    }

    /// Threads that read; with 0, the default, the loop's own thread does when it asks for a batch.
    pub fn num_workers(mut self, num_workers: usize) -> Self {
        self.settings.num_workers = num_workers;
        self
    }

    /// Batches that each worker may be ahead of the loop; 2 by default.
    pub fn prefetch_factor(mut self, prefetch_factor: usize) -> Self {
        self.settings.prefetch_factor = prefetch_factor;
        self
    }

    /// Called on each worker's thread in each pass before it opens its first shard.
    pub fn worker_init(mut self, init: impl Fn(&WorkerInfo) -> Result<()> + Send + Sync + 'static) -> Self {
        self.settings.init = Some(Arc::new(init));
        self
    }

    /// How long the loop waits for a batch of a worker before it gives an error; 30 minutes by default. 0 is refused. In PyTorch 0 means no
    /// time-out: here that is `Duration::MAX`.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.settings.timeout = timeout;
        self
    }

    /// The loader.
    ///
    /// # Errors
    /// If an option is out of its range, or there are fewer shards than ranks.
    pub fn build(self) -> Result<StreamLoader<D, B>> {
        let (rank, world) = self.shard;
        world.rank(rank.get())?;
        self.settings.check()?;
        let shards = self.shards.unwrap_or(world.count() * self.settings.num_workers.max(1));
        checked("shards", shards, 1..=MAX_SHARDS)?;
        enough(shards, world)?;
        let progress = Progress::new(StreamPosition::start(shards, self.settings.seed), self.shard);
        let inner = Inner {
            dataset: Arc::new(self.dataset),
            collate: self.collate,
            settings: self.settings,
            progress: Mutex::new(progress),
            failure: Mutex::new(self.failure),
        };
        Ok(StreamLoader { inner: Arc::new(inner) })
    }
}

/// Refuses a stream of which some rank would get nothing.
pub(super) fn enough(shards: usize, world: WorldSize) -> Result<()> {
    if shards >= world.count() {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "{shards} shards are too few for {world} ranks: some would get none"
    ))
    .with_remedy("build the loader with more shards, or start fewer ranks"))
}

impl<D: IterableDataset, B> fmt::Debug for StreamLoaderBuilder<D, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamLoaderBuilder")
            .field("shards", &self.shards)
            .field("batch_size", &self.settings.batch_size)
            .field("num_workers", &self.settings.num_workers)
            .finish_non_exhaustive()
    }
}
