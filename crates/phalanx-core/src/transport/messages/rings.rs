//! Determines, for each pair, which ranks of a domain can map each other's rings. These pairs use them for messages.

use std::sync::Arc;

use phalanx_sys::shared::{ALIGNMENT, Consumer, Invitation, Layout, Producer, Segment};
use serde::{Deserialize, Serialize};

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::random;
use crate::rank::Rank;
use crate::transport::bootstrap::{self, Starting};
use crate::transport::tcp::MeshConfig;

/// The memory of all rings into one rank together.
const INBOUND: usize = 16 << 20;
/// A ring of this size fits into the second-level cache together with the data taken out of it.
const RING: usize = 512 << 10;
const MIN_RING: usize = 64 << 10;
/// Keys of what ranks write to the store: where their rings are, and whose each could map.
const MEMORY: &str = "rings";
const MAPPED: &str = "mapped";

/// The rings between this rank and others, by rank; None if a pair shares no memory.
pub(crate) struct Rings {
    pub own: Option<Arc<Segment>>,
    pub links: Vec<Option<Link>>,
}

/// The rings between this rank and a peer.
pub(crate) struct Link {
    /// The peer's memory, for its doorbell.
    pub peer: Arc<Segment>,
    pub inbound: Consumer,
    pub outbound: Producer,
}

impl Rings {
    pub(in crate::transport) fn none(world: usize) -> Self {
        Self { own: None, links: std::iter::repeat_with(|| None).take(world).collect() }
    }
}

/// Where the rings into a rank are, as written to the store.
#[derive(Serialize, Deserialize)]
struct Address {
    pid: u32,
    descriptor: i32,
    nonce: u64,
}

/// The rings into this rank, which others can map while this is kept.
struct Lent {
    own: Arc<Segment>,
    invitation: Invitation,
    nonce: u64,
}

/// Maps the rings of the other `members` of this rank's domain, if possible, and returns those of members that could
/// also map this rank's. In a rank's memory, ring p is written by the member at index p.
pub(crate) fn rings(
    config: &MeshConfig<'_>,
    members: &[Rank],
    starting: &Starting,
    deadline: Deadline,
) -> Result<Rings> {
    let none = Rings::none(config.world.count());
    let Some(me) = members.iter().position(|member| *member == config.rank) else { return Ok(none) };
    // All members come to the same result, so nothing is exchanged.
    let Some(layout) = layout(members.len()) else { return Ok(none) };
    let lent = lend(layout)?;
    let address = lent.as_ref().map(Lent::address).map_err(Clone::clone);
    let addresses: Vec<Result<Address, String>> =
        bootstrap::exchange_among(config, members, starting, MEMORY, &address, deadline)?;
    let open = |(index, address): (usize, Result<Address, String>)| {
        let address = address.ok().filter(|_| lent.is_ok() && index != me)?;
        let peer = Segment::open(address.pid, address.descriptor, layout, address.nonce);
        peer.map_err(|error| tracing::debug!(rank = %members[index], %error, "messages go over TCP")).ok()
    };
    let opened: Vec<Option<Arc<Segment>>> = addresses.into_iter().enumerate().map(open).collect();
    let mapped: Vec<bool> = opened.iter().map(Option::is_some).collect();
    let mapped: Vec<Vec<bool>> =
        bootstrap::exchange_among(config, members, starting, MAPPED, &mapped, deadline)?;
    // From here on the memory needs no descriptor: a rank that has not mapped it will not use it.
    let Ok(Lent { own, .. }) = lent else { return Ok(none) };

    let mut rings = none;
    for (index, (peer, mapped)) in opened.into_iter().zip(mapped).enumerate() {
        let (Some(peer), Some(true)) = (peer, mapped.get(me)) else { continue };
        let ends = own.consumer(index).zip(peer.producer(me));
        let missing =
            || Error::protocol(format!("an end of the rings with rank {} is missing", members[index]));
        let (inbound, outbound) = ends.ok_or_else(missing)?;
        if let Some(link) = rings.links.get_mut(members[index].index()) {
            *link = Some(Link { peer, inbound, outbound });
        }
    }
    Ok(Rings { own: Some(own), ..rings })
}

/// The sizes of each member's rings. None if no rank shares memory, or too many do.
fn layout(members: usize) -> Option<Layout> {
    let share = INBOUND / members.max(1);
    let ring_bytes = share.clamp(MIN_RING, RING).next_multiple_of(ALIGNMENT);
    (members > 1 && share >= MIN_RING).then_some(Layout { rings: members, ring_bytes })
}

/// Rings for the others to map; or why there are none.
fn lend(layout: Layout) -> Result<Result<Lent, String>> {
    let nonce = random::number()?;
    let created = Segment::create(layout, nonce);
    Ok(created
        .map(|(own, invitation)| Lent { own, invitation, nonce })
        .map_err(|error| format!("{layout:?}: {error}")))
}

impl Lent {
    fn address(&self) -> Address {
        Address { pid: std::process::id(), descriptor: self.invitation.descriptor(), nonce: self.nonce }
    }
}

/// For `phalanx::fuzzing`: decodes where a rank's rings are, and whose it could map.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub(in crate::transport) fn fuzz(bytes: &[u8]) -> bool {
    let address = postcard::from_bytes::<Result<Address, String>>(bytes).is_ok();
    postcard::from_bytes::<Vec<bool>>(bytes).is_ok() || address
}
