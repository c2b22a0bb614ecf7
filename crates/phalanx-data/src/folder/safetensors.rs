//! Rows of tensors in safetensors files.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use phalanx::Result;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::rows::{Column, Order, Rows};
use super::{Array, ElementType, bad, files, io_error, open_file, without_panic};
use crate::Dataset;

/// The most bytes of a header, as the format says.
const MAX_HEADER: u64 = 100_000_000;
/// The length in front of the header.
const PREFIX: u64 = 8;

/// Rows of the tensors of a safetensors file, or of all in a folder, one after the other: an item has row n of each tensor, by name.
/// All tensors of a file have as many rows, the length of their first side; all files have the same tensors.
///
/// ```no_run
/// use phalanx_data::{Dataset, folder::SafetensorsDataset};
///
/// let tokens = SafetensorsDataset::open("tokens/")?; // train-00000.safetensors, ..., with "ids" [n, 128] and "label" [n]
/// let row = tokens.get(17)?;
/// assert_eq!((row["ids"].as_slice::<i64>()?.len(), row["label"].as_slice::<i64>()?.len()), (128, 1));
/// # Ok::<(), phalanx::Error>(())
/// ```
pub struct SafetensorsDataset {
    rows: Rows,
}

impl SafetensorsDataset {
    /// The file, or folder, at `path`. Only headers are read.
    ///
    /// # Errors
    /// If there is no such file, or one is no whole safetensors file or does not fit to the others. If there are more than 2^24 rows without
    /// an element.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let mut rows = Rows::default();
        for path in files(path, &["safetensors"])? {
            add(&mut rows, path)?;
        }
        Ok(Self { rows })
    }
}

impl Dataset for SafetensorsDataset {
    type Item = BTreeMap<String, Array>;

    fn len(&self) -> usize {
        self.rows.len()
    }

    fn get(&self, index: usize) -> Result<Self::Item> {
        Ok(self.rows.row(index)?.into_iter().map(|(name, array)| (name.to_owned(), array)).collect())
    }

    fn fingerprint(&self) -> u64 {
        self.rows.fingerprint()
    }
}

fn add(rows: &mut Rows, path: PathBuf) -> Result<()> {
    let mut file = open_file(&path)?;
    let about = file.metadata().map_err(|error| io_error(&path, &error))?;
    let length = about.len();
    let torn =
        |cause: String| bad(&path, "its header", cause, "is it a safetensors file, and whole? Copy it again");
    let unread = |error: io::Error| match error.kind() {
        io::ErrorKind::UnexpectedEof => torn(error.to_string()),
        _ => io_error(&path, &error),
    };
    let mut prefix = [0; PREFIX as usize];
    file.read_exact(&mut prefix).map_err(unread)?;
    let header = u64::from_le_bytes(prefix);
    if header > MAX_HEADER || header + PREFIX > length {
        return Err(torn(format!("it would have {header} bytes, the file has {length}")));
    }
    let mut text = vec![0; header as usize];
    file.read_exact(&mut text).map_err(unread)?;
    let metadata: Metadata = without_panic(&path, "its header", || {
        serde_json::from_slice(&text).map_err(|error| torn(error.to_string()))
    })?;
    let tensors: BTreeMap<String, &TensorInfo> = metadata.tensors().into_iter().collect();
    if tensors.is_empty() {
        return Err(bad(&path, "its header", "the file has no tensor", "write it again, or remove it"));
    }
    let mut count = None;
    let mut columns = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        let place = format!("the tensor {name:?}");
        let Some((own, shape)) = tensor.shape.split_first() else {
            return Err(bad(&path, place, "it is a scalar, and has no rows", "give it a side for the items"));
        };
        if *count.get_or_insert(*own) != *own {
            let cause = format!("it has {own} rows, another has {}", count.unwrap_or_default());
            return Err(bad(&path, place, cause, "give all tensors a row for each item"));
        }
        let Some(dtype) = dtype(tensor.dtype) else {
            let cause = format!("its type {:?} is not supported", tensor.dtype);
            return Err(bad(
                &path,
                place,
                cause,
                "convert it: f16 bf16 f32 f64 i8 i16 i32 i64 u8 u16 u32 u64 bool",
            ));
        };
        let start = (tensor.data_offsets.0 as u64).checked_add(PREFIX + header);
        let start = start.ok_or_else(|| torn(format!("the tensor {name:?} begins nowhere")))?;
        columns.push(Column { name, dtype, shape: shape.to_vec(), start, order: Order::RowMajor });
    }
    rows.add(path, &about, columns, count.unwrap_or(0))
}

fn dtype(dtype: Dtype) -> Option<ElementType> {
    Some(match dtype {
        Dtype::F16 => ElementType::F16,
        Dtype::BF16 => ElementType::BF16,
        Dtype::F32 => ElementType::F32,
        Dtype::F64 => ElementType::F64,
        Dtype::I8 => ElementType::I8,
        Dtype::I16 => ElementType::I16,
        Dtype::I32 => ElementType::I32,
        Dtype::I64 => ElementType::I64,
        Dtype::U8 => ElementType::U8,
        Dtype::U16 => ElementType::U16,
        Dtype::U32 => ElementType::U32,
        Dtype::U64 => ElementType::U64,
        Dtype::BOOL => ElementType::Bool,
        _ => return None,
    })
}

impl fmt::Debug for SafetensorsDataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SafetensorsDataset({} rows)", self.rows.len())
    }
}
