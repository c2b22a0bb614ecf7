//! Ranks as processes of one host: frames pass through rings in shared memory.
//!
//! What is combined is combined straight out of the ring, so a message is copied once, by its sender. Who lives, who
//! died and why, the control connections say: nothing in here detects a failure, and every sleep is short enough to ask.

mod connect;
mod stream;

use std::sync::Arc;
use std::time::Duration;

use phalanx_sys::shared::{Consumer, Producer, Segment};

pub(super) use self::connect::{Address, decline, key, layout, lend, rings, share_with_all};
use self::stream::{Receiving, Sending, has_line};
use super::health::Health;
use super::tcp::Monitor;
use super::{Incoming, Outgoing, Transport, late};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::rank::Rank;

/// A rank sleeps this long at most before it asks whether its group is still well.
const SLEEP: Duration = Duration::from_millis(10);
/// Looks at the rings before a rank goes to sleep, a few microseconds, if every rank can have a processor of its own.
const SPINS: u32 = 200;

/// Rounds of an exchange between looks at the clock, while there is something to do.
const CLOCK: u64 = 256;

/// One rank's rings from and to all others.
pub(crate) struct SharedMemory {
    rank: Rank,
    health: Arc<Health>,
    rings: Rings,
    spins: u32,
    /// Says goodbye when nobody holds it any more.
    _monitor: Arc<Monitor>,
}

/// The memory of all ranks, by rank, as one of them maps it.
pub(super) struct Rings {
    own: Arc<Segment>,
    /// None for this rank itself.
    links: Vec<Option<Link>>,
}

/// What joins this rank with a peer.
struct Link {
    /// The peer's memory, for its doorbell.
    peer: Arc<Segment>,
    inbound: Consumer,
    outbound: Producer,
}

impl SharedMemory {
    pub(super) fn new(rank: Rank, rings: Rings, health: Arc<Health>, monitor: Arc<Monitor>) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let spins = if rings.links.len() <= processors { SPINS } else { 0 };
        Self { rank, health, rings, spins, _monitor: monitor }
    }
}

impl Transport for SharedMemory {
    fn exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        recv: Option<Incoming<'_>>,
        deadline: Deadline,
    ) -> Result<()> {
        let (rank, spins) = (self.rank, self.spins);
        let (to, from) = (send.as_ref().map(|frame| frame.to), recv.as_ref().map(|frame| frame.from));
        let Rings { own, links } = &mut self.rings;
        let (mut outbound, mut inbound) = ends(links, rank, to, from)?;
        let mut sending = send.as_ref().map(Sending::new);
        let mut receiving = recv.map(|frame| Receiving::new(rank, frame));
        let (mut idle, mut rounds) = (0, 0u64);
        loop {
            let mut progress = false;
            if let (Some(frame), Some((ring, peer))) = (&mut sending, &mut outbound)
                && frame.push(ring)?
            {
                progress = true;
                peer.doorbell().ring();
                if frame.is_done() {
                    sending = None;
                }
            }
            if let (Some(frame), Some((ring, peer))) = (&mut receiving, &mut inbound)
                && frame.pull(ring)?
            {
                progress = true;
                peer.doorbell().ring();
                if frame.is_done() {
                    receiving = None;
                }
            }
            if sending.is_none() && receiving.is_none() {
                return Ok(());
            }
            let waits_for = from.filter(|_| receiving.is_some()).or(to).unwrap_or(rank);
            if progress {
                idle = 0;
                rounds += 1;
                // Seldom, as the clock costs time; but a peer that trickles must not put the deadline off for ever.
                if rounds % CLOCK == 0 && deadline.has_passed() {
                    return Err(late(waits_for, self.health.host(waits_for)));
                }
                continue;
            }
            if idle < spins {
                idle += 1;
                std::hint::spin_loop();
                continue;
            }
            // Asked before the last look: what a peer published before it left, or died, still counts.
            let is_over = self.health.has_failed() || self.health.has_left(waits_for);
            let timeout = if is_over { Duration::ZERO } else { SLEEP.min(deadline.remaining()) };
            let mut found = false;
            own.doorbell().sleep_unless(timeout, || {
                let can_push =
                    sending.is_some() && outbound.as_mut().is_some_and(|(ring, _)| ring.room() != Ok(0));
                let can_pull =
                    receiving.is_some() && inbound.as_mut().is_some_and(|(ring, _)| has_line(ring));
                found = can_push || can_pull;
                found
            });
            if is_over && !found {
                return Err(self.health.peer_failed(waits_for, "it takes no part any more"));
            }
            // Also if there is something to do, as over TCP.
            if deadline.has_passed() {
                return Err(late(waits_for, self.health.host(waits_for)));
            }
        }
    }
}

/// An end of a ring, with the memory of the peer at the other end.
type End<'a, T> = Option<(&'a mut T, &'a Segment)>;

/// The rings to `to` and from `from`, which may be the same peer.
fn ends(
    links: &mut [Option<Link>],
    rank: Rank,
    to: Option<Rank>,
    from: Option<Rank>,
) -> Result<(End<'_, Producer>, End<'_, Consumer>)> {
    let (mut outbound, mut inbound) = (None, None);
    for (index, link) in links.iter_mut().enumerate() {
        let Some(Link { peer, inbound: consumer, outbound: producer }) = link else { continue };
        if to.is_some_and(|to| to.index() == index) {
            outbound = Some((producer, &**peer));
        }
        if from.is_some_and(|from| from.index() == index) {
            inbound = Some((consumer, &**peer));
        }
    }
    if (to.is_some() && outbound.is_none()) || (from.is_some() && inbound.is_none()) {
        return Err(Error::invalid_argument(format!("rank {rank} has no such peer")));
    }
    Ok((outbound, inbound))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Instant;

    use super::*;
    use crate::collective::kernel::Kernel;
    use crate::collective::{Combine, ReduceOp};
    use crate::dtype::DType;
    use crate::rank::{Epoch, Sequence, WorldSize};
    use crate::store::MemoryStore;
    use crate::transport::tcp::{self, Place};
    use crate::transport::{TransportKind, connect, messages};
    use crate::wire::frame::{Call, Header, Operation};

    const LIMIT: Duration = Duration::from_secs(20);
    const HASTE: Duration = Duration::from_millis(200);
    const LENGTH: usize = 1 << 27;

    fn place(store: &MemoryStore, rank: u32) -> Place<'_> {
        let interface = Ipv4Addr::LOCALHOST.into();
        Place { store, rank: Rank::new(rank), world: WorldSize::new(2).unwrap(), epoch: Epoch(0), interface }
    }

    fn header() -> Header {
        let (operation, elements) = (Operation::PointToPoint, LENGTH as u64);
        let call = Call { operation, dtype: DType::U8, elements, reduce: None, root: None };
        Header { call, sequence: Sequence(0), epoch: Epoch(0), payload: elements }
    }

    /// What rank 0 gets from a peer that, after a header, does as it likes until the rank has given up.
    fn received_from(timeout: Duration, peer: impl Fn(&mut Link, &AtomicBool) + Sync) -> Error {
        let (store, deadline, over) = (MemoryStore::new(), Deadline::after(LIMIT), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                let place = place(&store, 1);
                let mesh = tcp::mesh(&place, deadline).unwrap();
                let (health, connections) = (Health::new(place.rank, mesh.hosts), Arc::new(mesh.connections));
                let _monitor = Monitor::start(place.rank, connections, health.clone()).unwrap();
                let _messages = messages::rings(&place, &health, deadline).unwrap();
                let mut rings = rings(&place, &health, deadline).unwrap().unwrap();
                let link = rings.links[0].as_mut().unwrap();
                let mut head = [0; 64];
                head[..48].copy_from_slice(&header().encode());
                link.outbound.push(&head).unwrap();
                link.outbound.publish();
                peer(link, &over);
            });
            let kind = Some(TransportKind::SharedMemory);
            let mut transport = connect(&place(&store, 0), kind, deadline).unwrap().transport;
            let mut into = vec![0; LENGTH];
            let kernel =
                Kernel { dtype: DType::U8, op: ReduceOp::Sum, combine: Combine::Replace, completes: None };
            let frame = Incoming { from: Rank::new(1), expect: header(), into: &mut into, kernel };
            let start = Instant::now();
            let outcome = transport.exchange(None, Some(frame), Deadline::after(timeout));
            over.store(true, Ordering::Relaxed);
            assert!(start.elapsed() < LIMIT / 4, "it took {:?}", start.elapsed());
            outcome.unwrap_err()
        })
    }

    fn push(link: &mut Link, bytes: &[u8]) {
        link.outbound.push(bytes).unwrap();
        link.outbound.publish();
        link.outbound.doorbell().ring();
    }

    #[test]
    fn a_peer_that_stops_within_a_line_is_late() {
        let error = received_from(HASTE, |link, over| {
            push(link, &[1; 100]);
            while !over.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(1));
            }
        });
        assert!(error.is_timeout() && error.peer() == Some(Rank::new(1)), "{error}");
    }

    #[test]
    fn a_peer_that_leaves_within_a_line_is_noticed() {
        let error = received_from(LIMIT, |link, _| push(link, &[1; 100]));
        assert!(error.is_peer_failure() && error.peer() == Some(Rank::new(1)), "{error}");
    }

    #[test]
    fn a_peer_that_trickles_does_not_put_the_deadline_off() {
        let error = received_from(HASTE, |link, over| {
            // Without a pause the whole payload would be there in time; with a sleep the rank would run idle.
            while !over.load(Ordering::Relaxed) {
                push(link, &[1; 64]);
                let pause = Instant::now();
                while pause.elapsed() < Duration::from_micros(2) {}
            }
        });
        assert!(error.is_timeout() && error.peer() == Some(Rank::new(1)), "{error}");
    }

    #[test]
    fn ranks_that_were_told_different_things_agree_on_tcp() {
        let store = MemoryStore::new();
        let join = |rank, kind| {
            connect(&place(&store, rank), kind, Deadline::after(LIMIT)).map(|it| it.kind.unwrap())
        };
        thread::scope(|scope| {
            let told = scope.spawn(|| join(0, Some(TransportKind::Tcp)).unwrap());
            assert_eq!(join(1, None).unwrap(), TransportKind::Tcp);
            assert_eq!(told.join().unwrap(), TransportKind::Tcp);
        });
    }
}
