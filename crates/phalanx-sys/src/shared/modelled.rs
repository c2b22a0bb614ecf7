//! [`memory`](super::memory) for loom: it records which threads read and write which bytes, and panics if two accesses
//! are not ordered.

use std::cell::UnsafeCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::slice;

use super::LINE;
use crate::sync::{AtomicU32, AtomicU64};

/// Bytes that are watched together. Models move multiples of it.
pub(super) const WATCHED: usize = 32;

#[derive(Debug)]
pub(super) struct Memory {
    words: BTreeMap<usize, AtomicU64>,
    half_words: BTreeMap<usize, AtomicU32>,
    /// Where the bytes begin.
    start: usize,
    bytes: Box<[UnsafeCell<u8>]>,
    /// One for each `WATCHED` bytes.
    watch: Vec<loom::cell::UnsafeCell<()>>,
}

// SAFETY: loom runs one thread at a time, and checks that threads do not access the same bytes concurrently.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Only the atomics that are in use: at most five at the beginning of each line.
    pub fn new(words: usize, bytes: Range<usize>) -> Self {
        let lines = || (0..words).step_by(LINE);
        Self {
            start: bytes.start,
            words: lines()
                .flat_map(|line| [0, 8, 16, 24, 32].map(|at| line + at))
                .map(|at| (at, AtomicU64::default()))
                .collect(),
            half_words: lines().map(|line| (line, AtomicU32::default())).collect(),
            bytes: bytes.clone().map(|_| UnsafeCell::new(0)).collect(),
            watch: bytes.step_by(WATCHED).map(|_| loom::cell::UnsafeCell::new(())).collect(),
        }
    }

    pub fn word(&self, offset: usize) -> &AtomicU64 {
        &self.words[&offset]
    }

    pub fn half_word(&self, offset: usize) -> &AtomicU32 {
        &self.half_words[&offset]
    }

    /// No other process reads it.
    pub fn address(&self, offset: usize) -> u64 {
        offset as u64
    }

    /// # Safety
    ///
    /// No requirement here: loom panics where a real write would be unsound.
    pub unsafe fn write(&self, offset: usize, bytes: &[u8]) {
        self.watched(offset, bytes.len()).iter().for_each(|cell| cell.with_mut(|_| ()));
        for (cell, byte) in self.bytes[offset - self.start..].iter().zip(bytes) {
            // SAFETY: one thread runs at a time, and borrowed bytes are no longer read: loom has checked.
            unsafe { *cell.get() = *byte };
        }
    }

    /// # Safety
    ///
    /// No requirement here: loom panics where a real borrow would be unsound, at the latest at the next write.
    pub unsafe fn lend(&self, offset: usize, length: usize) -> &[u8] {
        self.watched(offset, length).iter().for_each(|cell| cell.with(|_| ()));
        let bytes = &self.bytes[offset - self.start..][..length];
        // SAFETY: a cell of a byte has the layout of a byte.
        unsafe { slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len()) }
    }

    /// # Safety
    ///
    /// No requirement here: loom panics where a real borrow would be unsound.
    #[allow(clippy::mut_from_ref, reason = "loom sees who has these bytes")]
    pub unsafe fn lend_mut(&self, offset: usize, length: usize) -> &mut [u8] {
        self.watched(offset, length).iter().for_each(|cell| cell.with_mut(|_| ()));
        let bytes = &self.bytes[offset - self.start..][..length];
        // SAFETY: as above.
        unsafe { slice::from_raw_parts_mut(bytes.as_ptr().cast_mut().cast(), bytes.len()) }
    }

    pub fn fetch(&self, _: usize, _: usize) {}

    fn watched(&self, offset: usize, length: usize) -> &[loom::cell::UnsafeCell<()>] {
        assert!(offset.is_multiple_of(WATCHED) && length.is_multiple_of(WATCHED));
        &self.watch[(offset - self.start) / WATCHED..][..length / WATCHED]
    }
}
