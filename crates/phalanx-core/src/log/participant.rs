//! The threads of a process that takes part in a log.

use std::cmp::Ordering;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::replica::Concern;
use super::{AHEAD, ENDED, Fetched, Log, Machine, Read, Replica, Turn};
use crate::deadline::Deadline;
use crate::error::{Error, Kind, Result};
use crate::random;
use phalanx_proto::log::liveness::Liveness;

/// How long the reader waits for one entry before it asks for it anew.
const READ_TIMEOUT: Duration = Duration::from_secs(3600);

/// A call that waits for a store ends soon after its deadline. If this process, or the whole machine, stood still meanwhile, as after SIGSTOP, it
/// ends later than by so much.
pub(super) const STANDSTILL_LIMIT: Duration = Duration::from_secs(1);

/// How long the look may take that says why a heartbeat could not be counted: a connection and two answers over a slow network.
const EXPLANATION_TIMEOUT: Duration = Duration::from_secs(5);

/// What to do about a process that stood still.
pub const AFTER_STANDSTILL: &str = "start it again; did this host sleep, was this process stopped (Ctrl-Z, SIGSTOP), or did a file system hold it up? The host of a job must not sleep";

/// After how many silences without progress a person should know that nothing can be removed.
const STUCK_SILENCES: u32 = 50;

/// The pause before a heartbeat is sent again whose answer is lost.
const RETRY_DELAY: Duration = Duration::from_millis(20);

/// What no heartbeat is.
const NO_BEAT: &[u8] = b"?";

/// When a process sends its heartbeats, and how long others may be silent.
#[derive(Clone, Copy, Debug)]
pub struct Heartbeats {
    pub interval: Duration,
    pub silence: Duration,
    /// Whether a store that does not answer a heartbeat in time is lost. If not, the next heartbeat tries again.
    pub must_be_answered: bool,
}

impl Heartbeats {
    /// How long the thread that sends them may take until it is awake again, unless this process stands still: while it sends one, and while
    /// it waits for the next. The first is longer than the others wait, for a store may be slow. The second tells also of a standstill
    /// after which they have just given this process up.
    pub(super) fn awake_limits(&self) -> (Duration, Duration) {
        let Self { interval, silence, .. } = *self;
        let margin = STANDSTILL_LIMIT * 3;
        // The store may take its time for a heartbeat, and a part of it for what is removed.
        let slow = silence.saturating_mul(3) / 2;
        (slow.saturating_add(interval).saturating_add(margin), silence.max(interval.saturating_add(margin)))
    }
}

/// One process's part in a log. When it is dropped its threads end, soon.
pub struct Participant<M: Machine> {
    log: Arc<Log<M>>,
    replica: Arc<Replica<M>>,
    threads: Vec<JoinHandle<()>>,
    /// The process that has these threads, and not one that was forked from that.
    pub(super) process: u32,
}

impl<M: Machine> Participant<M> {
    /// Takes the latest state in the log, and starts the threads that read on from there.
    pub fn start(log: Log<M>, replica: Arc<Replica<M>>, deadline: Deadline) -> Result<Self> {
        let (state, next) = awake(deadline, |deadline| log.begin(deadline))?;
        Self::start_from(log, replica, state, next)
    }

    /// Starts the threads that read, from the first entry on. If that does not count any more, they go on from the latest state. In a log that
    /// is new that takes a round trip less.
    pub fn start_at_first_entry(log: Log<M>, replica: Arc<Replica<M>>) -> Result<Self> {
        Self::start_from(log, replica, M::default(), 0)
    }

    fn start_from(log: Log<M>, replica: Arc<Replica<M>>, state: M, next: u64) -> Result<Self> {
        replica.restore(state, next);
        let process = std::process::id();
        let mut participant = Self { log: Arc::new(log), replica, threads: Vec::new(), process };
        // While one waits for an entry, another waits for the next: entries that follow each other soon cost one round trip together.
        for reader in 0..M::READERS {
            participant.spawn("phalanx-log-in", move |log, replica| read(log, replica, next + reader))?;
        }
        Ok(participant)
    }

    pub(crate) fn replica(&self) -> &Replica<M> {
        &self.replica
    }

    /// Joins as `id`, by the entry `join`. If it is `false`, nobody knows whether the others have read that, as after a time in which this
    /// process stood still: the next try needs another number.
    pub(crate) fn join(
        &self,
        id: M::Id,
        heartbeat_key: String,
        join: &M::Entry,
        deadline: Deadline,
    ) -> Result<bool> {
        self.announce(&heartbeat_key, deadline)?;
        match self.enter(id, heartbeat_key, join, deadline) {
            Err(error) if stood_still(&error, deadline) => Ok(false),
            entered => entered,
        }
    }

    /// The first half of [`join`](Self::join), which needs nothing from the log: sends the first heartbeat, which those that watch this
    /// process expect to find.
    pub fn announce(&self, heartbeat_key: &str, deadline: Deadline) -> Result<()> {
        awake(deadline, |deadline| count(&self.log, heartbeat_key, deadline).map(drop))
    }

    /// The second half of [`join`](Self::join).
    pub fn enter(
        &self,
        id: M::Id,
        heartbeat_key: String,
        join: &M::Entry,
        deadline: Deadline,
    ) -> Result<bool> {
        self.replica.set_own(id, heartbeat_key);
        let index = self.log.try_append(join, deadline)?;
        index.into_iter().for_each(|index| self.replica.set_joined_at(index));
        Ok(index.is_some())
    }

    /// Starts the thread that sends heartbeats and watches those of others. `tidy` is called after each, in the one process
    /// that removes what is not needed any more.
    pub fn watch(
        &mut self,
        heartbeats: Heartbeats,
        tidy: impl Fn(&M, Deadline) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        self.spawn("phalanx-log-out", move |log, replica| watch(log, replica, heartbeats, &tidy))
    }

    /// Appends `entry`, and repeats that until it is certainly in the log. The entry may then be in the log twice.
    pub fn append(&self, entry: &M::Entry, deadline: Deadline) -> Result<()> {
        awake(deadline, |deadline| self.log.append(entry, deadline))
    }

    /// Compacts the log now, also if another process is to.
    #[cfg(test)]
    pub(crate) fn compact(&self, deadline: Deadline) -> Result<()> {
        let checkpoint = self.replica.take_checkpoint();
        checkpoint.map_or(Ok(()), |(state, index)| self.log.compact(&state, index, deadline))
    }

    /// Ends the threads, and waits for their ends.
    pub fn close(mut self) {
        self.replica.close();
        for thread in self.threads.drain(..) {
            // A panic of it has been printed.
            let _ = thread.join();
        }
    }

    fn spawn(&mut self, name: &str, body: impl FnOnce(&Log<M>, &Replica<M>) + Send + 'static) -> Result<()> {
        let (log, replica) = (Arc::clone(&self.log), Arc::clone(&self.replica));
        let run = move || {
            // Else this process would wait for ever for what this thread reads, or be given up without a word.
            if catch_unwind(AssertUnwindSafe(|| body(&log, &replica))).is_err() {
                let cause = format!("a thread for messages of other {}s has panicked", M::PROCESS);
                replica.lose(Error::panicked(cause));
            }
        };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(run);
        self.threads.push(thread.map_err(|error| {
            let cause = format!("cannot start a thread for messages of other {}s", M::PROCESS);
            Error::not_started(cause, error)
        })?);
        Ok(())
    }
}

impl<M: Machine> Drop for Participant<M> {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // The threads are the parent's, and may have held the lock when this process was forked.
            std::mem::forget(std::mem::take(&mut self.threads));
            return;
        }
        self.replica.close();
    }
}

/// A reader's thread: it reads the entry `first`, and then every [`Machine::READERS`]th.
fn read<M: Machine>(log: &Log<M>, replica: &Replica<M>, first: u64) {
    let (mut index, mut ahead) = (first, AHEAD.0);
    loop {
        if replica.view().is_closing() {
            return;
        }
        let mut go_on = || {
            let view = replica.view();
            match view.next.cmp(&index) {
                _ if view.is_closing() => Err(Error::aborted("the log is closed")),
                Ordering::Less => Ok(Turn::Later),
                Ordering::Equal => Ok(Turn::Next),
                Ordering::Greater => Err(Error::aborted("a later state has replaced the entry")),
            }
        };
        match log.fetch(index, ahead, Deadline::after(READ_TIMEOUT), &mut go_on) {
            Ok(fetched) => {
                if !wait_for_turn(replica, index) {
                    return;
                }
                match fetched {
                    Fetched::Compacted(state, next) => replica.restore(state, next),
                    Fetched::Entries(entries) => {
                        // All that it has asked for were there, and more may be.
                        let is_behind = entries.len() as u64 > ahead;
                        ahead = if is_behind { (2 * ahead).min(AHEAD.1) } else { AHEAD.0 };
                        if let Err(error) = take(log, replica, index, &entries) {
                            return replica.lose(error);
                        }
                    }
                }
            }
            Err(error) => {
                let view = replica.view();
                if view.is_closing() {
                    return;
                }
                let is_passed = view.next > index;
                drop(view);
                if !is_passed && !error.is_timeout() {
                    return replica.lose(error);
                }
            }
        }
        index = own_index(index, replica.view().next, M::READERS);
    }
}

/// Takes entries that follow each other from `index` on, except those that another reader has taken.
fn take<M: Machine>(log: &Log<M>, replica: &Replica<M>, index: u64, entries: &[Vec<u8>]) -> Result<()> {
    let next = replica.view().next;
    for (index, bytes) in (index..).zip(entries).filter(|(index, _)| *index >= next) {
        match log.decode(index, bytes) {
            Ok(Read::Entry(entry)) => replica.apply(index, entry),
            Ok(Read::Forged) => replica.skip(index),
            Ok(Read::Compacted(state, next)) => replica.restore(state, next),
            // What another reader has passed meanwhile is no concern of this one.
            Err(_) if replica.view().next > index => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The first of a reader's indices, of which `index` is one and each `readers`th another, that is not before `next`.
fn own_index(index: u64, next: u64, readers: u64) -> u64 {
    index + next.saturating_sub(index).next_multiple_of(readers)
}

/// Waits until all entries before `index` have been taken. `false` if it never will be its turn.
fn wait_for_turn<M: Machine>(replica: &Replica<M>, index: u64) -> bool {
    let mut view = replica.view();
    while view.next < index && view.lost.is_none() && !view.is_closing() {
        replica.wait_until(&mut view, Instant::now() + READ_TIMEOUT);
    }
    view.next >= index
}

/// Asks until `deadline`, and once more, for as long, if this process stood still meanwhile: then it knows nothing of the store.
pub fn awake<T>(deadline: Deadline, ask: impl Fn(Deadline) -> Result<T>) -> Result<T> {
    let timeout = deadline.remaining();
    match ask(deadline) {
        Err(error) if stood_still(&error, deadline) => ask(Deadline::after(timeout)),
        answer => answer,
    }
}

/// Whether the time was up because this process stood still. The store may have answered long ago.
pub fn stood_still(error: &Error, deadline: Deadline) -> bool {
    error.is_timeout() && Instant::now() > deadline.instant() + STANDSTILL_LIMIT
}

/// The thread that sends heartbeats and watches those of others.
fn watch<M: Machine>(
    log: &Log<M>,
    replica: &Replica<M>,
    heartbeats: Heartbeats,
    tidy: &dyn Fn(&M, Deadline) -> Result<()>,
) {
    let mut liveness = Liveness::new(heartbeats.interval, heartbeats.silence);
    let mut task = Caretaker::new(heartbeats.silence);
    let (sending, waiting) = heartbeats.awake_limits();
    loop {
        replica.awake(sending);
        let next = Deadline::after(heartbeats.interval).instant();
        let deadline = Deadline::after(heartbeats.silence);
        match beat(log, replica, &mut liveness, next, deadline) {
            // It asks again at once. If it was given up meanwhile, it reads that.
            Err(error) if stood_still(&error, deadline) => {
                tracing::debug!(%error, "this {} stood still", M::PROCESS);
            }
            Err(error) if heartbeats.must_be_answered => return replica.lose(error),
            Err(error) => tracing::debug!(%error, "the other {}s could not be watched", M::PROCESS),
            Ok(()) => {}
        }
        // The next heartbeat waits for it, and must not come too late.
        if let Err(error) = task.clean(log, replica, Deadline::after(heartbeats.silence / 4), tidy) {
            tracing::debug!(%error, "old entries of the log could not be removed");
        }
        replica.awake(waiting);
        let mut view = replica.view();
        while Instant::now() < next && !view.is_closing() {
            replica.wait_until(&mut view, next);
        }
        if view.is_closing() {
            return;
        }
    }
}

/// Why a heartbeat could not be counted: `error`, unless the store has written that this process has ended. It does that when the connection
/// that it was told to watch ends, for whatever reason.
fn taken_for_ended<M: Machine>(log: &Log<M>, replica: &Replica<M>, key: &str, error: Error) -> Error {
    if error.is_timeout() {
        return error;
    }
    let deadline = Deadline::after(EXPLANATION_TIMEOUT);
    let has_ended = log.store.check(&[key], deadline).unwrap_or(false)
        && log.store.get(key, deadline).is_ok_and(|beat| beat == ENDED);
    if !has_ended {
        return error;
    }
    if let Some(time) = replica.stood_still() {
        return Error::aborted(format!(
            "this {process} stood still for {:.0} s, and the store takes it for ended. The others go on without it",
            time.as_secs_f64(),
            process = M::PROCESS
        ))
        .with_remedy(AFTER_STANDSTILL);
    }
    let cause = format!(
        "this {} runs, and the store takes it for ended: the connection that tells the store of its end was cut. The \
         others go on without it",
        M::PROCESS
    );
    Error::aborted(cause).with_remedy(
        "start it again; does a firewall between the hosts cut connections on which nothing is sent for a while?",
    )
}

/// Counts a heartbeat. If the store's answer is lost before the time is up, as with the leader of an etcd cluster, it is counted again: twice
/// does no harm.
fn count<M: Machine>(log: &Log<M>, key: &str, deadline: Deadline) -> Result<i64> {
    loop {
        match log.store.add(key, 1, deadline) {
            Err(error) if error.is_timeout() && !deadline.has_passed() => thread::sleep(RETRY_DELAY),
            counted => return counted,
        }
    }
}

/// Sends a heartbeat, and appends the processes that have ended or become silent. Each takes round trips: when the `next` heartbeat is due, the
/// rest are left for the look after that. Else one that finds many lost at once, far from the store, would be silent itself.
fn beat<M: Machine>(
    log: &Log<M>,
    replica: &Replica<M>,
    liveness: &mut Liveness<M::Id>,
    next: Instant,
    deadline: Deadline,
) -> Result<()> {
    let (own, watched) = {
        let view = replica.view();
        let Some(own) = &view.own else { return Ok(()) };
        let watched = view.state.watched_by(own.id).into_iter();
        let watched = watched.filter_map(|id| Some((id, view.state.heartbeat_key(id)?)));
        // A process that was given up sends none: another one may use its key by now, and stand still.
        let key = (!view.is_given_up()).then(|| own.heartbeat_key.clone());
        ((own.id, key), watched.collect::<Vec<_>>())
    };
    let (id, key) = own;
    if let Some(key) = key {
        count(log, &key, deadline).map_err(|error| taken_for_ended(log, replica, &key, error))?;
    }
    if watched.is_empty() {
        return Ok(());
    }
    let (others, keys): (Vec<M::Id>, Vec<String>) = watched.into_iter().unzip();
    // A comparison with what no heartbeat is changes nothing, says what is there, and waits for nothing. A process sends a heartbeat before it
    // joins. So a key that is not there has been removed: after its process has left, which this one will read soon, or by somebody else. It
    // stands for a counter that does not move, until its process makes it anew with the next heartbeat. To wait for it would silence this one.
    let asked: Vec<(&str, &[u8], &[u8])> = keys.iter().map(|key| (key.as_str(), NO_BEAT, NO_BEAT)).collect();
    let beats = log.store.multi_compare_set(&asked, deadline)?;
    let beats = others.into_iter().zip(beats.iter().map(Vec::as_slice));
    let absent = liveness.observe(beats, Instant::now());
    for (other, absence) in from_a_random_one(absent) {
        // Another one may have said so meanwhile.
        if replica.view().state.is_present(other) {
            log.append(&M::absent(other, id, absence), deadline)?;
        }
        if Instant::now() >= next {
            break;
        }
    }
    Ok(())
}

/// All of `others`, beginning with a random one. Where several processes append an entry of each, they append all the sooner: if all began with the
/// same one, each would append what one has to.
pub(crate) fn from_a_random_one<T>(mut others: Vec<T>) -> Vec<T> {
    if !others.is_empty() {
        let place = random::number().map_or(0, |number| number as usize % others.len());
        others.rotate_left(place);
    }
    others
}

/// What the process has to do that compacts the log.
pub(super) struct Caretaker<M> {
    /// How long a state is held before it takes the place of entries: whoever has not read them then is given up.
    hold: Duration,
    /// A state that is held, the index of the next entry, and since when.
    held: Option<(M, u64, Instant)>,
    /// Before this index all can be removed, if it has not been yet. The log has led to the state there, or later.
    trim_to: Option<(M, u64)>,
    /// Before this index all has been removed, as far as this process knows.
    trimmed: u64,
    /// Since when it fails, without progress.
    stuck_since: Option<Instant>,
    /// The store has refused: it is asked again then.
    retry_at: Option<Instant>,
}

impl<M: Machine> Caretaker<M> {
    pub(super) fn new(hold: Duration) -> Self {
        Self { hold, held: None, trim_to: None, trimmed: 0, stuck_since: None, retry_at: None }
    }

    /// Compacts the log, and calls `tidy`, if this process is to. A person hears of it if that fails for good.
    pub(super) fn clean(
        &mut self,
        log: &Log<M>,
        replica: &Replica<M>,
        deadline: Deadline,
        tidy: &dyn Fn(&M, Deadline) -> Result<()>,
    ) -> Result<()> {
        let Some(compaction) = M::COMPACTION else { return Ok(()) };
        let state = {
            let view = replica.view();
            let caretaker = (compaction.caretaker)(&view.state);
            (caretaker.is_some() && caretaker == view.id()).then(|| view.state.clone())
        };
        let Some(state) = state else {
            *self = Self::new(self.hold);
            return Ok(());
        };
        let is_paused = self.retry_at.is_some_and(|at| Instant::now() < at);
        let compacted = if is_paused { Ok(()) } else { self.compact(log, replica, deadline) };
        let is_late = compacted.as_ref().is_err_and(Error::is_timeout);
        // What the store keeps is not in the way of the rest, unless no time is left for that.
        let tidied = if is_late { Ok(()) } else { tidy(&state, deadline) };
        let cleaned = compacted.and(tidied);
        match &cleaned {
            // A pause between two failures is no progress.
            Ok(()) if is_paused => {}
            Ok(()) => self.stuck_since = None,
            Err(error) => self.note(replica, error),
        }
        cleaned
    }

    fn compact(&mut self, log: &Log<M>, replica: &Replica<M>, deadline: Deadline) -> Result<()> {
        self.retry_at = None;
        if self.held.is_none() {
            let checkpoint = replica.take_checkpoint();
            self.held = checkpoint.map(|(state, index)| (state, index, Instant::now()));
        }
        let compacted = self.replace(log, deadline).and_then(|()| self.trim(log, deadline));
        if compacted.as_ref().is_err_and(|error| !error.is_timeout()) {
            self.retry_at = Some(Deadline::after(self.hold).instant());
        }
        compacted
    }

    /// Puts the state that is held in the place of entries, if it is old enough.
    fn replace(&mut self, log: &Log<M>, deadline: Deadline) -> Result<()> {
        let Some((held, index, since)) = &self.held else { return Ok(()) };
        if since.elapsed() < self.hold {
            return Ok(());
        }
        match log.replace_entries(held, *index, deadline) {
            Ok(end) => self.trim_to = self.held.take().map(|(held, ..)| (held, end)),
            // The next call tries it again.
            Err(error) if error.is_timeout() => return Err(error),
            Err(error) => {
                // A later state may be smaller.
                self.held = None;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Removes what the state has replaced. On a slow network the time may be up before all is removed. The next call goes on.
    fn trim(&mut self, log: &Log<M>, deadline: Deadline) -> Result<()> {
        let Some((held, end)) = &self.trim_to else { return Ok(()) };
        let before = self.trimmed;
        let trimmed = log.trim(held, *end, deadline, &mut self.trimmed);
        if self.trimmed != before {
            self.stuck_since = None;
        }
        if trimmed.is_ok() {
            self.trim_to = None;
        }
        trimmed
    }

    /// Tells a person of `error`, if it will not pass: the store refuses, or nothing has gone on for long.
    fn note(&mut self, replica: &Replica<M>, error: &Error) {
        let limit = self.hold.saturating_mul(STUCK_SILENCES);
        let is_long = self.stuck_since.is_some_and(|since| since.elapsed() >= limit);
        self.stuck_since.get_or_insert_with(Instant::now);
        if is_long || error.kind() == Kind::Protocol || error.is_invalid_argument() {
            let what = format!(
                "old entries of the {}s' log stay in the store, and it grows until it is full, which ends the job. They are tried again. \
                 The store says: {error}",
                M::PROCESS
            );
            replica.warn(Concern::OldEntries, what);
        }
    }
}
