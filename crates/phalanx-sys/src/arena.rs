//! Memory that a rank allocates, and that the other ranks of its host map.
//!
//! An [`Arena`] is one large, sparse, anonymous file. Its owner and every peer map it once, whole: that takes addresses
//! and no memory. [`Arena::alloc`] takes memory for a part of it, a [`Region`], and says so if there is too little; the
//! end of the region gives the memory back. A peer reaches a region by its offset alone, so that nothing needs to be
//! mapped or exchanged again when memory comes and goes.
//!
//! The arena begins with a page of its own and the owner's part of the [`control_block`]; regions lie behind.
//!
//! # Trust
//!
//! The owner holds a region as Rust memory, while peers could write into it at any time. They do so only within an
//! operation to which the owner has lent the region, which the [`control_block`] sees to on either side; see
//! [`shared`](crate::shared) on who is let in. A peer that is late, because it was stopped while the operation failed
//! for the others, would still write: the owner then cuts the region off, so that what the peer reaches is no longer
//! what the owner holds.

mod cgroup;
mod memory;
mod table;

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

pub use self::cgroup::left as memory_left_by_cgroups;
pub use self::memory::total as total_memory;
use self::table::Table;
use crate::control_block;
use crate::memfd;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

const NAME: &str = "phalanx-arena";
const MAGIC: u64 = u64::from_le_bytes(*b"PHXARN01");
/// What regions are multiples of.
pub(crate) const PAGE: usize = 4096;
/// What is copied at once when a region is cut off: its memory is not needed twice.
const PIECE: usize = 1 << 20;
/// Parts of a region are given back by themselves if they have so many bytes of whole pages: each costs a system call.
const WORTH_A_CALL: usize = 64 << 10;
/// What comes before the regions.
const RESERVED: usize = PAGE + control_block::BYTES;

/// The memory that this process lends to the others of its host.
pub struct Arena {
    mapping: Arc<Mapping>,
    file: OwnedFd,
    table: Mutex<Table>,
}

/// An arena as this process maps it, its own or a peer's.
pub struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping lives as long as this does. What is shared in it is atomic, or is lent by an operation that both
// sides follow; see the module on trust.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Arena {
    /// An arena of this process with room for `bytes`, or for as many as the addresses and limits of this process allow,
    /// which will map so many `arenas` now, and perhaps others later.
    pub fn create(bytes: usize, arenas: usize, nonce: u64) -> io::Result<Arc<Self>> {
        if !PAGE.is_multiple_of(memory::page()) {
            return Err(io::Error::other(format!("memory has pages of {} bytes", memory::page())));
        }
        let allowed = memory::allowed(bytes, arenas).max(RESERVED + PAGE) / PAGE * PAGE;
        let file = memfd::create(NAME, allowed as u64)?;
        memfd::allocate(&file, 0, RESERVED as u64)?;
        let mapping = Mapping::new(&file, allowed)?;
        mapping.word(8).store(nonce, Ordering::Relaxed);
        mapping.word(0).store(MAGIC, Ordering::Release);
        let table = Mutex::new(Table::new(RESERVED..allowed));
        Ok(Arc::new(Self { mapping: Arc::new(mapping), file, table }))
    }

    /// The arena of `bytes` that process `pid` of this host lends as `descriptor`; an error if it is another one.
    pub fn open(pid: u32, descriptor: i32, bytes: usize, nonce: u64) -> io::Result<Arc<Mapping>> {
        if bytes < RESERVED || !bytes.is_multiple_of(PAGE) || bytes > isize::MAX as usize {
            return Err(io::Error::other("an arena of impossible size"));
        }
        let file = memfd::open(NAME, pid, descriptor, bytes as u64)?;
        let mapping = Mapping::new(&file, bytes)?;
        let written = (mapping.word(0).load(Ordering::Acquire), mapping.word(8).load(Ordering::Relaxed));
        if written != (MAGIC, nonce) {
            return Err(io::Error::other("it is the arena of another job"));
        }
        Ok(Arc::new(mapping))
    }

    /// The number under which this process's `/proc` entry lends the arena.
    pub fn descriptor(&self) -> i32 {
        self.file.as_raw_fd()
    }

    /// Its size, most of it not allocated.
    pub fn bytes(&self) -> usize {
        self.mapping.bytes
    }

    /// How this process itself maps it.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// `bytes` zeros of their own pages; an error if they are none, or more than there is memory for.
    pub fn alloc(self: &Arc<Self>, bytes: usize) -> io::Result<Region> {
        let pages = bytes.checked_next_multiple_of(PAGE).filter(|pages| *pages > 0);
        let pages = pages.ok_or_else(|| io::Error::other(format!("no region has {bytes} bytes")))?;
        memory::check(pages)?;
        let offset = self.table().take(pages, bytes).ok_or_else(|| {
            io::Error::other(format!("{bytes} bytes do not fit into what is left of {} bytes", self.bytes()))
        })?;
        // Owned from here on, so that an error below gives the place back.
        let region = Region { arena: self.clone(), offset, bytes };
        memfd::allocate(&self.file, offset as u64, pages as u64)?;
        Ok(region)
    }

    /// The offset of the region that `memory` is, from its first byte to its last. None if it is a part of a region, is
    /// ordinary memory, or is cut off.
    pub(crate) fn find(&self, memory: &[u8]) -> Option<usize> {
        let offset = (memory.as_ptr() as usize).checked_sub(self.mapping.base.as_ptr() as usize)?;
        // Before the lock: ordinary memory has nothing to ask.
        if offset >= self.bytes() {
            return None;
        }
        (self.table().bytes_at(offset)? == memory.len()).then_some(offset)
    }

    /// Cuts the region at `offset` off: what it holds stays, but what peers reach is no longer it.
    ///
    /// # Safety
    /// Nobody in this process touches the region meanwhile: the caller holds it exclusively.
    pub(crate) unsafe fn cut_off(&self, offset: usize) -> io::Result<()> {
        let Some(bytes) = self.table().cut_off(offset) else { return Ok(()) };
        let pages = bytes.next_multiple_of(PAGE);
        let mut copy = vec![0; PIECE.min(pages)];
        for start in (offset..offset + pages).step_by(PIECE) {
            let copy = &mut copy[..PIECE.min(offset + pages - start)];
            let place = self.mapping.at(start, copy.len()).as_ptr();
            // SAFETY: the region's own memory and this function's, equally long. That a peer writes into the former at
            // this moment makes the bytes unspecified, which they are after a failed operation in any case.
            unsafe { std::ptr::copy_nonoverlapping(place, copy.as_mut_ptr(), copy.len()) };
            let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
            // SAFETY: new pages take the place of the region's, at the same addresses and with the same access. Nobody
            // in this process looks at them meanwhile, by this function's contract.
            unsafe { mmap_anonymous(place.cast(), copy.len(), access, flags) }?;
            // SAFETY: as above; peers do not reach the new pages.
            unsafe { std::ptr::copy_nonoverlapping(copy.as_ptr(), place, copy.len()) };
            memfd::release(&self.file, start as u64, copy.len() as u64)?;
        }
        Ok(())
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Nothing in there panics halfway.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena({} bytes)", self.bytes())
    }
}

impl Mapping {
    fn new(file: impl AsFd, bytes: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice, of a file of this size, which is sealed.
        let base = unsafe {
            mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)
        }?;
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))?;
        Ok(Self { base, bytes })
    }

    /// Where `bytes` from `offset` on lie.
    pub(crate) fn at(&self, offset: usize, bytes: usize) -> NonNull<u8> {
        assert!(self.has(offset, bytes), "beyond the arena");
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.base.add(offset) }
    }

    /// The `bytes` from `offset` on.
    ///
    /// # Safety
    ///
    /// As long as they are borrowed, nobody writes to these bytes, through whatever mapping.
    pub(crate) unsafe fn lend(&self, offset: usize, bytes: usize) -> &[u8] {
        // SAFETY: inside the mapping, as `at` checks; the caller vouches that nobody writes.
        unsafe { slice::from_raw_parts(self.at(offset, bytes).as_ptr(), bytes) }
    }

    /// The `bytes` from `offset` on, to be changed.
    ///
    /// # Safety
    ///
    /// As long as they are borrowed, nobody else reads or writes these bytes, through whatever mapping.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn lend_mut(&self, offset: usize, bytes: usize) -> &mut [u8] {
        // SAFETY: inside the mapping, as `at` checks; the caller vouches that these bytes are its own.
        unsafe { slice::from_raw_parts_mut(self.at(offset, bytes).as_ptr(), bytes) }
    }

    /// Brings the `bytes` from `offset` on into this processor's cache, to be written soon. That is a hint alone.
    pub(crate) fn fetch_to_write(&self, offset: usize, bytes: usize) {
        let start = self.at(offset, bytes).as_ptr();
        for line in (0..bytes).step_by(64) {
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            // SAFETY: the instruction changes no memory and no register, whatever the address; where a processor does not
            // know it, it does nothing.
            unsafe {
                std::arch::asm!(
                    "prefetchw [{}]",
                    in(reg) start.wrapping_add(line),
                    options(nostack, preserves_flags, readonly)
                );
            }
            #[cfg(not(all(target_arch = "x86_64", not(miri))))]
            let _ = start.wrapping_add(line);
        }
    }

    /// Do `bytes` from `offset` on lie behind what is reserved, and before the end?
    pub(crate) fn holds(&self, offset: usize, bytes: usize) -> bool {
        offset >= RESERVED && self.has(offset, bytes)
    }

    fn has(&self, offset: usize, bytes: usize) -> bool {
        offset.checked_add(bytes).is_some_and(|end| end <= self.bytes)
    }

    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= RESERVED);
        // SAFETY: inside the mapping and aligned, as just checked; every process uses this place as an atomic alone, and
        // zeroed memory is a valid one.
        unsafe { self.base.add(offset).cast().as_ref() }
    }

    pub(crate) fn half_word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= RESERVED);
        // SAFETY: as in `word`.
        unsafe { self.base.add(offset).cast().as_ref() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this range of addresses is this mapping's own, whatever parts of it were replaced, and nothing borrowed
        // from it can outlive it. Unmapping a range that was mapped cannot fail.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapping({} bytes)", self.bytes)
    }
}

/// Memory of an arena, which peers reach while an operation lends it to them.
#[derive(Debug)]
pub struct Region {
    arena: Arc<Arena>,
    offset: usize,
    bytes: usize,
}

impl Region {
    /// Its bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: this region's alone; peers write only while an operation borrows it exclusively.
        unsafe { self.arena.mapping.lend(self.offset, self.bytes) }
    }

    /// Its bytes, to be changed.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above; and this borrow is exclusive.
        unsafe { self.arena.mapping.lend_mut(self.offset, self.bytes) }
    }

    /// Gives the memory of those pages back that lie in `range` with all their bytes, if they are many.
    ///
    /// # Safety
    /// Nobody reads or writes the bytes in `range` any more.
    pub(crate) unsafe fn release(&self, range: Range<usize>) {
        let pages = range.start.next_multiple_of(PAGE)..range.end / PAGE * PAGE;
        if pages.end.saturating_sub(pages.start) >= WORTH_A_CALL {
            // If this fails, they go with the region.
            let _ = memfd::release(&self.arena.file, (self.offset + pages.start) as u64, pages.len() as u64);
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let pages = self.bytes.next_multiple_of(PAGE) as u64;
        // First the memory, then the place: whoever gets the place next expects zeros. Where the memory cannot be given
        // back, the place is not either.
        if memfd::release(&self.arena.file, self.offset as u64, pages).is_ok() {
            self.arena.table().give_back(self.offset);
        }
    }
}

// Miri has no such files.
#[cfg(not(miri))]
#[cfg(test)]
mod tests;
