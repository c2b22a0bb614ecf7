//! Collectives on tensors and on single numbers.

use std::any::Any;

use burn::module::Module;
use burn::tensor::kind::Basic;
use burn::tensor::{BoolStore, DType as BurnDType, Device, Tensor};
use phalanx::adapter::has_room;
use phalanx::{Buffer, Caller, Communicator, DType, Error, ProcessGroup, Rank, ReduceOp, Result, WorldSize};

use crate::data_parallel::refuse_several;
use crate::parallel::gathered;
use crate::tensor_bytes;
use crate::{Ddp, device, read_back};

/// Collectives on Burn's tensors of any rank: floats, integers and truth values. What `torch.distributed` has under the same
/// names.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use phalanx::{ProcessGroup, Rank, ReduceOp};
/// use phalanx_burn::Collectives;
///
/// let group = ProcessGroup::alone()?; // or phalanx::init()?
/// let x = Tensor::<2>::ones([2, 3], &Device::flex());
/// let sum = x.clone().all_reduce(&group, ReduceOp::Sum)?; // [2, 3]
/// let rows = x.all_gather(&group)?;                       // [2 * world_size, 3]
/// let first = rows.broadcast(&group, Rank::MAIN)?;        // rank 0's
/// # assert_eq!((sum.dims(), first.dims()), ([2, 3], [2, 3]));
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// All ranks call them together. The tensor is on any device that this build knows, from which it is read back if need be, and
/// the result is on the same device.
///
/// **Gradients flow through [`all_gather`](Self::all_gather) alone.** The others refuse a tensor that is part of a graph, and all but
/// `broadcast` refuse a parameter that needs a gradient: for its value, as in a log, call `detach` first, or for that of a parameter `set_require_grad(false)`, which `detach` leaves true; a layer that is divided among ranks is made of the operations of
/// [`TensorGroup`](crate::parallel::tensor::TensorGroup).
///
/// # Errors
/// All of them: as the [`ProcessGroup`] method of the same name; all but `all_gather`, if the tensor is part of a graph; if the
/// tensor is on another backend; if its type is
/// not supported (quantised, 16-bit integers). Unsigned integers of 32 and 64 bits are copied, but cannot be combined:
/// cast them first. If there is too little memory on a rank: this ends the group.
pub trait Collectives: Sized {
    /// Combines the tensors of all ranks, which have the same shape, element by element. Every rank gets the result.
    ///
    /// # Errors
    /// See [above](Self#errors).
    #[doc(alias = "allreduce")]
    fn all_reduce(self, group: &ProcessGroup, op: ReduceOp) -> Result<Self>;

    /// As [`all_reduce`](Self::all_reduce), for rank `root` alone; `None` elsewhere.
    ///
    /// # Errors
    /// See [above](Self#errors).
    fn reduce(self, group: &ProcessGroup, root: Rank, op: ReduceOp) -> Result<Option<Self>>;

    /// Gives every rank the tensor of rank `root`. The others pass one of the same shape and type.
    ///
    /// # Errors
    /// See [above](Self#errors). If a rank's type is not the root's, an error on that rank; unsigned integers of 32 and
    /// 64 bits are sent as signed ones, and are not distinguished from them.
    fn broadcast(self, group: &ProcessGroup, root: Rank) -> Result<Self>;

    /// The tensors of all ranks, concatenated along the first dimension, in the order of ranks. They may differ in the
    /// length of that dimension: ranks may have unequal numbers of samples.
    ///
    /// If the tensor is part of a graph, so is the result: this is `torch.distributed.nn.functional.all_gather`, and the gather of a
    /// contrastive loss such as SimCLR's or CLIP's. Each rank computes the loss L_r of its own rows against all rows;
    /// [`Ddp::backward`] averages, so that what is trained is `(1/n) Σ_r L_r`. A rank's rows x are in the losses of all ranks, and
    /// their gradient is the sum `Σ_r ∂L_r/∂x`: a reduce_scatter in backward. It needs no factor, and no local rows written back.
    ///
    /// ```
    /// # use burn::{nn::Linear, tensor::{Int, Tensor, activation::log_softmax}};
    /// # use phalanx::ProcessGroup;
    /// # use phalanx_burn::{Collectives, Ddp};
    /// # fn step(ddp: &mut Ddp<Linear>, group: &ProcessGroup, images: Tensor<2>, captions: Tensor<2>) -> phalanx::Result<()> {
    /// let loss = ddp.forward(|model| {
    ///     let (images, captions) = (model.forward(images), captions);
    ///     let rows = images.dims()[0];
    ///     let first = (group.rank().index() * rows) as i64; // this rank's rows among all
    ///     let own = Tensor::<1, Int>::arange(first..first + rows as i64, &images.device()).reshape([rows, 1]);
    ///     let scores = images.matmul(captions.all_gather(group)?.transpose());
    ///     Ok::<_, phalanx::Error>(log_softmax(scores, 1).gather(1, own).mean().neg())
    /// })??;
    /// let gradients = ddp.backward(&loss)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// With unequal numbers of rows the mean over all of them is that of [`Ddp::backward_weighted`], with this rank's number of
    /// rows as the weight.
    ///
    /// The exchange in backward comes between the averages of [`Ddp`]'s buckets, at a place that depends on the graph alone. If
    /// ranks compute different graphs, that is an error that shows both calls; give the gather
    /// [a group of its own](ProcessGroup::new_group) then. Backward cannot return an error: if the exchange fails, all groups of
    /// this rank end with the cause, which [`Ddp::backward`] returns. A handle to the group must live until backward has returned.
    ///
    /// # Errors
    /// See [above](Self#errors). If types differ, or shapes in another dimension, or one rank's tensor is part of a graph and
    /// another's is not: the error names the rank that differs.
    /// If the tensor is part of a graph in one of several replicas of a [`DataParallel`](crate::DataParallel) or a
    /// [`TowerGradients`](crate::TowerGradients), which run at once: this ends the group.
    #[doc(alias("allgather", "contrastive", "InfoNCE"))]
    fn all_gather(self, group: &ProcessGroup) -> Result<Self>;

    /// As [`all_reduce`](Self::all_reduce), but rank r keeps only the r-th of `world_size` equal parts along the first
    /// dimension.
    ///
    /// # Errors
    /// See [above](Self#errors); if the first dimension cannot be divided evenly.
    fn reduce_scatter(self, group: &ProcessGroup, op: ReduceOp) -> Result<Self>;
}

impl<const D: usize, K: Basic + 'static> Collectives for Tensor<D, K> {
    fn all_reduce(self, group: &ProcessGroup, op: ReduceOp) -> Result<Self> {
        refuse_graph(&self, "all_reduce")?;
        let (local, buffer) = local(self, group, combined)?;
        local.tensor(&group.all_reduce_async(buffer, op)?.wait()?, local.shape)
    }

    fn reduce(self, group: &ProcessGroup, root: Rank, op: ReduceOp) -> Result<Option<Self>> {
        refuse_graph(&self, "reduce")?;
        let (local, buffer) = local(self, group, combined)?;
        let reduced = group.reduce_async(buffer, root, op)?.wait()?;
        (group.rank() == root).then(|| local.tensor(&reduced, local.shape)).transpose()
    }

    fn broadcast(self, group: &ProcessGroup, root: Rank) -> Result<Self> {
        // A leaf, such as a parameter whose value is broadcast, is no result that a loss goes through.
        if !is_leaf(&self) {
            refuse_graph(&self, "broadcast")?;
        }
        let (local, buffer) = local(self, group, copied)?;
        local.tensor(&group.broadcast_async(buffer, root)?.wait()?, local.shape)
    }

    fn all_gather(self, group: &ProcessGroup) -> Result<Self> {
        let tracked = as_tracked(&self);
        if tracked.is_some() && group.world_size() != WorldSize::ONE {
            // Before anything is exchanged.
            refuse_several("an all_gather with gradients", "call it on what all replicas give")
                .inspect_err(|error| group.abort(error.clone()))?;
        }
        let (local, buffer) = local(self, group, copied)?;
        let own = local.shape.map(|side| side as i64);
        let is_tracked = i64::from(tracked.is_some());
        let kind = [i64::from(buffer.dtype() as u8), i64::from(is_unsigned(local.dtype)), is_tracked];
        let layout = [&kind[..], &own[..]].concat();
        let mut layouts = vec![0; layout.len() * group.world_size().count()];
        group.all_gather(&layout, &mut layouts)?;
        let mut shape = local.shape;
        shape[0] = 0;
        let mut all_rows = Vec::with_capacity(group.world_size().count());
        for (rank, other) in group.world_size().ranks().zip(layouts.chunks_exact(layout.len())) {
            let (theirs, other) = other.split_at(kind.len());
            if theirs[..2] == kind[..2] && theirs[2] != is_tracked {
                return Err(Error::mismatch(format!(
                    "all_gather of tensors: one of the tensors of ranks {rank} and {} is part of a graph, and the other is not: \
                     backward would be an exchange on one of them alone",
                    group.rank()
                ))
                .with_remedy("compute it in the same way on every rank, or detach() it on every rank"));
            }
            if theirs != kind {
                return Err(Error::mismatch(format!(
                    "all_gather of tensors: rank {rank} brings elements of another type than rank {}'s {:?}",
                    group.rank(),
                    local.dtype
                ))
                .with_remedy("cast the tensors of all ranks to one type"));
            }
            let rows = usize::try_from(other[0]).ok().filter(|_| other[1..] == own[1..]);
            let Some(rows) = rows else {
                return Err(Error::mismatch(format!(
                    "all_gather of tensors: rank {rank} brings {other:?}, rank {} {own:?}",
                    group.rank()
                ))
                .with_remedy("tensors may differ in the length of the first dimension alone"));
            };
            shape[0] = rows.saturating_add(shape[0]);
            all_rows.push(rows);
        }
        let row: usize = local.shape[1..].iter().product();
        let bytes = shape[0].saturating_mul(row).saturating_mul(local.dtype.size());
        // Peers send the numbers of rows. If there is no memory for them, that is an error here, and not a panic later.
        if !has_room(bytes) {
            let cause =
                format!("all_gather of tensors: there is no memory for the {bytes} bytes of all ranks' rows");
            // Others may have it, and would wait for this rank's rows.
            return told(group, Err(Error::out_of_memory(cause).with_remedy("gather fewer rows at once")));
        }
        if let Some(tracked) = tracked {
            // If no rank has any, there is nothing to exchange, in backward neither.
            let all = match shape[0] {
                0 => tracked,
                _ => gathered(&group.in_call(Caller::AllGather), tracked, &all_rows),
            };
            if let Some(error) = group.failure() {
                return Err(error);
            }
            let all = (&all as &dyn Any).downcast_ref::<Self>().cloned();
            return all.ok_or_else(|| Error::invalid_argument("gradients are of floats alone"));
        }
        let counts: Vec<usize> = all_rows.iter().map(|rows| rows * row).collect();
        local.tensor(&told(group, group.all_gather_v_async(buffer, &counts))?.wait()?, shape)
    }

    fn reduce_scatter(self, group: &ProcessGroup, op: ReduceOp) -> Result<Self> {
        refuse_graph(&self, "reduce_scatter")?;
        let (local, buffer) = local(self, group, combined)?;
        let (mut shape, world) = (local.shape, group.world_size().count());
        if !shape[0].is_multiple_of(world) {
            return Err(Error::invalid_argument(format!(
                "reduce_scatter: a tensor of shape {shape:?} cannot be divided among {world} ranks along its first dimension"
            )));
        }
        shape[0] /= world;
        local.tensor(&told(group, group.reduce_scatter_async(buffer, op))?.wait()?, shape)
    }
}

/// `tensor`, if it is part of a graph.
pub(crate) fn as_tracked<const D: usize, K: Basic + 'static>(tensor: &Tensor<D, K>) -> Option<Tensor<D>> {
    (tensor as &dyn Any).downcast_ref::<Tensor<D>>().filter(|tensor| tensor.is_tracked()).cloned()
}

/// Whether `tensor` needs a gradient and is the result of nothing.
fn is_leaf<const D: usize, K: Basic + 'static>(tensor: &Tensor<D, K>) -> bool {
    as_tracked(tensor).is_some_and(|tensor| tensor.is_require_grad())
}

/// An error if `tensor` is part of a graph, in which the collective `name` would have no gradient.
pub(crate) fn refuse_graph<const D: usize, K: Basic + 'static>(
    tensor: &Tensor<D, K>,
    name: &str,
) -> Result<()> {
    if as_tracked(tensor).is_none() {
        return Ok(());
    }
    // Burn's `detach` of a parameter still needs a gradient.
    let detached = if is_leaf(tensor) { "set_require_grad(false)" } else { "detach()" };
    Err(Error::invalid_argument(format!(
        "{name} of a tensor that is part of a graph: gradients do not flow through it"
    ))
    .with_remedy(format!(
        "call {detached} first if only its value is needed, as in a log; all_gather has gradients, and so have the operations of \
         TensorGroup"
    )))
}

/// The properties that the result shares with this rank's tensor.
struct Local<const D: usize> {
    shape: [usize; D],
    dtype: BurnDType,
    device: Device,
}

/// `tensor`'s elements in memory of the group, in the type that is sent.
fn local<const D: usize, K: Basic>(
    tensor: Tensor<D, K>,
    group: &ProcessGroup,
    travels: impl FnOnce(BurnDType) -> Result<DType>,
) -> Result<(Local<D>, Buffer)> {
    let local = Local { shape: tensor.dims(), dtype: tensor.dtype(), device: tensor.device() };
    device::check(&local.device)?;
    let dtype = travels(local.dtype)?;
    // The others wait for this rank's tensor.
    let data = read_back::data(tensor).inspect_err(|error| group.abort(error.clone()))?;
    let data = if host_dtype(local.dtype) == local.dtype { data } else { data.convert::<bool>() };
    let mut buffer = told(group, group.alloc(dtype, data.num_elements()))?;
    buffer.as_bytes_mut().copy_from_slice(data.as_bytes());
    Ok((local, buffer))
}

/// `outcome`. If there was too little memory, that ends the group: the others may have it, and would wait for this rank.
fn told<T>(group: &ProcessGroup, outcome: Result<T>) -> Result<T> {
    outcome.inspect_err(|error| {
        if error.is_out_of_memory() {
            group.abort(error.clone());
        }
    })
}

impl<const D: usize> Local<D> {
    /// A tensor of the elements in `buffer`.
    fn tensor<K: Basic>(&self, buffer: &Buffer, shape: [usize; D]) -> Result<Tensor<D, K>> {
        let normal: Vec<u8>;
        let bytes = match self.dtype {
            // Peers may send any byte, and Burn's memory must contain 0 or 1.
            BurnDType::Bool(_) => {
                normal = buffer.as_bytes().iter().map(|byte| u8::from(*byte != 0)).collect();
                &normal
            }
            _ => buffer.as_bytes(),
        };
        let dtype = host_dtype(self.dtype);
        if bytes.len() != shape.iter().product::<usize>() * dtype.size() {
            return Err(Error::mismatch(format!(
                "a collective gave {} B for a tensor of {shape:?}",
                bytes.len()
            )));
        }
        let data = tensor_bytes::tensor_data(bytes, &shape, dtype);
        Ok(Tensor::from_data(data, (&self.device, self.dtype)))
    }
}

/// The type of the elements in this process's memory. Some devices store truth values as words.
fn host_dtype(dtype: BurnDType) -> BurnDType {
    match dtype {
        BurnDType::Bool(_) => BurnDType::Bool(BoolStore::Native),
        dtype => dtype,
    }
}

/// The type as which elements are copied: one of the same size. Unsigned integers of 32 and 64 bits are sent as signed
/// ones.
fn copied(dtype: BurnDType) -> Result<DType> {
    match dtype {
        BurnDType::I8 => Ok(DType::I8),
        BurnDType::Bool(_) => Ok(DType::Bool),
        other => tensor_bytes::dtype(other),
    }
}

/// Whether elements are sent as signed integers of the same size.
fn is_unsigned(dtype: BurnDType) -> bool {
    matches!(dtype, BurnDType::U64 | BurnDType::U32)
}

/// The type as which elements are combined.
fn combined(dtype: BurnDType) -> Result<DType> {
    match is_unsigned(dtype) {
        true => Err(Error::invalid_argument(format!("tensors of type {dtype:?} cannot be combined"))
            .with_remedy("cast it to a signed integer or a float")),
        false => copied(dtype),
    }
}

impl<M: Module> Ddp<M> {
    /// The mean of all ranks' `value`, such as a loss, the same on every rank. All ranks call it together; inside
    /// [`join`](Self::join) it is the mean over those that still have data.
    ///
    /// ```
    /// # use burn::{nn::Linear, tensor::Tensor};
    /// # fn show(ddp: &phalanx_burn::Ddp<Linear>, epoch: u64, loss: Tensor<1>) -> phalanx::Result<()> {
    /// let loss = ddp.mean(&loss)?; // on every rank
    /// if ddp.rank().is_main() {
    ///     println!("epoch {epoch}: loss {loss:.4}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Every rank's value has the same weight. For the mean over samples, of which ranks have unequal numbers, divide a
    /// [`sum`](Self::sum) by another.
    ///
    /// # Errors
    /// If a tensor has more than one element, or the exchange fails.
    pub fn mean(&self, value: impl Scalar) -> Result<f64> {
        let [sum, ranks] = self.total(value, Caller::DdpMean)?;
        Ok(sum / ranks)
    }

    /// The sum of all ranks' `value`, the same on every rank. All ranks call it together.
    ///
    /// # Errors
    /// As [`mean`](Self::mean).
    pub fn sum(&self, value: impl Scalar) -> Result<f64> {
        let [sum, _] = self.total(value, Caller::DdpSum)?;
        Ok(sum)
    }

    /// The sum of all ranks' `value`, and the number of ranks. Those without data in a `join` give zeros for both: one may be done behind its last step,
    /// and others do not know that yet.
    fn total(&self, value: impl Scalar, caller: Caller) -> Result<[f64; 2]> {
        let group = self.group().in_call(caller);
        // A shape is as wrong on the others; a device fails on this rank alone, and the others wait for its number.
        let number = value.number().inspect_err(|error| {
            if !error.is_invalid_argument() {
                group.abort(error.clone());
            }
        })?;
        let buffer = Buffer::from_slice(&[number, 1.0]);
        let total = group.all_reduce_async(buffer, ReduceOp::Sum)?.wait()?;
        <[f64; 2]>::try_from(total.as_slice::<f64>()?)
            .map_err(|_| Error::malformed("a sum over ranks is not two numbers"))
    }
}

/// A single number, for [`Ddp::mean`] and [`Ddp::sum`]: a Rust number, or a tensor with one
/// element, such as a loss.
pub trait Scalar {
    /// The number.
    ///
    /// # Errors
    /// If a tensor has not exactly one element, or its device cannot give it.
    fn number(&self) -> Result<f64>;
}

macro_rules! scalars {
    ($($number:ty),*) => {$(
        impl Scalar for $number {
            fn number(&self) -> Result<f64> {
                Ok(*self as f64)
            }
        }
    )*};
}
scalars!(f64, f32, i64, i32, u64, u32, usize);

impl<const D: usize, K: Basic> Scalar for Tensor<D, K> {
    fn number(&self) -> Result<f64> {
        let data = read_back::data(self.clone())?;
        let mut numbers = data.iter::<f64>();
        match (numbers.next(), numbers.next()) {
            (Some(number), None) => Ok(number),
            _ => {
                Err(Error::invalid_argument(format!("a tensor of shape {:?} is not one number", self.dims()))
                    .with_remedy("take its mean() or sum() first"))
            }
        }
    }
}

impl<T: Scalar + ?Sized> Scalar for &T {
    fn number(&self) -> Result<f64> {
        (**self).number()
    }
}

#[cfg(test)]
mod tests {
    use phalanx::testing::{Fabric, run};

    use super::*;

    #[test]
    fn a_rank_that_lacks_memory_for_a_tensor_ends_the_group_and_nobody_waits_for_it() {
        for fabric in [Fabric::InProcess, Fabric::Tcp, Fabric::SharedMemory] {
            let errors = run(2, fabric, |group| match group.rank().is_main() {
                // More bytes than processors can address.
                true => told(&group, group.alloc(DType::F64, 1 << 58)).map(drop).unwrap_err(),
                false => Tensor::<1>::zeros([2], &Device::flex()).broadcast(&group, Rank::MAIN).unwrap_err(),
            });
            assert!(errors[0].is_out_of_memory(), "{fabric:?}: {errors:?}");
            assert!(errors[1].to_string().contains("memory"), "{fabric:?}: {errors:?}");
        }
    }
}
