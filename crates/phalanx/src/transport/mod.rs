//! Moves the bytes of plans between ranks. What to move, `collective` says; who is alive, `health` says.

pub(crate) mod health;
pub(crate) mod in_process;
pub(crate) mod messages;
mod shared_memory;
mod tcp;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use self::health::Health;
use self::messages::Messages;
use self::shared_memory::SharedMemory;
pub(crate) use self::tcp::Place;
use self::tcp::{Monitor, Tcp};
use crate::collective::kernel::Kernel;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::wire::frame::Header;

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

/// What joins a rank with the others of its group.
pub(crate) struct Connected {
    pub transport: Box<dyn Transport>,
    pub messages: Messages,
    /// What carries the collectives; nothing between threads of one process.
    pub kind: Option<TransportKind>,
    pub health: Arc<Health>,
}

/// Connects every rank with every other; returns when this rank's connections all stand. Unless a kind is asked for, it
/// is shared memory if all ranks can map each other's, else TCP.
pub(crate) fn connect(
    place: &Place<'_>,
    kind: Option<TransportKind>,
    deadline: Deadline,
) -> Result<Connected> {
    connect_among(place, None, kind, deadline)
}

/// [`connect`] for a sub-group, whose ranks are these `members` of the first group.
pub(crate) fn connect_among(
    place: &Place<'_>,
    members: Option<Arc<[Rank]>>,
    kind: Option<TransportKind>,
    deadline: Deadline,
) -> Result<Connected> {
    if kind == Some(TransportKind::Tcp) {
        // Before the mesh stands: later the store may be gone, with a rank that is done already.
        shared_memory::decline(place, deadline)?;
        messages::decline(place, deadline)?;
    }
    let mesh = tcp::mesh(place, deadline)?;
    let health = Health::among(place.rank, mesh.hosts, members);
    let connections = Arc::new(mesh.connections);
    let monitor = Arc::new(Monitor::start(place.rank, connections.clone(), health.clone())?);
    let rings = match kind {
        Some(TransportKind::Tcp) => messages::Rings::none(place.world.count()),
        // A rank that gives up here says so: the others may be waiting for its word.
        _ => messages::rings(place, &health, deadline).map_err(|error| health.fail(error))?,
    };
    let messages = Messages::over(place.rank, &connections, rings, &health, Box::new(monitor.clone()));
    if kind != Some(TransportKind::Tcp) {
        // A rank that gives up here says so: the others may be waiting for its word.
        let rings = shared_memory::rings(place, &health, deadline).map_err(|error| health.fail(error))?;
        match rings {
            Ok(rings) => {
                let transport = SharedMemory::new(place.rank, rings, health.clone(), monitor);
                let (transport, kind) = (Box::new(transport), Some(TransportKind::SharedMemory));
                return Ok(Connected { transport, messages, kind, health });
            }
            Err(reason) if kind.is_some() => {
                let error = Error::environment(format!("the ranks share no memory: {reason}"))
                    .with_remedy("unset PHALANX_TRANSPORT to use TCP where memory cannot be shared");
                // Others may have been asked for nothing, and go on.
                return Err(health.fail(error));
            }
            Err(reason) => tracing::debug!(reason, "the ranks share no memory; data goes over TCP"),
        }
    }
    let transport = Tcp::new(place.rank, connections, health.clone(), monitor);
    Ok(Connected { transport: Box::new(transport), messages, kind: Some(TransportKind::Tcp), health })
}

/// The error of a peer that was waited for until the deadline.
fn late(peer: Rank, host: &str) -> Error {
    Error::timeout(format!("rank {peer} ({host}) did not take part in time"))
        .with_peer(peer)
        .with_remedy(
            "is that rank stuck or far behind, or does it wait for another that is? A longer time-out can be set on the \
             group",
        )
}
