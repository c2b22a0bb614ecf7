//! Learning rates for the larger batch of many ranks.

use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::{ModuleLearningRate, ModuleLrScheduler};
use burn::lr_scheduler::sequential::SequentialLrSchedulerConfig;
use burn::lr_scheduler::{DynLrScheduler, LrScheduler, LrSchedulerConfig, LrSchedulerRecord};
use phalanx::{Error, Result, WorldSize};

use crate::parameters::Parameter;

/// The learning rate of each of these parameters.
pub(crate) fn of_each(rates: &ModuleLearningRate, parameters: &[Parameter]) -> impl Iterator<Item = f64> {
    parameters.iter().map(move |one| rates.lr_from_param(one.id, Some(&one.name)))
}

/// An error for a rate by which no training goes, such as that of a schedule that divides by zero: parameters would become NaN.
pub(crate) fn check(rates: &ModuleLearningRate, parameters: &[Parameter]) -> Result<()> {
    let Some((rate, one)) = of_each(rates, parameters).zip(parameters).find(|(rate, _)| !rate.is_finite())
    else {
        return Ok(());
    };
    Err(Error::invalid_argument(format!("a step with the learning rate {rate}, of `{}`", one.name))
        .with_remedy("give it one that is finite"))
}

/// How the learning rate depends on the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LrScaling {
    /// Proportional to the number of ranks: Goyal et al., *Accurate, Large Minibatch SGD*, 2017. For SGD.
    Linear,
    /// Proportional to its square root, which keeps the variance of a step: Krizhevsky, 2014; for Adam and similar
    /// optimizers, Malladi et al., *On the SDEs and Scaling Rules for Adaptive Gradient Algorithms*, 2022.
    SquareRoot,
}

impl LrScaling {
    /// The factor for `world` ranks, each with the batch that one process had.
    pub fn factor(self, world: WorldSize) -> f64 {
        let world = f64::from(world.get());
        match self {
            Self::Linear => world,
            Self::SquareRoot => world.sqrt(),
        }
    }
}

/// Another scheduler's learning rate, made for one process, times a factor for the larger batch.
///
/// With [`warmup_steps`](Self::warmup_steps) the factor grows linearly from 1, because the full rate is too large for
/// the first steps of a new model.
///
/// ```
/// use burn::lr_scheduler::LrScheduler;
/// use burn::lr_scheduler::constant::ConstantLr;
/// use phalanx::WorldSize;
/// use phalanx_burn::{LrScaling, ScaledLrScheduler};
///
/// let world = WorldSize::new(4)?;
/// let mut lr = ScaledLrScheduler::new(ConstantLr::new(0.1), LrScaling::Linear, world).warmup_steps(3);
/// let rates: Vec<f64> = (0..5).map(|_| (lr.step() * 10.0).round() / 10.0).collect();
/// assert_eq!(rates, [0.1, 0.2, 0.3, 0.4, 0.4]);
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// It is a scheduler of Burn's, so it can be saved, composed, and given to a `ModuleLrScheduler`.
#[derive(Clone)]
pub struct ScaledLrScheduler {
    inner: DynLrScheduler,
    factor: f64,
    warmup_steps: usize,
    step: usize,
}

impl ScaledLrScheduler {
    /// `inner`'s learning rate for `world` ranks.
    pub fn new(inner: impl Into<DynLrScheduler>, scaling: LrScaling, world: WorldSize) -> Self {
        Self { inner: inner.into(), factor: scaling.factor(world), warmup_steps: 0, step: 0 }
    }

    /// The factor grows to its full value in `steps` steps.
    pub fn warmup_steps(mut self, steps: usize) -> Self {
        self.warmup_steps = steps;
        self
    }
}

impl LrScheduler for ScaledLrScheduler {
    fn step(&mut self) -> f64 {
        let share =
            if self.step < self.warmup_steps { self.step as f64 / self.warmup_steps as f64 } else { 1.0 };
        self.step = self.step.saturating_add(1);
        self.inner.step() * (1.0 + (self.factor - 1.0) * share)
    }

    fn to_record(&self) -> LrSchedulerRecord {
        LrSchedulerRecord::new().with_scalar("step", self.step).with_record("inner", self.inner.to_record())
    }

    fn load_record(&mut self, record: LrSchedulerRecord) {
        if let Some(step) = record.scalar("step") {
            self.step = step;
        }
        self.inner = self.inner.clone().load_record(record.record("inner"));
    }
}

/// A learning rate that grows linearly to `peak` over the first `warmup` of `steps` steps, and then falls to zero along
/// a cosine: transformers' `get_cosine_schedule_with_warmup`, made of Burn's own schedulers. The first step has `peak / warmup`, where
/// transformers' has 0 and learns nothing; from the peak on the rates are the same.
///
/// ```
/// let mut rates = phalanx_burn::cosine_with_warmup(0.1, 2, 6)?;
/// let rates: Vec<f64> = (0..8).map(|_| (rates.step().base() * 1000.0).round() / 1000.0).collect();
/// assert_eq!(rates, [0.05, 0.1, 0.1, 0.085, 0.05, 0.015, 0.0, 0.0]);
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// # Errors
/// If `peak` is not in (0, 1], or `warmup` is not less than `steps`.
pub fn cosine_with_warmup(peak: f64, warmup: usize, steps: usize) -> Result<ModuleLrScheduler> {
    if warmup >= steps {
        return Err(Error::invalid_argument(format!(
            "a warm-up of {warmup} steps is not over after {steps}"
        ))
        .with_remedy("give fewer steps of warm-up than steps in all"));
    }
    let rise = match warmup {
        0 => None,
        1 => Some(LrSchedulerConfig::Constant(peak)),
        _ => Some(LinearLrSchedulerConfig::new(peak / warmup as f64, peak, warmup - 1).into()),
    };
    let decay = CosineAnnealingLrSchedulerConfig::new(peak, steps - warmup);
    // After its minimum a cosine would rise again.
    let stages = rise.into_iter().chain([decay.into(), LrSchedulerConfig::Constant(0.0)]).collect();
    let ends = [warmup, steps].into_iter().filter(|end| *end > 0).collect();
    SequentialLrSchedulerConfig::new(stages, ends).init().map_err(Error::invalid_argument)
}

#[cfg(test)]
mod tests {
    use burn::lr_scheduler::exponential::ExponentialLrSchedulerConfig;
    use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;

    use super::*;

    #[test]
    fn a_saved_scheduler_goes_on_where_it_was() {
        struct Inner(ModuleLrScheduler);
        impl Clone for Inner {
            fn clone(&self) -> Self {
                Self(self.0.clone())
            }
        }
        impl LrScheduler for Inner {
            fn step(&mut self) -> f64 {
                self.0.step().base()
            }
            fn to_record(&self) -> LrSchedulerRecord {
                self.0.to_record()
            }
            fn load_record(&mut self, record: LrSchedulerRecord) {
                self.0 = self.0.clone().load_record(record);
            }
        }
        let new = || {
            let inner = ExponentialLrSchedulerConfig::new(0.5, 0.9).init().unwrap();
            ScaledLrScheduler::new(Inner(inner), LrScaling::SquareRoot, WorldSize::new(9).unwrap())
                .warmup_steps(4)
        };
        let mut whole = new();
        let expected: Vec<f64> = (0..8).map(|_| whole.step()).collect();
        let mut first = new();
        let mut rates: Vec<f64> = (0..3).map(|_| first.step()).collect();
        let mut second = new();
        second.load_record(first.to_record());
        rates.extend((0..5).map(|_| second.step()));
        assert_eq!(rates, expected);
        assert!((rates[0] - 0.5).abs() < 1e-12, "the warm-up begins at the rate of one process");
        assert!((rates[7] - 3.0 * 0.5 * 0.9f64.powi(7)).abs() < 1e-12);
    }
}
