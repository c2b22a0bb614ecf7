//! Recursive doubling: the whole buffer, exchanged with partners at distance 1, 2, 4, … The fewest steps, for small
//! buffers (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH",
//! 2005, which also folds worlds that are not a power of two).

use super::{Combine, Parts, Plan, Step};
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// floor(log2 w) steps of n elements, and two more if w is not a power of two.
///
/// Operands are in the order of the ranks, so every rank computes the same bits.
pub fn all_reduce(rank: Rank, world: WorldSize, elements: usize) -> Plan {
    let Fold { mut plan, place, rounds, last, folded } = match fold(rank, world, elements) {
        Ok(fold) => fold,
        Err(aside) => return aside,
    };
    for bit in 0..rounds {
        let other = place ^ (1 << bit);
        let peer = folded.rank_at(other);
        let combine = if other < place { Combine::Prepend } else { Combine::Append };
        let parts = Parts::new(folded.held(place, bit), folded.held(other, bit), world);
        plan.push(Step::send(peer, 0..elements).and_recv(peer, 0..elements, combine).joining(parts));
    }
    plan.extend(last);
    plan
}

/// A rank's part in the rounds of a world that has been folded to a power of two.
pub struct Fold {
    /// The steps before the rounds.
    pub plan: Plan,
    /// This rank's index among the ranks that take part.
    pub place: u32,
    pub rounds: u32,
    /// The step after the rounds.
    pub last: Option<Step>,
    pub folded: Folded,
}

/// The number of pairs by which a world was folded. Indices below it represent two ranks each.
#[derive(Clone, Copy)]
pub struct Folded(u32);

/// Folds `world` to a power of two. The first ranks form pairs. In each pair one rank hands its part over, does not
/// take part in the rounds, and receives the result. For that rank this returns its whole plan as the error.
pub fn fold(rank: Rank, world: WorldSize, elements: usize) -> Result<Fold, Plan> {
    let all = 0..elements;
    let members = 1 << world.get().ilog2();
    let folded = world.get() - members;
    let partner = Rank::new(rank.get() ^ 1);
    let paired = rank.get() < 2 * folded;
    if paired && rank.get() % 2 == 1 {
        return Err(vec![Step::send(partner, all.clone()), Step::recv(partner, all, Combine::Replace)]);
    }
    let (mut plan, mut last) = (Plan::new(), None);
    if paired {
        let step = Step::recv(partner, all.clone(), Combine::Append);
        plan.push(step.joining(Parts::new(1, 1, world)));
        last = Some(Step::send(partner, all));
    }
    let place = if paired { rank.get() / 2 } else { rank.get() - folded };
    Ok(Fold { plan, place, rounds: members.ilog2(), last, folded: Folded(folded) })
}

impl Folded {
    /// The rank at index `place`.
    pub fn rank_at(self, place: u32) -> Rank {
        Rank::new(if place < self.0 { 2 * place } else { place + self.0 })
    }

    /// The number of ranks whose parts `place` holds after `bit` rounds: those of its 2^bit neighbours.
    pub fn held(self, place: u32, bit: u32) -> usize {
        let start = place >> bit << bit;
        let pairs = self.0.saturating_sub(start).min(1 << bit);
        ((1 << bit) + pairs) as usize
    }
}
