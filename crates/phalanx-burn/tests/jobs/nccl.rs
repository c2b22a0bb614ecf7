//! Gradients that NCCL averages: two ranks that are processes. With `PHALANX_TEST_DEVICE=cuda` both are on the first device, which NCCL
//! permits by `NCCL_HOSTID`; with `cpu` they are on the stand-ins for libcuda and libnccl, which are no GPU.

use std::path::Path;

use burn::module::{Module, Param};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Tensor};
use libtest_mimic::Trial;
use phalanx::join::JoinOptions;
use phalanx::reducer::ReducerOptions;
use phalanx::reducer::hooks::AllReduce;
use phalanx::{ProcessGroup, Result};
use phalanx_burn::{Ddp, DdpOptions, ZeroRedundancyOptimizer};
use phalanx_nccl::DeviceGroup;

use crate::common::{Waves, device, distance, floats, samples};
use crate::devices::{FOLDER, STEPS, check_overlap};
use crate::workers::start_each;

#[path = "../../../phalanx-nccl/tests/jobs/stand_in.rs"]
mod stand_in;

/// What a rank does.
const WHAT: &str = "PHALANX_TEST_NCCL";
const RANKS: usize = 2;
/// Rows of a rank's batch.
const ROWS: usize = 4;
const WIDTH: usize = 8;
const LAYERS: usize = 12;

pub fn trials() -> Vec<Trial> {
    let tests: [(&str, bool, fn()); 4] = [
        ("nccl_averages_gradients_where_they_lie", false, nccl_averages_gradients_where_they_lie),
        ("nccl_averages_while_backward_goes_on", false, nccl_averages_while_backward_goes_on),
        ("what_cannot_be_done_in_place_is_refused_by_name", false, || job("refuse", &[HOST_IS_DEVICE])),
        // The driver says whose memory an address is in, and is asked before NCCL gets it. Burn's memory on cuda is the device's.
        ("memory_that_is_not_the_device_s_is_refused", true, || job("elsewhere", &[])),
    ];
    let trial = |(name, stand_in, test): (&str, bool, fn())| {
        let reason = match kind().as_str() {
            "cuda" if stand_in => " (needs the stand-in)",
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
    let folder = tempfile::tempdir().unwrap();
    let libraries = if is_real() { None } else { Some(stand_in::build(folder.path())) };
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
        false => vec![("STANDIN_CUDA_FIRST", rank.to_string()), ("STANDIN_CUDA_DEVICES", "1".to_owned())],
    };
    let (_server, mut ranks) = start_each("nccl", RANKS as u32, &variables, own);
    for rank in &mut ranks {
        let (finished, text) = rank.outcome("a rank with NCCL");
        assert!(finished, "{text}");
    }
}

/// What this program does as a rank.
pub fn play() {
    let group = phalanx::init().unwrap();
    let cuda = phalanx_nccl::Device::open(0).unwrap();
    match std::env::var(WHAT).unwrap().as_str() {
        "train" => {
            let group = DeviceGroup::new(group, &cuda).unwrap();
            let trained = train(&group).unwrap();
            let path =
                Path::new(&std::env::var(FOLDER).unwrap()).join(format!("{}.json", group.host().rank()));
            std::fs::write(path, serde_json::to_vec(&trained).unwrap()).unwrap();
        }
        "refuse" => refuse(&group, &cuda),
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

    /// Of the rows `from..to`; every [`ROWS`] of them have the same `adds`.
    fn loss(&self, from: usize, to: usize) -> Tensor<1> {
        let (x, _) = samples(from, to);
        let first = x.clone() * self.first.val().unsqueeze();
        let added =
            self.adds.iter().fold(first, |sum, add| sum + add.val().repeat_dim(0, (to - from) / ROWS));
        let layer = |x: Tensor<2>, layer: &Layer| {
            ((x.clone() * layer.weight.val().unsqueeze() + layer.bias.val().unsqueeze()) * 0.2 + x).tanh()
        };
        (self.layers.iter().fold(added * 0.1, layer) - x * 0.5).powi_scalar(2).mean()
    }
}

fn sgd() -> ModuleOptimizer {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init()
}

fn options() -> DdpOptions {
    let mut options = DdpOptions::default();
    // Several buckets.
    options.reducer = ReducerOptions::default().bucket_cap_mb(0.0005);
    options
}

fn step(ddp: &mut Ddp<Net>, optimizer: &mut ModuleOptimizer, from: usize) -> Result<()> {
    let loss = ddp.forward(|net| net.loss(from, from + ROWS))?;
    let gradients = ddp.backward(&loss)?;
    ddp.step(optimizer, 0.05, gradients)
}

/// One rank's part of the job.
fn train(group: &DeviceGroup) -> Result<Vec<Vec<f32>>> {
    let (mut ddp, mut optimizer) = (Ddp::with_nccl(Net::new(), group, options())?, sgd());
    for number in 0..STEPS {
        step(&mut ddp, &mut optimizer, (number * RANKS + group.host().rank().index()) * ROWS)?;
    }
    assert!(ddp.replicas_identical()?);
    assert_eq!(ddp.communicated_bytes(), (STEPS * ddp.model().num_params() * size_of::<f32>()) as u64);
    Ok(floats(&ddp.model().valid()))
}

/// Plain Burn, with the batches of all ranks.
fn reference() -> Vec<Vec<f32>> {
    let (mut net, mut optimizer) = (Net::new(), sgd());
    for number in 0..STEPS {
        let from = number * RANKS * ROWS;
        let loss = net.loss(from, from + RANKS * ROWS);
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(0.05, net, gradients);
    }
    floats(&net.valid())
}

/// The variable with which the stand-in takes the memory of the process for that of its device.
const HOST_IS_DEVICE: (&str, &str) = ("STANDIN_CUDA_HOST", "1");

fn nccl_averages_gradients_where_they_lie() {
    let folder = tempfile::tempdir().unwrap();
    job("train", &[(FOLDER, folder.path().to_str().unwrap()), HOST_IS_DEVICE]);
    let left = |rank| std::fs::read(folder.path().join(format!("{rank}.json"))).unwrap();
    let trained: Vec<Vec<Vec<f32>>> =
        (0..RANKS).map(|rank| serde_json::from_slice(&left(rank)).unwrap()).collect();
    let (expected, before) = (reference(), floats(&Net::new().valid()));
    assert!(distance(&expected, &before) > 0.01, "the reference has not moved");
    for (rank, ours) in trained.iter().enumerate() {
        assert_eq!(ours, &trained[0], "rank {rank} has other bits than rank 0");
        let distance = distance(ours, &expected);
        assert!(distance < 1e-4, "rank {rank} is {distance:e} away");
    }
}

/// By the trace: the first bucket's calls are NCCL's before backward has come to the last gradient.
fn nccl_averages_while_backward_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let trace = ("PHALANX_TRACE", path.to_str().unwrap());
    job("train", &[(FOLDER, folder.path().to_str().unwrap()), trace, HOST_IS_DEVICE]);
    check_overlap(&path, "gradient queued");
}

fn refuse(group: &ProcessGroup, cuda: &phalanx_nccl::Device) {
    type Call = fn(&DeviceGroup) -> Result<()>;
    let cases: [(&str, Call); 10] = [
        ("find_unused_parameters or static_graph is set", |group| {
            let mut options = options();
            options.reducer = options.reducer.find_unused_parameters(true);
            Ddp::with_nccl(Net::new(), group, options).map(drop)
        }),
        ("find_unused_parameters or static_graph is set", |group| {
            let mut options = options();
            options.reducer = options.reducer.static_graph(true);
            Ddp::with_nccl(Net::new(), group, options).map(drop)
        }),
        ("the model is not in the memory of CUDA device 0", |group| {
            let net = Net::new().fork(&Device::flex().autodiff());
            Ddp::with_nccl(net, group, options()).map(drop)
        }),
        ("averaged by is", |group| match group.host().rank().is_main() {
            true => Ddp::with_nccl(Net::new(), group, options()).map(drop),
            false => Ddp::with_options(Net::new(), group.host(), options()).map(drop),
        }),
        ("backward_no_sync", |group| {
            let mut ddp = Ddp::with_nccl(Net::new(), group, options())?;
            let loss = ddp.forward(|net| net.loss(0, ROWS))?;
            ddp.backward_no_sync(&loss)
        }),
        ("backward_weighted", |group| {
            let mut ddp = Ddp::with_nccl(Net::new(), group, options())?;
            let loss = ddp.forward(|net| net.loss(0, ROWS))?;
            ddp.backward_weighted(&loss, 1.0).map(drop)
        }),
        ("several backward or forward passes", |group| {
            let mut ddp = Ddp::with_nccl(Net::new(), group, options())?;
            let (one, two) = (ddp.forward(|net| net.loss(0, ROWS))?, ddp.forward(|net| net.loss(0, ROWS))?);
            ddp.backward(&(one + two)).map(drop)
        }),
        ("register_comm_hook", |group| {
            Ddp::with_nccl(Net::new(), group, options())?.register_comm_hook(AllReduce)
        }),
        ("ZeroRedundancyOptimizer::new", |group| {
            ZeroRedundancyOptimizer::new(sgd(), &mut Ddp::with_nccl(Net::new(), group, options())?).map(drop)
        }),
        ("join", |group| {
            let mut ddp = Ddp::with_nccl(Net::new(), group, options())?;
            ddp.join(&mut sgd(), JoinOptions::default(), |_, _| Ok(()))
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
