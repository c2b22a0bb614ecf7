//! How a worker, and a job, ended.

use std::fmt;
use std::time::Duration;

pub use phalanx_proto::launch::exit::{Exit, Signal};
use serde::{Deserialize, Serialize};

use crate::rank::Rank;
use crate::world_size::WorldSize;

/// The worker that failed first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Failure {
    /// Its rank.
    pub rank: Rank,
    /// The name of its host.
    pub host: String,
    /// Its host's rank among the nodes.
    pub node: u32,
    /// Its process.
    pub pid: u32,
    /// How it ended.
    pub exit: Exit,
    /// How long it had lived.
    pub after: Duration,
    /// What it wrote to its error file (`TORCHELASTIC_ERROR_FILE`), if anything.
    pub message: Option<String>,
    /// The last lines of its standard error, if that was [captured](super::Output::Lines).
    pub stderr: Vec<Vec<u8>>,
}

impl Failure {
    /// The failure of a worker of which only the rank is known.
    pub(super) fn unknown(rank: u32) -> Self {
        Self {
            rank: Rank::new(rank),
            host: "another host".to_owned(),
            node: 0,
            pid: 0,
            exit: Exit::Lost,
            after: Duration::ZERO,
            message: None,
            stderr: Vec::new(),
        }
    }
}

/// A node that was lost, or whose launcher could not go on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NodeFailure {
    /// Its rank among the nodes, if it had one.
    pub node: Option<u32>,
    /// The name of its host.
    pub host: String,
    /// What happened to it.
    pub why: String,
}

impl fmt::Display for NodeFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.node {
            Some(node) => write!(f, "node {node} ({}): {}", self.host, self.why),
            None => write!(f, "the node {}: {}", self.host, self.why),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (pid {}) failed: {}", self.rank, self.pid, self.exit)?;
        self.message.as_ref().map_or(Ok(()), |message| write!(f, ": {message}"))
    }
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Outcome {
    /// Every worker ended with exit code 0.
    Succeeded,
    /// A worker failed, here or on another node, and the others were ended.
    Failed(Failure),
    /// A node was lost, and the workers were ended.
    NodeFailed(NodeFailure),
    /// This process got a signal, and the workers were ended.
    Interrupted(Signal),
    /// The [observer](super::Observer) asked for the end.
    Stopped,
}

/// The report of a job, when no process of it is left.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// How the job ended.
    pub outcome: Outcome,
    /// How each worker of this node ended in the last attempt, in the order of their ranks.
    pub exits: Vec<Exit>,
    /// The number of workers on all nodes, if they were started.
    pub world_size: Option<WorldSize>,
    /// The number of nodes that took part.
    pub nodes: u32,
    /// How often a failure has started the workers again.
    pub restarts: u32,
    /// How often a worker of an elastic job was replaced.
    pub replacements: u32,
    /// How long the job took.
    pub elapsed: Duration,
}
