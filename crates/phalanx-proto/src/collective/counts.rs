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
        Self { displacements: (0..=world.count()).map(|rank| rank * count).collect() }
    }

    /// The elements of rank `index`.
    pub fn of(&self, index: usize) -> Range<usize> {
        self.displacements[index]..self.displacements[index + 1]
    }

    /// All elements.
    pub fn total(&self) -> usize {
        self.displacements[self.displacements.len() - 1]
    }
}
