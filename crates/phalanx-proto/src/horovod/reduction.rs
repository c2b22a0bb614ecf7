//! How tensors are combined, and in what form they travel.

use std::fmt;

use crate::caller::Caller;
use crate::collective::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// How the elements of all ranks are combined.
#[doc(alias = "ReduceOp")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Op {
    /// The sum divided by the number of ranks. Only for floats.
    #[default]
    Average,
    /// The sum.
    Sum,
    /// The smallest.
    Min,
    /// The largest.
    Max,
    /// The product.
    Product,
    /// The adaptive sum of [Maleki et al., 2020](https://arxiv.org/abs/2006.02924): gradients that point into the same
    /// direction are averaged, orthogonal ones are added. Only for floats, and for 1, 2, 4, 8, ... ranks.
    Adasum,
}

impl Op {
    /// The core's operation. `None` for Adasum, which is made of messages.
    pub fn reduce_op(self) -> Option<ReduceOp> {
        match self {
            Self::Average => Some(ReduceOp::Avg),
            Self::Sum => Some(ReduceOp::Sum),
            Self::Min => Some(ReduceOp::Min),
            Self::Max => Some(ReduceOp::Max),
            Self::Product => Some(ReduceOp::Product),
            Self::Adasum => None,
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Average => "average",
            Self::Sum => "sum",
            Self::Min => "min",
            Self::Max => "max",
            Self::Product => "product",
            Self::Adasum => "adasum",
        })
    }
}

/// In what form f32 and f64 travel. Tensors of other types always travel as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Compression {
    /// As they are.
    #[default]
    None,
    /// As IEEE half precision: 11 bits of precision, up to 65,504.
    Fp16,
    /// As the upper halves of f32: 8 bits of precision, and the range of f32.
    Bf16,
}

impl Compression {
    /// The type in which elements of `dtype` travel.
    pub fn travels_as(self, dtype: DType) -> DType {
        match (self, dtype) {
            (Self::Fp16, DType::F32 | DType::F64) => DType::F16,
            (Self::Bf16, DType::F32 | DType::F64) => DType::BF16,
            _ => dtype,
        }
    }
}

/// How an allreduce or a reducescatter combines: the operation, factors before and after it, and the form in which
/// elements travel. An [`Op`] alone is one too.
///
/// ```
/// use phalanx_horovod::{Compression, Op, Reduction};
/// let halves = Reduction::new(Op::Sum).prescale(0.5).compression(Compression::Bf16);
/// assert_ne!(halves, Op::Sum.into());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Reduction {
    /// The operation.
    pub op: Op,
    /// The factor of each rank's elements, before.
    pub prescale: Factor,
    /// The factor of the combined elements.
    pub postscale: Factor,
    /// The form in which elements travel.
    pub compression: Compression,
}

/// A factor of elements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Factor(pub f64);

impl Default for Factor {
    fn default() -> Self {
        Self(1.0)
    }
}

impl Reduction {
    /// `op`, without factors and without compression.
    pub fn new(op: Op) -> Self {
        Self { op, ..Self::default() }
    }

    /// Multiplies each rank's elements by `factor` before they are combined. Only for floats.
    #[doc(alias = "prescale_factor")]
    pub fn prescale(self, factor: f64) -> Self {
        Self { prescale: Factor(factor), ..self }
    }

    /// Multiplies the combined elements by `factor`. Only for floats.
    #[doc(alias = "postscale_factor")]
    pub fn postscale(self, factor: f64) -> Self {
        Self { postscale: Factor(factor), ..self }
    }

    /// Sends elements in another form.
    pub fn compression(self, compression: Compression) -> Self {
        Self { compression, ..self }
    }

    /// What elements of `dtype` are multiplied by before they are combined, and after. Factors of integers are the program's to apply: ranks
    /// compare them, and no more.
    #[doc(hidden)]
    pub fn factors(self, dtype: DType) -> (f64, f64) {
        if dtype.is_float() { (self.prescale.0, self.postscale.0) } else { (1.0, 1.0) }
    }

    /// Checks that this has a meaning for elements of `dtype` in a world of `size` ranks.
    ///
    /// # Errors
    /// If the operation, or a factor, is not defined for them.
    pub fn check(self, dtype: DType, size: usize) -> Result<()> {
        self.check_for(dtype, None, size)
    }

    /// The same for elements that are what `stands_for` says to the program.
    #[doc(hidden)]
    pub fn check_for(self, dtype: DType, stands_for: Option<Caller>, size: usize) -> Result<()> {
        let refuse = |what: String, remedy: &str| Err(Error::invalid_argument(what).with_remedy(remedy));
        let supported = match self.op.reduce_op() {
            Some(op) => op.supports(dtype),
            None => dtype.is_float(),
        };
        if !supported {
            let remedy = "convert to f32 or f64, or take the sum";
            return refuse(format!("{} is not defined for {dtype}", self.op), remedy);
        }
        if self.op == Op::Adasum && !size.is_power_of_two() {
            let remedy = "start 2, 4, 8, ... ranks, or take the average";
            return refuse(format!("adasum is not defined for {size} ranks"), remedy);
        }
        for (name, Factor(factor)) in [("prescale", self.prescale), ("postscale", self.postscale)] {
            if !factor.is_finite() {
                return refuse(format!("{name} is {factor}"), "it must be a finite number");
            }
            // Elements that stand for something else are scaled when that is made of them.
            if factor != 1.0 && !dtype.is_float() && stands_for.is_none() {
                return refuse(format!("{name} is not defined for {dtype}"), "convert to f32 or f64");
            }
        }
        Ok(())
    }
}

impl From<Op> for Reduction {
    fn from(op: Op) -> Self {
        Self::new(op)
    }
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.op.fmt(f)?;
        for (name, Factor(factor)) in [("prescale", self.prescale), ("postscale", self.postscale)] {
            if factor != 1.0 {
                write!(f, ", {name} {factor}")?;
            }
        }
        match self.compression {
            Compression::None => Ok(()),
            Compression::Fp16 => f.write_str(", fp16"),
            Compression::Bf16 => f.write_str(", bf16"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_meaning_is_refused_with_what_has() {
        let refused =
            |reduction: Reduction, dtype, size| reduction.check(dtype, size).unwrap_err().to_string();
        // Without Rust's names: Python's callers read this, too.
        assert!(refused(Op::Average.into(), DType::I64, 2).contains("or take the sum"));
        assert!(
            refused(Op::Adasum.into(), DType::F32, 3).contains("2, 4, 8, ... ranks, or take the average")
        );
        assert!(refused(Op::Adasum.into(), DType::U8, 2).contains("not defined for u8"));
        assert!(refused(Reduction::new(Op::Sum).prescale(0.5), DType::I32, 2).contains("prescale"));
        assert!(refused(Reduction::new(Op::Sum).postscale(f64::NAN), DType::F32, 2).contains("NaN"));
        for dtype in DType::ALL {
            assert!(Reduction::from(Op::Max).check(dtype, 3).is_ok());
        }
        // Whoever knows what they stand for scales them.
        let scaled = Reduction::new(Op::Sum).prescale(0.5).postscale(3.0);
        scaled.check_for(DType::I32, Some(Caller::ScaledIntegers), 2).unwrap();
        assert_eq!((scaled.factors(DType::I32), scaled.factors(DType::BF16)), ((1.0, 1.0), (0.5, 3.0)));
        let shown = Reduction::new(Op::Sum).prescale(0.5).compression(Compression::Fp16).to_string();
        assert_eq!(shown, "sum, prescale 0.5, fp16");
    }
}
