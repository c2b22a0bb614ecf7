//! Collectives with little data: every rank writes its input into its slot and reads all slots. One wait is enough.

use std::ops::Range;

use phalanx_sys::control_block::{SMALL, Slots};
use phalanx_sys::copy::copy;

use super::{InPlace, Job, short};
use crate::error::Result;
use crate::wire::frame::Operation;

/// Up to this many bytes no other protocol is faster, whatever the memory.
pub(super) const ALWAYS: usize = 512;
/// The most bytes that a rank reads, if another protocol would spare it some of them.
pub(super) const ALTOGETHER: usize = 2 * SMALL;

/// The most bytes of an `all_reduce` of two ranks. Above, each of them combines one half, which takes one more wait.
const PAIR: usize = 4 << 10;

/// By what it is decided whether an operation uses this protocol.
struct Sizes {
    written: Written,
    /// What a rank reads here, if another protocol would spare it some of that.
    read: Amount,
    /// What may have up to [`ALWAYS`] bytes. None if this protocol is never the only one considered.
    always: Option<Amount>,
    /// The most bytes between two ranks.
    between_two: usize,
}

/// What a rank writes into its slot.
enum Written {
    All,
    /// The root all of its memory, the others nothing.
    ByRoot,
    /// Its own chunk of what is gathered in place.
    Chunk,
}

/// Bytes of a call.
#[derive(Clone, Copy)]
enum Amount {
    Nothing,
    /// As the call counts them.
    Once,
    ForEachRank,
}

impl Sizes {
    const USUAL: Self = Self {
        written: Written::All,
        read: Amount::ForEachRank,
        always: Some(Amount::Once),
        between_two: usize::MAX,
    };

    fn of(operation: Operation) -> Self {
        match operation {
            Operation::AllReduce | Operation::AllReduceCoalesced => Self { between_two: PAIR, ..Self::USUAL },
            Operation::Broadcast => Self { written: Written::ByRoot, ..Self::USUAL },
            Operation::AllGather => Self { written: Written::Chunk, ..Self::USUAL },
            Operation::AllToAll => Self { read: Amount::Once, ..Self::USUAL },
            Operation::AllGatherV => Self { read: Amount::Once, always: None, ..Self::USUAL },
            Operation::AllToAllV => Self { read: Amount::Nothing, always: None, ..Self::USUAL },
            Operation::Gather => Self { read: Amount::Nothing, ..Self::USUAL },
            Operation::Scatter => {
                Self { read: Amount::Nothing, always: Some(Amount::ForEachRank), ..Self::USUAL }
            }
            Operation::Reduce
            | Operation::ReduceScatter
            | Operation::ReduceScatterV
            | Operation::AllGatherVInPlace
            | Operation::Barrier
            | Operation::MonitoredBarrier
            | Operation::PointToPoint => Self::USUAL,
        }
    }

    /// Whether the call is so small that no other protocol is considered.
    fn is_always(&self, job: Job<'_>) -> bool {
        self.always.is_some_and(|amount| amount.bytes(job) <= ALWAYS)
    }
}

impl Amount {
    fn bytes(self, job: Job<'_>) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Once => job.bytes(),
            Self::ForEachRank => job.bytes().saturating_mul(job.ranks),
        }
    }
}

/// The part of a rank's memory of `length` bytes that this protocol sends, if it is unregistered memory. None if it is too
/// large, with a note of `note` bytes.
pub(super) fn part(job: Job<'_>, length: usize, note: usize) -> Option<Range<usize>> {
    let sizes = Sizes::of(job.call.operation);
    if job.ranks == 2 && length > sizes.between_two {
        return None;
    }
    let own = own(job, length);
    let fits = sizes.read.bytes(job) <= ALTOGETHER && own.len() <= SMALL - note;
    (sizes.is_always(job) || fits).then_some(own)
}

/// The part of a rank's memory of `length` bytes that others need.
pub(super) fn own(job: Job<'_>, length: usize) -> Range<usize> {
    match Sizes::of(job.call.operation).written {
        Written::ByRoot if job.me != job.root => 0..0,
        // All of it, if only that was given.
        Written::Chunk if length > job.bytes() => job.chunk(job.me),
        Written::All | Written::ByRoot | Written::Chunk => 0..length,
    }
}

/// Whether the call is so small that no other protocol is considered.
pub(super) fn always(job: Job<'_>) -> bool {
    Sizes::of(job.call.operation).is_always(job)
}

pub(super) fn in_place(job: Job<'_>, kind: InPlace, slots: &Slots<'_>, data: &mut [u8]) -> Result<()> {
    let length = data.len();
    match kind {
        InPlace::AllReduce => fold(job, slots, 0..length, length, data),
        InPlace::Reduce if job.me == job.root => fold(job, slots, 0..length, length, data),
        InPlace::ReduceScatter => {
            let own = job.chunk(job.me);
            fold(job, slots, own.clone(), length, &mut data[own])
        }
        InPlace::Broadcast if job.me != job.root => {
            copy(whole(slots, job.root, length)?, data);
            Ok(())
        }
        InPlace::AllGather => job.others().try_for_each(|index| {
            let chunk = job.chunk(index);
            copy(whole(slots, index, chunk.len())?, &mut data[chunk]);
            Ok(())
        }),
        // Without data; or this rank keeps its own.
        InPlace::Barrier | InPlace::Reduce | InPlace::Broadcast => Ok(()),
    }
}

/// Combines a part of all inputs, which are `length` bytes each.
pub(super) fn fold(
    job: Job<'_>,
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
    for (index, bytes_of_rank) in few[..ranks].iter_mut().enumerate() {
        *bytes_of_rank = bytes(index)?;
    }
    f(&few[..ranks])
}
