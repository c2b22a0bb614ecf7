//! The order of a pass's items, where a sampler or a slice of a loader gives it.

use std::ops::Range;
use std::sync::Arc;

use phalanx::sampler::ElasticSampler;
use phalanx::{Rank, WorldSize};

use crate::worker::mix;
use crate::{Sampler, Sampling};

/// An item of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub index: usize,
    /// How often the item has come before in the pass.
    pub repeat: u32,
}

/// A source of an order.
#[derive(Clone)]
pub(crate) enum Own {
    Sampler(Arc<dyn Sampler>),
    Slice(Arc<Slice>),
}

impl Own {
    /// The indices of the pass `epoch`.
    pub fn indices(&self, epoch: u64) -> Vec<usize> {
        match self {
            Self::Sampler(sampler) => sampler.order(epoch),
            Self::Slice(slice) => slice.indices(epoch),
        }
    }

    /// By what a position knows the order of these indices again. 0, which stands for any, for a slice, which is one rank's own.
    pub fn digest(&self, indices: &[usize]) -> u64 {
        match self {
            Self::Sampler(_) => indices.iter().fold(1, |digest, index| mix(&[digest, *index as u64])).max(1),
            Self::Slice(_) => 0,
        }
    }

    pub fn order(&self, epoch: u64) -> Order {
        match self {
            Self::Sampler(sampler) => Order::new(sampler.order(epoch)),
            Self::Slice(slice) => slice.order(epoch),
        }
    }
}

/// The items of a pass.
pub(crate) struct Order {
    indices: Vec<usize>,
    /// For each place, how often its item comes before it; empty if no item comes twice.
    repeats: Vec<u32>,
}

impl Order {
    fn new(indices: Vec<usize>) -> Self {
        let mut items = indices.clone();
        items.sort_unstable();
        items.dedup();
        if items.len() == indices.len() {
            return Self { indices, repeats: Vec::new() };
        }
        let mut times = vec![0_u32; items.len()];
        let repeat = |index: &usize| {
            // It is one of them.
            let item = items.binary_search(index).unwrap_or_default();
            let before = times[item];
            times[item] = before.saturating_add(1);
            before
        };
        let repeats = indices.iter().map(repeat).collect();
        Self { indices, repeats }
    }

    /// The items at these places. Repeats are still counted in the whole order.
    fn at(&self, places: &[usize]) -> Self {
        let indices = places.iter().map(|place| self.indices[*place]).collect();
        let repeats = match self.repeats.is_empty() {
            true => Vec::new(),
            false => places.iter().map(|place| self.repeats[*place]).collect(),
        };
        Self { indices, repeats }
    }

    pub fn indices(&self) -> &[usize] {
        &self.indices
    }

    pub fn entry(&self, place: usize) -> Entry {
        Entry { index: self.indices[place], repeat: self.repeats.get(place).copied().unwrap_or(0) }
    }
}

/// A part of the items that a rank gets from another loader.
pub(crate) struct Slice {
    pub of: Sampling,
    /// Of that loader.
    pub batch_size: usize,
    pub places: Range<usize>,
}

impl Slice {
    fn indices(&self, epoch: u64) -> Vec<usize> {
        match self.of.own.as_ref().map(|own| own.indices(epoch)) {
            Some(all) => self.places(all.len(), epoch).into_iter().map(|place| all[place]).collect(),
            None => self.places(self.of.places.samples(), epoch),
        }
    }

    fn order(&self, epoch: u64) -> Order {
        match self.of.own.as_ref().map(|own| own.order(epoch)) {
            Some(all) => all.at(&self.places(all.indices.len(), epoch)),
            None => Order { indices: self.places(self.of.places.samples(), epoch), repeats: Vec::new() },
        }
    }

    /// Which of the other loader's `samples` places they are.
    fn places(&self, samples: usize, epoch: u64) -> Vec<usize> {
        let shard = self.of.shard.unwrap_or((Rank::MAIN, WorldSize::ONE));
        let mut all = of_rank(&self.of.places, samples, self.batch_size, shard, epoch);
        all.truncate(self.places.end);
        all.drain(..self.places.start.min(all.len()));
        all
    }
}

/// What a rank gets of `samples` places in the pass `epoch`, in batches of `batch_size`.
pub(super) fn of_rank(
    places: &ElasticSampler,
    samples: usize,
    batch_size: usize,
    (rank, world): (Rank, WorldSize),
    epoch: u64,
) -> Vec<usize> {
    let mut whole = places.with_samples(samples);
    whole.set_epoch(epoch);
    // All steps as one. A longer one would not be full, and `Tail::Drop` leaves that out.
    let all = whole.steps_left(batch_size, world).saturating_mul(batch_size);
    match all {
        0 => Vec::new(),
        all => whole.next_batch(all, rank, world).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_counts_how_often_each_item_has_come() {
        let entries = |order: &Order| -> Vec<(usize, u32)> {
            (0..order.indices().len())
                .map(|place| order.entry(place))
                .map(|one| (one.index, one.repeat))
                .collect()
        };
        let order = Order::new(vec![7, 2, 7, usize::MAX, 7, 2]);
        assert_eq!(entries(&order), [(7, 0), (2, 0), (7, 1), (usize::MAX, 0), (7, 2), (2, 1)]);
        assert_eq!(entries(&order.at(&[4, 1, 5])), [(7, 2), (2, 0), (2, 1)]);
        let once = Order::new(vec![3, 1, 2]);
        assert!(once.repeats.is_empty() && once.at(&[2, 0]).repeats.is_empty());
        assert_eq!(entries(&once.at(&[2, 0])), [(2, 0), (3, 0)]);
    }
}
