//! Barriers.

use super::{Combine, Plan, Step, after, before};
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// ceil(log2 w) rounds of empty frames: in round k, each rank sends to the rank 2^k places further (D. Hensgen, R.
/// Finkel and U. Manber, "Two algorithms for barrier synchronization", 1988). When a rank leaves, frames from all ranks
/// have reached it, directly or through others.
pub fn dissemination(rank: Rank, world: WorldSize) -> Plan {
    std::iter::successors(Some(1), |distance| Some(distance * 2))
        .take_while(|distance| *distance < world.count())
        .map(|distance| {
            let step = Step::send(after(rank, distance, world), 0..0);
            step.and_recv(before(rank, distance, world), 0..0, Combine::Replace)
        })
        .collect()
}
