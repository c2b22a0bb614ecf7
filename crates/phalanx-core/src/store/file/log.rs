//! The log: a header, then changes, each with a checksum.
//!
//! ```text
//! header   8 bytes "PHXSTOR" 2
//! change   u64 checksum of what follows · u32 bytes of the entries · entries
//! entry    u32 key length · u32 value length, or !0 for a removal · key · value
//! ```
//!
//! Integers are little-endian. Readers take no lock: for them an incomplete change, or one with a wrong checksum, has
//! not been written yet. Writers hold the file's lock, so such a change is one whose writer has died, or has found no space on the disk.
//! A change of several keys has one checksum, so that no reader sees a part of it.

use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read, Seek, SeekFrom, Write};

use rustix::fs::{FlockOperation, flock};

use crate::hash::fnv1a;

use super::super::table::{Refusal, Table};
use super::super::{MAX_KEY, MAX_VALUE};

const HEADER: [u8; 8] = *b"PHXSTOR\x02";
/// The value length of a removal.
const REMOVED: u32 = u32::MAX;
/// The longest log.
const MAX_LOG: u64 = 4 << 30;
/// The bytes of a change before its entries, and of an entry before its key.
const CHANGE_HEAD: usize = 12;
const ENTRY_HEAD: usize = 8;

/// An open log and its content.
#[derive(Debug)]
pub(super) struct Log {
    pub file: File,
    pub table: Table,
    /// The end of the last complete change.
    end: u64,
}

pub(super) fn write_header(mut file: &File) -> io::Result<()> {
    file.write_all(&HEADER)
}

impl Log {
    /// A log that has just been created.
    pub fn new(file: File) -> Self {
        Self { file, table: Table::default(), end: HEADER.len() as u64 }
    }

    /// `None` if the file is not a log, or not a complete one yet.
    pub fn open(mut file: File) -> io::Result<Option<Self>> {
        let mut header = [0; HEADER.len()];
        match file.read_exact(&mut header) {
            Ok(()) if header == HEADER => Ok(Some(Self::new(file))),
            Err(error) if error.kind() != ErrorKind::UnexpectedEof => Err(error),
            _ => Ok(None),
        }
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

    /// Reads the changes added since the last call.
    pub fn catch_up(&mut self) -> io::Result<()> {
        let length = self.file.metadata()?.len();
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
        while let Some(Change { bytes, entries }) = read_change(&mut reader)? {
            self.end += bytes as u64;
            for (key, value) in entries {
                match value {
                    Some(value) => {
                        let set = self.table.set(&key, value);
                        set.map_err(|refusal| io::Error::new(ErrorKind::InvalidData, refusal))?;
                    }
                    None => drop(self.table.delete(&key)),
                }
            }
        }
        Ok(())
    }

    /// Changes the table. If `change` returns that it has changed it, writes `keys`. The caller holds the lock.
    pub fn change<T>(
        &mut self,
        keys: &[&str],
        change: impl FnOnce(&mut Table) -> Result<(T, bool), Refusal>,
    ) -> io::Result<Result<T, Refusal>> {
        self.catch_up()?;
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
        // A writer that died may have left bytes after the last complete change.
        self.file.set_len(self.end)?;
        self.file.seek(SeekFrom::Start(self.end))?;
        if let Err(error) = self.file.write_all(&bytes) {
            let _ = self.file.set_len(self.end);
            return Err(error);
        }
        self.end += bytes.len() as u64;
        Ok(())
    }

    /// Clears the table, so that the next call reads the file from its start.
    fn start_over(&mut self) -> io::Result<()> {
        self.table = Table::default();
        self.end = HEADER.len() as u64;
        self.catch_up()
    }
}

fn push_entry(entries: &mut Vec<u8>, key: &[u8], value: Option<&[u8]>) {
    entries.extend((key.len() as u32).to_le_bytes());
    entries.extend(value.map_or(REMOVED, |value| value.len() as u32).to_le_bytes());
    entries.extend(key);
    entries.extend(value.unwrap_or_default());
}

/// A change with these entries.
fn framed(entries: &[u8]) -> Vec<u8> {
    // `append` writes no log in which a change would have more bytes.
    let length = u32::try_from(entries.len()).unwrap_or(u32::MAX).to_le_bytes();
    let sum = checksum(&[&length, entries]).to_le_bytes();
    [&sum[..], &length, entries].concat()
}

struct Change {
    /// With its head.
    bytes: usize,
    entries: Vec<Entry>,
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
    Ok(parse(&entries).map(|parsed| Change { bytes: CHANGE_HEAD + entries.len(), entries: parsed }))
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
        change.entries.iter().for_each(|(key, value)| push_entry(&mut entries, key, value.as_deref()));
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
    let read = read_change(&mut &*written).ok().flatten().map(|change| change.entries);
    let expected =
        [(key.to_vec(), Some(value.to_vec())), (value.get(..8).unwrap_or_default().to_vec(), None)];
    assert_eq!(read.as_deref(), Some(&expected[..]));
    assert!(matches!(read_change(&mut &written[..written.len() - 1]), Ok(None)), "it is not whole");
    any
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_several_keys_is_read_as_a_whole_or_not_at_all() {
        let file = tempfile::tempfile().unwrap();
        write_header(&file).unwrap();
        let mut log = Log::new(file.try_clone().unwrap());
        let change = |table: &mut Table| {
            table.set(b"one", vec![1; 40])?;
            table.set(b"two", vec![2; 40])?;
            Ok(((), true))
        };
        log.change(&["one", "two"], change).unwrap().unwrap();
        let whole = file.metadata().unwrap().len();
        let values = |file: &File| {
            let mut reader = Log::new(file.try_clone().unwrap());
            reader.catch_up().unwrap();
            [b"one", b"two"].map(|key| reader.table.get(key).is_some())
        };
        assert_eq!(values(&file), [true; 2]);
        for length in HEADER.len() as u64..whole {
            file.set_len(length).unwrap();
            assert_eq!(values(&file), [false; 2], "{length} of {whole} bytes");
        }
        // Who has read the change learns that it is gone.
        let error = log.catch_up().unwrap_err();
        assert!(error.to_string().contains("something else than a store has cut it"), "{error}");
    }
}
