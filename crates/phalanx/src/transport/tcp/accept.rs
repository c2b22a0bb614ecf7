//! Accepts the ranks above, and turns strangers away.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Place;
use super::connect::{no_descriptors, out_of_descriptors};
use super::connection::Connection;
use super::start::{self, LOOK};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::tls::{Binding, Refusal, Tls};
use crate::wire::auth::{TAG, Tag, nonce};
use crate::wire::handshake::{Answerer, GroupSecret};
use crate::wire::hello::{self, Channel, HELLO, Hello};
use crate::wire::tls as wire;

/// A stranger gets this long to introduce itself, and to prove it.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(2);
/// Connections that may be introducing themselves at once; of those that have got least far the oldest gives way.
const MAX_PENDING: usize = 256;

/// A connection that has not introduced itself yet.
struct Pending {
    stream: Connection,
    stage: Stage,
    /// The group's, or the one that it has on this connection.
    secret: GroupSecret,
    /// Of the message that comes next.
    bytes: [u8; HELLO],
    filled: usize,
    deadline: Deadline,
}

/// All that a stranger takes, without TLS.
const _: () = assert!(size_of::<Pending>() + size_of::<Answerer>() <= 1024);

/// What is waited for.
enum Stage {
    /// The handshake of TLS, which comes before ours.
    Tls(Tls),
    Hello,
    /// What proves the hello, which was sensible.
    Proof(Box<Answerer>),
}

/// The connections that join this rank with another.
#[derive(Default)]
pub(super) struct Pair {
    pub data: Option<Connection>,
    pub control: Option<Connection>,
    pub messages: Option<Connection>,
}

impl Pair {
    fn is_complete(&self) -> bool {
        self.data.is_some() && self.control.is_some() && self.messages.is_some()
    }

    fn place(&mut self, channel: Channel) -> &mut Option<Connection> {
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
    (own, secret): (Hello, &GroupSecret),
    pairs: &mut [Pair],
    waits_for: &AtomicUsize,
    deadline: Deadline,
) -> Result<()> {
    let first = place.rank.index() + 1;
    let mut pending: Vec<Pending> = Vec::new();
    let mut full = false;
    let mut looked = Instant::now();
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
            Woken::Knocked => full = take_arrivals(listener, place, secret, &mut pending)?,
            Woken::Somebody => {}
        }
        // By the clock: those who knock without end must not keep a death from being noticed.
        if looked.elapsed() >= LOOK {
            looked = Instant::now();
            for (peer, pair) in place.world.ranks().skip(first).zip(pairs.iter()) {
                pair.control
                    .as_ref()
                    .map_or(Ok(()), |control| start::overhear(peer, "unknown host", control))?;
            }
        }
        let before = pending.len();
        let mut still_pending = Vec::with_capacity(pending.len());
        for mut connection in pending {
            match connection.advance(own, first) {
                Progress::Waiting => still_pending.push(connection),
                Progress::Dropped => {}
                Progress::TurnedAway(error, answer) => {
                    tracing::warn!(%error, "a connection was turned away");
                    // So that a rank that has no business here gives up at once instead of trying until its deadline.
                    let _ = connection.stream.send(&[IoSlice::new(answer)]);
                    connection.stream.discard();
                }
                Progress::Proven(hello, welcome) => {
                    let index = hello.rank.index().checked_sub(first);
                    if let Some(pair) = index.and_then(|index| pairs.get_mut(index)) {
                        keep(connection.stream, &welcome, pair.place(hello.channel));
                    }
                }
            }
        }
        pending = still_pending;
        // A descriptor may be free again, or nobody is left who could give one back.
        full &= !pending.is_empty() && pending.len() == before;
    }
}

/// Takes everybody from the listener's queue. True if there was no descriptor for the last of them, who can only come in
/// when somebody else has gone.
fn take_arrivals(
    listener: &TcpListener,
    place: &Place<'_>,
    secret: &GroupSecret,
    pending: &mut Vec<Pending>,
) -> Result<bool> {
    loop {
        match listener.accept() {
            // What is said on it is short, and waited for.
            Ok((stream, _))
                if stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_ok() =>
            {
                if pending.len() == MAX_PENDING {
                    let behind = (0..pending.len()).min_by_key(|&index| pending[index].progress());
                    pending.remove(behind.unwrap_or(0));
                }
                pending.push(Pending {
                    stream: Connection::new(stream),
                    stage: place.credentials.tls.clone().map_or(Stage::Hello, Stage::Tls),
                    secret: secret.clone(),
                    bytes: [0; HELLO],
                    filled: 0,
                    deadline: Deadline::after(HANDSHAKE),
                });
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
    /// Or nobody.
    Somebody,
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
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(Woken::Somebody),
        Err(error) => Err(Error::io("waiting for peers failed", error.into())),
    }
}

enum Progress {
    Waiting,
    Dropped,
    /// It speaks our language, but is not one of us; it is told so.
    TurnedAway(Error, &'static [u8]),
    /// It is who it says, and expects this answer.
    Proven(Hello, Tag),
}

impl Pending {
    /// How far it has got.
    fn progress(&self) -> u8 {
        match self.stage {
            Stage::Tls(_) if !self.stream.is_encrypted() => 0,
            Stage::Tls(_) => 1,
            Stage::Hello => 2,
            Stage::Proof(_) => 3,
        }
    }

    /// Takes what has come. `own` is this rank's hello, but for what depends on who calls; the ranks from `first` on may.
    fn advance(&mut self, own: Hello, first: usize) -> Progress {
        loop {
            let length = match &self.stage {
                Stage::Tls(tls) => {
                    match secure(&mut self.stream, tls) {
                        Ok(Some(binding)) => self.secret = self.secret.bound(&binding),
                        Ok(None) if self.deadline.has_passed() => return Progress::Dropped,
                        Ok(None) => continue,
                        Err(error) => return self.interrupted(error),
                    }
                    self.stage = Stage::Hello;
                    continue;
                }
                Stage::Hello => HELLO,
                Stage::Proof(_) => TAG,
            };
            // Nothing beyond this message: what follows the last one is not this thread's.
            match self.stream.receive(&mut [IoSliceMut::new(&mut self.bytes[self.filled..length])]) {
                Ok(0) => return Progress::Dropped,
                Ok(count) => self.filled += count,
                Err(error) => return self.interrupted(error),
            }
            if matches!(self.stage, Stage::Hello)
                && let Some(progress) = misunderstood(&self.bytes[..self.filled])
            {
                return progress;
            }
            if self.filled < length {
                if self.deadline.has_passed() {
                    return Progress::Dropped;
                }
                continue;
            }
            self.filled = 0;
            match &self.stage {
                Stage::Tls(_) | Stage::Hello => match self.answer(own, first) {
                    Ok(answerer) => self.stage = Stage::Proof(Box::new(answerer)),
                    Err(progress) => return progress,
                },
                Stage::Proof(answerer) => {
                    let proof = self.bytes.first_chunk().unwrap_or(&[0; TAG]);
                    return match answerer.proven(&self.secret, proof) {
                        Ok((hello, welcome)) => Progress::Proven(hello, welcome),
                        Err(error) => turned_away(error),
                    };
                }
            }
        }
    }

    /// Nothing more has come, or nothing more will.
    fn interrupted(&self, error: io::Error) -> Progress {
        match Refusal::remedy(&error) {
            // It has been told, if it has spoken TLS.
            Some(_) => Progress::TurnedAway(Error::protocol(error.to_string()), &[]),
            None if error.kind() == io::ErrorKind::WouldBlock && !self.deadline.has_passed() => {
                Progress::Waiting
            }
            None => Progress::Dropped,
        }
    }

    /// Answers the hello that has come.
    fn answer(&self, own: Hello, first: usize) -> Result<Answerer, Progress> {
        let hello = Hello::decode(&self.bytes).map_err(|_| Progress::Dropped)?;
        if hello.rank.index() < first {
            let error = Error::protocol(format!("rank {} does not connect here", hello.rank));
            return Err(turned_away(error));
        }
        // Without random numbers nobody can be let in.
        let nonce = nonce().map_err(turned_away)?;
        let own = own.on(hello.channel, hello.rank).saying(nonce);
        let answerer = Answerer::new(&self.secret, &own, hello, self.bytes).map_err(turned_away)?;
        match say(&self.stream, answerer.answer()) {
            true => Ok(answerer),
            false => Err(Progress::Dropped),
        }
    }
}

/// Takes the TLS handshake of a connection further; gives its binding when it is done.
fn secure(stream: &mut Connection, tls: &Tls) -> io::Result<Option<Binding>> {
    if !stream.is_encrypted() {
        let mut start = [0];
        if stream.peek(&mut start)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if !wire::is_hello(&start) {
            stream.send(&[IoSlice::new(&wire::REFUSAL)])?;
            return Err(Refusal::plain());
        }
        // Who says nothing takes no memory for it.
        stream.encrypt(tls.server()?);
    }
    if stream.handshake()? { stream.binding() } else { Ok(None) }
}

/// What there is to say to a connection that begins so, if that is all wrong.
fn misunderstood(start: &[u8]) -> Option<Progress> {
    if hello::is_of_another_version(start) {
        return Some(turned_away(Error::protocol("it speaks another version")));
    }
    wire::is_hello(start)
        .then(|| Progress::TurnedAway(Error::protocol(Refusal::wanted().to_string()), &wire::REFUSAL))
}

fn turned_away(error: Error) -> Progress {
    Progress::TurnedAway(error, &hello::REFUSAL)
}

/// Few bytes into an empty connection: they go out whole or the connection is broken.
fn say(stream: &Connection, bytes: &[u8]) -> bool {
    stream.send(&[IoSlice::new(bytes)]).is_ok_and(|said| said == (bytes.len(), true))
}

/// Tells a rank above that it is expected, and keeps its connection. A rank that tries again replaces its earlier try.
fn keep(stream: Connection, welcome: &Tag, place: &mut Option<Connection>) {
    if say(&stream, welcome) {
        stream.admit();
        *place = Some(stream);
    }
}
