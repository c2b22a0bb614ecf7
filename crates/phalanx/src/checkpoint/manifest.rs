//! The manifest: what belongs to a checkpoint, with lengths and checksums. No I/O.
//!
//! It is written last. A checkpoint is whole if its manifest is as this module writes it, and the files are as the
//! manifest says.

use std::fmt;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// The manifest's name in the folder of a checkpoint.
pub(super) const MANIFEST: &str = "manifest.json";
/// The name of the file with the tensors.
pub(super) const TENSORS: &str = "tensors.safetensors";
/// What stands behind the name of a part in the name of its file.
pub(super) const PART: &str = ".part";

/// The most parts of a checkpoint.
pub(super) const MAX_PARTS: usize = 1000;
/// The longest name of a part.
pub(super) const MAX_PART_NAME: usize = 100;
/// The longest manifest: more than the longest names of the most parts take.
pub(super) const MAX_MANIFEST: u64 = 1 << 20;

const FORMAT: &str = "phalanx checkpoint";
/// The version that is written, and the only one that is read.
const VERSION: u32 = 1;

/// What a manifest says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    format: String,
    version: u32,
    /// The step of training after which it was made.
    pub step: u64,
    /// The number of ranks that made it.
    pub world_size: u32,
    /// The tensors first, then the parts by name.
    pub files: Vec<FileEntry>,
    /// Of the manifest, with this field empty.
    checksum: String,
}

/// One file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileEntry {
    pub name: String,
    /// In bytes.
    pub length: u64,
    pub checksum: String,
}

/// The head of a manifest of any version.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u32,
}

/// Why bytes are no manifest of this version.
#[derive(Debug)]
pub(super) enum Unreadable {
    /// It was damaged, or never written to its end.
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
                    "it has version {version} of the format, and version {VERSION} is what can be read here"
                )
            }
        }
    }
}

impl Manifest {
    pub fn new(step: u64, world_size: u32, files: Vec<FileEntry>) -> Self {
        Self { format: FORMAT.to_owned(), version: VERSION, step, world_size, files, checksum: String::new() }
    }

    /// Its bytes.
    pub fn encode(&self) -> serde_json::Result<Vec<u8>> {
        let mut manifest = Self { checksum: String::new(), ..self.clone() };
        manifest.checksum = checksum(&serde_json::to_vec_pretty(&manifest)?);
        serde_json::to_vec_pretty(&manifest)
    }

    /// What `bytes` say. There is one way to write a manifest, and every other is refused.
    pub fn decode(bytes: &[u8]) -> Result<Self, Unreadable> {
        let torn = |cause: &dyn fmt::Display| Unreadable::Torn(cause.to_string());
        let head: Head = serde_json::from_slice(bytes).map_err(|error| torn(&error))?;
        if head.format != FORMAT {
            return Err(torn(&"it is of another format"));
        }
        if head.version > VERSION {
            return Err(Unreadable::Later(head.version));
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(|error| torn(&error))?;
        if manifest.encode().map_err(|error| torn(&error))? != bytes {
            return Err(torn(&"its checksum is wrong"));
        }
        manifest.check_files().map_err(|cause| torn(&cause))?;
        Ok(manifest)
    }

    /// No name leads out of the folder, and none stands for two files.
    fn check_files(&self) -> Result<(), &'static str> {
        let Some((tensors, parts)) = self.files.split_first() else { return Err("it names no tensors") };
        if tensors.name != TENSORS {
            return Err("it does not begin with the tensors");
        }
        if parts.len() > MAX_PARTS {
            return Err("it names too many parts");
        }
        if !parts.iter().all(|part| part.name.strip_suffix(PART).is_some_and(is_part_name)) {
            return Err("it names a file that can be no part");
        }
        if !parts.is_sorted_by(|left, right| left.name < right.name) {
            return Err("its parts are not in order");
        }
        Ok(())
    }
}

/// May a part have this name? Letters, digits, `_`, `-` and `.`, and no dot in front.
pub(super) fn is_part_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    (1..=MAX_PART_NAME).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(is_plain)
}

/// The checksum of `bytes`, as it stands in a manifest.
pub(super) fn checksum(bytes: &[u8]) -> String {
    shown(xxh3_64(bytes))
}

/// A checksum of what comes in pieces.
#[derive(Default)]
pub(super) struct Checksum(Xxh3);

impl Checksum {
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub fn finish(&self) -> String {
        shown(self.0.digest())
    }
}

fn shown(checksum: u64) -> String {
    format!("xxh3:{checksum:016x}")
}

/// What reads a manifest, for the fuzz target.
#[cfg(any(test, fuzzing))]
pub fn fuzz(bytes: &[u8]) -> bool {
    let Ok(manifest) = Manifest::decode(bytes) else { return false };
    assert_eq!(manifest.encode().ok().as_deref(), Some(bytes));
    for file in &manifest.files {
        assert!(!file.name.contains('/') && !file.name.starts_with('.'));
    }
    true
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(name: &str) -> FileEntry {
        FileEntry { name: name.to_owned(), length: 3, checksum: checksum(b"abc") }
    }

    fn sample() -> Manifest {
        Manifest::new(1200, 4, vec![entry(TENSORS), entry("optimizer.part"), entry("progress.part")])
    }

    #[test]
    fn what_is_written_is_read_and_nothing_else() {
        let bytes = sample().encode().unwrap();
        let read = Manifest::decode(&bytes).unwrap();
        assert_eq!((read.step, read.world_size), (1200, 4));
        assert_eq!(read.files, sample().files);
        for end in 0..bytes.len() {
            assert!(matches!(Manifest::decode(&bytes[..end]), Err(Unreadable::Torn(_))), "cut at {end}");
        }
    }

    #[test]
    fn every_changed_byte_is_noticed() {
        let bytes = sample().encode().unwrap();
        for place in 0..bytes.len() {
            for bit in 0..8 {
                let mut changed = bytes.clone();
                changed[place] ^= 1 << bit;
                assert!(Manifest::decode(&changed).is_err(), "bit {bit} of byte {place}");
            }
        }
    }

    #[test]
    fn no_name_leads_out_of_the_folder() {
        for name in
            ["../a.part", "/etc/passwd", "a/b.part", ".part", "..part", "a", MANIFEST, "b\0.part", TENSORS]
        {
            let manifest = Manifest::new(1, 1, vec![entry(TENSORS), entry(name)]);
            assert!(Manifest::decode(&manifest.encode().unwrap()).is_err(), "{name}");
        }
        let twice = Manifest::new(1, 1, vec![entry(TENSORS), entry("a.part"), entry("a.part")]);
        assert!(Manifest::decode(&twice.encode().unwrap()).is_err());
        assert!(Manifest::decode(&Manifest::new(1, 1, vec![]).encode().unwrap()).is_err());
    }

    #[test]
    fn a_later_version_is_no_damage() {
        let later = Manifest { version: 2, ..sample() }.encode().unwrap();
        assert!(matches!(Manifest::decode(&later), Err(Unreadable::Later(2))));
    }

    #[test]
    fn the_longest_manifest_is_within_its_limit() {
        let name = |number| format!("{number:0>MAX_PART_NAME$}{PART}");
        let parts = (0..MAX_PARTS).map(|number| FileEntry { length: u64::MAX, ..entry(&name(number)) });
        let files = std::iter::once(entry(TENSORS)).chain(parts).collect();
        let bytes = Manifest::new(u64::MAX, u32::MAX, files).encode().unwrap();
        assert!(bytes.len() as u64 <= MAX_MANIFEST && Manifest::decode(&bytes).is_ok(), "{}", bytes.len());
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
