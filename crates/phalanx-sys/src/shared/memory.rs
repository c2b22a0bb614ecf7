//! The memory behind a segment: words in front, which everybody uses as atomics alone, and bytes behind them, each of
//! which belongs to one side at a time.

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::slice;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::sync::{AtomicU32, AtomicU64};

/// A mapping. It lives as long as this, and cannot be cut short.
#[derive(Debug)]
pub(super) struct Memory {
    base: NonNull<u8>,
    /// Where the words end.
    words: usize,
    length: usize,
}

// SAFETY: what is shared of a mapping is atomic, or bytes that only unsafe functions give access to.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps all of `file`, with `words` bytes of words.
    ///
    /// # Safety
    ///
    /// The file is at least `length` bytes long, and sealed against shrinking. No process touches its first `words`
    /// bytes but as atomics.
    pub unsafe fn map(file: impl AsFd, words: usize, length: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice, of a file that the caller vouches for.
        let base = unsafe { mmap(std::ptr::null_mut(), length, access, MapFlags::SHARED, file, 0) }?;
        Self::at(base.cast(), words, length)
    }

    /// Memory of this process alone.
    #[cfg(any(test, fuzzing))]
    pub fn private(words: usize, length: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the system's choice.
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
        // SAFETY: inside the mapping and aligned, as just checked; every process uses this place as an atomic alone, and
        // any bytes are a valid one.
        unsafe { self.base.add(offset).cast().as_ref() }
    }

    pub fn half_word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.words);
        // SAFETY: as in `word`.
        unsafe { self.base.add(offset).cast().as_ref() }
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Safety
    ///
    /// Until it returns, nobody else reads or writes these bytes, through whatever mapping.
    pub unsafe fn write(&self, offset: usize, bytes: &[u8]) {
        self.check(offset, bytes.len());
        // SAFETY: inside the mapping, as just checked, where the caller has these bytes to itself; `bytes` is memory of
        // this process, which does not overlap.
        unsafe { self.base.add(offset).copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
    }

    /// The `length` bytes at `offset`.
    ///
    /// # Safety
    ///
    /// As long as they are borrowed, nobody writes to these bytes, through whatever mapping.
    pub unsafe fn lend(&self, offset: usize, length: usize) -> &[u8] {
        self.check(offset, length);
        // SAFETY: inside the mapping, as just checked; the caller vouches that nobody writes.
        unsafe { slice::from_raw_parts(self.base.as_ptr().add(offset), length) }
    }

    fn check(&self, offset: usize, length: usize) {
        assert!(offset >= self.words && offset <= self.length && length <= self.length - offset);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: this mapping is its own, and nothing borrowed from it can outlive it. Unmapping what was mapped in
        // this size cannot fail.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.length) };
    }
}
