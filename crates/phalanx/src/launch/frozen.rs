//! Which workers hold up the end of their job because they are frozen: pure.

use std::time::{Duration, Instant};

/// How long a worker may be stopped by a signal when another has ended well.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often to look.
const LOOK: Duration = Duration::from_millis(500);

/// The workers of this node, as they are seen once somebody has ended well. Before, whoever stops them may have any
/// reason to, and the others miss them.
#[derive(Debug)]
pub(super) struct Frozen {
    /// The stop in which each is, by its number, and how much of it was seen.
    stops: Vec<Option<(u64, Duration)>>,
    looked: Option<Instant>,
}

impl Frozen {
    pub(super) fn new(workers: usize) -> Self {
        Self { stops: vec![None; workers], looked: None }
    }

    /// When to look next; at once, if that was never done.
    pub(super) fn look_at(&self) -> Option<Instant> {
        self.looked.map(|looked| looked + LOOK)
    }

    /// Takes the number of the stop in which each of them is, if it is in one, and gives those that have been for too long.
    pub(super) fn look(&mut self, stops: impl IntoIterator<Item = Option<u64>>, now: Instant) -> Vec<usize> {
        // What has passed while the launcher was stopped itself, as with Ctrl-Z, does not count.
        let passed = self.looked.map_or(Duration::ZERO, |at| now.saturating_duration_since(at).min(LOOK * 2));
        self.looked = Some(now);
        let mut frozen = Vec::new();
        for (worker, (known, stop)) in self.stops.iter_mut().zip(stops).enumerate() {
            *known = match (*known, stop) {
                // Who has gone on meanwhile, however shortly, is only slow.
                (Some((before, seen)), Some(stop)) if before == stop => Some((stop, seen + passed)),
                (_, stop) => stop.map(|stop| (stop, Duration::ZERO)),
            };
            if known.is_some_and(|(_, seen)| seen >= PATIENCE) {
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
        let (mut frozen, start) = (Frozen::new(4), Instant::now());
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
        /// Whatever delays the launcher: only the time in which it was awake counts.
        #[test]
        fn a_launcher_that_was_stopped_itself_gives_its_workers_their_time(
            pauses in prop::collection::vec(1_u64..20_000, 1..60)
        ) {
            let (mut frozen, mut now, mut awake) = (Frozen::new(1), Instant::now(), Duration::ZERO);
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
