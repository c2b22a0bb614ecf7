//! Collectives on memory that other ranks cannot reach: the data passes through staging buffers, one window at a time.
//!
//! While the others work on one window, the next is copied. All ranks pass the same number of windows, even if some are
//! empty.
//!
//! A result for all ranks is combined in the windows: each rank writes it into its block of every window, where the
//! owner finds it. So a cache line of a window goes to one other processor and comes back, and no byte is copied from
//! window to window.
//!
//! A rank of a group has 512 KiB of staging buffers, and 2 MiB once a peer has been late, so that it can run ahead. Where processors
//! [reread slowly](rereads_slowly), what is only copied takes turns with all of them.

use std::ops::Range;

use phalanx_sys::control_block::{Division, SharedOperation, TakeBack, WINDOW, block_start, share, with_all};

use phalanx_sys::copy::{copy_part, take_lines, take_part};
use phalanx_sys::processors::rereads_slowly;

use super::routes::Routes;
use super::{Block, InPlace, Job, LINE, direct};
use crate::collective::kernel::Fold;
use crate::error::{Error, Result};

/// What a rank copies or combines between two waits: large enough for the cost of a wait, and small enough that the
/// next rank finds it in a cache.
const PIECE: usize = 64 << 10;
/// The same of a block of this many such pieces and more: a wait costs less of it. On a Xeon a broadcast of 1 MiB took 54 us so and 70 in shorter ones, a
/// reduce 60 and 73.
const LONG_PIECE: usize = 128 << 10;
const LONG_PIECES: usize = 4;
/// With more ranks, all of them combine a result for one.
const FEW: usize = 3;

type Staging<'a, 'w> = SharedOperation<'a, 'w, Error>;

/// How an operation in place uses windows.
enum Pattern {
    /// Each rank combines its share of all ranks' memory; all ranks, or the root, get all results.
    Combine,
    /// Each rank combines only its own result.
    Reduce,
    /// Each rank's share goes to all others.
    Collect,
    /// There are none.
    Nothing,
}

pub(super) fn in_place(operation: &mut Staging<'_, '_>, job: Job<'_>, kind: InPlace) -> Result<()> {
    let given = |index| given(job, kind, index);
    match pattern(job, kind) {
        Pattern::Combine => combine(operation, job, kind),
        Pattern::Reduce => reduce(operation, job, job.fold(), given),
        Pattern::Collect => collect(operation, job, given),
        Pattern::Nothing => Ok(()),
    }
}

/// How the ranks divide an operation in place, whichever way the data goes.
pub(super) fn division(job: Job<'_>, kind: InPlace) -> Division {
    let unit = match kind {
        InPlace::ReduceScatter | InPlace::AllGather => job.call.dtype.size(),
        InPlace::AllReduce | InPlace::Reduce | InPlace::Broadcast | InPlace::Barrier => LINE,
    };
    let combines_windows = matches!(pattern(job, kind), Pattern::Combine);
    Division { owners: job.ranks, unit, combines_windows }
}

/// Copies the first window of an operation in place into `window`.
pub(super) fn ahead(job: Job<'_>, kind: InPlace, memory: &[u8], window: &mut [u8]) {
    let given = |index| given(job, kind, index);
    match pattern(job, kind) {
        Pattern::Combine | Pattern::Reduce => {
            WindowLayout::new(job.ranks, given).fill(job.me, 0, memory, window);
        }
        Pattern::Collect => for_all(job, &given).fill(job.me, 0, memory, window),
        Pattern::Nothing => {}
    }
}

fn pattern(job: Job<'_>, kind: InPlace) -> Pattern {
    match kind {
        InPlace::AllReduce => Pattern::Combine,
        // The root alone is as fast as few ranks together, and need not copy the others' results.
        InPlace::Reduce if job.ranks <= FEW => Pattern::Reduce,
        InPlace::Reduce => Pattern::Combine,
        InPlace::ReduceScatter => Pattern::Reduce,
        InPlace::AllGather | InPlace::Broadcast => Pattern::Collect,
        InPlace::Barrier => Pattern::Nothing,
    }
}

/// The part of all ranks' memory that the rank with this `index` combines, or gives to all.
fn given(job: Job<'_>, kind: InPlace, index: usize) -> Range<usize> {
    match (kind, pattern(job, kind)) {
        (InPlace::ReduceScatter | InPlace::AllGather, _) => job.chunk(index),
        (_, Pattern::Combine) => share(job.bytes(), LINE, job.ranks, index),
        _ if index == job.root => 0..job.bytes(),
        _ => 0..0,
    }
}

/// Combines all ranks' memory in place, each rank its share.
pub(super) fn reduce(
    operation: &mut Staging<'_, '_>,
    job: Job<'_>,
    fold: Fold,
    share: impl Fn(usize) -> Range<usize>,
) -> Result<()> {
    let layout = WindowLayout::new(job.ranks, share);
    let mut block = Block::default();
    layout.inputs(operation, |windows, memory, number| {
        let own = layout.piece(job.me, number);
        parts(own.len()).try_for_each(|part| {
            let range = own.start + part.start..own.start + part.end;
            let result = &mut block.0[..part.len()];
            layout.fold(fold, job.me, windows, part, &memory[range.clone()], result)?;
            memory[range].copy_from_slice(result);
            Ok(())
        })
    })
}

/// Copies each rank's share of its memory to all others.
pub(super) fn collect(
    operation: &mut Staging<'_, '_>,
    job: Job<'_>,
    share: impl Fn(usize) -> Range<usize>,
) -> Result<()> {
    let layout = for_all(job, &share);
    layout.copy(operation, job.me, &share, |memory, range, piece| {
        let whole = memory.len();
        piece.copy_to(&mut memory[range], whole);
    })
}

/// This rank's share in one block for all others.
fn for_all(
    job: Job<'_>,
    share: &impl Fn(usize) -> Range<usize>,
) -> WindowLayout<impl Fn(usize) -> Range<usize>> {
    let longest = (0..job.ranks).map(|index| share(index).len()).max().unwrap_or(0);
    WindowLayout::of_blocks((job.ranks, 1), longest, move |_| share(job.me))
}

/// Combines this rank's chunk of all inputs.
pub(super) fn reduce_out_of_place(
    operation: &mut Staging<'_, '_>,
    job: Job<'_>,
    input: &[u8],
    output: &mut [u8],
) -> Result<()> {
    let layout = WindowLayout::new(job.ranks, move |index| job.chunk(index));
    let start = job.chunk(job.me).start;
    layout.inputs(operation, |windows, _, number| {
        let own = layout.piece(job.me, number);
        let result = &mut output[own.start - start..own.end - start];
        parts(own.len()).try_for_each(|part| {
            let input = &input[own.start..][part.clone()];
            layout.fold(job.fold(), job.me, windows, part.clone(), input, &mut result[part])
        })
    })
}

/// Copies each rank's blocks to the others.
pub(super) fn copy(
    operation: &mut Staging<'_, '_>,
    job: Job<'_>,
    routes: &Routes<'_>,
    output: &mut [u8],
) -> Result<()> {
    let layout =
        WindowLayout::of_blocks((job.ranks, routes.blocks()), routes.longest(), |to| routes.given(to));
    let (destination, whole) = (|from| routes.output_range(from), output.len());
    layout.copy(operation, job.me, destination, |_, range, piece| piece.copy_to(&mut output[range], whole))
}

/// Each rank combines its share of all ranks' memory, in the windows. Ranks that need the results read them there.
fn combine(operation: &mut Staging<'_, '_>, job: Job<'_>, kind: InPlace) -> Result<()> {
    let (me, for_all) = (job.me, kind != InPlace::Reduce);
    let layout = WindowLayout::new(job.ranks, |index| given(job, kind, index));
    let take_back: TakeBack<'_, Error> = &mut |number, window, memory| {
        for index in (0..job.ranks).filter(|index| *index != me) {
            let piece = layout.piece(index, number);
            let length = piece.len();
            memory[piece].copy_from_slice(&window[layout.start(index)..][..length]);
        }
        Ok(())
    };
    let work = |operation: &mut Staging<'_, '_>, number| {
        let own = layout.piece(me, number);
        operation.combine_staged(own.len(), |blocks, memory| {
            let (mut blocks, mut own) = (blocks.iter_mut(), Some(&mut memory[own]));
            let next = |index| if index == me { own.take() } else { blocks.next().map(|block| &mut **block) };
            with_all((0..job.ranks).filter_map(next), |chunks| match for_all {
                true => job.fold().apply(chunks),
                false => direct::reduce(job.fold(), chunks, job.root),
            })
        })
    };
    let has_result = for_all || me == job.root;
    operation.pass(layout.count, layout.filler(me), work, has_result.then_some(take_back))
}

/// How a rank's input is divided into blocks, one for each receiver, and the blocks into windows.
struct WindowLayout<F> {
    /// The part of the input that is for a rank.
    given: F,
    ranks: usize,
    /// Different blocks in a window: one for each rank, or one for all.
    blocks: usize,
    /// Bytes of a block in each window.
    bytes: usize,
    /// Windows in all.
    count: usize,
}

impl<F: Fn(usize) -> Range<usize>> WindowLayout<F> {
    /// A buffer of which each rank has a share.
    fn new(ranks: usize, share: F) -> Self {
        let longest = (0..ranks).map(|index| share(index).len()).max().unwrap_or(0);
        Self::of_blocks((ranks, ranks), longest, share)
    }

    /// The longest block must be the same on every rank, so that all have the same number of windows.
    fn of_blocks((ranks, blocks): (usize, usize), longest: usize, given: F) -> Self {
        let piece = if longest >= LONG_PIECES * LONG_PIECE { LONG_PIECE } else { PIECE };
        let bytes = (WINDOW / blocks).min(piece) / LINE * LINE;
        Self { given, ranks, blocks, bytes, count: longest.div_ceil(bytes).max(1) }
    }

    /// The part of the block for `index` that is in window `number`.
    fn piece(&self, index: usize, number: usize) -> Range<usize> {
        self.cut((self.given)(index), number)
    }

    fn cut(&self, block: Range<usize>, number: usize) -> Range<usize> {
        let at = |number: usize| (block.start + number * self.bytes).min(block.end);
        at(number)..at(number + 1)
    }

    /// The offset in a window of the block for `index`.
    fn start(&self, index: usize) -> usize {
        block_start(self.blocks, index % self.blocks)
    }

    /// Copies the parts of this rank's input for the others into a window.
    fn fill(&self, me: usize, number: usize, memory: &[u8], window: &mut [u8]) {
        let others = (0..self.ranks).filter(|index| *index != me);
        let pieces = others.map(|index| (index, self.piece(index, number)));
        for (index, piece) in pieces.filter(|(_, piece)| !piece.is_empty()).take(self.blocks) {
            window[self.start(index)..][..piece.len()].copy_from_slice(&memory[piece]);
        }
    }

    /// What fills the windows of rank `me`.
    fn filler(&self, me: usize) -> impl FnMut(usize, &[u8], &mut [u8]) -> Result<()> {
        move |number, memory, window| {
            self.fill(me, number, memory, window);
            Ok(())
        }
    }

    /// Stages all windows, and calls `work` with the ranks' windows, this rank's memory and the window's number.
    fn inputs(
        &self,
        operation: &mut Staging<'_, '_>,
        mut work: impl FnMut(&mut Inputs<'_, '_>, &mut [u8], usize) -> Result<()>,
    ) -> Result<()> {
        let (me, is_pair) = (operation.me(), operation.members() == 2);
        let work = |operation: &mut Staging<'_, '_>, number| match is_pair {
            true => {
                operation.take_from_other(|window, memory| work(&mut Inputs::Other(window), memory, number))
            }
            false => operation.take(|windows, memory| work(&mut Inputs::All(windows), memory, number)),
        };
        if rereads_slowly() {
            operation.rotate();
        }
        operation.pass(self.count, self.filler(me), work, None)
    }

    /// Stages all windows, and calls `put` with each piece for this rank and where it belongs. `destination` is where a
    /// rank's whole block belongs.
    fn copy(
        &self,
        operation: &mut Staging<'_, '_>,
        me: usize,
        destination: impl Fn(usize) -> Range<usize>,
        mut put: impl FnMut(&mut [u8], Range<usize>, Piece<'_>),
    ) -> Result<()> {
        let start = self.start(me);
        self.inputs(operation, |windows, memory, number| {
            let range = |from| self.cut(destination(from), number);
            match windows {
                Inputs::Other(window) => {
                    let range = range(1 - me);
                    put(memory, range.clone(), Piece::Own(&mut window[start..][..range.len()]));
                }
                Inputs::All(windows) => {
                    for (from, window) in windows.iter().enumerate().filter(|(from, _)| *from != me) {
                        let range = range(from);
                        put(memory, range.clone(), Piece::Shared(&window[start..][..range.len()]));
                    }
                }
            }
            Ok(())
        })
    }

    /// Combines a `part` of the blocks for `me` in the others' windows with its own `input`, in the order of the ranks.
    fn fold(
        &self,
        fold: Fold,
        me: usize,
        windows: &mut Inputs<'_, '_>,
        part: Range<usize>,
        input: &[u8],
        result: &mut [u8],
    ) -> Result<()> {
        let part = self.start(me) + part.start..self.start(me) + part.end;
        match windows {
            Inputs::Other(window) => {
                let other = &mut window[part];
                let sources = if me == 0 { [input, &*other] } else { [&*other, input] };
                fold.apply_to(&sources, result)?;
                take_lines(other);
                Ok(())
            }
            Inputs::All(windows) => {
                let mut sources: Vec<_> = windows.iter().map(|window| &window[part.clone()]).collect();
                sources[me] = input;
                fold.apply_to(&sources, result)
            }
        }
    }
}

/// What the ranks have staged.
enum Inputs<'a, 'w> {
    /// With two ranks: the other's window, which nobody else reads.
    Other(&'a mut [u8]),
    /// All ranks' windows, in their order. This rank's own part is not staged.
    All(&'a [&'w [u8]]),
}

/// A piece of a window, for one rank.
enum Piece<'a> {
    /// That nobody else reads.
    Own(&'a mut [u8]),
    Shared(&'a [u8]),
}

impl Piece<'_> {
    /// Copies it to its place in memory of `whole` bytes, into which all pieces go.
    fn copy_to(self, place: &mut [u8], whole: usize) {
        match self {
            Self::Own(piece) => take_part(piece, place, whole),
            Self::Shared(piece) => copy_part(piece, place, whole),
        }
    }
}

/// The parts of a block of `bytes` that are combined at once.
fn parts(bytes: usize) -> impl Iterator<Item = Range<usize>> {
    const PART: usize = size_of::<Block>();
    (0..bytes).step_by(PART).map(move |start| start..bytes.min(start + PART))
}
