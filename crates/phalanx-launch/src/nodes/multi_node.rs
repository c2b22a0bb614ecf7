//! A job on several nodes: what this node does in each state of the membership.
//!
//! Every round of workers has a store of its own. So programs that know only torchrun's variables find it empty, and a
//! worker of an earlier round finds no server.
//!
//! A launcher that is started again may be refused at first: its predecessor, which is gone, still has its rank. Then it asks again under a
//! new number ([`NodeId`]). Three threads are concerned. This one sees the refusal and decides. The writer appends the entries, and notes
//! under which number it asks, and where in the log. The reader notes what the log says of that number. Each may be stopped for any time between any two of its
//! steps: the reader may find a refusal before the writer has noted where its entry is, and this launcher may have got its place and be given up before it looks.
//! So no clock, and no order of what the threads do, says which of the two entries a refusal or a loss is about; the number does: what is
//! known counts only if it is about the number under which this launcher has asked last (`knows_of_me`). Nothing is known of that number
//! before the writer has noted it.

mod causes;

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use phalanx_proto::log::turn;

use self::causes::outcome_of;
use super::membership::{Departure, Entry, JobEnd, MembershipState, Node, NodeId, Settings, WorkerFailure};
use super::rendezvous_handler::{Reached, RendezvousHandler};
use super::rendezvous_store::serve_round;
use super::{AfterAttempt, AttemptEnd, Gathered, Nodes};
use crate::attempts::Control;
use crate::cluster::{Cluster, RendezvousBackend};
use crate::deadline::Deadline;
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::exit::{Outcome, Signal};
use crate::host;
use crate::job::Job;
use crate::log::{AFTER_STANDSTILL, View};
use crate::placement::Placement;
use crate::poll::poll_readable;
use crate::random;
use crate::shortage::Shortage;
use crate::store::{Access, Refusals, TcpStoreServer};
use crate::transport::process;
use crate::world_size::WorldSize;

/// How much longer than the time to join to wait for the cause why the launchers' store was not reached.
const LAST_ATTEMPT_GRACE: Duration = Duration::from_secs(2);
/// How much longer than its silence the others may take to notice that a launcher is gone.
const NOTICE_GRACE: Duration = Duration::from_secs(2);
/// What the other nodes are told of one whose observer has asked for the end.
const STOPPED: &str = "the reader of its output has closed the pipe";
/// With more nodes, not each that comes is shown: hundreds of launchers would each show hundreds of lines.
const FEW_NODES: u32 = 16;
/// The time between two lines about many nodes that come.
const SHOW_INTERVAL: Duration = Duration::from_secs(1);
/// A wait that ends later than by so much was one in which this process was stopped.
const STANDSTILL_LIMIT: Duration = Duration::from_secs(5);

/// This node among the others.
pub(crate) struct MultiNode<'a> {
    cluster: &'a Cluster,
    /// The clients that may use a round's store.
    access: Access,
    run_id: String,
    /// The number under which it has asked last.
    me: NodeId,
    handler: RendezvousHandler,
    /// The state that was last read.
    view: View<MembershipState>,
    /// The launchers' store, once it has answered.
    reached: Option<Reached>,
    has_told_where: bool,
    /// The round whose workers were started last.
    round: Option<u64>,
    /// This round's store, if it is served here.
    store: Option<(u64, TcpStoreServer)>,
    /// Why the log is lost, for the user.
    lost: Option<Error>,
    /// Whether the round that was read last is ending, or the job is over.
    is_ending: bool,
    /// For how long this launcher had stood still when it first read that.
    stood_still: Option<Duration>,
    /// How many warnings were shown.
    warned: usize,
    /// The number of waiting nodes that was shown last, and when.
    shown: Option<(usize, Instant)>,
    /// The entry with which this node has joined, until it takes the place of an earlier launcher.
    join: Option<(Node, Settings)>,
    /// Until when it waits for the others to miss that launcher, which it cannot see.
    refused_until: Option<Instant>,
    /// Whether it has said that it leaves.
    has_left: bool,
    /// Whether a signal has ended its wait for other nodes, whatever the outcome.
    was_interrupted: bool,
}

impl<'a> MultiNode<'a> {
    pub(crate) fn new(job: &Job, cluster: &'a Cluster, run_id: String, refusals: &Refusals) -> Result<Self> {
        let me = NodeId(random::number()?);
        let (workers, node_rank) = (job.workers.get(), cluster.node_rank);
        let (process, role) = (process::own(), job.role.clone());
        let node = move |serves_store| Node {
            id: me,
            host: host::name(),
            workers,
            node_rank,
            serves_store,
            process,
            role: role.clone(),
        };
        // Only a node that does not serve the store can come again: the job ends with the one that does.
        let (again, max_restarts) = (node(false), job.restarts_allowed());
        let settings = Settings { min_nodes: cluster.min_nodes, max_nodes: cluster.max_nodes, max_restarts };
        let handler = RendezvousHandler::start(
            cluster,
            job.launchers_access(refusals),
            format!("phalanx/launch/{run_id}"),
            node,
            settings,
        )?;
        Ok(Self {
            cluster,
            access: job.workers_access(refusals),
            run_id,
            me,
            handler,
            view: View::default(),
            reached: None,
            has_told_where: false,
            round: None,
            store: None,
            lost: None,
            is_ending: false,
            stood_still: None,
            warned: 0,
            shown: None,
            join: Some((again, settings)),
            refused_until: None,
            has_left: false,
            was_interrupted: false,
        })
    }

    fn take_news(&mut self) {
        (self.reached, self.view) = self.handler.look();
        self.note_end();
        // The launcher that serves the store ends when the job is over.
        if self.lost.is_none() && self.view.state.job_end().is_none() {
            self.lost = self.view.lost.clone().map(|error| self.store_is_lost(error));
        }
    }

    /// Keeps for how long this launcher had stood still when it first read that the round, or the job, ends: the workers' end may take longer
    /// than that is known.
    fn note_end(&mut self) {
        let state = &self.view.state;
        let is_ending = state.job_end().is_some() || state.running().is_some_and(|running| running.ending);
        if is_ending && !self.is_ending {
            self.stood_still = self.view.stood_still;
        }
        self.is_ending = is_ending;
    }

    fn warn(&mut self, control: &mut Control<'_>) {
        while let Some(text) = self.next_warning() {
            control.tell(Event::Warning { text: &text });
        }
    }

    /// The address of the launchers' store, if it is served here.
    fn served_at(&self) -> Option<SocketAddr> {
        self.reached.as_ref().and_then(|reached| reached.served_at)
    }

    /// If this node was refused because an earlier launcher of a host of the same name has its rank, and that one is gone, takes its
    /// place: a pod that was started again comes back sooner than the silence of its predecessor is noticed. If it cannot be seen, it may
    /// be the earlier life of this pod, or a live launcher on another host: then this one waits until the others have heard nothing of it.
    fn replace_predecessor(&mut self) -> Result<()> {
        let Some((node, settings)) = self.join.as_ref().filter(|_| self.refusal().is_some()) else {
            return Ok(());
        };
        let left = match self.view.state.predecessor(node) {
            Some(old) if process::may_replace(node.process, old.process) => {
                Some(Entry::Left { node: old.id, why: Departure::Replaced })
            }
            Some(old) if process::state(node.process, old.process).is_there() => return Ok(()),
            Some(_) => {
                let noticed = self.cluster.silence().saturating_mul(2).saturating_add(NOTICE_GRACE);
                self.refused_until.get_or_insert_with(|| Deadline::after(noticed).instant());
                return Ok(());
            }
            // It has left since, perhaps before this node knew that it was refused.
            None if self.view.state.takes(node, settings) => None,
            None => return Ok(()),
        };
        let id = NodeId(random::number()?);
        let Some((node, settings)) = self.join.take() else { return Ok(()) };
        (self.me, self.refused_until) = (id, None);
        left.into_iter().for_each(|left| self.handler.propose(left));
        self.handler.propose(Entry::Join { node: Node { id, ..node }, settings });
        Ok(())
    }

    /// Whether what is known of this launcher is about the number under which it has asked last.
    fn knows_of_me(&self) -> bool {
        self.view.id() == Some(self.me)
    }

    /// Why this launcher was refused.
    fn refusal(&self) -> Option<&str> {
        self.view.refusal.as_deref().filter(|_| self.knows_of_me())
    }

    /// Whether this launcher had its place, and the others go on without it.
    fn is_given_up(&self) -> bool {
        self.knows_of_me() && self.refusal().is_none() && self.view.is_given_up()
    }

    /// How long this node, which was refused, still waits for the others to miss the launcher in its place.
    fn waits_for_silence(&self) -> Option<Duration> {
        let left = self.refused_until?.saturating_duration_since(Instant::now());
        Some(left).filter(|left| !left.is_zero())
    }

    /// Why this launcher cannot go on, if it cannot.
    fn check(&mut self) -> Result<()> {
        self.replace_predecessor()?;
        // The node that refused this one may have left since.
        if let Some(why) = self.refusal().filter(|_| self.waits_for_silence().is_none()) {
            return Err(Error::mismatch(format!("this node cannot join the job: {why}")).with_remedy(
                "start all nodes of a job with the same options, and each with its own --node-rank",
            ));
        }
        if let Some(error) = &self.lost {
            return Err(error.clone());
        }
        if self.is_given_up() && self.view.state.job_end().is_none() {
            let silence = self.cluster.silence().as_secs_f64();
            if let Some(time) = self.view.stood_still {
                let cause = format!(
                    "this launcher stood still for {:.0} s; the other nodes got no heartbeat from this node for {silence} s, and go on \
                     without it",
                    time.as_secs_f64()
                );
                return Err(Error::new(Kind::PeerLeft, cause).with_remedy(AFTER_STANDSTILL));
            }
            let cause = format!(
                "the other nodes got no heartbeat from this node for {silence} s, and go on without it"
            );
            return Err(Error::new(Kind::PeerLeft, cause).with_remedy(
                "was this host, or its network, stopped for a while? --rdzv-conf keep_alive_max_attempt=.. allows more",
            ));
        }
        Ok(())
    }

    /// The next round, if it has begun with this node, and its store is up.
    fn placement(&mut self) -> Result<Option<Placement>> {
        let round = self.view.state.round();
        let Some(running) = self.view.state.running().filter(|_| self.round.is_none_or(|last| last < round))
        else {
            return Ok(None);
        };
        let Some(node_rank) = running.node_rank(self.me) else { return Ok(None) };
        if running.ending {
            // The round has ended before it began: nothing was started, but the others wait for this entry.
            self.round = Some(round);
            self.handler.propose(Entry::Ended { round, node: self.me, succeeded: false });
            return Ok(None);
        }
        let Some((told, master_port)) = running.store.clone() else {
            let is_mine = self.store.as_ref().is_some_and(|(of, _)| *of == round);
            let store_address = self.reached.as_ref().and_then(|reached| reached.store_address.as_ref());
            if let (0, false, Some(store_address)) = (node_rank, is_mine, store_address) {
                self.store = None;
                let store = serve_round(self.cluster, self.access.clone(), store_address)?;
                let (host, port) = (store_address.name.clone(), store.local_addr().port());
                self.handler.propose(Entry::Store { round, host, port });
                self.store = Some((round, store));
            }
            return Ok(None);
        };
        // It is on the node that serves the launchers' store, which the others reach where they have reached that one. How that node calls
        // itself may mean something else here: `localhost`.
        let master_addr = match (&self.cluster.backend, self.served_at()) {
            (RendezvousBackend::Store { host, .. }, None) => host.clone(),
            (_, _) => told,
        };
        let (first_role_rank, role_world_size) = running.in_role(node_rank);
        let placement = Placement {
            restarts: self.view.state.restarts(),
            first_rank: running.members[node_rank].first_rank,
            world_size: WorldSize::new(running.world_size())?,
            first_role_rank,
            role_world_size,
            node: node_rank as u32,
            nodes: running.members.len() as u32,
            workers: running.members.iter().map(|member| member.node.workers).collect(),
            master_addr,
            master_port,
            run_id: self.run_id.clone(),
        };
        self.round = Some(round);
        Ok(Some(placement))
    }

    /// Waits for a message, a signal, or `timeout`; returns a signal that ends this launcher.
    fn wait(&mut self, control: &mut Control<'_>, timeout: Duration) -> Result<Option<Signal>> {
        let signals = control.signals.iter().map(AsFd::as_fd);
        let descriptors = signals.chain([self.handler.notice()]).chain(control.refused.notice());
        poll_readable(descriptors, Some(timeout))
            .map_err(|error| Error::io("cannot wait for the other nodes", error))?;
        control.tell_refusal();
        Ok(control.read_end())
    }

    fn leave(&mut self, why: Departure) {
        if !std::mem::replace(&mut self.has_left, true) {
            self.handler.propose(Entry::Left { node: self.me, why });
        }
    }

    /// Leaves because of `signal`, while other nodes are waited for. The failure with which the job ends anyway is how it has ended.
    fn leave_at(&mut self, signal: Signal) -> Outcome {
        self.was_interrupted = true;
        self.leave(Departure::Signal(signal.number()));
        self.view.state.decided().map_or(Outcome::Interrupted(signal), |cause| outcome_of(&cause))
    }

    fn outcome(&self, job_end: &JobEnd) -> Result<Outcome> {
        match job_end {
            JobEnd::Succeeded => Ok(Outcome::Succeeded),
            JobEnd::Failed(cause) => self.lost_by_others(cause).map_or_else(|| Ok(outcome_of(cause)), Err),
        }
    }

    /// Shows how many nodes wait. Returns in what time it is to be shown, if not now.
    fn show_waiting(&mut self, control: &mut Control<'_>) -> Option<Duration> {
        if let Some(address) = self.served_at().filter(|_| !self.has_told_where) {
            self.has_told_where = true;
            control.tell(Event::Serving { address });
        }
        let waiting = self.view.state.waiting().len();
        if !self.view.state.is_gathering() || self.shown.is_some_and(|(shown, _)| shown == waiting) {
            return None;
        }
        let (nodes, min, max) = (waiting as u32, self.cluster.min_nodes, self.cluster.max_nodes);
        let left = self.shown.and_then(|(_, at)| left_to_show(nodes, max, at.elapsed()));
        if left.is_none() {
            self.shown = Some((waiting, Instant::now()));
            control.tell(Event::Gathering { nodes, min_nodes: min, max_nodes: max });
        }
        left
    }
}

impl Nodes for MultiNode<'_> {
    fn gather(&mut self, control: &mut Control<'_>) -> Result<Gathered> {
        let mut since = Instant::now();
        let mut enough_since = None;
        let mut shortage = Shortage::new(self.round.is_some());
        self.shown = None;
        loop {
            self.take_news();
            self.warn(control);
            if let Some(job_end) = self.view.state.job_end() {
                return Ok(Gathered::Over(self.outcome(job_end)?));
            }
            self.check()?;
            let again_at = match self.placement() {
                Ok(Some(placement)) => return Ok(Gathered::Placed(placement)),
                Ok(None) => None,
                // Of the workers' store, which is served here.
                Err(error) => {
                    let (at, news) = shortage.retry(error, Instant::now())?;
                    if let Some(text) = news {
                        control.tell(Event::Warning { text: &text });
                    }
                    Some(at)
                }
            };
            let shows_in = self.show_waiting(control);
            if control.stops {
                self.leave(Departure::GaveUp(STOPPED.to_owned()));
                return Ok(Gathered::Over(Outcome::Stopped));
            }
            let now = Instant::now();
            let mut timeout = self.cluster.join_timeout.saturating_sub(now - since);
            if timeout.is_zero() && !self.view.state.has_enough() {
                // The thread that connects gives up at the same time, and knows why nothing answered.
                timeout =
                    self.cluster.join_timeout.saturating_add(LAST_ATTEMPT_GRACE).saturating_sub(now - since);
                if self.reached.is_some() || timeout.is_zero() {
                    return Err(self.too_few(since));
                }
            }
            enough_since = if self.view.state.has_enough() { enough_since.or(Some(now)) } else { None };
            if let Some(at) = enough_since {
                let place = self.view.state.waiting().iter().position(|node| node.id == self.me);
                timeout = self.cluster.last_call.saturating_add(turn(place)).saturating_sub(now - at);
                if timeout.is_zero() {
                    let (round, nonce) = (self.view.state.round(), random::number()?);
                    self.handler.propose(Entry::LastCall { round, nonce });
                    timeout = Duration::from_secs(1);
                }
            }
            let again_in = again_at.map(|at| at.saturating_duration_since(now));
            let sooner = self.waits_for_silence().into_iter().chain(shows_in).chain(again_in);
            timeout = sooner.fold(timeout, Duration::min);
            let began = Instant::now();
            if let Some(signal) = self.wait(control, timeout)? {
                self.leave(Departure::Signal(signal.number()));
                return Ok(Gathered::Over(Outcome::Interrupted(signal)));
            }
            since = without_standstill(since, began, Instant::now(), timeout);
        }
    }

    fn notice(&self) -> Option<BorrowedFd<'_>> {
        Some(self.handler.notice())
    }

    fn ask_for_end(&mut self) -> bool {
        self.take_news();
        let goes_on = self.view.state.running().is_some_and(|running| {
            self.round == Some(self.view.state.round())
                && !running.ending
                && running.node_rank(self.me).is_some()
        });
        !goes_on || self.lost.is_some()
    }

    fn are_ending(&self) -> bool {
        self.round == Some(self.view.state.round())
            && self.view.state.running().is_some_and(|running| running.has_finished())
    }

    fn tell(&mut self, cause: &AttemptEnd) {
        let Some(round) = self.round else { return };
        match cause {
            AttemptEnd::Failed(failure, blames) => {
                // A failure that cannot be encoded is a failure all the same.
                let detail = postcard::to_stdvec(failure).unwrap_or_default();
                let failure = WorkerFailure { rank: failure.rank.get(), blames: *blames, detail };
                self.handler.propose(Entry::Failed { round, node: self.me, failure });
            }
            AttemptEnd::Interrupted(signal) => self.leave(Departure::Signal(signal.number())),
            AttemptEnd::Stopped => self.leave(Departure::GaveUp(STOPPED.to_owned())),
            AttemptEnd::Succeeded | AttemptEnd::Elsewhere => {}
        }
    }

    // An elastic job runs on one node.
    fn worker_lost(&mut self, _slot: u32, _process: u32) {}

    fn next_warning(&mut self) -> Option<String> {
        let text = self.view.warnings().nth(self.warned)?.to_owned();
        self.warned += 1;
        Some(text)
    }

    fn give_up(&mut self, error: &Error) {
        self.leave(Departure::GaveUp(error.to_string()));
    }

    fn after_attempt(&mut self, end: AttemptEnd, control: &mut Control<'_>) -> Result<AfterAttempt> {
        let Some(round) = self.round else { return Ok(AfterAttempt::Restart) };
        let succeeded = match end {
            AttemptEnd::Interrupted(signal) => {
                self.leave(Departure::Signal(signal.number()));
                return Ok(AfterAttempt::Over(Outcome::Interrupted(signal)));
            }
            AttemptEnd::Stopped => {
                self.leave(Departure::GaveUp(STOPPED.to_owned()));
                return Ok(AfterAttempt::Over(Outcome::Stopped));
            }
            AttemptEnd::Succeeded => true,
            AttemptEnd::Failed(..) | AttemptEnd::Elsewhere => false,
        };
        self.handler.propose(Entry::Ended { round, node: self.me, succeeded });
        loop {
            self.take_news();
            self.warn(control);
            if let Some(job_end) = self.view.state.job_end() {
                return Ok(AfterAttempt::Over(self.outcome(job_end)?));
            }
            self.check()?;
            if self.view.state.round() > round {
                // The workers of all nodes have ended, and another node may be the first of the next round.
                self.store = None;
                match self.view.state.last_cause().map(outcome_of) {
                    Some(Outcome::Failed(failure)) => control.tell(Event::Restarting { failure: &failure }),
                    Some(Outcome::NodeFailed(failure)) => {
                        control.tell(Event::Regrouping { left: Some(&failure) })
                    }
                    _ => control.tell(Event::Regrouping { left: None }),
                }
                return Ok(AfterAttempt::Restart);
            }
            if let Some(signal) = self.wait(control, Duration::from_secs(3600))? {
                return Ok(AfterAttempt::Over(self.leave_at(signal)));
            }
        }
    }

    fn finish(&mut self, control: &mut Control<'_>, mut is_interrupted: bool) {
        is_interrupted |= self.was_interrupted;
        self.handler.finish(&mut |news: Option<&str>| {
            if let Some(text) = news {
                control.tell(Event::Warning { text });
            }
            if control.read_end().is_none() {
                return true;
            }
            let goes_on = !std::mem::replace(&mut is_interrupted, true);
            if goes_on {
                control.tell(Event::Lingering);
            }
            goes_on
        });
    }
}

/// In what time it is to be shown that so many of at most `max` nodes wait, if not now: the last time was so long ago.
fn left_to_show(nodes: u32, max: u32, ago: Duration) -> Option<Duration> {
    let is_shown = max <= FEW_NODES || nodes >= max || ago >= SHOW_INTERVAL;
    (!is_shown).then(|| SHOW_INTERVAL.saturating_sub(ago))
}

/// Since when this launcher waits for others. A wait that has begun at `began`, and has ended long after its `timeout`, does not count: this
/// process was stopped, and has heard nothing of those who have come.
fn without_standstill(since: Instant, began: Instant, now: Instant, timeout: Duration) -> Instant {
    let waited = now.saturating_duration_since(began);
    if waited > timeout.saturating_add(STANDSTILL_LIMIT) { since + waited } else { since }
}

#[cfg(test)]
mod tests;
