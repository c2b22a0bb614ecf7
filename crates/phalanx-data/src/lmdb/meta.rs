//! What the first two pages of an LMDB file say, read as bytes, before anything is mapped.
//!
//! A page that the file lacks cannot be read from a map: the process would be killed. So the file's length is compared with the
//! last page that LMDB has used. LMDB 0.9 on 64-bit little-endian machines, as in its `mdb.c`: a page begins with 16 bytes (number
//! 8, padding 2, flags 2, bounds 4), and then a meta page has: magic 4, version 4, address 8, map size 8, two records of 48 bytes
//! (page size or padding 4, flags 2, depth 2, branch pages 8, leaf pages 8, overflow pages 8, entries 8, root page 8), last page 8,
//! transaction 8.

use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use phalanx::{Error, Result};

use crate::folder::{io_error, open_file};

const LENGTH: usize = 152;
const PAGE_FLAGS: usize = 10;
const IS_META: u16 = 0x08;
const MAGIC: (usize, u32) = (16, 0xBEEF_C0DE);
const VERSION: (usize, u32) = (20, 1);
const PAGE_SIZE: usize = 40;
const MAIN_FLAGS: usize = 92;
const ENTRIES: usize = 120;
const ROOTS: [usize; 2] = [80, 128];
const LAST_PAGE: usize = 136;
const TRANSACTION: usize = 144;
/// The flag of a database whose keys may have several values.
const DUPLICATES: u16 = 0x04;
/// The flag of a database whose keys are the machine's integers.
const INTEGER_KEYS: u16 = 0x08;
/// The flags that a file keeps of a database.
const KEPT_FLAGS: u16 = 0x7f;
/// More levels than this no tree has.
const MAX_DEPTH: u16 = 32;
/// The root of a tree without pages.
const NO_PAGE: u64 = u64::MAX;

/// The fields that are used here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Meta {
    /// Items in the main database.
    pub entries: u64,
    /// The length of the file, in bytes.
    pub file: u64,
    /// The number of the last page.
    last: u64,
    /// Where the last page ends, in bytes.
    end: u64,
}

/// The record of a database, as a meta page and the main database have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DatabaseRecord {
    flags: u16,
    /// Its items.
    pub entries: u64,
}

impl DatabaseRecord {
    const LENGTH: usize = 48;

    /// Reads one out of the main database. None if it cannot be one of a file with these meta pages.
    pub fn read(bytes: &[u8], meta: &Meta) -> Option<Self> {
        let bytes: &[u8; Self::LENGTH] = bytes.try_into().ok()?;
        let (flags, depth) = (u16_at(bytes, 4), u16_at(bytes, 6));
        let pages = [8, 16, 24].map(|at| u64_at(bytes, at));
        let pages = pages.into_iter().try_fold(0, u64::checked_add)?;
        let (entries, root) = (u64_at(bytes, 32), u64_at(bytes, 40));
        let is_one = flags & !KEPT_FLAGS == 0
            && depth <= MAX_DEPTH
            && pages <= meta.last
            && (root <= meta.last || root == NO_PAGE)
            && (entries == 0) == (root == NO_PAGE);
        is_one.then_some(Self { flags, entries })
    }

    /// Refuses what is not read rightly here.
    pub fn check(self) -> Result<(), &'static str> {
        if self.flags & DUPLICATES != 0 {
            return Err("has keys that may have several values");
        }
        if self.flags & INTEGER_KEYS != 0 {
            return Err("has keys that are integers of the machine");
        }
        Ok(())
    }
}

impl Meta {
    /// Reads it from the file at `path`, and looks whether that is whole.
    pub fn read(path: &Path) -> Result<Self> {
        let unreadable = |error: io::Error| io_error(path, &error);
        let file = open_file(path)?;
        let length = file.metadata().map_err(unreadable)?.len();
        let mut page = [0; LENGTH];
        let mut at = |offset| match file.read_exact_at(&mut page, offset) {
            Ok(()) => Ok(Some(page)),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(unreadable(error)),
        };
        let first = at(0)?;
        let second = match &first {
            Some(first) if is_meta(first) => at(u64::from(u32_at(first, PAGE_SIZE)))?,
            // A page of another kind tells nothing of a second.
            first => *first,
        };
        let meta = check(first.zip(second), length).and_then(|meta| match at(meta.end) {
            Ok(Some(page)) if is_meta(&page) => Err("another LMDB file begins behind its last page".into()),
            Ok(_) => Ok(meta),
            Err(error) => Err(error.to_string()),
        });
        meta.map_err(|cause| {
            Error::invalid_argument(format!("{} is no whole LMDB file: {cause}", path.display())).with_remedy(
                "copy it again, or pack it again; where LMDB itself reads it, `mdb_copy -c` makes it whole",
            )
        })
    }
}

/// What the two meta pages of a file of `length` bytes say.
fn check(pages: Option<([u8; LENGTH], [u8; LENGTH])>, length: u64) -> Result<Meta, String> {
    let Some((first, second)) = pages else {
        return Err(format!("it has {length} bytes, less than its first two pages"));
    };
    for page in [&first, &second] {
        if !is_meta(page) {
            return Err("its first two pages are not LMDB's".into());
        }
        let version = u32_at(page, VERSION.0);
        if version != VERSION.1 {
            return Err(format!("its format has the version {version}, not {}", VERSION.1));
        }
    }
    let size = u32_at(&first, PAGE_SIZE);
    if !size.is_power_of_two() || !(256..=65536).contains(&size) || u32_at(&second, PAGE_SIZE) != size {
        return Err(format!("its pages would have {size} bytes"));
    }
    // LMDB takes the newer one.
    let page = if u64_at(&second, TRANSACTION) > u64_at(&first, TRANSACTION) { second } else { first };
    let (last, entries) = (u64_at(&page, LAST_PAGE), u64_at(&page, ENTRIES));
    let needed = last.checked_add(1).and_then(|pages| pages.checked_mul(u64::from(size)));
    let Some(end) = needed.filter(|needed| *needed <= length) else {
        let pages = length / u64::from(size);
        return Err(format!(
            "it is cut off: it has {pages} pages of {size} bytes, and its last one is number {last}"
        ));
    };
    if ROOTS.iter().map(|root| u64_at(&page, *root)).any(|root| root != NO_PAGE && root > last) {
        return Err("its trees begin outside of it".into());
    }
    let main = DatabaseRecord { flags: u16_at(&page, MAIN_FLAGS), entries };
    main.check().map_err(|cause| format!("its main database {cause}"))?;
    Ok(Meta { entries, file: length, last, end })
}

fn is_meta(page: &[u8; LENGTH]) -> bool {
    u16_at(page, PAGE_FLAGS) & IS_META != 0 && u32_at(page, MAGIC.0) == MAGIC.1
}

fn u16_at(page: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([page[at], page[at + 1]])
}

fn u32_at(page: &[u8], at: usize) -> u32 {
    u32::from(u16_at(page, at)) | u32::from(u16_at(page, at + 2)) << 16
}

fn u64_at(page: &[u8], at: usize) -> u64 {
    u64::from(u32_at(page, at)) | u64::from(u32_at(page, at + 4)) << 32
}
