//! Accepts the ranks above, and turns strangers away.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Place;
use super::connect::{no_descriptors, out_of_descriptors, settle};
use super::start::{self, LOOK};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::wire::auth::{TAG, Tag, nonce};
use crate::wire::handshake::{Answerer, GroupSecret};
use crate::wire::hello::{self, Channel, HELLO, Hello};

/// A stranger gets this long to introduce itself, and to prove it.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(2);
/// Connections that may be introducing themselves at once; the oldest gives way, first of those that have said nothing
/// sensible yet.
const MAX_PENDING: usize = 256;

/// A connection that has not introduced itself yet.
struct Pending {
    stream: TcpStream,
    stage: Stage,
    /// Of the message that comes next.
    bytes: [u8; HELLO],
    filled: usize,
    deadline: Deadline,
}

/// All that a stranger takes.
const _: () = assert!(size_of::<Pending>() + size_of::<Answerer>() <= 1024);

/// What is waited for.
enum Stage {
    Hello,
    /// What proves the hello, which was sensible.
    Proof(Box<Answerer>),
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
            Woken::Knocked => full = take_arrivals(listener, &mut pending)?,
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
            match connection.advance(own, secret, first) {
                Progress::Waiting => still_pending.push(connection),
                Progress::Dropped => {}
                Progress::TurnedAway(error) => {
                    tracing::warn!(%error, "a connection was turned away");
                    refuse(&connection.stream);
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
fn take_arrivals(listener: &TcpListener, pending: &mut Vec<Pending>) -> Result<bool> {
    loop {
        match listener.accept() {
            Ok((stream, _)) if stream.set_nonblocking(true).is_ok() => {
                if pending.len() == MAX_PENDING {
                    let silent = pending.iter().position(|other| matches!(other.stage, Stage::Hello));
                    pending.remove(silent.unwrap_or(0));
                }
                let deadline = Deadline::after(HANDSHAKE);
                pending.push(Pending { stream, stage: Stage::Hello, bytes: [0; HELLO], filled: 0, deadline });
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
    /// It speaks our language, but is not one of us.
    TurnedAway(Error),
    /// It is who it says, and expects this answer.
    Proven(Hello, Tag),
}

impl Pending {
    /// Takes what has come. `own` is this rank's hello, but for what depends on who calls; the ranks from `first` on may.
    fn advance(&mut self, own: Hello, secret: &GroupSecret, first: usize) -> Progress {
        loop {
            let length = match self.stage {
                Stage::Hello => HELLO,
                Stage::Proof(_) => TAG,
            };
            // Nothing beyond this message: what follows the last one is not this thread's.
            match (&self.stream).read(&mut self.bytes[self.filled..length]) {
                Ok(0) => return Progress::Dropped,
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && !self.deadline.has_passed() => {
                    return Progress::Waiting;
                }
                Err(_) => return Progress::Dropped,
            }
            if matches!(self.stage, Stage::Hello) && hello::is_of_another_version(&self.bytes[..self.filled])
            {
                return Progress::TurnedAway(Error::protocol("it speaks another version"));
            }
            if self.filled < length {
                continue;
            }
            self.filled = 0;
            match &self.stage {
                Stage::Hello => match self.answer(own, secret, first) {
                    Ok(answerer) => self.stage = Stage::Proof(Box::new(answerer)),
                    Err(progress) => return progress,
                },
                Stage::Proof(answerer) => {
                    let proof = self.bytes.first_chunk().unwrap_or(&[0; TAG]);
                    return match answerer.proven(secret, proof) {
                        Ok((hello, welcome)) => Progress::Proven(hello, welcome),
                        Err(error) => Progress::TurnedAway(error),
                    };
                }
            }
        }
    }

    /// Answers the hello that has come.
    fn answer(&self, own: Hello, secret: &GroupSecret, first: usize) -> Result<Answerer, Progress> {
        let hello = Hello::decode(&self.bytes).map_err(|_| Progress::Dropped)?;
        if hello.rank.index() < first {
            return Err(Progress::TurnedAway(Error::protocol(format!(
                "rank {} does not connect here",
                hello.rank
            ))));
        }
        // Without random numbers nobody can be let in.
        let nonce = nonce().map_err(Progress::TurnedAway)?;
        let own = own.on(hello.channel, hello.rank).saying(nonce);
        let answerer = Answerer::new(secret, &own, hello, self.bytes).map_err(Progress::TurnedAway)?;
        // Few bytes into an empty connection: they go out whole or the connection is broken.
        (&self.stream).write_all(answerer.answer()).map_err(|_| Progress::Dropped)?;
        Ok(answerer)
    }
}

/// Tells a rank above that it is expected, and keeps its connection. A rank that tries again replaces its earlier try.
fn keep(stream: TcpStream, welcome: &Tag, place: &mut Option<TcpStream>) {
    if (&stream).write_all(welcome).and_then(|()| settle(&stream)).is_ok() {
        *place = Some(stream);
    }
}

/// Says no, so that a rank that has no business here gives up at once instead of trying until its deadline.
fn refuse(mut stream: &TcpStream) {
    let _ = stream.write(&hello::REFUSAL);
}
