//! What an optimizer keeps from step to step, for checkpoints and for ranks that have missed steps.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{ParamsAdamW, SGD, VarMap};

use crate::variables::{self, Named};

/// An optimizer that shows all that it keeps from step to step. Candle's own `AdamW` hides its moments: a run that goes on without
/// them goes on otherwise, so that only an optimizer with this trait is saved and joined.
pub trait OptimizerState {
    /// The tensors that it keeps, by name.
    fn state(&self) -> Vec<(String, Var)>;
}

impl OptimizerState for SGD {
    fn state(&self) -> Vec<(String, Var)> {
        Vec::new() // Candle's has no momentum.
    }
}

/// AdamW, with the results of candle's.
#[derive(Debug)]
pub struct AdamW {
    /// Its settings.
    pub params: ParamsAdamW,
    steps: Var,
    /// Each variable with the averages of its gradients and of their squares.
    moments: Vec<(Named, Var, Var)>,
}

impl AdamW {
    /// For the float variables of `map`.
    pub fn new(map: &VarMap, params: ParamsAdamW) -> phalanx::Result<Self> {
        let floats = variables::all(map)?.into_iter().filter(|one| one.var.dtype().is_float());
        let zeros = |one: &Named| Var::from_tensor(&one.var.zeros_like()?);
        let moments = floats.map(|one| Ok((one.clone(), zeros(&one)?, zeros(&one)?)));
        let moments = moments.collect::<Result<_>>().map_err(phalanx::Error::other)?;
        let steps = Var::zeros((), DType::I64, &Device::Cpu).map_err(phalanx::Error::other)?;
        Ok(Self { params, steps, moments })
    }

    /// Moves each variable that has a gradient.
    pub fn step(&mut self, gradients: &GradStore) -> Result<()> {
        let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = self.params;
        let steps = self.steps.to_scalar::<i64>()? + 1;
        self.steps.set(&Tensor::new(steps, &Device::Cpu)?)?;
        let unbiased = |beta: f64| 1.0 / (1.0 - beta.powf(steps as f64));
        for (Named { var, .. }, mean, square) in &self.moments {
            let Some(gradient) = gradients.get(var) else { continue };
            mean.set(&(mean.affine(beta1, 0.)? + gradient.affine(1. - beta1, 0.)?)?)?;
            square.set(&(square.affine(beta2, 0.)? + gradient.sqr()?.affine(1. - beta2, 0.)?)?)?;
            let root = square.affine(unbiased(beta2), 0.)?.sqrt()?.affine(1., eps)?;
            let change = mean.affine(lr * unbiased(beta1), 0.)?.div(&root)?;
            var.set(&(var.affine(1. - lr * weight_decay, 0.)? - change)?)?;
        }
        Ok(())
    }
}

impl OptimizerState for AdamW {
    fn state(&self) -> Vec<(String, Var)> {
        let moments = self.moments.iter().flat_map(|(Named { spec, .. }, mean, square)| {
            let moments = [("exp_avg", mean), ("exp_avg_sq", square)];
            moments.map(|(moment, var)| (format!("{}.{moment}", spec.name), var.clone()))
        });
        moments.chain([("steps".to_owned(), self.steps.clone())]).collect()
    }
}
