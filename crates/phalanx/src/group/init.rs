//! From a rendezvous to a group.

use std::time::Duration;

use super::{DEFAULT_TIMEOUT, Identity, ProcessGroup};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::rank::WorldSize;
use crate::rendezvous::{self, Rendezvous};
use crate::trace::Trace;
use crate::transport::{self, Choice, Place};

/// Joins the group that the launcher's variables describe; without a launcher, a world of one.
///
/// `phalanx run`, [`spawn`](crate::spawn()), torchrun and a Kubernetes PyTorchJob set RANK, WORLD_SIZE, MASTER_ADDR and
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
    ProcessGroup::join(rendezvous::from_env(DEFAULT_TIMEOUT)?, DEFAULT_TIMEOUT)
}

impl ProcessGroup {
    /// Connects the ranks that have met, pairwise over TCP. `timeout` bounds the connecting, and each of the group's
    /// operations until [`with_timeout`](Self::with_timeout) says otherwise.
    ///
    /// # Errors
    /// If a rank cannot be reached, or answers as somebody else.
    pub fn join(rendezvous: Rendezvous, timeout: Duration) -> Result<Self> {
        let Rendezvous { store, rank, world_size, local_rank, epoch, interface, keep_alive, .. } = rendezvous;
        let trace = Trace::from_env(rank, world_size);
        if world_size == WorldSize::ONE {
            return Ok(Self::alone_tracing(trace)?.with_timeout(timeout));
        }
        let place = Place { store: &*store, rank, world: world_size, epoch, interface };
        let (transport, health) = transport::connect(&place, Choice::from_env()?, Deadline::after(timeout))?;
        let identity = Identity {
            rank,
            world: world_size,
            local_rank,
            epoch,
            trace,
            keep_alive: Box::new((store, keep_alive)),
        };
        Ok(Self::new(identity, transport, health)?.with_timeout(timeout))
    }
}
