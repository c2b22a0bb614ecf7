//! The collectives, by name.

use phalanx::{Error, Rank, Result};

use crate::handle::{Handle, Outcome};
use crate::horovod::Horovod;
use crate::tensor::Tensor;
use phalanx_proto::horovod::reduction::Reduction;
use phalanx_proto::horovod::request::{Kind, Part, Request};

/// What an alltoall brings: the rows of all ranks, in the order of the ranks, and how many are of each.
#[derive(Debug)]
pub struct Received {
    /// The rows.
    pub tensor: Tensor,
    /// How many of them came from each rank.
    pub splits: Vec<usize>,
}

/// # Collectives
///
/// Each operation has a name, and runs when every rank has submitted it under this name. The order of submission does not matter,
/// and may be another on every rank. Allreduces that are ready at the same time travel together. A name may be used again when
/// its handle is done.
///
/// The tensors belong to the operation while it is in flight, and come back with the result, in the same memory if they keep
/// their size.
///
/// **Errors.** If the ranks submit different shapes, types or options under a name, its handle fails on every rank, with an error
/// that names both sides, and everything else continues. If a rank refuses its own call, such as one with a root that there is not, the
/// other ranks' calls that it would have met fail with its cause, also those that are made later. If a rank fails or leaves, everything
/// in flight and everything that is submitted later fails, with the first cause.
impl Horovod {
    /// Combines the tensors of all ranks, element by element; every rank gets the result.
    ///
    /// ```
    /// use phalanx_horovod::{Compression, Op, Reduction};
    /// let hvd = phalanx_horovod::init()?;
    /// let gradient = hvd.allreduce("w", [1.0f32, 3.0], Op::Average)?;
    /// assert_eq!(gradient.as_slice::<f32>()?, [1.0, 3.0]);
    /// let half = Reduction::new(Op::Sum).prescale(0.5).compression(Compression::Fp16);
    /// assert_eq!(hvd.allreduce("w", gradient, half)?.as_slice::<f32>()?, [0.5, 1.5]);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// See above, and if the operation is not defined for the type.
    pub fn allreduce(
        &self,
        name: &str,
        tensor: impl Into<Tensor>,
        reduction: impl Into<Reduction>,
    ) -> Result<Tensor> {
        self.allreduce_async(name, tensor, reduction)?.synchronize()
    }

    /// Starts an [`allreduce`](Self::allreduce).
    ///
    /// # Errors
    /// At once if the operation is not defined for the type, the name is in flight, or the job has failed; otherwise from
    /// [`Handle::synchronize`].
    pub fn allreduce_async(
        &self,
        name: &str,
        tensor: impl Into<Tensor>,
        reduction: impl Into<Reduction>,
    ) -> Result<Handle<Tensor>> {
        self.submit(name, Kind::Allreduce(reduction.into()), vec![tensor.into()], Outcome::single)
    }

    /// The average of one number of each rank: for metrics.
    ///
    /// ```
    /// let hvd = phalanx_horovod::init()?;
    /// assert_eq!(hvd.average("accuracy", 0.75)?, 0.75);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`allreduce`](Self::allreduce).
    #[doc(alias("metric_average", "MetricAverageCallback"))]
    pub fn average(&self, name: &str, value: f64) -> Result<f64> {
        self.allreduce(name, value, crate::Op::Average)?.item()
    }

    /// An [`allreduce`](Self::allreduce) of several tensors, of any types, that is ready when all of them are.
    ///
    /// # Errors
    /// As [`allreduce`](Self::allreduce).
    pub fn grouped_allreduce(
        &self,
        name: &str,
        tensors: Vec<Tensor>,
        reduction: impl Into<Reduction>,
    ) -> Result<Vec<Tensor>> {
        self.grouped_allreduce_async(name, tensors, reduction)?.synchronize()
    }

    /// Starts a [`grouped_allreduce`](Self::grouped_allreduce).
    ///
    /// # Errors
    /// As [`allreduce_async`](Self::allreduce_async).
    pub fn grouped_allreduce_async(
        &self,
        name: &str,
        tensors: Vec<Tensor>,
        reduction: impl Into<Reduction>,
    ) -> Result<Handle<Vec<Tensor>>> {
        self.submit(name, Kind::Allreduce(reduction.into()), tensors, |outcome| Ok(outcome.tensors))
    }

    /// Puts the rows of all ranks below each other, in the order of the ranks. They may bring different numbers of rows; the other
    /// dimensions must be the same.
    ///
    /// # Errors
    /// See above, and for a scalar.
    pub fn allgather(&self, name: &str, tensor: impl Into<Tensor>) -> Result<Tensor> {
        self.allgather_async(name, tensor)?.synchronize()
    }

    /// Starts an [`allgather`](Self::allgather).
    ///
    /// # Errors
    /// As [`allreduce_async`](Self::allreduce_async).
    pub fn allgather_async(&self, name: &str, tensor: impl Into<Tensor>) -> Result<Handle<Tensor>> {
        self.submit(name, Kind::Allgather, vec![tensor.into()], Outcome::single)
    }

    /// An [`allgather`](Self::allgather) of several tensors under one name.
    ///
    /// # Errors
    /// As [`allgather`](Self::allgather).
    pub fn grouped_allgather(&self, name: &str, tensors: Vec<Tensor>) -> Result<Vec<Tensor>> {
        self.grouped_allgather_async(name, tensors)?.synchronize()
    }

    /// Starts a [`grouped_allgather`](Self::grouped_allgather).
    ///
    /// # Errors
    /// As [`allreduce_async`](Self::allreduce_async).
    pub fn grouped_allgather_async(&self, name: &str, tensors: Vec<Tensor>) -> Result<Handle<Vec<Tensor>>> {
        self.submit(name, Kind::Allgather, tensors, |outcome| Ok(outcome.tensors))
    }

    /// Copies the root's tensor to every rank, where one of the same shape is overwritten.
    ///
    /// # Errors
    /// See above, and if there is no such rank.
    pub fn broadcast(&self, name: &str, tensor: impl Into<Tensor>, root: Rank) -> Result<Tensor> {
        self.broadcast_async(name, tensor, root)?.synchronize()
    }

    /// Starts a [`broadcast`](Self::broadcast).
    ///
    /// # Errors
    /// As [`allreduce_async`](Self::allreduce_async).
    pub fn broadcast_async(
        &self,
        name: &str,
        tensor: impl Into<Tensor>,
        root: Rank,
    ) -> Result<Handle<Tensor>> {
        self.submit(name, Kind::Broadcast { root: root.get() }, vec![tensor.into()], Outcome::single)
    }

    /// Sends rows to every rank: the first `splits[0]` rows to rank 0, the next `splits[1]` to rank 1, and so on. Without splits,
    /// as many to each.
    ///
    /// # Errors
    /// See above, and if the splits do not divide the rows.
    pub fn alltoall(
        &self,
        name: &str,
        tensor: impl Into<Tensor>,
        splits: Option<&[usize]>,
    ) -> Result<Received> {
        self.alltoall_async(name, tensor, splits)?.synchronize()
    }

    /// Starts an [`alltoall`](Self::alltoall).
    ///
    /// # Errors
    /// As [`allreduce_async`](Self::allreduce_async).
    pub fn alltoall_async(
        &self,
        name: &str,
        tensor: impl Into<Tensor>,
        splits: Option<&[usize]>,
    ) -> Result<Handle<Received>> {
        let tensor = tensor.into();
        // A scalar has none, and is refused below.
        let (rows, size) = (tensor.shape().first().copied().unwrap_or(0), self.size() as usize);
        let splits = split_sizes(name, splits, (rows, size));
        let splits = splits.inspect_err(|error| self.refuse(name, &error.full_cause()))?;
        self.submit_split(name, Kind::Alltoall, (vec![tensor], splits), |mut outcome| {
            let splits = std::mem::take(&mut outcome.splits);
            Ok(Received { tensor: outcome.single()?, splits })
        })
    }

    /// Combines the tensors of all ranks, and scatters the rows of the result: as many to each rank, and one more to each of
    /// the first if they cannot be divided evenly.
    ///
    /// # Errors
    /// As [`allreduce`](Self::allreduce), and for a scalar and for Adasum.
    pub fn reducescatter(
        &self,
        name: &str,
        tensor: impl Into<Tensor>,
        reduction: impl Into<Reduction>,
    ) -> Result<Tensor> {
        self.reducescatter_async(name, tensor, reduction)?.synchronize()
    }

    /// Starts a [`reducescatter`](Self::reducescatter).
    ///
    /// # Errors
    /// As [`allreduce_async`](Self::allreduce_async).
    pub fn reducescatter_async(
        &self,
        name: &str,
        tensor: impl Into<Tensor>,
        reduction: impl Into<Reduction>,
    ) -> Result<Handle<Tensor>> {
        self.submit(name, Kind::Reducescatter(reduction.into()), vec![tensor.into()], Outcome::single)
    }

    /// A [`reducescatter`](Self::reducescatter) of several tensors under one name.
    ///
    /// # Errors
    /// As [`reducescatter`](Self::reducescatter).
    pub fn grouped_reducescatter(
        &self,
        name: &str,
        tensors: Vec<Tensor>,
        reduction: impl Into<Reduction>,
    ) -> Result<Vec<Tensor>> {
        self.grouped_reducescatter_async(name, tensors, reduction)?.synchronize()
    }

    /// Starts a [`grouped_reducescatter`](Self::grouped_reducescatter).
    ///
    /// # Errors
    /// As [`allreduce_async`](Self::allreduce_async).
    pub fn grouped_reducescatter_async(
        &self,
        name: &str,
        tensors: Vec<Tensor>,
        reduction: impl Into<Reduction>,
    ) -> Result<Handle<Vec<Tensor>>> {
        self.submit(name, Kind::Reducescatter(reduction.into()), tensors, |outcome| Ok(outcome.tensors))
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// If a rank fails or leaves.
    pub fn barrier(&self) -> Result<()> {
        self.barrier_async()?.synchronize()
    }

    /// Starts a [`barrier`](Self::barrier).
    ///
    /// # Errors
    /// As [`allreduce_async`](Self::allreduce_async).
    pub fn barrier_async(&self) -> Result<Handle<()>> {
        self.submit("horovod.barrier", Kind::Barrier, Vec::new(), |_| Ok(()))
    }

    /// Says that this rank has no more data, and waits until all ranks say so. Returns the last one. Meanwhile this rank takes part
    /// in the operations of the others, with neutral elements (zeros in a sum), or without rows. An average is still divided by the
    /// number of all ranks.
    ///
    /// # Errors
    /// If a rank fails or leaves. If some ranks do not join, and nothing is carried out for
    /// [`stall_shutdown_time`](crate::Options::stall_shutdown_time).
    pub fn join(&self) -> Result<Rank> {
        self.join_async()?.synchronize()
    }

    /// Starts a [`join`](Self::join): this rank has no more data until its handle is done.
    ///
    /// # Errors
    /// If this rank has joined already, or the job has failed; otherwise from [`Handle::synchronize`].
    pub fn join_async(&self) -> Result<Handle<Rank>> {
        self.engine().join(|outcome| Ok(Rank::new(outcome.last)))
    }

    /// Whether the operation is done. If so, [`synchronize`](Self::synchronize) does not wait.
    pub fn poll<T>(&self, handle: &Handle<T>) -> bool {
        handle.poll()
    }

    /// As [`Handle::synchronize`].
    ///
    /// # Errors
    /// The same.
    pub fn synchronize<T>(&self, handle: Handle<T>) -> Result<T> {
        handle.synchronize()
    }

    fn submit<T>(
        &self,
        name: &str,
        kind: Kind,
        tensors: Vec<Tensor>,
        take: fn(Outcome) -> Result<T>,
    ) -> Result<Handle<T>> {
        self.submit_split(name, kind, (tensors, Vec::new()), take)
    }

    fn submit_split<T>(
        &self,
        name: &str,
        kind: Kind,
        (tensors, splits): (Vec<Tensor>, Vec<usize>),
        take: fn(Outcome) -> Result<T>,
    ) -> Result<Handle<T>> {
        let parts = tensors.iter().map(|tensor| Part {
            dtype: tensor.dtype(),
            stands_for: tensor.stands_for(),
            shape: tensor.shape().iter().map(|extent| *extent as u64).collect(),
        });
        let request = Request { name: name.to_owned(), kind, parts: parts.collect() };
        self.engine().submit(request, (tensors, splits), take)
    }
}

/// How many of the `rows` of an alltoall go to each of `size` ranks.
fn split_sizes(name: &str, splits: Option<&[usize]>, (rows, size): (usize, usize)) -> Result<Vec<usize>> {
    match splits {
        Some(splits) => {
            let sum = splits.iter().try_fold(0usize, |sum, split| sum.checked_add(*split));
            if splits.len() != size || sum != Some(rows) {
                return Err(Error::invalid_argument(format!(
                    "{name:?}: the splits {splits:?} do not divide {rows} rows among {size} ranks"
                ))
                .with_remedy("give a number of rows for each rank, which together are all rows"));
            }
            Ok(splits.to_vec())
        }
        None if !rows.is_multiple_of(size) => {
            Err(Error::invalid_argument(format!("{name:?}: {rows} rows cannot be divided by {size} ranks"))
                .with_remedy("pass the splits"))
        }
        None => Ok(vec![rows / size; size]),
    }
}

macro_rules! scalars {
    ($($T:ty),*) => {
        $(impl From<$T> for Tensor {
            /// A scalar.
            fn from(value: $T) -> Self {
                Self::scalar(value)
            }
        })*
    };
}
scalars!(f32, f64, i32, i64);
