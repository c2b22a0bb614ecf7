//! This process's part in the rounds of an elastic job: the I/O around [`MembersState`] and [`Waiting`].
//!
//! Two threads of a [`Participant`] run beside the one that trains. The reader wakes the training thread when the log
//! changes, and ends the group if a member is gone.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::members::{Clock, Departure, ElasticEnd, Entry, MembersState, Settings, Worker, WorkerId};
use super::options::{ElasticEnv, Options};
use super::round_store::{self, RoundStore};
use super::waiting::{Next, Waiting, too_few, waits_for, why_broken};
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::env::RendezvousEndpoint;
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::host;
use crate::interfaces::is_every_hosts;
use crate::log::{Heartbeats, Log, Mac, Participant, Replica, awake, from_a_random_one};
use crate::notice::{Aside, REPORTING, Reminders, warn};
use crate::random;
use crate::rank::{Generation, Rank};
use crate::rendezvous::{self, Rendezvous, interface_named};
use crate::store::{PrefixStore, SharedStore, Store, TcpStore, host_port};
use crate::transport;
use crate::wire::auth::Secret;
use crate::wire::hello::JobId;
use crate::world_size::WorldSize;

/// How long to wait for others to read an entry before checking again.
const RECHECK_INTERVAL: Duration = Duration::from_millis(200);
/// How long the store may take to answer what does not wait for other workers.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the last message of this worker may take: three round trips of a slow network, with packets that are sent again.
const LAST_MESSAGE_TIMEOUT: Duration = Duration::from_secs(3);

/// The result of waiting for a round.
pub(super) enum NextRound {
    Round(Box<Round>),
    Over(ElasticEnd),
}

/// A round that this worker is a member of.
pub(super) struct Round {
    pub(super) number: u64,
    pub(super) rendezvous: Rendezvous,
    pub(super) members: Vec<WorkerId>,
    /// Whether this worker was declared dead before, so that it has a new number.
    pub(super) rejoined: bool,
}

pub(super) struct Session {
    participant: Participant<MembersState>,
    current: Arc<CurrentRound>,
    /// This worker, under the number that it has now.
    me: Worker,
    interface: IpAddr,
    credentials: Credentials,
    settings: Settings,
    /// The local rank and the number of workers on this host.
    local: (u32, u32),
    options: Options,
    ended: bool,
}

/// The round of this worker. The reader ends it if it can no longer be used.
struct CurrentRound {
    phase: Mutex<Phase>,
    store: SharedStore,
    host: String,
}

/// What the training thread is doing.
enum Phase {
    Waiting,
    /// `is_told`: this process has told those that connect with it that the round cannot be used.
    Joining {
        round: u64,
        rank: Rank,
        is_told: bool,
    },
    Inside {
        round: u64,
        group: ProcessGroup,
    },
}

impl Session {
    /// Connects to the job's store, and asks to take part.
    pub(super) fn start(elastic: &ElasticEnv, options: &Options) -> Result<Self> {
        let ElasticEnv { env, settings } = elastic;
        let RendezvousEndpoint::Master { address, port } = &env.rendezvous else {
            return Err(Error::environment("an elastic job needs MASTER_ADDR and MASTER_PORT")
                .with_remedy("start it with `phalanx run --min-np`"));
        };
        let (credentials, deadline) = (Credentials::from_env()?, Deadline::after(options.connect_timeout));
        let client = TcpStore::connect_with(host_port(address, *port), &credentials, deadline)?;
        let found = client.local_ip();
        // All workers of a store at the loopback are on this host, and no other host has to reach this one.
        let named = if is_every_hosts(found) { None } else { interface_named()? };
        let interface = named.unwrap_or(found);
        let scope = scope(env.run_id.as_deref().unwrap_or("none"));
        let store: SharedStore = Arc::new(PrefixStore::new(scope, Arc::new(client)));
        let (slot, local) = (env.rank.get(), env.local_rank.unwrap_or(env.rank.get()));
        let me = Worker { id: WorkerId(0), host: host::name(), slot, process: std::process::id() };
        let current = CurrentRound::new(Arc::clone(&store), &me.host);
        let participant = participate(&store, &current)?;
        let mut session = Self {
            participant,
            current,
            me,
            interface,
            credentials,
            settings: *settings,
            local: (local, env.local_world_size.unwrap_or(env.world_size.get()).max(local + 1)),
            options: options.clone(),
            ended: false,
        };
        session.join()?;
        let (interval, attempts) = options.keep_alive;
        let interval = interval.max(Duration::from_millis(10));
        // No other host reaches a store at such an address.
        let is_one_host = interface.is_loopback();
        let attempts =
            attempts.unwrap_or_else(|| options.group.heartbeat.missing_in_store(interval, is_one_host));
        let silence = interval.saturating_mul(attempts.max(1));
        // A store that is slow may be faster the next time; the reader notices one that is lost.
        let heartbeats = Heartbeats { interval, silence, must_be_answered: false };
        session
            .participant
            .watch(heartbeats, move |state, deadline| round_store::sweep(&*store, state.round(), deadline))?;
        Ok(session)
    }

    fn replica(&self) -> &Replica<MembersState> {
        self.participant.replica()
    }

    /// Whether a worker waits for a new group.
    pub(super) fn workers_wait(&self) -> bool {
        self.replica().view().state.workers_wait()
    }

    /// The number under which this worker takes part now.
    pub(super) fn id(&self) -> WorkerId {
        self.me.id
    }

    /// Waits for the next round. It begins when all members of this one have left it, or at once if all survivors can
    /// replay a step.
    pub(super) fn wait_for_round(&mut self, left: u64, can_replay: bool) -> Result<NextRound> {
        let Options { first_call, last_call, join_timeout, .. } = self.options;
        let clock = Clock::new(first_call, last_call, join_timeout);
        let mut waiting = Waiting::new(self.me.id, left, can_replay, clock);
        let ready = waiting.ready(&self.replica().view().state);
        ready.map_or(Ok(()), |ready| self.append(&ready))?;
        let mut reminders = Reminders::new();
        loop {
            let mut view = self.participant.replica().view();
            if let Some(error) = view.why_lost() {
                return Err(error);
            }
            if let Some(why) = view.refusal.as_ref().filter(|_| view.state.job_end().is_none()) {
                return Err(Error::mismatch(format!("this worker cannot take part: {why}"))
                    .with_remedy("start all workers of a job with the same options"));
            }
            let (is_given_up, now) = (view.is_given_up(), Instant::now());
            match waiting.look(&view.state, is_given_up, now) {
                Next::Over(job_end) => return Ok(NextRound::Over(job_end)),
                Next::Rejoin => {
                    drop(view);
                    warn("the other workers have gone on without this one; it joins them again");
                    self.join()?;
                    waiting.rejoined(self.me.id);
                }
                Next::Leave(ready) => {
                    drop(view);
                    self.append(&ready)?;
                }
                Next::Enter { rank, rejoined, .. } => {
                    let round = self.round(&view.state, rank, rejoined)?;
                    return Ok(NextRound::Round(Box::new(round)));
                }
                Next::Wait(until) => {
                    // The first of them: all wait for the same.
                    if view.state.waiting().take(REPORTING as usize).any(|worker| worker.id == self.me.id) {
                        reminders.remind(|| waits_for(&view.state));
                    }
                    self.replica().wait_until(&mut view, until.min(now + Duration::from_secs(1)));
                }
                Next::LastCall(round) => {
                    drop(view);
                    self.append(&Entry::LastCall { round, nonce: random::number()? })?;
                    self.wait_for_news();
                }
                Next::GiveUp(late, after) => {
                    let round = view.state.round();
                    drop(view);
                    let by = self.me.id;
                    for worker in from_a_random_one(late) {
                        // Another worker may have said so meanwhile, or this one may be in the next round already.
                        let is_late = {
                            let view = self.replica().view();
                            view.state.round() == round
                                && view.state.outstanding().any(|other| other == worker)
                        };
                        if is_late {
                            self.append(&Entry::Gone { worker, by, why: Departure::Late(after) })?;
                        }
                    }
                    self.wait_for_news();
                }
                Next::TooFew { there, needed, after } => return Err(too_few(there, needed, after)),
            }
        }
    }

    /// The group of the round is connected.
    pub(super) fn enter(&self, round: u64, group: &ProcessGroup) {
        *self.current.phase.lock() = Phase::Inside { round, group: group.clone() };
        // A member may have gone meanwhile.
        self.current.end_if_broken(self.replica());
    }

    /// This worker has left its round; `cause` is the failure of one of these members, if that was the reason.
    pub(super) fn leave(&self, members: &[WorkerId], cause: Option<&Error>) -> Result<()> {
        *self.current.phase.lock() = Phase::Waiting;
        let dead = cause.filter(|cause| cause.is_peer_failure()).and_then(Error::peer);
        let dead = dead.and_then(|rank| members.get(rank.index())).filter(|worker| **worker != self.me.id);
        // All survivors say so, unless they have read it: an entry costs round trips, and each reads what all have appended.
        let dead = dead.filter(|worker| self.replica().view().state.rank(**worker).is_some());
        dead.map_or(Ok(()), |&worker| {
            self.append(&Entry::Gone { worker, by: self.me.id, why: Departure::Died })
        })
    }

    /// All members have finished.
    pub(super) fn done(mut self, round: u64) {
        self.ended = true;
        let done = Entry::Done { round, worker: self.me.id };
        // Every member knows that by itself, unless another one dies at this moment.
        let _ = self.participant.append(&done, Deadline::after(LAST_MESSAGE_TIMEOUT));
    }

    /// The job is over, and no entry needs to be appended.
    pub(super) fn over(mut self) {
        self.ended = true;
    }

    /// Asks to take part, under a new number.
    fn join(&mut self) -> Result<()> {
        loop {
            let next = |deadline| next_id(&*self.current.store, self.me.slot, deadline);
            let id = awake(Deadline::after(ANSWER_TIMEOUT), next)?;
            self.me.id = id;
            let join = Entry::Join { worker: self.me.clone(), settings: self.settings };
            let deadline = Deadline::after(ANSWER_TIMEOUT);
            if self.participant.join(id, self.me.heartbeat_key(), &join, deadline)? {
                return Ok(());
            }
            // The entry may have been read: the same number must not be used again.
            self.append(&Entry::Gone { worker: id, by: id, why: Departure::Ended })?;
        }
    }

    fn append(&self, entry: &Entry) -> Result<()> {
        self.participant.append(entry, Deadline::after(ANSWER_TIMEOUT))
    }

    fn wait_for_news(&self) {
        self.replica().wait_until(&mut self.replica().view(), Instant::now() + RECHECK_INTERVAL);
    }

    fn round(&self, state: &MembersState, rank: usize, rejoined: bool) -> Result<Round> {
        let number = state.round();
        let members: Vec<WorkerId> = state.members().map(|worker| worker.id).collect();
        let world_size = WorldSize::new(u32::try_from(members.len()).unwrap_or(u32::MAX))?;
        let rank = world_size.rank(u32::try_from(rank).unwrap_or(u32::MAX))?;
        *self.current.phase.lock() = Phase::Joining { round: number, rank, is_told: false };
        let rendezvous = Rendezvous {
            store: Arc::new(RoundStore::new(&self.current.store, number).of_rank(rank)),
            rank,
            world_size,
            local_rank: self.local.0,
            local_world_size: self.local.1,
            generation: Generation(number),
            interface: self.interface,
            credentials: self.credentials.clone(),
            group_number: Some(group_number(number, &members)),
            ..rendezvous::alone()
        };
        Ok(Round { number, rendezvous, members, rejoined })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.me.process != std::process::id() {
            // It was forked from the worker's process, which is still there.
            return;
        }
        self.replica().close();
        // The group ends with the loop, and does not wait for the threads.
        let phase = std::mem::replace(&mut *self.current.phase.lock(), Phase::Waiting);
        drop(phase);
        if !self.ended {
            let me = self.me.id;
            let gone = Entry::Gone { worker: me, by: me, why: Departure::Ended };
            // If the others do not read this, they notice the end by themselves.
            let _ = self.participant.append(&gone, Deadline::after(LAST_MESSAGE_TIMEOUT));
        }
    }
}

impl CurrentRound {
    fn new(store: SharedStore, host: &str) -> Arc<Self> {
        Arc::new(Self { phase: Mutex::new(Phase::Waiting), store, host: host.to_owned() })
    }

    /// The part of the store in which the members of a round connect.
    fn store_of(&self, round: u64) -> SharedStore {
        Arc::new(RoundStore::new(&self.store, round))
    }

    /// If a member of this worker's round is gone, or the others are in a later round, the round can no longer be used:
    /// ends its group, and the wait for it.
    fn end_if_broken(&self, replica: &Replica<MembersState>) {
        // No thread holds this lock while it takes the replica's.
        let (round, rank) = match &*self.phase.lock() {
            // The first cause stays. To tell it again with each entry that follows would hold up the thread that reads them.
            Phase::Waiting | Phase::Joining { is_told: true, .. } => return,
            Phase::Joining { round, rank, is_told: false } => (*round, *rank),
            Phase::Inside { round, group } => (*round, group.rank()),
        };
        let error = {
            let view = replica.view();
            why_broken(&view.state, round, rank, view.id(), &self.host)
        };
        let Some(error) = error else { return };
        let group = match &mut *self.phase.lock() {
            Phase::Joining { round: now, is_told, .. } if *now == round => {
                *is_told = true;
                None
            }
            Phase::Inside { round: now, group } if *now == round => Some(group.clone()),
            // It has left the round meanwhile.
            _ => return,
        };
        match group {
            Some(group) => group.fail(error),
            None => transport::fail_start(&*self.store_of(round), &error.at(rank, self.host.clone())),
        }
    }
}

/// The number of the group of a round. All its members know what it is made of: so it takes no round trip, as one would that rank 0 draws. It tells
/// groups apart, because workers have random numbers; what keeps others out is the job key.
fn group_number(round: u64, members: &[WorkerId]) -> JobId {
    let members: Vec<u8> = members.iter().flat_map(|worker| worker.0.to_le_bytes()).collect();
    let tag = Secret::new(None, "phalanx round 1", &round.to_le_bytes()).tag("number", &[members.as_slice()]);
    tag.first_chunk().copied().unwrap_or_default()
}

/// The part of the store with the log of the job's workers.
pub(super) fn scope(run_id: &str) -> String {
    format!("phalanx/{run_id}/elastic")
}

/// Reads the workers' log from now on.
fn participate(store: &SharedStore, current: &Arc<CurrentRound>) -> Result<Participant<MembersState>> {
    let current = Arc::clone(current);
    let told = Mutex::new(0);
    let replica = Replica::new(move |replica| {
        current.end_if_broken(replica);
        tell(replica, &told);
    });
    // The store of a job authenticates with the key already: its log needs no MACs.
    let log = Log::new(Arc::clone(store), Mac::none());
    Participant::start(log, Arc::new(replica), Deadline::after(ANSWER_TIMEOUT))
}

/// Warns of what a person should know, `told` times already.
fn tell(replica: &Replica<MembersState>, told: &Mutex<usize>) {
    let mut told = told.lock();
    let new: Vec<String> = replica.view().warnings().skip(*told).map(str::to_owned).collect();
    *told += new.len();
    // The log's threads must not wait for whoever reads standard error.
    new.into_iter().for_each(|warning| Aside::default().warn(warning));
}

/// The number of a worker that joins now in `slot`.
fn next_id(store: &dyn Store, slot: u32, deadline: Deadline) -> Result<WorkerId> {
    let turn = store.add(&format!("stays/{slot}"), 1, deadline)?;
    Ok(WorkerId::new(random::number()?, u64::from_ne_bytes(turn.to_ne_bytes())))
}

#[cfg(test)]
mod tests;
