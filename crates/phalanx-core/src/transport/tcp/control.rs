//! The control connections: heartbeats, goodbyes, deaths, and the cause of the group's failure.
//!
//! One thread watches all of them, even while no operation runs, so that a death is known before a rank waits for the
//! dead one.
//!
//! Leaving is not dying. A rank that drops its group sends a goodbye; a rank that then waits for it gets the error that
//! it has left the group, and not a broken connection. A rank that unwinds from a panic sends its failure instead.

use std::collections::{HashMap, HashSet};
use std::io::{self, IoSlice};
use std::net::{IpAddr, Shutdown};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use phalanx_sys::tcp;
use rustix::event::{PollFd, PollFlags};
use rustix::net::sockopt::{set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl};

use super::connection::Connection;
use super::connections::Connections;
use super::on_demand::Caller;
use super::watch::{Buffered, Watch};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::health::Health;
use crate::health::Heartbeat;
use crate::health::calls::Told;
use crate::health::liveness::listened_to;
use crate::notice::warn;
use crate::poll::poll;
use crate::rank::Rank;
use crate::transport::process;
use crate::wire::control::{self, Control, Introduction, Notice};
use crate::wire::frame::Header;
use crate::wire::hello::Channel;
use crate::world_size::WorldSize;

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
    leave_grace: Duration,
    /// The process that has started it, and not one that was forked from that.
    process: u32,
}

/// The addresses of hosts that have not answered the goodbye of one of a rank's groups, and when: for a while its other groups do not
/// wait for them once more. Two hosts may have one name.
#[derive(Debug, Default)]
pub(crate) struct SilentHosts(Mutex<HashMap<IpAddr, Instant>>);

impl SilentHosts {
    fn remember(&self, hosts: impl Iterator<Item = IpAddr>) {
        let now = Instant::now();
        self.0.lock().extend(hosts.map(|host| (host, now)));
    }

    /// The hosts that are not waited for at the moment.
    fn known(&self) -> HashSet<IpAddr> {
        let mut hosts = self.0.lock();
        hosts.retain(|_, since| since.elapsed() < SILENCE_LIMIT);
        hosts.keys().copied().collect()
    }
}

/// For how long after an unanswered goodbye a host is not waited for: groups that end together do so within seconds.
const SILENCE_LIMIT: Duration = Duration::from_secs(60);

/// How long a rank that leaves waits until the ranks on other hosts have read its goodbye, if their network may not be silent for longer:
/// a few round trips, and packets that are sent again. A connection that is closed before is reset by the next heartbeat of the peer, and
/// what has not arrived is lost.
const LEAVE_GRACE: Duration = Duration::from_secs(5);
/// How long it waits for ranks of its own host, which answer when they have made its last call too. A rank that is later compares the
/// calls itself.
const NEAR_LEAVE_GRACE: Duration = Duration::from_secs(2);
/// The same after a failure, when a peer that does not answer may be the cause.
const FAILURE_GRACE: Duration = Duration::from_secs(1);

/// So many full buffers of messages are read at once from a peer, which may send without end.
const LAST_FILLS: usize = 64;

/// In worlds of up to this many ranks, each says to all others which process it is, so that who loses it can see whether it has ended.
const INTRODUCED: u32 = 32;
/// After this silence of a host, the kernel sends it a probe, …
const PROBE_DELAY: Duration = Duration::from_secs(10);
/// … this many times, every `PROBE_INTERVAL`, before its ranks are given up: after [`give_up`], if that is longer.
const PROBES: u32 = 4;
const PROBE_INTERVAL: Duration = Duration::from_secs(5);
/// After so long without data the kernel sends a probe on the other connections to another host, too: firewalls and address translation forget a
/// connection on which nothing passes, some after four minutes, and drop what comes later without a word.
const IDLE_INTERVAL: Duration = Duration::from_secs(60);
/// So many probes without an answer end such a connection, the most that Linux takes: who is silent is for the control connections to say, and
/// for the operation's deadline.
const IDLE_PROBES: u32 = 127;

/// Lets the kernel notice that a host has lost power or its cable, for ranks that do not exchange heartbeats. The
/// peer's kernel answers, even for a process that is busy or stopped. Only for control connections: on data
/// connections, silence ends with the operation's deadline.
pub(super) fn keep_alive(connection: &Connection, heartbeat: Heartbeat) -> io::Result<()> {
    let stream = connection.socket();
    set_socket_keepalive(stream, true)?;
    set_tcp_keepidle(stream, PROBE_DELAY)?;
    set_tcp_keepintvl(stream, PROBE_INTERVAL)?;
    set_tcp_keepcnt(stream, PROBES)?;
    match give_up(heartbeat).filter(|_| !connection.is_within_host()) {
        Some(give_up) => tcp::recover_soon(stream, give_up),
        None => Ok(()),
    }
}

/// Keeps a connection for data or messages to another host, which a job may not use for hours, known to what is between. It ends no earlier
/// than a control connection.
fn keep_known(connection: &Connection, heartbeat: Heartbeat) -> io::Result<()> {
    let (stream, least) = (connection.socket(), give_up(heartbeat).unwrap_or_default() / IDLE_PROBES);
    set_socket_keepalive(stream, true)?;
    set_tcp_keepidle(stream, IDLE_INTERVAL)?;
    set_tcp_keepintvl(stream, IDLE_INTERVAL.max(least))?;
    set_tcp_keepcnt(stream, IDLE_PROBES)?;
    Ok(())
}

/// How long the kernel may get no acknowledgement of a rank on another host before it gives the connection up. The heartbeats say
/// more, so they come first. None if silence means nothing.
fn give_up(heartbeat: Heartbeat) -> Option<Duration> {
    let timeout = heartbeat.network_timeout;
    (!timeout.is_zero()).then(|| timeout.saturating_mul(2).max(PROBE_DELAY + PROBE_INTERVAL * PROBES))
}

/// How long a rank that leaves waits for the answers of other hosts.
pub(super) fn leave_grace(heartbeat: Heartbeat) -> Duration {
    LEAVE_GRACE.max(heartbeat.network_timeout)
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
        let on_failure = connections.clone();
        health.on_failure(Box::new(move |error| on_failure.alarm(error)));
        let watched = watch((rank, world), &connections, &health, heartbeat);
        // The others are connected: without the failure they would only see that their connections end.
        let (stop, thread) = watched.map_err(|error| health.fail(error))?;
        let (stop, thread, leave_grace) = (Some(stop), Some(thread), leave_grace(heartbeat));
        let process = std::process::id();
        Ok(Self { stop, thread, caller: None, connections, health, silent, leave_grace, process })
    }

    /// Answers and makes calls from now on, until the monitor is dropped.
    pub(crate) fn with_caller(mut self, rank: Rank, caller: Option<Caller>) -> Result<Self> {
        let Some(caller) = caller else { return Ok(self) };
        let (connections, health) = (self.connections.clone(), self.health.clone());
        let run = move || {
            if let Some(requests) = &connections.requests {
                caller.run(&connections, requests, &health);
            }
        };
        let thread = std::thread::Builder::new().name(format!("phalanx-call-{rank}")).spawn(run);
        let failed = |error| Error::not_started("the thread that calls ranks could not be started", error);
        // Without the failure this rank would say goodbye when it is dropped.
        self.caller = Some(thread.map_err(|error| self.health.fail(failed(error)))?);
        Ok(self)
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
        let watch = Watch::new((rank, world), &watched, &watching, heartbeat, &stopped);
        watch.and_then(Watch::run).unwrap_or_else(|error| {
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
        // The thread catches no panics, and none is expected; if there was one, there is no caller to report it to.
        let unread = self.thread.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        self.health.compare_calls();
        // Another thread may just be telling the peers the cause: nothing can be sent after the goodbye.
        let has_failed = self.health.cause().is_some();
        let last = self.health.calls(|calls| calls.latest()).filter(|_| !has_failed);
        if let Some(last) = last {
            self.connections.tell(&Control::Last(last), |_| true);
        }
        self.connections.tell(&Control::Goodbye, |_| true);
        let grace = match has_failed {
            // A rank that panics does not wait: the sooner the others notice, the better.
            _ if std::thread::panicking() => Duration::ZERO,
            true => FAILURE_GRACE,
            false => self.leave_grace,
        };
        let silent = self.silent.known();
        let is_awaited = |host| !silent.contains(&host);
        let mut parting =
            Parting { health: &self.health, unread, heard: HashSet::new(), failed: HashSet::new() };
        let has_root = last.is_some_and(|last| last.call.root.is_some());
        // What one that has left had to say has been read.
        let awaits_near = |peer| has_root && !self.health.has_left(peer);
        let (near, far) = (Deadline::after(grace.min(NEAR_LEAVE_GRACE)), Deadline::after(grace));
        let unanswered =
            self.connections.leave((near, far), awaits_near, is_awaited, |end| parting.has_ended(end));
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

    /// Sends nothing more to the ranks on other hosts, and waits until those that are awaited have done the same in answer to this rank's
    /// goodbye. From then on nothing can come that would reset a connection while the kernel still sends what is left in it. Within a
    /// host what is sent has arrived, and there is only something to wait for of ranks that `awaits_near` names: which calls they have made.
    /// `has_ended` reads what comes. Returns the other hosts that have not answered by the deadline.
    fn leave(
        &self,
        (near, far): (Deadline, Deadline),
        awaits_near: impl Fn(Rank) -> bool,
        is_awaited: impl Fn(IpAddr) -> bool,
        mut has_ended: impl FnMut(&End<'_>) -> bool,
    ) -> HashSet<IpAddr> {
        let control = (0..).map(|peer| Some(Rank::new(peer))).zip(&self.control);
        let control = control.filter_map(|(peer, connection)| Some((peer, connection.as_ref()?)));
        let all = control.chain(self.others().map(|connection| (None, connection)));
        let (mut awaited, mut others) = (Vec::new(), Vec::new());
        for (peer, connection) in all {
            let is_near = connection.is_within_host();
            let end = End { connection, peer, deadline: if is_near { near } else { far } };
            let is_awaited = match (is_near, peer) {
                (true, Some(peer)) => awaits_near(peer),
                // It stays open for a rank that still waits on it.
                (true, None) => continue,
                (false, _) => connection.host().is_some_and(&is_awaited),
            };
            if is_awaited { awaited.push(end) } else { others.push(end) }
        }
        for end in others {
            end.connection.finish_sending();
            // What has come before its peer has gone, or fallen silent, still counts.
            has_ended(&end);
        }
        let late = finish(awaited, has_ended).into_iter().map(|end| end.connection);
        late.filter(|connection| !connection.is_within_host()).filter_map(Connection::host).collect()
    }

    /// `peer` has left, and waits until this rank sends nothing more. It can still compare its calls with this rank's `latest` one.
    pub(super) fn answer_goodbye(&self, peer: Rank, latest: Option<Header>) {
        if let Some(latest) = latest {
            self.tell(&Control::Latest(latest), |other| other == peer);
        }
        if let Some(Some(control)) = self.control.get(peer.index()) {
            control.finish_sending();
        }
        for channel in [Channel::Data, Channel::Messages] {
            let connection = self.get(channel, peer).filter(|connection| !connection.is_within_host());
            connection.into_iter().for_each(Connection::finish_sending);
        }
    }

    /// Sends a message to every peer for which `meant` is true. A peer that it does not reach sees the connection
    /// close, or no more heartbeats of this rank; one that only a part of it reaches, because it has read nothing for long, sees it close.
    pub(super) fn tell(&self, message: &Control, meant: impl Fn(Rank) -> bool) {
        let Ok(bytes) = control::encode(message) else { return };
        for (peer, stream) in self.control.iter().enumerate() {
            if let Some(stream) = stream.as_ref().filter(|_| meant(Rank::new(peer as u32))) {
                let sent = stream.send(&[IoSlice::new(&bytes)]);
                if sent.is_ok_and(|(count, _)| 0 < count && count < bytes.len()) {
                    // What came next would be taken for the rest.
                    stream.finish_sending();
                }
            }
        }
    }
}

/// A connection on which a rank that leaves sends nothing more.
struct End<'a> {
    connection: &'a Connection,
    /// Whose control connection it is, if it is one.
    peer: Option<Rank>,
    /// Until when it is waited for.
    deadline: Deadline,
}

/// What a rank that leaves still hears: which calls the others have made.
struct Parting<'a> {
    health: &'a Health,
    /// Of messages that are not complete, by rank.
    unread: Vec<Vec<u8>>,
    /// The hosts of which something has come since.
    heard: HashSet<IpAddr>,
    /// The peers whose group has failed since. They do not say which call was their last.
    failed: HashSet<Rank>,
}

impl Parting<'_> {
    /// Reads what has come. Returns whether the peer will send nothing more.
    fn has_ended(&mut self, end: &End<'_>) -> bool {
        let unread = end.peer.and_then(|peer| Some((peer, self.unread.get_mut(peer.index())?)));
        let Some((peer, unread)) = unread else { return end.connection.has_ended() };
        let mut received = Buffered { bytes: std::mem::take(unread) };
        let (mut has_ended, mut has_come) = (false, false);
        for _ in 0..LAST_FILLS {
            let held = received.bytes.len();
            has_ended = received.fill(end.connection).is_err();
            has_come |= received.bytes.len() > held;
            // The rest is not read another time, and of what a TLS session has read ahead no poll tells.
            let is_full = received.is_full();
            while let Ok(Some(message)) = received.next() {
                self.hear(peer, message);
            }
            if has_ended || !is_full {
                break;
            }
        }
        if has_come {
            self.heard.extend(end.connection.host());
        }
        self.unread[peer.index()] = received.bytes;
        has_ended
    }

    /// Each is compared before the next one takes its place.
    fn hear_call(&self, peer: Rank, call: Header, told: Told) {
        self.health.calls(|calls| calls.hear(peer, call, told));
        self.health.compare_calls();
    }

    fn hear(&mut self, peer: Rank, message: Control) {
        match message {
            Control::Waiting(call) => self.hear_call(peer, call, Told::Waiting),
            Control::Latest(call) => self.hear_call(peer, call, Told::Latest),
            Control::Last(call) => self.hear_call(peer, call, Told::Last),
            // Whatever else fails from now on, this rank has left before.
            Control::Failure(notice) => {
                self.failed.insert(peer);
                let error = notice.into_error(peer, self.health.host(peer));
                if error.is_mismatch() {
                    self.health.hear(error);
                }
            }
            Control::Goodbye if !self.failed.contains(&peer) => self.health.calls(|calls| calls.left(peer)),
            Control::Goodbye
            | Control::Beat
            | Control::Watching(_)
            | Control::Connected(_)
            | Control::LongWait(_)
            | Control::WaitReport(_) => {}
        }
    }
}

/// Sends nothing more on these connections, and reads until their peers send nothing more either, or their deadlines have passed. Returns
/// those on which more may come. `has_ended` reads one of them.
fn finish<'a>(mut open: Vec<End<'a>>, mut has_ended: impl FnMut(&End<'a>) -> bool) -> Vec<End<'a>> {
    open.iter().for_each(|end| end.connection.finish_sending());
    let mut late = Vec::new();
    // Each is read once, and again when something has come: there may be thousands.
    let mut ready = vec![true; open.len()];
    loop {
        let mut is_ready = ready.iter();
        open.retain(|end| is_ready.next() != Some(&true) || !has_ended(end));
        late.extend(open.extract_if(.., |end| end.deadline.has_passed()));
        let Some(next) = open.iter().map(|end| end.deadline.remaining()).min() else { return late };
        let mut fds: Vec<PollFd<'_>> =
            open.iter().map(|end| PollFd::new(end.connection, PollFlags::IN)).collect();
        if poll(&mut fds, Some(next)).is_err() {
            late.extend(open);
            return late;
        }
        ready = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc;
    use std::time::Instant;

    use super::*;
    use crate::dtype::DType;
    use crate::rank::{Generation, Sequence};
    use crate::wire::control::MAX_BODY;
    use crate::wire::frame::{Call, History, Operation};

    /// A connection with a peer that listens at `address`, and the peer's end.
    pub(in super::super) fn connected(address: &str) -> (Connection, TcpStream) {
        let listener = TcpListener::bind(address).unwrap();
        let own = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        own.set_nonblocking(true).unwrap();
        (Connection::new(own), listener.accept().unwrap().0)
    }

    fn pair() -> (Connection, TcpStream) {
        connected("127.0.0.1:0")
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
        let (silent, leave_grace) = (Arc::default(), LEAVE_GRACE);
        let process = std::process::id();
        drop(Monitor {
            stop: None,
            thread: None,
            caller: None,
            connections,
            health,
            silent,
            leave_grace,
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
    fn the_kernel_gives_up_later_than_the_heartbeats() {
        let seconds = |timeout| {
            let network_timeout = Duration::from_secs(timeout);
            give_up(Heartbeat { network_timeout, ..Heartbeat::default() }).map(|limit| limit.as_secs())
        };
        assert_eq!([0, 1, 10, 15, 60].map(seconds), [None, Some(30), Some(30), Some(30), Some(120)]);
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

    fn end(connection: &Connection, timeout: Duration) -> End<'_> {
        End { connection, peer: None, deadline: Deadline::after(timeout) }
    }

    #[test]
    fn a_rank_that_leaves_reads_heartbeats_until_its_goodbye_is_answered() {
        let (own, mut peer) = pair();
        // More than a socket holds, so that the rest is sent only while the peer reads: a reset would lose it.
        let sent = std::thread::scope(|scope| {
            let reading = scope.spawn(move || {
                peer.write_all(&[0; 100]).unwrap();
                let mut all = Vec::new();
                let mut bytes = [0; 1 << 16];
                loop {
                    // Heartbeats go on while the goodbye is on its way.
                    peer.write_all(&[0]).unwrap();
                    match peer.read(&mut bytes).unwrap() {
                        0 => return all,
                        count => all.extend_from_slice(&bytes[..count]),
                    }
                }
            });
            let mut sent = 0;
            while sent < 4 << 20 {
                match own.send(&[IoSlice::new(&[7; 1 << 16])]) {
                    Ok((count, _)) => sent += count,
                    Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
                }
            }
            finish(vec![end(&own, Duration::from_secs(60))], |end| end.connection.has_ended());
            drop(own);
            let all = reading.join().unwrap();
            assert!(all.iter().all(|byte| *byte == 7));
            (sent, all.len())
        });
        assert_eq!(sent.0, sent.1);
    }

    #[test]
    fn a_peer_that_does_not_answer_a_goodbye_is_not_waited_for_for_ever() {
        let ((own, _peer), (other, gone)) = (pair(), pair());
        drop(gone);
        let begun = Instant::now();
        let ends = [&own, &other].map(|one| end(one, Duration::from_millis(50)));
        let unanswered = finish(ends.into(), |end| end.connection.has_ended());
        assert!(matches!(unanswered.as_slice(), [one] if std::ptr::eq(one.connection, &own)));
        assert!(begun.elapsed() >= Duration::from_millis(50));
        // One that has gone is not waited for at all.
        let begun = Instant::now();
        finish(vec![end(&other, Duration::from_secs(3600))], |end| end.connection.has_ended());
        assert!(begun.elapsed() < Duration::from_secs(600));
    }

    #[test]
    fn a_rank_that_leaves_reads_again_only_where_something_has_come() {
        let (own, mut peers): (Vec<_>, Vec<_>) = (0..8).map(|_| pair()).unzip();
        let mut reads = vec![0; own.len()];
        drop(peers.pop());
        let ends = own.iter().map(|one| end(one, Duration::from_secs(60))).collect();
        let late = finish(ends, |end| {
            let place = own.iter().position(|one| std::ptr::eq(one, end.connection)).unwrap();
            reads[place] += 1;
            let has_ended = end.connection.has_ended();
            if has_ended {
                // The one before this one, which has been read by now.
                drop(peers.pop());
            }
            has_ended
        });
        assert!(late.is_empty());
        assert!(reads.iter().all(|reads| *reads <= 2), "{reads:?}");
    }

    /// A connection between two addresses of this host, as between two hosts, whose peer never answers.
    fn far() -> (Connection, TcpStream) {
        connected("127.0.0.2:0")
    }

    #[test]
    fn a_host_that_still_sends_is_busy_and_not_silent() {
        let (control, mut peer) = far();
        let connections = Connections { control: vec![None, Some(control)], ..Connections::default() };
        let health = Health::new(Rank::MAIN, vec!["here".into(), "there".into()]);
        let mut parting = Parting {
            health: &health,
            unread: vec![Vec::new(); 2],
            heard: HashSet::new(),
            failed: HashSet::new(),
        };
        peer.write_all(&control::encode(&Control::Beat).unwrap()).unwrap();
        let soon = Deadline::after(Duration::from_millis(300));
        let unanswered = connections.leave((soon, soon), |_| false, |_| true, |end| parting.has_ended(end));
        assert_eq!(unanswered.len(), 1);
        assert_eq!(unanswered, parting.heard);
    }

    /// Lets rank 0, which has this `health`, leave when its peer has sent all this.
    fn leave_after(health: &Health, sent: &[u8]) {
        let (own, mut peer) = pair();
        peer.write_all(sent).unwrap();
        let (arrived, mut there) = (Deadline::after(Duration::from_secs(20)), vec![0; sent.len()]);
        while own.peek(&mut there).unwrap_or(0) < sent.len() {
            assert!(!arrived.has_passed());
        }
        let connections = Connections { control: vec![None, Some(own)], ..Connections::default() };
        let mut parting =
            Parting { health, unread: vec![Vec::new(); 2], heard: HashSet::new(), failed: HashSet::new() };
        let soon = Deadline::now();
        connections.leave((soon, soon), |_| false, |_| true, |end| parting.has_ended(end));
    }

    #[test]
    fn all_that_a_peer_has_sent_is_heard_however_much_it_is() {
        let beat = control::encode(&Control::Beat).unwrap();
        let failure = Notice::of(&Error::mismatch("the calls differ"));
        let sent = [beat.repeat(2 * MAX_BODY), control::encode(&Control::Failure(failure)).unwrap()].concat();
        let health = Health::new(Rank::MAIN, vec!["here".into(), "there".into()]);
        leave_after(&health, &sent);
        assert!(health.cause().unwrap().is_mismatch());
    }

    #[test]
    fn a_peer_whose_group_has_failed_is_not_one_that_has_left_without_a_call() {
        let goodbye = control::encode(&Control::Goodbye).unwrap();
        let failure = control::encode(&Control::Failure(Notice::of(&Error::timeout("too late")))).unwrap();
        let parting = |sent: &[u8]| {
            let health = Health::new(Rank::MAIN, vec!["here".into(), "there".into()]);
            health.calls(|calls| {
                calls.begin(Header {
                    call: Call::new(Operation::Broadcast, DType::U8, 1),
                    sequence: Sequence(0),
                    generation: Generation(0),
                    history: History::default(),
                    payload: 0,
                });
                calls.end();
            });
            leave_after(&health, sent);
            health.part(drop);
            health.parting()
        };
        assert!(parting(&goodbye).unwrap().is_peer_left());
        // Which call was its last one is not known.
        assert!(parting(&[failure, goodbye].concat()).is_none());
    }

    #[test]
    fn groups_of_one_rank_wait_once_for_a_host_that_does_not_answer() {
        let silent = Arc::<SilentHosts>::default();
        let begun = Instant::now();
        for number in 0..8 {
            let (control, _peer) = far();
            let connections = Connections { control: vec![None, Some(control)], ..Connections::default() };
            let hosts = vec!["here".into(), "there".into()];
            let (silent, health) = (silent.clone(), Health::new(Rank::MAIN, hosts));
            health.fail(Error::aborted(format!("failure {number}")));
            let (connections, leave_grace) = (Arc::new(connections), LEAVE_GRACE);
            drop(Monitor {
                stop: None,
                thread: None,
                caller: None,
                connections,
                health,
                silent,
                leave_grace,
                process: std::process::id(),
            });
        }
        assert_eq!(silent.0.lock().len(), 1);
        // One wait after a failure takes one second.
        assert!(begun.elapsed() < 7 * FAILURE_GRACE, "{:?}", begun.elapsed());
    }
}
