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
    /// The rank of this node's first worker among those of its role, and their number.
    pub first_role_rank: u32,
    pub role_world_size: u32,
    /// This node's rank among the nodes (`GROUP_RANK`), and their number.
    pub node: u32,
    pub nodes: u32,
    /// How many workers each node has; empty if that may change.
    pub workers: Vec<u32>,
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

    /// This node's index among the nodes that have a worker with this local rank, and the number of these nodes.
    fn cross(&self, local: u32) -> (u32, u32) {
        let has_one = |workers: &[u32]| workers.iter().filter(|workers| **workers > local).count() as u32;
        match self.workers.get(..self.node as usize) {
            Some(before) if !self.workers.is_empty() => (has_one(before), has_one(&self.workers)),
            _ => (self.node, self.nodes),
        }
    }

    pub(super) fn worker(&self, local: u32, workers: WorldSize, role: &str, max_restarts: u32) -> WorkerEnv {
        WorkerEnv {
            rank: self.rank(local),
            local_rank: local,
            world_size: self.world_size,
            local_world_size: workers.get(),
            group_rank: self.node,
            group_world_size: self.nodes,
            cross: self.cross(local),
            role_name: role.to_owned(),
            role_rank: self.first_role_rank + local,
            role_world_size: self.role_world_size,
            master_addr: self.master_addr.clone(),
            master_port: self.master_port,
            restart_count: Generation(self.restarts.into()),
            max_restarts,
            run_id: self.run_id.clone(),
            agent_store: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_with_few_workers_are_not_counted_across() {
        let placement = |node: u32, workers: &[u32]| Placement {
            restarts: 0,
            first_rank: 0,
            world_size: WorldSize::ONE,
            first_role_rank: 0,
            role_world_size: 1,
            node,
            nodes: 3,
            workers: workers.into(),
            master_addr: String::new(),
            master_port: 0,
            run_id: String::new(),
        };
        let third = placement(2, &[4, 1, 2]);
        assert_eq!([0, 1].map(|local| third.cross(local)), [(2, 3), (1, 2)]);
        assert_eq!(placement(0, &[4, 1, 2]).cross(3), (0, 1));
        assert_eq!(placement(1, &[]).cross(0), (1, 3), "elastic");
    }
}
