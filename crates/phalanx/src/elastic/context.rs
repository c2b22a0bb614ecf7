//! What a training loop has of its elastic job.

use std::fmt;

use super::session::Session;
use super::snapshot::Snapshot;
use super::{Drift, State, agreement};
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::rank::Rank;

/// The state, and the commits by which it outlives a change of the workers.
pub struct Context<'a, S: State> {
    /// The state. When the loop is called it is the same on every rank.
    pub state: &'a mut S,
    pub(super) snapshot: &'a mut Snapshot,
    pub(super) group: ProcessGroup,
    pub(super) drift: Drift,
    /// None where workers do not change.
    pub(super) session: Option<&'a Session>,
    pub(super) round: u64,
    /// Has a commit said that a new group is to be made?
    pub(super) interrupted: bool,
}

impl<S: State> fmt::Debug for Context<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let commits = self.snapshot.commits;
        f.debug_struct("Context")
            .field("round", &self.round)
            .field("commits", &commits)
            .finish_non_exhaustive()
    }
}

impl<S: State> Context<'_, S> {
    /// Keeps the state in memory: if a worker dies, the others go on from here. Every rank calls it equally often, at the
    /// same point.
    ///
    /// Costs a copy of the state; a hash of it (XXH3, as much time again), unless drift is [ignored](Drift::Ignore);
    /// and a collective of 32 bytes a rank. Once it has returned on any rank, every rank has the commit: it is lost only if all
    /// die.
    ///
    /// # Errors
    /// As every collective, and those of [`State`]. If replicas have drifted apart, with
    /// [`is_mismatch`](Error::is_mismatch). And if workers wait
    /// to take part, with [`is_regrouping`](Error::is_regrouping): the commit is made, and [`run`](super::run()) calls the
    /// loop again with a larger group as soon as the loop returns, best by `?`.
    pub fn commit(&mut self) -> Result<()> {
        // The last commit is the one to go back to: it is not overwritten where the new one cannot be made.
        if let Some(cause) = self.group.failure() {
            return Err(cause);
        }
        self.state.agree()?;
        self.snapshot.save(&*self.state)?;
        // Counted at once: whoever gets through the collective may die with the news that all have it.
        self.snapshot.count(self.round);
        let awaited = self.session.is_some_and(Session::is_awaited);
        let committed = agreement::commit(&self.group, self.snapshot, awaited, self.drift)?;
        if committed.repaired {
            self.state.load(&self.snapshot.parts)?;
        }
        if committed.awaited {
            self.interrupted = true;
            return Err(Error::regrouping());
        }
        Ok(())
    }

    /// Goes back to the last commit, on this rank alone; if there is none, to the state with which the job began.
    ///
    /// # Errors
    /// Those of [`State::load`]; and that of a commit that failed while it saved the state, which leaves none to go back to.
    pub fn restore(&mut self) -> Result<()> {
        self.snapshot.whole()?;
        self.state.load(&self.snapshot.parts)
    }

    /// Gives every rank the state that rank 0 has now: for what rank 0 alone has read, such as a checkpoint. Only what
    /// differs is sent. No commit is made: a failure still leads back to the last one.
    ///
    /// # Errors
    /// As every collective, and those of [`State`].
    pub fn sync(&mut self) -> Result<()> {
        let mut now = Snapshot::of(&*self.state)?;
        if agreement::take_from(&self.group, &mut now, Rank::MAIN)? {
            self.state.load(&now.parts)?;
        }
        Ok(())
    }

    /// How many commits have led to this state, on whatever workers.
    pub fn commits(&self) -> u64 {
        self.snapshot.commits
    }

    /// The how many-th group of the job this is, from 1.
    pub fn round(&self) -> u64 {
        self.round
    }
}
