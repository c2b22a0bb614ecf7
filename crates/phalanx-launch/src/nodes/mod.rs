//! What the launchers of all nodes agree on: which nodes take part in an attempt, and how it ended.
//!
//! The launchers agree through a log, and none of them leads. The log may be in a store that one of them serves, with
//! which the job ends, or in etcd or a file, with which any launcher may be lost.

mod agent_node;
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
mod fuzz;
mod multi_node;
mod rendezvous_handler;
mod rendezvous_store;
mod single_node;
mod who_serves;

use std::os::fd::BorrowedFd;

use super::agent::Instruction;
use super::attempts::Control;
use super::exit::{Failure, Outcome, Signal};
use super::membership;
use super::placement::Placement;
use crate::error::{Error, Result};

pub(super) use agent_node::AgentNode;
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub use fuzz::fuzz as fuzz_nodes;
pub(super) use multi_node::MultiNode;
pub(super) use single_node::SingleNode;

/// The nodes of a job.
pub(super) trait Nodes {
    /// Waits until the nodes of the next attempt are there.
    fn gather(&mut self, control: &mut Control<'_>) -> Result<Gathered>;

    /// Readable when there are messages of other nodes.
    fn notice(&self) -> Option<BorrowedFd<'_>>;

    /// Whether the workers must end, because of another node.
    fn ask_for_end(&mut self) -> bool;

    /// Whether workers of other nodes have ended well.
    fn are_ending(&self) -> bool {
        false
    }

    /// Reports an event on this node as soon as it is known: that a worker has failed, and then why all are ended.
    fn tell(&mut self, cause: &AttemptEnd);

    /// A worker of an elastic job has failed, and the others go on.
    fn worker_lost(&mut self, slot: u32, process: u32);

    /// What to do with a slot whose worker has failed, if the driver decides that.
    fn next_instruction(&mut self) -> Option<Instruction> {
        None
    }

    /// What a person should know next, though the job goes on.
    fn next_warning(&mut self) -> Option<String> {
        None
    }

    /// The workers of this node cannot be started or watched.
    fn give_up(&mut self, error: &Error);

    /// No worker of this node is left: decides what follows.
    fn after_attempt(&mut self, end: AttemptEnd, control: &mut Control<'_>) -> Result<AfterAttempt>;

    /// The job is over on this node: the others still learn what they must know. `is_interrupted`: a signal has ended the job.
    fn finish(&mut self, _control: &mut Control<'_>, _is_interrupted: bool) {}
}

/// The outcome of gathering the nodes.
#[derive(Debug)]
pub(super) enum Gathered {
    Placed(Placement),
    Over(Outcome),
}

/// What follows an attempt.
#[derive(Debug)]
pub(super) enum AfterAttempt {
    Restart,
    Over(Outcome),
}

/// How an attempt ended on this node.
#[derive(Clone, Debug)]
pub(super) enum AttemptEnd {
    Succeeded,
    /// The first failure on this node, and the rank that it blames.
    Failed(Failure, Option<u32>),
    Interrupted(Signal),
    Stopped,
    /// Another node is the reason.
    Elsewhere,
}

impl AttemptEnd {
    /// How the job ends, if no attempt follows.
    fn outcome(self) -> Outcome {
        match self {
            Self::Succeeded => Outcome::Succeeded,
            Self::Failed(failure, _) => Outcome::Failed(failure),
            Self::Interrupted(signal) => Outcome::Interrupted(signal),
            Self::Stopped | Self::Elsewhere => Outcome::Stopped,
        }
    }
}
