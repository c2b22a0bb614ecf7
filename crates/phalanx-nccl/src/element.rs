//! The types of elements on a device.

use std::ffi::c_int;
use std::fmt;

use bytemuck::Pod;
use half::{bf16, f16};

/// The type of a buffer's elements, as NCCL has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum DType {
    /// 8-bit signed integer.
    I8 = 0,
    /// Byte.
    U8 = 1,
    /// 32-bit signed integer.
    I32 = 2,
    /// 32-bit unsigned integer.
    U32 = 3,
    /// 64-bit signed integer.
    I64 = 4,
    /// 64-bit unsigned integer.
    U64 = 5,
    /// IEEE half precision.
    F16 = 6,
    /// 32-bit float.
    F32 = 7,
    /// 64-bit float.
    F64 = 8,
    /// The upper half of an `f32`.
    BF16 = 9,
}

impl DType {
    /// Every type, in the order of NCCL's numbers.
    pub const ALL: [Self; 10] = [
        Self::I8,
        Self::U8,
        Self::I32,
        Self::U32,
        Self::I64,
        Self::U64,
        Self::F16,
        Self::F32,
        Self::F64,
        Self::BF16,
    ];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// `ncclDataType_t`.
    pub(crate) const fn code(self) -> c_int {
        self as c_int
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::I8 => "i8",
            Self::U8 => "u8",
            Self::I32 => "i32",
            Self::U32 => "u32",
            Self::I64 => "i64",
            Self::U64 => "u64",
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::BF16 => "bf16",
        })
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that NCCL moves and reduces. Sealed: NCCL has numbers only for these. Truth values are `u8`: their maximum is
/// "or", their minimum "and".
pub trait Element: Pod + Send + Sync + sealed::Sealed {
    /// Its type for NCCL.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),*) => {
        $(
            impl sealed::Sealed for $type {}
            impl Element for $type {
                const DTYPE: DType = DType::$dtype;
            }
        )*
    };
}
elements!(i8 => I8, u8 => U8, i32 => I32, u32 => U32, i64 => I64, u64 => U64, f16 => F16, f32 => F32, f64 => F64, bf16 => BF16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_nccl_and_sizes_those_of_the_types() {
        for (code, dtype) in DType::ALL.into_iter().enumerate() {
            assert_eq!(dtype.code() as usize, code);
        }
        assert_eq!(f16::DTYPE.size(), size_of::<f16>());
        assert_eq!(u64::DTYPE.size(), size_of::<u64>());
        assert_eq!((bf16::DTYPE.code(), i8::DTYPE.size()), (9, 1));
    }
}
