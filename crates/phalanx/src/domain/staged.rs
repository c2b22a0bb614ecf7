//! Collectives on memory that others do not reach: it passes in windows through buffers that they do.
//!
//! While the others work on one window the next is copied. All ranks stage and take the same number of windows, whether
//! they have something in them or not. Two buffers a stream are enough: whoever fills the one again has itself taken what
//! stood beside it, and waits only for those who have not taken what stood in it.

use std::ops::Range;

use phalanx_sys::board::{Meeting, Stream, WINDOW, share};

use super::routes::Routes;
use super::{Block, Job, LINE};
use crate::collective::kernel::Fold;
use crate::error::{Error, Result};
use crate::wire::frame::Operation;

/// What a rank copies or combines between two waits: enough to be worth them, and little enough that the next rank finds
/// it in a cache.
const PIECE: usize = 64 << 10;
/// With more ranks, a result for one of them is made by all.
const FEW: usize = 3;

type Staging<'a, 'w> = Meeting<'a, 'w, Error>;

pub(super) fn in_place(meeting: &mut Staging<'_, '_>, job: Job) -> Result<()> {
    match job.call.operation {
        Operation::AllReduce | Operation::AllReduceCoalesced => combine(meeting, job, true),
        // The root alone combines as fast as few ranks do together, and is spared the others' results.
        Operation::Reduce if job.ranks <= FEW => {
            let share = |place| if place == job.root { 0..job.bytes() } else { 0..0 };
            reduce(meeting, job, job.fold(), share)
        }
        Operation::Reduce => combine(meeting, job, job.me == job.root),
        Operation::ReduceScatter => reduce(meeting, job, job.fold(), |place| job.chunk(place)),
        Operation::AllGather => collect(meeting, job, |place| job.chunk(place)),
        Operation::Broadcast => {
            collect(meeting, job, |place| if place == job.root { 0..job.bytes() } else { 0..0 })
        }
        _ => Ok(()),
    }
}

/// Combines everybody's memory, each rank its share of it, in place.
pub(super) fn reduce(
    meeting: &mut Staging<'_, '_>,
    job: Job,
    fold: Fold,
    share: impl Fn(usize) -> Range<usize>,
) -> Result<()> {
    let deal = Deal::new(job.ranks, share);
    let mut block = Block::default();
    deal.inputs(meeting, job.me, |windows, memory, number| {
        let own = deal.piece(job.me, number);
        let sources = deal.sources(job.me, own.len(), windows);
        for start in (0..own.len()).step_by(block.0.len()) {
            let part = start..own.len().min(start + block.0.len());
            let place = own.start + part.start..own.start + part.end;
            let result = &mut block.0[..part.len()];
            let mut sources: Vec<_> = sources.iter().map(|source| &source[part.clone()]).collect();
            sources[job.me] = &memory[place.clone()];
            fold.apply_to(&sources, result)?;
            memory[place].copy_from_slice(result);
        }
        Ok(())
    })
}

/// Copies each rank's share of its memory to all others.
pub(super) fn collect(
    meeting: &mut Staging<'_, '_>,
    job: Job,
    share: impl Fn(usize) -> Range<usize>,
) -> Result<()> {
    let longest = (0..job.ranks).map(|place| share(place).len()).max().unwrap_or(0);
    let deal = Deal::of_blocks((job.ranks, 1), longest, |_| share(job.me));
    deal.copy(meeting, job.me, &share, |memory, place, bytes| memory[place].copy_from_slice(bytes))
}

/// Combines this rank's chunk of everybody's input.
pub(super) fn reduce_apart(
    meeting: &mut Staging<'_, '_>,
    job: Job,
    input: &[u8],
    output: &mut [u8],
) -> Result<()> {
    let deal = Deal::new(job.ranks, move |place| job.chunk(place));
    let start = job.chunk(job.me).start;
    deal.inputs(meeting, job.me, |windows, _, number| {
        let own = deal.piece(job.me, number);
        let result = &mut output[own.start - start..own.end - start];
        let mut sources = deal.sources(job.me, own.len(), windows);
        sources[job.me] = &input[own];
        job.fold().apply_to(&sources, result)
    })
}

/// Copies each rank's blocks to whom they are for.
pub(super) fn copy(
    meeting: &mut Staging<'_, '_>,
    job: Job,
    routes: &Routes<'_>,
    input: &[u8],
    output: &mut [u8],
) -> Result<()> {
    output[routes.place(job.me)].copy_from_slice(&input[routes.given(job.me)]);
    let deal = Deal::of_blocks((job.ranks, routes.blocks()), routes.longest(), |to| routes.given(to));
    let place = |from| routes.place(from);
    deal.copy(meeting, job.me, place, |_, place, bytes| output[place].copy_from_slice(bytes))
}

/// Each rank combines its share: it takes the others' parts of it from their windows, and stages the result. The results
/// are taken one window late, so that nobody waits for them, and kept where they are `wanted`.
fn combine(meeting: &mut Staging<'_, '_>, job: Job, wanted: bool) -> Result<()> {
    let me = job.me;
    let deal = Deal::new(job.ranks, move |place| share(job.bytes(), LINE, job.ranks, place));
    let take = |meeting: &mut Staging<'_, '_>, number| {
        meeting.take(Stream::Results, |windows, memory| {
            for (place, window) in windows.iter().enumerate().filter(|(place, _)| wanted && *place != me) {
                let piece = deal.piece(place, number);
                let length = piece.len();
                memory[piece].copy_from_slice(&window[..length]);
            }
            Ok(())
        })
    };
    deal.stage(meeting, me, 0)?;
    for number in 0..deal.count {
        if number + 1 < deal.count {
            deal.stage(meeting, me, number + 1)?;
        }
        meeting.pass_on(Stream::Inputs, Stream::Results, |windows, memory, result| {
            let own = deal.piece(me, number);
            let result = &mut result[..own.len()];
            let mut sources = deal.sources(me, own.len(), windows);
            sources[me] = &memory[own.clone()];
            job.fold().apply_to(&sources, result)?;
            if wanted {
                memory[own].copy_from_slice(result);
            }
            Ok(())
        })?;
        if number > 0 {
            take(meeting, number - 1)?;
        }
    }
    take(meeting, deal.count - 1)
}

/// What a rank's input holds for each, dealt out block by block and window by window.
struct Deal<F> {
    /// What of the input is for a rank.
    given: F,
    ranks: usize,
    /// Different blocks in a window: one for each rank, or one for all.
    blocks: usize,
    /// Bytes of a block in each window.
    bytes: usize,
    /// Windows of the whole.
    count: usize,
}

impl<F: Fn(usize) -> Range<usize>> Deal<F> {
    /// A buffer of which each rank has its share.
    fn new(ranks: usize, share: F) -> Self {
        let longest = (0..ranks).map(|place| share(place).len()).max().unwrap_or(0);
        Self::of_blocks((ranks, ranks), longest, share)
    }

    /// The longest block must be as long on every rank, so that all have the same number of windows.
    fn of_blocks((ranks, blocks): (usize, usize), longest: usize, given: F) -> Self {
        let bytes = (WINDOW / blocks).min(PIECE) / LINE * LINE;
        Self { given, ranks, blocks, bytes, count: longest.div_ceil(bytes).max(1) }
    }

    /// What of the block for `place` is in window `number`.
    fn piece(&self, place: usize, number: usize) -> Range<usize> {
        self.cut((self.given)(place), number)
    }

    fn cut(&self, block: Range<usize>, number: usize) -> Range<usize> {
        let at = |number: usize| (block.start + number * self.bytes).min(block.end);
        at(number)..at(number + 1)
    }

    /// Where a window holds what is for `place`.
    fn start(&self, place: usize) -> usize {
        place % self.blocks * self.bytes
    }

    /// Stages what this rank's input holds for the others.
    fn stage(&self, meeting: &mut Staging<'_, '_>, me: usize, number: usize) -> Result<()> {
        meeting.stage(Stream::Inputs, |memory, window| {
            let others = (0..self.ranks).filter(|place| *place != me);
            let pieces = others.map(|place| (place, self.piece(place, number)));
            for (place, piece) in pieces.filter(|(_, piece)| !piece.is_empty()).take(self.blocks) {
                window[self.start(place)..][..piece.len()].copy_from_slice(&memory[piece]);
            }
            Ok(())
        })
    }

    /// Stages all, and calls `work` with everybody's windows, this rank's memory and the window's number.
    fn inputs(
        &self,
        meeting: &mut Staging<'_, '_>,
        me: usize,
        mut work: impl FnMut(&[&[u8]], &mut [u8], usize) -> Result<()>,
    ) -> Result<()> {
        self.stage(meeting, me, 0)?;
        for number in 0..self.count {
            if number + 1 < self.count {
                self.stage(meeting, me, number + 1)?;
            }
            meeting.take(Stream::Inputs, |windows, memory| work(windows, memory, number))?;
        }
        Ok(())
    }

    /// Stages all, and calls `put` with each piece that is for this rank, and where it belongs: `place` says where the
    /// whole block of a rank does.
    fn copy(
        &self,
        meeting: &mut Staging<'_, '_>,
        me: usize,
        place: impl Fn(usize) -> Range<usize>,
        mut put: impl FnMut(&mut [u8], Range<usize>, &[u8]),
    ) -> Result<()> {
        self.inputs(meeting, me, |windows, memory, number| {
            for (from, window) in windows.iter().enumerate().filter(|(from, _)| *from != me) {
                let place = self.cut(place(from), number);
                let bytes = &window[self.start(me)..][..place.len()];
                put(memory, place, bytes);
            }
            Ok(())
        })
    }

    /// What the others' windows hold for `me`; its own part is not staged, and must take its place.
    fn sources<'a>(&self, me: usize, length: usize, windows: &[&'a [u8]]) -> Vec<&'a [u8]> {
        windows.iter().map(|window| &window[self.start(me)..][..length]).collect()
    }
}
