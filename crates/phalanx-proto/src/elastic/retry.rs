//! Decides whether a step that a death has cut off counts, is replayed or is lost: pure.
//!
//! A step ends with an agreement, a barrier behind its last collective. If it has succeeded on any rank, every rank has
//! entered it, and has all averages of the step. After a failure the survivors tell each other where they were cut off
//! ([`Position`]), and each comes to the same [`Decision`]. A rank is at most one step ahead of another, since each
//! agreement needs both:
//!
//! ```text
//!     a rank is ahead          those behind have entered the agreement: what they have counts, and they follow
//!     none is, all have it     it counts
//!     none is, some lack it    all reduce it again, in the new group
//!     anything else            all go back to the last commit
//! ```
//!
//! A rank that follows repeats the calls that the other has made in the failed group. If these include another
//! collective than the reduction, such as a broadcast of running statistics, it would wait alone; then all go back. Groups count
//! their calls so that this is known.
//!
//! Each step's data are distributed among the ranks of one round, and a rank that is ahead has its part of the next
//! step already. So the round whose ranks have the data, `data_round`, changes on all ranks after the same step: the
//! furthest step that any rank has begun.

/// Where a rank was cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// The round in which its loop was called.
    pub loop_round: u64,
    /// How many commits have led to its state.
    pub commits: u64,
    /// How many steps it has completed since its loop was called; the next one is in progress.
    pub step: u64,
    /// The round whose ranks have that step's data.
    pub data_round: u64,
    /// The round in whose group this step was reduced completely; 0 if in none.
    pub reduced: u64,
    /// Whether it has called other collectives of its group since the step before. A rank that is behind would wait in them
    /// alone.
    pub called: bool,
}

/// The length of an encoded position.
pub const NUMBERS: usize = 6;

impl Position {
    /// The position as numbers; all 0 for a rank that cannot go on.
    pub fn encode(position: Option<Self>) -> [i64; NUMBERS] {
        let numbers = |Self { loop_round, commits, step, data_round, reduced, called }: Self| {
            [loop_round, commits, step, data_round, reduced, u64::from(called)]
        };
        position.map_or([0; NUMBERS], |position| numbers(position).map(u64::cast_signed))
    }

    /// The position that was encoded as these numbers; None if the rank cannot go on.
    pub fn decode(numbers: [i64; NUMBERS]) -> Option<Self> {
        let [loop_round, commits, step, data_round, reduced, called] = numbers.map(i64::cast_unsigned);
        let called = called != 0;
        (loop_round > 0).then_some(Self { loop_round, commits, step, data_round, reduced, called })
    }
}

/// What the ranks of a new group do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// All go back to the last commit.
    GoBack,
    /// No rank goes back: the step in progress counts, or is reduced again.
    GoOn(Plan),
}

/// How they go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The step of the ranks that are behind, or of all.
    behind: u64,
    /// Whether the result that they have counts.
    counts: bool,
    /// The furthest step that any rank has begun, and the round whose ranks have its data.
    ahead: u64,
    data_round: u64,
}

/// The decision of the ranks of a new group that were cut off at these positions. `None` is a rank without a step in
/// progress.
pub fn decide(positions: &[Option<Position>]) -> Decision {
    let Some(positions) = positions.iter().copied().collect::<Option<Vec<Position>>>() else {
        return Decision::GoBack;
    };
    let Some(first) = positions.first() else { return Decision::GoBack };
    let alike =
        |position: &Position| (position.loop_round, position.commits) == (first.loop_round, first.commits);
    let behind = positions.iter().map(|position| position.step).min().unwrap_or(0);
    let ahead = positions.iter().map(|position| position.step).max().unwrap_or(0);
    let at = |step: u64| positions.iter().filter(move |position| position.step == step);
    let (Some(slow), Some(fast)) = (at(behind).next(), at(ahead).next()) else { return Decision::GoBack };
    let whole = slow.reduced != 0 && at(behind).all(|position| position.reduced == slow.reduced);
    let fits = positions.iter().all(alike)
        && at(behind).all(|position| position.data_round == slow.data_round)
        && at(ahead).all(|position| position.data_round == fast.data_round)
        && (ahead == behind || (ahead == behind + 1 && whole && !at(ahead).any(|position| position.called)));
    match fits {
        true => Decision::GoOn(Plan { behind, counts: whole, ahead, data_round: fast.data_round }),
        false => Decision::GoBack,
    }
}

/// A rank's progress through the steps since its loop was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepProgress {
    loop_round: u64,
    step: u64,
    data_round: u64,
    reduced: u64,
    called: bool,
    /// After which step the data's world changes, and to which round's.
    change: Option<(u64, u64)>,
}

/// What this rank does with the step in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resumed {
    /// Its result counts: the step is complete.
    Done,
    /// The step is reduced again.
    Replay,
}

impl StepProgress {
    /// The loop is called in `round`.
    pub fn new(round: u64) -> Self {
        Self { loop_round: round, step: 0, data_round: round, reduced: 0, called: false, change: None }
    }

    /// The round whose ranks have the data of the step in hand.
    pub fn data_round(&self) -> u64 {
        self.data_round
    }

    /// The round in whose group the step was reduced.
    pub fn reduced_in(&self) -> u64 {
        self.reduced
    }

    /// Where this rank is. `commits`: how many commits have led to its state.
    pub fn position(&self, commits: u64) -> Position {
        let Self { loop_round, step, data_round, reduced, called, .. } = *self;
        Position { loop_round, commits, step, data_round, reduced, called }
    }

    /// The next step begins. `called`: whether this rank has called other collectives of its group since the last one.
    pub fn begin(&mut self, called: bool) {
        self.called = called;
    }

    /// The step is reduced completely, in the group of `round`; other ranks may not have the result.
    pub fn reduced(&mut self, round: u64) {
        self.reduced = round;
    }

    /// Every rank has the result.
    pub fn done(&mut self) {
        if let Some((step, round)) = self.change
            && step <= self.step
        {
            (self.data_round, self.change) = (round, None);
        }
        self.step += 1;
        self.reduced = 0;
    }

    /// The new group of `round` goes on by `plan`.
    pub fn resume(&mut self, plan: Plan, round: u64) -> Resumed {
        self.change = Some((plan.ahead, round));
        if self.step == plan.behind && plan.counts {
            self.done();
            if plan.behind < plan.ahead {
                // This rank may not have noticed that the world had changed.
                self.data_round = plan.data_round;
            }
            return Resumed::Done;
        }
        self.reduced = 0;
        Resumed::Replay
    }
}

#[cfg(test)]
mod tests;
