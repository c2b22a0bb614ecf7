//! The last commit, in memory.

use super::commits::Summary;
use super::parts::{Parts, digest};
use super::{Drift, State};
use crate::error::{Error, Result};

/// A state as it was at a commit.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    pub(super) parts: Parts,
    /// How many commits have led to it, on whatever ranks; 0 for the state with which a worker begins.
    pub(super) commits: u64,
    /// The round in which the last of them was made, or 0.
    pub(super) round: u64,
    /// Why the parts are not one commit: a save has failed halfway.
    broken: Option<Error>,
    summaries: Option<Vec<Summary>>,
}

impl Snapshot {
    pub(super) fn of(state: &impl State) -> Result<Self> {
        let mut snapshot = Self::default();
        snapshot.save(state)?;
        Ok(snapshot)
    }

    /// Saves the current state under the number of the same commit.
    pub(super) fn save(&mut self, state: &impl State) -> Result<()> {
        self.summaries = None;
        // Also if it panics and the training loop catches the panic.
        let cause = Error::aborted("a save of the state did not come to its end");
        self.broken = Some(cause.with_remedy("does `State::save` panic? Standard error says where"));
        self.parts.begin();
        let saved = state.save(&mut self.parts);
        self.broken = saved.as_ref().err().cloned();
        saved?;
        self.parts.finish();
        Ok(())
    }

    /// After a save that failed halfway no rank may use this snapshot: the save overwrites the only one there is.
    pub(super) fn whole(&self) -> Result<()> {
        self.broken.clone().map_or(Ok(()), Err)
    }

    /// The saved state is a new commit, made in `round`.
    pub(super) fn count(&mut self, round: u64) {
        self.commits += 1;
        self.round = round;
    }

    /// The names, lengths and hashes of its parts.
    pub(super) fn summaries(&mut self) -> &[Summary] {
        self.summaries.get_or_insert_with(|| self.parts.summaries())
    }

    /// A digest of all parts; constant if drift is ignored.
    pub(super) fn digest(&mut self, drift: Drift) -> u64 {
        if drift == Drift::Ignore { 0 } else { digest(self.summaries()) }
    }

    /// What it has been told by another rank has changed it.
    pub(super) fn changed(&mut self) {
        self.summaries = None;
    }
}

#[cfg(test)]
mod tests {
    use super::super::Parts;
    use super::*;

    /// Its second part fails, or is this number.
    struct Fails(Option<u8>);

    impl State for Fails {
        fn save(&self, parts: &mut Parts) -> Result<()> {
            parts.put("first", &[self.0.unwrap_or(9)])?;
            parts.put("second", &[self.0.ok_or_else(|| Error::aborted("no second part"))?])
        }

        fn load(&mut self, _: &Parts) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_save_that_failed_halfway_is_no_commit() {
        let mut snapshot = Snapshot::of(&Fails(Some(1))).unwrap();
        snapshot.whole().unwrap();
        snapshot.save(&Fails(None)).unwrap_err();
        assert!(snapshot.whole().unwrap_err().to_string().contains("no second part"));
        snapshot.save(&Fails(Some(2))).unwrap();
        snapshot.whole().unwrap();
    }

    #[test]
    fn a_save_that_panicked_is_no_commit() {
        struct Panics;
        impl State for Panics {
            fn save(&self, _: &mut Parts) -> Result<()> {
                std::panic::resume_unwind(Box::new(()))
            }

            fn load(&mut self, _: &Parts) -> Result<()> {
                Ok(())
            }
        }
        let mut snapshot = Snapshot::default();
        let save = std::panic::AssertUnwindSafe(|| snapshot.save(&Panics));
        std::panic::catch_unwind(save).unwrap_err();
        assert!(snapshot.whole().unwrap_err().is_aborted());
    }
}
