//! The atomics of shared memory, and the kernel's way to sleep on one.
//!
//! Under `--cfg loom` they are loom's, and the way to sleep is a model of the kernel's: what is built on them runs
//! unchanged, in every order that the memory model allows.

pub(crate) use self::chosen::{AtomicU32, AtomicU64, fence, futex};
pub(crate) use std::sync::atomic::Ordering;

#[cfg(not(loom))]
mod chosen {
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, fence};

    /// Sleeping on a word that processes share.
    #[cfg(not(miri))]
    pub(crate) mod futex {
        use std::time::Duration;

        use rustix::thread::futex::{self, Flags};
        use rustix::time::Timespec;

        use super::AtomicU32;

        /// Sleeps while `word` is `value`, until it is woken, at most for `timeout`; possibly for no reason at all less
        /// long.
        pub(crate) fn wait(word: &AtomicU32, value: u32, timeout: Duration) {
            let timeout =
                Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) };
            // Another value already, interrupted, timed out: in each case the caller looks again.
            let _ = futex::wait(word, Flags::empty(), value, Some(&timeout));
        }

        /// Wakes all that sleep on `word`.
        pub(crate) fn wake(word: &AtomicU32) {
            // Nobody to wake is no error.
            let _ = futex::wake(word, Flags::empty(), u32::MAX);
        }
    }

    /// Miri objects to the pointer that the system's call makes of a number: looks again and again instead.
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

    /// A word whose sequentially consistent exchanges are in one order with all fences, as the language has it. Loom
    /// knows that order of fences alone.
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

    /// A word with the kernel's queue of those that sleep on it.
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

    /// As the kernel does it: the word is compared, and the sleeper queued, under a lock that whoever wakes takes too.
    pub(crate) mod futex {
        use std::time::Duration;

        use super::AtomicU32;
        use crate::sync::Ordering;

        /// Without a time-out, so that a sleeper whom nobody wakes is a deadlock, which loom reports.
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
