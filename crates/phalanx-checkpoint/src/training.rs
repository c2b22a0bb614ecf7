//! How an adapter's `TrainState` becomes a checkpoint: what all ranks have is written once, and what a communication hook such as
//! PowerSGD keeps for each rank is written for each.
//!
//! An adapter implements [`TrainingState`], and its `TrainState` calls the functions here.

use std::any::Any;

use phalanx_core::buffer::{Buffer, copy_of};
use phalanx_core::group::{ProcessGroup, RemoteError};
use phalanx_core::reducer::hooks::HookState;
use phalanx_core::reducer::verify_description;
use phalanx_core::sampler::ElasticSampler;
use phalanx_core::state::{self, ShardWriter, StateReader, StateWriter};
use phalanx_proto::world_size::WorldSize;
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
    state.write(snapshot)?;
    save_hook(state, hook.as_ref(), snapshot, 0)
}

/// Writes all but what `ranks` ranks save of their own in the hook; 0 if none does, as in the commits of an elastic job, which then do not read it.
///
/// # Errors
/// As [`TrainingState::write`].
pub fn save_common<S: TrainingState>(state: &S, writer: &mut impl StateWriter, ranks: usize) -> Result<()> {
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
/// As [`Checkpoints::newest`]. On every rank, if `load` fails on one: the others have loaded it then.
pub fn resume(checkpoints: &Checkpoints, load: impl FnOnce(&Saved) -> Result<()>) -> Result<bool> {
    let Some(saved) = checkpoints.newest()? else { return Ok(false) };
    let loaded = load(&saved);
    let told =
        loaded.as_ref().map(|()| ()).map_err(|error| RemoteError::of(error, checkpoints.group().rank()));
    let heard = checkpoints.patient(Caller::TrainStateResume).first_error_of_all(told);
    loaded.and(heard).map(|()| true)
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
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use phalanx_core::elastic::Parts;
    use phalanx_core::testing::{Fabric, run};

    use super::*;

    /// A rank with a hook that keeps a tensor of its own of this parameter.
    struct Keeping {
        group: ProcessGroup,
        parameter: usize,
        /// How often all that the hook keeps was read.
        reads: AtomicUsize,
        /// Whether it cannot be read.
        is_lost: bool,
        /// Whether gradients are held.
        is_held: bool,
        /// Whether the hook keeps nothing.
        is_empty: bool,
    }

    impl Keeping {
        fn new(group: ProcessGroup, parameter: usize) -> Self {
            Self {
                group,
                parameter,
                reads: AtomicUsize::new(0),
                is_lost: false,
                is_held: false,
                is_empty: false,
            }
        }
    }

    impl TrainingState for Keeping {
        const AVERAGE: &'static str = "average()";

        fn steps(&self) -> u64 {
            0
        }

        fn place(&self) -> (Rank, WorldSize) {
            (self.group.rank(), self.group.world_size())
        }

        fn group(&self) -> Option<ProcessGroup> {
            Some(self.group.clone())
        }

        fn hook_state(&self) -> Result<Option<HookState>> {
            self.reads.fetch_add(1, Ordering::Relaxed);
            if self.is_lost {
                return Err(Error::aborted("the device is lost"));
            }
            if self.is_empty {
                return Ok(Some(HookState::default()));
            }
            let loss = self.group.rank().get() as f32;
            Ok(Some(HookState::default().own("loss", self.parameter, vec![loss; 2])))
        }

        fn common_hook_state(&self) -> Result<Option<HookState>> {
            Ok(Some(HookState::default()))
        }

        fn hook_name(&self) -> String {
            "hook".to_owned()
        }

        fn parameter_names(&self) -> Vec<&str> {
            vec!["a", "b"]
        }

        fn replicas_identical(&self) -> Result<bool> {
            self.group.barrier().map(|()| true)
        }

        fn check_nothing_held(&self) -> Result<()> {
            if self.is_held { Err(Error::invalid_argument("gradients are held")) } else { Ok(()) }
        }

        fn write(&self, _: &mut impl StateWriter) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_checkpoint_reads_what_a_hook_keeps_once_and_a_commit_only_what_ranks_have_in_common() {
        let folder = tempfile::tempdir().unwrap();
        let group = ProcessGroup::alone().unwrap();
        let state = Keeping::new(group.clone(), 1);
        save_common(&state, &mut Parts::default(), 0).unwrap();
        assert_eq!(state.reads.load(Ordering::Relaxed), 0);
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        checkpoint(&state, &checkpoints).unwrap();
        checkpoints.finish().unwrap();
        assert_eq!(state.reads.load(Ordering::Relaxed), 1);
        let saved = checkpoints.newest().unwrap().unwrap();
        let loaded = load_hook(&state, &saved).unwrap().unwrap();
        assert_eq!(loaded.tensors()[0].elements, [0.0; 2]);
        checkpoints.save_sharded(1, |snapshot| save_shard_to(&state, snapshot, &group)).unwrap();
        checkpoints.finish().unwrap();
        assert_eq!(state.reads.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn a_hook_that_cannot_be_read_on_one_rank_is_an_error_on_every_rank() {
        let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
        let errors = std::thread::scope(|scope| {
            let ranks: Vec<_> = groups
                .into_iter()
                .map(|group| {
                    scope.spawn(move || {
                        let state = Keeping { is_lost: group.rank() != Rank::MAIN, ..Keeping::new(group, 0) };
                        checked_hook(&state, &state.group).unwrap_err().to_string()
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(errors.iter().all(|error| error.contains("the device is lost")), "{errors:?}");
    }

    #[test]
    fn gradients_that_one_rank_alone_holds_are_an_error_on_every_rank() {
        let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        std::thread::scope(|scope| {
            for group in groups {
                scope.spawn(move || {
                    let checkpoints = Checkpoints::open(path, &group).unwrap();
                    let is_held = group.rank() != Rank::MAIN;
                    let state = Keeping { is_held, ..Keeping::new(group, 0) };
                    let error = checkpoint(&state, &checkpoints).unwrap_err().to_string();
                    assert!(error.contains("gradients are held"), "{error}");
                });
            }
        });
    }

    #[test]
    fn a_state_that_one_rank_alone_cannot_load_is_an_error_on_every_rank() {
        let folder = tempfile::tempdir().unwrap();
        run(2, Fabric::InProcess, |group| {
            let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
            assert!(!resume(&checkpoints, |_| Err(Error::aborted("there is none"))).unwrap());
            checkpoints.save(3, |snapshot| snapshot.value("step", &3)).unwrap();
            checkpoints.finish().unwrap();
            let outcome = resume(&checkpoints, |saved| match group.rank().is_main() {
                true => saved.value::<i32>("step").map(drop),
                false => Err(Error::mismatch("the model is another")),
            });
            let error = outcome.unwrap_err();
            assert!(error.to_string().contains("the model is another"), "{error}");
            assert_eq!(error.peer(), group.rank().is_main().then_some(Rank::new(1)), "{error}");
            // Nothing has failed but this call.
            assert!(resume(&checkpoints, |_| Ok(())).unwrap());
        });
    }

    #[test]
    fn ranks_whose_samplers_differ_are_told_before_they_begin() {
        let folder = tempfile::tempdir().unwrap();
        run(2, Fabric::InProcess, |group| {
            let impatient = group.with_timeout(Duration::from_millis(100));
            let checkpoints = Checkpoints::open(folder.path(), &impatient).unwrap();
            let sampler = |seed| ElasticSampler::new(100).seed(seed);
            let mut ahead = sampler(1);
            ahead.set_epoch(group.rank().get().into());
            if group.rank().is_main() {
                // It makes its data ready, and the other one waits longer than the group does.
                std::thread::sleep(Duration::from_millis(500));
            }
            check_progress_of_ranks(&ahead, &checkpoints).unwrap();
            let other = sampler(group.rank().get().into());
            let error = check_progress_of_ranks(&other, &checkpoints).unwrap_err();
            let said = error.to_string();
            assert!(error.is_mismatch() && said.contains("seed 0") && said.contains("seed 1"), "{said}");
            assert!(group.failure().is_none());
            // What else a program keeps may be each rank's own.
            check_progress_of_ranks(&group.rank().get(), &checkpoints).unwrap();
        });
    }

    #[test]
    fn a_hook_that_no_rank_can_read_ends_no_group() {
        let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
        let ranks = groups.into_iter().map(|group| {
            std::thread::spawn(move || {
                let mut state = Keeping { is_lost: true, ..Keeping::new(group, 0) };
                let error = checked_hook(&state, &state.group).unwrap_err().to_string();
                assert!(error.contains("the device is lost"), "{error}");
                assert!(state.group.failure().is_none());
                // The program has caught the error, and goes on.
                state.is_lost = false;
                assert!(checked_hook(&state, &state.group).unwrap().is_some());
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    }

    #[test]
    fn ranks_whose_hooks_keep_other_tensors_are_refused_and_others_are_gathered_by_rank() {
        for parameters in [[1, 1], [0, 1]] {
            let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
            let ranks: Vec<_> = groups
                .into_iter()
                .zip(parameters)
                .map(|(group, parameter)| {
                    std::thread::spawn(move || {
                        let state = Keeping::new(group, parameter);
                        checked_hook(&state, &state.group)?
                            .map(|hook| own_of_all(&hook, &state.group))
                            .transpose()
                    })
                })
                .collect();
            let outcomes: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
            if parameters == [1, 1] {
                let all = outcomes[0].as_ref().unwrap().as_ref().unwrap();
                let losses: Vec<_> = all.iter().map(|state| state.tensors()[0].elements[0]).collect();
                assert_eq!(losses, [0.0, 1.0]);
                assert!(outcomes[1].as_ref().unwrap().as_ref().unwrap().is_empty());
            } else {
                for outcome in outcomes {
                    let error = outcome.unwrap_err();
                    assert!(
                        error.is_mismatch() && error.to_string().contains("on rank 1 than on rank 0"),
                        "{error}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_share_of_a_state_is_saved_among_the_ranks_that_train_it_alone() {
        let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        std::thread::scope(|scope| {
            for group in groups {
                scope.spawn(move || {
                    let checkpoints = Checkpoints::open(path, &group).unwrap();
                    // Each rank has a model of its own.
                    let state = Keeping::new(ProcessGroup::alone().unwrap(), 0);
                    let save = |snapshot: &mut Snapshot| save_shard_to(&state, snapshot, &group);
                    let error = checkpoints.save_sharded(1, save).unwrap_err();
                    let said = error.to_string();
                    assert!(
                        error.is_invalid_argument() && said.contains("its group has world size 1"),
                        "{said}"
                    );
                    assert!(checkpoints.newest().unwrap().is_none());
                });
            }
        });
    }

    #[test]
    fn what_each_rank_keeps_is_saved_by_no_rank_alone_and_no_other_waits_for_it() {
        run(2, Fabric::InProcess, |group| {
            let state = Keeping::new(group.clone(), 0);
            if group.rank().is_main() {
                let error = checked_hook(&state, &ProcessGroup::alone().unwrap()).unwrap_err();
                assert!(error.to_string().contains("for each of 2 ranks"), "{error}");
            }
            group.barrier().unwrap();
        });
    }

    #[test]
    fn a_share_of_a_state_is_saved_among_any_ranks_that_train_it_together() {
        type Color = fn(u32) -> u32;
        // Of four ranks: those that train together, and those that save together.
        let cases: [(Color, Color, bool); 4] = [
            (|rank| rank, |_| 0, false),
            // As many, but of two models.
            (|rank| rank / 2, |rank| rank % 2, false),
            // As on disks of two hosts, and of each rank.
            (|_| 0, |rank| rank / 2, true),
            (|_| 0, |rank| rank, true),
        ];
        for (trains, saves, is_saved) in cases {
            let folder = tempfile::tempdir().unwrap();
            run(4, Fabric::InProcess, |all| {
                let own = all.rank().get();
                let part = |color: Color| all.split(Some(color(own)), 0).unwrap().unwrap();
                let state = Keeping { is_empty: true, ..Keeping::new(part(trains), 0) };
                let (group, path) = (part(saves), folder.path().join(saves(own).to_string()));
                let checkpoints = Checkpoints::open(path, &group).unwrap();
                let saved = checkpoints.save_sharded(1, |snapshot| save_shard_to(&state, snapshot, &group));
                assert!(saved.is_ok() == is_saved, "{saved:?}");
                assert!(
                    saved.err().is_none_or(|error| error
                        .to_string()
                        .contains("do not all train this model together"))
                );
                checkpoints.finish().unwrap();
                assert_eq!(checkpoints.newest().unwrap().is_some(), is_saved);
            });
        }
    }

    #[test]
    fn a_hook_that_keeps_nothing_on_one_rank_alone_is_an_error_on_every_rank() {
        let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
        let ranks = groups.into_iter().map(|group| {
            std::thread::spawn(move || {
                let state = Keeping { is_empty: group.rank() == Rank::MAIN, ..Keeping::new(group, 0) };
                let error = checked_hook(&state, &state.group).unwrap_err();
                assert!(
                    error.is_mismatch() && error.to_string().contains("on rank 1 than on rank 0"),
                    "{error}"
                );
                assert!(state.group.failure().is_none());
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    }
}
