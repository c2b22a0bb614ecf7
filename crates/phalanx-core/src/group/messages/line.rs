//! One direction of one pair of ranks, and the order of its users.

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::health::Health;
use crate::interrupt;
use crate::rank::Rank;
use crate::transport::messages::LineEnd;
use crate::transport::polling::Polling;

/// An end of a line, and the order of the threads that use it.
pub(super) struct Line<E> {
    turns: Mutex<Turns>,
    changed: Condvar,
    /// Locked by the thread that has the turn.
    end: Mutex<E>,
    polling: Mutex<Polling>,
}

#[derive(Default)]
struct Turns {
    next_ticket: u64,
    serving: u64,
}

/// The line with `peer`.
pub(super) fn line<E>(lines: &[Option<Line<E>>], peer: Rank) -> Result<&Line<E>> {
    let line = lines.get(peer.index()).and_then(Option::as_ref);
    line.ok_or_else(|| Error::invalid_argument(format!("rank {peer} is no peer of this rank")))
}

impl<E: LineEnd> Line<E> {
    pub(super) fn new(end: E) -> Self {
        Self {
            turns: Mutex::default(),
            changed: Condvar::new(),
            end: Mutex::new(end),
            polling: Mutex::default(),
        }
    }

    /// A place in the order, which is the number of the message.
    pub(super) fn take_ticket(&self) -> u64 {
        let mut turns = self.turns.lock();
        let ticket = turns.next_ticket;
        turns.next_ticket += 1;
        ticket
    }

    pub(super) fn is_served(&self, ticket: u64) -> bool {
        self.turns.lock().serving == ticket
    }

    /// Waits until the turn of `ticket`. Fails if the group does; if `deadline` passes first, so will the group.
    pub(super) fn wait_for_turn(&self, ticket: u64, deadline: Deadline, health: &Health) -> Result<()> {
        let mut turns = self.turns.lock();
        while turns.serving < ticket {
            // No longer than until this thread's next check.
            let _ = self.changed.wait_for(&mut turns, interrupt::at_most(deadline.remaining()));
            if turns.serving >= ticket {
                break;
            }
            MutexGuard::unlocked(&mut turns, interrupt::check)?;
            if deadline.has_passed() && turns.serving < ticket {
                return Err(Error::timeout("the messages called before this one have not ended in time")
                    .with_remedy(
                        "is the peer stuck, or far behind? A longer time-out can be set on the group",
                    ));
            }
        }
        drop(turns);
        // Not before its turn: the turn may have come because of a failure.
        health.cause().map_or(Ok(()), Err)
    }

    /// Ends the turn of `ticket`. Returns whether a thread waits for the next.
    pub(super) fn leave(&self, ticket: u64) -> bool {
        let mut turns = self.turns.lock();
        turns.serving = turns.serving.max(ticket + 1);
        let awaited = turns.next_ticket > turns.serving;
        drop(turns);
        if awaited {
            self.changed.notify_all();
        }
        awaited
    }

    /// The end, for the thread whose turn it is.
    pub(super) fn end(&self) -> MutexGuard<'_, E> {
        self.end.lock()
    }

    /// Whether the thread whose turn it is polls for the peer.
    pub(super) fn polling(&self) -> MutexGuard<'_, Polling> {
        self.polling.lock()
    }

    /// The end, if no thread uses it or waits for it.
    pub(super) fn idle_end(&self) -> Option<MutexGuard<'_, E>> {
        let turns = self.turns.lock();
        if turns.next_ticket == turns.serving { self.end.try_lock() } else { None }
    }
}
