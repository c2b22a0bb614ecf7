//! An array as it was read.

use std::fmt;

use bytemuck::Pod;
use half::{bf16, f16};
use phalanx::{Bool, Error, Result};

/// The type of an array's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ElementType {
    /// IEEE half precision.
    F16,
    /// The upper half of an `f32`.
    BF16,
    /// 32-bit float.
    F32,
    /// 64-bit float.
    F64,
    /// 8-bit signed integer.
    I8,
    /// 16-bit signed integer.
    I16,
    /// 32-bit signed integer.
    I32,
    /// 64-bit signed integer.
    I64,
    /// Byte.
    U8,
    /// 16-bit unsigned integer.
    U16,
    /// 32-bit unsigned integer.
    U32,
    /// 64-bit unsigned integer.
    U64,
    /// A bool, one byte.
    Bool,
}

impl ElementType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 | Self::U64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::BF16 | Self::I16 | Self::U16 => 2,
            Self::I8 | Self::U8 | Self::Bool => 1,
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::I8 => "i8",
            Self::I16 => "i16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U8 => "u8",
            Self::U16 => "u16",
            Self::U32 => "u32",
            Self::U64 => "u64",
            Self::Bool => "bool",
        })
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that an array may have. Sealed: files have numbers only for these.
pub trait ArrayElement: Pod + Send + Sync + sealed::Sealed {
    /// What files call it.
    const TYPE: ElementType;
}

macro_rules! elements {
    ($($type:ty => $name:ident),*) => {
        $(
            impl sealed::Sealed for $type {}
            impl ArrayElement for $type {
                const TYPE: ElementType = ElementType::$name;
            }
        )*
    };
}
elements!(f16 => F16, bf16 => BF16, f32 => F32, f64 => F64, i8 => I8, i16 => I16, i32 => I32, i64 => I64);
elements!(u8 => U8, u16 => U16, u32 => U32, u64 => U64, Bool => Bool);

/// Elements of one type with a shape, in row-major order.
pub struct Array {
    shape: Vec<usize>,
    element: ElementType,
    /// Words, so that they lie as every type wants it.
    words: Vec<u64>,
    /// How many bytes of the words are elements.
    bytes: usize,
}

impl Array {
    pub(super) fn zeroed(element: ElementType, shape: Vec<usize>) -> Self {
        let bytes = shape.iter().product::<usize>() * element.size();
        Self { shape, element, words: vec![0; bytes.div_ceil(8)], bytes }
    }

    /// The lengths of its sides; a scalar has none.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The type of its elements.
    pub fn dtype(&self) -> ElementType {
        self.element
    }

    /// Its elements.
    ///
    /// # Errors
    /// If `T` is not their type.
    pub fn as_slice<T: ArrayElement>(&self) -> Result<&[T]> {
        if T::TYPE != self.element {
            let cause = format!("the array has the type {}, and is read as {}", self.element, T::TYPE);
            return Err(Error::invalid_argument(cause)
                .with_remedy(format!("read it as {}, and convert its elements", self.element)));
        }
        bytemuck::try_cast_slice(self.as_bytes())
            .map_err(|error| Error::aborted(format!("the array's bytes are no elements: {error}")))
    }

    /// The bytes of its elements, little-endian.
    pub fn as_bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.bytes]
    }

    pub(super) fn as_bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.bytes]
    }
}

impl fmt::Debug for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Array({} {:?})", self.element, self.shape)
    }
}
