//! How a rank leaves a group: whose answers to its goodbye it waits for, and what it still hears meanwhile.
//!
//! Leaving is not dying. A rank that drops its group sends a goodbye; a rank that then waits for it gets the error that
//! it has left the group, and not a broken connection. A rank that unwinds from a panic sends its failure instead.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags};

use super::connection::Connection;
use super::connections::Connections;
use super::watch::Buffered;
use crate::deadline::Deadline;
use crate::health::calls::Told;
use crate::health::{Health, Heartbeat};
use crate::poll::poll;
use crate::rank::Rank;
use crate::wire::control::Control;
use crate::wire::frame::Header;
use crate::wire::hello::Channel;

/// The addresses of hosts that have not answered the goodbye of one of a rank's groups, and when: for a while its other groups do not
/// wait for them once more. Two hosts may have one name.
#[derive(Debug, Default)]
pub(crate) struct SilentHosts(Mutex<HashMap<IpAddr, Instant>>);

impl SilentHosts {
    pub(super) fn remember(&self, hosts: impl Iterator<Item = IpAddr>) {
        let now = Instant::now();
        self.0.lock().extend(hosts.map(|host| (host, now)));
    }

    /// The hosts that are not waited for at the moment.
    pub(super) fn known(&self) -> HashSet<IpAddr> {
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
pub(super) const LEAVE_GRACE: Duration = Duration::from_secs(5);
/// How long it waits for ranks of its own host, which answer when they have made its last call too. A rank that is later compares the
/// calls itself.
pub(super) const NEAR_LEAVE_GRACE: Duration = Duration::from_secs(2);
/// How long it waits after a failure for hosts that may be the cause. For the others it waits for [`LEAVE_GRACE`]: if they lose the cause,
/// they take the end of this rank's connections for it.
pub(super) const FAILURE_GRACE: Duration = Duration::from_secs(1);

/// So many full buffers of messages are read at once from a peer, which may send without end.
const LAST_FILLS: usize = 64;

/// How long a rank that leaves waits for the answers of other hosts.
pub(super) fn leave_grace(heartbeat: Heartbeat) -> Duration {
    LEAVE_GRACE.max(heartbeat.network_timeout)
}

impl Connections {
    /// Sends nothing more to the ranks on other hosts, and waits until those have done the same in answer to this rank's goodbye for which
    /// `awaits_far` has a deadline. From then on nothing can come that would reset a connection while the kernel still sends what is left in
    /// it. Within a host what is sent has arrived, and there is only something to wait for of ranks that `awaits_near` names: which calls they
    /// have made. That takes until `near` at most. `has_ended` reads what comes. Returns the other hosts that have not answered by the deadline.
    pub(super) fn leave(
        &self,
        near: Deadline,
        awaits_near: impl Fn(Rank) -> bool,
        awaits_far: impl Fn(IpAddr) -> Option<Deadline>,
        mut has_ended: impl FnMut(&End<'_>) -> bool,
    ) -> HashSet<IpAddr> {
        let control = (0..).map(|peer| Some(Rank::new(peer))).zip(&self.control);
        let control = control.filter_map(|(peer, connection)| Some((peer, connection.as_ref()?)));
        let all = control.chain(self.others().map(|connection| (None, connection)));
        let (mut awaited, mut others) = (Vec::new(), Vec::new());
        for (peer, connection) in all {
            let until = match (connection.is_within_host(), peer) {
                (true, Some(peer)) => awaits_near(peer).then_some(near),
                // It stays open for a rank that still waits on it.
                (true, None) => continue,
                (false, _) => connection.host().and_then(&awaits_far),
            };
            match until {
                Some(deadline) => awaited.push(End { connection, peer, deadline }),
                None => others.push(End { connection, peer, deadline: Deadline::now() }),
            }
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
            self.tell_one(peer, &Control::Latest(latest));
        }
        if let Some(Some(control)) = self.control.get(peer.index()) {
            control.finish_sending();
        }
        for channel in [Channel::Data, Channel::Messages] {
            let connection = self.get(channel, peer).filter(|connection| !connection.is_within_host());
            connection.into_iter().for_each(Connection::finish_sending);
        }
    }
}

/// A connection on which a rank that leaves sends nothing more.
pub(super) struct End<'a> {
    connection: &'a Connection,
    /// Whose control connection it is, if it is one.
    peer: Option<Rank>,
    /// Until when it is waited for.
    deadline: Deadline,
}

/// What a rank that leaves still hears: which calls the others have made.
pub(super) struct Parting<'a> {
    health: &'a Health,
    /// Of messages that are not complete, by rank.
    unread: Vec<Vec<u8>>,
    /// The hosts of which something has come since.
    pub heard: HashSet<IpAddr>,
    /// The peers whose group has failed since. They do not say which call was their last.
    failed: HashSet<Rank>,
}

impl<'a> Parting<'a> {
    /// After the watching thread, which has left `unread` of messages that were not complete.
    pub(super) fn new(health: &'a Health, unread: Vec<Vec<u8>>) -> Self {
        Self { health, unread, heard: HashSet::new(), failed: HashSet::new() }
    }

    /// Reads what has come. Returns whether the peer will send nothing more.
    pub(super) fn has_ended(&mut self, end: &End<'_>) -> bool {
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

/// How long who waits for so many connections lets more of them become ready before it polls. A poll looks at each: one for each that becomes ready
/// would be as much as the square of the ranks.
pub(super) fn pause_among(connections: usize) -> Duration {
    Duration::from_millis(connections as u64 / 256)
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
        std::thread::sleep(pause_among(open.len()).min(next));
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
mod tests {
    use std::io::{self, IoSlice, Read, Write};

    use super::super::control::tests::{far, pair};
    use super::*;
    use crate::dtype::DType;
    use crate::error::Error;
    use crate::rank::{Generation, Sequence};
    use crate::wire::control::{self, MAX_BODY, Notice};
    use crate::wire::frame::{Call, History, Operation};

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
    fn who_waits_for_thousands_of_connections_does_not_poll_for_each() {
        let pauses = [1, 255, 1024, 12_000].map(|connections| pause_among(connections).as_millis());
        assert_eq!(pauses, [0, 0, 4, 46]);
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

    #[test]
    fn a_host_that_still_sends_is_busy_and_not_silent() {
        let (control, mut peer) = far();
        let connections = Connections { control: vec![None, Some(control)], ..Connections::default() };
        let health = Health::new(Rank::MAIN, vec!["here".into(), "there".into()]);
        let mut parting = Parting::new(&health, vec![Vec::new(); 2]);
        peer.write_all(&control::encode(&Control::Beat).unwrap()).unwrap();
        let soon = Deadline::after(Duration::from_millis(300));
        let unanswered = connections.leave(soon, |_| false, |_| Some(soon), |end| parting.has_ended(end));
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
        let mut parting = Parting::new(health, vec![Vec::new(); 2]);
        let soon = Deadline::now();
        connections.leave(soon, |_| false, |_| Some(soon), |end| parting.has_ended(end));
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
}
