//! Broadcasts: a binomial tree for few bytes, scatter and ring for many.

use super::{Combine, Plan, Step, after, before, chunk, ring};
use crate::rank::{Rank, WorldSize};

/// ceil(log2 w) rounds of n elements: in round k, the ranks that have the data send it 2^k places on.
pub(crate) fn binomial(rank: Rank, world: WorldSize, root: Rank, elements: usize) -> Plan {
    let place = before(rank, root.index(), world).index();
    let mut plan = Plan::new();
    let mut reach = 1;
    while reach < world.count() {
        if place < reach && place + reach < world.count() {
            let to = after(rank, reach, world);
            plan.push(Step::send(to, 0..elements));
        } else if (reach..2 * reach).contains(&place) {
            let from = before(rank, reach, world);
            plan.push(Step::recv(from, 0..elements, Combine::Replace));
        }
        reach *= 2;
    }
    plan
}

/// The root deals one chunk to each rank, then the chunks go round the ring: 2(w-1) steps, 2n(w-1)/w elements from the
/// root, n(w-1)/w from every other rank (M. Barnett et al., "Interprocessor collective communication library", 1994).
pub(crate) fn scatter_ring(rank: Rank, world: WorldSize, root: Rank, elements: usize) -> Plan {
    let mut plan = Plan::new();
    if rank == root {
        for distance in 1..world.count() {
            let to = after(root, distance, world);
            plan.push(Step::send(to, chunk(elements, world, to.index())));
        }
    } else {
        let own = chunk(elements, world, rank.index());
        plan.push(Step::recv(root, own, Combine::Replace));
    }
    plan.extend(ring::all_gather(rank, world, elements));
    plan
}
