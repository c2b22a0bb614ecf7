//! The store in which the launchers meet: serves it here, or reaches the one of another launcher, in etcd or in a file.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use phalanx_sys::folder::own_disk;

use super::membership::MembershipState;
use super::who_serves::{Claim, Facts, Role, who_serves};
use crate::cluster::{Cluster, Hosting, RendezvousBackend};
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
#[cfg(feature = "etcd")]
use crate::interfaces::is_every_hosts;
use crate::interfaces::{inner_bridges, is_own};
use crate::log::Replica;
use crate::notice::while_waiting;
use crate::own_address::own_address;
#[cfg(feature = "etcd")]
use crate::store::EtcdStore;
use crate::store::{
    Access, FileStore, Patience, SharedStore, TcpStore, TcpStoreServer, addresses_to_serve, host_port,
    resolve, warn_of_own_name,
};

/// How long the system may take to look up an address.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a launcher that tries to connect looks whether the end point has become an address of its own host.
const ADDRESS_INTERVAL: Duration = Duration::from_secs(1);

/// How long a listening program may take to answer as a store does, if launchers may not be silent for longer.
const SILENCE_LIMIT: Duration = Duration::from_secs(15);

/// Where this node can serve a store for the workers of all.
#[derive(Clone, Debug)]
pub(super) struct StoreAddress {
    /// The host name or address at which the others reach it.
    pub(super) name: String,
    /// Its own address, or its name.
    listens_at: String,
}

/// The launchers' store, served here.
pub(super) struct Served {
    pub(super) server: TcpStoreServer,
    /// No other launcher of this host serves it. None where the kernel has no such names.
    pub(super) _claim: Option<Claim>,
}

/// The launchers' common store.
pub(super) struct RendezvousStore {
    pub(super) store: SharedStore,
    /// The server, if it is served here.
    pub(super) server: Option<Served>,
    pub(super) store_address: Option<StoreAddress>,
    /// Whether another launcher serves it.
    pub(super) served_elsewhere: bool,
    /// The same store, if a launcher serves it: it notices when this one has ended.
    pub(super) tcp: Option<Arc<TcpStore>>,
}

/// Opens the launchers' common store.
#[cfg_attr(not(feature = "etcd"), expect(unused_variables, reason = "a file is one job's"))]
pub(super) fn open_store(
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
            let what = || format!("this launcher waits for an answer of etcd at {endpoints}");
            let store = while_waiting(what, || EtcdStore::open(endpoints, job, deadline))?;
            // The etcd of this host is reached at the loopback, this host is not.
            let address = store.local_address(deadline).filter(|address| !is_every_hosts(*address));
            (Arc::new(store), address)
        }
        RendezvousBackend::File(path) => {
            refuse_own_disk(cluster, path)?;
            let silence = cluster.silence();
            let what = || {
                format!(
                    "the file {} is there already: this launcher looks for {:.0} s whether others of this job write to it. If none does, and \
                     it is a store of this version, an earlier job has left it, and it is replaced",
                    path.display(),
                    silence.as_secs_f64()
                )
            };
            let store = while_waiting(what, || FileStore::open_or_create(path, silence, deadline))?;
            (Arc::new(store), None)
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
    let Some(kind) = own_disk(folder) else { return Ok(()) };
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

pub(super) fn connect(
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
    let patience = Patience { silence, goes_on, connections, reports: true };
    TcpStore::connect_patiently(&address, credentials, deadline, &patience)
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
