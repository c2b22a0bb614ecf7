//! Ranks that leave, with operations of their group in graphs that have not run backward. Burn keeps such a graph: here as long as its output lives,
//! and else until a later backward pass of the process.

use std::sync::Barrier;
use std::time::Duration;

use burn::nn::{BatchNormConfig, LinearConfig};
use burn::tensor::Tensor;
use phalanx::join::JoinGroup;
use phalanx::{Communicator, GroupHandle, ProcessGroup, Rank};
use phalanx_burn::parallel::StageLink;
use phalanx_burn::parallel::fsdp::{FullySharded, ShardingGroup};
use phalanx_burn::parallel::tensor::TensorGroup;
use phalanx_burn::{Collectives, SyncBatchNorm};

use crate::common::{device, run};
use crate::unused::Log;

/// What gives a tensor with a graph in which there are operations of the group.
type Pass = fn(&ProcessGroup) -> Tensor<1>;

fn input() -> Tensor<2> {
    Tensor::ones([2, 4], &device()).require_grad()
}

fn reduced(group: &ProcessGroup) -> Tensor<1> {
    let tensor = TensorGroup::new(group);
    tensor.reduce(tensor.copy(input())).sum()
}

fn gathered(group: &ProcessGroup) -> Tensor<1> {
    input().all_gather(group).unwrap().sum()
}

fn normalised(group: &ProcessGroup) -> Tensor<1> {
    let norm = BatchNormConfig::new(4).init(&device());
    SyncBatchNorm::new(norm, group).forward(input()).sum()
}

fn joined(group: &ProcessGroup) -> Tensor<1> {
    let norm = BatchNormConfig::new(4).init(&device());
    SyncBatchNorm::new(norm, &JoinGroup::new(group.clone())).forward(input()).sum()
}

fn linked(group: &ProcessGroup) -> Tensor<1> {
    let link = StageLink::new(group, Rank::new(1 - group.rank().get())).unwrap();
    if group.rank().is_main() {
        link.send_forward(input()).unwrap()
    } else {
        link.recv_forward::<2>(&device()).unwrap().sum()
    }
}

fn sharded(group: &ProcessGroup) -> Tensor<1> {
    let sharding = ShardingGroup::new(group).unwrap();
    let unit = FullySharded::new(LinearConfig::new(4, 4).init(&device()), &sharding).unwrap();
    unit.forward(input(), |layer, x| layer.forward(x)).sum()
}

const PASSES: [(&str, Pass); 6] = [
    ("TensorGroup", reduced),
    ("all_gather", gathered),
    ("SyncBatchNorm", normalised),
    ("SyncBatchNorm of a JoinGroup", joined),
    ("StageLink", linked),
    ("FullySharded", sharded),
];

#[test]
fn a_rank_leaves_with_its_last_handle_and_does_not_wait_for_a_graph_to_run_backward() {
    const LIMIT: Duration = Duration::from_secs(120);
    for (name, pass) in PASSES {
        let together = Barrier::new(2);
        run(2, |group| {
            let limited = group.with_timeout(LIMIT);
            drop(group);
            let output = pass(&limited);
            together.wait();
            if limited.rank().is_main() {
                let error = limited.barrier().unwrap_err();
                together.wait();
                assert!(!error.is_timeout(), "{name}: {error}");
            } else {
                drop(limited);
                together.wait();
            }
            drop(output);
        });
    }
}

#[test]
fn a_backward_pass_whose_group_is_gone_ends_the_other_groups_of_its_rank_with_the_cause() {
    for (name, pass) in PASSES {
        let together = Barrier::new(2);
        run(2, |group| {
            let part = group.split(Some(0), 0).unwrap().unwrap();
            let output = pass(&part);
            // The first error ends the groups, in which the other rank may still compute.
            together.wait();
            drop(part);
            drop(output.backward());
            let cause = group.failure().unwrap().to_string();
            assert!(cause.contains("dropped"), "{name}: {cause}");
        });
    }
}

fn finite_without_its_layer<C: Communicator + Clone + 'static>(group: &C) -> bool {
    let (x, norm) = (input(), BatchNormConfig::new(4).init(&device()));
    let output = SyncBatchNorm::new(norm, group).forward(x.clone()).sum();
    x.grad(&output.backward()).unwrap().into_data().iter::<f32>().all(f32::is_finite)
}

/// As a layer that a model makes in its forward pass.
#[test]
fn a_backward_pass_needs_the_group_and_not_the_layer_that_was_made_with_it() {
    run(2, |group| {
        assert!(finite_without_its_layer(&group));
        assert!(finite_without_its_layer(&GroupHandle::new(group.clone())));
        assert!(finite_without_its_layer(&JoinGroup::new(group.clone())));
        group.barrier().unwrap();
    });
}

#[test]
fn a_backward_pass_that_exchanges_nothing_needs_no_group() {
    let together = Barrier::new(2);
    run(2, |group| {
        let part = group.split(Some(0), 0).unwrap().unwrap();
        let x = input();
        let sum = TensorGroup::new(&part).reduce(x.clone()).sum();
        let norm = SyncBatchNorm::new(BatchNormConfig::new(4).init(&device()), &part);
        let normalised = norm.forward(Tensor::<2>::ones([2, 4], &device())).sum();
        together.wait();
        drop((part, norm));
        let gradient = x.grad(&(sum + normalised).backward()).unwrap().into_data();
        assert!(gradient.iter::<f32>().all(|gradient| gradient == 1.0));
        group.barrier().unwrap();
    });
}

/// Then no call of a group gives the cause.
#[test]
fn a_warning_says_once_why_gradients_are_not_numbers_if_all_groups_of_a_rank_are_gone() {
    let together = Barrier::new(2);
    run(2, |group| {
        let log = Log::default();
        tracing::subscriber::with_default(log.clone(), || {
            let x = input();
            let tensor = TensorGroup::new(&group);
            let output = tensor.reduce(tensor.copy(tensor.copy(x.clone()))).sum();
            together.wait();
            drop((tensor, group));
            let gradient = x.grad(&output.backward()).unwrap().into_data();
            assert!(gradient.iter::<f32>().all(f32::is_nan));
        });
        let warnings = log.0.lock().iter().filter(|warning| warning.contains("has dropped a group")).count();
        assert_eq!(warnings, 1);
    });
}
