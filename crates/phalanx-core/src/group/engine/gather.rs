//! Gather, scatter and all-to-all: each message goes from the input of one rank directly into the output of another.

use super::{Engine, Space, bytes_of};
use crate::collective::{self, Counts, Memory};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::rank::{Rank, Sequence};
use crate::wire::frame::{Call, Operation};

/// A block of an all-to-all of at most so many bytes is sent before anything is received. Ranks cannot wait for each other in this: a
/// rank that waits for room waits for a rank in an earlier call, which needs nothing more of it. A rank in this call has received everything of the calls
/// before, so the block is the only one on its way, and the systems have room for it.
const EAGER_BLOCK: usize = 4096;

impl Engine {
    /// An `all_to_all` or `all_to_all_v`: input and output, with the ranks' counts.
    pub(super) fn all_to_all(
        &mut self,
        call: Call,
        sequence: Sequence,
        (input, sent): (&[u8], &Counts),
        (output, received): (&mut [u8], &Counts),
        deadline: Deadline,
    ) -> Result<()> {
        let (rank, world, size) = (self.rank, self.world, call.dtype.size());
        let own = bytes_of(&received.of(rank.index()), size);
        output[own].copy_from_slice(&input[bytes_of(&sent.of(rank.index()), size)]);
        let plan = collective::all_to_all(rank, world, sent, received, EAGER_BLOCK / size);
        self.execute(call, sequence, &plan, Space::Two(input, output), deadline)
    }

    /// The `output` of an all-gather that goes on in place: with this rank's elements in it.
    pub(super) fn at_own_place<'a>(
        &self,
        call: Call,
        input: &[u8],
        output: &'a mut [u8],
        counts: &'a Counts,
    ) -> Memory<'a> {
        let own = bytes_of(&counts.of(self.rank.index()), call.dtype.size());
        output[own].copy_from_slice(input);
        Memory::InPlaceV { data: output, counts }
    }

    /// Whether a `reduce_scatter_v` of `bytes` bytes is an all-reduce of which each rank keeps its own part. With few bytes an optimizer that
    /// divides its state so takes the same steps as one that does not, to the last bit.
    pub(super) fn reduces_v_whole(&self, bytes: usize) -> bool {
        bytes <= self.choice.row.doubling_max.max(self.choice.row.halving_max)
    }

    /// A `reduce_scatter_v`, or an all-gather in place.
    pub(super) fn in_place_v(
        &mut self,
        call: Call,
        sequence: Sequence,
        data: &mut [u8],
        counts: &Counts,
        deadline: Deadline,
    ) -> Result<()> {
        let (rank, world, row) = (self.rank, self.world, &self.choice.row);
        let plan = match call.operation {
            Operation::ReduceScatterV if self.reduces_v_whole(data.len()) => {
                collective::all_reduce(row, rank, world, call.dtype, counts.total())
            }
            Operation::ReduceScatterV => collective::reduce_scatter_v(rank, world, counts),
            Operation::AllGather | Operation::AllGatherV | Operation::AllGatherVInPlace => {
                if collective::goes_in_rounds(row, world, data.len()) {
                    return self.all_gather_in_rounds((call, sequence), data, counts, deadline);
                }
                collective::all_gather_v(rank, world, counts)
            }
            Operation::AllReduce
            | Operation::AllReduceCoalesced
            | Operation::Reduce
            | Operation::ReduceScatter
            | Operation::Broadcast
            | Operation::Gather
            | Operation::Scatter
            | Operation::AllToAll
            | Operation::AllToAllV
            | Operation::Barrier
            | Operation::MonitoredBarrier
            | Operation::PointToPoint => {
                return Err(Error::protocol(format!("{} has no counts in place", call.operation.name())));
            }
        };
        self.execute(call, sequence, &plan, Space::One(data), deadline)
    }

    /// An all-gather in place through scratch memory, in which this rank's elements come last.
    fn all_gather_in_rounds(
        &mut self,
        (call, sequence): (Call, Sequence),
        data: &mut [u8],
        counts: &Counts,
        deadline: Deadline,
    ) -> Result<()> {
        let plan = collective::all_gather_in_rounds(self.rank, self.world, counts);
        let own = bytes_of(&counts.of(self.rank.index()), call.dtype.size());
        self.with_workspace((call, sequence), data.len(), |engine, rotated| {
            let first = rotated.len() - own.len();
            rotated[first..].copy_from_slice(&data[own.clone()]);
            engine.execute(call, sequence, &plan, Space::One(rotated), deadline)?;
            copy_rotated(data, rotated, own.end);
            Ok(())
        })
    }

    /// Only the root has an `output`.
    pub(super) fn gather(
        &mut self,
        call: Call,
        sequence: Sequence,
        input: &[u8],
        output: &mut [u8],
        deadline: Deadline,
    ) -> Result<()> {
        let (root, block) = (call.root.unwrap_or(Rank::MAIN), input.len());
        if !collective::goes_by_tree(&self.choice.row, block) {
            if self.rank == root {
                output[self.rank.index() * block..][..block].copy_from_slice(input);
            }
            let plan = collective::gather(self.rank, self.world, root, call.elements as usize);
            return self.execute(call, sequence, &plan, Space::Two(input, output), deadline);
        }
        let plan = collective::gather_tree(self.rank, self.world, root, call.elements as usize);
        // A rank also holds blocks of the ranks below it in the tree.
        self.with_workspace((call, sequence), block * self.world.count(), |engine, tree| {
            let index = engine.tree_index(root);
            tree[index * block..][..block].copy_from_slice(input);
            engine.execute(call, sequence, &plan, Space::One(tree), deadline)?;
            if engine.rank == root {
                copy_rotated(output, tree, root.index() * block);
            }
            Ok(())
        })
    }

    /// Only the root has an `input`.
    pub(super) fn scatter(
        &mut self,
        call: Call,
        sequence: Sequence,
        input: &[u8],
        output: &mut [u8],
        deadline: Deadline,
    ) -> Result<()> {
        let (root, block) = (call.root.unwrap_or(Rank::MAIN), output.len());
        if !collective::goes_by_tree(&self.choice.row, block) {
            if self.rank == root {
                output.copy_from_slice(&input[self.rank.index() * block..][..block]);
            }
            let plan = collective::scatter(self.rank, self.world, root, call.elements as usize);
            return self.execute(call, sequence, &plan, Space::Two(input, output), deadline);
        }
        let plan = collective::scatter_tree(self.rank, self.world, root, call.elements as usize);
        self.with_workspace((call, sequence), block * self.world.count(), |engine, tree| {
            if engine.rank == root {
                copy_rotated(tree, input, tree.len() - root.index() * block);
            }
            engine.execute(call, sequence, &plan, Space::One(tree), deadline)?;
            let index = engine.tree_index(root);
            output.copy_from_slice(&tree[index * block..][..block]);
            Ok(())
        })
    }

    /// This rank's index in a tree, in which the root is first.
    fn tree_index(&self, root: Rank) -> usize {
        (self.rank.index() + self.world.count() - root.index()) % self.world.count()
    }
}

/// Copies `from` rotated, so that its first byte is at `start`, and bytes beyond the end are at the front.
fn copy_rotated(to: &mut [u8], from: &[u8], start: usize) {
    let (front, back) = from.split_at(from.len() - start.min(from.len()));
    let (head, tail) = to.split_at_mut(start.min(from.len()));
    tail.copy_from_slice(front);
    head.copy_from_slice(back);
}
