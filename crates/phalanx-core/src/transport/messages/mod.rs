//! Point-to-point messages, apart from the collectives' data.
//!
//! Each pair of ranks has a line in each direction: a connection or a ring. Each line has one end here and one at the
//! peer. Lines are independent: the thread whose turn it is drives one. An end never waits; [`Notifier`] does.

mod inbound;
mod notifier;
mod outbound;
mod rings;

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use phalanx_sys::processors;
use phalanx_sys::shared::ALIGNMENT;
use rustix::event::PollFlags;

pub(crate) use self::inbound::{Inbound, Receiving};
pub(crate) use self::notifier::Notifier;
pub(crate) use self::outbound::{Outbound, Sending, length};
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub(super) use self::rings::fuzz;
pub(crate) use self::rings::{Opened, RingAddress, RingLending, Rings, keys_of, rings};
use super::tcp::{Connection, Connections};
use crate::buffer::{AlignedBytes, Buffer};
use crate::error::{Error, Result};
use crate::health::Health;
use crate::rank::Rank;
use crate::wire::frame::{HEADER, Header};
use crate::wire::hello::Channel;
use crate::world_size::WorldSize;

/// A header in a ring, with the padding that aligns the elements after it.
const HEAD: usize = HEADER.next_multiple_of(ALIGNMENT);
/// A payload of up to so many bytes takes the place of the padding.
const INLINE: usize = HEAD - HEADER;
/// Bytes that are written to or read from a ring at once: the other end works on them meanwhile.
const CHUNK: usize = 8 << 10;
/// The same of a payload of more than [`LONG`] bytes, where that is sooner: 64 MiB took 7.0 ms so and 9.4 with short ones on a Xeon. On AMD's
/// processors it was not measured.
const LONG_CHUNK: usize = 32 << 10;
const LONG: usize = 1 << 20;
/// Bytes that are copied at once out of another process. Between two copies other lines have their turn.
const COPIED: usize = 1 << 20;

/// Bytes of a payload of so many that are written to or read from a ring at once.
fn chunk(payload: usize) -> usize {
    if payload > LONG && !processors::rereads_slowly() { LONG_CHUNK } else { CHUNK }
}

/// The lengths of payloads that are offered to the peer, which copies them out of this process: once, and not into a ring and out of it.
///
/// Shorter ones fit into a ring, so that a sender need not wait for its peer. What is longer than a cache is sooner through a ring, on which both
/// processors work at a time: 512 KiB took 17 us in one copy and 33 through a ring on a Xeon, and 2 MiB took 195 and 155. On AMD's processors, where a ring
/// takes 35 us for 1 MiB, this was not measured.
fn offered() -> Range<usize> {
    if processors::rereads_slowly() { 0..0 } else { 256 << 10..LONG + 1 }
}

/// One rank's ends of all its lines, by peer; none for itself.
pub(crate) struct Messages {
    pub outbound: Vec<Option<Outbound>>,
    pub inbound: Vec<Option<Inbound>>,
    pub notifier: Arc<Notifier>,
    /// Whether the rank polls before it sleeps: each rank of this host can have a processor.
    pub polls: bool,
    /// Sends the goodbye when the connections are no longer used.
    pub goodbye: Box<dyn Send + Sync>,
}

/// The result of one attempt to move a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing could be moved.
    Idle,
    /// Something was moved, but not all.
    Moved,
    /// The whole frame has been sent, or received.
    Done,
}

/// An end of a line, in either direction.
pub(crate) trait LineEnd: Send {
    /// A frame, perhaps partly moved.
    type Frame: Send;

    /// Whether it is the receiving end.
    const RECEIVES: bool;

    /// The rank at the other end.
    fn peer(&self) -> Rank;

    /// Moves as much of `frame` as possible now, from or into `buffer`.
    fn advance(&mut self, frame: &mut Self::Frame, buffer: &mut Buffer) -> Result<Step>;

    /// The socket to poll before the next step; None if a notifier says so.
    fn socket(&self) -> Option<(BorrowedFd<'_>, PollFlags)>;

    /// Whether something can be moved, or there is a socket to poll, as far as the memory shows.
    fn is_ready(&mut self) -> bool;

    /// Whether the connection stands, or may still come although the peer has left. A notifier tells when that changes.
    fn may_come(&self) -> bool;
}

impl Messages {
    /// The lines of a mesh: a ring if a pair has one, else the pair's connection.
    pub(crate) fn over(
        rank: Rank,
        connections: &Arc<Connections>,
        rings: Rings,
        health: &Arc<Health>,
        polls: bool,
        goodbye: Box<dyn Send + Sync>,
    ) -> Self {
        let Rings { own, links } = rings;
        let ends = links.into_iter().enumerate().map(|(index, link)| {
            let peer = Rank::new(index as u32);
            let stream = || Stream { connections: connections.clone(), peer, health: health.clone() };
            if peer == rank {
                return (None, None);
            }
            let (outbound, inbound) = match link {
                Some(link) => (
                    Outbound::ring(peer, link.outbound, link.peer.clone()),
                    Inbound::ring(peer, link.inbound, link.peer, link.pid),
                ),
                None => (Outbound::stream(stream()), Inbound::stream(stream())),
            };
            (Some(outbound), Some(inbound))
        });
        let (outbound, inbound) = ends.unzip();
        let notifier = Arc::new(Notifier::new(own));
        let waiting = notifier.clone();
        connections.on_connected(Box::new(move || waiting.notify()));
        Self { outbound, inbound, notifier, polls, goodbye }
    }

    /// The lines between the ranks of one process, by rank.
    pub(super) fn in_process(world: WorldSize, goodbyes: Vec<Box<dyn Send + Sync>>) -> Vec<Self> {
        let polls = processors::suffice_for(world.count());
        let notifiers: Vec<_> = world.ranks().map(|_| Arc::new(Notifier::new(None))).collect();
        let boxes: Vec<Vec<_>> =
            world.ranks().map(|_| world.ranks().map(|_| Arc::new(Mailbox::default())).collect()).collect();
        let lines = world.ranks().zip(goodbyes).map(|(rank, goodbye)| {
            let others = || world.ranks().map(|peer| (peer != rank).then_some(peer));
            let outbound = |peer: Rank| {
                let mailbox = boxes[rank.index()][peer.index()].clone();
                Outbound::mailbox(peer, mailbox, notifiers[peer.index()].clone())
            };
            let inbound = |peer: Rank| Inbound::mailbox(peer, boxes[peer.index()][rank.index()].clone());
            Self {
                outbound: others().map(|peer| peer.map(outbound)).collect(),
                inbound: others().map(|peer| peer.map(inbound)).collect(),
                notifier: notifiers[rank.index()].clone(),
                polls,
                goodbye,
            }
        });
        lines.collect()
    }
}

/// The frames that one rank of this process has sent to another and that have not been received yet. It is unbounded.
type Mailbox = Mutex<VecDeque<(Header, AlignedBytes)>>;

/// The connection for messages with a peer.
struct Stream {
    connections: Arc<Connections>,
    peer: Rank,
    health: Arc<Health>,
}

impl Stream {
    /// The connection; None if it is made at its first use, and does not stand yet.
    fn get(&self) -> Result<Option<&Connection>> {
        let stream = self.connections.get(Channel::Messages, self.peer);
        if stream.is_none() && !self.connections.is_peer(self.peer) {
            return Err(Error::invalid_argument(format!("there is no connection with rank {}", self.peer)));
        }
        Ok(stream)
    }

    fn ask(&self) {
        self.connections.ask(Channel::Messages, self.peer);
    }

    fn is_ready(&self) -> bool {
        self.connections.get(Channel::Messages, self.peer).is_some()
    }

    /// Once the group has failed, nobody makes a connection any more.
    fn may_come(&self) -> bool {
        !self.health.has_failed() && self.connections.may_come(Channel::Messages, self.peer)
    }

    fn socket(&self, flags: PollFlags) -> Option<(BorrowedFd<'_>, PollFlags)> {
        use std::os::fd::AsFd;
        self.get().ok().flatten().map(|stream| (stream.as_fd(), flags))
    }

    fn broken(&self, error: io::Error) -> Error {
        self.health.broken(self.peer, error)
    }
}

fn corrupt(phalanx_sys::shared::Corrupt: phalanx_sys::shared::Corrupt) -> Error {
    Error::malformed("a ring in shared memory is in a state that no peer may leave it in")
}
