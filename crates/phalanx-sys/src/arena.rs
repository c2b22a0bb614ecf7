//! Memory that a rank allocates, and that the other ranks of its host map.
//!
//! An [`Arena`] is one large, sparse, anonymous file. Its owner and every peer map all of it once, which uses addresses
//! but no memory. [`Arena::alloc`] allocates memory for a part of it, a [`Region`], and returns an error if there is
//! too little. Dropping the region frees the memory. A peer needs only the offset of a region, so nothing has to be
//! mapped or exchanged again when regions come and go.
//!
//! The arena begins with a page of its own and the owner's part of the [`control_block`]. The regions follow.
//!
//! # Trust
//!
//! The owner holds a region as Rust memory, while peers could write into it at any time. They do so only within an
//! operation to which the owner has lent the region; the [`control_block`] ensures this on both sides. See
//! [`shared`](crate::shared) on which processes are trusted. A peer that was stopped while the operation failed
//! for the others would still write when it continues. So the owner then cuts the region off: the peer's mapping no
//! longer leads to the owner's memory.

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

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

pub use self::cgroup::left as memory_left_by_cgroups;
pub use self::memory::{available as available_memory, total as total_memory};
use self::table::Table;
use crate::control_block;
use crate::memfd;
use crate::process;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

const NAME: &str = "phalanx-arena";
const MAGIC: u64 = u64::from_le_bytes(*b"PHXARN02");
/// The offset of the number that distinguishes the arena from every other one, through any mapping.
const IDENTITY: usize = 16;
/// The offset of the claim of the control block to which the arena belongs; 0 if it belongs to none.
const CLAIM: usize = 24;
/// The offset of what says that the usual staging buffers have memory.
const FILLED: usize = 32;
/// The offsets of the number of the process that has created the arena, and of the address at which it has mapped it.
pub(crate) const OWNER: usize = 40;
pub(crate) const OWNER_ADDRESS: usize = 48;
/// Regions are multiples of this.
pub(crate) const PAGE: usize = 4096;
/// Bytes that are copied at once when a region is cut off, so that its memory is not needed twice.
const PIECE: usize = 1 << 20;
/// Parts of a region are freed separately if they have at least this many bytes of whole pages: each costs a system
/// call.
const WORTH_A_CALL: usize = 64 << 10;
/// Memory that can be done without is taken if there is this many times as much.
const MARGIN: usize = 64;
/// Bytes before the regions.
const RESERVED: usize = control_block::END;

/// The memory that this process lends to the other processes of its host.
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

// SAFETY: the mapping lives as long as this value. Shared data in it is atomic, or is lent by an operation whose
// protocol both sides follow; see the module on trust.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Arena {
    /// An arena of this process with room for `bytes`, or for as many as the addresses and limits of this process
    /// allow, if it maps `arenas` arenas of this size now, and perhaps others later.
    pub fn create(bytes: usize, arenas: usize, nonce: u64) -> io::Result<Arc<Self>> {
        let arena = Self::create_unfilled(bytes, arenas, nonce)?;
        arena.fill()?;
        Ok(arena)
    }

    /// The same, whose staging buffers have no memory until it is [filled](Self::fill).
    pub fn create_unfilled(bytes: usize, arenas: usize, nonce: u64) -> io::Result<Arc<Self>> {
        if !PAGE.is_multiple_of(memory::page()) {
            return Err(io::Error::other(format!("memory has pages of {} bytes", memory::page())));
        }
        let allowed = memory::allowed(bytes, arenas).max(RESERVED + PAGE) / PAGE * PAGE;
        let file = memfd::create(NAME, allowed as u64)?;
        memfd::allocate(&file, 0, control_block::STAGING as u64)?;
        let mapping = Mapping::new(&file, allowed)?;
        mapping.word(8).store(nonce, Ordering::Relaxed);
        // From the system each time: a generator of this process's would go on alike in its forked children, and two of
        // them may be members of one control block.
        let mut identity = [0; 8];
        getrandom::fill(&mut identity).map_err(|error| io::Error::other(error.to_string()))?;
        mapping.word(IDENTITY).store(u64::from_ne_bytes(identity), Ordering::Relaxed);
        mapping.word(OWNER).store(u64::from(std::process::id()), Ordering::Relaxed);
        mapping.word(OWNER_ADDRESS).store(mapping.base.as_ptr().addr() as u64, Ordering::Relaxed);
        mapping.word(0).store(MAGIC, Ordering::Release);
        let table = Mutex::new(Table::new(RESERVED..allowed));
        Ok(Arc::new(Self { mapping: Arc::new(mapping), file, table }))
    }

    /// Allocates memory for the usual staging buffers, if they have none: the kernel clears their pages, which takes 100 us.
    pub fn fill(&self) -> io::Result<()> {
        if self.mapping.is_filled() {
            return Ok(());
        }
        let (start, end) = (control_block::STAGING, control_block::ALLOCATED);
        memfd::allocate(&self.file, start as u64, (end - start) as u64)?;
        self.mapping.word(FILLED).store(1, Ordering::Release);
        Ok(())
    }

    /// The arena of `bytes` that process `pid` of this host lends as `descriptor`. An error if that is another file.
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

    /// Its size in bytes, most of them not allocated.
    pub fn bytes(&self) -> usize {
        self.mapping.bytes
    }

    /// This process's own mapping.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Allocates `bytes` zeros, on pages of their own.
    ///
    /// # Errors
    /// If `bytes` is 0, or more than there is memory for, and in a process that was forked from the owner. Of the kind
    /// [`QuotaExceeded`](io::ErrorKind::QuotaExceeded) if the arena has too few addresses left.
    pub fn alloc(self: &Arc<Self>, bytes: usize) -> io::Result<Region> {
        self.check_owner()?;
        let pages = bytes.checked_next_multiple_of(PAGE).filter(|pages| *pages > 0);
        let pages = pages.ok_or_else(|| io::Error::other(format!("no region has {bytes} bytes")))?;
        memory::check(pages)?;
        let offset = self.table().take(pages, bytes).ok_or_else(|| {
            let cause = format!("{bytes} bytes do not fit into what is left of {} bytes", self.bytes());
            io::Error::new(io::ErrorKind::QuotaExceeded, cause)
        })?;
        // From here on `Region` owns the gap, so that an error below gives it back.
        let region = Region { arena: self.clone(), offset, bytes };
        memfd::allocate(&self.file, offset as u64, pages as u64)?;
        Ok(region)
    }

    /// Allocates memory for the rest of the control block, which can do without it. An error if memory is scarce: all ranks
    /// may ask at the same time, and the program needs it more.
    pub(crate) fn complete_control_block(&self) -> io::Result<()> {
        let (start, rest) = (control_block::ALLOCATED, RESERVED - control_block::ALLOCATED);
        memory::check(MARGIN * rest)?;
        memfd::allocate(&self.file, start as u64, rest as u64)
            .inspect_err(|_| drop(self.release(start, rest)))
    }

    /// The offset of the region that is exactly `memory`. None if `memory` is a part of a region, unregistered memory, or
    /// cut off.
    pub(crate) fn find(&self, memory: &[u8]) -> Option<usize> {
        let offset = (memory.as_ptr() as usize).checked_sub(self.mapping.base.as_ptr() as usize)?;
        // Before the lock: unregistered memory does not need it.
        if offset >= self.bytes() {
            return None;
        }
        (self.table().bytes_at(offset)? == memory.len()).then_some(offset)
    }

    /// Cuts the region at `offset` off: its content stays, but peers' mappings no longer lead to it.
    ///
    /// # Safety
    /// No other code of this process accesses the region meanwhile: the caller holds it exclusively.
    pub(crate) unsafe fn cut_off(&self, offset: usize) -> io::Result<()> {
        let Some(bytes) = self.table().cut_off(offset) else { return Ok(()) };
        let pages = bytes.next_multiple_of(PAGE);
        let mut copy = vec![0; PIECE.min(pages)];
        for start in (offset..offset + pages).step_by(PIECE) {
            let copy = &mut copy[..PIECE.min(offset + pages - start)];
            let place = self.mapping.at(start, copy.len()).as_ptr();
            // SAFETY: the region's own memory and this function's, equally long. If a peer writes into the former at
            // this moment, the bytes are unspecified, as they are after a failed operation in any case.
            unsafe { std::ptr::copy_nonoverlapping(place, copy.as_mut_ptr(), copy.len()) };
            let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
            // SAFETY: new pages replace the region's, at the same addresses and with the same access. No other code of
            // this process reads them meanwhile, by this function's contract.
            unsafe { mmap_anonymous(place.cast(), copy.len(), access, flags) }?;
            // SAFETY: as above; peers cannot access the new pages.
            unsafe { std::ptr::copy_nonoverlapping(copy.as_ptr(), place, copy.len()) };
            self.release(start, copy.len())?;
        }
        Ok(())
    }

    /// Frees the memory of a part of the file. It then reads as zeros.
    fn release(&self, start: usize, bytes: usize) -> io::Result<()> {
        self.check_owner()?;
        memfd::release(&self.file, start as u64, bytes as u64)
    }

    /// An error in a process that was forked from the owner: both have one memory, which the owner uses, and each has a table of its own.
    fn check_owner(&self) -> io::Result<()> {
        match self.mapping.is_own() {
            true => Ok(()),
            false => Err(io::Error::other("it is the memory of the process from which this one was forked")),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // No code that holds the lock panics halfway.
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
        // SAFETY: a new mapping at an address that the kernel chooses, of a sealed file of this size.
        let base = unsafe {
            mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)
        }?;
        // A core dump would have all pages of it, and the kernel takes memory for each that has none: for each arena as much as the host has. It is a
        // hint that a sandbox may not know.
        // SAFETY: all of the new mapping, whose content this does not change.
        let _ = unsafe { madvise(base, bytes, Advice::LinuxDontDump) };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))?;
        Ok(Self { base, bytes })
    }

    /// A number that distinguishes this memory from every other arena's. All mappings of it, in any process, have the same.
    pub(crate) fn identity(&self) -> u64 {
        self.word(IDENTITY).load(Ordering::Relaxed)
    }

    /// Whether the usual staging buffers have memory.
    pub(crate) fn is_filled(&self) -> bool {
        self.word(FILLED).load(Ordering::Acquire) == 1
    }

    /// Whether this process has created the arena. One that was forked from its creator has not.
    pub(crate) fn is_own(&self) -> bool {
        self.word(OWNER).load(Ordering::Relaxed) == u64::from(std::process::id())
    }

    /// Copies from `address` of the process that has created the arena.
    ///
    /// # Errors
    /// If the kernel does not allow it, if there is no such memory, or if that process has ended.
    pub(crate) fn read_owner(&self, address: u64, into: &mut [u8]) -> io::Result<()> {
        let owner = self.word(OWNER).load(Ordering::Relaxed);
        let pid = u32::try_from(owner).map_err(|_| io::Error::other("no process has this number"))?;
        // Another process may have the number by now, and then it is that one's memory.
        let mut identity = [0; 8];
        let place = self.word(OWNER_ADDRESS).load(Ordering::Relaxed).saturating_add(IDENTITY as u64);
        let wanted = into.len() + identity.len();
        let copied = process::read_parts(pid, [(address, into), (place, &mut identity)])?;
        match copied == wanted && u64::from_ne_bytes(identity) == self.identity() {
            true => Ok(()),
            false => Err(io::Error::other("the process that lent its memory has ended, or has less of it")),
        }
    }

    /// The claim of the control block to which this memory belongs.
    #[inline]
    pub(crate) fn claim(&self) -> &AtomicU64 {
        self.word(CLAIM)
    }

    /// The address of `bytes` at `offset`.
    #[inline]
    pub(crate) fn at(&self, offset: usize, bytes: usize) -> NonNull<u8> {
        assert!(self.has(offset, bytes), "beyond the arena");
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.base.add(offset) }
    }

    /// The `bytes` at `offset`.
    ///
    /// # Safety
    ///
    /// While they are borrowed, these bytes are not written through any mapping.
    #[inline]
    pub(crate) unsafe fn lend(&self, offset: usize, bytes: usize) -> &[u8] {
        // SAFETY: inside the mapping, as `at` checks; the caller guarantees that there are no writes.
        unsafe { slice::from_raw_parts(self.at(offset, bytes).as_ptr(), bytes) }
    }

    /// The `bytes` at `offset`, for writing.
    ///
    /// # Safety
    ///
    /// While they are borrowed, these bytes are not read or written by others, through any mapping.
    #[inline]
    #[allow(clippy::mut_from_ref, reason = "the caller guarantees that nobody else has these bytes")]
    pub(crate) unsafe fn lend_mut(&self, offset: usize, bytes: usize) -> &mut [u8] {
        // SAFETY: inside the mapping, as `at` checks; the caller guarantees exclusive access.
        unsafe { slice::from_raw_parts_mut(self.at(offset, bytes).as_ptr(), bytes) }
    }

    /// Prefetches the `bytes` at `offset` into this processor's cache for writing. This is only a hint.
    #[inline]
    pub(crate) fn fetch_to_write(&self, offset: usize, bytes: usize) {
        let start = self.at(offset, bytes).as_ptr();
        for line in (0..bytes).step_by(64) {
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            // SAFETY: the instruction changes no memory and no register, whatever the address. A processor without it
            // does nothing.
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

    /// Whether `bytes` at `offset` are inside the regions' part of the arena.
    pub(crate) fn holds(&self, offset: usize, bytes: usize) -> bool {
        offset >= RESERVED && self.has(offset, bytes)
    }

    #[inline]
    fn has(&self, offset: usize, bytes: usize) -> bool {
        offset.checked_add(bytes).is_some_and(|end| end <= self.bytes)
    }

    #[inline]
    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= RESERVED);
        // SAFETY: inside the mapping and aligned, as just checked. Every process accesses this place only as an atomic,
        // and zeroed memory is a valid one.
        unsafe { self.base.add(offset).cast().as_ref() }
    }

    #[inline]
    pub(crate) fn half_word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= RESERVED);
        // SAFETY: as in `word`.
        unsafe { self.base.add(offset).cast().as_ref() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this range of addresses belongs to this mapping, even if parts of it were replaced, and nothing
        // borrowed from it can outlive it. Unmapping a mapped range cannot fail.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapping({} bytes)", self.bytes)
    }
}

/// Memory of an arena. Peers access it while an operation lends it to them.
#[derive(Debug)]
pub struct Region {
    arena: Arc<Arena>,
    offset: usize,
    bytes: usize,
}

impl Region {
    /// Its bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: only this region's bytes; peers write only while an operation borrows the region exclusively.
        unsafe { self.arena.mapping.lend(self.offset, self.bytes) }
    }

    /// Its bytes, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above; and this borrow is exclusive.
        unsafe { self.arena.mapping.lend_mut(self.offset, self.bytes) }
    }

    /// Frees the memory of the pages that are completely inside `range`, if they are many.
    ///
    /// # Safety
    /// The bytes in `range` are no longer read or written.
    pub(crate) unsafe fn release(&self, range: Range<usize>) {
        let pages = range.start.next_multiple_of(PAGE)..range.end / PAGE * PAGE;
        if pages.end.saturating_sub(pages.start) >= WORTH_A_CALL {
            // If this fails, they are freed with the region.
            let _ = self.arena.release(self.offset + pages.start, pages.len());
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let pages = self.bytes.next_multiple_of(PAGE);
        // First the memory, then the gap: the next region in this gap must be zeros. If the memory cannot be freed, the
        // gap is not reused.
        if self.arena.release(self.offset, pages).is_ok() {
            self.arena.table().give_back(self.offset);
        }
    }
}

// Miri has no anonymous files.
#[cfg(not(miri))]
#[cfg(test)]
mod tests;
