//! The allocated parts of an arena.

use std::collections::BTreeMap;
use std::ops::Range;

/// The regions of an arena, by offset, and the gaps between them.
pub(super) struct Table {
    /// The length of each gap, by its start. No two gaps touch.
    gaps: BTreeMap<usize, usize>,
    regions: BTreeMap<usize, Entry>,
}

struct Entry {
    pages: usize,
    /// The requested length, not rounded up.
    bytes: usize,
    cut_off: bool,
}

impl Table {
    pub(super) fn new(room: Range<usize>) -> Self {
        Self { gaps: BTreeMap::from([(room.start, room.len())]), regions: BTreeMap::new() }
    }

    /// Allocates `pages` bytes of whole pages in the first gap, for a region of `bytes`.
    pub(super) fn take(&mut self, pages: usize, bytes: usize) -> Option<usize> {
        let (&offset, &room) = self.gaps.iter().find(|(_, room)| **room >= pages)?;
        self.gaps.remove(&offset);
        if room > pages {
            self.gaps.insert(offset + pages, room - pages);
        }
        self.regions.insert(offset, Entry { pages, bytes, cut_off: false });
        Some(offset)
    }

    /// Turns a region into a gap, joined with its neighbours. The place of a region that was cut off is never reused,
    /// because a late peer may still write there.
    pub(super) fn give_back(&mut self, offset: usize) {
        let Some(Entry { mut pages, cut_off: false, .. }) = self.regions.remove(&offset) else { return };
        let mut start = offset;
        if let Some(after) = self.gaps.remove(&(offset + pages)) {
            pages += after;
        }
        if let Some((&before, &room)) = self.gaps.range(..offset).next_back()
            && before + room == offset
        {
            (start, pages) = (before, room + pages);
        }
        self.gaps.insert(start, pages);
    }

    /// The length of the region that starts at `offset`, unless it is cut off.
    pub(super) fn bytes_at(&self, offset: usize) -> Option<usize> {
        self.regions.get(&offset).filter(|entry| !entry.cut_off).map(|entry| entry.bytes)
    }

    /// Marks a region as cut off. Returns its length, or None if it was marked before.
    pub(super) fn cut_off(&mut self, offset: usize) -> Option<usize> {
        let entry = self.regions.get_mut(&offset).filter(|entry| !entry.cut_off)?;
        entry.cut_off = true;
        Some(entry.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_joins_its_neighbours() {
        let mut table = Table::new(10..110);
        let places: Vec<_> = (0..10).map(|_| table.take(10, 9).unwrap()).collect();
        assert_eq!(places, (1..=10).map(|place| 10 * place).collect::<Vec<_>>());
        assert_eq!(table.take(10, 10), None);
        for place in [20, 40, 30] {
            table.give_back(place);
        }
        assert_eq!(table.gaps, BTreeMap::from([(20, 30)]));
        assert_eq!(table.take(30, 21), Some(20));
        assert_eq!(table.bytes_at(20), Some(21));
        (1..=10).for_each(|place| table.give_back(10 * place));
        assert_eq!(table.gaps, BTreeMap::from([(10, 100)]));
    }

    #[test]
    fn a_place_that_was_cut_off_is_not_taken_again() {
        let mut table = Table::new(0..20);
        let place = table.take(10, 10).unwrap();
        assert_eq!(table.cut_off(place), Some(10));
        assert_eq!((table.cut_off(place), table.bytes_at(place)), (None, None));
        table.give_back(place);
        assert_eq!(table.take(10, 10), Some(10));
        assert_eq!(table.take(10, 10), None);
    }
}
