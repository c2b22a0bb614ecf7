//! How the types of PyTorch's and NumPy's elements are seen by collectives.

use phalanx::{Caller, DType};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

/// What a collective does with elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// It moves them. Types that collectives do not know are bytes then.
    Bytes,
    /// It combines them one by one.
    Numbers,
    /// It adds them up, or averages: complex numbers are pairs of floats then.
    Sums,
}

/// A type of PyTorch or NumPy, by the element of which collectives see some.
#[derive(Clone, Copy)]
enum Known {
    /// The same type.
    Same(DType),
    /// Two floats, which ranks tell apart from such by this.
    Complex(DType, Caller),
    /// So many bytes, which only move, and which ranks tell apart from other bytes by this.
    Opaque(usize, Caller),
}

/// How collectives see the elements of a tensor or an array.
#[derive(Clone, Copy)]
pub struct Seen {
    /// PyTorch's name of their type, also of NumPy's: two types that are bytes to collectives are not the same.
    pub name: &'static str,
    /// What collectives see.
    pub dtype: DType,
    /// How many of that an element is.
    pub each: usize,
    /// What ranks compare of a call with it, if collectives see another type.
    pub caller: Option<Caller>,
}

impl Seen {
    /// Of no tensor at all.
    pub const NOTHING: Self = Self { name: "uint8", dtype: DType::U8, each: 1, caller: None };
}

const NAMES: &[(&str, Known)] = &[
    ("float32", Known::Same(DType::F32)),
    ("float64", Known::Same(DType::F64)),
    ("float16", Known::Same(DType::F16)),
    ("bfloat16", Known::Same(DType::BF16)),
    ("int32", Known::Same(DType::I32)),
    ("int64", Known::Same(DType::I64)),
    ("uint8", Known::Same(DType::U8)),
    ("int8", Known::Same(DType::I8)),
    ("bool", Known::Same(DType::Bool)),
    ("complex32", Known::Complex(DType::F16, Caller::TensorsOfComplex32)),
    ("complex64", Known::Complex(DType::F32, Caller::TensorsOfComplex64)),
    ("complex128", Known::Complex(DType::F64, Caller::TensorsOfComplex128)),
    ("int16", Known::Opaque(2, Caller::TensorsOfInt16)),
    ("uint16", Known::Opaque(2, Caller::TensorsOfUint16)),
    ("uint32", Known::Opaque(4, Caller::TensorsOfUint32)),
    ("uint64", Known::Opaque(8, Caller::TensorsOfUint64)),
    ("float8_e4m3fn", Known::Opaque(1, Caller::TensorsOfFloat8E4m3fn)),
    ("float8_e4m3fnuz", Known::Opaque(1, Caller::TensorsOfFloat8E4m3fnuz)),
    ("float8_e5m2", Known::Opaque(1, Caller::TensorsOfFloat8E5m2)),
    ("float8_e5m2fnuz", Known::Opaque(1, Caller::TensorsOfFloat8E5m2fnuz)),
    ("float8_e8m0fnu", Known::Opaque(1, Caller::TensorsOfFloat8E8m0fnu)),
    ("float4_e2m1fn_x2", Known::Opaque(1, Caller::TensorsOfFloat4E2m1fnX2)),
];

/// Types whose tensors `phalanx_torch` combines in a wider one, in the order of the numbers that it has for them, from 1 on: what ranks
/// compare of a sum and the like, if those are wider, and of an average, if there is one.
const NARROW: &[(Option<Caller>, Option<Caller>)] = &[
    (None, Some(Caller::AverageOfInt8)),
    (None, Some(Caller::AverageOfUint8)),
    (Some(Caller::TensorsOfInt16), Some(Caller::AverageOfInt16)),
    (Some(Caller::TensorsOfUint16), Some(Caller::AverageOfUint16)),
    (None, Some(Caller::AverageOfInt32)),
    (Some(Caller::TensorsOfUint32), Some(Caller::AverageOfUint32)),
    (Some(Caller::TensorsOfUint64), None),
];

/// What ranks compare of a reduction of tensors of the narrow type with this number, or of 0, if they are what collectives see. Averages
/// are sums of integers, which `phalanx_torch` divides.
pub fn of_narrow(number: u16, is_average: bool) -> PyResult<Option<Caller>> {
    let average = is_average.then_some(Caller::IntegerAverage);
    let Some(place) = number.checked_sub(1) else { return Ok(average) };
    match NARROW.get(usize::from(place)) {
        Some((_, narrow)) if is_average => Ok(narrow.or(average)),
        Some((narrow, _)) => Ok(*narrow),
        None => Err(PyValueError::new_err(format!("there is no narrow type {number}"))),
    }
}

/// What stands for pickled objects among the types of messages: a name, and a number that no type has.
pub const OBJECTS: (&str, i64) = ("pickled objects", 1 << 32);

/// The number by which ranks tell each other of the type with this name. All have the same version of this package.
pub fn number(name: &str) -> Option<i64> {
    let place = NAMES.iter().position(|(known, _)| *known == name)?;
    i64::try_from(place).ok()
}

/// The type with this number: its name, and how many bytes one of its elements is. None if a peer has made it up.
pub fn numbered(number: i64) -> Option<(&'static str, usize)> {
    if number == OBJECTS.1 {
        return Some((OBJECTS.0, 1));
    }
    let (name, known) = NAMES.get(usize::try_from(number).ok()?)?;
    Some((*name, known.bytes()))
}

/// From `torch.dtype`s to places in `NAMES`, for those that this PyTorch has.
fn table(py: Python<'_>) -> PyResult<&Bound<'_, PyDict>> {
    static TABLE: PyOnceLock<Py<PyDict>> = PyOnceLock::new();
    let table = TABLE.get_or_try_init(py, || {
        let (torch, table) = (py.import("torch")?, PyDict::new(py));
        for (place, (name, _)) in NAMES.iter().enumerate() {
            if let Ok(dtype) = torch.getattr(*name) {
                table.set_item(dtype, place)?;
            }
        }
        Ok::<_, PyErr>(table.unbind())
    })?;
    Ok(table.bind(py))
}

/// How elements of this `torch.dtype` are seen.
pub fn of_torch(dtype: &Bound<'_, PyAny>, meaning: Meaning) -> PyResult<Seen> {
    let place: Option<usize> =
        table(dtype.py())?.get_item(dtype)?.map(|place| place.extract()).transpose()?;
    match place.and_then(|place| NAMES.get(place)) {
        Some((name, known)) => known.as_seen(name, meaning),
        None => Err(PyTypeError::new_err(format!("Invalid scalar type: {dtype} cannot be exchanged"))),
    }
}

/// As [`of_torch`], of an array's `typestr`, such as `<f4`, and the name of its type.
pub fn of_numpy(typestr: &str, name: &str, meaning: Meaning) -> PyResult<Seen> {
    // A letter for the order of bytes, one for the kind, and the length: elements of one byte have no order.
    let parse = || {
        let (kind, bytes) = typestr.get(1..)?.split_at_checked(1)?;
        // Of the package ml_dtypes, for which NumPy's interface has no letter.
        if typestr == "<V2" && name == "bfloat16" {
            return Some(("bfloat16", Known::Same(DType::BF16)));
        }
        let bytes: usize = bytes.parse().ok()?;
        let order = if bytes == 1 { '|' } else { '<' };
        (typestr == format!("{order}{kind}{bytes}")).then_some(())?;
        Known::in_numpy(*kind.as_bytes().first()?, bytes)
    };
    let known = parse().ok_or_else(|| {
        PyTypeError::new_err(format!(
            "arrays of type {name} ({typestr}) cannot be exchanged: use floats, integers, complex numbers or bool in this \
             machine's byte order"
        ))
    });
    let (name, known) = known?;
    known.as_seen(name, meaning)
}

/// As [`of_numpy`], in this machine's byte order, by the letter of the kind and the length; None if it would be an error.
pub fn of_usual_numpy(kind: u8, bytes: usize, meaning: Meaning) -> Option<Seen> {
    let (name, known) = Known::in_numpy(kind, bytes)?;
    known.as_seen(name, meaning).ok()
}

impl Known {
    /// NumPy's type with the letter `kind`, with so many bytes an element, in this machine's byte order.
    fn in_numpy(kind: u8, bytes: usize) -> Option<(&'static str, Self)> {
        Some(match (kind, bytes) {
            (b'f', 2) => ("float16", Self::Same(DType::F16)),
            (b'f', 4) => ("float32", Self::Same(DType::F32)),
            (b'f', 8) => ("float64", Self::Same(DType::F64)),
            (b'i', 1) => ("int8", Self::Same(DType::I8)),
            (b'i', 2) => ("int16", Self::Opaque(2, Caller::TensorsOfInt16)),
            (b'i', 4) => ("int32", Self::Same(DType::I32)),
            (b'i', 8) => ("int64", Self::Same(DType::I64)),
            (b'u', 1) => ("uint8", Self::Same(DType::U8)),
            (b'u', 2) => ("uint16", Self::Opaque(2, Caller::TensorsOfUint16)),
            (b'u', 4) => ("uint32", Self::Opaque(4, Caller::TensorsOfUint32)),
            (b'u', 8) => ("uint64", Self::Opaque(8, Caller::TensorsOfUint64)),
            (b'b', 1) => ("bool", Self::Same(DType::Bool)),
            (b'c', 8) => ("complex64", Self::Complex(DType::F32, Caller::TensorsOfComplex64)),
            (b'c', 16) => ("complex128", Self::Complex(DType::F64, Caller::TensorsOfComplex128)),
            _ => return None,
        })
    }

    /// How many bytes an element is.
    fn bytes(self) -> usize {
        match self {
            Self::Same(dtype) => dtype.size(),
            Self::Complex(dtype, _) => 2 * dtype.size(),
            Self::Opaque(bytes, _) => bytes,
        }
    }

    /// How its elements are seen. `name` is the type's.
    fn as_seen(self, name: &'static str, meaning: Meaning) -> PyResult<Seen> {
        let seen = |dtype, each, caller| Ok(Seen { name, dtype, each, caller });
        match (self, meaning) {
            (Self::Same(dtype), _) => seen(dtype, 1, None),
            (Self::Complex(dtype, caller), Meaning::Bytes | Meaning::Sums) => seen(dtype, 2, Some(caller)),
            (Self::Opaque(bytes, caller), Meaning::Bytes) => seen(DType::U8, bytes, Some(caller)),
            (Self::Complex(..), Meaning::Numbers) => {
                Err(PyValueError::new_err(format!("{name} can be summed and averaged, and nothing else")))
            }
            (Self::Opaque(..), Meaning::Numbers | Meaning::Sums) => Err(PyTypeError::new_err(format!(
                "{name} cannot be reduced, only moved: convert it to a type that can"
            ))),
        }
    }
}
