//! Messages between two ranks, beside the collectives.

use super::{ProcessGroup, Work};
use crate::buffer::Buffer;
use crate::dtype::Element;
use crate::error::Result;
use crate::rank::Rank;
use crate::wire::frame::{Call, Operation};

/// A message of a batch; see [`ProcessGroup::batch_isend_irecv`].
#[doc(alias = "P2POp")]
#[derive(Debug)]
#[non_exhaustive]
pub enum P2pOp {
    /// Sends `buffer` to the rank `to`.
    Send {
        /// What is sent.
        buffer: Buffer,
        /// Who receives it.
        to: Rank,
    },
    /// Receives into `buffer` from the rank `from`.
    Recv {
        /// Says type and length of what is received, and holds it in the end.
        buffer: Buffer,
        /// Who sends it.
        from: Rank,
    },
}

impl P2pOp {
    /// Sends `buffer` to the rank `to`.
    pub fn send(buffer: Buffer, to: Rank) -> Self {
        Self::Send { buffer, to }
    }

    /// Receives into `buffer` from the rank `from`.
    pub fn recv(buffer: Buffer, from: Rank) -> Self {
        Self::Recv { buffer, from }
    }

    fn peer(&self) -> Rank {
        match self {
            Self::Send { to, .. } => *to,
            Self::Recv { from, .. } => *from,
        }
    }
}

/// # Messages between two ranks
///
/// Messages have connections, and where ranks share memory rings, of their own: whatever is in flight, no message stands
/// in a collective's way, nor a collective in a message's. Between two ranks the messages of one direction arrive in the
/// order in which they were sent; the receiver names type and length, and a difference is an error on both ranks that
/// shows both calls. There are no tags, as messages that overtake others would need memory that nobody has set aside:
/// what must not wait for each other goes through groups of its own ([`new_group`](Self::new_group)).
impl ProcessGroup {
    /// Sends `data` to `to`, which must receive as many elements of the same type. Returns when all of it is on its way,
    /// which may be before it has arrived: a short message does not wait for its receiver, a long one does.
    ///
    /// Two ranks that both send a long message before they receive wait for each other until the time-out, whose error
    /// says so. Let one receive first, or use [`isend`](Self::isend).
    ///
    /// # Errors
    /// If `to` is this rank or no rank of this group, if a peer fails, leaves or expects something else, or if the
    /// time-out passes.
    pub fn send<T: Element>(&self, data: &[T], to: Rank) -> Result<()> {
        let to = self.peer(to)?;
        self.begin()?;
        let call = Call::new(Operation::PointToPoint, T::DTYPE, data.len());
        self.inner.messages.send(call, to, bytemuck::cast_slice(data), self.patience().deadline())
    }

    /// Receives into `data` the next message from `from`.
    ///
    /// # Errors
    /// As [`send`](Self::send). `data` is then unspecified.
    pub fn recv<T: Element>(&self, data: &mut [T], from: Rank) -> Result<()> {
        let from = self.peer(from)?;
        self.begin()?;
        let call = Call::new(Operation::PointToPoint, T::DTYPE, data.len());
        self.inner.messages.recv(call, from, bytemuck::cast_slice_mut(data), self.patience().deadline())
    }

    /// Starts to send `buffer` to `to`; [`Work::wait`] gives the buffer back when all of it is on its way.
    ///
    /// All messages in flight move at the same time, and any number may be.
    ///
    /// ```
    /// use phalanx::{Buffer, DType, ProcessGroup, Rank, WorldSize};
    /// let groups = ProcessGroup::in_process(WorldSize::new(2)?)?;
    /// std::thread::scope(|scope| {
    ///     for group in groups {
    ///         scope.spawn(move || {
    ///             let peer = Rank::new(1 - group.rank().get());
    ///             let sent = group.isend(Buffer::from_slice(&[group.rank().get() as i32; 3]), peer)?;
    ///             let received = group.irecv(Buffer::zeroed(DType::I32, 3), peer)?;
    ///             group.barrier()?; // a collective meanwhile
    ///             sent.wait()?;
    ///             assert_eq!(received.wait()?.as_slice::<i32>()?, [peer.get() as i32; 3]);
    ///             Ok::<(), phalanx::Error>(())
    ///         });
    ///     }
    /// });
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// At once if `to` is this rank or no rank of this group, or the group has failed; otherwise from [`Work::wait`].
    pub fn isend(&self, buffer: Buffer, to: Rank) -> Result<Work> {
        self.start_one(P2pOp::send(buffer, to))
    }

    /// Starts to receive the next message from `from`, of the type and length of `buffer`; [`Work::wait`] gives the
    /// buffer with the message in it.
    ///
    /// # Errors
    /// As [`isend`](Self::isend).
    pub fn irecv(&self, buffer: Buffer, from: Rank) -> Result<Work> {
        self.start_one(P2pOp::recv(buffer, from))
    }

    /// Starts all of `ops` at once, and gives their works in the same order. Whatever the order of the operations, they
    /// do not wait for each other, except for those of one direction with one peer.
    ///
    /// ```
    /// use phalanx::{Buffer, DType, P2pOp, ProcessGroup, Rank, WorldSize};
    ///
    /// /// Each rank's boundary goes to the next, around the ring.
    /// fn exchange(group: &ProcessGroup, boundary: &[f32]) -> phalanx::Result<Vec<f32>> {
    ///     let (rank, world) = (group.rank().get(), group.world_size().get());
    ///     let (next, previous) = (Rank::new((rank + 1) % world), Rank::new((rank + world - 1) % world));
    ///     let mut works = group.batch_isend_irecv(vec![
    ///         P2pOp::recv(Buffer::zeroed(DType::F32, boundary.len()), previous),
    ///         P2pOp::send(Buffer::from_slice(boundary), next),
    ///     ])?;
    ///     works.remove(1).wait()?;
    ///     Ok(works.remove(0).wait()?.as_slice::<f32>()?.to_vec())
    /// }
    ///
    /// let groups = ProcessGroup::in_process(WorldSize::new(3)?)?;
    /// std::thread::scope(|scope| {
    ///     let ranks: Vec<_> = groups.iter().map(|group| {
    ///         scope.spawn(move || exchange(group, &[group.rank().get() as f32]))
    ///     }).collect();
    ///     for (rank, got) in ranks.into_iter().enumerate() {
    ///         assert_eq!(got.join().unwrap()?, [((rank + 2) % 3) as f32]);
    ///     }
    ///     Ok::<(), phalanx::Error>(())
    /// })?;
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`isend`](Self::isend). If one operation is refused, none is started.
    pub fn batch_isend_irecv(&self, ops: Vec<P2pOp>) -> Result<Vec<Work>> {
        for op in &ops {
            self.peer(op.peer())?;
        }
        self.begin()?;
        match ops.is_empty() {
            true => Ok(Vec::new()),
            false => self.inner.messages.start(ops, self.patience().deadline()),
        }
    }

    fn start_one(&self, op: P2pOp) -> Result<Work> {
        let mut works = self.batch_isend_irecv(vec![op])?;
        works.pop().ok_or_else(|| crate::error::Error::invalid_argument("no message was started"))
    }
}
