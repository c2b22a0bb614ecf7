//! The deciding half of the gradient reducer: which gradients share a bucket, and when a bucket is launched. No memory, no group.

pub mod clip;
mod options;
pub mod plan;
pub mod state;
pub mod unused;
pub mod weight;

pub use self::options::{ParameterSpec, ReducerOptions};
pub use self::weight::{StepWeight, check_weight, check_weight_sum};
