//! Pure plans of the collectives: which rank sends which elements to which, step by step. There is no I/O here.
//!
//! A plan is what one rank does; the plans of all ranks fit together. The tests check every plan by simulating all
//! ranks: each rank's contribution must enter each result exactly once. docs/algorithms.md states steps, bytes and
//! source of each algorithm.
//!
//! A plan is data, computed by a pure function of rank, world and elements. A transport only has to implement
//! `exchange`. So algorithms and transports do not depend on each other.

// A forgotten operation must not compile.
#![deny(clippy::wildcard_enum_match_arm)]

mod barrier;
mod bruck;
mod choice;
mod counts;
mod doubling;
mod halving;
mod hierarchy;
pub mod kernel;
mod memory;
mod op;
mod pairwise;
mod ring;
#[cfg(test)]
mod simulate;
mod tree;

use std::ops::Range;

pub use barrier::dissemination;
pub use bruck::all_gather_v as all_gather_in_rounds;
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub use choice::fuzz as fuzz_tuning;
pub use choice::{Choice, all_reduce, broadcast, goes_by_tree, goes_in_rounds, reduce, reduces_whole};
pub use choice::{Tuning, TuningRow};
pub use counts::Counts;
pub use hierarchy::{Hierarchy, Leaders};
pub use memory::Memory;
pub use op::ReduceOp;
pub use pairwise::{all_to_all, gather, scatter};
pub use ring::{all_gather_v, reduce_scatter, reduce_scatter_v};
pub use tree::{gather as gather_tree, scatter as scatter_tree};

use crate::rank::Rank;
use crate::world_size::WorldSize;

/// What one rank does in one collective, in order.
pub type Plan = Vec<Step>;

/// One step of a plan: a message out and a message in, at the same time. Ranges count elements of the collective's
/// buffer. The elements sent are those before the step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// The message out; None if this rank only receives.
    pub send: Option<Send>,
    /// The message in; None if this rank only sends.
    pub recv: Option<Recv>,
}

/// A message to a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Send {
    /// The receiver.
    pub to: Rank,
    /// The elements that are sent.
    pub range: Range<usize>,
}

/// A message from a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recv {
    /// The sender.
    pub from: Rank,
    /// The elements of the buffer that the received ones replace, or are combined with.
    pub range: Range<usize>,
    /// How they are combined.
    pub combine: Combine,
    /// How many ranks' parts are combined, if they are.
    pub parts: Parts,
}

/// How many ranks' parts the combined elements hold. When all parts are in, an average is divided at once, while
/// the elements are in the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// The number of ranks whose parts the elements in the buffer hold.
    pub local: u32,
    /// The number of ranks whose parts the received elements hold.
    pub received: u32,
    /// The number of all parts.
    pub of: u32,
}

impl Parts {
    /// The parts on both sides, of those of all ranks in `world`.
    pub fn new(local: usize, received: usize, world: WorldSize) -> Self {
        Self { local: local as u32, received: received as u32, of: world.get() }
    }

    /// The number of ranks, if this step completes the result.
    pub fn divisor(self) -> Option<u32> {
        (self.of > 0 && self.local + self.received == self.of).then_some(self.of)
    }
}

/// How received elements are combined with those in the buffer. There is a variant for each order of the operands, so
/// that all ranks that compute the same result compute the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Combine {
    /// The received elements replace the local ones.
    Replace,
    /// local := local ∘ received
    Append,
    /// local := received ∘ local
    Prepend,
}

impl Step {
    fn send(to: Rank, range: Range<usize>) -> Self {
        Self { send: Some(Send { to, range }), recv: None }
    }

    fn recv(from: Rank, range: Range<usize>, combine: Combine) -> Self {
        Self::default().and_recv(from, range, combine)
    }

    fn and_recv(mut self, from: Rank, range: Range<usize>, combine: Combine) -> Self {
        self.recv = Some(Recv { from, range, combine, parts: Parts::default() });
        self
    }

    /// Sets which parts the step combines.
    fn joining(mut self, parts: Parts) -> Self {
        if let Some(recv) = &mut self.recv {
            recv.parts = parts;
        }
        self
    }
}

/// The elements of chunk `index` when `elements` are divided among `world` ranks as evenly as possible.
pub fn chunk(elements: usize, world: WorldSize, index: usize) -> Range<usize> {
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
