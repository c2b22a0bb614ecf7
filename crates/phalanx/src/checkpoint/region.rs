//! Slices of a tensor, and what of them lies where. No I/O.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The most dimensions of a tensor that is cut into slices, or of which a slice is read.
const MAX_DIMENSIONS: usize = 64;

/// A box of a tensor: in each dimension where it begins and how long it is, in elements.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Region {
    pub offsets: Vec<usize>,
    pub shape: Vec<usize>,
}

impl Region {
    /// The whole of a tensor of this shape.
    pub fn whole(shape: &[usize]) -> Self {
        Self { offsets: vec![0; shape.len()], shape: shape.to_vec() }
    }

    /// What begins at `offsets` and has the sides `slice`, of a tensor of this `shape`.
    pub fn of(shape: &[usize], offsets: &[usize], slice: &[usize]) -> Result<Self, String> {
        let region = Self { offsets: offsets.to_vec(), shape: slice.to_vec() };
        region.check(shape).map(|()| region)
    }

    /// Does it lie in a tensor of this shape?
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

    /// Where it ends in a dimension; it lies in a tensor.
    fn end(&self, dimension: usize) -> usize {
        self.offsets[dimension].saturating_add(self.shape[dimension])
    }

    /// What both have, if there is any; they are of the same tensor.
    pub fn shared(&self, other: &Self) -> Option<Self> {
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

/// As PyTorch and NumPy write it: `[2:4, 0:8]`.
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

/// Two of `regions`, which lie in one tensor, that share an element.
pub(super) fn overlap(regions: &[&Region]) -> Option<(usize, usize)> {
    let mut order: Vec<usize> = (0..regions.len()).filter(|index| !regions[*index].is_empty()).collect();
    let dimensions = regions.first().map_or(0, |region| region.shape.len());
    // Along the dimension with the most cuts fewest lie side by side.
    let cuts = |dimension: &usize| {
        let mut cuts: Vec<usize> = order.iter().map(|index| regions[*index].offsets[*dimension]).collect();
        cuts.sort_unstable();
        cuts.dedup();
        cuts.len()
    };
    let along = (0..dimensions).max_by_key(cuts);
    order.sort_by_key(|index| along.map(|along| regions[*index].offsets[along]));
    let mut beside: Vec<usize> = Vec::new();
    for index in order {
        let region = regions[index];
        beside.retain(|other| along.is_none_or(|along| regions[*other].end(along) > region.offsets[along]));
        if let Some(other) = beside.iter().find(|other| regions[**other].shared(region).is_some()) {
            return Some((*other, index));
        }
        beside.push(index);
    }
    None
}

/// What `wanted` has of `slice`, both regions of one tensor: pieces that lie together in both, in the order of either.
pub(super) fn pieces(slice: &Region, wanted: &Region, element: usize) -> Option<Pieces> {
    let shared = slice.shared(wanted)?;
    // Behind the last dimension in which it is not the whole of both, everything lies together.
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

/// Where a shared part begins in a region, and how far its elements are apart in each dimension, in bytes.
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

/// Pieces of memory that lie together both in a slice and in what is wanted; see [`pieces`].
#[derive(Debug)]
pub(super) struct Pieces {
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
        let scalars = [Region::whole(&[]), Region::whole(&[])];
        assert_eq!(overlap(&[&scalars[0]]), None);
        assert_eq!(overlap(&[&scalars[0], &scalars[1]]), Some((0, 1)));
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

    proptest! {
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
