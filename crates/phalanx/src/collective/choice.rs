//! Which algorithm for which size. The choice depends only on what is the same on every rank.

use super::{Plan, doubling, ring, tree};
use crate::dtype::DType;
use crate::rank::{Rank, WorldSize};

/// Up to this many bytes latency decides, and recursive doubling has the fewest steps.
const DOUBLING_MAX: usize = 64 * 1024;
/// From this many bytes on, a broadcast to four ranks or more is worth dealing out in chunks.
const SCATTER_MIN: usize = 512 * 1024;

/// An all-reduce of `elements` in place.
pub(crate) fn all_reduce(rank: Rank, world: WorldSize, dtype: DType, elements: usize) -> Plan {
    if elements * dtype.size() <= DOUBLING_MAX {
        doubling::all_reduce(rank, world, elements)
    } else {
        ring::all_reduce(rank, world, elements)
    }
}

/// A broadcast of `elements` from `root`.
pub(crate) fn broadcast(rank: Rank, world: WorldSize, root: Rank, dtype: DType, elements: usize) -> Plan {
    if world.get() >= 4 && elements * dtype.size() >= SCATTER_MIN {
        tree::scatter_ring(rank, world, root, elements)
    } else {
        tree::binomial(rank, world, root, elements)
    }
}
