//! The control connections: heartbeats, goodbyes, deaths, and the cause of the group's failure.
//!
//! One thread watches all of them, even while no operation runs, so that a death is known before a rank waits for the
//! dead one.

use std::io::{self, IoSlice};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::sockopt::{set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl};

use super::connection::Connection;
use super::watch::Watch;
use crate::error::{Error, Result};
use crate::health::Health;
use crate::health::Heartbeat;
use crate::health::liveness::listens;
use crate::rank::Rank;
use crate::transport::process;
use crate::wire::control::{self, Control, Introduction, Notice};
use crate::world_size::WorldSize;

/// Watches the control connections until it is dropped; then it sends a goodbye.
pub(crate) struct Monitor {
    /// Closing this end wakes the thread, which holds the other.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
    connections: Arc<Connections>,
    health: Arc<Health>,
}

/// The connections to each peer, by rank; None for this rank itself. The transports, the watching thread and the alarm
/// share them, because duplicates would cost more descriptors for each peer.
#[derive(Default)]
pub(crate) struct Connections {
    pub control: Vec<Option<Connection>>,
    pub data: Vec<Option<Connection>>,
    pub messages: Vec<Option<Connection>>,
}

/// After this silence of a host, the kernel sends it a probe, …
const SILENCE: Duration = Duration::from_secs(10);
/// … this many times, every `PROBE_PAUSE`, before its ranks are given up.
const PROBES: u32 = 4;
const PROBE_PAUSE: Duration = Duration::from_secs(5);

/// Lets the kernel notice that a host has lost power or its cable, for ranks that do not exchange heartbeats. The
/// peer's kernel answers, even for a process that is busy or stopped. Only for control connections: on data
/// connections, silence ends with the operation's deadline.
fn keep_alive(connection: &Connection) -> io::Result<()> {
    let stream = connection.socket();
    set_socket_keepalive(stream, true)?;
    set_tcp_keepidle(stream, SILENCE)?;
    set_tcp_keepintvl(stream, PROBE_PAUSE)?;
    set_tcp_keepcnt(stream, PROBES)?;
    Ok(())
}

impl Monitor {
    pub(crate) fn start(
        (rank, world): (Rank, WorldSize),
        connections: Arc<Connections>,
        health: Arc<Health>,
        heartbeat: Heartbeat,
    ) -> Result<Self> {
        let failed = |error| Error::io("the control connections could not be watched", error);
        let (stop, stopped) = UnixStream::pair().map_err(failed)?;
        connections.control.iter().flatten().try_for_each(keep_alive).map_err(failed)?;
        let on_failure = connections.clone();
        health.on_failure(Box::new(move |error| on_failure.alarm(error)));
        // Before the thread starts: then a rank that is stopped right after the start counts as silent, and not as one
        // that has never sent anything.
        let introduction = Introduction::new(heartbeat.interval, process::own());
        connections.tell(&Control::Watching(introduction), |peer| listens(rank, peer, world));
        let (watched, watching) = (connections.clone(), health.clone());
        let thread = std::thread::Builder::new()
            .name(format!("phalanx-watch-{rank}"))
            .spawn(move || {
                let watch = Watch::new(world, &watched, &watching, heartbeat);
                if let Err(error) = watch.run(&stopped) {
                    watching.fail(error);
                }
            })
            .map_err(|error| {
                Error::not_started(
                    "the thread that watches the control connections could not be started",
                    error,
                )
            })?;
        Ok(Self { stop: Some(stop), thread: Some(thread), connections, health })
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread catches no panics, and none is expected; if there was one, there is no caller to report it to.
            let _ = thread.join();
        }
        self.health.compare_last_calls();
        if let Some(last) = self.health.calls.latest().filter(|_| !self.health.has_failed()) {
            self.connections.tell(&Control::Last(last), |_| true);
        }
        self.connections.tell(&Control::Goodbye, |_| true);
        self.connections.shut();
    }
}

impl Connections {
    /// The group has failed: send the cause to every peer, then wake the threads that wait on other connections.
    fn alarm(&self, error: &Error) {
        self.tell(&Control::Failure(Notice::of(error)), |_| true);
        self.shut();
    }

    fn shut(&self) {
        self.data.iter().chain(&self.messages).flatten().for_each(Connection::shut);
    }

    /// Sends a message to every peer for which `meant` is true. A peer that it does not reach sees the connection
    /// close, or no more heartbeats of this rank.
    pub(super) fn tell(&self, message: &Control, meant: impl Fn(Rank) -> bool) {
        let Ok(bytes) = control::encode(message) else { return };
        for (peer, stream) in self.control.iter().enumerate() {
            if let Some(stream) = stream.as_ref().filter(|_| meant(Rank::new(peer as u32))) {
                let _ = stream.send(&[IoSlice::new(&bytes)]);
            }
        }
    }
}
