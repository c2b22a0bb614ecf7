//! The inputs of a call that is checked, and its expected results.
//!
//! Elements differ by call, rank and index without a pattern, so that one that is missing, stale or in another's place
//! is found. They are integers, small enough that each type holds every combination of them exactly, whatever the order.

use phalanx::{Bool, DType, Element, ReduceOp};

/// A type of elements that can be checked.
pub(crate) trait Value: Element + PartialEq {
    /// The type of as many bytes that devices have.
    type OnDevice: phalanx_nccl::Element;

    /// The element next to `numerator / divisor`; of integers, the one next to it towards zero.
    fn quotient(numerator: i64, divisor: i64) -> Self;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Value for $type {
            type OnDevice = Self;

            fn quotient(numerator: i64, divisor: i64) -> Self {
                // Wraps, as reductions do.
                (numerator / divisor) as Self
            }
        }
    )*};
}
integers!(i32, i64, u8, i8);

macro_rules! floats {
    ($($type:ty: $from:path),*) => {$(
        impl Value for $type {
            type OnDevice = Self;

            fn quotient(numerator: i64, divisor: i64) -> Self {
                $from(numerator as f64 / divisor as f64)
            }
        }
    )*};
}
floats!(f32: narrow, f64: f64::from, half::f16: half::f16::from_f64, half::bf16: half::bf16::from_f64);

impl Value for Bool {
    type OnDevice = u8;

    fn quotient(numerator: i64, _: i64) -> Self {
        Self::from(numerator != 0)
    }
}

fn narrow(value: f64) -> f32 {
    value as f32
}

/// The sum of all ranks' elements is at most this: f16, bf16 and bytes hold all such integers. Of more ranks, the others
/// bring zeros.
const SUM: u64 = 128;
/// Only so many ranks bring factors other than 1: f16 holds the product.
const FACTORS: u32 = 14;

/// The factor of each rank: of all but 1 the one that leaves every sum exact.
pub(crate) const FACTOR: f64 = 0.5;

/// The elements of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Values {
    op: ReduceOp,
    world: u32,
    call: u64,
}

impl Values {
    pub(crate) fn new(op: ReduceOp, world: u32, call: u64) -> Self {
        Self { op, world, call }
    }

    /// What `rank` brings from its element `start` on.
    pub(crate) fn fill<T: Value>(&self, elements: &mut [T], rank: u32, start: usize) {
        for (index, element) in elements.iter_mut().enumerate() {
            *element = T::quotient(self.part::<T>(rank, start + index), 1);
        }
    }

    /// How many of `elements` are not what `rank` has brought from its element `start` on.
    pub(crate) fn not_copied<T: Value>(&self, elements: &[T], rank: u32, start: usize) -> u64 {
        count(elements, |index| T::quotient(self.part::<T>(rank, start + index), 1))
    }

    /// How many of `elements` are not what becomes of all ranks' elements from `start` on.
    pub(crate) fn not_combined<T: Value>(&self, elements: &[T], start: usize) -> u64 {
        let divisor = match self.op {
            ReduceOp::Avg => i64::from(self.world),
            ReduceOp::PreMulSum(_) => 2,
            ReduceOp::Sum | ReduceOp::Product | ReduceOp::Min | ReduceOp::Max => 1,
            ReduceOp::BAnd | ReduceOp::BOr | ReduceOp::BXor => 1,
        };
        count(elements, |index| T::quotient(self.combined::<T>(start + index), divisor))
    }

    fn part<T: Element>(&self, rank: u32, index: usize) -> i64 {
        let noise = noise(self.call, rank, index);
        let below = match self.op {
            _ if T::DTYPE == DType::Bool => 2,
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) if u64::from(rank) < SUM => {
                (SUM / u64::from(self.world)).max(2)
            }
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) => 1,
            ReduceOp::Product if rank < FACTORS => return 1 + (noise % 2) as i64,
            ReduceOp::Product => return 1,
            ReduceOp::Min | ReduceOp::Max => SUM,
            // All bits that there are.
            ReduceOp::BAnd | ReduceOp::BOr | ReduceOp::BXor => return noise as i64,
        };
        (noise % below) as i64
    }

    fn combined<T: Element>(&self, index: usize) -> i64 {
        let parts = (0..self.world).map(|rank| self.part::<T>(rank, index));
        match self.op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) => parts.sum(),
            ReduceOp::Product => parts.product(),
            ReduceOp::Min => parts.min().unwrap_or_default(),
            ReduceOp::Max => parts.max().unwrap_or_default(),
            ReduceOp::BAnd => parts.fold(-1, |all, part| all & part),
            ReduceOp::BOr => parts.fold(0, |any, part| any | part),
            ReduceOp::BXor => parts.fold(0, |odd, part| odd ^ part),
        }
    }
}

fn count<T: PartialEq>(elements: &[T], expected: impl Fn(usize) -> T) -> u64 {
    elements.iter().enumerate().filter(|(index, element)| **element != expected(*index)).count() as u64
}

fn noise(call: u64, rank: u32, index: usize) -> u64 {
    let bits = (index as u64)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add((u64::from(rank) + 1) << 32)
        .wrapping_add(call.wrapping_mul(0xd1b5_4a32_d192_ed03));
    mix(bits) >> 32
}

/// Bits that look random: the finalizer of SplitMix64 (Steele, Lea, Flood: *Fast splittable pseudorandom number
/// generators*. OOPSLA 2014).
pub(crate) fn mix(bits: u64) -> u64 {
    let bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    /// Combines in ascending and descending order, in the type itself: exact, if both come to what is expected.
    fn is_exact<T: Value>(op: ReduceOp, world: u32, combine: impl Fn(T, T) -> T) {
        let values = Values::new(op, world, 7);
        let mut parts = vec![vec![T::quotient(0, 1); 500]; world as usize];
        for (rank, part) in (0..world).zip(&mut parts) {
            values.fill(part, rank, 3);
        }
        for order in [(0..world as usize).collect::<Vec<_>>(), (0..world as usize).rev().collect()] {
            let mut sum = parts[order[0]].clone();
            for rank in &order[1..] {
                sum.iter_mut().zip(&parts[*rank]).for_each(|(sum, part)| *sum = combine(*sum, *part));
            }
            assert_eq!(values.not_combined(&sum, 3), 0, "{op} of {world} x {}", T::DTYPE);
        }
    }

    #[test]
    fn every_type_holds_the_combinations_exactly() {
        for world in [1, 2, 3, 8, 17, 60] {
            is_exact::<bf16>(ReduceOp::Sum, world, |a, b| a + b);
            is_exact::<f16>(ReduceOp::Sum, world, |a, b| a + b);
            is_exact::<u8>(ReduceOp::Sum, world, |a, b| a.checked_add(b).unwrap());
            is_exact::<f16>(ReduceOp::Product, world, |a, b| a * b);
            is_exact::<u8>(ReduceOp::Product, world, u8::wrapping_mul);
            is_exact::<f32>(ReduceOp::Max, world, f32::max);
            is_exact::<i8>(ReduceOp::BXor, world, |a, b| a ^ b);
            is_exact::<Bool>(ReduceOp::Sum, world, |a, b| (a.get() || b.get()).into());
            is_exact::<Bool>(ReduceOp::Product, world, |a, b| (a.get() && b.get()).into());
        }
    }

    #[test]
    fn elements_in_the_place_of_others_are_found() {
        let values = Values::new(ReduceOp::Sum, 2, 0);
        let mut mine = [0f32; 1000];
        values.fill(&mut mine, 0, 0);
        assert_eq!(values.not_copied(&mine, 0, 0), 0);
        assert!(values.not_copied(&mine, 1, 0) > 900, "another rank's");
        assert!(values.not_copied(&mine, 0, 1) > 900, "one place further");
        assert!(Values::new(ReduceOp::Sum, 2, 1).not_copied(&mine, 0, 0) > 900, "of the call before");
        assert!(values.not_combined(&mine, 0) > 900, "without the other rank's part");
    }
}
