//! The configuration of a group, from which its sub-groups are made.

use std::collections::{HashMap, VecDeque};
use std::mem;
use std::net::IpAddr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::LocalRank;
use super::connect::{Connected, TransportOptions, connect_among, connect_in_process};
use super::connect_part::{Part, connect_part, number_of};
use super::family::Family;
use crate::collective::Tuning;
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::domain::Partition;
use crate::error::{Error, Result};
use crate::health::Heartbeat;
use crate::interrupt;
use crate::rank::{Generation, Rank};
use crate::store::{PrefixStore, SharedStore};
use crate::transport::tcp::SilentHosts;
use crate::transport::{MeshConfig, TransportKind};
use crate::wire::hello::JobId;
use crate::world_size::WorldSize;

/// How often a thread that waits for the others of a new group looks whether they can still come.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The configuration with which a group was made, and with which its sub-groups are made.
#[derive(Clone)]
pub(crate) struct GroupConfig {
    pub backend: Backend,
    pub local: LocalRank,
    pub generation: Generation,
    /// The table by which the group and its sub-groups choose algorithms.
    pub tuning: Tuning,
    /// Kept alive as long as the group and its sub-groups, such as the store's server.
    pub _keep_alive: Arc<dyn Send + Sync>,
    /// The ranks in the first group, by rank in this one; None if this is the first.
    pub members: Option<Arc<[Rank]>>,
    /// The number of calls of this rank on the group and its sub-groups.
    pub calls: Arc<AtomicU64>,
    /// This rank's groups that were made from the same first group.
    pub family: Arc<Family>,
    /// The last groups of which this rank is a member that were made by `ProcessGroup::part`: where they have met, and this rank in them.
    pub parts: Arc<Mutex<VecDeque<(SharedStore, Rank)>>>,
    /// The hosts for which none of these groups waits any more when it ends.
    pub silent_hosts: Arc<SilentHosts>,
    /// Whether the program calls it, and not a thread of this crate or of an adapter.
    pub is_programs: bool,
    /// The number of its connections, if it is known before they are made.
    pub number: Option<JobId>,
    /// Whether it is a sub-group, of which no [part](Self::part) is made.
    pub is_subgroup: bool,
}

/// How the ranks of a group are connected.
#[derive(Clone)]
pub(crate) enum Backend {
    /// The ranks are threads of one process.
    Process { pending: Arc<PendingGroups>, scope: String },
    /// The ranks are processes, which have met at a store.
    Mesh {
        /// The prefix of the store for this group.
        store: SharedStore,
        interface: IpAddr,
        /// The configured transport; `None` chooses one.
        transport: Option<TransportKind>,
        host_id: Option<String>,
        heartbeat: Heartbeat,
        credentials: Credentials,
    },
}

/// Groups of threads of one process, until all their ranks have come for their connections.
#[derive(Default)]
pub(crate) struct PendingGroups {
    groups: Mutex<HashMap<String, PendingGroup>>,
    /// All ranks of a group have come, or one of them waits no longer.
    changed: Condvar,
}

/// A group of which a rank has not come yet.
struct PendingGroup {
    /// The connections of the ranks that have not come.
    parts: Vec<Option<Connected>>,
    /// Whether all have come, or why they cannot any more.
    outcome: Arc<OnceLock<Result<()>>>,
}

impl PendingGroup {
    fn of(world: WorldSize) -> Self {
        Self { parts: connect_in_process(world).into_iter().map(Some).collect(), outcome: Arc::default() }
    }
}

impl PendingGroups {
    /// The connections of `rank`, when all ranks have come. A rank that went on alone would wait in the group's first
    /// collective, and would not hear there that another one does not come. An error of `watch` ends the wait.
    fn take(
        &self,
        scope: &str,
        (rank, world): (Rank, WorldSize),
        watch: &(dyn Fn() -> Result<()> + Sync),
        deadline: Deadline,
    ) -> Result<Connected> {
        let mut groups = self.groups.lock();
        let group = groups.entry(scope.to_owned()).or_insert_with(|| PendingGroup::of(world));
        let outcome = group.outcome.clone();
        if let Some(Err(cause)) = outcome.get() {
            return Err(cause.clone());
        }
        let part = group.parts.get_mut(rank.index()).and_then(Option::take);
        let part = part.ok_or_else(|| Error::mismatch(format!("rank {rank} of {scope} was taken twice")))?;
        if group.parts.iter().all(Option::is_none) {
            let _ = outcome.set(Ok(()));
            groups.remove(scope);
            drop(groups);
            self.changed.notify_all();
            return Ok(part);
        }
        loop {
            if let Some(outcome) = outcome.get() {
                drop(groups);
                return outcome.clone().map(|()| part);
            }
            // Both may run code of the program, or wait for others.
            let (checked, watched) = MutexGuard::unlocked(&mut groups, || (interrupt::check(), watch()));
            if outcome.get().is_some() {
                let Err(error) = checked else { continue };
                drop(groups);
                // The others hear in the group's first collective that this rank has left.
                return Err(error);
            }
            let missing = groups.get(scope).and_then(|group| group.parts.iter().position(Option::is_some));
            let missing = Rank::new(missing.unwrap_or_default() as u32);
            let late = || {
                Error::timeout(format!("rank {missing} of the new group has not come in time"))
                    .with_peer(missing)
                    .with_remedy(
                        "does each rank make the same calls? A longer time-out can be set on the group",
                    )
            };
            let own = checked.err().or_else(|| watched.clone().err());
            if let Some(error) = own.or_else(|| deadline.has_passed().then(late)) {
                // All ranks find what `watch` finds, and blame no rank for it.
                let told = watched.err().unwrap_or_else(|| {
                    let told = format!(
                        "rank {rank} does not wait for the others of the new group any more: {error}"
                    );
                    Error::aborted(told).with_peer(rank)
                });
                let _ = outcome.set(Err(told));
                let rest = groups.get_mut(scope).map(|group| mem::take(&mut group.parts));
                drop(groups);
                self.changed.notify_all();
                drop(rest);
                return Err(error);
            }
            let _ = self
                .changed
                .wait_for(&mut groups, interrupt::at_most(deadline.remaining().min(POLL_INTERVAL)));
        }
    }
}

impl Backend {
    /// For threads of one process that have no group yet.
    pub(crate) fn process() -> Self {
        Self::Process { pending: Arc::default(), scope: "groups".to_owned() }
    }

    /// The backend of the sub-group `name`.
    fn subgroup(&self, name: &str) -> Self {
        match self {
            Self::Process { pending, scope } => {
                Self::Process { pending: pending.clone(), scope: format!("{scope}/{name}") }
            }
            Self::Mesh { store, interface, transport, host_id, heartbeat, credentials } => Self::Mesh {
                store: Arc::new(PrefixStore::new(name, store.clone())),
                interface: *interface,
                transport: *transport,
                host_id: host_id.clone(),
                heartbeat: *heartbeat,
                credentials: credentials.clone(),
            },
        }
    }
}

impl GroupConfig {
    /// The configuration of a first group, with the default tuning.
    pub(crate) fn new(backend: Backend, local: LocalRank, generation: Generation) -> Self {
        Self {
            backend,
            local,
            generation,
            tuning: Tuning::default(),
            _keep_alive: Arc::new(()),
            members: None,
            calls: Arc::default(),
            family: Arc::default(),
            parts: Arc::default(),
            silent_hosts: Arc::default(),
            is_programs: true,
            number: None,
            is_subgroup: false,
        }
    }

    /// The rank in the first group of this group's `rank`.
    pub(super) fn global(&self, rank: Rank) -> Rank {
        rank.global(self.members.as_deref())
    }

    /// The configuration of the sub-group `name` with these `members` of this group.
    pub(super) fn subgroup(&self, name: &str, members: &[Rank]) -> Self {
        let members = members.iter().map(|rank| self.global(*rank)).collect();
        // No part has such a name: the ranks need not ask the store for what rank 0 has drawn, which takes a round trip.
        let number = self.number.as_ref().map(|number| number_of(number, &format!("sub-group {name}")));
        let backend = self.backend.subgroup(name);
        Self { backend, members: Some(members), number, is_subgroup: true, ..self.clone() }
    }

    /// The configuration of the group `name` of these `members` of this group, which meet in `store`. None if this group's number is not known,
    /// if it is a sub-group, or if its ranks are no processes.
    pub(super) fn part(&self, store: SharedStore, name: &str, members: &[Rank]) -> Option<Self> {
        let number = self.number.as_ref().filter(|_| !self.is_subgroup)?;
        let number = Some(number_of(number, name));
        let Backend::Mesh { interface, transport, host_id, heartbeat, credentials, .. } =
            self.backend.clone()
        else {
            return None;
        };
        let store = Arc::new(PrefixStore::new(name, store));
        let backend = Backend::Mesh { store, interface, transport, host_id, heartbeat, credentials };
        let members = members.iter().map(|rank| self.global(*rank)).collect();
        Some(Self { backend, members: Some(members), number, ..self.clone() })
    }

    /// The same, for calls that are not the program's.
    pub(super) fn aside(self) -> Self {
        Self { calls: Arc::default(), is_programs: false, ..self }
    }

    /// Connects `rank` with the others of this group. Members of a [part](Self::part) know the `partition` before. An error of `watch` ends the wait.
    pub(super) fn connect(
        &self,
        rank: Rank,
        world: WorldSize,
        partition: Option<&Partition>,
        watch: &(dyn Fn() -> Result<()> + Sync),
        deadline: Deadline,
    ) -> Result<Connected> {
        match &self.backend {
            Backend::Process { pending, scope } => pending.take(scope, (rank, world), watch, deadline),
            Backend::Mesh { .. } if world == WorldSize::ONE => {
                PendingGroups::default().take("alone", (rank, world), watch, deadline)
            }
            Backend::Mesh { store, interface, transport, host_id, heartbeat, credentials } => {
                let options = TransportOptions {
                    kind: *transport,
                    host: host_id.as_deref(),
                    local_world_size: self.local.world_size,
                    silent_hosts: Some(&self.silent_hosts),
                };
                let mesh = MeshConfig {
                    store: &**store,
                    rank,
                    world,
                    generation: self.generation,
                    interface: *interface,
                    credentials,
                    heartbeat: *heartbeat,
                    number: self.number,
                    tells_process: true,
                    marks_left: false,
                    watch,
                };
                match partition.zip(self.members.clone()) {
                    Some((partition, members)) => {
                        let tuning = self.tuning.choice(world).fingerprint;
                        connect_part(&mesh, &Part { members, partition, tuning }, options, deadline)
                    }
                    None => connect_among(&mesh, self.members.clone(), options, deadline),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    thread_local! {
        static PENDING: PendingGroups = PendingGroups::default();
    }

    /// The connections of a rank of two.
    fn take(rank: u32) -> Result<Connected> {
        let (place, deadline) =
            ((Rank::new(rank), WorldSize::new(2)?), Deadline::after(Duration::from_secs(60)));
        PENDING.with(|pending| pending.take("both", place, &|| Ok(()), deadline))
    }

    #[test]
    fn what_ends_a_wait_is_not_lost_when_the_last_rank_comes_at_that_moment() {
        fn ends() -> Result<()> {
            take(1)?;
            Err(Error::aborted("enough"))
        }
        let error = interrupt::interruptible(ends, || take(0).err());
        assert!(error.is_some_and(|error| error.to_string().contains("enough")));
    }
}
