//! Elements on their way from a device's memory to this process's.
//!
//! A device works through a queue. A copy that is put there right behind the work that computes a gradient is done as soon as the
//! gradient is, while the queue goes on; only whoever [waits](ReadBack::wait) for it waits. Burn's `into_data` does not do: it
//! puts the copy into the queue when the data are first looked at, behind all that the queue has been given since.

#[cfg(feature = "cube")]
mod cube;

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::time::Instant;

use burn::tensor::kind::Basic;
use burn::tensor::{Bytes, DType, Tensor, TensorData, read_sync};
use burn_std::Reader;
#[cfg(feature = "nccl")]
pub(crate) use cube::Computed;
use phalanx::Result;
use phalanx::trace::{Trace, Track};

use crate::tensor_bytes::TensorBytes;

/// A copy that a device has been told to make, or, without elements, the end of what it has been told.
pub(crate) struct ReadBack {
    dtype: DType,
    bytes: Pin<Box<dyn Future<Output = std::result::Result<Bytes, Lost>> + Send>>,
    /// What keeps the device from changing the elements where they lie. The processors' device does not copy: it lends its memory.
    source: Option<Box<dyn Any + Send>>,
    /// Where its end is noted, as what, and of which parameter's gradient it is.
    noted: Option<(Trace, &'static str, usize)>,
}

impl ReadBack {
    /// Notes in `trace` that the gradient of parameter `index` is being copied, and when it has been.
    pub fn traced(mut self, trace: &Trace, index: usize) -> Self {
        trace.instant(Track::Backward, "copy begins", Instant::now(), &[("parameter", index.into())]);
        self.noted = Some((trace.clone(), "copied", index));
        self
    }

    /// Waits for the elements, and calls `look` with them.
    pub fn wait<T>(self, look: impl FnOnce(TensorBytes<'_>) -> T) -> std::result::Result<T, Lost> {
        let Self { dtype, bytes, source, noted } = self;
        let bytes = read_sync(bytes)?;
        if let Some((trace, end, index)) = noted {
            trace.instant(Track::Backward, end, Instant::now(), &[("parameter", index.into())]);
        }
        let outcome = look(TensorBytes { dtype, bytes: &bytes });
        drop((bytes, source));
        Ok(outcome)
    }

    /// Waits for the elements, which nobody needs any longer. Until then the device may write them.
    pub fn discard(self) {
        let _unused = self.wait(|_| ());
    }
}

/// The elements of a tensor of any kind, when its device has computed them.
pub(crate) fn data<const D: usize, K: Basic>(tensor: Tensor<D, K>) -> Result<TensorData> {
    arrived(tensor.try_into_data(), "a tensor")
}

/// As [`data`], with an error that names the tensor.
pub(crate) fn named<const D: usize, K: Basic>(tensor: Tensor<D, K>, name: &str) -> Result<TensorData> {
    arrived(tensor.try_into_data(), &format!("`{name}`"))
}

/// `data` that have been copied, of what `what` names. Burn copies from a device only when elements are first looked at, and panics if
/// that fails.
pub(crate) fn arrived<E: fmt::Debug>(
    data: std::result::Result<TensorData, E>,
    what: &str,
) -> Result<TensorData> {
    let (bytes, shape, dtype) = data.map_err(|cause| Lost::by(cause).of(what))?.into_parts();
    bytes.read(Reader::default()).map_err(|cause| Lost::by(cause).of(what))?;
    Ok(TensorData::from_bytes(bytes, shape, dtype))
}

/// A copy that a device could not make, or the work before it, with the device's own words.
#[derive(Debug)]
pub(crate) struct Lost(String);

impl Lost {
    pub fn by(cause: impl fmt::Debug) -> Self {
        Self(format!("{cause:?}"))
    }

    /// The error for a copy of `what`.
    pub fn of(self, what: impl fmt::Display) -> phalanx::Error {
        phalanx::Error::aborted(format!("{what} could not be read back from its device: {}", self.0))
            .with_remedy(
                "see the device's own messages; it may have run out of memory, or its driver may have failed",
            )
    }
}

/// Copies that are under way, in the order in which they began.
///
/// They are waited for in that order, and only when [`DEPTH`](Self::DEPTH) others have begun since: what is received when
/// depends on the order of gradients alone, which is the same on all ranks, and never on how fast a device is. So collectives that
/// gradients start have the same place among those that a backward pass itself calls, such as a synchronised batch norm's.
pub(crate) struct InFlight<K>(VecDeque<(K, ReadBack)>);

impl<K> InFlight<K> {
    /// So many gradients are computed while one is copied; and so many lie in the memory for copies at most.
    const DEPTH: usize = 8;

    pub fn new() -> Self {
        Self(VecDeque::new())
    }

    /// Adds a copy; gives one for which it is time to wait.
    pub fn push(&mut self, key: K, read: ReadBack) -> Option<(K, ReadBack)> {
        self.0.push_back((key, read));
        if self.0.len() > Self::DEPTH { self.pop() } else { None }
    }

    /// The oldest copy.
    pub fn pop(&mut self) -> Option<(K, ReadBack)> {
        self.0.pop_front()
    }

    /// Waits for all copies, which nobody needs any longer.
    pub fn clear(&mut self) {
        self.0.drain(..).for_each(|(_, read)| read.discard());
    }
}

impl<K> Drop for InFlight<K> {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::tensor_bytes::Away;

    fn read(element: f32) -> ReadBack {
        let bytes = Bytes::from_elems(vec![element]);
        let bytes = Box::pin(async move { Ok(bytes) });
        ReadBack { dtype: DType::F32, bytes, source: None, noted: None }
    }

    /// A tensor that its device cannot give.
    pub(crate) struct Unreadable;

    impl Away for Unreadable {
        fn read(self: Box<Self>) -> ReadBack {
            failing()
        }

        #[cfg(feature = "nccl")]
        fn stay(self: Box<Self>) -> Result<crate::nccl::Resident> {
            Err(phalanx::Error::aborted("no test averages it where it lies"))
        }
    }

    /// A copy that a device cannot make.
    fn failing() -> ReadBack {
        ReadBack { bytes: Box::pin(async { Err(Lost::by("out of memory")) }), ..read(0.0) }
    }

    fn element((key, read): (usize, ReadBack)) -> (usize, f32) {
        (key, read.wait(|bytes| bytemuck::pod_read_unaligned(bytes.bytes)).unwrap())
    }

    #[test]
    fn copies_are_waited_for_in_their_order_and_as_late_whether_or_not_they_are_done() {
        let mut flight = InFlight::new();
        for key in 0..InFlight::<usize>::DEPTH {
            assert!(flight.push(key, read(key as f32)).is_none());
        }
        assert_eq!(flight.push(90, read(90.0)).map(element), Some((0, 0.0)));
        assert_eq!(flight.pop().map(element), Some((1, 1.0)));
        flight.clear();
        assert!(flight.pop().is_none());
    }

    #[test]
    fn a_copy_that_fails_is_an_error() {
        let error = failing().wait(|_| ()).unwrap_err().of("`weight`").to_string();
        assert!(error.contains("`weight`") && error.contains("out of memory"), "{error}");
    }
}
