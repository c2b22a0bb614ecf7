//! Connects the ranks of a group: the TCP mesh between all, and the shared memory of those on one host.

use std::sync::Arc;
use std::thread;

use phalanx_sys::processors;

use crate::deadline::Deadline;
use crate::domain::{self, Domain, Joined, Partition};
use crate::error::{Error, Result};
use crate::health::Health;
use crate::host;
use crate::rank::Rank;
use crate::transport::bootstrap::Starting;
use crate::transport::messages::{self, Messages, Rings};
use crate::transport::tcp::{self, Announcement, Connections, Monitor, SilentHosts, Tcp};
use crate::transport::{MeshConfig, Transport, TransportKind, in_process, report_failed_start};
use crate::worker_error;
use crate::world_size::WorldSize;

/// The options with which a rank connects.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TransportOptions<'a> {
    /// The transport of the data. If None: shared memory if all ranks can map each other's, else TCP.
    pub kind: Option<TransportKind>,
    /// The identity of this host. If None, it is determined from the kernel.
    pub host: Option<&'a str>,
    /// The number of the job's ranks on this host, as far as known.
    pub local_world_size: u32,
    /// What this rank's groups know together; None for a first group.
    pub silent_hosts: Option<&'a Arc<SilentHosts>>,
}

/// A rank's connections with the others of its group.
pub(crate) struct Connected {
    pub transport: Box<dyn Transport>,
    pub messages: Messages,
    /// The transport of the collectives; None between threads of one process.
    pub kind: Option<TransportKind>,
    pub health: Arc<Health>,
    /// The domains: which ranks share memory.
    pub partition: Partition,
    /// This rank's domain.
    pub domain: Option<Domain>,
}

/// Connects every rank with every other; returns when all of this rank's connections stand.
pub(crate) fn connect(
    config: &MeshConfig<'_>,
    options: TransportOptions<'_>,
    deadline: Deadline,
) -> Result<Connected> {
    connect_among(config, None, options, deadline)
}

/// [`connect`] for a sub-group with these `members` of the first group.
pub(crate) fn connect_among(
    config: &MeshConfig<'_>,
    members: Option<Arc<[Rank]>>,
    options: TransportOptions<'_>,
    deadline: Deadline,
) -> Result<Connected> {
    let TransportOptions { kind, host, .. } = options;
    if kind == Some(TransportKind::Tcp) {
        // Before the mesh stands: later the store may be gone, with a rank that has already finished.
        domain::decline(config, deadline).map_err(|error| start_failed(config, error))?;
    }
    let starting = Starting::default();
    let share = || -> Result<Shared> {
        let joined = match kind {
            Some(TransportKind::Tcp) => Joined::alone(config.world.count()),
            Some(TransportKind::SharedMemory) | None => domain::join(config, host, &starting, deadline)?,
        };
        let rings = messages::rings(config, joined.partition.domain_of(config.rank), &starting, deadline)?;
        Ok((joined, rings))
    };
    let (mesh, shared) = thread::scope(|scope| {
        // Over a network the store is far away: the four round trips to it pass while the connections are made. Within a host a thread
        // and another connection to the store would cost more.
        let beside = !config.interface.is_loopback();
        let share = &share;
        let sharing =
            beside.then(|| thread::Builder::new().name("phalanx-share".into()).spawn_scoped(scope, share));
        let connected = connect_mesh(config, None, members.as_ref(), options, &starting, deadline)?;
        let shared = match sharing {
            Some(Ok(sharing)) => sharing
                .join()
                .unwrap_or_else(|_| Err(Error::panicked("a thread that shares memory panicked"))),
            None | Some(Err(_)) => share(),
        };
        Ok::<_, Error>((connected, shared))
    })?;
    assemble(config, options, mesh, shared)
}

/// Tells the others why this rank, which has not begun to connect, cannot start.
pub(super) fn start_failed(config: &MeshConfig<'_>, error: Error) -> Error {
    report_failed_start(config.store, config.rank, &host::name(), error)
}

/// The keys under which `rank` has written to the store of its group while it was connected.
pub(crate) fn keys_of(rank: Rank) -> Vec<String> {
    [tcp::keys_of(rank), domain::keys_of(rank), messages::keys_of(rank)].concat()
}

/// A rank's connections, before the group uses them.
pub(super) struct MeshParts {
    health: Arc<Health>,
    connections: Arc<Connections>,
    monitor: Arc<Monitor>,
    /// What the ranks have told each other when they were connected, by rank.
    pub told: Vec<Vec<u8>>,
}

/// What ranks of one host share: memory for collectives, and rings for messages.
pub(super) type Shared = (Joined, Rings);

/// Connects every rank with every other, and begins to watch the connections.
pub(super) fn connect_mesh(
    config: &MeshConfig<'_>,
    announcement: Option<&Announcement<'_>>,
    members: Option<&Arc<[Rank]>>,
    options: TransportOptions<'_>,
    starting: &Starting,
    deadline: Deadline,
) -> Result<MeshParts> {
    let connect = || {
        let mesh = tcp::mesh_with(config, announcement, deadline).inspect_err(|error| {
            if let Some(culprit) = error.culprit(config.rank) {
                worker_error::blame(culprit.global(members.map(|members| &**members)));
            }
        })?;
        let health = Health::among(config.rank, mesh.hosts, members.cloned());
        let connections = Arc::new(mesh.connections);
        let identity = (config.rank, config.world);
        let silent = options.silent_hosts.cloned().unwrap_or_default();
        let monitor =
            Monitor::start(identity, connections.clone(), health.clone(), config.heartbeat, silent)?;
        let monitor = Arc::new(monitor.with_caller(config.rank, mesh.caller)?);
        starting.connected(health.clone());
        Ok(MeshParts { health, connections, monitor, told: mesh.told })
    };
    connect().inspect_err(|_| starting.fail())
}

/// The connections of a rank, with what it shares with others; that may have failed.
pub(super) fn assemble(
    config: &MeshConfig<'_>,
    options: TransportOptions<'_>,
    mesh: MeshParts,
    shared: Result<Shared>,
) -> Result<Connected> {
    let MeshParts { health, connections, monitor, .. } = mesh;
    let TransportOptions { kind, local_world_size, .. } = options;
    // A rank that gives up here reports it, because the others may be waiting for its message.
    let (joined, rings) = shared.map_err(|error| health.fail(error))?;
    let (partition, domain, reason) = joined.into_domain(config.rank, &health);
    let shares = partition.is_one() && domain.as_ref().is_some_and(Domain::is_world);
    if !shares && kind != Some(TransportKind::Tcp) {
        let reason = reason.unwrap_or_else(|| "they cannot map each other's memory".to_owned());
        // If all could share memory, the others use the control block without this rank. If all were configured to,
        // others may have been configured differently, and go on.
        if partition.is_one() || kind == Some(TransportKind::SharedMemory) {
            return Err(health.fail(domain::refused(&reason)));
        }
        tracing::debug!(reason, "not all ranks share memory; data goes over TCP");
    }
    if domain.is_none() && partition.domain_of(config.rank).len() > 1 {
        // The other ranks of its host would wait for it there.
        return Err(health.fail(domain::refused("this rank has no shared memory")));
    }
    let polls = processors::suffice_for(local_ranks(connections.near(), local_world_size));
    let goodbye = Box::new(monitor.clone());
    let messages = Messages::over(config.rank, &connections, rings, &health, polls, goodbye);
    let transport = Box::new(Tcp::new(config.rank, connections, health.clone(), monitor, polls));
    let kind = Some(if shares { TransportKind::SharedMemory } else { TransportKind::Tcp });
    Ok(Connected { transport, messages, kind, health, partition, domain })
}

/// The number of ranks on this host. The peers of a sub-group that are `near` may not be all, so the launcher's number counts too.
fn local_ranks(near: usize, local_world_size: u32) -> usize {
    (local_world_size as usize).max(1 + near)
}

/// Connects all ranks of a group of threads of this process, by rank.
pub(crate) fn connect_in_process(world: WorldSize) -> Vec<Connected> {
    let connected = |in_process::InProcessRank { transport, messages, health }| Connected {
        transport: Box::new(transport),
        messages,
        kind: None,
        health,
        partition: Partition::alone(world.count()),
        domain: None,
    };
    in_process::connect(world).into_iter().map(connected).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_this_host_are_those_that_the_launcher_counts_or_that_are_near() {
        assert_eq!(local_ranks(0, 1), 1);
        assert_eq!(local_ranks(1, 4), 4, "a sub-group of two of four ranks");
        assert_eq!(local_ranks(2, 1), 3, "a launcher that says nothing");
    }
}
