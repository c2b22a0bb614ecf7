//! Sleeping until another process has something to say.

use std::time::Duration;

use crate::sync::{AtomicU32, Ordering, fence, futex};

/// Wakes the process whose threads sleep on it. An event count: whoever looks for work, then sleeps, misses nothing in
/// between.
#[derive(Clone, Copy, Debug)]
pub struct Doorbell<'a> {
    rung: &'a AtomicU32,
    sleeping: &'a AtomicU32,
}

impl<'a> Doorbell<'a> {
    /// The doorbell of these two words, which processes share, and which were zero when nobody used them yet.
    pub(crate) fn new(rung: &'a AtomicU32, sleeping: &'a AtomicU32) -> Self {
        Self { rung, sleeping }
    }

    /// Wakes the owner, all threads of it that sleep. Costs a fence and a load if none does.
    pub fn ring(&self) {
        // Pairs with the fence in `sleep_unless`: either this sees the flag, or the sleeper sees what was published.
        fence(Ordering::SeqCst);
        self.wake();
    }

    /// As [`ring`](Self::ring), for whoever has just published with a sequentially consistent store.
    pub(crate) fn wake(&self) {
        if self.sleeping.load(Ordering::SeqCst) != 0 {
            self.rung.fetch_add(1, Ordering::Relaxed);
            futex::wake(self.rung);
        }
    }

    /// Sleeps until somebody rings, at most for `timeout`, unless `ready` finds that there is something to do.
    pub fn sleep_unless(&self, timeout: Duration, ready: impl FnOnce() -> bool) {
        let before = self.rung.load(Ordering::Relaxed);
        // The number of sleepers; the owner alone counts it.
        self.sleeping.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !ready() {
            // Rung already, interrupted, timed out: in each case the caller looks again.
            futex::wait(self.rung, before, timeout);
        }
        self.sleeping.fetch_sub(1, Ordering::Relaxed);
    }
}
