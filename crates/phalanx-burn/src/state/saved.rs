//! A [`TrainState`] in checkpoints.

use std::collections::HashSet;

use burn::module::Module;
use phalanx::checkpoint::training::{self, TrainingState};
use phalanx::checkpoint::{Checkpoints, Saved, Snapshot};
use phalanx::reducer::LoadedState;
use phalanx::reducer::hooks::{HookState, absent_hook};
use phalanx::state::{StateReader, StateWriter};
use phalanx::{Communicator as _, ProcessGroup, Rank, Result, WorldSize};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Begun, TrainState, model, moments, schedule};
use crate::parameters::Select;

impl<M: Module, T: Serialize + DeserializeOwned> TrainState<M, T> {
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
    /// As [`Checkpoints::save`] and [`save_to`](Self::save_to). On every rank, if the ranks train by themselves and their models differ, or a
    /// [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer) has the state of the optimizer, which would be left out.
    pub fn checkpoint(&self, checkpoints: &Checkpoints) -> Result<()> {
        self.model.check_not_sharded("TrainState::checkpoint")?;
        training::checkpoint(self, checkpoints)
    }

    /// As [`checkpoint`](Self::checkpoint), with the work divided: as a [sharded](Checkpoints::save_sharded) checkpoint, in which
    /// rank 0 writes the model and the progress, and all ranks write the tensors of the optimizer's state in turns, each of them
    /// once. With AdamW these are two thirds of the bytes. [`resume`](Self::resume) reads it on any number of ranks.
    ///
    /// Every rank must see the folder, and goes through the state to find its tensors. If the checkpoint has more in it, call
    /// [`save_shard_to`](Self::save_shard_to).
    ///
    /// # Errors
    /// As [`Checkpoints::save_sharded`] and [`save_shard_to`](Self::save_shard_to). On every rank, if a
    /// [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer) has the state of the optimizer, as in [`checkpoint`](Self::checkpoint).
    #[doc(alias = "torch.distributed.checkpoint")]
    pub fn checkpoint_sharded(&self, checkpoints: &Checkpoints) -> Result<()> {
        self.model.check_not_sharded("TrainState::checkpoint_sharded")?;
        let group = checkpoints.group();
        checkpoints.save_sharded(self.steps, |snapshot| self.save_shard_to(snapshot, group))
    }

    /// Saves this rank's share of it in a sharded checkpoint that may have more in it, such as a second state, or the part that each rank
    /// has of a [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer). Every rank calls it, and first, in the closure of
    /// [`save_sharded`](Checkpoints::save_sharded); `group` is that of the checkpoints.
    ///
    /// ```
    /// # use burn::nn::Linear;
    /// # use phalanx::Result;
    /// # use phalanx::checkpoint::Checkpoints;
    /// # use phalanx_burn::{TrainState, ZeroRedundancyOptimizer};
    /// # fn save(checkpoints: &Checkpoints, step: u64, state: &TrainState<Linear>, optimizer: &ZeroRedundancyOptimizer) -> Result<()> {
    /// checkpoints.save_sharded(step, |snapshot| { // `state.steps()` does not count the steps of another optimizer
    ///     state.save_shard_to(snapshot, checkpoints.group())?;
    ///     optimizer.save(&state.model, snapshot, "zero")
    /// })
    /// # }
    /// ```
    ///
    /// # Errors
    /// If a tensor or the progress cannot be written, or the progress could not be loaded again. On every rank, if the ranks train by themselves and their models differ, or not all ranks of
    /// `group` train the model together.
    pub fn save_shard_to(&self, snapshot: &mut Snapshot, group: &ProcessGroup) -> Result<()> {
        training::save_shard_to(self, snapshot, group)
    }

    /// Saves all of it in a checkpoint, for [`Checkpoints::save`](phalanx::checkpoint::Checkpoints::save).
    ///
    /// Running statistics, which each rank has for itself between a step and the next, are those of the rank that writes,
    /// which the others take over anyway.
    ///
    /// # Errors
    /// If a tensor or the progress cannot be written, or the progress could not be loaded again. If a communication hook keeps something for each rank, as PowerSGD does: one rank
    /// cannot save that.
    pub fn save_to(&self, snapshot: &mut Snapshot) -> Result<()> {
        training::save_to(self, snapshot)
    }

    /// Loads what [`save_to`](Self::save_to) has saved. Every rank calls it with the result of
    /// [`Checkpoints::newest`](phalanx::checkpoint::Checkpoints::newest).
    ///
    /// # Errors
    /// If the checkpoint is of another model, or has or lacks what this state lacks or has ([`is_mismatch`](phalanx::Error::is_mismatch));
    /// or if its `progress` is not of this type `T`, or is an [`ElasticSampler`](phalanx::sampler::ElasticSampler) of another order than this one
    /// ([`check_resumes`](phalanx::sampler::ElasticSampler::check_resumes)). Nothing is changed then.
    pub fn load_from(&mut self, saved: &Saved) -> Result<()>
    where
        T: 'static,
    {
        training::check_progress(&self.progress, saved, &format!("{}progress", self.name))?;
        let (absent, loaded) = self.read(saved)?;
        if let Some(hook) = absent {
            self.model.loaded_hook.mark_absent(hook);
        }
        self.model.note_load(loaded);
        Ok(())
    }

    /// Gives the communication hook of which nothing was among it, and what ranks compare of it. Buffers and progress may be each rank's own.
    pub(super) fn read(&mut self, reader: &impl StateReader) -> Result<(Option<String>, LoadedState)> {
        let steps = reader.value(&format!("{}steps", self.name))?;
        let progress = reader.value(&format!("{}progress", self.name))?;
        let name = format!("{}scheduler", self.name);
        let kind = ("a learning-rate scheduler", "scheduler");
        let scheduler = match &self.scheduler {
            Some(scheduler) if reader.is_saved(&name, true, kind)? => {
                Some(schedule::load(scheduler, reader, &name)?)
            }
            here => reader.is_saved(&name, here.is_some(), kind).map(|_| None)?,
        };
        let name = format!("{}averager", self.name);
        let averaged: Option<u64> =
            match reader.is_saved(&name, self.averager.is_some(), ("a model averager", "averager"))? {
                true => Some(reader.value(&name)?),
                false => None,
            };
        let hook = training::load_hook(self, reader)?;
        self.model.check_hook(hook.as_ref())?;
        let absent = absent_hook(hook.as_ref());
        let elements = model::read(self.model.state(), reader, &format!("{}model", self.name))?;
        model::check_tied(self.model.state(), self.model.parameters(), &elements)?;
        let trained: HashSet<_> = self.model.parameters().iter().map(|parameter| parameter.id).collect();
        let tensors = self.model.state().iter().zip(&elements);
        let tensors = tensors.filter(|(tensor, _)| trained.contains(&tensor.id));
        let loaded = LoadedState::of(steps, tensors.map(|(_, elements)| &**elements));
        let name = format!("{}optimizer", self.name);
        let parts = ([name.clone()], name.as_str());
        let model = (self.model.model(), self.model.state());
        let begun = Begun::after(steps);
        let optimizer = moments::load(&self.optimizer, model, reader, begun, parts, |_| true)?;
        self.model.load_hook(hook)?;
        // Deferred updates of forward passes would overwrite the loaded values.
        self.model.settle_buffers();
        self.model.map(|model| model::loaded(model, Select::All, elements));
        (self.optimizer, self.scheduler) = (optimizer, scheduler);
        if let (Some(averager), Some(steps)) = (&mut self.averager, averaged) {
            averager.resume_at(steps);
        }
        (self.steps, self.progress) = (steps, progress);
        Ok((absent, loaded))
    }
}

impl<M: Module, T: Serialize + DeserializeOwned> TrainingState for TrainState<M, T> {
    const AVERAGE: &'static str = "state.model.average_parameters()";

    fn steps(&self) -> u64 {
        self.steps
    }

    fn place(&self) -> (Rank, WorldSize) {
        (self.model.rank(), self.model.world_size())
    }

    fn group(&self) -> Option<ProcessGroup> {
        self.model.group().process_group()
    }

    fn hook_state(&self) -> Result<Option<HookState>> {
        self.model.hook_state()
    }

    fn common_hook_state(&self) -> Result<Option<HookState>> {
        self.model.common_hook_state()
    }

    fn hook_name(&self) -> String {
        format!("{}hook", self.name)
    }

    fn parameter_names(&self) -> Vec<&str> {
        self.model.parameters().iter().map(|parameter| parameter.name.as_str()).collect()
    }

    fn replicas_identical(&self) -> Result<bool> {
        self.model.replicas_identical()
    }

    fn check_nothing_held(&self) -> Result<()> {
        self.model.check_nothing_held()
    }

    fn check_readable(&self) -> Result<()> {
        training::check_readable(&self.progress, &format!("{}progress", self.name))
    }

    fn write(&self, writer: &mut impl StateWriter) -> Result<()> {
        self.model.check_nothing_held()?;
        self.model.settle_buffers();
        let model = (self.model.model(), Select::All);
        model::save(model, self.model.state(), writer, &format!("{}model", self.name))?;
        let optimizer = format!("{}optimizer", self.name);
        moments::save(&self.optimizer, self.model.state(), writer, (&optimizer, &optimizer))?;
        if let Some(scheduler) = &self.scheduler {
            schedule::save(scheduler, writer, &format!("{}scheduler", self.name))?;
        }
        if let Some(averager) = &self.averager {
            writer.value(&format!("{}averager", self.name), &averager.steps())?;
        }
        writer.value(&format!("{}steps", self.name), &self.steps)?;
        writer.value(&format!("{}progress", self.name), &self.progress)
    }
}
