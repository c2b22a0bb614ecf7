//! The asynchronous forms of collectives that gather, deal out and exchange, and of reductions to one rank.

use super::dealing::check_sum;
use super::engine::Memory;
use super::{ProcessGroup, Work};
use crate::buffer::Buffer;
use crate::collective::{ReduceOp, Shares};
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::wire::frame::{Call, Operation};

impl ProcessGroup {
    /// As [`reduce`](Self::reduce); [`Work::wait`] gives the buffer back, which holds the result on the root.
    ///
    /// # Errors
    /// At once if the group has failed, `root` is not in it or `op` is not defined for the type; otherwise from
    /// [`Work::wait`].
    pub fn reduce_async(&self, mut buffer: Buffer, root: Rank, op: ReduceOp) -> Result<Work> {
        let root = self.member(root)?;
        let call = self.call(Operation::Reduce, buffer.dtype(), buffer.len()).reducing(op).rooted_at(root);
        call.prepare(op, buffer.as_bytes_mut())?;
        self.start_with(call, move |engine, patience| {
            engine.collective(call, Memory::InPlace(buffer.as_bytes_mut()), patience)?;
            Ok(buffer)
        })
    }

    /// As [`gather`](Self::gather); [`Work::wait`] gives the root a buffer with all ranks' elements, and the others one
    /// without any.
    ///
    /// # Errors
    /// At once if the group has failed or `root` is not in it; otherwise from [`Work::wait`].
    pub fn gather_async(&self, buffer: Buffer, root: Rank) -> Result<Work> {
        let root = self.member(root)?;
        let (dtype, elements) = (buffer.dtype(), buffer.len());
        let whole = if self.rank() == root { elements * self.world_size().count() } else { 0 };
        let call = self.call(Operation::Gather, dtype, elements).rooted_at(root);
        self.start_apart(call, buffer, Buffer::zeroed(dtype, whole))
    }

    /// As [`scatter`](Self::scatter); [`Work::wait`] gives `output`, with this rank's share.
    ///
    /// # Errors
    /// At once if the group has failed, `root` is not in it, the types differ, or the root's `input` is not `world_size`
    /// times as long as `output`; otherwise from [`Work::wait`].
    pub fn scatter_async(&self, input: Buffer, output: Buffer, root: Rank) -> Result<Work> {
        let root = self.member(root)?;
        let (dtype, elements) = (output.dtype(), output.len());
        if self.rank() == root {
            same_type("scatter", &input, &output)?;
            self.check_length("scatter", "input", input.len(), "output", elements)?;
        }
        let call = self.call(Operation::Scatter, dtype, elements).rooted_at(root);
        self.start_apart(call, input, output)
    }

    /// As [`all_gather_v`](Self::all_gather_v); [`Work::wait`] gives a buffer with all ranks' elements.
    ///
    /// # Errors
    /// At once if the group has failed or the counts do not fit; otherwise from [`Work::wait`].
    pub fn all_gather_v_async(&self, buffer: Buffer, counts: &[usize]) -> Result<Work> {
        let shares = Shares::new(counts, self.world_size())?;
        self.check_all_gather_v(buffer.len(), shares.total(), &shares)?;
        let mut output = Buffer::zeroed(buffer.dtype(), shares.total());
        let call = self.call(Operation::AllGatherV, buffer.dtype(), shares.total());
        self.start_with(call, move |engine, patience| {
            let (input, into) = (buffer.as_bytes(), output.as_bytes_mut());
            let memory = Memory::Shared { input, output: into, sent: &shares, received: &shares };
            engine.collective(call, memory, patience)?;
            Ok(output)
        })
    }

    /// Combines `buffer` with the other ranks' buffers, and deals out the result in shares of different lengths: rank r's
    /// `counts[r]` elements stand behind those of the ranks before it. [`Work::wait`] gives the buffer back, in which this
    /// rank's share is combined; what stands elsewhere is unspecified.
    ///
    /// With [`all_gather_v_in_place_async`](Self::all_gather_v_in_place_async) after it, it sends what one all_reduce
    /// does. Between hosts whose ranks share memory it is an all_reduce.
    ///
    /// # Errors
    /// At once if the group has failed, the counts do not fit or `op` is not defined for the type; otherwise from
    /// [`Work::wait`], also if the ranks' counts differ.
    pub fn reduce_scatter_v_async(&self, mut buffer: Buffer, counts: &[usize], op: ReduceOp) -> Result<Work> {
        let shares = self.parts("reduce_scatter_v", &buffer, counts)?;
        let call = self.call(Operation::ReduceScatterV, buffer.dtype(), buffer.len()).reducing(op);
        call.prepare(op, buffer.as_bytes_mut())?;
        self.start_parts(call, buffer, shares)
    }

    /// As [`all_gather_v_async`](Self::all_gather_v_async), where each rank's elements stand in their place already: in
    /// `buffer`, behind those of the ranks before it. [`Work::wait`] gives the buffer back, with all ranks' elements.
    ///
    /// # Errors
    /// As [`all_gather_v_async`](Self::all_gather_v_async).
    pub fn all_gather_v_in_place_async(&self, buffer: Buffer, counts: &[usize]) -> Result<Work> {
        let shares = self.parts("all_gather_v", &buffer, counts)?;
        let call = self.call(Operation::AllGatherVInPlace, buffer.dtype(), buffer.len());
        self.start_parts(call, buffer, shares)
    }

    /// As [`all_to_all`](Self::all_to_all); [`Work::wait`] gives a buffer with a block from each rank.
    ///
    /// # Errors
    /// At once if the group has failed or the buffer cannot be divided evenly; otherwise from [`Work::wait`].
    pub fn all_to_all_async(&self, buffer: Buffer) -> Result<Work> {
        self.check_all_to_all(buffer.len(), buffer.len())?;
        let output = Buffer::zeroed(buffer.dtype(), buffer.len());
        let call = self.call(Operation::AllToAll, buffer.dtype(), buffer.len());
        self.start_apart(call, buffer, output)
    }

    /// As [`all_to_all_v`](Self::all_to_all_v); [`Work::wait`] gives a buffer with a block from each rank.
    ///
    /// # Errors
    /// At once if the group has failed or the counts do not fit; otherwise from [`Work::wait`].
    pub fn all_to_all_v_async(&self, buffer: Buffer, sent: &[usize], received: &[usize]) -> Result<Work> {
        let world = self.world_size();
        let (sent, received) = (Shares::new(sent, world)?, Shares::new(received, world)?);
        self.check_all_to_all_v((buffer.len(), &sent), (received.total(), &received))?;
        let mut output = Buffer::zeroed(buffer.dtype(), received.total());
        let call = self.call(Operation::AllToAllV, buffer.dtype(), 0);
        self.start_with(call, move |engine, patience| {
            let (input, into) = (buffer.as_bytes(), output.as_bytes_mut());
            let memory = Memory::Shared { input, output: into, sent: &sent, received: &received };
            engine.collective(call, memory, patience)?;
            Ok(output)
        })
    }

    /// As [`all_reduce_coalesced`](Self::all_reduce_coalesced), of buffers of one type. [`Work::wait`] gives one buffer with
    /// the elements of all, in their order.
    ///
    /// # Errors
    /// At once if the group has failed, the types differ or `op` is not defined for them; otherwise from [`Work::wait`].
    pub fn all_reduce_coalesced_async(&self, buffers: &[Buffer], op: ReduceOp) -> Result<Work> {
        let Some(first) = buffers.first() else {
            return Err(Error::invalid_argument("all_reduce_coalesced: there is no buffer"));
        };
        let dtype = first.dtype();
        for buffer in buffers {
            same_type("all_reduce_coalesced", first, buffer)?;
        }
        let mut packed = Buffer::zeroed(dtype, buffers.iter().map(Buffer::len).sum());
        let mut rest = packed.as_bytes_mut();
        for buffer in buffers {
            let (head, tail) = rest.split_at_mut(buffer.as_bytes().len());
            head.copy_from_slice(buffer.as_bytes());
            rest = tail;
        }
        let call = self.call(Operation::AllReduceCoalesced, dtype, packed.len()).reducing(op);
        call.prepare(op, packed.as_bytes_mut())?;
        self.start_with(call, move |engine, patience| {
            engine.collective(call, Memory::InPlace(packed.as_bytes_mut()), patience)?;
            Ok(packed)
        })
    }

    fn parts(&self, operation: &str, buffer: &Buffer, counts: &[usize]) -> Result<Shares> {
        let shares = Shares::new(counts, self.world_size())?;
        check_sum(operation, "buffer", buffer.len(), "the counts add up to", shares.total())?;
        Ok(shares)
    }

    fn start_parts(&self, call: Call, mut buffer: Buffer, shares: Shares) -> Result<Work> {
        self.start_with(call, move |engine, patience| {
            let memory = Memory::Parts { data: buffer.as_bytes_mut(), shares: &shares };
            engine.collective(call, memory, patience)?;
            Ok(buffer)
        })
    }

    fn start_apart(&self, call: Call, input: Buffer, mut output: Buffer) -> Result<Work> {
        self.start_with(call, move |engine, patience| {
            let (input, into) = (input.as_bytes(), output.as_bytes_mut());
            engine.collective(call, Memory::Apart { input, output: into }, patience)?;
            Ok(output)
        })
    }
}

fn same_type(operation: &str, one: &Buffer, other: &Buffer) -> Result<()> {
    if one.dtype() == other.dtype() {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "{operation}: one buffer holds {}, another {}",
        one.dtype(),
        other.dtype()
    )))
}
