//! From a rendezvous to a group.

use std::sync::Arc;
use std::time::Duration;

use super::{DEFAULT_TIMEOUT, Ground, Identity, LocalPlace, Origin, ProcessGroup};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::rank::WorldSize;
use crate::rendezvous::{self, Rendezvous};
use crate::trace::Trace;
use crate::transport::{self, Place, TransportKind, Wishes};

/// Joins the group that the launcher's variables describe; without a launcher, a world of one.
///
/// `phalanx run`, [`spawn`](crate::spawn()), torchrun and the like set RANK, WORLD_SIZE, MASTER_ADDR and
/// MASTER_PORT. For other ways to meet see [`rendezvous::from_url`] and [`ProcessGroup::join`].
///
/// ```
/// let group = phalanx::init()?; // `cargo run` alone: a world of one
/// assert_eq!(group.world_size().get(), 1);
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// # Errors
/// If a variable is missing, empty or malformed, if the port is taken, or if ranks are missing after 30 minutes.
pub fn init() -> Result<ProcessGroup> {
    ProcessGroup::join(rendezvous::from_env(DEFAULT_TIMEOUT)?, GroupOptions::from_env()?)
}

/// How a group is built.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GroupOptions {
    /// Bounds the connecting, and each operation until [`ProcessGroup::with_timeout`] says otherwise.
    pub timeout: Duration,
    /// What carries the data. If it is left open: shared memory if all ranks are on one host and can map each other's
    /// memory, else TCP.
    pub transport: Option<TransportKind>,
    /// Ranks that give the same name share memory, if they can. If it is left open, the kernel's name for the host since
    /// its start.
    pub host_id: Option<String>,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self { timeout: DEFAULT_TIMEOUT, transport: None, host_id: None }
    }
}

impl GroupOptions {
    /// The defaults, with the transport that `PHALANX_TRANSPORT` names (`tcp`, `shm`, or `auto`), and the host's identity
    /// from `PHALANX_HOST_ID`.
    pub fn from_env() -> Result<Self> {
        let transport = match std::env::var("PHALANX_TRANSPORT").unwrap_or_default().as_str() {
            "" | "auto" => None,
            name => Some(name.parse().map_err(|_| {
                Error::environment(format!("PHALANX_TRANSPORT={name} names no transport"))
                    .with_remedy("it may be tcp, shm or auto")
            })?),
        };
        let host_id = std::env::var("PHALANX_HOST_ID").ok().filter(|host| !host.is_empty());
        Ok(Self { transport, host_id, ..Self::default() })
    }
}

impl ProcessGroup {
    /// Connects the ranks that have met, pairwise.
    ///
    /// # Errors
    /// If a rank cannot be reached or answers as somebody else, or if shared memory was asked for and some rank cannot
    /// map another's; the error says which, and why.
    pub fn join(rendezvous: Rendezvous, options: GroupOptions) -> Result<Self> {
        let GroupOptions { timeout, transport, host_id } = options;
        let Rendezvous {
            store,
            rank,
            world_size,
            local_rank,
            local_world_size,
            epoch,
            interface,
            keep_alive,
        } = rendezvous;
        let trace = Trace::from_env(rank, world_size);
        if world_size == WorldSize::ONE {
            return Ok(Self::alone_tracing(trace)?.with_timeout(timeout));
        }
        let place = Place { store: &*store, rank, world: world_size, epoch, interface };
        let wishes = Wishes { kind: transport, host: host_id.as_deref() };
        let connected = transport::connect(&place, wishes, Deadline::after(timeout))?;
        let origin = Origin {
            ground: Ground::Mesh { store, interface, transport, host_id },
            local: LocalPlace { rank: local_rank, world_size: local_world_size },
            epoch,
            _keep_alive: Arc::new(keep_alive),
            members: None,
        };
        let identity = Identity { rank, world: world_size, trace, origin };
        Ok(Self::new(identity, connected)?.with_timeout(timeout))
    }
}
