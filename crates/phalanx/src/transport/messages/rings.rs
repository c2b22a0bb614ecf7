//! Finds out, pair by pair, which ranks can map each other's memory: these exchange messages through rings.

use std::sync::Arc;

use phalanx_sys::shared::{Consumer, Producer, Segment};

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::transport::health::Health;
use crate::transport::shared_memory::{self, Address, key, share_with_all};
use crate::transport::tcp::Place;

/// What ranks tell each other in the store: where the memory of their messages is, and whose each could map.
const MEMORY: &str = "messages/memory";
const MAPPED: &str = "messages/mapped";

/// The rings that join this rank with others, by rank; none where a pair shares no memory.
pub(in crate::transport) struct Rings {
    pub own: Option<Arc<Segment>>,
    pub links: Vec<Option<Link>>,
}

/// What joins this rank with a peer.
pub(in crate::transport) struct Link {
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

/// Tells the others not to wait for this rank's memory.
pub(in crate::transport) fn decline(place: &Place<'_>, deadline: Deadline) -> Result<()> {
    let word: Result<(), String> = Err("it was told to use TCP".to_owned());
    let word = postcard::to_stdvec(&word)
        .map_err(|error| Error::protocol("a word on memory could not be written").with_source(error))?;
    let [memory, mapped] = [MEMORY, MAPPED].map(|topic| key(topic, place.rank));
    place.store.multi_set(&[(&memory, &word), (&mapped, &word)], deadline)
}

/// Maps the memory of whom this rank can, and gives the rings of those who could map this rank's in turn.
pub(in crate::transport) fn rings(place: &Place<'_>, health: &Health, deadline: Deadline) -> Result<Rings> {
    let (rank, world) = (place.rank, place.world);
    // All ranks find this alike, so none needs to be told.
    let Some(layout) = shared_memory::layout(world) else { return Ok(Rings::none(world.count())) };
    let lent = shared_memory::lend(layout)?;
    let own = lent.as_ref().ok().map(|lent| &lent.own);
    let address = lent.as_ref().map(|lent| &lent.address).map_err(Clone::clone);
    let addresses: Vec<Result<Address, String>> = share_with_all(place, health, MEMORY, &address, deadline)?;
    let boot = address.as_ref().map(|address| address.boot.clone()).unwrap_or_default();
    let opened: Vec<Option<Arc<Segment>>> = world
        .ranks()
        .zip(addresses)
        .map(|(peer, address)| {
            let address =
                address.ok().filter(|address| own.is_some() && peer != rank && address.boot == boot)?;
            let segment = address.open(layout);
            segment.map_err(|error| tracing::debug!(%peer, %error, "messages go over TCP")).ok()
        })
        .collect();
    let mapped: Result<Vec<bool>, String> = Ok(opened.iter().map(Option::is_some).collect());
    let mapped: Vec<Result<Vec<bool>, String>> = share_with_all(place, health, MAPPED, &mapped, deadline)?;
    let Some(own) = own else { return Ok(Rings::none(world.count())) };
    let links = opened.into_iter().zip(mapped).enumerate().map(|(index, (peer, mapped))| {
        let (Some(peer), Ok(mapped)) = (peer, mapped) else { return Ok(None) };
        if mapped.get(rank.index()) != Some(&true) {
            return Ok(None);
        }
        link(rank, own, peer, index).map(Some)
    });
    Ok(Rings { links: links.collect::<Result<_>>()?, own: Some(own.clone()) })
}

/// In a rank's memory, ring p is the one that rank p writes.
fn link(rank: Rank, own: &Arc<Segment>, peer: Arc<Segment>, index: usize) -> Result<Link> {
    let ends = own.consumer(index).zip(peer.producer(rank.index()));
    let (inbound, outbound) =
        ends.ok_or_else(|| Error::protocol(format!("an end of the rings with rank {index} is missing")))?;
    Ok(Link { peer, inbound, outbound })
}
