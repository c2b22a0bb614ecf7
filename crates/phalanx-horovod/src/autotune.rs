//! Finds a cycle time and a fusion threshold by measurement, while the program runs: pure.
//!
//! What is measured is bytes of tensors a second, which grows with the steps a second. First each cycle time is tried, then
//! each threshold with the best of them. The first settings stay unless others are better by more than the noise.

use std::time::{Duration, Instant};

use crate::request::Settings;

/// Cycle times that are tried, in microseconds.
const CYCLES: [u64; 5] = [500, 1_000, 2_500, 5_000, 10_000];
/// Thresholds that are tried: the one that is set, divided by these.
const DIVISORS: [usize; 4] = [2, 4, 16, 64];
/// How long new settings run before they are measured, and how long they are.
const WARM_UP: Duration = Duration::from_millis(500);
const SAMPLE: Duration = Duration::from_millis(1500);
/// By how much settings must be better.
const MARGIN: f64 = 1.02;

#[derive(Debug)]
pub(crate) struct Autotune {
    best: Settings,
    best_rate: Option<f64>,
    trial: Settings,
    untried: Vec<Trial>,
    /// When the trial is measured from, and what it has moved since.
    from: Option<Instant>,
    bytes: usize,
}

#[derive(Clone, Copy, Debug)]
enum Trial {
    Cycle(u64),
    Threshold(usize),
}

impl Autotune {
    pub fn new(start: Settings) -> Self {
        let cycles = CYCLES.into_iter().filter(|cycle| *cycle != start.cycle_micros).map(Trial::Cycle);
        let thresholds = DIVISORS.into_iter().map(|divisor| Trial::Threshold(start.threshold / divisor));
        // The last is tried first.
        let untried = cycles.chain(thresholds).rev().collect();
        Self { best: start, best_rate: None, trial: start, untried, from: None, bytes: 0 }
    }

    /// `bytes` were moved until `now`. Returns other settings, if it is time for them. `None` for good after the last
    /// ones, which are the best.
    pub fn moved(&mut self, bytes: usize, now: Instant) -> Option<Settings> {
        if self.best_rate.is_some()
            && self.untried.is_empty()
            && self.trial == self.best
            && self.from.is_none()
        {
            return None;
        }
        let from = *self.from.get_or_insert(now + WARM_UP);
        if now < from {
            return None;
        }
        self.bytes += bytes;
        let elapsed = now.saturating_duration_since(from);
        if elapsed < SAMPLE || self.bytes == 0 {
            return None;
        }
        let rate = self.bytes as f64 / elapsed.as_secs_f64();
        tracing::info!(
            threshold = self.trial.threshold,
            cycle_us = self.trial.cycle_micros,
            rate,
            "autotune"
        );
        if self.best_rate.is_none_or(|best| rate > best * MARGIN) {
            (self.best, self.best_rate) = (self.trial, Some(rate));
        }
        (self.from, self.bytes) = (None, 0);
        let before = self.trial;
        self.trial = match self.untried.pop() {
            Some(Trial::Cycle(cycle_micros)) => Settings { cycle_micros, ..self.best },
            Some(Trial::Threshold(threshold)) => Settings { threshold, ..self.best },
            None => {
                let Settings { threshold, cycle_micros } = self.best;
                tracing::info!(threshold, cycle_us = cycle_micros, "autotune has chosen");
                self.best
            }
        };
        (self.trial != before).then_some(self.trial)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the tuner on a machine that moves so many bytes a second with given settings. Returns where it ends, and how
    /// many settings it has tried.
    fn tuned(start: Settings, rate: impl Fn(Settings) -> f64) -> (Settings, usize) {
        let (mut tuner, mut settings, mut now, mut changes) =
            (Autotune::new(start), start, Instant::now(), 0);
        for _ in 0..100_000 {
            now += Duration::from_millis(1);
            if let Some(next) = tuner.moved((rate(settings) / 1e3) as usize, now) {
                settings = next;
                changes += 1;
            }
        }
        (settings, changes)
    }

    const START: Settings = Settings { threshold: 64 << 20, cycle_micros: 1_000 };

    #[test]
    fn the_best_of_each_is_kept() {
        // Best at 5 ms and 16 MiB.
        let rate = |settings: Settings| {
            let far = |value: f64, best: f64| (value / best).log2().abs();
            1e9 - 1e8 * far(settings.cycle_micros as f64, 5e3)
                - 1e8 * far(settings.threshold as f64, f64::from(16 << 20))
        };
        let (settings, changes) = tuned(START, rate);
        assert_eq!(settings, Settings { threshold: 16 << 20, cycle_micros: 5_000 });
        assert!(changes <= 9, "{changes}");
    }

    #[test]
    fn without_a_difference_nothing_changes_in_the_end() {
        assert_eq!(tuned(START, |_| 1e9).0, START);
        let small = Settings { threshold: 0, cycle_micros: 700 };
        assert_eq!(tuned(small, |_| 1e9).0, small);
    }

    #[test]
    fn while_nothing_moves_nothing_is_measured() {
        assert_eq!(tuned(START, |_| 0.0), (START, 0));
    }
}
