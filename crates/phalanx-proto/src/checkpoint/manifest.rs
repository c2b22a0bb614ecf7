//! The manifest: the files of a checkpoint, with lengths and checksums. No I/O.
//!
//! It is written last. A checkpoint is complete if its manifest has exactly the format of this module, and the files
//! are as the manifest says. A sharded checkpoint has version 2: its tensors are in a file for each rank, and the
//! manifest says where.
//!
//! The checksums are XXH3, which finds damage at the speed of memory, and which `xxhsum` can check. A cryptographic
//! hash would cost several times that, and would protect from nobody who can also write the manifest.

#[cfg(any(test, fuzzing, feature = "fuzzing"))]
use std::collections::BTreeMap;
use std::fmt;
use std::hash::BuildHasher;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

#[cfg(any(test, fuzzing, feature = "fuzzing"))]
use super::Unseeded;
use super::layout::{self, TensorEntry};
use crate::world_size::MAX_WORLD_SIZE;

/// The manifest's name in the folder of a checkpoint.
pub const MANIFEST: &str = "manifest.json";
/// The name of the file with the tensors.
pub const TENSORS: &str = "tensors.safetensors";
/// The suffix of a part's file name.
pub const PART: &str = ".part";

/// The most parts that a rank adds to a checkpoint.
pub const MAX_PARTS: usize = 1000;
/// The most parts of a sharded checkpoint, for any number of ranks: more than one for each rank of the largest world.
const MAX_SHARDED_PARTS: usize = 100_000;
/// The longest name of a part.
pub const MAX_PART_NAME: usize = 100;
/// The longest manifest: enough for the longest names of the most parts, and several hundred thousand slices.
pub const MAX_MANIFEST: u64 = 64 << 20;

const FORMAT: &str = "phalanx checkpoint";
/// The version of checkpoints that rank 0 writes alone.
const WHOLE: u32 = 1;
/// The version of checkpoints that all ranks write together; the last one that can be read.
const SHARDED: u32 = 2;

/// The contents of a manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    format: String,
    version: u32,
    /// The step of training after which it was made.
    pub step: u64,
    /// The number of ranks that made it.
    pub world_size: u32,
    /// The tensors first, in one file or in one of each rank, then the parts by name.
    pub files: Vec<FileEntry>,
    /// Where the tensors of a sharded checkpoint are, by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensors: Option<Vec<TensorEntry>>,
    /// The checksum of the manifest, computed with this field empty.
    checksum: String,
}

/// One file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// The file's name in the folder of the checkpoint.
    pub name: String,
    /// In bytes.
    pub length: u64,
    /// The checksum of its contents, as [`checksum`] writes it.
    pub checksum: String,
}

/// The fields that a manifest of any version has.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u32,
}

/// Why bytes are not a manifest of this version.
#[derive(Debug)]
pub enum Unreadable {
    /// It was damaged, or not written completely.
    Torn(String),
    /// A later version of this crate has written it.
    Later(u32),
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Torn(cause) => write!(f, "the manifest is damaged: {cause}"),
            Self::Later(version) => {
                write!(
                    f,
                    "it has version {version} of the format, and version {SHARDED} is the last that can be read here"
                )
            }
        }
    }
}

impl Manifest {
    /// The manifest of a checkpoint that rank 0 writes alone: the file with the tensors, then the parts by name.
    pub fn new(step: u64, world_size: u32, files: Vec<FileEntry>) -> Self {
        Self {
            format: FORMAT.to_owned(),
            version: WHOLE,
            step,
            world_size,
            files,
            tensors: None,
            checksum: String::new(),
        }
    }

    /// The manifest of a sharded checkpoint.
    pub fn sharded(step: u64, world_size: u32, files: Vec<FileEntry>, tensors: Vec<TensorEntry>) -> Self {
        Self { version: SHARDED, tensors: Some(tensors), ..Self::new(step, world_size, files) }
    }

    /// The manifest as bytes.
    pub fn encode(&self) -> serde_json::Result<Vec<u8>> {
        let mut manifest = Self { checksum: String::new(), ..self.clone() };
        manifest.checksum = checksum(&manifest.text()?);
        manifest.text()
    }

    fn text(&self) -> serde_json::Result<Vec<u8>> {
        // There may be very many slices.
        if self.tensors.is_some() { serde_json::to_vec(self) } else { serde_json::to_vec_pretty(self) }
    }

    /// Decodes `bytes`. There is one way to write a manifest, and every other is refused.
    pub fn decode(bytes: &[u8], random: &impl BuildHasher) -> Result<Self, Unreadable> {
        let torn = |cause: &dyn fmt::Display| Unreadable::Torn(cause.to_string());
        let head: Head = serde_json::from_slice(bytes).map_err(|error| torn(&error))?;
        if head.format != FORMAT {
            return Err(torn(&"it is of another format"));
        }
        if head.version > SHARDED {
            return Err(Unreadable::Later(head.version));
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(|error| torn(&error))?;
        if manifest.encode().map_err(|error| torn(&error))? != bytes {
            return Err(torn(&"its checksum is wrong"));
        }
        manifest.check(random).map_err(|cause| torn(&cause))?;
        Ok(manifest)
    }

    /// The files with tensors.
    pub fn tensor_files(&self) -> &[FileEntry] {
        let count = if self.tensors.is_some() { self.world_size as usize } else { 1 };
        self.files.get(..count).unwrap_or_default()
    }

    /// The files of parts.
    pub fn part_files(&self) -> &[FileEntry] {
        self.files.get(self.tensor_files().len()..).unwrap_or_default()
    }

    /// A checksum of the step and of the files with tensors: another one for the checkpoint of another run after as many steps.
    pub fn tensors_checksum(&self) -> u64 {
        let mut sum = Checksum::default();
        sum.update(&self.step.to_le_bytes());
        self.tensor_files().iter().for_each(|file| sum.update(file.checksum.as_bytes()));
        sum.number()
    }

    /// Checks that no name leads out of the folder, no two entries share a file, and slices are valid.
    pub fn check(&self, random: &impl BuildHasher) -> Result<(), String> {
        match (self.version, &self.tensors) {
            (WHOLE, None) => self.check_whole()?,
            (SHARDED, Some(tensors)) => self.check_sharded(tensors, random)?,
            _ => return Err(format!("version {} is written otherwise", self.version)),
        }
        let parts = self.part_files();
        let most = self.tensors.as_ref().map_or(MAX_PARTS, |_| max_parts(self.world_size as usize));
        if parts.len() > most {
            return Err("it names too many parts".to_owned());
        }
        if !parts.iter().all(|part| part.name.strip_suffix(PART).is_some_and(is_part_name)) {
            return Err("it names a file that can be no part".to_owned());
        }
        if !parts.is_sorted_by(|left, right| left.name < right.name) {
            return Err("its parts are not in order".to_owned());
        }
        Ok(())
    }

    fn check_whole(&self) -> Result<(), String> {
        match self.tensor_files() {
            [tensors] if tensors.name == TENSORS => Ok(()),
            _ => Err("it does not begin with the tensors".to_owned()),
        }
    }

    fn check_sharded(&self, tensors: &[TensorEntry], random: &impl BuildHasher) -> Result<(), String> {
        let (world, files) = (self.world_size, self.tensor_files());
        if !(1..=MAX_WORLD_SIZE).contains(&world) || files.len() != world as usize {
            return Err(format!("it has {} files for {world} ranks", files.len()));
        }
        if !(0..).zip(files).all(|(rank, file)| file.name == shard(rank, world)) {
            return Err("it does not begin with the files of all ranks".to_owned());
        }
        if !tensors.is_sorted_by(|left, right| left.name < right.name) {
            return Err("its tensors are not in order".to_owned());
        }
        let lengths: Vec<u64> = files.iter().map(|file| file.length).collect();
        layout::check(tensors, &lengths, random)
    }
}

/// The most parts of a sharded checkpoint of a world of this size.
pub fn max_parts(world_size: usize) -> usize {
    world_size.saturating_mul(MAX_PARTS).min(MAX_SHARDED_PARTS)
}

/// The name of the file with a rank's tensors.
pub fn shard(rank: u32, world_size: u32) -> String {
    format!("rank-{rank:05}-of-{world_size:05}.safetensors")
}

/// Whether a part may have this name. Letters, digits, `_`, `-` and `.`, but no leading dot.
pub fn is_part_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    (1..=MAX_PART_NAME).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(is_plain)
}

/// The checksum of `bytes`, in a manifest's notation.
pub fn checksum(bytes: &[u8]) -> String {
    shown(xxh3_64(bytes))
}

/// A checksum of data that comes in pieces.
#[derive(Default)]
pub struct Checksum(Xxh3);

impl Checksum {
    /// Adds the next piece.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all pieces so far, in a manifest's notation.
    pub fn finish(&self) -> String {
        shown(self.number())
    }

    /// The checksum of all pieces so far.
    pub fn number(&self) -> u64 {
        self.0.digest()
    }
}

fn shown(checksum: u64) -> String {
    format!("xxh3:{checksum:016x}")
}

/// Reads a manifest, for the fuzz target.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> bool {
    let Ok(manifest) = Manifest::decode(bytes, &Unseeded::default()) else { return false };
    assert_eq!(manifest.encode().ok().as_deref(), Some(bytes));
    for file in &manifest.files {
        assert!(!file.name.contains('/') && !file.name.starts_with('.'));
    }
    // Each element is in one slice, each slice in its file, and each byte of a file in one slice at most.
    let mut taken: BTreeMap<(u32, u64), u64> = BTreeMap::new();
    for tensor in manifest.tensors.iter().flatten() {
        let size = tensor.dtype.size() as u128;
        let whole: u128 = tensor.shape.iter().map(|side| *side as u128).product();
        assert_eq!(tensor.slices.iter().map(|slice| slice.region.elements()).sum::<u128>(), whole);
        for slice in &tensor.slices {
            let file = &manifest.tensor_files()[slice.rank as usize];
            let end = u128::from(slice.start) + slice.region.elements() * size;
            assert!(end <= u128::from(file.length));
            if slice.region.elements() > 0 {
                assert!(taken.insert((slice.rank, slice.start), end as u64).is_none());
            }
        }
    }
    let mut before = None;
    for (&(rank, start), &end) in &taken {
        assert!(before.is_none_or(|(other, end)| other != rank || end <= start));
        before = Some((rank, end));
    }
    true
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::layout::SliceEntry;
    use super::super::region::Region;
    use super::*;
    use crate::dtype::DType;

    fn entry(name: &str) -> FileEntry {
        FileEntry { name: name.to_owned(), length: 3, checksum: checksum(b"abc") }
    }

    fn sample() -> Manifest {
        Manifest::new(1200, 4, vec![entry(TENSORS), entry("optimizer.part"), entry("progress.part")])
    }

    /// A vector of two ranks, and a part.
    fn sharded() -> Manifest {
        let slice = |rank: u32, from| SliceEntry {
            rank,
            region: Region { offsets: vec![from], shape: vec![2] },
            start: 16,
        };
        let tensor = TensorEntry {
            name: "w".to_owned(),
            dtype: DType::F32,
            shape: vec![4],
            slices: vec![slice(0, 0), slice(1, 2)],
        };
        let files = [shard(0, 2), shard(1, 2)].map(|name| FileEntry { length: 24, ..entry(&name) });
        let files = files.into_iter().chain([entry("progress.part")]).collect();
        Manifest::sharded(1200, 2, files, vec![tensor])
    }

    #[test]
    fn what_is_written_is_read_and_nothing_else() {
        for sample in [sample(), sharded()] {
            let bytes = sample.encode().unwrap();
            let read = Manifest::decode(&bytes, &Unseeded::default()).unwrap();
            assert_eq!((read.step, read.world_size), (1200, sample.world_size));
            assert_eq!((read.files, read.tensors), (sample.files, sample.tensors));
            for end in 0..bytes.len() {
                assert!(
                    matches!(Manifest::decode(&bytes[..end], &Unseeded::default()), Err(Unreadable::Torn(_))),
                    "cut at {end}"
                );
            }
        }
    }

    #[test]
    fn every_changed_byte_is_noticed() {
        for bytes in [sample(), sharded()].map(|sample| sample.encode().unwrap()) {
            for place in 0..bytes.len() {
                for bit in 0..8 {
                    let mut changed = bytes.clone();
                    changed[place] ^= 1 << bit;
                    assert!(
                        Manifest::decode(&changed, &Unseeded::default()).is_err(),
                        "bit {bit} of byte {place}"
                    );
                }
            }
        }
    }

    /// Forged manifests have the right checksum all the same.
    #[test]
    fn a_sharded_one_is_not_believed() {
        let refused = |change: &dyn Fn(&mut Manifest)| {
            let mut manifest = sharded();
            change(&mut manifest);
            let bytes = manifest.encode().unwrap();
            assert!(
                matches!(Manifest::decode(&bytes, &Unseeded::default()), Err(Unreadable::Torn(_))),
                "{manifest:?}"
            );
        };
        assert!(fuzz(&sharded().encode().unwrap()));
        refused(&|manifest| manifest.files[1].name = "../rank-00001-of-00002.safetensors".to_owned());
        refused(&|manifest| manifest.files[1].name = shard(0, 2));
        refused(&|manifest| manifest.files[1].length = 23);
        refused(&|manifest| manifest.world_size = 1);
        refused(&|manifest| manifest.world_size = 3);
        refused(&|manifest| manifest.world_size = u32::MAX);
        refused(&|manifest| manifest.world_size = 0);
        refused(&|manifest| manifest.version = 1);
        refused(&|manifest| manifest.tensors = None);
        let tensor = |change: &dyn Fn(&mut TensorEntry)| {
            refused(&|manifest| manifest.tensors.iter_mut().flatten().for_each(change));
        };
        tensor(&|tensor| tensor.slices[1].start = u64::MAX);
        tensor(&|tensor| tensor.slices[1].rank = 2);
        tensor(&|tensor| tensor.slices[1].region.offsets = vec![1]);
        tensor(&|tensor| tensor.slices[1].region.offsets = vec![]);
        tensor(&|tensor| tensor.slices[1].region.shape = vec![usize::MAX]);
        tensor(&|tensor| {
            // Two halves of a file of one are the same bytes.
            tensor.slices[1].rank = 0;
            tensor.slices[1].start = 20;
        });
        tensor(&|tensor| tensor.slices.truncate(1));
        tensor(&|tensor| tensor.shape = vec![1 << 40, 1 << 40]);
        refused(&|manifest| manifest.tensors.iter_mut().for_each(|tensors| tensors.extend(tensors.clone())));
    }

    #[test]
    fn no_name_leads_out_of_the_folder() {
        for name in
            ["../a.part", "/etc/passwd", "a/b.part", ".part", "..part", "a", MANIFEST, "b\0.part", TENSORS]
        {
            let manifest = Manifest::new(1, 1, vec![entry(TENSORS), entry(name)]);
            assert!(Manifest::decode(&manifest.encode().unwrap(), &Unseeded::default()).is_err(), "{name}");
        }
        let twice = Manifest::new(1, 1, vec![entry(TENSORS), entry("a.part"), entry("a.part")]);
        assert!(Manifest::decode(&twice.encode().unwrap(), &Unseeded::default()).is_err());
        assert!(
            Manifest::decode(&Manifest::new(1, 1, vec![]).encode().unwrap(), &Unseeded::default()).is_err()
        );
    }

    #[test]
    fn a_later_version_is_no_damage() {
        let later = Manifest { version: 3, ..sample() }.encode().unwrap();
        assert!(matches!(Manifest::decode(&later, &Unseeded::default()), Err(Unreadable::Later(3))));
    }

    #[test]
    fn the_tensors_of_two_runs_after_one_step_have_other_checksums_and_parts_have_none() {
        for original in [sample(), sharded()] {
            let changed = |change: &dyn Fn(&mut Manifest)| {
                let mut other = original.clone();
                change(&mut other);
                other.tensors_checksum() != original.tensors_checksum()
            };
            assert!(!changed(&|_| {}));
            assert!(changed(&|other| other.step += 1));
            for file in 0..original.tensor_files().len() {
                assert!(changed(&|other| other.files[file].checksum = checksum(b"abd")), "{file}");
            }
            // The progress may be each rank's own.
            assert!(!changed(&|other| other.files.last_mut().unwrap().checksum = checksum(b"abd")));
        }
    }

    #[test]
    fn every_rank_may_add_parts() {
        let saved = |world: u32, parts: usize| {
            let shards = (0..world).map(|rank| entry(&shard(rank, world)));
            let parts = (0..parts).map(|number| entry(&format!("optimizer-{number:06}{PART}")));
            let bytes = Manifest::sharded(1, world, shards.chain(parts).collect(), vec![]).encode().unwrap();
            assert!(bytes.len() as u64 <= MAX_MANIFEST);
            Manifest::decode(&bytes, &Unseeded::default()).is_ok()
        };
        assert!(saved(1, 1000) && !saved(1, 1001));
        assert!(saved(1001, 1001));
        assert!(saved(1001, MAX_SHARDED_PARTS) && !saved(1001, MAX_SHARDED_PARTS + 1));
        assert!(max_parts(MAX_WORLD_SIZE as usize) >= MAX_WORLD_SIZE as usize);
    }

    #[test]
    fn the_longest_manifest_is_within_its_limit() {
        let name = |number| format!("{number:0>MAX_PART_NAME$}{PART}");
        let parts = (0..MAX_PARTS).map(|number| FileEntry { length: u64::MAX, ..entry(&name(number)) });
        let files = std::iter::once(entry(TENSORS)).chain(parts).collect();
        let bytes = Manifest::new(u64::MAX, u32::MAX, files).encode().unwrap();
        assert!(
            bytes.len() as u64 <= MAX_MANIFEST && Manifest::decode(&bytes, &Unseeded::default()).is_ok(),
            "{}",
            bytes.len()
        );
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes: Vec<u8>) {
            fuzz(&bytes);
        }

        #[test]
        fn pieces_have_the_checksum_of_the_whole(pieces: Vec<Vec<u8>>) {
            let mut sum = Checksum::default();
            pieces.iter().for_each(|piece| sum.update(piece));
            prop_assert_eq!(sum.finish(), checksum(&pieces.concat()));
        }
    }
}
