//! A checkpoint that was read, or whose tensors can be read.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use super::files;
use super::layout::{SliceEntry, TensorEntry};
use super::manifest::{Manifest, PART};
use super::region::{Pieces, Region, pieces};
use super::tensors;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};

/// A complete checkpoint. One that rank 0 saved alone is in memory. Of a sharded one the parts are in memory, and
/// tensors are read when they are asked for: that works as long as the folder exists, which later checkpoints may
/// replace.
pub struct Saved {
    folder: PathBuf,
    step: u64,
    world_size: u32,
    /// Of the step and of the tensors.
    checksum: u64,
    elements: Elements,
    tensors: BTreeMap<String, TensorEntry>,
    parts: BTreeMap<String, Vec<u8>>,
}

/// Where the elements of tensors are.
enum Elements {
    /// In the single file, which is in memory.
    Memory(Vec<u8>),
    /// In the files of ranks, by rank, in a folder.
    Files { folder: PathBuf, names: Vec<String> },
}

/// The contents of a checkpoint's files, by name, the tensors first; of a sharded one the manifest first.
pub(super) type Contents = Vec<(String, Vec<u8>)>;

impl Saved {
    /// Decodes `contents`, which are those of a complete checkpoint.
    pub(super) fn whole(
        folder: PathBuf,
        (step, world_size, checksum): (u64, u32, u64),
        contents: Contents,
    ) -> Result<Self, String> {
        let mut contents = contents.into_iter();
        let (_, file) = contents.next().ok_or("it has no tensors")?;
        let tensors = tensors::index(&file).map_err(|cause| format!("the file of tensors: {cause}"))?;
        let tensors = tensors.into_iter().map(|(name, layout)| {
            let slice = SliceEntry {
                rank: 0,
                region: Region::whole(&layout.shape),
                start: layout.bytes.start as u64,
            };
            let (dtype, shape, slices) = (layout.dtype, layout.shape, vec![slice]);
            (name.clone(), TensorEntry { name, dtype, shape, slices })
        });
        let (tensors, parts) = (tensors.collect(), parts(contents));
        Ok(Self { folder, step, world_size, checksum, elements: Elements::Memory(file), tensors, parts })
    }

    /// A sharded checkpoint, in `folder` for rank 0 and at `place` for this rank.
    pub(super) fn sharded(folder: PathBuf, place: PathBuf, manifest: Manifest, contents: Contents) -> Self {
        let names = manifest.tensor_files().iter().map(|file| file.name.clone()).collect();
        let checksum = manifest.tensors_checksum();
        let tensors = manifest.tensors.unwrap_or_default();
        Self {
            folder,
            step: manifest.step,
            world_size: manifest.world_size,
            checksum,
            elements: Elements::Files { folder: place, names },
            tensors: tensors.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect(),
            parts: parts(contents.into_iter().skip(1)),
        }
    }

    /// The step after which it was made.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The number of ranks of the job that made it.
    pub fn world_size(&self) -> u32 {
        self.world_size
    }

    /// A checksum of the step and of all tensors, not of parts. Ranks that have read the same checkpoint, or copies of it, have the same. That of
    /// another run is another one, also after as many steps: ranks that read by themselves may compare it.
    pub fn checksum(&self) -> u64 {
        self.checksum
    }

    /// The folder from which rank 0 has read it.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Every tensor, by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, SavedTensor<'_>)> {
        self.tensors.iter().map(|(name, entry)| (name.as_str(), self.lend(entry)))
    }

    /// The tensor of this name.
    ///
    /// # Errors
    /// If there is none.
    pub fn tensor(&self, name: &str) -> Result<SavedTensor<'_>> {
        let entry =
            self.tensors.get(name).ok_or_else(|| self.missing("tensor", name, self.tensors.keys()))?;
        Ok(self.lend(entry))
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

    fn lend<'a>(&'a self, entry: &'a TensorEntry) -> SavedTensor<'a> {
        SavedTensor { elements: &self.elements, entry, region: Region::whole(&entry.shape) }
    }

    fn missing<'a>(&self, what: &str, name: &str, there: impl Iterator<Item = &'a String>) -> Error {
        /// As many names as a reader can take in.
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

fn parts(contents: impl Iterator<Item = (String, Vec<u8>)>) -> BTreeMap<String, Vec<u8>> {
    contents.map(|(name, bytes)| (name.strip_suffix(PART).unwrap_or(&name).to_owned(), bytes)).collect()
}

/// A tensor of a checkpoint, or a [slice](Self::slice) of it. In a sharded checkpoint the elements are read from the
/// ranks' files when they are asked for: errors of the disk are those of the methods that return elements.
#[derive(Clone)]
pub struct SavedTensor<'a> {
    elements: &'a Elements,
    entry: &'a TensorEntry,
    region: Region,
}

impl<'a> SavedTensor<'a> {
    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.entry.dtype
    }

    /// The length of each side; none for a scalar.
    pub fn shape(&self) -> &[usize] {
        &self.region.shape
    }

    /// The slice that begins at `offsets` and has the sides `shape`, in elements of each dimension, whatever the slices
    /// in which it was saved.
    ///
    /// # Errors
    /// If the slice does not lie within this one's shape.
    pub fn slice(&self, offsets: &[usize], shape: &[usize]) -> Result<Self> {
        let mut region = Region::of(self.shape(), offsets, shape).map_err(|cause| {
            Error::invalid_argument(format!("the slice of the tensor {:?}: {cause}", self.entry.name))
        })?;
        region.offsets.iter_mut().zip(&self.region.offsets).for_each(|(own, outer)| *own += outer);
        Ok(Self { region, ..self.clone() })
    }

    /// Its elements, little-endian, in row-major order, of any alignment.
    ///
    /// # Errors
    /// If they cannot be read, or there is no memory for them.
    pub fn bytes(&self) -> Result<Cow<'a, [u8]>> {
        if let (Elements::Memory(file), [slice]) = (self.elements, &*self.entry.slices)
            && slice.region == self.region
        {
            return Ok(Cow::Borrowed(&file[slice.start as usize..][..self.length()]));
        }
        let mut bytes = self.zeros::<u8>(self.length())?;
        self.fill(&mut bytes)?;
        Ok(Cow::Owned(bytes))
    }

    /// Its elements in row-major order.
    ///
    /// # Errors
    /// If they are of another type, cannot be read, or there is no memory for them.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.check(T::DTYPE)?;
        let mut elements = self.zeros::<T>(self.length() / size_of::<T>())?;
        self.copy_to(&mut elements)?;
        Ok(elements)
    }

    /// Copies its elements to `target`.
    ///
    /// # Errors
    /// If they are of another type or number, or cannot be read; `target` is then unspecified.
    pub fn copy_to<T: Element>(&self, target: &mut [T]) -> Result<()> {
        self.check(T::DTYPE)?;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(target);
        if bytes.len() != self.length() {
            let (name, elements) = (&self.entry.name, target.len());
            return Err(Error::mismatch(format!(
                "the tensor {name:?} has the shape {:?}, and is to fill {elements} elements",
                self.shape()
            ))
            .with_remedy("build the model as it was built when it was saved"));
        }
        self.fill(bytes)
    }

    fn check(&self, dtype: DType) -> Result<()> {
        if self.dtype() == dtype {
            return Ok(());
        }
        let (name, saved) = (&self.entry.name, self.dtype());
        Err(Error::mismatch(format!(
            "the tensor {name:?} was saved as {saved}, and is to be read as {dtype}"
        ))
        .with_remedy(format!("read it as {saved}, and convert its elements")))
    }

    /// Memory for its elements.
    fn zeros<T: Element>(&self, count: usize) -> Result<Vec<T>> {
        let mut zeros = Vec::new();
        zeros.try_reserve_exact(count).map_err(|error| {
            let (name, length) = (&self.entry.name, self.length());
            Error::out_of_memory(format!("no memory for the {length} bytes of the tensor {name:?}"))
                .with_source(error)
                .with_remedy("read it in slices (SavedTensor::slice), or start fewer ranks on this host")
        })?;
        zeros.resize(count, T::zeroed());
        Ok(zeros)
    }

    /// Its length in bytes; that of the whole tensor fits into a `usize`.
    fn length(&self) -> usize {
        self.shape().iter().product::<usize>() * self.dtype().size()
    }

    /// Fills `target`, which has its length.
    fn fill(&self, target: &mut [u8]) -> Result<()> {
        for slice in &self.entry.slices {
            let Some(pieces) = pieces(&slice.region, &self.region, self.dtype().size()) else { continue };
            match self.elements {
                Elements::Memory(file) => {
                    let (start, length) = (slice.start as usize, pieces.length);
                    for (from, to) in pieces {
                        target[to..to + length].copy_from_slice(&file[start + from..][..length]);
                    }
                }
                Elements::Files { folder, names } => {
                    let name = names.get(slice.rank as usize).map_or("", String::as_str);
                    read_pieces(folder, name, slice.start, pieces, target).map_err(|error| {
                        let removed = error.kind() == io::ErrorKind::NotFound;
                        let (tensor, file) = (&self.entry.name, folder.join(name));
                        let cause = format!("cannot read the tensor {tensor:?} from {}", file.display());
                        Error::io(cause, error).with_remedy(if removed {
                            "a later checkpoint may have replaced this one: read all before saving, or `keep` more"
                        } else {
                            "may this rank read the file, and is the disk sound? Else take an older checkpoint"
                        })
                    })?;
                }
            }
        }
        Ok(())
    }
}

/// Copies `pieces` of the data that begin at `start` in a file.
fn read_pieces(folder: &Path, name: &str, start: u64, pieces: Pieces, target: &mut [u8]) -> io::Result<()> {
    /// Pieces shorter than this, and closer to each other, are read together.
    const FAR: usize = 64 << 10;
    /// How much is read at once for short pieces.
    const WINDOW: usize = 1 << 20;
    let file = files::open_file(&folder.join(name))?;
    let (length, mut window, mut at) = (pieces.length, Vec::new(), 0);
    let is_direct = length >= FAR || pieces.stride() >= FAR;
    for (from, to) in pieces {
        let target = &mut target[to..to + length];
        let from = start + from as u64;
        if is_direct {
            file.read_exact_at(target, from)?;
            continue;
        }
        if from < at || from + length as u64 > at + window.len() as u64 {
            at = from;
            let end = file.metadata()?.len();
            window.resize((end.saturating_sub(at)).min(WINDOW as u64) as usize, 0);
            file.read_exact_at(&mut window, at)?;
        }
        let inside = (from - at) as usize;
        let piece = window.get(inside..inside + length).ok_or(io::ErrorKind::UnexpectedEof)?;
        target.copy_from_slice(piece);
    }
    Ok(())
}

impl fmt::Debug for SavedTensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype(), self.shape())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_without_room_is_an_error() {
        let shape = vec![isize::MAX as usize];
        let slices = vec![SliceEntry { rank: 0, region: Region::whole(&shape), start: 0 }];
        let entry = TensorEntry { name: "w".to_owned(), dtype: DType::U8, shape, slices };
        let elements = Elements::Files { folder: PathBuf::new(), names: vec![] };
        let tensor = SavedTensor { elements: &elements, region: Region::whole(&entry.shape), entry: &entry };
        for error in [tensor.to_vec::<u8>().unwrap_err(), tensor.bytes().unwrap_err()] {
            assert!(error.to_string().contains("no memory for the 9223372036854775807 bytes"), "{error}");
        }
    }
}
