//! What the time that passes asks of a worker that waits for a round: pure.

use std::time::{Duration, Instant};

use super::entry::WorkerId;
use super::state::MembersState;

/// One worker's patience. It begins anew with each round that is waited for.
#[derive(Debug)]
pub(crate) struct Clock {
    /// How long to wait for more when there are enough: before the first round, for which all have to start, and later.
    first_call: Duration,
    last_call: Duration,
    timeout: Duration,
    /// The round that is waited for, since when, and since when there are enough.
    waits: Option<(u64, Instant)>,
    enough: Option<Instant>,
}

/// What to do now.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Wait, and look again at this time if nothing has happened.
    Wait(Instant),
    /// Append that no other worker is waited for.
    LastCall,
    /// Give up members that do not leave their round, after so long.
    GiveUp(Vec<WorkerId>, Duration),
    /// There are not enough, after so long: of how many how many.
    TooFew { there: usize, needed: u32, after: Duration },
}

impl Clock {
    pub(crate) fn new(first_call: Duration, last_call: Duration, timeout: Duration) -> Self {
        Self { first_call, last_call, timeout, waits: None, enough: None }
    }

    /// Called by a worker that waits for the next round.
    pub(crate) fn look(&mut self, state: &MembersState, now: Instant) -> Step {
        let next = state.round() + 1;
        if !state.is_gathering() {
            // A round may take its time: who comes to it waits for a commit, or for a place.
            (self.waits, self.enough) = (None, None);
            return Step::Wait(now + self.timeout);
        }
        let since = match self.waits {
            Some((round, since)) if round == next => since,
            _ => {
                self.enough = None;
                self.waits = Some((next, now));
                now
            }
        };
        let after = now.saturating_duration_since(since);
        if state.has_enough() {
            let enough = *self.enough.get_or_insert(now);
            let call = if next == 1 { self.first_call } else { self.last_call };
            if now.saturating_duration_since(enough) < call {
                return Step::Wait(enough + call);
            }
            // Once more after the same time, should this one come too late for a world that has changed.
            self.enough = Some(now);
            return Step::LastCall;
        }
        self.enough = None;
        if after < self.timeout {
            return Step::Wait(since + self.timeout);
        }
        self.waits = Some((next, now));
        let outstanding: Vec<WorkerId> = state.outstanding().collect();
        if !outstanding.is_empty() {
            return Step::GiveUp(outstanding, after);
        }
        let needed = state.settings().map_or(1, |settings| settings.min);
        Step::TooFew { there: state.waiting().count(), needed, after }
    }
}
