//! Collectives in place of which each rank has a part of its own length.

use std::ops::Range;

use phalanx_sys::board::{Meeting, Way};

use super::{Domain, Job, LINE, compare, direct, staged, watch, word};
use crate::collective::Shares;
use crate::deadline::Patience;
use crate::error::{Error, Result};
use crate::rank::Sequence;
use crate::wire::frame::{Call, Operation};

impl Domain {
    /// A `reduce_scatter_v`, or an `all_gather_v` in place.
    ///
    /// Where memory is direct, the parts are the ranks', but not the work: each rank combines, or copies, an equal share
    /// of the whole, so that nobody waits for whoever has the largest part.
    pub(super) fn parts(
        &mut self,
        (call, sequence): (Call, Sequence),
        data: &mut [u8],
        shares: &Shares,
        patience: &Patience,
    ) -> Result<()> {
        self.agree_on_parts(call, sequence, shares, patience)?;
        let (bytes, size) = (data.len(), call.dtype.size());
        let part = |place: usize| {
            let share = shares.of(place);
            share.start * size..share.end * size
        };
        let gathers = call.operation == Operation::AllGatherVInPlace;
        self.on_shares((call, sequence), data, patience, |meeting, job| match meeting.way() {
            Way::Direct => {
                let own = Self::share(bytes, job.ranks, job.me);
                direct_parts(
                    meeting,
                    job,
                    |place| within(&own, &part(place)),
                    |slices, place| {
                        if gathers {
                            direct::spread(slices, place);
                            return Ok(());
                        }
                        direct::reduce(job, slices, place)
                    },
                )
            }
            _ if gathers => staged::collect(meeting, job, part),
            _ => staged::reduce(meeting, job, job.fold(), part),
        })
    }

    /// Ranks with other counts would take each other's elements for their own.
    fn agree_on_parts(
        &mut self,
        call: Call,
        sequence: Sequence,
        shares: &Shares,
        patience: &Patience,
    ) -> Result<()> {
        let (members, rank, health, word) = (&*self.members, self.rank, &*self.health, word::encode(&call));
        let counts = shares.fingerprint().to_le_bytes();
        let words =
            self.board.small(word, &counts, &mut |missing| watch(health, members[missing], patience))?;
        (0..members.len()).try_for_each(|index| {
            compare(rank, call, sequence, members[index], &word, words.call(index))?;
            if words.bytes(index) == counts {
                return Ok(());
            }
            let peer = members[index];
            let cause = format!("in {call} {sequence} ranks {rank} and {peer} have different counts");
            Err(Error::mismatch(cause)
                .with_remedy("give every rank the same count for each rank")
                .with_peer(peer))
        })
    }
}

/// Calls `work` for each rank with what everybody's memory holds of its part, as far as this rank's share goes.
fn direct_parts(
    meeting: &mut Meeting<'_, '_, Error>,
    job: Job,
    part: impl Fn(usize) -> Range<usize>,
    mut work: impl FnMut(&mut [&mut [u8]], usize) -> Result<()>,
) -> Result<()> {
    meeting.combine(job.ranks, LINE, |shares| {
        (0..job.ranks).try_for_each(|place| {
            let part = part(place);
            if part.is_empty() {
                return Ok(());
            }
            let mut slices: Vec<&mut [u8]> =
                shares.iter_mut().map(|share| &mut share[part.clone()]).collect();
            work(&mut slices, place)
        })
    })
}

/// What of `part` is in `share`, counted from where that begins.
fn within(share: &Range<usize>, part: &Range<usize>) -> Range<usize> {
    let clamp = |at: usize| at.clamp(share.start, share.end) - share.start;
    clamp(part.start)..clamp(part.end)
}
