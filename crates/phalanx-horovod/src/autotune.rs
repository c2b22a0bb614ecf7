//! Finds a cycle time and a fusion threshold by measurement, while the program runs: pure.
//!
//! What is measured is bytes of tensors a second, which grows with the steps a second. First each cycle time is tried, then
//! each threshold with the best of them. The first settings stay unless others are better by more than the noise.

use std::time::{Duration, Instant};

use phalanx_proto::horovod::message::Settings;

/// Cycle times that are tried, in microseconds.
const CYCLES: [u64; 5] = [500, 1_000, 2_500, 5_000, 10_000];
/// Thresholds that are tried: the one that is set, divided by these.
const DIVISORS: [usize; 4] = [2, 4, 16, 64];
/// How long new settings run before they are measured, and how long they are at least.
const WARM_UP_DELAY: Duration = Duration::from_millis(500);
const MIN_SAMPLE_INTERVAL: Duration = Duration::from_millis(1500);
/// A sample is discarded if more than a quarter of it is one pause, such as an evaluation; the next one lasts so many times
/// as long as this pause, because it may belong to each step. But no longer than this.
const PAUSES: u32 = 8;
const MAX_SAMPLE_INTERVAL: Duration = Duration::from_secs(30);
/// By how much settings must be better.
const MARGIN: f64 = 1.02;

#[derive(Debug)]
pub(crate) struct Autotune {
    best: Settings,
    best_rate: Option<f64>,
    trial: Settings,
    untried: Vec<Trial>,
    /// The end of the warm-up of this trial; none before its first bytes.
    warm: Option<Instant>,
    sample: Option<Sample>,
    /// How long a sample of this trial is at least.
    least: Duration,
    is_done: bool,
}

/// What is moved with the same settings, from the time of some bytes to that of others.
#[derive(Debug)]
struct Sample {
    from: Instant,
    last: Instant,
    longest_pause: Duration,
    bytes: usize,
}

#[derive(Clone, Copy, Debug)]
enum Trial {
    Cycle(u64),
    Threshold(usize),
}

impl Autotune {
    /// Begins with `start`. Settings that a variable has fixed, as `is_set` tells, are not tried.
    pub fn new(start: Settings, is_set: impl Fn(&str) -> bool) -> Self {
        let (cycle_is_set, threshold_is_set) =
            (is_set("HOROVOD_CYCLE_TIME"), is_set("HOROVOD_FUSION_THRESHOLD"));
        let cycles = CYCLES.into_iter().filter(|cycle| !cycle_is_set && *cycle != start.cycle_micros);
        let thresholds = DIVISORS.into_iter().filter(|_| !threshold_is_set && start.threshold > 0);
        let thresholds = thresholds.map(|divisor| Trial::Threshold(start.threshold / divisor));
        // The last is tried first.
        let untried: Vec<Trial> = cycles.map(Trial::Cycle).chain(thresholds).rev().collect();
        Self {
            best: start,
            best_rate: None,
            trial: start,
            is_done: untried.is_empty(),
            untried,
            warm: None,
            sample: None,
            least: MIN_SAMPLE_INTERVAL,
        }
    }

    /// `bytes` were moved until `now`. Returns other settings, if it is time for them. `None` for good after the last
    /// ones, which are the best.
    pub fn moved(&mut self, bytes: usize, now: Instant) -> Option<Settings> {
        // Time begins and ends with bytes: what passes before and after is not the settings'.
        if self.is_done || bytes == 0 || now < *self.warm.get_or_insert(now + WARM_UP_DELAY) {
            return None;
        }
        let new = Sample { from: now, last: now, longest_pause: Duration::ZERO, bytes: 0 };
        let Some(sample) = &mut self.sample else {
            self.sample = Some(new);
            return None;
        };
        sample.longest_pause = sample.longest_pause.max(now.saturating_duration_since(sample.last));
        sample.last = now;
        sample.bytes = sample.bytes.saturating_add(bytes);
        let elapsed = now.saturating_duration_since(sample.from);
        if elapsed < self.least {
            return None;
        }
        if sample.longest_pause > elapsed / 4 {
            self.least = (sample.longest_pause * PAUSES).clamp(MIN_SAMPLE_INTERVAL, MAX_SAMPLE_INTERVAL);
            self.sample = Some(new);
            return None;
        }
        let rate = sample.bytes as f64 / elapsed.as_secs_f64();
        self.measured(rate)
    }

    /// The trial's bytes a second. Goes on to the next one.
    fn measured(&mut self, rate: f64) -> Option<Settings> {
        tracing::info!(
            threshold = self.trial.threshold,
            cycle_us = self.trial.cycle_micros,
            rate,
            "autotune"
        );
        if self.best_rate.is_none_or(|best| rate > best * MARGIN) {
            (self.best, self.best_rate) = (self.trial, Some(rate));
        }
        (self.warm, self.sample, self.least) = (None, None, MIN_SAMPLE_INTERVAL);
        let before = self.trial;
        self.trial = match self.untried.pop() {
            Some(Trial::Cycle(cycle_micros)) => Settings { cycle_micros, ..self.best },
            Some(Trial::Threshold(threshold)) => Settings { threshold, ..self.best },
            None => {
                let Settings { threshold, cycle_micros } = self.best;
                tracing::info!(threshold, cycle_us = cycle_micros, "autotune has chosen");
                self.is_done = true;
                self.best
            }
        };
        (self.trial != before).then_some(self.trial)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the tuner for 300 s on a machine that moves so many bytes a second with given settings, each `period` and not
    /// while it `pauses`. Returns where it ends, and how many settings it has tried.
    fn run(
        mut tuner: Autotune,
        period: u64,
        pauses: impl Fn(u64) -> bool,
        rate: impl Fn(Settings) -> f64,
    ) -> (Settings, usize) {
        let (mut settings, begin, mut changes) = (tuner.best, Instant::now(), 0);
        for millis in 0..300_000 {
            let moves = millis % period == 0 && !pauses(millis);
            let bytes = if moves { rate(settings) * period as f64 / 1e3 } else { 0.0 };
            if let Some(next) = tuner.moved(bytes as usize, begin + Duration::from_millis(millis)) {
                settings = next;
                changes += 1;
            }
        }
        (settings, changes)
    }

    fn tuned(start: Settings, rate: impl Fn(Settings) -> f64) -> (Settings, usize) {
        run(Autotune::new(start, |_| false), 1, |_| false, rate)
    }

    const START: Settings = Settings { threshold: 64 << 20, cycle_micros: 1_000 };

    /// Best at 5 ms and 16 MiB.
    fn peaked(settings: Settings) -> f64 {
        let far = |value: f64, best: f64| (value / best).log2().abs();
        1e9 - 1e8 * far(settings.cycle_micros as f64, 5e3)
            - 1e8 * far(settings.threshold as f64, f64::from(16 << 20))
    }

    #[test]
    fn the_best_of_each_is_kept() {
        let (settings, changes) = tuned(START, peaked);
        assert_eq!(settings, Settings { threshold: 16 << 20, cycle_micros: 5_000 });
        assert!(changes <= 9, "{changes}");
    }

    #[test]
    fn what_a_variable_sets_is_not_tried() {
        let tuner = Autotune::new(START, |name| name == "HOROVOD_CYCLE_TIME");
        assert_eq!(run(tuner, 1, |_| false, peaked).0, Settings { threshold: 16 << 20, ..START });
        let tuner = Autotune::new(START, |name| name == "HOROVOD_FUSION_THRESHOLD");
        assert_eq!(run(tuner, 1, |_| false, peaked).0, Settings { cycle_micros: 5_000, ..START });
        assert_eq!(run(Autotune::new(START, |_| true), 1, |_| false, peaked), (START, 0));
    }

    #[test]
    fn pauses_are_not_measured_and_slow_steps_are() {
        let alike = |_| 1e9;
        let new = || Autotune::new(START, |_| false);
        // Nothing moves for the first 20 s; a pause comes in the first sample; evaluations of 3 s come at any time.
        assert_eq!(run(new(), 1, |millis| millis < 20_000, alike).0, START);
        assert_eq!(run(new(), 1, |millis| (1_500..4_500).contains(&millis), alike).0, START);
        for every in [41_000, 67_000, 90_000] {
            assert_eq!(run(new(), 1, |millis| millis % every < 3_000, alike).0, START, "every {every} ms");
        }
        let best = Settings { threshold: 16 << 20, cycle_micros: 5_000 };
        assert_eq!(run(new(), 2_000, |_| false, peaked).0, best, "steps of 2 s");
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
