//! The entries of the launchers' log.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::log::liveness::Absence;
use crate::wire::control::ProcessId;

/// One launcher's unique number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeId(pub u64);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl NodeId {
    /// The key of its heartbeats in the store.
    pub fn heartbeat_key(self) -> String {
        format!("beat/{self}")
    }
}

/// A launcher and its workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Its number.
    pub id: NodeId,
    /// The name of its host.
    pub host: String,
    /// How many workers it starts.
    pub workers: u32,
    /// The rank among the nodes that it was told to have (--node-rank).
    pub node_rank: Option<u32>,
    /// Whether it serves the store with the log. If so, it is the first node, and the job ends with it. No node does if the
    /// log is in etcd or a file.
    pub serves_store: bool,
    /// Its process, as others on its host can find it.
    pub process: Option<ProcessId>,
    /// The role of its workers (--role).
    pub role: String,
}

/// Settings that must be equal on all nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// The smallest number of nodes of a round.
    pub min_nodes: u32,
    /// The largest number of nodes of a round.
    pub max_nodes: u32,
    /// How many failures the job may have after which all workers are started again.
    pub max_restarts: u32,
}

impl Settings {
    /// Whether `min_nodes` is at least 1, and at most `max_nodes`.
    pub(super) fn are_sound(self) -> bool {
        self.min_nodes > 0 && self.min_nodes <= self.max_nodes
    }
}

/// A worker's failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerFailure {
    /// The rank that failed.
    pub rank: u32,
    /// The rank that it blames.
    pub blames: Option<u32>,
    /// Further data for the observer.
    pub detail: Vec<u8>,
}

/// Why a node is no longer there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Departure {
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
pub enum Entry {
    /// A node has joined.
    Join {
        /// The node itself, which appends this.
        node: Node,
        /// Its settings. They must be those of the first node.
        settings: Settings,
    },
    /// Enough nodes have joined this round, and the time to wait for others has passed.
    LastCall {
        /// The round that begins.
        round: u64,
        /// A random number, so that no other entry is equal.
        nonce: u64,
    },
    /// The store of this round's workers, which the first node serves.
    Store {
        /// The round whose workers use it.
        round: u64,
        /// The host on which it listens.
        host: String,
        /// The port on which it listens.
        port: u16,
    },
    /// A worker has failed.
    Failed {
        /// The round in which it ran.
        round: u64,
        /// The node on which it ran, which appends this.
        node: NodeId,
        /// What is known of it.
        failure: WorkerFailure,
    },
    /// No worker is left on this node.
    Ended {
        /// The round that has ended there.
        round: u64,
        /// The node itself, which appends this.
        node: NodeId,
        /// Whether all of its workers have ended well.
        succeeded: bool,
    },
    /// A node is gone.
    Left {
        /// The node that is gone.
        node: NodeId,
        /// Why it is no longer there.
        why: Departure,
    },
}
