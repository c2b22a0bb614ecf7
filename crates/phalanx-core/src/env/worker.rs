//! What a launcher sets for a worker.

use super::{NUMBERED_STARTS, store_name};
use crate::rank::{Generation, Rank};
use crate::world_size::WorldSize;

/// Whether workers get Horovod's variables beside torchrun's. It is not always so: a program that unsets RANK and
/// WORLD_SIZE to be a world of one would still find those.
pub(super) const HOROVODRUN: &str = "PHALANX_HOROVODRUN";

/// The position that a launcher gives to one worker; the reverse of [`LaunchEnv`](super::LaunchEnv).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerEnv {
    /// The worker's rank in the world.
    pub rank: Rank,
    /// Its index among the workers of its host.
    pub local_rank: u32,
    /// The number of workers in all.
    pub world_size: WorldSize,
    /// The number of workers on its host.
    pub local_world_size: u32,
    /// Its host's index among the hosts.
    pub group_rank: u32,
    /// The number of hosts.
    pub group_world_size: u32,
    /// Its host's index among the hosts that have a worker with this local rank, and the number of these hosts.
    pub cross: (u32, u32),
    /// The role's name; torchrun's is `default`.
    pub role_name: String,
    /// The worker's rank among those of its role.
    pub role_rank: u32,
    /// The number of workers of its role.
    pub role_world_size: u32,
    /// The store's address.
    pub master_addr: String,
    /// The store's port.
    pub master_port: u16,
    /// How often the workers have been restarted.
    pub restart_count: Generation,
    /// How often they may be restarted.
    pub max_restarts: u32,
    /// The job's name.
    pub run_id: String,
    /// Whether the launcher serves the store.
    pub agent_store: bool,
}

impl WorkerEnv {
    /// The variables to set for this worker; Horovod's too, if the job was started by `phalanx horovodrun`. If a host has several workers, threads are limited to one for each, except
    /// if this process's environment already sets the limit. Python does not buffer its output, unless this process's environment
    /// says what it does.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        self.variables_given(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()))
    }

    pub(super) fn variables_given(&self, is_set: impl Fn(&str) -> bool) -> Vec<(&'static str, String)> {
        let agent_store = if self.agent_store { "True" } else { "False" };
        let mut variables = vec![
            ("RANK", self.rank.to_string()),
            ("LOCAL_RANK", self.local_rank.to_string()),
            ("WORLD_SIZE", self.world_size.to_string()),
            ("LOCAL_WORLD_SIZE", self.local_world_size.to_string()),
            ("GROUP_RANK", self.group_rank.to_string()),
            ("GROUP_WORLD_SIZE", self.group_world_size.to_string()),
            ("ROLE_RANK", self.role_rank.to_string()),
            ("ROLE_NAME", self.role_name.clone()),
            ("ROLE_WORLD_SIZE", self.role_world_size.to_string()),
            ("MASTER_ADDR", self.master_addr.clone()),
            ("MASTER_PORT", self.master_port.to_string()),
            ("TORCHELASTIC_RESTART_COUNT", self.restart_count.0.to_string()),
            ("TORCHELASTIC_MAX_RESTARTS", self.max_restarts.to_string()),
            ("TORCHELASTIC_RUN_ID", self.run_id.clone()),
            ("TORCHELASTIC_USE_AGENT_STORE", agent_store.to_owned()),
        ];
        if self.agent_store {
            variables.push((NUMBERED_STARTS, store_name(&self.master_addr, self.master_port)));
        }
        if is_set(HOROVODRUN) {
            variables.extend([
                ("HOROVOD_RANK", self.rank.to_string()),
                ("HOROVOD_SIZE", self.world_size.to_string()),
                ("HOROVOD_LOCAL_RANK", self.local_rank.to_string()),
                ("HOROVOD_LOCAL_SIZE", self.local_world_size.to_string()),
                ("HOROVOD_CROSS_RANK", self.cross.0.to_string()),
                ("HOROVOD_CROSS_SIZE", self.cross.1.to_string()),
            ]);
        }
        if self.local_world_size > 1 {
            let threads = ["OMP_NUM_THREADS", "RAYON_NUM_THREADS"].into_iter();
            variables.extend(threads.filter(|name| !is_set(name)).map(|name| (name, "1".to_owned())));
        }
        // Through a pipe Python would keep its lines back, and lose them if it is killed.
        variables
            .extend(Some("PYTHONUNBUFFERED").filter(|name| !is_set(name)).map(|name| (name, "1".to_owned())));
        variables
    }
}
