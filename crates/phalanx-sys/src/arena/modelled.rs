//! An arena for loom: it records which threads read and write which parts, and panics if two accesses are not ordered.
//! Each part that is lent is in the list of watched ranges.

use std::cell::UnsafeCell;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::slice;
use std::sync::Arc;

use crate::sync::{AtomicU32, AtomicU64};

pub(crate) const PAGE: usize = 4096;

/// The memory of a rank.
pub struct Arena {
    mapping: Arc<Mapping>,
    region: Range<usize>,
}

/// An arena as mapped by every rank.
pub struct Mapping {
    claim: AtomicU64,
    words: BTreeMap<usize, AtomicU64>,
    half_words: BTreeMap<usize, AtomicU32>,
    bytes: Box<[UnsafeCell<u8>]>,
    watch: Vec<(Range<usize>, loom::cell::UnsafeCell<()>)>,
}

// SAFETY: loom runs one thread at a time, and checks that threads do not access the same bytes concurrently.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Arena {
    /// An arena with these words, half words and parts, and one region. Parts behind it are ordinary memory.
    pub(crate) fn modelled(
        words: impl IntoIterator<Item = usize>,
        half_words: impl IntoIterator<Item = usize>,
        parts: impl IntoIterator<Item = Range<usize>>,
        region: Range<usize>,
    ) -> Arc<Self> {
        let watch: Vec<_> = parts.into_iter().map(|part| (part, loom::cell::UnsafeCell::new(()))).collect();
        let end = watch.iter().map(|(part, _)| part.end).fold(region.end, usize::max);
        let mapping = Mapping {
            claim: AtomicU64::default(),
            words: words.into_iter().map(|at| (at, AtomicU64::default())).collect(),
            half_words: half_words.into_iter().map(|at| (at, AtomicU32::default())).collect(),
            bytes: (0..end).map(|_| UnsafeCell::new(0)).collect(),
            watch,
        };
        Arc::new(Self { mapping: Arc::new(mapping), region })
    }

    /// The mapping that all ranks share.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    pub(crate) fn complete_control_block(&self) -> io::Result<()> {
        Ok(())
    }

    pub(crate) fn find(&self, memory: &[u8]) -> Option<usize> {
        let offset = (memory.as_ptr() as usize).checked_sub(self.mapping.bytes.as_ptr() as usize)?;
        (offset == self.region.start && memory.len() == self.region.len()).then_some(offset)
    }

    pub(crate) unsafe fn cut_off(&self, _: usize) -> io::Result<()> {
        Ok(())
    }
}

impl Mapping {
    /// # Safety
    ///
    /// No requirement here: loom panics where a real borrow would be unsound.
    pub(crate) unsafe fn lend(&self, offset: usize, bytes: usize) -> &[u8] {
        self.watched(offset, bytes).for_each(|cell| cell.with(|_| ()));
        // SAFETY: a cell of a byte has the layout of a byte, and loom has checked the rest.
        unsafe { slice::from_raw_parts(self.bytes[offset..offset + bytes].as_ptr().cast(), bytes) }
    }

    /// # Safety
    ///
    /// No requirement here: loom panics where a real borrow would be unsound.
    #[allow(clippy::mut_from_ref, reason = "loom sees who has these bytes")]
    pub(crate) unsafe fn lend_mut(&self, offset: usize, bytes: usize) -> &mut [u8] {
        self.watched(offset, bytes).for_each(|cell| cell.with_mut(|_| ()));
        // SAFETY: as above.
        unsafe {
            slice::from_raw_parts_mut(self.bytes[offset..offset + bytes].as_ptr().cast_mut().cast(), bytes)
        }
    }

    fn watched(&self, offset: usize, bytes: usize) -> impl Iterator<Item = &loom::cell::UnsafeCell<()>> {
        let touched =
            self.watch.iter().filter(move |(part, _)| part.start < offset + bytes && offset < part.end);
        assert!(touched.clone().map(|(part, _)| part.len()).sum::<usize>() >= bytes, "it is not watched");
        touched.map(|(_, cell)| cell)
    }

    pub(crate) fn fetch_to_write(&self, _: usize, _: usize) {}

    pub(crate) fn holds(&self, offset: usize, bytes: usize) -> bool {
        offset + bytes <= self.bytes.len()
    }

    pub(crate) fn identity(&self) -> u64 {
        self.bytes.as_ptr() as u64
    }

    pub(crate) fn is_filled(&self) -> bool {
        true
    }

    pub(crate) fn is_own(&self) -> bool {
        true
    }

    /// Copies what is at `address`, in a part.
    pub(crate) fn read_owner(&self, address: u64, into: &mut [u8]) -> io::Result<()> {
        let offset = address as usize - self.bytes.as_ptr() as usize;
        // SAFETY: loom panics where a real borrow would be unsound.
        into.copy_from_slice(unsafe { self.lend(offset, into.len()) });
        Ok(())
    }

    pub(crate) fn claim(&self) -> &AtomicU64 {
        &self.claim
    }

    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        &self.words[&offset]
    }

    pub(crate) fn half_word(&self, offset: usize) -> &AtomicU32 {
        &self.half_words[&offset]
    }
}
