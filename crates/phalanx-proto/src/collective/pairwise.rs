//! Plans of gather, scatter and all-to-all: each message goes from one rank to one other. Sent elements are in the
//! input, and received ones in the output, which do not overlap.

use super::{Combine, Counts, Plan, Step, after, before};
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// Every rank sends its input to the root: one step, or w-1 at the root, n elements each.
pub fn gather(rank: Rank, world: WorldSize, root: Rank, count: usize) -> Plan {
    if rank != root {
        return vec![Step::send(root, 0..count)];
    }
    let counts = Counts::even(count, world);
    let others = (1..world.count()).map(|distance| after(root, distance, world));
    others.map(|from| Step::recv(from, counts.of(from.index()), Combine::Replace)).collect()
}

/// The root sends each rank its elements: one step, or w-1 at the root, n elements each.
pub fn scatter(rank: Rank, world: WorldSize, root: Rank, count: usize) -> Plan {
    if rank != root {
        return vec![Step::recv(root, 0..count, Combine::Replace)];
    }
    let counts = Counts::even(count, world);
    let others = (1..world.count()).map(|distance| after(root, distance, world));
    others.map(|to| Step::send(to, counts.of(to.index()))).collect()
}

/// Pairwise exchange: in step k each rank sends to the rank k places after it and receives from the rank k places
/// before it. w-1 steps; each rank sends what is not its own (R. Thakur, R. Rabenseifner and W. Gropp, 2005).
///
/// Blocks of at most `eager` elements are all sent before anything is received: on a network with a long delay a rank waits once, and not once
/// for each other rank. They must be so small that a rank that sends them never waits for the receiver. Each pair exchanges one block each way,
/// so the ranks' plans fit together whatever the others' blocks are.
pub fn all_to_all(rank: Rank, world: WorldSize, sent: &Counts, received: &Counts, eager: usize) -> Plan {
    let distances = || 1..world.count();
    let send = |distance: usize| {
        let to = after(rank, distance, world);
        (to, sent.of(to.index()))
    };
    let early = |distance: &usize| send(*distance).1.len() <= eager;
    let first = distances().filter(early).map(|distance| {
        let (to, range) = send(distance);
        Step::send(to, range)
    });
    let rest = distances().map(|distance| {
        let step = if early(&distance) {
            Step::default()
        } else {
            let (to, range) = send(distance);
            Step::send(to, range)
        };
        let from = before(rank, distance, world);
        step.and_recv(from, received.of(from.index()), Combine::Replace)
    });
    first.chain(rest).collect()
}
