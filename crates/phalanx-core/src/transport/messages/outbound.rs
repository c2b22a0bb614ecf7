//! The sending end of a line.

use std::io::{ErrorKind, IoSlice};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use phalanx_sys::shared::{ALIGNMENT, Answer, Offer, Producer, Segment};
use rustix::event::PollFlags;

use super::{HEAD, INLINE, LineEnd, Mailbox, Notifier, Step, Stream, chunk, corrupt, offered};
use crate::buffer::{AlignedBytes, Buffer};
use crate::error::Result;
use crate::rank::Rank;
use crate::wire::frame::{HEADER, Header};

/// The sending end of the line to a peer.
pub(crate) struct Outbound {
    peer: Rank,
    medium: Medium,
}

enum Medium {
    Stream(Stream),
    Ring {
        ring: Producer,
        peer: Arc<Segment>,
        /// The lengths of payloads that the peer may copy out of this process, as far as known.
        offers: Range<usize>,
        /// The process out of which it would copy: one that was forked from it has other memory at the same addresses.
        pid: u32,
    },
    Mailbox {
        mailbox: Arc<Mailbox>,
        peer: Arc<Notifier>,
    },
}

/// A frame that is being sent. Its payload is passed at each step, in the same parts, because it may belong to the caller.
pub(crate) struct Sending {
    header: Header,
    head: [u8; HEAD],
    /// Bytes sent, padding included.
    sent: usize,
    place: Place,
    /// Whether the bytes that a connection has accepted have left this process.
    is_out: bool,
    /// Lets the peer copy the payload. It ends before whoever sends may use the payload's memory again.
    offer: Option<Offer>,
}

/// The part in which a payload goes on. A payload may have thousands, which are not counted again at each step.
#[derive(Default)]
struct Place {
    part: usize,
    /// How many bytes are in the parts before it.
    before: usize,
}

impl Sending {
    pub(crate) fn new(header: Header) -> Self {
        let mut head = [0; HEAD];
        head[..HEADER].copy_from_slice(&header.encode());
        Self { header, head, sent: 0, place: Place::default(), is_out: true, offer: None }
    }

    /// Bytes of the payload.
    fn length(&self) -> usize {
        self.header.payload as usize
    }
}

impl Outbound {
    pub(super) fn stream(stream: Stream) -> Self {
        Self { peer: stream.peer, medium: Medium::Stream(stream) }
    }

    pub(super) fn ring(peer: Rank, ring: Producer, segment: Arc<Segment>) -> Self {
        Self {
            peer,
            medium: Medium::Ring { ring, peer: segment, offers: offered(), pid: std::process::id() },
        }
    }

    pub(super) fn mailbox(peer: Rank, mailbox: Arc<Mailbox>, notifier: Arc<Notifier>) -> Self {
        Self { peer, medium: Medium::Mailbox { mailbox, peer: notifier } }
    }

    /// Whether payloads of any length are offered to the peer.
    #[cfg(test)]
    pub(crate) fn offers(&self) -> bool {
        matches!(&self.medium, Medium::Ring { offers, .. } if !offers.is_empty())
    }

    /// Offers payloads of so many bytes and more, whatever the processor.
    #[cfg(test)]
    pub(crate) fn offer_from(&mut self, length: usize) {
        if let Medium::Ring { offers, .. } = &mut self.medium {
            *offers = length..usize::MAX;
        }
    }

    /// As if this process had been forked from the one that has made the line.
    #[cfg(test)]
    pub(crate) fn is_of_another_process(&mut self) {
        if let Medium::Ring { pid, .. } = &mut self.medium {
            *pid = u32::MAX;
        }
    }

    /// Sends `bytes`, which need not be a frame, or what there is room for.
    #[cfg(test)]
    pub(crate) fn push_raw(&mut self, bytes: &[u8]) {
        match &mut self.medium {
            Medium::Ring { ring, peer, .. } => {
                ring.push(bytes).unwrap();
                ring.publish();
                peer.doorbell().ring();
            }
            Medium::Stream(stream) => {
                let connection = loop {
                    match stream.get().unwrap() {
                        Some(connection) => break connection,
                        None => stream.ask(),
                    }
                    std::thread::yield_now();
                };
                // The peer may have gone, or not read for long.
                let _ = connection.send(&[IoSlice::new(bytes)]);
            }
            Medium::Mailbox { .. } => panic!("this line has no bytes"),
        }
    }

    /// Sends as much as possible now of a frame whose payload is these `parts`, one after the other.
    pub(crate) fn push(&mut self, frame: &mut Sending, parts: &[&[u8]]) -> Result<Step> {
        let (before, length) = (frame.sent, frame.length());
        let whole = match &mut self.medium {
            Medium::Stream(stream) => {
                push_to_stream(stream, frame, parts)?;
                HEADER + length
            }
            Medium::Ring { ring, peer, offers, pid } => {
                push_to_ring(ring, frame, parts, (offers, *pid))?;
                if frame.sent > before {
                    ring.publish();
                    peer.doorbell().ring();
                }
                ring_bytes(length)
            }
            Medium::Mailbox { mailbox, peer } => {
                let mut copy = AlignedBytes::default();
                copy.reserve_len(length)?;
                copy_parts(parts, copy.as_mut_slice());
                mailbox.lock().push_back((frame.header, copy));
                peer.notify();
                frame.sent = HEADER + length;
                frame.sent
            }
        };
        Ok(match frame.sent {
            sent if sent == whole && frame.is_out => Step::Done,
            sent if sent > before => Step::Moved,
            _ => Step::Idle,
        })
    }
}

/// The bytes of all `parts` together.
pub(crate) fn length(parts: &[&[u8]]) -> usize {
    parts.iter().map(|part| part.len()).sum()
}

/// Copies `parts` one after the other into `into`, which is as long as all of them.
fn copy_parts(parts: &[&[u8]], into: &mut [u8]) {
    let mut begin = 0;
    for part in parts {
        into[begin..begin + part.len()].copy_from_slice(part);
        begin += part.len();
    }
}

/// What follows the first `sent` bytes of `parts`: the rest of a part, and the part after it. `place` is where it was when fewer were sent.
fn following<'a>(parts: &[&'a [u8]], sent: usize, place: &mut Place) -> [&'a [u8]; 2] {
    while let Some(part) = parts.get(place.part) {
        if sent - place.before < part.len() {
            let next = parts.get(place.part + 1).copied().unwrap_or_default();
            return [&part[sent - place.before..], next];
        }
        place.before += part.len();
        place.part += 1;
    }
    [&[], &[]]
}

fn push_to_stream(stream: &Stream, frame: &mut Sending, parts: &[&[u8]]) -> Result<()> {
    let header = &frame.head[frame.sent.min(HEADER)..HEADER];
    let [now, next] = following(parts, frame.sent.saturating_sub(HEADER), &mut frame.place);
    let parts = [IoSlice::new(header), IoSlice::new(now), IoSlice::new(next)];
    let Some(connection) = stream.get()? else {
        stream.ask();
        return Ok(());
    };
    match connection.send(&parts) {
        Ok((count, is_out)) => {
            frame.sent += count;
            frame.is_out = is_out;
        }
        Err(error) if error.kind() == ErrorKind::WouldBlock => {}
        Err(error) => return Err(stream.broken(error)),
    }
    Ok(())
}

/// What a frame with a payload of this length takes of a ring: header and payload are each padded to whole lines, because only whole lines are taken out. A payload that
/// fits into the header's line is there.
fn ring_bytes(length: usize) -> usize {
    if length <= INLINE { HEAD } else { HEAD + length.next_multiple_of(ALIGNMENT) }
}

/// Writes at most a chunk.
fn push_to_ring(
    ring: &mut Producer,
    frame: &mut Sending,
    parts: &[&[u8]],
    (offers, pid): (&mut Range<usize>, u32),
) -> Result<()> {
    const PADDING: [u8; ALIGNMENT] = [0; ALIGNMENT];
    let length = frame.length();
    if length <= INLINE {
        copy_parts(parts, &mut frame.head[HEADER..HEADER + length]);
        frame.sent += ring.push(&frame.head[frame.sent..]).map_err(corrupt)?;
        return Ok(());
    }
    let end = HEAD + length;
    // An offer is one piece of memory.
    if let [payload] = parts
        && frame.sent == 0
        && offers.contains(&length)
        && pid == std::process::id()
    {
        // Not before its number can be told: an end that waits for an answer does not look whether there is room.
        if ring.room().map_err(corrupt)? < HEAD {
            return Ok(());
        }
        let offer = ring.offer(payload);
        frame.head[HEADER..HEADER + size_of::<u64>()].copy_from_slice(&offer.number().to_le_bytes());
        frame.offer = Some(offer);
    }
    if frame.sent < HEAD {
        frame.sent += ring.push(&frame.head[frame.sent..]).map_err(corrupt)?;
    }
    if frame.sent == HEAD && frame.offer.is_some() {
        match ring.answer().map_err(corrupt)? {
            None => return Ok(()),
            Some(Answer::Copied) => frame.sent = ring_bytes(length),
            Some(Answer::Refused) => *offers = 0..0,
        }
        frame.offer = None;
    }
    if (HEAD..end).contains(&frame.sent) {
        let [rest, _] = following(parts, frame.sent - HEAD, &mut frame.place);
        frame.sent += ring.push(&rest[..rest.len().min(chunk(length))]).map_err(corrupt)?;
    }
    if frame.sent >= end {
        let missing = end.next_multiple_of(ALIGNMENT) - frame.sent;
        frame.sent += ring.push(&PADDING[..missing]).map_err(corrupt)?;
    }
    Ok(())
}

impl LineEnd for Outbound {
    type Frame = Sending;
    const RECEIVES: bool = false;

    fn peer(&self) -> Rank {
        self.peer
    }

    fn advance(&mut self, frame: &mut Sending, buffer: &mut Buffer) -> Result<Step> {
        self.push(frame, &[buffer.as_bytes()])
    }

    fn socket(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        match &self.medium {
            Medium::Stream(stream) => stream.socket(PollFlags::OUT),
            Medium::Ring { .. } | Medium::Mailbox { .. } => None,
        }
    }

    fn is_ready(&mut self) -> bool {
        match &mut self.medium {
            Medium::Stream(stream) => stream.is_ready(),
            // An invalid state of the ring counts as ready: the next step returns the error.
            Medium::Ring { ring, .. } => ring.answer() != Ok(None) && ring.room() != Ok(0),
            Medium::Mailbox { .. } => true,
        }
    }

    fn may_come(&self) -> bool {
        match &self.medium {
            Medium::Stream(stream) => stream.may_come(),
            Medium::Ring { .. } | Medium::Mailbox { .. } => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_goes_on_in_the_part_in_which_it_has_stopped() {
        let bytes: Vec<u8> = (0..200).collect();
        let parts = [&bytes[..0], &bytes[..3], &bytes[3..4], &bytes[4..4], &bytes[4..200], &bytes[..0]];
        let (mut place, mut sent) = (Place::default(), Vec::new());
        loop {
            let [now, next] = following(&parts, sent.len(), &mut place);
            // Asked again, it is the same.
            assert_eq!([now, next], following(&parts, sent.len(), &mut place));
            let Some(now) = now.get(..now.len().min(7)).filter(|now| !now.is_empty()) else { break };
            assert!(bytes[sent.len() + now.len()..].starts_with(next) || now.len() == 7);
            sent.extend_from_slice(now);
            let begin: usize = parts[..place.part].iter().map(|part| part.len()).sum();
            assert_eq!(place.before, begin);
        }
        assert_eq!((&sent, place.part), (&bytes, parts.len()));
    }
}
