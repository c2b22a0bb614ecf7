//! The log: a header, then records, each with a checksum.
//!
//! ```text
//! header   8 bytes "PHXSTOR" 1
//! record   u64 checksum of what follows · u32 key length · u32 value length, or !0 for a removal · key · value
//! ```
//!
//! Integers are little-endian. Readers take no lock: for them an incomplete record, or one with a wrong checksum, has
//! not been written yet. Writers hold the file's lock, so such a record is one whose writer has died.

use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read, Seek, SeekFrom, Write};

use rustix::fs::{FlockOperation, flock};

use crate::hash::fnv1a;

use super::super::table::{Refusal, Table};
use super::super::{MAX_KEY, MAX_VALUE};

const HEADER: [u8; 8] = *b"PHXSTOR\x01";
/// The value length of a removal.
const REMOVED: u32 = u32::MAX;
/// The longest log.
const MAX_LOG: u64 = 4 << 30;
const RECORD: usize = 16;

/// An open log and its content.
#[derive(Debug)]
pub(super) struct Log {
    pub file: File,
    pub table: Table,
    /// The end of the last complete record.
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

    /// Reads the records added since the last call.
    pub fn catch_up(&mut self) -> io::Result<()> {
        let length = self.file.metadata()?.len();
        if length < self.end {
            // A writer without space on the disk has removed records that were read here.
            self.table = Table::default();
            self.end = HEADER.len() as u64;
        }
        if length <= self.end {
            return Ok(());
        }
        self.file.seek(SeekFrom::Start(self.end))?;
        let mut reader = BufReader::new(&self.file);
        while let Some((key, value)) = read_record(&mut reader)? {
            self.end += (RECORD + key.len() + value.as_ref().map_or(0, Vec::len)) as u64;
            match value {
                Some(value) => {
                    let set = self.table.set(&key, value);
                    set.map_err(|refusal| io::Error::new(ErrorKind::InvalidData, refusal))?;
                }
                None => drop(self.table.delete(&key)),
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
        let mut bytes = Vec::new();
        for key in keys {
            let value = self.table.get(key.as_bytes());
            push_record(&mut bytes, key.as_bytes(), value.as_deref());
        }
        if self.end + bytes.len() as u64 > MAX_LOG {
            let why = format!("the log is full: it holds {} bytes", self.end);
            return Err(io::Error::new(ErrorKind::FileTooLarge, why));
        }
        // A writer that died may have left bytes after the last complete record.
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

fn push_record(bytes: &mut Vec<u8>, key: &[u8], value: Option<&[u8]>) {
    let start = bytes.len();
    bytes.extend([0; 8]);
    bytes.extend((key.len() as u32).to_le_bytes());
    bytes.extend(value.map_or(REMOVED, |value| value.len() as u32).to_le_bytes());
    bytes.extend(key);
    bytes.extend(value.unwrap_or_default());
    let sum = checksum(&[&bytes[start + 8..]]);
    bytes[start..start + 8].copy_from_slice(&sum.to_le_bytes());
}

type Record = (Vec<u8>, Option<Vec<u8>>);

/// The next record; `None` if it is incomplete.
fn read_record(reader: &mut impl Read) -> io::Result<Option<Record>> {
    let mut head = [0; RECORD];
    if !fill(reader, &mut head)? {
        return Ok(None);
    }
    let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let sum = u64::from(word(0)) | u64::from(word(4)) << 32;
    let (key_length, value_length) = (word(8) as usize, word(12));
    let present = value_length != REMOVED;
    let value_length = if present { value_length as usize } else { 0 };
    // Checked before memory is allocated.
    if key_length > MAX_KEY || value_length > MAX_VALUE {
        return Ok(None);
    }
    let mut key = vec![0; key_length];
    let mut value = vec![0; value_length];
    if !fill(reader, &mut key)? || !fill(reader, &mut value)? || sum != checksum(&[&head[8..], &key, &value])
    {
        return Ok(None);
    }
    Ok(Some((key, present.then_some(value))))
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
    while let Ok(Some((key, value))) = read_record(&mut rest) {
        let mut written = Vec::new();
        push_record(&mut written, &key, value.as_deref());
        assert!(bytes[..bytes.len() - rest.len()].ends_with(&written));
        any = true;
    }
    let (key, value) = bytes.split_at(bytes.len().min(8));
    let mut written = Vec::new();
    push_record(&mut written, key, Some(value));
    assert_eq!(read_record(&mut &*written).ok(), Some(Some((key.to_vec(), Some(value.to_vec())))));
    assert!(matches!(read_record(&mut &written[..written.len() - 1]), Ok(None)), "it is not whole");
    any
}
