//! GELU by the error function, and its gradient, on slices: `x · Φ(x)` with the distribution function Φ of the normal distribution.
//!
//! Burn calls libm's `erff`, and `expf` in backward, for one value at a time. These loops become vectors. The error function is formula 7.1.26 of
//! M. Abramowitz and I. A. Stegun, *Handbook of Mathematical Functions*, 1964, whose error is at most 1.5e-7. It needs e^(-x²/2), which the
//! gradient needs as well.

use std::iter::zip;
use std::mem::MaybeUninit;

use pulp::Arch;
use rayon::prelude::*;

/// Values that a thread computes at a time.
const CHUNK: usize = 1 << 14;

/// Writes `x · Φ(x)`, which is every value of `y`.
pub fn forward(x: &[f32], y: &mut [MaybeUninit<f32>]) {
    assert_eq!(x.len(), y.len(), "tensors that do not fit");
    let compute = |x: &[f32], y: &mut [MaybeUninit<f32>]| {
        Arch::new().dispatch(
            #[inline(always)]
            || {
                for (y, x) in zip(y, x) {
                    y.write(x * normal(*x).0);
                }
            },
        );
    };
    if rayon::current_num_threads() == 1 {
        return compute(x, y);
    }
    y.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK)).for_each(|(y, x)| compute(x, y));
}

/// Writes every value of `dx`: `dy · (Φ(x) + x · φ(x))`, with the density φ of the normal distribution.
pub fn backward(x: &[f32], dy: &[f32], dx: &mut [MaybeUninit<f32>]) {
    assert_eq!([dy.len(), dx.len()], [x.len(); 2], "tensors that do not fit");
    let compute = |x: &[f32], dy: &[f32], dx: &mut [MaybeUninit<f32>]| {
        Arch::new().dispatch(
            #[inline(always)]
            || {
                for (dx, (x, dy)) in zip(dx, zip(x, dy)) {
                    let (distribution, density) = normal(*x);
                    dx.write(dy * (distribution + x * density));
                }
            },
        );
    };
    if rayon::current_num_threads() == 1 {
        return compute(x, dy, dx);
    }
    let inputs = x.par_chunks(CHUNK).zip(dy.par_chunks(CHUNK));
    dx.par_chunks_mut(CHUNK).zip(inputs).for_each(|(dx, (x, dy))| compute(x, dy, dx));
}

/// Φ(x) and φ(x).
#[inline(always)]
fn normal(x: f32) -> (f32, f32) {
    const COEFFICIENTS: [f32; 5] = [1.061_405_4, -1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6];
    /// 1 / √(2π).
    const HEIGHT: f32 = 0.398_942_3;
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let bell = exp_of_minus(z * z);
    let t = 1.0 / (1.0 + 0.327_591_1 * z);
    let polynomial = COEFFICIENTS.iter().fold(0.0, |sum, coefficient| sum * t + coefficient) * t;
    // erf(z) = 1 - tail, for z of at least 0.
    let tail = 0.5 * polynomial * bell;
    (if x < 0.0 { tail } else { 1.0 - tail }, HEIGHT * bell)
}

/// e^-y for y of at least 0: 2^-n · e^-r, with r at most half of ln 2, whose Taylor series ends after the sixth power. NaN for NaN.
#[inline(always)]
fn exp_of_minus(y: f32) -> f32 {
    /// Added to a number below 2^22, it leaves the nearest whole number in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 in two parts: products of the first with whole numbers up to 128 are exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    const TERMS: [f32; 7] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    // Beyond it the result would be denormal: it is 0.
    let is_far = y > 87.0;
    let x = if is_far { 0.0 } else { -y };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let whole = shifted - ROUND;
    let rest = x - whole * LN_2[0] - whole * LN_2[1];
    let series = TERMS.iter().fold(0.0, |sum, term| sum * rest + term);
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    if is_far { 0.0 } else { series * f32::from_bits(exponent) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::as_uninit;

    /// By the trapezoid rule in f64, from far below.
    fn distribution(x: f32) -> f64 {
        const STEPS: usize = 20_000;
        let (from, to) = (-12.0, f64::from(x));
        let density = |at: f64| (-at * at / 2.0).exp() / std::f64::consts::TAU.sqrt();
        let width = (to - from) / STEPS as f64;
        (0..STEPS)
            .map(|step| from + width * step as f64)
            .map(|at| (density(at) + density(at + width)) / 2.0 * width)
            .sum()
    }

    #[test]
    fn the_normal_distribution_is_right_to_the_seventh_place() {
        for step in -120..=120 {
            let x = step as f32 / 12.0;
            let (found, density) = normal(x);
            assert!((f64::from(found) - distribution(x)).abs() < 3e-7, "{x}: {found}");
            let exact = (-f64::from(x) * f64::from(x) / 2.0).exp() / std::f64::consts::TAU.sqrt();
            assert!((f64::from(density) - exact).abs() < 1e-7, "{x}: {density}");
        }
    }

    #[test]
    fn what_is_far_out_or_no_number_stays_so() {
        // Minus infinity times 0 is no number, and so is the slope there: Burn's formula has that, too.
        let x = [f32::INFINITY, 1e30, -1e30, 0.0, f32::NAN];
        let mut y = [0.0; 5];
        // SAFETY: it writes values.
        forward(&x, unsafe { as_uninit(&mut y) });
        assert_eq!(y[..4], [f32::INFINITY, 1e30, 0.0, 0.0]);
        assert!(y[4].is_nan());
        let mut dx = [0.0; 5];
        // SAFETY: it writes values.
        backward(&x, &[1.0; 5], unsafe { as_uninit(&mut dx) });
        assert_eq!(dx[1..4], [1.0, 0.0, 0.5]);
        assert!(dx[4].is_nan());
    }
}
