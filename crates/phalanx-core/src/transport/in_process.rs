//! Ranks as threads of one process: frames pass through mailboxes in memory.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::messages::Messages;
use super::{Incoming, Outgoing, Transport, late};
use crate::buffer::AlignedBytes;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::health::Health;
use crate::health::calls::{LOOK_INTERVAL, Told};
use crate::interrupt;
use crate::rank::Rank;
use crate::wire::control::Notice;
use crate::wire::frame::Header;
use crate::world_size::WorldSize;

/// One rank's access to the mailboxes.
pub(crate) struct InProcess {
    rank: Rank,
    hub: Arc<Hub>,
    /// Sends the goodbye when its last owner drops it.
    _membership: Arc<Membership>,
}

/// Everything that one rank needs for the mailboxes.
pub(crate) struct InProcessRank {
    pub transport: InProcess,
    pub messages: Messages,
    pub health: Arc<Health>,
}

/// A rank's membership in the group, while it takes part.
struct Membership {
    rank: Rank,
    hub: Arc<Hub>,
}

struct Hub {
    healths: Vec<Arc<Health>>,
    mailboxes: Vec<Mailbox>,
}

/// The frames sent to one rank and not yet received, by sender.
struct Mailbox {
    frames: Mutex<Vec<VecDeque<(Header, AlignedBytes)>>>,
    arrived: Condvar,
}

/// Connects all ranks of a group, by rank.
pub(crate) fn connect(world: WorldSize) -> Vec<InProcessRank> {
    let hosts = vec!["this process".to_owned(); world.count()];
    let healths: Vec<_> = world.ranks().map(|rank| Health::new(rank, hosts.clone())).collect();
    let mailboxes = world
        .ranks()
        .map(|_| Mailbox {
            frames: Mutex::new(world.ranks().map(|_| VecDeque::new()).collect()),
            arrived: Condvar::new(),
        })
        .collect();
    let hub = Arc::new(Hub { healths, mailboxes });
    let memberships: Vec<_> =
        world.ranks().map(|rank| Arc::new(Membership { rank, hub: hub.clone() })).collect();
    let goodbyes = memberships.iter().map(|membership| Box::new(membership.clone()) as Box<_>).collect();
    let messages = Messages::in_process(world, goodbyes);
    memberships
        .into_iter()
        .zip(messages)
        .map(|(membership, messages)| {
            let rank = membership.rank;
            let health = hub.healths[rank.index()].clone();
            let peers = Arc::downgrade(&hub);
            health.on_failure(Box::new(move |error| {
                if let Some(hub) = peers.upgrade() {
                    hub.spread(rank, error);
                }
            }));
            let transport = InProcess { rank, hub: hub.clone(), _membership: membership };
            InProcessRank { transport, messages, health }
        })
        .collect()
}

impl Hub {
    /// Reports a failure to every rank, and wakes waiting ranks.
    fn spread(&self, reporter: Rank, error: &Error) {
        for (index, health) in self.healths.iter().enumerate() {
            if index != reporter.index() {
                health.hear(Notice::of(error).into_error(reporter, "this process"));
            }
        }
        self.wake();
    }

    /// Compares the call in which `rank` waits with what the others have called in its place: each may wait for a rank that sends it nothing.
    fn compare_calls(&self, rank: Rank) {
        let own = &self.healths[rank.index()];
        let Some(running) = own.calls(|calls| calls.running()) else { return };
        // What the others have told before this rank was in it.
        own.compare_calls();
        for health in self.healths.iter().filter(|health| !Arc::ptr_eq(health, own)) {
            health.calls(|calls| calls.hear(rank, running, Told::Waiting));
            health.compare_calls();
        }
    }

    fn wake(&self) {
        for mailbox in &self.mailboxes {
            // Taking the lock makes sure that no rank is between its last check and its wait.
            drop(mailbox.frames.lock());
            mailbox.arrived.notify_all();
        }
    }
}

impl Transport for InProcess {
    fn exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        recv: Option<Incoming<'_>>,
        deadline: Deadline,
    ) -> Result<()> {
        if let Some(Outgoing { to, header, payload }) = send {
            let copy = AlignedBytes::copy_of(payload)?;
            let mailbox = &self.hub.mailboxes[to.index()];
            mailbox.frames.lock()[self.rank.index()].push_back((header, copy));
            mailbox.arrived.notify_all();
        }
        let Some(Incoming { from, expect, into, kernel }) = recv else { return Ok(()) };
        let (header, payload) = self.receive(from, deadline)?;
        expect.check(&header, self.rank, from)?;
        kernel.apply(into, payload.as_slice())
    }
}

impl InProcess {
    fn receive(&self, from: Rank, deadline: Deadline) -> Result<(Header, AlignedBytes)> {
        let (mailbox, health) =
            (&self.hub.mailboxes[self.rank.index()], &self.hub.healths[self.rank.index()]);
        let mut frames = mailbox.frames.lock();
        let mut has_compared = false;
        loop {
            if let Some(frame) = frames[from.index()].pop_front() {
                return Ok(frame);
            }
            // Not `cause`: the thread that reports it takes this mailbox's lock.
            if health.has_failed() || health.has_left(from) {
                return Err(health.peer_failed(from, "its thread ended"));
            }
            // It may run code of the program, which may end the group: that takes this lock.
            MutexGuard::unlocked(&mut frames, interrupt::check)?;
            if !frames[from.index()].is_empty() || health.has_failed() || health.has_left(from) {
                continue;
            }
            let timeout = interrupt::at_most(deadline.remaining());
            let timeout = if has_compared { timeout } else { timeout.min(LOOK_INTERVAL) };
            let waited = mailbox.arrived.wait_for(&mut frames, timeout);
            // A frame that came at the last moment still counts.
            if deadline.has_passed() && frames[from.index()].is_empty() {
                return Err(late(from, health.host(from)));
            }
            if waited.timed_out() && !has_compared {
                has_compared = true;
                // A failure takes the locks of all mailboxes.
                MutexGuard::unlocked(&mut frames, || self.hub.compare_calls(self.rank));
            }
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let last = self.hub.healths[self.rank.index()].calls(|calls| calls.latest());
        for health in &self.hub.healths {
            health.calls(|calls| {
                last.into_iter().for_each(|last| calls.hear(self.rank, last, Told::Last));
                calls.left(self.rank);
            });
            health.left(self.rank);
        }
        self.hub.wake();
    }
}
