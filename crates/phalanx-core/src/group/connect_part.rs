//! Connects some ranks of a group that stands already, in a store that they name.
//!
//! A first group asks the store for six things, one after the other: who has come, the verdict, the addresses, where the memory is, whose memory
//! each rank can map, and the same of the rings. Here the members know each other from the group that they leave: which of them share memory, and a
//! number from which each makes the new group's. So one exchange has all that can be said before the others have come: who the members are, the table
//! of algorithms, the address, the memory and the rings. When they are connected, each tells the others on their connections which memory it could
//! map. So each knows that the others have read the store.
//!
//! Only members take part, as PyTorch's `new_group` and MPI's `MPI_Comm_create_group` have it. Each says of which ranks it makes the group, and under a
//! key that is written once: ranks that mean different groups of one name, or a rank that is there twice, are errors at once.

use std::cell::OnceCell;
use std::sync::Arc;

use phalanx_proto::wire::auth::Secret;
use phalanx_sys::processors;
use serde::{Deserialize, Serialize};

use super::connect::{Connected, Shared, TransportOptions, assemble, connect_mesh, start_failed};
use super::subgroup::{SHOWN, differing, digest, shown};
use crate::deadline::Deadline;
use crate::domain::{Joined, Lending, Lent, Mapped, Partition, Reach};
use crate::error::{Error, Result};
use crate::poll::promptly;
use crate::rank::Rank;
use crate::transport::MeshConfig;
use crate::transport::bootstrap::Starting;
use crate::transport::messages::{Opened, RingAddress, RingLending, Rings};
use crate::transport::tcp::Announcement;
use crate::wire::hello::JobId;

/// What the members of a new group know before they meet.
pub(super) struct Part<'a> {
    /// Their ranks in the first group.
    pub members: Arc<[Rank]>,
    /// Which of them share memory, by rank in the new group. They know it from the group that they leave.
    pub partition: &'a Partition,
    /// What distinguishes the row of the table by which they choose algorithms.
    pub tuning: u32,
}

/// What a rank announces with its address.
#[derive(Serialize, Deserialize)]
struct Announced {
    /// The ranks in the first group: as many as an error shows, and one more.
    members: Vec<u32>,
    /// A hash of all of them: so many lists would be as much as the cube of the ranks.
    digest: i64,
    tuning: u32,
    /// None of a rank that shares memory with no other.
    memory: Option<Lent>,
    rings: Option<RingAddress>,
}

/// Which memory of the others a rank could map, as it tells them: some bytes, however many others there are.
#[derive(Serialize, Deserialize)]
struct Mappable {
    /// Whose arenas of its host.
    memory: Reach,
    /// Whose rings, by index in the domain.
    rings: Vec<bool>,
}

/// The number of the group `name` of ranks whose group has `number`. It tells groups apart; what keeps others out is the job key.
pub(super) fn number_of(number: &JobId, name: &str) -> JobId {
    let secret = Secret::new(None, "phalanx part 1", number);
    let tag = secret.tag("number", &[name.as_bytes()]);
    tag.first_chunk().copied().unwrap_or_default()
}

/// Connects the members of `part`.
pub(super) fn connect_part(
    config: &MeshConfig<'_>,
    part: &Part<'_>,
    options: TransportOptions<'_>,
    deadline: Deadline,
) -> Result<Connected> {
    let (rank, world) = (config.rank, config.world);
    let domain = part.partition.domain_of(rank);
    // A rank that is alone on its host lends memory too: without, all would use TCP.
    let shares = part.partition.domains().len() < world.count();
    let memory = shares.then(|| Lending::new(options.host, world.count()));
    let rings = if shares {
        RingLending::new(rank, domain).map_err(|error| start_failed(config, error))?
    } else {
        None
    };
    let own = Announced {
        members: part.members.iter().take(SHOWN + 1).map(|member| member.get()).collect(),
        digest: digest(&part.members),
        tuning: part.tuning,
        memory: memory.as_ref().map(Lending::address),
        rings: rings.as_ref().map(RingLending::address),
    };
    let malformed = |error| Error::malformed("a rank's announcement is malformed").with_source(error);
    let bytes = postcard::to_stdvec(&own).map_err(malformed)?;
    let announced = OnceCell::new();
    let read = |all: &[&[u8]]| {
        let all: Vec<Announced> =
            all.iter().map(|bytes| postcard::from_bytes(bytes).map_err(malformed)).collect::<Result<_>>()?;
        world.ranks().zip(&all).try_for_each(|(other, theirs)| compare((rank, &own), (other, theirs)))?;
        // It is read once.
        let _ = announced.set(all);
        Ok(())
    };
    let mapped = OnceCell::new();
    let starting = Starting::default();
    // Members that all are on this host answer at once.
    let is_prompt = domain.len() == world.count()
        && processors::suffice_for((options.local_world_size as usize).max(world.count()));
    let map = || {
        let all = announced.get().map_or(&[][..], Vec::as_slice);
        let address = |member: &Rank| {
            let rings = all.get(member.index()).and_then(|one| one.rings.clone());
            rings.unwrap_or_else(|| Err("it has none".to_owned()))
        };
        let arenas = memory.as_ref().map(|memory| {
            memory.map(rank, all.iter().map(|one| one.memory.clone().unwrap_or(Ok(None))).collect())
        });
        let opened = rings.as_ref().map(|rings| rings.open(domain.iter().map(address).collect()));
        let own = Mappable {
            memory: arenas.as_ref().map(Mapped::reach).unwrap_or_default(),
            rings: opened.as_ref().map(Opened::mapped).unwrap_or_default(),
        };
        let _ = mapped.set((arenas, opened));
        postcard::to_stdvec(&own).map_err(malformed)
    };
    let announcement = Announcement { own: bytes, read: &read, then: &map };
    let connect =
        || connect_mesh(config, Some(&announcement), Some(&part.members), options, &starting, deadline);
    let mesh = promptly(is_prompt, connect)?;
    let told = mesh.told.clone();
    let share = move || -> Result<Shared> {
        let (Some(memory), Some((Some(arenas), opened))) = (memory, mapped.into_inner()) else {
            return Ok((Joined::alone(world.count()), Rings::none(world.count())));
        };
        let all: Vec<Mappable> =
            told.iter().map(|bytes| postcard::from_bytes(bytes).map_err(malformed)).collect::<Result<_>>()?;
        let (reach, linked): (Vec<Reach>, Vec<Vec<bool>>) =
            all.into_iter().map(|one| (one.memory, one.rings)).unzip();
        let joined = memory.settle(rank, &arenas, &reach);
        let (Some(rings), Some(opened)) = (rings, opened) else {
            return Ok((joined, Rings::none(world.count())));
        };
        let of = |member: &Rank| linked.get(member.index()).cloned().unwrap_or_default();
        let linked: Vec<Vec<bool>> = domain.iter().map(of).collect();
        Ok((joined, rings.link(world.count(), opened, &linked)?))
    };
    assemble(config, options, mesh, share())
}

/// An error if two ranks mean different groups.
fn compare((rank, own): (Rank, &Announced), (other, theirs): (Rank, &Announced)) -> Result<()> {
    if (own.digest, &own.members) != (theirs.digest, &theirs.members) {
        let error = differing((rank, shown(&own.members)), (other, shown(&theirs.members)));
        return Err(error
            .with_remedy("every member must call new_group with the same ranks, and all in the same order"));
    }
    if own.tuning != theirs.tuning {
        return Err(Error::mismatch(format!("ranks {rank} and {other} have different tuning tables"))
            .with_peer(other)
            .with_remedy("set the same PHALANX_TUNING for every rank"));
    }
    Ok(())
}

/// For `phalanx::fuzzing`: what ranks write when they make a group of some of them.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub fn fuzz(bytes: &[u8]) -> bool {
    let announced = postcard::from_bytes::<Announced>(bytes).is_ok();
    postcard::from_bytes::<Mappable>(bytes).is_ok() || announced
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::control::MAX_TOLD;

    #[test]
    fn what_a_rank_announces_is_short_and_tells_long_lists_apart() {
        let announced = |last: u32| {
            let members: Vec<Rank> = (0..1000).chain([last]).map(Rank::new).collect();
            let first = members.iter().take(SHOWN + 1).map(|member| member.get()).collect();
            Announced { members: first, digest: digest(&members), tuning: 0, memory: None, rings: None }
        };
        let [own, same, other] = [5000, 5000, 5001].map(announced);
        assert!(postcard::to_stdvec(&own).unwrap().len() < 100);
        assert!(compare((Rank::MAIN, &own), (Rank::new(1), &same)).is_ok());
        let error = compare((Rank::MAIN, &own), (Rank::new(1), &other)).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("15, ..]"), "{error}");
    }

    #[test]
    fn what_the_ranks_of_a_large_job_tell_fits_into_a_message() {
        let reason = "\u{1d11e}".repeat(1000);
        let own = Mappable { memory: Reach::new([Some(reason.as_str()); 256]), rings: vec![true; 256] };
        let told = postcard::to_stdvec(&own).unwrap();
        assert!(told.len() <= MAX_TOLD, "{}", told.len());
    }
}
