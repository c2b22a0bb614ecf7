//! The time at which a wait gives up. Every wait of this crate has one.

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

/// The latest time until which an operation may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(Instant);

impl Deadline {
    /// A deadline `timeout` from now. A time-out too long for the clock is cut to thirty years.
    pub fn after(timeout: Duration) -> Self {
        const TIMEOUT_LIMIT: Duration = Duration::from_secs(30 * 365 * 24 * 3600);
        Self(Instant::now() + timeout.min(TIMEOUT_LIMIT))
    }

    /// A deadline that has passed.
    pub fn now() -> Self {
        Self(Instant::now())
    }

    /// The time left; zero if it has passed.
    pub fn remaining(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    /// Whether it has passed.
    pub fn has_passed(self) -> bool {
        Instant::now() >= self.0
    }

    /// The same time for the standard library.
    pub fn instant(self) -> Instant {
        self.0
    }

    /// The earlier of this deadline and `timeout` from now.
    pub fn at_most(self, timeout: Duration) -> Self {
        self.min(Self::after(timeout))
    }
}

/// Pauses between attempts. They grow by half from the first to the longest, until a deadline. Each is shortened at random, by a half at most:
/// thousands of processes that a store has turned away at one moment do not all come back at one moment.
#[derive(Debug)]
pub struct Backoff {
    next: Duration,
    longest: Duration,
    deadline: Deadline,
}

impl Backoff {
    pub fn new((first, longest): (Duration, Duration), deadline: Deadline) -> Self {
        Self { next: first, longest, deadline }
    }

    /// Sleeps. Returns `false` at once if the deadline has passed.
    pub fn pause(&mut self) -> bool {
        let left = self.deadline.remaining();
        std::thread::sleep(shortened(self.next).min(left));
        self.next = (self.next * 3 / 2).min(self.longest);
        !left.is_zero()
    }

    /// Whether the deadline will have passed after the next pause.
    pub(crate) fn is_last(&self) -> bool {
        self.deadline.remaining() <= self.next
    }

    /// Whether the pauses have grown to the longest.
    pub(crate) fn is_longest(&self) -> bool {
        self.next == self.longest
    }
}

/// Between a half of `pause` and all of it.
fn shortened(pause: Duration) -> Duration {
    const STEPS: u32 = 1024;
    // Each of them has keys of its own.
    let random = RandomState::new().hash_one(0_u8) as u32 % STEPS;
    pause / 2 + pause / 2 * random / STEPS
}

/// A time-out that counts from the first wait: most operations of one host end before it is worth
/// reading a clock.
#[derive(Debug)]
pub(crate) struct Timeout {
    timeout: Duration,
    deadline: Cell<Option<Deadline>>,
}

impl Timeout {
    pub(crate) fn new(timeout: Duration) -> Self {
        Self { timeout, deadline: Cell::new(None) }
    }

    /// The deadline: `timeout` after the first call of this function.
    pub(crate) fn deadline(&self) -> Deadline {
        let deadline = self.deadline.get().unwrap_or_else(|| Deadline::after(self.timeout));
        self.deadline.set(Some(deadline));
        deadline
    }
}

impl From<Deadline> for Timeout {
    fn from(deadline: Deadline) -> Self {
        Self { timeout: Duration::ZERO, deadline: Cell::new(Some(deadline)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_the_longest_and_end_with_the_deadline() {
        let pauses = (Duration::from_millis(1), Duration::from_millis(2));
        let mut backoff = Backoff::new(pauses, Deadline::after(Duration::from_secs(3600)));
        assert!(!backoff.is_longest() && backoff.pause() && backoff.pause());
        assert!(backoff.is_longest() && !backoff.is_last());
        let mut over = Backoff::new(pauses, Deadline::now());
        assert!(over.is_last() && !over.pause());
    }

    #[test]
    fn those_who_fail_together_do_not_try_again_together() {
        let pauses: Vec<_> = (0..100).map(|_| shortened(Duration::from_secs(1)).as_millis()).collect();
        assert!(pauses.iter().all(|pause| (499..1000).contains(pause)), "{pauses:?}");
        let [least, most] = [pauses.iter().min(), pauses.iter().max()].map(|pause| pause.copied().unwrap());
        assert!(most - least > 100, "{pauses:?}");
    }
}
