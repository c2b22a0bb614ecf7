//! Moves the bytes of plans between ranks. `collective` says what to move, `health` who is alive; `group` connects.
//!
//! The data path has threads and no async runtime: a rank has few peers and one operation at a time.

pub(crate) mod bootstrap;
pub(crate) mod in_process;
pub(crate) mod messages;
pub(crate) mod polling;
pub mod process;
pub(crate) mod tcp;

use std::fmt;
use std::str::FromStr;

pub(crate) use self::tcp::{LEFT, MeshConfig, fail_start, process_record, report_failed_start};
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

/// A frame to send.
pub(crate) struct Outgoing<'a> {
    pub to: Rank,
    pub header: Header,
    pub payload: &'a [u8],
}

/// A frame to receive.
pub(crate) struct Incoming<'a> {
    pub from: Rank,
    /// The header that must arrive; its payload is as long as `into`.
    pub expect: Header,
    pub into: &'a mut [u8],
    pub kernel: Kernel,
}

/// The transport of the data between ranks in different processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportKind {
    /// TCP connections, between any hosts.
    Tcp,
    /// Memory that all ranks of one host map: a control block for collectives, and rings for messages.
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
                    .with_remedy("use tcp or shm"))
            }
        }
    }
}

/// The error if a peer has not answered by the deadline.
pub(crate) fn late(peer: Rank, host: &str) -> Error {
    Error::timeout(format!("rank {peer} ({host}) did not take part in time"))
        .with_peer(peer)
        .with_remedy(
            "is that rank stuck or far behind, or does it wait for another that is? A longer time-out can be set on the \
             group",
        )
}

/// For `phalanx::fuzzing`: the messages of the bootstrap exchange.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> bool {
    let understood = [tcp::fuzz(bytes), messages::fuzz(bytes), bootstrap::fuzz(bytes)];
    understood.contains(&true)
}
