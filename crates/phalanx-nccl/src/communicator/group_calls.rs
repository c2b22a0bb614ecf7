//! Several calls as one.

use std::fmt;

use phalanx::{Rank, ReduceOp, Result};

use super::call::Call;
use super::{Communicator, Work};
use crate::cuda::{DeviceMemory, Span};

/// Calls that are launched as one, as between `ncclGroupStart` and `ncclGroupEnd`: sends and receives in it do not wait for each
/// other, and their order may differ between ranks, but that the sends to one rank meet its receives in their order. Collectives come in the same order on
/// every rank: NCCL compares nothing, and would combine the memory of different ones. [`Work::wait`] gives the memory of all back, in the order in which it
/// was added.
///
/// ```no_run
/// # use phalanx_nccl::{Communicator, DeviceBuffer};
/// # fn exchange(nccl: &Communicator, mine: DeviceBuffer<f32>, theirs: DeviceBuffer<f32>) -> phalanx::Result<()> {
/// let world = nccl.world_size().get();
/// let next = phalanx::Rank::new((nccl.rank().get() + 1) % world);
/// let previous = phalanx::Rank::new((nccl.rank().get() + world - 1) % world);
/// let both = nccl.group_calls().send(mine, next).recv(theirs, previous).launch()?.wait()?;
/// assert_eq!(both.len(), 2);
/// # Ok(())
/// # }
/// ```
#[doc(alias("ncclGroupStart", "batch_isend_irecv", "all_reduce_coalesced"))]
#[must_use = "nothing is queued before `launch`"]
pub struct GroupCalls<M> {
    communicator: Communicator,
    calls: Vec<Call>,
    memory: Vec<M>,
}

impl Communicator {
    /// Collects calls that are launched as one.
    pub fn group_calls<M: DeviceMemory>(&self) -> GroupCalls<M> {
        GroupCalls { communicator: self.clone(), calls: Vec::new(), memory: Vec::new() }
    }
}

impl<M: DeviceMemory> GroupCalls<M> {
    /// Adds a send.
    pub fn send(self, memory: M, peer: Rank) -> Self {
        self.add(memory, |memory| Call::Send { memory, peer })
    }

    /// Adds a receive.
    pub fn recv(self, memory: M, peer: Rank) -> Self {
        self.add(memory, |memory| Call::Recv { memory, peer })
    }

    /// Adds an all_reduce.
    pub fn all_reduce(self, memory: M, op: ReduceOp) -> Self {
        self.add(memory, |memory| Call::AllReduce { memory, op })
    }

    /// Adds a broadcast.
    pub fn broadcast(self, memory: M, root: Rank) -> Self {
        self.add(memory, |memory| Call::Broadcast { memory, root })
    }

    /// Adds a reduce.
    pub fn reduce(self, memory: M, root: Rank, op: ReduceOp) -> Self {
        self.add(memory, |memory| Call::Reduce { memory, op, root })
    }

    /// Queues them.
    ///
    /// # Errors
    /// As all [calls](Communicator#calls); then none is queued, or the communicator has failed.
    pub fn launch(self) -> Result<Work<Vec<M>>> {
        self.communicator.start(&self.calls, self.memory)
    }

    fn add(mut self, memory: M, call: impl FnOnce(Span) -> Call) -> Self {
        self.calls.push(call(Span::of(&memory)));
        self.memory.push(memory);
        self
    }
}

impl<M> fmt::Debug for GroupCalls<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GroupCalls({})", super::call::name(&self.calls))
    }
}
