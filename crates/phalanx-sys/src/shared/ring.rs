//! A byte ring with one writer and one reader.

use std::sync::Arc;

use super::doorbell::Doorbell;
use super::{FIELDS, LINE, POSITIONS, Segment};
use crate::sync::{AtomicU64, Ordering};

impl Segment {
    /// The writing end of `ring`; none if there is no such ring, or if it was given out before, by whatever mapping.
    pub fn producer(self: &Arc<Self>, ring: usize) -> Option<Producer> {
        self.claim(ring, 0).then(|| Producer { segment: self.clone(), ring, written: 0, consumed: 0 })
    }

    /// The reading end of `ring`; none if there is no such ring, or if it was given out before, by whatever mapping.
    pub fn consumer(self: &Arc<Self>, ring: usize) -> Option<Consumer> {
        self.claim(ring, LINE).then(|| Consumer { segment: self.clone(), ring, consumed: 0, written: 0 })
    }

    /// Is this the first claim to the end of `ring` whose position stands at `end`? What says so is shared, as the ring
    /// is: two ends of one kind would write over what the other lends, also if they are of two mappings.
    fn claim(&self, ring: usize, end: usize) -> bool {
        ring < self.layout.rings
            && self.memory.word(FIELDS + ring * POSITIONS + end + 8).swap(1, Ordering::Relaxed) == 0
    }

    pub(crate) fn written(&self, ring: usize) -> &AtomicU64 {
        self.memory.word(FIELDS + ring * POSITIONS)
    }

    pub(crate) fn consumed(&self, ring: usize) -> &AtomicU64 {
        self.memory.word(FIELDS + ring * POSITIONS + LINE)
    }

    /// Where position `at` of `ring` lies, and the bytes from there to the ring's end.
    fn place(&self, ring: usize, at: u64) -> (usize, usize) {
        assert!(ring < self.layout.rings);
        let offset = (at % self.layout.ring_bytes as u64) as usize;
        (self.layout.data(ring) + offset, self.layout.ring_bytes - offset)
    }
}

/// A peer's position does not fit: it does not follow the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corrupt;

/// The writing end of a ring.
#[derive(Debug)]
pub struct Producer {
    pub(super) segment: Arc<Segment>,
    ring: usize,
    written: u64,
    /// The consumer's position when it was last looked at.
    consumed: u64,
}

impl Producer {
    /// Copies as much of `bytes` into the ring as there is room for, and says how much. The consumer sees it after
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
            // (`consumed`, acquired) and looks at them again only when `written` has been published.
            unsafe { self.segment.memory.write(place, now) };
            self.written += now.len() as u64;
            rest = later;
        }
        Ok(pushed)
    }

    /// The bytes that there is room for now.
    pub fn room(&mut self) -> Result<usize, Corrupt> {
        let capacity = self.segment.layout.ring_bytes as u64;
        let consumed = self.segment.consumed(self.ring).load(Ordering::Acquire);
        let waiting = self.written.checked_sub(consumed).filter(|waiting| *waiting <= capacity);
        let room = capacity - waiting.ok_or(Corrupt)?;
        self.consumed = consumed;
        Ok(room as usize)
    }

    /// Shows the consumer what has been pushed.
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
    ring: usize,
    consumed: u64,
    /// The producer's position when it was last looked at.
    written: u64,
}

impl Consumer {
    /// The bytes that wait, as far as they lie in a row: up to `most`, and up to the ring's end.
    pub fn peek(&mut self, most: usize) -> Result<&[u8], Corrupt> {
        if self.written - self.consumed < most as u64 {
            let written = self.segment.written(self.ring).load(Ordering::Acquire);
            let waiting = written.checked_sub(self.consumed);
            waiting.filter(|waiting| *waiting <= self.segment.layout.ring_bytes as u64).ok_or(Corrupt)?;
            self.written = written;
        }
        let (place, contiguous) = self.segment.place(self.ring, self.consumed);
        let length = most.min(contiguous).min((self.written - self.consumed) as usize);
        // SAFETY: inside the ring. The producer has published these bytes (`written`, acquired) and does not touch them
        // until `consume` gives them back, which needs this borrow to have ended; see the module on trust.
        Ok(unsafe { self.segment.memory.lend(place, length) })
    }

    /// Gives the first `bytes` of what waits back to the producer.
    pub fn consume(&mut self, bytes: usize) {
        assert!(bytes as u64 <= self.written - self.consumed, "more is consumed than was peeked at");
        self.consumed += bytes as u64;
        self.segment.consumed(self.ring).store(self.consumed, Ordering::Release);
    }
}
