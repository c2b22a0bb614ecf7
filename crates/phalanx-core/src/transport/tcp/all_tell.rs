//! One message of each rank to all others, on connections that have just been made, before anything else uses them.
//!
//! It takes half a round trip, and the store, which is asked by all ranks at once, has nothing to do with it.

use std::io::{self, ErrorKind, IoSliceMut};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};

use super::MeshConfig;
use super::connection::Connection;
use super::connections::Connections;
use super::keep_alive::keep_alive;
use super::leave::pause_among;
use super::start_failure::{self, LAST_MESSAGE_TIMEOUT, POLL_INTERVAL, lost};
use super::stop_probe::StopProbe;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::poll::{look_first, poll};
use crate::rank::Rank;
use crate::wire::control::{self, Control, MAX_BODY, MAX_TOLD, PREFIX};

/// Tells all peers `own`, and returns what each rank tells, by rank. `hosts` are the ranks' hosts.
///
/// # Errors
/// If a peer is lost or frozen, or reports why it cannot start; if one has told nothing by the deadline.
pub(super) fn exchange(
    config: &MeshConfig<'_>,
    hosts: &[String],
    connections: &Connections,
    own: Vec<u8>,
    deadline: Deadline,
) -> Result<Vec<Vec<u8>>> {
    if own.len() > MAX_TOLD {
        return Err(Error::protocol(format!(
            "a rank tells at most {MAX_TOLD} bytes to the others, and has {}",
            own.len()
        )));
    }
    let host = |rank: Rank| hosts.get(rank.index()).map_or("unknown host", String::as_str);
    let mut told: Vec<Option<Vec<u8>>> = vec![None; config.world.count()];
    let message = Control::Connected(own);
    connections.tell(&message, |_| true);
    if let (Some(place), Control::Connected(own)) = (told.get_mut(config.rank.index()), message) {
        *place = Some(own);
    }
    let control = config.world.ranks().zip(&connections.control);
    let mut awaited: Vec<Awaited<'_>> = control
        .filter_map(|(peer, connection)| Some((peer, connection.as_ref()?)))
        .map(|(peer, connection)| Awaited { peer, connection, received: Vec::with_capacity(PREFIX) })
        .collect();
    let (mut looked, mut probe) = (Instant::now(), None);
    let mut ready = vec![true; awaited.len()];
    loop {
        let (mut failed, mut is_ready) = (None, ready.iter());
        awaited.retain_mut(|one| {
            if is_ready.next() != Some(&true) {
                return true;
            }
            match one.receive(host(one.peer)) {
                Ok(None) => true,
                Ok(said) => {
                    if let Some(place) = told.get_mut(one.peer.index()) {
                        *place = said;
                    }
                    false
                }
                Err(error) => {
                    failed.get_or_insert(error);
                    true
                }
            }
        });
        if let Some(error) = failed {
            return Err(error);
        }
        let Some(late) = awaited.first().map(|one| one.peer) else {
            return Ok(told.into_iter().map(Option::unwrap_or_default).collect());
        };
        if deadline.has_passed() {
            return Err(Error::timeout(format!(
                "rank {late} ({}) is connected, and has not told what it shares with the others in time",
                host(late)
            ))
            .with_peer(late)
            .with_remedy("is its process stopped, or its host out of memory?"));
        }
        interrupt::check()?;
        if looked.elapsed() >= POLL_INTERVAL {
            looked = Instant::now();
            // There are no heartbeats yet. Most times all have told before the first look.
            if probe.is_none() {
                let heartbeat = config.heartbeat.among(config.world);
                awaited
                    .iter()
                    .try_for_each(|one| keep_alive(one.connection, heartbeat))
                    .map_err(unwatched)?;
            }
            let until = deadline.at_most(LAST_MESSAGE_TIMEOUT);
            start_failure::check(config, host(config.rank), until)?;
            probe.get_or_insert_with(|| StopProbe::new(config)).check(late, until)?;
        }
        std::thread::sleep(pause_among(awaited.len()));
        let mut fds: Vec<PollFd<'_>> =
            awaited.iter().map(|one| PollFd::new(one.connection, PollFlags::IN)).collect();
        let timeout = interrupt::at_most(deadline.at_most(POLL_INTERVAL).remaining());
        look_first(&mut fds);
        poll(&mut fds, Some(timeout)).map_err(unwatched)?;
        ready = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
    }
}

fn unwatched(error: io::Error) -> Error {
    Error::io("waiting for peers failed", error)
}

/// A peer that has not told all yet.
struct Awaited<'a> {
    peer: Rank,
    connection: &'a Connection,
    received: Vec<u8>,
}

impl Awaited<'_> {
    /// What the peer tells, if all of it has come. Nothing after it is read: that is for the thread that watches the connection.
    fn receive(&mut self, host: &str) -> Result<Option<Vec<u8>>> {
        loop {
            let missing = match self.received.first_chunk::<PREFIX>() {
                None => PREFIX - self.received.len(),
                Some([_, length @ ..]) => {
                    let length = u32::from_le_bytes(*length) as usize;
                    // What claims to be longer is refused.
                    if length > MAX_BODY { 0 } else { (PREFIX + length).saturating_sub(self.received.len()) }
                }
            };
            if missing == 0 || self.received.first().is_some_and(|first| !control::is_message(*first)) {
                return self.understood(host);
            }
            let filled = self.received.len();
            self.received.resize(filled + missing, 0);
            let rest = self.received.get_mut(filled..).unwrap_or_default();
            let received = self.connection.receive(&mut [IoSliceMut::new(rest)]);
            self.received.truncate(filled + *received.as_ref().unwrap_or(&0));
            match received {
                Ok(1..) => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    return Ok(None);
                }
                Ok(0) | Err(_) => return Err(lost(self.peer, host)),
            }
        }
    }

    fn understood(&self, host: &str) -> Result<Option<Vec<u8>>> {
        match control::decode(&self.received).map_err(|error| error.with_peer(self.peer))? {
            Some((Control::Connected(told), _)) => Ok(Some(told)),
            Some((Control::Failure(notice), _)) => Err(notice.into_error(self.peer, host)),
            Some(_) | None => Err(Error::protocol(format!(
                "rank {} ({host}) has not told what it shares with the others, but something else",
                self.peer
            ))
            .with_peer(self.peer)
            .with_remedy("start every rank with the same build")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, TcpStream};
    use std::process::Command;
    use std::time::Duration;

    use rustix::process::{Pid, Signal, kill_process};

    use super::*;
    use crate::credentials::Credentials;
    use crate::health::Heartbeat;
    use crate::proc_stat::ProcStat;
    use crate::rank::Generation;
    use crate::store::{MemoryStore, Store};
    use crate::transport::process;
    use crate::transport::tcp::control::tests::connected;
    use crate::transport::tcp::stop_probe;
    use crate::wire::control::{Introduction, Notice, ProcessId};
    use crate::world_size::WorldSize;

    /// Rank 0 of so many.
    fn config(store: &MemoryStore, world: u32) -> MeshConfig<'_> {
        MeshConfig {
            store,
            rank: Rank::MAIN,
            world: WorldSize::new(world).unwrap(),
            generation: Generation(0),
            interface: Ipv4Addr::LOCALHOST.into(),
            credentials: Credentials::none(),
            heartbeat: Heartbeat::default(),
            number: None,
            tells_process: false,
            marks_left: false,
            watch: &|| Ok(()),
        }
    }

    /// What rank 0 of two hears when its peer sends `bytes`, and then goes on or, if it `closes`, ends; and what it has told the peer, with
    /// the connections.
    fn hear(bytes: &[u8], closes: bool) -> (Result<Vec<Vec<u8>>>, Connections, TcpStream) {
        let (own, mut peer) = connected("127.0.0.1:0");
        peer.write_all(bytes).unwrap();
        if closes {
            peer.shutdown(std::net::Shutdown::Write).unwrap();
        }
        let connections = Connections { control: vec![None, Some(own)], ..Connections::default() };
        let store = MemoryStore::new();
        let config = config(&store, 2);
        let hosts = ["here".to_owned(), "there".to_owned()];
        let deadline = Deadline::after(Duration::from_secs(if bytes.len() < 4 { 0 } else { 20 }));
        (exchange(&config, &hosts, &connections, b"own".to_vec(), deadline), connections, peer)
    }

    fn told(content: &[u8]) -> Vec<u8> {
        control::encode(&Control::Connected(content.to_vec())).unwrap()
    }

    #[test]
    fn each_hears_what_all_tell_and_what_comes_after_it_is_left() {
        let after = control::encode(&Control::Watching(Introduction::new(Duration::ZERO, None))).unwrap();
        let longest = vec![7; MAX_TOLD];
        let (heard, connections, mut peer) = hear(&[told(&longest), after.clone()].concat(), false);
        assert_eq!(heard.unwrap(), [b"own".to_vec(), longest]);
        let mut rest = [0; 64];
        let control = connections.control[1].as_ref().unwrap();
        let count = control.receive(&mut [IoSliceMut::new(&mut rest)]).unwrap();
        assert_eq!(rest[..count], after);
        let mut own = vec![0; told(b"own").len()];
        peer.read_exact(&mut own).unwrap();
        assert_eq!(own, told(b"own"));
    }

    #[test]
    fn a_peer_that_fails_is_lost_or_tells_something_else_is_named() {
        let failure = Notice::of(&Error::mismatch("another table").at(Rank::new(1), "there"));
        let failure = control::encode(&Control::Failure(failure)).unwrap();
        let (heard, ..) = hear(&failure, true);
        assert!(heard.as_ref().unwrap_err().is_mismatch(), "{heard:?}");
        // A part of a message, and then the end.
        let (heard, ..) = hear(&told(b"content")[..8], true);
        let error = heard.unwrap_err();
        assert!(error.peer() == Some(Rank::new(1)) && error.to_string().contains("was lost"), "{error}");
        for other in [control::encode(&Control::Goodbye).unwrap(), vec![0; 8], vec![9; 8]] {
            let (heard, ..) = hear(&other, false);
            assert_eq!(heard.unwrap_err().kind(), crate::error::Kind::Protocol);
        }
        // A length that no message has.
        let (heard, ..) = hear(&[1, 255, 255, 255, 255, 0, 0, 0], false);
        assert_eq!(heard.unwrap_err().kind(), crate::error::Kind::Protocol);
        let (heard, ..) = hear(&[], false);
        let error = heard.unwrap_err();
        assert!(error.is_timeout() && error.to_string().contains("rank 1 (there)"), "{error}");
    }

    #[test]
    fn whoever_tells_late_or_in_pieces_is_heard_beside_others() {
        let ((one, mut first), (other, mut second)) = (connected("127.0.0.1:0"), connected("127.0.0.1:0"));
        let connections =
            Connections { control: vec![None, Some(one), Some(other)], ..Connections::default() };
        let store = MemoryStore::new();
        let hosts = [(); 3].map(|()| "here".to_owned());
        let message = told(b"first");
        first.write_all(&message[..3]).unwrap();
        let heard = std::thread::scope(|scope| {
            let peers = scope.spawn(move || {
                let mut own = vec![0; told(b"own").len()];
                second.read_exact(&mut own).unwrap();
                second.write_all(&told(b"second")).unwrap();
                first.write_all(&message[3..]).unwrap();
                (first, second)
            });
            let deadline = Deadline::after(Duration::from_secs(60));
            let heard = exchange(&config(&store, 3), &hosts, &connections, b"own".to_vec(), deadline);
            // Open until then: what is unread would be lost.
            drop(peers.join().unwrap());
            heard
        });
        assert_eq!(heard.unwrap(), [&b"own"[..], b"first", b"second"]);
    }

    #[test]
    fn a_peer_that_is_stopped_before_it_tells_is_named_long_before_the_deadline() {
        let mut peer = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = Pid::from_child(&peer);
        kill_process(pid, Signal::STOP).unwrap();
        let stat = ProcStat::read(pid.as_raw_nonzero().get()).unwrap().unwrap();
        let process = ProcessId { pid: peer.id(), started: stat.started, ..process::own().unwrap() };
        let store = MemoryStore::new();
        let record = postcard::to_stdvec(&("there", Some(process))).unwrap();
        let deadline = Deadline::after(Duration::from_secs(120));
        store.set(&stop_probe::key(Rank::new(1)), &record, deadline).unwrap();
        let (own, _silent) = connected("127.0.0.1:0");
        let connections = Connections { control: vec![None, Some(own)], ..Connections::default() };
        let hosts = ["here".to_owned(), "there".to_owned()];
        let heartbeat = Heartbeat { timeout: Duration::from_secs(1), ..Heartbeat::default() };
        let config = MeshConfig { heartbeat, ..config(&store, 2) };
        let heard = exchange(&config, &hosts, &connections, Vec::new(), deadline);
        kill_process(pid, Signal::KILL).unwrap();
        peer.wait().unwrap();
        let error = heard.unwrap_err();
        assert!(error.is_peer_failure() && error.peer() == Some(Rank::new(1)), "{error}");
        assert!(error.to_string().contains("is frozen"), "{error}");
    }
}
