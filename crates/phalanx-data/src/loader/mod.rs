//! Batches of a [`Dataset`], loaded ahead by worker threads.

mod batches;
mod builder;
mod collate;
pub(crate) mod order;
mod position;
mod work;

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use phalanx::sampler::{ElasticSampler, Tail};
use phalanx::{Error, ProcessGroup, Rank, Result, WorldSize};

pub use self::batches::Batches;
pub use self::builder::DataLoaderBuilder;
use self::collate::Collating;
use self::order::{Own, Slice, of_rank};
pub use self::position::Position;
use crate::settings::{Failure, Progress, Settings, failure_of};
use crate::{Dataset, Sampling};

/// Loads a data set in batches, pass by pass; PyTorch's `DataLoader`, with torchdata's positions.
///
/// - **Order.** Batches come in the sampler's order, whatever the workers' timing. Each [`iter`](Self::iter) is the next epoch's
///   pass: no `set_epoch` can be forgotten.
/// - **Workers** are threads. Each loads whole batches, in turn: worker 0 the first, worker 1 the second, and so on. They stay
///   at most [`prefetch_factor`](DataLoaderBuilder::prefetch_factor) batches each ahead of the loop, and end when the iterator
///   is dropped.
/// - **Errors** and panics of the data set or the collate function come out of the iterator as a
///   [`LoadError`](crate::LoadError), in the place of their batch, with the index. The next call continues behind that batch.
/// - **Position.** [`position`](Self::position) is how far the loop has come, and not the workers. It goes into checkpoints and
///   commits; [`resume`](Self::resume) continues there, also with another number of ranks.
///
/// - **Memory** that batches have freed stays with the process, to be used again: the first loader raises two limits of glibc's allocator for
///   the whole process, to pieces of 32 MiB and 64 MiB of each heap. `MALLOC_TRIM_THRESHOLD_` or `MALLOC_MMAP_THRESHOLD_` in the environment hold instead.
///
/// A loader has the same number of batches on every rank, unless [`Tail::Split`] is asked for:
/// with that, batches of the last step may be empty.
///
/// Clones are the same loader.
#[doc(alias("StatefulDataLoader", "torch.utils.data.DataLoader"))]
pub struct DataLoader<D: Dataset, B = Vec<<D as Dataset>::Item>> {
    inner: Arc<Inner<D, B>>,
}

pub(crate) struct Inner<D: Dataset, B> {
    pub dataset: Arc<D>,
    /// The data set's, once it was needed: it may be made of all names or indices.
    pub fingerprint: OnceLock<u64>,
    pub collate: Collating<D::Item, B>,
    pub own: Option<Own>,
    pub settings: Settings,
    pub progress: Mutex<Progress<ElasticSampler>>,
    /// Of the group among whose ranks the next pass is divided, if it is known and there are others.
    pub failure: Mutex<Option<Failure>>,
}

impl<D: Dataset + 'static> DataLoader<D> {
    /// A loader of `dataset`: at first of batches of one item, in the data set's order, loaded on the calling thread.
    pub fn builder(dataset: D) -> DataLoaderBuilder<D> {
        DataLoaderBuilder::new(dataset)
    }
}

impl<D: Dataset + 'static, B: Send + 'static> DataLoader<D, B> {
    /// The next pass over the data: that of the epoch after the last one that was begun, or after [`resume`](Self::resume) the
    /// one that was cut off. Workers begin at once.
    ///
    /// All ranks begin the same passes. For a look at a few items on one rank there is [`slice`](Self::slice), which has a position of its own.
    pub fn iter(&self) -> Batches<D, B> {
        Batches::begin(self.inner.clone())
    }

    /// How far the loop has come: behind the last batch that the newest iterator gave. The same on every rank.
    ///
    /// ```
    /// use phalanx_data::{DataLoader, InMemory, Position};
    ///
    /// let loader = || DataLoader::builder((0..100).collect::<InMemory<u32>>()).shuffle(true).batch_size(10).build();
    /// let first = loader()?;
    /// let mut batches = first.iter();
    /// batches.next();
    /// let position: Position = first.position(); // saved with serde, and then the job is killed
    ///
    /// let second = loader()?;
    /// second.resume(&position)?;
    /// let (seen, rest) = (batches.next().unwrap()?, second.iter().next().unwrap()?);
    /// assert_eq!(seen, rest);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    #[doc(alias = "state_dict")]
    pub fn position(&self) -> Position {
        let places = self.inner.progress.lock().position.clone();
        Position::at(places, self.inner.fingerprint())
    }

    /// Goes on at `position` with the next [`iter`](Self::iter). Rank and world are this loader's.
    ///
    /// # Errors
    /// If the position belongs to another order, also if a [`Sampler`](crate::Sampler) gives another one now for the epoch of the position. If it is one
    /// within a pass over another data set, as far as its [fingerprint](Dataset::fingerprint) tells.
    #[doc(alias = "load_state_dict")]
    pub fn resume(&self, position: &Position) -> Result<()> {
        let own = self.inner.progress.lock().position.clone();
        // A sampler is the program's code, and may ask this loader: no lock is held meanwhile.
        let wanted = position.for_loader(&own, self.inner.own.as_ref(), self.inner.fingerprint())?;
        let mut progress = self.inner.progress.lock();
        (progress.position, progress.begun) = (wanted, false);
        progress.passes += 1;
        Ok(())
    }

    /// The next [`iter`](Self::iter) is the pass `epoch`, from its beginning. Only needed to leave the order of counting.
    ///
    /// Between [`resume`](Self::resume) and the next `iter`, the epoch of the position keeps the position: a loop that sets
    /// each epoch continues where it was cut off.
    pub fn set_epoch(&self, epoch: u64) {
        let mut progress = self.inner.progress.lock();
        if progress.begun || progress.position.epoch() != epoch {
            progress.position.set_epoch(epoch);
        }
        progress.begun = false;
        progress.passes += 1;
    }

    /// The epoch of the pass in which the loop is, or of the next one.
    pub fn epoch(&self) -> u64 {
        self.inner.progress.lock().position.epoch()
    }

    /// From the next [`iter`](Self::iter) on, the part of this rank of `group`: for a loader that outlives a change of the group.
    pub fn set_group(&self, group: &ProcessGroup) {
        let mut progress = self.inner.progress.lock();
        (progress.shard, progress.worker_rank) = ((group.rank(), group.world_size()), None);
        *self.inner.failure.lock() = failure_of(group);
    }

    /// From the next [`iter`](Self::iter) on, the rank and the world that [`worker_info`](crate::worker_info) says, and of which
    /// [workers' seeds](crate::WorkerInfo::seed) are made; the items stay the same. For a trainer that divides loaders or data sets among
    /// ranks by itself: for the loader it is a world of one, and without this the workers of all ranks would draw alike.
    pub fn set_worker_rank(&self, rank: Rank, world_size: WorldSize) {
        self.inner.progress.lock().worker_rank = Some((rank, world_size));
    }

    /// Among how many ranks it is divided: the world of its sampler or group.
    pub fn world_size(&self) -> WorldSize {
        self.inner.progress.lock().shard.1
    }

    /// The number of batches of a whole pass on this rank. With a [`Sampler`](crate::Sampler) of one's own, of the current epoch's.
    pub fn len(&self) -> usize {
        let (mut whole, (_, world)) = {
            let progress = self.inner.progress.lock();
            (progress.position.clone(), progress.shard)
        };
        if let Some(own) = &self.inner.own {
            whole = position::over(&whole, own.indices(whole.epoch()).len());
        }
        whole.set_epoch(whole.epoch());
        self.inner.steps_left(&whole, world)
    }

    /// Whether a pass has no batch.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of items of a whole pass on this rank, those of a last batch that is [dropped](DataLoaderBuilder::drop_last) too. With
    /// [`Tail::Drop`] those of full batches alone.
    pub fn items(&self) -> usize {
        let (places, shard) = {
            let progress = self.inner.progress.lock();
            (progress.position.clone(), progress.shard)
        };
        let epoch = places.epoch();
        let samples = self.inner.own.as_ref().map_or(places.samples(), |own| own.indices(epoch).len());
        of_rank(&places, samples, self.batch_size(), shard, epoch).len()
    }

    /// The same loader with another collate function, and with a position of its own, which begins at this one's.
    pub fn with_collate<C: Send + 'static>(
        &self,
        collate: impl Fn(Vec<D::Item>) -> Result<C> + Send + Sync + 'static,
    ) -> DataLoader<D, C> {
        let progress = self.inner.progress.lock().unbegun();
        let collate = Collating::All(Arc::new(collate));
        DataLoader { inner: Arc::new(self.inner.with(collate, self.inner.own.clone(), progress)) }
    }

    /// A loader of a part of what this rank gets: of its items in a pass, those at these places. It begins with this loader's epoch,
    /// and has a position of its own. For trainers that divide a loader among ranks by themselves; see
    /// [`set_worker_rank`](Self::set_worker_rank). Its workers are those of this loader's rank.
    pub fn slice(&self, places: Range<usize>) -> Self {
        let mut progress = self.inner.progress.lock().unbegun();
        let of = Sampling {
            places: progress.position.clone(),
            own: self.inner.own.clone(),
            shard: Some(progress.shard),
        };
        progress.worker_rank = Some(progress.worker_rank());
        progress.shard = (Rank::MAIN, WorldSize::ONE);
        let epoch = progress.position.epoch();
        progress.position = ElasticSampler::new(0).shuffle(false).tail(Tail::Repeat);
        progress.position.set_epoch(epoch);
        let own = Own::Slice(Arc::new(Slice { of, batch_size: self.batch_size(), places }));
        Self { inner: Arc::new(self.inner.with(self.inner.collate.clone(), Some(own), progress)) }
    }

    /// Checks that all ranks of `group` load the same items in the same order, each its own part of them. All ranks call it together, such as
    /// once before the first pass. It compares the number of items and their [fingerprint](Dataset::fingerprint), the sampler's options or the order of a
    /// [`Sampler`](crate::Sampler) in this epoch, the tail, the [position](Self::position), `batch_size`, `drop_last` and `seed`. Nothing else does: ranks that differ would
    /// train on some items twice, and on others not at all. It reads no item. It refuses a loader that has all items on each rank, also one that a
    /// trainer [divides by itself](Self::set_worker_rank), such as `DdpStrategy` of phalanx-burn: that compares what it needs.
    ///
    /// ```
    /// use phalanx_data::{DataLoader, InMemory};
    ///
    /// let group = phalanx::init()?;
    /// let items = (0..100).collect::<InMemory<u32>>();
    /// let loader = DataLoader::builder(items).shuffle(true).group(&group).batch_size(10).build()?;
    /// loader.check_ranks(&group)?;
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// On every rank, if a rank's loader differs from rank 0's, with both, or if the loaders are not divided among the ranks of `group`
    /// ([`is_mismatch`](Error::is_mismatch)).
    pub fn check_ranks(&self, group: &ProcessGroup) -> Result<()> {
        let (places, place) = {
            let progress = self.inner.progress.lock();
            (progress.position.clone(), progress.shard)
        };
        let Settings { batch_size, drop_last, seed, .. } = self.inner.settings;
        let order = match &self.inner.own {
            Some(own) => {
                let indices = own.indices(places.epoch());
                let (digest, places) = (own.digest(&indices), position::over(&places, indices.len()));
                format!("an order of its own (digest {digest:016x}) with {}", places.describe())
            }
            None => places.describe(),
        };
        let (items, fingerprint) = (self.inner.dataset.len(), self.inner.fingerprint());
        let (epoch, consumed) = (places.epoch(), places.consumed());
        let loads = format!(
            "{items} items (fingerprint {fingerprint:016x}), {order}, epoch {epoch} behind {consumed} items, batch_size {batch_size}, drop_last {drop_last}, \
             the loader's seed {seed}"
        );
        group.check_parts("loader", place, &loads)
    }

    /// The data set.
    pub fn dataset(&self) -> &D {
        &self.inner.dataset
    }

    /// How many items a batch has.
    pub fn batch_size(&self) -> usize {
        self.inner.settings.batch_size
    }
}

impl<D: Dataset, B> Inner<D, B> {
    /// The same with another collate function, order and place.
    fn with<C>(
        &self,
        collate: Collating<D::Item, C>,
        own: Option<Own>,
        progress: Progress<ElasticSampler>,
    ) -> Inner<D, C> {
        Inner {
            dataset: self.dataset.clone(),
            fingerprint: self.fingerprint.clone(),
            collate,
            own,
            settings: self.settings.clone(),
            progress: Mutex::new(progress),
            failure: Mutex::new(self.failure.lock().clone()),
        }
    }

    pub fn fingerprint(&self) -> u64 {
        *self.fingerprint.get_or_init(|| self.dataset.fingerprint())
    }

    pub fn steps_left(&self, position: &ElasticSampler, world: WorldSize) -> usize {
        let Settings { batch_size, drop_last, .. } = self.settings;
        if drop_last {
            return position.full_steps_left(batch_size, world);
        }
        position.steps_left(batch_size, world)
    }

    /// Refuses a data set or an order that does not suffice for the world.
    pub fn check(&self, samples: usize, world: WorldSize) -> Result<()> {
        if samples == 0 || samples >= world.count() {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "{samples} items are too few for {world} ranks: some would get none, or only what others have"
        ))
        .with_remedy("start fewer ranks, or look whether the path of the data set is right"))
    }
}

impl<D: Dataset + 'static, B: Send + 'static> IntoIterator for &DataLoader<D, B> {
    type Item = Result<B, crate::LoadError>;
    type IntoIter = Batches<D, B>;

    fn into_iter(self) -> Batches<D, B> {
        self.iter()
    }
}

impl<D: Dataset, B> Clone for DataLoader<D, B> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<D: Dataset, B> fmt::Debug for DataLoader<D, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Settings { batch_size, num_workers, .. } = self.inner.settings;
        write!(
            f,
            "DataLoader({} items, batches of {batch_size}, {num_workers} workers)",
            self.inner.dataset.len()
        )
    }
}
