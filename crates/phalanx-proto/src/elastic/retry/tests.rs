//! Ranks that die at any moment of any step, the others at any moment of theirs.

use proptest::prelude::*;

use super::*;

fn at(step: u64, data_round: u64, reduced: u64) -> Option<Position> {
    Some(Position { loop_round: 1, commits: 7, step, data_round, reduced, called: false })
}

#[test]
fn positions_come_back() {
    let called = at(3, 2, 1).map(|position| Position { called: true, ..position });
    for position in [None, at(3, 2, 1), at(0, 1, 0), called] {
        assert_eq!(Position::decode(Position::encode(position)), position);
    }
}

#[test]
fn what_all_have_counts_and_what_some_lack_is_done_again() {
    let plan = |positions: &[Option<Position>]| match decide(positions) {
        Decision::GoOn(plan) => (plan.behind, plan.counts, plan.ahead, plan.data_round),
        Decision::GoBack => panic!("{positions:?}"),
    };
    // One is ahead, in a world that the others have not heard of.
    assert_eq!(plan(&[at(5, 1, 2), at(6, 2, 0)]), (5, true, 6, 2));
    assert_eq!(plan(&[at(5, 1, 1), at(5, 1, 1)]), (5, true, 5, 1));
    assert_eq!(plan(&[at(5, 1, 1), at(5, 1, 0)]), (5, false, 5, 1));
    // They have it of different groups: the values may differ.
    assert_eq!(plan(&[at(5, 1, 1), at(5, 1, 2)]), (5, false, 5, 1));
}

#[test]
fn who_is_behind_would_be_alone_with_what_the_other_has_called() {
    let mut ahead = at(6, 1, 0);
    ahead.iter_mut().for_each(|position| position.called = true);
    assert_eq!(decide(&[at(5, 1, 1), ahead]), Decision::GoBack);
    // Here all have called it.
    assert!(matches!(decide(&[at(6, 1, 1), ahead]), Decision::GoOn(_)));
}

#[test]
fn what_does_not_fit_leads_back() {
    let other = |change: fn(&mut Position)| {
        let mut position = at(5, 1, 0);
        position.iter_mut().for_each(change);
        position
    };
    let here = at(5, 1, 1);
    for positions in [
        vec![],
        vec![here, None],
        vec![here, at(7, 1, 0)],
        vec![at(5, 1, 0), at(6, 1, 0)],
        vec![here, at(6, 1, 0), at(6, 2, 0)],
        vec![here, other(|position| position.loop_round = 2)],
        vec![here, other(|position| position.commits = 8)],
        vec![here, other(|position| position.data_round = 2)],
    ] {
        assert_eq!(decide(&positions), Decision::GoBack, "{positions:?}");
    }
}

/// A collective that a rank has entered.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Call {
    Exchange(Option<Position>),
    /// Outside of the step. The first member does not wait for the others in it.
    Broadcast {
        step: u64,
    },
    Reduce {
        step: u64,
        data_round: u64,
    },
    Agree {
        step: u64,
    },
}

impl Call {
    fn fits(&self, other: &Self) -> bool {
        matches!((self, other), (Self::Exchange(_), Self::Exchange(_))) || self == other
    }
}

#[derive(Debug)]
struct Sim {
    alive: bool,
    progress: StepProgress,
    /// What it has called in the group of now, and how many of those have ended.
    calls: Vec<Call>,
    ended: usize,
    /// Its group has failed, and it waits for the next.
    cut: bool,
    met: bool,
    /// Those whose gradients are in what it has of the step in hand.
    held: Option<Vec<usize>>,
    /// The step for which it has called a broadcast.
    told: Option<u64>,
    /// It was cut off in one.
    outside: bool,
    /// Those whose gradients have made up each step.
    history: Vec<Vec<usize>>,
}

struct Job {
    ranks: Vec<Sim>,
    /// The members of each round.
    worlds: Vec<Vec<usize>>,
    /// Whether there is a broadcast before every third step.
    broadcasts: bool,
    /// All go back to the last commit.
    gone_back: bool,
}

impl Job {
    fn new(count: usize, broadcasts: bool) -> Self {
        let sim = || Sim {
            alive: true,
            progress: StepProgress::new(1),
            calls: Vec::new(),
            ended: 0,
            cut: false,
            met: true,
            held: None,
            told: None,
            outside: false,
            history: Vec::new(),
        };
        let ranks = std::iter::repeat_with(sim).take(count).collect();
        // Round 0 is none.
        let worlds = vec![Vec::new(), (0..count).collect()];
        Self { ranks, worlds, broadcasts, gone_back: false }
    }

    fn round(&self) -> u64 {
        self.worlds.len() as u64 - 1
    }

    fn members(&self) -> Vec<usize> {
        self.worlds[self.worlds.len() - 1].clone()
    }

    /// One rank does what it can do next, or finds that its group has failed: as early as it may, if it is `wary`.
    fn advance(&mut self, rank: usize, wary: bool) {
        let members = self.members();
        let broken = members.iter().any(|member| !self.ranks[*member].alive || self.ranks[*member].cut);
        let sim = &self.ranks[rank];
        if !sim.alive || sim.cut {
            return;
        }
        let next = sim.ended;
        if sim.calls.len() == next {
            let step = sim.progress.step;
            let due = self.broadcasts && step.is_multiple_of(3) && sim.told != Some(step);
            let call = match (sim.met, &sim.held) {
                (false, _) => Call::Exchange(Some(sim.progress.position(0)).filter(|_| !sim.outside)),
                (true, None) if due => Call::Broadcast { step },
                (true, None) => {
                    Call::Reduce { step: sim.progress.step, data_round: sim.progress.data_round() }
                }
                (true, Some(_)) => Call::Agree { step: sim.progress.step },
            };
            let sim = &mut self.ranks[rank];
            if matches!(call, Call::Reduce { .. }) {
                sim.progress.begin(sim.told == Some(step));
            }
            match broken && wary {
                true => {
                    (sim.cut, sim.outside) = (true, matches!(call, Call::Broadcast { .. }) || sim.outside)
                }
                false => sim.calls.push(call),
            }
            return;
        }
        let calls: Vec<Call> =
            members.iter().filter_map(|member| self.ranks[*member].calls.get(next)).copied().collect();
        let broadcast = matches!(sim.calls[next], Call::Broadcast { .. });
        let waits_for = match broadcast {
            true => &members[..1],
            false => &members[..],
        };
        let waits = waits_for.iter().any(|member| self.ranks[*member].calls.len() <= next);
        if waits || (broken && wary) {
            let sim = &mut self.ranks[rank];
            (sim.cut, sim.outside) = (broken, sim.outside || (broken && broadcast));
            return;
        }
        assert!(calls.iter().all(|call| call.fits(&calls[0])), "{calls:?}");
        self.end(rank, &calls, &members);
    }

    /// A call of all members has ended on one of them.
    fn end(&mut self, rank: usize, calls: &[Call], members: &[usize]) {
        let round = self.round();
        let sim = &mut self.ranks[rank];
        sim.ended += 1;
        match calls[0] {
            Call::Broadcast { step } => sim.told = Some(step),
            Call::Reduce { .. } => {
                sim.progress.reduced(round);
                sim.held = Some(members.to_vec());
            }
            Call::Agree { .. } => {
                let before = sim.progress;
                sim.progress.done();
                self.conclude(rank, before);
            }
            Call::Exchange(_) => {
                sim.met = true;
                let position = |call: &Call| match call {
                    Call::Exchange(position) => *position,
                    _ => None,
                };
                let positions: Vec<Option<Position>> = calls.iter().map(position).collect();
                let Decision::GoOn(plan) = decide(&positions) else {
                    // Where all survivors are in a step it is never lost.
                    assert!(self.broadcasts, "{positions:?}");
                    self.gone_back = true;
                    return;
                };
                let before = sim.progress;
                match sim.progress.resume(plan, round) {
                    Resumed::Done => self.conclude(rank, before),
                    Resumed::Replay => sim.held = None,
                }
            }
        }
    }

    fn conclude(&mut self, rank: usize, before: StepProgress) {
        let (data_round, reduced) = (before.data_round() as usize, before.reduced_in() as usize);
        let value = self.ranks[rank].held.take().unwrap();
        // Whose part is said to be missing is missing, and all others' is there.
        let there: Vec<usize> =
            self.worlds[data_round].iter().copied().filter(|id| self.worlds[reduced].contains(id)).collect();
        assert_eq!(value, there);
        let sim = &mut self.ranks[rank];
        sim.history.push(value);
        assert_eq!(sim.history.len() as u64, sim.progress.step);
    }

    /// If all survivors wait for it, the next round begins.
    fn wait_for_round(&mut self) {
        let survivors: Vec<usize> =
            self.members().into_iter().filter(|member| self.ranks[*member].alive).collect();
        if survivors.is_empty() || !survivors.iter().all(|member| self.ranks[*member].cut) {
            return;
        }
        for member in &survivors {
            let sim = &mut self.ranks[*member];
            (sim.cut, sim.met, sim.ended) = (false, false, 0);
            sim.calls.clear();
        }
        self.worlds.push(survivors);
    }

    /// Nowhere are two different results of one step, and no two ranks are more than a step apart.
    fn check(&self) {
        for (one, other) in self.ranks.iter().zip(self.ranks.iter().skip(1)) {
            assert!(
                one.history.iter().zip(&other.history).all(|(one, other)| one == other),
                "{:?}",
                self.ranks
            );
        }
        let steps = self.ranks.iter().filter(|sim| sim.alive).map(|sim| sim.history.len());
        assert!(steps.clone().max().unwrap_or(0) <= steps.min().unwrap_or(0) + 1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn no_step_is_lost_and_no_two_ranks_have_different_results(
        count in 2..6_usize,
        broadcasts in any::<bool>(),
        // The rank that moves; 0 of 40: it dies; whether it looks at its group first.
        moves in proptest::collection::vec((0..6_usize, 0..40_u8, any::<bool>()), 1..400),
    ) {
        let mut job = Job::new(count, broadcasts);
        for (who, fate, wary) in moves {
            let who = who % count;
            let alive = job.ranks.iter().filter(|sim| sim.alive).count();
            match fate {
                0 if alive > 1 => job.ranks[who].alive = false,
                _ => job.advance(who, wary),
            }
            job.wait_for_round();
            job.check();
            if job.gone_back {
                return Ok(());
            }
        }
        // Nobody dies any more: all get on, and come to the same.
        let before = job.ranks.iter().map(|sim| sim.history.len()).max().unwrap_or(0);
        for _ in 0..200 {
            (0..count).for_each(|rank| job.advance(rank, false));
            job.wait_for_round();
            job.check();
            if job.gone_back {
                return Ok(());
            }
        }
        let mut alive = job.ranks.iter().filter(|sim| sim.alive);
        prop_assert!(alive.clone().all(|sim| sim.history.len() > before + 2));
        // The world of the data has come to be that of the survivors.
        prop_assert!(alive.all(|sim| sim.progress.data_round() == job.round()));
    }
}
