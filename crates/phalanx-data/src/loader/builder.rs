//! The options of a loader.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use phalanx::sampler::{ElasticSampler, Tail};
use phalanx::{Error, ProcessGroup, Rank, Result, WorldSize};

use super::collate::{Collating, Each};
use super::{DataLoader, Inner};
use crate::settings::{Failure, Progress, Settings, failure_of};
use crate::{Dataset, Sampling, WorkerInfo};

/// Makes a [`DataLoader`]; each option has PyTorch's name and default where there is one.
pub struct DataLoaderBuilder<D: Dataset, B = Vec<<D as Dataset>::Item>> {
    dataset: D,
    collate: Collating<D::Item, B>,
    sampling: Option<Sampling>,
    shard: Option<(Rank, WorldSize)>,
    failure: Option<Failure>,
    tail: Option<Tail>,
    shuffle: bool,
    /// `reuse` was called where it does nothing.
    reuses_in_vain: bool,
    settings: Settings,
}

impl<D: Dataset + 'static> DataLoaderBuilder<D> {
    pub(super) fn new(dataset: D) -> Self {
        Self {
            dataset,
            collate: Collating::All(Arc::new(Ok)),
            sampling: None,
            shard: None,
            failure: None,
            tail: None,
            shuffle: false,
            reuses_in_vain: false,
            settings: Settings::default(),
        }
    }
}

impl<D: Dataset + 'static, B: Send + 'static> DataLoaderBuilder<D, B> {
    /// How a batch is made of its items, in the worker: padding, stacking. By default it is the list of them.
    #[doc(alias = "collate_fn")]
    pub fn collate<C: Send + 'static>(
        self,
        collate: impl Fn(Vec<D::Item>) -> Result<C> + Send + Sync + 'static,
    ) -> DataLoaderBuilder<D, C> {
        self.collating(Collating::All(Arc::new(collate)))
    }

    /// How a batch is made of one item after the other, in the worker: `begin` makes one for so many items, and `add` adds each when it
    /// is read. For stacks of large items: a list of them, as [`collate`](Self::collate) gets it, takes as much memory again, and
    /// by then they have left the processor's cache. PyTorch's `default_collate` refuses items of unequal shapes. Here only `add` knows the
    /// shapes: if they may differ, let it check them, and return an error.
    ///
    /// ```
    /// use phalanx_data::{DataLoader, Dataset, InMemory};
    ///
    /// let images = (0..100).collect::<InMemory<u8>>().map(|image| Ok(vec![f32::from(image); 784]));
    /// let loader = DataLoader::builder(images).batch_size(50).collate_each(
    ///     |items| Vec::with_capacity(items * 784),
    ///     |batch: &mut Vec<f32>, image| {
    ///         batch.extend_from_slice(&image);
    ///         Ok(())
    ///     },
    /// );
    /// assert_eq!(loader.build()?.iter().next().unwrap()?.len(), 50 * 784);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    pub fn collate_each<C: Send + 'static>(
        self,
        begin: impl Fn(usize) -> C + Send + Sync + 'static,
        add: impl Fn(&mut C, D::Item) -> Result<()> + Send + Sync + 'static,
    ) -> DataLoaderBuilder<D, C> {
        self.collating(Collating::Each(Each::new(Arc::new(begin), Arc::new(add))))
    }

    /// Uses the memory of batches again that the loop gives back by [`Batches::recycle`](crate::Batches::recycle); `clear` empties one.
    /// For [`collate_each`](Self::collate_each), which comes before; its `begin` is then called only if no batch was given back. A batch
    /// of 32 MiB and more is new memory from the system each time otherwise, which has to be cleared.
    ///
    /// ```
    /// use phalanx_data::{DataLoader, Dataset, InMemory};
    ///
    /// let images = (0..100).collect::<InMemory<u8>>().map(|image| Ok([f32::from(image); 784]));
    /// let loader = DataLoader::builder(images).batch_size(50).num_workers(1).collate_each(
    ///     |items| Vec::with_capacity(items * 784),
    ///     |batch: &mut Vec<f32>, image| {
    ///         batch.extend_from_slice(&image);
    ///         Ok(())
    ///     },
    /// );
    /// let loader = loader.reuse(Vec::clear).build()?;
    /// let mut batches = loader.iter();
    /// while let Some(batch) = batches.next().transpose()? {
    ///     assert_eq!(batch.len(), 50 * 784); // copied to the device, say
    ///     batches.recycle(batch);
    /// }
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    pub fn reuse(self, clear: impl Fn(&mut B) + Send + Sync + 'static) -> Self {
        match self.collate {
            Collating::Each(each) => Self { collate: Collating::Each(each.reuse(Arc::new(clear))), ..self },
            // What a function makes of a list is its own.
            all @ Collating::All(_) => Self { collate: all, reuses_in_vain: true, ..self },
        }
    }

    fn collating<C: Send + 'static>(self, collate: Collating<D::Item, C>) -> DataLoaderBuilder<D, C> {
        DataLoaderBuilder {
            dataset: self.dataset,
            collate,
            sampling: self.sampling,
            shard: self.shard,
            failure: self.failure,
            tail: self.tail,
            shuffle: self.shuffle,
            // What was to clear batches before is for batches of another type.
            reuses_in_vain: self.reuses_in_vain || self.collate.is_reusing(),
            settings: self.settings,
        }
    }

    /// Items in a batch of one rank; 1 by default.
    pub fn batch_size(mut self, batch_size: usize) -> Self {
        self.settings.batch_size = batch_size;
        self
    }

    /// Which items, in which order: a [`DistributedSampler`](phalanx::sampler::DistributedSampler), which brings rank and world
    /// along, an [`ElasticSampler`], or a [`Sampler`](crate::Sampler) of one's own. Without one, all items, in their order or
    /// [shuffled](Self::shuffle).
    pub fn sampler(self, sampler: impl Into<Sampling>) -> Self {
        Self { sampling: Some(sampler.into()), ..self }
    }

    /// Whether to shuffle anew in every epoch, in a loader without a sampler: a sampler has an order, and with one this is refused, as in
    /// PyTorch. False by default.
    pub fn shuffle(self, shuffle: bool) -> Self {
        Self { shuffle, ..self }
    }

    /// The seed of the order, if there is no sampler, and of [what items draw](crate::WorkerInfo::seed); 0 by default. It must be
    /// the same on every rank, which [`check_ranks`](DataLoader::check_ranks) compares.
    #[doc(alias = "generator")]
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
        Self { shard: Some((rank, world_size)), failure: None, ..self }
    }

    /// The treatment of the last samples that do not divide evenly among the ranks. By default the sampler's; without one, or with
    /// one's own, [`Tail::Repeat`].
    pub fn tail(self, tail: Tail) -> Self {
        Self { tail: Some(tail), ..self }
    }

    /// Whether to leave out the last batch if it is not full on every rank. False by default. A pass that has no other batch is a warning in the log.
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.settings.drop_last = drop_last;
        self
    }

    /// Threads that load; with 0, the default, the loop's own thread does when it asks for a batch.
    pub fn num_workers(mut self, num_workers: usize) -> Self {
        self.settings.num_workers = num_workers;
        self
    }

    /// Batches that each worker may be ahead of the loop; 2 by default. At most `num_workers * prefetch_factor` batches are in
    /// memory besides the loop's.
    pub fn prefetch_factor(mut self, prefetch_factor: usize) -> Self {
        self.settings.prefetch_factor = prefetch_factor;
        self
    }

    /// Called on each worker's thread in each pass before its first item: opening, seeding. Without worker threads it is called on
    /// the loop's thread.
    #[doc(alias = "worker_init_fn")]
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
    /// If an option is out of its range, there are a sampler and [`shuffle`](Self::shuffle), the sampler is for another number of items,
    /// there are fewer items than ranks or more than memory holds an order of, or [`reuse`](Self::reuse) does not come after [`collate_each`](Self::collate_each).
    pub fn build(self) -> Result<DataLoader<D, B>> {
        if self.reuses_in_vain {
            return Err(Error::invalid_argument("`reuse` is called without a `collate_each` before it")
                .with_remedy(
                    "call `reuse` after `collate_each`; what `collate` makes of a list is its own",
                ));
        }
        if self.shuffle && self.sampling.is_some() {
            return Err(Error::invalid_argument("`shuffle` and `sampler` both say in which order items come")
                .with_remedy(
                    "leave out `shuffle`; a DistributedSampler and an ElasticSampler shuffle unless they are told not to",
                ));
        }
        let samples = self.dataset.len();
        let (mut places, own, mut shard) = match self.sampling {
            Some(Sampling { places, own, shard }) => (places, own, shard),
            None => {
                let places = ElasticSampler::new(samples).seed(self.settings.seed).shuffle(self.shuffle);
                (places.tail(Tail::Repeat), None, None)
            }
        };
        if let Some(tail) = self.tail {
            places = places.tail(tail);
        }
        if own.is_none() && !places.is_shuffled() {
            // Nothing depends on it, so a position does not either.
            places = places.seed(0);
        }
        match (shard, self.shard) {
            (Some(one), Some(other)) if one != other => {
                return Err(Error::invalid_argument(format!(
                    "the sampler is rank {}'s of {}, the loader is to be rank {}'s of {}",
                    one.0, one.1, other.0, other.1
                ))
                .with_remedy("make the sampler for the same group, or leave out the loader's"));
            }
            (None, asked) => shard = asked,
            (Some(_), _) => {}
        }
        let shard = shard.unwrap_or((Rank::MAIN, WorldSize::ONE));
        shard.1.rank(shard.0.get())?;
        self.settings.check()?;
        if own.is_none() && places.samples() != samples {
            return Err(Error::invalid_argument(format!(
                "the sampler is for {} items, the data set has {samples}",
                places.samples()
            ))
            .with_remedy("make the sampler with the length of the data set"));
        }
        if self.shuffle && samples == 0 {
            return Err(Error::invalid_argument("there is nothing to shuffle: the data set has no item")
                .with_remedy("look whether its path is right"));
        }
        // A file may announce any number of items.
        places.check_memory()?;
        let inner = Inner {
            dataset: Arc::new(self.dataset),
            fingerprint: OnceLock::new(),
            collate: self.collate,
            own,
            settings: self.settings,
            progress: Mutex::new(Progress::new(places, shard)),
            failure: Mutex::new(self.failure),
        };
        if inner.own.is_none() {
            inner.check(samples, shard.1)?;
        }
        Ok(DataLoader { inner: Arc::new(inner) })
    }
}

impl<D: Dataset, B> fmt::Debug for DataLoaderBuilder<D, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataLoaderBuilder")
            .field("sampling", &self.sampling)
            .field("batch_size", &self.settings.batch_size)
            .field("num_workers", &self.settings.num_workers)
            .finish_non_exhaustive()
    }
}
