//! The atomics of shared memory, and the futex to sleep on one.
//!
//! Under `--cfg loom` they are loom's, with a model of the futex. The code that uses them runs
//! unchanged, with every interleaving that the memory model allows.

pub(crate) use self::chosen::{AtomicU32, AtomicU64, fence, futex};
pub(crate) use std::sync::atomic::Ordering;

#[cfg(not(loom))]
mod chosen {
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, fence};

    /// Sleeping on an atomic that processes share.
    #[cfg(not(miri))]
    pub(crate) mod futex {
        use std::time::Duration;

        use rustix::thread::futex::{self, Flags};
        use rustix::time::Timespec;

        use super::AtomicU32;

        /// Sleeps while `word` is `value`, until it is woken or `timeout` has passed. It may also return earlier
        /// without a reason.
        pub(crate) fn wait(word: &AtomicU32, value: u32, timeout: Duration) {
            let timeout =
                Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) };
            // Another value already, interrupted, timed out: in each case the caller checks again.
            let _ = futex::wait(word, Flags::empty(), value, Some(&timeout));
        }

        /// Wakes all threads that sleep on `word`.
        pub(crate) fn wake(word: &AtomicU32) {
            // It is no error if no thread sleeps.
            let _ = futex::wake(word, Flags::empty(), u32::MAX);
        }
    }

    /// Miri does not accept the pointer that the system call makes of a number, so this polls.
    #[cfg(miri)]
    pub(crate) mod futex {
        use std::thread;
        use std::time::{Duration, Instant};

        use super::AtomicU32;
        use crate::sync::Ordering;

        pub(crate) fn wait(word: &AtomicU32, value: u32, timeout: Duration) {
            let start = Instant::now();
            while word.load(Ordering::Relaxed) == value && start.elapsed() < timeout {
                thread::yield_now();
            }
        }

        pub(crate) fn wake(_: &AtomicU32) {}
    }
}

#[cfg(loom)]
mod chosen {
    use std::ops::Deref;

    use loom::sync::atomic::AtomicU32 as HalfWord;
    use loom::sync::atomic::AtomicU64 as Word;
    pub(crate) use loom::sync::atomic::fence;
    use loom::sync::{Condvar, Mutex};

    use crate::sync::Ordering;

    /// An atomic whose sequentially consistent exchanges are in one order with all fences, as the language defines it.
    /// Loom has this order only for fences.
    #[derive(Debug, Default)]
    pub(crate) struct AtomicU64(Word);

    impl AtomicU64 {
        pub(crate) fn swap(&self, value: u64, order: Ordering) -> u64 {
            let before = self.0.swap(value, order);
            if order == Ordering::SeqCst {
                fence(Ordering::SeqCst);
            }
            before
        }
    }

    impl Deref for AtomicU64 {
        type Target = Word;

        fn deref(&self) -> &Word {
            &self.0
        }
    }

    /// An atomic with the kernel's queue of the threads that sleep on it.
    #[derive(Debug, Default)]
    pub(crate) struct AtomicU32 {
        word: HalfWord,
        queue: Mutex<()>,
        woken: Condvar,
    }

    impl Deref for AtomicU32 {
        type Target = HalfWord;

        fn deref(&self) -> &HalfWord {
            &self.word
        }
    }

    /// As in the kernel: the comparison and the queueing of the sleeper happen under a lock that wakers also take.
    pub(crate) mod futex {
        use std::time::Duration;

        use super::AtomicU32;
        use crate::sync::Ordering;

        /// Without a time-out, so that a sleeper that is never woken is a deadlock, which loom reports.
        pub(crate) fn wait(word: &AtomicU32, value: u32, _: Duration) {
            if let Ok(queue) = word.queue.lock()
                && word.load(Ordering::Relaxed) == value
            {
                drop(word.woken.wait(queue));
            }
        }

        pub(crate) fn wake(word: &AtomicU32) {
            let queue = word.queue.lock();
            word.woken.notify_all();
            drop(queue);
        }
    }
}
