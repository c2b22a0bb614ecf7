//! Which workers may begin their next step: their clocks, and the rule of the consistency model. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::rank::Rank;

/// The most steps after which a worker may begin: counting on from there never overflows.
const MAX_STEPS: u64 = u64::MAX / 2;

/// How far workers may be apart. A worker's clock is the number of steps that it has ended.
///
/// Source of the second: Q. Ho et al., *More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server*,
/// 2013.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Consistency {
    /// Bulk-synchronous parallel: all workers begin a step together. The gradients of a step are averaged and applied once,
    /// as by an all_reduce.
    Bsp,
    /// Stale-synchronous parallel: a worker begins a step if the slowest is at most so many steps behind it. Each gradient is
    /// applied by itself, when it comes.
    Ssp(u64),
    /// Asynchronous parallel: no worker waits. Each gradient is applied by itself, when it comes.
    Asp,
}

impl Consistency {
    /// How many steps a worker may be ahead of the slowest when it begins one; None if any number.
    pub fn bound(self) -> Option<u64> {
        match self {
            Self::Bsp => Some(0),
            Self::Ssp(bound) => Some(bound),
            Self::Asp => None,
        }
    }
}

/// The clocks of all workers.
#[derive(Clone, Debug)]
pub struct Clocks {
    consistency: Consistency,
    workers: BTreeMap<Rank, u64>,
    /// The slowest clock, or the last one if there are no workers.
    slowest: u64,
}

impl Clocks {
    /// The clocks of `workers`, each at 0.
    pub fn new(consistency: Consistency, workers: impl IntoIterator<Item = Rank>) -> Self {
        let workers = workers.into_iter().map(|worker| (worker, 0)).collect();
        Self { consistency, workers, slowest: 0 }
    }

    /// Adds `worker` at the slowest clock, so that no other worker has to wait longer. Nothing changes if it takes part already.
    pub fn join(&mut self, worker: Rank) {
        self.workers.entry(worker).or_insert(self.slowest);
    }

    /// `worker`, which takes part, begins with the step after `clock`.
    ///
    /// # Errors
    /// If it takes no part, has ended more steps, or would begin after more than any run has.
    pub fn enter(&mut self, worker: Rank, clock: u64) -> Result<()> {
        match self.workers.get_mut(&worker) {
            None => return Err(no_worker(worker)),
            Some(own) if *own > clock => {
                let cause = format!("rank {worker} has ended {own} steps, and cannot begin after {clock}");
                return Err(Error::invalid_argument(cause)
                    .with_remedy("begin with the steps that the worker has ended, or more"));
            }
            Some(_) if clock > MAX_STEPS => {
                return Err(Error::invalid_argument(format!(
                    "rank {worker} would begin after {clock} steps, which no run has"
                )));
            }
            Some(own) => *own = clock,
        }
        self.update();
        Ok(())
    }

    /// Removes `worker`: the others no longer wait for it.
    pub fn leave(&mut self, worker: Rank) {
        self.workers.remove(&worker);
        self.update();
    }

    /// `worker` has ended a step.
    ///
    /// # Errors
    /// If it takes no part, or should not have begun the step.
    pub fn advance(&mut self, worker: Rank) -> Result<()> {
        self.check(worker)?;
        if let Some(clock) = self.workers.get_mut(&worker) {
            *clock += 1;
        }
        self.update();
        Ok(())
    }

    /// An error if `worker` takes no part, or must not be in a step.
    pub fn check(&self, worker: Rank) -> Result<()> {
        match self.lead(worker) {
            None => Err(no_worker(worker)),
            Some(lead) if !self.may_go(worker) => {
                let cause = format!(
                    "rank {worker} is {lead} steps ahead of the slowest worker, and has not waited for it"
                );
                Err(Error::invalid_argument(cause)
                    .with_remedy("pull the parameters, which waits, before each step"))
            }
            Some(_) => Ok(()),
        }
    }

    /// Whether `worker` may begin its next step.
    pub fn may_go(&self, worker: Rank) -> bool {
        let bound = self.consistency.bound();
        self.lead(worker).is_some_and(|lead| bound.is_none_or(|bound| lead <= bound))
    }

    /// How far `worker` is ahead of the slowest; None if it takes no part.
    pub fn lead(&self, worker: Rank) -> Option<u64> {
        self.workers.get(&worker).map(|clock| clock - self.slowest)
    }

    /// The slowest clock; if there are no workers, the slowest that there was last.
    pub fn slowest(&self) -> u64 {
        self.slowest
    }

    /// The clock of each worker that takes part.
    pub fn workers(&self) -> &BTreeMap<Rank, u64> {
        &self.workers
    }

    /// The consistency model.
    pub fn consistency(&self) -> Consistency {
        self.consistency
    }

    fn update(&mut self) {
        if let Some(slowest) = self.workers.values().min() {
            self.slowest = *slowest;
        }
    }
}

fn no_worker(worker: Rank) -> Error {
    Error::invalid_argument(format!("rank {worker} is no worker of this server"))
        .with_remedy("call ParameterServer::join first, or name it among the workers")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_rule_lets_go_who_may() {
        let (fast, slow) = (Rank::new(0), Rank::new(1));
        for (consistency, steps) in [(Consistency::Bsp, 1), (Consistency::Ssp(3), 4), (Consistency::Asp, 50)]
        {
            let mut clocks = Clocks::new(consistency, [fast, slow]);
            let mut taken = 0;
            while clocks.may_go(fast) && taken < 50 {
                clocks.advance(fast).unwrap();
                taken += 1;
            }
            assert_eq!(taken, steps, "{consistency:?}");
            if consistency != Consistency::Asp {
                assert!(clocks.advance(fast).unwrap_err().to_string().contains("ahead of the slowest"));
                clocks.advance(slow).unwrap();
                assert!(clocks.may_go(fast));
                clocks.leave(slow);
                assert!(clocks.advance(slow).unwrap_err().to_string().contains("no worker"));
            }
            clocks.join(slow);
            assert!(clocks.may_go(slow) && clocks.may_go(fast), "it comes in at the slowest clock");
        }
    }

    #[test]
    fn no_worker_begins_after_more_steps_than_can_be_counted() {
        let (one, other) = (Rank::new(0), Rank::new(1));
        let mut clocks = Clocks::new(Consistency::Asp, [one, other]);
        for clock in [u64::MAX, MAX_STEPS + 1] {
            let error = clocks.enter(one, clock).unwrap_err();
            assert!(error.is_invalid_argument() && error.to_string().contains("no run has"), "{error}");
        }
        clocks.enter(one, MAX_STEPS).unwrap();
        clocks.advance(one).unwrap();
        assert_eq!((clocks.lead(one), clocks.lead(other)), (Some(MAX_STEPS + 1), Some(0)));
    }

    #[derive(Clone, Copy, Debug)]
    enum Event {
        /// A worker's computation ends, if it is in one.
        Ends(u32),
        Leaves(u32),
        Joins(u32),
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            20 => (0..6u32).prop_map(Event::Ends),
            1 => (0..6u32).prop_map(Event::Leaves),
            1 => (0..6u32).prop_map(Event::Joins),
        ]
    }

    proptest! {
        /// Computations end in any order, which is any delays at all; workers come and go.
        #[test]
        fn the_bound_holds_and_somebody_can_always_go_on(
            bound in prop::option::of(0u64..5),
            events in prop::collection::vec(event(), 0..400),
        ) {
            let consistency = match bound {
                None => Consistency::Asp,
                Some(0) => Consistency::Bsp,
                Some(bound) => Consistency::Ssp(bound),
            };
            let mut clocks = Clocks::new(consistency, (0..4).map(Rank::new));
            let mut busy: BTreeMap<Rank, u64> = BTreeMap::new();
            let mut slowest = 0;
            for event in events {
                match event {
                    Event::Ends(worker) => {
                        let worker = Rank::new(worker);
                        if busy.remove(&worker).is_some() {
                            clocks.advance(worker).unwrap();
                        }
                    }
                    Event::Leaves(worker) => {
                        clocks.leave(Rank::new(worker));
                        busy.remove(&Rank::new(worker));
                    }
                    Event::Joins(worker) => clocks.join(Rank::new(worker)),
                }
                // Every worker that may begin does so at once.
                for (worker, clock) in clocks.workers().clone() {
                    if clocks.may_go(worker) && !busy.contains_key(&worker) {
                        busy.insert(worker, clock);
                    }
                }
                for (worker, clock) in &busy {
                    let behind = clocks.workers().values().min().unwrap();
                    prop_assert!(bound.is_none_or(|bound| clock - behind <= bound), "{worker} at {clock}, another at {behind}");
                }
                prop_assert!(clocks.workers().is_empty() || !busy.is_empty(), "all wait");
                prop_assert!(clocks.slowest() >= slowest, "time ran backwards");
                slowest = clocks.slowest();
            }
        }
    }
}
