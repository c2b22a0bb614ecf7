//! A slot of an elastic job: its worker, and the pause before the next one. Pure.
//!
//! A slot is not a rank: after a death the ranks are numbered again without gaps. The device, the log file and the
//! prefix of a worker's lines belong to the slot in which the launcher has started it.

use std::time::{Duration, Instant};

/// A worker that fails sooner after its start has crashed: the next one may well crash too.
const CRASH_LIMIT: Duration = Duration::from_secs(2);
/// After so many crashes in a row the slot is not filled again.
const GIVEN_UP: u32 = 4;
/// How long the slot stays empty after the second crash in a row; after the third it is twice as long.
const RESTART_DELAY: Duration = Duration::from_secs(1);

/// A slot: it holds one worker, and after it its replacements.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// What has become of its worker.
    pub state: SlotState,
    /// Whether its worker came to a job that had begun, and so gets the job's state from others.
    pub is_late: bool,
    backoff: CrashBackoff,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
/// What has become of a slot's worker.
pub enum SlotState {
    /// Its worker runs.
    Running {
        /// When it was started; after its launcher has answered, when that was.
        since: Instant,
    },
    /// Its worker has failed, and is replaced at this time.
    Restarting {
        /// When the next worker is due.
        at: Instant,
    },
    /// Its worker has failed, and the driver has not decided yet whether to replace it.
    Undecided,
    /// Its worker has ended with success.
    Succeeded,
    /// Its worker has failed, and is not replaced.
    Empty,
}

impl Slot {
    /// As many slots, whose workers start now.
    pub fn several(count: usize, now: Instant) -> Vec<Self> {
        let state = SlotState::Running { since: now };
        vec![Self { state, is_late: false, backoff: CrashBackoff::default() }; count]
    }

    /// Its worker has failed, and is not replaced yet. Returns how long to wait before that; `None` if the slot's
    /// workers have crashed too often.
    pub fn fail(&mut self, now: Instant) -> Option<Duration> {
        let lived = match self.state {
            SlotState::Running { since } => now.saturating_duration_since(since),
            _ => Duration::ZERO,
        };
        self.state = SlotState::Empty;
        self.backoff.failed(lived)
    }

    /// Its next worker starts, if it is due.
    pub fn start_if_due(&mut self, now: Instant) -> bool {
        let is_due = self.due_at().is_some_and(|until| until <= now);
        if is_due {
            self.state = SlotState::Running { since: now };
            self.is_late = true;
        }
        is_due
    }

    /// When its next worker is due, if there will be one.
    pub fn due_at(&self) -> Option<Instant> {
        match self.state {
            SlotState::Restarting { at } => Some(at),
            _ => None,
        }
    }

    /// Whether its worker may hold the job's state: it was there from the start, or is no longer new.
    pub fn may_hold_state(&self, now: Instant) -> bool {
        match self.state {
            SlotState::Running { since } => {
                !self.is_late || now.saturating_duration_since(since) >= CRASH_LIMIT
            }
            _ => false,
        }
    }

    /// Whether it has a worker that has not ended.
    pub fn is_running(&self) -> bool {
        matches!(self.state, SlotState::Running { .. })
    }
}

/// The crashes in a row of one slot's workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct CrashBackoff(u32);

impl CrashBackoff {
    /// A worker has failed after running for `lived`. Returns how long to wait before the next start; `None` if there
    /// is none.
    fn failed(&mut self, lived: Duration) -> Option<Duration> {
        self.0 = if lived < CRASH_LIMIT { self.0.saturating_add(1) } else { 0 };
        match self.0 {
            0 | 1 => Some(Duration::ZERO),
            quick @ 2..GIVEN_UP => Some(RESTART_DELAY * (1 << (quick - 2))),
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
        assert_eq!(backoff.failed(CRASH_LIMIT), Some(Duration::ZERO));
        assert_eq!(backoff.failed(Duration::ZERO), Some(Duration::ZERO));
    }
}
