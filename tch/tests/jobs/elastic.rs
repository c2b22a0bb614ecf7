//! A model of tch in an elastic job with real processes, one of which is killed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use phalanx::elastic::{self, Context, Options};
use phalanx::launch::{Event, Job, Outcome, Stream};
use phalanx::reducer::hooks::{PowerSgd, PowerSgdOptions};
use phalanx::sampler::ElasticSampler;
use phalanx::{Error, ProcessGroup, Rank, Result, WorldSize};
use phalanx_tch::{Optimizer, Rule, TrainState};
use rustix::process::{Pid, Signal, getpid, kill_process};
use tch::{Kind, Tensor, nn};

use crate::common::{Mlp, device, samples};
use crate::nccl;

const STEPS: u64 = 60;
const SAMPLES: usize = 200;
/// The step in which a worker kills itself, if it does. No commit is behind it.
const DIES_AT: u64 = 22;
/// The step from which on a communication hook compresses, if there is one. Nobody dies before.
const COMPRESSES_AT: u64 = 10;
/// Set where training goes on until the replacement has come.
const REPLACED: &str = "PHALANX_TEST_REPLACED";

pub const TESTS: &[(&str, fn())] = &[
    ("model_and_optimizer_outlive_a_worker_that_is_killed", || drop(killed("all", 3, &[]))),
    ("without_a_replacement_fewer_go_on", || drop(killed("all", 0, &[]))),
    ("a_communication_hook_goes_on_in_the_next_round", || hook_goes_on(&[])),
    ("a_death_in_backward_costs_no_step", || drop(died_in_backward(3, &[]))),
];

/// Those that need a CUDA device.
pub const OVER_NCCL: &[(&str, fn())] = &[
    ("over_nccl_model_and_optimizer_outlive_a_worker_that_is_killed", || drop(killed("all", 3, OVER))),
    ("over_nccl_fewer_go_on_without_a_replacement", || drop(killed("all", 0, OVER))),
    ("over_nccl_a_communication_hook_goes_on_in_the_next_round", || hook_goes_on(OVER)),
    ("over_nccl_a_hook_of_the_program_s_own_does_a_step_again", || {
        drop(died_in_backward_as("dies own", 3, OVER))
    }),
];

/// Those that need the stand-in, which says what is called.
pub const ON_STAND_IN: &[(&str, fn())] = &[
    ("over_nccl_a_death_in_backward_costs_none_of_eight_ranks_a_step", || communicators(8 + 7, 0, OVER)),
    ("over_nccl_the_survivors_of_eight_ranks_shrink_their_communicator", || communicators(8, 7, REVOKES)),
];

/// The variable by which a worker's gradients are averaged by NCCL.
const OVER: &[(&str, &str)] = &[(nccl::NCCL, "1")];
/// The same with an NCCL that has `ncclCommRevoke`.
const REVOKES: &[(&str, &str)] = &[(nccl::NCCL, "1"), ("STANDIN_NCCL_VERSION", "22807")];

type Training = TrainState<ElasticSampler>;

/// What a worker does. No seed is set: newcomers begin with other parameters.
pub fn play(case: &str, folder: &Path) -> Result<()> {
    let model = Mlp::new(&[8, 32, 3]);
    let norm = nn::batch_norm1d(model.store.root() / "norm", 3, Default::default());
    let optimizer = Optimizer::new(&model.store, Rule::ADAMW)?;
    let training = TrainState::new(&model.store, optimizer, ElasticSampler::new(SAMPLES).seed(3))?;
    let mut training = nccl::over_nccl(training)?;
    let (xs, ys) = samples(0, SAMPLES);
    let (options, replaced) = (Options::from_env()?, std::env::var_os(REPLACED).is_some());
    let rank = elastic::run_with(
        &options,
        &mut training,
        |context: &mut Context<'_, Training>, group: &ProcessGroup| {
            println!(
                "round {} rank {} of {} step {}",
                context.round(),
                group.rank(),
                group.world_size(),
                context.state.steps()
            );
            if case == "hook" {
                let options = PowerSgdOptions::default().start_iter(COMPRESSES_AT).min_compression_rate(1.0);
                context.state.ddp.register_comm_hook(PowerSgd::new(options)?)?;
            }
            if case == "dies own" {
                context.state.ddp.register_device_hook(nccl::Stateless)?;
            }
            let mut is_first = true;
            // Of three workers one dies: the last of the rounds to come has all of them again.
            let is_last = !replaced || context.round() > 1 && group.world_size().get() == 3;
            while context.state.steps() < STEPS || !is_last {
                let (rank, world) = (context.rank(), context.world_size());
                let Some(batch) = context.state.progress.next_batch(5, rank, world) else {
                    context.state.progress.next_epoch();
                    continue;
                };
                let batch: Vec<i64> = batch.into_iter().map(|index| index as i64).collect();
                let batch = Tensor::from_slice(&batch).to_device(device());
                let (x, y) = (xs.index_select(0, &batch), ys.index_select(0, &batch));
                let loss = || (model.forward(&x).apply_t(&norm, true) - &y).square().mean(Kind::Float);
                let loss = context.state.ddp.forward(loss)?;
                nccl::assert_averages(&context.state.ddp);
                context.state.optimizer.zero_grad()?;
                if case.starts_with("dies") && context.state.steps() == DIES_AT {
                    dies_behind_the_others(folder, rank, world);
                }
                if case == "hook" {
                    // A step with a hook that keeps a state cannot be done again.
                    context.state.ddp.backward(&loss)?;
                    if std::mem::take(&mut is_first) {
                        let (sent, step) = (context.state.ddp.communicated_bytes(), context.state.steps());
                        println!("sent {sent} bytes in step {step} of round {}", context.round());
                    }
                } else {
                    let averaged = TrainState::backward(context, &loss)?;
                    for missing in &averaged.missing {
                        println!("rank {missing} is missing in step {}", context.state.steps());
                    }
                    context.state.progress.put_back(&averaged.missing);
                }
                context.state.step(0.01)?;
                std::thread::sleep(Duration::from_millis(5));
                if context.state.steps().is_multiple_of(4) {
                    context.commit()?;
                    println!("commit {}", context.state.steps());
                }
            }
            if !context.state.ddp.replicas_identical()? {
                return Err(Error::mismatch("the replicas have drifted apart"));
            }
            Ok::<_, Error>(context.rank())
        },
    )?;
    assert!(training.steps() >= STEPS);
    model.store.save(folder.join(format!("{rank}.safetensors"))).unwrap();
    println!("done rank {rank}");
    Ok(())
}

/// Ends the process of rank 1 when all others have nothing before them but backward, and have had some time for it.
fn dies_behind_the_others(folder: &Path, rank: Rank, world: WorldSize) {
    let came = |rank: u32| folder.join(format!("{rank}.came"));
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

fn job(case: &str, workers: u32, folder: &Path, variables: &[(&str, &str)]) -> Job {
    let job = crate::job(&format!("elastic {case}"), workers, folder).min_workers(WorldSize::new(2).unwrap());
    variables.iter().fold(job, |job, (name, value)| job.variable(name, value))
}

/// Gives the lines that the workers have written.
fn killed(case: &str, restarts: u32, variables: &[(&str, &str)]) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let mut job = job(case, 3, folder.path(), variables);
    if restarts > 0 {
        job = job.max_restarts(restarts).variable(REPLACED, "1");
    }
    let (mut pids, mut stderr, mut lines) = (BTreeMap::new(), String::new(), Vec::new());
    let mut victim = Some(1);
    let report = crate::run(&job, |event| match event {
        Event::Started { rank, pid, .. } => {
            pids.insert(rank.get(), *pid);
        }
        Event::Line { stream: Stream::Stderr, text, .. } => {
            stderr += &format!("{}\n", String::from_utf8_lossy(text))
        }
        Event::Line { text, .. } => {
            let line = String::from_utf8_lossy(text).into_owned();
            if line.starts_with("commit 2")
                && let Some(rank) = victim.take()
            {
                let _ = kill_process(Pid::from_raw(pids[&rank] as i32).unwrap(), Signal::KILL);
            }
            lines.push(line);
        }
        _ => {}
    });
    assert!(matches!(report.outcome, Outcome::Succeeded), "{:?} {stderr}", report.outcome);
    assert!(victim.is_none(), "nobody was killed");
    assert_same_models(folder.path(), &lines, if restarts > 0 { 3 } else { 2 });
    lines
}

/// Also in a worker that was not there when it compressed first: models would differ.
fn hook_goes_on(variables: &[(&str, &str)]) {
    let lines = killed("hook", 3, variables);
    let sent = |line: &String| {
        let words: Vec<&str> = line.split(' ').collect();
        let [bytes, step] = [1, 5].map(|place| words[place].parse::<u64>().unwrap());
        (bytes, step)
    };
    let sent: Vec<(u64, u64)> = lines.iter().filter(|line| line.starts_with("sent")).map(sent).collect();
    // Three workers in the first round, two or three in the second.
    assert!(sent.len() >= 5, "{lines:?}");
    for (bytes, step) in sent {
        // 393 numbers need a gradient.
        assert!(if step < COMPRESSES_AT { bytes >= 4 * 393 } else { bytes < 4 * 393 / 2 }, "{lines:?}");
        assert!(step == 0 || step >= COMPRESSES_AT, "it was killed too early: {lines:?}");
    }
}

/// Eight ranks make so many communicators anew, and so many by a shrink.
fn communicators(anew: usize, shrunk: usize, variables: &[(&str, &str)]) {
    let lines = died_in_backward(8, &[variables, &[("STANDIN_NCCL_SAY", "1")]].concat());
    let count = |name: &str| lines.iter().filter(|line| *line == name).count();
    assert_eq!([count("ncclCommInitRankConfig"), count("ncclCommShrink")], [anew, shrunk], "{lines:?}");
}

/// Gives the lines that the workers have written.
fn died_in_backward(workers: usize, variables: &[(&str, &str)]) -> Vec<String> {
    died_in_backward_as("dies", workers, variables)
}

fn died_in_backward_as(case: &str, workers: usize, variables: &[(&str, &str)]) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let job = job(case, workers as u32, folder.path(), variables);
    let (mut stderr, mut lines) = (String::new(), Vec::new());
    let report = crate::run(&job, |event| match event {
        Event::Line { stream: Stream::Stderr, text, .. } => {
            stderr += &format!("{}\n", String::from_utf8_lossy(text))
        }
        Event::Line { text, .. } => lines.push(String::from_utf8_lossy(text).into_owned()),
        _ => {}
    });
    assert!(matches!(report.outcome, Outcome::Succeeded), "{:?} {stderr}", report.outcome);
    assert_same_models(folder.path(), &lines, workers - 1);
    let missing = format!("rank 1 is missing in step {DIES_AT}");
    assert_eq!(lines.iter().filter(|line| **line == missing).count(), workers - 1, "{lines:?}");
    // Nobody went back to a commit, which would begin a round.
    assert_eq!(lines.iter().filter(|line| line.starts_with("round")).count(), workers, "{lines:?}");
    lines
}

/// `workers` ended, with the same model; newcomers too.
fn assert_same_models(folder: &Path, lines: &[String], workers: usize) {
    let done = lines.iter().filter(|line| line.starts_with("done")).count();
    assert_eq!(done, workers, "{lines:?}");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_model = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "safetensors");
    let files: Vec<PathBuf> = files.filter(is_model).collect();
    let of = |path: &Path| {
        let mut tensors = Tensor::read_safetensors(path).unwrap();
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        // Running statistics are each rank's own after the last step.
        let own = |name: &str| name.contains("running");
        let elements = |tensor: &Tensor| crate::common::elements(tensor);
        tensors.iter().filter(|(name, _)| !own(name)).map(|(_, tensor)| elements(tensor)).collect::<Vec<_>>()
    };
    assert!(files.len() == done && files.iter().all(|path| of(path) == of(&files[0])));
}
