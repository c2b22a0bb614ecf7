//! Which workers take part in which round of an elastic job: pure.
//!
//! The workers share a [log](crate::log), whose [entries](Entry) each applies to its own [`MembersState`]. The launchers' log
//! (`launch::nodes::membership`) differs in what a round is. A launcher's round ends for all, and all start again; here the
//! members of a round go over into the next one, each when it has left its group, and keep what they have in memory.
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
//! What has to hold: a round has the same members for every worker; no worker is a member before it has left the round before;
//! who was given up is in no later round under the same number; and as long as enough workers do their part, there is a
//! next round. [`Clock`] says what the time that passes asks for.

mod clock;
mod entry;
#[cfg(any(test, fuzzing))]
mod outside;
mod state;

pub(super) use clock::{Clock, Step};
pub(super) use entry::{Departure, Entry, Settings, Worker, WorkerId};
#[cfg(any(test, fuzzing))]
pub use outside::fuzz;
pub(super) use state::{MembersState, Verdict};

#[cfg(test)]
mod tests;
