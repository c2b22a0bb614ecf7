//! A connection of the client: how it is made, and how data is sent and received with a deadline.

use std::collections::VecDeque;
use std::fmt::Display;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use phalanx_sys::tcp;
use rustix::event::{PollFd, PollFlags};

use super::connect_error::{
    ConnectError, closes, no_address, no_answer, not_a_store, not_listening, tls_failed, unexpected_answer,
    wrong_key,
};
use super::resolve::{PAUSES, is_in_kubernetes, naming, resolve};
use crate::credentials::Credentials;
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, Result, no_more_files, no_more_processes};
use crate::host::{loopback_is_down, loopback_remedy};
use crate::interrupt;
use crate::network::Network;
use crate::notice::while_waiting;
use crate::poll::look_first;
use crate::random;
use crate::store::{MAX_VALUE, WATCH_INTERVAL};
use crate::tls::{Session, Tls};
use crate::wire::auth::{TAG, Tag};
use crate::wire::greeting::{self, ANSWER, Initiator, StoreSecret};
use crate::wire::store::{Frame, MAGIC, OWN_ECHO, OWN_PING, Op, WAIT_CANCELLED, WAIT_DONE};

/// How long one address may take to accept.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a server that has accepted may take to answer the greeting.
const GREETING_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to try again when a server closes the connection during the greeting, which one that is shutting down also does.
pub(super) const CLOSING_RETRY_LIMIT: Duration = Duration::from_secs(2);
/// The same of one with TLS, which also closes the connection of a handshake that is slow while others wait: a packet that was lost is enough.
const TLS_CLOSING_RETRY_LIMIT: Duration = Duration::from_secs(10);
/// How long to wait for a server's answer to a cancellation: a key may have come at the last moment. A later answer is read before
/// that of the next request.
const CANCEL_GRACE: Duration = Duration::from_millis(50);
/// The longest time for which a client that waits does not look at something else.
const WATCH_LIMIT: Duration = Duration::from_secs(2);
/// Fewer bytes than these are read together with what follows them.
const SMALL: usize = 512;
/// How long the rest of an answer may take whose beginning has come.
const REST_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the kernel may get no acknowledgement before it gives a connection up, on either side. It is the kernel's own limit: how
/// long an outage may last is for heartbeats and deadlines to say.
pub(super) const ACKNOWLEDGEMENT_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// A connection after the greeting of a store.
#[derive(Debug)]
pub(super) struct Link {
    stream: TcpStream,
    tls: Option<Box<Session>>,
    /// Bytes that came with an earlier read; those from `start` on are unread.
    buffer: Vec<u8>,
    start: usize,
    /// Answers that come before that of the next request. They are not waited for when they are asked for: on a slow network that
    /// would cost a round trip, or a whole connection for each wait that ends.
    owed: VecDeque<Owed>,
    /// Whether the server is ours, and knows [`Op::WaitGet`] and [`Op::CompareSetAfter`]: one that has proven that it knows the key, or has
    /// answered the greeting so.
    pub is_own: bool,
    pub deadline: Deadline,
    /// The process that has made it, and not one that was forked from that.
    process: u32,
}

impl Drop for Link {
    /// With bytes that nobody has read, the kernel would end the connection by a reset instead of its usual end. It sends a reset once: the
    /// server would not know of the end if that packet were lost.
    fn drop(&mut self) {
        const MOST: usize = 64;
        if self.process != std::process::id() {
            // The connection is the parent's.
            return;
        }
        let mut unread = [0; 4096];
        if self.stream.set_nonblocking(true).is_ok() {
            let reads = (0..MOST).take_while(|_| self.stream.read(&mut unread).is_ok_and(|count| count > 0));
            reads.for_each(drop);
        }
        // To close it is not enough: the server waits for the end, and a process that was forked from this one has the connection open, too.
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}

/// An answer that the server owes, and that nobody waits for: it is read, and dropped, before that of the next request.
#[derive(Clone, Copy, Debug)]
enum Owed {
    /// The echo of the ping in a greeting. The server has proven before that it knows the key. If it is of an earlier build, the echo
    /// says so, and the connection is refused then.
    Echo,
    /// The answer to a cancelled wait: that it was cancelled; or first the wait's own answer with so many values, if the keys came
    /// meanwhile.
    Wait { values: usize },
}

/// How a wait ended.
#[derive(Debug)]
pub(super) enum WaitOutcome {
    /// All keys have come: their values, if they were asked for in the same request.
    Values(Vec<Vec<u8>>),
    /// The deadline has passed.
    TimedOut,
    /// The caller does not want to go on, for this reason.
    Stopped(Error),
}

/// How a client is admitted.
#[derive(Clone, Debug)]
pub(super) struct ClientCredentials {
    pub secret: Option<StoreSecret>,
    pub tls: Option<Tls>,
}

impl ClientCredentials {
    pub(super) fn new(credentials: &Credentials) -> Self {
        Self {
            secret: credentials.key.as_ref().map(|key| StoreSecret::new(key.bytes())),
            tls: credentials.tls.clone(),
        }
    }
}

/// How long a client waits for a store, beside its deadline.
pub struct Patience<'a> {
    /// How long a program that listens may be silent. After that it is not a store.
    pub silence: Duration,
    /// Whether the store is still needed. It is asked after each attempt, and while several connections are made several times a second.
    pub goes_on: &'a (dyn Fn() -> bool + Sync),
    /// How many connections to make at once, for a client whose threads use several from the start.
    pub connections: usize,
}

impl Patience<'static> {
    /// Waits until the deadline.
    pub(crate) const WHOLE: Self = Self { silence: Duration::MAX, goes_on: &|| true, connections: 1 };
}

impl Link {
    /// Connects to `address`, `host:port`, until it succeeds or `deadline` has passed. Reports now and then that it is
    /// waiting.
    pub fn connect(
        address: &str,
        credentials: &ClientCredentials,
        deadline: Deadline,
        patience: &Patience<'_>,
    ) -> Result<Self> {
        let last = Mutex::new(String::new());
        let what = || format!("this process waits for the store at {address}{}", last.lock());
        while_waiting(what, || {
            Self::retry_until(address, credentials, deadline, patience, |why| {
                *last.lock() = format!(", to which it cannot connect: {why}")
            })
        })
    }

    /// Tries to connect until it succeeds or `deadline` has passed. `report` gets the error of each attempt.
    pub fn retry_until(
        address: &str,
        credentials: &ClientCredentials,
        deadline: Deadline,
        patience: &Patience<'_>,
        report: impl Fn(&dyn Display),
    ) -> Result<Self> {
        let started = Instant::now();
        let mut backoff = Backoff::new(PAUSES, deadline);
        let (mut closed, mut no_address_since): (Option<Instant>, Option<Instant>) = (None, None);
        let mut silent_since: Option<Instant> = None;
        loop {
            let began = Instant::now();
            let attempt = Self::attempt(address, credentials, deadline);
            // Only what lasts counts: a server may be started again, and a network may cut connections.
            if !matches!(attempt, Err(ConnectError::NoAddress(_))) {
                no_address_since = None;
            }
            if !matches!(attempt, Err(ConnectError::NoAnswer)) {
                silent_since = None;
            }
            // A server that closes connections, and has no time left for the last one, has not become another.
            if !matches!(attempt, Err(ConnectError::Closed | ConnectError::NoAnswer)) {
                closed = None;
            }
            let last = match attempt {
                Ok(link) => return Ok(link),
                Err(ConnectError::OutOfResources(error)) => return Err(error),
                Err(ConnectError::NoAddress(error)) => {
                    let since = *no_address_since.get_or_insert_with(Instant::now);
                    if since.elapsed() >= naming() || backoff.is_last() {
                        return Err(no_address(address, error));
                    }
                    report(&error);
                    None
                }
                Err(ConnectError::NotAStore(what)) => return Err(not_a_store(address, &what)),
                Err(ConnectError::WrongKey) => return Err(wrong_key(address)),
                Err(ConnectError::Tls(error)) => return Err(tls_failed(address, error)),
                // It may be a store that is frozen, or whose machine is busy, which may pass; or another program.
                Err(ConnectError::NoAnswer)
                    if backoff.is_last()
                        || silent_since.get_or_insert(began).elapsed() >= patience.silence =>
                {
                    // Its answer to the last greeting may just have come too late.
                    if closed.is_some() {
                        return Err(closes(address, credentials));
                    }
                    return Err(not_a_store(address, "it accepts connections but does not answer"));
                }
                Err(ConnectError::NoAnswer) => {
                    report(&"what listens there accepts connections but does not answer");
                    None
                }
                Err(ConnectError::Closed) => {
                    let since = *closed.get_or_insert_with(Instant::now);
                    if since.elapsed() >= closing(credentials.tls.is_some(), is_in_kubernetes())
                        || backoff.is_last()
                    {
                        return Err(closes(address, credentials));
                    }
                    report(&closes(address, credentials));
                    None
                }
                Err(ConnectError::NotListening(error)) => {
                    report(&error);
                    Some(error)
                }
            };
            if !(patience.goes_on)() {
                return Err(Error::aborted(format!("the store at {address} is no longer needed")));
            }
            if let Some(error) = last
                && backoff.is_last()
            {
                return Err(not_listening(address, started.elapsed(), error));
            }
            backoff.pause();
        }
    }

    /// Connects to a store that has been there before. If it refuses now, it is gone; if it is slow, it is only slow.
    pub fn reconnect(address: &str, credentials: &ClientCredentials, deadline: Deadline) -> io::Result<Self> {
        use io::ErrorKind::{ConnectionReset, HostUnreachable, InvalidData, NetworkUnreachable, TimedOut};
        let (began, mut backoff) = (Instant::now(), Backoff::new((PAUSES.1, PAUSES.1), deadline));
        loop {
            match Self::attempt(address, credentials, deadline) {
                Ok(link) => return Ok(link),
                Err(ConnectError::NotAStore(what)) => return Err(io::Error::new(InvalidData, what)),
                Err(ConnectError::WrongKey) => {
                    return Err(io::Error::new(InvalidData, "it does not know the job's key"));
                }
                Err(ConnectError::Tls(error)) => return Err(error),
                // Where others wait, it has been too slow for them.
                Err(ConnectError::Closed)
                    if credentials.tls.is_some()
                        && began.elapsed() < TLS_CLOSING_RETRY_LIMIT
                        && !deadline.has_passed() =>
                {
                    interrupt::check_io()?;
                    backoff.pause();
                }
                Err(ConnectError::Closed) => return Err(ConnectionReset.into()),
                // It may come up again.
                Err(ConnectError::OutOfResources(_)) if loopback_is_down() && !deadline.has_passed() => {
                    backoff.pause();
                }
                Err(ConnectError::OutOfResources(error)) => return Err(io::Error::other(error)),
                Err(ConnectError::NoAnswer | ConnectError::NotListening(_) | ConnectError::NoAddress(_))
                    if deadline.has_passed() =>
                {
                    return Err(TimedOut.into());
                }
                Err(ConnectError::NoAnswer) => interrupt::check_io()?,
                // A network may come back. Missing descriptors or ports do not.
                Err(ConnectError::NotListening(error) | ConnectError::NoAddress(error))
                    if matches!(error.kind(), TimedOut | HostUnreachable | NetworkUnreachable) =>
                {
                    interrupt::check_io()?;
                    backoff.pause();
                }
                Err(ConnectError::NotListening(error) | ConnectError::NoAddress(error)) => return Err(error),
            }
        }
    }

    pub fn local_ip(&self) -> io::Result<IpAddr> {
        self.stream.local_addr().map(|address| address.ip())
    }

    pub fn peer(&self) -> io::Result<SocketAddr> {
        self.stream.peer_addr()
    }

    /// What is known of the network, if the server has not answered for `silence`.
    pub fn network(&self, silence: Duration) -> Network {
        Network::behind(&self.stream, silence)
    }

    fn attempt(
        address: &str,
        credentials: &ClientCredentials,
        deadline: Deadline,
    ) -> Result<Self, ConnectError> {
        let mut failure = ConnectError::NotListening(io::ErrorKind::AddrNotAvailable.into());
        let name = |error: io::Error| match no_more_processes(&error).or(no_more_files(&error)) {
            Some(_) => ConnectError::OutOfResources(Error::not_started(
                format!("the name in {address} cannot be looked up"),
                error,
            )),
            None => ConnectError::NoAddress(error),
        };
        for target in resolve(address, deadline).map_err(name)? {
            // An attempt that begins at the very end still has the time for a store on this host.
            let limit = deadline.remaining().clamp(Duration::from_millis(1), CONNECT_TIMEOUT);
            match TcpStream::connect_timeout(&target, limit) {
                // A connection to a free port of this host may by chance be a connection to itself.
                Ok(stream) if stream.local_addr().ok() == Some(target) => {}
                Ok(stream) => return Self::greet(stream, credentials, deadline),
                Err(error) if no_more_files(&error).is_some() => {
                    return Err(ConnectError::OutOfResources(Error::io(
                        format!("cannot connect to the store at {address}"),
                        error,
                    )));
                }
                Err(error) => match loopback_remedy(&target, &error) {
                    Some(remedy) => {
                        let cause = format!("cannot connect to the store at {address}");
                        return Err(ConnectError::OutOfResources(
                            Error::io(cause, error).with_remedy(remedy),
                        ));
                    }
                    None => failure = ConnectError::NotListening(error),
                },
            }
        }
        Err(failure)
    }

    fn greet(
        stream: TcpStream,
        credentials: &ClientCredentials,
        deadline: Deadline,
    ) -> Result<Self, ConnectError> {
        stream.set_nodelay(true).map_err(ConnectError::NotListening)?;
        tcp::recover_soon(&stream, ACKNOWLEDGEMENT_TIMEOUT).map_err(ConnectError::NotListening)?;
        let deadline = deadline.at_most(GREETING_TIMEOUT);
        let mut link = Self::over(stream, deadline);
        let mut secret = credentials.secret.clone();
        if let Some(tls) = &credentials.tls {
            let session = link.encrypt(tls).map_err(no_answer)?;
            if let Some(secret) = &mut secret {
                *secret = secret.bound(&session.binding().map_err(ConnectError::Tls)?);
            }
            link.tls = Some(session);
        }
        let ping = |start: Vec<u8>| [start, Frame::new(Op::Ping).u32(OWN_PING).into_bytes()].concat();
        if let Some(secret) = &secret {
            // Only a server of ours knows the key, and it will admit this client, which knows it too.
            let proof = link.authenticate(secret)?;
            link.send(&ping(proof.to_vec())).map_err(no_answer)?;
            link.is_own = true;
            link.owed.push_back(Owed::Echo);
        } else {
            // What admits this client is sent in one packet with the ping, whose answer shows that it was admitted.
            let echo = link.ask(&ping(Frame::new(Op::Validate).u32(MAGIC).into_bytes()))?;
            link.is_own = is_own(echo).ok_or_else(|| unexpected_answer(&echo))?;
        }
        if let Some(session) = &mut link.tls {
            session.admit();
        }
        Ok(link)
    }

    fn over(stream: TcpStream, deadline: Deadline) -> Self {
        let (buffer, owed, process) = (Vec::new(), VecDeque::new(), std::process::id());
        Self { stream, tls: None, buffer, start: 0, owed, is_own: false, deadline, process }
    }

    /// Sends a request that a server answers if it admits this client. Returns the beginning of the answer.
    fn ask(&mut self, request: &[u8]) -> Result<[u8; 4], ConnectError> {
        // A server that refuses this client's certificate may have closed the connection already, after an alert with
        // the reason.
        let sent = self.send(request);
        if self.tls.is_none() {
            sent.map_err(no_answer)?;
        }
        self.take().map_err(no_answer)
    }

    /// Makes this the connecting side of a TLS connection.
    fn encrypt(&mut self, tls: &Tls) -> io::Result<Box<Session>> {
        let mut session = Box::new(tls.client()?);
        loop {
            let left = Some(self.left()?);
            self.stream.set_read_timeout(left)?;
            self.stream.set_write_timeout(left)?;
            match session.handshake(&mut self.stream) {
                Ok(true) => return Ok(session),
                Ok(false) => {}
                Err(error) => retry(error)?,
            }
        }
    }

    /// Checks that the server knows the secret. Returns the proof that this client does.
    fn authenticate(&mut self, secret: &StoreSecret) -> Result<Tag, ConnectError> {
        let own = random::bytes().map_err(|error| ConnectError::NotListening(io::Error::other(error)))?;
        let initiator = Initiator::new(own);
        let first = self.ask(initiator.call())?;
        if !greeting::is_greeting(&first) {
            return Err(unexpected_answer(&first));
        }
        let mut answer = [0; ANSWER];
        let (start, rest) = answer.split_at_mut(first.len());
        start.copy_from_slice(&first);
        self.fill(rest).map_err(no_answer)?;
        initiator.answered(secret, &answer).ok_or_else(|| {
            // No proof: so whoever serves the store is told that one with another key has come, and not that a client has gone.
            let _ = self.send(&[0; TAG]);
            ConnectError::WrongKey
        })
    }

    /// Writes all of `bytes`.
    pub fn send(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        let mut is_out = true;
        while !(bytes.is_empty() && is_out) {
            self.stream.set_write_timeout(Some(interrupt::at_most(self.left()?)))?;
            let sent = match &mut self.tls {
                Some(session) => session.send(&mut self.stream, &[IoSlice::new(bytes)]),
                None => self.stream.write(bytes).map(|written| (written, true)),
            };
            match sent {
                Ok((0, true)) if !bytes.is_empty() => return Err(io::ErrorKind::WriteZero.into()),
                Ok((written, out)) => (bytes, is_out) = (&bytes[written..], out),
                Err(error) => retry(error).and_then(|()| interrupt::check_io())?,
            }
        }
        Ok(())
    }

    fn read(stream: &mut TcpStream, tls: &mut Option<Box<Session>>, into: &mut [u8]) -> io::Result<usize> {
        match tls {
            Some(session) => session.receive(stream, &mut [IoSliceMut::new(into)]),
            None => stream.read(into),
        }
    }

    /// Reads `N` bytes.
    pub fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.read_owed()?;
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    /// Reads the [owed](Owed) answers, which come before that of the last request. A time-out leaves those that have not begun to come.
    fn read_owed(&mut self) -> io::Result<()> {
        while let Some(owed) = self.owed.front().copied() {
            match owed {
                Owed::Echo => {
                    let mut echo = [0; 4];
                    self.fill(&mut echo[..1])?;
                    self.owed.pop_front();
                    self.rest(|link| link.fill(&mut echo[1..]))?;
                    let wrong = match is_own(echo) {
                        Some(true) => continue,
                        Some(false) => {
                            "it is served by an earlier build; run the same version of Phalanx in all processes of a job"
                        }
                        None => "a ping came back changed",
                    };
                    return Err(io::Error::new(io::ErrorKind::InvalidData, wrong));
                }
                Owed::Wait { values } => {
                    let mut answer = [0];
                    self.fill(&mut answer)?;
                    self.owed.pop_front();
                    if answer == [WAIT_DONE] {
                        self.rest(|link| {
                            (0..values).try_for_each(|_| link.next_value().map(drop))?;
                            link.fill(&mut answer)
                        })?;
                    }
                    if answer != [WAIT_CANCELLED] {
                        return Err(unexpected_wait(answer[0]));
                    }
                }
            }
        }
        Ok(())
    }

    /// Reads the rest of an answer that has begun to come. Unlike other time-outs, one here leaves a connection that cannot be used.
    fn rest<T>(&mut self, read: impl FnOnce(&mut Self) -> io::Result<T>) -> io::Result<T> {
        let deadline = self.deadline;
        self.deadline = deadline.max(Deadline::after(REST_TIMEOUT));
        let rest = read(self);
        self.deadline = deadline;
        rest.map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => io::ErrorKind::ConnectionAborted.into(),
            _ => error,
        })
    }

    pub fn integer(&mut self) -> io::Result<i64> {
        self.take().map(i64::from_le_bytes)
    }

    /// Reads a length and that many bytes; the length is checked first.
    pub fn value(&mut self) -> io::Result<Vec<u8>> {
        self.read_owed()?;
        self.next_value()
    }

    fn next_value(&mut self) -> io::Result<Vec<u8>> {
        let mut length = [0; 8];
        self.fill(&mut length)?;
        let length = u64::from_le_bytes(length);
        let length = usize::try_from(length).ok().filter(|length| *length <= MAX_VALUE).ok_or_else(|| {
            let why = format!("an answer of {length} bytes; the longest is {MAX_VALUE}");
            io::Error::new(io::ErrorKind::InvalidData, why)
        })?;
        let mut bytes = vec![0; length];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    /// Sends `request`, which ends in a wait, and waits for its answer, and for this many `values` after it. `go_on`, if there is one,
    /// is called several times a second, but not while the answer may still be on its way, unless the program checks this
    /// thread's waits. If the keys do not come, the wait is cancelled, and the connection can be used again.
    pub fn wait(
        &mut self,
        request: &[u8],
        values: usize,
        go_on: Option<&mut dyn FnMut() -> Result<()>>,
    ) -> io::Result<WaitOutcome> {
        self.send(request)?;
        self.wait_for_answer(values, go_on)
    }

    /// Ends a wait that has been sent, and whose answer nobody wants.
    pub fn leave_wait(&mut self, values: usize) -> io::Result<()> {
        self.send(&[Op::CancelWait as u8])?;
        self.owed.push_back(Owed::Wait { values });
        Ok(())
    }

    /// Sends `request`, a wait after which the server does something, and reads its `values`. None if the wait was not over at `until`: the
    /// server has then said that it was cancelled, and has done nothing.
    pub fn wait_or_cancel(
        &mut self,
        request: &[u8],
        values: usize,
        until: Deadline,
    ) -> io::Result<Option<Vec<Vec<u8>>>> {
        self.send(request)?;
        let end = self.deadline;
        self.deadline = end.min(until);
        let answer = self.take();
        self.deadline = end;
        match answer {
            Ok([WAIT_DONE]) => return self.values(values).map(Some),
            Ok([other]) => return Err(unexpected_wait(other)),
            Err(error) if error.kind() != io::ErrorKind::TimedOut || end.has_passed() => return Err(error),
            Err(_) => self.send(&[Op::CancelWait as u8])?,
        }
        let came = match self.take()? {
            [WAIT_CANCELLED] => return Ok(None),
            [WAIT_DONE] => self.values(values)?,
            [other] => return Err(unexpected_wait(other)),
        };
        // The wait was over at the last moment. The answer to the cancellation comes after the values.
        match self.take()? {
            [WAIT_CANCELLED] => Ok(Some(came)),
            [other] => Err(unexpected_wait(other)),
        }
    }

    /// Waits until an answer begins to come. Calls `go_on` several times a second; an error of that ends the wait, after which the
    /// connection cannot be used.
    pub fn wait_to_read(&mut self, go_on: &mut dyn FnMut() -> Result<()>) -> io::Result<Result<()>> {
        let end = self.deadline;
        let interval = self.watch_interval();
        let next_look = || end.at_most(interrupt::at_most(interval));
        let mut look_at = next_look();
        while self.start == self.buffer.len() {
            self.deadline = look_at;
            let arrived = self.read_some();
            self.deadline = end;
            match arrived {
                Ok(()) => {}
                Err(error) if error.kind() != io::ErrorKind::TimedOut || end.has_passed() => {
                    return Err(error);
                }
                Err(_) => {
                    if let Err(error) = go_on() {
                        return Ok(Err(error));
                    }
                    look_at = next_look();
                }
            }
        }
        Ok(Ok(()))
    }

    /// [`wait`](Self::wait) after the request has been sent, and the answers before that of the wait read.
    pub fn wait_for_answer(
        &mut self,
        values: usize,
        mut go_on: Option<&mut dyn FnMut() -> Result<()>>,
    ) -> io::Result<WaitOutcome> {
        let end = self.deadline;
        let interval = self.watch_interval();
        let stopped = loop {
            if go_on.is_some() {
                self.deadline = end.at_most(interrupt::at_most(interval));
            }
            match self.take() {
                Ok([WAIT_DONE]) => {
                    self.deadline = end;
                    return self.values(values).map(WaitOutcome::Values);
                }
                Ok([WAIT_CANCELLED]) => return Ok(WaitOutcome::TimedOut),
                Ok([other]) => return Err(unexpected_wait(other)),
                Err(error) if error.kind() != io::ErrorKind::TimedOut => return Err(error),
                Err(_) if end.has_passed() => break None,
                Err(_) => {}
            }
            if let Some(Err(error)) = go_on.as_mut().map(|go_on| go_on()) {
                break Some(error);
            }
        };
        self.deadline = Deadline::after(CANCEL_GRACE);
        if let Some(error) = stopped {
            return self.leave_wait(values).map(|()| WaitOutcome::Stopped(error));
        }
        self.send(&[Op::CancelWait as u8])?;
        match self.take() {
            Ok([WAIT_DONE]) => {
                // The keys have come at the last moment. The answer to the cancellation comes after the values.
                let came = self.values(values)?;
                self.owed.push_back(Owed::Wait { values: 0 });
                Ok(WaitOutcome::Values(came))
            }
            Ok([WAIT_CANCELLED]) => Ok(WaitOutcome::TimedOut),
            Ok([other]) => Err(unexpected_wait(other)),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                self.owed.push_back(Owed::Wait { values });
                Ok(WaitOutcome::TimedOut)
            }
            Err(error) => Err(error),
        }
    }

    /// The values after the answer to a wait.
    fn values(&mut self, count: usize) -> io::Result<Vec<Vec<u8>>> {
        self.rest(|link| (0..count).map(|_| link.next_value()).collect())
    }

    fn fill(&mut self, mut bytes: &mut [u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let buffered = &self.buffer[self.start..];
            if !buffered.is_empty() {
                let n = buffered.len().min(bytes.len());
                bytes[..n].copy_from_slice(&buffered[..n]);
                self.start += n;
                bytes = &mut bytes[n..];
                continue;
            }
            // Long data is read directly into its place; short data is read together with what follows it.
            if bytes.len() < SMALL {
                self.read_some()?;
                continue;
            }
            self.stream.set_read_timeout(Some(interrupt::at_most(self.left()?)))?;
            look_first(&mut [PollFd::new(&self.stream, PollFlags::IN)]);
            match Self::read(&mut self.stream, &mut self.tls, bytes) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => bytes = &mut std::mem::take(&mut bytes)[n..],
                Err(error) => retry(error).and_then(|()| interrupt::check_io())?,
            }
        }
        Ok(())
    }

    /// Reads what comes next into the buffer, which must be empty. It stays empty if the read was cut short, and is to be tried again.
    fn read_some(&mut self) -> io::Result<()> {
        self.stream.set_read_timeout(Some(interrupt::at_most(self.left()?)))?;
        look_first(&mut [PollFd::new(&self.stream, PollFlags::IN)]);
        self.start = 0;
        self.buffer.resize(SMALL, 0);
        let read = Self::read(&mut self.stream, &mut self.tls, &mut self.buffer);
        self.buffer.truncate(*read.as_ref().unwrap_or(&0));
        match read {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => Ok(()),
            Err(error) => retry(error).and_then(|()| interrupt::check_io()),
        }
    }

    /// How often this client looks at something else while it waits.
    fn watch_interval(&self) -> Duration {
        watch_interval(tcp::path(&self.stream).map_or(Duration::ZERO, |path| path.round_trip))
    }

    /// The time left; an error if there is none.
    fn left(&self) -> io::Result<Duration> {
        let left = self.deadline.remaining();
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

/// Whether the server that answered the ping of a greeting with `echo` is ours; PyTorch's, and those of our earlier builds, return it
/// as it was. None if it is no store's answer.
fn is_own(echo: [u8; 4]) -> Option<bool> {
    match u32::from_le_bytes(echo) {
        OWN_ECHO => Some(true),
        OWN_PING => Some(false),
        _ => None,
    }
}

/// How long to try again when what listens closes the connection during the greeting. In Kubernetes a proxy beside each pod does so for as
/// long as the pod that serves the store is not there.
fn closing(has_tls: bool, is_in_kubernetes: bool) -> Duration {
    match (is_in_kubernetes, has_tls) {
        (true, _) => Duration::MAX,
        (false, true) => TLS_CLOSING_RETRY_LIMIT,
        (false, false) => CLOSING_RETRY_LIMIT,
    }
}

/// How often a client that waits looks at something else. On a slow network that takes several round trips itself, in which an answer
/// that has come lies unread; and an answer whose packet was lost comes three round trips later.
fn watch_interval(round_trip: Duration) -> Duration {
    (round_trip * 5).clamp(WATCH_INTERVAL, WATCH_LIMIT)
}

fn unexpected_wait(answer: u8) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("a wait was answered {answer}"))
}

/// Ignores errors after which the caller checks the deadline again.
fn retry(error: io::Error) -> io::Result<()> {
    match error.kind() {
        io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Ok(()),
        _ => Err(error),
    }
}

/// For `phalanx::fuzzing`: a store's answers, to calls that the first bytes name.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> bool {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    const CALLS: usize = 4;
    /// What a socket buffers without being read.
    const MOST: usize = 64 << 10;
    let Some((calls, answer)) = bytes.split_first_chunk::<CALLS>() else { return false };
    let Ok((ours, mut store)) = UnixStream::pair() else { return false };
    let sent =
        store.write_all(&answer[..answer.len().min(MOST)]).and_then(|()| store.shutdown(Shutdown::Write));
    let stream = TcpStream::from(OwnedFd::from(ours));
    let deadline = Deadline::after(Duration::from_secs(10));
    let mut link = Link::over(stream, deadline);
    let understood = calls.iter().take_while(|call| match **call % 5 {
        0 => link.take::<4>().is_ok(),
        1 => link.integer().is_ok(),
        2 => link.value().is_ok_and(|value| value.len() <= MAX_VALUE.min(answer.len())),
        3 => link.wait(&[Op::Wait as u8], 0, None).is_ok(),
        _ => link.wait_or_cancel(&[Op::CompareSetAfter as u8], 1, deadline).is_ok_and(|came| came.is_some()),
    });
    sent.is_ok() && understood.count() == CALLS
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// A process that was forked from this one has a copy of the descriptor, which stays open when this one closes its own.
    #[test]
    fn a_server_sees_the_end_of_a_connection_that_a_forked_process_has_too() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let copy = stream.try_clone().unwrap();
        let mut server = listener.accept().unwrap().0;
        server.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let deadline = Deadline::after(Duration::from_secs(20));
        // What the forked process does with its copy ends nothing: its parent still writes.
        let mut forked = Link::over(copy.try_clone().unwrap(), deadline);
        forked.process = 0;
        drop(forked);
        (&copy).write_all(&[7]).unwrap();
        assert_eq!(server.read(&mut [0]).unwrap(), 1);
        drop(Link::over(stream, deadline));
        assert_eq!(server.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_proxy_that_closes_connections_is_waited_for_where_each_pod_has_one() {
        assert_eq!([false, true].map(|has_tls| closing(has_tls, true)), [Duration::MAX; 2]);
        // Without TLS no store of ours closes a connection only because it is slow.
        assert!(closing(false, false) < closing(true, false) && closing(true, false) < Duration::MAX);
    }

    #[test]
    fn nobody_looks_away_from_an_answer_that_is_on_its_way() {
        let milliseconds = Duration::from_millis;
        assert_eq!(
            [0, 1, 80, 400, 3000].map(|trip| watch_interval(milliseconds(trip)).as_millis()),
            [200, 200, 400, 2000, 2000]
        );
    }
}
