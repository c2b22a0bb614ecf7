//! The operations that combine ranks' elements.

use std::fmt;
use std::hash::{Hash, Hasher};

use serde::{Deserialize, Serialize};

use super::kernel;
use crate::dtype::DType;
use crate::error::{Error, Result};

/// How the elements of all ranks are combined. Integers wrap on overflow; f16 and bf16 are combined in f32.
///
/// For bool, the sum and the maximum are "or", the product and the minimum "and". Not every operation is defined
/// for every type: see [`supports`](Self::supports).
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum ReduceOp {
    /// The sum.
    #[doc(alias = "SUM")]
    Sum,
    /// The sum divided by the world size, once. Only for floats: for integers use the sum, and divide it. With f16, no
    /// partial sum overflows if the average does not.
    #[doc(alias("AVG", "Average", "mean"))]
    Avg,
    /// The product.
    #[doc(alias = "PRODUCT")]
    Product,
    /// The smallest, with -0 below 0; NaN if any rank has NaN.
    #[doc(alias = "MIN")]
    Min,
    /// The largest, with 0 above -0; NaN if any rank has NaN.
    #[doc(alias = "MAX")]
    Max,
    /// Bitwise and.
    #[doc(alias = "BAND")]
    BAnd,
    /// Bitwise or.
    #[doc(alias = "BOR")]
    BOr,
    /// Bitwise exclusive or.
    #[doc(alias = "BXOR")]
    BXor,
    /// The sum of each rank's elements times that rank's own factor, which may differ between ranks. Each
    /// product is rounded to the element's type. For averages weighted by the sizes of batches, for example.
    #[doc(alias = "PREMUL_SUM")]
    PreMulSum(f64),
}

impl ReduceOp {
    /// Every operation, in the order of their numbers on the wire; the factor is 1.
    pub const ALL: [Self; 9] = [
        Self::Sum,
        Self::Avg,
        Self::Product,
        Self::Min,
        Self::Max,
        Self::BAnd,
        Self::BOr,
        Self::BXor,
        Self::PreMulSum(1.0),
    ];

    /// Whether it is defined for elements of this type. Bitwise operations are for integers and bool; only floats have an
    /// average and take a factor.
    pub const fn supports(self, dtype: DType) -> bool {
        match self {
            Self::Sum | Self::Product | Self::Min | Self::Max => true,
            Self::BAnd | Self::BOr | Self::BXor => !dtype.is_float(),
            Self::Avg | Self::PreMulSum(_) => dtype.is_float(),
        }
    }

    /// An error if it is not defined for elements of this type.
    #[inline]
    pub(crate) fn check(self, dtype: DType) -> Result<()> {
        if self.supports(dtype) { Ok(()) } else { Err(self.undefined_for(dtype)) }
    }

    #[cold]
    fn undefined_for(self, dtype: DType) -> Error {
        let remedy = match self {
            Self::Avg if dtype == DType::Bool => "for bool, min and product mean AND; max and sum mean OR",
            Self::Avg => "reduce with sum and divide by the world size, or average f32 or f64",
            Self::PreMulSum(_) => "premul_sum is for f16, bf16, f32 and f64",
            Self::BAnd | Self::BOr | Self::BXor => "band, bor and bxor are for integers and truth values",
            Self::Sum | Self::Product | Self::Min | Self::Max => "cast the elements to another type",
        };
        Error::invalid_argument(format!("{self} is not defined for {dtype}")).with_remedy(remedy)
    }

    /// Prepares this rank's elements: checks the type, and multiplies them by the factor, if there is one.
    #[inline]
    pub(crate) fn prepare(self, dtype: DType, data: &mut [u8]) -> Result<()> {
        self.check(dtype)?;
        self.factor().map_or(Ok(()), |factor| kernel::scale(dtype, data, factor))
    }

    /// The factor of this rank's elements, if there is one.
    #[doc(hidden)]
    pub const fn factor(self) -> Option<f64> {
        if let Self::PreMulSum(factor) = self { Some(factor) } else { None }
    }

    /// The operation without its factor: all ranks must agree on it, while each rank has its own factor.
    pub(crate) const fn without_factor(self) -> Self {
        if let Self::PreMulSum(_) = self { Self::PreMulSum(1.0) } else { self }
    }

    /// The number on the wire, from 1 on; a factor is not part of it.
    #[doc(hidden)]
    pub const fn code(self) -> u8 {
        match self {
            Self::Sum => 1,
            Self::Avg => 2,
            Self::Product => 3,
            Self::Min => 4,
            Self::Max => 5,
            Self::BAnd => 6,
            Self::BOr => 7,
            Self::BXor => 8,
            Self::PreMulSum(_) => 9,
        }
    }

    /// The operation with this number on the wire, with a factor of 1; None if there is none.
    #[doc(hidden)]
    pub fn from_wire(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|op| op.code() == code)
    }

    /// The identity of the operation. Factors are compared by their bits, so that NaN equals itself.
    fn key(self) -> (u8, Option<u64>) {
        (self.code(), self.factor().map(f64::to_bits))
    }
}

impl PartialEq for ReduceOp {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for ReduceOp {}

impl Hash for ReduceOp {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Avg => "avg",
            Self::Product => "product",
            Self::Min => "min",
            Self::Max => "max",
            Self::BAnd => "band",
            Self::BOr => "bor",
            Self::BXor => "bxor",
            Self::PreMulSum(_) => "premul_sum",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_meaning_is_refused_with_what_has() {
        let error = ReduceOp::BXor.check(DType::F16).unwrap_err();
        assert!(error.is_invalid_argument());
        assert_eq!(
            error.to_string(),
            "bxor is not defined for f16 (band, bor and bxor are for integers and truth values)"
        );
        assert!(ReduceOp::Avg.check(DType::Bool).is_err());
        for dtype in [DType::I8, DType::U8, DType::I32, DType::I64] {
            let error = ReduceOp::Avg.check(dtype).unwrap_err().to_string();
            assert!(error.contains("reduce with sum and divide"), "{error}");
        }
        assert!(ReduceOp::PreMulSum(0.5).check(DType::I32).is_err());
        assert!(ReduceOp::PreMulSum(0.5).check(DType::BF16).is_ok());
    }

    #[test]
    fn ranks_agree_on_the_operation_and_not_on_the_factor() {
        let (half, nan) = (ReduceOp::PreMulSum(0.5), ReduceOp::PreMulSum(f64::NAN));
        assert_ne!(half, nan);
        assert_eq!(nan, nan);
        assert_eq!(half.without_factor(), nan.without_factor());
        assert_eq!(ReduceOp::from_wire(9), Some(half.without_factor()));
    }
}
