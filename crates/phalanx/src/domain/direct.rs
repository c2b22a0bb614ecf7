//! Collectives on registered memory: each rank does its share of the work on everybody's memory, for all. No byte is
//! copied that need not be, and two waits are all.

use phalanx_sys::board::Meeting;

use super::{Block, Job, LINE, short};
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
        Operation::Reduce => meeting.combine(job.ranks, LINE, |shares| reduce(job, shares, job.root)),
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

/// Combines the shares into that of one of them, and leaves the others as they are.
pub(super) fn reduce(job: Job, shares: &mut [&mut [u8]], into: usize) -> Result<()> {
    let mut block = Block::default();
    let length = shares[into].len();
    for start in (0..length).step_by(block.0.len()) {
        let part = start..length.min(start + block.0.len());
        let result = &mut block.0[..part.len()];
        let sources: Vec<_> = shares.iter().map(|share| &share[part.clone()]).collect();
        job.fold().apply_to(&sources, result)?;
        shares[into][part].copy_from_slice(result);
    }
    Ok(())
}

/// Combines this rank's chunk of everybody's input.
pub(super) fn reduce_apart(meeting: &mut Meeting<'_, '_, Error>, job: Job, output: &mut [u8]) -> Result<()> {
    meeting.read(|inputs| {
        let chunks = inputs.iter().map(|input| input.get(job.chunk(job.me)).ok_or_else(short));
        job.fold().apply_to(&chunks.collect::<Result<Vec<_>>>()?, output)
    })
}
