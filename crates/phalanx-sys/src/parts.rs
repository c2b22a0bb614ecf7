//! Memory that is divided into parts: each part has its own owner, which may write to it.

use std::fmt;
use std::mem::size_of_val;
use std::ops::Range;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use bytemuck::Pod;

use crate::arena::Region;

/// A part of divided memory. The whole is freed with the last of its parts. If it is a region, the pages that
/// are completely inside one part are freed with that part, unless a [`Keeper`] has been taken.
pub struct Part {
    whole: Arc<Whole>,
    place: Range<usize>,
    memory: NonNull<u8>,
    is_kept: bool,
}

/// Keeps divided memory, with its content and at its address, when all its parts are dropped. It gives no access while
/// there are any; see [`reclaim`](Self::reclaim).
#[derive(Clone)]
pub struct Keeper {
    whole: Arc<Whole>,
    place: Range<usize>,
    memory: NonNull<u8>,
}

enum Whole {
    Region(Region),
    Owned(#[expect(dead_code, reason = "it is held until it is dropped")] Box<dyn Send + Sync>),
}

/// The assumptions of the next two implementations.
const _: () = {
    const fn can_be_sent_and_shared<T: Send + Sync>() {}
    can_be_sent_and_shared::<Whole>();
};

// SAFETY: a part is the only access to its bytes, like a `Box<[u8]>`; the whole can be sent and shared.
unsafe impl Send for Part {}
// SAFETY: as above; a shared part is only read.
unsafe impl Sync for Part {}
// SAFETY: a keeper does not use its pointer; the part that it may become can be sent.
unsafe impl Send for Keeper {}
// SAFETY: as above: a shared keeper can only be cloned.
unsafe impl Sync for Keeper {}

impl Part {
    /// Divides `region` into the parts at `places`, counted in bytes. Bytes outside all places can no longer be
    /// accessed.
    ///
    /// # Panics
    /// If places overlap, do not ascend, or lie beyond the end.
    pub fn of_region(mut region: Region, places: impl IntoIterator<Item = Range<usize>>) -> Vec<Self> {
        let memory = region.as_mut_slice();
        let (base, bytes) = (memory.as_mut_ptr(), memory.len());
        Self::split(Whole::Region(region), base, bytes, places)
    }

    /// Divides `elements`, as [`of_region`](Self::of_region) divides a region.
    pub fn of_vec<T: Pod + Send + Sync>(
        elements: Vec<T>,
        places: impl IntoIterator<Item = Range<usize>>,
    ) -> Vec<Self> {
        let mut elements = Box::new(elements);
        let (base, bytes) = (elements.as_mut_ptr().cast(), size_of_val(elements.as_slice()));
        Self::split(Whole::Owned(elements), base, bytes, places)
    }

    /// `base` points to the `bytes` of `whole`. Any bits must be a valid value, and only these parts may use them from
    /// now on.
    fn split(
        whole: Whole,
        base: *mut u8,
        bytes: usize,
        places: impl IntoIterator<Item = Range<usize>>,
    ) -> Vec<Self> {
        let whole = Arc::new(whole);
        let mut end = 0;
        let part = |place: Range<usize>| {
            assert!(end <= place.start && place.start <= place.end && place.end <= bytes, "parts overlap");
            end = place.end;
            // SAFETY: inside the whole, as just checked.
            let memory = unsafe { NonNull::new_unchecked(base.add(place.start)) };
            Self { whole: whole.clone(), place, memory, is_kept: false }
        };
        places.into_iter().map(part).collect()
    }

    /// Divides this part further, as [`of_region`](Self::of_region) divides a region. Bytes outside all places are freed
    /// with the whole.
    ///
    /// # Panics
    /// As [`of_region`](Self::of_region).
    pub fn divide(self, places: impl IntoIterator<Item = Range<usize>>) -> Vec<Self> {
        let mut this = self;
        // What lies between the new parts must not be freed with this one while they use the pages.
        this.is_kept = true;
        let mut end = 0;
        let part = |place: Range<usize>| {
            let inside = end <= place.start && place.start <= place.end && place.end <= this.place.len();
            assert!(inside, "parts overlap");
            end = place.end;
            // SAFETY: inside this part, as just checked.
            let memory = unsafe { this.memory.add(place.start) };
            let place = this.place.start + place.start..this.place.start + place.end;
            Self { whole: this.whole.clone(), place, memory, is_kept: true }
        };
        places.into_iter().map(part).collect()
    }

    /// From now on the memory outlives its parts, until the keeper and its clones are dropped.
    pub fn keeper(&mut self) -> Keeper {
        self.is_kept = true;
        Keeper { whole: self.whole.clone(), place: self.place.clone(), memory: self.memory }
    }

    /// Whether it is a region's, which peers can reach.
    pub fn is_of_region(&self) -> bool {
        matches!(*self.whole, Whole::Region(_))
    }

    /// Its bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: initialised, alive as long as the whole, and not in another part: places do not overlap.
        unsafe { slice::from_raw_parts(self.memory.as_ptr(), self.place.len()) }
    }

    /// Its bytes, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above; and this borrow is exclusive.
        unsafe { slice::from_raw_parts_mut(self.memory.as_ptr(), self.place.len()) }
    }
}

impl Keeper {
    /// The part that the keeper was taken of, as one piece, if all parts of the memory and all other keepers are gone.
    /// Otherwise the keeper itself.
    pub fn reclaim(mut self) -> Result<Part, Self> {
        // Nobody else can reach the memory, and what they have written there is seen here.
        match Arc::get_mut(&mut self.whole) {
            Some(_) => Ok(Part { whole: self.whole, place: self.place, memory: self.memory, is_kept: true }),
            None => Err(self),
        }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if let (Whole::Region(region), false) = (&*self.whole, self.is_kept) {
            // SAFETY: these bytes were only this part's, and can no longer be accessed.
            unsafe { region.release(self.place.clone()) };
        }
    }
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keeper")
    }
}

impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Part({:?} bytes)", self.place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_apart_and_the_whole_lives_as_long_as_any() {
        let mut parts = Part::of_vec(vec![0u32; 8], [0..4, 4..12, 16..32]);
        for (value, part) in (1..).zip(&mut parts) {
            part.as_mut_slice().fill(value);
        }
        assert_eq!(parts[1].as_slice(), [2; 8]);
        let last = parts.pop().unwrap();
        drop(parts);
        std::thread::spawn(move || assert_eq!(last.as_slice(), [3; 16])).join().unwrap();
    }

    #[test]
    fn kept_memory_outlives_its_parts() {
        let witness = Arc::new(());
        let whole = Whole::Owned(Box::new(witness.clone()));
        let mut part = [1u8; 8];
        let mut part = Part::split(whole, part.as_mut_ptr(), 8, std::iter::once(0..8)).remove(0);
        let keeper = part.keeper();
        drop(part.divide([0..2, 4..8]));
        assert_eq!(Arc::strong_count(&witness), 2);
        drop(keeper);
        assert_eq!(Arc::strong_count(&witness), 1);
    }

    #[test]
    fn a_keeper_gives_the_memory_back_when_nobody_else_has_any_of_it() {
        let mut part = Part::of_vec(vec![0u8; 8], std::iter::once(0..8)).remove(0);
        let keeper = part.keeper();
        let mut parts = part.divide([0..2, 4..8]);
        parts[1].as_mut_slice().fill(7);
        let (last, other) = (parts.pop(), keeper.clone());
        drop(parts);
        let keeper = keeper.reclaim().map(|_| "a part is left").unwrap_err();
        std::thread::spawn(move || drop(last)).join().unwrap();
        let keeper = keeper.reclaim().map(|_| "another keeper is left").unwrap_err();
        drop(other);
        let mut whole = keeper.reclaim().map_err(|_| "nobody is left").unwrap();
        assert_eq!(whole.as_slice(), [0, 0, 0, 0, 7, 7, 7, 7]);
        whole.as_mut_slice().fill(1);
    }

    #[test]
    fn a_part_is_divided_within_its_place() {
        let mut parts = Part::of_vec((0u8..16).collect(), [0..4, 4..16]);
        let inner = parts.remove(1).divide([1..3, 8..12]);
        assert_eq!((inner[0].as_slice(), inner[1].as_slice()), (&[5u8, 6][..], &[12u8, 13, 14, 15][..]));
    }

    #[test]
    #[should_panic(expected = "parts overlap")]
    fn a_part_is_not_divided_beyond_its_end() {
        Part::of_vec(vec![0u8; 16], [0..4, 4..16]).remove(0).divide([0..1, 2..9]);
    }

    #[test]
    #[should_panic(expected = "parts overlap")]
    fn parts_that_overlap_are_refused() {
        Part::of_vec(vec![0u32; 8], [0..4, 3..12]);
    }

    #[test]
    #[should_panic(expected = "parts overlap")]
    fn a_part_beyond_the_end_is_refused() {
        Part::of_vec(vec![0u32; 8], [0..4, 4..33]);
    }
}
