//! The clock: how long a call takes, and when that has been measured often enough.

use std::time::{Duration, Instant};

use phalanx::{ProcessGroup, ReduceOp, Result};
use rustix::time::{ClockId, clock_gettime};

/// Warming up takes so many seconds at least, and so many if the times do not settle.
const WARM_UP: std::ops::Range<f64> = 0.1..1.0;
/// Times have settled when two runs of calls differ by less than this part.
const SETTLED: f64 = 0.1;
/// As long as a run of warm-up calls should take, so that it can be compared with the one before.
const RUN: f64 = 0.02;
/// A size is timed for about so many seconds, in so many samples.
const TIMED: f64 = 0.3;
const SAMPLES: std::ops::RangeInclusive<f64> = 8.0..=30_000.0;
/// A sample has so many calls that it takes so many seconds. Reading the clock takes some 50 ns.
const SAMPLE: f64 = 5e-6;

/// The numbers of calls, where the user has given them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    pub(crate) warm_up: Option<u32>,
    pub(crate) timed: Option<u32>,
}

/// Seconds for one call, of the rank for which it takes longest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) p99: f64,
}

impl Times {
    /// Times `call`, which every rank must time together.
    pub(crate) fn of(
        group: &ProcessGroup,
        counts: Counts,
        mut call: impl FnMut() -> Result<()>,
    ) -> Result<Self> {
        let each = warm_up(group, counts.warm_up, &mut call)?;
        let calls = (SAMPLE / each).ceil().clamp(1.0, 1000.0);
        let samples = (TIMED / (each * calls)).clamp(*SAMPLES.start(), *SAMPLES.end());
        let calls = calls as u32;
        let mut left = counts.timed.unwrap_or(samples as u32 * calls);
        let mut times = Vec::with_capacity(left.div_ceil(calls) as usize);
        group.barrier()?;
        while left > 0 {
            let sample = calls.min(left);
            times.push(run(sample, &mut call)? / f64::from(sample));
            left -= sample;
        }
        times.sort_by(f64::total_cmp);
        let mut slowest = [50, 0, 99].map(|percent| percentile(&times, percent));
        group.all_reduce(&mut slowest, ReduceOp::Max)?;
        let [median, min, p99] = slowest;
        Ok(Self { median, min, p99 })
    }
}

/// The time that `percent` of these times, in ascending order, do not exceed; NaN if there are none.
pub(crate) fn percentile(times: &[f64], percent: usize) -> f64 {
    let at = (times.len() * percent / 100).min(times.len().saturating_sub(1));
    times.get(at).copied().unwrap_or(f64::NAN)
}

/// The time on the clock that all processes of a host share.
pub(crate) fn monotonic() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Calls until caches are warm and processors awake; returns the seconds for one call, the same on every rank.
///
/// Of a call that is long, two are enough. The first ones of a process are slow for some tenths of a second, until the
/// kernel has given each rank a processor of its own.
fn warm_up(group: &ProcessGroup, count: Option<u32>, call: &mut impl FnMut() -> Result<()>) -> Result<f64> {
    let (mut calls, mut total, mut before) = (1, 0.0, f64::INFINITY);
    if let Some(count) = count {
        run(count, call)?;
    }
    loop {
        let mut elapsed = [run(calls, call)?];
        // All ranks must come to the same decision.
        group.all_reduce(&mut elapsed, ReduceOp::Max)?;
        let [elapsed] = elapsed;
        let each = elapsed / f64::from(calls);
        total += elapsed;
        let settled = (each / before - 1.0).abs() < SETTLED;
        if count.is_some() || total > WARM_UP.end || (total > WARM_UP.start && settled) {
            return Ok(each.max(f64::MIN_POSITIVE));
        }
        before = each;
        if elapsed < RUN {
            calls *= 2;
        }
    }
}

/// The seconds that so many calls take.
fn run(calls: u32, call: &mut impl FnMut() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    for _ in 0..calls {
        call()?;
    }
    Ok(start.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use phalanx::WorldSize;

    use super::*;

    #[test]
    fn as_many_calls_are_timed_as_were_asked_for_however_short_they_are() {
        let groups = ProcessGroup::in_process(WorldSize::ONE).unwrap();
        for timed in [1, 7] {
            let mut calls = 0;
            let counts = Counts { warm_up: Some(3), timed: Some(timed) };
            let call = || {
                calls += 1;
                Ok(())
            };
            Times::of(&groups[0], counts, call).unwrap();
            // One more says how long a call takes.
            assert_eq!(calls, 3 + 1 + timed);
        }
    }

    #[test]
    fn so_many_times_are_not_exceeded() {
        let times: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!([0, 50, 99, 100].map(|percent| percentile(&times, percent)), [1.0, 51.0, 100.0, 100.0]);
        assert_eq!([0, 50, 99].map(|percent| percentile(&[7.0], percent)), [7.0; 3]);
        assert!(percentile(&[], 50).is_nan());
    }
}
