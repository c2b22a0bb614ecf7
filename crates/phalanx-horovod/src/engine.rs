//! The queue between the program's threads and the thread that negotiates: it takes submissions and returns handles.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use phalanx::{Error, ProcessGroup, Rank, Result};

use crate::background::{Background, Timeline};
use crate::handle::{Completer, Handle, Outcome};
use crate::options::Options;
use crate::tensor::Tensor;
use crate::topology::numbered_among;
use phalanx_proto::horovod::message::{MAX_REFUSALS, Refusal};
use phalanx_proto::horovod::request::{MAX_IN_FLIGHT, Request};

/// The groups of an engine: one for negotiation and one for data.
#[derive(Clone)]
pub(crate) struct Groups {
    pub control: ProcessGroup,
    pub data: ProcessGroup,
}

impl Groups {
    /// Ends both with `cause`: other ranks may wait for this one in either.
    pub fn abort(&self, cause: &Error) {
        self.data.abort(cause.clone());
        self.control.abort(cause.clone());
    }
}

/// The thread that negotiates, and its queue.
pub(crate) struct Engine {
    shared: Arc<Shared>,
    groups: Groups,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// The process that has started it, and not one that was forked from that.
    process: u32,
}

/// What the program's threads and the engine's share.
#[derive(Default)]
pub(crate) struct Shared {
    state: Mutex<State>,
    /// There is a reason to begin the next cycle at once.
    hurry: Condvar,
    pub counts: Counts,
}

#[derive(Default)]
struct State {
    submitted: Vec<Submitted>,
    /// How many of these are refusals.
    refusals: usize,
    names: HashSet<String>,
    joins: Option<Completer>,
    has_joined: bool,
    leaves: bool,
    /// How many of the program's threads wait for a handle.
    waiting: usize,
    timeline: Option<NextTimeline>,
    /// Why nothing is accepted any more.
    ended: Option<Error>,
    /// Whether an operation has failed because of that.
    is_told: bool,
}

/// A timeline that replaces the current one. It is dropped when the current one's file is complete.
pub(crate) struct NextTimeline {
    pub timeline: Timeline,
    _done: Sender<()>,
}

/// What comes of a call of the program that has a name.
pub(crate) enum Submitted {
    Operation(Submission),
    /// The program has got an error, and the other ranks get one, too.
    Refusal(Refusal),
}

/// What a program has submitted.
pub(crate) struct Submission {
    pub request: Request,
    pub tensors: Vec<Tensor>,
    /// Of an alltoall: how many rows go to each rank.
    pub splits: Vec<usize>,
    pub at: Instant,
    pub done: Completer,
}

/// What the engine's thread takes at the beginning of a cycle.
pub(crate) struct Inbox {
    /// In the order of the calls.
    pub submitted: Vec<Submitted>,
    pub joins: Option<Completer>,
    pub leaves: bool,
    /// The program waits for a handle.
    pub waits: bool,
    pub timeline: Option<NextTimeline>,
}

/// When the next cycle begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// If something is in flight: what is submitted until then is sent together.
    pub soon: Instant,
    /// Otherwise.
    pub late: Instant,
    /// On some rank the program does not wait for a handle.
    pub any_computes: bool,
}

#[derive(Default)]
pub(crate) struct Counts {
    pub cycles: AtomicU64,
    pub rounds: AtomicU64,
    pub batches: AtomicU64,
    pub tensors: AtomicU64,
    pub fusion_bytes: AtomicUsize,
}

/// What a [`Horovod`](crate::Horovod) has done so far, on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Cycles of negotiation.
    pub cycles: u64,
    /// Of these, those in which names were on the wire.
    pub rounds: u64,
    /// Operations on the tensors of one or more names.
    pub batches: u64,
    /// Names that were carried out.
    pub names: u64,
    /// Bytes of the fusion buffer now. It grows with the batches, up to the fusion threshold.
    pub fusion_bytes: usize,
}

impl Engine {
    pub fn start(groups: Groups, options: &Options, timeline: Timeline) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let background = Background::new(shared.clone(), groups.clone(), options, timeline);
        let thread = Builder::new().name("phalanx-horovod".into()).spawn(move || background.run());
        let thread = thread.map_err(|error| Error::not_started("cannot start Horovod's thread", error))?;
        Ok(Self { shared, groups, thread: Mutex::new(Some(thread)), process: std::process::id() })
    }

    /// Hands an operation over. An alltoall has splits.
    ///
    /// # Errors
    /// If the request cannot be, of which the other ranks hear; if its name is in flight, or the engine has ended.
    pub fn submit<T>(
        &self,
        request: Request,
        (tensors, splits): (Vec<Tensor>, Vec<usize>),
        take: fn(Outcome) -> Result<T>,
    ) -> Result<Handle<T>> {
        let checked = request.check(self.groups.control.world_size().count());
        checked.inspect_err(|error| self.refuse(&request.name, &error.full_cause()))?;
        let (handle, done) = Handle::new(take, self.shared.clone());
        let mut state = self.shared.state.lock();
        state.check()?;
        if state.has_joined {
            return Err(Error::invalid_argument(format!(
                "{:?} was submitted while this rank waits in join: it has said that it has no more data",
                request.name
            ))
            .with_remedy("submit before join, or when it has returned"));
        }
        if state.names.len() >= MAX_IN_FLIGHT {
            return Err(Error::invalid_argument(format!("{MAX_IN_FLIGHT} names are in flight already"))
                .with_remedy("synchronize some of their handles first"));
        }
        // The others are not told: that is no call which they make, too.
        if !state.names.insert(request.name.clone()) {
            return Err(Error::invalid_argument(format!("{:?} is in flight already", request.name))
                .with_remedy("synchronize its handle first, or give this tensor another name"));
        }
        let submission = Submission { request, tensors, splits, at: Instant::now(), done };
        state.submitted.push(Submitted::Operation(submission));
        if state.names.len() == 1 || state.waiting > 0 {
            self.shared.hurry.notify_all();
        }
        Ok(handle)
    }

    /// This rank has refused a call of `name`, and the other ranks must not wait for it.
    pub fn refuse(&self, name: &str, cause: &str) {
        self.shared.state.lock().refuse(name, cause);
    }

    /// Says that this rank has no more data.
    pub fn join<T>(&self, take: fn(Outcome) -> Result<T>) -> Result<Handle<T>> {
        let (handle, done) = Handle::new(take, self.shared.clone());
        let mut state = self.shared.state.lock();
        state.check()?;
        if std::mem::replace(&mut state.has_joined, true) {
            return Err(Error::invalid_argument("this rank has joined already")
                .with_remedy("join waits for all ranks"));
        }
        state.joins = Some(done);
        Ok(handle)
    }

    /// Goes on with another timeline. When it returns, the file of the last one is complete.
    pub fn set_timeline(&self, timeline: Timeline) -> Result<()> {
        let (done, is_done) = channel();
        {
            let mut state = self.shared.state.lock();
            state.check()?;
            state.timeline = Some(NextTimeline { timeline, _done: done });
        }
        self.shared.hurry.notify_all();
        // Nothing is sent: the end is dropped, by the next cycle or by the end of all.
        let _ = is_done.recv();
        Ok(())
    }

    /// Whether it takes operations.
    pub fn is_open(&self) -> bool {
        let state = self.shared.state.lock();
        state.ended.is_none() && !state.leaves
    }

    /// What tells why it has ended, also when it is gone.
    pub fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }

    /// Ends the engine of every rank, and waits for this one's, unless that itself calls this.
    pub fn shutdown(&self) {
        if self.is_inherited() {
            return;
        }
        self.shared.state.lock().leaves = true;
        self.shared.hurry.notify_all();
        let thread = self.thread.lock().take();
        // A thread does not wait for itself: the memory of a tensor may hold the last handle, and then ends with an operation.
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            // If it has panicked, its handles have failed.
            let _ = thread.join();
        }
    }

    /// Whether this process was forked from the one that has started it: the thread and the other ranks are the parent's, and locks may never come
    /// free here.
    fn is_inherited(&self) -> bool {
        self.process != std::process::id()
    }

    pub fn stats(&self) -> Stats {
        let Counts { cycles, rounds, batches, tensors, fusion_bytes } = &self.shared.counts;
        Stats {
            cycles: cycles.load(Ordering::Relaxed),
            rounds: rounds.load(Ordering::Relaxed),
            batches: batches.load(Ordering::Relaxed),
            names: tensors.load(Ordering::Relaxed),
            fusion_bytes: fusion_bytes.load(Ordering::Relaxed),
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.is_inherited() {
            std::mem::forget(self.thread.get_mut().take());
            return;
        }
        if std::thread::panicking() {
            // The others must not mistake this for a clean end.
            let (rank, whose) = (self.groups.control.rank(), numbered_among(&self.groups.control));
            self.groups.abort(&Error::aborted(format!("rank {rank} panicked{whose}")));
        }
        self.shutdown();
    }
}

impl State {
    /// When the next cycle begins; none: at once.
    fn due(&self, pace: &Pace) -> Option<Instant> {
        let (waits, is_new) = (self.waiting > 0, !self.submitted.is_empty() || self.joins.is_some());
        if self.leaves || self.timeline.is_some() || waits && (pace.any_computes || is_new) {
            return None;
        }
        Some(if waits || !self.names.is_empty() { pace.soon } else { pace.late })
    }

    fn refuse(&mut self, name: &str, cause: &str) {
        // The others do not wait for a rank that has joined, and hear of one that has left.
        let is_waited_for = self.ended.is_none() && !self.leaves && !self.has_joined;
        if is_waited_for
            && self.refusals < MAX_REFUSALS
            && let Some(refusal) = Refusal::new(name, cause)
        {
            self.submitted.push(Submitted::Refusal(refusal));
            self.refusals += 1;
        }
    }

    fn check(&mut self) -> Result<()> {
        self.is_told |= self.ended.is_some();
        match (&self.ended, self.leaves) {
            (Some(cause), _) => Err(cause.clone()),
            (None, true) => Err(shut_down()),
            (None, false) => Ok(()),
        }
    }
}

/// The error of this rank's calls after its shutdown.
pub fn shut_down() -> Error {
    Error::aborted("this rank has shut Horovod down")
        .with_remedy("make no call after the shutdown, or start it again")
}

impl Shared {
    pub fn take(&self) -> Inbox {
        let mut state = self.state.lock();
        state.refusals = 0;
        Inbox {
            submitted: std::mem::take(&mut state.submitted),
            joins: state.joins.take(),
            leaves: state.leaves,
            waits: state.waiting > 0,
            timeline: state.timeline.take(),
        }
    }

    /// Notes, until the result is dropped, that the program waits for a handle: the next cycle should begin early.
    pub fn waits(&self) -> Waits<'_> {
        self.state.lock().waiting += 1;
        self.hurry.notify_all();
        Waits(self)
    }

    /// Waits for the next cycle. A cycle is a collective: a rank sleeps in it until all others have begun it. A cycle without new
    /// submissions of this rank completes nothing here, so a rank that computes and has nothing in flight begins it late. A rank
    /// whose program waits begins it at once if it has new submissions, or if another rank's program still computes: then that rank
    /// decides when the cycle is complete.
    pub fn pause(&self, pace: &Pace) {
        let mut state = self.state.lock();
        while let Some(due) = state.due(pace)
            && due > Instant::now()
        {
            self.hurry.wait_until(&mut state, due);
        }
    }

    /// Allows these names to be submitted again. Called before their handles are completed.
    pub fn release<'a>(&self, names: impl Iterator<Item = &'a str>) {
        let mut state = self.state.lock();
        for name in names {
            state.names.remove(name);
        }
    }

    /// All ranks have joined: this one may have data again.
    pub fn rejoin(&self) {
        self.state.lock().has_joined = false;
    }

    /// Why operations have failed, if another rank than `me` has left or has failed.
    pub fn failed_by_another(&self, me: Rank) -> Option<Error> {
        let is_another_s = |cause: &Error| {
            cause.is_a_peers(me) || cause.is_aborted() && cause.peer().is_some_and(|peer| peer != me)
        };
        let state = self.state.lock();
        state.ended.clone().filter(|cause| state.is_told && is_another_s(cause))
    }

    /// Whether a shutdown of this rank has ended it, and nothing has before.
    pub fn is_left(&self) -> bool {
        let state = self.state.lock();
        // Another rank's shutdown names that rank.
        let is_own = |cause: &Error| cause.is_aborted() && cause.peer().is_none();
        state.leaves && state.ended.as_ref().is_none_or(is_own)
    }

    /// Refuses further submissions, and returns those that have not been taken yet.
    pub fn end(&self, cause: &Error) -> Inbox {
        {
            let mut state = self.state.lock();
            state.ended = Some(cause.clone());
            state.is_told = !state.names.is_empty() || state.has_joined;
        }
        self.take()
    }
}

/// The program waits for a handle.
pub(crate) struct Waits<'a>(&'a Shared);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.state.lock().waiting -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_cycle_begins_when_it_may_bring_something() {
        let now = Instant::now();
        let pace = |any_computes| Pace {
            soon: now + Duration::from_millis(1),
            late: now + Duration::from_millis(5),
            any_computes,
        };
        let due = |state: &State, any_computes| state.due(&pace(any_computes));
        let mut state = State::default();
        assert_eq!(due(&state, true), Some(pace(true).late), "nothing to say");
        state.names.insert("in flight".into());
        assert_eq!(due(&state, true), Some(pace(true).soon), "others may have it now");
        state.waiting = 1;
        assert_eq!(due(&state, true), None, "it sleeps in the cycle until the others come");
        assert_eq!(due(&state, false), Some(pace(false).soon), "all wait, for different things");
        state.names.clear();
        assert_eq!(due(&state, false), Some(pace(false).soon), "it has joined");
        let (_handle, done) = Handle::new(|_| Ok(()), Arc::default());
        state.joins = Some(done);
        assert_eq!(due(&state, false), None, "nobody knows yet that it joins");
        state.joins = None;
        state.leaves = true;
        assert_eq!(due(&state, false), None);
    }

    #[test]
    fn a_process_that_was_forked_from_a_rank_s_neither_ends_the_job_nor_waits_for_its_thread() {
        let alone = || ProcessGroup::alone().unwrap();
        let groups = Groups { control: alone(), data: alone() };
        let mut engine = Engine::start(groups, &Options::default(), Timeline::default()).unwrap();
        // Of no process.
        engine.process = 0;
        engine.shutdown();
        let shared = engine.shared();
        drop(engine);
        let mut state = shared.state.lock();
        assert!(!state.leaves && state.ended.is_none());
        state.leaves = true;
        drop(state);
        shared.hurry.notify_all();
    }

    #[test]
    fn who_has_ended_an_engine_matters_only_to_whose_operations_failed() {
        let (me, other) = (Rank::MAIN, Rank::new(1));
        let left = Error::aborted("rank 1 has shut Horovod down").with_peer(other);
        let failed = |is_in_flight: bool, cause: &Error| {
            let shared = Shared::default();
            if is_in_flight {
                shared.state.lock().names.insert("in flight".into());
            }
            drop(shared.end(cause));
            shared
        };
        let is_other_s = |shared: &Shared| shared.failed_by_another(me).is_some();
        for cause in [left.clone(), Error::timeout("it took too long")] {
            assert!(is_other_s(&failed(true, &cause)), "{cause}");
            let idle = failed(false, &cause);
            assert!(!is_other_s(&idle), "{cause}");
            idle.state.lock().check().unwrap_err();
            assert!(is_other_s(&idle), "{cause}");
        }
        for own in [shut_down(), left.with_peer(me), Error::out_of_memory("of this rank")] {
            assert!(!is_other_s(&failed(true, &own)), "{own}");
        }
    }

    #[test]
    fn a_rank_has_left_only_if_nothing_ended_the_engine_before() {
        let is_left = |cause: Option<&Error>| {
            let shared = Shared::default();
            if let Some(cause) = cause {
                drop(shared.end(cause));
            }
            assert!(!shared.is_left(), "{cause:?}");
            shared.state.lock().leaves = true;
            shared.is_left()
        };
        assert!(is_left(None) && is_left(Some(&shut_down())));
        let left = Error::aborted("rank 1 has shut Horovod down").with_peer(Rank::new(1));
        for cause in [left, Error::mismatch("the ranks have called different operations")] {
            assert!(!is_left(Some(&cause)), "{cause}");
        }
    }
}
