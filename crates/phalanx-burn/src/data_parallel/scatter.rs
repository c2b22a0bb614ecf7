//! Values that can be scattered to devices.
//!
//! Autograd is no obstacle to copies that it does not see. Inputs have no graph: a replica's part is a new constant. Outputs are copied
//! without their graphs, and what is gathered of them is a new leaf; its gradient is copied back in parts, from which each replica runs
//! backward by the chain rule. So nothing here is a Burn operation, and over NCCL the driver copies from device to device.
//!
//! Burn's `to_device` would do so too, where CubeCL finds libnccl; but its calls have no time-out.

use std::cell::Cell;
use std::fmt;
use std::ops::Range;

#[cfg(feature = "nccl")]
use burn::backend::Cube;
use burn::tensor::kind::{Autodiff, Basic};
use burn::tensor::{Bool, Device, Float, Int, Tensor};
#[cfg(feature = "nccl")]
use burn_cubecl::tensor::CubeTensor;
use phalanx::{Error, Result};

#[cfg(feature = "nccl")]
use super::links::{self, Copying, Links};
use super::transfers::Transfer;
use crate::collectives::as_tracked;
#[cfg(feature = "nccl")]
use crate::read_back::Computed;

thread_local! {
    /// Whether a part was taken of a tensor that has a graph. A batch's own type hands on parts of its tensors, and says nothing else of them.
    static HAS_GRAPH: Cell<bool> = const { Cell::new(false) };
}

/// A batch that can be divided among replicas: a tensor whose first dimension counts samples, or several tensors with
/// equally many samples.
///
/// A type of several tensors hands the calls on to them:
///
/// ```
/// use std::ops::Range;
///
/// use burn::tensor::{Int, Tensor};
/// use phalanx_burn::{Destination, Scatter};
///
/// struct Batch {
///     tokens: Tensor<2, Int>,
///     weights: Tensor<1>,
/// }
///
/// impl Scatter for Batch {
///     fn samples(&self) -> phalanx::Result<usize> {
///         self.tokens.samples()
///     }
///
///     fn part(&self, samples: Range<usize>) -> Self {
///         Self { tokens: self.tokens.part(samples.clone()), weights: self.weights.part(samples) }
///     }
///
///     fn copy_to(self, to: &mut Destination<'_>) -> phalanx::Result<Self> {
///         Ok(Self { tokens: self.tokens.copy_to(to)?, weights: self.weights.copy_to(to)? })
///     }
/// }
/// ```
pub trait Scatter: Send + Sized {
    /// How many samples there are.
    ///
    /// # Errors
    /// If its tensors do not have equally many.
    fn samples(&self) -> Result<usize>;

    /// A range of the samples, on the same device.
    #[must_use]
    fn part(&self, samples: Range<usize>) -> Self;

    /// A copy on the device of `to`, also if it is there already: only then can the memory be given to a replica.
    ///
    /// # Errors
    /// Over NCCL, if the driver cannot copy, or not in time.
    fn copy_to(self, to: &mut Destination<'_>) -> Result<Self>;

    /// As [`copy_to`](Self::copy_to), but nobody reads the copy before what has begun in `to` is finished, so that copies may wait together. For types
    /// of this crate: others may compute with what they copy.
    ///
    /// # Errors
    /// As [`copy_to`](Self::copy_to).
    #[doc(hidden)]
    fn begin_copy(self, to: &mut Destination<'_>) -> Result<Self> {
        self.copy_to(to)
    }
}

/// The device to which [`Scatter::copy_to`] copies, and how. It counts the bytes.
///
/// Over NCCL a tensor goes from device to device, if it is on the one that it is expected on; else, and without NCCL, through the host's memory.
pub struct Destination<'a> {
    device: &'a Device,
    moved: &'a mut Transfer,
    #[cfg(feature = "nccl")]
    way: Option<Way<'a>>,
    #[cfg(feature = "nccl")]
    copying: Vec<Copying>,
}

/// From the device of one number to that of another.
#[cfg(feature = "nccl")]
#[derive(Clone, Copy)]
struct Way<'a> {
    links: &'a Links,
    from: usize,
    to: usize,
}

impl<'a> Destination<'a> {
    pub(super) fn new(device: &'a Device, moved: &'a mut Transfer) -> Self {
        Self {
            device,
            moved,
            #[cfg(feature = "nccl")]
            way: None,
            #[cfg(feature = "nccl")]
            copying: Vec::new(),
        }
    }

    /// Tensors on the device of number `from` go directly to that of number `to`, if there are links.
    #[cfg(feature = "nccl")]
    pub(super) fn directly(&mut self, links: Option<&'a Links>, from: usize, to: usize) {
        self.way = links.map(|links| Way { links, from, to });
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.device
    }

    /// The copies that have begun, for [`Links::finish`].
    #[cfg(feature = "nccl")]
    pub(super) fn take_copying(&mut self) -> Vec<Copying> {
        std::mem::take(&mut self.copying)
    }

    fn copy<const D: usize, K: Kind>(&mut self, tensor: Tensor<D, K>) -> Result<Tensor<D, K>> {
        let copy = self.begin(tensor)?;
        #[cfg(feature = "nccl")]
        if let Some(Way { links, .. }) = self.way {
            links.finish(self.take_copying())?;
        }
        Ok(copy)
    }

    /// As [`copy`](Self::copy), but over NCCL nobody reads it before it is finished.
    fn begin<const D: usize, K: Kind>(&mut self, tensor: Tensor<D, K>) -> Result<Tensor<D, K>> {
        #[cfg(feature = "nccl")]
        if let Some(Way { links, from, to }) = self.way
            && let Some(resident) = K::resident(tensor.clone().inner())
            && let Some((copy, copying)) = links.begin(resident, from, to)?
        {
            self.moved.bytes += links::bytes(&copy);
            self.copying.push(copying);
            let copy = K::stored::<D>(copy);
            return Ok(if self.device.is_autodiff() { copy.autodiff() } else { copy });
        }
        Ok(through_host(tensor, self.device, self.moved))
    }
}

impl fmt::Debug for Destination<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Destination").field("device", &self.device).finish_non_exhaustive()
    }
}

/// A copy on `device`, through the host's memory.
pub(super) fn through_host<const D: usize, K: Basic>(
    tensor: Tensor<D, K>,
    device: &Device,
    moved: &mut Transfer,
) -> Tensor<D, K> {
    let (dtype, data) = (tensor.dtype(), tensor.to_data());
    let bytes = data.as_bytes().len();
    moved.bytes += bytes;
    moved.host_bytes += bytes;
    Tensor::from_data(data, (device, dtype))
}

/// What the elements of a tensor are.
trait Kind: Autodiff + Sized {
    /// The tensor in a device's memory, if that is one of CubeCL's.
    #[cfg(feature = "nccl")]
    fn resident<const D: usize>(tensor: Tensor<D, Self>) -> Option<CubeTensor>;

    /// A tensor in a device's memory as one of Burn's.
    #[cfg(feature = "nccl")]
    fn stored<const D: usize>(tensor: CubeTensor) -> Tensor<D, Self>;
}

macro_rules! scatter {
    ($($kind:ty: $computed:ident, $stored:ident;)*) => {$(
        impl Kind for $kind {
            #[cfg(feature = "nccl")]
            fn resident<const D: usize>(tensor: Tensor<D, Self>) -> Option<CubeTensor> {
                tensor.try_into_primitive::<Cube>().ok().map(Cube::$computed)
            }

            #[cfg(feature = "nccl")]
            fn stored<const D: usize>(tensor: CubeTensor) -> Tensor<D, Self> {
                Tensor::from_primitive::<Cube>(Cube::$stored(tensor))
            }
        }

        impl<const D: usize> Scatter for Tensor<D, $kind> {
            fn samples(&self) -> Result<usize> {
                Ok(self.dims()[0])
            }

            fn part(&self, samples: Range<usize>) -> Self {
                if as_tracked(self).is_some() {
                    HAS_GRAPH.set(true);
                }
                self.clone().narrow(0, samples.start, samples.len())
            }

            fn copy_to(self, to: &mut Destination<'_>) -> Result<Self> {
                to.copy(self)
            }

            fn begin_copy(self, to: &mut Destination<'_>) -> Result<Self> {
                to.begin(self)
            }
        }
    )*};
}
scatter! {
    Float: computed, stored;
    Int: computed_int, stored_int;
    Bool: computed_bool, stored_bool;
}

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

    fn copy_to(self, to: &mut Destination<'_>) -> Result<Self> {
        Ok((self.0.copy_to(to)?, self.1.copy_to(to)?))
    }

    fn begin_copy(self, to: &mut Destination<'_>) -> Result<Self> {
        Ok((self.0.begin_copy(to)?, self.1.begin_copy(to)?))
    }
}

/// What `scatter` gives; an error if that takes a part of a tensor that has a graph.
pub(super) fn without_graphs<T>(scatter: impl FnOnce() -> Result<T>) -> Result<T> {
    HAS_GRAPH.set(false);
    let parts = scatter()?;
    if !HAS_GRAPH.get() {
        return Ok(parts);
    }
    Err(Error::invalid_argument(
        "the input of replicas has a graph: gradients do not come back to it, so what has computed it would not be trained",
    )
    .with_remedy(
        "make layers that are to be trained a part of the model, and call them in the closure; else take the input out of its graph by detach(), \
         or by set_require_grad(false) if it was made to need a gradient",
    ))
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
