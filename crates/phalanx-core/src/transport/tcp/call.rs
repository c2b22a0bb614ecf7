//! A call to another rank in steps that never wait, so that one thread makes many at once beside others.
//!
//! [`dial`](super::dial) makes the calls of the start, and waits for each answer.

use std::io::{self, ErrorKind, IoSliceMut};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};

use super::connection::Connection;
use super::pending::send_whole;
use crate::error::Error;
use crate::poll::poll;
use crate::rank::Rank;
use crate::tls::{Refusal, Tls};
use crate::wire::auth::TAG;
use crate::wire::handshake::{ANSWER, Answered, GroupSecret, Initiator};
use crate::wire::hello::{HELLO, Hello};
use crate::wire::tls;

/// How long the peer's host may take to answer before it is called anew: the first packets may have been lost.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection on which the handshake has begun.
pub(super) struct Call {
    stream: Connection,
    stage: Stage,
    secret: GroupSecret,
    deadline: Instant,
}

/// What this rank waits for.
enum Stage {
    /// The peer's host.
    Connecting(Hello),
    /// The TLS handshake.
    Tls(Hello),
    /// The peer's hello and proof, of which so many bytes have come.
    Answer(Initiator, Box<[u8; ANSWER]>, usize),
    /// The last message: the peer keeps the connection.
    Welcome(Box<Answered>, [u8; TAG], usize),
}

/// What has come of a call so far.
pub(super) enum Called {
    Waiting(Box<Call>),
    Made(Connection),
}

/// Begins a connection that does not block; [`is_connected`] says when it stands.
pub(super) fn begin_to_connect(address: SocketAddr) -> io::Result<TcpStream> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    match connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(TcpStream::from(socket)),
        Err(error) => Err(error.into()),
    }
}

/// Whether the connection stands, for which this waits so long.
pub(super) fn is_connected(stream: &TcpStream, timeout: Duration) -> io::Result<bool> {
    if poll(&mut [PollFd::new(stream, PollFlags::OUT)], Some(timeout))? == 0 {
        return Ok(false);
    }
    sockopt::socket_error(stream)?.map_err(io::Error::from).map(|()| true)
}

impl Call {
    /// Calls the rank to which `own` is addressed.
    pub(super) fn begin(address: SocketAddr, own: Hello, secret: GroupSecret) -> io::Result<Box<Self>> {
        let stream = Connection::new(begin_to_connect(address)?);
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        Ok(Box::new(Self { stream, stage: Stage::Connecting(own), secret, deadline }))
    }

    /// What to poll it for.
    pub(super) fn awaited(&self) -> (BorrowedFd<'_>, PollFlags) {
        let flags = match self.stage {
            Stage::Connecting(_) => PollFlags::OUT,
            Stage::Tls(_) | Stage::Answer(..) | Stage::Welcome(..) => PollFlags::IN,
        };
        (self.stream.as_fd(), flags)
    }

    /// When it is to be given up, if it waits for the peer's host. Later its silence is judged by the control connection.
    pub(super) fn deadline(&self) -> Option<Instant> {
        matches!(self.stage, Stage::Connecting(_)).then_some(self.deadline)
    }

    /// Goes as far as it can without waiting. `peer` must answer.
    pub(super) fn advance(mut self: Box<Self>, peer: Rank, tls: Option<&Tls>) -> io::Result<Called> {
        loop {
            self.stage = match self.stage {
                Stage::Connecting(own) => {
                    if !is_connected(self.stream.socket(), Duration::ZERO)? {
                        if Instant::now() >= self.deadline {
                            return Err(ErrorKind::TimedOut.into());
                        }
                        self.stage = Stage::Connecting(own);
                        return Ok(Called::Waiting(self));
                    }
                    self.stream.socket().set_nodelay(true)?;
                    match tls {
                        Some(tls) => {
                            self.stream.encrypt(tls.client()?);
                            Stage::Tls(own)
                        }
                        None => say_hello(&self.stream, own)?,
                    }
                }
                Stage::Tls(own) => match self.stream.handshake() {
                    Ok(true) => {
                        if let Some(binding) = self.stream.binding()? {
                            self.secret = self.secret.bound(&binding);
                        }
                        say_hello(&self.stream, own)?
                    }
                    Ok(false) => Stage::Tls(own),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        self.stage = Stage::Tls(own);
                        return Ok(Called::Waiting(self));
                    }
                    Err(error) => return Err(error),
                },
                Stage::Answer(initiator, mut answer, mut filled) => {
                    let received = fill(&self.stream, &mut answer[..], &mut filled);
                    // What came before the end may be a refusal, which is shorter.
                    understand(&answer[..filled], self.stream.is_encrypted())?;
                    if !received? {
                        self.stage = Stage::Answer(initiator, answer, filled);
                        return Ok(Called::Waiting(self));
                    }
                    let answered = initiator.answered(&self.secret, *answer).map_err(invalid)?;
                    if !send_whole(&self.stream, answered.proof()) {
                        return Err(ErrorKind::BrokenPipe.into());
                    }
                    Stage::Welcome(Box::new(answered), [0; TAG], 0)
                }
                Stage::Welcome(answered, mut welcome, mut filled) => {
                    if !fill(&self.stream, &mut welcome, &mut filled)? {
                        self.stage = Stage::Welcome(answered, welcome, filled);
                        return Ok(Called::Waiting(self));
                    }
                    let hello = answered.welcomed(&self.secret, &welcome).map_err(invalid)?;
                    if hello.rank != peer {
                        return Err(invalid(Error::protocol(format!("rank {} answered", hello.rank))));
                    }
                    self.stream.admit();
                    return Ok(Called::Made(self.stream));
                }
            }
        }
    }
}

fn say_hello(stream: &Connection, own: Hello) -> io::Result<Stage> {
    let initiator = Initiator::new(own);
    let is_said = send_whole(stream, initiator.hello());
    // A peer that refuses this rank's certificate may have closed the connection already, after an alert with the reason.
    match is_said || stream.is_encrypted() {
        true => Ok(Stage::Answer(initiator, Box::new([0; ANSWER]), 0)),
        false => Err(ErrorKind::BrokenPipe.into()),
    }
}

/// Receives what has come of a message into the rest of `into`. Returns whether all of it is there.
fn fill(stream: &Connection, into: &mut [u8], filled: &mut usize) -> io::Result<bool> {
    while *filled < into.len() {
        let rest = into.get_mut(*filled..).unwrap_or_default();
        match stream.receive(&mut [IoSliceMut::new(rest)]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => *filled += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// An error if the answer's first bytes say that the peer refuses, or speaks another protocol.
fn understand(start: &[u8], is_encrypted: bool) -> io::Result<()> {
    if let Some(start) = start.get(..tls::REFUSAL.len())
        && !is_encrypted
        && tls::is_alert(start)
    {
        return Err(Refusal::wanted());
    }
    match start.first_chunk::<HELLO>() {
        Some(hello) => Hello::decode(hello).map(drop).map_err(invalid),
        None => Ok(()),
    }
}

fn invalid(error: Error) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, error)
}
