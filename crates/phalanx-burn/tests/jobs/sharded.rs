//! Sharded parameters in processes of their own: what memory they need, what overlaps, and random numbers, which a process has once.

use std::ops::Range;
use std::time::Duration;

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Distribution, Tensor};
use phalanx::checkpoint::Checkpoints;
use phalanx::mesh::DeviceMesh;
use phalanx::{ProcessGroup, Result};
use phalanx_burn::parallel::fsdp::{Fsdp, FullySharded, ShardingGroup, ShardingOptions};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::common::{Waves, device, floats, plain};
use crate::ranks::start;

/// What a worker does: `whole`, `sharded`, `trace`, `replicas`, `random`, `resumed`.
const SCENARIO: &str = "PHALANX_TEST_SCENARIO";
/// The options: with `resharding`, and units `ahead`.
const RESHARDING: &str = "PHALANX_TEST_RESHARDING";
const AHEAD: &str = "PHALANX_TEST_AHEAD";
/// Bytes that a worker may have beyond what it has when it starts.
const CAP: &str = "PHALANX_TEST_CAP";
/// Where checkpoints are.
const FOLDER: &str = "PHALANX_TEST_FOLDER";

pub const TESTS: &[(&str, fn())] = &[
    ("a_model_that_does_not_fit_one_rank_trains_on_four", a_model_that_does_not_fit_one_rank_trains_on_four),
    (
        "gathers_and_scatters_overlap_with_what_units_compute",
        gathers_and_scatters_overlap_with_what_units_compute,
    ),
    ("replicas_average_a_unit_while_others_compute", replicas_average_a_unit_while_others_compute),
    ("dropout_drops_the_same_in_a_unit_s_backward_pass", dropout_drops_the_same_in_a_unit_s_backward_pass),
    (
        "ranks_drop_differently_and_the_program_draws_alike_on_all",
        ranks_drop_differently_and_the_program_draws_alike_on_all,
    ),
    (
        "units_of_a_run_that_goes_on_drop_what_they_would_have_dropped",
        units_of_a_run_that_goes_on_drop_what_they_would_have_dropped,
    ),
];

/// What this program does as a worker.
pub fn play() {
    let group = phalanx::init().unwrap();
    match std::env::var(SCENARIO).unwrap().as_str() {
        "whole" => whole(),
        "sharded" => sharded(&group).unwrap(),
        "trace" => slow(ShardingGroup::new(&group).unwrap()).unwrap(),
        "replicas" => {
            let mesh = DeviceMesh::new(&group, &[("replicate", 2), ("shard", 2)]).unwrap();
            let (shard, replicate) = (mesh.group("shard").unwrap(), mesh.group("replicate").unwrap());
            slow(ShardingGroup::hybrid(shard, replicate)).unwrap();
        }
        "random" => random(&group).unwrap(),
        "resumed" => resumed(&group).unwrap(),
        other => panic!("no scenario {other}"),
    }
}

/// 16 layers of 4 MiB: with gradients and AdamW's state 256 MiB.
const LAYERS: usize = 16;
const WIDTH: usize = 1024;
const STEPS: usize = 2;
const MIB: usize = 1 << 20;

fn layer() -> Linear {
    LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(&device())
}

/// This process's line `name` of /proc/self/status, in bytes.
fn status(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
    1024 * line.trim_end_matches("kB").trim().parse::<u64>().unwrap()
}

/// From now on, allocations fail that take this process so many bytes beyond what it has. Shared memory does not count.
fn limit_memory() {
    let Ok(cap) = std::env::var(CAP) else { return };
    let Rlimit { maximum, .. } = getrlimit(Resource::Data);
    let current = Some(status("VmData") + cap.parse::<u64>().unwrap());
    setrlimit(Resource::Data, Rlimit { current, maximum }).unwrap();
}

fn batch() -> Tensor<2> {
    Tensor::ones([4, WIDTH], &device())
}

fn whole() {
    limit_memory();
    let before = status("VmRSS");
    let mut model: Vec<Linear> = (0..LAYERS).map(|_| layer()).collect();
    let mut optimizer = AdamWConfig::new().init();
    for _ in 0..STEPS {
        let loss = model.iter().fold(batch(), |x, layer| layer.forward(x).tanh()).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-3, model, gradients);
    }
    eprintln!("{}", status("VmHWM") - before);
}

fn options() -> ShardingOptions {
    let mut options = ShardingOptions::default();
    if let Ok(resharding) = std::env::var(RESHARDING) {
        options.reshard_after_forward = resharding == "yes";
    }
    if let Ok(ahead) = std::env::var(AHEAD) {
        options.prefetch = ahead.parse().unwrap();
    }
    options
}

fn sharded(group: &ProcessGroup) -> Result<()> {
    limit_memory();
    let before = status("VmRSS");
    let sharding = ShardingGroup::new(group)?.with_options(options());
    let units = (0..LAYERS).map(|_| FullySharded::new(layer(), &sharding)).collect::<Result<Vec<_>>>()?;
    let mut fsdp = Fsdp::new(units, &sharding)?;
    let mut optimizer = AdamWConfig::new().init();
    for _ in 0..STEPS {
        let loss = fsdp.forward(|units| {
            units.iter().fold(batch(), |x, unit| unit.forward(x, |layer, x| layer.forward(x).tanh())).mean()
        })?;
        let gradients = fsdp.backward(&loss)?;
        fsdp.step(&mut optimizer, 1e-3, gradients)?;
    }
    eprintln!("{}", status("VmHWM") - before);
    Ok(())
}

/// By the formula a rank needs 4 P / 4 + 4 U = 80 MiB of its own, where one process needs 4 P = 256 MiB. Both may have 160 MiB more than
/// they start with, of which buffers of connections and what an allocator does not give back take some.
fn a_model_that_does_not_fit_one_rank_trains_on_four() {
    let cap = (160 * MIB).to_string();
    let run = |scenario: &str, ranks: u32, more: &[(&str, &str)]| {
        let mut variables = vec![(SCENARIO, scenario), ("PHALANX_TRANSPORT", "tcp")];
        // What is freed is freed, and every thread takes from the same memory.
        variables.extend([
            ("MALLOC_MMAP_THRESHOLD_", "131072"),
            ("MALLOC_ARENA_MAX", "1"),
            ("RAYON_NUM_THREADS", "1"),
        ]);
        variables.extend(more);
        let (_server, mut workers) = start("sharded", ranks, &variables);
        workers.iter_mut().map(|worker| worker.outcome(scenario)).collect::<Vec<_>>()
    };
    let cap = (CAP, cap.as_str());
    // On a slow machine a rank also says for whom it waits.
    let taken = |text: &str| {
        let bytes = text.lines().find_map(|line| line.parse::<f64>().ok());
        bytes.unwrap_or_else(|| panic!("{text}")) / MIB as f64
    };
    let mut most = 0.0_f64;
    for (trained, text) in run("sharded", 4, &[cap]) {
        assert!(trained, "a rank of four does not train: {text}");
        most = most.max(taken(&text));
    }
    let (trained, text) = run("whole", 1, &[cap]).remove(0);
    assert!(!trained, "one rank trains within the cap");
    assert!(text.contains("memory"), "it fails for another reason: {text}");
    let (trained, text) = run("whole", 1, &[]).remove(0);
    assert!(trained, "one rank does not train without a cap: {text}");
    println!("one process took {:.0} MiB, each of four ranks at most {most:.0} MiB", taken(&text));
    assert!(taken(&text) >= 256.0 && most < 128.0, "{text} {most}");
}

const LAYER_DELAY: Duration = Duration::from_millis(30);
const SLOW_UNITS: usize = 4;
const SLOW_STEPS: usize = 3;

/// Units that take a known time in both directions, and collectives of some milliseconds.
fn slow(sharding: ShardingGroup) -> Result<()> {
    let sharding = sharding.with_options(options());
    let wide = || LinearConfig::new(512, 512).init(&device());
    let units = (0..SLOW_UNITS).map(|_| FullySharded::new(wide(), &sharding)).collect::<Result<Vec<_>>>()?;
    let mut fsdp = Fsdp::new(units, &sharding)?;
    let mut optimizer = SgdConfig::new().init();
    for _ in 0..SLOW_STEPS {
        let loss = fsdp.forward(|units| {
            let unit = |x, unit: &FullySharded<Linear>| {
                unit.forward(x, |layer: &Linear, x| {
                    std::thread::sleep(LAYER_DELAY);
                    layer.forward(x).tanh()
                })
            };
            units.iter().fold(Tensor::<2>::ones([4, 512], &device()), unit).mean()
        })?;
        let gradients = fsdp.backward(&loss)?;
        fsdp.step(&mut optimizer, 0.1, gradients)?;
    }
    Ok(())
}

/// How many of the collectives whose name begins with `call` ran while a unit computed on the track `track` of their rank, and how many
/// there were.
fn overlaps(trace: &serde_json::Value, track: &str, call: &str) -> (usize, usize) {
    let events = trace["traceEvents"].as_array().unwrap();
    let number = |name: &str| {
        let named =
            |event: &&serde_json::Value| event["name"] == "thread_name" && event["args"]["name"] == name;
        events.iter().find(named).unwrap_or_else(|| panic!("no track {name}"))["tid"].clone()
    };
    let times = |track: &str, is: &dyn Fn(&str) -> bool| -> Vec<(u64, f64, f64)> {
        let number = number(track);
        let on_track = events.iter().filter(|event| event["tid"] == number && event["ph"] == "X");
        let of_name = on_track.filter(|event| is(event["name"].as_str().unwrap()));
        let time = |event: &serde_json::Value| {
            let start = event["ts"].as_f64().unwrap();
            (event["pid"].as_u64().unwrap(), start, start + event["dur"].as_f64().unwrap())
        };
        of_name.map(time).collect()
    };
    let computed = times(track, &|name| name == "unit");
    let calls = times("communication", &|name| name.contains(call));
    let meets = |(rank, from, to): &&(u64, f64, f64)| {
        computed.iter().any(|(other, start, end)| rank == other && start < to && from < end)
    };
    (calls.iter().filter(meets).count(), calls.len())
}

/// A unit's gather runs while the unit before it computes, and its scatter while the next one does: as events, whatever they take.
fn gathers_and_scatters_overlap_with_what_units_compute() {
    let folder = tempfile::tempdir().unwrap();
    let traced = |ahead: &str, resharding: &str| -> serde_json::Value {
        let path = folder.path().join(format!("{ahead}-{resharding}.json"));
        let mut variables = vec![(SCENARIO, "trace"), ("PHALANX_TRANSPORT", "tcp"), (AHEAD, ahead)];
        variables.extend([(RESHARDING, resharding), ("PHALANX_TRACE", path.to_str().unwrap())]);
        let (_server, mut ranks) = start("sharded", 2, &variables);
        for rank in &mut ranks {
            let (finished, text) = rank.outcome("a trace");
            assert!(finished, "{text}");
        }
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap()
    };
    let ahead = traced("1", "yes");
    let (forward, gathers) = overlaps(&ahead, "forward", "all_gather_v");
    let (backward, _) = overlaps(&ahead, "backward", "all_gather_v");
    let (scatters, _) = overlaps(&ahead, "backward", "reduce_scatter_v");
    // All but the first of each pass of each rank could; other work on the machine may delay most of them.
    let least = SLOW_UNITS - 1;
    let counts = format!("{forward}, {backward} and {scatters} of {gathers}");
    assert!(forward >= least && backward >= least && scatters >= least, "{counts}");

    // Nothing is gathered while a unit computes if nothing is gathered ahead: what is seen above is no accident.
    let not_ahead = traced("0", "yes");
    assert_eq!(overlaps(&not_ahead, "forward", "all_gather_v").0, 0);
    assert_eq!(overlaps(&not_ahead, "backward", "all_gather_v").0, 0);
}

/// By the order of events on each rank, whatever they take: when a unit begins to compute its gradients, those of the last but one before it
/// have been reduced and scattered, and their average has begun.
fn replicas_average_a_unit_while_others_compute() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let variables =
        [(SCENARIO, "replicas"), ("PHALANX_TRANSPORT", "tcp"), ("PHALANX_TRACE", path.to_str().unwrap())];
    let (_server, mut ranks) = start("sharded", 4, &variables);
    for rank in &mut ranks {
        let (finished, text) = rank.outcome("a trace");
        assert!(finished, "{text}");
    }
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let named = |event: &&serde_json::Value| event["args"]["name"] == "backward";
    let backward = events.iter().find(named).unwrap()["tid"].clone();
    for rank in 0..4 {
        // Times and numbers.
        let times = |is: &dyn Fn(&serde_json::Value) -> bool, number: &str| -> Vec<(f64, usize)> {
            let own = events.iter().filter(|event| event["pid"] == rank && is(event));
            let mut times: Vec<(f64, usize)> = own
                .map(|event| {
                    (event["ts"].as_f64().unwrap(), event["args"][number].as_u64().unwrap() as usize)
                })
                .collect();
            times.sort_by(|one, other| one.0.total_cmp(&other.0));
            assert_eq!(times.len(), SLOW_UNITS * SLOW_STEPS, "rank {rank}: {times:?}");
            times
        };
        let computed = times(&|event| event["tid"] == backward && event["name"] == "unit", "unit");
        // Each unit has a weight and a bias, and one bucket.
        let launched = times(&|event| event["name"] == "launched", "bucket");
        for (computed, launched) in computed.chunks(SLOW_UNITS).zip(launched.chunks(SLOW_UNITS)) {
            for place in 0..SLOW_UNITS {
                assert_eq!((computed[place].1, launched[place].1), (SLOW_UNITS - 1 - place, place));
            }
            for (began, before) in computed[2..].iter().zip(launched) {
                assert!(before.0 <= began.0, "rank {rank}: {computed:?} {launched:?}");
            }
        }
    }
}

/// A layer with dropout.
#[derive(Module, Debug)]
struct Noisy {
    layer: Linear,
    dropout: Dropout,
}

/// A layer of 64 by 64.
fn noisy() -> Noisy {
    Noisy {
        layer: LinearConfig::new(64, 64).with_bias(false).init(&device()),
        dropout: DropoutConfig::new(0.5).init(),
    }
}

fn drawn() -> Vec<f32> {
    Tensor::<1>::random([4], Distribution::Default, &device()).into_data().iter().collect()
}

/// What the ranks drop in their units, and what they draw outside of them.
fn random(group: &ProcessGroup) -> Result<()> {
    let sharding = ShardingGroup::new(group)?;
    let units = vec![FullySharded::new(noisy(), &sharding)?, FullySharded::new(noisy(), &sharding)?];
    let mut fsdp = Fsdp::new(units, &sharding)?;
    let mut runs = Vec::new();
    for seed in [5, 5, 6] {
        device().seed(seed);
        let mut numbers = Vec::new();
        // Only one rank's gradients count.
        for only in 0..2 {
            let before = floats(&fsdp.model()[0].gather()?);
            let mut hidden = None;
            let loss = fsdp.forward(|units| {
                let x = Tensor::<2>::ones([1, 64], &device());
                let x = units[0].forward(x, |unit, x| unit.dropout.forward(unit.layer.forward(x)));
                hidden = Some(x.clone().inner());
                numbers.push(drawn());
                units[1].forward(x, |unit, x| unit.layer.forward(x)).sum()
            })?;
            numbers.push(drawn());
            let gradients = fsdp.backward(&(loss * f64::from(u8::from(group.rank().index() == only))))?;
            numbers.push(drawn());
            fsdp.step(&mut SgdConfig::new().init(), 1e-2, gradients)?;
            let after = floats(&fsdp.model()[0].gather()?);
            // The gradient of a weight of the first unit is nothing where its output was dropped.
            let moved = |column: usize| {
                (0..64).any(|row| after[0][row * 64 + column] != before[0][row * 64 + column])
            };
            let moved: Vec<bool> = (0..64).map(moved).collect();
            let kept: Vec<bool> = hidden.unwrap().into_data().iter::<f32>().map(|x| x != 0.0).collect();
            let kept = group.all_gather_object(&kept)?;
            assert_ne!(kept[0], kept[1], "ranks drop the same");
            assert_eq!(moved, kept[only], "backward dropped something else");
        }
        let all = group.all_gather_object(&numbers)?;
        assert_eq!(all[0], all[1], "what the program draws differs between ranks");
        for (place, number) in numbers.iter().enumerate() {
            assert!(!numbers[..place].contains(number), "{place}: the program draws the same again");
        }
        runs.push(numbers);
    }
    assert_eq!(runs[0], runs[1]);
    assert!(
        runs[0].iter().zip(&runs[2]).all(|(one, other)| one != other),
        "the program's seed has no effect"
    );
    Ok(())
}

fn ranks_drop_differently_and_the_program_draws_alike_on_all() {
    let (_server, mut ranks) = start("sharded", 2, &[(SCENARIO, "random"), ("PHALANX_TRANSPORT", "tcp")]);
    for rank in &mut ranks {
        let (finished, text) = rank.outcome("random numbers");
        assert!(finished, "{text}");
    }
}

type Noises = Fsdp<Vec<FullySharded<Noisy>>>;

fn noises(units: &[FullySharded<Noisy>], x: Tensor<2>) -> Tensor<2> {
    units.iter().fold(x, |x, unit| unit.forward(x, |unit, x| unit.dropout.forward(unit.layer.forward(x))))
}

/// The weights of a run of six steps are those of one that ends after three, with the device seeded before each step.
fn resumed(group: &ProcessGroup) -> Result<()> {
    let rank = u64::from(group.rank().get());
    let begin = || -> Result<(Noises, ModuleOptimizer)> {
        let sharding = ShardingGroup::new(group)?;
        let unit = || FullySharded::new(noisy().map(&mut Waves::default()), &sharding);
        Ok((Fsdp::new(vec![unit()?, unit()?], &sharding)?, AdamWConfig::new().init()))
    };
    let train =
        |fsdp: &mut Noises, optimizer: &mut ModuleOptimizer, seed: u64, steps: Range<u64>| -> Result<()> {
            for step in steps {
                device().seed(1000 * seed + 10 * step + rank);
                let x = Tensor::<2>::ones([1, 64], &device());
                let loss = fsdp.forward(|units| noises(units, x).powi_scalar(2).mean())?;
                let gradients = fsdp.backward(&loss)?;
                fsdp.step(optimizer, 1e-2, gradients)?;
            }
            Ok(())
        };
    let weights = |fsdp: &Noises| -> Result<Vec<Vec<f32>>> {
        let mut all = Vec::new();
        for unit in fsdp.model() {
            all.extend(floats(&unit.gather()?));
        }
        Ok(all)
    };
    let whole = |seed: u64| -> Result<Vec<Vec<f32>>> {
        let (mut fsdp, mut optimizer) = begin()?;
        train(&mut fsdp, &mut optimizer, seed, 0..6)?;
        weights(&fsdp)
    };
    let expected = whole(5)?;
    assert_eq!(whole(5)?, expected, "the same seed, and other weights");
    assert_ne!(whole(6)?, expected, "the program's seed has no effect on what units drop");

    let checkpoints = Checkpoints::open(std::env::var(FOLDER).unwrap(), group)?;
    let (mut fsdp, mut optimizer) = begin()?;
    train(&mut fsdp, &mut optimizer, 5, 0..3)?;
    checkpoints.save_sharded(3, |snapshot| fsdp.save(&optimizer, snapshot, "model"))?;
    checkpoints.finish()?;
    drop(fsdp);
    let (mut fsdp, mut optimizer) = begin()?;
    fsdp.load(&mut optimizer, &checkpoints.newest()?.unwrap(), "model")?;
    // An evaluation, which the run of six steps has not made.
    let evaluated = fsdp.evaluate(|units| noises(units, Tensor::ones([1, 64], &plain())))?;
    assert!(evaluated.into_data().iter::<f32>().all(|x| x != 0.0), "an evaluation drops something");
    train(&mut fsdp, &mut optimizer, 5, 3..6)?;
    assert_eq!(weights(&fsdp)?, expected, "what goes on drops something else");
    Ok(())
}

fn units_of_a_run_that_goes_on_drop_what_they_would_have_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let folder = (FOLDER, folder.path().to_str().unwrap());
    let (_server, mut ranks) =
        start("sharded", 2, &[(SCENARIO, "resumed"), ("PHALANX_TRANSPORT", "tcp"), folder]);
    for rank in &mut ranks {
        let (finished, text) = rank.outcome("a run that goes on");
        assert!(finished, "{text}");
    }
}

/// Here, because no other test of this program draws from the same random numbers meanwhile.
fn dropout_drops_the_same_in_a_unit_s_backward_pass() {
    let alone = ProcessGroup::alone().unwrap();
    let sharding = ShardingGroup::new(&alone).unwrap();
    let units =
        vec![FullySharded::new(noisy(), &sharding).unwrap(), FullySharded::new(noisy(), &sharding).unwrap()];
    let mut fsdp = Fsdp::new(units, &sharding).unwrap();
    let before: Vec<Noisy> = fsdp.model().iter().map(|unit| unit.gather().unwrap()).collect();
    let mut kept = Vec::new();
    for _ in 0..2 {
        let mut hidden = None;
        let loss = fsdp.forward(|units| {
            let x = Tensor::<2>::ones([1, 64], &device());
            let x = units[0].forward(x, |unit, x| unit.dropout.forward(unit.layer.forward(x)));
            hidden = Some(x.clone().inner());
            units[1].forward(x, |unit, x| unit.layer.forward(x)).sum()
        });
        let gradients = fsdp.backward(&loss.unwrap()).unwrap();
        // The gradient of a weight of the first unit is that of its output, and nothing where the output was dropped.
        let forward: Vec<bool> = hidden.unwrap().into_data().iter::<f32>().map(|x| x != 0.0).collect();
        fsdp.step(&mut SgdConfig::new().init(), 1.0, gradients).unwrap();
        let after = floats(&fsdp.model()[0].gather().unwrap());
        let moved: Vec<bool> = (0..64)
            .map(|column| {
                (0..64).any(|row| after[0][row * 64 + column] != floats(&before[0])[0][row * 64 + column])
            })
            .collect();
        if kept.is_empty() {
            assert_eq!(moved, forward, "backward dropped something else");
        }
        assert!(forward.iter().any(|kept| *kept) && forward.iter().any(|kept| !*kept));
        kept.push(forward);
    }
    assert_ne!(kept[0], kept[1], "each step drops something else");
}
