//! A launcher's connection to the others: it finds their common store, and takes part in the log there.
//!
//! The supervisor must not wait for a store. So a thread connects, joins and appends the supervisor's entries. The
//! supervisor reads the [`Replica`], and each change of it wakes the supervisor.
//!
//! The store of another launcher writes for this one when its connection ends (`set_at_end`). So the others wait for the
//! time-out of heartbeats only if this launcher is frozen or cut off.

use std::io::{PipeReader, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::membership::{Entry, MembershipState, Node, NodeId, Settings};
use super::rendezvous_store::{Served, StoreAddress, open_store};
use crate::cluster::Cluster;
use crate::deadline::Deadline;
use crate::error::{Error, Kind, Result};
use crate::key::JobKey;
use crate::log::{ENDED, Heartbeats, Log, Mac, Participant, Replica, View, awake, stood_still};
use crate::notice::while_waiting;
use crate::poll::{drain, wake_pipe};
use crate::store::{Access, AtEnd, PrefixStore, SharedStore, Store, TcpStore};

/// How long the last message of this launcher may take: some round trips of a slow network, and a packet that is sent again.
const LAST_MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the store stays up for other launchers that have not read to the end yet. They close their connections when they have; a
/// launcher whose host is gone does not. Longer, if launchers may be silent for longer.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(20);
/// The same if the job has ended because a launcher is silent: its connections stay open, and only the others' are waited for.
const DRAIN_BESIDE_SILENCE_TIMEOUT: Duration = Duration::from_secs(5);
/// After how long a person hears what this launcher waits for then.
const LONG_DRAIN: Duration = Duration::from_secs(5);

/// What is known once the store is reached.
#[derive(Clone, Debug)]
pub(super) struct Reached {
    /// The address at which it is served, if by this launcher.
    pub(super) served_at: Option<SocketAddr>,
    pub(super) store_address: Option<StoreAddress>,
}

/// The supervisor's handle to the rendezvous of the launchers.
pub(super) struct RendezvousHandler {
    replica: Arc<Replica<MembershipState>>,
    reached: Arc<Mutex<Option<Reached>>>,
    notice: PipeReader,
    proposals: Option<Sender<Entry>>,
    writer: Option<JoinHandle<Option<Served>>>,
    drain_timeout: Duration,
}

impl RendezvousHandler {
    /// Starts the thread, which connects and joins.
    pub(super) fn start(
        cluster: &Cluster,
        access: Access,
        scope: String,
        node: impl FnOnce(bool) -> Node + Send + 'static,
        settings: Settings,
    ) -> Result<Self> {
        let (notice, wake) = wake_pipe()
            .map_err(|error| Error::io("cannot make a pipe for messages of other nodes", error))?;
        let replica = Arc::new(Replica::new(move |_| {
            // Without a supervisor there is nothing to wake.
            let _ = (&wake).write_all(&[0]);
        }));
        let reached = Arc::default();
        let (proposals, inbox) = channel();
        let thread = Thread { cluster: cluster.clone(), access, scope, replica: Arc::clone(&replica) };
        let shared_reached = Arc::clone(&reached);
        let run = move || {
            let mut server = None;
            let first = (node, settings);
            let ran =
                catch_unwind(AssertUnwindSafe(|| thread.run(&mut server, &shared_reached, first, &inbox)));
            // The supervisor would wait for it without an end.
            let ran = ran.unwrap_or_else(|_| {
                Err(Error::panicked("the thread that speaks with the other launchers has panicked"))
            });
            if let Err(error) = ran {
                thread.replica.lose(error);
            }
            server
        };
        let writer = std::thread::Builder::new().name("phalanx-nodes".into()).spawn(run);
        let writer = writer.map_err(|error| {
            Error::not_started("cannot start a thread for messages of other nodes", error)
        })?;
        let drain_timeout = DRAIN_TIMEOUT.max(cluster.silence());
        Ok(Self { replica, reached, notice, proposals: Some(proposals), writer: Some(writer), drain_timeout })
    }

    /// Readable when the state has changed.
    pub(super) fn notice(&self) -> BorrowedFd<'_> {
        self.notice.as_fd()
    }

    /// The current state; a later change makes the notice readable.
    pub(super) fn look(&mut self) -> (Option<Reached>, View<MembershipState>) {
        // Drained before reading the state: a change in between wakes the supervisor once more.
        drain(&self.notice);
        (self.reached.lock().clone(), self.replica.view().clone())
    }

    pub(super) fn propose(&self, entry: Entry) {
        if let Some(proposals) = &self.proposals {
            // If the thread is gone, the replica says why.
            let _ = proposals.send(entry);
        }
    }
}

impl Drop for RendezvousHandler {
    fn drop(&mut self) {
        self.finish(&mut |_| true);
    }
}

impl RendezvousHandler {
    /// Proposed entries are still appended. A store that is served here stays up until the others have read them, as long as `goes_on` says
    /// so. It is asked every few milliseconds, and once gets what a person should know of a long wait. Nothing is written here: whoever
    /// ends this launcher does not wait for a reader of its standard error.
    pub(super) fn finish(&mut self, goes_on: &mut dyn FnMut(Option<&str>) -> bool) {
        self.replica.close();
        drop(self.proposals.take());
        let Some(writer) = self.writer.take() else { return };
        // A node that has not reached the store has nothing to say there; the thread ends after its attempt to connect.
        let is_reached = self.reached.lock().is_some();
        let deadline = Deadline::after(if is_reached { LAST_MESSAGE_TIMEOUT } else { Duration::ZERO });
        while !writer.is_finished() {
            // A thread that is stuck in a connection ends by itself.
            if deadline.has_passed() || !goes_on(None) {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Ok(Some(Served { server, _claim })) = writer.join() {
            let is_one_silent = self.replica.view().state.has_ended_in_silence();
            let timeout = if is_one_silent { DRAIN_BESIDE_SILENCE_TIMEOUT } else { self.drain_timeout };
            let what = format!(
                "the job is over, and this launcher waits, {:.0} s at most, until the launchers of other nodes have read how it has ended",
                timeout.as_secs_f64()
            );
            // A wait of no more than that is not worth a word.
            let mut tell_at = (timeout > LONG_DRAIN).then(|| Deadline::after(LONG_DRAIN));
            server.drain_while(Deadline::after(timeout), || {
                let is_long = tell_at.take_if(|at| at.has_passed()).is_some();
                goes_on(is_long.then_some(what.as_str()))
            });
        }
    }
}

/// The data of the thread that connects, joins and appends.
struct Thread {
    cluster: Cluster,
    access: Access,
    scope: String,
    replica: Arc<Replica<MembershipState>>,
}

impl Thread {
    /// Works until the handler is closed, and leaves a store that is served here in `server`.
    fn run(
        &self,
        server: &mut Option<Served>,
        reached: &Mutex<Option<Reached>>,
        (node, settings): (impl FnOnce(bool) -> Node, Settings),
        inbox: &Receiver<Entry>,
    ) -> Result<()> {
        let Self { cluster, access, scope, replica } = self;
        let deadline = Deadline::after(cluster.join_timeout);
        let mac = Mac::new(access.credentials().key.as_ref().map(JobKey::bytes), scope);
        let opened = match open_store(cluster, access, scope, replica, deadline) {
            // This process stood still, and knows nothing of the store.
            Err(error) if error.is_timeout() && has_passed_long_ago(deadline) => {
                let again = Deadline::after(cluster.join_timeout);
                open_store(cluster, access, scope, replica, again)?
            }
            opened => opened?,
        };
        if replica.view().is_closing() {
            return Ok(());
        }
        // It stood still, and has reached the store all the same: the others have their time from now on.
        let deadline = if deadline.has_passed() { Deadline::after(cluster.join_timeout) } else { deadline };
        *server = opened.server;
        let served_at = server.as_ref().map(|served| served.server.local_addr());
        *reached.lock() = Some(Reached { served_at, store_address: opened.store_address });
        let store: SharedStore = Arc::new(PrefixStore::new(scope.clone(), opened.store));
        let log = Log::new(Arc::clone(&store), mac);
        // The first change, the start of the reader, wakes the supervisor.
        let mut participant = Participant::start_at_first_entry(log, Arc::clone(replica))?;
        let (interval, silence) = (cluster.keep_alive.0, cluster.silence());
        let node = node(server.is_some());
        let tcp = opened.tcp.filter(|_| opened.served_elsewhere);
        // While the first entry is on its way. All are held until this function ends: a heartbeat under an earlier number may still be on its
        // way, and would be refused where the store has written that this launcher has ended.
        let mut at_ends = vec![self.announce(&participant, tcp.as_deref(), node.id)?];
        if opened.served_elsewhere
            && let Err(error) = awake(deadline, |deadline| wait_for_host(replica, cluster, deadline))
        {
            if replica.view().lost.is_none() {
                // No entry names this launcher: nobody waits for its key, and nobody else would remove it.
                let _ = store.delete_key(&node.id.heartbeat_key(), Deadline::after(LAST_MESSAGE_TIMEOUT));
            }
            return Err(error);
        }
        self.enter(&participant, node, settings)?;
        participant.watch(Heartbeats { interval, silence, must_be_answered: true }, |_, _| Ok(()))?;
        for entry in inbox {
            // Once the log is lost no other launcher can read this one's entries.
            if replica.view().lost.is_some() {
                continue;
            }
            let appended = match entry {
                // It was refused, and asks again under another number.
                Entry::Join { node, settings } => {
                    self.announce(&participant, tcp.as_deref(), node.id).and_then(|at_end| {
                        at_ends.push(at_end);
                        self.enter(&participant, node, settings)
                    })
                }
                entry => participant.append(&entry, Deadline::after(silence)),
            };
            appended.unwrap_or_else(|error| replica.lose(error));
        }
        // So that this launcher is no client of the store that it serves.
        participant.close();
        self.remove_key_of_given_up(&*store);
        Ok(())
    }

    /// Sends the first heartbeat of `id`, which whoever reads of this launcher expects to find, and says what the store of another launcher
    /// writes there when this one has ended.
    fn announce(
        &self,
        participant: &Participant<MembershipState>,
        tcp: Option<&TcpStore>,
        id: NodeId,
    ) -> Result<Option<AtEnd>> {
        let (key, silence) = (id.heartbeat_key(), self.cluster.silence());
        participant.announce(&key, Deadline::after(silence))?;
        let key = PrefixStore::key_in(&self.scope, &key);
        let Some(tcp) = tcp else { return Ok(None) };
        awake(Deadline::after(silence), |deadline| tcp.set_at_end(&key, ENDED, deadline))
    }

    /// Joins as `node`, which has not joined before.
    fn enter(
        &self,
        participant: &Participant<MembershipState>,
        node: Node,
        settings: Settings,
    ) -> Result<()> {
        let (id, deadline) = (node.id, Deadline::after(self.cluster.silence()));
        let join = Entry::Join { node, settings };
        match participant.enter(id, id.heartbeat_key(), &join, deadline) {
            Ok(true) => Ok(()),
            Err(error) if !stood_still(&error, deadline) => Err(error),
            Ok(false) | Err(_) => Err(stopped_while_joining()),
        }
    }

    /// Whoever stood still, and was given up, has sent heartbeats until it read that, also where its key had been removed meanwhile.
    fn remove_key_of_given_up(&self, store: &dyn Store) {
        let key = {
            let view = self.replica.view();
            // When the job is over nobody is there any more, and the store ends with it.
            let goes_on = view.lost.is_none() && view.state.job_end().is_none();
            let id = view.id().filter(|_| goes_on && view.is_given_up());
            id.map(NodeId::heartbeat_key)
        };
        if let Some(key) = key {
            // If it stays, it does no harm.
            let _ = store.delete_key(&key, Deadline::after(LAST_MESSAGE_TIMEOUT));
        }
    }
}

/// Whether `deadline` passed so long ago that a call which has it would have ended, if this process had not stood still.
fn has_passed_long_ago(deadline: Deadline) -> bool {
    // A name is looked up for so long at most, and a connection tried.
    const STANDSTILL_LIMIT: Duration = Duration::from_secs(5);
    Instant::now() > deadline.instant() + STANDSTILL_LIMIT
}

/// The entry by which this launcher joins may be lost, or the others have read it and missed this launcher since.
pub(super) fn stopped_while_joining() -> Error {
    let cause = "this launcher stood still while it joined, for so long that the others have gone on";
    Error::new(Kind::PeerLeft, cause)
        .in_operation("rendezvous of the launchers", None)
        .with_remedy("start it again; was this host, or its network, stopped for a while?")
}

/// Waits until the launcher that serves the store has joined. All must have the settings of the first entry: if it were
/// that of a launcher with wrong options, the launcher that serves the store would be refused.
fn wait_for_host(replica: &Replica<MembershipState>, cluster: &Cluster, deadline: Deadline) -> Result<()> {
    let what = || {
        format!(
            "this launcher has reached the store at {}, and waits for the launcher that serves it to register the job",
            cluster.endpoint()
        )
    };
    while_waiting(what, || wait_until_begun(replica, cluster, deadline))
}

fn wait_until_begun(replica: &Replica<MembershipState>, cluster: &Cluster, deadline: Deadline) -> Result<()> {
    let mut view = replica.view();
    while !view.state.has_begun() {
        if let Some(error) = &view.lost {
            return Err(error.clone());
        }
        if view.is_closing() || deadline.has_passed() {
            let cause = format!("no launcher has registered this job in the store at {}", cluster.endpoint());
            return Err(Error::timeout(cause)
                .in_operation("rendezvous of the launchers", None)
                .with_remedy("start all nodes of a job with the same --rdzv-id"));
        }
        replica.wait_until(&mut view, deadline.instant());
    }
    Ok(())
}

#[cfg(test)]
mod tests;
