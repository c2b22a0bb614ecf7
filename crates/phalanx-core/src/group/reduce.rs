//! Reductions to one rank, to shards of different lengths, and of several buffers at once.

use super::arguments::same_type;
use super::{ProcessGroup, Work};
use crate::buffer::Buffer;
use crate::collective::Memory;
use crate::collective::ReduceOp;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::wire::frame::Operation;

impl ProcessGroup {
    /// Combines `data` with the other ranks' `data`, element by element; the root gets the result in place, and the
    /// other ranks' `data` is unspecified afterwards.
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
    /// As [`all_reduce`](Self::all_reduce), and if `root` is not a rank of this group.
    pub fn reduce<T: Element>(&self, data: &mut [T], root: Rank, op: ReduceOp) -> Result<()> {
        let root = self.member(root)?;
        let call = self.call_of::<T>(Operation::Reduce, data.len()).reducing(op).rooted_at(root);
        call.prepare(op, bytemuck::cast_slice_mut(data))?;
        self.run(call, Memory::InPlace(bytemuck::cast_slice_mut(data)))
    }

    /// As [`reduce`](Self::reduce); [`Work::wait`] returns the buffer, which holds the result on the root.
    ///
    /// # Errors
    /// At once if the group has failed, `root` is not in it or `op` is not defined for the type; otherwise from
    /// [`Work::wait`].
    pub fn reduce_async(&self, mut buffer: Buffer, root: Rank, op: ReduceOp) -> Result<Work> {
        let root = self.member(root)?;
        let call = self.call(Operation::Reduce, buffer.dtype(), buffer.len()).reducing(op).rooted_at(root);
        call.prepare(op, buffer.as_bytes_mut())?;
        self.start(call, buffer)
    }

    /// Combines `buffer` with the other ranks' buffers, and scatters the result in shards of different lengths: rank r
    /// has `counts[r]` elements, in the order of the ranks. [`Work::wait`] returns the buffer, in which this rank's
    /// shard is combined; the rest is unspecified.
    ///
    /// Together with [`all_gather_v_in_place_async`](Self::all_gather_v_in_place_async) it sends the same bytes as one
    /// all_reduce. Of few bytes it is an all_reduce; also where ranks of several hosts share memory, and a host has more than twice as many as
    /// another.
    ///
    /// # Errors
    /// At once if the group has failed, the counts do not fit or `op` is not defined for the type; otherwise from
    /// [`Work::wait`], also if the ranks' counts differ.
    pub fn reduce_scatter_v_async(&self, mut buffer: Buffer, counts: &[usize], op: ReduceOp) -> Result<Work> {
        let parts = self.counts_of("reduce_scatter_v", &buffer, counts)?;
        let call = self.call(Operation::ReduceScatterV, buffer.dtype(), buffer.len()).reducing(op);
        let call = call.in_parts(counts.iter().copied());
        call.prepare(op, buffer.as_bytes_mut())?;
        self.start_in_place_v(call, buffer, parts)
    }

    /// An [`all_reduce`](Self::all_reduce) of several slices as one operation: many small ones cost hardly more than
    /// one.
    ///
    /// They are copied into one buffer, so the order in which their elements are combined may be another than in
    /// separate calls; it is the same on every rank.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), if there is too little memory for that buffer, and if the ranks' slices differ in their lengths, or in
    /// their order, also if the lengths have the same sum.
    #[doc(alias = "grouped_allreduce")]
    pub fn all_reduce_coalesced<T: Element>(&self, data: &mut [&mut [T]], op: ReduceOp) -> Result<()> {
        let mut packed = Buffer::try_zeroed(T::DTYPE, data.iter().map(|slice| slice.len()).sum())?;
        let call = self.call_of::<T>(Operation::AllReduceCoalesced, packed.len()).reducing(op);
        let call = call.in_parts(data.iter().map(|slice| slice.len()));
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

    /// As [`all_reduce_coalesced`](Self::all_reduce_coalesced), of buffers of one type. [`Work::wait`] returns one
    /// buffer with the elements of all, in their order.
    ///
    /// # Errors
    /// At once if the group has failed, the types differ, `op` is not defined for them or there is too little memory; otherwise from
    /// [`Work::wait`], also if the ranks' buffers differ in their lengths.
    pub fn all_reduce_coalesced_async(&self, buffers: &[Buffer], op: ReduceOp) -> Result<Work> {
        let Some(first) = buffers.first() else {
            return Err(Error::invalid_argument("all_reduce_coalesced: the list of buffers is empty")
                .with_remedy("give at least one buffer"));
        };
        let dtype = first.dtype();
        for buffer in buffers {
            same_type("all_reduce_coalesced", first, buffer)?;
        }
        let mut packed = Buffer::try_zeroed(dtype, buffers.iter().map(Buffer::len).sum())?;
        let mut rest = packed.as_bytes_mut();
        for buffer in buffers {
            let (head, tail) = rest.split_at_mut(buffer.as_bytes().len());
            head.copy_from_slice(buffer.as_bytes());
            rest = tail;
        }
        let call = self.call(Operation::AllReduceCoalesced, dtype, packed.len()).reducing(op);
        let call = call.in_parts(buffers.iter().map(Buffer::len));
        call.prepare(op, packed.as_bytes_mut())?;
        self.start(call, packed)
    }
}
