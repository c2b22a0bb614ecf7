//! Recursive doubling: the whole buffer, exchanged with partners at distance 1, 2, 4, … The fewest steps, for small
//! buffers (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH",
//! 2005, which also folds worlds that are no power of two).

use super::{Combine, Parts, Plan, Step};
use crate::rank::{Rank, WorldSize};

/// ceil(log2 w) steps of n elements, and two more if w is no power of two.
///
/// Operands stand in the order of the ranks, so that every rank computes the same bits.
pub(crate) fn all_reduce(rank: Rank, world: WorldSize, elements: usize) -> Plan {
    let all = 0..elements;
    let members = 1 << world.get().ilog2();
    let folded = world.get() - members;
    let mut plan = Plan::new();

    // The first 2·folded ranks pair up; the odd one of each pair hands its part over and waits for the result.
    let paired = rank.get() < 2 * folded;
    let partner = Rank::new(rank.get() ^ 1);
    let sits_out = paired && rank.get() % 2 == 1;
    if sits_out {
        return vec![Step::send(partner, all.clone()), Step::recv(partner, all, Combine::Replace)];
    }
    if paired {
        let step = Step::recv(partner, all.clone(), Combine::Append);
        plan.push(step.joining(Parts::new(1, 1, world)));
    }
    let place = if paired { rank.get() / 2 } else { rank.get() - folded };
    let rounds = members.ilog2();
    for bit in 0..rounds {
        let other = place ^ (1 << bit);
        let peer = Rank::new(if other < folded { 2 * other } else { other + folded });
        let combine = if other < place { Combine::Prepend } else { Combine::Append };
        let parts = Parts::new(held(place, bit, folded), held(other, bit, folded), world);
        plan.push(Step::send(peer, all.clone()).and_recv(peer, all.clone(), combine).joining(parts));
    }
    if paired {
        plan.push(Step::send(partner, all));
    }
    plan
}

/// The ranks whose parts `place` holds after `bit` rounds: those of its 2^bit neighbours, of which the first `folded` stand
/// for two ranks each.
fn held(place: u32, bit: u32, folded: u32) -> usize {
    let start = place >> bit << bit;
    let pairs = folded.saturating_sub(start).min(1 << bit);
    ((1 << bit) + pairs) as usize
}
