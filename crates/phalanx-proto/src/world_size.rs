//! The number of ranks.

use std::fmt;
use std::num::NonZeroU32;

use crate::error::{Error, Result};
use crate::rank::Rank;

/// The largest world a group accepts. Lengths from outside are capped by it before memory is allocated.
pub const MAX_WORLD_SIZE: u32 = 65_536;

/// The number of ranks in a group: at least 1, at most [`MAX_WORLD_SIZE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorldSize(NonZeroU32);

impl WorldSize {
    /// A world of one.
    pub const ONE: Self = Self(NonZeroU32::MIN);

    /// A world of `size` ranks.
    ///
    /// # Errors
    /// If `size` is not between 1 and [`MAX_WORLD_SIZE`].
    pub fn new(size: u32) -> Result<Self> {
        match NonZeroU32::new(size) {
            Some(size) if size.get() <= MAX_WORLD_SIZE => Ok(Self(size)),
            _ => Err(Error::invalid_argument(format!(
                "a world size of {size} is outside 1..={MAX_WORLD_SIZE}"
            ))),
        }
    }

    /// The size as a number.
    pub const fn get(self) -> u32 {
        self.0.get()
    }

    /// The size as a `usize`.
    pub const fn count(self) -> usize {
        self.0.get() as usize
    }

    /// The rank with the number `rank`.
    ///
    /// # Errors
    /// If `rank` is not below the world size.
    pub fn rank(self, rank: u32) -> Result<Rank> {
        if rank < self.get() {
            Ok(Rank::new(rank))
        } else {
            Err(Error::invalid_argument(format!(
                "rank {rank} is outside a world of {self}: ranks run from 0 to {}",
                self.get() - 1
            )))
        }
    }

    /// Every rank, in order.
    pub fn ranks(self) -> impl ExactSizeIterator<Item = Rank> + use<> {
        (0..self.get()).map(Rank::new)
    }
}

impl fmt::Display for WorldSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn world_sizes_and_ranks_are_checked() {
        assert!(WorldSize::new(0).is_err());
        assert!(WorldSize::new(MAX_WORLD_SIZE + 1).is_err());
        let world = WorldSize::new(3).unwrap();
        assert_eq!(world.ranks().map(Rank::get).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(world.rank(2).unwrap(), Rank::new(2));
        assert!(world.rank(3).unwrap_err().to_string().contains("0 to 2"));
    }
}
