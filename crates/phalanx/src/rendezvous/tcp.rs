//! `tcp://host:port`: rank 0 serves the store there, on that host's address alone.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::arrival::{Identity, arrive};
use super::{Held, KeepAlive, RankConfig, Rendezvous};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::store::{
    Access, KeylessClients, Patience, SharedStore, TcpStore, TcpStoreServer, warn_of_own_name,
};

/// The process that serves the store.
#[derive(Clone, Copy, Debug)]
pub(super) enum Host {
    /// Rank 0, at the address at which the others reach it, or at another one of its host.
    Rank0 { bind: Option<IpAddr> },
    /// The launcher.
    Elsewhere,
}

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
    // Another program of this user, such as a monitor, may use the store without the key.
    let access = Access::to(config.credentials.clone(), KeylessClients::OfThisUser);
    let server = match host {
        Host::Rank0 { bind: None } if config.rank.is_main() => {
            let server = TcpStoreServer::bind_to(address, access, deadline)?;
            // All ranks of one host reach it, if the launcher says that they are on one.
            if config.local.is_none_or(|(_, size)| size < config.world_size.get()) {
                let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
                warn_of_own_name(host, server.local_addr().ip());
            }
            Some(server)
        }
        Host::Rank0 { bind: Some(ip) } if config.rank.is_main() => {
            Some(TcpStoreServer::bind_anywhere(SocketAddr::new(ip, port(address)), access)?)
        }
        _ => None,
    };
    let connect = |address: &str, connections| {
        let patience = Patience { connections, ..Patience::WHOLE };
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
        Some(server) => Held::Host { client, server: Some(server) },
        None => Held::Client(client),
    };
    let keep_alive = KeepAlive(held);
    let arrived = arrive(&store, Some(found), config, me, deadline)?;
    config.met(arrived, interface, keep_alive, deadline)
}

/// Whether `host:port` is an address of this host alone.
fn is_loopback(address: &str) -> bool {
    address.parse().is_ok_and(|address: SocketAddr| address.ip().is_loopback())
}

/// The port of `host:port`.
fn port(address: &str) -> u16 {
    address.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or(0)
}
