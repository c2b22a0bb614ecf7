//! Plays a plan against the clock.

use std::collections::BTreeMap;

use super::{Action, Pass, Plan};
use crate::error::{Error, Result};

/// How long a pass of one micro-batch through one stage takes, in any unit. By default a backward pass takes two and a forward pass one: it
/// computes about twice as much.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// A forward pass.
    pub forward: f64,
    /// A backward pass.
    pub backward: f64,
    /// From the end of a pass on one rank until another rank has its result.
    pub transfer: f64,
}

impl Default for Costs {
    fn default() -> Self {
        Self { forward: 1.0, backward: 2.0, transfer: 0.0 }
    }
}

impl Costs {
    fn of(&self, pass: Pass) -> f64 {
        match pass {
            Pass::Forward => self.forward,
            Pass::Backward => self.backward,
        }
    }
}

/// When an action runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// The action that is computed.
    pub action: Action,
    /// When it begins; the first of all begins at 0.
    pub start: f64,
    /// When it ends.
    pub end: f64,
}

/// When each rank does what.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    ranks: Vec<Vec<Interval>>,
}

impl Timeline {
    /// What `rank` does, in its order. Empty if there is no such rank.
    pub fn rank(&self, rank: usize) -> &[Interval] {
        self.ranks.get(rank).map_or(&[], Vec::as_slice)
    }

    /// When the last rank is done.
    pub fn end(&self) -> f64 {
        self.ranks.iter().flatten().map(|interval| interval.end).fold(0.0, f64::max)
    }

    /// The share of the time, of all ranks together, in which ranks wait, from 0 to 1.
    pub fn bubble(&self) -> f64 {
        let busy: f64 = self.ranks.iter().flatten().map(|interval| interval.end - interval.start).sum();
        let whole = self.end() * self.ranks.len() as f64;
        if whole > 0.0 { 1.0 - busy / whole } else { 0.0 }
    }
}

/// Lets each rank do its actions in order, each as soon as what it needs is there.
pub(super) fn play(plan: &Plan, costs: &Costs) -> Result<Timeline> {
    let Costs { forward, backward, transfer } = *costs;
    if [forward, backward, transfer].iter().any(|cost| !cost.is_finite() || *cost < 0.0) {
        return Err(Error::invalid_argument(format!(
            "times of a pipeline must be numbers of at least 0: {costs:?}"
        )));
    }
    let mut ends: BTreeMap<Action, f64> = BTreeMap::new();
    let mut ranks: Vec<Vec<Interval>> = vec![Vec::new(); plan.ranks()];
    // The other way round each time: forward passes go from rank to rank one way, and backward passes the other.
    let mut is_backwards = false;
    loop {
        let mut moved = false;
        for index in 0..ranks.len() {
            let rank = if is_backwards { ranks.len() - 1 - index } else { index };
            let done = &mut ranks[rank];
            while let Some(action) = plan.actions(rank).get(done.len()) {
                let needed = match plan.predecessor(*action) {
                    None => 0.0,
                    Some(before) => match ends.get(&before) {
                        None => break,
                        Some(end) if plan.rank_of(before.stage) == rank => *end,
                        Some(end) => end + transfer,
                    },
                };
                let free = done.last().map_or(0.0, |interval: &Interval| interval.end);
                let start = free.max(needed);
                let end = start + costs.of(action.pass);
                ends.insert(*action, end);
                done.push(Interval { action: *action, start, end });
                moved = true;
            }
        }
        if !moved {
            break;
        }
        is_backwards = !is_backwards;
    }
    // Schedules make no such plans, which the tests hold; a plan that did would be cut off in silence.
    match ranks.iter().enumerate().find(|(rank, done)| done.len() < plan.actions(*rank).len()) {
        None => Ok(Timeline { ranks }),
        Some((rank, done)) => Err(Error::aborted(format!(
            "rank {rank} of the pipeline waits for ever before {:?}: this is a defect of phalanx",
            plan.actions(rank)[done.len()]
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::super::Schedule;
    use super::*;

    fn schedules() -> impl Strategy<Value = (Schedule, usize, usize)> {
        (1usize..9, 1usize..25, 1usize..5, 0usize..3).prop_map(|(ranks, microbatches, each, which)| {
            match which {
                0 => (Schedule::GPipe, ranks, microbatches),
                1 => (Schedule::OneForwardOneBackward, ranks, microbatches),
                _ => {
                    (Schedule::Interleaved { stages_per_rank: each }, ranks, ranks * microbatches.div_ceil(4))
                }
            }
        })
    }

    /// From rank to rank and back: with a look at all ranks for each step it would not end today.
    #[test]
    fn many_ranks_are_played_in_a_few_looks_at_them() {
        let plan = Schedule::GPipe.plan(300_000, 1).unwrap();
        assert_eq!(plan.timeline(&Costs::default()).unwrap().end(), 3.0 * 300_000.0);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        /// Played with times of zero as well: then nothing but the order lets an action begin.
        #[test]
        fn every_pass_runs_once_on_its_rank_and_nobody_waits_for_ever((schedule, ranks, microbatches) in schedules()) {
            let plan = schedule.plan(ranks, microbatches).unwrap();
            plan.timeline(&Costs { forward: 0.0, backward: 0.0, transfer: 0.0 }).unwrap();
            let timeline = plan.timeline(&Costs { transfer: 0.25, ..Costs::default() }).unwrap();
            let mut seen = BTreeSet::new();
            for rank in 0..ranks {
                for interval in timeline.rank(rank) {
                    prop_assert_eq!(interval.action.stage % ranks, rank);
                    prop_assert!(seen.insert(interval.action));
                }
            }
            for stage in 0..plan.stages() {
                for microbatch in 0..microbatches {
                    for pass in [Pass::Forward, Pass::Backward] {
                        let action = Action { pass, stage, microbatch };
                        prop_assert!(seen.remove(&action), "{:?} is missing", action);
                    }
                }
            }
            prop_assert!(seen.is_empty());
        }

        /// What crosses between two ranks is what the receiver needs, each once.
        #[test]
        fn messages_are_what_others_need((schedule, ranks, microbatches) in schedules()) {
            let plan = schedule.plan(ranks, microbatches).unwrap();
            for to in 0..ranks {
                let mut sent: Vec<Action> = (0..ranks).flat_map(|from| plan.messages(from, to)).collect();
                let mut needed: Vec<Action> = plan.actions(to).iter().copied().filter(|action| {
                    plan.predecessor(*action).is_some_and(|before| plan.rank_of(before.stage) != to)
                }).collect();
                sent.sort_unstable();
                needed.sort_unstable();
                prop_assert_eq!(sent, needed);
            }
        }

        /// The papers' bubbles, and what is held.
        #[test]
        fn bubbles_and_activations_are_the_formulas(ranks in 1usize..9, factor in 1usize..6, each in 2usize..5) {
            let microbatches = ranks * factor;
            let (p, m, v) = (ranks as f64, microbatches as f64, each as f64);
            let near = |plan: &Plan, formula: f64| {
                let bubble = plan.timeline(&Costs::default()).unwrap().bubble();
                prop_assert!((bubble - formula).abs() < 1e-9, "{} and not {}", bubble, formula);
                Ok(())
            };
            let gpipe = Schedule::GPipe.plan(ranks, microbatches).unwrap();
            near(&gpipe, (p - 1.0) / (m + p - 1.0))?;
            prop_assert!((0..ranks).all(|rank| gpipe.peak_activations(rank) == microbatches));
            let plain = Schedule::OneForwardOneBackward.plan(ranks, microbatches).unwrap();
            near(&plain, (p - 1.0) / (m + p - 1.0))?;
            for rank in 0..ranks {
                prop_assert_eq!(plain.peak_activations(rank), (ranks - rank).min(microbatches));
            }
            near(&Schedule::Interleaved { stages_per_rank: each }.plan(ranks, microbatches).unwrap(),
                (p - 1.0) / (v * m + p - 1.0))?;
        }
    }

    #[test]
    fn what_is_no_pipeline_is_refused() {
        for (schedule, ranks, microbatches, cause) in [
            (Schedule::GPipe, 0, 4, "0, 4 and 1"),
            (Schedule::OneForwardOneBackward, 2, 0, "2, 0 and 1"),
            (Schedule::Interleaved { stages_per_rank: 0 }, 2, 4, "2, 4 and 0"),
            (Schedule::Interleaved { stages_per_rank: 2 }, 4, 6, "6 micro-batches are no multiple"),
            (Schedule::OneForwardOneBackward, 1 << 20, 1 << 40, "more than 4194304 passes"),
        ] {
            let error = schedule.plan(ranks, microbatches).unwrap_err();
            assert!(error.is_invalid_argument() && error.to_string().contains(cause), "{error}");
        }
        let plan = Schedule::GPipe.plan(2, 2).unwrap();
        for cost in [-1.0, f64::NAN, f64::INFINITY] {
            assert!(
                plan.timeline(&Costs { transfer: cost, ..Costs::default() })
                    .unwrap_err()
                    .is_invalid_argument()
            );
        }
    }

    #[test]
    fn more_stages_are_played_with_what_travels() {
        // Two ranks, one micro-batch: forward 1, across 0.5, forward 1, backward 2, across 0.5, backward 2.
        let plan = Schedule::GPipe.plan(2, 1).unwrap();
        let timeline = plan.timeline(&Costs { transfer: 0.5, ..Costs::default() }).unwrap();
        assert_eq!(timeline.end(), 7.0);
        assert_eq!(timeline.rank(1)[0].start, 1.5);
        assert!(timeline.rank(2).is_empty() && plan.actions(2).is_empty());
    }
}
