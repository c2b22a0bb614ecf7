//! Ranks, and the numbers that order a group's operations.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The number of a process in its group: `0..world_size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Rank(u32);

impl Rank {
    /// Rank 0, which hosts the store. Only this rank writes logs and checkpoints.
    pub const MAIN: Self = Self(0);

    /// A rank that has not been checked against a world; see [`WorldSize::rank`](crate::world_size::WorldSize::rank).
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

    /// The number in the first group of this rank of a group, whose ranks have the numbers `members` there. None: it is the first group.
    #[doc(hidden)]
    pub fn global(self, members: Option<&[Self]>) -> Self {
        members.and_then(|members| members.get(self.index())).copied().unwrap_or(self)
    }

    /// Whether this is rank 0.
    pub const fn is_main(self) -> bool {
        self.0 == 0
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of an operation within its group. All ranks give the same number to the same collective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Sequence(pub u64);

impl Sequence {
    /// The number of the operation that starts now.
    pub fn advance(&mut self) -> Self {
        let current = *self;
        self.0 += 1;
        current
    }
}

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// How often the job's workers were started again before this group was made. Every frame carries it, so that messages
/// of a rank of an earlier generation are rejected. Not an epoch of training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Generation(pub u64);

impl Generation {
    /// The part of it that is in every frame. The handshake compares all of it.
    pub(crate) fn on_the_wire(self) -> u32 {
        self.0 as u32
    }
}
