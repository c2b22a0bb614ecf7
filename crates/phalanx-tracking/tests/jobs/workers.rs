//! What this program is as a worker.

use std::path::{Path, PathBuf};
use std::time::Duration;

use phalanx::elastic::{self, Parts, State};
use phalanx::env::LaunchEnv;
use phalanx::{ProcessGroup, ReduceOp, Result};
use phalanx_tracking::{Console, Run, RunOptions, logs};

pub const FOLDER: &str = "PHALANX_TEST_FOLDER";
/// The step at which the training goes on.
pub const RESUME: &str = "PHALANX_TEST_RESUME";
/// Set where steps take their time.
pub const SLOW: &str = "PHALANX_TEST_SLOW";
pub const STEPS: u64 = 100;

pub fn play(role: &str) {
    crate::harness::abort_after(crate::LIMIT);
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let outcome = match role {
        "train" => train(&folder),
        "logs" => with_logs(&folder),
        "restarted" => restarted(&folder),
        "elastic" => in_rounds(&folder),
        "fill" => fill(&folder),
        "alone" => alone(&folder),
        other => panic!("no role {other}"),
    };
    if let Err(error) = outcome {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn options(folder: &Path) -> RunOptions {
    RunOptions::new(folder).tensorboard().json_lines().csv().flush_interval(Duration::from_millis(5))
}

fn train(folder: &Path) -> Result<()> {
    let group = phalanx::init()?;
    let run = Run::start(&group, options(folder))?;
    let first = std::env::var(RESUME).map_or(0, |step| step.parse().unwrap());
    // Where it is slow it is killed before its end.
    let (last, pause) = if std::env::var_os(SLOW).is_some() { (u64::MAX, 2) } else { (STEPS, 0) };
    for step in first..last {
        run.log(step, "loss", 0.5);
        println!("{step}");
        std::thread::sleep(Duration::from_millis(pause));
    }
    run.finish()?;
    Ok(())
}

fn with_logs(folder: &Path) -> Result<()> {
    let group = phalanx::init()?;
    let console = Console::stderr().lines_every(Duration::from_secs(3600));
    logs::install(group.rank(), folder.join("logs"), &console)?;
    let run = Run::start(&group, options(folder).progress(&console, Some(STEPS)))?;
    for step in 0..STEPS {
        tracing::info!("rank {} at step {step}", group.rank());
        run.log_mean(step, "loss", group.rank().get())?;
    }
    run.finish()?;
    Ok(())
}

/// Fails in its first two lives, in two ways, and goes on at a checkpoint each time: of steps 20 and 40.
fn restarted(folder: &Path) -> Result<()> {
    let group = phalanx::init()?;
    let life = LaunchEnv::from_process()?.map_or(0, |launched| launched.restart_count.0);
    let run = Run::start(&group, options(folder))?;
    for step in 20 * life..STEPS {
        run.log_mean(step, "loss", 0.5)?;
        if step == 20 * life + 30 && life < 2 {
            // So that what is behind the checkpoint is in the record.
            run.flush();
            match (life, group.rank().is_main()) {
                (0, true) => panic!("a bug in step {step}"),
                (1, true) => std::process::abort(),
                _ => {}
            }
        }
    }
    run.finish()?;
    Ok(())
}

struct Progress {
    step: u64,
}

impl State for Progress {
    fn save(&self, parts: &mut Parts) -> Result<()> {
        parts.serialize("step", &self.step)
    }

    fn load(&mut self, parts: &Parts) -> Result<()> {
        self.step = parts.deserialize("step")?;
        Ok(())
    }
}

/// Rank 0 is gone after step 35, and the last commit was that of step 30.
fn in_rounds(folder: &Path) -> Result<()> {
    elastic::run(&mut Progress { step: 0 }, |context, group: &ProcessGroup| {
        let run = Run::start(group, options(folder))?;
        let is_first_round = group.world_size().get() == 2;
        while context.state.step < STEPS {
            let step = context.state.step;
            group.all_reduce(&mut [0.0f32; 8], ReduceOp::Sum)?;
            run.log(step, "loss", std::process::id());
            if is_first_round && step == 35 && group.rank().is_main() {
                run.flush();
                std::process::abort();
            }
            context.state.step += 1;
            if context.state.step % 10 == 0 {
                context.commit()?;
            }
        }
        run.finish()?;
        Ok(())
    })
}

/// As a program without ranks, more than some limit of a file's size allows.
fn alone(folder: &Path) -> Result<()> {
    let run = Run::start(&ProcessGroup::alone()?, RunOptions::new(folder).json_lines())?;
    (0..20 * STEPS).for_each(|step| run.log(step, "loss", 0.5));
    run.finish()?;
    Ok(())
}

/// Logs until the disk is full, and then some; makes room; waits until everything is there.
fn fill(folder: &Path) -> Result<()> {
    let group = phalanx::init()?;
    std::fs::write(folder.join("ballast"), vec![1; 40 << 10]).unwrap();
    let run =
        Run::start(&group, RunOptions::new(folder).json_lines().flush_interval(Duration::from_millis(1)))?;
    let steps = 600;
    for step in 0..steps {
        run.log(step, "loss", 0.5);
        std::thread::sleep(Duration::from_micros(200));
    }
    // However late the writer is, it has met the full disk.
    run.flush();
    std::fs::remove_file(folder.join("ballast")).unwrap();
    let report = run.finish()?;
    assert!(!report.sinks.is_empty(), "the disk was not full");
    println!("{steps}");
    Ok(())
}
