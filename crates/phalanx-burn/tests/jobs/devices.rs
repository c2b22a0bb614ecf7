//! Ranks that are processes, each with a device and one thread that computes: what Burn's fusion needs.

use std::path::Path;

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::Tensor;
use phalanx::reducer::ReducerOptions;
use phalanx::{ProcessGroup, Result};
use phalanx_burn::{Ddp, DdpOptions, SyncBatchNorm};

use crate::common::{Waves, device, distance, floats, is_in_memory, samples};
use crate::ranks::start;

/// Where workers leave their parameters.
pub const FOLDER: &str = "PHALANX_TEST_FOLDER";
const RANKS: usize = 2;
/// So many steps the trace of [`check_overlap`] has, and each at least four buckets.
pub const STEPS: usize = 5;
/// Rows of a rank's batch.
const ROWS: usize = 4;
const LAYERS: usize = 12;

pub const TESTS: &[(&str, fn())] = &[
    ("processes_train_as_one_with_the_whole_batch", processes_train_as_one_with_the_whole_batch),
    ("buckets_are_averaged_while_backward_goes_on", buckets_are_averaged_while_backward_goes_on),
];

/// What this program does as a worker.
pub fn play() {
    let group = phalanx::init().unwrap();
    let folder = std::env::var(FOLDER).unwrap();
    let trained = train(&group).unwrap();
    let path = Path::new(&folder).join(format!("{}.json", group.rank()));
    std::fs::write(path, serde_json::to_vec(&trained).unwrap()).unwrap();
}

#[derive(Module, Debug)]
struct Net<N> {
    layers: Vec<Linear>,
    norm: N,
    head: Linear,
}

impl Net<BatchNorm> {
    /// The same wherever it is made.
    fn new() -> Self {
        let layer = |outputs| LinearConfig::new(8, outputs).init(&device());
        let layers = (0..LAYERS).map(|_| layer(8)).collect();
        Self { layers, norm: BatchNormConfig::new(8).init(&device()), head: layer(3) }
            .map(&mut Waves::default())
    }
}

impl<N> Net<N> {
    fn loss(&self, from: usize, to: usize, norm: impl Fn(&N, Tensor<2>) -> Tensor<2>) -> Tensor<1> {
        let (x, y) = samples(from, to);
        let x = self.layers.iter().fold(x, |x, layer| (layer.forward(x.clone()) * 0.2 + x).tanh());
        (self.head.forward(norm(&self.norm, x)) - y).powi_scalar(2).mean()
    }
}

fn sgd() -> ModuleOptimizer {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init()
}

/// One rank's part of the job.
fn train(group: &ProcessGroup) -> Result<Vec<Vec<f32>>> {
    let Net { layers, norm, head } = Net::new();
    let net = Net { layers, norm: SyncBatchNorm::new(norm, group), head };
    let mut options = DdpOptions::default();
    // Several buckets, of two layers each.
    options.reducer = ReducerOptions::default().bucket_cap_mb(0.0005);
    let mut ddp = Ddp::with_options(net, group, options)?;
    let mut optimizer = sgd();
    for step in 0..STEPS {
        let from = (step * RANKS + group.rank().index()) * ROWS;
        let loss = ddp.forward(|net| net.loss(from, from + ROWS, |norm, x| norm.forward(x)))?;
        let gradients = ddp.backward(&loss)?;
        ddp.step(&mut optimizer, 0.05, gradients)?;
    }
    assert!(ddp.replicas_identical()?);
    Ok(floats(&ddp.model().valid()))
}

/// Plain Burn, with the batches of all ranks.
fn reference() -> Vec<Vec<f32>> {
    let (mut net, mut optimizer) = (Net::new(), sgd());
    for step in 0..STEPS {
        let from = step * RANKS * ROWS;
        let loss = net.loss(from, from + RANKS * ROWS, |norm, x| norm.forward(x));
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(0.05, net, gradients);
    }
    floats(&net.valid())
}

/// Runs the job; gives each rank's parameters and running statistics.
fn job(folder: &Path, more: &[(&str, &str)]) -> Vec<Vec<Vec<f32>>> {
    let mut variables = vec![(FOLDER, folder.to_str().unwrap())];
    variables.extend(more);
    let (_server, mut workers) = start("devices", RANKS as u32, &variables);
    for worker in &mut workers {
        let (finished, text) = worker.outcome("a rank with a device");
        assert!(finished, "{text}");
    }
    let left = |rank| std::fs::read(folder.join(format!("{rank}.json"))).unwrap();
    (0..RANKS).map(|rank| serde_json::from_slice(&left(rank)).unwrap()).collect()
}

fn processes_train_as_one_with_the_whole_batch() {
    let folder = tempfile::tempdir().unwrap();
    let trained = job(folder.path(), &[]);
    let (expected, before) = (reference(), floats(&Net::new().valid()));
    assert!(distance(&expected, &before) > 0.01, "the reference has not moved");
    for (rank, ours) in trained.iter().enumerate() {
        assert_eq!(ours, &trained[0], "rank {rank} has other bits than rank 0");
        let distance = distance(ours, &expected);
        assert!(distance < 1e-4, "rank {rank} is {distance:e} away");
    }
}

/// By the trace that a program writes with `PHALANX_TRACE`: the first bucket is on its way to the other rank before backward has come
/// to the last gradient.
fn buckets_are_averaged_while_backward_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    job(folder.path(), &[("PHALANX_TRACE", path.to_str().unwrap())]);
    // In the process's memory a bucket is ready when backward comes to its last gradient; elsewhere a gradient's copy begins when backward
    // comes to it.
    check_overlap(&path, if is_in_memory() { "ready" } else { "copy begins" });
}

/// Checks in the trace at `path` that in each step a bucket is launched before the last event `hooked`, which is noted when backward comes to a
/// gradient.
pub fn check_overlap(path: &Path, hooked: &str) {
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for rank in 0..RANKS as u64 {
        let times = |name: &str| -> Vec<f64> {
            let of_rank = events.iter().filter(|event| event["pid"] == rank && event["name"] == name);
            of_rank.map(|event| event["ts"].as_f64().unwrap()).collect()
        };
        let (hooks, launches) = (times(hooked), times("launched"));
        assert!(hooks.len() >= launches.len() && launches.len() >= STEPS * 4, "{hooks:?} {launches:?}");
        let backward = times("backward");
        assert_eq!(backward.len(), STEPS);
        for (step, begin) in backward.iter().enumerate() {
            let end = backward.get(step + 1).copied().unwrap_or(f64::INFINITY);
            let within = |times: &[f64]| -> Vec<f64> {
                times.iter().copied().filter(|time| (*begin..end).contains(time)).collect()
            };
            let (hooks, launches) = (within(&hooks), within(&launches));
            let last = hooks.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            assert!(
                launches.iter().any(|launch| *launch < last),
                "rank {rank}, step {step}: {hooks:?} {launches:?}"
            );
        }
    }
}
