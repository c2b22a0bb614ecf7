//! Which rank has which slices of which tensors, as ranks propose it for a sharded checkpoint and as the manifest says.
//! No I/O.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::hash::BuildHasher;

use serde::{Deserialize, Serialize};

use super::region::{Region, cover, overlap};
use super::tensors::{byte_length, is_tensor_name};
use crate::dtype::DType;

/// The most slices of one tensor: one for each rank of the largest world.
const MAX_SLICES: usize = crate::world_size::MAX_WORLD_SIZE as usize;
/// The most slices that an error names.
const SHOWN: usize = 16;

/// A tensor of a checkpoint, and the slices in which it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// The name.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Of the whole tensor.
    pub shape: Vec<usize>,
    /// By rank, in the order of the rank's file.
    pub slices: Vec<SliceEntry>,
}

/// A slice, or the whole tensor, in the file of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SliceEntry {
    /// The rank whose file has it.
    pub rank: u32,
    /// The part of the tensor.
    pub region: Region,
    /// The offset of its first element in the file, in bytes.
    pub start: u64,
}

/// A slice that a rank is about to write.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Proposed {
    /// The tensor's name.
    pub name: String,
    /// The type of the tensor's elements.
    pub dtype: DType,
    /// The shape of the whole tensor.
    pub shape: Vec<usize>,
    /// The part of the tensor.
    pub region: Region,
    /// The offset of its first element in the rank's file, in bytes.
    pub start: u64,
}

impl TensorEntry {
    /// An error if a slice does not lie within files of these `lengths`. Adds to `places` the rank, the start and the end of each
    /// slice's bytes.
    fn check_places(&self, lengths: &[u64], places: &mut Vec<(u32, u64, u64)>) -> Result<(), String> {
        let Self { name, dtype, shape, slices } = self;
        if !is_tensor_name(name) || byte_length(*dtype, shape).is_none() {
            return Err(format!("no tensor can be {name:?}, {dtype} {shape:?}"));
        }
        for SliceEntry { rank, region, start } in slices {
            region
                .check(shape)
                .map_err(|cause| format!("rank {rank}'s slice of the tensor {name:?}: {cause}"))?;
            let length =
                lengths.get(*rank as usize).ok_or_else(|| format!("{name:?}: no rank {rank} has written"))?;
            let end = byte_length(*dtype, &region.shape).and_then(|bytes| start.checked_add(bytes as u64));
            let Some(end) = end.filter(|end| end <= length) else {
                return Err(format!(
                    "rank {rank}'s slice {region} of the tensor {name:?} ends behind its file"
                ));
            };
            if *start < end {
                places.push((*rank, *start, end));
            }
        }
        Ok(())
    }

    /// Checks that the slices, which lie within the tensor, cover each element exactly once.
    fn check_cover(&self, random: &impl BuildHasher) -> Result<(), String> {
        let Self { name, shape, slices, .. } = self;
        if slices.len() > MAX_SLICES {
            return Err(format!(
                "the tensor {name:?} has {} slices, and may have {MAX_SLICES}",
                slices.len()
            ));
        }
        if cover(slices.iter().map(|slice| &slice.region), shape, random) {
            return Ok(());
        }
        let regions: Vec<&Region> = slices.iter().map(|slice| &slice.region).collect();
        if let Some((one, other)) = overlap(&regions) {
            let (one, other) = (&slices[one], &slices[other]);
            return Err(format!(
                "the tensor {name:?} {shape:?} is saved twice: rank {} has {}, and rank {} has {}",
                one.rank, one.region, other.rank, other.region
            ));
        }
        let (all, there): (u128, u128) =
            (Region::whole(shape).elements(), regions.iter().map(|region| region.elements()).sum());
        let Some(gap) = all.checked_sub(there).filter(|gap| *gap > 0) else {
            return Err(format!("of the tensor {name:?} {shape:?} some elements are saved twice"));
        };
        let named: Vec<String> = slices
            .iter()
            .take(SHOWN)
            .map(|SliceEntry { rank, region, .. }| format!("rank {rank} has {region}"))
            .collect();
        let more = if slices.len() > SHOWN { ", .." } else { "" };
        Err(format!(
            "the tensor {name:?} {shape:?} has gaps: {gap} of {all} elements are no rank's; {}{more}",
            named.join(", ")
        ))
    }
}

/// Checks tensors against files of these `lengths`: each byte belongs to one element at most, and each element of each
/// tensor is there once. A manifest may be hostile: reading it takes no more memory than its files have bytes.
pub fn check(tensors: &[TensorEntry], lengths: &[u64], random: &impl BuildHasher) -> Result<(), String> {
    let mut places = Vec::new();
    tensors.iter().try_for_each(|tensor| tensor.check_places(lengths, &mut places))?;
    places.sort_unstable();
    let shared = |pair: &&[(u32, u64, u64)]| matches!(pair, [(one, _, end), (other, start, _)] if one == other && start < end);
    if let Some([(rank, start, _), ..]) = places.windows(2).find(shared) {
        return Err(format!("two slices have the same bytes of rank {rank}'s file, behind byte {start}"));
    }
    tensors.iter().try_for_each(|tensor| tensor.check_cover(random))
}

/// The tensors that the ranks propose, merged by name.
pub fn merged(
    ranks: impl Iterator<Item = (u32, Vec<Proposed>)>,
    random: &impl BuildHasher,
) -> Result<Vec<TensorEntry>, String> {
    let mut tensors: BTreeMap<String, TensorEntry> = BTreeMap::new();
    for (rank, slices) in ranks {
        for Proposed { name, dtype, shape, region, start } in slices {
            region
                .check(&shape)
                .map_err(|cause| format!("rank {rank}'s slice of the tensor {name:?}: {cause}"))?;
            let slice = SliceEntry { rank, region, start };
            match tensors.entry(name) {
                Entry::Vacant(entry) => {
                    let name = entry.key().clone();
                    entry.insert(TensorEntry { name, dtype, shape, slices: vec![slice] });
                }
                Entry::Occupied(mut entry) => {
                    let tensor = entry.get_mut();
                    if (tensor.dtype, &tensor.shape) != (dtype, &shape) {
                        let first = tensor.slices.first().map_or(0, |slice| slice.rank);
                        return Err(format!(
                            "the tensor {:?} is {} {:?} on rank {first}, and {dtype} {shape:?} on rank {rank}",
                            tensor.name, tensor.dtype, tensor.shape
                        ));
                    }
                    tensor.slices.push(slice);
                }
            }
        }
    }
    let tensors: Vec<TensorEntry> = tensors.into_values().collect();
    tensors.iter().try_for_each(|tensor| tensor.check_cover(random))?;
    Ok(tensors)
}

#[cfg(test)]
mod tests {
    use super::super::Unseeded;
    use super::super::region::COMPARED;
    use super::*;

    /// Rows of a matrix.
    fn rows(dtype: DType, from: usize, to: usize) -> Vec<Proposed> {
        let region = Region::of(&[8, 4], &[from, 0], &[to - from, 4]).unwrap();
        vec![Proposed { name: "w".to_owned(), dtype, shape: vec![8, 4], region, start: 0 }]
    }

    #[test]
    fn slices_that_do_not_make_up_a_tensor_are_refused_by_name_rank_and_range() {
        let rows = |rank: u32, from, to| (rank, rows(DType::F32, from, to));
        let whole =
            merged([rows(0, 0, 3), rows(1, 3, 3), rows(2, 3, 8)].into_iter(), &Unseeded::default()).unwrap();
        assert_eq!((whole.len(), whole[0].slices.len()), (1, 3));
        let twice = merged([rows(0, 0, 4), rows(1, 3, 8)].into_iter(), &Unseeded::default()).unwrap_err();
        assert!(
            twice.contains("\"w\"") && twice.contains("rank 0 has [0:4, 0:4], and rank 1 has [3:8, 0:4]"),
            "{twice}"
        );
        let gap = merged([rows(0, 0, 4), rows(2, 6, 8)].into_iter(), &Unseeded::default()).unwrap_err();
        assert!(
            gap.contains("8 of 32 elements are no rank's; rank 0 has [0:4, 0:4], rank 2 has [6:8, 0:4]"),
            "{gap}"
        );
        let other = (1, self::rows(DType::F64, 4, 8));
        let differ = merged([rows(0, 0, 4), other].into_iter(), &Unseeded::default()).unwrap_err();
        assert!(differ.contains("is f32 [8, 4] on rank 0, and f64 [8, 4] on rank 1"), "{differ}");
    }

    /// Rows of elements, one after the other in a rank's file.
    fn tensor_of(shape: &[usize], regions: impl Iterator<Item = Region>) -> (TensorEntry, u64) {
        let mut start = 0;
        let slices = regions.map(|region| {
            let slice = SliceEntry { rank: 0, start, region };
            start += slice.region.elements() as u64;
            slice
        });
        let slices = slices.collect();
        (TensorEntry { name: "w".to_owned(), dtype: DType::U8, shape: shape.to_vec(), slices }, start)
    }

    #[test]
    fn many_slices_are_compared_with_few_others_whatever_a_manifest_says() {
        let compared = || COMPARED.replace(0);
        compared();
        // A cube of 8,000 pieces: none is compared with another.
        let pieces = (0..8000).map(|piece| {
            let offsets = [piece / 400, piece / 20 % 20, piece % 20].map(|place| place * 2).to_vec();
            Region { offsets, shape: vec![2; 3] }
        });
        let (cube, length) = tensor_of(&[40; 3], pieces);
        check(&[cube], &[length], &Unseeded::default()).unwrap();
        assert_eq!(compared(), 0);
        // Two flights of stairs: along either dimension the steps of one lie beside each other, and none touches another.
        const STEPS: usize = 3000;
        let stairs = (0..2 * STEPS).map(|step| match step.checked_sub(STEPS) {
            None => Region { offsets: vec![step, 2 * STEPS + step], shape: vec![STEPS, 1] },
            Some(step) => Region { offsets: vec![2 * STEPS + step, step], shape: vec![1, STEPS] },
        });
        let (forged, length) = tensor_of(&[3 * STEPS; 2], stairs.clone());
        let refused = check(&[forged], &[length], &Unseeded::default()).unwrap_err();
        assert!(refused.contains("has gaps: 63000000 of 81000000 elements"), "{refused}");
        assert!((1..=1 << 20).contains(&compared()));
        // More elements than there are, with a slice that lies across most of the steps.
        let across = Region { offsets: vec![0, STEPS / 2], shape: vec![3 * STEPS, 3 * STEPS - STEPS / 2] };
        let (forged, length) = tensor_of(&[3 * STEPS; 2], stairs.chain([across]));
        let refused = check(&[forged], &[length], &Unseeded::default()).unwrap_err();
        assert!(refused.contains("some elements are saved twice"), "{refused}");
        assert!((1..=1 << 20).contains(&compared()));
    }

    #[test]
    fn what_a_manifest_says_is_not_believed() {
        let slice = |rank, from: usize, length, start| SliceEntry {
            rank,
            region: Region { offsets: vec![from], shape: vec![length] },
            start,
        };
        let tensor = |slices: Vec<SliceEntry>| TensorEntry {
            name: "w".to_owned(),
            dtype: DType::F32,
            shape: vec![4],
            slices,
        };
        let lengths = [24, 16];
        let check = |tensor: TensorEntry| check(&[tensor], &lengths, &Unseeded::default());
        check(tensor(vec![slice(0, 0, 2, 16), slice(1, 2, 2, 8)])).unwrap();
        check(tensor(vec![slice(0, 2, 2, 8), slice(0, 0, 2, 16), slice(0, 1, 0, 12)])).unwrap();
        for wrong in [
            vec![slice(0, 0, 2, 17), slice(1, 2, 2, 8)],
            vec![slice(0, 0, 2, u64::MAX), slice(1, 2, 2, 8)],
            vec![slice(0, 0, 2, 16), slice(2, 2, 2, 8)],
            vec![slice(0, 0, 2, 16), slice(1, 3, 2, 8)],
            vec![slice(0, 0, 2, 16), slice(1, usize::MAX, 2, 8)],
            vec![slice(0, 0, 2, 16)],
            vec![slice(0, 0, 4, 0), slice(1, 2, 2, 8)],
            vec![],
            vec![slice(0, 0, 2, 16), slice(0, 2, 2, 16)],
            vec![slice(0, 0, 2, 12), slice(0, 2, 2, 16)],
            vec![slice(1, 0, 1, 8), slice(0, 1, 2, 8), slice(1, 3, 1, 8)],
        ] {
            assert!(check(tensor(wrong.clone())).is_err(), "{wrong:?}");
        }
        // A file that is read twice, as two tensors.
        let whole = |name: &str| TensorEntry { name: name.to_owned(), ..tensor(vec![slice(0, 0, 4, 8)]) };
        assert!(super::check(&[whole("v")], &lengths, &Unseeded::default()).is_ok());
        assert!(super::check(&[whole("v"), whole("w")], &lengths, &Unseeded::default()).is_err());
        let huge = TensorEntry { shape: vec![usize::MAX, 2], ..tensor(vec![]) };
        assert!(check(huge).is_err());
        let reserved = TensorEntry { name: "__metadata__".to_owned(), ..tensor(vec![slice(0, 0, 4, 0)]) };
        assert!(check(reserved).is_err());
    }
}
