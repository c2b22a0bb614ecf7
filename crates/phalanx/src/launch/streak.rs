//! How long a place stays empty whose workers fail one after the other: pure.

use std::time::Duration;

/// A worker that fails sooner after its start has failed at once: another start may well end in the same way.
const QUICK: Duration = Duration::from_secs(2);
/// How often in a row a worker may fail at once before its place is given up.
const GIVEN_UP: u32 = 4;
/// How long a place stays empty after the second quick failure in a row; after the third it is twice as long.
const PAUSE: Duration = Duration::from_secs(1);

/// The failures in a row of one place's workers that had only just started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Streak(u32);

impl Streak {
    /// A worker has failed that had lived so long: how long to wait before the next, or none if that is of no use.
    pub(super) fn failed(&mut self, lived: Duration) -> Option<Duration> {
        self.0 = if lived < QUICK { self.0.saturating_add(1) } else { 0 };
        match self.0 {
            0 | 1 => Some(Duration::ZERO),
            quick @ 2..GIVEN_UP => Some(PAUSE * (1 << (quick - 2))),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_fails_at_once_again_and_again_waits_longer_and_is_given_up() {
        let mut streak = Streak::default();
        let pauses = [Some(0), Some(1), Some(2), None, None].map(|wait| wait.map(Duration::from_secs));
        for pause in pauses {
            assert_eq!(streak.failed(Duration::from_secs(1)), pause);
        }
        assert_eq!(streak.failed(QUICK), Some(Duration::ZERO));
        assert_eq!(streak.failed(Duration::ZERO), Some(Duration::ZERO));
    }
}
