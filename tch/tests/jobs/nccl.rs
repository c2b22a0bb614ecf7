//! Gradients that NCCL averages: on the stand-ins for libtorch's devices, libcuda and libnccl each rank has a device of its own; on a real GPU
//! all are on the first one, which NCCL permits to ranks of different hosts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use phalanx::join::{JoinGroup, JoinOptions};
use phalanx::launch::{Job, Outcome};
use phalanx::reducer::ReducerOptions;
use phalanx::reducer::hooks::{
    AllReduce, CommHook, Compressed, GradBucket, HookState, Pending, PostLocalSgd, PowerSgd, PowerSgdOptions,
};
use phalanx::{Communicator, GroupHandle, ProcessGroup, Rank, ReduceOp, Result};
use phalanx_nccl::{CallState, DeviceGroup};
use phalanx_tch::{
    Ddp, DdpOptions, DeviceBucket, DeviceHook, DeviceMessage, Optimizer, PeriodicModelAverager, Rule,
    SyncBatchNorm, TrainState,
};
use rustix::process::{Signal, getpid, kill_process};
use tch::nn::{self, Init, OptimizerConfig, VarStore};
use tch::{Kind, Tensor};

use crate::common::{Mlp, device, distance, elements, floats, load, samples};

/// Those that need a CUDA device.
pub const TESTS: &[(&str, fn())] = &[
    ("gradients_are_those_of_one_process_whatever_memory_they_share", || job("shared", 2)),
    ("ranks_and_passes_count_by_their_weights", || job("weighted", 2)),
    ("gradients_travel_in_half_the_bytes", || job("compressed", 2)),
    ("what_a_static_graph_does_not_use_has_its_average_in_a_pass_of_weight_0", || job("idle", 2)),
    ("averages_are_there_for_what_follows_without_a_wait", || job("at once", 2)),
    ("optimizers_of_tch_train_and_a_type_that_changed_is_refused", || job("own", 2)),
    ("types_of_16_bits_and_of_64_are_averaged", || job("kinds", 2)),
    ("a_state_with_nccl_saves_and_loads", || job("state", 2)),
    ("what_cannot_be_done_in_place_is_refused_by_name", || job("refused", 2)),
    ("a_world_of_one_averages_nothing", || job("refused", 1)),
    ("ranks_that_are_done_answer_the_others_calls", || {
        job("joined", 2);
        job("joined", 3);
    }),
    ("a_synchronised_batch_norm_takes_part_in_a_join", || job("joined norm", 2)),
    ("a_rank_that_dies_in_a_join_is_named", || dies_in_a_join("dies")),
    ("power_sgd_on_the_device_trains_as_in_the_host_s_memory", || {
        job("low rank", 2);
        job("low rank", 3);
    }),
    ("power_sgd_goes_on_after_steps_of_zeros_and_of_nan", || job("low rank steps", 2)),
    ("power_sgd_goes_on_from_checkpoints_of_both", || job("low rank state", 2)),
    ("a_rank_that_dies_under_power_sgd_is_named", || dies_in_a_join("dies low rank")),
    ("ranks_train_by_themselves_as_in_the_host_s_memory", || job("local", 2)),
    ("ranks_of_a_smaller_group_average_as_in_the_host_s_memory", || {
        job("subgroup", 3);
        job("subgroup", 2);
    }),
    ("a_failure_within_a_smaller_group_is_one_of_all_ranks", || job("subgroup fails", 3)),
    ("a_panic_of_a_hook_is_an_error_on_every_rank", || job("own hook panics", 2)),
    ("a_hook_of_the_program_s_own_works_on_the_device", || job("own hook", 2)),
    ("a_hook_of_the_program_s_own_goes_on_from_a_checkpoint", || job("own hook state", 2)),
    ("what_a_hook_of_the_program_s_own_cannot_send_is_refused_by_name", || job("own hook refused", 2)),
    ("the_largest_gradients_are_gathered_with_their_places", || {
        job("largest", 2);
        job("largest", 3);
    }),
    ("integers_are_gathered", || job("gathered integers", 2)),
    ("hooks_that_send_different_messages_are_named", || {
        job("own hook differs", 2);
        job("own hook differs", 3);
    }),
    ("a_hook_that_keeps_its_state_on_the_device_says_so_without_reading_it", || job("own hook label", 2)),
];

/// Those that need the stand-in, whose calls can be held up.
pub const ON_STAND_IN: &[(&str, fn())] = &[
    ("backward_waits_for_no_call_and_a_bucket_is_one", || held_up("held")),
    ("in_a_join_nobody_waits_for_a_call", || held_up("held join")),
    ("memory_of_a_step_that_failed_is_used_again_behind_its_calls", || {
        job_with("failed step", 2, |job, folder| {
            // The calls of a group that has failed may go on for some seconds.
            let job = job.variable("STANDIN_NCCL_ABORT_HANG", "3000");
            job.variable(HOLD, folder.join("go").to_str().unwrap())
        });
    }),
    ("what_is_written_late_is_waited_for_in_a_join", || {
        job_with("late join", 2, |job, _| job.variable("STANDIN_CUDA_LATE", "20000"));
    }),
    ("no_thread_waits_for_the_device_in_backward", || {
        job_with("no wait", 2, |job, folder| job.variable(NO_WAIT, folder.join("nobody").to_str().unwrap()));
    }),
    ("what_a_smaller_group_has_not_averaged_is_in_no_average_of_parameters", || {
        job_with("subgroup fails late", 3, |job, _| job.variable("STANDIN_NCCL_FAULT", "error:1:1"));
    }),
    ("a_smaller_group_is_left_when_its_calls_have_succeeded", || {
        job_with("subgroup left", 3, |job, _| job.variable("STANDIN_NCCL_FAULT", "error:1:1"));
    }),
    ("what_a_smaller_group_has_not_averaged_is_evaluated_by_nobody", || {
        job_with("subgroup evaluated", 3, |job, _| job.variable("STANDIN_NCCL_FAULT", "error:1:1"));
    }),
    ("what_a_smaller_group_has_not_averaged_goes_to_no_other_group", || {
        job_with("subgroup moved", 3, |job, _| job.variable("STANDIN_NCCL_FAULT", "error:1:1"));
    }),
    ("a_group_that_fails_when_all_calls_are_done_holds_no_state_back", || job("group fails between", 2)),
    ("power_sgd_among_devices_of_several_models_is_refused", || job(OTHER_MODELS, 2)),
    // The current device of the program's thread is the first one.
    ("a_model_may_be_on_another_device_than_the_current_one", || job("second device", 2)),
];

/// Set for ranks of other tests that are to average by NCCL.
pub const NCCL: &str = "PHALANX_TEST_NCCL";

fn job(case: &str, ranks: u32) {
    job_with(case, ranks, |job, _| job);
}

fn held_up(case: &str) {
    job_with(case, 2, |job, folder| job.variable(HOLD, folder.join("go").to_str().unwrap()));
}

/// Names a file: the stand-in's calls begin when it exists.
const HOLD: &str = "STANDIN_NCCL_HOLD";

/// Names a file: while it exists, it is an error if a thread waits for the stand-in's device. With the number of the rank behind it, to each its own.
const NO_WAIT: &str = "STANDIN_CUDA_NO_WAIT";

/// The case in which the ranks' devices have other names.
const OTHER_MODELS: &str = "other models";

fn job_with(case: &str, ranks: u32, more: impl FnOnce(Job, &Path) -> Job) {
    let folder = tempfile::tempdir().unwrap();
    let mut stderr = String::new();
    let job = crate::job(&format!("nccl {case}"), ranks, folder.path()).variable(NCCL, "1");
    let job = more(job, folder.path());
    let report = crate::run(&job, |event| crate::equivalence::note(event, &mut stderr));
    assert!(matches!(report.outcome, Outcome::Succeeded), "{case}: {stderr}");
}

/// Gives this rank a device of its own, or what NCCL needs where ranks share one. For a process that has one thread.
#[allow(unsafe_code)]
pub fn prepare() {
    if std::env::var_os(NCCL).is_none() {
        return;
    }
    let rank = std::env::var("RANK").unwrap();
    let host = format!("host-of-rank-{rank}");
    let variables = [
        ("STANDIN_CUDA_FIRST", rank.as_str()),
        ("NCCL_HOSTID", &host),
        ("NCCL_SOCKET_IFNAME", "lo"),
        ("NCCL_IB_DISABLE", "1"),
        ("NCCL_P2P_DISABLE", "1"),
        ("NCCL_SHM_DISABLE", "1"),
    ];
    let other = std::env::var(crate::ROLE).is_ok_and(|role| role.ends_with(OTHER_MODELS));
    let other = other.then_some(("STANDIN_CUDA_NAME", host.as_str()));
    let own = std::env::var(NO_WAIT).map(|path| format!("{path} {rank}")).ok();
    let own = own.as_ref().map(|own| (NO_WAIT, own.as_str()));
    for (name, value) in variables.into_iter().chain(other).chain(own) {
        // SAFETY: no other thread has been started yet.
        unsafe { std::env::set_var(name, value) };
    }
}

/// A `Ddp` whose gradients NCCL averages if the test says so.
pub fn ddp(store: &VarStore, group: &ProcessGroup, options: DdpOptions) -> Result<Ddp> {
    match std::env::var_os(NCCL) {
        Some(_) => Ddp::with_nccl(store, &devices(group)?, options),
        None => Ddp::with_options(store, group, options),
    }
}

/// A state whose gradients NCCL averages in each group of an elastic job, if the test says so.
pub fn over_nccl<T>(state: TrainState<T>) -> Result<TrainState<T>> {
    match std::env::var_os(NCCL) {
        Some(_) => state.with_nccl_on(&phalanx_nccl::Device::open(0)?).with_options(options()),
        None => Ok(state),
    }
}

/// That NCCL averages the gradients of more than one rank, if the test says so.
pub fn assert_averages(ddp: &Ddp) {
    let is_wanted = std::env::var_os(NCCL).is_some() && ddp.world_size().get() > 1;
    assert!(!is_wanted || format!("{ddp:?}").contains("NCCL"), "{ddp:?}");
}

fn devices(group: &ProcessGroup) -> Result<DeviceGroup> {
    DeviceGroup::new(group.clone(), &phalanx_nccl::Device::open(0)?)
}

/// Several buckets.
fn options() -> DdpOptions {
    let mut options = DdpOptions::default();
    options.reducer = ReducerOptions::default().bucket_cap_mb(0.0005);
    options
}

/// What this program does as a rank.
pub fn play(case: &str) -> Result<()> {
    let group = phalanx::init()?;
    match case {
        "shared" => shared(&group),
        "weighted" => weighted(&group),
        "idle" => idle(&group),
        "compressed" => compressed(&group),
        "at once" => at_once(&group),
        "held" => held(&group),
        "failed step" => failed_step(&group),
        "own" => own(&group),
        "kinds" => kinds(&group),
        "state" => state(&group),
        "joined" => joined(&group),
        "joined norm" => joined_norm(&group),
        "dies" | "dies low rank" => dies(&group, case == "dies low rank"),
        "low rank" => low_rank(&group),
        "low rank steps" => low_rank_steps(&group),
        "low rank state" => low_rank_state(&group),
        "local" => local(&group),
        "subgroup" => subgroup(&group),
        "subgroup fails" => subgroup_fails(&group),
        "subgroup fails late" => subgroup_fails_late(&group),
        "subgroup left" => subgroup_left(&group),
        "subgroup evaluated" => subgroup_evaluated(&group),
        "subgroup moved" => subgroup_moved(&group),
        "group fails between" => group_fails_between(&group),
        "own hook panics" => own_hook_panics(&group),
        "own hook" => own_hook(&group),
        "own hook state" => own_hook_state(&group),
        "own hook refused" => own_hook_refused(&group),
        "own hook differs" => own_hook_differs(&group),
        "own hook label" => own_hook_label(&group),
        "largest" => largest(&group),
        "gathered integers" => gathered_integers(&group),
        "no wait" => no_wait(&group),
        "second device" => second_device(&group),
        OTHER_MODELS => other_models(&group),
        "held join" => held_join(&group),
        "late join" => late_join(&group),
        "refused" => refused(&group),
        other => panic!("no case {other}"),
    }
}

/// Waits until the other rank has come here: an error on this one ends its calls, too. If it has ended this one, that is enough.
fn before_an_error(group: &ProcessGroup) {
    let _met = group.barrier();
}

fn ones(sizes: &[i64], number: f64) -> Tensor {
    Tensor::full(sizes, number, (Kind::Float, device()))
}

/// The gradients of `flat`, `turned` and `added` are views of one tensor, which backward needs until it comes to `first`: averaged in place,
/// they would change each other, and that of `first`.
fn shared(group: &ProcessGroup) -> Result<()> {
    let store = VarStore::new(device());
    let variable = |name: &str, sizes: &[i64]| store.root().var(name, sizes, Init::Const(0.5));
    let (first, flat) = (variable("first", &[4, 6]), variable("flat", &[24]));
    let (turned, added) = (variable("turned", &[6, 4]), variable("added", &[4, 6]));
    let loss = |rank: usize| {
        let x = Tensor::arange(24, (Kind::Float, device())).reshape([4, 6]) * (rank as f64 + 1.0);
        let sum = x * &first + flat.reshape([4, 6]) + turned.tr() + &added;
        (&sum * &sum).sum(Kind::Float)
    };
    let all = [&first, &flat, &turned, &added];
    let expected: Vec<Vec<f32>> = {
        let both = loss(0) + loss(1);
        (both / 2.0).backward();
        all.iter().map(|one| elements(&one.grad())).collect()
    };
    let mut ddp = ddp(&store, group, options())?;
    for _ in 0..4 {
        let loss = ddp.forward(|| loss(group.rank().index()))?;
        zero_grad(&store);
        ddp.backward(&loss)?;
        for (one, expected) in all.iter().zip(&expected) {
            assert_eq!(&elements(&one.grad()), expected);
            assert!(one.grad().is_contiguous());
        }
    }
    Ok(())
}

/// Passes that count nothing bring NaN. What is queued behind backward waits for the division by the sum of weights.
fn weighted(group: &ProcessGroup) -> Result<()> {
    let store = VarStore::new(device());
    let layers: Vec<Tensor> =
        (0..12).map(|index| store.root().var(&format!("l{index}"), &[64, 64], Init::Const(0.0))).collect();
    let mut ddp = ddp(&store, group, options())?;
    // Of the two passes of each rank, step by step.
    let steps = [
        [[3.0, 1.0], [4.0, 2.0]],
        [[0.0, 5.0], [1.0, 0.0]],
        [[0.0, 0.0], [2.0, 0.5]],
        [[1.0, 1.0], [1.0, 1.0]],
        [[0.0, 0.0], [0.0, 7.0]],
    ];
    let slope = |rank: usize, pass: usize, index: usize| (1 + rank * 2 + pass + index) as f64;
    let rank = group.rank().index();
    for (step, weights) in steps.into_iter().enumerate() {
        let total: f64 = weights.iter().flatten().sum();
        let loss = |pass: usize| {
            let nothing = if weights[rank][pass] == 0.0 { f64::NAN } else { 1.0 };
            let parts = layers.iter().enumerate();
            let parts = parts.map(|(index, one)| one.sum(Kind::Float) * (slope(rank, pass, index) * nothing));
            parts.reduce(|a, b| a + b).unwrap()
        };
        match step % 2 {
            0 => zero_grad(&store),
            _ => layers.iter().for_each(|one| one.shallow_clone().zero_grad()),
        }
        let first = ddp.forward(|| loss(0))?;
        ddp.backward_no_sync_weighted(&first, weights[rank][0])?;
        let last = ddp.forward(|| loss(1))?;
        ddp.backward_weighted(&last, weights[rank][1])?;
        let seen: Vec<Tensor> = layers.iter().map(|one| one.grad() * 2.0).collect();
        for (index, seen) in seen.iter().enumerate() {
            let of = |rank: usize, pass: usize| weights[rank][pass] * slope(rank, pass, index);
            let mean = (of(0, 0) + of(0, 1) + of(1, 0) + of(1, 1)) / total;
            let found = elements(seen);
            let near = |one: &f32| (f64::from(*one) - 2.0 * mean).abs() < 1e-5 * mean;
            assert!(found.iter().all(near), "step {step}, {index}: {} for {}", found[0], 2.0 * mean);
        }
    }
    zero_grad(&store);
    let loss = ddp.forward(|| layers[0].sum(Kind::Float) * f64::NAN + all(&layers))?;
    let error = ddp.backward_weighted(&loss, 0.0).unwrap_err().to_string();
    assert!(error.contains("weight"), "{error}");
    // It ends nothing.
    zero_grad(&store);
    let loss = ddp.forward(|| all(&layers) * (rank as f64 + 1.0))?;
    ddp.backward(&loss)?;
    assert_eq!(elements(&layers[3].grad())[..2], [1.5; 2]);
    Ok(())
}

/// Rank 1 never uses `idle`, and counts nothing in some steps. Gradients are zeroed where they lie.
fn idle(group: &ProcessGroup) -> Result<()> {
    let store = VarStore::new(device());
    let [used, idle] = ["used", "idle"].map(|name| store.root().var(name, &[8], Init::Const(0.0)));
    let mut options = options();
    options.reducer = ReducerOptions::default().static_graph(true);
    let mut ddp = ddp(&store, group, options)?;
    for (step, of_rank_1) in [1.0, 0.0, 0.0, 2.0, 0.0].into_iter().enumerate() {
        let of_rank_0 = step as f64 + 1.0;
        for one in [&used, &idle] {
            one.shallow_clone().zero_grad();
        }
        let (loss, weight) = match group.rank().is_main() {
            // Gradients come in another order than that of the first buckets, which are made anew in the second step.
            true => (ddp.forward(|| (&idle * 4.0 + &used * 2.0).sum(Kind::Float))?, of_rank_0),
            false => {
                let slope = if of_rank_1 == 0.0 { f64::NAN } else { 3.0 };
                (ddp.forward(|| (&used * slope).sum(Kind::Float))?, of_rank_1)
            }
        };
        ddp.backward_weighted(&loss, weight)?;
        let total = of_rank_0 + of_rank_1;
        let expected = [(of_rank_0 * 2.0 + of_rank_1 * 3.0) / total, of_rank_0 * 4.0 / total];
        for (one, expected) in [&used, &idle].into_iter().zip(expected) {
            let near = |found: &f32| (f64::from(*found) - expected).abs() < 1e-5;
            let found = elements(&one.grad());
            assert!(found.iter().all(near), "step {step}: {} for {expected}", found[0]);
        }
    }
    Ok(())
}

fn all(layers: &[Tensor]) -> Tensor {
    layers.iter().map(|one| one.sum(Kind::Float)).reduce(|a, b| a + b).unwrap()
}

/// What is queued behind backward waits for averages that are widened again.
fn compressed(group: &ProcessGroup) -> Result<()> {
    for (hook, step_of_one) in [(Compressed::f16(), 2f64.powi(-10)), (Compressed::bf16(), 2f64.powi(-7))] {
        let group = group.split(Some(0), 0)?.unwrap();
        let store = VarStore::new(device());
        let layers: Vec<Tensor> = (0..12)
            .map(|index| store.root().var(&format!("l{index}"), &[64, 64], Init::Const(0.0)))
            .collect();
        let mut ddp = ddp(&store, &group, options())?;
        ddp.register_comm_hook(hook)?;
        let rank = group.rank().index() as f64;
        for step in 1..6 {
            // Halved, that of rank 0 lies between two numbers of the type, and that of rank 1 is one.
            let slope = |rank: f64| if rank == 0.0 { 2.0 + 0.75 * step_of_one } else { step as f64 };
            let loss = ddp.forward(|| all(&layers) * slope(rank))?;
            zero_grad(&store);
            ddp.backward(&loss)?;
            let seen: Vec<Tensor> = layers.iter().map(|one| one.grad() * 2.0).collect();
            for seen in &seen {
                let rounded = 2.0 + step as f64;
                assert_eq!(elements(seen), [rounded as f32; 64 * 64], "step {step}");
            }
        }
        assert_eq!(ddp.communicated_bytes(), 5 * 12 * 64 * 64 * 2);
        zero_grad(&store);
        before_an_error(&group);
        let loss = ddp.forward(|| all(&layers));
        let error = loss.and_then(|loss| ddp.backward_weighted(&loss, 1.0)).unwrap_err().to_string();
        assert!(error.contains("compressed to"), "{error}");
    }
    Ok(())
}

/// Gradients are none, as `set_to_none=True` leaves them.
fn zero_grad(store: &VarStore) {
    Optimizer::new(store, Rule::sgd(0.0)).unwrap().zero_grad().unwrap();
}

/// What is queued right behind backward, and the memory of gradients that are dropped then, wait for the averages.
fn at_once(group: &ProcessGroup) -> Result<()> {
    let store = VarStore::new(device());
    let layers: Vec<Tensor> =
        (0..12).map(|index| store.root().var(&format!("l{index}"), &[64, 64], Init::Const(0.0))).collect();
    let rank = group.rank().index() as f64 + 1.0;
    let mut ddp = ddp(&store, group, options())?;
    for step in 1..6 {
        let loss = ddp.forward(|| {
            let parts = layers
                .iter()
                .enumerate()
                .map(|(index, one)| one.sum(Kind::Float) * (rank * (index + step) as f64));
            parts.reduce(|a, b| a + b).unwrap()
        })?;
        ddp.backward(&loss)?;
        // Queued before anybody has waited for the device.
        let seen: Vec<Tensor> = layers.iter().map(|one| one.grad() * 2.0).collect();
        zero_grad(&store);
        // In the memory of the gradients.
        let others: Vec<Tensor> = layers.iter().map(|_| ones(&[64, 64], 7.0)).collect();
        for (index, (seen, other)) in seen.iter().zip(&others).enumerate() {
            let average = 1.5 * (index + step) as f32;
            assert!(elements(seen).iter().all(|one| *one == average * 2.0), "step {step}, {index}");
            assert!(elements(other).iter().all(|one| *one == 7.0), "step {step}, {index}");
        }
    }
    Ok(())
}

/// Backward returns while its calls are held up, one for each bucket, and what is queued then waits for them.
fn held(group: &ProcessGroup) -> Result<()> {
    let go = PathBuf::from(std::env::var_os(HOLD).unwrap());
    let release = || std::fs::write(&go, "").unwrap();
    if group.rank().is_main() {
        release();
    }
    let devices = devices(group)?;
    let store = VarStore::new(device());
    let layers: Vec<Tensor> =
        (0..12).map(|index| store.root().var(&format!("l{index}"), &[64], Init::Const(0.0))).collect();
    let mut ddp = Ddp::with_nccl(&store, &devices, options())?;
    let rank = group.rank().index() as f64 + 1.0;
    let nccl = devices.device();
    for step in 0..3 {
        // What is held up begins with the calls of this step.
        group.barrier()?;
        if group.rank().is_main() && go.exists() {
            std::fs::remove_file(&go).unwrap();
        }
        group.barrier()?;
        let before = nccl.calls().last().map_or(0, |call| call.sequence.0 + 1);
        let loss = ddp
            .forward(|| layers.iter().map(|one| one.sum(Kind::Float) * rank).reduce(|a, b| a + b).unwrap())?;
        zero_grad(&store);
        ddp.backward(&loss)?;
        assert!(!go.exists(), "somebody has waited");
        let calls: Vec<_> = nccl.calls().into_iter().filter(|call| call.sequence.0 >= before).collect();
        assert_eq!(calls.len(), ddp.bucket_bytes().len(), "step {step}: {calls:?}");
        assert!(calls.iter().all(|call| call.name.contains("all_reduce(avg")), "{calls:?}");
        group.barrier()?;
        if group.rank().is_main() {
            release();
        }
        assert!(layers.iter().all(|one| elements(&one.grad()) == [1.5; 64]), "step {step}");
    }
    Ok(())
}

/// A step that fails when its calls are under way: they go on for a while, and their memory is free.
fn failed_step(group: &ProcessGroup) -> Result<()> {
    // Its error ends its group.
    let group = &group.split(Some(0), 0)?.unwrap();
    let go = PathBuf::from(std::env::var_os(HOLD).unwrap());
    let release = || std::fs::write(&go, "").unwrap();
    if group.rank().is_main() {
        release();
    }
    let devices = devices(group)?;
    let store = VarStore::new(device());
    let [used, idle] = ["used", "idle"].map(|name| store.root().var(name, &[64], Init::Const(0.0)));
    let mut options = options();
    options.reducer = ReducerOptions::default().static_graph(true);
    let mut ddp = Ddp::with_nccl(&store, &devices, options)?;
    let loss = ddp.forward(|| used.sum(Kind::Float))?;
    ddp.backward(&loss)?;
    drop(loss);
    assert_eq!(elements(&used.grad()), [1.0; 64]);
    // What is held up begins with the calls of the next step.
    group.barrier()?;
    if group.rank().is_main() {
        std::fs::remove_file(&go).unwrap();
    }
    group.barrier()?;
    // The first rank's error ends the group, so the other one may get it in an earlier call.
    let mut step = || {
        let loss = ddp.forward(|| (&idle * &used).sum(Kind::Float))?;
        ddp.backward_no_sync(&loss)?;
        let loss = ddp.forward(|| used.sum(Kind::Float))?;
        ddp.backward(&loss)
    };
    let error = step().unwrap_err().to_string();
    assert!(error.contains("idle") && error.contains("static_graph promises"), "{error}");
    drop((ddp, used, idle, store));
    // In the memory of buckets and gradients, of whatever size they are.
    let others: Vec<Tensor> = (0..16).flat_map(|_| [64, 128].map(|count| ones(&[count], 7.0))).collect();
    let are_sevens = || others.iter().all(|one| elements(one).iter().all(|element| *element == 7.0));
    assert!(are_sevens());
    // If the calls have not been waited for, they write now.
    release();
    let nccl = devices.device();
    while nccl.is_aborting() {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(are_sevens(), "a call has written to memory that was used again");
    Ok(())
}

/// tch's own optimizers and `zero_grad` of its tensors, and what changes after the `Ddp` was made.
fn own(group: &ProcessGroup) -> Result<()> {
    let mut store = VarStore::new(device());
    let one = store.root().var("one", &[4], Init::Const(1.0));
    let mut optimizer = nn::Sgd::default().build(&store, 0.5).unwrap();
    let mut ddp = ddp(&store, group, options())?;
    for step in 0..4 {
        let number = group.rank().index() as f64 + 1.0;
        let loss = ddp.forward(|| (&one * number).sum(Kind::Float))?;
        match step % 2 {
            0 => optimizer.zero_grad(),
            _ => one.shallow_clone().zero_grad(),
        }
        ddp.backward(&loss)?;
        assert_eq!(elements(&one.grad()), [1.5; 4], "step {step}");
        optimizer.step();
        assert_eq!(elements(&one), [1.0 - 0.75 * (step as f32 + 1.0); 4], "step {step}");
    }
    optimizer.zero_grad();
    assert!(!one.grad().defined(), "tch's optimizers leave no gradients");
    before_an_error(group);
    store.set_kind(Kind::Double);
    let loss = ddp.forward(|| one.sum(Kind::Double));
    let error = loss.and_then(|loss| ddp.backward(&loss)).unwrap_err().to_string();
    assert!(error.contains("type"), "{error}");
    Ok(())
}

fn kinds(group: &ProcessGroup) -> Result<()> {
    for kind in [Kind::Half, Kind::BFloat16, Kind::Double] {
        let mut store = VarStore::new(device());
        drop(store.root().var("one", &[5], Init::Const(1.0)));
        drop(store.root().var("none", &[0, 3], Init::Const(1.0)));
        store.set_kind(kind);
        let (one, none) = (&store.variables()["one"], &store.variables()["none"]);
        let group = group.split(Some(0), 0)?.unwrap();
        let mut ddp = ddp(&store, &group, options())?;
        let loss =
            ddp.forward(|| (one * (group.rank().index() as f64 * 2.0 + 1.0)).sum(kind) + none.sum(kind))?;
        ddp.backward(&loss)?;
        assert_eq!(one.grad().kind(), kind);
        assert_eq!(elements(&one.grad()), [2.0; 5]);
        assert_eq!(none.grad().size(), [0, 3]);
    }
    Ok(())
}

fn state(group: &ProcessGroup) -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let make = || {
        let store = VarStore::new(device());
        let one = store.root().var("one", &[8], Init::Const(1.0));
        let optimizer = Optimizer::new(&store, Rule::ADAMW)?;
        TrainState::new(&store, optimizer, 0u32)?.with_nccl(&devices(group)?).map(|state| (one, state))
    };
    let (one, mut state) = make()?;
    for _ in 0..3 {
        let number = group.rank().index() as f64 + 1.0;
        let loss = state.ddp.forward(|| (&one * number).square().sum(Kind::Float))?;
        state.optimizer.zero_grad()?;
        state.ddp.backward(&loss)?;
        state.ddp.clip_grad_norm(0.5)?;
        state.step(0.1)?;
    }
    let checkpoints = phalanx::checkpoint::Checkpoints::open(folder.path(), group)?;
    state.checkpoint(&checkpoints)?;
    checkpoints.finish()?;
    let trained = elements(&one);
    drop(state);
    let (one, mut state) = make()?;
    assert!(state.resume(&checkpoints)?);
    assert_eq!(elements(&one), trained);
    assert_eq!(state.steps(), 3);
    assert!(state.ddp.replicas_identical()?);
    Ok(())
}

fn refused(group: &ProcessGroup) -> Result<()> {
    type Call = fn(&mut Ddp) -> Result<()>;
    let cases: [(&str, Call); 2] = [
        ("register_comm_hook(of the test): NCCL averages", |ddp| ddp.register_comm_hook(OfHost)),
        ("warm_start(false) where NCCL averages", |ddp| {
            ddp.register_comm_hook(PowerSgd::new(compressing(0).warm_start(false))?)
        }),
    ];
    for (words, call) in cases {
        let store = VarStore::new(device());
        drop(store.root().var("one", &[3], Init::Const(1.0)));
        // A refusal ends its group.
        let part = group.split(Some(0), 0)?.unwrap();
        let mut ddp = ddp(&store, &part, options())?;
        before_an_error(&part);
        let called = call(&mut ddp);
        match group.world_size().get() {
            1 => called?,
            _ => {
                let error = called.unwrap_err().to_string();
                assert!(error.contains(words), "{words}: {error}");
            }
        }
    }
    let part = group.split(Some(0), 0)?.unwrap();
    foreign_join(&part)?;
    if group.world_size().get() == 1 {
        return Ok(());
    }
    let part = group.split(Some(0), 0)?.unwrap();
    let store = VarStore::new(tch::Device::Cpu);
    drop(store.root().var("one", &[3], Init::Const(1.0)));
    let error = ddp(&store, &part, options()).unwrap_err().to_string();
    assert!(error.contains("`one` is on Cpu") && error.contains("Device::Cuda(0)"), "{error}");
    // Some average by NCCL and some do not.
    let part = group.split(Some(0), 0)?.unwrap();
    let store = VarStore::new(device());
    drop(store.root().var("one", &[3], Init::Const(1.0)));
    let error = match group.rank().is_main() {
        true => ddp(&store, &part, options()).unwrap_err(),
        false => {
            let _communicator = devices(&part)?;
            Ddp::with_options(&store, &part, options()).unwrap_err()
        }
    };
    assert!(error.to_string().contains("averaged by is"), "{error}");
    group.barrier()
}

/// In a `join` that the `Ddp` has not begun ranks that are done would not make its calls.
fn foreign_join(group: &ProcessGroup) -> Result<()> {
    let store = VarStore::new(device());
    let one = store.root().var("one", &[3], Init::Const(1.0));
    let joined = JoinGroup::new(ProcessGroup::alone()?);
    let optimizer = Optimizer::new(&store, Rule::sgd(0.0))?;
    let state = TrainState::new(&store, optimizer, ())?.sharing(&joined)?;
    let mut state = state.with_nccl(&devices(group)?)?;
    before_an_error(group);
    let called = joined.join(JoinOptions::default(), || {
        let loss = state.ddp.forward(|| one.sum(Kind::Float))?;
        state.ddp.backward(&loss)
    });
    if group.world_size().get() == 1 {
        return called.map(drop);
    }
    let error = called.unwrap_err().to_string();
    assert!(error.contains("a join that this Ddp has not begun"), "{error}");
    Ok(())
}

/// What ranks do that have unequal numbers of batches.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Uneven {
    Plain,
    /// What ranks average counts those that have data.
    ByActive,
    Accumulated,
    /// A layer that only rank 1 uses, and one that nobody does.
    Unused,
    Weighted,
    Half,
    LowRank,
    /// A hook of the program's that changes nothing.
    Own,
    /// One that gathers the gradients of all ranks.
    Gathered,
}

/// Gives variables the same values in each run.
fn begin(store: &VarStore) {
    let start = floats(store).into_iter().enumerate().map(|(index, one)| {
        let wave = |place: usize| ((place * 7 + index * 3) as f32).sin() / 4.0;
        (0..one.len()).map(wave).collect::<Vec<f32>>()
    });
    load(store, &start.collect::<Vec<_>>());
}

/// A rank's batches: the first has two, the second four, the third none.
fn batches(rank: usize) -> usize {
    [2, 4, 0][rank]
}

fn joined(group: &ProcessGroup) -> Result<()> {
    use Uneven::{Accumulated, ByActive, Gathered, Half, LowRank, Own, Plain, Unused, Weighted};
    for case in [Plain, ByActive, Accumulated, Unused, Weighted, Half, LowRank, Own, Gathered] {
        let (host, nccl) = (train_uneven(case, group, false)?, train_uneven(case, group, true)?);
        for (ours, expected) in nccl.iter().zip(&host) {
            let apart = distance(ours, expected);
            let near = if case == Half { 1e-3 } else { 1e-5 };
            assert!(apart < near, "{case:?}: {apart:e}");
        }
    }
    Ok(())
}

/// The parameters after a `join`, and after one step more together.
fn train_uneven(case: Uneven, group: &ProcessGroup, over_nccl: bool) -> Result<[Vec<Vec<f32>>; 2]> {
    let group = &group.split(Some(0), 0)?.unwrap();
    let rank = group.rank().index();
    let model = Mlp::new(&[8, 32, 3]);
    let extra = ["only", "none"].map(|name| model.store.root().var(name, &[3], Init::Const(0.0)));
    begin(&model.store);
    let mut options = options();
    if case == Uneven::Unused {
        options.reducer = ReducerOptions::default().bucket_cap_mb(0.0005).find_unused_parameters(true);
    }
    let mut ddp = match over_nccl {
        true => Ddp::with_nccl(&model.store, &devices(group)?, options)?,
        false => Ddp::with_options(&model.store, group, options)?,
    };
    match case {
        Uneven::Half => ddp.register_comm_hook(Compressed::f16())?,
        Uneven::LowRank => ddp.register_comm_hook(PowerSgd::new(compressing(1))?)?,
        Uneven::Own if over_nccl => {
            ddp.register_device_hook(Sends(|whole| DeviceMessage::all_reduce(whole * 1.0, ReduceOp::Avg)))?
        }
        Uneven::Gathered if over_nccl => ddp.register_device_hook(Largest { of_each: None })?,
        _ => {}
    }
    // Adam makes large steps of what is rounding alone, of which products of two vectors have much.
    let rule = match case {
        Uneven::LowRank | Uneven::Gathered => Rule::sgd(0.9),
        _ => Rule::ADAMW,
    };
    let mut optimizer = Optimizer::new(&model.store, rule)?;
    let step = |ddp: &mut Ddp, optimizer: &mut Optimizer, step: usize| {
        let from = step * 40 + rank * 10;
        let loss = || {
            let loss = model.loss(samples(from, from + 4 + step % 3));
            match case {
                Uneven::Unused if rank == 1 => loss + extra[0].sum(Kind::Float),
                Uneven::Unused => loss,
                _ => loss + extra[0].sum(Kind::Float) + extra[1].sum(Kind::Float) * 0.5,
            }
        };
        optimizer.zero_grad()?;
        if case == Uneven::Accumulated {
            let loss = ddp.forward(loss)?;
            ddp.backward_no_sync(&loss)?;
        }
        let loss = ddp.forward(loss)?;
        match case {
            Uneven::Weighted => ddp.backward_weighted(&loss, (4 + step % 3) as f64)?,
            _ => ddp.backward(&loss)?,
        }
        if case == Uneven::Unused {
            assert!(!extra[1].grad().defined(), "nobody has used it");
        }
        optimizer.step(0.02)
    };
    let mut join = JoinOptions::default();
    join.divide_by_initial_world_size = case != Uneven::ByActive;
    ddp.join(&mut optimizer, join, |ddp, optimizer| {
        (0..batches(rank)).try_for_each(|index| step(ddp, optimizer, index))
    })?;
    assert!(ddp.replicas_identical()?);
    let joined = floats(&model.store);
    // With other states of the optimizer replicas would drift apart.
    step(&mut ddp, &mut optimizer, 9)?;
    assert!(ddp.replicas_identical()?);
    Ok([joined, floats(&model.store)])
}

/// Sums of statistics go through the host's group, and gradients over NCCL; both are announced.
fn joined_norm(group: &ProcessGroup) -> Result<()> {
    let train = |over_nccl: bool| {
        let group = &group.split(Some(0), 0)?.unwrap();
        let rank = group.rank().index();
        let joined = JoinGroup::new(ProcessGroup::alone()?);
        let store = VarStore::new(device());
        let config = nn::LinearConfig {
            ws_init: Init::Const(0.1),
            bs_init: Some(Init::Const(0.2)),
            ..Default::default()
        };
        let first = nn::linear(store.root() / "first", 8, 6, config);
        let of_norm = nn::BatchNormConfig { ws_init: Init::Const(0.7), ..Default::default() };
        let norm = nn::batch_norm1d(store.root() / "norm", 6, of_norm);
        let norm = SyncBatchNorm::new(norm, of_norm, &joined);
        tch::no_grad(|| {
            let wave = Tensor::arange(48, (Kind::Float, device())).sin().reshape([6, 8]);
            first.ws.shallow_clone().copy_(&wave);
        });
        let optimizer = Optimizer::new(&store, Rule::ADAMW)?;
        let state = TrainState::new(&store, optimizer, ())?.sharing(&joined)?;
        let state = if over_nccl { state.with_nccl(&devices(group)?)? } else { state.with_group(group)? };
        let TrainState { mut ddp, mut optimizer, .. } = state.with_options(options())?;
        assert_eq!(over_nccl, format!("{ddp:?}").contains("NCCL"));
        ddp.join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
            for step in 0..batches(rank) {
                let (x, _) = samples(step * 40 + rank * 10, step * 40 + rank * 10 + 4);
                let loss = ddp.forward(|| norm.forward(&x.apply(&first), true))??;
                optimizer.zero_grad()?;
                ddp.backward(&(&loss * loss.cos()).sum(Kind::Float))?;
                optimizer.step(0.02)?;
            }
            Ok(())
        })?;
        assert!(ddp.replicas_identical()? && ddp.buffers_identical()?);
        Ok(floats(&store))
    };
    let (host, nccl) = (train(false)?, train(true)?);
    assert!(distance(&nccl, &host) < 1e-4, "{:e}", distance(&nccl, &host));
    Ok(())
}

/// Rank 0 is done when rank 2 dies; the others learn of it, whoever makes whose calls.
fn dies(group: &ProcessGroup, is_low_rank: bool) -> Result<()> {
    let rank = group.rank().index();
    let model = Mlp::new(&[8, 32, 3]);
    let mut ddp = ddp(&model.store, group, options())?;
    if is_low_rank {
        ddp.register_comm_hook(PowerSgd::new(compressing(0))?)?;
    }
    let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.0))?;
    ddp.join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
        for step in 0..[1, 6, 6][rank] {
            if (rank, step) == (2, 3) {
                kill_process(getpid(), Signal::KILL).unwrap();
            }
            let loss = ddp.forward(|| model.loss(samples(step, step + 4)))?;
            optimizer.zero_grad()?;
            ddp.backward(&loss)?;
        }
        Ok(())
    })?;
    panic!("it went well");
}

fn dies_in_a_join(case: &str) {
    let folder = tempfile::tempdir().unwrap();
    let mut stderr = String::new();
    let job = crate::job(&format!("nccl {case}"), 3, folder.path())
        .variable(NCCL, "1")
        .grace(Duration::from_secs(30));
    let report = crate::run(&job, |event| crate::equivalence::note(event, &mut stderr));
    let is_named = matches!(&report.outcome, Outcome::Failed(failure) if failure.rank == Rank::new(2));
    assert!(is_named && !stderr.contains("it went well"), "{:?}: {stderr}", report.outcome);
    crate::equivalence::assert_each_says(2, &stderr, &["rank 2"]);
}

/// Rank 0 has one batch and makes the calls of rank 1's second one, while they are held up.
fn held_join(group: &ProcessGroup) -> Result<()> {
    let go = PathBuf::from(std::env::var_os(HOLD).unwrap());
    let release = || std::fs::write(&go, "").unwrap();
    let rank = group.rank().index();
    if rank == 0 {
        release();
    }
    let devices = devices(group)?;
    let store = VarStore::new(device());
    let layers: Vec<Tensor> =
        (0..12).map(|index| store.root().var(&format!("l{index}"), &[64], Init::Const(0.0))).collect();
    let mut ddp = Ddp::with_nccl(&store, &devices, options())?;
    let mut optimizer = Optimizer::new(&store, Rule::sgd(0.0))?;
    let mut seen = Vec::new();
    ddp.join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
        for step in 0..=rank {
            let loss = ddp.forward(|| all(&layers) * (rank as f64 + 1.0))?;
            optimizer.zero_grad()?;
            if step == 1 {
                // The only one that has data: nobody removes it meanwhile.
                std::fs::remove_file(&go).unwrap();
            }
            ddp.backward(&loss)?;
            if step == 1 {
                assert!(!go.exists(), "somebody has waited");
                release();
            }
            seen.push((step, layers.iter().map(|one| one.grad() * 1.0).collect::<Vec<_>>()));
        }
        Ok(())
    })?;
    for (step, seen) in seen {
        let average = if step == 0 { 1.5 } else { 1.0 };
        assert!(seen.iter().all(|one| elements(one) == [average; 64]), "step {step}");
    }
    Ok(())
}

/// Rank 0 has no batch: its zeros are there when rank 1 averages.
fn late_join(group: &ProcessGroup) -> Result<()> {
    let store = VarStore::new(device());
    let layers: Vec<Tensor> =
        (0..2).map(|index| store.root().var(&format!("l{index}"), &[64, 64], Init::Const(0.0))).collect();
    let mut ddp = ddp(&store, group, options())?;
    let mut optimizer = Optimizer::new(&store, Rule::sgd(0.0))?;
    ddp.join(&mut optimizer, JoinOptions::default(), |ddp, _| {
        for step in 0..3 * group.rank().index() {
            let loss = ddp.forward(|| all(&layers) * (step as f64 + 1.0))?;
            // Gradients stay in their places, so that the calls begin at once.
            layers.iter().for_each(|one| one.shallow_clone().zero_grad());
            ddp.backward(&loss)?;
            let average = (step as f32 + 1.0) / 2.0;
            assert!(layers.iter().all(|one| elements(&one.grad()) == [average; 64 * 64]), "step {step}");
        }
        Ok(())
    })
}

/// PowerSGD that sends matrices as products after so many steps, if they become smaller at all.
fn compressing(steps: u64) -> PowerSgdOptions {
    PowerSgdOptions::default().start_iter(steps).min_compression_rate(1.0)
}

/// With several matrices of one shape in a bucket, and with a bucket for each.
fn low_rank(group: &ProcessGroup) -> Result<()> {
    let cases = [
        compressing(2),
        compressing(0).rank(2).seed(5),
        compressing(1).error_feedback(false),
        compressing(1).rank(3).orthogonalization_epsilon(1e-6),
    ];
    for (case, low_rank) in cases.into_iter().enumerate() {
        for is_one_bucket in [true, false] {
            let train = |over_nccl: bool| {
                let group = &group.split(Some(0), 0)?.unwrap();
                let model = Mlp::new(&[8, 32, 32, 32, 3]);
                begin(&model.store);
                let options = if is_one_bucket { DdpOptions::default() } else { options() };
                let mut ddp = match over_nccl {
                    true => Ddp::with_nccl(&model.store, &devices(group)?, options)?,
                    false => Ddp::with_options(&model.store, group, options)?,
                };
                ddp.register_comm_hook(PowerSgd::new(low_rank)?)?;
                let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
                for step in 0..8 {
                    train_step(&model, &mut ddp, &mut optimizer, step)?;
                }
                assert!(ddp.replicas_identical()?);
                Ok((floats(&model.store), ddp.communicated_bytes()))
            };
            let (host, nccl) = (train(false)?, train(true)?);
            let apart = distance(&nccl.0, &host.0);
            assert!(apart < 1e-4, "case {case}, one bucket: {is_one_bucket}: {apart:e}");
            assert_eq!(nccl.1, host.1, "bytes");
        }
    }
    Ok(())
}

fn train_step(model: &Mlp, ddp: &mut Ddp, optimizer: &mut Optimizer, step: usize) -> Result<()> {
    let from = step * 40 + ddp.rank().index() * 10;
    let loss = ddp.forward(|| model.loss(samples(from, from + 6)))?;
    optimizer.zero_grad()?;
    ddp.backward(&loss)?;
    optimizer.step(0.05)
}

/// The gradient of each matrix has one direction, which a product of two vectors has exactly.
fn low_rank_steps(group: &ProcessGroup) -> Result<()> {
    // Without feedback nothing at all is left after a step of zeros.
    for feedback in [true, false] {
        let group = group.split(Some(0), 0)?.unwrap();
        low_rank_steps_of(&group, compressing(0).rank(2).error_feedback(feedback))?;
    }
    Ok(())
}

fn low_rank_steps_of(group: &ProcessGroup, low_rank: PowerSgdOptions) -> Result<()> {
    let store = VarStore::new(device());
    let sizes = [[16, 8], [16, 8], [12, 20]];
    let layers: Vec<Tensor> = sizes
        .iter()
        .enumerate()
        .map(|(index, size)| store.root().var(&format!("l{index}"), size, Init::Const(0.0)))
        .collect();
    let bias = store.root().var("bias", &[5], Init::Const(0.0));
    let slopes: Vec<Tensor> = sizes
        .iter()
        .map(|&[rows, columns]| {
            let wave = |count: i64| (Tensor::arange(count, (Kind::Float, device())) * 0.7 + 0.3).sin();
            wave(rows).unsqueeze(1) * wave(columns).unsqueeze(0)
        })
        .collect();
    let expected: Vec<Vec<f32>> = slopes.iter().map(elements).collect();
    let mut ddp = ddp(&store, group, DdpOptions::default())?;
    ddp.register_comm_hook(PowerSgd::new(low_rank)?)?;
    let rank = group.rank().index() as f64 + 1.0;
    // What rank 0's gradients are multiplied by; those of rank 1 by 1.
    let factors = [1.0, f64::NAN, 1.0, 0.0, 0.0, 1.0, f64::INFINITY, f64::NAN, 2.0, -1.0];
    for (step, factor) in factors.into_iter().enumerate() {
        let factor = if factor == 0.0 || rank == 1.0 { factor } else { 1.0 };
        let loss = ddp.forward(|| {
            let parts = layers.iter().zip(&slopes).map(|(one, slope)| (one * slope).sum(Kind::Float));
            (parts.reduce(|a, b| a + b).unwrap() + bias.sum(Kind::Float)) * (rank * factor)
        })?;
        zero_grad(&store);
        ddp.backward(&loss)?;
        // Queued before anybody has waited for the device.
        let seen: Vec<Tensor> = layers.iter().map(|one| one.grad() * 2.0).collect();
        let of_bias = bias.grad() * 2.0;
        zero_grad(&store);
        // Twice the average.
        let sum = factors[step] + if factors[step] == 0.0 { 0.0 } else { 2.0 };
        for (index, (seen, expected)) in seen.iter().zip(&expected).enumerate() {
            let (found, scaled) = (elements(seen), expected.iter().map(|one| one * sum as f32));
            let is_right = |(found, scaled): (&f32, f32)| match sum.is_finite() {
                true => (found - scaled).abs() < 1e-5,
                false => !found.is_finite(),
            };
            assert!(found.iter().zip(scaled).all(is_right), "step {step}, {index}: {found:?}, {sum} times");
        }
        assert!(elements(&of_bias).iter().all(|one| !sum.is_finite() || *one == sum as f32), "step {step}");
    }
    Ok(())
}

/// Bit for bit over NCCL; from the host's memory to the device, and back, as near as the two are.
fn low_rank_state(group: &ProcessGroup) -> Result<()> {
    struct Training {
        model: Mlp,
        state: TrainState<u32>,
    }
    impl Training {
        fn new(group: &ProcessGroup, over_nccl: bool, hook_first: bool) -> Result<Self> {
            let group = &group.split(Some(0), 0)?.unwrap();
            let model = Mlp::new(&[8, 32, 32, 3]);
            begin(&model.store);
            let optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
            let state = TrainState::new(&model.store, optimizer, 0u32)?;
            let state =
                if over_nccl { state.with_nccl(&devices(group)?)? } else { state.with_group(group)? };
            let mut this = Self { model, state: state.with_options(options())? };
            if hook_first {
                this.register()?;
            }
            Ok(this)
        }

        fn register(&mut self) -> Result<()> {
            self.state.ddp.register_comm_hook(PowerSgd::new(compressing(2))?)
        }

        fn train(&mut self, steps: std::ops::Range<usize>) -> Result<Vec<Vec<f32>>> {
            for step in steps {
                let Self { model, state } = self;
                let from = step * 40 + state.ddp.rank().index() * 10;
                let loss = state.ddp.forward(|| model.loss(samples(from, from + 6)))?;
                state.optimizer.zero_grad()?;
                state.ddp.backward(&loss)?;
                state.step(0.05)?;
            }
            Ok(floats(&self.model.store))
        }
    }
    for saved_by_nccl in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = phalanx::checkpoint::Checkpoints::open(folder.path(), group)?;
        let mut training = Training::new(group, saved_by_nccl, true)?;
        training.train(0..5)?;
        training.state.checkpoint(&checkpoints)?;
        checkpoints.finish()?;
        // What is read disturbs nothing.
        let expected = training.train(5..9)?;
        for resumed_by_nccl in [true, false] {
            for hook_first in [true, false] {
                let mut training = Training::new(group, resumed_by_nccl, hook_first)?;
                // Other losses and factors than those of the checkpoint.
                if hook_first {
                    training.train(20..24)?;
                }
                assert!(training.state.resume(&checkpoints)?);
                if !hook_first {
                    training.register()?;
                }
                let before = training.state.ddp.communicated_bytes();
                let resumed = training.train(5..9)?;
                let all: u64 = resumed.iter().map(|one| 4 * one.len() as u64).sum();
                assert!(training.state.ddp.communicated_bytes() - before < 4 * all / 2, "it compresses");
                match saved_by_nccl == resumed_by_nccl {
                    true => assert_eq!(resumed, expected, "over NCCL: {saved_by_nccl}, {hook_first}"),
                    false => {
                        let apart = distance(&resumed, &expected);
                        assert!(apart < 1e-4, "saved over NCCL: {saved_by_nccl}, {hook_first}: {apart:e}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// Nothing is read in backward, and nothing is copied to the device, whatever averages.
fn no_wait(group: &ProcessGroup) -> Result<()> {
    let nobody = PathBuf::from(std::env::var_os(NO_WAIT).unwrap());
    type Register = fn(&mut Ddp) -> Result<()>;
    let hooks: [Register; 5] = [
        |_| Ok(()),
        |ddp| ddp.register_comm_hook(PostLocalSgd::new(1)),
        |ddp| ddp.register_device_hook(Rounded::default()),
        |ddp| ddp.register_comm_hook(Compressed::f16()),
        |ddp| ddp.register_comm_hook(PowerSgd::new(compressing(1).rank(2))?),
    ];
    for register in hooks {
        let group = &group.split(Some(0), 0)?.unwrap();
        let model = Mlp::new(&[8, 32, 32, 3]);
        let mut ddp = ddp(&model.store, group, options())?;
        register(&mut ddp)?;
        let mut optimizer = Optimizer::new(&model.store, Rule::ADAMW)?;
        for step in 0..4 {
            let loss = ddp.forward(|| model.loss(samples(step, step + 4)))?;
            optimizer.zero_grad()?;
            std::fs::write(&nobody, "").unwrap();
            let averaged = ddp.backward(&loss);
            std::fs::remove_file(&nobody).unwrap();
            averaged?;
            optimizer.step(0.01)?;
        }
        // The stand-in would have said so.
        std::fs::write(&nobody, "").unwrap();
        assert!(model.layers[0].ws.grad().f_to_device(tch::Device::Cpu).is_err());
        std::fs::remove_file(&nobody).unwrap();
    }
    Ok(())
}

/// Memory and streams are those of the model's device, whatever sends the gradients.
fn second_device(group: &ProcessGroup) -> Result<()> {
    let (cuda, place) = (phalanx_nccl::Device::open(1)?, tch::Device::Cuda(1));
    type Register = fn(&mut Ddp) -> Result<()>;
    let hooks: [Register; 3] = [
        |_| Ok(()),
        |ddp| ddp.register_comm_hook(Compressed::f16()),
        |ddp| ddp.register_comm_hook(PowerSgd::new(compressing(1).rank(2))?),
    ];
    for register in hooks {
        let group = group.split(Some(0), 0)?.unwrap();
        let rank = group.rank().index() as f64 + 1.0;
        let store = VarStore::new(place);
        let layers: Vec<Tensor> =
            (0..4).map(|index| store.root().var(&format!("l{index}"), &[16, 8], Init::Const(0.0))).collect();
        let mut ddp = Ddp::with_nccl(&store, &DeviceGroup::new(group, &cuda)?, options())?;
        register(&mut ddp)?;
        for step in 1..5 {
            let loss = ddp.forward(|| all(&layers) * (rank * f64::from(step)))?;
            zero_grad(&store);
            ddp.backward(&loss)?;
            for one in &layers {
                let (gradient, average) = (one.grad(), 1.5 * step as f32);
                assert_eq!(gradient.device(), place);
                let found = elements(&gradient);
                assert!(found.iter().all(|one| (one - average).abs() < 1e-4), "step {step}: {}", found[0]);
            }
        }
    }
    // The stand-in would have said so.
    let error = ones(&[2], 1.0).f_sub(&Tensor::ones([2], (Kind::Float, place))).unwrap_err().to_string();
    assert!(error.contains("same device"), "{error}");
    Ok(())
}

/// Ranks that train by themselves after the first steps, and then average gradients again.
fn local(group: &ProcessGroup) -> Result<()> {
    let train = |over_nccl: bool| -> Result<(Vec<Vec<f32>>, u64)> {
        let group = &group.split(Some(0), 0)?.unwrap();
        let model = Mlp::new(&[8, 32, 3]);
        begin(&model.store);
        let mut ddp = match over_nccl {
            true => Ddp::with_nccl(&model.store, &devices(group)?, options())?,
            false => Ddp::with_options(&model.store, group, options())?,
        };
        ddp.register_comm_hook(PostLocalSgd::new(2))?;
        let mut averager = PeriodicModelAverager::new(2)?.warmup_steps(2);
        let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
        for step in 0..5 {
            train_step(&model, &mut ddp, &mut optimizer, step)?;
            let is_averaged = averager.step(&mut ddp)?;
            assert_eq!(ddp.replicas_identical()?, step < 2 || is_averaged, "step {step}");
        }
        let sent = ddp.communicated_bytes();
        assert_eq!(sent, 2 * floats(&model.store).iter().map(|one| 4 * one.len() as u64).sum::<u64>());
        ddp.register_comm_hook(AllReduce)?;
        train_step(&model, &mut ddp, &mut optimizer, 5)?;
        assert_eq!(ddp.communicated_bytes(), sent / 2 * 3);
        Ok((floats(&model.store), ddp.communicated_bytes()))
    };
    let (host, nccl) = (train(false)?, train(true)?);
    assert!(distance(&nccl.0, &host.0) < 1e-4, "{:e}", distance(&nccl.0, &host.0));
    assert_eq!(nccl.1, host.1, "bytes");
    [false, true].into_iter().try_for_each(|over_nccl| local_in_join(group, over_nccl))
}

/// Gradients that are each rank's own are divided by nothing, also where averages are divided by the number of ranks that have data.
fn local_in_join(group: &ProcessGroup, over_nccl: bool) -> Result<()> {
    let group = &group.split(Some(0), 0)?.unwrap();
    let store = VarStore::new(device());
    let one = store.root().var("one", &[3], Init::Const(1.0));
    let mut ddp = match over_nccl {
        true => Ddp::with_nccl(&store, &devices(group)?, options())?,
        false => Ddp::with_options(&store, group, options())?,
    };
    ddp.register_comm_hook(PostLocalSgd::new(0))?;
    let mut optimizer = Optimizer::new(&store, Rule::sgd(0.0))?;
    let mut join = JoinOptions::default();
    join.divide_by_initial_world_size = false;
    ddp.join(&mut optimizer, join, |ddp, optimizer| {
        for step in 0..=group.rank().index() {
            optimizer.zero_grad()?;
            let loss = ddp.forward(|| one.sum(Kind::Float) * 3.0)?;
            ddp.backward(&loss)?;
            assert_eq!(elements(&one.grad()), [3.0; 3], "step {step}, over NCCL: {over_nccl}");
        }
        Ok(())
    })
}

/// The two first ranks average among themselves after the first steps, and a third one by itself; and then all again.
fn subgroup(group: &ProcessGroup) -> Result<()> {
    let train = |over_nccl: bool| -> Result<Vec<Vec<f32>>> {
        let group = &group.split(Some(0), 0)?.unwrap();
        let smaller = group.split(Some(group.rank().get() / 2), 0)?.unwrap();
        let model = Mlp::new(&[8, 32, 3]);
        begin(&model.store);
        let mut ddp = match over_nccl {
            true => Ddp::with_nccl(&model.store, &devices(group)?, options())?,
            false => Ddp::with_options(&model.store, group, options())?,
        };
        ddp.register_comm_hook(PostLocalSgd::new(2).subgroup(smaller.clone()))?;
        let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
        for step in 0..5 {
            train_step(&model, &mut ddp, &mut optimizer, step)?;
            let is_one = step < 2 || group.world_size() == smaller.world_size();
            assert_eq!(ddp.replicas_identical()?, is_one, "step {step}, over NCCL: {over_nccl}");
            let here = smaller.all_gather_object(&floats(&model.store))?;
            assert!(here.iter().all(|one| *one == here[0]), "step {step}, over NCCL: {over_nccl}");
        }
        ddp.register_comm_hook(AllReduce)?;
        train_step(&model, &mut ddp, &mut optimizer, 5)?;
        Ok(floats(&model.store))
    };
    let (host, nccl) = (train(false)?, train(true)?);
    assert!(distance(&nccl, &host) < 1e-4, "{:e}", distance(&nccl, &host));
    [false, true].into_iter().try_for_each(|over_nccl| subgroup_in_join(group, over_nccl))
}

/// Nobody would answer in the smaller group for a rank that is done.
fn subgroup_in_join(group: &ProcessGroup, over_nccl: bool) -> Result<()> {
    // The error ends its group.
    let group = &group.split(Some(0), 0)?.unwrap();
    let smaller = group.split(Some(group.rank().get() / 2), 0)?.unwrap();
    let store = VarStore::new(device());
    let one = store.root().var("one", &[3], Init::Const(1.0));
    let mut ddp = match over_nccl {
        true => Ddp::with_nccl(&store, &devices(group)?, options())?,
        false => Ddp::with_options(&store, group, options())?,
    };
    ddp.register_comm_hook(PostLocalSgd::new(0).subgroup(smaller))?;
    let mut optimizer = Optimizer::new(&store, Rule::sgd(0.0))?;
    let joined = ddp.join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
        for _ in 0..=group.rank().index() {
            optimizer.zero_grad()?;
            let loss = ddp.forward(|| one.sum(Kind::Float) * 3.0)?;
            ddp.backward(&loss)?;
        }
        Ok(())
    });
    let error = joined.unwrap_err().to_string();
    assert!(error.contains("ranks have data"), "over NCCL: {over_nccl}: {error}");
    Ok(())
}

/// What ends the smaller group is the error of a step of its ranks, and of every call of the others.
fn subgroup_fails(group: &ProcessGroup) -> Result<()> {
    let group = &group.split(Some(0), 0)?.unwrap();
    let smaller = group.split(Some(group.rank().get() / 2), 0)?.unwrap();
    let model = Mlp::new(&[8, 32, 3]);
    let mut ddp = Ddp::with_nccl(&model.store, &devices(group)?, options())?;
    ddp.register_comm_hook(PostLocalSgd::new(1).subgroup(smaller.clone()))?;
    let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
    (0..3).try_for_each(|step| train_step(&model, &mut ddp, &mut optimizer, step))?;
    before_an_error(group);
    let has_failed = |error: phalanx::Error| {
        let error = error.to_string();
        assert!(error.contains("the fault of the test"), "{error}");
    };
    if smaller.world_size().get() == 2 {
        if smaller.rank().is_main() {
            smaller.abort(phalanx::Error::aborted("the fault of the test"));
        }
        // Until both ranks know.
        has_failed(smaller.barrier().unwrap_err());
        has_failed(train_step(&model, &mut ddp, &mut optimizer, 3).unwrap_err());
    }
    has_failed(group.barrier().unwrap_err());
    Ok(())
}

/// The second call of the smaller group of ranks 0 and 1, which is that of the only bucket, fails when backward has returned. Rank 2 is in another one.
fn subgroup_fails_late(group: &ProcessGroup) -> Result<()> {
    let group = &group.split(Some(0), 0)?.unwrap();
    let smaller = group.split(Some(group.rank().get() / 2), 0)?.unwrap();
    let model = Mlp::new(&[8, 32, 3]);
    let mut ddp = Ddp::with_nccl(&model.store, &devices(group)?, DdpOptions::default())?;
    ddp.register_comm_hook(PostLocalSgd::new(0).subgroup(smaller))?;
    let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
    assert_eq!(ddp.bucket_bytes().len(), 1);
    before_an_error(group);
    let trained = train_step(&model, &mut ddp, &mut optimizer, 0);
    let error = trained.and_then(|()| ddp.average_parameters()).unwrap_err().to_string();
    assert!(error.contains("the stand-in was told to fail"), "{error}");
    Ok(())
}

/// The same call fails, and the ranks average within another smaller group from then on.
fn subgroup_left(group: &ProcessGroup) -> Result<()> {
    let group = &group.split(Some(0), 0)?.unwrap();
    let smaller = || group.split(Some(group.rank().get() / 2), 0);
    let (first, second) = (smaller()?.unwrap(), smaller()?.unwrap());
    let model = Mlp::new(&[8, 32, 3]);
    let mut ddp = Ddp::with_nccl(&model.store, &devices(group)?, DdpOptions::default())?;
    let handle = GroupHandle::new(first);
    ddp.register_comm_hook(PostLocalSgd::new(0).subgroup(handle.clone()))?;
    let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
    before_an_error(group);
    let trained = train_step(&model, &mut ddp, &mut optimizer, 0).and_then(|()| {
        handle.rebind(second);
        train_step(&model, &mut ddp, &mut optimizer, 1)
    });
    // Rank 2 hears of it in a call of all ranks.
    let trained = if group.rank().index() == 2 { trained.and_then(|()| group.barrier()) } else { trained };
    let error = trained.unwrap_err().to_string();
    assert!(error.contains("the stand-in was told to fail"), "{error}");
    Ok(())
}

/// The same call fails, and the model is evaluated.
fn subgroup_evaluated(group: &ProcessGroup) -> Result<()> {
    let group = &group.split(Some(0), 0)?.unwrap();
    let smaller = group.split(Some(group.rank().get() / 2), 0)?.unwrap();
    let model = Mlp::new(&[8, 32, 3]);
    let mut ddp = Ddp::with_nccl(&model.store, &devices(group)?, DdpOptions::default())?;
    ddp.register_comm_hook(PostLocalSgd::new(0).subgroup(smaller))?;
    let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
    before_an_error(group);
    let evaluated = train_step(&model, &mut ddp, &mut optimizer, 0)
        .and_then(|()| ddp.evaluate(|| model.loss(samples(0, 4)).double_value(&[])));
    // Rank 2, whose calls have not failed, hears of it in a call of all ranks.
    let evaluated = evaluated.map(drop);
    let evaluated =
        if group.rank().index() == 2 { evaluated.and_then(|()| group.barrier()) } else { evaluated };
    let error = evaluated.unwrap_err().to_string();
    assert!(error.contains("the stand-in was told to fail"), "{error}");
    Ok(())
}

/// The same call fails, and the state goes on over the host's memory.
fn subgroup_moved(group: &ProcessGroup) -> Result<()> {
    let group = &group.split(Some(0), 0)?.unwrap();
    let smaller = group.split(Some(group.rank().get() / 2), 0)?.unwrap();
    let model = Mlp::new(&[8, 32, 3]);
    let optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
    let mut state = TrainState::new(&model.store, optimizer, ())?.with_nccl(&devices(group)?)?;
    state.ddp.register_comm_hook(PostLocalSgd::new(0).subgroup(smaller))?;
    before_an_error(group);
    let trained = state.ddp.forward(|| model.loss(samples(0, 4))).and_then(|loss| {
        state.ddp.backward(&loss)?;
        state.step(0.01)
    });
    let moved = trained.and_then(|()| state.with_group(group)).map(drop);
    let error = moved.unwrap_err().to_string();
    assert!(error.contains("the stand-in was told to fail"), "{error}");
    Ok(())
}

/// The group fails between two steps, and the state goes on in another one.
fn group_fails_between(group: &ProcessGroup) -> Result<()> {
    let first = group.split(Some(0), 0)?.unwrap();
    let on_devices = devices(&first)?;
    let model = Mlp::new(&[8, 32, 3]);
    let optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
    let mut state = TrainState::new(&model.store, optimizer, ())?.with_nccl(&on_devices)?;
    let step = |state: &mut TrainState| {
        let loss = state.ddp.forward(|| model.loss(samples(0, 4)))?;
        state.optimizer.zero_grad()?;
        state.ddp.backward(&loss)?;
        state.step(0.01)
    };
    step(&mut state)?;
    assert!(state.ddp.replicas_identical()?);
    let is_done = |state: CallState| matches!(state, CallState::Done(_));
    while !on_devices.device().calls().iter().all(|call| is_done(call.state)) {
        std::thread::sleep(Duration::from_millis(1));
    }
    group.barrier()?;
    if group.rank().is_main() {
        first.abort(phalanx::Error::aborted("the fault of the test"));
    }
    let error = first.barrier().unwrap_err().to_string();
    assert!(error.contains("the fault of the test"), "{error}");
    let loss = state.ddp.evaluate(|| model.loss(samples(0, 4)).double_value(&[]))?;
    assert!(loss.is_finite());
    let mut state = state.with_group(group)?;
    step(&mut state)?;
    assert!(state.ddp.replicas_identical()?);
    Ok(())
}

/// A hook for the host's memory.
struct OfHost;

impl CommHook for OfHost {
    fn describe(&self) -> String {
        "of the test".into()
    }

    fn start(&mut self, group: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
        group.all_reduce_async(bucket.buffer, ReduceOp::Avg).map(Pending::new)
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default())
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        state.nothing()
    }
}

/// Sends what this makes of a bucket, and takes what comes back for the average.
struct Sends(fn(&Tensor) -> DeviceMessage);

impl DeviceHook for Sends {
    fn describe(&self) -> String {
        "sends".into()
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        Ok((self.0)(bucket.buffer()))
    }

    fn receive(&mut self, bucket: &DeviceBucket, combined: &Tensor) -> Result<()> {
        bucket.buffer().shallow_clone().copy_(combined);
        Ok(())
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default())
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        state.nothing()
    }
}

/// Rounds what is sent to f16, and makes up for it in later steps.
#[derive(Default)]
struct Rounded {
    /// By the parameters of the bucket.
    losses: BTreeMap<Vec<usize>, Tensor>,
    steps: Arc<AtomicU64>,
}

impl DeviceHook for Rounded {
    fn describe(&self) -> String {
        "rounded".into()
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        let parts = bucket.gradients().map(|(_, part)| part.numel()).sum::<usize>();
        assert_eq!((parts, bucket.world_size().get()), (bucket.buffer().numel(), 2));
        let parameters: Vec<usize> = bucket.gradients().map(|(parameter, _)| parameter).collect();
        let whole = match self.losses.get(&parameters) {
            Some(loss) => bucket.buffer() + loss,
            None => bucket.buffer() * 1.0,
        };
        let half = whole.to_kind(Kind::Half);
        self.losses.insert(parameters, whole - half.to_kind(Kind::Float));
        if bucket.is_last() {
            self.steps.fetch_add(1, Ordering::Relaxed);
        }
        Ok(DeviceMessage::all_reduce(half, ReduceOp::Avg))
    }

    fn receive(&mut self, bucket: &DeviceBucket, combined: &Tensor) -> Result<()> {
        bucket.buffer().shallow_clone().copy_(combined);
        Ok(())
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        self.losses.clear();
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default().number("steps", self.steps.load(Ordering::Relaxed)))
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        self.losses.clear();
        self.steps.store(state.get("steps")?, Ordering::Relaxed);
        Ok(())
    }
}

/// What is queued behind backward waits for what the hook writes, and what the hook keeps is there in the next step.
fn own_hook(group: &ProcessGroup) -> Result<()> {
    let store = VarStore::new(device());
    let layers: Vec<Tensor> =
        (0..12).map(|index| store.root().var(&format!("l{index}"), &[64, 64], Init::Const(0.0))).collect();
    let mut ddp = ddp(&store, group, options())?;
    let hook = Rounded::default();
    let steps = hook.steps.clone();
    ddp.register_device_hook(hook)?;
    // f16 has steps of 4 units above 1: what is lost adds up to one in each third of four steps.
    let unit = 2f64.powi(-12);
    for step in 0..8 {
        let loss = ddp.forward(|| all(&layers) * (1.0 + unit))?;
        zero_grad(&store);
        ddp.backward(&loss)?;
        let seen: Vec<Tensor> = layers.iter().map(|one| one.grad() * 2.0).collect();
        zero_grad(&store);
        // In the memory of the gradients.
        let others: Vec<Tensor> = layers.iter().map(|_| ones(&[64, 64], 7.0)).collect();
        let average = if step % 4 == 2 { 1.0 + 4.0 * unit } else { 1.0 };
        for seen in &seen {
            assert_eq!(elements(seen), [2.0 * average as f32; 64 * 64], "step {step}");
        }
        assert!(others.iter().all(|other| elements(other) == [7.0; 64 * 64]), "step {step}");
    }
    assert_eq!(steps.load(Ordering::Relaxed), 8);
    assert_eq!(ddp.communicated_bytes(), 8 * 12 * 64 * 64 * 2);
    // Another hook takes its place.
    ddp.register_comm_hook(AllReduce)?;
    let loss = ddp.forward(|| all(&layers) * (1.0 + unit))?;
    zero_grad(&store);
    ddp.backward(&loss)?;
    assert_eq!(elements(&layers[0].grad()), [(1.0 + unit) as f32; 64 * 64]);
    assert_eq!(steps.load(Ordering::Relaxed), 8);
    Ok(())
}

fn own_hook_state(group: &ProcessGroup) -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let make = || {
        let group = group.split(Some(0), 0)?.unwrap();
        let store = VarStore::new(device());
        let one = store.root().var("one", &[8], Init::Const(1.0));
        let optimizer = Optimizer::new(&store, Rule::sgd(0.0))?;
        let mut state = TrainState::new(&store, optimizer, 0u32)?.with_nccl(&devices(&group)?)?;
        let hook = Rounded::default();
        let steps = hook.steps.clone();
        state.ddp.register_device_hook(hook)?;
        Ok::<_, phalanx::Error>((one, state, steps))
    };
    let (one, mut state, _) = make()?;
    for _ in 0..3 {
        let loss = state.ddp.forward(|| one.square().sum(Kind::Float))?;
        state.optimizer.zero_grad()?;
        state.ddp.backward(&loss)?;
        state.step(0.1)?;
    }
    let checkpoints = phalanx::checkpoint::Checkpoints::open(folder.path(), group)?;
    state.checkpoint(&checkpoints)?;
    checkpoints.finish()?;
    drop(state);
    let (_one, mut state, steps) = make()?;
    assert!(state.resume(&checkpoints)?);
    assert_eq!(steps.load(Ordering::Relaxed), 3);
    Ok(())
}

fn own_hook_refused(group: &ProcessGroup) -> Result<()> {
    let cases: [(&str, Sends); 5] = [
        (
            "sends a tensor of Float on Cpu",
            Sends(|whole| DeviceMessage::all_reduce(whole.to_device(tch::Device::Cpu), ReduceOp::Avg)),
        ),
        (
            "sends a tensor of Int64 on Cuda(0)",
            Sends(|whole| DeviceMessage::all_reduce(whole.to_kind(Kind::Int64), ReduceOp::Sum)),
        ),
        ("sends no tensor", Sends(|_| DeviceMessage::all_reduce(Tensor::new(), ReduceOp::Sum))),
        ("combines by max", Sends(|whole| DeviceMessage::all_reduce(whole * 1.0, ReduceOp::Max))),
        ("sends a tensor of Bool on Cuda(0)", Sends(|whole| DeviceMessage::all_gather(whole.gt(0.0)))),
    ];
    for (words, hook) in cases {
        let group = group.split(Some(0), 0)?.unwrap();
        let store = VarStore::new(device());
        let one = store.root().var("one", &[3], Init::Const(1.0));
        let mut ddp = ddp(&store, &group, options())?;
        ddp.register_device_hook(hook)?;
        before_an_error(&group);
        let loss = ddp.forward(|| one.sum(Kind::Float));
        let error = loss.and_then(|loss| ddp.backward(&loss)).unwrap_err().to_string();
        assert!(error.contains(words), "{words}: {error}");
    }
    // It cannot reach the host's memory, and its kind of step has no weights.
    let part = group.split(Some(0), 0)?.unwrap();
    let store = VarStore::new(device());
    let one = store.root().var("one", &[3], Init::Const(1.0));
    let mut on_host = Ddp::with_options(&store, &part, options())?;
    before_an_error(&part);
    let error = on_host.register_device_hook(Rounded::default()).unwrap_err().to_string();
    assert!(error.contains("register_device_hook(rounded)") && error.contains("with_nccl"), "{error}");
    drop(on_host);
    let part = group.split(Some(0), 0)?.unwrap();
    let mut ddp = ddp(&store, &part, options())?;
    ddp.register_device_hook(Rounded::default())?;
    before_an_error(&part);
    let loss = ddp.forward(|| one.sum(Kind::Float));
    let error = loss.and_then(|loss| ddp.backward_weighted(&loss, 1.0)).unwrap_err().to_string();
    assert!(error.contains("rounded"), "{error}");
    Ok(())
}

/// Sends the largest elements of a bucket with their places (top-k): so many of each gradient, or all.
struct Largest {
    of_each: Option<usize>,
}

impl DeviceHook for Largest {
    fn describe(&self) -> String {
        format!("largest {:?}", self.of_each)
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        let whole = bucket.buffer();
        let count = self.of_each.map_or(whole.numel(), |count| count * bucket.gradients().count());
        let (_, places) = whole.abs().topk(count as i64, 0, true, false);
        // f64 has each f32, and each place in a bucket.
        let numbers = [whole.gather(0, &places, false), places].map(|one| one.to_kind(Kind::Double));
        Ok(DeviceMessage::all_gather(Tensor::stack(&numbers, 0)))
    }

    fn receive(&mut self, bucket: &DeviceBucket, combined: &Tensor) -> Result<()> {
        let ranks = i64::from(bucket.world_size().get());
        assert_eq!(combined.size()[..2], [ranks, 2]);
        let [values, places] = [0, 1].map(|row| combined.select(1, row).reshape([-1i64].as_slice()));
        let values = (values / ranks as f64).to_kind(bucket.buffer().kind());
        let mut whole = bucket.buffer().shallow_clone();
        let _ = whole.zero_();
        let _ = whole.index_add_(0, &places.to_kind(Kind::Int64), &values);
        Ok(())
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default())
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        state.nothing()
    }
}

/// Each rank's gradients have three elements that are not zero, in places of its own.
fn largest(group: &ProcessGroup) -> Result<()> {
    let store = VarStore::new(device());
    let layers: Vec<Tensor> =
        (0..4).map(|index| store.root().var(&format!("l{index}"), &[40], Init::Const(0.0))).collect();
    let mut ddp = ddp(&store, group, options())?;
    ddp.register_device_hook(Largest { of_each: Some(3) })?;
    let (rank, ranks) = (group.rank().index(), group.world_size().count());
    // All ranks have something in the first place.
    let slope = |rank: usize, layer: usize, step: usize| {
        let mut slope = vec![0f32; 40];
        for (place, value) in [(0, 1.5), (2 + rank, -8.0), (20 + 3 * rank + layer, 0.25 + step as f32)] {
            slope[place] = value;
        }
        slope
    };
    let before = ddp.communicated_bytes();
    for step in 0..4 {
        let loss = ddp.forward(|| {
            let of = |(layer, one): (usize, &Tensor)| {
                let slope = Tensor::from_slice(&slope(rank, layer, step)).to_device(device());
                (one * slope).sum(Kind::Float)
            };
            layers.iter().enumerate().map(of).reduce(|a, b| a + b).unwrap()
        })?;
        zero_grad(&store);
        ddp.backward(&loss)?;
        // Queued before anybody has waited for the device.
        let seen: Vec<Tensor> = layers.iter().map(|one| one.grad() * 2.0).collect();
        for (layer, seen) in seen.iter().enumerate() {
            let mut sum = vec![0f32; 40];
            for rank in 0..ranks {
                sum.iter_mut().zip(slope(rank, layer, step)).for_each(|(sum, one)| *sum += one);
            }
            let near = |(found, sum): (&f32, &f32)| (found - 2.0 * sum / ranks as f32).abs() < 1e-5;
            let found = elements(seen);
            assert!(found.iter().zip(&sum).all(near), "step {step}, layer {layer}: {found:?} for {sum:?}");
        }
    }
    // Three values and three places of eight bytes for each rank and gradient, of which half counts, as an all_reduce moves twice as many.
    assert_eq!(ddp.communicated_bytes() - before, (4 * 4 * 6 * 8 * ranks / 2) as u64);
    Ok(())
}

/// Sends rounded gradients in a type of integers.
struct Integers(Kind);

impl DeviceHook for Integers {
    fn describe(&self) -> String {
        format!("integers of {:?}", self.0)
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        Ok(DeviceMessage::all_gather(bucket.buffer().to_kind(self.0)))
    }

    fn receive(&mut self, bucket: &DeviceBucket, combined: &Tensor) -> Result<()> {
        assert_eq!(combined.kind(), self.0);
        let average = combined.to_kind(Kind::Float).mean_dim([0i64].as_slice(), false, Kind::Float);
        bucket.buffer().shallow_clone().copy_(&average);
        Ok(())
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default())
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        state.nothing()
    }
}

/// Rank 0 has no batch, and answers with zeros.
fn gathered_integers(group: &ProcessGroup) -> Result<()> {
    for kind in [Kind::Int64, Kind::Int, Kind::Int8, Kind::Uint8] {
        let group = &group.split(Some(0), 0)?.unwrap();
        let store = VarStore::new(device());
        let one = store.root().var("one", &[5], Init::Const(0.0));
        let mut ddp = ddp(&store, group, options())?;
        ddp.register_device_hook(Integers(kind))?;
        let mut optimizer = Optimizer::new(&store, Rule::sgd(0.0))?;
        ddp.join(&mut optimizer, JoinOptions::default(), |ddp, _| {
            for step in 0..3 * group.rank().index() {
                let loss = ddp.forward(|| one.sum(Kind::Float) * (4.0 + step as f64))?;
                zero_grad(&store);
                ddp.backward(&loss)?;
                assert_eq!(elements(&one.grad()), [(4.0 + step as f32) / 2.0; 5], "{kind:?}, step {step}");
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// In a step one rank sends less than the others, or in another way.
#[derive(Clone, Copy)]
enum Differs {
    Elements,
    Type,
    Operation,
    Gathers,
}

struct Different {
    how: Option<Differs>,
    /// Whether it differs in the first bucket, or in the last.
    in_first: bool,
    /// The step in which it differs.
    at: u64,
    step: u64,
}

impl DeviceHook for Different {
    fn describe(&self) -> String {
        "different".into()
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        let (whole, step) = (bucket.buffer() * 1.0, self.step);
        self.step += u64::from(bucket.is_last());
        let is_it = if self.in_first { bucket.index() == 0 } else { bucket.is_last() };
        Ok(match self.how.filter(|_| step == self.at && is_it) {
            None => DeviceMessage::all_reduce(whole, ReduceOp::Avg),
            Some(Differs::Elements) => DeviceMessage::all_reduce(whole.narrow(0, 1, 7), ReduceOp::Avg),
            Some(Differs::Type) => DeviceMessage::all_reduce(whole.to_kind(Kind::Half), ReduceOp::Avg),
            Some(Differs::Operation) => DeviceMessage::all_reduce(whole, ReduceOp::Sum),
            Some(Differs::Gathers) => DeviceMessage::all_gather(whole),
        })
    }

    fn receive(&mut self, _: &DeviceBucket, _: &Tensor) -> Result<()> {
        Ok(())
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default())
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        state.nothing()
    }
}

/// NCCL would wait until its time-out, or combine what does not belong together.
fn own_hook_differs(group: &ProcessGroup) -> Result<()> {
    let cases = |elements: usize| {
        [
            (Differs::Elements, "all_reduce(avg, 7 x f32)".to_owned()),
            (Differs::Type, format!("all_reduce(avg, {elements} x f16)")),
            (Differs::Operation, format!("all_reduce(sum, {elements} x f32)")),
            (Differs::Gathers, format!("all_gather({elements} x f32)")),
        ]
    };
    let buckets = [(false, 8), (true, 200)].map(|(in_first, elements)| {
        cases(elements).map(|(how, name)| {
            (in_first, how, format!("all_reduce(avg, {elements} x f32), and rank 1 {name}"))
        })
    });
    for (in_first, how, words) in buckets.into_iter().flatten() {
        for at in [0, 3] {
            let group = &group.split(Some(0), 0)?.unwrap();
            let store = VarStore::new(device());
            // A bucket for each; that of `one` is the last.
            let one = store.root().var("one", &[8], Init::Const(1.0));
            let two = store.root().var("two", &[200], Init::Const(1.0));
            let mut ddp = ddp(&store, group, options())?;
            let how = (group.rank().index() == 1).then_some(how);
            ddp.register_device_hook(Different { how, in_first, at, step: 0 })?;
            let mut steps = 0..=at;
            let error = steps.find_map(|step| {
                let trained = ddp.forward(|| (&one * 2.0).sum(Kind::Float) + two.sum(Kind::Float));
                let trained = trained.and_then(|loss| ddp.backward(&loss));
                zero_grad(&store);
                trained.err().map(|error| (step, error.to_string()))
            });
            let (step, error) = error.unwrap();
            let words = format!("rank 0 {words}");
            // The error of the rank that differs may reach another one at the end of the step before.
            assert!(step <= at && error.contains(&words) && error.contains("DeviceHook"), "{error}");
        }
    }
    Ok(())
}

/// It panics on one rank, in one of its functions.
struct Panics {
    is_here: bool,
    at: &'static str,
}

impl Panics {
    fn reach(&self, function: &str) {
        assert!(!(self.is_here && function == self.at), "the hook's own");
    }
}

impl DeviceHook for Panics {
    fn describe(&self) -> String {
        self.reach("describe");
        "panics".into()
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        if bucket.is_last() {
            self.reach("send");
        }
        Ok(DeviceMessage::all_reduce(bucket.buffer() * 1.0, ReduceOp::Avg))
    }

    fn receive(&mut self, _: &DeviceBucket, _: &Tensor) -> Result<()> {
        self.reach("receive");
        Ok(())
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default())
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        state.nothing()
    }
}

fn own_hook_panics(group: &ProcessGroup) -> Result<()> {
    for at in ["describe", "send", "receive"] {
        let group = &group.split(Some(0), 0)?.unwrap();
        let model = Mlp::new(&[8, 32, 3]);
        let mut ddp = ddp(&model.store, group, options())?;
        let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
        let is_here = group.rank().index() == 1;
        // The other rank may hear of it only in a later call.
        let trained = ddp.register_device_hook(Panics { is_here, at });
        let error = trained.and_then(|()| train_step(&model, &mut ddp, &mut optimizer, 0));
        let error = error.and_then(|()| group.barrier()).unwrap_err().to_string();
        assert!(error.contains("the hook's own"), "{at}: {error}");
        assert!(!is_here || ddp.forward(|| ()).is_err());
    }
    Ok(())
}

/// Averages, and keeps nothing.
pub struct Stateless;

impl DeviceHook for Stateless {
    fn describe(&self) -> String {
        "stateless".into()
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        Ok(DeviceMessage::all_reduce(bucket.buffer() * 2.0, ReduceOp::Avg))
    }

    fn receive(&mut self, bucket: &DeviceBucket, combined: &Tensor) -> Result<()> {
        bucket.buffer().shallow_clone().copy_(&(combined * 0.5));
        Ok(())
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default())
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        state.nothing()
    }

    fn is_stateless(&self) -> bool {
        true
    }
}

/// Keeps a state on the device, which nobody reads between steps without need.
struct Resident {
    reads: Arc<AtomicU64>,
}

impl DeviceHook for Resident {
    fn describe(&self) -> String {
        "resident".into()
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        Ok(DeviceMessage::all_reduce(bucket.buffer().shallow_clone(), ReduceOp::Avg))
    }

    fn receive(&mut self, _: &DeviceBucket, _: &Tensor) -> Result<()> {
        Ok(()) // The average is where it belongs.
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        Ok(HookState::default().common("factors", 0, vec![1.0]))
    }

    fn load(&mut self, mut state: HookState) -> Result<()> {
        assert_eq!(state.take("factors")[&0], [1.0]);
        Ok(())
    }

    fn keeps_state(&self) -> Result<bool> {
        Ok(true)
    }
}

fn own_hook_label(group: &ProcessGroup) -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = phalanx::checkpoint::Checkpoints::open(folder.path(), group)?;
    let reads = Arc::new(AtomicU64::new(0));
    let make = || {
        let group = group.split(Some(0), 0)?.unwrap();
        let store = VarStore::new(device());
        let one = store.root().var("one", &[8], Init::Const(1.0));
        let optimizer = Optimizer::new(&store, Rule::sgd(0.0))?;
        let mut state = TrainState::new(&store, optimizer, 0u32)?.with_nccl(&devices(&group)?)?;
        state.ddp.register_device_hook(Resident { reads: reads.clone() })?;
        Ok::<_, phalanx::Error>((one, state))
    };
    let (one, mut state) = make()?;
    let loss = state.ddp.forward(|| one.square().sum(Kind::Float))?;
    state.optimizer.zero_grad()?;
    state.ddp.backward(&loss)?;
    assert_eq!(elements(&one.grad()), [2.0; 8]);
    state.step(0.1)?;
    assert_eq!(reads.load(Ordering::Relaxed), 0);
    state.checkpoint(&checkpoints)?;
    checkpoints.finish()?;
    let once = reads.load(Ordering::Relaxed);
    assert_eq!(once, 1, "a checkpoint reads what it has");
    let (_one, mut state) = make()?;
    assert!(state.resume(&checkpoints)?);
    assert_eq!(reads.load(Ordering::Relaxed), once, "what is replaced is not read");
    Ok(())
}

fn other_models(group: &ProcessGroup) -> Result<()> {
    let store = VarStore::new(device());
    drop(store.root().var("one", &[8, 8], Init::Const(1.0)));
    let mut ddp = ddp(&store, group, options())?;
    ddp.register_comm_hook(Compressed::f16())?;
    let error = ddp.register_comm_hook(PowerSgd::new(compressing(0))?).unwrap_err().to_string();
    let names = ["host-of-rank-0", "host-of-rank-1"];
    assert!(names.iter().all(|name| error.contains(name)), "{error}");
    Ok(())
}
