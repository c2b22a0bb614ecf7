//! The loop around a training loop.
//!
//! The group, not the error, tells whether another rank has failed, because a training loop may wrap its errors in
//! types of its own. If one of its sub-groups has lost a rank, that counts as a failure of the group. The group keeps
//! its first cause, and records when a call has returned the failure of another rank (`remote_error`). If ranks make
//! different calls, nothing is retried.

use super::context::Ended;
use super::members::ElasticEnd;
use super::options::ElasticEnv;
use super::rounds::{Next, Rounds, failure_of};
use super::snapshot::Snapshot;
use super::{Context, Options, State, state_sync};
use crate::caller::Caller;
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::notice::warn;
use crate::rendezvous;

/// [`run_with`], with [`Options::from_env`].
///
/// # Errors
/// As [`run_with`], and as [`Options::from_env`].
#[doc(alias = "hvd.elastic.run")]
pub fn run<S: State, T, E: From<Error>>(
    state: &mut S,
    work: impl FnMut(&mut Context<'_, S>, &ProcessGroup) -> Result<T, E>,
) -> Result<T, E> {
    run_with(&Options::from_env()?, state, work)
}

/// Calls `work` with a group, and again with another whenever the workers change, until it succeeds on all ranks.
///
/// Before each call all ranks get the same state: that of the rank with the most commits, and among equals that of the
/// latest round. Only what differs is sent. Ranks that made that commit together must have the same state, or
/// [`Drift`](super::Drift) decides what happens. Before the first commit the lowest rank's state is taken. When `work`
/// returns an error and a peer has failed (it died, left, sent no heartbeats, did not take part in time, gave up, or
/// could not do what a call like `Checkpoints::open` lets one rank do for all; also if only a sub-group of this round's group has lost it),
/// this rank goes back to its last [commit](Context::commit) and joins a new group; the error is dropped. Any other
/// error is this rank's own: `run` returns it, and the other ranks treat this rank as dead.
///
/// Without an elastic launcher (`PHALANX_ELASTIC`) the world is that of [`phalanx::init`](crate::init()), `work` is called
/// once, and every error is returned.
///
/// # Errors
/// Those of `work` that are its own; if the ranks' calls, options or replicas differ
/// ([`is_mismatch`](Error::is_mismatch)); if too few workers have come within the [join
/// time-out](Options::join_timeout); if the reset limit allows no new group; if the launcher is gone, or the job was
/// over before this worker came ([`is_aborted`](Error::is_aborted)).
pub fn run_with<S: State, T, E: From<Error>>(
    options: &Options,
    state: &mut S,
    mut work: impl FnMut(&mut Context<'_, S>, &ProcessGroup) -> Result<T, E>,
) -> Result<T, E> {
    let mut snapshot = Snapshot::of(state)?;
    let Some(env) = ElasticEnv::from_process()? else {
        return once(options, state, &mut snapshot, work);
    };
    let mut rounds = Rounds::start(&env, options)?;
    // The result of a call whose group failed at its last barrier.
    let mut finished = None;
    // Whether the state differs from the snapshot.
    let mut dirty = false;
    loop {
        if rounds.current().is_none()
            && let Next::Over(job_end) = rounds.next(None)?
        {
            let limit = rounds.reset_limit();
            rounds.over();
            return Ok(over(job_end, finished, limit)?);
        }
        let Some((round, group)) = rounds.current() else { continue };
        finished = None;
        let mut context =
            Context::new(state, &mut snapshot, (round, &group), options.drift, Some(&mut rounds));
        let outcome = round_of(&mut context, &group, &mut dirty, &mut work);
        // A step may have formed a new group.
        let (ended, number, group) = (context.ended, context.round, context.group.clone());
        drop(context);
        // Checked before a peer's failure can hide it: the others would take these parts for a commit.
        snapshot.whole()?;
        let rank = group.rank();
        let cause = match outcome {
            // If the loop has ignored that a new group is to be formed, its result does not count.
            _ if ended.is_some() => match group.failure() {
                Some(cause) if !cause.is_a_peers(rank) => return Err(cause.into()),
                cause => cause,
            },
            Ok(value) => match group.in_call(Caller::ElasticRun).barrier() {
                Ok(()) => {
                    rounds.done();
                    return Ok(value);
                }
                Err(cause) if cause.is_a_peers(rank) => {
                    finished = Some(value);
                    Some(cause)
                }
                Err(error) => return Err(error.into()),
            },
            Err(error) => match (failure_of(&group), group.remote_error()) {
                (Some(cause), _) if cause.is_a_peers(rank) => Some(cause),
                // The group works; a call has returned the failure of another rank.
                (None, Some(told)) => Some(told),
                (failure, _) => {
                    if failure.is_none() && number != round {
                        warn(
                            "the loop has failed, but its group has not; does it use a group that it kept, and \
                             not Context::group()?",
                        );
                    }
                    return Err(error);
                }
            },
        };
        // The loop may have gone on after a commit that has interrupted it, too.
        dirty = true;
        match (&cause, ended) {
            (Some(cause), _) => {
                tracing::warn!(round = number, %cause, "the group has failed; this worker waits for a new one")
            }
            // The new group is connected already.
            (None, Some(Ended::GoneBack)) => continue,
            (None, _) => tracing::info!(round = number, "workers have come; all workers form a new group"),
        }
        rounds.leave(cause.as_ref())?;
        // Before the others learn that this worker is ready for the next round.
        drop(group);
    }
}

/// A world that does not change.
fn once<S: State, T, E: From<Error>>(
    options: &Options,
    state: &mut S,
    snapshot: &mut Snapshot,
    mut work: impl FnMut(&mut Context<'_, S>, &ProcessGroup) -> Result<T, E>,
) -> Result<T, E> {
    let group = ProcessGroup::join(rendezvous::from_env(options.group.timeout)?, options.group.clone())?;
    let mut context = Context::new(state, snapshot, (1, &group), options.drift, None);
    round_of(&mut context, &group, &mut false, &mut work)
}

/// The work with one group, and with those that its steps form.
fn round_of<S: State, T, E: From<Error>>(
    context: &mut Context<'_, S>,
    group: &ProcessGroup,
    dirty: &mut bool,
    work: &mut impl FnMut(&mut Context<'_, S>, &ProcessGroup) -> Result<T, E>,
) -> Result<T, E> {
    begin(context, dirty)?;
    let entered = context.state.enter(group).map_err(E::from);
    let outcome = entered.and_then(|()| work(context, group));
    context.state.leave();
    outcome
}

/// Makes the state the same on every rank.
fn begin<S: State>(context: &mut Context<'_, S>, dirty: &mut bool) -> Result<()> {
    let group = context.group.in_call(Caller::ElasticRun);
    let changed = state_sync::sync(&group, context.snapshot, context.drift)?;
    if changed || *dirty {
        context.state.load(&context.snapshot.parts)?;
    }
    *dirty = false;
    Ok(())
}

/// The end of the job for this worker: its result counts only if the others have succeeded too.
fn over<T>(job_end: ElasticEnd, finished: Option<T>, reset_limit: Option<u32>) -> Result<T> {
    match job_end {
        ElasticEnd::Done => finished.ok_or_else(|| {
            Error::aborted("the job was over before this worker could take part")
                .with_remedy("the other workers have done its work: nothing is lost")
        }),
        ElasticEnd::TooManyRounds => {
            let limit = reset_limit.unwrap_or(0);
            Err(Error::aborted(format!(
                "the workers have changed more often than the reset limit, {limit}, allows"
            ))
            .with_remedy("see why workers die, or raise --reset-limit"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts what is called.
    #[derive(Default)]
    struct Noted(std::cell::RefCell<Vec<&'static str>>);

    impl State for Noted {
        fn save(&self, _: &mut super::super::Parts) -> Result<()> {
            self.0.borrow_mut().push("save");
            Ok(())
        }

        fn load(&mut self, _: &super::super::Parts) -> Result<()> {
            Ok(())
        }

        fn enter(&mut self, group: &ProcessGroup) -> Result<()> {
            self.0.get_mut().push("enter");
            group.barrier()
        }

        fn leave(&mut self) {
            self.0.get_mut().push("leave");
        }

        fn agree(&mut self) -> Result<()> {
            self.0.get_mut().push("agree");
            Ok(())
        }
    }

    #[test]
    fn a_state_is_in_the_group_while_the_loop_runs() {
        let mut state = Noted::default();
        let outcome: Result<()> = run_with(&Options::default(), &mut state, |context, _| {
            context.commit()?;
            Err(Error::aborted("it failed"))
        });
        assert!(outcome.unwrap_err().is_aborted());
        assert_eq!(*state.0.get_mut(), ["save", "enter", "agree", "save", "leave"]);
    }

    #[test]
    fn a_value_counts_only_if_the_job_is_done() {
        assert_eq!(over(ElasticEnd::Done, Some(1), None).unwrap(), 1);
        assert!(over(ElasticEnd::Done, None::<u8>, None).unwrap_err().to_string().contains("was over"));
        let error = over(ElasticEnd::TooManyRounds, Some(1), Some(3)).unwrap_err();
        assert!(error.to_string().contains("the reset limit, 3"), "{error}");
    }
}
