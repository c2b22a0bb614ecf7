//! How a buffer is divided among the ranks: counts and displacements, as in MPI's vector collectives.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::world_size::WorldSize;

/// How many elements of a buffer each rank has, in the order of the ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Where each rank's elements begin; the last entry is their sum.
    displacements: Vec<usize>,
}

impl Counts {
    /// `counts` elements, by rank.
    ///
    /// # Errors
    /// If there is not one count for each rank, or their sum is more than memory can hold.
    pub fn new(counts: &[usize], world: WorldSize) -> Result<Self> {
        if counts.len() != world.count() {
            return Err(Error::invalid_argument(format!(
                "there are {} counts for {world} ranks: each rank has one",
                counts.len()
            )));
        }
        let mut displacements = vec![0];
        let mut end = 0usize;
        for count in counts {
            end = end
                .checked_add(*count)
                .filter(|end| *end <= isize::MAX as usize)
                .ok_or_else(|| Error::invalid_argument("the counts add up to more than memory can hold"))?;
            displacements.push(end);
        }
        Ok(Self { displacements })
    }

    /// `count` elements for each rank, of an existing buffer.
    pub fn even(count: usize, world: WorldSize) -> Self {
        Self::of_existing(std::iter::repeat_n(count, world.count()))
    }

    /// Counts of an existing buffer, so that they add up.
    pub(super) fn of_existing(counts: impl Iterator<Item = usize>) -> Self {
        let mut displacements = vec![0];
        let mut end = 0;
        for count in counts {
            end += count;
            displacements.push(end);
        }
        Self { displacements }
    }

    /// The elements of rank `index`.
    pub fn of(&self, index: usize) -> Range<usize> {
        self.displacements[index]..self.displacements[index + 1]
    }

    /// How many elements each rank has.
    pub fn lengths(&self) -> impl ExactSizeIterator<Item = usize> {
        self.displacements.windows(2).map(|ends| ends[1] - ends[0])
    }

    /// The elements of these ranks together.
    pub fn of_all(&self, ranks: Range<usize>) -> Range<usize> {
        self.displacements[ranks.start]..self.displacements[ranks.end]
    }

    /// The same counts of a buffer in which `first` comes first, and the ranks before it come last.
    pub fn rotated(&self, first: usize) -> Self {
        let ranks = self.displacements.len() - 1;
        Self::of_existing((first..ranks).chain(0..first).map(|rank| self.of(rank).len()))
    }

    /// All elements.
    pub fn total(&self) -> usize {
        self.displacements[self.displacements.len() - 1]
    }
}
