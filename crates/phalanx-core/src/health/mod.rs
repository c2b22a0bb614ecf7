//! The health of a group: which ranks are alive, what they call, and the one failure of the group. The first report
//! sets the failure, and every waiting call returns it. Transports report to it; groups ask it.
//!
//! A failure is the group's, and final. The first cause is kept and sent to all ranks with its origin; every pending
//! and later operation returns it. After a failed exchange the streams are in the middle of frames and cannot be used
//! again: a group that tried would hang.

#[cfg(test)]
mod tests;
pub(crate) mod waits;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
pub(crate) use phalanx_proto::health::calls;
use phalanx_proto::health::calls::{Calls, Missing};
use phalanx_proto::health::first_failure::FirstFailure;
pub(crate) use phalanx_proto::health::liveness;

use self::liveness::ProcessState;
use self::waits::{Answer, Waits, in_group};
use crate::deadline::Deadline;
use crate::error::{Error, Kind, is_local_shortage};
use crate::network::Network;
use crate::rank::{Rank, Sequence};
use crate::wire::control::{AwaitedState, LongWait, WaitReport};
use crate::wire::frame::{Call, Header};
use crate::worker_error;
pub use phalanx_proto::health::heartbeat::Heartbeat;

/// How long a broken data connection waits for the control connections to report the cause. They see a dead process at
/// once, but the thread that watches them may have to wait for a processor.
const EXPLANATION_TIMEOUT: Duration = Duration::from_secs(1);
/// The same if the cause comes from another host. Each connection loses packets of its own, so that the end of one for data may come
/// long before the cause, which was sent earlier. A rank that has found the cause leaves within this time.
const FAR_EXPLANATION_TIMEOUT: Duration = Duration::from_secs(5);
/// Ranks that an error names, if it is about all.
const NAMED: usize = 8;
/// How long a rank waits for the others to find in which call they differ. They are told at the next look.
const DIFFERENCE_TIMEOUT: Duration = Duration::from_secs(5);

/// What a transport does when its group fails: notify the peers, and wake waiting threads.
type Alarm = Box<dyn FnOnce(&Error) + Send>;

/// What a rank does outside a group that waits for it.
#[derive(Debug, Default)]
pub(crate) struct Surroundings {
    /// Whether it is in a section that takes long, as its ranks know.
    pub is_announced: bool,
    /// The call of another group, or the message, that it waits for.
    pub elsewhere: Option<String>,
}

type Look = Box<dyn Fn() -> Surroundings + Send + Sync>;

/// A rank's view of its group's health.
pub(crate) struct Health {
    rank: Rank,
    hosts: Vec<String>,
    /// The ranks in the first group, by rank in this one. None if they are the same.
    members: Option<Arc<[Rank]>>,
    /// Whether its ranks are those of the job, as the launcher knows them.
    of_processes: bool,
    /// Whether there is a cause of failure. Every operation reads it, without the lock.
    failed: AtomicBool,
    state: Mutex<HealthState>,
    changed: Condvar,
    /// The calls of this rank and its peers.
    calls: Mutex<Calls>,
    /// What the running calls wait for.
    pub(crate) waits: Waits,
    surroundings: OnceLock<Look>,
    /// Whether each rank is on another host, once they are connected.
    far: OnceLock<Vec<bool>>,
    /// The cause, for a thread that watches the group beside its calls and may outlive it: the rest of this keeps the connections.
    first: Arc<OnceLock<Error>>,
    /// Whether a call has returned the cause of the failure to the program.
    returned: AtomicBool,
    /// What this rank has learned when it left: no call is left that could return it.
    parting: OnceLock<Error>,
    /// Whether the program leaves by a call that returns it.
    is_asked: AtomicBool,
    /// Whether the group has failed because a rank has left without a call of this rank.
    called_without_all: AtomicBool,
}

struct HealthState {
    failure: FirstFailure,
    alarm: Option<Alarm>,
}

impl Health {
    /// A healthy group within one process, seen from `rank`; `hosts` names the host of each rank.
    pub(crate) fn new(rank: Rank, hosts: Vec<String>) -> Arc<Self> {
        Self::start(rank, hosts, None, false)
    }

    /// The same of a group of processes. For a sub-group, `members` are its ranks in the first group. Descriptions of a
    /// rank's host then name both.
    pub(crate) fn among(rank: Rank, hosts: Vec<String>, members: Option<Arc<[Rank]>>) -> Arc<Self> {
        Self::start(rank, hosts, members, true)
    }

    fn start(
        rank: Rank,
        mut hosts: Vec<String>,
        members: Option<Arc<[Rank]>>,
        of_processes: bool,
    ) -> Arc<Self> {
        for (host, member) in hosts.iter_mut().zip(members.iter().flat_map(|members| members.iter())) {
            *host = format!("{host}, global rank {member}");
        }
        let state = HealthState { failure: FirstFailure::new(hosts.len()), alarm: None };
        Arc::new(Self {
            rank,
            hosts,
            members,
            of_processes,
            failed: AtomicBool::new(false),
            state: Mutex::new(state),
            changed: Condvar::new(),
            calls: Mutex::default(),
            waits: Waits::default(),
            surroundings: OnceLock::new(),
            far: OnceLock::new(),
            first: Arc::default(),
            returned: AtomicBool::new(false),
            parting: OnceLock::new(),
            is_asked: AtomicBool::new(false),
            called_without_all: AtomicBool::new(false),
        })
    }

    /// The calls of this rank and its peers.
    pub(crate) fn calls<R>(&self, of: impl FnOnce(&mut Calls) -> R) -> R {
        of(&mut self.calls.lock())
    }

    /// The host of `rank`.
    pub(crate) fn host(&self, rank: Rank) -> &str {
        self.hosts.get(rank.index()).map_or("unknown host", String::as_str)
    }

    /// The rank in the first group of this group's `rank`.
    fn global(&self, rank: Rank) -> Rank {
        rank.global(self.members.as_deref())
    }

    /// Ranks that wait for this one learn from `look` what it does outside this group.
    pub(crate) fn look_around_with(&self, look: Look) {
        let _ = self.surroundings.set(look);
    }

    /// Says of each rank whether it is on another host.
    pub(crate) fn set_far(&self, far: Vec<bool>) {
        let _ = self.far.set(far);
    }

    /// How long a rank that knows more of `error` may take to say so.
    fn explanation_timeout(&self, error: &Error) -> Duration {
        let is_far = |far: &Vec<bool>| match error.peer() {
            Some(peer) => far.get(peer.index()).copied().unwrap_or(false),
            None => far.contains(&true),
        };
        if self.far.get().is_some_and(is_far) { FAR_EXPLANATION_TIMEOUT } else { EXPLANATION_TIMEOUT }
    }

    /// The call of this group that runs, if it has run for a while or its data goes in frames.
    fn running(&self) -> Option<Header> {
        self.calls(|calls| calls.running()).or_else(|| self.waits.in_memory())
    }

    /// What this rank's program waits for in this group, as another group's ranks are told.
    pub(crate) fn describe_wait(&self) -> Option<String> {
        let members = self.members.as_deref();
        let call = self.running().map(|running| in_group(&running.call, running.sequence, members));
        call.or_else(|| self.waits.awaited_message(members))
    }

    /// A question to the rank that this one waits for, if a call has waited for so long that it is time.
    pub(crate) fn long_wait(&self) -> Option<LongWait> {
        self.waits.look(self.rank, Instant::now(), self.running())
    }

    /// Whether `wait` is of ranks of this group.
    fn is_of_group(&self, wait: &LongWait) -> bool {
        [wait.origin, wait.awaited].iter().all(|rank| rank.index() < self.hosts.len())
    }

    /// What this rank answers to `wait`.
    pub(crate) fn answer(&self, wait: LongWait) -> Answer {
        if !self.is_of_group(&wait) {
            return Answer::Silence;
        }
        let Surroundings { is_announced, elsewhere } =
            self.surroundings.get().map(|look| look()).unwrap_or_default();
        // Messages of this group are no collective.
        let elsewhere = self.waits.awaited_message(self.members.as_deref()).or(elsewhere);
        let own = self.waits.own_state(self.running());
        let own = waits::OwnState { is_announced, elsewhere, ..own };
        match waits::answer(own, wait, self.hosts.len() as u32) {
            Answer::PassOn(next, wait) if !self.waits.passes_on(&wait, next) => Answer::Silence,
            answer => answer,
        }
    }

    /// Writes a report of a long wait for this rank's user. `awaited` is the rank at the end of the chain of waits.
    pub(crate) fn write_report(&self, report: &WaitReport, awaited: Rank) {
        let wait = &report.wait;
        if self.has_failed() || !self.is_of_group(wait) || !self.waits.is_new(wait, awaited) {
            return;
        }
        let name = |rank| format!("rank {rank} ({})", self.host(rank));
        let (rank, origin) = (name(awaited), name(report.wait.origin));
        let text = match (&report.state, awaited == self.rank) {
            (AwaitedState::NotCalled { .. }, true) => report.for_awaited(&rank, &origin),
            (AwaitedState::NotCalled { .. }, false) | (AwaitedState::Called, _) => {
                // Behind the host's name a group of some ranks has their numbers in the first one.
                let host = |rank| self.host(rank).split(',').next();
                let is_one_host = host(report.wait.origin) == host(report.wait.awaited);
                let text = || report.for_main(&rank, &origin, &name(report.wait.awaited), is_one_host);
                self.rank.is_main().then(text)
            }
        };
        text.into_iter().for_each(|text| self.warn_aside(text));
    }

    /// Fails the group if this rank has made another call where a peer waits.
    pub(crate) fn compare_calls(&self) {
        if let Err(error) = self.calls(|calls| calls.compare(self.rank)) {
            self.hear(error);
        }
    }

    /// A frame of the call numbered `sequence` shows that a peer has made another call before. Has the others told the earlier
    /// ones, and waits for the first rank that finds which one it is: then that is the group's failure, with both calls.
    pub(crate) fn await_difference(&self, sequence: Sequence) {
        let mut state = self.state.lock();
        // Ranks in one process have no connections for it.
        if state.alarm.is_none() || !self.calls(|calls| calls.tell_earlier(sequence)) {
            return;
        }
        let deadline = Deadline::after(DIFFERENCE_TIMEOUT);
        while !state.failure.is_announced()
            && !self.changed.wait_until(&mut state, deadline.instant()).timed_out()
        {}
    }

    /// The program has got an error from a call: the cause of the failure, or that of [`part`](Self::part), if there is one.
    pub(crate) fn note_returned(&self) {
        if self.has_failed() || self.parting.get().is_some() {
            self.returned.store(true, Ordering::Relaxed);
        }
    }

    /// This rank has left, and has heard all that the others said: if ranks have made different calls, or one has left without a call of this
    /// rank, and no call has returned that to the program, it is the error of leaving. If no call returns it, says it by `say`, and leaves it to
    /// the launcher.
    pub(crate) fn part(&self, say: impl FnOnce(String)) {
        let is_of_calls =
            |cause: &Error| cause.is_mismatch() || self.called_without_all.load(Ordering::Relaxed);
        let error = match self.cause() {
            Some(cause) if is_of_calls(&cause) && !self.returned.load(Ordering::Relaxed) => cause,
            Some(_) => return,
            None => {
                let Some(error) = self.calls(|calls| calls.missing()).map(|missing| self.of_missing(missing))
                else {
                    return;
                };
                self.blame(&error);
                error.at(self.rank, self.host(self.rank))
            }
        };
        if !self.is_asked.load(Ordering::Relaxed) {
            say(error.to_string());
            if self.of_processes {
                worker_error::disagreed(&error.to_string());
            }
        }
        let _ = self.parting.set(error);
    }

    /// Whether a call returns the error of [`part`](Self::part): then nobody else is told.
    pub(crate) fn ask(&self, returns: bool) {
        self.is_asked.store(returns, Ordering::Relaxed);
    }

    /// The error of [`part`](Self::part).
    pub(crate) fn parting(&self) -> Option<Error> {
        self.parting.get().cloned()
    }

    /// The same, if it has not been returned to the program.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn unreturned(&self) -> Option<Error> {
        self.parting().filter(|_| !self.returned.load(Ordering::Relaxed))
    }

    /// The error if a rank has left without a call that another one has made. The rank that has made it blames the other.
    fn of_missing(&self, missing: Missing) -> Error {
        match missing {
            Missing::There(peer, own) => self
                .peer_left(peer)
                .with_remedy(own.call.remedy_if_left(peer))
                .in_operation(own.call.to_string(), Some(own.sequence)),
            Missing::Here(peer, theirs) => Error::mismatch(format!(
                "rank {peer} ({}) has called {} {}, and this rank has left the group without that call",
                self.host(peer),
                theirs.call,
                theirs.sequence
            ))
            .with_remedy("every rank must make the same calls, with the same sizes, in the same order"),
        }
    }

    /// Warns without waiting for standard error.
    pub(crate) fn warn_aside(&self, what: String) {
        self.waits.aside.warn(what);
    }

    /// Calls `alarm` when the group fails; at once, if it has failed already.
    pub(crate) fn on_failure(&self, alarm: Alarm) {
        let mut state = self.state.lock();
        match state.failure.cause().cloned() {
            Some(cause) => {
                drop(state);
                alarm(&cause);
            }
            None => state.alarm = Some(alarm),
        }
    }

    /// The cause, if the group has failed. The peers are notified first: otherwise a program that exits because of the
    /// failure would be the first that they miss, and they would blame it.
    pub(crate) fn cause(&self) -> Option<Error> {
        if !self.has_failed() {
            return None;
        }
        let mut state = self.state.lock();
        while state.failure.is_pending() {
            self.changed.wait(&mut state);
        }
        state.failure.cause().cloned()
    }

    /// What has the cause once the group has failed, though the peers may not have been notified yet. It keeps nothing of the group.
    pub(crate) fn first(&self) -> Arc<OnceLock<Error>> {
        self.first.clone()
    }

    /// Whether the group has failed. The peers may not have been notified yet.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// If this process fails too, its launcher knows which rank failed first.
    pub(crate) fn blame(&self, cause: &Error) {
        if let Some(culprit) = cause.culprit(self.rank).filter(|_| self.of_processes) {
            worker_error::blame(self.global(culprit));
        }
    }

    /// Fails the group. Returns the cause, which is the first one reported.
    pub(crate) fn fail(&self, error: Error) -> Error {
        self.hear(error.clone());
        self.cause().unwrap_or(error)
    }

    /// As [`fail`](Self::fail), for use by alarms, which must not wait for each other.
    pub(crate) fn hear(&self, error: Error) {
        let mut state = self.state.lock();
        let error = if error.rank().is_none() { error.at(self.rank, self.host(self.rank)) } else { error };
        if !state.failure.report(&error) {
            return;
        }
        self.failed.store(true, Ordering::Release);
        // Only the first report comes here.
        let _ = self.first.set(error.clone());
        let alarm = state.alarm.take();
        drop(state);
        if let Some(alarm) = alarm {
            alarm(&error);
        }
        // A file: neither the peers nor those who look at the state wait for a disk. It is there before anyone here learns of the failure.
        self.blame(&error);
        self.state.lock().failure.announced();
        self.changed.notify_all();
    }

    /// `peer` has sent a goodbye: what it has sent stays valid, and nothing more will come.
    pub(crate) fn left(&self, peer: Rank) {
        self.state.lock().failure.left(peer);
        self.changed.notify_all();
    }

    /// Whether `peer` has sent a goodbye.
    pub(crate) fn has_left(&self, peer: Rank) -> bool {
        self.state.lock().failure.has_left(peer)
    }

    /// The connection to `peer` broke without a goodbye. `state` is what has been seen of its process since.
    pub(crate) fn lost(&self, peer: Rank, reason: &str, state: ProcessState) -> Error {
        let error = match state {
            ProcessState::Gone => {
                let cause =
                    format!("rank {peer} ({}) died: its process has ended, {reason}", self.host(peer));
                Error::new(Kind::PeerFailed, cause).with_peer(peer).with_remedy(see_output(peer))
            }
            ProcessState::Unknown => {
                self.peer_failed(peer, &format!("{reason}; its process cannot be seen from here"))
            }
            ProcessState::Alive | ProcessState::Stopped => {
                let state = if state == ProcessState::Alive { "alive" } else { "stopped" };
                let error = self.peer_failed(peer, &format!("{reason}, while its process is {state}"));
                error.with_remedy(
                    "does a firewall, or something else between the ranks, end connections? If not, see that rank's own \
                     output",
                )
            }
        };
        self.fail(error)
    }

    /// `peer`, whose process is seen in this `state` behind this `network`, has been silent for `lasted`, and so have `others` other
    /// ranks.
    pub(crate) fn silent(
        &self,
        peer: Rank,
        lasted: Duration,
        (state, network): (ProcessState, Network),
        others: usize,
    ) -> Error {
        let (why, remedy) = match (state, network) {
            (ProcessState::Stopped, _) => (
                ": its process is stopped".to_owned(),
                "if a debugger stops it, set PHALANX_HEARTBEAT_TIMEOUT=0 for every rank",
            ),
            (_, Network::Works) => (
                network.to_string(),
                "is it stopped (`kill -CONT` lets it go on), or its host out of memory? If it is only slow, raise \
                 PHALANX_NETWORK_TIMEOUT; if a debugger stops it, set PHALANX_HEARTBEAT_TIMEOUT to 0 for every rank",
            ),
            (_, Network::Silent(_)) => (
                network.to_string(),
                "do its host and the network between still work? To survive a longer outage, raise \
                 PHALANX_NETWORK_TIMEOUT",
            ),
            (_, Network::LoopbackDown) => {
                (network.to_string(), "`ip link set lo up` lets ranks of one host reach each other")
            }
            (_, Network::Unknown) => (
                String::new(),
                "do its host and the network between still work? If it is only slow, raise \
                 PHALANX_HEARTBEAT_TIMEOUT, or between hosts PHALANX_NETWORK_TIMEOUT",
            ),
        };
        let seconds = lasted.as_secs_f64();
        let others = if others > 0 { format!(", nor have {others} others") } else { String::new() };
        let cause = format!(
            "rank {peer} ({}) has not been heard of for {seconds:.1} s{others}{why}",
            self.host(peer)
        );
        self.fail(Error::new(Kind::PeerFailed, cause).with_peer(peer).with_remedy(remedy))
    }

    /// The error for a peer that no longer takes part. `reason` says what is known.
    pub(crate) fn peer_failed(&self, peer: Rank, reason: &str) -> Error {
        Error::new(Kind::PeerFailed, format!("rank {peer} ({}) was lost: {reason}", self.host(peer)))
            .with_peer(peer)
            .with_remedy(see_output(peer))
    }

    /// The error of a connection to `peer` that cannot be used any more. If this host lacks memory, the peer is not to blame.
    pub(crate) fn broken(&self, peer: Rank, error: io::Error) -> Error {
        match is_local_shortage(&error) {
            true => Error::io(format!("this rank cannot exchange data with rank {peer}"), error)
                .with_remedy_if_none(
                    "this host, or this container, has too little memory for the network: see its limits",
                ),
            false => self.peer_failed(peer, &error.to_string()),
        }
    }

    /// The error of an operation in which `peer` would have to take part, which has sent a goodbye.
    pub(crate) fn peer_left(&self, peer: Rank) -> Error {
        let host = self.host(peer);
        let cause = format!("rank {peer} ({host}) has left the group, so it takes no part in this operation");
        Error::new(Kind::PeerLeft, cause).with_peer(peer)
    }

    /// The error of an operation in which any other rank could take part, when all have sent a goodbye.
    pub(crate) fn all_left(&self) -> Error {
        let others = (0..).zip(&self.hosts).map(|(rank, host)| (Rank::new(rank), host));
        let mut others = others.filter(|(rank, _)| *rank != self.rank).peekable();
        let first = others.peek().map(|(rank, _)| *rank);
        let named = others.by_ref().take(NAMED).map(|(rank, host)| format!("rank {rank} ({host})"));
        let named = named.collect::<Vec<String>>().join(", ");
        let more = if others.next().is_some() { " and more" } else { "" };
        let error = Error::new(Kind::PeerLeft, format!("all other ranks have left the group: {named}{more}"));
        first.into_iter().fold(error, Error::with_peer)
    }

    /// Fails the group with the error of an operation. A broken connection may be a consequence of another failure, so
    /// the control connections first get a moment to report the cause.
    pub(crate) fn fail_operation(&self, error: Error, call: Call, sequence: Sequence) -> Error {
        if error.kind() == Kind::PeerFailed {
            self.await_explanation(&error);
            // One that has left may have made another call instead of this one.
            self.compare_calls();
        }
        let error = match error.peer() {
            Some(peer) if error.kind() == Kind::PeerFailed && self.has_left(peer) => {
                self.peer_left(peer).with_remedy(call.remedy_if_left(peer))
            }
            _ => error,
        };
        let operation = call.to_string();
        let cause = self.fail(error.in_operation(operation.as_str(), Some(sequence)));
        if cause.operation().is_some() { cause } else { cause.in_operation(operation, Some(sequence)) }
    }

    /// Fails the group because `peer` has left without this call, which has waited for nobody.
    pub(crate) fn fail_without(&self, peer: Rank, call: Call, sequence: Sequence) -> Error {
        // It may have made another call instead.
        self.compare_calls();
        // It has said which call was its last one: its goodbye may still be on the way.
        let error = self.peer_left(peer).with_remedy(call.remedy_if_left(peer));
        self.fail_operation(error, call, sequence)
    }

    /// A collective of this rank has failed with `cause`.
    pub(crate) fn note_failed_call(&self, cause: &Error) {
        if cause.is_peer_left() && cause.rank() == Some(self.rank) {
            self.called_without_all.store(true, Ordering::Relaxed);
        }
    }

    /// An error outside the connections, such as in the store, may be caused by the end of a rank, which the
    /// connections also report. Returns the group's failure, if it comes within a moment.
    pub(crate) fn explain(&self, error: Error) -> Error {
        self.await_explanation(&error);
        self.cause().unwrap_or(error)
    }

    fn await_explanation(&self, error: &Error) {
        let deadline = Deadline::after(self.explanation_timeout(error));
        let mut state = self.state.lock();
        loop {
            if state.failure.explains(error)
                || self.changed.wait_until(&mut state, deadline.instant()).timed_out()
            {
                return;
            }
        }
    }
}

fn see_output(peer: Rank) -> String {
    format!("see rank {peer}'s own output for its reason")
}
