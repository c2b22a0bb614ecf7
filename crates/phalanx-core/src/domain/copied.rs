//! Collectives that only copy much ordinary memory: each rank copies its blocks out of the others' processes. So they are copied once, and
//! not into a window and out of it.
//!
//! All ranks copy at a time. Where one rank alone would copy, the windows are as soon: while it copies out of them, the others fill the next.

use phalanx_sys::control_block::SharedOperation;

use super::routes::Routes;
use super::{Job, short};
use crate::error::{Error, Result};
use crate::wire::frame::Copying;

/// The bytes of a block from which this is sooner.
const LEAST: usize = 256 << 10;

/// The bytes of a rank's input from which blocks are copied so; None if those of this call are not, whatever the ranks' counts are.
pub(super) fn least(job: Job<'_>, copying: Copying, is_uneven: bool) -> Option<usize> {
    let (least, longest) = match copying {
        Copying::Gather => return None,
        Copying::AllGather => (LEAST, job.bytes()),
        Copying::Scatter => (LEAST * job.ranks, job.bytes().saturating_mul(job.ranks)),
        Copying::AllToAll => (LEAST * job.ranks, job.bytes()),
    };
    (is_uneven || longest >= least).then_some(least)
}

/// Copies this rank's blocks to their places in `output`.
///
/// # Errors
/// If an input is too short.
pub(super) fn copy(
    operation: &mut SharedOperation<'_, '_, Error>,
    job: Job<'_>,
    routes: &Routes<'_>,
    input: &[u8],
    output: &mut [u8],
) -> Result<()> {
    output[routes.output_range(job.me)].copy_from_slice(&input[routes.given(job.me)]);
    // Each begins with another one.
    for from in (job.me + 1..job.ranks).chain(0..job.me) {
        let (start, into) = (routes.taken(from), &mut output[routes.output_range(from)]);
        if into.is_empty() {
            continue;
        }
        if start.checked_add(into.len()).is_none_or(|end| end > operation.length(from)) {
            return Err(short());
        }
        operation.copy(from, start, into)?;
    }
    Ok(())
}
