//! Data that the reader of a ring copies out of the memory of its writer, past the ring: it is copied once, and not twice.
//!
//! The writer says where the data is, and keeps it until the reader has answered. The kernel copies (`process_vm_readv`), if it
//! allows it: for the same user, unless Yama, a sandbox or the process itself forbids it. The reader refuses what it cannot copy, and
//! then the data comes through the ring.
//!
//! # What the reader may have copied instead
//!
//! The copy is worth nothing if the data was no longer there, which the reader finds after it, by [`Consumer::is_kept`]:
//! * The writer has given up, so that its memory may have other content: it has withdrawn the offer first.
//! * The writer's process has ended, and another one has its number, or it has become another program. Neither of them has this
//!   segment where the writer had it, with the segment's nonce.

#[cfg(not(loom))]
use std::io;
use std::sync::Arc;

use super::ring::{Consumer, Corrupt, Producer};
use super::{FIELDS, LINE, POSITIONS, Segment};
#[cfg(not(loom))]
use crate::process;
use crate::sync::{AtomicU64, Ordering, fence};

/// Where a segment's nonce is.
#[cfg(not(loom))]
const NONCE: usize = 8;
/// The words of a ring that its writer writes: where the data is, where it has mapped the nonce, and the last offer that it has withdrawn.
const ADDRESS: usize = 16;
const NONCE_ADDRESS: usize = 24;
const WITHDRAWN: usize = 32;
/// The word that its reader writes: the last offer that it has answered, times two, and one more if it has refused it.
const ANSWER: usize = LINE + 16;

/// What a reader has done with an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It has copied all of the data.
    Copied,
    /// It wants the data through the ring.
    Refused,
}

/// Data that its writer keeps for the reader. Dropped, it is withdrawn: from then on the memory may be used for something else.
#[derive(Debug)]
pub struct Offer {
    segment: Arc<Segment>,
    ring: usize,
    number: u64,
}

impl Offer {
    /// The number of this offer, from 1 on: the reader has to know it.
    pub fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        self.segment.of_offer(self.ring, WITHDRAWN).store(self.number, Ordering::Relaxed);
        // Before all that is written to the memory later: with the one in `is_kept`.
        fence(Ordering::SeqCst);
    }
}

impl Segment {
    fn of_offer(&self, ring: usize, word: usize) -> &AtomicU64 {
        self.memory.word(FIELDS + ring * POSITIONS + word)
    }
}

impl Producer {
    /// Offers `bytes`, which stay where they are, with the same content, until the offer is answered or dropped. The reader learns of it
    /// when what is pushed after this has been published. One offer after the other: this one must have been answered before the next.
    pub fn offer(&mut self, bytes: &[u8]) -> Offer {
        self.offers += 1;
        let (segment, ring) = (self.segment.clone(), self.ring);
        // Exposed: the reader reads it, though no code of this process lends it.
        segment.of_offer(ring, ADDRESS).store(bytes.as_ptr().expose_provenance() as u64, Ordering::Relaxed);
        segment.of_offer(ring, NONCE_ADDRESS).store(segment.memory.address(8), Ordering::Relaxed);
        Offer { segment, ring, number: self.offers }
    }

    /// The answer to the last offer; None if there is none yet.
    pub fn answer(&self) -> Result<Option<Answer>, Corrupt> {
        let word = self.segment.of_offer(self.ring, ANSWER).load(Ordering::Acquire);
        match word / 2 {
            number if number == self.offers && word.is_multiple_of(2) => Ok(Some(Answer::Copied)),
            number if number == self.offers => Ok(Some(Answer::Refused)),
            number if number + 1 == self.offers => Ok(None),
            _ => Err(Corrupt),
        }
    }
}

impl Consumer {
    /// Copies data of the offer that has been read last, from byte `at` on, out of process `pid`, and returns how much. What comes is
    /// the data only if the offer [`is_kept`](Self::is_kept) when all has been copied.
    ///
    /// # Errors
    /// If the kernel does not allow it, or if there is no such process or memory.
    #[cfg(not(loom))]
    pub fn copy_offered(&self, pid: u32, at: usize, into: &mut [u8]) -> io::Result<usize> {
        let address = self.segment.of_offer(self.ring, ADDRESS).load(Ordering::Relaxed);
        process::read(pid, address.saturating_add(at as u64), into)
    }

    /// Whether what has been copied until now from offer `number` of process `pid` was the data.
    ///
    /// # Errors
    /// If the process no longer has the memory in which it would say so.
    #[cfg(not(loom))]
    pub fn is_kept(&self, number: u64, pid: u32) -> io::Result<bool> {
        let mut nonce = [0; 8];
        let address = self.segment.of_offer(self.ring, NONCE_ADDRESS).load(Ordering::Relaxed);
        let read = process::read(pid, address, &mut nonce)?;
        let own = self.segment.memory.word(NONCE).load(Ordering::Relaxed);
        Ok(!self.is_withdrawn(number) && read == nonce.len() && u64::from_ne_bytes(nonce) == own)
    }

    /// Whether the writer has given up offer `number`, as far as the memory that has been read until now can show it.
    pub(super) fn is_withdrawn(&self, number: u64) -> bool {
        // After all that has been read from the memory.
        fence(Ordering::SeqCst);
        self.segment.of_offer(self.ring, WITHDRAWN).load(Ordering::Relaxed) >= number
    }

    /// Answers offer `number`. The writer no longer keeps the data for this end.
    pub fn answer(&mut self, number: u64, answer: Answer) {
        let refused = u64::from(answer == Answer::Refused);
        self.segment.of_offer(self.ring, ANSWER).store(number.wrapping_mul(2) | refused, Ordering::Release);
    }
}
