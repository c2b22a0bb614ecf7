//! Which weights a step may have: those of one pass, of all passes of a step, and of all ranks.

use super::ParameterSpec;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::rank::Rank;

/// How the passes since the last averaged one are weighted. All passes of a step have a weight, or none has.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum StepWeight {
    /// There was no pass yet.
    #[default]
    Nothing,
    /// Passes without weights.
    Unweighted,
    /// The sum of the passes' weights.
    Weighted(f64),
}

impl StepWeight {
    /// With one pass more, of `rank`, in which `parameters` get gradients.
    ///
    /// # Errors
    /// If other passes of the step have a weight and this one has none, or the other way round; and as [`check_weight`], of the pass
    /// and of the sum.
    pub fn with(self, weight: Option<f64>, rank: Rank, parameters: &[ParameterSpec]) -> Result<Self> {
        let (weight, sum) = match (self, weight) {
            (Self::Nothing | Self::Unweighted, None) => return Ok(Self::Unweighted),
            (Self::Nothing, Some(weight)) => (weight, weight),
            (Self::Weighted(sum), Some(weight)) => (weight, sum + weight),
            (Self::Unweighted, Some(_)) | (Self::Weighted(_), None) => {
                let cause = "a step adds up gradients of passes with weights and of passes without";
                return Err(Error::invalid_argument(cause).with_remedy(
                    "call backward_no_sync before backward, and backward_no_sync_weighted before backward_weighted",
                ));
            }
        };
        check_weight(rank, weight, parameters)?;
        check_weight(rank, sum, parameters)?;
        Ok(Self::Weighted(sum))
    }

    /// The sum of the passes' weights, if they have any.
    pub fn sum(self) -> Option<f64> {
        match self {
            Self::Nothing | Self::Unweighted => None,
            Self::Weighted(sum) => Some(sum),
        }
    }
}

/// What to do where gradients cannot be weighted.
pub const SCALE: &str = "sum the weights over ranks first, and call the unweighted backward with \
                         loss × weight × world size / sum of weights; or register no hook, in f32";

/// An error unless gradients of `parameters` can be averaged with this `weight` of `rank`, as `Reducer::start_weighted` does it.
///
/// # Errors
/// If the weight is negative, infinite or not a number, or too large or too small for an f32; if a gradient is of 16 bits, in which
/// neither weights nor gradients times weights could be told.
pub fn check_weight(rank: Rank, weight: f64, parameters: &[ParameterSpec]) -> Result<()> {
    let narrow = weight as f32;
    if !(weight == 0.0 || (weight > 0.0 && narrow.is_normal())) {
        return Err(Error::invalid_argument(format!("rank {rank}: {weight} is no weight for gradients")).with_remedy(
            "the weight is the number of this rank's samples or tokens, 0 if it has none; is it computed from a mask that may be \
             NaN?",
        ));
    }
    match parameters.iter().find(|parameter| !matches!(parameter.dtype, DType::F32 | DType::F64)) {
        None => Ok(()),
        Some(parameter) => Err(Error::invalid_argument(format!(
            "the gradient of parameter {parameter} is too narrow for weights"
        ))
        .with_remedy(SCALE)),
    }
}

/// An error unless there is an average of a step in which the weights of all ranks add up to `sum`. Every rank has the same sum, and
/// so the same error: it ends nothing.
///
/// # Errors
/// If the sum is 0, infinite or not a number.
pub fn check_weight_sum(sum: f64) -> Result<()> {
    if sum > 0.0 && sum.is_finite() {
        return Ok(());
    }
    let cause = format!("the weights of all ranks add up to {sum}: there is no average of this step");
    Err(Error::invalid_argument(cause).with_remedy(
        "leave out a step in which no rank has a sample, on every rank, and go on with the next",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(step: StepWeight, weight: Option<f64>) -> Result<StepWeight> {
        step.with(weight, Rank::MAIN, &[ParameterSpec::new("w", [2], DType::F32)])
    }

    #[test]
    fn passes_of_a_step_are_all_weighted_or_none_is() {
        let weighted = [3.0, 0.0, 4.0]
            .into_iter()
            .fold(StepWeight::Nothing, |step, weight| with(step, Some(weight)).unwrap());
        assert_eq!(weighted.sum(), Some(7.0));
        let plain = with(with(StepWeight::Nothing, None).unwrap(), None).unwrap();
        assert_eq!((plain, plain.sum()), (StepWeight::Unweighted, None));
        for mixed in [with(weighted, None), with(plain, Some(1.0))] {
            assert!(mixed.unwrap_err().to_string().contains("with weights and of passes without"));
        }
    }

    #[test]
    fn the_sum_of_weights_is_a_weight_too() {
        let most = f64::from(f32::MAX);
        let step = with(StepWeight::Nothing, Some(most)).unwrap();
        let error = with(step, Some(most)).unwrap_err();
        assert!(error.to_string().contains("is no weight"), "{error}");
        for sum in [0.0, -1.0, f64::INFINITY, f64::NAN] {
            assert!(check_weight_sum(sum).unwrap_err().to_string().contains("there is no average"), "{sum}");
        }
        check_weight_sum(0.5).unwrap();
    }
}
