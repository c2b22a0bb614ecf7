//! Files of arrays that have as many rows each: row n of all of them is an item.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use phalanx::{Error, Result};

use super::{Array, CHANGED, ElementType, REOPEN, bad, io_error, open_file};
use crate::dataset::outside;
use crate::worker::mix;

/// Of a row that does not lie together, so many bytes of the file are read at once.
const PIECE: usize = 1 << 16;
/// The most bytes of a row.
const MAX_ROW: u64 = 1 << 30;
/// The most rows of a data set whose rows have no element: the files' lengths say nothing about them, and an order of them takes memory.
const MAX_EMPTY_ROWS: usize = 1 << 24;
/// As many files stay open, and others are opened for each item.
const KEPT_OPEN: usize = 256;

/// An array in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Column {
    pub name: String,
    pub dtype: ElementType,
    /// Of one row.
    pub shape: Vec<usize>,
    /// Where in the file its first row begins.
    pub start: u64,
    pub order: Order,
}

/// How the elements of an array lie in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// A row's together; of a row, those that differ in the last side. C's order.
    RowMajor,
    /// The first elements of all rows, then the second ones. Fortran's order.
    #[cfg_attr(not(feature = "npy"), allow(dead_code, reason = "NumPy alone has it"))]
    ColumnMajor,
}

impl Column {
    /// The bytes of a row.
    fn bytes(&self) -> Option<u64> {
        let sides = self.shape.iter().map(|side| *side as u64);
        sides.chain([self.dtype.size() as u64]).try_fold(1u64, u64::checked_mul)
    }
}

/// What a file was like when its header was read. In another one the rows are elsewhere, or others.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Version {
    length: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
}

impl Version {
    fn of(about: &Metadata) -> Self {
        Self { length: about.len(), modified: (about.mtime(), about.mtime_nsec()) }
    }
}

struct Part {
    path: PathBuf,
    version: Version,
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
    /// Adds a file, of which the system said this before its header was read, with these arrays of `rows` rows, the last of which ends the
    /// file.
    pub fn add(&mut self, path: PathBuf, about: &Metadata, columns: Vec<Column>, rows: usize) -> Result<()> {
        let (mut last, length) = (0, about.len());
        for column in &columns {
            let place = format_args!("the array {:?}", column.name);
            let Some(row) = column.bytes().filter(|row| *row <= MAX_ROW) else {
                return Err(bad(&path, place, "a row has more than 1 GiB", "divide it into more rows"));
            };
            let end = row.checked_mul(rows as u64).and_then(|bytes| bytes.checked_add(column.start));
            last = last.max(end.unwrap_or(u64::MAX));
            if last > length {
                let cause = format!(
                    "the file is cut off: it has {length} bytes, and {rows} rows of {row} do not fit"
                );
                return Err(bad(&path, place, cause, "copy it again"));
            }
        }
        if last < length {
            let cause = format!("{} bytes follow them, which would not be read", length - last);
            let remedy = "were files joined, or arrays saved one behind the other? Write a file for each";
            return Err(bad(&path, "its arrays", cause, remedy));
        }
        if let Some(before) = self.parts.first() {
            same(before, &path, &columns)?;
        }
        let first = self.len;
        let len = first.checked_add(rows).ok_or_else(|| Error::invalid_argument("too many rows"))?;
        if len > MAX_EMPTY_ROWS && columns.iter().all(|column| column.bytes() == Some(0)) {
            let cause =
                format!("with it there are {len} rows without an element, and there may be {MAX_EMPTY_ROWS}");
            return Err(bad(&path, "its arrays", cause, "is it whole? Copy it again, or write it again"));
        }
        self.len = len;
        let version = Version::of(about);
        self.parts.push(Part { path, version, columns, rows, first, open: OnceLock::new() });
        Ok(())
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Of the files' numbers of rows.
    pub fn fingerprint(&self) -> u64 {
        self.parts.iter().fold(0, |all, part| mix(&[all, part.rows as u64]))
    }

    /// The arrays of the row at `index`, in the order of the file.
    pub fn row(&self, index: usize) -> Result<Vec<(&str, Array)>> {
        let part = self.parts.partition_point(|part| part.first + part.rows <= index);
        let part = self.parts.get(part).ok_or_else(|| outside(index, self.len))?;
        if let Some(file) = part.open.get() {
            return part.read(index - part.first, file);
        }
        let file = open_file(&part.path)?;
        if self.parts.len() <= KEPT_OPEN {
            return part.read(index - part.first, part.open.get_or_init(|| file));
        }
        part.read(index - part.first, &file)
    }
}

impl Part {
    fn read(&self, row: usize, file: &File) -> Result<Vec<(&str, Array)>> {
        let column = |column: &'_ Column| {
            let mut array = Array::zeroed(column.dtype, column.shape.clone());
            let read = match column.order {
                Order::RowMajor => {
                    let bytes = array.as_bytes_mut();
                    file.read_exact_at(bytes, column.start + row as u64 * bytes.len() as u64)
                }
                Order::ColumnMajor => gather(file, column, (row, self.rows), array.as_bytes_mut()),
            };
            read.map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => {
                    let place = format_args!("row {row} of the array {:?}", column.name);
                    bad(&self.path, place, error, "was it changed while it was read?")
                }
                _ => io_error(&self.path, &error),
            })?;
            // Any other byte is no truth value.
            if column.dtype == ElementType::Bool && array.as_bytes().iter().any(|byte| *byte > 1) {
                let place = format_args!("row {row} of the array {:?}", column.name);
                return Err(bad(&self.path, place, "a bool is neither 0 nor 1", "write the file again"));
            }
            Ok(array)
        };
        let arrays: Result<Vec<_>> =
            self.columns.iter().map(|one| Ok((one.name.as_str(), column(one)?))).collect();
        // Afterwards: it may be written anew, in its place, at any time.
        let about = file.metadata().map_err(|error| io_error(&self.path, &error))?;
        if Version::of(&about) != self.version {
            return Err(bad(&self.path, format_args!("row {row}"), CHANGED, REOPEN));
        }
        arrays
    }
}

/// Reads the `row` of `rows` of a column-major array, and puts its elements in row-major order.
fn gather(file: &File, column: &Column, (row, rows): (usize, usize), target: &mut [u8]) -> io::Result<()> {
    let size = column.dtype.size();
    let count = target.len() / size;
    if count == 0 {
        // A file may announce any number of such rows.
        return Ok(());
    }
    // They are in the file, so that no product is larger than it.
    // Elements that follow each other in a row are this far apart, so one read may have several.
    let stride = rows * size;
    let together = (PIECE / stride).max(1);
    let mut piece = vec![0; (together.min(count) - 1) * stride + size];
    let mut indices = vec![0; column.shape.len()];
    for first in (0..count).step_by(together) {
        let here = together.min(count - first);
        let piece = &mut piece[..(here - 1) * stride + size];
        file.read_exact_at(piece, column.start + (first * stride + row * size) as u64)?;
        for element in piece.chunks(stride) {
            let place =
                indices.iter().zip(&column.shape).fold(0, |place, (index, side)| place * side + index);
            target[place * size..][..size].copy_from_slice(&element[..size]);
            // The first side is the one that changes first.
            for (index, side) in indices.iter_mut().zip(&column.shape) {
                *index += 1;
                if *index < *side {
                    break;
                }
                *index = 0;
            }
        }
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_that_the_system_does_not_read_is_not_taken_for_a_changed_one() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        io::Write::write_all(&mut file, b"header12345678").unwrap();
        for order in [Order::RowMajor, Order::ColumnMajor] {
            let (name, shape) = ("array".to_owned(), vec![2]);
            let column = Column { name, dtype: ElementType::U8, shape, start: 6, order };
            let mut rows = Rows::default();
            let about = file.as_file().metadata().unwrap();
            rows.add(file.path().to_owned(), &about, vec![column], 4).unwrap();
            assert_eq!(rows.row(3).unwrap()[0].1.as_bytes().len(), 2);
            let unreadable = File::options().write(true).open(file.path()).unwrap();
            let error = rows.parts[0].read(3, &unreadable).unwrap_err();
            assert!(error.io_kind().is_some() && !error.to_string().contains("changed"), "{error}");
        }
    }

    #[test]
    fn rows_of_no_element_are_as_many_as_their_file_says_within_a_limit() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        io::Write::write_all(&mut file, b"header").unwrap();
        for order in [Order::RowMajor, Order::ColumnMajor] {
            let (name, shape) = ("array".to_owned(), vec![0]);
            let column = Column { name, dtype: ElementType::F64, shape, start: 6, order };
            let mut rows = Rows::default();
            let about = file.as_file().metadata().unwrap();
            rows.add(file.path().to_owned(), &about, vec![column.clone()], MAX_EMPTY_ROWS).unwrap();
            for row in [0, 1, MAX_EMPTY_ROWS - 1] {
                assert!(rows.row(row).unwrap()[0].1.as_bytes().is_empty());
            }
            assert!(rows.row(MAX_EMPTY_ROWS).is_err());
            // In one file or in several.
            let mut one = Rows::default();
            for (rows, count) in [(&mut rows, 1), (&mut one, 1 << 61)] {
                let error =
                    rows.add(file.path().to_owned(), &about, vec![column.clone()], count).unwrap_err();
                assert!(error.to_string().contains("rows without an element"), "{error}");
            }
        }
    }
}
