//! Determines which ranks can reach each other's memory. All ranks take part.
//!
//! Neither a host's name nor a process number identifies anything: hosts have equal names, and processes in different
//! containers equal numbers. Memory is tried among processes of one boot of the kernel, and a random number in it must
//! be the one that its owner has written to the store.

use std::io;
use std::sync::Arc;

use phalanx_sys::arena::{Arena, Mapping, total_memory};
use phalanx_sys::control_block::ControlBlock;
use serde::{Deserialize, Serialize};

use super::{Domain, Partition, Peers};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::health::Health;
use crate::host;
use crate::random;
use crate::rank::Rank;
use crate::transport::MeshConfig;
use crate::transport::bootstrap::{self, Starting};
use crate::world_size::WorldSize;

/// With more ranks, each would have too little of a staging window.
const MOST: usize = 256;
/// Keys of what ranks write to the store: where their memory is, and whose memory they can map.
const ARENA: &str = "arena";
const REACH: &str = "reach";

/// Where a rank's memory is, as written to the store.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Address {
    /// Distinguishes hosts, even if they have the same name.
    host: String,
    pid: u32,
    descriptor: i32,
    bytes: u64,
    nonce: u64,
}

/// A rank's memory. None if the rank was configured to use TCP; an error text if it cannot have any.
pub(crate) type Lent = Result<Option<Address>, String>;
/// For each rank of the host, by rank, why its memory cannot be mapped; an empty text if it can.
pub(crate) type Reach = Vec<String>;

/// The mapped arenas, by rank.
pub(crate) struct Mapped(Vec<Result<Arc<Mapping>, String>>);

/// Tells the others that this rank was configured to use TCP. Then no rank uses shared memory, since all must plan
/// alike.
pub(crate) fn decline(config: &MeshConfig<'_>, deadline: Deadline) -> Result<()> {
    bootstrap::publish::<Lent>(config, ARENA, &Ok(None), deadline)?;
    bootstrap::publish::<Reach>(config, REACH, &Vec::new(), deadline)
}

/// The keys under which `rank` writes to the store while it lends its memory, or declines.
pub(crate) fn keys_of(rank: Rank) -> Vec<String> {
    [ARENA, REACH].map(|topic| bootstrap::key(topic, rank)).into()
}

/// What this rank knows about the memory of all ranks.
pub(crate) struct Joined {
    /// The domains of all ranks; the same on every rank, unless it was configured to use TCP.
    pub partition: Partition,
    /// This rank's own domain, if it has memory that others can map: what it consists of, before there is a group.
    shared: Option<(Arc<Arena>, ControlBlock)>,
    /// Why not all ranks are in this rank's domain.
    pub reason: Option<String>,
}

impl Joined {
    /// Each rank is alone.
    pub(crate) fn alone(world: usize) -> Self {
        Self { partition: Partition::alone(world), shared: None, reason: None }
    }

    /// The domains, this rank's own one, and why not all ranks are in it.
    pub(crate) fn into_domain(
        self,
        rank: Rank,
        health: &Arc<Health>,
    ) -> (Partition, Option<Domain>, Option<String>) {
        let Self { partition, shared, reason } = self;
        let (is_world, members) = (partition.is_one(), partition.domain_of(rank).to_vec());
        let domain = shared.map(|(arena, control_block)| {
            let peers = Peers { rank, members, health: health.clone() };
            Domain { peers, is_world, arena, control_block }
        });
        (partition, domain, reason)
    }
}

/// Lends this rank's memory to the others, and maps theirs. It needs only the store, so it can be done while the ranks connect.
pub(crate) fn join(
    config: &MeshConfig<'_>,
    host: Option<&str>,
    starting: &Starting,
    deadline: Deadline,
) -> Result<Joined> {
    let world = config.world.count();
    // Nothing is exchanged then: what each would say of each other would be as much as the square of the ranks.
    if let Err(reason) = check_room(world) {
        return Ok(Joined { reason: Some(reason), ..Joined::alone(world) });
    }
    let own = Lending::new(host, world).filled();
    let lent: Vec<Lent> = bootstrap::exchange(config, starting, ARENA, &own.address(), deadline)?;
    let mapped = own.map(config.rank, &lent);
    let reach: Vec<Reach> = bootstrap::exchange(config, starting, REACH, &mapped.reach(), deadline)?;
    Ok(own.settle(config.rank, config.world, &lent, &mapped, &reach))
}

/// The memory of this rank that the others may map.
pub(crate) struct Lending(Result<(Arc<Arena>, Address), String>);

impl Lending {
    /// Memory for the others of a group of so many ranks; or why there is none. What is staged gets its own when that first happens.
    pub(crate) fn new(host: Option<&str>, world: usize) -> Self {
        Self(lend(host, world))
    }

    /// The same with memory for what is staged.
    fn filled(self) -> Self {
        Self(self.0.and_then(|own| own.0.fill().map_err(no_memory).map(|()| own)))
    }

    /// What the others have to know.
    pub(crate) fn address(&self) -> Lent {
        self.0.as_ref().map(|(_, address)| Some(address.clone())).map_err(Clone::clone)
    }

    /// Maps what the others have `lent`, by rank.
    pub(crate) fn map(&self, rank: Rank, lent: &[Lent]) -> Mapped {
        Mapped(map_all(rank, self.0.as_ref().map(|(arena, _)| arena), lent))
    }

    /// The domains of all ranks, when all know whose memory each can map.
    pub(crate) fn settle(
        self,
        rank: Rank,
        world: WorldSize,
        lent: &[Lent],
        mapped: &Mapped,
        reach: &[Reach],
    ) -> Joined {
        settle(self.0, (rank, world), lent, &mapped.0, reach)
    }
}

impl Mapped {
    /// Whose memory this rank can map.
    pub(crate) fn reach(&self) -> Reach {
        self.0.iter().map(|mapping| mapping.as_ref().err().cloned().unwrap_or_default()).collect()
    }
}

fn settle(
    own: Result<(Arc<Arena>, Address), String>,
    (rank, world): (Rank, WorldSize),
    lent: &[Lent],
    mapped: &[Result<Arc<Mapping>, String>],
    reach: &[Reach],
) -> Joined {
    if let Some(declined) = lent.iter().position(|lent| matches!(lent, Ok(None))) {
        let reason = Some(format!("rank {declined}: it was told to use TCP"));
        return Joined { reason, ..Joined::alone(world.count()) };
    }
    let obstacle = |one: usize, other: usize| match reach.get(one).and_then(|reach| reach.get(other)) {
        Some(reason) if reason.is_empty() => None,
        Some(reason) => Some(format!("rank {one}: {reason}")),
        None => Some(format!("rank {one} reported nothing about the memory of rank {other}")),
    };
    let partition =
        Partition::of(world.count(), |one, other| obstacle(one, other).or(obstacle(other, one)).is_none());
    let mut pairs = world.ranks().flat_map(|one| world.ranks().map(move |other| (one, other)));
    let reason = pairs.find_map(|(one, other)| obstacle(one.index(), other.index()));

    let members = partition.domain_of(rank);
    let mappings = members.iter().filter_map(|member| mapped.get(member.index())?.clone().ok()).collect();
    let me = members.iter().position(|member| *member == rank);
    let shared = own.ok().filter(|_| members.len() > 1 || partition.is_one()).and_then(|(arena, _)| {
        let control_block = ControlBlock::new(arena.clone(), mappings, me?)?;
        (control_block.members() == members.len()).then_some((arena, control_block))
    });
    Joined { partition, shared, reason }
}

/// An arena of this rank, and its address.
fn lend(host: Option<&str>, world: usize) -> Result<(Arc<Arena>, Address), String> {
    check_room(world)?;
    let nonce = random::number().map_err(|error| error.to_string())?;
    // As large as the host's memory, if there are enough addresses.
    let bytes = total_memory().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX);
    let arena = Arena::create_unfilled(bytes, world, nonce).map_err(no_memory)?;
    let host = match host {
        Some(host) => host.to_owned(),
        None => {
            let boot = host::boot_id().ok_or("the host has no identity: /proc hides the kernel's boot id")?;
            format!("{boot:032x}")
        }
    };
    let (pid, descriptor, bytes) = (std::process::id(), arena.descriptor(), arena.bytes() as u64);
    Ok((arena, Address { host, pid, descriptor, bytes, nonce }))
}

/// An error if a control block has no room for so many ranks. All come to the same result.
fn check_room(world: usize) -> Result<(), String> {
    match world > MOST {
        true => Err(format!("{world} ranks are too many for one control block")),
        false => Ok(()),
    }
}

fn no_memory(error: io::Error) -> String {
    format!("no shared memory: {error}")
}

fn map_all(
    rank: Rank,
    own: Result<&Arc<Arena>, &String>,
    lent: &[Lent],
) -> Vec<Result<Arc<Mapping>, String>> {
    let host = lent.get(rank.index()).and_then(|lent| Some(&lent.as_ref().ok()?.as_ref()?.host));
    let map = |(peer, lent): (usize, &Lent)| {
        let own = own.map_err(Clone::clone)?;
        if peer == rank.index() {
            return Ok(own.mapping().clone());
        }
        let address = lent.as_ref().map_err(|reason| format!("rank {peer} has {reason}"))?;
        let address = address.as_ref().ok_or_else(|| format!("rank {peer} was told to use TCP"))?;
        if Some(&address.host) != host {
            return Err(format!("rank {peer} is on another host"));
        }
        let bytes = usize::try_from(address.bytes).map_err(|_| format!("rank {peer} has too much memory"))?;
        Arena::open(address.pid, address.descriptor, bytes, address.nonce)
            .map_err(|error| format!("the memory of rank {peer} cannot be mapped: {error}"))
    };
    lent.iter().enumerate().map(map).collect()
}

/// The error if all ranks were configured to share memory and cannot.
pub(crate) fn refused(reason: &str) -> Error {
    Error::environment(format!("the ranks share no memory: {reason}"))
        .with_remedy("unset PHALANX_TRANSPORT to use TCP where memory cannot be shared")
}

/// For `phalanx::fuzzing`: decodes where a rank's memory is, and whose it could map.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub fn fuzz(bytes: &[u8]) -> bool {
    let lent = postcard::from_bytes::<Lent>(bytes).is_ok();
    postcard::from_bytes::<Reach>(bytes).is_ok() || lent
}
