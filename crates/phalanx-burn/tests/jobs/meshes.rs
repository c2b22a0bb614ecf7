//! A job on a mesh loses a replica, and goes on with those that are left: the data dimension shrinks, and grows again.

use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::{Tensor, TensorData};
use phalanx::checkpoint::Checkpoints;
use phalanx::mesh::DeviceMesh;
use phalanx::{ProcessGroup, Result};
use phalanx_burn::Ddp;
use phalanx_burn::parallel::tensor::{ParallelLinear, TensorGroup, TensorPlan};
use phalanx_burn::parallel::{ShardedState, StateNames};
use rustix::process::{Signal, getpid, kill_process};

use crate::common::{device, samples};
use crate::workers::start;

/// Where the checkpoints are, and the step before which the second replica dies; of those there are `UNTIL`.
const FOLDER: &str = "PHALANX_TEST_FOLDER";
const DEATH: &str = "PHALANX_TEST_DEATH";
const UNTIL: &str = "PHALANX_TEST_UNTIL";
/// Ranks of a replica.
const PARTS: usize = 2;
/// Rows of a step, over all replicas.
const ROWS: usize = 8;

pub const TESTS: &[(&str, fn())] =
    &[("the_data_dimension_shrinks_and_grows", the_data_dimension_shrinks_and_grows)];

/// What this program does as a worker.
pub fn play() {
    let number = |name: &str| std::env::var(name).ok().and_then(|number| number.parse::<usize>().ok());
    let group = phalanx::init().unwrap();
    let folder = PathBuf::from(std::env::var(FOLDER).unwrap());
    let outcome = train(&group, &folder, number(UNTIL).unwrap(), number(DEATH));
    match outcome {
        Ok(losses) => eprintln!("{losses:?}"),
        Err(error) => {
            eprintln!("blames {:?}: {error}", error.peer());
            std::process::exit(3);
        }
    }
}

#[derive(Module, Debug)]
struct Model {
    inner: ParallelLinear,
    outer: ParallelLinear,
}

impl Model {
    /// The same wherever it is made.
    fn new() -> Self {
        let layer = |inputs: usize, outputs: usize, phase: f32| -> ParallelLinear {
            let wave: Vec<f32> =
                (0..inputs * outputs).map(|i| 0.4 * (1.7 * i as f32 + phase).sin()).collect();
            let weight = Tensor::<2>::from_data(TensorData::new(wave, [inputs, outputs]), &device());
            let mut layer: Linear = LinearConfig::new(inputs, outputs).init(&device());
            layer.weight = layer.weight.map(|_| weight.require_grad());
            layer.bias = layer.bias.map(|bias| bias.map(|old| old.zeros_like().require_grad()));
            layer.into()
        };
        Self { inner: layer(8, 12, 0.0), outer: layer(12, 3, 1.0) }
    }

    fn loss(&self, from: usize, to: usize) -> Tensor<1> {
        let (x, y) = samples(from, to);
        (self.outer.forward(self.inner.forward(x).tanh()) - y).powi_scalar(2).mean()
    }
}

/// Goes on with the newest checkpoint until step `until`; gives the losses of the steps.
fn train(group: &ProcessGroup, folder: &Path, until: usize, death: Option<usize>) -> Result<Vec<f64>> {
    // As many replicas as there are ranks for.
    let replicas = group.world_size().count() / PARTS;
    let mesh = DeviceMesh::new(group, &[("data", replicas), ("tensor", PARTS)])?;
    let tensor = TensorGroup::new(mesh.group("tensor")?);
    let model = TensorPlan::new().column("inner").row("outer").divide(Model::new(), &tensor)?;
    let mut ddp = Ddp::new(model, mesh.group("data")?)?;
    let mut optimizer: ModuleOptimizer = AdamWConfig::new().init();
    let state = ShardedState::new(&ddp, group, Some(&tensor), &StateNames::same())?;
    let checkpoints = Checkpoints::open(folder, group)?;
    let mut begin = 0;
    if let Some(saved) = checkpoints.newest()? {
        state.load(&mut ddp, &mut optimizer, &saved, "model")?;
        begin = saved.step() as usize;
    }
    let (replica, own) = (mesh.coordinate("data")?, ROWS / replicas);
    let mut losses = Vec::new();
    for step in begin..until {
        if death == Some(step) && replica == 1 {
            kill_process(getpid(), Signal::KILL).unwrap();
        }
        let from = step * ROWS + replica * own;
        let loss = ddp.forward(|model| model.loss(from, from + own))?;
        let gradients = ddp.backward(&loss)?;
        ddp.step(&mut optimizer, 1e-2, gradients)?;
        losses.push(ddp.mean(&loss)?);
        let saved = checkpoints
            .save_sharded(step as u64 + 1, |snapshot| state.save(&ddp, &optimizer, snapshot, "model"));
        saved.and_then(|()| checkpoints.finish())?;
    }
    Ok(losses)
}

/// As `phalanx run --nnodes 1:2 --nproc-per-node 2` starts workers again: with fewer nodes, and later with more.
fn the_data_dimension_shrinks_and_grows() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let job = |ranks: u32, until: &str, death: Option<&str>| {
        let mut variables = vec![(FOLDER, path), (UNTIL, until), ("PHALANX_TRANSPORT", "tcp")];
        variables.extend(death.map(|step| (DEATH, step)));
        let (_server, mut workers) = start("meshes", ranks, &variables);
        workers.iter_mut().map(|worker| worker.outcome("a mesh")).collect::<Vec<_>>()
    };
    let reference: Vec<f64> = {
        let mut ddp = Ddp::new(Model::new(), &ProcessGroup::alone().unwrap()).unwrap();
        let mut optimizer = AdamWConfig::new().init();
        let step = |step: usize| {
            let loss = ddp.forward(|model| model.loss(step * ROWS, (step + 1) * ROWS)).unwrap();
            let gradients = ddp.backward(&loss).unwrap();
            ddp.step(&mut optimizer, 1e-2, gradients).unwrap();
            ddp.mean(&loss).unwrap()
        };
        (0..8).map(step).collect()
    };
    let same = |outcomes: Vec<(bool, String)>, steps: std::ops::Range<usize>| {
        for (finished, text) in outcomes {
            assert!(finished, "{text}");
            let losses: Vec<f64> = serde_json::from_str(text.trim()).unwrap();
            assert_eq!(losses.len(), steps.len(), "it goes on where it was: {text}");
            for (ours, expected) in losses.iter().zip(&reference[steps.clone()]) {
                assert!((ours / expected - 1.0).abs() < 1e-4, "{losses:?} and not {:?}", &reference[steps]);
            }
        }
    };
    // Two replicas; the second dies before step 3, and the first has no one to average with.
    let died = job(4, "8", Some("3"));
    for (rank, (finished, text)) in died.iter().enumerate() {
        assert!(!finished, "rank {rank}: {text}");
        assert!(rank > 1 || text.contains("blames Some"), "rank {rank}: {text}");
    }
    same(job(2, "6", None), 3..6);
    same(job(4, "8", None), 6..8);
}
