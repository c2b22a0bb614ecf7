//! The loop around a training loop.

use std::time::Duration;

use super::members::Verdict;
use super::options::Launched;
use super::session::{Met, Round, Session};
use super::snapshot::Snapshot;
use super::{Context, Options, State, agreement};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::group::{GroupOptions, ProcessGroup};
use crate::rank::Rank;
use crate::rendezvous;

/// How long a group may take to hear of a failure that its sub-group has seen.
const HEARSAY: Duration = Duration::from_millis(200);

/// [`run_with`], with [`Options::from_env`].
pub fn run<S: State, T, E: From<Error>>(
    state: &mut S,
    work: impl FnMut(&mut Context<'_, S>, &ProcessGroup) -> Result<T, E>,
) -> Result<T, E> {
    run_with(&Options::from_env()?, state, work)
}

/// Calls `work` with a group, and again with another whenever the workers change, until it succeeds on all ranks.
///
/// Before each call all ranks get the same state: that of the rank with most commits, and of several that whose last one
/// was made in the latest round; only what differs is sent. Ranks that made that commit together must have the same, or
/// [`Drift`](super::Drift) says what is done; before the first commit the lowest rank's is taken. When `work` ends with
/// an error and a peer has failed (died, left, was not heard of, did not take part in time, gave up, or could not do
/// what a call like [`Checkpoints::open`](crate::checkpoint::Checkpoints::open) lets one rank do for all), this rank goes back
/// to its last [commit](Context::commit) and meets the others anew; the error itself is dropped. An error without that is
/// this rank's own: it is returned, and to the others this rank is one that died.
///
/// Without an elastic launcher (`PHALANX_ELASTIC`) the world is that of [`phalanx::init`](crate::init()), `work` is called
/// once, and every error is returned.
///
/// # Errors
/// Those of `work` that are its own; if the ranks' calls, options or replicas differ
/// ([`is_mismatch`](Error::is_mismatch)); if fewer workers than the least have come within the
/// [join time-out](Options::join_timeout); if the group would be formed anew more often than the reset limit says; if the
/// launcher is gone, or the job was over before this worker came ([`is_aborted`](Error::is_aborted)).
pub fn run_with<S: State, T, E: From<Error>>(
    options: &Options,
    state: &mut S,
    mut work: impl FnMut(&mut Context<'_, S>, &ProcessGroup) -> Result<T, E>,
) -> Result<T, E> {
    let mut snapshot = Snapshot::of(state)?;
    let Some(launched) = Launched::from_process()? else {
        return once(options, state, &mut snapshot, work);
    };
    let session = Session::start(&launched, options)?;
    // What a group that failed at the very end would have returned.
    let mut finished = None;
    let mut left = 0;
    // Does the state differ from the snapshot?
    let mut dirty = false;
    loop {
        let Round { number, rendezvous, members } = match session.meet(left)? {
            Met::Round(round) => round,
            Met::Over(verdict) => {
                session.over();
                return Ok(over(verdict, finished, launched.settings.reset_limit)?);
            }
        };
        (left, finished) = (number, None);
        let rank = rendezvous.rank;
        tracing::debug!(
            round = number,
            rank = rank.get(),
            world = rendezvous.world_size.get(),
            "a new group"
        );
        let group = match connect(rendezvous, options) {
            Ok(group) => group,
            Err(cause) if is_a_peers(&cause, rank) => {
                session.leave(&members, Some(&cause))?;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        session.enter(number, &group);
        let mut context = Context {
            state: &mut *state,
            snapshot: &mut snapshot,
            group: group.clone(),
            drift: options.drift,
            session: Some(&session),
            round: number,
            interrupted: false,
        };
        let outcome = round_of(&mut context, &group, &mut dirty, &mut work);
        let interrupted = context.interrupted;
        drop(context);
        // Before a peer's failure can hide it: the others would take these parts for a commit.
        snapshot.whole()?;
        let cause = match outcome {
            _ if interrupted && group.failure().is_none() => None,
            Ok(value) => match group.barrier() {
                Ok(()) => {
                    session.done(number);
                    return Ok(value);
                }
                Err(cause) if is_a_peers(&cause, rank) => {
                    finished = Some(value);
                    Some(cause)
                }
                Err(error) => return Err(error.into()),
            },
            Err(error) => match failure_of(&group) {
                Some(cause) if is_a_peers(&cause, rank) => Some(cause),
                Some(_) => return Err(error),
                // The group is sound; has a call handed out what another rank has met with?
                None => Some(group.was_told().ok_or(error)?),
            },
        };
        // After a commit that has interrupted it, too, the loop may have gone on.
        dirty = true;
        match &cause {
            Some(cause) => {
                tracing::warn!(round = number, %cause, "the group has failed; this worker meets the others anew")
            }
            None => tracing::info!(round = number, "workers have come; all meet anew"),
        }
        session.leave(&members, cause.as_ref())?;
        // Before the others hear that this worker is ready for the next.
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
    let drift = options.drift;
    let mut context =
        Context { state, snapshot, group: group.clone(), drift, session: None, round: 1, interrupted: false };
    round_of(&mut context, &group, &mut false, &mut work)
}

/// What there is to do with one group.
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

fn connect(rendezvous: rendezvous::Rendezvous, options: &Options) -> Result<ProcessGroup> {
    let timeout = options.group.timeout;
    let connecting = GroupOptions { timeout: timeout.min(options.connect_timeout), ..options.group.clone() };
    Ok(ProcessGroup::join(rendezvous, connecting)?.with_timeout(timeout))
}

/// Makes the state the same on every rank.
fn begin<S: State>(context: &mut Context<'_, S>, dirty: &mut bool) -> Result<()> {
    let changed = agreement::sync(&context.group, context.snapshot, context.drift)?;
    if changed || *dirty {
        context.state.load(&context.snapshot.parts)?;
    }
    *dirty = false;
    Ok(())
}

/// Why the group has failed, if it has.
fn failure_of(group: &ProcessGroup) -> Option<Error> {
    let deadline = Deadline::after(HEARSAY);
    while group.failure().is_none() && !deadline.has_passed() {
        std::thread::sleep(Duration::from_millis(1));
    }
    group.failure()
}

/// Is another rank to blame, so that the others can go on without it? Where calls or states differ, going on would only
/// repeat it.
fn is_a_peers(cause: &Error, me: Rank) -> bool {
    let lost = cause.is_peer_failure() || cause.is_peer_left() || cause.is_timeout();
    let own = cause.rank().is_none_or(|rank| rank == me);
    lost || !(own || cause.is_mismatch() || cause.is_invalid_argument())
}

/// What the end of the job is to this worker: what it would have returned counts only if the others have succeeded too.
fn over<T>(verdict: Verdict, finished: Option<T>, reset_limit: Option<u32>) -> Result<T> {
    match verdict {
        Verdict::Done => {
            finished.ok_or_else(|| Error::aborted("the job was over before this worker could take part"))
        }
        Verdict::TooManyRounds => {
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

    /// Notes what is asked of it.
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
        assert_eq!(over(Verdict::Done, Some(1), None).unwrap(), 1);
        assert!(over(Verdict::Done, None::<u8>, None).unwrap_err().to_string().contains("was over"));
        let error = over(Verdict::TooManyRounds, Some(1), Some(3)).unwrap_err();
        assert!(error.to_string().contains("the reset limit, 3"), "{error}");
    }
}
