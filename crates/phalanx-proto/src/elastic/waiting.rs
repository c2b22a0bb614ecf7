//! What a worker does while it waits for the next round, and when its round can no longer be used: pure.

use std::time::{Duration, Instant};

use super::members::{Clock, ElasticEnd, Entry, MembersState, Step, WorkerId};
use crate::error::{Error, Kind};
use crate::log::turn;
use crate::rank::Rank;

/// A worker that waits for the next round.
#[derive(Debug)]
pub struct Waiting {
    /// Its number now, and when it began to wait.
    me: WorkerId,
    before: WorkerId,
    /// The last round that it has left.
    left: u64,
    can_replay: bool,
    clock: Clock,
}

/// What the worker does.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// The job is over.
    Over(ElasticEnd),
    /// Ask to take part under a new number: the others have gone on without it.
    Rejoin,
    /// Append this entry, and look again: the worker has left a round whose group it has never had.
    Leave(Entry),
    /// Connect the group of this round, as a member.
    Enter {
        /// The round.
        round: u64,
        /// The worker's rank in it.
        rank: usize,
        /// Whether it was declared dead before, so that it has a new number and no step to replay.
        rejoined: bool,
    },
    /// Wait, and look again at this time if nothing has happened.
    Wait(Instant),
    /// Append that this round does not wait for other workers.
    LastCall(u64),
    /// Append that these members are gone, which have not left their round for so long.
    GiveUp(Vec<WorkerId>, Duration),
    /// Give up: [`too_few`] workers have come.
    TooFew {
        /// How many workers wait.
        there: usize,
        /// The smallest number of workers of a round.
        needed: u32,
        /// How long this worker has waited.
        after: Duration,
    },
}

impl Waiting {
    /// The worker `me` waits since it left round `left` (0: none), with or without a step to replay.
    pub fn new(me: WorkerId, left: u64, can_replay: bool, clock: Clock) -> Self {
        Self { me, before: me, left, can_replay, clock }
    }

    /// What tells the others that the worker has left its round; None if it is no member of it.
    pub fn ready(&self, state: &MembersState) -> Option<Entry> {
        let is_member = state.round() == self.left && state.rank(self.me).is_some();
        let Self { me: worker, left: round, can_replay, .. } = *self;
        is_member.then_some(Entry::Ready { round, worker, can_replay })
    }

    /// The worker takes part under this number now.
    pub fn rejoined(&mut self, me: WorkerId) {
        self.me = me;
    }

    /// What it does now. `is_given_up`: it was a member, and is not one any more.
    pub fn look(&mut self, state: &MembersState, is_given_up: bool, now: Instant) -> Next {
        if let Some(job_end) = state.job_end() {
            return Next::Over(job_end);
        }
        if is_given_up {
            self.can_replay = false;
            return Next::Rejoin;
        }
        let round = state.round();
        if round > self.left
            && let Some(rank) = state.rank(self.me)
        {
            if !state.is_gathering() {
                return Next::Enter { round, rank, rejoined: self.me != self.before };
            }
            // A member has left it before its group was connected.
            self.left = round;
            if let Some(ready) = self.ready(state) {
                return Next::Leave(ready);
            }
        }
        self.clock.set_turn(turn(state.waiting().position(|worker| worker.id == self.me)));
        match self.clock.look(state, now) {
            Step::Wait(until) => Next::Wait(until),
            Step::LastCall => Next::LastCall(round + 1),
            Step::GiveUp(late, after) => Next::GiveUp(late, after),
            Step::TooFew { there, needed, after } => Next::TooFew { there, needed, after },
        }
    }
}

/// The error of [`Next::TooFew`].
pub fn too_few(there: usize, needed: u32, after: Duration) -> Error {
    Error::timeout(format!(
        "{there} of at least {needed} workers have come within {:.1} s",
        after.as_secs_f64()
    ))
    .in_operation("rendezvous of the workers", None)
    .with_remedy(
        "see the launcher's output for why the others ended; with --max-restarts it replaces them, and --min-np says \
         with how few to go on",
    )
}

/// What a waiting worker tells the person who looks on.
pub fn waits_for(state: &MembersState) -> String {
    let needed = state.settings().map_or(1, |settings| settings.min);
    match state.outstanding().count() {
        0 => {
            let there = state.waiting().count();
            format!("this worker waits for others: {there} of at least {needed} have come")
        }
        held => format!("this worker waits for {held} others to leave the last group"),
    }
}

/// Why `round`, in which this worker has the rank `own`, can no longer be used: a member is gone, or the others are in a later round.
/// `me`: this worker's number, if it takes part; `host`: its host.
pub fn why_broken(
    state: &MembersState,
    round: u64,
    own: Rank,
    me: Option<WorkerId>,
    host: &str,
) -> Option<Error> {
    let lost = |rank: Rank, host: &str, what: String| {
        Error::new(Kind::PeerFailed, format!("rank {rank} ({host}) {what}")).with_peer(rank)
    };
    if round < state.round() {
        let what = "was given up by the others, who are in a later group".to_owned();
        return Some(lost(own, host, what));
    }
    let (rank, worker, why) = state.gone().next()?;
    let what = if Some(worker.id) == me { "was given up by the others" } else { "died" };
    let rank = Rank::new(u32::try_from(rank).unwrap_or(u32::MAX));
    Some(lost(rank, &worker.host, format!("{what}: {why}")))
}

#[cfg(test)]
mod tests {
    use super::super::members::{Departure, Settings, Worker};
    use super::*;
    use crate::log::Machine;

    const CALL: Duration = Duration::from_secs(1);
    const TIMEOUT: Duration = Duration::from_secs(60);

    fn worker(id: u64) -> Worker {
        Worker { id: WorkerId(id), host: format!("host{id}"), slot: id as u32, process: id as u32 }
    }

    fn settings() -> Settings {
        Settings { min: 2, max: 4, reset_limit: None }
    }

    fn join(state: &mut MembersState, id: u64) {
        state.apply(Entry::Join { worker: worker(id), settings: settings() }).unwrap();
    }

    fn gone(state: &mut MembersState, id: u64, by: u64) {
        let (worker, by) = (WorkerId(id), WorkerId(by));
        state.apply(Entry::Gone { worker, by, why: Departure::Died }).unwrap();
    }

    /// Three workers in round 1.
    fn running() -> MembersState {
        let mut state = MembersState::default();
        (1..=3).for_each(|id| join(&mut state, id));
        state.apply(Entry::LastCall { round: 1, nonce: 0 }).unwrap();
        assert_eq!(state.round(), 1);
        state
    }

    fn waiting(id: u64, left: u64, can_replay: bool) -> Waiting {
        Waiting::new(WorkerId(id), left, can_replay, Clock::new(CALL, CALL, TIMEOUT))
    }

    #[test]
    fn workers_call_the_first_round_when_enough_have_come() {
        let (mut state, start) = (MembersState::default(), crate::some_time());
        let mut first = waiting(1, 0, false);
        join(&mut state, 1);
        assert_eq!(first.ready(&state), None);
        assert_eq!(first.look(&state, false, start), Next::Wait(start + TIMEOUT));
        assert!(waits_for(&state).contains("1 of at least 2"));
        join(&mut state, 2);
        assert_eq!(first.look(&state, false, start), Next::Wait(start + CALL));
        assert_eq!(first.look(&state, false, start + CALL), Next::LastCall(1));
        state.apply(Entry::LastCall { round: 1, nonce: 0 }).unwrap();
        let entered = Next::Enter { round: 1, rank: 0, rejoined: false };
        assert_eq!(first.look(&state, false, start + CALL), entered);
    }

    #[test]
    fn of_many_that_wait_one_calls_the_round_and_the_next_only_if_it_does_not() {
        let (mut state, start, second) =
            (MembersState::default(), crate::some_time(), Duration::from_secs(1));
        (1..=3).for_each(|id| join(&mut state, id));
        let mut workers = [1, 2, 3].map(|id| waiting(id, 0, false));
        let mut call =
            |at| workers.each_mut().map(|worker| worker.look(&state, false, at) == Next::LastCall(1));
        assert_eq!(call(start), [false; 3]);
        assert_eq!(call(start + CALL), [true, false, false]);
        assert_eq!(call(start + CALL + second)[1..], [true, false]);
        assert_eq!(call(start + CALL + 2 * second)[2..], [true]);
    }

    #[test]
    fn of_many_that_wait_for_others_one_gives_them_up_and_the_next_only_if_it_does_not() {
        let (mut state, start, second) = (running(), crate::some_time(), Duration::from_secs(1));
        for id in [1, 2] {
            state.apply(Entry::Ready { round: 1, worker: WorkerId(id), can_replay: false }).unwrap();
        }
        let late = Next::GiveUp(vec![WorkerId(3)], TIMEOUT);
        let mut workers = [1, 2].map(|id| waiting(id, 1, false));
        let mut looks = |at| workers.each_mut().map(|worker| worker.look(&state, false, at));
        looks(start);
        assert_eq!(looks(start + TIMEOUT), [late, Next::Wait(start + TIMEOUT + second)]);
        let late = Next::GiveUp(vec![WorkerId(3)], TIMEOUT + second);
        assert_eq!(looks(start + TIMEOUT + second)[1..], [late]);
    }

    #[test]
    fn whoever_hears_that_others_were_given_up_waits_for_those_in_their_place() {
        let (mut state, start, second) =
            (MembersState::default(), crate::some_time(), Duration::from_secs(1));
        for id in 1..=3 {
            let settings = Settings { min: 3, ..settings() };
            state.apply(Entry::Join { worker: worker(id), settings }).unwrap();
        }
        state.apply(Entry::LastCall { round: 1, nonce: 0 }).unwrap();
        for id in [1, 2] {
            state.apply(Entry::Ready { round: 1, worker: WorkerId(id), can_replay: false }).unwrap();
        }
        let mut workers = [1, 2].map(|id| waiting(id, 1, false));
        let mut look = |state: &MembersState, at: Instant| {
            workers.each_mut().map(|worker| worker.look(state, false, at))
        };
        look(&state, start);
        let late = Next::GiveUp(vec![WorkerId(3)], TIMEOUT);
        assert_eq!(look(&state, start + TIMEOUT), [late, Next::Wait(start + TIMEOUT + second)]);
        gone(&mut state, 3, 1);
        let now = start + TIMEOUT + second / 2;
        assert_eq!(look(&state, now), [(); 2].map(|()| Next::Wait(now + TIMEOUT)));
        let too_few = || Next::TooFew { there: 2, needed: 3, after: TIMEOUT };
        assert_eq!(look(&state, now + TIMEOUT), [(); 2].map(|()| too_few()));
    }

    #[test]
    fn whoever_waits_alone_gives_up_and_says_so() {
        let (mut state, start) = (MembersState::default(), crate::some_time());
        let mut alone = waiting(1, 0, false);
        join(&mut state, 1);
        alone.look(&state, false, start);
        let given_up = Next::TooFew { there: 1, needed: 2, after: TIMEOUT };
        assert_eq!(alone.look(&state, false, start + TIMEOUT), given_up);
        let error = too_few(1, 2, TIMEOUT);
        assert!(error.is_timeout() && error.to_string().contains("1 of at least 2 workers"), "{error}");
    }

    #[test]
    fn a_round_that_broke_before_it_was_connected_is_left() {
        let (mut state, start) = (running(), crate::some_time());
        let mut second = waiting(2, 0, true);
        gone(&mut state, 3, 1);
        let ready = Entry::Ready { round: 1, worker: WorkerId(2), can_replay: true };
        assert_eq!(second.look(&state, false, start), Next::Leave(ready.clone()));
        state.apply(ready).unwrap();
        // The first has not left it yet, and is waited for.
        assert_eq!(second.look(&state, false, start), Next::Wait(start + TIMEOUT));
        assert!(waits_for(&state).contains("1 others to leave"));
        assert_eq!(second.look(&state, false, start + TIMEOUT), Next::GiveUp(vec![WorkerId(1)], TIMEOUT));
    }

    #[test]
    fn whoever_was_given_up_comes_back_under_a_new_number_and_replays_nothing() {
        let (mut state, start) = (running(), crate::some_time());
        let mut third = waiting(3, 1, true);
        gone(&mut state, 3, 1);
        assert_eq!(third.look(&state, true, start), Next::Rejoin);
        join(&mut state, 9);
        third.rejoined(WorkerId(9));
        for id in [1, 2] {
            state.apply(Entry::Ready { round: 1, worker: WorkerId(id), can_replay: false }).unwrap();
        }
        state.apply(Entry::LastCall { round: 2, nonce: 0 }).unwrap();
        let entered = Next::Enter { round: 2, rank: 2, rejoined: true };
        assert_eq!(third.look(&state, false, start), entered);
        state.apply(Entry::Done { round: 2, worker: WorkerId(1) }).unwrap();
        assert_eq!(third.look(&state, false, start), Next::Over(ElasticEnd::Done));
    }

    #[test]
    fn a_round_is_broken_when_a_member_is_gone_or_the_others_are_further() {
        let mut state = running();
        let broken = |state: &MembersState, round, own: u32, me: u64| {
            let error = why_broken(state, round, Rank::new(own), Some(WorkerId(me)), "here")?;
            Some((error.peer().unwrap().get(), error.to_string()))
        };
        assert_eq!(broken(&state, 1, 0, 1), None);
        gone(&mut state, 3, 1);
        let (peer, said) = broken(&state, 1, 0, 1).unwrap();
        assert!(peer == 2 && said.contains("rank 2 (host3) died"), "{said}");
        let (peer, said) = broken(&state, 1, 2, 3).unwrap();
        assert!(peer == 2 && said.contains("rank 2 (host3) was given up by the others"), "{said}");
        let (peer, said) = broken(&state, 0, 1, 2).unwrap();
        assert!(
            peer == 1 && said.contains("rank 1 (here) was given up by the others, who are in a later"),
            "{said}"
        );
    }
}
