//! The arithmetic that each type brings.

use bytemuck::Pod;

use crate::collective::ReduceOp;
use crate::dtype::Bool;
use crate::rank::MAX_WORLD_SIZE;

/// A loop that waits for its operation, which is known when it is compiled, so that it vectorises.
pub(super) trait Loop<T> {
    fn run(self, f: impl Fn(T, T) -> T + Copy);
}

/// A type that is combined as it is.
pub(super) trait Number: Pod {
    /// Runs `work` with `op`, whose result is divided if it is the last part of an average of that many ranks.
    fn each(op: ReduceOp, divide_by: Option<u32>, work: impl Loop<Self>);

    fn divide(self, by: Divisor) -> Self;
    fn scale(self, factor: f64) -> Self;
}

/// A number of ranks to divide by. No processor divides integers by vectors, so that quotients are products, shifted
/// (T. Granlund and P. Montgomery, "Division by invariant integers using multiplication", 1994): exact, because the
/// reciprocal's error, times the largest magnitude, stays below a unit of what is shifted out.
#[derive(Clone, Copy)]
pub(super) struct Divisor {
    ranks: u32,
    /// For magnitudes up to 255: 2^24 / ranks, rounded up.
    byte: u32,
    /// For magnitudes up to 2^31: 2^shift / ranks, rounded up.
    word: u64,
    shift: u32,
}

impl Divisor {
    pub(super) fn new(ranks: u32) -> Self {
        // No more than a world holds: the error above is below 1, and 255 below 2^24 / ranks.
        let ranks = ranks.clamp(1, MAX_WORLD_SIZE);
        let shift = 32 + ranks.ilog2();
        Self { ranks, byte: (1 << 24) / ranks + 1, word: (1 << shift) / u64::from(ranks) + 1, shift }
    }

    #[inline(always)]
    fn of_byte(self, magnitude: u8) -> u32 {
        (u32::from(magnitude) * self.byte) >> 24
    }

    #[inline(always)]
    fn of_word(self, magnitude: u32) -> u32 {
        ((u64::from(magnitude) * self.word) >> self.shift) as u32
    }
}

macro_rules! integers {
    ($($type:ty: |$value:ident, $by:ident| $quotient:expr),*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn each(op: ReduceOp, divide_by: Option<u32>, work: impl Loop<Self>) {
                match (op, divide_by) {
                    (ReduceOp::Avg, Some(by)) => {
                        let by = Divisor::new(by);
                        work.run(
                            #[inline(always)]
                            move |a: Self, b: Self| a.wrapping_add(b).divide(by),
                        );
                    }
                    (ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_), _) => work.run(Self::wrapping_add),
                    (ReduceOp::Product, _) => work.run(Self::wrapping_mul),
                    (ReduceOp::Min, _) => work.run(Ord::min),
                    (ReduceOp::Max, _) => work.run(Ord::max),
                    (ReduceOp::BAnd, _) => work.run(|a, b| a & b),
                    (ReduceOp::BOr, _) => work.run(|a, b| a | b),
                    (ReduceOp::BXor, _) => work.run(|a, b| a ^ b),
                }
            }

            #[inline(always)]
            fn divide(self, by: Divisor) -> Self {
                let ($value, $by) = (self, by);
                $quotient
            }

            // Refused at the call.
            fn scale(self, _: f64) -> Self {
                self
            }
        }
    )*};
}
// Towards zero.
integers!(
    i64: |value, by| value / i64::from(by.ranks),
    i32: |value, by| {
        let quotient = by.of_word(value.unsigned_abs()) as Self;
        if value < 0 { quotient.wrapping_neg() } else { quotient }
    },
    i8: |value, by| {
        let quotient = by.of_byte(value.unsigned_abs()) as Self;
        if value < 0 { quotient.wrapping_neg() } else { quotient }
    },
    u8: |value, by| by.of_byte(value) as Self
);

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
    fn divide(self, _: Divisor) -> Self {
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
            fn divide(self, by: Divisor) -> Self {
                self / by.ranks as Self
            }

            #[inline(always)]
            fn scale(self, factor: f64) -> Self {
                self * factor as Self
            }
        }
    )*};
}
floats!(f32, f64);
