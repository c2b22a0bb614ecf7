//! Point-to-point messages between two ranks.

use super::{ProcessGroup, Work};
use crate::buffer::Buffer;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::transport::messages::length;
use crate::wire::frame::{Call, Operation};

/// A message of a batch; see [`ProcessGroup::batch_isend_irecv`].
#[doc(alias = "P2POp")]
#[derive(Debug)]
#[non_exhaustive]
pub enum P2pOp {
    /// Sends `buffer` to the rank `to`.
    Send {
        /// The elements to send.
        buffer: Buffer,
        /// The receiver.
        to: Rank,
    },
    /// Receives into `buffer` from the rank `from`.
    Recv {
        /// Its type and length are those of the message, which it holds in the end.
        buffer: Buffer,
        /// The sender.
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
/// Messages have connections of their own, or rings if ranks share memory. So no message in flight delays a collective,
/// and no collective delays a message. Between two ranks the messages of one direction arrive in the
/// order in which they were sent. The receiver states type and length; if they differ, both ranks get an error that
/// shows both calls. There are no tags, because a message that overtakes others would need memory to wait in.
/// Use separate groups for messages that must not wait for each other ([`new_group`](Self::new_group)).
impl ProcessGroup {
    /// Sends `data` to `to`, which must receive the same number of elements of the same type. Returns when all of it
    /// has been sent, which may be before it has arrived: a short message does not wait for its receiver, a long one
    /// does.
    ///
    /// If two ranks both send a long message before they receive, they wait for each other until the time-out, whose
    /// error says so. Let one receive first, or use [`isend`](Self::isend).
    ///
    /// # Errors
    /// If `to` is this rank or not a rank of this group, if a peer fails, leaves or expects something else, or if the
    /// time-out passes.
    pub fn send<T: Element>(&self, data: &[T], to: Rank) -> Result<()> {
        let to = self.peer(to)?;
        self.begin()?;
        let call = Call::new(Operation::PointToPoint, T::DTYPE, data.len());
        self.inner.messages.send(call, to, &[bytemuck::cast_slice(data)], &self.operation_timeout())
    }

    /// As [`send`](Self::send) of the bytes of these parts, one after the other, without a copy that joins them.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    #[doc(hidden)]
    pub fn send_parts(&self, parts: &[&[u8]], to: Rank) -> Result<()> {
        let to = self.peer(to)?;
        self.begin()?;
        let call = Call::new(Operation::PointToPoint, DType::U8, length(parts));
        self.inner.messages.send(call, to, parts, &self.operation_timeout())
    }

    /// Receives into `data` the next message from `from`.
    ///
    /// # Errors
    /// As [`send`](Self::send). `data` is then unspecified.
    pub fn recv<T: Element>(&self, data: &mut [T], from: Rank) -> Result<()> {
        let from = self.peer(from)?;
        self.begin()?;
        let call = Call::new(Operation::PointToPoint, T::DTYPE, data.len());
        self.inner.messages.recv(call, from, bytemuck::cast_slice_mut(data), &self.operation_timeout())
    }

    /// Whether a message from `from` has arrived that no call receives yet. If so, [`recv`](Self::recv) does not wait for the
    /// sender's call. For programs that receive from the rank that sends first. A rank that has left the group sends nothing more, which is no
    /// error here: [`recv`](Self::recv) gives it, and [`has_ended`](Self::has_ended) says so.
    ///
    /// ```
    /// use phalanx::{ProcessGroup, Rank, WorldSize};
    /// let groups = ProcessGroup::in_process(WorldSize::new(2)?)?;
    /// let (first, second) = (&groups[0], &groups[1]);
    /// assert!(!second.probe(first.rank())?);
    /// first.send(&[7i32], second.rank())?;
    /// assert!(second.probe(first.rank())?);
    /// let mut got = [0i32];
    /// second.recv(&mut got, first.rank())?;
    /// assert!(got == [7] && !second.probe(first.rank())?);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// If `from` is this rank or not a rank of this group, or the group has failed.
    #[doc(alias = "MPI_Iprobe")]
    pub fn probe(&self, from: Rank) -> Result<bool> {
        let from = self.peer(from)?;
        self.failure().map_or(Ok(()), Err)?;
        self.inner.messages.has_arrived(from)
    }

    /// Whether `from` has left the group, and each of its messages has been received. A program that waits with [`probe`](Self::probe) for the rank that sends
    /// first ends its wait when this is so of all other ranks.
    ///
    /// # Errors
    /// As [`probe`](Self::probe).
    pub fn has_ended(&self, from: Rank) -> Result<bool> {
        let from = self.peer(from)?;
        self.failure().map_or(Ok(()), Err)?;
        Ok(self.inner.messages.is_at_end(from))
    }

    /// The error of a receive from the rank that sends first, if none can send any more: every other rank has left, and all that they sent has
    /// been received. For adapters.
    #[doc(hidden)]
    pub fn left_by_all(&self) -> Option<Error> {
        let is_at_end = |peer: Rank| peer == self.rank() || self.inner.messages.is_at_end(peer);
        self.inner.world.ranks().all(is_at_end).then(|| self.inner.health.all_left())
    }

    /// Starts to send `buffer` to `to`; [`Work::wait`] returns the buffer when all of it has been sent.
    ///
    /// Any number of messages may be in flight; all of them move at the same time.
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
    /// At once if `to` is this rank or not a rank of this group, if the group has failed, or if the system starts no thread for
    /// messages: then no message has begun, and the group stays usable. Otherwise from [`Work::wait`].
    pub fn isend(&self, buffer: Buffer, to: Rank) -> Result<Work> {
        self.start_one(P2pOp::send(buffer, to))
    }

    /// Starts to receive the next message from `from`, of the type and length of `buffer`; [`Work::wait`] returns the
    /// buffer with the message in it.
    ///
    /// # Errors
    /// As [`isend`](Self::isend).
    pub fn irecv(&self, buffer: Buffer, from: Rank) -> Result<Work> {
        self.start_one(P2pOp::recv(buffer, from))
    }

    /// Starts all of `ops` at once, and returns their works in the same order. The operations do not wait for each
    /// other, whatever their order, except for those of one direction with one peer.
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
        if ops.is_empty() {
            return Ok(Vec::new());
        }
        let works = self.inner.messages.start(ops, self.operation_timeout().deadline())?;
        Ok(works.into_iter().map(|work| work.of(&self.inner)).collect())
    }

    fn start_one(&self, op: P2pOp) -> Result<Work> {
        let mut works = self.batch_isend_irecv(vec![op])?;
        works.pop().ok_or_else(|| Error::invalid_argument("no message was started"))
    }
}
