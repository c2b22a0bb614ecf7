//! What this node's launcher agrees on with those of the others: who takes part in an attempt, and how it ended.

mod alone;

use std::os::fd::BorrowedFd;

use super::attempts::Control;
use super::exit::{Failure, Outcome, Signal};
use super::placement::Placement;
use crate::error::Result;

pub(super) use alone::Alone;

/// The nodes of a job.
pub(super) trait Nodes {
    /// Waits until the nodes of the next attempt are there.
    fn gather(&mut self, control: &mut Control<'_>) -> Result<Placement>;

    /// Readable when there is news from other nodes.
    fn notice(&self) -> Option<BorrowedFd<'_>>;

    /// Must the workers end, because of another node?
    fn ask_for_end(&mut self) -> bool;

    /// Why the workers of this node are being ended, as soon as it is known.
    fn tell(&mut self, cause: &AttemptEnd);

    /// No worker of this node is left: what now?
    fn settle(&mut self, end: AttemptEnd, control: &mut Control<'_>) -> Result<Settled>;
}

/// What becomes of a job after an attempt.
#[derive(Debug)]
pub(super) enum Settled {
    Again,
    Over(Outcome),
}

/// How an attempt ended on this node.
#[derive(Clone, Debug)]
pub(super) enum AttemptEnd {
    Succeeded,
    /// The first failure here.
    Failed(Failure),
    Interrupted(Signal),
    Stopped,
    /// Because of another node.
    Elsewhere,
}
