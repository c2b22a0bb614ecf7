//! Decides which processes have become silent: pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What stands in the place of a counter when the process's connection to the store has ended.
pub const ENDED: &[u8] = b"ended";

/// Why a process is missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absence {
    /// Its counter has not moved for so long.
    Silent(Duration),
    /// Its connection to the store has ended.
    Ended,
}

/// In a job of up to so many processes, each watches all others.
const MAX_WATCHED_BY_ALL: usize = 16;
/// In a larger one each watches so many.
const WATCHED: usize = 4;
/// Of many, so many watch all: else many that are lost at once would be found four at a time, each four after a silence of their own.
const WATCH_ALL: usize = 3;

/// Those of `all` whose heartbeats `id` watches: all others, if they are few, or if it is one of the first of the `watchers`, who look for all.
/// Else those that come next in the order of their numbers: if all read the heartbeats of all each second, the store would have more to do
/// than one thread can. Numbers are random, so a rack that is lost has been watched by others.
pub fn watched<Id: Copy + Ord>(mut all: Vec<Id>, id: Id, mut watchers: Vec<Id>) -> Vec<Id> {
    watchers.sort_unstable();
    watchers.truncate(WATCH_ALL);
    if all.len() > MAX_WATCHED_BY_ALL && !watchers.contains(&id) {
        all.sort_unstable();
        let next = all.partition_point(|other| *other <= id);
        all.rotate_left(next);
        all.truncate(WATCHED);
    }
    all.retain(|other| *other != id);
    all
}

/// The heartbeats of others, nodes or workers, as one of them sees them. Only its own clock counts.
#[derive(Debug)]
pub struct Liveness<Id> {
    interval: Duration,
    timeout: Duration,
    last: BTreeMap<Id, (Vec<u8>, Instant)>,
    looked_at: Option<Instant>,
}

impl<Id: Copy + Ord> Liveness<Id> {
    /// For a process that looks, and beats, each `interval`. It misses another one whose counter has not moved for longer than `timeout`.
    pub fn new(interval: Duration, timeout: Duration) -> Self {
        Self { interval, timeout, last: BTreeMap::new(), looked_at: None }
    }

    /// Takes the others' counters, and gives those whose process has ended, and those that have not moved for longer than the time-out.
    pub fn observe<'a>(
        &mut self,
        beats: impl IntoIterator<Item = (Id, &'a [u8])>,
        now: Instant,
    ) -> Vec<(Id, Absence)> {
        // A process that slept itself, or was stopped, knows nothing of the others.
        let awake = self.interval.saturating_add(self.timeout / 2);
        let slept = self.looked_at.is_some_and(|at| now.saturating_duration_since(at) > awake);
        self.looked_at = Some(now);
        let mut last = BTreeMap::new();
        let mut absent = Vec::new();
        for (id, beat) in beats {
            let entry = match self.last.remove(&id) {
                Some((earlier, at)) if earlier == beat && !slept => (earlier, at),
                _ => (beat.to_vec(), now),
            };
            let since = now.saturating_duration_since(entry.1);
            if beat == ENDED {
                absent.push((id, Absence::Ended));
            } else if since > self.timeout {
                absent.push((id, Absence::Silent(since)));
            }
            last.insert(id, entry);
        }
        self.last = last;
        absent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: u32 = 1;
    const B: u32 = 2;

    #[test]
    fn only_a_counter_that_stands_still_is_silence() {
        let mut liveness = Liveness::new(Duration::from_secs(1), Duration::from_secs(5));
        let start = crate::some_time();
        let mut at = |second: u64, a: &[u8], b: &[u8]| {
            liveness.observe([(A, a), (B, b)], start + Duration::from_secs(second))
        };
        assert!((0..=5).all(|second| at(second, b"7", &[second as u8]).is_empty()));
        assert_eq!(at(6, b"7", b"x"), [(A, Absence::Silent(Duration::from_secs(6)))]);
        assert!(at(7, b"8", b"y").is_empty());
    }

    #[test]
    fn who_has_ended_is_missed_at_once() {
        let mut liveness = Liveness::new(Duration::from_secs(1), Duration::from_secs(5));
        let start = crate::some_time();
        assert!(liveness.observe([(A, &b"7"[..]), (B, b"7")], start).is_empty());
        let next = start + Duration::from_secs(1);
        assert_eq!(liveness.observe([(A, ENDED), (B, b"8")], next), [(A, Absence::Ended)]);
    }

    #[test]
    fn silence_is_found_however_few_times_are_allowed() {
        for attempts in 1..4 {
            let (interval, start) = (Duration::from_secs(1), crate::some_time());
            let mut liveness = Liveness::new(interval, interval * attempts);
            let late = Duration::from_millis(20);
            let mut looks =
                (0..10).map(|look| liveness.observe([(A, &b"7"[..])], start + (interval + late) * look));
            assert!(looks.any(|silent| !silent.is_empty()), "{attempts}");
        }
    }

    #[test]
    fn who_allows_any_silence_accuses_nobody() {
        let mut liveness = Liveness::new(Duration::MAX, Duration::MAX);
        let start = crate::some_time();
        for second in [0, 3600] {
            let now = start + Duration::from_secs(second);
            assert!(liveness.observe([(A, &b"7"[..])], now).is_empty());
        }
    }

    #[test]
    fn who_has_slept_accuses_nobody() {
        let mut liveness = Liveness::new(Duration::from_secs(1), Duration::from_secs(5));
        let start = crate::some_time();
        assert!(liveness.observe([(A, &b"7"[..])], start).is_empty());
        assert!(liveness.observe([(A, &b"7"[..])], start + Duration::from_secs(60)).is_empty());
    }
}
