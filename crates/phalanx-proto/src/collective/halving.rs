//! Recursive halving, then recursive doubling: as few bytes as a ring in as few rounds as doubling, for buffers of
//! medium size (R. Rabenseifner, "Optimization of collective reduction operations", 2004; R. Thakur, R. Rabenseifner
//! and W. Gropp, 2005).

use std::ops::Range;

use super::doubling::{Fold, fold};
use super::{Combine, Parts, Plan, Step};
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// 2·floor(log2 w) steps, in which each rank sends 2n(w-1)/w elements; two more steps, and up to 2n, if w is not a
/// power of two. Each element is completed on one rank and then copied.
pub fn all_reduce(rank: Rank, world: WorldSize, elements: usize) -> Plan {
    let Fold { mut plan, place, rounds, last, folded } = match fold(rank, world, elements) {
        Ok(fold) => fold,
        Err(aside) => return aside,
    };
    let mut own = 0..elements;
    let mut given = Vec::new();
    for bit in 0..rounds {
        let other = place ^ (1 << bit);
        let (low, high) = halves(&own);
        let (keep, give) = if place < other { (low, high) } else { (high, low) };
        let combine = if other < place { Combine::Prepend } else { Combine::Append };
        let parts = Parts::new(folded.held(place, bit), folded.held(other, bit), world);
        let peer = folded.rank_at(other);
        plan.push(Step::send(peer, give.clone()).and_recv(peer, keep.clone(), combine).joining(parts));
        given.push((peer, give));
        own = keep;
    }
    // The same exchanges in reverse: what was given away comes back complete.
    for (peer, give) in given.into_iter().rev() {
        let both = own.start.min(give.start)..own.end.max(give.end);
        plan.push(Step::send(peer, own).and_recv(peer, give, Combine::Replace));
        own = both;
    }
    plan.extend(last);
    plan
}

fn halves(range: &Range<usize>) -> (Range<usize>, Range<usize>) {
    let middle = range.start + range.len() / 2;
    (range.start..middle, middle..range.end)
}
