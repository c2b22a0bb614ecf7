//! The arithmetic of reductions, on the memory of buffers.

use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::{Combine, ReduceOp};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// What to do with received elements, for one type and operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel {
    pub dtype: DType,
    pub op: ReduceOp,
    pub combine: Combine,
    /// With these elements the combination is complete: an average of this many ranks is divided.
    pub completes: Option<u32>,
}

impl Kernel {
    /// Combines `received` into `local`: equally long, whole elements, aligned for the type.
    pub(crate) fn apply(&self, local: &mut [u8], received: &[u8]) -> Result<()> {
        self.combine(local, received)?;
        match self.completes {
            Some(world) if self.op == ReduceOp::Avg => divide(self.dtype, local, world),
            _ => Ok(()),
        }
    }

    fn combine(&self, local: &mut [u8], received: &[u8]) -> Result<()> {
        match self.dtype {
            DType::F32 => self.native::<f32>(local, received),
            DType::F64 => self.native::<f64>(local, received),
            DType::I32 => self.native::<i32>(local, received),
            DType::I64 => self.native::<i64>(local, received),
            DType::U8 => self.native::<u8>(local, received),
            DType::F16 => self.through_f32::<f16>(local, received),
            DType::BF16 => self.through_f32::<bf16>(local, received),
        }
    }

    fn native<T: Number>(&self, local: &mut [u8], received: &[u8]) -> Result<()> {
        self.slices(cast_mut::<T>(local)?, cast::<T>(received)?);
        Ok(())
    }

    fn slices<T: Number>(&self, local: &mut [T], received: &[T]) {
        match self.combine {
            Combine::Replace => local.copy_from_slice(received),
            Combine::Append => self.each(local, received, |local, received, op| op(local, received)),
            Combine::Prepend => self.each(local, received, |local, received, op| op(received, local)),
        }
    }

    #[inline(always)]
    fn each<T: Number>(
        &self,
        local: &mut [T],
        received: &[T],
        order: impl Fn(T, T, fn(T, T) -> T) -> T + Copy,
    ) {
        // One loop for each operation, with the operation known at compile time, so that it vectorises.
        #[inline(always)]
        fn run<T: Copy>(local: &mut [T], received: &[T], f: impl Fn(T, T) -> T) {
            for (local, received) in local.iter_mut().zip(received) {
                *local = f(*local, *received);
            }
        }
        match self.op {
            ReduceOp::Sum | ReduceOp::Avg => run(local, received, |a, b| order(a, b, T::add)),
            ReduceOp::Product => run(local, received, |a, b| order(a, b, T::mul)),
            ReduceOp::Min => run(local, received, |a, b| order(a, b, T::min)),
            ReduceOp::Max => run(local, received, |a, b| order(a, b, T::max)),
        }
    }

    /// Half precision: widened block by block, combined in f32, rounded once.
    fn through_f32<T>(&self, local: &mut [u8], received: &[u8]) -> Result<()>
    where
        T: Pod,
        [T]: HalfFloatSliceExt,
    {
        const BLOCK: usize = 512;
        let (mut left, mut right) = ([0.0; BLOCK], [0.0; BLOCK]);
        let (local, received) = (cast_mut::<T>(local)?, cast::<T>(received)?);
        for (local, received) in local.chunks_mut(BLOCK).zip(received.chunks(BLOCK)) {
            let (left, right) = (&mut left[..local.len()], &mut right[..local.len()]);
            local.convert_to_f32_slice(left);
            received.convert_to_f32_slice(right);
            self.slices(left, right);
            local.convert_from_f32_slice(left);
        }
        Ok(())
    }
}

/// Divides a finished sum by the number of ranks.
fn divide(dtype: DType, data: &mut [u8], world: u32) -> Result<()> {
    match dtype {
        DType::F32 => {
            let scale = world as f32;
            cast_mut::<f32>(data)?.iter_mut().for_each(|value| *value /= scale);
        }
        DType::F64 => cast_mut::<f64>(data)?.iter_mut().for_each(|value| *value /= f64::from(world)),
        DType::I32 => cast_mut::<i32>(data)?
            .iter_mut()
            .for_each(|value| *value = (i64::from(*value) / i64::from(world)) as i32),
        DType::I64 => cast_mut::<i64>(data)?.iter_mut().for_each(|value| *value /= i64::from(world)),
        DType::U8 => {
            cast_mut::<u8>(data)?.iter_mut().for_each(|value| *value = (u32::from(*value) / world) as u8);
        }
        DType::F16 => cast_mut::<f16>(data)?
            .iter_mut()
            .for_each(|value| *value = f16::from_f32(value.to_f32() / world as f32)),
        DType::BF16 => cast_mut::<bf16>(data)?
            .iter_mut()
            .for_each(|value| *value = bf16::from_f32(value.to_f32() / world as f32)),
    }
    Ok(())
}

fn cast<T: Pod>(bytes: &[u8]) -> Result<&[T]> {
    bytemuck::try_cast_slice(bytes).map_err(misaligned)
}

fn cast_mut<T: Pod>(bytes: &mut [u8]) -> Result<&mut [T]> {
    bytemuck::try_cast_slice_mut(bytes).map_err(misaligned)
}

fn misaligned(error: bytemuck::PodCastError) -> Error {
    Error::invalid_argument(format!("memory does not hold whole, aligned elements: {error}"))
}

/// The arithmetic that a native type brings.
trait Number: Pod {
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn add(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn mul(self, other: Self) -> Self { self.wrapping_mul(other) }
            #[inline(always)]
            fn min(self, other: Self) -> Self { Ord::min(self, other) }
            #[inline(always)]
            fn max(self, other: Self) -> Self { Ord::max(self, other) }
        }
    )*};
}
integers!(i32, i64, u8);

macro_rules! floats {
    ($($type:ty),*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn add(self, other: Self) -> Self { self + other }
            #[inline(always)]
            fn mul(self, other: Self) -> Self { self * other }
            // `f32::min` drops NaN; a diverged rank must stay visible.
            #[inline(always)]
            fn min(self, other: Self) -> Self { if self.is_nan() || self < other { self } else { other } }
            #[inline(always)]
            fn max(self, other: Self) -> Self { if self.is_nan() || self > other { self } else { other } }
        }
    )*};
}
floats!(f32, f64);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Buffer;
    use crate::dtype::Element;

    fn combine<T: Element>(op: ReduceOp, combine: Combine, local: &[T], received: &[T]) -> Vec<T> {
        let (mut left, right) = (Buffer::from_slice(local), Buffer::from_slice(received));
        Kernel { dtype: T::DTYPE, op, combine, completes: None }
            .apply(left.as_bytes_mut(), right.as_bytes())
            .unwrap();
        left.as_slice::<T>().unwrap().to_vec()
    }

    #[test]
    fn every_operation_on_integers_wraps() {
        let (a, b) = ([i32::MAX, -3, 5], [1, 4, 5]);
        assert_eq!(combine(ReduceOp::Sum, Combine::Append, &a, &b), [i32::MIN, 1, 10]);
        assert_eq!(combine(ReduceOp::Product, Combine::Append, &a, &b), [i32::MAX, -12, 25]);
        assert_eq!(combine(ReduceOp::Min, Combine::Append, &a, &b), [1, -3, 5]);
        assert_eq!(combine(ReduceOp::Max, Combine::Prepend, &a, &b), [i32::MAX, 4, 5]);
        assert_eq!(combine(ReduceOp::Max, Combine::Replace, &a, &b), b);
        assert_eq!(combine(ReduceOp::Sum, Combine::Append, &[200u8], &[100u8]), [44]);
    }

    #[test]
    fn a_nan_survives_min_and_max_on_either_side() {
        for op in [ReduceOp::Min, ReduceOp::Max] {
            for order in [Combine::Append, Combine::Prepend] {
                let mixed = combine(op, order, &[f64::NAN, 1.0], &[1.0, f64::NAN]);
                assert!(mixed.iter().all(|value| value.is_nan()), "{op} {order:?} {mixed:?}");
            }
        }
    }

    #[test]
    fn both_orders_of_operands_give_the_bits_of_the_same_expression() {
        // Which of two NaNs survives shows the order of the operands.
        let (one, two) = (f32::from_bits(0x7fc0_0001), f32::from_bits(0x7fc0_0002));
        let append = combine(ReduceOp::Min, Combine::Append, &[one], &[two])[0].to_bits();
        let prepend = combine(ReduceOp::Min, Combine::Prepend, &[two], &[one])[0].to_bits();
        assert_eq!(append, prepend);
    }

    #[test]
    fn half_precision_is_combined_in_f32() {
        let ones: Vec<f16> = (0..1300).map(|i| f16::from_f32(i as f32 / 8.0)).collect();
        let sums = combine(ReduceOp::Sum, Combine::Append, &ones, &ones);
        assert!(sums.iter().zip(&ones).all(|(sum, one)| sum.to_f32() == 2.0 * one.to_f32()));
        let b = |x: f32| bf16::from_f32(x);
        assert_eq!(combine(ReduceOp::Product, Combine::Append, &[b(1.5)], &[b(1.5)]), [b(2.25)]);
    }

    #[test]
    fn averages_divide_towards_zero() {
        let mut buffer = Buffer::from_slice(&[-7i32, 7, 8]);
        divide(DType::I32, buffer.as_bytes_mut(), 2).unwrap();
        assert_eq!(buffer.as_slice::<i32>().unwrap(), [-3, 3, 4]);
    }

    #[test]
    fn torn_elements_are_refused() {
        let kernel =
            Kernel { dtype: DType::F32, op: ReduceOp::Sum, combine: Combine::Append, completes: None };
        assert!(kernel.apply(&mut [0; 3], &[0; 3]).is_err());
    }
}
