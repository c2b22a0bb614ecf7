//! Operations that run on the group's worker thread while the caller goes on. They own their buffers until they are
//! done.

use std::time::Instant;

use super::engine::Engine;
use super::{ProcessGroup, Work};
use crate::buffer::Buffer;
use crate::collective::Memory;
use crate::collective::{self, Counts, ReduceOp};
use crate::deadline::Timeout;
use crate::error::Result;
use crate::rank::Rank;
use crate::trace::Track;
use crate::wire::frame::{Call, Operation};

impl ProcessGroup {
    /// As [`all_reduce`](Self::all_reduce); [`Work::wait`] returns the combined buffer.
    ///
    /// # Errors
    /// At once if the group has failed or `op` is not defined for the type. Also at once if the system starts no thread for asynchronous
    /// calls: this fails the group on every rank. Otherwise from [`Work::wait`].
    #[doc(alias("allreduce_async", "async_op"))]
    pub fn all_reduce_async(&self, mut buffer: Buffer, op: ReduceOp) -> Result<Work> {
        let (dtype, elements) = (buffer.dtype(), buffer.len());
        let call = self.call(Operation::AllReduce, dtype, elements).reducing(op);
        call.prepare(op, buffer.as_bytes_mut())?;
        self.start(call, buffer)
    }

    /// As [`broadcast`](Self::broadcast); [`Work::wait`] returns the root's elements.
    ///
    /// # Errors
    /// At once if the group has failed or `root` is not in it; otherwise from [`Work::wait`].
    pub fn broadcast_async(&self, buffer: Buffer, root: Rank) -> Result<Work> {
        let root = self.member(root)?;
        let (dtype, elements) = (buffer.dtype(), buffer.len());
        self.start(self.call(Operation::Broadcast, dtype, elements).rooted_at(root), buffer)
    }

    /// As [`all_gather`](Self::all_gather); [`Work::wait`] returns a buffer with all ranks' elements.
    ///
    /// # Errors
    /// At once if the group has failed or there is too little memory; otherwise from [`Work::wait`].
    pub fn all_gather_async(&self, buffer: Buffer) -> Result<Work> {
        let (dtype, elements) = (buffer.dtype(), buffer.len());
        let mut gathered = self.alloc(dtype, elements * self.world_size().count())?;
        let own = buffer.as_bytes();
        let start = self.rank().index() * own.len();
        gathered.as_bytes_mut()[start..start + own.len()].copy_from_slice(own);
        self.start(self.call(Operation::AllGather, dtype, elements), gathered)
    }

    /// As [`reduce_scatter`](Self::reduce_scatter); [`Work::wait`] returns this rank's chunk.
    ///
    /// # Errors
    /// At once if the group has failed, the buffer cannot be divided evenly, `op` is not defined for its type or there is too little memory;
    /// otherwise from [`Work::wait`].
    pub fn reduce_scatter_async(&self, mut buffer: Buffer, op: ReduceOp) -> Result<Work> {
        let (dtype, elements, world) = (buffer.dtype(), buffer.len(), self.world_size());
        self.check_length("reduce_scatter", "input", elements, "output", elements / world.count())?;
        let own = collective::chunk(elements, world, self.rank().index());
        let call = self.call(Operation::ReduceScatter, dtype, elements).reducing(op);
        call.prepare(op, buffer.as_bytes_mut())?;
        let mut chunk = Buffer::try_zeroed(dtype, own.len())?;
        self.start_then(call, buffer, move |buffer| {
            let bytes = own.start * dtype.size()..own.end * dtype.size();
            chunk.as_bytes_mut().copy_from_slice(&buffer.as_bytes()[bytes]);
            chunk
        })
    }

    pub(super) fn start(&self, call: Call, buffer: Buffer) -> Result<Work> {
        self.start_then(call, buffer, |buffer| buffer)
    }

    fn start_then(
        &self,
        call: Call,
        mut buffer: Buffer,
        finish: impl FnOnce(Buffer) -> Buffer + Send + 'static,
    ) -> Result<Work> {
        self.start_with(call, move |engine, timeout| {
            engine.collective(call, Memory::InPlace(buffer.as_bytes_mut()), timeout)?;
            Ok(finish(buffer))
        })
    }

    pub(super) fn start_out_of_place(&self, call: Call, input: Buffer, mut output: Buffer) -> Result<Work> {
        self.start_with(call, move |engine, timeout| {
            let (input, into) = (input.as_bytes(), output.as_bytes_mut());
            engine.collective(call, Memory::OutOfPlace { input, output: into }, timeout)?;
            Ok(output)
        })
    }

    pub(super) fn start_out_of_place_v(
        &self,
        call: Call,
        input: Buffer,
        mut output: Buffer,
        (sent, received): (Counts, Counts),
    ) -> Result<Work> {
        self.start_with(call, move |engine, timeout| {
            let (input, into) = (input.as_bytes(), output.as_bytes_mut());
            let memory = Memory::OutOfPlaceV { input, output: into, sent: &sent, received: &received };
            engine.collective(call, memory, timeout)?;
            Ok(output)
        })
    }

    /// Queues `work`, which owns its buffers, for the group's worker.
    pub(super) fn start_with(
        &self,
        call: Call,
        work: impl FnOnce(&mut Engine, &Timeout) -> Result<Buffer> + Send + 'static,
    ) -> Result<Work> {
        self.begin()?;
        // The deadline counts from now, not from the operation's turn.
        let deadline = self.operation_timeout().deadline();
        let (pending, completer) = Work::pending_in(self.inner.health.clone());
        let trace = self.trace();
        self.inner.queue.submit(
            &deadline.into(),
            Box::new(move |engine| {
                let begin = Instant::now();
                let outcome = work(engine, &deadline.into());
                if trace.is_enabled() {
                    trace.complete(Track::Communication, call.to_string(), begin, Instant::now(), &[]);
                }
                completer.complete(outcome);
            }),
        )?;
        Ok(pending.of(&self.inner))
    }
}
