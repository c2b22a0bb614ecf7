//! Memory of earlier payloads, for later ones.
//!
//! New memory for a payload of some MiB costs more than the payload's way between two ranks of one host: the kernel clears each page at its
//! first use, and the program once more before it may receive into it.

use std::collections::VecDeque;

use parking_lot::Mutex;

use crate::buffer::Buffer;
use crate::dtype::DType;

/// Shorter payloads cost little in new memory.
pub(super) const LEAST: usize = 32 << 10;
/// How many bytes, and how many payloads, are kept.
const MOST_BYTES: usize = 64 << 20;
const MOST: usize = 64;

/// The memory, the longest unused first.
#[derive(Default)]
pub(super) struct Spare(Mutex<VecDeque<Buffer>>);

impl Spare {
    /// Memory for `length` bytes, whose values are unspecified; None if there is not so much.
    pub(super) fn take(&self, length: usize) -> Option<Buffer> {
        if length >= LEAST {
            // Not much more than is needed: limits count payloads by their lengths, and many short ones may wait at a time.
            let fits = |buffer: &Buffer| (length..=length.saturating_mul(2)).contains(&buffer.capacity());
            let mut kept = self.0.lock();
            let fitting = kept.iter().enumerate().filter(|(_, buffer)| fits(buffer));
            let least = fitting.min_by_key(|(_, buffer)| buffer.capacity()).map(|(index, _)| index);
            let found = least.and_then(|index| kept.remove(index));
            drop(kept);
            if let Some(buffer) = found {
                return Some(buffer.reused(length));
            }
        }
        Buffer::try_zeroed(DType::U8, length).ok()
    }

    /// A copy of these parts, one after the other; None if there is no memory for it.
    pub(super) fn copy(&self, parts: &[&[u8]]) -> Option<Buffer> {
        let mut copy = self.take(parts.iter().map(|part| part.len()).sum())?;
        let mut rest = copy.as_bytes_mut();
        for part in parts {
            let (now, later) = rest.split_at_mut(part.len());
            now.copy_from_slice(part);
            rest = later;
        }
        Some(copy)
    }

    /// Keeps the memory of a payload that is not needed any more, until newer memory takes its place.
    pub(super) fn give(&self, payload: Buffer) {
        if !(LEAST..=MOST_BYTES).contains(&payload.capacity()) {
            return;
        }
        let mut kept = self.0.lock();
        kept.push_back(payload);
        let mut bytes: usize = kept.iter().map(Buffer::capacity).sum();
        let mut dropped = Vec::new();
        while bytes > MOST_BYTES || kept.len() > MOST {
            let Some(oldest) = kept.pop_front() else { break };
            bytes -= oldest.capacity();
            dropped.push(oldest);
        }
        // It is freed without the lock, which the threads that receive need.
        drop(kept);
        drop(dropped);
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.0.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;

    use super::*;

    #[test]
    fn memory_is_used_again_for_payloads_of_about_its_length() {
        let spare = Spare::default();
        let address = |buffer: &Buffer| buffer.as_bytes().as_ptr() as usize;
        let long = spare.take(1 << 20).unwrap();
        let memory = address(&long);
        spare.give(long);
        let short = spare.take((1 << 19) - 1).unwrap();
        assert_ne!(address(&short), memory, "it would hold more than twice its length");
        let same = spare.copy(&[&[3; 1 << 18], &[3; 1 << 18]]).unwrap();
        assert_eq!((address(&same), same.len(), spare.count()), (memory, 1 << 19, 0));
        assert!(same.as_bytes().iter().all(|byte| *byte == 3));
        spare.give(same);
        spare.give(short);
        let least = spare.take(1 << 18).unwrap();
        assert_ne!(address(&least), memory, "the shortest that is enough");
        assert_eq!((spare.take(10).unwrap().len(), spare.count()), (10, 1));
    }

    #[test]
    fn memory_that_there_is_not_is_none() {
        assert!(black_box(Spare::default().take(isize::MAX as usize / 2)).is_none());
    }

    #[test]
    fn no_more_memory_is_kept_than_the_limits() {
        let spare = Spare::default();
        spare.give(Buffer::zeroed(DType::U8, MOST_BYTES + 1));
        spare.give(Buffer::zeroed(DType::U8, LEAST / 2));
        assert_eq!(spare.count(), 0);
        for _ in 0..2 * MOST {
            spare.give(Buffer::zeroed(DType::U8, LEAST));
        }
        assert_eq!(spare.count(), MOST);
        for _ in 0..3 {
            spare.give(Buffer::zeroed(DType::U8, MOST_BYTES / 2));
        }
        assert_eq!(spare.count(), 2, "the oldest go first");
    }
}
