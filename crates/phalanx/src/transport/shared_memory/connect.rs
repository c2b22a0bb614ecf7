//! Lends each rank's memory to the others, and finds out, together, whether all can map it.

use std::io;
use std::sync::Arc;

use phalanx_sys::shared::{ALIGNMENT, Layout, Segment};
use serde::{Deserialize, Serialize};

use super::{Link, Rings};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::transport::health::Health;
use crate::transport::tcp::Place;
use crate::transport::words;

/// Memory that the rings into one rank may take together.
const INBOUND: usize = 16 << 20;
/// A ring of this size stays in the second-level cache with what is combined from it.
const RING: usize = 512 << 10;
const MIN_RING: usize = 64 << 10;
/// What ranks tell each other in the store: where their memory is, and whether they have mapped all others'.
const MEMORY: &str = "memory";
const MAPPED: &str = "mapped";

/// Where a rank's memory is, as it stands in the store.
#[derive(Serialize, Deserialize)]
struct Address {
    /// Tells hosts of the same name apart.
    boot: String,
    pid: u32,
    descriptor: i32,
    nonce: u64,
}

/// Maps every rank's memory. If some rank cannot, all ranks get the same reason instead.
pub(in crate::transport) fn rings(
    place: &Place<'_>,
    health: &Health,
    deadline: Deadline,
) -> Result<Result<Rings, String>> {
    let (rank, world) = (place.rank, place.world);
    // All ranks find this alike, so none needs to be told.
    if world.count() > INBOUND / MIN_RING {
        return Ok(Err(format!("{world} ranks would take too much memory")));
    }
    let share = INBOUND / world.count();
    let ring_bytes = share.clamp(MIN_RING, RING).next_multiple_of(ALIGNMENT);
    let layout = Layout { rings: world.count(), ring_bytes };
    let nonce = nonce()?;

    let created = Segment::create(layout, nonce);
    let address =
        created.as_ref().map_err(|error| format!("{layout:?}: {error}")).and_then(|(_, invitation)| {
            let boot =
                std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(|e| e.to_string())?;
            Ok(Address { boot, pid: std::process::id(), descriptor: invitation.descriptor(), nonce })
        });
    let addresses: Vec<Result<Address, String>> = words::exchange(place, health, MEMORY, &address, deadline)?;

    let opened = open_all(rank, layout, &addresses);
    let outcome = opened.as_ref().map(drop).map_err(Clone::clone);
    let outcomes: Vec<Result<(), String>> = words::exchange(place, health, MAPPED, &outcome, deadline)?;
    // From here on the memory needs no descriptor: every rank has mapped it, or none will use it.
    if let Some((rank, Err(reason))) = world.ranks().zip(outcomes).find(|(_, outcome)| outcome.is_err()) {
        return Ok(Err(format!("rank {rank}: {reason}")));
    }
    Ok(match (created, opened) {
        (Ok((own, _)), Ok(peers)) => link(rank, own, peers),
        (Err(error), _) => Err(error.to_string()),
        (_, Err(reason)) => Err(reason),
    })
}

fn open_all(
    rank: Rank,
    layout: Layout,
    addresses: &[Result<Address, String>],
) -> Result<Vec<Option<Arc<Segment>>>, String> {
    let own = addresses.get(rank.index()).ok_or("it left no word on its memory")?;
    let own = own.as_ref().map_err(|reason| format!("it has no shared memory of its own: {reason}"))?;
    let peers = addresses.iter().enumerate().map(|(peer, address)| {
        if peer == rank.index() {
            return Ok(None);
        }
        let Address { boot, pid, descriptor, nonce } =
            address.as_ref().map_err(|reason| format!("rank {peer} has no shared memory: {reason}"))?;
        if *boot != own.boot {
            return Err(format!("rank {peer} is on another host"));
        }
        let segment = Segment::open(*pid, *descriptor, layout, *nonce);
        segment.map(Some).map_err(|error| format!("the memory of rank {peer} cannot be mapped: {error}"))
    });
    peers.collect()
}

/// In a rank's memory, ring p is the one that rank p writes.
fn link(rank: Rank, own: Arc<Segment>, peers: Vec<Option<Arc<Segment>>>) -> Result<Rings, String> {
    let links = peers.into_iter().enumerate().map(|(index, peer)| {
        let Some(peer) = peer else { return Ok(None) };
        let (inbound, outbound) = (own.consumer(index), peer.producer(rank.index()));
        let (inbound, outbound) = inbound.zip(outbound).ok_or("an end of a ring is missing")?;
        Ok(Some(Link { peer, inbound, outbound }))
    });
    let links = links.collect::<Result<Vec<_>, &str>>()?;
    Ok(Rings { own, links })
}

fn nonce() -> Result<u64> {
    getrandom::u64().map_err(|error| Error::io("no random numbers", io::Error::other(error.to_string())))
}
