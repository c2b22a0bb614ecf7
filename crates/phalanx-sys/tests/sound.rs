//! Programs without unsafe code that try to get the same memory twice.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use phalanx_sys::arena::{Arena, Mapping};
use phalanx_sys::control_block::{ControlBlock, Division, Protocol, Unregistered};
use phalanx_sys::shared::{Layout, Segment};

const CALL: u128 = u128::from_le_bytes(*b"sixteen letters.");
const SHARES: Division = Division { owners: 2, unit: 64, combines_windows: false };

fn arena() -> Arc<Arena> {
    Arena::create(16 << 20, 4, 7).unwrap()
}

/// The arena as a peer maps it, although it is this process's own.
fn reopened(arena: &Arena) -> Arc<Mapping> {
    Arena::open(std::process::id(), arena.descriptor(), arena.bytes(), 7).unwrap()
}

#[test]
fn an_arena_that_is_mapped_again_is_no_other_member() {
    let own = arena();
    assert!(ControlBlock::new(own.clone(), vec![own.mapping().clone(), reopened(&own)], 0).is_none());
    let peer = arena();
    let twice = vec![own.mapping().clone(), reopened(&peer), reopened(&peer)];
    assert!(ControlBlock::new(own.clone(), twice, 0).is_none());
    // The refused call has claimed nothing.
    assert!(ControlBlock::new(own.clone(), vec![own.mapping().clone(), reopened(&peer)], 0).is_some());
}

#[test]
fn an_arena_has_one_control_block() {
    let (own, peer) = (arena(), arena());
    let members = || vec![own.mapping().clone(), reopened(&peer)];
    let first = ControlBlock::new(own.clone(), members(), 0);
    assert!(first.is_some());
    assert!(ControlBlock::new(own.clone(), members(), 0).is_none());
    drop(first);
    // Peers may still be in its last call.
    assert!(ControlBlock::new(own.clone(), members(), 0).is_none());
}

/// Each takes itself for the first, so both would have the first share of both regions.
#[test]
fn ranks_that_count_the_members_otherwise_do_not_meet() {
    let arenas = [arena(), arena()];
    let blocks = [0, 1].map(|me| {
        let (own, other) = (&arenas[me], &arenas[1 - me]);
        let members = vec![own.mapping().clone(), reopened(other)];
        (ControlBlock::new(own.clone(), members, 0).unwrap(), own.clone())
    });
    thread::scope(|scope| {
        for (mut control_block, own) in blocks {
            scope.spawn(move || {
                let mut region = own.alloc(10_000).unwrap();
                let start = Instant::now();
                let mut watch =
                    |_, _| if start.elapsed() > Duration::from_millis(50) { Err("enough") } else { Ok(()) };
                let outcome = control_block.in_place(
                    CALL,
                    region.as_mut_slice(),
                    (SHARES, Unregistered::Later),
                    &mut watch,
                    |operation| Ok(operation.protocol()),
                );
                assert_eq!(outcome, Err("enough"));
                assert_eq!(control_block.missing().collect::<Vec<_>>(), [1]);
            });
        }
    });
}

/// The first and the third both are at index 0 of two, beside the same second one.
#[test]
fn a_rank_does_not_meet_one_that_has_other_members() {
    let [first, second, third] = [(); 3].map(|()| arena());
    let beside = |own: &Arc<Arena>, index: usize, other: &Arena| {
        let mut members = vec![reopened(other), reopened(other)];
        members[index] = own.mapping().clone();
        ControlBlock::new(own.clone(), members, index).unwrap()
    };
    let blocks = [beside(&first, 0, &second), beside(&second, 1, &third), beside(&third, 0, &second)];
    let outcomes = thread::scope(|scope| {
        let threads = blocks.map(|mut control_block| {
            scope.spawn(move || {
                let start = Instant::now();
                let mut watch =
                    |_, _| if start.elapsed() > Duration::from_millis(200) { Err("enough") } else { Ok(()) };
                control_block.small(CALL, &[]).slots(&mut watch).map(|_| ())
            })
        });
        threads.map(|thread| thread.join().unwrap())
    });
    assert_eq!(outcomes[0], Err("enough"));
}

/// What the two ranks of a control block do in earnest is done.
#[test]
fn ranks_that_agree_share_their_regions() {
    let arenas = [arena(), arena()];
    thread::scope(|scope| {
        for me in 0..2 {
            let arenas = &arenas;
            scope.spawn(move || {
                let own = arenas[me].clone();
                let mut members = vec![reopened(&arenas[1 - me]); 2];
                members[me] = own.mapping().clone();
                let mut control_block = ControlBlock::new(own.clone(), members, me).unwrap();
                let mut region = own.alloc(10_000).unwrap();
                region.as_mut_slice().fill(1 + me as u8);
                let outcome = control_block.in_place(
                    CALL,
                    region.as_mut_slice(),
                    (SHARES, Unregistered::Later),
                    &mut |_, _| Ok::<(), ()>(()),
                    |operation| {
                        assert_eq!(operation.protocol(), Protocol::Direct);
                        operation.combine(|shares| shares.iter_mut().for_each(|share| share[0] += 10));
                        Ok(())
                    },
                );
                assert_eq!(outcome, Ok(()));
                // Each rank's share begins at one place of both regions.
                let changed: Vec<usize> =
                    (0..10_000).filter(|at| region.as_slice()[*at] == 11 + me as u8).collect();
                assert_eq!(changed, [0, 4992]);
            });
        }
    });
}

#[test]
fn rings_are_not_divided_otherwise_by_opening_them_again() {
    let layout = Layout { rings: 2, ring_bytes: 128 };
    let (own, invitation) = Segment::create(layout, 7).unwrap();
    let _producer = own.producer(0).unwrap();
    let other = Layout { rings: 1, ring_bytes: 256 };
    assert!(Segment::open(std::process::id(), invitation.descriptor(), other, 7).is_err());
    let again = Segment::open(std::process::id(), invitation.descriptor(), layout, 7).unwrap();
    assert!(again.producer(0).is_none());
}
