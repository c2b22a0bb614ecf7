//! Slices of a tensor, and where they overlap. No I/O.

#[cfg(test)]
use std::cell::Cell;
use std::fmt;
use std::hash::BuildHasher;

use serde::{Deserialize, Serialize};

/// The most dimensions of a tensor with slices.
const MAX_DIMENSIONS: usize = 64;
/// The most pairs that [`overlap`] compares. It finds the mistakes of ranks with far fewer.
const MAX_COMPARED: usize = 1 << 20;
/// The prime 2^61 - 1.
const PRIME: u64 = (1 << 61) - 1;

#[cfg(test)]
thread_local! {
    /// How many pairs this thread has compared.
    pub static COMPARED: Cell<usize> = const { Cell::new(0) };
}

/// A box of a tensor: its offset and its length in each dimension, in elements.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Region {
    /// Where it begins in each dimension.
    pub offsets: Vec<usize>,
    /// Its length in each dimension.
    pub shape: Vec<usize>,
}

impl Region {
    /// The whole of a tensor of this shape.
    pub fn whole(shape: &[usize]) -> Self {
        Self { offsets: vec![0; shape.len()], shape: shape.to_vec() }
    }

    /// The region at `offsets` with the sides `slice`, of a tensor of this `shape`.
    pub fn of(shape: &[usize], offsets: &[usize], slice: &[usize]) -> Result<Self, String> {
        let region = Self { offsets: offsets.to_vec(), shape: slice.to_vec() };
        region.check(shape).map(|()| region)
    }

    /// Checks that it lies within a tensor of this shape.
    pub fn check(&self, shape: &[usize]) -> Result<(), String> {
        let dimensions = shape.len();
        if dimensions > MAX_DIMENSIONS {
            return Err(format!(
                "a tensor of {dimensions} dimensions has no slices: {MAX_DIMENSIONS} are the most"
            ));
        }
        if self.offsets.len() != dimensions || self.shape.len() != dimensions {
            return Err(format!("a slice of {shape:?} needs {dimensions} offsets, and as many sides"));
        }
        let inside = self
            .sides()
            .zip(shape)
            .all(|((offset, length), side)| offset.checked_add(length).is_some_and(|end| end <= *side));
        if inside { Ok(()) } else { Err(format!("{self} is not within {shape:?}")) }
    }

    /// The number of its elements.
    pub fn elements(&self) -> u128 {
        self.shape.iter().map(|side| *side as u128).fold(1, u128::saturating_mul)
    }

    fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    fn sides(&self) -> impl Iterator<Item = (usize, usize)> {
        self.offsets.iter().copied().zip(self.shape.iter().copied())
    }

    /// Its end in a dimension; it lies within a tensor.
    fn end(&self, dimension: usize) -> usize {
        self.offsets[dimension].saturating_add(self.shape[dimension])
    }

    /// The intersection with another region of the same tensor, if there is one.
    pub fn shared(&self, other: &Self) -> Option<Self> {
        #[cfg(test)]
        COMPARED.set(COMPARED.get() + 1);
        let dimensions = 0..self.shape.len();
        let from = |dimension: usize| self.offsets[dimension].max(other.offsets[dimension]);
        let to = |dimension: usize| self.end(dimension).min(other.end(dimension));
        let offsets = dimensions.clone().map(from).collect();
        let shape =
            dimensions.map(|dimension| to(dimension).checked_sub(from(dimension))).collect::<Option<_>>()?;
        let shared = Self { offsets, shape };
        (!shared.is_empty()).then_some(shared)
    }
}

/// In the notation of PyTorch and NumPy: `[2:4, 0:8]`.
impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (dimension, (offset, length)) in self.sides().enumerate() {
            let before = if dimension == 0 { "" } else { ", " };
            write!(f, "{before}{offset}:{}", offset.saturating_add(length))?;
        }
        f.write_str("]")
    }
}

/// Whether `regions`, which lie within a tensor of this `shape`, cover each element exactly once.
///
/// It takes time in proportion to their number, however they lie. Every coordinate of every dimension is given a random place
/// on its axis, in the field of the numbers modulo the prime 2^61 - 1, and the volumes of the regions are added up. Written
/// as polynomials in those places, their sum is the volume of the whole if each element is in one region, and only then: what
/// regions on two sides of a cut have in common cancels out, and nothing else does. By the lemma of Schwartz and Zippel, two
/// polynomials that differ have the same value with a probability of at most `dimensions / (2^61 - 1)`, less than 10^-16. The
/// places come from `random`, which is to be seeded anew each time, so that nobody can choose regions to suit them.
pub fn cover<'a>(
    regions: impl Iterator<Item = &'a Region>,
    shape: &[usize],
    random: &impl BuildHasher,
) -> bool {
    let place = |dimension: usize, coordinate: usize| random.hash_one((dimension, coordinate)) % PRIME;
    let volume = |region: &Region| {
        (0..shape.len()).fold(1, |volume, dimension| {
            let from = place(dimension, region.offsets[dimension]);
            let to = place(dimension, region.end(dimension));
            let product = u128::from(volume) * u128::from(PRIME + to - from) % u128::from(PRIME);
            product as u64
        })
    };
    let sum = regions.fold(0, |sum, region| (sum + volume(region)) % PRIME);
    sum == volume(&Region::whole(shape))
}

/// Two of `regions`, in one tensor, that share an element; for an error message. It gives up if they are many and
/// overlap in all dimensions.
pub fn overlap(regions: &[&Region]) -> Option<(usize, usize)> {
    let mut order: Vec<usize> = (0..regions.len()).filter(|index| !regions[*index].is_empty()).collect();
    let dimensions = regions.first().map_or(0, |region| region.shape.len());
    // Sorted along the dimension with the most cuts, in which the fewest lie side by side.
    let cuts = |dimension: &usize| {
        let mut cuts: Vec<usize> = order.iter().map(|index| regions[*index].offsets[*dimension]).collect();
        cuts.sort_unstable();
        cuts.dedup();
        cuts.len()
    };
    let along = (0..dimensions).max_by_key(cuts);
    order.sort_by_key(|index| along.map(|along| regions[*index].offsets[along]));
    let (mut beside, mut left): (Vec<usize>, usize) = (Vec::new(), MAX_COMPARED);
    for index in order {
        let region = regions[index];
        beside.retain(|other| along.is_none_or(|along| regions[*other].end(along) > region.offsets[along]));
        left = left.checked_sub(beside.len())?;
        if let Some(other) = beside.iter().find(|other| regions[**other].shared(region).is_some()) {
            return Some((*other, index));
        }
        beside.push(index);
    }
    None
}

/// The common part of `wanted` and `slice`, two regions of one tensor: pieces that are contiguous in both, in the order
/// of both.
pub fn pieces(slice: &Region, wanted: &Region, element: usize) -> Option<Pieces> {
    let shared = slice.shared(wanted)?;
    // Everything behind the last dimension that is not completely in both is contiguous.
    let dimensions = shared.shape.len();
    let full = |dimension: &usize| {
        shared.shape[*dimension] == slice.shape[*dimension]
            && shared.shape[*dimension] == wanted.shape[*dimension]
    };
    let outer = (0..dimensions).rev().find(|dimension| !full(dimension)).unwrap_or(0);
    let length = shared.shape[outer.min(dimensions)..].iter().product::<usize>() * element;
    let place = |region: &Region| {
        let mut strides = vec![element; dimensions];
        for dimension in (1..dimensions).rev() {
            strides[dimension - 1] = strides[dimension] * region.shape[dimension];
        }
        let start = (0..dimensions)
            .map(|dimension| (shared.offsets[dimension] - region.offsets[dimension]) * strides[dimension])
            .sum();
        Place { start, strides }
    };
    let (from, to) = (place(slice), place(wanted));
    Some(Pieces { from, to, length, count: shared.shape[..outer].to_vec(), index: Some(vec![0; outer]) })
}

/// Where the common part begins in a region, and its strides in bytes.
#[derive(Debug)]
struct Place {
    start: usize,
    strides: Vec<usize>,
}

impl Place {
    fn at(&self, index: &[usize]) -> usize {
        self.start + index.iter().zip(&self.strides).map(|(index, stride)| index * stride).sum::<usize>()
    }
}

/// Pieces of memory that are contiguous both in a slice and in the wanted region; see [`pieces`].
#[derive(Debug)]
pub struct Pieces {
    from: Place,
    to: Place,
    /// Of each piece, in bytes.
    pub length: usize,
    /// How many there are in each outer dimension.
    count: Vec<usize>,
    index: Option<Vec<usize>>,
}

impl Pieces {
    /// How far one piece is from the next in the slice, in bytes.
    pub fn stride(&self) -> usize {
        self.count.len().checked_sub(1).map_or(self.length, |inner| self.from.strides[inner])
    }
}

impl Iterator for Pieces {
    /// Where a piece begins in the slice, and in what is wanted, in bytes.
    type Item = (usize, usize);

    fn next(&mut self) -> Option<Self::Item> {
        let index = self.index.as_mut()?;
        let item = (self.from.at(index), self.to.at(index));
        let next = (0..index.len()).rev().find(|dimension| index[*dimension] + 1 < self.count[*dimension]);
        match next {
            Some(dimension) => {
                index[dimension] += 1;
                index[dimension + 1..].fill(0);
            }
            None => self.index = None,
        }
        Some(item)
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use proptest::prelude::*;

    use super::super::Unseeded;
    use super::*;

    fn region(ranges: &[Range<usize>]) -> Region {
        Region {
            offsets: ranges.iter().map(|range| range.start).collect(),
            shape: ranges.iter().map(|range| range.end - range.start).collect(),
        }
    }

    #[test]
    fn what_is_no_slice_is_refused() {
        type Sides = &'static [usize];
        let wrong: [(Sides, Sides); 5] =
            [(&[0], &[3]), (&[0, 0], &[3, 5]), (&[2, 0], &[2, 4]), (&[], &[]), (&[usize::MAX, 0], &[2, 4])];
        for (offsets, sides) in wrong {
            assert!(Region::of(&[3, 4], offsets, sides).is_err(), "{offsets:?} {sides:?}");
        }
        assert!(Region::whole(&[1; 65]).check(&[1; 65]).is_err());
        assert_eq!(Region::of(&[3, 4], &[1, 4], &[2, 0]).unwrap().to_string(), "[1:3, 4:4]");
    }

    #[test]
    fn overlaps_are_found_in_any_dimension() {
        let rows = [region(&[0..2, 0..4]), region(&[2..5, 0..4]), region(&[4..6, 0..4])];
        assert_eq!(overlap(&rows.iter().collect::<Vec<_>>()), Some((1, 2)));
        let columns =
            [region(&[0..6, 0..2]), region(&[0..6, 2..3]), region(&[0..6, 3..4]), region(&[1..1, 0..4])];
        assert_eq!(overlap(&columns.iter().collect::<Vec<_>>()), None);
        // A pinwheel, which no single cut divides.
        let wheel = [
            region(&[0..2, 0..1]),
            region(&[0..1, 1..3]),
            region(&[1..3, 2..3]),
            region(&[2..3, 0..2]),
            region(&[1..2, 1..2]),
        ];
        assert_eq!(overlap(&wheel.iter().collect::<Vec<_>>()), None);
        assert!(
            cover(wheel.iter(), &[3, 3], &Unseeded::default())
                && !cover(wheel[..4].iter(), &[3, 3], &Unseeded::default())
        );
        let scalars = [Region::whole(&[]), Region::whole(&[])];
        assert_eq!(overlap(&[&scalars[0]]), None);
        assert_eq!(overlap(&[&scalars[0], &scalars[1]]), Some((0, 1)));
    }

    #[test]
    fn a_cover_has_each_element_once() {
        let covers = |regions: &[Region], shape: &[usize]| cover(regions.iter(), shape, &Unseeded::default());
        let scalar = Region::whole(&[]);
        assert!(covers(std::slice::from_ref(&scalar), &[]));
        assert!(!covers(&[], &[]) && !covers(&[scalar.clone(), scalar], &[]));
        assert!(covers(&[], &[3, 0]) && !covers(&[], &[3, 1]));
        let row = |from, to| region(&[from..to, 0..4]);
        assert!(covers(&[row(2, 5), row(0, 2), row(5, 5)], &[5, 4]));
        // As many elements as there are, and one row twice.
        assert!(!covers(&[row(0, 2), row(1, 4)], &[5, 4]));
        assert!(!covers(&[row(0, 5), row(1, 4)], &[5, 4]) && !covers(&[row(0, 4)], &[5, 4]));
        // The corners of an empty region cancel out.
        assert!(covers(&[row(0, 5), region(&[1..4, 2..2])], &[5, 4]));
        let largest = region(&[0..usize::MAX, 0..1]);
        assert!(covers(&[largest], &[usize::MAX, 1]));
    }

    /// A shape of up to three dimensions, and two regions in it.
    fn cut() -> impl Strategy<Value = (Vec<usize>, Region, Region)> {
        let sides = proptest::collection::vec((1usize..6, 0usize..6, 0usize..6, 0usize..6, 0usize..6), 0..4);
        sides.prop_map(|sides| {
            let shape: Vec<usize> = sides.iter().map(|side| side.0).collect();
            let of = |ends: Vec<(usize, usize)>| {
                let ranges: Vec<Range<usize>> = ends
                    .iter()
                    .zip(&shape)
                    .map(|((one, other), side)| {
                        let (one, other) = (one % (side + 1), other % (side + 1));
                        one.min(other)..one.max(other)
                    })
                    .collect();
                region(&ranges)
            };
            let one = of(sides.iter().map(|side| (side.1, side.2)).collect());
            let other = of(sides.iter().map(|side| (side.3, side.4)).collect());
            (shape, one, other)
        })
    }

    /// The places of a region's elements in the whole tensor, in its own order.
    fn places(region: &Region, shape: &[usize]) -> Vec<usize> {
        let mut places = vec![0];
        for (dimension, side) in shape.iter().enumerate() {
            let own = region.offsets[dimension]..region.end(dimension);
            places =
                places.iter().flat_map(|place| own.clone().map(move |index| place * side + index)).collect();
        }
        places
    }

    /// Cuts `regions` again and again, each time one of them in two.
    fn cut_up(mut regions: Vec<Region>, cuts: &[(usize, usize, usize)]) -> Vec<Region> {
        for (which, dimension, at) in cuts {
            let index = which % regions.len();
            let first = &mut regions[index];
            let dimension = dimension % first.shape.len();
            let length = at % (first.shape[dimension] + 1);
            let mut second = first.clone();
            first.shape[dimension] = length;
            second.offsets[dimension] += length;
            second.shape[dimension] -= length;
            regions.push(second);
        }
        regions
    }

    proptest! {
        #[test]
        fn what_is_cut_up_is_covered_until_one_piece_changes(
            shape in proptest::collection::vec(1usize..7, 1..4),
            cuts in proptest::collection::vec((0usize..99, 0usize..9, 0usize..9), 0..12),
            (which, moved) in (0usize..99, 0usize..9),
        ) {
            let mut regions = cut_up(vec![Region::whole(&shape)], &cuts);
            prop_assert!(cover(regions.iter(), &shape, &Unseeded::default()));
            let count = regions.len();
            let (changed, dimension) = (&mut regions[which % count], moved % shape.len());
            let before = changed.clone();
            changed.offsets[dimension] = moved % (shape[dimension] - changed.shape[dimension] + 1);
            let is_same = *changed == before || before.is_empty();
            prop_assert_eq!(cover(regions.iter(), &shape, &Unseeded::default()), is_same);
            let lost = regions.swap_remove(which % count);
            prop_assert_eq!(cover(regions.iter(), &shape, &Unseeded::default()), is_same && lost.is_empty());
        }

        #[test]
        fn pieces_are_what_both_have((shape, slice, wanted) in cut()) {
            let (from, to) = (places(&slice, &shape), places(&wanted, &shape));
            let expected: Vec<(usize, usize)> = from
                .iter()
                .enumerate()
                .filter_map(|(at, place)| Some((at, to.iter().position(|other| other == place)?)))
                .collect();
            let mut found = Vec::new();
            if let Some(pieces) = pieces(&slice, &wanted, 1) {
                let length = pieces.length;
                for (source, target) in pieces {
                    found.extend((0..length).map(|byte| (source + byte, target + byte)));
                }
            }
            prop_assert_eq!(&found, &expected);
            prop_assert_eq!(overlap(&[&slice, &wanted]).is_some(), !expected.is_empty());
        }
    }
}
