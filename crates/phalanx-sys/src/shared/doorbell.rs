//! Sleeping until another process has written something.

use std::time::Duration;

use crate::sync::{AtomicU32, Ordering, fence, futex};

/// Wakes the process whose threads sleep on it. An event count: a thread that checks for work and then sleeps misses
/// nothing in between.
#[derive(Clone, Copy, Debug)]
pub struct Doorbell<'a> {
    rung: &'a AtomicU32,
    sleeping: &'a AtomicU32,
}

impl<'a> Doorbell<'a> {
    /// The doorbell of these two atomics, which processes share. Both must be zero before the first use.
    pub(crate) fn new(rung: &'a AtomicU32, sleeping: &'a AtomicU32) -> Self {
        Self { rung, sleeping }
    }

    /// Wakes all sleeping threads of the owner. Costs a fence and a load if there are none.
    pub fn ring(&self) {
        // Pairs with the fence in `sleep_unless`: either this load sees the flag, or the sleeper sees what was
        // published.
        fence(Ordering::SeqCst);
        self.wake();
    }

    /// As [`ring`](Self::ring), after a sequentially consistent store has published something.
    pub(crate) fn wake(&self) {
        if self.sleeping.load(Ordering::SeqCst) != 0 {
            // Releases what was published to a thread that begins to sleep now: if it reads this value, and then would wait
            // for the next, its fence lets it see what it was woken for.
            self.rung.fetch_add(1, Ordering::Release);
            futex::wake(self.rung);
        }
    }

    /// Sleeps until the doorbell rings, at most for `timeout`, unless `ready` returns true.
    pub fn sleep_unless(&self, timeout: Duration, ready: impl FnOnce() -> bool) {
        let before = self.rung.load(Ordering::Relaxed);
        // The number of sleepers; only the owner changes it.
        self.sleeping.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !ready() {
            // Rung already, interrupted, timed out: in each case the caller checks again.
            futex::wait(self.rung, before, timeout);
        }
        self.sleeping.fetch_sub(1, Ordering::Relaxed);
    }
}
