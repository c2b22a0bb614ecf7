//! Gradients that NCCL averages: two or three ranks that are processes, or two devices of one. With `PHALANX_TEST_DEVICE=cuda` all are on the first device, which NCCL
//! permits by `NCCL_HOSTID`; with `cpu` they are on the stand-ins for libcuda and libnccl, which are no GPU.

use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use burn::module::{Module, Param};
use burn::nn::BatchNormConfig;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, FloatDType, IndexingUpdateOp, Int, Tensor};
use libtest_mimic::Trial;
use phalanx::checkpoint::Checkpoints;
use phalanx::elastic::{self, Context};
use phalanx::join::{JoinGroup, JoinOptions};
use phalanx::launch::{Event, Job, Outcome};
use phalanx::reducer::ReducerOptions;
use phalanx::reducer::hooks::{
    AllReduce, CommHook, Compressed, GradBucket, HookState, Pending, PostLocalSgd, PowerSgd, PowerSgdOptions,
};
use phalanx::store::TcpStoreServer;
use phalanx::{Communicator, ProcessGroup, Rank, ReduceOp, Result, WorldSize};
use phalanx_burn::{
    DataParallel, Ddp, DdpOptions, Destination, DeviceBucket, DeviceHook, DeviceMessage,
    PeriodicModelAverager, Scatter, SyncBatchNorm, TowerGradients, TrainState, ZeroRedundancyOptimizer,
};
use phalanx_nccl::DeviceGroup;
use rustix::process::{Signal, getpid, kill_process};

use crate::common::{Waves, device, distance, floats, samples};
use crate::devices::{FOLDER, STEPS, check_overlap};
use crate::workers::{Worker, start, start_each};

#[path = "../../../phalanx-nccl/tests/jobs/stand_in.rs"]
mod stand_in;

/// What a rank does.
const WHAT: &str = "PHALANX_TEST_NCCL";
/// How it trains.
const CASE: &str = "PHALANX_TEST_NCCL_CASE";
const RANKS: usize = 2;
/// Rows of a rank's batch.
const ROWS: usize = 4;
const WIDTH: usize = 8;
const LAYERS: usize = 12;

pub fn trials() -> Vec<Trial> {
    let tests: [(&str, bool, fn()); 36] = [
        ("survivors_average_a_step_again", false, || survivors_go_on(3)),
        ("the_last_rank_goes_on_with_its_own_gradients", false, || survivors_go_on(2)),
        ("steps_are_those_of_one_process", false, || trained_as_one_process("plain")),
        ("what_a_rank_does_not_use_counts_as_zero", false, || trained_as_one_process("unused")),
        ("a_static_graph_may_have_unused_parameters", false, || trained_as_one_process("static")),
        ("accumulated_gradients_are_averaged_once", false, || trained_as_one_process("accumulated")),
        ("ranks_and_passes_count_by_their_weights", false, || trained_as_one_process("weighted")),
        ("gradients_travel_in_half_the_bytes", false, || trained_as_one_process("compressed")),
        ("several_forward_passes_have_one_backward", false, || trained_as_one_process("together")),
        ("ranks_that_are_done_answer_the_others_calls", false, || joined("plain", 2)),
        ("of_three_ranks_one_has_no_batch", false, || joined("plain", 3)),
        ("in_a_join_the_average_may_be_that_of_ranks_with_data", false, || joined("by active", 3)),
        ("in_a_join_gradients_are_accumulated", false, || joined("accumulated", 2)),
        ("in_a_join_ranks_count_by_their_weights", false, || joined("weighted", 3)),
        ("in_a_join_what_no_rank_with_data_uses_has_no_average", false, || joined("unused", 2)),
        ("in_a_join_gradients_travel_in_half_the_bytes", false, || joined("compressed", 2)),
        ("in_a_join_products_of_factors_are_averaged", false, || joined("low rank", 3)),
        ("power_sgd_on_the_device_trains_as_in_the_host_s_memory", false, || {
            job("low rank", &[HOST_IS_DEVICE]);
        }),
        ("power_sgd_goes_on_from_checkpoints_of_both", false, || job("low rank state", &[HOST_IS_DEVICE])),
        ("ranks_train_by_themselves_as_in_the_host_s_memory", false, || job("local", &[HOST_IS_DEVICE])),
        ("ranks_of_a_smaller_group_average_as_in_the_host_s_memory", false, || {
            job_of(3, "subgroup", &[HOST_IS_DEVICE]);
            job("subgroup", &[HOST_IS_DEVICE]);
        }),
        ("a_failure_within_a_smaller_group_is_one_of_all_ranks", false, || {
            job_of(3, "subgroup fails", &[HOST_IS_DEVICE]);
        }),
        ("a_panic_of_a_hook_is_an_error_on_every_rank", false, || {
            job("own hook panics", &[HOST_IS_DEVICE]);
        }),
        ("local_sgd_goes_on_from_checkpoints_of_both", false, || job("local state", &[HOST_IS_DEVICE])),
        ("a_hook_of_the_program_s_own_works_on_the_device", false, || trained_as_one_process("halves")),
        ("in_a_join_a_hook_of_the_program_s_own_works", false, || joined("own", 3)),
        ("the_largest_gradients_are_gathered_with_their_places", false, || trained_as_one_process("largest")),
        ("in_a_join_the_largest_gradients_are_gathered", false, || joined("largest", 3)),
        ("hooks_that_send_different_messages_are_named", false, || {
            job("own hook differs", &[HOST_IS_DEVICE]);
        }),
        ("a_hook_of_the_program_s_own_goes_on_from_a_checkpoint", false, || {
            job("own hook state", &[HOST_IS_DEVICE]);
        }),
        // The stand-in's devices may have names.
        ("power_sgd_among_devices_of_several_models_is_refused", true, || {
            job(OTHER_MODELS, &[HOST_IS_DEVICE]);
        }),
        ("a_synchronised_batch_norm_and_a_rank_that_dies_in_a_join", false, || {
            job("join norm", &[HOST_IS_DEVICE]);
            dies_in_a_join();
        }),
        ("nccl_averages_while_backward_goes_on", false, nccl_averages_while_backward_goes_on),
        ("what_cannot_be_done_on_the_device_is_refused_by_name", false, || job("refuse", &[HOST_IS_DEVICE])),
        // The driver says whose memory an address is in, and is asked before NCCL gets it. Burn's memory on cuda is the device's.
        ("memory_that_is_not_the_device_s_is_refused", true, || job("elsewhere", &[])),
        (OF_ONE_PROCESS, false, devices_of_one_process),
    ];
    let is_fused = std::any::type_name::<burn::backend::Cube>().contains("Fusion");
    let has_two = || phalanx_nccl::Device::count().is_ok_and(|count| count >= 2);
    let trial = |(name, stand_in, test): (&str, bool, fn())| {
        let reason = match kind().as_str() {
            "cuda" if stand_in => " (needs the stand-in)",
            "cuda" if name == OF_ONE_PROCESS && !has_two() => " (needs two devices)",
            // As all tests whose ranks are threads.
            "cuda" | "cpu" if name == OF_ONE_PROCESS && is_fused => " (needs a build without fusion)",
            "cuda" | "cpu" => "",
            _ => " (needs the device cuda or cpu)",
        };
        let test = move || {
            test();
            Ok(())
        };
        Trial::test(format!("nccl::{name}{reason}"), test).with_ignored_flag(!reason.is_empty())
    };
    tests.into_iter().map(trial).collect()
}

/// A test that two ranks on one device do not do.
const OF_ONE_PROCESS: &str = "devices_of_one_process_train_as_one_model";

/// The kind of the device of all tests.
fn kind() -> String {
    std::env::var("PHALANX_TEST_DEVICE").unwrap_or_default()
}

/// Whether the ranks are on a real device.
fn is_real() -> bool {
    kind() == "cuda"
}

/// Runs the ranks, which all must succeed.
fn job(what: &'static str, more: &[(&'static str, &str)]) {
    job_of(RANKS, what, more);
}

fn job_of(ranks: usize, what: &'static str, more: &[(&'static str, &str)]) {
    let folder = tempfile::tempdir().unwrap();
    let (_server, mut ranks) = begin(folder.path(), ranks, what, more);
    for rank in &mut ranks {
        let (finished, text) = rank.outcome("a rank with NCCL");
        assert!(finished, "{text}");
    }
}

/// Starts the ranks. The stand-in lies in `folder`.
fn begin(
    folder: &Path,
    ranks: usize,
    what: &'static str,
    more: &[(&'static str, &str)],
) -> (TcpStoreServer, Vec<Worker>) {
    let libraries = if is_real() { None } else { Some(stand_in::build(folder)) };
    let mut variables = vec![(WHAT, what)];
    variables.extend(more);
    let libraries = libraries.iter().flatten().map(|(name, path)| (*name, path.to_str().unwrap()));
    variables.extend(libraries);
    let own = |rank: u32| match is_real() {
        true => vec![
            ("NCCL_HOSTID", format!("host-of-rank-{rank}")),
            ("NCCL_SOCKET_IFNAME", "lo".to_owned()),
            ("NCCL_IB_DISABLE", "1".to_owned()),
            ("NCCL_P2P_DISABLE", "1".to_owned()),
            ("NCCL_SHM_DISABLE", "1".to_owned()),
        ],
        // Each has a device of its own, and sees no other.
        false => {
            let mut own =
                vec![("STANDIN_CUDA_FIRST", rank.to_string()), ("STANDIN_CUDA_DEVICES", "1".to_owned())];
            if what == OTHER_MODELS {
                own.push(("STANDIN_CUDA_NAME", format!("device-of-rank-{rank}")));
            }
            own
        }
    };
    start_each("nccl", ranks as u32, &variables, own)
}

/// What this program does as a rank.
pub fn play() {
    match std::env::var(WHAT).unwrap().as_str() {
        "outlive" => return outlive().unwrap(),
        "one_process" => return one_process().unwrap(),
        _ => {}
    }
    let group = phalanx::init().unwrap();
    let cuda = phalanx_nccl::Device::open(0).unwrap();
    match std::env::var(WHAT).unwrap().as_str() {
        "train" => {
            let group = DeviceGroup::new(group, &cuda).unwrap();
            let trained = train(&group, &std::env::var(CASE).unwrap()).unwrap();
            let path =
                Path::new(&std::env::var(FOLDER).unwrap()).join(format!("{}.json", group.host().rank()));
            std::fs::write(path, serde_json::to_vec(&trained).unwrap()).unwrap();
        }
        "refuse" => refuse(&group, &cuda),
        "join" => join(&group, &cuda, &std::env::var(CASE).unwrap()).unwrap(),
        "low rank" => low_rank(&group, &cuda).unwrap(),
        "low rank state" => hook_state(&group, &cuda, 4, || PowerSgd::new(compressing(1))).unwrap(),
        "local" => local(&group, &cuda).unwrap(),
        "subgroup" => subgroup(&group, &cuda).unwrap(),
        "subgroup fails" => subgroup_fails(&group, &cuda).unwrap(),
        "own hook panics" => own_hook_panics(&group, &cuda).unwrap(),
        "own hook state" => own_hook_state(&group, &cuda).unwrap(),
        "own hook differs" => own_hook_differs(&group, &cuda).unwrap(),
        "local state" => hook_state(&group, &cuda, 1, || Ok(PostLocalSgd::new(2))).unwrap(),
        OTHER_MODELS => other_models(group, &cuda).unwrap(),
        "join norm" => join_norm(&group, &cuda).unwrap(),
        "dies" => die_in_a_join(&group, &cuda).unwrap(),
        "elsewhere" => {
            let group = DeviceGroup::new(group, &cuda).unwrap();
            let error = Ddp::with_nccl(Net::new(), &group, DdpOptions::default()).unwrap_err().to_string();
            assert!(error.contains("the model is not in the memory of CUDA device 0"), "{error}");
        }
        other => panic!("no rank does {other}"),
    }
}

/// No matrix products, which take long on the processors. The gradients of all `adds` are one tensor, which backward needs until it comes
/// to `first`: averaged in place, it would give `first` a wrong one.
#[derive(Module, Debug)]
struct Net {
    first: Param<Tensor<1>>,
    adds: Vec<Param<Tensor<2>>>,
    layers: Vec<Layer>,
}

#[derive(Module, Debug)]
struct Layer {
    weight: Param<Tensor<1>>,
    bias: Param<Tensor<1>>,
}

impl Net {
    fn new() -> Self {
        let row = || Param::from_tensor(Tensor::zeros([WIDTH], &device()));
        let layer = |_| Layer { weight: row(), bias: row() };
        let add = |_| Param::from_tensor(Tensor::zeros([ROWS, WIDTH], &device()));
        let net = Self {
            first: row(),
            adds: (0..LAYERS).map(add).collect(),
            layers: (0..LAYERS).map(layer).collect(),
        };
        net.map(&mut Waves::default())
    }

    /// Of [`ROWS`] rows from `from` on, without the layers of these numbers.
    fn loss(&self, from: usize, without: &[usize]) -> Tensor<1> {
        self.loss_of(samples(from, from + ROWS).0, without)
    }

    /// Of these rows.
    fn loss_of(&self, x: Tensor<2>, without: &[usize]) -> Tensor<1> {
        error(self.forward(x.clone(), without), x)
    }

    fn forward(&self, x: Tensor<2>, without: &[usize]) -> Tensor<2> {
        let first = x.clone() * self.first.val().unsqueeze();
        let added = self.adds.iter().fold(first, |sum, add| sum + add.val());
        let layer = |x: Tensor<2>, layer: &Layer| {
            ((x.clone() * layer.weight.val().unsqueeze() + layer.bias.val().unsqueeze()) * 0.2 + x).tanh()
        };
        let used = self.layers.iter().enumerate().filter(|(number, _)| !without.contains(number));
        used.fold(added * 0.1, |x, (_, one)| layer(x, one))
    }
}

fn error(out: Tensor<2>, x: Tensor<2>) -> Tensor<1> {
    (out - x * 0.5).powi_scalar(2).mean()
}

/// A layer that no rank uses in the cases with unused ones, where each rank leaves out the one of its own number, too.
const IDLE: usize = 5;

/// The passes of a rank's step: where its rows begin, and the layers that it leaves out.
fn passes(case: &str, step: usize, rank: usize) -> Vec<(usize, Vec<usize>)> {
    let count = if matches!(case, "accumulated" | "together" | "weighted") { 2 } else { 1 };
    let without = if matches!(case, "unused" | "static") { vec![IDLE, rank] } else { Vec::new() };
    let from = |pass| ((step * RANKS + rank) * count + pass) * ROWS;
    (0..count).map(|pass| (from(pass), without.clone())).collect()
}

/// What a pass counts. In some steps a pass, or all of a rank's, count nothing.
fn weight(case: &str, step: usize, rank: usize, pass: usize) -> f64 {
    match case {
        "weighted" if step % 4 == 3 => [2.5, 0.0][rank],
        "weighted" => ((step + 2 * rank + pass) % 3) as f64,
        _ => 1.0,
    }
}

/// Decay changes a parameter whose gradient is zero, and not one that has none.
fn sgd() -> ModuleOptimizer {
    let config = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    config.with_weight_decay(Some(WeightDecayConfig::new(0.1))).init()
}

fn options() -> DdpOptions {
    let mut options = DdpOptions::default();
    // Several buckets.
    options.reducer = ReducerOptions::default().bucket_cap_mb(0.0005);
    options
}

/// One rank's part of the job.
fn train(group: &DeviceGroup, case: &str) -> Result<Vec<Vec<f32>>> {
    let mut options = options();
    options.reducer = match case {
        "unused" => options.reducer.find_unused_parameters(true),
        "static" => options.reducer.static_graph(true),
        _ => options.reducer,
    };
    let (mut ddp, mut optimizer) = match case {
        "plain" => {
            let state = TrainState::new(Net::new(), sgd(), ())?.with_nccl(group)?.with_options(options)?;
            (state.model, state.optimizer)
        }
        _ => (Ddp::with_nccl(Net::new(), group, options)?, sgd()),
    };
    assert!(format!("{ddp:?}").contains("NCCL"));
    match case {
        "compressed" => ddp.register_comm_hook(Compressed::bf16())?,
        "halves" => ddp.register_device_hook(Halves::default())?,
        "largest" => ddp.register_device_hook(Largest)?,
        _ => {}
    }
    let rank = group.host().rank().index();
    let before = calls(group);
    for step in 0..STEPS {
        let mut passes = passes(case, step, rank);
        let last = passes.len() - 1;
        let (from, without) = passes.pop().unwrap();
        if case == "weighted" {
            let weighted = |pass, loss: Tensor<1>| {
                let weight = weight(case, step, rank, pass);
                // What comes of no sample may be anything.
                (if weight == 0.0 { loss * f32::NAN } else { loss }, weight)
            };
            for (pass, (from, without)) in passes.into_iter().enumerate() {
                let (loss, weight) = weighted(pass, ddp.forward(|net| net.loss(from, &without))?);
                ddp.backward_no_sync_weighted(&loss, weight)?;
            }
            let (loss, weight) = weighted(last, ddp.forward(|net| net.loss(from, &without))?);
            let gradients = ddp.backward_weighted(&loss, weight)?;
            ddp.step(&mut optimizer, 0.05, gradients)?;
            continue;
        }
        let share = 1.0 / (passes.len() + 1) as f64;
        let mut loss = ddp.forward(|net| net.loss(from, &without))? * share;
        for (from, without) in passes {
            if case == "together" {
                loss = loss + ddp.forward(|net| net.loss(from, &without))? * share;
            } else {
                let first = ddp.forward(|net| net.loss(from, &without))? * share;
                ddp.backward_no_sync(&first)?;
            }
        }
        let gradients = ddp.backward(&loss)?;
        let idle = gradients.get::<1>(ddp.model().layers[IDLE].weight.id);
        assert_eq!(idle.is_none(), matches!(case, "unused" | "static"));
        ddp.step(&mut optimizer, 0.05, gradients)?;
    }
    assert!(ddp.replicas_identical()?);
    let size = match case {
        "compressed" | "halves" => 2,
        // A number and its place, of two ranks; half of it counts.
        "largest" => 8,
        _ => 4,
    };
    let sent = (STEPS * ddp.model().num_params() * size) as u64;
    if matches!(case, "halves" | "largest") {
        // With what lies between gradients.
        assert!(ddp.communicated_bytes() >= sent);
        let last = group.device().calls().pop().unwrap().name;
        let words = if case == "halves" { ["avg", "x f16"] } else { ["all_gather", "x f32"] };
        assert!(words.iter().all(|word| last.contains(word)), "{last}");
    } else {
        assert_eq!(ddp.communicated_bytes(), sent);
    }
    // One for each bucket, and fewer buckets than parameters.
    let calls = calls(group) - before;
    assert!((STEPS * 4..STEPS * 10).contains(&calls), "{calls} calls of NCCL's in {STEPS} steps");
    Ok(floats(&ddp.model().valid()))
}

/// How many calls of NCCL's the group has made.
fn calls(group: &DeviceGroup) -> usize {
    group.device().calls().last().map_or(0, |call| call.sequence.0 as usize)
}

/// Plain Burn, with the batches of all ranks.
fn reference(case: &str) -> Vec<Vec<f32>> {
    let (mut net, mut optimizer) = (Net::new(), sgd());
    for step in 0..STEPS {
        let of_rank = |rank| {
            let passes = passes(case, step, rank).into_iter().enumerate();
            passes.map(move |(pass, of)| (weight(case, step, rank, pass), of))
        };
        let passes: Vec<_> = (0..RANKS).flat_map(of_rank).collect();
        let total: f64 = passes.iter().map(|(weight, _)| weight).sum();
        let losses = passes.iter().map(|(weight, (from, without))| net.loss(*from, without) * *weight);
        let loss = losses.reduce(|sum, loss| sum + loss).unwrap() / total;
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(0.05, net, gradients);
    }
    floats(&net.valid())
}

/// A rank's batches in a join: the first has two, the second four, the third none.
const BATCHES: [usize; 3] = [2, 4, 0];
/// The step after it, which all ranks make.
const TOGETHER: usize = 9;

/// Where the rows of a rank's passes begin.
fn rows_in_join(case: &str, step: usize, rank: usize) -> Vec<usize> {
    let count = if case == "accumulated" { 2 } else { 1 };
    (0..count).map(|pass| ((step * BATCHES.len() + rank) * 2 + pass) * ROWS).collect()
}

/// The layers that a rank leaves out.
fn left_out(case: &str, rank: usize) -> Vec<usize> {
    if case == "unused" { vec![IDLE, rank] } else { Vec::new() }
}

fn weight_in_join(case: &str, step: usize, rank: usize) -> f64 {
    if case == "weighted" { ((step + 2 * rank) % 3 + 1) as f64 } else { 1.0 }
}

/// What ranks train with unequal numbers of batches over NCCL, and through the host, is what one process trains with all their batches.
fn join(group: &ProcessGroup, cuda: &phalanx_nccl::Device, case: &str) -> Result<()> {
    let (nccl, host) = (train_in_join(group, Some(cuda), case)?, train_in_join(group, None, case)?);
    let expected = match case {
        "low rank" => host.clone(), // It approximates.
        _ => reference_of_join(case, group.world_size().count()),
    };
    let before = floats(&Net::new().valid());
    assert!(distance(&expected[0], &before) > 0.01, "the reference has not moved");
    // bf16 has 8 significant bits.
    let most = if case == "compressed" { 1e-2 } else { 1e-4 };
    for (way, trained) in [("NCCL", nccl), ("the host", host)] {
        for (when, (ours, expected)) in
            ["after the join", "a step later"].iter().zip(trained.iter().zip(&expected))
        {
            let distance = distance(ours, expected);
            assert!(distance < most, "{case}, {way}, {when}: {distance:e}");
        }
    }
    Ok(())
}

/// A model whose gradients are averaged by NCCL on `cuda`, or through the host.
fn ddp(group: ProcessGroup, cuda: Option<&phalanx_nccl::Device>, options: DdpOptions) -> Result<Ddp<Net>> {
    let ddp = match cuda {
        Some(cuda) => Ddp::with_nccl(Net::new(), &DeviceGroup::new(group, cuda)?, options)?,
        None => Ddp::with_options(Net::new(), &group, options)?,
    };
    assert_eq!(cuda.is_some(), format!("{ddp:?}").contains("NCCL"));
    Ok(ddp)
}

/// The parameters after a join, and after one step more together; by NCCL on `cuda`, or through the host.
fn train_in_join(
    group: &ProcessGroup,
    cuda: Option<&phalanx_nccl::Device>,
    case: &str,
) -> Result<[Vec<Vec<f32>>; 2]> {
    let group = group.split(Some(0), 0)?.unwrap();
    let rank = group.rank().index();
    let mut options = options();
    if case == "unused" {
        options.reducer = options.reducer.find_unused_parameters(true);
    }
    let mut ddp = ddp(group, cuda, options)?;
    match case {
        "compressed" => ddp.register_comm_hook(Compressed::bf16())?,
        "low rank" => ddp.register_comm_hook(PowerSgd::new(compressing(1))?)?,
        "own" if cuda.is_some() => {
            let send = |whole| DeviceMessage::all_reduce(whole, ReduceOp::Avg);
            ddp.register_device_hook(Sends(send, |averages| averages))?;
        }
        "largest" if cuda.is_some() => ddp.register_device_hook(Largest)?,
        _ => {}
    }
    let mut optimizer = sgd();
    let mut join = JoinOptions::default();
    join.divide_by_initial_world_size = case != "by active";
    ddp.join(&mut optimizer, join, |ddp, optimizer| {
        (0..BATCHES[rank]).try_for_each(|step| step_of_join(case, ddp, optimizer, step))
    })?;
    assert!(ddp.replicas_identical()?);
    let joined = floats(&ddp.model().valid());
    // With other moments replicas would drift apart.
    step_of_join(case, &mut ddp, &mut optimizer, TOGETHER)?;
    assert!(ddp.replicas_identical()?);
    Ok([joined, floats(&ddp.model().valid())])
}

fn step_of_join(case: &str, ddp: &mut Ddp<Net>, optimizer: &mut ModuleOptimizer, step: usize) -> Result<()> {
    let rank = ddp.rank().index();
    let (rows, without) = (rows_in_join(case, step, rank), left_out(case, rank));
    let share = 1.0 / rows.len() as f64;
    let (last, firsts) = rows.split_last().unwrap();
    for from in firsts {
        let loss = ddp.forward(|net| net.loss(*from, &without))? * share;
        ddp.backward_no_sync(&loss)?;
    }
    let loss = ddp.forward(|net| net.loss(*last, &without))? * share;
    let gradients = match case {
        "weighted" => ddp.backward_weighted(&loss, weight_in_join(case, step, rank))?,
        _ => ddp.backward(&loss)?,
    };
    ddp.step(optimizer, 0.05, gradients)
}

/// Plain Burn, with the batches of all ranks that have one: after the join, and after one step more.
fn reference_of_join(case: &str, ranks: usize) -> [Vec<Vec<f32>>; 2] {
    let (mut net, mut optimizer) = (Net::new(), sgd());
    let mut joined = None;
    let longest = BATCHES[..ranks].iter().copied().max().unwrap();
    for step in (0..longest).chain([TOGETHER]) {
        if step == TOGETHER {
            joined = Some(floats(&net.valid()));
        }
        let has_data = |rank: &usize| step == TOGETHER || step < BATCHES[*rank];
        let active: Vec<usize> = (0..ranks).filter(has_data).collect();
        let divisor: f64 = match case {
            "weighted" => active.iter().map(|rank| weight_in_join(case, step, *rank)).sum(),
            "by active" => active.len() as f64,
            _ => ranks as f64,
        };
        let losses = active.iter().flat_map(|rank| {
            let (rows, without) = (rows_in_join(case, step, *rank), left_out(case, *rank));
            let factor = weight_in_join(case, step, *rank) / rows.len() as f64;
            let net = &net;
            rows.into_iter().map(move |from| net.loss(from, &without) * factor)
        });
        let loss = losses.reduce(|sum, loss| sum + loss).unwrap() / divisor;
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(0.05, net, gradients);
    }
    [joined.unwrap(), floats(&net.valid())]
}

fn joined(case: &'static str, ranks: usize) {
    job_of(ranks, "join", &[(CASE, case), HOST_IS_DEVICE]);
}

/// PowerSGD that sends matrices as products after so many steps, if they become smaller at all.
fn compressing(steps: u64) -> PowerSgdOptions {
    PowerSgdOptions::default().start_iter(steps).min_compression_rate(1.0)
}

/// As in the host's memory, also after gradients that are zero or not finite.
fn low_rank(group: &ProcessGroup, cuda: &phalanx_nccl::Device) -> Result<()> {
    let (plain, odd) = ([1.0; 6], [1.0, f64::NAN, 1.0, 0.0, 0.0, 1.0]);
    let cases = [
        (compressing(2), plain),
        (compressing(0).rank(2).seed(5), plain),
        (compressing(1).warm_start(false), plain),
        (compressing(0), odd),
        // Nothing at all is left after a step of zeros.
        (compressing(0).error_feedback(false), odd),
    ];
    for (low_rank, factors) in cases {
        let (host, of_host) = train_low_rank(group, None, low_rank, &factors)?;
        let (nccl, of_nccl) = train_low_rank(group, Some(cuda), low_rank, &factors)?;
        assert!(host.iter().flatten().all(|one| one.is_finite()));
        let distance = distance(&nccl, &host);
        assert!(distance < 1e-4, "{low_rank:?}: {distance:e}");
        assert_eq!(of_nccl, of_host, "bytes");
    }
    Ok(())
}

/// The parameters after steps whose losses are multiplied by these factors, and the bytes that were sent.
fn train_low_rank(
    group: &ProcessGroup,
    cuda: Option<&phalanx_nccl::Device>,
    low_rank: PowerSgdOptions,
    factors: &[f64],
) -> Result<(Vec<Vec<f32>>, u64)> {
    let group = group.split(Some(0), 0)?.unwrap();
    let rank = group.rank().index();
    let mut ddp = ddp(group, cuda, options())?;
    ddp.register_comm_hook(PowerSgd::new(low_rank)?)?;
    let mut optimizer = sgd();
    for (step, factor) in factors.iter().enumerate() {
        let from = rows_in_join("plain", step, rank)[0];
        let loss = ddp.forward(|net| net.loss(from, &[]))? * *factor;
        let gradients = ddp.backward(&loss)?;
        if factor.is_finite() {
            ddp.step(&mut optimizer, 0.05, gradients)?;
        }
    }
    assert!(ddp.replicas_identical()?);
    Ok((floats(&ddp.model().valid()), ddp.communicated_bytes()))
}

/// Ranks that train by themselves after the first steps, and then average gradients again.
fn local(group: &ProcessGroup, cuda: &phalanx_nccl::Device) -> Result<()> {
    let (host, of_host) = train_locally(group, None)?;
    let (nccl, of_nccl) = train_locally(group, Some(cuda))?;
    let distance = distance(&nccl, &host);
    assert!(distance < 1e-4, "{distance:e}");
    assert_eq!(of_nccl, of_host, "bytes");
    Ok(())
}

/// The parameters of this rank, and the bytes that were sent of gradients.
fn train_locally(group: &ProcessGroup, cuda: Option<&phalanx_nccl::Device>) -> Result<(Vec<Vec<f32>>, u64)> {
    let group = group.split(Some(0), 0)?.unwrap();
    let mut ddp = ddp(group, cuda, options())?;
    ddp.register_comm_hook(PostLocalSgd::new(2))?;
    let mut averager = PeriodicModelAverager::new(2)?.warmup_steps(2);
    let mut optimizer = sgd();
    for step in 0..5 {
        step_of_join("plain", &mut ddp, &mut optimizer, step)?;
        let is_averaged = averager.step(&mut ddp)?;
        assert_eq!(ddp.replicas_identical()?, step < 2 || is_averaged, "step {step}");
    }
    let sent = (2 * 4 * ddp.model().num_params()) as u64;
    assert_eq!(ddp.communicated_bytes(), sent);
    ddp.register_comm_hook(AllReduce)?;
    step_of_join("plain", &mut ddp, &mut optimizer, 5)?;
    assert_eq!(ddp.communicated_bytes(), sent / 2 * 3);
    Ok((floats(&ddp.model().valid()), ddp.communicated_bytes()))
}

/// The two first ranks average among themselves after the first steps, and a third one by itself; and then all again.
fn subgroup(group: &ProcessGroup, cuda: &phalanx_nccl::Device) -> Result<()> {
    let train = |cuda: Option<&phalanx_nccl::Device>| -> Result<Vec<Vec<f32>>> {
        let group = group.split(Some(0), 0)?.unwrap();
        let smaller = group.split(Some(group.rank().get() / 2), 0)?.unwrap();
        let is_all = group.world_size() == smaller.world_size();
        let mut ddp = ddp(group, cuda, options())?;
        ddp.register_comm_hook(PostLocalSgd::new(2).subgroup(smaller.clone()))?;
        let mut optimizer = sgd();
        for step in 0..5 {
            step_of_join("plain", &mut ddp, &mut optimizer, step)?;
            assert_eq!(ddp.replicas_identical()?, step < 2 || is_all, "step {step}, {cuda:?}");
            let here = smaller.all_gather_object(&floats(&ddp.model().valid()))?;
            assert!(here.iter().all(|one| *one == here[0]), "step {step}, {cuda:?}");
        }
        ddp.register_comm_hook(AllReduce)?;
        step_of_join("plain", &mut ddp, &mut optimizer, 5)?;
        Ok(floats(&ddp.model().valid()))
    };
    let (host, nccl) = (train(None)?, train(Some(cuda))?);
    let distance = distance(&nccl, &host);
    assert!(distance < 1e-4, "{distance:e}");
    Ok(())
}

/// What ends the smaller group is the error of a step of its ranks, and of every call of the others.
fn subgroup_fails(group: &ProcessGroup, cuda: &phalanx_nccl::Device) -> Result<()> {
    let group = group.split(Some(0), 0)?.unwrap();
    let smaller = group.split(Some(group.rank().get() / 2), 0)?.unwrap();
    let mut ddp = ddp(group.clone(), Some(cuda), options())?;
    ddp.register_comm_hook(PostLocalSgd::new(1).subgroup(smaller.clone()))?;
    let mut optimizer = sgd();
    (0..3).try_for_each(|step| step_of_join("plain", &mut ddp, &mut optimizer, step))?;
    group.barrier()?;
    let has_failed = |error: phalanx::Error| {
        let error = error.to_string();
        assert!(error.contains("the fault of the test"), "{error}");
    };
    if smaller.world_size().count() == 2 {
        if smaller.rank().is_main() {
            smaller.abort(phalanx::Error::aborted("the fault of the test"));
        }
        // Until both ranks know.
        has_failed(smaller.barrier().unwrap_err());
        has_failed(step_of_join("plain", &mut ddp, &mut optimizer, 3).unwrap_err());
    }
    has_failed(group.barrier().unwrap_err());
    Ok(())
}

/// From the device to the host's memory, and back, after so many steps with a hook.
fn hook_state<H: CommHook + 'static>(
    group: &ProcessGroup,
    cuda: &phalanx_nccl::Device,
    at: usize,
    hook: impl Fn() -> Result<H>,
) -> Result<()> {
    type Saved = TrainState<Net, u32>;
    let make = |over_nccl: bool| -> Result<Saved> {
        let group = group.split(Some(0), 0)?.unwrap();
        let state = TrainState::new(Net::new(), sgd(), 0u32)?;
        let state = match over_nccl {
            true => state.with_nccl(&DeviceGroup::new(group, cuda)?)?,
            false => state.with_group(&group)?,
        };
        let mut state = state.with_options(options())?;
        state.model.register_comm_hook(hook()?)?;
        Ok(state)
    };
    let train = |state: &mut Saved, steps: Range<usize>| -> Result<Vec<Vec<f32>>> {
        for step in steps {
            let from = rows_in_join("plain", step, state.model.rank().index())[0];
            let loss = state.model.forward(|net| net.loss(from, &[]))?;
            let gradients = state.model.backward(&loss)?;
            state.step(0.05, gradients)?;
        }
        Ok(floats(&state.model.model().valid()))
    };
    for saved_by_nccl in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::open(folder.path(), group)?;
        let mut state = make(saved_by_nccl)?;
        train(&mut state, 0..at)?;
        state.checkpoint(&checkpoints)?;
        checkpoints.finish()?;
        // What is read disturbs nothing.
        let expected = train(&mut state, at..at + 3)?;
        for resumed_by_nccl in [true, false] {
            let mut state = make(resumed_by_nccl)?;
            // Other losses and factors than those of the checkpoint.
            train(&mut state, 10..13)?;
            assert!(state.resume(&checkpoints)?);
            let resumed = train(&mut state, at..at + 3)?;
            let distance = distance(&resumed, &expected);
            assert!(distance < 1e-4, "saved over NCCL: {saved_by_nccl}, {resumed_by_nccl}: {distance:e}");
        }
    }
    Ok(())
}

/// What a rank does whose device has another name than the other's.
const OTHER_MODELS: &str = "other models";

fn other_models(group: ProcessGroup, cuda: &phalanx_nccl::Device) -> Result<()> {
    let mut ddp = ddp(group, Some(cuda), options())?;
    ddp.register_comm_hook(Compressed::bf16())?;
    let error = ddp.register_comm_hook(PowerSgd::new(compressing(0))?).unwrap_err().to_string();
    let names = ["device-of-rank-0", "device-of-rank-1"];
    assert!(names.iter().all(|name| error.contains(name)), "{error}");
    Ok(())
}

#[derive(Module, Debug)]
struct Normed {
    first: Param<Tensor<1>>,
    norm: SyncBatchNorm,
}

/// Statistics go through the host's group, and gradients over NCCL; both are announced.
fn join_norm(group: &ProcessGroup, cuda: &phalanx_nccl::Device) -> Result<()> {
    let train = |over_nccl: bool| {
        let group = group.split(Some(0), 0)?.unwrap();
        let rank = group.rank().index();
        let joined = JoinGroup::new(ProcessGroup::alone()?);
        let norm = SyncBatchNorm::new(BatchNormConfig::new(WIDTH).init(&device()), &joined);
        let net = Normed { first: Param::from_tensor(Tensor::zeros([WIDTH], &device())), norm };
        let state = TrainState::new(net.map(&mut Waves::default()), sgd(), ())?.sharing(&joined)?;
        let state = match over_nccl {
            true => state.with_nccl(&DeviceGroup::new(group, cuda)?)?,
            false => state.with_group(&group)?,
        };
        let state = state.with_options(options())?;
        let (mut ddp, mut optimizer) = (state.model, state.optimizer);
        assert_eq!(over_nccl, format!("{ddp:?}").contains("NCCL"));
        ddp.join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
            for step in 0..BATCHES[rank] {
                let from = rows_in_join("plain", step, rank)[0];
                let loss = ddp.forward(|net| {
                    let (x, _) = samples(from, from + ROWS);
                    let out = net.norm.forward((x.clone() * net.first.val().unsqueeze()).tanh());
                    (out - x).powi_scalar(2).mean()
                })?;
                let gradients = ddp.backward(&loss)?;
                ddp.step(optimizer, 0.05, gradients)?;
            }
            Ok(())
        })?;
        assert!(ddp.replicas_identical()? && ddp.buffers_identical()?);
        Ok::<_, phalanx::Error>(floats(&ddp.model().valid()))
    };
    let (host, nccl) = (train(false)?, train(true)?);
    let distance = distance(&nccl, &host);
    assert!(distance < 1e-4, "{distance:e}");
    Ok(())
}

/// The rank that dies, and when: rank 0 is done by then.
const DIES_IN_JOIN: (usize, usize) = (2, 3);

/// The others learn of it, whoever makes whose calls.
fn die_in_a_join(group: &ProcessGroup, cuda: &phalanx_nccl::Device) -> Result<()> {
    let rank = group.rank().index();
    let mut ddp = Ddp::with_nccl(Net::new(), &DeviceGroup::new(group.clone(), cuda)?, options())?;
    let joined = ddp.join(&mut sgd(), JoinOptions::default(), |ddp, optimizer| {
        for step in 0..[1, 6, 6][rank] {
            if (rank, step) == DIES_IN_JOIN {
                kill_process(getpid(), Signal::KILL).unwrap();
            }
            step_of_join("plain", ddp, optimizer, step)?;
        }
        Ok(())
    });
    let error = joined.unwrap_err().to_string();
    assert!(error.contains("rank 2"), "{error}");
    Ok(())
}

fn dies_in_a_join() {
    let folder = tempfile::tempdir().unwrap();
    let (_server, mut ranks) = begin(folder.path(), 3, "dies", &[HOST_IS_DEVICE]);
    for (rank, worker) in ranks.iter_mut().enumerate() {
        let (finished, text) = worker.outcome("a rank in a join");
        assert_eq!(finished, rank != DIES_IN_JOIN.0, "rank {rank}: {text}");
    }
}

/// The step in which a worker of an elastic job dies.
const DIES_AT: u64 = 3;

type Training = TrainState<Net, Vec<usize>>;

/// Where the rows of each step began, and the parameters in the end.
type Trained = (Vec<usize>, Vec<Vec<f32>>);

fn first_row(step: u64, rank: Rank, world: WorldSize) -> usize {
    (step as usize * world.count() + rank.index()) * ROWS
}

/// What a worker of an elastic job does: rank 1 dies in the middle of a step, and nothing was committed.
fn outlive() -> Result<()> {
    let cuda = phalanx_nccl::Device::open(0)?;
    let state: Training = TrainState::new(Net::new(), sgd(), Vec::new())?;
    let mut state = state.with_options(options())?.with_nccl_on(&cuda);
    let rank = elastic::run(&mut state, |context: &mut Context<'_, Training>, group: &ProcessGroup| {
        while context.state.steps() < STEPS as u64 {
            let (step, rank) = (context.state.steps(), context.rank());
            let from = first_row(step, rank, context.world_size());
            let loss = context.state.model.forward(|net| net.loss(from, &[]))?;
            if step == DIES_AT {
                dies_behind_the_others(rank, context.world_size());
            }
            let is_alone = context.state.model.world_size() == WorldSize::ONE;
            assert!(is_alone || format!("{:?}", context.state.model).contains("NCCL"));
            let averaged = TrainState::backward(context, &loss)?;
            assert_eq!(averaged.missing.len(), usize::from(step == DIES_AT), "in step {step}");
            context.state.progress.push(from);
            context.state.step(0.05, averaged.value)?;
        }
        Ok::<_, phalanx::Error>(group.rank())
    })?;
    let path = Path::new(&std::env::var(FOLDER).unwrap()).join(format!("{rank}.json"));
    let trained: Trained = (state.progress, floats(&state.model.model().valid()));
    std::fs::write(path, serde_json::to_vec(&trained).unwrap()).unwrap();
    Ok(())
}

/// Ends the process of rank 1 when all others have nothing before them but backward, and have had some time for it.
fn dies_behind_the_others(rank: Rank, world: WorldSize) {
    let folder = std::env::var(FOLDER).unwrap();
    let came = |rank: u32| Path::new(&folder).join(format!("{rank}.came"));
    if rank.get() != 1 {
        std::fs::write(came(rank.get()), "").unwrap();
        return;
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    while (0..world.get()).any(|other| other != 1 && !came(other).exists()) {
        assert!(Instant::now() < deadline, "the others have not come to the step");
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_secs(2));
    kill_process(getpid(), Signal::KILL).unwrap();
}

fn survivors_go_on(workers: u32) {
    let folder = tempfile::tempdir().unwrap();
    let libraries = if is_real() { None } else { Some(stand_in::build(folder.path())) };
    let program = std::env::current_exe().unwrap().display().to_string();
    let script = "export STANDIN_CUDA_FIRST=$RANK NCCL_HOSTID=host-of-rank-$RANK; exec \"$0\"";
    let world = WorldSize::new(workers).unwrap();
    let mut job = Job::new("sh", world)
        .arguments(["-c", script, &program])
        .min_workers(WorldSize::new(workers - 1).unwrap())
        .variable(crate::ROLE, "nccl")
        .variable(WHAT, "outlive")
        .variable(FOLDER, folder.path().to_str().unwrap());
    let own = [HOST_IS_DEVICE, ("STANDIN_CUDA_DEVICES", "1"), ("NCCL_SOCKET_IFNAME", "lo")];
    let own = own.into_iter().chain([
        ("NCCL_IB_DISABLE", "1"),
        ("NCCL_P2P_DISABLE", "1"),
        ("NCCL_SHM_DISABLE", "1"),
    ]);
    for (name, value) in own {
        job = job.variable(name, value);
    }
    for (name, path) in libraries.iter().flatten() {
        job = job.variable(name, path.to_str().unwrap());
    }
    let mut said = String::new();
    let report = job.run(&mut |event: Event<'_>| {
        if let Event::Line { text, .. } = event {
            said += &format!("{}\n", String::from_utf8_lossy(text));
        }
        ControlFlow::Continue(())
    });
    assert!(matches!(report.unwrap().outcome, Outcome::Succeeded), "{said}");
    let left = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let left = left.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    let trained: Vec<Trained> =
        left.map(|path| serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()).collect();
    assert_eq!(trained.len(), workers as usize - 1, "{said}");
    // Plain Burn, with the batches of all who were there.
    let (mut net, mut optimizer) = (Net::new(), sgd());
    for step in 0..STEPS {
        let of_the_dead = (step < DIES_AT as usize).then(|| first_row(step as u64, Rank::new(1), world));
        let all = trained.iter().map(|(rows, _)| rows[step]).chain(of_the_dead);
        let losses: Vec<_> = all.map(|from| net.loss(from, &[])).collect();
        let count = losses.len() as f64;
        let loss = losses.into_iter().reduce(|sum, loss| sum + loss).unwrap() / count;
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(0.05, net, gradients);
    }
    let expected = floats(&net.valid());
    for (_, ours) in &trained {
        assert_eq!(ours, &trained[0].1, "the replicas have drifted apart");
        assert!(distance(ours, &expected) < 1e-4, "{:e} away", distance(ours, &expected));
    }
}

/// The variable with which the stand-in takes the memory of the process for that of its device.
const HOST_IS_DEVICE: (&str, &str) = ("STANDIN_CUDA_HOST", "1");

fn trained_as_one_process(case: &'static str) {
    let folder = tempfile::tempdir().unwrap();
    job("train", &[(CASE, case), (FOLDER, folder.path().to_str().unwrap()), HOST_IS_DEVICE]);
    let left = |rank| std::fs::read(folder.path().join(format!("{rank}.json"))).unwrap();
    let trained: Vec<Vec<Vec<f32>>> =
        (0..RANKS).map(|rank| serde_json::from_slice(&left(rank)).unwrap()).collect();
    let (expected, before) = (reference(case), floats(&Net::new().valid()));
    assert!(distance(&expected, &before) > 0.01, "the reference has not moved");
    for (rank, ours) in trained.iter().enumerate() {
        assert_eq!(ours, &trained[0], "rank {rank} has other bits than rank 0");
        let distance = distance(ours, &expected);
        // bf16 has 8 significant bits.
        let range = match case {
            "compressed" => 1e-6..1e-2,
            "halves" => 0.0..1e-2,
            _ => 0.0..1e-4,
        };
        assert!(range.contains(&distance), "rank {rank} is {distance:e} away");
    }
}

/// Runs one process that has both devices.
fn devices_of_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let libraries = if is_real() { None } else { Some(stand_in::build(folder.path())) };
    let copies = folder.path().join("copies");
    let mut variables =
        vec![(WHAT, "one_process"), ("STANDIN_CUDA_HOST", "any"), ("STANDIN_CUDA_DEVICES", "2")];
    variables.push(("STANDIN_CUDA_COPIES", copies.to_str().unwrap()));
    let libraries = libraries.iter().flatten().map(|(name, path)| (*name, path.to_str().unwrap()));
    variables.extend(libraries);
    let (_server, mut processes) = start("nccl", 1, &variables);
    let (finished, text) = processes[0].outcome("devices of one process");
    assert!(finished, "{text}");
    if is_real() {
        return;
    }
    // What the driver has copied: the inputs of each step, and what is gathered, and nothing twice.
    let copies = std::fs::read_to_string(&copies).unwrap();
    let of = |way: &str| copies.lines().filter(|copy| copy.starts_with(way)).count();
    // Rows and their numbers: twice from the first device, and once from the second.
    let of_towers = 2 * STEPS;
    // And two tensors of an input of the program's own.
    assert_eq!((of("0 1 "), of("1 0 ")), (2 * of_towers + 4 * STEPS + 2, of_towers + STEPS), "{copies}");
    // Outputs are as long as the rows of towers.
    let output = format!("1 0 {}", ROWS * WIDTH * 4);
    assert_eq!(copies.lines().filter(|copy| *copy == output).count(), 2 * STEPS, "{copies}");
}

/// The replicas' parameters come by a broadcast, and their gradients go by a reduce. Inputs, outputs and their gradients are copied from device to
/// device.
fn one_process() -> Result<()> {
    let mut cuda = (0..2).map(phalanx_nccl::Device::open).collect::<Result<Vec<_>>>()?;
    let mut devices: Vec<Device> = match is_real() {
        true => (0..2_usize).map(|number| Device::cuda(number).autodiff()).collect(),
        false => vec![device(); 2],
    };
    let one = DeviceGroup::of_devices(&cuda[..1])?;
    let refused = TowerGradients::with_nccl(Net::new(), devices.clone(), one).unwrap_err();
    assert!(refused.to_string().contains("2 devices need as many groups"), "{refused}");
    // The groups of other ranks.
    let mut others = DeviceGroup::of_devices(&cuda)?;
    others.reverse();
    let refused = TowerGradients::with_nccl(Net::new(), devices.clone(), others).unwrap_err();
    assert!(refused.to_string().contains("those of their ranks in order"), "{refused}");
    for (case, is_reversed) in [("plain", false), ("unused", false), ("plain", true)] {
        if is_reversed {
            // The main device is the last one.
            cuda.reverse();
            devices.reverse();
        }
        let groups = DeviceGroup::of_devices(&cuda)?;
        let first = groups[0].clone();
        let mut towers = TowerGradients::with_nccl(Net::new(), devices.clone(), groups)?;
        let mut optimizer = sgd();
        for step in 0..STEPS {
            let (x, _) = samples(step * RANKS * ROWS, (step + 1) * RANKS * ROWS);
            // Of which replica each row is.
            let number = |number: f32| Tensor::<2>::full([ROWS, 1], number, &device());
            let numbers = Tensor::cat(vec![number(0.0), number(1.0)], 0);
            let (_, gradients) = towers.backward((x, numbers), |net, (x, numbers)| {
                let replica = numbers.mean().into_scalar::<f32>() as usize;
                let without = if case == "unused" { vec![IDLE, replica] } else { Vec::new() };
                net.loss_of(x, &without)
            })?;
            let idle = gradients.get::<1>(towers.model().layers[IDLE].weight.id);
            assert_eq!(idle.is_none(), case == "unused");
            towers.step(&mut optimizer, 0.05, gradients)?;
        }
        let distance = distance(&floats(&towers.model().valid()), &reference(case));
        assert!(distance < 1e-4, "{case}: {distance:e} away");
        // From one device to the other; not what no replica has used.
        let all = 4 * towers.model().num_params();
        let idle = if case == "unused" { 4 * 2 * WIDTH } else { 0 };
        let transfers = towers.transfers();
        assert_eq!(transfers.replicate.bytes, STEPS * all);
        assert_eq!(transfers.reduce.bytes, STEPS * (all - idle));
        assert_eq!(transfers.scatter.bytes, STEPS * ROWS * (WIDTH + 1) * 4);
        assert_eq!(transfers.total().host_bytes, 0);
        // One bucket each way in each step; they are counted from 0.
        assert_eq!(calls(&first) + 1, 2 * STEPS);
        drop(towers);
    }
    cuda.reverse();
    devices.reverse();
    gathered(&cuda, &devices)?;
    own_inputs(&cuda, &devices)?;
    inputs_of_another_device(&cuda, &devices)
}

/// Replicas whose outputs are gathered, of inputs of all kinds.
fn gathered(cuda: &[phalanx_nccl::Device], devices: &[Device]) -> Result<()> {
    let groups = DeviceGroup::of_devices(cuda)?;
    let first = groups[0].clone();
    let mut parallel = DataParallel::with_nccl(Net::new(), devices.to_vec(), groups)?;
    let mut optimizer = sgd();
    let count = RANKS * ROWS;
    let mut bytes = 0;
    for step in 0..STEPS {
        let (x, _) = samples(step * count, (step + 1) * count);
        // Column by column in memory.
        let columns = Tensor::<2>::from_data(x.clone().transpose().into_data(), &device()).transpose();
        let numbers = Tensor::<1, Int>::arange(0..count as i64, &device());
        let thirds = numbers.clone().remainder_scalar(3).equal_elem(0);
        bytes += ROWS * (WIDTH * 4 + numbers.dtype().size() + thirds.dtype().size());
        let out = parallel.forward((columns, (numbers, thirds)), |net, (x, (numbers, thirds))| {
            let own: Vec<i64> = numbers.into_data().iter::<i64>().collect();
            assert!(own == (0..4).collect::<Vec<_>>() || own == (4..8).collect::<Vec<_>>(), "{own:?}");
            let thirds: Vec<bool> = thirds.int().into_data().iter::<i64>().map(|one| one != 0).collect();
            assert_eq!(thirds, own.iter().map(|number| number % 3 == 0).collect::<Vec<_>>());
            net.forward(x, &[])
        })?;
        let gradients = parallel.backward(&error(out, x))?;
        parallel.step(&mut optimizer, 0.05, gradients)?;
    }
    let distance = distance(&floats(&parallel.model().valid()), &reference("plain"));
    assert!(distance < 1e-4, "gathered: {distance:e} away");
    let transfers = parallel.transfers();
    assert_eq!(transfers.scatter.bytes, bytes);
    assert_eq!(transfers.gather.bytes, STEPS * 2 * ROWS * WIDTH * 4);
    assert_eq!(transfers.total().host_bytes, 0);
    assert_eq!(calls(&first) + 1, 2 * STEPS);
    // After a failure nothing is copied any more.
    first.device().abort(phalanx::Error::aborted("the test ends it"));
    let (x, _) = samples(0, count);
    let failed = parallel.forward(x, |net, x| net.forward(x, &[])).unwrap_err().to_string();
    assert!(failed.contains("the test ends it"), "{failed}");
    assert_eq!(parallel.transfers().scatter.bytes, bytes);
    Ok(())
}

/// An input of the program's own, which computes with what it copies before all of it is copied.
struct Halved(Tensor<2>);

impl Scatter for Halved {
    fn samples(&self) -> Result<usize> {
        self.0.samples()
    }

    fn part(&self, samples: Range<usize>) -> Self {
        Self(self.0.part(samples))
    }

    fn copy_to(self, to: &mut Destination<'_>) -> Result<Self> {
        Ok(Self(self.0.copy_to(to)? * 0.5))
    }
}

/// The second half of the rows is on another device, and has been halved there.
fn own_inputs(cuda: &[phalanx_nccl::Device], devices: &[Device]) -> Result<()> {
    let groups = DeviceGroup::of_devices(cuda)?;
    let mut towers = TowerGradients::with_nccl(Net::new(), devices.to_vec(), groups)?;
    let x = samples(0, RANKS * ROWS).0;
    let is_whole = AtomicU64::new(0);
    let half = |from: usize, factor: f64| -> Vec<f32> {
        (x.clone().narrow(0, from, ROWS) * factor).into_data().iter::<f32>().collect()
    };
    let expected = [half(0, 1.0), half(ROWS, 0.5)];
    let (loss, _) = towers.backward((Halved(x.clone()), x.clone()), |net, (Halved(own), _)| {
        let found: Vec<f32> = own.to_data().iter::<f32>().collect();
        is_whole.fetch_add(u64::from(expected.contains(&found)), Ordering::Relaxed);
        net.loss_of(own, &[])
    })?;
    assert!(loss.is_finite() && is_whole.load(Ordering::Relaxed) == 2);
    Ok(())
}

/// They go through the host's memory.
fn inputs_of_another_device(cuda: &[phalanx_nccl::Device], devices: &[Device]) -> Result<()> {
    let groups = DeviceGroup::of_devices(cuda)?;
    let mut towers = TowerGradients::with_nccl(Net::new(), devices.to_vec(), groups)?;
    let x = samples(0, RANKS * ROWS).0.to_device(&Device::flex().autodiff());
    let (loss, _) = towers.backward(x, |net, x| net.loss_of(x.to_device(&net.first.val().device()), &[]))?;
    assert!(loss.is_finite());
    let transfers = towers.transfers();
    assert_eq!(transfers.scatter.host_bytes, ROWS * WIDTH * 4);
    assert_eq!(transfers.total().host_bytes, transfers.scatter.bytes);
    Ok(())
}

/// By the trace: the first bucket's call is NCCL's before backward has come to the last gradient.
fn nccl_averages_while_backward_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let trace = ("PHALANX_TRACE", path.to_str().unwrap());
    job("train", &[(CASE, "plain"), (FOLDER, folder.path().to_str().unwrap()), trace, HOST_IS_DEVICE]);
    check_overlap(&path, "gradient queued");
}

/// A hook of the program's own.
struct Own;

impl CommHook for Own {
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

/// Sends gradients as f16, and counts steps.
#[derive(Default)]
struct Halves(Arc<AtomicU64>);

impl DeviceHook for Halves {
    fn describe(&self) -> String {
        "halves".into()
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        let whole = bucket.buffer();
        let mut end = 0;
        for place in bucket.gradients() {
            assert_eq!(place.elements.len(), place.shape.iter().product::<usize>());
            assert!(place.elements.start >= end);
            end = place.elements.end;
        }
        assert!(end <= whole.dims()[0] && bucket.world_size().count() == RANKS);
        self.0.fetch_add(u64::from(bucket.is_last()), Ordering::Relaxed);
        Ok(DeviceMessage::all_reduce(whole.cast(FloatDType::F16), ReduceOp::Avg))
    }

    fn receive(&mut self, _: &DeviceBucket, combined: Tensor<1>) -> Result<Tensor<1>> {
        Ok(combined.cast(FloatDType::F32))
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default().number("steps", self.0.load(Ordering::Relaxed)))
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        self.0.store(state.get("steps")?, Ordering::Relaxed);
        Ok(())
    }
}

/// Sends the elements of a bucket with their places, the largest first, as one that sends fewer of them does (top-k).
struct Largest;

impl DeviceHook for Largest {
    fn describe(&self) -> String {
        "largest".into()
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        let whole = bucket.buffer();
        let count = whole.dims()[0];
        let (_, places) = whole.clone().abs().topk_with_indices(count, 0);
        let values = whole.gather(0, places.clone());
        let places = places.float().cast(FloatDType::F32);
        Ok(DeviceMessage::all_gather(Tensor::cat(vec![values, places], 0)))
    }

    fn receive(&mut self, bucket: &DeviceBucket, combined: Tensor<1>) -> Result<Tensor<1>> {
        let ranks = bucket.world_size().count();
        let count = combined.dims()[0] / ranks / 2;
        let none = bucket.buffer().zeros_like();
        let sum = (0..ranks).fold(none, |sum, rank| {
            let part = |row: usize| combined.clone().narrow(0, (2 * rank + row) * count, count);
            sum.scatter(0, part(1).int(), part(0), IndexingUpdateOp::Add)
        });
        Ok(sum / ranks as f64)
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

/// Sends less than the other ranks in a step, of its first bucket or of its last.
struct Different {
    differs: bool,
    in_first: bool,
    at: u64,
    step: u64,
}

impl DeviceHook for Different {
    fn describe(&self) -> String {
        "different".into()
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        let (whole, step) = (bucket.buffer(), self.step);
        self.step += u64::from(bucket.is_last());
        let is_it = if self.in_first { bucket.index() == 0 } else { bucket.is_last() };
        let less = usize::from(self.differs && step == self.at && is_it);
        let count = whole.dims()[0] - less;
        Ok(DeviceMessage::all_reduce(whole.narrow(0, 0, count), ReduceOp::Avg))
    }

    fn receive(&mut self, _: &DeviceBucket, combined: Tensor<1>) -> Result<Tensor<1>> {
        Ok(combined)
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

/// NCCL would wait until its time-out.
fn own_hook_differs(group: &ProcessGroup, cuda: &phalanx_nccl::Device) -> Result<()> {
    for (in_first, at) in [(false, 0), (false, 2), (true, 0), (true, 2)] {
        // The error ends its group.
        let part = DeviceGroup::new(group.split(Some(0), 0)?.unwrap(), cuda)?;
        let mut ddp = Ddp::with_nccl(Net::new(), &part, options())?;
        let differs = group.rank().index() == 1;
        ddp.register_device_hook(Different { differs, in_first, at, step: 0 })?;
        let mut steps = 0..=at;
        let failed = steps.find_map(|step| {
            let loss = ddp.forward(|net| net.loss(0, &[]));
            let trained = loss.and_then(|loss| ddp.backward(&loss));
            trained.err().map(|error| (step, error.to_string()))
        });
        let (step, error) = failed.unwrap();
        let words = ["rank 0 all_reduce(avg, ", ", and rank 1 all_reduce(avg, ", "DeviceHook"];
        // The error of the rank that differs may reach the other one at the end of the step before.
        assert!(step <= at && words.iter().all(|words| error.contains(words)), "{error}");
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
        Ok(DeviceMessage::all_reduce(bucket.buffer(), ReduceOp::Avg))
    }

    fn receive(&mut self, _: &DeviceBucket, combined: Tensor<1>) -> Result<Tensor<1>> {
        self.reach("receive");
        Ok(combined)
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

fn own_hook_panics(group: &ProcessGroup, cuda: &phalanx_nccl::Device) -> Result<()> {
    for at in ["describe", "send", "receive"] {
        // The error ends its group.
        let part = DeviceGroup::new(group.split(Some(0), 0)?.unwrap(), cuda)?;
        let mut ddp = Ddp::with_nccl(Net::new(), &part, options())?;
        let is_here = group.rank().index() == 1;
        // The other rank may hear of it only in a later call.
        let trained = ddp.register_device_hook(Panics { is_here, at });
        let trained = trained.and_then(|()| step_of_join("plain", &mut ddp, &mut sgd(), 0));
        let error = trained.and_then(|()| part.host().barrier()).unwrap_err().to_string();
        assert!(error.contains("the hook's own"), "{at}: {error}");
        assert!(!is_here || ddp.forward(|net| net.loss(0, &[])).is_err());
    }
    Ok(())
}

fn own_hook_state(group: &ProcessGroup, cuda: &phalanx_nccl::Device) -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::open(folder.path(), group)?;
    let make = || {
        let group = DeviceGroup::new(group.split(Some(0), 0)?.unwrap(), cuda)?;
        let mut state = TrainState::new(Net::new(), sgd(), 0u32)?.with_nccl(&group)?;
        let hook = Halves::default();
        let steps = hook.0.clone();
        state.model.register_device_hook(hook)?;
        Ok::<_, phalanx::Error>((state, steps))
    };
    let (mut state, _) = make()?;
    for _ in 0..3 {
        let loss = state.model.forward(|net| net.loss(0, &[]))?;
        let gradients = state.model.backward(&loss)?;
        state.step(0.05, gradients)?;
    }
    state.checkpoint(&checkpoints)?;
    checkpoints.finish()?;
    let (mut state, steps) = make()?;
    assert!(state.resume(&checkpoints)?);
    assert_eq!(steps.load(Ordering::Relaxed), 3);
    // Another hook takes its place.
    state.model.register_comm_hook(AllReduce)?;
    let loss = state.model.forward(|net| net.loss(0, &[]))?;
    drop(state.model.backward(&loss)?);
    assert_eq!(steps.load(Ordering::Relaxed), 3);
    Ok(())
}

/// Sends what the first makes of a bucket, and makes averages by the second.
struct Sends(fn(Tensor<1>) -> DeviceMessage, fn(Tensor<1>) -> Tensor<1>);

impl DeviceHook for Sends {
    fn describe(&self) -> String {
        "sends".into()
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        Ok((self.0)(bucket.buffer()))
    }

    fn receive(&mut self, _: &DeviceBucket, combined: Tensor<1>) -> Result<Tensor<1>> {
        Ok((self.1)(combined))
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

/// A step with such a hook.
fn step_with(group: &DeviceGroup, hook: Sends) -> Result<()> {
    let mut ddp = Ddp::with_nccl(Net::new(), group, options())?;
    ddp.register_device_hook(hook)?;
    // An error of one rank's ends the calls of the other.
    let _met = group.host().barrier();
    let loss = ddp.forward(|net| net.loss(0, &[]))?;
    ddp.backward(&loss).map(drop)
}

fn refuse(group: &ProcessGroup, cuda: &phalanx_nccl::Device) {
    type Call = fn(&DeviceGroup) -> Result<()>;
    let cases: [(&str, Call); 10] = [
        ("register_device_hook(halves)", |group| {
            let mut on_host = Ddp::with_options(Net::new(), group.host(), options())?;
            on_host.register_device_hook(Halves::default())
        }),
        ("combines by max", |group| {
            let send = |whole| DeviceMessage::all_reduce(whole, ReduceOp::Max);
            step_with(group, Sends(send, |averages| averages))
        }),
        ("the communication hook sends", |group| {
            let send =
                |whole: Tensor<1>| DeviceMessage::all_reduce(whole.to_device(&Device::flex()), ReduceOp::Avg);
            step_with(group, Sends(send, |averages| averages))
        }),
        ("the communication hook receives 1 x F32", |group| {
            let send = |whole| DeviceMessage::all_reduce(whole, ReduceOp::Avg);
            step_with(group, Sends(send, |averages| averages.narrow(0, 0, 1)))
        }),
        ("TrainState::sharing after with_nccl", |group| {
            TrainState::new(Net::new(), sgd(), ())?.with_nccl(group)?.sharing(group.host()).map(drop)
        }),
        ("the model is not in the memory of CUDA device 0", |group| {
            let net = Net::new().fork(&Device::flex().autodiff());
            Ddp::with_nccl(net, group, options()).map(drop)
        }),
        ("averaged by is", |group| match group.host().rank().is_main() {
            true => Ddp::with_nccl(Net::new(), group, options()).map(drop),
            false => Ddp::with_options(Net::new(), group.host(), options()).map(drop),
        }),
        ("register_comm_hook(of the test): NCCL averages", |group| {
            Ddp::with_nccl(Net::new(), group, options())?.register_comm_hook(Own)
        }),
        ("ZeroRedundancyOptimizer::new", |group| {
            ZeroRedundancyOptimizer::new(sgd(), &mut Ddp::with_nccl(Net::new(), group, options())?).map(drop)
        }),
        // Ranks that are done would not make its calls.
        ("a join that this Ddp has not begun", |group| {
            let joined = JoinGroup::new(ProcessGroup::alone()?);
            let state = TrainState::new(Net::new(), sgd(), ())?.sharing(&joined)?;
            let mut state = state.with_nccl(group)?;
            let step = || state.model.forward(|net| net.loss(0, &[]));
            joined.join(JoinOptions::default(), step).map(drop)
        }),
    ];
    for (words, call) in cases {
        // A refusal ends its group.
        let part = group.split(Some(0), 0).unwrap().unwrap();
        let part = DeviceGroup::new(part, cuda).unwrap();
        let error = call(&part).unwrap_err().to_string();
        assert!(error.contains(words), "{words}: {error}");
    }
    group.barrier().unwrap();
}
