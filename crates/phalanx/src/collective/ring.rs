//! Rings: every rank sends to the next and receives from the one before. The bandwidth-optimal choice for large
//! buffers (P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).

use std::ops::Range;

use super::{Combine, Plan, Step, after, before, chunk};
use crate::rank::{Rank, WorldSize};

/// 2(w-1) steps; each rank sends 2n(w-1)/w elements. Each chunk is combined along one path, in one order.
pub(crate) fn all_reduce(rank: Rank, world: WorldSize, elements: usize) -> Plan {
    let part = |index| chunk(elements, world, index);
    let mut plan: Plan = pass(rank, world, 0, Combine::Prepend, part).collect();
    // Rank r now holds the finished chunk r+1.
    plan.push(Step::Finish(part(after(rank, 1, world).index())));
    plan.extend(pass(rank, world, 1, Combine::Replace, part));
    plan
}

/// w-1 steps; each rank sends n(w-1)/w elements of its buffer of n. Chunk r ends, combined, on rank r.
pub(crate) fn reduce_scatter(rank: Rank, world: WorldSize, elements: usize) -> Plan {
    let part = |index| chunk(elements, world, index);
    let mut plan: Plan = pass(rank, world, world.count() - 1, Combine::Prepend, part).collect();
    plan.push(Step::Finish(part(rank.index())));
    plan
}

/// w-1 steps; each rank sends n(w-1)/w elements. Chunk r starts on rank r and ends everywhere.
pub(crate) fn all_gather(rank: Rank, world: WorldSize, elements: usize) -> Plan {
    pass(rank, world, 0, Combine::Replace, |index| chunk(elements, world, index)).collect()
}

/// Passes chunks around the ring, w-1 times; the first that rank r sends is chunk r+shift, the last that it receives
/// is chunk r+shift+1.
fn pass(
    rank: Rank,
    world: WorldSize,
    shift: usize,
    combine: Combine,
    part: impl Fn(usize) -> Range<usize>,
) -> impl Iterator<Item = Step> {
    let (next, previous) = (after(rank, 1, world), before(rank, 1, world));
    let first = after(rank, shift, world);
    let behind = move |distance| part(before(first, distance, world).index());
    (0..world.count() - 1).map(move |step| Step::Exchange {
        send: Some((next, behind(step))),
        recv: Some((previous, behind(step + 1), combine)),
    })
}
