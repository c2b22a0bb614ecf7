//! How an adapter's `TrainState` becomes a checkpoint: what all ranks have is written once, and what a communication hook such as
//! PowerSGD keeps for each rank is written for each.
//!
//! An adapter implements [`TrainingState`], and its `TrainState` calls the functions here.

use phalanx_core::buffer::Buffer;
use phalanx_core::group::ProcessGroup;
use phalanx_core::reducer::hooks::HookState;
use phalanx_core::state::{self, ShardWriter, StateReader, StateWriter};
use phalanx_proto::world_size::WorldSize;

use crate::caller::Caller;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::{Checkpoints, Snapshot};

/// A model, its optimizer and what else the next step depends on, as an adapter's `TrainState` has them.
pub trait TrainingState {
    /// How a program names the call that averages the models of ranks that train by themselves, such as
    /// `state.model.average_parameters()`.
    const AVERAGE: &'static str;

    /// How many steps the model has done: the checkpoint's number.
    fn steps(&self) -> u64;

    /// This rank, among those that train the model.
    fn place(&self) -> (Rank, WorldSize);

    /// What the communication hook keeps between steps; nothing if it never keeps anything.
    ///
    /// # Errors
    /// In a backward pass.
    fn hook_state(&self) -> Result<Option<HookState>>;

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

    /// Writes all but the hook's state.
    ///
    /// # Errors
    /// As the writer's, and in the middle of a step.
    fn write(&self, writer: &mut impl StateWriter) -> Result<()>;
}

/// Saves `state` as the checkpoint after its steps. All ranks call it together; rank 0 writes, while training goes on.
///
/// # Errors
/// As [`Checkpoints::save`] and [`save_to`]. On every rank, if the ranks train by themselves and their models differ.
pub fn checkpoint<S: TrainingState>(state: &S, checkpoints: &Checkpoints) -> Result<()> {
    state.check_nothing_held()?;
    let own = own_hook(state, checkpoints.group())?;
    let hooks = own.map_or(Ok(Vec::new()), |hook| own_of_all(&hook, checkpoints.group()))?;
    checkpoints.save(state.steps(), |snapshot| {
        save_common(state, snapshot, hooks.len())?;
        hooks.iter().enumerate().try_for_each(|(rank, hook)| save_own(state, hook, snapshot, rank))
    })
}

/// Saves this rank's share of `state`, in the closure of [`Checkpoints::save_sharded`]. All ranks of `group`, which is that of the
/// checkpoints, call it together.
///
/// # Errors
/// If a part cannot be written, or in the middle of a step. On every rank, if the ranks train by themselves and their models differ.
pub fn save_shard_to<S: TrainingState>(
    state: &S,
    snapshot: &mut Snapshot,
    group: &ProcessGroup,
) -> Result<()> {
    let own = own_hook(state, group)?;
    let (rank, ranks) = (group.rank().index(), group.world_size().count());
    let saved = if own.is_some() { ranks } else { 0 };
    save_common(state, &mut ShardWriter::new(snapshot, (rank, ranks)), saved)?;
    own.as_ref().map_or(Ok(()), |hook| save_own(state, hook, snapshot, rank))
}

/// Saves all of `state` by one rank, in the closure of [`Checkpoints::save`].
///
/// # Errors
/// If a part cannot be written, or in the middle of a step. If the communication hook keeps something for each rank: one rank cannot save
/// that.
pub fn save_to<S: TrainingState>(state: &S, snapshot: &mut Snapshot) -> Result<()> {
    if let Some(hook) = state.hook_state()?.filter(has_own) {
        return Err(Error::invalid_argument(format!(
            "the communication hook {} keeps tensors for each rank, and `save_to` saves what one rank has",
            hook.hook()
        ))
        .with_remedy(
            "call TrainState::checkpoint on every rank, or TrainState::save_shard_to in Checkpoints::save_sharded",
        ));
    }
    save_common(state, snapshot, 0)
}

/// Writes all but what `ranks` ranks save of their own in the hook; 0 if none does, as in the commits of an elastic job.
///
/// # Errors
/// As [`TrainingState::write`].
pub fn save_common<S: TrainingState>(state: &S, writer: &mut impl StateWriter, ranks: usize) -> Result<()> {
    state.write(writer)?;
    match state.hook_state()? {
        Some(hook) => state::save_hook(&hook, &state.parameter_names(), writer, &state.hook_name(), ranks),
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

/// What the hook keeps for this rank, in a step of which every rank saves its part in `group`.
///
/// # Errors
/// If the ranks' models differ: the hook lets ranks train by themselves.
fn own_hook<S: TrainingState>(state: &S, group: &ProcessGroup) -> Result<Option<HookState>> {
    let Some(hook) = state.hook_state()?.filter(|hook| !hook.is_empty()) else { return Ok(None) };
    if !state.replicas_identical()? {
        return Err(Error::invalid_argument(format!(
            "the ranks' models differ since their last average, and a checkpoint has one (communication hook: {})",
            hook.hook()
        ))
        .with_remedy(format!("call {} before, or save after a step in which the averager averages", S::AVERAGE)));
    }
    if !has_own(&hook) {
        return Ok(None);
    }
    let ((_, here), there) = (state.place(), group.world_size());
    if here != there {
        return Err(Error::invalid_argument(format!(
            "the communication hook keeps tensors for each of {here} ranks, and the checkpoints are those of {there}"
        ))
        .with_remedy("open the checkpoints with the group in which the model trains"));
    }
    Ok(Some(hook))
}

/// What each rank has of its own in `hook`, by rank, on rank 0; nothing on the others. All ranks of `group` call it together.
fn own_of_all(hook: &HookState, group: &ProcessGroup) -> Result<Vec<HookState>> {
    let group = group.in_call(Caller::TrainStateCheckpoint);
    let ranks = if group.rank() == Rank::MAIN { group.world_size().count() } else { 0 };
    let mut all = vec![HookState::default(); ranks];
    for tensor in hook.tensors().iter().filter(|tensor| tensor.is_own) {
        let gathered = group.gather_async(Buffer::from_slice(&tensor.elements), Rank::MAIN)?.wait()?;
        let mut parts = gathered.as_slice::<f32>()?.chunks(tensor.elements.len().max(1));
        for state in &mut all {
            let elements = parts.next().unwrap_or_default().to_vec();
            *state = std::mem::take(state).own(&tensor.field, tensor.parameter, elements);
        }
    }
    Ok(all)
}
