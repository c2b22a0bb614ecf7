//! For how long a rank polls a peer's connection before it sleeps: pure.
//!
//! Data in flight, on one host or on a near network, arrives sooner than a sleeping thread wakes. So a rank polls a peer for [`PROMPT_LIMIT`], if the
//! last wait for that peer was no longer than this. Who is late is waited for asleep, and polled again now and then: a sleeping rank measures
//! also how long it takes itself to wake.

use std::time::{Duration, Instant};

/// The longest wait for a prompt peer: longer than a sleeping peer takes to wake, which is some 50 us in a virtual machine. Of two ranks that have both
/// fallen asleep each finds the other late otherwise, and neither polls again.
const PROMPT_LIMIT: Duration = Duration::from_micros(200);
/// After so many polls in one wait the rank yields its processor between two polls. The peer may be on the same processor, if other programs
/// take the rest.
const POLLS: u32 = 10;
/// A late peer is polled in one of so many waits.
const RETRY: u8 = 8;
/// The most polls of a thread in a row. A system call that waits comes between them, which checks the deadline: data that trickles must not put
/// that off.
const MAX_POLLS: u32 = 4096;

/// Whether a rank polls for one peer.
#[derive(Default)]
pub(crate) struct Polling {
    /// In how many waits for that peer the rank sleeps at once before it polls again.
    asleep: u8,
}

/// A wait for a peer: for what it sends, or for room for what it is sent.
pub(crate) struct Wait {
    began: Instant,
    polls: u32,
}

/// What a rank does in a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Poll,
    /// It lets others have its processor first.
    YieldAndPoll,
    Sleep,
}

impl Polling {
    /// What a rank does in `wait`. `in_a_row` counts the polls of its thread since that last slept.
    pub fn next(&self, wait: &mut Wait, in_a_row: &mut u32, now: Instant) -> Next {
        if self.asleep > 0 || !wait.is_prompt(now) || *in_a_row >= MAX_POLLS {
            *in_a_row = 0;
            return Next::Sleep;
        }
        *in_a_row += 1;
        wait.polls += 1;
        if wait.polls <= POLLS { Next::Poll } else { Next::YieldAndPoll }
    }

    /// What `wait` was for has come.
    pub fn end(&mut self, wait: &Wait, now: Instant) {
        self.asleep = match self.asleep {
            _ if wait.is_prompt(now) => 0,
            0 => RETRY - 1,
            waits => waits - 1,
        };
    }
}

impl Wait {
    pub fn begin(now: Instant) -> Self {
        Self { began: now, polls: 0 }
    }

    fn is_prompt(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.began) <= PROMPT_LIMIT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATE_DELAY: Duration = Duration::from_millis(1);

    /// How often the rank polls in a wait that takes so long, with a microsecond between two polls.
    fn wait(polling: &mut Polling, lasts: Duration) -> usize {
        let began = Instant::now();
        let mut wait = Wait::begin(began);
        let moments =
            (0..).map(|step| began + Duration::from_micros(step)).take_while(|now| *now < began + lasts);
        let polls = moments.take_while(|now| polling.next(&mut wait, &mut 0, *now) != Next::Sleep).count();
        polling.end(&wait, began + lasts);
        polls
    }

    #[test]
    fn a_prompt_peer_is_polled_and_a_late_one_now_and_then() {
        let mut polling = Polling::default();
        let within = Duration::from_micros(20);
        assert_eq!([wait(&mut polling, within), wait(&mut polling, within)], [20, 20]);
        assert_eq!(wait(&mut polling, LATE_DELAY), PROMPT_LIMIT.as_micros() as usize + 1);
        let polled = (0..2 * usize::from(RETRY)).filter(|_| wait(&mut polling, LATE_DELAY) > 0).count();
        assert_eq!(polled, 2);
        // A sleeping rank finds that it is prompt again.
        assert_eq!([wait(&mut polling, within), wait(&mut polling, within)], [0, 20]);
    }

    #[test]
    fn a_rank_yields_after_a_few_polls() {
        let polling = Polling::default();
        let now = Instant::now();
        let mut wait = Wait::begin(now);
        let all: Vec<Next> = (0..POLLS + 2).map(|_| polling.next(&mut wait, &mut 0, now)).collect();
        assert_eq!(all.iter().filter(|next| **next == Next::Poll).count(), POLLS as usize);
        assert_eq!(all.last(), Some(&Next::YieldAndPoll));
    }

    #[test]
    fn data_that_trickles_lets_a_rank_look_at_the_deadline() {
        let mut polling = Polling::default();
        let (now, mut in_a_row, mut sleeps) = (Instant::now(), 0, 0);
        for _ in 0..3 * MAX_POLLS {
            let mut wait = Wait::begin(now);
            sleeps += u32::from(polling.next(&mut wait, &mut in_a_row, now) == Next::Sleep);
            polling.end(&wait, now);
        }
        assert_eq!(sleeps, 2);
    }
}
