//! Which processes are frozen, and not only slow: pure.

use std::time::{Duration, Instant};

/// How long a process that is waited for may be stopped by a signal.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// How often to look.
const LOOK: Duration = Duration::from_millis(500);

/// Some processes, as one that waits for them sees them.
#[derive(Debug)]
pub(crate) struct Frozen {
    patience: Duration,
    /// The stop in which each is, by its number, and how much of it was seen.
    stops: Vec<Option<(u64, Duration)>>,
    looked: Option<Instant>,
}

impl Frozen {
    /// `count` processes, which may be stopped for so long.
    pub(crate) fn new(count: usize, patience: Duration) -> Self {
        Self { patience, stops: vec![None; count], looked: None }
    }

    /// When to look next; at once, if that was never done.
    pub(crate) fn look_at(&self) -> Option<Instant> {
        self.looked.map(|looked| looked + LOOK)
    }

    /// Takes the number of the stop in which each of them is, if it is in one, and gives those that have been for too long.
    pub(crate) fn look(&mut self, stops: impl IntoIterator<Item = Option<u64>>, now: Instant) -> Vec<usize> {
        // What has passed while this process was stopped itself, as with Ctrl-Z, does not count.
        let passed = self.looked.map_or(Duration::ZERO, |at| now.saturating_duration_since(at).min(LOOK * 2));
        self.looked = Some(now);
        let mut frozen = Vec::new();
        for (worker, (known, stop)) in self.stops.iter_mut().zip(stops).enumerate() {
            *known = match (*known, stop) {
                // Who has gone on meanwhile, however shortly, is only slow.
                (Some((before, seen)), Some(stop)) if before == stop => Some((stop, seen + passed)),
                (_, stop) => stop.map(|stop| (stop, Duration::ZERO)),
            };
            if known.is_some_and(|(_, seen)| seen >= self.patience) {
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
        let (mut frozen, start) = (Frozen::new(4, PATIENCE), Instant::now());
        assert_eq!(frozen.look_at(), None);
        for look in 0..10 {
            let now = start + LOOK * look;
            // The first is stopped all the time; the second is seen to go on once, the third never, though it does each
            // time; the fourth is only slow.
            let stops = [Some(1), (look != 4).then_some(1), Some(u64::from(look)), None];
            assert!(frozen.look(stops, now).is_empty(), "{look}");
            assert_eq!(frozen.look_at(), Some(now + LOOK));
        }
        let stops = [Some(1), Some(1), Some(10), None];
        assert_eq!(frozen.look(stops, start + LOOK * 10), [0]);
        // It has been told of.
        assert!(frozen.look(stops, start + LOOK * 11).is_empty());
    }

    proptest! {
        /// Whatever delays who looks: only the time in which it was awake counts.
        #[test]
        fn who_was_stopped_itself_gives_the_others_their_time(
            pauses in prop::collection::vec(1_u64..20_000, 1..60)
        ) {
            let (mut frozen, mut now, mut awake) = (Frozen::new(1, PATIENCE), Instant::now(), Duration::ZERO);
            prop_assert!(frozen.look([Some(1)], now).is_empty());
            for pause in pauses {
                let pause = Duration::from_millis(pause);
                now += pause;
                awake += pause.min(LOOK * 2);
                let found = !frozen.look([Some(1)], now).is_empty();
                prop_assert_eq!(found, awake >= PATIENCE);
                if found {
                    break;
                }
            }
        }
    }
}
