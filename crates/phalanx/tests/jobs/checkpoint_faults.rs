//! Faults of rank 0 while it writes a checkpoint, in jobs of two and of four workers, which start again or go on without it.
//! This program starts itself as the workers.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use phalanx::checkpoint::Checkpoints;
use phalanx::elastic::{self, Context, Options, Plain};
use phalanx::launch::{Event, Job, Outcome, Stream};
use phalanx::{ProcessGroup, ReduceOp, WorldSize};
use rustix::process::{Pid, Resource, Rlimit, Signal, getpid, kill_process, setrlimit};

use crate::harness::{ROLE, run_job};

const FOLDER: &str = "PHALANX_TEST_FOLDER";
const LIMIT: Duration = Duration::from_secs(60);
/// Set in elastic jobs: how many workers there are in the end.
const WORKERS: &str = "PHALANX_TEST_WORKERS";
const STEPS: u64 = 150;
/// Where they wait for each other.
const HOLD: u64 = 140;
/// The step from which on the next checkpoint meets the fault.
const DUE: u64 = 40;
/// Long enough that a checkpoint takes a while.
const BALLAST: usize = 8 << 20;

pub const TESTS: &[(&str, fn())] = &[
    ("rank_0_is_killed_while_it_writes", || jobs("kill")),
    ("rank_0_is_frozen_while_it_writes", || jobs("stop")),
    ("the_disk_is_full_while_rank_0_writes", || jobs("full")),
    ("rank_0_cannot_open_its_folder", rank_0_cannot_open_its_folder),
];

/// What this program does as a worker.
pub fn play(fault: &str) {
    crate::harness::abort_after(LIMIT);
    if let Err(error) = work(fault) {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

/// The step and a number that every step changes.
type Training = Plain<(u64, Vec<f32>)>;

fn work(fault: &str) -> phalanx::Result<()> {
    let mut options = Options::from_env()?;
    // The group finds a worker that is killed or stopped; a worker that is only slow is not given up.
    options.keep_alive = (Duration::from_millis(200), Some(25));
    let mut training: Training = Plain((0, vec![1.0; 4]));
    elastic::run_with(&options, &mut training, |context: &mut Context<'_, Training>, group| {
        train(context, group, fault)
    })?;
    println!("done {:08x}", training.0.1[0].to_bits());
    Ok(())
}

fn train(context: &mut Context<'_, Training>, group: &ProcessGroup, fault: &str) -> phalanx::Result<()> {
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let runs = folder.join("runs");
    let cannot = fault == "open" && group.rank().is_main() && is_due(&folder);
    let checkpoints =
        Checkpoints::open(if cannot { folder.join("due") } else { runs.clone() }, group)?.keep(2);
    if context.commits() == 0
        && let Some(saved) = checkpoints.newest()?
    {
        context.state.0 = (saved.step(), saved.value("weights")?);
    }
    println!("begins {} {} {}", group.rank(), std::process::id(), context.state.0.0);
    let workers = std::env::var(WORKERS).map_or(0, |workers| workers.parse::<u32>().unwrap());
    while context.state.0.0 < STEPS {
        // However late who was lost comes back: commits that change nothing let it in.
        while context.state.0.0 == HOLD && group.world_size().get() < workers {
            std::thread::sleep(Duration::from_millis(5));
            context.commit()?;
        }
        let (step, weights) = &mut context.state.0;
        let mut gradients = weights.clone();
        group.all_reduce(&mut gradients, ReduceOp::Avg)?;
        advance(weights, &gradients);
        *step += 1;
        std::thread::sleep(Duration::from_millis(2));
        let (step, weights) = (*step, weights.clone());
        context.commit()?;
        // Behind the commit, because the checkpoint before may still be written. A commit that lets others in comes back without this.
        if step >= DUE && group.rank().is_main() && is_due(&folder) {
            strike(fault, runs.clone());
        }
        if step % 10 == 0 {
            checkpoints.save(step, |snapshot| {
                snapshot.part("ballast", vec![step as u8; BALLAST])?;
                snapshot.value("weights", &weights)
            })?;
            println!("step {step}");
        }
    }
    checkpoints.finish()
}

fn advance(weights: &mut [f32], gradients: &[f32]) {
    weights.iter_mut().zip(gradients).for_each(|(weight, gradient)| *weight -= 0.01 * gradient.sin());
}

/// Once in a job.
fn is_due(folder: &Path) -> bool {
    File::create_new(folder.join("due")).is_ok()
}

/// Sees to it that this process meets with the fault while it writes its next checkpoint.
fn strike(fault: &str, runs: PathBuf) {
    if fault == "full" {
        let most = Some(BALLAST as u64 / 2);
        setrlimit(Resource::Fsize, Rlimit { current: most, maximum: None }).unwrap();
    }
    let signal = match fault {
        "kill" => Signal::KILL,
        "stop" => Signal::STOP,
        _ => return,
    };
    std::thread::spawn(move || {
        while !is_writing(&runs) {
            std::thread::sleep(Duration::from_micros(100));
        }
        kill_process(getpid(), signal).unwrap();
    });
}

/// Whether there is a file in a folder that is no checkpoint yet.
fn is_writing(runs: &Path) -> bool {
    let files = |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().flatten().collect::<Vec<_>>();
    let unnamed =
        files(runs).into_iter().filter(|entry| entry.file_name().to_string_lossy().starts_with(".writing-"));
    unnamed.into_iter().any(|entry| !files(&entry.path()).is_empty())
}

/// What a job has said.
#[derive(Debug, Default)]
struct Seen {
    /// Processes and the steps at which they began, in order.
    begins: Vec<(u32, u64)>,
    furthest: u64,
    done: BTreeSet<String>,
    lost: usize,
    stderr: String,
}

/// Runs the job; whoever is frozen goes on when the others are far ahead.
fn run(fault: &str, workers: u32, is_elastic: bool, folder: &Path) -> Seen {
    let size = WorldSize::new(workers).unwrap();
    let mut job = Job::new("sh", size)
        .arguments(["-c", "exec \"$0\"", std::env::current_exe().unwrap().to_str().unwrap()])
        .variable(ROLE, format!("checkpoint_faults::{fault}"))
        .variable(FOLDER, folder.to_str().unwrap())
        .grace(Duration::from_secs(2))
        .max_restarts(1);
    if is_elastic {
        job = job.min_workers(WorldSize::ONE).variable(WORKERS, workers.to_string());
    }
    let mut seen = Seen::default();
    let mut victim = None;
    let report = run_job(&job, LIMIT, |event| match event {
        Event::Lost { .. } => seen.lost += 1,
        Event::Line { stream: Stream::Stderr, text, .. } => {
            seen.stderr += &format!("{}\n", String::from_utf8_lossy(text));
        }
        Event::Line { text, .. } => {
            let line = std::str::from_utf8(text).unwrap();
            let mut words = line.split(' ').skip(1).map(|word| word.to_owned());
            let mut next = || words.next().unwrap();
            if line.starts_with("begins") {
                let (rank, pid, step) = (next(), next().parse().unwrap(), next().parse().unwrap());
                if rank == "0" && victim.is_none() {
                    victim = Some(pid);
                }
                seen.begins.push((pid, step));
            } else if line.starts_with("step") {
                seen.furthest = next().parse::<u64>().unwrap().max(seen.furthest);
                if fault == "stop"
                    && is_elastic
                    && seen.furthest >= DUE + 30
                    && let Some(victim) = victim
                {
                    let _ = kill_process(Pid::from_raw(victim as i32).unwrap(), Signal::CONT);
                }
            } else {
                seen.done.insert(line.to_owned());
            }
        }
        _ => {}
    });
    assert!(
        matches!(report.outcome, Outcome::Succeeded),
        "{fault} of {workers}: {:?} {seen:?}",
        report.outcome
    );
    seen
}

/// The last checkpoint is whole, its job ended as if nothing had happened, and nothing is left of what was not finished.
fn check(seen: &Seen, folder: &Path) {
    let mut weights = vec![1.0f32; 4];
    for _ in 0..STEPS {
        let gradients = weights.clone();
        advance(&mut weights, &gradients);
    }
    assert_eq!(seen.done, BTreeSet::from([format!("done {:08x}", weights[0].to_bits())]), "{seen:?}");
    let runs = folder.join("runs");
    let checkpoints = Checkpoints::open(&runs, &ProcessGroup::alone().unwrap()).unwrap();
    let saved = checkpoints.newest().unwrap().unwrap();
    assert!(checkpoints.skipped().is_empty(), "{:?}", checkpoints.skipped());
    assert_eq!(saved.step(), STEPS);
    assert_eq!(saved.value::<Vec<f32>>("weights").unwrap(), weights);
    assert!(saved.part("ballast").unwrap() == vec![STEPS as u8; BALLAST]);
    let names = std::fs::read_dir(&runs).unwrap().map(|entry| entry.unwrap().file_name());
    let hidden: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with('.')).collect();
    assert_eq!(hidden.len(), 1, "besides the claim: {hidden:?}");
}

fn jobs(fault: &str) {
    for workers in [2, 4] {
        for is_elastic in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let seen = run(fault, workers, is_elastic, folder.path());
            check(&seen, folder.path());
            let again = seen.begins[workers as usize..].iter().map(|(_, step)| *step).max();
            let again = again.unwrap_or_else(|| panic!("nobody has begun again: {seen:?}"));
            // On the disk is what was finished before; in memory, the last commit.
            let least = if is_elastic { DUE } else { DUE - 20 };
            assert!(again >= least, "{fault} of {workers}, elastic {is_elastic}: again from {again}");
            assert_eq!(seen.lost, usize::from(is_elastic && fault != "stop"), "{seen:?}");
            println!("{fault}, {workers} workers, elastic {is_elastic}: again from {again}");
        }
    }
}

fn rank_0_cannot_open_its_folder() {
    for workers in [2, 4] {
        let folder = tempfile::tempdir().unwrap();
        let seen = run("open", workers, true, folder.path());
        check(&seen, folder.path());
        // The others have taken it for what it is: rank 0's failure.
        assert!(seen.lost == 1 && seen.stderr.contains("cannot keep checkpoints in"), "{seen:?}");
    }
}
