//! Collectives with little data: every rank writes its input into its slot and reads all slots. One wait is enough.

use std::ops::Range;

use phalanx_sys::control_block::{SMALL, Slots};

use super::{InPlace, Job, short};
use crate::error::Result;
use crate::wire::frame::Operation;

/// Up to this many bytes no other protocol is faster, whatever the memory.
pub(super) const ALWAYS: usize = 512;
/// The most bytes that a rank reads, if another protocol would spare it some of them.
const ALTOGETHER: usize = 2 * SMALL;

/// The most bytes of an `all_reduce` of two ranks. Above, each of them combines one half, which takes one more wait.
const PAIR: usize = 4 << 10;

/// The part of a rank's memory of `length` bytes that this protocol sends, if it is unregistered memory. None if it is too
/// large, with a note of `note` bytes.
pub(super) fn part(job: Job, length: usize, note: usize) -> Option<Range<usize>> {
    let own = match job.call.operation {
        Operation::Broadcast if job.me != job.root => 0..0,
        Operation::AllGather if length > job.bytes() => job.chunk(job.me),
        Operation::AllReduce
        | Operation::AllReduceCoalesced
        | Operation::Reduce
        | Operation::ReduceScatter
        | Operation::ReduceScatterV
        | Operation::Broadcast
        | Operation::AllGather
        | Operation::AllGatherV
        | Operation::AllGatherVInPlace
        | Operation::Gather
        | Operation::Scatter
        | Operation::AllToAll
        | Operation::AllToAllV
        | Operation::Barrier
        | Operation::MonitoredBarrier
        | Operation::PointToPoint => 0..length,
    };
    let read = match job.call.operation {
        Operation::AllReduce | Operation::AllReduceCoalesced if job.ranks == 2 && length > PAIR => {
            return None;
        }
        Operation::Gather | Operation::Scatter | Operation::AllToAllV => 0,
        Operation::AllGatherV | Operation::AllToAll => job.bytes(),
        Operation::AllReduce
        | Operation::AllReduceCoalesced
        | Operation::Reduce
        | Operation::ReduceScatter
        | Operation::ReduceScatterV
        | Operation::Broadcast
        | Operation::AllGather
        | Operation::AllGatherVInPlace
        | Operation::Barrier
        | Operation::MonitoredBarrier
        | Operation::PointToPoint => job.bytes().saturating_mul(job.ranks),
    };
    (always(job) || read <= ALTOGETHER && own.len() <= SMALL - note).then_some(own)
}

/// Is the call so small that no other protocol is considered?
pub(super) fn always(job: Job) -> bool {
    match job.call.operation {
        Operation::AllGatherV | Operation::AllToAllV => false,
        Operation::Scatter => job.bytes().saturating_mul(job.ranks) <= ALWAYS,
        Operation::AllReduce
        | Operation::AllReduceCoalesced
        | Operation::Reduce
        | Operation::ReduceScatter
        | Operation::ReduceScatterV
        | Operation::Broadcast
        | Operation::AllGather
        | Operation::AllGatherVInPlace
        | Operation::Gather
        | Operation::AllToAll
        | Operation::Barrier
        | Operation::MonitoredBarrier
        | Operation::PointToPoint => job.bytes() <= ALWAYS,
    }
}

pub(super) fn in_place(job: Job, kind: InPlace, slots: &Slots<'_>, data: &mut [u8]) -> Result<()> {
    let length = data.len();
    match kind {
        InPlace::AllReduce => fold(job, slots, 0..length, length, data),
        InPlace::Reduce if job.me == job.root => fold(job, slots, 0..length, length, data),
        InPlace::ReduceScatter => {
            let own = job.chunk(job.me);
            fold(job, slots, own.clone(), length, &mut data[own])
        }
        InPlace::Broadcast if job.me != job.root => {
            data.copy_from_slice(whole(slots, job.root, length)?);
            Ok(())
        }
        InPlace::AllGather => (0..job.ranks).try_for_each(|index| {
            let chunk = job.chunk(index);
            data[chunk.clone()].copy_from_slice(whole(slots, index, chunk.len())?);
            Ok(())
        }),
        // Without data; or this rank keeps its own.
        InPlace::Barrier | InPlace::Reduce | InPlace::Broadcast => Ok(()),
    }
}

/// Combines a part of all inputs, which are `length` bytes each.
pub(super) fn fold(
    job: Job,
    slots: &Slots<'_>,
    part: Range<usize>,
    length: usize,
    output: &mut [u8],
) -> Result<()> {
    let part = |index| Ok(&whole(slots, index, length)?[part.clone()]);
    with_all(job.ranks, part, |sources| job.fold().apply_to(sources, output))
}

fn whole<'a>(slots: &Slots<'a>, index: usize, length: usize) -> Result<&'a [u8]> {
    match slots.bytes(index) {
        bytes if bytes.len() == length => Ok(bytes),
        _ => Err(short()),
    }
}

/// Calls `f` with the data of all ranks. With few ranks it does not allocate.
fn with_all<'a, R>(
    ranks: usize,
    bytes: impl Fn(usize) -> Result<&'a [u8]>,
    f: impl FnOnce(&[&'a [u8]]) -> Result<R>,
) -> Result<R> {
    let mut few: [&[u8]; 8] = [&[]; 8];
    if ranks > few.len() {
        return f(&(0..ranks).map(bytes).collect::<Result<Vec<_>>>()?);
    }
    for (index, place) in few[..ranks].iter_mut().enumerate() {
        *place = bytes(index)?;
    }
    f(&few[..ranks])
}
