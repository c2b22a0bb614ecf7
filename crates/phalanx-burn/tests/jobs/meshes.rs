//! A job on a mesh loses a replica, and goes on with those that are left: the data dimension shrinks, and grows again.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::{Tensor, TensorData};
use phalanx::checkpoint::Checkpoints;
use phalanx::launch::{Cluster, Event, Job, Outcome, Stream};
use phalanx::mesh::DeviceMesh;
use phalanx::{Error, ProcessGroup, Result, WorldSize};
use phalanx_burn::Ddp;
use phalanx_burn::parallel::tensor::{ParallelLinear, TensorGroup, TensorPlan};
use phalanx_burn::parallel::{ShardedState, StateNames};
use rustix::process::{Signal, getpid, kill_process};

use crate::common::{device, distance, floats, samples};
use crate::ranks::{Worker, start};

/// Where the checkpoints are, and the step before which the second replica dies; of those there are `UNTIL`.
const FOLDER: &str = "PHALANX_TEST_FOLDER";
const DEATH: &str = "PHALANX_TEST_DEATH";
const UNTIL: &str = "PHALANX_TEST_UNTIL";
/// Set where each step waits until the test allows it, and what comes of it is said at once.
const STEP_BY_STEP: &str = "PHALANX_TEST_STEP_BY_STEP";
/// The longest that a step waits.
const LIMIT: Duration = Duration::from_secs(120);
/// Ranks of a replica.
const PARTS: usize = 2;
/// Rows of a step, over all replicas.
const ROWS: usize = 8;

pub const TESTS: &[(&str, fn())] = &[
    ("the_data_dimension_shrinks_and_grows", the_data_dimension_shrinks_and_grows),
    ("it_grows_and_shrinks_with_the_nodes_of_launchers", it_grows_and_shrinks_with_the_nodes_of_launchers),
];

/// What this program does as a worker.
pub fn play() {
    let number = |name: &str| std::env::var(name).ok().and_then(|number| number.parse::<usize>().ok());
    let group = phalanx::init().unwrap();
    let folder = PathBuf::from(std::env::var(FOLDER).unwrap());
    let outcome = train(&group, &folder, number(UNTIL).unwrap(), number(DEATH));
    match outcome {
        Ok(_) if is_step_by_step() => {}
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
    let checkpoints = Checkpoints::open(folder.join("checkpoints"), group)?;
    let mut begin = 0;
    if let Some(saved) = checkpoints.newest()? {
        state.load(&mut ddp, &mut optimizer, &saved, "model")?;
        begin = saved.step() as usize;
    }
    let (replica, own) = (mesh.coordinate("data")?, ROWS / replicas);
    let mut losses = Vec::new();
    // One worker of each node speaks.
    let speaks = is_step_by_step() && std::env::var("LOCAL_RANK").is_ok_and(|rank| rank == "0");
    for step in begin..until {
        if speaks {
            println!("at {step} of {replicas}");
        }
        if is_step_by_step() {
            await_permission(folder, step)?;
        }
        if death == Some(step) && replica == 1 {
            kill_process(getpid(), Signal::KILL).unwrap();
        }
        let from = step * ROWS + replica * own;
        let loss = ddp.forward(|model| model.loss(from, from + own))?;
        let gradients = ddp.backward(&loss)?;
        ddp.step(&mut optimizer, 1e-2, gradients)?;
        losses.push(ddp.mean(&loss)?);
        if let (true, Some(loss)) = (speaks, losses.last()) {
            eprintln!("loss {step} {replicas} {loss}");
        }
        let saved = checkpoints
            .save_sharded(step as u64 + 1, |snapshot| state.save(&ddp, &optimizer, snapshot, "model"));
        saved.and_then(|()| checkpoints.finish())?;
    }
    let whole = tensor.gather_module(ddp.into_model())?;
    if speaks {
        eprintln!("weights {:?}", floats(&whole));
    }
    Ok(losses)
}

fn is_step_by_step() -> bool {
    std::env::var_os(STEP_BY_STEP).is_some()
}

/// Says that all steps before `step` may be taken.
fn permit(folder: &Path, step: usize) {
    let new = folder.join("permitted.new");
    std::fs::write(&new, step.to_string()).unwrap();
    std::fs::rename(new, folder.join("permitted")).unwrap();
}

fn await_permission(folder: &Path, step: usize) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    while std::fs::read_to_string(folder.join("permitted")).unwrap().parse::<usize>().unwrap() <= step {
        if Instant::now() > deadline {
            return Err(Error::timeout(format!("nobody permits step {step}")));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// One process that trains the whole model, and is not interrupted: the losses of its steps, and the model.
fn reference(steps: usize) -> (Vec<f64>, Vec<Vec<f32>>) {
    let mut ddp = Ddp::new(Model::new(), &ProcessGroup::alone().unwrap()).unwrap();
    let mut optimizer = AdamWConfig::new().init();
    let step = |step: usize| {
        let loss = ddp.forward(|model| model.loss(step * ROWS, (step + 1) * ROWS)).unwrap();
        let gradients = ddp.backward(&loss).unwrap();
        ddp.step(&mut optimizer, 1e-2, gradients).unwrap();
        ddp.mean(&loss).unwrap()
    };
    let losses = (0..steps).map(step).collect();
    (losses, floats(ddp.model()))
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
    let (reference, _) = reference(8);
    let same = |outcomes: Vec<(bool, String)>, steps: std::ops::Range<usize>| {
        for (finished, text) in outcomes {
            assert!(finished, "{text}");
            // On a slow machine a rank also says for whom it waits.
            let losses = text.lines().find(|line| line.starts_with('[')).unwrap_or_else(|| panic!("{text}"));
            let losses: Vec<f64> = serde_json::from_str(losses).unwrap();
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

/// What this program does as the launcher of a node, and shows what its workers say: `phalanx run --nnodes 1:2 --nproc-per-node 2
/// --max-restarts 5 --rdzv-backend file --rdzv-endpoint meeting`, which runs the same code.
pub fn launch() {
    let folder = PathBuf::from(std::env::var(FOLDER).unwrap());
    let cluster = Cluster::file(1, 2, folder.join("meeting")).unwrap();
    // The nodes that are there begin, and do not wait long for others.
    let cluster = cluster.local_addr("127.0.0.1").last_call(Duration::from_millis(200));
    let job = Job::new(std::env::current_exe().unwrap(), WorldSize::new(PARTS as u32).unwrap())
        .variable(crate::harness::ROLE, "meshes")
        .max_restarts(5)
        .cluster(cluster);
    let report = job.run(&mut |event: Event<'_>| {
        match event {
            Event::Line { stream: Stream::Stdout, text, .. } => println!("{}", String::from_utf8_lossy(text)),
            Event::Line { stream: Stream::Stderr, text, .. } => {
                eprintln!("{}", String::from_utf8_lossy(text))
            }
            _ => {}
        }
        ControlFlow::Continue(())
    });
    match report.unwrap().outcome {
        Outcome::Succeeded => {}
        other => {
            eprintln!("{other:?}");
            std::process::exit(1);
        }
    }
}

/// One node, two, and one again, because the second is lost.
fn it_grows_and_shrinks_with_the_nodes_of_launchers() {
    const STEPS: usize = 8;
    let folder = tempfile::tempdir().unwrap();
    let node = || {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env(crate::harness::ROLE, "launcher").env(FOLDER, folder.path());
        command.env(UNTIL, STEPS.to_string()).env(STEP_BY_STEP, "1").env("PHALANX_TRANSPORT", "tcp");
        Worker::spawn(command)
    };
    permit(folder.path(), 2);
    let mut first = node();
    first.await_line("at 2 of 1");
    let mut second = node();
    first.await_line("at 2 of 2");
    second.await_line("at 2 of 2");
    permit(folder.path(), 5);
    first.await_line("at 5 of 2");
    second.await_line("at 5 of 2");
    // Its launcher gets SIGKILL.
    drop(second);
    first.await_line("at 5 of 1");
    permit(folder.path(), STEPS);
    let (finished, said) = first.outcome("the first node");
    assert!(finished, "{said}");

    let (expected, model) = reference(STEPS);
    let mut losses = BTreeMap::new();
    for line in said.lines().filter_map(|line| line.strip_prefix("loss ")) {
        let [step, replicas, loss] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let (step, loss): (usize, f64) = (step.parse().unwrap(), loss.parse().unwrap());
        let before = losses.insert(step, replicas.parse::<usize>().unwrap());
        assert_eq!(before, None, "step {step} is taken once: {said}");
        assert!((loss / expected[step] - 1.0).abs() < 1e-4, "step {step}: {loss} and not {}", expected[step]);
    }
    assert_eq!(losses.into_values().collect::<Vec<_>>(), [1, 1, 2, 2, 2, 1, 1, 1], "{said}");
    let weights = said.lines().find_map(|line| line.strip_prefix("weights ")).unwrap();
    let weights: Vec<Vec<f32>> = serde_json::from_str(weights).unwrap();
    let apart = distance(&weights, &model);
    assert!(apart < 1e-4, "{apart:e}");
}
