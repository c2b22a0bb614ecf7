//! What ranks that share a layer exchange in its forward pass, and what in its backward pass.

use std::fmt;
use std::sync::Arc;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, TensorMetadata};
use burn::tensor::{Shape, Slice, Tensor};
use phalanx::adapter::WeakGroup;
use phalanx::{Buffer, Error, ProcessGroup, ReduceOp, Result, WorldSize};

use super::op::ParallelOp;
use crate::data_parallel::refuse_several;
use crate::tensor_bytes::{self, HostAccess};

/// One direction of an exchange. A number is a dimension of the tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The tensor as it is; nothing is sent.
    Keep,
    /// The sum of all ranks' tensors.
    Sum,
    /// The largest of all ranks' elements.
    Max,
    /// All ranks' tensors, one after the other along the dimension.
    Gather(usize),
    /// This rank's part of the tensor along the dimension; nothing is sent.
    Part(usize),
    /// This rank's part of the sum of all ranks' tensors, along the dimension.
    ReduceScatter(usize),
    /// All ranks' rows, one rank's behind the other's: rank r brings the r-th number of them.
    GatherRows(Arc<[usize]>),
    /// This rank's rows of the sum of all ranks' tensors, divided in the same way.
    ReduceScatterRows(Arc<[usize]>),
}

/// A pair of steps, each the gradient of the other. It does not keep the group: it stays in a graph that may never run backward.
#[derive(Clone)]
pub struct Exchange {
    group: WeakGroup,
    forward: Step,
    backward: Step,
}

impl Exchange {
    pub(super) fn new(group: &ProcessGroup, forward: Step, backward: Step) -> Self {
        Self { group: group.downgrade(), forward, backward }
    }

    pub(super) fn forward<B: Backend + HostAccess>(&self, tensor: FloatTensor<B>) -> FloatTensor<B> {
        self.run::<B>(&self.forward, tensor)
    }

    pub(super) fn backward<B: Backend + HostAccess>(&self, gradient: FloatTensor<B>) -> FloatTensor<B> {
        if self.backward == Step::Keep {
            // It needs no group, which may be gone.
            return gradient;
        }
        self.run::<B>(&self.backward, gradient)
    }

    fn run<B: Backend + HostAccess>(&self, step: &Step, tensor: FloatTensor<B>) -> FloatTensor<B> {
        match self.group.upgrade() {
            Ok(group) => step.run::<B>(&group, tensor),
            // All groups of this rank have ended with the cause.
            Err(_) => not_a_number::<B>(tensor.shape(), &tensor),
        }
    }
}

/// All ranks' rows of `tensor`, one rank's behind the other's: rank r brings `rows[r]` of them. Its gradient is the sum of the
/// gradients that all ranks have for these rows. After a failure, which ends all groups of this rank, it is NaN.
///
/// It is one operation of the graph whatever the numbers of rows are. Burn's backward runs by depth, so that more operations on
/// one rank than on another, such as for padding, would change the order in which ranks exchange.
pub(crate) fn gathered<const D: usize>(group: &ProcessGroup, tensor: Tensor<D>, rows: &[usize]) -> Tensor<D> {
    let rows: Arc<[usize]> = rows.into();
    let exchange = Exchange::new(group, Step::GatherRows(rows.clone()), Step::ReduceScatterRows(rows));
    Tensor::from_dispatch(Dispatch::exchanged(tensor.into_dispatch(), exchange))
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Exchange({:?}, back {:?})", self.forward, self.backward)
    }
}

impl Step {
    /// The result; NaN if the exchange fails. Then all groups of this rank have ended with the cause before the NaN is there, so
    /// that no other rank averages it.
    fn run<B: Backend + HostAccess>(&self, group: &ProcessGroup, tensor: FloatTensor<B>) -> FloatTensor<B> {
        if group.world_size() == WorldSize::ONE {
            return tensor;
        }
        self.attempt::<B>(group, tensor.clone()).unwrap_or_else(|error| {
            group.abort_all(error);
            not_a_number::<B>(self.shape(tensor.shape(), group), &tensor)
        })
    }

    fn attempt<B: Backend + HostAccess>(
        &self,
        group: &ProcessGroup,
        tensor: FloatTensor<B>,
    ) -> Result<FloatTensor<B>> {
        refuse_several("an operation of a TensorGroup", "call it outside of the replicas")?;
        let ranks = group.world_size().count();
        if let &Self::Part(dim) | &Self::ReduceScatter(dim) = self {
            let size = tensor.shape()[dim];
            if !size.is_multiple_of(ranks) {
                return Err(Error::invalid_argument(format!(
                    "dimension {dim} of a tensor of shape {:?} cannot be divided evenly among {ranks} ranks",
                    tensor.shape().as_slice()
                ))
                .with_remedy("make it a multiple of the number of ranks"));
            }
        }
        let reduce = |op| {
            combined::<B>(group, &tensor, |buffer| group.all_reduce_async(buffer, op)?.wait(), tensor.shape())
        };
        let shape = self.shape(tensor.shape(), group);
        match *self {
            Self::Keep => Ok(tensor),
            Self::Sum => reduce(ReduceOp::Sum),
            Self::Max => reduce(ReduceOp::Max),
            Self::Part(dim) => {
                let shape = tensor.shape();
                let side = shape[dim] / ranks;
                let from = group.rank().index() * side;
                let slices: Vec<Slice> = (0..shape.num_dims())
                    .map(|other| if other == dim { from..from + side } else { 0..shape[other] })
                    .map(Slice::from)
                    .collect();
                Ok(B::float_slice(tensor, &slices))
            }
            // Ranks' parts follow each other in memory only along the first dimension.
            Self::Gather(dim) => {
                let first = B::float_swap_dims(tensor, 0, dim);
                let gather = |buffer| group.all_gather_async(buffer)?.wait();
                let all = combined::<B>(group, &first, gather, Self::Gather(0).shape(first.shape(), group))?;
                Ok(B::float_swap_dims(all, 0, dim))
            }
            Self::ReduceScatter(dim) => {
                let first = B::float_swap_dims(tensor, 0, dim);
                let scatter = |buffer| group.reduce_scatter_async(buffer, ReduceOp::Sum)?.wait();
                let shape = Self::ReduceScatter(0).shape(first.shape(), group);
                let part = combined::<B>(group, &first, scatter, shape)?;
                Ok(B::float_swap_dims(part, 0, dim))
            }
            Self::GatherRows(ref rows) => {
                let counts = counts(rows, &shape);
                let gather = |buffer| group.all_gather_v_async(buffer, &counts)?.wait();
                combined::<B>(group, &tensor, gather, shape)
            }
            Self::ReduceScatterRows(ref rows) => {
                let counts = counts(rows, &shape);
                let first: usize = counts[..group.rank().index()].iter().sum();
                let scatter = |buffer| {
                    let summed = group.reduce_scatter_v_async(buffer, &counts, ReduceOp::Sum)?.wait()?;
                    let mut own = Buffer::try_zeroed(summed.dtype(), shape.num_elements())?;
                    let from = first * summed.dtype().size();
                    let to = from + own.as_bytes().len();
                    own.as_bytes_mut().copy_from_slice(&summed.as_bytes()[from..to]);
                    Ok(own)
                };
                combined::<B>(group, &tensor, scatter, shape.clone())
            }
        }
    }

    /// The shape of the result, also of one that does not exist.
    pub fn shape(&self, mut shape: Shape, group: &ProcessGroup) -> Shape {
        let ranks = group.world_size().count();
        match self {
            Self::Keep | Self::Sum | Self::Max => {}
            Self::Gather(dim) => shape[*dim] *= ranks,
            Self::Part(dim) | Self::ReduceScatter(dim) => shape[*dim] /= ranks,
            Self::GatherRows(rows) => shape[0] = rows.iter().sum(),
            Self::ReduceScatterRows(rows) => shape[0] = rows[group.rank().index()],
        }
        shape
    }
}

/// The number of elements of each rank's rows, where a row is one of a tensor of `shape`.
fn counts(rows: &[usize], shape: &Shape) -> Vec<usize> {
    let row: usize = shape.as_slice()[1..].iter().product();
    rows.iter().map(|rows| rows * row).collect()
}

/// `tensor`'s elements after `collective`, as a tensor of `shape`.
fn combined<B: Backend + HostAccess>(
    group: &ProcessGroup,
    tensor: &FloatTensor<B>,
    collective: impl FnOnce(Buffer) -> Result<Buffer>,
    shape: Shape,
) -> Result<FloatTensor<B>> {
    let mut buffer = group.alloc(tensor_bytes::dtype(tensor.dtype())?, tensor.shape().num_elements())?;
    B::read(tensor.clone(), |tensor| buffer.as_bytes_mut().copy_from_slice(tensor.bytes))?;
    let result = collective(buffer)?;
    let data = tensor_bytes::tensor_data(result.as_bytes(), shape.as_slice(), tensor.dtype());
    Ok(B::float_from_data(data, &tensor.device()))
}

/// What stands for a result that could not be had.
pub(super) fn not_a_number<B: Backend>(shape: Shape, like: &FloatTensor<B>) -> FloatTensor<B> {
    B::float_full(shape, f64::NAN.into(), &like.device(), like.dtype().into())
}
