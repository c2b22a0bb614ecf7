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
const RING: usize = 256 << 10;
const MIN_RING: usize = 64 << 10;
/// Keys of what ranks write to the store: where their rings are, and whose each could map.
const MEMORY: &str = "rings";
const MAPPED: &str = "mapped";

/// The keys under which `rank` writes to the store while rings are mapped.
pub(crate) fn keys_of(rank: Rank) -> Vec<String> {
    [MEMORY, MAPPED].map(|topic| bootstrap::key(topic, rank)).into()
}

/// The rings between this rank and others, by rank; None if a pair shares no memory.
pub(crate) struct Rings {
    pub own: Option<Arc<Segment>>,
    pub links: Vec<Option<Link>>,
}

/// The rings between this rank and a peer.
pub(crate) struct Link {
    /// The peer's memory, for its doorbell.
    pub peer: Arc<Segment>,
    /// The peer's process.
    pub pid: u32,
    pub inbound: Consumer,
    pub outbound: Producer,
}

impl Rings {
    pub(crate) fn none(world: usize) -> Self {
        Self { own: None, links: std::iter::repeat_with(|| None).take(world).collect() }
    }
}

/// Where the rings into a rank are, as written to the store.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Address {
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
    let Some(lending) = RingLending::new(config.rank, members)? else {
        return Ok(Rings::none(config.world.count()));
    };
    let addresses: Vec<RingAddress> =
        bootstrap::exchange_among(config, members, starting, MEMORY, &lending.address(), deadline)?;
    let opened = lending.open(addresses);
    let mapped: Vec<Vec<bool>> =
        bootstrap::exchange_among(config, members, starting, MAPPED, &opened.mapped(), deadline)?;
    lending.link(config.world.count(), opened, &mapped)
}

/// Where the rings into a rank are; or why there are none.
pub(crate) type RingAddress = Result<Address, String>;

/// The rings into this rank, for the other members of its domain to map.
pub(crate) struct RingLending<'a> {
    members: &'a [Rank],
    /// This rank's index among them.
    me: usize,
    layout: Layout,
    lent: Result<Lent, String>,
}

/// The rings into the members that this rank could map, by their index.
pub(crate) struct Opened(Vec<Option<(Arc<Segment>, u32)>>);

impl Opened {
    pub(crate) fn mapped(&self) -> Vec<bool> {
        self.0.iter().map(Option::is_some).collect()
    }
}

impl<'a> RingLending<'a> {
    /// None if these members have no rings, as all of them know.
    pub(crate) fn new(rank: Rank, members: &'a [Rank]) -> Result<Option<Self>> {
        let Some(me) = members.iter().position(|member| *member == rank) else { return Ok(None) };
        // All members come to the same result, so nothing is exchanged.
        let Some(layout) = layout(members.len()) else { return Ok(None) };
        Ok(Some(Self { members, me, layout, lent: lend(me, layout)? }))
    }

    pub(crate) fn address(&self) -> RingAddress {
        self.lent.as_ref().map(Lent::address).map_err(Clone::clone)
    }

    /// Maps the rings at these addresses, one for each member.
    pub(crate) fn open(&self, addresses: Vec<RingAddress>) -> Opened {
        let open = |(index, address): (usize, RingAddress)| {
            let address = address.ok().filter(|_| self.lent.is_ok() && index != self.me)?;
            let peer = Segment::open(address.pid, address.descriptor, self.layout, address.nonce);
            let member = self.members.get(index)?;
            let peer = peer.map_err(|error| tracing::debug!(rank = %member, %error, "messages go over TCP"));
            Some((peer.ok()?, address.pid))
        };
        Opened(addresses.into_iter().enumerate().map(open).collect())
    }

    /// The rings of the pairs in which each could map the other's, when each member has told which it could.
    pub(crate) fn link(self, world: usize, opened: Opened, mapped: &[Vec<bool>]) -> Result<Rings> {
        let mut rings = Rings::none(world);
        // From here on the memory needs no descriptor: a rank that has not mapped it will not use it.
        let Ok(Lent { own, .. }) = self.lent else { return Ok(rings) };
        for ((index, member), (peer, mapped)) in
            self.members.iter().enumerate().zip(opened.0.into_iter().zip(mapped))
        {
            let (Some((peer, pid)), Some(true)) = (peer, mapped.get(self.me)) else { continue };
            let ends = own.consumer(index).zip(peer.producer(self.me));
            let missing = || Error::malformed(format!("an end of the rings with rank {member} is missing"));
            let (inbound, outbound) = ends.ok_or_else(missing)?;
            if let Some(link) = rings.links.get_mut(member.index()) {
                *link = Some(Link { peer, pid, inbound, outbound });
            }
        }
        Ok(Rings { own: Some(own), ..rings })
    }
}

/// The sizes of each member's rings. None if no rank shares memory, or too many do.
fn layout(members: usize) -> Option<Layout> {
    let share = INBOUND / members.max(1);
    let ring_bytes = share.clamp(MIN_RING, RING).next_multiple_of(ALIGNMENT);
    (members > 1 && share >= MIN_RING).then_some(Layout { rings: members, ring_bytes })
}

/// Rings for the others to map; or why there are none. This rank sends itself nothing.
fn lend(me: usize, layout: Layout) -> Result<Result<Lent, String>> {
    let nonce = random::number()?;
    let created = Segment::create_without(Some(me), layout, nonce);
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
