//! The anonymous file behind a segment: how a process creates it, and how another one opens it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use super::memory::Memory;
use super::{LINE, Layout, Segment};
use crate::memfd;
use crate::sync::Ordering;

const MAGIC: u64 = u64::from_le_bytes(*b"PHXSHM04");
const NAME: &str = "phalanx-rings";
/// The offsets of the segment's layout.
const RINGS: usize = 16;
const RING_BYTES: usize = 24;

/// Keeps the memory available for others to open; dropped when all have opened it.
#[derive(Debug)]
pub struct Invitation(pub(crate) OwnedFd);

impl Invitation {
    /// The number under which this process's `/proc` entry lends the memory.
    pub fn descriptor(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

impl Segment {
    /// A segment of this process. Its memory is allocated now: too little is an error, and not a signal later.
    pub fn create(layout: Layout, nonce: u64) -> io::Result<(Arc<Self>, Invitation)> {
        Self::create_without(None, layout, nonce)
    }

    /// The same with no memory for the ring `unused`, which neither end uses: the kernel would clear its pages, which takes 70 us for 512 KiB.
    pub fn create_without(
        unused: Option<usize>,
        layout: Layout,
        nonce: u64,
    ) -> io::Result<(Arc<Self>, Invitation)> {
        let bytes = layout.check()?.bytes();
        let fd = memfd::create(NAME, bytes as u64)?;
        let gap = unused.filter(|ring| *ring < layout.rings).map_or(bytes, |ring| layout.data(ring));
        memfd::allocate(&fd, 0, gap as u64)?;
        let after = bytes.min(gap + layout.ring_bytes);
        memfd::allocate(&fd, after as u64, (bytes - after) as u64)?;
        let segment = Self::map(&fd, layout)?;
        if let Some(unused) = unused {
            // Nobody gets an end of a ring without memory.
            segment.claim(unused, 0);
            segment.claim(unused, LINE);
        }
        segment.memory.word(8).store(nonce, Ordering::Relaxed);
        segment.memory.word(RINGS).store(layout.rings as u64, Ordering::Relaxed);
        segment.memory.word(RING_BYTES).store(layout.ring_bytes as u64, Ordering::Relaxed);
        segment.memory.word(0).store(MAGIC, Ordering::Release);
        Ok((Arc::new(segment), Invitation(fd)))
    }

    /// The segment that process `pid` of this host lends as `descriptor`. An error if that is another file.
    pub fn open(pid: u32, descriptor: i32, layout: Layout, nonce: u64) -> io::Result<Arc<Self>> {
        layout.check()?;
        let file = memfd::open(NAME, pid, descriptor, layout.bytes() as u64)?;
        let segment = Self::map(&file, layout)?;
        let written =
            (segment.memory.word(0).load(Ordering::Acquire), segment.memory.word(8).load(Ordering::Relaxed));
        if written != (MAGIC, nonce) {
            return Err(io::Error::other("it is the segment of another job"));
        }
        // Segments of the same length may be divided otherwise, and the claims to rings are counted by ring.
        let divided = [RINGS, RING_BYTES].map(|at| segment.memory.word(at).load(Ordering::Relaxed));
        if divided != [layout.rings as u64, layout.ring_bytes as u64] {
            return Err(io::Error::other("the segment has other rings"));
        }
        Ok(Arc::new(segment))
    }

    /// Maps all of `file`, which is at least as long as `layout` says.
    fn map(file: impl AsFd, layout: Layout) -> io::Result<Self> {
        // SAFETY: the file is sealed against shrinking (`create`), or was found to be (`open`). All processes use its
        // first bytes in the same way.
        let memory = unsafe { Memory::map(file, layout.words(), layout.bytes()) }?;
        Ok(Self { memory, layout })
    }
}

// Miri has no anonymous files.
#[cfg(not(miri))]
#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    const LAYOUT: Layout = Layout { rings: 2, ring_bytes: 128 };

    #[test]
    fn only_the_right_memory_is_opened() {
        let (own, invitation) = Segment::create(LAYOUT, 7).unwrap();
        let open = |layout, nonce| Segment::open(std::process::id(), invitation.descriptor(), layout, nonce);
        assert!(open(LAYOUT, 8).is_err());
        assert!(open(Layout { rings: 200, ..LAYOUT }, 7).is_err());
        assert!(open(Layout { ring_bytes: 100, ..LAYOUT }, 7).is_err());
        let device = File::open("/dev/null").unwrap();
        let error = Segment::open(std::process::id(), device.as_raw_fd(), LAYOUT, 7).unwrap_err();
        assert_eq!(error.to_string(), "it is not a segment");
        let file = unsealed();
        assert!(Segment::open(std::process::id(), file.as_raw_fd(), LAYOUT, 7).is_err(), "it could shrink");
        assert!(own.consumer(2).is_none());
        let first = own.consumer(0);
        assert!(first.is_some() && own.consumer(0).is_none());
    }

    #[test]
    fn a_ring_without_memory_has_no_ends() {
        let (own, invitation) = Segment::create_without(Some(1), LAYOUT, 7).unwrap();
        let other = Segment::open(std::process::id(), invitation.descriptor(), LAYOUT, 7).unwrap();
        assert!([&own, &other].iter().all(|one| one.producer(1).is_none() && one.consumer(1).is_none()));
        assert!(own.consumer(0).is_some() && other.producer(0).is_some());
    }

    #[test]
    fn an_end_is_given_out_once_also_to_other_mappings() {
        let (own, invitation) = Segment::create(LAYOUT, 7).unwrap();
        let others =
            [(); 2].map(|()| Segment::open(std::process::id(), invitation.descriptor(), LAYOUT, 7).unwrap());
        let producer = others[0].producer(1);
        assert!(producer.is_some() && others[1].producer(1).is_none() && own.producer(1).is_none());
        let consumer = own.consumer(1);
        assert!(consumer.is_some() && others[0].consumer(1).is_none() && others[1].consumer(0).is_some());
    }

    #[test]
    fn a_ring_is_not_given_out_again_as_a_part_of_other_rings() {
        let (own, invitation) = Segment::create(LAYOUT, 7).unwrap();
        let _producer = own.producer(0).unwrap();
        // As long, and its ring has the bytes of both.
        let one = Layout { rings: 1, ring_bytes: 256 };
        assert_eq!(one.bytes(), LAYOUT.bytes());
        let error = Segment::open(std::process::id(), invitation.descriptor(), one, 7).unwrap_err();
        assert_eq!(error.to_string(), "the segment has other rings");
    }

    fn unsealed() -> OwnedFd {
        let fd = memfd_create(NAME, MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, LAYOUT.bytes() as u64).unwrap();
        fd
    }
}
