//! The arithmetic of each type.

use bytemuck::Pod;

use crate::collective::ReduceOp;
use crate::dtype::Bool;

/// A loop that takes its operation at compile time, so that it vectorises.
pub trait Loop<T> {
    fn run(self, f: impl Fn(T, T) -> T + Copy);
}

/// A type that is combined without conversion.
pub trait Number: Pod {
    /// Runs `work` with `op`. If this adds the last part of an average of `divide_by` ranks, the result is divided.
    fn each(op: ReduceOp, divide_by: Option<u32>, work: impl Loop<Self>);

    fn divide(self, ranks: u32) -> Self;
    fn scale(self, factor: f64) -> Self;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn each(op: ReduceOp, _: Option<u32>, work: impl Loop<Self>) {
                match op {
                    ReduceOp::Sum => work.run(Self::wrapping_add),
                    ReduceOp::Product => work.run(Self::wrapping_mul),
                    ReduceOp::Min => work.run(Ord::min),
                    ReduceOp::Max => work.run(Ord::max),
                    ReduceOp::BAnd => work.run(|a, b| a & b),
                    ReduceOp::BOr => work.run(|a, b| a | b),
                    ReduceOp::BXor => work.run(|a, b| a ^ b),
                    // Refused at the call.
                    ReduceOp::Avg | ReduceOp::PreMulSum(_) => {}
                }
            }

            fn divide(self, _: u32) -> Self {
                self
            }

            fn scale(self, _: f64) -> Self {
                self
            }
        }
    )*};
}
integers!(i64, i32, i8, u8);

impl Number for Bool {
    #[inline(always)]
    fn each(op: ReduceOp, _: Option<u32>, work: impl Loop<Self>) {
        // Not on the bytes: 1 and 2 are both true, but have no bit in common.
        match op {
            ReduceOp::Product | ReduceOp::Min | ReduceOp::BAnd => {
                work.run(|a, b| Self::from(a.get() & b.get()));
            }
            ReduceOp::BXor => work.run(|a, b| Self::from(a.get() ^ b.get())),
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::BOr => work.run(|a, b| Self::from(a.get() | b.get())),
            // Refused at the call.
            ReduceOp::Avg | ReduceOp::PreMulSum(_) => {}
        }
    }

    // Both are refused at the call.
    fn divide(self, _: u32) -> Self {
        self
    }

    fn scale(self, _: f64) -> Self {
        self
    }
}

macro_rules! floats {
    ($($type:ty),*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn each(op: ReduceOp, divide_by: Option<u32>, work: impl Loop<Self>) {
                const SIGN: u8 = (8 * size_of::<$type>() - 1) as u8;
                match (op, divide_by) {
                    // The same quotient, but much faster.
                    (ReduceOp::Avg, Some(by)) if by.is_power_of_two() => {
                        let part = 1.0 / by as Self;
                        work.run(move |a, b| (a + b) * part);
                    }
                    (ReduceOp::Avg, Some(by)) => {
                        let by = by as Self;
                        work.run(move |a, b| (a + b) / by);
                    }
                    (ReduceOp::Product, _) => work.run(|a, b| a * b),
                    // Neither is smaller nor larger. Then the bits differ only for zeros, whose sign "or" keeps, and
                    // for NaNs, which "or" keeps NaN. Both orders of the operands give the same bits.
                    (ReduceOp::Min, _) => work.run(|a, b| {
                        let even = Self::from_bits(a.to_bits() | b.to_bits());
                        if a < b { a } else if b < a { b } else { even }
                    }),
                    (ReduceOp::Max, _) => work.run(|a, b| {
                        let sign = 1 << SIGN;
                        let even = Self::from_bits(((a.to_bits() ^ sign) | (b.to_bits() ^ sign)) ^ sign);
                        if a > b { a } else if b > a { b } else { even }
                    }),
                    (ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_), _) => work.run(|a, b| a + b),
                    // Refused at the call.
                    (ReduceOp::BAnd | ReduceOp::BOr | ReduceOp::BXor, _) => {}
                }
            }

            #[inline(always)]
            fn divide(self, ranks: u32) -> Self {
                self / ranks as Self
            }

            #[inline(always)]
            fn scale(self, factor: f64) -> Self {
                self * factor as Self
            }
        }
    )*};
}
floats!(f32, f64);
