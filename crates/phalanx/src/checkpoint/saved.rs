//! A checkpoint that was read.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use super::manifest::PART;
use super::tensors::{self, Layout};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};

/// A whole checkpoint, in memory.
pub struct Saved {
    folder: PathBuf,
    step: u64,
    world_size: u32,
    file: Vec<u8>,
    tensors: BTreeMap<String, Layout>,
    parts: BTreeMap<String, Vec<u8>>,
}

/// What the files of a checkpoint hold, by their names, the tensors first.
pub(super) type Contents = Vec<(String, Vec<u8>)>;

impl Saved {
    /// Makes sense of `contents`, which are what was once written.
    pub(super) fn new(
        folder: PathBuf,
        (step, world_size): (u64, u32),
        contents: Contents,
    ) -> Result<Self, String> {
        let mut contents = contents.into_iter();
        let (_, file) = contents.next().ok_or("it has no tensors")?;
        let tensors = tensors::index(&file).map_err(|cause| format!("the file of tensors: {cause}"))?;
        let parts = contents
            .map(|(name, bytes)| (name.strip_suffix(PART).unwrap_or(&name).to_owned(), bytes))
            .collect();
        Ok(Self { folder, step, world_size, file, tensors, parts })
    }

    /// The step after which it was made.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The number of ranks of the job that made it.
    pub fn world_size(&self) -> u32 {
        self.world_size
    }

    /// Where rank 0 has read it.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Every tensor, by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, SavedTensor<'_>)> {
        self.tensors.iter().map(|(name, layout)| (name.as_str(), self.lend(name, layout)))
    }

    /// The tensor of this name.
    ///
    /// # Errors
    /// If there is none.
    pub fn tensor(&self, name: &str) -> Result<SavedTensor<'_>> {
        let (name, layout) = self
            .tensors
            .get_key_value(name)
            .ok_or_else(|| self.missing("tensor", name, self.tensors.keys()))?;
        Ok(self.lend(name, layout))
    }

    /// The names of all parts, in order.
    pub fn part_names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.parts.keys().map(String::as_str)
    }

    /// The bytes of a part.
    ///
    /// # Errors
    /// If there is none of this name.
    pub fn part(&self, name: &str) -> Result<&[u8]> {
        let bytes = self.parts.get(name).ok_or_else(|| self.missing("part", name, self.parts.keys()))?;
        Ok(bytes)
    }

    /// The value that [`Snapshot::value`](super::Snapshot::value) wrote as a part.
    ///
    /// # Errors
    /// If there is no part of this name, or it is no `T`.
    pub fn value<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let other = |cause: String| {
            let folder = self.folder.display();
            Error::mismatch(format!("the part {name:?} of {folder} is not what is expected: {cause}"))
                .with_remedy("was it written as another type, or by an earlier version of this program?")
        };
        match postcard::take_from_bytes(self.part(name)?) {
            Ok((value, [])) => Ok(value),
            Ok((_, rest)) => Err(other(format!("{} bytes are left over", rest.len()))),
            Err(error) => Err(other(error.to_string())),
        }
    }

    fn lend<'a>(&'a self, name: &'a str, layout: &'a Layout) -> SavedTensor<'a> {
        let Layout { dtype, shape, bytes } = layout;
        SavedTensor { name, dtype: *dtype, shape, bytes: &self.file[bytes.clone()] }
    }

    fn missing<'a>(&self, what: &str, name: &str, there: impl Iterator<Item = &'a String>) -> Error {
        /// As many as can be taken in.
        const SHOWN: usize = 8;
        let there: Vec<&str> = there.map(String::as_str).collect();
        let more = if there.len() > SHOWN { ", .." } else { "" };
        let shown = there[..there.len().min(SHOWN)].join(", ");
        Error::mismatch(format!("the checkpoint {} has no {what} {name:?}", self.folder.display()))
            .with_remedy(format!("it has {} of them: {shown}{more}", there.len()))
    }
}

impl fmt::Debug for Saved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tensors, parts) = (self.tensors.len(), self.parts.len());
        write!(f, "Saved(step {}, {tensors} tensors, {parts} parts, {})", self.step, self.folder.display())
    }
}

/// A tensor of a checkpoint.
#[derive(Clone, Copy)]
pub struct SavedTensor<'a> {
    name: &'a str,
    dtype: DType,
    shape: &'a [usize],
    bytes: &'a [u8],
}

impl<'a> SavedTensor<'a> {
    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The length of each side; none for a scalar.
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// Its elements, little-endian, in row-major order, of any alignment.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Its elements in row-major order.
    ///
    /// # Errors
    /// If they are of another type.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        let mut elements = vec![T::zeroed(); self.bytes.len() / size_of::<T>()];
        self.copy_to(&mut elements)?;
        Ok(elements)
    }

    /// Copies its elements to `target`.
    ///
    /// # Errors
    /// If they are of another type or number.
    pub fn copy_to<T: Element>(&self, target: &mut [T]) -> Result<()> {
        self.check(T::DTYPE)?;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(target);
        if bytes.len() != self.bytes.len() {
            let (name, elements) = (self.name, target.len());
            return Err(Error::mismatch(format!(
                "the tensor {name:?} has the shape {:?}, and is to fill {elements} elements",
                self.shape
            )));
        }
        bytes.copy_from_slice(self.bytes);
        Ok(())
    }

    fn check(&self, dtype: DType) -> Result<()> {
        if self.dtype == dtype {
            return Ok(());
        }
        let (name, saved) = (self.name, self.dtype);
        Err(Error::mismatch(format!(
            "the tensor {name:?} was saved as {saved}, and is to be read as {dtype}"
        )))
    }
}

impl fmt::Debug for SavedTensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.shape)
    }
}
