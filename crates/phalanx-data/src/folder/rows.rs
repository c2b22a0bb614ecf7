//! Files of arrays that have as many rows each: row n of all of them is an item.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use phalanx::{Buffer, DType, Error, Result};

use super::{Array, bad, io_error};
use crate::dataset::outside;

/// The most bytes of a row.
const MAX_ROW: u64 = 1 << 30;
/// As many files stay open, and others are opened for each item.
const KEPT_OPEN: usize = 256;

/// An array in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Column {
    pub name: String,
    pub dtype: DType,
    /// Of one row.
    pub shape: Vec<usize>,
    /// Where in the file its first row begins.
    pub start: u64,
}

impl Column {
    /// The bytes of a row.
    fn bytes(&self) -> Option<u64> {
        let sides = self.shape.iter().map(|side| *side as u64);
        sides.chain([self.dtype.size() as u64]).try_fold(1u64, u64::checked_mul)
    }
}

struct Part {
    path: PathBuf,
    columns: Vec<Column>,
    rows: usize,
    /// Rows of the files before.
    first: usize,
    open: OnceLock<File>,
}

/// The rows of some files, one after the other.
#[derive(Default)]
pub(super) struct Rows {
    parts: Vec<Part>,
    len: usize,
}

impl Rows {
    /// Adds a file of `length` bytes with these arrays, of `rows` rows.
    pub fn add(&mut self, path: PathBuf, length: u64, columns: Vec<Column>, rows: usize) -> Result<()> {
        for column in &columns {
            let place = format_args!("the array {:?}", column.name);
            let Some(row) = column.bytes().filter(|row| *row <= MAX_ROW) else {
                return Err(bad(&path, place, "a row has more than 1 GiB", "divide it into more rows"));
            };
            let end = row.checked_mul(rows as u64).and_then(|bytes| bytes.checked_add(column.start));
            if end.is_none_or(|end| end > length) {
                let cause = format!(
                    "the file is cut off: it has {length} bytes, and {rows} rows of {row} do not fit"
                );
                return Err(bad(&path, place, cause, "copy it again"));
            }
        }
        if let Some(before) = self.parts.first() {
            same(before, &path, &columns)?;
        }
        let first = self.len;
        self.len = first.checked_add(rows).ok_or_else(|| Error::invalid_argument("too many rows"))?;
        self.parts.push(Part { path, columns, rows, first, open: OnceLock::new() });
        Ok(())
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// The arrays of the row at `index`, in the order of the file.
    pub fn row(&self, index: usize) -> Result<Vec<(&str, Array)>> {
        let part = self.parts.partition_point(|part| part.first + part.rows <= index);
        let part = self.parts.get(part).ok_or_else(|| outside(index, self.len))?;
        if let Some(file) = part.open.get() {
            return part.read(index - part.first, file);
        }
        let file = File::open(&part.path).map_err(|error| io_error(&part.path, &error))?;
        if self.parts.len() <= KEPT_OPEN {
            return part.read(index - part.first, part.open.get_or_init(|| file));
        }
        part.read(index - part.first, &file)
    }
}

impl Part {
    fn read(&self, row: usize, file: &File) -> Result<Vec<(&str, Array)>> {
        let column = |column: &'_ Column| {
            let elements = column.shape.iter().product();
            let mut data = Buffer::zeroed(column.dtype, elements);
            let bytes = data.as_bytes_mut();
            let start = column.start + row as u64 * bytes.len() as u64;
            file.read_exact_at(bytes, start).map_err(|error| {
                let place = format_args!("row {row} of the array {:?}", column.name);
                bad(&self.path, place, error, "was it changed while it was read?")
            })?;
            // Any other byte is no truth value.
            if column.dtype == DType::Bool && bytes.iter().any(|byte| *byte > 1) {
                let place = format_args!("row {row} of the array {:?}", column.name);
                return Err(bad(&self.path, place, "a bool is neither 0 nor 1", "write the file again"));
            }
            Ok(Array { shape: column.shape.clone(), data })
        };
        self.columns.iter().map(|one| Ok((one.name.as_str(), column(one)?))).collect()
    }
}

/// Refuses a file whose arrays are not those of the first.
fn same(first: &Part, path: &Path, columns: &[Column]) -> Result<()> {
    let names = |columns: &[Column]| columns.iter().map(|column| column.name.clone()).collect::<Vec<_>>();
    if names(&first.columns) != names(columns) {
        let cause =
            format!("it has {:?}, {} has {:?}", names(columns), first.path.display(), names(&first.columns));
        return Err(bad(path, "its arrays", cause, "put other files into another folder"));
    }
    let mut both = first.columns.iter().zip(columns);
    match both.find(|(one, other)| (one.dtype, &one.shape) != (other.dtype, &other.shape)) {
        None => Ok(()),
        Some((one, other)) => {
            let (place, before) = (format!("the array {:?}", other.name), first.path.display());
            let cause = format!(
                "a row is {} {:?}, in {before} it is {} {:?}",
                other.dtype, other.shape, one.dtype, one.shape
            );
            Err(bad(path, place, cause, "put other files into another folder"))
        }
    }
}
