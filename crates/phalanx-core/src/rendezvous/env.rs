//! `env://`: the launcher's variables.

use phalanx_proto::rendezvous::Identity;

use super::{RankConfig, Rendezvous, Url, file, mpirun, pmi, tcp};
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::env::{LaunchEnv, RendezvousEndpoint, has_numbered_starts};
use crate::error::{Error, Result};
use crate::store::host_port;

pub(super) fn join(
    env: &LaunchEnv,
    credentials: Credentials,
    me: &Identity,
    deadline: Deadline,
) -> Result<Rendezvous> {
    let run_id = env.run_id.as_deref().unwrap_or("none");
    let is_torchruns = env.agent_store && !has_numbered_starts(&env.rendezvous);
    let config = RankConfig {
        rank: env.rank,
        world_size: env.world_size,
        local: env.local_rank.zip(env.local_world_size),
        generation: env.restart_count,
        // A launcher's store may hold keys of earlier generations, and of earlier jobs.
        scope: match is_torchruns {
            true => format!("phalanx/{run_id}"),
            false => format!("phalanx/{run_id}/{}", env.restart_count.0),
        },
        credentials,
    };
    let host = match env.agent_store {
        true if is_torchruns => tcp::Host::Agent,
        true => tcp::Host::Launcher,
        false => tcp::Host::Rank0 { bind: env.bind },
    };
    match &env.rendezvous {
        RendezvousEndpoint::Master { port: 0, .. } | RendezvousEndpoint::HostOfMpirun { port: 0, .. } => {
            Err(Error::environment("MASTER_PORT=0: the other ranks cannot know which port that becomes")
                .with_remedy("set MASTER_PORT to the same free port for every rank"))
        }
        RendezvousEndpoint::Master { address, port } => {
            tcp::join(&host_port(address, *port), host, &config, me, deadline)
        }
        RendezvousEndpoint::Url(url) => match Url::parse(url)? {
            Url::Tcp(address) => tcp::join(&address, host, &config, me, deadline),
            Url::File(path) => file::join(&path, &config, me, deadline),
            Url::Env => Err(Error::environment("PHALANX_RENDEZVOUS=env:// names no end point")
                .with_remedy("use tcp://host:port or file:///path")),
        },
        RendezvousEndpoint::Pmi { descriptor, host: name, port } => {
            let address = pmi::address(*descriptor, name.as_deref(), *port, env.bind, &config, deadline)?;
            tcp::join(&address, host, &config, me, deadline)
        }
        RendezvousEndpoint::HostOfMpirun { address, port } => {
            mpirun::check(address, &config, deadline)?;
            tcp::join(&host_port(address, *port), host, &config, me, deadline)
        }
        RendezvousEndpoint::NotNeeded => Ok(config.alone()),
    }
}
