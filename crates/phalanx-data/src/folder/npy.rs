//! Rows of NumPy's arrays.

use std::fmt;
use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::{Path, PathBuf};

use npyz::{Endianness, NpyHeader, Order, TypeChar};
use phalanx::{DType, Result};

use super::rows::{Column, Rows};
use super::{Array, bad, files, io_error};
use crate::Dataset;
use crate::dataset::outside;

/// The most bytes of a header.
const MAX_HEADER: u64 = 1 << 20;

/// Rows of the array in a `.npy` file, or of all in a folder, one after the other: an item is one row, an array with a side less.
///
/// ```no_run
/// use phalanx_data::{Dataset, folder::NpyDataset};
///
/// let images = NpyDataset::open("images.npy")?; // np.save("images.npy", x), x of shape (60000, 28, 28)
/// assert_eq!(images.get(17)?.shape(), [28, 28]);
/// # Ok::<(), phalanx::Error>(())
/// ```
pub struct NpyDataset {
    rows: Rows,
}

impl NpyDataset {
    /// The file, or folder, at `path`. Only headers are read.
    ///
    /// # Errors
    /// If there is no such file, or one is no whole `.npy` file, or is not in row-major, little-endian order, or does not fit to the
    /// others.
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
}

fn add(rows: &mut Rows, path: PathBuf) -> Result<()> {
    let file = File::open(&path).map_err(|error| io_error(&path, &error))?;
    let length = file.metadata().map_err(|error| io_error(&path, &error))?.len();
    let mut reader = BufReader::new(file);
    // A header says its own length.
    let header = NpyHeader::from_reader((&mut reader).take(MAX_HEADER)).map_err(|error| {
        bad(&path, "its header", error, "is it a .npy file, and whole? Copy it again, or np.save it again")
    })?;
    let start = reader.stream_position().map_err(|error| io_error(&path, &error))?;
    let place = "its array";
    let Some(dtype) = dtype(&header.dtype()) else {
        let cause = format!("its type {} is not supported", header.dtype().descr());
        return Err(bad(&path, place, cause, "convert it with astype: <f2 <f4 <f8 |i1 |u1 <i4 <i8 |b1"));
    };
    let Some((count, shape)) = header.shape().split_first() else {
        return Err(bad(&path, place, "it is a scalar, and has no rows", "give it a side for the items"));
    };
    // With one side there is one order.
    if header.order() != Order::C && !shape.is_empty() {
        let remedy = "np.save(path, np.ascontiguousarray(array))";
        return Err(bad(&path, place, "its columns lie one after the other, not its rows", remedy));
    }
    let sides = shape.iter().map(|side| usize::try_from(*side)).collect::<Result<Vec<_>, _>>();
    let (Ok(shape), Ok(count)) = (sides, usize::try_from(*count)) else {
        return Err(bad(&path, place, "it is larger than any file", "copy it again"));
    };
    rows.add(path, length, vec![Column { name: "array".into(), dtype, shape, start }], count)
}

fn dtype(dtype: &npyz::DType) -> Option<DType> {
    let npyz::DType::Plain(plain) = dtype else { return None };
    if plain.endianness() == Endianness::Big {
        return None;
    }
    Some(match (plain.type_char(), plain.size_field()) {
        (TypeChar::Float, 2) => DType::F16,
        (TypeChar::Float, 4) => DType::F32,
        (TypeChar::Float, 8) => DType::F64,
        (TypeChar::Int, 1) => DType::I8,
        (TypeChar::Uint, 1) => DType::U8,
        (TypeChar::Int, 4) => DType::I32,
        (TypeChar::Int, 8) => DType::I64,
        (TypeChar::Bool, 1) => DType::Bool,
        _ => return None,
    })
}

impl fmt::Debug for NpyDataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NpyDataset({} rows)", self.rows.len())
    }
}
