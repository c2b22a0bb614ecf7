//! Memory shared by the processes of one host: byte rings, and a doorbell that wakes sleeping threads.
//!
//! A [`Segment`] belongs to one process. It holds one ring for each other process, which writes into it; the owner
//! reads. The memory is an anonymous file that others open through `/proc`. It has no name on any file system, and the
//! kernel frees it with the last process that maps it, however that process ends. It is sealed against shrinking,
//! and what is used of it is allocated at the start, so that an access can never be a bus error. A rank's ring to itself is not used.
//!
//! # Trust
//!
//! A [`Consumer`] lends bytes that another process has written, and must not change until they are consumed. If a
//! process breaks this rule, the bytes can change while they are read. Bytes have no invalid values, so the reader gets
//! wrong numbers and nothing worse. Still, only processes of one job may map a segment, and they trust each other
//! anyway. Positions that a peer writes are checked before they are used.

mod doorbell;
#[cfg(not(loom))]
mod file;
#[cfg(not(loom))]
mod memory;
#[cfg(loom)]
mod modelled;
mod offer;
mod ring;

use std::io;

pub use self::doorbell::Doorbell;
#[cfg(not(loom))]
pub use self::file::Invitation;
#[cfg(not(loom))]
use self::memory::Memory;
#[cfg(loom)]
use self::modelled::Memory;
pub use self::offer::{Answer, Offer};
pub use self::ring::{Consumer, Corrupt, Producer};

/// Two cache lines: processors fetch them in pairs.
const LINE: usize = 128;
/// The segment's own fields come first: magic and nonce, the doorbell, the number of sleepers.
const FIELDS: usize = 3 * LINE;
/// Each ring's positions: written, consumed. Behind each is a flag that says whether that end has been handed out, and then what the two ends
/// say of data that is offered.
const POSITIONS: usize = 2 * LINE;
/// A ring's size is a multiple of this, so that elements of any type stay aligned where the ring wraps.
pub const ALIGNMENT: usize = 64;

/// The sizes of a segment; the same in all processes of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Rings in the segment.
    pub rings: usize,
    /// Bytes of each ring; a multiple of [`ALIGNMENT`].
    pub ring_bytes: usize,
}

impl Layout {
    /// Bytes in front of the rings, which are accessed only as atomics.
    fn words(self) -> usize {
        FIELDS + self.rings * POSITIONS
    }

    fn data(self, ring: usize) -> usize {
        self.words().next_multiple_of(4096) + ring * self.ring_bytes
    }

    fn bytes(self) -> usize {
        self.data(self.rings).next_multiple_of(4096)
    }

    fn check(self) -> io::Result<Self> {
        let fits = self.ring_bytes > 0
            && self.ring_bytes.is_multiple_of(ALIGNMENT)
            && self.rings < 1 << 16
            && self.ring_bytes <= 1 << 30
            // Only relevant with 32-bit addresses: no position or length may overflow.
            && (self.rings as u64 + 1) * (self.ring_bytes as u64 + 2 * POSITIONS as u64) < isize::MAX as u64 / 2;
        if fits { Ok(self) } else { Err(io::Error::other("a segment of impossible size")) }
    }
}

/// One process's segment, as mapped by it or by another process.
#[derive(Debug)]
pub struct Segment {
    memory: Memory,
    layout: Layout,
}

impl Segment {
    /// A segment of this process only, for tests without files.
    #[cfg(not(loom))]
    #[cfg(any(test, fuzzing))]
    pub(crate) fn private(layout: Layout) -> io::Result<Self> {
        let layout = layout.check()?;
        Ok(Self { memory: Memory::private(layout.words(), layout.bytes())?, layout })
    }

    /// Wakes the owner of this segment, from any process.
    pub fn doorbell(&self) -> Doorbell<'_> {
        Doorbell::new(self.memory.half_word(LINE), self.memory.half_word(2 * LINE))
    }
}

#[cfg(loom)]
#[cfg(test)]
mod models;
#[cfg(not(loom))]
#[cfg(test)]
mod tests;
