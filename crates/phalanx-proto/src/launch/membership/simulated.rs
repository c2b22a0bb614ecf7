//! Launchers on a network that delays, repeats and parts, with clocks that run at different speeds. All of it is simulated: the
//! same seed gives the same run.
//!
//! turmoil, which simulates tokio's sockets and clock, has no use here: the drivers are threads that wait in a store.
//! What could go wrong between messages is in the machines, which take entries and the time, so the simulation plays
//! these.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::log::Machine;
use crate::log::liveness::Liveness;

const INTERVAL: Duration = Duration::from_secs(1);
const SILENCE_TIMEOUT: Duration = Duration::from_secs(5);
const LAST_CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// How far the simulation goes at once, and when it ends.
const STEP: u64 = 50;
const END: u64 = 240_000;
/// How often the log is compacted. In a real job entries stay for longer than a launcher may be silent.
const COMPACTED: u64 = 1_000;
/// When the last fault has ended, at the latest.
const FAULTS: u64 = 60_000;

/// What goes wrong, from when on and for how long, in milliseconds.
#[derive(Clone, Debug)]
struct Fault {
    node: usize,
    from: u64,
    until: u64,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The node and the store do not hear of each other; what was on its way comes afterwards.
    Parted,
    /// The node stands still, and then goes on with what it knew. Its earlier messages arrive.
    Frozen,
    /// A worker fails.
    Failure,
    /// The node is gone, and another comes from the same host.
    Restart,
}

fn faults() -> impl Strategy<Value = Vec<Fault>> {
    let kinds = vec![Kind::Parted, Kind::Frozen, Kind::Failure, Kind::Restart];
    let fault = (0..4_usize, 0..FAULTS, 0..20_000_u64, proptest::sample::select(kinds));
    let fault = fault.prop_map(|(node, from, length, kind)| {
        let until = (from + length).min(FAULTS);
        Fault { node, from, until, kind }
    });
    proptest::collection::vec(fault, 0..6)
}

/// A launcher, as its driver runs it.
struct Launcher {
    id: NodeId,
    /// How fast its clock is.
    rate: f64,
    state: MembershipState,
    read: usize,
    /// Where in the log its `Join` is, once it is there.
    joined_at: Option<usize>,
    has_joined: bool,
    is_there: bool,
    /// The round whose workers it has, and when they are done.
    working: Option<(u64, u64)>,
    done_with: Option<u64>,
    /// What it has to append, and what is on its way, with the time of its arrival.
    outbox: VecDeque<Entry>,
    sent: Option<(u64, Entry)>,
    liveness: Liveness<NodeId>,
    beat_at: Instant,
    heard_at: Instant,
    enough_since: Option<(u64, Instant)>,
}

struct Job {
    start: Instant,
    random: u64,
    settings: Settings,
    launchers: Vec<Launcher>,
    log: Vec<Entry>,
    /// How many entries a state has replaced, and the bytes of that.
    base: (usize, Vec<u8>),
    /// Where the log has led to.
    state: MembershipState,
    beats: BTreeMap<NodeId, u64>,
    /// The nodes in each round, as the first that read of it has seen them.
    rounds: BTreeMap<u64, Vec<NodeId>>,
}

impl Job {
    fn come(&mut self, rate: f64) {
        let id = NodeId(self.launchers.len() as u64);
        let node = Node {
            id,
            host: format!("host{id}"),
            workers: 1,
            node_rank: None,
            serves_store: false,
            process: None,
            role: "default".to_owned(),
        };
        self.launchers.push(Launcher {
            id,
            rate,
            state: MembershipState::default(),
            read: 0,
            joined_at: None,
            has_joined: false,
            is_there: true,
            working: None,
            done_with: None,
            outbox: VecDeque::from([Entry::Join { node, settings: self.settings }]),
            sent: None,
            liveness: Liveness::new(INTERVAL, SILENCE_TIMEOUT),
            beat_at: self.start,
            heard_at: self.start,
            enough_since: None,
        });
    }

    /// A number below `end`, the same in each run.
    fn random(&mut self, end: u64) -> u64 {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % end
    }

    fn step(&mut self, now: u64, faults: &[Fault]) {
        if now.is_multiple_of(COMPACTED) {
            self.compact(now);
        }
        for index in 0..self.launchers.len() {
            let has = |kind| {
                let holds = |fault: &&Fault| fault.kind == kind && (fault.from..fault.until).contains(&now);
                faults.iter().filter(holds).any(|fault| fault.node == index)
            };
            let begins = |kind| {
                let begins = |fault: &&Fault| fault.kind == kind && fault.from / STEP == now / STEP;
                faults.iter().filter(begins).any(|fault| fault.node == index)
            };
            let is_parted = has(Kind::Parted);
            if !is_parted {
                self.deliver(index, now);
            }
            if !self.launchers[index].is_there || has(Kind::Frozen) {
                continue;
            }
            if begins(Kind::Restart) {
                let launcher = &mut self.launchers[index];
                (launcher.is_there, launcher.working) = (false, None);
                let rate = launcher.rate;
                self.come(rate);
                continue;
            }
            if begins(Kind::Failure) {
                self.launchers[index].fail();
            }
            self.act(index, now, is_parted);
        }
    }

    /// A state takes the place of all entries but the last few. Nobody waits for those who have not read them.
    fn compact(&mut self, now: u64) {
        let kept = (now / COMPACTED % 5) as usize;
        let end = self.log.len().saturating_sub(kept).max(self.base.0);
        let compaction = MembershipState::COMPACTION.unwrap();
        let mut state = self.base_state();
        for entry in &self.log[self.base.0..end] {
            let _ = state.apply(entry.clone());
        }
        self.base = (end, (compaction.encode)(&state).unwrap());
    }

    fn base_state(&self) -> MembershipState {
        let compaction = MembershipState::COMPACTION.unwrap();
        if self.base.0 == 0 { MembershipState::default() } else { (compaction.decode)(&self.base.1).unwrap() }
    }

    /// Delivers the messages that were sent, now and then one of them twice.
    fn deliver(&mut self, index: usize, now: u64) {
        let Some((_, entry)) = self.launchers[index].sent.take_if(|(at, _)| *at <= now) else { return };
        let times = 1 + usize::from(self.random(10) == 0);
        for entry in std::iter::repeat_n(entry, times) {
            let _ = self.state.apply(entry.clone());
            if matches!(entry, Entry::Join { .. }) {
                self.launchers[index].joined_at.get_or_insert(self.log.len());
            }
            self.log.push(entry);
        }
    }

    fn act(&mut self, index: usize, now: u64, is_parted: bool) {
        let delay = self.random(400);
        let pace = 1 + self.random(3) as usize;
        let mut skipped = (self.launchers[index].read < self.base.0).then(|| self.base_state());
        let launcher = &mut self.launchers[index];
        let clock = self.start + Duration::from_millis(now).mul_f64(launcher.rate);
        launcher.finish(now);
        if is_parted {
            // Its request to the store is answered by nobody: it gives up, and its workers end with it.
            if clock.saturating_duration_since(launcher.heard_at) > SILENCE_TIMEOUT {
                (launcher.is_there, launcher.working) = (false, None);
            }
            return;
        }
        launcher.heard_at = clock;
        for _ in 0..pace {
            if let Some(state) = skipped.take() {
                (launcher.state, launcher.read) = (state, self.base.0);
            } else if let Some(entry) = self.log.get(launcher.read) {
                launcher.read += 1;
                let _ = launcher.state.apply(entry.clone());
            } else {
                break;
            }
            if let Some(running) = launcher.state.running() {
                let members: Vec<NodeId> = running.members.iter().map(|member| member.node.id).collect();
                let round = launcher.state.round();
                // One round, one order of ranks, whoever looks and when.
                assert_eq!(self.rounds.entry(round).or_insert_with(|| members.clone()), &members);
            }
            launcher.react(now);
        }
        if clock >= launcher.beat_at {
            launcher.beat_at = clock + INTERVAL;
            *self.beats.entry(launcher.id).or_default() += 1;
            let beats: Vec<(NodeId, [u8; 8])> = launcher
                .state
                .present()
                .filter(|node| node.id != launcher.id)
                .map(|node| (node.id, self.beats.get(&node.id).copied().unwrap_or(0).to_le_bytes()))
                .collect();
            let beats = beats.iter().map(|(id, beat)| (*id, &beat[..]));
            for (node, absence) in launcher.liveness.observe(beats, clock) {
                launcher.outbox.push_back(Entry::Left { node, why: absence.into() });
            }
        }
        launcher.call(clock);
        if launcher.sent.is_none() {
            launcher.sent = launcher.outbox.pop_front().map(|entry| (now + delay, entry));
        }
    }

    /// Those that are not given up have workers of one round.
    fn check(&self) {
        let is_present = |id| self.state.present().any(|node| node.id == id);
        let rounds: Vec<u64> = self
            .launchers
            .iter()
            .filter(|launcher| is_present(launcher.id))
            .filter_map(|launcher| launcher.working.map(|(round, _)| round))
            .collect();
        assert!(rounds.windows(2).all(|pair| pair[0] == pair[1]), "{rounds:?} in {:?}", self.log);
    }
}

impl Launcher {
    /// Its workers are done.
    fn finish(&mut self, now: u64) {
        if let Some((round, _)) = self.working.take_if(|(_, until)| *until <= now) {
            self.done_with = Some(round);
            self.outbox.push_back(Entry::Ended { round, node: self.id, succeeded: true });
        }
    }

    fn fail(&mut self) {
        if let Some((round, _)) = self.working {
            let failure = WorkerFailure { rank: 0, blames: None, detail: Vec::new() };
            self.outbox.push_back(Entry::Failed { round, node: self.id, failure });
            self.end(round);
        }
    }

    fn end(&mut self, round: u64) {
        (self.working, self.done_with) = (None, Some(round));
        self.outbox.push_back(Entry::Ended { round, node: self.id, succeeded: false });
    }

    /// What follows from what it has just read.
    fn react(&mut self, now: u64) {
        let is_present = self.state.present().any(|node| node.id == self.id);
        self.has_joined |= is_present || self.joined_at.is_some_and(|at| at < self.read);
        if self.state.job_end().is_some() || (self.has_joined && !is_present) {
            // Over, or it was given up.
            (self.is_there, self.working) = (false, None);
            return;
        }
        let round = self.state.round();
        let Some(running) = self.state.running().filter(|running| running.node_rank(self.id).is_some())
        else {
            return;
        };
        match self.working {
            Some((own, _)) if own != round || running.ending => self.end(own),
            None if self.done_with.is_none_or(|done| done < round) => {
                if running.ending {
                    self.end(round);
                } else {
                    self.working = Some((round, now + 10_000));
                }
            }
            _ => {}
        }
    }

    /// Nobody else is waited for, once there have been enough for long enough.
    fn call(&mut self, clock: Instant) {
        let round = self.state.round();
        if !self.state.has_enough() {
            self.enough_since = None;
            return;
        }
        match self.enough_since {
            Some((of, since)) if of == round => {
                if clock.saturating_duration_since(since) > LAST_CALL_TIMEOUT {
                    self.enough_since = Some((round, clock));
                    let nonce = self.read as u64;
                    self.outbox.push_back(Entry::LastCall { round, nonce });
                }
            }
            _ => self.enough_since = Some((round, clock)),
        }
    }
}

/// Runs a job of launchers with these clocks until it is over, or for long.
fn run(rates: &[f64], settings: Settings, faults: &[Fault], seed: u64) -> Job {
    let (launchers, log, base, beats, rounds) = Default::default();
    let (start, state) = (crate::some_time(), MembershipState::default());
    let mut job = Job { start, random: seed, settings, launchers, log, base, state, beats, rounds };
    rates.iter().for_each(|rate| job.come(*rate));
    for now in (0..END).step_by(STEP as usize) {
        job.step(now, faults);
        job.check();
        if job.state.job_end().is_some() {
            break;
        }
    }
    job
}

#[test]
fn a_node_that_is_parted_or_frozen_for_long_is_given_up_and_its_late_words_change_nothing() {
    let settings = Settings { min_nodes: 2, max_nodes: 3, max_restarts: 1 };
    for kind in [Kind::Parted, Kind::Frozen] {
        let fault = Fault { node: 1, from: 4_000, until: 24_000, kind };
        let job = run(&[1.0, 0.8, 1.3], settings, &[fault], 7);
        let accused =
            |entry: &Entry| matches!(entry, Entry::Left { node: NodeId(1), why: Departure::Silent(_) });
        assert!(job.log.iter().any(accused), "{kind:?}: {:?}", job.log);
        assert_eq!((job.state.job_end(), job.state.restarts()), (Some(&JobEnd::Succeeded), 1));
        let survivors = [NodeId(0), NodeId(2)];
        assert!(
            job.rounds
                .last_key_value()
                .is_some_and(|(_, members)| survivors.iter().all(|id| members.contains(id)))
        );
        assert!(job.rounds.len() == 2 && job.rounds[&0].len() == 3);
    }
}

proptest! {
    #[test]
    fn a_network_that_parts_and_clocks_that_differ_make_no_second_world(
        rates in proptest::collection::vec(0.7..1.4_f64, 1..5),
        min in 1..4_u32,
        max_restarts in 0..3_u32,
        faults in faults(),
        seed in any::<u64>(),
    ) {
        let max_nodes = rates.len() as u32;
        let settings = Settings { min_nodes: min.min(max_nodes), max_nodes, max_restarts };
        let job = run(&rates, settings, &faults, seed);
        let alive = job.launchers.iter().filter(|launcher| launcher.is_there).count();
        // The remaining nodes go on to the end; too few of them wait.
        let is_waiting = job.state.is_gathering() && alive < settings.min_nodes as usize;
        prop_assert!(job.state.job_end().is_some() || is_waiting || alive == 0, "{:?}", job.state);
        prop_assert!(job.state.restarts() <= max_restarts);
        // Whoever has read to the end knows the same, whatever it has skipped.
        for launcher in job.launchers.iter().filter(|launcher| launcher.read == job.log.len()) {
            prop_assert_eq!(&launcher.state, &job.state);
        }
        if faults.is_empty() {
            // Clocks alone accuse nobody.
            prop_assert_eq!(job.state.job_end(), Some(&JobEnd::Succeeded));
            let accused = job.log.iter().any(|entry| matches!(entry, Entry::Left { .. }));
            prop_assert!(!accused);
        }
    }
}
