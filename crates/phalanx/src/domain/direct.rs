//! Collectives on registered memory: each rank does its share of the work on everybody's memory, for all. No byte is
//! copied that need not be, and two waits are all.

use phalanx_sys::board::Meeting;

use super::{Job, LINE};
use crate::error::{Error, Result};
use crate::wire::frame::Operation;

pub(super) fn in_place(meeting: &mut Meeting<'_, '_, Error>, job: Job) -> Result<()> {
    let element = job.call.dtype.size();
    match job.call.operation {
        Operation::AllReduce | Operation::AllReduceCoalesced => {
            meeting.combine(job.ranks, LINE, |shares| job.fold().apply(shares))
        }
        // The shares are the chunks. That the others' memory gets the result too does no harm: it is the call's.
        Operation::ReduceScatter => meeting.combine(job.ranks, element, |shares| job.fold().apply(shares)),
        Operation::Broadcast => {
            meeting.combine(job.ranks, LINE, |shares| spread(shares, job.root));
            Ok(())
        }
        Operation::AllGather => {
            meeting.combine(job.ranks, element, |shares| spread(shares, job.me));
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Copies the share of one to all others.
pub(super) fn spread(shares: &mut [&mut [u8]], from: usize) {
    let (before, rest) = shares.split_at_mut(from);
    let Some((source, after)) = rest.split_first_mut() else { return };
    before.iter_mut().chain(after).for_each(|share| share.copy_from_slice(source));
}

pub(super) fn apart(meeting: &mut Meeting<'_, '_, Error>, job: Job, output: &mut [u8]) -> Result<()> {
    let short = || Error::protocol("a rank of this host brings another length than its call says");
    meeting.read(|inputs| match job.call.operation {
        Operation::AllGather => inputs.iter().enumerate().try_for_each(|(index, input)| {
            let place = &mut output[job.chunk(index)];
            place.copy_from_slice(input.get(..place.len()).ok_or_else(short)?);
            Ok(())
        }),
        Operation::ReduceScatter => {
            let chunks = inputs.iter().map(|input| input.get(job.chunk(job.me)).ok_or_else(short));
            job.fold().apply_to(&chunks.collect::<Result<Vec<_>>>()?, output)
        }
        _ => Ok(()),
    })
}
