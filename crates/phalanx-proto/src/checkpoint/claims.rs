//! Which process may write to a folder of checkpoints, and whether it still may: pure.
//!
//! The one whose claim has the highest number may. A process makes the next claim if the last one was given back, its process has
//! died, or it belongs to an earlier round of the same elastic job: that round's process may be frozen, and was declared dead.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

/// The process that wants to write.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claimant {
    /// The elastic job, whose later rounds take over from its earlier ones; none if the job is not elastic.
    pub job: Option<String>,
    /// Its round.
    pub round: u64,
}

impl Claimant {
    /// Whether it is from an earlier round of the same job.
    pub fn is_before(&self, other: &Self) -> bool {
        self.job.is_some() && self.job == other.job && self.round < other.round
    }
}

/// What a process sees of the newest claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Newest<'a> {
    /// There is no claim.
    None,
    /// It is this process's own.
    Own,
    /// It is gone: a later one has followed it.
    Changed,
    /// Another process has made it.
    Other {
        /// Whether no process holds its lock.
        free: bool,
        /// Who has made it; None if the file is empty or damaged.
        by: Option<&'a Claimant>,
    },
}

/// What a process that wants to write does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make the next claim.
    Make,
    /// Look again at once.
    Look,
    /// Look again after a pause.
    Pause,
    /// Give up: a later round of its job writes.
    TakenOver,
    /// Give up: another process writes.
    Held,
}

/// What the process `by` does. `time_is_up`: the holder had time to give its claim back.
pub fn step(by: &Claimant, newest: Newest<'_>, time_is_up: bool) -> Step {
    match newest {
        Newest::None | Newest::Own => Step::Make,
        Newest::Changed => Step::Look,
        Newest::Other { by: Some(other), free } if free || other.is_before(by) => Step::Make,
        Newest::Other { by: Some(other), .. } if by.is_before(other) => Step::TakenOver,
        // Its process is about to write it, or has died.
        Newest::Other { by: None, free: true } if time_is_up => Step::Make,
        Newest::Other { .. } if time_is_up => Step::Held,
        Newest::Other { .. } => Step::Pause,
    }
}

/// Why a process may not write any more.
///
/// # Errors
/// If the newest claim is not its own.
pub fn check(own: u64, newest: u64) -> Result<(), &'static str> {
    match newest.cmp(&own) {
        Ordering::Greater => {
            Err("another process has taken over, in a later round of the job, since this one was given up")
        }
        Ordering::Less => Err("this process's claim to the folder has been removed"),
        Ordering::Equal => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(job: Option<&str>, round: u64) -> Claimant {
        Claimant { job: job.map(str::to_owned), round }
    }

    #[test]
    fn a_held_claim_is_followed_by_later_rounds_of_its_job_alone() {
        let holder = of(Some("a"), 3);
        let held = Newest::Other { free: false, by: Some(&holder) };
        for time_is_up in [false, true] {
            assert_eq!(step(&of(Some("a"), 4), held, time_is_up), Step::Make);
            assert_eq!(step(&of(Some("a"), 2), held, time_is_up), Step::TakenOver);
        }
        for other in [of(Some("b"), 9), of(None, 9), of(Some("a"), 3)] {
            assert_eq!(step(&other, held, false), Step::Pause, "{other:?}");
            assert_eq!(step(&other, held, true), Step::Held, "{other:?}");
            assert_eq!(step(&other, Newest::Other { free: true, by: Some(&holder) }, false), Step::Make);
        }
    }

    #[test]
    fn a_claim_without_a_word_is_followed_when_its_maker_has_had_time_and_holds_it_no_more() {
        let by = of(None, 0);
        let unfinished = |free| Newest::Other { free, by: None };
        assert_eq!(step(&by, unfinished(true), false), Step::Pause);
        assert_eq!(step(&by, unfinished(true), true), Step::Make);
        assert_eq!(step(&by, unfinished(false), true), Step::Held);
    }

    #[test]
    fn only_the_newest_claim_counts() {
        assert_eq!(check(3, 3), Ok(()));
        assert!(check(3, 4).is_err_and(|why| why.contains("taken over")));
        assert!(check(3, 0).is_err_and(|why| why.contains("removed")));
    }
}
