//! Point-to-point messages: every line between two ranks has its own order, independent of the others.
//!
//! A blocking call drives its line on the caller's thread, with the caller's memory. Asynchronous calls are driven by a
//! worker thread, all at the same time; it is started with the first one. Both take a ticket of their line,
//! which is also the message's number.
//!
//! Messages have no place in the work queue of the collectives: `irecv`, `all_reduce`, `wait` is an ordinary program,
//! in which a message must not block a collective. A message waits only for those that were called before it on the
//! same line.

mod line;
mod worker;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};

use self::line::{Driven, Line, line};
use self::worker::{Op, Worker};
use super::affinity::{LocalRank, keep_apart};
use super::{P2pOp, Work};
use crate::buffer::Buffer;
use crate::deadline::{Deadline, Timeout};
use crate::error::{Error, Result};
use crate::health::Health;
use crate::interrupt;
use crate::rank::{Generation, Rank, Sequence};
use crate::trace::Trace;
use crate::transport::messages::{
    Inbound, LineEnd, Messages as Ends, Notifier, Outbound, Receiving, Sending, Step, length,
};
use crate::transport::polling::{Next, Polling, Wait};
use crate::wire::frame::{Call, Header, History, Operation};

/// Polls of the memory without a look at the clock, a few microseconds. [Further polls](crate::transport::polling) follow, as of connections: a rank
/// that slept at once would be woken by each message, so late that its peer sleeps too, and both would go on like this.
const SPINS: u32 = 200;
/// Steps between two reads of the clock, while there is something to move.
const CLOCK: u64 = 256;

/// A group's messages on one rank.
pub(super) struct Messages {
    shared: Arc<Shared>,
    local: LocalRank,
    worker: Mutex<Option<JoinHandle<()>>>,
    /// The process that has made it, and not one that was forked from that.
    process: u32,
}

/// What callers and the worker share.
struct Shared {
    rank: Rank,
    generation: Generation,
    health: Arc<Health>,
    trace: Trace,
    outbound: Vec<Option<Line<Outbound>>>,
    inbound: Vec<Option<Line<Inbound>>>,
    notifier: Arc<Notifier>,
    /// Whether a thread polls before it sleeps.
    polls: bool,
    queue: Mutex<Queue>,
    arrived: Condvar,
    /// Wakes the worker when it polls sockets; empty before the worker starts.
    poke: OnceLock<OwnedFd>,
    /// Sends the goodbye when its last owner drops it.
    _goodbye: Box<dyn Send + Sync>,
}

/// Operations that the worker has not taken yet.
#[derive(Default)]
struct Queue {
    outbound: Vec<(Rank, Op<Outbound>)>,
    inbound: Vec<(Rank, Op<Inbound>)>,
    /// The worker waits, or is about to, and must be poked.
    asleep: bool,
    closed: bool,
}

impl Messages {
    pub(super) fn new(
        rank: Rank,
        generation: Generation,
        ends: Ends,
        health: Arc<Health>,
        local: LocalRank,
        trace: Trace,
    ) -> Self {
        let Ends { outbound, inbound, notifier, polls, goodbye } = ends;
        let shared = Shared {
            rank,
            generation,
            health,
            trace,
            outbound: outbound.into_iter().map(|end| end.map(Line::new)).collect(),
            inbound: inbound.into_iter().map(|end| end.map(Line::new)).collect(),
            notifier,
            polls,
            queue: Mutex::default(),
            arrived: Condvar::new(),
            poke: OnceLock::new(),
            _goodbye: goodbye,
        };
        let (shared, worker) = (Arc::new(shared), Mutex::new(None));
        Self { shared, local, worker, process: std::process::id() }
    }

    /// Sends a message of these `parts` from the caller's thread and memory; returns when all of it has been sent.
    pub(super) fn send(&self, call: Call, to: Rank, parts: &[&[u8]], timeout: &Timeout) -> Result<()> {
        let line = line(&self.shared.outbound, to)?;
        let ticket = line.take_ticket();
        let mut frame = Sending::new(self.shared.header(call, ticket, length(parts)));
        self.shared.drive(line, (call, ticket), timeout, |end| end.push(&mut frame, parts))
    }

    /// Receives on the caller's thread, into the caller's memory.
    pub(super) fn recv(&self, call: Call, from: Rank, data: &mut [u8], timeout: &Timeout) -> Result<()> {
        let line = line(&self.shared.inbound, from)?;
        let ticket = line.take_ticket();
        let header = self.shared.header(call, ticket, data.len());
        let mut frame = Receiving::new(self.shared.rank, header);
        self.shared.drive(line, (call, ticket), timeout, |end| end.pull(&mut frame, data))
    }

    /// Whether a message from `from` has arrived that no call receives yet.
    pub(super) fn has_arrived(&self, from: Rank) -> Result<bool> {
        line(&self.shared.inbound, from)?;
        Ok(self.shared.unexpected(from).is_some())
    }

    /// Whether `from` has left, and all that it sent has been received. Not while a call receives it.
    pub(super) fn is_at_end(&self, from: Rank) -> bool {
        // In this order: what it sent before it left counts.
        self.shared.health.has_left(from)
            && line(&self.shared.inbound, from)
                .is_ok_and(|line| line.idle_end().is_some_and(|mut end| end.is_at_end()))
    }

    /// Passes `ops`, whose ranks have been checked, to the worker.
    pub(super) fn start(&self, ops: Vec<P2pOp>, deadline: Deadline) -> Result<Vec<Work>> {
        self.start_worker()?;
        let shared = &*self.shared;
        // Tickets are taken under the queue's lock, so that the worker sees them in their order.
        let mut queue = shared.queue.lock();
        if shared.health.has_failed() {
            // If the worker has panicked, it no longer reads the queue.
            drop(queue);
            shared.health.note_returned();
            return Err(shared.health.cause().unwrap_or_else(|| Error::aborted("the group has failed")));
        }
        let works = ops.into_iter().map(|op| match op {
            P2pOp::Send { buffer, to } => {
                let start = |header| Sending::new(header);
                let (op, work) = shared.start(line(&shared.outbound, to)?, buffer, deadline, start);
                queue.outbound.push((to, op));
                Ok(work)
            }
            P2pOp::Recv { buffer, from } => {
                let start = |header| Receiving::new(shared.rank, header);
                let (op, work) = shared.start(line(&shared.inbound, from)?, buffer, deadline, start);
                queue.inbound.push((from, op));
                Ok(work)
            }
        });
        let works = works.collect();
        let asleep = std::mem::take(&mut queue.asleep);
        drop(queue);
        if asleep {
            shared.wake_worker();
        }
        works
    }

    /// Starts the worker, unless there is one.
    fn start_worker(&self) -> Result<()> {
        let mut worker = self.worker.lock();
        if worker.is_some() {
            return Ok(());
        }
        let failed =
            |error: io::Error| Error::not_started("the worker for messages could not be started", error);
        if self.shared.poke.get().is_none() {
            let poke = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
            let _ = self.shared.poke.set(poke.map_err(|error| failed(error.into()))?);
        }
        let (shared, local) = (self.shared.clone(), self.local);
        let thread = std::thread::Builder::new()
            .name(format!("phalanx-p2p-{}", self.shared.rank))
            .spawn(move || {
                keep_apart(local);
                Worker::new(shared).serve();
            })
            .map_err(failed)?;
        *worker = Some(thread);
        Ok(())
    }
}

impl Drop for Messages {
    /// Lets the worker finish its operations: the peers wait for them, and every message has a deadline.
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // The worker is the parent's, and may have held the lock when this process was forked.
            std::mem::forget(self.worker.get_mut().take());
            return;
        }
        self.shared.queue.lock().closed = true;
        self.shared.wake_worker();
        if let Some(worker) = self.worker.get_mut().take()
            && worker.thread().id() != std::thread::current().id()
        {
            // It catches its panics; there is nothing to pass on.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn header(&self, call: Call, ticket: u64, payload: usize) -> Header {
        let (sequence, generation) = (Sequence(ticket), self.generation);
        Header { call, sequence, generation, history: History::default(), payload: payload as u64 }
    }

    /// An operation for the worker, with the next ticket of `line`.
    fn start<E: LineEnd>(
        &self,
        line: &Line<E>,
        buffer: Buffer,
        deadline: Deadline,
        frame: impl FnOnce(Header) -> E::Frame,
    ) -> (Op<E>, Work) {
        let call = Call::new(Operation::PointToPoint, buffer.dtype(), buffer.len());
        let ticket = line.take_ticket();
        let frame = frame(self.header(call, ticket, buffer.as_bytes().len()));
        let (work, completer) = Work::pending_in(self.health.clone());
        let begin = self.trace.is_enabled().then(Instant::now);
        (Op { ticket, call, frame, has_begun: false, buffer, deadline, completer, begin }, work)
    }

    /// Takes the turn of `ticket` on `line` and steps until the frame is done.
    fn drive<E: LineEnd>(
        &self,
        line: &Line<E>,
        (call, ticket): (Call, u64),
        timeout: &Timeout,
        step: impl FnMut(&mut E) -> Result<Step>,
    ) -> Result<()> {
        let turn = line.wait_for_turn(ticket, timeout, &self.health);
        let outcome = turn.and_then(|()| {
            let mut driven = line.driven();
            self.check_receiver(&driven.end)?;
            self.step_through(&mut driven, timeout, step)
        });
        self.health.waits.message(None);
        let outcome = outcome.map_err(|error| self.fail(error, call, ticket));
        if line.leave(ticket) {
            self.poke_worker();
        }
        outcome
    }

    fn step_through<E: LineEnd>(
        &self,
        Driven { end, polling }: &mut Driven<E>,
        timeout: &Timeout,
        mut step: impl FnMut(&mut E) -> Result<Step>,
    ) -> Result<()> {
        let peer = end.peer();
        let (mut polls, mut steps) = (Polls::default(), 0u64);
        loop {
            let step = step(end)?;
            if step != Step::Idle {
                polls.moved(polling);
            }
            match step {
                Step::Done => return Ok(()),
                Step::Moved => {
                    steps += 1;
                    // Seldom, because reading the clock costs time; but a slow peer must not postpone the deadline for
                    // ever.
                    if steps % CLOCK == 0 {
                        interrupt::check()?;
                        if timeout.deadline().has_passed() {
                            return Err(self.late::<E>(peer));
                        }
                    }
                    continue;
                }
                Step::Idle => {}
            }
            if self.polls && polls.go_on(polling, end.socket().is_none()) {
                continue;
            }
            let deadline = timeout.deadline();
            if let Some(socket) = end.socket() {
                self.health.waits.message(Some((peer, E::RECEIVES)));
                self.notifier.wait(&[socket], false, deadline, || false)?;
            } else {
                // Before the last check: what a peer published before it left, or died, still counts.
                let is_over = self.is_over(end);
                let until = if is_over { Deadline::now() } else { deadline };
                let mut found = false;
                self.health.waits.message(Some((peer, E::RECEIVES)));
                self.notifier.wait(&[], true, until, || {
                    found = end.is_ready();
                    found
                })?;
                if is_over && !found {
                    return Err(self.health.peer_failed(peer, "it has dropped out of the group"));
                }
            }
            if deadline.has_passed() {
                return Err(self.late::<E>(peer));
            }
        }
    }

    /// Whether the peer of `end` has left or failed, so that nothing more is sent or received. Not while a connection with one that has left
    /// may come: that is waited for as from any other peer, asleep.
    fn is_over<E: LineEnd>(&self, end: &E) -> bool {
        // In this order: what a peer has sent before it left comes on a connection that stands by then.
        self.health.has_failed() || (self.health.has_left(end.peer()) && !end.may_come())
    }

    /// Before the first step of a message: an error if it is to be sent to a rank that has left. A connection, or a ring with room, would
    /// take it, and it would count as sent. Not later: that rank may have received all of it, and have left since.
    fn check_receiver<E: LineEnd>(&self, end: &E) -> Result<()> {
        match !E::RECEIVES && self.health.has_left(end.peer()) {
            true => Err(self.health.peer_failed(end.peer(), "it has dropped out of the group")),
            false => Ok(()),
        }
    }

    fn fail(&self, error: Error, call: Call, ticket: u64) -> Error {
        let cause = self.health.fail_operation(error, call, Sequence(ticket));
        self.health.note_returned();
        cause
    }

    /// The error if a peer has not answered by the deadline.
    fn late<E: LineEnd>(&self, peer: Rank) -> Error {
        let host = self.health.host(peer);
        if E::RECEIVES {
            return Error::timeout(format!("rank {peer} ({host}) has sent nothing in time"))
                .with_peer(peer)
                .with_remedy(
                    "does that rank send to this one, and is it alive? A longer time-out can be set on the group",
                );
        }
        let cause = format!("rank {peer} ({host}) has not received it in time");
        match self.unexpected(peer) {
            Some(Header { call, sequence, .. }) => Error::timeout(format!(
                "{cause}; it has itself sent {call} {sequence}, which this rank has not received"
            ))
            .with_remedy(
                "two ranks that both send before they receive wait for each other: let one receive first, or use isend \
                 or batch_isend_irecv",
            ),
            None => Error::timeout(cause).with_remedy(
                "does that rank receive from this one, and is it alive? A longer time-out can be set on the group",
            ),
        }
        .with_peer(peer)
    }

    /// The header of a message from `peer` without a posted receive.
    fn unexpected(&self, peer: Rank) -> Option<Header> {
        line(&self.inbound, peer).ok()?.idle_end()?.unexpected()
    }

    /// Makes the worker check its lines again, if it is waiting.
    fn poke_worker(&self) {
        let asleep = std::mem::take(&mut self.queue.lock().asleep);
        if asleep {
            self.wake_worker();
        }
    }

    fn wake_worker(&self) {
        self.arrived.notify_all();
        self.notifier.notify();
        if let Some(poke) = self.poke.get() {
            // A full counter wakes the worker as well.
            let _ = rustix::io::write(poke, &1u64.to_ne_bytes());
        }
    }
}

/// The polls of a thread since something was moved.
#[derive(Default)]
struct Polls {
    /// Those of memory without a look at the clock.
    of_memory: u32,
    wait: Option<Wait>,
    /// Those of all waits since the thread last slept.
    in_a_row: u32,
}

impl Polls {
    fn moved(&mut self, polling: &mut Polling) {
        self.of_memory = 0;
        if let Some(wait) = self.wait.take() {
            polling.end(&wait, Instant::now());
        }
    }

    /// Whether to poll again, and not to sleep. It may have yielded the processor. `memory`: whether memory alone is polled, which costs little.
    fn go_on(&mut self, polling: &Polling, memory: bool) -> bool {
        if memory && self.of_memory < SPINS {
            self.of_memory += 1;
            std::hint::spin_loop();
            return true;
        }
        let now = Instant::now();
        let next = polling.next(self.wait.get_or_insert_with(|| Wait::begin(now)), &mut self.in_a_row, now);
        if next == Next::YieldAndPoll {
            std::thread::yield_now();
        }
        next != Next::Sleep
    }
}

#[cfg(test)]
mod tests;
