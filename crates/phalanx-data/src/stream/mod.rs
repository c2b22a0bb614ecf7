//! Batches of items that come one after the other.

mod batches;
mod builder;
mod position;
mod work;

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use phalanx::{ProcessGroup, Result};

pub use self::batches::StreamBatches;
pub use self::builder::StreamLoaderBuilder;
pub use self::position::StreamPosition;
use crate::LoadError;
use crate::settings::{Collate, Failure, Progress, Settings, failure_of};

/// Items that come one after the other: of files that are read through, a queue, a socket. PyTorch's `IterableDataset`.
///
/// It comes in shards. Each is read by one worker of one rank, from its beginning or from behind what was read before; so the
/// shards together are the data set, and each item is in one of them.
///
/// ```
/// use phalanx_data::{IterableDataset, Shard, StreamLoader};
///
/// /// The numbers below 1000.
/// struct Numbers;
///
/// impl IterableDataset for Numbers {
///     type Item = u64;
///     type Stream = Box<dyn Iterator<Item = phalanx::Result<u64>>>;
///
///     fn stream(&self, shard: &Shard) -> phalanx::Result<Self::Stream> {
///         Ok(Box::new(shard.part_of((0..1000).map(Ok)))) // or: open the shard's own file
///     }
/// }
///
/// let loader = StreamLoader::builder(Numbers).batch_size(10).num_workers(2).build()?;
/// assert_eq!(loader.iter().next().unwrap()?, [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]);
/// assert_eq!(loader.iter().count(), 100);
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// A stream may have no end, as in online learning: then the loop decides when to stop. Ranks whose shards end at different times
/// make different numbers of steps, which `Ddp::join` is for.
pub trait IterableDataset: Send + Sync {
    /// The type of an item: usually one sample.
    type Item;
    /// A shard, as it is read.
    type Stream: Iterator<Item = Result<Self::Item>>;

    /// Opens a shard, on the thread that will read it, at the item behind the first [`Shard::skip`].
    ///
    /// # Errors
    /// Its own, such as a file that cannot be opened.
    fn stream(&self, shard: &Shard) -> Result<Self::Stream>;
}

/// A part of a stream that one worker reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shard {
    /// Which of them, from 0.
    pub index: usize,
    /// How many there are, on all ranks together. The same after a resume.
    pub count: usize,
    /// How many items of it have been read before, and are not to be read again.
    pub skip: u64,
    /// The pass over the data.
    pub epoch: u64,
    /// A seed of (the loader's seed, epoch, index of the shard).
    pub seed: u64,
}

impl Shard {
    /// This shard of `all` items, which every worker sees: those at `index`, `index + count`, ..., without the first `skip` of
    /// them. For sources that cannot be opened in parts; a part passes over what is others'.
    pub fn part_of<I: Iterator>(&self, all: I) -> impl Iterator<Item = I::Item> + use<I> {
        let skip = usize::try_from(self.skip).unwrap_or(usize::MAX);
        let first = self.count.saturating_mul(skip).saturating_add(self.index);
        all.skip(first).step_by(self.count.max(1))
    }
}

/// Loads a stream in batches; PyTorch's `DataLoader` of an `IterableDataset`.
///
/// Each worker makes batches of its own shards, one shard after the other; the loop gets a batch of each worker in turn, until
/// all have come to their ends. So the order is the same in every run. Everything else is as in [`DataLoader`](crate::DataLoader).
pub struct StreamLoader<D: IterableDataset, B = Vec<<D as IterableDataset>::Item>> {
    inner: Arc<Inner<D, B>>,
}

pub(crate) struct Inner<D: IterableDataset, B> {
    pub dataset: Arc<D>,
    pub collate: Collate<D::Item, B>,
    pub settings: Settings,
    pub progress: Mutex<Progress<StreamPosition>>,
    /// Of the group among whose ranks the next pass is divided, if there are others.
    pub failure: Mutex<Option<Failure>>,
}

impl<D: IterableDataset + 'static> StreamLoader<D> {
    /// A loader of `dataset`: at first of batches of one item, read on the calling thread.
    pub fn builder(dataset: D) -> StreamLoaderBuilder<D> {
        StreamLoaderBuilder::new(dataset)
    }
}

impl<D: IterableDataset + 'static, B: Send + 'static> StreamLoader<D, B> {
    /// The next pass; see [`DataLoader::iter`](crate::DataLoader::iter).
    pub fn iter(&self) -> StreamBatches<D, B> {
        StreamBatches::begin(self.inner.clone())
    }

    /// How far the loop of this rank has come in its shards. Other ranks' shards are where they were when the pass began: what is
    /// saved is [all ranks' together](StreamPosition::merged). The position notes whose it is, and [`resume`](Self::resume) refuses it on
    /// another rank.
    ///
    /// ```
    /// use phalanx_data::StreamPosition;
    /// # use phalanx_data::{IterableDataset, Shard, StreamLoader};
    /// # struct Numbers;
    /// # impl IterableDataset for Numbers {
    /// #     type Item = u64;
    /// #     type Stream = Box<dyn Iterator<Item = phalanx::Result<u64>>>;
    /// #     fn stream(&self, shard: &Shard) -> phalanx::Result<Self::Stream> {
    /// #         Ok(Box::new(shard.part_of((0..1000).map(Ok))))
    /// #     }
    /// # }
    /// let group = phalanx::init()?;
    /// let loader = StreamLoader::builder(Numbers).group(&group).shards(16).batch_size(10).build()?;
    /// loader.iter().next();
    /// let position = StreamPosition::merged(&group.all_gather_object(&loader.position())?)?;
    /// // saved; and later, with any number of ranks up to 16:
    /// loader.resume(&position)?;
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    pub fn position(&self) -> StreamPosition {
        let progress = self.inner.progress.lock();
        let mut position = progress.position.clone();
        position.note(progress.shard);
        position
    }

    /// Goes on at `position`, all ranks' together, with the next [`iter`](Self::iter). Rank and world are this loader's. A rank's own
    /// position is enough for the same rank of as many, and that of a world of one for all.
    ///
    /// # Errors
    /// If the position was saved with another number of shards, or is another rank's own, or is one within a pass of a loader with another seed.
    pub fn resume(&self, position: &StreamPosition) -> Result<()> {
        let mut progress = self.inner.progress.lock();
        let wanted = position.for_loader(&progress.position, progress.shard)?;
        (progress.position, progress.begun) = (wanted, false);
        progress.passes += 1;
        Ok(())
    }

    /// The epoch of the last pass that was begun, or of the pass that [`resume`](Self::resume) will continue. Unlike
    /// a [`DataLoader`](crate::DataLoader)'s it does not change at the end of a pass, to which ranks may come at different times.
    pub fn epoch(&self) -> u64 {
        self.inner.progress.lock().position.epoch()
    }

    /// From the next [`iter`](Self::iter) on, the part of this rank of `group`. A pass that has begun continues with the shards that it has; if
    /// the group fails by which they were divided, nobody reads the rest of a lost rank's, and the pass says so in the log.
    ///
    /// # Errors
    /// If there are fewer shards than ranks, or the next `iter` would continue at a position that is another rank's own.
    pub fn set_group(&self, group: &ProcessGroup) -> Result<()> {
        let mut progress = self.inner.progress.lock();
        let shard = (group.rank(), group.world_size());
        builder::enough(progress.position.shards(), shard.1)?;
        if !progress.begun {
            progress.position.suffices(shard)?;
        }
        progress.shard = shard;
        *self.inner.failure.lock() = failure_of(group);
        Ok(())
    }

    /// Checks that all ranks of `group` divide the stream into the same shards, and that each reads its own: as
    /// [`DataLoader::check_ranks`](crate::DataLoader::check_ranks). It compares the number of shards, the epoch, `seed`, and the position at which the
    /// next pass begins: a rank that alone has [resumed](Self::resume) passes over other items. Without
    /// [`shards`](StreamLoaderBuilder::shards) their number depends on `num_workers`.
    ///
    /// # Errors
    /// As [`DataLoader::check_ranks`](crate::DataLoader::check_ranks).
    pub fn check_ranks(&self, group: &ProcessGroup) -> Result<()> {
        let (shards, position, place) = {
            let progress = self.inner.progress.lock();
            (progress.position.shards(), progress.position.describe(), progress.shard)
        };
        let seed = self.inner.settings.seed;
        let stream = format!("{shards} shards, {position}, the loader's seed {seed}");
        group.check_parts("loader", place, &stream)
    }
}

impl<D: IterableDataset + 'static, B: Send + 'static> IntoIterator for &StreamLoader<D, B> {
    type Item = Result<B, LoadError>;
    type IntoIter = StreamBatches<D, B>;

    fn into_iter(self) -> StreamBatches<D, B> {
        self.iter()
    }
}

impl<D: IterableDataset, B> Clone for StreamLoader<D, B> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<D: IterableDataset, B> fmt::Debug for StreamLoader<D, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Settings { batch_size, num_workers, .. } = self.inner.settings;
        write!(f, "StreamLoader(batches of {batch_size}, {num_workers} workers)")
    }
}
