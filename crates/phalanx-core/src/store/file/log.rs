//! The log: a header, then changes, each with a checksum.
//!
//! ```text
//! header   8 bytes "PHXSTOR" 3 · u64 number of the store · u64 generation of the file
//! change   u64 checksum of what follows · u32 bytes of the entries · entries
//! entry    u32 key length · u32 value length, or !0 for a removal · key · value
//! mark     a change with u32 !0 instead of entries: the store goes on in its next file, and nothing follows here
//! ```
//!
//! Integers are little-endian. Readers take no lock: for them an incomplete change, or one with a wrong checksum, has
//! not been written yet. Writers hold the file's lock, so such a change is one whose writer has died, or has found no space on the disk.
//! A change of several keys has one checksum, so that no reader sees a part of it. [`compaction`](super::compaction) says when a store goes
//! on in another file.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

use crate::hash::fnv1a;

use super::super::table::{Refusal, Table};
use super::super::{MAX_KEY, MAX_VALUE};

/// With the version.
const MAGIC: [u8; 8] = *b"PHXSTOR\x03";
/// The bytes of the header.
pub(super) const HEADER: u64 = 24;
/// The value length of a removal.
const REMOVED: u32 = u32::MAX;
/// The content of a mark. It is shorter than any entry.
const MARK: [u8; 4] = [0xff; 4];
/// The longest log. A file is compacted before it is so long.
const MAX_LOG: u64 = 4 << 30;
/// The bytes of a change before its entries, and of an entry before its key.
const CHANGE_HEAD: usize = 12;
pub(super) const ENTRY_HEAD: usize = 8;
/// A log that is shorter is not compacted. With 64 launchers it is as long after an hour, and a newcomer reads it at once.
const COMPACTED_LENGTH: u64 = 16 << 20;

/// Which file of which store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    /// A random number.
    pub store: u64,
    /// How often the store has gone on in another file.
    pub generation: u64,
}

/// An open log and its content.
#[derive(Debug)]
pub(super) struct Log {
    pub file: File,
    pub table: Table,
    pub identity: Identity,
    /// Whether the file ends with a mark, so that the store goes on in its next file.
    pub is_continued: bool,
    /// The end of the last complete change.
    pub end: u64,
    /// How long it is at least when it is compacted.
    pub compacted_length: u64,
    /// How long it is at least at the next try.
    pub compact_at: u64,
    /// Whether a person was told that it could not be compacted.
    pub has_told: bool,
}

impl Log {
    /// A log without a change, or whose changes have not been read.
    fn new(file: File, identity: Identity) -> Self {
        Self {
            file,
            table: Table::default(),
            identity,
            is_continued: false,
            end: HEADER,
            compacted_length: COMPACTED_LENGTH,
            compact_at: COMPACTED_LENGTH,
            has_told: false,
        }
    }

    /// Creates a log at `path`, where there must be no file. Only this user may read it.
    pub fn create(path: &Path, identity: Identity) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        let Identity { store, generation } = identity;
        let header = [MAGIC, store.to_le_bytes(), generation.to_le_bytes()].concat();
        if let Err(error) = file.write_all(&header) {
            let _ = std::fs::remove_file(path);
            return Err(error);
        }
        Ok(Self::new(file, identity))
    }

    /// `None` if the file is not a log, or not a complete one yet.
    pub fn open(mut file: File) -> io::Result<Option<Self>> {
        // A pipe that this process has open for writing too has no end: to read from it would wait for ever.
        if !file.metadata()?.is_file() {
            return Ok(None);
        }
        let mut header = [[0_u8; 8]; 3];
        for part in &mut header {
            if !fill(&mut file, part)? {
                return Ok(None);
            }
        }
        let [magic, store, generation] = header;
        let identity =
            Identity { store: u64::from_le_bytes(store), generation: u64::from_le_bytes(generation) };
        Ok((magic == MAGIC).then(|| Self::new(file, identity)))
    }

    /// The length of the file, as this host sees it.
    pub fn length(&self) -> io::Result<u64> {
        self.file.metadata().map(|metadata| metadata.len())
    }

    /// Takes the file's lock, unless another process has it.
    pub fn try_lock(&self) -> io::Result<bool> {
        match flock(&self.file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    pub fn unlock(&self) {
        // It fails only if the descriptor is not an open file.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }

    /// Reads the changes added to this file since the last call.
    pub fn catch_up(&mut self) -> io::Result<()> {
        if self.is_continued {
            return Ok(());
        }
        let length = self.length()?;
        if length < self.end {
            let why = format!(
                "the file has {length} bytes, and had {}: something else than a store has cut it",
                self.end
            );
            return Err(io::Error::new(ErrorKind::InvalidData, why));
        }
        if length == self.end {
            return Ok(());
        }
        self.file.seek(SeekFrom::Start(self.end))?;
        let mut reader = BufReader::new(&self.file);
        while let Some(Change { bytes, content }) = read_change(&mut reader)? {
            let Content::Entries(entries) = content else {
                self.end += bytes as u64;
                self.is_continued = true;
                break;
            };
            for (key, value) in entries {
                match value {
                    Some(value) => {
                        let set = self.table.set(&key, value);
                        set.map_err(|refusal| io::Error::new(ErrorKind::InvalidData, refusal))?;
                    }
                    None => drop(self.table.delete(&key)),
                }
            }
            // A change that could not be applied is read again, as a whole: else this process alone would never know it.
            self.end += bytes as u64;
        }
        Ok(())
    }

    /// Changes the table. If `change` returns that it has changed it, writes `keys`. The caller holds the lock, and has read all changes
    /// ([`try_lock_newest`](Self::try_lock_newest)).
    pub fn change<T>(
        &mut self,
        keys: &[&str],
        change: impl FnOnce(&mut Table) -> Result<(T, bool), Refusal>,
    ) -> io::Result<Result<T, Refusal>> {
        match change(&mut self.table) {
            Ok((value, changed)) => {
                if changed && let Err(error) = self.append(keys) {
                    self.start_over()?;
                    return Err(error);
                }
                Ok(Ok(value))
            }
            Err(refusal) => {
                // Changes made before the refusal are not in the file.
                self.start_over()?;
                Ok(Err(refusal))
            }
        }
    }

    fn append(&mut self, keys: &[&str]) -> io::Result<()> {
        let mut entries = Vec::new();
        for key in keys {
            let value = self.table.get(key.as_bytes());
            push_entry(&mut entries, key.as_bytes(), value.as_deref());
        }
        let bytes = framed(&entries);
        if self.end + bytes.len() as u64 > MAX_LOG {
            let why = format!("the log is full: it holds {} bytes", self.end);
            return Err(io::Error::new(ErrorKind::FileTooLarge, why));
        }
        self.write(&bytes)
    }

    /// Writes the mark. The caller holds the lock, and writes nothing else.
    pub fn write_mark(&mut self) -> io::Result<()> {
        self.write(&framed(&MARK))?;
        self.is_continued = true;
        Ok(())
    }

    /// Writes a whole change.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        // A writer that died may have left bytes after the last complete change.
        self.file.set_len(self.end)?;
        self.file.seek(SeekFrom::Start(self.end))?;
        if let Err(error) = self.file.write_all(bytes) {
            let _ = self.file.set_len(self.end);
            return Err(error);
        }
        self.end += bytes.len() as u64;
        Ok(())
    }

    /// Clears the table, so that the next call reads the file from its start.
    fn start_over(&mut self) -> io::Result<()> {
        self.table = Table::default();
        self.end = HEADER;
        self.catch_up()
    }
}

pub(super) fn push_entry(entries: &mut Vec<u8>, key: &[u8], value: Option<&[u8]>) {
    entries.extend((key.len() as u32).to_le_bytes());
    entries.extend(value.map_or(REMOVED, |value| value.len() as u32).to_le_bytes());
    entries.extend(key);
    entries.extend(value.unwrap_or_default());
}

/// A change with these entries.
pub(super) fn framed(entries: &[u8]) -> Vec<u8> {
    // `append` writes no log in which a change would have more bytes.
    let length = u32::try_from(entries.len()).unwrap_or(u32::MAX).to_le_bytes();
    let sum = checksum(&[&length, entries]).to_le_bytes();
    [&sum[..], &length, entries].concat()
}

struct Change {
    /// With its head.
    bytes: usize,
    content: Content,
}

#[derive(Debug, PartialEq)]
enum Content {
    Entries(Vec<Entry>),
    Mark,
}

type Entry = (Vec<u8>, Option<Vec<u8>>);

/// The next change; `None` if it is incomplete.
fn read_change(reader: &mut impl Read) -> io::Result<Option<Change>> {
    let mut head = [0; CHANGE_HEAD];
    if !fill(reader, &mut head)? {
        return Ok(None);
    }
    let [sum, length] = [&head[..8], &head[8..]];
    let mut entries = Vec::new();
    // It takes memory for what is there, whatever length is claimed.
    reader.take(u64::from(word(length))).read_to_end(&mut entries)?;
    if entries.len() != word(length) as usize || checksum(&[length, &entries]).to_le_bytes() != sum {
        return Ok(None);
    }
    let content = if entries == MARK { Some(Content::Mark) } else { parse(&entries).map(Content::Entries) };
    Ok(content.map(|content| Change { bytes: CHANGE_HEAD + entries.len(), content }))
}

/// `None` if they are not whole, or longer than a store takes.
fn parse(mut rest: &[u8]) -> Option<Vec<Entry>> {
    let mut entries = Vec::new();
    while !rest.is_empty() {
        let (head, behind) = rest.split_at_checked(ENTRY_HEAD)?;
        let (key_length, value_length) = (word(head) as usize, word(&head[4..]));
        let is_present = value_length != REMOVED;
        let value_length = if is_present { value_length as usize } else { 0 };
        if key_length > MAX_KEY || value_length > MAX_VALUE {
            return None;
        }
        let (key, behind) = behind.split_at_checked(key_length)?;
        let (value, behind) = behind.split_at_checked(value_length)?;
        entries.push((key.to_vec(), is_present.then(|| value.to_vec())));
        rest = behind;
    }
    Some(entries)
}

/// Of the first four bytes.
fn word(bytes: &[u8]) -> u32 {
    bytes.iter().take(4).rev().fold(0, |word, byte| word << 8 | u32::from(*byte))
}

/// Reads all of `bytes`; `false` if the file ends before.
fn fill(reader: &mut impl Read, bytes: &mut [u8]) -> io::Result<bool> {
    match reader.read_exact(bytes) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// Detects torn writes, not changes by an adversary.
fn checksum(pieces: &[&[u8]]) -> u64 {
    fnv1a(pieces.iter().copied().flatten().copied())
}

/// For `phalanx::fuzzing`: reads a log and appends to it.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> bool {
    let (mut rest, mut any) = (bytes, false);
    while let Ok(Some(change)) = read_change(&mut rest) {
        let mut entries = Vec::new();
        match &change.content {
            Content::Mark => entries.extend(MARK),
            Content::Entries(read) => {
                read.iter().for_each(|(key, value)| push_entry(&mut entries, key, value.as_deref()));
            }
        }
        let written = framed(&entries);
        assert_eq!(written.len(), change.bytes);
        assert!(bytes[..bytes.len() - rest.len()].ends_with(&written));
        any = true;
    }
    let (key, value) = bytes.split_at(bytes.len().min(8));
    let mut entries = Vec::new();
    push_entry(&mut entries, key, Some(value));
    push_entry(&mut entries, value.get(..8).unwrap_or_default(), None);
    let written = framed(&entries);
    let read = read_change(&mut &*written).ok().flatten().map(|change| change.content);
    let expected =
        vec![(key.to_vec(), Some(value.to_vec())), (value.get(..8).unwrap_or_default().to_vec(), None)];
    assert_eq!(read, Some(Content::Entries(expected)));
    assert!(matches!(read_change(&mut &written[..written.len() - 1]), Ok(None)), "it is not whole");
    any
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_that_cannot_be_applied_is_not_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let identity = Identity { store: 1, generation: 0 };
        let mut log = Log::create(&folder.path().join("log"), identity).unwrap();
        let mut reader = Log::new(log.file.try_clone().unwrap(), identity);
        reader.table = Table::with_caps(1, 1 << 20);
        log.change(&["one", "two"], |table| {
            table.set(b"one", vec![1])?;
            table.set(b"two", vec![2])?;
            Ok(((), true))
        })
        .unwrap()
        .unwrap();
        for _ in 0..2 {
            let error = reader.catch_up().unwrap_err();
            assert!(error.to_string().contains("the store is full"), "{error}");
        }
        // Once there is room, nothing is missing.
        reader.table = Table::default();
        reader.catch_up().unwrap();
        assert_eq!([b"one", b"two"].map(|key| reader.table.contains(key)), [true; 2]);
    }

    #[test]
    fn a_change_of_several_keys_is_read_as_a_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let identity = Identity { store: 1, generation: 0 };
        let mut log = Log::create(&folder.path().join("log"), identity).unwrap();
        let file = log.file.try_clone().unwrap();
        let change = |table: &mut Table| {
            table.set(b"one", vec![1; 40])?;
            table.set(b"two", vec![2; 40])?;
            Ok(((), true))
        };
        log.change(&["one", "two"], change).unwrap().unwrap();
        let whole = file.metadata().unwrap().len();
        let values = |file: &File| {
            let mut reader = Log::new(file.try_clone().unwrap(), identity);
            reader.catch_up().unwrap();
            [b"one", b"two"].map(|key| reader.table.get(key).is_some())
        };
        assert_eq!(values(&file), [true; 2]);
        for length in HEADER..whole {
            file.set_len(length).unwrap();
            assert_eq!(values(&file), [false; 2], "{length} of {whole} bytes");
        }
        // Who has read the change learns that it is gone.
        let error = log.catch_up().unwrap_err();
        assert!(error.to_string().contains("something else than a store has cut it"), "{error}");
    }
}
