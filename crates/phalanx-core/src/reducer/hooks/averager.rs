//! Averages the model itself, for replicas that train by themselves for several steps.

use crate::error::{Error, Result};

/// A replica of a model: the `Ddp` of an adapter.
pub trait Replica {
    /// Replaces the parameters of all replicas by their average. All ranks call it together, and first compare what averages them: `averager`
    /// describes it.
    ///
    /// # Errors
    /// On every rank, if `averager` differs, with [`verify_description`](crate::reducer::verify_description). If a collective fails.
    fn average_parameters(&mut self, averager: &str) -> Result<()>;
}

/// Averages the parameters of all replicas every few steps: PyTorch's `PeriodicModelAverager`.
///
/// It belongs to the hook [`PostLocalSgd`](super::PostLocalSgd), whose replicas drift apart:
///
/// ```
/// # use phalanx::Result;
/// # use phalanx::reducer::hooks::Replica;
/// # fn train(ddp: &mut impl Replica) -> Result<()> {
/// use phalanx::reducer::hooks::PeriodicModelAverager;
///
/// // `PostLocalSgd::new(1000)` averages gradients for 1000 steps; then the model is averaged in every 4th step.
/// let mut averager = PeriodicModelAverager::new(4)?.warmup_steps(1000);
/// for step in 0..2000 {
///     // ... forward, backward, a step of the optimizer ...
///     averager.step(ddp)?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// The optimizer's state and buffers are not averaged, as in PyTorch.
///
/// Each average compares the period, the first steps that are left out, and the number of steps over the ranks: those of ranks that differ would be of
/// models after other numbers of steps, without an error. The number of steps is left out where every step is averaged.
///
/// How many steps there have been decides when the next average is due. `TrainState::with_averager` of an adapter makes that a part of
/// checkpoints.
#[derive(Clone, Debug)]
pub struct PeriodicModelAverager {
    period: u64,
    warmup_steps: u64,
    step: u64,
}

impl PeriodicModelAverager {
    /// Averages every `period` steps.
    ///
    /// # Errors
    /// If `period` is 0.
    pub fn new(period: u64) -> Result<Self> {
        if period == 0 {
            return Err(Error::invalid_argument("the period of a model averager is 0")
                .with_remedy("give a number of steps from 1 on"));
        }
        Ok(Self { period, warmup_steps: 0, step: 0 })
    }

    /// Leaves out the first `steps` steps, in which gradients are averaged.
    pub fn warmup_steps(mut self, steps: u64) -> Self {
        self.warmup_steps = steps;
        self
    }

    /// How many steps there have been.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Goes on after so many steps.
    pub fn resume_at(&mut self, steps: u64) {
        self.step = steps;
    }

    /// Call it after a step of the optimizer. Returns whether the model was averaged. All ranks call it together.
    ///
    /// # Errors
    /// As [`Replica::average_parameters`]. On every rank of an average, if their averagers have other settings, or, unless every step is averaged, have made
    /// other numbers of steps, as after an uneven [`join`](crate::join) whose ranks did not take over a number with [`resume_at`](Self::resume_at).
    /// After an error the step does not count: the next call averages.
    pub fn step(&mut self, replica: &mut impl Replica) -> Result<bool> {
        let after = self.step.checked_sub(self.warmup_steps);
        let due = after.is_some_and(|after| after.is_multiple_of(self.period));
        if due {
            replica.average_parameters(&self.describe())?;
        }
        // A saved number may be any.
        self.step = self.step.saturating_add(1);
        Ok(due)
    }

    /// What the ranks of an average compare. One after every step is due after any number of them.
    fn describe(&self) -> String {
        match self {
            Self { period: 1, warmup_steps: 0, .. } => {
                "PeriodicModelAverager { period: 1, warmup_steps: 0 }".to_owned()
            }
            Self { .. } => format!("{self:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::ProcessGroup;
    use crate::reducer::verify_description;
    use crate::testing::{Fabric, run};

    struct Counted(u32);

    impl Replica for Counted {
        fn average_parameters(&mut self, _: &str) -> Result<()> {
            self.0 += 1;
            Ok(())
        }
    }

    /// Only compares.
    impl Replica for ProcessGroup {
        fn average_parameters(&mut self, averager: &str) -> Result<()> {
            verify_description(&*self, "model averager", averager)
        }
    }

    #[test]
    fn averagers_that_differ_at_an_average_are_an_error_on_every_rank() {
        let averager = |period, warmup| PeriodicModelAverager::new(period).unwrap().warmup_steps(warmup);
        let mut late = averager(2, 0);
        late.resume_at(1);
        for (other, expected) in [
            (averager(2, 0), false),
            // The first average of one would be that of other steps of the other.
            (averager(4, 0), true),
            (averager(2, 2), true),
            (late, true),
        ] {
            let errors = run(2, Fabric::InProcess, |mut group| {
                let mut own = if group.rank().is_main() { averager(2, 0) } else { other.clone() };
                (0..8).find_map(|_| own.step(&mut group).err())
            });
            for error in errors {
                assert_eq!(error.is_some(), expected, "{other:?}: {error:?}");
                assert!(error.is_none_or(|error| error.is_mismatch() && error.remedy().is_some()));
            }
        }
    }

    #[test]
    fn an_average_that_failed_is_still_due() {
        struct Failing(u32);
        impl Replica for Failing {
            fn average_parameters(&mut self, _: &str) -> Result<()> {
                self.0 += 1;
                if self.0 == 2 { Err(Error::invalid_argument("the second average fails")) } else { Ok(()) }
            }
        }
        let (mut replica, mut averager) = (Failing(0), PeriodicModelAverager::new(2).unwrap());
        let steps = (0..6).map(|_| averager.step(&mut replica).ok());
        let steps: Vec<Option<bool>> = steps.collect();
        assert_eq!(steps, [Some(true), Some(false), None, Some(true), Some(false), Some(true)]);
        assert_eq!(averager.steps(), 5);
    }

    #[test]
    fn an_average_of_every_step_may_come_after_other_numbers_of_steps() {
        run(2, Fabric::InProcess, |mut group| {
            let mut own = PeriodicModelAverager::new(1).unwrap();
            own.resume_at(group.rank().get().into());
            for _ in 0..3 {
                assert!(own.step(&mut group).unwrap());
            }
        });
    }

    #[test]
    fn the_model_is_averaged_every_few_steps_after_the_first_ones_also_after_a_restart() {
        let mut replica = Counted(0);
        let mut averager = PeriodicModelAverager::new(3).unwrap().warmup_steps(4);
        let due: Vec<bool> = (0..6).map(|_| averager.step(&mut replica).unwrap()).collect();
        assert_eq!(due, [false, false, false, false, true, false]);
        let mut again = PeriodicModelAverager::new(3).unwrap().warmup_steps(4);
        again.resume_at(averager.steps());
        let due: Vec<bool> = (0..6).map(|_| again.step(&mut replica).unwrap()).collect();
        assert_eq!((due, replica.0), (vec![false, true, false, false, true, false], 3));
        assert!(PeriodicModelAverager::new(0).is_err());
    }
}
