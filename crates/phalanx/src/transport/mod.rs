//! Moves the bytes of plans between ranks. What to move, `collective` says; who is alive, `health` says.

pub(crate) mod health;
pub(crate) mod in_process;
pub(crate) mod tcp;

use crate::collective::kernel::Kernel;
use crate::deadline::Deadline;
use crate::error::Result;
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
