//! A rank that has a part of a model dies or freezes: all others name it, and none hangs.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::{Distribution, Tensor};
use phalanx::checkpoint::Checkpoints;
use phalanx::pipeline::Schedule;
use phalanx::{ProcessGroup, Rank, Result};
use phalanx_burn::Ddp;
use phalanx_burn::parallel::fsdp::{Fsdp, FullySharded, ShardingGroup};
use phalanx_burn::parallel::pipeline::{Pipeline, Stage, StageOutput};
use phalanx_burn::parallel::tensor::{ColumnParallelLinear, RowParallelLinear, TensorGroup};
use phalanx_burn::parallel::{ShardedState, StageLink, StateNames};
use rustix::process::{Signal, getpid, kill_process};

use crate::common::{Waves, device, floats};
use crate::ranks::start;

/// How a worker divides its model, and what happens to rank [`VICTIM`].
const SCENARIO: &str = "PHALANX_TEST_SCENARIO";
const FAULT: &str = "PHALANX_TEST_FAULT";
/// Where checkpoints are.
const FOLDER: &str = "PHALANX_TEST_FOLDER";
const RANKS: u32 = 3;
const VICTIM: u32 = 1;
/// The step, and the micro-batch of it, in which it happens.
const STEP: usize = 3;
/// What a death and a silence may take until all others have ended: much more than they do, as the machine may be busy, and much less
/// than the group's time-out of half an hour.
const DEATH_LIMIT: Duration = Duration::from_secs(15);
const SILENCE_LIMIT: Duration = Duration::from_secs(30);

pub const TESTS: &[(&str, fn())] = &[
    ("a_dead_stage_of_a_pipeline_is_named_by_all", || {
        for transport in ["tcp", "shm"] {
            check("pipeline", "kill", transport, DEATH_LIMIT);
        }
    }),
    ("a_frozen_stage_of_a_pipeline_is_named_by_all", || {
        for transport in ["tcp", "shm"] {
            check("pipeline", "stop", transport, SILENCE_LIMIT);
        }
    }),
    ("a_dead_stage_is_named_through_links", || check("link", "kill", "tcp", DEATH_LIMIT)),
    ("a_dead_part_of_a_layer_is_named_by_all", || {
        for transport in ["tcp", "shm"] {
            check("tensor", "kill", transport, DEATH_LIMIT);
        }
    }),
    ("a_dead_rank_of_a_sharded_model_is_named_by_all", || {
        for transport in ["tcp", "shm"] {
            check("sharded", "kill", transport, DEATH_LIMIT);
            check("sharded backward", "kill", transport, DEATH_LIMIT);
        }
    }),
    ("a_frozen_rank_of_a_sharded_model_is_named_by_all", || {
        for transport in ["tcp", "shm"] {
            check("sharded", "stop", transport, SILENCE_LIMIT);
            check("sharded backward", "stop", transport, SILENCE_LIMIT);
        }
    }),
    ("a_trace_shows_the_bubbles", a_trace_shows_the_bubbles),
    ("dropout_drops_the_same_when_it_is_repeated", dropout_drops_the_same_when_it_is_repeated),
    (
        "stages_of_a_run_that_goes_on_drop_what_they_would_have_dropped",
        stages_of_a_run_that_goes_on_drop_what_they_would_have_dropped,
    ),
];

/// What this program does as a worker.
pub fn play() {
    let scenario = std::env::var(SCENARIO).unwrap();
    let group = phalanx::init().unwrap();
    let outcome = match scenario.as_str() {
        "pipeline" => pipeline(&group),
        "link" => link(&group),
        "tensor" => tensor(&group),
        "sharded" => sharded(&group, false),
        "sharded backward" => sharded(&group, true),
        "trace" => slow_pipeline(&group),
        "resumed" => resumed_pipeline(&group),
        other => panic!("no scenario {other}"),
    };
    let Err(error) = outcome else { return };
    let blamed = error.peer().map_or("nobody".to_owned(), |peer| peer.to_string());
    eprintln!("blames {blamed}: {error}");
    // With the group, which rank 0 would drop only when a frozen rank is served no more.
    std::process::exit(3);
}

/// Strikes the victim, if this is it and the time has come.
fn strike(rank: Rank, step: usize) {
    if rank.get() == VICTIM && step == STEP {
        println!("struck");
        let stop = std::env::var(FAULT).is_ok_and(|fault| fault == "stop");
        kill_process(getpid(), if stop { Signal::STOP } else { Signal::KILL }).unwrap();
    }
}

#[derive(Module, Debug)]
struct Part {
    layer: Linear,
    is_last: bool,
}

impl Stage<2> for Part {
    /// The rank that computes, and the step if this is where it may be struck.
    type Batch = (Rank, usize);

    fn forward(&self, input: Option<Tensor<2>>, &(rank, step): &(Rank, usize)) -> StageOutput<2> {
        strike(rank, step);
        let x = self.layer.forward(input.unwrap_or_else(|| Tensor::ones([4, 8], &device()))).tanh();
        if self.is_last { StageOutput::Loss(x.mean()) } else { StageOutput::Hidden(x) }
    }
}

fn layer() -> Linear {
    LinearConfig::new(8, 8).init(&device())
}

fn pipeline(group: &ProcessGroup) -> Result<()> {
    let mut pipeline = Pipeline::new(group, Schedule::OneForwardOneBackward, 4)?;
    let part = |stage| Part { layer: layer(), is_last: stage + 1 == pipeline.stages() };
    let parts: Vec<Part> = pipeline.own_stages().map(part).collect();
    let mut ddp = Ddp::new(parts, &ProcessGroup::alone()?)?;
    for step in 0.. {
        // In the third micro-batch: others compute, and tensors and gradients are on their way.
        let batches: Vec<_> = (0..4).map(|index| (group.rank(), if index == 2 { step } else { 0 })).collect();
        pipeline.train(&mut ddp, &batches)?;
    }
    Ok(())
}

/// A stage that takes a known time: it sleeps in its forward pass, and again when that is repeated for the backward pass.
#[derive(Module, Debug)]
struct Sleeper {
    part: Part,
}

impl Stage<2> for Sleeper {
    type Batch = (Rank, usize);

    fn forward(&self, input: Option<Tensor<2>>, batch: &(Rank, usize)) -> StageOutput<2> {
        std::thread::sleep(Duration::from_millis(40));
        self.part.forward(input, batch)
    }
}

const MICROBATCHES: usize = 4;
const STEPS: usize = 4;

fn slow_pipeline(group: &ProcessGroup) -> Result<()> {
    let mut pipeline = Pipeline::new(group, Schedule::GPipe, MICROBATCHES)?.with_recomputation(0);
    let part = |stage| Sleeper { part: Part { layer: layer(), is_last: stage + 1 == pipeline.stages() } };
    let parts: Vec<Sleeper> = pipeline.own_stages().map(part).collect();
    let mut ddp = Ddp::new(parts, &ProcessGroup::alone()?)?;
    for _ in 0..STEPS {
        pipeline.train(&mut ddp, &[(group.rank(), 0); MICROBATCHES])?;
    }
    Ok(())
}

/// The passes on the track `pipeline` follow each other through the stages, and those of different stages overlap.
fn a_trace_shows_the_bubbles() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let trace = ("PHALANX_TRACE", path.to_str().unwrap());
    let (_server, ranks) =
        start("stages", RANKS, &[(SCENARIO, "trace"), ("PHALANX_TRANSPORT", "shm"), trace]);
    for mut rank in ranks {
        let text = rank.end("a trace");
        assert!(!text.contains("blames") && !text.contains("panicked"), "{text}");
    }
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let is_track = |event: &&serde_json::Value| event["args"]["name"] == "pipeline";
    let track = events.iter().find(is_track).unwrap()["tid"].clone();
    // The times of each rank's forward passes and then of its backward passes, in their order.
    let passes = |rank: u32, name: &str| -> Vec<(f64, f64)> {
        let own = events.iter().filter(|event| event["tid"] == track && event["pid"] == rank);
        let mut times: Vec<(f64, f64)> = own
            .filter(|event| event["name"] == name)
            .map(|event| (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap()))
            .map(|(start, length)| (start, start + length))
            .collect();
        times.sort_by(|a, b| a.0.total_cmp(&b.0));
        assert_eq!(times.len(), MICROBATCHES * STEPS, "rank {rank}");
        times
    };
    for rank in 1..RANKS {
        let (before, after) = (passes(rank - 1, "forward"), passes(rank, "forward"));
        for (pass, (before, after)) in before.iter().zip(&after).enumerate() {
            assert!(before.0 < after.0, "rank {rank}, forward pass {pass}");
        }
        for (pass, (before, after)) in
            passes(rank - 1, "backward").iter().zip(passes(rank, "backward")).enumerate()
        {
            assert!(after.0 < before.1, "rank {rank}, backward pass {pass}");
        }
        // Other work on the machine may keep a rank from its pass in some steps.
        let overlap = (0..STEPS).any(|step| {
            let first = after[MICROBATCHES * step];
            let others = &before[MICROBATCHES * step + 1..MICROBATCHES * (step + 1)];
            others.iter().any(|other| other.0 < first.1 && first.0 < other.1)
        });
        assert!(overlap, "rank {rank}: {before:?} {after:?}");
    }
    let waits = |rank: u32| {
        events.iter().any(|event| event["tid"] == track && event["pid"] == rank && event["name"] == "wait")
    };
    assert!((0..RANKS).all(waits));
}

fn link(group: &ProcessGroup) -> Result<()> {
    let (rank, layer) = (group.rank().get(), layer());
    let before = rank.checked_sub(1).map(|before| StageLink::new(group, Rank::new(before))).transpose()?;
    let after = (rank + 1 < RANKS).then(|| StageLink::new(group, Rank::new(rank + 1))).transpose()?;
    for step in 0.. {
        let x = match &before {
            Some(before) => before.recv_forward(&device())?,
            None => Tensor::<2>::ones([4, 8], &device()),
        };
        let x = layer.forward(x).tanh();
        let loss = match &after {
            Some(after) => after.send_forward(x)?,
            None => x.mean(),
        };
        // Between the passes: the rank before waits for a gradient, the one after for the next tensor.
        strike(group.rank(), step);
        drop(loss.backward());
        group.failure().map_or(Ok(()), Err)?;
    }
    Ok(())
}

fn tensor(group: &ProcessGroup) -> Result<()> {
    let divided = TensorGroup::new(group);
    let wide = || LinearConfig::new(6, 6).init(&device());
    let (inner, outer) =
        (ColumnParallelLinear::new(wide(), &divided)?, RowParallelLinear::new(wide(), &divided)?);
    for step in 0.. {
        let y = outer.forward(inner.forward(Tensor::<2>::ones([4, 6], &device()).require_grad()));
        strike(group.rank(), step);
        drop(y.mean().backward());
        divided.failure().map_or(Ok(()), Err)?;
    }
    Ok(())
}

/// How often units have computed in this step. Of six times, the last three are in the backward pass.
static PASSES: AtomicUsize = AtomicUsize::new(0);

/// The victim is struck between two of its units, forward or backward, while the others wait for its shard.
fn sharded(group: &ProcessGroup, in_backward: bool) -> Result<()> {
    let sharding = ShardingGroup::new(group)?;
    let units = (0..3).map(|_| FullySharded::new(layer(), &sharding)).collect::<Result<Vec<_>>>()?;
    let mut fsdp = Fsdp::new(units, &sharding)?;
    let mut optimizer = SgdConfig::new().init();
    let rank = group.rank().get();
    for step in 0.. {
        let loss = fsdp.forward(|units| {
            PASSES.store(0, Ordering::Relaxed);
            let when = if in_backward { 4 } else { 1 };
            let unit = |x, unit: &FullySharded<Linear>| {
                unit.forward((x, rank, step, when), |layer, (x, rank, step, when)| {
                    if PASSES.fetch_add(1, Ordering::Relaxed) == when {
                        strike(Rank::new(rank), step);
                    }
                    layer.forward(x).tanh()
                })
            };
            units.iter().fold(Tensor::<2>::ones([4, 8], &device()), unit).mean()
        })?;
        let gradients = fsdp.backward(&loss)?;
        fsdp.step(&mut optimizer, 0.1, gradients)?;
    }
    Ok(())
}

fn check(scenario: &str, fault: &str, transport: &str, bound: Duration) {
    let what = format!("{scenario}, {fault}, {transport}");
    let variables = [(SCENARIO, scenario), (FAULT, fault), ("PHALANX_TRANSPORT", transport)];
    let (_server, mut ranks) = start("stages", RANKS, &variables);
    ranks[VICTIM as usize].await_line("struck");
    let start = Instant::now();
    for rank in (0..RANKS).filter(|rank| *rank != VICTIM) {
        let text = ranks[rank as usize].end(&what);
        assert!(text.contains(&format!("blames {VICTIM}: ")), "{what}: rank {rank}: {text}");
        assert!(text.contains(&format!("rank {VICTIM} ")), "{what}: rank {rank}: {text}");
    }
    let took = start.elapsed();
    assert!(took < bound, "{what}: it took {took:?}");
}

/// A layer with dropout.
#[derive(Module, Debug)]
struct Noisy {
    layer: Linear,
    dropout: Dropout,
    is_last: bool,
}

impl Stage<2> for Noisy {
    type Batch = Tensor<2>;

    fn forward(&self, input: Option<Tensor<2>>, x: &Tensor<2>) -> StageOutput<2> {
        let x = self.dropout.forward(self.layer.forward(input.unwrap_or_else(|| x.clone())));
        if self.is_last { StageOutput::Loss(x.mean()) } else { StageOutput::Hidden(x) }
    }
}

/// A layer of 64 by 64.
fn noisy(is_last: bool) -> Noisy {
    Noisy {
        layer: LinearConfig::new(64, 64).with_bias(false).init(&device()),
        dropout: DropoutConfig::new(0.5).init(),
        is_last,
    }
}

type Training = (Pipeline<2>, Ddp<Vec<Noisy>>, ModuleOptimizer);

/// The weights of a run of six steps are those of one that ends after three, with the device seeded before each step.
fn resumed_pipeline(group: &ProcessGroup) -> Result<()> {
    let rank = u64::from(group.rank().get());
    let begin = || -> Result<Training> {
        let pipeline = Pipeline::new(group, Schedule::GPipe, 4)?.with_recomputation(3);
        let stage = |stage: usize| noisy(stage + 1 == pipeline.stages()).map(&mut Waves::default());
        let stages: Vec<Noisy> = pipeline.own_stages().map(stage).collect();
        let ddp = Ddp::new(stages, &ProcessGroup::alone()?)?;
        Ok((pipeline, ddp, AdamWConfig::new().init()))
    };
    let train = |(pipeline, ddp, optimizer): &mut Training, seed: u64, steps: Range<u64>| -> Result<()> {
        let batch = vec![Tensor::<2>::ones([1, 64], &device()); 4];
        for step in steps {
            device().seed(1000 * seed + 10 * step + rank);
            let done = pipeline.train(ddp, &batch)?;
            ddp.step(optimizer, 1e-2, done.gradients)?;
        }
        Ok(())
    };
    let state = |(pipeline, ddp, _): &Training| -> Result<ShardedState> {
        let names = StateNames::new(|path| {
            let (stage, path) = pipeline.stage_path(path).unwrap();
            format!("{stage}.{path}")
        });
        ShardedState::new(ddp, group, None, &names)
    };
    let whole = |seed: u64| -> Result<Vec<Vec<f32>>> {
        let mut training = begin()?;
        train(&mut training, seed, 0..6)?;
        Ok(floats(training.1.model()))
    };
    let expected = whole(5)?;
    assert_eq!(whole(5)?, expected, "the same seed, and other weights");
    assert_ne!(whole(6)?, expected, "the program's seed has no effect on what stages drop");

    let checkpoints = Checkpoints::open(std::env::var(FOLDER).unwrap(), group)?;
    let mut training = begin()?;
    train(&mut training, 5, 0..3)?;
    let saved = state(&training)?;
    checkpoints.save_sharded(3, |snapshot| saved.save(&training.1, &training.2, snapshot, "model"))?;
    checkpoints.finish()?;
    drop(training);
    let mut training = begin()?;
    let loaded = state(&training)?;
    let (_, ddp, optimizer) = &mut training;
    loaded.load(ddp, optimizer, &checkpoints.newest()?.unwrap(), "model")?;
    train(&mut training, 5, 3..6)?;
    assert_eq!(floats(training.1.model()), expected, "what goes on drops something else");
    Ok(())
}

fn stages_of_a_run_that_goes_on_drop_what_they_would_have_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let folder = (FOLDER, folder.path().to_str().unwrap());
    let (_server, mut ranks) =
        start("stages", 2, &[(SCENARIO, "resumed"), ("PHALANX_TRANSPORT", "tcp"), folder]);
    for rank in &mut ranks {
        let (finished, text) = rank.outcome("a run that goes on");
        assert!(finished, "{text}");
    }
}

/// Here, because no other test of this program draws from the same random numbers meanwhile.
fn dropout_drops_the_same_when_it_is_repeated() {
    let alone = ProcessGroup::alone().unwrap();
    let schedule = Schedule::Interleaved { stages_per_rank: 2 };
    let mut pipeline = Pipeline::new(&alone, schedule, 4).unwrap().with_recomputation(3);
    let mut ddp = Ddp::new(vec![noisy(false), noisy(true)], &alone).unwrap();
    let batch = vec![Tensor::<2>::ones([1, 64], &device()); 4];
    let step = pipeline.train(&mut ddp, &batch).unwrap();
    // The loss is the mean of x W' D W'', with D what is left of the first stage: the gradient of W'' says which elements were left,
    // and the gradient of W' has nothing where none were. They agree only if both passes dropped the same.
    let [first, second] =
        [0, 1].map(|stage| step.gradients.get::<2>(ddp.model()[stage].layer.weight.id).unwrap());
    let used: Vec<bool> = second.abs().sum_dim(1).into_data().iter::<f32>().map(|x| x != 0.0).collect();
    let taught: Vec<bool> = first.abs().sum_dim(0).into_data().iter::<f32>().map(|x| x != 0.0).collect();
    assert_eq!(used, taught);
    assert!(used.iter().any(|used| !used) && used.iter().any(|used| *used), "{used:?}");

    // The program's own random numbers go on, whatever the passes have drawn.
    let mut run = |seed: u64| {
        device().seed(seed);
        [(); 2].map(|()| {
            pipeline.train(&mut ddp, &batch).unwrap();
            let drawn = Tensor::<1>::random([4], Distribution::Default, &device());
            drawn.into_data().iter::<f32>().collect::<Vec<_>>()
        })
    };
    let (first, again, other) = (run(1), run(1), run(2));
    assert_eq!(first, again);
    assert!(first[0] != first[1] && first[0] != other[0] && first[1] != other[1], "{first:?} {other:?}");
}
