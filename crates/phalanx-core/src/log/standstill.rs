//! Times in which this process stood still, because it was stopped or the whole machine slept: pure, but for the clock.
//!
//! [`Instant`](std::time::Instant) stands still while a machine sleeps. So a process that has slept for an hour finds no deadline that has passed,
//! but connections that the other side has given up: it would take the other side for lost. The clock of this file goes on.
//!
//! A thread that a file system holds up for as long, as one of a network may that does not answer, looks the same. So what is said names it, too.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The time since the machine was started, in which it may have slept.
pub(super) fn since_boot() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap_or_default()
}

/// When a thread that never waits for long was awake, and how long it stood still before.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Standstill {
    /// When it was awake; none before the first time.
    awake_at: Option<Duration>,
    /// How long it may take at most until it is awake again.
    limit: Duration,
    /// The longest such limit. For so long a standstill may be why something happens.
    longest: Duration,
    /// For how long it stood still the last time, and when that was noticed.
    last: Option<(Duration, Duration)>,
}

impl Standstill {
    /// The thread is awake at `now`, and will be again within `limit`.
    pub(super) fn awake(&mut self, now: Duration, limit: Duration) {
        self.look(now);
        (self.awake_at, self.limit, self.longest) = (Some(now), limit, self.longest.max(limit));
    }

    /// Any thread of this process is awake at `now`. Returns how long the process stood still, if that was a short time ago.
    pub(super) fn look(&mut self, now: Duration) -> Option<Duration> {
        let since = self.awake_at.map_or(Duration::ZERO, |at| now.saturating_sub(at));
        if since > self.limit {
            // The same time counts once.
            (self.awake_at, self.last) = (Some(now), Some((since, now)));
        }
        let (stood_still, noticed) = self.last?;
        (now.saturating_sub(noticed) <= self.longest).then_some(stood_still)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn who_is_awake_in_time_has_not_stood_still_and_who_is_late_has_for_a_while() {
        let mut standstill = Standstill::default();
        // Before the thread has begun nothing is known.
        assert_eq!(standstill.look(seconds(5000)), None);
        for second in 5001..5100 {
            standstill.awake(seconds(second), seconds(20));
        }
        assert_eq!(standstill.look(seconds(5119)), None);
        // Whichever thread is first, it is the same time.
        assert_eq!(standstill.look(seconds(6299)), Some(seconds(1200)));
        standstill.awake(seconds(6300), seconds(20));
        assert_eq!(standstill.look(seconds(6319)), Some(seconds(1200)));
        // What happens later has another reason.
        standstill.awake(seconds(6320), seconds(20));
        assert_eq!(standstill.look(seconds(6320)), None);
        // A longer time takes its place.
        assert_eq!(standstill.look(seconds(7320)), Some(seconds(1000)));
    }

    #[test]
    fn who_may_not_be_late_now_has_stood_still_sooner_and_it_counts_as_long() {
        let mut standstill = Standstill::default();
        standstill.awake(seconds(100), seconds(22));
        standstill.awake(seconds(101), seconds(12));
        assert_eq!(standstill.look(seconds(113)), None);
        standstill.awake(seconds(115), seconds(22));
        standstill.awake(seconds(116), seconds(12));
        assert_eq!(standstill.look(seconds(120)), Some(seconds(14)));
        standstill.awake(seconds(128), seconds(12));
        assert_eq!(standstill.look(seconds(137)), Some(seconds(14)));
        assert_eq!(standstill.look(seconds(138)), None);
    }

    #[test]
    fn a_clock_that_goes_back_and_a_thread_that_may_wait_for_ever_are_no_standstill() {
        let mut standstill = Standstill::default();
        standstill.awake(seconds(100), seconds(20));
        assert_eq!(standstill.look(seconds(1)), None);
        standstill.awake(seconds(101), Duration::MAX);
        assert_eq!(standstill.look(Duration::MAX), None);
    }

    #[test]
    fn the_clock_goes_on() {
        let before = since_boot();
        assert!(before > Duration::ZERO && since_boot() >= before);
    }
}
