//! From one root to all, or from all to one: binomial trees for small buffers, chunks and a ring for large ones.

use super::{Combine, Parts, Plan, Step, after, before, chunk, ring};
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// ceil(log2 w) rounds of n elements: in round k, the ranks that have the data send it 2^k places further.
pub fn binomial(rank: Rank, world: WorldSize, root: Rank, elements: usize) -> Plan {
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

/// The root sends one chunk to each rank, then the chunks are all-gathered in a ring: 2(w-1) steps, 2n(w-1)/w elements
/// from the root, n(w-1)/w from every other rank (M. Barnett et al., "Interprocessor collective communication library",
/// 1994).
pub fn scatter_ring(rank: Rank, world: WorldSize, root: Rank, elements: usize) -> Plan {
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

/// ceil(log2 w) rounds of n elements: in round k, the ranks at distance 2^k, 3·2^k, … from the root send what they
/// have combined. The binomial tree of [`binomial`] in reverse.
pub fn reduce(rank: Rank, world: WorldSize, root: Rank, elements: usize) -> Plan {
    let place = before(rank, root.index(), world).index();
    let mut plan = Plan::new();
    let mut reach = 1;
    while reach < world.count() {
        if place & reach != 0 {
            plan.push(Step::send(before(rank, reach, world), 0..elements));
            break;
        }
        if place + reach < world.count() {
            let parts = Parts::new(reach, reach.min(world.count() - place - reach), world);
            let step = Step::recv(after(rank, reach, world), 0..elements, Combine::Append);
            plan.push(step.joining(parts));
        }
        reach *= 2;
    }
    plan
}

/// Every rank combines one chunk on a ring and sends it to the root: 2(w-1) steps at the root, w elsewhere; each sends
/// n elements, the root n(w-1)/w (R. Rabenseifner, 2004).
pub fn reduce_ring(rank: Rank, world: WorldSize, root: Rank, elements: usize) -> Plan {
    let mut plan = ring::reduce_scatter(rank, world, elements);
    if rank == root {
        for distance in 1..world.count() {
            let from = after(root, distance, world);
            plan.push(Step::recv(from, chunk(elements, world, from.index()), Combine::Replace));
        }
    } else {
        plan.push(Step::send(root, chunk(elements, world, rank.index())));
    }
    plan
}

/// A binomial gather: ceil(log2 w) rounds at the root, n(w-1) elements to it. The buffer holds `count` elements for
/// each rank, the root's first and the others' in the order of the ring.
pub fn gather(rank: Rank, world: WorldSize, root: Rank, count: usize) -> Plan {
    let place = before(rank, root.index(), world).index();
    let held = |place: usize, reach: usize| place * count..(place + reach).min(world.count()) * count;
    let mut plan = Plan::new();
    let mut reach = 1;
    while reach < world.count() {
        if place & reach != 0 {
            plan.push(Step::send(before(rank, reach, world), held(place, reach)));
            break;
        }
        if place + reach < world.count() {
            let from = after(rank, reach, world);
            plan.push(Step::recv(from, held(place + reach, reach), Combine::Replace));
        }
        reach *= 2;
    }
    plan
}

/// The reverse of [`gather`]: the root's buffer is scattered.
pub fn scatter(rank: Rank, world: WorldSize, root: Rank, count: usize) -> Plan {
    let turn = |step: Step| match (step.send, step.recv) {
        (Some(send), _) => Step::recv(send.to, send.range, Combine::Replace),
        (None, Some(recv)) => Step::send(recv.from, recv.range),
        (None, None) => Step::default(),
    };
    gather(rank, world, root, count).into_iter().rev().map(turn).collect()
}
