//! The options of a reducer: the parameters, and how to group them.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::plan::Limits;
use crate::dtype::DType;
use crate::error::{Error, Result};

const MIB: f64 = (1 << 20) as f64;
const DEFAULT_CAP_MB: f64 = 25.0;
const DEFAULT_FIRST_MB: f64 = 1.0;

/// A parameter that needs a gradient.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParameterSpec {
    /// Its name, for errors. It is compared across ranks, so it must not be made anew in each process.
    pub name: String,
    /// Its shape; empty for a scalar.
    pub shape: Vec<usize>,
    /// The type of its gradient's elements: a float.
    pub dtype: DType,
}

impl ParameterSpec {
    /// A parameter.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>, dtype: DType) -> Self {
        Self { name: name.into(), shape: shape.into(), dtype }
    }

    /// The number of its elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().fold(1, |product, &extent| product.saturating_mul(extent))
    }

    /// The bytes of its gradient; [`usize::MAX`] if there are more.
    #[doc(hidden)]
    pub fn bytes(&self) -> usize {
        self.elements().saturating_mul(self.dtype.size())
    }

    /// `None` if the machine cannot count them.
    #[doc(hidden)]
    pub fn checked_bytes(&self) -> Option<usize> {
        self.shape.iter().try_fold(self.dtype.size(), |product, &extent| product.checked_mul(extent))
    }
}

impl fmt::Display for ParameterSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` ({} {:?})", self.name, self.dtype, self.shape)
    }
}

/// How gradients are grouped and what is expected of backward. The names and defaults are DistributedDataParallel's.
///
/// ```
/// use phalanx::reducer::ReducerOptions;
/// let options = ReducerOptions::default().bucket_cap_mb(50.0).find_unused_parameters(true);
/// ```
#[doc(alias = "bucket_cap_mb")]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReducerOptions {
    bucket_cap_mb: Option<f64>,
    first_bucket_mb: Option<f64>,
    bucket_numbers: Option<Arc<[usize]>>,
    pub(super) find_unused_parameters: bool,
    pub(super) static_graph: bool,
}

impl ReducerOptions {
    /// The largest bucket, in MiB; 25 by default. A larger parameter has a bucket of its own, and with 0 every
    /// parameter has.
    pub fn bucket_cap_mb(mut self, mb: f64) -> Self {
        self.bucket_cap_mb = Some(mb);
        self
    }

    /// The largest first bucket of each type, in MiB, which is small so that communication begins early. By default 1
    /// if the cap is left at its default, else the cap.
    pub fn first_bucket_mb(mut self, mb: f64) -> Self {
        self.first_bucket_mb = Some(mb);
        self
    }

    /// Buckets by number instead of by size: parameters that follow each other and have the same number share a bucket. `numbers` has
    /// one for each parameter, in the order of the model.
    pub fn bucket_numbers(mut self, numbers: impl Into<Arc<[usize]>>) -> Self {
        self.bucket_numbers = Some(numbers.into());
        self
    }

    /// Accept parameters that get no gradient; they count as zero where another rank has a gradient for them. Off by
    /// default, because it costs: buckets with such parameters wait for the end of backward, the ranks exchange which
    /// parameters were used, and the buckets stay in the order of the model.
    pub fn find_unused_parameters(mut self, find: bool) -> Self {
        self.find_unused_parameters = find;
        self
    }

    /// Promise that every step uses the parameters that the first one uses, on each rank. Unused ones are then found
    /// once, in the first step, at no cost to the others: buckets leave as early as without them, and are rebuilt in
    /// the order of the gradients. Off by default.
    pub fn static_graph(mut self, fixed: bool) -> Self {
        self.static_graph = fixed;
        self
    }

    /// When a bucket of so many `parameters` is closed.
    #[doc(hidden)]
    pub fn limits(&self, parameters: usize) -> Result<Limits> {
        if let Some(numbers) = &self.bucket_numbers {
            if numbers.len() != parameters {
                return Err(Error::invalid_argument(format!(
                    "bucket_numbers has {} numbers, and {parameters} parameters need a gradient",
                    numbers.len()
                ))
                .with_remedy("give one number for each parameter that needs a gradient, in their order"));
            }
            return Ok(Limits::Numbers(numbers.clone()));
        }
        let (first, others) = self.megabytes();
        let others = to_bytes("bucket_cap_mb", others)?;
        Ok(Limits::Bytes { first: to_bytes("first_bucket_mb", first)?, others })
    }

    /// The properties that must be the same on every rank.
    #[doc(hidden)]
    pub fn describe(&self) -> Vec<(String, String)> {
        let (first, others) = self.megabytes();
        let numbers = match &self.bucket_numbers {
            Some(numbers) => format!("{numbers:?}"),
            None => "none".into(),
        };
        vec![
            ("bucket_cap_mb".into(), others.to_string()),
            ("first_bucket_mb".into(), first.to_string()),
            ("bucket_numbers".into(), numbers),
            ("find_unused_parameters".into(), self.find_unused_parameters.to_string()),
            ("static_graph".into(), self.static_graph.to_string()),
        ]
    }

    fn megabytes(&self) -> (f64, f64) {
        let others = self.bucket_cap_mb.unwrap_or(DEFAULT_CAP_MB);
        let first = self.first_bucket_mb.unwrap_or(match self.bucket_cap_mb {
            Some(cap) => cap,
            None => DEFAULT_FIRST_MB,
        });
        (first, others)
    }
}

fn to_bytes(option: &str, mb: f64) -> Result<usize> {
    if mb >= 0.0 {
        Ok((mb * MIB) as usize) // Saturates: a bucket without limit is allowed.
    } else {
        Err(Error::invalid_argument(format!("{option} is {mb}: it must be 0 or more")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bucket_is_small_only_beside_the_default_cap() {
        let bytes = |options: ReducerOptions| {
            options
                .limits(2)
                .map(|limits| match limits {
                    Limits::Bytes { first, others } => (first, others),
                    Limits::Numbers(numbers) => panic!("{numbers:?}"),
                })
                .map_err(|error| error.to_string())
        };
        assert_eq!(bytes(ReducerOptions::default()), Ok((1 << 20, 25 << 20)));
        assert_eq!(bytes(ReducerOptions::default().bucket_cap_mb(0.5)), Ok((1 << 19, 1 << 19)));
        assert_eq!(bytes(ReducerOptions::default().first_bucket_mb(2.0)), Ok((2 << 20, 25 << 20)));
        assert!(
            bytes(ReducerOptions::default().bucket_cap_mb(f64::NAN)).unwrap_err().contains("bucket_cap_mb")
        );
        let short = bytes(ReducerOptions::default().bucket_numbers([3]));
        assert!(short.unwrap_err().contains("1 numbers, and 2 parameters"));
    }
}
