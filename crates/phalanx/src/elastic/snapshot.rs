//! The last commit, in memory.

use super::parts::{Parts, Summary, digest};
use super::{Drift, State};
use crate::error::Result;

/// A state as it was at a commit.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    pub(super) parts: Parts,
    /// How many commits have led to it, on whatever ranks; 0 for the state with which a worker begins.
    pub(super) commits: u64,
    summaries: Option<Vec<Summary>>,
}

impl Snapshot {
    pub(super) fn of(state: &impl State) -> Result<Self> {
        let mut snapshot = Self::default();
        snapshot.save(state)?;
        Ok(snapshot)
    }

    /// Takes the state as it is now, as the same commit.
    pub(super) fn save(&mut self, state: &impl State) -> Result<()> {
        self.summaries = None;
        self.parts.begin();
        state.save(&mut self.parts)?;
        self.parts.finish();
        Ok(())
    }

    /// The names, lengths and hashes of its parts.
    pub(super) fn summaries(&mut self) -> &[Summary] {
        self.summaries.get_or_insert_with(|| self.parts.summaries())
    }

    /// One number for all of it; always the same if drift is not looked for.
    pub(super) fn digest(&mut self, drift: Drift) -> u64 {
        if drift == Drift::Ignore { 0 } else { digest(self.summaries()) }
    }

    /// What it has been told by another rank has changed it.
    pub(super) fn changed(&mut self) {
        self.summaries = None;
    }
}
