//! One process's copy of the state, which its threads share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::Machine;
use super::compaction::STRIDE;
use super::participant::AFTER_STANDSTILL;
use super::standstill::{Standstill, since_boot};
use crate::error::{Error, Kind};

/// The state as far as this process has read the log, and this process's part in it.
pub struct Replica<M: Machine> {
    view: Mutex<View<M>>,
    /// The last state from which a new reader could begin, and the index of the next entry. It is no part of the view, which is copied often.
    checkpoint: Mutex<Option<(M, u64)>>,
    changed: Condvar,
    on_change: OnChange<M>,
}

type OnChange<M> = Box<dyn Fn(&Replica<M>) + Send + Sync>;

/// What a [`Replica`] holds.
#[derive(Clone)]
pub struct View<M: Machine> {
    /// Copies of the view share it: a launcher copies the view at each line of its workers, and the state names all nodes.
    pub state: Arc<M>,
    /// The index of the next entry to be read.
    pub(super) next: u64,
    pub(super) own: Option<Own<M::Id>>,
    /// Why this process was refused, under the number that it has now.
    pub refusal: Option<String>,
    warnings: Vec<(Concern, String)>,
    /// Why the log cannot be used any more.
    pub lost: Option<Error>,
    /// For how long this process, or its machine, stood still a short time ago.
    pub stood_still: Option<Duration>,
    standstill: Standstill,
    is_closing: bool,
}

/// What a warning is about. The first about each stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Concern {
    /// An entry that nobody of this job has signed.
    ForgedEntry,
    /// What is not removed from the store.
    OldEntries,
    /// A time in which this process stood still.
    Standstill,
}

/// How this process takes part.
#[derive(Clone)]
pub(super) struct Own<Id> {
    pub(super) id: Id,
    pub(super) heartbeat_key: String,
    /// Where in the log it has joined, once that is known.
    joined_at: Option<u64>,
}

impl<M: Machine> Replica<M> {
    /// `on_change` is called after each change, without a lock, by the thread that made it.
    pub fn new(on_change: impl Fn(&Self) + Send + Sync + 'static) -> Self {
        let (view, checkpoint, changed) = (Mutex::default(), Mutex::new(None), Condvar::new());
        Self { view, checkpoint, changed, on_change: Box::new(on_change) }
    }

    pub fn view(&self) -> MutexGuard<'_, View<M>> {
        self.view.lock()
    }

    /// Waits for a change, but not past `until`.
    pub fn wait_until(&self, view: &mut MutexGuard<'_, View<M>>, until: Instant) {
        self.changed.wait_until(view, until);
    }

    /// The log cannot be used any more. The first cause stays.
    pub fn lose(&self, error: Error) {
        self.change(|view| {
            view.lost.get_or_insert(error);
        });
    }

    /// Tells the threads that work on this replica to end.
    pub fn close(&self) {
        self.view.lock().is_closing = true;
        self.changed.notify_all();
    }

    /// Takes the entry at `index`, if it is the next.
    pub(super) fn apply(&self, index: u64, entry: M::Entry) {
        self.change(|view| {
            if view.next != index {
                return;
            }
            let is_own = M::joining(&entry).is_some_and(|id| view.id() == Some(id));
            if let Err(why) = Arc::make_mut(&mut view.state).apply(entry)
                && is_own
            {
                view.refusal = Some(why);
            }
            self.pass(view);
        });
    }

    /// Goes on to the next entry.
    fn pass(&self, view: &mut View<M>) {
        view.next += 1;
        if M::COMPACTION.is_some() && view.next.is_multiple_of(STRIDE) {
            *self.checkpoint.lock() = Some((M::clone(&view.state), view.next));
        }
    }

    /// The last state from which a new reader could begin, and the index of the next entry. The next call finds a later one, or none.
    pub(super) fn take_checkpoint(&self) -> Option<(M, u64)> {
        self.checkpoint.lock().take()
    }

    /// Skips the entry at `index`, if it is the next. No process of this job has signed it.
    pub(super) fn skip(&self, index: u64) {
        self.change(|view| {
            if view.next != index {
                return;
            }
            let process = M::PROCESS;
            self.pass(view);
            view.warn(Concern::ForgedEntry, || {
                format!(
                    "entry {index} of the {process}s' log was ignored, because it is not signed with this job's key. \
                     Another {process} needs the same --job-key-file; or another program writes to the store"
                )
            });
        });
    }

    /// Goes on from a state that another process has written, unless this one has come further.
    pub(super) fn restore(&self, state: M, next: u64) {
        self.change(|view| {
            if view.next <= next {
                (view.state, view.next) = (Arc::new(state), next);
            }
        });
    }

    /// This process is about to join, under a number that it has not had before. What was said to it under another number does not count.
    pub(super) fn set_own(&self, id: M::Id, heartbeat_key: String) {
        let mut view = self.view.lock();
        (view.own, view.refusal) = (Some(Own { id, heartbeat_key, joined_at: None }), None);
    }

    /// The entry by which it joins is at `index`.
    pub(super) fn set_joined_at(&self, index: u64) {
        self.change(|view| view.own.iter_mut().for_each(|own| own.joined_at = Some(index)));
    }

    /// Something that a person should know.
    pub(super) fn warn(&self, concern: Concern, warning: String) {
        self.change(|view| view.warn(concern, || warning));
    }

    /// The thread that sends the heartbeats is awake, and will be again within `limit`.
    pub(super) fn awake(&self, limit: Duration) {
        let mut view = self.view.lock();
        // What the time before was is known before the next begins.
        view.look_at_clock();
        view.standstill.awake(since_boot(), limit);
    }

    /// For how long this process stood still a short time ago.
    pub(super) fn stood_still(&self) -> Option<Duration> {
        self.view.lock().look_at_clock()
    }

    fn change(&self, how: impl FnOnce(&mut View<M>)) {
        {
            let mut view = self.view.lock();
            how(&mut view);
            view.look_at_clock();
        }
        self.changed.notify_all();
        (self.on_change)(self);
    }
}

impl<M: Machine> Default for View<M> {
    fn default() -> Self {
        let (state, next, own) = (Arc::default(), 0, None);
        let (refusal, warnings, lost, is_closing) = (None, Vec::new(), None, false);
        let (stood_still, standstill) = (None, Standstill::default());
        Self { state, next, own, refusal, warnings, lost, stood_still, standstill, is_closing }
    }
}

impl<M: Machine> View<M> {
    /// The number under which this process takes part, or asks to.
    pub fn id(&self) -> Option<M::Id> {
        self.own.as_ref().map(|own| own.id)
    }

    /// Whether this process has joined, and the others go on without it. So it is too if it was refused.
    pub fn is_given_up(&self) -> bool {
        let has_joined = |own: &&Own<M::Id>| own.joined_at.is_some_and(|index| index < self.next);
        self.own.as_ref().filter(has_joined).is_some_and(|own| !self.state.is_present(own.id))
    }

    pub fn is_closing(&self) -> bool {
        self.is_closing
    }

    /// Why the log cannot be used any more. If its connections have ended after this process stood still, that is why.
    pub(crate) fn why_lost(&self) -> Option<Error> {
        let error = self.lost.clone()?;
        let is_unreachable = matches!(error.kind(), Kind::Io | Kind::Timeout | Kind::Environment);
        let stood_still = self.stood_still.filter(|_| is_unreachable && !error.is_local_shortage());
        Some(match stood_still {
            Some(time) => {
                let why =
                    format!("; before that this {} stood still for {:.0} s", M::PROCESS, time.as_secs_f64());
                error.adding(why).with_remedy(AFTER_STANDSTILL)
            }
            None => error,
        })
    }

    /// What a person should know, though the job goes on: of each kind the first, in their order.
    pub fn warnings(&self) -> impl Iterator<Item = &str> {
        self.warnings.iter().map(|(_, warning)| warning.as_str())
    }

    fn warn(&mut self, concern: Concern, warning: impl FnOnce() -> String) {
        if self.warnings.iter().all(|(known, _)| *known != concern) {
            self.warnings.push((concern, warning()));
        }
    }

    fn look_at_clock(&mut self) -> Option<Duration> {
        self.stood_still = self.standstill.look(since_boot());
        if let Some(time) = self.stood_still {
            // Whatever happens now may be a consequence.
            self.warn(Concern::Standstill, || {
                format!(
                    "this {} stood still for {:.0} s: did its host sleep, was it stopped (Ctrl-Z, SIGSTOP), or did a file system hold it up? \
                     The others may have gone on without it",
                    M::PROCESS,
                    time.as_secs_f64()
                )
            });
        }
        self.stood_still
    }
}
