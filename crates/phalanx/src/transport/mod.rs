//! Moves the bytes of plans between ranks. What to move, `collective` says; who is alive, `health` says.

pub(crate) mod calls;
pub(crate) mod health;
pub(crate) mod heartbeat;
pub(crate) mod in_process;
mod liveness;
pub(crate) mod messages;
mod process;
mod tcp;
pub(crate) mod words;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use self::health::Health;
pub use self::heartbeat::Heartbeat;
use self::messages::Messages;
pub(crate) use self::tcp::Place;
use self::tcp::{Monitor, Tcp};
use crate::collective::kernel::Kernel;
use crate::deadline::Deadline;
use crate::domain::{self, Domain, Joined, Partition};
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::store::Store;
use crate::wire::frame::Header;
use crate::worker_error;

/// Connections to all peers of a group.
pub(crate) trait Transport: Send {
    /// Sends and receives at the same time, until both are done or the deadline has passed.
    ///
    /// After an error the connections are in an unknown state: the group must fail.
    fn exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        recv: Option<Incoming<'_>>,
        deadline: Deadline,
    ) -> Result<()>;
}

/// A frame to be sent.
pub(crate) struct Outgoing<'a> {
    pub to: Rank,
    pub header: Header,
    pub payload: &'a [u8],
}

/// A frame to be received.
pub(crate) struct Incoming<'a> {
    pub from: Rank,
    /// The header that must arrive; its payload is as long as `into`.
    pub expect: Header,
    pub into: &'a mut [u8],
    pub kernel: Kernel,
}

/// What carries the data between ranks that are processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportKind {
    /// TCP connections, between any hosts.
    Tcp,
    /// Rings in memory that all ranks of one host map.
    SharedMemory,
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::SharedMemory => "shm",
        })
    }
}

impl FromStr for TransportKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "tcp" => Ok(Self::Tcp),
            "shm" => Ok(Self::SharedMemory),
            _ => {
                Err(Error::invalid_argument(format!("{name:?} is no transport"))
                    .with_remedy("tcp and shm are"))
            }
        }
    }
}

/// What a rank asks for when it connects.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wishes<'a> {
    /// What carries the data. If it is left open: shared memory if all ranks can map each other's, else TCP.
    pub kind: Option<TransportKind>,
    /// The identity of this host, if it is not to be found out.
    pub host: Option<&'a str>,
}

/// What joins a rank with the others of its group.
pub(crate) struct Connected {
    pub transport: Box<dyn Transport>,
    pub messages: Messages,
    /// What carries the collectives; nothing between threads of one process.
    pub kind: Option<TransportKind>,
    pub health: Arc<Health>,
    /// Which ranks share memory with which.
    pub partition: Partition,
    /// Those that share memory with this one.
    pub domain: Option<Domain>,
}

/// Connects every rank with every other; returns when this rank's connections all stand.
pub(crate) fn connect(place: &Place<'_>, wishes: Wishes<'_>, deadline: Deadline) -> Result<Connected> {
    connect_among(place, None, wishes, deadline)
}

/// [`connect`] for a sub-group, whose ranks are these `members` of the first group.
pub(crate) fn connect_among(
    place: &Place<'_>,
    members: Option<Arc<[Rank]>>,
    wishes: Wishes<'_>,
    deadline: Deadline,
) -> Result<Connected> {
    let Wishes { kind, host } = wishes;
    if kind == Some(TransportKind::Tcp) {
        // Before the mesh stands: later the store may be gone, with a rank that is done already.
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
        // A rank that gives up here says so: the others may be waiting for its word.
        joined = domain::join(place, host, &health, deadline).map_err(|error| health.fail(error))?;
    }
    let Joined { partition, domain, reason } = joined;
    let shares = partition.is_one() && domain.as_ref().is_some_and(Domain::is_world);
    if !shares && kind != Some(TransportKind::Tcp) {
        let reason = reason.unwrap_or_else(|| "they cannot map each other's".to_owned());
        // Where all can share, the others meet in memory, without this rank. Where all were told to, others may have
        // been asked for nothing, and go on.
        if partition.is_one() || kind == Some(TransportKind::SharedMemory) {
            return Err(health.fail(domain::refused(&reason)));
        }
        tracing::debug!(reason, "not all ranks share memory; data goes over TCP");
    }
    if domain.is_none() && partition.domain_of(place.rank).len() > 1 {
        // The others of its host would wait for it there.
        return Err(health.fail(domain::refused("this rank has no memory for it")));
    }
    let rings = messages::rings(place, partition.domain_of(place.rank), &health, deadline);
    let rings = rings.map_err(|error| health.fail(error))?;
    let messages = Messages::over(place.rank, &connections, rings, &health, Box::new(monitor.clone()));
    let transport = Box::new(Tcp::new(place.rank, connections, health.clone(), monitor));
    let kind = Some(if shares { TransportKind::SharedMemory } else { TransportKind::Tcp });
    Ok(Connected { transport, messages, kind, health, partition, domain })
}

/// Says in `store`, in which ranks will connect with each other, which process `rank` is: should it be stopped before, those of
/// its host can see it.
pub(crate) fn introduce(store: &dyn Store, rank: Rank, deadline: Deadline) -> Result<()> {
    tcp::introduce(store, rank, deadline)
}

/// Tells the ranks that are connecting with each other through `store` why they need not.
pub(crate) fn fail_start(store: &dyn Store, error: &Error) {
    tcp::fail_start(store, error);
}

/// The error of a peer that was waited for until the deadline.
pub(crate) fn late(peer: Rank, host: &str) -> Error {
    Error::timeout(format!("rank {peer} ({host}) did not take part in time"))
        .with_peer(peer)
        .with_remedy(
            "is that rank stuck or far behind, or does it wait for another that is? A longer time-out can be set on the \
             group",
        )
}

/// For [`fuzzing`](crate::fuzzing): the words that ranks leave for each other in the store.
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> bool {
    let understood = [tcp::fuzz(bytes), messages::fuzz(bytes), domain::fuzz(bytes)];
    understood.contains(&true)
}
