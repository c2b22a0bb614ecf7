//! Averages the model itself, for replicas that train by themselves for several steps.

use crate::error::{Error, Result};

/// A replica of a model: the `Ddp` of an adapter.
pub trait Replica {
    /// Replaces the parameters of all replicas by their average. All ranks call it together.
    ///
    /// # Errors
    /// If a collective fails.
    fn average_parameters(&mut self) -> Result<()>;
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
    /// As [`Replica::average_parameters`].
    pub fn step(&mut self, replica: &mut impl Replica) -> Result<bool> {
        let after = self.step.checked_sub(self.warmup_steps);
        // A saved number may be any.
        self.step = self.step.saturating_add(1);
        let due = after.is_some_and(|after| after.is_multiple_of(self.period));
        if due {
            replica.average_parameters()?;
        }
        Ok(due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Counted(u32);

    impl Replica for Counted {
        fn average_parameters(&mut self) -> Result<()> {
            self.0 += 1;
            Ok(())
        }
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
