//! A launcher's connection to the others: it finds their common store, and takes part in the log there.
//!
//! The supervisor must not wait for a store. So a thread connects, joins and appends the supervisor's entries. The
//! supervisor reads the [`Replica`], and each change of it wakes the supervisor.
//!
//! The store of another launcher writes for this one when its connection ends (`set_at_end`). So the others wait for the
//! time-out of heartbeats only if this launcher is frozen or cut off.

use std::io::{PipeReader, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::statfs;

use super::membership::{Entry, MembershipState, Node, NodeId, Settings};
use super::who_serves::{Claim, Facts, Role, who_serves};
use crate::cluster::{Cluster, Hosting, RendezvousBackend};
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::error::{Error, Kind, Result};
#[cfg(feature = "etcd")]
use crate::interfaces::is_every_hosts;
use crate::interfaces::{inner_bridges, is_own};
use crate::key::JobKey;
use crate::log::{ENDED, Heartbeats, Log, Mac, Participant, Replica, View, stood_still};
use crate::notice::while_waiting;
use crate::own_address::own_address;
use crate::poll::{drain, wake_pipe};
#[cfg(feature = "etcd")]
use crate::store::EtcdStore;
use crate::store::{
    Access, AtEnd, FileStore, Patience, PrefixStore, SharedStore, Store, TcpStore, TcpStoreServer,
    addresses_to_serve, host_port, resolve, warn_of_own_name,
};

/// How long the last message of this launcher may take: some round trips of a slow network, and a packet that is sent again.
const LAST_MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the store stays up for other launchers that have not read to the end yet. They close their connections when they have; a
/// launcher whose host is gone does not. Longer, if launchers may be silent for longer.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(20);
/// The same if the job has ended because a launcher is silent: its connections stay open, and only the others' are waited for.
const DRAIN_BESIDE_SILENCE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the system may take to look up an address.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a launcher that tries to connect looks whether the end point has become an address of its own host.
const ADDRESS_INTERVAL: Duration = Duration::from_secs(1);

/// How long a listening program may take to answer as a store does, if launchers may not be silent for longer.
const SILENCE_LIMIT: Duration = Duration::from_secs(15);

/// What is known once the store is reached.
#[derive(Clone, Debug)]
pub(super) struct Reached {
    /// The address at which it is served, if by this launcher.
    pub(super) served_at: Option<SocketAddr>,
    pub(super) store_address: Option<StoreAddress>,
}

/// Where this node can serve a store for the workers of all.
#[derive(Clone, Debug)]
pub(super) struct StoreAddress {
    /// The host name or address at which the others reach it.
    pub(super) name: String,
    /// Its own address, or its name.
    listens_at: String,
}

/// The launchers' store, served here.
struct Served {
    server: TcpStoreServer,
    /// No other launcher of this host serves it. None where the kernel has no such names.
    _claim: Option<Claim>,
}

/// The launchers' common store.
struct RendezvousStore {
    store: SharedStore,
    /// The server, if it is served here.
    server: Option<Served>,
    store_address: Option<StoreAddress>,
    /// Whether another launcher serves it.
    served_elsewhere: bool,
    /// The same store, if a launcher serves it: it notices when this one has ended.
    tcp: Option<Arc<TcpStore>>,
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
                Err(Error::aborted("the thread that speaks with the other launchers has panicked"))
            });
            if let Err(error) = ran {
                thread.replica.lose(error);
            }
            server
        };
        let writer = std::thread::Builder::new().name("phalanx-nodes".into()).spawn(run);
        let writer =
            writer.map_err(|error| Error::io("cannot start a thread for messages of other nodes", error))?;
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
    /// Proposed entries are still appended. A store that is served here stays up until the others have read them.
    fn drop(&mut self) {
        self.replica.close();
        drop(self.proposals.take());
        let Some(writer) = self.writer.take() else { return };
        // A node that has not reached the store has nothing to say there; the thread ends after its attempt to connect.
        let is_reached = self.reached.lock().is_some();
        let deadline = Deadline::after(if is_reached { LAST_MESSAGE_TIMEOUT } else { Duration::ZERO });
        while !writer.is_finished() {
            // A thread that is stuck in a connection ends by itself.
            if deadline.has_passed() {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Ok(Some(Served { server, _claim })) = writer.join() {
            let is_one_silent = self.replica.view().state.has_ended_in_silence();
            let timeout = if is_one_silent { DRAIN_BESIDE_SILENCE_TIMEOUT } else { self.drain_timeout };
            server.drain(Deadline::after(timeout));
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
        let opened = open_store(cluster, access, scope, replica, deadline)?;
        if replica.view().is_closing() {
            return Ok(());
        }
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
            && let Err(error) = wait_for_host(replica, cluster, deadline)
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
        tcp.map_or(Ok(None), |tcp| tcp.set_at_end(&key, ENDED, Deadline::after(silence)))
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

/// The entry by which this launcher joins may be lost, or the others have read it and missed this launcher since.
pub(super) fn stopped_while_joining() -> Error {
    let cause = "this launcher stood still while it joined, for so long that the others have gone on";
    Error::new(Kind::PeerLeft, cause)
        .in_operation("rendezvous of the launchers", None)
        .with_remedy("start it again; was this host, or its network, stopped for a while?")
}

/// Opens the launchers' common store.
#[cfg_attr(not(feature = "etcd"), expect(unused_variables, reason = "a file is one job's"))]
fn open_store(
    cluster: &Cluster,
    access: &Access,
    job: &str,
    replica: &Replica<MembershipState>,
    deadline: Deadline,
) -> Result<RendezvousStore> {
    let (store, address): (SharedStore, Option<IpAddr>) = match &cluster.backend {
        RendezvousBackend::Store { host, port, hosting } => {
            return open_served(cluster, (host, *port, *hosting), access, replica, deadline);
        }
        #[cfg(feature = "etcd")]
        RendezvousBackend::Etcd(endpoints) => {
            let store = EtcdStore::open(endpoints, job, deadline)?;
            // The etcd of this host is reached at the loopback, this host is not.
            let address = store.local_address(deadline).filter(|address| !is_every_hosts(*address));
            (Arc::new(store), address)
        }
        RendezvousBackend::File(path) => {
            refuse_own_disk(cluster, path)?;
            (Arc::new(FileStore::open_or_create(path, cluster.silence(), deadline)?), None)
        }
    };
    let name = match (&cluster.local_addr, address) {
        (Some(given), _) => given.clone(),
        (None, Some(address)) => address.to_string(),
        (None, None) => own_address()?.to_string(),
    };
    let store_address = Some(StoreAddress { listens_at: name.clone(), name });
    Ok(RendezvousStore { store, server: None, store_address, served_elsewhere: false, tcp: None })
}

/// The launchers' store in one of them: serves it, or connects to it.
fn open_served(
    cluster: &Cluster,
    (host, port, hosting): (&str, u16, Hosting),
    access: &Access,
    replica: &Replica<MembershipState>,
    deadline: Deadline,
) -> Result<RendezvousStore> {
    loop {
        let endpoint = match hosting {
            // The others come to whatever address leads here, which need not have a name here.
            Hosting::Serve if cluster.is_fixed() && cluster.bind.is_some() => Vec::new(),
            Hosting::Connect => Vec::new(),
            Hosting::Serve | Hosting::ByAddress => addresses_to_serve(&cluster.endpoint(), deadline)?,
        };
        let role = decide(cluster, (host, hosting), &endpoint)?;
        let served = match role {
            Role::Serve(address) => {
                // An address of one link keeps its interface.
                let found = endpoint.iter().copied().find(|found| found.ip() == address);
                serve(cluster, access, found.unwrap_or(SocketAddr::new(address, port)), hosting)?
            }
            Role::Connect => None,
        };
        if let Some(served) = served.as_ref().filter(|_| cluster.bind.is_none() && !cluster.is_all_here()) {
            warn_of_own_name(host, served.server.local_addr().ip());
        }
        let here = served.as_ref().map(|served| served.server.reachable_addr());
        // A name's address may come late, or be an earlier pod's at first.
        let is_elsewhere = role == Role::Connect && hosting == Hosting::ByAddress;
        let own_since = OwnSince { is_looked_for: is_elsewhere, ..OwnSince::default() };
        let has_become_own = || {
            let found =
                || resolve(&cluster.endpoint(), Deadline::after(ADDRESS_INTERVAL)).unwrap_or_default();
            own_since.look(|| !matches!(decide(cluster, (host, hosting), &found()), Ok(Role::Connect)))
        };
        let connected = connect(cluster, access.credentials(), here, replica, deadline, &has_become_own);
        let store = match connected {
            Err(error) if own_since.has_come() && error.is_aborted() && !replica.view().is_closing() => {
                tracing::debug!(%error, "the end point has become an address of this host");
                continue;
            }
            connected => Arc::new(connected?),
        };
        let listens_at = served.as_ref().map(|served| served.server.local_addr().ip());
        let store_address = listens_at.map(|listens_at| {
            let name = address_here(host, cluster.bind);
            StoreAddress { name, listens_at: listens_at.to_string() }
        });
        let tcp = Some(Arc::clone(&store));
        return Ok(RendezvousStore {
            store,
            served_elsewhere: served.is_none(),
            server: served,
            store_address,
            tcp,
        });
    }
}

/// The address at which the workers of the node that serves the launchers' store reach the store of a round: that of the end point,
/// unless it listens at another.
fn address_here(host: &str, bind: Option<IpAddr>) -> String {
    match bind {
        Some(bind) if !bind.is_unspecified() => bind.to_string(),
        Some(_) | None => host.to_owned(),
    }
}

/// Whether the end point has become an address of this host since this launcher began to connect to it.
#[derive(Default)]
struct OwnSince {
    is_looked_for: bool,
    next_look: Mutex<Option<Instant>>,
    has_come: AtomicBool,
}

impl OwnSince {
    /// Looks, now and then.
    fn look(&self, is_own_now: impl Fn() -> bool) -> bool {
        if !self.is_looked_for || self.has_come() {
            return self.has_come();
        }
        let now = Instant::now();
        let mut next_look = self.next_look.lock();
        if next_look.is_none_or(|next| next <= now) {
            *next_look = Some(now + ADDRESS_INTERVAL);
            self.has_come.store(is_own_now(), Ordering::Relaxed);
        }
        self.has_come()
    }

    fn has_come(&self) -> bool {
        self.has_come.load(Ordering::Relaxed)
    }
}

/// Whether this launcher serves the store.
fn decide(cluster: &Cluster, (host, hosting): (&str, Hosting), endpoint: &[SocketAddr]) -> Result<Role> {
    let endpoint: Vec<IpAddr> = endpoint.iter().map(SocketAddr::ip).collect();
    let (is_fixed, all_here) = (cluster.is_fixed(), cluster.is_all_here());
    let facts = Facts {
        hosting,
        host,
        endpoint: &endpoint,
        bind: cluster.bind,
        is_fixed,
        all_here,
        inner: &inner_bridges(),
    };
    who_serves(&facts, is_own)
}

/// Serves the store at `address`. None if another launcher of this host was first.
fn serve(
    cluster: &Cluster,
    access: &Access,
    address: SocketAddr,
    hosting: Hosting,
) -> Result<Option<Served>> {
    let claim = match Claim::take(&cluster.endpoint()) {
        // Any free port is nobody else's.
        _ if address.port() == 0 => None,
        Ok(None) if hosting == Hosting::ByAddress => return Ok(None),
        Ok(None) => {
            let cause = format!("another launcher of this host serves the store at {}", cluster.endpoint());
            return Err(Error::environment(cause)
                .in_operation("rendezvous of the launchers", None)
                .with_remedy("give each node its own --node-rank: node 0 alone serves the store; or does an earlier job still run?"));
        }
        Ok(claim) => claim,
        Err(error) => {
            tracing::debug!(%error, "the kernel has no name for the launchers' store");
            None
        }
    };
    let server = match cluster.bind {
        Some(_) => TcpStoreServer::bind_anywhere(address, access.clone()),
        None => TcpStoreServer::bind_for(address, access.clone()),
    };
    match server {
        Ok(server) => Ok(Some(Served { server, _claim: claim })),
        // Another launcher of this host was first, under another name.
        Err(error) if hosting == Hosting::ByAddress && error.is_address_in_use() => Ok(None),
        Err(error) => Err(error),
    }
}

/// An error if nodes may come and go, and the file in which they meet is on a disk of this host alone: a launcher on another host would
/// find another file there, and train in a world of its own.
fn refuse_own_disk(cluster: &Cluster, path: &Path) -> Result<()> {
    // A user who names the address of this host for the others knows that they find the file.
    if cluster.is_fixed() || cluster.local_addr.is_some() {
        return Ok(());
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let kind = statfs(folder).ok().and_then(|system| own_disk(u64::try_from(system.f_type).ok()?));
    let Some(kind) = kind else { return Ok(()) };
    let cause = format!(
        "the file {} is on a disk of this host ({kind}): with --nnodes MIN:MAX a node on another host would find another file there, and \
         train in a world of its own",
        path.display()
    );
    Err(Error::environment(cause).in_operation("rendezvous of the launchers", None).with_remedy(
        "put it on a disk that all nodes share; if all nodes are on this host, say so with --local-addr localhost; if this host exports the \
         disk to the others, give the address at which they reach it as --local-addr",
    ))
}

/// The name of a kind of file system that belongs to one host, by the kernel's number.
fn own_disk(kind: u64) -> Option<&'static str> {
    match kind {
        0xef53 => Some("ext4"),
        0x5846_5342 => Some("xfs"),
        0x9123_683e => Some("btrfs"),
        0x0102_1994 => Some("tmpfs"),
        0x794c_7630 => Some("overlay"),
        0x2fc1_2fc1 => Some("zfs"),
        0x8584_58f6 => Some("ramfs"),
        0xf2f5_2010 => Some("f2fs"),
        _ => None,
    }
}

fn connect(
    cluster: &Cluster,
    credentials: &Credentials,
    here: Option<SocketAddr>,
    replica: &Replica<MembershipState>,
    deadline: Deadline,
    has_become_own: &(dyn Fn() -> bool + Sync),
) -> Result<TcpStore> {
    let address = here.map_or_else(|| cluster.endpoint(), |address| address.to_string());
    // Two to read the log, one to write, and one whose end says that this launcher has ended. A launcher that serves the store needs
    // no more time for another.
    let connections = if here.is_some() { 1 } else { 4 };
    let goes_on = &|| !replica.view().is_closing() && !has_become_own();
    let silence = SILENCE_LIMIT.max(cluster.silence());
    let patience = Patience { silence, goes_on, connections };
    TcpStore::connect_patiently(&address, credentials, deadline, &patience)
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

/// The store of a round, at its own port.
pub(super) fn serve_round(
    cluster: &Cluster,
    access: Access,
    store_address: &StoreAddress,
) -> Result<TcpStoreServer> {
    match cluster.bind {
        Some(address) => TcpStoreServer::bind_anywhere(SocketAddr::new(address, 0), access),
        None => TcpStoreServer::bind_to(
            &host_port(&store_address.listens_at, 0),
            access,
            Deadline::after(RESOLVE_TIMEOUT),
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    use super::super::membership::Departure;
    use super::*;
    use crate::store::MemoryStore;

    /// A relay between clients and a store, which records their requests.
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
            node_rank: None,
            serves_store,
            process: None,
        };
        let mut handler = RendezvousHandler::start(
            &cluster,
            Access::default(),
            "job".to_owned(),
            move |serves| node(7, serves),
            settings,
        )
        .unwrap();
        let limit = Deadline::after(Duration::from_secs(20));
        while handler.look().0.is_none() {
            assert!(!limit.has_passed());
            std::thread::sleep(Duration::from_millis(1));
        }
        // It asks for the first entry, and waits.
        between.hears(b"log/0", limit);
        let store = TcpStore::connect(address, limit).unwrap();
        let store: SharedStore = Arc::new(PrefixStore::new("job", Arc::new(store)));
        assert!(!store.check(&["log/0"], limit).unwrap(), "it did not wait");

        let log = Log::<MembershipState>::new(store, Mac::none());
        log.append(&Entry::Join { node: node(1, true), settings }, limit).unwrap();
        let next = log.read(1, limit).unwrap();
        assert_eq!(next, crate::log::Read::Entry(Entry::Join { node: node(7, false), settings }));
    }

    #[test]
    fn a_panic_of_the_thread_is_told() {
        let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let cluster = Cluster::new(2, 2, "127.0.0.1", server.local_addr().port()).unwrap();
        let settings = Settings { min_nodes: 2, max_nodes: 2, max_restarts: 0 };
        let mut handler = RendezvousHandler::start(
            &cluster.hosting(Hosting::Connect),
            Access::default(),
            "job".to_owned(),
            |_| panic!("it knows no node"),
            settings,
        )
        .unwrap();
        let limit = Deadline::after(Duration::from_secs(20));
        let error = loop {
            if let Some(error) = handler.look().1.lost {
                break error;
            }
            assert!(!limit.has_passed(), "nobody has heard of it");
            std::thread::sleep(Duration::from_millis(1));
        };
        assert!(error.is_aborted() && error.to_string().contains("panicked"), "{error}");
    }

    #[test]
    fn whoever_is_given_up_leaves_no_key() {
        let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let (address, limit) = (server.local_addr(), Deadline::after(Duration::from_secs(60)));
        let store = TcpStore::connect(address, limit).unwrap();
        let store: SharedStore = Arc::new(PrefixStore::new("job", Arc::new(store)));
        let log = Log::<MembershipState>::new(Arc::clone(&store), Mac::none());
        let settings = Settings { min_nodes: 2, max_nodes: 3, max_restarts: 0 };
        let node = |id| Node {
            id: NodeId(id),
            host: "here".to_owned(),
            workers: 1,
            node_rank: None,
            serves_store: false,
            process: None,
        };
        store.add(&NodeId(1).heartbeat_key(), 1, limit).unwrap();
        log.append(&Entry::Join { node: node(1), settings }, limit).unwrap();
        let cluster = Cluster::new(2, 3, "127.0.0.1", address.port()).unwrap().hosting(Hosting::Connect);
        // Nobody is missed here.
        let cluster = cluster.keep_alive(Duration::from_secs(1), Some(3600));
        let mut handler = RendezvousHandler::start(
            &cluster,
            Access::default(),
            "job".to_owned(),
            move |_| node(7),
            settings,
        )
        .unwrap();
        let mut wait_until = |what: &dyn Fn(&View<MembershipState>) -> bool| {
            while !what(&handler.look().1) {
                assert!(!limit.has_passed());
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        wait_until(&|view| view.state.present().count() == 2);
        let key = NodeId(7).heartbeat_key();
        assert!(store.check(&[&key], limit).unwrap());
        let why = Departure::Silent(Duration::from_secs(1));
        log.append(&Entry::Left { node: NodeId(7), why }, limit).unwrap();
        wait_until(&View::is_given_up);
        drop(handler);
        while store.check(&[&key], limit).unwrap() {
            assert!(!limit.has_passed(), "its key has stayed");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn whoever_ends_before_it_has_joined_leaves_no_key() {
        let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let (address, limit) = (server.local_addr(), Deadline::after(Duration::from_secs(60)));
        let store = PrefixStore::new("job", Arc::new(TcpStore::connect(address, limit).unwrap()));
        let settings = Settings { min_nodes: 2, max_nodes: 2, max_restarts: 0 };
        let node = |_| Node {
            id: NodeId(7),
            host: "here".to_owned(),
            workers: 1,
            node_rank: None,
            serves_store: false,
            process: None,
        };
        let cluster = Cluster::new(2, 2, "127.0.0.1", address.port()).unwrap().hosting(Hosting::Connect);
        let handler =
            RendezvousHandler::start(&cluster, Access::default(), "job".to_owned(), node, settings).unwrap();
        let key = NodeId(7).heartbeat_key();
        let wait_until_it_is_there = |is_there: bool| {
            while store.check(&[&key], limit).unwrap() != is_there {
                assert!(!limit.has_passed(), "is its key there? {}", !is_there);
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        // Nobody has registered the job, so it waits.
        wait_until_it_is_there(true);
        drop(handler);
        wait_until_it_is_there(false);
    }

    #[test]
    fn launchers_that_come_and_go_without_end_keep_a_small_store() {
        const LAUNCHERS: u64 = 300;
        let limit = Deadline::after(Duration::from_secs(60));
        let store: SharedStore = Arc::new(MemoryStore::new());
        let replica = Arc::new(Replica::<MembershipState>::new(|_| ()));
        let log = Log::new(Arc::clone(&store), Mac::none());
        let mut first = Participant::start_at_first_entry(log, Arc::clone(&replica)).unwrap();
        let settings = Settings { min_nodes: 2, max_nodes: 3, max_restarts: 0 };
        let join = |id: NodeId| {
            let host = "here".to_owned();
            let node = Node { id, host, workers: 1, node_rank: None, serves_store: false, process: None };
            store.add(&id.heartbeat_key(), 1, limit).unwrap();
            Entry::Join { node, settings }
        };
        let id = NodeId(7);
        assert!(first.enter(id, id.heartbeat_key(), &join(id), limit).unwrap());
        let (interval, silence) = (Duration::from_millis(5), Duration::from_secs(1));
        first.watch(Heartbeats { interval, silence, must_be_answered: true }, |_, _| Ok(())).unwrap();
        for id in (100..100 + LAUNCHERS).map(NodeId) {
            first.append(&join(id), limit).unwrap();
            first.append(&Entry::Left { node: id, why: Departure::Signal(15) }, limit).unwrap();
        }
        // The entries since the last state, of which each two name one that has gone; the first entry, the base and its state, how far was
        // removed, and the heartbeats of the one that is there.
        while store.num_keys(limit).unwrap() > 110 {
            assert!(!limit.has_passed(), "the log has {} keys", store.num_keys(limit).unwrap());
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(store.check(&[&id.heartbeat_key()], limit).unwrap());
        assert!(replica.view().lost.is_none());
        first.close();
    }

    #[test]
    fn a_job_that_regroups_without_end_keeps_a_small_store_and_takes_newcomers() {
        const ROUNDS: u64 = 500;
        let limit = Deadline::after(Duration::from_secs(60));
        let store: SharedStore = Arc::new(MemoryStore::new());
        let log = |key: Option<&[u8; 32]>| Log::new(Arc::clone(&store), Mac::new(key, "job"));
        let start = |key| {
            let replica = Arc::new(Replica::<MembershipState>::new(|_| ()));
            (Participant::start_at_first_entry(log(key), Arc::clone(&replica)).unwrap(), replica)
        };
        let wait_until = |replica: &Replica<MembershipState>, round: u64| {
            let mut view = replica.view();
            while view.state.round() < round {
                assert!(!limit.has_passed(), "round {} of {round}", view.state.round());
                replica.wait_until(&mut view, limit.instant());
            }
        };
        let (mut first, replica) = start(Some(&[1; 32]));
        let settings = Settings { min_nodes: 1, max_nodes: 1, max_restarts: 0 };
        let id = NodeId(7);
        let node = Node {
            id,
            host: "here".to_owned(),
            workers: 1,
            node_rank: None,
            serves_store: false,
            process: None,
        };
        first.announce(&id.heartbeat_key(), limit).unwrap();
        let join = Entry::Join { node, settings };
        assert!(first.enter(id, id.heartbeat_key(), &join, limit).unwrap());
        let (interval, silence) = (Duration::from_millis(5), Duration::from_secs(1));
        first.watch(Heartbeats { interval, silence, must_be_answered: true }, |_, _| Ok(())).unwrap();
        for round in 0..ROUNDS {
            first.append(&Entry::Ended { round, node: id, succeeded: false }, limit).unwrap();
        }
        wait_until(&replica, ROUNDS);
        // The entries since the last state, which is soon that of the last hundred rounds; the first entry, the base and its state, how far was
        // removed, and heartbeats.
        while store.num_keys(limit).unwrap() > 70 {
            assert!(!limit.has_passed(), "the log has {} keys", store.num_keys(limit).unwrap());
            std::thread::sleep(Duration::from_millis(5));
        }
        let (newcomer, its) = start(Some(&[1; 32]));
        wait_until(&its, ROUNDS);
        assert_eq!(its.view().state, replica.view().state);
        newcomer.close();
        // Whoever has another key, or none, is told so.
        for key in [Some(&[2; 32]), None] {
            let (stranger, its) = start(key);
            let mut view = its.view();
            while view.lost.is_none() {
                assert!(!limit.has_passed(), "it has read {:?}", view.state);
                its.wait_until(&mut view, limit.instant());
            }
            let error = view.lost.clone().unwrap();
            drop(view);
            stranger.close();
            assert!(error.remedy().is_some_and(|remedy| remedy.contains("--job-key-file")), "{error}");
        }
        first.close();
    }

    #[test]
    fn a_store_that_is_slow_to_answer_is_waited_for() {
        let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let between = Between::listen();
        between.pass_to(server.local_addr(), Duration::from_secs(1));
        let cluster = Cluster::new(2, 2, "127.0.0.1", between.port()).unwrap();
        let deadline = Deadline::after(Duration::from_secs(20));
        let replica = Replica::new(|_| ());
        let store = connect(&cluster, Credentials::none(), None, &replica, deadline, &|| false).unwrap();
        assert_eq!(store.add("key", 1, deadline).unwrap(), 1);
    }

    #[test]
    fn a_job_that_nobody_has_begun_is_named() {
        let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let cluster = Cluster::new(2, 2, "127.0.0.1", server.local_addr().port()).unwrap();
        let deadline = Deadline::after(Duration::from_millis(20));
        let error = wait_for_host(&Replica::new(|_| ()), &cluster, deadline).unwrap_err();
        assert!(
            error.is_timeout() && error.to_string().contains("no launcher has registered this job"),
            "{error}"
        );
        assert!(error.remedy().unwrap().contains("--rdzv-id"));
    }
}
