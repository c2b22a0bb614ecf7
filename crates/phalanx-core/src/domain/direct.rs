//! Collectives on registered memory: each rank does its share of the work on all ranks' memory, for all ranks. No byte
//! is copied unnecessarily, and there are only two waits.
//!
//! Each rank has one large, sparse arena, which its peers map once; `ProcessGroup::alloc` gives a part of it. A rank
//! announces the part's offset with its call, so that nothing is exchanged or mapped for it.

use phalanx_sys::control_block::SharedOperation;

use super::{Block, InPlace, Job, short};
use crate::collective::kernel::Fold;
use crate::error::{Error, Result};

pub(super) fn in_place(
    operation: &mut SharedOperation<'_, '_, Error>,
    job: Job<'_>,
    kind: InPlace,
) -> Result<()> {
    match kind {
        InPlace::AllReduce => operation.combine(|chunks| job.fold().apply(chunks)),
        // The others' memory gets the result too, which does no harm: it belongs to the call.
        InPlace::ReduceScatter => operation.combine(|chunks| job.fold().apply(chunks)),
        InPlace::Reduce => operation.combine(|chunks| reduce(job.fold(), chunks, job.root)),
        InPlace::Broadcast => {
            operation.combine(|chunks| spread(chunks, job.root));
            Ok(())
        }
        InPlace::AllGather => {
            operation.combine(|chunks| spread(chunks, job.me));
            Ok(())
        }
        InPlace::Barrier => Ok(()),
    }
}

/// Copies the chunk of one to all others.
pub(super) fn spread(chunks: &mut [&mut [u8]], from: usize) {
    let (before, rest) = chunks.split_at_mut(from);
    let Some((source, after)) = rest.split_first_mut() else { return };
    before.iter_mut().chain(after).for_each(|chunk| chunk.copy_from_slice(source));
}

/// Combines the chunks into one of them, and leaves the others as they are.
pub(super) fn reduce(fold: Fold, chunks: &mut [&mut [u8]], into: usize) -> Result<()> {
    let mut block = Block::default();
    let length = chunks[into].len();
    for start in (0..length).step_by(block.0.len()) {
        let part = start..length.min(start + block.0.len());
        let result = &mut block.0[..part.len()];
        let sources: Vec<_> = chunks.iter().map(|chunk| &chunk[part.clone()]).collect();
        fold.apply_to(&sources, result)?;
        chunks[into][part].copy_from_slice(result);
    }
    Ok(())
}

/// Combines this rank's chunk of all inputs.
pub(super) fn reduce_out_of_place(
    operation: &mut SharedOperation<'_, '_, Error>,
    job: Job<'_>,
    output: &mut [u8],
) -> Result<()> {
    operation.read(|inputs| {
        let chunks = inputs.iter().map(|input| input.get(job.chunk(job.me)).ok_or_else(short));
        job.fold().apply_to(&chunks.collect::<Result<Vec<_>>>()?, output)
    })
}
