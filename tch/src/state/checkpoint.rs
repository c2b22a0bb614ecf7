//! Checkpoints of a training's state: what is written, how it is read, and what is refused.

use std::borrow::Cow;
use std::collections::HashSet;

use phalanx::checkpoint::training::{self, TrainingState};
use phalanx::checkpoint::{Checkpoints, Saved, Snapshot};
use phalanx::reducer::hooks::{HookState, absent_hook};
use phalanx::reducer::{LoadedState, ParameterSpec};
use phalanx::state::{StateReader, StateWriter};
use phalanx::{Communicator as _, Error, ProcessGroup, Rank, Result, WorldSize};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::Tensor;

use super::TrainState;
use crate::tensors::{self, Inventory, Named};

impl<T: Serialize + DeserializeOwned> TrainState<T> {
    /// Resumes from the newest of `checkpoints`; returns whether there was one. All ranks call it together.
    ///
    /// # Errors
    /// As [`Checkpoints::newest`]. On every rank, if one cannot load it, as by [`load_from`](Self::load_from): the others have loaded it then. On every
    /// rank, whether there is a checkpoint or not, if [`progress`](Self::progress) is an [`ElasticSampler`](phalanx::sampler::ElasticSampler), and one rank's has another number of samples or other options.
    pub fn resume(&mut self, checkpoints: &Checkpoints) -> Result<bool>
    where
        T: 'static,
    {
        training::check_progress_of_ranks(&self.progress, checkpoints)?;
        training::resume(checkpoints, |saved| self.load_from(saved))
    }

    /// Saves all of it as the checkpoint after [`steps`](Self::steps). All ranks call it together; rank 0 writes, while training
    /// continues.
    ///
    /// Of a hook that keeps something for each rank, as PowerSGD does, rank 0 gets all ranks' parts, each of the size of the gradients:
    /// [`checkpoint_sharded`](Self::checkpoint_sharded) needs no memory for them.
    ///
    /// # Errors
    /// As [`Checkpoints::save`] and [`save_to`](Self::save_to). On every rank, if the ranks train by themselves and their models differ.
    pub fn checkpoint(&self, checkpoints: &Checkpoints) -> Result<()> {
        training::checkpoint(self, checkpoints)
    }

    /// As [`checkpoint`](Self::checkpoint), with the work divided: all ranks write the optimizer's tensors in turns, each of
    /// them once. Every rank must see the folder. If the checkpoint has more in it, call [`save_shard_to`](Self::save_shard_to).
    ///
    /// # Errors
    /// As [`Checkpoints::save_sharded`] and [`save_shard_to`](Self::save_shard_to).
    pub fn checkpoint_sharded(&self, checkpoints: &Checkpoints) -> Result<()> {
        let group = checkpoints.group();
        checkpoints.save_sharded(self.steps, |snapshot| self.save_shard_to(snapshot, group))
    }

    /// Saves this rank's share of it in a sharded checkpoint that may have more in it, such as a table of which each rank has its rows.
    /// Every rank calls it, and first, in the closure of [`save_sharded`](Checkpoints::save_sharded); `group` is that of the checkpoints.
    ///
    /// ```
    /// # use phalanx::Result;
    /// # use phalanx::checkpoint::Checkpoints;
    /// # use phalanx_tch::TrainState;
    /// # fn save(checkpoints: &Checkpoints, state: &TrainState, rows: &[f32]) -> Result<()> {
    /// let group = checkpoints.group();
    /// let (rank, ranks) = (group.rank().index(), group.world_size().count());
    /// checkpoints.save_sharded(state.steps(), |snapshot| {
    ///     state.save_shard_to(snapshot, group)?;
    ///     snapshot.slice("table", &[ranks * 100, 64], &[rank * 100, 0], &[100, 64], rows)
    /// })
    /// # }
    /// ```
    ///
    /// # Errors
    /// If a tensor or the progress cannot be written, the progress could not be loaded again, or in the middle of a step. On every rank, if the ranks train by themselves and their
    /// models differ, or not all ranks of `group` train the model together.
    pub fn save_shard_to(&self, snapshot: &mut Snapshot, group: &ProcessGroup) -> Result<()> {
        training::save_shard_to(self, snapshot, group)
    }

    /// Saves all of it in a checkpoint, for [`Checkpoints::save`](phalanx::checkpoint::Checkpoints::save).
    ///
    /// # Errors
    /// If a tensor or the progress cannot be written, the progress could not be loaded again, or in the middle of a step. If a communication hook keeps something for each rank, as
    /// PowerSGD does: one rank cannot save that.
    pub fn save_to(&self, snapshot: &mut Snapshot) -> Result<()> {
        training::save_to(self, snapshot)
    }

    /// Loads what [`save_to`](Self::save_to) has saved. Every rank calls it.
    ///
    /// # Errors
    /// If the checkpoint is of another model or optimizer ([`is_mismatch`](phalanx::Error::is_mismatch)), or its `progress`
    /// is not of this type `T`, or is an [`ElasticSampler`](phalanx::sampler::ElasticSampler) of another order than this one
    /// ([`check_resumes`](phalanx::sampler::ElasticSampler::check_resumes)). Nothing is changed then.
    pub fn load_from(&mut self, saved: &Saved) -> Result<()>
    where
        T: 'static,
    {
        training::check_progress(&self.progress, saved, &self.part("progress"))?;
        let (absent, loaded) = self.read(saved)?;
        if let Some(hook) = absent {
            self.ddp.loaded_hook.mark_absent(hook);
        }
        self.ddp.note_load(loaded);
        Ok(())
    }

    /// Returns the communication hook of which nothing was there, and what ranks compare: buffers and progress may be each rank's own. Everything is read
    /// before anything is changed.
    pub(super) fn read(&mut self, reader: &impl StateReader) -> Result<(Option<String>, LoadedState)> {
        let (steps, progress) = (reader.value(&self.part("steps"))?, reader.value(&self.part("progress"))?);
        let model = self.part("model");
        let saved: Vec<ParameterSpec> = reader.value(&model)?;
        let here = Inventory::specs(self.ddp.state());
        if here != saved {
            return Err(other_model(&here, &saved));
        }
        self.ddp.state().iter().try_for_each(Named::check_kind)?;
        self.ddp.check_all_known()?;
        let tensor =
            |spec: &ParameterSpec| reader.tensor(&format!("{model}.{}", spec.name), spec.dtype, &spec.shape);
        let elements = here.iter().map(tensor).collect::<Result<Vec<_>>>()?;
        let trained: HashSet<&str> = self.ddp.parameter_names().into_iter().collect();
        let tensors = here.iter().zip(&elements).filter(|(spec, _)| trained.contains(spec.name.as_str()));
        let loaded = LoadedState::of(steps, tensors.map(|(_, elements)| &**elements));
        let optimizer = self.optimizer.read(reader, &self.part("optimizer"))?;
        let name = self.part("averager");
        let averaged: Option<u64> =
            match reader.is_saved(&name, self.averager.is_some(), ("a model averager", "averager"))? {
                true => Some(reader.value(&name)?),
                false => None,
            };
        let hook = training::load_hook(self, reader)?;
        self.ddp.check_hook(hook.as_ref())?;
        self.check_shared(&elements)?;
        let absent = absent_hook(hook.as_ref());
        self.ddp.drop_accumulated()?;
        self.ddp.load_hook(hook)?;
        let state = self.ddp.state().iter().zip(&elements);
        state.into_iter().try_for_each(|(one, elements)| tensors::write_elements(&one.tensor, elements))?;
        self.optimizer.load(optimizer);
        if let (Some(averager), Some(steps)) = (&mut self.averager, averaged) {
            averager.resume_at(steps);
        }
        (self.steps, self.progress) = (steps, progress);
        Ok((absent, loaded))
    }

    /// An error if variables that share memory could not have these elements, each its own. Afterwards they are as before.
    fn check_shared(&self, elements: &[Cow<'_, [u8]>]) -> Result<()> {
        let state = self.ddp.state();
        let firsts = tensors::sharing(&tensors::handles(state));
        let is_shared = |index: usize| firsts[index].is_some() || firsts.contains(&Some(index));
        let shared: Vec<usize> = (0..state.len()).filter(|&index| is_shared(index)).collect();
        let those: Vec<Tensor> = shared.iter().map(|&index| state[index].tensor.shallow_clone()).collect();
        let before = tensors::copies(&those)?;
        for (tensor, &index) in those.iter().zip(&shared) {
            tensors::write_elements(tensor, &elements[index])?;
        }
        let after = tensors::copies(&those)?;
        for (tensor, elements) in those.iter().zip(&before) {
            tensors::write_elements(tensor, elements)?;
        }
        for (&index, after) in shared.iter().zip(&after) {
            if *after == *elements[index] {
                continue;
            }
            let is_other = |&other: &usize| {
                let first = |index: usize| firsts[index].unwrap_or(index);
                other != index && first(other) == first(index)
            };
            let other = shared.iter().copied().find(is_other).unwrap_or(index);
            let (one, other) = (&state[index].spec.name, &state[other].spec.name);
            return Err(Error::mismatch(format!(
                "the variables `{one}` and `{other}` share memory, and the saved state has other values for the one than for the other"
            ))
            .with_remedy("tie only weights that were tied when the state was saved"));
        }
        Ok(())
    }
}

/// The error that names the first difference.
fn other_model(here: &[ParameterSpec], saved: &[ParameterSpec]) -> Error {
    let place = here.iter().zip(saved).take_while(|(here, saved)| here == saved).count();
    let describe = |specs: &[ParameterSpec]| specs.get(place).map_or("none".to_owned(), ToString::to_string);
    let (here, saved) = (describe(here), describe(saved));
    Error::mismatch(format!(
        "the state is that of another model: its variable number {} is {saved}, here it is {here}",
        place + 1
    ))
    .with_remedy("build the model as it was built when the state was saved")
}

impl<T: Serialize + DeserializeOwned> TrainingState for TrainState<T> {
    const AVERAGE: &'static str = "state.ddp.average_parameters()";

    fn steps(&self) -> u64 {
        self.steps
    }

    fn place(&self) -> (Rank, WorldSize) {
        (self.ddp.rank(), self.ddp.world_size())
    }

    fn group(&self) -> Option<ProcessGroup> {
        self.ddp.group().process_group()
    }

    fn hook_state(&self) -> Result<Option<HookState>> {
        self.ddp.hook_state()
    }

    fn common_hook_state(&self) -> Result<Option<HookState>> {
        self.ddp.common_hook_state()
    }

    fn hook_name(&self) -> String {
        self.part("hook")
    }

    fn parameter_names(&self) -> Vec<&str> {
        self.ddp.parameter_names()
    }

    fn replicas_identical(&self) -> Result<bool> {
        self.ddp.replicas_identical()
    }

    fn check_nothing_held(&self) -> Result<()> {
        self.ddp.check_nothing_held()
    }

    fn check_readable(&self) -> Result<()> {
        training::check_readable(&self.progress, &self.part("progress"))
    }

    fn write(&self, writer: &mut impl StateWriter) -> Result<()> {
        self.ddp.check_nothing_held()?;
        self.ddp.check_all_known()?;
        let state = self.ddp.state();
        state.iter().try_for_each(Named::check_kind)?;
        let model = self.part("model");
        writer.value(&model, &Inventory::specs(state))?;
        for one in state {
            let ParameterSpec { name, shape, dtype } = &one.spec;
            tensors::read_elements(&[one.tensor.shallow_clone()], |parts| {
                writer.tensor(&format!("{model}.{name}"), *dtype, shape, parts.next().unwrap_or_default())
            })?;
        }
        self.optimizer.save(writer, &self.part("optimizer"))?;
        // What was read is computed: no call of NCCL's that it comes from fails later.
        self.ddp.check_settled()?;
        if let Some(averager) = &self.averager {
            writer.value(&self.part("averager"), &averager.steps())?;
        }
        writer.value(&self.part("steps"), &self.steps)?;
        writer.value(&self.part("progress"), &self.progress)
    }
}
