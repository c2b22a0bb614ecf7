//! An optimizer whose state is divided among the ranks.

use std::collections::HashSet;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ParamId};
use burn::optim::ModuleOptimizer;
use phalanx::checkpoint::{Saved, Snapshot};
use phalanx::reducer::{LoadedState, verify_description};
use phalanx::{Caller, Communicator, Error, Rank, Result, WorldSize};

use crate::gradients::{ModelToken, Synced};
use crate::parameters::Parameter;
use crate::state::{Begun, moments};
use crate::{Ddp, optimizer};

/// The first stage of ZeRO (Rajbhandari et al., 2020): each rank keeps the optimizer's state of its own part of the
/// parameters, receives the averages of their gradients, updates them, and sends them to the others. PyTorch's
/// `ZeroRedundancyOptimizer`.
///
/// AdamW's state is twice the model; with n ranks each holds about one n-th of that. Parameters are not split, so any
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
/// # Communication
///
/// A step sends as many bytes as plain data parallelism does: gradients are reduced and scattered, still during backward,
/// and updated parameters gathered; together that is an all_reduce with the optimizer in its middle. (PyTorch averages
/// all gradients everywhere, and then broadcasts parameters, which is half as much again.) So [`Ddp::backward`] gives
/// each rank only its own averages from then on: clip with [`Ddp::clip_grad_norm`], and step with nothing but this.
///
/// Steps give the same bits as without it if sums are added up in the same order: with two ranks, with ranks that share
/// memory, and for buckets that are averaged by recursive doubling. Otherwise, with three ranks or more over TCP, they
/// differ by rounding. All replicas always have the same bits.
///
/// Hooks of [`Ddp::register_comm_hook`] do not scatter: with one of them whole buckets are averaged on every rank, and
/// the gathering is done in addition. The same holds between hosts on which several ranks share memory.
/// [`PostLocalSgd`](phalanx::reducer::hooks::PostLocalSgd) is refused: each parameter would be updated by the gradients of its owner alone.
#[doc(alias = "ZeRO")]
#[derive(Clone)]
pub struct ZeroRedundancyOptimizer {
    inner: ModuleOptimizer,
    /// The parameters whose state this rank keeps, also such as are frozen.
    own: HashSet<ParamId>,
    /// How the [`Ddp`] knows the optimizer of its parts.
    sharding: ModelToken,
    /// The state that was loaded since the last step, in which the [`Ddp`] hears of it.
    loaded: Option<LoadedState>,
}

impl ZeroRedundancyOptimizer {
    /// Shards the parameters of `ddp`'s model: from the next step on each rank gets the gradients of its own parameters. Of
    /// the state that `optimizer` has, for example from a checkpoint, this rank keeps its part. All ranks call it together.
    ///
    /// # Errors
    /// If the state cannot be read. On every rank, if the optimizers do not do the same to parameters: if they are of several kinds, or their betas,
    /// decay, momentum or clipping differ. Each rank would update its part of one model in another way. Learning rates are
    /// compared after the first step and every 32 steps. On every rank, too, if some have a state of a parameter that others do not have, or after another number of steps.
    /// If the group of `ddp` is a [`GroupHandle`](phalanx::GroupHandle) that leads to other ranks than when `ddp` was made.
    pub fn new<M: Module>(optimizer: ModuleOptimizer, ddp: &mut Ddp<M>) -> Result<Self> {
        let owners = assign_owners(ddp.parameters(), ddp.world_size());
        let mine = ddp.parameters().iter().zip(&owners).filter(|(_, owner)| **owner == ddp.rank());
        let mut own: HashSet<ParamId> = mine.map(|(parameter, _)| parameter.id).collect();
        // What is frozen by now may have a state, of which rank 0 takes care for all.
        if ddp.rank().is_main() {
            let trained: HashSet<ParamId> = ddp.parameters().iter().map(|parameter| parameter.id).collect();
            own.extend(ddp.state().iter().map(|tensor| tensor.id).filter(|id| !trained.contains(id)));
        }
        let sharding = ddp.shard(owners)?;
        ddp.compare_optimizers(&optimizer, None, Caller::ZeroNew)?;
        let group = ddp.group().in_call(Caller::ZeroNew);
        optimizer::check_states(&optimizer, &group, ddp.state())?;
        let inner = optimizer::restricted(optimizer, ddp.state(), &own);
        // The others go on, and wait for this rank's part.
        let inner = inner.inspect_err(|error| ddp.group().abort(error.clone()))?;
        Ok(Self { inner, own, sharding, loaded: None })
    }

    /// Lets the optimizer change this rank's part of `ddp`'s model by `gradients` from [`Ddp::backward`], and receives
    /// the other parts from their ranks. All ranks call it together.
    ///
    /// # Errors
    /// If the exchange fails; inside [`Ddp::join`], if a rank has no data left, because no other rank can update its
    /// part. If this optimizer was made for another `Ddp`, or `ddp` has changed its group since, as in an elastic job: this ends the group, in which
    /// the other ranks wait for this one's part.
    pub fn step<M: Module>(
        &mut self,
        ddp: &mut Ddp<M>,
        learning_rate: impl Into<ModuleLearningRate>,
        gradients: impl Synced,
    ) -> Result<()> {
        self.check_in_call(ddp)?;
        let (active, world) = (ddp.group().active_ranks(), ddp.world_size().count());
        if active < world {
            return Err(Error::invalid_argument(format!(
                "{} of {world} ranks have no data left, and they alone can update their part of the parameters",
                world - active
            ))
            .with_remedy("give every rank as many batches, or train with an optimizer that is not spread"));
        }
        if let Some(loaded) = self.loaded.take() {
            // The model may have come from another checkpoint, which counts, too.
            ddp.settle_loads();
            ddp.note_load(loaded);
        }
        ddp.apply(&mut self.inner, learning_rate, gradients)?;
        ddp.gather_parameters()
    }

    /// The whole state, on rank `to` only, in an optimizer that can be saved, or used without this wrapper. All ranks
    /// call it together.
    ///
    /// # Errors
    /// On every rank, if there is no rank `to`, or the ranks name several. If the exchange fails, or a state cannot be read; for another `ddp` as
    /// [`step`](Self::step).
    pub fn consolidate<M: Module>(&self, ddp: &Ddp<M>, to: Rank) -> Result<Option<ModuleOptimizer>> {
        self.check_in_call(ddp)?;
        let group = ddp.group().in_call(Caller::ZeroConsolidate);
        // Before it is looked at: one rank alone may name one that there is not.
        verify_description(&group, "rank that gets the whole state", &to.to_string())?;
        let to = ddp.world_size().rank(to.get())?;
        optimizer::gather(&self.inner, &group, to, ddp.state())
    }

    /// As [`Ddp::check_shards`], in a call of all ranks: they wait for this one if its optimizer alone is another one. That ends the group.
    fn check_in_call<M: Module>(&self, ddp: &Ddp<M>) -> Result<()> {
        ddp.check_ranks()?;
        ddp.check_shards(&self.sharding).map_err(|error| ddp.fail(error))
    }

    /// Adds this rank's part of the state to a sharded checkpoint, tensor by tensor, under names that begin with `name`: every
    /// rank calls it in [`save_sharded`](phalanx::checkpoint::Checkpoints::save_sharded). Nothing is gathered, and no rank needs
    /// memory for the state of others. The model, which all ranks have, is saved by one of them. The state of parameters that are frozen by now is left
    /// out: [`consolidate`](Self::consolidate) has it.
    ///
    /// ```
    /// # use phalanx::checkpoint::Checkpoints;
    /// # use phalanx_burn::{Ddp, ZeroRedundancyOptimizer};
    /// # use burn::nn::Linear;
    /// fn save(checkpoints: &Checkpoints, step: u64, ddp: &Ddp<Linear>, optimizer: &ZeroRedundancyOptimizer) -> phalanx::Result<()> {
    ///     checkpoints.save_sharded(step, |snapshot| optimizer.save(ddp, snapshot, "optimizer"))
    /// }
    ///
    /// fn load(checkpoints: &Checkpoints, ddp: &Ddp<Linear>, optimizer: &mut ZeroRedundancyOptimizer) -> phalanx::Result<()> {
    ///     match checkpoints.newest()? {
    ///         Some(saved) => optimizer.load(ddp, &saved, "optimizer"), // on any number of ranks
    ///         None => Ok(()),
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// If the state cannot be read; in the middle of a step, where gradients of [`Ddp::backward_no_sync`] would be missing; for another
    /// `ddp` as [`step`](Self::step); or as [`Snapshot::tensor`] and [`Snapshot::value`].
    pub fn save<M: Module>(&self, ddp: &Ddp<M>, snapshot: &mut Snapshot, name: &str) -> Result<()> {
        ddp.check_shards(&self.sharding)?;
        ddp.check_nothing_held()?;
        if ddp.rank().is_main() {
            snapshot.value(&ranks_of(name), &ddp.world_size().get())?;
        }
        let index = format!("{name}-{}", ddp.rank());
        moments::save(&self.inner, ddp.parameters(), snapshot, (&index, name))
    }

    /// Loads this rank's part of the state that any number of ranks have [saved](Self::save) under `name`, and reads no
    /// other rank's tensors. Every rank calls it: if one has not, or with the checkpoint of another step or run, that is an error of a later
    /// [`Ddp::backward`] on every rank.
    ///
    /// # Errors
    /// If it does not exist, cannot be read, or is that of another model or optimizer; the state is then unchanged. A checkpoint after a
    /// step above 0 without anything of an optimizer is that of another one, unless this one keeps nothing. For another `ddp` as
    /// [`step`](Self::step).
    pub fn load<M: Module>(&mut self, ddp: &Ddp<M>, saved: &Saved, name: &str) -> Result<()> {
        ddp.check_shards(&self.sharding)?;
        // The ranks of the Ddp may be a part of those that have made the checkpoint, which earlier versions have counted.
        let ranks = match saved.part_names().any(|part| part == ranks_of(name)) {
            true => saved.value::<u32>(&ranks_of(name))?,
            false => saved.world_size(),
        };
        let indexes = (0..ranks).map(|rank| format!("{name}-{rank}"));
        let is_own = |index: usize| {
            let parameter = ddp.parameters().get(index);
            // A missing tensor means another model, which is an error.
            parameter.is_none_or(|parameter| self.own.contains(&parameter.id))
        };
        let (model, begun) = ((ddp.model(), ddp.parameters()), Begun::after(saved.step()));
        self.inner = moments::load(&self.inner, model, saved, begun, (indexes, name), is_own)?;
        self.loaded = Some(LoadedState { step: saved.step(), checksum: saved.checksum() });
        Ok(())
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
        ddp.parameters().iter().filter(|parameter| self.own.contains(&parameter.id)).map(elements).sum()
    }
}

/// The name under which it is saved among how many ranks a state is divided.
fn ranks_of(name: &str) -> String {
    format!("{name}-ranks")
}

fn elements(parameter: &Parameter) -> usize {
    parameter.shape.iter().product()
}

/// The owner of each parameter. The largest goes first, each to the rank that has the fewest elements; the same on
/// every rank.
fn assign_owners(parameters: &[Parameter], world: WorldSize) -> Vec<Rank> {
    let mut order: Vec<usize> = (0..parameters.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(elements(&parameters[index])));
    let mut owners = vec![Rank::MAIN; parameters.len()];
    let mut loads = vec![0; world.count()];
    for index in order {
        let least = world.ranks().min_by_key(|rank| loads[rank.index()]).unwrap_or(Rank::MAIN);
        loads[least.index()] += elements(&parameters[index]);
        owners[index] = least;
    }
    owners
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
        let world = WorldSize::new(3).unwrap();
        let owners = assign_owners(&parameters, world);
        assert_eq!(owners.len(), parameters.len());
        let load = |rank: Rank| {
            let owned = parameters.iter().zip(&owners).filter(|(_, owner)| **owner == rank);
            owned.map(|(parameter, _)| elements(parameter)).sum::<usize>()
        };
        assert_eq!(world.ranks().map(load).sum::<usize>(), 151);
        assert!(world.ranks().all(|rank| (50..=51).contains(&load(rank))));
    }
}
