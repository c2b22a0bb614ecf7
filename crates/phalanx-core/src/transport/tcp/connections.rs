//! The connections of a rank, and what its threads ask of the one that makes those for data and messages
//! [at their first use](super::on_demand).

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};

use super::accept::Early;
use super::connection::Connection;
use super::keep_in_cache;
use crate::error::{Error, Result};
use crate::health::Health;
use crate::rank::Rank;
use crate::wire::hello::Channel;

/// The connections to each peer, by rank; None for this rank itself. The transports, the watching thread and the alarm
/// share them, because duplicates would cost more descriptors for each peer.
#[derive(Default)]
pub(crate) struct Connections {
    pub control: Vec<Option<Connection>>,
    pub data: Vec<OnceLock<Connection>>,
    pub messages: Vec<OnceLock<Connection>>,
    /// Who makes those for data and messages that are not made at the start.
    pub(super) requests: Option<Requests>,
}

impl Connections {
    fn slot(&self, channel: Channel, peer: Rank) -> Option<&OnceLock<Connection>> {
        match channel {
            Channel::Data => self.data.get(peer.index()),
            Channel::Messages => self.messages.get(peer.index()),
            // It is made at the start.
            Channel::Control => None,
        }
    }

    /// The connection for this purpose, if it stands.
    pub(in crate::transport) fn get(&self, channel: Channel, peer: Rank) -> Option<&Connection> {
        self.slot(channel, peer).and_then(OnceLock::get)
    }

    /// Whether `peer` is one: a rank of the group, and not this one.
    pub(in crate::transport) fn is_peer(&self, peer: Rank) -> bool {
        self.control.get(peer.index()).is_some_and(Option::is_some)
    }

    /// The number of peers on this host.
    pub fn near(&self) -> usize {
        // Connections of the other kinds may be made later.
        self.control.iter().flatten().filter(|connection| connection.is_within_host()).count()
    }

    /// Asks for the connection, if it does not stand. Returns at once.
    pub(in crate::transport) fn ask(&self, channel: Channel, peer: Rank) {
        if self.get(channel, peer).is_none()
            && let Some(requests) = self.requests.as_ref().filter(|_| self.is_peer(peer))
        {
            requests.ask(channel, peer);
        }
    }

    /// Whether the connection stands or may still come, although the peer has left: what it sent before counts.
    pub(in crate::transport) fn may_come(&self, channel: Channel, peer: Rank) -> bool {
        // In this order: one that ended a call between the two has kept the connection.
        let is_open = self.requests.as_ref().is_some_and(|requests| requests.is_open(channel, peer));
        is_open || self.get(channel, peer).is_some()
    }

    /// A peer has left: a call that it does not answer any more comes to its end, and with it what waits for that.
    pub(super) fn peer_left(&self) {
        if let Some(requests) = &self.requests {
            requests.wake();
        }
    }

    /// Calls `tell` whenever a connection stands that was made after the start.
    pub(in crate::transport) fn on_connected(&self, tell: Box<dyn Fn() + Send + Sync>) {
        if let Some(requests) = &self.requests {
            requests.on_connected(tell);
        }
    }

    /// Waits for the connection to `peer` for so long. May return early.
    pub(super) fn await_connection(&self, channel: Channel, peer: Rank, timeout: Duration) {
        match &self.requests {
            Some(requests) => requests.wait(timeout, || self.get(channel, peer).is_some()),
            None => std::thread::sleep(timeout),
        }
    }

    /// Keeps what ranks that were ready earlier have connected.
    pub(super) fn keep_early(&self, early: Vec<Early>) {
        for Early { channel, peer, connection } in early {
            self.put(channel, peer, connection);
        }
    }

    /// Keeps a connection that stands. If the group has failed meanwhile, nobody would close it later.
    pub(super) fn keep(&self, channel: Channel, peer: Rank, connection: Connection, health: &Health) {
        self.put(channel, peer, connection);
        if health.has_failed()
            && let Some(connection) = self.get(channel, peer)
        {
            connection.shut();
        }
    }

    fn put(&self, channel: Channel, peer: Rank, connection: Connection) {
        if channel == Channel::Data {
            keep_in_cache(&connection);
        }
        if let Some(slot) = self.slot(channel, peer) {
            // A second one was refused.
            let _ = slot.set(connection);
        }
    }

    /// All that stand, but those for control.
    pub(super) fn others(&self) -> impl Iterator<Item = &Connection> {
        self.data.iter().chain(&self.messages).filter_map(OnceLock::get)
    }

    /// Wakes the threads that wait on them, or for them.
    pub(super) fn shut(&self) {
        self.others().for_each(Connection::shut);
        if let Some(requests) = &self.requests {
            requests.group_failed();
        }
    }
}

/// What threads ask of the one that makes connections.
pub(super) struct Requests {
    state: Mutex<Wanted>,
    /// A connection stands, or will not come any more, or the group has failed.
    changed: Condvar,
    /// Wakes the thread. Unlike a pipe it raises no signal when the thread has ended.
    waker: Arc<OwnedFd>,
    /// Wakes those that wait for messages.
    on_connected: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

#[derive(Default)]
struct Wanted {
    /// Whether each connection that has been asked for may still come: not if the peer has left.
    asked: HashMap<(u8, Rank), bool>,
    new: Vec<(Channel, Rank)>,
    is_over: bool,
}

impl Requests {
    /// Also what wakes the thread.
    pub(super) fn new() -> Result<(Self, Arc<OwnedFd>)> {
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let waker = waker.map_err(|error| Error::io("a thread cannot be woken", error.into()))?;
        let waker = Arc::new(waker);
        let requests = Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            waker: waker.clone(),
            on_connected: OnceLock::new(),
        };
        Ok((requests, waker))
    }

    /// Asks for a connection, unless somebody has.
    pub(super) fn ask(&self, channel: Channel, peer: Rank) {
        let mut state = self.state.lock();
        if let Entry::Vacant(entry) = state.asked.entry((channel as u8, peer)) {
            entry.insert(true);
            state.new.push((channel, peer));
            drop(state);
            self.wake();
        }
    }

    /// Whether a connection that has been asked for may still come.
    pub(super) fn is_open(&self, channel: Channel, peer: Rank) -> bool {
        self.state.lock().asked.get(&(channel as u8, peer)) == Some(&true)
    }

    /// The peer has left: the connection will not come any more.
    pub(super) fn give_up(&self, channel: Channel, peer: Rank) {
        self.state.lock().asked.insert((channel as u8, peer), false);
    }

    /// Runs `settle`, which makes a connection known to the peer and then to this rank. Whoever has heard more of the peer than that finds
    /// the connection.
    pub(super) fn settle(&self, settle: impl FnOnce()) {
        let _state = self.state.lock();
        settle();
    }

    /// Ends the thread.
    pub(super) fn stop(&self) {
        self.state.lock().is_over = true;
        self.wake();
    }

    /// The group has failed: wakes the thread, and all that wait for connections.
    pub(super) fn group_failed(&self) {
        self.wake();
        self.tell();
    }

    /// Calls `tell` whenever a connection stands, or will not come any more.
    pub(super) fn on_connected(&self, tell: Box<dyn Fn() + Send + Sync>) {
        // A group has one user of messages.
        let _ = self.on_connected.set(tell);
    }

    /// Waits until `is_ready`, or for so long.
    pub(super) fn wait(&self, timeout: Duration, is_ready: impl Fn() -> bool) {
        let mut state = self.state.lock();
        if !is_ready() {
            let _ = self.changed.wait_for(&mut state, timeout);
        }
    }

    pub(super) fn wake(&self) {
        // A full counter wakes it as well.
        let _ = rustix::io::write(&*self.waker, &1u64.to_ne_bytes());
    }

    pub(super) fn tell(&self) {
        // No thread is between its check and its wait while this has the lock.
        drop(self.state.lock());
        self.changed.notify_all();
        if let Some(tell) = self.on_connected.get() {
            tell();
        }
    }

    /// What has been asked for since; None at the end.
    pub(super) fn take(&self) -> Option<Vec<(Channel, Rank)>> {
        let mut state = self.state.lock();
        (!state.is_over).then(|| std::mem::take(&mut state.new))
    }
}
