//! Crash-loop backoff: how long a slot stays empty whose workers crash soon after their start, one after the other. Pure.

use std::time::Duration;

/// A worker that fails sooner after its start counts as a crash: the next one may well crash too.
const QUICK: Duration = Duration::from_secs(2);
/// After so many crashes in a row the slot is given up.
const GIVEN_UP: u32 = 4;
/// How long the slot stays empty after the second crash in a row; after the third twice as long.
const PAUSE: Duration = Duration::from_secs(1);

/// The crashes in a row of one slot's workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CrashBackoff(u32);

impl CrashBackoff {
    /// A worker has failed after it had run for `lived`. Returns how long to wait before the next start; `None` gives up.
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
    fn each_crash_in_a_row_waits_longer_until_the_slot_is_given_up() {
        let mut backoff = CrashBackoff::default();
        let pauses = [Some(0), Some(1), Some(2), None, None].map(|wait| wait.map(Duration::from_secs));
        for pause in pauses {
            assert_eq!(backoff.failed(Duration::from_secs(1)), pause);
        }
        assert_eq!(backoff.failed(QUICK), Some(Duration::ZERO));
        assert_eq!(backoff.failed(Duration::ZERO), Some(Duration::ZERO));
    }
}
