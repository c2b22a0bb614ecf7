//! Half precision: widened to f32, combined there, rounded.
//!
//! The conversions have no branches, so that they vectorise together with the arithmetic between them.

use bytemuck::Pod;
use half::{bf16, f16};

/// A type that is combined in f32.
pub trait Half: Pod {
    fn widen(self) -> f32;
    /// Rounds to the nearest value, ties to even.
    fn narrow(wide: f32) -> Self;
}

impl Half for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(wide: f32) -> Self {
        let bits = wide.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        // Rounding could turn a NaN into an infinity.
        let quiet = bits >> 16 | 0x40;
        Self::from_bits(if wide.is_nan() { quiet } else { rounded } as u16)
    }
}

/// The smallest normal f16, as the bits of an f32.
const LEAST_NORMAL: u32 = (127 - 14) << 23;
/// The bits of an f32 from which f16 is infinite, even without rounding.
const BEYOND: u32 = (127 + 16) << 23;
/// An f32 whose last place is the last place of f16's subnormal numbers.
const LAST_PLACE: u32 = (127 - 1) << 23;

// After F. Giesen, "half_to_float_fast" and "float_to_half_fast3_rtne" (public domain, 2012).
impl Half for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let sign = (bits & 0x8000) << 16;
        let magnitude = (bits & 0x7fff) << 13;
        let normal = magnitude + ((127 - 15) << 23);
        let endless = (magnitude + ((255 - 31) << 23)) | (u32::from(magnitude > 31 << 23) << 22);
        let tiny = f32::from_bits(magnitude + LEAST_NORMAL) - f32::from_bits(LEAST_NORMAL);
        let exponent = magnitude >> 23;
        let finite = if exponent == 0 { tiny.to_bits() } else { normal };
        f32::from_bits(sign | if exponent == 31 { endless } else { finite })
    }

    #[inline(always)]
    fn narrow(wide: f32) -> Self {
        let bits = wide.to_bits();
        let (sign, magnitude) = (bits >> 16 & 0x8000, bits & 0x7fff_ffff);
        let normal =
            magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0xfff + (magnitude >> 13 & 1)) >> 13;
        // The addition rounds at the place where f16 rounds.
        let tiny =
            (f32::from_bits(magnitude) + f32::from_bits(LAST_PLACE)).to_bits().wrapping_sub(LAST_PLACE);
        let finite = if magnitude < LEAST_NORMAL { tiny } else { normal };
        let bounded = if magnitude >= BEYOND { 0x7c00 } else { finite };
        let quiet = 0x7e00 | (magnitude >> 13 & 0x3ff);
        Self::from_bits((sign | if wide.is_nan() { quiet } else { bounded }) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread() -> impl Iterator<Item = f32> {
        let edges =
            [0.0, f32::INFINITY, f32::MAX, f32::MIN_POSITIVE, 65_504.0, 65_519.9, 65_520.0, 6e-8, 2e-8];
        let bits = (0..=u32::MAX).step_by(4_099).map(f32::from_bits);
        edges.into_iter().chain(edges.map(|edge: f32| -edge)).chain(bits)
    }

    #[test]
    fn rounding_is_that_of_the_types_themselves() {
        for value in spread() {
            assert_eq!(bf16::narrow(value).to_bits(), bf16::from_f32(value).to_bits(), "{value:e}");
            assert_eq!(f16::narrow(value).to_bits(), f16::from_f32(value).to_bits(), "{value:e}");
        }
    }

    #[test]
    fn every_number_of_sixteen_bits_is_widened_exactly() {
        for bits in 0..=u16::MAX {
            let (b, h) = (bf16::from_bits(bits), f16::from_bits(bits));
            assert_eq!(h.widen().to_bits(), h.to_f32().to_bits(), "{bits:#x}");
            // A signalling NaN stays signalling here.
            assert!(b.widen() == b.to_f32() || (b.widen().is_nan() && b.is_nan()), "{bits:#x}");
        }
    }
}
