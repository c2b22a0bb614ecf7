//! A launcher's connection to the others: the I/O around the membership's log.
//!
//! Two threads, because the supervisor must not wait for a store: one reads the log and wakes the supervisor, the other
//! appends what the supervisor has to say, says that this launcher is there, and looks who is not.

use std::io::{self, ErrorKind, PipeReader, PipeWriter, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::host;
use crate::launch::cluster::{Cluster, Hosting, Meeting};
use crate::poll::wake_pipe;
use crate::rendezvous::membership::liveness::Liveness;
use crate::rendezvous::membership::{Departure, Entry, Log, Mac, Node, NodeId, Settings, Verified, log};
#[cfg(feature = "etcd")]
use crate::store::EtcdStore;
use crate::store::{Access, FileStore, PrefixStore, SharedStore, Store, TcpStore, TcpStoreServer, host_port};

/// How long the reader waits at a time: then it looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(200);
/// How long the last message of this launcher may take.
const LAST_MESSAGE: Duration = Duration::from_secs(2);
/// How long the store stays for other launchers that have not read to the end yet.
const DRAIN: Duration = Duration::from_secs(5);
/// How long the system may take to look up an address.
const LOOK_UP: Duration = Duration::from_secs(30);

/// How long one try to connect may take while nothing listens; then it checks whether the store is still wanted.
const TRY: Duration = Duration::from_secs(1);
/// How long what listens may take to answer as a store does.
const SURE: Duration = Duration::from_secs(15);

/// What the threads tell the supervisor.
#[derive(Debug)]
pub(super) enum News {
    /// The store is reached; it is served here, at this address, or elsewhere.
    Connected {
        served_at: Option<SocketAddr>,
        spot: Option<Spot>,
    },
    Entry(Entry),
    /// Something that a person should know, though the job goes on.
    Warning(String),
    Lost(Error),
}

/// Where this node can serve a store for the workers of all.
#[derive(Clone, Debug)]
pub(super) struct Spot {
    /// The name, or the address, under which the others find it.
    pub(super) name: String,
    /// Its address, or its name.
    listens_at: String,
}

/// The store at which the launchers meet.
struct Met {
    store: SharedStore,
    /// If it is served here.
    server: Option<TcpStoreServer>,
    spot: Option<Spot>,
    /// Does another launcher serve it?
    has_host: bool,
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
        access: Access,
        scope: String,
        node: impl FnOnce(bool) -> Node + Send + 'static,
        settings: Settings,
    ) -> Result<Self> {
        let (notice, wake) =
            wake_pipe().map_err(|error| Error::io("no pipe for the news from other nodes", error))?;
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
                let mac = Mac::new(access.credentials().key.as_ref(), &scope);
                let met = meet(&cluster, &access, &scope, &thread, deadline)?;
                server = met.server;
                let served_at = server.as_ref().map(TcpStoreServer::local_addr);
                let store: SharedStore = Arc::new(PrefixStore::new(scope, met.store));
                told.tell(News::Connected { served_at, spot: met.spot });
                let reader = (Arc::clone(&store), mac.clone(), told.clone(), Arc::clone(&thread));
                let reader = std::thread::Builder::new()
                    .name("phalanx-nodes-in".into())
                    .spawn(move || read(&*reader.0, &reader.1, &reader.2, &reader.3))
                    .map_err(no_thread)?;
                if met.has_host {
                    wait_for_host(&*store, &mac, &cluster, &thread, deadline)?;
                }
                let join = Entry::Join { node: node(server.is_some()), settings };
                let result = write((&store, &mac), &cluster, join, &inbox, &thread);
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
        let deadline = Deadline::after(LAST_MESSAGE);
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

/// Opens the store at which the launchers meet.
#[cfg_attr(not(feature = "etcd"), expect(unused_variables, reason = "a file is one job's"))]
fn meet(cluster: &Cluster, access: &Access, job: &str, shared: &Shared, deadline: Deadline) -> Result<Met> {
    let (store, address): (SharedStore, Option<IpAddr>) = match &cluster.meeting {
        Meeting::Served { host, port, hosting } => {
            let server = serve(cluster, access, *port, *hosting, deadline)?;
            let here = server.as_ref().map(TcpStoreServer::reachable_addr);
            let store = Arc::new(connect(cluster, access.credentials(), here, shared, deadline)?);
            let listens_at = server.as_ref().map(|server| server.local_addr().ip().to_string());
            let spot = listens_at.map(|listens_at| Spot { name: host.clone(), listens_at });
            return Ok(Met { store, has_host: server.is_none(), server, spot });
        }
        #[cfg(feature = "etcd")]
        Meeting::Etcd(endpoints) => {
            let store = EtcdStore::open(endpoints, job, deadline)?;
            let address = store.local_address();
            (Arc::new(store), address)
        }
        Meeting::File(path) => (Arc::new(FileStore::meet(path, cluster.silence(), deadline)?), None),
    };
    let name = cluster.local_addr.clone().or_else(|| address.map(|address| address.to_string()));
    let name = name.unwrap_or_else(host::name);
    let spot = Some(Spot { listens_at: name.clone(), name });
    Ok(Met { store, server: None, spot, has_host: false })
}

/// Serves the store, if this node does.
fn serve(
    cluster: &Cluster,
    access: &Access,
    port: u16,
    hosting: Hosting,
    deadline: Deadline,
) -> Result<Option<TcpStoreServer>> {
    let bind = || match cluster.bind {
        Some(address) => TcpStoreServer::bind_anywhere(SocketAddr::new(address, port), access.clone()),
        None => TcpStoreServer::bind_to(&cluster.endpoint(), access.clone(), deadline.at_most(LOOK_UP)),
    };
    match hosting {
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
    credentials: &Credentials,
    here: Option<SocketAddr>,
    shared: &Shared,
    deadline: Deadline,
) -> Result<TcpStore> {
    let address = here.map_or_else(|| cluster.endpoint(), |address| address.to_string());
    let mut patience = TRY;
    loop {
        match TcpStore::join(&address, credentials, deadline.at_most(patience)) {
            Err(error) if error.is_timeout() && !deadline.has_passed() => {
                if shared.closing.load(Ordering::Relaxed) {
                    return Err(error);
                }
                patience = TRY;
            }
            // It listens, but has no more answered than a stranger would: it may not have had the time.
            Err(error) if !error.is_timeout() && patience == TRY => patience = SURE,
            result => return result,
        }
    }
}

/// Waits until the launcher that serves the store has joined. Everybody must fit the first of the log: if that were
/// another one, with wrong options, it would turn away the one without which nothing goes on.
fn wait_for_host(
    store: &dyn Store,
    mac: &Mac,
    cluster: &Cluster,
    shared: &Shared,
    deadline: Deadline,
) -> Result<()> {
    let mut index = 0;
    loop {
        match log::read(store, index, deadline.at_most(LOOK)) {
            Ok(bytes) if mac.verify(index, &bytes) == Verified::Forged => index += 1,
            Ok(_) => return Ok(()),
            Err(error) if !error.is_timeout() || shared.closing.load(Ordering::Relaxed) => return Err(error),
            Err(_) if deadline.has_passed() => {
                let cause = format!("nobody has begun this job at the store at {}", cluster.endpoint());
                return Err(Error::timeout(cause)
                    .in_operation("rendezvous of the launchers", None)
                    .with_remedy("start all nodes of a job with the same --rdzv-id"));
            }
            Err(_) => {}
        }
    }
}

/// The store of a round, at a port of its own.
pub(super) fn serve_round(cluster: &Cluster, access: Access, spot: &Spot) -> Result<TcpStoreServer> {
    match cluster.bind {
        Some(address) => TcpStoreServer::bind_anywhere(SocketAddr::new(address, 0), access),
        None => TcpStoreServer::bind_to(&host_port(&spot.listens_at, 0), access, Deadline::after(LOOK_UP)),
    }
}

/// The reader's thread.
fn read(store: &dyn Store, mac: &Mac, told: &Told, shared: &Shared) {
    let mut index = 0;
    while !shared.closing.load(Ordering::Relaxed) {
        let news = match log::read(store, index, Deadline::after(LOOK)) {
            Ok(bytes) => match mac.verify(index, &bytes) {
                Verified::Entry(entry) => match Entry::from_bytes(entry) {
                    Ok(entry) => News::Entry(entry),
                    Err(error) => News::Lost(error),
                },
                // All launchers skip it, so that all see the same list.
                Verified::Forged => News::Warning(format!(
                    "entry {index} of the launchers' log was passed over, because it is not signed with this job's key. \
                     Another launcher needs the same --job-key-file; or somebody else writes to the store"
                )),
                Verified::Keyless => News::Lost(
                    Error::protocol("the launchers of this job sign what they say with a key")
                        .with_remedy("give this one the same --job-key-file"),
                ),
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
    (store, mac): (&SharedStore, &Mac),
    cluster: &Cluster,
    join: Entry,
    inbox: &Receiver<Entry>,
    shared: &Shared,
) -> Result<()> {
    let (interval, silence) = (cluster.keep_alive.0, cluster.silence());
    let mut liveness = Liveness::new(interval, silence);
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
                let left = Entry::Left { node, why: Departure::Silent(since) };
                log.append_signed(&left.to_bytes()?, mac, deadline)?;
            }
        }
        if let Some(entry) = next.take() {
            log.append_signed(&entry.to_bytes()?, mac, deadline)?;
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
    liveness: &mut Liveness<NodeId>,
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

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::key::JobKey;

    /// What stands between clients and a store, and hears what they say.
    struct Between {
        listener: TcpListener,
        heard: Arc<Mutex<Vec<u8>>>,
    }

    impl Between {
        fn listen() -> Self {
            Self { listener: TcpListener::bind("127.0.0.1:0").unwrap(), heard: Arc::default() }
        }

        fn port(&self) -> u16 {
            self.listener.local_addr().unwrap().port()
        }

        /// Passes everything on, the first of it after a pause in each direction.
        fn pass_to(&self, store: SocketAddr, pause: Duration) {
            let (listener, heard) = (self.listener.try_clone().unwrap(), Arc::clone(&self.heard));
            std::thread::spawn(move || {
                for client in listener.incoming() {
                    let (client, store) = (client.unwrap(), TcpStream::connect(store).unwrap());
                    let back = (store.try_clone().unwrap(), client.try_clone().unwrap(), None);
                    for (mut from, mut to, heard) in [(client, store, Some(Arc::clone(&heard))), back] {
                        std::thread::spawn(move || {
                            std::thread::sleep(pause);
                            let mut bytes = [0; 4096];
                            while let Ok(count @ 1..) = from.read(&mut bytes) {
                                if to.write_all(&bytes[..count]).is_err() {
                                    return;
                                }
                                if let Some(heard) = &heard {
                                    heard.lock().extend(&bytes[..count]);
                                }
                            }
                        });
                    }
                }
            });
        }

        /// Waits until a client has said this.
        fn hears(&self, words: &[u8], limit: Deadline) {
            while !self.heard.lock().windows(words.len()).any(|said| said == words) {
                assert!(!limit.has_passed(), "nobody has said {:?}", String::from_utf8_lossy(words));
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    #[test]
    fn whoever_serves_the_store_joins_first() {
        let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let address = server.local_addr();
        let between = Between::listen();
        between.pass_to(address, Duration::ZERO);
        let cluster = Cluster::new(2, 2, "127.0.0.1", between.port()).unwrap().hosting(Hosting::Connect);
        let settings = Settings { min_nodes: 2, max_nodes: 2, max_restarts: 0 };
        let node = |id, serves_store| Node {
            id: NodeId(id),
            host: "here".to_owned(),
            workers: 1,
            place: None,
            serves_store,
        };
        let mut link = Link::start(
            &cluster,
            Access::default(),
            "job".to_owned(),
            move |serves| node(7, serves),
            settings,
        )
        .unwrap();
        let limit = Deadline::after(Duration::from_secs(20));
        while !matches!(link.read(), Some(News::Connected { .. })) {
            assert!(!limit.has_passed());
            std::thread::sleep(Duration::from_millis(1));
        }
        // It asks for the first entry, and waits.
        between.hears(b"log/0", limit);
        let store = TcpStore::connect(address, limit).unwrap();
        let store: SharedStore = Arc::new(PrefixStore::new("job", Arc::new(store)));
        assert!(!store.check(&["log/0"], limit).unwrap(), "it did not wait");

        let host = Entry::Join { node: node(1, true), settings };
        Log::new(Arc::clone(&store)).append(&host.to_bytes().unwrap(), limit).unwrap();
        let next = Entry::from_bytes(&log::read(&*store, 1, limit).unwrap()).unwrap();
        assert_eq!(next, Entry::Join { node: node(7, false), settings });
    }

    /// What a reader with this mac tells of `store`, whose log has so many entries.
    fn news(store: &Arc<crate::store::MemoryStore>, mac: Mac, count: usize) -> Vec<News> {
        let (sender, news) = channel();
        let (_notice, wake) = io::pipe().unwrap();
        let told = Told { news: sender, wake: Arc::new(wake) };
        let (shared, store) = (Arc::<Shared>::default(), Arc::clone(store));
        let closing = Arc::clone(&shared);
        let reader = std::thread::spawn(move || read(&*store, &mac, &told, &shared));
        let limit = Duration::from_secs(20);
        let told = (0..count).map(|_| news.recv_timeout(limit).unwrap()).collect();
        closing.closing.store(true, Ordering::Relaxed);
        reader.join().unwrap();
        told
    }

    #[test]
    fn an_entry_that_nobody_of_the_job_has_signed_is_passed_over() {
        let memory = Arc::new(crate::store::MemoryStore::new());
        let (store, deadline): (SharedStore, _) = (memory.clone(), Deadline::after(Duration::from_secs(20)));
        let mac = |key| Mac::new(Some(&JobKey::from_bytes([key; 32])), "job");
        let entry = |round| Entry::LastCall { round, nonce: round };
        let mut log = Log::new(Arc::clone(&store));
        // Without a key, with another one, and moved from its place.
        log.append(&entry(1).to_bytes().unwrap(), deadline).unwrap();
        log.append_signed(&entry(2).to_bytes().unwrap(), &mac(2), deadline).unwrap();
        log.append(&mac(1).sign(0, &entry(3).to_bytes().unwrap()), deadline).unwrap();
        log.append_signed(&entry(4).to_bytes().unwrap(), &mac(1), deadline).unwrap();
        let told = news(&memory, mac(1), 4);
        for (number, news) in told[..3].iter().enumerate() {
            let named = format!("entry {number} of the launchers' log was passed over");
            assert!(matches!(news, News::Warning(text) if text.contains(&named)), "{news:?}");
        }
        assert!(matches!(&told[3], News::Entry(told) if *told == entry(4)), "{told:?}");
        // A launcher without a key is told which one is missing.
        let told = news(&memory, Mac::none(), 2);
        let remedy = |error: &Error| error.remedy().is_some_and(|remedy| remedy.contains("--job-key-file"));
        assert!(matches!(&told[1], News::Lost(error) if remedy(error)), "{told:?}");
    }

    #[test]
    fn a_store_that_is_slow_to_answer_is_waited_for() {
        let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let between = Between::listen();
        between.pass_to(server.local_addr(), TRY);
        let cluster = Cluster::new(2, 2, "127.0.0.1", between.port()).unwrap();
        let deadline = Deadline::after(Duration::from_secs(20));
        let store = connect(&cluster, Credentials::none(), None, &Shared::default(), deadline).unwrap();
        assert_eq!(store.add("key", 1, deadline).unwrap(), 1);
    }

    #[test]
    fn a_job_that_nobody_has_begun_is_named() {
        let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let cluster = Cluster::new(2, 2, "127.0.0.1", server.local_addr().port()).unwrap();
        let store = TcpStore::connect(server.local_addr(), Deadline::after(Duration::from_secs(20))).unwrap();
        let deadline = Deadline::after(Duration::from_millis(20));
        let error = wait_for_host(&store, &Mac::none(), &cluster, &Shared::default(), deadline).unwrap_err();
        assert!(error.is_timeout() && error.to_string().contains("nobody has begun this job"), "{error}");
        assert!(error.remedy().unwrap().contains("--rdzv-id"));
    }
}
