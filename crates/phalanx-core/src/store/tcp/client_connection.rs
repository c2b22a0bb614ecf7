//! A connection of the client: how data is sent and received with a deadline.

mod connect;
mod wait;

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use socket2::{SockRef, TcpKeepalive};

#[cfg(test)]
pub(super) use self::connect::CLOSING_RETRY_LIMIT;
pub use self::connect::Patience;
pub(super) use self::wait::WaitOutcome;
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::interrupt;
use crate::network::Network;
use crate::poll::look_first;
use crate::store::MAX_VALUE;
use crate::tls::{Session, Tls};
use crate::wire::greeting::StoreSecret;
use crate::wire::store::{OWN_ECHO, OWN_PING, WAIT_CANCELLED, WAIT_DONE};

/// Fewer bytes than these are read together with what follows them.
const SMALL: usize = 512;
/// How long the rest of an answer may take whose beginning has come.
const REST_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the kernel may get no acknowledgement before it gives a connection up, on either side. It is the kernel's own limit: how
/// long an outage may last is for heartbeats and deadlines to say.
pub(super) const ACKNOWLEDGEMENT_TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// After this silence the kernel checks whether the other side's host is still alive. Firewalls and address translation so do not forget a
/// connection on which nothing passes.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(30);

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
    /// Whether the server is ours, and knows `Op::WaitGet` and `Op::CompareSetAfter`: one that has proven that it knows the key, or has
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
        if self.is_inherited() {
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

/// Lets the kernel notice that the other side's host has vanished, also while this side only waits. PyTorch's server does not. If a socket
/// refuses the option, it still works.
pub(super) fn keep_alive(stream: &impl AsFd) {
    let probes = TcpKeepalive::new().with_time(KEEP_ALIVE_INTERVAL).with_interval(KEEP_ALIVE_INTERVAL);
    let _ = SockRef::from(stream).set_tcp_keepalive(&probes);
}

impl Link {
    fn over(stream: TcpStream, deadline: Deadline) -> Self {
        let (buffer, owed, process) = (Vec::new(), VecDeque::new(), std::process::id());
        Self { stream, tls: None, buffer, start: 0, owed, is_own: false, deadline, process }
    }

    /// Whether the process from which this one was forked has it, too: requests and answers of both would be mixed, and with TLS one key
    /// would encrypt what both send.
    pub fn is_inherited(&self) -> bool {
        self.process != std::process::id()
    }

    /// As if this process had been forked from the one that has made it.
    #[cfg(test)]
    pub fn is_of_another_process(&mut self) {
        self.process = 0;
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

    use crate::wire::store::Op;

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
        forked.is_of_another_process();
        drop(forked);
        (&copy).write_all(&[7]).unwrap();
        assert_eq!(server.read(&mut [0]).unwrap(), 1);
        drop(Link::over(stream, deadline));
        assert_eq!(server.read(&mut [0]).unwrap(), 0);
    }
}
