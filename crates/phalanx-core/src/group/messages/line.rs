//! One direction of one pair of ranks, and the order of its users.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Condvar, MappedMutexGuard, Mutex, MutexGuard};

use crate::deadline::Timeout;
use crate::error::{Error, Result};
use crate::health::Health;
use crate::interrupt;
use crate::rank::Rank;
use crate::transport::messages::LineEnd;
use crate::transport::polling::Polling;

/// An end of a line, and the order of the threads that use it.
pub(super) struct Line<E> {
    /// The ticket of the next message.
    next_ticket: AtomicU64,
    /// The ticket whose turn it is.
    serving: AtomicU64,
    /// Held by a thread between its last look at `serving` and its sleep.
    asleep: Mutex<()>,
    changed: Condvar,
    /// Locked by the thread that has the turn.
    driven: Mutex<Driven<E>>,
}

/// What the thread that has the turn uses.
pub(super) struct Driven<E> {
    pub end: E,
    /// Whether it polls for the peer.
    pub polling: Polling,
}

/// The line with `peer`.
pub(super) fn line<E>(lines: &[Option<Line<E>>], peer: Rank) -> Result<&Line<E>> {
    let line = lines.get(peer.index()).and_then(Option::as_ref);
    line.ok_or_else(|| Error::invalid_argument(format!("rank {peer} is no peer of this rank")))
}

impl<E: LineEnd> Line<E> {
    pub(super) fn new(end: E) -> Self {
        Self {
            next_ticket: AtomicU64::new(0),
            serving: AtomicU64::new(0),
            asleep: Mutex::new(()),
            changed: Condvar::new(),
            driven: Mutex::new(Driven { end, polling: Polling::default() }),
        }
    }

    /// A place in the order, which is the number of the message.
    pub(super) fn take_ticket(&self) -> u64 {
        // Sequentially consistent with `leave`: either `leave` sees this ticket, or the call that has it sees that it is served.
        self.next_ticket.fetch_add(1, Ordering::SeqCst)
    }

    pub(super) fn is_served(&self, ticket: u64) -> bool {
        self.serving.load(Ordering::SeqCst) == ticket
    }

    /// Waits until the turn of `ticket`. Fails if the group does; if the deadline passes first, so will the group.
    pub(super) fn wait_for_turn(&self, ticket: u64, timeout: &Timeout, health: &Health) -> Result<()> {
        let is_early = || self.serving.load(Ordering::SeqCst) < ticket;
        while is_early() {
            let deadline = timeout.deadline();
            let mut asleep = self.asleep.lock();
            if is_early() {
                // No longer than until this thread's next check.
                let _ = self.changed.wait_for(&mut asleep, interrupt::at_most(deadline.remaining()));
            }
            drop(asleep);
            if !is_early() {
                break;
            }
            interrupt::check()?;
            if deadline.has_passed() && is_early() {
                return Err(Error::timeout("the messages called before this one have not ended in time")
                    .with_remedy(
                        "is the peer stuck, or far behind? A longer time-out can be set on the group",
                    ));
            }
        }
        // Not before its turn: the turn may have come because of a failure.
        health.cause().map_or(Ok(()), Err)
    }

    /// Ends the turn of `ticket`. Returns whether a thread waits for the next.
    pub(super) fn leave(&self, ticket: u64) -> bool {
        let serving = self.serving.fetch_max(ticket + 1, Ordering::SeqCst).max(ticket + 1);
        let awaited = self.next_ticket.load(Ordering::SeqCst) > serving;
        if awaited {
            // No thread is between its look and its sleep.
            drop(self.asleep.lock());
            self.changed.notify_all();
        }
        awaited
    }

    /// The end and its polling, for the thread whose turn it is.
    pub(super) fn driven(&self) -> MutexGuard<'_, Driven<E>> {
        self.driven.lock()
    }

    /// The end, for the thread whose turn it is.
    pub(super) fn end(&self) -> MappedMutexGuard<'_, E> {
        MutexGuard::map(self.driven(), |driven| &mut driven.end)
    }

    /// The end, if no thread uses it or waits for it.
    pub(super) fn idle_end(&self) -> Option<MappedMutexGuard<'_, E>> {
        let driven = self.driven.try_lock()?;
        // A call that takes a ticket from here on waits for the end.
        let is_idle = self.next_ticket.load(Ordering::SeqCst) == self.serving.load(Ordering::SeqCst);
        is_idle.then(|| MutexGuard::map(driven, |driven| &mut driven.end))
    }
}
