//! The arithmetic that each type brings.

use bytemuck::Pod;

use crate::collective::ReduceOp;
use crate::dtype::Bool;

/// A loop that waits for its operation, which is known when it is compiled, so that it vectorises.
pub(super) trait Loop<T> {
    fn run(self, f: impl Fn(T, T) -> T + Copy);
}

/// A type that is combined as it is.
pub(super) trait Number: Pod {
    /// Runs `work` with `op`, whose result is divided if it is the last part of an average of that many ranks.
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
                    // Refused at the call, as what follows.
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
        // Not on the bytes: of two that are true, 1 and 2, the bits have nothing in common.
        match op {
            ReduceOp::Product | ReduceOp::Min | ReduceOp::BAnd => {
                work.run(|a, b| Self::from(a.get() & b.get()));
            }
            ReduceOp::BXor => work.run(|a, b| Self::from(a.get() ^ b.get())),
            _ => work.run(|a, b| Self::from(a.get() | b.get())),
        }
    }

    // Refused at the call, both.
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
                    // The same quotient, and much faster.
                    (ReduceOp::Avg, Some(by)) if by.is_power_of_two() => {
                        let part = 1.0 / by as Self;
                        work.run(move |a, b| (a + b) * part);
                    }
                    (ReduceOp::Avg, Some(by)) => {
                        let by = by as Self;
                        work.run(move |a, b| (a + b) / by);
                    }
                    (ReduceOp::Product, _) => work.run(|a, b| a * b),
                    // Neither smaller nor larger: the bits differ in zeros, of which "or" keeps the sign, and in NaNs,
                    // of which it keeps that they are none. Both orders of the operands give the same bits.
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
