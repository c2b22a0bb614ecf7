//! Many workers that die, come and are late, each with its own view of the log.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::log::Machine;

const FIRST_CALL_DELAY: Duration = Duration::from_secs(30);
const LAST_CALL_DELAY: Duration = Duration::from_secs(1);
const TIMEOUT: Duration = Duration::from_secs(600);

fn worker(id: u64) -> Worker {
    Worker { id: WorkerId(id), host: "here".to_owned(), slot: id as u32, process: 100 + id as u32 }
}

fn settings(min: u32, max: u32) -> Settings {
    Settings { min, max, reset_limit: None }
}

fn join(id: u64, settings: Settings) -> Entry {
    Entry::Join { worker: worker(id), settings }
}

fn gone(id: u64) -> Entry {
    Entry::Gone { worker: WorkerId(id), by: WorkerId(99), why: Departure::Died }
}

fn ready(round: u64, id: u64) -> Entry {
    Entry::Ready { round, worker: WorkerId(id), can_replay: false }
}

fn holding(round: u64, id: u64) -> Entry {
    Entry::Ready { round, worker: WorkerId(id), can_replay: true }
}

fn last_call(round: u64) -> Entry {
    Entry::LastCall { round, nonce: 0 }
}

fn after(entries: impl IntoIterator<Item = Entry>) -> MembersState {
    let mut state = MembersState::default();
    entries.into_iter().for_each(|entry| state.apply(entry).unwrap());
    state
}

fn members(state: &MembersState) -> Vec<u64> {
    state.members().map(|worker| worker.id.0).collect()
}

#[test]
fn a_full_world_begins_at_once_and_survivors_come_first() {
    let all = settings(2, 3);
    let mut state = after([join(5, all), join(3, all)]);
    assert_eq!(state.round(), 0);
    state.apply(join(4, all)).unwrap();
    assert_eq!((state.round(), members(&state)), (1, vec![5, 3, 4]));
    // The replacement comes before the survivors have left.
    for entry in [gone(3), join(9, all), ready(1, 4)] {
        state.apply(entry).unwrap();
        assert_eq!(state.round(), 1);
    }
    state.apply(ready(1, 5)).unwrap();
    assert_eq!((state.round(), members(&state)), (2, vec![5, 4, 9]));
}

#[test]
fn a_last_call_counts_only_when_all_have_left() {
    let all = settings(1, 3);
    let mut state = after([join(1, all), join(2, all), join(3, all), gone(2), ready(1, 1)]);
    state.apply(last_call(2)).unwrap();
    assert_eq!(state.round(), 1, "3 still works");
    state.apply(ready(1, 3)).unwrap();
    state.apply(last_call(1)).unwrap();
    assert_eq!(state.round(), 1, "an old one");
    state.apply(last_call(2)).unwrap();
    assert_eq!((state.round(), members(&state)), (2, vec![1, 3]));
}

#[test]
fn survivors_who_hold_a_step_wait_for_nobody() {
    let all = settings(2, 3);
    let start = [join(1, all), join(2, all), join(3, all), gone(2), join(9, all), holding(1, 3)];
    let mut state = after(start.clone());
    assert_eq!(state.round(), 1, "1 still works");
    state.apply(holding(1, 1)).unwrap();
    assert_eq!((state.round(), members(&state)), (2, vec![1, 3]));
    assert!(state.workers_wait(), "9 comes in at the next commit");
    // One that has nothing in its hands: all begin anew, and so may the newcomer.
    let mut state = after(start);
    state.apply(ready(1, 1)).unwrap();
    assert_eq!((state.round(), members(&state)), (2, vec![1, 3, 9]));
    // Too few wait for others.
    let all = settings(3, 3);
    let mut state = after([join(1, all), join(2, all), join(3, all), gone(2), holding(1, 1), holding(1, 3)]);
    assert_eq!(state.round(), 1);
    state.apply(join(9, all)).unwrap();
    assert_eq!(members(&state), [1, 3, 9]);
}

#[test]
fn who_waits_is_awaited_only_while_there_is_room() {
    let all = settings(1, 2);
    let mut state = after([join(1, all), last_call(1)]);
    assert!(!state.workers_wait());
    state.apply(join(2, all)).unwrap();
    assert!(state.workers_wait());
    state.apply(ready(1, 1)).unwrap();
    assert_eq!(members(&state), [1, 2]);
    state.apply(join(3, all)).unwrap();
    assert!(!state.workers_wait(), "it is a spare");
    for entry in [gone(1), ready(2, 2)] {
        state.apply(entry).unwrap();
    }
    assert_eq!((state.round(), members(&state)), (3, vec![2, 3]));
}

#[test]
fn who_was_given_up_stays_so_under_its_number() {
    let all = settings(1, 2);
    let mut state = after([join(1, all), join(2, all), gone(2), ready(1, 2)]);
    assert!(!state.is_present(WorkerId(2)));
    state.apply(ready(1, 1)).unwrap();
    state.apply(last_call(2)).unwrap();
    assert_eq!(members(&state), [1]);
    state.apply(Entry::Done { round: 2, worker: WorkerId(2) }).unwrap();
    assert_eq!(state.job_end(), None);
    state.apply(Entry::Done { round: 2, worker: WorkerId(1) }).unwrap();
    assert_eq!(state.job_end(), Some(ElasticEnd::Done));
    assert!(state.apply(join(3, all)).unwrap_err().contains("over"));
}

#[test]
fn a_process_that_has_ended_is_gone_wherever_it_waited() {
    let all = settings(2, 3);
    let mut state = after([join(1, all), join(2, all), join(3, all), join(4, all), ready(1, 1), ready(1, 2)]);
    // That of another process of the slot says nothing of this one.
    for (slot, process) in [(3, 99), (4, 104), (3, 103)] {
        state.apply(Entry::Exited { slot, process, nonce: 0 }).unwrap();
        assert_eq!(state.round(), 1);
    }
    state.apply(last_call(2)).unwrap();
    assert_eq!(members(&state), [1, 2]);
}

#[test]
fn a_round_begins_when_all_have_come_who_can() {
    let all = settings(2, 9);
    let expected = |workers| Entry::Expected { change: 0, workers };
    let mut state = after([expected(3), join(1, all), join(2, all)]);
    assert_eq!(state.round(), 0);
    state.apply(join(3, all)).unwrap();
    assert_eq!((state.round(), members(&state)), (1, vec![1, 2, 3]));
    // One is lost for good, and the launchers say so after the others have left: with those who are left, at once.
    for entry in [gone(2), ready(1, 1), ready(1, 3)] {
        state.apply(entry).unwrap();
        assert_eq!(state.round(), 1);
    }
    state.apply(expected(2)).unwrap();
    assert_eq!((state.round(), members(&state)), (2, vec![1, 3]));
    // Fewer than the least, or more than the most, are expected in vain.
    for entry in [expected(1), gone(3), ready(2, 1)] {
        state.apply(entry).unwrap();
    }
    assert_eq!(state.round(), 2);
    let mut state = after([expected(4), join(1, settings(1, 2)), join(2, settings(1, 2))]);
    assert_eq!(state.round(), 1);
    state.apply(expected(1)).unwrap();
    assert_eq!(state.round(), 1, "a round that runs goes on");
}

#[test]
fn other_settings_are_refused_and_too_many_rounds_end_the_job() {
    let limited = Settings { min: 1, max: 1, reset_limit: Some(1) };
    let mut state = MembersState::default();
    assert!(state.apply(join(9, settings(3, 2))).unwrap_err().contains("not a valid range"));
    state.apply(join(1, limited)).unwrap();
    assert!(state.apply(join(2, settings(1, 1))).unwrap_err().contains("reset limit"));
    for (dead, next) in [(1, 2), (2, 3)] {
        state.apply(gone(dead)).unwrap();
        assert_eq!(state.job_end(), None);
        state.apply(join(next, limited)).unwrap();
    }
    assert_eq!((state.round(), state.job_end()), (2, Some(ElasticEnd::TooManyRounds)));
}

#[test]
fn the_clock_waits_for_more_then_calls_and_gives_up_who_is_late() {
    let mut clock = Clock::new(FIRST_CALL_DELAY, LAST_CALL_DELAY, TIMEOUT);
    let (start, all) = (crate::some_time(), settings(2, 3));
    let mut state = after([join(1, all)]);
    assert_eq!(clock.look(&state, start), Step::Wait(start + TIMEOUT));
    state.apply(join(2, all)).unwrap();
    let second = start + Duration::from_secs(1);
    assert_eq!(clock.look(&state, second), Step::Wait(second + FIRST_CALL_DELAY));
    assert_eq!(clock.look(&state, second + FIRST_CALL_DELAY), Step::LastCall);
    state.apply(last_call(1)).unwrap();
    // A round that runs is nobody's delay.
    assert_eq!(clock.look(&state, start + 5 * TIMEOUT), Step::Wait(start + 6 * TIMEOUT));
    state.apply(ready(1, 1)).unwrap();
    let now = start + 7 * TIMEOUT;
    assert_eq!(clock.look(&state, now), Step::Wait(now + TIMEOUT));
    assert_eq!(clock.look(&state, now + TIMEOUT), Step::GiveUp(vec![WorkerId(2)], TIMEOUT));
    state.apply(gone(2)).unwrap();
    let now = now + TIMEOUT;
    assert_eq!(clock.look(&state, now), Step::Wait(now + TIMEOUT));
    let few = Step::TooFew { there: 1, needed: 2, after: TIMEOUT };
    assert_eq!(clock.look(&state, now + TIMEOUT), few);
}

#[test]
fn who_would_wait_for_ever_waits_for_a_time_that_the_clock_has() {
    let mut clock = Clock::new(Duration::MAX, Duration::MAX, Duration::MAX);
    let (start, all) = (crate::some_time(), settings(2, 3));
    let mut state = MembersState::default();
    // Too few, enough, and a round that runs.
    for entry in [join(1, all), join(2, all), last_call(1)] {
        state.apply(entry).unwrap();
        let step = clock.look(&state, start);
        assert!(matches!(step, Step::Wait(until) if until > start), "{step:?}");
    }
}

#[test]
fn each_member_is_watched_by_one_and_each_newcomer_by_the_first() {
    let all = settings(1, 3);
    let mut state = after([join(1, all), join(2, all), join(3, all), join(4, all)]);
    let watched = |state: &MembersState, id| -> Vec<u64> {
        state.watched_by(WorkerId(id)).into_iter().map(|other| other.0).collect()
    };
    assert_eq!([1, 2, 3].map(|id| watched(&state, id)), [vec![2, 4], vec![3], vec![1]]);
    // If all die, somebody must say so.
    assert_eq!(watched(&state, 4), [1, 2, 3]);
    state.apply(gone(2)).unwrap();
    assert_eq!(watched(&state, 1), [3, 4]);
}

#[test]
fn among_many_that_wait_a_few_watch_all_and_each_is_watched_by_a_few() {
    let all = settings(1, 200);
    let mut state = after((1..200).map(|id| join(id, all)));
    let count = |state: &MembersState, id| state.watched_by(WorkerId(id)).len();
    assert_eq!([1, 2, 3, 4, 100, 199].map(|id| count(&state, id)), [198, 198, 198, 4, 4, 4]);
    let watchers = (1..200).filter(|id| state.watched_by(WorkerId(*id)).contains(&WorkerId(100)));
    assert_eq!(watchers.count(), 3 + 4);
    // While a round runs, its members do not look for all.
    state.apply(last_call(1)).unwrap();
    (200..210).for_each(|id| state.apply(join(id, all)).unwrap());
    assert_eq!([200, 201, 202, 203, 209].map(|id| count(&state, id)), [208, 208, 208, 4, 4]);
    assert_eq!([1, 2].map(|id| count(&state, id)), [1 + 10, 1]);
}

/// What a simulated worker does next.
#[derive(Clone, Copy, Debug)]
enum Move {
    /// One of the workers reads on in the log, or does what it finds there.
    Step(usize),
    /// One dies; others may say so, now or later.
    Die(usize),
    /// A new one comes.
    Come,
    /// Somebody says of another that it is gone, rightly or not.
    Accuse(usize, usize),
    /// Time passes for one that waits.
    Call(usize),
    /// The launchers say how many there are, rightly or not.
    Expect(u32),
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        8 => (0..8usize).prop_map(Move::Step),
        1 => (0..8usize).prop_map(Move::Die),
        1 => Just(Move::Come),
        1 => (0..8usize, 0..8usize).prop_map(|(by, whom)| Move::Accuse(by, whom)),
        1 => (0..8usize).prop_map(Move::Call),
        1 => (0..8u32).prop_map(Move::Expect),
    ];
    proptest::collection::vec(one, 0..300)
}

/// A worker as it sees the log.
struct Sim {
    id: u64,
    state: MembersState,
    read: usize,
    /// The round whose group it uses.
    inside: Option<u64>,
    alive: bool,
}

struct Job {
    log: Vec<Entry>,
    workers: Vec<Sim>,
    next_id: u64,
    settings: Settings,
    /// Whether those whose group fails hold a step. One of three does not in any case.
    can_replay: bool,
    /// The workers in each round, as the first that saw it begin has seen them.
    rounds: BTreeMap<u64, Vec<u64>>,
    entered: BTreeMap<u64, BTreeSet<u64>>,
}

impl Job {
    fn new(settings: Settings, can_replay: bool) -> Self {
        let (rounds, entered) = Default::default();
        Self { log: Vec::new(), workers: Vec::new(), next_id: 0, settings, can_replay, rounds, entered }
    }

    fn come(&mut self) {
        let id = self.next_id;
        self.next_id += 1;
        self.log.push(join(id, self.settings));
        self.workers.push(Sim { id, state: MembersState::default(), read: 0, inside: None, alive: true });
    }

    /// Worker `index` reads one entry and does what follows from it.
    fn step(&mut self, index: usize) -> bool {
        let Some(worker) = self.workers.get_mut(index).filter(|worker| worker.alive) else { return false };
        let Some(entry) = self.log.get(worker.read) else { return false };
        worker.read += 1;
        let before = worker.state.round();
        worker.state.apply(entry.clone()).unwrap();
        let round = worker.state.round();
        if round > before {
            let seen = members(&worker.state);
            // One round, one world, whoever looks.
            assert_eq!(self.rounds.entry(round).or_insert_with(|| seen.clone()), &seen);
            // A worker that comes from the round before has said that it left it.
            for id in &seen {
                let log = &self.log[..worker.read];
                let left = log.contains(&ready(before, *id)) || log.contains(&holding(before, *id));
                assert!(left || !self.rounds.get(&before).is_some_and(|old| old.contains(id)));
            }
        }
        let id = WorkerId(worker.id);
        let fenced = !worker.state.is_present(id);
        match worker.inside {
            // The group has failed, or a commit says that others wait.
            Some(inside) if worker.state.is_gathering() || worker.state.workers_wait() || round > inside => {
                worker.inside = None;
                // Newcomers alone end a round at a commit.
                let can_replay =
                    self.can_replay && worker.state.is_gathering() && !(id.0 + inside).is_multiple_of(3);
                self.log.push(if can_replay { holding(inside, id.0) } else { ready(inside, id.0) });
            }
            Some(_) => {}
            None if worker.state.rank(id).is_some() && !worker.state.is_gathering() => {
                worker.inside = Some(round);
                self.entered.entry(round).or_default().insert(id.0);
            }
            // It was given up before it came together with the others.
            None if worker.state.rank(id).is_some()
                && !self.log.contains(&ready(round, id.0))
                && !self.log.contains(&holding(round, id.0)) =>
            {
                self.log.push(ready(round, id.0));
            }
            None => {}
        }
        if fenced && self.log[..worker.read].iter().any(|entry| *entry == join(id.0, self.settings)) {
            // It would come back under another number.
            worker.alive = false;
            worker.inside = None;
        }
        true
    }

    fn play(&mut self, next: Move) {
        let count = self.workers.len().max(1);
        match next {
            Move::Step(index) => {
                self.step(index % count);
            }
            Move::Come => self.come(),
            Move::Die(index) => {
                if let Some(worker) = self.workers.get_mut(index % count) {
                    worker.alive = false;
                    worker.inside = None;
                }
            }
            Move::Accuse(by, whom) => {
                if let (Some(by), Some(whom)) = (self.workers.get(by % count), self.workers.get(whom % count))
                    && by.id != whom.id
                {
                    let (worker, by) = (WorkerId(whom.id), WorkerId(by.id));
                    self.log.push(Entry::Gone { worker, by, why: Departure::Died });
                }
            }
            Move::Expect(workers) => {
                self.log.push(Entry::Expected { change: self.log.len() as u64, workers });
            }
            Move::Call(index) => {
                if let Some(worker) = self.workers.get(index % count).filter(|worker| worker.alive) {
                    self.log.push(last_call(worker.state.round() + 1));
                }
            }
        }
        // Nobody is in two groups, and nobody is in a group to which it does not belong.
        for worker in &self.workers {
            if let Some(round) = worker.inside {
                assert!(self.rounds[&round].contains(&worker.id));
            }
        }
    }

    /// Nobody dies any more, and silence is noticed. Returns whether everybody comes together.
    fn settle(&mut self) -> bool {
        while self.workers.iter().filter(|worker| worker.alive).count() < self.settings.min as usize {
            self.come();
        }
        for _ in 0..20 {
            let dead: Vec<u64> = self.workers.iter().filter(|worker| !worker.alive).map(|w| w.id).collect();
            self.log.extend(dead.into_iter().map(gone));
            while (0..self.workers.len()).any(|index| self.step(index)) {}
            let alive = || self.workers.iter().filter(|worker| worker.alive);
            let round = alive().map(|worker| worker.state.round()).max().unwrap_or(0);
            let inside = alive().filter(|worker| worker.inside == Some(round)).count();
            let wanted = alive().count().min(self.settings.max as usize);
            if inside == wanted && inside >= self.settings.min as usize {
                return true;
            }
            while alive_count(&self.workers) < self.settings.min as usize {
                self.come();
            }
            self.log.push(last_call(round + 1));
        }
        false
    }
}

fn alive_count(workers: &[Sim]) -> usize {
    workers.iter().filter(|worker| worker.alive).count()
}

proptest! {
    #[test]
    fn rounds_agree_nobody_is_in_two_and_there_is_always_a_next(
        min in 1..4_u32, more in 0..3_u32, start in 0..6_usize, can_replay in any::<bool>(), moves in moves(),
    ) {
        let mut job = Job::new(settings(min, min + more), can_replay);
        (0..start).for_each(|_| job.come());
        moves.into_iter().for_each(|next| job.play(next));
        prop_assert!(job.settle(), "{:?}", job.log);
        for (round, entered) in &job.entered {
            prop_assert!(entered.iter().all(|id| job.rounds[round].contains(id)));
        }
    }
}
