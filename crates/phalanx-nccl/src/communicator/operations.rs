//! The calls.

use phalanx::{Rank, ReduceOp, Result};

use super::call::Call;
use super::{Communicator, Work};
use crate::cuda::{DeviceMemory, Span};

/// # Calls
/// Each one is queued on the communicator's [stream](Communicator::stream). With `_async` it takes the memory, and gives it back with
/// the [`Work`]; else this thread waits. Operations are sum, avg, product, min and max, and for floats sums of products with a rank's own factor
/// ([`ReduceOp::PreMulSum`]); integers may be averaged, rounded as NCCL does.
///
/// All of them fail if the sizes do not fit, the memory is on another device, a graph is captured from the communicator's stream, or the communicator has
/// failed.
impl Communicator {
    /// Combines the ranks' elements, in place on every rank.
    ///
    /// # Errors
    /// As all [calls](Self#calls).
    pub fn all_reduce<M: DeviceMemory>(&self, memory: &mut M, op: ReduceOp) -> Result<()> {
        self.run(&[Call::AllReduce { memory: Span::of(memory), op }], memory)
    }

    /// As [`all_reduce`](Self::all_reduce), without waiting.
    ///
    /// # Errors
    /// As all [calls](Self#calls).
    pub fn all_reduce_async<M: DeviceMemory>(&self, memory: M, op: ReduceOp) -> Result<Work<M>> {
        self.start(&[Call::AllReduce { memory: Span::of(&memory), op }], memory)
    }

    /// Copies the root's elements to every rank.
    ///
    /// # Errors
    /// As all [calls](Self#calls).
    pub fn broadcast<M: DeviceMemory>(&self, memory: &mut M, root: Rank) -> Result<()> {
        self.run(&[Call::Broadcast { memory: Span::of(memory), root }], memory)
    }

    /// As [`broadcast`](Self::broadcast), without waiting.
    ///
    /// # Errors
    /// As all [calls](Self#calls).
    pub fn broadcast_async<M: DeviceMemory>(&self, memory: M, root: Rank) -> Result<Work<M>> {
        self.start(&[Call::Broadcast { memory: Span::of(&memory), root }], memory)
    }

    /// Combines the ranks' elements, in place on the root; the others keep theirs.
    ///
    /// # Errors
    /// As all [calls](Self#calls).
    pub fn reduce<M: DeviceMemory>(&self, memory: &mut M, root: Rank, op: ReduceOp) -> Result<()> {
        self.run(&[Call::Reduce { memory: Span::of(memory), op, root }], memory)
    }

    /// As [`reduce`](Self::reduce), without waiting.
    ///
    /// # Errors
    /// As all [calls](Self#calls).
    pub fn reduce_async<M: DeviceMemory>(&self, memory: M, root: Rank, op: ReduceOp) -> Result<Work<M>> {
        self.start(&[Call::Reduce { memory: Span::of(&memory), op, root }], memory)
    }

    /// Copies the ranks' `input`s, in the order of the ranks, to every rank's `output`.
    ///
    /// # Errors
    /// As all [calls](Self#calls).
    #[doc(alias = "all_gather_into_tensor")]
    pub fn all_gather<I, O>(&self, input: &mut I, output: &mut O) -> Result<()>
    where
        I: DeviceMemory,
        O: DeviceMemory<Element = I::Element>,
    {
        let call = Call::AllGather { input: Span::of(input), output: Span::of(output) };
        self.run(&[call], &mut (input, output))
    }

    /// As [`all_gather`](Self::all_gather), without waiting.
    ///
    /// # Errors
    /// As all [calls](Self#calls).
    pub fn all_gather_async<I, O>(&self, input: I, output: O) -> Result<Work<(I, O)>>
    where
        I: DeviceMemory,
        O: DeviceMemory<Element = I::Element>,
    {
        let call = Call::AllGather { input: Span::of(&input), output: Span::of(&output) };
        self.start(&[call], (input, output))
    }

    /// As [`all_gather`](Self::all_gather), but rank r brings `counts[r]` elements. Every rank gives the same counts.
    ///
    /// NCCL has no function for it: this is one broadcast for each rank that has elements, launched as one.
    ///
    /// # Errors
    /// As all [calls](Self#calls).
    #[doc(alias = "allgatherv")]
    pub fn all_gather_v<I, O>(&self, input: &mut I, output: &mut O, counts: &[usize]) -> Result<()>
    where
        I: DeviceMemory,
        O: DeviceMemory<Element = I::Element>,
    {
        let call =
            Call::AllGatherV { input: Span::of(input), output: Span::of(output), counts: counts.into() };
        self.run(&[call], &mut (input, output))
    }

    /// As [`all_gather_v`](Self::all_gather_v), without waiting.
    ///
    /// # Errors
    /// As all [calls](Self#calls).
    pub fn all_gather_v_async<I, O>(&self, input: I, output: O, counts: &[usize]) -> Result<Work<(I, O)>>
    where
        I: DeviceMemory,
        O: DeviceMemory<Element = I::Element>,
    {
        let call =
            Call::AllGatherV { input: Span::of(&input), output: Span::of(&output), counts: counts.into() };
        self.start(&[call], (input, output))
    }

    /// Combines the ranks' `input`s, and gives rank r the r-th part of the result.
    ///
    /// # Errors
    /// As all [calls](Self#calls).
    #[doc(alias = "reduce_scatter_tensor")]
    pub fn reduce_scatter<I, O>(&self, input: &mut I, output: &mut O, op: ReduceOp) -> Result<()>
    where
        I: DeviceMemory,
        O: DeviceMemory<Element = I::Element>,
    {
        let call = Call::ReduceScatter { input: Span::of(input), output: Span::of(output), op };
        self.run(&[call], &mut (input, output))
    }

    /// As [`reduce_scatter`](Self::reduce_scatter), without waiting.
    ///
    /// # Errors
    /// As all [calls](Self#calls).
    pub fn reduce_scatter_async<I, O>(&self, input: I, output: O, op: ReduceOp) -> Result<Work<(I, O)>>
    where
        I: DeviceMemory,
        O: DeviceMemory<Element = I::Element>,
    {
        let call = Call::ReduceScatter { input: Span::of(&input), output: Span::of(&output), op };
        self.start(&[call], (input, output))
    }

    /// As [`reduce_scatter`](Self::reduce_scatter), but rank r's part has `counts[r]` elements. Every rank gives the same counts.
    ///
    /// NCCL has no function for it: this is one reduce for each rank that has elements, launched as one.
    ///
    /// # Errors
    /// As all [calls](Self#calls).
    pub fn reduce_scatter_v<I, O>(
        &self,
        input: &mut I,
        output: &mut O,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<()>
    where
        I: DeviceMemory,
        O: DeviceMemory<Element = I::Element>,
    {
        let (input_span, output_span, counts) = (Span::of(input), Span::of(output), counts.into());
        let call = Call::ReduceScatterV { input: input_span, output: output_span, counts, op };
        self.run(&[call], &mut (input, output))
    }

    /// As [`reduce_scatter_v`](Self::reduce_scatter_v), without waiting.
    ///
    /// # Errors
    /// As all [calls](Self#calls).
    pub fn reduce_scatter_v_async<I, O>(
        &self,
        input: I,
        output: O,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Work<(I, O)>>
    where
        I: DeviceMemory,
        O: DeviceMemory<Element = I::Element>,
    {
        let (input_span, output_span, counts) = (Span::of(&input), Span::of(&output), counts.into());
        let call = Call::ReduceScatterV { input: input_span, output: output_span, counts, op };
        self.start(&[call], (input, output))
    }

    /// Sends the r-th part of `input` to rank r, and puts what rank r sends into the r-th part of `output`.
    ///
    /// # Errors
    /// As all [calls](Self#calls).
    #[doc(alias = "all_to_all_single")]
    pub fn all_to_all<I, O>(&self, input: &mut I, output: &mut O) -> Result<()>
    where
        I: DeviceMemory,
        O: DeviceMemory<Element = I::Element>,
    {
        let call = Call::AllToAll { input: Span::of(input), output: Span::of(output) };
        self.run(&[call], &mut (input, output))
    }

    /// As [`all_to_all`](Self::all_to_all), without waiting.
    ///
    /// # Errors
    /// As all [calls](Self#calls).
    pub fn all_to_all_async<I, O>(&self, input: I, output: O) -> Result<Work<(I, O)>>
    where
        I: DeviceMemory,
        O: DeviceMemory<Element = I::Element>,
    {
        let call = Call::AllToAll { input: Span::of(&input), output: Span::of(&output) };
        self.start(&[call], (input, output))
    }

    /// Sends the elements to `peer`, which calls [`recv`](Self::recv) for as many. Two ranks that send to each other do it in a
    /// [group](Self::group_calls), or wait for each other.
    ///
    /// # Errors
    /// As all [calls](Self#calls).
    pub fn send<M: DeviceMemory>(&self, memory: &mut M, peer: Rank) -> Result<()> {
        self.run(&[Call::Send { memory: Span::of(memory), peer }], memory)
    }

    /// As [`send`](Self::send), without waiting.
    ///
    /// # Errors
    /// As all [calls](Self#calls).
    pub fn send_async<M: DeviceMemory>(&self, memory: M, peer: Rank) -> Result<Work<M>> {
        self.start(&[Call::Send { memory: Span::of(&memory), peer }], memory)
    }

    /// Receives the elements that `peer` sends.
    ///
    /// # Errors
    /// As all [calls](Self#calls).
    pub fn recv<M: DeviceMemory>(&self, memory: &mut M, peer: Rank) -> Result<()> {
        self.run(&[Call::Recv { memory: Span::of(memory), peer }], memory)
    }

    /// As [`recv`](Self::recv), without waiting.
    ///
    /// # Errors
    /// As all [calls](Self#calls).
    pub fn recv_async<M: DeviceMemory>(&self, memory: M, peer: Rank) -> Result<Work<M>> {
        self.start(&[Call::Recv { memory: Span::of(&memory), peer }], memory)
    }

    /// Waits until every rank's device has done what was called before it.
    ///
    /// # Errors
    /// As all [calls](Self#calls).
    pub fn barrier(&self) -> Result<()> {
        let memory = Span::of(&self.owner.token);
        self.run(&[Call::Barrier { memory }], &mut ())
    }

    /// Queues the calls, which use memory of `_lent`, and waits for them.
    fn run<L: ?Sized>(&self, calls: &[Call], _lent: &mut L) -> Result<()> {
        // SAFETY: the memory is lent until this function returns: when the calls are done, or when the communicator has failed. What
        // follows then, `DeviceMemory` says.
        let (flight, launched) = unsafe { self.owner.shared.launch(calls, self.timeout) }?;
        launched?;
        loop {
            if let Some(outcome) = self.owner.shared.wait(&flight, None) {
                return outcome;
            }
        }
    }

    /// Queues the calls, which use `memory`.
    pub(super) fn start<M: Send + 'static>(&self, calls: &[Call], memory: M) -> Result<Work<M>> {
        // SAFETY: the work has the memory until the calls are done, or the communicator has failed. What follows then,
        // `DeviceMemory` says.
        let (flight, launched) = unsafe { self.owner.shared.launch(calls, self.timeout) }?;
        let work = Work::new(self.owner.shared.clone(), flight, memory);
        // If the launch has failed, NCCL may have queued it: the drop of the work keeps the memory until the abort is over.
        launched.map(|()| work)
    }
}
