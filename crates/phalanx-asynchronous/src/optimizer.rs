//! Update rules over flat memory: what a server does with a gradient.
//!
//! Update rules exist twice. The fused optimizers of phalanx-burn follow Burn's arithmetic, with its defaults and
//! roundings. These follow PyTorch's, and know no tensors. Only four loops could be shared.

use pulp::Arch;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::hash::fnv1a;

/// How gradients change parameters. The arithmetic must be the same for each element, whatever its neighbours.
pub trait UpdateRule: Send + Sync {
    /// How many arrays of the length of the parameters the rule keeps. They are zero at first.
    fn states(&self) -> usize;

    /// A number that differs between rules whose settings differ. Ranks compare theirs when a
    /// [`ParameterServer`](super::ParameterServer) starts; rules that leave it at 0 are not compared.
    fn fingerprint(&self) -> u64 {
        0
    }

    /// Checks the settings, where a [`ParameterServer`](super::ParameterServer) or a [`LocalUpdates`](super::LocalUpdates) begins with them. By default
    /// nothing is checked.
    ///
    /// # Errors
    /// If no training goes by them, as with a learning rate that is not a number: the parameters of all workers would become NaN.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Takes update number `time` of these parameters, from 1 on. `scale` multiplies the learning rate. All slices are
    /// equally long.
    fn update(
        &self,
        time: u64,
        scale: f32,
        parameters: &mut [f32],
        gradients: &[f32],
        states: &mut [&mut [f32]],
    );
}

/// An error if one of a rule's settings is negative, infinite or not a number, as in PyTorch.
fn check_sizes(settings: &[(&str, f32)]) -> Result<()> {
    match settings.iter().find(|(_, value)| !(0.0..=f32::MAX).contains(value)) {
        None => Ok(()),
        Some((name, value)) => {
            Err(Error::invalid_argument(format!("the {name} of an update rule is {value}"))
                .with_remedy("give it one that is finite, and not negative"))
        }
    }
}

/// Stochastic gradient descent, as PyTorch's `SGD`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sgd {
    /// The learning rate.
    pub learning_rate: f32,
    /// The share of the past in the velocity; 0: no velocity is kept.
    pub momentum: f32,
    /// The part of a gradient that does not enter the velocity, but for the first.
    pub dampening: f32,
    /// Nesterov's form of momentum, which needs a momentum, and no dampening.
    pub nesterov: bool,
    /// A penalty on the size of the parameters, added to the gradient.
    pub weight_decay: f32,
}

impl Sgd {
    /// Without momentum and weight decay.
    pub fn new(learning_rate: f32) -> Self {
        Self { learning_rate, momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: 0.0 }
    }

    /// With `momentum`, without dampening.
    #[must_use]
    pub fn with_momentum(self, momentum: f32) -> Self {
        Self { momentum, ..self }
    }

    #[inline(always)]
    fn plain(self, rate: f32, parameters: &mut [f32], gradients: &[f32]) {
        for (p, g) in parameters.iter_mut().zip(gradients) {
            *p -= (*p * self.weight_decay + *g) * rate;
        }
    }

    #[inline(always)]
    fn moving(self, rate: f32, first: bool, parameters: &mut [f32], gradients: &[f32], velocity: &mut [f32]) {
        let fresh = if first { 1.0 } else { 1.0 - self.dampening };
        let Self { momentum, nesterov, weight_decay, .. } = self;
        for ((p, g), v) in parameters.iter_mut().zip(gradients).zip(velocity) {
            let g = *p * weight_decay + *g;
            *v = g * fresh + *v * momentum;
            let direction = if nesterov { *v * momentum + g } else { *v };
            *p -= direction * rate;
        }
    }
}

impl UpdateRule for Sgd {
    fn states(&self) -> usize {
        usize::from(self.momentum != 0.0)
    }

    fn fingerprint(&self) -> u64 {
        fnv1a(format!("{self:?}").bytes())
    }

    fn check(&self) -> Result<()> {
        let Self { learning_rate, momentum, dampening, nesterov, weight_decay } = *self;
        check_sizes(&[
            ("learning rate", learning_rate),
            ("momentum", momentum),
            ("weight decay", weight_decay),
        ])?;
        if !dampening.is_finite() {
            return Err(Error::invalid_argument(format!("the dampening of an update rule is {dampening}"))
                .with_remedy("give it one that is finite"));
        }
        if nesterov && (momentum == 0.0 || dampening != 0.0) {
            let cause = format!(
                "Nesterov's form of momentum, with a momentum of {momentum} and a dampening of {dampening}"
            );
            return Err(Error::invalid_argument(cause).with_remedy(
                "give it a momentum, and no dampening, as in PyTorch; or leave `nesterov` out",
            ));
        }
        Ok(())
    }

    fn update(
        &self,
        time: u64,
        scale: f32,
        parameters: &mut [f32],
        gradients: &[f32],
        states: &mut [&mut [f32]],
    ) {
        let rate = self.learning_rate * scale;
        match states.first_mut() {
            None => Arch::new().dispatch(|| self.plain(rate, parameters, gradients)),
            Some(velocity) => {
                Arch::new().dispatch(|| self.moving(rate, time == 1, parameters, gradients, velocity));
            }
        }
    }
}

/// Adam and AdamW, as PyTorch's.
///
/// Sources: D. Kingma and J. Ba, *Adam: A Method for Stochastic Optimization*, 2015; I. Loshchilov and F. Hutter, *Decoupled
/// Weight Decay Regularization*, 2019.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// The learning rate.
    pub learning_rate: f32,
    /// The share of the past in the mean of the gradients.
    pub beta_1: f32,
    /// The share of the past in the mean of their squares.
    pub beta_2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// A penalty on the size of the parameters.
    pub weight_decay: f32,
    /// Shrinks the parameters themselves (AdamW) instead of adding the penalty to the gradient.
    pub decoupled: bool,
}

impl Adam {
    /// Adam without weight decay.
    pub fn new(learning_rate: f32) -> Self {
        let (beta_1, beta_2, epsilon) = (0.9, 0.999, 1e-8);
        Self { learning_rate, beta_1, beta_2, epsilon, weight_decay: 0.0, decoupled: false }
    }

    /// AdamW.
    pub fn w(learning_rate: f32, weight_decay: f32) -> Self {
        Self { weight_decay, decoupled: true, ..Self::new(learning_rate) }
    }

    #[inline(always)]
    fn apply(
        self,
        rate: f32,
        (correction_1, correction_2): (f32, f32),
        parameters: &mut [f32],
        gradients: &[f32],
        moment_1: &mut [f32],
        moment_2: &mut [f32],
    ) {
        let Self { beta_1, beta_2, epsilon, .. } = self;
        let (penalty, keep) = match self.decoupled {
            true => (0.0, 1.0 - rate * self.weight_decay),
            false => (self.weight_decay, 1.0),
        };
        for (((p, g), m), v) in parameters.iter_mut().zip(gradients).zip(moment_1).zip(moment_2) {
            let g = *p * penalty + *g;
            *m = *m * beta_1 + g * (1.0 - beta_1);
            *v = *v * beta_2 + g * g * (1.0 - beta_2);
            let delta = (*m / correction_1) / ((*v / correction_2).sqrt() + epsilon);
            *p = *p * keep - delta * rate;
        }
    }
}

impl UpdateRule for Adam {
    fn states(&self) -> usize {
        2
    }

    fn fingerprint(&self) -> u64 {
        fnv1a(format!("{self:?}").bytes())
    }

    fn check(&self) -> Result<()> {
        let Self { learning_rate, beta_1, beta_2, epsilon, weight_decay, decoupled: _ } = *self;
        check_sizes(&[
            ("learning rate", learning_rate),
            ("epsilon", epsilon),
            ("weight decay", weight_decay),
        ])?;
        // With 1 the first correction would be a division by zero.
        match [beta_1, beta_2].iter().find(|beta| !(0.0..1.0).contains(*beta)) {
            None => Ok(()),
            Some(beta) => Err(Error::invalid_argument(format!("a beta of Adam is {beta}"))
                .with_remedy("give betas from 0 on that are below 1")),
        }
    }

    fn update(
        &self,
        time: u64,
        scale: f32,
        parameters: &mut [f32],
        gradients: &[f32],
        states: &mut [&mut [f32]],
    ) {
        let [moment_1, moment_2, ..] = states else { return };
        let power = i32::try_from(time).unwrap_or(i32::MAX);
        // In f64, as PyTorch: in f32 a power near 1 leaves few digits of the difference.
        let correction = |beta: f32| (1.0 - f64::from(beta).powi(power)) as f32;
        let corrections = (correction(self.beta_1), correction(self.beta_2));
        let rate = self.learning_rate * scale;
        Arch::new().dispatch(|| self.apply(rate, corrections, parameters, gradients, moment_1, moment_2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `rule` on gradients p - 1, p + 0.5, .. and gives the parameters.
    fn run(rule: &dyn UpdateRule, steps: u64) -> Vec<f32> {
        let mut parameters = vec![1.0f32, -2.0, 0.5];
        let mut states = vec![vec![0.0; 3]; rule.states()];
        for time in 1..=steps {
            let gradients: Vec<f32> =
                parameters.iter().zip([1.0, -0.5, 2.0]).map(|(p, offset)| p * 0.5 - offset).collect();
            let mut states: Vec<&mut [f32]> = states.iter_mut().map(Vec::as_mut_slice).collect();
            rule.update(time, 1.0, &mut parameters, &gradients, &mut states);
        }
        parameters
    }

    fn close(left: &[f32], right: &[f32]) {
        let is_close = left.iter().zip(right).all(|(left, right)| (left - right).abs() < 2e-6);
        assert!(left.len() == right.len() && is_close, "{left:?}, {right:?}");
    }

    #[test]
    fn rules_by_which_no_training_goes_are_refused() {
        let group = crate::group::ProcessGroup::alone().unwrap();
        let start =
            |rule: Sgd| crate::ParameterServer::builder(&[3], rule).start(&group, &mut [0.0; 3]).err();
        let sgd = Sgd::new(0.1);
        let nesterov = Sgd { nesterov: true, ..sgd };
        for rule in [
            Sgd::new(f32::NAN),
            Sgd::new(-0.1),
            sgd.with_momentum(f32::INFINITY),
            sgd.with_momentum(-0.9),
            Sgd { weight_decay: f32::NAN, ..sgd },
            Sgd { dampening: f32::NAN, ..sgd },
            // As SGD without momentum, or with another gradient than Nesterov's.
            nesterov,
            Sgd { dampening: 0.1, ..nesterov.with_momentum(0.9) },
        ] {
            assert!(start(rule).unwrap().is_invalid_argument(), "{rule:?}");
        }
        let adam = Adam::new(0.1);
        for rule in [
            Adam::new(f32::INFINITY),
            Adam::w(0.1, -0.1),
            Adam { epsilon: f32::NAN, ..adam },
            Adam { beta_1: -0.1, ..adam },
            Adam { beta_2: 1.0, ..adam },
        ] {
            assert!(rule.check().unwrap_err().is_invalid_argument(), "{rule:?}");
        }
        for delay in [
            crate::DelayCompensation::Constant(f32::NAN),
            crate::DelayCompensation::Adaptive { lambda: 0.1, mean: 1.5 },
        ] {
            let compensation = crate::Compensation { staleness_aware: false, delay: Some(delay) };
            let server = crate::ParameterServer::builder(&[3], sgd).compensation(compensation);
            let error = server.start(&group, &mut [0.0; 3]).err().unwrap();
            assert!(error.is_invalid_argument(), "{error}");
        }
        Sgd::new(0.0).check().unwrap();
        nesterov.with_momentum(0.9).check().unwrap();
        Adam { beta_1: 0.0, ..Adam::w(0.1, 0.1) }.check().unwrap();
    }

    /// Computed with torch.optim (2.x), in double precision.
    #[test]
    fn the_results_are_pytorch_s() {
        let reference = |name: &str| -> Vec<f32> {
            let line = REFERENCE.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().skip(1).map(|number| number.parse().unwrap()).collect()
        };
        close(&run(&Sgd::new(0.1), 5), &reference("sgd "));
        close(&run(&Sgd::new(0.1).with_momentum(0.9), 5), &reference("momentum "));
        let nesterov = Sgd { nesterov: true, weight_decay: 0.01, ..Sgd::new(0.1).with_momentum(0.9) };
        close(&run(&nesterov, 5), &reference("nesterov "));
        close(&run(&Sgd { dampening: 0.3, ..Sgd::new(0.1).with_momentum(0.9) }, 5), &reference("dampening "));
        close(&run(&Adam::new(0.1), 5), &reference("adam "));
        close(&run(&Adam { weight_decay: 0.1, ..Adam::new(0.1) }, 5), &reference("adam_l2 "));
        close(&run(&Adam::w(0.1, 0.1), 5), &reference("adamw "));
    }

    const REFERENCE: &str = "
sgd 1.226219063 -1.773780937 1.291766719
momentum 1.582844062 -1.417155938 2.539954219
nesterov 1.667557563 -1.291571565 2.877322343
dampening 1.475901094 -1.524098906 2.165653830
adam 1.492036333 -1.507963667 0.998518958
adam_l2 1.484095683 -1.506276207 0.998092979
adamw 1.434500016 -1.422362792 0.964228955";

    /// Gradients that stay the same have their own value as mean, and its square as second moment.
    #[test]
    fn steps_along_one_gradient_are_as_long_as_the_learning_rate_from_the_first_on() {
        let mut states = [[0.0f32; 1], [0.0; 1]];
        for time in 1..=1000 {
            let mut parameters = [0.0f32];
            let [first, second] = &mut states;
            let mut states = [first.as_mut_slice(), second.as_mut_slice()];
            Adam::new(1.0).update(time, 1.0, &mut parameters, &[1.0], &mut states);
            assert!((parameters[0] + 1.0).abs() < 2e-6, "step {time}: {}", parameters[0]);
        }
    }

    #[test]
    fn the_scale_multiplies_the_learning_rate() {
        let (mut scaled, mut smaller) = ([1.0f32; 5], [1.0f32; 5]);
        Sgd::new(0.2).update(1, 0.25, &mut scaled, &[3.0; 5], &mut []);
        Sgd::new(0.05).update(1, 1.0, &mut smaller, &[3.0; 5], &mut []);
        assert_eq!(scaled, smaller);
    }
}
