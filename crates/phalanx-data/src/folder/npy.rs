//! Rows of NumPy's arrays.

use std::fmt;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use npyz::{Endianness, NpyHeader, TypeChar};
use phalanx::{Error, Result};

use super::rows::{Column, Order, Rows};
use super::{Array, ElementType, bad, files, io_error, open_file, without_panic};
use crate::Dataset;
use crate::dataset::outside;

/// The most bytes of a header.
const MAX_HEADER: usize = 1 << 17;
/// How deep brackets may be in brackets: one of named fields has three. What parses them calls itself for each, and reads what is in some of
/// them again: sixty would take for ever, and some thousands all of the stack.
const MAX_NESTING: usize = 4;
/// The bytes of a header that say how long it is, in the version whose are most.
const BEGINNING: usize = 12;
/// And in the version whose are fewest.
const PREFIX: usize = 10;

/// Rows of the array in a `.npy` file, or of all in a folder, one after the other: an item is one row, an array with a side less.
///
/// ```no_run
/// use phalanx_data::{Dataset, folder::NpyDataset};
///
/// let images = NpyDataset::open("images.npy")?; // np.save("images.npy", x), x of shape (60000, 28, 28)
/// assert_eq!(images.get(17)?.shape(), [28, 28]);
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// An array in Fortran's order is read too, and its rows are given in C's; a read of one has to gather its elements.
pub struct NpyDataset {
    rows: Rows,
}

impl NpyDataset {
    /// The file, or folder, at `path`. Only headers are read.
    ///
    /// # Errors
    /// If there is no such file, or one is no whole `.npy` file, is not little-endian, has a second array behind the first, or does not
    /// fit to the others. If there are more than 2^24 rows without an element.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let mut rows = Rows::default();
        for path in files(path, &["npy"])? {
            add(&mut rows, path)?;
        }
        Ok(Self { rows })
    }
}

impl Dataset for NpyDataset {
    type Item = Array;

    fn len(&self) -> usize {
        self.rows.len()
    }

    fn get(&self, index: usize) -> Result<Array> {
        let row = self.rows.row(index)?.into_iter().next();
        row.map(|(_, array)| array).ok_or_else(|| outside(index, self.rows.len()))
    }

    fn fingerprint(&self) -> u64 {
        self.rows.fingerprint()
    }
}

fn add(rows: &mut Rows, path: PathBuf) -> Result<()> {
    let mut file = open_file(&path)?;
    let about = file.metadata().map_err(|error| io_error(&path, &error))?;
    let text = read_header(&path, &mut file)?;
    let start = text.len();
    if nesting(text.get(PREFIX..).unwrap_or_default()) > MAX_NESTING {
        return Err(damaged(&path, format_args!("brackets are more than {MAX_NESTING} deep in brackets")));
    }
    let text = without_long_integers(&text);
    let header = without_panic(&path, "its header", || {
        NpyHeader::from_reader(&text[..]).map_err(|error| damaged(&path, error))
    })?;
    let place = "its array";
    let Some(dtype) = dtype(&header.dtype()) else {
        let cause = format!("its type {} is not supported", header.dtype().descr());
        return Err(bad(
            &path,
            place,
            cause,
            "convert it with astype: <f2 <f4 <f8 |i1 <i2 <i4 <i8 |u1 <u2 <u4 <u8 |b1",
        ));
    };
    let Some((count, shape)) = header.shape().split_first() else {
        return Err(bad(&path, place, "it is a scalar, and has no rows", "give it a side for the items"));
    };
    let sides = shape.iter().map(|side| usize::try_from(*side)).collect::<Result<Vec<_>, _>>();
    let (Ok(shape), Ok(count)) = (sides, usize::try_from(*count)) else {
        return Err(bad(&path, place, "it is larger than any file", "copy it again"));
    };
    let order = match header.order() {
        npyz::Order::C => Order::RowMajor,
        npyz::Order::Fortran => Order::ColumnMajor,
    };
    rows.add(
        path,
        &about,
        vec![Column { name: "array".into(), dtype, shape, start: start as u64, order }],
        count,
    )
}

/// The header at the beginning of `file`, and no byte more: a data set may have many files, on a disk that is far away.
fn read_header(path: &Path, file: &mut impl Read) -> Result<Vec<u8>> {
    let failed = |error: io::Error| io_error(path, &error);
    let mut text = Vec::new();
    file.take(BEGINNING as u64).read_to_end(&mut text).map_err(failed)?;
    let end = header_end(path, &text)?;
    if end > MAX_HEADER {
        return Err(damaged(path, format_args!("it is longer than {MAX_HEADER} bytes")));
    }
    file.take(end.saturating_sub(text.len()) as u64).read_to_end(&mut text).map_err(failed)?;
    if text.len() < end {
        return Err(damaged(path, "it is cut off"));
    }
    text.truncate(end);
    Ok(text)
}

/// Where a header ends that begins with these bytes, and the array begins.
fn header_end(path: &Path, beginning: &[u8]) -> Result<usize> {
    if beginning.starts_with(b"PK\x03\x04") {
        let remedy = "np.save the arrays that are in it: np.load(path)[name]";
        return Err(bad(path, "its header", "it is a zip, as np.savez writes it", remedy));
    }
    if !beginning.starts_with(b"\x93NUMPY") {
        return Err(damaged(path, "it does not begin as a .npy file does"));
    }
    let (length, text) = match beginning.get(6..) {
        Some([1, _, a, b, ..]) => (usize::from(u16::from_le_bytes([*a, *b])), 10),
        Some([2 | 3, _, a, b, c, d, ..]) => (u32::from_le_bytes([*a, *b, *c, *d]) as usize, 12),
        Some([version @ (0 | 4..), ..]) => {
            return Err(bad(
                path,
                "its header",
                format_args!("its format has the version {version}"),
                "np.save it",
            ));
        }
        _ => return Err(damaged(path, "it is cut off")),
    };
    Ok(text + length)
}

fn damaged(path: &Path, cause: impl fmt::Display) -> Error {
    bad(path, "its header", cause, "is it a .npy file, and whole? Copy it again, or np.save it again")
}

/// How deep brackets are in brackets, without those in strings. An escape may hide the end of a string (`\N{'}`): behind one nothing counts
/// as closed.
fn nesting(header: &[u8]) -> usize {
    let escape = header.iter().position(|byte| *byte == b'\\').unwrap_or(header.len());
    let (mut open, mut most, mut quote) = (0_usize, 0, None);
    for (at, byte) in header.iter().enumerate() {
        match (byte, quote) {
            (b'(' | b'[' | b'{', _) if at > escape => open += 1,
            _ if at > escape => {}
            (b'\'' | b'"', None) => quote = Some(byte),
            (_, Some(begun)) if byte == begun => quote = None,
            (b'(' | b'[' | b'{', None) => open += 1,
            (b')' | b']' | b'}', None) => open = open.saturating_sub(1),
            // Any other character, and all that is in a string.
            (_, None | Some(_)) => {}
        }
        most = most.max(open);
    }
    most
}

/// The header without the `L` that Python 2 puts behind an integer: `(3L, 2L)`.
fn without_long_integers(header: &[u8]) -> Vec<u8> {
    let is_long = |at: usize| {
        header[at] == b'L'
            && at.checked_sub(1).is_some_and(|before| header[before].is_ascii_digit())
            && header.get(at + 1).is_some_and(|after| matches!(after, b',' | b')' | b' '))
    };
    (0..header.len()).map(|at| if is_long(at) { b' ' } else { header[at] }).collect()
}

fn dtype(dtype: &npyz::DType) -> Option<ElementType> {
    let npyz::DType::Plain(plain) = dtype else { return None };
    if plain.endianness() == Endianness::Big {
        return None;
    }
    Some(match (plain.type_char(), plain.size_field()) {
        (TypeChar::Float, 2) => ElementType::F16,
        (TypeChar::Float, 4) => ElementType::F32,
        (TypeChar::Float, 8) => ElementType::F64,
        (TypeChar::Int, 1) => ElementType::I8,
        (TypeChar::Int, 2) => ElementType::I16,
        (TypeChar::Int, 4) => ElementType::I32,
        (TypeChar::Int, 8) => ElementType::I64,
        (TypeChar::Uint, 1) => ElementType::U8,
        (TypeChar::Uint, 2) => ElementType::U16,
        (TypeChar::Uint, 4) => ElementType::U32,
        (TypeChar::Uint, 8) => ElementType::U64,
        (TypeChar::Bool, 1) => ElementType::Bool,
        _ => return None,
    })
}

impl fmt::Debug for NpyDataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NpyDataset({} rows)", self.rows.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A version, the length of a header, and that many bytes of it with a megabyte of elements behind.
    fn file(version: u8, length: usize) -> Vec<u8> {
        let long = (length as u32).to_le_bytes();
        let length_bytes = if version == 1 { &long[..2] } else { &long };
        [b"\x93NUMPY", &[version, 0][..], length_bytes, &vec![b' '; length], &[7; 1 << 20]].concat()
    }

    #[test]
    fn no_more_than_the_header_is_read() {
        for (version, length, end) in [(1, 118, 128), (1, 0, 10), (2, 116, 128), (3, 70_000, 70_012)] {
            let content = file(version, length);
            let mut rest = content.as_slice();
            assert_eq!(read_header(Path::new("a.npy"), &mut rest).unwrap(), content[..end]);
            assert_eq!(content.len() - rest.len(), end.max(BEGINNING));
        }
        for cut in [0, 5, 7, 11, 12, 100] {
            let error = read_header(Path::new("a.npy"), &mut &file(1, 118)[..cut]).unwrap_err();
            assert!(error.to_string().contains("a.npy"), "{error}");
        }
        let error = read_header(Path::new("a.npy"), &mut file(2, MAX_HEADER).as_slice()).unwrap_err();
        assert!(error.to_string().contains("longer than"), "{error}");
    }
}
