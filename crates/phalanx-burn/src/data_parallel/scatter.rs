//! Values that can be scattered to devices.

use std::ops::Range;

use burn::tensor::{Bool, Device, Float, Int, Tensor};
use phalanx::{Error, Result};

/// A batch that can be divided among replicas: a tensor whose first dimension counts samples, or several tensors with
/// equally many samples.
pub trait Scatter: Send + Sized {
    /// How many samples there are.
    ///
    /// # Errors
    /// If its tensors do not have equally many.
    fn samples(&self) -> Result<usize>;

    /// A range of the samples, on the same device.
    #[must_use]
    fn part(&self, samples: Range<usize>) -> Self;

    /// A copy on `device`, also if it is there already: only then can the memory be given to a replica. Adds its bytes
    /// to `moved`.
    #[must_use]
    fn copy_to(self, device: &Device, moved: &mut usize) -> Self;
}

macro_rules! scatter {
    ($($kind:ty),*) => {$(
        impl<const D: usize> Scatter for Tensor<D, $kind> {
            fn samples(&self) -> Result<usize> {
                Ok(self.dims()[0])
            }

            fn part(&self, samples: Range<usize>) -> Self {
                self.clone().narrow(0, samples.start, samples.len())
            }

            fn copy_to(self, device: &Device, moved: &mut usize) -> Self {
                let (dtype, data) = (self.dtype(), self.to_data());
                *moved += data.as_bytes().len();
                Self::from_data(data, (device, dtype))
            }
        }
    )*};
}
scatter!(Float, Int, Bool);

impl<A: Scatter, B: Scatter> Scatter for (A, B) {
    fn samples(&self) -> Result<usize> {
        let (one, other) = (self.0.samples()?, self.1.samples()?);
        if one == other {
            return Ok(one);
        }
        Err(Error::invalid_argument(format!(
            "a batch has {one} samples in one tensor and {other} in the next"
        )))
    }

    fn part(&self, samples: Range<usize>) -> Self {
        (self.0.part(samples.clone()), self.1.part(samples))
    }

    fn copy_to(self, device: &Device, moved: &mut usize) -> Self {
        (self.0.copy_to(device, moved), self.1.copy_to(device, moved))
    }
}

/// How `samples` are divided among at most `replicas`, as evenly as PyTorch's `chunk` does: all parts but the last have
/// the same size.
pub(super) fn parts(samples: usize, replicas: usize) -> Vec<Range<usize>> {
    let size = samples.div_ceil(replicas).max(1);
    (0..samples).step_by(size).map(|start| start..samples.min(start + size)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_divided_in_order() {
        assert_eq!(parts(10, 3), [0..4, 4..8, 8..10]);
        assert_eq!(parts(2, 4), [0..1, 1..2]);
        assert!(parts(0, 2).is_empty());
    }

    #[test]
    fn tensors_of_a_batch_have_equally_many_samples() {
        let of = |samples| Tensor::<2>::zeros([samples, 3], &Device::flex());
        assert_eq!((of(4), (of(4), of(4))).samples().unwrap(), 4);
        let error = (of(4), of(5)).samples().unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("4 samples"), "{error}");
    }
}
