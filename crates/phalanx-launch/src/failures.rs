//! Which failures of something that is tried again and again, for weeks, a person hears of: pure.

use std::time::{Duration, Instant};

/// The shortest time between two warnings.
const WARNING_INTERVAL: Duration = Duration::from_secs(600);

/// A person hears of one failure of each row, but not of each of many short rows.
#[derive(Debug, Default)]
pub(super) struct Failures {
    /// Whether a person has heard of the row that lasts.
    is_told: bool,
    told_at: Option<Instant>,
}

impl Failures {
    /// Whether a person should hear of a failure now. If so, it counts as told.
    pub(super) fn is_worth_telling(&mut self, now: Instant) -> bool {
        let is_quiet = self.told_at.is_none_or(|at| now.saturating_duration_since(at) >= WARNING_INTERVAL);
        let tells = !self.is_told && is_quiet;
        if tells {
            (self.is_told, self.told_at) = (true, Some(now));
        }
        tells
    }

    pub(super) fn is_told(&self) -> bool {
        self.is_told
    }

    /// The row has ended.
    pub(super) fn end(&mut self) {
        self.is_told = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_now_and_then_is_told_of_now_and_then() {
        let (mut failures, start) = (Failures::default(), Instant::now());
        // Every third try fails, for some time; and then all do.
        let told = (0..7200).filter(|second| {
            let now = start + Duration::from_secs(*second);
            if *second < 1300 && second % 3 > 0 {
                failures.end();
                return false;
            }
            failures.is_worth_telling(now)
        });
        assert_eq!(told.collect::<Vec<u64>>(), [0, 600, 1200, 1800]);
    }
}
