//! The control connections: who leaves, who died, and why the group failed.
//!
//! One thread watches them all, also while no operation runs, so that a death is known before anybody waits for it.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::{set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl};

use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::transport::health::Health;
use crate::wire::control::{self, Control, MAX_BODY, Notice, PREFIX};

/// Watches the control connections until it is dropped; then it says goodbye.
pub(in crate::transport) struct Monitor {
    /// Its end closes the other, which wakes the thread.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
    connections: Arc<Connections>,
}

/// The connections to each peer, by rank; none for this rank itself. The transports, the watching thread and the alarm
/// share them: duplicates would cost more descriptors for each peer.
#[derive(Default)]
pub(in crate::transport) struct Connections {
    pub control: Vec<Option<TcpStream>>,
    pub data: Vec<Option<TcpStream>>,
    pub messages: Vec<Option<TcpStream>>,
}

/// A host that is silent for this long is asked whether it is there, …
const SILENCE: Duration = Duration::from_secs(10);
/// … this often, every `PROBE_PAUSE`, before its ranks are given up.
const PROBES: u32 = 4;
const PROBE_PAUSE: Duration = Duration::from_secs(5);

/// Lets the kernel notice that a host has lost power or its cable, which sends nothing. The peer's kernel answers, also
/// for a process that is busy or stopped. Only for control connections: on those for data, silence ends with the
/// operation's deadline.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    set_socket_keepalive(stream, true)?;
    set_tcp_keepidle(stream, SILENCE)?;
    set_tcp_keepintvl(stream, PROBE_PAUSE)?;
    set_tcp_keepcnt(stream, PROBES)?;
    Ok(())
}

impl Monitor {
    pub(in crate::transport) fn start(
        rank: Rank,
        connections: Arc<Connections>,
        health: Arc<Health>,
    ) -> Result<Self> {
        let failed = |error| Error::io("the control connections could not be watched", error);
        let (stop, stopped) = UnixStream::pair().map_err(failed)?;
        connections.control.iter().flatten().try_for_each(keep_alive).map_err(failed)?;
        let on_failure = connections.clone();
        health.on_failure(Box::new(move |error| on_failure.alarm(error)));
        let watched = connections.clone();
        let thread = std::thread::Builder::new()
            .name(format!("phalanx-watch-{rank}"))
            .spawn(move || watch(&watched, &stopped, &health))
            .map_err(failed)?;
        Ok(Self { stop: Some(stop), thread: Some(thread), connections })
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread catches nothing and panics nowhere; if it did, there is nobody left to tell.
            let _ = thread.join();
        }
        self.connections.tell(&Control::Goodbye);
        self.connections.shut();
    }
}

impl Connections {
    /// The group has failed: tell every peer why, then wake whoever waits on another connection.
    fn alarm(&self, error: &Error) {
        self.tell(&Control::Failure(Notice::of(error)));
        self.shut();
    }

    fn shut(&self) {
        for stream in self.data.iter().chain(&self.messages).flatten() {
            // A connection that is closed already has woken its waiter.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Sends a message to every peer. Who cannot be told sees the connection close.
    pub(super) fn tell(&self, message: &Control) {
        let Ok(bytes) = control::encode(message) else { return };
        for mut stream in self.control.iter().flatten() {
            let _ = stream.write(&bytes);
        }
    }
}

/// What has arrived from one peer and is not a whole message yet.
#[derive(Default)]
struct Inbox {
    bytes: Vec<u8>,
    said_goodbye: bool,
    closed: bool,
}

fn watch(connections: &Connections, stopped: &UnixStream, health: &Health) {
    let mut inboxes: Vec<Inbox> = connections.control.iter().map(|_| Inbox::default()).collect();
    loop {
        let open: Vec<(usize, &TcpStream)> = connections
            .control
            .iter()
            .enumerate()
            .filter_map(|(peer, stream)| Some((peer, stream.as_ref()?)))
            .filter(|(peer, _)| !inboxes[*peer].closed)
            .collect();
        let mut fds = vec![PollFd::new(stopped, PollFlags::IN)];
        fds.extend(open.iter().map(|(_, stream)| PollFd::new(*stream, PollFlags::IN)));
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => {
                health.fail(Error::io("the control connections could not be watched", error.into()));
                return;
            }
        }
        if !fds[0].revents().is_empty() {
            return;
        }
        // A peer's reason is worth more than another peer's silence: first read all, then judge who is gone.
        let ready: Vec<bool> = fds[1..].iter().map(|fd| !fd.revents().is_empty()).collect();
        let mut gone = Vec::new();
        for ((peer, stream), _) in open.iter().zip(ready).filter(|(_, ready)| *ready) {
            let rank = Rank::new(*peer as u32);
            let inbox = &mut inboxes[*peer];
            if let Err(reason) = inbox.fill(stream) {
                inbox.closed = true;
                gone.push((rank, reason));
            }
            while let Some(message) = inbox.next(rank, health) {
                match message {
                    Control::Goodbye => {
                        inbox.said_goodbye = true;
                        health.left(rank);
                    }
                    Control::Failure(notice) => {
                        health.fail(notice.into_error(rank, health.host(rank)));
                    }
                }
            }
        }
        for (rank, reason) in gone {
            if !inboxes[rank.index()].said_goodbye {
                health.lost(rank, &reason);
            }
        }
    }
}

impl Inbox {
    /// Reads what has arrived; an error says how the connection ended.
    fn fill(&mut self, mut stream: &TcpStream) -> Result<(), String> {
        let mut chunk = [0; 1024];
        // A message and a half at most wait to be taken out.
        while self.bytes.len() <= PREFIX + MAX_BODY {
            match stream.read(&mut chunk) {
                Ok(0) => return Err("its connection closed".to_owned()),
                Ok(count) => self.bytes.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }

    fn next(&mut self, peer: Rank, health: &Health) -> Option<Control> {
        match control::decode(&self.bytes) {
            Ok(Some((message, used))) => {
                self.bytes.drain(..used);
                Some(message)
            }
            Ok(None) => None,
            Err(error) => {
                self.bytes.clear();
                health.fail(error.with_peer(peer));
                None
            }
        }
    }
}
