//! Gradients that NCCL averages: two or three ranks that are processes, or two devices of one. With `PHALANX_TEST_DEVICE=cuda` all are on the first device, which NCCL
//! permits by `NCCL_HOSTID`; with `cpu` they are on the stand-ins for libcuda and libnccl, which are no GPU.

mod joins;
mod one_process;
mod own_hooks;
mod survivors;

use std::ops::Range;
use std::path::Path;

use burn::module::{Module, Param};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::Tensor;
use libtest_mimic::Trial;
use phalanx::checkpoint::Checkpoints;
use phalanx::reducer::ReducerOptions;
use phalanx::reducer::hooks::{AllReduce, CommHook, Compressed, PostLocalSgd, PowerSgd, PowerSgdOptions};
use phalanx::store::TcpStoreServer;
use phalanx::{ProcessGroup, Result};
use phalanx_burn::{Ddp, DdpOptions, PeriodicModelAverager, TrainState};
use phalanx_nccl::DeviceGroup;

use self::joins::{die_in_a_join, dies_in_a_join, join, join_norm, joined, rows_in_join, step_of_join};
use self::one_process::{devices_of_one_process, one_process};
use self::own_hooks::{Halves, Largest, own_hook_differs, own_hook_panics, own_hook_state, refuse};
use self::survivors::{outlive, survivors_go_on};
use crate::common::{Waves, device, distance, floats, samples};
use crate::devices::{FOLDER, STEPS, check_overlap};
use crate::ranks::{Worker, start_each};

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
    start_each("nccl", ranks as u32, |rank, command| {
        command.envs(variables.iter().copied()).envs(own(rank));
    })
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

/// A model whose gradients are averaged by NCCL on `cuda`, or through the host.
fn ddp(group: ProcessGroup, cuda: Option<&phalanx_nccl::Device>, options: DdpOptions) -> Result<Ddp<Net>> {
    let ddp = match cuda {
        Some(cuda) => Ddp::with_nccl(Net::new(), &DeviceGroup::new(group, cuda)?, options)?,
        None => Ddp::with_options(Net::new(), &group, options)?,
    };
    assert_eq!(cuda.is_some(), format!("{ddp:?}").contains("NCCL"));
    Ok(ddp)
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

/// By the trace: the first bucket's call is NCCL's before backward has come to the last gradient.
fn nccl_averages_while_backward_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let trace = ("PHALANX_TRACE", path.to_str().unwrap());
    job("train", &[(CASE, "plain"), (FOLDER, folder.path().to_str().unwrap()), trace, HOST_IS_DEVICE]);
    check_overlap(&path, "gradient queued");
}
