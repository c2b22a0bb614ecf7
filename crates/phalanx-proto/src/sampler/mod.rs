//! Which samples a rank trains on, and in which order: those of torch's `DistributedSampler`, and step by step for worlds that change.

mod elastic;
mod permutation;

pub use self::elastic::{ElasticSampler, Tail};
pub use self::permutation::{check_order, random_permutation};
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// A rank's share of the places of an order: r, r + R, r + 2R, .. for rank r of R, equally many for each rank.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    /// How many places there are.
    pub samples: usize,
    /// The rank.
    pub rank: Rank,
    /// The number of ranks.
    pub world_size: WorldSize,
    /// Whether the last places are left out if they do not divide evenly. Otherwise places from the front are repeated, several times if
    /// there are fewer places than ranks.
    pub drop_last: bool,
}

impl Share {
    /// How many places each rank gets.
    pub fn places_per_rank(&self) -> usize {
        let ranks = self.world_size.count();
        if self.drop_last { self.samples / ranks } else { self.samples.div_ceil(ranks) }
    }

    /// This rank's places.
    pub fn places(&self) -> impl Iterator<Item = usize> + use<> {
        let (first, ranks, samples) = (self.rank.index(), self.world_size.count(), self.samples.max(1));
        (0..self.places_per_rank()).map(move |step| (first + step * ranks) % samples)
    }
}
