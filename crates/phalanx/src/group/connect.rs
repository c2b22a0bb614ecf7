//! Connects the ranks of a group: the TCP mesh between all, and the shared memory of those on one host.

use std::sync::Arc;

use crate::deadline::Deadline;
use crate::domain::{self, Domain, Joined, Partition};
use crate::error::Result;
use crate::health::Health;
use crate::rank::Rank;
use crate::transport::messages::{self, Messages};
use crate::transport::tcp::{self, Monitor, Tcp};
use crate::transport::{MeshConfig, Transport, TransportKind, in_process};
use crate::worker_error;
use crate::world_size::WorldSize;

/// The options with which a rank connects.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wishes<'a> {
    /// The transport of the data. If None: shared memory if all ranks can map each other's, else TCP.
    pub kind: Option<TransportKind>,
    /// The identity of this host. If None, it is determined from the kernel.
    pub host: Option<&'a str>,
    /// The number of the job's ranks on this host, as far as known.
    pub local_world_size: u32,
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
pub(crate) fn connect(place: &MeshConfig<'_>, wishes: Wishes<'_>, deadline: Deadline) -> Result<Connected> {
    connect_among(place, None, wishes, deadline)
}

/// [`connect`] for a sub-group with these `members` of the first group.
pub(crate) fn connect_among(
    place: &MeshConfig<'_>,
    members: Option<Arc<[Rank]>>,
    wishes: Wishes<'_>,
    deadline: Deadline,
) -> Result<Connected> {
    let Wishes { kind, host, local_world_size } = wishes;
    if kind == Some(TransportKind::Tcp) {
        // Before the mesh stands: later the store may be gone, with a rank that has already finished.
        domain::decline(place, deadline)?;
    }
    let mesh = tcp::mesh(place, deadline).inspect_err(|error| {
        if let Some(culprit) = error.culprit(place.rank) {
            let member = members.as_ref().and_then(|members| members.get(culprit.index()));
            worker_error::blame(member.copied().unwrap_or(culprit));
        }
    })?;
    let health = Health::among(place.rank, mesh.hosts, members);
    let connections = Arc::new(mesh.connections);
    let identity = (place.rank, place.world);
    let monitor = Arc::new(Monitor::start(identity, connections.clone(), health.clone(), place.heartbeat)?);
    let mut joined = Joined { partition: Partition::alone(place.world.count()), domain: None, reason: None };
    if kind != Some(TransportKind::Tcp) {
        // A rank that gives up here reports it, because the others may be waiting for its message.
        joined = domain::join(place, host, &health, deadline).map_err(|error| health.fail(error))?;
    }
    let Joined { partition, domain, reason } = joined;
    let shares = partition.is_one() && domain.as_ref().is_some_and(Domain::is_world);
    if !shares && kind != Some(TransportKind::Tcp) {
        let reason = reason.unwrap_or_else(|| "they cannot map each other's".to_owned());
        // If all could share memory, the others use the control block without this rank. If all were configured to,
        // others may have been configured differently, and go on.
        if partition.is_one() || kind == Some(TransportKind::SharedMemory) {
            return Err(health.fail(domain::refused(&reason)));
        }
        tracing::debug!(reason, "not all ranks share memory; data goes over TCP");
    }
    if domain.is_none() && partition.domain_of(place.rank).len() > 1 {
        // The other ranks of its host would wait for it there.
        return Err(health.fail(domain::refused("this rank has no memory for it")));
    }
    let rings = messages::rings(place, partition.domain_of(place.rank), &health, deadline);
    let rings = rings.map_err(|error| health.fail(error))?;
    let messages = Messages::over(place.rank, &connections, rings, &health, Box::new(monitor.clone()));
    let transport = Box::new(Tcp::new(place.rank, connections, health.clone(), monitor, local_world_size));
    let kind = Some(if shares { TransportKind::SharedMemory } else { TransportKind::Tcp });
    Ok(Connected { transport, messages, kind, health, partition, domain })
}

/// Connects all ranks of a group of threads of this process, by rank.
pub(crate) fn connect_in_process(world: WorldSize) -> Vec<Connected> {
    let connected = |in_process::End { transport, messages, health }| Connected {
        transport: Box::new(transport),
        messages,
        kind: None,
        health,
        partition: Partition::alone(world.count()),
        domain: None,
    };
    in_process::connect(world).into_iter().map(connected).collect()
}
