//! Lends each rank's memory to the others, and finds out, together, whether all can map it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use phalanx_sys::shared::{ALIGNMENT, Invitation, Layout, Segment};
use serde::{Deserialize, Serialize};

use super::{Link, Rings};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::rank::{Rank, WorldSize};
use crate::transport::health::Health;
use crate::transport::tcp::Place;

/// Memory that the rings into one rank may take together.
const INBOUND: usize = 16 << 20;
/// A ring of this size stays in the second-level cache with what is combined from it.
const RING: usize = 512 << 10;
const MIN_RING: usize = 64 << 10;
/// What ranks tell each other in the store: where their memory is, and whether they have mapped all others'.
const MEMORY: &str = "memory";
const MAPPED: &str = "mapped";
/// How often a rank that waits for the others asks whether they live.
const LOOK: Duration = Duration::from_millis(200);

/// Where a rank's memory is, as it stands in the store.
#[derive(Serialize, Deserialize)]
pub(in crate::transport) struct Address {
    /// Tells hosts of the same name apart.
    pub boot: String,
    pid: u32,
    descriptor: i32,
    nonce: u64,
}

impl Address {
    /// Maps the memory that lies there.
    pub(in crate::transport) fn open(&self, layout: Layout) -> io::Result<Arc<Segment>> {
        Segment::open(self.pid, self.descriptor, layout, self.nonce)
    }
}

/// Tells the others not to wait for this rank's memory: it was told to use TCP, and they may not have been.
pub(in crate::transport) fn decline(place: &Place<'_>, deadline: Deadline) -> Result<()> {
    let word: Result<(), String> = Err("it was told to use TCP".to_owned());
    let word = postcard::to_stdvec(&word).map_err(|error| malformed(MEMORY, error))?;
    let [memory, mapped] = [MEMORY, MAPPED].map(|topic| key(topic, place.rank));
    place.store.multi_set(&[(&memory, &word), (&mapped, &word)], deadline)
}

/// Maps every rank's memory. If some rank cannot, all ranks get the same reason instead.
pub(in crate::transport) fn rings(
    place: &Place<'_>,
    health: &Health,
    deadline: Deadline,
) -> Result<Result<Rings, String>> {
    let (rank, world) = (place.rank, place.world);
    // All ranks find this alike, so none needs to be told.
    let Some(layout) = layout(world) else {
        return Ok(Err(format!("{world} ranks would take too much memory")));
    };
    let created = lend(layout)?;
    let address = created.as_ref().map(|lent| &lent.address).map_err(Clone::clone);
    let addresses: Vec<Result<Address, String>> = share_with_all(place, health, MEMORY, &address, deadline)?;

    let opened = open_all(rank, layout, &addresses);
    let outcome = opened.as_ref().map(drop).map_err(Clone::clone);
    let outcomes: Vec<Result<(), String>> = share_with_all(place, health, MAPPED, &outcome, deadline)?;
    // From here on the memory needs no descriptor: every rank has mapped it, or none will use it.
    if let Some((rank, Err(reason))) = world.ranks().zip(outcomes).find(|(_, outcome)| outcome.is_err()) {
        return Ok(Err(format!("rank {rank}: {reason}")));
    }
    Ok(match (created, opened) {
        (Ok(lent), Ok(peers)) => link(rank, lent.own, peers),
        (Err(reason), _) | (_, Err(reason)) => Err(reason),
    })
}

/// The sizes of each rank's memory in a world of `world` ranks; none if it would be too much.
pub(in crate::transport) fn layout(world: WorldSize) -> Option<Layout> {
    let share = INBOUND / world.count();
    let ring_bytes = share.clamp(MIN_RING, RING).next_multiple_of(ALIGNMENT);
    (share >= MIN_RING).then_some(Layout { rings: world.count(), ring_bytes })
}

/// Memory of this rank that others can map, as long as this is kept.
pub(in crate::transport) struct Lent {
    pub own: Arc<Segment>,
    pub address: Address,
    _invitation: Invitation,
}

/// Memory for the others to map; or why there is none.
pub(in crate::transport) fn lend(layout: Layout) -> Result<Result<Lent, String>> {
    let nonce = nonce()?;
    let create = || {
        let (own, invitation) =
            Segment::create(layout, nonce).map_err(|error| format!("{layout:?}: {error}"))?;
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(|e| e.to_string())?;
        let address = Address { boot, pid: std::process::id(), descriptor: invitation.descriptor(), nonce };
        Ok(Lent { own, address, _invitation: invitation })
    };
    Ok(create())
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
        let address =
            address.as_ref().map_err(|reason| format!("rank {peer} has no shared memory: {reason}"))?;
        if address.boot != own.boot {
            return Err(format!("rank {peer} is on another host"));
        }
        address
            .open(layout)
            .map(Some)
            .map_err(|error| format!("the memory of rank {peer} cannot be mapped: {error}"))
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

/// Leaves `value` in the store, and gives every rank's. A rank that dies meanwhile ends the wait for it.
pub(in crate::transport) fn share_with_all<T: for<'a> Deserialize<'a>, U>(
    place: &Place<'_>,
    health: &Health,
    topic: &str,
    value: &Result<U, String>,
    deadline: Deadline,
) -> Result<Vec<Result<T, String>>>
where
    Result<U, String>: Serialize,
{
    let malformed = |error| malformed(topic, error);
    let own = postcard::to_stdvec(value).map_err(malformed)?;
    place.store.set(&key(topic, place.rank), &own, deadline)?;
    let keys: Vec<String> = place.world.ranks().map(|rank| key(topic, rank)).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let values = loop {
        match place.store.multi_get(&keys, deadline.at_most(LOOK)) {
            Err(error) if error.is_timeout() && !deadline.has_passed() => {
                if let Some(cause) = health.cause() {
                    return Err(cause);
                }
            }
            outcome => break outcome?,
        }
    };
    values.iter().map(|bytes| postcard::from_bytes(bytes).map_err(malformed)).collect()
}

pub(in crate::transport) fn key(topic: &str, rank: Rank) -> String {
    format!("{topic}/{rank}")
}

fn malformed(topic: &str, error: postcard::Error) -> Error {
    Error::protocol(format!("the store holds a malformed word on {topic}")).with_source(error)
}

fn nonce() -> Result<u64> {
    getrandom::u64().map_err(|error| Error::io("no random numbers", io::Error::other(error.to_string())))
}
