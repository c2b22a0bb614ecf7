//! Runs all ranks of a group as threads of one process, for tests.

#[cfg(test)]
pub(crate) mod descriptors;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::group::{Backend, GroupConfig, Identity, LocalRank, ProcessGroup};
use crate::group::{TransportOptions, connect};
use crate::health::Heartbeat;
use crate::random;
use crate::rank::{Generation, Rank};
use crate::store::{MemoryStore, SharedStore};
use crate::trace::Trace;
use crate::transport::{MeshConfig, TransportKind};
use crate::wire::hello::JobId;
use crate::world_size::WorldSize;

/// The transport between the ranks of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fabric {
    /// Mailboxes in memory.
    InProcess,
    /// TCP over loopback.
    Tcp,
    /// Shared memory among all.
    SharedMemory,
    /// TCP, with shared memory among the lower and among the upper half of the ranks. The connections are those between hosts.
    TwoHosts,
}

impl Fabric {
    /// All transports; tests run on each.
    pub const ALL: [Self; 4] = [Self::InProcess, Self::Tcp, Self::SharedMemory, Self::TwoHosts];
}

/// Runs `rank` once for each rank of a world of `world`, each on its own thread. Returns their results, by
/// rank. If a rank panics, so does the caller; and if a rank leaves the group by a drop, and learns then that others have made
/// other calls, which no call has returned.
///
/// ```
/// use phalanx::testing::{Fabric, run};
/// let ranks = run(3, Fabric::Tcp, |group| group.barrier().map(|()| group.rank().get()).unwrap());
/// assert_eq!(ranks, [0, 1, 2]);
/// ```
///
/// # Panics
/// If the world cannot be built, and as above.
pub fn run<R: Send>(world: u32, fabric: Fabric, rank: impl Fn(ProcessGroup) -> R + Sync) -> Vec<R> {
    run_with(world, fabric, Credentials::none(), rank)
}

/// [`run`], with these credentials on connections between ranks.
///
/// # Panics
/// If the world cannot be built.
#[allow(clippy::panic, reason = "it fails a test")]
pub fn run_with<R: Send>(
    world: u32,
    fabric: Fabric,
    credentials: &Credentials,
    rank: impl Fn(ProcessGroup) -> R + Sync,
) -> Vec<R> {
    let groups = match groups_with(world, fabric, credentials) {
        Ok(groups) => groups,
        Err(error) => panic!("a world of {world} over {fabric:?}: {error}"),
    };
    let ends: Vec<_> = groups.iter().map(ProcessGroup::health).collect();
    let outcomes = std::thread::scope(|scope| {
        let rank = &rank;
        let ranks: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || rank(group))).collect();
        let outcomes = ranks.into_iter().map(|rank| rank.join());
        outcomes.map(|outcome| outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    match ends.iter().find_map(|end| end.unreturned()) {
        Some(error) => panic!("{error}"),
        None => outcomes,
    }
}

/// The groups of all ranks, by rank.
pub fn groups(world: u32, fabric: Fabric) -> Result<Vec<ProcessGroup>> {
    groups_with(world, fabric, Credentials::none())
}

fn groups_with(world: u32, fabric: Fabric, credentials: &Credentials) -> Result<Vec<ProcessGroup>> {
    let world = WorldSize::new(world)?;
    let kind = match fabric {
        Fabric::InProcess => return ProcessGroup::in_process(world),
        Fabric::Tcp => Some(TransportKind::Tcp),
        Fabric::SharedMemory => Some(TransportKind::SharedMemory),
        Fabric::TwoHosts => None,
    };
    let host =
        |rank: Rank| if rank.index() < world.count().div_ceil(2) { "lower half" } else { "upper half" };
    let options = |rank| TransportOptions {
        kind,
        host: kind.is_none().then(|| host(rank)),
        ..TransportOptions::default()
    };
    let options: Vec<_> = world.ranks().map(options).collect();
    groups_of(&options, credentials)
}

/// The groups of ranks with these options, by rank.
pub(crate) fn groups_of(
    options: &[TransportOptions<'_>],
    credentials: &Credentials,
) -> Result<Vec<ProcessGroup>> {
    let store = Arc::new(MemoryStore::new());
    let world = WorldSize::new(options.len() as u32)?;
    // As a rendezvous gives one, from which groups of some of the ranks have theirs.
    let number = random::bytes()?;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = world
            .ranks()
            .zip(options)
            .map(|(rank, options)| (rank, *options, store.clone()))
            .map(|(rank, options, store)| {
                scope.spawn(move || join(store, (rank, world), number, options, credentials))
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

fn join(
    store: SharedStore,
    (rank, world): (Rank, WorldSize),
    number: JobId,
    options: TransportOptions<'_>,
    credentials: &Credentials,
) -> Result<ProcessGroup> {
    // A connection to another address than its own is one to another host.
    let address = if options.host.is_some() { Ipv4Addr::new(127, 0, 0, 2) } else { Ipv4Addr::LOCALHOST };
    let (interface, heartbeat) = (IpAddr::V4(address), Heartbeat::default());
    let generation = Generation::default();
    let config = MeshConfig {
        store: &*store,
        rank,
        world,
        generation,
        interface,
        credentials,
        heartbeat,
        number: Some(number),
        tells_process: false,
        marks_left: false,
        watch: &|| Ok(()),
    };
    let connected = connect(&config, options, Deadline::after(Duration::from_secs(20)))?;
    let (transport, host_id) = (options.kind, options.host.map(str::to_owned));
    let credentials = credentials.clone();
    let backend = Backend::Mesh { store, interface, transport, host_id, heartbeat, credentials };
    let local = LocalRank { rank: rank.get(), world_size: 1 };
    let config = GroupConfig { number: Some(number), ..GroupConfig::new(backend, local, generation) };
    ProcessGroup::new(Identity { rank, world, trace: Trace::default(), config }, connected)
}
