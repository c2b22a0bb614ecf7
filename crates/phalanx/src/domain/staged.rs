//! Collectives on memory that others do not reach: it passes in windows through buffers that they do.
//!
//! While the others work on one window the next is copied. All ranks stage and take the same number of windows, whether
//! they have something in them or not. Two buffers a stream are enough: whoever fills the one again has itself taken what
//! stood beside it, and waits only for those who have not taken what stood in it.

use std::ops::Range;

use phalanx_sys::board::{Meeting, Stream, WINDOW, share};

use super::{Job, LINE};
use crate::buffer::AlignedBytes;
use crate::collective::kernel::Fold;
use crate::error::{Error, Result};
use crate::wire::frame::Operation;

/// What a rank copies or combines between two waits: enough to be worth them, and little enough that the next rank finds
/// it in a cache.
const PIECE: usize = 64 << 10;

type Staging<'a, 'w> = Meeting<'a, 'w, Error>;

pub(super) fn in_place(meeting: &mut Staging<'_, '_>, job: Job) -> Result<()> {
    match job.call.operation {
        Operation::AllReduce | Operation::AllReduceCoalesced => all_reduce(meeting, job),
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
    // Aligned for elements of any type.
    let mut result = AlignedBytes::zeroed(deal.bytes);
    deal.inputs(meeting, job.me, |windows, memory, number| {
        let own = deal.piece(job.me, number);
        let result = &mut result.as_mut_slice()[..own.len()];
        fold.apply_to(&deal.sources(job.me, &memory[own.clone()], windows), result)?;
        memory[own].copy_from_slice(result);
        Ok(())
    })
}

/// Copies each rank's share of its memory to all others.
pub(super) fn collect(
    meeting: &mut Staging<'_, '_>,
    job: Job,
    share: impl Fn(usize) -> Range<usize>,
) -> Result<()> {
    let (start, length) = (share(job.me).start, |place| share(place).len());
    pass(meeting, job, start, length, |memory, place, from, bytes| {
        if place != job.me {
            memory[share(place)][from..from + bytes.len()].copy_from_slice(bytes);
        }
    })
}

pub(super) fn apart(meeting: &mut Staging<'_, '_>, job: Job, input: &[u8], output: &mut [u8]) -> Result<()> {
    match job.call.operation {
        Operation::ReduceScatter => {
            let deal = Deal::new(job.ranks, move |place| job.chunk(place));
            let start = job.chunk(job.me).start;
            deal.inputs(meeting, job.me, |windows, _, number| {
                let own = deal.piece(job.me, number);
                let result = &mut output[own.start - start..own.end - start];
                job.fold().apply_to(&deal.sources(job.me, &input[own], windows), result)
            })
        }
        Operation::AllGather => {
            output[job.chunk(job.me)].copy_from_slice(input);
            pass(
                meeting,
                job,
                0,
                |_| job.bytes(),
                |_, place, from, bytes| {
                    if place != job.me {
                        output[job.chunk(place)][from..from + bytes.len()].copy_from_slice(bytes);
                    }
                },
            )
        }
        _ => Ok(()),
    }
}

/// Each rank combines its share: it takes the others' parts of it from their windows, and stages the result. The results
/// are taken one window late, so that nobody waits for them.
fn all_reduce(meeting: &mut Staging<'_, '_>, job: Job) -> Result<()> {
    let me = job.me;
    let deal = Deal::new(job.ranks, move |place| share(job.bytes(), LINE, job.ranks, place));
    let take = |meeting: &mut Staging<'_, '_>, number| {
        meeting.take(Stream::Results, |windows, memory| {
            for (place, window) in windows.iter().enumerate().filter(|(place, _)| *place != me) {
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
            job.fold().apply_to(&deal.sources(me, &memory[own.clone()], windows), result)?;
            memory[own].copy_from_slice(result);
            Ok(())
        })?;
        if number > 0 {
            take(meeting, number - 1)?;
        }
    }
    take(meeting, deal.count - 1)
}

/// A buffer dealt out to all ranks, share by share and window by window.
struct Deal<F> {
    share: F,
    ranks: usize,
    /// Bytes of a share in each window.
    bytes: usize,
    /// Windows of the whole.
    count: usize,
}

impl<F: Fn(usize) -> Range<usize>> Deal<F> {
    fn new(ranks: usize, share: F) -> Self {
        let bytes = (WINDOW / ranks).min(PIECE) / LINE * LINE;
        let longest = (0..ranks).map(|place| share(place).len()).max().unwrap_or(0);
        Self { share, ranks, bytes, count: longest.div_ceil(bytes).max(1) }
    }

    /// What of the share of `place` is in window `number`.
    fn piece(&self, place: usize, number: usize) -> Range<usize> {
        let share = (self.share)(place);
        let at = |number: usize| (share.start + number * self.bytes).min(share.end);
        at(number)..at(number + 1)
    }

    /// Stages this rank's elements of the others' shares.
    fn stage(&self, meeting: &mut Staging<'_, '_>, me: usize, number: usize) -> Result<()> {
        meeting.stage(Stream::Inputs, |memory, window| {
            for place in (0..self.ranks).filter(|place| *place != me) {
                let piece = &memory[self.piece(place, number)];
                window[place * self.bytes..][..piece.len()].copy_from_slice(piece);
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

    /// What all ranks bring to a piece of the share of `me`, this rank's part of which is `own`.
    fn sources<'a>(&self, me: usize, own: &'a [u8], windows: &[&'a [u8]]) -> Vec<&'a [u8]> {
        let source = |(place, window): (usize, &&'a [u8])| match place {
            place if place == me => own,
            _ => &window[me * self.bytes..][..own.len()],
        };
        windows.iter().enumerate().map(source).collect()
    }
}

/// Passes each rank's bytes, from `start` in its memory on, to all others: `length` says how many of each place. `put`
/// gets this rank's memory, the place, and the bytes from which on.
fn pass(
    meeting: &mut Staging<'_, '_>,
    job: Job,
    start: usize,
    length: impl Fn(usize) -> usize,
    mut put: impl FnMut(&mut [u8], usize, usize, &[u8]),
) -> Result<()> {
    let longest = (0..job.ranks).map(&length).max().unwrap_or(0);
    let count = longest.div_ceil(PIECE).max(1);
    let piece = |place: usize, number: usize| {
        (number * PIECE).min(length(place))..((number + 1) * PIECE).min(length(place))
    };
    let stage = |meeting: &mut Staging<'_, '_>, number| {
        meeting.stage(Stream::Inputs, |memory, window| {
            let piece = piece(job.me, number);
            window[..piece.len()].copy_from_slice(&memory[start + piece.start..start + piece.end]);
            Ok(())
        })
    };
    stage(meeting, 0)?;
    for number in 0..count {
        if number + 1 < count {
            stage(meeting, number + 1)?;
        }
        meeting.take(Stream::Inputs, |windows, memory| {
            for (place, window) in windows.iter().enumerate() {
                let piece = piece(place, number);
                put(memory, place, piece.start, &window[..piece.len()]);
            }
            Ok(())
        })?;
    }
    Ok(())
}
