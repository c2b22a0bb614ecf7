//! Collectives in place with a count for each rank: `reduce_scatter_v`, and `all_gather_v` in place; and the parts of a host's ranks in an
//! all-gather between hosts.

use std::ops::Range;

use phalanx_sys::control_block::{Protocol, SharedOperation};

use super::{Domain, Job, copied, direct, staged};
use crate::collective::kernel::Fold;
use crate::collective::{Counts, ReduceOp};
use crate::deadline::Timeout;
use crate::error::{Error, Result};
use crate::rank::Sequence;
use crate::wire::frame::{Call, Operation};

impl Domain {
    /// A `reduce_scatter_v`, or an `all_gather_v` in place.
    ///
    /// With the direct protocol the work is divided equally, whatever the counts are: each rank combines, or copies, an
    /// equal chunk of the whole, so that no rank waits for the one with the largest count.
    pub(super) fn in_place_v(
        &mut self,
        (call, sequence): (Call, Sequence),
        data: &mut [u8],
        counts: &Counts,
        timeout: &Timeout,
    ) -> Result<()> {
        let size = call.dtype.size();
        let part = |index: usize| {
            let range = counts.of(index);
            range.start * size..range.end * size
        };
        let op =
            (call.operation == Operation::ReduceScatterV).then_some(call.reduce.unwrap_or(ReduceOp::Sum));
        let fold = op.map(|op| Fold::of_all(call.dtype, op, self.peers.members.len() as u32));
        self.on_parts((call, sequence), data, part, fold, timeout)
    }

    /// The same on a `part` of `data` for each member, which gets it combined by `fold`; without it, each member's part goes to all. All
    /// members have the same parts: they compare their calls, which have a digest of the counts.
    pub(crate) fn on_parts(
        &mut self,
        (call, sequence): (Call, Sequence),
        data: &mut [u8],
        part: impl Fn(usize) -> Range<usize>,
        fold: Option<Fold>,
        timeout: &Timeout,
    ) -> Result<()> {
        let bytes = data.len();
        let members = self.control_block.members();
        let longest = (0..members).map(|index| part(index).len()).max().unwrap_or(0);
        let divided = (members, fold.is_none() && copied::is_sooner_for(longest));
        self.on_data((call, sequence), data, divided, timeout, |operation, job| {
            match operation.protocol() {
                Protocol::Direct => {
                    let own = Self::chunk(bytes, job.ranks, job.me);
                    direct_parts(
                        operation,
                        job,
                        |index| within(&own, &part(index)),
                        |slices, index| match fold {
                            Some(fold) => direct::reduce(fold, slices, index),
                            None => {
                                direct::spread(slices, index);
                                Ok(())
                            }
                        },
                    )
                }
                // Only what is gathered is offered.
                Protocol::Copied => copied::collect(operation, job, &part),
                Protocol::Small | Protocol::Staged => match fold {
                    Some(fold) => staged::reduce(operation, job, fold, &part),
                    None => staged::collect(operation, job, &part),
                },
            }
        })
    }
}

/// Calls `work` for each rank with its part of every rank's memory, within this rank's chunk.
fn direct_parts(
    operation: &mut SharedOperation<'_, '_, Error>,
    job: Job<'_>,
    part: impl Fn(usize) -> Range<usize>,
    mut work: impl FnMut(&mut [&mut [u8]], usize) -> Result<()>,
) -> Result<()> {
    operation.combine(|chunks| {
        (0..job.ranks).try_for_each(|index| {
            let part = part(index);
            if part.is_empty() {
                return Ok(());
            }
            let mut slices: Vec<&mut [u8]> =
                chunks.iter_mut().map(|chunk| &mut chunk[part.clone()]).collect();
            work(&mut slices, index)
        })
    })
}

/// The part of `part` that is in `chunk`, counted from the start of `chunk`.
fn within(chunk: &Range<usize>, part: &Range<usize>) -> Range<usize> {
    let clamp = |at: usize| at.clamp(chunk.start, chunk.end) - chunk.start;
    clamp(part.start)..clamp(part.end)
}
