//! The state that all workers agree on.

use serde::{Deserialize, Serialize};

use super::entry::{Departure, Entry, Settings, Worker, WorkerId};
use crate::error::{Error, Result};
use crate::log::liveness::{Absence, watched};
use crate::log::{self, Compaction, Machine};
use crate::world_size::MAX_WORLD_SIZE;

/// The workers that take part, and those that wait to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MembersState {
    settings: Option<Settings>,
    /// How many workers there are, if the launcher has published it.
    expected: Option<u32>,
    /// The round that began last; 0 if none has.
    round: u64,
    /// Of that round, by rank.
    members: Vec<Member>,
    /// The workers that have joined since, in order.
    newcomers: Vec<Worker>,
    job_end: Option<ElasticEnd>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Member {
    worker: Worker,
    state: MemberState,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum MemberState {
    /// It may be using the round's group.
    Working,
    /// It has left the group and waits for the next round, with or without a step to replay.
    Ready {
        can_replay: bool,
    },
    Gone(Departure),
}

impl Member {
    fn is_ready(&self) -> bool {
        matches!(self.state, MemberState::Ready { .. })
    }
}

/// How the job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ElasticEnd {
    /// All members of the last round have finished.
    Done,
    /// One more round would exceed the reset limit.
    TooManyRounds,
}

/// The version byte of a state.
const STATE_VERSION: u8 = 1;

impl Machine for MembersState {
    type Entry = Entry;
    type Id = WorkerId;

    const VERSION: u8 = 2;
    const PROCESS: &'static str = "worker";
    const AUTHOR: &'static str = "another worker";
    const READERS: u64 = 1;
    const COMPACTION: Option<Compaction<Self>> = Some(Compaction {
        encode: |state| log::encode(STATE_VERSION, state),
        decode: Self::decode,
        caretaker: Self::first,
        // Those that come after each other in a slot share a few.
        heartbeats_of: None,
    });

    fn apply(&mut self, entry: Entry) -> Result<(), String> {
        if self.job_end.is_some() {
            // Only a newcomer needs an answer: no other entry changes a job that is over.
            let joins = matches!(entry, Entry::Join { .. });
            return if joins { Err("the job is over".to_owned()) } else { Ok(()) };
        }
        match entry {
            Entry::Join { worker, settings } => self.join(worker, settings)?,
            Entry::Ready { round, worker, can_replay } if round == self.round => {
                self.ready(worker, can_replay)
            }
            Entry::LastCall { round, .. } if round == self.round + 1 && self.has_enough() => {
                self.begin_with(false)
            }
            Entry::Gone { worker, why, .. } => self.leave(worker, why),
            Entry::Done { round, worker } if round == self.round && self.rank(worker).is_some() => {
                self.job_end = Some(ElasticEnd::Done);
            }
            Entry::Exited { slot, process, .. } => self.exited(slot, process),
            Entry::Expected { workers, .. } => self.expected = Some(workers),
            Entry::Ready { .. } | Entry::LastCall { .. } | Entry::Done { .. } => {}
        }
        if self.job_end.is_none() {
            if self.can_resume() {
                self.begin_with(true);
            } else if self.is_full() {
                self.begin_with(false);
            }
        }
        Ok(())
    }

    fn joining(entry: &Entry) -> Option<WorkerId> {
        match entry {
            Entry::Join { worker, .. } => Some(worker.id),
            _ => None,
        }
    }

    /// Whether it is a member, or waits to become one.
    fn is_present(&self, id: WorkerId) -> bool {
        self.rank(id).is_some() || self.newcomers.iter().any(|worker| worker.id == id)
    }

    /// The workers that a worker watches. While a round runs, each member watches the next one, and the first also those who wait.
    /// A waiting worker watches all others; if many wait, only the first few of them do.
    fn watched_by(&self, id: WorkerId) -> Vec<WorkerId> {
        let newcomers = self.newcomers.iter().map(|worker| worker.id);
        let members = self.members.iter().filter(|member| !matches!(member.state, MemberState::Gone(_)));
        let members: Vec<WorkerId> = members.map(|member| member.worker.id).collect();
        match self.rank(id) {
            Some(rank) if !self.is_gathering() => {
                let next = members[(rank + 1) % members.len()];
                let mut watched: Vec<WorkerId> =
                    std::iter::once(next).chain(newcomers.filter(|_| rank == 0)).collect();
                watched.retain(|other| *other != id);
                watched
            }
            _ => {
                let all: Vec<WorkerId> = members.into_iter().chain(newcomers.clone()).collect();
                let watchers = if self.is_gathering() { all.clone() } else { newcomers.collect() };
                watched(all, id, watchers)
            }
        }
    }

    fn heartbeat_key(&self, id: WorkerId) -> Option<String> {
        self.worker(id).map(Worker::heartbeat_key)
    }

    fn absent(worker: WorkerId, by: WorkerId, absence: Absence) -> Entry {
        let why = match absence {
            Absence::Silent(since) => Departure::Silent(since),
            Absence::Ended => Departure::Died,
        };
        Entry::Gone { worker, by, why }
    }
}

impl MembersState {
    /// A state that another worker has written.
    fn decode(bytes: &[u8]) -> Result<Self> {
        let state: Self = log::decode(STATE_VERSION, bytes, Self::AUTHOR)?;
        let strange = || Error::malformed("the state in the workers' log is not valid");
        state.is_sound().then_some(state).ok_or_else(strange)
    }

    fn join(&mut self, worker: Worker, settings: Settings) -> Result<(), String> {
        if !settings.are_sound() {
            return Err(format!("{} to {} workers is not a valid range", settings.min, settings.max));
        }
        let agreed = *self.settings.get_or_insert(settings);
        if agreed != settings {
            return Err(format!(
                "the first worker came with {} to {} workers and a reset limit of {:?}, this one with {} to {} and {:?}",
                agreed.min, agreed.max, agreed.reset_limit, settings.min, settings.max, settings.reset_limit
            ));
        }
        if self.newcomers.len() >= MAX_WORLD_SIZE as usize {
            return Err(format!("{MAX_WORLD_SIZE} workers wait already"));
        }
        let known = self.members.iter().any(|member| member.worker.id == worker.id)
            || self.newcomers.iter().any(|other| other.id == worker.id);
        if !known {
            self.newcomers.push(worker);
        }
        Ok(())
    }

    fn ready(&mut self, id: WorkerId, can_replay: bool) {
        let working = |member: &&mut Member| member.worker.id == id && member.state == MemberState::Working;
        if let Some(member) = self.members.iter_mut().find(working) {
            member.state = MemberState::Ready { can_replay };
        }
    }

    fn leave(&mut self, id: WorkerId, why: Departure) {
        self.newcomers.retain(|worker| worker.id != id);
        let there =
            |member: &&mut Member| member.worker.id == id && !matches!(member.state, MemberState::Gone(_));
        if let Some(member) = self.members.iter_mut().find(there) {
            member.state = MemberState::Gone(why);
        }
    }

    /// Removes everything that this process is or was about to become.
    fn exited(&mut self, slot: u32, process: u32) {
        let members = self.members.iter().map(|member| &member.worker);
        let same = |worker: &&Worker| (worker.slot, worker.process) == (slot, process);
        let gone: Vec<WorkerId> =
            members.chain(&self.newcomers).filter(same).map(|worker| worker.id).collect();
        gone.into_iter().for_each(|id| self.leave(id, Departure::Exited));
    }

    /// The waiting workers become the members: the survivors first, in their old order; or the survivors alone.
    fn begin_with(&mut self, alone: bool) {
        let Some(settings) = self.settings else { return };
        if settings.reset_limit.is_some_and(|limit| self.round > limit.into()) {
            self.job_end = Some(ElasticEnd::TooManyRounds);
            return;
        }
        let members = std::mem::take(&mut self.members);
        let survivors = members.into_iter().filter(Member::is_ready);
        let mut workers: Vec<Worker> = survivors.map(|member| member.worker).collect();
        if !alone {
            workers.append(&mut self.newcomers);
            self.newcomers = workers.split_off(workers.len().min(settings.max as usize));
        }
        self.members =
            workers.into_iter().map(|worker| Member { worker, state: MemberState::Working }).collect();
        self.round += 1;
    }

    /// Whether the survivors can replay the step that was cut off. If so, they wait for no other worker: a newcomer could not
    /// take part in that step, and joins at the next commit.
    fn can_resume(&self) -> bool {
        let can_replay = |member: &Member| member.state == MemberState::Ready { can_replay: true };
        let survivors = self.members.iter().filter(|member| member.is_ready());
        let enough = self.settings.is_some_and(|settings| survivors.clone().count() >= settings.min as usize);
        enough && self.is_free() && survivors.clone().all(can_replay)
    }

    /// Whether the next round can begin with the workers that can take part now.
    fn is_full(&self) -> bool {
        let most = |settings: Settings| {
            self.expected.unwrap_or(settings.max).clamp(settings.min, settings.max) as usize
        };
        self.is_free() && self.settings.is_some_and(|settings| self.waiting().count() >= most(settings))
    }

    /// Whether the next round can begin, without waiting for more workers.
    pub fn has_enough(&self) -> bool {
        self.is_free()
            && self.settings.is_some_and(|settings| self.waiting().count() >= settings.min as usize)
    }

    /// Whether the last round has ended, for all its members.
    fn is_free(&self) -> bool {
        self.is_gathering() && self.outstanding().next().is_none()
    }

    /// Whether there is no round, or a member has left it.
    pub fn is_gathering(&self) -> bool {
        self.round == 0 || self.members.iter().any(|member| member.state != MemberState::Working)
    }

    /// Members that have not left the last round yet.
    pub fn outstanding(&self) -> impl Iterator<Item = WorkerId> {
        let working = self.members.iter().filter(|member| member.state == MemberState::Working);
        working.map(|member| member.worker.id)
    }

    /// The workers that wait for the next round, in the order of their future ranks.
    pub fn waiting(&self) -> impl Iterator<Item = &Worker> {
        let ready = self.members.iter().filter(|member| member.is_ready());
        ready.map(|member| &member.worker).chain(&self.newcomers)
    }

    /// Whether a worker waits for which the world has room beside the members.
    pub fn workers_wait(&self) -> bool {
        let most = self.settings.map_or(0, |settings| settings.max as usize);
        !self.newcomers.is_empty() && self.members.len() < most
    }

    /// The round that began last; 0 if none has.
    pub fn round(&self) -> u64 {
        self.round
    }

    /// The settings of the first worker; None if no worker has joined.
    pub fn settings(&self) -> Option<Settings> {
        self.settings
    }

    /// How the job ended; None if it goes on.
    pub fn job_end(&self) -> Option<ElasticEnd> {
        self.job_end
    }

    /// The members of the last round, by rank.
    pub fn members(&self) -> impl ExactSizeIterator<Item = &Worker> {
        self.members.iter().map(|member| &member.worker)
    }

    /// The rank of a worker in the last round, if it is a member and still there.
    pub fn rank(&self, id: WorkerId) -> Option<usize> {
        let there = |member: &Member| member.worker.id == id && !matches!(member.state, MemberState::Gone(_));
        self.members.iter().position(there)
    }

    /// The members of the last round that are gone, by rank.
    pub fn gone(&self) -> impl Iterator<Item = (usize, &Worker, &Departure)> {
        self.members.iter().enumerate().filter_map(|(rank, member)| match &member.state {
            MemberState::Gone(why) => Some((rank, &member.worker, why)),
            MemberState::Working | MemberState::Ready { .. } => None,
        })
    }

    /// Whether the entries of a log can lead to this state.
    pub fn is_sound(&self) -> bool {
        let most = MAX_WORLD_SIZE as usize;
        self.settings.is_none_or(Settings::are_sound)
            && self.round < u64::MAX / 2
            && self.members.len() <= most
            && self.newcomers.len() <= most
    }

    /// A worker that is a member, or waits to become one.
    pub fn worker(&self, id: WorkerId) -> Option<&Worker> {
        let members = self.members.iter().map(|member| &member.worker);
        members.chain(&self.newcomers).find(|worker| worker.id == id)
    }

    /// The first of the workers that are there: it does what one worker must do for all.
    pub fn first(&self) -> Option<WorkerId> {
        let members = self.members.iter().filter(|member| !matches!(member.state, MemberState::Gone(_)));
        members.map(|member| &member.worker).chain(&self.newcomers).map(|worker| worker.id).next()
    }
}
