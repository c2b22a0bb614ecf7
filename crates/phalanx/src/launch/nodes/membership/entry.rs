//! The entries of the launchers' log.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::log::Absence;
use crate::wire::control::ProcessId;

/// One launcher's unique number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct NodeId(pub(crate) u64);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl NodeId {
    pub(crate) fn heartbeat_key(self) -> String {
        format!("beat/{self}")
    }
}

/// A launcher and its workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Node {
    pub(crate) id: NodeId,
    pub(crate) host: String,
    /// How many workers it starts.
    pub(crate) workers: u32,
    /// The rank among the nodes that it was told to have (--node-rank).
    pub(crate) node_rank: Option<u32>,
    /// Whether it serves the store with the log. If so, it is the first node, and the job ends with it. No node does if the
    /// log is in etcd or a file.
    pub(crate) serves_store: bool,
    /// Its process, as others on its host can find it.
    pub(crate) process: Option<ProcessId>,
}

/// Settings that must be equal on all nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settings {
    pub(crate) min_nodes: u32,
    pub(crate) max_nodes: u32,
    pub(crate) max_restarts: u32,
}

/// A worker's failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WorkerFailure {
    pub(crate) rank: u32,
    /// The rank that it blames.
    pub(crate) blames: Option<u32>,
    /// Further data for the observer.
    pub(crate) detail: Vec<u8>,
}

/// Why a node is no longer there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Departure {
    /// It has sent no heartbeat for so long.
    Silent(Duration),
    /// Its launcher got this signal.
    Signal(i32),
    /// Its launcher cannot go on.
    GaveUp(String),
    /// Its launcher is gone, and another one on the same host has the same rank.
    Replaced,
    /// Its launcher's connection to the store has ended.
    Ended,
}

impl From<Absence> for Departure {
    fn from(absence: Absence) -> Self {
        match absence {
            Absence::Silent(since) => Self::Silent(since),
            Absence::Ended => Self::Ended,
        }
    }
}

/// An entry of the log. A launcher that reads an entry equal to one that it is about to append takes it for its own. So
/// an entry that is true only for a moment carries a random number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Entry {
    /// A node has joined.
    Join { node: Node, settings: Settings },
    /// Enough nodes have joined this round, and the time to wait for others has passed.
    LastCall { round: u64, nonce: u64 },
    /// The store of this round's workers, which the first node serves.
    Store { round: u64, host: String, port: u16 },
    /// A worker has failed.
    Failed { round: u64, node: NodeId, failure: WorkerFailure },
    /// No worker is left on this node.
    Ended { round: u64, node: NodeId, succeeded: bool },
    /// A node is gone.
    Left { node: NodeId, why: Departure },
}
