//! Freed memory that a process uses again.
//!
//! glibc gives freed memory back to the system when 128 KiB of it lie at a heap's end, and every piece of that size at once. Who frees many pieces
//! together, and takes as much anew, gets pages that the kernel has to clear: three quarters of the time of a loader that copies lists of images of
//! 48 KiB. Both limits grow when a larger piece of up to 32 MiB is freed, which happens sooner or later in a program that computes with
//! tensors. Here it happens at once. It costs two system calls, and leaves limits alone that the user has set (`MALLOC_TRIM_THRESHOLD_` and the like),
//! which `mallopt` would not. Other allocators have other rules, and lose nothing by it.

use std::hint::black_box;
use std::sync::Once;

/// The most at which glibc's limits grow, with room for its own header.
const PIECE: usize = (32 << 20) - (64 << 10);

/// From now on freed memory below 32 MiB a piece, and 64 MiB of each heap, stay with the process. Where a piece of 32 MiB may not be mapped,
/// nothing changes.
///
/// The program's own allocator, which may count, does not see the piece.
pub fn keep_freed_memory() {
    static ONCE: Once = Once::new();
    if cfg!(target_env = "gnu") {
        // SAFETY: the piece, which has no pages because nobody writes to it, is freed once; it may be null.
        ONCE.call_once(|| unsafe { libc::free(black_box(libc::malloc(PIECE))) });
    }
}
