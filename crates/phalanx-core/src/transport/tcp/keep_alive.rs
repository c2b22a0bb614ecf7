//! Probes of the kernel: they notice a host that has lost power, and keep connections known to what is between two hosts.

use std::io;
use std::time::Duration;

use phalanx_sys::tcp;
use rustix::net::sockopt::{set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl};

use super::connection::Connection;
use crate::health::Heartbeat;

/// After this silence of a host, the kernel sends it a probe, …
const PROBE_DELAY: Duration = Duration::from_secs(10);
/// … this many times, every `PROBE_INTERVAL`, before its ranks are given up: after [`give_up`], if that is longer.
const PROBES: u32 = 4;
const PROBE_INTERVAL: Duration = Duration::from_secs(5);
/// After so long without data the kernel sends a probe on the other connections to another host, too: firewalls and address translation forget a
/// connection on which nothing passes, some after four minutes, and drop what comes later without a word.
pub(super) const IDLE_INTERVAL: Duration = Duration::from_secs(60);
/// So many probes without an answer end such a connection, the most that Linux takes: who is silent is for the control connections to say, and
/// for the operation's deadline.
pub(super) const IDLE_PROBES: u32 = 127;

/// Lets the kernel notice that a host has lost power or its cable, for ranks that do not exchange heartbeats. The
/// peer's kernel answers, even for a process that is busy or stopped. Only for control connections: on data
/// connections, silence ends with the operation's deadline.
pub(super) fn keep_alive(connection: &Connection, heartbeat: Heartbeat) -> io::Result<()> {
    let stream = connection.socket();
    set_socket_keepalive(stream, true)?;
    set_tcp_keepidle(stream, PROBE_DELAY)?;
    set_tcp_keepintvl(stream, PROBE_INTERVAL)?;
    set_tcp_keepcnt(stream, PROBES)?;
    match give_up(heartbeat).filter(|_| !connection.is_within_host()) {
        Some(give_up) => tcp::recover_soon(stream, give_up),
        None => Ok(()),
    }
}

/// Keeps a connection for data or messages to another host, which a job may not use for hours, known to what is between. It ends no earlier
/// than a control connection.
pub(super) fn keep_known(connection: &Connection, heartbeat: Heartbeat) -> io::Result<()> {
    let (stream, least) = (connection.socket(), give_up(heartbeat).unwrap_or_default() / IDLE_PROBES);
    set_socket_keepalive(stream, true)?;
    set_tcp_keepidle(stream, IDLE_INTERVAL)?;
    set_tcp_keepintvl(stream, IDLE_INTERVAL.max(least))?;
    set_tcp_keepcnt(stream, IDLE_PROBES)?;
    Ok(())
}

/// How long the kernel may get no acknowledgement of a rank on another host before it gives the connection up. The heartbeats say
/// more, so they come first. None if silence means nothing.
pub(super) fn give_up(heartbeat: Heartbeat) -> Option<Duration> {
    let timeout = heartbeat.network_timeout;
    (!timeout.is_zero()).then(|| timeout.saturating_mul(2).max(PROBE_DELAY + PROBE_INTERVAL * PROBES))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use rustix::net::sockopt::{socket_keepalive, tcp_keepcnt, tcp_keepidle, tcp_keepintvl};

    use super::*;

    /// Linux's default is two hours, which firewalls do not wait for.
    #[test]
    fn a_connection_on_which_nothing_passes_is_probed_each_minute() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connection = Connection::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        keep_known(&connection, Heartbeat::default()).unwrap();
        let stream = connection.socket();
        assert!(socket_keepalive(stream).unwrap());
        assert_eq!(tcp_keepidle(stream).unwrap(), IDLE_INTERVAL);
        assert_eq!(tcp_keepintvl(stream).unwrap(), IDLE_INTERVAL);
        assert_eq!(tcp_keepcnt(stream).unwrap(), IDLE_PROBES);
    }

    #[test]
    fn the_kernel_gives_up_later_than_the_heartbeats() {
        let seconds = |timeout| {
            let network_timeout = Duration::from_secs(timeout);
            give_up(Heartbeat { network_timeout, ..Heartbeat::default() }).map(|limit| limit.as_secs())
        };
        assert_eq!([0, 1, 10, 15, 60].map(seconds), [None, Some(30), Some(30), Some(30), Some(120)]);
    }
}
