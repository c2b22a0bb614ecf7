//! The types of elements that ranks exchange.

use std::fmt;

use bytemuck::{Pod, TransparentWrapper, Zeroable};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// The type of a buffer's elements, as it is in every frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[repr(u8)]
pub enum DType {
    /// 32-bit float.
    F32 = 1,
    /// 64-bit float.
    F64 = 2,
    /// IEEE half precision.
    F16 = 3,
    /// The upper half of an `f32`.
    BF16 = 4,
    /// 32-bit signed integer.
    I32 = 5,
    /// 64-bit signed integer.
    I64 = 6,
    /// Byte.
    U8 = 7,
    /// 8-bit signed integer.
    I8 = 8,
    /// A bool, one byte: see [`Bool`].
    Bool = 9,
}

impl DType {
    /// Every type, in the order of their numbers on the wire.
    pub const ALL: [Self; 9] =
        [Self::F32, Self::F64, Self::F16, Self::BF16, Self::I32, Self::I64, Self::U8, Self::I8, Self::Bool];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::U8 | Self::I8 | Self::Bool => 1,
        }
    }

    /// Whether it is a floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64 | Self::F16 | Self::BF16)
    }

    /// The type with this number on the wire; None if there is none.
    #[doc(hidden)]
    pub fn from_wire(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| *dtype as u8 == code)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::Bool => "bool",
        })
    }
}

/// A bool as ranks exchange it: a byte, false if it is zero.
///
/// Rust's `bool` must be 0 or 1; any other byte is undefined behaviour, and a peer may send any byte. This
/// type accepts every byte, so that received memory can be read without checking it first.
///
/// ```
/// use phalanx::{Bool, ProcessGroup, ReduceOp};
/// let group = ProcessGroup::alone()?;
/// let mut converged = [Bool::from(true)];
/// group.all_reduce(&mut converged, ReduceOp::Min)?; // true where it is true on every rank
/// assert!(converged[0].get());
/// assert_eq!(Bool::of(&[true, false]), [Bool::TRUE, Bool::FALSE]);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[derive(Clone, Copy, Default, Pod, Zeroable, TransparentWrapper)]
#[repr(transparent)]
pub struct Bool(u8);

impl Bool {
    /// False.
    pub const FALSE: Self = Self(0);
    /// True.
    pub const TRUE: Self = Self(1);

    /// Its value.
    pub const fn get(self) -> bool {
        self.0 != 0
    }

    /// The same memory, to lend to a collective.
    pub fn of(values: &[bool]) -> &[Self] {
        Self::wrap_slice(bytemuck::cast_slice(values))
    }
}

impl From<bool> for Bool {
    fn from(value: bool) -> Self {
        Self(u8::from(value))
    }
}

impl From<Bool> for bool {
    fn from(value: Bool) -> Self {
        value.get()
    }
}

impl PartialEq for Bool {
    fn eq(&self, other: &Self) -> bool {
        self.get() == other.get()
    }
}

impl Eq for Bool {}

impl fmt::Debug for Bool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that collectives move and reduce. Sealed: frames have numbers only for these.
pub trait Element: Pod + Send + Sync + sealed::Sealed {
    /// Its name on the wire.
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
elements!(f32 => F32, f64 => F64, f16 => F16, bf16 => BF16, i32 => I32, i64 => I64, u8 => U8, i8 => I8, Bool => Bool);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_sizes_agree_with_the_types() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_wire(dtype as u8), Some(dtype));
        }
        assert_eq!(DType::from_wire(0), None);
        assert_eq!(f16::DTYPE.size(), size_of::<f16>());
        assert_eq!(i64::DTYPE.size(), size_of::<i64>());
        assert_eq!(Bool::DTYPE.size(), size_of::<Bool>());
    }

    #[test]
    fn every_byte_is_a_truth_value() {
        let received: &[Bool] = bytemuck::cast_slice(&[0u8, 1, 2, 255]);
        assert_eq!(received, Bool::of(&[false, true, true, true]));
    }
}
