//! Memory domains: ranks of one host that reach each other's memory, and their collectives.
//!
//! All ranks of a domain meet on a board for each collective, in one of three ways:
//!
//! - [`direct`]: if everybody's memory is registered, each rank combines its share where it lies, for all.
//! - [`small`]: few bytes travel in the slots in which the ranks say what they call. Everybody combines everything. The
//!   smallest calls always do.
//! - [`staged`]: otherwise the same passes in windows through buffers that all reach.
//!
//! In each of them the elements are combined in the order of the ranks, so that all ways give the same bits.

mod connect;
mod direct;
mod partition;
mod shares;
mod small;
mod staged;
mod word;

use std::ops::Range;
use std::sync::Arc;

use phalanx_sys::arena::Arena;
use phalanx_sys::board::{Board, Way};

#[cfg(any(test, fuzzing))]
pub(crate) use self::connect::fuzz;
pub(crate) use self::connect::{Joined, decline, join, refused};
pub(crate) use self::partition::Partition;
#[cfg(any(test, fuzzing))]
pub use self::word::fuzz as fuzz_word;
use crate::collective::ReduceOp;
use crate::collective::kernel::Fold;
use crate::deadline::Patience;
use crate::error::Result;
use crate::group::Memory;
use crate::rank::{Epoch, Rank, Sequence};
use crate::transport::health::Health;
use crate::transport::late;
use crate::wire::frame::{Call, Header, Operation};

/// Shares end where cache lines do, so that no two ranks write the same one.
const LINE: usize = 64;

/// A rank's place among the ranks with which it shares memory.
pub(crate) struct Domain {
    rank: Rank,
    /// The ranks of this domain, in order; on the board they have these places.
    members: Vec<Rank>,
    is_world: bool,
    arena: Arc<Arena>,
    board: Board,
    health: Arc<Health>,
}

/// A call, as a rank at place `me` of `ranks` sees it.
#[derive(Clone, Copy)]
struct Job {
    call: Call,
    me: usize,
    ranks: usize,
    /// The place of the root, if the call has one.
    root: usize,
}

impl Domain {
    /// The memory of this rank that the others of its domain reach.
    pub(crate) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Are all ranks of the group in this domain?
    pub(crate) fn is_world(&self) -> bool {
        self.is_world
    }

    /// Does shared memory carry this collective, on such memory?
    pub(crate) fn takes(operation: Operation, memory: &Memory<'_>) -> bool {
        match operation {
            Operation::AllReduce
            | Operation::AllReduceCoalesced
            | Operation::Broadcast
            | Operation::Barrier => {
                matches!(memory, Memory::InPlace(_))
            }
            Operation::AllGather | Operation::ReduceScatter => !matches!(memory, Memory::Shared { .. }),
            _ => false,
        }
    }

    /// Finds out whether all ranks of the domain make the same call, before it goes another way.
    pub(crate) fn agree(&mut self, call: Call, sequence: Sequence, patience: &Patience) -> Result<()> {
        let (members, rank, health, word) = (&*self.members, self.rank, &*self.health, word::encode(&call));
        let words = self.board.small(word, &[], &mut |missing| watch(health, members[missing], patience))?;
        (0..members.len())
            .try_for_each(|index| compare(rank, call, sequence, members[index], &word, words.call(index)))
    }

    /// A collective of all ranks of the domain.
    pub(crate) fn collective(
        &mut self,
        call: Call,
        sequence: Sequence,
        memory: Memory<'_>,
        patience: &Patience,
    ) -> Result<()> {
        let members = &*self.members;
        let root = call.root.and_then(|root| members.iter().position(|member| *member == root));
        let job = Job { call, me: self.board.me(), ranks: members.len(), root: root.unwrap_or(0) };
        let (rank, health, word) = (self.rank, &*self.health, word::encode(&call));
        let mut watch = |missing: usize| watch(health, members[missing], patience);
        let check = |index: usize, theirs| compare(rank, call, sequence, members[index], &word, theirs);

        if job.bytes() <= small::ALWAYS {
            return small::run(&mut self.board, job, memory, word, &mut watch, check);
        }
        match memory {
            Memory::InPlace(data) => {
                let small = small::part(job, data.len());
                self.board.in_place(word, data, small, &mut watch, |meeting| {
                    (0..job.ranks).try_for_each(|index| check(index, meeting.call(index)))?;
                    match meeting.way() {
                        Way::Direct => direct::in_place(meeting, job),
                        Way::Small => meeting.words(|words, data| small::finish(job, words, data)),
                        Way::Staged => staged::in_place(meeting, job),
                    }
                })
            }
            Memory::Apart { input, output } | Memory::Shared { input, output, .. } => {
                let small = small::part(job, input.len()).map(|_| 0..input.len());
                self.board.apart(word, input, small, &mut watch, |meeting| {
                    (0..job.ranks).try_for_each(|index| check(index, meeting.call(index)))?;
                    match meeting.way() {
                        Way::Direct => direct::apart(meeting, job, output),
                        Way::Small => meeting.words(|words, _| small::finish(job, words, output)),
                        Way::Staged => staged::apart(meeting, job, input, output),
                    }
                })
            }
        }
    }
}

impl Job {
    /// Bytes of the call's buffer, as the call counts it.
    fn bytes(&self) -> usize {
        self.call.elements as usize * self.call.dtype.size()
    }

    /// What the rank at `place` brings to an `all_gather`, or gets of a `reduce_scatter`, within all ranks' elements.
    fn chunk(&self, place: usize) -> Range<usize> {
        let bytes = match self.call.operation {
            Operation::ReduceScatter => self.bytes() / self.ranks,
            _ => self.bytes(),
        };
        place * bytes..(place + 1) * bytes
    }

    fn fold(&self) -> Fold {
        // Without an operation nothing is combined.
        let op = self.call.reduce.unwrap_or(ReduceOp::Sum);
        Fold::of_all(self.call.dtype, op, self.ranks as u32)
    }
}

/// Is there any use in waiting for `peer`?
fn watch(health: &Health, peer: Rank, patience: &Patience) -> Result<()> {
    if health.has_failed() || health.has_left(peer) {
        return Err(health.peer_failed(peer, "it takes no part any more"));
    }
    if patience.deadline().has_passed() {
        return Err(late(peer, health.host(peer)));
    }
    Ok(())
}

/// An error with both calls, if `peer` makes another one.
fn compare(
    rank: Rank,
    call: Call,
    sequence: Sequence,
    peer: Rank,
    own: &word::Word,
    theirs: word::Word,
) -> Result<()> {
    if *own == theirs {
        return Ok(());
    }
    // The memory is of this job and epoch; the count of calls is what has brought both here.
    let header = |call| Header { call, sequence, epoch: Epoch::default(), payload: 0 };
    // How plans are chosen is no part of the word; frames compare it.
    header(Call { tuning: 0, ..call }).check(&header(word::decode(&theirs)?), rank, peer)
}

#[cfg(test)]
mod tests;
