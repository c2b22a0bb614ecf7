//! The connection with one peer: what is in flight on it, and its end.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::Limits;
use super::payload::Written;
use super::window::Window;
use crate::buffer::Buffer;
use crate::deadline::Deadline;
use crate::error::{Error, Kind as ErrorKind, Result};
use crate::group::{Completer, ProcessGroup, Work};
use crate::rank::Rank;
use crate::wire::rpc::{DEPTHS, Head, INLINE, Kind, ObjectId};

/// The least time for a short message, even if the deadline has just passed.
const MIN_TIMEOUT: Duration = Duration::from_millis(1);

/// This rank's side of the connection with `peer`, or of its calls to itself.
pub(super) struct Link {
    pub peer: Rank,
    /// The group of the two; none to itself, or after the end.
    group: Mutex<Option<ProcessGroup>>,
    /// Locked while a frame and its payload are sent: they must stay together.
    turn: Mutex<()>,
    state: Mutex<LinkState>,
    changed: Condvar,
}

struct LinkState {
    /// Calls of this rank.
    outgoing: Window,
    /// Calls of the peer.
    incoming: Window,
    /// How many of the peer's calls have left `incoming` and are being answered.
    answering: usize,
    pending: HashMap<u64, Pending>,
    /// By depth, calls of this rank that wait for a place, in their order: a long one must not wait until there are no short ones.
    waiting: [VecDeque<u64>; DEPTHS],
    last_call: u64,
    /// Objects of the peer that this rank no longer holds, and that the peer has not been told of.
    released: Vec<ObjectId>,
    /// A thread tells the peer of them, and of those that come meanwhile.
    is_releasing: bool,
    /// The peer's program makes no more calls.
    is_done: bool,
    /// This rank has sent its last frame.
    has_said_bye: bool,
    /// Why nothing can be called or answered any more.
    failure: Option<Error>,
}

/// A call of this rank that has not been answered.
struct Pending {
    completer: Completer,
    depth: u8,
    bytes: u64,
}

impl Link {
    /// `own` are the limits for the peer's calls, `theirs` those for calls to it.
    pub(super) fn new(peer: Rank, own: Limits, theirs: Limits) -> Self {
        let state = LinkState {
            outgoing: Window::new(theirs),
            incoming: Window::new(own),
            answering: 0,
            pending: HashMap::new(),
            waiting: Default::default(),
            last_call: 0,
            released: Vec::new(),
            is_releasing: false,
            is_done: false,
            has_said_bye: false,
            failure: None,
        };
        Self {
            peer,
            group: Mutex::new(None),
            turn: Mutex::new(()),
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    pub(super) fn group(&self) -> Option<ProcessGroup> {
        self.group.lock().clone()
    }

    /// `group` is the group of this rank and the peer.
    pub(super) fn join(&self, group: ProcessGroup) {
        *self.group.lock() = Some(group);
    }

    /// Leaves the peer.
    pub(super) fn leave_group(&self) {
        let group = self.group.lock().take();
        drop(group);
    }

    /// The peer's rank in the group of the two.
    pub(super) fn rank_in(&self, group: &ProcessGroup) -> Rank {
        Rank::new(1 - group.rank().get())
    }

    /// Takes a place in the window for a call, and a number for it. Waits for them until `deadline`, behind calls at this depth that
    /// wait already.
    pub(super) fn enter(&self, depth: u8, bytes: u64, deadline: Deadline) -> Result<(u64, Work)> {
        let mut state = self.state.lock();
        state.last_call += 1;
        let (number, queue) = (state.last_call, usize::from(depth).min(DEPTHS - 1));
        state.waiting[queue].push_back(number);
        let entered = self.await_place(&mut state, number, (depth, bytes), deadline);
        state.waiting[queue].retain(|waiting| *waiting != number);
        if !state.waiting[queue].is_empty() {
            // There may be a place for the next one.
            self.changed.notify_all();
        }
        entered?;
        let (work, completer) = Work::pending();
        state.pending.insert(number, Pending { completer, depth, bytes });
        Ok((number, work))
    }

    /// Waits until the call `number` is the first that waits at its depth, and there is a place for it.
    fn await_place(
        &self,
        state: &mut MutexGuard<'_, LinkState>,
        number: u64,
        (depth, bytes): (u8, u64),
        deadline: Deadline,
    ) -> Result<()> {
        let mut is_late = false;
        loop {
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            let is_next = state.waiting.iter().any(|queue| queue.front() == Some(&number));
            if is_next && state.outgoing.enter(depth, bytes) {
                return Ok(());
            }
            if is_late {
                let cause = format!(
                    "rank {} has not answered enough of the calls before it: {} are in flight",
                    self.peer,
                    state.pending.len()
                );
                return Err(Error::timeout(cause).with_peer(self.peer).with_remedy(
                    "wait for answers before more is called, or raise RpcBuilder::calls_in_flight or bytes_in_flight there",
                ));
            }
            is_late = self.changed.wait_until(state, deadline.instant()).timed_out();
        }
    }

    /// Takes a call back that could not be sent.
    pub(super) fn withdraw(&self, call: u64) {
        let mut state = self.state.lock();
        if let Some(Pending { completer, depth, bytes }) = state.pending.remove(&call) {
            state.outgoing.leave(depth, bytes);
            drop(state);
            self.changed.notify_all();
            drop(completer);
        }
    }

    /// Sends the last frame, once.
    pub(super) fn say_bye(&self, deadline: Deadline) {
        if !std::mem::replace(&mut self.state.lock().has_said_bye, true) {
            let Some(group) = self.group() else { return };
            // If it cannot be sent, the peer has left or does not receive: there is no need to wait for it.
            let brief = group.with_timeout(deadline.remaining().max(MIN_TIMEOUT));
            let _ = self.send_in(&brief, &Head::plain(Kind::Bye), &Written::default(), deadline);
        }
    }

    /// Sends a frame with its payload. Waits until `deadline` for its turn.
    pub(super) fn send(&self, head: &Head, payload: &Written, deadline: Deadline) -> Result<()> {
        let group = self.group().ok_or_else(|| self.failure().unwrap_or_else(shut_down))?;
        self.send_in(&group, head, payload, deadline)
    }

    /// Sends what the peer must have as long as the connection stands: an answer, or an end. Waits for its turn without a limit, since
    /// each thread that has it ends in time, or the connection fails.
    pub(super) fn deliver(&self, head: &Head, payload: &Written) -> Result<()> {
        self.send(head, payload, Deadline::after(Duration::MAX))
    }

    /// Has the turn to send, as a thread with a long message.
    #[cfg(test)]
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock()
    }

    /// How many calls of the peer are being answered.
    #[cfg(test)]
    pub(super) fn answers_on_the_way(&self) -> usize {
        self.state.lock().answering
    }

    /// `group` is the group of the two.
    fn send_in(
        &self,
        group: &ProcessGroup,
        head: &Head,
        payload: &Written,
        deadline: Deadline,
    ) -> Result<()> {
        let Some(_turn) = self.turn.try_lock_until(deadline.instant()) else {
            let cause = format!("what was sent to rank {} before it is still under way", self.peer);
            return Err(Error::timeout(cause)
                .with_peer(self.peer)
                .with_remedy("is that rank or the network slow? Rpc::with_timeout gives it more time"));
        };
        let to = self.rank_in(group);
        let parts = payload.parts();
        let sent = if payload.len() > INLINE {
            group.send(&head.encode(&[]), to).and_then(|()| group.send_parts(&parts, to))
        } else {
            // What is so short is in one part.
            group.send(&head.encode(parts.first().copied().unwrap_or_default()), to)
        };
        sent.map_err(|error| self.fail(self.explained(&error)))
    }

    /// Admits a call of the peer, before memory is taken for it. Each answer that is being sent has a thread, so there may be as many as
    /// calls: a peer that calls more has received some of the answers, whose threads are about to end; if they do not by `deadline`, it
    /// does not receive what it has asked for.
    pub(super) fn admit(&self, head: &Head, deadline: Deadline) -> Result<()> {
        let mut state = self.state.lock();
        let mut is_late = false;
        while state.failure.is_none() && state.answering >= state.incoming.most_calls() {
            if is_late {
                return Err(Error::protocol(format!(
                    "rank {} calls on, and does not receive the answers: {} are on their way",
                    self.peer, state.answering
                )));
            }
            is_late = self.changed.wait_until(&mut state, deadline.instant()).timed_out();
        }
        if state.incoming.enter(head.depth, head.length) {
            return Ok(());
        }
        Err(Error::protocol(format!("rank {} has sent more calls than this rank admits", self.peer)))
    }

    /// Checks that `call` is one of this rank's that waits for its answer.
    pub(super) fn awaits(&self, call: u64) -> Result<()> {
        match self.state.lock().pending.contains_key(&call) {
            true => Ok(()),
            false => Err(Error::protocol(format!(
                "rank {} has answered call {call}, which this rank has not made",
                self.peer
            ))),
        }
    }

    /// Before a call of the peer is answered: its place is free when the peer has the answer.
    pub(super) fn leave(&self, head: &Head) {
        let mut state = self.state.lock();
        state.incoming.leave(head.depth, head.length);
        state.answering += 1;
    }

    /// The answer has been sent, or could not be.
    pub(super) fn has_answered(&self) {
        self.state.lock().answering -= 1;
        self.changed.notify_all();
    }

    /// The answer to `call` has come.
    pub(super) fn answered(&self, call: u64, outcome: Result<Buffer>) {
        let mut state = self.state.lock();
        let Some(Pending { completer, depth, bytes }) = state.pending.remove(&call) else { return };
        state.outgoing.leave(depth, bytes);
        drop(state);
        self.changed.notify_all();
        completer.complete(outcome);
    }

    /// Notes an object that this rank no longer holds. Returns whether the caller tells the peer, until
    /// [`take_released`](Self::take_released) has nothing more; otherwise another thread does, or nobody need.
    pub(super) fn release(&self, object: ObjectId) -> bool {
        let mut state = self.state.lock();
        if state.failure.is_some() {
            return false;
        }
        state.released.push(object);
        !std::mem::replace(&mut state.is_releasing, true)
    }

    /// What the peer must be told of now; none if the caller has told it of all.
    pub(super) fn take_released(&self) -> Option<Vec<ObjectId>> {
        let mut state = self.state.lock();
        state.is_releasing = !state.released.is_empty();
        state.is_releasing.then(|| std::mem::take(&mut state.released))
    }

    pub(super) fn done(&self) {
        self.state.lock().is_done = true;
        self.changed.notify_all();
    }

    /// Ends all calls with `error`, unless they were ended before. Returns the first cause.
    pub(super) fn fail(&self, error: Error) -> Error {
        let mut state = self.state.lock();
        let cause = state.failure.get_or_insert(error).clone();
        let pending = std::mem::take(&mut state.pending);
        drop(state);
        self.changed.notify_all();
        for (_, Pending { completer, .. }) in pending {
            completer.complete(Err(cause.clone()));
        }
        cause
    }

    pub(super) fn failure(&self) -> Option<Error> {
        self.state.lock().failure.clone()
    }

    /// Waits until this rank has the answers to its calls. False if they have not come by the deadline.
    pub(super) fn await_answers(&self, deadline: Deadline) -> bool {
        self.await_until(deadline, |state| state.outgoing.is_empty())
    }

    /// Waits until the peer's program makes no more calls, without a limit: heartbeats detect a peer that is dead.
    pub(super) fn await_done(&self) {
        self.await_until(Deadline::after(Duration::MAX), |state| state.is_done);
    }

    /// Waits until the peer has the answers to its calls. False if it has not by the deadline.
    pub(super) fn await_served(&self, deadline: Deadline) -> bool {
        self.await_until(deadline, |state| state.incoming.is_empty() && state.answering == 0)
    }

    fn await_until(&self, deadline: Deadline, is_over: impl Fn(&LinkState) -> bool) -> bool {
        let mut state: MutexGuard<'_, LinkState> = self.state.lock();
        let mut is_late = false;
        while state.failure.is_none() && !is_over(&state) {
            if is_late {
                return false;
            }
            is_late = self.changed.wait_until(&mut state, deadline.instant()).timed_out();
        }
        true
    }

    /// A failure of the group of the two, with the ranks' numbers in the whole group.
    pub(super) fn explained(&self, error: &Error) -> Error {
        let Some(group) = self.group() else { return shut_down() };
        let name = format!("rank {} (", self.rank_in(&group));
        let cause = error.full_cause();
        let cause = match cause.strip_prefix(&name) {
            Some(rest) => format!("rank {} ({rest}", self.peer),
            None => format!("the connection with rank {} failed: {cause}", self.peer),
        };
        let explained = Error::new(error.kind(), cause).with_peer(self.peer);
        // Its remedies have the ranks' numbers in the group of two, but for that of memory.
        match (error.kind(), error.remedy()) {
            (ErrorKind::PeerFailed, _) => {
                explained.with_remedy(format!("see rank {}'s own output for its reason", self.peer))
            }
            (ErrorKind::OutOfMemory, Some(remedy)) => explained.with_remedy(remedy),
            _ => explained,
        }
    }

    /// The error of calls to a peer that has ended its side.
    pub(super) fn departed(&self) -> Error {
        Error::new(ErrorKind::PeerLeft, format!("rank {} has shut down its remote calls", self.peer))
            .with_peer(self.peer)
            .with_remedy("let every rank call Rpc::shutdown, which waits for the calls of the others")
    }
}

/// The error of calls after this rank's own end.
pub(super) fn shut_down() -> Error {
    Error::aborted("the remote calls of this rank have been shut down")
}

/// The frame that releases `object`.
pub(super) fn release(object: ObjectId) -> Head {
    Head { object, ..Head::plain(Kind::Release) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_call_is_not_overtaken_by_short_ones() {
        let limits = Limits { calls: 8, bytes: 100 };
        let link = Link::new(Rank::new(1), limits, limits);
        let later = Deadline::after(Duration::from_secs(60));
        let (first, _answer) = link.enter(0, 60, later).unwrap();
        std::thread::scope(|scope| {
            let long = scope.spawn(|| link.enter(0, 100, later).map(|(number, _)| number));
            while link.state.lock().waiting[0].is_empty() {
                assert!(!later.has_passed());
                std::thread::yield_now();
            }
            // There is room for this one, but it has come later.
            assert!(link.enter(0, 10, Deadline::now()).unwrap_err().is_timeout());
            let (inner, _answer) = link.enter(1, 10, later).unwrap();
            link.withdraw(first);
            let long = long.join().unwrap().unwrap();
            assert!(first < long && long < inner, "{first}, {long}, {inner}");
            link.withdraw(long);
        });
        let _place = link.enter(0, 10, Deadline::now()).unwrap();
        assert!(link.state.lock().waiting.iter().all(VecDeque::is_empty));
    }

    #[test]
    fn no_more_answers_are_on_their_way_than_calls_may_be_in_flight() {
        let limits = Limits { calls: 2, bytes: 100 };
        let link = Link::new(Rank::new(1), limits, limits);
        let call = Head { length: 10, ..Head::plain(Kind::Call) };
        // Each is answered, and its answer is not received.
        for _ in 0..2 * DEPTHS {
            link.admit(&call, Deadline::now()).unwrap();
            link.leave(&call);
        }
        let error = link.admit(&call, Deadline::now()).unwrap_err();
        assert!(error.to_string().contains("does not receive the answers"), "{error}");
        let later = Deadline::after(Duration::from_secs(60));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| link.admit(&call, later));
            link.has_answered();
            waits.join().unwrap().unwrap();
        });
        link.leave(&call);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| link.admit(&call, later));
            link.fail(shut_down());
            waits.join().unwrap().unwrap();
        });
    }

    #[test]
    fn one_thread_at_a_time_tells_the_peer_of_released_objects() {
        let limits = Limits { calls: 1, bytes: 1 };
        let link = Link::new(Rank::new(1), limits, limits);
        let object = |number| ObjectId { creator: Rank::MAIN, number };
        assert!(link.release(object(1)) && !link.release(object(2)));
        assert_eq!(link.take_released(), Some(vec![object(1), object(2)]));
        // The thread is still sending these: a second one would wait for it.
        assert!(!link.release(object(3)));
        assert_eq!(link.take_released(), Some(vec![object(3)]));
        assert_eq!(link.take_released(), None);
        assert!(link.release(object(4)), "the thread has ended");
        link.fail(shut_down());
        assert!(!link.release(object(5)), "the peer holds nothing for this rank any more");
    }
}
