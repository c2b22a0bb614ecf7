//! Connections for data and messages between ranks of one host that are made at their first use, in groups of many ranks.
//!
//! Each pair of ranks has three connections, so their number grows with the square of the ranks, and with it the time of a start; but in
//! a large group most pairs never exchange anything: a ring has two neighbours, a tree a few. Only the control connections are
//! made at the start, because every rank must hear of every death. A rank that sends calls the other; one that receives waits for the call,
//! as for anything that another rank has to do. One thread of each rank answers calls and makes them, so no wait is longer
//! because a user's thread is busy elsewhere, and what it decides is decided once. NCCL and gloo's lazy pairs do likewise.
//!
//! **Two ranks may call each other at once.** Then the call of the higher rank is kept, and the other one is dropped ([`verdict`]): the
//! lower rank accepts while it calls, the higher one does not. A rank that is dropped calls again after a pause, and finds by then
//! that it has the connection. A connection is never replaced: there may be data in it.
//!
//! A peer that has died or left is named by its control connection, which ends the wait; one that does not answer is waited for until the
//! deadline of the operation, or until its heartbeats stop. What a peer has sent before it left still counts: a connection is
//! there for all threads before anything that was said after it (`Requests::settle`, `Connections::may_come`). Small groups connect all pairs at the start: there a first collective
//! that is quick is worth more. So do pairs on different hosts: what keeps them from meeting, such as a firewall, is told at the start, and
//! nobody from outside reaches a rank that listens later.

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use rustix::process::{Resource, getrlimit};

use super::accept::take_arrivals;
use super::call::{Call, Called};
use super::connect::{Address, no_descriptors};
use super::connections::{Connections, Requests};
use super::pending::{HandshakeLimit, Pending, Progress, send_whole};
use crate::deadline::Deadline;
use crate::error::{Error, Result, is_local_shortage, no_more_files};
use crate::health::Health;
use crate::poll::poll;
use crate::random;
use crate::rank::Rank;
use crate::tls::{Refusal, Tls};
use crate::wire::handshake::GroupSecret;
use crate::wire::hello::{Channel, Hello};
use crate::world_size::WorldSize;

/// Groups of up to this many ranks make all connections at the start.
const EAGER_WORLD: u32 = 16;
/// The pause between two calls of one rank grows from the first to the second.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));
/// The pause in accepting when there is no descriptor for another connection.
const FULL_INTERVAL: Duration = Duration::from_millis(100);
/// How long a rank goes on without a descriptor for its own calls, or for those of others. Whatever takes them may give some back.
const SHORTAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a call may go on to a peer that has said goodbye: what that has answered before is on its way.
const LEFT_GRACE: Duration = Duration::from_secs(2);
/// How often to look whether a peer that is called has left.
const LEFT_POLL_INTERVAL: Duration = Duration::from_millis(500);
/// After so long a time without an answer the user is told.
const REMINDER_DELAY: Duration = Duration::from_secs(5);
/// The most calls of others whose ranks are not known yet, and the share of this process's descriptors that they may take in one group.
const MAX_UNPROVEN: usize = 256;
const DESCRIPTORS_SHARE: u64 = 16;

/// Which connections a pair of ranks makes at the start of a group of this size. The two are on one host if they have the same address.
pub(super) fn at_start(world: WorldSize, is_within_host: bool) -> &'static [Channel] {
    if is_on_demand(world) && is_within_host { &[Channel::Control] } else { &Channel::ALL }
}

/// Whether pairs on one host make some of their connections later.
pub(super) fn is_on_demand(world: WorldSize) -> bool {
    world.get() > EAGER_WORLD
}

/// What becomes of a peer's call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is the pair's connection.
    Keep,
    /// It is the pair's connection, and this rank's own call is dropped.
    KeepInstead,
    Refuse,
}

/// What a rank knows of its connection with a peer when the peer calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Known {
    Nothing,
    /// This rank calls the peer.
    Calls,
    Connected,
}

/// Whether `own` keeps a call of `peer`. The two ranks decide alike: of two calls at once, both keep the higher rank's.
pub(super) fn verdict(own: Rank, peer: Rank, known: Known) -> Verdict {
    match known {
        Known::Nothing => Verdict::Keep,
        Known::Calls if peer > own => Verdict::KeepInstead,
        // The peer keeps this rank's call.
        Known::Calls => Verdict::Refuse,
        Known::Connected => Verdict::Refuse,
    }
}

/// Makes the connections of a rank after the start.
pub(crate) struct Caller {
    listener: TcpListener,
    addresses: Vec<Address>,
    own: Hello,
    secret: GroupSecret,
    tls: Option<Tls>,
    /// Calls of others, and own ones.
    pending: Vec<Pending>,
    calls: Vec<OwnCall>,
    woken: Arc<OwnedFd>,
    /// When to accept again: there was no descriptor for another connection.
    full_until: Option<Instant>,
    /// Since when there is none, although no call is under way that could give one back.
    short_since: Option<Instant>,
    /// Given up for a rank's call when there is no other descriptor.
    spare: Option<OwnedFd>,
}

/// A call of this rank, or the pause before it.
struct OwnCall {
    channel: Channel,
    peer: Rank,
    call: Option<Box<Call>>,
    /// When it is made anew, and the pause after that.
    again: (Instant, Duration),
    began: Instant,
    has_reminded: bool,
    /// Since when this rank lacks a descriptor, or memory, for it.
    short_since: Option<Instant>,
    /// When the peer was first seen to have left.
    left: Option<Instant>,
}

impl Caller {
    /// Takes over what the start has left: the listener, and the calls of ranks that were ready earlier.
    pub(super) fn new(
        listener: TcpListener,
        addresses: Vec<Address>,
        (own, secret): (Hello, GroupSecret),
        tls: Option<Tls>,
        pending: Vec<Pending>,
    ) -> Result<(Self, Requests)> {
        let (requests, woken) = Requests::new()?;
        let caller = Self {
            listener,
            addresses,
            own,
            secret,
            tls,
            pending,
            calls: Vec::new(),
            woken,
            full_until: None,
            short_since: None,
            spare: spare(),
        };
        Ok((caller, requests))
    }

    /// Answers and calls until the group ends or fails.
    pub(super) fn run(mut self, connections: &Connections, requests: &Requests, health: &Health) {
        while let Err(error) = self.work(connections, requests, health) {
            health.fail(error);
        }
    }

    fn work(&mut self, connections: &Connections, requests: &Requests, health: &Health) -> Result<()> {
        loop {
            let Some(new) = requests.take().filter(|_| !health.has_failed()) else { return Ok(()) };
            for (channel, peer) in new {
                let began = Instant::now();
                let again = (began, PAUSES.0);
                self.calls.push(OwnCall {
                    channel,
                    peer,
                    call: None,
                    again,
                    began,
                    has_reminded: false,
                    short_since: None,
                    left: None,
                });
            }
            if self.call(connections, requests, health)? {
                requests.tell();
            }
            match self.wait()? {
                Some(true) => self.accept()?,
                // Whoever came without a descriptor for it has gone.
                Some(false) => self.short_since = None,
                None => {}
            }
            if self.answer(connections, requests, health) {
                requests.tell();
            }
        }
    }

    /// Accepts what is in the listener's queue, from this host. If there is no descriptor left, it is a rank or a stranger who came: the
    /// spare one is for a look who it is. A stranger gives it back; a rank keeps it, and if there is none for the next, the group fails.
    fn accept(&mut self) -> Result<()> {
        let most = most_unproven();
        let mut take = || {
            let full =
                take_arrivals(&self.listener, self.tls.as_ref(), most, &self.secret, &mut self.pending);
            self.pending.retain(|connection| connection.stream.is_within_host());
            full
        };
        let mut full = take();
        if full.is_err() && self.spare.take().is_some() {
            full = take();
        }
        self.full_until = (!matches!(full, Ok(false))).then(|| Instant::now() + FULL_INTERVAL);
        match full {
            Ok(_) => {
                self.short_since = None;
                Ok(())
            }
            Err(error) => {
                let since = *self.short_since.get_or_insert_with(Instant::now);
                if since.elapsed() < SHORTAGE_TIMEOUT { Ok(()) } else { Err(error) }
            }
        }
    }

    /// Waits until something can be done. Returns whether a connection is in the listener's queue; none if nobody has looked.
    fn wait(&self) -> Result<Option<bool>> {
        // A listener whose queue cannot be emptied would be ready again and again.
        let full_until = self.full_until.filter(|until| Instant::now() < *until);
        let at_listener = if full_until.is_some() { PollFlags::empty() } else { PollFlags::IN };
        let mut fds = vec![
            PollFd::from_borrowed_fd(self.woken.as_fd(), PollFlags::IN),
            PollFd::new(&self.listener, at_listener),
        ];
        let limit = HandshakeLimit::among(&self.pending);
        let heard = self.pending.iter().filter(|connection| !connection.waits_for_tls());
        fds.extend(heard.map(|connection| PollFd::new(&connection.stream, PollFlags::IN)));
        let mut due: Option<Instant> = full_until;
        let mut until = |at: Instant| due = Some(due.map_or(at, |due| due.min(at)));
        for own in &self.calls {
            match &own.call {
                Some(call) => {
                    let (fd, flags) = call.awaited();
                    fds.push(PollFd::from_borrowed_fd(fd, flags));
                    call.deadline().into_iter().for_each(&mut until);
                    until(Instant::now() + LEFT_POLL_INTERVAL);
                }
                None => until(own.again.0),
            }
        }
        let checks = self.pending.iter().filter_map(|connection| connection.next_check(&limit));
        let checks = checks.reduce(Deadline::min).map(Deadline::remaining);
        let own = due.map(|due| due.saturating_duration_since(Instant::now()));
        // Without either it waits for others, who wake it.
        let timeout = own.into_iter().chain(checks).min();
        poll(&mut fds, timeout).map_err(|error| Error::io("waiting for peers failed", error))?;
        // It is empty if something else woke this thread.
        let _ = rustix::io::read(&*self.woken, &mut [0; 8]);
        let arrived = fds.get(1).is_some_and(|listener| !listener.revents().is_empty());
        Ok(full_until.is_none().then_some(arrived))
    }

    /// Goes on with this rank's calls. Returns whether one has come to an end.
    fn call(&mut self, connections: &Connections, requests: &Requests, health: &Health) -> Result<bool> {
        let mut has_ended = false;
        let mut open = Vec::with_capacity(self.calls.len());
        for mut own in std::mem::take(&mut self.calls) {
            let (channel, peer) = (own.channel, own.peer);
            if connections.get(channel, peer).is_some() {
                continue;
            }
            let Some(address) = self.addresses.get(peer.index()) else { continue };
            if health.has_left(peer) {
                let since = *own.left.get_or_insert_with(Instant::now);
                // It answers no more; but what it has answered may still be on its way.
                if own.call.is_none() || since.elapsed() >= LEFT_GRACE {
                    requests.give_up(channel, peer);
                    has_ended = true;
                    continue;
                }
            }
            let call = match own.call.take() {
                None if Instant::now() < own.again.0 => {
                    open.push(own);
                    continue;
                }
                None => {
                    let hello = self.own.on(channel, peer).saying(random::bytes()?);
                    Call::begin(address.socket, hello, self.secret.clone())
                }
                Some(call) => Ok(call),
            };
            match call.and_then(|call| call.advance(peer, self.tls.as_ref())) {
                Ok(Called::Made(connection)) => {
                    connections.keep(channel, peer, connection, health);
                    has_ended = true;
                }
                Ok(Called::Waiting(call)) => {
                    own.short_since = None;
                    own.call = Some(call);
                    open.push(own);
                }
                Err(error) => {
                    let is_short = no_more_files(&error).is_some() || is_local_shortage(&error);
                    let since = is_short.then(|| own.short_since.unwrap_or_else(Instant::now));
                    own.short_since = since;
                    if since.is_some_and(|since| since.elapsed() < SHORTAGE_TIMEOUT) {
                        // Strangers may have what is lacking.
                        self.pending.clear();
                    } else {
                        hopeless(&mut own, address, error, health)?;
                    }
                    let pause = own.again.1;
                    own.again = (Instant::now() + pause, (pause * 3 / 2).min(PAUSES.1));
                    open.push(own);
                }
            }
        }
        self.calls = open;
        Ok(has_ended)
    }

    /// Goes on with the calls of others. Returns whether one has been kept.
    fn answer(&mut self, connections: &Connections, requests: &Requests, health: &Health) -> bool {
        let mut has_kept = false;
        let before = self.pending.len();
        let mut limit = HandshakeLimit::among(&self.pending);
        let mut open = Vec::with_capacity(before);
        for mut connection in std::mem::take(&mut self.pending) {
            match connection.advance(self.own, 0, &mut limit) {
                Progress::Waiting => open.push(connection),
                Progress::Dropped => {}
                Progress::TurnedAway(error, answer) => {
                    // Whoever is on this host may come as often as it likes.
                    tracing::debug!(%error, "a connection was turned away");
                    let _ = connection.stream.send(&[io::IoSlice::new(answer)]);
                    connection.stream.discard();
                }
                // Those for control are made at the start, which is over.
                Progress::Proven(Hello { channel: Channel::Control, .. }, _) => {}
                Progress::Proven(hello, welcome) => {
                    let (channel, peer) = (hello.channel, hello.rank);
                    let is_own = |own: &OwnCall| (own.channel, own.peer) == (channel, peer);
                    let known = match connections.get(channel, peer) {
                        Some(_) => Known::Connected,
                        // A rank that pauses does not call: its next call finds the connection.
                        None if self.calls.iter().any(|own| is_own(own) && own.call.is_some()) => {
                            Known::Calls
                        }
                        None => Known::Nothing,
                    };
                    let verdict = verdict(self.own.rank, peer, known);
                    if verdict == Verdict::Refuse {
                        tracing::debug!(%peer, ?channel, ?known, "a call was refused");
                        continue;
                    }
                    requests.settle(|| {
                        if send_whole(&connection.stream, &welcome) {
                            connection.stream.admit();
                            connections.keep(channel, peer, connection.stream, health);
                            has_kept = true;
                            if verdict == Verdict::KeepInstead {
                                self.calls.retain(|own| !is_own(own));
                            }
                        }
                    });
                }
            }
        }
        // A descriptor may be free again.
        if open.len() < before {
            self.full_until = None;
            self.spare = self.spare.take().or_else(spare);
        }
        self.pending = open;
        has_kept
    }
}

/// A descriptor that can be given up; none if there is none.
fn spare() -> Option<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC).ok()
}

/// How many calls of others may be under way.
fn most_unproven() -> usize {
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(descriptors / DESCRIPTORS_SHARE).unwrap_or(MAX_UNPROVEN).clamp(1, MAX_UNPROVEN)
}

/// An error if another call cannot succeed either.
fn hopeless(own: &mut OwnCall, address: &Address, error: io::Error, health: &Health) -> Result<()> {
    let (Address { host, socket }, peer) = (address, own.peer);
    let unreachable = || format!("rank {peer} ({host}) could not be reached at {socket}");
    if no_more_files(&error).is_some() {
        return Err(no_descriptors(&unreachable(), error));
    }
    if is_local_shortage(&error) {
        return Err(Error::io(unreachable(), error));
    }
    // Another program may have the port of a rank that has left.
    if error.kind() == io::ErrorKind::InvalidData && !health.has_left(peer) {
        let remedy = Refusal::remedy(&error).unwrap_or("has its process ended, and another taken its port?");
        return Err(Error::io(unreachable(), error).with_peer(peer).with_remedy(remedy));
    }
    tracing::debug!(%peer, %error, "a call has failed, and is made again");
    if own.began.elapsed() >= REMINDER_DELAY && !std::mem::replace(&mut own.has_reminded, true) {
        health.warn_aside(format!("{} yet, and is called again: {error}", unreachable()));
    }
    Ok(())
}

#[cfg(test)]
#[path = "on_demand_tests.rs"]
mod tests;
