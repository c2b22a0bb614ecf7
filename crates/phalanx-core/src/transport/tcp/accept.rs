//! Accepts connections of higher ranks, and drops foreign ones.

use std::io::IoSlice;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};

use super::MeshConfig;
use super::connect::no_descriptors;
use super::connection::Connection;
use super::on_demand::{at_start, is_on_demand};
use super::pending::{HandshakeLimit, Pending, Progress, send_whole};
use super::start_failure::{self, POLL_INTERVAL};
use crate::deadline::Deadline;
use crate::error::{Error, Result, no_more_files};
use crate::interrupt;
use crate::poll::{look_first, poll};
use crate::rank::Rank;
use crate::tls::Tls;
use crate::wire::auth::Tag;
use crate::wire::handshake::GroupSecret;
use crate::wire::hello::{Channel, Hello};
use crate::world_size::WorldSize;

/// The most connections in the handshake at once, unless more ranks may call. For a new one, the oldest of those with the least progress
/// is dropped.
pub(super) const MAX_PENDING: usize = 256;
/// The most connections that are accepted before those in the handshake go on: a flood of silent ones must neither delay nor displace
/// a rank.
const MAX_ARRIVALS: usize = 16;
/// Of how many connections that are turned away a start warns. Whoever reaches the port may come as often as it likes, without the key.
pub(super) const TURNED_AWAY_LIMIT: usize = 16;

/// The connections between this rank and another.
#[derive(Default)]
pub(super) struct Pair {
    pub data: Option<Connection>,
    pub control: Option<Connection>,
    pub messages: Option<Connection>,
}

/// A connection that a rank has made before this one was ready.
pub(super) struct Early {
    pub channel: Channel,
    pub peer: Rank,
    pub connection: Connection,
}

/// What is left when all connections of the start stand; nothing, if those are all.
#[derive(Default)]
pub(super) struct Accepted {
    pub early: Vec<Early>,
    pub pending: Vec<Pending>,
}

impl Pair {
    /// Whether all connections stand that a pair makes at the start in this world.
    fn is_complete(&self, world: WorldSize) -> bool {
        let stands = |channel: &Channel| match channel {
            Channel::Data => self.data.is_some(),
            Channel::Control => self.control.is_some(),
            Channel::Messages => self.messages.is_some(),
        };
        let Some(control) = &self.control else { return false };
        at_start(world, control.is_within_host()).iter().all(stands)
    }

    pub fn connection(&mut self, channel: Channel) -> &mut Option<Connection> {
        match channel {
            Channel::Data => &mut self.data,
            Channel::Control => &mut self.control,
            Channel::Messages => &mut self.messages,
        }
    }
}

/// Accepts the start's connections of every higher rank into `pairs`, and reports which ranks are missing. Stops when
/// `stopped` is shut down at its other end, if there is one. Calls `meanwhile` now and then, whose error ends it, too. A foreign connection is dropped, and does not delay the ranks. If some connections are made
/// [on demand](super::on_demand), ranks that are ready earlier may make theirs already.
pub(super) fn accept(
    listener: &TcpListener,
    stopped: Option<&UnixStream>,
    config: &MeshConfig<'_>,
    (own, secret): (Hello, &GroupSecret),
    pairs: &mut [Pair],
    (waits_for, meanwhile): (&AtomicUsize, &mut dyn FnMut() -> Result<()>),
    deadline: Deadline,
) -> Result<Accepted> {
    let first = config.rank.index() + 1;
    // Of connections on demand, any rank may make them.
    let lowest = if is_on_demand(config.world) { 0 } else { first };
    let (mut pending, mut early): (Vec<Pending>, Vec<Early>) = (Vec::new(), Vec::new());
    let mut full = false;
    let mut looked = Instant::now();
    let mut missing = 0;
    let mut turned_away = 0;
    loop {
        // From the one that was missing before: to look at all for each connection would be as much as the square of the ranks.
        let mut rest = (missing..pairs.len()).chain(0..missing);
        let next = rest.find(|index| !pairs[*index].is_complete(config.world));
        let Some(next) = next else { return Ok(Accepted { early, pending }) };
        missing = next;
        waits_for.store(first + missing, Ordering::Relaxed);
        if deadline.has_passed() {
            let peer = Rank::new((first + missing) as u32);
            return Err(Error::timeout(format!("rank {peer} did not connect in time"))
                .with_peer(peer)
                .with_remedy("is it alive, and does a firewall stand between?"));
        }
        match wait_for_arrivals(listener, stopped, &pending, full, deadline)? {
            Woken::Stopped => return Err(Error::aborted("accepting was stopped")),
            Woken::Connection => {
                // A rank that is far away may call twice for each.
                let most = MAX_PENDING.max(2 * Channel::ALL.len() * config.world.count());
                full = take_arrivals(listener, config.credentials.tls.as_ref(), most, secret, &mut pending)?;
            }
            Woken::Other => {}
        }
        interrupt::check()?;
        // By the clock: a stream of new connections must not prevent that a death is noticed.
        if looked.elapsed() >= POLL_INTERVAL {
            looked = Instant::now();
            for (peer, pair) in config.world.ranks().skip(first).zip(pairs.iter()) {
                pair.control
                    .as_ref()
                    .map_or(Ok(()), |control| start_failure::check_peer(peer, "unknown host", control))?;
            }
            meanwhile()?;
        }
        let before = pending.len();
        let mut limit = HandshakeLimit::among(&pending);
        let mut still_pending = Vec::with_capacity(pending.len());
        for mut connection in pending {
            match connection.advance(own, lowest, &mut limit) {
                Progress::Waiting => still_pending.push(connection),
                Progress::Dropped => {}
                Progress::TurnedAway(error, answer) => {
                    turned_away += 1;
                    if turned_away <= TURNED_AWAY_LIMIT {
                        tracing::warn!(%error, "a connection was turned away");
                    } else {
                        tracing::debug!(%error, "a connection was turned away");
                    }
                    // So that a rank that is refused gives up at once instead of trying until its deadline.
                    let _ = connection.stream.send(&[IoSlice::new(answer)]);
                    connection.stream.discard();
                }
                // A lower rank, whose start is over, calls on demand.
                Progress::Proven(hello, welcome) if hello.rank.index() < first => {
                    let (channel, peer) = (hello.channel, hello.rank);
                    let is_new = |one: &Early| (one.channel, one.peer) != (channel, peer);
                    let mut kept = None;
                    if early.iter().all(is_new) {
                        keep(connection.stream, &welcome, &mut kept);
                    }
                    early.extend(kept.map(|connection| Early { channel, peer, connection }));
                }
                Progress::Proven(hello, welcome) => {
                    let index = hello.rank.index().checked_sub(first);
                    if let Some(pair) = index.and_then(|index| pairs.get_mut(index)) {
                        keep(connection.stream, &welcome, pair.connection(hello.channel));
                    }
                }
            }
        }
        pending = still_pending;
        // A descriptor may be free again, or no connection is left that could free one.
        full &= !pending.is_empty() && pending.len() == before;
    }
}

/// Accepts connections in the listener's queue, at most [`MAX_ARRIVALS`], so that `most` are pending. True if there was no descriptor for
/// the last of them, which can only be accepted when another connection has been closed.
pub(super) fn take_arrivals(
    listener: &TcpListener,
    tls: Option<&Tls>,
    most: usize,
    secret: &GroupSecret,
    pending: &mut Vec<Pending>,
) -> Result<bool> {
    for _ in 0..MAX_ARRIVALS {
        match listener.accept() {
            // Messages on it are short, and the peer waits for each.
            Ok((stream, _))
                if stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_ok() =>
            {
                make_room(pending, most);
                pending.push(Pending::new(Connection::new(stream), tls, secret));
            }
            Ok(_) => {}
            Err(error) if no_more_files(&error).is_some() => {
                // Foreign connections may hold the descriptors. If none is pending that could free one, no rank can
                // connect.
                return match pending.is_empty() {
                    true => Err(no_descriptors("a rank could not be accepted", error)),
                    false => Ok(true),
                };
            }
            // No more connections, or one that has been closed again.
            Err(_) => return Ok(false),
        }
    }
    Ok(false)
}

/// If there are `most`, drops the oldest of those with the least progress.
pub(super) fn make_room(pending: &mut Vec<Pending>, most: usize) {
    if pending.len() >= most
        && let Some(behind) = (0..pending.len()).min_by_key(|&index| pending[index].progress())
    {
        pending.remove(behind);
    }
}

enum Woken {
    Stopped,
    /// A connection is in the listener's queue.
    Connection,
    /// The queue is empty.
    Other,
}

/// Waits until a connection or data arrives, a pending connection's time is over, it is time for a check, or `stopped`
/// is shut down at its other end. If there is no descriptor for another connection, the listener is not polled: it would
/// be ready again and again.
fn wait_for_arrivals(
    listener: &TcpListener,
    stopped: Option<&UnixStream>,
    pending: &[Pending],
    full: bool,
    deadline: Deadline,
) -> Result<Woken> {
    let at_listener = if full { PollFlags::empty() } else { PollFlags::IN };
    let mut fds = vec![PollFd::new(listener, at_listener)];
    fds.extend(stopped.map(|stopped| PollFd::new(stopped, PollFlags::IN)));
    let limit = HandshakeLimit::among(pending);
    // A connection that waits for its turn is not read before: it would wake this thread again and again.
    let heard = pending.iter().filter(|connection| !connection.waits_for_tls());
    fds.extend(heard.map(|connection| PollFd::new(&connection.stream, PollFlags::IN)));
    let timeout = pending
        .iter()
        .filter_map(|connection| connection.next_check(&limit))
        .fold(deadline.at_most(POLL_INTERVAL), Deadline::min)
        .remaining();
    look_first(&mut fds);
    match poll(&mut fds, Some(interrupt::at_most(timeout))) {
        Ok(_) if stopped.is_some() && !fds[1].revents().is_empty() => Ok(Woken::Stopped),
        Ok(_) if !fds[0].revents().is_empty() => Ok(Woken::Connection),
        Ok(_) => Ok(Woken::Other),
        Err(error) => Err(Error::io("waiting for peers failed", error)),
    }
}

/// Welcomes a higher rank, and keeps its connection. If a rank connects again, this replaces the earlier connection.
fn keep(stream: Connection, welcome: &Tag, into: &mut Option<Connection>) {
    if send_whole(&stream, welcome) {
        stream.admit();
        *into = Some(stream);
    }
}
