//! A handle to a group that does not keep it.
//!
//! A group ends when its last handle is dropped: only then do the other ranks hear that this one takes part no longer. What a framework keeps for as
//! long as it likes, such as an operation in a graph that never runs backward, must not hold that up; nor may it be the last handle, whose drop waits
//! for the operations of the group, under whatever lock the framework has.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::family::Family;
use super::{Communicator, Inner, ProcessGroup};
use crate::caller::Caller;
use crate::error::{Error, Result};
use crate::world_size::WorldSize;

/// A handle to a group as long as there is another one, with the same time-out and the same user's call.
#[derive(Clone)]
pub struct WeakGroup {
    inner: Weak<Inner>,
    /// A group of one rank, for which nobody waits.
    _alone: Option<Arc<Inner>>,
    /// It keeps none of its groups.
    family: Arc<Family>,
    timeout: Duration,
    caller: Option<Caller>,
}

/// What gives a [`Communicator`] again as long as the program has a clone of it.
pub type WeakHandle = Arc<dyn Fn() -> Option<Arc<dyn Communicator>> + Send + Sync>;

impl ProcessGroup {
    /// A handle that does not keep the group.
    #[doc(hidden)]
    pub fn downgrade(&self) -> WeakGroup {
        let Self { inner, timeout, caller } = self;
        WeakGroup {
            inner: Arc::downgrade(inner),
            _alone: (inner.world == WorldSize::ONE).then(|| inner.clone()),
            family: inner.config.family.clone(),
            timeout: *timeout,
            caller: *caller,
        }
    }
}

impl WeakGroup {
    /// The group.
    ///
    /// # Errors
    /// If the program has dropped all its handles. Then all groups end that it has made from the same first one: what this rank was to give them could
    /// not be had.
    pub fn upgrade(&self) -> Result<ProcessGroup> {
        self.group().ok_or_else(|| self.dropped())
    }

    /// The error if the program has dropped the group, or what leads to it; the groups of this rank have ended with it.
    pub(crate) fn dropped(&self) -> Error {
        let error = Error::invalid_argument(
            "the program has dropped a group that a backward pass, or another part of a step, needs still",
        )
        .with_remedy(
            "keep the group, or what was made with it, such as a layer or a model, until the step is over",
        );
        self.abort_all(error.clone());
        error
    }

    /// As [`ProcessGroup::abort_all`], also if the group is gone. If all groups of this rank are, none can give `cause` to the program: a warning does.
    pub fn abort_all(&self, cause: Error) {
        match self.group() {
            Some(group) => group.abort_all(cause),
            None => {
                let members = self.family.members();
                if members.is_empty() {
                    self.family.warn_once(&cause);
                }
                for member in members {
                    member.aborted.store(true, Ordering::Relaxed);
                    member.health.fail(cause.clone());
                }
            }
        }
    }

    fn group(&self) -> Option<ProcessGroup> {
        let inner = self.inner.upgrade()?;
        Some(ProcessGroup { inner, timeout: self.timeout, caller: self.caller })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rank::Rank;

    #[test]
    fn it_keeps_no_group_and_a_group_that_is_gone_ends_the_others_of_its_rank() {
        const LIMIT: Duration = Duration::from_secs(120);
        let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
        std::thread::scope(|scope| {
            for group in groups {
                scope.spawn(move || {
                    let group = group.with_timeout(LIMIT);
                    let part = group.new_group(&[Rank::MAIN, Rank::new(1)]).unwrap().unwrap();
                    let weak = part.downgrade();
                    assert!(weak.upgrade().unwrap().is_same(&part));
                    if group.rank().is_main() {
                        let error = part.barrier().unwrap_err();
                        assert!(!error.is_timeout(), "{error}");
                    } else {
                        drop(part);
                        assert!(group.failure().is_none());
                        assert!(weak.upgrade().map(drop).unwrap_err().is_invalid_argument());
                    }
                    let error = group.barrier().unwrap_err().to_string();
                    assert!(error.contains("has dropped a group"), "{error}");
                });
            }
        });
    }

    #[test]
    fn a_group_of_one_rank_stays_for_what_has_computed_with_it() {
        let weak = ProcessGroup::alone().unwrap().downgrade();
        assert_eq!(weak.upgrade().unwrap().world_size(), WorldSize::ONE);
    }
}
