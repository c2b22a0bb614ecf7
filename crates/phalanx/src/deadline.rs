//! A point in time at which a wait gives up. Every wait of this crate takes one.

use std::time::{Duration, Instant};

/// The latest moment at which an operation may still be waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(Instant);

impl Deadline {
    /// A deadline `timeout` from now. A time-out too long for the clock is cut to thirty years.
    pub fn after(timeout: Duration) -> Self {
        const LONG: Duration = Duration::from_secs(30 * 365 * 24 * 3600);
        Self(Instant::now() + timeout.min(LONG))
    }

    /// A deadline that has passed.
    pub(crate) fn now() -> Self {
        Self(Instant::now())
    }

    /// The time left; zero once it has passed.
    pub fn remaining(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    /// Has it passed?
    pub fn has_passed(self) -> bool {
        Instant::now() >= self.0
    }

    /// The same moment for the standard library.
    pub fn instant(self) -> Instant {
        self.0
    }

    /// The earlier of this deadline and `timeout` from now.
    pub fn at_most(self, timeout: Duration) -> Self {
        self.min(Self::after(timeout))
    }
}
