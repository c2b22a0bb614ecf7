//! Pure plans of the collectives: who sends which elements to whom, step by step. No I/O happens here.
//!
//! A plan is what one rank does; the plans of all ranks fit together. The tests check every plan by playing all ranks
//! against each other on paper: each rank's contribution enters each result exactly once. docs/algorithms.md states
//! steps, bytes and source of each algorithm.

mod barrier;
mod choice;
mod doubling;
pub(crate) mod kernel;
mod op;
mod ring;
#[cfg(test)]
mod simulate;
mod tree;

use std::ops::Range;

pub(crate) use barrier::dissemination;
pub(crate) use choice::{all_reduce, broadcast};
pub use op::ReduceOp;
pub(crate) use ring::{all_gather, reduce_scatter};

use crate::rank::{Rank, WorldSize};

/// What one rank does in one collective, in order.
pub(crate) type Plan = Vec<Step>;

/// One step of a plan. Ranges count elements of the collective's buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Sends and receives at the same time. What is sent is the buffer as it was before the step.
    Exchange {
        /// To whom, and what.
        send: Option<(Rank, Range<usize>)>,
        /// From whom, whereto, and how it joins what stands there.
        recv: Option<(Rank, Range<usize>, Combine)>,
    },
    /// The range holds its final combination: divide it, if the operation is an average.
    Finish(Range<usize>),
}

/// How received elements join those in the buffer. Written out for both orders of the operands, so that every rank
/// that computes the same result computes the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Combine {
    /// The received elements replace the local ones.
    Replace,
    /// local := local ∘ received
    Append,
    /// local := received ∘ local
    Prepend,
}

/// The elements of chunk `index` when `elements` are dealt to `world` ranks as evenly as possible.
pub(crate) fn chunk(elements: usize, world: WorldSize, index: usize) -> Range<usize> {
    let (share, extra) = (elements / world.count(), elements % world.count());
    let start = index * share + index.min(extra);
    start..start + share + usize::from(index < extra)
}

/// The rank `distance` places after `rank`, around the ring.
fn after(rank: Rank, distance: usize, world: WorldSize) -> Rank {
    Rank::new(((rank.index() + distance) % world.count()) as u32)
}

/// The rank `distance` places before `rank`, around the ring.
fn before(rank: Rank, distance: usize, world: WorldSize) -> Rank {
    after(rank, world.count() - distance % world.count(), world)
}
