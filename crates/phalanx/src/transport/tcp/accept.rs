//! Accepts the ranks above, and turns strangers away.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Place;
use super::connect::{no_descriptors, out_of_descriptors, settle};
use super::start::{self, LOOK};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::wire::hello::{self, Channel, HELLO, Hello};

/// A stranger gets this long to introduce itself.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(2);
/// Connections that may be introducing themselves at once; the oldest gives way.
const MAX_PENDING: usize = 256;

/// A connection that has not introduced itself yet.
struct Pending {
    stream: TcpStream,
    bytes: [u8; HELLO],
    filled: usize,
    deadline: Deadline,
}

/// The connections that join this rank with another.
#[derive(Default)]
pub(super) struct Pair {
    pub data: Option<TcpStream>,
    pub control: Option<TcpStream>,
    pub messages: Option<TcpStream>,
}

impl Pair {
    fn is_complete(&self) -> bool {
        self.data.is_some() && self.control.is_some() && self.messages.is_some()
    }

    fn place(&mut self, channel: Channel) -> &mut Option<TcpStream> {
        match channel {
            Channel::Data => &mut self.data,
            Channel::Control => &mut self.control,
            Channel::Messages => &mut self.messages,
        }
    }
}

/// Accepts the connections of every rank above this one into `pairs`, and says for whom it still waits; stops when
/// `stopped` is closed at its other end. A stranger is dropped, and holds nobody up.
pub(super) fn accept(
    listener: &TcpListener,
    stopped: &UnixStream,
    place: &Place<'_>,
    own: Hello,
    pairs: &mut [Pair],
    waits_for: &AtomicUsize,
    deadline: Deadline,
) -> Result<()> {
    let first = place.rank.index() + 1;
    let mut pending: Vec<Pending> = Vec::new();
    let mut full = false;
    loop {
        let missing = pairs.iter().position(|pair| !pair.is_complete());
        let Some(missing) = missing else { return Ok(()) };
        waits_for.store(first + missing, Ordering::Relaxed);
        if deadline.has_passed() {
            let peer = Rank::new((first + missing) as u32);
            return Err(Error::timeout(format!("rank {peer} did not connect in time"))
                .with_peer(peer)
                .with_remedy("is it alive, and does a firewall stand between?"));
        }
        match wait_for_arrivals(listener, stopped, &pending, full, deadline)? {
            Woken::Stopped => return Err(Error::aborted("accepting was stopped")),
            Woken::Knocked => full = take_arrivals(listener, &mut pending)?,
            Woken::Somebody => {}
            Woken::Nobody => {
                for (peer, pair) in place.world.ranks().skip(first).zip(pairs.iter()) {
                    pair.control
                        .as_ref()
                        .map_or(Ok(()), |control| start::overhear(peer, "unknown host", control))?;
                }
            }
        }
        let before = pending.len();
        let mut still_pending = Vec::with_capacity(pending.len());
        for mut connection in pending {
            match connection.advance() {
                Progress::Waiting => still_pending.push(connection),
                Progress::Dropped => {}
                Progress::TurnedAway => {
                    tracing::warn!("a connection that speaks another version was turned away");
                    refuse(&connection.stream);
                }
                Progress::Said(hello) => welcome(connection.stream, own, hello, first, pairs),
            }
        }
        pending = still_pending;
        // A descriptor may be free again, or nobody is left who could give one back.
        full &= !pending.is_empty() && pending.len() == before;
    }
}

/// Takes everybody from the listener's queue. True if there was no descriptor for the last of them, who can only come in
/// when somebody else has gone.
fn take_arrivals(listener: &TcpListener, pending: &mut Vec<Pending>) -> Result<bool> {
    loop {
        match listener.accept() {
            Ok((stream, _)) if stream.set_nonblocking(true).is_ok() => {
                if pending.len() == MAX_PENDING {
                    pending.remove(0);
                }
                let deadline = Deadline::after(HANDSHAKE);
                pending.push(Pending { stream, bytes: [0; HELLO], filled: 0, deadline });
            }
            Ok(_) => {}
            Err(error) if out_of_descriptors(&error) => {
                // Strangers may hold the descriptors; if nobody is left who will go, nobody more can come.
                return match pending.is_empty() {
                    true => Err(no_descriptors("a rank could not be accepted", error)),
                    false => Ok(true),
                };
            }
            // Nobody more, or somebody who has gone again.
            Err(_) => return Ok(false),
        }
    }
}

enum Woken {
    Stopped,
    /// Somebody stands in the listener's queue.
    Knocked,
    Somebody,
    Nobody,
}

/// Waits until somebody connects or speaks, a patience ends, it is time to look around, or `stopped` is closed at its other end. If there is no
/// descriptor for another connection the listener is not asked: it would be ready again and again.
fn wait_for_arrivals(
    listener: &TcpListener,
    stopped: &UnixStream,
    pending: &[Pending],
    full: bool,
    deadline: Deadline,
) -> Result<Woken> {
    let at_listener = if full { PollFlags::empty() } else { PollFlags::IN };
    let mut fds = vec![PollFd::new(stopped, PollFlags::IN), PollFd::new(listener, at_listener)];
    fds.extend(pending.iter().map(|connection| PollFd::new(&connection.stream, PollFlags::IN)));
    let patience = pending
        .iter()
        .map(|connection| connection.deadline)
        .fold(deadline.at_most(LOOK), Deadline::min)
        .remaining();
    let timeout = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: i64::from(patience.subsec_nanos()) };
    match poll(&mut fds, Some(&timeout)) {
        Ok(_) if !fds[0].revents().is_empty() => Ok(Woken::Stopped),
        Ok(_) if !fds[1].revents().is_empty() => Ok(Woken::Knocked),
        Ok(0) => Ok(Woken::Nobody),
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(Woken::Somebody),
        Err(error) => Err(Error::io("waiting for peers failed", error.into())),
    }
}

enum Progress {
    Waiting,
    Dropped,
    /// It speaks our language, but another version of it.
    TurnedAway,
    Said(Hello),
}

impl Pending {
    fn advance(&mut self) -> Progress {
        match (&self.stream).read(&mut self.bytes[self.filled..]) {
            Ok(0) => Progress::Dropped,
            Ok(count) => {
                self.filled += count;
                if self.filled < HELLO {
                    return Progress::Waiting;
                }
                match Hello::decode(&self.bytes) {
                    Ok(hello) => Progress::Said(hello),
                    Err(_) if hello::is_hello(&self.bytes) => Progress::TurnedAway,
                    Err(_) => Progress::Dropped,
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !self.deadline.has_passed() => {
                Progress::Waiting
            }
            Err(_) => Progress::Dropped,
        }
    }
}

/// Answers a rank above and keeps its connection. A rank that tries again replaces its earlier try.
fn welcome(stream: TcpStream, own: Hello, hello: Hello, first: usize, pairs: &mut [Pair]) {
    let own = Hello { channel: hello.channel, ..own };
    if let Err(error) = own.accept(&hello) {
        tracing::warn!(%error, "a connection was turned away");
        return refuse(&stream);
    }
    let Some(pair) = hello.rank.index().checked_sub(first).and_then(|index| pairs.get_mut(index)) else {
        return refuse(&stream);
    };
    // 48 bytes into an empty connection: they go out whole or the connection is broken.
    if (&stream).write_all(&own.encode()).and_then(|()| settle(&stream)).is_ok() {
        *pair.place(hello.channel) = Some(stream);
    }
}

/// Says no, so that a rank that has no business here gives up at once instead of trying until its deadline.
fn refuse(mut stream: &TcpStream) {
    let _ = stream.write(&hello::REFUSAL);
}
