//! The receiving end of a line.

use std::io::{self, ErrorKind, IoSliceMut};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use phalanx_sys::shared::{ALIGNMENT, Answer, Consumer, Segment};
use rustix::event::PollFlags;

use super::{CHUNK, COPIED, HEAD, INLINE, LineEnd, Mailbox, Step, Stream, chunk, corrupt};
use crate::buffer::Buffer;
use crate::error::Result;
use crate::rank::Rank;
use crate::wire::frame::{HEADER, Header};

/// The receiving end of the line from a peer.
pub(crate) struct Inbound {
    peer: Rank,
    medium: Medium,
}

enum Medium {
    Stream(Stream),
    Ring {
        ring: Consumer,
        peer: Arc<Segment>,
        /// The peer's process.
        pid: u32,
    },
    Mailbox(Arc<Mailbox>),
}

/// A frame that is being received. The buffer of its payload is passed at each step, because it may belong to the
/// caller.
pub(crate) struct Receiving {
    rank: Rank,
    expect: Header,
    header: [u8; HEADER],
    header_filled: usize,
    /// Payload bytes already in the buffer.
    received: usize,
    /// The number of the offer to copy the payload out of the peer's process, until it is answered.
    offer: Option<u64>,
}

impl Receiving {
    /// The frame that `rank` expects from its own call.
    pub(crate) fn new(rank: Rank, expect: Header) -> Self {
        Self { rank, expect, header: [0; HEADER], header_filled: 0, received: 0, offer: None }
    }

    fn check(&self, peer: Rank) -> Result<()> {
        self.expect.check(&Header::decode(&self.header)?, self.rank, peer)
    }
}

impl Inbound {
    pub(super) fn stream(stream: Stream) -> Self {
        Self { peer: stream.peer, medium: Medium::Stream(stream) }
    }

    pub(super) fn ring(peer: Rank, ring: Consumer, segment: Arc<Segment>, pid: u32) -> Self {
        Self { peer, medium: Medium::Ring { ring, peer: segment, pid } }
    }

    pub(super) fn mailbox(peer: Rank, mailbox: Arc<Mailbox>) -> Self {
        Self { peer, medium: Medium::Mailbox(mailbox) }
    }

    /// As if the kernel did not allow copies from the peer.
    #[cfg(test)]
    pub(crate) fn may_not_copy(&mut self) {
        if let Medium::Ring { pid, .. } = &mut self.medium {
            *pid = u32::MAX;
        }
    }

    /// Receives what has arrived into `into`, which is as long as the frame's payload.
    pub(crate) fn pull(&mut self, frame: &mut Receiving, into: &mut [u8]) -> Result<Step> {
        let before = frame.header_filled + frame.received;
        match &mut self.medium {
            Medium::Stream(stream) => pull_from_stream(stream, frame, into)?,
            Medium::Ring { ring, peer, pid } => {
                pull_from_ring(ring, frame, into, self.peer)?;
                if let Some(number) = frame.offer {
                    if let Some(answer) = copy_offered(ring, frame, into, (number, *pid)) {
                        frame.offer = None;
                        ring.answer(number, answer);
                        peer.doorbell().ring();
                    }
                } else if frame.header_filled + frame.received > before && ring.was_half_full() {
                    peer.doorbell().ring();
                }
            }
            Medium::Mailbox(mailbox) => {
                let arrived = mailbox.lock().pop_front();
                if let Some((header, payload)) = arrived {
                    frame.expect.check(&header, frame.rank, self.peer)?;
                    into.copy_from_slice(payload.as_slice());
                    (frame.header_filled, frame.received) = (HEADER, into.len());
                }
            }
        }
        Ok(match (frame.header_filled, frame.received) {
            (HEADER, received) if received == into.len() => Step::Done,
            (header, received) if header + received > before => Step::Moved,
            _ => Step::Idle,
        })
    }

    /// The header of a message without a posted receive. Call it only between frames.
    pub(crate) fn unexpected(&mut self) -> Option<Header> {
        let mut bytes = [0; HEADER];
        match &mut self.medium {
            Medium::Stream(stream) => {
                let stream = stream.get().ok()??;
                let count = stream.peek(&mut bytes).ok()?;
                (count == HEADER).then_some(())?;
            }
            Medium::Ring { ring, .. } => bytes = *ring.peek(HEAD).ok()?.first_chunk()?,
            Medium::Mailbox(mailbox) => return mailbox.lock().front().map(|(header, _)| *header),
        }
        Header::decode(&bytes).ok()
    }

    /// Whether nothing is left to receive, of a peer that has left. Call it only between frames.
    pub(crate) fn is_at_end(&mut self) -> bool {
        let Medium::Stream(stream) = &mut self.medium else { return !self.is_ready() };
        match stream.get() {
            Ok(Some(connection)) => match connection.peek(&mut [0]) {
                Ok(count) => count == 0,
                // What is on the way comes before the end of a connection.
                Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
            },
            Ok(None) => !stream.may_come(),
            Err(_) => true,
        }
    }
}

fn pull_from_stream(stream: &Stream, frame: &mut Receiving, into: &mut [u8]) -> Result<()> {
    // The payload may be read before its header is checked, because its length is this rank's own.
    let room = &mut into[frame.received..];
    let missing = HEADER - frame.header_filled;
    let mut parts = [IoSliceMut::new(&mut frame.header[frame.header_filled..]), IoSliceMut::new(room)];
    // The peer makes it when it sends.
    let Some(connection) = stream.get()? else { return Ok(()) };
    let count = match connection.receive(&mut parts) {
        Ok(0) => return Err(stream.broken(io::Error::new(ErrorKind::UnexpectedEof, "its connection closed"))),
        Ok(count) => count,
        Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
        Err(error) => return Err(stream.broken(error)),
    };
    let to_header = count.min(missing);
    frame.header_filled += to_header;
    frame.received += count - to_header;
    if to_header > 0 && frame.header_filled == HEADER {
        frame.check(stream.peer)?;
    }
    Ok(())
}

/// Takes at most a chunk, and only whole lines: the last line of a payload is taken together with its padding.
fn pull_from_ring(ring: &mut Consumer, frame: &mut Receiving, into: &mut [u8], peer: Rank) -> Result<()> {
    if frame.header_filled == 0 {
        let head = ring.peek(HEAD).map_err(corrupt)?;
        let Some(header) = head.first_chunk::<HEADER>().filter(|_| head.len() == HEAD) else {
            return Ok(());
        };
        frame.header = *header;
        frame.header_filled = HEADER;
        if into.len() <= INLINE {
            into.copy_from_slice(&head[HEADER..HEADER + into.len()]);
            frame.received = into.len();
        } else if let Some(number) = head[HEADER..].first_chunk().map(|number| u64::from_le_bytes(*number)) {
            frame.offer = (number > 0).then_some(number);
        }
        frame.check(peer)?;
        ring.consume(HEAD);
    }
    if frame.offer.is_some() {
        return Ok(());
    }
    let chunk = chunk(into.len());
    // Around the caches only in long pieces: each ends with a fence.
    let whole = if chunk == CHUNK { chunk } else { into.len() };
    let rest = &mut into[frame.received..];
    let waiting = ring.peek(rest.len().next_multiple_of(ALIGNMENT).min(chunk)).map_err(corrupt)?;
    let lines = waiting.len() - waiting.len() % ALIGNMENT;
    if lines > 0 {
        let bytes = lines.min(rest.len());
        ring.take(&mut rest[..bytes], lines, whole);
        frame.received += bytes;
    }
    Ok(())
}

/// Copies the next piece of an offered payload. The answer, when all has come, or when it cannot come in this way.
fn copy_offered(
    ring: &Consumer,
    frame: &mut Receiving,
    into: &mut [u8],
    (number, pid): (u64, u32),
) -> Option<Answer> {
    let rest = &mut into[frame.received..];
    let piece = rest.len().min(COPIED);
    let copied = ring.copy_offered(pid, frame.received, &mut rest[..piece]);
    // After each piece: what a peer has given up is not read to its end.
    match copied.and_then(|copied| Ok((copied, ring.is_kept(number, pid)?))) {
        Ok((copied @ 1.., true)) => {
            frame.received += copied;
            (frame.received == into.len()).then_some(Answer::Copied)
        }
        refused => {
            tracing::debug!(?refused, "the peer's memory is not read; the message comes through the ring");
            frame.received = 0;
            Some(Answer::Refused)
        }
    }
}

impl LineEnd for Inbound {
    type Frame = Receiving;
    const RECEIVES: bool = true;

    fn peer(&self) -> Rank {
        self.peer
    }

    fn advance(&mut self, frame: &mut Receiving, buffer: &mut Buffer) -> Result<Step> {
        self.pull(frame, buffer.as_bytes_mut())
    }

    fn socket(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        match &self.medium {
            Medium::Stream(stream) => stream.socket(PollFlags::IN),
            Medium::Ring { .. } | Medium::Mailbox(_) => None,
        }
    }

    fn is_ready(&mut self) -> bool {
        match &mut self.medium {
            Medium::Stream(stream) => stream.is_ready(),
            // An invalid state of the ring counts as ready: the next step returns the error.
            Medium::Ring { ring, .. } => ring.peek(ALIGNMENT).map_or(true, |line| line.len() == ALIGNMENT),
            Medium::Mailbox(mailbox) => !mailbox.lock().is_empty(),
        }
    }

    fn may_come(&self) -> bool {
        match &self.medium {
            Medium::Stream(stream) => stream.may_come(),
            Medium::Ring { .. } | Medium::Mailbox(_) => false,
        }
    }
}
