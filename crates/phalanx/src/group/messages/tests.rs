use std::net::Ipv4Addr;
use std::time::Duration;

use super::*;
use crate::dtype::DType;
use crate::group::{Ground, Identity, Origin, ProcessGroup};
use crate::rank::WorldSize;
use crate::store::MemoryStore;
use crate::transport::{self, Place, TransportKind};

/// The groups of ranks of which each was told what its data goes over.
fn groups(kinds: &[Option<TransportKind>]) -> Vec<ProcessGroup> {
    let store = MemoryStore::new();
    let world = WorldSize::new(kinds.len() as u32).unwrap();
    let join = |rank: Rank, kind| {
        let interface = Ipv4Addr::LOCALHOST.into();
        let place = Place { store: &store, rank, world, epoch: Epoch(0), interface };
        let connected = transport::connect(&place, kind, Deadline::after(Duration::from_secs(20))).unwrap();
        let origin = Origin {
            ground: Ground::process(),
            local: LocalPlace { rank: rank.get(), world_size: 1 },
            epoch: Epoch(0),
            _keep_alive: Arc::new(()),
            members: None,
        };
        ProcessGroup::new(Identity { rank, world, trace: Trace::default(), origin }, connected).unwrap()
    };
    std::thread::scope(|scope| {
        let join = &join;
        let ranks: Vec<_> =
            world.ranks().zip(kinds).map(|(rank, kind)| scope.spawn(move || join(rank, *kind))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn each_pair_has_its_own_transport_and_all_of_them_move_at_once() {
    // Ranks 0 and 1 share memory; rank 2 does so with nobody.
    let groups = groups(&[None, None, Some(TransportKind::Tcp)]);
    std::thread::scope(|scope| {
        for group in &groups {
            let group = group.with_timeout(Duration::from_secs(20));
            scope.spawn(move || {
                let rank = group.rank();
                let end = line(&group.inner.messages.shared.inbound, Rank::new((rank.get() + 1) % 3))
                    .unwrap()
                    .end();
                assert_eq!(end.socket().is_some(), !rank.is_main());
                drop(end);
                let others = || group.world_size().ranks().filter(|peer| *peer != rank);
                for length in [1, 1000, 5 << 20] {
                    let sent = others()
                        .map(|to| P2pOp::send(Buffer::from_slice(&vec![rank.get() as u8; length]), to));
                    let received = others().map(|from| P2pOp::recv(Buffer::zeroed(DType::U8, length), from));
                    let works = group.batch_isend_irecv(sent.chain(received).collect()).unwrap();
                    for (from, work) in others().zip(works.into_iter().skip(2)) {
                        let got = work.wait().unwrap();
                        assert!(got.as_bytes().iter().all(|byte| u32::from(*byte) == from.get()));
                    }
                }
            });
        }
    });
}
