//! `env://`: what the launcher's variables say.

use super::arrival::Identity;
use super::{Place, Rendezvous, tcp};
use crate::deadline::Deadline;
use crate::env::LaunchEnv;
use crate::error::{Error, Result};
use crate::store::host_port;

pub(super) fn join(env: &LaunchEnv, me: &Identity, deadline: Deadline) -> Result<Rendezvous> {
    if env.master_port == 0 {
        return Err(Error::environment("MASTER_PORT=0: the other ranks cannot know which port that becomes")
            .with_remedy("set MASTER_PORT to the same free port for every rank"));
    }
    let place = Place {
        rank: env.rank,
        world_size: env.world_size,
        local: env.local_rank.zip(env.local_world_size),
        epoch: env.restart_count,
        // A launcher that serves the store keeps it over restarts, and may keep it over jobs.
        scope: format!("phalanx/{}/{}", env.run_id.as_deref().unwrap_or("none"), env.restart_count.0),
    };
    let address = host_port(&env.master_addr, env.master_port);
    tcp::join(&address, !env.agent_store, &place, me, deadline)
}
