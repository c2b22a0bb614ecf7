//! Rings: every rank sends to the next and receives from the one before. The bandwidth-optimal choice for large
//! buffers (P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).

use std::ops::Range;

use super::{Combine, Counts, Parts, Plan, Step, after, before, chunk};
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// 2(w-1) steps; each rank sends 2n(w-1)/w elements. Each chunk is combined along one path, in one order.
pub fn all_reduce(rank: Rank, world: WorldSize, elements: usize) -> Plan {
    let mut plan = combine(rank, world, 0, elements);
    // Rank r now holds the complete chunk r+1.
    plan.extend(pass(rank, world, 1, Combine::Replace, elements));
    plan
}

/// w-1 steps; each rank sends n(w-1)/w elements of its buffer of n. Chunk r ends, combined, on rank r.
pub fn reduce_scatter(rank: Rank, world: WorldSize, elements: usize) -> Plan {
    combine(rank, world, world.count() - 1, elements)
}

/// As [`reduce_scatter`], with different counts: w-1 steps; each rank sends all but its own elements.
pub fn reduce_scatter_v(rank: Rank, world: WorldSize, counts: &Counts) -> Plan {
    reduce_scatter_parts(rank, world, |index| counts.of(index))
}

/// The same of parts that are anywhere in the buffer, one of each rank.
pub(super) fn reduce_scatter_parts(
    rank: Rank,
    world: WorldSize,
    part: impl Fn(usize) -> Range<usize>,
) -> Plan {
    joining(pass_chunks(rank, world, world.count() - 1, Combine::Prepend, part), world)
}

/// w-1 steps; each rank sends n(w-1)/w elements. Chunk r starts on rank r and ends everywhere.
pub(super) fn all_gather(rank: Rank, world: WorldSize, elements: usize) -> Plan {
    pass(rank, world, 0, Combine::Replace, elements).collect()
}

/// An all-gather with different counts: w-1 steps; each rank sends all but one rank's elements.
pub fn all_gather_v(rank: Rank, world: WorldSize, counts: &Counts) -> Plan {
    all_gather_parts(rank, world, |index| counts.of(index))
}

/// The same of parts that are anywhere in the buffer, one of each rank.
pub(super) fn all_gather_parts(rank: Rank, world: WorldSize, part: impl Fn(usize) -> Range<usize>) -> Plan {
    pass_chunks(rank, world, 0, Combine::Replace, part).collect()
}

/// Combines every chunk on its way around the ring; rank r ends with chunk r+shift+1.
fn combine(rank: Rank, world: WorldSize, shift: usize, elements: usize) -> Plan {
    joining(pass(rank, world, shift, Combine::Prepend, elements), world)
}

/// Each step around the ring adds one more rank's part to a chunk.
fn joining(steps: impl Iterator<Item = Step>, world: WorldSize) -> Plan {
    steps.enumerate().map(|(met, step)| step.joining(Parts::new(1, met + 1, world))).collect()
}

/// Passes chunks around the ring, w-1 times. The first chunk that rank r sends is r+shift, the last that it receives
/// is r+shift+1.
fn pass(
    rank: Rank,
    world: WorldSize,
    shift: usize,
    combine: Combine,
    elements: usize,
) -> impl Iterator<Item = Step> {
    pass_chunks(rank, world, shift, combine, move |index| chunk(elements, world, index))
}

fn pass_chunks(
    rank: Rank,
    world: WorldSize,
    shift: usize,
    combine: Combine,
    chunk: impl Fn(usize) -> Range<usize>,
) -> impl Iterator<Item = Step> {
    let (next, previous) = (after(rank, 1, world), before(rank, 1, world));
    let first = after(rank, shift, world);
    let behind = move |distance| chunk(before(first, distance, world).index());
    (0..world.count() - 1)
        .map(move |step| Step::send(next, behind(step)).and_recv(previous, behind(step + 1), combine))
}
