//! Horovod's names for jobs that outlive their workers: [`phalanx::elastic`], with collectives by name.
//!
//! ```no_run
//! use phalanx::elastic::Plain;
//! use phalanx_horovod::elastic::{self, ObjectState, State};
//! use phalanx_horovod::{Horovod, Op};
//!
//! type Training = Plain<(u64, Vec<f32>)>; // the step, and the weights
//!
//! fn train(state: &mut State<'_, '_, Training>, hvd: &Horovod) -> phalanx::Result<()> {
//!     while state.0.0 < 1000 {
//!         let gradients = vec![0.1f32; state.0.1.len()]; // backward
//!         let gradients = hvd.allreduce("gradients", gradients, Op::Average)?;
//!         let (step, weights) = &mut state.0;
//!         weights.iter_mut().zip(gradients.as_slice::<f32>()?).for_each(|(weight, gradient)| *weight -= gradient);
//!         *step += 1;
//!         if step.is_multiple_of(10) {
//!             state.commit()?;
//!         }
//!     }
//!     Ok(())
//! }
//!
//! let mut state = ObjectState::new(Plain((0, vec![0.0; 1 << 20])));
//! state.register_reset_callbacks([Box::new(|_: &mut Training, hvd: &Horovod| {
//!     println!("{} workers", hvd.size()); // such as another learning rate
//!     Ok(())
//! }) as _]);
//! elastic::run(&mut state, train)?;
//! # Ok::<(), phalanx::Error>(())
//! ```
//!
//! Start it with `phalanx horovodrun -np 4 --min-np 2 ./train`. Started in any other way, the workers do not change.
//!
//! | Horovod | here |
//! |---|---|
//! | `hvd.init()`, `@hvd.elastic.run def train(state)`, `train(state)` | [`run`], which gives the function a handle for each group of workers |
//! | `hvd.elastic.ObjectState(..)` | [`ObjectState`] of any [`phalanx::elastic::State`], such as [`Plain`](phalanx::elastic::Plain) |
//! | `state.commit()` (and `check_host_updates`), `restore()`, `sync()` | [`State::commit`], [`restore`](State::restore), [`sync`](State::sync) |
//! | `state.register_reset_callbacks([..])` | [`ObjectState::register_reset_callbacks`] |
//! | `HorovodInternalError`, `HostsUpdatedInterrupt` | errors, which the function returns with `?` |

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use phalanx::elastic::{self, Context};
use phalanx::{Deadline, Error, ProcessGroup, Result};

use crate::horovod::warn_of_variables;
use crate::{Horovod, Options};

/// How long a rank that has left a process set may take to leave the job: it first looks by itself whether another one has failed.
const LEAVING_TIMEOUT: Duration = Duration::from_secs(10);
/// Between two looks whether it has.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// What a program does when the workers have changed.
pub type ResetCallback<S> = Box<dyn FnMut(&mut S, &Horovod) -> Result<()>>;

/// A state, and what is done with it when the workers have changed.
#[doc(alias("TorchState", "hvd.elastic.ObjectState"))]
pub struct ObjectState<S> {
    value: S,
    callbacks: Vec<ResetCallback<S>>,
}

impl<S: elastic::State> ObjectState<S> {
    /// Of `value`, without callbacks.
    pub fn new(value: S) -> Self {
        Self { value, callbacks: Vec::new() }
    }

    /// Calls these, in this order, on every worker that continues in a new group, before the training function. The state is then the
    /// same on all ranks; workers that are new do not call them, so they must not call collectives. An error is the worker's own.
    pub fn register_reset_callbacks(&mut self, callbacks: impl IntoIterator<Item = ResetCallback<S>>) {
        self.callbacks.extend(callbacks);
    }

    /// The value.
    pub fn into_inner(self) -> S {
        self.value
    }
}

impl<S> Deref for ObjectState<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.value
    }
}

impl<S> DerefMut for ObjectState<S> {
    fn deref_mut(&mut self) -> &mut S {
        &mut self.value
    }
}

impl<S> fmt::Debug for ObjectState<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectState").field("callbacks", &self.callbacks.len()).finish_non_exhaustive()
    }
}

/// The state while it is trained: it is what [`ObjectState`] was made of, with commits.
#[derive(Debug)]
pub struct State<'c, 'a, S: elastic::State> {
    context: &'c mut Context<'a, S>,
    /// A commit has reported that a new group is to be formed.
    regroups: bool,
}

impl<S: elastic::State> State<'_, '_, S> {
    /// Keeps a copy of the state in memory, to which all go back if a worker dies. Every rank must call it equally often, at the
    /// same point.
    ///
    /// # Errors
    /// As [`Context::commit`]; also if workers have come: return the error, and all begin again with them and with this state.
    #[doc(alias("check_host_updates", "save"))]
    pub fn commit(&mut self) -> Result<()> {
        let committed = self.context.commit();
        self.regroups |= committed.as_ref().is_err_and(Error::is_regrouping);
        committed
    }

    /// Goes back to the last commit, on this rank alone.
    ///
    /// # Errors
    /// As [`Context::restore`].
    pub fn restore(&mut self) -> Result<()> {
        self.context.restore()
    }

    /// Gives every rank the state that rank 0 has now. It makes no commit.
    ///
    /// # Errors
    /// As [`Context::sync`].
    pub fn sync(&mut self) -> Result<()> {
        self.context.sync()
    }
}

impl<S: elastic::State> Deref for State<'_, '_, S> {
    type Target = S;

    fn deref(&self) -> &S {
        self.context.state
    }
}

impl<S: elastic::State> DerefMut for State<'_, '_, S> {
    fn deref_mut(&mut self) -> &mut S {
        self.context.state
    }
}

/// [`run_with`], with the options of the environment.
///
/// # Errors
/// As [`run_with`], and if a variable has no valid value.
#[doc(alias = "hvd.elastic.run")]
pub fn run<S: elastic::State, T, E: From<Error>>(
    state: &mut ObjectState<S>,
    train: impl FnMut(&mut State<'_, '_, S>, &Horovod) -> Result<T, E>,
) -> Result<T, E> {
    run_as(&elastic::Options::from_env()?, (&Options::from_env()?, true), state, train)
}

/// Calls `train` with a handle, and again with another whenever the workers change or a handle has failed because of another worker, which
/// may be alive: its connections broke, or it did not take part in time. It does so until `train` succeeds on all ranks. Before each call
/// all ranks have the state of the last commit. Make what is bound to a handle, such as a `DistributedOptimizer`, in `train`.
///
/// # Errors
/// As [`phalanx::elastic::run_with`].
pub fn run_with<S: elastic::State, T, E: From<Error>>(
    elastic: &elastic::Options,
    options: &Options,
    state: &mut ObjectState<S>,
    train: impl FnMut(&mut State<'_, '_, S>, &Horovod) -> Result<T, E>,
) -> Result<T, E> {
    run_as(elastic, (options, false), state, train)
}

fn run_as<S: elastic::State, T, E: From<Error>>(
    elastic: &elastic::Options,
    (options, are_from_env): (&Options, bool),
    state: &mut ObjectState<S>,
    mut train: impl FnMut(&mut State<'_, '_, S>, &Horovod) -> Result<T, E>,
) -> Result<T, E> {
    let ObjectState { value, callbacks } = state;
    let mut is_first = true;
    elastic::run_with(elastic, value, |context, group| {
        // The first group may have failed before this.
        let begins = is_first && context.commits() == 0;
        if begins && are_from_env {
            warn_of_variables(group.rank());
        }
        let hvd = Horovod::begin(group, options.clone(), begins)?;
        if !std::mem::take(&mut is_first) {
            callbacks.iter_mut().try_for_each(|callback| callback(context.state, &hvd))?;
        }
        let mut state = State { context, regroups: false };
        // No rank leaves before the last one has what it waits for.
        let outcome = train(&mut state, &hvd).and_then(|value| Ok(hvd.barrier().map(|()| value)?));
        if outcome.is_err() && !state.regroups {
            let failure = hvd.failure().filter(|cause| cause.is_a_peers(hvd.rank()));
            match (failure, hvd.failure_of_set()) {
                // The handle's groups have failed, and this one may not have: other ranks may be in any of its calls, such as a commit.
                (Some(cause), _) => drop(group.fail_unless_explained(cause)),
                (None, Some(cause)) => end_with_set(group, &cause),
                // A rank that leaves with an error of its own has ended the handles, and the group does not know: it asks nothing of it. This
                // one may be that rank: the others wait until it is gone, and must not meet it.
                (None, None) if !hvd.is_initialized() && !hvd.engine().shared().is_left() => {
                    group.barrier()?
                }
                (None, None) => {}
            }
        }
        outcome
    })
}

/// Ends `group`, if a process set has lost a rank because of `cause`. If a rank has left the set, waits until it is gone from the group,
/// too, or is not within a while: one that ends with an error of its own leaves its process sets first.
fn end_with_set(group: &ProcessGroup, cause: &Error) {
    if cause.is_peer_failure() || cause.is_timeout() {
        // Its ranks have numbers of their own.
        let text = format!("a process set of this rank has failed: {}", cause.clone().without_remedy());
        return drop(group.fail_unless_explained(Error::new(cause.kind(), text)));
    }
    let deadline = Deadline::after(LEAVING_TIMEOUT);
    while group.failure().is_none() && !deadline.has_passed() {
        std::thread::sleep(LOOK_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use phalanx::elastic::Plain;

    use super::*;
    use crate::Op;

    #[test]
    fn a_timeline_keeps_the_rounds_before_a_failure() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("timeline.json");
        let options = Options { timeline: Some(path.clone()), ..Options::default() };
        let group = ProcessGroup::alone().unwrap();
        for (name, begins_timeline) in
            [("an earlier job", true), ("the first round", true), ("the second round", false)]
        {
            let hvd = Horovod::begin(&group, options.clone(), begins_timeline).unwrap();
            hvd.allreduce(name, [1.0f32], Op::Sum).unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let has = |name: &str| text.contains(&format!("carry out {name}"));
        assert!(has("the first round") && has("the second round") && !has("an earlier job"), "{text}");
    }

    #[test]
    fn alone_the_function_is_called_once_and_commits_can_be_restored() {
        let mut state = ObjectState::new(Plain(1u32));
        state.register_reset_callbacks([Box::new(|_: &mut Plain<u32>, _: &Horovod| {
            Err(Error::aborted("the workers have not changed"))
        }) as _]);
        let size = run_with(&elastic::Options::default(), &Options::default(), &mut state, |state, hvd| {
            state.0 = 2;
            state.commit()?;
            state.0 = 3;
            state.restore()?;
            assert_eq!(state.0, 2);
            state.0 = 4;
            state.sync()?;
            Ok::<_, Error>(hvd.size())
        });
        assert_eq!((size.unwrap(), state.0, state.into_inner()), (1, 4, Plain(4)));
    }
}
