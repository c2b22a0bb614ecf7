//! The ranks of this node's workers in one attempt.

use crate::env::WorkerEnv;
use crate::rank::{Generation, Rank};
use crate::world_size::WorldSize;

/// The variables of one attempt's workers; the rest of their environment is the same in every attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Placement {
    /// The generation: how often the workers have been started again.
    pub restarts: u32,
    /// The rank of this node's first worker; the others have the next ranks.
    pub first_rank: u32,
    pub world_size: WorldSize,
    /// This node's rank among the nodes (`GROUP_RANK`), and their number.
    pub node: u32,
    pub nodes: u32,
    /// The store of this attempt.
    pub master_addr: String,
    pub master_port: u16,
    pub run_id: String,
}

impl Placement {
    /// The rank of the `local`-th worker of this node.
    pub(super) fn rank(&self, local: u32) -> Rank {
        Rank::new(self.first_rank + local)
    }

    /// The local rank of the worker with `rank`, if it is on this node.
    pub(super) fn local(&self, rank: u32) -> Option<usize> {
        rank.checked_sub(self.first_rank).map(|local| local as usize)
    }

    pub(super) fn worker(&self, local: u32, workers: WorldSize, role: &str, max_restarts: u32) -> WorkerEnv {
        WorkerEnv {
            rank: self.rank(local),
            local_rank: local,
            world_size: self.world_size,
            local_world_size: workers.get(),
            group_rank: self.node,
            group_world_size: self.nodes,
            role_name: role.to_owned(),
            master_addr: self.master_addr.clone(),
            master_port: self.master_port,
            restart_count: Generation(self.restarts.into()),
            max_restarts,
            run_id: self.run_id.clone(),
            agent_store: true,
        }
    }
}
