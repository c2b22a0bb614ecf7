//! Clipping of gradients by their norm, the same for all adapters.

use crate::error::{Error, Result};

/// An error unless `max_norm` can be the limit of a norm.
///
/// # Errors
/// If it is not a positive number.
pub fn check_max_norm(max_norm: f64) -> Result<()> {
    if max_norm > 0.0 {
        return Ok(());
    }
    Err(Error::invalid_argument(format!("max_norm is {max_norm}: it must be a positive number")))
}

/// What to multiply gradients of this `norm` by, so that it is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does; none if they
/// stay as they are. A norm that is infinite or not a number changes nothing: every rank has the same, and the optimizer's caller decides.
///
/// ```
/// use phalanx::adapter::clip_factor;
/// assert!((clip_factor(4.0, 1.0).unwrap() - 0.25).abs() < 1e-6);
/// assert_eq!(clip_factor(0.5, 1.0), None);
/// assert_eq!(clip_factor(f64::NAN, 1.0), None);
/// ```
pub fn clip_factor(norm: f64, max_norm: f64) -> Option<f64> {
    // PyTorch's: a norm of 0 does not divide by 0.
    let factor = max_norm / (norm + 1e-6);
    (norm.is_finite() && factor < 1.0).then_some(factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_of_a_norm_is_positive() {
        for wrong in [0.0, -1.0, f64::NAN] {
            assert!(check_max_norm(wrong).unwrap_err().is_invalid_argument(), "{wrong}");
        }
        check_max_norm(f64::INFINITY).unwrap();
    }
}
