//! The file with the tensors, in the safetensors format: where each lies, and the checks of a file from outside.
//!
//! The crate safetensors reads and writes the header, by its authors' rules. Files go through our own layer, since
//! theirs syncs nothing.

use std::collections::BTreeMap;
use std::ops::Range;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::dtype::DType;

/// The most bytes of a header; the limit of the format.
const MAX_HEADER: u64 = 100_000_000;
/// The length of the header's length field.
const PREFIX: usize = 8;
/// A key of the header that is not the name of a tensor.
const RESERVED: &str = "__metadata__";
/// The longest name of a tensor, in bytes.
const MAX_NAME: usize = 1024;

/// One tensor, without its elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The type of its elements.
    pub dtype: DType,
    /// Its shape; empty for a scalar.
    pub shape: Vec<usize>,
    /// The range of its elements in the file, once it is read.
    pub bytes: Range<usize>,
}

/// Whether a tensor may have this name.
pub fn is_tensor_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len()) && name != RESERVED
}

/// The bytes of a tensor, if their number fits into a `usize`.
pub fn byte_length(dtype: DType, shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(dtype.size(), |bytes, side| bytes.checked_mul(*side))
}

/// The order of tensors in the file: wide elements first, so that all are aligned, then by name.
pub fn order(dtype: DType, name: &str) -> impl Ord + use<'_> {
    (std::cmp::Reverse(dtype.size()), name)
}

/// The header for `tensors`, which are in this order.
pub fn header<'a>(
    tensors: impl Iterator<Item = (&'a str, DType, &'a [usize], usize)>,
) -> Result<Vec<u8>, String> {
    let mut end = 0;
    let infos = tensors.map(|(name, dtype, shape, length)| {
        let data_offsets = (end, end + length);
        end += length;
        (name.to_owned(), TensorInfo { dtype: code(dtype), shape: shape.to_vec(), data_offsets })
    });
    let metadata = Metadata::new(None, infos.collect()).map_err(|error| error.to_string())?;
    let mut text = serde_json::to_vec(&metadata).map_err(|error| error.to_string())?;
    text.resize(text.len().next_multiple_of(PREFIX), b' ');
    if text.len() as u64 > MAX_HEADER {
        return Err(format!(
            "the names and shapes of the tensors take {} bytes, and may take {MAX_HEADER}",
            text.len()
        ));
    }
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    Ok(bytes)
}

/// Where the tensors are in `file`.
pub fn index(file: &[u8]) -> Result<BTreeMap<String, Layout>, String> {
    let Some((length, rest)) = file.split_first_chunk::<PREFIX>() else {
        return Err("it has no header".to_owned());
    };
    let length = u64::from_le_bytes(*length);
    let header =
        usize::try_from(length).ok().filter(|_| length <= MAX_HEADER).and_then(|end| rest.get(..end));
    let Some(header) = header else { return Err(format!("its header cannot have {length} bytes")) };
    // This checks that the tensors are contiguous, and each as long as its shape says.
    let metadata: Metadata = serde_json::from_slice(header).map_err(|error| error.to_string())?;
    let data = rest.len() - header.len();
    if metadata.data_len() != data {
        return Err(format!("its tensors take {} bytes, and there are {data}", metadata.data_len()));
    }
    let start = PREFIX + header.len();
    let layout = |name: String, info: &TensorInfo| {
        let dtype =
            decode(info.dtype).ok_or_else(|| format!("{name} has elements of type {}", info.dtype))?;
        let (from, to) = info.data_offsets;
        Ok((name, Layout { dtype, shape: info.shape.clone(), bytes: start + from..start + to }))
    };
    metadata.tensors().into_iter().map(|(name, info)| layout(name, info)).collect()
}

fn code(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
        DType::U8 => Dtype::U8,
        DType::I8 => Dtype::I8,
        DType::Bool => Dtype::BOOL,
    }
}

fn decode(code: Dtype) -> Option<DType> {
    DType::ALL.into_iter().find(|dtype| self::code(*dtype) == code)
}

/// Reads a file of tensors, for the fuzz target.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> bool {
    let Ok(index) = index(bytes) else { return false };
    for layout in index.values() {
        assert_eq!(
            bytes.get(layout.bytes.clone()).map(<[u8]>::len),
            byte_length(layout.dtype, &layout.shape)
        );
    }
    true
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use safetensors::SafeTensors;

    use super::*;

    /// A file with a header that says `text`, and `data` bytes behind it.
    fn file(text: &str, data: usize) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &vec![0; data]].concat()
    }

    #[test]
    fn other_programs_read_what_is_written() {
        let all: Vec<(String, DType)> =
            DType::ALL.iter().map(|dtype| (format!("a.{dtype}"), *dtype)).collect();
        let mut all: Vec<_> = all.iter().map(|(name, dtype)| (name.as_str(), *dtype)).collect();
        all.sort_by(|left, right| order(left.1, left.0).cmp(&order(right.1, right.0)));
        let tensors = all.iter().map(|(name, dtype)| (*name, *dtype, &[2usize, 3][..], 6 * dtype.size()));
        let mut bytes = header(tensors).unwrap();
        assert_eq!(bytes.len() % 8, 0);
        bytes.resize(bytes.len() + DType::ALL.iter().map(|dtype| 6 * dtype.size()).sum::<usize>(), 7);
        let theirs = SafeTensors::deserialize(&bytes).unwrap();
        let ours = index(&bytes).unwrap();
        assert_eq!(ours.len(), DType::ALL.len());
        for (name, layout) in ours {
            let tensor = theirs.tensor(&name).unwrap();
            assert_eq!((code(layout.dtype), layout.shape.as_slice()), (tensor.dtype(), tensor.shape()));
            assert_eq!(&bytes[layout.bytes.clone()], tensor.data());
            assert_eq!(layout.bytes.start % layout.dtype.size(), 0);
        }
    }

    #[test]
    fn lengths_that_cannot_be_are_refused() {
        let tensor = |dtype: &str, shape: &str, from: u64, to: u64| {
            format!(r#""{from}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{from},{to}]}}"#)
        };
        assert!(index(&file(&format!("{{{}}}", tensor("F32", "[2]", 0, 8)), 8)).is_ok());
        assert!(index(&file("{}", 0)).is_ok_and(|index| index.is_empty()));
        let huge: Vec<String> =
            (0..9).map(|n| tensor("U8", &format!("[{}]", 1u64 << 60), n << 60, (n + 1) << 60)).collect();
        for (text, data) in [
            (tensor("F32", "[2]", 0, 8), 7),
            (tensor("F32", "[2]", 0, 8), 9),
            (tensor("F32", "[3]", 0, 8), 8),
            (tensor("F32", "[2]", 4, 12), 12),
            (tensor("F32", "[4611686018427387904, 4]", 0, 0), 0),
            (tensor("C64", "[1]", 0, 8), 8),
            (huge.join(","), 16),
        ] {
            assert!(index(&file(&format!("{{{text}}}"), data)).is_err(), "{text}");
        }
        for bytes in
            [&[][..], &[0; 7], &[0; 8], &u64::MAX.to_le_bytes(), &[9, 0, 0, 0, 0, 0, 0, 0, b'{', b'}']]
        {
            assert!(index(bytes).is_err(), "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes: Vec<u8>) {
            fuzz(&bytes);
        }
    }
}
