//! When a waiting worker must act because time has passed: pure.

use std::time::{Duration, Instant};

use super::entry::WorkerId;
use super::state::MembersState;

/// A longer wait is as good as one without an end, and no instant is so far away that the clock cannot name it.
const TIMEOUT_LIMIT: Duration = Duration::from_secs(30 * 365 * 24 * 3600);

/// One worker's time-outs. They begin anew with each round that it waits for.
#[derive(Debug)]
pub struct Clock {
    /// How long to wait for more workers when there are enough: before the first round, for which all have to start,
    /// and before a later one.
    first_call: Duration,
    last_call: Duration,
    timeout: Duration,
    /// How much later this worker does what any of them may do for all.
    turn: Duration,
    /// The round that is waited for, since when, and since when there are enough workers.
    waits: Option<(u64, Instant)>,
    enough: Option<Instant>,
    /// Whether members had not left the last round at the last look.
    is_held: bool,
}

/// What the worker does now.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Wait, and look again at this time if nothing has happened.
    Wait(Instant),
    /// Append that the round does not wait for other workers.
    LastCall,
    /// Declare members dead that have not left their round for so long.
    GiveUp(Vec<WorkerId>, Duration),
    /// There are too few workers after so long.
    TooFew {
        /// How many workers wait.
        there: usize,
        /// The smallest number of workers of a round.
        needed: u32,
        /// How long this worker has waited.
        after: Duration,
    },
}

impl Clock {
    /// `first_call` and `last_call`: how long to wait for more workers once there are enough, before the first round and before a
    /// later one.
    /// `timeout`: how long to wait until there are enough.
    pub fn new(first_call: Duration, last_call: Duration, timeout: Duration) -> Self {
        let [first_call, last_call, timeout] =
            [first_call, last_call, timeout].map(|wait| wait.min(TIMEOUT_LIMIT));
        Self {
            first_call,
            last_call,
            timeout,
            turn: Duration::ZERO,
            waits: None,
            enough: None,
            is_held: false,
        }
    }

    /// From now on this worker calls a round, and gives others up, so much later. If all that wait did so at the same time, each would append
    /// what one has to say, and read what all have appended.
    pub fn set_turn(&mut self, turn: Duration) {
        self.turn = turn.min(TIMEOUT_LIMIT);
    }

    /// Called by a worker that waits for the next round.
    pub fn look(&mut self, state: &MembersState, now: Instant) -> Step {
        let next = state.round() + 1;
        if !state.is_gathering() {
            // A round has no time limit: a worker that comes to it waits for a commit or for a free slot.
            (self.waits, self.enough, self.is_held) = (None, None, false);
            return Step::Wait(now + self.timeout);
        }
        let is_held = state.outstanding().next().is_some();
        // The last of them has left, or was given up, perhaps by another worker: from now on others are waited for in its place.
        let is_set_free = std::mem::replace(&mut self.is_held, is_held) && !is_held;
        let since = match self.waits {
            Some((round, since)) if round == next && !is_set_free => since,
            _ => {
                self.enough = None;
                self.waits = Some((next, now));
                now
            }
        };
        let after = now.saturating_duration_since(since);
        if state.has_enough() {
            let enough = *self.enough.get_or_insert(now);
            let call = self.turn + if next == 1 { self.first_call } else { self.last_call };
            if now.saturating_duration_since(enough) < call {
                return Step::Wait(enough + call);
            }
            // Repeated after the same time, if the entry comes too late because the members have changed.
            self.enough = Some(now);
            return Step::LastCall;
        }
        self.enough = None;
        if after < self.timeout {
            return Step::Wait(since + self.timeout);
        }
        let outstanding: Vec<WorkerId> = state.outstanding().collect();
        if !outstanding.is_empty() && after < self.timeout + self.turn {
            return Step::Wait(since + self.timeout + self.turn);
        }
        self.waits = Some((next, now));
        if !outstanding.is_empty() {
            return Step::GiveUp(outstanding, after);
        }
        let needed = state.settings().map_or(1, |settings| settings.min);
        Step::TooFew { there: state.waiting().count(), needed, after }
    }
}
