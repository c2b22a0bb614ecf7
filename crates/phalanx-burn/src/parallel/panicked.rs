//! A step that a panic cuts off.
//!
//! Ranks that share a model exchange tensors in an order that all of them know. A program that caught a panic and went on with the next batch would be behind
//! the others by what it has not exchanged, and each rank would take tensors of one place for those of another, which often have the same shape.

use phalanx::{Error, ProcessGroup, WorldSize};

/// Ends the groups of this rank if a panic drops it.
pub(crate) struct EndIfPanicked {
    group: ProcessGroup,
    what: &'static str,
}

impl EndIfPanicked {
    /// Of `what` exchanges tensors in `group`, for people.
    pub fn of(group: &ProcessGroup, what: &'static str) -> Self {
        Self { group: group.clone(), what }
    }
}

impl Drop for EndIfPanicked {
    fn drop(&mut self) {
        if std::thread::panicking() && self.group.world_size() != WorldSize::ONE {
            let error = Error::aborted(format!("{} has panicked, and its step was cut off", self.what));
            self.group.abort_all(error.with_remedy("go on from the last checkpoint, in new groups"));
        }
    }
}
