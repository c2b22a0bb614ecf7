//! Sources and destinations in collectives that copy: each rank brings an input. Every rank takes a block of it, and
//! puts the block into its own output.

use std::ops::Range;

use phalanx_sys::copy::{copy, copy_part};

use super::{Job, short};
use crate::collective::Counts;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::wire::frame::Copying;

/// Counts of a `_v` collective on a rank: of its input by receiver, and of its output by sender.
pub(super) type Uneven<'a> = Option<(&'a Counts, &'a Counts)>;

/// The copies of a call, as seen by one rank.
pub(super) struct Routes<'a> {
    job: Job<'a>,
    copying: Copying,
    uneven: Uneven<'a>,
    /// Where this rank's block begins in each rank's input, if there are counts.
    starts: Vec<usize>,
    /// The bytes of the longest block of all ranks.
    longest: usize,
}

/// This rank's counts for the others: how many elements it sends to each, and how many it expects from each.
pub(super) fn note(job: Job<'_>, copying: Copying, uneven: Uneven<'_>) -> Vec<u8> {
    let Some((sent, received)) = uneven else { return Vec::new() };
    let sent = |to| match copying {
        Copying::AllGather | Copying::Gather => sent.of(job.me).len(),
        Copying::Scatter | Copying::AllToAll => sent.of(to).len(),
    };
    let expected = |from| received.of(from).len();
    let counts = (0..job.ranks).map(sent).chain((0..job.ranks).map(expected));
    counts.flat_map(|count| (count as u64).to_le_bytes()).collect()
}

impl<'a> Routes<'a> {
    /// As far as this rank knows them by its own call.
    pub(super) fn new((job, copying): (Job<'a>, Copying), uneven: Uneven<'a>) -> Self {
        let longest = match copying {
            Copying::AllToAll => job.bytes() / job.ranks,
            Copying::AllGather | Copying::Gather | Copying::Scatter => job.bytes(),
        };
        Self { job, copying, uneven, starts: Vec::new(), longest }
    }

    /// Copies this rank's block for itself, for which it needs no other rank.
    pub(super) fn keep(&self, input: &[u8], output: &mut [u8]) {
        let (given, own) = (self.given(self.job.me), self.output_range(self.job.me));
        // Otherwise the counts contradict each other.
        if given.len() == own.len() {
            let whole = output.len();
            copy_part(&input[given], &mut output[own], whole);
        }
    }

    /// With what the ranks say of their counts.
    ///
    /// # Errors
    /// If the ranks' notes contradict each other. Every rank returns this error.
    pub(super) fn among<'n>(&self, members: &[Rank], note: impl Fn(usize) -> &'n [u8]) -> Result<Self> {
        let job = self.job;
        let mut routes = Self { starts: Vec::new(), ..*self };
        if self.uneven.is_none() {
            return Ok(routes);
        }
        routes.longest = 0;
        for from in 0..job.ranks {
            let mut end = 0usize;
            for to in 0..job.ranks {
                let (sent, expected) = (count(note(from), to), count(note(to), job.ranks + from));
                if sent != expected {
                    let peer = members[if from == job.me { to } else { from }];
                    let (from, to) = (members[from], members[to]);
                    return Err(differ(from, to, sent, expected).with_peer(peer));
                }
                if to == job.me {
                    routes.starts.push(end);
                }
                // A peer's numbers may be wrong; the length is checked when its bytes are read.
                let bytes = sent.saturating_mul(job.call.dtype.size());
                routes.longest = routes.longest.max(bytes);
                end = end.saturating_add(bytes);
            }
        }
        Ok(routes)
    }

    /// How many different blocks an input can have.
    pub(super) fn blocks(&self) -> usize {
        match self.copying {
            Copying::Scatter | Copying::AllToAll => self.job.ranks,
            Copying::AllGather | Copying::Gather => 1,
        }
    }

    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    /// The block for `to` in this rank's own input.
    pub(super) fn given(&self, to: usize) -> Range<usize> {
        let Some((sent, _)) = self.uneven else { return self.even(self.job.me, to) };
        match self.copying {
            Copying::Scatter | Copying::AllToAll => self.bytes(sent.of(to)),
            Copying::AllGather | Copying::Gather => 0..self.bytes(sent.of(self.job.me)).len(),
        }
    }

    /// The range of the block from `from` in this rank's output.
    pub(super) fn output_range(&self, from: usize) -> Range<usize> {
        if let Some((_, received)) = self.uneven {
            return self.bytes(received.of(from));
        }
        let length = self.even(from, self.job.me).len();
        match self.copying {
            Copying::Scatter => 0..length,
            Copying::AllGather | Copying::Gather | Copying::AllToAll => from * length..(from + 1) * length,
        }
    }

    /// Copies this rank's blocks from the inputs of the others.
    ///
    /// # Errors
    /// If an input is too short.
    pub(super) fn copy<'i>(&self, inputs: impl Fn(usize) -> &'i [u8], output: &mut [u8]) -> Result<()> {
        self.take(output, |from, start, into| {
            let block = start.checked_add(into.len()).and_then(|end| inputs(from).get(start..end));
            copy(block.ok_or_else(short)?, into);
            Ok(())
        })
    }

    /// Has each block that is not empty put where it belongs: `put` gets the other rank that brings it, where it begins in that one's input,
    /// and its place. Each rank begins with another one.
    pub(super) fn take(
        &self,
        output: &mut [u8],
        mut put: impl FnMut(usize, usize, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        for from in self.job.others() {
            let into = &mut output[self.output_range(from)];
            if !into.is_empty() {
                put(from, self.taken(from), into)?;
            }
        }
        Ok(())
    }

    /// Where this rank's block begins in the input of `from`.
    fn taken(&self, from: usize) -> usize {
        match (self.uneven, self.copying) {
            (None, _) => self.even(from, self.job.me).start,
            (Some(_), Copying::AllGather | Copying::Gather) => 0,
            (Some(_), Copying::Scatter | Copying::AllToAll) => self.starts[from],
        }
    }

    /// The block for `to` in the input of `from`, if there are no counts.
    fn even(&self, from: usize, to: usize) -> Range<usize> {
        let root = self.job.root;
        let number = match self.copying {
            Copying::Gather if to != root => return 0..0,
            Copying::Scatter if from != root => return 0..0,
            Copying::Scatter | Copying::AllToAll => to,
            Copying::AllGather | Copying::Gather => 0,
        };
        number * self.longest..(number + 1) * self.longest
    }

    fn bytes(&self, elements: Range<usize>) -> Range<usize> {
        let size = self.job.call.dtype.size();
        elements.start * size..elements.end * size
    }
}

/// A number of elements in a note.
fn count(note: &[u8], index: usize) -> usize {
    let bytes = note.chunks_exact(size_of::<u64>()).nth(index).and_then(|bytes| bytes.try_into().ok());
    usize::try_from(bytes.map_or(0, u64::from_le_bytes)).unwrap_or(usize::MAX)
}

fn differ(from: Rank, to: Rank, sent: usize, expected: usize) -> Error {
    Error::mismatch(format!("rank {from} sends {sent} elements where rank {to} expects {expected}"))
        .with_remedy("every rank must expect of each other as many elements as that one sends to it")
}
