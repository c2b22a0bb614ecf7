//! Finds processes that are frozen, and not only slow: pure.
//!
//! A slow process will end, so its job waits for it. A frozen one may never go on: somebody must be told, or end it. The time since the last
//! sign of life cannot tell the two apart. One long stop can: a process that is stopped and continued again and again is only slow.

use std::time::{Duration, Instant};

/// How long a process that others wait for may be stopped by a signal.
pub const STOPPED_LIMIT: Duration = Duration::from_secs(5);
/// How often to check.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Some processes, as seen by a process that waits for them.
#[derive(Debug)]
pub struct Frozen {
    limit: Duration,
    /// For each process, the number of its current stop, and how long the stop has been seen.
    stops: Vec<Option<(u64, Duration)>>,
    looked: Option<Instant>,
}

impl Frozen {
    /// `count` processes, each of which may be stopped for `limit`.
    pub fn new(count: usize, limit: Duration) -> Self {
        Self { limit, stops: vec![None; count], looked: None }
    }

    /// The time of the next check; None before the first, which is due at once.
    pub fn look_at(&self) -> Option<Instant> {
        self.looked.map(|looked| looked + POLL_INTERVAL)
    }

    /// Takes the number of each process's current stop, if it is stopped. Returns the processes that have been stopped
    /// for too long.
    pub fn look(&mut self, stops: impl IntoIterator<Item = Option<u64>>, now: Instant) -> Vec<usize> {
        // Time in which this process was stopped itself, as with Ctrl-Z, does not count.
        let passed =
            self.looked.map_or(Duration::ZERO, |at| now.saturating_duration_since(at).min(POLL_INTERVAL * 2));
        self.looked = Some(now);
        let mut frozen = Vec::new();
        for (worker, (known, stop)) in self.stops.iter_mut().zip(stops).enumerate() {
            *known = match (*known, stop) {
                // A process that has continued meanwhile, even briefly, is only slow.
                (Some((before, seen)), Some(stop)) if before == stop => Some((stop, seen + passed)),
                (_, stop) => stop.map(|stop| (stop, Duration::ZERO)),
            };
            if known.is_some_and(|(_, seen)| seen >= self.limit) {
                *known = None;
                frozen.push(worker);
            }
        }
        frozen
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn who_is_stopped_for_five_seconds_is_frozen_and_nobody_else() {
        let (mut frozen, start) = (Frozen::new(4, STOPPED_LIMIT), Instant::now());
        assert_eq!(frozen.look_at(), None);
        for look in 0..10 {
            let now = start + POLL_INTERVAL * look;
            // The first is stopped all the time. The second is seen to continue once. The third is never seen running,
            // but continues between all checks. The fourth is only slow.
            let stops = [Some(1), (look != 4).then_some(1), Some(u64::from(look)), None];
            assert!(frozen.look(stops, now).is_empty(), "{look}");
            assert_eq!(frozen.look_at(), Some(now + POLL_INTERVAL));
        }
        let stops = [Some(1), Some(1), Some(10), None];
        assert_eq!(frozen.look(stops, start + POLL_INTERVAL * 10), [0]);
        // It has been reported.
        assert!(frozen.look(stops, start + POLL_INTERVAL * 11).is_empty());
    }

    proptest! {
        /// However the checking process is delayed: only the time in which it was awake counts.
        #[test]
        fn who_was_stopped_itself_gives_the_others_their_time(
            pauses in prop::collection::vec(1_u64..20_000, 1..60)
        ) {
            let (mut frozen, mut now, mut awake) = (Frozen::new(1, STOPPED_LIMIT), Instant::now(), Duration::ZERO);
            prop_assert!(frozen.look([Some(1)], now).is_empty());
            for pause in pauses {
                let pause = Duration::from_millis(pause);
                now += pause;
                awake += pause.min(POLL_INTERVAL * 2);
                let found = !frozen.look([Some(1)], now).is_empty();
                prop_assert_eq!(found, awake >= STOPPED_LIMIT);
                if found {
                    break;
                }
            }
        }
    }
}
