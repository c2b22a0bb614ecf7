//! In which order items are loaded, and by which rank.

use std::fmt;
use std::sync::Arc;

use phalanx::sampler::{DistributedSampler, ElasticSampler, Tail};
use phalanx::{Rank, WorldSize};

use crate::loader::order::Own;

/// An order of one's own. The [loader](crate::DataLoader) distributes it: with `w` ranks, rank r loads its places r, r + w,
/// r + 2w, ... So a position in it is one for any number of ranks.
///
/// ```
/// use phalanx_data::{DataLoader, InMemory, Sampler};
///
/// /// Every epoch begins with the easy items and has one item in ten more.
/// struct Curriculum;
///
/// impl Sampler for Curriculum {
///     fn order(&self, epoch: u64) -> Vec<usize> {
///         (0..100.min(10 * (epoch as usize + 1))).collect()
///     }
/// }
///
/// let loader = DataLoader::builder((0..100).collect::<InMemory<u32>>()).sampler(Curriculum).batch_size(10).build()?;
/// assert_eq!(loader.iter().count(), 1);
/// assert_eq!(loader.iter().count(), 2);
/// # Ok::<(), phalanx::Error>(())
/// ```
pub trait Sampler: Send + Sync {
    /// The indices of all ranks' items in the pass `epoch`, in order. An item may come several times, each time with another
    /// [`item_seed`](crate::WorkerInfo::item_seed), or not at all. It must be the same on every rank and on every call: what is random in it is seeded
    /// by the epoch. [`check_ranks`](crate::DataLoader::check_ranks) compares the ranks' orders.
    fn order(&self, epoch: u64) -> Vec<usize>;
}

/// A [`Sampler`] of a function of the epoch.
pub fn from_fn<F: Fn(u64) -> Vec<usize> + Send + Sync + 'static>(order: F) -> impl Sampler + 'static {
    struct Function<F>(F);
    impl<F: Fn(u64) -> Vec<usize> + Send + Sync> Sampler for Function<F> {
        fn order(&self, epoch: u64) -> Vec<usize> {
            (self.0)(epoch)
        }
    }
    Function(order)
}

/// What a loader is to load: made of a [`DistributedSampler`], an [`ElasticSampler`], or a [`Sampler`] of one's own.
#[derive(Clone)]
pub struct Sampling {
    /// Counts places; without an order of one's own, these are shuffled to indices by it.
    pub(crate) places: ElasticSampler,
    pub(crate) own: Option<Own>,
    pub(crate) shard: Option<(Rank, WorldSize)>,
}

impl From<DistributedSampler> for Sampling {
    /// The same indices in the same order; the epoch is the loader's from now on, which begins with the sampler's.
    fn from(sampler: DistributedSampler) -> Self {
        let shard = Some((sampler.rank(), sampler.world_size()));
        Self { places: ElasticSampler::from(&sampler), own: None, shard }
    }
}

impl From<ElasticSampler> for Sampling {
    /// From where it is. Rank and world are the builder's [`group`](crate::DataLoaderBuilder::group).
    fn from(places: ElasticSampler) -> Self {
        Self { places, own: None, shard: None }
    }
}

impl<S: Sampler + 'static> From<S> for Sampling {
    fn from(sampler: S) -> Self {
        // How many places there are is asked in each pass.
        let places = ElasticSampler::new(0).shuffle(false).tail(Tail::Repeat);
        Self { places, own: Some(Own::Sampler(Arc::new(sampler))), shard: None }
    }
}

impl fmt::Debug for Sampling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own = if self.own.is_some() { "an order of its own" } else { "all samples" };
        write!(f, "Sampling({own}, {:?})", self.shard)
    }
}
