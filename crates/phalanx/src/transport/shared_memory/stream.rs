//! One frame on its way into, or out of, a ring.
//!
//! Header and payload are each padded to the ring's alignment, so that elements of any type lie aligned in the ring and
//! a header never wraps.

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

/// A frame of which a part has been received.
pub(super) struct Receiving<'a> {
    rank: Rank,
    frame: Incoming<'a>,
    has_header: bool,
    /// Payload bytes that stand in their place, combined.
    received: usize,
    has_padding: bool,
}

impl<'a> Receiving<'a> {
    pub(super) fn new(rank: Rank, frame: Incoming<'a>) -> Self {
        Self { rank, frame, has_header: false, received: 0, has_padding: false }
    }

    pub(super) fn is_done(&self) -> bool {
        self.has_padding
    }

    /// Receives what has arrived, a chunk at most. Was it anything?
    pub(super) fn pull(&mut self, ring: &mut Consumer) -> Result<bool> {
        let Incoming { from, expect, into, kernel } = &mut self.frame;
        if !self.has_header {
            let Some(head) = ring.peek(HEAD).map_err(corrupt)?.first_chunk::<HEADER>() else {
                return Ok(false);
            };
            expect.check(&Header::decode(head)?, self.rank, *from)?;
            ring.consume(HEAD);
            self.has_header = true;
        }
        let rest = &mut into[self.received..];
        if !rest.is_empty() {
            let waiting = ring.peek(rest.len().min(CHUNK)).map_err(corrupt)?;
            // Whole lines, unless the payload ends.
            let whole = if waiting.len() == rest.len() {
                waiting.len()
            } else {
                waiting.len() - waiting.len() % ALIGNMENT
            };
            if whole == 0 {
                return Ok(false);
            }
            kernel.apply(&mut rest[..whole], &waiting[..whole])?;
            ring.consume(whole);
            self.received += whole;
        }
        if self.received == into.len() {
            let padding = into.len().next_multiple_of(ALIGNMENT) - into.len();
            if ring.peek(padding).map_err(corrupt)?.len() == padding {
                ring.consume(padding);
                self.has_padding = true;
            }
        }
        Ok(true)
    }
}

fn corrupt(Corrupt: Corrupt) -> Error {
    Error::protocol("a ring in shared memory is in a state that no peer may leave it in")
}
