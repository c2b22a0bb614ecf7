//! Collectives that only copy ordinary memory, and not little of it: each rank copies its blocks out of the others' processes. So they are copied
//! once, and not into a window and out of it.

use std::ops::Range;

use phalanx_sys::control_block::{SMALL, SharedOperation};

use super::routes::Routes;
use super::{InPlace, Job, short};
use crate::error::{Error, Result};
use crate::wire::frame::Copying;

/// The bytes of a block from which this is sooner. With 64 KiB for two ranks a scatter took 2.7 us so and 6.2 by windows on a Xeon, an all_gather
/// 3.9 and 6.2.
const LEAST: usize = 8 << 10;
/// The most bytes of a result that one rank alone copies: beyond a cache windows are sooner, which another rank fills meanwhile. A broadcast of 512 KiB
/// took 20 us so and 47 by windows, one of 1 MiB 49 and 56, one of 4 MiB 380 and 312.
const ALONE: usize = 1 << 20;

/// The bytes of a rank's input from which blocks are copied so; None if those of this call are not, whatever the ranks' counts are.
pub(super) fn least(job: Job<'_>, copying: Copying, is_uneven: bool) -> Option<usize> {
    let (least, longest) = match copying {
        Copying::Gather if job.bytes().saturating_mul(job.ranks) > ALONE => return None,
        Copying::AllGather | Copying::Gather => (LEAST, job.bytes()),
        Copying::Scatter => (LEAST * job.ranks, job.bytes().saturating_mul(job.ranks)),
        Copying::AllToAll => (LEAST * job.ranks, job.bytes()),
    };
    (is_uneven || longest >= least).then_some(least)
}

/// Whether parts in place, of which the longest has so many bytes, are copied so to all ranks.
pub(super) fn is_sooner_for(longest: usize) -> bool {
    longest >= LEAST
}

/// Whether the memory of a call in place is copied so.
pub(super) fn is_sooner(job: Job<'_>, kind: InPlace) -> bool {
    match kind {
        // What fits into a slot is not offered. It would be staged, but not before the call is published.
        InPlace::Broadcast => (SMALL + 1..=ALONE).contains(&job.bytes()),
        InPlace::AllGather => is_sooner_for(job.bytes()),
        InPlace::AllReduce | InPlace::Reduce | InPlace::ReduceScatter | InPlace::Barrier => false,
    }
}

/// Copies what a call in place gives to this rank.
///
/// # Errors
/// If a rank's memory is too short.
pub(super) fn in_place(
    operation: &mut SharedOperation<'_, '_, Error>,
    job: Job<'_>,
    kind: InPlace,
) -> Result<()> {
    match kind {
        InPlace::Broadcast if job.me != job.root => part(operation, job.root, 0..job.bytes()),
        InPlace::AllGather => collect(operation, job, |from| job.chunk(from)),
        // This rank keeps its own; or nothing is offered.
        InPlace::Broadcast
        | InPlace::AllReduce
        | InPlace::Reduce
        | InPlace::ReduceScatter
        | InPlace::Barrier => Ok(()),
    }
}

/// Copies each other rank's share of its memory to the same place in this rank's.
///
/// # Errors
/// If a rank's memory is too short.
pub(super) fn collect(
    operation: &mut SharedOperation<'_, '_, Error>,
    job: Job<'_>,
    share: impl Fn(usize) -> Range<usize>,
) -> Result<()> {
    job.others().try_for_each(|from| part(operation, from, share(from)))
}

fn part(operation: &mut SharedOperation<'_, '_, Error>, from: usize, part: Range<usize>) -> Result<()> {
    match () {
        () if part.is_empty() => Ok(()),
        () if part.end > operation.length(from) => Err(short()),
        () => operation.copy_in_place(from, part),
    }
}

/// Copies this rank's blocks of the others to their places in `output`.
///
/// # Errors
/// If an input is too short.
pub(super) fn out_of_place(
    operation: &mut SharedOperation<'_, '_, Error>,
    routes: &Routes<'_>,
    output: &mut [u8],
) -> Result<()> {
    routes.take(output, |from, start, into| {
        if start.checked_add(into.len()).is_none_or(|end| end > operation.length(from)) {
            return Err(short());
        }
        operation.copy(from, start, into)
    })
}
