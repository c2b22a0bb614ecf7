//! Moves the bytes of plans between ranks. What to move, `collective` says; who is alive, `health` says.

pub(crate) mod health;
pub(crate) mod in_process;
mod shared_memory;
mod tcp;

use std::sync::Arc;

use self::health::Health;
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Shared memory if all ranks are on one host and can map each other's, else TCP.
    #[default]
    Auto,
    Tcp,
    SharedMemory,
}

impl Choice {
    /// As `PHALANX_TRANSPORT` says: `auto`, `tcp` or `shm`.
    pub(crate) fn from_env() -> Result<Self> {
        match std::env::var("PHALANX_TRANSPORT").unwrap_or_default().as_str() {
            "" | "auto" => Ok(Self::Auto),
            "tcp" => Ok(Self::Tcp),
            "shm" => Ok(Self::SharedMemory),
            other => Err(Error::environment(format!("PHALANX_TRANSPORT={other} names no transport"))
                .with_remedy("it may be auto, tcp or shm")),
        }
    }
}

/// Connects every rank with every other; returns when this rank's connections all stand.
pub(crate) fn connect(
    place: &Place<'_>,
    choice: Choice,
    deadline: Deadline,
) -> Result<(Box<dyn Transport>, Arc<Health>)> {
    let mesh = tcp::mesh(place, deadline)?;
    let health = Health::new(place.rank, mesh.hosts);
    if choice != Choice::Tcp {
        match shared_memory::rings(place.store, place.rank, place.world, deadline)? {
            Ok(rings) => {
                let monitor = Monitor::start(place.rank, mesh.control, Vec::new(), health.clone())?;
                let transport = SharedMemory::new(place.rank, rings, health.clone(), monitor);
                return Ok((Box::new(transport), health));
            }
            Err(reason) if choice == Choice::SharedMemory => {
                return Err(Error::environment(format!("the ranks share no memory: {reason}"))
                    .with_remedy("set PHALANX_TRANSPORT=auto to use TCP where memory cannot be shared"));
            }
            Err(reason) => tracing::debug!(reason, "the ranks share no memory; data goes over TCP"),
        }
    }
    let transport = Tcp::new(place.rank, mesh.data, mesh.control, health.clone())?;
    Ok((Box::new(transport), health))
}

/// The error of a peer that was waited for until the deadline.
fn late(peer: Rank, host: &str) -> Error {
    Error::timeout(format!("rank {peer} ({host}) did not take part in time"))
        .with_peer(peer)
        .with_remedy("is that rank stuck, or far behind? A longer time-out can be set on the group")
}
