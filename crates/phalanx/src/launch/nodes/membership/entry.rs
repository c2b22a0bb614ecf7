//! What nodes tell each other.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// One launcher's number, which no other has.
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
    /// Is it the one that serves the store in which the log is? It comes first, and nothing goes on without it. There is
    /// none if the log is elsewhere.
    pub(crate) serves_store: bool,
}

/// What all nodes must have been told alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settings {
    pub(crate) min_nodes: u32,
    pub(crate) max_nodes: u32,
    pub(crate) max_restarts: u32,
}

/// A worker's failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Fault {
    pub(crate) rank: u32,
    /// The rank that it blames.
    pub(crate) blames: Option<u32>,
    /// What else is known, for whoever shows it.
    pub(crate) detail: Vec<u8>,
}

/// Why a node is no longer there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Departure {
    /// Nobody has heard of it for so long.
    Silent(Duration),
    /// Its launcher got this signal.
    Signal(i32),
    /// Its launcher cannot go on.
    GaveUp(String),
}

/// An entry of the log. Who appends one takes an equal one, wherever it finds it, for its own: so what is true of a moment
/// carries a random number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Entry {
    /// A node is there.
    Join { node: Node, settings: Settings },
    /// Enough nodes have come to this round, and have waited long enough for others.
    LastCall { round: u64, nonce: u64 },
    /// The store of this round's workers, which the first node serves.
    Store { round: u64, host: String, port: u16 },
    /// A worker has failed.
    Failed { round: u64, node: NodeId, fault: Fault },
    /// No worker is left on this node.
    Ended { round: u64, node: NodeId, succeeded: bool },
    /// A node is gone.
    Left { node: NodeId, why: Departure },
}
