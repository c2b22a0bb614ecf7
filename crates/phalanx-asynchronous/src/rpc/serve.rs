//! The other side of calls: receives frames, runs handlers, answers, and ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::link::{Link, release, shut_down};
use super::objects::Value;
use super::payload::{Received, Written};
use super::pool::Pool;
use super::registry::{Arguments, Function, HANDLER, Pledge, caught};
use super::remote::is_builtin;
use super::{FAREWELL_TIMEOUT, Shared};
use crate::buffer::Buffer;
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::rank::Rank;
use crate::wire::control::Notice;
use crate::wire::rpc::{FRAME, Head, Kind, MAX_PAYLOAD};

/// How long a peer that calls on may receive none of the answers to its earlier calls.
const ANSWERS_TIMEOUT: Duration = Duration::from_secs(60);
/// So many peers are left at a time: each takes a round trip.
const LEFT_AT_ONCE: usize = 8;

impl Shared {
    /// Starts the thread that receives from `peer`.
    pub(super) fn receive_from(self: &Arc<Self>, peer: Rank) -> Result<()> {
        let Some(group) = self.link(peer)?.group() else { return Ok(()) };
        // Heartbeats detect a silent peer.
        let group = group.with_timeout(Duration::MAX);
        let shared = self.clone();
        let thread = std::thread::Builder::new()
            .name(format!("phalanx-rpc-{}<{peer}", self.rank))
            .spawn(move || shared.receive(peer, &group))
            .map_err(|error| Error::not_started("a thread for remote calls could not be started", error))?;
        self.receivers.lock().push(thread);
        Ok(())
    }

    /// Receives until the peer's last frame, or until the connection fails.
    fn receive(self: &Arc<Self>, peer: Rank, group: &ProcessGroup) {
        let Ok(link) = self.link(peer) else { return };
        let outcome = caught("the thread that receives from that rank", || self.frames(link, group));
        let cause = match outcome {
            Ok(()) => link.departed(),
            Err(error) => {
                // For a frame that no rank sends; in any other case the group has failed already.
                group.abort(error.clone());
                link.explained(&group.failure().unwrap_or(error))
            }
        };
        let cause = link.fail(cause);
        self.discard(self.objects.release_all(peer));
        let shared = self.clone();
        self.pool.push_internal(move || shared.bid_farewell(peer, Deadline::after(FAREWELL_TIMEOUT)));
        // A thread that sends may have noticed the end first, so the link may have failed before `on_lost` was called.
        if !self.closed.load(Ordering::Acquire) {
            let shared = self.clone();
            // Not behind handlers: they may wait for the rank that is gone, and this wakes them.
            self.pool.push_internal(move || {
                let context = shared.context(peer);
                for lost in &shared.lost {
                    // A panic has been printed, and there is no caller to report it to.
                    let _ = caught(HANDLER, || {
                        lost(&context, &cause);
                        Ok(())
                    });
                }
            });
        }
    }

    fn frames(self: &Arc<Self>, link: &Link, group: &ProcessGroup) -> Result<()> {
        let from = link.rank_in(group);
        loop {
            let mut frame = [0u8; FRAME];
            group.recv(&mut frame, from)?;
            let head = Head::decode(&frame)?;
            match head.kind {
                Kind::Call | Kind::Make | Kind::Method => {
                    link.admit(&head, Deadline::after(ANSWERS_TIMEOUT))?
                }
                Kind::Answer | Kind::Failure => link.awaits(head.call)?,
                Kind::Release => self.discard(self.objects.release(head.object, link.peer)),
                Kind::Done => link.done(),
                Kind::Bye => return Ok(()),
            }
            let payload = match head.inline(&frame) {
                Some(payload) => Buffer::from_slice(payload),
                None => {
                    // The header and the window have bounded it.
                    let length = head.length as usize;
                    let mut payload =
                        self.spare.take(length).ok_or_else(|| self.has_no_memory(length, link.peer))?;
                    group.recv(payload.as_mut_slice::<u8>()?, from)?;
                    payload
                }
            };
            match head.kind {
                Kind::Call | Kind::Make | Kind::Method => self.accept(link.peer, head, payload)?,
                Kind::Answer => link.answered(head.call, Ok(payload)),
                Kind::Failure => {
                    let notice: Notice = postcard::from_bytes(payload.as_bytes()).map_err(|error| {
                        Error::protocol("the error of a remote call cannot be read").with_source(error)
                    })?;
                    link.answered(head.call, Err(notice.into_error(link.peer, "unknown host")));
                }
                Kind::Release | Kind::Done | Kind::Bye => {}
            }
        }
    }

    /// Queues a call of `from`, which has been admitted.
    pub(super) fn accept(self: &Arc<Self>, from: Rank, head: Head, payload: Buffer) -> Result<()> {
        // At once: a release may follow.
        let object = match head.kind {
            Kind::Make => {
                self.objects.begin(head.object, from)?;
                None
            }
            Kind::Method => Some(self.objects.get(head.object, from)),
            _ => None,
        };
        let shared = self.clone();
        let is_builtin = is_builtin(&payload.as_bytes()[..usize::from(head.name)]);
        let job = move || shared.run(from, head, payload, object);
        match is_builtin {
            true => self.pool.push_internal(job),
            false => self.pool.push(head.depth, job),
        }
        Ok(())
    }

    /// `object` is what a method is called on.
    fn run(self: Arc<Self>, from: Rank, head: Head, payload: Buffer, object: Option<Result<Value>>) {
        let args = Arguments { payload: Received::new(payload, &self.spare), begin: usize::from(head.name) };
        let name = String::from_utf8_lossy(&args.payload.as_bytes()[..args.begin]).into_owned();
        let context = self.context(from);
        let pledge = Pledge::new(&self, from, head, name.clone());
        let function = match self.functions.get(&name, &context) {
            Ok(function) => function,
            Err(error) => return pledge.keep(Err(error)),
        };
        let outcome = match (function, head.kind, object) {
            (Function::Deferred(function), Kind::Call, _) => {
                // If it panics, that drops the pledge, which says so.
                let _ = caught(HANDLER, || function(&context, &args, pledge));
                return;
            }
            (Function::Plain(function), Kind::Call, _) => caught(HANDLER, || function(&context, &args)),
            (Function::Object(function), Kind::Make, _) => caught(HANDLER, || {
                drop(self.objects.keep(head.object, function(&context, &args)?));
                Ok(Written::default())
            }),
            (Function::Method(function), Kind::Method, Some(value)) => value.and_then(|value| {
                // It drops the value too, which may be the last to hold it.
                caught(HANDLER, || {
                    let value = value;
                    function(&context, &value, &args)
                })
            }),
            (Function::Plain(_) | Function::Deferred(_), ..) => Err(misused(&name, "Rpc::call")),
            (Function::Object(_), ..) => Err(misused(&name, "Rpc::remote")),
            (Function::Method(_), ..) => Err(misused(&name, "RemoteRef::call")),
        };
        // Before the answer: the next call, which may use its memory, may follow at once.
        drop(args);
        pledge.keep(outcome);
    }

    /// Answers the call `head` of `to`.
    pub(super) fn answer(self: &Arc<Self>, to: Rank, head: &Head, outcome: Result<Written>) {
        let Ok(link) = self.link(to) else { return };
        let outcome = match outcome {
            Ok(result) if result.len() > MAX_PAYLOAD => {
                let cause = format!("the result takes {} bytes; it may take {MAX_PAYLOAD}", result.len());
                let error = Error::invalid_argument(cause)
                    .with_remedy("return it in several calls, or by collectives");
                Err(self.located(error, "rpc"))
            }
            outcome => outcome,
        };
        if to == self.rank {
            let outcome = outcome.and_then(|result| self.copy(&result));
            return link.answered(head.call, outcome);
        }
        link.leave(head);
        let (kind, payload) = match outcome {
            Ok(result) => (Kind::Answer, result),
            Err(error) => {
                (Kind::Failure, postcard::to_stdvec(&Notice::of(&error)).unwrap_or_default().into())
            }
        };
        let head = Head { call: head.call, length: payload.len() as u64, ..Head::plain(kind) };
        // If it cannot be sent, the connection has failed, which the caller sees too.
        let _ = Pool::waiting(|| link.deliver(&head, &payload));
        link.has_answered();
    }

    /// What this rank sends to itself.
    pub(super) fn copy(&self, payload: &Written) -> Result<Buffer> {
        let copy = self.spare.copy(&payload.parts());
        copy.ok_or_else(|| self.has_no_memory(payload.len(), self.rank))
    }

    fn has_no_memory(&self, length: usize, from: Rank) -> Error {
        let cause =
            format!("rank {} has no memory for the {length} bytes that rank {from} has sent", self.rank);
        Error::out_of_memory(cause).with_remedy(
            "send less in one call; or, on the rank that lacks memory, lower RpcBuilder::bytes_in_flight",
        )
    }

    /// Tells `owner` which of its objects this rank no longer holds.
    pub(super) fn send_releases(&self, owner: Rank) {
        let Ok(link) = self.link(owner) else { return };
        while let Some(objects) = link.take_released() {
            for object in objects {
                let _ = link.deliver(&release(object), &Written::default());
            }
        }
    }

    /// Drops objects that this rank no longer keeps, in a thread of the pool: their `drop` is the program's code, which may call,
    /// shut down the calls, or panic.
    pub(super) fn discard(self: &Arc<Self>, values: impl IntoIterator<Item = Value>) {
        for value in values {
            self.pool.push(0, move || drop(value));
        }
    }

    /// Sends this rank's last frame to `peer`, if that is still possible, so that the peer need not wait.
    fn bid_farewell(&self, peer: Rank, deadline: Deadline) {
        if let Ok(link) = self.link(peer)
            && link.group().is_some_and(|group| group.failure().is_none())
        {
            link.say_bye(deadline);
        }
    }

    /// Waits until no rank calls any more, and ends. `timeout` applies to missing answers only: other ranks may call as long as
    /// they are alive.
    pub(super) fn finish(self: &Arc<Self>, timeout: Duration) -> Result<()> {
        let deadline = Deadline::after(timeout);
        let others = || self.links.iter().filter(|link| link.peer != self.rank);
        let mut late = None;
        for link in &self.links {
            if !link.await_answers(deadline) {
                late.get_or_insert((link.peer, "has not answered all calls of this rank"));
            }
        }
        for link in others() {
            let _ = link.deliver(&Head::plain(Kind::Done), &Written::default());
        }
        others().for_each(Link::await_done);
        // A peer that has sent `Done` has its answers, or its own time-out has passed.
        let deadline = Deadline::after(timeout);
        for link in others() {
            if !link.await_served(deadline) {
                late.get_or_insert((link.peer, "has no answer to a call of this rank's functions"));
            }
        }
        self.close();
        match late {
            None => Ok(()),
            Some((peer, why)) => {
                Err(Error::timeout(format!("rank {peer} {why}")).with_peer(peer).with_remedy(
                    "is a handler slow, or has one lost its Answer? Rpc::with_timeout gives it more time",
                ))
            }
        }
    }

    /// Ends the calls of this rank, and those to it. Does nothing the second time.
    pub(super) fn close(self: &Arc<Self>) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let deadline = Deadline::after(FAREWELL_TIMEOUT);
        for link in &self.links {
            if std::thread::panicking()
                && let Some(group) = link.group()
            {
                group.abort(Error::aborted(format!("rank {} panicked", self.rank)));
            }
            link.fail(shut_down());
            self.bid_farewell(link.peer, deadline);
        }
        let mut receivers = std::mem::take(&mut *self.receivers.lock());
        // A thread does not wait for itself.
        receivers.retain(|receiver| receiver.thread().id() != std::thread::current().id());
        if !have_ended(&receivers, deadline) {
            for group in self.links.iter().filter_map(Link::group) {
                group.abort(Error::aborted(format!("rank {} has ended its remote calls", self.rank)));
            }
            have_ended(&receivers, Deadline::after(FAREWELL_TIMEOUT));
        }
        for receiver in receivers.drain(..).filter(JoinHandle::is_finished) {
            // A receiver runs none of the program's code, and has no result.
            let _ = receiver.join();
        }
        self.pool.close();
        leave_all(&self.links);
    }
}

fn leave_all(links: &[Link]) {
    let next = AtomicUsize::new(0);
    let leave = || {
        while let Some(link) = links.get(next.fetch_add(1, Ordering::Relaxed)) {
            link.leave_group();
        }
    };
    std::thread::scope(|scope| {
        // A thread that panics waits for no answers; others would. Without other threads it only takes longer.
        let others =
            if std::thread::panicking() { 0 } else { links.len().min(LEFT_AT_ONCE).saturating_sub(1) };
        for _ in 0..others {
            let thread = std::thread::Builder::new().name("phalanx-rpc-end".into());
            if thread.spawn_scoped(scope, leave).is_err() {
                break;
            }
        }
        leave();
    });
}

/// Waits until all `threads` have ended. False if they have not by the deadline.
fn have_ended(threads: &[JoinHandle<()>], deadline: Deadline) -> bool {
    let mut pauses = Backoff::new((Duration::from_micros(100), Duration::from_millis(5)), deadline);
    loop {
        if threads.iter().all(JoinHandle::is_finished) {
            return true;
        }
        if !pauses.pause() {
            return false;
        }
    }
}

fn misused(name: &str, with: &str) -> Error {
    Error::invalid_argument(format!("{name:?} is to be called with {with}"))
}
