//! A connection that is not authenticated yet: its limits, and its progress.

use std::io::{self, IoSlice, IoSliceMut};
use std::time::Duration;

use phalanx_sys::tcp;

use super::connection::Connection;
use crate::deadline::Deadline;
use crate::error::Error;
use crate::random;
use crate::tls::{Refusal, Tls};
use crate::wire::auth::{HANDSHAKE_TIMEOUT, TAG, Tag, least_handshake_time};
use crate::wire::handshake::{GroupSecret, Responder};
use crate::wire::hello::{self, HELLO, Hello};
use crate::wire::tls::{self as wire, HELLO_HEAD, LONGEST_HELLO};

/// The most TLS handshakes at once: the state of each takes 10 KiB (see SECURITY.md). The others wait with their first
/// record.
pub(super) const AT_ONCE: usize = 64;

/// A connection whose handshake is not complete.
pub(super) struct Pending {
    pub stream: Connection,
    stage: Stage,
    /// The group's secret, or the one bound to this connection.
    secret: GroupSecret,
    /// The bytes of the next message.
    bytes: [u8; HELLO],
    filled: usize,
    deadline: Deadline,
}

/// All memory of an unauthenticated peer, except for the few whose TLS handshake is in progress.
const _: () = assert!(size_of::<Pending>() + size_of::<Responder>() <= 1024);
const _: () = assert!(size_of::<Pending>() + LONGEST_HELLO <= 4096 && HELLO_HEAD <= HELLO);

/// The next step of the handshake.
enum Stage {
    /// The first TLS record, which comes before our messages. It is empty until its length is known.
    ClientHello(Tls, Vec<u8>),
    /// A permit for the TLS handshake: the record is complete.
    WaitingForTls(Tls, Vec<u8>),
    /// The TLS handshake, which can be dropped for another after this time.
    Tls(Deadline),
    Hello,
    /// The proof of the hello, which was acceptable.
    Proof(Box<Responder>),
}

/// Limits the number of TLS handshakes at once.
pub(super) struct HandshakeLimit {
    pub free: usize,
    pub waiting: usize,
}

impl HandshakeLimit {
    pub(super) fn among(pending: &[Pending]) -> Self {
        let taken = pending.iter().filter(|connection| matches!(connection.stage, Stage::Tls(_))).count();
        let waiting = pending.iter().filter(|connection| connection.waits_for_tls()).count();
        Self { free: AT_ONCE.saturating_sub(taken), waiting }
    }

    /// Takes a permit for one of the waiting connections.
    fn take(&mut self) -> bool {
        if self.free == 0 {
            return false;
        }
        (self.free, self.waiting) = (self.free - 1, self.waiting.saturating_sub(1));
        true
    }

    /// Whether a connection waits for a permit when none is free.
    fn is_exhausted(&self) -> bool {
        self.waiting > self.free
    }
}

pub(super) enum Progress {
    Waiting,
    Dropped,
    /// It follows the protocol, but is not of this group; it gets this answer.
    TurnedAway(Error, &'static [u8]),
    /// It is authenticated, and expects this answer.
    Proven(Hello, Tag),
}

impl Pending {
    /// A new connection.
    pub(super) fn new(stream: Connection, tls: Option<&Tls>, secret: &GroupSecret) -> Self {
        Self {
            stream,
            stage: tls.map_or(Stage::Hello, |tls| Stage::ClientHello(tls.clone(), Vec::new())),
            secret: secret.clone(),
            bytes: [0; HELLO],
            filled: 0,
            deadline: Deadline::after(HANDSHAKE_TIMEOUT),
        }
    }

    /// Gives it more time, for tests whose thread may have to wait for a processor.
    #[cfg(test)]
    pub(super) fn give_time(&mut self) {
        self.deadline = Deadline::after(HANDSHAKE_TIMEOUT * 30);
    }

    /// Whether it waits for a permit.
    pub(super) fn waits_for_tls(&self) -> bool {
        matches!(self.stage, Stage::WaitingForTls(..))
    }

    /// The time of the next check, even without data. None if it waits for others.
    pub(super) fn next_check(&self, limit: &HandshakeLimit) -> Option<Deadline> {
        match &self.stage {
            Stage::WaitingForTls(..) => (limit.free > 0).then(Deadline::now),
            Stage::Tls(droppable_at) if limit.is_exhausted() => Some(self.deadline.min(*droppable_at)),
            _ => Some(self.deadline),
        }
    }

    /// Its progress.
    pub(super) fn progress(&self) -> u8 {
        match self.stage {
            Stage::ClientHello(..) => 0,
            Stage::WaitingForTls(..) => 1,
            Stage::Tls(_) => 2,
            Stage::Hello => 3,
            Stage::Proof(_) => 4,
        }
    }

    /// Receives what has arrived. `own` is this rank's hello, without the fields that depend on the caller. Only ranks
    /// from `first` on may connect.
    pub(super) fn advance(&mut self, own: Hello, first: usize, limit: &mut HandshakeLimit) -> Progress {
        if let Err(progress) = self.secure(limit) {
            return progress;
        }
        loop {
            let length = match &self.stage {
                Stage::Proof(_) => TAG,
                _ => HELLO,
            };
            // Only this message: data after the last one belongs to another thread.
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
                Stage::Proof(responder) => {
                    let proof = self.bytes.first_chunk().unwrap_or(&[0; TAG]);
                    return match responder.proven(&self.secret, proof) {
                        Ok((hello, welcome)) => Progress::Proven(hello, welcome),
                        Err(error) => turned_away(error),
                    };
                }
                _ => match self.answer(own, first) {
                    Ok(responder) => self.stage = Stage::Proof(Box::new(responder)),
                    Err(progress) => return progress,
                },
            }
        }
    }

    /// Continues the TLS handshake, if it is not done. An error is what the connection has come to.
    fn secure(&mut self, limit: &mut HandshakeLimit) -> Result<(), Progress> {
        if let Stage::ClientHello(..) = self.stage {
            self.read_client_hello().map_err(|error| self.interrupted(error))?;
            limit.waiting += 1;
        }
        if let Stage::WaitingForTls(tls, record) = &mut self.stage {
            if !limit.take() {
                return Err(Progress::Waiting);
            }
            let mut session = tls.server().map_err(|_| Progress::Dropped)?;
            session.begin_with(std::mem::take(record));
            self.stream.encrypt(session);
            let round_trip = tcp::path(self.stream.socket()).map_or(Duration::ZERO, |path| path.round_trip);
            self.stage = Stage::Tls(Deadline::after(least_handshake_time(round_trip)));
            // The time that others have taken does not count.
            self.deadline = Deadline::after(HANDSHAKE_TIMEOUT);
        }
        let Stage::Tls(droppable_at) = self.stage else { return Ok(()) };
        loop {
            match self.stream.handshake() {
                Ok(true) => break,
                Ok(false) if !self.deadline.has_passed() => {}
                Ok(false) => return Err(Progress::Dropped),
                Err(error) => {
                    let progress = match self.interrupted(error) {
                        Progress::Waiting if droppable_at.has_passed() && limit.is_exhausted() => {
                            Progress::Dropped
                        }
                        progress => progress,
                    };
                    if !matches!(progress, Progress::Waiting) {
                        limit.free += 1;
                    }
                    return Err(progress);
                }
            }
        }
        // It has a certificate: it is no longer unauthenticated.
        limit.free += 1;
        self.stage = Stage::Hello;
        match self.stream.binding() {
            Ok(Some(binding)) => self.secret = self.secret.bound(&binding),
            Ok(None) | Err(_) => return Err(Progress::Dropped),
        }
        Ok(())
    }

    /// Reads the first TLS record completely. There is no TLS session before that.
    fn read_client_hello(&mut self) -> io::Result<()> {
        let Stage::ClientHello(tls, record) = &mut self.stage else { return Ok(()) };
        while record.is_empty() || self.filled < record.len() {
            let into = match record.is_empty() {
                true => &mut self.bytes[self.filled..HELLO_HEAD],
                false => &mut record[self.filled..],
            };
            match self.stream.receive(&mut [IoSliceMut::new(into)])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => self.filled += count,
            }
            if !wire::is_hello(&self.bytes) {
                self.stream.send(&[IoSlice::new(&wire::REFUSAL)])?;
                return Err(Refusal::plain());
            }
            if record.is_empty()
                && self.filled == HELLO_HEAD
                && let Some(head) = self.bytes.first_chunk::<HELLO_HEAD>()
            {
                let length = wire::hello_length(head).ok_or(io::ErrorKind::InvalidData)?;
                *record = vec![0; length];
                record[..HELLO_HEAD].copy_from_slice(head);
            }
        }
        self.stage = Stage::WaitingForTls(tls.clone(), std::mem::take(record));
        self.filled = 0;
        Ok(())
    }

    /// Nothing more has arrived, or the connection has ended.
    fn interrupted(&self, error: io::Error) -> Progress {
        match Refusal::remedy(&error) {
            // If it uses TLS, it has got an alert.
            Some(_) => Progress::TurnedAway(Error::protocol(error.to_string()), &[]),
            None if error.kind() == io::ErrorKind::WouldBlock && !self.deadline.has_passed() => {
                Progress::Waiting
            }
            None => Progress::Dropped,
        }
    }

    /// Answers the hello that has arrived.
    fn answer(&self, own: Hello, first: usize) -> Result<Responder, Progress> {
        let hello = Hello::decode(&self.bytes).map_err(|_| Progress::Dropped)?;
        if hello.rank.index() < first {
            let error = Error::protocol(format!("rank {} does not connect here", hello.rank));
            return Err(turned_away(error));
        }
        // Without random numbers no rank can be accepted.
        let nonce = random::bytes().map_err(turned_away)?;
        let own = own.on(hello.channel, hello.rank).saying(nonce);
        let responder = Responder::new(&self.secret, &own, hello, self.bytes).map_err(turned_away)?;
        match send_whole(&self.stream, responder.answer()) {
            true => Ok(responder),
            false => Err(Progress::Dropped),
        }
    }
}

/// The answer to a connection whose first bytes are not of this protocol.
fn misunderstood(start: &[u8]) -> Option<Progress> {
    if let Err(error) = hello::check_version(start) {
        return Some(turned_away(error));
    }
    wire::is_hello(start)
        .then(|| Progress::TurnedAway(Error::protocol(Refusal::wanted().to_string()), &wire::REFUSAL))
}

fn turned_away(error: Error) -> Progress {
    Progress::TurnedAway(error, &hello::REFUSAL)
}

/// Sends few bytes on an empty connection: they are sent whole or the connection is broken.
pub(super) fn send_whole(stream: &Connection, bytes: &[u8]) -> bool {
    stream.send(&[IoSlice::new(bytes)]).is_ok_and(|said| said == (bytes.len(), true))
}
