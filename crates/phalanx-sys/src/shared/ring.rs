//! A byte ring with one writer and one reader.

use std::sync::Arc;

use super::doorbell::Doorbell;
use super::{FIELDS, LINE, POSITIONS, Segment};
use crate::copy::{take_lines, take_part};
use crate::sync::{AtomicU64, Ordering};

/// The most unread bytes that are prefetched when they are first seen.
const READY: usize = 512;

impl Segment {
    /// The writing end of `ring`. None if there is no such ring, or if the end was handed out before, through any
    /// mapping.
    pub fn producer(self: &Arc<Self>, ring: usize) -> Option<Producer> {
        self.claim(ring, 0).then(|| Producer {
            segment: self.clone(),
            ring,
            written: 0,
            consumed: 0,
            offers: 0,
        })
    }

    /// The reading end of `ring`. None if there is no such ring, or if the end was handed out before, through any
    /// mapping.
    pub fn consumer(self: &Arc<Self>, ring: usize) -> Option<Consumer> {
        self.claim(ring, LINE).then(|| Consumer {
            segment: self.clone(),
            ring,
            consumed: 0,
            written: 0,
            most_unread: 0,
        })
    }

    /// Whether this is the first claim to the end of `ring` whose position is at `end`. The flag is in the shared memory: two
    /// ends of one kind would overwrite what the other lends, even through two mappings.
    pub(super) fn claim(&self, ring: usize, end: usize) -> bool {
        ring < self.layout.rings
            && self.memory.word(FIELDS + ring * POSITIONS + end + 8).swap(1, Ordering::Relaxed) == 0
    }

    pub(crate) fn written(&self, ring: usize) -> &AtomicU64 {
        self.memory.word(FIELDS + ring * POSITIONS)
    }

    pub(crate) fn consumed(&self, ring: usize) -> &AtomicU64 {
        self.memory.word(FIELDS + ring * POSITIONS + LINE)
    }

    /// The offset of position `at` of `ring`, and the number of bytes from there to the ring's end.
    fn place(&self, ring: usize, at: u64) -> (usize, usize) {
        assert!(ring < self.layout.rings);
        let offset = (at % self.layout.ring_bytes as u64) as usize;
        (self.layout.data(ring) + offset, self.layout.ring_bytes - offset)
    }
}

/// A peer's position is not possible: the peer does not follow the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corrupt;

/// The writing end of a ring.
#[derive(Debug)]
pub struct Producer {
    pub(super) segment: Arc<Segment>,
    pub(super) ring: usize,
    written: u64,
    /// The consumer's position when it was last read.
    consumed: u64,
    /// The number of offers until now.
    pub(super) offers: u64,
}

impl Producer {
    /// Copies as much of `bytes` into the ring as there is room for, and returns how much. The consumer sees it after
    /// [`publish`](Self::publish).
    pub fn push(&mut self, bytes: &[u8]) -> Result<usize, Corrupt> {
        let free = self.segment.layout.ring_bytes as u64 - (self.written - self.consumed);
        let room = if bytes.len() as u64 <= free { bytes.len() } else { self.room()? };
        let mut rest = &bytes[..bytes.len().min(room)];
        let pushed = rest.len();
        while !rest.is_empty() {
            let (place, contiguous) = self.segment.place(self.ring, self.written);
            let (now, later) = rest.split_at(rest.len().min(contiguous));
            // SAFETY: `now` fits before the ring's end. These bytes are free: the consumer has given them back
            // (`consumed`, acquired) and reads them again only when `written` has been published.
            unsafe { self.segment.memory.write(place, now) };
            self.written += now.len() as u64;
            rest = later;
        }
        Ok(pushed)
    }

    /// The number of bytes for which there is room now.
    pub fn room(&mut self) -> Result<usize, Corrupt> {
        let capacity = self.segment.layout.ring_bytes as u64;
        let consumed = self.segment.consumed(self.ring).load(Ordering::Acquire);
        let waiting = self.written.checked_sub(consumed).filter(|waiting| *waiting <= capacity);
        let room = capacity - waiting.ok_or(Corrupt)?;
        self.consumed = consumed;
        Ok(room as usize)
    }

    /// Publishes what has been pushed to the consumer.
    pub fn publish(&self) {
        self.segment.written(self.ring).store(self.written, Ordering::Release);
    }

    /// Wakes the consumer.
    pub fn doorbell(&self) -> Doorbell<'_> {
        self.segment.doorbell()
    }
}

/// The reading end of a ring.
#[derive(Debug)]
pub struct Consumer {
    pub(super) segment: Arc<Segment>,
    pub(super) ring: usize,
    consumed: u64,
    /// The producer's position when it was last read.
    written: u64,
    /// The number of unread bytes at that time.
    most_unread: u64,
}

impl Consumer {
    /// The unread bytes, as far as they are contiguous: at most `most`, and up to the ring's end.
    pub fn peek(&mut self, most: usize) -> Result<&[u8], Corrupt> {
        if self.written - self.consumed < most as u64 {
            let written = self.segment.written(self.ring).load(Ordering::Acquire);
            // What has been published is not taken back.
            let new = written.checked_sub(self.written).ok_or(Corrupt)?;
            let unread = written - self.consumed;
            if unread > self.segment.layout.ring_bytes as u64 {
                return Err(Corrupt);
            }
            let (place, contiguous) = self.segment.place(self.ring, self.consumed);
            self.segment.memory.fetch(place, (new as usize).min(contiguous).min(READY));
            self.written = written;
            self.most_unread = unread;
        }
        let (place, contiguous) = self.segment.place(self.ring, self.consumed);
        let length = most.min(contiguous).min((self.written - self.consumed) as usize);
        // SAFETY: inside the ring. The producer has published these bytes (`written`, acquired) and does not touch them
        // until `consume` gives them back, which needs this borrow to have ended; see the module on trust.
        Ok(unsafe { self.segment.memory.lend(place, length) })
    }

    /// Whether at least half of the ring was unread when this end last looked. If not, the producer does not wait for room, or not for long: it has
    /// filled the other half since then.
    pub fn was_half_full(&self) -> bool {
        self.most_unread >= self.segment.layout.ring_bytes as u64 / 2
    }

    /// Copies the first unread bytes `into` memory, and gives the first `bytes` back to the producer, which are at least as many. They are a
    /// piece of data of `whole` bytes.
    pub fn take(&mut self, into: &mut [u8], bytes: usize, whole: usize) {
        assert!(into.len() <= bytes, "what is given back was not copied");
        take_part(self.lend(bytes, into.len()), into, whole);
        self.give_back(bytes);
    }

    /// Gives the first `bytes` of the unread bytes back to the producer.
    pub fn consume(&mut self, bytes: usize) {
        take_lines(self.lend(bytes, bytes));
        self.give_back(bytes);
    }

    /// The first `length` of the first unread `bytes`, for writing. They do not go beyond the ring's end.
    fn lend(&mut self, bytes: usize, length: usize) -> &mut [u8] {
        let (place, contiguous) = self.segment.place(self.ring, self.consumed);
        assert!(bytes as u64 <= self.written - self.consumed, "more is consumed than was peeked at");
        assert!(bytes <= contiguous, "more is consumed than was peeked at");
        // SAFETY: inside the ring. As in `peek`, the producer does not touch these bytes until they are given back, which needs this
        // borrow to have ended. This end lends them only once: it is borrowed mutably.
        unsafe { self.segment.memory.lend_mut(place, length) }
    }

    fn give_back(&mut self, bytes: usize) {
        self.consumed += bytes as u64;
        self.segment.consumed(self.ring).store(self.consumed, Ordering::Release);
    }
}
