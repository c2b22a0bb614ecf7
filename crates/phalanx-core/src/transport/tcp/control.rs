//! The control connections: heartbeats, goodbyes, deaths, and the cause of the group's failure.
//!
//! One thread watches all of them, even while no operation runs, so that a death is known before a rank waits for the
//! dead one.

use std::collections::HashSet;
use std::io::IoSlice;
use std::net::{IpAddr, Shutdown};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use super::connection::Connection;
use super::connections::Connections;
use super::keep_alive::{keep_alive, keep_known};
use super::leave::{FAILURE_GRACE, LEAVE_GRACE, NEAR_LEAVE_GRACE, Parting, SilentHosts, leave_grace};
use super::on_demand::Caller;
use super::watch::Watch;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::health::Health;
use crate::health::Heartbeat;
use crate::health::liveness::listened_to;
use crate::network::Network;
use crate::notice::warn;
use crate::rank::Rank;
use crate::transport::process;
use crate::wire::control::{self, Control, Introduction, Notice};
use crate::world_size::WorldSize;

/// In worlds of up to this many ranks, each says to all others which process it is, so that who loses it can see whether it has ended.
const INTRODUCED: u32 = 32;

/// Watches the control connections until it is dropped; then it sends a goodbye.
pub(crate) struct Monitor {
    /// Shutting this end down wakes the thread, which holds the other.
    stop: Option<UnixStream>,
    /// It leaves what it has read of messages that were not complete, by rank.
    thread: Option<JoinHandle<Vec<Vec<u8>>>>,
    /// Makes connections at their first use.
    caller: Option<JoinHandle<()>>,
    connections: Arc<Connections>,
    health: Arc<Health>,
    silent: Arc<SilentHosts>,
    heartbeat: Heartbeat,
    /// The process that has started it, and not one that was forked from that.
    process: u32,
}

impl Monitor {
    pub(crate) fn start(
        (rank, world): (Rank, WorldSize),
        connections: Arc<Connections>,
        health: Arc<Health>,
        heartbeat: Heartbeat,
        silent: Arc<SilentHosts>,
    ) -> Result<Self> {
        let heartbeat = heartbeat.among(world);
        let is_far = |connection: &Connection| !connection.is_within_host();
        health.set_far(connections.control.iter().map(|peer| peer.as_ref().is_some_and(is_far)).collect());
        let on_failure = connections.clone();
        health.on_failure(Box::new(move |error| on_failure.alarm(error)));
        let watched = watch((rank, world), &connections, &health, heartbeat);
        // The others are connected: without the failure they would only see that their connections end.
        let (stop, thread) = watched.map_err(|error| health.fail(error))?;
        let (stop, thread, process) = (Some(stop), Some(thread), std::process::id());
        Ok(Self { stop, thread, caller: None, connections, health, silent, heartbeat, process })
    }

    /// Answers and makes calls from now on, until the monitor is dropped.
    pub(crate) fn with_caller(mut self, rank: Rank, caller: Option<Caller>) -> Result<Self> {
        let Some(caller) = caller else { return Ok(self) };
        let (connections, health) = (self.connections.clone(), self.health.clone());
        let run = move || {
            let Some(requests) = &connections.requests else { return };
            let calls = || {
                caller.run(&connections, requests, &health);
                Ok(())
            };
            if let Err(error) = caught("the thread that calls ranks", calls) {
                health.fail(error);
            }
        };
        let thread = std::thread::Builder::new().name(format!("phalanx-call-{rank}")).spawn(run);
        let failed = |error| Error::not_started("the thread that calls ranks could not be started", error);
        // Without the failure this rank would say goodbye when it is dropped.
        self.caller = Some(thread.map_err(|error| self.health.fail(failed(error)))?);
        Ok(self)
    }

    /// The other hosts that have acknowledged something lately, but not the one that `cause` blames. None if the others have given up
    /// this rank.
    fn reached(&self, cause: &Error) -> HashSet<IpAddr> {
        let control = &self.connections.control;
        let blamed = cause.peer().filter(|_| cause.is_peer_failure());
        let blamed = match blamed.and_then(|peer| control.get(peer.index())) {
            Some(None) => return HashSet::new(),
            Some(Some(connection)) => connection.host(),
            None => None,
        };
        let far = control.iter().flatten().filter(|connection| !connection.is_within_host());
        let silence = self.heartbeat.network_timeout;
        let reached = far.filter(|connection| Network::behind(connection, silence) == Network::Works);
        reached.filter_map(Connection::host).filter(|host| Some(*host) != blamed).collect()
    }
}

/// Starts the thread that watches the control connections. Returns what ends it when that is shut down, and the thread.
fn watch(
    (rank, world): (Rank, WorldSize),
    connections: &Arc<Connections>,
    health: &Arc<Health>,
    heartbeat: Heartbeat,
) -> Result<(UnixStream, JoinHandle<Vec<Vec<u8>>>)> {
    let failed = |error| Error::io("the control connections could not be watched", error);
    let (stop, stopped) = UnixStream::pair().map_err(failed)?;
    let mut control = connections.control.iter().flatten();
    control.try_for_each(|connection| keep_alive(connection, heartbeat)).map_err(failed)?;
    // Those that are made later are within a host.
    let mut far = connections.others().filter(|connection| !connection.is_within_host());
    if let Err(error) = far.try_for_each(|connection| keep_known(connection, heartbeat)) {
        tracing::debug!(%error, "a connection to another host has no probes while it is idle");
    }
    // Before the thread starts: then a rank that is stopped right after the start counts as silent, and not as one
    // that has never sent anything.
    let introduction = Introduction::new(heartbeat.interval, process::own());
    let listened = connections.listened_to(rank);
    connections.tell(&Control::Watching(introduction), |peer| {
        world.get() <= INTRODUCED || listened.get(peer.index()).is_some_and(|listens| *listens)
    });
    let (watched, watching) = (connections.clone(), health.clone());
    let run = move || {
        let watch =
            || Watch::new((rank, world), &watched, &watching, heartbeat, &stopped).and_then(Watch::run);
        caught("the thread that watches the control connections", watch).unwrap_or_else(|error| {
            watching.fail(error);
            Vec::new()
        })
    };
    let thread = std::thread::Builder::new().name(format!("phalanx-watch-{rank}")).spawn(run);
    let thread = thread.map_err(|error| {
        Error::not_started("the thread that watches the control connections could not be started", error)
    });
    Ok((stop, thread?))
}

/// What `run`, the work of the thread `what`, returns. A panic is its error: without it the group would go on, hear of no death, and be taken
/// for frozen by the others.
fn caught<T>(what: &str, run: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err(Error::panicked(format!("{what} panicked"))))
}

impl Drop for Monitor {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // Its threads and connections are the parent's: they may neither be waited for, nor ended, nor said goodbye to.
            std::mem::forget((self.thread.take(), self.caller.take()));
            return;
        }
        if let Some(requests) = &self.connections.requests {
            requests.stop();
        }
        // As below; from here on no connection comes.
        let _ = self.caller.take().map(JoinHandle::join);
        if let Some(stop) = self.stop.take() {
            // To close it is not enough: a process that was forked from this one, such as a loader's worker, has it open, too.
            let _ = stop.shutdown(Shutdown::Both);
        }
        // The thread catches its panics, which have failed the group.
        let unread = self.thread.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        self.health.compare_calls();
        // Another thread may just be telling the peers the cause: nothing can be sent after the goodbye.
        let cause = self.health.cause();
        let has_failed = cause.is_some();
        let last = self.health.calls(|calls| calls.latest()).filter(|_| !has_failed);
        if let Some(last) = last {
            self.connections.tell(&Control::Last(last), |_| true);
        }
        self.connections.tell(&Control::Goodbye, |_| true);
        let reached = cause.map(|cause| self.reached(&cause)).unwrap_or_default();
        let (grace, reached_grace) = match has_failed {
            // A rank that panics does not wait: the sooner the others notice, the better.
            _ if std::thread::panicking() => (Duration::ZERO, Duration::ZERO),
            true => (FAILURE_GRACE, LEAVE_GRACE),
            false => (leave_grace(self.heartbeat), Duration::ZERO),
        };
        let (silent, far) = (self.silent.known(), Deadline::after(grace));
        let far_reached = Deadline::after(reached_grace);
        let awaits_far = |host: IpAddr| {
            let until = if reached.contains(&host) { far_reached } else { far };
            (!silent.contains(&host)).then_some(until)
        };
        let mut parting = Parting::new(&self.health, unread);
        let has_root = last.is_some_and(|last| last.call.root.is_some());
        // What one that has left had to say has been read.
        let awaits_near = |peer| has_root && !self.health.has_left(peer);
        let near = Deadline::after(grace.min(NEAR_LEAVE_GRACE));
        let unanswered = self.connections.leave(near, awaits_near, awaits_far, |end| parting.has_ended(end));
        if !grace.is_zero() {
            // A rank that still sends is only busy.
            self.silent.remember(unanswered.difference(&parting.heard).copied());
            self.health.compare_calls();
            self.health.part(warn);
        }
        self.connections.shut();
    }
}

impl Connections {
    /// To which ranks this `rank` listens, and they to it.
    pub(super) fn listened_to(&self, rank: Rank) -> Vec<bool> {
        let near =
            |connection: &Option<Connection>| connection.as_ref().is_some_and(Connection::is_within_host);
        listened_to(rank, &self.control.iter().map(near).collect::<Vec<_>>())
    }

    /// The group has failed: send the cause to every peer, then wake the threads that wait on other connections.
    fn alarm(&self, error: &Error) {
        self.tell(&Control::Failure(Notice::of(error)), |_| true);
        self.shut();
    }

    /// Sends a message to every peer for which `meant` is true. A peer that it does not reach sees the connection
    /// close, or no more heartbeats of this rank; one that only a part of it reaches, because it has read nothing for long, sees it close.
    pub(super) fn tell(&self, message: &Control, meant: impl Fn(Rank) -> bool) {
        let Ok(bytes) = control::encode(message) else { return };
        for (peer, stream) in self.control.iter().enumerate() {
            if let Some(stream) = stream.as_ref().filter(|_| meant(Rank::new(peer as u32))) {
                say(stream, &bytes);
            }
        }
    }

    /// The same to one peer, without a look at all others: there may be thousands, each of which gets an answer.
    pub(super) fn tell_one(&self, peer: Rank, message: &Control) {
        if let (Some(Some(stream)), Ok(bytes)) = (self.control.get(peer.index()), control::encode(message)) {
            say(stream, &bytes);
        }
    }
}

fn say(stream: &Connection, bytes: &[u8]) {
    let sent = stream.send(&[IoSlice::new(bytes)]);
    if sent.is_ok_and(|(count, _)| 0 < count && count < bytes.len()) {
        // What came next would be taken for the rest.
        stream.finish_sending();
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc;
    use std::time::Instant;

    use super::super::keep_alive::{IDLE_INTERVAL, IDLE_PROBES, give_up};
    use super::super::watch::Buffered;
    use super::*;
    use crate::wire::hello::Channel;

    /// A connection with a peer that listens at `address`, and the peer's end.
    pub(in super::super) fn connected(address: &str) -> (Connection, TcpStream) {
        let listener = TcpListener::bind(address).unwrap();
        let own = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        own.set_nonblocking(true).unwrap();
        (Connection::new(own), listener.accept().unwrap().0)
    }

    pub(in super::super) fn pair() -> (Connection, TcpStream) {
        connected("127.0.0.1:0")
    }

    /// A connection between two addresses of this host, as between two hosts, whose peer never answers.
    pub(in super::super) fn far() -> (Connection, TcpStream) {
        connected("127.0.0.2:0")
    }

    /// Fails `health` in another thread, which has a processor only now and then: returns when it is about to tell the peers.
    pub(in super::super) fn fail_slowly(
        health: &Arc<Health>,
        connections: &Arc<Connections>,
    ) -> JoinHandle<()> {
        let (begun, begins) = mpsc::channel();
        let alarmed = connections.clone();
        health.on_failure(Box::new(move |error| {
            begun.send(()).unwrap();
            std::thread::sleep(Duration::from_millis(200));
            alarmed.alarm(error);
        }));
        let failing = health.clone();
        let thread = std::thread::spawn(move || drop(failing.fail(Error::mismatch("the calls differ"))));
        begins.recv().unwrap();
        thread
    }

    #[test]
    fn a_thread_that_panics_leaves_an_error_for_the_group() {
        let error = caught("the thread", || -> Result<()> { panic!("as a fault of it would") }).unwrap_err();
        assert!(error.is_aborted() && error.to_string().contains("the thread panicked"), "{error}");
        assert_eq!(caught("the thread", || Ok(7)).unwrap(), 7);
    }

    /// A process that was forked from this one has copies of its descriptors, which stay open when this one closes its own.
    #[test]
    fn a_rank_leaves_while_a_process_that_was_forked_from_it_lives() {
        let (own, _peer) = pair();
        let connections = Arc::new(Connections { control: vec![Some(own), None], ..Connections::default() });
        let health = Health::new(Rank::new(1), vec!["a".into(), "b".into()]);
        let identity = (Rank::new(1), WorldSize::new(2).unwrap());
        let monitor =
            Monitor::start(identity, connections, health, Heartbeat::default(), Arc::default()).unwrap();
        let _copy = monitor.stop.as_ref().unwrap().try_clone().unwrap();
        let (left, leaves) = mpsc::channel();
        std::thread::spawn(move || {
            drop(monitor);
            left.send(()).unwrap();
        });
        leaves.recv_timeout(Duration::from_secs(20)).unwrap();
    }

    #[test]
    fn a_process_that_was_forked_from_a_rank_s_does_not_leave_for_it() {
        let (own, mut peer) = pair();
        let connections = Arc::new(Connections { control: vec![Some(own), None], ..Connections::default() });
        let health = Health::new(Rank::new(1), vec!["a".into(), "b".into()]);
        let identity = (Rank::new(1), WorldSize::new(2).unwrap());
        let (heartbeat, silent) = (Heartbeat::default(), Arc::default());
        let mut monitor = Monitor::start(identity, connections.clone(), health, heartbeat, silent).unwrap();
        let stop = monitor.stop.as_ref().unwrap().try_clone().unwrap();
        // Of no process.
        monitor.process = 0;
        drop(monitor);
        // The end of all that has been sent.
        connections.control[0].as_ref().unwrap().finish_sending();
        peer.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut received = Buffered::default();
        peer.read_to_end(&mut received.bytes).unwrap();
        while let Some(message) = received.next().unwrap() {
            assert_ne!(message, Control::Goodbye);
        }
        stop.shutdown(Shutdown::Both).unwrap();
    }

    #[test]
    fn a_rank_that_leaves_lets_the_cause_of_a_failure_be_told_first() {
        let (own, mut peer) = pair();
        let connections = Arc::new(Connections { control: vec![Some(own), None], ..Connections::default() });
        let health = Health::new(Rank::new(1), vec!["a".into(), "b".into()]);
        let failing = fail_slowly(&health, &connections);
        let (silent, heartbeat) = (Arc::default(), Heartbeat::default());
        let process = std::process::id();
        drop(Monitor {
            stop: None,
            thread: None,
            caller: None,
            connections,
            health,
            silent,
            heartbeat,
            process,
        });
        failing.join().unwrap();
        peer.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut received = Buffered::default();
        peer.read_to_end(&mut received.bytes).unwrap();
        assert!(matches!(received.next(), Ok(Some(Control::Failure(_)))));
        assert_eq!(received.next().unwrap(), Some(Control::Goodbye));
    }

    #[test]
    fn a_connection_to_another_host_is_probed_while_it_is_idle() {
        use std::sync::OnceLock;

        use rustix::net::sockopt::{socket_keepalive, tcp_keepcnt, tcp_keepidle, tcp_keepintvl};

        let mut peers = Vec::new();
        let mut open = |(connection, peer): (Connection, TcpStream)| {
            peers.push(peer);
            connection
        };
        let control = vec![None, Some(open(pair())), Some(open(far()))];
        let [data, messages] =
            [(); 2].map(|()| vec![OnceLock::new(), open(pair()).into(), open(far()).into()]);
        let connections = Arc::new(Connections { control, data, messages, ..Connections::default() });
        let health = Health::new(Rank::MAIN, vec!["here".into(), "here".into(), "there".into()]);
        let world = WorldSize::new(3).unwrap();
        let heartbeat = Heartbeat { network_timeout: Duration::from_secs(24 * 3600), ..Heartbeat::default() };
        let (stop, thread) = watch((Rank::MAIN, world), &connections, &health, heartbeat).unwrap();
        for channel in [Channel::Data, Channel::Messages] {
            let socket = |peer| connections.get(channel, Rank::new(peer)).unwrap().socket();
            assert!(!socket_keepalive(socket(1)).unwrap(), "{channel:?}: nothing is between");
            assert!(socket_keepalive(socket(2)).unwrap(), "{channel:?}");
            assert_eq!(tcp_keepidle(socket(2)).unwrap(), IDLE_INTERVAL);
            assert_eq!(tcp_keepcnt(socket(2)).unwrap(), IDLE_PROBES);
            // A control connection does not end before that.
            let ends = tcp_keepintvl(socket(2)).unwrap() * IDLE_PROBES;
            assert!(ends >= give_up(heartbeat).unwrap(), "{channel:?}: {ends:?}");
        }
        drop(stop);
        thread.join().unwrap();
    }

    /// Leaves a group that has failed because of `cause`, whose rank 1 on another host reads nothing.
    fn leave_beside_one_that_does_not_answer(silent: &Arc<SilentHosts>, cause: Error) {
        let (control, _peer) = far();
        let connections = Connections { control: vec![None, Some(control)], ..Connections::default() };
        let health = Health::new(Rank::MAIN, vec!["here".into(), "there".into()]);
        health.fail(cause);
        drop(Monitor {
            stop: None,
            thread: None,
            caller: None,
            connections: Arc::new(connections),
            health,
            silent: silent.clone(),
            heartbeat: Heartbeat::default(),
            process: std::process::id(),
        });
    }

    /// It would blame this rank, whose connections end, if the packet with the cause is lost.
    #[test]
    fn a_host_that_is_not_to_blame_for_a_failure_has_longer_to_answer() {
        let begun = Instant::now();
        leave_beside_one_that_does_not_answer(&Arc::default(), Error::aborted("the program gives up"));
        assert!(begun.elapsed() >= LEAVE_GRACE, "{:?}", begun.elapsed());
        let lost = |peer| {
            let hosts = vec!["here".into(), "there".into()];
            Health::new(Rank::MAIN, hosts).peer_failed(Rank::new(peer), "its network is silent")
        };
        for blamed in [1, 0] {
            let begun = Instant::now();
            leave_beside_one_that_does_not_answer(&Arc::default(), lost(blamed));
            assert!(begun.elapsed() < LEAVE_GRACE, "{blamed}: {:?}", begun.elapsed());
        }
    }

    #[test]
    fn groups_of_one_rank_wait_once_for_a_host_that_does_not_answer() {
        let silent = Arc::<SilentHosts>::default();
        let begun = Instant::now();
        for number in 0..8 {
            leave_beside_one_that_does_not_answer(&silent, Error::aborted(format!("failure {number}")));
        }
        assert_eq!(silent.known().len(), 1);
        assert!(begun.elapsed() < 2 * LEAVE_GRACE, "{:?}", begun.elapsed());
    }
}
