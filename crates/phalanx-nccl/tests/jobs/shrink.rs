//! Communicators of which some ranks remain.

use std::time::Duration;

use phalanx::{ProcessGroup, Rank, ReduceOp, Result};
use phalanx_nccl::{Communicator, CommunicatorHandle, Device, DeviceBuffer};

use crate::world::{World, all_done, calls_of_nccl, meet};
use crate::{Needs, Test};

pub const TESTS: &[Test] = &[
    ("ranks_that_remain_shrink_their_communicator_and_shrink_it_again", 8, Needs::Nothing, || {
        all_done("shrink::leaves", 8, &[]);
        all_done("shrink::leaves", 8, &[("NCCL_COMM_BLOCKING", "1")]);
    }),
    ("after_a_death_the_survivors_shrink_their_communicator", 8, Needs::Nothing, || {
        dies(8, "dies", &[REVOKES, ("EXPECTED_CALLS", "1 1 1")]);
        dies(8, "dies", &[REVOKES, ("NCCL_COMM_BLOCKING", "1"), ("EXPECTED_CALLS", "1 1 1")]);
    }),
    ("without_a_revoke_the_survivors_of_a_death_make_a_new_communicator", 8, Needs::StandIn, || {
        dies(8, "dies", &[("EXPECTED_CALLS", "2 0 1")]);
    }),
    ("a_communicator_that_launches_is_aborted_and_not_revoked", 3, Needs::StandIn, || {
        let slow = ("STANDIN_NCCL_SLOW_LAUNCH", "2500");
        dies(3, "dies_meanwhile", &[REVOKES, slow, ("EXPECTED_CALLS", "2 0 0")]);
    }),
    ("a_communicator_in_use_is_not_shrunk", 8, Needs::StandIn, || {
        all_done("shrink::is_used", 8, &[("EXPECTED_CALLS", "2 0 0")]);
    }),
    ("one_that_may_not_be_shrunk_is_not", 3, Needs::Nothing, || all_done("shrink::may_not", 3, &[])),
    ("if_one_rank_cannot_shrink_all_make_a_new_communicator", 8, Needs::StandIn, || {
        let fault = ("STANDIN_NCCL_FAULT", "shrink_error:2:0");
        all_done("shrink::cannot", 8, &[fault, ("EXPECTED_CALLS", "2 1 0")]);
    }),
    ("a_shrink_that_never_ends_is_given_up_by_all", 8, Needs::StandIn, || {
        for blocking in ["0", "1"] {
            let fault = ("STANDIN_NCCL_FAULT", "shrink_hang:2:0");
            let blocking = ("NCCL_COMM_BLOCKING", blocking);
            all_done("shrink::cannot", 8, &[fault, blocking, ("EXPECTED_CALLS", "2 1 0")]);
        }
    }),
    ("a_smaller_group_beside_has_a_communicator_of_its_own_which_is_shrunk", 8, Needs::StandIn, || {
        all_done("shrink::beside", 8, &[]);
    }),
];

/// A version that has `ncclCommRevoke`.
const REVOKES: (&str, &str) = ("STANDIN_NCCL_VERSION", "22807");

/// The rank that leaves, or dies, first.
const FIRST: u32 = 1;

/// All but the dead rank are done.
fn dies(ranks: u32, role: &str, variables: &[(&str, &str)]) {
    let outputs = World::start(&format!("shrink::{role}"), ranks, variables, &[]).outputs();
    for (rank, output) in (0..).zip(outputs) {
        let expected = if rank == FIRST { "" } else { "done" };
        assert_eq!(output.trim(), expected, "rank {rank}");
    }
}

pub fn play(role: &str) -> Result<()> {
    let group = phalanx::init()?;
    let device = Device::of_local_rank(&group)?;
    let nccl = Communicator::new(&group, &device)?;
    let nccl = if role == "may_not" { nccl } else { nccl.shrinkable() };
    assert_eq!(nccl.is_shrinkable(), role != "may_not");
    // Another handle with which a rank may make calls.
    let used = (role == "is_used" && group.rank() == Rank::new(2)).then(|| nccl.clone());
    let handle = CommunicatorHandle::new(nccl);
    if role == "beside" {
        return beside(&group, &handle);
    }
    let left: Vec<Rank> = group.world_size().ranks().filter(|rank| rank.get() != FIRST).collect();
    // While all are there.
    let part = group.new_group(&left)?;
    assert_eq!(sum(&handle)?, group.world_size().get() as f32);
    // Until then another rank may not know yet that its call is done.
    meet(&group)?;
    let Some(part) = part else {
        if role == "dies_meanwhile" {
            // The others have begun their next call by then.
            std::thread::sleep(Duration::from_millis(500));
        }
        if role.starts_with("dies") {
            std::process::abort();
        }
        return Ok(());
    };
    if role.starts_with("dies") {
        let error = sum(&handle).unwrap_err();
        assert_eq!(error.peer(), Some(Rank::new(FIRST)), "{error}");
    }
    // That of the shrink, too.
    let part = if role == "cannot" { part.with_timeout(Duration::from_secs(10)) } else { part };
    assert!(handle.rebind(&part));
    for _ in 0..2 {
        assert_eq!(sum(&handle)?, left.len() as f32);
    }
    assert_eq!(handle.connect()?.rank(), part.rank());
    if let Ok(expected) = std::env::var("EXPECTED_CALLS")
        && !crate::is_real()
    {
        let calls = calls_of_nccl().map(|count| count.to_string());
        assert_eq!(calls.join(" "), expected, "of init, shrink and revoke");
    }
    drop(used);
    if role == "leaves" {
        assert_calls([1, 1, 0]);
        // Of what was shrunk two ranks remain.
        let Some(pair) = part.new_group(&[Rank::new(1), Rank::new(4)])? else { return part.barrier() };
        assert!(handle.rebind(&pair));
        assert_eq!(sum(&handle)?, 2.0);
        assert_calls([1, 2, 0]);
    }
    part.barrier()
}

/// Ranks of a smaller group average among themselves, too, and then fewer of them.
fn beside(group: &ProcessGroup, all: &CommunicatorHandle) -> Result<()> {
    let ranks: Vec<Rank> = group.world_size().ranks().filter(|rank| rank.get() != FIRST).collect();
    if let Some(part) = group.new_group(&ranks)? {
        let smaller = all.subgroup(&part);
        assert!(smaller.current().is_none() && !smaller.rebind(&part));
        assert_eq!(sum(&smaller)?, ranks.len() as f32);
        assert!(smaller.current().is_some_and(|nccl| nccl.is_shrinkable()));
        assert_calls([2, 0, 0]);
        if let Some(pair) = part.new_group(&[Rank::new(1), Rank::new(4)])? {
            assert!(smaller.rebind(&pair));
            assert_eq!(sum(&smaller)?, 2.0);
            assert_calls([2, 1, 0]);
        }
        part.barrier()?;
    }
    // That of all ranks is as it was.
    assert_eq!(sum(all)?, group.world_size().get() as f32);
    meet(group)
}

/// Checks how often this process has called `ncclCommInitRankConfig`, `ncclCommShrink` and `ncclCommRevoke`, which the stand-in alone counts. A real
/// NCCL that does not shrink leaves a warning.
fn assert_calls(expected: [i32; 3]) {
    if !crate::is_real() {
        assert_eq!(calls_of_nccl(), expected);
    }
}

/// The number of ranks, as the current communicator adds it up.
fn sum(handle: &CommunicatorHandle) -> Result<f32> {
    let nccl = handle.connect()?;
    let mut one = DeviceBuffer::from_slice(nccl.stream(), &[1.0f32])?;
    nccl.all_reduce(&mut one, ReduceOp::Sum)?;
    Ok(one.to_vec(nccl.stream())?[0])
}
