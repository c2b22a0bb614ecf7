//! Copies of some KiB into slots and windows, in vector instructions.
//!
//! From some 2 KiB on the C library copies with `rep movsb`, where the processor says that this is fast. On AMD's Zen 3
//! it is reported to be 20 times slower than vectors onto an unaligned destination
//! (<https://lunnova.dev/articles/ryzen-slow-short-rep-mov>).

#[cfg(target_arch = "x86_64")]
use std::sync::atomic::{Ordering, compiler_fence};

/// Shorter copies are the C library's, which takes vectors for them.
#[cfg(target_arch = "x86_64")]
const SHORT: usize = 512;
/// Longer ones are its too: more than this is not in the first-level cache.
#[cfg(target_arch = "x86_64")]
const LONG: usize = 16 << 10;

/// As `copy_from_slice`.
///
/// # Panics
/// If the lengths differ.
pub fn copy(from: &[u8], to: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if (SHORT..=LONG).contains(&from.len()) && is_x86_feature_detected!("avx") {
        // SAFETY: this processor has AVX.
        return unsafe { in_vectors(from, to) };
    }
    to.copy_from_slice(from);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
fn in_vectors(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len(), "the lengths differ");
    let (from, from_rest) = from.as_chunks::<128>();
    let (to, to_rest) = to.as_chunks_mut::<128>();
    for (from, to) in from.iter().zip(to) {
        *to = *from;
        // Without it the compiler makes one call to the C library of the loop.
        compiler_fence(Ordering::AcqRel);
    }
    to_rest.copy_from_slice(from_rest);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn copies_of_every_length_and_place_are_whole_and_write_nothing_else() {
        let source: Vec<u8> = (0..20_000u32).map(|index| ((index * 31) >> 3) as u8).collect();
        for length in [0, 1, 127, 128, 511, 512, 513, 639, 640, 4096, 16_383, 16_384, 16_385] {
            for (from, to) in [(0, 0), (1, 0), (0, 3), (16, 40), (63, 64)] {
                let mut target = vec![7; 20_000];
                copy(&source[from..from + length], &mut target[to..to + length]);
                assert_eq!(target[to..to + length], source[from..from + length]);
                assert!(target[..to].iter().chain(&target[to + length..]).all(|byte| *byte == 7));
            }
        }
    }

    #[test]
    #[should_panic]
    fn lengths_that_differ_are_refused() {
        copy(&[0; 1024], &mut [0; 1023]);
    }
}
