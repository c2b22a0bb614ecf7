//! Rooted collectives with little data, in which a rank that only sends goes on before the others have come (MPI's eager protocol).

use phalanx_sys::control_block::{ControlBlock, Needs, POSTED};

use super::routes::Routes;
use super::small::ALTOGETHER;
use super::{DomainCall, InPlace, Job, small};
use crate::error::Result;
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

// Both apart from the other protocols, whose code stays as short as it is without them.

/// A broadcast or a reduce.
#[inline(never)]
pub(super) fn in_place(
    control_block: &mut ControlBlock,
    call: &DomainCall<'_>,
    (job, kind): (Job<'_>, InPlace),
    needs: Needs,
    data: &mut [u8],
) -> Result<()> {
    let mut watch = |missing, difference| call.watch(missing, difference);
    let own = small::own(job, data.len());
    let posted = control_block.post(call.posted(), &data[own], needs, &mut watch)?;
    small::in_place(job, kind, &posted.slots(&mut watch)?, data)
}

/// A scatter or a gather. `brought` is what others need of the input.
#[inline(never)]
pub(super) fn out_of_place(
    control_block: &mut ControlBlock,
    call: &DomainCall<'_>,
    routes: &Routes<'_>,
    needs: Needs,
    (input, brought, output): (&[u8], &[u8], &mut [u8]),
) -> Result<()> {
    let mut watch = |missing, difference| call.watch(missing, difference);
    let posted = control_block.post(call.posted(), brought, needs, &mut watch)?;
    routes.keep(input, output);
    let slots = posted.slots(&mut watch)?;
    routes.copy(|from| slots.bytes(from), output)
}
