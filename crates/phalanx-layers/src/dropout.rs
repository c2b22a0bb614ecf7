//! Dropout, on slices.
//!
//! Burn draws each number from its one generator, which is made for secrets, and keeps all of them for backward. Here the generator gives a seed,
//! from which chunks of the tensor have quick generators of their own, and backward draws the same numbers again.

use std::iter::zip;
use std::mem::MaybeUninit;

use pulp::Arch;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rayon::prelude::*;

/// Values with a generator of their own. It does not depend on the number of threads.
const CHUNK: usize = 1 << 14;
/// Numbers that are drawn before they are used.
const BLOCK: usize = 256;

/// Which values are kept.
#[derive(Clone, Copy, Debug)]
pub struct Mask {
    /// What the numbers are drawn from.
    pub seed: u64,
    /// The probability that a value is kept, above 0 and at most 1.
    pub keep: f64,
}

impl Mask {
    /// Writes every value of `y`: those of `x` that are kept, divided by the probability, and zero times the others. Backward does the same
    /// to the gradient.
    pub fn apply(&self, x: &[f32], y: &mut [MaybeUninit<f32>]) {
        assert_eq!(x.len(), y.len(), "tensors that do not fit");
        let chunks = y.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK)).enumerate();
        let compute = |(number, (y, x)): (usize, (&mut [MaybeUninit<f32>], &[f32]))| {
            self.apply_to_chunk(number as u64, x, y);
        };
        if rayon::current_num_threads() == 1 {
            return y.chunks_mut(CHUNK).zip(x.chunks(CHUNK)).enumerate().for_each(compute);
        }
        chunks.for_each(compute);
    }

    fn apply_to_chunk(&self, number: u64, x: &[f32], y: &mut [MaybeUninit<f32>]) {
        let scale = (1.0 / self.keep) as f32;
        // So many of the 2^32 numbers keep a value; one at least.
        let last = (self.keep * 2f64.powi(32) - 1.0).round() as u32;
        let mut generator = SmallRng::seed_from_u64(self.seed ^ mixed(number));
        let mut random = [0; BLOCK];
        for (x, y) in zip(x.chunks(BLOCK), y.chunks_mut(BLOCK)) {
            for pair in random.as_chunks_mut::<2>().0 {
                let both = generator.next_u64();
                *pair = [both as u32, (both >> 32) as u32];
            }
            Arch::new().dispatch(
                #[inline(always)]
                || {
                    for (y, (x, random)) in zip(y, zip(x, &random)) {
                        y.write(x * if *random <= last { scale } else { 0.0 });
                    }
                },
            );
        }
    }
}

/// A number for each chunk whose bits have nothing to do with those of its neighbours': the last step of Austin Appleby's MurmurHash3. A generator
/// makes its state from the seed by steps of one length, so seeds that lie a step apart would share most of it.
fn mixed(number: u64) -> u64 {
    let folded = |bits: u64| bits ^ bits >> 33;
    let first = folded(number).wrapping_mul(0xff51_afd7_ed55_8ccd);
    folded(folded(first).wrapping_mul(0xc4ce_b9fe_1a85_ec53))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::as_uninit;

    fn applied(mask: Mask, x: &[f32]) -> Vec<f32> {
        let mut y = vec![0.0; x.len()];
        // SAFETY: it writes values.
        mask.apply(x, unsafe { as_uninit(&mut y) });
        y
    }

    #[test]
    fn as_many_are_kept_as_the_probability_says() {
        let ones = vec![1.0; 1_000_003];
        for keep in [0.1, 0.5, 0.9, 0.999] {
            let y = applied(Mask { seed: 7, keep }, &ones);
            let scale = (1.0 / keep) as f32;
            assert!(y.iter().all(|value| *value == 0.0 || *value == scale));
            let kept = y.iter().filter(|value| **value > 0.0).count() as f64;
            let (expected, deviation) = (1e6 * keep, (1e6 * keep * (1.0 - keep)).sqrt());
            assert!((kept - expected).abs() < 5.0 * deviation + 3.0, "{keep}: {kept}");
        }
        assert_eq!(applied(Mask { seed: 7, keep: 1.0 }, &ones), ones);
    }

    #[test]
    fn chunks_neighbours_and_seeds_know_nothing_of_each_other() {
        let ones = vec![1.0; 2 * CHUNK];
        let mask = |seed| applied(Mask { seed, keep: 0.5 }, &ones);
        // Of independent ones half agree.
        let agree = |one: &[f32], other: &[f32]| {
            let equal = zip(one, other).filter(|(one, other)| one == other).count() as f64;
            let share = equal / one.len() as f64;
            assert!((share - 0.5).abs() < 0.02, "{share}");
        };
        let first = mask(1);
        agree(&first[..CHUNK], &first[CHUNK..]);
        agree(&first[1..], &first[..first.len() - 1]);
        // The last is the length of the generator's own steps.
        for seed in [2, u64::MAX, 0x9e37_79b9_7f4a_7c16] {
            let other = mask(seed);
            agree(&first, &other);
            agree(&first[CHUNK..], &other[..CHUNK]);
            agree(&first[..CHUNK], &other[CHUNK..]);
        }
        assert_eq!(first, mask(1));
    }

    #[test]
    fn any_number_of_threads_keeps_the_same() {
        let x: Vec<f32> = (0..3 * CHUNK + 5).map(|i| i as f32).collect();
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| applied(Mask { seed: 5, keep: 0.7 }, &x))
        };
        assert_eq!(with(1), with(3));
    }

    #[test]
    fn what_is_no_number_stays_so() {
        let x = [f32::NAN; 100];
        assert!(applied(Mask { seed: 3, keep: 0.5 }, &x).iter().all(|value| value.is_nan()));
    }
}
