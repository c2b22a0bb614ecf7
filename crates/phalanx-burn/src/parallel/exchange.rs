//! What ranks that share a layer exchange in its forward pass, and what in its backward pass.

use std::fmt;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, TensorMetadata};
use burn::tensor::{Shape, Slice, Tensor};
use phalanx::{Buffer, Error, ProcessGroup, ReduceOp, Result, WorldSize};

use super::op::ParallelOp;
use crate::tensor_bytes::{self, HostAccess};

/// One direction of an exchange. A number is a dimension of the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
}

/// A pair of steps, each the gradient of the other.
#[derive(Clone)]
pub struct Exchange {
    pub(super) group: ProcessGroup,
    pub(super) forward: Step,
    pub(super) backward: Step,
}

impl Exchange {
    pub(super) fn forward<B: Backend + HostAccess>(&self, tensor: FloatTensor<B>) -> FloatTensor<B> {
        self.forward.run::<B>(&self.group, tensor)
    }

    pub(super) fn backward<B: Backend + HostAccess>(&self, gradient: FloatTensor<B>) -> FloatTensor<B> {
        self.backward.run::<B>(&self.group, gradient)
    }
}

/// All ranks' rows of `tensor`, as many from each, one rank's behind the other's. Its gradient is the sum of the gradients that all
/// ranks have for these rows. After a failure, which ends all groups of this rank, it is NaN.
pub(crate) fn gathered<const D: usize>(group: &ProcessGroup, tensor: Tensor<D>) -> Tensor<D> {
    let exchange =
        Exchange { group: group.clone(), forward: Step::Gather(0), backward: Step::ReduceScatter(0) };
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
    fn run<B: Backend + HostAccess>(self, group: &ProcessGroup, tensor: FloatTensor<B>) -> FloatTensor<B> {
        if group.world_size() == WorldSize::ONE {
            return tensor;
        }
        self.attempt::<B>(group, tensor.clone()).unwrap_or_else(|error| {
            group.abort_all(error);
            not_a_number::<B>(self.shape(tensor.shape(), group.world_size().count()), &tensor)
        })
    }

    fn attempt<B: Backend + HostAccess>(
        self,
        group: &ProcessGroup,
        tensor: FloatTensor<B>,
    ) -> Result<FloatTensor<B>> {
        let ranks = group.world_size().count();
        if let Self::Part(dim) | Self::ReduceScatter(dim) = self {
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
        match self {
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
                let all = combined::<B>(group, &first, gather, Self::Gather(0).shape(first.shape(), ranks))?;
                Ok(B::float_swap_dims(all, 0, dim))
            }
            Self::ReduceScatter(dim) => {
                let first = B::float_swap_dims(tensor, 0, dim);
                let scatter = |buffer| group.reduce_scatter_async(buffer, ReduceOp::Sum)?.wait();
                let shape = Self::ReduceScatter(0).shape(first.shape(), ranks);
                let part = combined::<B>(group, &first, scatter, shape)?;
                Ok(B::float_swap_dims(part, 0, dim))
            }
        }
    }

    /// The shape of the result, also of one that does not exist.
    pub fn shape(self, mut shape: Shape, ranks: usize) -> Shape {
        match self {
            Self::Keep | Self::Sum | Self::Max => {}
            Self::Gather(dim) => shape[dim] *= ranks,
            Self::Part(dim) | Self::ReduceScatter(dim) => shape[dim] /= ranks,
        }
        shape
    }
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
