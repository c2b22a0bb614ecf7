//! From a group to a communicator, and what can go wrong.

use std::time::Duration;

use phalanx::{ReduceOp, Result};
use phalanx_nccl::{Communicator, Device};

use crate::world::World;
use crate::{Needs, Test, is_real};

pub const TESTS: &[Test] = &[
    ("two_ranks_on_one_device_get_what_nccl_says", 1, Needs::Nothing, one_device),
    ("ranks_that_see_one_device_each_take_it", 2, Needs::StandIn, own_device),
    ("ranks_that_share_a_device_are_named_whatever_nccl_says", 2, Needs::StandIn, shared_device),
    ("a_library_that_one_rank_lacks_is_told_to_all_and_the_group_goes_on", 1, Needs::Nothing, missing),
    ("an_old_library_is_refused", 2, Needs::StandIn, old),
    ("different_versions_are_named", 2, Needs::StandIn, different),
    ("a_rank_that_nccl_cannot_connect_is_told_to_all", 2, Needs::StandIn, error),
    ("a_rank_that_never_connects_ends_with_the_time_out", 2, Needs::StandIn, hang),
    ("a_rank_that_dies_while_the_others_connect_is_named", 2, Needs::StandIn, death),
];

pub fn play(role: &str) -> Result<()> {
    let group = phalanx::init()?.with_timeout(Duration::from_secs(if role == "hang" { 8 } else { 60 }));
    let device = match role {
        "one_device" => Device::open(0)?,
        "local_rank" => Device::of_local_rank(&group)?,
        _ => Device::open(group.local_rank() % Device::count()?)?,
    };
    if role == "death" && group.rank().get() == 1 {
        // The other rank is in `Communicator::new` and waits for this one, which NCCL never connects.
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_millis(500));
            std::process::abort();
        });
    }
    let outcome = Communicator::new(&group, &device);
    if role == "stays" {
        let mut sum = [1i32];
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        assert_eq!(sum, [2]);
    }
    outcome?.barrier()
}

/// Two ranks' errors.
fn errors(role: &str, variables: &[(&str, &str)], of_rank: &[(u32, &str, &str)]) -> Vec<String> {
    World::start(&format!("init::{role}"), 2, variables, of_rank).outputs()
}

fn one_device() {
    for (rank, error) in errors("one_device", &[], &[]).into_iter().enumerate() {
        println!("rank {rank}: {error}");
        // A later NCCL may permit it, or say it in other words.
        let says_so =
            error.contains("ranks 0 and 1 use the same device") && error.contains("Communicator::new");
        assert!(says_so || (is_real() && error.trim() == "done"), "rank {rank}: {error}");
    }
}

/// As with Slurm's `--gpus-per-task`: every task has a device 0, and each is another one.
fn own_device() {
    let first = [(0, "STANDIN_CUDA_FIRST", "0"), (1, "STANDIN_CUDA_FIRST", "1")];
    for output in errors("local_rank", &[("STANDIN_CUDA_DEVICES", "1")], &first) {
        assert_eq!(output.trim(), "done");
    }
}

fn shared_device() {
    let variables = [("STANDIN_CUDA_DEVICES", "1"), ("STANDIN_NCCL_VERSION", "23004")];
    for error in errors("local_rank", &variables, &[]) {
        assert!(error.contains("Two ranks on one GPU"), "{error}");
        assert!(error.contains("ranks 0 and 1 use the same device"), "{error}");
    }
}

fn missing() {
    let errors = errors("stays", &[], &[(1, "PHALANX_NCCL_LIBRARY", "/nowhere/libnccl.so.2")]);
    assert!(errors[0].contains("rank 1 cannot take part: libnccl.so.2 cannot be opened"), "{}", errors[0]);
    assert!(errors[1].contains("does PHALANX_NCCL_LIBRARY name a libnccl.so.2"), "{}", errors[1]);
}

fn old() {
    for error in errors("stays", &[("STANDIN_NCCL_VERSION", "22605")], &[]) {
        assert!(error.contains("is NCCL 2.26.5, and this needs 2.27.0 or later"), "{error}");
    }
}

fn different() {
    for error in errors("stays", &[], &[(1, "STANDIN_NCCL_VERSION", "22803")]) {
        assert!(error.contains("rank 1 has NCCL 2.28.3, and rank 0 has 2.27.3"), "{error}");
    }
}

fn error() {
    for error in errors("error", &[("STANDIN_NCCL_FAULT", "init_error:1:0")], &[]) {
        assert!(error.starts_with("rank 1 (") && error.contains("Communicator::new"), "{error}");
        assert!(error.contains("unhandled system error: the stand-in was told to fail"), "{error}");
    }
}

/// The variable goes before the configuration: NCCL's functions then wait for the other ranks.
const BLOCKING: [[(&str, &str); 1]; 2] = [[("NCCL_COMM_BLOCKING", "0")], [("NCCL_COMM_BLOCKING", "1")]];

fn hang() {
    for blocking in BLOCKING {
        for error in errors("hang", &[[("STANDIN_NCCL_FAULT", "init_hang:1:0")], blocking].concat(), &[]) {
            assert!(error.contains("the ranks were not connected by NCCL in time"), "{error}");
        }
    }
}

fn death() {
    for blocking in BLOCKING {
        let fault = [("STANDIN_NCCL_FAULT", "init_hang:1:0")];
        let errors = errors("death", &[fault, blocking].concat(), &[]);
        assert!(errors[0].contains("rank 1 (") && errors[0].contains("died"), "{}", errors[0]);
    }
}
