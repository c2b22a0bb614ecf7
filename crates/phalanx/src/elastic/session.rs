//! This process's part in the membership: the I/O around [`MembersState`] and [`Clock`].
//!
//! Two threads beside the one that trains. One reads the log: what it finds ends the waiting of the third, and the group, if
//! somebody of it is gone. The other says that this worker is there, and looks who is not.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::beat;
use super::compacted_log::{self, CompactedLog, Read, STRIDE};
use super::members::{Clock, Departure, Entry, MembersState, Settings, Step, Verdict, Worker, WorkerId};
use super::options::{Launched, Options};
use super::round_store::{self, RoundStore};
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::env::Meeting;
use crate::error::{Error, Kind, Result};
use crate::group::ProcessGroup;
use crate::host;
use crate::notice::{Reminders, warn};
use crate::random;
use crate::rank::{Generation, Rank};
use crate::rendezvous::membership::liveness::Liveness;
use crate::rendezvous::{self, Rendezvous};
use crate::store::{PrefixStore, SharedStore, TcpStore, host_port};
use crate::transport;
use crate::world_size::WorldSize;

/// How long the reader waits at a time: then it looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(200);
/// How long the store may take to answer what does not wait for other workers.
const ANSWER: Duration = Duration::from_secs(30);
/// How long the last message of this worker may take.
const LAST_MESSAGE: Duration = Duration::from_secs(1);
/// How long one removal of old keys may take.
const TIDY: Duration = Duration::from_secs(1);

/// What comes of waiting for a round.
pub(super) enum Met {
    Round(Box<Round>),
    Over(Verdict),
}

/// A round that this worker is a member of.
pub(super) struct Round {
    pub(super) number: u64,
    pub(super) rendezvous: Rendezvous,
    pub(super) members: Vec<WorkerId>,
    /// Was this worker given up before, so that it has come as another?
    pub(super) rejoined: bool,
}

pub(super) struct Session {
    shared: Arc<Shared>,
    interface: IpAddr,
    credentials: Credentials,
    settings: Settings,
    /// The place and the number of places on this host.
    local: (u32, u32),
    options: Options,
    ended: bool,
}

struct Shared {
    store: SharedStore,
    log: CompactedLog,
    seen: Mutex<Seen>,
    changed: Condvar,
    closing: AtomicBool,
}

/// What is known of the others.
struct Seen {
    state: MembersState,
    /// The next entry to be read.
    next: u64,
    /// The state where the log may be cut off, and where that is.
    stop: Option<(MembersState, u64)>,
    me: Worker,
    /// Has this worker's `Join` been read, or passed?
    heard: bool,
    /// Where in the log it is, once that is known.
    joined_at: Option<u64>,
    /// Why it was refused.
    refused: Option<String>,
    /// The store can no longer be reached.
    lost: Option<Error>,
    place: At,
}

/// Where the training thread is.
enum At {
    Waiting,
    Joining { round: u64, rank: Rank },
    Inside { round: u64, group: ProcessGroup },
}

impl Session {
    /// Connects to the job's store, and wants to take part.
    pub(super) fn start(launched: &Launched, options: &Options) -> Result<Self> {
        let Launched { env, settings } = launched;
        let Meeting::Master { address, port } = &env.meeting else {
            return Err(Error::environment("an elastic job needs MASTER_ADDR and MASTER_PORT")
                .with_remedy("start it with `phalanx run --min-np`"));
        };
        let (credentials, deadline) = (Credentials::from_env()?, Deadline::after(options.connect_timeout));
        let client = TcpStore::join(host_port(address, *port), &credentials, deadline)?;
        let interface = client.local_ip();
        let scope = scope(env.run_id.as_deref().unwrap_or("none"));
        let store: SharedStore = Arc::new(PrefixStore::new(scope, Arc::new(client)));
        let (place, local) = (env.rank.get(), env.local_rank.unwrap_or(env.rank.get()));
        let process = std::process::id();
        let session = Self {
            shared: Shared::new(store, Worker { id: WorkerId(0), host: host::name(), place, process })?,
            interface,
            credentials,
            settings: *settings,
            local: (local, env.local_world_size.unwrap_or(env.world_size.get()).max(local + 1)),
            options: options.clone(),
            ended: false,
        };
        session.join()?;
        let (shared, keep_alive) = (Arc::clone(&session.shared), options.keep_alive);
        let reader = Arc::clone(&session.shared);
        start_thread("phalanx-elastic-in", move || read(&reader))?;
        start_thread("phalanx-elastic-out", move || keep_watch(&shared, keep_alive))?;
        Ok(session)
    }

    /// Does a worker wait for a new group?
    pub(super) fn is_awaited(&self) -> bool {
        self.shared.seen.lock().state.is_awaited()
    }

    /// The number under which this worker takes part now.
    pub(super) fn id(&self) -> WorkerId {
        self.shared.seen.lock().me.id
    }

    /// Waits for the next round, which begins when all members of this one have left it; at once, if all survivors hold a
    /// step that was cut off.
    pub(super) fn meet(&self, left: u64, holds: bool) -> Result<Met> {
        let mut clock =
            Clock::new(self.options.first_call, self.options.last_call, self.options.join_timeout);
        let (mut left, mut holds) = (left, holds);
        let before = self.id();
        self.ready(left, holds)?;
        let (shared, mut reminders) = (&*self.shared, Reminders::new());
        loop {
            let mut seen = shared.seen.lock();
            if let Some(error) = &seen.lost {
                return Err(error.clone());
            }
            if let Some(verdict) = seen.state.verdict() {
                return Ok(Met::Over(verdict));
            }
            if let Some(why) = &seen.refused {
                return Err(Error::mismatch(format!("this worker cannot take part: {why}"))
                    .with_remedy("start all workers of a job with the same options"));
            }
            let (me, round) = (seen.me.id, seen.state.round());
            if seen.heard && !seen.state.is_present(me) {
                // It was given up, and comes back as another.
                drop(seen);
                warn("the other workers have gone on without this one; it joins them again");
                holds = false;
                self.join()?;
                continue;
            }
            if round > left
                && let Some(rank) = seen.state.rank(me)
            {
                if !seen.state.is_gathering() {
                    return self
                        .round(&mut seen, rank, me != before)
                        .map(|round| Met::Round(Box::new(round)));
                }
                // A member has left it before it came together.
                left = round;
                drop(seen);
                self.ready(left, holds)?;
                continue;
            }
            let now = Instant::now();
            match clock.look(&seen.state, now) {
                Step::Wait(until) => {
                    reminders.remind(|| {
                        let needed = seen.state.settings().map_or(1, |settings| settings.min);
                        let (there, held) = (seen.state.waiting().count(), seen.state.outstanding().count());
                        match held {
                            0 => format!(
                                "this worker waits for others: {there} of at least {needed} have come"
                            ),
                            _ => format!("this worker waits for {held} others to leave the last group"),
                        }
                    });
                    shared.changed.wait_until(&mut seen, until.min(now + Duration::from_secs(1)));
                }
                Step::LastCall => {
                    drop(seen);
                    shared.append(&Entry::LastCall { round: round + 1, nonce: random::number()? })?;
                    shared.wait_for_news();
                }
                Step::GiveUp(late, after) => {
                    drop(seen);
                    for worker in late {
                        shared.append(&Entry::Gone { worker, by: me, why: Departure::Late(after) })?;
                    }
                    shared.wait_for_news();
                }
                Step::TooFew { there, needed, after } => {
                    return Err(Error::timeout(format!(
                        "{there} of at least {needed} workers have come within {:.1} s",
                        after.as_secs_f64()
                    ))
                    .in_operation("rendezvous of the workers", None)
                    .with_remedy(
                        "see the launcher's output for what has become of the others; with --max-restarts it replaces \
                         them, and --min-np says with how few to go on",
                    ));
                }
            }
        }
    }

    /// The group of the round stands.
    pub(super) fn enter(&self, round: u64, group: &ProcessGroup) {
        self.shared.seen.lock().place = At::Inside { round, group: group.clone() };
        // Who has gone meanwhile.
        self.shared.end_broken_round();
    }

    /// This worker has left its round, because of `cause`, if that was the failure of one of these members.
    pub(super) fn leave(&self, members: &[WorkerId], cause: Option<&Error>) -> Result<()> {
        let me = {
            let mut seen = self.shared.seen.lock();
            seen.place = At::Waiting;
            seen.me.id
        };
        let dead = cause.filter(|cause| cause.is_peer_failure()).and_then(Error::peer);
        match dead.and_then(|rank| members.get(rank.index())) {
            Some(&worker) if worker != me => {
                self.shared.append(&Entry::Gone { worker, by: me, why: Departure::Died })
            }
            _ => Ok(()),
        }
    }

    /// All members have done what there was to do.
    pub(super) fn done(mut self, round: u64) {
        self.ended = true;
        let worker = self.shared.seen.lock().me.id;
        // Every member knows it by itself, unless another dies at this moment.
        let _ = self.shared.append_until(&Entry::Done { round, worker }, Deadline::after(LAST_MESSAGE));
    }

    /// The job is over; nothing is left to say.
    pub(super) fn over(mut self) {
        self.ended = true;
    }

    /// Says that the group of round `left` has been left, if it was this worker's.
    fn ready(&self, left: u64, holds: bool) -> Result<()> {
        let worker = {
            let seen = self.shared.seen.lock();
            if seen.state.round() != left || seen.state.rank(seen.me.id).is_none() {
                return Ok(());
            }
            seen.me.id
        };
        self.shared.append(&Entry::Ready { round: left, worker, holds })
    }

    /// Wants to take part, under a new number.
    fn join(&self) -> Result<()> {
        let shared = &*self.shared;
        loop {
            let id = beat::next_id(&*shared.store, shared.place(), Deadline::after(ANSWER))?;
            let worker = {
                let mut seen = shared.seen.lock();
                seen.me.id = id;
                (seen.heard, seen.joined_at) = (false, None);
                seen.me.clone()
            };
            // Who watches this worker expects to find its beat.
            shared.store.add(&beat::key(&worker), 1, Deadline::after(ANSWER))?;
            let join = Entry::Join { worker, settings: self.settings };
            let index = shared.log.try_append(&join, Deadline::after(ANSWER))?;
            if let Some(index) = index {
                let mut seen = shared.seen.lock();
                seen.joined_at = Some(index);
                // The reader may have passed it without seeing it.
                seen.heard |= seen.next > index;
                return Ok(());
            }
            // It may or may not have been read: the same number must not be used again.
            shared.append(&Entry::Gone { worker: id, by: id, why: Departure::Ended })?;
        }
    }

    fn round(&self, seen: &mut Seen, rank: usize, rejoined: bool) -> Result<Round> {
        let number = seen.state.round();
        let members: Vec<WorkerId> = seen.state.members().map(|worker| worker.id).collect();
        let world_size = WorldSize::new(u32::try_from(members.len()).unwrap_or(u32::MAX))?;
        let rank = world_size.rank(u32::try_from(rank).unwrap_or(u32::MAX))?;
        seen.place = At::Joining { round: number, rank };
        let rendezvous = Rendezvous {
            store: self.shared.store_of(number),
            rank,
            world_size,
            local_rank: self.local.0,
            local_world_size: self.local.1,
            generation: Generation(number),
            interface: self.interface,
            credentials: self.credentials.clone(),
            ..rendezvous::alone()
        };
        Ok(Round { number, rendezvous, members, rejoined })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Relaxed);
        let (me, group) = {
            let mut seen = self.shared.seen.lock();
            (seen.me.id, std::mem::replace(&mut seen.place, At::Waiting))
        };
        // The group ends with the loop, and not when the threads have noticed that they may end.
        drop(group);
        if !self.ended {
            let gone = Entry::Gone { worker: me, by: me, why: Departure::Ended };
            // If the others do not hear it, they see it.
            let _ = self.shared.append_until(&gone, Deadline::after(LAST_MESSAGE));
        }
    }
}

impl Shared {
    fn new(store: SharedStore, me: Worker) -> Result<Arc<Self>> {
        let (state, next) = compacted_log::begin(&*store, Deadline::after(ANSWER))?;
        let seen = Seen {
            state,
            next,
            stop: None,
            me,
            heard: false,
            joined_at: None,
            refused: None,
            lost: None,
            place: At::Waiting,
        };
        Ok(Arc::new(Self {
            log: CompactedLog::new(Arc::clone(&store)),
            store,
            seen: Mutex::new(seen),
            changed: Condvar::new(),
            closing: AtomicBool::new(false),
        }))
    }

    /// The place in which this worker was started.
    fn place(&self) -> u32 {
        self.seen.lock().me.place
    }

    fn append(&self, entry: &Entry) -> Result<()> {
        self.append_until(entry, Deadline::after(ANSWER))
    }

    fn append_until(&self, entry: &Entry, deadline: Deadline) -> Result<()> {
        self.log.append(entry, deadline)
    }

    /// The part of the store in which the members of a round connect.
    fn store_of(&self, round: u64) -> SharedStore {
        Arc::new(RoundStore::new(&self.store, round))
    }

    fn wait_for_news(&self) {
        let mut seen = self.seen.lock();
        self.changed.wait_for(&mut seen, LOOK);
    }

    /// Takes the next entry of the log.
    fn take(&self, entry: Entry) {
        let mut seen = self.seen.lock();
        let own = matches!(&entry, Entry::Join { worker, .. } if worker.id == seen.me.id);
        seen.heard |= own;
        if let Err(why) = seen.state.apply(entry)
            && own
        {
            seen.refused = Some(why);
        }
        seen.next += 1;
        if seen.next.is_multiple_of(STRIDE) {
            seen.stop = Some((seen.state.clone(), seen.next));
        }
        drop(seen);
        self.changed.notify_all();
        self.end_broken_round();
    }

    /// Goes on from where the others have cut the log off.
    fn jump(&self, state: MembersState, next: u64) {
        let mut seen = self.seen.lock();
        (seen.state, seen.next) = (state, next);
        seen.heard |= seen.joined_at.is_some_and(|index| next > index);
        drop(seen);
        self.changed.notify_all();
        self.end_broken_round();
    }

    /// If a member of this worker's round is gone, or the others are in a later one, the round has no use: whoever waits in
    /// its group, or for it, is told.
    fn end_broken_round(&self) {
        let seen = self.seen.lock();
        let (round, own) = match &seen.place {
            At::Waiting => return,
            At::Joining { round, rank } => (*round, *rank),
            At::Inside { round, group } => (*round, group.rank()),
        };
        let Some(error) = seen.broken(round, own) else { return };
        match &seen.place {
            At::Inside { group, .. } => {
                let group = group.clone();
                drop(seen);
                group.fail(error);
            }
            _ => {
                let error = error.at(own, seen.me.host.clone());
                drop(seen);
                transport::fail_start(&*self.store_of(round), &error);
            }
        }
    }
}

impl Seen {
    /// Why `round`, in which this worker has the rank `own`, has no use any more.
    fn broken(&self, round: u64, own: Rank) -> Option<Error> {
        let lost = |rank: Rank, host: &str, what: String| {
            Error::new(Kind::PeerFailed, format!("rank {rank} ({host}) {what}")).with_peer(rank)
        };
        if round < self.state.round() {
            let what = "was given up by the others, who are in a later group".to_owned();
            return Some(lost(own, &self.me.host, what));
        }
        let (rank, worker, why) = self.state.gone().next()?;
        let what = if worker.id == self.me.id { "was given up by the others" } else { "died" };
        let rank = Rank::new(u32::try_from(rank).unwrap_or(u32::MAX));
        Some(lost(rank, &worker.host, format!("{what}: {why}")))
    }
}

/// The part of the store in which the workers of a job meet.
pub(super) fn scope(run_id: &str) -> String {
    format!("phalanx/{run_id}/elastic")
}

/// The reader's thread.
fn read(shared: &Shared) {
    while !shared.closing.load(Ordering::Relaxed) {
        let next = shared.seen.lock().next;
        match compacted_log::read(&*shared.store, next, Deadline::after(LOOK)) {
            Ok(Read::Entry(entry)) => shared.take(entry),
            Ok(Read::Behind(state, next)) => shared.jump(state, next),
            Err(error) if error.is_timeout() => {}
            Err(error) => {
                shared.seen.lock().lost = Some(error);
                shared.changed.notify_all();
                return;
            }
        }
    }
}

/// The thread that says that this worker is there, and looks who is not.
fn keep_watch(shared: &Shared, (interval, attempts): (Duration, u32)) {
    let (interval, attempts) = (interval.max(Duration::from_millis(10)), attempts.max(1));
    let silence = interval.saturating_mul(attempts);
    let mut liveness = Liveness::new(interval, silence);
    let mut next = Instant::now();
    while !shared.closing.load(Ordering::Relaxed) {
        let now = Instant::now();
        if now < next {
            thread::sleep((next - now).min(LOOK));
            continue;
        }
        next = now + interval;
        // A store that is lost is the reader's news; one that is slow may be faster the next time.
        if let Err(error) = look(shared, &mut liveness, Deadline::after(silence)) {
            tracing::debug!(%error, "the other workers could not be looked at");
        }
        // Last, and not for long: the next beat waits for it.
        if let Err(error) = tidy(shared, Deadline::after(TIDY.min(silence / 2))) {
            tracing::debug!(%error, "what nobody needs any more could not be removed");
        }
    }
}

fn look(shared: &Shared, liveness: &mut Liveness<WorkerId>, deadline: Deadline) -> Result<()> {
    let (own, others, is_given_up) = {
        let seen = shared.seen.lock();
        let others = seen.state.watched_by(seen.me.id).into_iter();
        let others = others.filter_map(|id| Some((id, beat::key(seen.state.worker(id)?))));
        let is_given_up = seen.heard && !seen.state.is_present(seen.me.id);
        (beat::key(&seen.me), others.collect::<Vec<_>>(), is_given_up)
    };
    // Another one may be in its place by now, and stand still.
    if !is_given_up {
        shared.store.add(&own, 1, deadline)?;
    }
    if others.is_empty() {
        return Ok(());
    }
    let me = shared.seen.lock().me.id;
    let (others, keys): (Vec<WorkerId>, Vec<String>) = others.into_iter().unzip();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    // They are there: a worker beats before it joins.
    let beats = shared.store.multi_get(&keys, deadline)?;
    let beats = others.into_iter().zip(beats.iter().map(Vec::as_slice));
    for (worker, since) in liveness.observe(beats, Instant::now()) {
        shared.append_until(&Entry::Gone { worker, by: me, why: Departure::Silent(since) }, deadline)?;
    }
    Ok(())
}

/// Removes old keys. One worker does it for all.
fn tidy(shared: &Shared, deadline: Deadline) -> Result<()> {
    let (round, stop) = {
        let mut seen = shared.seen.lock();
        if seen.state.first() != Some(seen.me.id) {
            return Ok(());
        }
        (seen.state.round(), seen.stop.take())
    };
    if let Some((state, index)) = stop {
        compacted_log::trim(&*shared.store, index, &state, deadline)?;
    }
    round_store::sweep(&*shared.store, round, deadline)
}

fn start_thread(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    thread::Builder::new()
        .name(name.to_owned())
        .spawn(body)
        .map(drop)
        .map_err(|error| Error::not_started("cannot start a thread for the news from other workers", error))
}

#[cfg(test)]
mod tests;
