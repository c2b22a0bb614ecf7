//! An all-gather in rounds: every rank passes on all that it has, twice as much each time. The fewest steps, for small blocks
//! (J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal and D. Weathersby, "Efficient algorithms for all-to-all communications in
//! multiport message-passing systems", 1997).

use super::{Combine, Counts, Plan, Step, after, before};
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// ceil(log2 w) steps; each rank sends all but one rank's elements. The buffer ends with this rank's own; the others' precede it in the order
/// of the ring, [rotated](Counts::rotated). So what a rank has is always at the end.
///
/// In the first step the neighbours exchange as in a ring: ranks that would choose a ring for what they call find that they differ.
pub fn all_gather_v(rank: Rank, world: WorldSize, counts: &Counts) -> Plan {
    let places = counts.rotated(after(rank, 1, world).index());
    let all = world.count();
    std::iter::successors(Some(1), |reach| Some(reach * 2))
        .take_while(|reach| *reach < all)
        .map(|reach| {
            // What the sender has at the end of its buffer comes before what this rank has.
            let blocks = reach.min(all - reach);
            let step = Step::send(after(rank, reach, world), places.of_all(all - blocks..all));
            let from = before(rank, reach, world);
            step.and_recv(from, places.of_all(all - reach - blocks..all - reach), Combine::Replace)
        })
        .collect()
}
