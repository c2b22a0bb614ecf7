//! An optimizer whose state is spread over the ranks.

use std::collections::HashSet;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::Tensor;
use phalanx::{Error, Rank, Result, WorldSize};

use crate::Ddp;
use crate::optimizer;
use crate::parameters::Parameter;

/// The first stage of ZeRO (Rajbhandari et al., 2020): each rank keeps the optimizer's state of its own part of the
/// parameters, updates that part, and gives it to the others. PyTorch's `ZeroRedundancyOptimizer`.
///
/// AdamW's state is twice the model; with n ranks each holds about one n-th of that. Parameters stay whole, so any
/// optimizer works, also one that looks at a whole matrix; the parts are as equal as whole parameters allow.
///
/// ```
/// # use burn::{nn::Linear, optim::AdamWConfig, tensor::Tensor};
/// # fn step(ddp: &mut phalanx_burn::Ddp<Linear>, loss: Tensor<1>) -> phalanx::Result<()> {
/// let mut optimizer = phalanx_burn::ZeroRedundancyOptimizer::new(AdamWConfig::new().init(), ddp)?;
/// let gradients = ddp.backward(&loss)?;
/// optimizer.step(ddp, 1e-3, gradients)?;
/// if let Some(whole) = optimizer.consolidate(ddp, phalanx::Rank::MAIN)? {
///     whole.save("optimizer").expect("the disk has room"); // on rank 0 alone
/// }
/// # Ok(())
/// # }
/// ```
///
/// Gradients are averaged on every rank, as in plain data parallelism; each step then moves the parameters once more,
/// which costs half as many bytes again.
#[derive(Clone)]
pub struct ZeroRedundancyOptimizer {
    inner: ModuleOptimizer,
    /// The parameters of each rank.
    parts: Vec<HashSet<ParamId>>,
    rank: Rank,
}

impl ZeroRedundancyOptimizer {
    /// Deals out the parameters of `ddp`'s model. Of the state that `optimizer` has, for example from a checkpoint,
    /// this rank's part stays.
    ///
    /// # Errors
    /// If the state cannot be read.
    pub fn new<M: Module>(optimizer: ModuleOptimizer, ddp: &Ddp<M>) -> Result<Self> {
        let parts = deal(ddp.parameters(), ddp.world_size());
        let rank = ddp.rank();
        let inner = optimizer::restricted(optimizer, &parts[rank.index()])?;
        Ok(Self { inner, parts, rank })
    }

    /// Lets the optimizer change this rank's part of `ddp`'s model by `gradients`, and takes the other parts from
    /// their ranks. All ranks call it together.
    ///
    /// # Errors
    /// If the exchange fails; inside [`Ddp::join`], if a rank has no data left, because nobody else could update its part.
    pub fn step<M: Module>(
        &mut self,
        ddp: &mut Ddp<M>,
        learning_rate: impl Into<ModuleLearningRate>,
        mut gradients: GradientsParams,
    ) -> Result<()> {
        let (active, world) = (ddp.active_ranks(), ddp.world_size().count());
        if active < world {
            return Err(Error::invalid_argument(format!(
                "{} of {world} ranks have no data left, and they alone can update their part of the parameters",
                world - active
            ))
            .with_remedy("give every rank as many batches, or train with an optimizer that is not spread"));
        }
        let own = &self.parts[self.rank.index()];
        ddp.model().visit(&mut Discard { keep: own, gradients: &mut gradients });
        ddp.step(&mut self.inner, learning_rate, gradients);
        ddp.share_parts(&self.parts)
    }

    /// The whole state, on rank `to` only, in an optimizer that can be saved, or go on without this wrapper. All ranks
    /// call it together.
    ///
    /// # Errors
    /// If the exchange fails, or a state cannot be read.
    pub fn consolidate<M: Module>(&self, ddp: &Ddp<M>, to: Rank) -> Result<Option<ModuleOptimizer>> {
        let states = optimizer::gather(&self.inner, ddp.communicator(), to, ddp.parameters())?;
        if self.rank != to {
            return Ok(None);
        }
        optimizer::merged(&self.inner, states).map(Some)
    }

    /// The bytes of this rank's state, as it would be saved.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn state_bytes(&self) -> Result<usize> {
        optimizer::bytes(&self.inner)
    }

    /// The number of elements of the parameters whose state this rank keeps.
    pub fn own_elements<M: Module>(&self, ddp: &Ddp<M>) -> usize {
        let own = &self.parts[self.rank.index()];
        ddp.parameters().iter().filter(|parameter| own.contains(&parameter.id)).map(elements).sum()
    }
}

fn elements(parameter: &Parameter) -> usize {
    parameter.shape.iter().product()
}

/// The largest parameter first, each to the rank that has least; the same on every rank.
fn deal(parameters: &[Parameter], world: WorldSize) -> Vec<HashSet<ParamId>> {
    let mut order: Vec<&Parameter> = parameters.iter().collect();
    order.sort_by_key(|parameter| std::cmp::Reverse(elements(parameter)));
    let mut parts = vec![HashSet::new(); world.count()];
    let mut loads = vec![0; world.count()];
    for parameter in order {
        let least = (0..loads.len()).min_by_key(|&rank| loads[rank]).unwrap_or(0);
        loads[least] += elements(parameter);
        parts[least].insert(parameter.id);
    }
    parts
}

/// Drops the gradients of other ranks' parameters, so that no state arises for them.
struct Discard<'a> {
    keep: &'a HashSet<ParamId>,
    gradients: &'a mut GradientsParams,
}

impl ModuleVisitor for Discard<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.keep.contains(&param.id) {
            drop(self.gradients.remove::<D>(param.id));
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;

    use super::*;

    #[test]
    fn parts_are_about_equal_and_cover_everything_once() {
        let parameter = |size: usize| Parameter {
            id: ParamId::new(),
            name: String::new(),
            shape: vec![size],
            dtype: DType::F32,
        };
        let parameters: Vec<_> = [50, 3, 20, 20, 10, 7, 1, 40].into_iter().map(parameter).collect();
        let parts = deal(&parameters, WorldSize::new(3).unwrap());
        let load = |part: &HashSet<ParamId>| {
            parameters.iter().filter(|parameter| part.contains(&parameter.id)).map(elements).sum::<usize>()
        };
        assert_eq!(parts.iter().map(HashSet::len).sum::<usize>(), parameters.len());
        assert_eq!(parts.iter().map(load).sum::<usize>(), 151);
        assert!(parts.iter().all(|part| (50..=51).contains(&load(part))));
    }
}
