//! How a connection of the client is made: addresses are tried until one answers the greeting, which admits the client.

use std::fmt::Display;
use std::io;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use phalanx_sys::tcp;

use super::super::connect_error::{
    ConnectError, closes, no_address, no_answer, not_a_store, not_listening, tls_failed, unexpected_answer,
    wrong_key,
};
use super::super::resolve::{PAUSES, is_in_kubernetes, naming, resolve};
use super::{ACKNOWLEDGEMENT_TIMEOUT, ClientCredentials, Link, Owed, is_own, keep_alive, retry};
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, Result, no_more_files, no_more_processes};
use crate::host::{loopback_is_down, loopback_remedy};
use crate::interrupt;
use crate::notice::while_waiting_if;
use crate::random;
use crate::tls::{Session, Tls};
use crate::wire::auth::{TAG, Tag};
use crate::wire::greeting::{self, ANSWER, Initiator, StoreSecret};
use crate::wire::store::{Frame, MAGIC, OWN_PING, Op};

/// How long one address may take to accept.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a server that has accepted may take to answer the greeting.
const GREETING_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to try again when a server closes the connection during the greeting, which one that is shutting down also does.
pub(in crate::store::tcp) const CLOSING_RETRY_LIMIT: Duration = Duration::from_secs(2);
/// The same of one with TLS, which also closes the connection of a handshake that is slow while others wait: a packet that was lost is enough.
const TLS_CLOSING_RETRY_LIMIT: Duration = Duration::from_secs(10);
/// The longest pause of a client whose store is not there yet.
const ABSENT_DELAY: Duration = Duration::from_secs(2);

/// How long a client waits for a store, beside its deadline.
pub struct Patience<'a> {
    /// How long a program that listens may be silent. After that it is not a store.
    pub silence: Duration,
    /// Whether the store is still needed. It is asked after each attempt, and several times a second in a long pause, or while several
    /// connections are made.
    pub goes_on: &'a (dyn Fn() -> bool + Sync),
    /// How many connections to make at once, for a client whose threads use several from the start.
    pub connections: usize,
    /// Whether to report now and then that this process waits.
    pub reports: bool,
}

impl Patience<'static> {
    /// Waits until the deadline.
    pub(crate) const WHOLE: Self =
        Self { silence: Duration::MAX, goes_on: &|| true, connections: 1, reports: true };
}

impl Link {
    /// Connects to `address`, `host:port`, until it succeeds or `deadline` has passed. Reports now and then that it is
    /// waiting, if `patience` says so.
    pub fn connect(
        address: &str,
        credentials: &ClientCredentials,
        deadline: Deadline,
        patience: &Patience<'_>,
    ) -> Result<Self> {
        let last = Mutex::new(String::new());
        let what = || format!("this process waits for the store at {address}{}", last.lock());
        while_waiting_if(patience.reports, what, || {
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
            let is_absent =
                matches!(attempt, Err(ConnectError::NotListening(_) | ConnectError::NoAddress(_)));
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
                Err(ConnectError::OutOfResources(error) | ConnectError::Interrupted(error)) => {
                    return Err(error);
                }
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
            interrupt::check()?;
            if !(patience.goes_on)() {
                return Err(Error::aborted(format!("the store at {address} is no longer needed")));
            }
            if let Some(error) = last
                && backoff.is_last()
            {
                return Err(not_listening(address, started.elapsed(), error));
            }
            let next = Instant::now() + absent_pause(started.elapsed(), deadline.remaining());
            backoff.pause();
            // In steps: the program may end the wait, and another connection may have found the store.
            while is_absent && Instant::now() < next && !backoff.is_last() && (patience.goes_on)() {
                interrupt::check()?;
                backoff.pause();
            }
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
                Err(ConnectError::Interrupted(error)) => return Err(interrupt::as_io(error)),
                // It gave way to others, or was too slow for them. One that is gone refuses the next.
                Err(ConnectError::Closed)
                    if began.elapsed() < closing(credentials.tls.is_some(), false)
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

    fn attempt(
        address: &str,
        credentials: &ClientCredentials,
        deadline: Deadline,
    ) -> Result<Self, ConnectError> {
        let mut failure = ConnectError::NotListening(io::ErrorKind::AddrNotAvailable.into());
        let name = |error: io::Error| {
            if let Some(cause) = interrupt::cause(&error) {
                return ConnectError::Interrupted(cause);
            }
            match no_more_processes(&error).or(no_more_files(&error)) {
                Some(_) => ConnectError::OutOfResources(Error::not_started(
                    format!("the name in {address} cannot be looked up"),
                    error,
                )),
                None => ConnectError::NoAddress(error),
            }
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
        keep_alive(&stream);
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
            let left = self.left()?;
            self.stream.set_read_timeout(Some(interrupt::at_most(left)))?;
            self.stream.set_write_timeout(Some(left))?;
            match session.handshake(&mut self.stream) {
                Ok(true) => return Ok(session),
                Ok(false) => {}
                Err(error) => retry(error).and_then(|()| interrupt::check_io())?,
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
}

/// How long a client pauses at least that has waited for so long for a store that is not there, with so much time left. Thousands of ranks may
/// wait for one that comes minutes after them: they ask its host, and the name servers, the less often the longer they have waited. So a start is
/// late by a tenth of the wait at most. Near the end they ask often again: a store that comes at the last moment is found.
fn absent_pause(waited: Duration, left: Duration) -> Duration {
    (waited.min(left) / 10).min(ABSENT_DELAY)
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

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::Relaxed;
    use std::thread;

    use rustix::net::sockopt::{socket_keepalive, tcp_keepidle};

    use super::super::KEEP_ALIVE_INTERVAL;
    use super::*;
    use crate::credentials::Credentials;

    #[test]
    fn a_further_connection_that_gave_way_to_others_is_made_again_and_kept_alive() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = thread::spawn(move || {
            drop(listener.accept().unwrap());
            let (mut stream, _) = listener.accept().unwrap();
            // A validation, and a ping.
            stream.read_exact(&mut [0; 10]).unwrap();
            stream.write_all(&OWN_PING.to_le_bytes()).unwrap();
        });
        let credentials = ClientCredentials::new(&Credentials::default());
        let soon = Deadline::after(Duration::from_secs(20));
        let link = Link::reconnect(&address, &credentials, soon).unwrap();
        server.join().unwrap();
        // Nothing between the hosts forgets it while it is idle, whoever's the server is.
        assert!(socket_keepalive(&link.stream).unwrap());
        assert_eq!(tcp_keepidle(&link.stream).unwrap(), KEEP_ALIVE_INTERVAL);
    }

    #[test]
    fn a_store_that_is_not_there_is_asked_for_seldom_after_a_long_wait_and_often_at_its_end() {
        let pause = |waited, left| {
            absent_pause(Duration::from_millis(waited), Duration::from_millis(left)).as_millis()
        };
        assert_eq!(
            [0, 100, 3000, 20_000, 600_000].map(|waited| pause(waited, 600_000)),
            [0, 10, 300, 2000, 2000]
        );
        assert_eq!([20_000, 5000, 100, 0].map(|left| pause(600_000, left)), [2000, 500, 10, 0]);
        // Not before the pauses of a start that is quick have grown.
        assert!(absent_pause(PAUSES.1 * 10, Duration::MAX) <= PAUSES.1);
    }

    #[test]
    fn who_waits_long_for_a_store_may_be_told_in_a_pause_that_it_is_there() {
        let (asked, tried) = (AtomicUsize::new(0), AtomicUsize::new(0));
        // At first it is asked once after each attempt.
        let goes_on = || asked.fetch_add(1, Relaxed) < tried.load(Relaxed);
        let patience = Patience { goes_on: &goes_on, ..Patience::WHOLE };
        let credentials = ClientCredentials::new(&Credentials::default());
        let soon = Deadline::after(Duration::from_secs(30));
        // Nothing listens there.
        let outcome = Link::retry_until("127.0.0.1:1", &credentials, soon, &patience, |_| {
            tried.fetch_add(1, Relaxed);
        });
        assert!(outcome.is_err_and(|error| error.is_aborted()));
        // It has tried once more.
        assert_eq!(asked.load(Relaxed), tried.load(Relaxed) + 1);
    }

    #[test]
    fn a_proxy_that_closes_connections_is_waited_for_where_each_pod_has_one() {
        assert_eq!([false, true].map(|has_tls| closing(has_tls, true)), [Duration::MAX; 2]);
        // Without TLS no store of ours closes a connection only because it is slow.
        assert!(closing(false, false) < closing(true, false) && closing(true, false) < Duration::MAX);
    }
}
