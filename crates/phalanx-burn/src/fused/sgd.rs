//! Stochastic gradient descent in one pass.

use burn::config::Config;
use burn::grad_clipping::GradientClippingConfig;
use burn::optim::decay::{WeightDecay, WeightDecayConfig};
use burn::optim::momentum::{Momentum, MomentumConfig, MomentumState};
use burn::optim::{LearningRate, ModuleOptimizer, Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{DType, Device, Tensor};
use pulp::Arch;
use rayon::prelude::*;

use super::CHUNK;
use super::real::Real;
use super::storage::{Storage, is_empty, loaded, supported};

/// The name under which Burn's SGD saves the velocity.
const VELOCITY: &str = "momentum.velocity";

/// [`FusedSgd`]'s configuration; the same as that of Burn's SGD.
///
/// ```
/// use burn::optim::momentum::MomentumConfig;
/// use phalanx_burn::FusedSgdConfig;
/// let momentum = MomentumConfig::new().with_dampening(0.0).with_nesterov(true);
/// let optimizer = FusedSgdConfig::new().with_momentum(Some(momentum)).init();
/// ```
#[derive(Config, Debug)]
pub struct FusedSgdConfig {
    /// A penalty on the size of the weights, added to the gradient.
    pub weight_decay: Option<WeightDecayConfig>,
    /// Momentum, its dampening, and Nesterov's form of it. Burn's dampening is 0.1 unless it is set; PyTorch's is 0.
    pub momentum: Option<MomentumConfig>,
    /// Clips gradients first, as Burn's optimizers do.
    pub gradient_clipping: Option<GradientClippingConfig>,
}

impl FusedSgdConfig {
    /// The bare optimizer, for [`ModuleOptimizer::with_group`] and for flat memory.
    pub fn build(&self) -> FusedSgd {
        FusedSgd { weight_decay: self.weight_decay.clone(), momentum: self.momentum.clone() }
    }

    /// An optimizer for a whole module.
    pub fn init(&self) -> ModuleOptimizer {
        let optimizer = ModuleOptimizer::from(self.build());
        match &self.gradient_clipping {
            Some(clipping) => optimizer.with_grad_clipping(clipping.init()),
            None => optimizer,
        }
    }
}

/// Burn's [`Sgd`](burn::optim::Sgd) in one pass over memory: the same results, and state that is saved under the
/// same names.
///
/// See [`FusedAdamW`](crate::FusedAdamW) for where it works in place.
#[derive(Clone, Debug)]
pub struct FusedSgd {
    weight_decay: Option<WeightDecayConfig>,
    momentum: Option<MomentumConfig>,
}

/// The state of [`FusedSgd`] for one parameter.
#[derive(Clone, Debug)]
pub struct FusedSgdState<const D: usize> {
    /// The running sum of gradients; none without momentum.
    pub velocity: Option<Tensor<D>>,
}

impl FusedSgd {
    /// Does a step on flat memory. `velocity` is the result of the last step; in the first step with momentum, where
    /// `first` is set, it is only written. Without momentum it may be empty.
    ///
    /// # Panics
    /// If the slices are not equally long.
    pub fn update<T: Real>(
        &self,
        learning_rate: LearningRate,
        first: bool,
        parameters: &mut [T],
        gradients: &[T],
        velocity: &mut [T],
    ) {
        let elements = parameters.len();
        assert_eq!(gradients.len(), elements, "parameters and gradients must be equally long");
        let step = Step {
            penalty: self.weight_decay.as_ref().map(|decay| T::of(f64::from(decay.penalty))),
            learning_rate: T::of(learning_rate),
        };
        let arch = Arch::new();
        let Some(momentum) = &self.momentum else {
            let chunks = parameters.par_chunks_mut(CHUNK).zip(gradients.par_chunks(CHUNK));
            chunks.for_each(|(p, g)| arch.dispatch(|| step.plain(p, g)));
            return;
        };
        assert_eq!(velocity.len(), elements, "parameters and velocity must be equally long");
        let inertia = Inertia {
            // Burn keeps the momentum in single precision.
            momentum: T::of(f64::from(momentum.momentum as f32)),
            fresh: T::of(1.0 - momentum.dampening),
            nesterov: momentum.nesterov,
            first,
        };
        parameters
            .par_chunks_mut(CHUNK)
            .zip(gradients.par_chunks(CHUNK))
            .zip(velocity.par_chunks_mut(CHUNK))
            .for_each(|((p, g), v)| arch.dispatch(|| step.with_momentum(inertia, p, g, v)));
    }

    fn step_here<T: Real, const D: usize>(
        &self,
        learning_rate: LearningRate,
        tensor: Tensor<D>,
        gradient: Tensor<D>,
        velocity: Option<Tensor<D>>,
    ) -> (Tensor<D>, Option<Tensor<D>>) {
        let first = velocity.is_none();
        let velocity = velocity.or_else(|| self.momentum.as_ref().map(|_| gradient.zeros_like()));
        let (mut p, g, mut v) = (Storage::of(tensor), Storage::of(gradient), velocity.map(Storage::of));
        let velocity = v.as_mut().map_or(&mut [][..], Storage::elements_mut);
        self.update::<T>(learning_rate, first, p.elements_mut(), g.elements(), velocity);
        (p.into_tensor(), v.map(Storage::into_tensor))
    }

    /// The same with tensor operations.
    fn step_composed<const D: usize>(
        &self,
        learning_rate: LearningRate,
        tensor: Tensor<D>,
        mut gradient: Tensor<D>,
        mut velocity: Option<Tensor<D>>,
    ) -> (Tensor<D>, Option<Tensor<D>>) {
        if let Some(decay) = &self.weight_decay {
            gradient = WeightDecay::new(decay).transform(gradient, tensor.clone());
        }
        if let Some(config) = &self.momentum {
            let last = velocity.take().map(MomentumState::new);
            let (direction, _) = Momentum::new(config).transform(gradient.clone(), last.clone());
            // The state does not show the velocity. It is the direction without Nesterov momentum.
            velocity = Some(match config.nesterov {
                false => direction.clone(),
                true => Momentum::new(&config.clone().with_nesterov(false)).transform(gradient, last).0,
            });
            gradient = direction;
        }
        (tensor - gradient.mul_scalar(learning_rate), velocity)
    }
}

impl Optimizer for FusedSgd {
    type State<const D: usize> = FusedSgdState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let velocity = state.and_then(|state| state.velocity).filter(|_| self.momentum.is_some());
        let dtype = supported(&tensor).filter(|dtype| {
            let same = |other: &Tensor<D>| supported(other) == Some(*dtype);
            same(&grad) && velocity.as_ref().is_none_or(same)
        });
        let (tensor, velocity) = match dtype {
            Some(DType::F32) => self.step_here::<f32, D>(lr, tensor, grad, velocity),
            Some(DType::F64) => self.step_here::<f64, D>(lr, tensor, grad, velocity),
            _ if is_empty(&tensor) => (tensor, velocity.or_else(|| self.momentum.as_ref().map(|_| grad))),
            _ => self.step_composed(lr, tensor, grad, velocity),
        };
        (tensor, Some(FusedSgdState { velocity }))
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        FusedSgdState { velocity: state.velocity.map(|velocity| velocity.to_device(device)) }
    }
}

impl<const D: usize> RecordState for FusedSgdState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        if let Some(velocity) = &self.velocity {
            out.push_tensor(prefix, VELOCITY, velocity.to_data());
        }
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        let velocity = src.take_tensor(prefix, VELOCITY);
        Some(Self { velocity: velocity.map(|velocity| loaded(velocity, device)) })
    }
}

/// Values that are the same for all elements of a step.
#[derive(Clone, Copy)]
struct Step<T> {
    penalty: Option<T>,
    learning_rate: T,
}

#[derive(Clone, Copy)]
struct Inertia<T> {
    momentum: T,
    fresh: T,
    nesterov: bool,
    first: bool,
}

impl<T: Real> Step<T> {
    #[inline(always)]
    fn decayed(self, parameter: T, gradient: T) -> T {
        match self.penalty {
            Some(penalty) => parameter * penalty + gradient,
            None => gradient,
        }
    }

    /// Inlined into code for the host's processor, where the loop becomes vector instructions.
    #[inline(always)]
    fn plain(self, parameters: &mut [T], gradients: &[T]) {
        for (p, g) in parameters.iter_mut().zip(gradients) {
            *p = *p - self.decayed(*p, *g) * self.learning_rate;
        }
    }

    #[inline(always)]
    fn with_momentum(self, inertia: Inertia<T>, parameters: &mut [T], gradients: &[T], velocity: &mut [T]) {
        let Inertia { momentum, fresh, nesterov, first } = inertia;
        for ((p, g), v) in parameters.iter_mut().zip(gradients).zip(velocity) {
            let g = self.decayed(*p, *g);
            *v = if first { g } else { g * fresh + *v * momentum };
            let direction = if nesterov { *v * momentum + g } else { *v };
            *p = *p - direction * self.learning_rate;
        }
    }
}
