//! The operations with which ranks' elements are combined.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How the elements of all ranks become one. Integers wrap on overflow; f16 and bf16 are combined in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum ReduceOp {
    /// The sum.
    Sum = 1,
    /// The sum divided by the world size, once; integers round towards zero.
    Avg = 2,
    /// The product.
    Product = 3,
    /// The smallest; NaN if any rank has NaN.
    Min = 4,
    /// The largest; NaN if any rank has NaN.
    Max = 5,
}

impl ReduceOp {
    /// Every operation, in the order of their numbers on the wire.
    pub const ALL: [Self; 5] = [Self::Sum, Self::Avg, Self::Product, Self::Min, Self::Max];

    pub(crate) fn from_wire(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|op| *op as u8 == code)
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
        })
    }
}
