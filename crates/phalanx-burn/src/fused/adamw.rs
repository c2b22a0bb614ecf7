//! AdamW in one pass.

use burn::config::Config;
use burn::grad_clipping::GradientClippingConfig;
use burn::optim::{
    AdamW, AdamWConfig, AdamWState, AdaptiveMomentumState, LearningRate, ModuleOptimizer, Optimizer,
    RecordState, StateSink, StateSource, join_path,
};
use burn::tensor::{DType, Device, Tensor};
use pulp::Arch;
use rayon::prelude::*;

use super::CHUNK;
use super::real::Real;
use super::storage::{Storage, is_empty, loaded, supported};

/// [`FusedAdamW`]'s configuration; the defaults are those of Burn's [`AdamWConfig`]. PyTorch's AdamW has an epsilon of 1e-8 and a weight decay of
/// 0.01.
///
/// ```
/// use burn::optim::ModuleOptimizer;
/// use phalanx_burn::FusedAdamWConfig;
/// let optimizer: ModuleOptimizer = FusedAdamWConfig::new().with_weight_decay(0.01).init();
/// ```
#[derive(Config, Debug)]
pub struct FusedAdamWConfig {
    /// The weight of the past in the mean of the gradients.
    #[config(default = 0.9)]
    pub beta_1: f32,
    /// The weight of the past in the mean of their squares.
    #[config(default = 0.999)]
    pub beta_2: f32,
    /// Added to the root of the second moment, for numerical stability.
    #[config(default = 1e-5)]
    pub epsilon: f32,
    /// Decoupled weight decay.
    #[config(default = 1e-4)]
    pub weight_decay: f32,
    /// Clips gradients first, as Burn's optimizers do.
    pub grad_clipping: Option<GradientClippingConfig>,
}

impl FusedAdamWConfig {
    /// The bare optimizer, for [`ModuleOptimizer::with_group`] and for flat memory.
    pub fn build(&self) -> FusedAdamW {
        let composed = AdamWConfig::new()
            .with_beta_1(self.beta_1)
            .with_beta_2(self.beta_2)
            .with_epsilon(self.epsilon)
            .with_weight_decay(self.weight_decay);
        let Self { beta_1, beta_2, epsilon, weight_decay, .. } = *self;
        FusedAdamW { beta_1, beta_2, epsilon, weight_decay, composed: composed.build() }
    }

    /// An optimizer for a whole module, in place of Burn's [`AdamWConfig::init`].
    pub fn init(&self) -> ModuleOptimizer {
        let optimizer = ModuleOptimizer::from(self.build());
        match &self.grad_clipping {
            Some(clipping) => optimizer.with_grad_clipping(clipping.init()),
            None => optimizer,
        }
    }
}

/// Burn's [`AdamW`] in one pass over memory: the same saved state, and the same results, but for the last bits on LibTorch, whose
/// square roots are rounded in another way.
///
/// On Flex and LibTorch, for f32 and f64, a step reads each parameter, its gradient and both moments once and writes the
/// parameter and the moments once, in place where no other tensor shares the memory, on all threads of the rayon
/// pool. Elsewhere it is Burn's own AdamW, step by step.
///
/// The saved state is that of [`AdamW`]: either optimizer can resume from a checkpoint of the other. Only Burn's has
/// AMSGrad and cautious weight decay. Moments are loaded in the type in which they were saved, such as f64 or bf16: Burn's are loaded in the default
/// type of floats, whatever the parameter's is.
///
/// Source: I. Loshchilov and F. Hutter, *Decoupled Weight Decay Regularization*, 2019.
#[derive(Clone)]
pub struct FusedAdamW {
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    weight_decay: f32,
    /// For tensors for which there is no kernel.
    composed: AdamW,
}

/// The state of [`FusedAdamW`] for one parameter: that of [`AdamW`], saved under the same names.
#[derive(Clone)]
pub struct FusedAdamWState<const D: usize>(pub AdamWState<D>);

impl FusedAdamW {
    /// Does step number `time`, from 1 on, on flat memory: `moment_1` and `moment_2` are zero before the first.
    ///
    /// # Panics
    /// If the slices are not equally long, or `time` is 0, with which parameters would become NaN.
    pub fn update<T: Real>(
        &self,
        learning_rate: LearningRate,
        time: usize,
        parameters: &mut [T],
        gradients: &[T],
        moment_1: &mut [T],
        moment_2: &mut [T],
    ) {
        let elements = parameters.len();
        assert!(
            [gradients.len(), moment_1.len(), moment_2.len()] == [elements; 3],
            "parameters, gradients and moments must be equally long"
        );
        assert!(time > 0, "the first step has the number 1");
        let coefficients = self.coefficients(learning_rate, time);
        let arch = Arch::new();
        parameters
            .par_chunks_mut(CHUNK)
            .zip(gradients.par_chunks(CHUNK))
            .zip(moment_1.par_chunks_mut(CHUNK))
            .zip(moment_2.par_chunks_mut(CHUNK))
            .for_each(|(((p, g), m), v)| arch.dispatch(|| coefficients.apply(p, g, m, v)));
    }

    fn coefficients<T: Real>(&self, learning_rate: LearningRate, time: usize) -> Coefficients<T> {
        // With the precision and the roundings of Burn's AdamW.
        let single = |value: f32| T::of(f64::from(value));
        let power = i32::try_from(time).unwrap_or(i32::MAX);
        Coefficients {
            beta_1: single(self.beta_1),
            beta_2: single(self.beta_2),
            fresh_1: single(1.0 - self.beta_1),
            fresh_2: single(1.0 - self.beta_2),
            correction_1: single(1.0 - self.beta_1.powi(power)),
            correction_2: single(1.0 - self.beta_2.powi(power)),
            epsilon: single(self.epsilon),
            keep: T::of(1.0 - learning_rate * f64::from(self.weight_decay)),
            learning_rate: T::of(learning_rate),
        }
    }

    fn step_here<T: Real, const D: usize>(
        &self,
        learning_rate: LearningRate,
        tensor: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<AdamWState<D>>,
    ) -> (Tensor<D>, AdamWState<D>) {
        let (time, moment_1, moment_2) = match state {
            Some(AdamWState { momentum }) => (momentum.time + 1, momentum.moment_1, momentum.moment_2),
            None => (1, gradient.zeros_like(), gradient.zeros_like()),
        };
        let [mut p, mut m, mut v] = [tensor, moment_1, moment_2].map(Storage::of);
        let g = Storage::of(gradient);
        self.update::<T>(
            learning_rate,
            time,
            p.elements_mut(),
            g.elements(),
            m.elements_mut(),
            v.elements_mut(),
        );
        let momentum = AdaptiveMomentumState::new(time, m.into_tensor(), v.into_tensor());
        (p.into_tensor(), AdamWState::new(momentum))
    }
}

impl Optimizer for FusedAdamW {
    type State<const D: usize> = FusedAdamWState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let state = state.map(|FusedAdamWState(state)| state);
        let moments = |state: &AdamWState<D>| {
            let AdaptiveMomentumState { moment_1, moment_2, max_moment_2, .. } = &state.momentum;
            [supported(moment_1), supported(moment_2)].map(|m| m.filter(|_| max_moment_2.is_none()))
        };
        let dtype = supported(&tensor).filter(|dtype| {
            let same = |other: Option<DType>| other.as_ref() == Some(dtype);
            same(supported(&grad)) && state.as_ref().is_none_or(|state| moments(state).into_iter().all(same))
        });
        let (tensor, state) = match dtype {
            Some(DType::F32) => self.step_here::<f32, D>(lr, tensor, grad, state),
            Some(DType::F64) => self.step_here::<f64, D>(lr, tensor, grad, state),
            _ if is_empty(&tensor) => {
                let first =
                    || AdamWState::new(AdaptiveMomentumState::new(0, grad.zeros_like(), grad.zeros_like()));
                let mut state = state.unwrap_or_else(first);
                state.momentum.time += 1;
                (tensor, state)
            }
            _ => {
                let (tensor, state) = self.composed.step(lr, tensor, grad, state);
                return (tensor, state.map(FusedAdamWState));
            }
        };
        (tensor, Some(FusedAdamWState(state)))
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        FusedAdamWState(AdamW::to_device(state.0, device))
    }
}

impl<const D: usize> RecordState for FusedAdamWState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        self.0.state_flatten(prefix, out);
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        let prefix = join_path(prefix, "momentum");
        let time = usize::try_from(src.take_scalar(&prefix, "time")?).ok()?;
        let mut tensor = |field: &str| src.take_tensor(&prefix, field).map(|data| loaded::<D>(data, device));
        let mut momentum = AdaptiveMomentumState::new(time, tensor("moment_1")?, tensor("moment_2")?);
        momentum.max_moment_2 = tensor("max_moment_2");
        Some(Self(AdamWState::new(momentum)))
    }
}

/// Values that are the same for all elements of a step.
#[derive(Clone, Copy)]
struct Coefficients<T> {
    beta_1: T,
    beta_2: T,
    fresh_1: T,
    fresh_2: T,
    correction_1: T,
    correction_2: T,
    epsilon: T,
    keep: T,
    learning_rate: T,
}

impl<T: Real> Coefficients<T> {
    /// Inlined into code for the host's processor, where the loop becomes vector instructions.
    #[inline(always)]
    fn apply(&self, parameters: &mut [T], gradients: &[T], moment_1: &mut [T], moment_2: &mut [T]) {
        let c = *self;
        for (((p, g), m), v) in parameters.iter_mut().zip(gradients).zip(moment_1).zip(moment_2) {
            *m = *m * c.beta_1 + *g * c.fresh_1;
            *v = *v * c.beta_2 + *g * *g * c.fresh_2;
            let delta = (*m / c.correction_1) / ((*v / c.correction_2).root() + c.epsilon);
            *p = *p * c.keep - delta * c.learning_rate;
        }
    }
}
