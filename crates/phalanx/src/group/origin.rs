//! What the sub-groups of a group are made of.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use parking_lot::Mutex;

use super::LocalPlace;
use super::connect::{Connected, Wishes, connect_among, connect_in_process};
use crate::collective::Tuning;
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::health::Heartbeat;
use crate::rank::{Epoch, Rank, WorldSize};
use crate::store::{PrefixStore, SharedStore};
use crate::transport::{Place, TransportKind};

/// Where a group comes from, and how its sub-groups come to be.
#[derive(Clone)]
pub(crate) struct Origin {
    pub ground: Ground,
    pub local: LocalPlace,
    pub epoch: Epoch,
    /// The table by which the group and its sub-groups choose algorithms.
    pub tuning: Tuning,
    /// What must live as long as the group and its sub-groups, such as the store's server.
    pub _keep_alive: Arc<dyn Send + Sync>,
    /// The ranks of this group in the first one, by rank; none if this is the first.
    pub members: Option<Arc<[Rank]>>,
    /// How often this rank has called something of the group or its sub-groups.
    pub calls: Arc<AtomicU64>,
}

/// What joins the ranks.
#[derive(Clone)]
pub(crate) enum Ground {
    /// They are threads of one process.
    Process { nursery: Arc<Nursery>, scope: String },
    /// They are processes, which have met in a store.
    Mesh {
        /// The part of it that is this group's.
        store: SharedStore,
        interface: IpAddr,
        /// What was asked for.
        transport: Option<TransportKind>,
        host_id: Option<String>,
        heartbeat: Heartbeat,
        credentials: Credentials,
    },
}

/// Groups of threads of one process of which not all ranks have taken their part yet.
#[derive(Default)]
pub(crate) struct Nursery(Mutex<HashMap<String, Vec<Option<Connected>>>>);

impl Nursery {
    fn take(&self, scope: &str, world: WorldSize, rank: Rank) -> Result<Connected> {
        let mut groups = self.0.lock();
        let parts = groups
            .entry(scope.to_owned())
            .or_insert_with(|| connect_in_process(world).into_iter().map(Some).collect());
        let part = parts.get_mut(rank.index()).and_then(Option::take);
        if parts.iter().all(Option::is_none) {
            groups.remove(scope);
        }
        part.ok_or_else(|| Error::mismatch(format!("rank {rank} of {scope} was taken twice")))
    }
}

impl Ground {
    /// Threads of one process that have no group yet.
    pub(crate) fn process() -> Self {
        Self::Process { nursery: Arc::default(), scope: "groups".to_owned() }
    }

    /// The part of this ground on which the sub-group `name` stands.
    fn part(&self, name: &str) -> Self {
        match self {
            Self::Process { nursery, scope } => {
                Self::Process { nursery: nursery.clone(), scope: format!("{scope}/{name}") }
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

impl Origin {
    /// The rank of the first group that is `rank` here.
    pub(super) fn global(&self, rank: Rank) -> Rank {
        match &self.members {
            Some(members) => members.get(rank.index()).copied().unwrap_or(rank),
            None => rank,
        }
    }

    /// The origin of the sub-group `name`, whose ranks are these `members` of this group.
    pub(super) fn part(&self, name: &str, members: &[Rank]) -> Self {
        let members = members.iter().map(|rank| self.global(*rank)).collect();
        Self { ground: self.ground.part(name), members: Some(members), ..self.clone() }
    }

    /// Connects `rank` with the others of this group.
    pub(super) fn connect(&self, rank: Rank, world: WorldSize, deadline: Deadline) -> Result<Connected> {
        match &self.ground {
            Ground::Process { nursery, scope } => nursery.take(scope, world, rank),
            Ground::Mesh { .. } if world == WorldSize::ONE => Nursery::default().take("alone", world, rank),
            Ground::Mesh { store, interface, transport, host_id, heartbeat, credentials } => {
                let wishes = Wishes { kind: *transport, host: host_id.as_deref() };
                let place = Place {
                    store: &**store,
                    rank,
                    world,
                    epoch: self.epoch,
                    interface: *interface,
                    credentials,
                    heartbeat: *heartbeat,
                };
                connect_among(&place, self.members.clone(), wishes, deadline)
            }
        }
    }
}
