//! Which workers take part in which round of an elastic job: pure.
//!
//! The workers share a [log](crate::log), and each applies its [entries](Entry) to its own [`MembersState`]. The
//! launchers' log (`launch::nodes::membership`) has other rounds. A launcher's round ends for all, and all start again.
//! Here the members of a round move to the next one, each when it has left its group, and keep their memory.
//!
//! ```text
//!                      all members are Ready or Gone, and
//!              Join    the world is full, or LastCall       a member is Ready or Gone
//!   Gathering -----> Gathering -------------------> Running --------------------------> Gathering
//!                                                      |
//!                                                      | Done
//!                                                      v
//!                                                     Over
//! ```
//!
//! The invariants: a round has the same members for every worker; no worker is a member before it has left the previous
//! round; a worker that was declared dead is in no later round under the same number; and as long as enough workers do
//! their part, there is a next round. [`Clock`] decides what happens when time passes.
//!
//! Survivors report at once which worker died, so no worker waits for heartbeats to time out after a connection has
//! closed.

mod clock;
mod entry;
mod state;

pub use clock::{Clock, Step};
pub use entry::{Departure, Entry, Settings, Worker, WorkerId};
pub use state::{ElasticEnd, MembersState};

#[cfg(test)]
mod tests;
