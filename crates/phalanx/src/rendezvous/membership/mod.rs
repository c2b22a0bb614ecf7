//! Which nodes take part in a job, and in which round of it: pure.
//!
//! The nodes share a log, one list of [entries](Entry) in one order that is the same for all. Each applies every entry
//! to its own [`MembershipState`], and so all agree: two nodes that have read equally far are in the same state, and there is
//! nobody who leads. What a node wants, it appends; what makes no sense any more when its turn comes has no effect. Only
//! the first entry is reserved: it is the `Join` of whoever serves the store, if a launcher does, and all others must have
//! the first one's settings.
//!
//! ```text
//!              Join            enough, or LastCall             all have Ended, or Left
//!   Gathering ------> Gathering ------------------> Running ---------------------------> Over
//!       ^                                              |
//!       |         a failure, with restarts left; nodes that come or go                    
//!       +----------------------------------------------+
//! ```
//!
//! A round begins only when no worker of the one before is left on any node that takes part: each has said
//! [`Ended`](Entry::Ended), or was given up. One that was given up and lives finds itself gone when it reads on, and
//! ends its workers; what it appends has no effect.
//!
//! [`liveness`] finds nodes that have fallen silent, [`log`] keeps the list in a store, [`mac`] tells who may write to it.

pub(crate) mod entry;
pub(crate) mod liveness;
pub(crate) mod log;
pub(crate) mod mac;
#[cfg(any(test, fuzzing))]
mod outside;
pub(crate) mod state;

pub(crate) use entry::{Departure, Entry, Fault, Node, NodeId, Settings};
pub(crate) use log::Log;
pub(crate) use mac::{Mac, Verified};
#[cfg(any(test, fuzzing))]
pub use outside::fuzz;
pub(crate) use state::{Cause, MembershipState, Verdict};

#[cfg(test)]
mod simulated;
#[cfg(test)]
mod tests;
