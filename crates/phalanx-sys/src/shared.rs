//! Memory shared by the processes of one host: byte rings, and a doorbell for whoever sleeps.
//!
//! A [`Segment`] belongs to one process. It holds one ring for each other process, which writes into it; the owner
//! reads. The memory is an anonymous file that others open through `/proc`: it has no name on any file system, and is
//! gone with the last process that maps it, whatever ended them. It is allocated up front and sealed against
//! shrinking, so that touching it can never be a bus error.
//!
//! # Trust
//!
//! A [`Consumer`] lends bytes that another process has written, and that it must not touch until they are consumed. A
//! process that breaks this can make them change while they are read. Bytes have no invalid values, so the reader gets
//! wrong numbers and nothing worse; still, only processes of one job, which share their fate anyway, are let in.
//! Positions that a peer writes are checked before they are used.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::futex;
use rustix::time::Timespec;

use crate::memfd;

const MAGIC: u64 = u64::from_le_bytes(*b"PHXSHM01");
/// Two cache lines: processors fetch them in pairs.
const LINE: usize = 128;
/// The segment's own fields come first: magic and nonce, the doorbell, the sleeper's flag.
const FIELDS: usize = 3 * LINE;
/// Each ring's positions: written, consumed. Behind each stands whether that end has been given out.
const POSITIONS: usize = 2 * LINE;
const NAME: &str = "phalanx-rings";
/// What a ring's size is a multiple of, so that elements of any type stay aligned where it wraps.
pub const ALIGNMENT: usize = 64;

/// The sizes of a segment, which all processes of a job know alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Rings in the segment.
    pub rings: usize,
    /// Bytes of each ring; a multiple of [`ALIGNMENT`].
    pub ring_bytes: usize,
}

impl Layout {
    fn data(self, ring: usize) -> usize {
        (FIELDS + self.rings * POSITIONS).next_multiple_of(4096) + ring * self.ring_bytes
    }

    fn bytes(self) -> usize {
        self.data(self.rings).next_multiple_of(4096)
    }

    fn check(self) -> io::Result<Self> {
        let fits = self.ring_bytes > 0
            && self.ring_bytes.is_multiple_of(ALIGNMENT)
            && self.rings < 1 << 16
            && self.ring_bytes <= 1 << 30
            // Only where addresses have 32 bits: no position or length may overflow.
            && (self.rings as u64 + 1) * (self.ring_bytes as u64 + 2 * POSITIONS as u64) < isize::MAX as u64 / 2;
        if fits { Ok(self) } else { Err(io::Error::other("a segment of impossible size")) }
    }
}

/// One process's segment, as it or another process maps it.
#[derive(Debug)]
pub struct Segment {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the mapping lives as long as the segment; all that is shared in it is atomic, or guarded by the positions of
// a ring, whose ends are given out once, however many mappings there are.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

/// Keeps the memory reachable for others; dropped when all have opened it.
#[derive(Debug)]
pub struct Invitation(pub(crate) OwnedFd);

impl Invitation {
    /// The number under which this process's `/proc` entry lends the memory.
    pub fn descriptor(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

impl Segment {
    /// A segment of this process. Its memory is allocated now: too little is an error and not a later signal.
    pub fn create(layout: Layout, nonce: u64) -> io::Result<(Arc<Self>, Invitation)> {
        let bytes = layout.check()?.bytes() as u64;
        let fd = memfd::create(NAME, bytes)?;
        memfd::allocate(&fd, 0, bytes)?;
        let segment = Self::map(&fd, layout)?;
        segment.word(8).store(nonce, Ordering::Relaxed);
        segment.word(0).store(MAGIC, Ordering::Release);
        Ok((Arc::new(segment), Invitation(fd)))
    }

    /// The segment that process `pid` of this host lends as `descriptor`; an error if it is another one.
    pub fn open(pid: u32, descriptor: i32, layout: Layout, nonce: u64) -> io::Result<Arc<Self>> {
        layout.check()?;
        let file = memfd::open(NAME, pid, descriptor, layout.bytes() as u64)?;
        let segment = Self::map(&file, layout)?;
        let written = (segment.word(0).load(Ordering::Acquire), segment.word(8).load(Ordering::Relaxed));
        if written != (MAGIC, nonce) {
            return Err(io::Error::other("it is the segment of another job"));
        }
        Ok(Arc::new(segment))
    }

    fn map(file: impl AsFd, layout: Layout) -> io::Result<Self> {
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice, of a file at least this long, which is sealed
        // against shrinking (`create`) or was found to be (`open`).
        let base = unsafe { mmap(std::ptr::null_mut(), layout.bytes(), flags, MapFlags::SHARED, file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))?;
        Ok(Self { base, layout })
    }

    /// Rings for the owner of this segment, from any process.
    pub fn doorbell(&self) -> Doorbell<'_> {
        Doorbell { rung: self.half_word(LINE), sleeping: self.half_word(2 * LINE) }
    }

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
            && self.word(FIELDS + ring * POSITIONS + end + 8).swap(1, Ordering::Relaxed) == 0
    }

    fn written(&self, ring: usize) -> &AtomicU64 {
        self.word(FIELDS + ring * POSITIONS)
    }

    fn consumed(&self, ring: usize) -> &AtomicU64 {
        self.word(FIELDS + ring * POSITIONS + LINE)
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.layout.data(0));
        // SAFETY: inside the mapping and aligned, as just checked; every process uses this place as an atomic alone, and
        // zeroed memory is a valid one.
        unsafe { self.base.add(offset).cast().as_ref() }
    }

    fn half_word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.layout.data(0));
        // SAFETY: as in `word`.
        unsafe { self.base.add(offset).cast().as_ref() }
    }

    /// Where position `at` of `ring` lies, and the bytes from there to the ring's end.
    fn place(&self, ring: usize, at: u64) -> (NonNull<u8>, usize) {
        assert!(ring < self.layout.rings);
        let offset = (at % self.layout.ring_bytes as u64) as usize;
        // SAFETY: inside the mapping: ring and offset are below their bounds.
        let place = unsafe { self.base.add(self.layout.data(ring) + offset) };
        (place, self.layout.ring_bytes - offset)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: this mapping is this segment's own, and nothing borrowed from it can outlive it. Unmapping what was
        // mapped in this size cannot fail.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.layout.bytes()) };
    }
}

/// A peer's position does not fit: it does not follow the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corrupt;

/// The writing end of a ring.
#[derive(Debug)]
pub struct Producer {
    segment: Arc<Segment>,
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
            // (`consumed`, acquired) and looks at them again only when `written` has been published. `now` is this
            // process's memory and does not overlap the segment.
            unsafe { place.copy_from_nonoverlapping(NonNull::from(now).cast(), now.len()) };
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
    segment: Arc<Segment>,
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
        Ok(unsafe { slice::from_raw_parts(place.as_ptr(), length) })
    }

    /// Gives the first `bytes` of what waits back to the producer.
    pub fn consume(&mut self, bytes: usize) {
        assert!(bytes as u64 <= self.written - self.consumed, "more is consumed than was peeked at");
        self.consumed += bytes as u64;
        self.segment.consumed(self.ring).store(self.consumed, Ordering::Release);
    }
}

/// Wakes the process whose threads sleep on it. An event count: whoever looks for work, then sleeps, misses nothing in
/// between.
#[derive(Clone, Copy, Debug)]
pub struct Doorbell<'a> {
    pub(crate) rung: &'a AtomicU32,
    pub(crate) sleeping: &'a AtomicU32,
}

impl Doorbell<'_> {
    /// Wakes the owner, all threads of it that sleep. Costs a fence and a load if none does.
    pub fn ring(&self) {
        // Pairs with the fence in `sleep_unless`: either this sees the flag, or the sleeper sees what was published.
        fence(Ordering::SeqCst);
        self.wake();
    }

    /// As [`ring`](Self::ring), for whoever has just published with a sequentially consistent store.
    pub(crate) fn wake(&self) {
        if self.sleeping.load(Ordering::SeqCst) != 0 {
            self.rung.fetch_add(1, Ordering::Relaxed);
            // Nobody to wake is no error.
            let _ = futex::wake(self.rung, futex::Flags::empty(), u32::MAX);
        }
    }

    /// Sleeps until somebody rings, at most for `timeout`, unless `ready` finds that there is something to do.
    pub fn sleep_unless(&self, timeout: Duration, ready: impl FnOnce() -> bool) {
        let before = self.rung.load(Ordering::Relaxed);
        // The number of sleepers; the owner alone counts it.
        self.sleeping.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !ready() {
            let timeout =
                Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) };
            // Rung already, interrupted, timed out: in each case the caller looks again.
            let _ = futex::wait(self.rung, futex::Flags::empty(), before, Some(&timeout));
        }
        self.sleeping.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
