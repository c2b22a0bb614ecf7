//! Determines which ranks can reach each other's memory. All ranks take part.
//!
//! Each tells all where its memory is, and on which host. Then each maps that of the ranks of its host alone, and tells all whose it
//! could map. So what a rank tells does not grow with the number of hosts, and every rank knows all domains.
//!
//! Neither a host's name nor a process number identifies anything: hosts have equal names, and processes in different
//! containers equal numbers. Memory is tried among processes of one boot of the kernel, and a random number in it must
//! be the one that its owner has written to the store.

use std::io;
use std::sync::Arc;

use phalanx_sys::arena::{Arena, Mapping, total_memory};
use phalanx_sys::control_block::ControlBlock;
use phalanx_sys::process;
use phalanx_sys::processors::rereads_slowly;
use serde::{Deserialize, Serialize};

use super::{Domain, Partition, Peers, Reach};
use crate::deadline::Deadline;
use crate::env;
use crate::error::{Error, Result};
use crate::health::Health;
use crate::host;
use crate::random;
use crate::rank::Rank;
use crate::transport::MeshConfig;
use crate::transport::bootstrap::{self, Starting};

/// The most ranks of a domain. With more, each would have too little of a staging window.
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

/// What the ranks have lent, with the memory of this rank's host as this rank has mapped it.
pub(crate) struct Mapped {
    /// By rank.
    lent: Vec<Lent>,
    /// Which ranks may share memory, as far as their addresses tell. The same on every rank.
    candidates: Partition,
    /// The arenas of the ranks with which this one may, in their order; or why they cannot be mapped.
    arenas: Vec<Result<Arc<Mapping>, String>>,
}

/// Tells the others that this rank was configured to use TCP. Then no rank uses shared memory, since all must plan
/// alike.
pub(crate) fn decline(config: &MeshConfig<'_>, deadline: Deadline) -> Result<()> {
    // Whose memory it could map it need not tell: nobody asks then.
    bootstrap::publish::<Lent>(config, ARENA, &Ok(None), deadline)
}

/// The keys under which `rank` writes to the store while it lends its memory, or declines.
pub(crate) fn keys_of(rank: Rank) -> Vec<String> {
    [ARENA, REACH].into_iter().flat_map(|topic| bootstrap::keys_of(topic, rank)).collect()
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
            // On AMD's processors it was not measured.
            Domain { peers, is_world, copies: !rereads_slowly(), arena, control_block }
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
    let own = Lending::new(host, config.world.count()).filled();
    let lent = bootstrap::exchange(config, starting, ARENA, &own.address(), deadline)?;
    let mapped = own.map(config.rank, lent);
    let reach = match mapped.candidates.is_alone() {
        // As all ranks know: there is nothing to tell.
        true => Vec::new(),
        false => bootstrap::exchange(config, starting, REACH, &mapped.reach(), deadline)?,
    };
    Ok(own.settle(config.rank, &mapped, &reach))
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

    /// Maps the memory of the ranks of this host, when all know what each has `lent`, by rank.
    pub(crate) fn map(&self, rank: Rank, lent: Vec<Lent>) -> Mapped {
        let candidates = candidates(&lent);
        if candidates.domain_of(rank).len() > 1 {
            // Before this rank tells whose memory it can map, without which no other begins to copy.
            open_to_siblings();
        }
        let map = |member: &Rank| -> Result<Arc<Mapping>, String> {
            let (own, _) = self.0.as_ref().map_err(Clone::clone)?;
            if *member == rank {
                return Ok(own.mapping().clone());
            }
            let Some(Ok(Some(address))) = lent.get(member.index()) else {
                return Err(format!("rank {member} has lent no memory"));
            };
            let bytes =
                usize::try_from(address.bytes).map_err(|_| format!("rank {member} has too much memory"))?;
            Arena::open(address.pid, address.descriptor, bytes, address.nonce)
                .map_err(|error| format!("the memory of rank {member} cannot be mapped: {error}"))
        };
        let arenas = candidates.domain_of(rank).iter().map(map).collect();
        Mapped { lent, candidates, arenas }
    }

    /// The domains of all ranks, when all know whose memory each can map; `reach` is by rank.
    pub(crate) fn settle(self, rank: Rank, mapped: &Mapped, reach: &[Reach]) -> Joined {
        let has = |one: Rank, index: usize| reach.get(one.index()).is_some_and(|reach| reach.has(index));
        let partition = mapped
            .candidates
            .refine(|members, one, other| has(members[one], other) && has(members[other], one));
        // A rank that is alone in its world may have no memory.
        let is_whole = partition.is_one() && self.0.is_ok();
        let reason = if is_whole { None } else { mapped.reason(reach) };

        let members = partition.domain_of(rank);
        let candidates = mapped.candidates.domain_of(rank);
        let arena = |member: &Rank| mapped.arenas.get(candidates.binary_search(member).ok()?)?.clone().ok();
        let mappings = members.iter().filter_map(arena).collect();
        let me = members.iter().position(|member| *member == rank);
        let own = self.0.ok().filter(|_| members.len() > 1 || partition.is_one());
        let shared = own.and_then(|(arena, _)| {
            let control_block = ControlBlock::new(arena.clone(), mappings, me?)?;
            (control_block.members() == members.len()).then_some((arena, control_block))
        });
        Joined { partition, shared, reason }
    }
}

impl Mapped {
    /// Whose memory this rank can map.
    pub(crate) fn reach(&self) -> Reach {
        Reach::new(self.arenas.iter().map(|arena| arena.as_ref().err().map(String::as_str)))
    }

    /// Why not all ranks share memory: what keeps the first two from it that do not.
    fn reason(&self, reach: &[Reach]) -> Option<String> {
        if let Some(declined) = self.lent.iter().position(|lent| matches!(lent, Ok(None))) {
            return Some(format!("rank {declined}: it was told to use TCP"));
        }
        let ranks = 0..self.lent.len() as u32;
        // If nothing keeps the first rank from sharing memory with all others, there are no more than have room in one domain.
        let mut pairs = ranks.clone().flat_map(|one| ranks.clone().map(move |other| (one, other)));
        pairs.find_map(|(one, other)| {
            let obstacle = self.obstacle(Rank::new(one), Rank::new(other), reach)?;
            Some(format!("rank {one}: {obstacle}"))
        })
    }

    /// Why `one` has not mapped the memory of `other`.
    fn obstacle(&self, one: Rank, other: Rank, reach: &[Reach]) -> Option<String> {
        let host = |rank: Rank| match self.lent.get(rank.index()) {
            Some(Ok(Some(address))) => Ok(&address.host),
            Some(Err(reason)) => Err(reason.as_str()),
            Some(Ok(None)) | None => Err("lent no memory"),
        };
        let (own, others) = match (host(one), host(other)) {
            (Err(reason), _) => return Some(reason.to_owned()),
            (_, Err(reason)) => return Some(format!("rank {other} has {reason}")),
            (Ok(own), Ok(others)) => (own, others),
        };
        if own != others {
            return Some(format!("rank {other} is on another host"));
        }
        let Ok(index) = self.candidates.domain_of(one).binary_search(&other) else {
            return Some(format!(
                "at most {MOST} ranks of a host share memory, and rank {other} is in another part of it"
            ));
        };
        let told = reach.get(one.index());
        told.filter(|_| one != other).and_then(|reach| reach.obstacle(index)).map(str::to_owned)
    }
}

/// Which ranks may share memory, as far as they have told where it is. All come to the same result.
fn candidates(lent: &[Lent]) -> Partition {
    // All must plan alike, and a rank that was told to use TCP knows nothing of the others' memory.
    if lent.iter().any(|lent| matches!(lent, Ok(None))) {
        return Partition::alone(lent.len());
    }
    Partition::by_host(lent.iter().map(|lent| Some(lent.as_ref().ok()?.as_ref()?.host.as_str())), MOST)
}

/// An arena of this rank, and its address.
fn lend(host: Option<&str>, world: usize) -> Result<(Arc<Arena>, Address), String> {
    let nonce = random::number().map_err(|error| error.to_string())?;
    // As large as the host's memory, if there are enough addresses.
    let bytes = total_memory().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX);
    let arena = Arena::create_unfilled(bytes, world.min(MOST), nonce).map_err(no_memory)?;
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

/// Lets the other ranks of this launcher copy out of this process, where the kernel allows that to no others than its parent.
fn open_to_siblings() {
    // There no rank copies.
    if rereads_slowly() {
        return;
    }
    match process::open_to_siblings(env::is_launched()) {
        Ok(Some(ancestor)) => {
            tracing::debug!(
                ancestor,
                "processes that descend from this one's parent may copy out of this one"
            );
        }
        Ok(None) => {}
        Err(error) => {
            tracing::debug!(%error, "ranks of this host may not be able to copy out of this process")
        }
    }
}

fn no_memory(error: io::Error) -> String {
    format!("no shared memory: {error}")
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
