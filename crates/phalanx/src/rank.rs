//! Who is who: ranks, world sizes, and the numbers that order a group's work.

use std::fmt;
use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

/// The largest world a group accepts. A length from outside is capped by it before memory is taken.
pub const MAX_WORLD_SIZE: u32 = 65_536;

/// A world size, or a rank, that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OutOfRange {
    /// No world has this size.
    #[error("a world size of {0} is outside 1..={MAX_WORLD_SIZE}")]
    WorldSize(u32),
    /// This world has no such rank.
    #[error("rank {rank} is outside a world of {world}: ranks run from 0 to {}", .world.get() - 1)]
    Rank {
        /// The rank.
        rank: u32,
        /// The world that it is not in.
        world: WorldSize,
    },
}

/// The place of a process in its group: `0..world_size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Rank(u32);

impl Rank {
    /// Rank 0, which hosts the store, and alone writes logs and checkpoints.
    pub const MAIN: Self = Self(0);

    /// A rank that has not been checked against a world; see [`WorldSize::rank`].
    pub const fn new(rank: u32) -> Self {
        Self(rank)
    }

    /// The rank as a number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The rank as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Is this rank 0?
    pub const fn is_main(self) -> bool {
        self.0 == 0
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of ranks in a group: at least 1, at most [`MAX_WORLD_SIZE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorldSize(NonZeroU32);

impl WorldSize {
    /// A world of one.
    pub const ONE: Self = Self(NonZeroU32::MIN);

    /// Checks that `size` is between 1 and [`MAX_WORLD_SIZE`].
    pub fn new(size: u32) -> Result<Self, OutOfRange> {
        match NonZeroU32::new(size) {
            Some(size) if size.get() <= MAX_WORLD_SIZE => Ok(Self(size)),
            _ => Err(OutOfRange::WorldSize(size)),
        }
    }

    /// The size as a number.
    pub const fn get(self) -> u32 {
        self.0.get()
    }

    /// The size as a count of things in memory.
    pub const fn count(self) -> usize {
        self.0.get() as usize
    }

    /// Checks that `rank` is below the world size.
    pub fn rank(self, rank: u32) -> Result<Rank, OutOfRange> {
        if rank < self.get() { Ok(Rank(rank)) } else { Err(OutOfRange::Rank { rank, world: self }) }
    }

    /// Every rank, in order.
    pub fn ranks(self) -> impl ExactSizeIterator<Item = Rank> + use<> {
        (0..self.get()).map(Rank)
    }
}

impl fmt::Display for WorldSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of an operation within its group. All ranks give the same number to the same collective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Sequence(pub u64);

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// How often the job's workers were started again before this group was made. Every frame carries it, so that messages of
/// a rank of an earlier generation are rejected. Not an epoch of training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Generation(pub u64);

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
