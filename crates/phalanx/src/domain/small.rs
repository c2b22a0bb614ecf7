//! Collectives of few bytes: everybody writes what it brings into its slot and reads everybody's. One wait is all.

use std::ops::Range;

use phalanx_sys::board::{Board, SMALL, Watch, Words};

use super::Job;
use super::word::Word;
use crate::error::{Error, Result};
use crate::group::Memory;
use crate::wire::frame::Operation;

/// Up to this many bytes no other way is faster, whatever the memory.
pub(super) const ALWAYS: usize = 512;
/// Every rank reads what all ranks bring: with more ranks it pays for fewer bytes.
const ALTOGETHER: usize = 2 * SMALL;

/// What of a rank's memory of `length` bytes goes this way, if it is ordinary memory; none if it is too much.
pub(super) fn part(job: Job, length: usize) -> Option<Range<usize>> {
    let most = (ALTOGETHER / job.ranks).min(SMALL);
    (job.bytes() <= most).then(|| brought(job, length))
}

/// What of its memory of `length` bytes a rank brings, where the call goes this way.
pub(super) fn brought(job: Job, length: usize) -> Range<usize> {
    match job.call.operation {
        Operation::Broadcast if job.me != job.root => 0..0,
        Operation::AllGather => job.chunk(job.me),
        _ => 0..length,
    }
}

pub(super) fn run(
    board: &mut Board,
    job: Job,
    memory: Memory<'_>,
    word: Word,
    watch: Watch<'_, Error>,
    check: impl Fn(usize, Word) -> Result<()>,
) -> Result<()> {
    let own = match &memory {
        Memory::InPlace(data) => &data[brought(job, data.len())],
        Memory::Apart { input, .. } | Memory::Shared { input, .. } => input,
    };
    let words = board.small(word, own, watch)?;
    (0..job.ranks).try_for_each(|index| check(index, words.call(index)))?;
    let output = match memory {
        Memory::InPlace(data) => data,
        Memory::Apart { output, .. } | Memory::Shared { output, .. } => output,
    };
    finish(job, &words, output)
}

pub(super) fn finish(job: Job, words: &Words<'_>, output: &mut [u8]) -> Result<()> {
    let bytes = |index: usize, expected: usize| match words.bytes(index) {
        bytes if bytes.len() == expected => Ok(bytes),
        _ => Err(Error::protocol("a rank of this host brings another length than its call says")),
    };
    match job.call.operation {
        Operation::AllReduce | Operation::AllReduceCoalesced => {
            let length = output.len();
            with_all(job.ranks, |index| bytes(index, length), |sources| job.fold().apply_to(sources, output))
        }
        Operation::ReduceScatter => {
            let own = job.chunk(job.me);
            let output = if output.len() == own.len() { output } else { &mut output[own.clone()] };
            let part = |index| Ok(&bytes(index, job.bytes())?[own.clone()]);
            with_all(job.ranks, part, |sources| job.fold().apply_to(sources, output))
        }
        Operation::Broadcast => {
            if job.me != job.root {
                output.copy_from_slice(bytes(job.root, output.len())?);
            }
            Ok(())
        }
        Operation::AllGather => (0..job.ranks).try_for_each(|index| {
            let chunk = job.chunk(index);
            output[chunk.clone()].copy_from_slice(bytes(index, chunk.len())?);
            Ok(())
        }),
        _ => Ok(()),
    }
}

/// Calls `f` with the bytes of all ranks, without memory from the heap where they are few.
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
