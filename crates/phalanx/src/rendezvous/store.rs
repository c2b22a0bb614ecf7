//! A store of the program's own, in which its ranks meet.

use std::net::Ipv4Addr;

use super::arrival::{Identity, arrive};
use super::{Held, KeepAlive, RankConfig, Rendezvous};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::store::SharedStore;

/// Meets in `store`.
pub(super) fn join(
    store: &SharedStore,
    place: &RankConfig,
    me: &Identity,
    deadline: Deadline,
) -> Result<Rendezvous> {
    if place.world_size.get() == 1 {
        return Ok(place.alone());
    }
    let arrived = arrive(store, None, place, me, deadline)?;
    let hosts = arrived.hosts(deadline)?;
    let (local_rank, local_world_size) = place.local.unwrap_or_else(|| hosts.local(place.rank));
    Ok(Rendezvous {
        store: arrived.store,
        rank: place.rank,
        world_size: place.world_size,
        local_rank,
        local_world_size,
        generation: place.generation,
        interface: hosts.reachable(place.rank, Ipv4Addr::LOCALHOST.into())?,
        credentials: place.credentials.clone(),
        keep_alive: KeepAlive(Held::Nothing),
    })
}
