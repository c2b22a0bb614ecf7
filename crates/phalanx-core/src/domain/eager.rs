//! Rooted collectives with little data, in which a rank that only sends goes on before the others have come (MPI's eager protocol).

use phalanx_sys::control_block::{Needs, POSTED};

use super::Job;
use super::small::ALTOGETHER;
use crate::wire::frame::Operation;

/// Whose data this rank waits for. None if the call is not eager, on any rank.
pub(super) fn needs(job: Job<'_>) -> Option<Needs> {
    let is_root = job.me == job.root;
    let from_root = if is_root { Needs::Nobody } else { Needs::Member(job.root) };
    let to_root = if is_root { Needs::All } else { Needs::Nobody };
    let (bytes, needs) = match job.call.operation {
        Operation::Broadcast => (job.bytes(), from_root),
        Operation::Scatter => (job.bytes().saturating_mul(job.ranks), from_root),
        Operation::Gather => (job.bytes(), to_root),
        // Among many ranks each combines a part.
        Operation::Reduce if job.bytes().saturating_mul(job.ranks) > ALTOGETHER => return None,
        Operation::Reduce => (job.bytes(), to_root),
        Operation::AllReduce
        | Operation::AllReduceCoalesced
        | Operation::AllGather
        | Operation::AllGatherV
        | Operation::AllGatherVInPlace
        | Operation::AllToAll
        | Operation::AllToAllV
        | Operation::ReduceScatter
        | Operation::ReduceScatterV
        | Operation::Barrier
        | Operation::MonitoredBarrier
        | Operation::PointToPoint => return None,
    };
    (bytes <= POSTED).then_some(needs)
}
