//! Ranks as processes, connected pairwise by three TCP connections: for the data of collectives, for messages, and for
//! heartbeats, goodbyes and failures.
//!
//! There are three because data frames are large, and a failure can stop them in the middle: goodbyes, failures and
//! messages must not queue behind them. An operation that finds its connection broken first asks what the control
//! connections know. So the error names the rank that died, and not the rank that noticed. In groups of many ranks those for data and
//! messages are made [at their first use](on_demand).

mod accept;
mod all_tell;
mod call;
mod connect;
#[cfg(test)]
mod connect_tests;
mod connection;
mod connections;
mod control;
mod dial;
mod keep_alive;
mod leave;
mod on_demand;
mod pending;
#[cfg(all(test, feature = "tls"))]
mod pending_tests;
mod start_failure;
mod stop_probe;
mod stream;
#[cfg(all(test, feature = "tls"))]
mod tls_tests;
mod watch;

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::sockopt::set_socket_send_buffer_size;

#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub(super) fn fuzz(bytes: &[u8]) -> bool {
    let is_process = stop_probe::fuzz(bytes);
    connect::fuzz(bytes) || is_process
}
pub(crate) use self::connect::{Announcement, keys_of, mesh_with};
pub(super) use self::connection::Connection;
pub(crate) use self::connections::Connections;
pub(crate) use self::control::Monitor;
pub(crate) use self::leave::SilentHosts;
pub(crate) use self::start_failure::{KEY as FAILURE, fail_start, report_failed_start};
pub(crate) use self::stop_probe::{LEFT, process_record};
use self::stream::{Receiving, Sending};
use super::polling::{Next, Polling, Wait};
use super::{Incoming, Outgoing, Transport, late};
use crate::buffer::AlignedBytes;
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::health::Health;
use crate::health::Heartbeat;
use crate::interrupt;
use crate::poll::poll;
use crate::rank::{Generation, Rank};
use crate::store::Store;
use crate::wire::hello::{Channel, JobId};
use crate::world_size::WorldSize;

/// Bytes that are received before they are reduced: they stay in the processor's cache.
const SEGMENT: usize = 256 * 1024;
/// Bytes that may be unread in a connection within a host. The kernel doubles the number, for its own records.
const LOCAL_BUFFER: usize = 256 * 1024;

/// How often a rank that waits for a connection looks whether its peer has left.
const CONNECTION_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How often a rank that waits for a connection, and moves data on another one, looks for the first.
const BESIDE_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The parameters with which a rank joins the mesh of connections.
pub(crate) struct MeshConfig<'a> {
    pub store: &'a dyn Store,
    pub rank: Rank,
    pub world: WorldSize,
    pub generation: Generation,
    /// The local address at which peers reach this rank.
    pub interface: IpAddr,
    /// The credentials with which the ranks authenticate each other.
    pub credentials: &'a Credentials,
    /// The heartbeat settings.
    pub heartbeat: Heartbeat,
    /// The number that distinguishes the group's connections, if the ranks have agreed on one; otherwise rank 0 draws it.
    pub number: Option<JobId>,
    /// Whether this rank still has to tell which process it is: not if it has come to a roll-call. Who asks for the number tells it by that.
    pub tells_process: bool,
    /// Whether the store empties the record of a rank that has left before it is connected. A record that is as it was is not read again and again.
    pub marks_left: bool,
    /// Called now and then while this rank waits for others. Its error says why that is useless, and ends the start.
    pub watch: &'a (dyn Fn() -> Result<()> + Sync),
}

#[cfg(test)]
impl<'a> MeshConfig<'a> {
    /// On the loopback, without credentials.
    pub(crate) fn on_loopback(store: &'a dyn Store, rank: Rank, world: WorldSize) -> Self {
        Self {
            store,
            rank,
            world,
            generation: Generation::default(),
            interface: std::net::Ipv4Addr::LOCALHOST.into(),
            credentials: Credentials::none(),
            heartbeat: Heartbeat::default(),
            number: None,
            tells_process: false,
            marks_left: false,
            watch: &|| Ok(()),
        }
    }
}

/// One rank's connections to all others.
pub(crate) struct Tcp {
    health: Arc<Health>,
    rank: Rank,
    connections: Arc<Connections>,
    scratch: AlignedBytes,
    /// Whether it polls at all.
    polls: bool,
    /// By rank.
    polling: Vec<Polling>,
    /// Sends the goodbye when its last owner drops it.
    _monitor: Arc<Monitor>,
}

impl Tcp {
    /// Takes over the connections of a mesh, which `monitor` watches. The rank polls them before it sleeps if it `polls`: if each rank of this host
    /// can have a processor.
    pub(crate) fn new(
        rank: Rank,
        connections: Arc<Connections>,
        health: Arc<Health>,
        monitor: Arc<Monitor>,
        polls: bool,
    ) -> Self {
        connections.data.iter().filter_map(OnceLock::get).for_each(keep_in_cache);
        let polling = connections.control.iter().map(|_| Polling::default()).collect();
        Self {
            health,
            rank,
            connections,
            scratch: AlignedBytes::default(),
            polls,
            polling,
            _monitor: monitor,
        }
    }
}

/// Limits the unread data between two ranks of one host. By default the kernel lets it grow to some MiB, as a long
/// network path needs; then the data would be copied out of memory instead of a cache.
fn keep_in_cache(connection: &Connection) {
    if connection.is_within_host()
        && let Err(error) = set_socket_send_buffer_size(connection.socket(), LOCAL_BUFFER)
    {
        tracing::debug!(%error, "a connection within this host keeps its large buffer");
    }
}

impl Transport for Tcp {
    fn exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        recv: Option<Incoming<'_>>,
        deadline: Deadline,
    ) -> Result<()> {
        let Self { health, rank, connections, scratch, polling, .. } = self;
        // Whom it waits for, and whether for what that rank sends.
        let mut waiting: Option<(Rank, bool, Wait)> = None;
        let mut in_a_row = 0;
        let peers = [send.as_ref().map(|frame| frame.to), recv.as_ref().map(|frame| frame.from)];
        if let Some(stranger) = peers.into_iter().flatten().find(|peer| !connections.is_peer(*peer)) {
            return Err(Error::invalid_argument(format!("rank {stranger} is no peer of rank {rank}")));
        }
        let stream = |peer: Rank| connections.get(Channel::Data, peer);
        let broken = |peer: Rank, error: std::io::Error| health.broken(peer, error);

        let mut sending = send.map(|frame| (frame.to, stream(frame.to), Sending::new(&frame)));
        let mut receiving = match recv {
            Some(frame) => Some((frame.from, stream(frame.from), Receiving::new(*rank, frame, scratch)?)),
            None => None,
        };
        if let Some((to, None, _)) = &sending {
            connections.ask(Channel::Data, *to);
        }
        loop {
            let (mut has_sent, mut has_received) = (false, false);
            if let Some((to, Some(stream), frame)) = &mut sending {
                has_sent = frame.push(stream).map_err(|error| broken(*to, error))?;
                if frame.is_done() {
                    sending = None;
                }
            }
            if let Some((from, Some(stream), frame)) = &mut receiving {
                has_received = frame.pull(stream, |error| broken(*from, error))?;
                if frame.is_done() {
                    receiving = None;
                }
            }
            if let Some((peer, _, wait)) =
                waiting.take_if(|(_, receives, _)| if *receives { has_received } else { has_sent })
            {
                polling[peer.index()].end(&wait, Instant::now());
            }
            let waits_for = match (&sending, &receiving) {
                (None, None) => return Ok(()),
                (_, Some((from, ..))) => *from,
                (Some((to, ..)), None) => *to,
            };
            if has_sent || has_received {
                continue;
            }
            let out = sending.as_ref().and_then(|(_, stream, _)| *stream);
            let into = receiving.as_ref().and_then(|(_, stream, _)| *stream);
            let receives = receiving.is_some();
            let is_connected = if receives { into.is_some() } else { out.is_some() };
            if self.polls && is_connected {
                let now = Instant::now();
                let (peer, _, wait) = waiting.get_or_insert_with(|| (waits_for, receives, Wait::begin(now)));
                match polling[peer.index()].next(wait, &mut in_a_row, now) {
                    Next::Poll => continue,
                    Next::YieldAndPoll => {
                        std::thread::yield_now();
                        continue;
                    }
                    Next::Sleep => {}
                }
            }
            health.waits.sleep(waits_for);
            let unconnected = |peer: &Rank, stream: &Option<&Connection>| stream.is_none().then_some(*peer);
            let missing = [
                receiving.as_ref().and_then(|(from, stream, _)| unconnected(from, stream)),
                sending.as_ref().and_then(|(to, stream, _)| unconnected(to, stream)),
            ];
            let is_in_time = match missing.into_iter().flatten().next() {
                None => wait(out, into, deadline)?,
                Some(peer) => {
                    interrupt::check()?;
                    for peer in missing.into_iter().flatten() {
                        // In this order: what a peer has sent before it left comes on a connection that stands by then.
                        let is_over = health.has_failed() || health.has_left(peer);
                        if is_over && (health.has_failed() || !connections.may_come(Channel::Data, peer)) {
                            return Err(health.peer_failed(peer, "it is not connected with this rank"));
                        }
                    }
                    let timeout = interrupt::at_most(deadline.remaining());
                    match (out, into) {
                        (None, None) => {
                            let timeout = timeout.min(CONNECTION_POLL_INTERVAL);
                            connections.await_connection(Channel::Data, peer, timeout);
                        }
                        // No system call waits for both.
                        _ => wait(out, into, deadline.at_most(BESIDE_POLL_INTERVAL)).map(drop)?,
                    }
                    !deadline.has_passed()
                }
            };
            if !is_in_time {
                // Who is not connected has not come at all.
                let late_one = missing.into_iter().flatten().next().unwrap_or(waits_for);
                return Err(late(late_one, health.host(late_one)));
            }
            if let Some((to, out @ None, _)) = &mut sending {
                *out = stream(*to);
            }
            if let Some((from, into @ None, _)) = &mut receiving {
                *into = stream(*from);
            }
        }
    }
}

/// Waits until `out` can be written or `into` be read. False if the deadline passed first.
fn wait(out: Option<&impl AsFd>, into: Option<&impl AsFd>, deadline: Deadline) -> Result<bool> {
    let mut fds = [None, None];
    let mut count = 0;
    for (fd, flags) in [(out.map(AsFd::as_fd), PollFlags::OUT), (into.map(AsFd::as_fd), PollFlags::IN)] {
        if let Some(fd) = fd {
            fds[count] = Some((fd, flags));
            count += 1;
        }
    }
    let remaining = deadline.remaining();
    // Even if there is data to read: a peer that sends byte by byte would otherwise postpone the deadline for ever.
    if remaining.is_zero() {
        return Ok(false);
    }
    interrupt::check()?;
    let remaining = interrupt::at_most(remaining);
    let polled = match fds {
        [Some((one, flags)), None] => poll(&mut [PollFd::from_borrowed_fd(one, flags)], Some(remaining)),
        [Some((one, flags)), Some((two, more))] => poll(
            &mut [PollFd::from_borrowed_fd(one, flags), PollFd::from_borrowed_fd(two, more)],
            Some(remaining),
        ),
        _ => return Ok(true),
    };
    match polled {
        Ok(0) => Ok(!deadline.has_passed()),
        Ok(_) => Ok(true),
        Err(error) => Err(Error::io("waiting for peers failed", error)),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn what_waits_between_ranks_of_one_host_is_bounded() {
        use rustix::net::sockopt::socket_send_buffer_size;

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connection = Connection::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        assert!(connection.is_within_host());
        keep_in_cache(&connection);
        let bound = socket_send_buffer_size(connection.socket()).unwrap();
        // The kernel's own limit, net.core.wmem_max, may be lower.
        assert!((1..=2 * LOCAL_BUFFER).contains(&bound), "{bound}");
        // Otherwise it would grow.
        let (mut peer, _) = listener.accept().unwrap();
        let reader = std::thread::spawn(move || std::io::copy(&mut peer, &mut std::io::sink()));
        (0..64).for_each(|_| connection.socket().write_all(&[0; 1 << 20]).unwrap());
        assert_eq!(socket_send_buffer_size(connection.socket()).unwrap(), bound);
        drop(connection);
        assert_eq!(reader.join().unwrap().unwrap(), 64 << 20);
    }

    #[test]
    fn a_peer_that_trickles_does_not_put_the_deadline_off() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (own, _) = listener.accept().unwrap();
        peer.write_all(b"drop by drop").unwrap();
        let deadline = Deadline::after(Duration::from_millis(30));
        let start = Instant::now();
        // There is always data to read.
        while wait(None::<&TcpStream>, Some(&own), deadline).unwrap() {
            assert!(start.elapsed() < Duration::from_secs(10));
        }
        assert!(deadline.has_passed());
    }
}
