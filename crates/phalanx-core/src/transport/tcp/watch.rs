//! The thread that watches the control connections: it receives and sends heartbeats, detects silence, and
//! compares the calls of waiting ranks.
//!
//! It sends the heartbeats because it waits for nothing else: neither a long backward pass nor a blocked program stops
//! them. For the same reason it prints nothing itself, since standard error may block. Ranks that share memory have no
//! other heartbeats than these.
//!
//! Heartbeats within a host wake nobody: each rank looks for them when it sends its own. All else that comes wakes it at once.

use std::io::{self, IoSliceMut};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use phalanx_sys::tcp::set_receive_low_water;
use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;

use super::connection::Connection;
use super::connections::Connections;
use super::leave::leave_grace;
use crate::error::{Error, Result};
use crate::health::Health;
use crate::health::Heartbeat;
use crate::health::calls::{LOOK_INTERVAL, Told, is_told};
use crate::health::liveness::{Liveness, ProcessState, Silence, listened_to};
use crate::health::waits::Answer;
use crate::network::Network;
use crate::rank::{Rank, Sequence};
use crate::transport::process;
use crate::wire::control::{
    self, Control, Introduction, LongWait, MAX_BODY, PREFIX, ProcessId, SHORTEST, WaitReport,
};
use crate::world_size::WorldSize;

/// The time between the end of a process's connections and the end of the process.
const PROCESS_END_GRACE: Duration = Duration::from_millis(100);

/// The pauses between two looks whether the goodbye of a peer can be answered: they grow with the time.
const ANSWER_INTERVALS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));
/// How many connections are read at once.
const MAX_EVENTS: usize = 64;
/// The number of what stops the thread, beside the ranks.
const STOPPED: u64 = u64::MAX;

fn unwatched(error: Errno) -> Error {
    Error::io("the control connections could not be watched", error.into())
}

/// The thread's state.
pub(super) struct Watch<'a> {
    rank: Rank,
    world: WorldSize,
    connections: &'a Connections,
    health: &'a Health,
    heartbeat: Heartbeat,
    process: Option<ProcessId>,
    liveness: Liveness,
    /// By rank.
    peers: Vec<Peer>,
    /// Those that wait for the answers to their goodbyes. Most times there are none, of thousands of peers.
    owed: Vec<Rank>,
    /// Whether the connections are encrypted: a poll does not show data that TLS has read ahead.
    is_encrypted: bool,
    /// Has all connections that are open: it costs the same however many there are.
    epoll: OwnedFd,
    /// When it last sent heartbeats.
    beat: Instant,
}

/// One peer's control connection.
#[derive(Default)]
struct Peer {
    received: Buffered,
    /// Its first message, after which it accepts heartbeats.
    introduction: Option<Introduction>,
    /// Whether the two exchange heartbeats.
    listens: bool,
    /// Whether it is on this host.
    is_near: bool,
    /// Whether its heartbeats do not wake this rank.
    is_quiet: bool,
    /// Whether this rank tells it in which call it is stuck.
    is_told: bool,
    said_goodbye: bool,
    /// Since when it waits for the answer to its goodbye, if it does.
    awaits_answer: Option<Instant>,
    /// The number of its last call, if it has left.
    last: Option<Sequence>,
    closed: bool,
}

impl<'a> Watch<'a> {
    pub(super) fn new(
        (rank, world): (Rank, WorldSize),
        connections: &'a Connections,
        health: &'a Health,
        heartbeat: Heartbeat,
        stopped: &UnixStream,
    ) -> Result<Self> {
        let liveness = Liveness::new(world, heartbeat.step().unwrap_or_default());
        let listened = connections.listened_to(rank);
        let listens = |listens| Peer { listens, ..Peer::default() };
        let mut peers: Vec<Peer> = listened.into_iter().map(listens).collect();
        let process = process::own();
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(unwatched)?;
        epoll::add(&epoll, stopped, EventData::new_u64(STOPPED), EventFlags::IN).map_err(unwatched)?;
        for (peer, (stream, state)) in connections.control.iter().zip(&mut peers).enumerate() {
            let Some(stream) = stream else { continue };
            state.is_near = stream.is_within_host();
            state.is_quiet = state.listens && heartbeat.step().is_some() && quieten(stream);
            state.is_told = is_told(rank, Rank::new(peer as u32), world);
            epoll::add(&epoll, stream, EventData::new_u64(peer as u64), EventFlags::IN).map_err(unwatched)?;
        }
        let is_encrypted = connections.control.iter().flatten().any(Connection::is_encrypted);
        let (owed, beat) = (Vec::new(), Instant::now());
        Ok(Self {
            rank,
            world,
            connections,
            health,
            heartbeat,
            process,
            liveness,
            peers,
            owed,
            is_encrypted,
            epoll,
            beat,
        })
    }

    /// Watches until `stopped` is shut down at its other end. Returns what it has read of messages that are not complete, by rank.
    pub(super) fn run(mut self) -> Result<Vec<Vec<u8>>> {
        let step = self.heartbeat.step();
        let mut beats = step.map(|step| Instant::now() + step);
        // Waking costs more than what is done then. So a look waits for the next step, if that is soon.
        let soon = step.is_some_and(|step| step <= LOOK_INTERVAL);
        let mut looks = Instant::now() + LOOK_INTERVAL;
        loop {
            // After a failure the peers have been notified. A peer that the notice did not reach must notice the
            // silence.
            let over = self.health.has_failed();
            let next = beats.map_or(looks, |beats| if soon { beats } else { beats.min(looks) });
            let due = self.answer_due();
            let next = due.map_or(next, |due| due.min(next));
            let ready = match self.wait(if over { due } else { Some(next) })? {
                Woken::Stopped => {
                    return Ok(self.peers.into_iter().map(|peer| peer.received.bytes).collect());
                }
                Woken::By(ready) => ready,
            };
            self.read(ready);
            self.answer_goodbyes();
            let now = Instant::now();
            if now >= next {
                self.read(self.quiet());
                self.answer_goodbyes();
            }
            if self.health.has_failed() {
                continue;
            }
            if let (Some(due), Some(step)) = (beats, step)
                && Instant::now() >= due
            {
                self.send_heartbeats();
                self.check_silence();
                beats = Some(Instant::now() + step);
            }
            if Instant::now() >= looks {
                self.compare_calls();
                if let Some(wait) = self.health.long_wait() {
                    self.tell_one(wait.awaited, &Control::LongWait(wait));
                }
                looks = Instant::now() + LOOK_INTERVAL;
            }
        }
    }

    /// When to look again whether a goodbye can be answered, if one is not: usually that is soon.
    fn answer_due(&self) -> Option<Instant> {
        let since = self.owed.iter().filter_map(|rank| self.peers.get(rank.index())?.awaits_answer);
        let owed = since.min()?;
        let (shortest, longest) = ANSWER_INTERVALS;
        Some(Instant::now() + (owed.elapsed() / 4).clamp(shortest, longest))
    }

    /// Waits until there is data to read, or until `next`.
    fn wait(&self, next: Option<Instant>) -> Result<Woken> {
        let held: Vec<Rank> = match self.is_encrypted {
            true => self.open().filter(|(_, stream)| stream.holds_input()).map(|(peer, _)| peer).collect(),
            false => Vec::new(),
        };
        let next = if held.is_empty() { next } else { Some(Instant::now()) };
        let remaining = next.map(|next| next.saturating_duration_since(Instant::now()));
        let remaining = remaining.and_then(|remaining| Timespec::try_from(remaining).ok());
        let mut events = Vec::with_capacity(MAX_EVENTS);
        match epoll::wait(&self.epoll, spare_capacity(&mut events), remaining.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(unwatched(error)),
        }
        let ready: Vec<u64> = events.iter().map(|event| event.data.u64()).collect();
        if ready.contains(&STOPPED) {
            return Ok(Woken::Stopped);
        }
        let ready = ready.into_iter().filter_map(|peer| u32::try_from(peer).ok()).map(Rank::new);
        let mut ready: Vec<Rank> = ready.chain(held).collect();
        ready.sort_unstable();
        ready.dedup();
        Ok(Woken::By(ready))
    }

    /// The peers whose heartbeats do not wake this rank.
    fn quiet(&self) -> Vec<Rank> {
        let peers = self.world.ranks().zip(&self.peers);
        peers.filter(|(_, peer)| peer.is_quiet && !peer.closed).map(|(rank, _)| rank).collect()
    }

    fn open(&self) -> impl Iterator<Item = (Rank, &'a Connection)> {
        let streams = self.world.ranks().zip(&self.connections.control).zip(&self.peers);
        streams.filter_map(|((peer, stream), state)| {
            stream.as_ref().filter(|_| !state.closed).map(|stream| (peer, stream))
        })
    }

    /// Reads the messages of these peers. A reported cause is more useful than another peer's silence: so all messages
    /// are read before a lost peer is reported.
    fn read(&mut self, ready: Vec<Rank>) {
        let now = Instant::now();
        let (mut gone, mut waits) = (Vec::new(), Vec::new());
        let mut has_neighbour_left = false;
        for rank in ready {
            let Some(Some(stream)) = self.connections.control.get(rank.index()) else { continue };
            let Some(peer) = self.peers.get_mut(rank.index()) else { continue };
            let held = peer.received.bytes.len();
            let filled = peer.received.fill(stream);
            if peer.received.bytes.len() > held {
                self.liveness.heard(rank, now);
            }
            if let Err(reason) = filled {
                // One that leaves says goodbye, sends nothing more, and still reads the answer.
                peer.closed = true;
                // It would be ready again and again.
                let _ = epoll::delete(&self.epoll, stream);
                gone.push((rank, reason));
            }
            while let Some(message) = peer.next(rank, self.health) {
                match message {
                    // What comes before this thread starts is read by the start.
                    Control::Beat | Control::Connected(_) => {}
                    Control::Goodbye => {
                        peer.said_goodbye = true;
                        if peer.awaits_answer.replace(now).is_none() {
                            self.owed.push(rank);
                        }
                        has_neighbour_left |= peer.is_near && peer.listens;
                        self.health.calls(|calls| calls.left(rank));
                        self.health.left(rank);
                        self.connections.peer_left();
                    }
                    Control::Failure(notice) => {
                        self.health.hear(notice.into_error(rank, self.health.host(rank)));
                    }
                    Control::Waiting(call) => {
                        self.health.calls(|calls| calls.hear(rank, call, Told::Waiting));
                        self.health.compare_calls();
                    }
                    Control::Last(call) => {
                        peer.last = Some(call.sequence);
                        self.health.calls(|calls| calls.hear(rank, call, Told::Last));
                        self.health.compare_calls();
                    }
                    Control::Latest(call) => {
                        self.health.calls(|calls| calls.hear(rank, call, Told::Latest));
                        self.health.compare_calls();
                    }
                    Control::LongWait(wait) => waits.push(wait),
                    Control::WaitReport(report) => self.health.write_report(&report, rank),
                    Control::Watching(introduction) => {
                        peer.introduction = Some(introduction);
                        if peer.listens {
                            let timeout = self.heartbeat.timeout_of(stream.is_within_host());
                            self.liveness.begin(rank, introduction.interval(), timeout, now);
                        }
                    }
                }
            }
            if peer.closed || peer.said_goodbye {
                self.liveness.end(rank);
            }
        }
        if has_neighbour_left {
            self.watch_in_their_place(now);
        }
        waits.into_iter().for_each(|wait| self.answer(wait));
        for (rank, reason) in gone {
            // The first cause stays: no other process needs to be checked.
            if self.health.has_failed() {
                break;
            }
            if !self.peers[rank.index()].said_goodbye {
                self.health.lost(rank, &reason, self.state_of_lost(rank));
            }
        }
    }

    /// Ranks of this host have left to which this one listened: those that are next to it now listen to it, and it to them. Both hear of
    /// it, each when it reads the goodbye, and the one that is later has a time-out to do so.
    fn watch_in_their_place(&mut self, now: Instant) {
        let near: Vec<bool> = self.peers.iter().map(|peer| peer.is_near && !peer.said_goodbye).collect();
        let listened = listened_to(self.rank, &near);
        let introduction = Control::Watching(Introduction::new(self.heartbeat.interval, self.process));
        for (rank, stream) in self.world.ranks().zip(&self.connections.control) {
            let (Some(stream), true) = (stream, near[rank.index()] && listened[rank.index()]) else {
                continue;
            };
            let peer = &mut self.peers[rank.index()];
            if peer.listens || peer.closed {
                continue;
            }
            peer.listens = true;
            peer.is_quiet = self.heartbeat.step().is_some() && quieten(stream);
            self.connections.tell_one(rank, &introduction);
            // In a large world it has not introduced itself yet. If it is frozen, it never does.
            let interval = peer.introduction.map_or(self.heartbeat.interval, |own| own.interval());
            self.liveness.begin(rank, interval, self.heartbeat.timeout, now);
        }
    }

    /// Answers the peers that have left, each when this rank has made its last call too: until then neither knows whether it is the same.
    fn answer_goodbyes(&mut self) {
        if self.owed.is_empty() {
            return;
        }
        // If the calls differ, the peers are told before they are answered.
        self.health.compare_calls();
        let latest = self.health.calls(|calls| calls.latest());
        // Another thread may just be telling them the cause, and nothing can be sent after an answer.
        let has_failed = self.health.cause().is_some();
        for rank in std::mem::take(&mut self.owed) {
            let Some(peer) = self.peers.get_mut(rank.index()) else { continue };
            let has_made_it = peer.last <= latest.map(|latest| latest.sequence);
            let is_in_time =
                peer.awaits_answer.is_some_and(|since| since.elapsed() < leave_grace(self.heartbeat));
            if has_made_it || has_failed || !is_in_time {
                peer.awaits_answer = None;
                self.connections.answer_goodbye(rank, latest.filter(|_| !has_failed));
            } else {
                self.owed.push(rank);
            }
        }
    }

    /// Sends heartbeats, if it is time, to the peers that accept them.
    fn send_heartbeats(&mut self) {
        let now = Instant::now();
        if self.heartbeat.interval.is_zero() || now.duration_since(self.beat) < self.heartbeat.interval {
            return;
        }
        self.beat = now;
        self.tell(&Control::Beat, |peer| peer.listens && peer.introduction.is_some());
    }

    /// Tells the others in which call this rank is stuck, and checks whether it has made another call than they.
    fn compare_calls(&self) {
        for call in self.health.calls(|calls| calls.untold()) {
            self.tell(&Control::Waiting(call), |_| true);
        }
        if let Some(call) = self.health.calls(|calls| calls.stuck()) {
            self.tell(&Control::Waiting(call), |peer| peer.is_told);
        }
        self.health.compare_calls();
    }

    /// Answers a rank that waits for this one.
    fn answer(&self, wait: LongWait) {
        match self.health.answer(wait) {
            Answer::PassOn(next, wait) => self.tell_one(next, &Control::LongWait(wait)),
            Answer::Report(state) => {
                let report = WaitReport { wait, state };
                self.health.write_report(&report, self.rank);
                self.tell_one(Rank::MAIN, &Control::WaitReport(report));
            }
            Answer::Silence => {}
        }
    }

    fn tell_one(&self, peer: Rank, message: &Control) {
        let is_there = self.peers.get(peer.index()).is_some_and(|peer| !peer.said_goodbye && !peer.closed);
        if is_there {
            self.connections.tell_one(peer, message);
        }
    }

    fn tell(&self, message: &Control, meant: impl Fn(&Peer) -> bool) {
        let peers = &self.peers;
        self.connections.tell(message, |peer| {
            peers.get(peer.index()).is_some_and(|peer| meant(peer) && !peer.said_goodbye && !peer.closed)
        });
    }

    /// Fails the group if a rank has been silent for too long.
    fn check_silence(&mut self) {
        let mut silences = self.liveness.pass(Instant::now());
        if silences.is_empty() {
            return;
        }
        // Messages that arrived while this thread waited for a processor count.
        self.read(silences.iter().map(|silence| silence.peer).collect());
        let again = self.liveness.pass(Instant::now());
        silences.retain(|silence| again.iter().any(|other| other.peer == silence.peer));
        let seen: Vec<(Silence, ProcessState)> =
            silences.into_iter().map(|silence| (silence, self.state(silence.peer))).collect();
        let failed: Vec<(Silence, ProcessState)> =
            seen.into_iter().filter(|(silence, state)| silence.is_failure(*state)).collect();
        let Some((silence, state)) = failed.first() else { return };
        if *state == ProcessState::Gone {
            // Its connections would have ended with it.
            let reason = "and a process that it has forked keeps its connections open";
            self.health.lost(silence.peer, reason, *state);
            return;
        }
        let network = self.network(silence);
        self.health.silent(silence.peer, silence.lasted, (*state, network), failed.len() - 1);
    }

    /// What the kernel knows of the network to a silent peer.
    fn network(&self, silence: &Silence) -> Network {
        match self.connections.control.get(silence.peer.index()) {
            Some(Some(stream)) if !stream.is_within_host() => Network::behind(stream, silence.lasted),
            _ => Network::within_host(),
        }
    }

    /// What is seen of a peer whose connection has just ended. A process closes its connections a moment before it has
    /// ended.
    fn state_of_lost(&self, peer: Rank) -> ProcessState {
        let until = Instant::now() + PROCESS_END_GRACE;
        loop {
            match self.state(peer) {
                ProcessState::Alive if Instant::now() < until => std::thread::sleep(PROCESS_END_GRACE / 20),
                state => return state,
            }
        }
    }

    fn state(&self, peer: Rank) -> ProcessState {
        let introduction = self.peers.get(peer.index()).and_then(|peer| peer.introduction);
        process::state(self.process, introduction.and_then(|introduction| introduction.process))
    }
}

/// Has the kernel wake this rank for all that comes on this connection but a few heartbeats. Returns whether it does: not between
/// hosts, and not with TLS, where the length of what comes says nothing.
fn quieten(stream: &Connection) -> bool {
    let may = stream.is_within_host() && !stream.is_encrypted();
    // A kernel that cannot do it wakes this rank for each heartbeat: that costs more, and is no fault.
    may && set_receive_low_water(stream.socket(), SHORTEST).is_ok()
}

enum Woken {
    Stopped,
    /// By the peers that have sent data.
    By(Vec<Rank>),
}

/// Received bytes that are not a whole message yet.
#[derive(Default)]
pub(super) struct Buffered {
    pub(super) bytes: Vec<u8>,
}

impl Buffered {
    /// Reads what has arrived. An error says how the connection ended.
    pub(super) fn fill(&mut self, stream: &Connection) -> Result<(), String> {
        let mut chunk = [0; 1024];
        // At most one and a half messages are buffered.
        while !self.is_full() {
            match stream.receive(&mut [IoSliceMut::new(&mut chunk)]) {
                Ok(0) => return Err("its connection closed".to_owned()),
                Ok(count) => self.bytes.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }

    /// Whether there may be more to read than it takes.
    pub(super) fn is_full(&self) -> bool {
        self.bytes.len() > PREFIX + MAX_BODY
    }

    /// The first message, if it is complete. After an error nothing more can be read.
    pub(super) fn next(&mut self) -> Result<Option<Control>> {
        let Some((message, used)) = control::decode(&self.bytes).inspect_err(|_| self.bytes.clear())? else {
            return Ok(None);
        };
        self.bytes.drain(..used);
        Ok(Some(message))
    }
}

impl Peer {
    fn next(&mut self, peer: Rank, health: &Health) -> Option<Control> {
        self.received.next().unwrap_or_else(|error| {
            health.fail(error.with_peer(peer));
            None
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::sync::Arc;

    use rustix::event::{PollFd, PollFlags};

    use super::super::control::tests::{connected, fail_slowly};
    use super::*;
    use crate::poll::poll;

    fn pair() -> (Connection, Connection) {
        let (own, peer) = connected("127.0.0.1:0");
        (own, Connection::new(peer))
    }

    /// What rank 1 of two has to do with rank 0.
    struct Two {
        connections: Arc<Connections>,
        health: Arc<Health>,
        /// Ends the watch if it is dropped.
        _stop: UnixStream,
        stopped: UnixStream,
    }

    impl Two {
        fn new(own: Connection) -> Self {
            let connections = Connections { control: vec![Some(own), None], ..Connections::default() };
            let health = Health::new(Rank::new(1), vec!["a".into(), "b".into()]);
            let (stop, stopped) = UnixStream::pair().unwrap();
            Self { connections: Arc::new(connections), health, _stop: stop, stopped }
        }

        fn watch(&self) -> Watch<'_> {
            let ranks = (Rank::new(1), WorldSize::new(2).unwrap());
            Watch::new(ranks, &self.connections, &self.health, Heartbeat::default(), &self.stopped).unwrap()
        }
    }

    #[test]
    fn a_heartbeat_wakes_nobody_but_a_goodbye_and_an_end_do() {
        let (own, peer) = pair();
        assert!(quieten(&own));
        let is_woken = |timeout| poll(&mut [PollFd::new(&own, PollFlags::IN)], Some(timeout)).unwrap() == 1;
        let (wakes, stays_quiet) = (|| is_woken(Duration::from_secs(20)), || !is_woken(Duration::ZERO));
        // A busy kernel may deliver it later: it has come when this returns.
        let say = |message| {
            let bytes = control::encode(message).unwrap();
            let all = rustix::io::ioctl_fionread(&own).unwrap() + bytes.len() as u64;
            peer.send(&[IoSlice::new(&bytes)]).unwrap();
            while rustix::io::ioctl_fionread(&own).unwrap() < all {
                std::thread::yield_now();
            }
        };
        let health = Health::new(Rank::new(1), vec!["a".into(), "a".into()]);
        let mut state = Peer::default();
        say(&Control::Beat);
        assert!(stays_quiet());
        state.received.fill(&own).unwrap();
        assert_eq!(state.next(Rank::MAIN, &health), Some(Control::Beat));
        say(&Control::Beat);
        say(&Control::Goodbye);
        assert!(wakes());
        state.received.fill(&own).unwrap();
        assert_eq!(state.next(Rank::MAIN, &health), Some(Control::Beat));
        assert_eq!(state.next(Rank::MAIN, &health), Some(Control::Goodbye));
        assert!(stays_quiet());
        peer.shut();
        assert!(wakes());
    }

    #[test]
    fn a_goodbye_is_answered_also_if_the_end_of_what_its_rank_sends_comes_with_it() {
        let (own, peer) = pair();
        let two = Two::new(own);
        let mut watch = two.watch();
        peer.send(&[IoSlice::new(&control::encode(&Control::Goodbye).unwrap())]).unwrap();
        peer.finish_sending();
        let deadline = Instant::now() + Duration::from_secs(20);
        while !watch.peers[0].closed {
            assert!(Instant::now() < deadline);
            watch.read(vec![Rank::MAIN]);
        }
        watch.answer_goodbyes();
        // The peer reads the end, and leaves.
        peer.socket().set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        assert_eq!(Buffered::default().fill(&peer), Err("its connection closed".to_owned()));
        assert!(watch.peers[0].awaits_answer.is_none() && !two.health.has_failed());
    }

    #[test]
    fn a_goodbye_is_answered_after_the_cause_of_a_failure() {
        let (own, peer) = pair();
        let two = Two::new(own);
        let mut watch = two.watch();
        watch.peers[0].awaits_answer = Some(Instant::now());
        watch.owed.push(Rank::MAIN);
        let failing = fail_slowly(&two.health, &two.connections);
        watch.answer_goodbyes();
        failing.join().unwrap();
        let mut received = Buffered::default();
        peer.socket().set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        assert!(received.fill(&peer).is_err(), "nothing more comes after an answer");
        assert!(matches!(received.next(), Ok(Some(Control::Failure(_)))));
    }
}
