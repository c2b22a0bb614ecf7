//! How a buffer is divided among the ranks.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::rank::WorldSize;

/// Each rank's elements in a buffer, one rank's behind the other's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shares {
    /// Where each rank's elements begin, and where the last one's end.
    bounds: Vec<usize>,
}

impl Shares {
    /// `counts` elements, by rank.
    ///
    /// # Errors
    /// If they are not one for each rank, or more than memory can hold.
    pub(crate) fn new(counts: &[usize], world: WorldSize) -> Result<Self> {
        if counts.len() != world.count() {
            return Err(Error::invalid_argument(format!(
                "there are {} counts for {world} ranks: each rank has one",
                counts.len()
            )));
        }
        let mut bounds = vec![0];
        let mut end = 0usize;
        for count in counts {
            end = end
                .checked_add(*count)
                .filter(|end| *end <= isize::MAX as usize)
                .ok_or_else(|| Error::invalid_argument("the counts add up to more than memory can hold"))?;
            bounds.push(end);
        }
        Ok(Self { bounds })
    }

    /// `share` elements for each rank, of a buffer that is there.
    pub(crate) fn even(share: usize, world: WorldSize) -> Self {
        Self { bounds: (0..=world.count()).map(|rank| rank * share).collect() }
    }

    /// The elements of rank `index`.
    pub(crate) fn of(&self, index: usize) -> Range<usize> {
        self.bounds[index]..self.bounds[index + 1]
    }

    /// Differs, but for a freak of chance, where the shares do (FNV-1a).
    pub(crate) fn fingerprint(&self) -> u64 {
        let bytes = self.bounds.iter().flat_map(|bound| (*bound as u64).to_le_bytes());
        bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
    }

    /// All elements.
    pub(crate) fn total(&self) -> usize {
        self.bounds[self.bounds.len() - 1]
    }
}
