//! Memory of items and batches is used again.
//!
//! glibc gives freed memory back to the system when 128 KiB of it lie at a heap's end, and every piece of that size at once. A loader frees
//! a batch's items together, and takes as much anew for the next one, which the kernel then has to clear, page by page: three quarters of
//! the time of a loader that copies images of 48 KiB. Both limits grow when a larger piece of up to 32 MiB is freed, which happens
//! sooner or later in a program that computes with tensors. Here it happens at once. It costs two system calls, needs no unsafe code, unlike `mallopt`,
//! and leaves limits alone that the user has set (`MALLOC_TRIM_THRESHOLD_` and the like). Other allocators have other rules, and
//! lose nothing by it.

use std::hint::black_box;
use std::sync::Once;

/// The most at which glibc's limits grow, with room for its own header.
const PIECE: usize = (32 << 20) - (64 << 10);

/// From now on freed memory below 32 MiB a piece, and 64 MiB of each heap, stay with the process.
pub(crate) fn keep_freed_memory() {
    static ONCE: Once = Once::new();
    if cfg!(target_env = "gnu") {
        ONCE.call_once(|| {
            let mut piece = Vec::<u8>::new();
            // Nothing is written to it, so that it has no pages. Where so much may not be mapped, the limits stay as they are.
            let _ = piece.try_reserve_exact(PIECE);
            drop(black_box(piece));
        });
    }
}
