//! The network to a peer that is silent, as this host's kernel sees it.
//!
//! It is asked only when a time-out has passed: whether the process is frozen or the network is silent makes a
//! difference to the error alone.

use std::fmt;
use std::os::fd::AsFd;
use std::time::Duration;

use phalanx_sys::tcp::{self, TcpPath};

use crate::host;

/// What is known of the network to a peer that has been silent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Network {
    /// The peer's host acknowledges what is sent to it.
    Works,
    /// For so long, nothing that is sent to the peer's host has been acknowledged.
    Silent(Duration),
    /// The loopback, over which all ranks of a host reach each other, is down.
    LoopbackDown,
    Unknown,
}

impl Network {
    /// The network behind `socket`, whose peer has been silent for `silence`.
    pub(crate) fn behind(socket: impl AsFd, silence: Duration) -> Self {
        tcp::path(socket).map_or(Self::Unknown, |path| Self::judge(path, silence))
    }

    /// The network to a silent peer on this host.
    pub(crate) fn within_host() -> Self {
        if host::loopback_is_down() { Self::LoopbackDown } else { Self::Unknown }
    }

    /// A kernel acknowledges for a process that is frozen, also if no more data fits. So an acknowledgement in the second half of the
    /// silence says that the network works; one in the first half was on its way when the network fell silent, or came between two
    /// outages. It may also be old because nothing was sent: then it proves nothing.
    fn judge(path: TcpPath, silence: Duration) -> Self {
        match path.last_acknowledgement {
            last if last <= silence / 2 => Self::Works,
            last if path.unacknowledged > 0 => Self::Silent(last),
            _ => Self::Unknown,
        }
    }
}

impl fmt::Display for Network {
    /// What it says about the silence, for the end of a sentence about the peer: nothing, or `: ..`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Works => f.write_str(
                ": its process is frozen, or its host too busy, for the host acknowledges what is sent to it",
            ),
            Self::Silent(since) => {
                let seconds = since.as_secs_f64();
                write!(
                    f,
                    ": the network is silent, on which its host has acknowledged nothing for {seconds:.1} s"
                )
            }
            Self::LoopbackDown => f.write_str(": this host's loopback interface is down"),
            Self::Unknown => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_network_is_not_a_frozen_process() {
        let judge = |unacknowledged, milliseconds| {
            let last_acknowledgement = Duration::from_millis(milliseconds);
            let round_trip = Duration::from_millis(1);
            let path = TcpPath { unacknowledged, last_acknowledgement, round_trip };
            Network::judge(path, Duration::from_secs(10))
        };
        // Each heartbeat is acknowledged, the last ones perhaps not yet.
        assert_eq!(judge(0, 60), Network::Works);
        assert_eq!(judge(4, 500), Network::Works);
        assert_eq!(judge(1, 9900), Network::Silent(Duration::from_millis(9900)));
        assert_eq!(judge(30, 5001), Network::Silent(Duration::from_millis(5001)));
        // Nothing was sent.
        assert_eq!(judge(0, 9900), Network::Unknown);
    }
}
