//! Exchanges between the ranks that share each layer.

use std::collections::HashMap;
use std::fmt;
use std::iter::once;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::backend::Dispatch;
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::Tensor;
use phalanx::reducer::{states_identical, verify_description};
use phalanx::{Caller, Error, ProcessGroup, Rank, ReduceOp, Result};

use super::super::division::{Division, Span, divided, noted, reparameterization, reparameterized};
use super::super::exchange::{Exchange, Step};
use super::super::fsdp::first_shard;
use super::super::op::ParallelOp;
use super::TensorPlan;
use crate::alike::first_other;
use crate::data_parallel::refuse_several;
use crate::parameters::{self, Select};
use crate::replicas;
use crate::{Collectives, device, read_back};

/// After how many calls ranks show each other again what all of them have: a prime number, so that it comes to each of a step's calls.
const SHOWN: usize = 1021;
/// The most elements of a layer's input that ranks show each other.
const MOST_SHOWN: usize = 1 << 20;
/// By so much of their own size may inputs differ: more than what processors of several kinds round in other ways, also in 16 bits, and much less than
/// what lies between two batches.
const NEAR: f64 = 0.05;

/// The ranks among which layers are divided: what tensor-parallel layers are made with, and what layers of one's own are built
/// from.
///
/// Its methods are operations with gradients, in pairs of which each is the other's backward pass:
///
/// | | forward | backward | Megatron-LM |
/// |---|---|---|---|
/// | [`copy`](Self::copy) | the tensor as it is | all_reduce | f |
/// | [`reduce`](Self::reduce) | all_reduce | the gradient as it is | g |
/// | [`gather`](Self::gather) | all_gather | this rank's part | |
/// | [`part`](Self::part) | this rank's part | all_gather | |
/// | [`gather_sums`](Self::gather_sums) | all_gather | reduce_scatter | g of sequence parallelism |
/// | [`reduce_scatter`](Self::reduce_scatter) | reduce_scatter | all_gather | its conjugate |
///
/// A tensor that all ranks have goes through [`copy`](Self::copy) before each rank computes its own part with it, and partial sums go
/// through [`reduce`](Self::reduce) into a tensor that all ranks have. Sums are over ranks. All ranks must do the same operations in
/// the same order, forward and backward; backward runs in an order that depends on the graph alone. A handle to the group, such as a layer's,
/// must live until backward has returned.
///
/// Source: Shoeybi et al., "Megatron-LM" (2019), arXiv 1909.08053; Korthikanti et al., "Reducing activation recomputation" (2022),
/// arXiv 2205.05198.
///
/// # Errors
/// Neither a forward pass nor backward can return an error. If an exchange fails, or a dimension cannot be divided, this group and
/// all others of this rank are ended with the cause ([`ProcessGroup::abort_all`]), and the result is NaN; the next call on any of
/// them returns the cause, as [`failure`](Self::failure) does. So [`Ddp::backward`](crate::Ddp::backward) returns it too, on every
/// replica, and no NaN is averaged. A rank without a [`Ddp`](crate::Ddp) looks at `failure` before the optimizer's step. After a
/// failure all ranks go back to the last checkpoint: some may have taken the step already.
#[doc(alias("tensor_model_parallel_group", "copy_to_tensor_model_parallel_region"))]
#[derive(Clone)]
pub struct TensorGroup {
    group: ProcessGroup,
    /// How often ranks have shown each other what all of them have; clones have one number.
    shown: Arc<AtomicUsize>,
    /// How often an input has come into layers that they share; clones have one number.
    entered: Arc<AtomicUsize>,
}

impl TensorGroup {
    /// Over the ranks of `group`, such as `mesh.group("tensor")?`.
    pub fn new(group: &ProcessGroup) -> Self {
        let group = group.in_call(Caller::TensorParallel);
        Self { group, shown: Arc::default(), entered: Arc::default() }
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.group.world_size().count()
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.group.rank().index()
    }

    /// The cause, if the group has failed.
    pub fn failure(&self) -> Option<Error> {
        self.group.failure()
    }

    /// The group itself.
    pub(in crate::parallel) fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Ends the groups of this rank with `cause`.
    pub(in crate::parallel) fn abort(&self, cause: Error) {
        self.group.abort_all(cause);
    }

    /// The tensor as it is; its gradient is the sum of all ranks' gradients.
    #[doc(alias = "copy_to_tensor_model_parallel_region")]
    pub fn copy<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        self.exchange(tensor, Step::Keep, Step::Sum)
    }

    /// The sum of all ranks' tensors; the gradient goes back to each as it is.
    #[doc(alias = "reduce_from_tensor_model_parallel_region")]
    pub fn reduce<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        self.exchange(tensor, Step::Sum, Step::Keep)
    }

    /// All ranks' tensors, one after the other along `dim`, for what all ranks compute alike; each gets its part of the gradient.
    ///
    /// For a loss that each rank computes of its own rows against those of all ranks, such as a contrastive loss, this is the wrong
    /// one: it lacks what the other ranks' losses give. [`Collectives::all_gather`] has it.
    #[doc(alias = "gather_from_tensor_model_parallel_region")]
    pub fn gather<const D: usize>(&self, tensor: Tensor<D>, dim: usize) -> Tensor<D> {
        self.exchange(tensor, Step::Gather(dim), Step::Part(dim))
    }

    /// This rank's part of a tensor that all ranks have, along `dim`; the gradients of all parts are gathered.
    #[doc(alias = "scatter_to_tensor_model_parallel_region")]
    pub fn part<const D: usize>(&self, tensor: Tensor<D>, dim: usize) -> Tensor<D> {
        self.exchange(tensor, Step::Part(dim), Step::Gather(dim))
    }

    /// All ranks' tensors, one after the other along `dim`, for what each rank computes otherwise: the gradient of each part is the sum
    /// of all ranks'.
    ///
    /// [`Collectives::all_gather`] is this along the first dimension, for replicas of a whole model and with unequal numbers of rows.
    #[doc(alias = "gather_from_sequence_parallel_region")]
    pub fn gather_sums<const D: usize>(&self, tensor: Tensor<D>, dim: usize) -> Tensor<D> {
        self.exchange(tensor, Step::Gather(dim), Step::ReduceScatter(dim))
    }

    /// This rank's part, along `dim`, of the sum of all ranks' tensors; the gradients of all parts are gathered.
    #[doc(alias = "reduce_scatter_to_sequence_parallel_region")]
    pub fn reduce_scatter<const D: usize>(&self, tensor: Tensor<D>, dim: usize) -> Tensor<D> {
        self.exchange(tensor, Step::ReduceScatter(dim), Step::Gather(dim))
    }

    /// The largest of all ranks' elements. It has no gradient.
    pub(super) fn max<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        self.exchange(tensor.detach(), Step::Max, Step::Keep)
    }

    fn exchange<const D: usize>(&self, tensor: Tensor<D>, forward: Step, backward: Step) -> Tensor<D> {
        let (device, dtype) = (tensor.device(), tensor.dtype());
        if let Err(error) = device::check(&device) {
            self.abort(error);
            return Tensor::full(forward.shape(tensor.shape(), &self.group), f64::NAN, (&device, dtype));
        }
        let exchange = Exchange::new(&self.group, forward, backward);
        Tensor::from_dispatch(Dispatch::exchanged(tensor.into_dispatch(), exchange))
    }

    /// Gives every rank rank 0's parameters and buffers of `module`, for layers that are not divided. [`Ddp`](crate::Ddp) does
    /// the same along the data dimension.
    ///
    /// All ranks call it together, with modules of the same shapes.
    ///
    /// # Errors
    /// On every rank, if a parameter of one is divided already, or is the shard of a [unit](crate::parallel::fsdp::FullySharded): each rank
    /// has another part. If modules differ, or the exchange fails.
    pub fn replicate<M: Module>(&self, module: M) -> Result<M> {
        // Asked of all ranks, or the others would wait for one that finds it here alone.
        let own = (!divided(&module).is_empty(), first_shard(&module), parameters::in_words(&module));
        let all = self.group.all_gather_object(&own)?;
        if let Some(name) = all.iter().find_map(|(_, shard, _)| shard.as_deref()) {
            return Err(Error::invalid_argument(format!(
                "`{name}` is the shard of a unit: a module with it cannot be the same on every rank"
            ))
            .with_remedy("replicate layers that are in no unit"));
        }
        if all.iter().any(|(is_divided, ..)| *is_divided) {
            return Err(Error::invalid_argument(
                "a module with layers that are divided already cannot be the same on every rank",
            )
            .with_remedy("divide its layers after this call, or by one TensorPlan"));
        }
        // Rank 0's elements would fit tensors of another shape, too.
        parameters::check_words(&all.into_iter().map(|(.., tensors)| tensors).collect::<Vec<_>>())?;
        replicas::from_rank(module, &self.group, Rank::MAIN, Select::All)
    }

    /// An error on every rank unless what each has of `what` is `described` alike: [`replicate`](Self::replicate) gives ranks rank 0's tensors, and not the
    /// numbers with which layers compute, such as how many heads there are.
    pub(super) fn compare(&self, what: &str, described: &str) -> Result<()> {
        verify_description(&self.group, what, described)
    }

    /// Whether every rank has these `parts`, the bytes of something that all of them have, in the first two of these calls and every [`SHOWN`]th; true in the others.
    /// Ranks that got other batches would compute parts of different results, and no shape would say so. All ranks call it together.
    pub(super) fn is_everyones<'a>(&self, parts: impl IntoIterator<Item = &'a [u8]>) -> Result<bool> {
        let call = self.shown.fetch_add(1, Ordering::Relaxed);
        if call > 1 && !call.is_multiple_of(SHOWN) {
            return Ok(true);
        }
        states_identical(&self.group, parts)
    }

    /// As [`copy`](Self::copy), of the input of a layer that the ranks share.
    pub(super) fn enter<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        self.compare_input(&input);
        self.copy(input)
    }

    /// Ends the group unless every rank has this `input` of a layer, but for rounding, in the first of these calls and every [`SHOWN`]th. The inputs of
    /// other layers come from that of the first. All ranks call it together.
    pub(super) fn compare_input<const D: usize>(&self, input: &Tensor<D>) {
        let call = self.entered.fetch_add(1, Ordering::Relaxed);
        if self.ranks() == 1 || !call.is_multiple_of(SHOWN) {
            return;
        }
        let other = refuse_several("an operation of a TensorGroup", "call it outside of the replicas")
            .and_then(|()| read_back::data(input.clone().detach()))
            .and_then(|input| {
                // Never nothing, also of an input without elements.
                let own: Vec<f32> = once(0.0).chain(input.iter::<f32>().take(MOST_SHOWN)).collect();
                first_other(&own, are_near, &self.group)
            });
        let error = match other {
            Ok(None) => return,
            Ok(Some(rank)) => Error::mismatch(format!(
                "a layer that is divided among ranks has another input on rank {rank} than on rank 0 of its group, and each would compute its part of \
                 another batch"
            ))
            .with_peer(rank)
            .with_remedy(
                "give all ranks of a TensorGroup the same batch: in a mesh, sample by the rank in the data dimension; if a dropout comes before the layer, \
                 seed the devices of these ranks alike",
            ),
            Err(error) => error,
        };
        self.abort(error);
    }

    /// Every rank's plan, and what is wrong with its module.
    pub(super) fn all_plans(
        &self,
        plan: &TensorPlan,
        fault: Option<String>,
    ) -> Result<Vec<(TensorPlan, Option<String>)>> {
        self.group.all_gather_object(&(plan.clone(), fault))
    }

    /// The sum of each of all ranks' `numbers`.
    pub(in crate::parallel) fn sum(&self, numbers: &mut [f64]) -> Result<()> {
        self.group.all_reduce(numbers, ReduceOp::Sum)
    }

    /// The module with its divided parameters whole again, on every rank: to save it, or to use it without a group. Layers of fixed types,
    /// such as [`ParallelEncoder`](super::ParallelEncoder), have a `gather` of their own, which gives back Burn's layers. All ranks call
    /// it together.
    ///
    /// # Errors
    /// On every rank, if layers are divided among the ranks of another group. If the exchange fails.
    pub fn gather_module<M: Module>(&self, module: M) -> Result<M> {
        let (noted, own) = (noted(&module), (self.rank(), self.ranks()));
        let other = noted.values().map(|part| (part.rank, part.ranks)).find(|part| *part != own);
        // Asked of all ranks, or the others would wait for one that finds it here alone.
        let mut others = self.group.all_gather_object(&other)?.into_iter().enumerate();
        if let Some((rank, (part, parts))) = others.find_map(|(rank, other)| Some((rank, other?))) {
            return Err(Error::invalid_argument(format!(
                "rank {rank} has part {part} of {parts} of a divided layer, and in this tensor group it is number {rank} of {}",
                self.ranks()
            ))
            .with_remedy("gather the module with the TensorGroup among whose ranks its layers are divided"));
        }
        let spans = noted.into_iter().map(|(id, part)| (id, part.span)).collect();
        let mut gathering = Gathering { group: self, spans, outcome: Ok(()) };
        let whole = module.map(&mut gathering).materialize();
        gathering.outcome.map(|()| whole)
    }

    /// This rank's part of `parameter`, which all ranks have, along the dimension `dim`: for a layer of one's own. If it does not divide
    /// evenly, the first ranks have one more each. [`clip_grad_norm`](crate::parallel::clip_grad_norm) and
    /// [`ShardedState`](crate::parallel::ShardedState) know it for a part. Gradients are what the layer's operations make them.
    ///
    /// Burn keeps this note with the parameter as a reparameterization: a divided parameter can have no other, such as LoRA. `Module::map`,
    /// `no_grad` and records keep it. `Param::map` and `Param::set_require_grad` drop it, and the part is taken for a whole parameter then: change
    /// a parameter before it is divided, or through the module that it is in.
    ///
    /// # Errors
    /// If `parameter` has no such dimension, or less there than there are ranks; if it is a part already, or has an adapter such as LoRA.
    #[doc(alias("distribute_tensor", "DTensor", "Shard"))]
    pub fn shard<const D: usize>(&self, parameter: Param<Tensor<D>>, dim: usize) -> Result<Param<Tensor<D>>> {
        if let Some(name) = reparameterization(&parameter) {
            return Err(reparameterized(&name));
        }
        let shape = parameter.shape();
        let total = shape.as_slice().get(dim).copied().unwrap_or(0);
        if total < self.ranks() {
            return Err(Error::invalid_argument(format!(
                "a parameter of shape {:?} cannot be divided along dimension {dim} among {} ranks",
                shape.as_slice(),
                self.ranks()
            ))
            .with_remedy("divide another dimension, or among fewer ranks"));
        }
        let (from, length) = part(total, self.ranks(), self.rank());
        let part = changed(parameter, |tensor| tensor.narrow(dim, from, length))?;
        Ok(Division { group: self.clone(), span: Span { dim, total } }.attach(part))
    }

    /// The whole of which every rank has a part along `dim`. All ranks call it together.
    pub(super) fn gathered<const D: usize>(
        &self,
        parameter: &Param<Tensor<D>>,
        dim: usize,
    ) -> Result<Param<Tensor<D>>> {
        let first = parameter.base().clone().detach().swap_dims(0, dim);
        let whole = first.all_gather(&self.group)?.swap_dims(0, dim);
        changed(parameter.clone(), |_| whole)
    }

    /// An error unless `size`, of what `what` names, is a multiple of the number of ranks.
    pub(super) fn check_divides(&self, size: usize, what: &str) -> Result<()> {
        if size.is_multiple_of(self.ranks()) {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "{size} {what} cannot be divided evenly among {} ranks",
            self.ranks()
        ))
        .with_remedy("change the number of ranks of the tensor dimension"))
    }
}

/// Makes divided parameters whole.
struct Gathering<'a> {
    group: &'a TensorGroup,
    spans: HashMap<ParamId, Span>,
    outcome: Result<()>,
}

impl ModuleMapper for Gathering<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (Some(span), Ok(())) = (self.spans.get(&param.id), &self.outcome) else { return param };
        match self.group.gathered(&param, span.dim) {
            Ok(whole) => whole,
            Err(error) => {
                self.outcome = Err(error);
                param
            }
        }
    }
}

impl fmt::Debug for TensorGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TensorGroup(rank {} of {})", self.rank(), self.ranks())
    }
}

/// Whether inputs of a layer differ by rounding at most. Those that are not numbers differ from none.
fn are_near(main: &[f32], own: &[f32]) -> bool {
    let (mut apart, mut size) = (0.0, 0.0);
    for (main, own) in main.iter().zip(own) {
        let (main, own) = (f64::from(*main), f64::from(*own));
        apart += (main - own) * (main - own);
        size += main * main;
    }
    main.len() == own.len() && (apart.is_nan() || apart <= NEAR * NEAR * size)
}

/// Where `rank`'s part of `total` begins, and its length.
pub(in crate::parallel) fn part(total: usize, ranks: usize, rank: usize) -> (usize, usize) {
    let (each, more) = (total / ranks, total % ranks);
    (rank * each + rank.min(more), each + usize::from(rank < more))
}

/// `parameter` with another value, in memory of its own; id and need of a gradient stay.
fn changed<const D: usize>(
    parameter: Param<Tensor<D>>,
    change: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Result<Param<Tensor<D>>> {
    let data = read_back::data(change(parameter.base().clone().detach()))?;
    Ok(parameter.map(|old| {
        Tensor::from_data(data, (&old.device(), old.dtype())).set_require_grad(old.is_require_grad())
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_near_each_other_whatever_their_size_and_those_of_another_batch_are_not() {
        let wave = |phase: f32, scale: f32| -> Vec<f32> {
            (0..100).map(|place| (place as f32 * 0.7 + phase).sin() * scale).collect()
        };
        for scale in [1e-12, 1.0, 1e12] {
            let own = wave(0.0, scale);
            let rounded: Vec<f32> = own.iter().map(|value| value * 1.004).collect();
            assert!(are_near(&own, &own) && are_near(&own, &rounded));
            assert!(!are_near(&own, &wave(0.3, scale)) && !are_near(&own, &own[1..]));
            assert!(!are_near(&[0.0; 100], &own) && !are_near(&own, &[0.0; 100]));
        }
        assert!(
            are_near(&[], &[]) && are_near(&[0.0], &[0.0]) && are_near(&[f32::INFINITY], &[f32::INFINITY])
        );
    }

    #[test]
    fn parts_follow_each_other_and_differ_by_one_at_most() {
        for (total, ranks) in [(50_265, 2), (7, 4), (8, 4), (3, 4), (0, 2)] {
            let mut end = 0;
            for rank in 0..ranks {
                let (from, length) = part(total, ranks, rank);
                assert!(from == end && length.abs_diff(total / ranks) <= 1, "{total} {ranks} {rank}");
                end = from + length;
            }
            assert_eq!(end, total);
        }
    }
}
