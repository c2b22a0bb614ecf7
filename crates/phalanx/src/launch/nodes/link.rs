//! A launcher's connection to the others: the I/O around the membership's log.
//!
//! Two threads, because the supervisor must not wait for a store: one reads the log and wakes the supervisor, the other
//! appends what the supervisor has to say, says that this launcher is there, and looks who is not.

use std::io::{self, ErrorKind, PipeReader, PipeWriter, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::launch::cluster::{Cluster, Hosting};
use crate::rendezvous::membership::liveness::Liveness;
use crate::rendezvous::membership::{Departure, Entry, Log, Node, NodeId, Settings, log};
use crate::store::{PrefixStore, SharedStore, Store, TcpStore, TcpStoreServer, host_port};

/// How long the reader waits at a time: then it looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(200);
/// How long the last words of this launcher may take.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How long the store stays for other launchers that have not read to the end yet.
const DRAIN: Duration = Duration::from_secs(5);
/// How long the system may take to look up an address.
const LOOK_UP: Duration = Duration::from_secs(30);

/// What the threads tell the supervisor.
#[derive(Debug)]
pub(super) enum News {
    /// The store is reached; it is served here, at this address, or elsewhere.
    Connected {
        served_at: Option<SocketAddr>,
    },
    Entry(Entry),
    Lost(Error),
}

/// The supervisor's end.
#[derive(Debug)]
pub(super) struct Link {
    news: Receiver<News>,
    notice: PipeReader,
    proposals: Option<Sender<Entry>>,
    shared: Arc<Shared>,
    writer: Option<JoinHandle<Option<TcpStoreServer>>>,
}

#[derive(Debug, Default)]
struct Shared {
    closing: AtomicBool,
    /// Whose heartbeats are to be watched.
    watched: Mutex<Vec<NodeId>>,
}

impl Link {
    /// Starts to connect, and to join.
    pub(super) fn start(
        cluster: &Cluster,
        scope: String,
        node: impl FnOnce(bool) -> Node + Send + 'static,
        settings: Settings,
    ) -> Result<Self> {
        let no_pipe = |error| Error::io("no pipe for the news from other nodes", error);
        let (notice, wake) = io::pipe().map_err(no_pipe)?;
        let flags = fcntl_getfl(&notice).map_err(|error| no_pipe(error.into()))?;
        fcntl_setfl(&notice, flags | OFlags::NONBLOCK).map_err(|error| no_pipe(error.into()))?;
        let (sender, news) = channel();
        let (proposals, inbox) = channel();
        let shared = Arc::<Shared>::default();
        let cluster = cluster.clone();
        let thread = Arc::clone(&shared);
        let told = Told { news: sender, wake: Arc::new(wake) };
        let run = move || {
            let mut server = None;
            let work = || -> Result<()> {
                let deadline = Deadline::after(cluster.join_timeout);
                server = serve(&cluster, deadline)?;
                let served_at = server.as_ref().map(TcpStoreServer::local_addr);
                let here = server.as_ref().map(TcpStoreServer::reachable_addr);
                let store = connect(&cluster, here, &thread, deadline)?;
                let store: SharedStore = Arc::new(PrefixStore::new(scope, Arc::new(store)));
                told.tell(News::Connected { served_at });
                let reader = (Arc::clone(&store), told.clone(), Arc::clone(&thread));
                let reader = std::thread::Builder::new()
                    .name("phalanx-nodes-in".into())
                    .spawn(move || read(&*reader.0, &reader.1, &reader.2))
                    .map_err(no_thread)?;
                let join = Entry::Join { node: node(server.is_some()), settings };
                let result = write(&store, &cluster, join, &inbox, &thread);
                if result.is_ok() {
                    let _ = reader.join();
                }
                result
            };
            if let Err(error) = work() {
                told.tell(News::Lost(error));
            }
            server
        };
        let writer =
            std::thread::Builder::new().name("phalanx-nodes-out".into()).spawn(run).map_err(no_thread)?;
        Ok(Self { news, notice, proposals: Some(proposals), shared, writer: Some(writer) })
    }

    pub(super) fn notice(&self) -> BorrowedFd<'_> {
        self.notice.as_fd()
    }

    /// What has come since the last time.
    pub(super) fn read(&mut self) -> Option<News> {
        // Before the news: what comes in between wakes once more.
        while matches!(self.notice.read(&mut [0; 64]), Ok(1..)) {}
        self.news.try_recv().ok()
    }

    pub(super) fn propose(&self, entry: Entry) {
        if let Some(proposals) = &self.proposals {
            // If the thread is gone, its last news says why.
            let _ = proposals.send(entry);
        }
    }

    pub(super) fn watch(&self, nodes: Vec<NodeId>) {
        *self.shared.watched.lock() = nodes;
    }
}

impl Drop for Link {
    /// What was proposed is still said; a store that is served here stays until the others have heard it.
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Relaxed);
        drop(self.proposals.take());
        let Some(writer) = self.writer.take() else { return };
        let deadline = Deadline::after(LAST_WORDS);
        while !writer.is_finished() {
            // A thread that is stuck in a connection ends by itself.
            if deadline.has_passed() {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Ok(Some(server)) = writer.join() {
            server.drain(Deadline::after(DRAIN));
        }
    }
}

/// How threads tell the supervisor.
#[derive(Clone)]
struct Told {
    news: Sender<News>,
    wake: Arc<PipeWriter>,
}

impl Told {
    fn tell(&self, news: News) {
        if self.news.send(news).is_ok() {
            let _ = (&*self.wake).write_all(&[0]);
        }
    }
}

/// Serves the store, if this node does.
fn serve(cluster: &Cluster, deadline: Deadline) -> Result<Option<TcpStoreServer>> {
    let bind = || match cluster.bind {
        Some(address) => TcpStoreServer::bind_anywhere(SocketAddr::new(address, cluster.port)),
        None => TcpStoreServer::bind_to(&cluster.endpoint(), deadline.at_most(LOOK_UP)),
    };
    match cluster.hosting {
        Hosting::Connect => Ok(None),
        Hosting::Serve => bind().map(Some),
        Hosting::WhoeverCan => match bind() {
            Ok(server) => Ok(Some(server)),
            // Another launcher of this host was first; or it is another host's address, or name.
            Err(error) if error.is_address_in_use() => Ok(None),
            Err(error) if error.io_kind() == Some(ErrorKind::PermissionDenied) => Err(error),
            Err(_) if cluster.bind.is_none() => Ok(None),
            Err(error) => Err(error),
        },
    }
}

fn connect(
    cluster: &Cluster,
    here: Option<SocketAddr>,
    shared: &Shared,
    deadline: Deadline,
) -> Result<TcpStore> {
    let address = here.map_or_else(|| cluster.endpoint(), |address| address.to_string());
    loop {
        match TcpStore::connect(&address, deadline.at_most(Duration::from_secs(1))) {
            Err(error) if error.is_timeout() && !deadline.has_passed() => {
                if shared.closing.load(Ordering::Relaxed) {
                    return Err(error);
                }
            }
            result => return result,
        }
    }
}

/// Another store beside the one at `meeting`, at a port of its own.
pub(super) fn serve_beside(cluster: &Cluster, meeting: SocketAddr) -> Result<TcpStoreServer> {
    match cluster.bind {
        Some(address) => TcpStoreServer::bind_anywhere(SocketAddr::new(address, 0)),
        None => TcpStoreServer::bind_to(&host_port(&meeting.ip().to_string(), 0), Deadline::after(LOOK_UP)),
    }
}

/// The reader's thread.
fn read(store: &dyn Store, told: &Told, shared: &Shared) {
    let mut index = 0;
    while !shared.closing.load(Ordering::Relaxed) {
        let news = match log::read(store, index, Deadline::after(LOOK)) {
            Ok(bytes) => match Entry::from_bytes(&bytes) {
                Ok(entry) => News::Entry(entry),
                Err(error) => News::Lost(error),
            },
            // A store that does not answer is the heartbeats' affair.
            Err(error) if error.is_timeout() => continue,
            Err(error) => News::Lost(error),
        };
        let is_last = matches!(news, News::Lost(_));
        told.tell(news);
        index += 1;
        if is_last {
            return;
        }
    }
}

/// The writer's thread, until the link is closed.
fn write(
    store: &SharedStore,
    cluster: &Cluster,
    join: Entry,
    inbox: &Receiver<Entry>,
    shared: &Shared,
) -> Result<()> {
    let (interval, silence) = (cluster.keep_alive.0, cluster.silence());
    let mut liveness = Liveness::new(silence);
    let mut log = Log::new(Arc::clone(store));
    let me = match &join {
        Entry::Join { node, .. } => node.id,
        _ => return Ok(()),
    };
    let mut next = Some(join);
    let mut beat_at = Instant::now();
    loop {
        let deadline = Deadline::after(silence);
        if Instant::now() >= beat_at {
            beat_at = Instant::now() + interval;
            store.add(&beat(me), 1, deadline)?;
            for (node, since) in listen(&**store, me, shared, &mut liveness, deadline)? {
                log.append(&Entry::Left { node, why: Departure::Silent(since) }.to_bytes()?, deadline)?;
            }
        }
        if let Some(entry) = next.take() {
            log.append(&entry.to_bytes()?, deadline)?;
        }
        next = match inbox.recv_timeout(beat_at.saturating_duration_since(Instant::now())) {
            Ok(entry) => Some(entry),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        };
    }
}

/// Who of the others has fallen silent?
fn listen(
    store: &dyn Store,
    me: NodeId,
    shared: &Shared,
    liveness: &mut Liveness,
    deadline: Deadline,
) -> Result<Vec<(NodeId, Duration)>> {
    let others: Vec<NodeId> = shared.watched.lock().iter().copied().filter(|node| *node != me).collect();
    if others.is_empty() {
        return Ok(Vec::new());
    }
    let keys: Vec<String> = others.iter().map(|node| beat(*node)).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    // They are there: a launcher beats before it joins.
    let beats = store.multi_get(&keys, deadline)?;
    Ok(liveness.observe(others.into_iter().zip(beats.iter().map(Vec::as_slice)), Instant::now()))
}

fn beat(node: NodeId) -> String {
    format!("beat/{node}")
}

fn no_thread(error: io::Error) -> Error {
    Error::io("cannot start a thread for the news from other nodes", error)
}
