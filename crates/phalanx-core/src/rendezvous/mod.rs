//! How ranks find each other: through a store, at the place that the launcher or a URL gives.
//!
//! [`from_env`] reads the launcher's variables, [`from_url`] takes `env://`, `tcp://host:port` or `file:///path`,
//! [`from_store`] takes a store. All return once every rank has arrived, or with an error on each rank that did: it names
//! the ranks that are missing, that came twice, or that expect another world size.
//!
//! A group needs the store for start-up only. Rank 0, which hosts it unless the launcher does, serves it until the
//! other ranks have closed their connections, but no longer than [`GRACE`] after its own [`KeepAlive`] was dropped.
//!
//! The same processes may meet again at the same place, as often as each other: where rank 0 hosts the store, when the last group has
//! been dropped, and under a launcher that hosts it also before.

mod arrival;
mod env;
mod file;
mod hosts;
mod mpirun;
mod pmi;
mod presence;
mod start;
mod store;
mod tcp;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use self::arrival::{Arrived, Rounds};
use self::presence::{MOST_MARKED, Presence};
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::env::{LaunchEnv, doubt, refuse_fixed_world, variable};
use crate::error::{Error, Result};
use crate::host;
use crate::interfaces::{is_every_hosts, outward};
use crate::notice::warn;
use crate::rank::{Generation, Rank};
use crate::store::{FileStore, MemoryStore, SharedStore, TcpStore, TcpStoreServer};
use crate::transport;
use crate::world_size::WorldSize;

/// How long rank 0, when it is done, serves the store for ranks that still use it.
pub const GRACE: Duration = Duration::from_secs(5);

/// Where a store of [`from_store`] has the keys of its ranks' first start, and below `group` those of their group.
pub(crate) const FIRST_START: &str = "phalanx/0";

/// The keys of a start that `rank` writes, and those that all write.
pub(crate) fn keys_of(rank: Rank) -> [String; 4] {
    [format!("rank/{rank}"), "world".to_owned(), arrival::HOSTS.to_owned(), "verdict".to_owned()]
}

/// How long rank 0, when it is done, waits for its own store's answer.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(1);

/// The result of a rendezvous for one rank: a complete world.
pub struct Rendezvous {
    /// The store: the part of it that belongs to this world and generation alone.
    pub store: SharedStore,
    /// This process's rank.
    pub rank: Rank,
    /// The number of processes.
    pub world_size: WorldSize,
    /// Its local rank.
    pub local_rank: u32,
    /// The number of processes on its host.
    pub local_world_size: u32,
    /// The generation: how often the job was restarted.
    pub generation: Generation,
    /// The address of this host at which the other ranks reach it.
    pub interface: IpAddr,
    /// The credentials with which its processes authenticate each other, if the job has them.
    pub credentials: Credentials,
    /// The random number that distinguishes the first group's connections from those of all other groups, if the ranks have agreed
    /// on one while they met. None: rank 0 draws it when the group is made, which takes one round trip more. Each
    /// group needs its own: set None in a copy with another store.
    pub group_number: Option<[u8; 16]>,
    /// Keeps the store's server, or the connection to it, alive. Keep it as long as the store is in use.
    pub keep_alive: KeepAlive,
}

impl fmt::Debug for Rendezvous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rendezvous")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .field("local_rank", &self.local_rank)
            .field("local_world_size", &self.local_world_size)
            .field("generation", &self.generation)
            .field("interface", &self.interface)
            .finish_non_exhaustive()
    }
}

/// Meets the other ranks at the end point in the launcher's variables; a world of one if there are none.
///
/// # Errors
/// If the variables contradict each other or are incomplete; if the job is [elastic](crate::elastic); if the job's key or certificates cannot be read;
/// if not all ranks arrive within `timeout`: the error names those that are missing, or why the store cannot be reached.
pub fn from_env(timeout: Duration) -> Result<Rendezvous> {
    refuse_fixed_world()?;
    match read_env()? {
        Some(env) => {
            env::join(&env, Credentials::from_env()?, &arrival::of_process()?, Deadline::after(timeout))
        }
        None => Ok(alone()),
    }
}

/// Meets the other ranks at `url`: `env://`, `tcp://host:port` (rank 0 serves there) or `file:///path` (on a file
/// system that all ranks share).
///
/// `env://` takes rank and world size from the launcher's variables if they are not given here: a program that gives both needs only `MASTER_ADDR` and
/// `MASTER_PORT`. The other two need them. The job's credentials are those that [`Credentials::from_env`] finds.
///
/// ```
/// use std::time::Duration;
/// use phalanx::{Rank, WorldSize, rendezvous};
///
/// let url = "tcp://127.0.0.1:29500";
/// let world = rendezvous::from_url(url, Some(Rank::MAIN), Some(WorldSize::ONE), Duration::from_secs(5))?;
/// assert_eq!(world.world_size, WorldSize::ONE);
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// # Errors
/// If `url` has another scheme, or rank and world size are missing; otherwise as [`from_env`].
pub fn from_url(
    url: &str,
    rank: Option<Rank>,
    world_size: Option<WorldSize>,
    timeout: Duration,
) -> Result<Rendezvous> {
    let deadline = Deadline::after(timeout);
    let me = arrival::of_process()?;
    let given = |rank, world_size| {
        Ok::<_, Error>(RankConfig {
            credentials: Credentials::from_env()?,
            ..RankConfig::given(url, rank, world_size)?
        })
    };
    match Url::parse(url)? {
        Url::Env => match read_env_as(rank, world_size)? {
            None => without_launcher(rank, world_size),
            Some(env) => {
                refuse_fixed_world()?;
                env::join(&env, Credentials::from_env()?, &me, deadline)
            }
        },
        Url::Tcp(address) => {
            let host = tcp::Host::Rank0 { bind: None };
            tcp::join(&address, host, &given(rank, world_size)?, &me, deadline)
        }
        Url::File(path) => file::join(&path, &given(rank, world_size)?, &me, deadline),
    }
}

/// Meets the other ranks in a `store` of the program's own, or of another library. Each world needs keys of its own: see
/// [`PrefixStore`](crate::store::PrefixStore). The job's credentials are those that [`Credentials::from_env`] finds; the
/// store does not check them, but the ranks do when they connect.
///
/// ```
/// use std::{sync::Arc, time::Duration};
/// use phalanx::{GroupOptions, ProcessGroup, ReduceOp, WorldSize, rendezvous, store::MemoryStore};
///
/// let (store, world) = (Arc::new(MemoryStore::new()), WorldSize::new(2)?);
/// std::thread::scope(|scope| {
///     for rank in world.ranks() {
///         let store = store.clone();
///         scope.spawn(move || {
///             let met = rendezvous::from_store(store, rank, world, Duration::from_secs(20))?;
///             let group = ProcessGroup::join(met, GroupOptions::default())?;
///             let mut ranks = [i64::from(rank.get())];
///             group.all_reduce(&mut ranks, ReduceOp::Sum)?;
///             assert_eq!(ranks, [1]);
///             Ok::<(), phalanx::Error>(())
///         });
///     }
/// });
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// # Errors
/// As [`from_url`], and what the store returns.
pub fn from_store(
    store: SharedStore,
    rank: Rank,
    world_size: WorldSize,
    timeout: Duration,
) -> Result<Rendezvous> {
    given(store, (rank, world_size), store::Starts::One, timeout)
}

/// As [`from_store`], in a store that may have the keys of the same ranks' earlier starts: torchrun's agent keeps its store when it
/// starts them again. Rank 0 names the start.
#[doc(hidden)]
pub fn from_kept_store(
    store: SharedStore,
    rank: Rank,
    world_size: WorldSize,
    timeout: Duration,
) -> Result<Rendezvous> {
    given(store, (rank, world_size), store::Starts::Several, timeout)
}

/// Meets in a store that the program has, as the rank that it says.
fn given(
    store: SharedStore,
    (rank, world_size): (Rank, WorldSize),
    starts: store::Starts,
    timeout: Duration,
) -> Result<Rendezvous> {
    let credentials = Credentials::from_env()?;
    let config = RankConfig { credentials, ..RankConfig::given("the store", Some(rank), Some(world_size))? };
    store::join(&store, &config, starts, &arrival::of_process()?, Deadline::after(timeout))
}

/// A world of one, which needs no launcher.
pub fn alone() -> Rendezvous {
    let store: SharedStore = Arc::new(MemoryStore::new());
    Rendezvous {
        store,
        rank: Rank::MAIN,
        world_size: WorldSize::ONE,
        local_rank: 0,
        local_world_size: 1,
        generation: Generation(0),
        interface: Ipv4Addr::LOCALHOST.into(),
        credentials: Credentials::default(),
        group_number: None,
        keep_alive: KeepAlive(Held::Nothing),
    }
}

/// The end point in a URL.
#[derive(Debug, PartialEq, Eq)]
enum Url {
    Env,
    Tcp(String),
    File(std::path::PathBuf),
}

impl Url {
    fn parse(url: &str) -> Result<Self> {
        let bad = |why: &str| {
            Error::invalid_argument(format!("cannot meet at {url:?}: {why}"))
                .with_remedy("use env://, tcp://host:port or file:///path")
        };
        match url.split_once("://") {
            Some(("env", "")) => Ok(Self::Env),
            Some(("tcp", address)) => {
                let (host, port) = address.rsplit_once(':').ok_or_else(|| bad("it has no port"))?;
                if host.is_empty() {
                    return Err(bad("it has no host"));
                }
                match port.parse::<u16>() {
                    Ok(port) if port > 0 => Ok(Self::Tcp(address.to_owned())),
                    _ => Err(bad("its port is not a number from 1 to 65535")),
                }
            }
            Some(("file", path)) if path.starts_with('/') && path.len() > 1 => Ok(Self::File(path.into())),
            Some(("file", _)) => Err(bad("its path is not absolute")),
            _ => Err(bad("unknown scheme")),
        }
    }
}

/// What a rank knows before the rendezvous.
#[derive(Clone, Debug)]
struct RankConfig {
    rank: Rank,
    world_size: WorldSize,
    /// The rank on the host and the number of ranks there, if the launcher has set them.
    local: Option<(u32, u32)>,
    generation: Generation,
    /// The prefix of this generation of the job in a store that may outlive it.
    scope: String,
    credentials: Credentials,
}

impl RankConfig {
    fn given(url: &str, rank: Option<Rank>, world_size: Option<WorldSize>) -> Result<Self> {
        let (Some(rank), Some(world_size)) = (rank, world_size) else {
            return Err(Error::invalid_argument(format!("{url} needs a rank and a world size"))
                .with_remedy("pass both, or use env:// under a launcher"));
        };
        let rank = world_size.rank(rank.get())?;
        let credentials = Credentials::default();
        Ok(Self {
            rank,
            world_size,
            local: None,
            generation: Generation(0),
            scope: "phalanx".into(),
            credentials,
        })
    }

    /// The world of one, in this generation.
    fn alone(&self) -> Rendezvous {
        Rendezvous { generation: self.generation, ..alone() }
    }

    /// The world whose ranks have all arrived. This rank reaches the store from `interface`.
    fn met(
        &self,
        arrived: Arrived,
        interface: IpAddr,
        keep_alive: KeepAlive,
        deadline: Deadline,
    ) -> Result<Rendezvous> {
        let placed = self.place(&arrived, interface, deadline);
        // The others have met too, and wait for this rank in the group's store; where it is this rank's own, `keep_alive` serves it meanwhile.
        let ((local_rank, local_world_size), interface) = placed.map_err(|error| {
            transport::report_failed_start(&*arrived.store, self.rank, &host::name(), error)
        })?;
        Ok(Rendezvous {
            store: arrived.store,
            rank: self.rank,
            world_size: self.world_size,
            local_rank,
            local_world_size,
            generation: self.generation,
            interface,
            credentials: self.credentials.clone(),
            group_number: Some(arrived.group_number),
            keep_alive,
        })
    }

    /// The local rank and the number of ranks on this host, and the address at which the others reach this rank.
    fn place(
        &self,
        arrived: &Arrived,
        interface: IpAddr,
        deadline: Deadline,
    ) -> Result<((u32, u32), IpAddr)> {
        // Where all ranks are on this host, no other host has to reach this one.
        let all_here = self.local.is_some_and(|(_, size)| size == self.world_size.get());
        let named = if all_here { None } else { interface_named()? };
        let is_enough = |(_, size): &(u32, u32)| {
            named.is_some() || !is_every_hosts(interface) || *size == self.world_size.get()
        };
        match self.local.filter(is_enough) {
            Some(local) => Ok((local, named.unwrap_or(interface))),
            None => {
                let hosts = arrived.hosts(deadline)?;
                let local = self.local.unwrap_or_else(|| hosts.local(self.rank));
                let reachable = named.map_or_else(|| hosts.reachable(self.rank, interface), Ok)?;
                Ok((local, reachable))
            }
        }
    }
}

/// The launcher's variables. Warns if there seems to be a launcher that is not read.
fn read_env() -> Result<Option<LaunchEnv>> {
    read_env_as(None, None)
}

/// The same for a program that may give its rank and the world size.
fn read_env_as(rank: Option<Rank>, world_size: Option<WorldSize>) -> Result<Option<LaunchEnv>> {
    let env = launched(variable, rank, world_size)?;
    if rank.is_none()
        && world_size.is_none()
        && let Some(doubt) = doubt(env.as_ref())
    {
        warn(doubt);
    }
    Ok(env)
}

/// The launcher's variables, as `lookup` has them, with the rank and the world size that the program gives.
fn launched(
    lookup: impl Fn(&str) -> Option<String>,
    rank: Option<Rank>,
    world_size: Option<WorldSize>,
) -> Result<Option<LaunchEnv>> {
    let given = |name: &str| match name {
        "RANK" => rank.map(|rank| rank.to_string()),
        "WORLD_SIZE" => world_size.map(|size| size.to_string()),
        _ => None,
    };
    let mut env = match LaunchEnv::from_lookup(&lookup) {
        // They may stand for variables that are not set.
        Err(_) if rank.is_some() || world_size.is_some() => {
            let set = |name: &str| lookup(name).filter(|value| !value.trim().is_empty());
            LaunchEnv::from_lookup(|name| set(name).or_else(|| given(name)))?
        }
        read => read?,
    };
    if let Some(env) = &mut env {
        env.world_size = world_size.unwrap_or(env.world_size);
        env.rank = env.world_size.rank(rank.unwrap_or(env.rank).get())?;
    }
    Ok(env)
}

/// The world of one, for a program that gives this rank and world size where no launcher has set anything.
fn without_launcher(rank: Option<Rank>, world_size: Option<WorldSize>) -> Result<Rendezvous> {
    let lacking = match (rank, world_size) {
        (Some(_), None) => "a world size beside the rank, and WORLD_SIZE is not set",
        (_, Some(size)) if size != WorldSize::ONE => "MASTER_ADDR and MASTER_PORT, which are not set",
        (rank, _) => return WorldSize::ONE.rank(rank.unwrap_or(Rank::MAIN).get()).map(|_| alone()),
    };
    Err(Error::environment(format!("env:// needs {lacking}"))
        .with_remedy("start the program with `phalanx run` or torchrun, or set them for every rank"))
}

/// The address of the interface that the user names. The loopback is none at which others reach this host, and is taken anyway where all
/// are on one.
///
/// # Errors
/// If this host has no such interface with an address, or the kernel does not list its addresses.
#[doc(hidden)]
pub fn interface_named() -> Result<Option<IpAddr>> {
    let address = crate::env::interface().map(|named| outward(Some(named), Vec::new())).transpose()?;
    Ok(address.filter(|address| !is_every_hosts(*address)))
}

/// Keeps alive what must outlive start-up; see [`Rendezvous::keep_alive`].
///
/// Dropping it closes this rank's connections to the store. On the rank that serves the store it then waits, at most
/// [`GRACE`], until the other ranks have closed theirs.
#[derive(Debug)]
pub struct KeepAlive(Held);

#[derive(Debug)]
enum Held {
    Nothing,
    Client { client: Arc<TcpStore>, presence: Option<Presence> },
    Host { client: Arc<TcpStore>, server: Option<TcpStoreServer>, rounds: Option<Rounds> },
    File { _store: Arc<FileStore> },
}

impl KeepAlive {
    /// Whether the store through which these ranks connect says which of them have left. To be asked before the presence is taken.
    pub(crate) fn marks_left(&self, world: WorldSize) -> bool {
        match &self.0 {
            Held::Client { presence, .. } => presence.is_some(),
            Held::Host { .. } => world.get() <= MOST_MARKED,
            Held::Nothing | Held::File { .. } => false,
        }
    }

    /// What is held until this rank is connected with all others.
    pub(crate) fn take_presence(&mut self) -> Option<Presence> {
        match &mut self.0 {
            Held::Client { presence, .. } => presence.take(),
            Held::Nothing | Held::Host { .. } | Held::File { .. } => None,
        }
    }
}

impl Drop for KeepAlive {
    fn drop(&mut self) {
        match &mut self.0 {
            Held::Nothing | Held::File { .. } => {}
            Held::Client { client, .. } => client.close_idle(),
            Held::Host { client, server, rounds } => {
                // A rank that panics does not wait: the sooner the others notice, the better. A process that was forked from rank 0's is not rank 0.
                let is_own = server.as_ref().is_some_and(TcpStoreServer::is_own);
                let waits = is_own && !std::thread::panicking();
                if let Some(rounds) = rounds.take().filter(|_| waits) {
                    // Ranks that are to meet this one again may be here already. If they cannot be told, they lose their connection.
                    let _ = rounds.end(&**client, Deadline::after(FAREWELL_TIMEOUT));
                }
                client.close_idle();
                if let Some(server) = server.take()
                    && waits
                {
                    server.drain(Deadline::after(GRACE));
                }
            }
        }
    }
}

/// For `phalanx::fuzzing`: entries in the store, and URLs.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> bool {
    let is_url = std::str::from_utf8(bytes).is_ok_and(|text| Url::parse(text).is_ok());
    arrival::fuzz(bytes) || is_url
}

#[cfg(test)]
mod tests;
