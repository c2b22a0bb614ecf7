//! `tcp://host:port`: rank 0 serves the store there, on that host's address alone.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use phalanx_proto::rendezvous::Identity;

use super::arrival::{Arrival, arrive, refuse_another};
use super::presence::{MOST_MARKED, Presence};
use super::{Held, KeepAlive, RankConfig, Rendezvous, start};
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, Result};
use crate::notice::reports;
use crate::store::{
    Access, KeylessClients, MAX_RANKS, Patience, SharedStore, TcpStore, TcpStoreServer, warn_of_own_name,
};
use crate::transport;

/// The process that serves the store.
#[derive(Clone, Copy, Debug)]
pub(super) enum Host {
    /// Rank 0, at the address at which the others reach it, or at another one of its host.
    Rank0 { bind: Option<IpAddr> },
    /// The launcher, for this start alone or for one of a number that all ranks know.
    Launcher,
    /// The launcher, for several starts, which the ranks have to tell apart: torchrun's agent.
    Agent,
}

/// The pause of a rank that finds rank 0's last store before it looks for the next one grows from the first to the second. All ranks look.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));

/// How long rank 0 looks whether what has its port is a store of its own.
const OWN_STORE_TIMEOUT: Duration = Duration::from_secs(2);

/// Meets at `address`.
pub(super) fn join(
    address: &str,
    host: Host,
    config: &RankConfig,
    me: &Identity,
    deadline: Deadline,
) -> Result<Rendezvous> {
    if config.world_size.get() == 1 {
        return Ok(config.alone());
    }
    check_size(host, config)?;
    let mut is_over = false;
    let mut backoff = Backoff::new(PAUSES, deadline);
    loop {
        match join_once(address, host, config, me, deadline) {
            Ok(Some(met)) => return Ok(met),
            Err(error) if is_over && error.is_timeout() => {
                return Err(error.with_remedy(
                    "rank 0 has left the group that it met there, and has not come to meet another: let every rank join, and leave, \
                     equally often",
                ));
            }
            Err(error) => return Err(error),
            Ok(None) => is_over = true,
        }
        // Until rank 0 has ended that store, and its next one is there. Both take it milliseconds, or it does something else before.
        backoff.pause();
    }
}

/// Refuses a world of more ranks than a store of ours has connections for: otherwise the last ones would be turned away until their deadline.
fn check_size(host: Host, config: &RankConfig) -> Result<()> {
    match host {
        Host::Rank0 { .. } | Host::Launcher if config.world_size.get() > MAX_RANKS => {
            Err(Error::environment(format!(
                "a world of {} ranks is too large for a store over TCP, which serves {MAX_RANKS}",
                config.world_size
            ))
            .in_operation("rendezvous", None)
            .with_remedy(
                "start fewer ranks, or meet at file:///path (PHALANX_RENDEZVOUS) on a file system that all ranks share",
            ))
        }
        Host::Rank0 { .. } | Host::Launcher => Ok(()),
        // It is torchrun's own.
        Host::Agent => Ok(()),
    }
}

/// Meets at `address`; None if the store there is rank 0's last one, which ends.
fn join_once(
    address: &str,
    host: Host,
    config: &RankConfig,
    me: &Identity,
    deadline: Deadline,
) -> Result<Option<Rendezvous>> {
    let server = match serve(address, host, config, deadline) {
        Err(error) if error.is_address_in_use() => {
            let own = refused_by_own(address, config, me, deadline.at_most(OWN_STORE_TIMEOUT));
            return Err(own.unwrap_or(error));
        }
        outcome => outcome?,
    };
    let connect = |address: &str, connections| {
        let reports = reports(config.rank, config.world_size);
        let patience = Patience { connections, reports, ..Patience::WHOLE };
        TcpStore::connect_patiently(address, &config.credentials, deadline, &patience)
    };
    let client = match &server {
        Some(server) => connect(&server.reachable_addr().to_string(), 1),
        // Another thread shares memory while this one connects the ranks: over a network each connection takes round trips.
        None => connect(address, if is_loopback(address) { 1 } else { 2 }),
    };
    let client = Arc::new(client?);
    let (interface, found) = (client.local_ip(), client.found_ip());
    let store: SharedStore = Arc::<TcpStore>::clone(&client);
    // From here on, the server stays up also after an error, until the others have read it.
    let held = match server {
        Some(server) => Held::Host { client, server: Some(server), rounds: None },
        None => Held::Client { presence: presence(&client, host, config)?, client },
    };
    let mut keep_alive = KeepAlive(held);
    let agreed = match host {
        Host::Agent => Some(start::agree(&store, config, deadline)?),
        Host::Rank0 { .. } | Host::Launcher => None,
    };
    let config = agreed.as_ref().unwrap_or(config);
    let mut arrived = match arrive(&store, Some(found), config, me, deadline)? {
        Arrival::Met(arrived) => arrived,
        Arrival::Over => return Ok(None),
    };
    if let Held::Host { rounds, .. } = &mut keep_alive.0 {
        *rounds = arrived.rounds.take();
    }
    config.met(arrived, interface, keep_alive, deadline).map(Some)
}

/// What tells the others that this rank has ended, if nothing else does: a launcher looks after its workers, and ranks of one host see each
/// other's processes.
fn presence(client: &Arc<TcpStore>, host: Host, config: &RankConfig) -> Result<Option<Presence>> {
    let is_local = client.found_ip().is_loopback();
    match host {
        Host::Rank0 { .. } if !is_local && config.world_size.get() <= MOST_MARKED => {
            Ok(Some(Presence::begin(client, record_key(config)?)))
        }
        Host::Rank0 { .. } | Host::Launcher | Host::Agent => Ok(None),
    }
}

/// Where a rank says in a store of rank 0, which has one start, which process it is.
pub(super) fn record_key(config: &RankConfig) -> Result<String> {
    let (name, _) = transport::process_record(config.rank)?;
    Ok(format!("{}/0/group/{name}", config.scope))
}

/// The store's server, if it is this rank that serves it.
fn serve(
    address: &str,
    host: Host,
    config: &RankConfig,
    deadline: Deadline,
) -> Result<Option<TcpStoreServer>> {
    // Another program of this user, such as a monitor, may use the store without the key.
    let access = Access::to(config.credentials.clone(), KeylessClients::OfThisUser);
    match host {
        Host::Rank0 { bind: None } if config.rank.is_main() => {
            let server = TcpStoreServer::bind_to(address, access, deadline)?;
            // All ranks of one host reach it, if the launcher says that they are on one.
            if config.local.is_none_or(|(_, size)| size < config.world_size.get()) {
                let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
                warn_of_own_name(host, server.local_addr().ip());
            }
            Ok(Some(server))
        }
        Host::Rank0 { bind: Some(ip) } if config.rank.is_main() => {
            TcpStoreServer::bind_anywhere(SocketAddr::new(ip, port(address)), access).map(Some)
        }
        Host::Rank0 { .. } | Host::Launcher | Host::Agent => Ok(None),
    }
}

/// Rank 0, whose port is in use: if by a group of this process, the error that it gives to all ranks.
fn refused_by_own(address: &str, config: &RankConfig, me: &Identity, deadline: Deadline) -> Option<Error> {
    let store: SharedStore = Arc::new(TcpStore::connect_with(address, &config.credentials, deadline).ok()?);
    refuse_another(&store, config, me, deadline).ok().flatten()
}

/// Whether `host:port` is an address of this host alone.
fn is_loopback(address: &str) -> bool {
    address.parse().is_ok_and(|address: SocketAddr| address.ip().is_loopback())
}

/// The port of `host:port`.
fn port(address: &str) -> u16 {
    address.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or(0)
}
