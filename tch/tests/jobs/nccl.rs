//! Gradients that NCCL averages: on the stand-ins for libtorch's devices, libcuda and libnccl each rank has a device of its own; on a real GPU
//! all are on the first one, which NCCL permits to ranks of different hosts.

mod gradients;
mod joins;
mod local;
mod low_rank;
mod messages;
mod own_hooks;
mod refused;
mod under_way;

use std::path::Path;

use phalanx::launch::{Job, Outcome};
use phalanx::reducer::ReducerOptions;
use phalanx::reducer::hooks::PowerSgdOptions;
use phalanx::{ProcessGroup, Result};
use phalanx_nccl::DeviceGroup;
use phalanx_tch::{Ddp, DdpOptions, Optimizer, Rule, TrainState};
use tch::nn::{Init, VarStore};
use tch::{Kind, Tensor};

use self::gradients::{compressed, idle, kinds, own, second_device, shared, weighted};
use self::joins::{dies, dies_in_a_join, held_join, joined, joined_norm, late_join};
use self::local::{
    group_fails_between, local, subgroup, subgroup_evaluated, subgroup_fails, subgroup_fails_late,
    subgroup_left, subgroup_moved,
};
use self::low_rank::{low_rank, low_rank_state, low_rank_steps};
use self::messages::{gathered_integers, largest, own_hook_differs};
pub use self::own_hooks::Stateless;
use self::own_hooks::{own_hook, own_hook_label, own_hook_panics, own_hook_refused, own_hook_state};
use self::refused::{other_models, refused};
use self::under_way::{at_once, failed_step, held, no_wait};
use crate::common::{Mlp, device, elements, floats, load, samples};

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
    let other = std::env::var(crate::harness::ROLE).is_ok_and(|role| role.ends_with(OTHER_MODELS));
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

fn all(layers: &[Tensor]) -> Tensor {
    layers.iter().map(|one| one.sum(Kind::Float)).reduce(|a, b| a + b).unwrap()
}

/// Gradients are none, as `set_to_none=True` leaves them.
fn zero_grad(store: &VarStore) {
    Optimizer::new(store, Rule::sgd(0.0)).unwrap().zero_grad().unwrap();
}

/// Gives variables the same values in each run.
fn begin(store: &VarStore) {
    let start = floats(store).into_iter().enumerate().map(|(index, one)| {
        let wave = |place: usize| ((place * 7 + index * 3) as f32).sin() / 4.0;
        (0..one.len()).map(wave).collect::<Vec<f32>>()
    });
    load(store, &start.collect::<Vec<_>>());
}

/// PowerSGD that sends matrices as products after so many steps, if they become smaller at all.
fn compressing(steps: u64) -> PowerSgdOptions {
    PowerSgdOptions::default().start_iter(steps).min_compression_rate(1.0)
}

fn train_step(model: &Mlp, ddp: &mut Ddp, optimizer: &mut Optimizer, step: usize) -> Result<()> {
    let from = step * 40 + ddp.rank().index() * 10;
    let loss = ddp.forward(|| model.loss(samples(from, from + 6)))?;
    optimizer.zero_grad()?;
    ddp.backward(&loss)?;
    optimizer.step(0.05)
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
