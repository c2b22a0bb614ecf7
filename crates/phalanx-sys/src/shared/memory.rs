//! The memory behind a segment: atomics in front, and bytes behind them, each of which belongs to one side at a time.

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::slice;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::copy::copy;
use crate::sync::{AtomicU32, AtomicU64};

/// A mapping. It lives as long as this value, and its file cannot shrink.
#[derive(Debug)]
pub(super) struct Memory {
    base: NonNull<u8>,
    /// The end of the atomics.
    words: usize,
    length: usize,
}

// SAFETY: the shared content of a mapping is atomics, or bytes that only unsafe functions access.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps all of `file`, which begins with `words` bytes of atomics.
    ///
    /// # Safety
    ///
    /// The file is at least `length` bytes long, and sealed against shrinking. All processes access its first `words`
    /// bytes only as atomics.
    pub unsafe fn map(file: impl AsFd, words: usize, length: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses, of a file that meets this function's contract.
        let base = unsafe { mmap(std::ptr::null_mut(), length, access, MapFlags::SHARED, file, 0) }?;
        Self::at(base.cast(), words, length)
    }

    /// Memory of this process only.
    #[cfg(any(test, fuzzing))]
    pub fn private(words: usize, length: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the system chooses.
        let base =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, access, MapFlags::PRIVATE) }?;
        Self::at(base.cast(), words, length)
    }

    fn at(base: *mut u8, words: usize, length: usize) -> io::Result<Self> {
        let base = NonNull::new(base).ok_or_else(|| io::Error::other("mapped at address zero"))?;
        Ok(Self { base, words, length })
    }

    pub fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.words);
        // SAFETY: inside the mapping and aligned, as just checked. Every process accesses this place only as an atomic,
        // and any bytes are a valid one.
        unsafe { self.base.add(offset).cast().as_ref() }
    }

    pub fn half_word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.words);
        // SAFETY: as in `word`.
        unsafe { self.base.add(offset).cast().as_ref() }
    }

    /// The address of `offset` in this process.
    pub fn address(&self, offset: usize) -> u64 {
        self.base.as_ptr().addr() as u64 + offset as u64
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Safety
    ///
    /// Until it returns, these bytes are not read or written by others, through any mapping.
    pub unsafe fn write(&self, offset: usize, bytes: &[u8]) {
        // SAFETY: the caller has exclusive access.
        copy(bytes, unsafe { self.lend_mut(offset, bytes.len()) });
    }

    /// The `length` bytes at `offset`.
    ///
    /// # Safety
    ///
    /// While they are borrowed, these bytes are not written through any mapping.
    pub unsafe fn lend(&self, offset: usize, length: usize) -> &[u8] {
        self.check(offset, length);
        // SAFETY: inside the mapping, as just checked; the caller guarantees that there are no writes.
        unsafe { slice::from_raw_parts(self.base.as_ptr().add(offset), length) }
    }

    /// The `length` bytes at `offset`, for writing.
    ///
    /// # Safety
    ///
    /// While they are borrowed, these bytes are not read or written by others, through any mapping.
    #[allow(clippy::mut_from_ref, reason = "the caller guarantees that nobody else has these bytes")]
    pub unsafe fn lend_mut(&self, offset: usize, length: usize) -> &mut [u8] {
        self.check(offset, length);
        // SAFETY: inside the mapping, as just checked, where the caller has exclusive access.
        unsafe { slice::from_raw_parts_mut(self.base.add(offset).as_ptr(), length) }
    }

    /// Prefetches the `length` bytes at `offset` into this processor's cache. This is only a hint.
    pub fn fetch(&self, offset: usize, length: usize) {
        self.check(offset, length);
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        for line in (offset..offset + length).step_by(64) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: inside the mapping, as just checked. The instruction changes no memory.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.base.add(line).as_ptr().cast()) };
        }
    }

    fn check(&self, offset: usize, length: usize) {
        assert!(offset >= self.words && offset <= self.length && length <= self.length - offset);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: this mapping is its own, and nothing borrowed from it can outlive it. Unmapping a mapping of
        // this size cannot fail.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.length) };
    }
}
