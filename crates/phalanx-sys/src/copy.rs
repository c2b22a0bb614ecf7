//! Copies of some KiB into and out of shared memory, in vector instructions on AMD's processors.
//!
//! From some 2 KiB on the C library copies with `rep movsb`, where the processor says that this is fast. On AMD's Zen 3
//! it is reported to be 20 times slower than vectors onto an unaligned destination
//! (<https://lunnova.dev/articles/ryzen-slow-short-rep-mov>). On Intel's, vectors are slower: an
//! all_to_all of 8 KiB between two ranks took 1.38 us with them, and 1.10 without.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__cpuid, __m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
#[cfg(target_arch = "x86_64")]
use std::sync::LazyLock;
#[cfg(target_arch = "x86_64")]
use std::sync::atomic::{Ordering, compiler_fence};

use crate::processors::rereads_slowly;

/// A cache line.
const LINE: usize = 64;

/// Shorter copies are the C library's, which takes vectors for them.
#[cfg(target_arch = "x86_64")]
const SHORT: usize = 512;
/// Longer ones are its too: more than this is not in the first-level cache.
#[cfg(target_arch = "x86_64")]
const LONG: usize = 16 << 10;

/// Data of so many bytes and more is written around the caches, which it does not fit into: otherwise each line of its destination is read from memory
/// before it is written. The C library does the same if it copies all at once; here it only sees pieces. On an EPYC with 32 MiB of cache a broadcast
/// of 64 MiB took 5.0 ms so and 6.1 without, an all_to_all 9.9 and 10.4; a broadcast of 16 MiB took longer. Pieces of 8 KiB should not go this way, since
/// each ends with a fence.
const AROUND: usize = 32 << 20;

/// As `copy_from_slice`.
///
/// # Panics
/// If the lengths differ.
pub fn copy(from: &[u8], to: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if (SHORT..=LONG).contains(&from.len()) && copies_in_vectors() {
        // SAFETY: this processor has AVX.
        return unsafe { in_vectors(from, to) };
    }
    to.copy_from_slice(from);
}

/// As [`copy`], and then [`take_lines`] of `from`, whose content is lost.
pub fn take(from: &mut [u8], to: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if takes_lines() && copies_in_vectors() {
        // SAFETY: this processor has AVX.
        return unsafe { take_in_vectors(from, to) };
    }
    copy(from, to);
    take_lines(from);
}

/// As [`take`], of a piece of data of `whole` bytes, which goes around the caches if they are many.
pub fn take_part(from: &mut [u8], to: &mut [u8], whole: usize) {
    if goes_around(whole) {
        around(from, to);
        take_lines(from);
    } else {
        take(from, to);
    }
}

/// As `copy_from_slice`, of a piece of data of `whole` bytes, which goes around the caches if they are many.
pub fn copy_part(from: &[u8], to: &mut [u8], whole: usize) {
    if goes_around(whole) {
        around(from, to);
    } else {
        copy(from, to);
    }
}

/// Models and Miri know no such writes.
fn goes_around(whole: usize) -> bool {
    cfg!(all(target_arch = "x86_64", not(any(loom, miri)))) && whole >= AROUND
}

#[cfg(not(target_arch = "x86_64"))]
fn around(from: &[u8], to: &mut [u8]) {
    to.copy_from_slice(from);
}

/// Copies, and writes whole lines around the caches.
#[cfg(target_arch = "x86_64")]
fn around(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len(), "the lengths differ");
    let begin = to.as_ptr().align_offset(LINE).min(to.len());
    let (from_begin, from) = from.split_at(begin);
    let (to_begin, to) = to.split_at_mut(begin);
    to_begin.copy_from_slice(from_begin);
    let (from, from_rest) = from.as_chunks::<LINE>();
    let (to, to_rest) = to.as_chunks_mut::<LINE>();
    for (from, to) in from.iter().zip(to) {
        let (from, to) = (from.as_ptr().cast::<__m128i>(), to.as_mut_ptr().cast::<__m128i>());
        for quarter in 0..LINE / size_of::<__m128i>() {
            // SAFETY: in the two lines; the one that is written to is aligned, as `begin` says. Every x86-64 processor has these instructions.
            unsafe { _mm_stream_si128(to.add(quarter), _mm_loadu_si128(from.add(quarter))) };
        }
    }
    to_rest.copy_from_slice(from_rest);
    // Such writes are not ordered with later ones by which other threads learn of them.
    // SAFETY: every x86-64 processor has this instruction.
    unsafe { _mm_sfence() };
}

/// Writes a zero into each cache line of `bytes`, which begin at one. This processor has read them, and another one writes there next: it does
/// so [slowly](crate::processors::rereads_slowly) to a line that both have in their caches, and not if this one has written last.
///
/// 64 KiB of each of two processes for the other took 12.2 us so through two staging buffers, and take 4.1 (`bench/reread.c`).
pub fn take_lines(bytes: &mut [u8]) {
    if takes_lines() {
        bytes.iter_mut().step_by(LINE).for_each(|byte| *byte = 0);
    }
}

/// Models always do, whatever processor they run on.
fn takes_lines() -> bool {
    cfg!(loom) || rereads_slowly()
}

/// Whether vectors are faster here than `rep movsb`, and there are any.
#[cfg(target_arch = "x86_64")]
fn copies_in_vectors() -> bool {
    static IS_FASTER: LazyLock<bool> = LazyLock::new(|| {
        if cfg!(miri) {
            return false;
        }
        let vendor = __cpuid(0);
        let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat();
        // Hygon's are of AMD's make.
        let is_amd = name == b"AuthenticAMD" || name == b"HygonGenuine";
        is_amd && is_x86_feature_detected!("avx")
    });
    *IS_FASTER
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

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
fn take_in_vectors(from: &mut [u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len(), "the lengths differ");
    let (from, from_rest) = from.as_chunks_mut::<LINE>();
    let (to, to_rest) = to.as_chunks_mut::<LINE>();
    for (from, to) in from.iter_mut().zip(to) {
        *to = *from;
        from[0] = 0;
        compiler_fence(Ordering::AcqRel);
    }
    to_rest.copy_from_slice(from_rest);
    take_lines(from_rest);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    type CopyFn = fn(&mut [u8], &mut [u8]);

    /// The copies that this processor can make.
    fn copies() -> Vec<CopyFn> {
        let mut copies: Vec<CopyFn> =
            vec![|from, to| copy(from, to), take, |from, to| take_part(from, to, AROUND), |from, to| {
                copy_part(from, to, AROUND)
            }];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx") {
            // SAFETY: this processor has AVX.
            copies.push(|from, to| unsafe { in_vectors(from, to) });
            // SAFETY: as above.
            copies.push(|from, to| unsafe { take_in_vectors(from, to) });
        }
        copies
    }

    #[test]
    fn copies_of_every_length_and_place_are_whole_and_write_nothing_else() {
        let source: Vec<u8> = (0..20_000u32).map(|index| ((index * 31) >> 3) as u8).collect();
        for length in [0, 1, 127, 128, 511, 512, 513, 639, 640, 4096, 16_383, 16_384, 16_385] {
            for (copy, (from, to)) in copies()
                .into_iter()
                .flat_map(|copy| [(0, 0), (1, 0), (0, 3), (16, 40), (63, 64)].map(|places| (copy, places)))
            {
                let mut target = vec![7; 20_000];
                let mut copied = source.clone();
                copy(&mut copied[from..from + length], &mut target[to..to + length]);
                assert_eq!(target[to..to + length], source[from..from + length]);
                assert!(target[..to].iter().chain(&target[to + length..]).all(|byte| *byte == 7));
                assert!(
                    copied[..from] == source[..from] && copied[from + length..] == source[from + length..]
                );
            }
        }
    }

    #[test]
    fn lengths_that_differ_are_refused() {
        for copy in copies() {
            assert!(std::panic::catch_unwind(|| copy(&mut [0; 1024], &mut [0; 1023])).is_err());
        }
    }

    #[test]
    fn each_line_that_is_taken_is_written_to() {
        let written = |bytes: &mut [u8]| {
            take_lines(bytes);
            bytes.iter().map(|byte| *byte == 0).collect::<Vec<_>>()
        };
        let expected: Vec<_> = (0..200).map(|index| takes_lines() && index % LINE == 0).collect();
        assert_eq!(written(&mut [7; 200]), expected);
        assert_eq!(written(&mut []), []);
    }
}
