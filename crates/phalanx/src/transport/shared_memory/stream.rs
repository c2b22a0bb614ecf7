//! One frame on its way into, or out of, a ring.
//!
//! Header and payload are each padded to the ring's alignment, so that elements of any type lie aligned in the ring and
//! a header never wraps. Only whole lines of that length are taken out, and so there is only ever room for whole lines:
//! a line is there, or it is not.

use phalanx_sys::shared::{ALIGNMENT, Consumer, Corrupt, Producer};

use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::transport::{Incoming, Outgoing};
use crate::wire::frame::{HEADER, Header};

/// A header with its padding.
const HEAD: usize = HEADER.next_multiple_of(ALIGNMENT);
/// Bytes that are published at once: the receiver works on them while the next ones are copied.
const CHUNK: usize = 64 * 1024;

/// A frame of which a part has been sent.
pub(super) struct Sending<'a> {
    head: [u8; HEAD],
    payload: &'a [u8],
    /// Bytes sent, padding included.
    sent: usize,
}

impl<'a> Sending<'a> {
    pub(super) fn new(frame: &Outgoing<'a>) -> Self {
        let mut head = [0; HEAD];
        head[..HEADER].copy_from_slice(&frame.header.encode());
        Self { head, payload: frame.payload, sent: 0 }
    }

    pub(super) fn is_done(&self) -> bool {
        self.sent == HEAD + self.payload.len().next_multiple_of(ALIGNMENT)
    }

    /// Sends what there is room for, a chunk at most. Was it anything?
    pub(super) fn push(&mut self, ring: &mut Producer) -> Result<bool> {
        let before = self.sent;
        let padding = [0; ALIGNMENT];
        let end = HEAD + self.payload.len();
        if self.sent < HEAD {
            self.sent += ring.push(&self.head[self.sent..]).map_err(corrupt)?;
        }
        if (HEAD..end).contains(&self.sent) {
            let rest = &self.payload[self.sent - HEAD..];
            self.sent += ring.push(&rest[..rest.len().min(CHUNK)]).map_err(corrupt)?;
        }
        if self.sent >= end {
            let missing = end.next_multiple_of(ALIGNMENT) - self.sent;
            self.sent += ring.push(&padding[..missing]).map_err(corrupt)?;
        }
        ring.publish();
        Ok(self.sent > before)
    }
}

/// Has the next line arrived? A state that no peer may leave the ring in counts: `pull` reports it.
pub(super) fn has_line(ring: &mut Consumer) -> bool {
    ring.peek(ALIGNMENT).map_or(true, |line| line.len() == ALIGNMENT)
}

/// A frame of which a part has been received.
pub(super) struct Receiving<'a> {
    rank: Rank,
    frame: Incoming<'a>,
    has_header: bool,
    /// Payload bytes that stand in their place, combined.
    received: usize,
}

impl<'a> Receiving<'a> {
    pub(super) fn new(rank: Rank, frame: Incoming<'a>) -> Self {
        Self { rank, frame, has_header: false, received: 0 }
    }

    pub(super) fn is_done(&self) -> bool {
        self.has_header && self.received == self.frame.into.len()
    }

    /// Receives what has arrived, a chunk at most. Was it anything?
    pub(super) fn pull(&mut self, ring: &mut Consumer) -> Result<bool> {
        let Incoming { from, expect, into, kernel } = &mut self.frame;
        let mut got_header = false;
        if !self.has_header {
            let head = ring.peek(HEAD).map_err(corrupt)?;
            let Some(header) = head.first_chunk::<HEADER>().filter(|_| head.len() == HEAD) else {
                return Ok(false);
            };
            expect.check(&Header::decode(header)?, self.rank, *from)?;
            ring.consume(HEAD);
            self.has_header = true;
            got_header = true;
        }
        let rest = &mut into[self.received..];
        let most = rest.len().next_multiple_of(ALIGNMENT).min(CHUNK);
        let waiting = ring.peek(most).map_err(corrupt)?;
        let lines = waiting.len() - waiting.len() % ALIGNMENT;
        if lines == 0 {
            return Ok(got_header);
        }
        // The last line ends with padding.
        let bytes = lines.min(rest.len());
        kernel.apply(&mut rest[..bytes], &waiting[..bytes])?;
        ring.consume(lines);
        self.received += bytes;
        Ok(true)
    }
}

fn corrupt(Corrupt: Corrupt) -> Error {
    Error::protocol("a ring in shared memory is in a state that no peer may leave it in")
}
