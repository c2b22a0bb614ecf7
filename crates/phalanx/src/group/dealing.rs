//! Collectives that gather, deal out and exchange, and reductions to one rank.

use super::ProcessGroup;
use super::blocking::apart;
use super::engine::Memory;
use crate::buffer::Buffer;
use crate::collective::{ReduceOp, Shares};
use crate::deadline::Deadline;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::wire::frame::{Call, Operation};

use std::time::Duration;

impl ProcessGroup {
    /// Combines `data` with the other ranks' `data`, element by element; the root gets the result in place, and the other
    /// ranks' `data` is unspecified afterwards.
    ///
    /// ```
    /// use phalanx::{ProcessGroup, Rank, ReduceOp};
    /// let group = ProcessGroup::alone()?;
    /// let mut losses = [0.5f32, 0.25];
    /// group.reduce(&mut losses, Rank::MAIN, ReduceOp::Avg)?;
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and if `root` is no rank of this group.
    pub fn reduce<T: Element>(&self, data: &mut [T], root: Rank, op: ReduceOp) -> Result<()> {
        let root = self.member(root)?;
        let call = self.call_of::<T>(Operation::Reduce, data.len()).reducing(op).rooted_at(root);
        call.prepare(op, bytemuck::cast_slice_mut(data))?;
        self.run(call, Memory::InPlace(bytemuck::cast_slice_mut(data)))
    }

    /// Gathers `input`, equally long on every rank, on the root: rank r's elements stand at r·len in its `output`. The
    /// other ranks' `output` is not touched, and may be empty.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather), and if `root` is no rank of this group.
    pub fn gather<T: Element>(&self, input: &[T], output: &mut [T], root: Rank) -> Result<()> {
        let root = self.member(root)?;
        let output = self.root_only("gather", "output", output, root, "input", input.len())?;
        self.run(self.call_of::<T>(Operation::Gather, input.len()).rooted_at(root), apart(input, output))
    }

    /// Deals out the root's `input`: rank r gets the elements from r·len on in `output`, equally long on every rank. The
    /// other ranks' `input` is not read, and may be empty.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), if `root` is no rank of this group, and if the root's `input` is not
    /// `world_size` times as long as `output`.
    pub fn scatter<T: Element>(&self, input: &[T], output: &mut [T], root: Rank) -> Result<()> {
        let root = self.member(root)?;
        if self.rank() == root {
            self.check_length("scatter", "input", input.len(), "output", output.len())?;
        }
        self.run(self.call_of::<T>(Operation::Scatter, output.len()).rooted_at(root), apart(input, output))
    }

    /// Gathers inputs of different lengths from all ranks, which all know them: rank r brings `counts[r]` elements, which
    /// stand in `output` behind those of the ranks before it.
    ///
    /// ```
    /// let group = phalanx::ProcessGroup::alone()?;
    /// let mut words = [0u8; 3];
    /// group.all_gather_v(b"abc", &mut words, &[3])?; // one count for each rank
    /// assert_eq!(&words, b"abc");
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); if there is not one count for each rank, `input` has not this rank's count, or
    /// `output` not the sum of all; and if the ranks' counts differ.
    #[doc(alias = "allgatherv")]
    pub fn all_gather_v<T: Element>(&self, input: &[T], output: &mut [T], counts: &[usize]) -> Result<()> {
        let shares = Shares::new(counts, self.world_size())?;
        self.check_all_gather_v(input.len(), output.len(), &shares)?;
        let (input, output) = (bytemuck::cast_slice(input), bytemuck::cast_slice_mut(output));
        let memory = Memory::Shared { input, output, sent: &shares, received: &shares };
        self.run(self.call_of::<T>(Operation::AllGatherV, shares.total()), memory)
    }

    /// Exchanges blocks among all ranks: the r-th of `world_size` equal parts of `input` goes to rank r, and the r-th of
    /// `output` comes from rank r.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and if `input` and `output` are not equally long or cannot be divided evenly.
    #[doc(alias("alltoall", "all_to_all_single"))]
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        self.check_all_to_all(input.len(), output.len())?;
        self.run(self.call_of::<T>(Operation::AllToAll, input.len()), apart(input, output))
    }

    /// As [`all_to_all`](Self::all_to_all), with blocks of different lengths: `sent[r]` elements of `input` go to rank r,
    /// and `received[r]` elements of `output` come from rank r, each behind those of the ranks before it.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); if there is not one count for each rank, or `input` and `output` are not as long
    /// as the sums; and if a rank sends another number of elements than its peer expects.
    #[doc(alias = "alltoallv")]
    pub fn all_to_all_v<T: Element>(
        &self,
        input: &[T],
        sent: &[usize],
        output: &mut [T],
        received: &[usize],
    ) -> Result<()> {
        let world = self.world_size();
        let (sent, received) = (Shares::new(sent, world)?, Shares::new(received, world)?);
        self.check_all_to_all_v((input.len(), &sent), (output.len(), &received))?;
        let (input, output) = (bytemuck::cast_slice(input), bytemuck::cast_slice_mut(output));
        self.run(
            self.call_of::<T>(Operation::AllToAllV, 0),
            Memory::Shared { input, output, sent: &sent, received: &received },
        )
    }

    /// An [`all_reduce`](Self::all_reduce) of several slices as one operation: many small ones cost hardly more than one.
    ///
    /// They pass through one buffer, so that elements of different slices may be combined in another order than each by
    /// itself would be; the same on every rank.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce). Ranks must bring the same lengths in the same order; their sum is compared.
    #[doc(alias = "grouped_allreduce")]
    pub fn all_reduce_coalesced<T: Element>(&self, data: &mut [&mut [T]], op: ReduceOp) -> Result<()> {
        let mut packed = Buffer::zeroed(T::DTYPE, data.iter().map(|slice| slice.len()).sum());
        let call = self.call_of::<T>(Operation::AllReduceCoalesced, packed.len()).reducing(op);
        let mut rest = packed.as_mut_slice::<T>()?;
        for slice in data.iter() {
            let (head, tail) = rest.split_at_mut(slice.len());
            head.copy_from_slice(slice);
            rest = tail;
        }
        call.prepare(op, packed.as_bytes_mut())?;
        self.run(call, Memory::InPlace(packed.as_bytes_mut()))?;
        let mut rest = packed.as_slice::<T>()?;
        for slice in data {
            let (head, tail) = rest.split_at(slice.len());
            slice.copy_from_slice(head);
            rest = tail;
        }
        Ok(())
    }

    /// A [`barrier`](Self::barrier) that finds out who is missing: if not every rank has called it `timeout` after rank 0
    /// has, all get an error that names every missing rank. Slower than a barrier: on one host twice as slow, else 2(w-1)
    /// messages at rank 0.
    ///
    /// If rank 0 itself is missing, the others say so after twice the time.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn monitored_barrier(&self, timeout: Duration) -> Result<()> {
        self.begin()?;
        let call = Call::new(Operation::MonitoredBarrier, DType::U8, 0);
        self.inner.queue.run(&self.patience(), |engine| {
            let (deadline, patience) = (Deadline::after(timeout), Deadline::after(timeout.saturating_mul(2)));
            engine.monitored_barrier(call, deadline, patience)
        })?
    }

    /// The root's memory, checked; on other ranks nothing, whatever they lend.
    fn root_only<'a, T>(
        &self,
        operation: &str,
        whole: &str,
        memory: &'a mut [T],
        root: Rank,
        part: &str,
        share: usize,
    ) -> Result<&'a mut [T]> {
        if self.rank() != root {
            return Ok(&mut []);
        }
        self.check_length(operation, whole, memory.len(), part, share)?;
        Ok(memory)
    }

    pub(super) fn check_all_gather_v(&self, input: usize, output: usize, shares: &Shares) -> Result<()> {
        let own = shares.of(self.rank().index()).len();
        check_sum("all_gather_v", "input", input, "this rank's count is", own)?;
        check_sum("all_gather_v", "output", output, "the counts add up to", shares.total())
    }

    pub(super) fn check_all_to_all(&self, input: usize, output: usize) -> Result<()> {
        let share = input / self.world_size().count();
        self.check_length("all_to_all", "input", input, "part for each rank", share)?;
        check_sum("all_to_all", "output", output, "the input has", input)
    }

    pub(super) fn check_all_to_all_v(
        &self,
        (input, sent): (usize, &Shares),
        (output, received): (usize, &Shares),
    ) -> Result<()> {
        check_sum("all_to_all_v", "input", input, "the counts add up to", sent.total())?;
        check_sum("all_to_all_v", "output", output, "the counts add up to", received.total())?;
        let own = |shares: &Shares| shares.of(self.rank().index()).len();
        check_sum("all_to_all_v", "block for this rank itself", own(sent), "it expects", own(received))
    }
}

pub(super) fn check_sum(
    operation: &str,
    memory: &str,
    length: usize,
    wanted: &str,
    sum: usize,
) -> Result<()> {
    if length == sum {
        return Ok(());
    }
    Err(Error::invalid_argument(format!("{operation}: the {memory} has {length} elements, {wanted} {sum}")))
}
