//! The arithmetic of reductions, on the memory of buffers.
//!
//! Every loop is compiled for plain x86-64, with AVX2 and with AVX-512, and chosen at run time: by the crate pulp, without
//! unsafe code of ours.

// `fold` is for memory that all ranks share; plans combine pairwise.
mod fold;
mod half;
mod number;
#[cfg(test)]
mod tests;

use ::half::{bf16, f16};
use bytemuck::Pod;

pub use self::fold::Fold;
use self::fold::Onto;
use self::half::Half;
use self::number::{Loop, Number};
use super::{Combine, Parts, ReduceOp};
use crate::dtype::{Bool, DType};
use crate::error::{Error, Result};

/// What to do with received elements, for one type and operation.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// The type of the elements.
    pub dtype: DType,
    /// The operation that combines them; without effect if they are replaced.
    pub op: ReduceOp,
    /// Whether received elements replace the local ones, or the order of the operands.
    pub combine: Combine,
    /// Which ranks' parts the elements hold: when all are in, an average is divided.
    pub parts: Parts,
}

impl Kernel {
    /// Received elements replace the local ones.
    pub fn replacing(dtype: DType) -> Self {
        Self { dtype, op: ReduceOp::Sum, combine: Combine::Replace, parts: Parts::default() }
    }

    /// Combines `received` into `local`: the same length, whole elements, aligned for the type.
    ///
    /// Both orders of the operands give the same bits, unless both are NaNs, so one loop is enough.
    pub fn apply(&self, local: &mut [u8], received: &[u8]) -> Result<()> {
        same_length([local.len(), received.len()])?;
        if self.combine == Combine::Replace {
            local.copy_from_slice(received);
            return Ok(());
        }
        self.op.check(self.dtype)?;
        match self.dtype {
            DType::F32 => self.native::<f32>(local, received),
            DType::F64 => self.native::<f64>(local, received),
            DType::I32 => self.native::<i32>(local, received),
            DType::I64 => self.native::<i64>(local, received),
            DType::U8 => self.native::<u8>(local, received),
            DType::I8 => self.native::<i8>(local, received),
            DType::Bool => self.native::<Bool>(local, received),
            DType::F16 if self.op == ReduceOp::Avg => self.scaled_average(local, received),
            DType::F16 => self.through_f32::<f16>(local, received),
            DType::BF16 => self.through_f32::<bf16>(local, received),
        }
    }

    fn native<T: Number>(&self, local: &mut [u8], received: &[u8]) -> Result<()> {
        T::each(self.op, self.parts.divisor(), Onto(cast_mut(local)?, cast(received)?));
        Ok(())
    }

    fn through_f32<T: Half>(&self, local: &mut [u8], received: &[u8]) -> Result<()> {
        f32::each(self.op, self.parts.divisor(), Halves(cast_mut::<T>(local)?, cast(received)?));
        Ok(())
    }

    /// The partial sums of an average can overflow f16 while the average does not. So the sum of c ranks' parts is
    /// stored divided by the smallest power of two that is not below c. This is exact unless the quotient is tiny.
    fn scaled_average(&self, local: &mut [u8], received: &[u8]) -> Result<()> {
        let Parts { local: left, received: right, .. } = self.parts;
        let scale = |parts: u32| parts.next_power_of_two() as f32;
        let (left, right, both) = (scale(left), scale(right), scale(left + right));
        let halves = Halves(cast_mut::<f16>(local)?, cast(received)?);
        match self.parts.divisor() {
            Some(ranks) => halves.run(move |a, b| (a * left + b * right) / ranks as f32),
            None => halves.run(move |a, b| (a * left + b * right) * (1.0 / both)),
        }
        Ok(())
    }
}

/// Multiplies each element by `factor`: the first part of a `premul_sum`.
pub fn scale(dtype: DType, data: &mut [u8], factor: f64) -> Result<()> {
    fn native<T: Number>(data: &mut [u8], factor: f64) -> Result<()> {
        let data = cast_mut::<T>(data)?;
        vectorised(
            #[inline(always)]
            || data.iter_mut().for_each(|value| *value = value.scale(factor)),
        );
        Ok(())
    }
    fn through_f32<T: Half>(data: &mut [u8], factor: f64) -> Result<()> {
        let data = cast_mut::<T>(data)?;
        vectorised(
            #[inline(always)]
            || data.iter_mut().for_each(|value| *value = T::narrow(value.widen().scale(factor))),
        );
        Ok(())
    }
    ReduceOp::PreMulSum(factor).check(dtype)?;
    match dtype {
        DType::F32 => native::<f32>(data, factor),
        DType::F64 => native::<f64>(data, factor),
        DType::F16 => through_f32::<f16>(data, factor),
        DType::BF16 => through_f32::<bf16>(data, factor),
        // Refused above.
        DType::I32 | DType::I64 | DType::U8 | DType::I8 | DType::Bool => Ok(()),
    }
}

/// Half precision: the second is combined into the first, in f32, and rounded.
struct Halves<'a, T>(&'a mut [T], &'a [T]);

impl<T: Half> Loop<f32> for Halves<'_, T> {
    #[inline(always)]
    fn run(self, f: impl Fn(f32, f32) -> f32 + Copy) {
        vectorised(
            #[inline(always)]
            || {
                for (local, received) in self.0.iter_mut().zip(self.1) {
                    *local = T::narrow(f(local.widen(), received.widen()));
                }
            },
        );
    }
}

/// Runs a loop in the version for this processor. The closure must be marked to be inlined.
#[inline(always)]
fn vectorised(work: impl FnOnce()) {
    pulp::Arch::new().dispatch(work);
}

/// `bytes` as elements.
///
/// # Errors
/// Unless they are whole elements, aligned to their type.
pub fn cast<T: Pod>(bytes: &[u8]) -> Result<&[T]> {
    bytemuck::try_cast_slice(bytes).map_err(misaligned)
}

/// `bytes` as elements, for writing.
///
/// # Errors
/// As [`cast`].
pub fn cast_mut<T: Pod>(bytes: &mut [u8]) -> Result<&mut [T]> {
    bytemuck::try_cast_slice_mut(bytes).map_err(misaligned)
}

fn misaligned(error: bytemuck::PodCastError) -> Error {
    Error::invalid_argument(format!("memory does not hold whole, aligned elements: {error}"))
}

fn same_length(lengths: impl IntoIterator<Item = usize>) -> Result<()> {
    let mut lengths = lengths.into_iter();
    let Some(first) = lengths.next() else { return Ok(()) };
    match lengths.find(|length| *length != first) {
        Some(other) => Err(Error::invalid_argument(format!(
            "{first} bytes cannot be combined with {other}: they must be equally many"
        ))),
        None => Ok(()),
    }
}
