//! A connection that has not shown yet whose it is: what it may take, and how far it has come.

use std::io::{self, IoSlice, IoSliceMut};
use std::time::Duration;

use super::connection::Connection;
use crate::deadline::Deadline;
use crate::error::Error;
use crate::tls::{Refusal, Tls};
use crate::wire::auth::{TAG, Tag, nonce};
use crate::wire::handshake::{Answerer, GroupSecret};
use crate::wire::hello::{self, HELLO, Hello};
use crate::wire::tls::{self as wire, HELLO_HEAD, LONGEST_HELLO};

/// A stranger gets this long to introduce itself, and to prove it; with TLS, for its client hello and then once more.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(2);
/// The most TLS handshakes at once: what they take, some 12 KiB each, is rustls's state. The others wait with their first
/// record.
pub(super) const AT_ONCE: usize = 64;
/// How long a TLS handshake may take while others wait for a turn.
pub(super) const PATIENCE: Duration = Duration::from_millis(500);

/// A connection that has not introduced itself yet.
pub(super) struct Pending {
    pub stream: Connection,
    stage: Stage,
    /// The group's, or the one that it has on this connection.
    secret: GroupSecret,
    /// Of the message that comes next.
    bytes: [u8; HELLO],
    filled: usize,
    deadline: Deadline,
}

/// All that a stranger takes, but for the few whose turn it is in TLS.
const _: () = assert!(size_of::<Pending>() + size_of::<Answerer>() <= 1024);
const _: () = assert!(size_of::<Pending>() + LONGEST_HELLO <= 4096 && HELLO_HEAD <= HELLO);

/// What is waited for.
enum Stage {
    /// The first record of TLS, which comes before ours; it is empty until its length is known.
    ClientHello(Tls, Vec<u8>),
    /// A turn: the record is there.
    Turn(Tls, Vec<u8>),
    /// The TLS handshake, which gives way from then on.
    Tls(Deadline),
    Hello,
    /// What proves the hello, which was sensible.
    Proof(Box<Answerer>),
}

/// Who may have the state of a TLS handshake.
pub(super) struct Turns {
    pub free: usize,
    pub waiting: usize,
}

impl Turns {
    pub(super) fn among(pending: &[Pending]) -> Self {
        let taken = pending.iter().filter(|connection| matches!(connection.stage, Stage::Tls(_))).count();
        let waiting = pending.iter().filter(|connection| connection.waits()).count();
        Self { free: AT_ONCE.saturating_sub(taken), waiting }
    }

    /// For one of those that wait.
    fn take(&mut self) -> bool {
        if self.free == 0 {
            return false;
        }
        (self.free, self.waiting) = (self.free - 1, self.waiting.saturating_sub(1));
        true
    }

    /// Does a connection wait for which there is no place?
    fn are_wanted(&self) -> bool {
        self.waiting > self.free
    }
}

pub(super) enum Progress {
    Waiting,
    Dropped,
    /// It speaks our language, but is not one of us; it is told so.
    TurnedAway(Error, &'static [u8]),
    /// It is who it says, and expects this answer.
    Proven(Hello, Tag),
}

impl Pending {
    /// One that has just come.
    pub(super) fn new(stream: Connection, tls: Option<&Tls>, secret: &GroupSecret) -> Self {
        Self {
            stream,
            stage: tls.map_or(Stage::Hello, |tls| Stage::ClientHello(tls.clone(), Vec::new())),
            secret: secret.clone(),
            bytes: [0; HELLO],
            filled: 0,
            deadline: Deadline::after(HANDSHAKE),
        }
    }

    /// Does it wait for its turn?
    pub(super) fn waits(&self) -> bool {
        matches!(self.stage, Stage::Turn(..))
    }

    /// When to look at it, even if it says nothing; never, if it waits for others.
    pub(super) fn patience(&self, turns: &Turns) -> Option<Deadline> {
        match &self.stage {
            Stage::Turn(..) => (turns.free > 0).then(Deadline::now),
            Stage::Tls(gives_way) if turns.are_wanted() => Some(self.deadline.min(*gives_way)),
            _ => Some(self.deadline),
        }
    }

    /// How far it has got.
    pub(super) fn progress(&self) -> u8 {
        match self.stage {
            Stage::ClientHello(..) => 0,
            Stage::Turn(..) => 1,
            Stage::Tls(_) => 2,
            Stage::Hello => 3,
            Stage::Proof(_) => 4,
        }
    }

    /// Takes what has come. `own` is this rank's hello, but for what depends on who calls; the ranks from `first` on may.
    pub(super) fn advance(&mut self, own: Hello, first: usize, turns: &mut Turns) -> Progress {
        if let Err(progress) = self.secure(turns) {
            return progress;
        }
        loop {
            let length = match &self.stage {
                Stage::Proof(_) => TAG,
                _ => HELLO,
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
                Stage::Proof(answerer) => {
                    let proof = self.bytes.first_chunk().unwrap_or(&[0; TAG]);
                    return match answerer.proven(&self.secret, proof) {
                        Ok((hello, welcome)) => Progress::Proven(hello, welcome),
                        Err(error) => turned_away(error),
                    };
                }
                _ => match self.answer(own, first) {
                    Ok(answerer) => self.stage = Stage::Proof(Box::new(answerer)),
                    Err(progress) => return progress,
                },
            }
        }
    }

    /// Takes TLS further, if it is not done; otherwise gives what comes of that.
    fn secure(&mut self, turns: &mut Turns) -> Result<(), Progress> {
        if let Stage::ClientHello(..) = self.stage {
            self.read_client_hello().map_err(|error| self.interrupted(error))?;
            turns.waiting += 1;
        }
        if let Stage::Turn(tls, record) = &mut self.stage {
            if !turns.take() {
                return Err(Progress::Waiting);
            }
            let mut session = tls.server().map_err(|_| Progress::Dropped)?;
            session.begin_with(std::mem::take(record));
            self.stream.encrypt(session);
            self.stage = Stage::Tls(Deadline::after(PATIENCE));
            // How long the others have taken is not its fault.
            self.deadline = Deadline::after(HANDSHAKE);
        }
        let Stage::Tls(gives_way) = self.stage else { return Ok(()) };
        loop {
            match self.stream.handshake() {
                Ok(true) => break,
                Ok(false) if !self.deadline.has_passed() => {}
                Ok(false) => return Err(Progress::Dropped),
                Err(error) => {
                    let progress = match self.interrupted(error) {
                        Progress::Waiting if gives_way.has_passed() && turns.are_wanted() => {
                            Progress::Dropped
                        }
                        progress => progress,
                    };
                    if !matches!(progress, Progress::Waiting) {
                        turns.free += 1;
                    }
                    return Err(progress);
                }
            }
        }
        // It has a certificate: it is no stranger any more.
        turns.free += 1;
        self.stage = Stage::Hello;
        match self.stream.binding() {
            Ok(Some(binding)) => self.secret = self.secret.bound(&binding),
            Ok(None) | Err(_) => return Err(Progress::Dropped),
        }
        Ok(())
    }

    /// Hears the first record of TLS to its end. Before that no state of TLS is made.
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
        self.stage = Stage::Turn(tls.clone(), std::mem::take(record));
        self.filled = 0;
        Ok(())
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

/// What there is to say to a connection that begins so, if that is all wrong.
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

/// Few bytes into an empty connection: they go out whole or the connection is broken.
pub(super) fn say(stream: &Connection, bytes: &[u8]) -> bool {
    stream.send(&[IoSlice::new(bytes)]).is_ok_and(|said| said == (bytes.len(), true))
}
