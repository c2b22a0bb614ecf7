//! The contents of a checkpoint to be written.

use std::collections::BTreeMap;
use std::fmt;

use phalanx_core::buffer::copy_of;
use phalanx_proto::wire::object;
use serde::Serialize;

use super::layout::Proposed;
use super::manifest::{MAX_PART_NAME, MAX_PARTS, is_part_name};
use super::region::Region;
use super::tensors::{self, byte_length, is_tensor_name};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};

/// The state of a job after a step: named tensors, and other parts as bytes.
///
/// It owns what it holds, so that training goes on while it is written.
#[derive(Debug, Default)]
pub struct Snapshot {
    /// By their names in the file.
    pub(super) tensors: BTreeMap<String, TensorData>,
    pub(super) parts: BTreeMap<String, Vec<u8>>,
}

/// A tensor that waits to be written.
pub(super) struct TensorData {
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub bytes: Box<dyn AsRef<[u8]> + Send>,
    /// The tensor of which this is a slice.
    pub slice: Option<SliceOf>,
}

/// The whole tensor of a slice.
#[derive(Clone, Debug)]
pub(super) struct SliceOf {
    pub name: String,
    /// Of the whole tensor.
    pub shape: Vec<usize>,
    pub region: Region,
}

impl fmt::Debug for TensorData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.shape)
    }
}

impl Snapshot {
    /// Adds a copy of a tensor: `elements` in row-major order. Its name may be any text, such as a path in the module.
    ///
    /// # Errors
    /// If the shape has another number of elements, there is a tensor of this name, or no memory for the copy.
    pub fn tensor<T: Element>(&mut self, name: &str, shape: &[usize], elements: &[T]) -> Result<()> {
        self.tensor_bytes(name, T::DTYPE, shape, copy_of(bytemuck::cast_slice::<T, u8>(elements))?)
    }

    /// Adds a tensor whose memory, of any owner, can be given away: little-endian elements in row-major order.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor).
    pub fn tensor_bytes(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        bytes: impl AsRef<[u8]> + Send + 'static,
    ) -> Result<()> {
        let tensor = TensorData { dtype, shape: shape.to_vec(), bytes: Box::new(bytes), slice: None };
        self.add(name, name.to_owned(), tensor)
    }

    /// Adds a copy of this rank's slice of a tensor that is divided among several ranks, for
    /// [`save_sharded`](super::Checkpoints::save_sharded): the `shape` of the whole tensor, the slice's `offsets` in
    /// it, the lengths of its sides (`slice`), in elements of each dimension, and its `elements` in row-major order. A
    /// rank may add several slices of a tensor.
    ///
    /// ```
    /// use phalanx::checkpoint::Checkpoints;
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let group = phalanx::ProcessGroup::alone()?;
    /// # let checkpoints = Checkpoints::open(folder.path(), &group)?;
    /// // Every rank has as many rows of an 8 x 2 matrix.
    /// let (rank, world) = (group.rank().index(), group.world_size().count());
    /// let (row, rows) = (8 / world * rank, 8 / world);
    /// let own = vec![0.5f32; rows * 2];
    /// checkpoints.save_sharded(100, |snapshot| snapshot.slice("embedding", &[8, 2], &[row, 0], &[rows, 2], &own))?;
    /// # checkpoints.finish()?;
    /// # assert_eq!(checkpoints.newest()?.unwrap().tensor("embedding")?.to_vec::<f32>()?, [0.5; 16]);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the slice does not lie within the shape, has another number of elements, or was added before.
    pub fn slice<T: Element>(
        &mut self,
        name: &str,
        shape: &[usize],
        offsets: &[usize],
        slice: &[usize],
        elements: &[T],
    ) -> Result<()> {
        self.slice_bytes(
            name,
            T::DTYPE,
            shape,
            (offsets, slice),
            copy_of(bytemuck::cast_slice::<T, u8>(elements))?,
        )
    }

    /// Adds a [slice](Self::slice), with its offsets and sides, whose memory, of any owner, can be given away:
    /// little-endian elements in row-major order.
    ///
    /// # Errors
    /// As [`slice`](Self::slice).
    pub fn slice_bytes(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        (offsets, slice): (&[usize], &[usize]),
        bytes: impl AsRef<[u8]> + Send + 'static,
    ) -> Result<()> {
        let region = Region::of(shape, offsets, slice)
            .map_err(|cause| Error::invalid_argument(format!("the slice of the tensor {name:?}: {cause}")))?;
        if byte_length(dtype, shape).is_none() {
            let cause =
                format!("the tensor {name:?} of the shape {shape:?} has more {dtype} than can be counted");
            return Err(Error::invalid_argument(cause).with_remedy("give the shape of the whole tensor"));
        }
        // The name tells the slice also to a reader of this file alone.
        let key = format!("{name}{region}");
        let slice = Some(SliceOf { name: name.to_owned(), shape: shape.to_vec(), region: region.clone() });
        self.add(name, key, TensorData { dtype, shape: region.shape, bytes: Box::new(bytes), slice })
    }

    /// Adds a tensor, or a slice, under the name `key` in the file.
    fn add(&mut self, name: &str, key: String, tensor: TensorData) -> Result<()> {
        let (dtype, shape, length) = (tensor.dtype, &tensor.shape, (*tensor.bytes).as_ref().len());
        if byte_length(dtype, shape) != Some(length) {
            return Err(Error::invalid_argument(format!(
                "the tensor {key:?} has {length} bytes, which is not what {dtype} {shape:?} takes"
            ))
            .with_remedy("give all its elements, and the type and shape that they have"));
        }
        if !is_tensor_name(name) {
            return Err(Error::invalid_argument(format!(
                "no tensor may have the name {name:?}: the format reserves it, or it is empty or too long"
            ))
            .with_remedy("give it another name"));
        }
        if self.tensors.contains_key(&key) {
            return Err(Error::invalid_argument(format!("there are two tensors of the name {key:?}"))
                .with_remedy("give each a name of its own"));
        }
        self.tensors.insert(key, tensor);
        Ok(())
    }

    /// Refuses slices in a checkpoint that one rank saves alone.
    pub(super) fn check_whole(&self) -> Result<()> {
        match self.tensors.iter().find(|(_, tensor)| tensor.slice.is_some()) {
            None => Ok(()),
            Some((key, _)) => {
                Err(Error::invalid_argument(format!("`save` writes whole tensors, and {key} is a slice"))
                    .with_remedy("call `save_sharded` on every rank"))
            }
        }
    }

    /// All tensors in the order of the file, by their names there.
    pub(super) fn in_order(&self) -> Vec<(&str, &TensorData)> {
        let mut sorted: Vec<_> = self.tensors.iter().map(|(key, tensor)| (key.as_str(), tensor)).collect();
        sorted.sort_by_key(|(key, tensor)| tensors::order(tensor.dtype, key));
        sorted
    }

    /// The header of the file, before the elements.
    pub(super) fn header(&self) -> Result<Vec<u8>, String> {
        tensors::header(self.in_order().into_iter().map(|(key, tensor)| {
            (key, tensor.dtype, tensor.shape.as_slice(), (*tensor.bytes).as_ref().len())
        }))
    }

    /// This rank's contribution to a sharded checkpoint: where each tensor or slice will be in its file.
    pub(super) fn propose(&self) -> Result<Vec<Proposed>, String> {
        let mut start = self.header()?.len() as u64;
        let tensors = self.in_order().into_iter().map(|(key, tensor)| {
            let (name, shape, region) = match &tensor.slice {
                Some(SliceOf { name, shape, region }) => (name.clone(), shape.clone(), region.clone()),
                None => (key.to_owned(), tensor.shape.clone(), Region::whole(&tensor.shape)),
            };
            let proposed = Proposed { name, dtype: tensor.dtype, shape, region, start };
            start += (*tensor.bytes).as_ref().len() as u64;
            proposed
        });
        Ok(tensors.collect())
    }

    /// Adds a part in the caller's own format. Its name becomes a file name: letters, digits, `_`, `-` and `.`.
    ///
    /// # Errors
    /// If the name cannot be a file name, if there is a part of this name, or if there are 1,000 already. In a
    /// [sharded](super::Checkpoints::save_sharded) checkpoint every rank may add as many, and all together 100,000.
    pub fn part(&mut self, name: &str, bytes: impl Into<Vec<u8>>) -> Result<()> {
        if !is_part_name(name) {
            return Err(Error::invalid_argument(format!("no part may have the name {name:?}")).with_remedy(
                format!("use 1 to {MAX_PART_NAME} letters, digits, `_`, `-` and `.`, and no dot in front"),
            ));
        }
        if self.parts.len() == MAX_PARTS {
            return Err(Error::invalid_argument(format!("a rank may add {MAX_PARTS} parts"))
                .with_remedy("put several values into one part"));
        }
        match self.parts.insert(name.to_owned(), bytes.into()) {
            None => Ok(()),
            Some(_) => Err(Error::invalid_argument(format!("there are two parts of the name {name:?}"))
                .with_remedy("give each a name of its own")),
        }
    }

    /// Adds a part that holds a value, encoded by postcard: floating-point numbers keep all their bits. Fields are written in their order,
    /// without their names. So if the order, the number or the types of the fields change, give the part another name: an earlier
    /// checkpoint could be read into the wrong fields.
    ///
    /// Some types can be written so, and not be read again: enums with serde's `tag` or `untagged`, fields with `skip_serializing_if`, and
    /// `serde_json::Value`. [`check_readable`](super::training::check_readable) finds them.
    ///
    /// # Errors
    /// As [`part`](Self::part), and if the value cannot be encoded.
    pub fn value<T: Serialize + ?Sized>(&mut self, name: &str, value: &T) -> Result<()> {
        let mut bytes = Vec::new();
        object::write(value, &mut bytes, &format!("the part {name:?}"))?;
        self.part(name, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_saved_is_said_at_once() {
        let mut snapshot = Snapshot::default();
        snapshot.tensor("w", &[2, 2], &[1f32; 4]).unwrap();
        snapshot.tensor("scalar", &[], &[1i64]).unwrap();
        snapshot.tensor::<f32>("none", &[0, 7], &[]).unwrap();
        let wrong = [
            snapshot.tensor("v", &[2, 2], &[1f32; 3]),
            snapshot.tensor("w", &[2, 2], &[1f32; 4]),
            snapshot.tensor("v", &[usize::MAX, 2], &[1f32; 4]),
            snapshot.tensor("", &[1], &[1f32]),
            snapshot.tensor("__metadata__", &[1], &[1f32]),
        ];
        for outcome in wrong {
            assert!(outcome.unwrap_err().is_invalid_argument());
        }
        snapshot.slice("s", &[4, 2], &[0, 0], &[1, 2], &[1f32; 2]).unwrap();
        snapshot.slice("s", &[4, 2], &[2, 0], &[2, 2], &[1f32; 4]).unwrap();
        let wrong = [
            snapshot.slice("s", &[4, 2], &[0, 0], &[1, 2], &[1f32; 2]),
            snapshot.slice("s", &[4, 2], &[1, 0], &[1, 2], &[1f32; 3]),
            snapshot.slice("s", &[4, 2], &[3, 0], &[2, 2], &[1f32; 4]),
            snapshot.slice("s", &[4, 2], &[0], &[8], &[1f32; 8]),
            snapshot.slice("s", &[usize::MAX, 2], &[0, 0], &[1, 2], &[1f32; 2]),
            snapshot.slice("__metadata__", &[2], &[0], &[1], &[1f32]),
            snapshot.check_whole(),
        ];
        for outcome in wrong {
            assert!(outcome.unwrap_err().is_invalid_argument());
        }
        snapshot.part("optimizer", [1, 2]).unwrap();
        for name in ["optimizer", "", "../optimizer", "a/b", ".hidden", "naïve", &"x".repeat(101)] {
            assert!(snapshot.part(name, []).unwrap_err().is_invalid_argument(), "{name}");
        }
        (1..1000).for_each(|number| snapshot.part(&format!("part-{number}"), []).unwrap());
        let error = snapshot.part("one-more", []).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("1000 parts"), "{error}");
    }
}
