//! Drives all messages in flight of one rank at the same time.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::MappedMutexGuard;
use rustix::event::PollFlags;

use super::line::{Line, line};
use super::{CLOCK, Polls, Shared};
use crate::buffer::Buffer;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::group::work::Completer;
use crate::rank::Rank;
use crate::trace::Track;
use crate::transport::messages::{Inbound, LineEnd, Outbound, Step};
use crate::transport::polling::Polling;
use crate::wire::frame::Call;

/// The most messages of one line completed in a row before the other lines have their turn.
const ROW: usize = 64;

/// A message in flight, which owns its buffer.
pub(super) struct Op<E: LineEnd> {
    pub ticket: u64,
    pub call: Call,
    pub frame: E::Frame,
    /// Whether a step was made.
    pub has_begun: bool,
    pub buffer: Buffer,
    pub deadline: Deadline,
    pub completer: Completer,
    /// When it was called, if this is recorded.
    pub begin: Option<Instant>,
}

pub(super) struct Worker {
    shared: Arc<Shared>,
    outbound: Pending<Outbound>,
    inbound: Pending<Inbound>,
    /// No deadline passes before this time.
    next_deadline: Option<Deadline>,
    /// For the first of all peers that sends or takes something.
    polling: Polling,
}

/// The messages in flight in one direction.
struct Pending<E: LineEnd> {
    /// By peer.
    lines: Vec<VecDeque<Op<E>>>,
    /// The peers of lines that are not empty.
    active: Vec<Rank>,
}

/// The result of a round over all lines.
#[derive(Clone, Copy, Default)]
struct Round {
    moved: bool,
    /// Whether a line waits for a socket.
    has_socket: bool,
}

/// A message that failed, which fails the group.
struct Failed {
    error: Error,
    call: Call,
    ticket: u64,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let world = shared.outbound.len();
        Self {
            shared,
            outbound: Pending::new(world),
            inbound: Pending::new(world),
            next_deadline: None,
            polling: Polling::default(),
        }
    }

    /// Works until the group is closed and nothing is in flight.
    pub(super) fn serve(mut self) {
        let shared = self.shared.clone();
        if catch_unwind(AssertUnwindSafe(|| self.run())).is_err() {
            shared.health.fail(Error::panicked("the worker for messages panicked on this rank"));
            // Blocking calls may wait behind what this thread will not do.
            self.give_up();
            let (outbound, inbound) = {
                let mut queue = shared.queue.lock();
                (std::mem::take(&mut queue.outbound), std::mem::take(&mut queue.inbound))
            };
            outbound.into_iter().for_each(|(to, op)| drop(op.withdraw(&shared.outbound, to)));
            inbound.into_iter().for_each(|(from, op)| drop(op.withdraw(&shared.inbound, from)));
        }
    }

    fn run(&mut self) {
        let (mut polls, mut rounds) = (Polls::default(), 0u64);
        while let Some(has_news) = self.take_news() {
            rounds += 1;
            if has_news {
                // What comes next may be the news, and not what the wait was for.
                polls.wait = None;
            }
            let outcome = self.round().and_then(|round| match round {
                Round { moved: true, .. } => {
                    polls.moved(&mut self.polling);
                    if rounds % CLOCK == 0 { self.check_deadlines() } else { Ok(()) }
                }
                Round { has_socket, .. } if self.shared.polls && polls.go_on(&self.polling, !has_socket) => {
                    Ok(())
                }
                _ => self.wait().and_then(|()| self.check_deadlines()),
            });
            if let Err(failed) = outcome {
                self.shared.fail(failed.error, failed.call, failed.ticket);
            }
            if self.shared.health.has_failed() {
                self.give_up();
            }
        }
    }

    /// Takes new operations, and says whether there were any. If nothing is in flight, waits for one. None at the end.
    fn take_news(&mut self) -> Option<bool> {
        let mut queue = self.shared.queue.lock();
        queue.asleep = false;
        while self.is_idle() && queue.outbound.is_empty() && queue.inbound.is_empty() {
            if queue.closed {
                return None;
            }
            self.next_deadline = None;
            queue.asleep = true;
            self.shared.arrived.wait(&mut queue);
            queue.asleep = false;
        }
        let has_news = !queue.outbound.is_empty() || !queue.inbound.is_empty();
        for (to, op) in queue.outbound.drain(..) {
            self.next_deadline =
                Some(self.next_deadline.map_or(op.deadline, |deadline| deadline.min(op.deadline)));
            self.outbound.push(to, op);
        }
        for (from, op) in queue.inbound.drain(..) {
            self.next_deadline =
                Some(self.next_deadline.map_or(op.deadline, |deadline| deadline.min(op.deadline)));
            self.inbound.push(from, op);
        }
        Some(has_news)
    }

    fn is_idle(&self) -> bool {
        self.outbound.active.is_empty() && self.inbound.active.is_empty()
    }

    /// One step on each line.
    fn round(&mut self) -> Result<Round, Failed> {
        let Self { shared, outbound, inbound, .. } = self;
        let sent = outbound.round(&shared.outbound, shared)?;
        let received = inbound.round(&shared.inbound, shared)?;
        Ok(Round { moved: sent.moved || received.moved, has_socket: sent.has_socket || received.has_socket })
    }

    /// Waits until a line can be used, or another call comes.
    fn wait(&mut self) -> Result<(), Failed> {
        let Self { shared, outbound, inbound, next_deadline, .. } = self;
        let out = outbound.ends(&shared.outbound);
        let into = inbound.ends(&shared.inbound);
        // Before the last check: what a peer published before it left, or died, still counts.
        let over = out.over(shared).or_else(|| into.over(shared));
        {
            let mut queue = shared.queue.lock();
            if !queue.outbound.is_empty() || !queue.inbound.is_empty() {
                return Ok(());
            }
            queue.asleep = true;
        }
        let Ends { by_socket: out, by_memory: mut out_memory, absent: out_absent } = out;
        let Ends { by_socket: into, by_memory: mut into_memory, absent: into_absent } = into;
        let mut sockets: Vec<_> = out.iter().filter_map(|(_, end)| end.socket()).collect();
        sockets.extend(into.iter().filter_map(|(_, end)| end.socket()));
        if let Some(poke) = shared.poke.get()
            && !sockets.is_empty()
        {
            sockets.push((poke.as_fd(), PollFlags::IN));
        }
        let listens = !out_memory.is_empty() || !into_memory.is_empty();
        let deadline = match (over.is_some(), *next_deadline) {
            (true, _) | (_, None) => Deadline::now(),
            (_, Some(deadline)) => deadline,
        };
        let mut found = false;
        let waited = shared.notifier.wait(&sockets, listens, deadline, || {
            found = out_memory.iter_mut().any(|(_, end)| end.is_ready())
                || into_memory.iter_mut().any(|(_, end)| end.is_ready())
                || out_absent.iter().any(|(line, ticket)| line.is_served(*ticket))
                || into_absent.iter().any(|(line, ticket)| line.is_served(*ticket));
            found
        });
        let has_sockets = !sockets.is_empty();
        drop(sockets);
        shared.queue.lock().asleep = false;
        // Each time: a thread that poked may have woken this one otherwise, and what is not read here would wake it again and again. A thread
        // that is about to poke causes one unnecessary wake-up.
        if has_sockets && let Some(poke) = shared.poke.get() {
            let _ = rustix::io::read(poke, &mut [0; 8]);
        }
        match over {
            Some((peer, call, ticket)) if !found => {
                let error = shared.health.peer_failed(peer, "it has dropped out of the group");
                Err(Failed { error, call, ticket })
            }
            // No single message is the cause; the error names the first in flight.
            Some(_) | None => match (waited, outbound.first().or_else(|| inbound.first())) {
                (Err(error), Some((call, ticket))) => Err(Failed { error, call, ticket }),
                // Nothing is in flight that a broken wait could hold up.
                (Err(_), None) | (Ok(()), _) => Ok(()),
            },
        }
    }

    fn check_deadlines(&mut self) -> Result<(), Failed> {
        if self.next_deadline.is_none_or(|deadline| !deadline.has_passed()) {
            return Ok(());
        }
        let deadlines = (self.outbound.deadlines()).chain(self.inbound.deadlines());
        self.next_deadline = deadlines.min();
        self.outbound.expired(&self.shared)?;
        self.inbound.expired(&self.shared)
    }

    /// The group has failed, and with it everything in flight.
    fn give_up(&mut self) {
        let Some(cause) = self.shared.health.cause() else { return };
        self.outbound.give_up(&self.shared.outbound, &cause);
        self.inbound.give_up(&self.shared.inbound, &cause);
    }
}

/// The ends of one direction that calls wait for.
struct Ends<'a, E: LineEnd> {
    by_socket: Vec<(&'a Op<E>, MappedMutexGuard<'a, E>)>,
    by_memory: Vec<(&'a Op<E>, MappedMutexGuard<'a, E>)>,
    /// Lines whose turn belongs to another thread.
    absent: Vec<(&'a Line<E>, u64)>,
}

impl<E: LineEnd> Ends<'_, E> {
    /// A message to or from a rank that no longer takes part, if only the memory could show it.
    fn over(&self, shared: &Shared) -> Option<(Rank, Call, u64)> {
        let over = self.by_memory.iter().find(|(_, end)| shared.is_over(&**end));
        over.map(|(op, end)| (end.peer(), op.call, op.ticket))
    }
}

impl<E: LineEnd> Pending<E> {
    fn new(world: usize) -> Self {
        Self { lines: std::iter::repeat_with(VecDeque::new).take(world).collect(), active: Vec::new() }
    }

    fn push(&mut self, peer: Rank, op: Op<E>) {
        let Some(line) = self.lines.get_mut(peer.index()) else { return };
        if line.is_empty() {
            self.active.push(peer);
        }
        line.push_back(op);
    }

    fn first(&self) -> Option<(Call, u64)> {
        let op = self.lines.get(self.active.first()?.index())?.front()?;
        Some((op.call, op.ticket))
    }

    fn round(&mut self, lines: &[Option<Line<E>>], shared: &Shared) -> Result<Round, Failed> {
        let mut round = Round::default();
        for peer in &self.active {
            let Ok(line) = line(lines, *peer) else { continue };
            let ops = &mut self.lines[peer.index()];
            for _ in 0..ROW {
                let Some(op) = ops.front_mut().filter(|op| line.is_served(op.ticket)) else { break };
                let mut end = line.end();
                let may_begin = if op.has_begun { Ok(()) } else { shared.check_receiver(&*end) };
                op.has_begun = true;
                let step = may_begin.and_then(|()| end.advance(&mut op.frame, &mut op.buffer));
                let step = step.map_err(|error| Failed { error, call: op.call, ticket: op.ticket })?;
                round.moved |= step != Step::Idle;
                if step != Step::Done {
                    round.has_socket |= end.socket().is_some();
                    break;
                }
                drop(end);
                if let Some(op) = ops.pop_front() {
                    line.leave(op.ticket);
                    op.complete(shared);
                }
            }
        }
        self.active.retain(|peer| !self.lines[peer.index()].is_empty());
        Ok(round)
    }

    fn ends<'a>(&'a self, lines: &'a [Option<Line<E>>]) -> Ends<'a, E> {
        let mut ends = Ends { by_socket: Vec::new(), by_memory: Vec::new(), absent: Vec::new() };
        for peer in &self.active {
            let (Some(op), Ok(line)) = (self.lines[peer.index()].front(), line(lines, *peer)) else {
                continue;
            };
            if !line.is_served(op.ticket) {
                ends.absent.push((line, op.ticket));
                continue;
            }
            let end = line.end();
            let kind = if end.socket().is_some() { &mut ends.by_socket } else { &mut ends.by_memory };
            kind.push((op, end));
        }
        ends
    }

    fn deadlines(&self) -> impl Iterator<Item = Deadline> {
        self.active.iter().flat_map(|peer| self.lines[peer.index()].iter().map(|op| op.deadline))
    }

    fn expired(&self, shared: &Shared) -> Result<(), Failed> {
        for peer in &self.active {
            if let Some(op) = self.lines[peer.index()].iter().find(|op| op.deadline.has_passed()) {
                let (call, ticket) = (op.call, op.ticket);
                return Err(Failed { error: shared.late::<E>(*peer), call, ticket });
            }
        }
        Ok(())
    }

    fn give_up(&mut self, lines: &[Option<Line<E>>], cause: &Error) {
        for peer in self.active.drain(..) {
            for op in self.lines[peer.index()].drain(..) {
                let completer = op.withdraw(lines, peer);
                completer.complete(Err(cause.clone()));
            }
        }
    }
}

impl<E: LineEnd> Op<E> {
    /// Leaves its place in the order.
    fn withdraw(self, lines: &[Option<Line<E>>], peer: Rank) -> Completer {
        if let Ok(line) = line(lines, peer) {
            line.leave(self.ticket);
        }
        self.completer
    }

    fn complete(self, shared: &Shared) {
        if let Some(begin) = self.begin {
            shared.trace.complete(Track::Communication, self.call.to_string(), begin, Instant::now(), &[]);
        }
        self.completer.complete(Ok(self.buffer));
    }
}
