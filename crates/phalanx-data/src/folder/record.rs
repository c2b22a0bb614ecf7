//! A record at the place where it was found when its file was read through. The file may have been written anew since, in its place: half of
//! a number is a number too.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use phalanx::Result;

use super::{CHANGED, REOPEN, bad, io_error};

/// The bytes of a record, and those beside it; none at the beginning and at the end of the file.
pub(super) struct Record {
    pub before: Option<u8>,
    pub bytes: Vec<u8>,
    pub behind: Option<u8>,
}

impl Record {
    /// Reads the record of so many bytes at `start`, as item `index`.
    pub fn read(path: &Path, file: &File, (start, length): (u64, usize), index: usize) -> Result<Self> {
        let from = start.saturating_sub(1);
        let mut bytes = vec![0; length + (start - from) as usize + 1];
        let mut read = 0;
        while read < bytes.len() {
            match file.read_at(&mut bytes[read..], from + read as u64) {
                Ok(0) => break,
                Ok(more) => read += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(io_error(path, &error)),
            }
        }
        bytes.truncate(read);
        let before = (start > 0 && !bytes.is_empty()).then(|| bytes.remove(0));
        let behind = if bytes.len() > length { bytes.pop() } else { None };
        as_it_was(path, index, bytes.len() == length)?;
        Ok(Self { before, bytes, behind })
    }
}

/// The error of a changed file, unless a record `is` where it was.
pub(super) fn as_it_was(path: &Path, index: usize, is: bool) -> Result<()> {
    if is { Ok(()) } else { Err(bad(path, format_args!("item {index}"), CHANGED, REOPEN)) }
}
