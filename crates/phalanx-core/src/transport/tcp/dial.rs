//! Connects to one lower rank: tries until it answers, and does the handshake. [`accept`](super::accept) is the other
//! side.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags};

use super::call::{begin_to_connect, is_connected};
use super::connect::{Address, no_descriptors};
use super::connection::Connection;
use super::stop_probe::StopProbe;
use super::{MeshConfig, start_failure};
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, Kind, Result, is_local_shortage, no_more_files};
use crate::host::loopback_remedy;
use crate::interrupt;
use crate::notice::Reminders;
use crate::poll::look_first;
use crate::random;
use crate::rank::Rank;
use crate::tls::{Refusal, Tls};
use crate::wire::auth::TAG;
use crate::wire::handshake::{ANSWER, Answered, GroupSecret, Initiator};
use crate::wire::hello::{HELLO, Hello};
use crate::wire::tls;

/// How long one attempt to connect may take before the next one: its packets may have been sent before the host was up.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A rank listens before its address is known. If it refuses for this long, it has gone.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(1);
/// A rank that listens answers at once, from a thread that does nothing else. If it has not answered for this long, and for as long as
/// the network may be silent, it is frozen.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a host that is near may take to accept. One that is far away is called a second time, beside the first: where packets are lost,
/// each costs a second, and of two calls one is rarely late.
const NEAR_TIMEOUT: Duration = Duration::from_millis(100);
/// The pause between two attempts grows from the first to the second.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));

/// How long a rank may take to answer.
fn answer_timeout(config: &MeshConfig<'_>) -> Duration {
    ANSWER_TIMEOUT.max(config.heartbeat.network_timeout)
}

/// A connection on which both ranks have proven themselves, with the peer's hello; or why there is none.
pub(super) type Attempt = io::Result<(Connection, Hello)>;

/// Makes the first attempt to connect to each of these peers. All are called before the first answer is read, and so on: so
/// processes that share few processors wait for each other a few times, and not for each connection. All together have the time of one for each answer.
/// What has come of a peer counts also if another has let it pass. If this rank's program ends a wait, no other peer is waited for.
pub(super) fn attempt_together<'a>(
    config: &MeshConfig<'_>,
    peers: impl Iterator<Item = (&'a Address, Hello)>,
    secret: &GroupSecret,
    deadline: Deadline,
) -> Result<Vec<Attempt>> {
    let call = |(address, own)| unless_interrupted(call(config, address, (own, secret), deadline)?);
    let called = peers.map(call).collect::<Result<Vec<_>>>()?;
    let by = || deadline.at_most(answer_timeout(config));
    let proving = by();
    let prove =
        |call: io::Result<Call>| unless_interrupted(call.and_then(|call| call.hear(proving)?.prove()));
    let proven = called.into_iter().map(prove).collect::<Result<Vec<_>>>()?;
    let ending = by();
    let end = |proof: io::Result<Proof>| unless_interrupted(proof.and_then(|proof| proof.end(ending)));
    proven.into_iter().map(end).collect()
}

/// The outcome of one attempt; an error if the program of this rank has ended the wait, and with it all of them.
fn unless_interrupted<T>(outcome: io::Result<T>) -> Result<io::Result<T>> {
    match outcome.as_ref().err().and_then(interrupt::cause) {
        Some(cause) => Err(cause),
        None => Ok(outcome),
    }
}

/// Connects to a peer until it succeeds or the deadline passes: a listener's queue may be full, or a connection may
/// be dropped. Gives up early if another attempt is useless, or if the start `has_failed` in another thread of this rank.
///
/// The outcome of a `first` attempt may be known already.
pub(super) fn dial(
    config: &MeshConfig<'_>,
    host: &str,
    address: &Address,
    (own, secret): (Hello, &GroupSecret),
    mut first: Option<Attempt>,
    has_failed: &AtomicBool,
    deadline: Deadline,
) -> Result<Connection> {
    let peer = own.to;
    let unreachable = format!("rank {peer} ({}) could not be reached at {}", address.host, address.socket);
    let mut backoff = Backoff::new(PAUSES, deadline);
    let answering = answer_timeout(config);
    let mut refusing: Option<Instant> = None;
    let mut reminders = Reminders::of(config.rank, config.world);
    loop {
        if has_failed.load(Ordering::Relaxed) {
            return Err(Error::aborted(format!("{unreachable}: the start has failed at another rank")));
        }
        let attempt = match first.take() {
            Some(attempt) => attempt,
            None => {
                let heard = call_far(config, address, (own, secret), deadline)?;
                let end = |proof: Proof| proof.end(deadline.at_most(answering));
                unless_interrupted(heard.and_then(Heard::prove).and_then(end))?
            }
        };
        let error = match attempt {
            Ok((stream, hello)) if hello.rank == peer => return Ok(stream),
            Ok((_, hello)) => {
                return Err(Error::protocol(format!("{unreachable}: rank {} answered", hello.rank))
                    .with_peer(peer)
                    .with_remedy("do all hosts have addresses of their own?"));
            }
            Err(error) => error,
        };
        match error.kind() {
            io::ErrorKind::InvalidData => {
                let remedy = Refusal::remedy(&error).unwrap_or(
                    "start every rank with the same build, the same job key (PHALANX_JOB_KEY_FILE) and the same \
                     world size",
                );
                return Err(Error::io(unreachable, error).with_peer(peer).with_remedy(remedy));
            }
            // The time-out for reading the answer has passed.
            io::ErrorKind::WouldBlock if !deadline.has_passed() => {
                return Err(StopProbe::new(config).explain(peer, no_answer(peer, address, answering)));
            }
            _ if no_more_files(&error).is_some() => return Err(no_descriptors(&unreachable, error)),
            _ if is_local_shortage(&error) => return Err(Error::io(unreachable, error)),
            io::ErrorKind::ConnectionRefused => {
                if refusing.get_or_insert_with(Instant::now).elapsed() >= REFUSAL_TIMEOUT {
                    return Err(start_failure::gone(peer, address));
                }
            }
            _ => refusing = None,
        }
        let loopback = loopback_remedy(&address.socket, &error);
        if loopback.is_some() || backoff.is_last() {
            return Err(Error::io(unreachable, error)
                .with_peer(peer)
                .with_remedy(loopback.unwrap_or("is it alive, and does a firewall stand between?")));
        }
        reminders.remind(|| format!("rank {} waits: {unreachable}: {error}", config.rank));
        backoff.pause();
        interrupt::check()?;
        if backoff.is_longest() {
            let until = deadline.at_most(start_failure::LAST_MESSAGE_TIMEOUT);
            start_failure::check(config, host, until).map_err(|error| match error.peer() {
                // The store has gone, and with it the rank that served it.
                None if refusing.is_some() => start_failure::gone(peer, address),
                _ => error,
            })?;
        }
    }
}

/// The error for a rank whose host accepts connections, while the rank itself sends nothing.
fn no_answer(peer: Rank, address: &Address, answering: Duration) -> Error {
    let Address { host, socket } = address;
    let cause = format!("rank {peer} ({host}) has not answered at {socket} for {} s", answering.as_secs());
    Error::new(Kind::PeerFailed, cause)
        .with_peer(peer)
        .with_remedy("is its process stopped, or its host out of memory?")
}

/// A connection on which this rank has said hello.
///
/// After its hello, a rank waits for each answer: without the last one it could count on a peer that has dropped the connection.
struct Call {
    stream: Connection,
    initiator: Initiator,
    secret: GroupSecret,
    is_encrypted: bool,
}

/// A connection on which the peer has answered. It keeps the one on which this rank then proves itself.
struct Heard {
    stream: Connection,
    answered: Answered,
    secret: GroupSecret,
}

/// A connection on which this rank has proven itself, and the peer too.
struct Proof {
    stream: Connection,
    answered: Answered,
    secret: GroupSecret,
}

/// Connects and says hello. The outer error concerns this rank alone.
fn call(
    config: &MeshConfig<'_>,
    address: &Address,
    (own, secret): (Hello, &GroupSecret),
    deadline: Deadline,
) -> Result<io::Result<Call>> {
    let hello = Greeting::new(config, (own, secret), deadline)?;
    let connected = begin_to_connect(address.socket).and_then(|stream| hello.until_connected(stream));
    unless_interrupted(connected.and_then(|stream| hello.say(stream)))
}

/// Connects, says hello, and takes the answer; if the host is far away, on the first of two connections on which it comes. The peer keeps
/// neither before this rank has proven itself, and forgets the other. The outer error concerns this rank alone.
fn call_far(
    config: &MeshConfig<'_>,
    address: &Address,
    (own, secret): (Hello, &GroupSecret),
    deadline: Deadline,
) -> Result<io::Result<Heard>> {
    let hello = Greeting::new(config, (own, secret), deadline)?;
    let near = begin_to_connect(address.socket).and_then(|stream| {
        let is_near = is_connected(&stream, NEAR_TIMEOUT.min(deadline.remaining()))?;
        Ok((stream, is_near))
    });
    let first = match near {
        Err(error) => return Ok(Err(error)),
        Ok((stream, true)) => {
            return Ok(hello.until_connected(stream).and_then(|stream| hello.hear(stream)));
        }
        Ok((stream, false)) => stream,
    };
    let (heard, coming) = mpsc::channel();
    let is_decided = Arc::new(AtomicBool::new(false));
    let another = Greeting::new(config, (own, secret), deadline)?;
    let second = begin_to_connect(address.socket);
    // Without a thread, the first call has to do.
    let _ = another.hear_apart(second, Arc::clone(&is_decided), heard.clone());
    let outcome = match hello.hear_apart(Ok(first), Arc::clone(&is_decided), heard) {
        Ok(()) => first_answer(&coming),
        // So it has to do in this one.
        Err(stream) => stream.and_then(|stream| hello.hear(hello.until_connected(stream)?)),
    };
    is_decided.store(true, Ordering::Relaxed);
    Ok(outcome)
}

/// The first answer to two calls; if none answers, why the last has not. What shows another build, or another key, counts at once.
fn first_answer(coming: &Receiver<io::Result<Heard>>) -> io::Result<Heard> {
    let mut failed = None;
    for outcome in coming {
        match outcome {
            Err(error) if error.kind() != io::ErrorKind::InvalidData => failed = Some(error),
            decisive => return decisive,
        }
    }
    Err(failed.unwrap_or_else(|| io::Error::other("a thread that connects ranks panicked")))
}

/// What a call says.
#[derive(Clone)]
struct Greeting {
    own: Hello,
    secret: GroupSecret,
    tls: Option<Tls>,
    /// How long the peer may take for each answer.
    answering: Duration,
    deadline: Deadline,
}

impl Greeting {
    fn new(
        config: &MeshConfig<'_>,
        (own, secret): (Hello, &GroupSecret),
        deadline: Deadline,
    ) -> Result<Self> {
        Ok(Self {
            own: own.saying(random::bytes()?),
            secret: secret.clone(),
            tls: config.credentials.tls.clone(),
            answering: answer_timeout(config),
            deadline,
        })
    }

    /// Waits until the connection stands. From then on it blocks.
    fn until_connected(&self, stream: TcpStream) -> io::Result<TcpStream> {
        let until = self.deadline.at_most(CONNECT_TIMEOUT);
        while !is_connected(&stream, interrupt::at_most(until.remaining()).max(Duration::from_millis(1)))? {
            if until.has_passed() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            interrupt::check_io()?;
        }
        stream.set_nonblocking(false)?;
        Ok(stream)
    }

    fn say(&self, stream: TcpStream) -> io::Result<Call> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(self.deadline.remaining().max(Duration::from_millis(1))))?;
        let mut stream = Connection::new(stream);
        let secret = match &self.tls {
            Some(tls) => secure(&mut stream, &self.secret, tls, self.deadline.at_most(self.answering))?,
            None => self.secret.clone(),
        };
        let initiator = Initiator::new(self.own);
        let said = send_all(&stream, initiator.hello());
        // A peer that refuses this rank's certificate may have closed the connection already, after an alert with the
        // reason.
        if self.tls.is_none() {
            said?;
        }
        Ok(Call { stream, initiator, secret, is_encrypted: self.tls.is_some() })
    }

    /// Says hello and takes the answer.
    fn hear(&self, stream: TcpStream) -> io::Result<Heard> {
        self.say(stream)?.hear(self.deadline.at_most(self.answering))
    }

    /// The same in a thread of its own, when the connection stands. If another call `is_decided` by then, the connection is closed. Without
    /// a thread it gives the stream back.
    fn hear_apart(
        &self,
        stream: io::Result<TcpStream>,
        is_decided: Arc<AtomicBool>,
        heard: Sender<io::Result<Heard>>,
    ) -> Result<(), io::Result<TcpStream>> {
        let kept = Arc::new(Mutex::new(Some(stream)));
        let (own, given) = (self.clone(), Arc::clone(&kept));
        let hear = move || {
            let Some(stream) = given.lock().take() else { return };
            let connected = stream.and_then(|stream| own.until_connected(stream));
            let outcome = connected.and_then(|stream| match is_decided.load(Ordering::Relaxed) {
                true => Err(io::ErrorKind::Interrupted.into()),
                false => own.hear(stream),
            });
            drop(heard.send(outcome));
        };
        match thread::Builder::new().name("phalanx-call".into()).spawn(hear) {
            Ok(_) => Ok(()),
            Err(error) => Err(kept.lock().take().unwrap_or(Err(error))),
        }
    }
}

fn invalid(error: Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl Call {
    /// Takes the peer's answer.
    fn hear(self, by: Deadline) -> io::Result<Heard> {
        let Self { stream, initiator, secret, is_encrypted } = self;
        let mut answer = [0; ANSWER];
        let (hello, proof) = answer.split_at_mut(HELLO);
        // A refusal is no longer than a hello, and that of a peer with TLS is much shorter.
        let (start, rest) = hello.split_at_mut(tls::REFUSAL.len());
        receive_all(&stream, start, by)?;
        if !is_encrypted && tls::is_alert(start) {
            return Err(Refusal::wanted());
        }
        receive_all(&stream, rest, by)?;
        if let Some(hello) = hello.first_chunk() {
            Hello::decode(hello).map_err(invalid)?;
        }
        receive_all(&stream, proof, by)?;
        let answered = initiator.answered(&secret, answer).map_err(invalid)?;
        Ok(Heard { stream, answered, secret })
    }
}

impl Heard {
    /// Sends this rank's proof.
    fn prove(self) -> io::Result<Proof> {
        let Self { stream, answered, secret } = self;
        send_all(&stream, answered.proof())?;
        Ok(Proof { stream, answered, secret })
    }
}

impl Proof {
    /// Takes the last message: the peer keeps the connection.
    fn end(self, by: Deadline) -> Attempt {
        let Self { stream, answered, secret } = self;
        let mut welcome = [0; TAG];
        receive_all(&stream, &mut welcome, by)?;
        let hello = answered.welcomed(&secret, &welcome).map_err(invalid)?;
        stream.admit();
        stream.socket().set_nonblocking(true)?;
        Ok((stream, hello))
    }
}

/// Starts TLS on the connection. Returns the group's secret bound to this connection.
fn secure(
    stream: &mut Connection,
    secret: &GroupSecret,
    tls: &Tls,
    deadline: Deadline,
) -> io::Result<GroupSecret> {
    stream.encrypt(tls.client()?);
    loop {
        let left = deadline.remaining();
        if left.is_zero() {
            // As a read that has timed out.
            return Err(io::ErrorKind::WouldBlock.into());
        }
        stream.socket().set_read_timeout(Some(interrupt::at_most(left)))?;
        match stream.handshake() {
            Ok(true) => break,
            Ok(false) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                interrupt::check_io()?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(stream.binding()?.map_or_else(|| secret.clone(), |binding| secret.bound(&binding)))
}

/// Sends all of `bytes` on a blocking connection.
fn send_all(stream: &Connection, mut bytes: &[u8]) -> io::Result<()> {
    loop {
        let (taken, is_out) = stream.send(&[IoSlice::new(bytes)])?;
        bytes = &bytes[taken..];
        match (bytes.is_empty(), is_out) {
            (true, true) => return Ok(()),
            (_, true) => {}
            // The time-out for sending has passed.
            (_, false) => return Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

/// Fills `into` from a blocking connection, whose peer should answer at once. What has come counts after the deadline too: this process
/// may have been stopped, or have waited for another peer.
fn receive_all(stream: &Connection, mut into: &mut [u8], deadline: Deadline) -> io::Result<()> {
    while !into.is_empty() {
        let left = deadline.remaining();
        let timeout = interrupt::at_most(left).max(Duration::from_millis(1));
        stream.socket().set_read_timeout(Some(timeout))?;
        look_first(&mut [PollFd::new(stream.socket(), PollFlags::IN)]);
        match stream.receive(&mut [IoSliceMut::new(into)]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => into = &mut into[count..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !left.is_zero() => {
                interrupt::check_io()?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
