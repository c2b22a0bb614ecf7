//! One frame that is being sent on, or received from, a non-blocking connection.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};

use super::SEGMENT;
use super::connection::Connection;
use crate::buffer::AlignedBytes;
use crate::collective::Combine;
use crate::collective::kernel::Kernel;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::transport::{Incoming, Outgoing};
use crate::wire::frame::{HEADER, Header};

/// The most bytes of one system call. Between hosts the kernel takes and gives some MiB at once, and a rank that sends and receives in turn, a segment
/// at a time, finds more of them in its processor's cache: 64 MiB over 10 Gb/s took 1.4 times as long without. Within a host the connection's buffer is
/// small already.
fn at_once(stream: &Connection) -> usize {
    if stream.is_within_host() { usize::MAX } else { SEGMENT }
}

/// A frame of which a part has been sent.
pub(super) struct Sending<'a> {
    header: [u8; HEADER],
    payload: &'a [u8],
    sent: usize,
    /// Whether the bytes that the connection has accepted have left this process.
    is_out: bool,
}

impl<'a> Sending<'a> {
    pub(super) fn new(frame: &Outgoing<'a>) -> Self {
        Self { header: frame.header.encode(), payload: frame.payload, sent: 0, is_out: true }
    }

    pub(super) fn is_done(&self) -> bool {
        self.sent == HEADER + self.payload.len() && self.is_out
    }

    /// Sends what the connection accepts now, at most [`at_once`]. Returns whether it accepted anything.
    pub(super) fn push(&mut self, stream: &Connection) -> io::Result<bool> {
        let header = &self.header[self.sent.min(HEADER)..];
        let payload = &self.payload[self.sent.saturating_sub(HEADER)..];
        let payload = &payload[..payload.len().min(at_once(stream))];
        let parts = [IoSlice::new(header), IoSlice::new(payload)];
        match stream.send(&parts) {
            Ok((count, is_out)) => {
                self.sent += count;
                self.is_out = is_out;
                Ok(count > 0)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// A frame of which a part has been received. Elements to be reduced pass through the scratch memory, segment by
/// segment; all others are received directly into their place.
pub(super) struct Receiving<'a> {
    rank: Rank,
    from: Rank,
    expect: Header,
    header: [u8; HEADER],
    header_filled: usize,
    into: &'a mut [u8],
    kernel: Kernel,
    scratch: &'a mut AlignedBytes,
    /// Payload bytes received.
    received: usize,
    /// Payload bytes in `into`, after combining.
    combined: usize,
}

impl<'a> Receiving<'a> {
    pub(super) fn new(rank: Rank, frame: Incoming<'a>, scratch: &'a mut AlignedBytes) -> Result<Self> {
        if frame.kernel.combine != Combine::Replace {
            scratch.reserve_len(frame.into.len().min(SEGMENT))?;
        }
        Ok(Self {
            rank,
            from: frame.from,
            expect: frame.expect,
            header: [0; HEADER],
            header_filled: 0,
            into: frame.into,
            kernel: frame.kernel,
            scratch,
            received: 0,
            combined: 0,
        })
    }

    pub(super) fn is_done(&self) -> bool {
        self.header_filled == HEADER && self.combined == self.into.len()
    }

    /// Receives what has arrived. Returns whether there was anything. `broken` makes the error of a broken connection.
    pub(super) fn pull(&mut self, stream: &Connection, broken: impl Fn(io::Error) -> Error) -> Result<bool> {
        let header_missing = HEADER - self.header_filled;
        // The payload may be read before its header is checked, because its length is this rank's own.
        let room = if self.kernel.combine == Combine::Replace {
            let room = &mut self.into[self.received..];
            let most = room.len().min(at_once(stream));
            &mut room[..most]
        } else {
            let end = (self.into.len() - self.combined).min(SEGMENT);
            &mut self.scratch.as_mut_slice()[self.received - self.combined..end]
        };
        let mut parts = [IoSliceMut::new(&mut self.header[self.header_filled..]), IoSliceMut::new(room)];
        let count = match stream.receive(&mut parts) {
            Ok(0) => return Err(broken(io::Error::new(ErrorKind::UnexpectedEof, "its connection closed"))),
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(broken(error)),
        };
        let to_header = count.min(header_missing);
        self.header_filled += to_header;
        if to_header > 0 && self.header_filled == HEADER {
            self.expect.check(&Header::decode(&self.header)?, self.rank, self.from)?;
        }
        self.received += count - to_header;
        self.combine()?;
        Ok(true)
    }

    fn combine(&mut self) -> Result<()> {
        if self.kernel.combine == Combine::Replace {
            self.combined = self.received;
            return Ok(());
        }
        let waiting = self.received - self.combined;
        if waiting == SEGMENT || (waiting > 0 && self.received == self.into.len()) {
            let local = &mut self.into[self.combined..self.received];
            self.kernel.apply(local, &self.scratch.as_slice()[..waiting])?;
            self.combined = self.received;
        }
        Ok(())
    }
}
