//! Which nodes take part in a job, and in which round of it: pure.
//!
//! The launchers share a [log](crate::log), and each applies its [entries](Entry) to its own [`MembershipState`]. The
//! first entry is reserved: it is the `Join` of the launcher that serves the store, if one does, and all others must
//! have the same settings.
//!
//! ```text
//!              Join            enough, or LastCall             all have Ended, or Left
//!   Gathering ------> Gathering ------------------> Running ---------------------------> Over
//!       ^                                              |
//!       |         a failure, with restarts left; nodes that come or go                    
//!       +----------------------------------------------+
//! ```
//!
//! Now and then a state takes the place of the entries before it. So a launcher may begin with a state, and may skip entries while it
//! stands still; what it does depends on the state alone. An entry may be in the log twice, and has no effect the second time.
//!
//! A round begins only when no worker of the previous one is left on any node that takes part: each node has appended
//! [`Ended`](Entry::Ended), or was declared dead. A launcher that was declared dead but is alive learns that when it
//! reads on, and ends its workers; its entries have no effect.

mod entry;
mod state;

pub use entry::{Departure, Entry, Node, NodeId, Settings, WorkerFailure};
pub use state::{Cause, JobEnd, Member, MembershipState, Running, STATE_VERSION};

#[cfg(test)]
mod simulated;
#[cfg(test)]
mod tests;
