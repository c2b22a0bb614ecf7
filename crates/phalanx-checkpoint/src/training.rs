//! How an adapter's `TrainState` becomes a checkpoint: what all ranks have is written once, and what a communication hook such as
//! PowerSGD keeps for each rank is written for each.
//!
//! An adapter implements [`TrainingState`], and its `TrainState` calls the functions here.

use std::any::Any;

use phalanx_core::buffer::{Buffer, copy_of};
use phalanx_core::group::ProcessGroup;
use phalanx_core::reducer::hooks::HookState;
use phalanx_core::reducer::verify_description;
use phalanx_core::sampler::ElasticSampler;
use phalanx_core::state::{self, ShardWriter, StateReader, StateWriter};
use phalanx_proto::wire::object;
use phalanx_proto::world_size::WorldSize;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::caller::Caller;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::{Checkpoints, Saved, Snapshot};

/// A model, its optimizer and what else the next step depends on, as an adapter's `TrainState` has them.
pub trait TrainingState {
    /// How a program names the call that averages the models of ranks that train by themselves, such as
    /// `state.model.average_parameters()`.
    const AVERAGE: &'static str;

    /// How many steps the model has done: the checkpoint's number.
    fn steps(&self) -> u64;

    /// This rank, among those that train the model.
    fn place(&self) -> (Rank, WorldSize);

    /// The group of those, if it is known. By default it is not.
    fn group(&self) -> Option<ProcessGroup> {
        None
    }

    /// What the communication hook keeps between steps; nothing if it never keeps anything.
    ///
    /// # Errors
    /// In a backward pass.
    fn hook_state(&self) -> Result<Option<HookState>>;

    /// As [`hook_state`](Self::hook_state), without what each rank has of its own. By default all is read.
    ///
    /// # Errors
    /// As [`hook_state`](Self::hook_state).
    fn common_hook_state(&self) -> Result<Option<HookState>> {
        Ok(self.hook_state()?.map(HookState::without_own))
    }

    /// The name under which the hook's state is saved.
    fn hook_name(&self) -> String;

    /// The names of the parameters that have a gradient, in the reducer's order.
    fn parameter_names(&self) -> Vec<&str>;

    /// Whether all ranks have the same model. All ranks call it together.
    ///
    /// # Errors
    /// If a rank has failed.
    fn replicas_identical(&self) -> Result<bool>;

    /// An error in the middle of a step: gradients that are held would be lost.
    ///
    /// # Errors
    /// If gradients are held.
    fn check_nothing_held(&self) -> Result<()>;

    /// Checks that what [`write`](Self::write) writes of the program's own progress can be read again, by [`check_readable`]. By default nothing is
    /// checked.
    ///
    /// # Errors
    /// If it cannot.
    fn check_readable(&self) -> Result<()> {
        Ok(())
    }

    /// Writes all but the hook's state.
    ///
    /// # Errors
    /// As the writer's, and in the middle of a step.
    fn write(&self, writer: &mut impl StateWriter) -> Result<()>;
}

/// Saves `state` as the checkpoint after its steps. All ranks call it together; rank 0 writes, while training continues.
///
/// # Errors
/// As [`Checkpoints::save`] and [`save_to`]. On every rank, if the ranks train by themselves and their models differ.
pub fn checkpoint<S: TrainingState>(state: &S, checkpoints: &Checkpoints) -> Result<()> {
    // It may be on a device, and is read once.
    let hook = checked_hook(state, checkpoints.group())?;
    let own = hook.as_ref().filter(|hook| has_own(hook));
    let hooks = own.map_or(Ok(Vec::new()), |hook| own_of_all(hook, checkpoints.group()))?;
    checkpoints.save(state.steps(), |snapshot| {
        state.check_readable()?;
        state.write(snapshot)?;
        save_hook(state, hook.as_ref(), snapshot, hooks.len())?;
        hooks.iter().enumerate().try_for_each(|(rank, hook)| save_own(state, hook, snapshot, rank))
    })
}

/// Saves this rank's share of `state`, in the closure of [`Checkpoints::save_sharded`]. All ranks of `group`, which is that of the
/// checkpoints, call it together.
///
/// # Errors
/// If a part cannot be written, or in the middle of a step. On every rank, if the ranks train by themselves and their models differ, or if not all ranks
/// of `group` train the model together.
pub fn save_shard_to<S: TrainingState>(
    state: &S,
    snapshot: &mut Snapshot,
    group: &ProcessGroup,
) -> Result<()> {
    if !all_train(state, group) {
        let ((_, here), there) = (state.place(), group.world_size());
        return Err(Error::invalid_argument(format!(
            "the {there} ranks of a sharded checkpoint do not all train this model together: its group has world size {here}. Some shares would be of \
             another model's state"
        ))
        .with_remedy("open the checkpoints with the group in which the model trains, or with one of some of its ranks"));
    }
    let hook = checked_hook(state, group)?;
    let own = hook.as_ref().filter(|hook| has_own(hook));
    let (rank, ranks) = (group.rank().index(), group.world_size().count());
    let saved = if own.is_some() { ranks } else { 0 };
    let mut writer = ShardWriter::new(snapshot, (rank, ranks));
    state.check_readable()?;
    state.write(&mut writer)?;
    save_hook(state, hook.as_ref(), &mut writer, saved)?;
    own.map_or(Ok(()), |hook| save_own(state, hook, snapshot, rank))
}

/// Whether all ranks of `group` train `state` together: then each has the whole of it.
fn all_train<S: TrainingState>(state: &S, group: &ProcessGroup) -> bool {
    let ((_, here), there) = (state.place(), group.world_size());
    match state.group() {
        _ if there == WorldSize::ONE => true,
        Some(own) if own.is_same(group) => true,
        Some(own) if own.is_related(group) => {
            let trains = |rank| group.global_rank(rank).is_ok_and(|global| own.group_rank(global).is_some());
            there.ranks().all(trains)
        }
        // Of groups that were made apart only the numbers are known.
        Some(_) | None => here == there,
    }
}

/// Saves all of `state` by one rank, in the closure of [`Checkpoints::save`].
///
/// # Errors
/// If a part cannot be written, or in the middle of a step. If the communication hook keeps something for each rank: one rank cannot save
/// that.
pub fn save_to<S: TrainingState>(state: &S, snapshot: &mut Snapshot) -> Result<()> {
    let hook = state.hook_state()?;
    if let Some(hook) = hook.as_ref().filter(|hook| has_own(hook)) {
        return Err(Error::invalid_argument(format!(
            "the communication hook {} keeps tensors for each rank, and `save_to` saves what one rank has",
            hook.hook()
        ))
        .with_remedy(
            "call TrainState::checkpoint on every rank, or TrainState::save_shard_to in Checkpoints::save_sharded",
        ));
    }
    state.check_readable()?;
    state.write(snapshot)?;
    save_hook(state, hook.as_ref(), snapshot, 0)
}

/// Checks that a program's `progress`, which is saved as the part `name`, can be read again. A part has neither the names of fields nor their types, so
/// some types can only be written, and the job could never resume, or go back to a commit.
///
/// # Errors
/// If it cannot be written, or what is written cannot be read as this type.
pub fn check_readable<T: Serialize + DeserializeOwned>(progress: &T, name: &str) -> Result<()> {
    object::check_readable(progress, &format!("the part {name:?}"))
}

/// Writes all but what `ranks` ranks save of their own in the hook; 0 if none does, as in the commits of an elastic job, which then do not read it.
///
/// # Errors
/// As [`TrainingState::write`] and [`TrainingState::check_readable`].
pub fn save_common<S: TrainingState>(state: &S, writer: &mut impl StateWriter, ranks: usize) -> Result<()> {
    state.check_readable()?;
    state.write(writer)?;
    let hook = if ranks == 0 { state.common_hook_state()? } else { state.hook_state()? };
    save_hook(state, hook.as_ref(), writer, ranks)
}

/// Writes what all ranks have in common of the hook, if there is one.
fn save_hook<S: TrainingState>(
    state: &S,
    hook: Option<&HookState>,
    writer: &mut impl StateWriter,
    ranks: usize,
) -> Result<()> {
    match hook {
        Some(hook) => state::save_hook(hook, &state.parameter_names(), writer, &state.hook_name(), ranks),
        None => Ok(()),
    }
}

/// The hook's state that was saved for this rank, if there is one.
///
/// # Errors
/// If it cannot be read, or is of other parameters.
pub fn load_hook<S: TrainingState>(state: &S, reader: &impl StateReader) -> Result<Option<HookState>> {
    let name = state.hook_name();
    if !reader.has_value(&name) {
        return Ok(None);
    }
    let (rank, ranks) = state.place();
    state::load_hook(reader, &state.parameter_names(), &name, (rank.index(), ranks.count())).map(Some)
}

/// Loads the newest of `checkpoints` by `load`; returns whether there is one. All ranks call it together.
///
/// # Errors
/// As [`Checkpoints::newest`]. On every rank, if `load` fails or panics on one: the others have loaded it then.
pub fn resume(checkpoints: &Checkpoints, load: impl FnOnce(&Saved) -> Result<()>) -> Result<bool> {
    let Some(saved) = checkpoints.newest()? else { return Ok(false) };
    checkpoints.patient(Caller::TrainStateResume).told_to_all(|| load(&saved)).map(|()| true)
}

/// Checks that the value `name`, which is to replace the program's `own` progress, is of the same order if both are samplers. The sampler
/// that was saved would otherwise win whole, with the samples and the options of then.
///
/// # Errors
/// As [`ElasticSampler::check_resumes`], and if it cannot be read.
pub fn check_progress<T: 'static>(own: &T, saved: &Saved, name: &str) -> Result<()> {
    match (own as &dyn Any).downcast_ref::<ElasticSampler>() {
        Some(own) => own.check_resumes(&saved.value(name)?),
        None => Ok(()),
    }
}

/// Checks that the progress of every rank distributes the same samples in the same order, if it is a sampler. All ranks of `checkpoints` call it
/// together, before they load one: if there is none, nothing else would show that one rank has other data or another seed. They wait for each other as
/// long as in [`newest`](Checkpoints::newest).
///
/// # Errors
/// On every rank, if one's sampler is another ([`is_mismatch`](Error::is_mismatch)).
pub fn check_progress_of_ranks<T: 'static>(own: &T, checkpoints: &Checkpoints) -> Result<()> {
    match (own as &dyn Any).downcast_ref::<ElasticSampler>() {
        Some(own) => {
            verify_description(&checkpoints.patient(Caller::TrainStateResume), "sampler", &own.describe())
        }
        None => Ok(()),
    }
}

fn save_own<S: TrainingState>(
    state: &S,
    hook: &HookState,
    writer: &mut impl StateWriter,
    rank: usize,
) -> Result<()> {
    state::save_own_of_hook(hook, &state.parameter_names(), writer, &state.hook_name(), rank)
}

fn has_own(hook: &HookState) -> bool {
    hook.tensors().iter().any(|tensor| tensor.is_own)
}

/// What the hook keeps, between steps, for a checkpoint of which every rank saves its part in `group`.
///
/// # Errors
/// If the ranks' models differ: the hook lets ranks train by themselves. If the ranks keep other tensors of their own, or are others than `group`'s. On every
/// rank, if what it keeps cannot be read; if others can read it, `group` ends.
fn checked_hook<S: TrainingState>(state: &S, group: &ProcessGroup) -> Result<Option<HookState>> {
    let (held, read) = (state.check_nothing_held(), state.hook_state());
    if matches!(read, Ok(None)) {
        return held.map(|()| None); // All ranks have the same hook: none waits for another.
    }
    let read = held.and(read);
    let kept = read.as_ref().map(|hook| hook.as_ref().map(Kept::of)).map_err(ToString::to_string);
    let all = group.in_call(Caller::TrainStateCheckpoint).all_gather_object(&kept)?;
    let is_everyones = all.iter().all(Result::is_err);
    let hook = read.inspect_err(|error| {
        if !is_everyones {
            group.abort(error.clone());
        }
    })?;
    let first = all.iter().zip(0u32..).find_map(|(kept, rank)| Some((kept.as_ref().err()?, rank)));
    if let Some((error, rank)) = first {
        return Err(Error::aborted(format!("rank {rank} cannot save its part of the checkpoint: {error}"))
            .with_peer(Rank::new(rank)));
    }
    let Some(hook) = hook else { return Ok(None) };
    if let Some(rank) = all.iter().position(|other| Some(other) != all.first()) {
        return Err(Error::mismatch(format!(
            "the communication hook {} keeps other tensors on rank {rank} than on rank 0, and a checkpoint has one list of them",
            hook.hook()
        ))
        .with_remedy("let the hook keep tensors of the same parameters on every rank"));
    }
    if hook.is_empty() {
        return Ok(Some(hook));
    }
    let ((_, here), there) = (state.place(), group.world_size());
    if has_own(&hook) && here != there {
        return Err(Error::invalid_argument(format!(
            "the communication hook keeps tensors for each of {here} ranks, and the checkpoints are those of {there}"
        ))
        .with_remedy("open the checkpoints with the group in which the model trains"));
    }
    if !state.replicas_identical()? {
        return Err(Error::invalid_argument(format!(
            "the ranks' models differ since their last average, and a checkpoint has one (communication hook: {})",
            hook.hook()
        ))
        .with_remedy(format!("call {} before, or save after a step in which the averager averages", S::AVERAGE)));
    }
    Ok(Some(hook))
}

/// What ranks compare of what their hooks keep: a checkpoint has one list of it.
#[derive(PartialEq, Serialize, Deserialize)]
struct Kept {
    is_empty: bool,
    /// Of each tensor of the rank's own: its field, the number of its parameter, and how many elements it has.
    own: Vec<(String, usize, usize)>,
}

impl Kept {
    fn of(hook: &HookState) -> Self {
        let own = hook.tensors().iter().filter(|tensor| tensor.is_own);
        let own = own.map(|tensor| (tensor.field.clone(), tensor.parameter, tensor.elements.len()));
        Self { is_empty: hook.is_empty(), own: own.collect() }
    }
}

/// What each rank has of its own in `hook`, by rank, on rank 0; nothing on the others. All ranks of `group` call it together.
fn own_of_all(hook: &HookState, group: &ProcessGroup) -> Result<Vec<HookState>> {
    let group = group.in_call(Caller::TrainStateCheckpoint);
    let ranks = if group.rank() == Rank::MAIN { group.world_size().count() } else { 0 };
    let mut all = vec![HookState::default(); ranks];
    for tensor in hook.tensors().iter().filter(|tensor| tensor.is_own) {
        let own = Buffer::try_from_slice(&tensor.elements);
        let gathering = own.and_then(|own| group.gather_async(own, Rank::MAIN));
        // Without memory for them, as on rank 0, which takes those of all: the others would wait for this rank.
        let gathered = gathering.inspect_err(|error| group.abort(error.clone()))?.wait()?;
        let mut parts = gathered.as_slice::<f32>()?.chunks(tensor.elements.len().max(1));
        for state in &mut all {
            let elements = copy_of(parts.next().unwrap_or_default());
            // As above, if there are more tensors.
            let elements = elements.inspect_err(|error| group.abort(error.clone()))?;
            *state = std::mem::take(state).own(&tensor.field, tensor.parameter, elements);
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests;
