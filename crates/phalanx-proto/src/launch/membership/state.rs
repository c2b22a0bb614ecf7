//! The state that all nodes agree on.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::entry::{Departure, Entry, Node, NodeId, Settings, WorkerFailure};
use crate::error::{Error, Result};
use crate::launch::exit::Signal;
use crate::launch::root_cause::root_cause;
use crate::log::liveness::{Absence, watched};
use crate::log::{self, Compaction, Machine};
use crate::world_size::MAX_WORLD_SIZE;

/// The state of the job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MembershipState {
    settings: Option<Settings>,
    /// Counts the times that workers were started.
    round: u64,
    /// How many of these were caused by a failure.
    restarts: u32,
    phase: Phase,
    /// The nodes that have joined the next round, in order.
    waiting: Vec<Node>,
    last_cause: Option<Cause>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
enum Phase {
    #[default]
    Gathering,
    Running(Running),
    Over(JobEnd),
}

/// A round whose workers may run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Running {
    /// In the order of their ranks.
    pub members: Vec<Member>,
    /// Where the first node serves this round's store.
    pub store: Option<(String, u16)>,
    causes: Vec<Cause>,
    /// Whether the workers must end.
    pub ending: bool,
}

/// A node of a round.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The launcher and its workers, as it has joined.
    pub node: Node,
    /// The rank of its first worker; the others follow.
    pub first_rank: u32,
    progress: Progress,
    /// Whether it takes no part in the next round.
    gone: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Progress {
    Working,
    Succeeded,
    Ended,
}

/// How the job ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobEnd {
    /// All workers have ended well.
    Succeeded,
    /// It cannot go on after this.
    Failed(Cause),
}

/// The first failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// A worker failed.
    Worker(WorkerFailure),
    /// A node is gone.
    Node {
        /// The node that is gone.
        node: Node,
        /// Its rank among the nodes of the round; None if it only waited for one.
        node_rank: Option<u32>,
        /// Why it is no longer there.
        why: Departure,
    },
}

/// The version byte of a state.
pub const STATE_VERSION: u8 = 2;

impl Machine for MembershipState {
    type Entry = Entry;
    type Id = NodeId;

    const VERSION: u8 = 7;
    const PROCESS: &'static str = "launcher";
    const AUTHOR: &'static str = "another node's launcher";
    const READERS: u64 = 2;
    const COMPACTION: Option<Compaction<Self>> = Some(Compaction {
        encode: |state| log::encode(STATE_VERSION, state),
        decode: Self::decode,
        caretaker: Self::caretaker,
        heartbeats_of: Some(heartbeats_of),
    });

    fn apply(&mut self, entry: Entry) -> Result<(), String> {
        match entry {
            Entry::Join { node, settings } => return self.join(node, settings),
            Entry::LastCall { round, .. } => {
                if round == self.round && self.has_enough() {
                    self.start_round();
                }
            }
            Entry::Store { round, host, port } => {
                if let Some(running) = self.running_in(round) {
                    running.store.get_or_insert((host, port));
                }
            }
            Entry::Failed { round, node, failure } => {
                // Where the round ends for new nodes, launchers read that at different times. Workers of one that has not read it yet fail
                // because those of another have ended.
                if let Some(running) = self.running_in(round)
                    && running.is_working(node)
                    && !running.ends_without_cause()
                {
                    running.note(failure);
                    running.ending = true;
                }
            }
            Entry::Ended { round, node, succeeded } => {
                if let Some(running) = self.running_in(round) {
                    running.set(node, if succeeded { Progress::Succeeded } else { Progress::Ended });
                    // A round that ended without a reason has ended all the same: no node may wait for it.
                    running.ending |= !succeeded;
                }
                self.conclude();
            }
            Entry::Left { node, why } => self.leave(node, why),
        }
        Ok(())
    }

    fn joining(entry: &Entry) -> Option<NodeId> {
        match entry {
            Entry::Join { node, .. } => Some(node.id),
            _ => None,
        }
    }

    fn is_present(&self, id: NodeId) -> bool {
        self.present().any(|node| node.id == id)
    }

    /// The launchers that a launcher watches. Among many the one that serves the store watches all; if none does, the first few.
    fn watched_by(&self, id: NodeId) -> Vec<NodeId> {
        let all: Vec<NodeId> = self.present().map(|node| node.id).collect();
        let server = self.present().find(|node| node.serves_store);
        let watchers = server.map_or_else(|| all.clone(), |node| vec![node.id]);
        watched(all, id, watchers)
    }

    fn heartbeat_key(&self, id: NodeId) -> Option<String> {
        Some(id.heartbeat_key())
    }

    fn absent(node: NodeId, _by: NodeId, absence: Absence) -> Entry {
        Entry::Left { node, why: absence.into() }
    }
}

impl MembershipState {
    /// A state that another launcher has written.
    fn decode(bytes: &[u8]) -> Result<Self> {
        let state: Self = log::decode(STATE_VERSION, bytes, Self::AUTHOR)?;
        let strange = || Error::malformed("the state in the launchers' log is not valid");
        state.is_sound().then_some(state).ok_or_else(strange)
    }

    /// Whether the entries of a log can lead to this state, as far as calculations with it need that.
    fn is_sound(&self) -> bool {
        let workers = |node: &Node| u64::from(node.workers);
        let most = u64::from(MAX_WORLD_SIZE);
        let members = self.running().map_or(&[][..], |running| &running.members);
        let mut next_rank = 0;
        let ranks_follow = members.iter().all(|member| {
            let follows = u64::from(member.first_rank) == next_rank;
            next_rank += workers(&member.node);
            follows
        });
        let mut nodes = members.iter().map(|member| &member.node).chain(&self.waiting);
        let mut ids = BTreeSet::new();
        let has_room =
            |settings: Settings| settings.are_sound() && members.len() <= settings.max_nodes as usize;
        ranks_follow
            && self.settings.is_none_or(has_room)
            && self.running().is_none_or(|running| !running.members.is_empty())
            && self.present().all(|node| ids.insert(node.id))
            && (self.settings.is_some() || self.present().next().is_none())
            && next_rank <= most
            && self.present().map(workers).sum::<u64>() <= most
            && nodes.all(|node| node.workers > 0)
            && self.restarts <= self.settings.map_or(0, |settings| settings.max_restarts)
            && self.round < u64::MAX / 2
    }

    /// The launcher that compacts the log: the one that serves the store, or the first that is there.
    fn caretaker(&self) -> Option<NodeId> {
        let server = self.present().find(|node| node.serves_store);
        server.or_else(|| self.present().next()).map(|node| node.id)
    }

    fn join(&mut self, node: Node, settings: Settings) -> Result<(), String> {
        if matches!(self.phase, Phase::Over(_)) {
            return Err("the job is over; give each job its own --rdzv-id".to_owned());
        }
        // A round of no nodes would have ended well before it began.
        if !settings.are_sound() {
            return Err(format!(
                "--nnodes {}:{} is no range of numbers from 1",
                settings.min_nodes, settings.max_nodes
            ));
        }
        let agreed = *self.settings.get_or_insert(settings);
        if agreed != settings {
            return Err(format!(
                "the first node has --nnodes {}:{} --max-restarts {}, this one --nnodes {}:{} --max-restarts {}",
                agreed.min_nodes,
                agreed.max_nodes,
                agreed.max_restarts,
                settings.min_nodes,
                settings.max_nodes,
                settings.max_restarts
            ));
        }
        if let Some(node_rank) = node.node_rank {
            if node_rank >= agreed.max_nodes {
                return Err(format!(
                    "--node-rank {node_rank} is not below the number of nodes, {}",
                    agreed.max_nodes
                ));
            }
            let has_rank = |other: &&Node| other.node_rank == Some(node_rank) && other.id != node.id;
            if let Some(other) = self.present().find(has_rank) {
                return Err(format!(
                    "two nodes have --node-rank {node_rank}: {} and {}",
                    other.host, node.host
                ));
            }
        }
        let workers: u64 = self.present().map(|other| u64::from(other.workers)).sum();
        if node.workers == 0 || workers + u64::from(node.workers) > MAX_WORLD_SIZE.into() {
            return Err(format!("a job has at least one and at most {MAX_WORLD_SIZE} workers"));
        }
        if self.present().any(|other| other.id == node.id) {
            return Ok(());
        }
        self.waiting.push(node);
        match &mut self.phase {
            // Workers that have succeeded on some node are not started again for a new node.
            Phase::Running(running) if running.has_room(agreed) => running.ending = true,
            Phase::Running(_) | Phase::Over(_) => {}
            Phase::Gathering => self.start_if_full(),
        }
        Ok(())
    }

    fn leave(&mut self, id: NodeId, why: Departure) {
        let waiting = self.waiting.iter().position(|node| node.id == id);
        let cause = if let Some(index) = waiting {
            let node = self.waiting.remove(index);
            Cause::Node { node, node_rank: None, why }
        } else {
            let Phase::Running(running) = &mut self.phase else { return };
            let Some(index) = running.members.iter().position(|member| member.node.id == id) else { return };
            let member = &mut running.members[index];
            if std::mem::replace(&mut member.gone, true) {
                return;
            }
            let node = member.node.clone();
            // Its workers have ended well, so its loss does no harm, unless it serves the launchers' store.
            if member.progress == Progress::Succeeded && !node.serves_store {
                return;
            }
            member.progress = Progress::Ended;
            running.ending = true;
            let cause = Cause::Node { node, node_rank: u32::try_from(index).ok(), why };
            running.causes.push(cause.clone());
            cause
        };
        if matches!(&cause, Cause::Node { node, .. } if node.serves_store) {
            let cause = match &self.phase {
                Phase::Running(running) => running.root_cause().unwrap_or(cause),
                _ => cause,
            };
            self.phase = Phase::Over(JobEnd::Failed(cause));
        }
        self.conclude();
    }

    /// If no worker is left, the round is over.
    fn conclude(&mut self) {
        let Phase::Running(running) = &self.phase else { return };
        let done = |member: &Member| member.progress == Progress::Succeeded;
        if running.members.iter().all(done) && running.causes.is_empty() {
            self.phase = Phase::Over(JobEnd::Succeeded);
            return;
        }
        let works = |member: &Member| member.progress == Progress::Working;
        if !running.ending || running.members.iter().any(works) {
            return;
        }
        let cause = running.root_cause();
        let departure = cause.as_ref().and_then(|cause| running.departure_behind(cause));
        // Somebody has ended a node, or it cannot go on: whatever has failed beside that, nobody takes its place.
        let is_called_off = running.causes.iter().any(|cause| cause.costs_a_restart(false).is_none());
        let staying = running.members.iter().filter(|member| !member.gone);
        let mut waiting: Vec<Node> = staying.map(|member| member.node.clone()).collect();
        waiting.append(&mut self.waiting);
        self.waiting = waiting;
        let (least, most) =
            self.settings.map_or((1, 0), |settings| (settings.min_nodes, settings.max_restarts));
        if let Some(cause) = cause {
            let enough = self.waiting.len() >= least as usize;
            let cause = departure.filter(|_| enough).unwrap_or(cause);
            let costs = cause.costs_a_restart(enough);
            if costs.is_none_or(|costs| costs && self.restarts == most) || (is_called_off && !enough) {
                self.phase = Phase::Over(JobEnd::Failed(cause));
                return;
            }
            self.restarts += u32::from(costs == Some(true));
            self.last_cause = Some(cause);
        } else {
            self.last_cause = None;
        }
        self.round += 1;
        self.phase = Phase::Gathering;
        self.start_if_full();
    }

    fn start_if_full(&mut self) {
        if self.settings.is_some_and(|settings| self.waiting.len() >= settings.max_nodes as usize) {
            self.start_round();
        }
    }

    /// The nodes that have joined get their ranks.
    fn start_round(&mut self) {
        let most = self.settings.map_or(0, |settings| settings.max_nodes as usize);
        let mut nodes = std::mem::take(&mut self.waiting);
        // In the order of joining, unless they were given their ranks.
        nodes.sort_by_key(|node| (!node.serves_store, node.node_rank.unwrap_or(u32::MAX)));
        self.waiting = nodes.split_off(nodes.len().min(most));
        let mut first_rank = 0;
        let members = nodes.into_iter().map(|node| {
            let member = Member { first_rank, progress: Progress::Working, gone: false, node };
            first_rank += member.node.workers;
            member
        });
        let members = members.collect();
        self.phase = Phase::Running(Running { members, store: None, causes: Vec::new(), ending: false });
    }

    /// Whether this round may begin without waiting for other nodes.
    pub fn has_enough(&self) -> bool {
        matches!(self.phase, Phase::Gathering)
            && self.settings.is_some_and(|settings| self.waiting.len() >= settings.min_nodes as usize)
    }

    fn running_in(&mut self, round: u64) -> Option<&mut Running> {
        match &mut self.phase {
            Phase::Running(running) if round == self.round => Some(running),
            _ => None,
        }
    }

    /// All nodes that are there.
    pub fn present(&self) -> impl Iterator<Item = &Node> {
        let members = self.running().map_or(&[][..], |running| &running.members);
        let members = members.iter().filter(|member| !member.gone);
        members.map(|member| &member.node).chain(&self.waiting)
    }

    /// The earlier launcher of the same host and node rank as `node`, if it is still counted. `node` may be its successor, or a
    /// second launcher with the wrong rank: the state of the earlier process says which. The one that serves the store has none.
    pub fn predecessor(&self, node: &Node) -> Option<&Node> {
        let is_earlier = |other: &&Node| {
            other.id != node.id
                && other.node_rank.is_some()
                && (other.node_rank, &other.host) == (node.node_rank, &node.host)
                && !other.serves_store
        };
        self.present().find(is_earlier)
    }

    /// Whether `node` would be taken now. It may have been refused because of one that has left since.
    pub fn takes(&self, node: &Node, settings: &Settings) -> bool {
        let join = Entry::Join { node: node.clone(), settings: *settings };
        self.clone().apply(join).is_ok()
    }

    /// Whether an entry has been applied.
    pub fn has_begun(&self) -> bool {
        self.settings.is_some()
    }

    /// The round that runs or is being gathered for, from 0 on.
    pub fn round(&self) -> u64 {
        self.round
    }

    /// How many rounds have begun because of a failure that costs a restart.
    pub fn restarts(&self) -> u32 {
        self.restarts
    }

    /// Why the previous round ended; none if the only reason was that nodes joined.
    pub fn last_cause(&self) -> Option<&Cause> {
        self.last_cause.as_ref()
    }

    /// The nodes that wait for a round to begin.
    pub fn waiting(&self) -> &[Node] {
        &self.waiting
    }

    /// Whether nodes are awaited for a round that has not begun.
    pub fn is_gathering(&self) -> bool {
        matches!(self.phase, Phase::Gathering)
    }

    /// The round that runs; None between rounds, and after the job.
    pub fn running(&self) -> Option<&Running> {
        match &self.phase {
            Phase::Running(running) => Some(running),
            _ => None,
        }
    }

    /// Whether the job has ended because a node was silent.
    pub fn has_ended_in_silence(&self) -> bool {
        matches!(&self.phase, Phase::Over(JobEnd::Failed(Cause::Node { why: Departure::Silent(_), .. })))
    }

    /// The failure of a worker with which the job ends, as far as is known, when no worker is left on any node: no round follows, whichever
    /// node leaves meanwhile.
    pub fn decided(&self) -> Option<Cause> {
        let settings = self.settings?;
        let is_last = settings.min_nodes == settings.max_nodes && self.restarts == settings.max_restarts;
        let cause = self.running().filter(|_| is_last)?.root_cause();
        cause.filter(|cause| matches!(cause, Cause::Worker(_)))
    }

    /// How the job ended; None if it goes on.
    pub fn job_end(&self) -> Option<&JobEnd> {
        match &self.phase {
            Phase::Over(job_end) => Some(job_end),
            _ => None,
        }
    }
}

/// The launcher that an entry says has come or gone, and the key of its heartbeats: no other launcher has its number.
fn heartbeats_of(entry: &Entry) -> Option<(NodeId, String)> {
    let id = match entry {
        Entry::Join { node, .. } => node.id,
        Entry::Left { node, .. } => *node,
        Entry::LastCall { .. } | Entry::Store { .. } | Entry::Failed { .. } | Entry::Ended { .. } => {
            return None;
        }
    };
    Some((id, id.heartbeat_key()))
}

impl Cause {
    /// Whether starting again after it costs a restart; none if the job ends in any case. If nodes come and go and `enough` stay,
    /// that costs nothing. If not, one that got SIGTERM, as a pod that is deleted, may be replaced; Ctrl-C means the job.
    fn costs_a_restart(&self, enough: bool) -> Option<bool> {
        match self {
            Self::Node { why: Departure::Signal(_) | Departure::GaveUp(_), .. } if enough => Some(false),
            Self::Node { why: Departure::Signal(signal), .. } => {
                (*signal == Signal::TERM.number()).then_some(true)
            }
            Self::Node { why: Departure::GaveUp(_), .. } => None,
            Self::Node { why: Departure::Silent(_) | Departure::Replaced | Departure::Ended, .. }
            | Self::Worker(_) => Some(true),
        }
    }
}

impl Running {
    fn set(&mut self, id: NodeId, progress: Progress) {
        let working = |member: &&mut Member| member.node.id == id && member.progress == Progress::Working;
        if let Some(member) = self.members.iter_mut().find(working) {
            member.progress = progress;
        }
    }

    /// More may become known of a failure; the time of the first report counts.
    fn note(&mut self, failure: WorkerFailure) {
        let same = |cause: &&mut Cause| matches!(cause, Cause::Worker(known) if known.rank == failure.rank);
        match self.causes.iter_mut().find(same) {
            Some(known) => *known = Cause::Worker(failure),
            None => self.causes.push(Cause::Worker(failure)),
        }
    }

    /// Whether the workers must end although nothing has failed, as for a new node.
    fn ends_without_cause(&self) -> bool {
        self.ending && self.causes.is_empty()
    }

    fn is_working(&self, id: NodeId) -> bool {
        self.members.iter().any(|member| member.node.id == id && member.progress == Progress::Working)
    }

    /// Whether a new node could take part if all started again.
    fn has_room(&self, settings: Settings) -> bool {
        !self.has_finished() && self.members.len() < settings.max_nodes as usize
    }

    /// Whether there is a node on which all workers have ended well.
    pub fn has_finished(&self) -> bool {
        self.members.iter().any(|member| member.progress == Progress::Succeeded)
    }

    /// This node's rank among the nodes, if it takes part.
    pub fn node_rank(&self, id: NodeId) -> Option<usize> {
        self.members.iter().position(|member| member.node.id == id && !member.gone)
    }

    /// The rank of the first worker of the node with `node_rank` among the workers of its role, and their number.
    pub fn in_role(&self, node_rank: usize) -> (u32, u32) {
        let Some(own) = self.members.get(node_rank).map(|member| &member.node.role) else { return (0, 0) };
        let count = |members: &[Member]| {
            members
                .iter()
                .map(|member| &member.node)
                .filter(|node| node.role == *own)
                .map(|node| node.workers)
                .sum::<u32>()
        };
        (count(&self.members[..node_rank]), count(&self.members))
    }

    /// The number of workers on all nodes.
    pub fn world_size(&self) -> u32 {
        self.members.last().map_or(0, |member| member.first_rank + member.node.workers)
    }

    fn root_cause(&self) -> Option<Cause> {
        // The workers of a node whose launcher is gone died before that was noticed, and not every program reports whom it blames.
        let is_gone = |cause: &&Cause| {
            matches!(cause, Cause::Node { why: Departure::Silent(_) | Departure::Ended, .. })
        };
        if let Some(gone) = self.causes.iter().find(is_gone) {
            return Some(gone.clone());
        }
        let blamed = |cause: &Cause| match cause {
            Cause::Worker(WorkerFailure { blames: Some(rank), .. }) => {
                self.causes.iter().find(|other| self.concerns(other, *rank))
            }
            _ => None,
        };
        root_cause(&self.causes, blamed).cloned()
    }

    /// The node that has left, as it was told to, if the failure of a worker, `cause`, may come from that: workers fail when those of another
    /// node go, and the log may have that first. A worker that others have seen fail is a cause of its own, unless it was that node's.
    fn departure_behind(&self, cause: &Cause) -> Option<Cause> {
        let Cause::Worker(failure) = cause else { return None };
        let is_blamed = self
            .causes
            .iter()
            .any(|other| matches!(other, Cause::Worker(other) if other.blames == Some(failure.rank)));
        let mut departures = self.causes.iter().filter(|other| other.costs_a_restart(true) == Some(false));
        departures.find(|node| !is_blamed || self.concerns(node, failure.rank)).cloned()
    }

    /// Whether it is about `rank`.
    fn concerns(&self, cause: &Cause, rank: u32) -> bool {
        match cause {
            Cause::Worker(failure) => failure.rank == rank,
            Cause::Node { node, .. } => self.members.iter().any(|member| {
                let ranks = member.first_rank..member.first_rank + member.node.workers;
                member.node.id == node.id && ranks.contains(&rank)
            }),
        }
    }
}
